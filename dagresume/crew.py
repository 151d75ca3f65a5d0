"""Worker processes for functions that compute; multiprocessing is loaded with it, by who has a use for it."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from typing import Any

from dagresume.errors import EngineClosed
from dagresume.executor import Call, Threads, perform
from dagresume.processes import Worker, dumps, opened

__all__ = ["ProcessExecutor"]


class ProcessExecutor:
    """Runs plain functions of modules in worker processes; `limit` at once, by default one per processor.

    Workers start when first needed and stay. Functions and classes travel by name, arguments as copies,
    results as packed text, context variables not at all. Calls beyond `limit` wait. Cancelling `run` kills
    the process of the body. A process that dies fails its call alone, with WorkerDied.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit or _processors()
        self._threads = Threads(self._limit)  # each talks to one worker
        self._changed = threading.Condition()
        self._idle: list[Worker] = []
        self._errands: set[_Errand] = set()
        self._count = 0  # of workers, also of those that start or end
        self._closed = False
        self._pid = 0

    async def run(self, call: Call) -> Any:
        errand = _Errand(call)
        job = self._threads.submit(self._carry, errand)
        try:
            await job.future
        except asyncio.CancelledError:
            if self._threads.leave(job):
                with self._changed:
                    errand.cancel()
                raise
        return job.result()

    async def close(self) -> None:
        idle = self._stop()
        atexit.unregister(self._abort)
        if self._count:
            await self._threads.submit(self._await_end, idle).future
        self._threads.close()

    # the rest runs in the threads

    def _carry(self, errand: _Errand) -> Any:
        call = errand.call
        channel = None if call.context is None else call.context._channel
        begun, call.begun = call.begun, None  # of this process only
        request = dumps(channel, perform, call)
        worker = self._hire()
        fit = False
        try:
            if not self._assign(errand, worker):
                fit = True
                return None
            message = worker.ask(call.path, request, channel, begun)
            fit = True
        finally:
            self._give_back(errand, worker, fit)
        return opened(message)

    def _assign(self, errand: _Errand, worker: Worker) -> bool:
        with self._changed:
            if self._closed:
                raise EngineClosed
            if not errand.cancelled:
                errand.worker = worker
                self._errands.add(errand)
            return not errand.cancelled

    def _give_back(self, errand: _Errand, worker: Worker, fit: bool) -> None:
        with self._changed:
            killed = errand.cancelled and errand.worker is not None
            errand.worker = None
            self._errands.discard(errand)
            # one that was started for a call cancelled meanwhile may be one too many
            if fit and not killed and not self._closed and self._count <= self._limit:
                self._idle.append(worker)
                return
        self._end(worker)

    def _hire(self) -> Worker:
        while worker := self._rested():
            if worker.is_alive():
                return worker
            self._end(worker)
        try:
            return Worker()
        except BaseException:
            self._discount()
            raise

    def _rested(self) -> Worker | None:
        with self._changed:
            if self._closed:
                raise EngineClosed
            if self._idle:
                return self._idle.pop()
            if not self._pid:
                self._pid = os.getpid()
                atexit.register(self._abort)  # runs before multiprocessing's own, which waits for every child
            self._count += 1
            return None

    def _end(self, worker: Worker) -> None:
        try:
            worker.end()
        finally:
            self._discount()

    def _discount(self) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def _stop(self) -> list[Worker]:
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            for errand in self._errands:
                errand.cancel()
            return idle

    def _abort(self) -> None:
        if os.getpid() == self._pid:  # not in a child forked by somebody
            for worker in self._stop():
                worker.kill()

    def _await_end(self, idle: list[Worker]) -> None:
        for worker in idle:
            worker.hang_up()
        for worker in idle:
            self._end(worker)
        with self._changed:
            self._changed.wait_for(lambda: not self._count, timeout=5.0)


class _Errand:
    """A call on its way through a worker; the executor's lock guards it."""

    __slots__ = ("call", "cancelled", "worker")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.worker: Worker | None = None
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        if self.worker is not None:
            self.worker.kill()


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
