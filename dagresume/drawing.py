"""A workflow, or a run of it, as it is drawn: boxes with statuses and counts; no code is needed.

`Drawing.of` makes it from a stored definition; `folded` draws what is alike as one where there is too much.
How it looks is said elsewhere: `svg`, and `notation` for Mermaid, DOT and the terminal.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from dagresume import words
from dagresume.events import NodeStatus
from dagresume.graphs import unfolded
from dagresume.layout import layers
from dagresume.overview import Overview
from dagresume.views import NodeInfo

__all__ = ["MOST_BOXES", "Drawing", "Figure"]

MOST_BOXES: Final = 150
"""With more boxes than this, those of one layer whose ids begin alike are drawn as one."""
_STEM: Final = re.compile(r"[\W_]*\d+$")
_WORST: Final = (
    "failed", "interrupted", "upstream_failed", "waiting", "running", "cancelled", "pending", "skipped",
    "compensated", "completed",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Figure:
    """A box. `kind`: function, map, sub_workflow, loop, approval, sleep or event. `status` None: of no run.

    `counts`: how many items, rounds or folded nodes have which status, `total` how many there are or will be,
    if that is known. `members`: the ids of the nodes that it stands for.
    """

    id: str
    kind: str
    parents: tuple[str, ...]
    idempotent: bool = True
    status: str | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    total: int | None = None
    inside: int = 0
    members: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """What stands under its id: how far it is, or what it is."""
        if len(self.members) > 1:
            told = words.counted(len(self.members), "node")
            return f"{told}: {self._counted()}" if self.status is not None else told
        if self.counts:
            return self._counted()
        what = words.KINDS.get(self.kind, "")
        if self.inside:
            what = f"{what} of {words.counted(self.inside, 'node')}"
        return ", ".join(filter(None, (what, self.status)))

    def _counted(self) -> str:
        done = self.counts.get("completed", 0)
        total = self.total if self.total is not None else sum(self.counts.values())
        more = [f"{n:,} {name}" for name in _WORST if name != "completed" and (n := self.counts.get(name))]
        rest = [each for each in more if not each.endswith(" pending")]
        return ", ".join([f"{done:,} of {total:,}", *rest])


@dataclass(frozen=True, slots=True)
class Drawing:
    """A graph to be drawn; `figures` by id, parents before children. `title`: one line above it."""

    title: str
    figures: Mapping[str, Figure]

    @classmethod
    def of(cls, definition: str, run: Overview | None = None) -> Drawing:
        """Give the drawing of a stored definition, with the statuses of a run of it."""
        told = unfolded(definition)
        figures = {node["id"]: _figure(node, run) for node in told["nodes"]}
        title = f"{told['workflow']} {told['version']}"
        if run is not None:
            title = f"{run.info.workflow}: {run.info.status} ({run.info.run_id})"
        return cls(title, _sorted(figures))

    @property
    def edges(self) -> list[tuple[str, str]]:
        """The edges, each once: (parent, child)."""
        return [(parent, figure.id) for figure in self.figures.values() for parent in figure.parents]

    def folded(self, most: int = MOST_BOXES) -> Drawing:
        """Give a drawing with fewer boxes if there are more than `most`: nodes of one layer whose ids differ
        in a number at their end become one, and so do stretches of such nodes one after the other.
        """
        if len(self.figures) <= most:
            return self
        level = layers({id_: figure.parents for id_, figure in self.figures.items()})
        beside = self._merged({id_: f"{level[id_]}\0{_stem(id_)}" for id_ in self.figures})
        return beside if len(beside.figures) <= most else beside._merged(beside._stretches())

    def _stretches(self) -> dict[str, str]:
        """Give one name to figures that follow each other and nothing else, and whose ids begin alike."""
        children = Counter(parent for parent, _ in self.edges)
        name: dict[str, str] = {}
        for id_, figure in self.figures.items():
            only = figure.parents[0] if len(figure.parents) == 1 else None
            follows = only is not None and children[only] == 1 and _stem(only) == _stem(id_)
            name[id_] = name[only] if follows and only is not None else id_
        return name

    def _merged(self, name: Mapping[str, str]) -> Drawing:
        groups: dict[str, list[Figure]] = {}
        for id_, figure in self.figures.items():
            groups.setdefault(name[id_], []).append(figure)
        new_id = {key: _group_id(figures) for key, figures in groups.items()}
        made = {}
        for key, figures in groups.items():
            above = {new_id[name[parent]]: None for figure in figures for parent in figure.parents}
            above.pop(new_id[key], None)
            made[new_id[key]] = _as_one(new_id[key], figures, tuple(above))
        return Drawing(self.title, _sorted(made))


def _sorted(figures: Mapping[str, Figure]) -> dict[str, Figure]:
    """Give figures with parents before children."""
    children: dict[str, list[str]] = {id_: [] for id_ in figures}
    for figure in figures.values():
        for parent in figure.parents:
            children[parent].append(figure.id)
    missing = {id_: len(figure.parents) for id_, figure in figures.items()}
    order = [id_ for id_, count in missing.items() if not count]
    for id_ in order:
        for child in children[id_]:
            missing[child] -= 1
            if not missing[child]:
                order.append(child)
    return {id_: figures[id_] for id_ in order}


def _stem(id_: str) -> str:
    return _STEM.sub("", id_.removesuffix("…"))


def _group_id(figures: Sequence[Figure]) -> str:
    first, last = figures[0], figures[-1]
    if len(figures) == 1:
        return first.id
    return f"{first.id.partition(' … ')[0]} … {last.id.rpartition(' … ')[2]}"


def _as_one(id_: str, figures: Sequence[Figure], parents: tuple[str, ...]) -> Figure:
    if len(figures) == 1:
        return replace(figures[0], parents=parents)
    members = tuple(member for figure in figures for member in figure.members)
    statuses: Counter[str] = Counter()
    for figure in figures:
        if len(figure.members) > 1:
            statuses.update(figure.counts)
        elif figure.status is not None:
            statuses[figure.status] += 1
    status = next((word for word in _WORST if statuses[word]), None)
    kinds = {figure.kind for figure in figures}
    kind = figures[0].kind if len(kinds) == 1 else "function"
    careful = all(figure.idempotent for figure in figures)
    return Figure(id_, kind, parents, careful, status, statuses, len(members), 0, members)


def _figure(node: Mapping[str, Any], run: Overview | None) -> Figure:
    id_ = node["id"]
    body = node.get("body")
    kind = "map" if "for_each" in node else _KINDS.get(node["type"], node["type"])
    made = Figure(
        id_,
        kind,
        tuple(dict.fromkeys(node["parents"])),
        bool(node.get("idempotent")) or kind in _HARMLESS,
        inside=0 if body is None else len(body["nodes"]),
        members=(id_,),
    )
    if run is None:
        return made
    info: NodeInfo | None = run.info.nodes.get(id_)
    status = NodeStatus.PENDING if info is None else info.status
    return replace(made, status=status.value, counts=run.items.get(id_, {}), total=run.totals.get(id_))


_KINDS: Final = {"node": "function", "subworkflow": "sub_workflow", "wait_for": "event"}
_HARMLESS: Final = frozenset({"approval", "sleep", "event", "sub_workflow"})
