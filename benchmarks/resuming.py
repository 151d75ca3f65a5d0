"""What it costs to go on: a resume up to the first instruction of the node that had failed, and a plan.

A map of 10⁵ items, or as many nodes of a graph, have completed; the node that joins them has failed. Measured
is the time from the call of `engine.resume` to the first instruction of that node, which has its 10⁵ inputs
then, decoded. Against it stands reading those rows with the standard library's sqlite3, the same columns, in
this thread.
"""

import contextlib
import functools
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import anyio
import networkx as nx

from benchmarks.commit import Contender, Sample, compare
from benchmarks.maps import spread_out
from benchmarks.rows import Row, pair
from dagresume import Engine, RunFailed, Workflow
from dagresume.bench import Spread

ROWS = """SELECT kind, status, attempt, at, path, reason, input, digest, size, took, data, output, seq
FROM dagresume_events ORDER BY seq"""


class Joined:
    """A run whose map, or whose plain nodes, have completed and whose last node fails each time."""

    def __init__(self, items: int, *, plain: bool = False) -> None:
        self.items, self.begun_at = items, 0.0
        self.workflow = self._plain() if plain else self._mapped()

    def _fail(self, values: list[int]) -> int:
        self.begun_at = time.perf_counter()
        if len(values) != self.items:
            raise SystemExit(f"{len(values)} of {self.items} inputs arrived")
        raise ValueError("not today")

    def _mapped(self) -> Workflow:
        wf, fail = spread_out(self.items), self._fail

        @wf.node
        async def join(doubled: list[int]) -> int:
            return fail(doubled)

        return wf

    def _plain(self) -> Workflow:
        names = [f"n{number}" for number in range(self.items)]
        fail = self._fail

        async def join(**values: int) -> int:
            return fail([*values.values()])

        async def one() -> int:
            return 1

        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_node("join", run=join, idempotent=True)
        for name in names:
            graph.add_node(name, run=one, idempotent=True)
            graph.add_edge(name, "join", arg=name)
        return Workflow.from_graph("plain", graph)

    def prepare(self, database: Path) -> None:
        async def main() -> None:
            async with Engine(database, workflows=[self.workflow]) as engine:
                try:
                    await engine.run(self.workflow, key="it")
                except RunFailed as failed:
                    self.run_id = failed.run_id

        anyio.run(main)

    def resumed(self, database: Path, _folder: Path) -> Sample:
        async def main() -> float:
            async with Engine(database, workflows=[self.workflow]) as engine:
                begun = time.perf_counter()
                with contextlib.suppress(RunFailed):
                    await engine.resume(self.run_id)
                return self.begun_at - begun

        return Sample(anyio.run(main) / self.items * 1e6)

    def read(self, database: Path, _folder: Path) -> Sample:
        with closing(sqlite3.connect(database)) as connection:
            begun = time.perf_counter()
            rows = connection.execute(ROWS).fetchall()
            taken = time.perf_counter() - begun
        if len(rows) < self.items:
            raise SystemExit(f"{len(rows)} rows of {self.items} items")
        return Sample(taken / self.items * 1e6)

    def planned(self, database: Path, _folder: Path) -> Sample:
        async def main() -> float:
            async with Engine(database, workflows=[self.workflow]) as engine:
                begun = time.perf_counter()
                decisions = await engine.plan(self.run_id, items=True)
                told = sum(decision.action == "reuse" for decision in decisions)
                taken = time.perf_counter() - begun
            if told < self.items:
                raise SystemExit(f"only {told} of {self.items} paths are reused")
            return taken

        return Sample(anyio.run(main) / self.items * 1e6)


def _remove(database: Path) -> None:
    for file in database.parent.glob(f"{database.name}*"):
        if file.is_dir():
            shutil.rmtree(file)
        else:
            file.unlink()


def measure(*, rounds: int, scale: float, folder: Path) -> list[Row]:
    many, few = round(100_000 * scale), max(10, round(2_000 * scale))
    wide, small = Joined(many), Joined(few)
    graph, plain = Joined(many, plain=True), Joined(few, plain=True)
    works = (wide, graph, small, plain)
    bases = {each: folder / f"resume-{number}.db" for number, each in enumerate(works)}
    try:
        for each, base in bases.items():
            each.prepare(base)
        contenders: dict[str, Contender] = {
            "sqlite3 reading the rows": functools.partial(wide.read, bases[wide]),
            f"resume of a map of {many:,}": functools.partial(wide.resumed, bases[wide]),
            "sqlite3 reading the nodes": functools.partial(graph.read, bases[graph]),
            f"resume of {many:,} nodes": functools.partial(graph.resumed, bases[graph]),
            f"resume of a map of {few:,}": functools.partial(small.resumed, bases[small]),
            f"resume of {few:,} nodes": functools.partial(plain.resumed, bases[plain]),
        }
        read, mapped, read_nodes, nodes, *others = contenders
        pairs = [(mapped, read), (nodes, read_nodes)]
        report = compare("resume", many, contenders, pairs, rounds=rounds, folder=folder)
    finally:
        for base in bases.values():
            _remove(base)
    rows = []
    for one, other in pairs:
        against = "reading the same rows and columns with sqlite3"
        rows += [
            pair("resuming", report, one, other, 2.2, rounds=rounds, work=one, against=against),
            Row("resuming", one, "–", 4, report.microseconds[one], unit="µs per node", rounds=rounds),
        ]
    for name in others:
        spread = report.microseconds[name]
        told = Spread(*(value * few / 1e3 for value in (spread.median, spread.low, spread.high)))
        rows.append(Row("resuming", name, "the best peer, 7 ms", 6, told, unit="ms", rounds=rounds))
    return rows


def measure_plan(*, rounds: int, scale: float, folder: Path) -> list[Row]:
    many, few = round(1_000_000 * scale), round(100_000 * scale)
    wide, small = Joined(many), Joined(few)
    bases = {wide: folder / "plan-many.db", small: folder / "plan-few.db"}
    try:
        for each, base in bases.items():
            each.prepare(base)
        contenders: dict[str, Contender] = {
            f"plan of {each.items:,} paths": functools.partial(each.planned, bases[each]) for each in bases
        }
        one, other = contenders
        report = compare("plan", many, contenders, [(one, other)], rounds=rounds, folder=folder)
    finally:
        for base in bases.values():
            _remove(base)
    return [
        Row("planning", one, "–", 5, report.microseconds[one], unit="µs per path", rounds=rounds),
        pair("planning", report, one, other, 1.15, rounds=rounds, work=one, figures="µs per path"),
    ]
