"""A run at a glance: its header, its nodes with the items counted, the sentence that says how it is."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from dagresume import words
from dagresume.clock import to_datetime
from dagresume.collector import paused
from dagresume.events import (
    COMPLETED,
    RETRY,
    RUN_CANCELLED,
    RUN_CLAIMED,
    RUN_ROLLED_BACK,
    WAITING,
    NodeStatus,
    Record,
    RunStatus,
    Snapshot,
    names,
    segments,
    status_of,
)
from dagresume.graphs import unfolded
from dagresume.store import Loaded
from dagresume.timeline import Timeline, timeline
from dagresume.views import NodeInfo, RunInfo, node_at, run_info, runs_function

__all__ = ["Overview", "overview"]

_OPEN: Final = frozenset({NodeStatus.RUNNING, NodeStatus.WAITING})
Counts = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class Overview:
    """A run at a glance. `info.nodes` lacks the items of maps that have completed; `items` counts all items
    of each map and rounds of each loop by status, `totals` says how many there will be. `headline`: how it
    is, in one sentence; `first_problem`: the path to look at first. `uncertain`: of these nobody knows
    whether they took effect. `seq`: that of the last event. `timeline`: if it was asked for.
    """

    info: RunInfo
    items: Counts
    totals: Mapping[str, int]
    headline: str
    first_problem: str | None
    uncertain: tuple[str, ...]
    seq: int
    timeline: Timeline | None
    loaded: Loaded = field(repr=False)


def overview(loaded: Loaded, now: int, *, drawn: bool = False) -> Overview:
    """Give a run at a glance. `now`: microseconds UTC. `drawn`: with its timeline."""
    with paused():
        return _overview(loaded, now, drawn=drawn)


def _overview(loaded: Loaded, now: int, *, drawn: bool) -> Overview:
    info = run_info(loaded.row, loaded.holder, loaded, brief=True)
    snapshot = Snapshot(loaded.records)
    live = info.status is RunStatus.RUNNING
    items = _counted(snapshot, live=live)
    graph = unfolded(loaded.graph)
    uncertain = tuple(_uncertain(info.nodes.values(), graph))
    # what a map tolerates, or a resume tries again, is not why a run was cut off
    failed = None if info.status is RunStatus.INTERRUPTED else next(iter(info.failures), None)
    problem = failed or next(iter(uncertain), None) or _asks(info)
    totals = {path: count for path, count in snapshot.counts.items() if isinstance(count, int)}
    facts = _Facts(info, items, totals, snapshot, loaded, uncertain, problem, graph)
    seq = snapshot.last_seq
    bars = timeline(loaded, now if live else None) if drawn else None
    return Overview(info, items, totals, facts.headline(), problem, uncertain, seq, bars, loaded)


def _counted(snapshot: Snapshot, *, live: bool) -> dict[str, Counter[str]]:
    """Give for each map and loop how many of its items have which status."""
    found: dict[str, Counter[str]] = {}
    for path, row in dict.items(snapshot.paths):
        if not path.endswith("]"):
            continue
        home = path[: path.rindex("[")] if path.count("[") == 1 else names(path)
        kind: str = row[0]
        status = "completed" if kind == COMPLETED else status_of(Record._make(row)).value
        if status == "running" and not live:
            status = "interrupted"
        counter = found.get(home)
        if counter is None:
            counter = found[home] = Counter()
        counter[status] += 1
    return found


def _uncertain(nodes: Iterable[NodeInfo], graph: Mapping[str, Any]) -> Iterable[str]:
    for node in nodes:
        if node.status is NodeStatus.INTERRUPTED and runs_function(graph, node.path):
            told: Mapping[str, Any] = {"body": graph}
            for name, _ in segments(node.path):
                told = node_at(told.get("body", {"nodes": []}), name)
            if not told.get("idempotent") and not told.get("reconcile"):
                yield node.path


def _asks(info: RunInfo) -> str | None:
    """Give the path that waits for a person."""
    asking = (n.path for n in info.nodes.values() if n.status is NodeStatus.WAITING and n.waits_for)
    return next(asking, None)


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the sentence about a run is made of."""

    info: RunInfo
    items: Counts
    totals: Mapping[str, int]
    snapshot: Snapshot
    loaded: Loaded
    uncertain: tuple[str, ...]
    problem: str | None
    graph: Mapping[str, Any]

    def headline(self) -> str:
        told = {
            RunStatus.PENDING: self._pending,
            RunStatus.RUNNING: self._running,
            RunStatus.WAITING: self._waiting,
            RunStatus.COMPLETED: self._completed,
            RunStatus.FAILED: self._failed,
            RunStatus.INTERRUPTED: self._interrupted,
            RunStatus.CANCELLED: self._cancelled,
            RunStatus.ROLLING_BACK: self._rolling_back,
            RunStatus.ROLLED_BACK: self._rolled_back,
        }
        return told[self.info.status]()

    def _pending(self) -> str:
        return words.HEADLINES["pending"]

    def _running(self) -> str:
        asked = self._asked()
        running = [
            n for n in self.info.nodes.values() if n.status is NodeStatus.RUNNING and "[" not in n.path
        ]
        for node in running:
            counts = self.items.get(node.path)
            total = self.totals.get(node.path)
            if counts and total:
                return words.map_progress(
                    node.path, counts.get("completed", 0), total, counts.get("running", 0)
                )
        if running:
            return words.running([node.path for node in running])
        return asked or words.HEADLINES["between"]

    def _asked(self) -> str:
        """Say what a node waits for, a person first."""
        waiting = [n for n in self.info.nodes.values() if n.status is NodeStatus.WAITING]
        waiting.sort(key=lambda n: n.waits_for is None)
        for node in waiting:
            record = self.snapshot.paths.get(node.path)
            if record is None or record.kind not in {WAITING, "node.failed"}:
                continue
            facts = record.facts
            due = facts.get("due") or (facts.get("retry_at") if record.reason == RETRY else None)
            reason = "retry" if record.reason == RETRY else record.reason or ""
            return words.waits(node.path, reason, node.waits_for, None if due is None else to_datetime(due))
        return ""

    def _waiting(self) -> str:
        return self._asked() or words.HEADLINES["waiting"]

    def _kept(self) -> int:
        """Give how many paths have completed; a map and what it holds are its items."""
        around = {path[: path.rindex("[")] for path in self.snapshot.paths if path.endswith("]")}
        return len(self.snapshot.paths) - len(around & self.snapshot.paths.keys()) - self._unfinished(around)

    def _unfinished(self, around: set[str]) -> int:
        return sum(path not in around for path, _ in self.snapshot.unfinished())

    def _completed(self) -> str:
        claims = [r.seq or 0 for r in self.loaded.records if r.path is None and r.kind == RUN_CLAIMED]
        last = claims[-1] if claims else 0
        reused, took, cost = 0, 0, 0.0
        maps = self.items.keys()
        rows = cast("Iterable[tuple[str, tuple[Any, ...]]]", dict.items(self.snapshot.paths))
        for path, row in rows:
            if row[0] == COMPLETED and (row[_SEQ] or 0) < last and path not in maps:
                reused += 1
                took += row[_TOOK] or 0
                cost += _cost(row[_DATA])
        info = self.info
        lasted = ((info.finished_at or info.updated_at) - info.created_at).total_seconds()
        borne = sum(counts.get("failed", 0) for counts in self.items.values())
        return words.all_completed(self._kept(), lasted, reused, took / 1e6, cost, borne)

    def _failed(self) -> str:
        blocked = sum(n.status is NodeStatus.UPSTREAM_FAILED for n in self.info.nodes.values())
        failure = self.info.failures.get(self.problem or "")
        if failure is None:
            return words.HEADLINES["failed"].format(
                reason=words.run_reason(self.info.reason) or "a node failed"
            )
        others = len(self.info.failures) - 1
        error = words.error_in_words(failure.type, failure.message)
        everything = self.info.reason != "fail_fast"
        return words.stopped(failure.path, error, failure.attempt, others, blocked, everything=everything)

    def _interrupted(self) -> str:
        died = self.info.reason == "owner_died"
        at = max((r.at for r in self._last_heard()), default=self.loaded.row.updated_at)
        moment = to_datetime(at) if died else self.info.finished_at or self.info.updated_at
        return words.cut_off(moment, self.uncertain, self._kept(), died=died, reason=self.info.reason)

    def _last_heard(self) -> Iterable[Record]:
        records = self.loaded.records
        return [records[-1]] if len(records) else []

    def _letter(self, kind: str) -> dict[str, Any]:
        return next((r.facts for r in reversed(self.loaded.records) if r.kind == kind), {})

    def _cancelled(self) -> str:
        by = self._letter(RUN_CANCELLED).get("by", "")
        return words.cancelled(by, self.info.finished_at or self.info.updated_at, self._kept())

    def _undone(self) -> tuple[int, int]:
        statuses = Counter(n.status for n in self.info.nodes.values())
        undone = statuses[NodeStatus.COMPENSATED]
        return undone, undone + statuses[NodeStatus.COMPLETED]

    def _rolling_back(self) -> str:
        return words.HEADLINES["rolling_back"].format(*self._undone())

    def _rolled_back(self) -> str:
        undone, of = self._undone()
        by = self._letter(RUN_ROLLED_BACK).get("by", "")
        left = [n.path for n in self.info.nodes.values() if n.reason == "compensation_failed"]
        return words.rolled_back(by, undone, of, left)


_SEQ, _TOOK, _DATA = (Record._fields.index(name) for name in ("seq", "took", "data"))


def _cost(data: str | None) -> float:
    if data is None or '"usage"' not in data:
        return 0.0
    return float(json.loads(data)["usage"].get("cost", 0.0))
