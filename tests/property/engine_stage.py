"""Where engines are driven by hand: loops that stand still, stores with a door, bodies that end when told.

Every engine is a process of its own as far as its runs can tell: it has a loop of its own that turns only
when it is told to, and a door in front of the store. To kill it is to shut that door for ever, with whatever
was on its way, and to let its lease be over. What bodies did is written down here, outside the store.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from dagresume import Context, Engine, Recovery, Retry, Workflow
from dagresume.errors import StoreError
from dagresume.sqlite import SQLiteStore
from dagresume.store import MemoryStore, Outcome, StoreFailed, Unit
from dagresume.testing import StoreWrapper

START, SECOND = 1_796_000_000_000_000, 1_000_000
LEASE = 1e6  # seconds: it is over when the stage says so
QUIET = 25  # turns of a loop in which nothing asks for the store
SETTLES = {
    "node.started", "node.completed", "node.failed", "node.skipped", "node.interrupted", "node.cancelled",
    "node.reset", "node.withdrawn", "node.waiting", "node.compensated",
}  # fmt: skip


class Boom(Exception):
    """What bodies fail with."""


class Clock:
    """The time of all engines on the stage."""

    def __init__(self) -> None:
        self.time = START

    def now(self) -> int:
        return self.time

    def monotonic(self) -> float:
        return (self.time - START) / SECOND

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def call_later(self, seconds: float, call: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, call, *args)


class Loop(asyncio.SelectorEventLoop):
    """An event loop on the stage's time, also for what sleeps without asking the engine's clock."""

    def __init__(self, clock: Clock) -> None:
        self._stage = clock
        super().__init__()

    def time(self) -> float:
        return self._stage.monotonic()


class Door(StoreWrapper):
    """A store behind a door: it can be held shut before or after a commit, and shut for ever."""

    def __init__(self, inner: MemoryStore | SQLiteStore) -> None:
        super().__init__(inner)
        self.dead = False
        self.hold = ""
        self.gate, self.idle = asyncio.Event(), asyncio.Event()
        self.busy = self.held = 0

    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        if self.hold == "before":
            await self._wait()
        if self.dead:
            return [StoreFailed(StoreError("this process was killed"))] * len(units)
        outcomes: list[Outcome] = await self._pass(self.inner.commit(units))
        if self.hold == "after":
            await self._wait()
        return [StoreFailed(StoreError("this process was killed"))] * len(units) if self.dead else outcomes

    async def _wait(self) -> None:
        self.held += 1
        try:
            await self.gate.wait()
        finally:
            self.held -= 1

    async def _pass(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self.dead:
            work.close()
            raise StoreError("this process was killed")
        self.busy += 1
        try:
            return await work
        finally:
            self.busy -= 1
            self.idle.set()

    def renew(self, expires_at: int) -> bool:
        return True  # the stage says when a lease is over

    async def load(self, run_id: str) -> Any:
        return await self._pass(self.inner.load(run_id))

    async def find(self, **wanted: Any) -> Any:
        return await self._pass(self.inner.find(**wanted))

    async def tail(self, after: int, **wanted: Any) -> Any:
        return await self._pass(self.inner.tail(after, **wanted))

    async def output(self, seqs: Sequence[int]) -> Any:
        return await self._pass(self.inner.output(seqs))

    async def changed(self) -> Any:
        return await self._pass(self.inner.changed())

    async def close(self) -> None:
        if self.dead:
            self.inner._session = None  # type: ignore[attr-defined]  # no word of its end reaches the store
        await self.inner.close()


class Row(NamedTuple):
    """What is stored of a run."""

    number: int
    run_id: str
    workflow: str
    status: str
    owner: int | None
    epoch: int
    holds_key: int


class Line(NamedTuple):
    """One durable record of the journal."""

    seq: int
    run_id: str
    kind: str
    path: str | None
    attempt: int | None
    reason: str | None
    data: str | None
    output: str | None


class Body(NamedTuple):
    """A body under way."""

    run_id: str
    path: str
    attempt: int
    seat: Seat
    given: list[Any]
    end: asyncio.Future[bool]
    flow: str


class Seat:
    """One engine with its loop and its door."""

    def __init__(self, stage: Stage) -> None:
        self.clock = stage.clock
        self.loop = Loop(stage.clock)
        inner: MemoryStore | SQLiteStore = (
            SQLiteStore(stage.file, synchronous="normal", clock=stage.clock)
            if stage.file
            else MemoryStore(beside=stage.book, clock=stage.clock)
        )
        self.door = Door(inner)
        self.engine = Engine(
            store=self.door,
            clock=stage.clock,
            workflows=list(FLOWS.values()),
            lease_seconds=LEASE,
            grace_seconds=0,
        )
        self.ghost = False  # others take it for dead
        self.loop.run_until_complete(self.engine.__aenter__())
        self.session: int = self.engine._session
        self.tasks: list[tuple[str, str, asyncio.Task[Any]]] = []

    def do(self, what: str, run_id: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin something in this engine."""
        task = self.loop.create_task(work)
        self.tasks.append((what, run_id, task))
        return task

    def settle(self) -> None:
        """Let the loop turn until nothing more happens by itself."""
        self.loop.run_until_complete(self._settle())

    async def _settle(self) -> None:
        while True:
            for _ in range(QUIET):
                await asyncio.sleep(0)
                if self.door.busy:
                    self.door.idle.clear()
                    await self.door.idle.wait()
                    break
            else:
                return

    def expire(self) -> None:
        """Let the lease be over in the eyes of all others."""
        self.ghost = True
        self.door.inner.renew(1)

    def release(self) -> None:
        """Open the door again."""
        self.door.hold = ""
        self.door.gate.set()
        self.door.gate = asyncio.Event()

    def kill(self) -> None:
        """Nothing of this engine reaches the store any more, and all others know that it is dead."""
        self.door.dead = True
        self.expire()
        self._end()

    def leave(self) -> None:
        """Close the engine in good order."""
        self.release()
        self._end()

    def _end(self) -> None:
        self.release()
        self.loop.run_until_complete(self.engine.__aexit__(None, None, None))
        self.loop.run_until_complete(self._drop_tasks())
        self.loop.close()

    async def _drop_tasks(self) -> None:
        for *_, task in self.tasks:
            task.cancel()
        await asyncio.gather(*(task for *_, task in self.tasks), return_exceptions=True)
        await asyncio.sleep(0)


class Stage:
    """The engines, the store they share, and what bodies did."""

    current: ClassVar[Stage]

    def __init__(self, file: Path | None) -> None:
        Stage.current = self
        self.file, self.clock = file, Clock()
        self.book = MemoryStore(clock=self.clock)
        self.seats: list[Seat] = []
        self.bodies: list[Body] = []
        self.began: Counter[tuple[str, str, int]] = Counter()
        self.returned: dict[tuple[str, str, int], str] = {}
        self.wrong: list[str] = []
        self.asked: Counter[tuple[str, str]] = Counter()
        self._reader: sqlite3.Connection | None = None

    def close(self) -> None:
        """Let everything go."""
        while self.seats:
            self.seats.pop().kill()
        if self._reader is not None:
            self._reader.close()

    # what is durable, read past the engines

    def lines(self, run_id: str | None = None, after: int = 0) -> list[Line]:
        """Give the durable journal."""
        if self.file is None:
            book = self.book._book
            ids = {number: row.run_id for number, row in book.rows.items()}
            return [
                Line(r.seq or 0, ids[run], r.kind, r.path, r.attempt, r.reason, r.data, output)
                for run, r, output in book.after(after)
                if run_id in {None, ids[run]}
            ]
        which = "r.run_id = ?" if run_id else "? IS NULL"
        sql = (
            "SELECT seq, r.run_id, kind, path, attempt, e.reason, data, output FROM dagresume_events AS e"
            f" JOIN dagresume_runs AS r USING (run) WHERE {which} AND seq > ? ORDER BY seq"
        )
        return [Line(*found) for found in self._conn.execute(sql, [run_id, after])]

    def rows(self) -> list[Row]:
        """Give all runs."""
        if self.file is None:
            return [
                Row(r.run, r.run_id, r.workflow, r.status, r.owner, r.epoch, r.holds_key)
                for r in self.book._book.rows.values()
            ]
        sql = "SELECT run, run_id, workflow, status, owner, epoch, holds_key FROM dagresume_runs ORDER BY run"
        return [Row(*found) for found in self._conn.execute(sql)]

    def row(self, run_id: str) -> Row:
        """Give one run."""
        return next(row for row in self.rows() if row.run_id == run_id)

    @property
    def _conn(self) -> sqlite3.Connection:
        if self._reader is None:
            self._reader = sqlite3.connect(f"file:{self.file}?mode=ro", uri=True, isolation_level=None)
        return self._reader

    # what bodies do

    def seat_of(self, loop: asyncio.AbstractEventLoop) -> Seat:
        return next(seat for seat in self.seats if seat.loop is loop)

    def begin(self, ctx: Context, given: list[Any]) -> Body:
        """A body begins: whatever it was not to begin without must be durable now."""
        loop = asyncio.get_running_loop()
        body = Body(
            ctx.run_id, ctx.path, ctx.attempt, self.seat_of(loop), given, loop.create_future(), ctx.workflow
        )
        self.wrong += self._too_early(body)
        self.began[body[:3]] += 1
        self.bodies.append(body)
        return body

    def _too_early(self, body: Body) -> list[str]:
        run_id, path, _attempt, seat, given, *_ = body
        if seat.ghost and run_id not in {row.run_id for row in self.rows()}:
            return []  # it was pruned behind its back
        row, lines = self.row(run_id), self.lines(run_id)
        flow, node = SHAPES[row.workflow], path.partition("[")[0]
        last = {line.path: line for line in lines if line.kind in SETTLES}
        of_path = [line for line in lines if line.path == path and line.kind in SETTLES]
        wrong = []
        for parent in flow[node].after:
            if parent not in last or last[parent].kind != "node.completed":
                wrong.append(f"C1: {path} began before {parent} was durable")
            elif flow[node].each is None and output_of(last, parent) not in given:
                wrong.append(f"C7: {path} was given {given}, durable is {output_of(last, parent)}")
        done = sum(line.kind == "node.completed" for line in of_path)
        # What was on its way when the run was lost, an answer of the store or a timer, is no edge of it. Only
        # idempotent bodies begin so, and what they give is refused.
        late = seat.ghost and flow[node].idempotent
        if done > self.asked[run_id, node] and not late:
            wrong.append(f"C3: {path} began again after it had completed {done} times")
        if not flow[node].idempotent:
            wrong += self._without_a_record(body, of_path)
        if row.owner != seat.session and not seat.ghost:
            wrong.append(f"C4: {path} began in session {seat.session}, the run is owned by {row.owner}")
        return wrong

    def _without_a_record(self, body: Body, of_path: list[Line]) -> list[str]:
        kinds = [line.kind for line in of_path]
        starts = [
            n for n, line in enumerate(of_path) if line[2:5] == ("node.started", body.path, body.attempt)
        ]
        if not starts:
            return [f"C2: {body.path} began as attempt {body.attempt} without a start record: {kinds}"]
        if self.began[body[:3]]:
            return [f"C3: attempt {body.attempt} of {body.path} began twice"]
        before = kinds[starts[0] - 1] if starts[0] else None
        if before in {"node.started", "node.interrupted", "node.cancelled"}:
            return [f"C6: {body.path} was uncertain ({before}) and began again: {kinds}"]
        return []


class Node(NamedTuple):
    """What the stage knows of a node."""

    after: tuple[str, ...] = ()
    idempotent: bool = True
    each: str | None = None
    what: str = "function"


FLOWS: dict[str, Workflow] = {}
SHAPES: dict[str, dict[str, Node]] = {}
ITEMS = ["x", "y", "z"]


def output_of(last: dict[str | None, Line], path: str) -> Any:
    """Give the durable output of a path; a map's from its items."""
    line = last[path]
    if line.output is not None:
        return json.loads(line.output)
    seq = json.loads(line.data or "{}").get("seq")
    if seq is not None:
        return json.loads(next(known.output or "null" for known in Stage.current.lines() if known.seq == seq))
    return [output_of(last, f"{path}[{k}]") for k in range(len(ITEMS))]


def told(path: str, given: list[Any]) -> Any:
    """Give what a body gives for what it was given."""
    return ITEMS if path == "items" else f"{path}({json.dumps(given, sort_keys=True)})"


def build(name: str, shape: dict[str, Node], **options: Any) -> None:
    """Make a workflow of this shape."""
    wf = Workflow(name, **options)
    for node, facts in shape.items():
        if facts.what == "approval":
            wf.approval(node, depends_on=facts.after, prompt="well?")
        elif facts.what == "wait":
            wf.wait_for(node, "word", depends_on=facts.after)
        else:
            _add(wf, node, facts)
    FLOWS[name], SHAPES[name] = wf, shape


def _add(wf: Workflow, node: str, facts: Node) -> None:
    async def body(ctx: Context, **given: Any) -> Any:
        under_way = Stage.current.begin(ctx, [given[name] for name in sorted(given)])
        if not await under_way.end:
            raise Boom(ctx.path)
        return told(ctx.path, under_way.given)

    more: dict[str, Any] = {"for_each": {"in_item": facts.each}, "concurrency": 2} if facts.each else {}
    takes = {f"in_{name}": name for name in facts.after if name != facts.each}
    wf.node(id=node, args=takes, idempotent=facts.idempotent, **more)(body)


build(
    "chain",
    {
        "a": Node((), False),
        "b": Node(("a",)),
        "c": Node(("b",), False),
        "d": Node(("a",), False),
        "e": Node(("c", "d"), False),
    },
)
build(
    "wide",
    {
        "items": Node(),
        "m": Node(("items",), False, "items"),
        "n": Node(("items",)),
        "s": Node(("m", "n"), False),
    },
    retry=Retry(2, delay=5),
)
build(
    "talk",
    {
        "a": Node((), False),
        "ask": Node(("a",), what="approval"),
        "word": Node(("a",), what="wait"),
        "b": Node(("ask",), False),
        "c": Node(("word",)),
        "e": Node(("b", "c"), False),
    },
)
build(
    "lively",
    {"a": Node(), "b": Node(("a",)), "c": Node(("b",), False), "d": Node(("c",))},
    retry=Retry(3, delay=1),
    recovery=Recovery(auto_resume=True, max_attempts=20),
)
