"""What will be done with each path, and why. Pure: the resume and the plan ask the same `decide`."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, NamedTuple

from dagresume import codec
from dagresume.events import (
    CANCELLED,
    COMPLETED,
    FAILED,
    INTERRUPTED,
    MIGRATED,
    RESET,
    SKIPPED,
    STARTED,
    WAITING,
    WITHDRAWN,
    Record,
    Snapshot,
    enclosing,
    segments,
)
from dagresume.events import HELD as HELD_REASON
from dagresume.policy import Join, Retry, Settled, join
from dagresume.workflow import WAITS, Binding, Graph, Loop, Node, Source

__all__ = [
    "Action",
    "Body",
    "Decision",
    "Verdict",
    "Vertex",
    "decide",
    "matches",
    "plan",
    "uncertain",
    "uncertain_paths",
]

ABSENT: Final = bytes(16)
"""Stands in a fingerprint for a value that is not there: a skipped parent, an input left to its default."""
NOT_STORABLE: Final = "not_serialisable"
"""Reason of a failure after the body had returned: its effect has happened."""


class Action(StrEnum):
    """What will be done with a path."""

    REUSE = "reuse"
    RUN = "run"
    CHECK = "check"
    SKIP = "skip"
    WAIT = "wait"
    HOLD = "hold"


class Verdict(NamedTuple):
    """An action and its machine-readable reason."""

    action: Action
    reason: str


NEW: Final = Verdict(Action.RUN, "new")
AGAIN: Final = Verdict(Action.RUN, "asked")
UNCHANGED: Final = Verdict(Action.REUSE, "completed")
INPUT_CHANGED: Final = Verdict(Action.RUN, "input_changed")
HELD: Final = Verdict(Action.HOLD, "input_changed")
CUT_OFF: Final = Verdict(Action.RUN, "interrupted")
RECONCILE: Final = Verdict(Action.RUN, "reconcile")
UNCERTAIN: Final = Verdict(Action.HOLD, "uncertain")
FAILED_BEFORE: Final = Verdict(Action.RUN, "failed")
HANDLED: Final = Verdict(Action.REUSE, "handled")


@dataclass(slots=True, eq=False)
class Vertex:
    """What scheduler and planner need to know of one node of a graph, looked up once.

    `salt` starts the fingerprint: the node's `version=` and the names of its parameters. `types` are the
    classes its output may hold. `received` says where each thing it receives comes from (of a map: the whole
    lists), `chained` are the parents whose items it takes one by one (the parent is a map itself).
    `only_parents`: it receives the outputs of these, in order, and nothing else.
    """

    index: int
    id: str
    node: Node
    parents: tuple[int, ...]
    children: tuple[int, ...]
    bindings: tuple[Binding, ...]
    idempotent: bool
    retry: Retry
    types: codec.Types
    salt: Any
    is_map: bool
    body: Body | None
    received: tuple[Source, ...]
    value_parents: tuple[int, ...]
    source_parents: tuple[int, ...]
    only_parents: tuple[int, ...] | None
    chained: frozenset[int] = frozenset()

    @property
    def is_loop(self) -> bool:
        """Whether it runs in rounds."""
        return isinstance(self.node.what, Loop)

    @property
    def waits(self) -> bool:
        """Whether it waits for time, a person or a signal, and runs nothing."""
        return isinstance(self.node.what, WAITS)

    @property
    def runs_function(self) -> bool:
        """Whether its own path, and not only one inside it, is that of a function."""
        return not (self.is_map or self.is_loop or self.node.fn is None)

    @property
    def reconcilable(self) -> bool:
        """Whether it can tell by itself what became of an attempt that nobody knows about."""
        return self.node.reconcile is not None

    @property
    def pure(self) -> bool:
        """Whether its output is passed on and not stored."""
        return not self.node.checkpoint

    @property
    def streams(self) -> bool:
        """Whether its items may begin before the maps above have ended."""
        return bool(self.chained) and self.node.trigger in {"none_failed", "all_success"}

    def fingerprint(self, parts: Iterable[bytes]) -> bytes:
        """Give the digest (16 bytes) of everything it receives, in the order of its parameters."""
        state = self.salt.copy()
        state.update(b"".join(parts))
        return state.digest()[:16]  # type: ignore[no-any-return]


class Body:
    """A graph as it is run: of a workflow, or of one inside a node. Paths inside a node start with its own.

    `origins` are the lists that maps take one by one, `sinks` the vertices that nothing comes after.
    """

    def __init__(self, graph: Graph, enclosing: bool = False) -> None:
        idempotent = enclosing if graph.idempotent is None else graph.idempotent
        self.workflow = graph.workflow
        self.rules: tuple[Vertex, ...] = _vertices(graph, idempotent)
        self.by_id = {vertex.id: vertex for vertex in self.rules}
        self.origins: Sequence[Sequence[Source]] = graph.sources
        self.input_types = {name: codec.types_of(*hints) for name, hints in graph.inputs.items()}
        self.output = graph.output
        self.sinks = tuple(vertex.index for vertex in self.rules if not vertex.children)

    def at(self, path: str) -> Vertex | None:
        """Give the vertex that a path is one of; None if there is no such node."""
        try:
            names = segments(path)
        except ValueError:
            return None
        body: Body | None = self
        vertex = None
        for name, _ in names:
            vertex = None if body is None else body.by_id.get(name)
            if vertex is None:
                return None
            body = vertex.body
        return vertex

    def every(self) -> Iterator[Vertex]:
        """Give the vertices here and of all bodies inside."""
        for vertex in self.rules:
            yield vertex
            if vertex.body is not None:
                yield from vertex.body.every()


def _vertices(graph: Graph, idempotent: bool) -> tuple[Vertex, ...]:
    salts: dict[tuple[str, ...], Any] = {}
    types: dict[Any, codec.Types] = {}
    maps = {i for i, node in enumerate(graph.nodes) if node.for_each}
    return tuple(_vertex(graph, i, idempotent, maps, salts, types) for i in range(len(graph)))


def _vertex(
    graph: Graph,
    i: int,
    idempotent: bool,
    maps: set[int],
    salts: dict[tuple[str, ...], Any],
    types: dict[Any, Any],
) -> Vertex:
    node, bindings = graph.nodes[i], graph.bindings[i]
    fed = [binding for binding in bindings if binding.source.kind != "context"]
    names = (node.version, *(binding.parameter for binding in fed))
    salt = salts.get(names)
    if salt is None:
        salt = salts[names] = hashlib.sha256("\0".join(names).encode())
    returns = node.signature.returns
    try:
        found = types.get(returns)
        if found is None:
            found = types[returns] = codec.types_of(returns)
    except TypeError:  # an annotation that is not hashable
        found = codec.types_of(returns)
    own = idempotent if node.idempotent is None else node.idempotent
    body = None if node.workflow is None else Body(graph.inner[id(node.workflow)], own)
    return Vertex(
        index=i,
        id=node.id,
        node=node,
        parents=graph.parents[i],
        children=graph.children[i],
        bindings=bindings,
        idempotent=own,
        retry=node.retry or graph.retry,
        types=found if body is None else _given_types(body),
        salt=salt,
        is_map=bool(node.for_each),
        body=body,
        chained=frozenset(s.place for s in graph.sources[i] if s.kind == "parent" and s.place in maps)
        if node.for_each
        else frozenset(),
        only_parents=_only_parents(graph, i),
        value_parents=tuple({b.source.place: None for b in fed if b.source.kind == "parent"}),
        source_parents=tuple(
            {s.place: None for s in (*graph.sources[i], *(b.source for b in fed)) if s.kind == "parent"}
        ),
        received=tuple(
            graph.sources[i][b.source.place] if b.source.kind == "item" else b.source for b in fed
        ),
    )


def _given_types(body: Body) -> codec.Types:
    """Give the classes that the output of a workflow may hold: those of the nodes it comes from."""
    giving = body.sinks if body.output is None else (body.output,)
    types: dict[str, type] = {}
    for place in giving:
        types.update(body.rules[place].types)
    return types or codec.EMPTY


def _only_parents(graph: Graph, i: int) -> tuple[int, ...] | None:
    if graph.nodes[i].what is not None:
        return None
    if any(binding.source.kind != "parent" or binding.keyword for binding in graph.bindings[i]):
        return None
    return tuple(binding.source.place for binding in graph.bindings[i])


# -- the decision ---------------------------------------------------------------------------------------


def uncertain(prior: Record | None, idempotent: bool) -> bool:
    """Say whether nobody can tell if a path took effect: begun, not known to have ended, not idempotent."""
    if prior is None or idempotent:
        return False
    if prior.kind in {STARTED, INTERRUPTED, CANCELLED}:
        return True
    return prior.kind == FAILED and prior.reason == NOT_STORABLE


def matches(prior: Record, fingerprint: bytes | None) -> bool:
    """Say whether a path completed with this input. What an older version of the definition completed stays
    so, whatever its parameters were called.
    """
    if prior.kind != COMPLETED:
        return False
    return prior.input == fingerprint or (prior.input is None and prior.reason == MIGRATED)


def decide(
    prior: Record | None, fingerprint: bytes | None, *, idempotent: bool, reconcilable: bool = False
) -> Verdict:
    """Give what is to be done with a path whose parents are settled, from its last record and what it would
    receive.
    """
    if prior is None:
        return NEW
    kind = prior.kind
    if kind == COMPLETED:
        if matches(prior, fingerprint):
            return UNCHANGED
        return INPUT_CHANGED if idempotent else HELD
    if uncertain(prior, idempotent):
        return RECONCILE if reconcilable else UNCERTAIN
    return _WHEN_NOT_COMPLETED.get(kind, NEW)


_WHEN_NOT_COMPLETED: Final[Mapping[str, Verdict]] = {
    STARTED: CUT_OFF,
    INTERRUPTED: CUT_OFF,
    CANCELLED: CUT_OFF,
    FAILED: FAILED_BEFORE,
    WAITING: HELD,
    RESET: AGAIN,
    WITHDRAWN: NEW,
    SKIPPED: NEW,
}


def handled(vertex: Vertex, rules: Sequence[Vertex], state: Mapping[str, Record], prefix: str = "") -> bool:
    """Say whether a node's failure was dealt with: a child that runs on failures has completed."""
    return any(
        rules[child].node.trigger == "any_failed"
        and (record := state.get(prefix + rules[child].id)) is not None
        and record.kind == COMPLETED
        for child in vertex.children
    )


def uncertain_paths(body: Body, snapshot: Snapshot, *, reconcile: bool = True) -> list[str]:
    """Give the paths that stop a resume, in the order they began.

    Left out are those that can reconcile, and those of which a person has said what they did.
    """
    found = []
    for path, record in snapshot.paths.items():
        if record.kind == COMPLETED or record.attempt is None:
            continue
        vertex = body.at(path)
        if vertex is None or not uncertain(record, vertex.idempotent) or not is_body(vertex, path):
            continue
        if (
            reconcile and (vertex.reconcilable or resolution(path, record, snapshot) is not None)
        ) or _is_settled(body, path, snapshot):
            continue
        found.append((record.seq or 0, path))
    return [path for _, path in sorted(found)]


def is_body(vertex: Vertex, path: str) -> bool:
    """Say whether a function runs at this path: not at a map, loop or inner workflow, nor at a wait."""
    if vertex.node.fn is None:
        return False
    return path.endswith("]") or not (vertex.is_map or vertex.is_loop)


def resolution(path: str, prior: Record | None, snapshot: Snapshot) -> Record | None:
    """Give what a person said that an uncertain path did, if it was said after its last record."""
    letter = snapshot.resolutions.get(path)
    since = (prior.seq or 0) if prior is not None else 0
    return letter if letter is not None and (letter.seq or 0) > since else None


def _is_settled(body: Body, path: str, snapshot: Snapshot) -> bool:
    """Say whether a path that failed was dealt with: something around it has completed, or it, or something
    around it, was handled by a child.
    """
    for around in (path, *enclosing(path)):
        outer = snapshot.paths.get(around)
        if outer is not None and outer.kind == COMPLETED and around != path:
            return True
        vertex = body.at(around)
        if vertex is None or around.endswith("]"):
            continue
        prefix = around[: len(around) - len(vertex.id)]
        inside = body if not prefix else body.at(prefix[:-1]).body  # type: ignore[union-attr]  # it is there
        if inside is not None and handled(vertex, inside.rules, snapshot.paths, prefix):
            return True
    return False


# -- the plan -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decision:
    """What a resume would do with one path, and why.

    `seconds` is what its last completed attempt took (what reusing it saves, or what running it again may
    cost), None if unknown; `usage` what it used up. A map is one decision: `items` counts its items by
    action. `repeats`: its effect happens once more, since it is not idempotent and has completed
    ("completed") or may have taken effect ("uncertain"); None: it does not. `code_changed`: its code, or that
    of one of its items, is another than when it ran; by itself that runs nothing again.
    """

    path: str
    action: str
    reason: str
    seconds: float | None = None
    usage: Mapping[str, float] = field(default_factory=dict)
    items: Mapping[str, int] = field(default_factory=dict)
    repeats: str | None = None
    code_changed: bool = False


class _Outlook(NamedTuple):
    """How a node will end, as far as it can be known beforehand."""

    ended: (
        str  # completed, skipped, failed: for sure; runs: completes, if it does not fail; maybe: nobody knows
    )
    digest: bytes | None  # of its output, if it is sure to stay as it is
    held: bool = False  # it waits for a person, or something above it does


def plan(
    rules: Sequence[Vertex],
    snapshot: Snapshot,
    inputs: Mapping[str, bytes],
    *,
    items: bool = False,
    before: Mapping[str, Record] | None = None,
    other_code: Collection[str] = (),
) -> list[Decision]:
    """Give a decision for every node in topological order, those in a node after it; with `items`, for every
    item of a map and round of a loop too.

    Every `run` runs, every `reuse` is reused, every `check` does one of both once what is above it is known;
    nothing else runs. `before`: the records by path before a person set some of them back; `other_code`: the
    paths whose code is another now.
    """
    asked = _Asked(snapshot, items, snapshot.paths if before is None else before, other_code)
    return _Forecast(asked, rules, "", inputs).decisions


class _Asked(NamedTuple):
    snapshot: Snapshot
    items: bool
    before: Mapping[str, Record]
    other_code: Collection[str]

    def decision(
        self, path: str, verdict: Verdict, vertex: Vertex, items: Mapping[str, int] | None = None
    ) -> Decision:
        prior = self.before.get(path)
        done = prior is not None and prior.kind == COMPLETED
        seconds = prior.took / 1e6 if done and prior is not None and prior.took is not None else None
        usage = prior.facts.get("usage", {}) if done and prior is not None else {}
        repeats = None
        if not vertex.idempotent and is_body(vertex, path):
            repeats = self._repeats(path, verdict, prior)
        other = path in self.other_code
        return Decision(
            path, verdict.action.value, verdict.reason, seconds, usage, items or {}, repeats, other
        )

    def _repeats(self, path: str, verdict: Verdict, prior: Record | None) -> str | None:
        now = self.snapshot.paths.get(path)
        may = verdict.action is Action.CHECK and (self.snapshot.permits(path) or _is_asked(now))
        if prior is None or verdict is RECONCILE or not (may or verdict.action is Action.RUN):
            return None
        if prior.kind == COMPLETED or (prior.kind, prior.reason) == (WAITING, HELD_REASON):
            return "completed"
        return "uncertain" if uncertain(prior, idempotent=False) else None


class _Inputs(StrEnum):
    """What is known of the inputs of a graph inside a node, if not their digests."""

    AS_BEFORE = "as before"
    OPEN = "open"


class _Forecast:
    """What would be done in one instance of a graph."""

    def __init__(
        self, asked: _Asked, rules: Sequence[Vertex], prefix: str, inputs: Mapping[str, bytes] | _Inputs
    ) -> None:
        self.asked, self.rules, self.prefix, self.inputs = asked, rules, prefix, inputs
        self.paths, self.counts = asked.snapshot.paths, asked.snapshot.counts
        self.outlooks: list[_Outlook] = []
        self.decisions: list[Decision] = []
        self._own: list[int] = []  # where in `decisions` a vertex has its own
        for vertex in rules:
            self._own.append(len(self.decisions))
            below: list[Decision] = []
            outlook, own = self._foresee(vertex, below)
            self.outlooks.append(outlook)
            self.decisions += [own, *below]
        if any(vertex.pure for vertex in rules):
            self._recompute()

    @property
    def held(self) -> Decision | None:
        """The first path here that waits for a person's word, if there is one."""
        return next((d for d in self.decisions if d.action == Action.HOLD), None)

    def _decision(self, vertex: Vertex, verdict: Verdict, items: Mapping[str, int] | None = None) -> Decision:
        return self.asked.decision(self.prefix + vertex.id, verdict, vertex, items)

    def _foresee(self, vertex: Vertex, below: list[Decision]) -> tuple[_Outlook, Decision]:
        outlooks = self.outlooks
        path = self.prefix + vertex.id
        prior = self.paths.get(path)
        if any(outlooks[parent].held for parent in vertex.parents):
            held = Verdict(Action.WAIT, "upstream_held")
            return _Outlook("failed", None, held=True), Decision(path, *held)
        ended = Counter(outlooks[parent].ended for parent in vertex.parents)
        verdict = _joined(vertex, ended)
        if verdict is Join.BLOCK:
            return _Outlook("failed", None), Decision(path, Action.SKIP, "upstream_failed")
        if verdict is Join.SKIP:
            return _Outlook("skipped", None), Decision(path, Action.SKIP, "trigger")
        if (
            prior is not None
            and prior.kind == FAILED
            and handled(vertex, self.rules, self.paths, self.prefix)
        ):
            return _Outlook("failed", None), self._decision(vertex, HANDLED)
        if ended["runs"] or ended["maybe"] or self._is_open(vertex):
            return self._below_open(vertex, prior, below, sure=verdict is Join.RUN)
        return self._decided(vertex, prior, below)

    def _is_open(self, vertex: Vertex) -> bool:
        return self.inputs is _Inputs.OPEN and any(source.kind == "input" for source in vertex.received)

    def _fingerprint(self, vertex: Vertex) -> bytes | None:
        """Give the fingerprint of what a vertex receives; None if the digests are not known."""
        inputs = self.inputs
        if isinstance(inputs, _Inputs):
            if any(source.kind == "input" for source in vertex.received):
                return None
            inputs = {}
        return vertex.fingerprint(
            part(source, lambda i: self.outlooks[i].digest, inputs) for source in vertex.received
        )

    def _decided(
        self, vertex: Vertex, prior: Record | None, below: list[Decision]
    ) -> tuple[_Outlook, Decision]:
        """A node all of whose parents stay as they are."""
        fingerprint = self._fingerprint(vertex)
        if fingerprint is None and prior is not None:
            if prior.kind == COMPLETED and self._is_behind(vertex, prior):
                return self._below_open(vertex, prior, below, sure=True)
            fingerprint = prior.input
        if vertex.is_map:
            return self._map(vertex, prior, fingerprint, below)
        if prior is not None and matches(prior, fingerprint):
            below += self._reused_inside(vertex)
            digest = fingerprint if vertex.pure else prior.digest
            return _Outlook("completed", digest), self._decision(vertex, UNCHANGED)
        if vertex.waits:
            return _Outlook("maybe", None), self._decision(vertex, Verdict(Action.WAIT, vertex.node.type))
        if vertex.is_loop or vertex.body is not None:
            return self._inside(vertex, prior, fingerprint, below)
        found = self._verdict(vertex, self.prefix + vertex.id, prior, fingerprint)
        if found.action is Action.HOLD:
            return _Outlook("failed", None, held=True), self._decision(vertex, found)
        return _Outlook("maybe" if found is RECONCILE else "runs", None), self._decision(vertex, found)

    def _verdict(self, vertex: Vertex, path: str, prior: Record | None, fingerprint: bytes | None) -> Verdict:
        idempotent = vertex.idempotent or not is_body(vertex, path)
        if prior is not None and prior.kind == COMPLETED:
            idempotent = idempotent or self.asked.snapshot.permits(path)
        return decide(prior, fingerprint, idempotent=idempotent, reconcilable=vertex.reconcilable)

    def _is_behind(self, vertex: Vertex, prior: Record) -> bool:
        """Say whether something above a completed path is newer than it."""
        above = (self.paths.get(self.prefix + self.rules[parent].id) for parent in vertex.parents)
        return any(record is not None and (record.seq or 0) > (prior.seq or 0) for record in above)

    def _below_open(
        self, vertex: Vertex, prior: Record | None, below: list[Decision], *, sure: bool
    ) -> tuple[_Outlook, Decision]:
        """A node below one that runs: what it will receive is not known yet, and perhaps not whether it
        runs.
        """
        path = self.prefix + vertex.id
        fresh = path not in self.counts and (prior is None or prior.kind != COMPLETED)
        certain = vertex.idempotent or fresh or _is_asked(prior) or self.asked.snapshot.permits(path)
        outlook = _Outlook("runs" if sure and certain else "maybe", None)
        if vertex.is_loop or vertex.body is not None:
            below += self._shown(self._listed_inside(vertex, _Inputs.OPEN))
        if prior is not None and prior.kind == COMPLETED:
            counts = {Action.CHECK.value: self.counts.get(path, 0)} if vertex.is_map else {}
            verdict = Verdict(Action.CHECK, "input_may_change")
            below += self._items_listed(vertex, verdict)
            return outlook, self._decision(vertex, verdict, counts)
        if vertex.is_map:
            found = AGAIN if sure and _is_asked(prior) else Verdict(Action.CHECK, "items_not_known")
            below += self._items_listed(vertex, found)
            return outlook, self._decision(vertex, found, self._item_counts(vertex))
        if vertex.waits:
            return _Outlook("maybe", None), self._decision(vertex, Verdict(Action.WAIT, vertex.node.type))
        if is_body(vertex, path) and uncertain(prior, vertex.idempotent) and not vertex.reconcilable:
            return _Outlook("failed", None, held=True), self._decision(vertex, UNCERTAIN)
        found = Verdict(Action.RUN, "upstream_runs") if sure else Verdict(Action.CHECK, "depends_on_parents")
        if sure and _is_asked(prior):
            found = AGAIN
        return _Outlook("runs" if sure else "maybe", None), self._decision(vertex, found)

    # what is inside a node

    def _inside(
        self, vertex: Vertex, prior: Record | None, fingerprint: bytes | None, below: list[Decision]
    ) -> tuple[_Outlook, Decision]:
        """A loop or a graph inside a node that is entered, again or for the first time."""
        inputs: Mapping[str, bytes] | _Inputs = self._inner_inputs(vertex)
        if vertex.is_loop and prior is not None and prior.input not in {None, fingerprint}:
            inputs = _Inputs.OPEN
        found = self._verdict(vertex, self.prefix + vertex.id, prior, fingerprint)
        inner = self._listed_inside(vertex, inputs)
        below += self._shown(inner)
        held = next((d for d in inner if d.action == Action.HOLD), None)
        if held is not None:
            verdict = Verdict(Action.HOLD, held.reason)
            return _Outlook("failed", None, held=True), self._decision(vertex, verdict)
        return _Outlook("runs", None), self._decision(vertex, found)

    def _shown(self, inner: Iterable[Decision]) -> Iterator[Decision]:
        """Leave rounds and items out unless they are asked for."""
        return (d for d in inner if self.asked.items or "[" not in d.path[len(self.prefix) :])

    def _listed_inside(self, vertex: Vertex, inputs: Mapping[str, bytes] | _Inputs) -> list[Decision]:
        path = self.prefix + vertex.id
        if vertex.is_map:
            return []
        if vertex.is_loop:
            return list(self._rounds(vertex, path, inputs))
        assert vertex.body is not None
        return _Forecast(self.asked, vertex.body.rules, path + "/", inputs).decisions

    def _inner_inputs(self, vertex: Vertex) -> Mapping[str, bytes] | _Inputs:
        if vertex.is_loop or isinstance(self.inputs, _Inputs):
            return _Inputs.AS_BEFORE
        found = {}
        for binding in vertex.bindings:
            source = binding.source
            if source.kind == "constant":
                found[binding.parameter] = codec.digest(codec.pack(source.value))
            elif source.kind == "parent" or source.name in self.inputs:
                found[binding.parameter] = part(source, lambda i: self.outlooks[i].digest, self.inputs)
        return found

    def _rounds(self, vertex: Vertex, path: str, inputs: Mapping[str, bytes] | _Inputs) -> Iterator[Decision]:
        """Give what is known of the rounds of a loop: those from the first that has not completed on may come
        out otherwise.
        """
        k, settled = 0, inputs is not _Inputs.OPEN
        while (prior := self.paths.get(f"{path}[{k}]")) is not None:
            here, k = f"{path}[{k}]", k + 1
            if prior.kind == WITHDRAWN:
                continue
            if settled and prior.kind == COMPLETED:
                yield self.asked.decision(here, UNCHANGED, vertex)
                continue
            found = self._verdict(vertex, here, prior, prior.input)
            if not settled and found.action is not Action.HOLD:
                found = Verdict(Action.CHECK, "depends_on_parents")
            yield from self._part(vertex, here, found, _Inputs.AS_BEFORE if settled else _Inputs.OPEN)
            settled = False

    def _part(self, vertex: Vertex, path: str, found: Verdict, inputs: _Inputs) -> Iterator[Decision]:
        """Give the decisions for one round or item, and for what is in it."""
        if vertex.body is None or found.action is Action.REUSE or path not in self.paths:
            yield self.asked.decision(path, found, vertex)
            return
        inner = _Forecast(self.asked, vertex.body.rules, path + "/", inputs)
        held = inner.held
        yield self.asked.decision(path, found if held is None else Verdict(Action.HOLD, held.reason), vertex)
        yield from inner.decisions

    def _reused_inside(self, vertex: Vertex) -> Iterator[Decision]:
        """Give the nodes of a graph that stays as it is."""
        if vertex.is_map or vertex.is_loop or vertex.body is None:
            return
        for inner in vertex.body.rules:
            path = f"{self.prefix}{vertex.id}/{inner.id}"
            record = self.paths.get(path)
            if record is not None and record.kind == COMPLETED:
                yield self.asked.decision(path, UNCHANGED, inner)

    # maps

    def _map(
        self, vertex: Vertex, prior: Record | None, fingerprint: bytes | None, below: list[Decision]
    ) -> tuple[_Outlook, Decision]:
        if prior is not None and matches(prior, fingerprint):
            counts = {Action.REUSE.value: self.counts.get(self.prefix + vertex.id, 0)}
            below += self._items_listed(vertex, UNCHANGED)
            return _Outlook("completed", prior.digest), self._decision(vertex, UNCHANGED, counts)
        counts = self._item_counts(vertex)
        if prior is not None and prior.input is not None and prior.input != fingerprint:
            counts = {Action.CHECK.value: sum(counts.values())}
            outlook = _Outlook("runs" if vertex.idempotent else "maybe", None)
            verdict = Verdict(Action.CHECK, "items_changed")
        elif counts.get(Action.HOLD):
            outlook, verdict = _Outlook("failed", None, held=True), UNCERTAIN
        else:
            verdict = AGAIN if _is_asked(prior) else Verdict(Action.RUN, "items_missing" if counts else "new")
            outlook = _Outlook("runs", None)
        below += self._items_listed(vertex, verdict)
        return outlook, self._decision(vertex, verdict, counts)

    def _item_counts(self, vertex: Vertex) -> dict[str, int]:
        own = (d for d in self._items(vertex) if "/" not in d.path[len(self.prefix) :])
        return dict(Counter(decision.action for decision in own))

    def _items(self, vertex: Vertex) -> Iterator[Decision]:
        """Give each item of a map that was spread out before, with what its own last record says."""
        for k in range(self.counts.get(self.prefix + vertex.id, 0)):
            path = f"{self.prefix}{vertex.id}[{k}]"
            record = self.paths.get(path)
            found = self._verdict(vertex, path, record, None if record is None else record.input)
            yield from self._part(vertex, path, found, _Inputs.AS_BEFORE)

    def _items_listed(self, vertex: Vertex, own: Verdict) -> Iterator[Decision]:
        if not (self.asked.items and vertex.is_map):
            return
        for found in self._items(vertex):
            if own.action is Action.REUSE and found.action != Action.REUSE:
                yield replace(found, action=Action.REUSE.value, reason="tolerated", repeats=None)
            elif own.action is Action.CHECK and found.action == Action.REUSE:
                yield replace(found, action=Action.CHECK.value, reason=own.reason)
            else:
                yield found

    def _recompute(self) -> None:
        """A pure node that would be reused runs after all where one that runs needs its value."""
        for vertex in reversed(self.rules):
            own = self.decisions[self._own[vertex.index]]
            if not vertex.pure or own.action != Action.REUSE or own.reason == HANDLED.reason:
                continue
            takers = (c for c in vertex.children if vertex.index in self.rules[c].source_parents)
            below = {self.decisions[self._own[taker]].action for taker in takers}
            found = next((action for action in (Action.RUN, Action.CHECK) if action in below), None)
            if found is not None:
                self.decisions[self._own[vertex.index]] = replace(
                    own, action=found.value, reason="recomputed"
                )


def _is_asked(prior: Record | None) -> bool:
    return prior is not None and prior.kind == RESET and prior.reason == AGAIN.reason


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


def part(source: Source, parent_digest: Callable[[int], bytes | None], inputs: Mapping[str, bytes]) -> bytes:
    """Give what stands in a fingerprint for one thing a node receives."""
    if source.kind == "parent":
        return parent_digest(source.place) or ABSENT
    if source.kind == "input":
        return inputs.get(source.name, ABSENT)
    return codec.digest(codec.canonical(source.value))
