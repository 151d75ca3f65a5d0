"""`dagresume rollback`: shows what will be undone and what cannot, asks, and undoes it."""

import asyncio
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import typer

from dagresume import words
from dagresume.cli.command import (
    DEFAULT_DB,
    FAILED,
    INTERRUPTED,
    REFUSED,
    Apps,
    Command,
    Db,
    Debug,
    Here,
    Json,
    Problem,
    RunId,
    commands,
)
from dagresume.cli.engines import finished, opened, resolve, work
from dagresume.cli.progress import watching
from dagresume.cli.screen import clean, print_json, rows, say
from dagresume.cli.summary import as_failure, print_failures, print_next, status_line
from dagresume.cli.targets import apps, workflows
from dagresume.engine import Engine
from dagresume.errors import Irreversible, RolledBack
from dagresume.events import UNDO_FAILED_REASON, NodeStatus, RunStatus
from dagresume.results import RunResult
from dagresume.reverse import UndoPlan
from dagresume.views import RunInfo
from dagresume.workflow import Workflow

__all__ = ["group"]

group = commands()
SHOWN = 50  # paths of a list, in words


class _Look(NamedTuple):
    """A run before it is rolled back."""

    info: RunInfo
    plan: UndoPlan
    done: bool = False  # it was rolled back before, as far as is asked now

    @property
    def goes_on(self) -> bool:
        return self.info.status is RunStatus.ROLLING_BACK


@group.command("rollback", cls=Command)
def rollback(
    run: RunId,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="PATH", help="Keep this node, and undo only what is below it."),
    ] = None,
    accept: Annotated[
        bool,
        typer.Option("--accept-irreversible", help="Undo the rest although some of it cannot be undone."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    app: Apps = None,
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Undo what a run has done, the last first; with --to only what is below a path."""
    known = workflows(apps(app))
    before = work(partial(_look, db, known, run, to))
    run_id = before.info.run_id
    if not before.done:
        if not as_json:
            _print_plan(before.plan)
        _agree(
            before, accept=accept, yes=yes, asks=not as_json and sys.stdin.isatty() and sys.stdout.isatty()
        )

    async def begin(engine: Engine) -> tuple[str, asyncio.Task[RunResult]]:
        return run_id, asyncio.create_task(engine.rollback(run_id, to, accept_irreversible=accept))

    result = work(partial(finished, opened(db, known), begin, partial(watching, quiet=as_json)))
    after = work(partial(_look, db, known, run_id, None)).info
    undone = [p for p in before.plan.paths if after.nodes[p].status is NodeStatus.COMPENSATED]
    if as_json:
        print_json(_as_rollback(result, undone, before.plan))
    else:
        _report(result, undone, before, Here(db, tuple(app or ())))
    raise typer.Exit(_code(result))


async def _look(db: str, known: Sequence[Workflow], run: str, to: str | None) -> _Look:
    async with opened(db, known, run=run) as engine:
        run_id = await resolve(engine, run, db)
        info = await engine.get(run_id)
        try:
            return _Look(info, await engine.plan_rollback(run_id, to))
        except RolledBack:
            return _Look(info, UndoPlan(), done=True)


def _print_plan(plan: UndoPlan) -> None:
    if plan.paths:
        say(("Undone, in this order:", "bold"))
        rows(("", "path"), [(str(n), path) for n, path in enumerate(plan.paths[:SHOWN], 1)])
        _and_more(plan.paths)
    else:
        say("There is nothing to undo.")
    for paths, told in (
        (plan.irreversible, "Cannot be undone (not idempotent, no compensate=), left as it is:"),
        (plan.uncertain, "Nobody knows whether it took effect, left as it is:"),
    ):
        if paths:
            say("")
            say((told, "bold"))
            for path in paths[:SHOWN]:
                say(f"  {clean(path)}")
            _and_more(paths)
    say("")


def _and_more(paths: Sequence[str]) -> None:
    if len(paths) > SHOWN:
        say(f"  and {len(paths) - SHOWN:,} more")


def _agree(before: _Look, *, accept: bool, yes: bool, asks: bool) -> None:
    """Go on only with a person's word: the run never resumes after this."""
    plan = before.plan
    if (plan.irreversible or plan.uncertain) and not (accept or before.goes_on):
        raise Irreversible(before.info.run_id, plan.irreversible, plan.uncertain)
    if yes:
        return
    if not asks:
        told = words.counted(len(plan.paths), "path")
        raise Problem(f"{told} would be undone, and the run does not resume after that: add --yes.", REFUSED)
    if not typer.confirm("Undo this? The run does not resume after that."):
        raise Problem("nothing was changed", REFUSED)


def _report(result: RunResult, undone: Sequence[str], before: _Look, here: Here) -> None:
    say(*status_line(result.run_id, result.workflow, result.status, result.reason))
    if before.done:
        say("  it was rolled back before; nothing was changed")
        return
    say(f"  {len(undone):,} of {words.counted(len(before.plan.paths), 'path')} undone")
    failures = {p: f for p, f in result.failures.items() if f.reason == UNDO_FAILED_REASON}
    if failures:
        say("")
        print_failures(failures, here, result.run_id)
    print_next(result.run_id, result.status, result.reason, here)


def _as_rollback(result: RunResult, undone: Iterable[str], plan: UndoPlan) -> dict[str, Any]:
    return {
        "run_id": result.run_id,
        "workflow": result.workflow,
        "status": result.status,
        "reason": result.reason,
        "undone": list(undone),
        "irreversible": list(plan.irreversible),
        "uncertain": list(plan.uncertain),
        "failures": {path: as_failure(failure) for path, failure in result.failures.items()},
    }


def _code(result: RunResult) -> int:
    if result.status is RunStatus.ROLLED_BACK:
        return 0
    return FAILED if result.reason == UNDO_FAILED_REASON else INTERRUPTED
