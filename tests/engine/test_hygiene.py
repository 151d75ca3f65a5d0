"""What a program that embeds an engine keeps: its descriptors, threads, context variables, log lines (W)."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from textwrap import dedent
from typing import Any

import anyio.to_thread
import pytest

from dagresume import NOT_DONE, Context, Engine, Retry, StoreError, Workflow
from dagresume.sqlite import SQLiteStore
from dagresume.writer import Writer
from tests.engine.kit import Home

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")


def found_and_leaked() -> str:
    found = variable.get()
    variable.set("leaked")
    return found


async def test_undos_handlers_and_conditions_see_the_context_of_the_caller(home: Home) -> None:
    """B161: compensation, handlers of failures, conditions and ends of loops; nothing leaks between them."""
    seen: list[str] = []
    wf = Workflow("context", retry=Retry(2, delay=0))

    def notes(*_: Any) -> bool:
        seen.append(found_and_leaked())
        return True

    async def undo(output: str, ctx: Context) -> None:
        seen.append(found_and_leaked())
        if ctx.attempt == 1:
            raise ValueError

    def undo_in_a_thread(output: str, ctx: Context) -> None:
        seen.append(found_and_leaked())

    @wf.node(compensate=undo, when=lambda: notes())
    async def a() -> str:
        return found_and_leaked()

    @wf.node(compensate=undo_in_a_thread)
    def b(a: str) -> str:
        return found_and_leaked()

    @wf.node
    async def fails(b: str) -> None:
        raise ValueError

    @wf.node(depends_on=["fails"], trigger="any_failed")
    async def handler() -> str:
        return found_and_leaked()

    @wf.loop("rounds", initial="b", until=notes, max_iterations=1)
    async def rounds(state: str) -> str:
        return found_and_leaked()

    token = variable.set("X")
    try:
        result = await home.run(wf)
        assert [result[id_] for id_ in ("a", "b", "handler", "rounds")] == ["X"] * 4
        async with home.engine(wf) as engine:
            assert (await engine.rollback(result.run_id, accept_irreversible=True)).status == "rolled_back"
    finally:
        variable.reset(token)
    assert seen == ["X"] * 5
    assert variable.get() == "none"


async def test_asked_what_became_of_it_a_node_sees_the_context_too(home: Home) -> None:
    """B161."""
    seen: list[str] = []
    wf = Workflow("context")

    async def ask(ctx: Context) -> Any:
        seen.append(found_and_leaked())
        return NOT_DONE

    entered = asyncio.Event()

    @wf.node(reconcile=ask)
    async def a() -> str:
        if not entered.is_set():
            entered.set()
            await asyncio.Event().wait()
        return found_and_leaked()

    async with home.engine() as engine:
        task = asyncio.create_task(engine.run(wf, key="k"))
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        [info] = await engine.runs()
    token = variable.set("X")
    try:
        assert (await home.resume(wf, info.run_id))["a"] == "X"
    finally:
        variable.reset(token)
    assert seen == ["X"]


async def test_the_log_names_the_node_that_logs(home: Home) -> None:
    """B161: of nodes that take turns, in threads and not."""
    wf = Workflow("names")

    @wf.node(for_each={"n": "numbers"}, concurrency=8)
    async def loops(n: int, ctx: Context) -> None:
        for _ in range(3):
            ctx.log.info(ctx.path)
            await asyncio.sleep(0)

    @wf.node(for_each={"n": "numbers"})
    def threads(n: int, ctx: Context) -> None:
        ctx.log.info(ctx.path)

    result = await home.run(wf, {"numbers": list(range(8))})
    async with home.engine() as engine:
        lines = [line for _, line in await engine.logs(result.run_id)]
    assert len(lines) == 32
    assert all(line.path == line.line for line in lines)


# -- B163 -----------------------------------------------------------------------------------------------


def kept() -> tuple[int, int]:
    gc.collect()
    for thread in threading.enumerate():
        if "_connection_worker_thread" in thread.name:
            thread.join(10)
    return len(os.listdir("/proc/self/fd")), threading.active_count()  # noqa: PTH208


def assert_flat(before: tuple[int, int], after: tuple[int, int]) -> None:
    assert abs(after[0] - before[0]) <= 3, "descriptors"
    assert abs(after[1] - before[1]) <= 1, "threads"


class Unmigrated(Writer):
    """A connection on which the tables cannot be made."""

    def execute(self, sql: str, *rest: Any) -> Any:
        if "CREATE TABLE dagresume_runs" in sql:
            raise sqlite3.OperationalError("no room for a table")
        return super().execute(sql, *rest)


class Unmigrating(SQLiteStore):
    connection_class = Unmigrated


ROUNDS = pytest.mark.parametrize("rounds", [30, pytest.param(300, marks=pytest.mark.slow)])
has_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")


@has_proc
@ROUNDS
async def test_runs_leave_nothing_open(db: Path, rounds: int) -> None:
    """B163: open an engine, run, close it."""
    wf = Workflow("w", idempotent=True)

    @wf.node
    async def a() -> str:
        return "x" * 100_000

    @wf.node
    def b(a: str) -> int:
        return len(a)

    async def once() -> None:
        async with Engine(db) as engine:
            assert (await engine.run(wf))["b"] == 100_000

    await once()
    before = await anyio.to_thread.run_sync(kept)
    for _ in range(rounds):
        await once()
    assert_flat(before, await anyio.to_thread.run_sync(kept))


@has_proc
@ROUNDS
async def test_openings_that_fail_in_the_migration_leave_nothing_open(tmp_path: Path, rounds: int) -> None:
    """B163."""

    async def once(n: int) -> None:
        engine = Engine(store=Unmigrating(tmp_path / f"{n}.db"))
        with pytest.raises(StoreError, match="no room for a table"):
            await engine.__aenter__()

    await once(0)
    before = await anyio.to_thread.run_sync(kept)
    for n in range(rounds):
        await once(n)
    assert_flat(before, await anyio.to_thread.run_sync(kept))
    async with Engine(tmp_path / "0.db") as engine:  # nothing half made is left
        assert await engine.runs() == []


# -- B164 -----------------------------------------------------------------------------------------------

LEAVES = """
    import asyncio, os, sys
    from dagresume import Context, Engine, Workflow

    wf = Workflow("leaves")

    @wf.node
    async def a(ctx: Context) -> int:
        for n in range(3):
            ctx.log.info(f"a {n}")
        return 1

    @wf.node
    async def b(a: int, ctx: Context) -> None:
        ctx.log.info("b")
        await asyncio.sleep(0)
        os._exit(7)

    async def main() -> None:
        async with Engine(sys.argv[1]) as engine:
            await engine.run(wf)

    asyncio.run(main())
"""


async def test_lines_before_the_last_checkpoint_outlive_the_process(db: Path) -> None:
    """B164: and what the journal says of a state stands in the same transaction as the state."""
    assert await anyio.to_thread.run_sync(exit_code, db) == 7
    async with Engine(db) as engine:
        [info] = await engine.runs()
        lines = [(line.path, line.line) for _, line in await engine.logs(info.run_id)]
        kinds = [event.kind async for event in engine.events(info.run_id) if event.path == "a"]
        nodes = (await engine.get(info.run_id)).nodes
    assert lines[:3] == [("a", f"a {n}") for n in range(3)]
    assert kinds[-1] == "node.completed"
    assert (nodes["a"].status, nodes["b"].status) == ("completed", "interrupted")


def exit_code(db: Path) -> int:
    return subprocess.run([sys.executable, "-c", dedent(LEAVES), str(db)], check=False, timeout=50).returncode
