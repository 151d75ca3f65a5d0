"""A LangGraph graph as the body of a node: what it had reached when its process died is where it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dagresume.context import Context
from dagresume.errors import DagresumeError

__all__ = ["GraphInterrupted", "run_graph"]


class GraphInterrupted(DagresumeError):
    """The graph waits for a person (`interrupt()`), which a node cannot; `.interrupts`. Ask with
    `wf.approval` or `wf.wait_for` before or after it instead.
    """

    def __init__(self, path: str, interrupts: Any) -> None:
        self.interrupts = interrupts
        super().__init__(
            f"{path}: the graph inside waits for an answer ({interrupts!r}), which a node cannot give."
            " Ask with wf.approval or wf.wait_for outside of the graph."
        )


async def run_graph(
    graph: Any,
    inputs: Any,
    ctx: Context,
    config: Mapping[str, Any] | None = None,
) -> Any:
    """Run a compiled graph to its end and give its values; one that was cut off goes on at its last
    superstep.

    `graph`: compiled with a checkpointer (`DagresumeSaver`). Its thread is this operation of this path:
    another attempt or process goes on with it, a person's `retry` of the completed path begins a new one.
    Raises GraphInterrupted if it waits for a person.
    """
    told = dict(config or {})
    configurable = {**told.get("configurable", {}), "thread_id": ctx.idempotency_key}
    told["configurable"] = configurable
    state = await graph.aget_state(told)
    if not state.created_at:
        await graph.ainvoke(inputs, told, durability="sync")
    elif state.next:
        await graph.ainvoke(None, told, durability="sync")
    state = await graph.aget_state(told)
    waiting = [each for task in state.tasks for each in task.interrupts]
    if waiting or state.next:
        raise GraphInterrupted(ctx.path, waiting or f"before {', '.join(state.next)}")
    return state.values
