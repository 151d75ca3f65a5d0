"""What the engine says a checkpoint took is held against what is seen from outside."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

import pytest

from dagresume import Workflow
from dagresume.fakes import StoreWrapper
from dagresume.store import Outcome, Store, Unit
from tests.engine.kit import Home

NODES, LATE = 12, 0.02  # seconds that each commit takes longer


class LateStore(StoreWrapper):
    """Every commit takes longer; it is known how long the shortest took, as a loop's clock may be coarse."""

    shortest = math.inf

    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        begun = time.perf_counter()
        await asyncio.sleep(LATE)
        outcomes = await super().commit(units)
        self.shortest = min(self.shortest, time.perf_counter() - begun)
        return outcomes


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
    late: list[LateStore] = []

    def wrap(store: Store) -> LateStore:
        late.append(LateStore(store))
        return late[-1]

    async with home.engine(wrap=wrap) as engine:
        result = await engine.run(wf)
    ended = time.perf_counter()
    waits = list(result.stats.waits)
    assert len(waits) == NODES
    for wait, left, seen in zip(waits, returned, [*begun[1:], ended], strict=True):
        assert late[0].shortest <= wait <= seen - left
    told = result.stats.checkpoint_latency
    assert (told.count, told.max) == (NODES, max(waits))
    assert min(waits) <= told.p50 <= told.p95 <= told.p99 <= told.max
