"""`dagresume plan`, and the table that retry shows first."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from dagresume import words
from dagresume.cli.command import DEFAULT_DB, Apps, Command, Db, Debug, Here, Json, RunId, commands
from dagresume.cli.engines import opened, resolve, work
from dagresume.cli.screen import print_json, rows, say
from dagresume.cli.targets import apps, workflows
from dagresume.events import enclosing
from dagresume.planner import Decision

__all__ = ["group", "print_plan", "totals"]

group = commands()
ORDER: Final = ("reuse", "run", "check", "skip", "wait", "hold")


@group.command("plan", cls=Command)
def plan(
    run: RunId,
    items: Annotated[bool, typer.Option("--items", help="One line for each item of a map.")] = False,
    app: Apps = None,
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a resume would do with each path, why, and what it saves; nothing is executed."""
    known = workflows(apps(app))

    async def ask() -> tuple[str, list[Decision]]:
        async with opened(db, known, run=run) as engine:
            run_id = await resolve(engine, run, db)
            return run_id, await engine.plan(run_id, items=True)

    run_id, decisions = work(ask)
    if as_json:
        shown = decisions if items else list(_nodes(decisions))
        print_json(
            {"run_id": run_id, "decisions": list(map(_as_decision, shown)), "totals": totals(decisions)}
        )
        return
    print_plan(decisions, items=items)
    here, actions = Here(db, tuple(app or ())), totals(decisions)["paths"].keys()
    if "hold" in actions:
        say("")
        say(f"To run what is held, too: {here.command('retry', run_id)}")
    elif actions & {"run", "check"}:
        say("")
        say(f"To do this: {here.command('resume', run_id)}")


def print_plan(decisions: Sequence[Decision], *, items: bool) -> None:
    """Print a plan as a table, with what it saves in all."""
    of = _inside(decisions)
    shown = decisions if items else _nodes(decisions)
    rows(("path", "action", "before", "why"), [_row(d, of.get(d.path, ()), items) for d in shown], styled=1)
    say("")
    say(_totals_line(totals(decisions)))


def _row(decision: Decision, items: Sequence[Decision], listed: bool) -> tuple[str, str, str, str]:
    why = words.decision(decision.action, decision.reason)
    if decision.items and not listed:
        why = f"{_counts(decision.items)}. {why}"
    if decision.code_changed:
        why += " Its code has changed since it ran."
    seconds = [d.seconds for d in items if d.seconds is not None]
    took = sum(seconds) if seconds else decision.seconds
    return decision.path, decision.action, words.duration(took), why


def _counts(items: Mapping[str, int]) -> str:
    told = ", ".join(f"{items[action]:,} {action}" for action in ORDER if items.get(action))
    return f"{words.counted(sum(items.values()), 'item')}: {told}"


def _nodes(decisions: Iterable[Decision]) -> Iterator[Decision]:
    return (decision for decision in decisions if "[" not in decision.path)


def _leaves(decisions: Sequence[Decision]) -> list[Decision]:
    """Leave out what only holds other paths."""
    around = {outer for decision in decisions for outer in enclosing(decision.path)}
    return [decision for decision in decisions if decision.path not in around]


def _inside(decisions: Sequence[Decision]) -> dict[str, list[Decision]]:
    """Give what is inside each map, loop and sub-workflow."""
    found: dict[str, list[Decision]] = {}
    for decision in _leaves(decisions):
        for outer in enclosing(decision.path):
            found.setdefault(outer, []).append(decision)
    return found


def totals(decisions: Sequence[Decision]) -> dict[str, Any]:
    """Give how many paths there are by action, and what reuse saves. Of a map its items count, not itself."""
    single = _leaves(decisions)
    counts = Counter(str(decision.action) for decision in single)
    kept = [decision for decision in single if decision.action == "reuse"]
    used: Counter[str] = Counter()
    for decision in kept:
        used.update(decision.usage)
    return {
        "paths": {action: counts[action] for action in ORDER if counts[action]},
        "saved": {"seconds": sum(decision.seconds or 0.0 for decision in kept), **used},
    }


def _totals_line(found: Mapping[str, Any]) -> str:
    told = ", ".join(f"{count:,} {action}" for action, count in found["paths"].items())
    saved = dict(found["saved"])
    seconds = saved.pop("seconds")
    kept = ", ".join(filter(None, (words.duration(seconds) if seconds else "", words.usage(saved))))
    return f"{told or 'nothing to do'}" + (f"; saved by reuse: {kept}" if kept else "")


def _as_decision(decision: Decision) -> dict[str, Any]:
    return {
        "path": decision.path,
        "action": decision.action,
        "reason": decision.reason,
        "sentence": words.decision(decision.action, decision.reason),
        "seconds": decision.seconds,
        "usage": decision.usage,
        "items": decision.items,
        "repeats": decision.repeats,
        "code_changed": decision.code_changed,
    }
