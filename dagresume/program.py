"""A workflow as an engine runs it, and what a person's word to run it again means for its paths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal
from unicodedata import normalize

from dagresume import codec
from dagresume.definition import code_hashes, describe, identity
from dagresume.errors import DefinitionError, OutputNotSerializable, UncertainNode
from dagresume.events import (
    AUTO_RESUME,
    COMPLETED,
    FAILED,
    FROM_START,
    HELD,
    RESET,
    RUN_CLAIMED,
    SKIPPED,
    WAITING,
    WITHDRAWN,
    Record,
    RunStatus,
    Snapshot,
    names,
    node_record,
    run_record,
    segments,
)
from dagresume.planner import Body, Vertex, is_body, resolution, uncertain_paths
from dagresume.policy import Budget, Recovery
from dagresume.reach import Reach
from dagresume.store import Definition
from dagresume.workflow import Graph, nearest

__all__ = [
    "PERSON",
    "Asked",
    "Program",
    "Wait",
    "inputs_digest",
    "inputs_text",
    "is_leaf",
    "permitted",
    "steps_to",
    "to_reset",
]

Wait = Literal["timers", "all", "none"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What somebody asks for when a run begins or goes on.

    `retry`: None, "" (all that failed), a path, or a node's function. `only_changed`: what is below runs
    again only if what it receives differs; `only_failed`: of the map that is named only its failed items;
    `code_changed`: instead of a path, those whose code is another now. `automatic`: nobody asks, so what
    failed for good stays so: its time or a letter has come ("wake"), or its process died and its `recovery`
    says that it goes on ("recover").
    """

    wait: Wait = "timers"
    retry: str | Callable[..., Any] | None = None
    only_changed: bool = False
    only_failed: bool = False
    code_changed: bool = False
    force: bool = False
    budget: Budget | None = None
    automatic: Literal["wake", "recover"] | None = None
    recovery: Recovery | None = None

    def __post_init__(self) -> None:
        if self.wait not in {"timers", "all", "none"}:
            raise ValueError(f"wait={self.wait!r}: 'timers', 'all' or 'none'")
        if self.code_changed and (self.retry or self.only_failed):
            raise DefinitionError("code_changed finds by itself what runs again: leave the node out.")
        if self.only_failed and not self.retry:
            raise DefinitionError("only_failed is about the items of a map: name it with from_node=.")
        if self.only_changed and not (self.retry or self.code_changed):
            raise DefinitionError("only_changed is about what is below a node: name it with from_node=.")

    @property
    def reopens(self) -> bool:
        """Whether it sets paths back that have completed."""
        return bool(self.retry) or self.code_changed


PERSON: Final = Asked()
"""A person goes on with a run, as it is."""


class Program:
    """A workflow as one engine runs it: checked, numbered, described; made once for each state of its
    declaration.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.body = Body(graph)
        self.rules = self.body.rules
        self.by_id = self.body.by_id
        self.definition: Definition = describe(graph)
        self.codes = _compact(code_hashes(graph))
        self.input_types = self.body.input_types

    def is_of(self, graph: str) -> bool:
        """Say whether a stored definition is this one, whatever its functions are called."""
        return graph == self.definition.graph or identity(graph) == self.definition.hash

    def path_of(self, named: str | Callable[..., Any] | None) -> str | None:
        """Give the path a person named, by itself or by a node's function."""
        return self.id_of(named) if callable(named) else named

    def id_of(self, function: Callable[..., Any]) -> str:
        """Give the node whose function this is."""
        found = [node.id for node in self.graph.nodes if node.fn is function]
        if len(found) > 1:
            raise DefinitionError(
                f"{function!r} is the function of {' and '.join(found)}: give the node's id."
            )
        return found[0] if found else str(getattr(function, "__name__", repr(function)))

    def pack_inputs(self, inputs: Mapping[str, Any]) -> dict[str, tuple[str, bytes]]:
        """Give each run input packed as it is, and the digest of its canonical form (dicts sorted)."""
        packed = {}
        for name in sorted(inputs):
            types = self.input_types.get(name, codec.EMPTY)
            try:
                text, canonical = codec.pack(inputs[name], types), codec.canonical(inputs[name], types)
            except OutputNotSerializable as error:
                place = f"input {name!r}{error.place[1:]}"
                raise OutputNotSerializable(None, place, error.type_name, error.reason) from None
            packed[name] = (text, codec.digest(canonical))
        return packed


def _compact(codes: Mapping[str, str]) -> dict[str, str]:
    """Give code hashes with the most common one under "*": graphs of one function many times stay small."""
    if not codes:
        return {}
    common = Counter(codes.values()).most_common(1)[0][0]
    return {"*": common} | {node: code for node, code in codes.items() if code != common}


def inputs_digest(packed: Mapping[str, tuple[str, bytes]]) -> bytes:
    """Give what run inputs are compared by."""
    return codec.digest(
        ",".join(f"{codec.pack(name)}:{digest.hex()}" for name, (_, digest) in packed.items())
    )


def inputs_text(packed: Mapping[str, tuple[str, bytes]]) -> str:
    """Give run inputs as they are stored: one JSON object of what each was packed to."""
    return "{" + ",".join(f"{codec.pack(name)}:{text}" for name, (text, _) in packed.items()) + "}"


# -- a person's word ------------------------------------------------------------------------------------


def taken_up(program: Program, snapshot: Snapshot, run_id: str, asked: Asked, now: int) -> list[Record]:
    """Give the record of a claim with what a person asks for, then a reset of each path that it sets back;
    the resets are applied.

    Raises UncertainNode if a resume meets paths of which nobody knows whether they took effect.
    """
    retry = program.path_of(asked.retry)
    if retry is None and not asked.code_changed and (doubtful := uncertain_paths(program.body, snapshot)):
        raise UncertainNode(run_id, doubtful)
    reset = to_reset(program, snapshot, asked)
    facts: dict[str, Any] = {"by": "resume" if retry is None else "retry"}
    if asked.automatic:
        facts = {"by": asked.automatic, "automatic": True}
    facts |= counted(snapshot, asked)
    if retry:
        facts["from"] = retry
    facts |= {word: True for word in ("only_changed", "only_failed", "code_changed") if getattr(asked, word)}
    if allowed := permitted(program, snapshot, asked, reset):
        facts["permitted"] = allowed
        snapshot.permitted |= frozenset(allowed)
    if program.codes != snapshot.codes:
        facts["codes"] = program.codes
    if fresh := program.graph.secrets - snapshot.secrets:
        facts["secrets"] = sorted(fresh)
    if asked.budget is not None:
        facts["budget"] = {"tokens": asked.budget.tokens, "cost": asked.budget.cost}
        snapshot.budget = facts["budget"]
    records = [run_record(RUN_CLAIMED, now, None, **facts), *audited(snapshot, asked, now)]
    for path in reset:
        why = "asked" if asked.recovery is None else FROM_START
        records.append(node_record(RESET, path, snapshot.paths[path].attempt, now, why))
        snapshot.apply(records[-1])
    return records


def counted(snapshot: Snapshot, asked: Asked) -> dict[str, int]:
    """Give how often somebody went on with a run after it had stopped, and how often in a row by itself: with
    a person's word that is counted from the start.
    """
    facts = {}
    if asked.automatic == "recover":
        facts["auto_resumes"] = snapshot.auto_resumes + 1
    elif not asked.automatic and snapshot.auto_resumes:
        facts["auto_resumes"] = 0
    begins = snapshot.forked and not snapshot.claims
    if asked.automatic != "wake" and snapshot.status in _STOPPED and not begins:
        facts["recoveries"] = snapshot.recoveries + 1
    return facts


_STOPPED: Final = frozenset(
    {RunStatus.RUNNING, RunStatus.INTERRUPTED, RunStatus.FAILED, RunStatus.ROLLING_BACK}
)


def audited(snapshot: Snapshot, asked: Asked, now: int) -> Iterator[Record]:
    """Give the audit record of an automatic resume, if this is one."""
    rule = asked.recovery
    if rule is not None:
        facts = {"attempt": snapshot.auto_resumes + 1, "max_attempts": rule.max_attempts}
        yield run_record(AUTO_RESUME, now, rule.policy, **facts)


def to_reset(program: Program, snapshot: Snapshot, asked: Asked) -> list[str]:
    """Give the paths that a person's word sets back, in the order they are known."""
    if asked.recovery is not None and asked.recovery.policy == "resume_from_start":
        return [path for path, record in snapshot.paths.items() if _starts_over(program, path, record)]
    if asked.code_changed:
        return _covered(snapshot, _reached(program, map(segments, other_code(program, snapshot)), asked))
    retry = program.path_of(asked.retry)
    if retry is None:
        return []
    if not retry:
        doubtful = {
            p
            for p in uncertain_paths(program.body, snapshot, reconcile=False)
            if not _is_known_done(p, snapshot)
        }
        return [
            p for p, r in snapshot.paths.items() if p in doubtful or (r.kind, r.reason) == (WAITING, HELD)
        ]
    target = steps_to(program, snapshot, retry)
    if asked.only_failed:
        return _covered(snapshot, _reached_failed(program, snapshot, retry, target, asked))
    return _covered(snapshot, _reached(program, [target], asked))


def _is_known_done(path: str, snapshot: Snapshot) -> bool:
    """Say whether a person has said that an uncertain path took effect, and what it gave."""
    word = resolution(path, snapshot.paths[path], snapshot)
    return word is not None and word.facts.get("failed") is None


def _starts_over(program: Program, path: str, record: Record) -> bool:
    """Say whether a path is set back when all starts over. What a person said, what came and the end of a
    wait stay as they are.
    """
    vertex = program.body.at(path)
    waits = vertex is not None and vertex.waits and not (vertex.is_map and not path.endswith("]"))
    return record.kind not in {RESET, WITHDRAWN} and not waits


def permitted(program: Program, snapshot: Snapshot, asked: Asked, reset: Iterable[str]) -> list[str]:
    """Give the nodes below what is set back that may run again if their input changes, although they are not
    idempotent: with `only_changed` a person says so.
    """
    if not asked.only_changed:
        return []
    first = set(reset)
    below = set(to_reset(program, snapshot, replace(asked, only_changed=False))) - first
    found = {names(path): path for path in below}
    vertices = ((name, program.body.at(path)) for name, path in found.items())
    return sorted(name for name, vertex in vertices if vertex is not None and not vertex.idempotent)


def steps_to(program: Program, snapshot: Snapshot, path: str) -> list[tuple[str, int | None]]:
    """Give a path a person named in its parts, or a DefinitionError if there is no such path."""
    try:
        steps = segments(normalize("NFC", path))
    except ValueError as error:
        raise DefinitionError(str(error)) from None
    body, here = program.body, ""
    for n, (node, index) in enumerate(steps):
        vertex = body.by_id.get(node)
        if vertex is None:
            raise _no_node(program, body, here, path, node)
        here += node
        if index is not None:
            _check_index(vertex, snapshot, here, path, index)
            here += f"[{index}]"
        if n + 1 < len(steps):
            if vertex.body is None or (index is None and (vertex.is_map or vertex.is_loop)):
                what = f"name one of its parts: {here}[0]/…" if vertex.body else "it holds no other nodes"
                raise DefinitionError(f"there is no path {path!r} in this run: of {here}, {what}.")
            body, here = vertex.body, here + "/"
    return steps


def _no_node(program: Program, body: Body, prefix: str, path: str, node: str) -> DefinitionError:
    near = nearest(node, body.by_id)
    hint = f" Did you mean {prefix + near!r}?" if near else f" It has: {', '.join(list(body.by_id)[:20])}."
    whose = f"workflow {program.graph.workflow!r}" if not prefix else f"{prefix[:-1]}"
    return DefinitionError(f"{path!r}: {whose} has no node {node!r}.{hint}")


def _check_index(vertex: Vertex, snapshot: Snapshot, here: str, path: str, index: int) -> None:
    count = snapshot.counts.get(here, 0) if vertex.is_map else 0
    if index < count or (not vertex.is_map and f"{here}[{index}]" in snapshot.paths):
        return
    if vertex.is_map:
        what = f"has {count} items" if here in snapshot.counts else "has no items"
    else:
        what = "has no such round" if vertex.is_loop else "has no items"
    raise DefinitionError(f"there is no path {path!r} in this run: {here} {what}.")


def _reached(program: Program, targets: Iterable[list[tuple[str, int | None]]], asked: Asked) -> Reach:
    reach = Reach(program.body)
    for steps in targets:
        reach.add(steps)
    if not asked.only_changed:
        reach.spread()
    return reach


def _reached_failed(
    program: Program, snapshot: Snapshot, path: str, steps: list[tuple[str, int | None]], asked: Asked
) -> Reach:
    """Reach the failed items of a map; of an item that is a graph, what did not complete in it."""
    vertex, path = program.body.at(path), "".join(_written(steps))
    if vertex is None or not vertex.is_map or path.endswith("]"):
        raise DefinitionError(f"only_failed: {path} is not a map. Name one, or leave only_failed out.")
    reach = Reach(program.body)
    *around, (node, _) = steps
    failed = [k for k in range(snapshot.counts.get(path, 0)) if _is_failed(snapshot, f"{path}[{k}]")]
    for k in failed:
        if vertex.body is None:
            reach.add([*around, (node, k)])
        else:
            reach.touch([*around, (node, k)])
    for inner in _unfinished_inside(program, snapshot, path, set(failed)) if vertex.body is not None else ():
        reach.add(segments(inner))
    if not asked.only_changed:
        reach.spread()
    return reach


def _unfinished_inside(program: Program, snapshot: Snapshot, path: str, items: set[int]) -> Iterator[str]:
    """Give what did not complete in these items of a map."""
    start = len(path) + 1
    for inner, record in snapshot.paths.items():
        if record.kind in {COMPLETED, SKIPPED} or not inner.startswith(path + "["):
            continue
        end = inner.index("]", start)
        if inner[end + 1 :] and int(inner[start:end]) in items and is_leaf(program, inner):
            yield inner


def is_leaf(program: Program, path: str) -> bool:
    """Say whether a function runs or something is waited for at this path, not only in it."""
    vertex = program.body.at(path)
    return vertex is not None and (vertex.waits or is_body(vertex, path))


def _is_failed(snapshot: Snapshot, path: str) -> bool:
    record = snapshot.paths.get(path)
    return record is not None and record.kind == FAILED


def _written(steps: Iterable[tuple[str, int | None]]) -> Iterator[str]:
    for n, (node, index) in enumerate(steps):
        yield f"{'/' if n else ''}{node}{'' if index is None else f'[{index}]'}"


def other_code(program: Program, snapshot: Snapshot) -> set[str]:
    """Give the paths whose function's code is not what it was when they ran."""
    usual, found = program.codes.get("*"), set()
    same = all(codes == program.codes for _, codes in snapshot.coded)
    for path, record in snapshot.paths.telling() if same else snapshot.paths.items():
        if record.kind in {RESET, WITHDRAWN, SKIPPED}:
            continue
        vertex = program.body.at(path)
        if vertex is None or not is_body(vertex, path):
            continue
        if snapshot.code_of(record) != program.codes.get(names(path), usual):
            found.add(path)
    return found


def _covered(snapshot: Snapshot, reach: Reach) -> list[str]:
    if not reach:
        return []
    return [
        path
        for path, record in snapshot.paths.items()
        if record.kind not in {RESET, WITHDRAWN} and reach.covers(path)
    ]
