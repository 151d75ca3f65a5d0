"""`dagresume show`: one run, as a sentence first, a picture second, data third."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, Final

import typer

from dagresume import words
from dagresume.cli.chart import chart, critical_line
from dagresume.cli.command import DEFAULT_DB, Command, Db, Debug, Here, Json, Problem, RunId, commands
from dagresume.cli.engines import opened, resolve, work
from dagresume.cli.listing import lasted
from dagresume.cli.screen import clean, line, out, paragraph, print_json, rows, say, status, width
from dagresume.cli.summary import as_failure, as_run, place_of, print_failures, print_next, title
from dagresume.cli.targets import here_of
from dagresume.clock import to_datetime
from dagresume.events import UNDO_FAILED_REASON, names
from dagresume.overview import Overview
from dagresume.timeline import Timeline
from dagresume.views import NodeInfo, RunInfo

__all__ = ["group"]

group = commands()
ORDER: Final = (
    "completed", "running", "waiting", "failed", "interrupted", "cancelled", "skipped", "pending",
    "compensated",
)  # fmt: skip
TRACEBACKS: Final = 3
PAGE: Final = 200
MOST_BARS: Final = 24  # rows of a timeline that are drawn without being asked for
MOST_NODES: Final = 200
WIDEST: Final = 140
_OF_A_PIPE: Final = 100


@group.command("show", cls=Command)
def show(
    run: RunId,
    items: Annotated[
        bool, typer.Option("--items", help=f"Each item of a map, {PAGE} lines at a time; see --page.")
    ] = False,
    page: Annotated[
        int | None, typer.Option("--page", min=1, metavar="N", help="Which of the pages of --items.")
    ] = None,
    with_timeline: Annotated[
        bool | None,
        typer.Option(
            "--timeline/--no-timeline",
            help=f"Draw when each node was at work; without a word up to {MOST_BARS} nodes are drawn.",
        ),
    ] = None,
    at: Annotated[
        int | None, typer.Option("--at", metavar="SEQ", help="As it was after the event of this number.")
    ] = None,
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show one run: how it is, the state of each node, when they were at work, and what failed.

    In the timeline the height of a bar says how many of a node ran at once; × failed, ┤ cut off when its
    process died, ▶ runs, ┄ waits, ┊ nobody drove the run. ▸ marks the critical path: the nodes for which the
    end had to wait.
    """
    if page is not None:
        items = True

    async def ask() -> RunInfo | Overview:
        async with opened(db, run=run) as engine:
            run_id = await resolve(engine, run, db)
            if at is not None or items:
                return await engine.get(run_id, at)
            return await engine.overview(run_id, timeline=True)

    found = work(ask)
    if isinstance(found, RunInfo):
        _show_nodes(found, items=items, page=page, at=at, db=db, as_json=as_json)
    elif as_json:
        _print_overview_json(found)
    else:
        _show(found, db, drawn=with_timeline)


# -- at a glance ----------------------------------------------------------------------------------------


def _show(found: Overview, db: str, *, drawn: bool | None) -> None:
    info, here = found.info, here_of(db)
    say(*title(info))
    paragraph(found.headline, style="bold")
    _print_facts(info)
    if found.first_problem is not None:
        problem = clean(found.first_problem)
        command = here.command("explain", info.run_id, problem)
        fits = len(f"  First problem: {problem}  {command}") <= width()
        say("  First problem: ", (problem, "bold"), f"  {command}" if fits else "")
        if not fits:
            say(f"    {command}")
    say("")
    _print_nodes(list(_nodes(info)), found.items, found.totals)
    _print_timeline(found, drawn)
    _print_failures(info, here)
    print_next(info.run_id, info.status, info.reason, here, info.failures)


def _print_facts(info: RunInfo) -> None:
    for text in _header(info):
        say(f"  {text}")
    if info.forked_from is not None:
        say(f"  a fork of {info.forked_from}")


def _print_timeline(found: Overview, drawn: bool | None) -> None:
    timeline = found.timeline
    if drawn is False or timeline is None:
        return
    rows_of = list(dict.fromkeys(_row_of(path) for path in found.info.nodes))
    if drawn is None and len(rows_of) > MOST_BARS:
        return
    console = out()
    columns = min(console.width, WIDEST) if console.is_terminal else _OF_A_PIPE
    order = dict.fromkeys([*rows_of, *timeline.bars])
    lines = list(chart(timeline, list(order), columns))
    if lines:
        say("")
        for each in lines:
            console.print(each)
    if told := critical_line(timeline):
        paragraph(told)


def _row_of(path: str) -> str:
    return names(path)


def _print_overview_json(found: Overview) -> None:
    info = found.info
    print_json(
        as_run(info)
        | {
            "headline": found.headline,
            "first_problem": found.first_problem,
            "uncertain": list(found.uncertain),
            "nodes": [_as_node(node, found.items) for node in _nodes(info)],
            "failures": {path: as_failure(failure) for path, failure in info.failures.items()},
            "timeline": None if found.timeline is None else _as_timeline(found.timeline),
        }
    )


def _as_timeline(timeline: Timeline) -> dict[str, Any]:
    return {
        "stretches": [
            {"start": to_datetime(s.start), "stop": to_datetime(s.stop), "died": s.died}
            for s in timeline.stretches
        ],
        "seconds_at_work": timeline.worked / 1e6,
        "critical": [{"node": turn.node, "seconds": turn.alone / 1e6} for turn in timeline.critical],
    }


# -- all paths, or as it once was -----------------------------------------------------------------------


def _show_nodes(
    info: RunInfo, *, items: bool, page: int | None, at: int | None, db: str, as_json: bool
) -> None:
    counts = _counts(info)
    shown = list(info.nodes.values()) if items else list(_nodes(info))
    pages = max(1, -(-len(shown) // PAGE))
    if page is not None and page > pages:
        raise Problem(f"--page {page}: there {'are' if pages > 1 else 'is'} {words.counted(pages, 'page')}")
    if page is not None:
        shown = shown[(page - 1) * PAGE : page * PAGE]
    if as_json:
        failures = {path: as_failure(failure) for path, failure in info.failures.items()}
        print_json(as_run(info) | {"nodes": [_as_node(n, counts) for n in shown], "failures": failures})
        return
    say(*title(info))
    _print_facts(info)
    say("")
    more = len(shown) - PAGE if page is None and items else 0
    _print_nodes(shown[:PAGE] if more > 0 else shown, counts, {})
    if more > 0:
        say((f"and {more:,} more: {here_of(db).command('show', info.run_id, '--page', '2')}", "dim"))
    elif page is not None and pages > 1:
        say((f"page {page} of {pages:,}", "dim"))
    here = here_of(db)
    _print_failures(info, here)
    if at is None:
        print_next(info.run_id, info.status, info.reason, here, info.failures)


def _header(info: RunInfo) -> list[str]:
    """Give the facts about a run, as many in a line as fit."""
    took = words.duration(lasted(info))
    parts = [
        f"version {info.version}",
        f"key {info.key}" if info.key is not None else "",
        f"created {words.local_time(info.created_at)}",
        f"driven by {info.owner}" if info.owner is not None else took and f"lasted {took}",
    ]
    lines: list[str] = []
    for part in map(clean, filter(None, parts)):
        if lines and len(lines[-1]) + len(part) + 5 <= width():
            lines[-1] += f" · {part}"
        else:
            lines.append(part)
    return lines


def _print_nodes(
    shown: Sequence[NodeInfo], counts: Mapping[str, Mapping[str, int]], totals: Mapping[str, int]
) -> None:
    most = MOST_NODES if out().is_terminal else len(shown)
    cells = (
        (
            node.path,
            status(node.status),
            str(node.attempt) if node.attempt and node.path not in counts else "",
            words.duration(node.seconds),
            _why(node, counts.get(node.path), totals.get(node.path, 0)),
        )
        for node in islice(shown, most)
    )
    rows(("path", "status", "attempt", "took", "why"), list(cells), styled=1)
    if len(shown) > most:
        told = words.counted(len(shown) - most, "more node")
        say((f"and {told}; into a pipe, or with --json, all of them are printed", "dim"))


def _print_failures(info: RunInfo, here: Here) -> None:
    if info.failures:
        say("")
        print_failures(info.failures, here, info.run_id)
        _print_tracebacks(info)


def _why(node: NodeInfo, items: Mapping[str, int] | None, total: int) -> str:
    told = (
        f"{node.failure.type}: {line(node.failure.message, 100)}"
        if node.failure and node.failure.type
        else ""
    )
    reason = "upstream_failed" if node.status == "upstream_failed" else node.reason
    if items is not None:
        known = sum(items.values())
        told_of = dict(items) | {"pending": items.get("pending", 0) + max(0, total - known)}
        in_words = ", ".join(f"{told_of[word]:,} {word}" for word in ORDER if told_of.get(word))
        return f"{words.counted(max(known, total), 'item')}: {in_words}"
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


def _as_node(node: NodeInfo, items: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
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
    counts = items.get(node.path)
    return found | ({"items": dict(counts)} if counts else {})
