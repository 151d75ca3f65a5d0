"""dagresume, default settings: WAL, synchronous=FULL."""

from pathlib import Path

import networkx as nx
from harness import check, clock, last, main, step

from dagresume import Engine, RunFailed, Workflow


async def first() -> int:
    return step(-1)


async def follow(x: int) -> int:
    return step(x)


async def double(x: int) -> int:
    return step(x)


async def join(double: list[int]) -> int:
    return last(len(double))


def chain(steps: int) -> Workflow:
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_node("n0", run=first)
    for number in range(1, steps):
        graph.add_node(f"n{number}", run=follow)
        graph.add_edge(f"n{number - 1}", f"n{number}", arg="x")
    return Workflow.from_graph("chain", graph, idempotent=True)


def fanout(steps: int) -> Workflow:
    wf = Workflow("fanout", idempotent=True)

    @wf.node
    async def numbers() -> list[int]:
        return list(range(steps))

    wf.node(for_each={"x": numbers})(double)
    wf.node(join)
    return wf


async def run(work: str, steps: int, folder: Path, again: bool) -> float:
    workflow = chain(steps) if work == "chain" else fanout(steps)
    async with Engine(folder / "runs.db", workflows=[workflow]) as engine:
        begun = clock()
        try:
            result = await engine.run(workflow, key="it")
        except RunFailed as failed:
            raise SystemExit(str(failed)) from failed
        taken = clock() - begun
        check(result[f"n{steps - 1}" if work == "chain" else "join"], steps - 1 if work == "chain" else steps)
    return taken


if __name__ == "__main__":
    main("dagresume", run)
