"""`dagresume doctor` and `dagresume backup`: is the database sound, and a copy of it. They need no code."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from dagresume.backup import Backup, backup
from dagresume.cli.command import DEFAULT_DB, FAILED, Command, Db, Debug, Here, Json, commands
from dagresume.cli.engines import sqlite_file
from dagresume.cli.screen import clean, print_json, say
from dagresume.doctor import Finding, Severity, examine, sound
from dagresume.findings import in_bytes
from dagresume.rebuild import LEFT_OUT, Change, rebuild
from dagresume.words import counted

__all__ = ["group"]

group = commands()
MOST: Final = 20  # findings of one kind that are shown
STYLES: Final = {Severity.PROBLEM: ("× ", "bold red"), Severity.NOTE: ("· ", "dim")}


@group.command("doctor", cls=Command)
def doctor(
    rebuild_rows: Annotated[
        bool,
        typer.Option("--rebuild", help="Make the rows of all runs again from the journal, and nothing else."),
    ] = False,
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Look at a database in any state: what is wrong, where, and what mends it.

    Nothing is written, unless --rebuild says so. Exit code 1: something needs you.
    """
    path = sqlite_file(db)
    changes = rebuild(path) if rebuild_rows else []
    findings = examine(path)
    here = Here(db)
    if as_json:
        told = {
            "path": str(path),
            "sound": sound(findings),
            "findings": [_as_data(f, here) for f in findings],
        }
        print_json(told | ({"rebuilt": [change._asdict() for change in changes]} if rebuild_rows else {}))
    else:
        if rebuild_rows:
            _tell_changes(changes)
        _tell(path, findings, here)
    if not sound(findings):
        raise typer.Exit(FAILED)


@group.command("backup", cls=Command)
def backup_(
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="The file to make.", show_default=False)],
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier copy there.")] = False,
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Copy a database with its files while it is in use.

    The copy is verified and durable before it has its name. What was running is interrupted in it: where the
    original is gone, resume goes on from there.
    """
    made = backup(sqlite_file(db), dest, force=force)
    if as_json:
        print_json(asdict(made))
    else:
        _tell_backup(made)
    if made.findings:
        raise typer.Exit(FAILED)


def _tell(path: Path, findings: Sequence[Finding], here: Here) -> None:
    for finding in _shown(findings):
        say(STYLES[finding.severity], clean(here.completed(str(finding))))
    for kind, count in Counter(finding.kind for finding in findings).items():
        if count > MOST:
            say((f"  … {count - MOST} more of kind {kind}; --json lists all", "dim"))
    if any(re.search("`dagresume (resume|retry|rollback) ", finding.cure) for finding in findings):
        told = "resume, retry and rollback need the code of the runs: --app TARGET, or DAGRESUME_APP"
        say((f"  ({told})", "dim"))
    wrong = sum(finding.severity is Severity.PROBLEM for finding in findings)
    if wrong:
        say((f"{clean(str(path))}: {counted(wrong, 'thing')} need{'s'[: wrong == 1]} you.", "bold"))
    else:
        say(f"{clean(str(path))}: nothing is wrong.")


def _shown(findings: Sequence[Finding]) -> Iterator[Finding]:
    seen: Counter[str] = Counter()
    for finding in findings:
        seen[finding.kind] += 1
        if seen[finding.kind] <= MOST:
            yield finding


def _tell_changes(changes: Sequence[Change]) -> None:
    for change in changes:
        say(f"run {clean(change.run_id)}: {clean(str(change))}: mended")
    told = f"{counted(len(changes), 'column')} changed" if changes else "nothing was to be changed"
    say(f"The rows of all runs were made again from the journal: {told}.")
    say((f"Not in the journal, left as they are: {', '.join(LEFT_OUT)}.", "dim"))


def _tell_backup(made: Backup) -> None:
    runs, files = counted(made.runs, "run"), counted(made.files, "file")
    say(f"{clean(made.path)}: {runs}, {files} beside it, {in_bytes(made.size)}, verified.")
    if made.interrupted:
        told = f"{counted(len(made.interrupted), 'run')} under way: interrupted in the copy."
        say((f"{told} Resume them from it only if the original is gone.", "dim"))
    here = Here(made.path)
    for finding in made.findings:
        say(STYLES[finding.severity], clean(f"so in the original too: {here.completed(str(finding))}"))


def _as_data(finding: Finding, here: Here) -> dict[str, str]:
    return asdict(finding) | {"cure": here.completed(finding.cure)}
