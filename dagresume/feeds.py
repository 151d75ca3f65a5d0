"""Maps: which of a map's items are ready, running, settled, and what is reused of them."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from dagresume import codec
from dagresume import events as ev
from dagresume.events import Record
from dagresume.jobs import OPEN, Cells, Job, Listing, Step
from dagresume.nests import Nest
from dagresume.observe import failure_of
from dagresume.planner import Vertex, matches
from dagresume.policy import ItemFailure, Join, NodeFailure, Settled, tolerated
from dagresume.results import Stored

__all__ = ["NULL", "NULL_DIGEST", "PASSED", "Feed", "cell_of", "holds_output", "item_failure"]

PASSED: Final = "passed"  # reason: the item was handed on uncalled, since there was nothing to call it with
NULL: Final = "null"
NULL_DIGEST: Final = codec.digest(NULL)
_FAILURE: Final = codec.pack(ItemFailure("", "", "")).partition('"v"')[0]


def item_failure(failure: NodeFailure) -> str:
    """Give what stands in a map's list for an item whose failure was tolerated, packed."""
    return codec.pack(ItemFailure(failure.path, failure.type, failure.message))


def _passes(cell: Any) -> bool:
    """Say whether a chained map hands this on uncalled: `None`, or the failure of an item that was
    tolerated.
    """
    return isinstance(cell, str) and (cell == NULL or cell.startswith(_FAILURE))


def holds_output(record: Record) -> bool:
    """Say whether a record holds its own output. What was in the store may have been altered there."""
    text = record.output
    return text is not None and (record.seq is None or codec.digest(text) == record.digest)


def cell_of(record: Record) -> str | Stored:
    """Give the output of a completed item if it is at hand, else where it lies; what chained maps hand on is
    known without a look.
    """
    if record.reason == PASSED:
        passed: str = record.facts["passed"]
        return passed
    if record.output is not None and holds_output(record):
        return record.output
    return NULL if record.digest == NULL_DIGEST else Stored.of(record)


class Feed:
    """One map, spread out: which of its items are ready, running, settled. A source of the pool that gives
    its items.

    `todo` are the items that are ready; None: all of them from `next` on. `fingerprint` None: the map
    streams, and what it receives is known only when the maps above have ended. `shifted`: its items are not
    those of an earlier process.
    """

    def __init__(self, scope: Any, vertex: Vertex, fingerprint: bytes | None, lists: list[Listing]) -> None:
        self.run, self.scope, self.vertex, self.fingerprint, self.lists = (
            scope.run,
            scope,
            vertex,
            fingerprint,
            lists,
        )
        self.path = scope.path(vertex)
        if vertex.body is not None:
            self.run.wide.append(self)
        self.inside = vertex.body is not None  # its items are graphs: they take no slots themselves
        self.gate = None if vertex.node.when is not None else self.run.gate_of(vertex)
        self.attempt = self.run.next_attempt(self.path)
        self.cap = vertex.node.concurrency or (self.run.services.pool.size if self.inside else 1 << 60)
        self.count = self.left = len(lists[0])
        self.cells = Cells(self.count)
        self.todo: deque[int] | None = None
        self.next = self.live = self.failed_in_row = 0
        self.queued = self.given_up = self.shifted = False
        self.failures: dict[int, NodeFailure] = {}
        self.lost: set[int] = set()  # items that ended without a value
        self._entered: set[int] = set()  # items that are graphs, and open
        self._seen = bytearray(self.count)  # items of a streaming map that all of what is above has reached
        self.shared: dict[str, Any] = {}  # what all items receive, decoded once
        self.began = self.run.services.clock.monotonic()
        # what an item receives, in the order of the fingerprint: a digest, or the number of the list it is
        # taken from
        places = iter(range(len(lists)))
        items = {b.parameter for b in vertex.bindings if b.source.kind == "item"}
        fed = [b.parameter for b in vertex.bindings if b.source.kind != "context"]
        self._parts: list[bytes | int] = [
            next(places) if name in items else scope.part(source)
            for name, source in zip(fed, vertex.received, strict=True)
        ]

    # as a source of the pool

    @property
    def dropped(self) -> bool:
        return self.run.stopping is not None

    @property
    def more(self) -> bool:
        if self.live >= self.cap or self.given_up:
            return False
        return self.next < self.count if self.todo is None else bool(self.todo)

    def widen(self, step: Step) -> bool:
        """All graphs that are open wait for something: open more of them, if nothing but our own bound keeps
        them; False if there are none.
        """
        bound = self.inside and self.vertex.node.concurrency is None and self.live >= self.cap
        if not bound or self.given_up or not (self.next < self.count if self.todo is None else self.todo):
            return False
        self.cap += self.run.services.pool.size
        self.offer(step)
        return True

    def take(self) -> Job:
        return self._job(self._next())

    def _next(self) -> int:
        if self.todo is not None:
            return self.todo.popleft()
        self.next += 1
        return self.next - 1

    def offer(self, step: Step) -> None:
        """Its items that are ready may begin as soon as the step is durable."""
        if not self.inside or self.vertex.node.when is not None:
            if self.more:  # what is held or lost begins nothing
                step.opens.append(self)
        else:
            self.run.later(self._enter)

    def _enter(self, step: Step) -> None:
        """Enter as many of the graphs that its items are as may be open at once."""
        while self.more and self.run.stopping is None:
            k = self._next()
            self.live += 1
            self._entered.add(k)
            self.enter(k, step)

    def enter(self, k: int, step: Step) -> None:
        """Enter the graph that item k is."""
        cells, fingerprint = self._item(k)
        digests = [each.get(k)[1] for each in self.lists]
        Nest(self.scope, self.vertex, f"{self.path}[{k}]", fingerprint, cells, digests, self, k).start(step)

    def _left(self, k: int) -> None:
        """The graph of an item has ended: another one may be entered."""
        if k in self._entered:
            self._entered.remove(k)
            self.live -= 1
            if self.vertex.node.when is None:
                self.run.later(self._enter)
            elif self.more and not self.queued and self.run.stopping is None:
                self.run.services.pool.offer(self)

    def _item(self, k: int) -> tuple[list[Any], bytes]:
        """Give what item k receives of the lists, and its fingerprint."""
        found = [each.get(k) for each in self.lists]
        parts = (found[p][1] if isinstance(p, int) else p for p in self._parts)
        return [cell for cell, _ in found], self.vertex.fingerprint(parts)

    def _job(self, k: int) -> Job:
        self.live += 1  # given back by the run when the job has ended
        cells, fingerprint = self._item(k)
        job = Job(
            self.run, self.scope, self.vertex, f"{self.path}[{k}]", fingerprint, self.gate, self, k, cells
        )
        self.run.adopt_history(job)
        job.asking = self.vertex.node.when is not None and not job.reconcile
        job.answered = self.scope.was_asked(self.run.snapshot.paths.get(job.path), fingerprint)
        if self.inside:
            self._entered.add(k)
        return job

    # -- what has been before -------------------------------------------------------------------------

    def resume(self, step: Step, former_count: int) -> None:
        """Match the items with what an earlier process has done of this map: by digest and occurrence, then
        by place.
        """
        paths = {} if self.vertex.pure else self.run.snapshot.paths  # a pure map keeps nothing
        self.todo = deque()
        fingerprints = [self._item(k)[1] for k in range(self.count)]
        priors = [paths.get(f"{self.path}[{k}]") for k in range(max(self.count, former_count))]
        spare = _Spare()
        for k, prior in enumerate(priors):
            if prior is None or prior.kind != ev.COMPLETED:
                if k < self.count and _was_skipped(prior, fingerprints[k]):
                    self.cells.put(k, NULL, NULL_DIGEST)
                    self.left -= 1
                continue
            if k < self.count and matches(prior, fingerprints[k]):
                self.run.reused(prior, fingerprints[k], step)
                self._reuse(k, prior)
            elif prior.reason != PASSED:
                spare.add(k, prior)
                self.shifted = True
        self._keep_tolerated(fingerprints, priors)
        self._fill(fingerprints, priors, spare, step)
        for prior in priors[self.count :]:
            if prior is not None and prior.kind != ev.WITHDRAWN:
                path, now = prior.path or "", self.run.now()
                step.records.append(ev.node_record(ev.WITHDRAWN, path, prior.attempt, now, "item_gone"))

    def _keep_tolerated(self, fingerprints: list[bytes], priors: list[Record | None]) -> None:
        """Failures that were tolerated stay so while they are few enough; those of a failed map run again."""
        former = self.run.snapshot.paths.get(self.path)
        if self.vertex.node.tolerate is None or (former is not None and former.kind == ev.FAILED):
            return
        failed = {
            k: prior
            for k, prior in enumerate(priors[: self.count])
            if prior is not None
            and (prior.kind, prior.input) == (ev.FAILED, fingerprints[k])
            and prior.reason != ev.RETRY
        }
        if tolerated(self.vertex.node.tolerate, len(failed), self.count):
            for k, prior in failed.items():
                self.failures[k] = failure_of(prior)
                text = item_failure(self.failures[k])
                self.cells.put(k, text, codec.digest(text))
                self.left -= 1

    def _fill(
        self, fingerprints: list[bytes], priors: list[Record | None], spare: _Spare, step: Step
    ) -> None:
        """Settle or open the items that are not what stood at their place before."""
        assert self.todo is not None
        rest = [k for k in range(self.count) if self.cells.cells[k] is None]
        passed = {k: self._passed(k) for k in rest} if self.vertex.chained else {}
        moved = {k: spare.take(fingerprints[k]) for k in rest if passed.get(k) is None}
        for k in rest:
            found, through = moved.get(k), passed.get(k)
            if through is not None:
                self._pass_on(k, through, fingerprints[k], step)
            elif found is not None:
                self._adopt(k, found, step)
            elif self._opens(k, priors[k], fingerprints[k], step, displaced=k in spare.taken):
                self.todo.append(k)

    def _reuse(self, k: int, prior: Record) -> None:
        self.cells.put(k, cell_of(prior), prior.digest or bytes(16))
        self.left -= 1

    def _adopt(self, k: int, prior: Record, step: Step) -> None:
        """Item k stood at another place of the list before; its output stays where it is."""
        facts = json.dumps(prior.facts | {"seq": Stored.of(prior).seq, "from": prior.path})
        moved = prior._replace(
            path=f"{self.path}[{k}]", at=self.run.now(), reason=ev.MOVED, data=facts, output=None, seq=None
        )
        step.records.append(moved)
        self._reuse(k, moved)

    def _opens(
        self, k: int, prior: Record | None, fingerprint: bytes, step: Step, *, displaced: bool = False
    ) -> bool:
        """Say whether item k is to run. `displaced`: what stood at its place stands elsewhere now, so it is a
        new one.
        """
        if prior is None or prior.reason == PASSED:
            return True  # no body of it ever began
        if displaced and prior.kind == ev.COMPLETED:
            self.run.reset(prior, "input_changed", step)
            return True
        opens: bool = self.scope.opens(self.vertex, prior, fingerprint, step, self, k)
        return opens

    def reopen(self, k: int, step: Step) -> None:
        """An item that was held, or whose back-off is over, runs."""
        if self.todo is None:
            self.todo = deque(range(self.next, self.count))
        self.todo.append(k)
        self.offer(step)

    # -- how items end --------------------------------------------------------------------------------

    def settled(self, k: int, cell: Any, digest: bytes, step: Step, text: str | None = None) -> None:
        """Item k has a value."""
        self.cells.put(k, cell, digest)
        self.left -= 1
        self.failed_in_row = 0
        self._left(k)
        for child in self.scope.streaming.get(self.vertex.index, ()):
            self.run.later(child.arrived, k)
        if not self.left:
            self.finish(step)

    def failed(self, k: int, failure: NodeFailure, step: Step) -> None:
        """Item k has failed for good."""
        self.failures[k] = failure
        row = self.failed_in_row + 1
        if self.vertex.node.tolerate is None:
            self.lose(k, step)
        else:
            text = item_failure(failure)
            self.settled(k, text, codec.digest(text), step)
        self.failed_in_row = row
        limit = self.vertex.retry.give_up_after
        if limit is not None and row >= limit and not self.given_up:
            self.given_up = True
            rest = range(self.next, self.count) if self.todo is None else list(self.todo)
            for waiting in rest:
                self.lose(waiting, step)

    def lose(self, k: int, step: Step) -> None:
        """Item k has ended without a value, or never becomes ready; nor does what takes it below."""
        if k in self.lost:
            return  # two of the maps above say so
        self.lost.add(k)
        self.left -= 1
        self._left(k)
        for child in self.scope.streaming.get(self.vertex.index, ()):
            self.run.later(child.lose, k)
        if not self.left:
            self.finish(step)

    def _passed(self, k: int) -> str | None:
        """Give what item k hands on uncalled, if a map above has no value for it."""
        above = (each.cells[k] for each in self.lists if isinstance(each, Cells))
        return next((cell for cell in above if _passes(cell)), None)

    def _pass_on(self, k: int, cell: str, fingerprint: bytes, step: Step) -> None:
        now, path, facts = self.run.now(), f"{self.path}[{k}]", json.dumps({"passed": cell})
        digest = codec.digest(cell)
        step.records.append(
            Record(ev.COMPLETED, 1, now, path, PASSED, fingerprint, digest, len(cell), 0, facts, cell)
        )
        self.settled(k, cell, digest, step)

    def arrived(self, k: int, step: Step) -> None:
        """An item above has settled: if all that this item takes is there, it can begin once that is
        durable.
        """
        above = [each.cells[k] for each in self.lists if isinstance(each, Cells)]
        if self._seen[k] or any(cell is None for cell in above):
            return
        self._seen[k] = 1  # each of the maps above says that it has settled
        passed = self._passed(k)
        prior = None if self.vertex.pure else self.run.snapshot.paths.get(f"{self.path}[{k}]")
        fingerprint = self._item(k)[1] if prior is not None or passed is not None else b""
        if prior is not None and matches(prior, fingerprint):
            self.run.reused(prior, fingerprint, step)
            self.settled(k, cell_of(prior), prior.digest or bytes(16), step)
        elif _was_skipped(prior, fingerprint):
            self.settled(k, NULL, NULL_DIGEST, step)
        elif passed is not None:
            self._pass_on(k, passed, fingerprint, step)
        elif prior is None or self._opens(k, prior, fingerprint, step):
            if self.inside:
                assert self.todo is not None
                self.todo.append(k)
                self.offer(step)
            else:
                step.arrivals.append((self, k))

    def finish(self, step: Step) -> None:
        """All items have ended, or what is above has: a streaming map ends with both, and fails with what is
        above.
        """
        scope, i, node = self.scope, self.vertex.index, self.vertex.node
        if (
            self.left
            or scope.left[self.vertex.junction]
            or not (scope.state[i] == OPEN or i in scope.remaking)
        ):
            return
        joined = scope.joined(self.vertex)
        whole = not self.lost and joined is Join.RUN
        if whole and tolerated(node.tolerate, len(self.failures), self.count):
            if self.inside:
                for failure in self.failures.values():
                    self.run.forgive(failure.path)
            digest = hashlib.sha256(b"%d:" % self.count + self.cells.digests).digest()[:16]
            step.records.append(self._record(ev.COMPLETED, None, digest))
            step.concludes = True
            self.lists = []  # a list may be large, and nobody takes anything of it any more
            scope.complete(
                i, self.cells, digest if not self.vertex.pure else self.fingerprint or digest, step
            )
            return
        how = Settled.FAILED
        blocked = joined is Join.BLOCK  # by what failed above: it is no matter then that some items could run
        if not self.inside and not blocked:  # else what failed inside says more
            self.run.failures.update((failure.path, failure) for failure in self.failures.values())
        if self.failures and not blocked:
            step.records.append(self._record(ev.FAILED, "items_failed", None))
        else:  # what stopped it is elsewhere: above it, or with a person
            uncertain = any(map(self._owns, self.run.uncertain))
            kind = ev.INTERRUPTED if uncertain else ev.WITHDRAWN
            reason = "uncertain" if uncertain else "upstream_failed"
            step.records.append(self._record(kind, reason, None))
        if self.asks or (scope.bad.get(self.vertex.junction) or [0] * 4)[Settled.OPEN_QUESTION]:
            how = Settled.OPEN_QUESTION
        if blocked and scope.state[i] == OPEN:
            scope.settle(i, how, step)
        else:
            scope.fail(i, step, how)

    @property
    def asks(self) -> bool:
        """Whether an item waits for a person's word."""
        return any(map(self._owns, self.run.uncertain)) or bool(self.run.lost)

    def _owns(self, path: str) -> bool:
        return path.startswith(self.path + "[")

    def _record(self, kind: str, reason: str | None, digest: bytes | None) -> Record:
        if self.fingerprint is None:
            self.fingerprint = self.scope.fingerprint(self.vertex)
        took = max(0, round((self.run.services.clock.monotonic() - self.began) * 1e6))
        facts = json.dumps({"count": self.count, "failed": len(self.failures)})
        now = self.run.now()
        return Record(kind, self.attempt, now, self.path, reason, self.fingerprint, digest, None, took, facts)

    def start_record(self) -> Record:
        """Give the record that the map was spread out into so many items."""
        facts = json.dumps({"count": self.count})
        return Record(ev.STARTED, self.attempt, self.run.now(), self.path, None, self.fingerprint, data=facts)


def _was_skipped(prior: Record | None, fingerprint: bytes) -> bool:
    """Say whether `when=` said no to this very input."""
    return prior is not None and (prior.kind, prior.reason, prior.input) == (
        ev.SKIPPED,
        ev.CONDITION,
        fingerprint,
    )


@dataclass(slots=True)
class _Spare:
    """Completed items that are not at their old place any more, by what they had received."""

    by_input: dict[bytes | None, deque[tuple[int, Record]]] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)

    def add(self, k: int, prior: Record) -> None:
        self.by_input.setdefault(prior.input, deque()).append((k, prior))

    def take(self, fingerprint: bytes) -> Record | None:
        found = self.by_input.get(fingerprint)
        if not found:
            return None
        k, prior = found.popleft()
        self.taken.add(k)
        return prior
