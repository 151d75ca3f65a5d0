"""The views that people and programs ask with plain SQL; no question scans the journal (R4, R5, R12)."""

import re
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagresume import codec, events
from dagresume.contracts import START, completed, created, definition, new_run
from dagresume.events import R5_WORDS, NodeStatus, Record, RunStatus, Snapshot, run_record, status_of
from dagresume.feeds import cell_of
from dagresume.results import Stored
from dagresume.schema import migrate
from dagresume.sessions import this_session
from dagresume.sqlite import SQLiteStore
from dagresume.store import (
    SYSTEM_CLOCK,
    Claim,
    Committed,
    Definition,
    Inbox,
    LogLine,
    NewRun,
    Owned,
    Unit,
)
from dagresume.writer import Worker

KINDS = sorted(kind for kind in vars(events).values() if isinstance(kind, str) and kind in R5_WORDS)
R5 = {
    NodeStatus.COMPLETED: "success",
    NodeStatus.RUNNING: "running",
    NodeStatus.WAITING: "running",
    NodeStatus.INTERRUPTED: "running",
    NodeStatus.FAILED: "failed",
    NodeStatus.SKIPPED: "skipped",
    NodeStatus.COMPENSATED: "skipped",
    NodeStatus.PENDING: "pending",
    NodeStatus.CANCELLED: "pending",
}


def record(
    kind: str, path: str = "a", reason: str | None = None, attempt: int | None = 1, at: int = START
) -> Record:
    return Record(kind, attempt, at, path, reason)


@pytest.fixture
async def store(db: Path) -> AsyncIterator[SQLiteStore]:
    store = SQLiteStore(db, synchronous="normal")
    await store.open(this_session(SYSTEM_CLOCK.now(), 60_000_000))
    yield store
    await store.close()


def ask(db: Path, sql: str, *values: Any) -> list[dict[str, Any]]:
    conn = sqlite3.connect(db)
    try:
        conn.row_factory = sqlite3.Row
        return [dict(row) for row in conn.execute(sql, values)]
    finally:
        conn.close()


async def test_a_checkpoint_is_a_row_with_all_that_r5_asks(store: SQLiteStore, db: Path) -> None:
    guard = Owned(1, 1, 1)
    await store.commit([Unit(new_run("r1", 1), [created()], definition("{}", nodes=["a", "b", "ü"]))])
    await store.commit([Unit(guard, [record("node.started", at=START + 1)])])
    await store.commit([Unit(guard, [record("node.failed", reason="retry", at=START + 2)])])
    done = record("node.completed", attempt=2, at=START + 3)._replace(
        input=b"\xab\x01" + b"\0" * 14, output='{"x": [1]}', took=1_500_000
    )
    [outcome] = await store.commit([Unit(guard, [done, Record("node.note", 2, START + 9, "a")])])
    assert isinstance(outcome, Committed)
    rows = ask(db, "SELECT * FROM workflow_checkpoints ORDER BY node_id")
    assert list(rows[0]) == [
        "id", "workflow_id", "node_id", "node_status", "node_output", "node_input", "retry_count",
        "created_at", "updated_at",
    ]  # fmt: skip
    assert rows[0] == {
        "id": outcome.seq - 1, "workflow_id": "r1", "node_id": "a", "node_status": "success",
        "node_output": '{"x": [1]}', "node_input": "ab01" + "0" * 28, "retry_count": 1,
        "created_at": START + 1, "updated_at": START + 3,
    }  # fmt: skip
    for row, node in zip(rows[1:], ["b", "ü"], strict=True):
        assert (row["id"], row["node_id"], row["node_status"]) == (None, node, "pending")
        assert (row["node_output"], row["node_input"], row["retry_count"]) == (None, None, 0)
    [exact] = ask(db, "SELECT * FROM dagresume_checkpoints WHERE node_id = 'a'")
    assert (exact["workflow"], exact["node_status"], exact["seconds"]) == ("w", "completed", 1.5)
    assert ask(db, "SELECT json_extract(node_output, '$.x[0]') AS x FROM workflow_checkpoints")[0] == {"x": 1}


@pytest.mark.parametrize("at", [0, 1, 999_999, START, START + 123])
async def test_readable_times_have_fixed_digits_and_an_offset(store: SQLiteStore, db: Path, at: int) -> None:
    """B118: the order of the texts is the order of the times."""
    await store.commit([Unit(new_run("r1", 1), [created(at), record("node.completed", at=at)])])
    [row] = ask(db, "SELECT created_at, updated_at FROM dagresume_checkpoints")
    for text in row.values():
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00", text)
        assert datetime.fromisoformat(text) == datetime.fromtimestamp(at // 10**6, UTC).replace(
            microsecond=at % 10**6
        )


histories = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "b[1]"]), st.sampled_from(KINDS), st.sampled_from([None, "retry", "x"])
    ),
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(histories)
def test_the_last_event_with_a_status_wins_in_sql_as_in_python(
    history: list[tuple[str, str, str | None]],
) -> None:
    conn = sqlite3.connect(":memory:", isolation_level=None)
    migrate(conn, ":memory:", adopt=False, now=START)
    columns = ", ".join(f"{name}" for name in NewRunRow)
    marks = ", ".join("?" * len(NewRunRow))
    conn.execute(f"INSERT INTO dagresume_runs({columns}) VALUES ({marks})", list(NewRunRow.values()))
    conn.execute(
        "INSERT INTO dagresume_definition_nodes VALUES (1, 'a', 0, 'function'), (1, 'b', 1, 'function')"
    )
    records = [
        record(kind, path, reason)._replace(seq=n) for n, (path, kind, reason) in enumerate(history, 1)
    ]
    for each in records:
        values = [1, each.kind, each.at, each.path, each.reason, each.seq]
        into = "dagresume_events(run, kind, at, path, reason, seq)"
        conn.execute(f"INSERT INTO {into} VALUES (?, ?, ?, ?, ?, ?)", values)
    snapshot = Snapshot(records)
    expected = {path: status_of(snapshot.paths.get(path)) for path in {*snapshot.paths, "a", "b"}}
    exact = conn.execute("SELECT node_id, node_status FROM dagresume_checkpoints").fetchall()
    assert sorted(exact) == sorted((path, status.value) for path, status in expected.items())
    simple = conn.execute("SELECT node_id, node_status FROM workflow_checkpoints").fetchall()
    assert sorted(simple) == sorted((path, R5[status]) for path, status in expected.items())
    conn.close()


NewRunRow: dict[str, Any] = {
    "run": 1, "run_id": "r1", "workflow": "w", "version": "1", "definition": 1, "holds_key": 1,
    "status": RunStatus.RUNNING.value, "epoch": 1, "source": "manual", "auto_resumes": 0, "recoveries": 0,
    "created_at": START, "updated_at": START,
}  # fmt: skip


# -- plans ----------------------------------------------------------------------------------------------

QUESTIONS = [
    "SELECT * FROM workflow_checkpoints WHERE workflow_id = 'r7'",
    "SELECT * FROM workflow_checkpoints WHERE workflow_id = 'r7' AND node_id = 'a[5]'",
    "SELECT node_id FROM workflow_checkpoints WHERE workflow_id = 'r7' AND node_status = 'pending'",
    "SELECT workflow_id, node_id FROM workflow_checkpoints WHERE node_status = 'failed'",
    "SELECT * FROM dagresume_checkpoints WHERE workflow_id = 'r7'",
    "SELECT * FROM dagresume_checkpoints WHERE workflow_id = 'r7' AND node_status = 'waiting'",
    "SELECT * FROM dagresume_checkpoints WHERE workflow = 'w' AND node_id = 'a'",
    "SELECT run_id FROM dagresume_runs WHERE status = 'failed'",
    "SELECT run_id FROM dagresume_runs WHERE workflow = 'w' ORDER BY run DESC LIMIT 9",
]


def scans(db: Path, sql: str, values: Any = ()) -> list[str]:
    """The steps of a plan that go through a whole table of events, runs or logs without an index."""
    conn = sqlite3.connect(db)
    try:
        plan = [row[3] for row in conn.execute(f"EXPLAIN QUERY PLAN {sql}", values)]
    finally:
        conn.close()
    return [step for step in plan if re.match(r"SCAN (e|f|n|r|dagresume_\w+)\b(?!.* USING )", step)]


@pytest.mark.parametrize("sql", QUESTIONS)
async def test_no_question_to_a_view_goes_through_the_whole_journal(
    store: SQLiteStore, db: Path, sql: str
) -> None:
    found = scans(db, sql)
    if "node_status = 'failed'" in sql:
        found.remove("SCAN r")  # the arm of nodes without an event, which is never read for this status
    assert [step for step in found if step != "SCAN dagresume_checkpoints"] == []


Spy = list[tuple[str, Any]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """Every statement that the store runs."""
    seen: Spy = []

    def spying(name: str) -> Callable[..., Any]:
        def method(self: Worker, sql: str, *parameters: Any) -> sqlite3.Cursor:
            seen.append((sql, *parameters) if len(parameters) == 1 else (sql, ()))
            cursor: sqlite3.Cursor = getattr(sqlite3.Connection, name)(self, sql, *parameters)
            return cursor

        return method

    monkeypatch.setattr(Worker, "execute", spying("execute"), raising=False)
    return seen


async def test_no_statement_of_the_store_goes_through_the_whole_journal(
    store: SQLiteStore, db: Path, asked: Spy
) -> None:
    first = Unit(
        NewRun("r1", "w", "1", "k", None, 1, "manual", "{}", b""),
        [created()],
        Definition("w", "1", b"", "{}", ()),
    )
    guard = Owned(1, 1, 1)
    letter = Record("approval.decided", None, START, "ap")
    await store.commit([first])
    await store.commit([Unit(guard, [completed()])])
    await store.commit(
        [Unit(new_run("r2", 1), [created()]), Unit(guard, [completed()]), Unit(Owned(2, 1, 1), [completed()])]
    )
    await store.commit([Unit(guard, [completed()]), Unit(Owned(2, 1, 7), [completed()])])
    await store.commit(
        [Unit(Inbox(1, unless=("approval.decided", "ap")), [letter], logs=[LogLine(None, 1, 1, "", "")])]
    )
    await store.commit([Unit(guard, [run_record("run.failed", START)])])
    await store.commit([Unit(Claim(1, 1, 99), [run_record("run.claimed", START)])])
    await store.load("r1")
    await store.output([1, 2])
    await store.logs("r1")
    await store.tail(0)
    await store.tail(0, run_id="r1", kinds=["node.completed"])
    await store.tail(0, kinds=["execution.auto_resume"])
    await store.find(workflow="w", key="k")
    await store.find(workflow="w")
    await store.find(status=["running", "failed"], before=9)
    await store.find()
    statements = [entry for entry in asked if not re.match("BEGIN|COMMIT|PRAGMA|ROLLBACK", entry[0])]
    assert len(statements) > 25
    for sql, values in statements:
        assert scans(db, sql, values) == [] or sql.endswith("LIMIT ?"), sql
    await store.tail(0, kinds=["execution.auto_resume"])
    conn = sqlite3.connect(db)
    plan = str(conn.execute(f"EXPLAIN QUERY PLAN {asked[-2][0]}", asked[-2][1]).fetchall())
    conn.close()
    assert "dagresume_events_audit" in plan


def packed(path: str, text: str) -> Record:
    return completed(path, output=text)._replace(size=len(text), digest=codec.digest(text))


async def test_a_load_touches_small_outputs_alone(store: SQLiteStore, asked: Spy) -> None:
    """Those that lie in the page of their record; a tail touches none."""
    outputs = ["1", '"' + 100 * "s" + '"', '"' + 1000 * "b" + '"']
    done = [packed(f"n{n}", text) for n, text in enumerate(outputs)]
    await store.commit([Unit(new_run("r1", 1), [created(), *done])])
    asked.clear()
    loaded = await store.load("r1")
    assert loaded is not None
    assert [record.output for record in loaded.records] == [None, *outputs[:2], None]
    await store.tail(0)
    found = [sql for sql, _ in asked if "output" in sql]
    assert len(found) == 1
    assert "CASE WHEN size <= " in found[0]


async def test_a_small_output_that_is_another_now_is_noticed_by_whoever_takes_it(
    store: SQLiteStore, db: Path
) -> None:
    await store.commit([Unit(new_run("r1", 1), [created(), packed("n", '"sound"')])])
    sound = await store.load("r1")
    assert sound is not None
    assert cell_of(sound.records[1]) == '"sound"'
    with closing(sqlite3.connect(db)) as conn, conn:
        conn.execute("UPDATE dagresume_events SET output = '\"other\"' WHERE path = 'n'")
    altered = await store.load("r1")
    assert altered is not None
    assert cell_of(altered.records[1]) == Stored.of(altered.records[1])


@pytest.mark.parametrize("written", ["x'31'", "CAST(x'22c322' AS TEXT)"])
async def test_a_small_output_that_is_no_text_any_more_is_left_in_the_store(
    store: SQLiteStore, db: Path, written: str
) -> None:
    """Whoever needs it finds out; a run that does not need it is loaded."""
    await store.commit([Unit(new_run("r1", 1), [created(), packed("n", '"sound"')])])
    before = await store.load("r1")
    assert before is not None
    assert before.records[1].output == '"sound"'
    with closing(sqlite3.connect(db)) as conn, conn:
        conn.execute(f"UPDATE dagresume_events SET output = {written} WHERE path = 'n'")
    loaded = await store.load("r1")
    assert loaded is not None
    assert [record.output for record in loaded.records] == [None, None]
