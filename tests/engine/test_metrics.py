"""Monitoring (R17): recoveries, their success, checkpoint latency, alarms; in Python and in SQL alike."""

import re
import sqlite3
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagresume import Engine, Metrics, Workflow
from dagresume.contracts import START, created, new_run
from dagresume.events import Record, run_record
from dagresume.latency import summary
from dagresume.metrics import measured
from dagresume.schema import migrate
from dagresume.store import Committed, Owned, Unit
from tests.engine.kit import Calls, Home


@pytest.fixture
def home(db: Path) -> Home:
    return Home(db)


def ask(db: Path, sql: str) -> list[Any]:
    conn = sqlite3.connect(db)
    try:
        return conn.execute(sql).fetchall()
    finally:
        conn.close()


def same(metrics: Metrics, conn: sqlite3.Connection) -> None:
    """Compare with what the views say."""
    told = dict(conn.execute("SELECT name, value FROM dagresume_metrics").fetchall())
    waits = metrics.checkpoint_latency
    expected = {f"checkpoint_latency_{name}": getattr(waits, name) for name in ("p50", "p95", "p99", "max")}
    if not waits.count:
        expected = dict.fromkeys(expected)
    assert told == expected | {
        "recovery_success_rate": metrics.recovery_rate,
        "recoveries_per_run": metrics.recoveries_per_run,
    }
    counted = "SELECT count(*), total(succeeded = 1), total(succeeded = 0) FROM dagresume_recoveries"
    [found] = conn.execute(counted)
    assert found == (metrics.recoveries, metrics.recoveries_succeeded, metrics.recoveries_failed)
    alarms = conn.execute("SELECT name, value, threshold FROM dagresume_alarms").fetchall()
    assert sorted(alarms) == sorted((alarm.name, alarm.value, alarm.threshold) for alarm in metrics.alarms)


async def test_nothing_is_measured_where_nothing_ran(home: Home, db: Path) -> None:
    async with home.engine() as engine:
        metrics = await engine.metrics()
    assert (metrics.runs, metrics.recoveries, metrics.recovery_rate, metrics.alarms) == ({}, 0, None, ())
    with sqlite3.connect(db) as conn:
        same(metrics, conn)
    conn.close()


async def test_recoveries_are_counted_and_judged_by_how_their_drive_ended(home: Home, db: Path) -> None:
    """Two runs: one recovers at the third try, one at the first; a first start is no recovery."""
    calls = Calls()
    wf, waits = Workflow("w", idempotent=True), Workflow("waits", idempotent=True)
    calls.adder(wf)("a")
    calls.adder(wf)("b", "a")
    calls.adder(waits)("x")
    waits.approval("ok", depends_on=["x"], prompt="?")
    calls.broken = {"b", "x"}
    one = await home.run(wf)
    for broken in (True, True, False):
        calls.broken = {"b", "x"} if broken else {"x"}
        await home.resume(wf, one.run_id)
    two = await home.run(waits)
    calls.mend()
    assert (await home.resume(waits, two.run_id)).status == "waiting"
    async with home.engine(waits) as engine:
        await engine.decide(two.run_id, "ok", by="ann")
        await engine.resume(two.run_id)  # goes on with what waited: no recovery
        metrics = await engine.metrics()
    assert metrics.runs == {"completed": 2}
    found = (metrics.recoveries, metrics.recoveries_succeeded, metrics.recoveries_failed)
    assert found == (4, 2, 2)
    assert metrics.recoveries_per_run == 2.0
    assert metrics.recovery_rate == 0.5
    [alarm] = metrics.alarms
    assert (alarm.name, alarm.value, alarm.threshold) == ("recovery_success_rate", 0.5, 0.9)
    assert str(alarm) == (
        "Only 50% of the recoveries ended well (alarm under 90%). Look at what stops again, most often in"
        f" this run: `dagresume show {one.run_id}`."
    )
    rows = ask(db, "SELECT run_id, ended, succeeded FROM dagresume_recoveries ORDER BY seq")
    ends = [("failed", 0), ("failed", 0), ("completed", 1)]
    assert rows == [*((one.run_id, *end) for end in ends), (two.run_id, "waiting", 1)]
    with sqlite3.connect(db) as conn:
        same(metrics, conn)
    conn.close()


async def test_a_run_notes_how_long_its_checkpoints_waited(home: Home, db: Path) -> None:
    """Also for another process: the summary is in the record of the run's end."""
    wf, calls = Workflow("w", idempotent=True), Calls()
    for n in range(12):
        calls.adder(wf)(f"n{n}", *([f"n{n - 1}"] if n else []))
    result = await home.run(wf)
    exact = result.stats.checkpoint_latency
    async with home.engine() as engine:
        told = (await engine.metrics()).checkpoint_latency
    assert exact.count - 1 <= told.count <= exact.count  # the last one is on its way with the record itself
    assert told.count >= 10
    assert told.p50 <= told.p95 <= told.p99 <= told.max <= exact.max + 1e-6  # a microsecond
    [row] = ask(db, "SELECT run_id, checkpoints, p99, max FROM dagresume_latency")
    assert row == (result.run_id, told.count, told.p99, told.max)


async def test_slow_checkpoints_and_frequent_recoveries_raise_alarms(home: Home, db: Path) -> None:
    store = home.store()
    engine = Engine(store=store)
    async with engine:
        slow = summary(array("d", [0.001] * 50 + [1.5]))
        [made] = await store.commit([Unit(new_run("r1", engine._session), [created()])])
        assert isinstance(made, Committed)
        records = [run_record("run.claimed", START, None, by="recover", recoveries=n) for n in (1, 2, 3)]
        ended = run_record("run.completed", START, None, latency=slow)
        await store.commit([Unit(Owned(1, engine._session, 1), [*records, ended])])
        metrics = await engine.metrics()
    assert [alarm.name for alarm in metrics.alarms] == [
        "recovery_success_rate", "recoveries_per_run", "checkpoint_latency_p99",
    ]  # fmt: skip
    assert metrics.recoveries_per_run == 3.0
    for alarm, words in zip(
        metrics.alarms,
        ("`dagresume show r1`", "most often, 3 times: `dagresume audit r1`", "waits 1.5 s or longer"),
        strict=True,
    ):
        assert words in str(alarm)
    assert "the longest was in run r1" in str(metrics.alarms[2])
    with sqlite3.connect(db) as conn:
        same(metrics, conn)
    conn.close()


ends = [
    "completed",
    "waiting",
    "failed",
    "interrupted",
    "cancelled",
    "rolling_back",
    "rolled_back",
    "revived",
]
starts = st.sampled_from(
    [
        run_record("run.claimed", START, None, by="resume"),
        run_record("run.claimed", START, None, by="resume", recoveries=1),
        run_record("run.rolling_back", START, "asked", recoveries=1),
    ]
)
plain_ends = st.sampled_from([run_record(f"run.{word}", START) for word in [*ends, "revived"]])
timed_ends = st.builds(
    lambda word, waits: run_record(f"run.{word}", START, None, latency=waits),
    st.sampled_from(ends),
    st.lists(st.sampled_from([0.0001, 0.002, 0.03, 1.2, 7.0]), min_size=1).map(
        lambda found: summary(array("d", found))
    ),
)
failed = run_record("run.failed", START)
histories = st.lists(
    st.lists(starts | plain_ends | timed_ends, max_size=6).map(lambda rest: [failed, *rest]), max_size=4
)


class Told:
    """A store that has these records and is asked nothing else."""

    def __init__(self, entries: list[tuple[str, Record]]) -> None:
        self.entries = entries

    async def tail(self, after: int, *, kinds: Any, limit: int) -> list[tuple[str, Record]]:
        found = [(r, e) for r, e in self.entries if (e.seq or 0) > after and e.kind in kinds]
        return found[: min(limit, 2)]

    async def find(self, **_: Any) -> list[Any]:
        return []


@settings(max_examples=150, deadline=None)
@given(histories)
async def test_the_views_say_what_the_engine_says(histories: list[list[Record]]) -> None:
    conn = sqlite3.connect(":memory:", isolation_level=None)
    migrate(conn, ":memory:", adopt=False, now=START)
    entries: list[tuple[str, Record]] = []
    for n, history in enumerate(histories, 1):
        count = sum("recoveries" in record.facts for record in history)
        conn.execute(
            "INSERT INTO dagresume_runs(run, run_id, workflow, version, definition, holds_key, status, epoch,"
            " source, auto_resumes, recoveries, created_at, updated_at) VALUES"
            " (?, ?, 'w', '1', 1, 1, 'failed', 1, 'manual', 0, ?, 0, 0)",
            [n, f"r{n}", count],
        )
        for record in history:
            seq = len(entries) + 1
            entries.append((f"r{n}", record._replace(seq=seq)))
            values = [seq, n, record.kind, record.at, record.reason, record.data]
            conn.execute(
                "INSERT INTO dagresume_events(seq, run, kind, at, reason, data) VALUES (?, ?, ?, ?, ?, ?)",
                values,
            )
    metrics = await measured(Told(entries))  # type: ignore[arg-type]  # as much of a store as is asked
    same(metrics, conn)
    conn.close()


@pytest.mark.parametrize("view", ["recoveries", "latency", "metrics", "alarms"])
async def test_no_view_goes_through_the_whole_journal(home: Home, db: Path, view: str) -> None:
    async with home.engine():
        pass
    plan = [row[3] for row in ask(db, f"EXPLAIN QUERY PLAN SELECT * FROM dagresume_{view}")]
    assert len(plan) > 1
    assert [
        step for step in plan if re.match(r"SCAN (e|n|r|dagresume_(events|runs))\b(?!.* USING )", step)
    ] == []
    assert any("dagresume_events_audit" in step for step in plan)
