"""A workflow as an engine runs it, and what a person's word to run it again means for its paths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from unicodedata import normalize

from dagresume import codec
from dagresume.definition import code_hashes, describe
from dagresume.errors import DefinitionError, OutputNotSerializable
from dagresume.events import HELD, RESET, WAITING, Snapshot, segments
from dagresume.planner import Body, Vertex, uncertain_paths
from dagresume.policy import Budget
from dagresume.store import Definition
from dagresume.workflow import Graph, nearest

__all__ = ["Asked", "Program", "Wait", "inputs_digest", "inputs_text", "to_reset"]

Wait = Literal["timers", "all", "none"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What somebody asks for when a run begins or goes on. `retry`: None, "" (all that failed) or a path."""

    wait: Wait = "timers"
    retry: str | Callable[..., Any] | None = None
    only_changed: bool = False
    only_failed: bool = False
    code_changed: bool = False
    force: bool = False
    budget: Budget | None = None

    def __post_init__(self) -> None:
        if self.wait not in {"timers", "all", "none"}:
            raise ValueError(f"wait={self.wait!r}: 'timers', 'all' or 'none'")


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


def to_reset(program: Program, snapshot: Snapshot, retry: str | None) -> list[str]:
    """Give the paths that a person's word sets back, in the order they are known."""
    if retry is None:
        return []
    if not retry:
        doubtful = set(uncertain_paths(program.body, snapshot, reconcile=False))
        return [
            p for p, r in snapshot.paths.items() if p in doubtful or (r.kind, r.reason) == (WAITING, HELD)
        ]
    target, index = _target(program, snapshot, retry)
    whole, some = _below(program, program.by_id[target], index)
    return [
        path for path, record in snapshot.paths.items()
        if record.kind != RESET and _is_below(path, whole, some, index)
    ]  # fmt: skip


def _target(program: Program, snapshot: Snapshot, path: str) -> tuple[str, int | None]:
    """Give the node and item a person named, or a DefinitionError if there is no such path."""
    try:
        (target, index), *inner = segments(normalize("NFC", path))
    except ValueError as error:
        raise DefinitionError(str(error)) from None
    if target not in program.by_id:
        near = nearest(target, program.by_id)
        hint = f" Did you mean {near!r}?" if near else ""
        raise DefinitionError(f"{path!r}: workflow {program.graph.workflow!r} has no node {target!r}.{hint}")
    if inner or (index is not None and index >= snapshot.counts.get(target, 0)):
        count = snapshot.counts.get(target)
        what = f"has {count} items" if count is not None else "has no items"
        raise DefinitionError(f"there is no path {path!r} in this run: {target} {what}.")
    return target, index


def _below(program: Program, start: Vertex, index: int | None) -> tuple[set[str], set[str]]:
    """Give the nodes that run again whole, and the maps of which only the item of that index does."""
    whole, some = set[str](), set[str]()
    queue = [(start, index is not None and start.is_map)]
    for vertex, one in queue:
        if vertex.id in whole or (one and vertex.id in some):
            continue
        (some if one else whole).add(vertex.id)
        for child in vertex.children:
            below = program.rules[child]
            queue.append((below, one and vertex.index in below.chained))
    return whole, some - whole


def _is_below(path: str, whole: set[str], some: set[str], index: int | None) -> bool:
    node, at = segments(path)[0]
    return node in whole or (node in some and at in {None, index})
