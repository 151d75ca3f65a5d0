"""`dagresume prune` keeps a database small, `dagresume stats` says how it does and how big it will get."""

import re
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from dagresume import words
from dagresume.blobs import measure
from dagresume.cli.command import DEFAULT_DB, FAILED, Command, Db, Debug, Here, Json, Problem, commands
from dagresume.cli.engines import file_of, opened, work
from dagresume.cli.histogram import Svg, draw, save
from dagresume.cli.screen import STYLES, clean, line, print_json, say, warn
from dagresume.clock import SystemClock
from dagresume.errors import InputError
from dagresume.forgetting import compact
from dagresume.metrics import Metrics
from dagresume.retention import Pruned
from dagresume.volume import Estimate, estimate

__all__ = ["group"]

group = commands()
_UNITS: Final = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)|(0)")


def term(option: str, text: str) -> timedelta:
    """Give the time that a word means: 7d, 12h, 30m, 90s, 2w, or 0. Nothing is guessed: it says what is
    deleted.
    """
    found = _DURATION.fullmatch(text.strip())
    unit = _UNITS.get(found[2] or "s") if found else None
    if found is None or unit is None:
        raise Problem(f"{option} {text!r}: a time as in 7d, 12h, 30m or 90s")
    try:
        return timedelta(seconds=float(found[1] or 0) * unit)
    except OverflowError:
        raise Problem(f"{option} {text!r}: more than a thousand years ago") from None


@group.command("prune", cls=Command)
def prune(
    older_than: Annotated[
        str,
        typer.Option(
            "--older-than",
            metavar="TIME",
            help="Completed, cancelled and rolled back runs that old.",
        ),
    ] = "7d",
    failed_older_than: Annotated[
        str,
        typer.Option("--failed-older-than", metavar="TIME", help="Failed runs that old."),
    ] = "30d",
    status: Annotated[
        list[str] | None, typer.Option("--status", help="Only runs with this status. May be repeated.")
    ] = None,
    workflow: Annotated[str | None, typer.Option("--workflow", help="Only runs of this workflow.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    vacuum: Annotated[
        bool,
        typer.Option(
            "--vacuum", help="Then write the file anew without free space; nobody may use it meanwhile."
        ),
    ] = False,
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Delete runs that ended long ago, with all that belongs to them; what may go on is never touched."""
    terms = term("--older-than", older_than), term("--failed-older-than", failed_older_than)
    file = file_of(db)
    if vacuum and (dry_run or file is None):
        raise Problem("--vacuum needs a database file and rewrites it: not with --dry-run or a server")

    async def ask() -> Pruned:
        async with opened(db) as engine:
            return await engine.prune(
                older_than=terms[0],
                failed_older_than=terms[1],
                status=status or None,
                workflow=workflow,
                dry_run=dry_run,
            )

    try:
        pruned = work(ask)
    except InputError as error:
        raise Problem(f"--{str(error).rstrip('.')}") from None
    back = compact(str(file.absolute()), SystemClock()) if vacuum and file is not None else 0
    if as_json:
        print_json(_as_pruned(pruned, back))
    else:
        _report(pruned, back, Here(db), vacuum=vacuum)
    raise typer.Exit(FAILED if pruned.left else 0)


def _report(pruned: Pruned, back: int, here: Here, *, vacuum: bool) -> None:
    say(clean(str(pruned)))
    if vacuum:
        say(f"the file was written anew: {words.size(back)} more given back to the disk")
    elif not pruned.dry_run and pruned.free > max(pruned.size // 4, 1 << 20):
        command = here.command("prune", "--vacuum")
        say(f"the free space is used for the next runs; `{command}` gives it back, when nobody uses the file")
    for left in pruned.left:
        warn(("left: ", "yellow"), line(left, 500))


def _as_pruned(pruned: Pruned, back: int) -> dict[str, Any]:
    return asdict(pruned) | {"given_back": pruned.given_back + back}


# -- how it does ----------------------------------------------------------------------------------------

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)b?")
_POWERS: Final = {"": 1, "k": 1000, "m": 10**6, "g": 10**9}


def size(option: str, text: str) -> int:
    """Give the bytes that a word means: 5k, 1.5M, 800; a Problem names the option."""
    found = _SIZE.fullmatch(text.strip().lower())
    if found is None:
        raise Problem(f"{option} {text!r}: bytes as in 800, 5k or 1.5M")
    return round(float(found[1]) * _POWERS[found[2]])


@group.command("stats", cls=Command)
def stats(
    estimated: Annotated[
        bool,
        typer.Option("--estimate", help="Instead: the disk that so many runs take. Needs no database."),
    ] = False,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="With --estimate: nodes of a run.")] = 100,
    output: Annotated[
        str, typer.Option("--size", metavar="BYTES", help="With --estimate: an output, as in 800, 5k or 1M.")
    ] = "5k",
    runs_per_day: Annotated[
        float, typer.Option("--runs-per-day", min=0, help="With --estimate: runs a day.")
    ] = 1000,
    keep: Annotated[
        str, typer.Option("--keep", metavar="TIME", help="With --estimate: how long runs are kept.")
    ] = "7d",
    svg: Svg = None,
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show how runs, recoveries and checkpoints do, with alarms; or estimate the disk they will take."""
    if estimated:
        days = term("--keep", keep).total_seconds() / 86_400
        _print_estimate(estimate(nodes, size("--size", output), runs_per_day, days), as_json=as_json)
        return

    async def ask() -> Metrics:
        async with opened(db) as engine:
            return await engine.metrics()

    metrics = work(ask)
    disk = _disk(file_of(db))
    if svg is not None:
        save("How long results waited to be durable", {"all runs": metrics.waits}, svg)
    if as_json:
        told = asdict(metrics) | {"recovery_rate": metrics.recovery_rate, "disk": disk}
        print_json(told | {"alarms": [asdict(alarm) for alarm in metrics.alarms]})
        return
    _print_metrics(metrics, disk)
    if metrics.waits:
        draw(f"how long {metrics.checkpoint_latency.count:,} results waited", metrics.waits)
    here = Here(db)
    for alarm in metrics.alarms:
        say(("alarm: ", STYLES["failed"]), line(here.completed(str(alarm)), 1000))


def _print_estimate(found: Estimate, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(found))
        return
    say(str(found))
    say(
        "  without logs and artifacts; how it is computed: dagresume/volume.py",
    )


def _disk(file: Path | None) -> dict[str, int]:
    """Give the bytes of the database, its log, and what lies beside it; nothing for a server."""
    if file is None:
        return {}
    parts = {"database": file, "log": Path(f"{file}-wal")}
    found = {name: path.stat().st_size if path.exists() else 0 for name, path in parts.items()}
    return found | {name: measure(Path(f"{file}.{name}"))[1] for name in ("blobs", "artifacts")}


def _print_metrics(metrics: Metrics, disk: dict[str, int]) -> None:
    total = sum(metrics.runs.values())
    by_status = ", ".join(f"{count:,} {status}" for status, count in metrics.runs.items())
    rate, waits = metrics.recovery_rate, metrics.checkpoint_latency
    ended = f"{metrics.recoveries_succeeded:,} ended well, {metrics.recoveries_failed:,} did not"
    told = [
        ("runs", f"{total:,}" + (f" ({by_status})" if by_status else "")),
        ("recoveries", f"{metrics.recoveries:,}" + (f" ({ended}: {rate:.0%})" if rate is not None else "")),
        ("recoveries a run", f"{metrics.recoveries_per_run:.2f}"),
        ("checkpoint latency", _latency(metrics) if waits.count else "none measured yet"),
    ]
    if disk:
        told.append(("disk", ", ".join(f"{name} {words.size(size)}" for name, size in disk.items() if size)))
    for name, text in told:
        say((f"{name:<20}", "bold"), text)


def _latency(metrics: Metrics) -> str:
    waits = metrics.checkpoint_latency
    shown = {"p50": waits.p50, "p95": waits.p95, "p99": waits.p99, "max": waits.max}
    told = ", ".join(f"{name} {words.duration(seconds)}" for name, seconds in shown.items())
    return f"{told} ({words.counted(waits.count, 'wait')})"
