"""What a rollback undoes, what it cannot undo, and in which order. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final
from unicodedata import normalize

from dagresume import events as ev
from dagresume.errors import DefinitionError
from dagresume.events import Record, Snapshot
from dagresume.feeds import PASSED
from dagresume.planner import Body, Vertex, is_body, resolution, uncertain, uncertain_paths
from dagresume.results import Stored
from dagresume.workflow import nearest

__all__ = ["UndoPlan", "plan_undo"]

_LAST: Final = 1 << 63  # after every record


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
