"""Runs from code that is not async."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from dagresume.engine import Engine
from dagresume.results import RunResult
from dagresume.workflow import Workflow

__all__ = ["run_sync"]

LOOK: Final = 0.1  # seconds between two looks whether the caller was cancelled
_ENGINE_OPTIONS: Final = [
    "workflows",
    "limits",
    "concurrency",
    "synchronous",
    "spill_bytes",
    "lease_seconds",
    "grace_seconds",
    "fail_fast",
    "adopt",
    "debug",
]


def run_sync(
    wf: Workflow, inputs: Mapping[str, Any] | None = None, *, db: str | Path = "dagresume.db", **options: Any
) -> RunResult:
    """Run a workflow from code that is not async, and give its result.

    `options` are those of `Engine` and of `Engine.run`. Inside a running event loop it works in a thread with
    a loop of its own. In the main thread SIGINT and SIGTERM interrupt the run, so that it can be resumed;
    inside a running loop Ctrl-C does.
    """
    settings = {name: options.pop(name) for name in _ENGINE_OPTIONS if name in options}

    async def work() -> RunResult:
        with _interruptible():
            async with Engine(db, **settings) as engine:
                return await engine.run(wf, inputs, **options)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    return _in_thread(work)


def _in_thread(work: Callable[[], Coroutine[Any, Any, RunResult]]) -> RunResult:
    """Do it in a thread with a loop of its own, while the calling thread, which runs a loop, waits."""
    box: list[RunResult] = []
    errors: list[BaseException] = []
    under_way: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []
    unwanted = threading.Event()

    async def noted() -> RunResult:
        task = asyncio.current_task()
        assert task is not None
        under_way.append((asyncio.get_running_loop(), task))
        if unwanted.is_set():  # before there was anything to cancel
            raise KeyboardInterrupt
        return await work()

    def in_thread() -> None:
        try:
            box.append(asyncio.run(noted()))
        except BaseException as error:
            errors.append(error)

    def cancel() -> None:
        unwanted.set()
        for loop, task in under_way:
            with contextlib.suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(task.cancel)

    thread = threading.Thread(target=in_thread, name="dagresume run_sync")
    thread.start()
    try:
        _wait_for(thread, cancel)
    except BaseException:  # Ctrl-C: the run is interrupted, not left to go on behind the caller's back
        cancel()
        thread.join()
        raise
    if errors:
        raise errors[0]
    return box[0]


def _wait_for(thread: threading.Thread, cancel: Callable[[], None]) -> None:
    """Wait for its end. asyncio's answer to Ctrl-C is to cancel the main task, which blocks here: see it."""
    caller = asyncio.current_task()
    cancelled = caller.cancelling() if caller else 0
    while thread.is_alive():
        thread.join(LOOK)
        if caller and caller.cancelling() > cancelled:
            cancelled = caller.cancelling()
            cancel()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM end the run as Ctrl-C does: cancelled, written as interrupted, and raised as
    KeyboardInterrupt.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    asked: list[int] = []

    def stop() -> None:
        asked.append(1)
        if task is not None:
            task.cancel()

    try:
        loop.add_signal_handler(signal.SIGTERM, stop)
    except (NotImplementedError, RuntimeError):
        yield
        return
    try:
        yield
    except asyncio.CancelledError:
        if asked:
            raise KeyboardInterrupt from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
