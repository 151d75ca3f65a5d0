"""Cancelled, stopped, interrupted between any two steps of the loop: the caller hears of it, nothing that
returned is lost, nothing hangs or stays behind, and the run goes on with each path once.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from dagresume import Engine, RunCancelled, RunHandle, RunInterrupted, RunResult, RunStatus, Workflow
from tests.engine.kit import Home, settle
from tests.engine.steps import OPTIONS, SINK, SteppedLoop, World, everything, examine, go_on

COMPLETED, INTERRUPTED, CANCELLED = RunStatus.COMPLETED, RunStatus.INTERRUPTED, RunStatus.CANCELLED
WAITING = RunStatus.WAITING
SECONDS = 20.0


class Case:
    """One session that is disturbed before its n-th step (and again some steps later)."""

    def __init__(self, home: Home, n: int, again: int) -> None:
        self.home, self.n, self.again = home, n, again
        self.world = World()
        self.wf: Workflow = everything(self.world)
        self.fired = self.heard = False
        self.ends = {COMPLETED, INTERRUPTED, WAITING}  # how the run may be left

    @property
    def loop(self) -> SteppedLoop:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SteppedLoop)
        return loop

    def engine(self) -> Engine:
        """Give an engine that has not been entered."""
        return self.home.engine(self.wf, **OPTIONS)

    def arm(self, act: Callable[[], object]) -> None:
        """Do it before the n-th step from now."""

        def first() -> None:
            self.fired = True
            self.loop.before(self.again, act)
            act()

        self.loop.before(self.n, first)

    async def cancelled(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Cancel this at the n-th step; it must be the CancelledError that comes out of it."""
        task = asyncio.create_task(work)

        def cancel() -> None:
            self.heard |= task.cancel()

        self.arm(cancel)
        await asyncio.wait([task])
        self.loop.before(0, int)
        assert task.cancelled() == self.heard, f"{task} was cancelled, and that was not heard of"
        return task


Way = Callable[[Case], Awaitable[None]]


async def a_task(case: Case) -> None:
    async with case.engine() as engine:
        task = await case.cancelled(engine.run(case.wf, key="k"))
        if not case.heard:
            assert task.result()["sink"] == SINK


async def an_outer_scope(case: Case) -> None:
    async with case.engine() as engine:
        result = None
        with anyio.CancelScope() as scope:
            case.arm(scope.cancel)
            result = await engine.run(case.wf, key="k")
        case.loop.before(0, int)
        assert scope.cancelled_caught == (result is None)  # anyio lets a task end that is about to
        assert case.fired or result is not None


def expire(scope: asyncio.Timeout) -> None:
    if not scope.expired():
        scope.reschedule(0)


async def a_timeout(case: Case) -> None:
    """As with asyncio.timeout whose time comes just then."""
    async with case.engine() as engine:
        try:
            async with asyncio.timeout(None) as scope:
                case.arm(partial(expire, scope))
                await engine.run(case.wf, key="k")
        except TimeoutError:
            assert case.fired
        case.loop.before(0, int)


async def a_resume(case: Case) -> None:
    """The second call is what is cancelled; the first one was left in the middle of its map."""
    async with case.engine() as engine:
        handle = await engine.start(case.wf, key="k")
        await settle(lambda: case.world.ended["item[0]"] > 0)
    async with case.engine() as engine:
        info = await engine.get(handle.run_id)
        again = engine.retry if case.world.hanging(case.wf) else engine.resume
        if info.status is not COMPLETED:
            await case.cancelled(again(handle.run_id))


async def a_start(case: Case) -> None:
    async with case.engine() as engine:

        async def start() -> RunHandle:
            return await engine.start(case.wf, key="k")

        task = await case.cancelled(start())
        if not case.heard:
            assert (await task.result().result())["sink"] == SINK


async def who_awaits_a_handle(case: Case) -> None:
    """The run is left alone."""
    async with case.engine() as engine:
        handle = await engine.start(case.wf, key="k")
        await case.cancelled(handle.result())
        assert (await handle.result())["sink"] == SINK
        case.ends = {COMPLETED}


async def the_whole_program(case: Case) -> None:
    """Opening and leaving the engine too."""

    async def program() -> RunResult:
        async with case.engine() as engine:
            return await engine.run(case.wf, key="k")

    await case.cancelled(program())


async def the_leaving(case: Case) -> None:
    """An engine that is being left, with a run under way, cannot be kept from it."""

    async def leave(engine: Engine) -> None:
        await engine.__aexit__(None, None, None)

    engine = await case.engine().__aenter__()
    await engine.start(case.wf, key="k")
    await settle(lambda: case.world.ended["item[0]"] > 0)
    await case.cancelled(leave(engine))
    await engine.__aexit__(None, None, None)  # cancelled before its first step, it was never called


async def a_stop(case: Case) -> None:
    """Not a task: the run, by its id."""
    async with case.engine() as engine:
        stops: list[asyncio.Task[None]] = []

        async def stop() -> None:
            for info in await engine.runs():
                await engine.cancel(info.run_id, by="me")

        case.arm(lambda: stops.append(asyncio.create_task(stop())))
        result = await engine.run(case.wf, key="k", raise_on_failure=False)
        case.loop.before(0, int)
        if stops:
            await asyncio.wait(stops)
        for each in stops:
            each.result()
        assert result.status in {COMPLETED, CANCELLED}
        info = await engine.get(result.run_id)
        assert info.status is result.status
        if result.status is COMPLETED:
            assert result["sink"] == SINK
        else:
            with pytest.raises(RunCancelled, match="me"):
                await engine.resume(result.run_id)
    case.ends = {result.status}


async def the_engine(case: Case) -> None:
    """Left at the n-th step: what returns within the grace is kept."""
    left = asyncio.Event()
    async with case.engine() as engine:
        handle = await engine.start(case.wf, key="k")
        case.arm(left.set)
        ended = asyncio.create_task(handle.result())
        leaving = asyncio.create_task(left.wait())
        await asyncio.wait([ended, leaving], return_when=asyncio.FIRST_COMPLETED)
        case.loop.before(0, int)
        leaving.cancel()
    await asyncio.wait([ended])
    error = ended.exception()
    if error is None:
        case.ends = {ended.result().status}  # it may have been at its nap
        assert case.ends == {WAITING} or ended.result()["sink"] == SINK
    else:
        case.ends = {INTERRUPTED}
        assert isinstance(error, RunInterrupted)
        assert "shutdown" in str(error)


WAYS: list[Way] = [
    a_task,
    an_outer_scope,
    a_timeout,
    a_resume,
    a_start,
    who_awaits_a_handle,
    the_whole_program,
    the_leaving,
    a_stop,
    the_engine,
]


async def disturbed(case: Case, way: Way) -> None:
    before = asyncio.all_tasks()
    async with asyncio.timeout(SECONDS):
        await way(case)
    left = asyncio.all_tasks() - before
    for _ in range(5):  # who was cancelled as the last one has a step to go
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - before
    assert not left, f"left behind: {left}"


async def afterwards(case: Case) -> bool:
    """Look at what is left, then bring it to its end; says whether that needed a person's word."""
    info = await examine(case.home, case.world, *case.ends)
    cancelled = info is not None and info.status is CANCELLED
    assert info is not None or case.fired
    return bool(await go_on(case.home, case.wf, case.world, info.run_id if info and cancelled else None))


def check_threads() -> None:
    """No thread is left that would keep the interpreter from ending."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join(5)
            assert not thread.is_alive(), thread


def play(home: Home, n: int, again: int, way: Way) -> Case:
    case = Case(home, n, again)
    with asyncio.Runner(loop_factory=SteppedLoop) as runner:
        runner.run(disturbed(case, way))
    check_threads()
    with asyncio.Runner() as runner:
        case.heard = runner.run(afterwards(case))
    assert case.world.paid == 1
    return case


def sweep(folder: Path | None, way: Way, every: int, again: int = 0, start: int = 1) -> Counter[str]:
    """Play it for each n-th step until there is no such step; gives how often what was so."""
    found: Counter[str] = Counter()
    n = start
    while True:
        home = Home(None if folder is None else folder / f"{way.__name__}-{again}-{n}.db")
        try:
            case = play(home, n, again, way)
        except BaseException as error:
            error.add_note(f"cancelled: {way.__name__} before step {n}, again after {again}")
            raise
        found["steps"] += 1
        found["needed a person"] += case.heard
        if not case.fired:
            return found
        n += every


@pytest.mark.parametrize("way", WAYS)
def test_it_may_be_cancelled_before_any_step(way: Way) -> None:
    """B16, B34, B35, B37, C3, C5, C6; every third step here, all of them in the slow one."""
    assert sweep(None, way, 3)["steps"] > 4


@pytest.mark.parametrize("way", [a_task, a_resume, the_whole_program, a_stop])
def test_it_may_be_cancelled_at_many_steps_on_a_file(tmp_path: Path, way: Way) -> None:
    assert sweep(tmp_path, way, 31, start=9)["steps"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", WAYS)
def test_it_may_be_cancelled_before_any_step_on_a_file_and_again(tmp_path: Path, way: Way) -> None:
    total = sweep(tmp_path, way, 1) + sweep(None, way, 1)
    for again in (1, 2, 3, 5, 8, 13):
        total += sweep(None, way, 1, again)
        total += sweep(tmp_path, way, 7, again)
    print(f"\n{way.__name__}: {total['steps']} cases, {total['needed a person']} needed a person's word")


# -- Ctrl-C ---------------------------------------------------------------------------------------------


def interrupted(home: Home, n: int) -> Case:
    """Let KeyboardInterrupt come out of the loop before its n-th step, as without asyncio's own handler."""
    case = Case(home, n, 0)

    def interrupt() -> None:
        case.fired = True
        raise KeyboardInterrupt

    async def program() -> None:
        case.loop.before(n, interrupt)
        async with case.engine() as engine:
            assert (await engine.run(case.wf, key="k"))["sink"] == SINK
        case.loop.before(0, int)

    with asyncio.Runner(loop_factory=SteppedLoop) as runner:
        try:
            runner.run(program())
        except KeyboardInterrupt:
            assert case.fired
        else:
            assert not case.fired
    check_threads()
    with asyncio.Runner() as runner:
        case.heard = runner.run(afterwards(case))
    return case


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", ["memory", "file"])
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 17])
def test_ctrl_c_may_come_between_any_two_steps(tmp_path: Path, where: str, every: int) -> None:
    """B125, C5: whatever the loop was doing, also while the engine is opened or left.

    In the millisecond in which aiosqlite opens a connection, its thread may then speak to a closed loop.
    """
    n, found = 1, 0
    while True:
        try:
            case = interrupted(Home(None if where == "memory" else tmp_path / f"{n}.db"), n)
        except BaseException as error:
            error.add_note(f"KeyboardInterrupt before step {n}")
            raise
        found += 1
        if not case.fired:
            break
        n += every
    assert found > 5
    print(f"\n{where}: {found} interrupts")
