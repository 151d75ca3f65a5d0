"""Runs from code that is not async."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from dagresume.engine import Engine
from dagresume.results import RunResult
from dagresume.workflow import Workflow

__all__ = ["run_sync"]

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
    a loop of its own. In the main thread SIGINT and SIGTERM interrupt the run, so that it can be resumed.
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
    box: list[RunResult] = []
    errors: list[BaseException] = []

    def in_thread() -> None:
        try:
            box.append(asyncio.run(work()))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=in_thread, name="dagresume run_sync")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return box[0]


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
