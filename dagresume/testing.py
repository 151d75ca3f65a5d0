"""What tests of workflows need: a clock that you turn, and processes that die wherever you say.

    FakeClock      time that passes when you say so
    StoreWrapper   something between an engine and its store
    Zygote         a process that has imported your code and forks a fresh one for each call
    autopsy        what a database held when its process had died, read with plain SQL
    sweep          kills a workflow at every commit and every SQL statement, resumes it, says what went wrong

Nothing in the engine knows of this: clock and store are passed in, SQL statements are counted by SQLite's own
trace. The zygote needs `os.fork`.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import heapq
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, Literal, NamedTuple, NoReturn

from dagresume import codec
from dagresume.engine import Engine
from dagresume.errors import RolledBack, RunFailed, UncertainNode
from dagresume.events import HELD, NodeStatus, RunStatus, enclosing, segments
from dagresume.executor import Call, Executor
from dagresume.planner import Body, is_body
from dagresume.results import RunResult
from dagresume.sqlite import SQLiteStore
from dagresume.store import (
    Clear,
    Forgotten,
    Holder,
    Loaded,
    LogLine,
    OnceFound,
    Outcome,
    RunRow,
    Session,
    Store,
    Unit,
)
from dagresume.undo import UndoContext
from dagresume.workflow import Approval, WaitFor, Workflow
from dagresume.writer import Writer

__all__ = [
    "Autopsy",
    "Case",
    "Child",
    "Ended",
    "FakeClock",
    "Point",
    "StoreWrapper",
    "Sweep",
    "Zygote",
    "autopsy",
    "sweep",
]

DATABASE: Final = "runs.db"
BEGUN: Final = "begun.log"


# -- time -----------------------------------------------------------------------------------------------


class FakeClock:
    """A clock for `Engine(clock=…)` that stands still until it is turned with `advance`.

    `at`: microseconds UTC it starts at. `autojump`: when all there is to do has been waiting for the clock
    for so many real seconds, it jumps to the next time that something waits for; give it more than your
    slowest real work takes. Safe to use from several threads and loops.
    """

    def __init__(self, at: int = 1_767_225_600_000_000, *, autojump: float | None = None) -> None:
        self._at, self._autojump = at, autojump
        self._passed = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._jump: asyncio.TimerHandle | None = None

    def now(self) -> int:
        """Give the wall clock in microseconds UTC since 1970."""
        return self._at + round(self._passed * 1e6)

    def monotonic(self) -> float:
        """Give the seconds that have passed on this clock."""
        return self._passed

    @property
    def sleeping(self) -> int:
        """How many wait for this clock."""
        with self._lock:
            return sum(not future.done() for _, _, future in self._sleepers)

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass; who waited for them wakes in the order of the due times."""
        if seconds < 0:
            raise ValueError(f"advance({seconds!r}): time does not run backwards")
        self._set(self._passed + seconds)

    def _set(self, passed: float) -> None:
        due = []
        with self._lock:
            self._passed = max(passed, self._passed)
            while self._sleepers and self._sleepers[0][0] <= self._passed:
                due.append(heapq.heappop(self._sleepers)[2])
        for future in due:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                future.get_loop().call_soon_threadsafe(_wake, future)

    async def sleep(self, seconds: float) -> None:
        """Return once so many seconds have passed on this clock."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future = asyncio.get_running_loop().create_future()
        with self._lock:
            heapq.heappush(self._sleepers, (self._passed + seconds, next(self._numbers), future))
        self._expect_quiet()
        try:
            await future
        finally:
            future.cancel()
            self._expect_quiet()

    def call_later(self, seconds: float, call: Callable[..., object], *args: Any) -> asyncio.Future[None]:
        """Call something when so many seconds have passed here, unless what this gives is cancelled."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda due: None if due.cancelled() else call(*args))
        with self._lock:
            heapq.heappush(self._sleepers, (self._passed + max(seconds, 0.0), next(self._numbers), future))
        self._expect_quiet()
        return future

    def _expect_quiet(self) -> None:
        """Jump when nothing goes to sleep or wakes for a while."""
        if self._autojump is None:
            return
        if self._jump is not None:
            self._jump.cancel()
        self._jump = asyncio.get_running_loop().call_later(self._autojump, self._to_the_next)

    def _to_the_next(self) -> None:
        self._jump = None
        with self._lock:
            while self._sleepers and self._sleepers[0][2].done():
                heapq.heappop(self._sleepers)
            due = self._sleepers[0][0] if self._sleepers else None
        if due is not None:
            self._set(due)
            self._expect_quiet()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


# -- between engine and store ---------------------------------------------------------------------------


class StoreWrapper:
    """A store that does as the one inside it; override what is to be disturbed, `commit` most of all."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.name, self.persistent = inner.name, inner.persistent

    @property
    def commits(self) -> int:
        return self.inner.commits

    @commits.setter
    def commits(self, value: int) -> None:
        self.inner.commits = value

    async def open(self, session: Session) -> int:
        return await self.inner.open(session)

    async def close(self) -> None:
        await self.inner.close()

    def abandon(self) -> None:
        self.inner.abandon()

    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        return await self.inner.commit(units)

    def renew(self, expires_at: int) -> bool:
        return self.inner.renew(expires_at)

    async def forget(self, runs: Mapping[int, int], clear: Clear, *, dry_run: bool = False) -> Forgotten:
        return await self.inner.forget(runs, clear, dry_run=dry_run)

    async def load(self, run_id: str) -> Loaded | None:
        return await self.inner.load(run_id)

    async def find(self, **wanted: Any) -> list[tuple[RunRow, Holder | None]]:
        return await self.inner.find(**wanted)

    async def tail(self, after: int, **wanted: Any) -> list[tuple[str, Any]]:
        return await self.inner.tail(after, **wanted)

    async def output(self, seqs: Sequence[int]) -> list[str | None]:
        return await self.inner.output(seqs)

    def output_now(self, seqs: Sequence[int]) -> list[str | None]:
        return self.inner.output_now(seqs)

    async def logs(self, run_id: str, *, after: int = 0, limit: int = 1000) -> list[tuple[int, LogLine]]:
        return await self.inner.logs(run_id, after=after, limit=limit)

    async def once(self, scope: str, key: str) -> OnceFound | None:
        return await self.inner.once(scope, key)

    async def changed(self) -> int:
        return await self.inner.changed()


# -- where a process is killed --------------------------------------------------------------------------

Where = Literal["before commit", "after commit", "statement"]


class Point(NamedTuple):
    """A moment in a process: before or after its n-th commit, or as its n-th SQL statement begins; from 1."""

    where: Where
    n: int

    def __str__(self) -> str:
        return f"{self.where} {self.n}"


class _Fate:
    """Counts what a process does to its database, and ends the process at the point."""

    def __init__(self, point: Point | None) -> None:
        self._point = point
        self.passed: Counter[Where] = Counter()

    def passes(self, where: Where) -> None:
        self.passed[where] += 1
        if self._point == (where, self.passed[where]):
            _die()


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(1)


class _DoomedStore(StoreWrapper):
    def __init__(self, inner: Store, fate: _Fate) -> None:
        super().__init__(inner)
        self._fate = fate

    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        self._fate.passes("before commit")
        outcomes = await self.inner.commit(units)
        self._fate.passes("after commit")
        return outcomes


def _doomed(path: str, fate: _Fate, **options: Any) -> Store:
    """Give a SQLite store in which fate counts every commit and every statement of the writer."""

    class Traced(Writer):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            self.set_trace_callback(lambda _: fate.passes("statement"))

    store = SQLiteStore(path, **options)
    store.connection_class = Traced
    return _DoomedStore(store, fate)


# -- what has begun -------------------------------------------------------------------------------------


class _Witness:
    """Writes what begins and what is given to the caller to a file outside the store: a line each."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(self, what: str, name: str) -> None:
        os.write(self._file, f"{what}\t{name}\n".encode())


class _WitnessedExecutor:
    def __init__(self, inner: Executor, witness: _Witness) -> None:
        self._inner, self._witness = inner, witness

    async def run(self, call: Call) -> Any:
        self._witness.note("undone" if isinstance(call.context, UndoContext) else "begun", call.path)
        return await self._inner.run(call)

    async def close(self) -> None:
        await self._inner.close()


class _WitnessedEngine(Engine):
    """An engine that notes the path of every body it begins."""

    witness: _Witness

    def _executor(self, name: str) -> Executor:
        return _WitnessedExecutor(super()._executor(name), self.witness)


class _Seen(NamedTuple):
    begun: Counter[str]
    results: int

    @classmethod
    def read(cls, folder: Path) -> _Seen:
        file = folder / BEGUN
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        told = [line.split("\t", 1) for line in lines]
        return cls(
            Counter(name for what, name in told if what == "begun"),
            sum(what == "result" for what, _ in told),
        )


# -- what is left ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Autopsy:
    """The newest run in a database whose process has died. `status` None: no run was ever made.

    `last`: path → (kind, reason) of the last record that changed its state. `starts`: how many start records
    each path has. `unknown`: paths with a start record after which nothing tells how that attempt ended.
    """

    run_id: str | None = None
    status: str | None = None
    last: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)
    starts: Counter[str] = field(default_factory=Counter)
    unknown: frozenset[str] = frozenset()

    @property
    def completed(self) -> frozenset[str]:
        """The paths whose completion is durable, also of those that were undone afterwards."""
        return frozenset(path for path, (kind, _) in self.last.items() if kind in _DONE)


_DONE: Final = frozenset({"node.completed", "node.compensated"})


def autopsy(db: str | os.PathLike[str]) -> Autopsy:
    """Give what this database holds. Looks at a copy: to open a database after a crash is to mend it."""
    db = Path(db)
    folder = db.parent / "autopsy"
    folder.mkdir(exist_ok=True)
    try:
        for name in (db.name, f"{db.name}-wal"):
            if (db.parent / name).exists():
                shutil.copyfile(db.parent / name, folder / name)
        with contextlib.closing(sqlite3.connect(folder / db.name)) as conn:
            return _examine(conn)
    finally:
        shutil.rmtree(folder)


def _examine(conn: sqlite3.Connection) -> Autopsy:
    if not conn.execute("SELECT 1 FROM sqlite_master WHERE name = 'dagresume_runs'").fetchone():
        return Autopsy()
    row = conn.execute("SELECT run, run_id, status FROM dagresume_runs ORDER BY run DESC LIMIT 1").fetchone()
    if row is None:
        return Autopsy()
    which = "run = ? AND path IS NOT NULL AND status IS NOT NULL"
    sql = f"SELECT path, kind, reason FROM dagresume_events WHERE {which} ORDER BY seq"
    last: dict[str, tuple[str, str | None]] = {}
    starts: Counter[str] = Counter()
    unknown: set[str] = set()
    for path, kind, reason in conn.execute(sql, [row[0]]):
        last[path] = (kind, reason)
        if kind == "node.started":
            starts[path] += 1
            unknown.add(path)
        elif kind != "node.interrupted":
            unknown.discard(path)
    return Autopsy(row[1], row[2], last, starts, frozenset(unknown))


# -- processes ------------------------------------------------------------------------------------------


def load(reference: str) -> Any:
    """Import `package.module:attribute` or `path/file.py:attribute`."""
    module, _, attribute = reference.rpartition(":")
    found: Any = _module(module)
    for name in attribute.split("."):
        found = getattr(found, name)
    return found


def _module(name: str) -> Any:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name).resolve()
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    `signal`: what killed it, 0 if nothing did. `hung`: it did not end in time and was killed.
    `told`: what its function gave; `error`: the traceback of what it raised.
    """

    signal: int = 0
    told: Any = None
    error: str | None = None
    hung: bool = False

    @property
    def killed(self) -> bool:
        return self.signal == signal.SIGKILL and not self.hung


class Child:
    """A process forked from a zygote: `pid`, `kill()`, `wait()`."""

    def __init__(self, zygote: Zygote, number: int, pid: int) -> None:
        self._zygote, self._number, self.pid = zygote, number, pid
        self._ended: Ended | None = None

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send it a signal; SIGKILL unless told otherwise."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signum)

    def wait(self, timeout: float = 30.0) -> Ended:
        """Give how it ended; one that has not ended after `timeout` seconds is killed."""
        if self._ended is None:
            message = self._zygote._hear(self._number, timeout)
            hung = message is None
            if message is None:
                self.kill(signal.SIGUSR1)  # it says on stderr where each of its threads is
                time.sleep(0.1)
                self.kill()
                message = self._zygote._hear(self._number, timeout) or {}
            self._ended = Ended(message.get("signal", 0), message.get("told"), message.get("error"), hung)
        return self._ended


class Zygote:
    """A process that has imported what is needed, has no threads, and forks a child for each call.

    `imports`: references (`package.module:attribute`, `path/file.py:attribute`) or modules to import
    beforehand. A child costs some milliseconds instead of the start of an interpreter. Use it as a context
    manager, from one thread.
    """

    def __init__(self, *imports: str) -> None:
        program = "from dagresume.testing import _be_a_zygote; _be_a_zygote()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._numbers = itertools.count(1)
        self._heard: dict[int, dict[str, Any]] = {}
        self._rest = b""
        self._say({"imports": imports, "path": sys.path})
        ready = self._hear(0, 60.0)
        if ready is None or "error" in ready:
            self.close()
            raise RuntimeError(f"a process that imports {', '.join(imports)} did not get ready: {ready}")

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End it, and its children."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def call(self, function: str, folder: str | os.PathLike[str], /, **arguments: Any) -> Child:
        """Call a function (a reference; plain or async) in a child whose working folder is `folder`.

        The arguments and what it gives must be JSON. The child ends without ceremony when the function
        returns.
        """
        number = next(self._numbers)
        self._say({"call": number, "function": function, "folder": os.fspath(folder), "arguments": arguments})
        born = self._hear(-number, 30.0)
        if born is None:
            raise RuntimeError("the zygote does not answer")
        return Child(self, number, born["pid"])

    def _say(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    def _hear(self, number: int, timeout: float) -> dict[str, Any] | None:
        """Give the message about this call; None if there is none in time."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout
        while number not in self._heard:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._process.stdout], [], [], left)[0]:
                return None
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                return {"error": "the zygote has ended"}
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                self._heard[message.pop("about")] = message
        return self._heard.pop(number)


def _be_a_zygote() -> None:
    """Be that process: orders come in on stdin, messages go out where stdout was."""
    out = os.dup(1)
    os.dup2(2, 1)  # what bodies print is no message
    nursery = _Nursery(out)
    with open(0, "rb", buffering=0, closefd=False) as orders:  # a descriptor has no path
        first = json.loads(orders.readline())
        sys.path[:] = first["path"]
        try:
            for reference in first["imports"]:
                load(reference) if ":" in reference else _module(reference)
            if threading.active_count() > 1:
                raise RuntimeError(f"the import started threads: {threading.enumerate()[1:]}")
        except BaseException:
            nursery.say(0, error=traceback.format_exc())
            return
        gc.collect()
        gc.freeze()
        nursery.say(0)
        nursery.serve(orders.fileno())


class _Nursery:
    """The zygote's side: children and the pipes they tell their end by."""

    def __init__(self, out: int) -> None:
        self._out = out
        self._children: dict[int, tuple[int, int, bytearray]] = {}  # pipe: number, pid, what came through it

    def say(self, about: int, **facts: Any) -> None:
        os.write(self._out, json.dumps({"about": about, **facts}).encode() + b"\n")

    def serve(self, orders: int) -> None:
        rest = b""
        while True:
            for pipe in select.select([orders, *self._children], [], [])[0]:
                if pipe != orders:
                    self._listen(pipe)
                    continue
                data = os.read(orders, 1 << 16)
                if not data:
                    self._end()
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._fork(json.loads(line))

    def _fork(self, order: Mapping[str, Any]) -> None:
        pipe, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(self._out)
            os.close(pipe)
            for other in self._children:
                os.close(other)
            _live(told, order)
        os.close(told)
        self._children[pipe] = (order["call"], pid, bytearray())
        self.say(-order["call"], pid=pid)

    def _listen(self, pipe: int) -> None:
        number, pid, heard = self._children[pipe]
        data = os.read(pipe, 1 << 16)
        heard += data
        if data:
            return
        os.close(pipe)
        del self._children[pipe]
        _, status = os.waitpid(pid, 0)
        told = json.loads(heard) if heard else {}
        self.say(number, signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, **told)

    def _end(self) -> None:
        for _, pid, _ in self._children.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _live(told: int, order: Mapping[str, Any]) -> NoReturn:
    """Be a child: do what was asked, tell it, and be gone."""
    try:
        with contextlib.suppress(RuntimeError, ValueError):  # stderr is no file
            faulthandler.register(signal.SIGUSR1)
        os.chdir(order["folder"])
        given = load(order["function"])(**order["arguments"])
        if inspect.isawaitable(given):
            given = asyncio.run(_awaited(given))
        message = {"told": given}
    except BaseException:
        message = {"error": traceback.format_exc()}
    left = memoryview(json.dumps(message).encode())
    while left:
        left = left[os.write(told, left) :]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


async def _awaited(given: Any) -> Any:
    return await given


# -- a workflow in such a process -----------------------------------------------------------------------


def _workflow(target: str) -> Workflow:
    found = load(target)
    made = found if isinstance(found, Workflow) else found()
    if not isinstance(made, Workflow):
        raise TypeError(f"{target} is neither a Workflow nor a function that gives one")
    return made


def _describe(target: str) -> list[dict[str, Any]]:
    """Give what a check needs to know of the nodes, in their order, and of those inside them."""
    return _described(Body(_workflow(target).compiled))


def _described(body: Body) -> list[dict[str, Any]]:
    rules = body.rules
    return [
        {
            "id": v.id,
            "parents": [rules[p].id for p in v.parents],
            "chained": [rules[p].id for p in v.chained],
            "is_map": v.is_map,
            "idempotent": v.idempotent,
            "reconciles": v.node.reconcile is not None,
            "pure": v.pure,
            "is_loop": v.is_loop,
            "body": None if v.body is None else _described(v.body),
        }
        for v in rules
    ]


_ENDS: Final = {RunStatus.COMPLETED, RunStatus.ROLLED_BACK}


async def _play(
    target: str,
    setup: str | None,
    inputs: str,
    key: str,
    options: dict[str, Any],
    action: str = "run",
    run_id: str | None = None,
    point: tuple[Where, int] | None = None,
) -> dict[str, Any]:
    """Run, resume or retry in the working folder; die at the point if there is one."""
    workflow = _workflow(target)
    if setup:
        load(setup)()
    fate = _Fate(None if point is None else Point(*point))
    files = {name: options.pop(name) for name in ("synchronous",) if name in options}
    engine = _WitnessedEngine(workflows=[workflow], store=_doomed(DATABASE, fate, **files), **options)
    engine.witness = _Witness(Path(BEGUN))
    told: dict[str, Any] = {}
    try:
        async with engine:
            if run_id is None:
                result = await engine.run(workflow, codec.unpack(inputs), key=key, raise_on_failure=False)
            elif action == "retry":
                result = await engine.retry(run_id, raise_on_failure=False)
            else:
                result = await _resumed(engine, run_id)
            while result.status == RunStatus.WAITING:
                await _speak(engine, workflow, result.run_id)
                result = await engine.resume(result.run_id, raise_on_failure=False)
            if result.status not in _ENDS:
                raise RunFailed(result.run_id, result.failures, f"it ended {result.status}")
            engine.witness.note("result", result.status)
            nodes = workflow.nodes
            types = {id_: codec.types_of(node.signature.returns) for id_, node in nodes.items()}
            told["outputs"] = {
                id_: codec.canonical(out, types[id_])
                for id_, out in result.outputs.items()
                if not isinstance(nodes[id_].what, Approval)  # it says when
            }
            told["status"] = result.status
    except UncertainNode as error:
        told["refused"] = list(error.paths)
    except Exception as error:
        told["error"] = f"{type(error).__name__}: {error}"
        told["traceback"] = traceback.format_exc()
    return told | {"commits": fate.passed["after commit"], "statements": fate.passed["statement"]}


async def _resumed(engine: Engine, run_id: str) -> RunResult:
    try:
        return await engine.resume(run_id, raise_on_failure=False)
    except RolledBack:  # it had undone all of itself before its process died
        return await engine.result(run_id)


async def _speak(engine: Engine, workflow: Workflow, run_id: str) -> None:
    """Be the people and programs that a run waits for: approve everything, send every event."""
    body = Body(workflow.compiled)
    for path, info in (await engine.get(run_id)).nodes.items():
        vertex = body.at(path)
        if info.status != NodeStatus.WAITING or vertex is None:
            continue
        if isinstance(vertex.node.what, WaitFor):
            await engine.signal(run_id, vertex.node.what.event)
        elif info.reason in {"approval", HELD} and (vertex.waits or is_body(vertex, path)):
            await engine.decide(run_id, path, by="sweep")


# -- the sweep ------------------------------------------------------------------------------------------


@dataclass
class Case:
    """One run that was killed: at these points, one process after the other, until it ended.

    `killed`: how many of the points were reached. `refused`: how many processes refused to go on. `created`:
    whether the run was in the database when its first process died. `violations`: what should not have been.
    """

    points: tuple[Point, ...]
    folder: Path
    killed: int = 0
    refused: int = 0
    created: bool = True
    violations: list[str] = field(default_factory=list)
    commits: int = 0
    statements: int = 0
    last: Mapping[str, tuple[str, str | None]] = field(default_factory=dict, repr=False)
    outputs: Mapping[str, str] = field(default_factory=dict, repr=False)
    begun: Counter[str] = field(default_factory=Counter, repr=False)

    def __str__(self) -> str:
        return ", then ".join(map(str, self.points)) or "undisturbed"


@dataclass
class Sweep:
    """What a sweep found. `undisturbed` is the run that nothing happened to; str() is a table."""

    target: str
    undisturbed: Case
    cases: list[Case]
    seconds: float = 0.0

    @property
    def violations(self) -> list[str]:
        """What should not have been, with the points that led to it."""
        return [f"{case}: {text}" for case in [self.undisturbed, *self.cases] for text in case.violations]

    @property
    def refused(self) -> int:
        """How many runs needed a person's word."""
        return sum(case.refused > 0 for case in self.cases)

    def __str__(self) -> str:
        killed = [case for case in self.cases if case.killed]
        columns = {
            "commits": self.undisturbed.commits,
            "statements": self.undisturbed.statements,
            "kill points": len(self.cases),
            "killed": len(killed),
            "twice": sum(case.killed > 1 for case in killed),
            "not reached": len(self.cases) - len(killed),
            "never made": sum(not case.created for case in killed),
            "refused": self.refused,
            "resumed": sum(case.created and not case.refused for case in killed),
            "violations": len(self.violations),
            "seconds": round(self.seconds, 1),
        }
        widths = [max(len(name), len(str(value))) for name, value in columns.items()]
        rows = (columns.keys(), columns.values())
        lines = ["  ".join(str(c).rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([self.target, *lines])

    def check(self) -> None:
        """Raise AssertionError with everything that should not have been."""
        if self.violations:
            raise AssertionError("\n".join([str(self), *self.violations]))


def sweep(
    target: str,
    inputs: Mapping[str, Any] | None = None,
    db_dir: str | os.PathLike[str] = "crashes",
    points: Literal["all", "commits", "statements"] | Iterable[Point] = "all",
    *,
    again: Iterable[Point] = (),
    every: int = 1,
    setup: str | None = None,
    check: Callable[[Path], Iterable[str]] | None = None,
    options: Mapping[str, Any] | None = None,
    processes: int = 2,
    timeout: float = 30.0,
) -> Sweep:
    """Kill a workflow at every point, let a new process go on, and give what was wrong.

    `target`: a reference (`package.module:attribute`, `path/file.py:attribute`) to a Workflow or a function
    that gives one. It is run once undisturbed, which counts its commits and statements; then once for each
    point, in a folder of its own below `db_dir` that is the working folder of its processes (folders without
    a violation are removed). `again`: after these points the process that goes on is killed too, at every
    point of its own. `every`: take only each n-th statement. `setup`: a reference to a function that is
    called in each process before its engine is made. `check`: is given the folder of each run when it has
    ended, and gives what is wrong there. `options`: those of `Engine`.

    What it looks at, with plain SQL and a file that notes each body as it begins, wherever a process died or
    ended: no body of a non-idempotent path began without its durable start record; none began before what it
    depends on was durable; no result was given before the run's end was; `resume` refuses exactly the paths
    that began and are not known to have ended, else it goes on, and `retry` after a refusal; completed paths
    never begin again; outputs and the final state of every path are those of the undisturbed run. Graphs
    inside nodes and rounds of loops are looked at as well. What the run waits for comes: its processes
    approve what is to be approved and send the events it waits for (their payload is None).
    """
    began = time.monotonic()
    base = Path(db_dir).resolve()
    base.mkdir(parents=True, exist_ok=True)
    stage = _Stage(target, setup, inputs, dict(options or {}), check, base, timeout)
    with contextlib.ExitStack() as stack:
        zygotes: SimpleQueue[Zygote] = SimpleQueue()
        imports = [target, *([setup] if setup else [])]
        for _ in range(processes):
            zygotes.put(stack.enter_context(Zygote(*imports)))
        first = zygotes.get()
        stage.nodes = first.call("dagresume.testing:_describe", base, target=target).wait().told
        undisturbed = stage.expected = stage.play(first, ())
        zygotes.put(first)
        if undisturbed.violations:
            return Sweep(target, undisturbed, [], time.monotonic() - began)

        def play(at: tuple[Point, ...]) -> Case:
            zygote = zygotes.get()
            try:
                return stage.play(zygote, at)
            finally:
                zygotes.put(zygote)

        with ThreadPoolExecutor(processes) as pool:
            singles = _points(points, undisturbed, every)
            cases = list(pool.map(play, [(point,) for point in singles]))
            for point in again:
                after = play((point,))
                cases += pool.map(play, [(point, second) for second in _points("all", after, every)])
    return Sweep(target, undisturbed, cases, time.monotonic() - began)


def _points(
    which: Literal["all", "commits", "statements"] | Iterable[Point], case: Case, every: int
) -> list[Point]:
    """Give the points of a process that did what the last one of this case did."""
    if not isinstance(which, str):
        return list(which)
    if which not in {"all", "commits", "statements"}:
        raise ValueError(f"points={which!r}: 'all', 'commits', 'statements' or Points")
    found: list[Point] = []
    if which != "statements":
        for n in range(1, case.commits + 1):
            found += [Point("before commit", n), Point("after commit", n)]
    if which != "commits":
        found += [Point("statement", n) for n in range(1, case.statements + 1, every)]
    return found


class _Stage:
    """Where the cases of a sweep are played."""

    nodes: list[dict[str, Any]]
    expected: Case | None = None

    def __init__(
        self,
        target: str,
        setup: str | None,
        inputs: Mapping[str, Any] | None,
        options: dict[str, Any],
        check: Callable[[Path], Iterable[str]] | None,
        base: Path,
        timeout: float,
    ) -> None:
        self._order = {
            "target": target,
            "setup": setup,
            "inputs": codec.pack(None if inputs is None else dict(inputs)),
            "key": "sweep",
            "options": options,
        }
        self._check, self._base, self._timeout = check, base, timeout
        self._numbers = itertools.count()

    def play(self, zygote: Zygote, points: tuple[Point, ...]) -> Case:
        """Run to the first point, go on in a new process to the second, and so on to the end."""
        folder = self._base / f"{next(self._numbers):05}"
        folder.mkdir()
        case = Case(points, folder)
        left = list(points)
        action = "run"
        for _ in range(2 * len(points) + 3):
            state, seen = autopsy(folder / DATABASE), _Seen.read(folder)
            at = left[0] if left else None
            ended = zygote.call(
                "dagresume.testing:_play", folder, **self._order, action=action, run_id=state.run_id, point=at
            ).wait(self._timeout)
            if ended.killed:
                case.killed += 1
                left.pop(0)
            again = self._went(case, action, state, seen, ended)
            if again is None:
                break
            action = again
        else:
            case.violations.append("the run does not come to an end")
        self._compare(case)
        if not case.violations:
            shutil.rmtree(folder)
        return case

    def _went(self, case: Case, action: str, before: Autopsy, seen: _Seen, ended: Ended) -> str | None:
        """Judge what one process did; give what the next one is to do, None: nothing."""
        wrong = case.violations
        after, told = autopsy(case.folder / DATABASE), ended.told or {}
        now = _Seen.read(case.folder)
        wrong += self._begun_too_early(after, now.begun)
        repeated = sorted(self._kept(before.completed & (now.begun - seen.begun).keys()))
        if repeated:
            wrong.append(f"completed and begun again: {', '.join(repeated)}")
        if now.results > seen.results and after.status not in _ENDS:
            wrong.append(f"the result was given while the run was {after.status} in the database")
        if ended.hung or (ended.signal and not ended.killed):
            wrong.append("hung" if ended.hung else f"ended by signal {ended.signal}")
            return None
        doubtful = self._doubtful(before) if action != "retry" else []
        if ended.killed:
            if case.killed == 1:
                case.created = after.run_id is not None
            return "resume"
        case.commits, case.statements = told.get("commits", 0), told.get("statements", 0)
        problem = ended.error or told.get("traceback")
        if problem:
            wrong.append(f"{action} failed: {problem}")
            return None
        if "refused" in told:
            case.refused += 1
            if sorted(told["refused"]) != doubtful or now.begun != seen.begun:
                wrong.append(f"refused {sorted(told['refused'])}, uncertain are {doubtful}")
            return "retry"
        if doubtful:
            wrong.append(f"{action} went on although {', '.join(doubtful)} may have taken effect")
        case.outputs, case.last, case.begun = told["outputs"], after.last, now.begun
        return None

    def _kept(self, paths: Iterable[str]) -> list[str]:
        """Leave out the pure ones, which are made again whenever somebody needs them."""
        return [path for path in paths if not self._node(path)["pure"]]

    def _doubtful(self, state: Autopsy) -> list[str]:
        """Give the paths that nobody can answer for."""
        return sorted(path for path in state.unknown if self._is_anybodys_guess(path))

    def _is_anybodys_guess(self, path: str) -> bool:
        node = self._node(path)
        several = node["is_map"] or node["is_loop"]
        whole = node["body"] or (
            several and not path.endswith("]")
        )  # bookkeeping: what is inside is what ran
        return not (node["idempotent"] or node["reconciles"] or whole)

    def _begun_too_early(self, state: Autopsy, begun: Counter[str]) -> Iterator[str]:
        for path, times in begun.items():
            node = self._node(path)
            if not node["idempotent"] and times > state.starts[path]:
                yield f"{path} has begun {times} times with {state.starts[path]} durable start records"
            waits = [parent for parent in self._needed(path) if not self._is_settled(state, parent)]
            if waits:
                yield f"{path} has begun before {', '.join(waits)} was durable"

    def _needed(self, path: str) -> Iterator[str]:
        """Give what must be durable before this path begins: what it and all around it depends on, and the
        round before.
        """
        for around in (path, *(outer for outer in enclosing(path) if self._is_node(path, outer))):
            node, index = self._node(around), around[around.rindex("[") :] if around.endswith("]") else ""
            for parent in self._parents(around):
                if not self._node(parent)["pure"]:
                    yield parent + index if parent.rpartition("/")[2] in node["chained"] else parent
            if node["is_loop"] and index not in {"", "[0]"}:
                yield f"{around.removesuffix(index)}[{int(index[1:-1]) - 1}]"

    @staticmethod
    def _is_node(path: str, outer: str) -> bool:
        """Say whether this, which encloses the path, is a node, item or round that holds a graph."""
        return path[len(outer)] == "/"

    def _parents(self, path: str) -> list[str]:
        """Give the paths of what this path's node depends on."""
        prefix = path[: path.rindex("/") + 1] if "/" in path else ""
        return [prefix + parent for parent in self._node(path)["parents"]]

    def _is_settled(self, state: Autopsy, path: str) -> bool:
        kind, reason = state.last.get(path, (None, None))
        if kind in _DONE | {"node.skipped"} or (kind == "node.failed" and reason != "retry"):
            return True
        return any(self._has_failed(state, parent) for parent in self._parents(path))

    def _has_failed(self, state: Autopsy, path: str) -> bool:
        if state.last.get(path, ("", ""))[0] == "node.failed":
            return True
        return any(self._has_failed(state, parent) for parent in self._parents(path))

    def _node(self, path: str) -> dict[str, Any]:
        nodes: list[dict[str, Any]] | None = self.nodes
        node: dict[str, Any] = {}
        for name, _ in segments(path):
            node = next(each for each in nodes or () if each["id"] == name)
            nodes = node["body"]
        return node

    def _compare(self, case: Case) -> None:
        """Judge how it ended, by the run that nothing happened to."""
        expected, wrong = self.expected, case.violations
        if self._check is not None:
            wrong += self._check(case.folder)
        if expected is None or wrong:
            return
        if case.outputs != expected.outputs:
            wrong.append(f"the outputs are {case.outputs}, undisturbed {expected.outputs}")
        kinds = [{path: kind for path, (kind, _) in each.last.items()} for each in (case, expected)]
        if kinds[0] != kinds[1]:
            wrong.append(f"the paths ended as {kinds[0]}, undisturbed {kinds[1]}")
        most = expected.begun
        often = {
            path: case.begun[path]
            for path in self._kept(case.begun)
            if case.begun[path] > most[path] + case.killed
        }
        if often:
            wrong.append(f"begun more often than the kills explain: {often}")
