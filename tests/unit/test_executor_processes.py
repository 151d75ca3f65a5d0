"""Functions in worker processes: as exact as threads, and a body can be killed."""

import asyncio
import atexit
import contextlib
import fcntl
import functools
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dagresume import codec
from dagresume.context import Context
from dagresume.crew import ProcessExecutor
from dagresume.errors import DefinitionError, EngineClosed, OutputNotSerializable, WorkerDied
from dagresume.executor import Call
from dagresume.observe import describe_error
from dagresume.policy import NodeFailure
from dagresume.processes import RemoteError, RemoteTraceback

ROOT = Path(__file__).parents[2]


class Channel:
    """What a context tells; `told` is set by the first line of the log."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.used: list[Mapping[str, float]] = []
        self.steps: list[tuple[float, float | None]] = []
        self.told = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def log(self, level: str, line: str) -> None:
        self.lines.append(f"{level}: {line}")
        self._loop.call_soon_threadsafe(self.told.set)

    def usage(self, usage: Mapping[str, float]) -> None:
        self.used.append(usage)

    def progress(self, done: float, total: float | None) -> None:
        self.steps.append((done, total))

    def ask(self, what: str, *args: Any) -> Future[Any]:
        """Answer with the question, or not at all."""
        answer: Future[Any] = Future()
        if what == "refuse":
            answer.set_exception(LookupError(*args))
        else:
            answer.set_result((what, *args))
        return answer

    def save_state(self, state: Any) -> Any:
        raise AssertionError("of the worker's end")

    def once(self, key: str, fn: Callable[..., Any], args: tuple[Any, ...], scope: str) -> Any:
        raise AssertionError("of the worker's end")

    def commit_with(self, sql: str, parameters: Any) -> None:
        raise AssertionError("of the worker's end")


def call(fn: Callable[..., Any], *args: Any, types: codec.Types | None = None) -> Call:
    return Call(fn, args, {}, types, path="node")


def call_with_context(fn: Callable[..., Any], *args: Any, **known: Any) -> tuple[Call, Channel]:
    channel = Channel()
    where: dict[str, Any] = {"run_id": "r", "workflow": "w", "node": "n", "path": "n[3]", "index": 3}
    context = Context(**where | known, attempt=2, channel=channel)
    return Call(fn, (context, *args), {}, None, context=context, path="n[3]"), channel


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessExecutor]:
    """One for all tests: none may leave it less sound than it was."""
    executor = ProcessExecutor(limit=2)
    yield executor
    asyncio.run(executor.close())
    assert multiprocessing.active_children() == []


async def until_told(channel: Channel, task: asyncio.Task[Any]) -> None:
    """Wait until a body has said something; if it ended without that, raise why."""
    told = asyncio.create_task(channel.told.wait())
    await asyncio.wait([told, task], return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    if not channel.told.is_set():
        task.result()
        raise AssertionError("it ended in silence")


async def until_free(path: Path) -> None:
    """Wait until no process holds the lock on a file: the one that did has ended, however."""
    with path.open("w") as file:
        await asyncio.to_thread(fcntl.flock, file, fcntl.LOCK_EX)


# -- bodies ---------------------------------------------------------------------------------------------


@dataclass
class Score:
    points: int


def add(left: int, right: int = 1) -> int:
    return left + right


def score(points: int) -> Score:
    return Score(points)


def hold(context: Context, path: str) -> None:
    """Say that it runs, and run for ever, holding the file's lock."""
    file = open(path, "w")  # noqa: PTH123, SIM115
    fcntl.flock(file, fcntl.LOCK_EX)
    context.log.info(os.getpid())
    while True:
        time.sleep(3600)


def spin(context: Context, path: str) -> None:
    """The same without ever resting."""
    file = open(path, "w")  # noqa: PTH123, SIM115
    fcntl.flock(file, fcntl.LOCK_EX)
    context.log.info(os.getpid())
    while True:
        pass


def die(how: str) -> None:
    if how == "exit":
        os._exit(7)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    os.closerange(2, 1000)  # as daemons do; it returns, but cannot say so


def die_with_a_forked_child(context: Context) -> None:
    """Leave a child behind that lives on with copies of all our files."""
    if os.fork() == 0:
        time.sleep(3600)
    context.log.info(subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True).stdout)
    os._exit(7)


def doubled(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def twice(*args: Any) -> Any:
        return 2 * fn(*args)

    return twice


@doubled
def three() -> int:
    return 3


class Kept(Exception):
    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"bad {code}")
        self.code, self.detail = code, detail


class Wordy(Exception):
    """Calling it with its own `args` would say "bad bad 7"."""

    def __init__(self, code: object) -> None:
        super().__init__(f"bad {code}")


class Locked(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock", threading.Lock())
        self.lock = threading.Lock()

    def __str__(self) -> str:
        return "holds a lock"


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Hostile(Exception):
    made = 0

    def __new__(cls, *args: Any) -> Any:
        cls.made += 1
        if cls.made > 1:
            raise RuntimeError("not to be made again")
        return super().__new__(cls, *args)

    def __reduce__(self) -> Any:
        raise RuntimeError("not to be pickled")


class Frozen(Exception):
    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("frozen")


def fail(kind: str) -> None:
    if kind == "local":

        class Local(Exception):
            pass

        raise Local("made here")
    try:
        raise LookupError("the reason")
    except LookupError as reason:
        raise ERRORS[kind]() from reason


ERRORS: dict[str, Callable[[], BaseException]] = {
    "plain": lambda: ValueError("x", 1),
    "key": lambda: KeyError("k"),
    "os": lambda: FileNotFoundError(2, "No such file", "name"),
    "unicode": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    "group": lambda: ExceptionGroup("several", [ValueError(1), Kept(1, detail="d")]),
    "kept": lambda: Kept(7, detail="d"),
    "wordy": lambda: Wordy(7),
    "locked": Locked,
    "mute": Mute,
    "hostile": lambda: Hostile("very hostile"),
    "frozen": lambda: Frozen("f"),
    "surrogate": lambda: ValueError("\udcff \x00"),
    "huge": lambda: ValueError("x" * 1_000_000),
    "ours": lambda: OutputNotSerializable("n", "$", "set", "why"),
    "interrupt": KeyboardInterrupt,
    "exit": lambda: SystemExit(3),
    "cancelled": asyncio.CancelledError,
    "died": lambda: WorkerDied("p", 1),
}


# -- results, context -----------------------------------------------------------------------------------


async def test_the_result_is_packed_in_the_worker(processes: ProcessExecutor) -> None:
    types = codec.types_of(Score)
    text = await processes.run(call(score, 7, types=types))
    assert codec.unpack(text, types) == Score(7)
    assert await processes.run(Call(add, (1,), {"right": 5}, codec.EMPTY)) == "6"


async def test_a_result_that_is_not_stored_travels_as_it_is(processes: ProcessExecutor) -> None:
    assert await processes.run(call(complex, 1, 2)) == complex(1, 2)


async def test_a_result_that_cannot_be_stored_or_sent_fails_the_call(processes: ProcessExecutor) -> None:
    with pytest.raises(OutputNotSerializable) as caught:
        await processes.run(call(threading.Lock, types=codec.EMPTY))
    assert caught.value.place == "$"
    with pytest.raises(DefinitionError, match="cannot be sent back"):
        await processes.run(call(threading.Lock))
    assert await processes.run(call(add, 1)) == 2


async def test_it_runs_elsewhere_and_workers_are_reused(processes: ProcessExecutor) -> None:
    pids = {await processes.run(call(os.getpid)) for _ in range(5)}
    assert len(pids) == 1
    assert os.getpid() not in pids
    assert await processes.run(call(os.getpgid, 0)) == os.getpgid(0)  # Ctrl-Z and job control hold for it too


async def test_megabytes_travel_both_ways(processes: ProcessExecutor) -> None:
    big = "x" * 20_000_000
    assert await processes.run(call(str, big)) == big


def facts(context: Context) -> dict[str, Any]:
    names = "run_id workflow node path index attempt idempotency_key skipped failures"
    return {name: getattr(context, name) for name in names.split()}


async def test_a_context_has_its_facts_there(processes: ProcessExecutor) -> None:
    failure = NodeFailure("a", 1, "E", "m", exception=Locked())
    attempt, _ = call_with_context(facts, generation=4, skipped=frozenset({"b"}), failures={"a": failure})
    assert attempt.context is not None
    assert await processes.run(attempt) == facts(attempt.context)
    assert failure.exception is not None


def chatty(context: Context, lines: int) -> str:
    for n in range(lines):
        context.log.info("line", n=n)
    context.usage(tokens_in=3, cost=0.5)
    context.progress(1, 4)
    return "quiet"


async def test_what_a_context_tells_arrives_before_the_result(processes: ProcessExecutor) -> None:
    attempt, channel = call_with_context(chatty, 1000)
    assert await processes.run(attempt) == "quiet"
    assert channel.lines == [f"info: line n={n}" for n in range(1000)]
    assert channel.used == [{"tokens_in": 3, "tokens_out": 0, "cost": 0.5}]
    assert channel.steps == [(1, 4)]


def asks(context: Context) -> list[Any]:
    ask = context._channel.ask
    one, two = ask("one", 1), ask("two", [2, {3: 4}])
    with pytest.raises(LookupError, match="no"):
        ask("refuse", "no").result(10)
    with ThreadPoolExecutor(8) as pool:
        many = list(pool.map(lambda n: ask("many", n).result(10), range(200)))
    return [two.result(10), one.result(10), many]


async def test_what_a_context_asks_is_answered(processes: ProcessExecutor) -> None:
    attempt, _ = call_with_context(asks)
    many = [("many", n) for n in range(200)]
    assert await processes.run(attempt) == [("two", [2, {3: 4}]), ("one", 1), many]


def tell_and_die(context: Context) -> None:
    context.log.warning("last words")
    os._exit(1)


async def test_last_words_are_kept(processes: ProcessExecutor) -> None:
    """B164: what was logged before os._exit is there."""
    attempt, channel = call_with_context(tell_and_die)
    with pytest.raises(WorkerDied):
        await processes.run(attempt)
    assert channel.lines == ["warning: last words"]


_kept: list[Context] = []


def keep(context: Context) -> None:
    _kept.append(context)


def tell_through_the_kept(context: Context) -> None:
    _kept[0].log.info("stray")
    context.log.info("own")


async def test_a_context_that_outlives_its_call_disturbs_no_other(processes: ProcessExecutor) -> None:
    first, channel = call_with_context(keep)
    await processes.run(first)
    second, other = call_with_context(tell_through_the_kept)
    await processes.run(second)
    assert (channel.lines, other.lines) == ([], ["info: own"])


async def test_a_channel_that_fails_fails_its_call_alone(processes: ProcessExecutor) -> None:
    attempt, channel = call_with_context(chatty, 10)

    def broken(level: str, line: str) -> None:
        raise OSError("the far end")

    channel.log = broken  # type: ignore[method-assign]
    with pytest.raises(OSError, match="the far end"):
        await processes.run(attempt)
    assert await processes.run(call(add, 1)) == 2


# -- what can be sent -----------------------------------------------------------------------------------


def nothing() -> Callable[[], None]:
    def inner() -> None:
        pass

    return inner


@pytest.mark.parametrize(
    ("fn", "problem"),
    [
        (lambda: 1, "is a lambda"),
        (nothing(), "inside a function"),
        (functools.partial(nothing()), "inside a function"),
    ],
)
async def test_what_has_no_name_to_import_is_refused(
    processes: ProcessExecutor, fn: Callable[..., Any], problem: str
) -> None:
    with pytest.raises(DefinitionError, match=f"{problem}.*top level"):
        await processes.run(call(fn))


async def test_arguments_and_types_that_cannot_travel_are_refused(processes: ProcessExecutor) -> None:
    @dataclass
    class Local:
        x: int

    with pytest.raises(DefinitionError, match="Local"):
        await processes.run(call(str, Local(1)))
    with pytest.raises(DefinitionError, match="Local"):
        await processes.run(call(str, types=codec.types_of(Local)))


async def test_a_function_replaced_under_its_name_is_refused(
    processes: ProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = score
    monkeypatch.setitem(globals(), "score", add)
    with pytest.raises(DefinitionError, match="not what its module has"):
        await processes.run(call(original, 1))


async def test_partials_methods_and_decorated_functions_can_be_sent(processes: ProcessExecutor) -> None:
    assert await processes.run(call(functools.partial(add, right=5), 1)) == 6
    assert await processes.run(call("a-b".split, "-")) == ["a", "b"]
    assert await processes.run(call(three)) == 6
    assert await processes.run(call(three.__wrapped__)) == 3  # type: ignore[attr-defined]


async def test_what_exists_only_here_is_told_by_name(
    processes: ProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = type("Made", (), {"__module__": __name__})
    monkeypatch.setitem(globals(), "Made", made)
    with pytest.raises(DefinitionError, match=r"cannot load this call.*Made"):
        await processes.run(call(str, made()))
    assert await processes.run(call(add, 1)) == 2


# -- exceptions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in ERRORS if kind not in {"hostile", "mute"}])
async def test_an_exception_comes_back_as_itself(processes: ProcessExecutor, kind: str) -> None:
    """B44: also if its class wants other arguments than it keeps, or holds what cannot travel."""
    original = ERRORS[kind]()
    with pytest.raises(type(original)) as caught:
        await processes.run(call(fail, kind))
    assert type(caught.value) is type(original)
    assert str(caught.value) == str(original)
    there = caught.value.__cause__
    assert isinstance(there, RemoteTraceback)
    assert "in fail" in there.traceback
    assert "LookupError: the reason" in there.traceback
    assert there.message == str(original)
    assert describe_error(caught.value)["traceback"].startswith(there.traceback[:100])
    assert await processes.run(call(add, 1)) == 2


async def test_the_attributes_of_an_exception_are_kept(processes: ProcessExecutor) -> None:
    with pytest.raises(Kept) as kept:
        await processes.run(call(fail, "kept"))
    assert (kept.value.code, kept.value.detail) == (7, "d")
    with pytest.raises(Locked) as locked:
        await processes.run(call(fail, "locked"))
    assert not hasattr(locked.value, "lock")


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("hostile", f"{__name__}.Hostile", "very hostile"),
        ("local", f"{__name__}.fail.<locals>.Local", "made here"),
    ],
)
async def test_an_exception_that_cannot_travel_is_told_in_full(
    processes: ProcessExecutor, kind: str, name: str, message: str
) -> None:
    with pytest.raises(RemoteError, match=message) as caught:
        await processes.run(call(fail, kind))
    assert (caught.value.type_name, caught.value.message) == (name, message)
    assert "in fail" in caught.value.traceback
    told = {"type": name, "message": message, "traceback": caught.value.traceback}
    assert describe_error(caught.value) == told
    assert await processes.run(call(add, 1)) == 2


async def test_an_exception_without_a_text_hurts_nobody(processes: ProcessExecutor) -> None:
    with pytest.raises(Mute) as caught:
        await processes.run(call(fail, "mute"))
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "Mute" in caught.value.__cause__.message


# -- the ends of bodies and workers ---------------------------------------------------------------------


@pytest.mark.parametrize("body", [hold, spin])
async def test_cancelling_ends_the_body(
    processes: ProcessExecutor, tmp_path: Path, body: Callable[..., None]
) -> None:
    attempt, channel = call_with_context(body, str(tmp_path / "lock"))
    task = asyncio.create_task(processes.run(attempt))
    await until_told(channel, task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not attempt.abandoned
    await until_free(tmp_path / "lock")
    assert await processes.run(call(add, 1)) == 2  # another has its place


async def test_cancelling_harms_no_other_call(processes: ProcessExecutor, tmp_path: Path) -> None:
    first, told = call_with_context(hold, str(tmp_path / "first"))
    second, also_told = call_with_context(hold, str(tmp_path / "second"))
    tasks = [asyncio.create_task(processes.run(attempt)) for attempt in (first, second)]
    await until_told(told, tasks[0])
    await until_told(also_told, tasks[1])
    tasks[0].cancel()
    await until_free(tmp_path / "first")
    assert [await processes.run(call(add, n)) for n in range(5)] == [1, 2, 3, 4, 5]
    assert not tasks[1].done()
    tasks[1].cancel()
    await asyncio.wait(tasks)
    await until_free(tmp_path / "second")


async def test_a_call_that_waits_is_cancelled_without_harm(tmp_path: Path) -> None:
    processes = ProcessExecutor(limit=1)
    attempt, channel = call_with_context(hold, str(tmp_path / "lock"))
    task = asyncio.create_task(processes.run(attempt))
    await until_told(channel, task)
    waiting = asyncio.create_task(processes.run(call(add, 1)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])
    assert await processes.run(call(add, 1)) == 2
    await processes.close()


async def test_cancelling_at_any_moment_keeps_the_pool_sound(processes: ProcessExecutor) -> None:
    """While the worker starts, before, during and after the body: no worker is lost, no other call is hit."""
    for turn in range(24):
        attempt, channel = call_with_context(chatty, 2)
        other = asyncio.create_task(processes.run(call(add, turn)))
        task = asyncio.create_task(processes.run(attempt))
        if turn % 4 == 3:
            await until_told(channel, task)
        else:
            for _ in range(turn % 4):
                await asyncio.sleep(0)
        task.cancel()
        assert await other == turn + 1
        await asyncio.wait([task])
    assert await asyncio.gather(*(processes.run(call(add, n)) for n in range(10))) == list(range(1, 11))
    pids = await asyncio.gather(*(processes.run(call(os.getpid)) for _ in range(10)))
    assert len(set(pids)) <= 2


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("exit", "exited with code 7"),
        ("kill", "SIGKILL"),
        ("segfault", "SIGSEGV"),
        ("close", "exited with code 1"),
    ],
)
async def test_a_worker_that_dies_fails_its_call_alone(
    processes: ProcessExecutor, tmp_path: Path, how: str, told: str
) -> None:
    attempt, channel = call_with_context(hold, str(tmp_path / "lock"))
    unharmed = asyncio.create_task(processes.run(attempt))
    await until_told(channel, unharmed)
    with pytest.raises(WorkerDied, match=f"node: the worker process .*{told}") as caught:
        await processes.run(call(die, how))
    assert caught.value.began
    assert not unharmed.done()
    assert await processes.run(call(add, 1)) == 2
    unharmed.cancel()
    await asyncio.wait([unharmed])


async def test_a_worker_that_died_while_idle_is_replaced(processes: ProcessExecutor) -> None:
    pid = await processes.run(call(os.getpid))
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert await processes.run(call(add, 1)) == 2


async def test_a_dead_worker_is_noticed_though_its_child_lives(processes: ProcessExecutor) -> None:
    """Else a pool of forked processes in a body would hold the pipe open, and the call would never end."""
    attempt, channel = call_with_context(die_with_a_forked_child)
    with pytest.raises(WorkerDied):
        await processes.run(attempt)
    for pid in channel.lines[0].removeprefix("info: ").split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def children_of_its_own() -> int:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return sum(pool.map(add, range(3)))


async def test_a_body_may_have_processes_of_its_own(processes: ProcessExecutor) -> None:
    assert await processes.run(call(children_of_its_own)) == 6


async def test_signals_for_the_group_leave_bodies_to_the_engine(processes: ProcessExecutor) -> None:
    """Ctrl-C and a service manager's stop reach every process, and a body has its grace time all the same."""
    assert await processes.run(call(signalled)) == "went on"


def signalled() -> str:
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)
    return "went on"


# -- the end of all -------------------------------------------------------------------------------------


async def test_nothing_starts_before_it_is_needed() -> None:
    before = multiprocessing.active_children()
    executor = ProcessExecutor()
    assert multiprocessing.active_children() == before
    await executor.close()


async def test_close_leaves_no_process_no_file_and_no_warning(processes: ProcessExecutor) -> None:
    """B163"""
    await processes.run(call(add, 1))  # multiprocessing's resource tracker exists from here on
    children = set(multiprocessing.active_children())
    files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            executor = ProcessExecutor(2)
            await asyncio.gather(*(executor.run(call(add, n)) for n in range(4)))
            began = time.monotonic()
            await executor.close()
            assert time.monotonic() - began < 1
            with pytest.raises(EngineClosed):
                await executor.run(call(add, 1))
            await executor.close()
        gc.collect()
    assert set(multiprocessing.active_children()) == children
    assert len(os.listdir("/proc/self/fd")) == files  # noqa: PTH208


def write_at_exit(path: str) -> None:
    atexit.register(Path(path).write_text, "left in good order")


async def test_idle_workers_leave_in_good_order(tmp_path: Path) -> None:
    executor = ProcessExecutor(1)
    await executor.run(call(write_at_exit, str(tmp_path / "file")))
    await executor.close()
    assert (tmp_path / "file").read_text() == "left in good order"


async def test_close_ends_running_bodies(tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())
    executor = ProcessExecutor(2)
    attempt, channel = call_with_context(spin, str(tmp_path / "lock"))
    task = asyncio.create_task(executor.run(attempt))
    await until_told(channel, task)
    await executor.close()
    await until_free(tmp_path / "lock")
    with pytest.raises(WorkerDied):
        await task
    assert set(multiprocessing.active_children()) == before


def script(folder: Path, text: str, *, guarded: bool = True) -> list[str]:
    """A program whose main module is the script, as users write them."""
    path = folder / "flow.py"
    start = 'if __name__ == "__main__":\n    asyncio.run(main())' if guarded else "asyncio.run(main())"
    path.write_text(f"{HEAD}\n{text}\n{start}\n", encoding="utf-8")
    return [sys.executable, "-X", "dev", "-W", "error", str(path)]


HEAD = """
import asyncio, dataclasses, fcntl, os, sys, time
from dagresume import codec
from dagresume.crew import ProcessExecutor
from dagresume.executor import Call

@dataclasses.dataclass
class Score:
    points: int

class E(Exception):
    pass

async def died(executor):
    try:
        await executor.run(Call(os._exit, (1,), {}, None))
    except Exception as error:
        print(type(error).__name__)

def score(n): return Score(n)
def fail(): raise E("from main")
def hold(path):
    file = open(path, "w")
    fcntl.flock(file, fcntl.LOCK_EX)
    print("began", flush=True)
    while True: pass
"""


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}


def run_script(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=30, check=False)


def test_the_functions_and_classes_of_a_script_can_be_used(tmp_path: Path) -> None:
    ended = run_script(
        script(
            tmp_path,
            """
async def main():
    executor = ProcessExecutor()
    types = codec.types_of(Score)
    text = await executor.run(Call(score, (7,), {}, types))
    assert codec.unpack(text, types) == Score(7), text
    assert await executor.run(Call(score, (8,), {}, None)) == Score(8)
    try:
        await executor.run(Call(fail, (), {}, None))
    except E as error:
        print(error.__cause__.type_name, error)
    await executor.close()
""",
        )
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "E from main\n", "")


def test_what_a_body_prints_is_not_lost(tmp_path: Path) -> None:
    ended = run_script(
        script(
            tmp_path,
            """
async def main():
    executor = ProcessExecutor()
    await executor.run(Call(print, ("printed",), {}, None))
    await died(executor)
    await executor.close()
""",
        )
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "printed\nWorkerDied\n", "")


def test_an_interactive_function_is_refused_with_advice() -> None:
    text = """
async def main():
    try:
        await ProcessExecutor().run(Call(score, (7,), {}, None))
    except Exception as error:
        print(type(error).__name__, "interactive session" in str(error))
asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", HEAD + text], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    assert (ended.stdout, ended.stderr) == ("DefinitionError True\n", "")


def test_a_script_without_a_guard_ends_with_advice(tmp_path: Path) -> None:
    text = """
async def main():
    executor = ProcessExecutor(1)
    try:
        await executor.run(Call(score, (7,), {}, None))
    except Exception as error:
        if os.getpid() == os.getsid(0):
            print(type(error).__name__, error.began, error)
        raise SystemExit(3)
"""
    ended = subprocess.run(
        script(tmp_path, text, guarded=False),
        env=environment(),
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 3
    assert ended.stdout.startswith("WorkerDied False ")
    assert "__main__" in ended.stdout


@pytest.mark.parametrize("end", ["kill", "return", "exit"])
def test_workers_die_with_their_parent(tmp_path: Path, end: str) -> None:
    """B125: however it ends, at whatever its workers are, and without close()."""
    lock = tmp_path / "lock"
    ends = {"kill": "await asyncio.sleep(3600)", "return": "return", "exit": "os._exit(0)"}
    text = f"""
async def main():
    global executor  # collecting it would hang up
    executor = ProcessExecutor(2)
    task = asyncio.create_task(executor.run(Call(hold, ({str(lock)!r},), {{}}, None)))
    await asyncio.to_thread(sys.stdin.readline)
    await executor.run(Call(score, (7,), {{}}, None))  # by a second worker, idle from here on
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    {ends[end]}
"""
    with subprocess.Popen(
        script(tmp_path, text), env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "began\n"
        process.stdin.write("go\n")
        process.stdin.flush()
        if end == "kill":
            process.kill()
        assert process.stdout.read() == ""  # the end of all processes that had our pipe
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
        process.wait(20)


def test_a_forked_child_does_not_keep_the_workers_alive(tmp_path: Path) -> None:
    """B25: it holds copies of our ends of the pipes, and neither closing nor leaving them harms anybody."""
    lock = tmp_path / "lock"
    text = f"""
async def main():
    executor = ProcessExecutor(1)
    await executor.run(Call(score, (7,), {{}}, None))
    if not (child := os.fork()):
        os.close(1)
        time.sleep(3600)
    print(child, flush=True)
    await executor.run(Call(hold, ({str(lock)!r},), {{}}, None))
"""
    command = [*script(tmp_path, text)[:1], "-W", "ignore", str(tmp_path / "flow.py")]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            assert process.stdout.readline() == "began\n"
            process.kill()
            with lock.open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
        finally:
            os.kill(child, signal.SIGKILL)
