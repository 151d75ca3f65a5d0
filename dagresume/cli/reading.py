"""`dagresume list`, `show`, `explain`, `logs` and `cancel`: commands that need no code."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any, Final

import typer

from dagresume import words
from dagresume.cli.command import (
    DEFAULT_DB,
    REFUSED,
    Command,
    Db,
    Debug,
    Here,
    Json,
    Problem,
    RunId,
    commands,
)
from dagresume.cli.engines import opened, resolve, work
from dagresume.cli.screen import clean, line, print_json, rows, say, warn
from dagresume.cli.summary import as_failure, as_run, place_of, print_failures, print_next, status_line
from dagresume.cli.targets import apps
from dagresume.clock import to_datetime
from dagresume.engine import Engine
from dagresume.events import UNDO_FAILED_REASON, RunStatus
from dagresume.explain import Explanation
from dagresume.store import LogLine
from dagresume.views import NodeInfo, RunInfo

__all__ = ["group"]

group = commands()
ORDER: Final = (
    "completed", "running", "waiting", "failed", "interrupted", "cancelled", "skipped", "pending",
    "compensated",
)  # fmt: skip
TRACEBACKS: Final = 3


@group.command("list", cls=Command)
def list_(
    status: Annotated[
        list[str] | None, typer.Option("--status", help="Only runs of this status. May be repeated.")
    ] = None,
    workflow: Annotated[str | None, typer.Option("--workflow", help="Only runs of this workflow.")] = None,
    key: Annotated[str | None, typer.Option("--key", help="Only runs with this key.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, metavar="N", help="At most so many.")] = 50,
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the runs, newest first."""
    wanted = [_status(word) for word in status or ()] or None

    async def ask() -> list[RunInfo]:
        async with opened(db) as engine:
            return await engine.runs(workflow=workflow, status=wanted, key=key, limit=limit)

    found = work(ask)
    if as_json:
        print_json(list(map(as_run, found)))
        return
    if not found:
        say("No such runs." if status or workflow or key else f"No runs in {clean(db)}.")
        return
    cells = (
        (
            info.run_id,
            info.workflow,
            info.key or "",
            info.status,
            words.local_time(info.created_at),
            words.duration(_lasted(info)),
            words.run_reason(info.reason) if info.reason != info.status else "",
        )
        for info in found
    )
    rows(("run", "workflow", "key", "status", "created", "lasted", "because"), cells, styled=3)
    if len(found) == limit:
        warn(f"only the newest {limit}; more with --limit")


def _status(word: str) -> str:
    try:
        return RunStatus(word.strip().lower())
    except ValueError:
        raise Problem(f"--status {word!r}: a run is one of {', '.join(RunStatus)}") from None


# -- one run --------------------------------------------------------------------------------------------


@group.command("show", cls=Command)
def show(
    run: RunId,
    items: Annotated[bool, typer.Option("--items", help="One line for each item of a map.")] = False,
    at: Annotated[
        int | None, typer.Option("--at", metavar="SEQ", help="As it was after the event of this number.")
    ] = None,
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show one run: the state of each node, and what failed."""

    async def ask() -> RunInfo:
        async with opened(db, run=run) as engine:
            return await engine.get(await resolve(engine, run, db), at)

    info = work(ask)
    if as_json:
        nodes = info.nodes.values() if items else _nodes(info)
        failures = {path: as_failure(failure) for path, failure in info.failures.items()}
        print_json(as_run(info) | {"nodes": [_as_node(node, info) for node in nodes], "failures": failures})
        return
    here = _here(db)
    say(*status_line(info.run_id, info.workflow, info.status, info.reason))
    say(f"  {_header(info)}")
    if info.forked_from is not None:
        say(f"  a fork of {info.forked_from}")
    say("")
    _print_nodes(info, items=items)
    if info.failures:
        say("")
        print_failures(info.failures, here, info.run_id)
        _print_tracebacks(info)
    if at is None:
        print_next(info.run_id, info.status, info.reason, here, info.failures)


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


def _here(db: str) -> Here:
    """Give what the commands that are named must be told: where the code is, unless it is known."""
    try:
        known = bool(apps(None))
    except Problem:
        known = False
    return Here(db, () if known else ("TARGET",))


def _header(info: RunInfo) -> str:
    lasted = words.duration(_lasted(info))
    parts = [
        f"version {info.version}",
        f"key {info.key}" if info.key is not None else "",
        f"created {words.local_time(info.created_at)}",
        f"driven by {info.owner}" if info.owner is not None else lasted and f"lasted {lasted}",
    ]
    return clean(" · ".join(filter(None, parts)))


def _lasted(info: RunInfo) -> float | None:
    """Give the seconds from the beginning of a run to its end, or to the last that was heard of it.

    When a process died, nobody wrote: what happened last in the run is the last that is known. None where
    that was not read.
    """
    end = info.finished_at or info.updated_at
    if info.reason == "owner_died":
        heard = [node.at for node in info.nodes.values() if node.at is not None]
        if not heard:
            return None
        end = max(heard)
    return (end - info.created_at).total_seconds()


def _print_nodes(info: RunInfo, *, items: bool) -> None:
    counts = _counts(info)
    shown = info.nodes.values() if items else _nodes(info)
    cells = [
        (
            node.path,
            node.status,
            str(node.attempt) if node.attempt and node.path not in counts else "",
            words.duration(node.seconds),
            _why(node, counts.get(node.path)),
        )
        for node in shown
    ]
    rows(("path", "status", "attempt", "took", "why"), cells, styled=1)


def _why(node: NodeInfo, items: Mapping[str, int] | None) -> str:
    told = (
        f"{node.failure.type}: {line(node.failure.message, 100)}"
        if node.failure and node.failure.type
        else ""
    )
    reason = "upstream_failed" if node.status == "upstream_failed" else node.reason
    if items is not None:
        in_words = ", ".join(f"{items[status]:,} {status}" for status in ORDER if items.get(status))
        return f"{words.counted(sum(items.values()), 'item')}: {in_words}"
    undone = words.node_reason(reason) if reason == UNDO_FAILED_REASON else ""
    asked = f" {clean(node.waits_for)}" if node.waits_for else ""
    return " ".join(filter(None, (undone, told))) or words.node_reason(reason) + asked


def _counts(info: RunInfo) -> dict[str, Counter[str]]:
    """Give for each map how many of its items have which status."""
    found: dict[str, Counter[str]] = {}
    for node in info.nodes.values():
        if node.path.endswith("]"):
            found.setdefault(node.path[: node.path.rindex("[")], Counter())[node.status] += 1
    return found


def _nodes(info: RunInfo) -> Iterator[NodeInfo]:
    return (node for node in info.nodes.values() if "[" not in node.path)


def _print_tracebacks(info: RunInfo) -> None:
    """Print where the failures happened, each place once."""
    places = {place_of(f): f for f in reversed(list(info.failures.values())) if f.traceback}
    for failure in list(reversed(places.values()))[:TRACEBACKS]:
        say("")
        say((f"{clean(failure.path)}, attempt {failure.attempt}:", "bold"))
        for text in clean(failure.traceback, lines=True).rstrip().splitlines():
            say((f"  {text}", "dim"))


def _as_node(node: NodeInfo, info: RunInfo) -> dict[str, Any]:
    found: dict[str, Any] = {
        "path": node.path,
        "status": node.status,
        "reason": node.reason,
        "attempt": node.attempt,
        "at": node.at,
        "seconds": node.seconds,
    }
    if node.waits_for is not None:
        found["waits_for"] = node.waits_for
    if node.failure is not None:
        found["failure"] = as_failure(node.failure)
    counts = _counts_of(node.path, info)
    return found | ({"items": counts} if counts else {})


def _counts_of(path: str, info: RunInfo) -> dict[str, int]:
    return dict(_counts(info).get(path, {}))


# -- cancel and logs ------------------------------------------------------------------------------------


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
        print_next(after.run_id, after.status, None, _here(db))
    else:
        owner = after.owner or "its process"
        say(f"run {after.run_id}: {owner} was asked to cancel it; it is {after.status} so far")


@group.command("logs", cls=Command)
def logs(
    run: RunId,
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print what the nodes of a run logged."""

    async def ask() -> list[LogLine]:
        async with opened(db, run=run) as engine:
            run_id = await resolve(engine, run, db)
            await engine.get(run_id)  # an unknown run is an error
            return await _logged(engine, run_id)

    found = work(ask)
    if as_json:
        print_json(list(map(_as_line, found)))
        return
    for text in _log_lines(found):
        say(*text)


async def _logged(engine: Engine, run_id: str) -> list[LogLine]:
    found: list[tuple[int, LogLine]] = []
    while page := await engine.logs(run_id, after=found[-1][0] if found else 0):
        found += page
    return [one for _, one in found]


_LEVELS: Final = {"warning": "yellow", "error": "bold red", "debug": "dim"}


def _log_lines(found: Iterable[LogLine]) -> Iterator[list[str | tuple[str, str]]]:
    for one in found:
        who = "" if one.path is None else f"{clean(one.path)}"
        again = f" (attempt {one.attempt})" if (one.attempt or 1) > 1 else ""
        level = f"{one.level:<7}"
        yield [
            (words.local_time(_at(one)), "dim"),
            " ",
            (level, _LEVELS.get(one.level, "")),
            f" {who}{again}: {clean(one.line)}",
        ]


def _as_line(one: LogLine) -> dict[str, Any]:
    return {"path": one.path, "attempt": one.attempt, "at": _at(one), "level": one.level, "line": one.line}


def _at(one: LogLine) -> datetime:
    return to_datetime(one.at)
