"""A workflow for the telemetry tests that other processes import as well."""

import os
import signal
from pathlib import Path

from opentelemetry import trace

from dagresume import Workflow


def trace_id() -> str:
    """Give the id of the trace that the caller is in."""
    return format(trace.get_current_span().get_span_context().trace_id, "032x")


def compute(n: int) -> str:
    """Tell from a worker process which trace it is in."""
    return trace_id()


def flow() -> Workflow:
    """Give a map and a join; the join kills its process while the file `alive` is beside the database."""
    wf = Workflow("traced", idempotent=True)

    @wf.node
    async def numbers() -> list[int]:
        return [1, 2]

    @wf.node(for_each={"n": "numbers"})
    def doubled(n: int) -> int:
        return 2 * n

    @wf.node
    def total(doubled: list[int], alive: str) -> int:
        if alive and Path(alive).exists():
            Path(alive).write_text(trace_id())
            os.kill(os.getpid(), signal.SIGKILL)
        return sum(doubled)

    return wf
