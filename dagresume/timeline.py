"""When the paths of a run were at work: bars, the gaps between its processes, and the critical path.

Read from the journal and the stored definition. Times are microseconds UTC as they are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from dagresume.events import (
    COMPLETED,
    FAILED,
    INTERRUPTED,
    MIGRATED,
    MOVED,
    RUN_CLAIMED,
    RUN_CREATED,
    RUN_REVIVED,
    STARTED,
    WAITING,
    Record,
    Records,
    enclosing,
    names,
    new_record,
    status_set_by,
)
from dagresume.graphs import unfolded
from dagresume.store import Loaded

__all__ = ["Bar", "Stretch", "Timeline", "Turn", "timeline"]

_TAKEN_OVER: Final = frozenset({"copied", MIGRATED, MOVED, "kept", "resolved", "passed", "again"})
_BEGINS: Final = frozenset({RUN_CREATED, RUN_CLAIMED, RUN_REVIVED})
_UNCUT: Final = frozenset({STARTED, COMPLETED, FAILED, WAITING})


class Bar(NamedTuple):
    """One attempt or wait of a path. `end`: completed, failed, interrupted, cancelled, waiting, running."""

    path: str
    start: int
    stop: int
    end: str


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time in which a process drove the run; `died`: it ended without a word."""

    start: int
    stop: int
    died: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """A node on the critical path, and the microseconds for which the end of the run waited for it alone."""

    node: str
    alone: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """`bars` by node (`screen/evaluate` for all `screen[n]/evaluate`), `spans` of what has something inside
    it, the `stretches` in which somebody drove the run, and its `critical` path.
    """

    stretches: tuple[Stretch, ...]
    bars: Mapping[str, Sequence[Bar]]
    spans: Mapping[str, Sequence[Bar]]
    critical: tuple[Turn, ...] = ()

    @property
    def worked(self) -> int:
        """For how many microseconds the run was driven, without the gaps."""
        return sum(stretch.stop - stretch.start for stretch in self.stretches)

    def at(self, moment: int) -> int:
        """Give how long the run had been driven at a moment."""
        passed = 0
        for stretch in self.stretches:
            if moment <= stretch.start:
                break
            passed += min(moment, stretch.stop) - stretch.start
        return passed


def timeline(loaded: Loaded, now: int | None = None) -> Timeline:
    """Give the timeline of a run. `now`: it is being driven, and what is open goes on until now."""
    told = _Told(now)
    told.read(loaded.records)
    bars, spans = told.sorted_out()
    found = Timeline(tuple(told.stretches), bars, spans)
    return Timeline(found.stretches, bars, spans, tuple(_critical(found, unfolded(loaded.graph))))


@dataclass
class _Told:
    now: int | None
    open: dict[str, tuple[int, str]] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    began: int | None = None
    last: int = 0

    def read(self, records: Sequence[Record]) -> None:
        """Take all records into account; quick about what began and ended in one record."""
        add, is_open, columns = self.bars.append, self.open, Record._fields
        path_, at_, took_, reason_ = map(columns.index, ("path", "at", "took", "reason"))
        for row in records.rows if isinstance(records, Records) else records:
            if row[0] == COMPLETED and row[reason_] is None and row[path_] not in is_open:
                at = row[at_]
                add(Bar(row[path_], at - (row[took_] or 0), at, "completed"))
                self.last = max(self.last, at)
            else:
                self._take(new_record(row))
        self._end()

    def _take(self, record: Record) -> None:
        if record.path is not None:
            if self.began is not None:
                self.last = max(self.last, record.at)
            self._of_path(record.path, record)
        elif record.kind in _BEGINS:
            if record.kind != RUN_REVIVED or self.began is None:
                self._stop(self.last, died=True)
                self.began = self.last = record.at
        elif status_set_by(record) is not None and self.began is not None:
            heard = record.facts.get("last_seen") if record.kind == "run.interrupted" else None
            self._stop(record.at if heard is None else max(self.last, heard), died=heard is not None)

    def _of_path(self, path: str, record: Record) -> None:
        if record.kind == STARTED:
            self.open[path] = (record.at, "running")
        elif record.kind == WAITING:
            self._close(path, record.at, "waiting")
            self.open[path] = (record.at, "waiting")
        elif record.kind in {COMPLETED, FAILED}:
            self._ended(path, record)
        elif record.kind in {INTERRUPTED, "node.cancelled", "node.withdrawn"}:
            self._close(path, record.at, "interrupted" if record.kind == INTERRUPTED else "cancelled")

    def _ended(self, path: str, record: Record) -> None:
        if record.reason in _TAKEN_OVER:
            self.open.pop(path, None)
            return
        end = "completed" if record.kind == COMPLETED else "failed"
        started, how = self.open.pop(path, (record.at - (record.took or 0), "running"))
        if how == "waiting":
            self.bars.append(Bar(path, started, record.at, "waiting"))
            if record.took is None:
                return
            started = record.at - record.took
        self.bars.append(Bar(path, min(started, record.at), record.at, end))

    def _close(self, path: str, at: int, end: str) -> None:
        found = self.open.pop(path, None)
        if found is not None:
            self.bars.append(
                Bar(path, found[0], max(found[0], at), found[1] if found[1] == "waiting" else end)
            )

    def _stop(self, at: int, *, died: bool) -> None:
        """The process has let go of the run, or died: what was open is cut there."""
        if self.began is None:
            return
        self.stretches.append(Stretch(self.began, max(self.began, at), died))
        self.began = None
        for path in list(self.open):
            self._close(path, at, "interrupted")

    def _end(self) -> None:
        """There are no more records: what is open is so until now, or was cut when the last was heard."""
        if self.began is None:
            return
        if self.now is None:
            self._stop(self.last, died=True)
            return
        for path in list(self.open):
            self._close(path, self.now, "running")
        self._stop(max(self.now, self.last), died=False)

    def sorted_out(self) -> tuple[dict[str, list[Bar]], dict[str, list[Bar]]]:
        """Give the bars by node, and apart those of paths that have other paths inside them."""
        homes: dict[str, list[Bar]] = {}
        whole: list[Bar] = []
        inside: set[str] = set()
        for bar in self.bars:
            path = bar[0]
            if path[-1:] == "]" and path.count("[") == 1 and "/" not in path:  # most of many are
                homes.setdefault(path[: path.index("[")], []).append(bar)
            else:
                whole.append(bar)
                inside.update(enclosing(path))
        inside.update(homes)
        spans: dict[str, list[Bar]] = {}
        for bar in whole:
            where = spans if bar.path in inside else homes
            where.setdefault(names(bar.path), []).append(bar)
        return homes, spans


# -- the critical path ----------------------------------------------------------------------------------


def _critical(found: Timeline, graph: Mapping[str, Any]) -> Iterator[Turn]:
    """Give the chain of nodes, each of which ended last of what the next one needs, the first one first.

    What a node adds is the time from the end of the one before it to its own end, without the gaps.
    """
    parents = {node["id"]: node["parents"] for node in graph["nodes"]}
    stops: dict[str, int] = {}
    for home in (found.bars, found.spans):
        for name, bars in home.items():
            node = name.partition("/")[0]
            stops[node] = max(stops.get(node, 0), max(bar.stop for bar in bars))
    ends = {node: found.at(stop) for node, stop in stops.items() if node in parents}
    chain = []
    at = max(ends, key=lambda node: ends[node], default=None)
    while at is not None:
        chain.append(at)
        at = max((p for p in parents[at] if p in ends), key=lambda node: ends[node], default=None)
    before = 0
    for node in reversed(chain):
        yield Turn(node, max(0, ends[node] - before))
        before = max(before, ends[node])
