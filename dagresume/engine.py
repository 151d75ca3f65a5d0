"""The front door: an engine on a store, and what can be asked of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import replace
from datetime import datetime
from functools import partial, wraps
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, get_args

import anyio

from dagresume import codec
from dagresume.blobs import BlobStore
from dagresume.clock import Clock, SystemClock, to_datetime, to_micros
from dagresume.definition import describe, differences
from dagresume.errors import (
    AlreadyRunning,
    DagresumeError,
    DefinitionError,
    EngineClosed,
    InputError,
    InputsChanged,
    OwnershipError,
    RolledBack,
    RunCancelled,
    RunFailed,
    RunLocked,
    RunNotFound,
    StoreError,
    VersionMismatch,
    WorkflowNotRegistered,
)
from dagresume.events import (
    CANCEL_REQUESTED,
    FAILED,
    HELD,
    INTERRUPTED,
    LETTERS,
    RUN_CANCELLED,
    RUN_CREATED,
    RUN_FAILED,
    RUN_INTERRUPTED,
    RUN_ROLLING_BACK,
    WAITING,
    Event,
    Record,
    RunStatus,
    Snapshot,
    node_record,
    run_record,
    wait_cancelled,
)
from dagresume.executor import Executor, is_importing_main
from dagresume.explain import Explanation, explain
from dagresume.flaws import UNREADABLE, line_flaw, readable_event, readable_info, run_flaw, unreadable
from dagresume.flaws import explain as explain_flaw
from dagresume.fork import Copy, to_copy
from dagresume.jobs import CURRENT, Services
from dagresume.journal import Journal
from dagresume.lease import Lease, elapsed
from dagresume.letters import decision, resolved, signal
from dagresume.masks import NO_SECRETS, Mask, without_passwords
from dagresume.metrics import Metrics, measured
from dagresume.migration import migrated, take_over, transformed
from dagresume.observe import Observer, log, watch
from dagresume.outcomes import live_result, raise_if_bad, stored_result, undone_result
from dagresume.plan import plan
from dagresume.planner import Decision
from dagresume.policy import UNSAID, Budget, Limit
from dagresume.pool import Pool
from dagresume.program import (
    PERSON,
    Asked,
    Program,
    Wait,
    audited,
    counted,
    inputs_digest,
    inputs_text,
    other_code,
    taken_up,
)
from dagresume.recovery import STOPPED, Code, RecoveryOutcome, Sweep
from dagresume.results import RunResult
from dagresume.retention import FAILED_KEPT, KEPT, Pruned, Term, Terms, prune
from dagresume.reverse import UndoPlan, plan_undo
from dagresume.scheduler import Run, start_ready
from dagresume.sessions import this_session
from dagresume.shelf import Shelf
from dagresume.steady import to_its_end
from dagresume.store import (
    Claim,
    Committed,
    Definition,
    Holder,
    Inbox,
    Loaded,
    LogLine,
    NewRun,
    Outcome,
    Owned,
    Refused,
    RunRow,
    Store,
    StoreFailed,
    Unit,
)
from dagresume.undo import Rollback, begun, is_undone, opening
from dagresume.views import RunInfo, past_info, run_info, stored_as, wanted_statuses
from dagresume.wiring import executor_of, store_of
from dagresume.workflow import Workflow

if TYPE_CHECKING:
    from dagresume.contrast import Contrast
    from dagresume.overview import Overview

__all__ = ["Engine", "RunHandle"]

T = TypeVar("T")
Origin = Literal["manual", "schedule", "webhook"]
ORIGINS: Final = get_args(Origin)
PAGE: Final = 500  # rows of runs that are read at once
M = TypeVar("M", bound=Callable[..., Coroutine[Any, Any, Any]])
POLL: Final = 0.25  # seconds between two looks for letters from other processes


def _reads(method: M) -> M:
    """Have a method that is about one stored run say what is wrong with it if it cannot be read."""

    @wraps(method)
    async def reading(self: Engine, *args: Any, **options: Any) -> Any:
        async with self._reading(str(options.get("run_id", args[0] if args else ""))):
            return await method(self, *args, **options)

    return reading  # type: ignore[return-value]  # of the same signature


class RunHandle:
    """A run that was started: `run_id`, `await result()`, `await cancel()`."""

    def __init__(self, engine: Engine, run_id: str, task: asyncio.Task[RunResult]) -> None:
        self._engine, self.run_id, self._task = engine, run_id, task

    def __repr__(self) -> str:
        return f"<run {self.run_id}{' (ended)' if self._task.done() else ''}>"

    @property
    def done(self) -> bool:
        """Whether the run has come to an end or a rest."""
        return self._task.done()

    async def result(self, *, raise_on_failure: bool = True) -> RunResult:
        """Wait for the run and give its result; raises as `Engine.run` does. A cancelled caller leaves the
        run alone.
        """
        with self._engine._lent_slot():
            await asyncio.wait([self._task])
        result = self._task.result()
        if raise_on_failure:
            raise_if_bad(result)
        return result

    async def cancel(self, by: str = "") -> None:
        """Cancel the run."""
        await self._engine.cancel(self.run_id, by)


class Engine:
    """Runs workflows on one store.

    `url`: a path or `sqlite:///path` (made if it is not there), or `":memory:"`. `workflows`: those that
    stored runs may be of. `limits`: what nodes name with `limit=`. `concurrency`: attempts alive at once,
    over all runs. `synchronous`: "full" survives power loss, "normal" the death of the process. Outputs over
    `spill_bytes` go to files beside the database. `grace_seconds`: what bodies under way are given when the
    engine is left. `fail_fast`: the first failure cancels the other branches. `wake`: go on with waiting runs
    of its workflows, whoever started them, when their time or letter has come. `debug`: notice nodes that
    change what they share. `observer`: hears what the engine does, see `dagresume.otel`.

    Use it as an async context manager.
    """

    def __init__(
        self,
        url: str | Path = "dagresume.db",
        *,
        workflows: Sequence[Workflow] = (),
        limits: Mapping[str, Limit] | None = None,
        concurrency: int = 64,
        synchronous: Literal["full", "normal"] = "full",
        spill_bytes: int = 65536,
        lease_seconds: float = 30.0,
        grace_seconds: float = 10.0,
        fail_fast: bool = False,
        wake: bool = False,
        adopt: bool = False,
        debug: bool = False,
        clock: Clock | None = None,
        store: Store | None = None,
        observer: Observer | None = None,
    ) -> None:
        if concurrency < 1:
            raise DefinitionError(f"Engine(concurrency={concurrency!r}): give a whole number from 1 upwards.")
        self._clock = clock or SystemClock()
        self._store: Store = store or store_of(str(url), synchronous, adopt, self._clock)
        self._blobs = BlobStore(Path(self._store.name + ".blobs")) if self._store.persistent else None
        self._shelf = Shelf(self._store, self._blobs)
        self._artifacts = (
            str(Path(self._store.name + ".artifacts").absolute()) if self._store.persistent else None
        )
        self._limits, self._concurrency = dict(limits or {}), concurrency
        self._lease_seconds, self._grace, self._fail_fast, self._debug = (
            lease_seconds,
            grace_seconds,
            fail_fast,
            debug,
        )
        self._spill_bytes, self._wakes, self._watch = spill_bytes, wake, watch(observer)
        self._left_asleep: dict[str, int] = {}  # runs that could not be woken, and when they changed last
        self._sweep = Sweep(_Recovering(self))
        self._registered: dict[tuple[str, str], Workflow] = {}
        self._executors: dict[str, Executor] = {}
        self._runs: dict[str, Run | Rollback] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._session = 0
        self._open, self._left = False, True
        self._letters_after = 0
        for workflow in workflows:
            self.register(workflow)

    def __repr__(self) -> str:
        return f"Engine({without_passwords(self._store.name)!r}{'' if self._open else ', closed'})"

    # -- opening and closing --------------------------------------------------------------------------

    async def __aenter__(self) -> Engine:
        if self._open:
            raise DagresumeError(f"{self!r} is open already; make a second Engine for a second block.")
        if is_importing_main():
            raise DagresumeError(
                "a worker process imports the main script, and the script starts a run as it is imported."
                ' Put what starts it under `if __name__ == "__main__":`.'
            )
        self._journal = Journal(
            self._store,
            self._clock,
            more_to_come=lambda: self._pool.size - self._pool.free > 1,
            after_batch=lambda: start_ready(self._pool),
            on_cancel=self._taken_down,
            watch=self._watch,
        )
        self._pool = Pool(
            self._concurrency,
            self._limits,
            self._clock,
            full=self._journal.is_full,
            wake=self._start_soon,
            lapsed=self._lapsed,
        )
        self._services = Services(
            journal=self._journal,
            pool=self._pool,
            clock=self._clock,
            executor=self._executor,
            load=self._store.load,
            fetch=self._shelf.fetch,
            spill=self._shelf.spill,
            spill_bytes=self._spill_bytes if self._blobs else None,
            once=self._store.once,
            artifacts=self._artifacts,
            fail_fast=self._fail_fast,
            grace=self._grace,
            debug=self._debug,
            watch=self._watch,
        )
        self._written = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None
        lease, since = round(self._lease_seconds * 1e6), elapsed()
        self._session = await self._store.open(this_session(self._clock.now(), lease))
        self._writer = asyncio.create_task(self._keep_writing(), name="dagresume journal")
        try:
            await asyncio.sleep(0)  # cancelled before its first step it would take none: who would write?
        except BaseException:
            self._journal.close()
            await to_its_end(self._store.close())
            raise
        self._reader = asyncio.create_task(self._read_letters(), name="dagresume letters")
        self._waker = asyncio.create_task(self._wake_runs(), name="dagresume waker") if self._wakes else None
        renewed = partial(asyncio.get_running_loop().call_soon_threadsafe, self._look_at_runs)
        self._lease = Lease(self._store, self._clock, self._lease_seconds, renewed, since)
        self._open, self._left = True, False
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self._close()

    async def _close(self) -> None:
        """Leave to the end, whatever is cancelled meanwhile: a connection that stays open keeps the
        interpreter from ending.
        """
        cancelled: asyncio.CancelledError | None = None
        while not self._left:
            try:
                await self._leave()
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def _leave(self) -> None:
        """No new body, grace for those under way, then `interrupted`; what was returned is written. Each step
        can be made twice.
        """
        self._open = False
        if self._waker is not None:
            self._waker.cancel()
            await asyncio.wait([self._waker])
        for run in list(self._runs.values()):
            run.stop(RUN_INTERRUPTED, "shutdown", grace=self._grace)
        for run in list(self._runs.values()):
            await self._until_ended(run)
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._reader.cancel()
        await asyncio.wait([self._reader])
        self._journal.close()
        await self._written.wait()
        self._pool.close()
        self._lease.stop()
        for executor in self._executors.values():
            await executor.close()
        await self._store.close()
        self._left = True

    async def _keep_writing(self) -> None:
        await self._journal.write()
        self._written.set()
        if self._closing is not None:
            await asyncio.wait([self._closing])

    def _taken_down(self) -> None:
        """The loop ends and nobody has closed the engine: do it, so that nothing waits for ever."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="dagresume close")

    def _start_soon(self) -> None:
        asyncio.get_running_loop().call_soon(start_ready, self._pool)

    def _lapsed(self) -> bool:
        """Say whether somebody else may drive our runs by now; if so, have that looked at."""
        if not self._lease.lapsed:
            return False
        self._lease.hurry()
        return True

    def _look_at_runs(self) -> None:
        """The lease had lapsed and is renewed: look which runs are still ours."""
        self._in_background(self._prove_runs(), "ownership")

    async def _prove_runs(self) -> None:
        ours = [run for run in self._runs.values() if run.owned.run and not run.ended.done()]
        outcomes = await asyncio.gather(*(self._journal.commit(Unit(run.owned)) for run in ours))
        for run, outcome in zip(ours, outcomes, strict=True):
            ended = run.ended.done()  # meanwhile, by itself: then nobody owns it
            if isinstance(run, Run) and isinstance(outcome, Refused) and not ended:
                run.not_written(outcome, ())
        if not any(isinstance(outcome, StoreFailed) for outcome in outcomes):
            self._lease.prove()  # else the next renewal asks again
            start_ready(self._pool)

    def register(self, workflow: Workflow) -> None:
        """Let stored runs of this workflow (name and version) be resumed by this engine.

        It is checked and its code hashes are taken now; a DefinitionError says what is wrong with it.
        """
        self._program(workflow)
        self._registered[workflow.name, workflow.version] = workflow

    # -- running --------------------------------------------------------------------------------------

    async def run(
        self,
        wf: Workflow,
        inputs: Mapping[str, Any] | None = None,
        *,
        key: str | None = None,
        window: float | None = None,
        fresh: bool = False,
        wait: Wait = "timers",
        raise_on_failure: bool = True,
        source: Origin = "manual",
    ) -> RunResult:
        """Run a workflow and give its result; with a `key`, start its run, resume it, or give what it
        completed with.

        By the newest run of (workflow, key): none, cancelled or rolled back, or `fresh=True`: a new run.
        Alive: AlreadyRunning. Failed, interrupted, waiting: it is resumed. Completed: its stored result,
        nothing executed, unless it is older than `window` seconds. Raises RunFailed, RunCancelled,
        RunInterrupted unless `raise_on_failure=False`; InputsChanged, VersionMismatch and UncertainNode where
        going on needs a person's word. `source`: what starts it; a run started by a schedule or webhook is
        never resumed automatically (R26).
        """
        found = await self._begin(wf, inputs, key, window, fresh, Asked(wait), source)
        with self._lent_slot():
            result = found if isinstance(found, RunResult) else await self._attend(found)
        if raise_on_failure:
            raise_if_bad(result)
        return result

    async def start(
        self,
        wf: Workflow,
        inputs: Mapping[str, Any] | None = None,
        *,
        key: str | None = None,
        window: float | None = None,
        fresh: bool = False,
        source: Origin = "manual",
    ) -> RunHandle:
        """Do as `run` does, but return as soon as the run is durable; it goes on in the background."""
        found = await self._begin(wf, inputs, key, window, fresh, Asked(), source)
        if isinstance(found, RunResult):
            run_id, work = found.run_id, _given(found)
        else:
            run_id, work = found.run_id, self._attend(found)
        return RunHandle(self, run_id, self._in_background(work, run_id))

    @_reads
    async def resume(
        self,
        run_id: str,
        *,
        force: bool = False,
        budget: Budget | None = None,
        wait: Wait = "timers",
        raise_on_failure: bool = True,
    ) -> RunResult:
        """Run what is missing of a run: failed, cut-off and never-started paths, and what lies below them.

        `force`: take the present definition although it is not the one the run was started with. Raises
        UncertainNode, VersionMismatch, RunLocked, WorkflowNotRegistered where that needs a person's word. A
        completed run gives its stored result; a cancelled one raises RunCancelled.
        """
        return await self._go_on(run_id, Asked(wait, force=force, budget=budget), raise_on_failure)

    @_reads
    async def retry(
        self,
        run_id: str,
        from_node: str | Callable[..., Any] | None = None,
        *,
        only_changed: bool = False,
        only_failed: bool = False,
        code_changed: bool = False,
        force: bool = False,
        wait: Wait = "timers",
        raise_on_failure: bool = True,
    ) -> RunResult:
        """Run again, on a person's word, with a fresh retry budget.

        Without `from_node`: everything failed, interrupted, uncertain or held. With it: that path and all its
        descendants, non-idempotent ones too; what encloses it is evaluated again. Reopens a completed or
        cancelled run. `only_changed`: descendants only if what they receive differs; `only_failed`: of a map
        only its failed items, tolerated ones too, and what is below; `code_changed`, instead of a node: the
        paths whose code is another than when they ran, and what is below. With nothing to do, the stored
        result comes back. Raises DefinitionError for a path that is not there.
        """
        asked = Asked(
            wait, "" if from_node is None else from_node, only_changed, only_failed, code_changed, force
        )
        return await self._go_on(run_id, asked, raise_on_failure)

    @_reads
    async def rollback(
        self,
        run_id: str,
        to: str | Callable[..., Any] | None = None,
        *,
        accept_irreversible: bool = False,
    ) -> RunResult:
        """Undo what a run has completed, the last first, with the `compensate=` of its nodes.

        `to`: undo only what is below this node, and keep it. What has no `compensate=` and is idempotent is
        left as it is; Irreversible, and nothing undone, if something is not idempotent either, or is
        uncertain, unless that is accepted. An undo that fails (after its node's retries) does not keep the
        others from being tried: then the run stays `rolling_back`, `failures` of the result say why, and
        calling this again, or `resume`, goes on with what is missing. Else it is `rolled_back`: it cannot be
        resumed; what was kept by `to` can still be undone. Raises RunLocked if somebody drives the run.
        """
        undoing: Rollback | None = None
        while undoing is None:
            loaded = await self._unowned(run_id)
            if is_undone(loaded, to):
                return self._stored_result(loaded)
            undoing = await self._undo(loaded, to, accept_irreversible)
        with self._lent_slot():
            return await self._attend(undoing)

    async def recover(self, wait: bool = True) -> list[RecoveryOutcome]:
        """See to the runs that stopped without an end: their process died, or was shut down.

        Those of dead processes are marked `interrupted`. A run goes on if its workflow says
        `Recovery(auto_resume=True)` and nothing of R24 to R28 stands in the way; every decision is an event
        (`execution.auto_resume`, `execution.auto_resume.skipped` with its reason). Retry counts go on, open
        back-offs are waited out, what failed for good stays so. Call it when the application starts, and from
        time to time. `wait`: return once what goes on has ended; a cancelled caller leaves it running. An
        error of the store about one run is that run's outcome ("failed"); the next call tries it again.
        """
        self._check_open()
        with self._lent_slot():
            return await self._sweep.run(wait)

    @_reads
    async def fork(
        self,
        run_id: str,
        from_node: str | Callable[..., Any] | None = None,
        *,
        inputs: Mapping[str, Any] | None = None,
        key: str | None = None,
        wait: Wait = "timers",
        raise_on_failure: bool = True,
    ) -> RunResult:
        """Do again in a new run what `from_node` says and what is below it; the old run stays as it is.

        `inputs`: those that are to be other ones: what uses them runs again too, with what is below. What
        never completed runs; the rest is copied, outputs included. Raises UncertainNode if, outside
        `from_node`, nobody knows whether a path took effect.
        """
        asked = Asked(wait)
        loaded = await self._load(run_id)
        program, snapshot = self._program_of(loaded), Snapshot(loaded.records)
        await self._adopted(loaded, program, snapshot, force=False)
        before = await self._shelf.inputs(loaded)
        program.graph.check_inputs({**dict.fromkeys(before), **(inputs or {})})
        packed = before | program.pack_inputs(inputs or {})
        changed = {name for name in packed if before.get(name, ("", b""))[1] != packed[name][1]}
        start = program.path_of(from_node)
        copies = to_copy(program, snapshot, run_id, start, changed, self._clock.now())
        packed = dict(sorted(packed.items()))
        return await self._go_on(
            await self._create_fork(program, loaded, packed, copies, key, start), asked, raise_on_failure
        )

    # -- keeping --------------------------------------------------------------------------------------

    async def prune(
        self,
        *,
        older_than: Term = KEPT,
        failed_older_than: Term = FAILED_KEPT,
        status: str | Sequence[str] | None = None,
        workflow: str | None = None,
        dry_run: bool = False,
    ) -> Pruned:
        """Delete runs that ended long ago, with their events, logs, blobs and artifacts; says what is gone.

        `older_than` (a timedelta or seconds) is for completed, cancelled and rolled back runs, and
        `failed_older_than` for failed ones, both since they ended. `status` and `workflow` narrow that.
        Whatever is given, nothing is deleted that is pending, running, waiting, interrupted or rolling back.
        A deleted run frees its key; calls made once in a workflow (`ctx.once(…, scope="workflow")`) stay
        made. Short transactions: others go on meanwhile. A prune that was cut off is finished by the next
        one. `dry_run` only counts, exactly. Raises InputError for a term or status that means nothing.
        """
        self._check_open()
        terms = Terms.of(self._clock.now(), older_than, failed_older_than, status)
        return await prune(
            self._store, self._blobs, self._artifacts, self._clock, terms, workflow=workflow, dry_run=dry_run
        )

    async def metrics(self) -> Metrics:
        """Give how recoveries go and how long checkpoints take, over all runs that are stored, with alarms.

        The views `dagresume_metrics` and `dagresume_alarms` say the same to SQL.
        """
        self._check_open()
        return await measured(self._store)

    # -- asking ---------------------------------------------------------------------------------------

    @_reads
    async def plan_rollback(self, run_id: str, to: str | Callable[..., Any] | None = None) -> UndoPlan:
        """Give what a rollback would undo, in order, and what it cannot; executes and changes nothing."""
        loaded = await self._load(run_id)
        if is_undone(loaded, to):
            raise RolledBack(run_id)
        program = self._program_of(loaded)
        self._check_same(loaded, program)
        to = program.id_of(to) if callable(to) else to
        if to is None and loaded.row.status == RunStatus.ROLLING_BACK:
            before = begun(loaded.records)
            to = None if before is None else before.facts.get("to")
        return plan_undo(program.body, Snapshot(loaded.records), to)

    @_reads
    async def plan(self, run_id: str, *, items: bool = False, asked: Asked | None = None) -> list[Decision]:
        """Give what a resume would do with each path, and why; executes and changes nothing.

        `asked`: what somebody is about to ask for instead (`Asked(retry="score[3]")`); made by the same code
        as the retry.
        """
        loaded = await self._load(run_id)
        self._refuse_undone(loaded)
        program = self._program_of(loaded, force=asked is not None and asked.force)
        snapshot = Snapshot(loaded.records)
        await self._adopted(loaded, program, snapshot, force=True)
        before, other = snapshot.paths, other_code(program, snapshot)
        other |= {path[: path.rindex("[")] for path in other if path.endswith("]")}
        if asked is not None:
            before = snapshot.paths.copy()
            taken_up(program, snapshot, run_id, asked, self._clock.now())
        inputs = await self._shelf.inputs(loaded)
        digests = {name: digest for name, (_, digest) in inputs.items()}
        return plan(
            program.body,
            snapshot,
            digests,
            items=items,
            now=self._clock.now(),
            before=before,
            other_code=other,
        )

    @_reads
    async def explain(self, run_id: str, path: str | Callable[..., Any]) -> Explanation:
        """Give what happened to a path each time its run was driven, and why; needs no code."""
        return explain(await self._load(run_id), self._path_of(path))

    async def contrast(self, first: str, second: str) -> Contrast:
        """Give what differs between two runs: definition, inputs, statuses, outputs by digest, times, usage;
        needs no code.
        """
        from dagresume.contrast import contrast  # loaded by those who look, not by those who run

        async with self._reading(first), self._reading(second):
            loaded = [await self._load(run_id) for run_id in (first, second)]
            inputs = [self._shelf.packed_inputs(each) for each in loaded]
            found = contrast(loaded[0], loaded[1], (inputs[0], inputs[1]))
            return found.masked([self._mask_of(each) for each in loaded])

    @_reads
    async def get(self, run_id: str, at: int | None = None, *, nodes: bool = True) -> RunInfo:
        """Give a run with the state of each of its paths; needs no code. `at`: as it was after the event of
        this seq. Without `nodes` only what `runs` tells of it, which reads no journal.
        """
        if not nodes and at is None:
            return readable_info(*await self._find(run_id))
        loaded = await self._load(run_id)
        if at is not None:
            return past_info(loaded, at)
        return run_info(loaded.row, loaded.holder, loaded)

    @_reads
    async def overview(self, run_id: str, *, timeline: bool = False) -> Overview:
        """Give a run at a glance: its nodes, its items counted, the sentence that says how it is; with its
        `timeline` if asked. Needs no code.
        """
        from dagresume.overview import overview  # loaded by those who look, not by those who run

        return overview(await self._load(run_id), self._clock.now(), drawn=timeline)

    async def runs(
        self,
        *,
        workflow: str | None = None,
        status: str | Sequence[str] | None = None,
        key: str | None = None,
        limit: int = 100,
        before: str | None = None,
        starting: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> list[RunInfo]:
        """Give the newest runs that match, letter by letter. `before`: those older than this run id;
        `starting`: those whose id begins so; `since`, `until`: those started then or later, and before that.
        """
        self._check_open()
        wanted = wanted_statuses(status)
        older = None if before is None else (await self._find(before))[0].run
        find = partial(
            self._store.find, workflow=workflow, key=key, status=stored_as(wanted), starting=starting,
            since=None if since is None else to_micros(since),
            until=None if until is None else to_micros(until),
        )  # fmt: skip
        infos: list[RunInfo] = []
        # A run whose owner died is stored as running: of what is found, some may not be wanted.
        while len(infos) < limit:
            found = await find(before=older, limit=limit)
            read = [readable_info(row, holder) for row, holder in found]
            infos += read if wanted is None else [info for info in read if info.status in wanted]
            if len(found) < limit or wanted is None:
                break
            older = found[-1][0].run
        return infos[:limit]

    @_reads
    async def result(self, run_id: str) -> RunResult:
        """Give the result of a stored run; executes nothing."""
        loaded = await self._load(run_id)
        run = self._runs.get(run_id)
        if run is not None and not run.ended.done():
            raise RunLocked(run_id, "this process")
        return self._stored_result(loaded)

    async def events(
        self,
        run_id: str | None = None,
        *,
        after: int = 0,
        follow: bool = False,
        kinds: Sequence[str] | None = None,
    ) -> AsyncIterator[Event]:
        """Give the events of a run, or of all, in order; with `follow` go on with those to come.

        `kinds`: only these, such as "execution.auto_resume.skipped".
        """
        self._check_open()
        number = 0 if run_id is None else (await self._find(run_id))[0].run
        while True:
            page = await self._store.tail(after, run_id=run_id, kinds=kinds)
            for of, record in page:
                after = record.seq or after
                yield readable_event(of, record)
            if not page and not follow:
                return
            if not page:
                await anyio.sleep(POLL)
                if run_id is not None:
                    await self._check_there(run_id, number)

    async def _check_there(self, run_id: str, number: int) -> None:
        """Raise RunNotFound if a run was pruned meanwhile."""
        found = await self._store.find(before=number + 1, limit=1)
        if not found or found[0][0].run != number:
            raise RunNotFound(run_id, self._store.name)

    async def logs(self, run_id: str, *, after: int = 0, limit: int = 1000) -> list[tuple[int, LogLine]]:
        """Give (number, line) of what the nodes of a run logged, in order, those after a number."""
        await self._find(run_id)
        found = await self._store.logs(run_id, after=after, limit=limit)
        if flaw := next(filter(None, (line_flaw(line) for _, line in found)), None):
            raise unreadable(run_id, flaw)
        return found

    @_reads
    async def cancel(self, run_id: str, by: str = "") -> None:
        """Cancel a run: at once if this engine drives it or nobody does, else by a letter to its owner."""
        self._check_open()
        run = self._runs.get(run_id)
        if run is not None and not run.ended.done():
            run.stop(RUN_CANCELLED, "cancelled", by)
            if run.within:  # a body that cancels its own run cannot wait for its own end
                return
            await self._until_ended(run)
            if run.status not in {RunStatus.WAITING, RunStatus.INTERRUPTED}:
                return  # else it was being let go of already
        loaded = await self._load(run_id)
        if RunStatus(loaded.row.status).final or loaded.row.status == RunStatus.ROLLING_BACK:
            return
        letter = run_record(CANCEL_REQUESTED, self._clock.now(), None, by=by)
        if loaded.holder is not None and loaded.holder.alive:
            await self._write(Unit(Inbox(loaded.row.run), [letter]))
            if (await self._load(run_id)).holder is None:  # it was let go of meanwhile: nobody reads that
                await self.cancel(run_id, by)
            return
        now = self._clock.now()
        waits = [
            wait_cancelled(path, record.attempt, now)
            for path, record in Snapshot(loaded.records).paths.items()
            if record.kind == WAITING and record.reason != HELD
        ]
        ended = run_record(RUN_CANCELLED, now, "cancelled", by=by)
        outcome = await self._journal.commit(
            Unit(
                Claim(loaded.row.run, self._session, _last(loaded), takes_key=False), [letter, *waits, ended]
            )
        )
        if isinstance(outcome, Refused):
            await self.cancel(run_id, by)  # somebody was quicker: look again
        elif not isinstance(outcome, Committed):
            raise _store_error(outcome)

    @_reads
    async def decide(
        self,
        run_id: str,
        path: str | Callable[..., Any],
        approve: bool = True,
        by: str = "",
        comment: str = "",
    ) -> None:
        """Record a person's word about an approval, or about a path that is held; runs nothing.

        Durable when it returns. The run goes on within a second in the engine that drives it, else in one
        with `wake=True`, else by `resume`. The first word wins: the same one again is accepted, another
        raises AlreadyDecided. NotWaiting if nothing waits there.
        """
        path = self._path_of(path)
        while True:
            loaded = await self._load(run_id)
            comment = self._mask_of(loaded).text(comment)
            unit = decision(loaded, path, approve, by, comment, self._clock.now())
            if unit is None or await self._post(run_id, unit):
                return

    @_reads
    async def signal(self, run_id: str, event: str, payload: Any = None) -> None:
        """Tell a run that something happened: the first node that waits for this event takes it, now or
        later.
        """
        loaded = await self._load(run_id)
        await self._post(run_id, signal(loaded, event, payload, self._clock.now()))

    @_reads
    async def resolve(
        self,
        run_id: str,
        path: str | Callable[..., Any],
        *,
        output: Any = UNSAID,
        failed: str | None = None,
        by: str = "",
    ) -> None:
        """Say what an uncertain path did: it completed with `output`, or it `failed` for this reason.

        Durable when it returns; `resume` goes on with it. NotWaiting if the path is not uncertain.
        """
        if (output is UNSAID) == (failed is None):
            raise InputError(
                f"run {run_id}, {path}: say either output=… (it took effect; None is an output too) or"
                " failed='why' (it did not)."
            )
        path = self._path_of(path)
        while True:
            loaded = await self._load(run_id)
            if loaded.holder is not None and loaded.holder.alive:
                raise RunLocked(run_id, str(loaded.holder), to_datetime(loaded.holder.started_at))
            wf = self._registered.get((loaded.row.workflow, loaded.row.version))
            vertex = None if wf is None else self._program(wf).body.at(path)
            types = codec.EMPTY if vertex is None else vertex.types
            idempotent = False if vertex is None else vertex.idempotent
            now = self._clock.now()
            failed = None if failed is None else self._mask_of(loaded).text(failed)
            if await self._post(run_id, resolved(loaded, path, output, failed, by, now, types, idempotent)):
                return

    async def _post(self, run_id: str, unit: Unit) -> bool:
        """Write a letter and bring it to the run if this engine drives it; False if somebody was quicker."""
        outcome = await self._journal.commit(unit)
        if isinstance(outcome, Refused):
            return False
        if not isinstance(outcome, Committed):
            raise _store_error(outcome)
        run = self._runs.get(run_id)
        if run is not None:
            run.letter(unit.records[0]._replace(seq=outcome.seq, output=None))
        return True

    @staticmethod
    def _path_of(path: str | Callable[..., Any]) -> str:
        return path if isinstance(path, str) else str(getattr(path, "__name__", path))

    # -- beginning a run ------------------------------------------------------------------------------

    async def _begin(
        self,
        wf: Workflow,
        inputs: Mapping[str, Any] | None,
        key: str | None,
        window: float | None,
        fresh: bool,
        asked: Asked,
        source: Origin,
    ) -> Run | Rollback | RunResult:
        self._check_open()
        if source not in ORIGINS:
            raise InputError(f"source={source!r}: one of {', '.join(ORIGINS)}.")
        _check_key(key, window)
        program = self._program(wf)
        self.register(wf)
        packed = program.pack_inputs(program.graph.check_inputs(inputs))
        while True:
            newest = None
            if key is not None:
                found = await self._store.find(workflow=wf.name, key=key, limit=1)
                newest = found[0] if found else None
                if newest is not None and self._is_stray(*newest):
                    await self._disown(newest[0].run_id)
                    continue
            alive = newest is not None and (newest[1] is not None and newest[1].alive)
            if newest is None or (fresh and not alive) or self._is_free(newest[0], window):
                found_or_made: Run | Rollback | RunResult | None = await self._create(
                    program, packed, key, newest[0].run if newest else None, asked, source
                )
            else:
                async with self._reading(newest[0].run_id):
                    found_or_made = await self._take_up(program, packed, *newest, asked)
            if found_or_made is not None:
                return found_or_made

    def _is_free(self, row: RunRow, window: float | None) -> bool:
        """Say whether the key of this run is free for a new one."""
        status = RunStatus(row.status)
        if not row.holds_key:
            return True  # a newer run had taken it, and was pruned
        if status is RunStatus.COMPLETED:
            age = (self._clock.now() - (row.finished_at or row.updated_at)) / 1e6
            return window is not None and age > window
        return status.final

    async def _create(
        self,
        program: Program,
        packed: Mapping[str, tuple[str, bytes]],
        key: str | None,
        saw: int | None,
        asked: Asked,
        source: Origin,
    ) -> Run | None:
        run_id = _uuid7(self._clock.now())
        run = self._make(program, run_id, Snapshot(), packed, asked)
        guard, facts = await self._first(program, run_id, packed, key, saw, source)
        created = run_record(RUN_CREATED, self._clock.now(), None, **facts)
        outcome = await self._open_run(run, guard, [created], program.definition)
        if isinstance(outcome, Refused):
            return None  # somebody started a run with this key meanwhile: look again
        return run

    async def _first(
        self,
        program: Program,
        run_id: str,
        packed: Mapping[str, tuple[str, bytes]],
        key: str | None,
        saw: int | None,
        source: str,
    ) -> tuple[NewRun, dict[str, Any]]:
        """Give the guard that makes a run and the facts of its first record."""
        text = inputs_text(packed)
        facts: dict[str, Any] = {"codes": program.codes}
        facts["inputs"] = {name: digest.hex() for name, (_, digest) in packed.items()}
        facts |= {"secrets": sorted(program.graph.secrets)} if program.graph.secrets else {}
        if self._blobs is not None and len(text) > self._spill_bytes:
            facts["inputs_blob"] = await self._shelf.spill(run_id, text)
            text = "{}"
        graph, digest = program.graph, inputs_digest(packed)
        guard = NewRun(run_id, graph.workflow, graph.version, key, saw, self._session, source, text, digest)
        return guard, facts

    async def _create_fork(
        self,
        program: Program,
        loaded: Loaded,
        packed: Mapping[str, tuple[str, bytes]],
        copies: Sequence[Copy],
        key: str | None,
        start: str | None,
    ) -> str:
        """Make a run that has these records from its first unit on, for whoever claims it; gives its id."""
        old, run_id = loaded.row, _uuid7(self._clock.now())
        records = await self._brought(old.run_id, run_id, copies)
        while True:
            found = await self._store.find(workflow=old.workflow, key=key, limit=1) if key is not None else []
            row, holder = found[0] if found else (None, None)
            if row is not None and holder is not None and holder.alive:
                raise AlreadyRunning(row.run_id, str(holder), to_datetime(holder.started_at))
            guard, facts = await self._first(program, run_id, packed, key, row and row.run, "fork")
            guard = replace(guard, session=None, forked_from=old.run, forked_at_seq=_last(loaded))
            facts |= {"forked_from": old.run_id, "forked_at_seq": _last(loaded), "permitted": ["*"]}
            facts |= {"from": start} if start else {}
            created = run_record(RUN_CREATED, self._clock.now(), None, **facts)
            outcome = await self._journal.commit(Unit(guard, [created, *records], program.definition))
            if isinstance(outcome, Committed):
                return run_id
            if not isinstance(outcome, Refused):
                raise _store_error(outcome)

    async def _brought(self, old: str, new: str, copies: Sequence[Copy]) -> list[Record]:
        """Give copied records with their outputs; those in blobs are copied to the new run's own."""
        plain = [copy.output for copy in copies if copy.output is not None and copy.output.blob is None]
        texts = iter(await self._shelf.fetch(old, plain))
        records = []
        for record, output in copies:
            if output is None:
                records.append(record)
            elif output.blob is None:
                text = next(texts)
                records.append(record._replace(output=text, size=len(text)))
            else:
                (text,) = await self._shelf.fetch(old, [output])
                facts = record.facts | {"blob": await self._shelf.spill(new, text)}
                records.append(record._replace(data=json.dumps(facts)))
        return records

    async def _take_up(
        self,
        program: Program,
        packed: Mapping[str, tuple[str, bytes]],
        row: RunRow,
        holder: Holder | None,
        asked: Asked,
    ) -> Run | Rollback | RunResult | None:
        """Go on with the newest run of a key, or give what it completed with."""
        if row.run_id in self._runs or (holder is not None and holder.alive):
            raise AlreadyRunning(
                row.run_id, str(holder), None if holder is None else to_datetime(holder.started_at)
            )
        loaded = await self._store.load(row.run_id)
        if loaded is None:
            return None  # it was pruned meanwhile: look again
        snapshot = Snapshot(loaded.records)
        if snapshot.status is RunStatus.WAITING and snapshot.cancel_by is not None:
            await self.cancel(row.run_id, snapshot.cancel_by)
            return None
        stored = await self._shelf.inputs(loaded)
        if row.inputs_digest != inputs_digest(packed):
            names = [n for n in {**stored, **packed} if stored.get(n, (0, 0))[1] != packed.get(n, (0, 0))[1]]
            raise InputsChanged(row.workflow, row.key or "", row.run_id, names)
        if row.status == RunStatus.COMPLETED:
            return self._stored_result(loaded)
        changed, moves = await self._adopted(loaded, program, snapshot, force=False)
        records = taken_up(program, snapshot, row.run_id, asked, self._clock.now())
        records[1:1] = moves
        try:
            if row.status == RunStatus.ROLLING_BACK:
                return await self._undo(loaded)
            return await self._claim(loaded, program, snapshot, stored, asked, records, changed)
        except RunLocked as locked:
            raise AlreadyRunning(locked.run_id, locked.holder, locked.since) from None

    async def _go_on(self, run_id: str, asked: Asked, raise_on_failure: bool = True) -> RunResult:
        found = await self._taken(run_id, asked)
        if isinstance(found, RunResult):
            return found
        with self._lent_slot():
            result = await self._attend(found)
        if raise_on_failure:
            raise_if_bad(result)
        return result

    async def _taken(self, run_id: str, asked: Asked) -> Run | Rollback | RunResult:
        """Claim a stored run to go on with it, or give its result if there is nothing to go on with."""
        run: Run | Rollback | None = None
        while run is None:
            loaded = await self._unowned(run_id)
            snapshot = Snapshot(loaded.records)
            if loaded.row.status == RunStatus.ROLLING_BACK and asked.retry is None:
                run = await self._undo(loaded, asked=asked)
                continue
            stands = snapshot.status is RunStatus.WAITING or (asked.automatic and not snapshot.status.final)
            if stands and snapshot.cancel_by is not None:
                await self.cancel(run_id, snapshot.cancel_by)  # it came as the owner let go of the run
                continue
            if self._is_over(loaded, snapshot, asked):
                return self._stored_result(loaded)
            program = self._program_of(loaded, force=asked.force)
            changed, moves = await self._adopted(loaded, program, snapshot, force=asked.force)
            records = taken_up(program, snapshot, run_id, asked, self._clock.now())
            if loaded.row.status == RunStatus.COMPLETED and len(records) == 1:
                return self._stored_result(loaded)  # nothing was to be set back
            records[1:1] = moves
            inputs = await self._shelf.inputs(loaded)
            run = await self._claim(loaded, program, snapshot, inputs, asked, records, changed)
        return run

    def _is_over(self, loaded: Loaded, snapshot: Snapshot, asked: Asked) -> bool:
        """Say whether there is nothing to go on with: the stored result is all there is."""
        status = RunStatus(loaded.row.status)
        self._refuse_undone(loaded)
        if status is RunStatus.CANCELLED and asked.retry is None:
            raise RunCancelled(loaded.row.run_id, snapshot.cancel_by or "")
        return status is RunStatus.COMPLETED and not asked.reopens

    @staticmethod
    def _refuse_undone(loaded: Loaded) -> None:
        """Raise RolledBack if what the run had done was undone, or is being undone."""
        if loaded.row.status in {RunStatus.ROLLED_BACK, RunStatus.ROLLING_BACK}:
            under_way = loaded.row.status == RunStatus.ROLLING_BACK
            raise RolledBack(loaded.row.run_id, under_way=under_way)

    async def _unowned(self, run_id: str) -> Loaded:
        """Give a stored run that nobody drives, or raise RunLocked."""
        loaded = await self._load(run_id)
        if self._is_stray(loaded.row, loaded.holder):
            await self._disown(run_id)
            loaded = await self._load(run_id)
        if run_id in self._runs or (loaded.holder is not None and loaded.holder.alive):
            since = None if loaded.holder is None else to_datetime(loaded.holder.started_at)
            raise RunLocked(run_id, str(loaded.holder or "this process"), since)
        return loaded

    async def _undo(
        self,
        loaded: Loaded,
        to: str | Callable[..., Any] | None = None,
        accept: bool = False,
        asked: Asked = PERSON,
    ) -> Rollback | None:
        """Take a run over to roll it back, or to go on with that; None if it was written to meanwhile."""
        row, services = loaded.row, self._services
        program = self._program_of(loaded)
        self._check_same(loaded, program)
        to = program.id_of(to) if callable(to) else to
        now, snapshot = self._clock.now(), Snapshot(loaded.records)
        records = [
            opening(program.body, loaded, to, accept, now, counted(snapshot, asked)),
            *audited(snapshot, asked, now),
        ]
        nobodys, context = Owned(0, self._session, 0), copy_context()
        mask = self._mask_of(loaded, program)
        undoing = Rollback(services, program.body, row.run_id, row.workflow, nobodys, context, mask)
        undoing.carrier = snapshot.carrier
        guard = Claim(row.run, self._session, _last(loaded), takes_key=False)
        outcome = await self._open_run(undoing, guard, records, None)
        if isinstance(outcome, Refused):
            return self._refused(loaded, outcome)
        return undoing

    async def _claim(
        self,
        loaded: Loaded,
        program: Program,
        snapshot: Snapshot,
        inputs: Mapping[str, tuple[str, bytes]],
        asked: Asked,
        records: list[Record],
        changed: bool,
    ) -> Run | None:
        """Take a run over and decide all that can be decided, in one commit; None if it was written to
        meanwhile.
        """
        run_id = loaded.row.run_id
        run = self._make(program, run_id, snapshot, inputs, asked)
        guard = Claim(loaded.row.run, self._session, _last(loaded))
        outcome = await self._open_run(run, guard, records, program.definition if changed else None)
        if isinstance(outcome, Refused):
            return self._refused(loaded, outcome)
        return run

    @staticmethod
    def _refused(loaded: Loaded, refused: Refused) -> None:
        """Raise what a refused claim means; return if looking again may help."""
        since = None if refused.holder is None else to_datetime(refused.holder.started_at)
        if refused.reason == "key_taken":
            raise AlreadyRunning(refused.run_id or "", str(refused.holder or "a newer run of its key"), since)
        if refused.reason == "locked":
            raise RunLocked(loaded.row.run_id, str(refused.holder), since)

    def _make(
        self,
        program: Program,
        run_id: str,
        snapshot: Snapshot,
        inputs: Mapping[str, tuple[str, bytes]],
        asked: Asked,
    ) -> Run:
        return Run(
            self._services,
            program.body,
            run_id=run_id,
            workflow=program.graph.workflow,
            session=self._session,
            snapshot=snapshot,
            inputs=inputs,
            mask=_mask(program.graph.secrets | snapshot.secrets, inputs),
            timeout=program.graph.timeout,
            budget=program.graph.budget,
            on_failure=program.graph.on_failure,
            patience=asked.wait,
            automatic=asked.automatic is not None,
        )

    async def _open_run(
        self, run: Run | Rollback, guard: NewRun | Claim, records: list[Record], definition: Definition | None
    ) -> Committed | Refused:
        """Write the unit that makes or claims a run; from then on it is ours to attend."""
        self._check_open()  # it may have been closed while the store was asked
        if run.run_id in self._runs:  # and somebody else here been quicker
            raise RunLocked(run.run_id, "this process")
        if self._watch is not None and (carrier := self._watch.opens(run, run.carrier)):
            facts = records[0].facts | {"carrier": dict(carrier)}
            records = [records[0]._replace(data=json.dumps(facts)), *records[1:]]
        opening = run.open(guard, records, definition)
        self._runs[run.run_id] = run
        try:
            outcome = await to_its_end(opening)
        except asyncio.CancelledError:
            run.stop(RUN_INTERRUPTED, "cancelled")
            if run.owned.run:
                await to_its_end(self._attended(run))
            self._let_go(run)
            raise
        if isinstance(outcome, Committed):
            return outcome
        self._let_go(run)
        if isinstance(outcome, Refused):
            return outcome
        with contextlib.suppress(DagresumeError):  # then whoever comes upon it does
            await self._disown(run.run_id)
        raise _store_error(outcome)

    def _let_go(self, run: Run | Rollback) -> None:
        """Attend to a run no more."""
        if self._runs.get(run.run_id) is run:
            del self._runs[run.run_id]

    def _is_stray(self, row: RunRow, holder: Holder | None) -> bool:
        """Say whether a run is ours in the store and nobody here drives it: a commit that was reported to
        have failed was written after all.
        """
        ours = holder is not None and holder.session == self._session
        return (
            ours
            and row.status in {RunStatus.RUNNING, RunStatus.ROLLING_BACK}
            and row.run_id not in self._runs
        )

    async def _disown(self, run_id: str) -> None:
        """Let go of a run if it is ours and nobody here drives it."""
        loaded = await self._store.load(run_id)
        if loaded is None or not self._is_stray(loaded.row, loaded.holder):
            return
        row, now = loaded.row, self._clock.now()
        kind = RUN_INTERRUPTED if row.status == RunStatus.RUNNING else RUN_ROLLING_BACK
        unit = Unit(Owned(row.run, self._session, row.epoch), [run_record(kind, now, "not_stored")])
        outcome = await self._journal.commit(unit)
        if isinstance(outcome, StoreFailed):
            raise _store_error(outcome)

    # -- attending to it ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _lent_slot(self) -> Iterator[None]:
        """A body that waits for another run lends it its slot: else they could wait for each other."""
        job = CURRENT.get()
        if job is None or job.run.services is not self._services or job.task is not asyncio.current_task():
            yield
            return
        self._pool.free += 1
        self._start_soon()
        try:
            yield
        finally:
            self._pool.free -= 1

    async def _attend(self, run: Run | Rollback) -> RunResult:
        """Wait for the end of a run; if the caller is cancelled, the run is interrupted first."""
        try:
            await asyncio.shield(run.ended)
        except asyncio.CancelledError:
            run.stop(RUN_INTERRUPTED, "cancelled")
            await to_its_end(self._attended(run))
            raise
        return await to_its_end(self._attended(run)) if run.error is not None else self._found(run)

    async def _attended(self, run: Run | Rollback) -> RunResult:
        await self._until_ended(run)
        if run.error is not None:
            self._let_go(run)
            if isinstance(run, Run) and run.undoing is None:
                await self._last_words(run)
            if isinstance(run.error, StoreError) and run.failures:
                raise RunFailed(run.run_id, run.failures) from run.error
            raise run.error
        return self._found(run)

    def _found(self, run: Run | Rollback) -> RunResult:
        """Give the result of a run that has ended, and whose end is stored."""
        self._let_go(run)
        undoing = run if isinstance(run, Rollback) else run.undoing
        if undoing is not None:
            return undone_result(self._stored_result, self._clock.monotonic(), run, undoing)
        assert isinstance(run, Run)
        if run.lost:
            raise run.lost[0]
        return live_result(run, partial(self._shelf.fetch_now, run.run_id), self._clock.monotonic())

    async def _until_ended(self, run: Run | Rollback) -> None:
        """Wait for the end of a run; a cancelled caller waits with it."""
        await asyncio.wait([run.ended])

    async def _last_words(self, run: Run) -> None:
        """The store failed the run: say so in it, if it can be written again."""
        if isinstance(run.error, OwnershipError) or not run.owned.run:
            return
        now = self._clock.now()
        records = []
        for path, failure in run.failures.items():
            if failure.reason != "not_stored":
                continue  # it was written before
            vertex = run.body.at(path)
            idempotent = vertex is None or vertex.idempotent
            kind = FAILED if idempotent else INTERRUPTED  # its effect may have happened
            facts = {"type": failure.type, "message": failure.message, "traceback": failure.traceback}
            records.append(node_record(kind, path, failure.attempt, now, "not_stored", **facts))
        records.append(run_record(RUN_FAILED if run.failures else RUN_INTERRUPTED, now, "not_stored"))
        with contextlib.suppress(Exception):
            await self._journal.commit(Unit(run.owned, records))

    def _stored_result(self, loaded: Loaded) -> RunResult:
        """Give the result of a run from what is stored of it."""
        known = self._registered.get((loaded.row.workflow, loaded.row.version))
        program = None if known is None else self._program(known)
        mask = self._mask_of(loaded, program)
        return stored_result(loaded, program, partial(self._shelf.fetch_now, loaded.row.run_id), mask)

    def _mask_of(self, loaded: Loaded, program: Program | None = None) -> Mask:
        return self._shelf.mask(loaded, frozenset() if program is None else program.graph.secrets)

    # -- what runs need -------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if not self._open:
            raise EngineClosed

    def _program(self, wf: Workflow) -> Program:
        graph = wf.compiled
        program: Program | None = graph.program
        if program is None:
            program = graph.program = Program(graph)
        return program

    def _program_of(self, loaded: Loaded, *, force: bool = False) -> Program:
        """Give the code that a stored run means, or say what to register."""
        row = loaded.row
        wf = self._registered.get((row.workflow, row.version))
        if wf is None:
            others = [wf for (name, _), wf in self._registered.items() if name == row.workflow]
            if not others:
                raise WorkflowNotRegistered(row.run_id, row.workflow, row.version)
            newer = [wf for wf in others if row.version in wf.migrations]
            wf = (newer or others)[-1]
            if not force and not newer:
                text = describe(wf.compiled).graph
                raise VersionMismatch(row.run_id, row.workflow, differences(loaded.graph, text))
        return self._program(wf)

    async def _adopted(
        self, loaded: Loaded, program: Program, snapshot: Snapshot, *, force: bool
    ) -> tuple[bool, list[Record]]:
        """Say whether the definition is another than the run's, and give the records of its migration, which
        are applied. VersionMismatch if there is none, unless a person forces it.
        """
        row, graph = loaded.row, program.graph
        if program.is_of(loaded.graph):
            return False, []
        migration = graph.migrations.get(row.version)
        if migration is None or row.version == graph.version:
            if not force:
                self._check_same(loaded, program)
            return True, []
        moves = migrated(program, snapshot, loaded.graph, migration, self._clock.now())
        old = [move.old for move in moves if move.old is not None]
        texts = iter(await self._shelf.fetch(row.run_id, old))
        records = [
            move.record if move.old is None else transformed(move, next(texts), program) for move in moves
        ]
        take_over(snapshot, records, migration.rename)
        return True, records

    @staticmethod
    def _check_same(loaded: Loaded, program: Program) -> None:
        """Raise VersionMismatch, with the differences, if the run was started with another definition."""
        if not program.is_of(loaded.graph):
            found = differences(loaded.graph, program.definition.graph)
            raise VersionMismatch(loaded.row.run_id, loaded.row.workflow, found)

    def _executor(self, name: str) -> Executor:
        found = self._executors.get(name)
        if found is None:
            found = self._executors[name] = executor_of(name, self._concurrency)
        return found

    @contextlib.asynccontextmanager
    async def _reading(self, run_id: str) -> AsyncIterator[None]:
        """Say what is wrong with a stored run where it cannot be read."""
        try:
            yield
        except UNREADABLE as error:
            if isinstance(error, DagresumeError) or not self._open:
                raise
            loaded = await self._store.load(run_id)
            explain_flaw(run_id, None if loaded is None else run_flaw(loaded), error)
            raise

    async def _find(self, run_id: str) -> tuple[RunRow, Holder | None]:
        """Give the row of a run without its journal."""
        self._check_open()
        found = [
            each for each in await self._store.find(starting=run_id, limit=2) if each[0].run_id == run_id
        ]
        if not found:
            raise RunNotFound(run_id, self._store.name)
        return found[0]

    async def _load(self, run_id: str) -> Loaded:
        self._check_open()
        loaded = await self._store.load(run_id)
        if loaded is None:
            raise RunNotFound(run_id, self._store.name)
        return loaded

    async def _write(self, unit: Unit) -> Committed:
        outcome = await self._journal.commit(unit)
        if isinstance(outcome, Committed):
            return outcome
        raise _store_error(outcome)

    async def _read_letters(self) -> None:
        """Look for letters that other processes wrote to runs of ours."""
        seen = None
        while True:
            await asyncio.sleep(POLL)
            if not self._runs:
                continue
            with contextlib.suppress(StoreError):  # said by whoever writes next
                now = await self._store.changed()
                if now != seen:
                    seen = now if await self._open_letters() else None

    async def _wake_runs(self) -> None:
        """Go on with waiting runs whose letter or time has come, if this engine knows their workflow."""
        while True:
            await asyncio.sleep(2 * POLL)
            with contextlib.suppress(StoreError):  # looked at again in a moment
                found = await self._store.find(status=[RunStatus.WAITING], due=self._clock.now(), limit=100)
                for row, _ in found:
                    known = (row.workflow, row.version) in self._registered
                    if (
                        known
                        and row.run_id not in self._runs
                        and self._left_asleep.get(row.run_id) != row.updated_at
                    ):
                        self._left_asleep[row.run_id] = row.updated_at
                        self._in_background(self._woken(row), row.run_id)

    async def _woken(self, row: RunRow) -> None:
        try:
            await self._go_on(row.run_id, Asked("none", automatic="wake"), raise_on_failure=False)
        except DagresumeError as error:  # left to a person, or somebody was quicker
            log.warning("a waiting run is left asleep", run=row.run_id, why=str(error))
        else:
            self._left_asleep.pop(row.run_id, None)

    def _in_background(self, work: Coroutine[Any, Any, T], run_id: str) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=f"dagresume run {run_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_seen)
        return task

    async def _open_letters(self) -> bool:
        """Bring new letters to their runs. False: one may be for a run that is not known to be ours yet."""
        oldest = min((run.claimed_at for run in self._runs.values()), default=0)
        after = max(self._letters_after, oldest)
        while page := await self._store.tail(after, kinds=LETTERS):
            for run_id, letter in page:
                after = letter.seq or after
                run = self._runs.get(run_id)
                if run is not None and run.claimed_at and after > run.claimed_at:
                    run.letter(letter)
        if not all(run.claimed_at for run in self._runs.values()):
            return False  # they are brought again: a run looks at each letter once
        self._letters_after = after
        return True


class _Recovering:
    """What a sweep of `recover` needs of an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.clock = engine, engine._clock

    async def stopped(self) -> list[tuple[RunRow, Holder | None]]:
        words = sorted(STOPPED)
        found = page = await self._engine._store.find(status=words, limit=PAGE)
        while len(page) == PAGE:
            page = await self._engine._store.find(status=words, before=page[-1][0].run, limit=PAGE)
            found = [*found, *page]
        return found

    async def load(self, run_id: str) -> Loaded | None:
        return await self._engine._store.load(run_id)

    def reading(self, run_id: str) -> contextlib.AbstractAsyncContextManager[None]:
        return self._engine._reading(run_id)

    async def write(self, unit: Unit) -> Outcome:
        return await self._engine._journal.commit(unit)

    def code(self, row: RunRow) -> Code | None:
        known = self._engine._registered
        same = [wf for (name, _), wf in known.items() if name == row.workflow]
        wf = known.get((row.workflow, row.version)) or (same[-1] if same else None)
        return None if wf is None else Code(self._engine._program(wf), wf.recovery)

    async def is_driven(self, row: RunRow, holder: Holder | None) -> bool:
        if self._engine._is_stray(row, holder):
            await self._engine._disown(row.run_id)
        return row.run_id in self._engine._runs

    async def carry_out_cancel(self, run_id: str, by: str) -> None:
        await self._engine.cancel(run_id, by)

    async def take_up(self, run_id: str, asked: Asked) -> asyncio.Task[RunResult] | None:
        found = await self._engine._taken(run_id, asked)
        if isinstance(found, RunResult):
            return None
        return self._engine._in_background(self._engine._attend(found), run_id)


# -- pieces ---------------------------------------------------------------------------------------------


def _mask(names: frozenset[str], inputs: Mapping[str, tuple[str, bytes]]) -> Mask:
    return Mask(names, {name: text for name, (text, _) in inputs.items()}) if names else NO_SECRETS


def _check_key(key: str | None, window: float | None) -> None:
    if key is not None and (not isinstance(key, str) or len(key) > 1000):
        raise InputError(f"key={str(key)[:40]!r}: a text of at most 1,000 characters, or None.")
    if window is not None and (isinstance(window, bool) or not window >= 0):
        raise InputError(f"window={window!r}: seconds, 0 or more, or None.")


def _store_error(outcome: Outcome) -> BaseException:
    if isinstance(outcome, StoreFailed):
        return outcome.error
    return StoreError(f"the store did not take it: {outcome}")


def _last(loaded: Loaded) -> int:
    """Give the seq of a run's last record; a journal is loaded in its order."""
    return (loaded.records[-1].seq or 0) if loaded.records else 0


def _uuid7(microseconds: int) -> str:
    """Give a uuid that sorts by time (RFC 9562)."""
    value = (microseconds // 1000 & (1 << 48) - 1) << 80 | 0x7 << 76 | 0x2 << 62
    noise = int.from_bytes(os.urandom(10), "big") >> 6
    return str(uuid.UUID(int=value | (noise >> 62) << 64 | noise & (1 << 62) - 1))


async def _given(result: RunResult) -> RunResult:
    return result


def _seen(task: asyncio.Task[Any]) -> None:
    """Errors of a run that nobody asks for are in the store; asyncio need not mention them again."""
    if not task.cancelled():
        task.exception()
