"""Runs as people see them: from what is stored of them, without their code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from dagresume.clock import to_datetime
from dagresume.errors import InputError
from dagresume.events import (
    FAILED,
    UNDO_FAILED,
    UNDO_FAILED_REASON,
    WAITING,
    NodeStatus,
    Record,
    RunStatus,
    Snapshot,
    enclosing,
    projection,
    segments,
    status_of,
)
from dagresume.graphs import unfolded
from dagresume.observe import failure_of
from dagresume.policy import Join, NodeFailure, join
from dagresume.store import Holder, Loaded, RunRow

__all__ = ["NodeInfo", "RunInfo", "past_info", "run_info", "runs_function", "stored_as", "wanted_statuses"]


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """The state of one path: `status`, why (`reason`), how often it was tried, when that changed, how long it
    took; `waits_for`: the question of an approval, the name of an event.
    """

    path: str
    status: NodeStatus
    reason: str | None = None
    attempt: int = 0
    at: datetime | None = None
    seconds: float | None = None
    failure: NodeFailure | None = None
    waits_for: str | None = None


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run as the store has it. `nodes` (path → NodeInfo) and `forked_from` (run id) only from `Engine.get`.
    Times are aware UTC datetimes.
    """

    run_id: str
    workflow: str
    version: str
    key: str | None
    status: RunStatus
    reason: str | None
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None
    owner: str | None
    source: str
    forked_from: str | None = None
    nodes: Mapping[str, NodeInfo] = field(default_factory=dict, repr=False)
    failures: Mapping[str, NodeFailure] = field(default_factory=dict, repr=False)


def past_info(loaded: Loaded, at: int) -> RunInfo:
    """Give a run as it was after the event of this seq: the fold of its records up to there."""
    records = [record for record in loaded.records if (record.seq or 0) <= at]
    if not records:
        first = loaded.records[0].seq if loaded.records else None
        raise InputError(f"run {loaded.row.run_id} did not exist at {at}: its first event is {first}.")
    row = loaded.row._replace(reason=None, finished_at=None, updated_at=records[-1].at)
    columns: dict[str, Any] = {}
    for record in records:
        columns |= projection(record) or {} if record.path is None else {}
    row = row._replace(**{name: value for name, value in columns.items() if name in _OF_THE_TIME})
    return run_info(row, None, loaded._replace(row=row, records=records), past=True)


_OF_THE_TIME = frozenset({"status", "reason", "finished_at"})


def run_info(
    row: RunRow,
    holder: Holder | None,
    loaded: Loaded | None = None,
    *,
    past: bool = False,
    brief: bool = False,
) -> RunInfo:
    """Give a run as people see it. `past`: as it was once, whoever owned it then. `brief`: items that have
    completed are left out.
    """
    status, reason = RunStatus(row.status), row.reason
    if status is RunStatus.RUNNING and not past and (holder is None or not holder.alive):
        status, reason = RunStatus.INTERRUPTED, "owner_died"
    elif status is RunStatus.ROLLING_BACK and holder is not None and not holder.alive:
        reason = "owner_died"
    nodes = {} if loaded is None else _nodes(loaded, live=status is RunStatus.RUNNING, brief=brief)
    failures = {
        p: n.failure for p, n in nodes.items() if n.failure is not None and n.status is NodeStatus.FAILED
    }
    undos = {p: n.failure for p, n in nodes.items() if n.failure and n.reason == UNDO_FAILED_REASON}
    nodes = _with_waiting(nodes, live=status is RunStatus.RUNNING)
    return RunInfo(
        row.run_id, row.workflow, row.version, row.key, status, reason,
        to_datetime(row.created_at), to_datetime(row.updated_at),
        None if row.finished_at is None else to_datetime(row.finished_at),
        str(holder) if holder is not None and holder.alive else None, row.source, _parent(loaded), nodes,
        _only_unhandled(failures, nodes, loaded) | undos,
    )  # fmt: skip


def _parent(loaded: Loaded | None) -> str | None:
    """Give the run that this one was forked from."""
    if loaded is None or loaded.row.forked_from is None or not loaded.records:
        return None
    found: str | None = loaded.records[0].facts.get("forked_from")
    return found


def _nodes(loaded: Loaded, *, live: bool, brief: bool) -> dict[str, NodeInfo]:
    """Give the state of every path that has one, and of the nodes that have none yet; definition order, items
    after.
    """
    snapshot = Snapshot(loaded.records)
    graph = unfolded(loaded.graph)
    of: dict[str, list[str]] = {}
    for path in _worth_telling(snapshot) if brief else snapshot.paths:
        of.setdefault(segments(path)[0][0], []).append(path)
    nodes: dict[str, NodeInfo] = {}
    for node in graph["nodes"]:
        id_ = node["id"]
        segments(id_)  # what is no path is no row of ours
        paths = sorted(of.pop(id_, []), key=segments_key)
        if id_ not in paths:
            nodes[id_] = NodeInfo(id_, _unborn(node, nodes))
        for path in paths:
            found = _node(snapshot.paths[path], live=live)
            if path == id_ and found.status is NodeStatus.PENDING:
                found = replace(found, status=_unborn(node, nodes))
            undo = snapshot.undone.get(path)
            if undo is not None and found.status is not NodeStatus.COMPENSATED:
                found = _half_undone(found, undo)
            nodes[path] = found
    return nodes


def _worth_telling(snapshot: Snapshot) -> list[str]:
    """Give the paths without the items that have completed, but with those around what has not."""
    kept = {path for path in snapshot.paths if not path.endswith("]")}
    for path, _ in snapshot.unfinished():
        kept.add(path)
        kept.update(around for around in enclosing(path) if around in snapshot.paths)
    kept.update(path for path in snapshot.undone if path in snapshot.paths)
    return list(kept)


def _half_undone(node: NodeInfo, undo: Record) -> NodeInfo:
    """A path whose undo was begun, and failed or did not end yet, stands as before."""
    if undo.kind == UNDO_FAILED and undo.reason == UNDO_FAILED_REASON:
        return replace(node, reason=undo.reason, failure=failure_of(undo))
    return replace(node, reason="undo_started")


def _with_waiting(nodes: dict[str, NodeInfo], *, live: bool) -> dict[str, NodeInfo]:
    """A map, loop or sub-workflow in which something waits, and that nobody runs now, waits itself."""
    if live:
        return nodes
    for path in [p for p, info in nodes.items() if info.status is NodeStatus.WAITING]:
        for around in enclosing(path):
            outer = nodes.get(around)
            if outer is not None and outer.status is NodeStatus.INTERRUPTED and outer.reason is None:
                nodes[around] = replace(outer, status=NodeStatus.WAITING, reason=nodes[path].reason)
    return nodes


def _unborn(node: Mapping[str, Any], nodes: Mapping[str, NodeInfo]) -> NodeStatus:
    """Give the status of a node that nothing has happened to: it waits, or what it needs has failed."""
    statuses = [nodes[parent].status for parent in node["parents"] if parent in nodes]
    completed, skipped = statuses.count(NodeStatus.COMPLETED), statuses.count(NodeStatus.SKIPPED)
    failed = statuses.count(NodeStatus.FAILED) + statuses.count(NodeStatus.UPSTREAM_FAILED)
    if not failed or completed + skipped + failed < len(node["parents"]):
        return NodeStatus.PENDING
    blocked = join(node.get("trigger", "none_failed"), completed, skipped, failed) is Join.BLOCK
    return NodeStatus.UPSTREAM_FAILED if blocked else NodeStatus.PENDING


def segments_key(path: str) -> tuple[tuple[str, int], ...]:
    return tuple((node, -1 if index is None else index) for node, index in segments(path))


def _node(record: Record, *, live: bool) -> NodeInfo:
    status = status_of(record)
    if not live and status is NodeStatus.RUNNING:
        status = NodeStatus.INTERRUPTED
    failed = record.kind == FAILED
    return NodeInfo(
        record.path or "",
        status,
        record.reason,
        record.attempt or 0,
        to_datetime(record.at),
        None if record.took is None else record.took / 1e6,
        failure_of(record) if failed else None,
        _waits_for(record),
    )


def _waits_for(record: Record) -> str | None:
    if record.kind != WAITING:
        return None
    facts = record.facts
    return facts.get("prompt") or facts.get("event")


def _only_unhandled(
    failures: Mapping[str, NodeFailure], nodes: Mapping[str, NodeInfo], loaded: Loaded | None
) -> dict[str, NodeFailure]:
    """Leave out what only passes on a failure inside it, what was tolerated, and what a child that runs on
    failures dealt with.
    """
    if loaded is None or not failures:
        return {}
    graph = unfolded(loaded.graph)
    return {
        path: failure
        for path, failure in failures.items()
        if failure.reason not in _PASSED_ON and not _is_dealt_with(graph, path, nodes)
    }


_PASSED_ON = frozenset({"items_failed", "inner_failed", "round_failed"})


def _is_dealt_with(graph: Mapping[str, Any], path: str, nodes: Mapping[str, NodeInfo]) -> bool:
    """Say whether something around a path has completed all the same, or a child has dealt with the failure
    of it or of what is around it.
    """
    prefix = ""
    for node, index in segments(path):
        here = prefix + node
        item = here if index is None else f"{here}[{index}]"
        if any(_completed(nodes, around) for around in (here, item) if around != path):
            return True
        for child in graph["nodes"]:
            handles = child.get("trigger") == "any_failed" and node in child["parents"]
            if handles and _completed(nodes, prefix + child["id"]):
                return True
        prefix = item + "/"
        graph = node_at(graph, node).get("body", {"nodes": []})
    return False


def _completed(nodes: Mapping[str, NodeInfo], path: str) -> bool:
    return path in nodes and nodes[path].status is NodeStatus.COMPLETED


def node_at(graph: Mapping[str, Any], node: str) -> Mapping[str, Any]:
    """Give a node of a stored graph; an empty one if it is not in it."""
    return next((found for found in graph["nodes"] if found["id"] == node), {})


def runs_function(graph: Mapping[str, Any], path: str) -> bool:
    """Say whether a function runs at this path, by the stored graph: not at a map or loop as a whole, a
    sub-workflow or a wait.
    """
    told: Mapping[str, Any] = {"body": graph}
    for node, _ in segments(path):
        told = node_at(told.get("body", {"nodes": []}), node)
    if "function" not in told:
        return False
    return path.endswith("]") or ("for_each" not in told and told["type"] != "loop")


def wanted_statuses(status: str | Sequence[str] | None) -> frozenset[RunStatus] | None:
    if status is None:
        return None
    words = (status,) if isinstance(status, str) else status
    try:
        return frozenset(map(RunStatus, words))
    except ValueError:
        known = ", ".join(RunStatus)
        raise ValueError(f"status={status!r}: a run is one of {known}") from None


def stored_as(wanted: frozenset[RunStatus] | None) -> list[str] | None:
    """A run whose owner died is interrupted, and is still stored as running."""
    if wanted is None:
        return None
    return sorted(wanted | ({RunStatus.RUNNING} if RunStatus.INTERRUPTED in wanted else frozenset()))
