"""`dagresume list`: the runs, newest first, and what each needs of a person."""

import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Annotated, Final

import typer

from dagresume import words
from dagresume.cli.command import DEFAULT_DB, Command, Db, Debug, Json, Problem, commands
from dagresume.cli.engines import opened, resolve, work
from dagresume.cli.screen import clean, is_wide, line, print_json, rows, say, warn, width
from dagresume.cli.screen import status as shown_status
from dagresume.cli.summary import as_run
from dagresume.errors import RunNotFound
from dagresume.events import RunStatus
from dagresume.views import RunInfo

__all__ = ["group", "lasted", "moment", "shortened"]

group = commands()
_AGE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h|d|w)")
_SECONDS: Final = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_COLUMNS: Final = 7
_LEAST_NEED: Final = 26  # columns for what a run needs, where there is room beside the rest
_SHORT: Final = 13  # characters of a run id that are its time of birth, to the millisecond


@group.command("list", cls=Command)
def list_(
    status: Annotated[
        list[str] | None, typer.Option("--status", help="Only runs of this status. May be repeated.")
    ] = None,
    workflow: Annotated[str | None, typer.Option("--workflow", help="Only runs of this workflow.")] = None,
    key: Annotated[str | None, typer.Option("--key", help="Only runs with this key.")] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since", metavar="TIME", help="Only runs created then or later: 2h, 3d, 2026-11-30, 14:30."
        ),
    ] = None,
    before: Annotated[
        str | None,
        typer.Option("--before", metavar="TIME|RUN", help="Only runs created before that time or that run."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, metavar="N", help="At most so many.")] = 50,
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the runs, newest first.

    Names and keys are matched letter by letter. On a narrow terminal ids are cut to what still names the run.
    """
    wanted = [_status(word) for word in status or ()] or None
    start = None if since is None else moment("--since", since)
    end, older = _before(before)

    async def ask() -> list[RunInfo]:
        async with opened(db) as engine:
            run_id = None if older is None else await resolve(engine, older, db)
            return await engine.runs(
                workflow=workflow, status=wanted, key=key, limit=limit, before=run_id, since=start, until=end
            )

    try:
        found = work(ask)
    except RunNotFound as error:
        raise Problem(f"--before {before!r}: {error}") from None
    if as_json:
        print_json([as_run(info) | {"needs": words.needs(info.status, info.reason)} for info in found])
        return
    if not found:
        narrowed = any(word is not None for word in (status, workflow, key, since, before))
        say("No such runs." if narrowed else f"No runs in {clean(db)}.")
        return
    _print(found)
    if len(found) == limit:
        warn(f"only the newest {limit}; more with --limit, older ones with --before RUN")


def _status(word: str) -> str:
    try:
        return RunStatus(word.strip().lower())
    except ValueError:
        raise Problem(f"--status {word!r}: a run is one of {', '.join(RunStatus)}") from None


def _before(word: str | None) -> tuple[datetime | None, str | None]:
    """Give what --before means: a time, or else a run."""
    if word is None:
        return None, None
    try:
        return moment("--before", word), None
    except Problem:
        if word == "last" or re.fullmatch(r"[0-9a-f]{4,8}|[0-9a-f]{8}-[0-9a-f-]{,27}", word.strip().lower()):
            return None, word
        raise


def moment(option: str, word: str) -> datetime:
    """Give the time a person means: an age (`90min`, `2h`, `3d`), a clock time of today, or a date."""
    text, now = word.strip(), datetime.now().astimezone()
    try:
        if age := _AGE.fullmatch(text):
            return now - timedelta(seconds=float(age[1]) * _SECONDS[age[2]])
        if re.fullmatch(r"\d\d?:\d\d(:\d\d)?", text):
            text = f"{now:%Y-%m-%d}T{text:0>5}"
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise Problem(
            f"{option} {line(word, 80)!r}: an age like 90min, 2h or 3d, a time like 14:30, a date like"
            " 2026-11-30 or 2026-11-30T14:30"
        ) from None


def shortened(run_ids: Sequence[str]) -> dict[str, str]:
    """Give for each id the beginning that tells it from the others here, at least its time of birth."""
    ranked = sorted(set(run_ids))
    found = {}
    for n, run_id in enumerate(ranked):
        near = [*ranked[max(0, n - 1) : n], *ranked[n + 1 : n + 2]]
        size = _SHORT
        while size < len(run_id) and any(other[:size] == run_id[:size] for other in near):
            size += 1
        found[run_id] = run_id[:size].rstrip("-")
    return found


def lasted(info: RunInfo) -> float | None:
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


def _print(found: Sequence[RunInfo]) -> None:
    wide, ids = is_wide(), shortened([info.run_id for info in found])
    facts = [
        (
            info.run_id if wide else ids[info.run_id],
            shown_status(info.status),
            words.local_time(info.created_at) if wide else words.short_time(info.created_at),
            words.duration(lasted(info)),
        )
        for info in found
    ]
    workflows, keys = [clean(info.workflow) for info in found], [clean(info.key or "") for info in found]
    taken = sum(max(map(len, column)) for column in zip(*facts, strict=True)) + 2 * (_COLUMNS - 1)
    room = width() - taken - (_LEAST_NEED if wide else 0)
    most = _shares(max(map(len, ["workflow", *workflows])), max(map(len, ["key", *keys])), room)
    told = [
        (
            fact[0],
            _begin_of(wf, most[0]),
            _end_of(key, most[1]),
            *fact[1:],
            words.needs(info.status, info.reason),
        )
        for info, fact, wf, key in zip(found, facts, workflows, keys, strict=True)
    ]
    rows(("run", "workflow", "key", "status", "created", "lasted", "needs"), told, styled=3)


def _shares(first: int, second: int, room: int) -> tuple[int, int]:
    """Give how many columns each of two texts gets of so many: at least half of them if it needs that."""
    room = max(room, 16)
    if first + second <= room:
        return first, second
    share = min(first, max(room // 2, room - second))
    return share, room - share


def _begin_of(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _end_of(key: str, most: int) -> str:
    """Give the end of a long key, which tells more than its beginning."""
    return key if len(key) <= most else f"…{key[1 - most :]}"
