"""Drives one run: what is ready starts, what returned is committed, what that unlocks starts.

Nothing is awaited between the return of a body and the hand-over of its checkpoint to the journal. Bodies
begin only when the unit that unlocked them is durable. Node tasks are plain asyncio tasks (a tenth of the
cost of a task group's); the run owns them, none outlives it.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import math
from array import array
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

import anyio

from dagresume import codec
from dagresume import events as ev
from dagresume.arguments import ask, check_shared, context, plain
from dagresume.arguments import call as arguments
from dagresume.backoffs import Backoffs
from dagresume.clock import Timer
from dagresume.errors import (
    DagresumeError,
    LeaseLost,
    NodeTimeout,
    OnceUncertain,
    OutputNotSerializable,
    StoreError,
    TooManyAbandoned,
    WorkerDied,
)
from dagresume.events import Record, RunStatus, Snapshot, new_record
from dagresume.executor import Call, Executor, LoopExecutor
from dagresume.feeds import Feed
from dagresume.jobs import CURRENT, OPEN, Input, Job, Opening, Raw, Sealed, Services, Step
from dagresume.latency import summary
from dagresume.masks import NO_SECRETS, Mask
from dagresume.notes import Notes
from dagresume.observe import log, tell
from dagresume.planner import NOT_STORABLE, RECONCILE, Body, Vertex, decide
from dagresume.policy import NOT_DONE, Budget, NodeFailure, Settled, asked_to_wait
from dagresume.pool import Gate, Pool
from dagresume.results import Executed, Stored
from dagresume.scopes import Scope
from dagresume.steady import to_its_end
from dagresume.store import (
    Claim,
    Committed,
    Definition,
    LogLine,
    NewRun,
    Outcome,
    Owned,
    Refused,
    SqlFailed,
    StoreFailed,
)
from dagresume.undo import Rollback
from dagresume.waits import Waits

__all__ = ["Run", "start_ready"]

_STATUS: Final = {
    ev.RUN_COMPLETED: RunStatus.COMPLETED,
    ev.RUN_FAILED: RunStatus.FAILED,
    ev.RUN_INTERRUPTED: RunStatus.INTERRUPTED,
    ev.RUN_CANCELLED: RunStatus.CANCELLED,
    ev.RUN_WAITING: RunStatus.WAITING,
    ev.RUN_ROLLING_BACK: RunStatus.ROLLING_BACK,
}
Patience = Literal["timers", "all", "none"]


class Run:
    """One run, driven by this process.

    `open` decides all that can be decided and hands over the unit that makes or claims the run. `ended` is
    done when the end of the run is durable, or cannot be made so (`error`).
    """

    def __init__(
        self,
        services: Services,
        body: Body,
        *,
        run_id: str,
        workflow: str,
        session: int,
        snapshot: Snapshot,
        inputs: Mapping[str, tuple[str, bytes]],
        mask: Mask = NO_SECRETS,
        timeout: float | None = None,
        budget: Budget | None = None,
        on_failure: str | None = None,
        patience: Patience = "timers",
        automatic: bool = False,
    ) -> None:
        self.services, self.body, self.rules = services, body, body.rules
        self.run_id, self.workflow, self.snapshot, self.mask = run_id, workflow, snapshot, mask
        self.owned, self.claimed_at, self.poisoned = Owned(0, session, 0), 0, False
        self.loop, self.context = asyncio.get_running_loop(), contextvars.copy_context()
        self.now = services.clock.now  # the wall clock in microseconds UTC
        self._monotonic = services.clock.monotonic
        self._spill_bytes = math.inf if services.spill_bytes is None else max(services.spill_bytes, 4)
        self.ended: asyncio.Future[None] = self.loop.create_future()
        self._is_open: asyncio.Future[bool] = self.loop.create_future()
        self.status = RunStatus.RUNNING
        self.reason: str | None = None
        self.error: BaseException | None = None
        self.undoing: Rollback | None = None  # once it has failed, with on_failure="rollback"
        self.stopping: tuple[str, str | None, str] | None = None  # kind of the run's end, reason, by whom
        self.live: set[Job] = set()
        self.waiting = 0  # its sources in the pool's queue or parked at a limit; counted by the pool
        self.executed = Executed()
        self.failures: dict[str, NodeFailure] = {}
        self.inner: dict[str, Any] = {}  # what paths below the root's own gave, or where it lies
        self.uncertain: list[str] = []
        self.lost: list[Exception] = []  # what could not be read back
        self.log_lines: deque[LogLine] = deque()
        self.progress: dict[str, tuple[float, float | None]] = {}
        self.waits: array[float] = array("d")
        self.commits, self.began = 0, services.clock.monotonic()
        self._last_batch, self._inflight, self._draining = -1, 0, False
        self.wide: list[Feed] = []  # maps whose items are graphs
        self.automatic, self._verbose, self._watch = automatic, log.verbose, services.watch
        self._timeout = timeout
        self._deadline: Timer | None = None
        self._last_call: asyncio.TimerHandle | None = None  # leaves bodies behind
        self._background: set[asyncio.Task[None]] = set()
        self._on_loop = isinstance(services.executor("loop"), LoopExecutor)  # and nobody's own in its place
        self._new_task = _maker_of_tasks(self.loop)
        self.todo: deque[tuple[Any, ...]] = deque()
        self._budget, self._on_failure, self._patience = budget, on_failure, patience
        self.used = dict(snapshot.used)
        self.desk, self.backoffs = Waits(self), Backoffs(self)
        self.notes = Notes(self)
        self._gates: dict[Vertex, Gate | None] = {}
        for vertex in body.limited:
            self._gates[vertex] = services.pool.gate(vertex.node.limit, vertex.id)
        for executor in body.executors:
            services.executor(executor)  # one that is not installed is said now
        self.carrier: Mapping[str, str] = snapshot.carrier
        self.root = Scope(
            self, body, {n: Input(*i, body.input_types.get(n, codec.EMPTY)) for n, i in inputs.items()}
        )

    def gate_of(self, vertex: Vertex) -> Gate | None:
        """Give the limit a vertex names, if it names one."""
        return self._gates.get(vertex) if self._gates else None

    def later(self, *what: Any) -> None:
        """Note what `advance` is to do: a method and its arguments, without the step."""
        self.todo.append(what)

    def advance(self, step: Step) -> None:
        """Decide what is ready, and what that makes ready: one after the other, however deep the graph."""
        todo = self.todo
        while todo:
            act, *what = todo.popleft()
            act(*what, step)

    # -- handing over ---------------------------------------------------------------------------------

    def open(
        self, guard: NewRun | Claim, records: list[Record], definition: Definition | None
    ) -> asyncio.Future[Outcome]:
        """Decide all that can be decided, hand over the unit that makes or claims the run; gives what becomes
        of it.
        """
        step = Opening(self, guard, records)
        step.definition = definition
        self.advance(step)
        self._ride(step)
        self._conclude(step)
        self._inflight += 1
        self.services.journal.append(step)
        return step.outcome

    def hand_over(self, step: Step, *, quietly: bool = False) -> None:
        """Give a unit to the journal, after adding the starts that can ride in it, and the end of the run if
        this is it.

        `quietly`: it may wait for another one to ride with, unless something waits for it after all.
        """
        if self.todo:
            self.advance(step)
        if self.stopping is None:
            pool = self.services.pool
            if pool.awaited and pool.free > 0:
                start_ready(pool, step)
            if step.opens or step.arrivals:
                self._ride(step)
            if not self.root.open:
                self._conclude(step)
        if self.log_lines:
            step.logs = list(self.log_lines)
            self.log_lines.clear()
        if not (step.records or step.opens or step.arrivals or step.logs):
            return  # what it was for is durable already, and it has unlocked nothing
        step.guard = self.owned
        self._inflight += 1
        self.services.journal.append(step, quietly=quietly and not step.begins and step.ends is None)

    def _ride(self, step: Step) -> None:
        """Reserve slots for what this unit unlocks and needs a start record: it rides in the same commit."""
        if not self.services.pool.idle:
            return
        if step.opens:
            step.opens = [source for source in step.opens if not self._rides(source, step)]
        if step.arrivals:
            step.arrivals = [(feed, k) for feed, k in step.arrivals if not self._arrival_rides(feed, k, step)]

    def _rides(self, source: Any, step: Step) -> bool:
        """Start what can be started of a source; True if nothing is left of it."""
        if isinstance(source, Job):
            return source.awaits_record and self._reserve(source, step)
        while not source.vertex.idempotent and source.more and self._reserve(source, step):
            pass
        return False

    def _arrival_rides(self, feed: Feed, k: int, step: Step) -> bool:
        if feed.vertex.idempotent or feed.live >= feed.cap or feed.todo is None:
            return False
        feed.todo.appendleft(k)
        if self._reserve(feed, step):
            return True
        feed.todo.popleft()
        return False

    def _reserve(self, source: Job | Feed, step: Step) -> bool:
        job: Job | None = self.services.pool.reserve(source)
        if job is None:
            return False
        step.begins.append(job)
        if job.awaits_record:
            step.records.append(job.start_record())
        return True

    # -- a unit is durable ----------------------------------------------------------------------------

    def opened(self, step: Opening, outcome: Outcome) -> None:
        """Learn whether the run is ours."""
        if isinstance(outcome, Committed):
            self.owned = Owned(outcome.run, self.owned.session, outcome.epoch)
            self.claimed_at = outcome.seq
            self._is_open.set_result(True)
            self.desk.start()
            self.backoffs.start()
            if self._timeout is not None:
                self._deadline = self.services.clock.call_later(
                    self._timeout, self.stop, ev.RUN_FAILED, "timeout"
                )
            if self._over_budget() and self.root.open:
                self.stop(ev.RUN_INTERRUPTED, "budget", grace=None)
        else:
            self._is_open.set_result(False)
            self.stopping = (ev.RUN_INTERRUPTED, "not_opened", "")
            for job in step.begins:
                self._release(job)
            self._finish(RunStatus.INTERRUPTED)

    def delivered(self, step: Step, outcome: Outcome) -> None:
        """Learn what became of a unit: begin what it unlocked."""
        self._inflight -= 1
        if type(outcome) is not Committed:
            for job in step.begins:
                self._release(job)
            if not isinstance(outcome, SqlFailed):  # that is the failure of one attempt
                self.not_written(outcome, step.records)
            return
        journal = self.services.journal
        if journal.batches != self._last_batch:
            self.count_commit()
        if step.timed:
            self.waits.append(journal.durable_at - step.appended)
        if step.begins or step.opens or step.arrivals:
            self._begin(step)
        if step.ends is not None:
            self._finish(step.ends)
        elif not self.live and not self._inflight:
            self._check()

    def count_commit(self) -> None:
        """Count the transaction that has just ended, once."""
        batch = self.services.journal.batches
        if batch != self._last_batch:
            self._last_batch = batch
            self.commits += 1

    def _begin(self, step: Step) -> None:
        if self.stopping is not None:
            if step.begins:
                self._withdraw(step)
            return
        pool = self.services.pool
        paused = self._gates and [job for job in step.begins if job.gate is not None and job.gate.paused]
        for job in step.begins:
            if not paused or job not in paused:
                self.start(job)
        if paused:
            self._put_back(paused)
        for source in step.opens:
            pool.offer(source)
        for feed, k in step.arrivals:
            feed.todo.append(k)
            pool.offer(feed)

    def _put_back(self, jobs: Sequence[Job]) -> None:
        """While their start records were written, the other side has asked for a pause: they wait again."""
        step = Step(self, [self.record(ev.WITHDRAWN, job, "paused") for job in jobs])
        for job in jobs:
            self._release(job, keeps_place=True)
            step.opens.append(job.next(job.attempt))
        self.hand_over(step)

    def _withdraw(self, step: Step) -> None:
        """The run is being stopped: what was about to begin does not."""
        for job in step.begins:
            self._release(job)
        self.hand_over(Step(self, [self.record(ev.WITHDRAWN, job, "stopped") for job in step.begins]))

    def not_written(self, outcome: Outcome, records: Sequence[Record]) -> None:
        """Something of the run could not be written: the first reason is kept, and nothing further starts."""
        if self.error is None and isinstance(outcome, Refused):
            self.error = LeaseLost(self.run_id, str(outcome.holder or "another session"))
        elif self.error is None:
            if isinstance(outcome, StoreFailed | SqlFailed):
                self.error = outcome.error
            else:
                self.error = DagresumeError(f"not written: {outcome}")
            for record in records:
                if record.kind == ev.COMPLETED and record.path is not None:
                    self.failures[record.path] = tell(
                        record.path, record.attempt or 1, self.error, "not_stored", self.mask
                    )
        self.abort()

    # -- bodies ---------------------------------------------------------------------------------------

    def start(self, job: Job) -> None:
        """Begin a job whose slot is reserved and whose start record, if it needs one, is durable."""
        self.live.add(job)
        context = self.context.copy()
        if self._watch is not None and not job.asking:
            self._watch.begins(context, job)
        job.task = self._new_task(self._drive(job), context=context)

    async def _drive(self, job: Job) -> None:
        if job.task is None:  # an eager task, still within `start`, which a body that returns enters again
            await asyncio.sleep(0)
        job.entered = True
        CURRENT.set(job)
        try:
            await self._attempt(job)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # the engine itself is wrong: say so rather than hang
            if self.ended.done():
                return
            self._release(job)
            self.error = self.error or error
            self.abort()
        finally:
            job.task = None  # its context knows the job: a circle that only the collector would find
            self.live.discard(job)
            if not self.live and not self._inflight:
                self._check()

    async def _attempt(self, job: Job) -> None:
        try:
            if job.attempt > 1 or self.notes.resumed or job.scope.lacks(job.vertex, job.cells):
                await self._prepare(job)
            if job.asking:
                self._answered(job, job.answered or ask(self, job))
                return
            result = await self._execution_of(job)
            if self.services.debug and isinstance(job.feed, Feed):
                check_shared(self, job)
        except BaseException as error:
            if job not in self.live:
                raise  # it was left behind: whatever it still does is nobody's business
            if isinstance(job.feed, Feed) and self.services.debug:
                job.feed.shared.clear()  # it may have changed it before it failed
            self._threw(job, error)
            if _is_ctrl_c(job, error):
                raise
            return
        if job not in self.live:
            return
        if result is NOT_DONE and job.reconcile:
            self._start_over(job)
            return
        took = job.took()
        big = not job.vertex.pure and len(result) > self._spill_bytes
        self._returned(job, result, took, await self._shelve(job, result) if big else None)

    async def _prepare(self, job: Job) -> None:
        """Get what the job needs and what lies in the store."""
        if job.scope.lacks(job.vertex, job.cells):
            await job.scope.load(job.vertex, job.cells)
        if (job.attempt > 1 or self.notes.resumed) and not job.asking and self.notes.prepares(job):
            await self.notes.prepare(job)

    def _answered(self, job: Job, runs: bool) -> None:
        """Go on with a path whose condition was asked."""
        step = Step(self, [])
        self._release(job, keeps_place=runs)
        if runs:
            job.scope.say_yes(job, step)
        else:
            job.scope.say_no(job, step)
        self.go_on(step)

    def go_on(self, step: Step) -> None:
        """Hand over a step that may hold nothing: then what it makes ready need not wait for a commit."""
        self.advance(step)
        if self.stopping is None:
            self._ride(step)
        if step.records or step.begins or not self.root.open or self.stopping is not None:
            self.hand_over(step)
        else:
            self._begin(step)
            start_ready(self.services.pool)

    async def _shelve(self, job: Job, text: str) -> dict[str, Any]:
        """Put a big output into a blob."""
        try:
            return {"blob": await self._spill(text)}
        except Exception as error:  # the work is done and cannot be kept: as with a failed commit
            self.failures[job.path] = tell(job.path, job.attempt, error, "not_stored", self.mask)
            raise

    async def _spill(self, text: str) -> str:
        """Put a big output into a blob. The run's cancellation waits for it: the work is done and paid.

        A loop that is taken down cancels the writing too, once: then it is written again.
        """
        while True:
            work = asyncio.ensure_future(self.services.spill(self.run_id, text))
            try:
                return await to_its_end(work)
            except asyncio.CancelledError:
                if not work.cancelled():
                    return work.result()

    def _execution_of(self, job: Job) -> Coroutine[Any, Any, Any]:
        if job.vertex.direct and self._on_loop and not job.reconcile:
            return self._directly(job)
        return self._by_call(job)

    async def _directly(self, job: Job) -> Any:
        """Await an async function right here: most nodes are no more than that."""
        vertex = job.vertex
        given = None if vertex.keywords else plain(job.scope, vertex)
        call = arguments(self, job) if given is None else None
        job.began = self._monotonic()
        self._note_start(job)
        if call is None:
            result = await vertex.node.fn(*given)  # type: ignore[misc]  # it has a function
        else:
            result = await call.fn(*call.args, **call.kwargs)
        return result if vertex.pure else codec.pack(result, vertex.types)

    async def _by_call(self, job: Job) -> Any:
        call = arguments(self, job)
        job.began = self._monotonic()
        return await (self._reconcile(job, call) if job.reconcile else self._execute(job, call))

    def _note_start(self, job: Job) -> None:
        if not job.repeats:
            feed = job.feed
            if type(feed) is Feed:
                self.executed.append_item(feed.path, job.index or 0)
            else:
                self.executed.append(job.path)
        if not (job.awaits_record or job.vertex.pure):
            self.services.journal.later(job)

    async def _execute(self, job: Job, call: Call) -> Any:
        vertex = job.vertex
        self._note_start(job)
        if self._watch is not None and _executor_of(vertex) not in {"loop", "thread"}:
            call.around = self._watch.around()
        executor, timeout = self.services.executor(_executor_of(vertex)), vertex.node.timeout
        return await (executor.run(call) if timeout is None else self._timed(job, call, executor, timeout))

    async def _timed(self, job: Job, call: Call, executor: Executor, limit: float) -> Any:
        """Run with a time limit, which counts from the moment the body begins."""
        with anyio.CancelScope() as scope:
            if _executor_of(job.vertex) in {"loop", "thread"}:
                scope.deadline = anyio.current_time() + limit
            else:
                call.begun = partial(self.loop.call_soon_threadsafe, _limit, job, scope, limit)
            result = await executor.run(call)
        if scope.cancelled_caught:
            raise NodeTimeout(job.path, limit)
        if scope.deadline < anyio.current_time():  # it blocked, and returned: its effect has happened
            call.abandoned = True
            log.warning("result came after the timeout and was dropped", run=self.run_id, path=job.path)
            raise NodeTimeout(job.path, limit, "; it returned later, and its result was dropped")
        return result

    async def _reconcile(self, job: Job, call: Call) -> Any:
        """Ask the node's `reconcile` what became of the attempt that nobody knows about."""
        ask = job.vertex.node.reconcile
        assert ask is not None
        names = [b.parameter for b in job.vertex.bindings if b.parameter not in call.kwargs]
        given = dict(zip(names, call.args, strict=False)) | dict(call.kwargs)
        given = {"ctx": call.context or context(self, job)} | given
        found = await ask(
            **{name: given[name] for name in inspect.signature(ask).parameters if name in given}
        )
        return found if found is NOT_DONE or call.types is None else codec.pack(found, call.types)

    # -- how bodies end -------------------------------------------------------------------------------

    def _returned(self, job: Job, result: Any, took: int, data: dict[str, Any] | None) -> None:
        vertex = job.vertex
        if job.used:
            data = (data or {}) | {"usage": job.used}
        reason = "reconciled" if job.reconcile else "recomputed" if job.again else None
        head = (ev.COMPLETED, job.attempt, self.now(), job.path, reason, job.fingerprint)
        told = None if data is None else json.dumps(data)
        cell: Any
        if vertex.pure:
            cell, digest = Raw(result), job.fingerprint
            step = Step(self, [Record(*head, None, None, took, told)])
        else:
            blob = None if data is None else data.get("blob")
            digest = codec.digest(result) if blob is None else codec.digest_of(blob)
            cell = result if blob is None else Stored(job.path, 0, digest, blob)
            step = Step(
                self, [new_record((*head, digest, len(result), took, told, None if blob else result, None))]
            )
            step.timed = True
        if self._verbose:
            log.debug(
                "node completed", run=self.run_id, path=job.path, attempt=job.attempt, seconds=took / 1e6
            )
        text = None if vertex.pure else result
        if job.sql:
            self._seal(job, step.records, partial(self._settle, job, cell, digest, text))
        else:
            self._settle(job, cell, digest, text, step)

    def _seal(self, job: Job, records: list[Record], settle: Callable[[Step], None]) -> None:
        """Write a completion with the statements of its function; what follows waits until it is durable."""
        self.live.discard(job)  # its body has returned; its slot is given back with the outcome
        self._inflight += 1
        self.services.journal.forget(job)
        self.services.journal.append(Sealed(self, records, job.sql, partial(self._sealed, job, settle)))

    def _sealed(self, job: Job, settle: Callable[[Step], None], outcome: Outcome) -> None:
        if isinstance(outcome, Committed):
            settle(Step(self, []))
        elif isinstance(outcome, SqlFailed):
            self._threw(job, outcome.error)
        else:
            self._release(job)

    def _settle(self, job: Job, cell: Any, digest: bytes, text: str | None, step: Step) -> None:
        """Give a path its value, packed in `text` if it is, and what waits for it its turn."""
        vertex, scope = job.vertex, job.scope
        self._release(job)
        if job.feed is None:
            scope.complete(vertex.index, cell, digest, step)
        else:
            if (scope.prefix or vertex.is_loop) and not vertex.pure:
                self.inner[job.path] = cell
            job.feed.settled(job.index, cell, digest, step, text)
        if job.used:
            self._spend(job.used, step)
        if vertex.pure or not step.records:
            self._unlock_at_once(step)
        self.hand_over(step, quietly=vertex.pure)

    def _count(self, used: Mapping[str, float]) -> None:
        """Count what an attempt used up, whatever became of it."""
        for name, amount in used.items():
            self.used[name] = self.used.get(name, 0) + amount

    def _spend(self, used: Mapping[str, float], step: Step) -> None:
        """Count what an attempt used up; over the budget, nothing further starts."""
        self._count(used)
        if self._over_budget():
            self.advance(step)
            if self.root.open:
                self.stop(ev.RUN_INTERRUPTED, "budget", grace=None)

    def _over_budget(self) -> bool:
        set_by_person, budget = self.snapshot.budget, self._budget
        if set_by_person is not None:
            budget = Budget(tokens=set_by_person.get("tokens"), cost=set_by_person.get("cost"))  # type: ignore[arg-type]
        return budget is not None and budget.is_spent(self.used)

    def _unlock_at_once(self, step: Step) -> None:
        """What waits for a pure node, or for one that is durable already, waits for no further row (C1)."""
        self.advance(step)
        for source in step.opens:
            self.services.pool.offer(source)
        for feed, k in step.arrivals:
            feed.todo.append(k)
            self.services.pool.offer(feed)
        step.opens, step.arrivals = [], []

    def _threw(self, job: Job, error: BaseException) -> None:
        """An attempt ended without a result, or could not begin."""
        cancelled = isinstance(error, asyncio.CancelledError)
        if taken_down := cancelled and self.services.journal.is_taken_down:
            self.stop(ev.RUN_INTERRUPTED, "shutdown")  # unless it is being stopped already
        stopped = (cancelled and job.stopped) or taken_down or _is_ctrl_c(job, error)
        unknown = isinstance(error, NodeTimeout) and job.call is not None and job.call.abandoned
        unknown = unknown or (isinstance(error, WorkerDied) and error.began)
        if stopped or self.error is not None:
            self._cut_off(job)
        elif not job.began and isinstance(error, StoreError):
            self._without_values(job, error)
        elif isinstance(error, OnceUncertain) and not job.reconcile:
            failure = tell(job.path, job.attempt, error, ev.ONCE_UNCERTAIN, self.mask)
            self._stays_uncertain(job, failure, once=self.notes.place_of(error))
        elif job.reconcile:
            self._stays_uncertain(job, tell(job.path, job.attempt - 1, error, "reconcile_failed", self.mask))
        elif (unknown or _from_outside(job, error)) and not job.vertex.idempotent:
            self._stays_uncertain(job, tell(job.path, job.attempt, error, "abandoned", self.mask))
        elif self._tries_again(job, error):
            self._again_later(job, error)
        else:
            self._failed(job, error)

    def _cut_off(self, job: Job) -> None:
        """The run is being stopped, and this job with it."""
        kind, reason, _ = self.stopping or (ev.RUN_INTERRUPTED, "interrupted", "")
        self._release(job)
        if self.error is not None:
            return  # nothing is written any more
        self._count(job.used or {})
        if job.began:
            if kind == ev.RUN_FAILED and not job.vertex.idempotent:
                self.uncertain.append(job.path)
            cancelled = kind == ev.RUN_CANCELLED or (kind == ev.RUN_FAILED and job.vertex.idempotent)
            self.hand_over(
                Step(self, [self.record(ev.CANCELLED if cancelled else ev.INTERRUPTED, job, reason)])
            )
        elif job.awaits_record:
            self.hand_over(Step(self, [self.record(ev.WITHDRAWN, job, reason)]))

    def _without_values(self, job: Job, error: StoreError) -> None:
        """What the job needs is in the store and cannot be read: it does not run, and the run ends with this
        error.
        """
        self.cannot_load(error)
        records = [self.record(ev.WITHDRAWN, job, "input_lost")] if job.awaits_record else []
        self._ended_badly(job, None, Step(self, records))

    def _stays_uncertain(self, job: Job, failure: NodeFailure, **more: Any) -> None:
        self.uncertain.append(job.path)
        facts = failure.facts | more | ({"usage": job.used} if job.used else {})
        record = ev.node_record(
            ev.INTERRUPTED, job.path, failure.attempt, self.now(), failure.reason, **facts
        )
        self._ended_badly(job, None, Step(self, [record]))

    def _tries_again(self, job: Job, error: BaseException) -> bool:
        retry = job.vertex.retry
        if job.asking:
            return False  # a condition is asked once
        if job.tries >= retry.attempts or self.stopping is not None or not isinstance(error, Exception):
            return False
        return not isinstance(error, OutputNotSerializable | TooManyAbandoned) and retry.allows(error)

    def _again_later(self, job: Job, error: BaseException) -> None:
        """Another attempt is due: by itself, after a while, and without holding a slot meanwhile."""
        wait = job.vertex.retry.wait(job.tries)
        asked = asked_to_wait(error)
        wait = max(wait, asked)
        if asked and job.gate is not None:
            job.gate.pause(asked)
        due = self.now() + round(wait * 1e6)
        facts = tell(job.path, job.attempt, error, ev.RETRY, self.mask).facts | {"retry_at": due}
        step = Step(self, [self.record(ev.FAILED, job, ev.RETRY, **facts)])
        log.info(
            "attempt failed, is tried again", run=self.run_id, path=job.path, attempt=job.attempt, wait=wait
        )
        self._release(job, keeps_place=True)
        again = job.next(job.attempt + 1)
        again.tries, again.repeats = job.tries + 1, True
        self.backoffs.begin(job.path, again.attempt, due, lambda step: step.opens.append(again))
        if job.used:
            self._spend(job.used, step)
        self.hand_over(step)

    def _start_over(self, job: Job) -> None:
        """`reconcile` says that the uncertain attempt had no effect: the path runs, as a new attempt."""
        record = ev.node_record(ev.RESET, job.path, job.attempt - 1, self.now(), "not_done")
        self.snapshot.apply(record)
        step = Step(self, [record])
        self._release(job, keeps_place=True)
        again = job.next(job.attempt)
        again.gate = self.gate_of(job.vertex)
        step.opens.append(again)
        self.hand_over(step)

    def _failed(self, job: Job, error: BaseException) -> None:
        reason = "timeout" if isinstance(error, NodeTimeout) else "error"
        if job.asking:
            reason = ev.CONDITION_FAILED
        if isinstance(error, OutputNotSerializable):
            reason = NOT_STORABLE
            error = OutputNotSerializable(job.vertex.id, error.place, error.type_name, error.reason)
        if isinstance(error, asyncio.CancelledError):
            error = asyncio.CancelledError("cancelled from inside: the body raised CancelledError by itself")
        failure = tell(job.path, job.attempt, error, reason, self.mask)
        if (asked := asked_to_wait(error)) and job.gate is not None:
            job.gate.pause(asked)
        log.info("node failed", run=self.run_id, path=job.path, attempt=job.attempt, error=failure.message)
        step = Step(self, [self.record(ev.FAILED, job, reason, **failure.facts)])
        if self.services.fail_fast and self._is_fatal(job):
            self.stop(ev.RUN_FAILED, "fail_fast")
        self._ended_badly(job, failure, step)

    def _ended_badly(self, job: Job, failure: NodeFailure | None, step: Step) -> None:
        """Settle a path that has no value; `failure` None: nobody knows, or it never began."""
        self._release(job)
        if failure is not None and (job.feed is None or job.vertex.body is not None):
            self.failures[job.path] = failure
        if job.feed is None:
            how = Settled.OPEN_QUESTION if failure is None else Settled.FAILED
            job.scope.fail(job.vertex.index, step, how)
        elif failure is not None:
            job.feed.failed(job.index, failure, step)
        else:
            job.feed.lose(job.index, step)
        if job.used:
            self._spend(job.used, step)
        self.hand_over(step)

    def _is_fatal(self, job: Job) -> bool:
        if job.feed is not None and job.vertex.node.tolerate is not None:
            return False
        rules = job.scope.rules
        return not any(rules[c].node.trigger in {"any_failed", "all_done"} for c in job.vertex.children)

    def _release(self, job: Job, *, keeps_place: bool = False) -> None:
        """Give a job's slot back, once; `keeps_place`: the same item of its map goes on later."""
        if job.released:
            return
        job.released = True
        self.services.journal.forget(job)
        if job.held:
            self.notes.left(job)
        self.services.pool.release(job.gate)
        feed = job.feed
        if feed is not None and not keeps_place and job.vertex.body is None:  # graphs are counted by the feed
            feed.live -= 1
            if not feed.queued and feed.more and self.stopping is None:
                self.services.pool.offer(feed)

    # -- history --------------------------------------------------------------------------------------

    def failure_at(self, path: str) -> NodeFailure:
        """Give the failure of a path, or the first one inside it."""
        inside = (f for p, f in self.failures.items() if p == path or p.startswith((path + "[", path + "/")))
        return next(inside, None) or NodeFailure(
            path, 0, "", "a node above it failed", reason="upstream_failed"
        )

    def adopt_history(self, job: Job) -> None:
        """Let a job go on counting where an earlier process stopped."""
        snapshot = self.snapshot
        prior = snapshot.paths.get(job.path) if snapshot.paths else None
        if prior is None:
            return
        job.attempt = (prior.attempt or 0) + 1
        job.generation = snapshot.generations.get(job.path, 0)
        if self.automatic:
            job.tries = snapshot.attempts_used(job.path) + 1
        vertex = job.vertex
        if vertex.reconcilable:
            verdict = decide(prior, job.fingerprint, idempotent=vertex.idempotent, reconcilable=True)
            job.reconcile = verdict is RECONCILE

    def next_attempt(self, path: str) -> int:
        """Give the number that the next attempt of a path has."""
        prior = self.snapshot.paths.get(path)
        return 1 if prior is None else (prior.attempt or 0) + 1

    def reset(self, prior: Record, reason: str, step: Step) -> None:
        """Note that a completed path is to run again: its next attempt is another operation for the outside
        world.
        """
        record = ev.node_record(ev.RESET, prior.path or "", prior.attempt, self.now(), reason)
        step.records.append(record)
        self.snapshot.apply(record)

    def reused(self, prior: Record, fingerprint: bytes, step: Step) -> None:
        """Note what a path of a migrated run receives, when that is known for the first time."""
        if prior.input is not None or prior.reason != ev.MIGRATED:
            return
        facts = prior.facts
        if prior.output is None and prior.size is not None and "blob" not in facts:
            facts["seq"] = Stored.of(prior).seq
        told = json.dumps(facts) if facts else None
        step.records.append(prior._replace(input=fingerprint, at=self.now(), data=told, seq=None))

    def await_word(
        self, scope: Any, vertex: Vertex, path: str, prior: Record | None, step: Step, **what: Any
    ) -> None:
        """Let a path wait for a person, a signal or time."""
        self.desk.begin(scope, vertex, path, prior, step, **what)

    def forgive(self, path: str) -> None:
        """A failure there was dealt with: it is none of the run."""
        for found in [p for p in self.failures if p == path or p.startswith((path + "[", path + "/"))]:
            del self.failures[found]

    def fail(self, vertex: Vertex, path: str, error: Exception, step: Step) -> None:
        """Note that a node failed before a body of it could begin."""
        failure = self.failures[path] = tell(path, self.next_attempt(path), error, "error", self.mask)
        step.records.append(
            ev.node_record(ev.FAILED, path, failure.attempt, self.now(), "error", **failure.facts)
        )

    def cannot_load(self, error: Exception) -> None:
        """Note that something could not be read back: the run ends with this error."""
        self.lost.append(error)

    def record(self, kind: str, job: Job, reason: str | None, **facts: Any) -> Record:
        """Make the record of what just happened to a job, with what its attempt has used up."""
        if job.used:
            facts["usage"] = job.used
        return ev.node_record(kind, job.path, job.attempt, self.now(), reason, **facts)._replace(
            input=job.fingerprint
        )

    # -- the end --------------------------------------------------------------------------------------

    def _conclude(self, step: Step) -> None:
        """If every node has ended, say how the run did, in the unit that holds the last of it."""
        if self.root.open or step.ends is not None:
            return
        kind, reason = self._verdict()
        step.records.append(ev.run_record(kind, self.now(), reason, **self._total()))
        step.ends, self.reason, step.concludes = _STATUS[kind], reason, True

    def _verdict(self) -> tuple[str, str | None]:
        if self.lost:
            return ev.RUN_INTERRUPTED, "checkpoint_lost"
        if self.uncertain:
            return ev.RUN_INTERRUPTED, "uncertain"
        if not self.unhandled():
            return ev.RUN_COMPLETED, None
        return (ev.RUN_ROLLING_BACK if self._on_failure == "rollback" else ev.RUN_FAILED), "node_failed"

    def _total(self) -> dict[str, Any]:
        """Give what all attempts used up, and how long results have waited in this drive."""
        facts: dict[str, Any] = {"usage": self.used} if self.used else {}
        return facts | {"latency": summary(self.waits)} if self.waits else facts

    def unhandled(self) -> dict[str, NodeFailure]:
        """Give the failures that nothing dealt with, in the order of the definition."""

        def place(path: str) -> tuple[tuple[int, int], ...]:
            body: Body | None = self.body
            found = []
            for node, index in ev.segments(path):
                vertex = body.by_id[node]  # type: ignore[union-attr]  # it failed, so it is there
                body = vertex.body
                found.append((vertex.index, -1 if index is None else index))
            return tuple(found)

        root = self.root
        places = sorted((place(path), path) for path in self.failures)
        return {path: self.failures[path] for ((i, _), *_), path in places if not root.is_handled(i)}

    def stop(self, kind: str, reason: str | None, by: str = "", grace: float | None = 0.0) -> None:
        """Start nothing more; bodies under way have `grace` seconds (None: all they need), then they are
        cancelled. `ended` tells when it is done.
        """
        if self.undoing is not None:
            self.undoing.stop(kind, reason, by, grace)
            return
        if self.ended.done() or (self.stopping is not None and not self._draining):
            return
        self._draining = grace is None
        if kind == ev.RUN_INTERRUPTED and grace is not None and self._only_waits:
            kind, reason = ev.RUN_WAITING, self.desk.reason
        self.stopping = (kind, reason, by)
        self.desk.stop()
        if kind == ev.RUN_CANCELLED and (waits := self.desk.cancelled()):
            self.hand_over(Step(self, waits))
        if self.backoffs and kind != ev.RUN_INTERRUPTED:  # which keeps the time its retries are due
            self.hand_over(Step(self, self.backoffs.withdrawn(reason)))
        self.backoffs.stop()
        if grace is None:
            self.loop.call_soon(self._check)
            return
        if grace > 0 and self.live:
            self.background(self._after_grace(grace))
        else:
            self._cancel_bodies()
        self._last_call = self.loop.call_later(grace + self.services.grace + 1.0, self.leave_bodies)
        self.loop.call_soon(self._check)

    @property
    def _only_waits(self) -> bool:
        """Whether nothing of the run is under way, and it could be let go of."""
        busy = self.live or self._inflight or self._background or self.backoffs or self.waiting
        return bool(self.desk.open) and not busy and not self.uncertain and not self.lost

    def abort(self) -> None:
        """The run cannot go on: what it does can no longer be written."""
        self.stopping = self.stopping or (ev.RUN_INTERRUPTED, "not_stored", "")
        self.poisoned = True
        self.backoffs.stop()
        self._cancel_bodies()
        if self._last_call is None:
            self._last_call = self.loop.call_later(self.services.grace + 1.0, self.leave_bodies)
        self.loop.call_soon(self._check)

    def _cancel_bodies(self) -> None:
        for job in list(self.live):
            job.stopped = True
            if job.task is not None:
                job.task.cancel()
            if not job.entered:  # a task that is cancelled before its first step never takes one
                self.live.discard(job)
                self._cut_off(job)

    async def _after_grace(self, seconds: float) -> None:
        tasks = [job.task for job in self.live if job.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        self._cancel_bodies()

    def leave_bodies(self) -> None:
        """Go on without bodies that ignore their cancellation: nothing of what they still do is written."""
        for job in list(self.live):
            log.warning("a body ignores its cancellation and is left behind", run=self.run_id, path=job.path)
            self.live.discard(job)
            self._cut_off(job)
        self._check()

    def _check(self) -> None:
        """If nothing of the run is under way, it has ended, or is stuck."""
        over = self.ended.done() or self.undoing is not None
        if over or self.live or self._inflight or self._background:
            return
        if self.error is not None:
            self._finish(RunStatus.INTERRUPTED)
        elif self.stopping is not None:
            kind, reason, by = self.stopping
            self._end(kind, reason, **({"by": by} if by else {}))
        elif self.backoffs or self.waiting:
            return
        elif self.desk.open:
            self._stand_still()
        else:
            stuck = [v.id for v in self.rules if self.root.state[v.index] == OPEN]
            self.error = DagresumeError(
                f"run {self.run_id} is stuck: {', '.join(stuck[:20])} can never become ready. This is a fault"
                f" of dagresume; please report it with what `dagresume show {self.run_id}` prints."
            )
            self.stopping = (ev.RUN_FAILED, "stuck", "")
            self._end(ev.RUN_FAILED, "stuck", nodes=stuck[:100])

    def _stand_still(self) -> None:
        """Nothing can go on before a person, a signal or time has come: stay for it, or let the run go."""
        step = Step(self, [])
        if self.uncertain or self.lost:
            self.stop(*self._verdict())
        elif sum(feed.widen(step) for feed in self.wide):
            self.go_on(step)
        elif self._patience == "none" or (self._patience == "timers" and self.desk.for_people):
            self.stop(ev.RUN_WAITING, self.desk.reason)

    def _end(self, kind: str, reason: str | None, **facts: Any) -> None:
        if kind == ev.RUN_FAILED and self._on_failure == "rollback" and not (self.error or self.uncertain):
            kind = ev.RUN_ROLLING_BACK
        if kind == ev.RUN_WAITING:
            facts |= {"wake_at": self.desk.wake_at, "read": self.desk.read}
        step = Step(self, [ev.run_record(kind, self.now(), reason, **facts, **self._total())])
        step.ends, self.reason = _STATUS[kind], reason
        self.hand_over(step)

    def _finish(self, status: RunStatus) -> None:
        self.status = status
        for timer in (self._deadline, self._last_call):
            if timer is not None:
                timer.cancel()
        if status is RunStatus.ROLLING_BACK and self.undoing is None:
            self._undo()
        elif not self.ended.done():
            self.ended.set_result(None)

    def _undo(self) -> None:
        """It has failed and says itself that it rolls back then: the run ends when that has."""
        undoing = self.undoing = Rollback(
            self.services, self.body, self.run_id, self.workflow, self.owned, self.context, self.mask
        )
        undoing.ended.add_done_callback(self._undone)
        undoing.follow()
        if self.stopping is not None:
            undoing.stop(*self.stopping)

    def _undone(self, _: asyncio.Future[None]) -> None:
        assert self.undoing is not None
        self.reason, self.error = self.undoing.reason, self.undoing.error
        self._finish(self.undoing.status)

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something beside the bodies; the run does not end before it has."""
        task = self.loop.create_task(self._once_ours(work))
        self._background.add(task)
        task.add_done_callback(self._background_done)

    async def _once_ours(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it when the run is made or claimed: before that nothing can be written to it."""
        await asyncio.wait([self._is_open])
        if self._is_open.result():
            await work
        else:
            work.close()

    def _background_done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.error = self.error or error
            self.abort()
        self._check()

    def letter(self, record: Record) -> None:
        """Act on what somebody wrote to the run."""
        if record.kind == ev.CANCEL_REQUESTED:
            self.stop(ev.RUN_CANCELLED, "cancelled", record.facts.get("by", ""))
        else:
            self.desk.letter(record)

    @property
    def within(self) -> bool:
        """Whether the current task is a body of this run."""
        return any(job.task is asyncio.current_task() for job in self.live)


def start_ready(pool: Pool, step: Step | None = None) -> None:
    """Start what may start now. Start records that must be durable first ride in `step`, or in a unit of
    their own.
    """
    if pool.halted:
        return
    units: dict[Run, Step] = {}
    while pool.free > 0 and (job := pool.next()) is not None:
        run: Run = job.run
        if not job.awaits_record:
            run.start(job)
            continue
        own = step is not None and run is step.run
        unit = step if own and step is not None else units.setdefault(run, Step(run, []))
        unit.records.append(job.start_record())
        unit.begins.append(job)
    for run, unit in units.items():
        run.hand_over(unit)


def _maker_of_tasks(loop: asyncio.AbstractEventLoop) -> Callable[..., asyncio.Task[None]]:
    """Give what makes a task: the application's own factory if it has set one."""
    return partial(asyncio.Task, loop=loop) if loop.get_task_factory() is None else loop.create_task


def _limit(job: Job, scope: anyio.CancelScope, timeout: float) -> None:
    job.began = job.run.services.clock.monotonic()
    scope.deadline = anyio.current_time() + timeout


def _from_outside(job: Job, error: BaseException) -> bool:
    """Say whether somebody else cancelled the task of a body: its effect may have happened."""
    return isinstance(error, asyncio.CancelledError) and job.task is not None and job.task.cancelling() > 0


def _is_ctrl_c(job: Job, error: BaseException) -> bool:
    """Say whether Ctrl-C hit the loop while this body ran; one from a thread or process is the body's own."""
    return isinstance(error, KeyboardInterrupt) and _executor_of(job.vertex) == "loop"


def _executor_of(vertex: Vertex) -> str:
    return vertex.node.executor or ("loop" if vertex.node.signature.asynchronous else "thread")
