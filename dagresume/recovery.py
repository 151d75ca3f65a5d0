"""What happens by itself to runs whose process died: they are marked, and go on where their definition says.

`judge` decides about one run and gives the reason in words; `Sweep` looks through the store, writes every
decision down as an event (R29) and takes up what goes on. What stands in the way of an automatic resume is
R22 to R28.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, Protocol

from dagresume.clock import Clock
from dagresume.codehash import UNKNOWN
from dagresume.definition import differences
from dagresume.errors import (
    AttemptsExhausted,
    BudgetExceeded,
    DagresumeError,
    OwnershipError,
    RunCancelled,
    StoreError,
    UncertainNode,
    VersionMismatch,
    WorkflowNotRegistered,
    listed,
)
from dagresume.events import (
    AUTO_RESUME_SKIPPED,
    HELD,
    RUN_INTERRUPTED,
    UNDO_FAILED_REASON,
    UNDO_STARTED,
    WAITING,
    Record,
    RunStatus,
    Snapshot,
    has_output,
    run_record,
    status_set_by,
)
from dagresume.observe import log
from dagresume.planner import is_body, uncertain_paths
from dagresume.policy import Recovery
from dagresume.program import Asked, Program
from dagresume.results import RunResult
from dagresume.store import (
    Committed,
    Holder,
    Inbox,
    Loaded,
    Orphaned,
    Outcome,
    RunRow,
    StoreFailed,
    Unit,
)

__all__ = ["Judgement", "RecoveryOutcome", "Sweep", "judge"]

OWNER_DIED: Final = "owner_died"
_SHOWN: Final = 20  # paths or nodes that an event names at most


@dataclass(frozen=True, slots=True)
class RecoveryOutcome:
    """What `Engine.recover` decided about one run, and why.

    `action`: "resumed" (`status` is how it ended, if that was waited for), "skipped" (left as it is: a person
    may go on with it), "cancelled" (a cancel that nobody had carried out) or "failed" (the store could not
    answer; the next sweep tries again). `reason` is a word for programs, `message` a sentence that says what
    to do. `attempt`: which automatic resume of the run this is, or would be. `paths`: those the reason is
    about.
    """

    run_id: str
    workflow: str
    action: Literal["resumed", "skipped", "cancelled", "failed"]
    reason: str
    message: str
    attempt: int = 0
    status: RunStatus | None = None
    paths: tuple[str, ...] = ()


class Code(NamedTuple):
    """What the engine knows of a run's workflow: how it may recover, and how it is run."""

    program: Program
    recovery: Recovery


class Judgement(NamedTuple):
    """Whether a run goes on by itself; if not, why, in a word and in a sentence."""

    resumes: bool
    reason: str
    message: str = ""
    paths: tuple[str, ...] = ()


# -- deciding -------------------------------------------------------------------------------------------


def judge(loaded: Loaded, snapshot: Snapshot, code: Code | None) -> Judgement:
    """Decide about a run that stopped without an end and that nobody drives."""
    row = loaded.row
    if code is None:
        unknown = WorkflowNotRegistered(row.run_id, row.workflow, row.version)
        return Judgement(False, "not_registered", str(unknown))
    for rule in _RULES:
        found = rule(loaded, snapshot, code)
        if found is not None:
            return found
    return Judgement(True, code.recovery.policy, "")


def _not_enabled(loaded: Loaded, snapshot: Snapshot, code: Code) -> Judgement | None:
    if not code.recovery.auto_resume:
        return _no(loaded, "not_enabled", "its workflow does not say Recovery(auto_resume=True)")
    if code.recovery.policy == "abort":
        return _no(loaded, "policy_abort", "its recovery policy is 'abort'")
    return None


def _superseded(loaded: Loaded, snapshot: Snapshot, code: Code) -> Judgement | None:
    """Whoever started a newer run of the key did not want this one any more."""
    if loaded.row.key is None or loaded.row.holds_key:
        return None
    return _no(loaded, "superseded", f"a newer run has taken its key {loaded.row.key!r}")


def _triggered(loaded: Loaded, snapshot: Snapshot, code: Code) -> Judgement | None:
    """R26: whoever triggered it triggers it again."""
    source = loaded.row.source
    if source in {"webhook", "schedule"}:
        return _no(loaded, f"triggered_by_{source}", f"it was started by a {source}")
    return None


def _stopped_for_a_reason(loaded: Loaded, snapshot: Snapshot, code: Code) -> Judgement | None:
    why = _RESTS.get((loaded.row.status, loaded.row.reason))
    if why is None:
        return None
    if loaded.row.reason == "budget":
        return Judgement(False, "budget", str(BudgetExceeded(loaded.row.run_id)))
    return _no(loaded, loaded.row.reason or "", why)


_RESTS: Final[Mapping[tuple[str, str | None], str]] = {
    (RunStatus.INTERRUPTED, "budget"): "its budget is used up",
    (RunStatus.INTERRUPTED, "checkpoint_lost"): "a stored output of it could not be read",
    (RunStatus.ROLLING_BACK, UNDO_FAILED_REASON): "an undo of it failed",
    (RunStatus.ROLLING_BACK, "cancelled"): "its rollback was cancelled",
}


def _waits_for_a_person(loaded: Loaded, snapshot: Snapshot, code: Code) -> Judgement | None:
    """R26."""
    if loaded.row.status == RunStatus.ROLLING_BACK:
        return None
    waiting = tuple(
        path
        for path, record in snapshot.paths.items()
        if record.kind == WAITING
        and record.reason in {"approval", HELD}
        and not _is_decided(record, snapshot)
    )
    if not waiting:
        return None
    word = f"`dagresume approve {loaded.row.run_id} {waiting[0]}` (or reject), then"
    return _no(loaded, "waiting_for_approval", f"{listed(waiting)} waits for a person", waiting, word)


def _is_decided(record: Record, snapshot: Snapshot) -> bool:
    word = snapshot.decisions.get(record.path or "")
    return word is not None and (word.seq or 0) > (record.seq or 0)


def _other_definition(loaded: Loaded, snapshot: Snapshot, code: Code) -> Judgement | None:
    """R26: the definition, or the code of a node."""
    graph, codes = code.program.definition.graph, code.program.codes
    if not code.program.is_of(loaded.graph):
        row = loaded.row
        other = VersionMismatch(row.run_id, row.workflow, differences(loaded.graph, graph))
        return Judgement(False, "definition_changed", str(other))
    if UNKNOWN in codes.values():
        changed = _nodes(code, {node for node, value in codes.items() if value == UNKNOWN})
        return _no(loaded, "code_unknown", f"nobody can tell whether the code of {changed} is the same")
    if codes != snapshot.codes:
        changed = _nodes(
            code, {n for n in {**codes, **snapshot.codes} if codes.get(n) != snapshot.codes.get(n)}
        )
        return _no(loaded, "code_changed", f"the code of {changed} changed since it was started")
    return None


def _nodes(code: Code, found: set[str]) -> str:
    """Name nodes; "*" stands for those that are not listed."""
    if "*" in found:
        found = found - {"*"} | {v.id for v in code.program.rules if v.id not in code.program.codes}
    return listed(tuple(sorted(found)))


def _exhausted(loaded: Loaded, snapshot: Snapshot, code: Code) -> Judgement | None:
    if snapshot.auto_resumes < code.recovery.max_attempts:
        return None
    spent = AttemptsExhausted(loaded.row.run_id, snapshot.auto_resumes)
    return Judgement(False, "attempts_exhausted", str(spent))


def _may_have_taken_effect(loaded: Loaded, snapshot: Snapshot, code: Code) -> Judgement | None:
    """R25: of what is not idempotent only what may have begun counts; from the start, all that did."""
    doubtful = tuple(uncertain_paths(code.program.body, snapshot))
    if loaded.row.status == RunStatus.ROLLING_BACK:
        doubtful = tuple(
            path for path, record in snapshot.undone.items() if _undo_cut_off(code, path, record)
        )
    if doubtful:
        uncertain = UncertainNode(loaded.row.run_id, doubtful)
        return Judgement(False, "not_idempotent", str(uncertain), doubtful)
    if code.recovery.policy == "resume_from_start" and loaded.row.status != RunStatus.ROLLING_BACK:
        done = tuple(path for path, record in snapshot.paths.items() if _has_had_effect(code, path, record))
        if done:
            told = f"to start over would repeat {listed(done)} (not idempotent)"
            return _no(loaded, "not_idempotent_completed", told, done)
    return None


def _has_had_effect(code: Code, path: str, record: Record) -> bool:
    vertex = code.program.body.at(path)
    began = has_output(record) or record.attempt is not None
    return vertex is not None and not vertex.idempotent and is_body(vertex, path) and began


def _undo_cut_off(code: Code, path: str, record: Record) -> bool:
    vertex = code.program.body.at(path)
    return record.kind == UNDO_STARTED and vertex is not None and not vertex.idempotent


_RULES: Final[Sequence[Callable[[Loaded, Snapshot, Code], Judgement | None]]] = (
    _not_enabled,
    _superseded,
    _triggered,
    _stopped_for_a_reason,
    _other_definition,
    _waits_for_a_person,
    _exhausted,
    _may_have_taken_effect,
)


def _no(loaded: Loaded, reason: str, why: str, paths: tuple[str, ...] = (), first: str = "") -> Judgement:
    verb = "rollback" if loaded.row.status == RunStatus.ROLLING_BACK else "resume"
    cure = f"{first} `dagresume {verb} {loaded.row.run_id}` goes on with it".strip()
    return Judgement(False, reason, f"run {loaded.row.run_id}: {why}; {cure}", paths)


# -- the sweep ------------------------------------------------------------------------------------------


class Drives(Protocol):
    """What a sweep needs of its engine."""

    clock: Clock

    async def stopped(self) -> list[tuple[RunRow, Holder | None]]:
        """Give the rows of all runs that are under way or stopped without an end."""

    async def load(self, run_id: str) -> Loaded | None:
        """Give a run with its journal."""

    def reading(self, run_id: str) -> AbstractAsyncContextManager[None]:
        """Say of a run that cannot be understood what is wrong with it, as an error of the store."""

    async def write(self, unit: Unit) -> Outcome:
        """Write a unit."""

    def code(self, row: RunRow) -> Code | None:
        """Give what is known of a run's workflow."""

    async def is_driven(self, row: RunRow, holder: Holder | None) -> bool:
        """Say whether this engine drives the run."""

    async def carry_out_cancel(self, run_id: str, by: str) -> None:
        """End a run that somebody has cancelled."""

    async def take_up(self, run_id: str, asked: Asked) -> asyncio.Task[RunResult] | None:
        """Claim a run and go on with it in the background; None if it has ended meanwhile."""


_Seen = tuple[RecoveryOutcome, asyncio.Task[RunResult] | None]


class Sweep:
    """Looks for runs that stopped without an end, and sees to each of them.

    It remembers what it left alone: such a run is looked at again once something has happened to it.
    """

    def __init__(self, engine: Drives) -> None:
        self._engine = engine
        self._left: dict[str, tuple[Any, RecoveryOutcome]] = {}

    async def run(self, wait: bool) -> list[RecoveryOutcome]:
        """Give what was decided about each run, the oldest first; `wait`: once what goes on has ended."""
        outcomes: list[RecoveryOutcome] = []
        under_way: list[tuple[int, asyncio.Task[RunResult]]] = []
        left, self._left = self._left, {}
        for row, holder in reversed(await self._engine.stopped()):
            found = await self._seen_to(row, holder, left)
            if found is None:
                continue
            outcome, task = found
            if task is not None:
                under_way.append((len(outcomes), task))
            outcomes.append(outcome)
        if wait and under_way:
            await asyncio.wait([task for _, task in under_way])
            for place, task in under_way:
                outcomes[place] = _ended(outcomes[place], task)
        return outcomes

    async def _seen_to(
        self, row: RunRow, holder: Holder | None, left: dict[str, tuple[Any, RecoveryOutcome]]
    ) -> _Seen | None:
        """See to one run; an error of the store is this run's alone."""
        if row.status == RunStatus.PENDING and row.updated_at > self._engine.clock.now() - UNCLAIMED:
            return None  # a fork, whose maker is about to claim it
        code = self._engine.code(row)
        mark = (
            row.status,
            row.updated_at,
            row.wake_at,
            row.epoch,
            None if code is None else id(code.program),
        )
        before = left.get(row.run_id)
        if before is not None and before[0] == mark:
            self._left[row.run_id] = before
            return before[1], None
        found: _Seen | None
        try:
            async with self._engine.reading(row.run_id):
                if await self._engine.is_driven(row, holder):
                    found = await self._running_here(row)
                elif holder is not None and holder.alive:
                    return None
                else:
                    found = await self._decide(row, code)
        except StoreError as error:
            log.warning("a run could not be recovered", run=row.run_id, why=str(error))
            found = RecoveryOutcome(row.run_id, row.workflow, "failed", "store_error", str(error)), None
        if found is not None and found[0].action == "skipped":
            self._left[row.run_id] = mark, found[0]
        return found

    async def _running_here(self, row: RunRow) -> _Seen:
        outcome = _skipped(row, Judgement(False, "running_here", "this engine drives it"))
        loaded = await self._engine.load(row.run_id)
        if loaded is not None and not _is_said(loaded.records, outcome.reason):
            await self._engine.write(Unit(Inbox(row.run), [self._skip(outcome)]))
        return outcome, None

    async def _decide(self, row: RunRow, code: Code | None) -> _Seen | None:
        loaded = await self._engine.load(row.run_id)
        if loaded is None or RunStatus(loaded.row.status) not in STOPPED:
            return None  # somebody was quicker
        if loaded.holder is not None and loaded.holder.alive:
            return None
        snapshot = Snapshot(loaded.records)
        if snapshot.cancel_by is not None:
            await self._engine.carry_out_cancel(row.run_id, snapshot.cancel_by)
            told = "somebody had cancelled it"
            return RecoveryOutcome(row.run_id, row.workflow, "cancelled", "cancelled", told), None
        judgement = judge(loaded, snapshot, code)
        attempt = snapshot.auto_resumes + 1
        if not judgement.resumes or code is None:
            outcome = _skipped(loaded.row, judgement, attempt)
            return (outcome, None) if await self._leave(loaded, outcome) else None
        if not await self._mark(loaded, ()):
            return None
        return await self._take_up(loaded.row, code, attempt)

    async def _take_up(self, row: RunRow, code: Code, attempt: int) -> _Seen | None:
        reason = code.recovery.policy
        told = f"it goes on by itself (attempt {attempt} of {code.recovery.max_attempts})"
        outcome = RecoveryOutcome(row.run_id, row.workflow, "resumed", reason, told, attempt)
        asked = Asked(automatic="recover", recovery=code.recovery)
        try:
            task = await self._engine.take_up(row.run_id, asked)
            return None if task is None else (outcome, task)  # somebody was quicker, and it is over
        except OwnershipError:
            return None  # somebody was quicker
        except RunCancelled as error:
            return replace(outcome, action="cancelled", reason="cancelled", message=str(error)), None
        except DagresumeError as error:
            if isinstance(error, StoreError):
                raise
            return replace(outcome, action="failed", reason=type(error).__name__, message=str(error)), None

    async def _leave(self, loaded: Loaded, outcome: RecoveryOutcome) -> bool:
        """Write down that a run is left to a person, once; False if somebody else has it now."""
        said = not _was_alive(loaded) and _is_said(loaded.records, outcome.reason)
        return await self._mark(loaded, () if said else (self._skip(outcome),))

    async def _mark(self, loaded: Loaded, records: Sequence[Record]) -> bool:
        """Write down that the owner of a run died, if that is not known yet; False if it has another one."""
        row = loaded.row
        if _was_alive(loaded):
            last = loaded.records[-1].at if loaded.records else row.updated_at
            died = run_record(RUN_INTERRUPTED, self._engine.clock.now(), OWNER_DIED, last_seen=last)
            unit = Unit(Orphaned(row.run, row.owner, row.epoch), [died, *records])
        else:
            unit = Unit(Inbox(row.run), records)
        if not unit.records:
            return True
        outcome = await self._engine.write(unit)
        if isinstance(outcome, StoreFailed):
            raise outcome.error
        return isinstance(outcome, Committed)

    def _skip(self, outcome: RecoveryOutcome) -> Record:
        facts: dict[str, Any] = {"message": outcome.message}
        if outcome.paths:
            facts["paths"] = list(outcome.paths[:_SHOWN])
        return run_record(AUTO_RESUME_SKIPPED, self._engine.clock.now(), outcome.reason, **facts)


STOPPED: Final = frozenset(
    {RunStatus.RUNNING, RunStatus.INTERRUPTED, RunStatus.ROLLING_BACK, RunStatus.PENDING}
)
UNCLAIMED: Final = 60_000_000  # microseconds after which a run that was made for a claim counts as left


def _was_alive(loaded: Loaded) -> bool:
    """Say whether the store still calls a run running."""
    return loaded.row.status == RunStatus.RUNNING


def _skipped(row: RunRow, judgement: Judgement, attempt: int = 0) -> RecoveryOutcome:
    status = RunStatus.INTERRUPTED if row.status == RunStatus.RUNNING else RunStatus(row.status)
    if judgement.reason == "running_here":
        status = RunStatus.RUNNING
    return RecoveryOutcome(
        row.run_id,
        row.workflow,
        "skipped",
        judgement.reason,
        judgement.message,
        attempt,
        status,
        judgement.paths,
    )


def _is_said(records: Sequence[Record], reason: str) -> bool:
    """Say whether this very decision was written down since the run stopped, or began."""
    for record in reversed(records):
        if (record.kind, record.reason) == (AUTO_RESUME_SKIPPED, reason):
            return True
        if record.path is None and status_set_by(record) is not None:
            return False
    return False


def _ended(outcome: RecoveryOutcome, task: asyncio.Task[RunResult]) -> RecoveryOutcome:
    if task.cancelled():
        return replace(outcome, status=RunStatus.INTERRUPTED)
    error = task.exception()
    if error is not None:
        return replace(outcome, action="failed", reason=type(error).__name__, message=str(error))
    return replace(outcome, status=task.result().status)
