"""`dagresume explain`: what was done with one path each time its run was driven, and why."""

from dataclasses import asdict
from typing import Annotated

import typer

from dagresume.cli.command import DEFAULT_DB, Command, Db, Debug, Json, RunId, commands
from dagresume.cli.engines import opened, resolve, work
from dagresume.cli.screen import print_json, say
from dagresume.explain import Explanation

__all__ = ["group"]

group = commands()


@group.command("explain", cls=Command)
def explain(
    run: RunId,
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="A node, or a part of one like score[3].", show_default=False),
    ],
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Explain one path: what was done with it each time the run was driven, and why."""

    async def ask() -> Explanation:
        async with opened(db, run=run) as engine:
            return await engine.explain(await resolve(engine, run, db), path)

    found = work(ask)
    if as_json:
        print_json({"run_id": found.run_id, "path": found.path, "steps": [asdict(s) for s in found.steps]})
        return
    say((f"{found.path} in run {found.run_id}", "bold"))
    for step in found.steps:
        say(f"  {step}")
