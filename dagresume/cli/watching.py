"""`dagresume watch`: a run of any process while it goes on, as a tree that lives, or line by line."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Final

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from dagresume import words
from dagresume.cli.board import Board, settled
from dagresume.cli.command import DEFAULT_DB, INTERRUPTED, Command, Db, Debug, Json, commands
from dagresume.cli.engines import opened, resolve, work
from dagresume.cli.listing import lasted
from dagresume.cli.screen import GLYPHS, STYLES, clean, line, out, paragraph, print_json, say
from dagresume.cli.summary import as_run, code_of, print_failures, print_next, title
from dagresume.cli.targets import here_of
from dagresume.engine import Engine
from dagresume.events import Event, RunStatus, Snapshot
from dagresume.flaws import readable_event
from dagresume.graphs import unfolded
from dagresume.overview import Overview
from dagresume.views import RunInfo

__all__ = ["group"]

group = commands()
POLL: Final = 0.25  # seconds between two looks
_GOES_ON: Final = frozenset({RunStatus.RUNNING, RunStatus.PENDING, RunStatus.ROLLING_BACK})
_SPARE: Final = 6  # lines of the terminal that are not nodes'
_PACE: Final = 10.0  # seconds between two lines of a map, where lines are appended
Show = Callable[[RunInfo, Board, Sequence[Event]], None]


@group.command("watch", cls=Command)
def watch(
    run: Annotated[
        str, typer.Argument(metavar="[RUN]", help="A run's id, the beginning of it, or `last`.")
    ] = "last",
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Watch a run while it goes on, whichever process drives it; ends when the run does.

    The exit code is that of `run`: 0 completed, 1 failed or cancelled, 3 waiting, 130 interrupted. Ctrl-C
    ends the watching only. Into a pipe it appends a line for each change; with --json each event is an
    object in a line of its own, and the run as it ended is the last one.
    """

    async def ask() -> Overview:
        async with opened(db, run=run) as engine:
            run_id = await resolve(engine, run, db)
            with _shown(as_json) as show:
                await _follow(engine, run_id, show)
            return await engine.overview(run_id)

    try:
        found = work(ask, "no longer watching; the run is left alone")
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    info, here = found.info, here_of(db)
    if as_json:
        print_json(as_run(info) | {"headline": found.headline}, indent=None)
    else:
        say(*title(info))
        paragraph(found.headline, style="bold")
        if info.failures:
            say("")
            print_failures(info.failures, here, info.run_id)
        print_next(info.run_id, info.status, info.reason, here, info.failures)
    raise typer.Exit(code_of(info.status))


async def _follow(engine: Engine, run_id: str, show: Show) -> None:
    """Show a run again and again until it rests. Each look reads only what was written since the last."""
    found = await engine.overview(run_id)
    board = Board(unfolded(found.loaded.graph))
    for record in Snapshot(found.loaded.records).paths.values():
        board.apply(readable_event(run_id, record))
    seq, info, news = found.seq, found.info, list[Event]()
    del found  # the journal is not kept in memory
    while True:
        if info.status not in _GOES_ON:
            last = await engine.overview(run_id)
            board.settle(settled(last.info.nodes.values()))
            info = last.info
        board.sample(_now())
        show(info, board, news)
        if info.status not in _GOES_ON:
            return
        await asyncio.sleep(POLL)
        info, news = await engine.get(run_id, nodes=False), []
        async for event in engine.events(run_id, after=seq):
            seq = event.seq
            board.apply(event)
            news.append(event)


def _now() -> datetime:
    return datetime.now(UTC)


@contextlib.contextmanager
def _shown(as_json: bool) -> Iterator[Show]:
    """Give how a run is shown here: JSON lines, a live tree, or appended lines."""
    console = out()
    if as_json:
        yield _as_json
    elif not console.is_terminal or console.is_dumb_terminal:
        yield _Lines()
    else:
        with Live(console=console, auto_refresh=False, transient=False, vertical_overflow="crop") as live:

            def draw(info: RunInfo, board: Board, _news: Sequence[Event]) -> None:
                live.update(Group(*_tree(info, board, console.width, console.height)), refresh=True)

            yield draw
        say("")


def _tree(info: RunInfo, board: Board, width: int, height: int) -> Iterator[Text]:
    now = _now()
    title = Text(no_wrap=True, overflow="ellipsis")
    title.append(f"{GLYPHS.get(info.status, ' ')} {info.status} ", STYLES.get(info.status, ""))
    title.append(f"{clean(info.workflow)} ", "bold")
    goes_on = info.status in _GOES_ON
    spent = words.duration((now - info.created_at).total_seconds() if goes_on else lasted(info))
    owner = f" · driven by {info.owner}" if info.owner else ""
    title.append(clean(f"{info.run_id[:13]} · {spent}{owner}"), "dim")
    yield title
    if goes_on:
        yield Text(f"  {clean(board.headline())}", style="bold", no_wrap=True, overflow="ellipsis")
    yield from board.draw(width, max(4, height - _SPARE), now)


def _as_json(_info: RunInfo, _board: Board, news: Sequence[Event]) -> None:
    for event in news:
        print_json(
            {
                "seq": event.seq, "run_id": event.run_id, "kind": event.kind, "path": event.path,
                "attempt": event.attempt, "at": event.at, "reason": event.reason, "data": event.data,
            },
            indent=None,
        )  # fmt: skip
    sys.stdout.flush()


class _Lines:
    """Appends a line for each node that changes, for each failure, and now and then for a map."""

    def __init__(self) -> None:
        self.statuses: dict[str, str] = {}
        self.told: dict[str, tuple[datetime, int]] = {}

    def __call__(self, info: RunInfo, board: Board, news: Sequence[Event]) -> None:
        now = _now()
        for event in news:
            if event.kind == "node.failed" and event.path is not None and "[" in event.path:
                again = " (tried again)" if event.reason == "retry" else ""
                why = words.error_in_words(event.data.get("type", ""), event.data.get("message", ""))
                self._say(event.at, "failed", event.path, f"{why}{again}")
        for each in board.lines.values():
            status = each.status
            if status != self.statuses.get(each.name, "pending"):
                self.statuses[each.name] = status
                took = words.duration(each.took)
                count = f"{each.done:,} of {each.size:,}" if each.size > 1 else ""
                why = each.told if status in {"waiting", "failed"} else ""
                self._say(now, status, each.name, ", ".join(filter(None, (took, count, why))))
                self.told[each.name] = (now, each.done)
            elif each.counts and status == "running":
                self._tell_progress(each.name, each.done, each.size, each.counts["running"], now)
        sys.stdout.flush()

    def _tell_progress(self, name: str, done: int, size: int, running: int, now: datetime) -> None:
        when, before = self.told.get(name, (now, 0))
        if done != before and (now - when).total_seconds() >= _PACE:
            self._say(now, "running", name, f"{done:,} of {size:,}, {running:,} running")
            self.told[name] = (now, done)

    @staticmethod
    def _say(at: datetime, status: str, path: str, told: str) -> None:
        rest = f": {line(told, 200)}" if told else ""
        say(words.local_time(at), " ", (f"{GLYPHS.get(status, ' ')} {status:<11}", STYLES.get(status, "")),
            f" {clean(path)}{rest}")  # fmt: skip
