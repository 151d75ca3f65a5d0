"""One instance of a graph in a run: what is settled, what is ready, and the maps in it.

State advances when a unit is handed to the journal, in the journal's order; what becomes ready by it stands
in the unit and begins when that is durable. Everything here is synchronous and iterative: chains of 10⁵ nodes
and wide maps included.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dagresume import codec
from dagresume import events as ev
from dagresume.errors import CheckpointLost, StoreError
from dagresume.events import Record
from dagresume.jobs import UNMADE, Cells, Driver, Job, Listing, Raw, Raws, Step, Values
from dagresume.observe import failure_of
from dagresume.planner import RECONCILE, Action, Vertex, decide, handled, part
from dagresume.policy import ItemFailure, Join, NodeFailure, Settled, join, tolerated
from dagresume.pool import Gate
from dagresume.results import Stored
from dagresume.workflow import Source

__all__ = ["OPEN", "Feed", "Scope"]

OPEN: Final = 255  # in Scope.state: not settled
PASSED: Final = "passed"  # reason: the item was handed on uncalled, since there was nothing to call it with
_NULL: Final = "null"
_NULL_DIGEST: Final = codec.digest(_NULL)
_FAILURE: Final = codec.pack(ItemFailure("", "", "")).partition('"v"')[0]


def item_failure(failure: NodeFailure) -> str:
    """Give what stands in a map's list for an item whose failure was tolerated, packed."""
    return codec.pack(ItemFailure(failure.path, failure.type, failure.message))


def _passes(cell: Any) -> bool:
    """Say whether a chained map hands this on uncalled: `None`, or the failure of an item that was
    tolerated.
    """
    return isinstance(cell, str) and (cell == _NULL or cell.startswith(_FAILURE))


def _cell(record: Record) -> str | Stored:
    """Give where the output of a completed item lies; what chained maps hand on is known without a look."""
    if record.reason == PASSED:
        passed: str = record.facts["passed"]
        return passed
    return _NULL if record.digest == _NULL_DIGEST else Stored.of(record)


class Scope:
    """The state of one instance of a graph, by the number of the vertex."""

    def __init__(self, run: Driver, rules: Sequence[Vertex], prefix: str = "") -> None:
        self.run, self.rules, self.prefix = run, rules, prefix
        self.gates: list[Gate | None] = [run.services.pool.gate(v.node.limit, v.id) for v in rules]
        self.left = [len(v.parents) for v in rules]
        self.state = bytearray([OPEN]) * len(rules)
        self.out: list[Any] = [None] * len(rules)
        self.digests: list[bytes] = [bytes(16)] * len(rules)
        self.bad: dict[int, list[int]] = {}  # of how many parents of a vertex did not complete, by how
        self.feeds: dict[int, Feed] = {}
        self.streaming: dict[int, list[Feed]] = {}  # the maps that take the items of this one as they come
        self.remaking: dict[int, list[int]] = {}  # a pure vertex being made again: who waits for it
        self.lacking: dict[int, int] = {}
        self.open = len(rules)
        self._todo: deque[tuple[Any, ...]] = deque((self._decide, v) for v in rules if not v.parents)

    def advance(self, step: Step) -> None:
        """Decide what is ready, and what that makes ready: one after the other, however deep the graph."""
        while self._todo:
            act, *what = self._todo.popleft()
            act(*what, step)

    def later(self, *what: Any) -> None:
        """Note what `advance` is to do: a method and its arguments, without the step."""
        self._todo.append(what)

    def settle(self, i: int, how: Settled, step: Step) -> None:
        """Note how a vertex ended; children whose last parent it was become ready."""
        self.state[i] = how
        self.open -= 1
        left = self.left
        for child in self.rules[i].children:
            left[child] -= 1
            if how:
                self.bad.setdefault(child, [0, 0, 0, 0])[how] += 1
            if not left[child]:
                self._todo.append((self._decide, self.rules[child]))
            elif self.rules[child].chained:
                self._todo.append((self._try_streaming, self.rules[child]))

    def complete(self, i: int, out: Any, digest: bytes, step: Step) -> None:
        """Note what a vertex gave."""
        self.out[i], self.digests[i] = out, digest
        if i in self.remaking:
            self._remade(i, step)
        elif self.state[i] == OPEN:
            self.settle(i, Settled.COMPLETED, step)

    def fail(self, i: int, step: Step, how: Settled = Settled.FAILED) -> None:
        """Note that a vertex has no value."""
        if i in self.remaking:
            self._not_remade(i, step)
        elif self.state[i] == OPEN:
            self.settle(i, how, step)

    def part(self, source: Source) -> bytes:
        """Give what stands for a value in the fingerprint of what receives it."""
        return part(source, self.digests.__getitem__, self.run.input_digests)

    def fingerprint(self, vertex: Vertex) -> bytes:
        """Give the fingerprint of all that a vertex receives."""
        if vertex.only_parents is not None:
            digests = self.digests
            return vertex.fingerprint([digests[p] for p in vertex.only_parents])
        return vertex.fingerprint(map(self.part, vertex.received))

    def path(self, vertex: Vertex) -> str:
        """Give the path of a vertex here."""
        return self.prefix + vertex.id

    # -- deciding -------------------------------------------------------------------------------------

    def _decide(self, vertex: Vertex, step: Step) -> None:
        feed = self.feeds.get(vertex.index)
        if feed is not None:  # it streamed; now all that is above it has ended
            feed.finish(step)
            return
        verdict = self.joined(vertex)
        if verdict is Join.BLOCK:
            asks = self.bad[vertex.index][Settled.OPEN_QUESTION]
            self.settle(vertex.index, Settled.OPEN_QUESTION if asks else Settled.FAILED, step)
        elif verdict is Join.SKIP:
            step.records.append(
                ev.node_record(ev.SKIPPED, self.path(vertex), None, self.run.now(), "trigger")
            )
            self.settle(vertex.index, Settled.SKIPPED, step)
        else:
            paths = self.run.snapshot.paths
            prior = paths.get(self.path(vertex)) if paths else None
            if prior is None:
                self._run(vertex, self.fingerprint(vertex), step)
            else:
                self._decide_again(vertex, prior, self.fingerprint(vertex), step)

    def joined(self, vertex: Vertex) -> Join:
        """Give what the join rule says; nothing runs below what a person has to speak about first."""
        bad = self.bad.get(vertex.index)
        if bad is None and vertex.node.trigger != "any_failed":
            return Join.RUN
        _, skipped, failed, asks = bad or (0, 0, 0, 0)
        if asks:
            return Join.BLOCK
        return join(vertex.node.trigger, len(vertex.parents) - skipped - failed, skipped, failed)

    def _decide_again(self, vertex: Vertex, prior: Record, fingerprint: bytes, step: Step) -> None:
        """Decide about a path that has a history."""
        run, i, path = self.run, vertex.index, self.path(vertex)
        if prior.kind == ev.FAILED and handled(vertex, self.rules, run.snapshot.paths, self.prefix):
            run.failures[path] = failure_of(prior)
            self.settle(i, Settled.FAILED, step)
            return
        verdict = decide(
            prior,
            fingerprint,
            idempotent=vertex.idempotent or vertex.is_map,
            reconcilable=vertex.reconcilable,
        )
        if verdict.action is Action.REUSE:
            self._reuse(vertex, prior, fingerprint, step)
        elif verdict.action is Action.HOLD:
            run.hold(path, prior, verdict, step)
            self.settle(i, Settled.OPEN_QUESTION, step)
        else:
            if prior.kind == ev.COMPLETED:
                run.reset(prior, verdict.reason, step)
            self._run(vertex, fingerprint, step, reconcile=verdict is RECONCILE)

    def _reuse(self, vertex: Vertex, prior: Record, fingerprint: bytes, step: Step) -> None:
        out: Any = UNMADE
        try:
            if not vertex.pure:
                out = self._former_items(prior) if vertex.is_map else Stored.of(prior)
        except CheckpointLost as error:
            self.run.cannot_load(error)
            self.settle(vertex.index, Settled.OPEN_QUESTION, step)
            return
        self.complete(vertex.index, out, fingerprint if vertex.pure else prior.digest or bytes(16), step)

    def _former_items(self, prior: Record) -> Cells:
        """Give where the outputs of a completed map's items lie."""
        cells = Cells(prior.facts["count"])
        for k in range(len(cells)):
            path = f"{prior.path}[{k}]"
            record = self.run.snapshot.paths.get(path)
            if record is None:
                raise CheckpointLost(self.run.run_id, path, "is missing")
            if record.kind == ev.COMPLETED:
                cells.put(k, _cell(record), record.digest or bytes(16))
            else:
                text = item_failure(failure_of(record))
                cells.put(k, text, codec.digest(text))
        return cells

    # -- making ready ---------------------------------------------------------------------------------

    def _run(self, vertex: Vertex, fingerprint: bytes, step: Step, *, reconcile: bool = False) -> None:
        i = vertex.index
        unmade = {p for p in vertex.source_parents if self.out[p] is UNMADE}
        if unmade:
            self.lacking[i] = len(unmade)
            for parent in unmade:
                self.later(self._remake, parent, i)
        elif vertex.is_map:
            self._spread(vertex, fingerprint, step)
        else:
            job = Job(self.run, self, vertex, self.path(vertex), fingerprint, self.gates[i])
            self.run.adopt_history(job)
            job.reconcile, job.again = reconcile, i in self.remaking
            step.opens.append(job)

    def _remake(self, i: int, waiter: int, step: Step) -> None:
        """Have a pure vertex that completed earlier made again, since somebody needs its value."""
        waiters = self.remaking.setdefault(i, [])
        waiters.append(waiter)
        if len(waiters) == 1:
            self._run(self.rules[i], self.digests[i], step)

    def _remade(self, i: int, step: Step) -> None:
        for waiter in self.remaking.pop(i):
            self.lacking[waiter] -= 1
            if not self.lacking[waiter]:
                del self.lacking[waiter]
                self.later(self._run, self.rules[waiter], self.fingerprint(self.rules[waiter]))

    def _not_remade(self, i: int, step: Step) -> None:
        stuck = deque([i])
        while stuck:
            for waiter in self.remaking.pop(stuck.popleft(), ()):
                if self.lacking.pop(waiter, None) is None:
                    continue
                if waiter in self.remaking:
                    stuck.append(waiter)
                else:
                    self.settle(waiter, Settled.FAILED, step)

    # -- maps -----------------------------------------------------------------------------------------

    def _spread(self, vertex: Vertex, fingerprint: bytes, step: Step) -> None:
        """Spread a map out into its items; what it runs over may have to be read first."""
        if self._to_load(vertex):
            self.run.background(self._spread_later(vertex, fingerprint))
            return
        try:
            lists = [self._listing(source) for source in self.run.origins[vertex.index]]
            if len({len(each) for each in lists}) > 1:
                sizes = ", ".join(
                    f"{name}: {len(each)}" for name, each in zip(vertex.node.for_each, lists, strict=True)
                )
                raise ValueError(f"for_each takes lists of one length, item by item; these differ: {sizes}")
            feed = Feed(self, vertex, fingerprint, lists)
        except Exception as error:
            self.run.fail(vertex, self.path(vertex), error, step)
            self.fail(vertex.index, step)
            return
        self.feeds[vertex.index] = feed
        step.records.append(feed.start_record())
        prior = self.run.snapshot.paths.get(feed.path)
        if vertex.chained or (prior is not None and not vertex.pure):
            feed.resume(step, self.run.snapshot.counts.get(feed.path, 0))
        self._stream_children(vertex)
        if feed.left:
            step.opens.append(feed)
        else:
            feed.finish(step)

    def _to_load(self, vertex: Vertex) -> list[int]:
        return [
            p
            for p in vertex.source_parents
            if p not in vertex.value_parents and isinstance(self.out[p], Stored)
        ]

    async def _spread_later(self, vertex: Vertex, fingerprint: bytes) -> None:
        step = Step(self.run, [])
        try:
            for i in self._to_load(vertex):
                cell = self.out[i]
                if isinstance(cell, Stored):  # nobody else has read it meanwhile
                    (self.out[i],) = await self.run.services.fetch(self.run.run_id, [cell])
        except StoreError as error:
            self.run.cannot_load(error)
            self.fail(vertex.index, step, Settled.OPEN_QUESTION)
        else:
            self._spread(vertex, fingerprint, step)
        self.advance(step)
        self.run.hand_over(step)

    def _listing(self, source: Source) -> Listing:
        """Give the list that a map runs over."""
        if source.kind == "input":
            text, _ = self.run.inputs[source.name]
            types = self.run.input_types.get(source.name, codec.EMPTY)
            return Values(_list(codec.unpack(text, types), f"the input {source.name!r}"), types)
        out, parent = self.out[source.place], self.rules[source.place]
        if out is None:
            return Values((), codec.EMPTY)  # the parent was skipped or failed, and this map runs all the same
        if isinstance(out, Cells):
            return out
        if isinstance(out, Raw):
            return Raws(_list(out.value, f"node {parent.id!r}"), self.digests[source.place])
        return Values(_list(codec.unpack(out, parent.types), f"node {parent.id!r}"), parent.types)

    def _stream_children(self, vertex: Vertex) -> None:
        for child in vertex.children:
            if self.rules[child].chained:
                self.later(self._try_streaming, self.rules[child])

    def _try_streaming(self, vertex: Vertex, step: Step) -> None:
        """Spread out a chained map before the maps above have ended, once all else that it needs is there."""
        i = vertex.index
        if i in self.feeds or not vertex.streams or i in self.bad:
            return
        above = [self.feeds.get(p) for p in vertex.chained]
        if any(feed is None or feed.shifted for feed in above):
            return
        if any(self.state[p] == OPEN for p in vertex.parents if p not in vertex.chained):
            return
        if not self._to_load(vertex) and not any(self.out[p] is UNMADE for p in vertex.source_parents):
            self._stream(vertex, step)

    def _stream(self, vertex: Vertex, step: Step) -> None:
        lists: list[Listing] = []
        for source in self.run.origins[vertex.index]:
            feed = self.feeds.get(source.place) if source.kind == "parent" else None
            try:
                lists.append(self._listing(source) if feed is None else feed.cells)
            except Exception:
                return  # said when its parents have ended
        prior, count = self.run.snapshot.paths.get(self.path(vertex)), len(lists[0])
        former = self.run.snapshot.counts.get(self.path(vertex), 0)
        if prior is not None and (prior.kind == ev.COMPLETED or former != count):
            return
        if any(len(each) != count for each in lists):
            return
        child = self.feeds[vertex.index] = Feed(self, vertex, None, lists)
        child.todo = deque()
        for parent in vertex.chained:
            self.streaming.setdefault(parent, []).append(child)
        step.records.append(child.start_record())
        self._stream_children(vertex)
        for k in range(count):
            if any(k in self.feeds[parent].lost for parent in vertex.chained):
                child.lose(k, step)
            else:
                child.arrived(k, step)


def _list(value: Any, what: str) -> Sequence[Any]:
    if isinstance(value, list | tuple):
        return value
    raise TypeError(f"for_each needs a list or tuple; {what} gave {type(value).__name__}")


class Feed:
    """One map, spread out: which of its items are ready, running, settled. A source of the pool that gives
    its items.

    `todo` are the items that are ready; None: all of them from `next` on. `fingerprint` None: the map
    streams, and what it receives is known only when the maps above have ended. `shifted`: its items are not
    those of an earlier process.
    """

    def __init__(self, scope: Scope, vertex: Vertex, fingerprint: bytes | None, lists: list[Listing]) -> None:
        self.run, self.scope, self.vertex, self.fingerprint, self.lists = (
            scope.run,
            scope,
            vertex,
            fingerprint,
            lists,
        )
        self.path, self.gate = scope.path(vertex), scope.gates[vertex.index]
        self.attempt = self.run.next_attempt(self.path)
        self.cap = vertex.node.concurrency or 1 << 60
        self.count = self.left = len(lists[0])
        self.cells = Cells(self.count)
        self.todo: deque[int] | None = None
        self.next = self.live = self.failed_in_row = 0
        self.queued = self.given_up = self.shifted = False
        self.failures: dict[int, NodeFailure] = {}
        self.lost: set[int] = set()  # items that ended without a value
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

    def take(self) -> Job:
        if self.todo is not None:
            return self._job(self.todo.popleft())
        self.next += 1
        return self._job(self.next - 1)

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
                continue
            if k < self.count and prior.input == fingerprints[k]:
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
        self.cells.put(k, _cell(prior), prior.digest or bytes(16))
        self.left -= 1

    def _adopt(self, k: int, prior: Record, step: Step) -> None:
        """Item k stood at another place of the list before; its output stays where it is."""
        facts = json.dumps(prior.facts | {"seq": Stored.of(prior).seq, "from": prior.path})
        moved = prior._replace(
            path=f"{self.path}[{k}]", at=self.run.now(), reason=ev.MOVED, data=facts, seq=None
        )
        step.records.append(moved)
        self._reuse(k, moved)

    def _opens(
        self, k: int, prior: Record | None, fingerprint: bytes, step: Step, *, displaced: bool = False
    ) -> bool:
        """Say whether item k is to run. `displaced`: what stood at its place stands elsewhere now, so it is a
        new one.
        """
        vertex = self.vertex
        verdict = decide(prior, fingerprint, idempotent=vertex.idempotent, reconcilable=vertex.reconcilable)
        if prior is not None and prior.reason == PASSED:
            return True  # no body of it ever began
        completed = prior is not None and prior.kind == ev.COMPLETED
        if verdict.action is Action.HOLD and not (displaced and completed):
            self.run.hold(f"{self.path}[{k}]", prior, verdict, step)
            self.lose(k, step)
            return False
        if completed and prior is not None:
            self.run.reset(prior, verdict.reason, step)
        return True

    # -- how items end --------------------------------------------------------------------------------

    def settled(self, k: int, cell: Any, digest: bytes, step: Step) -> None:
        """Item k has a value."""
        self.cells.put(k, cell, digest)
        self.left -= 1
        self.failed_in_row = 0
        for child in self.scope.streaming.get(self.vertex.index, ()):
            self.scope.later(child.arrived, k)
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
        for child in self.scope.streaming.get(self.vertex.index, ()):
            self.scope.later(child.lose, k)
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
            Record(
                ev.COMPLETED, "success", 1, now, path, PASSED, fingerprint, digest, len(cell), 0, facts, cell
            )
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
        if prior is not None and prior.kind == ev.COMPLETED and prior.input == fingerprint:
            self.settled(k, _cell(prior), prior.digest or bytes(16), step)
        elif passed is not None:
            self._pass_on(k, passed, fingerprint, step)
        elif prior is None or self._opens(k, prior, fingerprint, step):
            step.arrivals.append((self, k))

    def finish(self, step: Step) -> None:
        """All items have ended, or what is above has: a streaming map ends with both, and fails with what is
        above.
        """
        scope, i, node = self.scope, self.vertex.index, self.vertex.node
        if self.left or scope.left[i] or not (scope.state[i] == OPEN or i in scope.remaking):
            return
        whole = not self.lost and scope.joined(self.vertex) is Join.RUN
        if whole and tolerated(node.tolerate, len(self.failures), self.count):
            digest = hashlib.sha256(b"%d:" % self.count + self.cells.digests).digest()[:16]
            step.records.append(self._record(ev.COMPLETED, "success", None, digest))
            step.concludes = True
            scope.complete(
                i, self.cells, digest if not self.vertex.pure else self.fingerprint or digest, step
            )
            return
        self.run.failures.update((failure.path, failure) for failure in self.failures.values())
        how = Settled.FAILED
        if self.failures:
            step.records.append(self._record(ev.FAILED, "failed", "items_failed", None))
        else:  # what stopped it is elsewhere: above it, or with a person
            held, uncertain = any(map(self._owns, self.run.held)), any(map(self._owns, self.run.uncertain))
            kind = ev.WAITING if held else ev.INTERRUPTED if uncertain else ev.WITHDRAWN
            reason = "held" if held else "uncertain" if uncertain else "upstream_failed"
            step.records.append(self._record(kind, ev.r5_word(kind) or "", reason, None))
        if self.asks or (scope.bad.get(i) or [0] * 4)[Settled.OPEN_QUESTION]:
            how = Settled.OPEN_QUESTION
        scope.fail(i, step, how)

    @property
    def asks(self) -> bool:
        """Whether an item waits for a person's word."""
        return any(map(self._owns, (*self.run.held, *self.run.uncertain))) or bool(self.run.lost)

    def _owns(self, path: str) -> bool:
        return path.startswith(self.path + "[")

    def _record(self, kind: str, status: str, reason: str | None, digest: bytes | None) -> Record:
        if self.fingerprint is None:
            self.fingerprint = self.scope.fingerprint(self.vertex)
        took = max(0, round((self.run.services.clock.monotonic() - self.began) * 1e6))
        facts = json.dumps({"count": self.count, "failed": len(self.failures)})
        now = self.run.now()
        return Record(
            kind, status, self.attempt, now, self.path, reason, self.fingerprint, digest, None, took, facts
        )

    def start_record(self) -> Record:
        """Give the record that the map was spread out into so many items."""
        facts = json.dumps({"count": self.count})
        return Record(
            ev.STARTED, "running", self.attempt, self.run.now(), self.path, None, self.fingerprint, data=facts
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
