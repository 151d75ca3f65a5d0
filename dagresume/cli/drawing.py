"""`dagresume graph`: a workflow, or a run with its statuses, as a picture or as text."""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from dagresume.cli.command import DEFAULT_DB, Command, Db, Debug, Json, Problem, commands
from dagresume.cli.engines import opened, resolve, work
from dagresume.cli.screen import clean, print_json, rows, say, status
from dagresume.cli.targets import one_workflow
from dagresume.definition import describe
from dagresume.drawing import MOST_BOXES, Drawing, Figure
from dagresume.notation import depths, dot, mermaid
from dagresume.svg import graph_svg

__all__ = ["group"]

group = commands()
_MODULE: Final = re.compile(r"[^\W\d][\w.]*(:[\w.]+|\.\w+)")
FORMATS: Final[Mapping[str, Callable[[Drawing], str]]] = {"svg": graph_svg, "mermaid": mermaid, "dot": dot}
SUFFIXES: Final = {
    ".svg": "svg",
    ".mmd": "mermaid",
    ".mermaid": "mermaid",
    ".dot": "dot",
    ".gv": "dot",
    ".txt": "text",
}


@group.command("graph", cls=Command)
def graph(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|TARGET",
            help="A run's id, the beginning of it, or `last`: with its statuses, and without its code. Or a"
            " workflow: path/flow.py or package.module:attribute.",
            show_default=False,
        ),
    ],
    form: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="text|svg|mermaid|dot", help="How it is drawn; else as --output is called."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Into this file instead of the terminal."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help=f"Each node a box, also where there are more than {MOST_BOXES}.")
    ] = False,
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Draw a workflow, or a run with its statuses: for the terminal, as SVG, Mermaid or DOT."""
    chosen = _form(form, output)
    drawing = _of_target(target) if _is_target(target) else _of_run(target, db)
    if as_json:
        print_json({"title": drawing.title, "nodes": list(map(_as_figure, drawing.figures.values()))})
        return
    if not every:
        drawing = drawing.folded()
    if chosen != "text":
        _write(FORMATS[chosen](drawing), output)
    elif output is None:
        _print(drawing)
    else:
        _write(_plain(drawing), output)


def _form(form: str | None, output: Path | None) -> str:
    if form is not None and form not in {"text", *FORMATS}:
        raise Problem(f"--format {form!r}: text, {', '.join(FORMATS)}")
    suffix = None if output is None else output.suffix.lower()
    if form is None and suffix is not None and suffix not in SUFFIXES:
        raise Problem(f"--output {output}: its name says no format; add --format svg, mermaid, dot or text")
    return form or ("text" if suffix is None else SUFFIXES[suffix])


def _is_target(named: str) -> bool:
    return named.endswith(".py") or _MODULE.fullmatch(named) is not None


def _of_target(target: str) -> Drawing:
    return Drawing.of(describe(one_workflow(target).compiled).graph)


def _of_run(run: str, db: str) -> Drawing:
    async def ask() -> Drawing:
        async with opened(db, run=run) as engine:
            seen = await engine.overview(await resolve(engine, run, db))
            return Drawing.of(seen.loaded.graph, seen)

    return work(ask)


def _write(text: str, output: Path | None) -> None:
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Problem(f"--output {output}: {error.strerror or error}") from error


# -- for the terminal -----------------------------------------------------------------------------------


def _print(drawing: Drawing) -> None:
    say((drawing.title, "bold"))
    table = list(_lines(drawing))
    if any(figure.status is not None for figure in drawing.figures.values()):
        rows(("", "node", "status", "", "needs"), table, styled=2)
    else:
        rows(("", "node", "", "needs"), [(a, b, d, e) for a, b, _, d, e in table])
    if any(not figure.idempotent for figure in drawing.figures.values()):
        say("")
        say("◇ not idempotent: runs only once its start is on disk, and is never repeated by itself")


def _plain(drawing: Drawing) -> str:
    lines = ["  ".join(filter(None, row)) for row in _lines(drawing)]
    return clean("\n".join([drawing.title, *lines, ""]), lines=True)


def _lines(drawing: Drawing) -> Iterable[tuple[str, str, str, str, str]]:
    """Give a line for each box: its layer (once), its id, its status, what there is to say, its parents."""
    depth = depths(drawing)
    last = -1
    for id_, figure in sorted(drawing.figures.items(), key=lambda item: depth[item[0]]):
        layer = str(depth[id_] + 1) if depth[id_] != last else ""
        last = depth[id_]
        name = id_ if figure.idempotent else f"{id_} ◇"
        told = "" if figure.status is None else status(figure.status)
        note = (
            figure.note.removesuffix(figure.status or "").rstrip(", ") if not figure.counts else figure.note
        )
        yield layer, name, told, note, _needs(figure.parents)


def _needs(parents: tuple[str, ...], most: int = 4) -> str:
    if len(parents) <= most:
        return ", ".join(parents)
    return f"{', '.join(parents[: most - 1])} and {len(parents) - most + 1:,} more"


def _as_figure(figure: Figure) -> dict[str, Any]:
    told: dict[str, Any] = {"node": figure.id, "kind": figure.kind, "idempotent": figure.idempotent}
    told |= {"needs": list(figure.parents)}
    if figure.status is not None:
        told |= {"status": figure.status, "items": dict(figure.counts) or None, "total": figure.total}
    return told
