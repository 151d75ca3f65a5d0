"""Draws when the nodes of a run were at work: one row a node, its lanes folded into the height of the bar.

A stretch without a process is a gap of fixed width with its length written on it, never a bar. What was cut
off ends at a line.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from dagresume import words
from dagresume.cli.screen import STYLES, clean
from dagresume.timeline import Stretch

if TYPE_CHECKING:
    from dagresume.timeline import Bar, Timeline

__all__ = ["chart", "critical_line"]

_HEIGHTS: Final = "▁▂▃▄▅▆▇█"
_PLAIN: Final = ".:-=+*%#"
_LABEL: Final = 28
_LEAST: Final = 20


@dataclass
class _Axis:
    """Maps moments to columns: the stretches in proportion, the gaps squeezed."""

    parts: list[tuple[Stretch, int, int]]  # stretch, its first column, the columns it has
    gaps: list[tuple[int, int, str]]  # first column, columns, label
    width: int

    def __post_init__(self) -> None:
        stretch = self.parts[0][0]
        self.scale = self.width / max(1, stretch.stop - stretch.start)  # where there is only one

    def column(self, moment: int) -> float:
        """Give the place of a moment, in columns; one in a gap is at the end of the stretch before it."""
        place = 0.0
        if len(self.parts) == 1:
            return min(max(0, moment - self.parts[0][0].start) * self.scale, self.width)
        for stretch, first, cells in self.parts:
            if moment < stretch.start:
                return place or float(first)
            share = (min(moment, stretch.stop) - stretch.start) / max(1, stretch.stop - stretch.start)
            place = first + share * cells
            if moment <= stretch.stop:
                return place
        return place


def _axis(timeline: Timeline, width: int) -> _Axis:
    stretches = timeline.stretches
    lengths = [after.start - before.stop for before, after in pairwise(stretches)]
    labels = [words.duration(length / 1e6) for length in lengths]
    widths = [cell_len(label) + 2 for label in labels]
    if sum(widths) > width // 2:
        labels, widths = [""] * len(lengths), [1] * len(lengths)
    rest = max(len(stretches), width - sum(widths))
    parts, gaps, place = [], [], 0
    left, worked = rest, max(1, timeline.worked)
    for n, stretch in enumerate(stretches):
        last = n == len(stretches) - 1
        share = left if last else max(1, round((stretch.stop - stretch.start) / worked * rest))
        share = max(1, min(share, left - (len(stretches) - 1 - n)))
        parts.append((stretch, place, share))
        left, place = left - share, place + share
        if not last:
            gaps.append((place, widths[n], labels[n]))
            place += widths[n]
    return _Axis(parts, gaps, place)


def chart(timeline: Timeline, order: Sequence[str], width: int) -> Iterator[Text]:
    """Give the lines of a timeline of the nodes of `order` that have begun, in so many columns."""
    named = [name for name in order if name in timeline.bars or name in timeline.spans]
    if not named or not timeline.stretches:
        return
    critical = {turn.node for turn in timeline.critical}
    label = min(_LABEL, width // 3, max(cell_len(clean(name)) for name in named) + 2)
    notes = {name: _note(timeline.bars.get(name, ())) for name in named}
    end = f"{words.duration(timeline.worked / 1e6)} at work"
    note = max(map(cell_len, [end, *notes.values()]))
    axis = _axis(timeline, max(_LEAST, width - label - note - 4))
    yield _head(axis, label, timeline).append(f"  {end}", "dim")
    for name in named:
        row = Text()
        row.append("▸ " if name in critical else "  ", "bold" if name in critical else "")
        row.append(_fit(clean(name), label - 2), "bold" if name in critical else "")
        row.append(" ")
        row.append_text(_bar(axis, timeline.bars.get(name, ()), timeline.spans.get(name, ())))
        row.append(f"  {notes[name]}", "dim")
        row.rstrip()
        yield row


def critical_line(timeline: Timeline, most: int = 8) -> str:
    """Give the critical path as a sentence: for which nodes the end of the run had to wait, and how long."""
    turns = list(timeline.critical)
    if len(turns) < 2:
        return ""
    shown = turns
    if len(turns) > most:
        longest = sorted(turns, key=lambda turn: turn.alone, reverse=True)[:most]
        kept = {turn.node for turn in longest}
        shown = [turn for turn in turns if turn.node in kept]
    told = " → ".join(f"{clean(turn.node)} {words.duration(turn.alone / 1e6)}" for turn in shown)
    more = f" (the {most} longest of {len(turns):,})" if len(turns) > most else ""
    total = words.duration(sum(turn.alone for turn in turns) / 1e6)
    return f"Critical path, {total}{more}: {told}"


def _fit(text: str, width: int) -> str:
    return set_cell_size(text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…", width)


def _note(bars: Sequence[Bar]) -> str:
    if not bars:
        return ""
    worked = sum(bar.stop - bar.start for bar in bars if bar.end != "waiting")
    most = _at_once(bars)
    return words.duration(worked / 1e6) + (f", {most:,} at once" if most > 1 else "")


def _at_once(bars: Iterable[Bar]) -> int:
    """Give how many were under way at once at most."""
    real = [bar for bar in bars if bar.stop > bar.start]
    starts, stops = sorted(bar.start for bar in real), sorted(bar.stop for bar in real)
    most = ended = 0
    for begun, start in enumerate(starts, 1):
        while stops[ended] <= start:
            ended += 1
        most = max(most, begun - ended)
    return max(most, 1)


def _head(axis: _Axis, label: int, timeline: Timeline) -> Text:
    """Give the line above the bars: when it began, and the length of each gap."""
    cells = [" "] * axis.width
    for first, width, told in axis.gaps:
        cells[first : first + width] = list(set_cell_size(f"┊{told}┊" if told else "┊", width))
    begin = words.local_time_of(timeline.stretches[0].start)
    if all(cell == " " for cell in cells[: len(begin) + 1]):
        cells[: len(begin)] = begin
    return Text(" " * (label + 1) + "".join(cells), style="dim")


def _bar(axis: _Axis, bars: Sequence[Bar], spans: Sequence[Bar]) -> Text:
    heights, ends = _heights(axis, bars), _ends(axis, bars)
    waits = _covered(axis, [bar for bar in bars if bar.end == "waiting"])
    around = _covered(axis, spans)
    gaps = {n for first, width, _ in axis.gaps for n in range(first, first + width)}
    edges = {n for first, width, _ in axis.gaps for n in (first, first + width - 1)}
    most = max(heights.values(), default=1.0)
    glyphs = _HEIGHTS if _speaks_blocks() else _PLAIN
    cells: list[tuple[str, str]] = []
    for n in range(axis.width):
        if n in gaps:
            cells.append(("┊" if n in edges else " ", "dim"))
        elif n in ends:
            cells.append(ends[n])
        elif n in heights:
            height = min(7, math.ceil(heights[n] / most * 8) - 1)
            cells.append((glyphs[height], STYLES["completed"]))
        elif n in waits:
            cells.append(("┄", STYLES["waiting"]))
        else:
            cells.append(("─" if n in around else " ", "dim"))
    text = Text()
    for style, same in groupby(cells, key=itemgetter(1)):
        text.append("".join(char for char, _ in same), style)
    return text


def _speaks_blocks() -> bool:
    try:
        _HEIGHTS.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _places(axis: _Axis, bars: Iterable[Bar]) -> Iterable[tuple[float, float]]:
    """Give where bars begin and end, in columns; without those that only wait."""
    at_work = [bar for bar in bars if bar[3] != "waiting"]
    if len(axis.parts) > 1:
        return [(axis.column(bar.start), axis.column(bar.stop)) for bar in at_work]
    base, scale = axis.parts[0][0].start, axis.scale  # quick: there may be very many of them
    return [((start - base) * scale, (stop - base) * scale) for _, start, stop, _ in at_work]


def _heights(axis: _Axis, bars: Iterable[Bar]) -> Mapping[int, float]:
    """Give for each column how many were under way on average; at least a trace of what was there at all."""
    whole = [0.0] * (axis.width + 1)  # differences: +1 where the first full column is, -1 after the last
    part = [0.0] * (axis.width + 1)
    touched, end = set(), axis.width - 1
    for start, stop in _places(axis, bars):
        first, last = int(start), int(stop)
        if last > end:
            first, last = min(first, end), end
        touched.add(first)
        if first == last:
            part[first] += stop - start
            continue
        part[first] += first + 1 - start
        part[last] += stop - last
        whole[first + 1] += 1
        whole[last] -= 1
    found, now = {}, 0.0
    for n in range(axis.width):
        now += whole[n]
        if now + part[n] > 1e-9 or n in touched:
            found[n] = max(now + part[n], 1e-6)
    return found


_ENDS: Final = {
    "failed": ("×", STYLES["failed"]),
    "interrupted": ("┤", STYLES["interrupted"]),
    "running": ("▶", STYLES["running"]),
    "cancelled": ("■", STYLES["cancelled"]),
}
_GRAVE: Final = ("failed", "interrupted", "running", "cancelled")


def _ends(axis: _Axis, bars: Iterable[Bar]) -> dict[int, tuple[str, str]]:
    """Give what stands where a bar ended otherwise than well; the gravest where there are several."""
    found: dict[int, str] = {}
    for bar in bars:
        if bar.end in _ENDS:
            n = max(0, min(math.ceil(axis.column(bar.stop)) - 1, axis.width - 1))
            if n not in found or _GRAVE.index(bar.end) < _GRAVE.index(found[n]):
                found[n] = bar.end
    return {n: _ENDS[end] for n, end in found.items()}


def _covered(axis: _Axis, bars: Iterable[Bar]) -> set[int]:
    found: set[int] = set()
    for bar in bars:
        found.update(range(int(axis.column(bar.start)), min(axis.width, math.ceil(axis.column(bar.stop)))))
    return found
