"""`dagresume export` and `dagresume import`: whole runs as lines of JSON. They need no code."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TextIO

import typer

from dagresume.cli.command import DEFAULT_DB, Command, Db, Debug, Here, Json, Problem, commands
from dagresume.cli.engines import opened, resolve, sqlite_file, work
from dagresume.cli.screen import clean, print_json, say
from dagresume.transfer import Imported, export_runs, import_runs
from dagresume.words import counted

__all__ = ["group"]

group = commands()


@group.command("export", cls=Command)
def export(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Which: ids, their beginnings, or `last`. Else --all.",
            show_default=False,
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All runs, the oldest first.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Into this file, which is not to be there."),
    ] = None,
    db: Db = DEFAULT_DB,
    debug: Debug = False,
) -> None:
    """Write runs as JSON Lines: all events with all outputs, to look at, keep or import elsewhere.

    Inputs and outputs stand there as they are stored, secrets among the inputs too: without them no resume
    could go on. Files of artifacts are left out; `backup` copies them.
    """
    if bool(runs) == every:
        raise Problem("name the runs to export, or give --all")
    path = sqlite_file(db)

    async def ask() -> list[str]:
        async with opened(db, run=None if not runs else runs[0]) as engine:
            return [await resolve(engine, run, db) for run in runs or ()]

    wanted = work(ask) if runs else None
    if not path.is_file():
        raise Problem(f"there is no database {path}")
    if output is None:
        with contextlib.suppress(BrokenPipeError):  # who reads it has seen enough
            for text in export_runs(path, wanted):
                sys.stdout.write(text)
            sys.stdout.flush()
        return
    with _made(output) as file:
        file.writelines(export_runs(path, wanted))


@contextlib.contextmanager
def _made(output: Path) -> Iterator[TextIO]:
    """Give a new file, which is there when all of it is."""
    draft = output.with_name(f".{output.name}.draft")
    try:
        if output.exists():
            raise Problem(f"--output {output}: it is there already")
        made = os.open(draft, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)  # for its owner alone
        with os.fdopen(made, "w", encoding="utf-8") as file:
            yield file
        draft.replace(output)
    except OSError as error:
        raise Problem(f"--output {output}: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)


@group.command("import", cls=Command)
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What export wrote; `-`: standard input.")],
    skip_existing: Annotated[
        bool, typer.Option("--skip-existing", help="Pass over runs that are there already.")
    ] = False,
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Put exported runs into a database, which is made if it is not there.

    Each run comes in whole or not at all. One that was under way is interrupted here, and resume goes on with
    it: do that only where the original is gone, or two would do the same work.
    """
    path = sqlite_file(db)
    with _opened(file) as (name, lines):

        async def make() -> None:
            async with opened(db, create=True):
                pass

        work(make)
        done = import_runs(path, lines, source=name, skip_existing=skip_existing)
    if as_json:
        print_json([_as_data(found) for found in done])
        return
    for found in done:
        events = counted(found.events, "event")
        say(f"{clean(found.run_id)} of {clean(found.workflow)}: {found.status}, {events}")
    say(f"{counted(len(done), 'run')} imported into {clean(db)}.")
    if any(found.status in {"interrupted", "failed", "waiting"} for found in done):
        say((f"What is not completed goes on with: {Here(db).command('resume', 'RUN')} --app TARGET", "dim"))


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[tuple[str, TextIO]]:
    if str(file) == "-":
        yield "<stdin>", sys.stdin
        return
    try:
        with file.open(encoding="utf-8") as lines:
            yield str(file), lines
    except UnicodeDecodeError as error:
        raise Problem(f"{file}: this is no text in UTF-8 ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise Problem(f"{file}: {error.strerror or error}") from error


def _as_data(found: Imported) -> dict[str, object]:
    return found._asdict()
