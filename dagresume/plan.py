"""What a resume would do, before it does it: the decisions it makes, foreseen from the journal.

Pure, and one pass over the graph; graphs inside nodes are foreseen the same way, each instance by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Final, NamedTuple

from dagresume import events as ev
from dagresume.collector import paused
from dagresume.events import Record, Records, Snapshot
from dagresume.planner import (
    AGAIN,
    HANDLED,
    NEW,
    RECONCILE,
    UNCERTAIN,
    UNCHANGED,
    Action,
    Body,
    Decision,
    Verdict,
    Vertex,
    decide,
    decision_of,
    decisions_to_reuse,
    handled,
    is_body,
    part,
    resolution,
    reuses,
    uncertain,
    word_about,
)
from dagresume.policy import Join, Settled, join, tolerated
from dagresume.workflow import Approval, Loop, Sleep, WaitFor

__all__ = ["plan"]


class _Outlook(NamedTuple):
    """How a node will end, as far as it can be known beforehand."""

    ended: (
        str  # completed, skipped, failed: for sure; runs: completes, if it does not fail; maybe: nobody knows
    )
    digest: bytes | None  # of its output, if it is sure to stay as it is
    held: str | None = None  # it waits for a person, or something above it does: why what is below waits


_FAILED: Final = _Outlook("failed", None)
_MAYBE: Final = _Outlook("maybe", None)
_RUNS: Final = _Outlook("runs", None)
_ASKS: Final = _Outlook("failed", None, "upstream_held")
_WAITS: Final = _Outlook("failed", None, "upstream_waits")
Foreseen = tuple[_Outlook, list[Decision]]


def plan(
    body: Body,
    snapshot: Snapshot,
    inputs: Mapping[str, bytes],
    *,
    items: bool = False,
    now: int = 0,
    before: Mapping[str, Record] | None = None,
    other_code: Collection[str] = (),
) -> list[Decision]:
    """Give a decision for every node in topological order; what is inside a node comes after it.

    With `items`, also for every item of a map and round of a loop. Every `run` runs, every `reuse` is reused,
    every `check` does one of both once what is above it is known; nothing else runs. `now`: microseconds
    UTC, for waits. `before`: the records by path before a person set some of them back; `other_code`: the
    paths whose code is another now.
    """
    with paused():
        found = _Foresight(body, snapshot, inputs, "", items, now).look()[1]
        if before is None and not other_code:
            return found
        past = snapshot.paths if before is None else before
        told = partial(_told, _At(body), snapshot)
        return [
            decision
            # what is left as it is says already how much it took, and repeats nothing
            if decision.action == UNCHANGED.action
            and decision.reason == UNCHANGED.reason
            and decision.path not in other_code
            else told(decision, past.get(decision.path), other_code)
            for decision in found
        ]


class _At:
    """Finds the vertex of a path; items of one map that come one after the other are of one vertex."""

    def __init__(self, body: Body) -> None:
        self._body, self._map = body, ""
        self._vertex: Vertex | None = None

    def __call__(self, path: str) -> Vertex | None:
        head = path[: path.rindex("[")] if path.endswith("]") else path
        if head != self._map:
            self._map, self._vertex = head, self._body.at(path)
        return self._vertex


def _told(
    at: _At, snapshot: Snapshot, decision: Decision, prior: Record | None, other_code: Collection[str]
) -> Decision:
    """Give a decision with what it means: how much the path took, whether its effect happens once more."""
    path, vertex = decision.path, at(decision.path)
    done = decision_of(path, Verdict(Action(decision.action), decision.reason), prior)
    repeats = None
    if vertex is not None and not vertex.idempotent and is_body(vertex, path):
        repeats = _repeats(snapshot, decision, prior)
    return decision._replace(
        seconds=done.seconds, usage=done.usage, repeats=repeats, code_changed=path in other_code
    )


def _repeats(snapshot: Snapshot, decision: Decision, prior: Record | None) -> str | None:
    asked = _is_asked(snapshot.paths.get(decision.path))
    may = decision.action == Action.CHECK and (snapshot.permits(decision.path) or asked)
    if prior is None or decision.reason == RECONCILE.reason or not (may or decision.action == Action.RUN):
        return None
    if prior.kind == ev.COMPLETED or (prior.kind, prior.reason) == (ev.WAITING, ev.HELD):
        return "completed"
    return "uncertain" if uncertain(prior, idempotent=False) else None


def _is_asked(record: Record | None) -> bool:
    """Say whether a person has set this path back."""
    return record is not None and (record.kind, record.reason) == (ev.RESET, AGAIN.reason)


class _Foresight:
    """The outlook of one instance of a graph. `inputs` None: they are what they were, whatever that is."""

    def __init__(
        self,
        body: Body,
        snapshot: Snapshot,
        inputs: Mapping[str, bytes] | None,
        prefix: str,
        items: bool,
        now: int,
    ) -> None:
        self.body, self.rules, self.snapshot, self.prefix = body, body.rules, snapshot, prefix
        self.inputs, self.items, self.now = inputs, items, now
        self.outlooks: list[_Outlook] = []

    def look(self) -> Foreseen:
        """Give how the graph as a whole ends, and the decisions in it."""
        decisions: list[Decision] = []
        for vertex in self.rules:
            outlook, own = self._foresee(vertex)
            self.outlooks.append(outlook)
            decisions += own
        if any(vertex.pure for vertex in self.rules):
            decisions = self._with_recomputed(decisions)
        return self._whole(), decisions

    def _whole(self) -> _Outlook:
        held = next((outlook.held for outlook in self.outlooks if outlook.held), None)
        if held:
            return _Outlook("failed", None, held)
        ended = Counter(outlook.ended for outlook in self.outlooks)
        return _MAYBE if ended["maybe"] else _RUNS

    @property
    def _giving(self) -> tuple[int, ...]:
        """The nodes whose outputs make that of the graph."""
        return self.body.sinks if self.body.output is None else (self.body.output,)

    # -- one node -------------------------------------------------------------------------------------

    def _foresee(self, vertex: Vertex) -> Foreseen:
        path = self.prefix + vertex.id
        prior = self.snapshot.paths.get(path)
        if prior is not None and prior.kind == ev.COMPLETED and self._stays(vertex, prior):
            digest = prior.input if vertex.pure else prior.digest
            return _Outlook("completed", digest), [decision_of(path, UNCHANGED, prior)]
        held = next((self.outlooks[p].held for p in vertex.parents if self.outlooks[p].held), None)
        if held:
            return _Outlook("failed", None, held), self._all(vertex, path, Verdict(Action.WAIT, held))
        ended = Counter(self.outlooks[parent].ended for parent in vertex.parents)
        verdict = _joined(vertex, ended)
        if verdict is Join.BLOCK:
            return _FAILED, self._all(vertex, path, Verdict(Action.SKIP, "upstream_failed"))
        if verdict is Join.SKIP:
            return _Outlook("skipped", None), self._all(vertex, path, Verdict(Action.SKIP, "trigger"))
        if (
            prior is not None
            and prior.kind == ev.FAILED
            and handled(vertex, self.rules, self.snapshot.paths, self.prefix)
        ):
            # Above it something may wait for a person: then nothing below has its turn.
            return _MAYBE if ended["maybe"] else _FAILED, [decision_of(path, HANDLED, prior)]
        if ended["runs"] or ended["maybe"]:
            return self._below_open(vertex, path, prior, sure=verdict is Join.RUN)
        if self.inputs is None and prior is not None and self._is_behind(vertex, prior):
            return self._below_open(vertex, path, prior, sure=True)
        fingerprint = self._fingerprint(vertex, prior)
        if prior is not None and (prior.kind, prior.reason, prior.input) == (
            ev.SKIPPED,
            ev.CONDITION,
            fingerprint,
        ):
            return _Outlook("skipped", None), [decision_of(path, Verdict(Action.SKIP, ev.CONDITION), None)]
        return self._settled_above(vertex, path, prior, fingerprint)

    def _stays(self, vertex: Vertex, prior: Record) -> bool:
        """Say whether this is what a plan meets most: a function that has completed, as all above it has,
        with this very input. What is asked further on comes to the same.
        """
        outlooks = self.outlooks
        return (
            vertex.is_usual
            and self.inputs is not None
            and all(outlooks[parent].ended == "completed" for parent in vertex.parents)
            and decide(prior, self._fingerprint(vertex, prior), idempotent=vertex.idempotent) is UNCHANGED
        )

    def _fingerprint(self, vertex: Vertex, prior: Record | None) -> bytes:
        inputs = self.inputs
        if inputs is None:  # what comes from outside is as it was, and so is what was reused above
            if any(source.kind == "input" for source in vertex.received):
                return (prior.input if prior is not None else None) or bytes(16)
            inputs = {}
        return vertex.fingerprint(part(s, lambda i: self.outlooks[i].digest, inputs) for s in vertex.received)

    def _is_behind(self, vertex: Vertex, prior: Record) -> bool:
        """Say whether something above a path that has completed is newer than it, and it is not known what it
        would receive.
        """
        if not ev.has_output(prior) or not any(source.kind == "input" for source in vertex.received):
            return False
        above = (self.snapshot.paths.get(self.prefix + self.rules[p].id) for p in vertex.parents)
        return any(record is not None and (record.seq or 0) > (prior.seq or 0) for record in above)

    def _settled_above(self, vertex: Vertex, path: str, prior: Record | None, fingerprint: bytes) -> Foreseen:
        """A node of which it is known what it will receive."""
        if vertex.is_map:
            return self._map(vertex, path, prior, fingerprint)
        if vertex.runs_function:
            found = self._verdict(vertex, path, prior, fingerprint)
        elif prior is not None and reuses(vertex, prior, fingerprint):
            found = UNCHANGED
        elif vertex.waits:
            return self._wait(vertex, path, prior)
        else:
            found = NEW
        if found.action is Action.RUN and vertex.node.when is not None and not _was_asked(prior, fingerprint):
            asked = Verdict(Action.CHECK, ev.CONDITION)
            return _MAYBE, [decision_of(path, asked, prior), *self._checks(vertex, path, ev.CONDITION)]
        if found is NEW and vertex.is_loop:
            return self._loop(vertex, path, prior, fingerprint)
        if found is NEW and vertex.body is not None:
            return self._nest(vertex, path, prior, fingerprint)
        inside = self._as_it_is(vertex, path) if found is UNCHANGED else ()
        return self._ends(vertex, path, found, prior, fingerprint), [decision_of(path, found, prior), *inside]

    def _as_it_is(self, vertex: Vertex, path: str) -> Iterator[Decision]:
        """Give the decisions inside a node that is left as it is: each of its paths is."""
        if vertex.is_loop and not self.items:
            return
        known = range(self._known(vertex, path)) if vertex.is_loop else ()
        instances = [f"{path}[{n}]" for n in known] if vertex.is_loop else [path]
        for instance in instances:
            if vertex.is_loop:
                yield from self._left_alone(instance)
            yield from self._inside_as_it_is(vertex, instance)

    def _inside_as_it_is(self, vertex: Vertex, path: str) -> Iterator[Decision]:
        for inner in vertex.body.rules if vertex.body is not None else ():
            below = f"{path}/{inner.id}"
            yield from self._left_alone(below)
            if inner.is_map and self.items:
                for k in range(self.snapshot.counts.get(below, 0)):
                    yield from self._left_alone(f"{below}[{k}]")
                    yield from self._inside_as_it_is(inner, f"{below}[{k}]")
            elif not inner.is_map:
                yield from self._as_it_is(inner, below)

    def _left_alone(self, path: str) -> Iterator[Decision]:
        record = self.snapshot.paths.get(path)
        if record is not None and record.kind == ev.COMPLETED:
            yield decision_of(path, UNCHANGED, record)
        elif record is not None and record.kind == ev.SKIPPED:
            yield decision_of(path, Verdict(Action.SKIP, record.reason or "trigger"), None)

    def _verdict(self, vertex: Vertex, path: str, prior: Record | None, fingerprint: bytes | None) -> Verdict:
        """Give what is done with a path that a function runs at, a person's word about it included."""
        word = word_about(path, prior, self.snapshot, idempotent=vertex.idempotent)
        if word is not None:
            return word
        idempotent = vertex.idempotent or vertex.body is not None or self.snapshot.permits(path)
        return decide(prior, fingerprint, idempotent=idempotent, reconcilable=vertex.reconcilable)

    def _ends(
        self, vertex: Vertex, path: str, found: Verdict, prior: Record | None, fingerprint: bytes
    ) -> _Outlook:
        """Give how a node ends with which this is done."""
        if found.reason == "resolved":
            said = resolution(path, prior, self.snapshot)
            lost = said is None or said.facts.get("failed") is not None
            return _FAILED if lost else _Outlook("completed", said.digest if said else None)
        if found.reason == "kept" and prior is not None:
            return _Outlook("completed", bytes.fromhex(prior.facts["kept"]["digest"]))
        if found.action is Action.REUSE and prior is not None:
            return _Outlook("completed", fingerprint if vertex.pure else prior.digest)
        if found.action is Action.HOLD:
            return _ASKS
        return _MAYBE if found is RECONCILE else _RUNS

    def _all(self, vertex: Vertex, path: str, verdict: Verdict) -> list[Decision]:
        """Give the same decision for a node and for all that is inside it."""
        return [decision_of(path, verdict, None), *self._alike(vertex, path, verdict)]

    # -- below what runs ------------------------------------------------------------------------------

    def _below_open(self, vertex: Vertex, path: str, prior: Record | None, *, sure: bool) -> Foreseen:
        """A node below one that runs: what it will receive is not known yet, nor perhaps whether it runs."""
        if vertex.waits and (prior is None or prior.kind != ev.COMPLETED):
            return self._wait(vertex, path, prior)
        many = vertex.is_map or vertex.is_loop or vertex.body is not None
        fresh = path not in self.snapshot.counts and (prior is None or not ev.has_output(prior))
        sure = sure and vertex.node.when is None
        outlook = _RUNS if sure and (vertex.idempotent or fresh) and not vertex.body else _MAYBE
        if prior is not None and ev.has_output(prior):
            reason = Verdict(Action.CHECK, "input_may_change")
            counts = {Action.CHECK.value: self.snapshot.counts.get(path, 0)} if vertex.is_map else {}
            return outlook, [
                decision_of(path, reason, prior, counts),
                *self._checks(vertex, path, reason.reason),
            ]
        if vertex.is_map and sure and _is_asked(prior):
            own = decision_of(path, AGAIN, prior, self._counts(vertex, path))
            return outlook, [own, *self._checks(vertex, path, "items_not_known")]
        if vertex.is_map:
            counts = {Action.CHECK.value: known} if (known := self.snapshot.counts.get(path, 0)) else {}
            own = decision_of(path, Verdict(Action.CHECK, "items_not_known"), prior, counts)
            return outlook, [own, *self._checks(vertex, path, "items_not_known")]
        if prior is not None and not (many or vertex.reconcilable):
            found = self._verdict(vertex, path, prior, None)
            if found.action is Action.HOLD:
                return _ASKS, [decision_of(path, found, prior)]
        if sure and prior is None and vertex.body is not None and not (vertex.is_map or vertex.is_loop):
            whole, inside = self._inside(vertex.body, path)
            return whole, [decision_of(path, UPSTREAM, prior), *map(_after_others, inside)]
        if sure and _is_asked(prior):
            return outlook, [decision_of(path, AGAIN, prior), *self._checks(vertex, path, "upstream_runs")]
        why = "upstream_runs" if sure else ev.CONDITION if vertex.node.when else "depends_on_parents"
        found = Verdict(Action.RUN if sure else Action.CHECK, why)
        own = decision_of(path, found, prior)
        return (outlook if sure else _MAYBE), [own, *self._checks(vertex, path, "upstream_runs")]

    def _checks(self, vertex: Vertex, path: str, reason: str) -> list[Decision]:
        """Give decisions for what is inside a node of which it is not known what it receives."""
        return self._alike(vertex, path, Verdict(Action.CHECK, reason))

    def _alike(self, vertex: Vertex, path: str, verdict: Verdict) -> list[Decision]:
        """Give the same decision for each item, round and node inside a node."""
        many = vertex.is_map or vertex.is_loop
        if many and not self.items:
            return []
        instances = [f"{path}[{k}]" for k in range(self._known(vertex, path))] if many else [path]
        found = [decision_of(p, verdict, self.snapshot.paths.get(p)) for p in instances] if many else []
        for instance in instances:
            found += self._inside_checks(vertex, instance, verdict)
        return found

    def _inside_checks(self, vertex: Vertex, path: str, verdict: Verdict) -> Iterator[Decision]:
        for inner in vertex.body.rules if vertex.body is not None else ():
            below = f"{path}/{inner.id}"
            yield decision_of(below, verdict, self.snapshot.paths.get(below))
            yield from self._alike(inner, below, verdict)

    def _known(self, vertex: Vertex, path: str) -> int:
        """Give how many items or rounds of a node there are records of."""
        if vertex.is_map:
            return self.snapshot.counts.get(path, 0)
        k = 0
        while f"{path}[{k}]" in self.snapshot.paths:
            k += 1
        return k

    # -- waits ----------------------------------------------------------------------------------------

    def _wait(self, vertex: Vertex, path: str, prior: Record | None) -> Foreseen:
        what = vertex.node.what
        waiting = prior is not None and prior.kind == ev.WAITING
        due = prior.facts.get("due") if waiting and prior is not None else None
        over = due is not None and due <= self.now
        if isinstance(what, Sleep):
            verdict = Verdict(Action.RUN, "due") if over else Verdict(Action.WAIT, "sleep")
            return (_RUNS if over else _MAYBE), [decision_of(path, verdict, prior)]
        if isinstance(what, Approval):
            word = self.snapshot.decisions.get(path)
            if waiting and prior is not None and word is not None and (word.seq or 0) > (prior.seq or 0):
                yes = word.facts["approved"]
                verdict = Verdict(Action.RUN, "decided" if yes else "rejected")
                return (_RUNS if yes else _FAILED), [decision_of(path, verdict, prior)]
        if isinstance(what, WaitFor) and (signals := self._signals(what.event)):
            sure = waiting and signals >= self._listeners(what.event)
            action = Action.RUN if sure else Action.CHECK  # another wait may be quicker
            return (_RUNS if sure else _MAYBE), [decision_of(path, Verdict(action, "signalled"), prior)]
        if over:
            return _FAILED, [decision_of(path, Verdict(Action.RUN, "timeout"), prior)]
        return _WAITS, [
            decision_of(
                path, Verdict(Action.WAIT, "approval" if isinstance(what, Approval) else "event"), prior
            )
        ]

    def _signals(self, event: str) -> int:
        """Give how many signals of an event no wait has taken."""
        return sum(s.facts.get("event") == event for s in self.snapshot.signals.values())

    def _listeners(self, event: str) -> int:
        """Give how many paths wait for an event."""
        waits = (r for r in self.snapshot.paths.values() if (r.kind, r.reason) == (ev.WAITING, "event"))
        return sum(record.facts.get("event") == event for record in waits)

    # -- maps -----------------------------------------------------------------------------------------

    def _map(self, vertex: Vertex, path: str, prior: Record | None, fingerprint: bytes) -> Foreseen:
        if prior is not None and reuses(vertex, prior, fingerprint):
            counts = {Action.REUSE.value: self.snapshot.counts.get(path, 0)}
            own = decision_of(path, UNCHANGED, prior, counts)
            return _Outlook("completed", prior.digest), [own, *self._items(vertex, path, own)]
        counts = self._counts(vertex, path)
        if _changed(prior, fingerprint):
            own = decision_of(
                path,
                Verdict(Action.CHECK, "items_changed"),
                prior,
                {Action.CHECK.value: sum(counts.values())},
            )
            return (_RUNS if vertex.idempotent else _MAYBE), [
                own,
                *self._checks(vertex, path, "items_changed"),
            ]
        if counts.get(Action.HOLD) or counts.get(Action.WAIT):
            why, outlook = (
                (UNCERTAIN, _ASKS)
                if counts.get(Action.HOLD)
                else (Verdict(Action.WAIT, "items_wait"), _WAITS)
            )
            own = decision_of(path, why, prior, counts)
            return outlook, [own, *self._items(vertex, path, own)]
        missing = Verdict(Action.RUN, "items_missing" if counts else "new")
        own = decision_of(path, AGAIN if _is_asked(prior) else missing, prior, counts)
        sure = vertex.node.when is None and not counts.get(Action.CHECK)
        return (_RUNS if sure else _MAYBE), [own, *self._items(vertex, path, own)]

    def _counts(self, vertex: Vertex, path: str) -> dict[str, int]:
        counts: dict[str, int] = {}
        for _, verdict, _ in self._each(vertex, path):
            counts[verdict.action.value] = counts.get(verdict.action.value, 0) + 1
        return counts

    def _each(self, vertex: Vertex, path: str) -> Iterator[tuple[str, Verdict, Record | None]]:
        """Give each item of a map that was spread out before, with what its own last record says."""
        kept, room = self._tolerated(vertex, path), _Room(vertex)
        items = self._paths_of(path)
        for item, row in zip(items, self.snapshot.paths.find(items), strict=True):
            if row is not None and row[0] == ev.COMPLETED:
                yield item, UNCHANGED, ev.new_record(row)
                continue
            record = None if row is None else ev.new_record(row)
            yield item, _TOLERATED if item in kept else room.take(self._item(vertex, item, record)), record

    def _paths_of(self, path: str) -> list[str]:
        """Give the paths of the items of a map that was spread out before."""
        return [f"{path}[{k}]" for k in range(self.snapshot.counts.get(path, 0))]

    def _tolerated(self, vertex: Vertex, path: str) -> set[str]:
        """Give the items whose failure stays tolerated: those of a map that has not failed itself."""
        former, count = self.snapshot.paths.get(path), self.snapshot.counts.get(path, 0)
        if vertex.node.tolerate is None or former is None or former.kind == ev.FAILED:
            return set()
        items = (self.snapshot.paths.get(f"{path}[{k}]") for k in range(count))
        failed = {
            r.path or "" for r in items if r is not None and r.kind == ev.FAILED and r.reason != ev.RETRY
        }
        return failed if tolerated(vertex.node.tolerate, len(failed), count) else set()

    def _item(self, vertex: Vertex, item: str, record: Record | None) -> Verdict:
        if record is not None and (record.kind, record.reason) == (ev.SKIPPED, ev.CONDITION):
            return Verdict(Action.SKIP, ev.CONDITION)
        fingerprint = record.input if record is not None else None
        found = self._verdict(vertex, item, record, fingerprint)
        if vertex.body is not None and record is not None and found.action is Action.RUN:
            held = self._inside(vertex.body, item)[0].held
            if held:
                return (
                    Verdict(Action.HOLD, "uncertain")
                    if held == "upstream_held"
                    else Verdict(Action.WAIT, "items_wait")
                )
        asks = vertex.node.when is not None and not _was_asked(record, fingerprint)
        if asks and found.action is Action.RUN and found is not RECONCILE:
            return Verdict(Action.CHECK, ev.CONDITION)
        return found

    def _items(self, vertex: Vertex, path: str, own: Decision) -> Iterator[Decision]:
        if not self.items:
            return
        if own.action == Action.REUSE and vertex.body is None:
            items = self._paths_of(path)
            rows = self.snapshot.paths.find(items)
            records = Records([row for row in rows if row is not None])
            if len(records) == len(items) and records.hold_outputs:
                yield from decisions_to_reuse(items, records)
                return
        for item, found, record in self._each(vertex, path):
            verdict = found
            if own.action == Action.REUSE and verdict.action not in {Action.REUSE, Action.SKIP}:
                verdict = _TOLERATED
            yield decision_of(item, verdict, record)
            if vertex.body is None:
                continue
            if Action.REUSE in {own.action, verdict.action}:
                yield from self._inside_as_it_is(vertex, item)
                continue
            if verdict.action is Action.CHECK or verdict is _NO_ROOM:
                yield from self._inside_checks(vertex, item, Verdict(Action.CHECK, verdict.reason))
            elif verdict.action is not Action.SKIP:
                yield from self._within(vertex.body, item, record)

    # -- graphs inside nodes --------------------------------------------------------------------------

    def _inside(self, body: Body, path: str) -> Foreseen:
        return _Foresight(body, self.snapshot, None, path + "/", self.items, self.now).look()

    def _within(self, body: Body, path: str, record: Record | None) -> list[Decision]:
        """Give the decisions inside a node that is entered; none where all of it is reused."""
        return [] if record is not None and record.kind == ev.COMPLETED else self._inside(body, path)[1]

    def _nest(self, vertex: Vertex, path: str, prior: Record | None, fingerprint: bytes) -> Foreseen:
        assert vertex.body is not None
        if _changed(prior, fingerprint):
            own = decision_of(path, Verdict(Action.CHECK, "input_may_change"), prior)
            return _MAYBE, [own, *self._checks(vertex, path, "input_may_change")]
        outlook, inside = self._inside(vertex.body, path)
        verdict = AGAIN if _is_asked(prior) else _summed_up(inside, new=prior is None)
        return outlook, [decision_of(path, verdict, prior), *inside]

    def _loop(self, vertex: Vertex, path: str, prior: Record | None, fingerprint: bytes) -> Foreseen:
        """Walk over the rounds that completed, as the loop does when it is entered again."""
        assert isinstance(vertex.node.what, Loop)
        if _changed(prior, fingerprint):
            own = decision_of(path, Verdict(Action.CHECK, "input_may_change"), prior)
            return _MAYBE, [own, *self._checks(vertex, path, "input_may_change")]
        rounds: list[Decision] = []
        paths = self.snapshot.paths
        for n in range(vertex.node.what.max_iterations):
            at = f"{path}[{n}]"
            record = paths.get(at)
            if record is None or record.kind != ev.COMPLETED:
                return self._round(vertex, path, prior, rounds, at, record)
            rounds.append(decision_of(at, UNCHANGED, record))
            done = record.facts.get("done") if record.data is not None else None
            if done is not False:
                known = _Outlook("completed", record.digest) if done else _MAYBE
                own = decision_of(
                    path, Verdict(Action.RUN if done else Action.CHECK, "rounds_missing"), prior
                )
                return known, [own, *(rounds if self.items else ())]
        own = decision_of(
            path, Verdict(Action.SKIP, "max_iterations"), prior, {Action.REUSE.value: len(rounds)}
        )
        return _FAILED, [own, *(rounds if self.items else ())]

    def _round(
        self,
        vertex: Vertex,
        path: str,
        prior: Record | None,
        rounds: list[Decision],
        at: str,
        record: Record | None,
    ) -> Foreseen:
        """The round that a loop goes on with; how many come after it nobody knows."""
        fingerprint = record.input if record is not None else None
        found = self._verdict(vertex, at, record, fingerprint)
        outlook = _ASKS if found.action is Action.HOLD else _RUNS
        inside: list[Decision] = []
        if vertex.body is not None:
            outlook, inside = self._inside(vertex.body, at)
            if outlook is _RUNS and any(inner.waits for inner in vertex.body.every()):
                outlook = _MAYBE  # the next round may wait again
        if outlook.held:
            verdict = UNCERTAIN if outlook.held == "upstream_held" else Verdict(Action.WAIT, "rounds_wait")
        else:
            verdict = Verdict(Action.RUN, "rounds_missing" if rounds or record is not None else "new")
            verdict = AGAIN if _is_asked(prior) else verdict
        counts = {Action.REUSE.value: len(rounds)} if rounds else {}
        own = decision_of(path, verdict, prior, counts | {found.action.value: 1})
        shown = [*rounds, decision_of(at, found, record), *inside] if self.items else []
        for later in range(len(rounds) + 1, self._known(vertex, path) if self.items else 0):
            instance = f"{path}[{later}]"
            shown.append(decision_of(instance, DEPENDS, self.snapshot.paths.get(instance)))
            shown += self._inside_checks(vertex, instance, DEPENDS)
        return outlook._replace(digest=None), [own, *shown]

    # -- pure nodes -----------------------------------------------------------------------------------

    def _with_recomputed(self, decisions: list[Decision]) -> list[Decision]:
        """A pure node that would be reused runs after all where one that runs needs its value."""
        at = {decision.path: n for n, decision in enumerate(decisions)}
        whole = self._whole()
        giving = (
            self._giving if self.prefix and whole.ended != "failed" else ()
        )  # their values go out of here
        for vertex in reversed(self.rules):
            place = at[self.prefix + vertex.id]
            own = decisions[place]
            if not vertex.pure or own.action != Action.REUSE or own.reason == HANDLED.reason:
                continue
            takers = (self.rules[c] for c in vertex.children if vertex.index in self.rules[c].source_parents)
            below = {decisions[at[self.prefix + taker.id]].action for taker in takers}
            if vertex.index in giving:
                below.add(Action.CHECK if whole is _MAYBE else Action.RUN)
            action = next((a for a in (Action.RUN, Action.CHECK) if a in below), None)
            if action is not None:
                decisions[place] = Decision(own.path, action, "recomputed", own.seconds, own.usage, own.items)
        return decisions


class _Room:
    """How many more of a map's graphs can be open, where some may stay open since they wait."""

    def __init__(self, vertex: Vertex) -> None:
        waits = vertex.body is not None and any(inner.waits for inner in vertex.body.every())
        self._most = vertex.node.concurrency if waits else None
        self._open = self._waiting = 0

    def take(self, verdict: Verdict) -> Verdict:
        """Give what is done with the next item, of which this would be done if there were room."""
        if self._most is None or verdict.action not in {Action.RUN, Action.CHECK, Action.WAIT}:
            return verdict
        self._open += 1
        if verdict.action is Action.WAIT:
            self._waiting += 1
            return verdict
        if self._waiting >= self._most:
            return _NO_ROOM
        return Verdict(Action.CHECK, _NO_ROOM.reason) if self._open > self._most else verdict


_NO_ROOM: Final = Verdict(Action.WAIT, "no_room")
_TOLERATED: Final = Verdict(Action.REUSE, "tolerated")
UPSTREAM: Final = Verdict(Action.RUN, "upstream_runs")
DEPENDS: Final = Verdict(Action.CHECK, "depends_on_parents")
_BEGUN: Final = frozenset({ev.STARTED, ev.FAILED, ev.INTERRUPTED, ev.CANCELLED, ev.WAITING})


def _was_asked(prior: Record | None, fingerprint: bytes | None) -> bool:
    """Say whether a condition has said yes to this very input: then something of the path began."""
    if prior is None or prior.reason == ev.CONDITION_FAILED:
        return False
    return prior.input == fingerprint and prior.kind in _BEGUN


def _changed(prior: Record | None, fingerprint: bytes) -> bool:
    """Say whether a node that holds others receives something else than when it was entered last."""
    if prior is None:
        return False
    if prior.kind == ev.RESET and prior.reason == "input_changed":
        return True
    return prior.input is not None and prior.input != fingerprint


def _after_others(decision: Decision) -> Decision:
    """What has no record inside a node that is entered later runs after what is above the node."""
    return decision._replace(reason=UPSTREAM.reason) if decision.reason == NEW.reason else decision


def _summed_up(inside: Iterable[Decision], *, new: bool) -> Verdict:
    """Give what is done with a node as a whole, from what is done inside it."""
    actions = {decision.action for decision in inside}
    if Action.RUN not in actions and Action.CHECK not in actions:
        if Action.HOLD in actions:
            return UNCERTAIN
        if Action.WAIT in actions:
            return Verdict(Action.WAIT, "inner_waits")
    if Action.RUN not in actions and Action.CHECK in actions:
        return Verdict(Action.CHECK, "depends_on_parents")
    return Verdict(Action.RUN, "new" if new else "inner_missing")


def _joined(vertex: Vertex, ended: Counter[str]) -> Join | None:
    """Give what the join rule says if what runs completes, however the others end; None if that decides."""
    trigger, maybe = vertex.node.trigger, ended["maybe"]
    counts = [ended["completed"], ended["skipped"], ended["failed"]]
    if trigger == "any_failed":
        maybe += ended["runs"]
    else:
        counts[Settled.COMPLETED] += ended["runs"]
    verdicts = set()
    for how in (Settled.COMPLETED, Settled.SKIPPED, Settled.FAILED)[: 3 if maybe else 1]:
        completed, skipped, failed = (n + maybe * (how == place) for place, n in enumerate(counts))
        verdicts.add(join(trigger, completed, skipped, failed))
    sure = verdicts.pop() if len(verdicts) == 1 else None
    return None if sure is Join.RUN and ended["maybe"] else sure  # it may also end as a question to a person
