"""Who may run now: the engine's slots and named limits, shared by all its runs.

At most `concurrency` attempts are alive. What is ready waits in one queue; a map stands in it once, however
many items it has, and goes behind the others after each item, so that no wide map starves another branch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from dagresume.clock import Clock, Timer
from dagresume.errors import DefinitionError
from dagresume.policy import Limit

__all__ = ["Gate", "Pool", "Source"]


class Source(Protocol):
    """Something in the queue that gives attempts to start, one at a time.

    `run.waiting` counts the sources of a run that are in the queue or parked at a limit.
    """

    run: Any
    gate: Gate | None
    queued: bool

    @property
    def dropped(self) -> bool:
        """Whether its run starts nothing any more."""

    @property
    def more(self) -> bool:
        """Whether `take` has another one now."""

    def take(self) -> Any:
        """Give the next attempt."""


class Gate:
    """A named limit: at most `concurrency` at once, at most one per `1/rate`, and a pause when the other side
    asks for it.
    """

    def __init__(self, limit: Limit, clock: Clock, reopen: Callable[[Gate], None]) -> None:
        self._limit, self._clock, self._reopen = limit, clock, reopen
        self._inside = 0
        self._next_at = self._paused_until = 0.0
        self._timer: Timer | None = None
        self.parked: deque[Source] = deque()

    def admits(self) -> bool:
        """Say whether one more may start now; if only time is missing, wake up when it has passed."""
        if self._limit.concurrency is not None and self._inside >= self._limit.concurrency:
            return False
        wait = self._next_at - self._clock.monotonic()
        if wait <= 0:
            return True
        if self._timer is None:
            self._timer = self._clock.call_later(wait, self._due)
        return False

    def enter(self) -> None:
        """Count one in."""
        self._inside += 1
        if self._limit.per_second is not None:
            self._next_at = max(self._next_at, self._clock.monotonic()) + 1 / self._limit.per_second

    def leave(self) -> None:
        """Count one out."""
        self._inside -= 1
        if self.parked and self.admits():
            self._reopen(self)

    def pause(self, seconds: float) -> None:
        """Let nobody start for so long."""
        self._paused_until = max(self._paused_until, self._clock.monotonic() + seconds)
        self._next_at = max(self._next_at, self._paused_until)

    @property
    def paused(self) -> bool:
        """Whether the other side has asked to be left alone just now."""
        return self._clock.monotonic() < self._paused_until

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _due(self) -> None:
        self._timer = None
        self._reopen(self)


class Pool:
    """The slots of an engine and the queue in front of them."""

    def __init__(
        self,
        concurrency: int,
        limits: Mapping[str, Limit],
        clock: Clock,
        *,
        full: Callable[[], bool],
        wake: Callable[[], None],
        lapsed: Callable[[], bool],
    ) -> None:
        self.free = self.size = concurrency
        self._full, self._wake, self._lapsed = full, wake, lapsed
        self.awaited: deque[Source] = deque()  # what waits for a slot
        self._gates = {name: Gate(limit, clock, self._unpark) for name, limit in limits.items()}

    def gate(self, name: str | None, node: str) -> Gate | None:
        """Give the limit a node names; DefinitionError if the engine has none of that name."""
        if name is None:
            return None
        try:
            return self._gates[name]
        except KeyError:
            known = ", ".join(sorted(self._gates)) or "none"
            raise DefinitionError(
                f"node {node!r} names limit={name!r}, which this engine does not have (it has: {known})."
                f" Engine(…, limits={{{name!r}: Limit(concurrency=8)}})."
            ) from None

    def offer(self, source: Source) -> None:
        """Put something that can start at the end of the queue; once, however often it is offered."""
        if not source.queued:
            source.queued = True
            source.run.waiting += 1
            self.awaited.append(source)

    @property
    def idle(self) -> bool:
        """Whether a slot is free and nobody waits for it."""
        return self.free > 0 and not self.awaited and not self._full()

    @property
    def halted(self) -> bool:
        """Whether nothing may start although something is ready: our runs may be somebody else's by now."""
        return bool(self.awaited) and self._lapsed()

    def next(self) -> Any:
        """Give the next attempt with a slot and a place in its limit reserved; None if nothing may start
        now.
        """
        ready = self.awaited
        while ready and self.free > 0 and not self._full():
            source = ready.popleft()
            attempt = None if source.dropped or not source.more else self.reserve(source)
            if attempt is None and source.more and not source.dropped:
                source.gate.parked.append(source)  # type: ignore[union-attr]  # only a gate refuses here
                continue
            source.queued = False
            source.run.waiting -= 1
            if attempt is None:
                if source.gate is not None and source.gate.parked and source.gate.admits():
                    self._unpark(source.gate)  # it was let in and does not go: the next one may
                continue
            if source.more:
                self.offer(source)
            return attempt
        return None

    def reserve(self, source: Source) -> Any:
        """Take an attempt from this source if a slot and its limit allow it, else None."""
        gate = source.gate
        if self.free <= 0 or (gate is not None and not gate.admits()):
            return None
        self.free -= 1
        if gate is not None:
            gate.enter()
            if gate.parked and gate.admits():
                self._unpark(gate)
        return source.take()

    def release(self, gate: Gate | None) -> None:
        """Give back a slot and the place in a limit."""
        self.free += 1
        if gate is not None:
            gate.leave()

    def close(self) -> None:
        """Stop all timers."""
        for gate in self._gates.values():
            gate.close()

    def _unpark(self, gate: Gate) -> None:
        """Put the first that waits at this gate back into the queue, in front: it has waited before.

        One at a time, and the next one when this one went in: a thousand nodes behind one limit cost no
        thousand looks.
        """
        if gate.parked:
            self.awaited.appendleft(gate.parked.popleft())
            self._wake()
