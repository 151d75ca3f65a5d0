"""Runs of an older version of a workflow, taken over by a newer one that says how (`Workflow.migrate`).

Every path of a node that is called otherwise is withdrawn and stands under its new name; its output stays
where it is. What completed stays so although its parameters have other names now: such a record has no input,
until the path is looked at for the first time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dagresume import codec
from dagresume.errors import DefinitionError
from dagresume.events import (
    COMPLETED,
    MIGRATED,
    STARTED,
    WITHDRAWN,
    Record,
    Snapshot,
    node_record,
)
from dagresume.feeds import PASSED
from dagresume.graphs import unfolded
from dagresume.planner import uncertain
from dagresume.program import Program
from dagresume.results import Stored
from dagresume.workflow import Migration, nearest

__all__ = ["Move", "migrated", "take_over", "transformed"]

Told = Mapping[str, Any]


class Move(NamedTuple):
    """A record that says where a path stands now. `old`: the output that `transform` makes another one of."""

    record: Record
    old: Stored | None = None
    transform: Callable[[Any], Any] | None = None


def migrated(program: Program, snapshot: Snapshot, graph: str, migration: Migration, now: int) -> list[Move]:
    """Give what happens to the paths of a run whose stored definition is `graph`; changes nothing.

    Raises DefinitionError for a migration that does not fit.
    """
    old = unfolded(graph)
    _check(program, old, migration)
    was = {node["id"]: node for node in old["nodes"]}
    now_told = {node["id"]: node for node in unfolded(program.definition.graph)["nodes"]}
    work = _Work(program, snapshot, migration, old["nodes"], now)
    for id_, node in was.items():
        name = migration.rename.get(id_, id_)
        if id_ in migration.drop or name not in now_told:
            work.gone.add(id_)
            continue
        _check_shape(id_, node, now_told[name])
        if not _same_inputs(node, now_told[name], migration):
            work.other_inputs.add(id_)
    return list(work.moves())


def take_over(snapshot: Snapshot, records: Iterable[Record], rename: Mapping[str, str]) -> None:
    """Apply the records of a migration, and bring letters that nobody has acted on to the new names."""
    for letters in (snapshot.decisions, snapshot.resolutions):
        for path, letter in list(letters.items()):
            node, rest = _first(path)
            prior = snapshot.paths.get(path)
            if node in rename and prior is not None and (letter.seq or 0) > (prior.seq or 0):
                letters[rename[node] + rest] = letter
    for record in records:
        snapshot.apply(record)


def transformed(move: Move, text: str, program: Program) -> Record:
    """Give the record with the output that the migration makes of the old one, packed."""
    record, path = move.record, move.record.path or ""
    vertex = program.body.at(path)
    assert vertex is not None
    assert move.transform is not None
    try:
        new = codec.pack(move.transform(codec.unpack(text, vertex.types)), vertex.types)
    except Exception as error:
        raise DefinitionError(
            f"migration to version {program.graph.version!r}: the transform of node {vertex.id!r} raised"
            f" {type(error).__name__} for {path}: {error}. Nothing was changed."
        ) from error
    facts = {name: fact for name, fact in record.facts.items() if name not in {"seq", "blob"}}
    data = json.dumps(facts) if facts else None
    return record._replace(output=new, digest=codec.digest(new), size=len(new), data=data)


class _Work:
    def __init__(
        self,
        program: Program,
        snapshot: Snapshot,
        migration: Migration,
        was: Sequence[Told],
        now: int,
    ) -> None:
        self.program, self.snapshot, self.migration, self.now = program, snapshot, migration, now
        self._was = was
        self.gone: set[str] = set()
        self.other_inputs: set[str] = set()
        by_id = program.body.by_id
        changed = {by_id[node].index for node in migration.transform}
        self._fed_anew = {v.id for v in program.body.rules if changed.intersection(v.source_parents)}

    def moves(self) -> Iterator[Move]:
        for path, record in self.snapshot.paths.items():
            node, rest = _first(path)
            if record.kind == WITHDRAWN:
                continue
            name = self.migration.rename.get(node, node)
            if node not in self.migration.drop:
                self._check_kept(node, name + rest, path, record)
            if node in self.gone:
                yield Move(self._withdrawn(path, record))
                continue
            if name != node:
                yield Move(self._withdrawn(path, record))
            yield from self._moved(node, name, rest, record)

    def _check_kept(self, node: str, path: str, before: str, record: Record) -> None:
        """Refuse to lose, without a word, what a path did or may have done: it would be done again."""
        inside = "/" in before
        lost = node in self.gone or (inside and self.program.body.at(path) is None)
        if not lost or not _did_something(record, _told_at(self._was, before)):
            return
        state = "has completed" if record.kind == COMPLETED else "may have taken effect"
        cure = (
            f"keep its name, or drop the whole step (drop=[{node!r}]), which then runs from its start."
            if inside and node not in self.gone
            else f"say what it is called now (rename=) or that it is gone (drop=[{node!r}])."
        )
        raise DefinitionError(
            f"migration to version {self.program.graph.version!r}:"
            f" {'path' if inside else 'node'} {before!r} is not in it, and {state}: {cure}"
        )

    def _withdrawn(self, path: str, record: Record) -> Record:
        return node_record(WITHDRAWN, path, record.attempt, self.now, MIGRATED)

    def _moved(self, node: str, name: str, rest: str, record: Record) -> Iterator[Move]:
        path = name + rest
        vertex = self.program.body.by_id[name]
        transform = self.migration.transform.get(name)
        stored = record.kind == COMPLETED and record.reason != PASSED and not vertex.pure
        if transform is not None and stored and vertex.is_map and not rest:
            yield Move(self._spread_out(path, record))  # it is put together again from its items
        elif transform is not None and stored and (rest == "" or (vertex.is_map and "/" not in rest)):
            yield Move(self._kept(path, record, forget=True), Stored.of(record), transform)
        elif node in self.other_inputs or name in self._fed_anew:
            yield Move(self._kept(path, record, forget=True))
        elif name != node:
            yield Move(self._kept(path, record, forget=False))

    def _kept(self, path: str, record: Record, *, forget: bool) -> Record:
        """Give the record under its new name. `forget`: what it received is called otherwise now."""
        if record.kind != COMPLETED and record.path in self.snapshot.counts:
            return self._spread_out(path, record)
        if record.kind != COMPLETED or record.reason == PASSED:
            return record._replace(path=path, at=self.now, seq=None)
        facts = dict(record.facts)
        if not ("count" in facts and record.size is None):  # a map has no output of its own
            facts["seq"], record = Stored.of(record).seq, record._replace(output=None)
        if record.path != path and (code := self.snapshot.code_of(record)) is not None:
            facts["code"] = code
        found = None if forget else record.input
        return record._replace(
            path=path, at=self.now, reason=MIGRATED, input=found, data=json.dumps(facts), seq=None
        )

    def _spread_out(self, path: str, record: Record) -> Record:
        count = self.snapshot.counts.get(record.path or "", 0)
        return node_record(STARTED, path, record.attempt, self.now, MIGRATED, count=count)


def _told_at(nodes: Sequence[Told], path: str) -> Told:
    """Give the stored description of the node that a path belongs to."""
    told: Told = {}
    for part in path.split("/"):
        id_ = part.partition("[")[0]
        told = next((node for node in nodes if node["id"] == id_), {})
        nodes = (told.get("body") or {}).get("nodes", ())
    return told


def _did_something(record: Record, was: Told) -> bool:
    """Say whether a path completed, or nobody knows whether its function took effect."""
    if record.kind == COMPLETED:
        return True
    return was.get("function") is not None and uncertain(record, bool(was.get("idempotent")))


def _first(path: str) -> tuple[str, str]:
    """Split a path behind its first node: `a[1]/b` → a, [1]/b."""
    end = min((place for place in (path.find("["), path.find("/")) if place >= 0), default=len(path))
    return path[:end], path[end:]


def _check(program: Program, old: Told, migration: Migration) -> None:
    was = [node["id"] for node in old["nodes"]]
    now = program.body.by_id
    version, before = program.graph.version, old["version"]
    start = f"migration from version {before!r} to {version!r}:"
    for node in (*migration.rename, *migration.drop):
        if node not in was:
            near = nearest(node, was)
            hint = f" Did you mean {near!r}?" if near else ""
            raise DefinitionError(f"{start} version {before!r} has no node {node!r}.{hint}")
    for node in (*migration.rename.values(), *migration.transform):
        if node not in now:
            near = nearest(node, now)
            hint = f" Did you mean {near!r}?" if near else ""
            raise DefinitionError(f"{start} version {version!r} has no node {node!r}.{hint}")
    ends = Counter(migration.rename.get(node, node) for node in was if node not in migration.drop)
    twice = next((node for node, count in ends.items() if count > 1), None)
    if twice is not None:
        raise DefinitionError(f"{start} two nodes would be called {twice!r}.")


def _check_shape(id_: str, was: Told, now: Told) -> None:
    if (was["type"], "for_each" in was) != (now["type"], "for_each" in now):
        raise DefinitionError(
            f"migration: node {id_!r} was a {_shape(was)} and {now['id']!r} is a {_shape(now)}; what it gave"
            f" cannot stand for that: drop it (drop=[{id_!r}])."
        )


def _shape(node: Told) -> str:
    return f"map ({node['type']})" if "for_each" in node else str(node["type"])


def _same_inputs(was: Told, now: Told, migration: Migration) -> bool:
    """Say whether a node receives the same things under the same names as before."""

    def told(node: Told, rename: Mapping[str, str]) -> list[Any]:
        sources = {name: _renamed(source, rename) for name, source in (node.get("parameters") or {}).items()}
        lists = {name: rename.get(ref, ref) for name, ref in (node.get("for_each") or {}).items()}
        return [
            list(sources.items()),
            list(lists.items()),
            _renamed(node.get("initial") or "", rename),
            node.get("body"),
        ]

    return told(was, migration.rename) == told(now, {})


def _renamed(source: str, rename: Mapping[str, str]) -> str:
    kind, _, name = source.partition(" ")
    return f"node {rename.get(name, name)}" if kind == "node" else source
