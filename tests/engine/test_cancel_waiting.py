"""Cancelled while it waits: for a place, a rate, a time, a person, a thread, a commit, a file."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dagresume import Engine, Limit, Retry, RunCancelled, RunInterrupted, RunStatus, Workflow
from dagresume.scheduler import Run
from dagresume.store import Store
from tests.engine.kit import Boom, Calls, Home, SlowStore, settle

LIMITS = {"one": Limit(concurrency=1), "slow": Limit(rate="1/hour")}


class Waiting:
    """A run that waits for something that does not come; `reached` says that it does."""

    def __init__(self, calls: Calls) -> None:
        self.calls, self.wf = calls, Workflow("waits", idempotent=True)
        self.reached: Callable[[], bool] = lambda: False
        self.held: list[SlowStore] = []
        self.gate = threading.Event()
        self.options: dict[str, Any] = {}

    def wrap(self, store: Store) -> Store:
        return store

    def prepare(self, engine: Engine) -> None:
        """Change what the engine works with."""

    def let_go(self) -> None:
        """Let what holds the run have its way, so that the cancel can be carried out."""


class AtALimit(Waiting):
    """One has the place, five wait for it."""

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls)

        async def body() -> None:
            calls.began("in")
            await asyncio.Event().wait()

        for n in range(6):
            self.wf.node(id=f"n{n}", limit="one")(body)
        self.reached = lambda: calls["in"] == 1


class AtARate(Waiting):
    """The next one may begin in an hour."""

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls)
        for n in range(3):
            calls.adder(self.wf)(f"n{n}", limit="slow")
        self.reached = lambda: calls.total() == 1


class ForAPlace(Waiting):
    """The engine has one place, and a map of many items."""

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls)
        self.options = {"concurrency": 1}

        @self.wf.node
        async def items() -> list[int]:
            return list(range(100))

        @self.wf.node(for_each={"n": "items"})
        async def each(n: int) -> None:
            calls.began("each")
            await asyncio.Event().wait()

        self.reached = lambda: calls["each"] == 1


class ForARetry(Waiting):
    """Its next attempt is due in an hour."""

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls)

        @self.wf.node(retry=Retry(3, delay=3600, max_delay=3600, jitter=0))
        async def fails() -> None:
            calls.began("fails")
            raise Boom

        self.reached = lambda: calls["fails"] == 1


class ForTime(Waiting):
    """It sleeps for an hour."""

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls)
        calls.adder(self.wf)("a")
        self.wf.sleep("rest", 3600, depends_on=["a"])
        calls.adder(self.wf)("b", "rest")
        self.reached = lambda: calls["a"] == 1


class ForAPerson(Waiting):
    """Somebody is to approve it, an event is to come."""

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls)
        calls.adder(self.wf)("a")
        self.wf.approval("agree", depends_on=["a"], prompt="?")
        self.wf.wait_for("arrival", "came", depends_on=["a"])
        calls.adder(self.wf)("b", "agree", "arrival")
        self.reached = lambda: calls["a"] == 1


class ForAThread(Waiting):
    """A plain function, which cannot be ended."""

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls)

        @self.wf.node
        def blocks() -> None:
            calls.began("blocks")
            self.gate.wait(20)

        self.reached = lambda: calls["blocks"] == 1


class _Commit(Waiting):
    holds: tuple[str, str | None] = "", None

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls)
        add = calls.adder(self.wf)
        add("a", idempotent=True)
        add("b", "a", idempotent=False)
        add("c", "b")
        self.reached = lambda: bool(self.held) and self.held[-1].reached.is_set()

    def wrap(self, store: Store) -> Store:
        self.held.append(SlowStore(store, lambda _, r: (r.kind, r.path) == self.holds))
        return self.held[-1]

    def let_go(self) -> None:
        self.held[-1].gate.set()


class ForItsMaking(_Commit):
    """The commit that makes the run is under way: nobody but its engine knows of it."""

    holds = "run.created", None


class ForAStartRecord(_Commit):
    """The commit after which a body begins is under way."""

    holds = "node.started", "b"


class ForACompletion(_Commit):
    """The commit of what a body gave is under way."""

    holds = "node.completed", "b"


class ForAFile(Waiting):
    """A big output is being written."""

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls)
        self.options = {"spill_bytes": 10}
        self.entered = threading.Event()
        self.reached = self.entered.is_set

        @self.wf.node(idempotent=False)
        async def a() -> str:
            calls.began("a")
            return "x" * 100

        calls.adder(self.wf)("b", "a")

    def prepare(self, engine: Engine) -> None:
        blobs = engine._blobs
        assert blobs is not None
        write = blobs.write

        def slowly(run_id: str, text: str) -> str:
            self.entered.set()
            self.gate.wait(20)
            return write(run_id, text)

        blobs.write = slowly  # type: ignore[method-assign]

    def let_go(self) -> None:
        self.gate.set()


PLAIN: list[type[Waiting]] = [
    AtALimit,
    AtARate,
    ForAPlace,
    ForARetry,
    ForTime,
    ForAPerson,
    ForAThread,
    ForAStartRecord,
    ForACompletion,
]


async def cancel(engine: Engine, other: Engine, run_id: str, by: str, waiting: Waiting) -> None:
    """Cancel a run in its own engine or from another one; what holds a commit is let go of meanwhile."""
    cancelling = asyncio.create_task((other if by == "another" else engine).cancel(run_id, by=by))
    run = engine._runs[run_id]
    assert isinstance(run, Run)
    while run.stopping is None:  # noqa: ASYNC110  # until it has read its letters
        await asyncio.sleep(0.005)
    waiting.let_go()
    await cancelling


@pytest.mark.parametrize("by", ["itself", "another"])
@pytest.mark.parametrize("what", [*PLAIN, ForAFile])
async def test_a_run_that_waits_is_cancelled_at_once(
    sqlite_home: Home, calls: Calls, what: type[Waiting], by: str
) -> None:
    """What returned is kept, nothing further begins, nothing is left, and the key is free."""
    home, waiting = sqlite_home, what(calls)
    before = asyncio.all_tasks()
    async with home.engine() as other:
        engine = home.engine(waiting.wf, wrap=waiting.wrap, limits=LIMITS, **waiting.options)
        waiting.prepare(engine)
        async with engine:
            running = asyncio.create_task(engine.run(waiting.wf, key="k", wait="all"))
            await settle(waiting.reached)
            await asyncio.sleep(0.01)
            (info,) = await other.runs()
            began = time.monotonic()
            await cancel(engine, other, info.run_id, by, waiting)
            with pytest.raises(RunCancelled, match=info.run_id):
                await running
            assert time.monotonic() - began < 2
            seen = calls.total()
            info = await other.get(info.run_id)
            assert info.status is RunStatus.CANCELLED
            assert info.owner is None
            statuses = {path: str(node.status) for path, node in info.nodes.items()}
            assert "running" not in statuses.values()
            assert [statuses[path] for path in ("a", "items") if path in statuses] in ([], ["completed"])
            if what is ForACompletion:
                assert statuses == {"a": "completed", "b": "completed", "c": "pending"}
            if what is ForAStartRecord:
                assert statuses == {"a": "completed", "b": "pending", "c": "pending"}
            handle = await engine.start(waiting.wf, key="k")  # the key is free
            assert handle.run_id != info.run_id
            await engine.cancel(handle.run_id)
        assert seen <= calls.total()
        waiting.gate.set()
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("what", [*PLAIN, ForItsMaking, ForAFile])
async def test_a_caller_that_is_cancelled_while_its_run_waits(
    sqlite_home: Home, calls: Calls, what: type[Waiting]
) -> None:
    """B37: CancelledError comes out; the run is interrupted (or waits on its own), and goes on."""
    home, waiting = sqlite_home, what(calls)
    before = asyncio.all_tasks()
    engine = home.engine(waiting.wf, wrap=waiting.wrap, limits=LIMITS, **waiting.options)
    waiting.prepare(engine)
    async with engine:
        running = asyncio.create_task(engine.run(waiting.wf, key="k", wait="all"))
        await settle(waiting.reached)
        await asyncio.sleep(0.01)
        began = time.monotonic()
        running.cancel()
        await asyncio.sleep(0)
        waiting.let_go()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert time.monotonic() - began < 2
        for info in await engine.runs():
            assert info.status in {RunStatus.INTERRUPTED, RunStatus.WAITING}
            assert info.owner is None
            nodes = (await engine.get(info.run_id)).nodes
            assert not [path for path, node in nodes.items() if node.status == "running"]
    waiting.gate.set()
    assert asyncio.all_tasks() == before


def files(folder: Path) -> int:
    """Count the files in a folder and those below."""
    return sum(path.is_file() for path in folder.rglob("*"))


async def test_a_result_whose_file_was_being_written_is_kept(sqlite_home: Home, calls: Calls) -> None:
    """C5, B16: the work is done and paid."""
    waiting = ForAFile(calls)
    engine = sqlite_home.engine(waiting.wf, **waiting.options)
    waiting.prepare(engine)
    async with engine:
        running = asyncio.create_task(engine.run(waiting.wf, key="k"))
        await settle(waiting.reached)
        running.cancel()
        await asyncio.sleep(0)
        waiting.let_go()
        await asyncio.wait([running])
        result = await engine.run(waiting.wf, key="k")
    assert result["a"] == "x" * 100
    assert calls == {"a": 1, "b": 1}
    assert files(Path(f"{sqlite_home.path}.blobs")) == 1


@pytest.mark.parametrize("how", ["run", "task", "engine"])
async def test_a_run_inside_a_body_is_stopped_with_it(home: Home, calls: Calls, how: str) -> None:
    """The outer one is cancelled, its caller is, the engine is left: both rest, and both go on."""
    inner, outer = Workflow("inner", idempotent=True), Workflow("outer", idempotent=True)
    gate = asyncio.Event()
    engine = home.engine(inner, outer, grace_seconds=0.1, concurrency=1)

    @inner.node
    async def waits() -> int:
        calls.began("waits")
        await gate.wait()
        return 1

    @outer.node
    async def calls_it() -> int:
        return int((await engine.run(inner, key="inner"))["waits"])

    before = asyncio.all_tasks()
    async with engine:
        running = asyncio.create_task(engine.run(outer, key="outer"))
        await settle(lambda: calls["waits"] == 1)
        if how == "run":
            (info,) = await engine.runs(workflow="outer")
            await engine.cancel(info.run_id)
        elif how == "task":
            running.cancel()
        if how != "engine":
            await asyncio.wait([running])
            ends = {run.workflow: str(run.status) for run in await engine.runs()}
            assert ends == {"outer": "cancelled" if how == "run" else "interrupted", "inner": "interrupted"}
    await asyncio.wait([running])
    expected = {"run": RunCancelled, "task": asyncio.CancelledError, "engine": RunInterrupted}[how]
    with pytest.raises(expected):
        running.result()
    assert asyncio.all_tasks() == before | {asyncio.current_task()}
    gate.set()
    again = home.engine(inner, outer)
    engine = again  # what the body uses
    async with again:
        result = await again.run(outer, key="outer")
        assert result["calls_it"] == 1
        assert len(await again.runs(workflow="inner")) == 1


async def test_a_history_that_is_read_and_left_holds_nobody_up(home: Home, calls: Calls) -> None:
    """B19: one event is taken, then nobody reads on; a run meanwhile is not slower for it."""
    wf = Workflow("history", idempotent=True)
    calls.adder(wf)("a")
    calls.adder(wf)("b", "a")
    async with home.engine() as engine:
        first = await engine.run(wf)
        events = engine.events(first.run_id)
        await anext(events)
        async with asyncio.timeout(1):
            assert (await engine.run(wf)).status is RunStatus.COMPLETED
        assert [event.kind async for event in events][-1] == "run.completed"
