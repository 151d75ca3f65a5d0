"""Many runs in one process, and what is left of them: memory, files, threads, tasks, the log. A program.

`python -m tests.engine.endurance FOLDER short_runs 24000 4000` prints what it measured as JSON. It is a
process of its own, so that nothing else's memory is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import sqlite3
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

from dagresume import Engine, RunFailed, Workflow
from dagresume.observe import log

SAMPLE = 250  # runs between two looks
GANG = 10  # runs at once

wf = Workflow("short", idempotent=True)


@wf.node
async def first(n: int) -> int:
    """Give a number."""
    return n


@wf.node(idempotent=False)
async def second(first: int) -> dict[str, int]:
    """Give a little more; it needs a start record."""
    return {"twice": 2 * first}


broken = Workflow("broken", idempotent=True)
mended = False
gate: asyncio.Event


@broken.node
async def fails(n: int) -> int:
    """Raise until it is mended."""
    if not mended:
        raise ValueError(n)
    return n


endless = Workflow("endless", idempotent=True)


@endless.node
async def stays(n: int) -> None:
    """Return never."""
    await gate.wait()


def _trim() -> None:
    """Give back what was freed, so that what is counted is what is held."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def rss() -> int:
    """Give the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def slope(points: list[tuple[int, int]]) -> float:
    """Give the median of the slopes between all pairs of points (Theil, Sen): a jump does not move it."""
    pairs = ((a, b) for n, a in enumerate(points) for b in points[n + 1 :])
    return median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs)


class Watch:
    """What is seen of this process while something is done over and over."""

    def __init__(self, db: Path) -> None:
        self._wal = Path(f"{db}-wal")
        self.memory: list[tuple[int, int]] = []
        self.objects: list[tuple[int, int]] = []
        self.wal = 0
        self.seconds: list[float] = []

    def now(self) -> int:
        """Give how big the log is."""
        return self._wal.stat().st_size if self._wal.exists() else 0

    async def over(self, count: int, act: Callable[[int], Awaitable[None]], sample: int = SAMPLE) -> None:
        """Do it so often, some of them at once."""
        for start in range(0, count, sample):
            began = time.perf_counter()
            for gang in range(start, min(start + sample, count), GANG):
                await asyncio.gather(*(act(n) for n in range(gang, min(gang + GANG, count))))
                self.wal = max(self.wal, self.now())
            self.seconds.append(time.perf_counter() - began)
            _trim()
            self.memory.append((start + sample, rss()))
            self.objects.append((start + sample, len(gc.get_objects())))

    def said(self, after: int = 0) -> dict[str, Any]:
        """Give what was measured; slopes are those behind the first `after`."""
        return {
            "bytes a run": slope([p for p in self.memory if p[0] > after]),
            "objects a run": slope([p for p in self.objects if p[0] > after]),
            "wal": self.wal,
            "first": min(self.seconds[1:5] or self.seconds),
            "last": min(self.seconds[-4:]),
        }


def _held() -> dict[str, int]:
    """Give what this process holds beside memory."""
    return {
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "tasks": len(asyncio.all_tasks()) if asyncio.events._get_running_loop() else 0,
    }


async def short_runs(db: Path, runs: int, after: int) -> dict[str, Any]:
    """Run short ones, each tenth with a key; then look for keys, which must be as quick as before."""
    watch = Watch(db)

    async def look(engine: Engine, keys: int) -> float:
        times = []
        for n in range(200):
            began = time.perf_counter()
            await engine.runs(workflow="short", key=f"{n * 10 % keys}", limit=1)
            times.append(time.perf_counter() - began)
        return median(times)

    async with Engine(db, synchronous="normal") as engine:

        async def one(n: int) -> None:
            result = await engine.run(wf, {"n": n}, key=str(n) if n % 10 == 0 else None)
            assert result["second"] == {"twice": 2 * n}

        await watch.over(SAMPLE, one)
        before, early = _held(), await look(engine, SAMPLE)
        watch.memory.clear()
        watch.objects.clear()

        async def more(n: int) -> None:
            await one(n + SAMPLE)

        await watch.over(runs - SAMPLE, more)
        late = await look(engine, runs)
        return watch.said(after) | {"before": before, "after": _held(), "key early": early, "key late": late}


async def failing(db: Path, runs: int, after: int) -> dict[str, Any]:
    """Run what fails."""
    watch = Watch(db)
    async with Engine(db, synchronous="normal") as engine:

        async def one(n: int) -> None:
            try:
                await engine.run(broken, {"n": n})
            except RunFailed:
                return
            raise AssertionError("it did not fail")

        await watch.over(SAMPLE, one)
        before = _held()
        await watch.over(runs, one)
        return watch.said(after) | {"before": before, "after": _held()}


async def cancelled(db: Path, runs: int, after: int) -> dict[str, Any]:
    """Start what stays, and cancel it."""
    global gate
    gate = asyncio.Event()
    watch = Watch(db)
    async with Engine(db, synchronous="normal") as engine:

        async def one(n: int) -> None:
            handle = await engine.start(endless, {"n": n})
            await handle.cancel()
            assert (await handle.result(raise_on_failure=False)).status == "cancelled"

        await watch.over(SAMPLE, one)
        before = _held()
        await watch.over(runs, one)
        return watch.said(after) | {"before": before, "after": _held()}


async def resumed(db: Path, runs: int, after: int) -> dict[str, Any]:
    """Resume what has failed."""
    global mended
    watch = Watch(db)
    async with Engine(db, synchronous="normal") as engine:
        ids = [(await engine.run(broken, {"n": n}, raise_on_failure=False)).run_id for n in range(runs)]
        mended = True

        async def one(n: int) -> None:
            assert (await engine.resume(ids[n]))["fails"] == n

        before = _held()
        await watch.over(runs, one)
        return watch.said(after) | {"before": before, "after": _held()}


async def kept_handles(db: Path, runs: int, after: int) -> dict[str, Any]:
    """Keep the handle of every run: it may hold the result, not the run that gave it."""
    watch, handles = Watch(db), []
    async with Engine(db, synchronous="normal") as engine:

        async def one(n: int) -> None:
            handle = await engine.start(wf, {"n": n})
            await handle.result()
            handles.append(handle)

        before = _held()
        await watch.over(runs, one)
        return watch.said(after) | {"before": before, "after": _held(), "kept": len(handles)}


async def followers(db: Path, runs: int, after: int) -> dict[str, Any]:
    """Let consumers of events come and go."""
    watch = Watch(db)
    async with Engine(db, synchronous="normal") as engine:
        run_id = (await engine.run(wf, {"n": 1})).run_id

        async def one(n: int) -> None:
            following = engine.events(run_id, follow=True)
            async with contextlib.aclosing(following):  # type: ignore[type-var]
                async for event in following:
                    if event.kind == "run.completed":
                        return

        await watch.over(SAMPLE, one)
        before = _held()
        await watch.over(runs, one)
        return watch.said(after) | {"before": before, "after": _held()}


async def engines(db: Path, runs: int, after: int) -> dict[str, Any]:
    """Open and close engines, each with one run."""
    watch = Watch(db)

    async def one(n: int) -> None:
        async with Engine(db, synchronous="normal") as engine:
            await engine.run(wf, {"n": n})

    await watch.over(20, one, sample=20)
    before = _held()
    await watch.over(runs, one, sample=20)
    return watch.said(after) | {"before": before, "after": _held()}


async def foreign_reader(db: Path, runs: int, after: int) -> dict[str, Any]:
    """Run while another program holds a snapshot: the log grows, nothing stops, it is small again after."""
    watch, late = Watch(db), Watch(db)
    async with Engine(db, synchronous="normal") as engine:

        async def one(n: int) -> None:
            await engine.run(wf, {"n": n})

        await watch.over(SAMPLE, one)
        reader = sqlite3.connect(db, isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM dagresume_events").fetchall()
        before = _held()
        await watch.over(runs, one)
        reader.execute("COMMIT")
        reader.close()
        await late.over(2 * SAMPLE, one)
        return watch.said(after) | {"before": before, "after": _held(), "wal after": late.now()}


PLAYS = {
    play.__name__: play
    for play in (
        short_runs, failing, cancelled, resumed, kept_handles, followers, engines, foreign_reader,
    )
}  # fmt: skip


def main(folder: str, play: str, runs: str, after: str) -> None:
    log.warning = lambda *args, **more: None  # type: ignore[method-assign]  # thousands of lines
    found = asyncio.run(PLAYS[play](Path(folder, "runs.db"), int(runs), int(after)))
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
