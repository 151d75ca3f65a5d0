"""Attempts of a run that wait for their time, without holding a slot meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dagresume import events as ev
from dagresume.clock import Timer
from dagresume.events import Record
from dagresume.jobs import Driver, Step

__all__ = ["Backoffs"]


@dataclass(slots=True, eq=False)
class _Backoff:
    """An attempt that is due later; `go` adds what begins then to a step."""

    path: str
    attempt: int
    due: int
    go: Callable[[Step], None]
    timer: Timer | None = None


class Backoffs:
    """The open back-offs of one run."""

    def __init__(self, run: Driver) -> None:
        self._run = run
        self._open: set[_Backoff] = set()

    def __bool__(self) -> bool:
        return bool(self._open)

    def begin(self, path: str, attempt: int, due: int, go: Callable[[Step], None]) -> None:
        """Have an attempt of a path begin at `due` (microseconds UTC), not before the run is ours."""
        backoff = _Backoff(path, attempt, due, go)
        self._open.add(backoff)
        if self._run.owned.run:
            self._set_timer(backoff)

    def start(self) -> None:
        """Let time pass from now on: the run is ours."""
        for backoff in self._open:
            self._set_timer(backoff)

    def stop(self) -> None:
        """Let nothing begin any more."""
        for backoff in self._open:
            if backoff.timer is not None:
                backoff.timer.cancel()
        self._open.clear()

    def withdrawn(self, reason: str | None) -> list[Record]:
        """Give the records that these attempts will not be."""
        now = self._run.now()
        return [ev.node_record(ev.WITHDRAWN, b.path, b.attempt - 1, now, reason) for b in self._open]

    def _set_timer(self, backoff: _Backoff) -> None:
        seconds = max(0.0, (backoff.due - self._run.now()) / 1e6)
        backoff.timer = self._run.services.clock.call_later(seconds, self._is_due, backoff)

    def _is_due(self, backoff: _Backoff) -> None:
        if backoff not in self._open:
            return
        self._open.remove(backoff)
        step = Step(self._run, [])
        backoff.go(step)
        self._run.go_on(step)
