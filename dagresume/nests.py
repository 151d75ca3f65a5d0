"""Nodes with a graph inside them, and loops: what runs in them are paths of the same run, below their own.

A `Nest` is one instance of a workflow inside a node; a `Loop` runs rounds, of a function or of a nest. Both
keep no state but what the journal has: on a resume they are entered again, and what completed in them is
reused.
"""

from __future__ import annotations

import json
from typing import Any, Final

from dagresume import codec
from dagresume import events as ev
from dagresume.errors import DagresumeError, StoreError
from dagresume.events import Record
from dagresume.jobs import Cells, Driver, Input, Job, Raw, Step
from dagresume.observe import tell
from dagresume.planner import ABSENT, Vertex, matches
from dagresume.policy import NodeFailure, Settled, answer
from dagresume.results import Stored
from dagresume.workflow import Loop as LoopNode
from dagresume.workflow import Source

__all__ = ["Loop", "Nest", "whole"]

_NULL: Final = "null"


def _refer(cell: str | Stored) -> tuple[dict[str, Any] | None, str | None]:
    """Give the facts and the output of a record whose output is this one, which may lie elsewhere."""
    if isinstance(cell, str):
        return None, cell
    return ({"seq": cell.seq} if cell.blob is None else {"blob": cell.blob}), None


def whole(cells: Cells) -> str | Raw:
    """Give the list that a map's items make, packed; as it is if they are."""
    if any(isinstance(cell, Raw) for cell in cells.cells):
        return Raw([c.value if isinstance(c, Raw) else codec.unpack(c) for c in cells.cells])
    return "[" + ",".join(cells.cells) + "]"


class _Container:
    """What nests and loops have in common: a path of their own that begins, and ends in one of three ways."""

    def __init__(self, scope: Any, vertex: Vertex, path: str, fingerprint: bytes) -> None:
        self.run: Driver = scope.run
        self.scope, self.vertex, self.path, self.fingerprint = scope, vertex, path, fingerprint
        self.attempt = self.run.next_attempt(path)
        self.began = self.run.services.clock.monotonic()

    def record(self, kind: str, reason: str | None = None, **facts: Any) -> Record:
        record = ev.node_record(kind, self.path, self.attempt, self.run.now(), reason, **facts)
        return record._replace(input=self.fingerprint)

    def completed(self, cell: str | Stored, digest: bytes, step: Step) -> None:
        """Note that it completed, and with what."""
        facts, output = _refer(cell)
        took = max(0, round((self.run.services.clock.monotonic() - self.began) * 1e6))
        size = None if output is None else len(output)
        told = None if facts is None else json.dumps(facts)
        now, head = self.run.now(), (ev.COMPLETED, self.attempt)
        step.records.append(
            Record(*head, now, self.path, None, self.fingerprint, digest, size, took, told, output)
        )
        step.concludes = True

    async def loaded(self, cell: str | Stored) -> str:
        """Give a packed output, read if it lies in the store."""
        if isinstance(cell, str):
            return cell
        (text,) = await self.run.services.fetch(self.run.run_id, [cell])
        return text


class Nest(_Container):
    """One instance of the workflow inside a node: `screen`, an item of a map over it, or a round of a loop.

    `owner` hears how it ends (`settled`, `failed`, `lose` with `index`); None: the node itself ends with it.
    """

    def __init__(
        self,
        scope: Any,
        vertex: Vertex,
        path: str,
        fingerprint: bytes,
        cells: list[Any],
        digests: list[bytes],
        owner: Any = None,
        index: int = -1,
    ) -> None:
        super().__init__(scope, vertex, path, fingerprint)
        self._cells, self._digests, self._owner, self._index = cells, digests, owner, index
        self.inner: Any = None

    def start(self, step: Step) -> None:
        """Enter it: what is ready inside becomes ready with this step."""
        step.records.append(self.record(ev.STARTED))
        if self.scope.lacks(self.vertex, self._cells):
            self.run.background(self._enter_later())
        else:
            self._enter(step)

    async def _enter_later(self) -> None:
        step = Step(self.run, [])
        try:
            await self.scope.load(self.vertex, self._cells)
        except StoreError as error:
            self.run.cannot_load(error)
            self._tell_lost(step)
        else:
            self._enter(step)
        self.run.hand_over(step)

    def _enter(self, step: Step) -> None:
        try:
            inputs = dict(self._inputs())
        except Exception as error:
            self._tell_failed(tell(self.path, self.attempt, error, "error", self.run.mask), step, own=True)
            return
        self.inner = self.scope.inside(self.vertex.body, self.path + "/", inputs, self)

    def _inputs(self) -> Any:
        for binding in self.vertex.bindings:
            source = binding.source
            if source.kind == "input" and source.name not in self.scope.inputs:
                continue  # the inner workflow's own default
            yield binding.parameter, self._input(source, binding.parameter)

    def _input(self, source: Source, name: str) -> Input:
        scope = self.scope
        own = self.vertex.body.input_types.get(name, codec.EMPTY)  # type: ignore[union-attr]
        if source.kind == "item":
            listed = scope.body.origins[self.vertex.index][source.place]
            later = self.vertex.is_loop and self._index > 0
            cell, digest = self._cells[source.place], self._digests[source.place]
            types = self.vertex.types if later else scope.types(listed)
        elif source.kind == "constant":
            return Input(codec.pack(source.value), scope.part(source), own)
        elif source.kind == "input":
            given: Input = scope.inputs[source.name]
            return given._replace(types=_both(given.types, own))
        else:
            out, digest, types = scope.out[source.place], scope.digests[source.place], scope.types(source)
            if out is None:
                return Input(_NULL, ABSENT, own)
            cell = whole(out) if isinstance(out, Cells) else out
        return Input(cell, digest, _both(types, own))

    # -- how it ends ----------------------------------------------------------------------------------

    def ended(self, step: Step) -> None:
        """All that is inside has ended: so does this."""
        inner = self.inner
        inner.forgive_handled()
        asks = inner.asks
        failed = inner.unhandled()
        if failed:
            why = self.run.failure_at(inner.path(inner.rules[min(failed)]))
            message = f"{why.path}: {why.message}"
            failure = NodeFailure(
                self.path, self.attempt, why.type, message, "", "inner_failed", None, why.exception
            )
            self._tell_failed(failure, step, asks=asks)
        elif asks:
            step.records.append(self.record(ev.INTERRUPTED, "uncertain"))
            self._tell_lost(step)
        else:
            self._give(step)

    def has_no_output(self, step: Step) -> None:
        """A pure node whose value was to be the output could not be made again."""
        if self.inner.unhandled():
            self.ended(step)
        else:
            self._tell_lost(step)

    def _give(self, step: Step) -> None:
        """Put the output together; what of it lies in the store has to be read first."""
        inner, body = self.inner, self.vertex.body
        places = body.sinks if body.output is None else (body.output,)  # type: ignore[union-attr]
        if inner.remakes_for_output(places):
            return  # it ends once they are there
        outs = {place: inner.out[place] for place in places}
        if all(isinstance(out, str | None) for out in outs.values()) and not self._is_big(outs):
            self._given(self._text(outs), step)
        elif len(places) == 1 and isinstance(outs[places[0]], Stored):
            self._tell_completed(outs[places[0]], inner.digests[places[0]], None, step)
        else:
            self.run.background(self._give_later(outs))

    def _is_big(self, outs: dict[int, Any]) -> bool:
        limit = self.run.services.spill_bytes
        return limit is not None and sum(len(out or _NULL) + 200 for out in outs.values()) > limit

    def _text(self, outs: dict[int, Any]) -> str:
        body = self.vertex.body
        assert body is not None
        texts = {
            place: _NULL
            if out is None
            else out
            if isinstance(out, str)
            else codec.pack(out.value, body.rules[place].types)
            for place, out in outs.items()
        }
        if body.output is not None or len(body.sinks) == 1:
            return next(iter(texts.values()))
        return "{" + ",".join(f"{codec.pack(body.rules[p].id)}:{text}" for p, text in texts.items()) + "}"

    async def _give_later(self, outs: dict[int, Any]) -> None:
        step = Step(self.run, [])
        try:
            for place, out in outs.items():
                if isinstance(out, Cells):
                    await out.load(self.scope.fetch)
                    outs[place] = whole(out)
                elif isinstance(out, Stored):
                    outs[place] = await self.loaded(out)
            text = self._text(outs)
            limit = self.run.services.spill_bytes
            if limit is not None and len(text) > limit:
                blob = await self.run.services.spill(self.run.run_id, text)
                digest = codec.digest(text)
                self._tell_completed(Stored(self.path, 0, digest, blob), digest, text, step)
            else:
                self._given(text, step)
        except StoreError as error:
            self.run.cannot_load(error)
            self._tell_lost(step)
        except DagresumeError as error:  # the output of a pure node that cannot be stored
            self._tell_failed(
                tell(self.path, self.attempt, error, "not_serialisable", self.run.mask), step, own=True
            )
        self.run.hand_over(step)

    def _given(self, text: str, step: Step) -> None:
        self._tell_completed(text, codec.digest(text), text, step)

    def _tell_completed(self, cell: str | Stored, digest: bytes, text: str | None, step: Step) -> None:
        self.completed(cell, digest, step)
        if self._owner is None:
            self.scope.complete(self.vertex.index, cell, digest, step)
        else:
            self.run.inner[self.path] = cell
            self._owner.settled(self._index, cell, digest, step, text)

    def _tell_failed(
        self, failure: NodeFailure, step: Step, *, own: bool = False, asks: bool = False
    ) -> None:
        """`own`: nothing inside it failed, but it did."""
        if own:
            self.run.failures[self.path] = failure
        step.records.append(self.record(ev.FAILED, failure.reason, **failure.facts))
        if asks:
            self._tell_lost(step)
        elif self._owner is None:
            self.scope.fail(self.vertex.index, step)
        else:
            self._owner.failed(self._index, failure, step)

    def _tell_lost(self, step: Step) -> None:
        if self._owner is None:
            self.scope.fail(self.vertex.index, step, Settled.OPEN_QUESTION)
        else:
            self._owner.lose(self._index, step)


def _both(one: codec.Types, other: codec.Types) -> codec.Types:
    return {**one, **other} if one and other else one or other


class Loop(_Container):
    """A node that runs in rounds until `until` says yes; round n receives what round n-1 gave."""

    more = queued = False  # as a feed of jobs: there is never more than one

    def __init__(self, scope: Any, vertex: Vertex, fingerprint: bytes, cell: Any, digest: bytes) -> None:
        super().__init__(scope, vertex, scope.path(vertex), fingerprint)
        assert isinstance(vertex.node.what, LoopNode)
        self.what = vertex.node.what
        self.cell, self.digest = cell, digest
        self.next = self.live = 0
        fed = [b for b in vertex.bindings if b.source.kind != "context"]
        self._parts = [
            None if binding.source.kind == "item" else scope.part(source)
            for binding, source in zip(fed, vertex.received, strict=True)
        ]

    def start(self, step: Step) -> None:
        """Go on with the first round that has not completed."""
        step.records.append(self.record(ev.STARTED))
        self._go_on(step)

    def _go_on(self, step: Step) -> None:
        paths = self.run.snapshot.paths
        while self.next < self.what.max_iterations:
            path = f"{self.path}[{self.next}]"
            fingerprint = self.vertex.fingerprint(
                self.digest if part is None else part for part in self._parts
            )
            prior = paths.get(path)
            if prior is None or not matches(prior, fingerprint):
                self._open(path, prior, fingerprint, step)
                return
            self.run.reused(prior, fingerprint, step)
            self.cell, self.digest = Stored.of(prior), prior.digest or bytes(16)
            done = prior.facts.get("done") if prior.data is not None else None
            if done is None:  # it was never asked: the process died between the round and the answer
                self.run.background(self._ask_later(prior))
                return
            self.next += 1
            if done:
                self._finish(step)
                return
        self._exhausted(step)

    def _open(self, path: str, prior: Record | None, fingerprint: bytes, step: Step) -> None:
        if prior is not None and not self.scope.opens(self.vertex, prior, fingerprint, step, self, self.next):
            return
        cells = [self.cell]
        if self.vertex.body is not None:
            Nest(self.scope, self.vertex, path, fingerprint, cells, [self.digest], self, self.next).start(
                step
            )
            return
        gate = self.run.gate_of(self.vertex)
        job = Job(self.run, self.scope, self.vertex, path, fingerprint, gate, self, self.next, cells)
        self.run.adopt_history(job)
        self.live += 1
        step.opens.append(job)

    def reopen(self, k: int, step: Step) -> None:
        """A round that was held, or whose back-off is over, runs."""
        self._go_on(step)

    # -- how rounds end -------------------------------------------------------------------------------

    def settled(self, n: int, cell: Any, digest: bytes, step: Step, text: str | None = None) -> None:
        """Round n has given the next state."""
        self.cell, self.digest = cell, digest
        text = cell if isinstance(cell, str) else text
        if text is None:
            self.run.background(self._ask_later(None))
        else:
            self._ask(text, step)

    async def _ask_later(self, prior: Record | None) -> None:
        step = Step(self.run, [])
        if prior is not None:  # stands in the step again, so that the answer is stored with it
            facts = prior.facts | {"seq": Stored.of(prior).seq}
            step.records.append(
                prior._replace(at=self.run.now(), data=json.dumps(facts), output=None, seq=None)
            )
        try:
            text = await self.loaded(self.cell)
        except StoreError as error:
            self.run.cannot_load(error)
            self.lose(self.next, step)
        else:
            self._ask(text, step)
        self.run.hand_over(step)

    def _ask(self, text: str, step: Step) -> None:
        """Ask `until` about the state; the answer is stored with the round."""
        try:
            # in the caller's context, as a body: this task is that of the round
            ask = self.run.context.copy().run
            done = answer(ask(self.what.until, codec.unpack(text, self.vertex.types)), "until=")
        except Exception as error:
            self._fails(tell(self.path, self.attempt, error, "until_failed", self.run.mask), step)
            return
        step.annotate(f"{self.path}[{self.next}]", {"done": done})
        self.next += 1
        if done:
            self._finish(step)
        else:
            self.run.later(self._go_on)

    def _finish(self, step: Step) -> None:
        self._withdraw_rest(step)
        self.completed(self.cell, self.digest, step)
        self.scope.complete(self.vertex.index, self.cell, self.digest, step)

    def _withdraw_rest(self, step: Step) -> None:
        """Rounds that an earlier process ran and this course of the loop does not reach are no more."""
        paths, k = self.run.snapshot.paths, self.next
        while (prior := paths.get(f"{self.path}[{k}]")) is not None:
            if prior.kind != ev.WITHDRAWN:
                at = self.run.now()
                step.records.append(
                    ev.node_record(ev.WITHDRAWN, prior.path or "", prior.attempt, at, "round_gone")
                )
            k += 1

    def _exhausted(self, step: Step) -> None:
        most = self.what.max_iterations
        last = f"{self.path}[{self.next - 1}]"
        error = DagresumeError(
            f"{most} rounds, and until= did not say yes; the last state is the output of {last!r}."
            " Raise max_iterations= and resume with force=True."
        )
        self._fails(tell(self.path, self.attempt, error, "max_iterations", self.run.mask), step)

    def _fails(self, failure: NodeFailure, step: Step) -> None:
        self.run.failures[self.path] = failure
        step.records.append(self.record(ev.FAILED, failure.reason, **failure.facts))
        self.scope.fail(self.vertex.index, step)

    def failed(self, n: int, failure: NodeFailure, step: Step) -> None:
        """Round n has failed for good, and so has the loop."""
        if self.vertex.body is None:
            self.run.failures[failure.path] = failure
        step.records.append(
            self.record(
                ev.FAILED, "round_failed", type=failure.type, message=f"{failure.path}: {failure.message}"
            )
        )
        self.scope.fail(self.vertex.index, step)

    def lose(self, n: int, step: Step) -> None:
        """Nobody knows what round n did, or a person has to say."""
        step.records.append(self.record(ev.INTERRUPTED, "uncertain"))
        self.scope.fail(self.vertex.index, step, Settled.OPEN_QUESTION)
