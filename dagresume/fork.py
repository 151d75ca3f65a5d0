"""A new run that begins with what another one has completed: which of its records are copied.

Not copied is what a person names, what never completed, what used an input that is another one now, and what
is below these. Of a map over a list that changed, the items are copied: those that are still in it are found
again by what they received.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any, Final, NamedTuple

from dagresume.errors import UncertainNode
from dagresume.events import (
    COMPLETED,
    COPIED,
    FAILED,
    MIGRATED,
    SKIPPED,
    STARTED,
    Record,
    Snapshot,
    enclosing,
    names,
    node_record,
    segments,
)
from dagresume.feeds import PASSED, holds_output
from dagresume.planner import Body, Vertex, resolution, uncertain_paths
from dagresume.program import Program, is_leaf, steps_to
from dagresume.reach import Reach
from dagresume.results import Stored

__all__ = ["Copy", "to_copy"]

_ELSEWHERE: Final = frozenset({"seq", "blob", "signal", "from", "by"})
"""Facts that are about another run's journal."""


class Copy(NamedTuple):
    """A record for the new run, and where in the old one its output lies, if it has one."""

    record: Record
    output: Stored | None = None


def to_copy(
    program: Program, snapshot: Snapshot, run_id: str, start: str | None, inputs: Collection[str], now: int
) -> list[Copy]:
    """Give what a fork of this run takes over. `start`: the path a person named; `inputs`: those that are
    other ones now.

    Raises UncertainNode if, outside what was named, nobody knows whether a path took effect.
    """
    _take_words(snapshot)
    named = Reach(program.body)
    if start:
        named.add(steps_to(program, snapshot, start))
        named.spread()
    doubtful = uncertain_paths(program.body, snapshot, reconcile=False)
    doubtful = [path for path in doubtful if not named.covers(path)]
    if doubtful:
        raise UncertainNode(run_id, doubtful)
    anew = _anew(program, snapshot, inputs)
    kept = {
        path: record
        for path, record in snapshot.paths.items()
        if record.kind in {COMPLETED, SKIPPED} and not named.covers(path) and not anew.covers(path)
    }
    kept |= {p: r for p, r in snapshot.paths.items() if r.kind == FAILED and _is_within(p, kept)}
    maps = {path[: path.rindex("[")] for path in kept if path.endswith("]")} - kept.keys()
    spread = [
        Copy(node_record(STARTED, path, 0, now, COPIED, count=snapshot.counts[path]))
        for path in sorted(maps & snapshot.counts.keys())
    ]
    return spread + [_copied(program, snapshot, record, now) for record in kept.values()]


def _take_words(snapshot: Snapshot) -> None:
    """Let uncertain paths be what a person has said that they did."""
    for path, letter in snapshot.resolutions.items():
        prior = snapshot.paths.get(path)
        if prior is None or prior.kind == COMPLETED or resolution(path, prior, snapshot) is None:
            continue
        said = letter.facts
        if said.get("failed") is not None:
            snapshot.paths[path] = node_record(FAILED, path, prior.attempt, letter.at, "resolved")
            continue
        snapshot.paths[path] = prior._replace(
            kind=COMPLETED, digest=letter.digest, size=letter.size,
            data=json.dumps({"seq": letter.seq}),
        )  # fmt: skip


def _is_within(path: str, kept: Collection[str]) -> bool:
    """Say whether a failure was tolerated: something around it has completed all the same."""
    return any(around in kept for around in enclosing(path))


def _anew(program: Program, snapshot: Snapshot, inputs: Collection[str]) -> Reach:
    """Reach what never completed, what uses these inputs, and what is below."""
    reach = Reach(program.body)
    whole, entered = set[str](), set[str]()
    _users(program.body, inputs, "", whole, entered)
    for path, record in snapshot.paths.items():
        name = names(path)
        if name in whole or (_is_open(record) and is_leaf(program, path) and not _is_over(snapshot, path)):
            reach.add(segments(path))
        elif name in entered and not path.endswith("]"):
            reach.touch(segments(path))
    reach.spread()
    return reach


def _is_open(record: Record) -> bool:
    return record.kind not in {COMPLETED, SKIPPED}


def _is_over(snapshot: Snapshot, path: str) -> bool:
    records = (snapshot.paths.get(around) for around in enclosing(path))
    return any(record is not None and record.kind == COMPLETED for record in records)


def _users(body: Body, inputs: Collection[str], prefix: str, whole: set[str], entered: set[str]) -> None:
    """Collect the nodes that use one of these inputs: those that do with all they are, and those that only
    take its items, or in which only some do.
    """
    for vertex in body.rules:
        name = prefix + vertex.id
        lists = body.origins[vertex.index]
        listed = any(source.kind == "input" and source.name in inputs for source in lists)
        direct = {
            b.parameter for b in vertex.bindings if b.source.kind == "input" and b.source.name in inputs
        }
        if not direct and not listed:
            continue
        if vertex.is_loop or (direct and vertex.body is None):
            whole.add(name)
            continue
        entered.add(name)
        if direct and vertex.body is not None:
            _users(vertex.body, direct, name + "/", whole, entered)


def _copied(program: Program, snapshot: Snapshot, record: Record, now: int) -> Copy:
    path = record.path or ""
    vertex = program.body.at(path)
    facts = dict(_kept_facts(record))
    if record.kind == COMPLETED and vertex is not None and vertex.node.fn is not None:
        code = snapshot.code_of(record)
        if code is not None and code != program.codes.get(names(path), program.codes.get("*")):
            facts["code"] = code
    reason = COPIED if record.kind == COMPLETED and not _says_more(record) else record.reason
    data = json.dumps(facts) if facts else None
    copy = record._replace(at=now, reason=reason, data=data, seq=None)
    elsewhere = not holds_output(record) and _has_output(vertex, record)
    return Copy(copy, Stored.of(record) if elsewhere else None)


def _says_more(record: Record) -> bool:
    """Say whether the reason of a completion has a meaning for what is decided later."""
    return record.reason == PASSED or (record.reason == MIGRATED and record.input is None)


def _kept_facts(record: Record) -> Iterator[tuple[str, Any]]:
    if record.data is not None:
        yield from ((name, fact) for name, fact in record.facts.items() if name not in _ELSEWHERE)


def _has_output(vertex: Vertex | None, record: Record) -> bool:
    if record.kind != COMPLETED or vertex is None or vertex.pure:
        return False
    return not vertex.is_map or (record.path or "").endswith("]")
