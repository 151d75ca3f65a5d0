"""Drives one run: what is ready starts, what returned is committed, what that unlocks starts.

Nothing is awaited between the return of a body and the hand-over of its checkpoint to the journal. Bodies
begin only when the unit that unlocked them is durable. Node tasks are plain asyncio tasks (a tenth of the
cost of a task group's); the run owns them, none outlives it.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import inspect
import json
from array import array
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final

import anyio

from dagresume import codec
from dagresume import events as ev
from dagresume.clock import Timer
from dagresume.context import Context
from dagresume.errors import (
    CheckpointLost,
    DagresumeError,
    LeaseLost,
    MutatedInput,
    NodeTimeout,
    NotLoadable,
    OnceUncertain,
    OutputNotSerializable,
    StoreError,
    TooManyAbandoned,
    WorkerDied,
)
from dagresume.events import Record, RunStatus, Snapshot
from dagresume.executor import Call, Executor
from dagresume.jobs import CURRENT, Cells, Job, Opening, Raw, Sealed, Services, Step
from dagresume.notes import Notes
from dagresume.observe import log, tell
from dagresume.planner import NOT_STORABLE, RECONCILE, UNCERTAIN, Verdict, Vertex, decide
from dagresume.policy import NOT_DONE, NodeFailure, Settled
from dagresume.pool import Pool
from dagresume.results import Cell, Stored
from dagresume.scopes import OPEN, Feed, Scope
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
from dagresume.workflow import Binding, Source

__all__ = ["Run", "start_ready"]

_LONGEST_WAIT: Final = 7 * 86_400.0  # seconds; who asks for more does not mean it

_STATUS: Final = {
    ev.RUN_COMPLETED: RunStatus.COMPLETED,
    ev.RUN_FAILED: RunStatus.FAILED,
    ev.RUN_INTERRUPTED: RunStatus.INTERRUPTED,
    ev.RUN_CANCELLED: RunStatus.CANCELLED,
    ev.RUN_WAITING: RunStatus.WAITING,
}


class Run:
    """One run, driven by this process.

    `open` decides all that can be decided and hands over the unit that makes or claims the run. `ended` is
    done when the end of the run is durable, or cannot be made so (`error`).
    """

    def __init__(
        self,
        services: Services,
        rules: Sequence[Vertex],
        origins: Sequence[Sequence[Source]],
        *,
        run_id: str,
        workflow: str,
        session: int,
        snapshot: Snapshot,
        inputs: Mapping[str, tuple[str, bytes]],
        input_types: Mapping[str, codec.Types],
        timeout: float | None = None,
        fresh_budget: bool = True,
    ) -> None:
        self.services, self.rules, self.origins = services, rules, origins
        self.run_id, self.workflow, self.snapshot = run_id, workflow, snapshot
        self.inputs, self.input_types = inputs, input_types
        self.input_digests = {name: digest for name, (_, digest) in inputs.items()}
        self.owned, self.claimed_at, self.poisoned = Owned(0, session, 0), 0, False
        self.loop, self.context = asyncio.get_running_loop(), contextvars.copy_context()
        self.ended: asyncio.Future[None] = self.loop.create_future()
        self._is_open: asyncio.Future[bool] = self.loop.create_future()
        self.status = RunStatus.RUNNING
        self.reason: str | None = None
        self.error: BaseException | None = None
        self.stopping: tuple[str, str, str] | None = None  # kind of the run's end, reason, by whom
        self.live: set[Job] = set()
        self.waiting = 0  # its sources in the pool's queue or parked at a limit; counted by the pool
        self.executed: list[str] = []
        self.failures: dict[str, NodeFailure] = {}
        self.held: list[str] = []
        self.uncertain: list[str] = []
        self.lost: list[Exception] = []  # what could not be read back
        self.log_lines: deque[LogLine] = deque()
        self.progress: dict[str, tuple[float, float | None]] = {}
        self.waits: array[float] = array("d")
        self.commits, self.began = 0, services.clock.monotonic()
        self._last_batch, self._inflight = -1, 0
        self._fresh_budget, self._verbose = fresh_budget, log.verbose
        self._timeout = timeout
        self._deadline: Timer | None = None
        self._last_call: asyncio.TimerHandle | None = None  # leaves bodies behind
        self._timers: dict[Job, Timer] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._executors = [services.executor(_executor_of(vertex)) for vertex in rules]
        self._places = {vertex.id: vertex.index for vertex in rules}
        self.notes = Notes(self)
        self.root = Scope(self, rules)

    def now(self) -> int:
        """Give the wall clock in microseconds UTC."""
        return self.services.clock.now()

    # -- handing over ---------------------------------------------------------------------------------

    def open(
        self, guard: NewRun | Claim, records: list[Record], definition: Definition | None
    ) -> asyncio.Future[Outcome]:
        """Decide all that can be decided, hand over the unit that makes or claims the run; gives what becomes
        of it.
        """
        step = Opening(self, guard, records)
        step.definition = definition
        self.root.advance(step)
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
        self.root.advance(step)
        if self.stopping is None:
            start_ready(self.services.pool, step)
            self._ride(step)
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
            if self._timeout is not None:
                self._deadline = self.services.clock.call_later(
                    self._timeout, self.stop, ev.RUN_FAILED, "timeout"
                )
        else:
            self._is_open.set_result(False)
            self.stopping = (ev.RUN_INTERRUPTED, "not_opened", "")
            for job in step.begins:
                self._release(job)
            self._finish(RunStatus.INTERRUPTED)

    def delivered(self, step: Step, outcome: Outcome) -> None:
        """Learn what became of a unit: begin what it unlocked."""
        self._inflight -= 1
        if not isinstance(outcome, Committed):
            for job in step.begins:
                self._release(job)
            if not isinstance(outcome, SqlFailed):  # that is the failure of one attempt
                self.not_written(outcome, step.records)
            return
        self.count_commit()
        if step.timed:
            self.waits.append(self.services.clock.monotonic() - step.appended)
        if self.stopping is None:
            self._begin(step)
        elif step.begins:
            self._withdraw(step)
        if step.ends is not None:
            self._finish(step.ends)
        elif not self.live:
            self._check()

    def count_commit(self) -> None:
        """Count the transaction that has just ended, once."""
        batch = self.services.journal.batches
        if batch != self._last_batch:
            self._last_batch = batch
            self.commits += 1

    def _begin(self, step: Step) -> None:
        pool = self.services.pool
        for job in step.begins:
            self.start(job)
        for source in step.opens:
            pool.offer(source)
        for feed, k in step.arrivals:
            feed.todo.append(k)
            pool.offer(feed)

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
                        record.path, record.attempt or 1, self.error, "not_stored"
                    )
        self.abort()

    # -- bodies ---------------------------------------------------------------------------------------

    def start(self, job: Job) -> None:
        """Begin a job whose slot is reserved and whose start record, if it needs one, is durable."""
        self.live.add(job)
        job.task = self.loop.create_task(self._drive(job), context=self.context.copy())

    async def _drive(self, job: Job) -> None:
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
            self.live.discard(job)
            if not self.live:
                self._check()

    async def _attempt(self, job: Job) -> None:
        try:
            if self._to_load(job):
                await self._load(job)
            if (job.attempt > 1 or self.notes.resumed) and self.notes.prepares(job):
                await self.notes.prepare(job)
            call = self._call(job)
            job.began = self.services.clock.monotonic()
            result = await (self._reconcile(job, call) if job.reconcile else self._execute(job, call))
            if self.services.debug and job.feed is not None:
                self._check_shared(job)
        except BaseException as error:
            if job not in self.live:
                raise  # it was left behind: whatever it still does is nobody's business
            if job.feed is not None and self.services.debug:
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
        self._returned(
            job, result, took, await self._shelve(job, result) if self._is_big(job, result) else None
        )

    def _is_big(self, job: Job, result: Any) -> bool:
        limit = self.services.spill_bytes
        return not job.vertex.pure and limit is not None and len(result) > max(limit, len("null"))

    async def _shelve(self, job: Job, text: str) -> dict[str, Any]:
        """Put a big output into a blob."""
        try:
            return {"blob": await self._spill(text)}
        except Exception as error:  # the work is done and cannot be kept: as with a failed commit
            self.failures[job.path] = tell(job.path, job.attempt, error, "not_stored")
            raise

    async def _spill(self, text: str) -> str:
        """Put a big output into a blob. The run's cancellation waits for it: the work is done and paid."""
        work = asyncio.ensure_future(self.services.spill(self.run_id, text))
        try:
            return await to_its_end(work)
        except asyncio.CancelledError:
            return work.result()

    async def _execute(self, job: Job, call: Call) -> Any:
        vertex = job.vertex
        if not job.repeats:
            self.executed.append(job.path)
        if not (job.awaits_record or vertex.pure):
            self.services.journal.later(job)
        executor, timeout = self._executors[vertex.index], vertex.node.timeout
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
        given = {"ctx": call.context or self._context(job)} | given
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
        head = (ev.COMPLETED, "success", job.attempt, self.now(), job.path, reason, job.fingerprint)
        told = None if data is None else json.dumps(data)
        cell: Any
        if vertex.pure:
            cell, digest = Raw(result), job.fingerprint
            step = Step(self, [Record(*head, None, None, took, told)])
        else:
            digest = codec.digest(result)
            blob = None if data is None else data.get("blob")
            cell = result if blob is None else Stored(job.path, 0, digest, blob)
            step = Step(self, [Record(*head, digest, len(result), took, told, None if blob else result)])
            step.timed = True
        if self._verbose:
            log.debug(
                "node completed", run=self.run_id, path=job.path, attempt=job.attempt, seconds=took / 1e6
            )
        if job.sql:
            self._seal(job, step.records, cell, digest)
        else:
            self._settle(job, cell, digest, step)

    def _seal(self, job: Job, records: list[Record], cell: Any, digest: bytes) -> None:
        """Write a completion with the statements of its function; what follows waits until it is durable."""
        self.live.discard(job)  # its body has returned; its slot is given back with the outcome
        self._inflight += 1
        self.services.journal.forget(job)
        self.services.journal.append(Sealed(self, records, job.sql, partial(self._sealed, job, cell, digest)))

    def _sealed(self, job: Job, cell: Any, digest: bytes, outcome: Outcome) -> None:
        if isinstance(outcome, Committed):
            self._settle(job, cell, digest, Step(self, []))
        elif isinstance(outcome, SqlFailed):
            self._threw(job, outcome.error)
        else:
            self._release(job)

    def _settle(self, job: Job, cell: Any, digest: bytes, step: Step) -> None:
        """Give a path its value, and what waits for it its turn."""
        vertex, scope = job.vertex, job.scope
        self._release(job)
        if job.feed is None:
            scope.complete(vertex.index, cell, digest, step)
        else:
            job.feed.settled(job.index, cell, digest, step)
        if vertex.pure or not step.records:
            self._unlock_at_once(step)
        self.hand_over(step, quietly=vertex.pure)

    def _unlock_at_once(self, step: Step) -> None:
        """What waits for a pure node, or for one that is durable already, waits for no further row (C1)."""
        self.root.advance(step)
        for source in step.opens:
            self.services.pool.offer(source)
        for feed, k in step.arrivals:
            feed.todo.append(k)
            self.services.pool.offer(feed)
        step.opens, step.arrivals = [], []

    def _threw(self, job: Job, error: BaseException) -> None:
        """An attempt ended without a result, or could not begin."""
        stopped = (isinstance(error, asyncio.CancelledError) and job.stopped) or _is_ctrl_c(job, error)
        unknown = isinstance(error, NodeTimeout) and job.call is not None and job.call.abandoned
        unknown = unknown or (isinstance(error, WorkerDied) and error.began)
        if stopped or self.error is not None:
            self._cut_off(job)
        elif not job.began and isinstance(error, StoreError):
            self._without_values(job, error)
        elif isinstance(error, OnceUncertain) and not job.reconcile:
            failure = tell(job.path, job.attempt, error, ev.ONCE_UNCERTAIN)
            self._stays_uncertain(job, failure, once=self.notes.place_of(error))
        elif job.reconcile:
            self._stays_uncertain(job, tell(job.path, job.attempt - 1, error, "reconcile_failed"))
        elif (unknown or _from_outside(job, error)) and not job.vertex.idempotent:
            self._stays_uncertain(job, tell(job.path, job.attempt, error, "abandoned"))
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
        if job.began:
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
        if job.tries >= retry.attempts or self.stopping is not None or not isinstance(error, Exception):
            return False
        return not isinstance(error, OutputNotSerializable | TooManyAbandoned) and retry.allows(error)

    def _again_later(self, job: Job, error: BaseException) -> None:
        """Another attempt is due: by itself, after a while, and without holding a slot meanwhile."""
        wait = job.vertex.retry.wait(job.tries)
        asked = _asked_to_wait(error)
        wait = max(wait, asked)
        if asked and job.gate is not None:
            job.gate.pause(asked)
        facts = tell(job.path, job.attempt, error, ev.RETRY).facts | {
            "retry_at": self.now() + round(wait * 1e6)
        }
        step = Step(self, [self.record(ev.FAILED, job, ev.RETRY, **facts)])
        log.info(
            "attempt failed, is tried again", run=self.run_id, path=job.path, attempt=job.attempt, wait=wait
        )
        self._release(job, keeps_place=True)
        again = job.next(job.attempt + 1)
        again.tries, again.repeats = job.tries + 1, True
        self._timers[again] = self.services.clock.call_later(wait, self._due, again)
        self.hand_over(step)

    def _due(self, job: Job) -> None:
        del self._timers[job]
        self.services.pool.offer(job)
        start_ready(self.services.pool)

    def _start_over(self, job: Job) -> None:
        """`reconcile` says that the uncertain attempt had no effect: the path runs, as a new attempt."""
        record = ev.node_record(ev.RESET, job.path, job.attempt - 1, self.now(), "not_done")
        self.snapshot.apply(record)
        step = Step(self, [record])
        self._release(job, keeps_place=True)
        step.opens.append(job.next(job.attempt))
        self.hand_over(step)

    def _failed(self, job: Job, error: BaseException) -> None:
        reason = "timeout" if isinstance(error, NodeTimeout) else "error"
        if isinstance(error, OutputNotSerializable):
            reason = NOT_STORABLE
            error = OutputNotSerializable(job.vertex.id, error.place, error.type_name, error.reason)
        if isinstance(error, asyncio.CancelledError):
            error = asyncio.CancelledError("cancelled from inside: the body raised CancelledError by itself")
        failure = tell(job.path, job.attempt, error, reason)
        log.info("node failed", run=self.run_id, path=job.path, attempt=job.attempt, error=failure.message)
        step = Step(self, [self.record(ev.FAILED, job, reason, **failure.facts)])
        if self.services.fail_fast and self._is_fatal(job):
            self.stop(ev.RUN_FAILED, "fail_fast")
        self._ended_badly(job, failure, step)

    def _ended_badly(self, job: Job, failure: NodeFailure | None, step: Step) -> None:
        """Settle a path that has no value; `failure` None: nobody knows, or it never began."""
        self._release(job)
        if job.feed is None:
            if failure is not None:
                self.failures[job.path] = failure
            how = Settled.OPEN_QUESTION if failure is None else Settled.FAILED
            job.scope.fail(job.vertex.index, step, how)
        elif failure is not None:
            job.feed.failed(job.index, failure, step)
        else:
            job.feed.lose(job.index, step)
        self.hand_over(step)

    def _is_fatal(self, job: Job) -> bool:
        if job.feed is not None and job.vertex.node.tolerate is not None:
            return False
        return not any(self.rules[c].node.trigger in {"any_failed", "all_done"} for c in job.vertex.children)

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
        if feed is not None and not keeps_place:
            feed.live -= 1
            if not feed.queued and feed.more and self.stopping is None:
                self.services.pool.offer(feed)

    # -- what a body gets -----------------------------------------------------------------------------

    def _to_load(self, job: Job) -> bool:
        """Say whether something the job needs is not in memory: an output of an earlier process, or a big
        one.
        """
        for parent in job.vertex.value_parents:
            out = job.scope.out[parent]
            if type(out) is Stored or (type(out) is Cells and out.stored):
                return True
        return bool(job.cells) and any(type(cell) is Stored for cell in job.cells)

    async def _load(self, job: Job) -> None:
        out = job.scope.out
        for parent in job.vertex.value_parents:
            cell = out[parent]
            if isinstance(cell, Stored):
                (out[parent],) = await self.services.fetch(self.run_id, [cell])
            elif isinstance(cell, Cells) and cell.stored:
                await self._load_cells(cell.cells)
                cell.stored = False
        await self._load_cells(job.cells)

    async def _load_cells(self, cells: list[Any]) -> None:
        missing = [k for k, cell in enumerate(cells) if isinstance(cell, Stored)]
        if missing:
            texts = await self.services.fetch(self.run_id, [cells[k] for k in missing])
            for k, text in zip(missing, texts, strict=True):
                cells[k] = text

    def _call(self, job: Job) -> Call:
        """Put the arguments together: fresh objects, decoded from what was committed (C7)."""
        vertex, by_name = job.vertex, False
        if (
            vertex.only_parents is not None
            and (values := self._all_plain(job, vertex.only_parents)) is not None
        ):
            job.call = Call(vertex.node.fn, values, {}, None if vertex.pure else vertex.types, None, job.path)
            return job.call
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        context: Context | None = None
        for binding in vertex.bindings:
            kind = binding.source.kind
            value: Any
            if kind == "context":
                value = context = self._context(job)
            elif kind == "input" and binding.source.name not in self.inputs:
                by_name = True  # its own default; what comes after it is passed by name
                continue
            elif kind == "item":
                value = self._item(job, binding.source.place)
            elif job.feed is None:
                value = self._value(job.scope, binding.source)
            else:
                value = self._shared(job, binding)
            if by_name or binding.keyword:
                kwargs[binding.parameter] = value
            else:
                args.append(value)
        job.call = Call(
            vertex.node.fn, tuple(args), kwargs, None if vertex.pure else vertex.types, context, job.path
        )
        return job.call

    def _all_plain(self, job: Job, parents: tuple[int, ...]) -> tuple[Any, ...] | None:
        """Give the outputs of these parents, decoded in one go, if all of them are plain data at hand."""
        out, rules = job.scope.out, job.scope.rules
        texts = [out[p] for p in parents]
        for text, p in zip(texts, parents, strict=True):
            if type(text) is not str or rules[p].types is not codec.EMPTY:
                return None
        try:
            return (codec.unpack(texts[0]),) if len(texts) == 1 else tuple(codec.unpack_many(texts))
        except NotLoadable:
            return None  # one by one: then it is known whose it is

    def _shared(self, job: Job, binding: Binding) -> Any:
        """Give what all items of a map receive: decoded once, read-only by contract."""
        shared: dict[str, Any] = job.feed.shared
        if binding.parameter not in shared:
            shared[binding.parameter] = self._value(job.scope, binding.source)
        return shared[binding.parameter]

    def _item(self, job: Job, place: int) -> Any:
        cell = job.cells[place]
        if isinstance(cell, Raw):
            return cell.value
        source = self.origins[job.vertex.index][place]
        if source.kind == "input":
            return codec.unpack(cell, self.input_types.get(source.name, codec.EMPTY))
        return self._unpack(job.scope, source.place, codec.unpack, cell, job.index)

    def _value(self, scope: Scope, source: Source) -> Any:
        if source.kind == "constant":
            return copy.deepcopy(source.value)
        if source.kind == "input":
            return codec.unpack(self.inputs[source.name][0], self.input_types.get(source.name, codec.EMPTY))
        out = scope.out[source.place]
        if type(out) is str:
            return self._unpack(scope, source.place, codec.unpack, out)
        if out is None:
            return None  # skipped or failed
        if isinstance(out, Raw):
            return out.value
        if scope.rules[source.place].pure:  # what was handed on uncalled is packed all the same
            return [cell.value if isinstance(cell, Raw) else codec.unpack(cell) for cell in out.cells]
        return self._unpack(scope, source.place, codec.unpack_many, out.cells)

    def _unpack(
        self,
        scope: Scope,
        i: int,
        unpack: Callable[[Any, codec.Types], Any],
        packed: Any,
        item: int | None = None,
    ) -> Any:
        vertex = scope.rules[i]
        try:
            return unpack(packed, vertex.types)
        except NotLoadable as error:
            path = scope.path(vertex) + (f"[{item}]" if item is not None and vertex.is_map else "")
            raise CheckpointLost(self.run_id, path, f"cannot be loaded: {error.reason}") from error

    def _context(self, job: Job) -> Context:
        scope, vertex = job.scope, job.vertex
        skipped: frozenset[str] = frozenset()
        failures: dict[str, NodeFailure] = {}
        if vertex.index in scope.bad:
            skipped = frozenset(self.rules[p].id for p in vertex.parents if scope.state[p] == Settled.SKIPPED)
            failed = [self.rules[p] for p in vertex.parents if scope.state[p] == Settled.FAILED]
            failures = {parent.id: self._failure_at(scope.path(parent)) for parent in failed}
        return Context(
            run_id=self.run_id, workflow=self.workflow, node=vertex.id, path=job.path, index=job.index,
            attempt=job.attempt, channel=job, generation=job.generation, skipped=skipped, failures=failures,
            state=None if job.state is None else codec.unpack(job.state), root=self.services.artifacts,
        )  # fmt: skip

    def _failure_at(self, path: str) -> NodeFailure:
        inside = (f for p, f in self.failures.items() if p == path or p.startswith((path + "[", path + "/")))
        return next(inside, None) or NodeFailure(
            path, 0, "", "a node above it failed", reason="upstream_failed"
        )

    def _check_shared(self, job: Job) -> None:
        """Find an item that changed what all items of its map share (debug mode)."""
        for binding in job.vertex.bindings:
            source = binding.source
            if binding.parameter not in job.feed.shared or self._is_raw(job.scope, source):
                continue
            types = (
                self.rules[source.place].types
                if source.kind == "parent"
                else self.input_types.get(source.name, codec.EMPTY)
            )
            fresh = self._value(job.scope, source)
            if codec.pack(job.feed.shared[binding.parameter], types) != codec.pack(fresh, types):
                job.feed.shared[binding.parameter] = fresh
                raise MutatedInput(job.path, binding.parameter)

    def _is_raw(self, scope: Scope, source: Source) -> bool:
        return source.kind == "parent" and scope.rules[source.place].pure

    # -- history --------------------------------------------------------------------------------------

    def adopt_history(self, job: Job) -> None:
        """Let a job go on counting where an earlier process stopped."""
        snapshot = self.snapshot
        prior = snapshot.paths.get(job.path) if snapshot.paths else None
        if prior is None:
            return
        job.attempt = (prior.attempt or 0) + 1
        job.generation = snapshot.generations.get(job.path, 0)
        if not self._fresh_budget:
            job.tries = snapshot.attempts_used(job.path) + 1
        if job.feed is not None:
            vertex = job.vertex
            verdict = decide(
                prior, job.fingerprint, idempotent=vertex.idempotent, reconcilable=vertex.reconcilable
            )
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

    def hold(self, path: str, prior: Record | None, verdict: Verdict, step: Step) -> None:
        """Leave a path alone until a person has spoken."""
        if verdict is UNCERTAIN:
            self.uncertain.append(path)
            return
        self.held.append(path)
        step.records.append(ev.node_record(ev.WAITING, path, self.next_attempt(path) - 1, self.now(), "held"))

    def fail(self, vertex: Vertex, path: str, error: Exception, step: Step) -> None:
        """Note that a node failed before a body of it could begin."""
        failure = self.failures[path] = tell(path, self.next_attempt(path), error, "error")
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
        step.records.append(ev.run_record(kind, self.now(), reason))
        step.ends, self.reason, step.concludes = _STATUS[kind], reason, True

    def _verdict(self) -> tuple[str, str | None]:
        if self.lost:
            return ev.RUN_INTERRUPTED, "checkpoint_lost"
        if self.uncertain:
            return ev.RUN_INTERRUPTED, "uncertain"
        if self.held:
            return ev.RUN_WAITING, "held"
        return (ev.RUN_FAILED, "node_failed") if self.unhandled() else (ev.RUN_COMPLETED, None)

    def unhandled(self) -> dict[str, NodeFailure]:
        """Give the failures that nothing dealt with, in the order of the definition."""

        def place(path: str) -> tuple[int, int]:
            node, index = ev.segments(path)[0]
            return self._places[node], -1 if index is None else index

        return {
            p: self.failures[p] for p in sorted(self.failures, key=place) if not self._is_handled(place(p)[0])
        }

    def _is_handled(self, i: int) -> bool:
        state = self.root.state
        return any(
            self.rules[c].node.trigger == "any_failed" and state[c] == Settled.COMPLETED
            for c in self.rules[i].children
        )

    def stop(self, kind: str, reason: str, by: str = "", grace: float = 0.0) -> None:
        """Start nothing more; bodies under way have `grace` seconds, then they are cancelled. `ended` tells
        when it is done.
        """
        if self.stopping is not None or self.ended.done():
            return
        self.stopping = (kind, reason, by)
        if (
            self._timers and kind != ev.RUN_INTERRUPTED
        ):  # an interrupted run keeps the time its retries are due
            self.hand_over(Step(self, [self._not_again(job, reason) for job in self._timers]))
        self._stop_timers()
        if grace > 0 and self.live:
            self.background(self._after_grace(grace))
        else:
            self._cancel_bodies()
        self._last_call = self.loop.call_later(grace + self.services.grace + 1.0, self.leave_bodies)
        self.loop.call_soon(self._check)

    def _not_again(self, job: Job, reason: str) -> Record:
        return ev.node_record(ev.WITHDRAWN, job.path, job.attempt - 1, self.now(), reason)

    def abort(self) -> None:
        """The run cannot go on: what it does can no longer be written."""
        self.stopping = self.stopping or (ev.RUN_INTERRUPTED, "not_stored", "")
        self.poisoned = True
        self._stop_timers()
        self._cancel_bodies()
        if self._last_call is None:
            self._last_call = self.loop.call_later(self.services.grace + 1.0, self.leave_bodies)
        self.loop.call_soon(self._check)

    def _stop_timers(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

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
        if self.ended.done() or self.live or self._inflight or self._background:
            return
        if self.error is not None:
            self._finish(RunStatus.INTERRUPTED)
        elif self.stopping is not None:
            kind, reason, by = self.stopping
            self._end(kind, reason, **({"by": by} if by else {}))
        elif not self._timers and not self.waiting:
            stuck = [v.id for v in self.rules if self.root.state[v.index] == OPEN]
            self.error = DagresumeError(
                f"run {self.run_id} is stuck: {', '.join(stuck[:20])} can never become ready. This is a fault"
                f" of dagresume; please report it with what `dagresume show {self.run_id}` prints."
            )
            self.stopping = (ev.RUN_FAILED, "stuck", "")
            self._end(ev.RUN_FAILED, "stuck", nodes=stuck[:100])

    def _end(self, kind: str, reason: str, **facts: Any) -> None:
        step = Step(self, [ev.run_record(kind, self.now(), reason, **facts)])
        step.ends, self.reason = _STATUS[kind], reason
        self.hand_over(step)

    def _finish(self, status: RunStatus) -> None:
        self.status = status
        for timer in (self._deadline, self._last_call):
            if timer is not None:
                timer.cancel()
        if not self.ended.done():
            self.ended.set_result(None)

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

    @property
    def ids(self) -> dict[int, str]:
        """Give the node of each function, by its identity."""
        return {id(vertex.node.fn): vertex.id for vertex in self.rules}

    # -- what is left ---------------------------------------------------------------------------------

    def cells(self) -> dict[str, Cell]:
        """Give the outputs of the root's nodes by id, packed or where they lie."""
        done = (v for v in self.rules if self.root.state[v.index] == Settled.COMPLETED and not v.pure)
        outs = ((v.id, self.root.out[v.index]) for v in done)
        return {node: out.cells if isinstance(out, Cells) else out for node, out in outs}

    def status_at(self, path: str) -> str | None:
        """Give how a node of the root ended; None if there is no such path."""
        node, index = ev.segments(path)[0]
        i = self._places.get(node)
        if i is None:
            return None
        for paths, word in (
            (self.held, "waiting"),
            (self.uncertain, "interrupted"),
            (self.failures, "failed"),
        ):
            if any(p == path or p.startswith(path + "[") for p in paths):
                return word
        if index is not None:
            return self._item_status(i, index)
        state = self.root.state[i]
        names = {OPEN: "pending", Settled.OPEN_QUESTION: "pending", Settled.FAILED: "upstream_failed"}
        return names.get(state) or Settled(state).name.lower()

    def _item_status(self, i: int, k: int) -> str | None:
        out = self.root.out[i]
        cells = (
            self.root.feeds[i].cells.cells
            if i in self.root.feeds
            else out.cells
            if isinstance(out, Cells)
            else []
        )
        if k >= len(cells):
            return None
        return "pending" if cells[k] is None else "completed"

    def parts(self) -> dict[str, list[Any]]:
        """Give the items of maps that have not completed, by node; None where there is none."""
        feeds = (
            (self.rules[i], feed)
            for i, feed in self.root.feeds.items()
            if self.root.state[i] != Settled.COMPLETED
        )
        return {vertex.id: feed.cells.cells for vertex, feed in feeds if not vertex.pure}

    @property
    def within(self) -> bool:
        """Whether the current task is a body of this run."""
        return any(job.task is asyncio.current_task() for job in self.live)

    def runs_no_function(self, path: str) -> bool:
        """Say whether a path is a map itself: its items are what runs."""
        node, index = ev.segments(path)[-1]
        return index is None and node in self._places and self.rules[self._places[node]].is_map


def start_ready(pool: Pool, step: Step | None = None) -> None:
    """Start what may start now. Start records that must be durable first ride in `step`, or in a unit of
    their own.
    """
    units: dict[Run, Step] = {}
    while (job := pool.next()) is not None:
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


def _limit(job: Job, scope: anyio.CancelScope, timeout: float) -> None:
    job.began = job.run.services.clock.monotonic()
    scope.deadline = anyio.current_time() + timeout


def _from_outside(job: Job, error: BaseException) -> bool:
    """Say whether somebody else cancelled the task of a body: its effect may have happened."""
    return isinstance(error, asyncio.CancelledError) and job.task is not None and job.task.cancelling() > 0


def _asked_to_wait(error: BaseException) -> float:
    """Give the seconds that the other side asks to be left alone for (`retry_after`), 0 if it does not."""
    try:
        asked = getattr(error, "retry_after", None)
    except Exception:  # a property of somebody else's error
        return 0.0
    sound = isinstance(asked, int | float) and 0 < asked < _LONGEST_WAIT
    return float(asked) if sound and asked is not None else 0.0


def _is_ctrl_c(job: Job, error: BaseException) -> bool:
    """Say whether Ctrl-C hit the loop while this body ran; one from a thread or process is the body's own."""
    return isinstance(error, KeyboardInterrupt) and _executor_of(job.vertex) == "loop"


def _executor_of(vertex: Vertex) -> str:
    return vertex.node.executor or ("loop" if vertex.node.signature.asynchronous else "thread")
