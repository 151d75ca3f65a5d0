"""The fold in Python and the views in SQL say the same of any journal."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from dagresume import Workflow
from dagresume.clock import SystemClock
from dagresume.definition import describe
from dagresume.events import (
    CANCELLED,
    COMPLETED,
    FAILED,
    INTERRUPTED,
    RESET,
    RETRY,
    RUN_CREATED,
    SKIPPED,
    STARTED,
    WAITING,
    WITHDRAWN,
    NodeStatus,
    Record,
    Snapshot,
    node_record,
    run_record,
    status_of,
)
from dagresume.sessions import this_session
from dagresume.sqlite import SQLiteStore
from dagresume.store import Committed, NewRun, Owned, Unit

NODES = ["a", "b", "m"]
PATHS = [*NODES, "m[0]", "m[1]", "m[10]"]
KINDS = [STARTED, COMPLETED, FAILED, SKIPPED, INTERRUPTED, CANCELLED, RESET, WITHDRAWN, WAITING]
WORD = {
    NodeStatus.PENDING: "pending",
    NodeStatus.RUNNING: "running",
    NodeStatus.WAITING: "running",
    NodeStatus.INTERRUPTED: "running",
    NodeStatus.COMPLETED: "success",
    NodeStatus.FAILED: "failed",
    NodeStatus.SKIPPED: "skipped",
    NodeStatus.CANCELLED: "pending",
}  # R5


@st.composite
def node_records(draw: st.DrawFn) -> Record:
    path, attempt = draw(st.sampled_from(PATHS)), draw(st.integers(1, 5))
    if draw(st.integers(0, 9)) == 0:
        return Record("node.noted", attempt, draw(st.integers(0, 10**15)), path)
    kind = draw(st.sampled_from(KINDS))
    reason = draw(st.sampled_from([RETRY, "error", None])) if kind == FAILED else None
    record = node_record(kind, path, attempt, draw(st.integers(0, 10**15)), reason)
    return record._replace(output='"x"', digest=bytes(16), size=3) if kind == COMPLETED else record


runs = st.lists(st.lists(node_records(), max_size=12), min_size=1, max_size=3)


async def stored(path: Path, journals: list[list[Record]]) -> list[Snapshot]:
    wf = Workflow("w")

    async def body() -> None: ...

    for node in NODES:
        wf.node(id=node)(body)
    store = SQLiteStore(path, clock=SystemClock())
    session = await store.open(this_session(SystemClock().now(), 30_000_000))
    found = []
    for n, records in enumerate(journals):
        guard = NewRun(f"run{n}", "w", "1", None, None, session, "manual", "{}", bytes(16))
        [made] = await store.commit(
            [Unit(guard, [run_record(RUN_CREATED, 1)], definition=describe(wf.compiled))]
        )
        assert isinstance(made, Committed)
        if records:
            [outcome] = await store.commit([Unit(Owned(made.run, session, made.epoch), records)])
            assert isinstance(outcome, Committed)
    for n in range(len(journals)):
        loaded = await store.load(f"run{n}")
        assert loaded is not None
        found.append(Snapshot(loaded.records))
    await store.close()
    return found


@settings(max_examples=30, deadline=None)
@given(runs)
def test_the_last_event_with_a_status_wins_in_python_and_in_sql(journals: list[list[Record]]) -> None:
    """§5: the same paths, the same status, attempt, time, and output or none, in both views."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.db"
        snapshots = asyncio.run(stored(path, journals))
        connection = sqlite3.connect(path)
        rows = connection.execute(
            "SELECT workflow_id, node_id, node_status, retry_count, node_output, updated_at"
            " FROM workflow_checkpoints"
        ).fetchall()
        exact = connection.execute(
            "SELECT workflow_id, node_id, node_status, reason FROM dagresume_checkpoints"
        ).fetchall()
        connection.close()
    assert len(rows) == len({row[:2] for row in rows}), "one row for each run and node"
    assert {row[:2] for row in rows} == {row[:2] for row in exact}
    for n, (snapshot, journal) in enumerate(zip(snapshots, journals, strict=True)):
        view = {row[1]: row[2:] for row in rows if row[0] == f"run{n}"}
        words = {row[1]: row[2:] for row in exact if row[0] == f"run{n}"}
        seen = {record.path for record in journal if record.changes_path}
        assert set(snapshot.paths) == seen
        assert set(view) == seen | set(NODES)
        for node in view:
            record = snapshot.paths.get(node)
            status, retries, output, updated = view[node]
            assert status == WORD[status_of(record)]
            assert words[node] == (status_of(record).value, record.reason if record else None)
            if record is not None:
                assert retries == (record.attempt or 1) - 1
                assert updated == record.at
                assert output == ('"x"' if record.kind == COMPLETED else None)


@settings(max_examples=60, deadline=None)
@given(st.lists(node_records(), max_size=40), st.integers(0, 40))
def test_a_fold_in_two_pieces_is_one_fold(records: list[Record], cut: int) -> None:
    numbered = [record._replace(seq=n) for n, record in enumerate(records, 1)]
    whole, pieces = Snapshot(numbered), Snapshot(numbered[:cut])
    pieces.fold(numbered[cut:])
    assert pieces.paths == whole.paths
    assert pieces.generations == whole.generations
