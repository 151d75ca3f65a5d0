"""LangGraph with its SQLite saver and durability="sync", which it calls its most durable.

LANGGRAPH_API=graph (default): a StateGraph, a fan-out is one Send for each step. LANGGRAPH_API=functional: an
entrypoint with tasks.
"""

import asyncio
import operator
import os
from pathlib import Path
from typing import Annotated, Any, TypedDict

from harness import check, clock, last, main, step
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

FUNCTIONAL = os.environ.get("LANGGRAPH_API") == "functional"
CONFIG: Any = {"configurable": {"thread_id": "it"}, "recursion_limit": 1_000_000}


class State(TypedDict, total=False):
    steps: int
    x: int
    number: int
    results: Annotated[list[int], operator.add]
    count: int


def chain(steps: int) -> Any:
    async def follow(state: State) -> dict[str, int]:
        return {"x": step(state["x"])}

    graph = StateGraph(State)
    for number in range(steps):
        graph.add_node(f"n{number}", follow)
        graph.add_edge(f"n{number - 1}" if number else START, f"n{number}")
    graph.add_edge(f"n{steps - 1}", END)
    return graph


def fanout() -> Any:
    async def double(state: State) -> dict[str, list[int]]:
        return {"results": [step(state["number"])]}

    async def join(state: State) -> dict[str, int]:
        return {"count": last(len(state["results"]))}

    def spread(state: State) -> list[Send]:
        return [Send("double", {"number": number}) for number in range(state["steps"])]

    graph = StateGraph(State)
    graph.add_node("double", double)
    graph.add_node("join", join)
    graph.add_conditional_edges(START, spread, ["double"])
    graph.add_edge("double", "join")
    graph.add_edge("join", END)
    return graph


@task
async def follow(x: int) -> int:
    return step(x)


@task
async def joined(count: int) -> int:
    return last(count)


def function(saver: Any, work: str) -> Any:
    @entrypoint(checkpointer=saver)
    async def run(steps: int) -> int:
        if work == "chain":
            x = -1
            for _ in range(steps):
                x = await follow(x)
            return x
        results = await asyncio.gather(*[follow(number) for number in range(steps)])
        return await joined(len(results))

    return run


async def run(work: str, steps: int, folder: Path, again: bool) -> float:
    async with AsyncSqliteSaver.from_conn_string(f"{folder}/langgraph.db") as saver:
        await saver.setup()
        if FUNCTIONAL:
            graph, given = function(saver, work), steps
        else:
            graph = (chain(steps) if work == "chain" else fanout()).compile(checkpointer=saver)
            given = {"steps": steps, "x": -1, "results": []}
        begun = clock()
        found = await graph.ainvoke(None if again else given, CONFIG, durability="sync")
        taken = clock() - begun
    if not FUNCTIONAL:
        found = found["x"] if work == "chain" else found["count"]
    check(found, steps - 1 if work == "chain" else steps)
    return taken


if __name__ == "__main__":
    main("langgraph", run)
