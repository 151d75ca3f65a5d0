"""Group commit: whatever waits is made durable in one transaction, then its writers are told, in order.

Everybody appends without waiting; one task takes what has gathered and commits it. The only delay is one turn
of the loop while more is to come: bodies that began together end together, and share a commit. A unit that
could not be written poisons its run: what that run has queued behind it is refused too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from dagresume.clock import Clock, Timer
from dagresume.errors import EngineClosed, StoreError
from dagresume.events import Record
from dagresume.observe import Watch
from dagresume.store import CommitCancelled, Committed, Outcome, Owned, Refused, Store, StoreFailed, Unit

__all__ = ["Entry", "Journal", "Late", "Writer"]

MAX_ROWS: Final = 256
"""Rows a transaction takes at most; more of them raise the latency and do not gain throughput."""
RIDE_AFTER: Final = 0.005
"""Seconds after which a start record that nobody waits for may ride with what is committed: tiny nodes cost
one row.
"""
ALONE_AFTER: Final = 0.2
"""Seconds after which it is committed by itself, so that long nodes are seen as running."""


class Writer(Protocol):
    """Who writes units: a run. `poisoned`: one of its units was not written, so no later one may be."""

    poisoned: bool
    owned: Owned

    def not_written(self, outcome: Outcome, records: Sequence[Record]) -> None:
        """Learn that these records of the run could not be written."""


class Late(Protocol):
    """A path that began without waiting for its start record."""

    run: Writer
    began: float

    def start_record(self) -> Record:
        """Give the record of its start."""


class Entry(Unit):
    """A unit on its way into the store. `delivered` is called once, in the order of the appends.

    `concludes`: it says that a map or the run has completed, so it must not be written with a unit of the
    same run that may yet fail: a completed run without a hole.
    """

    __slots__ = ("appended", "concludes", "run")

    appended: float
    run: Writer | None
    concludes: bool

    def delivered(self, outcome: Outcome) -> None:
        """Learn what became of it. Runs on the loop, must not block."""
        raise NotImplementedError


def _tell(entry: Entry, outcome: Outcome) -> None:
    """Tell a writer what became of its unit. If that goes wrong it is the end of its run, not of the
    journal.
    """
    try:
        entry.delivered(outcome)
    except Exception as error:
        if entry.run is None:
            raise
        entry.run.poisoned = True
        entry.run.not_written(StoreFailed(error), ())


class _Awaited(Entry):
    """A unit that somebody awaits."""

    __slots__ = ("done",)

    def __init__(self, unit: Unit, done: asyncio.Future[Outcome]) -> None:
        super().__init__(unit.guard, unit.records, unit.definition, unit.logs, unit.sql, unit.once)
        self.run, self.done, self.concludes = None, done, False

    def delivered(self, outcome: Outcome) -> None:
        if not self.done.done():
            self.done.set_result(outcome)


class _Starts(Entry):
    """Start records that nobody waits for."""

    __slots__ = ()

    def __init__(self, run: Writer, records: list[Record]) -> None:
        super().__init__(run.owned, records)
        self.run, self.concludes = run, False

    def delivered(self, outcome: Outcome) -> None:
        if self.run is not None and not isinstance(outcome, Committed):
            self.run.not_written(outcome, self.records)


class Journal:
    """The queue in front of a store, and the task that empties it.

    `more_to_come` says whether several bodies are under way.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        more_to_come: Callable[[], bool],
        after_batch: Callable[[], None],
        on_cancel: Callable[[], None],
        watch: Watch | None = None,
    ) -> None:
        self._watch = watch
        self._store, self._clock, self._monotonic = store, clock, clock.monotonic
        self._more_to_come, self._after_batch, self._on_cancel = more_to_come, after_batch, on_cancel
        self._queue: deque[Entry] = deque()
        self._late: dict[Late, None] = {}
        self._wake: asyncio.Future[None] | None = None
        self._timer: Timer | None = None
        self._closing = self._ended = False
        self._task: asyncio.Task[object] | None = None
        self.waiting = 0
        """Rows appended and not yet durable."""
        self.batches = 0
        """Transactions begun so far."""
        self.durable_at = 0.0
        """When the last one had ended, by the monotonic clock."""

    # -- for those who write --------------------------------------------------------------------------

    def append(self, entry: Entry, *, quietly: bool = False) -> None:
        """Hand over a unit; its `delivered` is called when its fate is known.

        `quietly`: nothing waits for it, so it goes with the next one that something waits for, or after a
        while.
        """
        entry.appended = self._monotonic()
        if self._ended:
            asyncio.get_running_loop().call_soon(entry.delivered, StoreFailed(EngineClosed()))
            return
        self._queue.append(entry)
        self.waiting += len(entry.records)
        if quietly:
            self._start_timer()
        elif self._wake is not None:
            self._awake()

    async def commit(self, unit: Unit) -> Outcome:
        """Hand over a unit and give what became of it; a cancelled caller does not stop it."""
        done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.append(_Awaited(unit, done))
        return await done

    def later(self, late: Late) -> None:
        """Note a start whose record may ride with anything that is committed."""
        self._late[late] = None
        if self._timer is None:
            self._start_timer()

    def forget(self, late: Late) -> bool:
        """Drop a start record: the path has ended, or it is written with something else. False: it is on its
        way, or was not to be written.
        """
        return self._late.pop(late, late) is None

    def is_full(self) -> bool:
        """Say whether so much waits that nothing new should begin."""
        return self.waiting >= 2 * MAX_ROWS

    @property
    def is_taken_down(self) -> bool:
        """Whether somebody cancels all tasks: the loop is about to end."""
        return self._task is not None and self._task.cancelling() > 0

    # -- the writer -----------------------------------------------------------------------------------

    async def write(self) -> None:
        """Empty the queue until `close` was called and nothing is left.

        It ends by itself. A cancellation does not end it, `on_cancel` hears of it: without a writer, whoever
        waits for a commit would wait for ever.
        """
        self._task = asyncio.current_task()
        while True:
            if self._queue and self._more_to_come():
                await self._let_come()
            batch = self._take()
            if batch:
                told = None if self._watch is None else self._watch.commits(batch)
                outcomes = await self._commit(batch)
                self.durable_at = self._monotonic()
                if told is not None:
                    told(outcomes)
                self._deliver(batch, outcomes)
            elif self._closing:
                self._stop_timer()
                self._ended = True  # who comes later is told so instead of waiting for nobody
                return
            else:
                self._wake = asyncio.get_running_loop().create_future()
                try:
                    await self._wake
                except asyncio.CancelledError:  # the loop is taken down: what is under way ends first
                    self._on_cancel()

    async def _let_come(self) -> None:
        """Let a turn of the loop pass: what ends in it is committed with what has gathered."""
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._on_cancel()

    def close(self) -> None:
        """Let `write` end once everything appended is written."""
        self._closing = True
        self._awake()

    async def _commit(self, batch: list[Entry]) -> Sequence[Outcome]:
        self.batches += 1
        error: Exception
        try:
            return await self._store.commit(batch)
        except CommitCancelled as cancelled:  # the loop is taken down; what is written counts (C5)
            self._on_cancel()
            return cancelled.outcomes
        except asyncio.CancelledError:
            self._on_cancel()
            error = StoreError("the event loop was taken down during the commit")
        except Exception as raised:  # a store says it with an outcome; what else it raises fails these units
            error = raised
        return [StoreFailed(error)] * len(batch)

    def _deliver(self, batch: list[Entry], outcomes: Sequence[Outcome]) -> None:
        for entry, outcome in zip(batch, outcomes, strict=True):
            self.waiting -= len(entry.records)
            if type(outcome) is not Committed and entry.run is not None:
                entry.run.poisoned |= isinstance(outcome, Refused | StoreFailed)
            _tell(entry, outcome)
        self._after_batch()

    def _take(self) -> list[Entry]:
        batch: list[Entry] = []
        rows = 0
        queue = self._queue
        taken: set[Writer] = set()  # runs with a unit in it
        held: list[Entry] = []
        held_runs: set[Writer] = set()
        while queue and rows < MAX_ROWS:
            entry = queue.popleft()
            run = entry.run
            if run is not None:
                if run.poisoned:
                    self.waiting -= len(entry.records)
                    _tell(entry, Refused("poisoned"))
                    continue
                if run in held_runs or (entry.concludes and run in taken):
                    held.append(entry)  # with the next one, and what comes after it of this run as well
                    held_runs.add(run)
                    continue
                taken.add(run)
            rows += len(entry.records)
            batch.append(entry)
        queue.extendleft(reversed(held))
        if self._late:
            self._add_late(batch, rows)
        return batch

    def _add_late(self, batch: list[Entry], rows: int) -> None:
        now = self._clock.monotonic()
        age = RIDE_AFTER if batch else ALONE_AFTER
        starts: dict[Writer, list[Record]] = {}
        for late in list(self._late):
            if now - late.began < age or rows >= 2 * MAX_ROWS:
                break
            del self._late[late]
            if not late.run.poisoned:
                starts.setdefault(late.run, []).append(late.start_record())
                rows += 1
        for run, records in starts.items():
            entry = _Starts(run, records)
            entry.appended = now
            self.waiting += len(records)
            batch.append(entry)

    def _awake(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None and not wake.done():
            wake.set_result(None)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self._clock.call_later(ALONE_AFTER, self._due)

    def _due(self) -> None:
        self._timer = None
        if self._late:
            self._start_timer()
        if self._late or self._queue:
            self._awake()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
