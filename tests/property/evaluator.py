"""Works out what a workflow must give, straight from its nodes: no engine, no store, nothing of the package.

A node is pure data; what its function gives is `compute`, a function of what it receives and of one number
that it may read from the outside world. `evaluate` applies the rules of the definition once, in order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

FAILURE: Final = "<failure>"
"""Stands in a list for an item whose failure was tolerated."""
INPUT: Final = "xs"
"""The one input of the run: a list."""

Trigger = Literal["none_failed", "all_success", "any_success", "all_done", "any_failed"]


@dataclass
class Node:
    """One node. `each`: what a map runs over, item by item; the numbers are explained where they are used."""

    id: str
    kind: Literal["plain", "list", "map"] = "plain"
    takes: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    each: list[str] = field(default_factory=list)
    trigger: Trigger = "none_failed"
    idempotent: bool = True
    pure: bool = False
    reads: bool = False
    coarse: bool = False
    size: int = 0
    fails: bool = False
    fails_on: int | None = None
    none_on: int | None = None
    skips_on: int | None = None
    tolerate: int | None = None
    concurrency: int | None = None
    attempts: int = 1
    turns: int = 0

    @property
    def parents(self) -> list[str]:
        """Give every parent once."""
        return list(dict.fromkeys([*self.after, *(each for each in self.each if each != INPUT), *self.takes]))


class Fails(Exception):
    """A function that fails for what it was given, every time."""


class End(NamedTuple):
    """How a node ends: completed, skipped, failed or upstream_failed; and its value."""

    how: str
    value: Any = None


def number(*what: Any) -> int:
    """Give a number that any other content changes."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:6])


def wanted(node: Node, given: Sequence[Any]) -> bool:
    """Say what the node's condition says."""
    return node.skips_on is None or number("when", list(given)) % 3 != node.skips_on


def compute(node: Node, given: Sequence[Any], world: int | None) -> Any:
    """Give what the node's function gives."""
    found = number(node.id, list(given))
    if node.fails or (node.fails_on is not None and found % 4 == node.fails_on):
        raise Fails
    if node.kind == "list":
        base = world if world is not None else found % 6 if given else node.size
        return [f"v{(base * 3 + k) % 5}" for k in range(base % 4)]
    if node.none_on is not None and found % 4 == node.none_on:
        return None
    return f"{node.id}:{found % 2 if node.coarse else found}:{world}"


def joined(trigger: Trigger, ends: Sequence[str]) -> str:
    """Give runs, skipped or upstream_failed."""
    failed = sum(how in {"failed", "upstream_failed"} for how in ends)
    completed, skipped = ends.count("completed"), ends.count("skipped")
    answers = {
        "all_done": "runs",
        "any_failed": "runs" if failed else "skipped",
        "any_success": "runs" if completed else "upstream_failed" if failed else "skipped",
        "all_success": "upstream_failed" if failed else "skipped" if skipped else "runs",
        "none_failed": "upstream_failed" if failed else "runs" if completed else "skipped",
    }
    return answers[trigger] if ends else "runs"


def evaluate(nodes: Sequence[Node], xs: list[Any], reads: Mapping[str, int]) -> dict[str, End]:
    """Give how every node ends. `reads`: the number each node that looks at the world found there."""
    ends: dict[str, End] = {}
    by_id = {node.id: node for node in nodes}
    for node in nodes:
        verdict = joined(node.trigger, [ends[parent].how for parent in node.parents])
        if verdict != "runs":
            ends[node.id] = End(verdict)
            continue
        taken = [ends[name].value for name in node.takes]
        if node.kind == "map":
            ends[node.id] = _map(node, by_id, ends, xs, taken)
        else:
            ends[node.id] = _one(node, taken, reads.get(node.id, 0) if node.reads else None)
    return ends


def _one(node: Node, given: list[Any], world: int | None) -> End:
    if not wanted(node, given):
        return End("skipped")
    try:
        return End("completed", compute(node, given, world))
    except Fails:
        return End("failed")


def _map(
    node: Node, by_id: Mapping[str, Node], ends: Mapping[str, End], xs: list[Any], taken: list[Any]
) -> End:
    lists = [xs if name == INPUT else ends[name].value or [] for name in node.each]
    if len({len(each) for each in lists}) > 1:
        return End("failed")
    chained = [name != INPUT and by_id[name].kind == "map" for name in node.each]
    out: list[Any] = []
    failed = 0
    for items in zip(*lists, strict=True):
        above = [item for item, is_map in zip(items, chained, strict=True) if is_map]
        passed = [item for item in above if item is None or item == FAILURE]
        if passed:
            out.append(passed[0])
            continue
        end = _one(node, [*items, *taken], None)
        failed += end.how == "failed"
        out.append(FAILURE if end.how == "failed" else end.value)
    return End("failed") if failed > (node.tolerate or 0) else End("completed", out)


def status(nodes: Sequence[Node], ends: Mapping[str, End]) -> str:
    """Give how the run ends: failed if a failure is left that nothing below it dealt with."""
    dealt = {
        parent
        for node in nodes
        if node.trigger == "any_failed" and ends[node.id].how == "completed"
        for parent in node.parents
    }
    left = [name for name, end in ends.items() if end.how == "failed" and name not in dealt]
    return "failed" if left else "completed"
