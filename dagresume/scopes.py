"""One instance of a graph in a run: what is settled, what is ready, and the maps in it.

State advances when a unit is handed to the journal, in the journal's order; what becomes ready by it stands
in the unit and begins when that is durable. Everything here is synchronous and iterative: chains of 10⁵ nodes
and wide maps included.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Final

from dagresume import codec
from dagresume import events as ev
from dagresume.errors import CheckpointLost, StoreError
from dagresume.events import Record, Records
from dagresume.feeds import NULL, NULL_DIGEST, Feed, cell_of, item_failure
from dagresume.jobs import (
    OPEN,
    UNMADE,
    Cells,
    Driver,
    Former,
    Input,
    Job,
    Listing,
    Raw,
    Raws,
    Step,
    Values,
    load_cells,
)
from dagresume.nests import Loop, Nest, whole
from dagresume.observe import failure_of
from dagresume.planner import (
    HELD,
    Action,
    Body,
    Junction,
    Vertex,
    decide,
    handled,
    part,
    resolution,
    reuses,
    uncertain,
)
from dagresume.policy import Join, NodeFailure, Settled, join
from dagresume.pool import Gate
from dagresume.results import Stored
from dagresume.workflow import Source

__all__ = ["Scope"]

_NO_DIGEST: Final = bytes(16)
_place: Final = attrgetter("index")
_id: Final = attrgetter("id")
_OUTSIDE: Final = -1  # in place of a vertex: the node that this graph is in waits for what is made again


_ENDED: Final = frozenset({ev.COMPLETED, ev.FAILED, ev.SKIPPED, ev.INTERRUPTED, ev.CANCELLED, ev.STARTED})


class Scope:
    """The state of one instance of a graph, by the number of the vertex."""

    def __init__(
        self, run: Driver, body: Body, inputs: Mapping[str, Input], prefix: str = "", nest: Nest | None = None
    ) -> None:
        self.run, self.body, self.rules, self.prefix = run, body, body.rules, prefix
        self.inputs, self._nest = inputs, nest
        self._input_digests = {name: given.digest for name, given in inputs.items()}
        rules = body.rules
        self.left = body.degrees.copy()  # of each junction: how many parents have not ended
        self.bad: dict[int, list[int]] = {}  # of a junction: how many of them did not complete, by how
        self.state = bytearray([OPEN]) * len(rules)
        self.out: list[Any] = [None] * len(rules)
        self.digests: list[bytes] = [_NO_DIGEST] * len(rules)
        self.away: set[int] = set()  # whose outputs may not be in memory
        self.alike: dict[int, bytes] = {}  # by Vertex.alike: their fingerprint
        self.given: dict[int, tuple[Any, ...]] = {}  # and what they receive, if they can share it
        self.feeds: dict[int, Feed] = {}
        self.streaming: dict[int, list[Feed]] = {}  # the maps that take the items of this one as they come
        self.remaking: dict[int, list[int]] = {}  # a pure vertex being made again: who waits for it
        self.lacking: dict[int, int] = {}
        self.lamed: set[int] = set()  # who waits for a pure vertex that could not be made again
        self.failed: set[int] = set()  # vertices that failed themselves, not for what is above them
        self.open = len(rules)
        for junction in body.junctions:
            if not junction.parents:
                run.todo.append((self._decide_all, junction.vertices))
        if not rules and nest is not None:
            run.later(nest.ended)

    def inside(self, body: Body, prefix: str, inputs: Mapping[str, Input], nest: Nest) -> Scope:
        """Give an instance of a graph inside a node of this one."""
        return Scope(self.run, body, inputs, prefix, nest)

    def settle(self, i: int, how: Settled, step: Step) -> None:
        """Note how a vertex ended; children whose last parent it was become ready, in the order of the
        definition.
        """
        self.state[i] = how
        self.open -= 1
        ready: list[Vertex] = []
        for junction in self.body.below[i]:
            if how:
                self.bad.setdefault(junction.index, [0, 0, 0, 0])[how] += 1
            ready += self._count_down(junction)
        if ready or not self.open:
            self._begin_below(ready)

    def complete(self, i: int, out: Any, digest: bytes, step: Step) -> None:
        """Note what a vertex gave."""
        self._keep(self.rules[i], out, digest)
        if i in self.remaking:
            self._remade(i, step)
        elif self.state[i] == OPEN:
            self.settle(i, Settled.COMPLETED, step)

    def _keep(self, vertex: Vertex, out: Any, digest: bytes) -> None:
        i = vertex.index
        self.out[i], self.digests[i] = out, digest
        if type(out) is not str and (type(out) is Stored or out is UNMADE or isinstance(out, Cells)):
            self.away.add(i)
        if self.prefix and not vertex.pure:
            self.run.inner[self.prefix + vertex.id] = out

    def fail(self, i: int, step: Step, how: Settled = Settled.FAILED) -> None:
        """Note that a vertex has no value."""
        if how is Settled.FAILED:
            self.failed.add(i)
        if i in self.remaking:
            self._remade(i, step, good=False)
        elif self.state[i] == OPEN:
            self.settle(i, how, step)

    def part(self, source: Source) -> bytes:
        """Give what stands for a value in the fingerprint of what receives it."""
        return part(source, self.digests.__getitem__, self._input_digests)

    def types(self, source: Source) -> codec.Types:
        """Give the classes that what comes from there may hold."""
        if source.kind == "parent":
            return self.rules[source.place].types
        given = self.inputs.get(source.name)
        return codec.EMPTY if given is None else given.types

    # -- how it did -----------------------------------------------------------------------------------

    def unhandled(self) -> list[int]:
        """Give the vertices whose own failure nothing here has dealt with."""
        return [i for i in self.failed if not self.is_handled(i)]

    def is_handled(self, i: int) -> bool:
        """Say whether a child that runs on failures has completed below this vertex."""
        rules, state = self.rules, self.state
        return any(
            rules[c].node.trigger == "any_failed" and state[c] == Settled.COMPLETED for c in rules[i].children
        )

    def forgive_handled(self) -> None:
        """Failures that were dealt with here are no failures of the run."""
        for i in self.failed:
            if self.is_handled(i):
                self.run.forgive(self.path(self.rules[i]))

    @property
    def asks(self) -> bool:
        """Whether a person has to speak about something here first."""
        return Settled.OPEN_QUESTION in self.state

    def fingerprint(self, vertex: Vertex) -> bytes:
        """Give the fingerprint of all that a vertex receives."""
        alike = vertex.alike
        if alike is not None and (known := self.alike.get(alike)) is not None:
            return known
        parents, digests = vertex.only_parents, self.digests
        if parents is None:
            return vertex.fingerprint(map(self.part, vertex.received))
        fingerprint = vertex.fingerprint([digests[p] for p in parents])
        if alike is not None:
            self.alike[alike] = fingerprint
        return fingerprint

    def path(self, vertex: Vertex) -> str:
        """Give the path of a vertex here."""
        return self.prefix + vertex.id

    # -- deciding -------------------------------------------------------------------------------------

    def _decide_all(self, vertices: Sequence[Vertex], step: Step) -> None:
        if self.run.snapshot.paths:
            self._decide_again_all(vertices, step)
            return
        known = self.bad or self.away or self.remaking
        for vertex in vertices:
            if known or not vertex.is_usual:
                self._decide(vertex, step)
            else:  # nothing has been, nothing is amiss: there is nothing to decide
                path, gate = self.prefix + vertex.id, self.run.gate_of(vertex)
                step.opens.append(Job(self.run, self, vertex, path, self.fingerprint(vertex), gate))

    def _decide_again_all(self, vertices: Sequence[Vertex], step: Step) -> None:
        paths = map(self.path, vertices) if self.prefix else map(_id, vertices)
        rows = self.run.snapshot.paths.find(paths)
        stayed: list[int] = []
        others: list[Vertex] = []
        for vertex, row in zip(vertices, rows, strict=True):
            if row is not None and row[0] == ev.COMPLETED and self._stays(vertex, row):
                stayed.append(vertex.index)
            else:
                others.append(vertex)
        self._settle_all(stayed)
        for vertex in others:
            self._decide(vertex, step)

    def _stays(self, vertex: Vertex, row: ev.Row) -> bool:
        """Note what a resume meets most: the output of a function that has completed with this very input.
        False: it is something else; `_decide` would come to the same, but asks more.
        """
        if not vertex.is_usual or (self.bad and vertex.junction in self.bad):
            return False
        prior, fingerprint = ev.new_record(row), self.fingerprint(vertex)
        verdict = decide(prior, fingerprint, idempotent=vertex.idempotent)
        if prior.input != fingerprint or verdict.action is not Action.REUSE:
            return False
        if vertex.pure:
            self._keep(vertex, UNMADE, fingerprint)
        else:
            self._keep(vertex, cell_of(prior), prior.digest or _NO_DIGEST)
        return True

    def _settle_all(self, completed: Sequence[int]) -> None:
        """Do as `settle` does for each, of which all have completed."""
        if not completed:
            return
        for i in completed:
            self.state[i] = Settled.COMPLETED
        self.open -= len(completed)
        ready: list[Vertex] = []
        for junction, ended in Counter(
            chain.from_iterable(map(self.body.below.__getitem__, completed))
        ).items():
            ready += self._count_down(junction, ended)
        self._begin_below(ready)

    def _count_down(self, junction: Junction, ended: int = 1) -> Sequence[Vertex]:
        """Note that so many parents of a junction have ended; gives whose turn has come by that."""
        self.left[junction.index] -= ended
        if not self.left[junction.index]:
            return junction.vertices
        for child in junction.chained:
            self.run.later(self._try_streaming, child)
        return ()

    def _begin_below(self, ready: list[Vertex]) -> None:
        """Have these decided about; if nothing is left open here, the node around has ended."""
        if ready:
            ready.sort(key=_place)
            self.run.todo.append((self._decide_all, ready))
        if not self.open and self._nest is not None:
            self.run.later(self._nest.ended)

    def _decide(self, vertex: Vertex, step: Step) -> None:
        feed = self.feeds.get(vertex.index)
        if feed is not None:  # it streamed; now all that is above it has ended
            feed.finish(step)
            return
        verdict = self.joined(vertex)
        if verdict is Join.BLOCK:
            self._block(vertex, step)
            asks = self.bad[vertex.junction][Settled.OPEN_QUESTION]
            self.settle(vertex.index, Settled.OPEN_QUESTION if asks else Settled.FAILED, step)
            return
        paths = self.run.snapshot.paths
        prior = paths.get(self.path(vertex)) if paths else None
        if verdict is Join.SKIP:
            if prior is None or (prior.kind, prior.reason) != (ev.SKIPPED, "trigger"):
                path, now = self.path(vertex), self.run.now()
                step.records.append(ev.node_record(ev.SKIPPED, path, None, now, "trigger"))
            self.settle(vertex.index, Settled.SKIPPED, step)
        else:
            if prior is None:
                self._run(vertex, self.fingerprint(vertex), step)
            else:
                self._decide_again(vertex, prior, self.fingerprint(vertex), step)

    def _block(self, vertex: Vertex, step: Step) -> None:
        """What is above a vertex failed: how it ended in an earlier process is no longer how it ends.

        An output it gave stays known, for when it receives the same again; an effect that may have happened
        is not forgotten.
        """
        prior = self.run.snapshot.paths.get(self.path(vertex)) if self.run.snapshot.paths else None
        if prior is None or prior.kind not in _ENDED or uncertain(prior, vertex.idempotent):
            return
        facts: dict[str, Any] = {}
        if prior.kind == ev.COMPLETED and not vertex.pure:
            facts = {k: v for k, v in prior.facts.items() if k != "usage"} | {"seq": Stored.of(prior).seq}
        at, kind = self.run.now(), ev.WITHDRAWN
        record = ev.node_record(kind, prior.path or "", prior.attempt, at, "upstream_failed", **facts)
        if facts:
            record = record._replace(input=prior.input, digest=prior.digest)
        step.records.append(record)

    def joined(self, vertex: Vertex) -> Join:
        """Give what the join rule says; nothing runs below what a person has to speak about first."""
        bad = self.bad.get(vertex.junction)
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
            if not vertex.is_map and vertex.body is None:
                run.failures[path] = failure_of(prior)
            self.failed.add(i)
            self.settle(i, Settled.FAILED, step)
        elif (prior.kind, prior.reason, prior.input) == (ev.SKIPPED, ev.CONDITION, fingerprint):
            self.settle(i, Settled.SKIPPED, step)
        elif reuses(vertex, prior, fingerprint):
            run.reused(prior, fingerprint, step)
            self._reuse(vertex, prior, fingerprint, step)
        elif vertex.waits and self._stays_failed(prior):
            self.put_failed(vertex, failure_of(prior), step, None, -1)
        elif vertex.waits or vertex.is_map or vertex.is_loop or vertex.body is not None:
            if ev.has_output(prior):
                run.reset(prior, "input_changed", step)
            self._run(vertex, fingerprint, step, prior=prior)
        elif self.opens(vertex, prior, fingerprint, step):
            self._run(vertex, fingerprint, step, prior=prior)

    def opens(
        self,
        vertex: Vertex,
        prior: Record,
        fingerprint: bytes,
        step: Step,
        feed: Any = None,
        k: int = -1,
    ) -> bool:
        """Say whether a path that has not completed with this input is to run; settle it if a person has said
        what it did, leave it to a person if only one can say.
        """
        run, path = self.run, prior.path or ""
        if self._stays_failed(prior) and not uncertain(prior, vertex.idempotent):
            self.put_failed(vertex, failure_of(prior), step, feed, k)
            return False
        idempotent = vertex.idempotent or vertex.body is not None or run.snapshot.permits(path)
        if (
            uncertain(prior, vertex.idempotent)
            and (word := resolution(path, prior, run.snapshot)) is not None
        ):
            self.take_word(vertex, path, prior, fingerprint, word, step, feed, k)
            return False
        verdict = decide(prior, fingerprint, idempotent=idempotent, reconcilable=vertex.reconcilable)
        if verdict is HELD:
            run.await_word(self, vertex, path, prior, step, fingerprint=fingerprint, feed=feed, index=k)
            return False
        if verdict.action is Action.HOLD:
            run.uncertain.append(path)
            if feed is None:
                self.settle(vertex.index, Settled.OPEN_QUESTION, step)
            else:
                feed.lose(k, step)
            return False
        if run.automatic and (due := _waited_out(prior, run.now())) > run.now():
            again = partial(self._after_backoff, vertex, prior, fingerprint, feed, k)
            run.backoffs.begin(path, (prior.attempt or 0) + 1, due, again)
            return False
        if ev.has_output(prior):
            run.reset(prior, verdict.reason, step)
        return True

    def _after_backoff(
        self, vertex: Vertex, prior: Record, fingerprint: bytes, feed: Any, k: int, step: Step
    ) -> None:
        """A back-off that began in an earlier process is over."""
        if feed is None:
            self._run(vertex, fingerprint, step, prior=prior)
        else:
            feed.reopen(k, step)

    def _stays_failed(self, prior: Record) -> bool:
        """Say whether a failure stands: nobody has asked to go on, a letter or a time has come."""
        return self.run.automatic and prior.kind == ev.FAILED and prior.reason != ev.RETRY

    def take_word(
        self,
        vertex: Vertex,
        path: str,
        prior: Record,
        fingerprint: bytes,
        word: Record,
        step: Step,
        feed: Any = None,
        k: int = -1,
    ) -> None:
        """A person has said what an uncertain path did: it completed with this output, or it failed."""
        run, attempt = self.run, prior.attempt or 1
        facts = word.facts
        if facts.get("failed") is not None:
            failure = NodeFailure(path, attempt, "Resolved", facts["failed"], "", "resolved", None)
            record = ev.node_record(ev.FAILED, path, attempt, run.now(), "resolved", **failure.facts)
            step.records.append(record._replace(input=fingerprint))
            self.put_failed(vertex, failure, step, feed, k)
            return
        digest = word.digest or bytes(16)
        told = json.dumps({"seq": word.seq, "by": facts.get("by", "")})
        head = (ev.COMPLETED, attempt, run.now(), path, "resolved", fingerprint, digest)
        step.records.append(Record(*head, word.size, None, told))
        self.put(vertex, Stored(path, word.seq or 0, digest), digest, step, feed, k)

    def put(self, vertex: Vertex, cell: Any, digest: bytes, step: Step, feed: Any, k: int) -> None:
        """Note what a path gave, be it a vertex, an item or a round."""
        if feed is None:
            self.complete(vertex.index, cell, digest, step)
        else:
            feed.settled(k, cell, digest, step)

    def put_failed(self, vertex: Vertex, failure: NodeFailure, step: Step, feed: Any, k: int) -> None:
        """Note that a path has failed for good."""
        if feed is None:
            self.run.failures[failure.path] = failure
            self.fail(vertex.index, step)
        else:
            feed.failed(k, failure, step)

    def _reuse(self, vertex: Vertex, prior: Record, fingerprint: bytes, step: Step) -> None:
        out: Any = UNMADE
        if prior.kind != ev.COMPLETED:  # it was blocked meanwhile
            head = prior._replace(kind=ev.COMPLETED, at=self.run.now(), reason=ev.AGAIN)
            step.records.append(head._replace(seq=None))
        try:
            if not vertex.pure:
                out = self.former_items(prior) if vertex.is_map else cell_of(prior)
        except CheckpointLost as error:
            self.run.cannot_load(error)
            self.settle(vertex.index, Settled.OPEN_QUESTION, step)
            return
        self.complete(vertex.index, out, fingerprint if vertex.pure else prior.digest or bytes(16), step)

    def former_items(self, prior: Record) -> Cells:
        """Give where the outputs of a completed map's items lie."""
        paths = [f"{prior.path}[{k}]" for k in range(prior.facts["count"])]
        rows = self.run.snapshot.paths.find(paths)
        if None in rows:
            raise CheckpointLost(self.run.run_id, paths[rows.index(None)], "is missing")
        return Former(Records(rows), _former_cell)  # type: ignore[arg-type]  # none of them is None

    # -- making ready ---------------------------------------------------------------------------------

    def _run(
        self,
        vertex: Vertex,
        fingerprint: bytes,
        step: Step,
        *,
        prior: Record | None = None,
        asked: bool = False,
    ) -> None:
        """Make a vertex ready. `asked`: its `when=` has said yes."""
        i = vertex.index
        unmade = {p for p in vertex.source_parents if self.out[p] is UNMADE} if self.away else ()
        if unmade:
            self.lacking[i] = len(unmade)
            for parent in unmade:
                self.run.later(self._remake, parent, i)
        elif vertex.is_plain:
            step.opens.append(self._job(vertex, fingerprint, self.run.gate_of(vertex)))
        elif vertex.is_loop and self._begins_with_stored(vertex):
            self.run.background(self._loop_later(vertex, fingerprint, prior, asked))
        elif vertex.is_map:
            self._spread(vertex, fingerprint, step)
        elif vertex.node.when is not None and not asked and not self.was_asked(prior, fingerprint):
            step.opens.append(self._job(vertex, fingerprint, None, asking=True))
        elif vertex.waits:
            self.run.await_word(self, vertex, self.path(vertex), prior, step, fingerprint=fingerprint)
        elif vertex.is_loop:
            cell, digest = self._first(self.body.origins[i][0], vertex)
            Loop(self, vertex, fingerprint, cell, digest).start(step)
        elif vertex.body is not None:
            Nest(self, vertex, self.path(vertex), fingerprint, [], []).start(step)
        else:
            step.opens.append(self._job(vertex, fingerprint, self.run.gate_of(vertex)))

    def _begins_with_stored(self, vertex: Vertex) -> bool:
        """Say whether a loop begins with the items of a map that have to be read first."""
        source = self.body.origins[vertex.index][0]
        out = self.out[source.place] if source.kind == "parent" else None
        return isinstance(out, Cells) and out.stored

    async def _loop_later(
        self, vertex: Vertex, fingerprint: bytes, prior: Record | None, asked: bool
    ) -> None:
        step = Step(self.run, [])
        cells: Cells = self.out[self.body.origins[vertex.index][0].place]
        try:
            await cells.load(self.fetch)
        except StoreError as error:
            self.run.cannot_load(error)
            self.fail(vertex.index, step, Settled.OPEN_QUESTION)
        else:
            self._run(vertex, fingerprint, step, prior=prior, asked=asked)
        self.run.hand_over(step)

    def run_again(self, vertex: Vertex, fingerprint: bytes, step: Step) -> None:
        """A person wants a vertex that was held to run again."""
        self._run(vertex, fingerprint, step, asked=True)

    def _job(self, vertex: Vertex, fingerprint: bytes, gate: Gate | None, *, asking: bool = False) -> Job:
        job = Job(self.run, self, vertex, self.path(vertex), fingerprint, gate)
        self.run.adopt_history(job)
        job.again, job.asking = vertex.index in self.remaking, asking
        if asking:
            job.reconcile = False
            if vertex.is_loop:
                job.cells = [self._first(self.body.origins[vertex.index][0], vertex)[0]]
        return job

    @staticmethod
    def was_asked(prior: Record | None, fingerprint: bytes) -> bool:
        """Say whether the condition said yes to this very input before: then something of it began."""
        if prior is None or prior.reason == ev.CONDITION_FAILED or prior.input != fingerprint:
            return False
        return prior.kind in {ev.STARTED, ev.FAILED, ev.INTERRUPTED, ev.CANCELLED}

    def say_yes(self, job: Job, step: Step) -> None:
        """The condition of a path holds: it runs."""
        vertex, feed, k = job.vertex, job.feed, job.index
        if feed is not None and vertex.body is not None:
            feed.enter(k, step)
        elif feed is not None:
            again = job.next(job.attempt)
            again.gate, again.reconcile = self.run.gate_of(vertex), False
            step.opens.append(again)
        else:
            self._run(vertex, job.fingerprint, step, asked=True)

    def say_no(self, job: Job, step: Step) -> None:
        """The condition of a path does not hold: it is skipped."""
        now = self.run.now()
        record = ev.node_record(ev.SKIPPED, job.path, job.attempt - 1 or None, now, ev.CONDITION)
        step.records.append(record._replace(input=job.fingerprint))
        if job.feed is not None:
            job.feed.settled(job.index, NULL, NULL_DIGEST, step)
        else:
            self.settle(job.vertex.index, Settled.SKIPPED, step)

    def _first(self, source: Source, vertex: Vertex) -> tuple[Any, bytes]:
        """Give what the first round of a loop receives, and its digest."""
        if source.kind == "constant":
            return codec.pack(source.value), self.part(source)
        if source.kind == "input":
            given = self.inputs[source.name]
            return given.cell, given.digest
        out = self.out[source.place]
        if isinstance(out, Cells):
            out = whole(out)
        return NULL if out is None else out, self.digests[source.place]

    # -- what lies in the store -----------------------------------------------------------------------

    def lacks(self, vertex: Vertex, cells: Sequence[Any]) -> bool:
        """Say whether something a vertex receives is not in memory: an output of an earlier process, or a big
        one.
        """
        for parent in vertex.value_parents if self.away else ():
            out = self.out[parent]
            if type(out) is Stored or (isinstance(out, Cells) and out.stored):
                return True
        return bool(cells) and any(type(cell) is Stored for cell in cells)

    async def load(self, vertex: Vertex, cells: list[Any] | tuple[()]) -> None:
        """Read what a vertex receives and what lies in the store."""
        parents = vertex.value_parents
        outs = [self.out[parent] for parent in parents]
        await load_cells(outs, self.fetch)  # all in one hop
        for parent, out in zip(parents, outs, strict=True):
            self.out[parent] = out
            if isinstance(out, Cells) and out.stored:
                await out.load(self.fetch)
        if cells:
            await load_cells(cells, self.fetch)

    async def fetch(self, places: Sequence[Stored | Record]) -> list[str]:
        """Read outputs of this run from the store."""
        return await self.run.services.fetch(self.run.run_id, places)

    def _remake(self, i: int, waiter: int, step: Step) -> None:
        """Have a pure vertex that completed earlier made again, since somebody needs its value."""
        waiters = self.remaking.setdefault(i, [])
        waiters.append(waiter)
        if len(waiters) == 1:
            self._run(self.rules[i], self.digests[i], step)

    def remakes_for_output(self, places: Sequence[int]) -> bool:
        """Have those of these made again whose values are to go out of here; False if all are there."""
        unmade = [i for i in places if self.out[i] is UNMADE]
        if unmade:
            self.lacking[_OUTSIDE] = len(unmade)
            for i in unmade:
                self.run.later(self._remake, i, _OUTSIDE)
        return bool(unmade)

    def _remade(self, i: int, step: Step, good: bool = True) -> None:
        """A pure vertex was made again, or could not be: who waits for it goes on once it lacks nothing."""
        ended = deque([(i, good)])
        while ended:
            i, good = ended.popleft()
            for waiter in self.remaking.pop(i, ()):
                if not good:
                    self.lamed.add(waiter)
                self.lacking[waiter] -= 1
                if self.lacking[waiter]:
                    continue
                del self.lacking[waiter]
                if waiter in self.lamed:
                    self.lamed.remove(waiter)
                    self._goes_without(waiter, ended, step)
                elif waiter == _OUTSIDE:
                    self.run.later(self._nest.ended)  # type: ignore[union-attr]  # there is an outside
                else:
                    self.run.later(self._run, self.rules[waiter], self.fingerprint(self.rules[waiter]))

    def _goes_without(self, waiter: int, ended: deque[tuple[int, bool]], step: Step) -> None:
        """Something that a vertex needs could not be made again."""
        if waiter == _OUTSIDE:
            self.run.later(self._nest.has_no_output)  # type: ignore[union-attr]  # there is an outside
        elif waiter in self.remaking:
            ended.append((waiter, False))
        else:
            self.settle(waiter, Settled.FAILED, step)

    # -- maps -----------------------------------------------------------------------------------------

    def _spread(self, vertex: Vertex, fingerprint: bytes, step: Step) -> None:
        """Spread a map out into its items; what it runs over may have to be read first."""
        if self._to_load(vertex):
            self.run.background(self._spread_later(vertex, fingerprint))
            return
        try:
            lists = [self._listing(source) for source in self.body.origins[vertex.index]]
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
            feed.offer(step)
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
        self.run.hand_over(step)

    def _listing(self, source: Source) -> Listing:
        """Give the list that a map runs over."""
        if source.kind == "input":
            given = self.inputs[source.name]
            if isinstance(given.cell, Raw):
                return Raws(_list(given.cell.value, f"the input {source.name!r}"), given.digest)
            return Values(
                _list(codec.unpack(given.cell, given.types), f"the input {source.name!r}"), given.types
            )
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
                self.run.later(self._try_streaming, self.rules[child])

    def _try_streaming(self, vertex: Vertex, step: Step) -> None:
        """Spread out a chained map before the maps above have ended, once all else that it needs is there."""
        i = vertex.index
        if i in self.feeds or not vertex.streams or vertex.junction in self.bad:
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
        for source in self.body.origins[vertex.index]:
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


def _former_cell(record: Record) -> tuple[str | Stored, bytes]:
    """Give what stands in a map's list for an item that ended as this record says, and its digest."""
    if record.kind == ev.COMPLETED:
        return cell_of(record), record.digest or _NO_DIGEST
    if record.kind == ev.SKIPPED:
        return NULL, NULL_DIGEST
    text = item_failure(failure_of(record))
    return text, codec.digest(text)


def _waited_out(prior: Record, now: int) -> int:
    """Give when a back-off is over that began in an earlier process: after its rest, and whatever was done to
    the clock, after its whole length; 0 if there is none.
    """
    if prior.kind != ev.FAILED or prior.reason != ev.RETRY:
        return 0
    due = int(prior.facts.get("retry_at", 0))
    return min(due, now + max(due - prior.at, 0))


def _list(value: Any, what: str) -> Sequence[Any]:
    if isinstance(value, list | tuple):
        return value
    raise TypeError(f"for_each needs a list or tuple; {what} gave {type(value).__name__}")
