"""Where a node's function runs: on the loop, in a thread, in a process (see `crew`). They differ in nothing
else.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from dagresume import codec
from dagresume.context import Context
from dagresume.errors import EngineClosed, TooManyAbandoned

__all__ = [
    "Call",
    "Executor",
    "LoopExecutor",
    "ThreadExecutor",
    "Threads",
    "is_importing_main",
    "pack_result",
    "perform",
]


@dataclass(slots=True)
class Call:
    """One attempt, ready to run: the function, its arguments (fresh objects), and how its result is stored.

    `types` are the classes its result may hold; None: the result is passed on as it is (`checkpoint=False`).
    `context` is the one among the arguments, if the function asked for it. An executor that had to leave the
    body running when the call was cancelled sets `abandoned`. `begun` is called, from any thread, when a body
    begins that had to wait for a place to run in. `around`, if it is set, calls the function.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    types: codec.Types | None
    context: Context | None = None
    path: str = ""
    begun: Callable[[], object] | None = None
    around: Callable[..., Any] | None = None
    abandoned: bool = field(default=False, init=False)


class Executor(Protocol):
    """Runs calls. Cancelling `run` ends the body if that can be done, else sets `call.abandoned`."""

    async def run(self, call: Call) -> Any:
        """Give the packed result (as it is, if `call.types` is None) or raise what the body raised."""

    async def close(self) -> None:
        """Let threads and processes go; bodies that cannot be ended are left behind."""


class LoopExecutor:
    """Awaits async functions on the engine's own loop."""

    @staticmethod
    async def run(call: Call) -> Any:
        return pack_result(call, await call.fn(*call.args, **call.kwargs))

    @staticmethod
    async def close() -> None:
        return


def is_importing_main() -> bool:
    """Say whether this process is a worker that is importing the main script.

    A run that starts now was meant for the parent: the script lacks its `if __name__ == "__main__":`.
    """
    process = sys.modules.get("multiprocessing.process")  # loaded in every worker, and only where needed
    return process is not None and bool(getattr(process.current_process(), "_inheriting", False))


def pack_result(call: Call, value: Any) -> Any:
    """Give what is stored of a result: packed text, or the value itself if nothing is."""
    return value if call.types is None else codec.pack(value, call.types)


def perform(call: Call) -> Any:
    if call.around is not None:
        return pack_result(call, call.around(call.fn, *call.args, **call.kwargs))
    return pack_result(call, call.fn(*call.args, **call.kwargs))


# -- threads --------------------------------------------------------------------------------------------


class ThreadExecutor:
    """Runs plain functions in daemon threads of its own.

    Each call sees a copy of the context variables of its caller. Its thread packs its result, and calls the
    channel of its context, which must stand that. `limit`: threads at once, abandoned ones apart; other calls
    wait. With more than `abandoned_limit` bodies abandoned and still running, `run` raises TooManyAbandoned.

    Cancelling `run` gives the thread up, and what it returns later is dropped. A body that has returned is no
    longer cancelled: `run` gives its result (C5).
    """

    def __init__(self, limit: int = 64, abandoned_limit: int = 16, *, idle_seconds: float = 10.0) -> None:
        self._threads = Threads(limit, idle_seconds)
        self._abandoned_limit = abandoned_limit

    @property
    def abandoned(self) -> int:
        """How many bodies were given up and still run."""
        return len(self._threads.left)

    async def run(self, call: Call) -> Any:
        if len(self._threads.left) > self._abandoned_limit:
            paths = [job.args[0].path for job in list(self._threads.left)]
            if len(paths) > self._abandoned_limit:  # still so
                raise TooManyAbandoned(sorted(paths), self._abandoned_limit)
        job = self._threads.submit(perform, call)
        try:
            await job.future
        except asyncio.CancelledError:
            if self._threads.leave(job):
                call.abandoned = job.thread is not None
                raise
        return job.result()

    async def close(self) -> None:
        self._threads.close()


class _Job:
    """A function that runs in a thread. The pool's lock guards `thread`, `left` and `over`."""

    __slots__ = ("_context", "_error", "_fn", "_loop", "_value", "args", "future", "left", "over", "thread")

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._fn, self.args = fn, args
        self._context = contextvars.copy_context()
        if sniffio := sys.modules.get("sniffio"):  # else anyio.run in a body fails: "already running"
            self._context.run(sniffio.current_async_library_cvar.set, None)
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self._loop.create_future()
        self._value: Any = None
        self._error: BaseException | None = None
        self.thread: threading.Thread | None = None  # once it has begun
        self.left = self.over = False

    def perform(self) -> None:
        try:
            self._value = self._context.run(self._fn, *self.args)
        except BaseException as error:  # KeyboardInterrupt, SystemExit: the body's failure, not the pool's
            self._error = error

    def tell(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(_wake, self.future)

    def result(self) -> Any:
        error, self._error = self._error, None  # no circle through the traceback
        if error is None:
            return self._value
        try:
            raise error
        finally:
            del error


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Threads:
    """At most `limit` threads, made when needed; one that was idle for `idle_seconds` ends.

    All share one queue. A thread that waits at it is either counted in `_idle` or has a job there already.
    """

    def __init__(self, limit: int, idle_seconds: float = 10.0) -> None:
        self._limit, self._idle_seconds = limit, idle_seconds
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._alive: dict[threading.Thread, _Job | None] = {}  # and what runs in each
        self._idle = self._backlog = 0
        self._closed = False
        self.left: set[_Job] = set()  # given up, and still running

    def submit(self, fn: Callable[..., Any], *args: Any) -> _Job:
        """Start it, or queue it if all threads are taken; its `future` ends when it has ended."""
        job = _Job(fn, args)
        with self._lock:
            if self._closed:
                raise EngineClosed
            if self._idle:
                self._idle -= 1
            elif len(self._alive) < self._limit:
                self._start()
            else:
                self._backlog += 1
            self._queue.put(job)
        return job

    def leave(self, job: _Job) -> bool:
        """Give a job up: a thread that runs it no longer counts. False if it is over: its result is there."""
        with self._lock:
            if job.over:
                return False
            job.left = True
            if job.thread is not None:
                self.left.add(job)
                del self._alive[job.thread]
                if self._backlog and not self._closed:
                    self._backlog -= 1
                    self._start()
            return True

    def close(self) -> None:
        """End the threads; those in a body end after it."""
        with self._lock:
            self._closed = True
            with contextlib.suppress(Empty):
                while True:
                    if job := self._queue.get_nowait():
                        job.future.cancel()
            for _ in self._alive:
                self._queue.put(None)
            resting = [thread for thread, job in self._alive.items() if job is None]
        for thread in resting:
            thread.join(1.0)

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name="dagresume-thread", daemon=True)
        thread.start()
        self._alive[thread] = None

    def _work(self) -> None:
        me = threading.current_thread()
        while (job := self._take(me)) is not None:
            stays = self._run(me, job)
            del job  # not held while waiting
            if not stays:
                return

    def _take(self, me: threading.Thread) -> _Job | None:
        while True:
            try:
                return self._queue.get(timeout=self._idle_seconds)
            except Empty:
                with self._lock:
                    if self._idle:  # else a job is on its way to this thread
                        self._idle -= 1
                        del self._alive[me]
                        return None

    def _run(self, me: threading.Thread, job: _Job) -> bool:
        with self._lock:
            begins = not job.left
            if begins:
                job.thread = me
                self._alive[me] = job
        if begins:
            job.perform()
        with self._lock:
            job.over = True
            if begins and job.left:
                self.left.discard(job)
                return False  # another thread has its place
            self._alive[me] = None
            if self._backlog:
                self._backlog -= 1
            else:
                self._idle += 1
        job.tell()
        return True
