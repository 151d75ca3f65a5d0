"""Where the boxes of a drawn graph stand: layers from left to right, few crossings, no box on another.

The method is Sugiyama's: longest-path layers, places for edges that pass a layer, sweeps by the mean place
of the neighbours, then each layer is moved towards its neighbours. Linear in nodes and edges, sorting apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

__all__ = ["Box", "Layout", "laid_out", "layers"]

_SWEEPS: Final = 6
_MOST_PASSING: Final = 20_000
"""Places for edges that pass a layer; with more of them edges go straight, through whatever is there."""


@dataclass(slots=True)
class Box:
    """A node to be placed: its size, then `x` and `y` of its upper left corner, in pixels."""

    id: str
    width: float
    height: float
    x: float = 0.0
    y: float = 0.0


@dataclass(slots=True)
class Layout:
    """Boxes in their places, and for each edge (parent, child) the points it passes, from box to box."""

    boxes: Mapping[str, Box]
    edges: Mapping[tuple[str, str], Sequence[tuple[float, float]]]
    width: float = 0.0
    height: float = 0.0


def layers(parents: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Give the layer of each node: one more than the last of its parents. Parents stand before children."""
    found: dict[str, int] = {}
    for node, above in parents.items():
        found[node] = 1 + max((found[parent] for parent in above), default=-1)
    return found


@dataclass(slots=True, eq=False)
class _Place:
    """A box in its layer, or the place of an edge that passes it."""

    height: float
    box: Box | None = None
    above: list[_Place] = field(default_factory=list)
    below: list[_Place] = field(default_factory=list)
    order: float = 0.0
    y: float = 0.0

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


def laid_out(
    boxes: Sequence[Box],
    parents: Mapping[str, Sequence[str]],
    *,
    gap: float = 18.0,
    between: float = 56.0,
) -> Layout:
    """Place the boxes. `parents`: of each of them, in an order in which parents stand before children; `gap`:
    between two boxes of a layer, `between`: between two layers.
    """
    level = layers(parents)
    by_id = {box.id: box for box in boxes}
    columns, chains = _columns(by_id, parents, level)
    _order(columns)
    for column in columns:
        _stack(column, gap)
    _straighten(columns, gap)
    return _measured(by_id, columns, chains, between)


def _columns(
    boxes: Mapping[str, Box], parents: Mapping[str, Sequence[str]], level: Mapping[str, int]
) -> tuple[list[list[_Place]], dict[tuple[str, str], list[_Place]]]:
    columns: list[list[_Place]] = [[] for _ in range(1 + max(level.values(), default=-1))]
    places = {}
    for node in parents:
        places[node] = _Place(boxes[node].height, boxes[node])
        columns[level[node]].append(places[node])
    passing = sum(level[node] - level[above] - 1 for node, found in parents.items() for above in found)
    chains: dict[tuple[str, str], list[_Place]] = {}
    for node, found in parents.items():
        for above in dict.fromkeys(found):
            chain = [places[above]]
            if passing <= _MOST_PASSING:
                for between in range(level[above] + 1, level[node]):
                    chain.append(_Place(2.0))
                    columns[between].append(chain[-1])
            chain.append(places[node])
            for one, other in pairwise(chain):
                one.below.append(other)
                other.above.append(one)
            chains[above, node] = chain
    return columns, chains


def _order(columns: Sequence[list[_Place]]) -> None:
    """Sort each layer by the mean place of the neighbours, downwards and upwards in turn."""
    for column in columns:
        _number(column)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for column in columns if down else reversed(columns):
            means = {}
            for place in column:
                near = place.above if down else place.below
                means[id(place)] = sum(p.order for p in near) / len(near) if near else place.order
            column.sort(key=lambda place: means[id(place)])
            _number(column)


def _number(column: Sequence[_Place]) -> None:
    for n, place in enumerate(column):
        place.order = (n + 0.5) / len(column)


def _stack(column: Sequence[_Place], gap: float) -> None:
    y = 0.0
    for place in column:
        place.y = y
        y += place.height + gap
    for place in column:
        place.y -= (y - gap) / 2


def _straighten(columns: Sequence[Sequence[_Place]], gap: float) -> None:
    """Move places towards the middle of their neighbours, as far as their order and the gaps let them."""
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for column in columns if down else reversed(columns):
            wanted = []
            for place in column:
                near = (place.above if down else place.below) or place.above or place.below
                target = sum(p.middle for p in near) / len(near) if near else place.middle
                wanted.append(target - place.height / 2)
            _settle(column, wanted, gap)


def _settle(column: Sequence[_Place], wanted: Sequence[float], gap: float) -> None:
    """Give places as near to the wanted ones as can be: blocks of those that push each other share their
    mean.
    """
    blocks: list[tuple[float, float, int]] = []  # sum of (wanted - offset), extent, count
    for place, want in zip(column, wanted, strict=True):
        total, extent, count = want, place.height + gap, 1
        while blocks and blocks[-1][0] / blocks[-1][2] + blocks[-1][1] > total / count:
            before, size, members = blocks.pop()
            total += before - size * count
            extent, count = extent + size, count + members
        blocks.append((total, extent, count))
    rest = iter(column)
    for total, _, count in blocks:
        y = total / count
        for _ in range(count):
            place = next(rest)
            place.y = y
            y += place.height + gap


def _measured(
    boxes: Mapping[str, Box],
    columns: Sequence[Sequence[_Place]],
    chains: Mapping[tuple[str, str], Sequence[_Place]],
    between: float,
) -> Layout:
    top = min((place.y for column in columns for place in column), default=0.0)
    x, lefts, widths, where = 0.0, [], [], {}
    for number, column in enumerate(columns):
        wide = max((place.box.width for place in column if place.box is not None), default=0.0)
        lefts.append(x)
        widths.append(wide)
        for place in column:
            place.y -= top
            where[id(place)] = number
            if place.box is not None:
                place.box.x, place.box.y = x, place.y
        x += wide + between
    edges = {}
    for ends, chain in chains.items():
        first, *passing, last = chain
        assert first.box is not None
        assert last.box is not None
        points = [(first.box.x + first.box.width, first.middle)]
        for place in passing:
            left = lefts[where[id(place)]]
            points += [(left, place.middle), (left + widths[where[id(place)]], place.middle)]
        edges[ends] = [*points, (last.box.x, last.middle)]
    height = max((place.y + place.height for column in columns for place in column), default=0.0)
    return Layout(boxes, edges, max(0.0, x - between), height)
