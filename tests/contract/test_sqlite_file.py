"""How a file becomes a store, and which files are left alone (B20, B23, B28, B29, B163)."""

import asyncio
import gc
import hashlib
import multiprocessing
import os
import re
import sqlite3
import subprocess
import sys
import threading
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dagresume.errors import SchemaTooNew, StoreCorrupt, StoreError, StoreFull, StoreReadOnly
from dagresume.schema import APPLICATION_ID, VERSION
from dagresume.sessions import this_session
from dagresume.sqlite import SQLiteStore
from dagresume.store import SYSTEM_CLOCK, Session, Unique, Unit
from dagresume.writer import Writer


def session() -> Session:
    return this_session(SYSTEM_CLOCK.now(), 30_000_000)


async def opened(path: Path, **options: Any) -> SQLiteStore:
    store = SQLiteStore(path, **options)
    await store.open(session())
    return store


def beside(path: Path) -> dict[str, str]:
    """Every file whose name begins like this one's, and what is in it."""
    found = path.parent.glob(f"{path.name}*")
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in found if each.is_file()}


def put(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def overwrite(path: Path, place: int, content: bytes) -> None:
    old = path.read_bytes()
    path.write_bytes(old[:place] + content + old[place + len(content) :])


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def inside(place: Path) -> list[str]:
    return [each.name for each in place.iterdir()]


def ask(path: Path, sql: str) -> list[Any]:
    conn = sqlite3.connect(path)
    try:
        return conn.execute(sql).fetchall()
    finally:
        conn.close()


# -- becoming a store -----------------------------------------------------------------------------------


@pytest.mark.parametrize("there", [False, True])
async def test_a_new_or_empty_file_becomes_a_store_and_is_left_tidy(db: Path, there: bool) -> None:
    if there:
        put(db, b"")
    store = await opened(db)
    await store.close()
    assert list(beside(db)) == [db.name]
    assert ask(db, "PRAGMA application_id") == [(APPLICATION_ID,)]
    assert ask(db, "PRAGMA user_version") == [(VERSION,)]
    assert ask(db, "SELECT value FROM dagresume_meta WHERE name = 'schema_version'") == [(str(VERSION),)]
    assert ask(db, "PRAGMA integrity_check") == [("ok",)]


@pytest.mark.parametrize("name", ["a b.db", "ü%41?#&.db", "mode=ro", "100%.db", "a'b.db"])
async def test_a_file_may_be_called_anything(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    store = await opened(path)
    await store.commit([Unit(Unique("x"))])
    assert await store.find() == []
    assert store.output_now([1]) == [None]
    assert store.renew(2**60)
    await store.close()
    assert inside(tmp_path) == [name]


async def test_the_file_stays_the_same_one_when_the_folder_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = await opened(Path("runs.db"))
    sub = folder(tmp_path / "sub")
    monkeypatch.chdir(sub)
    assert store.renew(2**60)
    assert store.output_now([1]) == [None]
    await store.close()
    assert store.name == "runs.db"
    assert inside(sub) == []


async def test_many_coroutines_open_a_new_file_at_once(db: Path) -> None:
    """B20."""
    stores = [SQLiteStore(db) for _ in range(20)]
    numbers = await asyncio.gather(*(store.open(session()) for store in stores))
    assert sorted(numbers) == list(range(1, 21))
    await asyncio.gather(*(store.close() for store in stores))
    assert ask(db, "SELECT count(*) FROM dagresume_meta WHERE name = 'schema_version'") == [(1,)]
    assert ask(db, "SELECT count(*) FROM dagresume_sessions WHERE ended_at IS NOT NULL") == [(20,)]


def open_and_write(path: Path, barrier: Any, name: str) -> None:
    async def main() -> None:
        barrier.wait()
        stores = [SQLiteStore(path) for _ in range(5)]
        await asyncio.gather(*(store.open(session()) for store in stores))
        for n, store in enumerate(stores):
            await store.commit([Unit(Unique(f"{name}{n}"))])
        await asyncio.gather(*(store.close() for store in stores))

    warnings.simplefilter("error")
    asyncio.run(main())


def test_many_processes_open_a_new_file_at_once(db: Path) -> None:
    """B20."""
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(4)
    processes = [spawn.Process(target=open_and_write, args=(db, barrier, f"p{n}:")) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(50)
    assert [process.exitcode for process in processes] == [0] * 4
    assert ask(db, "SELECT count(*) FROM dagresume_cursors") == [(20,)]
    assert ask(db, "SELECT count(*) FROM dagresume_meta WHERE name = 'schema_version'") == [(1,)]
    assert list(beside(db)) == [db.name]


# -- files that are not ours ----------------------------------------------------------------------------

JPEG = bytes.fromhex("ffd8ffe000104a46494600010100000100010000ffdb") * 400


@pytest.mark.parametrize(
    "content", [b"x", b"hello\n" * 5, JPEG, b"SQLite format 3\0", b"\0" * 5000, JPEG[:99]]
)
@pytest.mark.parametrize("adopt", [False, True])
async def test_a_file_that_is_no_database_is_refused_untouched(db: Path, content: bytes, adopt: bool) -> None:
    """B28."""
    put(db, content)
    before = beside(db)
    with pytest.raises(StoreCorrupt) as caught:
        await opened(db, adopt=adopt)
    assert str(db) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert beside(db) == before


async def test_a_store_whose_header_was_overwritten_is_refused_untouched(db: Path) -> None:
    """B28."""
    await (await opened(db)).close()
    overwrite(db, 0, bytes(range(100, 200)))
    before = beside(db)
    with pytest.raises(StoreCorrupt):
        await opened(db)
    assert beside(db) == before


async def test_a_store_that_was_emptied_starts_anew(db: Path) -> None:
    """B28."""
    await (await opened(db)).close()
    put(db, b"")
    await (await opened(db)).close()
    assert ask(db, "SELECT count(*) FROM dagresume_sessions") == [(1,)]


@pytest.mark.parametrize("mode", ["delete", "wal"])
@pytest.mark.parametrize(
    "claim", ["CREATE TABLE t(x)", "PRAGMA user_version = 3", "PRAGMA application_id = 7"]
)
async def test_a_database_of_somebody_else_is_refused_untouched(db: Path, mode: str, claim: str) -> None:
    conn = sqlite3.connect(db)
    conn.execute(f"PRAGMA journal_mode = {mode}")
    conn.execute(claim)
    conn.close()
    before = beside(db)
    with pytest.raises(StoreCorrupt, match="adopt=True"):
        await opened(db)
    assert beside(db) == before


async def test_a_database_of_somebody_else_can_be_adopted(db: Path) -> None:
    conn = sqlite3.connect(db)
    conn.executescript(
        "CREATE TABLE t(x); INSERT INTO t VALUES (1); PRAGMA user_version = 3; PRAGMA application_id = 7"
    )
    conn.close()
    await (await opened(db, adopt=True)).close()
    assert ask(db, "SELECT x FROM t") == [(1,)]
    assert ask(db, "PRAGMA user_version") == [(3,)], "it may steer somebody's migrations"
    assert ask(db, "PRAGMA application_id") == [(7,)]
    await (await opened(db)).close()


async def test_a_damaged_database_is_not_adopted(db: Path) -> None:
    conn = sqlite3.connect(db)
    conn.executescript("CREATE TABLE t(x); CREATE INDEX i ON t(x)")
    conn.executemany("INSERT INTO t VALUES (?)", [(f"{n:0500}",) for n in range(500)])
    conn.commit()
    conn.close()
    overwrite(db, 8192, os.urandom(8192))
    before = beside(db)
    with pytest.raises(StoreCorrupt):
        await opened(db, adopt=True)
    assert beside(db) == before


@pytest.mark.parametrize("adopt", [False, True])
async def test_a_newer_schema_is_refused_untouched(db: Path, adopt: bool) -> None:
    await (await opened(db)).close()
    conn = sqlite3.connect(db, isolation_level=None)
    conn.execute("UPDATE dagresume_meta SET value = '99' WHERE name = 'schema_version'")
    conn.close()
    before = beside(db)
    with pytest.raises(SchemaTooNew) as caught:
        await opened(db, adopt=adopt)
    assert (caught.value.found, caught.value.known) == (99, VERSION)
    assert beside(db) == before


@pytest.mark.parametrize("damage", ["DELETE FROM dagresume_meta", "UPDATE dagresume_meta SET value = 'x'"])
async def test_a_store_without_its_version_is_refused(db: Path, damage: str) -> None:
    await (await opened(db)).close()
    conn = sqlite3.connect(db, isolation_level=None)
    conn.execute(damage)
    conn.close()
    with pytest.raises(StoreCorrupt, match="schema_version"):
        await opened(db)


async def test_a_file_of_a_version_that_was_never_released_is_refused_untouched(db: Path) -> None:
    await (await opened(db)).close()
    with closing(sqlite3.connect(db, isolation_level=None)) as conn:
        [(made,)] = conn.execute("SELECT sql FROM sqlite_master WHERE name = 'dagresume_events'")
        stored = re.sub(
            r"status TEXT GENERATED ALWAYS AS \(.*?END\) VIRTUAL", "status TEXT", made, flags=re.DOTALL
        )
        assert stored != made
        conn.execute("PRAGMA writable_schema = ON")
        conn.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'dagresume_events'", [stored])
    before = beside(db)
    with pytest.raises(StoreError, match=r"runs.db: .* never released.*--db FILE"):
        await opened(db)
    assert beside(db) == before


async def test_an_sqlite_without_generated_columns_is_named(
    db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 30, 1))
    with pytest.raises(StoreError, match=r"runs.db: .* Take a Python with SQLite 3\.31 or newer"):
        await opened(db)


# -- places where nothing can be written ----------------------------------------------------------------


async def test_a_place_that_cannot_be_is_named(tmp_path: Path) -> None:
    put(tmp_path / "file", b"")
    folder(tmp_path / "folder")
    for place, problem in (
        (tmp_path / "absent" / "runs.db", f"no folder {tmp_path / 'absent'}"),
        (tmp_path / "file" / "runs.db", str(tmp_path / "file")),
        (tmp_path / "folder", "it is a folder"),
        (Path("/proc/runs.db"), "cannot be opened or made"),
    ):
        with pytest.raises(StoreReadOnly) as caught:
            await opened(place)
        assert str(place) in str(caught.value)
        assert problem in str(caught.value)
        assert "\n" not in str(caught.value)


PROGRAM_OF_ANOTHER = """
import asyncio, os, sys
from dagresume.sqlite import SQLiteStore
from dagresume.sessions import this_session
from dagresume.errors import StoreReadOnly
import anyio._backends._asyncio, encodings.idna
async def main():
    try:
        await SQLiteStore(sys.argv[1]).open(this_session(1, 1))
    except StoreReadOnly as error:
        assert sys.argv[1] in str(error), error
        print("read only")
if hasattr(os, "geteuid") and os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
asyncio.run(main())
"""


@pytest.mark.parametrize("what", ["file", "folder", "store"])
def test_what_may_not_be_written_is_read_only(tmp_path: Path, what: str) -> None:
    """As somebody who is not root: for root there are no permissions."""
    for place in (tmp_path, *list(tmp_path.parents)[:2]):
        place.chmod(0o777)
    path = tmp_path / "runs.db"
    if what != "folder":
        path.touch()
    if what == "store":
        asyncio.run(open_and_close(path))
    if what != "folder":
        path.chmod(0o444)
    tmp_path.chmod(0o777 if what == "file" else 0o555)
    command = [sys.executable, "-c", PROGRAM_OF_ANOTHER, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    tmp_path.chmod(0o777)
    assert (ended.stdout, ended.returncode) == ("read only\n", 0), ended.stderr


async def open_and_close(path: Path) -> None:
    await (await opened(path)).close()


class Refusing(Writer):
    """Answers some statements otherwise."""

    answers: dict[str, Exception | str] = {}  # noqa: RUF012

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        answer = self.answers.get(sql)
        if isinstance(answer, Exception):
            raise answer
        return super().execute(answer or sql, *parameters)


class Stubborn(SQLiteStore):
    connection_class = Refusing


async def test_a_file_system_without_write_ahead_log_is_named(
    db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B23."""
    monkeypatch.setattr(Refusing, "answers", {"PRAGMA journal_mode = WAL": "PRAGMA journal_mode"})
    with pytest.raises(StoreError, match="network") as caught:
        await Stubborn(db).open(session())
    assert str(db) in str(caught.value)
    assert "local disk" in str(caught.value)


def sqlite_error(code: int, text: str, kind: type[sqlite3.Error] = sqlite3.OperationalError) -> sqlite3.Error:
    error = kind(text)
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (sqlite_error(sqlite3.SQLITE_FULL, "database or disk is full"), StoreFull),
        (sqlite_error(sqlite3.SQLITE_IOERR, "disk I/O error"), StoreError),
        (sqlite_error(sqlite3.SQLITE_CORRUPT, "malformed", sqlite3.DatabaseError), StoreCorrupt),
        (sqlite_error(sqlite3.SQLITE_READONLY, "attempt to write a readonly database"), StoreReadOnly),
    ],
)
async def test_opening_fails_with_the_right_error_and_leaves_no_thread(
    db: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, expected: type[StoreError]
) -> None:
    """B29, B163."""
    monkeypatch.setattr(Refusing, "answers", {"BEGIN IMMEDIATE": error})
    for _ in range(3):
        with pytest.raises(expected) as caught:
            await Stubborn(db).open(session())
        assert str(db) in str(caught.value)
    await asyncio.to_thread(join_others)
    assert threads() == 0


def threads() -> int:
    return sum(
        not thread.daemon for thread in threading.enumerate() if "worker" in thread.name or is_ours(thread)
    )


def is_ours(thread: threading.Thread) -> bool:
    return "_connection_worker_thread" in thread.name


def join_others() -> None:
    for thread in threading.enumerate():
        if is_ours(thread):
            thread.join(10)


# -- hygiene --------------------------------------------------------------------------------------------


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
async def test_descriptors_and_threads_stay_flat(db: Path, tmp_path: Path) -> None:
    """B163."""
    put(tmp_path / "foreign", JPEG)

    async def once() -> None:
        await (await opened(db, synchronous="normal")).close()
        with pytest.raises(StoreCorrupt):
            await opened(tmp_path / "foreign")

    await once()
    gc.collect()
    before = descriptors(), threading.active_count()
    for _ in range(300):
        await once()
    await asyncio.to_thread(join_others)
    gc.collect()
    after = descriptors(), threading.active_count()
    assert abs(after[0] - before[0]) <= 3
    assert after[1] <= before[1] + 1


async def test_an_opening_that_is_cancelled_leaves_nothing(db: Path) -> None:
    for delay in range(6):
        store = SQLiteStore(db)
        task = asyncio.create_task(store.open(session()))
        for _ in range(delay):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await asyncio.to_thread(join_others)
    gc.collect()
    assert list(beside(db)) in ([db.name], [])
    await (await opened(db)).close()


async def test_a_store_opens_again_after_it_was_closed(db: Path) -> None:
    store = await opened(db)
    with pytest.raises(StoreError, match="open already"):
        await store.open(session())
    await store.close()
    assert await store.open(session()) == 2
    assert await store.find() == []
    await store.close()


FORGETFUL = """
import asyncio, sys, threading
from dagresume.sqlite import SQLiteStore
from dagresume.sessions import this_session
from dagresume.store import Unique, Unit, SYSTEM_CLOCK
store = SQLiteStore(sys.argv[1])
async def main():
    await store.open(this_session(SYSTEM_CLOCK.now(), 10**7))
    await store.commit([Unit(Unique("x"))])
    {how}
def watch():
    threading.main_thread().join()
    store.abandon()
threading.Thread(target=watch, daemon=True).start()
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("how", "code"), [("", 0), ("raise KeyError", 1), ("raise KeyboardInterrupt", 130), ("sys.exit(7)", 7)]
)
def test_the_interpreter_ends_although_nobody_closed_the_store(db: Path, how: str, code: int) -> None:
    """B125: `abandon` is called by whoever notices that the main thread has ended."""
    command = [sys.executable, "-W", "error", "-c", FORGETFUL.format(how=how or "pass"), str(db)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    assert ended.returncode in {code, code - 128 - 2 or 0, -2}, ended.stderr
    assert "ResourceWarning" not in ended.stderr
    assert list(beside(db)) == [db.name]
    assert ask(db, "SELECT name FROM dagresume_cursors") == [("x",)]
