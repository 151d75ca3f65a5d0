"""A loop on which something happens between any two steps, and a workflow with a bit of everything."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from dagresume import Context, Limit, NodeStatus, Retry, RunInfo, RunStatus, UncertainNode, Workflow
from tests.engine.kit import Boom, Home

Act = Callable[[], object]
OPTIONS: dict[str, Any] = {
    "limits": {"one": Limit(concurrency=1), "slow": Limit(rate="500/second")},
    "spill_bytes": 1000,
    "grace_seconds": 0.05,
    "concurrency": 4,
}
__all__ = ["EVERY", "OPTIONS", "SINK", "SteppedLoop", "World", "everything", "examine", "go_on"]


class _Ready(deque[asyncio.Handle]):
    """What a loop does next: something else first, before its n-th step from when that was said."""

    left = 0
    steps = 0
    act: Act = staticmethod(int)

    def popleft(self) -> asyncio.Handle:
        """Give the next step; this may raise what `act` raises, as a signal does anywhere."""
        self.steps += 1
        if self.left:
            self.left -= 1
            if not self.left:
                self.act()
        return super().popleft()


class SteppedLoop(asyncio.SelectorEventLoop):
    """A loop that counts its steps (callbacks), and acts before the n-th."""

    def __init__(self) -> None:
        super().__init__()
        self._ready = _Ready(self._ready)  # type: ignore[has-type]  # the name is asyncio's own

    @property
    def steps(self) -> int:
        """How many steps it has made."""
        return self._ready.steps

    @property
    def is_armed(self) -> bool:
        """Whether what was to be done has not been done yet."""
        return self._ready.left > 0

    def before(self, n: int, act: Act) -> None:
        """Do this before the n-th step from now; 0 for never."""
        self._ready.left, self._ready.act = n, act


class World:
    """What began, returned and failed, kept outside the store."""

    def __init__(self) -> None:
        self.began: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.paid = 0

    async def act(self, ctx: Context, value: Any) -> Any:
        """Be a body: begin, take a while, return."""
        self.began[ctx.path] += 1
        for _ in range(2):
            await asyncio.sleep(0)
        self.ended[ctx.path] += 1
        return value

    async def pay(self) -> int:
        """Do what must be done once."""
        await asyncio.sleep(0)
        self.paid += 1
        return 7

    def hanging(self, wf: Workflow) -> set[str]:
        """Give the paths, not idempotent, of which a body began and neither returned nor failed."""
        risky = {name for name, node in wf.nodes.items() if not node.idempotent}
        open_ = {p for p, n in self.began.items() if n > self.ended[p] + self.failed[p]}
        return {path for path in open_ if path.partition("/")[0] in risky}


EVERY = (
    *("numbers", "item[0]", "item[1]", "item[2]", "flaky", "big", "threaded"),
    *("sub/first", "sub/second", "rounds[0]", "rounds[1]", "buys", "sink"),
)
"""The paths of `everything` that give something that is kept."""


def everything(world: World) -> Workflow:
    """Effects, a limit of each kind, a retry, a big output, a thread, a pure node, a nap, a graph, rounds."""
    wf = Workflow("everything")

    @wf.node
    async def numbers(ctx: Context) -> list[int]:
        return list(await world.act(ctx, [1, 2, 3]))

    _add_leaves(wf, world)
    _add_graphs(wf, world)
    wf.sleep("nap", 0.001, depends_on=["big"])

    @wf.node(depends_on=["nap", "threaded"])
    async def sink(item: list[int], flaky: str, sub: int, rounds: int, buys: int, ctx: Context) -> list[Any]:
        return list(await world.act(ctx, [sum(item), flaky, sub, rounds, buys]))

    return wf


def _add_leaves(wf: Workflow, world: World) -> None:
    @wf.node(for_each={"n": "numbers"}, limit="one", idempotent=True)
    async def item(n: int, ctx: Context) -> int:
        return int(await world.act(ctx, 10 * n))

    @wf.node(depends_on=["numbers"], retry=Retry(2, delay=0.001, jitter=0), limit="slow")
    async def flaky(ctx: Context) -> str:
        if not world.failed[ctx.path]:
            world.began[ctx.path] += 1
            world.failed[ctx.path] += 1
            raise Boom
        return str(await world.act(ctx, "at last"))

    @wf.node(depends_on=["numbers"])
    async def big(ctx: Context) -> str:
        return str(await world.act(ctx, "x" * 5000))

    @wf.node(depends_on=["numbers"], idempotent=True)
    def threaded(ctx: Context) -> int:
        world.began[ctx.path] += 1
        world.ended[ctx.path] += 1
        return 1

    @wf.node(depends_on=["numbers"], idempotent=True)
    async def buys(ctx: Context) -> int:
        world.began[ctx.path] += 1
        price = int(await ctx.once("price", world.pay))
        await ctx.save_state({"paid": price})
        world.ended[ctx.path] += 1
        return price


def _add_graphs(wf: Workflow, world: World) -> None:
    @wf.node(checkpoint=False, idempotent=True)
    async def pure(numbers: list[int]) -> int:
        await asyncio.sleep(0)
        return sum(numbers)

    inner = Workflow("inner", output="second")

    @inner.node
    async def first(x: int, ctx: Context) -> int:
        return int(await world.act(ctx, x + 1))

    @inner.node
    async def second(first: int, ctx: Context) -> int:
        return int(await world.act(ctx, first + 1))

    wf.subworkflow("sub", inner, args={"x": "pure"})

    @wf.loop(initial="pure", until=lambda state: state >= 8, max_iterations=5, idempotent=True)
    async def rounds(state: int, ctx: Context) -> int:
        return int(await world.act(ctx, state + 1))


SINK = [60, "at last", 8, 8, 7]


async def examine(home: Home, world: World, *ends: RunStatus) -> RunInfo | None:
    """Look at what a disturbed session left: nothing of it runs, what returned is kept, nothing else is."""
    async with home.engine() as engine:
        infos = await engine.runs()
        assert len(infos) <= 1, infos
        if not infos:
            assert not world.began, "bodies of a run that was never made"
            return None
        info = await engine.get(infos[0].run_id)
    assert info.owner is None, info
    assert info.status in ends, info
    running = {path for path, node in info.nodes.items() if node.status is NodeStatus.RUNNING}
    assert not running, f"{running} as if they were under way"
    done = {path for path, node in info.nodes.items() if node.status is NodeStatus.COMPLETED}
    returned = {path for path in EVERY if world.ended[path]}
    lost = returned - done - {"threaded"}  # a thread notes its return a moment before it has returned
    assert not lost, f"{lost} returned and was not kept"
    assert done & set(EVERY) <= returned, f"{done - returned} never returned"
    return info


async def go_on(home: Home, wf: Workflow, world: World, run_id: str | None = None) -> set[str]:
    """Bring the run to its end in a new engine, each path once; gives those that needed a person's word.

    `run_id`: it was cancelled, so that only a person's word goes on with it.
    """
    hanging = world.hanging(wf)
    async with home.engine(wf, **OPTIONS) as engine:
        try:
            result = await (engine.retry(run_id) if run_id else engine.run(wf, key="k"))
        except UncertainNode as error:
            refused = set(error.paths)
            result = await engine.retry(error.run_id)
        else:
            refused = hanging if run_id else set()
        assert refused == hanging, "what may have taken effect is not what was refused"
        assert result["sink"] == SINK
    often = {path: world.ended[path] for path in EVERY if world.ended[path] != 1}
    often.pop("threaded", None)
    assert not often, f"returned more than once: {often}"
    return hanging
