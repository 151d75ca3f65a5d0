"""Drives one run: what is ready starts, what returned is committed, what that unlocks starts.

Nothing is awaited between the return of a body and the hand-over of its checkpoint to the journal. State advances at that
hand-over, in the order of the journal; bodies begin only when the unit that unlocked them is durable. Node tasks are plain
asyncio tasks (a tenth of the cost of a task group's); the run owns them, none outlives it.

    Run     one run in this process: its tasks, its end
    Scope   one instance of a graph in it: what is settled, what is ready
    Feed    one map in a scope, spread out into items
    Job     one path that is to run
    Step    a unit on its way into the store, and what it unlocks
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import hashlib
import json
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import anyio

from dagresume import codec
from dagresume.clock import Clock
from dagresume.context import Context
from dagresume.errors import (
    CheckpointLost,
    DagresumeError,
    LeaseLost,
    MutatedInput,
    NodeTimeout,
    NotLoadable,
    OutputNotSerializable,
    StoreError,
)
from dagresume.events import (
    CANCELLED,
    COMPLETED,
    FAILED,
    INTERRUPTED,
    RESET,
    RETRY,
    RUN_CANCELLED,
    RUN_COMPLETED,
    RUN_FAILED,
    RUN_INTERRUPTED,
    RUN_WAITING,
    SKIPPED,
    STARTED,
    WAITING,
    WITHDRAWN,
    Record,
    RunStatus,
    Snapshot,
    node_record,
    run_record,
    segments,
)
from dagresume.executor import Call, Executor
from dagresume.journal import Entry, Journal
from dagresume.observe import describe_error, failure_of, log
from dagresume.planner import (
    NOT_STORABLE,
    RECONCILE,
    UNCERTAIN,
    Action,
    Verdict,
    Vertex,
    decide,
    handled,
    part,
)
from dagresume.policy import NOT_DONE, ItemFailure, Join, NodeFailure, Settled, join, tolerated
from dagresume.pool import Gate, Pool
from dagresume.results import Cell, Stored
from dagresume.store import (
    Claim,
    Committed,
    Definition,
    LogLine,
    NewRun,
    Outcome,
    Owned,
    Refused,
    StoreFailed,
)
from dagresume.workflow import Binding, Source

__all__ = ["Run", "Services", "Step", "start_ready"]

OPEN: Final = 255  # in Scope.state: not settled
LOG_LINES: Final = 1000  # an attempt keeps at most so many
NULL: Final = "null"
MOVED: Final = "moved"  # reason: an item stands at another place of its list now; its output is where it was


@dataclass(slots=True)
class Services:
    """What the runs of one engine share."""

    journal: Journal
    pool: Pool
    clock: Clock
    executor: Callable[[str], Executor]
    fetch: Callable[[str, Sequence[Stored]], Awaitable[list[str]]]
    spill: Callable[[str, str], Awaitable[str]]
    spill_bytes: int | None
    fail_fast: bool
    grace: float
    debug: bool


class Raw:
    """An output that is passed on as it is (`checkpoint=False`)."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


UNMADE: Final = Raw(None)
"""The output of a pure node that completed in an earlier process; it is made again if somebody needs it."""


class Cells:
    """The packed outputs of a map's items, or where they lie, and their digests in one piece."""

    __slots__ = ("cells", "digests", "stored")

    def __init__(self, count: int) -> None:
        self.cells: list[Any] = [None] * count
        self.digests = bytearray(16 * count)
        self.stored = False  # whether some lie in the store

    def __len__(self) -> int:
        return len(self.cells)

    def get(self, k: int) -> tuple[str | Stored, bytes]:
        """Give what item k is and its digest."""
        return self.cells[k], bytes(self.digests[16 * k : 16 * k + 16])

    def put(self, k: int, cell: str | Stored, digest: bytes) -> None:
        """Set item k."""
        self.cells[k] = cell
        if type(cell) is Stored:
            self.stored = True
        self.digests[16 * k : 16 * k + 16] = digest


class Values:
    """A list that is no map's: its items are packed when they are looked at."""

    __slots__ = ("types", "values")

    def __init__(self, values: Sequence[Any], types: codec.Types) -> None:
        self.values, self.types = values, types

    def __len__(self) -> int:
        return len(self.values)

    def get(self, k: int) -> tuple[str, bytes]:
        """Give item k, packed, and its digest."""
        text = codec.pack(self.values[k], self.types)
        return text, codec.digest(text)


class Raws:
    """A list that was never packed: its items are passed on as they are, known by their place in it."""

    __slots__ = ("digest", "values")

    def __init__(self, values: Sequence[Any], digest: bytes) -> None:
        self.values, self.digest = values, digest

    def __len__(self) -> int:
        return len(self.values)

    def get(self, k: int) -> tuple[Raw, bytes]:
        """Give item k and what stands for it in a fingerprint."""
        return Raw(self.values[k]), hashlib.sha256(b"%d:" % k + self.digest).digest()[:16]


Listing = Cells | Values | Raws


class Step(Entry):
    """A unit of one run, and what it unlocks once it is durable."""

    __slots__ = ("arrivals", "begins", "ends", "opens", "timed")

    run: Run
    records: list[Record]

    def __init__(self, run: Run, records: list[Record]) -> None:
        super().__init__(run.owned, records)
        self.run = run
        self.begins: list[Job] = []  # their start records are in it, their slots reserved
        self.opens: list[Job | Feed] = []  # ready as soon as it is durable
        self.arrivals: list[tuple[Feed, int]] = []  # items of chained maps, likewise
        self.ends: RunStatus | None = None
        self.timed = False  # holds a checkpoint somebody waits for

    def delivered(self, outcome: Outcome) -> None:
        self.run.delivered(self, outcome)


class Opening(Step):
    """The unit that makes or claims a run, with everything that could be decided already."""

    __slots__ = ("outcome", "session")

    def __init__(self, run: Run, guard: NewRun | Claim, records: list[Record], session: int) -> None:
        super().__init__(run, records)
        self.guard, self.session = guard, session
        self.outcome: asyncio.Future[Outcome] = run.loop.create_future()

    def delivered(self, outcome: Outcome) -> None:
        if isinstance(outcome, Committed):
            self.run.owned = Owned(outcome.run, self.session, outcome.epoch)
            self.run.claimed_at = outcome.seq
            self.run.delivered(self, outcome)
        else:
            self.run.not_opened(self)
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class Job:
    """One path that is to run; also the far end of its context's channel, and a source of the pool that gives itself."""

    __slots__ = (
        "again",
        "attempt",
        "began",
        "call",
        "cells",
        "feed",
        "fingerprint",
        "gate",
        "generation",
        "index",
        "lines",
        "more",
        "path",
        "queued",
        "reconcile",
        "run",
        "scope",
        "stopped",
        "task",
        "tries",
        "used",
        "vertex",
    )

    def __init__(self, scope: Scope, vertex: Vertex, path: str, fingerprint: bytes) -> None:
        self.run, self.scope, self.vertex, self.path, self.fingerprint = (
            scope.run,
            scope,
            vertex,
            path,
            fingerprint,
        )
        self.gate: Gate | None = scope.gates[vertex.index]
        self.feed: Feed | None = None
        self.index: int | None = None
        self.cells: list[Any] = []  # what it takes of each list: packed, where it lies, or raw
        self.attempt = self.tries = 1
        self.generation = self.lines = 0
        self.began = 0.0
        self.queued = self.stopped = self.reconcile = self.again = False
        self.more = True
        self.task: asyncio.Task[None] | None = None
        self.call: Call | None = None
        self.used: dict[str, float] | None = None

    @property
    def dropped(self) -> bool:
        return self.run.stopping is not None

    def take(self) -> Job:
        self.more = False
        return self

    @property
    def awaits_record(self) -> bool:
        """Whether it may begin only once its start record is durable (C2)."""
        return not (self.vertex.idempotent or self.reconcile)

    def start_record(self) -> Record:
        clock = self.run.services.clock
        at = clock.now()
        if self.began:  # written late: say when it really began
            at -= round((clock.monotonic() - self.began) * 1e6)
        return Record(STARTED, "running", self.attempt, at, self.path, None, self.fingerprint)

    def took(self) -> int:
        return max(0, round((self.run.services.clock.monotonic() - self.began) * 1e6)) if self.began else 0

    # the channel; may be called from any thread

    def log(self, level: str, line: str) -> None:
        self.lines += 1
        if self.lines > LOG_LINES:
            return
        if self.lines == LOG_LINES:
            line = f"an attempt keeps {LOG_LINES} lines; what it logged after this one is dropped"
        self.run.log_lines.append(
            LogLine(self.path, self.attempt, self.run.services.clock.now(), level, line)
        )
        getattr(log, level)(line, run=self.run.run_id, path=self.path, attempt=self.attempt)

    def usage(self, usage: Mapping[str, float]) -> None:
        before = self.used or {}
        self.used = {name: before.get(name, 0) + amount for name, amount in usage.items()}

    def progress(self, done: float, total: float | None) -> None:
        self.run.progress[self.path] = (done, total)


class Feed:
    """One map, spread out: which of its items are ready, running, settled. A source of the pool that gives its items."""

    __slots__ = (
        "attempt",
        "began",
        "cap",
        "cells",
        "count",
        "failed_in_row",
        "failures",
        "fingerprint",
        "gate",
        "given_up",
        "held",
        "left",
        "lists",
        "live",
        "lost",
        "next",
        "parts",
        "path",
        "queued",
        "run",
        "scope",
        "shared",
        "shifted",
        "todo",
        "vertex",
    )

    def __init__(self, scope: Scope, vertex: Vertex, fingerprint: bytes | None, lists: list[Listing]) -> None:
        self.run, self.scope, self.vertex, self.fingerprint = scope.run, scope, vertex, fingerprint
        self.path = scope.prefix + vertex.id
        self.gate = scope.gates[vertex.index]
        self.cap = vertex.node.concurrency or 1 << 60
        self.lists = lists
        self.count = self.left = min(map(len, lists))
        self.cells = Cells(self.count)
        self.todo: deque[int] | None = None  # None: all of them, from `next` on
        self.next = self.live = self.failed_in_row = 0
        self.queued = self.given_up = self.shifted = (
            False  # shifted: its items are not those of an earlier process
        )
        self.attempt = scope.run.next_attempt(self.path)
        self.failures: dict[int, NodeFailure] = {}
        self.held: list[int] = []
        self.lost: set[int] = set()
        self.shared: dict[str, Any] | None = None
        self.began = scope.run.services.clock.monotonic()
        # what an item receives, in the order of the fingerprint: a digest, or the number of the list it is taken from
        places = iter(range(len(lists)))
        items = {b.parameter for b in vertex.bindings if b.source.kind == "item"}
        fed = [b for b in vertex.bindings if b.source.kind != "context"]
        self.parts: list[bytes | int] = [
            next(places) if b.parameter in items else scope.part(source)
            for b, source in zip(fed, vertex.received, strict=True)
        ]

    @property
    def dropped(self) -> bool:
        return self.run.stopping is not None

    @property
    def more(self) -> bool:
        if self.live >= self.cap or self.given_up:
            return False
        return self.next < self.count if self.todo is None else bool(self.todo)

    def take(self) -> Job:
        if self.todo is None:
            k = self.next
            self.next += 1
        else:
            k = self.todo.popleft()
        return self.job(k)

    def item(self, k: int) -> tuple[list[Any], bytes]:
        """Give what item k receives of the lists, and its fingerprint."""
        found = [each.get(k) for each in self.lists]
        fingerprint = self.vertex.fingerprint(found[p][1] if isinstance(p, int) else p for p in self.parts)
        return [cell for cell, _ in found], fingerprint

    def job(self, k: int) -> Job:
        self.live += 1  # given back by the run when the job has ended
        cells, fingerprint = self.item(k)
        job = Job(self.scope, self.vertex, f"{self.path}[{k}]", fingerprint)
        job.feed, job.index, job.cells = self, k, cells
        self.run.adopt_history(job)
        return job

    # -- what has been before -------------------------------------------------------------------------

    def resume(self, step: Step, former_count: int) -> None:
        """Match the items with what an earlier process has done of this map: by digest and occurrence, then by place."""
        paths = self.run.snapshot.paths
        self.todo = deque()
        fingerprints = [self.item(k)[1] for k in range(self.count)]
        priors = [paths.get(f"{self.path}[{k}]") for k in range(max(self.count, former_count))]
        spare, rest = _Spare(), []
        for k, prior in enumerate(priors):
            if prior is not None and prior.kind == COMPLETED:
                if k < self.count and prior.input == fingerprints[k] and not self.vertex.pure:
                    self._reuse(k, prior)
                    continue
                if not self.vertex.pure:
                    spare.add(k, prior)
                    self.shifted = True
            if k < self.count:
                rest.append(k)
        moved = {k: spare.take(fingerprints[k]) for k in rest}
        for k in rest:
            found = moved[k]
            if found is not None:
                self._adopt(k, found, step)
            else:
                self._open(k, priors[k], fingerprints[k], step, displaced=k in spare.taken)
        for prior in priors[self.count :]:
            if prior is not None:
                step.records.append(self.run.record(WITHDRAWN, prior.path, prior.attempt, "item_gone"))

    def _reuse(self, k: int, prior: Record) -> None:
        self.cells.put(k, self.run.stored(prior), prior.digest or bytes(16))
        self.left -= 1

    def _adopt(self, k: int, prior: Record, step: Step) -> None:
        facts = prior.facts | {"seq": self.run.stored(prior).seq, "from": prior.path}
        moved = prior._replace(
            path=f"{self.path}[{k}]",
            at=self.run.services.clock.now(),
            reason=MOVED,
            data=json.dumps(facts),
            seq=None,
        )
        step.records.append(moved)
        self._reuse(k, moved)

    def _open(
        self, k: int, prior: Record | None, fingerprint: bytes, step: Step, *, displaced: bool = False
    ) -> None:
        assert self.todo is not None
        verdict = self.scope.verdict(self.vertex, prior, fingerprint)
        completed = prior is not None and prior.kind == COMPLETED
        if verdict.action is Action.HOLD and not (displaced and completed):
            self.held.append(k)
            self.run.hold(f"{self.path}[{k}]", prior, verdict, step)
            self._lost(k, step)
            return
        if (
            completed and not self.vertex.pure
        ):  # what stood here may stand elsewhere now: then this item is a new one
            self.run.reset(prior, verdict.reason, step)
        self.todo.append(k)

    # -- how items end --------------------------------------------------------------------------------

    def settled(self, k: int, cell: Any, digest: bytes, step: Step) -> None:
        self.cells.put(k, cell, digest)
        self.left -= 1
        self.failed_in_row = 0
        for child in self.scope.streaming.get(self.vertex.index, ()):
            child.arrived(k, step)
        if not self.left:
            self.finish(step)

    def failed(self, k: int, failure: NodeFailure, step: Step) -> None:
        self.failures[k] = failure
        row = self.failed_in_row + 1
        if self.vertex.node.tolerate is None:
            self._lost(k, step)
        else:
            text = codec.pack(ItemFailure(failure.path, failure.type, failure.message, failure.attempt))
            self.settled(k, text, codec.digest(text), step)
        self.failed_in_row = row
        limit = self.vertex.retry.give_up_after
        if limit is not None and row >= limit and not self.given_up:
            self._give_up(step)

    def _give_up(self, step: Step) -> None:
        self.given_up = True
        rest = range(self.next, self.count) if self.todo is None else list(self.todo)
        self.todo, self.next = deque(), self.count
        for k in rest:
            self._lost(k, step)

    def _lost(self, k: int, step: Step) -> None:
        """Item k has ended without a value; what takes it below never becomes ready."""
        self.lost.add(k)
        self.left -= 1
        for child in self.scope.streaming.get(self.vertex.index, ()):
            child.blocked(k, step)
        if not self.left:
            self.finish(step)

    blocked = _lost

    def arrived(self, k: int, step: Step) -> None:
        """An item above has settled: if all that this item takes is there, it can begin once that is durable."""
        above = [each.cells[k] for each in self.lists if isinstance(each, Cells)]
        if any(cell is None for cell in above):
            return
        passed = next((cell for cell in above if _passes(cell)), None)
        path = f"{self.path}[{k}]"
        prior = self.run.snapshot.paths.get(path)
        fingerprint = self.item(k)[1] if prior is not None or passed is not None else b""
        if prior is not None and prior.kind == COMPLETED and prior.input == fingerprint:
            self.settled(k, self.run.stored(prior), prior.digest or bytes(16), step)
        elif passed is not None:
            digest = codec.digest(passed)
            step.records.append(
                Record(
                    COMPLETED,
                    "success",
                    1,
                    self.run.now(),
                    path,
                    "passed",
                    fingerprint,
                    digest,
                    len(passed),
                    0,
                    None,
                    passed,
                )
            )
            self.settled(k, passed, digest, step)
        elif prior is not None:
            self._open(k, prior, fingerprint, step)
            if self.todo and self.todo[-1] == k:
                self.todo.pop()
                step.arrivals.append((self, k))
        else:
            step.arrivals.append((self, k))

    def finish(self, step: Step) -> None:
        """All items have ended. A streaming map ends only when what is above it has, and fails with it."""
        scope, i = self.scope, self.vertex.index
        if scope.state[i] != OPEN:
            if i in scope.remaking:
                scope.remade(i, self.cells, step)
            return
        if scope.left[i]:
            return
        complete = not (self.held or self.given_up or scope.bad.get(i))
        if complete and tolerated(self.vertex.node.tolerate, len(self.failures), self.count):
            digest = hashlib.sha256(b"%d:" % self.count + self.cells.digests).digest()[:16]
            step.records.append(self._record(COMPLETED, "success", None, digest))
            scope.complete(i, self.cells, digest, step)
            return
        self.run.failures.update((f.path, f) for f in self.failures.values())
        if self.failures:
            step.records.append(self._record(FAILED, "failed", "items_failed", None))
        scope.settle(i, Settled.FAILED, step)

    def _record(self, kind: str, status: str, reason: str | None, digest: bytes | None) -> Record:
        took = max(0, round((self.run.services.clock.monotonic() - self.began) * 1e6))
        facts = {"count": self.count, "failed": len(self.failures)}
        if self.fingerprint is None:  # it streamed: only now is all that it received known
            self.fingerprint = self.vertex.fingerprint(map(self.scope.part, self.vertex.received))
        return Record(
            kind,
            status,
            self.attempt,
            self.run.now(),
            self.path,
            reason,
            self.fingerprint,
            digest,
            None,
            took,
            json.dumps(facts),
        )

    def start_record(self) -> Record:
        """Give the record that it was spread out into so many items."""
        facts = json.dumps({"count": self.count})
        return Record(
            STARTED, "running", self.attempt, self.run.now(), self.path, None, self.fingerprint, data=facts
        )


_FAILURE_MARK: Final = codec.pack(ItemFailure("", "", "")).partition('"v"')[0]


def _passes(cell: Any) -> bool:
    """Say whether a chained map hands this on uncalled: `None`, or the failure of an item that was tolerated."""
    return isinstance(cell, str) and (cell == NULL or cell.startswith(_FAILURE_MARK))


class _Spare:
    """Completed items that are not at their old place any more, by what they had received."""

    def __init__(self) -> None:
        self._by_input: dict[bytes | None, deque[tuple[int, Record]]] = {}
        self.taken: set[int] = set()

    def add(self, k: int, prior: Record) -> None:
        self._by_input.setdefault(prior.input, deque()).append((k, prior))

    def take(self, fingerprint: bytes) -> Record | None:
        found = self._by_input.get(fingerprint)
        if not found:
            return None
        k, prior = found.popleft()
        self.taken.add(k)
        return prior


class Scope:
    """One instance of a graph in a run: what is settled and what is ready, by the number of the vertex."""

    def __init__(self, run: Run, rules: Sequence[Vertex], prefix: str = "") -> None:
        self.run, self.rules, self.prefix = run, rules, prefix
        self.gates = [run.services.pool.gate(v.node.limit, v.id) for v in rules]
        self.left = [len(v.parents) for v in rules]
        self.state = bytearray([OPEN]) * len(rules)
        self.out: list[Any] = [None] * len(rules)
        self.digests: list[bytes] = [bytes(16)] * len(rules)
        self.bad: dict[int, list[int]] = {}  # vertex: how many parents were skipped, how many failed
        self.feeds: dict[int, Feed] = {}
        self.streaming: dict[int, list[Feed]] = {}  # map: the maps below that take its items as they come
        self.remaking: dict[int, list[int]] = {}  # pure vertex being made again: who waits for it
        self.lacking: dict[int, int] = {}
        self.open = len(rules)
        self._ready: deque[int] = deque(v.index for v in rules if not v.parents)

    def advance(self, step: Step) -> None:
        """Decide what is ready, and what that makes ready."""
        while self._ready:
            self._decide(self.rules[self._ready.popleft()], step)

    def settle(self, i: int, how: Settled, step: Step) -> None:
        """Note how a vertex ended; children whose last parent it was become ready."""
        self.state[i] = how
        self.open -= 1
        left = self.left
        for child in self.rules[i].children:
            left[child] -= 1
            if how:
                self.bad.setdefault(child, [0, 0, 0])[how] += 1
            if not left[child]:
                self._ready.append(child)
            elif self.rules[child].chained:
                self._try_streaming(child, step)

    def complete(self, i: int, out: Any, digest: bytes, step: Step) -> None:
        """Note what a vertex gave."""
        self.out[i], self.digests[i] = out, digest
        self.settle(i, Settled.COMPLETED, step)

    def part(self, source: Source) -> bytes:
        return part(source, self.digests.__getitem__, self.run.input_digests)

    def verdict(self, vertex: Vertex, prior: Record | None, fingerprint: bytes) -> Verdict:
        return decide(
            prior, fingerprint, idempotent=vertex.idempotent, reconcilable=vertex.node.reconcile is not None
        )

    # -- deciding -------------------------------------------------------------------------------------

    def _decide(self, vertex: Vertex, step: Step) -> None:
        i = vertex.index
        feed = self.feeds.get(i)
        if feed is not None:  # it streamed; now all that is above it has ended
            if not feed.left:
                feed.finish(step)
            return
        verdict = self._joined(vertex)
        if verdict is not Join.RUN:
            if verdict is Join.SKIP:
                path = self.prefix + vertex.id
                step.records.append(self.run.record(SKIPPED, path, self.run.last_attempt(path), "trigger"))
            self.settle(i, Settled.SKIPPED if verdict is Join.SKIP else Settled.FAILED, step)
            return
        fingerprint = vertex.fingerprint(map(self.part, vertex.received))
        paths = self.run.snapshot.paths
        prior = paths.get(self.prefix + vertex.id) if paths else None
        if prior is None:
            self._run(vertex, fingerprint, step)
        else:
            self._decide_again(vertex, prior, fingerprint, step)

    def _joined(self, vertex: Vertex) -> Join:
        bad = self.bad.get(vertex.index)
        if bad is None and vertex.node.trigger != "any_failed":
            return Join.RUN
        _, skipped, failed = bad or (0, 0, 0)
        return join(vertex.node.trigger, len(vertex.parents) - skipped - failed, skipped, failed)

    def _decide_again(self, vertex: Vertex, prior: Record, fingerprint: bytes, step: Step) -> None:
        """Decide about a path that has a history."""
        run, i = self.run, vertex.index
        if prior.kind == FAILED and handled(vertex, self.rules, run.snapshot.paths, self.prefix):
            run.failures[prior.path or ""] = failure_of(prior)
            self.settle(i, Settled.FAILED, step)
            return
        if vertex.is_map and not (prior.kind == COMPLETED and prior.input == fingerprint):
            if prior.kind == COMPLETED:
                run.reset(prior, "input_changed", step)
            self._run(vertex, fingerprint, step)
            return
        verdict = self.verdict(vertex, prior, fingerprint)
        if verdict.action is Action.REUSE:
            self.complete(
                i,
                self._former(vertex, prior),
                fingerprint if vertex.pure else prior.digest or bytes(16),
                step,
            )
        elif verdict.action is Action.HOLD:
            run.hold(prior.path or "", prior, verdict, step)
            self.settle(i, Settled.FAILED, step)
        else:
            if prior.kind == COMPLETED:
                run.reset(prior, verdict.reason, step)
            self._run(vertex, fingerprint, step, verdict)

    def _former(self, vertex: Vertex, prior: Record) -> Any:
        """Give where the output of a completed path lies."""
        if vertex.pure:
            return UNMADE
        if not vertex.is_map:
            return self.run.stored(prior)
        cells = Cells(prior.facts["count"])
        paths = self.run.snapshot.paths
        for k in range(len(cells)):
            record = paths.get(f"{prior.path}[{k}]")
            if record is None:
                raise CheckpointLost(self.run.run_id, f"{prior.path}[{k}]", "is missing")
            if record.kind == COMPLETED:
                cells.put(k, self.run.stored(record), record.digest or bytes(16))
            else:
                failure = failure_of(record)
                text = codec.pack(ItemFailure(failure.path, failure.type, failure.message, failure.attempt))
                cells.put(k, text, codec.digest(text))
        return cells

    # -- making ready ---------------------------------------------------------------------------------

    def _run(self, vertex: Vertex, fingerprint: bytes, step: Step, verdict: Verdict | None = None) -> None:
        i = vertex.index
        unmade = {s.index for s in vertex.received if s.kind == "parent" and self.out[s.index] is UNMADE}
        if unmade:
            self.lacking[i] = len(unmade)
            for parent in unmade:
                self._remake(parent, i, step)
        elif vertex.is_map:
            self._spread(vertex, fingerprint, step)
        else:
            job = Job(self, vertex, self.prefix + vertex.id, fingerprint)
            self.run.adopt_history(job)
            job.reconcile = verdict is RECONCILE
            job.again = self.state[i] != OPEN
            step.opens.append(job)

    def _remake(self, i: int, waiter: int, step: Step) -> None:
        """Have a pure vertex that completed earlier made again, since somebody needs its value."""
        waiters = self.remaking.get(i)
        if waiters is not None:
            waiters.append(waiter)
            return
        self.remaking[i] = [waiter]
        vertex = self.rules[i]
        self._run(vertex, self.digests[i], step)

    def remade(self, i: int, value: Raw | Cells, step: Step) -> None:
        """A pure vertex was made again: what waited for it can run."""
        self.out[i] = value
        for waiter in self.remaking.pop(i):
            self.lacking[waiter] -= 1
            if not self.lacking[waiter]:
                del self.lacking[waiter]
                vertex = self.rules[waiter]
                self._run(vertex, vertex.fingerprint(map(self.part, vertex.received)), step)

    def not_remade(self, i: int, step: Step) -> None:
        """A pure vertex failed when it was made again: what waited for it is blocked."""
        for waiter in self.remaking.pop(i, ()):
            if self.lacking.pop(waiter, None) is not None:
                if self.state[waiter] == OPEN:
                    self.settle(waiter, Settled.FAILED, step)
                self.not_remade(waiter, step)

    # -- maps -----------------------------------------------------------------------------------------

    def _spread(self, vertex: Vertex, fingerprint: bytes, step: Step) -> None:
        stored = self._lists_to_load(vertex)
        if stored:
            self.run.background(self._spread_later(vertex, fingerprint, stored))
            return
        try:
            lists = [self._listing(source) for source in self.run.sources[vertex.index]]
            if len({len(each) for each in lists}) > 1:
                sizes = ", ".join(
                    f"{name}: {len(each)}" for name, each in zip(vertex.node.for_each, lists, strict=True)
                )
                raise ValueError(f"for_each takes lists of one length, item by item; these differ: {sizes}")
        except Exception as error:
            self.run.fail(self, vertex, error, step)
            return
        prior = self.run.snapshot.paths.get(self.prefix + vertex.id)
        feed = self.feeds[vertex.index] = Feed(self, vertex, fingerprint, lists)
        step.records.append(feed.start_record())
        if prior is not None:
            feed.resume(step, prior.facts.get("count", 0))
        for child in vertex.children:
            if self.rules[child].chained:
                self._try_streaming(child, step)
        if feed.left:
            step.opens.append(feed)
        else:
            feed.finish(step)

    def _lists_to_load(self, vertex: Vertex) -> list[int]:
        return [
            s.index
            for s in self.run.sources[vertex.index]
            if s.kind == "parent" and isinstance(self.out[s.index], Stored)
        ]

    async def _spread_later(self, vertex: Vertex, fingerprint: bytes, stored: list[int]) -> None:
        step = Step(self.run, [])
        try:
            for i in stored:
                if isinstance(self.out[i], Stored):
                    self.out[i] = (await self.run.services.fetch(self.run.run_id, [self.out[i]]))[0]
        except StoreError as error:
            self.run.cannot_load(self, vertex.index, error, step)
        else:
            self._spread(vertex, fingerprint, step)
        self.advance(step)
        self.run.hand_over(step)

    def _listing(self, source: Source) -> Listing:
        """Give the list that a map runs over."""
        if source.kind == "input":
            text, types = self.run.inputs[source.name], self.run.input_types.get(source.name, codec.EMPTY)
            return Values(_list(codec.unpack(text, types), f"the input {source.name!r}"), types)
        out, parent = self.out[source.index], self.rules[source.index]
        if out is None:
            return Values((), codec.EMPTY)  # the parent was skipped or failed, and this map runs all the same
        if isinstance(out, Cells):
            return out
        if isinstance(out, Raw):
            return Raws(_list(out.value, f"node {parent.id!r}"), self.digests[source.index])
        return Values(_list(codec.unpack(out, parent.types), f"node {parent.id!r}"), parent.types)

    def _try_streaming(self, i: int, step: Step) -> None:
        """Spread out a chained map before the maps above have ended, once all else that it needs is there."""
        vertex = self.rules[i]
        if i in self.feeds or not vertex.streams or i in self.bad:
            return
        if any(self.state[p] == OPEN for p in vertex.parents if p not in vertex.chained):
            return
        above = [self.feeds.get(p) for p in vertex.chained]
        if any(feed is None or feed.shifted for feed in above) or self._lists_to_load(vertex):
            return
        if any(self.out[s.index] is UNMADE for s in vertex.received if s.kind == "parent"):
            return
        self._stream(vertex, step)

    def _stream(self, vertex: Vertex, step: Step) -> None:
        lists: list[Listing] = []
        for source in self.run.sources[vertex.index]:
            feed = self.feeds.get(source.index) if source.kind == "parent" else None
            try:
                lists.append(self._listing(source) if feed is None else feed.cells)
            except Exception:
                return  # said when its parents have ended
        prior = self.run.snapshot.paths.get(self.prefix + vertex.id)
        count = len(lists[0])
        former = 0 if prior is None else prior.facts.get("count", 0)
        if any(len(each) != count for each in lists) or (
            prior is not None and (former != count or prior.kind == COMPLETED)
        ):
            return
        feed = self.feeds[vertex.index] = Feed(self, vertex, None, lists)
        feed.todo = deque()
        for parent in vertex.chained:
            self.streaming.setdefault(parent, []).append(feed)
        step.records.append(feed.start_record())
        for child in vertex.children:
            if self.rules[child].chained:
                self._try_streaming(child, step)
        for k in range(count):
            if any(k in self.feeds[parent].lost for parent in vertex.chained):
                feed.blocked(k, step)
            else:
                feed.arrived(k, step)


def _list(value: Any, what: str) -> Sequence[Any]:
    if isinstance(value, list | tuple):
        return value
    raise TypeError(f"for_each needs a list or tuple; {what} gave {type(value).__name__}")


class Run:
    """One run, driven by this process.

    Made from what the store has of it (`snapshot`); `begin` decides everything that can be decided, `ended` is done when
    the end of the run is durable, or when it cannot be made so (`error`).
    """

    def __init__(
        self,
        services: Services,
        rules: Sequence[Vertex],
        sources: Sequence[Sequence[Source]],
        *,
        run_id: str,
        workflow: str,
        snapshot: Snapshot,
        inputs: Mapping[str, tuple[str, bytes]],
        input_types: Mapping[str, codec.Types],
        fresh_budget: bool = True,
    ) -> None:
        self.services, self.rules, self.sources = services, rules, sources
        self.run_id, self.workflow, self.snapshot = run_id, workflow, snapshot
        self.inputs, self.input_types = inputs, input_types
        self.input_digests = {name: digest for name, (_, digest) in inputs.items()}
        self.fresh_budget = fresh_budget
        self.owned: Owned = Owned(0, 0, 0)
        self.claimed_at = 0
        self.poisoned = False
        self.executors = [services.executor(_executor_of(v)) for v in rules]
        self.context = contextvars.copy_context()
        self.loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self.loop.create_future()
        self.status: RunStatus = RunStatus.RUNNING
        self.reason: str | None = None
        self.error: BaseException | None = None
        self.stopping: tuple[str, str, str] | None = None  # kind of the run's end, reason, by whom
        self.live: set[Job] = set()
        self.executed: list[str] = []
        self.failures: dict[str, NodeFailure] = {}
        self.held: list[str] = []
        self.uncertain: list[str] = []
        self.lost: list[StoreError] = []
        self.log_lines: deque[LogLine] = deque()
        self.progress: dict[str, tuple[float, float | None]] = {}
        self.waits: array[float] = array("d")
        self.commits = 0
        self.waiting = 0  # its sources in the pool's queue, or parked at a limit; counted by the pool
        self.began = services.clock.monotonic()
        self._last_batch = -1
        self._inflight = 0
        self._timers: dict[Job, asyncio.TimerHandle] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._verbose = log.verbose
        self._places = {vertex.id: vertex.index for vertex in rules}
        self.root = Scope(self, rules)

    def now(self) -> int:
        """Give the wall clock in microseconds UTC."""
        return self.services.clock.now()

    # -- beginning ------------------------------------------------------------------------------------

    def open(
        self, guard: NewRun | Claim, records: list[Record], definition: Definition | None, session: int
    ) -> asyncio.Future[Outcome]:
        """Decide all that can be decided and hand over the unit that makes or claims the run; gives what becomes of it."""
        step = Opening(self, guard, records, session)
        step.definition = definition
        self.root.advance(step)
        self._ride(step)
        if not self.root.open:
            self._conclude(step)
        self._inflight += 1
        self.services.journal.append(step)
        return step.outcome

    def hand_over(self, step: Step, *, quietly: bool = False) -> None:
        """Give a unit to the journal, after adding the starts that can ride in it, and the end of the run if this is it.

        `quietly`: it may wait for another one to ride with, unless something waits for it after all.
        """
        if self.stopping is None:
            start_ready(self.services.pool, step)
            self._ride(step)
            if not self.root.open:
                self._conclude(step)
        if self.log_lines:
            step.logs = list(self.log_lines)
            self.log_lines.clear()
        step.guard = self.owned
        self._inflight += 1
        self.services.journal.append(step, quietly=quietly and not step.begins and step.ends is None)

    def _ride(self, step: Step) -> None:
        """Reserve slots for what this unit unlocks and needs a start record: it rides in the same commit."""
        pool = self.services.pool
        if not pool.idle:
            return
        if step.opens:
            step.opens = [source for source in step.opens if not self._ride_along(source, step)]
        if step.arrivals:
            step.arrivals = [(feed, k) for feed, k in step.arrivals if not self._arrival_rides(feed, k, step)]

    def _ride_along(self, source: Job | Feed, step: Step) -> bool:
        """Start what can be started of a source; True if nothing is left of it."""
        if isinstance(source, Job):
            return source.awaits_record and self._reserve(source, step)
        if not source.vertex.idempotent:
            while source.more and self._reserve(source, step):
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
        if job.awaits_record:
            step.records.append(job.start_record())
            step.begins.append(job)
        else:
            step.opens.append(job)
        return True

    # -- a unit is durable ----------------------------------------------------------------------------

    def delivered(self, step: Step, outcome: Outcome) -> None:
        """Learn what became of a unit: begin what it unlocked."""
        self._inflight -= 1
        if not isinstance(outcome, Committed):
            self._not_written(step, outcome)
            return
        batch = self.services.journal.batches
        if batch != self._last_batch:
            self._last_batch = batch
            self.commits += 1
        if step.timed:
            self.waits.append(self.services.clock.monotonic() - step.appended)
        if self.stopping is not None:
            self._withdraw(step)
        else:
            self._open(step)
        if step.ends is not None:
            self._finish(step.ends)
        else:
            self._check()

    def not_opened(self, step: Step) -> None:
        """The run could not be made or claimed: give back what was reserved for it."""
        self._inflight -= 1
        self.stopping = (RUN_INTERRUPTED, "not_opened", "")
        for job in step.begins:
            self._release(job)

    def _open(self, step: Step) -> None:
        pool = self.services.pool
        for job in step.begins:
            self.start(job)
        for source in step.opens:
            pool.offer(source)
        for feed, k in step.arrivals:
            if feed.todo is not None:
                feed.todo.append(k)
                pool.offer(feed)

    def _withdraw(self, step: Step) -> None:
        """The run is being stopped: what was about to begin does not."""
        records = [self.record(WITHDRAWN, job.path, job.attempt, "stopped") for job in step.begins]
        for job in step.begins:
            self._release(job)
        if records:
            self.hand_over(Step(self, records))

    def _not_written(self, step: Step, outcome: Outcome) -> None:
        for job in step.begins:
            self._release(job)
        if self.error is None:
            self.error = self._why(step, outcome)
        self.abort()

    def _why(self, step: Step, outcome: Outcome) -> BaseException:
        if isinstance(outcome, Refused):
            holder = outcome.holder
            return LeaseLost(self.run_id, str(holder) if holder else "another session")
        error = (
            outcome.error if isinstance(outcome, StoreFailed) else DagresumeError(f"not written: {outcome}")
        )
        for record in step.records:
            if record.kind == COMPLETED and record.path is not None:
                told = describe_error(error)
                self.failures[record.path] = NodeFailure(
                    record.path,
                    record.attempt or 1,
                    told["type"],
                    told["message"],
                    told["traceback"],
                    "not_stored",
                    None,
                    error,
                )
        return error

    # -- jobs -----------------------------------------------------------------------------------------

    def start(self, job: Job) -> None:
        """Begin a job whose slot is reserved and whose start record, if it needs one, is durable."""
        self.live.add(job)
        job.task = self.loop.create_task(self._drive(job), context=self.context.copy())

    async def _drive(self, job: Job) -> None:
        try:
            await self._attempt(job)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # ours: the engine itself is wrong; say so rather than hang
            self.error = self.error or error
            self.abort()
        finally:
            self.live.discard(job)
            self.services.journal.forget(job)
            if not self.live:
                self._check()

    async def _attempt(self, job: Job) -> None:
        try:
            if self._to_load(job):
                await self._load(job)
            call = self._call(job)
        except StoreError as error:
            self._no_values(job, error)
            return
        except BaseException as error:
            self._threw(job, error)
            return
        clock = self.services.clock
        job.began = clock.monotonic()
        vertex = job.vertex
        try:
            if job.reconcile:
                result = await self._reconcile(job, call)
            else:
                self.executed.append(job.path)
                if vertex.idempotent and not vertex.pure:
                    self.services.journal.later(job)
                if vertex.node.timeout is None:
                    result = await self.executors[vertex.index].run(call)
                else:
                    result = await self._timed(job, call, vertex.node.timeout)
                if self.services.debug and job.feed is not None:
                    self._check_shared(job)
        except BaseException as error:
            self._threw(job, error)
            if isinstance(error, KeyboardInterrupt):
                raise
            return
        if result is NOT_DONE:
            self._start_over(job)
        elif vertex.pure:
            self._returned_raw(job, result)
        else:
            took = job.took()
            cell, size, data = (
                await self._shelve(result) if self._is_big(result) else (result, len(result), None)
            )
            self._returned(job, result, cell, size, took, data)

    async def _timed(self, job: Job, call: Call, seconds: float) -> Any:
        with anyio.move_on_after(seconds) as scope:
            result = await self.executors[job.vertex.index].run(call)
        if scope.cancelled_caught:
            raise NodeTimeout(job.path, seconds)
        if job.took() > seconds * 1e6:
            call.abandoned = True  # it ended by itself, too late: its effect has happened
            log.warning(
                "result came after the timeout and was dropped",
                run=self.run_id,
                path=job.path,
                timeout=seconds,
            )
            raise NodeTimeout(job.path, seconds, "; it returned later, and its result was dropped")
        return result

    def _is_big(self, result: Any) -> bool:
        limit = self.services.spill_bytes
        return limit is not None and len(result) > limit

    async def _shelve(self, text: str) -> tuple[Stored, int, str]:
        """Put a big output into a blob; a cancelled run waits for it, since the work is done and paid."""
        name = await finished(asyncio.ensure_future(self.services.spill(self.run_id, text)))
        return Stored("", 0, b"", name), len(text.encode()), json.dumps({"blob": name})

    # -- how a job ends -------------------------------------------------------------------------------

    def _returned(self, job: Job, text: str, cell: Any, size: int, took: int, data: str | None) -> None:
        digest = codec.digest(text)
        if job.used:
            data = json.dumps((json.loads(data) if data else {}) | {"usage": job.used})
        reason = "reconciled" if job.reconcile else None
        output = text if cell is text else None
        step = Step(
            self,
            [
                Record(
                    COMPLETED,
                    "success",
                    job.attempt,
                    self.now(),
                    job.path,
                    reason,
                    job.fingerprint,
                    digest,
                    size,
                    took,
                    data,
                    output,
                )
            ],
        )
        if isinstance(cell, Stored):
            cell = Stored(job.path, 0, digest, cell.blob)
        step.timed = True
        if self._verbose:
            log.debug(
                "node completed", run=self.run_id, path=job.path, attempt=job.attempt, seconds=took / 1e6
            )
        self._release(job)
        scope = job.scope
        if job.feed is None:
            scope.complete(job.vertex.index, cell, digest, step)
        else:
            job.feed.settled(job.index or 0, cell, digest, step)
        scope.advance(step)
        self.hand_over(step)

    def _returned_raw(self, job: Job, value: Any) -> None:
        """A pure node gave its value: its children need not wait for the row that says so."""
        scope, i = job.scope, job.vertex.index
        record = Record(
            COMPLETED, "success", job.attempt, self.now(), job.path, "recomputed" if job.again else None, job.fingerprint,
            took=job.took(),
        )  # fmt: skip
        step = Step(self, [record])
        self._release(job)
        digest = job.fingerprint
        if job.feed is not None:
            job.feed.settled(job.index or 0, Raw(value), digest, step)
        elif job.again:
            scope.remade(i, Raw(value), step)
        else:
            scope.complete(i, Raw(value), digest, step)
        scope.advance(step)
        for source in step.opens:  # at once (C1 excepts pure nodes)
            self.services.pool.offer(source)
        step.opens = []
        self.hand_over(step, quietly=True)

    def _start_over(self, job: Job) -> None:
        """`reconcile` says that the uncertain attempt had no effect: the path runs as a new one."""
        step = Step(self, [self.record(RESET, job.path, job.attempt - 1, "not_done")])
        self._release(job)
        if job.feed is not None:
            job.feed.live += 1
        step.opens.append(self._next_job(job, job.attempt))
        self.hand_over(step)

    def _next_job(self, job: Job, attempt: int) -> Job:
        again = Job(job.scope, job.vertex, job.path, job.fingerprint)
        again.feed, again.index, again.cells = job.feed, job.index, job.cells
        again.attempt, again.tries, again.generation, again.again = (
            attempt,
            job.tries,
            job.generation,
            job.again,
        )
        return again

    def _threw(self, job: Job, error: BaseException) -> None:
        """An attempt ended without a result."""
        self.services.journal.forget(job)
        cut_off = isinstance(error, asyncio.CancelledError) and job.stopped
        if cut_off or isinstance(error, KeyboardInterrupt) or self.error is not None:
            self._cut_off(job)
        elif job.reconcile:
            self._stays_uncertain(job, "reconcile_failed", describe_error(error))
        elif (
            isinstance(error, NodeTimeout)
            and job.call is not None
            and job.call.abandoned
            and not job.vertex.idempotent
        ):
            self._stays_uncertain(job, "abandoned", describe_error(error))
        elif self._tries_again(job, error):
            self._again_later(job, error)
        else:
            self._failed(job, error)

    def _cut_off(self, job: Job) -> None:
        """The run is being stopped and this body was ended with it."""
        kind, reason, _ = self.stopping or (RUN_INTERRUPTED, "interrupted", "")
        self._release(job)
        if self.error is not None:
            return  # nothing is written any more
        if not job.began:
            if job.awaits_record:
                self.hand_over(Step(self, [self.record(WITHDRAWN, job.path, job.attempt, reason)]))
            return
        cancelled = kind == RUN_CANCELLED or (kind == RUN_FAILED and job.vertex.idempotent)
        self.hand_over(
            Step(self, [self.record(CANCELLED if cancelled else INTERRUPTED, job.path, job.attempt, reason)])
        )

    def _stays_uncertain(self, job: Job, reason: str, facts: Mapping[str, Any]) -> None:
        attempt = job.attempt - 1 if job.reconcile else job.attempt
        step = Step(self, [self.record(INTERRUPTED, job.path, attempt, reason, **facts)])
        self.uncertain.append(job.path)
        self._release(job)
        self._ended_badly(job, None, step)

    def _tries_again(self, job: Job, error: BaseException) -> bool:
        retry = job.vertex.retry
        return (
            job.tries < retry.attempts
            and isinstance(error, Exception)
            and not isinstance(error, OutputNotSerializable)
            and retry.allows(error)
            and self.stopping is None
        )

    def _again_later(self, job: Job, error: BaseException) -> None:
        """The attempt failed and another one is due: by itself, after a while, and without holding its slot meanwhile."""
        wait = job.vertex.retry.wait(job.tries)
        asked = getattr(error, "retry_after", None)
        if isinstance(asked, int | float) and asked >= 0:
            wait = max(wait, asked)
            if job.gate is not None:
                job.gate.pause(asked)
        facts = describe_error(error) | {"retry_at": self.now() + round(wait * 1e6)}
        step = Step(self, [self.record(FAILED, job.path, job.attempt, RETRY, **facts)])
        log.info(
            "attempt failed, will be retried",
            run=self.run_id,
            path=job.path,
            attempt=job.attempt,
            wait=round(wait, 3),
            error=facts["message"],
        )
        self._release(job)
        if job.feed is not None:
            job.feed.live += 1  # it keeps its place among the items at once
        again = self._next_job(job, job.attempt + 1)
        again.tries += 1
        self._timers[again] = self.loop.call_later(wait, self._due, again)
        self.hand_over(step)

    def _due(self, job: Job) -> None:
        del self._timers[job]
        if self.stopping is None:
            self.services.pool.offer(job)
            start_ready(self.services.pool)

    def _failed(self, job: Job, error: BaseException) -> None:
        if isinstance(error, OutputNotSerializable) and error.node is None:
            error = OutputNotSerializable(job.vertex.id, error.place, error.type_name, error.reason)
        told = describe_error(error)
        if isinstance(error, asyncio.CancelledError):
            told["message"] = "cancelled from inside: the body raised CancelledError by itself"
        reason = (
            NOT_STORABLE
            if isinstance(error, OutputNotSerializable)
            else "timeout"
            if isinstance(error, NodeTimeout)
            else "error"
        )
        step = Step(self, [self.record(FAILED, job.path, job.attempt, reason, job.fingerprint, **told)])
        failure = NodeFailure(
            job.path, job.attempt, told["type"], told["message"], told["traceback"], reason, None, error
        )
        log.info("node failed", run=self.run_id, path=job.path, attempt=job.attempt, error=told["message"])
        self._release(job)
        self._ended_badly(job, failure, step)

    def _ended_badly(self, job: Job, failure: NodeFailure | None, step: Step) -> None:
        """Settle a path that has no value; `failure` None: nobody knows."""
        scope, i = job.scope, job.vertex.index
        if job.feed is not None:
            if failure is None:
                job.feed.held.append(job.index or 0)
                job.feed._lost(job.index or 0, step)
            else:
                job.feed.failed(job.index or 0, failure, step)
        else:
            if failure is not None:
                self.failures[job.path] = failure
            if job.again:
                scope.not_remade(i, step)
            else:
                scope.settle(i, Settled.FAILED, step)
        scope.advance(step)
        if self.services.fail_fast and failure is not None and self.stopping is None and self._is_fatal(job):
            self.stop(RUN_FAILED, "fail_fast")
        self.hand_over(step)

    def _is_fatal(self, job: Job) -> bool:
        if job.feed is not None and job.vertex.node.tolerate is not None:
            return False
        return not any(
            self.rules[child].node.trigger in {"any_failed", "all_done"} for child in job.vertex.children
        )

    def fail(self, scope: Scope, vertex: Vertex, error: Exception, step: Step) -> None:
        """A node failed before any body of it could begin."""
        path = scope.prefix + vertex.id
        told = describe_error(error)
        attempt = self.next_attempt(path)
        step.records.append(self.record(FAILED, path, attempt, "error", **told))
        self.failures[path] = NodeFailure(
            path, attempt, told["type"], told["message"], told["traceback"], "error", None, error
        )
        scope.settle(vertex.index, Settled.FAILED, step)

    def cannot_load(self, scope: Scope, i: int, error: StoreError, step: Step) -> None:
        """What a node needs is in the store and cannot be read: it does not run, and the run ends with this error."""
        self.lost.append(error)
        scope.settle(i, Settled.FAILED, step)

    def _no_values(self, job: Job, error: StoreError) -> None:
        step = Step(self, [])
        if job.awaits_record:
            step.records.append(self.record(WITHDRAWN, job.path, job.attempt, "input_lost"))
        self._release(job)
        self.lost.append(error)
        self._ended_badly(job, None, step)

    def _release(self, job: Job) -> None:
        self.services.pool.release(job.gate)
        feed = job.feed
        if feed is not None:
            feed.live -= 1
            if feed.more and not feed.queued and self.stopping is None:
                self.services.pool.offer(feed)

    # -- what a body gets -----------------------------------------------------------------------------

    def _to_load(self, job: Job) -> bool:
        """Say whether something the job needs is not in memory: an output of an earlier process, or a big one."""
        out = job.scope.out
        for parent in job.vertex.value_parents:
            cell = out[parent]
            if type(cell) is Stored or (type(cell) is Cells and cell.stored and job.feed is None):
                return True
        return bool(job.cells) and any(type(cell) is Stored for cell in job.cells)

    async def _load(self, job: Job) -> None:
        out = job.scope.out
        for parent in job.vertex.value_parents:
            cell = out[parent]
            if isinstance(cell, Stored):
                out[parent] = (await self.services.fetch(self.run_id, [cell]))[0]
            elif isinstance(cell, Cells) and cell.stored and parent not in job.vertex.chained:
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
        vertex = job.vertex
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        context: Context | None = None
        by_name = False
        value: Any
        for binding in vertex.bindings:
            kind = binding.source.kind
            if kind == "context":
                value = context = self._context(job)
            elif kind == "input" and binding.source.name not in self.inputs:
                by_name = True  # its own default; what comes after it is passed by name
                continue
            else:
                value = self._value(job, binding)
            if by_name or binding.keyword:
                kwargs[binding.parameter] = value
            else:
                args.append(value)
        types = None if vertex.pure else vertex.types
        call = job.call = Call(vertex.node.fn, tuple(args), kwargs, types, context, job.path)
        return call

    def _value(self, job: Job, binding: Binding) -> Any:
        source, feed = binding.source, job.feed
        if source.kind == "item":
            return self._item_value(job, source.index)
        if feed is None:
            return self._whole_value(job.scope, source)
        if feed.shared is None:
            feed.shared = {}
        if binding.parameter not in feed.shared:
            feed.shared[binding.parameter] = self._whole_value(job.scope, source)
        return feed.shared[binding.parameter]

    def _item_value(self, job: Job, place: int) -> Any:
        cell = job.cells[place]
        if isinstance(cell, Raw):
            return cell.value
        source = self.sources[job.vertex.index][place]
        if source.kind == "input":
            return codec.unpack(cell, self.input_types.get(source.name, codec.EMPTY))
        return self._unpack(source.index, job.scope, codec.unpack, cell, f"[{job.index}]")

    def _unpack(
        self, i: int, scope: Scope, unpack: Callable[[Any, codec.Types], Any], packed: Any, item: str = ""
    ) -> Any:
        try:
            return unpack(packed, self.rules[i].types)
        except NotLoadable as error:
            path = f"{scope.prefix}{self.rules[i].id}{item if self.rules[i].is_map else ''}"
            raise CheckpointLost(self.run_id, path, f"cannot be loaded: {error.reason}") from error

    def _whole_value(self, scope: Scope, source: Source) -> Any:
        if source.kind == "constant":
            return copy.deepcopy(source.value)
        if source.kind == "input":
            text, _ = self.inputs[source.name]
            return codec.unpack(text, self.input_types.get(source.name, codec.EMPTY))
        out = scope.out[source.index]
        if type(out) is str:
            return self._unpack(source.index, scope, codec.unpack, out)
        if out is None:
            return None  # skipped or failed
        if isinstance(out, Raw):
            return out.value
        cells = out.cells
        if cells and isinstance(cells[0], Raw):
            return [cell.value for cell in cells]
        return self._unpack(source.index, scope, codec.unpack_many, cells)

    def _context(self, job: Job) -> Context:
        scope, vertex = job.scope, job.vertex
        skipped, failures = frozenset[str](), {}
        if vertex.index in scope.bad:
            skipped = frozenset(self.rules[p].id for p in vertex.parents if scope.state[p] == Settled.SKIPPED)
            for p in vertex.parents:
                if scope.state[p] == Settled.FAILED:
                    failures[self.rules[p].id] = self._failure_at(scope.prefix + self.rules[p].id)
        return Context(
            run_id=self.run_id,
            workflow=self.workflow,
            node=vertex.id,
            path=job.path,
            index=job.index,
            attempt=job.attempt,
            channel=job,
            generation=job.generation,
            skipped=skipped,
            failures=failures,
        )

    def _failure_at(self, path: str) -> NodeFailure:
        found = self.failures.get(path) or next(
            (f for p, f in self.failures.items() if p.startswith(path + "[") or p.startswith(path + "/")),
            None,
        )
        return found or NodeFailure(path, 0, "", "a node above it failed", reason="upstream_failed")

    def _check_shared(self, job: Job) -> None:
        for binding in job.vertex.bindings:
            shared = (job.feed.shared or {}) if job.feed is not None else {}
            if binding.parameter in shared and binding.source.kind == "parent":
                types = self.rules[binding.source.index].types
                fresh = self._whole_value(job.scope, binding.source)
                if codec.pack(shared[binding.parameter], types) != codec.pack(fresh, types):
                    shared[binding.parameter] = fresh
                    raise MutatedInput(job.path, binding.parameter)

    async def _reconcile(self, job: Job, call: Call) -> Any:
        """Ask the node's `reconcile` what became of the attempt that nobody knows about."""
        ask = job.vertex.node.reconcile
        assert ask is not None
        given = dict(zip((b.parameter for b in job.vertex.bindings), call.args, strict=False)) | dict(
            call.kwargs
        )
        names = ask.__code__.co_varnames[: ask.__code__.co_argcount + ask.__code__.co_kwonlyargcount]
        context = call.context or self._context(job)
        arguments = {
            name: given[name] if name in given else context
            for name in names
            if name in given or name == "ctx"
        }
        found = await ask(**arguments)
        return found if found is NOT_DONE or call.types is None else codec.pack(found, call.types)

    # -- history --------------------------------------------------------------------------------------

    def adopt_history(self, job: Job) -> None:
        """Let a job go on counting where an earlier process stopped."""
        snapshot = self.snapshot
        if not snapshot.paths:
            return
        prior = snapshot.paths.get(job.path)
        if prior is not None:
            job.attempt = (prior.attempt or 0) + 1
            if not self.fresh_budget:
                job.tries = snapshot.attempts_used(job.path) + 1
            job.generation = snapshot.generations.get(job.path, 0)
            job.reconcile = (
                not job.vertex.idempotent
                and job.vertex.node.reconcile is not None
                and decide(prior, None, idempotent=False, reconcilable=True) is RECONCILE
            )

    def last_attempt(self, path: str) -> int:
        """Give the number of the last attempt of a path, 0 if there was none."""
        prior = self.snapshot.paths.get(path)
        return 0 if prior is None else prior.attempt or 0

    def next_attempt(self, path: str) -> int:
        """Give the number that the next attempt of a path has."""
        return self.last_attempt(path) + 1

    def stored(self, prior: Record) -> Stored:
        """Give where the output of a completed path lies."""
        seq, blob = prior.seq or 0, None
        if prior.data is not None:
            facts = prior.facts
            blob = facts.get("blob")
            if prior.reason == MOVED:
                seq = facts["seq"]
        return Stored(prior.path or "", seq, prior.digest or b"", blob)

    def reset(self, prior: Record, reason: str, step: Step) -> None:
        """Note that a completed path is to run again: its next attempt is another operation for the outside world."""
        path = prior.path or ""
        step.records.append(self.record(RESET, path, prior.attempt, reason))
        self.snapshot.generations[path] = self.snapshot.generations.get(path, 0) + 1

    def hold(self, path: str, prior: Record | None, verdict: Verdict, step: Step) -> None:
        """Leave a path alone until a person has spoken."""
        if verdict is UNCERTAIN:
            self.uncertain.append(path)
        else:
            self.held.append(path)
            step.records.append(self.record(WAITING, path, prior.attempt if prior else None, "held"))

    def record(
        self,
        kind: str,
        path: str | None,
        attempt: int | None,
        reason: str | None,
        fingerprint: bytes | None = None,
        **facts: Any,
    ) -> Record:
        """Make the record of something that happened to a path just now."""
        made = node_record(kind, path or "", attempt, self.now(), reason, **facts)
        return made if fingerprint is None else made._replace(input=fingerprint)

    # -- the end --------------------------------------------------------------------------------------

    def _conclude(self, step: Step) -> None:
        """Every node has ended: say how the run did, in the unit that holds the last of it."""
        if step.ends is not None:
            return
        kind, reason = self._verdict()
        step.records.append(run_record(kind, self.now(), reason))
        step.ends = _STATUS[kind]
        self.reason = reason

    def _verdict(self) -> tuple[str, str | None]:
        if self.lost:
            return RUN_INTERRUPTED, "checkpoint_lost"
        if self.uncertain:
            return RUN_INTERRUPTED, "uncertain"
        if self.held:
            return RUN_WAITING, "held"
        return (RUN_FAILED, "node_failed") if self.unhandled() else (RUN_COMPLETED, None)

    def unhandled(self) -> dict[str, NodeFailure]:
        """Give the failures that nothing dealt with, in the order of the definition."""

        def at(path: str) -> tuple[int, int]:
            index = segments(path)[0][1]
            return self.place(path), -1 if index is None else index

        return {
            p: self.failures[p] for p in sorted(self.failures, key=at) if not self._is_handled(self.place(p))
        }

    def _is_handled(self, i: int) -> bool:
        """Say whether a child that runs on failures has dealt with the failure of vertex i."""
        state = self.root.state
        return any(
            self.rules[child].node.trigger == "any_failed" and state[child] == Settled.COMPLETED
            for child in self.rules[i].children
        )

    def place(self, path: str) -> int:
        """Give the root vertex that a path lies in."""
        return self._places[segments(path)[0][0]]

    def is_map(self, path: str) -> bool:
        """Say whether a path is a map itself: no function of it runs, its items do."""
        node, index = segments(path)[-1]
        return index is None and node in self._places and self.rules[self._places[node]].is_map

    @property
    def ids(self) -> dict[int, str]:
        """Give the node of each function, by its identity."""
        return {id(vertex.node.fn): vertex.id for vertex in self.rules}

    def stop(self, kind: str, reason: str, by: str = "", grace: float = 0.0) -> None:
        """Start nothing more; bodies under way have `grace` seconds, then they are cancelled. `ended` tells when it is done."""
        if self.stopping is not None or self.ended.done():
            return
        self.stopping = (kind, reason, by)
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        if grace > 0 and self.live:
            self.background(self._after_grace(grace))
        else:
            self.cancel_bodies()
        self.loop.call_soon(self._check)

    def cancel_bodies(self) -> None:
        """End the bodies that are under way."""
        for job in self.live:
            job.stopped = True
            if job.task is not None:
                job.task.cancel()

    def leave_bodies(self) -> None:
        """Go on without bodies that ignore their cancellation: nothing of what they still do is written."""
        for job in list(self.live):
            log.warning("a body ignores its cancellation and is left behind", run=self.run_id, path=job.path)
            self.live.discard(job)
            self._cut_off(job)
        self._check()

    async def _after_grace(self, seconds: float) -> None:
        tasks = [job.task for job in self.live if job.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        self.cancel_bodies()

    def abort(self) -> None:
        """The run cannot go on: what it did can no longer be written."""
        if self.stopping is None:
            self.stopping = (RUN_INTERRUPTED, "not_stored", "")
        self.poisoned = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self.cancel_bodies()
        self.loop.call_soon(self._check)

    def _check(self) -> None:
        """If nothing of the run is under way, it has ended, or is stuck."""
        if self.ended.done() or self.live or self._inflight or self._background:
            return
        if self.error is not None:
            self._finish(RunStatus.INTERRUPTED)
        elif self.stopping is not None:
            kind, reason, by = self.stopping
            step = Step(self, [run_record(kind, self.now(), reason, **({"by": by} if by else {}))])
            step.ends, self.reason = _STATUS[kind], reason
            self.hand_over(step)
        elif not self._timers and not self.waiting:
            self._stuck()

    def _stuck(self) -> None:
        """Nothing can ever go on, and not every node has ended: a fault of the engine, said loudly."""
        stuck = [v.id for v in self.rules if self.root.state[v.index] == OPEN]
        self.error = DagresumeError(
            f"run {self.run_id} is stuck: {', '.join(stuck[:20])} can never become ready. This is a bug of dagresume;"
            f" please report it with the output of `dagresume show {self.run_id}`."
        )
        self.stopping = (RUN_FAILED, "stuck", "")
        step = Step(self, [run_record(RUN_FAILED, self.now(), "stuck", nodes=stuck[:100])])
        step.ends, self.reason = RunStatus.FAILED, "stuck"
        self.hand_over(step)

    def _finish(self, status: RunStatus) -> None:
        self.status = status
        if not self.ended.done():
            self.ended.set_result(None)

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something beside the bodies; the run does not end before it has."""
        task = self.loop.create_task(self._guarded(work))
        self._background.add(task)
        task.add_done_callback(self._background_done)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self.error = self.error or error
            self.abort()

    def _background_done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        self._check()

    # -- what is left ---------------------------------------------------------------------------------

    def cells(self) -> dict[str, Cell]:
        """Give the outputs of the root's nodes by id, packed or where they lie."""
        found: dict[str, Cell] = {}
        for vertex in self.rules:
            out = self.root.out[vertex.index]
            if self.root.state[vertex.index] != Settled.COMPLETED or vertex.pure:
                continue
            found[vertex.id] = out.cells if isinstance(out, Cells) else out
        return found

    def status_at(self, path: str) -> str | None:
        """Give how a node of the root ended; None if there is no such path."""
        for vertex in self.rules:
            if vertex.id == path:
                state = self.root.state[vertex.index]
                if state == Settled.FAILED and path not in self.failures:
                    return "upstream_failed"
                return "pending" if state == OPEN else Settled(state).name.lower()
        return None


_STATUS: Final = {
    RUN_COMPLETED: RunStatus.COMPLETED,
    RUN_FAILED: RunStatus.FAILED,
    RUN_INTERRUPTED: RunStatus.INTERRUPTED,
    RUN_CANCELLED: RunStatus.CANCELLED,
    RUN_WAITING: RunStatus.WAITING,
}


def start_ready(pool: Pool, step: Step | None = None) -> None:
    """Start what may start now. Start records that must be durable first ride in `step`, or in a unit of their own."""
    units: dict[Run, Step] = {}
    while (job := pool.next()) is not None:
        run: Run = job.run
        if not job.awaits_record:
            run.start(job)
            continue
        if step is not None and run is step.run:
            unit = step
        else:
            unit = units.get(run) or units.setdefault(run, Step(run, []))
        unit.records.append(job.start_record())
        unit.begins.append(job)
    for run, unit in units.items():
        run.hand_over(unit)


async def finished(task: asyncio.Future[str]) -> str:
    """Await something to its end through any number of cancellations; the first of them is raised afterwards."""
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None and task.exception() is not None:
        raise cancelled
    return task.result()


def _executor_of(vertex: Vertex) -> str:
    return vertex.node.executor or ("loop" if vertex.node.signature.asynchronous else "thread")
