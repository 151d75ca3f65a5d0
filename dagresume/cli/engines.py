"""Opens the engine for a command, finds the run it names, and ends it cleanly when it is interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from dagresume.cli import is_loop_running
from dagresume.cli.command import DEFAULT_DB, INTERRUPTED, Problem
from dagresume.cli.screen import heard, line, warn
from dagresume.engine import Engine
from dagresume.errors import RunNotFound
from dagresume.peek import peek

if TYPE_CHECKING:
    from dagresume.policy import Limit
    from dagresume.results import RunResult
    from dagresume.workflow import Workflow

__all__ = ["file_of", "finished", "mode_of", "opened", "resolve", "sqlite_file", "work"]

T = TypeVar("T")
GRACE: Final = 3.0
"""Seconds that functions under way are given when a person interrupts."""
PAGE: Final = 1000
_INTERRUPTING: Final = f"interrupting: what is under way has {GRACE:g} s to end; once more stops at once"
_NAME_IT: Final = "Name the one that holds the run with --db (or DAGRESUME_DB)."
_UUID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


# -- opening --------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def opened(
    db: str,
    workflows: Sequence[Workflow] = (),
    *,
    run: str | None = None,
    create: bool = False,
    limits: Mapping[str, Limit] | None = None,
    concurrency: int = 64,
    synchronous: str = "full",
) -> AsyncIterator[Engine]:
    """Give an open engine; without `create` a database that does not exist is a Problem and is not made.

    `run`: what will be resolved in it. If there is no such run, that is told before anything is written: an
    open engine registers its session.
    """
    if not create:
        _must_exist(db)
    if run is not None:
        _must_be_there(run, db)
    mode = mode_of(synchronous)
    heard()
    engine = Engine(
        db,
        workflows=workflows,
        limits=limits,
        concurrency=concurrency,
        synchronous=mode,
        grace_seconds=GRACE,
    )
    async with engine:
        yield engine


def mode_of(synchronous: str) -> Literal["full", "normal"]:
    """Give what --synchronous means; a Problem if it means nothing."""
    if synchronous not in {"full", "normal"}:
        raise Problem(f"--synchronous {synchronous!r}: full or normal")
    return "normal" if synchronous == "normal" else "full"


def file_of(db: str) -> Path | None:
    """Give the file that --db names; None if it names a server. A Problem for `:memory:`."""
    scheme, url, rest = db.partition("://")
    if url and scheme != "sqlite":
        return None
    if db == ":memory:":
        raise Problem(f"nothing outlives its process in :memory:. {_NAME_IT}")
    return Path((rest.removeprefix("/") or DEFAULT_DB) if url else db)


def sqlite_file(db: str) -> Path:
    """Give the file that --db means; a Problem if it is a server's database."""
    path = file_of(db)
    if path is None:
        raise Problem(f"--db {line(db.partition('://')[0], 40)}://…: this command is for SQLite files only.")
    return path


def _must_exist(db: str) -> None:
    path = file_of(db)  # a server knows what it has
    if path is not None and not path.exists():
        raise Problem(f"there is no database {path}. {_NAME_IT}")


def _must_be_there(word: str, db: str) -> None:
    path, start = file_of(db), word.strip().lower()
    # What is wrong with the file itself is told by whoever opens it.
    with contextlib.suppress(sqlite3.Error):
        if path is None or not path.is_file() or not path.stat().st_size:
            return
        with peek(path) as looked:
            sql = "SELECT 1 FROM dagresume_runs WHERE substr(run_id, 1, ?) = ? LIMIT 1"
            values = (0, "") if word == "last" else (len(start), start)
            found = looked.conn.execute(sql, values).fetchone()
        if found is None or not start:
            raise _unknown(word, db)


def _unknown(word: str, db: str) -> Exception:
    if word == "last":
        return Problem(f"there are no runs in {db}")
    if _UUID.fullmatch(word.strip().lower()):
        return RunNotFound(word.strip().lower(), db)
    return Problem(f"no run {line(word, 80)!r} in {db}. `dagresume list` shows what is there.")


async def resolve(engine: Engine, word: str, db: str) -> str:
    """Give the id of the run that a person means: an id, the beginning of one, or `last`."""
    if word == "last":
        newest = await engine.runs(limit=1)
        if not newest:
            raise _unknown(word, db)
        return newest[0].run_id
    start = word.strip().lower()
    if _UUID.fullmatch(start):
        return start
    found = await engine.runs(starting=start, limit=PAGE) if start else []
    if len(found) == 1:
        return found[0].run_id
    if not found:
        raise _unknown(word, db)
    shown = ", ".join(f"{info.run_id} ({info.workflow}, {info.status})" for info in found[:5])
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    raise Problem(f"{len(found)} runs begin with {start!r}: {shown}{more}. Give more of the id.")


# -- interrupts -----------------------------------------------------------------------------------------


class _Interrupts:
    """The first SIGINT or SIGTERM ends the work cleanly, the second one ends the process."""

    def __init__(self, told: str) -> None:
        self.count, self._told = 0, told
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            _leave()
        self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        warn(self._told)
        if self._task is not None:
            self._task.cancel()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _leave() -> None:
    """End the process now. The database is sound at every moment, so nothing that was committed is lost."""
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h\n")  # the progress line hid the cursor
    os._exit(INTERRUPTED)


def work(make: Callable[[], Coroutine[Any, Any, T]], interrupted: str = _INTERRUPTING) -> T:
    """Run an asynchronous command to its end; KeyboardInterrupt if a person ended it without a result.
    `interrupted`: what that person is told.

    Where a loop runs already, as in a notebook, it has a thread and a loop of its own.
    """
    begun: list[_Interrupts] = []
    if not is_loop_running():
        return _worked(make, begun, interrupted)
    with ThreadPoolExecutor(1, "dagresume command") as thread:
        result = thread.submit(copy_context().run, _worked, make, begun, interrupted)
        try:
            return result.result()
        except KeyboardInterrupt:
            for interrupts in begun[: not result.done()]:
                interrupts(signal.SIGINT, None)
            return result.result()


def _worked(make: Callable[[], Coroutine[Any, Any, T]], begun: list[_Interrupts], told: str) -> T:
    async def watched() -> T:
        interrupts = _Interrupts(told)
        begun.append(interrupts)
        try:
            with interrupts.listening():
                return await make()
        except asyncio.CancelledError:
            if interrupts.count:
                raise KeyboardInterrupt from None
            raise

    loop = _new_loop()
    try:
        return loop.run_until_complete(watched())
    finally:
        # not asyncio.run: that would wait for ever for functions that ignore their cancellation
        loop.set_exception_handler(lambda _loop, _context: None)
        loop.run_until_complete(_let_go())
        loop.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    """Give an event loop: uvloop's, which is quicker, if `dagresume[fast]` has brought it."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    made: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return made


async def _let_go() -> None:
    """Cancel what is left behind, and give it a moment to notice."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=1.0)
    await asyncio.get_running_loop().shutdown_asyncgens()


async def finished(
    engine: contextlib.AbstractAsyncContextManager[Engine],
    begin: Callable[[Engine], Awaitable[tuple[str, asyncio.Task[RunResult]]]],
    watch: Callable[[Engine, str], contextlib.AbstractAsyncContextManager[None]],
) -> RunResult:
    """Begin a run and give its result; interrupted: leave the engine, with grace for what is under way."""
    task: asyncio.Task[RunResult] | None = None
    try:
        async with engine as opened_engine:
            beginning = asyncio.ensure_future(begin(opened_engine))
            try:
                await asyncio.wait([beginning])
            except asyncio.CancelledError:  # a run that was begun all the same is to be told of
                await asyncio.wait([beginning], timeout=GRACE)
                if beginning.done() and beginning.exception() is None:
                    task = beginning.result()[1]
                raise
            run_id, task = beginning.result()
            async with watch(opened_engine, run_id):
                await asyncio.wait([task])
    except asyncio.CancelledError:
        if task is None:
            raise
        await asyncio.wait([task], timeout=1.0)  # the run has ended, its result is a step or two away
        if not task.done() or task.cancelled():
            raise
    return task.result()
