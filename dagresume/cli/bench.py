"""`dagresume bench`: what durability costs on this disk."""

import platform
import sqlite3
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from dagresume.bench import Bench, Measure, Waits, measure
from dagresume.cli.command import (
    DEFAULT_DB,
    Command,
    Concurrency,
    Db,
    Debug,
    Json,
    Problem,
    Synchronous,
    commands,
)
from dagresume.cli.engines import file_of, mode_of, work
from dagresume.cli.histogram import Svg, brief, draw, save
from dagresume.cli.screen import clean, print_json, rows, say, warn

__all__ = ["group"]

group = commands()
_FULL: Final = {"seconds": 50.0, "nodes": 1000, "width": 10_000}
_QUICK: Final = {"seconds": 3.0, "nodes": 200, "width": 2000}


@group.command("bench", cls=Command)
def bench(
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder",
            metavar="FOLDER",
            help="The folder to measure in; without it that of the database.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few seconds instead of a minute; the figures are rougher.")
    ] = False,
    concurrency: Concurrency = 64,
    synchronous: Synchronous = "full",
    svg: Svg = None,
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure what durability costs on your disk: a commit, a chain, a fan-out, how long results wait.

    Works in a hidden folder that is gone afterwards; no database of yours is touched.
    """
    place, mode = _place(folder, db), mode_of(synchronous)
    if not as_json:
        told = "a few seconds" if quick else "about a minute"
        warn((f"measuring in {clean(str(place))} for {told}; Ctrl-C ends it", "dim"))
    settings: dict[str, Any] = _QUICK if quick else _FULL
    try:
        found = work(partial(measure, place, **settings, synchronous=mode, concurrency=concurrency))
    except (OSError, sqlite3.Error) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise Problem(f"cannot measure in {place}: {why}. Name another folder with --folder.") from error
    about = {
        "folder": str(place),
        "synchronous": mode,
        "concurrency": concurrency,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
    }
    if svg is not None:
        steps = {name: waits.steps for name, waits in found.waits.items()}
        save("How long results waited to be durable", steps, svg)
    if as_json:
        print_json(about | _as_data(found))
    else:
        _tell(found, about)
    if found.in_memory:
        warn(("warning: ", "yellow"), f"{clean(str(place))} is on no disk: nothing was written through")


def _place(folder: Path | None, db: str) -> Path:
    if folder is None:
        file = None if db == ":memory:" else file_of(db)
        if file is None:
            raise Problem("there is no folder of a database to measure in. Name one with --folder.")
        folder = file.absolute().parent
    if not folder.is_dir():
        raise Problem(f"there is no folder {folder}. Name another one with --folder.")
    return folder.absolute()


# -- people ---------------------------------------------------------------------------------------------


def _tell(found: Bench, about: dict[str, Any]) -> None:
    say(
        f"synchronous {about['synchronous']}, concurrency {about['concurrency']}, Python {about['python']}"
        f" ({found.loop}), SQLite {about['sqlite']};"
    )
    say(f"chains of {found.nodes:,}, fan-outs of {found.width:,}, {found.rounds} rounds")
    say()
    rows(("what one takes", "median", "lowest", "highest", "× sqlite3"), map(_row, found.measures))
    say()
    rows(
        ("a result waits", "p50", "p95", "p99", "p99.9", "longest"),
        ((name, *map(brief, _percentiles(waits))) for name, waits in found.waits.items()),
    )
    for name in (name for name in found.waits if name.startswith("chain")):
        waits = found.waits[name]
        draw(f"{name}: how long {waits.count:,} results waited", waits.steps)


def _row(each: Measure) -> tuple[str, ...]:
    spread = each.seconds
    times = (brief(spread.median), brief(spread.low), brief(spread.high))
    return (each.name, *times, f"{each.commits.median:.2f}" if each.commits else "")


def _percentiles(waits: Waits) -> tuple[float, ...]:
    return waits.p50, waits.p95, waits.p99, waits.p999, waits.max


# -- programs -------------------------------------------------------------------------------------------


def _as_data(found: Bench) -> dict[str, Any]:
    """Give all figures; times in seconds."""
    told = asdict(found)
    for waits in told["waits"].values():
        waits["steps"] = [{"upto": end, "count": count} for end, count in waits["steps"]]
    return told | {"in_memory": found.in_memory}
