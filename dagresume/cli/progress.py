"""The line that tells how far a run is, on a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from rich.live import Live
from rich.text import Text

from dagresume import words
from dagresume.cli.screen import clean, err
from dagresume.errors import DagresumeError
from dagresume.events import Event, segments

if TYPE_CHECKING:
    from dagresume.engine import Engine

__all__ = ["Tally", "watching"]

TICK = 0.2  # seconds between two looks of the line
_DONE = {"node.completed", "node.skipped"}
_NO_CHANGE = {"node.state", "node.progress"}  # a body goes on as before


class Tally:
    """How far a run is, by the events seen so far."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.ended: set[str] = set()
        self.failed: set[str] = set()
        self.running: dict[str, None] = {}
        self.totals: dict[str, int] = {}
        self.items: dict[str, set[str]] = {}

    def apply(self, event: Event) -> None:
        """Take one more event into account."""
        path = event.path
        if path is None or event.kind in _NO_CHANGE:
            return
        node, index = segments(path)[0]
        if index is None and "count" in event.data:
            self.totals[node] = event.data["count"]
        self.running.pop(path, None)
        self.failed.discard(path)
        done = self.ended if index is None else self.items.setdefault(node, set())
        done.discard(path)
        if event.kind in _DONE:
            done.add(path)
        elif event.kind == "node.failed":
            if event.reason != "retry":
                self.failed.add(path)
        elif event.kind == "node.started":
            self.running[path] = None

    def text(self, seconds: float) -> str:
        """Give the line: nodes, the maps under way, what runs, the time."""
        parts = [f"{len(self.ended)} of {self.nodes} nodes"]
        maps = [node for node in self.totals if node not in self.ended]
        parts += [f"{node} {len(self.items.get(node, ()))} of {self.totals[node]}" for node in maps[:3]]
        single = [path for path in self.running if path not in self.totals and "[" not in path]
        if single:
            more = f" and {len(single) - 3} more" if len(single) > 3 else ""
            parts.append(f"running {', '.join(single[:3])}{more}")
        if self.failed:
            parts.append(f"{len(self.failed)} failed")
        return clean(" · ".join([*parts, words.duration(seconds)]))


@contextlib.asynccontextmanager
async def watching(engine: Engine, run_id: str, *, quiet: bool = False) -> AsyncIterator[None]:
    """Show how far a run is while the block lasts; nothing if nobody looks at a terminal."""
    console = err()
    if quiet or not sys.stderr.isatty() or console.is_dumb_terminal:
        yield
        return
    began = time.monotonic()
    tally = Tally(sum("[" not in path and "/" not in path for path in (await engine.get(run_id)).nodes))
    live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=sys.stdout.isatty())

    async def follow() -> None:
        with contextlib.suppress(DagresumeError):  # the run itself will say so
            async for event in engine.events(run_id, follow=True):
                tally.apply(event)

    async def draw() -> None:
        while True:
            text = Text(tally.text(time.monotonic() - began), style="dim", no_wrap=True, overflow="ellipsis")
            live.update(text, refresh=True)
            await asyncio.sleep(TICK)

    with live:
        tasks = [asyncio.create_task(follow()), asyncio.create_task(draw())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
