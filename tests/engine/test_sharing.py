"""Several engines and readers on one file."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import Counter

import pytest

from dagresume import AlreadyRunning, RunResult, RunStatus, Workflow
from tests.engine.kit import Calls, Home, listing


async def test_twenty_engines_open_a_new_file_at_once(sqlite_home: Home, calls: Calls) -> None:
    """B20: all succeed; the tables are made once."""
    gate = asyncio.Barrier(20)
    wf = Workflow("opened")
    calls.adder(wf)("a")

    async def use() -> RunStatus:
        await gate.wait()
        async with sqlite_home.engine() as engine:
            return (await engine.run(wf)).status

    found = await asyncio.gather(*(use() for _ in range(20)))
    assert set(found) == {RunStatus.COMPLETED}
    assert calls["a"] == 20
    assert sqlite_home.path is not None
    connection = sqlite3.connect(sqlite_home.path)
    versions = connection.execute("SELECT value FROM dagresume_meta WHERE name = 'schema_version'").fetchall()
    connection.close()
    assert len(versions) == 1


async def test_readers_beside_a_run_cause_no_warning(
    sqlite_home: Home, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """B22: fifty parallel nodes, and somebody who looks all the time."""
    wf = Workflow("watched")
    listing(wf, range(50))

    @wf.node(for_each={"n": "items"})
    async def item(n: int) -> int:
        await asyncio.sleep(0)
        return n

    async with sqlite_home.engine() as engine, sqlite_home.engine() as watcher:
        run_id = (await engine.run(wf)).run_id
        ended = asyncio.Event()
        looks = 0

        async def watch() -> None:
            nonlocal looks
            while not ended.is_set():
                await watcher.get(run_id)
                await watcher.runs()
                looks += 1

        watching = asyncio.create_task(watch())
        with caplog.at_level(logging.WARNING):
            for _ in range(5):
                assert len((await engine.run(wf))["item"]) == 50
        ended.set()
        await watching
    assert looks > 0
    assert caplog.records == []
    assert capfd.readouterr().err == ""


async def test_three_engines_share_the_keys_of_many_runs(sqlite_home: Home, calls: Calls) -> None:
    """B109, R11: however they meet, each key runs once."""
    wf = Workflow("shared")

    @wf.node
    async def a(k: int) -> int:
        calls.began(f"a{k}")
        await asyncio.sleep(0)
        return k

    @wf.node
    def b(a: int) -> int:
        calls.began(f"b{a}")
        return a

    async with sqlite_home.engine() as one, sqlite_home.engine() as two, sqlite_home.engine() as three:
        engines = [one, two, three]
        found = await asyncio.gather(
            *(engines[n % 3].run(wf, {"k": n % 20}, key=str(n % 20)) for n in range(100)),
            return_exceptions=True,
        )
    kinds = Counter(map(type, found))
    assert set(kinds) <= {RunResult, AlreadyRunning}
    assert kinds[RunResult] >= 20
    assert len(calls) == 40
    assert set(calls.values()) == {1}
