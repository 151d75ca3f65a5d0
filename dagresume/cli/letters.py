"""`dagresume approve`, `reject`, `signal` and `resolve`: a person's word to a run. They run nothing.

They need no code either.
"""

import getpass
import json
from typing import Annotated, Any

import typer

from dagresume.cli.command import DEFAULT_DB, Command, Db, Debug, Here, Json, Problem, RunId, commands
from dagresume.cli.engines import opened, resolve, work
from dagresume.cli.screen import clean, print_json, say
from dagresume.engine import Engine
from dagresume.errors import DecisionError
from dagresume.events import NodeStatus
from dagresume.views import RunInfo

__all__ = ["group"]

group = commands()
Path = Annotated[
    str | None,
    typer.Argument(metavar="[PATH]", help="The path; may be left out if one only waits.", show_default=False),
]
By = Annotated[str | None, typer.Option("--by", metavar="NAME", help="Who says so; kept with the run.")]
Comment = Annotated[str, typer.Option("--comment", metavar="TEXT", help="Why; kept with the run.")]


@group.command("approve", cls=Command)
def approve(
    run: RunId,
    path: Path = None,
    by: By = None,
    comment: Comment = "",
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Approve what a run waits for, or that a held path runs again."""
    _decide(run, path, True, by, comment, db, as_json)


@group.command("reject", cls=Command)
def reject(
    run: RunId,
    path: Path = None,
    by: By = None,
    comment: Comment = "",
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Reject what a run waits for: an approval fails; a held path keeps what it gave."""
    _decide(run, path, False, by, comment, db, as_json)


def _decide(
    run: str, path: str | None, yes: bool, by: str | None, comment: str, db: str, as_json: bool
) -> None:
    who = _who(by)

    async def say_so() -> tuple[RunInfo, str]:
        async with opened(db, run=run) as engine:
            run_id = await resolve(engine, run, db)
            at = path or _only_one(await engine.get(run_id))
            await engine.decide(run_id, at, yes, who, comment)
            return await engine.get(run_id), at

    info, at = work(say_so)
    told = "approved" if yes else "rejected"
    _said(info, f"{at} is {told} by {who}", db, as_json, path=at, approved=yes, by=who, comment=comment)


@group.command("signal", cls=Command)
def signal(
    run: RunId,
    event: Annotated[str, typer.Argument(metavar="EVENT", help="Its name.", show_default=False)],
    payload: Annotated[str, typer.Option("--payload", metavar="JSON", help="What comes with it.")] = "null",
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Tell a run that something happened; what waits for it takes the payload, now or later."""
    value = _json("--payload", payload)

    async def tell(engine: Engine, run_id: str) -> None:
        await engine.signal(run_id, event, value)

    info = _told(run, db, tell)
    _said(info, f"the signal {event!r} is kept", db, as_json, event=event, payload=value)


@group.command("resolve", cls=Command)
def resolve_(
    run: RunId,
    path: Annotated[str, typer.Argument(metavar="PATH", help="The uncertain path.", show_default=False)],
    output: Annotated[
        str | None, typer.Option("--output", metavar="JSON", help="It took effect, and this is its output.")
    ] = None,
    failed: Annotated[
        str | None, typer.Option("--failed", metavar="WHY", help="It failed, for this reason.")
    ] = None,
    by: By = None,
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what an uncertain path did; it is not run again then."""
    if (output is None) == (failed is None):
        raise Problem("say either --output JSON (it took effect) or --failed WHY (it did not)")
    value, who = None if output is None else _json("--output", output), _who(by)

    async def tell(engine: Engine, run_id: str) -> None:
        if failed is None:
            await engine.resolve(run_id, path, output=value, by=who)
        else:
            await engine.resolve(run_id, path, failed=failed, by=who)

    info = _told(run, db, tell)
    what = "it failed" if failed is not None else "it took effect"
    _said(info, f"{path}: {what}, says {who}", db, as_json, path=path, output=value, failed=failed, by=who)


# -- pieces ---------------------------------------------------------------------------------------------


def _told(run: str, db: str, tell: Any) -> RunInfo:
    async def do() -> RunInfo:
        async with opened(db, run=run) as engine:
            run_id = await resolve(engine, run, db)
            await tell(engine, run_id)
            return await engine.get(run_id)

    return work(do)


def _said(info: RunInfo, what: str, db: str, as_json: bool, **facts: Any) -> None:
    """Print what was recorded, and how the run goes on."""
    if as_json:
        print_json({"run_id": info.run_id, "status": info.status, **facts})
        return
    say(f"run {info.run_id}: {clean(what)}")
    if info.owner is not None:
        say((f"It goes on in the process that drives it: {clean(info.owner)}.", "dim"))
    else:
        say(("It goes on with ", "dim"), f"`{Here(db).command('resume', info.run_id)}`")


def _only_one(info: RunInfo) -> str:
    """Give the path that waits for a person, if there is just one."""
    asks = [
        node.path
        for node in info.nodes.values()
        if node.status is NodeStatus.WAITING
        and node.reason in {"approval", "held"}
        and _is_innermost(node.path, info)
    ]
    if not asks:
        raise DecisionError(f"run {info.run_id} waits for nobody's word; it is {info.status}.")
    if len(asks) > 1:
        listed = ", ".join(asks[:10])
        raise Problem(f"run {info.run_id} waits for {len(asks)} words; name one of them: {listed}")
    return asks[0]


def _is_innermost(path: str, info: RunInfo) -> bool:
    return not any(other.startswith((path + "[", path + "/")) for other in info.nodes)


def _who(by: str | None) -> str:
    if by is not None:
        return by
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def _json(option: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise Problem(f"{option}: not JSON ({error}); quote a text as '\"text\"'") from None
