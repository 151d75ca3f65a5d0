"""SVG that can be put into any document: one file, no script, no font, light or dark as its reader is.

Colours and shapes of statuses are those of the page: a status is a shape and a word first, then a colour.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Final
from xml.sax.saxutils import escape, quoteattr

from dagresume.drawing import Drawing, Figure
from dagresume.layout import Box, laid_out

__all__ = ["COLOURS", "attributes", "document", "graph_svg", "histogram_svg", "text_width"]

COLOURS: Final[Mapping[str, tuple[str, str]]] = {
    "ink": ("#1a1b1e", "#ececea"),
    "ink2": ("#4f5259", "#b3b6bd"),
    "ink3": ("#696c74", "#92959d"),
    "page": ("#ffffff", "#141517"),
    "edge": ("#b9bcc4", "#4a4d55"),
    "completed": ("#1c7549", "#56bd87"),
    "running": ("#1b5cc8", "#6fa6ff"),
    "waiting": ("#7438b8", "#bd8ff2"),
    "failed": ("#c02626", "#ff7a72"),
    "interrupted": ("#8f5400", "#e2a33f"),
    "upstream_failed": ("#7a5560", "#c49aa6"),
    "compensated": ("#0f6f7a", "#52bccb"),
    "pending": ("#696c74", "#92959d"),
    "skipped": ("#696c74", "#92959d"),
    "cancelled": ("#4f5259", "#b3b6bd"),
}
"""Each colour on light and on dark ground; contrast with the page at least 4.5 to 1, for text and shapes."""

_SHAPES: Final[Mapping[str, str]] = {
    "pending": '<circle r="6" class="ring" stroke-dasharray="2 2"/>',
    "running": '<circle r="7"/><path class="mark" d="M-2-3.5 3.5 0-2 3.5z"/>',
    "waiting": '<rect x="-6.5" y="-6.5" width="13" height="13" rx="2"/>'
    '<path class="line" d="M-2-3v6M2-3v6"/>',
    "completed": '<circle r="7"/><path class="line" d="M-3 0-1 2.5 3.2-2.5"/>',
    "failed": '<path d="M-3-7h6l4 4v6l-4 4h-6l-4-4v-6z"/><path class="line" d="M-2.5-2.5l5 5M2.5-2.5l-5 5"/>',
    "interrupted": '<path d="M0-7.5 7.5 0 0 7.5-7.5 0z"/>'
    '<path class="line" d="M-2-1.6a2 2 0 1 1 2 2.1v.9M0 3.6v.2"/>',
    "skipped": '<circle r="6" class="ring"/><path class="bare" d="M-3-2.5-.5 0-3 2.5M.5-2.5 3 0 .5 2.5"/>',
    "upstream_failed": '<path class="ring" d="M-3-6.5h6l3.5 3.5v6L3 6.5h-6L-6.5 3v-6z"/>'
    '<path class="bare" d="M3.5 0h-7M-.5-3-3.5 0l3 3"/>',
    "cancelled": '<circle r="6" class="ring"/><rect x="-2.5" y="-2.5" width="5" height="5"/>',
    "compensated": '<circle r="7"/>'
    '<path class="line" d="M3 2.5a2.6 2.6 0 0 0-2.6-2.7H-3M-.8-2.6-3-.2l2.2 2.3"/>',
}
_PAD, _ROW, _ICON, _MARGIN, _TITLE = 12.0, 18.0, 22.0, 16.0, 34.0
_WIDEST: Final = 34  # characters of a label
_ALPHABET: Final = 7.3  # pixels of a character, on average


def text_width(text: str) -> float:
    """Give about how wide a text is, in pixels at 13 px."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return _ALPHABET * (len(text) + 0.8 * wide)


def attributes(**given: object) -> str:
    """Give XML attributes, escaped: `stroke_width=2` is `stroke-width="2"`."""
    return "".join(
        f" {name.rstrip('_').replace('_', '-')}={quoteattr(_clean(str(v)))}" for name, v in given.items()
    )


_NOT_XML: Final = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _clean(text: str) -> str:
    """Replace what XML 1.0 cannot hold."""
    return _NOT_XML.sub("\ufffd", text)


def words(text: str) -> str:
    """Give text as it stands between tags."""
    return escape(_clean(text))


_BASE: Final = """
svg{font:13px ui-sans-serif,system-ui,sans-serif;font-variant-numeric:tabular-nums}
.page{fill:@page}text{fill:@ink}.small{font-size:11.5px;fill:@ink2}.title{font-weight:600}
"""
_HISTOGRAM: Final = ".bar{fill:@running}.axis{stroke:@edge}"


def histogram_svg(title: str, groups: Sequence[tuple[str, Sequence[tuple[str, int]]]]) -> str:
    """Give histograms one below the other; each a name and rows of (what a step is called, how many)."""
    label, longest, row, gap = 74.0, 420.0, 20.0, 34.0
    body = [f'<text class="title"{attributes(x=_MARGIN, y=24)}>{words(title)}</text>']
    y = _TITLE + 6
    for name, steps in groups:
        body.append(f"<text{attributes(x=_MARGIN, y=_px(y + 12))}>{words(name)}</text>")
        y += 20
        most = max((count for _, count in steps), default=1) or 1
        for told, count in steps:
            wide = count / most * longest
            at = attributes(
                x=_px(label), y=_px(y + 3), width=_px(max(wide, 1.5) if count else 0), height=14, rx=2
            )
            body.append(f'<text class="small"{attributes(x=_MARGIN, y=_px(y + 14))}>{words(told)}</text>')
            body.append(f'<rect class="bar"{at}/>')
            beside = attributes(x=_px(label + wide + 6), y=_px(y + 14))
            body.append(f'<text class="small"{beside}>{count:,}</text>')
            y += row
        y += gap - row
    spoken = "; ".join(
        f"{name}: {', '.join(f'{told} {count:,}' for told, count in steps)}" for name, steps in groups
    )
    return document(label + longest + 90, y + _MARGIN, title, spoken, body, _HISTOGRAM)


_GRAPH: Final = """
.box{fill:@page;stroke:@ink3}.edge{fill:none;stroke:@edge;stroke-width:1.5}.tip{fill:@edge}
.icon{fill:currentColor}.ring{fill:@page;stroke:currentColor;stroke-width:1.5}.mark{fill:@page}
.line,.bare{fill:none;stroke:@page;stroke-width:1.7;stroke-linecap:round;stroke-linejoin:round}
.bare{stroke:currentColor}.bar{fill:none;stroke:@edge}
""" + "".join(f".{name}{{color:@{name}}}" for name in _SHAPES) + "".join(
    f".box.{name}{{stroke:@{name}}}" for name in ("failed", "interrupted", "waiting", "running")
)  # fmt: skip
_NAMED: Final = re.compile("@(" + "|".join(sorted(COLOURS, key=len, reverse=True)) + ")")


def document(width: float, height: float, title: str, told: str, body: Iterable[str], style: str = "") -> str:
    """Give a whole SVG document; `title` and `told` are what a screen reader says. In `style` the names of
    colours stand as `@failed`: each rule is written for light and for dark ground, since not every program
    that draws SVG knows variables.
    """
    rules = (_BASE + style).replace("\n", "")
    light, dark = (_NAMED.sub(lambda found, n=n: COLOURS[found[1]][n], rules) for n in (0, 1))  # type: ignore[misc]
    size = attributes(viewBox=f"0 0 {width:.0f} {height:.0f}", width=f"{width:.0f}", height=f"{height:.0f}")
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg"{size} role="img" aria-labelledby="t d">'
        f'<title id="t">{words(title)}</title><desc id="d">{words(told)}</desc>'
        f"<style>{light}@media(prefers-color-scheme:dark){{{dark}}}</style>"
        f'<rect class="page" width="100%" height="100%"/>'
    )
    return "".join([head, *body, "</svg>\n"])


def graph_svg(drawing: Drawing) -> str:
    """Give a drawing as an SVG document."""
    figures = drawing.figures
    boxes = [Box(f.id, _width(f), _height(f)) for f in figures.values()]
    layout = laid_out(boxes, {id_: figure.parents for id_, figure in figures.items()})
    width = max(layout.width, text_width(drawing.title)) + 2 * _MARGIN
    body = [
        f'<text class="title"{attributes(x=_MARGIN, y=24)}>{words(drawing.title)}</text>',
        f'<g transform="translate({_MARGIN:.0f} {_TITLE + 6:.0f})">',
        *(_edge(points) for points in layout.edges.values()),
        *(_box(figure, layout.boxes[figure.id]) for figure in figures.values()),
        "</g>",
    ]
    told = "; ".join(_told(figure) for figure in figures.values())
    return document(width, layout.height + _TITLE + 6 + _MARGIN, drawing.title, told, body, _GRAPH)


def _told(figure: Figure) -> str:
    after = f" after {', '.join(figure.parents)}" if figure.parents else ""
    return f"{figure.id}{after}: {figure.note or figure.kind}"


def _label(figure: Figure) -> str:
    shown = figure.id if len(figure.id) <= _WIDEST else f"{figure.id[: _WIDEST - 1]}…"
    return shown if figure.idempotent else f"{shown} ◇"


def _width(figure: Figure) -> float:
    icon = _ICON if figure.status is not None else 0.0
    return max(84.0, icon + max(text_width(_label(figure)), 0.9 * text_width(figure.note)) + 2 * _PAD)


def _height(figure: Figure) -> float:
    return 2 * _ROW + 10 + (7 if _has_bar(figure) else 0) if figure.note else _ROW + 16


def _has_bar(figure: Figure) -> bool:
    return bool(figure.counts) and bool(figure.total or sum(figure.counts.values()))


def _box(figure: Figure, box: Box) -> str:
    x, y, w, h = box.x, box.y, box.width, box.height
    radius = h / 2 if figure.kind == "approval" else 7
    kind = f"box {figure.status or ''}".strip()
    frames = []
    if figure.kind in {"map", "loop"} or len(figure.members) > 1:
        frames = [_frame(x + 6, y + 6, w, h, radius, kind), _frame(x + 3, y + 3, w, h, radius, kind)]
    frames.append(_frame(x, y, w, h, radius, kind))
    if figure.kind == "sub_workflow":
        frames.append(_frame(x + 3, y + 3, w - 6, h - 6, 5, kind))
    left = x + _PAD
    if figure.status is not None:
        icon = _SHAPES.get(figure.status, _SHAPES["pending"])
        at = f"translate({left + 7:.1f} {y + 8 + _ROW / 2:.1f})"
        frames.append(f"<g{attributes(class_=f'icon {figure.status}', transform=at)}>{icon}</g>")
        left += _ICON
    frames.append(f"<text{attributes(x=_px(left), y=_px(y + 21))}>{words(_label(figure))}</text>")
    if figure.note:
        frames.append(
            f'<text class="small"{attributes(x=_px(left), y=_px(y + 38))}>{words(figure.note)}</text>'
        )
    if _has_bar(figure):
        frames += _bar(figure, x + _PAD, y + h - 10, w - 2 * _PAD)
    return f"<g><title>{words(_told(figure))}</title>{''.join(frames)}</g>"


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _frame(x: float, y: float, w: float, h: float, radius: float, kind: str) -> str:
    return (
        f"<rect{attributes(class_=kind, x=_px(x), y=_px(y), width=_px(w), height=_px(h), rx=_px(radius))}/>"
    )


def _bar(figure: Figure, x: float, y: float, width: float) -> list[str]:
    """Give the bar of a map: a stretch for each status, as long as its share."""
    total = figure.total or sum(figure.counts.values())
    drawn = [f"<rect{attributes(class_='bar', x=_px(x), y=_px(y), width=_px(width), height=4, rx=2)}/>"]
    at = x
    for status in ("completed", *(name for name in figure.counts if name != "completed")):
        share = min(figure.counts.get(status, 0) / total, 1.0) * width
        if share and status != "pending":
            told = attributes(
                class_=f"icon {status}", x=_px(at), y=_px(y), width=_px(max(share, 2)), height=4
            )
            drawn.append(f"<rect{told}/>")
        at += share
    return drawn


def _edge(points: Sequence[tuple[float, float]]) -> str:
    (x, y), *rest = points
    path = [f"M{_px(x)} {_px(y)}"]
    for to_x, to_y in rest:
        if to_y == y:
            path.append(f"H{_px(to_x)}")
        else:
            middle = (x + to_x) / 2
            path.append(f"C{_px(middle)} {_px(y)} {_px(middle)} {_px(to_y)} {_px(to_x)} {_px(to_y)}")
        x, y = to_x, to_y
    tip = f'<path class="tip" d="M{_px(x)} {_px(y)}l-7-3.5v7z"/>'
    return f'<path class="edge" d="{"".join(path)}"/>{tip}'
