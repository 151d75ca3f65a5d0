"""Random graphs stopped at random moments: they end as the undisturbed run did, nothing is done twice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from dagresume import Context, Engine, Limit, Retry, RunResult, RunStatus, UncertainNode, Workflow
from tests.engine.kit import Boom, Home
from tests.engine.test_random_graphs import Spec, make_specs, output, plain

LIMITS = {"two": Limit(concurrency=2)}


class World:
    """Counts what began and what ended, and says when it is time to stop."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.began: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.left = 1_000_000
        self.stop = asyncio.Event()

    def tick(self) -> None:
        """Count down to the moment of the stop."""
        self.left -= 1
        if self.left <= 0:
            self.stop.set()


def build(specs: list[Spec], world: World, seed: int) -> Workflow:
    wf = Workflow("stopped", retry=Retry(3, delay=0))
    chance = random.Random(seed)

    def add(spec: Spec) -> None:
        flaky = chance.random() < 0.2
        turns = chance.randint(0, 6)

        async def body(ctx: Context, **given: Any) -> Any:
            world.began[ctx.path] += 1
            world.tick()
            for _ in range(turns):
                await asyncio.sleep(0)
            if flaky and world.began[ctx.path] == 1:
                raise Boom(ctx.path)
            names = [*(["item"] if spec.source else []), *(f"in_{name}" for name in spec.takes)]
            found = output(spec, ctx.path, [given[name] for name in names])
            world.tick()
            world.ended[ctx.path] += 1
            return found

        options: dict[str, Any] = {"for_each": {"item": spec.source}} if spec.source else {}
        if chance.random() < 0.3:
            options["limit"] = "two"
        wf.node(
            id=spec.name,
            depends_on=spec.after,
            args={f"in_{name}": name for name in spec.takes},
            trigger=spec.trigger,
            idempotent=spec.idempotent,
            checkpoint=not spec.pure,
            **options,
        )(body)

    for spec in specs:
        add(spec)
    return wf


async def disturb(engine: Engine, wf: Workflow, run_id: str | None, how: str, world: World) -> None:
    """Run, or go on, until it ends or the moment of the stop has come."""

    async def go() -> RunResult:
        if run_id is None:
            return await engine.run(wf, key="k", raise_on_failure=False)
        try:
            return await engine.resume(run_id, raise_on_failure=False)
        except UncertainNode:
            return await engine.retry(run_id, raise_on_failure=False)

    task = asyncio.create_task(go())
    stop = asyncio.create_task(world.stop.wait())
    await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if not task.done() and how == "cancelled caller":
        task.cancel()
    elif not task.done():
        await engine._close()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()


async def play(seed: int) -> None:
    rng = random.Random(seed)
    specs = make_specs(rng)
    calm = World(rng)
    async with Home(None).engine(limits=LIMITS) as engine:
        expected = await engine.run(build(specs, calm, seed), raise_on_failure=False)
    world = World(rng)
    wf = build(specs, world, seed)
    home, run_id = Home(None), None
    done: set[str] = set()
    for _ in range(50):
        world.stop.clear()
        world.left = rng.randint(1, 8) if rng.random() < 0.8 else 1_000_000
        how = rng.choice(["cancelled caller", "engine left"])
        before = Counter(world.began)
        slots, grace = rng.choice([1, 3, 64]), rng.choice([0, 0.05])
        async with home.engine(wf, limits=LIMITS, grace_seconds=grace, concurrency=slots) as engine:
            await disturb(engine, wf, run_id, how, world)
        async with home.engine() as engine:
            [run] = await engine.runs()
            info = await engine.get(run.run_id)
        run_id = run.run_id
        assert info.status in {RunStatus.COMPLETED, RunStatus.INTERRUPTED}, info.status
        pure = {spec.name for spec in specs if spec.pure}
        for path in done - pure:
            assert world.began[path] == before[path], f"{path} had completed and ran again"
        done |= {path for path, node in info.nodes.items() if node.status == "completed"}
        for path, node in info.nodes.items():
            assert node.status != "running", path
            if world.ended[path] == 0 and node.reason != "passed" and "[" not in path and path in world.began:
                assert node.status != "completed", f"{path} never returned"
        if info.status is RunStatus.COMPLETED:
            break
    else:
        pytest.fail("it never completed")
    async with home.engine(wf) as engine:
        stored = await engine.result(run_id or "")
    assert set(stored.outputs) == set(expected.outputs)
    for name in expected.outputs:
        assert plain(stored[name]) == plain(expected[name]), name


@pytest.mark.parametrize("start", range(0, 160, 40))
async def test_stopped_graphs_end_as_undisturbed_ones(start: int) -> None:
    """C3, C5, C6, B34: callers cancelled, engines left at any moment; retries, limits, one slot or many."""
    for seed in range(start, start + 40):
        try:
            async with asyncio.timeout(20):
                await play(seed)
        except (Exception, pytest.fail.Exception) as error:
            error.add_note(f"seed {seed}")
            raise
