"""`dagresume cancel`: a person stops a run for good."""

import asyncio
from typing import Annotated

import typer

from dagresume.cli.command import (
    DEFAULT_DB,
    REFUSED,
    Command,
    Db,
    Debug,
    Json,
    Problem,
    RunId,
    commands,
)
from dagresume.cli.engines import opened, resolve, work
from dagresume.cli.screen import print_json, say
from dagresume.cli.summary import as_run, print_next, status_line
from dagresume.cli.targets import here_of
from dagresume.events import RunStatus
from dagresume.views import RunInfo

__all__ = ["group"]

group = commands()


@group.command("cancel", cls=Command)
def cancel(
    run: RunId,
    by: Annotated[str, typer.Option("--by", metavar="NAME", help="Who cancels it; kept with the run.")] = "",
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Cancel a run; it never resumes by itself after that."""

    async def ask() -> tuple[RunInfo, RunInfo]:
        async with opened(db, run=run) as engine:
            run_id = await resolve(engine, run, db)
            before = await engine.get(run_id)
            if not before.status.final:
                await engine.cancel(run_id, by)
            after = await engine.get(run_id)
            looks = 20  # the process that drives it looks four times a second
            while looks and after.owner is not None and not after.status.final:
                await asyncio.sleep(0.25)
                after, looks = await engine.get(run_id), looks - 1
            return before, after

    before, after = work(ask)
    if as_json:
        print_json(as_run(after))
    if after.status.final and after.status is not RunStatus.CANCELLED:
        when = "already" if before.status.final else "by now"
        raise Problem(f"run {after.run_id} is {after.status} {when}; nothing was cancelled", REFUSED)
    if after.status is RunStatus.ROLLING_BACK:
        raise Problem(f"run {after.run_id} is being rolled back; that is not cancelled", REFUSED)
    if as_json:
        return
    if before.status is RunStatus.CANCELLED:
        say(f"run {after.run_id} was cancelled before; nothing was changed")
    elif after.status is RunStatus.CANCELLED:
        say(*status_line(after.run_id, after.workflow, after.status, None))
        print_next(after.run_id, after.status, None, here_of(db))
    else:
        owner = after.owner or "its process"
        say(f"run {after.run_id}: {owner} was asked to cancel it; it is {after.status} so far")
