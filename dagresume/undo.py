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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import Context as Variables
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from unicodedata import normalize

import anyio

from dagresume import codec
from dagresume import events as ev
from dagresume.context import Context, idempotency_key
from dagresume.errors import (
    CheckpointLost,
    DagresumeError,
    DefinitionError,
    Irreversible,
    LeaseLost,
    NodeTimeout,
    NotLoadable,
    OwnershipError,
    StoreError,
)
from dagresume.events import Record, RunStatus, Snapshot
from dagresume.executor import Call
from dagresume.feeds import PASSED
from dagresume.jobs import Job, Services
from dagresume.observe import log, tell
from dagresume.planner import Body, Vertex, is_body, resolution, uncertain, uncertain_paths
from dagresume.policy import NodeFailure, asked_to_wait
from dagresume.results import Stored
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
from dagresume.workflow import is_async, nearest

__all__ = ["ASKED", "Rollback", "UndoPlan", "begun", "opening", "plan_undo"]

ASKED: Final = "asked"
"""Reason of a rollback that a person began; else it is why the run failed."""
_NAMED: Final = 100  # paths that a record or the log names at most
_LAST: Final = 1 << 63  # after every record


# -- what will be undone --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UndoPlan:
    """What a rollback would do: `paths` are undone, in this order.

    `irreversible` are those that completed, are not idempotent and have no `compensate=`; `uncertain` those
    of which nobody knows whether they took effect. Both are left as they are.
    """

    paths: tuple[str, ...] = ()
    irreversible: tuple[str, ...] = ()
    uncertain: tuple[str, ...] = ()
    outputs: Mapping[str, Stored] = field(default_factory=dict, repr=False)


def plan_undo(body: Body, snapshot: Snapshot, to: str | None = None) -> UndoPlan:
    """Say what a rollback undoes, in which order, and what it cannot undo; `to`: only what is below there."""
    is_meant = _below(body, snapshot, to) if to is not None else _everything
    outputs: dict[str, Stored] = {}
    irreversible = []
    for path, record in snapshot.paths.items():
        vertex = body.at(path)
        if vertex is None or vertex.pure or not is_meant(path):
            continue
        found = _output(vertex, path, record, snapshot)
        if found is None:
            continue
        if vertex.node.compensate is not None and _is_whole(vertex, path):
            outputs[path] = found
        elif is_body(vertex, path) and not vertex.idempotent:
            irreversible.append(path)
    doubtful = uncertain_paths(body, snapshot, reconcile=False)
    return UndoPlan(
        tuple(_Order(body).of({path: found.seq for path, found in outputs.items()})),
        tuple(irreversible),
        tuple(p for p in doubtful if is_meant(p) and resolution(p, snapshot.paths[p], snapshot) is None),
        outputs,
    )


def _everything(_path: str) -> bool:
    return True


def _is_whole(vertex: Vertex, path: str) -> bool:
    """Say whether a path is what `compensate=` undoes: a node, an item of a map, a round of a loop."""
    return path.endswith("]") or not (vertex.is_map or vertex.is_loop)


def _output(vertex: Vertex, path: str, record: Record, snapshot: Snapshot) -> Stored | None:
    """Give where the output of a path that took effect lies, None if it did not.

    It stands in the record that was written when the path completed: what came after that (the item moved,
    what it gave was kept) does not change the order of completion.
    """
    if record.kind == ev.COMPLETED:
        return None if record.reason == PASSED else Stored.of(record)
    kept = record.facts.get("kept") if (record.kind, record.reason) == (ev.WAITING, ev.HELD) else None
    if kept is not None:
        return Stored(path, kept["seq"], bytes.fromhex(kept["digest"]), kept.get("blob"))
    word = resolution(path, record, snapshot) if uncertain(record, vertex.idempotent) else None
    if word is None or word.facts.get("failed") is not None:
        return None
    return Stored(path, word.seq or 0, word.digest or b"")


def _below(body: Body, snapshot: Snapshot, to: str) -> Callable[[str], bool]:
    """Give the question whether a path comes after another one: after it, or after something around it."""
    names = _known(body, snapshot, to)
    levels: list[tuple[str, dict[str, int | None], str, int | None]] = []
    prefix, inside = "", body
    for node, index in names:
        vertex = inside.by_id[node]
        rounds = index if vertex.is_loop else None
        levels.append((prefix, _descendants(inside, vertex, index), node, rounds))
        prefix += (node if index is None else f"{node}[{index}]") + "/"
        inside = vertex.body or inside

    def is_below(path: str) -> bool:
        for start, found, own, rounds in levels:
            if not path.startswith(start):
                return False
            node, index = ev.segments(path[len(start) :])[0]
            if node in found and found[node] in {None, index}:
                return True
            if node == own and rounds is not None and index is not None and index > rounds:
                return True
        return False

    return is_below


def _known(body: Body, snapshot: Snapshot, to: str) -> list[tuple[str, int | None]]:
    """Give the parts of a path, or a DefinitionError if this run has none of that name."""
    to = normalize("NFC", to)
    try:
        names = ev.segments(to)
    except ValueError as error:
        raise DefinitionError(str(error)) from None
    if body.at(to) is None:
        near = nearest(to, body.by_id)
        hint = f" Did you mean {near!r}?" if near else ""
        raise DefinitionError(f"{to!r}: workflow {body.workflow!r} has no such node.{hint}")
    if to not in body.by_id and to not in snapshot.paths:
        raise DefinitionError(f"there is no path {to!r} in this run.")
    return names


def _descendants(body: Body, start: Vertex, index: int | None) -> dict[str, int | None]:
    """Give the nodes below one in its graph, and the item of each that is meant; None: all of it."""
    found: dict[str, int | None] = {}
    queue = [(start, index if start.is_map else None)]
    for vertex, item in queue:
        for child in vertex.children:
            below = body.rules[child]
            one = item if vertex.index in below.chained else None
            if below.id not in found or (found[below.id] is not None and one is None):
                found[below.id] = one
                queue.append((below, one))
    return found


# -- in which order -------------------------------------------------------------------------------------


class _Place:
    """Where something is to be undone: at this path itself, inside it, or both."""

    __slots__ = ("inside", "path")

    def __init__(self) -> None:
        self.path: str | None = None
        self.inside: dict[str, dict[int | None, _Place]] = {}


class _Order:
    """The order of undoing: what completed last comes first, and nothing before what comes after it.

    Mostly the one means the other. Not where a node ran again and what is below it was reused, since what it
    gave was the same: it completed last, and all the same what has used it is undone before it.
    """

    def __init__(self, body: Body) -> None:
        self._body, self._visits = body, itertools.count()
        self._found: list[tuple[int, int, int, str]] = []

    def of(self, completed: Mapping[str, int]) -> list[str]:
        """Give these paths (with the seq at which each completed) in the order they are to be undone."""
        top: dict[str, dict[int | None, _Place]] = {}
        for path in completed:
            level = top
            for node, index in ev.segments(path):
                place = level.setdefault(node, {}).setdefault(index, _Place())
                level = place.inside
            place.path = path
        self._completed = completed
        self._visit(self._body, top, _LAST)
        return [path for *_, path in sorted(self._found)]

    def _visit(self, body: Body, level: Mapping[str, Mapping[int | None, _Place]], most: int) -> int:
        """Rank what is in one graph, all of it before `most`; gives the rank of what is undone last in it."""
        lows: dict[int, int] = {}  # by vertex: at or below it
        items: dict[int, dict[int | None, int]] = {}  # by map, for the maps above that it is chained to
        for vertex in reversed(body.rules):
            chained = [c for c in vertex.children if vertex.index in body.rules[c].chained]
            bound = min((lows[c] for c in vertex.children if c not in chained), default=most)
            places = level.get(vertex.id, {})
            own = dict.fromkeys(places, bound)
            for child in chained:
                for index, low in items[child].items():
                    own[index] = min(own.get(index, bound), low)
            self._rank(vertex, places, own)
            items[vertex.index] = own
            lows[vertex.index] = min([bound, *own.values(), *(lows[c] for c in chained)])
        return min(lows.values(), default=most)

    def _rank(self, vertex: Vertex, places: Mapping[int | None, _Place], own: dict[int | None, int]) -> None:
        """Rank the paths of a vertex; `own` says by index before what, then what comes last at each."""
        visit = next(self._visits)
        later = _LAST
        for index in sorted(places, key=lambda k: -1 if k is None else k, reverse=True):
            place, rank = places[index], own[index]
            if vertex.is_loop:  # a round comes after the one before it
                visit, rank = next(self._visits), min(rank, later)
            if place.path is not None:
                seq = self._completed[place.path]
                rank = min(rank, seq)
                self._found.append((-rank, visit, -seq, place.path))
            if place.inside and vertex.body is not None:
                rank = min(rank, self._visit(vertex.body, place.inside, rank))
            own[index] = later = rank


# -- how it begins --------------------------------------------------------------------------------------


def begun(records: Sequence[Record]) -> Record | None:
    """Give the record with which the rollback under way was begun: its reason, and `to`."""
    begins = (r for r in reversed(records) if r.kind == ev.RUN_ROLLING_BACK and r.reason not in ev.UNDO_RESTS)
    return next(begins, None)


def opening(body: Body, loaded: Loaded, to: str | None, accept: bool, now: int) -> Record:
    """Give the record with which a rollback begins or goes on; Irreversible if a person must agree first."""
    before = begun(loaded.records) if loaded.row.status == RunStatus.ROLLING_BACK else None
    if before is not None and to in {None, before.facts.get("to")}:
        return ev.run_record(ev.RUN_ROLLING_BACK, now, before.reason, **before.facts)
    plan = plan_undo(body, Snapshot(loaded.records), to)
    if (plan.irreversible or plan.uncertain) and not accept:
        raise Irreversible(loaded.row.run_id, plan.irreversible, plan.uncertain)
    return ev.run_record(ev.RUN_ROLLING_BACK, now, ASKED, **({} if to is None else {"to": to}))


class _UndoContext(Context):
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
        self, services: Services, body: Body, run_id: str, workflow: str, owned: Owned, context: Variables
    ) -> None:
        self.services, self.body, self.run_id, self.workflow = services, body, run_id, workflow
        self.owned, self.claimed_at = owned, 0
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
        self._context = context
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
            failure = tell(undo.path, job.attempt, error, ev.UNDO_FAILED_REASON)
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
        self._doing = self.loop.create_task(self._call(undo, job), context=self._context.copy())
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
        context = _UndoContext(
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
