"""Random workflows of nodes, maps, sub-workflows, loops, conditions and triggers, broken and cut off at will:
each resume does what its plan said, and the end is that of a run that nothing happened to.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections import Counter
from typing import Any

import pytest

from dagresume import Context, RunResult, RunStatus, Workflow
from tests.engine.kit import Boom, Home, foreseen

NODES = ("plain", "plain", "pure", "list", "map", "wait", "sub", "subs", "loop", "rounds")


def number(value: Any) -> int:
    """Make a number of whatever a node gave."""
    if isinstance(value, str):
        return len(value) % 5
    if isinstance(value, dict):
        value = {name: told for name, told in value.items() if name != "at"}
        value = list(value.values())
    return sum(map(number, value)) if isinstance(value, list) else int(value or 0)


class Garden:
    """Grows workflows from a seed; knows what begins, and what is to break or to hang."""

    def __init__(self, seed: int) -> None:
        self.waits = seed % 2 == 0  # for people and signals too
        self.rng = random.Random(seed)
        self.began: Counter[str] = Counter()
        self.broken: set[str] = set()
        self.hangs: set[str] = set()
        self.reached = asyncio.Event()
        self._names = 0

    async def passes(self, path: str) -> None:
        self.began[path] += 1
        await asyncio.sleep(0)
        if path in self.broken:
            raise Boom(path)
        if path in self.hangs:
            self.reached.set()
            await asyncio.sleep(60)

    def grow(self, depth: int = 0, state: bool = False) -> Workflow:
        """Give a workflow with the input `n`, or `state`."""
        rng = self.rng
        self._names += 1
        wf = Workflow(f"w{self._names}", idempotent=True if not depth else None)
        source, known = "state" if state else "n", ["top"]
        lists: list[str] = []
        self._plain(wf, "top", source, depth, [], when=None)
        for k in range(rng.randint(1, 5 - depth)):
            kind = rng.choice(NODES if depth < 2 else NODES[:6] + NODES[8:9])
            if kind in {"map", "subs"} and not lists:
                kind = "list"
            name = f"{kind}{k}"
            one = rng.choice([source, *known])
            after = [rng.choice(known)] if known and rng.random() < 0.3 else []
            getattr(self, f"_{kind}")(
                wf, name, rng.choice(lists) if kind in {"map", "subs"} else one, depth, after
            )
            known.append(name)
            if kind in {"list", "map"}:
                lists.append(name)
        return wf

    def _when(self) -> Any:
        odds = self.rng.randint(2, 4)
        return (lambda a: number(a) % odds != 1) if self.rng.random() < 0.3 else None

    def _trigger(self) -> Any:
        return self.rng.choice(["none_failed"] * 5 + ["all_done", "any_success", "all_success"])

    def _plain(self, wf: Workflow, name: str, one: str, depth: int, after: list[str], **options: Any) -> None:
        async def body(a: Any, ctx: Context) -> int:
            await self.passes(ctx.path)
            return (number(a) + zlib.crc32(name.encode())) % 7

        options = {"args": {"a": one}, "when": self._when(), "trigger": self._trigger()} | options
        wf.node(id=name, depends_on=after, **options)(body)

    def _pure(self, wf: Workflow, name: str, one: str, depth: int, after: list[str]) -> None:
        self._plain(wf, name, one, depth, after, checkpoint=False, idempotent=True)

    def _list(self, wf: Workflow, name: str, one: str, depth: int, after: list[str]) -> None:
        size = self.rng.choice([0, 1, 2, 3])

        async def body(a: Any, ctx: Context) -> list[int]:
            await self.passes(ctx.path)
            return [number(a) + k for k in range(size)]

        wf.node(id=name, args={"a": one}, depends_on=after)(body)

    def _map(self, wf: Workflow, name: str, one: str, depth: int, after: list[str]) -> None:
        self._plain(wf, name, one, depth, after, args={}, for_each={"a": one}, concurrency=self._few())

    def _wait(self, wf: Workflow, name: str, one: str, depth: int, after: list[str]) -> None:
        after = [node for node in (one, *after) if node not in {"n", "state"}]
        kind = self.rng.choice(["approval", "sleep", "event"]) if self.waits else "sleep"
        if kind == "approval":
            wf.approval(name, depends_on=after)
        elif kind == "sleep":
            wf.sleep(name, self.rng.choice([0, 0.001]), depends_on=after)
        else:
            wf.wait_for(name, "event", depends_on=after)

    def _few(self) -> int | None:
        return self.rng.choice([None, 1, 2])

    def _sub(self, wf: Workflow, name: str, one: str, depth: int, after: list[str]) -> None:
        when = self._when()
        asks = when and (lambda n: when(n))
        wf.subworkflow(
            name, self.grow(depth + 1), args={"n": one}, when=asks, trigger=self._trigger(), depends_on=after
        )

    def _subs(self, wf: Workflow, name: str, one: str, depth: int, after: list[str]) -> None:
        when = self._when()
        asks = when and (lambda n: when(n))
        wf.subworkflow(
            name,
            self.grow(depth + 1),
            for_each={"n": one},
            when=asks,
            depends_on=after,
            concurrency=self._few(),
        )

    def _loop(self, wf: Workflow, name: str, one: str, depth: int, after: list[str]) -> None:
        async def body(state: Any, ctx: Context) -> int:
            await self.passes(ctx.path)
            return number(state) + 1

        wf.loop(name, body, initial=one, until=lambda s: s % 4 == 0, max_iterations=9, depends_on=after)

    def _rounds(self, wf: Workflow, name: str, one: str, depth: int, after: list[str]) -> None:
        until = iter_until(self.rng.randint(1, 3))
        wf.loop(
            name,
            self.grow(depth + 1, state=True),
            initial=one,
            until=until,
            max_iterations=3,
            depends_on=after,
        )


def iter_until(modulus: int) -> Any:
    return lambda state: number(state) % modulus == 0 or number(state) > 5


def timeless(value: Any) -> Any:
    """Leave out when something was approved."""
    if isinstance(value, list):
        return [timeless(each) for each in value]
    if isinstance(value, dict):
        return {name: timeless(each) for name, each in value.items() if name != "at"}
    return value


def ends(result: RunResult) -> tuple[str, dict[str, Any]]:
    return result.status, timeless({name: result.outputs[name] for name in result.outputs})


async def speak(home: Home, run_id: str) -> None:
    """Approve everything that waits, and send what is waited for."""
    async with home.engine() as engine:
        nodes = (await engine.get(run_id)).nodes
        for path, info in nodes.items():
            around = any(other.startswith((path + "/", path + "[")) for other in nodes)
            if info.status != "waiting" or around:
                continue
            if info.reason == "approval":
                await engine.decide(run_id, path)
            elif info.reason == "event":
                await engine.signal(run_id, "event")


async def cut_off(home: Home, wf: Workflow, garden: Garden, run_id: str | None, path: str) -> str:
    """Run or resume until this path is inside its body, and leave the engine."""
    garden.hangs, garden.reached = {path}, asyncio.Event()
    async with home.engine(wf, grace_seconds=0) as engine:
        if run_id is None:
            run_id = (await engine.start(wf, {"n": 3})).run_id
            work = None
        else:
            work = asyncio.ensure_future(engine.resume(run_id, raise_on_failure=False))
        reached = asyncio.ensure_future(garden.reached.wait())
        gone = asyncio.ensure_future(_over(engine, run_id, work))
        await asyncio.wait([reached, gone], return_when=asyncio.FIRST_COMPLETED)
        reached.cancel()
        gone.cancel()
    if work is not None:
        await work
    garden.hangs = set()
    return run_id


async def _over(engine: Any, run_id: str, work: Any) -> None:
    while run_id in engine._runs or (work is not None and not work.done()):  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def play(home: Home, seed: int) -> None:
    garden = Garden(seed)
    wf = garden.grow()
    undisturbed = await home.run(wf, {"n": 3})
    while undisturbed.status is RunStatus.WAITING:
        await speak(home, undisturbed.run_id)
        undisturbed = await home.go_on(wf, undisturbed.run_id)
    once = Counter(garden.began)
    paths = sorted(once)
    if not paths:
        return
    garden.began.clear()
    chosen = garden.rng.sample(paths, min(len(paths), garden.rng.randint(1, 4)))
    garden.broken = set(chosen)
    run_id = await cut_off(home, wf, garden, None, garden.rng.choice(paths))
    for k in range(100):
        status = (await home.info(run_id)).status
        if status == "completed" or (k > len(chosen) and status != "waiting"):
            break
        await speak(home, run_id)
        garden.broken = set(chosen[k:])
        plan = await home.plan(wf, run_id, items=True)
        result = await home.resume(wf, run_id)
        clean = not garden.broken and undisturbed.status is RunStatus.COMPLETED
        foreseen(wf, plan, result.executed, ends=clean)
    async with home.engine(wf) as engine:
        stored = await engine.result(run_id)
    assert ends(stored) == ends(undisturbed)
    if undisturbed.status is RunStatus.COMPLETED:
        assert set(once) <= set(garden.began)  # what runs on failures may have begun beside


@pytest.mark.parametrize("seed", range(40))
async def test_a_resume_does_what_its_plan_said(home: Home, seed: int) -> None:
    await play(home, seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_many_more() -> None:
    for seed in range(40, 1500):
        try:
            await play(Home(None), seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
