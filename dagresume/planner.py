"""What will be done with each path, and why. Pure: the resume and the plan ask the same `decide`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
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
    Records,
    Snapshot,
    enclosing,
    has_output,
    segments,
)
from dagresume.events import HELD as HELD_REASON
from dagresume.policy import Retry
from dagresume.workflow import WAITS, Binding, Graph, Loop, Node, Source

__all__ = [
    "Action",
    "Body",
    "Decision",
    "Verdict",
    "Vertex",
    "decide",
    "matches",
    "reuses",
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


_WORD: Final = {action: action.value for action in Action}


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
    `only_parents`: it receives the outputs of these, in order, and nothing else; the last of them by name, as
    these `keywords`. `alike` is the same number for all vertices that receive the very same and have one
    fingerprint; None if there is no other.

    `is_plain`: a function that runs once, whatever it receives; `is_usual`: and not because something failed.
    `pure`: its output is passed on and not stored. `is_loop`: it runs in rounds. `waits`: for time, a person
    or a signal, and runs nothing. `direct`: an async function that is awaited on the engine's loop, without a
    time limit.
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
    keywords: tuple[str, ...]
    pure: bool
    is_loop: bool
    waits: bool
    direct: bool
    is_plain: bool = False
    is_usual: bool = False
    chained: frozenset[int] = frozenset()
    junction: int = 0
    alike: int | None = None

    @property
    def runs_function(self) -> bool:
        """Whether its own path, and not only one inside it, is that of a function."""
        return not (self.is_map or self.is_loop or self.node.fn is None)

    @property
    def reconcilable(self) -> bool:
        """Whether it can tell by itself what became of an attempt that nobody knows about."""
        return self.node.reconcile is not None

    @property
    def streams(self) -> bool:
        """Whether its items may begin before the maps above have ended."""
        return bool(self.chained) and self.node.trigger in {"none_failed", "all_success"}

    def fingerprint(self, parts: Iterable[bytes]) -> bytes:
        """Give the digest (16 bytes) of everything it receives, in the order of its parameters."""
        state = self.salt.copy()
        state.update(b"".join(parts))
        return state.digest()[:16]  # type: ignore[no-any-return]


@dataclass(slots=True, eq=False)
class Junction:
    """Vertices that have the same parents: their turn comes at once, so they are counted down together.

    `chained` are those that may begin before, see `Vertex.streams`.
    """

    index: int
    parents: tuple[int, ...]
    vertices: list[Vertex] = field(default_factory=list)
    chained: list[Vertex] = field(default_factory=list)


class Body:
    """A graph as it is run: of a workflow, or of one inside a node. Paths inside a node start with its own.

    `origins` are the lists that maps take one by one, `sinks` the vertices that nothing comes after. `below`
    holds the junctions below each vertex: a layer that is joined to the whole one above it is a single one.
    `types` are the classes in outputs by node id, `ids` the nodes by the identity of their function.

    `limited` are the vertices that name a limit, here and in all bodies inside, `executors` what they name of
    those.
    """

    def __init__(self, graph: Graph, enclosing: bool = False) -> None:
        idempotent = enclosing if graph.idempotent is None else graph.idempotent
        self.workflow = graph.workflow
        self.rules: tuple[Vertex, ...] = _vertices(graph, idempotent)
        self.by_id = {vertex.id: vertex for vertex in self.rules}
        self.origins: Sequence[Sequence[Source]] = graph.sources
        self.input_types = {name: codec.types_of(*hints) for name, hints in graph.inputs.items()}
        self.output = graph.output
        self.types = {vertex.id: vertex.types for vertex in self.rules}
        self.ids = {id(vertex.node.fn): vertex.id for vertex in self.rules if vertex.node.fn is not None}
        self.sinks = tuple(vertex.index for vertex in self.rules if not vertex.children)
        self.junctions = _junctions(self.rules)
        self.below: Sequence[Sequence[Junction]] = _below(self.rules, self.junctions)
        self.degrees = [len(junction.parents) for junction in self.junctions]
        everything = tuple(self.every())
        self.limited = [vertex for vertex in everything if vertex.node.limit is not None]
        self.executors = {vertex.node.executor for vertex in everything if vertex.node.executor is not None}
        _mark_alike(self.rules)

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


def _junctions(rules: Sequence[Vertex]) -> list[Junction]:
    found: dict[tuple[int, ...], Junction] = {}
    for vertex in rules:
        junction = found.get(vertex.parents)
        if junction is None:
            junction = found[vertex.parents] = Junction(len(found), vertex.parents)
        vertex.junction = junction.index
        junction.vertices.append(vertex)
        if vertex.chained:
            junction.chained.append(vertex)
    return list(found.values())


def _below(rules: Sequence[Vertex], junctions: Sequence[Junction]) -> list[list[Junction]]:
    below: list[list[Junction]] = [[] for _ in rules]
    for junction in junctions:
        for parent in junction.parents:
            below[parent].append(junction)
    return below


def _mark_alike(rules: Sequence[Vertex]) -> None:
    """Number the vertices that receive the outputs of the same parents, as the same parameters."""
    found: dict[tuple[Any, tuple[int, ...]], list[Vertex]] = {}
    for vertex in rules:
        if vertex.only_parents is not None and vertex.is_plain:
            found.setdefault((vertex.salt, vertex.only_parents), []).append(vertex)
    for number, vertices in enumerate(found.values()):
        if len(vertices) > 1:
            for vertex in vertices:
                vertex.alike = number


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
    plain = node.what is None and node.when is None and not node.for_each
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
        keywords=tuple(binding.parameter for binding in graph.bindings[i] if binding.keyword),
        pure=not node.checkpoint,
        is_loop=isinstance(node.what, Loop),
        waits=isinstance(node.what, WAITS),
        direct=node.fn is not None
        and node.signature.asynchronous
        and node.executor in {None, "loop"}
        and node.timeout is None,
        is_plain=plain,
        is_usual=plain and node.trigger != "any_failed",
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
    if any(binding.source.kind != "parent" for binding in graph.bindings[i]):
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
    return has_output(prior) and (prior.input == fingerprint or _is_migrated(prior))


def _is_migrated(prior: Record) -> bool:
    return prior.input is None and prior.reason == MIGRATED


def decide(
    prior: Record | None, fingerprint: bytes | None, *, idempotent: bool, reconcilable: bool = False
) -> Verdict:
    """Give what is to be done with a path whose parents are settled, from its last record and what it would
    receive.
    """
    if prior is None:
        return NEW
    kind = prior.kind
    if has_output(prior):
        if prior.input == fingerprint or _is_migrated(prior):
            return UNCHANGED
        return INPUT_CHANGED if idempotent else HELD
    if uncertain(prior, idempotent):
        return RECONCILE if reconcilable else UNCERTAIN
    return _WHEN_NOT_COMPLETED.get(kind, NEW)


def reuses(vertex: Vertex, prior: Record, fingerprint: bytes) -> bool:
    """Say whether a vertex as a whole, whatever is inside it, is left as it is."""
    within = vertex.is_map or vertex.is_loop or vertex.body is not None or vertex.waits
    return decide(prior, fingerprint, idempotent=vertex.idempotent or within).action is Action.REUSE


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
    """Say whether a node's failure was dealt with: a child that runs on failures has completed, or is to do
    so once more.
    """
    return any(
        rules[child].node.trigger == "any_failed"
        and (record := state.get(prefix + rules[child].id)) is not None
        and (record.kind == COMPLETED or (record.kind, record.reason) == (RESET, AGAIN.reason))
        for child in vertex.children
    )


def uncertain_paths(body: Body, snapshot: Snapshot, *, reconcile: bool = True) -> list[str]:
    """Give the paths that stop a resume, in the order they began.

    Left out are those that can reconcile, and those of which a person has said what they did.
    """
    found = []
    for path, record in snapshot.unfinished():
        if record.attempt is None:
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
        if outer is None or outer.kind != FAILED:
            continue  # a handler of an earlier failure has not dealt with this
        if inside is not None and handled(vertex, inside.rules, snapshot.paths, prefix):
            return True
    return False


# -- the plan -------------------------------------------------------------------------------------------

NOTHING: Final[Mapping[str, Any]] = {}
"""Used up nothing; has no items. One for all decisions, so nobody may change it."""


class Decision(NamedTuple):
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
    usage: Mapping[str, float] = NOTHING
    items: Mapping[str, int] = NOTHING
    repeats: str | None = None
    code_changed: bool = False


_new_decision: Final[Callable[[tuple[Any, ...]], Decision]] = partial(tuple.__new__, Decision)
"""Makes a decision of all its fields in order, in a third of the time: a map may have a million items."""


def word_about(path: str, prior: Record | None, snapshot: Snapshot, *, idempotent: bool) -> Verdict | None:
    """Give what a person has said about an uncertain or a held path; None if nobody has."""
    if prior is None:
        return None
    if uncertain(prior, idempotent) and resolution(path, prior, snapshot) is not None:
        return Verdict(Action.REUSE, "resolved")
    if (prior.kind, prior.reason) == (WAITING, HELD_REASON):
        word = snapshot.decisions.get(path)
        if word is not None and (word.seq or 0) > (prior.seq or 0):
            yes = word.facts["approved"]
            return Verdict(Action.RUN, "approved") if yes else Verdict(Action.REUSE, "kept")
    return None


def part(source: Source, parent_digest: Callable[[int], bytes | None], inputs: Mapping[str, bytes]) -> bytes:
    """Give what stands in a fingerprint for one thing a node receives."""
    if source.kind == "parent":
        return parent_digest(source.place) or ABSENT
    if source.kind == "input":
        return inputs.get(source.name, ABSENT)
    return codec.digest(codec.canonical(source.value))


def decision_of(
    path: str, verdict: Verdict, prior: Record | None, items: Mapping[str, int] | None = None
) -> Decision:
    """Give the decision about a path, with what its last completed attempt took and used up."""
    seconds, usage = None, NOTHING
    if prior is not None and prior.kind == COMPLETED:
        seconds = None if prior.took is None else prior.took / 1e6
        usage = NOTHING if prior.data is None else prior.facts.get("usage", NOTHING)
    return Decision(path, _WORD[verdict.action], verdict.reason, seconds, usage, items or NOTHING)


def decisions_to_reuse(paths: Sequence[str], records: Records) -> Iterator[Decision]:
    """Give the decisions about completed paths whose last records without data these are."""
    action, reason = _WORD[UNCHANGED.action], UNCHANGED.reason
    for path, took in zip(paths, records.column("took"), strict=True):
        seconds = None if took is None else took / 1e6
        yield _new_decision((path, action, reason, seconds, NOTHING, NOTHING, None, False))
