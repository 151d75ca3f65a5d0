"""Stand-ins that tests pass to an engine: a clock that they turn, something between it and its store."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dagresume.store import (
    Clear,
    Forgotten,
    Holder,
    Loaded,
    LogLine,
    OnceFound,
    Outcome,
    RunRow,
    Session,
    Store,
    Unit,
)

__all__ = ["FakeClock", "StoreWrapper"]


class FakeClock:
    """A clock for `Engine(clock=…)` that stands still until it is turned with `advance`.

    `at`: microseconds UTC it starts at. `autojump`: when all there is to do has been waiting for the clock
    for so many real seconds, it jumps to the next time that something waits for; give it more than your
    slowest real work takes. Safe to use from several threads and loops.
    """

    def __init__(self, at: int = 1_767_225_600_000_000, *, autojump: float | None = None) -> None:
        self._at, self._autojump = at, autojump
        self._passed = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._jump: asyncio.TimerHandle | None = None

    def now(self) -> int:
        """Give the wall clock in microseconds UTC since 1970."""
        return self._at + round(self._passed * 1e6)

    def monotonic(self) -> float:
        """Give the seconds that have passed on this clock."""
        return self._passed

    @property
    def sleeping(self) -> int:
        """How many wait for this clock."""
        with self._lock:
            return sum(not future.done() for _, _, future in self._sleepers)

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass; who waited for them wakes in the order of the due times."""
        if seconds < 0:
            raise ValueError(f"advance({seconds!r}): time does not run backwards")
        self._set(self._passed + seconds)

    def _set(self, passed: float) -> None:
        due = []
        with self._lock:
            self._passed = max(passed, self._passed)
            while self._sleepers and self._sleepers[0][0] <= self._passed:
                due.append(heapq.heappop(self._sleepers)[2])
        for future in due:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                future.get_loop().call_soon_threadsafe(_wake, future)

    async def sleep(self, seconds: float) -> None:
        """Return once so many seconds have passed on this clock."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future = asyncio.get_running_loop().create_future()
        with self._lock:
            heapq.heappush(self._sleepers, (self._passed + seconds, next(self._numbers), future))
        self._expect_quiet()
        try:
            await future
        finally:
            future.cancel()
            self._expect_quiet()

    def call_later(self, seconds: float, call: Callable[..., object], *args: Any) -> asyncio.Future[None]:
        """Call something when so many seconds have passed here, unless what this gives is cancelled."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda due: None if due.cancelled() else call(*args))
        with self._lock:
            heapq.heappush(self._sleepers, (self._passed + max(seconds, 0.0), next(self._numbers), future))
        self._expect_quiet()
        return future

    def _expect_quiet(self) -> None:
        """Jump when nothing goes to sleep or wakes for a while."""
        if self._autojump is None:
            return
        if self._jump is not None:
            self._jump.cancel()
        self._jump = asyncio.get_running_loop().call_later(self._autojump, self._to_the_next)

    def _to_the_next(self) -> None:
        self._jump = None
        with self._lock:
            while self._sleepers and self._sleepers[0][2].done():
                heapq.heappop(self._sleepers)
            due = self._sleepers[0][0] if self._sleepers else None
        if due is not None:
            self._set(due)
            self._expect_quiet()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class StoreWrapper:
    """A store that does as the one inside it; override what is to be disturbed, `commit` most of all."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.name, self.persistent = inner.name, inner.persistent

    @property
    def commits(self) -> int:
        return self.inner.commits

    @commits.setter
    def commits(self, value: int) -> None:
        self.inner.commits = value

    async def open(self, session: Session) -> int:
        return await self.inner.open(session)

    async def close(self) -> None:
        await self.inner.close()

    def abandon(self) -> None:
        self.inner.abandon()

    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        return await self.inner.commit(units)

    def renew(self, expires_at: int) -> bool:
        return self.inner.renew(expires_at)

    async def forget(self, runs: Mapping[int, int], clear: Clear, *, dry_run: bool = False) -> Forgotten:
        return await self.inner.forget(runs, clear, dry_run=dry_run)

    async def load(self, run_id: str) -> Loaded | None:
        return await self.inner.load(run_id)

    async def find(self, **wanted: Any) -> list[tuple[RunRow, Holder | None]]:
        return await self.inner.find(**wanted)

    async def tail(self, after: int, **wanted: Any) -> list[tuple[str, Any]]:
        return await self.inner.tail(after, **wanted)

    async def output(self, seqs: Sequence[int]) -> list[str | None]:
        return await self.inner.output(seqs)

    def output_now(self, seqs: Sequence[int]) -> list[str | None]:
        return self.inner.output_now(seqs)

    async def logs(self, run_id: str, *, after: int = 0, limit: int = 1000) -> list[tuple[int, LogLine]]:
        return await self.inner.logs(run_id, after=after, limit=limit)

    async def once(self, scope: str, key: str) -> OnceFound | None:
        return await self.inner.once(scope, key)

    async def changed(self) -> int:
        return await self.inner.changed()
