"""`dagresume diff`: what differs between two runs."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer

from dagresume import words
from dagresume.cli.command import DEFAULT_DB, FAILED, Command, Db, Debug, Json, commands
from dagresume.cli.engines import opened, resolve, work
from dagresume.cli.listing import lasted
from dagresume.cli.screen import is_wide, line, picture, print_json, rows, say, status
from dagresume.cli.summary import as_run, shown_output
from dagresume.contrast import Change, Contrast
from dagresume.errors import NoOutput
from dagresume.results import RunResult
from dagresume.views import RunInfo

__all__ = ["group"]

group = commands()
MOST: Final = 20  # lines of each part for people
_NONE: Final = "–"
_TELLING: Final = 0.02  # seconds; of less than that a ratio says nothing
Pair = tuple[Any, Any]


@group.command("diff", cls=Command)
def diff(
    first: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run's id, the beginning of it, or `last`.", show_default=False),
    ],
    second: Annotated[str, typer.Argument(metavar="RUN", help="The other one.", show_default=False)],
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what differs between two runs: definition, inputs, statuses, outputs; and how long nodes took.

    Outputs are compared by digest, so it makes no difference how large they are. Exit code 0: the same, but
    for times and what was used up; 1: they differ.
    """

    async def ask() -> tuple[Contrast, dict[str, Pair]]:
        async with opened(db, run=first) as engine:
            ids = await resolve(engine, first, db), await resolve(engine, second, db)
            found = await engine.contrast(*ids)
            results = await engine.result(ids[0]), await engine.result(ids[1])
            most = None if as_json else MOST
            return found, {each.name: _values(results, each.name) for each in found.outputs[:most]}

    found, values = work(ask)
    if as_json:
        print_json(_as_json(found, values))
    else:
        _print(found, values)
    raise typer.Exit(0 if found.same else FAILED)


def _values(results: tuple[RunResult, RunResult], path: str) -> Pair:
    shown = []
    for result in results:
        try:
            shown.append(shown_output(result, path))
        except NoOutput:
            shown.append(None)
    return shown[0], shown[1]


def _as_json(found: Contrast, values: dict[str, Pair]) -> dict[str, Any]:
    return {
        "same": found.same,
        "runs": [as_run(info) for info in found.runs],
        "definition": list(found.definition),
        "inputs": [{"name": c.name, "values": [_input(c.first), _input(c.second)]} for c in found.inputs],
        "statuses": [{"path": c.name, "statuses": [c.first, c.second]} for c in found.statuses],
        "outputs": [
            {"path": c.name, "digests": [c.first, c.second], "values": list(values[c.name])}
            for c in found.outputs
        ],
        "seconds": {name: list(both) for name, both in found.seconds.items()},
        "usage": {name: list(both) for name, both in found.used.items()},
    }


def _input(packed: str | None) -> Any:
    return None if packed is None else json.loads(packed)


# -- for people -----------------------------------------------------------------------------------------


def _print(found: Contrast, values: dict[str, Pair]) -> None:
    for name, info in zip("AB", found.runs, strict=True):
        say((f"{name}  ", "bold"), info.run_id, f"  {_told(info)}" if is_wide() else "")
        if not is_wide():
            say(f"   {_told(info)}")
    say("")
    if found.same:
        say(("The same: ", "bold"), "definition, inputs, statuses and outputs.")
    _part("Definition", found.definition)
    most = 60 if is_wide() else 26
    _table(
        "Input",
        found.inputs,
        lambda c: (_short(_input(c.first), c.first, most), _short(_input(c.second), c.second, most)),
    )
    _table("Status", found.statuses, lambda c: (_word(c.first), _word(c.second)))
    _table(
        "Output",
        found.outputs,
        lambda c: tuple(
            _short(value, digest, most) for value, digest in zip(values[c.name], c[1:], strict=True)
        ),
    )
    _print_times(found)


def _told(info: RunInfo) -> str:
    took = words.duration(lasted(info))
    key = f", key {line(info.key, 40)}" if info.key is not None else ""
    told = f"{info.workflow} version {info.version}{key}: {info.status}"
    return f"{told}, {took}" if took else told


def _part(title: str, lines: Sequence[str]) -> None:
    if not lines:
        return
    say((title, "bold"))
    for each in lines[:MOST]:
        say(f"  {line(each)}")
    if len(lines) > MOST:
        say(f"  and {len(lines) - MOST:,} more, with --json")


def _table(title: str, changes: Sequence[Change], cells: Any) -> None:
    if not changes:
        return
    rows((title, "A", "B"), [(each.name, *cells(each)) for each in changes[:MOST]])
    if len(changes) > MOST:
        say((f"and {len(changes) - MOST:,} more, with --json", "dim"))
    say("")


def _word(word: str | None) -> str:
    return _NONE if word is None else status(word)


def _short(value: Any, there: str | None, most: int) -> str:
    return _NONE if there is None else picture(value, most)


def _print_times(found: Contrast) -> None:
    times = [
        (name, words.duration(a), words.duration(b), _change(a, b) if max(a, b) >= _TELLING else "")
        for name, (a, b) in found.seconds.items()
    ]
    if len(times) > MOST:
        by_change = sorted(found.seconds.items(), key=lambda each: abs(each[1][1] - each[1][0]), reverse=True)
        kept = {name for name, _ in by_change[:MOST]}
        times = [each for each in times if each[0] in kept]
    rows(("Time of", "A", "B", ""), times)
    if len(found.seconds) > MOST:
        say((f"the {MOST} that differ most, of {len(found.seconds):,}", "dim"))
    used = [
        (n, words.amount(a), words.amount(b), _change(a, b)) for n, (a, b) in found.used.items() if a or b
    ]
    if used:
        say("")
        rows(("Used", "A", "B", ""), used)


def _change(first: float, second: float) -> str:
    """Give how the second compares with the first, where that says something."""
    if not first or not second or 0.8 < second / first < 1.25:
        return ""
    return f"× {second / first:.2g}" if second > first else f"÷ {first / second:.2g}"
