"""What the engine says a checkpoint took is held against what is seen from outside."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from dagresume import Workflow
from dagresume.fakes import StoreWrapper
from dagresume.store import Outcome, Unit
from tests.engine.kit import Home

NODES, LATE = 12, 0.02  # seconds that each commit takes longer


class LateStore(StoreWrapper):
    """Every commit is late by a known time."""

    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        await asyncio.sleep(LATE)
        return await super().commit(units)


@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_wait_is_what_the_next_node_waited(home: Home, idempotent: bool) -> None:
    """From the return of a function to the end of its commit: no shorter than the commit took, no longer than
    it was until the next body had its first instruction (C1).
    """
    wf = Workflow("chain", idempotent=idempotent)
    begun: list[float] = []
    returned: list[float] = []

    async def body(x: int = 0) -> int:
        begun.append(time.perf_counter())
        await asyncio.sleep(0)
        returned.append(time.perf_counter())
        return x + 1

    for number in range(NODES):
        wf.node(id=f"n{number}", args={"x": f"n{number - 1}"} if number else {})(body)
    async with home.engine(wrap=LateStore) as engine:
        result = await engine.run(wf)
    ended = time.perf_counter()
    waits = list(result.stats.waits)
    assert len(waits) == NODES
    for wait, left, seen in zip(waits, returned, [*begun[1:], ended], strict=True):
        assert LATE <= wait <= seen - left
    told = result.stats.checkpoint_latency
    assert (told.count, told.max) == (NODES, max(waits))
    assert min(waits) <= told.p50 <= told.p95 <= told.p99 <= told.max
