"""`dagresume prune`: keeps a database small."""

import re
from dataclasses import asdict
from datetime import timedelta
from typing import Annotated, Any, Final

import typer

from dagresume import words
from dagresume.cli.command import DEFAULT_DB, FAILED, Command, Db, Debug, Here, Json, Problem, commands
from dagresume.cli.engines import file_of, opened, work
from dagresume.cli.screen import clean, line, print_json, say, warn
from dagresume.clock import SystemClock
from dagresume.errors import InputError
from dagresume.forgetting import compact
from dagresume.retention import Pruned

__all__ = ["group"]

group = commands()
_UNITS: Final = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")


def term(option: str, text: str) -> timedelta:
    """Give the time that a word means: 7d, 12h, 30m, 90s, 2w, or plain seconds."""
    found = _DURATION.fullmatch(text.strip().lower())
    unit = _UNITS.get(found[2] or "s") if found else None
    if found is None or unit is None:
        raise Problem(f"{option} {text!r}: a time as in 7d, 12h, 30m or 90s")
    try:
        return timedelta(seconds=float(found[1]) * unit)
    except OverflowError:
        raise Problem(f"{option} {text!r}: more than a thousand years ago") from None


@group.command("prune", cls=Command)
def prune(
    older_than: Annotated[
        str,
        typer.Option(
            "--older-than",
            metavar="TIME",
            help="Completed, cancelled and rolled back runs that old.",
        ),
    ] = "7d",
    failed_older_than: Annotated[
        str,
        typer.Option("--failed-older-than", metavar="TIME", help="Failed runs that old."),
    ] = "30d",
    status: Annotated[
        list[str] | None, typer.Option("--status", help="Only runs with this status. May be repeated.")
    ] = None,
    workflow: Annotated[str | None, typer.Option("--workflow", help="Only runs of this workflow.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    vacuum: Annotated[
        bool,
        typer.Option(
            "--vacuum", help="Then write the file anew without free space; nobody may use it meanwhile."
        ),
    ] = False,
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Delete runs that ended long ago, with all that belongs to them; what may go on is never touched."""
    terms = term("--older-than", older_than), term("--failed-older-than", failed_older_than)
    file = file_of(db)
    if vacuum and (dry_run or file is None):
        raise Problem("--vacuum needs a database file and rewrites it: not with --dry-run or a server")

    async def ask() -> Pruned:
        async with opened(db) as engine:
            return await engine.prune(
                older_than=terms[0],
                failed_older_than=terms[1],
                status=status or None,
                workflow=workflow,
                dry_run=dry_run,
            )

    try:
        pruned = work(ask)
    except InputError as error:
        raise Problem(f"--{str(error).rstrip('.')}") from None
    back = compact(str(file.absolute()), SystemClock()) if vacuum and file is not None else 0
    if as_json:
        print_json(_as_pruned(pruned, back))
    else:
        _report(pruned, back, Here(db), vacuum=vacuum)
    raise typer.Exit(FAILED if pruned.left else 0)


def _report(pruned: Pruned, back: int, here: Here, *, vacuum: bool) -> None:
    say(clean(str(pruned)))
    if vacuum:
        say(f"the file was written anew: {words.size(back)} more given back to the disk")
    elif not pruned.dry_run and pruned.free > max(pruned.size // 4, 1 << 20):
        command = here.command("prune", "--vacuum")
        say(f"the free space is used for the next runs; `{command}` gives it back, when nobody uses the file")
    for left in pruned.left:
        warn(("left: ", "yellow"), line(left, 500))


def _as_pruned(pruned: Pruned, back: int) -> dict[str, Any]:
    return asdict(pruned) | {"given_back": pruned.given_back + back}
