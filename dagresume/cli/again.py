"""What a retry would run again: for the plan it shows first, and for the question it asks."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagresume.cli.command import Problem
from dagresume.events import NodeStatus, segments
from dagresume.planner import Body, Decision, Vertex

if TYPE_CHECKING:
    from dagresume.views import NodeInfo, RunInfo
    from dagresume.workflow import Workflow

__all__ = ["Again", "again"]

_CUT_OFF = {NodeStatus.INTERRUPTED, NodeStatus.CANCELLED, NodeStatus.RUNNING}


@dataclass(frozen=True, slots=True)
class Again:
    """The paths that are set back, and of these the ones whose effects may happen a second time."""

    paths: frozenset[str]
    completed: tuple[str, ...] = ()
    uncertain: tuple[str, ...] = ()

    def over(self, decisions: Sequence[Decision]) -> list[Decision]:
        """Give the plan of a resume with these paths set back."""
        found = [self._asked(d) if d.path in self.paths else d for d in decisions]
        counts: dict[str, Counter[str]] = {}
        for decision in found:
            if decision.path.endswith("]"):
                of = decision.path[: decision.path.rindex("[")]
                counts.setdefault(of, Counter())[decision.action] += 1
        return [self._counted(d, counts[d.path]) if d.items and d.path in counts else d for d in found]

    @staticmethod
    def _asked(decision: Decision) -> Decision:
        return replace(decision, action="run", reason="asked")

    def _counted(self, decision: Decision, counts: Mapping[str, int]) -> Decision:
        return replace(decision, items=dict(counts))


def again(info: RunInfo, wf: Workflow, decisions: Iterable[Decision], start: str | None) -> Again:
    """Say what a retry of this run sets back; `start` None: what is uncertain or held."""
    rules = Body(wf.compiled).rules
    by_id = {vertex.id: vertex for vertex in rules}
    if start is None:
        asked = [d.path for d in decisions if d.reason in {"uncertain", "reconcile"} or d.action == "hold"]
    else:
        asked = list(_below(info, rules, by_id, start))
    acted = [p for p in asked if (v := _vertex(by_id, p)) is not None and not (v.is_map and p == v.id)]
    risky = [p for p in acted if not by_id[segments(p)[0][0]].idempotent and p in info.nodes]
    return Again(
        frozenset(asked),
        tuple(p for p in risky if _completed(info.nodes[p])),
        tuple(p for p in risky if _uncertain(info.nodes[p])),
    )


def _completed(node: NodeInfo) -> bool:
    return node.status is NodeStatus.COMPLETED or node.reason == "held"


def _uncertain(node: NodeInfo) -> bool:
    return node.status in _CUT_OFF or node.reason == "not_serialisable"


def _vertex(by_id: Mapping[str, Vertex], path: str) -> Vertex | None:
    return by_id.get(segments(path)[0][0])


def _below(info: RunInfo, rules: Sequence[Vertex], by_id: Mapping[str, Vertex], start: str) -> Iterable[str]:
    """Give the recorded paths at or below a path; of a chained map only the item of its index."""
    node, index = _start(info, by_id, start)
    first = by_id[node]
    one = index is not None and first.is_map
    queue = [(first, one)]
    seen: dict[str, bool] = {first.id: one}  # id → only the item
    for vertex, only in queue:
        for child in vertex.children:
            below = rules[child]
            single = only and vertex.index in below.chained
            if below.id not in seen or (seen[below.id] and not single):
                seen[below.id] = single
                queue.append((below, single))
    for path in info.nodes:
        of, at = segments(path)[0]
        if of in seen and (not seen[of] or at in {None, index}):
            yield path


def _start(info: RunInfo, by_id: Mapping[str, Vertex], start: str) -> tuple[str, int | None]:
    try:
        node, index = segments(start)[0]
    except ValueError as error:
        raise Problem(f"--from: {error}") from None
    if start not in info.nodes or node not in by_id:
        near = difflib.get_close_matches(start, list(info.nodes), n=1)
        hint = f" Did you mean {near[0]}?" if near else f" Its nodes: {', '.join(by_id)}."
        raise Problem(f"--from {start!r}: run {info.run_id} has no such path.{hint}")
    return node, index
