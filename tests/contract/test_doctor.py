"""What the doctor finds in a database that may be in any state, and that it changes nothing of it."""

from __future__ import annotations

# ruff: noqa: ASYNC220, ASYNC221, ASYNC240  # nothing else is on the loop of these tests
import asyncio
import contextlib
import json
import os
import shlex
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dagresume import AlreadyRunning, Engine, RunLocked, StoreError, Workflow
from dagresume import doctor as of_doctor
from dagresume.doctor import Finding, Severity, examine, sound
from dagresume.frames import Log, look
from dagresume.peek import Peek, peek
from dagresume.rebuild import rebuild
from dagresume.schema import VERSION, expected
from tests.contract.patients import die, opened, picture, run, wf
from tests.engine.test_random_ways import Garden

Damage = Callable[[Path], None]


@pytest.fixture
def db(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home" / "runs.db"


def problems(path: Path) -> list[Finding]:
    """What needs somebody; looked for twice, and nothing may be changed by it.

    Not beside an engine of this process: the picture opens the file, and closing it drops the engine's locks.
    """
    before = picture(path.parent)
    found = examine(path)
    assert found == examine(path)
    assert picture(path.parent) == before
    assert all("\n" not in str(finding) for finding in found)
    return [finding for finding in found if finding.severity is Severity.PROBLEM]


def one(path: Path) -> Finding:
    [finding] = problems(path)
    return finding


# -- sound ----------------------------------------------------------------------------------------------


async def test_a_sound_database_needs_nobody(db: Path) -> None:
    await run(db)
    db.chmod(0o600)
    assert examine(db) == []


async def test_a_living_engine_is_seen_and_not_disturbed(db: Path) -> None:
    """B31: also in its own process, whose locks a careless look would drop."""
    async with Engine(db, workflows=[wf], spill_bytes=1000) as engine:
        await engine.run(wf, {"count": 3})
        [finding] = [f for f in examine(db) if f.kind == "session"]
        assert (finding.severity, str(os.getpid()) in finding.text) == (Severity.NOTE, True)
        assert not [f for f in examine(db) if f.severity is Severity.PROBLEM]
        other = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('PRAGMA journal_mode = DELETE')"
        refused = subprocess.run(
            [sys.executable, "-c", other, str(db)], capture_output=True, text=True, check=False, timeout=50
        )
        assert "locked" in refused.stderr, "the engine's own locks are gone"
        await engine.run(wf, {"count": 2})
    assert problems(db) == []


def test_a_log_that_was_left_is_read_with_and_without_its_index(db: Path) -> None:
    """What is only in the log is seen, and neither the log nor an index is made, changed or removed."""
    run_id = die(db)
    for index in (True, False):
        if not index:
            Path(f"{db}-shm").unlink()
        found = one(db)
        assert (found.kind, run_id in found.cure) == ("run", True)
    Path(f"{db}-wal").unlink()
    assert [f.kind for f in problems(db)] != ["run"], "the log was not needed"


async def left_log(db: Path) -> bytes:
    """A database and the log that a process left which died: all that was stored is in it."""
    die(db)
    Path(f"{db}-shm").unlink(missing_ok=True)
    return Path(f"{db}-wal").read_bytes()


@pytest.mark.parametrize("damage", ["header", "first frame", "cut", "noise"])
async def test_a_log_of_which_nothing_can_be_read_is_told_of_and_kept(db: Path, damage: str) -> None:
    """SQLite deletes such a log as it closes the file."""
    log = bytearray(await left_log(db))
    if damage == "header":
        log[20] ^= 0xFF
    elif damage == "first frame":
        log[32 + 24 + 500] ^= 0xFF
    elif damage == "cut":
        del log[32 + 4120 * 2 :]
    else:
        log = bytearray(os.urandom(len(log)))
    Path(f"{db}-wal").write_bytes(log)
    assert {finding.kind for finding in problems(db)} == {"log"}
    assert Path(f"{db}-wal").read_bytes() == log


async def test_what_lies_behind_a_damaged_frame_of_the_log_is_counted(db: Path) -> None:
    """A torn log: what was acknowledged behind the break is not read any more."""
    log = bytearray(await left_log(db))
    held = look(db)
    assert held is not None
    assert (held.sound, held.lost_commits) == (True, 0)
    torn: Log | None = held
    for whole in range(held.frames, 0, -1):
        log[32 + 4120 * (whole - 1) + 24 + 5] ^= 0xFF
        Path(f"{db}-wal").write_bytes(log)
        torn = look(db)
        assert torn is not None
        assert torn.commits + torn.lost_commits == held.commits
        assert torn.frames < whole
        if torn.lost_commits > 1 and torn.commits:
            break
    assert torn is not None
    found = [finding for finding in problems(db) if finding.kind == "log"]
    assert f"{torn.lost_commits} transactions behind it are not read" in found[0].text


async def test_who_begins_to_write_meanwhile_is_noticed(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await run(db)
    with peek(db) as looked:
        assert not looked.moved
        await run(db)
        assert looked.moved
    # and then one looks again: the damage that an old view of a new file shows is none
    looks = []

    def look(of: Peek) -> list[Finding]:
        looks.append(of)
        if len(looks) == 1:
            with opened(db) as conn:
                conn.execute("INSERT INTO dagresume_cursors VALUES ('a', NULL, 1)")
            return [of_doctor.problem("integrity", "here", "torn")]
        return []

    monkeypatch.setattr(of_doctor, "_CHECKS", (look,))
    assert [f for f in examine(db) if f.kind == "integrity"] == []
    assert len(looks) == 2


# -- files in any state ---------------------------------------------------------------------------------


def cut(share: float) -> Damage:
    return lambda path: os.truncate(path, int(path.stat().st_size * share))


def overwrite(start: int, count: int) -> Damage:
    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(start)
            file.write(os.urandom(count))

    return damage


def foreign(path: Path) -> None:
    path.unlink()
    with opened(path) as conn:
        conn.execute("CREATE TABLE theirs(x)")


def newer(path: Path) -> None:
    with opened(path) as conn:
        conn.execute("UPDATE dagresume_meta SET value = ? WHERE name = 'schema_version'", [str(VERSION + 1)])


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def write(content: bytes) -> Damage:
    def damage(path: Path) -> None:
        path.write_bytes(content)

    return damage


def no_version(path: Path) -> None:
    with opened(path) as conn:
        conn.execute("DELETE FROM dagresume_meta")


STATES: list[tuple[str, Damage, str, str, str]] = [
    ("missing", lambda path: path.unlink(), "file", "no such file", "--db"),
    ("a folder", folder, "file", "is a folder", "--db"),
    ("one byte", write(b"x"), "database", "not a database", "--db"),
    ("a picture", write(b"\xff\xd8\xff\xe0" + b"JFIF" * 3000), "database", "is no database", "backup"),
    ("a header overwritten", overwrite(0, 100), "database", "is no database", "backup"),
    ("cut in the middle", cut(0.5), "database", "damaged", "backup"),
    ("somebody else's", foreign, "database", "of another program", "--db"),
    ("newer", newer, "database", f"schema {VERSION + 1}", "pip install -U dagresume"),
    ("no version", no_version, "database", "no schema_version", "--db"),
]


@pytest.mark.parametrize(
    ("damage", "kind", "told", "cure"), [s[1:] for s in STATES], ids=[s[0] for s in STATES]
)
async def test_a_file_in_any_state_is_told_of_in_one_line(
    damage: Damage, kind: str, told: str, cure: str, db: Path
) -> None:
    """B28."""
    await run(db)
    damage(db)
    found = problems(db)[0]
    assert (found.kind, found.where) == (kind, str(db))
    assert told in found.text
    assert cure in found.cure


@pytest.mark.parametrize("page", range(1, 24))
async def test_no_page_that_is_overwritten_stops_the_look(page: int, db: Path) -> None:
    """Every page in turn: all of it is told of, nothing raised, nothing changed."""
    await run(db)
    assert db.stat().st_size // 4096 >= 24
    overwrite(page * 4096, 4096)(db)
    found = problems(db)
    assert found or integrity(db) == "ok"


def integrity(db: Path) -> str:
    """What SQLite itself says of all pages."""
    try:
        with opened(db) as conn:
            return str(conn.execute("PRAGMA integrity_check").fetchone()[0])
    except sqlite3.DatabaseError as error:
        return str(error)


def test_an_empty_file_is_a_new_database(db: Path) -> None:
    db.touch()
    assert problems(db) == []
    assert [f.kind for f in examine(db) if "no runs yet" in f.text] == ["file"]


def test_a_file_of_0_bytes_beside_its_log_is_not_touched(db: Path) -> None:
    """SQLite itself would delete the log, also if it may only read."""
    die(db)
    os.truncate(db, 0)
    found = one(db)
    assert (found.kind, "cut to 0 bytes" in found.text) == ("file", True)


def test_a_transaction_of_another_journal_mode_that_was_cut_off_is_told_of(db: Path) -> None:
    asyncio.run(run(db))
    Path(f"{db}-journal").write_bytes(b"x" * 600)
    assert "rollback journal" in one(db).text


def test_a_database_that_somebody_locks_is_told_of(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagresume.peek._TIMEOUT", 0.05)
    die(db)
    program = """
import sqlite3, sys
conn = sqlite3.connect(sys.argv[1], isolation_level=None)
conn.execute("PRAGMA locking_mode = EXCLUSIVE")
conn.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", program, str(db)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        found = [f for f in examine(db) if f.severity is Severity.PROBLEM]
        other.communicate()
    assert [f.kind for f in found] == ["locked"]
    assert str(other.pid) in found[0].text


AS_SOMEBODY = """
import json, os, sys
import encodings.idna
from dagresume.doctor import examine
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
print(json.dumps([(f.kind, f.severity, str(f)) for f in examine(sys.argv[1])]))
"""


@pytest.mark.skipif(os.name == "nt", reason="the permissions are POSIX's")
@pytest.mark.parametrize("state", ["closed", "log", "log without index", "unreadable"])
def test_a_read_only_folder_can_be_looked_at(state: str) -> None:
    """As somebody who is not root: for root there are no permissions."""
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders are closed to others
        Path(place).chmod(0o755)
        look_as_somebody(state, Path(place) / "home" / "runs.db")


def look_as_somebody(state: str, db: Path) -> None:
    db.parent.mkdir()
    if state in {"closed", "unreadable"}:
        asyncio.run(run(db))
    else:
        die(db)
    if state == "log without index":
        Path(f"{db}-shm").unlink()
    for file in db.parent.rglob("*"):
        file.chmod(0o555 if file.is_dir() else 0o444)
    if state == "unreadable":
        db.chmod(0o000)
    db.parent.chmod(0o555)
    before = picture(db.parent)
    try:
        done = subprocess.run(
            [sys.executable, "-c", AS_SOMEBODY, str(db)],
            capture_output=True,
            text=True,
            check=False,
            timeout=50,
        )
    finally:
        db.parent.chmod(0o755)
        for file in db.parent.rglob("*"):
            file.chmod(0o755 if file.is_dir() else 0o644)
    assert picture(db.parent) == before
    found = json.loads(done.stdout or "null"), done.stderr
    kinds = [kind for kind, severity, _ in found[0] if severity == "problem"]
    expected_kinds = {"closed": [], "unreadable": ["file"]}.get(state, ["run"])
    assert sorted(kinds) == sorted([*expected_kinds, "permissions"])
    assert "chmod" in str(found[0])


# -- inside ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), [key for key in expected() if key[0] != "table"])
async def test_a_missing_view_or_index_is_named_and_its_cure_mends_it(kind: str, name: str, db: Path) -> None:
    await run(db)
    with opened(db) as conn:
        conn.execute(f"DROP {kind} {name}")
    found = [f for f in problems(db) if f.kind == "schema"]
    assert [name in f.text for f in found] == [True]
    *_, file, statement = shlex.split(found[0].cure)
    assert file == str(db)
    with opened(db) as conn:
        conn.executescript(statement)
        made = conn.execute("SELECT sql FROM sqlite_master WHERE name = ?", [name]).fetchone()
    assert " ".join(made[0].split()) == " ".join(expected()[kind, name].split())


async def test_a_view_that_is_another_is_named(db: Path) -> None:
    await run(db)
    with opened(db) as conn:
        conn.execute("DROP VIEW workflow_checkpoints")
        conn.execute("CREATE VIEW workflow_checkpoints AS SELECT 1")
    assert "not as it should be" in one(db).text


async def test_a_missing_table_is_told_of(db: Path) -> None:
    await run(db)
    with opened(db) as conn:
        conn.execute("DROP TABLE dagresume_sessions")
    found = problems(db)
    assert "the table dagresume_sessions is missing." in [f.text for f in found]
    assert {f.kind for f in found} == {"schema", "integrity"}


async def test_an_index_that_lost_an_entry_is_made_again_by_its_cure(db: Path) -> None:
    await run(db)
    with opened(db) as conn:
        conn.execute("PRAGMA writable_schema = ON")
        conn.execute("UPDATE sqlite_master SET sql = sql || ' WHERE 0' WHERE name = 'dagresume_runs_status'")
    with opened(db) as conn:
        conn.execute("REINDEX dagresume_runs_status")
        conn.execute("PRAGMA writable_schema = ON")
        sql = expected()["index", "dagresume_runs_status"]
        conn.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'dagresume_runs_status'", [sql])
    found = one(db)
    assert (found.kind, "REINDEX" in found.cure) == ("integrity", True)
    with opened(db) as conn:
        conn.execute("REINDEX")
    assert problems(db) == []


# -- values ---------------------------------------------------------------------------------------------


async def mended(db: Path, run_id: str, finding: Finding) -> None:
    """Do what the cure says, and see that it is one."""
    path = finding.cure.partition(" --from ")[2].strip("`'")
    async with Engine(db, workflows=[wf], spill_bytes=1000) as engine:
        await engine.retry(run_id, path)
    assert problems(db) == []


async def test_an_altered_output_is_named_with_its_path(db: Path) -> None:
    """B155."""
    run_id = await run(db)
    with opened(db) as conn:
        conn.execute("UPDATE dagresume_events SET output = '[0,1,3]' WHERE path = 'names'")
    found = one(db)
    assert found.kind == "output"
    assert f"`dagresume retry {run_id} --from names`" in found.cure
    await mended(db, run_id, found)


async def test_an_output_that_is_gone_is_named(db: Path) -> None:
    run_id = await run(db)
    with opened(db) as conn:
        conn.execute("UPDATE dagresume_events SET output = NULL WHERE path = 'score[1]'")
    found = one(db)
    assert (found.kind, "score[1] is missing" in found.text) == ("output", True)
    await mended(db, run_id, found)


def blob(db: Path, run_id: str) -> Path:
    [file] = Path(f"{db}.blobs", run_id).iterdir()
    return file


@pytest.mark.parametrize("damage", ["removed", "cut", "altered", "swapped"])
async def test_a_blob_that_is_gone_or_altered_is_named(damage: str, db: Path) -> None:
    """B155."""
    run_id = await run(db)
    file = blob(db, run_id)
    if damage == "removed":
        file.unlink()
    else:
        content = file.read_bytes()
        file.write_bytes(content[:-9] if damage == "cut" else content[::-1].replace(b"b", b"c", 1))
    found = one(db)
    assert (found.kind, "big" in found.text, str(file) in found.text) == ("blob", True, True)
    await mended(db, run_id, found)


async def test_inputs_in_a_blob_are_looked_at_too(db: Path) -> None:
    async with Engine(db, spill_bytes=10) as engine:
        result = await engine.run(wf, {"count": 3}, raise_on_failure=False)
        with opened(db) as conn:
            facts = conn.execute("SELECT data FROM dagresume_events WHERE kind = 'run.created'").fetchone()[0]
    assert "inputs_blob" in facts
    assert problems(db) == []
    name = facts.partition('"inputs_blob": "')[2][:64]
    Path(f"{db}.blobs", result.run_id, name).unlink()
    found = next(f for f in problems(db) if "value" in f.text)
    assert "fork" in found.cure


async def test_what_no_event_names_is_a_note_of_runs_at_rest_only(db: Path) -> None:
    run_id = await run(db)
    folder = Path(f"{db}.blobs", run_id)
    (folder / ("0" * 64)).write_text("left over")
    (folder / f".{'1' * 64}.draft").write_text("half wri")
    Path(f"{db}.blobs", "of-nobody").mkdir()
    Path(f"{db}.blobs", "of-nobody", "2" * 64).write_text("x")
    Path(f"{db}.artifacts", "of-nobody").mkdir()
    assert problems(db) == []
    notes = [f for f in examine(db) if f.kind == "orphan"]
    assert len(notes) == 3
    assert "2 files" in str(notes)
    assert "1 of them half written" in str(notes)
    for finding in notes:
        subprocess.run(finding.cure[finding.cure.index("rm ") :], shell=True, check=True)
    assert [f for f in examine(db) if f.kind == "orphan"] == []
    assert problems(db) == []


async def test_files_of_a_run_under_way_are_left_alone(db: Path) -> None:
    """A big value is on the disk before the event that names it, that of a new run before its row."""
    begun, go = asyncio.Event(), asyncio.Event()
    slow = Workflow("slow", idempotent=True)

    @slow.node
    async def stays() -> None:
        begun.set()
        await go.wait()

    async with Engine(db) as engine:
        handle = await engine.start(slow)
        await begun.wait()
        for name in (handle.run_id, "just-beginning"):
            Path(f"{db}.blobs", name).mkdir(parents=True)
            Path(f"{db}.blobs", name, "0" * 64).write_text("soon named")
        assert [f for f in examine(db) if f.kind == "orphan"] == []
        go.set()
        await handle.result()
    assert len([f for f in examine(db) if f.kind == "orphan"]) == 2


# -- runs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "told", "command"),
    [
        ("status = 'pending', updated_at = 1", "nobody has taken it up", "resume"),
        ("status = 'waiting', wake_at = 0", "its letter came", "resume"),
        ("status = 'waiting', wake_at = 7", "was to go on at 1970", "resume"),
        ("status = 'running', owner = NULL", "nobody drives it", "resume"),
        ("status = 'running', owner = 77", "nobody drives it any more", "resume"),
        ("status = 'rolling_back', owner = 1", "nobody rolls it back any more", "rollback"),
        ("status = 'rolling_back', reason = 'shutdown'", "not rolled back to its end (shutdown)", "rollback"),
    ],
)
async def test_a_run_that_is_stuck_is_named_with_the_command_that_goes_on(
    columns: str, told: str, command: str, db: Path
) -> None:
    """B101: also where the session that owned it is not there any more."""
    run_id = await run(db)
    with opened(db) as conn:
        conn.execute(f"UPDATE dagresume_runs SET {columns}")
    [found] = [f for f in problems(db) if f.kind == "run"]
    assert told in found.text
    assert f"`dagresume {command} {run_id}`" in found.cure


@pytest.mark.parametrize(
    "columns", ["status = 'waiting', wake_at = 9e15", "status = 'waiting', wake_at = NULL"]
)
async def test_a_run_that_waits_as_it_should_is_not_stuck(columns: str, db: Path) -> None:
    await run(db)
    with opened(db) as conn:
        conn.execute(f"UPDATE dagresume_runs SET {columns}")
    assert [f for f in problems(db) if f.kind == "run"] == []


# -- the log --------------------------------------------------------------------------------------------

READER = """
import sqlite3, sys
conn = sqlite3.connect(sys.argv[1], isolation_level=None)
conn.execute("BEGIN")
conn.execute("SELECT count(*) FROM dagresume_events").fetchone()
print("reading", flush=True)
sys.stdin.read()
"""


async def test_a_long_log_that_nobody_uses_is_emptied_by_its_cure(
    db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_doctor, "LONG_LOG", 1)
    die(db)
    found = [f for f in problems(db) if f.kind == "log"]
    assert "nobody has it open" in found[0].text
    async with Engine(db) as engine:  # as `dagresume list` does
        await engine.runs()
    assert [f for f in problems(db) if f.kind == "log"] == []


@pytest.mark.skipif(sys.platform != "linux", reason="who holds a lock is read from /proc")
async def test_whoever_keeps_the_log_from_starting_over_is_named(
    db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B26."""
    monkeypatch.setattr(of_doctor, "LONG_LOG", 1)
    command = [sys.executable, "-c", READER, str(db)]
    async with Engine(db, workflows=[wf], spill_bytes=1000) as engine:
        await engine.run(wf, {"count": 3})
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "reading\n"
            await engine.run(wf, {"count": 3})
            [found] = [f for f in examine(db) if f.kind == "log"]
            reader.communicate()
        assert found.severity is Severity.PROBLEM
        assert f"process {reader.pid} (" in found.text
        assert f"kill {reader.pid}" in found.cure


# -- the projection -------------------------------------------------------------------------------------

WRONG = {
    "status": "failed", "reason": "no", "wake_at": 5, "finished_at": None, "usage": "{}", "holds_key": 0,
    "created_at": 3, "updated_at": 4, "inputs_digest": b"x", "forked_at_seq": 8,
}  # fmt: skip


@pytest.mark.parametrize("column", WRONG)
async def test_a_row_that_is_not_what_its_journal_says_is_named_and_mended(column: str, db: Path) -> None:
    run_id = await run(db, key="night")
    with opened(db) as conn:
        before = conn.execute("SELECT * FROM dagresume_runs").fetchall()
        conn.execute(f"UPDATE dagresume_runs SET {column} = ?", [WRONG[column]])
    [found] = [f for f in problems(db) if f.kind == "projection"]
    assert (found.where, found.text.split()[0]) == (f"run {run_id}", column)
    [change] = rebuild(db)
    assert (change.run_id, change.column, change.stored) == (run_id, column, WRONG[column])
    with opened(db) as conn:
        assert conn.execute("SELECT * FROM dagresume_runs").fetchall() == before
    assert problems(db) == []
    assert rebuild(db) == []


async def test_a_key_goes_back_to_the_run_that_holds_it(db: Path) -> None:
    first, second = await run(db, key="night"), await run(db, key="night", fresh=True)
    with opened(db) as conn:
        conn.execute("UPDATE dagresume_runs SET holds_key = 0")
        conn.execute("UPDATE dagresume_runs SET holds_key = 1 WHERE run_id = ?", [first])
    assert {(c.run_id, c.rebuilt) for c in rebuild(db)} == {(first, 0), (second, 1)}


async def test_nothing_is_rebuilt_under_a_living_owner(db: Path) -> None:
    begun, go = asyncio.Event(), asyncio.Event()
    slow = Workflow("slow", idempotent=True)

    @slow.node
    async def stays() -> None:
        begun.set()
        await go.wait()

    async with Engine(db) as engine:
        handle = await engine.start(slow)
        await begun.wait()
        with opened(db) as conn:
            conn.execute("UPDATE dagresume_runs SET created_at = 1")
            before = conn.execute("SELECT * FROM dagresume_runs").fetchall()
        with pytest.raises(RunLocked, match=handle.run_id):
            rebuild(db)
        with opened(db) as conn:
            assert conn.execute("SELECT * FROM dagresume_runs").fetchall() == before
        go.set()
        await handle.result()
        assert [change.column for change in rebuild(db)] == ["created_at"], "an open engine that owns no run"


async def test_what_cannot_be_rebuilt_is_told_of(db: Path, tmp_path: Path) -> None:
    run_id = await run(db)
    await run(db)
    with opened(db) as conn:
        conn.execute("DELETE FROM dagresume_events WHERE run = 1")
    assert f"run {run_id}" in [f.where for f in problems(db) if "journal is gone" in f.text]
    with opened(db) as conn:
        conn.execute("UPDATE dagresume_events SET run = 9 WHERE run = 2")
    assert "of runs that are not there" in str(problems(db))
    with pytest.raises(StoreError, match="no database"):
        rebuild(tmp_path / "absent.db")
    assert not (tmp_path / "absent.db").exists()


@pytest.mark.parametrize("seed", range(6))
async def test_the_rows_of_random_runs_are_what_their_journals_say(seed: int, db: Path) -> None:
    """Failed, cut off, waiting, told, resumed, retried, forked, cancelled: all of it."""
    garden = Garden(seed)
    wf = garden.grow()
    async with Engine(db, workflows=[wf]) as engine:
        runs = [
            (await engine.run(wf, {"n": n}, key=f"k{n % 2}", fresh=True, raise_on_failure=False)).run_id
            for n in range(3)
        ]
        garden.broken = {garden.rng.choice(sorted(garden.began))}
        broken = await engine.run(wf, {"n": 5}, key="k0", fresh=True, raise_on_failure=False)
        runs.append(broken.run_id)
        garden.broken = set()
        for run_id in runs:
            for path, node in (await engine.get(run_id)).nodes.items():
                if node.status == "waiting" and node.reason == "approval":
                    await engine.decide(run_id, path, garden.rng.random() < 0.7)
                if node.status == "waiting" and node.reason == "event":
                    await engine.signal(run_id, str(node.waits_for), 1)
        runs.append((await engine.fork(runs[0], "top", raise_on_failure=False)).run_id)
        for run_id in garden.rng.sample(runs, 3):
            with contextlib.suppress(AlreadyRunning):  # a newer run has its key
                await engine.retry(run_id, "top", raise_on_failure=False)
        await engine.cancel(garden.rng.choice(runs))
        assert [f for f in examine(db) if f.kind in {"projection", "output", "blob"}] == []
    kinds = {f.kind for f in problems(db)}
    assert kinds <= {"run"}, "a run that was told something after it was let go of"
    assert rebuild(db) == []


def test_sound_is_what_needs_nobody() -> None:
    note, problem = (
        Finding("log", severity, "here", "told") for severity in (Severity.NOTE, Severity.PROBLEM)
    )
    assert sound([])
    assert sound([note])
    assert not sound([note, problem])
    assert str(problem) == "here: told"
