"""Runs as people see them: from what is stored of them, without their code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from dagresume.clock import to_datetime
from dagresume.events import FAILED, NodeStatus, Record, RunStatus, Snapshot, segments, status_of
from dagresume.observe import failure_of
from dagresume.policy import Join, NodeFailure, join
from dagresume.store import Holder, Loaded, RunRow

__all__ = ["NodeInfo", "RunInfo", "run_info", "stored_as", "wanted_statuses"]


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """The state of one path: `status`, why (`reason`), how often it was tried, when that changed, how long it
    took.
    """

    path: str
    status: NodeStatus
    reason: str | None = None
    attempt: int = 0
    at: datetime | None = None
    seconds: float | None = None
    failure: NodeFailure | None = None


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run as the store has it. `nodes` (path → NodeInfo) only from `Engine.get`. Times are aware UTC
    datetimes.
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
    nodes: Mapping[str, NodeInfo] = field(default_factory=dict, repr=False)
    failures: Mapping[str, NodeFailure] = field(default_factory=dict, repr=False)


def run_info(row: RunRow, holder: Holder | None, loaded: Loaded | None = None) -> RunInfo:
    status, reason = RunStatus(row.status), row.reason
    if status is RunStatus.RUNNING and (holder is None or not holder.alive):
        status, reason = RunStatus.INTERRUPTED, "owner_died"
    nodes = {} if loaded is None else _nodes(loaded, live=status is RunStatus.RUNNING)
    failures = {
        p: n.failure for p, n in nodes.items() if n.failure is not None and n.status is NodeStatus.FAILED
    }
    return RunInfo(
        row.run_id, row.workflow, row.version, row.key, status, reason,
        to_datetime(row.created_at), to_datetime(row.updated_at),
        None if row.finished_at is None else to_datetime(row.finished_at),
        str(holder) if holder is not None and holder.alive else None, row.source, nodes,
        _only_unhandled(failures, nodes, loaded),
    )  # fmt: skip


def _nodes(loaded: Loaded, *, live: bool) -> dict[str, NodeInfo]:
    """Give the state of every path that has one, and of the nodes that have none yet; definition order, items
    after.
    """
    snapshot = Snapshot(loaded.records)
    graph = json.loads(loaded.graph)
    of: dict[str, list[str]] = {}
    for path in snapshot.paths:
        of.setdefault(segments(path)[0][0], []).append(path)
    nodes: dict[str, NodeInfo] = {}
    for node in graph["nodes"]:
        id_ = node["id"]
        paths = sorted(of.pop(id_, []), key=segments_key)
        if id_ not in paths:
            nodes[id_] = NodeInfo(id_, _unborn(node, nodes))
        for path in paths:
            found = _node(snapshot.paths[path], live=live)
            if path == id_ and found.status is NodeStatus.PENDING:
                found = replace(found, status=_unborn(node, nodes))
            nodes[path] = found
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
    )


def _only_unhandled(
    failures: Mapping[str, NodeFailure], nodes: Mapping[str, NodeInfo], loaded: Loaded | None
) -> dict[str, NodeFailure]:
    """Leave out maps (their items say more), what was tolerated, and what a child that runs on failures dealt
    with.
    """
    if loaded is None or not failures:
        return {}
    graph = {node["id"]: node for node in json.loads(loaded.graph)["nodes"]}
    completed = {id_ for id_ in graph if id_ in nodes and nodes[id_].status is NodeStatus.COMPLETED}
    handlers = [graph[id_] for id_ in completed if graph[id_].get("trigger") == "any_failed"]
    dealt = {parent for node in handlers for parent in node["parents"]}
    kept = {}
    for path, failure in failures.items():
        node, index = segments(path)[0]
        outer = nodes.get(node)
        tolerated = index is not None and outer is not None and outer.status is NodeStatus.COMPLETED
        a_map = (
            index is None and graph.get(node, {}).get("type") == "map" and failure.reason == "items_failed"
        )
        if node not in dealt and not tolerated and not a_map:
            kept[path] = failure
    return kept


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
