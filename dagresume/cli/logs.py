"""`dagresume logs`: what the nodes of a run logged, also while it goes on."""

import asyncio
import sys
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Annotated, Any, Final

import typer

from dagresume import words
from dagresume.cli.command import DEFAULT_DB, INTERRUPTED, Command, Db, Debug, Json, Problem, RunId, commands
from dagresume.cli.engines import opened, resolve, work
from dagresume.cli.screen import clean, line, print_json, say
from dagresume.cli.summary import status_line
from dagresume.clock import to_datetime
from dagresume.engine import Engine
from dagresume.events import RunStatus, names
from dagresume.store import LogLine
from dagresume.views import RunInfo

__all__ = ["group"]

group = commands()
POLL: Final = 0.25  # seconds between two looks at a run that goes on
LEVELS: Final = ("debug", "info", "warning", "error", "critical")
_STYLES: Final = {"warning": "yellow", "error": "bold red", "critical": "bold red", "debug": "dim"}
_GOES_ON: Final = frozenset({RunStatus.RUNNING, RunStatus.PENDING, RunStatus.ROLLING_BACK})


@group.command("logs", cls=Command)
def logs(
    run: RunId,
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="[PATH]",
            help="Only of this path and what is inside it: score, screen[3].",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with the lines to come until the run rests.")
    ] = False,
    level: Annotated[
        str | None,
        typer.Option("--level", metavar="LEVEL", help=f"Only of this level or above: {', '.join(LEVELS)}."),
    ] = None,
    node: Annotated[
        list[str] | None,
        typer.Option("--node", metavar="NODE", help="Only of this node, in all its items. May be repeated."),
    ] = None,
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print what the nodes of a run logged; -f goes on with what comes.

    With --json and -f each line is an object of its own.
    """
    wanted = _Wanted(path, _rank(level), frozenset(node or ()))

    if follow:
        _follow(run, wanted, db, as_json=as_json)
        return

    async def ask() -> list[LogLine]:
        async with opened(db, run=run) as engine:
            run_id = await resolve(engine, run, db)
            await engine.get(run_id, nodes=False)  # an unknown run is an error
            return [one for _, one in await _logged(engine, run_id, 0) if wanted.takes(one)]

    found = work(ask)
    if as_json:
        print_json(list(map(_as_line, found)))
        return
    for one in found:
        _print(one, as_json=False)


def _follow(run: str, wanted: "_Wanted", db: str, *, as_json: bool) -> None:
    async def ask() -> None:
        async with opened(db, run=run) as engine:
            run_id = await resolve(engine, run, db)
            async for one in _followed(engine, run_id):
                if wanted.takes(one):
                    _print(one, as_json=as_json)
                    sys.stdout.flush()
            if not as_json:
                _say_how_it_is(await engine.get(run_id, nodes=False))

    try:
        work(ask, "no longer watching; the run is left alone")
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _rank(level: str | None) -> int:
    if level is None:
        return 0
    word = {"warn": "warning"}.get(level.strip().lower(), level.strip().lower())
    if word not in LEVELS:
        raise Problem(f"--level {line(level, 40)!r}: one of {', '.join(LEVELS)}")
    return LEVELS.index(word)


class _Wanted:
    """Which lines a person asked for."""

    def __init__(self, path: str | None, rank: int, nodes: frozenset[str]) -> None:
        self.path, self.rank, self.nodes = path, rank, nodes

    def takes(self, one: LogLine) -> bool:
        path = one.path or ""
        if one.level in LEVELS and LEVELS.index(one.level) < self.rank:
            return False
        if self.path is not None and not _is_inside(path, self.path):
            return False
        return not self.nodes or _names(path) in self.nodes or path.partition("[")[0] in self.nodes


def _is_inside(path: str, around: str) -> bool:
    """Say whether a path is another one, an item of it, or inside it: in `score` is `score[3]`, not
    `scores`.
    """
    return path == around or (path.startswith(around) and path[len(around)] in "[/")


def _names(path: str) -> str:
    try:
        return names(path)
    except ValueError:
        return path


async def _logged(engine: Engine, run_id: str, after: int) -> list[tuple[int, LogLine]]:
    found: list[tuple[int, LogLine]] = []
    while page := await engine.logs(run_id, after=found[-1][0] if found else after):
        found += page
    return found


async def _followed(engine: Engine, run_id: str) -> AsyncIterator[LogLine]:
    """Give all lines and those to come, until the run rests; what was logged last is there by then."""
    after = 0
    while True:
        goes_on = (await engine.get(run_id, nodes=False)).status in _GOES_ON
        for number, one in await _logged(engine, run_id, after):
            after = number
            yield one
        if not goes_on:
            return
        await asyncio.sleep(POLL)


def _say_how_it_is(info: RunInfo) -> None:
    say(*status_line(info.run_id, info.workflow, info.status, info.reason))


def _print(one: LogLine, *, as_json: bool) -> None:
    if as_json:
        print_json(_as_line(one), indent=None)
        return
    who = "" if one.path is None else clean(one.path)
    again = f" (attempt {one.attempt})" if (one.attempt or 1) > 1 else ""
    level = (f"{clean(one.level):<7}", _STYLES.get(one.level, ""))
    say((words.local_time(_at(one)), "dim"), " ", level, f" {who}{again}: {clean(one.line)}")


def _as_line(one: LogLine) -> dict[str, Any]:
    return {"path": one.path, "attempt": one.attempt, "at": _at(one), "level": one.level, "line": one.line}


def _at(one: LogLine) -> datetime:
    return to_datetime(one.at)
