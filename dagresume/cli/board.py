"""How far a run is, node by node, kept up to date event by event; and drawn as a tree."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from rich.text import Text

from dagresume import words
from dagresume.cli.screen import GLYPHS, STYLES, clean
from dagresume.events import (
    CANCELLED,
    COMPENSATED,
    COMPLETED,
    FAILED,
    INTERRUPTED,
    RESET,
    RETRY,
    SKIPPED,
    STARTED,
    WAITING,
    WITHDRAWN,
    Event,
    names,
)

__all__ = ["Board", "Line"]

_STATUS: Final[Mapping[str, str]] = {
    STARTED: "running", COMPLETED: "completed", FAILED: "failed", SKIPPED: "skipped",
    INTERRUPTED: "interrupted", CANCELLED: "cancelled", RESET: "pending", WITHDRAWN: "pending",
    WAITING: "waiting", COMPENSATED: "compensated",
}  # fmt: skip
_ENDED: Final = ("completed", "failed", "skipped", "compensated", "cancelled")
_BAR: Final = (("completed", "█"), ("skipped", "█"), ("failed", "×"), ("waiting", "▒"), ("running", "▒"))
_WINDOW: Final = timedelta(seconds=15)  # over which a rate is taken
_SAMPLES: Final = 64
_LABEL: Final = 28
_NARROW: Final = 8  # columns of a bar


@dataclass
class Line:
    """One node, however many items or enclosing items it has."""

    name: str
    depth: int
    around: "Line | None" = None
    own: str = "pending"
    reason: str | None = None
    total: int | None = None
    counts: Counter[str] = field(default_factory=Counter)
    began: datetime | None = None
    took: float | None = None
    told: str = ""
    ended: deque[tuple[datetime, int]] = field(default_factory=lambda: deque(maxlen=_SAMPLES))

    @property
    def status(self) -> str:
        """That of the node itself, else what those of its paths come to."""
        if self.own != "pending" or not self.counts:
            return self.own
        for word in ("running", "waiting", "failed", "interrupted"):
            if self.counts[word]:
                return word
        if self.around is not None and self.around.status == "running":
            return "running"  # more of the enclosing items are to come
        return "completed" if self.counts["completed"] else "pending"

    @property
    def done(self) -> int:
        """How many of its items have ended."""
        return sum(self.counts[word] for word in _ENDED)

    @property
    def succeeded(self) -> int:
        """How many of its items have completed, or were skipped."""
        return self.counts["completed"] + self.counts["skipped"]

    @property
    def size(self) -> int:
        """How many items it has as far as is known."""
        known = sum(self.counts.values()) - self.counts["pending"]
        of_those_around = self.around.size if self.around is not None and self.total is None else 0
        return max(self.total or 0, known, of_those_around)

    def sample(self, now: datetime) -> None:
        """Note how many have ended by now."""
        if not self.ended or self.ended[-1][1] != self.done:
            self.ended.append((now, self.done))

    def rate(self, now: datetime) -> float:
        """Give how many end in a second, over the last few; 0 if that is not known yet."""
        recent = [each for each in self.ended if now - each[0] <= _WINDOW]
        if len(recent) < 2:
            return 0.0
        seconds = (now - recent[0][0]).total_seconds()
        return (self.done - recent[0][1]) / seconds if seconds > 0.2 else 0.0


class Board:
    """The nodes of a run by the events seen so far. `graph`: its stored definition, unfolded."""

    def __init__(self, graph: Mapping[str, Any]) -> None:
        self.lines: dict[str, Line] = {}
        for line in _lines(graph):
            self.lines[line.name] = line
        self._paths: dict[str, str] = {}

    def apply(self, event: Event) -> None:
        """Take one more event into account."""
        path, status = event.path, _STATUS.get(event.kind)
        if path is None or status is None:
            return
        if event.kind == FAILED and event.reason == RETRY:
            status = "waiting"
        line = self.lines.get(_names(path))
        if line is None:
            return
        count = event.data.get("count")
        if isinstance(count, int):
            line.total = (line.total or 0) + count if "[" in path else count
        if path == line.name:
            self._set_own(line, event, status)
        else:
            before = self._paths.get(path)
            if before is not None:
                line.counts[before] -= 1
            line.counts[status] += 1
            self._paths[path] = status
            line.began = line.began or event.at

    @staticmethod
    def _set_own(line: Line, event: Event, status: str) -> None:
        line.own, line.reason = status, event.reason
        line.took = event.data.get("seconds")
        line.told = str(
            event.data.get("prompt") or event.data.get("event") or event.data.get("message") or ""
        )
        if status == "running":
            line.began = event.at

    def settle(self, statuses: Mapping[str, tuple[str, str | None]]) -> None:
        """Take over what the nodes have come to at last: (status, reason) by path, also what is computed."""
        for path, (status, reason) in statuses.items():
            if path in self.lines:
                line = self.lines[path]
                line.own, line.reason = status, reason
        for line in self.lines.values():
            if line.counts["running"]:
                line.counts["interrupted"] += line.counts.pop("running")

    def sample(self, now: datetime) -> None:
        """Note the pace of the maps."""
        for line in self.lines.values():
            if line.counts:
                line.sample(now)

    # -- how it is drawn ------------------------------------------------------------------------------

    def headline(self) -> str:
        """Say what the run is at, in one sentence; empty if nothing runs or waits."""
        for line in self.lines.values():
            if line.own == "running" and line.counts and line.size:
                return words.map_progress(line.name, line.succeeded, line.size, line.counts["running"])
        running = [line.name for line in self.lines.values() if line.status == "running"]
        if running:
            return words.running(running)
        for line in self.lines.values():
            if line.own == "waiting":
                return words.waits(line.name, line.reason or "", line.told, None)
        return ""

    def draw(self, width: int, height: int, now: datetime) -> Iterator[Text]:
        """Give a line for each node, in so many columns; of more than `height` those at work, and how many
        are left out.
        """
        lines = list(self.lines.values())
        shown = lines
        if len(lines) > height:
            busy = [each for each in lines if each.status not in {"completed", "pending", "skipped"}]
            shown = busy[: height - 1]
        label = min(_LABEL, max((2 * each.depth + len(_last(each.name)) for each in shown), default=0))
        word = max((len(each.status) for each in shown), default=0)
        for each in shown:
            yield _drawn(each, label, word, width, now)
        if len(shown) < len(lines):
            rest = Counter(each.status for each in lines)
            for each in shown:
                rest[each.status] -= 1
            told = ", ".join(f"{count:,} {word}" for word, count in rest.items() if count > 0)
            yield Text(f"  and {len(lines) - len(shown):,} nodes more: {told}", style="dim")


def _names(path: str) -> str:
    if path.endswith("]") and path.count("[") == 1:
        return path[: path.rindex("[")]
    return names(path)


def _lines(graph: Mapping[str, Any]) -> Iterator[Line]:
    """Give a line for each node, those of inner workflows below theirs; no recursion."""
    todo: list[tuple[Line | None, Mapping[str, Any]]] = [(None, node) for node in reversed(graph["nodes"])]
    while todo:
        around, node = todo.pop()
        id_ = str(node["id"])
        line = Line(id_, 0) if around is None else Line(f"{around.name}/{id_}", around.depth + 1, around)
        yield line
        body = node.get("body", {"nodes": []})["nodes"]
        todo += [(line, inner) for inner in reversed(body)]


def _last(name: str) -> str:
    return clean(name.rpartition("/")[2])


def _drawn(line: Line, label: int, word: int, width: int, now: datetime) -> Text:
    status = line.status
    name = "  " * line.depth + _last(line.name)
    name = name if len(name) <= label else name[: label - 1] + "…"
    style = STYLES.get(status, "")
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{GLYPHS.get(status, ' ')} ", style)
    text.append(f"{name:<{label}}  ", "" if status != "pending" else "dim")
    text.append(f"{status:<{word}}  ", style)
    if line.total or (line.counts and line.size > 1):
        text.append_text(_map(line, max(_NARROW, min(30, width - label - word - 58)), now))
    elif status == "running" and line.began is not None:
        text.append(words.duration((now - line.began).total_seconds()), "dim")
    elif line.took is not None:
        text.append(words.duration(line.took), "dim")
    elif status == "waiting" and line.told:
        text.append(clean(line.told), "dim")
    elif status not in {"completed", "pending", "running"}:
        text.append(words.node_reason(line.reason) or clean(words.one_line(line.told)), "dim")
    text.rstrip()
    text.truncate(width, overflow="ellipsis")
    return text


def _map(line: Line, cells: int, now: datetime) -> Text:
    """Give the bar of a map or loop, its numbers, its pace and what is left."""
    text = bar(line.counts, line.size, cells)
    told = [f"{line.succeeded:,} of {line.size:,}"]
    told += [f"{line.counts[w]:,} {w}" for w in ("failed", "interrupted", "waiting") if line.counts[w]]
    rate = line.rate(now)
    if line.own in {"running", "pending"} and rate > 0 and line.done < line.size:
        left = math.ceil((line.size - line.done) / rate)
        told.append(f"{left} s left" if left < 10 else f"{words.duration(left)} left")
        told.append(
            f"{rate:.0f}/s" if rate >= 10 else f"{rate:.1f}/s" if rate >= 1 else f"{rate * 60:.1f}/min"
        )
    elif line.took is not None:
        told.append(words.duration(line.took))
    if line.counts["running"] and cells > _NARROW:  # else the sentence above says it
        told.append(f"{line.counts['running']:,} running")
    text.append("  " + " · ".join(told))
    return text


def bar(counts: Mapping[str, int], total: int, cells: int) -> Text:
    """Give a bar of so many cells: what is done, what failed, what runs, and the rest; whatever there is
    shows.
    """
    text, left, past, drawn = Text(), cells, 0, 0
    for word, glyph in _BAR:
        count = counts.get(word, 0)
        if not count or not total:
            continue
        past += count
        until = math.floor(past / total * cells) if word != "running" else round(past / total * cells)
        size = min(left, max(until - drawn, 1 if word != "completed" else 0))
        text.append(glyph * size, STYLES.get(word, ""))
        left, drawn = left - size, drawn + size
    return text.append("░" * left, "dim")


def settled(nodes: Iterable[Any]) -> dict[str, tuple[str, str | None]]:
    """Give (status, reason) of nodes by path."""
    return {node.path: (str(node.status), node.reason) for node in nodes if "[" not in node.path}
