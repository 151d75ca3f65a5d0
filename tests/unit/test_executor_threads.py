"""Plain functions in threads: nothing a body does reaches the pool, the loop or the next body."""

import asyncio
import contextvars
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dagresume import codec
from dagresume.context import Context
from dagresume.errors import EngineClosed, OutputNotSerializable, TooManyAbandoned
from dagresume.executor import Call, ThreadExecutor

ROOT = Path(__file__).parents[2]
variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")


def call(fn: Callable[..., Any], *args: Any, path: str = "node", types: codec.Types | None = None) -> Call:
    return Call(fn, args, {}, types, path=path)


@pytest.fixture
async def threads() -> AsyncIterator[ThreadExecutor]:
    executor = ThreadExecutor(limit=4, abandoned_limit=2)
    yield executor
    await executor.close()


class Body:
    """A body that says that it began and goes on only when it is told to."""

    def __init__(self) -> None:
        self.go, self.began = threading.Event(), asyncio.Event()
        self.runs = 0
        self.thread: threading.Thread | None = None
        self._loop = asyncio.get_running_loop()

    def __call__(self) -> str:
        self.runs += 1
        self.thread = threading.current_thread()
        self._loop.call_soon_threadsafe(self.began.set)
        assert self.go.wait(20)
        return "done"

    def end(self) -> None:
        """Let it go on, and wait until its thread has ended."""
        self.go.set()
        if self.thread is not None:
            self.thread.join(20)
            assert not self.thread.is_alive()


@pytest.fixture
def make_body() -> Iterator[Callable[[], Body]]:
    bodies: list[Body] = []

    def make() -> Body:
        bodies.append(Body())
        return bodies[-1]

    yield make
    for body in bodies:
        body.go.set()


async def abandon(executor: ThreadExecutor, body: Body, path: str = "node") -> Call:
    """Start a body, cancel its call, and give the call; the body still runs."""
    attempt = call(body, path=path)
    task = asyncio.create_task(executor.run(attempt))
    await body.began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not body.go.is_set()
    return attempt


def pool_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dagresume-thread"]


# -- results, exceptions, context -----------------------------------------------------------------------


@dataclass
class Score:
    points: int


class Watched(Mapping[str, type]):
    """Types that note which thread looks at them."""

    def __init__(self, types: codec.Types) -> None:
        self.types = types
        self.seen_in: set[threading.Thread] = set()

    def __getitem__(self, name: str) -> type:
        self.seen_in.add(threading.current_thread())
        return self.types[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.types)

    def __len__(self) -> int:
        return len(self.types)


async def test_the_result_is_packed_off_the_loop(threads: ThreadExecutor) -> None:
    types = Watched(codec.types_of(Score))
    text = await threads.run(call(Score, 7, types=types))
    assert codec.unpack(text, types.types) == Score(7)
    assert types.seen_in == set(pool_threads())


async def test_a_result_that_is_not_stored_comes_back_as_the_same_object(threads: ThreadExecutor) -> None:
    thing = object()
    assert await threads.run(call(lambda: thing)) is thing


async def test_a_result_that_cannot_be_stored_fails_the_call(threads: ThreadExecutor) -> None:
    with pytest.raises(OutputNotSerializable):
        await threads.run(call(threading.Lock, types=codec.EMPTY))


class Odd(Exception):
    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(code)
        self.detail = detail


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        Odd(3, detail="d"),
        KeyboardInterrupt(),
        SystemExit(3),
        GeneratorExit(),
        asyncio.CancelledError(),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_what_a_body_raises_is_raised_by_run(threads: ThreadExecutor, error: BaseException) -> None:
    """B125: neither Ctrl-C nor sys.exit in a body ends the pool or the loop."""

    def body() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await threads.run(call(body))
    assert caught.value is error
    first = pool_threads()
    assert await threads.run(call(lambda: "still works")) == "still works"
    assert pool_threads() == first  # the thread outlived it


async def test_stop_iteration_is_the_error_it_would_be_on_the_loop(threads: ThreadExecutor) -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        await threads.run(call(next, iter(())))


async def test_an_exception_leaves_no_circle_behind(threads: ThreadExecutor) -> None:
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(Odd) as caught:
            await threads.run(call(_raise_odd))
        gone = weakref.ref(caught.value)
        del caught
        await threads.run(call(int))
        assert gone() is None
    finally:
        gc.enable()


def _raise_odd() -> None:
    raise Odd(1, detail="")


async def test_the_arguments_and_result_are_let_go(threads: ThreadExecutor) -> None:
    class Thing:
        pass

    thing, gone = Thing(), threading.Event()
    weakref.finalize(thing, gone.set)
    assert await threads.run(call(lambda given: given, thing)) is thing
    del thing
    assert gone.wait(20)  # also while the thread waits for more


async def test_a_body_sees_the_callers_context_and_cannot_change_it(threads: ThreadExecutor) -> None:
    """B161: in every thread, and a set() inside does not leak, not even to the next body in that thread."""

    def body(value: str) -> str:
        seen = variable.get()
        variable.set(value)
        return seen

    variable.set("X")
    assert [await threads.run(call(body, f"inside {n}")) for n in range(3)] == ["X"] * 3
    assert variable.get() == "X"


async def test_anyio_can_be_run_in_a_body(threads: ThreadExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sniffio is installed, the loop's mark is in the context that the thread gets a copy of."""

    class Sniffio:
        current_async_library_cvar: contextvars.ContextVar[str | None] = contextvars.ContextVar("library")

    monkeypatch.setitem(sys.modules, "sniffio", Sniffio)
    Sniffio.current_async_library_cvar.set("asyncio")
    assert await threads.run(call(Sniffio.current_async_library_cvar.get)) is None
    assert Sniffio.current_async_library_cvar.get() == "asyncio"


async def test_a_context_can_be_used_from_many_threads(threads: ThreadExecutor) -> None:
    class Channel:
        def __init__(self) -> None:
            self.lines: list[str] = []

        def log(self, level: str, line: str) -> None:
            self.lines.append(f"{level} {line}")

        def usage(self, usage: Mapping[str, float]) -> None:
            raise AssertionError

        def progress(self, done: float, total: float | None) -> None:
            raise AssertionError

    channel: Any = Channel()
    context = Context(run_id="r", workflow="w", node="n", path="n", index=None, attempt=1, channel=channel)

    def body(start: int) -> None:
        for n in range(start, start + 100):
            context.log.info(n)

    await asyncio.gather(*(threads.run(call(body, start)) for start in range(0, 1000, 100)))
    assert sorted(channel.lines) == sorted(f"info {n}" for n in range(1000))


# -- the pool -------------------------------------------------------------------------------------------


async def test_threads_are_reused_and_grow_to_the_limit_only(
    threads: ThreadExecutor, make_body: Callable[[], Body]
) -> None:
    for _ in range(10):
        await threads.run(call(int))
    assert len(pool_threads()) == 1
    bodies = [make_body() for _ in range(6)]
    tasks = [asyncio.create_task(threads.run(call(body))) for body in bodies]
    await asyncio.gather(*(body.began.wait() for body in bodies[:4]))
    assert len(pool_threads()) == 4
    assert [body.runs for body in bodies] == [1, 1, 1, 1, 0, 0]
    for body in bodies:
        body.go.set()
    assert await asyncio.gather(*tasks) == ["done"] * 6
    assert len(pool_threads()) == 4


async def test_they_are_daemons(threads: ThreadExecutor) -> None:
    assert (await threads.run(call(threading.current_thread))).daemon


async def test_idle_threads_end(make_body: Callable[[], Body]) -> None:
    executor = ThreadExecutor(limit=8, idle_seconds=0.01)
    bodies = [make_body() for _ in range(8)]
    tasks = [asyncio.create_task(executor.run(call(body))) for body in bodies]
    await asyncio.gather(*(body.began.wait() for body in bodies))
    for body in bodies:
        body.go.set()
    await asyncio.gather(*tasks)
    for body in bodies:
        body.end()
    assert await executor.run(call(lambda: "again")) == "again"
    await executor.close()


async def test_no_call_is_lost_while_threads_go_idle_and_end() -> None:
    """Threads that end after no time at all race with every submission."""
    executor = ThreadExecutor(limit=3, idle_seconds=0.0)
    for _ in range(100):
        results = await asyncio.gather(*(executor.run(call(int, n)) for n in range(5)))
        assert results == [0, 1, 2, 3, 4]
    await executor.close()
    assert pool_threads() == []


async def test_close_ends_the_threads_and_refuses_further_calls(threads: ThreadExecutor) -> None:
    """B163: no thread is left by an engine that was closed."""
    await asyncio.gather(*(threads.run(call(int)) for _ in range(4)))
    await threads.close()
    assert pool_threads() == []
    with pytest.raises(EngineClosed):
        await threads.run(call(int))
    await threads.close()


async def test_close_leaves_a_busy_thread_behind_which_ends_after_its_body(
    threads: ThreadExecutor, make_body: Callable[[], Body]
) -> None:
    body, waiting = make_body(), [make_body() for _ in range(4)]
    tasks = [asyncio.create_task(threads.run(call(one))) for one in [body, *waiting]]
    await asyncio.gather(*(one.began.wait() for one in [body, *waiting[:3]]))
    await threads.close()
    with pytest.raises(asyncio.CancelledError):
        await tasks[4]
    for one in [body, *waiting[:3]]:
        one.end()
    assert await asyncio.gather(*tasks[:4]) == ["done"] * 4
    assert waiting[3].runs == 0
    assert pool_threads() == []


# -- cancelling -----------------------------------------------------------------------------------------


async def test_cancelling_returns_at_once_and_says_that_the_body_runs_on(
    threads: ThreadExecutor, make_body: Callable[[], Body]
) -> None:
    body = make_body()
    attempt = await abandon(threads, body)
    assert attempt.abandoned
    assert threads.abandoned == 1
    body.end()  # its thread ends with it: another has its place
    assert threads.abandoned == 0
    assert body.runs == 1


async def test_a_timeout_is_a_cancellation(threads: ThreadExecutor, make_body: Callable[[], Body]) -> None:
    """B85: it fails at its time, whatever the body does."""
    body = make_body()
    attempt = call(body)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await threads.run(attempt)
    await body.began.wait()
    assert attempt.abandoned


async def test_a_call_that_has_not_begun_is_not_abandoned_and_never_begins(
    make_body: Callable[[], Body],
) -> None:
    threads = ThreadExecutor(limit=1)
    first, second = make_body(), make_body()
    task = asyncio.create_task(threads.run(call(first)))
    await first.began.wait()
    attempt = call(second)
    waiting = asyncio.create_task(threads.run(attempt))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not attempt.abandoned
    first.go.set()
    assert await task == "done"
    assert await threads.run(call(lambda: "next")) == "next"
    assert second.runs == 0
    await threads.close()


async def test_an_abandoned_thread_is_replaced(make_body: Callable[[], Body]) -> None:
    """Also for calls that wait already: none is starved by a body that never ends."""
    threads = ThreadExecutor(limit=1)
    blocked = make_body()
    task = asyncio.create_task(threads.run(call(blocked)))
    await blocked.began.wait()
    waiting = asyncio.create_task(threads.run(call(lambda: "went on")))
    await asyncio.sleep(0)
    task.cancel()
    assert await waiting == "went on"
    assert await threads.run(call(lambda: "and on")) == "and on"
    assert not blocked.go.is_set()
    await threads.close()


async def test_a_body_that_has_returned_is_not_cancelled(
    threads: ThreadExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C5: paid work is kept, also if the cancellation comes while its result is on its way to the loop."""
    loop, on_its_way = asyncio.get_running_loop(), threading.Event()
    deliver = loop.call_soon_threadsafe

    def delivered(*args: Any) -> Any:
        handle = deliver(*args)
        on_its_way.set()
        return handle

    monkeypatch.setattr(loop, "call_soon_threadsafe", delivered)
    attempt = call(lambda: "paid")
    task = asyncio.create_task(threads.run(attempt))
    await asyncio.sleep(0)
    assert on_its_way.wait(20)  # the loop stands still meanwhile
    task.cancel()
    assert await task == "paid"
    assert not attempt.abandoned


async def test_too_many_abandoned_bodies_refuse_the_next_call_by_name(
    threads: ThreadExecutor, make_body: Callable[[], Body]
) -> None:
    bodies = [make_body() for _ in range(3)]
    for number, body in enumerate(bodies):
        await abandon(threads, body, path=f"fetch[{number}]")
    with pytest.raises(TooManyAbandoned, match=r"fetch\[0\], fetch\[1\], fetch\[2\]") as caught:
        await threads.run(call(int))
    assert caught.value.paths == ("fetch[0]", "fetch[1]", "fetch[2]")
    bodies[0].end()
    assert await threads.run(call(int)) == 0  # two are allowed


async def test_cancelling_at_any_moment_keeps_the_pool_sound(threads: ThreadExecutor) -> None:
    """Neither threads nor places get lost, and each call says the truth about its body."""
    for turn in range(300):
        began = threading.Event()
        attempt = call(began.set)
        task = asyncio.create_task(threads.run(attempt))
        for _ in range(turn % 4):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() or attempt.abandoned:
            assert began.wait(20)
    results = await asyncio.gather(*(threads.run(call(int, n)) for n in range(20)))
    assert results == list(range(20))
    assert len(pool_threads()) <= 4 + threads.abandoned


# -- the end of loop and interpreter --------------------------------------------------------------------


def run_script(script: str, timeout: float = 20) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


HEAD = """
import asyncio, threading, time
from dagresume.executor import Call, ThreadExecutor
def call(fn, *args): return Call(fn, args, {}, None)
"""


def test_the_interpreter_does_not_wait_for_a_sleeping_thread() -> None:
    """B125: without close() and with a body that sleeps for an hour."""
    ended = run_script(
        HEAD
        + """
async def main():
    executor = ThreadExecutor()
    began = asyncio.Event()
    def body(loop=asyncio.get_running_loop()):
        loop.call_soon_threadsafe(began.set)
        time.sleep(3600)
    task = asyncio.create_task(executor.run(call(body)))
    await began.wait()
    task.cancel()
    await asyncio.wait([task])
asyncio.run(main())
print("end")
"""
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "end\n", "")


def test_a_thread_that_ends_after_its_loop_makes_no_noise() -> None:
    ended = run_script(
        HEAD
        + """
go, over = threading.Event(), threading.Event()
async def main():
    executor = ThreadExecutor()
    began = asyncio.Event()
    def body(loop=asyncio.get_running_loop()):
        loop.call_soon_threadsafe(began.set)
        go.wait()
        return threading.current_thread()
    for leave in (True, False):
        task = asyncio.create_task(executor.run(call(body)))
        await began.wait()
        began.clear()
        if leave:
            task.cancel()
            await asyncio.wait([task])
    asyncio.get_running_loop().stop()   # with the second call open
    await asyncio.sleep(3600)
loop = asyncio.new_event_loop()
task = loop.create_task(main())
loop.run_forever()
for one in asyncio.all_tasks(loop):
    one._log_destroy_pending = False
loop.close()
threads = [thread for thread in threading.enumerate() if thread.name == "dagresume-thread"]
assert len(threads) == 2, threads
go.set()
threads[0].join(10)
assert not threads[0].is_alive()
print("end", flush=True)
import os; os._exit(0)
"""
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "end\n", "")
