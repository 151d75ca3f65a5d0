"""How the engine behaves under the loads its users have.

- `fanout_of_calls`: 2,000 calls that take 50 ms each, 50 at once, beside the same in a pool of anyio workers;
- `runs`: 1,000 runs of 10 nodes at once in one engine, beside one run of 10,000 nodes;
- `hog`: how long checkpoints take while a thread that computes never lets go of the interpreter by itself;
- `tail`: how long they take under a steady load of 200 nodes a second over some minutes.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import anyio
import networkx as nx

from benchmarks.commit import CAREFUL, Contender, Sample, compare, durable_rows, raw_sqlite
from benchmarks.rows import BESIDE_NOTHING, Row, pair
from dagresume import Engine, Limit, Workflow
from dagresume.bench import Spread
from dagresume.latency import quantile

CALLS, TAKES, AT_ONCE = 2_000, 0.05, 50
RATE = 200


# calls that wait


async def call(x: int) -> int:
    await anyio.sleep(TAKES)
    return 2 * x


def calls(count: int, *, idempotent: bool) -> Workflow:
    wf = Workflow("calls", idempotent=idempotent)

    @wf.node
    async def numbers() -> list[int]:
        return list(range(count))

    wf.node(for_each={"x": numbers}, id="call")(call)
    return wf


def calls_by_engine(count: int, idempotent: bool, folder: Path) -> Sample:
    wf = calls(count, idempotent=idempotent)

    async def main() -> Sample:
        async with Engine(folder / "runs.db", workflows=[wf], concurrency=AT_ONCE) as engine:
            begun = time.perf_counter()
            result = await engine.run(wf)
            taken = time.perf_counter() - begun
            if result["call"] != [2 * x for x in range(count)]:
                raise SystemExit("the calls came out wrong")
            return Sample(taken / count * 1e6, {"p99 µs": quantile(result.stats.waits, 0.99) * 1e6})

    return anyio.run(main)


def calls_by_workers(count: int, _folder: Path) -> Sample:
    results: dict[int, int] = {}

    async def work(numbers: Iterator[int]) -> None:
        for x in numbers:
            results[x] = await call(x)

    async def main() -> float:
        numbers = iter(range(count))
        begun = time.perf_counter()
        async with anyio.create_task_group() as group:
            for _ in range(AT_ONCE):
                group.start_soon(work, numbers)
        return time.perf_counter() - begun

    taken = anyio.run(main)
    if results != {x: 2 * x for x in range(count)}:
        raise SystemExit("the pool came out wrong")
    return Sample(taken / count * 1e6)


def fanout_of_calls(*, rounds: int, scale: float, folder: Path) -> list[Row]:
    count = max(AT_ONCE, round(CALLS * scale))
    pool = "a pool of anyio workers"
    contenders: dict[str, Contender] = {
        "sqlite3": functools.partial(raw_sqlite, rows=500),
        pool: functools.partial(calls_by_workers, count),
        "dagresume": functools.partial(calls_by_engine, count, True),
        CAREFUL: functools.partial(calls_by_engine, count, False),
    }
    ratios = [("dagresume", pool), (CAREFUL, pool)]
    report = compare("calls", count, contenders, ratios, rounds=rounds, folder=folder)
    rows = []
    for ours, counts in (("dagresume", True), (CAREFUL, False)):
        work = f"{count:,} calls of 50 ms, {AT_ONCE} at once{ours.removeprefix('dagresume')}"
        waits, commits = report.each(ours, "p99 µs"), report.each("sqlite3")
        rows += [
            pair(
                "calls", report, ours, pool, 1.03, rounds=rounds, work=work, figures="µs per call",
                durability=BESIDE_NOTHING, counts=counts,
            ),
            Row(
                "calls",
                f"p99 of checkpoint latency, {work}",
                "one raw sqlite3 commit of the same minute",
                5,
                Spread.of([wait / commit for wait, commit in zip(waits, commits, strict=True)]),
                ours=Spread.of(waits),
                theirs=Spread.of(commits),
                figures="µs",
                rounds=rounds,
                counts=counts,
            ),
        ]  # fmt: skip
    return rows


# many runs


def flat(nodes: int) -> Workflow:
    graph: nx.DiGraph[str] = nx.DiGraph()

    async def one() -> int:
        return 1

    graph.add_nodes_from((f"n{number}", {"run": one}) for number in range(nodes))
    return Workflow.from_graph("flat", graph, idempotent=True)


def lines(count: int, nodes: int) -> Workflow:
    """Give so many chains of so many nodes beside each other."""
    graph: nx.DiGraph[str] = nx.DiGraph()

    async def one() -> int:
        return 1

    for line in range(count):
        names = [f"n{line}.{number}" for number in range(nodes)]
        graph.add_nodes_from(names, run=one)
        graph.add_edges_from(itertools.pairwise(names))
    return Workflow.from_graph("lines", graph, idempotent=True)


def at_once(workflow: Workflow, runs: int, folder: Path) -> Sample:
    nodes = len(workflow.graph)

    async def main() -> float:
        async with Engine(folder / "runs.db", workflows=[workflow]) as engine:
            begun = time.perf_counter()
            async with anyio.create_task_group() as group:
                for _ in range(runs):
                    group.start_soon(engine.run, workflow)
            return time.perf_counter() - begun

    seconds = anyio.run(main)
    if (durable := durable_rows(folder / "runs.db")) != runs * nodes:
        raise SystemExit(f"{durable} rows of {runs} runs of {nodes} nodes are durable")
    return Sample(seconds / (runs * nodes) * 1e6)


def runs(*, rounds: int, scale: float, folder: Path) -> list[Row]:
    many = max(10, round(1_000 * scale))
    contenders: dict[str, Contender] = {
        f"one run of {10 * many:,} nodes": functools.partial(at_once, flat(10 * many), 1),
        f"{many:,} runs of 10 nodes": functools.partial(at_once, flat(10), many),
        f"one run of {many:,} chains of 10": functools.partial(at_once, lines(many, 10), 1),
        f"{many:,} runs of a chain of 10": functools.partial(at_once, lines(1, 10), many),
    }
    one, many_flat, one_of_chains, many_chains = contenders
    ratios = [(many_flat, one), (many_chains, one_of_chains)]
    report = compare("runs", 10 * many, contenders, ratios, rounds=rounds, folder=folder)
    return [pair("runs", report, ours, other, 1.5, rounds=rounds, work=ours) for ours, other in ratios]


# a busy interpreter


def computing(over: threading.Event) -> Workflow:
    """Give a plain function, which runs in a thread, that computes until it is told to end."""
    wf = Workflow("computing", idempotent=True)

    @wf.node
    def compute() -> int:
        found = 0
        while not over.is_set():
            for x in range(1000):
                found = (found * 31 + x) % 1_000_003
        return found

    return wf


def beside_a_hog(nodes: int, folder: Path) -> Sample:
    """Give the waits of a chain beside a node that computes."""
    workflow, over = lines(1, nodes), threading.Event()
    hog = computing(over)

    async def main() -> Sample:
        async with Engine(folder / "runs.db", workflows=[workflow, hog]) as engine:
            handle = await engine.start(hog)
            try:
                waits = (await engine.run(workflow)).stats.waits
            finally:
                over.set()
            await handle.result()
            return Sample(statistics.median(waits) * 1e6, {"p99 µs": quantile(waits, 0.99) * 1e6})

    return anyio.run(main)


def hog(*, rounds: int, scale: float, folder: Path) -> list[Row]:
    nodes = max(20, round(300 * scale))
    contenders: dict[str, Contender] = {
        "sqlite3": functools.partial(raw_sqlite, rows=500),
        "dagresume": functools.partial(beside_a_hog, nodes),
    }
    report = compare("hog", nodes, contenders, [], rounds=rounds, folder=folder)
    switch = sys.getswitchinterval() * 1e6
    worst, limits = report.each("dagresume", "p99 µs"), [3 * switch + each for each in report.each("sqlite3")]
    return [
        Row(
            "hog",
            "p99 of checkpoint latency beside a node that computes",
            f"3 × the switch interval of {switch / 1e3:g} ms + one raw commit",
            1,
            Spread.of([wait / limit for wait, limit in zip(worst, limits, strict=True)]),
            ours=Spread.of(worst),
            theirs=Spread.of(limits),
            figures="µs",
            rounds=rounds,
        )
    ]


# a steady load


def steady(seconds: float, folder: Path) -> array[float]:
    wf = Workflow("steady", idempotent=True)
    count = max(RATE, round(seconds * RATE))

    @wf.node
    async def numbers() -> list[int]:
        return list(range(count))

    @wf.node(for_each={"x": numbers}, limit="pace")
    async def doubled(x: int) -> int:
        return 2 * x

    async def main() -> array[float]:
        limits = {"pace": Limit(rate=f"{RATE}/second")}
        async with Engine(folder / "runs.db", workflows=[wf], limits=limits) as engine:
            return (await engine.run(wf)).stats.waits

    return anyio.run(main)


def tail(*, rounds: int, scale: float, folder: Path) -> list[Row]:
    """Measure one long run, and its `rounds` equal parts: what comes late is in it, and the spread is too."""
    minutes = 5 * scale
    found: list[array[float]] = []

    def once(place: Path) -> Sample:
        found.append(steady(minutes * 60 if found else 1, place))  # the first one warms up
        return Sample(statistics.median(found[-1]) * 1e6)

    compare("tail", 1, {"dagresume": once}, [], rounds=1, folder=folder)
    waits = found[-1]
    length = max(1, len(waits) // rounds)
    parts = [waits[begin : begin + length] for begin in range(0, length * rounds, length)]
    ratios = [quantile(part, 0.999) / statistics.median(part) for part in parts]
    worst, middle = quantile(waits, 0.999), statistics.median(waits)
    return [
        Row(
            "tail",
            f"p99.9 of checkpoint latency, {minutes:g} minutes of {RATE} nodes a second",
            "its p50",
            10,
            Spread(worst / middle, min(ratios), max(ratios)),
            ours=Spread.of([quantile(part, 0.999) * 1e6 for part in parts]),
            theirs=Spread.of([statistics.median(part) * 1e6 for part in parts]),
            figures="µs",
            rounds=1,
            note=f"of all {len(waits):,} waits; the extremes are those of {rounds} parts of the run;"
            f" the longest wait {max(waits) * 1e3:.3g} ms",
        )
    ]
