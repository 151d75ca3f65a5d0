"""Applications that make tasks in a way of their own: the engine's bodies begin as they always do.

An eager task (Python 3.12) runs within the call that makes it. Were a body to return there, the engine would
start the next one from within starting this one, as deep as a graph is large.
"""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pytest

from dagresume import Context, RunStatus, Workflow
from tests.engine.kit import Home

eager = pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
MANY = 2 * sys.getrecursionlimit()
WHERE: ContextVar[str] = ContextVar("WHERE", default="")


@contextmanager
def factory(make: Callable[..., Any]) -> Iterator[None]:
    """Have the loop make its tasks so, as an application may."""
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()
    loop.set_task_factory(make)
    try:
        yield
    finally:
        loop.set_task_factory(before)


def make_eagerly() -> Any:
    return getattr(asyncio, "eager_task_factory")  # noqa: B009  # unknown to a type checker for 3.11


def wide(*, checkpoint: bool = True) -> Workflow:
    wf = Workflow("wide", idempotent=True)

    @wf.node
    async def numbers() -> list[int]:
        return list(range(MANY))

    @wf.node(for_each={"x": numbers}, checkpoint=checkpoint)
    async def double(x: int) -> int:
        return 2 * x

    @wf.node(args={"doubled": double})
    async def total(doubled: list[int]) -> int:
        return sum(doubled)

    return wf


def long() -> Workflow:
    """Give a chain longer than the interpreter's stack, of which the last one is stored."""
    wf = Workflow("long", idempotent=True)

    async def first() -> int:
        return 0

    async def after(x: int) -> int:
        return x + 1

    wf.node(id="n0")(first)
    for number in range(1, MANY):
        wf.node(id=f"n{number}", args={"x": f"n{number - 1}"}, checkpoint=number == MANY - 1)(after)
    return wf


@eager
@pytest.mark.parametrize("checkpoint", [True, False])
async def test_eager_bodies_that_return_at_once_do_not_pile_up(home: Home, checkpoint: bool) -> None:
    with factory(make_eagerly()):
        result = await home.run(wide(checkpoint=checkpoint))
    assert result["total"] == MANY * (MANY - 1)


@eager
async def test_an_eager_chain_is_as_long_as_it_likes(home: Home) -> None:
    with factory(make_eagerly()):
        result = await home.run(long())
    assert result[f"n{MANY - 1}"] == MANY - 1


@eager
async def test_a_run_cancelled_by_its_first_body_starts_no_other(home: Home) -> None:
    """What was made and has not begun is stopped, as with any task."""
    wf = Workflow("cancelled")
    begun: list[str] = []

    @wf.node
    async def first(ctx: Context) -> None:
        begun.append("first")
        await engine.cancel(ctx.run_id)

    @wf.node
    async def second() -> None:
        begun.append("second")

    with factory(make_eagerly()):
        async with home.engine(wf) as engine:
            result = await engine.run(wf, raise_on_failure=False)
    assert result.status == RunStatus.CANCELLED
    assert begun == ["first"]


@eager
async def test_an_eager_body_has_a_context_of_its_own(home: Home) -> None:
    wf = Workflow("contexts", idempotent=True)

    @wf.node
    async def numbers() -> list[int]:
        return list(range(50))

    @wf.node(for_each={"x": numbers})
    async def seen(x: int) -> str:
        before = WHERE.get()
        WHERE.set(str(x))
        return before

    with factory(make_eagerly()):
        result = await home.run(wf)
    assert result["seen"] == [""] * 50
    assert WHERE.get() == ""


async def test_bodies_are_tasks_of_the_applications_own_factory(home: Home) -> None:
    """Who watches tasks by making them sees those of the bodies too."""
    made: list[str] = []

    def watch(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(work.__qualname__)
        return asyncio.Task(work, loop=loop, **options)

    wf = Workflow("watched")

    @wf.node
    async def body() -> str:
        return type(asyncio.current_task()).__name__

    with factory(watch):
        assert (await home.run(wf))["body"] == "Task"
    assert made.count("Run._drive") == 1
