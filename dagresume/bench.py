"""What durability costs on a disk: the measuring behind `dagresume bench` and the project's benchmarks.

Everything is measured beside the least that could do the same: an append with fsync, and the standard
library's sqlite3 with one INSERT and COMMIT for each result. Workflows are run by an engine as it is, on new
databases in a folder that is gone afterwards, also when the measuring is interrupted.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sqlite3
import statistics
import tempfile
import time
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import networkx as nx

from dagresume.engine import Engine
from dagresume.latency import quantile
from dagresume.workflow import Workflow

__all__ = [
    "MEMORY_SPEED",
    "Bench",
    "Driven",
    "Measure",
    "Spread",
    "Waits",
    "chain",
    "drive",
    "fanout",
    "first",
    "measure",
    "raw_commits",
    "step",
    "sync_cost",
]

MEMORY_SPEED: Final = 20e-6
"""Seconds: no disk is that quick to write through."""
_FEWEST, _MOST = 2, 15  # rounds

Synchronous = Literal["full", "normal"]


# -- figures --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of several rounds, and how far apart they were."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Give that of these values."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Waits:
    """How long results waited to be durable, in seconds, as the engine itself noted it.

    `steps`: (upper end of a step in seconds, how many waits lie in it), in steps of 1, 2 and 5.
    """

    count: int
    p50: float
    p95: float
    p99: float
    p999: float
    max: float
    steps: tuple[tuple[float, int], ...] = field(repr=False)

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Waits:
        """Give the percentiles of these waits (nearest rank) and their histogram."""
        ranked = sorted(seconds)
        p50, p95, p99, p999, longest = (quantile(ranked, share) for share in (0.5, 0.95, 0.99, 0.999, 1.0))
        return cls(len(ranked), p50, p95, p99, p999, longest, tuple(_steps(ranked)))


def _steps(ranked: Sequence[float]) -> Iterable[tuple[float, int]]:
    ends = (step * 10.0**power for power in range(-6, 5) for step in (1, 2, 5))
    seen = 0
    for end in ends:
        upto = bisect_right(ranked, end)
        if upto > seen or 0 < seen < len(ranked):
            yield end, upto - seen
        seen = upto


# -- the least that could do it -------------------------------------------------------------------------


def sync_cost(folder: Path, times: int = 200) -> list[float]:
    """Append a row's worth of bytes and wait until the disk has them; seconds of each."""
    synchronise = getattr(os, "fdatasync", os.fsync)
    taken = []
    with (folder / "appended").open("ab", buffering=0) as file:
        for _ in range(times):
            begun = time.perf_counter()
            file.write(b"x" * 100)
            synchronise(file.fileno())
            taken.append(time.perf_counter() - begun)
    return taken


def raw_commits(
    folder: Path, rows: int, *, synchronous: Synchronous = "full", wal_bytes: int = 0
) -> list[float]:
    """Do one INSERT and COMMIT for each row with the standard library, in this thread; seconds of each.

    The log is SQLite's own WAL with its default settings; with `wal_bytes` it has that size before.
    """
    taken = []
    with closing(sqlite3.connect(folder / "raw.db")) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {synchronous.upper()}")
        connection.execute(
            "CREATE TABLE checkpoint (run INTEGER, path TEXT, attempt INTEGER, at INTEGER, output TEXT)"
        )
        if wal_bytes:
            _extend_wal(connection, wal_bytes)
        insert = "INSERT INTO checkpoint VALUES (?, ?, ?, ?, ?)"
        for number in range(rows):
            begun = time.perf_counter()
            connection.execute(insert, (1, f"n{number}", 1, time.time_ns() // 1000, str(number)))
            connection.commit()
            taken.append(time.perf_counter() - begun)
        (durable,) = connection.execute("SELECT count(*) FROM checkpoint").fetchone()
    if durable != rows:
        raise RuntimeError(f"sqlite3 kept {durable} of {rows} rows")
    return taken


def _extend_wal(connection: sqlite3.Connection, size: int) -> None:
    """Give the log its later size at once: a transaction too large for the page cache, rolled back."""
    connection.execute("PRAGMA cache_size = 10")
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("CREATE TABLE filler (bytes BLOB)")
    connection.execute("INSERT INTO filler VALUES (zeroblob(?))", (size,))
    connection.execute("ROLLBACK")
    connection.execute("PRAGMA cache_size = -2000")


# -- workflows ------------------------------------------------------------------------------------------


async def first() -> int:
    """Begin to count."""
    return 0


async def step(x: int) -> int:
    """Count on."""
    return x + 1


def chain(nodes: int, *, idempotent: bool) -> Workflow:
    """Give a chain of nodes that do next to nothing: each waits until the one before it is durable."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_node("n0", run=first)
    for number in range(1, nodes):
        graph.add_node(f"n{number}", run=step)
        graph.add_edge(f"n{number - 1}", f"n{number}", arg="x")
    return Workflow.from_graph("chain", graph, idempotent=idempotent)


def fanout(width: int, *, idempotent: bool) -> Workflow:
    """Give nodes that do next to nothing, all of which need the same one."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_node("root", run=first)
    for number in range(width):
        graph.add_node(f"n{number}", run=step)
        graph.add_edge("root", f"n{number}", arg="x")
    return Workflow.from_graph("fanout", graph, idempotent=idempotent)


@dataclass(frozen=True, slots=True)
class Driven:
    """What it took to run a workflow: seconds of the first run and of a second one, whose definition is
    stored already; of the first the waits of its checkpoints in seconds, and its commits.
    """

    seconds: float
    again: float
    waits: array[float]
    commits: int


async def drive(workflow: Workflow, nodes: int, database: Path, **settings: Any) -> Driven:
    """Run a workflow twice in a new database. An open engine that knows it is where the time begins."""
    async with Engine(str(database), workflows=[workflow], **settings) as engine:
        begun = time.perf_counter()
        result = await engine.run(workflow)
        between = time.perf_counter()
        await engine.run(workflow)
        ended = time.perf_counter()
    if len(result.executed) != nodes:
        raise RuntimeError(f"{len(result.executed)} of {nodes} nodes ran")
    return Driven(between - begun, ended - between, result.stats.waits, result.stats.commits)


# -- a bench --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measure:
    """What one step of a kind of work takes, in seconds, and in commits of raw SQLite (None: it is one)."""

    name: str
    seconds: Spread
    commits: Spread | None = None


@dataclass(frozen=True, slots=True)
class Bench:
    """What durability costs on a disk: `measures` in the order of `dagresume bench`, `waits` by the name of
    the work. `rounds`: how often each was measured, one beside the other; `loop`: whose event loop it was.
    """

    loop: str
    rounds: int
    nodes: int
    width: int
    measures: tuple[Measure, ...]
    waits: dict[str, Waits]

    @property
    def in_memory(self) -> bool:
        """Whether the folder is on no disk: then nothing was written through."""
        return self.measures[0].seconds.median < MEMORY_SPEED


Work = Callable[[Path], Awaitable[tuple[float, Sequence[float]]]]
_SYNC, _RAW = "append and fsync", "sqlite3: INSERT, COMMIT"


async def measure(
    folder: Path,
    *,
    seconds: float = 50.0,
    nodes: int = 1000,
    width: int = 10_000,
    synchronous: Synchronous = "full",
    concurrency: int = 64,
) -> Bench:
    """Measure in this folder for about so many seconds, at least two rounds.

    `nodes`: how long the chains are, at most; on slow disks they are shorter. `width`: that of the fan-outs.
    """
    # the folder goes when this is left, however that is
    with tempfile.TemporaryDirectory(prefix=".dagresume-bench-", dir=folder) as name:
        home = Path(name)
        cost = statistics.median(sync_cost(home, 20))
        nodes = max(min(nodes, 20), min(nodes, int(0.5 / cost)))
        settings: dict[str, Any] = {"synchronous": synchronous, "concurrency": concurrency}
        works = _works(nodes, width, synchronous, settings)
        taken: dict[str, list[float]] = defaultdict(list)
        waits: dict[str, list[float]] = defaultdict(list)
        ends = time.perf_counter() + seconds
        rounds = 0
        while rounds < _FEWEST or (rounds < _MOST and time.perf_counter() < ends):
            await _round(home, works, taken, waits)
            rounds += 1
    return Bench(
        type(asyncio.get_running_loop()).__module__.partition(".")[0],
        rounds,
        nodes,
        width,
        tuple(_measures(taken)),
        {name: Waits.of(waited) for name, waited in waits.items()},
    )


def _works(nodes: int, width: int, synchronous: Synchronous, settings: dict[str, Any]) -> dict[str, Work]:
    async def sync(folder: Path) -> tuple[float, Sequence[float]]:
        return statistics.median(sync_cost(folder, nodes)), ()

    async def raw(folder: Path) -> tuple[float, Sequence[float]]:
        return statistics.fmean(raw_commits(folder, nodes, synchronous=synchronous)), ()

    async def engine(make: Callable[[], Workflow], count: int, folder: Path) -> tuple[float, Sequence[float]]:
        driven = await drive(make(), count, folder / "runs.db", **settings)
        return driven.seconds / count, driven.waits

    works: dict[str, Work] = {_SYNC: sync, _RAW: raw}
    for name, make, count, size in (("chain", chain, nodes, nodes), ("fan-out", fanout, width + 1, width)):
        for idempotent, kind in ((True, "idempotent"), (False, "not idempotent")):
            works[f"{name}, {kind}"] = partial(engine, partial(make, size, idempotent=idempotent), count)
    return works


async def _round(
    home: Path, works: dict[str, Work], taken: dict[str, list[float]], waits: dict[str, list[float]]
) -> None:
    """Do each work once, in a folder of its own."""
    for name, work in works.items():
        await asyncio.sleep(0)  # an interruption is heard between two works, too
        gc.collect()
        with tempfile.TemporaryDirectory(dir=home) as empty:
            each, waited = await work(Path(empty))
        taken[name].append(each)
        if waited:
            waits[name].extend(waited)


def _measures(taken: dict[str, list[float]]) -> Iterable[Measure]:
    for name, each in taken.items():
        pairs = [one / raw for one, raw in zip(each, taken[_RAW], strict=True)]
        yield Measure(name, Spread.of(each), None if name in {_SYNC, _RAW} else Spread.of(pairs))
