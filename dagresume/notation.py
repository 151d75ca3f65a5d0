"""A drawing as text: Mermaid and DOT for other programs, lines for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from dagresume.drawing import Drawing, Figure
from dagresume.layout import layers
from dagresume.svg import COLOURS

__all__ = ["depths", "dot", "mermaid"]

_MERMAID: Final[Mapping[str, tuple[str, str]]] = {
    "map": ("[[", "]]"),
    "sub_workflow": ("[[", "]]"),
    "loop": ("[/", "/]"),
    "approval": ("([", "])"),
    "sleep": ("([", "])"),
    "event": ("([", "])"),
}
_PLAIN: Final = ("[", "]")
_DOT: Final[Mapping[str, str]] = {
    "map": "box3d",
    "sub_workflow": "doubleoctagon",
    "loop": "parallelogram",
    "approval": "oval",
    "sleep": "oval",
    "event": "oval",
}
_SPECIAL: Final = frozenset('"#&<>`\\|%;')


def mermaid(drawing: Drawing) -> str:
    """Give a Mermaid flowchart, as GitHub and others draw it in Markdown."""
    place = {id_: f"n{n}" for n, id_ in enumerate(drawing.figures)}
    lines = ["flowchart LR"]
    for id_, figure in drawing.figures.items():
        before, after = _MERMAID.get(figure.kind, _PLAIN)
        label = "<br>".join(_mermaid_text(text) for text in _lines(figure))
        lines.append(f'    {place[id_]}{before}"{label}"{after}')
    lines += [f"    {place[one]} --> {place[other]}" for one, other in drawing.edges]
    used: dict[str, list[str]] = {}
    for id_, figure in drawing.figures.items():
        if figure.status is not None:
            used.setdefault(figure.status, []).append(place[id_])
    for status, places in used.items():
        lines.append(f"    classDef {status} stroke:{COLOURS[status][0]},stroke-width:2px")
        lines.append(f"    class {','.join(places)} {status}")
    return "\n".join(lines) + "\n"


def _mermaid_text(text: str) -> str:
    """Give a text as Mermaid's entities: it reads Markdown and HTML in a label."""
    return "".join(f"#{ord(c)};" if c in _SPECIAL or not c.isprintable() else c for c in text)


def dot(drawing: Drawing) -> str:
    """Give a graph in Graphviz' language."""
    lines = [
        f"digraph {_dot_text(drawing.title)} {{",
        "    rankdir=LR;",
        '    node [shape=box, style=rounded, fontname="Helvetica", fontsize=11];',
    ]
    for id_, figure in drawing.figures.items():
        told = [f"label={_dot_text(chr(10).join(_lines(figure)))}"]
        if figure.kind in _DOT:
            told.append(f"shape={_DOT[figure.kind]}")
        if figure.status is not None:
            told.append(f'color="{COLOURS[figure.status][0]}"')
        lines.append(f"    {_dot_text(id_)} [{', '.join(told)}];")
    lines += [f"    {_dot_text(one)} -> {_dot_text(other)};" for one, other in drawing.edges]
    return "\n".join([*lines, "}", ""])


def _dot_text(text: str) -> str:
    """Give a quoted string: a backslash is one, a line end is \\n, a control is left out."""
    kept = "".join(c for c in text if c.isprintable() or c == "\n")
    escaped = kept.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _lines(figure: Figure) -> Iterator[str]:
    yield figure.id if figure.idempotent else f"{figure.id} ◇"
    if figure.note:
        yield figure.note


def depths(drawing: Drawing) -> dict[str, int]:
    """Give the layer of each box, from 0."""
    return layers({id_: figure.parents for id_, figure in drawing.figures.items()})
