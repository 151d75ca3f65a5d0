"""`dagresume recover` and `audit`: what goes on by itself after a crash, and what was decided about it."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from dagresume import words
from dagresume.cli.command import (
    DEFAULT_DB,
    FAILED,
    Apps,
    Command,
    Concurrency,
    Db,
    Debug,
    Here,
    Json,
    Limits,
    commands,
)
from dagresume.cli.engines import opened, resolve, work
from dagresume.cli.screen import STYLES, clean, line, print_json, rows, say
from dagresume.cli.targets import apps, limits_of, workflows
from dagresume.events import AUDITED, AUTO_RESUME, AUTO_RESUME_SKIPPED, Event
from dagresume.recovery import RecoveryOutcome

__all__ = ["group"]

group = commands()
_ACTIONS = {"resumed": "completed", "skipped": "interrupted", "cancelled": "cancelled", "failed": "failed"}


@group.command("recover", cls=Command)
def recover(
    app: Apps = None,
    limit: Limits = None,
    concurrency: Concurrency = 64,
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Go on with runs whose process died, where their workflow says so; say of the others why not."""
    known = workflows(apps(app))

    async def ask() -> list[RecoveryOutcome]:
        limits = limits_of(limit)
        async with opened(db, known, limits=limits, concurrency=concurrency) as engine:
            return await engine.recover()

    outcomes = work(ask)
    if as_json:
        print_json([asdict(outcome) for outcome in outcomes])
    elif not outcomes:
        say("No run has stopped without an end.")
    else:
        here = Here(db, tuple(app or ()), tuple(limit or ()))
        for outcome in outcomes:
            _print(outcome, here)
    raise typer.Exit(FAILED if any(outcome.action == "failed" for outcome in outcomes) else 0)


def _print(outcome: RecoveryOutcome, here: Here) -> None:
    style = STYLES.get(_ACTIONS[outcome.action], "")
    ended = f", now {outcome.status}" if outcome.action == "resumed" and outcome.status else ""
    say(f"run {clean(outcome.run_id)} {clean(outcome.workflow)}: ", (outcome.action, style), ended)
    told = here.completed(outcome.message)
    if outcome.reason == "not_registered":
        told = "its code is not known here: name it with --app package.module:workflow or --app path/flow.py"
    say(f"  {line(told, 1000)}")


@group.command("audit", cls=Command)
def audit(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="A run's id, the beginning of it, or `last`; all runs without it.",
            show_default=False,
        ),
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option("--type", metavar="TYPE", help="Only events of this type. May be repeated."),
    ] = None,
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List what was decided about runs: taken up, by whom, ended, resumed by itself or not, and why."""

    async def ask() -> list[Event]:
        async with opened(db, run=run) as engine:
            run_id = None if run is None else await resolve(engine, run, db)
            return [event async for event in engine.events(run_id, kinds=kind or AUDITED)]

    found = work(ask)
    if as_json:
        print_json([_as_event(event) for event in found])
    elif found:
        rows(("time", "run", "event", "why"), map(_row, found))
    else:
        say("Nothing of this type is recorded.")


def _row(event: Event) -> Sequence[str]:
    why = event.data.get("message") or words.run_reason(event.reason) if event.reason else ""
    if event.kind == AUTO_RESUME:
        why = f"attempt {event.data.get('attempt')} of {event.data.get('max_attempts')}, {event.reason}"
    elif event.kind == AUTO_RESUME_SKIPPED:
        why = f"{event.reason}: {why}"
    elif not why:
        why = str(event.data.get("by", ""))
    return words.local_time(event.at), event.run_id, event.kind, line(str(why), 300)


def _as_event(event: Event) -> dict[str, Any]:
    return {
        "seq": event.seq, "run_id": event.run_id, "kind": event.kind, "path": event.path,
        "at": event.at, "reason": event.reason, "data": event.data,
    }  # fmt: skip
