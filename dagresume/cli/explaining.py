"""`dagresume explain`: what was done with one path each time its run was driven, and why."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from dagresume import words
from dagresume.cli.command import DEFAULT_DB, Command, Db, Debug, Json, RunId, commands
from dagresume.cli.engines import opened, resolve, work
from dagresume.cli.screen import STYLES, clean, paragraph, picture, print_json, rows, say
from dagresume.cli.summary import shown_output
from dagresume.errors import NoOutput
from dagresume.explain import Explanation, Received, Step
from dagresume.results import RunResult

__all__ = ["group"]

group = commands()
_SHOWN = 2000  # characters of what a path returned
_DIGITS = 12  # of a digest


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
    """Explain one path: what was done with it each time the run was driven, and why.

    Also what it received then, from whom, by its digest, and whether that was another thing than the time
    before; and what it has returned.
    """

    async def ask() -> tuple[Explanation, str, Any]:
        async with opened(db, run=run) as engine:
            run_id = await resolve(engine, run, db)
            found = await engine.explain(run_id, path)
            return found, *_returned(await engine.result(run_id), found.path)

    found, returned, value = work(ask)
    if as_json:
        steps = [asdict(step) | {"sentence": step.sentence} for step in found.steps]
        print_json(
            {"run_id": found.run_id, "path": found.path, "steps": steps}
            | ({"returned": value} if returned else {})
        )
        return
    say((clean(found.path), "bold"), f" in run {found.run_id}")
    for number, step in enumerate(found.steps, 1):
        say("")
        _print_step(number, step)
    say("")
    say(("  Returned", "bold"))
    paragraph(returned or "Nothing: it has not completed.", 4)


def _returned(result: RunResult, path: str) -> tuple[str, Any]:
    """Give what a path returned, in one line and as plain data; an empty line if it returned nothing."""
    try:
        value = shown_output(result, path)
    except NoOutput:
        return "", None
    return "It returned `None`." if value is None else picture(value, _SHOWN), value


def _print_step(number: int, step: Step) -> None:
    say((f"  {number}. {clean(step.drive)}", "bold"), f"  {words.local_time(step.at)}")
    paragraph(step.sentence, 4)
    ended = f"attempt{'s'[: len(step.attempts) > 1]} {words.listed(list(map(str, step.attempts)), 8)}"
    if step.attempts and step.outcome is not None:
        took = f" after {words.duration(step.seconds)}" if step.seconds is not None else ""
        say(f"    {ended}: ", (step.outcome, STYLES.get(step.outcome, "")), took)
    if step.error:
        paragraph(step.error, 6)
    if step.code is not None:
        say((f"    code {step.code[:_DIGITS]}{' (changed)' if step.code_changed else ''}", "dim"))
    if step.received:
        rows(("    received", "from", "digest", ""), [_cells(one) for one in step.received])


def _cells(one: Received) -> tuple[str, str, str, str]:
    changed = {None: "", False: "not changed", True: "changed"}[one.changed]
    return f"    {one.parameter}", one.source, (one.digest or "")[:_DIGITS], changed
