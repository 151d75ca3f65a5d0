"""Forgetting runs of a file: in short transactions, and without a walk through the whole journal."""

import asyncio
import re
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from dagresume.clock import SystemClock
from dagresume.contracts import START, completed, created, definition, new_run
from dagresume.events import run_record
from dagresume.sessions import this_session
from dagresume.sqlite import SQLiteStore
from dagresume.store import Committed, LogLine, OnceRow, Owned, Unit, scope_of
from dagresume.writer import Writer
from tests.contract.test_sqlite_views import scans


async def gone(run_id: str) -> bool:
    """There are no files."""
    return True


async def opened(store: SQLiteStore) -> int:
    return await store.open(this_session(SystemClock.now(), 60_000_000))


async def make(store: SQLiteStore, session: int, run_id: str, events: int, output: str | None = "1") -> Owned:
    """Make a run that completed, with so many events, a log line for every tenth, and calls made once."""
    made = (await store.commit([Unit(new_run(run_id, session), [created()], definition("{}"))]))[0]
    assert isinstance(made, Committed)
    guard = Owned(made.run, session, made.epoch)
    for start in range(0, events - 2, 5000):
        paths = [f"a[{n}]" for n in range(start, min(start + 5000, events - 2))]
        lines = [LogLine(path, 1, START, "info", "line") for path in paths[::10]]
        once = [OnceRow(scope_of("run", run_id), path, path, "done", "1", START) for path in paths[::100]]
        await store.commit([Unit(guard, [completed(p, output) for p in paths], logs=lines, once=once)])
    await store.commit([Unit(guard, [run_record("run.completed", START)])])
    return guard


class Watched(Writer):
    """Notes every statement, how long each transaction was open, and how many rows it deleted."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.statements: list[tuple[str, Any]] = []
        self.transactions: list[tuple[float, int]] = []
        self._begun, self._rows = 0.0, 0

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        if sql == "BEGIN IMMEDIATE":
            self._begun, self._rows = time.monotonic(), 0
        self.statements.append((sql, parameters))
        cursor = super().execute(sql, parameters)
        self._rows += max(cursor.rowcount, 0) if sql.startswith("DELETE") else 0
        if sql == "COMMIT":
            self.transactions.append((time.monotonic() - self._begun, self._rows))
        return cursor


class WatchedStore(SQLiteStore):
    connection_class = Watched

    @property
    def writer(self) -> Watched:
        writer = self._at(0)[1]
        assert isinstance(writer, Watched)
        return writer


async def test_no_statement_goes_through_a_whole_table_and_no_transaction_is_long(db: Path) -> None:
    store = WatchedStore(db, synchronous="normal")
    session = await opened(store)
    guard = await make(store, session, "run-1", 20_000)
    await make(store, session, "run-10", 10)
    store.writer.statements.clear()
    store.writer.transactions.clear()
    found = await store.forget({guard.run: guard.epoch}, gone)
    assert (found.events, found.logs, found.once) == (20_000, 2000, 200)
    assert max(rows for _, rows in store.writer.transactions) <= 4096
    assert len(store.writer.transactions) > 6
    statements = [s for s in store.writer.statements if re.match("SELECT|DELETE|INSERT|UPDATE", s[0])]
    assert len({sql for sql, _ in statements}) >= 7
    for sql, values in statements:
        assert scans(db, sql, values) == [], sql
    assert (await store.load("run-10")) is not None
    await store.close()


async def test_readers_of_the_whole_journal_walk_past_what_is_left_of_a_run(db: Path) -> None:
    """Between the end of its row and the end of its records."""
    store = SQLiteStore(db, synchronous="normal")
    session = await opened(store)
    guard = await make(store, session, "run-1", 3000)
    other = await make(store, session, "run-2", 5)
    seen: list[Any] = []

    class Between(Exception):
        pass

    async def look(run_id: str) -> bool:
        raise Between

    with pytest.raises(Between):  # as if it were killed here
        await store.forget({guard.run: guard.epoch}, look)
    conn = sqlite3.connect(db)
    conn.execute("INSERT INTO dagresume_events(run, kind, at, seq) VALUES (?, 'x', 0, 1)", [guard.run])
    conn.commit()
    conn.close()
    seen = await store.tail(0, limit=3)
    assert [run_id for run_id, _ in seen] == ["run-2"] * 3
    assert await store.tail(0, kinds=["x"]) == []
    found = await store.forget({other.run: other.epoch}, gone, dry_run=True)
    assert (found.resumed, found.events) == (1, 5)
    await store.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_hundred_thousand_events_go_in_short_transactions(db: Path) -> None:
    """Others write meanwhile, through the same connection and from another one, and do not wait long."""
    store, other = WatchedStore(db), SQLiteStore(db)
    sessions = [await opened(store), await opened(other)]
    guard = await make(store, sessions[0], "big", 100_000, '"' + "x" * 300 + '"')
    owners = []
    for each, session in zip((store, other), sessions, strict=True):
        [made] = await each.commit([Unit(new_run(f"r{session}", session), [created()])])
        assert isinstance(made, Committed)
        owners.append(Owned(made.run, session, made.epoch))
    waits: dict[SQLiteStore, list[float]] = {store: [], other: []}
    over = asyncio.Event()

    async def write(each: SQLiteStore, owner: Owned) -> None:
        while not over.is_set():
            begun = time.monotonic()
            [outcome] = await each.commit([Unit(owner, [completed(f"n{len(waits[each])}")])])
            assert isinstance(outcome, Committed)
            waits[each].append(time.monotonic() - begun)
            await asyncio.sleep(0.002)

    writers = [asyncio.ensure_future(write(*pair)) for pair in zip((store, other), owners, strict=True)]
    store.writer.transactions.clear()
    begun = time.monotonic()
    found = await store.forget({guard.run: guard.epoch}, gone)
    took = time.monotonic() - begun
    over.set()
    await asyncio.gather(*writers)
    deleting = [(seconds, rows) for seconds, rows in store.writer.transactions if rows]
    longest, most = max(deleting)[0], max(rows for _, rows in deleting)
    print(
        f"\n{found.events:,} events and {found.logs:,} log lines in {took:.1f} s, in {len(deleting)}"
        f" transactions: the longest {longest * 1000:.0f} ms, the biggest {most:,} rows;"
        f" {found.given_back / 1e6:.0f} MB given back\n"
        f"longest wait of {len(waits[store])} commits beside it {max(waits[store]) * 1000:.0f} ms,"
        f" of {len(waits[other])} commits of another connection {max(waits[other]) * 1000:.0f} ms"
    )
    assert found.events == 100_000
    assert found.given_back > 30_000_000
    assert most <= 4096
    assert longest < 0.5
    assert max(waits[store] + waits[other]) < 1.5
    await store.close()
    await other.close()
