"""Undoes what a run has done: `compensate=` of its completed paths, the last first, one after the other.

What is undone is an event like everything else: `undo.started` is durable before a function begins,
`node.compensated` after it. So a rollback that was cut off goes on with what is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextvars import Context as Variables
from typing import Any, Final, NamedTuple

import anyio

from dagresume import codec
from dagresume import events as ev
from dagresume.context import Context, idempotency_key
from dagresume.errors import (
    CheckpointLost,
    DagresumeError,
    Irreversible,
    LeaseLost,
    NodeTimeout,
    NotLoadable,
    OwnershipError,
    StoreError,
)
from dagresume.events import Record, RunStatus, Snapshot
from dagresume.executor import Call
from dagresume.jobs import Job, Services
from dagresume.masks import NO_SECRETS, Mask
from dagresume.observe import log, tell
from dagresume.planner import Body, Vertex
from dagresume.policy import NodeFailure, asked_to_wait
from dagresume.results import Stored
from dagresume.reverse import plan_undo
from dagresume.store import (
    Claim,
    Committed,
    Definition,
    Loaded,
    LogLine,
    NewRun,
    Outcome,
    Owned,
    Refused,
    SqlFailed,
    StoreFailed,
    Unit,
)
from dagresume.workflow import is_async

__all__ = ["ASKED", "Rollback", "UndoContext", "begun", "is_undone", "opening"]

ASKED: Final = "asked"
"""Reason of a rollback that a person began; else it is why the run failed."""
_NAMED: Final = 100  # paths that a record or the log names at most


# -- how it begins --------------------------------------------------------------------------------------


def begun(records: Sequence[Record]) -> Record | None:
    """Give the record with which the rollback under way was begun: its reason, and `to`."""
    begins = (r for r in reversed(records) if r.kind == ev.RUN_ROLLING_BACK and r.reason not in ev.UNDO_RESTS)
    return next(begins, None)


def opening(
    body: Body, loaded: Loaded, to: str | None, accept: bool, now: int, counts: Mapping[str, int]
) -> Record:
    """Give the record with which a rollback begins or goes on; Irreversible if a person must agree first.

    `counts`: how often somebody went on with it, for the run's row.
    """
    before = begun(loaded.records) if loaded.row.status == RunStatus.ROLLING_BACK else None
    if before is not None and to in {None, before.facts.get("to")}:
        facts = {name: fact for name, fact in before.facts.items() if name == "to"}
        return ev.run_record(ev.RUN_ROLLING_BACK, now, before.reason, **facts, **counts)
    plan = plan_undo(body, Snapshot(loaded.records), to)
    if (plan.irreversible or plan.uncertain) and not accept:
        raise Irreversible(loaded.row.run_id, plan.irreversible, plan.uncertain)
    return ev.run_record(ev.RUN_ROLLING_BACK, now, ASKED, **({} if to is None else {"to": to}))


def is_undone(loaded: Loaded, to: object) -> bool:
    """Say whether a run was rolled back, and that as far as is asked now."""
    before = begun(loaded.records)
    kept = None if before is None else before.facts.get("to")
    return loaded.row.status == RunStatus.ROLLED_BACK and kept in {None, to}


class UndoContext(Context):
    """What an undo knows about itself: as that of the body, with a key and attempts of its own."""

    __slots__ = ()

    @property
    def idempotency_key(self) -> str:
        """A uuid for the outside world to recognise a repetition of the undo by; not that of the body."""
        return idempotency_key(self.run_id, f"undo\n{self.path}", self._generation)


class _Undo(NamedTuple):
    """One path that is to be undone."""

    path: str
    vertex: Vertex
    output: Stored
    done: Record


# -- doing it -------------------------------------------------------------------------------------------


class Rollback:
    """The rollback of one run, driven by this process.

    It begins with `open`, which claims the run, or `follow`, if the run is ours already. `ended` is done when
    its end is durable, or cannot be made so (`error`); `status`, `failures` and `loaded` tell what became of
    the run.
    """

    def __init__(
        self,
        services: Services,
        body: Body,
        run_id: str,
        workflow: str,
        owned: Owned,
        context: Variables,
        mask: Mask = NO_SECRETS,
    ) -> None:
        self.services, self.body, self.run_id, self.workflow = services, body, run_id, workflow
        self.owned, self.claimed_at, self.mask = owned, 0, mask
        self.loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self.loop.create_future()
        self.status = RunStatus.ROLLING_BACK
        self.reason: str | None = None
        self.error: BaseException | None = None
        self.failures: dict[str, NodeFailure] = {}
        self.log_lines: deque[LogLine] = deque()
        self.progress: dict[str, tuple[float, float | None]] = {}
        self.commits, self.began = 0, services.clock.monotonic()
        self.loaded: Loaded | None = None
        self.context = context
        self.carrier: Mapping[str, str] = {}  # what an observer had kept with the run
        self._written: list[Record] = []
        self._stopped: asyncio.Future[str] = self.loop.create_future()
        self._left: asyncio.Future[None] = self.loop.create_future()
        self._timers: list[asyncio.TimerHandle] = []
        self._unfinished = False
        self._task: asyncio.Task[None] | None = None
        self._doing: asyncio.Task[None] | None = None

    def now(self) -> int:
        """Give the wall clock in microseconds UTC."""
        return self.services.clock.now()

    def open(
        self, guard: NewRun | Claim, records: list[Record], definition: Definition | None
    ) -> asyncio.Future[Outcome]:
        """Claim the run and undo; gives what became of the claim."""
        outcome: asyncio.Future[Outcome] = self.loop.create_future()
        self._task = self.loop.create_task(self._open(Unit(guard, records, definition), outcome))
        return outcome

    def follow(self) -> None:
        """Undo what a run of this process has done, which has just written that it rolls back."""
        self._task = self.loop.create_task(self._drive())

    async def _open(self, unit: Unit, told: asyncio.Future[Outcome]) -> None:
        try:
            outcome = await self.services.journal.commit(unit)
        except asyncio.CancelledError:  # the loop is taken down
            told.cancel()
            self._finish()
            raise
        if isinstance(outcome, Committed):
            self.owned = Owned(outcome.run, self.owned.session, outcome.epoch)
            self.claimed_at = outcome.seq
        told.set_result(outcome)
        if isinstance(outcome, Committed):
            await self._drive()
        else:
            self._finish()

    async def _drive(self) -> None:
        try:
            loaded = await self.services.load(self.run_id)
            assert loaded is not None  # it is ours
            self.loaded = loaded
            await self._undo_all(Snapshot(loaded.records), begun(loaded.records))
        except BaseException as error:  # said to whoever waits for the run
            self.error = error
            if not isinstance(error, Exception):
                raise
            await self._let_go()
        finally:
            self._finish()

    async def _let_go(self) -> None:
        """It cannot go on here: let others try, if the run can be written to again."""
        if not isinstance(self.error, OwnershipError):
            with contextlib.suppress(Exception):
                await self._write([ev.run_record(ev.RUN_ROLLING_BACK, self.now(), "not_stored")])

    async def _undo_all(self, snapshot: Snapshot, begun: Record | None) -> None:
        plan = plan_undo(self.body, snapshot, None if begun is None else begun.facts.get("to"))
        left = (*plan.irreversible, *plan.uncertain)
        if left:
            log.warning("not undone, left as it is", run=self.run_id, paths=list(left[:_NAMED]))
        ended: list[Record] = []  # of the path before: rides with the start of the next
        for path in plan.paths:
            if self._stopped.done():
                self._unfinished = True
                break
            vertex = self.body.at(path)
            assert vertex is not None  # it was planned
            undo = _Undo(path, vertex, plan.outputs[path], snapshot.paths[path])
            before = snapshot.undone.get(path)
            job = self._job(undo, 1 if before is None else (before.attempt or 0) + 1, snapshot)
            await self._write([*ended, self._note(ev.UNDO_STARTED, job)])
            ended = await self._undo(undo, job)
            if ended and ended[0].kind == ev.COMPENSATED:
                ended += self._emptied(path, snapshot, plan.outputs)
                for record in ended:
                    snapshot.apply(record)
        await self._write([*ended, self._verdict(begun, left)])

    def _emptied(self, path: str, snapshot: Snapshot, planned: Mapping[str, Stored]) -> Iterable[Record]:
        """What is around a path does not stand as it completed any more, once something in it is undone."""
        for around in ev.enclosing(path):
            record = snapshot.paths.get(around)
            if record is not None and record.kind == ev.COMPLETED and around not in planned:
                yield _compensated(record, self.now(), "inner_undone")

    def _verdict(self, begun: Record | None, left: Sequence[str]) -> Record:
        if self._unfinished:
            self.reason = self._stopped.result()
        elif self.failures:
            self.reason = ev.UNDO_FAILED_REASON
        else:
            self.status, self.reason = RunStatus.ROLLED_BACK, ASKED if begun is None else begun.reason
            facts = {"left": left[:_NAMED]} if left else {}
            return ev.run_record(ev.RUN_ROLLED_BACK, self.now(), self.reason, **facts)
        return ev.run_record(ev.RUN_ROLLING_BACK, self.now(), self.reason)

    # -- one path -------------------------------------------------------------------------------------

    def _job(self, undo: _Undo, attempt: int, snapshot: Snapshot) -> Job:
        index = ev.segments(undo.path)[-1][1]
        job = Job(self, None, undo.vertex, undo.path, b"", None, None, index, attempt=attempt)
        job.generation = snapshot.generations.get(undo.path, 0)
        return job

    def _note(self, kind: str, job: Job, reason: str | None = None, **facts: Any) -> Record:
        return ev.node_record(kind, job.path, job.attempt, self.now(), reason, **facts)

    async def _undo(self, undo: _Undo, job: Job) -> list[Record]:
        """Undo one path, as often as its node's retry policy says; gives what is to be written of it."""
        for tries in itertools.count(1):
            error = await self._tried(undo, job)
            if error is None:
                return [
                    _compensated(undo.done, self.now(), None, **({"usage": job.used} if job.used else {}))
                ]
            if self._stopped.done() and isinstance(error, asyncio.CancelledError):
                self._unfinished = True  # it stands as begun, and is done again
                return []
            failure = tell(undo.path, job.attempt, error, ev.UNDO_FAILED_REASON, self.mask)
            wait = self._wait(undo.vertex, job, tries, error)
            if wait is None:
                self.failures[undo.path] = failure
                log.warning("undo failed", run=self.run_id, path=undo.path, error=failure.message)
                return [self._note(ev.UNDO_FAILED, job, failure.reason, **failure.facts)]
            await self._write([self._note(ev.UNDO_FAILED, job, ev.RETRY, **failure.facts)])
            if not await self._waited(wait):
                self._unfinished = True
                return []
            job.attempt += 1
            await self._write([self._note(ev.UNDO_STARTED, job)])
        raise AssertionError  # it counts for ever

    def _wait(self, vertex: Vertex, job: Job, tries: int, error: BaseException) -> float | None:
        """Give the seconds until the next attempt, None if there is none."""
        runs_on = job.call is not None and job.call.abandoned  # in its thread: two at once are one too many
        if tries >= vertex.retry.attempts or runs_on or isinstance(error, StoreError):
            return None
        if not isinstance(error, Exception) or not vertex.retry.allows(error):
            return None
        return max(vertex.retry.wait(tries), asked_to_wait(error))

    async def _waited(self, seconds: float) -> bool:
        """Wait for the next attempt; False if the rollback is stopped first."""
        due = self.loop.create_future()
        timer = self.services.clock.call_later(seconds, _wake, due)
        await asyncio.wait([due, self._stopped], return_when=asyncio.FIRST_COMPLETED)
        timer.cancel()
        return not self._stopped.done()

    async def _tried(self, undo: _Undo, job: Job) -> BaseException | None:
        """Call the function; gives what it raised."""
        context = self.context.copy()
        if self.services.watch is not None:
            self.services.watch.begins(context, job)
        self._doing = self.loop.create_task(self._call(undo, job), context=context)
        await asyncio.wait([self._doing, self._left], return_when=asyncio.FIRST_COMPLETED)
        if not self._doing.done():
            log.warning(
                "an undo ignores its cancellation and is left behind", run=self.run_id, path=undo.path
            )
            return asyncio.CancelledError()
        if self._doing.cancelled():
            return asyncio.CancelledError(
                "cancelled from inside: the function raised CancelledError by itself"
            )
        return self._doing.exception()

    async def _call(self, undo: _Undo, job: Job) -> None:
        path, vertex = undo.path, undo.vertex
        (text,) = await self.services.fetch(self.run_id, [undo.output])
        try:
            output = codec.unpack(text, vertex.types)
        except NotLoadable as error:
            raise CheckpointLost(self.run_id, path, f"cannot be loaded: {error.reason}") from error
        context = UndoContext(
            run_id=self.run_id, workflow=self.workflow, node=vertex.id, path=path, index=job.index,
            attempt=job.attempt, channel=job, generation=job.generation,
        )  # fmt: skip
        fn, limit = vertex.node.compensate, vertex.node.timeout
        assert fn is not None
        job.call = Call(fn, (output, context), {}, None, context, path)
        executor = self.services.executor("loop" if is_async(fn) else "thread")
        with anyio.CancelScope() as scope:
            if limit is not None:
                scope.deadline = anyio.current_time() + limit
            given = await executor.run(job.call)
            if inspect.isawaitable(given):  # a plain function around an async one
                await given
        if limit is not None and scope.cancelled_caught:
            raise NodeTimeout(path, limit, " while it was undone")

    # -- writing and ending ---------------------------------------------------------------------------

    async def _write(self, records: list[Record]) -> None:
        unit = Unit(self.owned, records, logs=list(self.log_lines))
        self.log_lines.clear()
        outcome = await self.services.journal.commit(unit)
        if isinstance(outcome, Committed):
            self.commits += 1
            self._written += records
        elif isinstance(outcome, Refused):
            raise LeaseLost(self.run_id, str(outcome.holder or "another session"))
        elif isinstance(outcome, StoreFailed | SqlFailed):
            raise outcome.error
        else:
            raise DagresumeError(f"not written: {outcome}")

    def stop(self, kind: str, reason: str | None, by: str = "", grace: float | None = 0.0) -> None:
        """Begin no further undo; the one under way has the engine's grace to end, then it is cancelled.

        Only what interrupts a run does that: a rollback is not cancelled by a person.
        """
        if kind != ev.RUN_INTERRUPTED or self._stopped.done() or self.ended.done():
            return
        self._stopped.set_result("shutdown" if reason == "shutdown" else "cancelled")
        seconds = self.services.grace
        self._timers = [
            self.loop.call_later(seconds, self._cancel),
            self.loop.call_later(seconds + 1.0, _wake, self._left),
        ]

    def _cancel(self) -> None:
        if self._doing is not None:
            self._doing.cancel()

    def letter(self, record: Record) -> None:
        """Nothing that anybody writes to the run changes what is undone."""

    @property
    def within(self) -> bool:
        """Whether the current task is an undo of this run."""
        return self._doing is not None and self._doing is asyncio.current_task()

    def _finish(self) -> None:
        for timer in self._timers:
            timer.cancel()
        if self.loaded is not None:
            row, records = self.loaded.row, [*self.loaded.records, *self._written]
            for record in self._written:
                row = row._replace(**(ev.projection(record) or {} if record.path is None else {}))
            self.loaded = self.loaded._replace(row=row, records=records, holder=None)
        if not self.ended.done():
            self.ended.set_result(None)


def _compensated(done: Record, at: int, reason: str | None, **facts: Any) -> Record:
    """Give the record that a path is undone; it carries the attempt that had completed."""
    record = ev.node_record(ev.COMPENSATED, done.path or "", done.attempt, at, reason, **facts)
    return record._replace(input=done.input)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
