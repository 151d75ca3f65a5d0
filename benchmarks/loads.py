"""How the engine behaves under the loads its users have.

- `fanout_of_calls`: 2,000 calls that take 50 ms each, 50 at once, beside the same in a pool of anyio workers;
- `runs`: 1,000 runs of 10 nodes at once in one engine, beside one run of 10,000 nodes;
- `hog`: how long checkpoints take while a thread that computes never lets go of the interpreter by itself;
- `tail`: how long they take under a steady load of 200 nodes a second over some minutes.
"""

from __future__ import annotations

import functools
import statistics
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import anyio
import networkx as nx

from benchmarks.commit import Contender, Sample, Spread, compare, raw_sqlite
from benchmarks.rows import Row, pair
from dagresume import Engine, Limit, Workflow

CALLS, TAKES, AT_ONCE = 2_000, 0.05, 50
RATE = 200


def percentile(waits: array[float], share: float) -> float:
    """Give the wait, in seconds, that this share of all does not exceed."""
    ordered = sorted(waits)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# calls that wait


async def call(x: int) -> int:
    await anyio.sleep(TAKES)
    return 2 * x


def calls(count: int) -> Workflow:
    wf = Workflow("calls", idempotent=True)

    @wf.node
    async def numbers() -> list[int]:
        return list(range(count))

    wf.node(for_each={"x": numbers}, id="call")(call)
    return wf


def calls_by_engine(count: int, folder: Path) -> Sample:
    wf = calls(count)

    async def main() -> Sample:
        async with Engine(folder / "runs.db", workflows=[wf], concurrency=AT_ONCE) as engine:
            begun = time.perf_counter()
            result = await engine.run(wf)
            taken = time.perf_counter() - begun
            return Sample(taken / count * 1e6, {"p99 µs": result.stats.checkpoint_latency.p99 * 1e6})

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
    if len(results) != count:
        raise SystemExit("the pool came out wrong")
    return Sample(taken / count * 1e6)


def fanout_of_calls(*, rounds: int, scale: float, folder: Path) -> list[Row]:
    count = max(AT_ONCE, round(CALLS * scale))
    contenders: dict[str, Contender] = {
        "sqlite3": functools.partial(raw_sqlite, rows=200),
        "a pool of anyio workers": functools.partial(calls_by_workers, count),
        "dagresume": functools.partial(calls_by_engine, count),
    }
    ratios = [("dagresume", "a pool of anyio workers")]
    report = compare("calls", count, contenders, ratios, rounds=rounds, folder=folder)
    work = f"{count:,} calls of 50 ms, {AT_ONCE} at once"
    waits, commit = report.facts["dagresume"]["p99 µs"], report.microseconds["sqlite3"]
    return [
        pair("calls", report, *ratios[0], 1.03, rounds=rounds, work=work, figures="µs per call"),
        Row(
            "calls",
            f"p99 of checkpoint latency, {work}",
            "one raw sqlite3 commit of the same minute",
            5,
            Spread.of([waits.median / commit.median]),
            ours=waits,
            theirs=commit,
            figures="µs",
            rounds=rounds,
        ),
    ]


# many runs


def flat(nodes: int) -> Workflow:
    graph: nx.DiGraph[str] = nx.DiGraph()

    async def one() -> int:
        return 1

    graph.add_nodes_from((f"n{number}", {"run": one}) for number in range(nodes))
    return Workflow.from_graph("flat", graph, idempotent=True)


def line(nodes: int) -> Workflow:
    graph: nx.DiGraph[str] = nx.DiGraph()

    async def one() -> int:
        return 1

    graph.add_nodes_from((f"n{number}", {"run": one}) for number in range(nodes))
    graph.add_edges_from((f"n{number}", f"n{number + 1}") for number in range(nodes - 1))
    return Workflow.from_graph("line", graph, idempotent=True)


def at_once(workflow: Workflow, runs: int, folder: Path) -> Sample:
    nodes = len(workflow.graph)

    async def main() -> float:
        async with Engine(folder / "runs.db", workflows=[workflow]) as engine:
            begun = time.perf_counter()
            async with anyio.create_task_group() as group:
                for _ in range(runs):
                    group.start_soon(engine.run, workflow)
            return time.perf_counter() - begun

    return Sample(anyio.run(main) / (runs * nodes) * 1e6)


def runs(*, rounds: int, scale: float, folder: Path) -> list[Row]:
    many = max(10, round(1_000 * scale))
    contenders: dict[str, Contender] = {
        f"one run of {10 * many:,} nodes": functools.partial(at_once, flat(10 * many), 1),
        f"{many:,} runs of 10 nodes": functools.partial(at_once, flat(10), many),
        f"{many:,} runs of chains of 10": functools.partial(at_once, line(10), many),
    }
    one, *others = contenders
    ratios = [(other, one) for other in others]
    report = compare("runs", 10 * many, contenders, ratios, rounds=rounds, folder=folder)
    return [pair("runs", report, other, one, 1.5, rounds=rounds, work=other) for other in others]


# a busy interpreter


def beside_a_hog(nodes: int, folder: Path) -> array[float]:
    workflow = line(nodes)
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            sum(range(10_000))

    async def main() -> array[float]:
        async with Engine(folder / "runs.db", workflows=[workflow]) as engine:
            hog = threading.Thread(target=compute, daemon=True)
            hog.start()
            try:
                return (await engine.run(workflow)).stats.waits
            finally:
                over.set()
                hog.join()

    return anyio.run(main)


def hog(*, rounds: int, scale: float, folder: Path) -> list[Row]:
    nodes = max(20, round(300 * scale))
    worst: list[float] = []

    def beside(place: Path) -> Sample:
        waits = beside_a_hog(nodes, place)
        worst.append(percentile(waits, 0.99) * 1e6)
        return Sample(statistics.median(waits) * 1e6)

    contenders: dict[str, Contender] = {
        "sqlite3": functools.partial(raw_sqlite, rows=200),
        "dagresume": beside,
    }
    report = compare("hog", nodes, contenders, [], rounds=rounds, folder=folder)
    commit, switch = report.microseconds["sqlite3"].median, sys.getswitchinterval() * 1e6
    return [
        Row(
            "hog",
            "p99 of checkpoint latency beside a thread that computes",
            f"3 × the switch interval of {switch / 1e3:g} ms + one raw commit",
            1,
            Spread.of([each / (3 * switch + commit) for each in worst[1:]]),
            ours=Spread.of(worst[1:]),
            theirs=Spread.of([3 * switch + commit]),
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
    minutes = 5 * scale
    found: list[array[float]] = []

    def once(place: Path) -> Sample:
        found.append(steady(minutes * 60 if found else 1, place))  # the first one warms up
        return Sample(statistics.median(found[-1]) * 1e6)

    report = compare("tail", 1, {"dagresume": once}, [], rounds=1, folder=folder)
    worst = percentile(found[-1], 0.999)
    return [
        Row(
            "tail",
            f"p99.9 of checkpoint latency, {minutes:g} minutes of {RATE} nodes a second",
            "its p50",
            10,
            Spread.of([worst / statistics.median(found[-1])]),
            ours=Spread.of([worst * 1e6]),
            theirs=report.microseconds["dagresume"],
            figures="µs",
        )
    ]
