"""Loop, thread and process differ in nothing but where the body runs."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dagresume import Context, Retry, RunResult, RunStatus, Workflow, run_sync
from tests.engine.bodies import nap
from tests.engine.kit import Boom, Calls, Home, listing

# -- what a process can import ----------------------------------------------------------------------------


def where(n: int = 0) -> tuple[int, str]:
    return os.getpid(), threading.current_thread().name


def double(n: int) -> int:
    return n * 2


def told(ctx: Context, n: int) -> dict[str, Any]:
    ctx.log.info("hello")
    ctx.usage(tokens_in=n)
    return {"path": ctx.path, "attempt": ctx.attempt, "key": ctx.idempotency_key, "run": ctx.run_id}


def sometimes(ctx: Context) -> int:
    if ctx.attempt == 1:
        raise KeyError("first")
    return ctx.attempt


def lossy() -> object:
    return {"x": [threading.Lock()]}


def for_ever() -> None:
    time.sleep(60)


async def test_plain_functions_run_in_threads(home: Home) -> None:
    wf = Workflow("threads")
    loop_thread = threading.get_ident()

    @wf.node
    def a() -> bool:
        return threading.get_ident() != loop_thread

    @wf.node
    async def b() -> bool:
        return threading.get_ident() == loop_thread

    result = await home.run(wf)
    assert result[a]
    assert result[b]


async def test_processes_are_other_processes(sqlite_home: Home) -> None:
    wf = Workflow("processes")
    wf.node(executor="process")(where)
    assert (await sqlite_home.run(wf))["where"][0] != os.getpid()


@pytest.mark.parametrize("executor", ["thread", "process"])
async def test_maps_context_retries_and_failures_are_the_same(sqlite_home: Home, executor: Any) -> None:
    wf = Workflow("same", retry=Retry(2, delay=0))
    listing(wf, range(4))
    wf.node(executor=executor, for_each={"n": "items"})(double)
    wf.node(executor=executor, args={"n": "count"})(told)
    wf.node(executor=executor)(sometimes)
    wf.node(executor=executor)(lossy)
    home = sqlite_home
    result = await home.run(wf, {"count": 3})
    assert result["double"] == [0, 2, 4, 6]
    assert result[sometimes] == 2
    assert list(result.failures) == ["lossy"]
    assert "$.x[0]" in result.failures["lossy"].message
    said = result[told]
    assert (said["path"], said["attempt"], said["run"]) == ("told", 1, result.run_id)
    first = next(
        e for e in await home.events(result.run_id) if e.kind == "node.failed" and e.path == "sometimes"
    )
    assert first.data["type"] == "KeyError"
    assert "sometimes" in first.data["traceback"]


async def test_a_timed_out_process_is_ended_and_known_to_be(sqlite_home: Home) -> None:
    """A process can be killed: the attempt has failed, it is not uncertain."""
    wf = Workflow("killed", retry=Retry(1))
    wf.node(executor="process", timeout=0.5)(for_ever)
    started = time.monotonic()
    result = await sqlite_home.run(wf)
    assert time.monotonic() - started < 15
    assert result.status is RunStatus.FAILED
    assert result.failures["for_ever"].reason == "timeout"


async def test_waiting_for_a_process_is_not_running_in_it(sqlite_home: Home) -> None:
    """A time limit is that of the body: neither the start of a worker nor the queue before it counts."""
    wf = Workflow("queue", idempotent=True)
    listing(wf, range(9 * (os.cpu_count() or 1)))
    wf.node(executor="process", for_each={"n": "items"}, timeout=1.2)(nap)
    result = await sqlite_home.run(wf)
    assert result.failures == {}


async def test_partials_callables_and_methods_are_nodes(home: Home) -> None:
    class Adder:
        def __init__(self, by: int) -> None:
            self.by = by

        async def __call__(self, x: int) -> int:
            return x + self.by

        def method(self, y: int) -> int:
            return y + self.by

    async def power(base: int, exponent: int) -> int:
        return int(base**exponent)

    wf = Workflow("callables")
    wf.node(id="x")(functools.partial(double, 4))
    wf.node(id="y")(Adder(1))
    wf.node(id="z")(Adder(10).method)
    wf.node(id="squared", args={"base": "z"})(functools.partial(power, exponent=2))
    result = await home.run(wf)
    assert result.outputs == {"x": 8, "y": 9, "z": 19, "squared": 361}


async def test_a_wrapped_function_keeps_its_signature(home: Home) -> None:
    def logged(fn: Any) -> Any:
        @functools.wraps(fn)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            return await fn(*args, **kwargs)

        return wrapper

    wf = Workflow("wrapped")

    @wf.node
    @logged
    async def a(x: int, y: int = 2) -> int:
        return x + y

    assert (await home.run(wf, {"x": 1}))["a"] == 3


async def test_many_threads_at_once_stay_within_the_engines_slots(home: Home) -> None:
    wf = Workflow("many")
    listing(wf, range(20))
    lock, alive = threading.Lock(), [0, 0]
    full = threading.Event()

    @wf.node(for_each={"n": "items"})
    def item(n: int) -> int:
        with lock:
            alive[0] += 1
            alive[1] = max(alive)
            if alive[0] == 4:
                full.set()
        full.wait(10)
        with lock:
            alive[0] -= 1
        return n

    async with home.engine(concurrency=4) as engine:
        assert (await engine.run(wf))["item"] == list(range(20))
    assert alive == [0, 4]


# -- run_sync -------------------------------------------------------------------------------------------


def test_run_sync_gives_the_result(db: Path) -> None:
    wf = Workflow("sync")

    @wf.node
    async def a(x: int) -> int:
        return x + 1

    result = run_sync(wf, {"x": 1}, db=db, key="k", concurrency=2)
    assert isinstance(result, RunResult)
    assert result[a] == 2
    assert run_sync(wf, {"x": 1}, db=db, key="k").run_id == result.run_id


async def test_run_sync_works_inside_a_running_loop(db: Path) -> None:
    wf = Workflow("sync")

    @wf.node
    async def a() -> str:
        return threading.current_thread().name

    assert run_sync(wf, db=db)[a] != threading.current_thread().name


def test_run_sync_raises_as_run_does(db: Path) -> None:
    from dagresume import RunFailed

    wf = Workflow("sync")

    @wf.node
    async def a() -> None:
        raise Boom

    with pytest.raises(RunFailed) as caught:
        run_sync(wf, db=db)
    assert isinstance(caught.value.__cause__, Boom)
    assert run_sync(wf, db=db, raise_on_failure=False).status is RunStatus.FAILED


def test_run_sync_refuses_an_option_nobody_knows(db: Path) -> None:
    wf = Workflow("sync")
    with pytest.raises(TypeError, match="concurency"):
        run_sync(wf, db=db, concurency=3)


async def test_engines_open_and_close_without_leaving_anything(sqlite_home: Home, calls: Calls) -> None:
    """B163: file descriptors and threads stay flat."""
    wf = Workflow("leak")
    calls.adder(wf)("a")
    for _ in range(3):
        await sqlite_home.run(wf)
    tasks = asyncio.all_tasks()
    fds, threads = len(os.listdir("/proc/self/fd")), threading.active_count()  # noqa: PTH208
    for _ in range(20):
        await sqlite_home.run(wf)
    assert len(os.listdir("/proc/self/fd")) <= fds + 3  # noqa: PTH208
    assert threading.active_count() <= threads + 2  # those of aiosqlite end a moment after their connection
    assert asyncio.all_tasks() == tasks
