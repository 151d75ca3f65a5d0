"""What a node costs, in counts that do not depend on the machine's mood: a change that costs more is noticed
here and not by a benchmark on a busy day.

    python -m tests.engine.test_costs     prints all of them

The budgets are what was measured with Python 3.11 to 3.13 and a few percent more. One that is exceeded is
raised on purpose, with the reason, or not at all.
"""

from __future__ import annotations

import gc
import sqlite3
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import anyio
import networkx as nx
import pytest

from dagresume import Engine, Workflow, bench
from dagresume.bench import first, step
from dagresume.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Iterator


async def joined(a: int, b: int, c: int, d: int) -> int:
    return a + b + c + d


def chain(nodes: int) -> Workflow:
    return bench.chain(nodes, idempotent=True)


def careful_chain(nodes: int) -> Workflow:
    return bench.chain(nodes, idempotent=False)


def fanout(nodes: int) -> Workflow:
    return bench.fanout(nodes - 1, idempotent=True)


def careful_fanout(nodes: int) -> Workflow:
    return bench.fanout(nodes - 1, idempotent=False)


def layers(nodes: int) -> Workflow:
    """Four nodes a layer, each joined to the whole one above."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    for number in range(nodes):
        layer, place = divmod(number, 4)
        graph.add_node(f"l{layer}.{place}", run=joined if layer else first)
        for parent, name in enumerate("abcd") if layer else ():
            graph.add_edge(f"l{layer - 1}.{parent}", f"l{layer}.{place}", arg=name)
    return Workflow.from_graph("layers", graph, idempotent=True)


def mapped(nodes: int) -> Workflow:
    wf = Workflow("mapped", idempotent=True)

    @wf.node
    async def numbers() -> list[int]:
        return list(range(nodes))

    wf.node(for_each={"x": numbers}, id="step")(step)
    return wf


@dataclass
class Costs:
    """What was counted: calls of Python functions by name, on the loop and in the thread that writes."""

    loop: Counter[str] = field(default_factory=Counter)
    writer: Counter[str] = field(default_factory=Counter)
    statements: int = 0
    hops: int = 0
    commits: int = 0
    garbage: int = 0
    rows: int = 0
    bytes: int = 0


def _counting(found: Counter[str]) -> Callable[[FrameType, str, Any], None]:
    def note(frame: FrameType, what: str, _: Any) -> None:
        if what == "call":
            found[frame.f_code.co_qualname] += 1

    return note


@contextmanager
def counted(costs: Costs) -> Iterator[None]:
    """Count what happens on this thread, and in `Writer.write`."""
    with pytest.MonkeyPatch.context() as patch:
        write, execute, many = Writer.write, Writer.execute, Writer.executemany

        def written(self: Writer, units: Any) -> Any:
            costs.hops += 1
            costs.commits -= self.commits
            sys.setprofile(_counting(costs.writer))
            try:
                return write(self, units)
            finally:
                sys.setprofile(None)
                costs.commits += self.commits

        def executed(self: Writer, *args: Any) -> Any:
            costs.statements += 1
            return execute(self, *args)

        def executed_many(self: Writer, *args: Any) -> Any:
            costs.statements += 1
            return many(self, *args)

        patch.setattr(Writer, "write", written)
        patch.setattr(Writer, "execute", executed)
        patch.setattr(Writer, "executemany", executed_many)
        sys.setprofile(_counting(costs.loop))
        try:
            yield
        finally:
            sys.setprofile(None)


async def measure(make: Callable[[int], Workflow], nodes: int, folder: Path, runs: int = 1) -> Costs:
    """Count the second run of a workflow, or as many at once: what is made once is made by then."""
    costs, workflow, database = Costs(), make(nodes), folder / f"{make.__name__}-{nodes}-{runs}.db"

    async def all_of_them() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(runs):
                group.start_soon(engine.run, workflow)

    async with Engine(database, workflows=[workflow]) as engine:
        await engine.run(workflow)
        gc.collect()
        gc.disable()
        try:
            with counted(costs):
                await (engine.run(workflow) if runs == 1 else all_of_them())
            costs.garbage = gc.collect()
        finally:
            gc.enable()
    with closing(sqlite3.connect(database)) as conn:
        costs.rows = conn.execute("SELECT count(*) FROM dagresume_events").fetchone()[0]
        costs.rows -= conn.execute("SELECT count(*) FROM dagresume_events WHERE run = 1").fetchone()[0]
    costs.bytes = database.stat().st_size
    return costs


@dataclass(frozen=True)
class Budget:
    """The most that a node of a shape may cost."""

    make: Callable[[int], Workflow]
    nodes: int
    loop: float  # calls of Python functions
    writer: float
    commits: float
    statements: float  # of a commit
    rows: float


BUDGETS = (
    Budget(chain, 200, 142, 25, 1.02, 1.15, 1.02),
    Budget(careful_chain, 200, 142, 25, 1.02, 1.15, 2.02),
    Budget(fanout, 2000, 58, 3, 0.02, 3, 1.02),
    Budget(careful_fanout, 2000, 64, 3, 0.04, 2, 2.02),
    Budget(layers, 400, 78, 8.5, 0.27, 1.3, 1.02),
    Budget(mapped, 2000, 80, 3, 0.02, 3, 1.02),
)
EACH = pytest.mark.parametrize("budget", BUDGETS, ids=[budget.make.__name__ for budget in BUDGETS])


def most(calls: Counter[str], nodes: int) -> str:
    return ", ".join(f"{name} {count / nodes:.2f}" for name, count in calls.most_common(12))


@EACH
async def test_a_node_costs_no_more_than_it_did(budget: Budget, tmp_path: Path) -> None:
    nodes = budget.nodes
    costs = await measure(budget.make, nodes, tmp_path)
    if costs.loop.total() > budget.loop * nodes:  # a slow disk makes the loop turn a few times more
        (tmp_path / "again").mkdir()
        costs = await measure(budget.make, nodes, tmp_path / "again")
    loop, writer = costs.loop.total() / nodes, costs.writer.total() / nodes
    assert loop <= budget.loop, f"{loop:.1f} calls on the loop: {most(costs.loop, nodes)}"
    assert writer <= budget.writer, f"{writer:.1f} calls in the writer: {most(costs.writer, nodes)}"
    assert costs.commits / nodes <= budget.commits
    assert costs.statements / costs.commits <= budget.statements
    assert costs.hops <= costs.commits, "one hop a commit"
    assert costs.rows / nodes <= budget.rows
    assert costs.garbage < 300, "a run is a circle that the collector finds, no node is one"


@EACH
async def test_the_cost_of_a_node_does_not_grow_with_their_number(budget: Budget, tmp_path: Path) -> None:
    few, many = budget.nodes, 4 * budget.nodes
    one, other = [await measure(budget.make, nodes, tmp_path) for nodes in (few, many)]
    assert other.loop.total() / many <= 1.05 * one.loop.total() / few
    assert other.writer.total() / many <= 1.05 * one.writer.total() / few
    assert other.bytes / many <= 1.1 * one.bytes / few


async def test_many_runs_share_their_commits(tmp_path: Path) -> None:
    """A run that ends waits for the next transaction, its neighbours in the queue do not."""
    costs = await measure(fanout, 10, tmp_path, runs=100)
    assert costs.commits <= 25
    assert costs.statements <= 3.5 * 100, "a look, a row and a record for each, little for all"
    assert costs.loop.total() / 1000 <= 100, most(costs.loop, 1000)


def main() -> None:
    for budget in BUDGETS:
        with tempfile.TemporaryDirectory() as folder:
            costs = anyio.run(measure, budget.make, budget.nodes, Path(folder))
        nodes, commits = budget.nodes, costs.commits
        print(
            f"{budget.make.__name__:15} loop {costs.loop.total() / nodes:6.1f}"
            f"  writer {costs.writer.total() / nodes:5.1f}  commits {commits / nodes:6.3f}"
            f"  statements {costs.statements / commits:5.2f}  hops {costs.hops / commits:5.2f}"
            f"  rows {costs.rows / nodes:5.2f}  bytes {costs.bytes / 2 / nodes:6.1f}"
            f"  garbage {costs.garbage / nodes:5.2f}"
        )


if __name__ == "__main__":
    main()
