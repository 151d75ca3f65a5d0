"""Copies of a database with its files: complete, sound and durable, made while it is in use."""

from __future__ import annotations

# ruff: noqa: ASYNC220, ASYNC240  # nothing else is on the loop of these tests
import asyncio
import os
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from dagresume import BackupRefused, Context, Engine, RunStatus, StoreError, Workflow
from dagresume import backup as of_backup
from dagresume.backup import backup
from dagresume.doctor import Severity, examine
from tests.contract.patients import die, opened, picture, run, wf


@pytest.fixture
def db(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home" / "runs.db"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    (tmp_path / "safe").mkdir()
    return tmp_path / "safe" / "copy.db"


def problems(path: Path) -> list[str]:
    return [str(finding) for finding in examine(path) if finding.severity is Severity.PROBLEM]


def rows(path: Path) -> dict[str, list[Any]]:
    """All rows of all tables, but the sessions'."""
    with opened(path) as conn:
        tables = [n for (n,) in conn.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {t: conn.execute(f"SELECT * FROM {t}").fetchall() for t in tables if t != "dagresume_sessions"}


async def test_a_copy_has_all_that_the_original_has(db: Path, copy: Path) -> None:
    run_id = await run(db)
    await run(db, key="second")
    before = picture(db.parent)
    made = backup(db, copy)
    assert picture(db.parent) == before
    assert (made.path, made.runs, made.files, made.interrupted, made.findings) == (str(copy), 2, 4, (), ())
    assert made.size == sum(file.stat().st_size for file in copy.parent.rglob("*") if file.is_file())
    assert rows(copy) == rows(db)
    assert problems(copy) == []
    assert sorted(p.name for p in copy.parent.iterdir()) == ["copy.db", "copy.db.artifacts", "copy.db.blobs"]
    async with Engine(copy, workflows=[wf], spill_bytes=1000) as engine:
        result = await engine.result(run_id)
        assert (len(result["big"]), result["last"]) == (3000, 3005)
        again = await engine.retry(run_id, "last")
        assert set(again.executed) == {"last"}


@pytest.mark.skipif(os.name == "nt", reason="the permissions are POSIX's")
async def test_a_copy_is_its_owners_alone(db: Path, copy: Path) -> None:
    await run(db)
    backup(db, copy)
    modes = {file.stat().st_mode & 0o777 for file in copy.parent.rglob("*") if file.is_file()}
    folders = {folder.stat().st_mode & 0o777 for folder in copy.parent.rglob("*") if folder.is_dir()}
    assert (modes, folders) == ({0o600}, {0o700})


def test_what_is_only_in_the_log_is_copied_and_what_died_can_be_resumed(db: Path, copy: Path) -> None:
    run_id = die(db)
    before = picture(db.parent)
    made = backup(db, copy)
    assert picture(db.parent) == before
    assert made.interrupted == (run_id,)
    assert problems(copy) == []
    asyncio.run(resumed(copy, run_id, {"last"}))


async def resumed(db: Path, run_id: str, ran: set[str]) -> None:
    """Answer for the node that died, and go on in the copy."""
    async with Engine(db, workflows=[wf], spill_bytes=1000) as engine:
        assert (await engine.get(run_id)).status is RunStatus.INTERRUPTED
        result = await engine.resume(run_id, force=True, raise_on_failure=False)
        assert ran <= set(result.executed)
        assert {"names", "big"} <= set(result.reused)


# -- under way ------------------------------------------------------------------------------------------


class Slow:
    """A workflow of which one node stays until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go, self.calls = asyncio.Event(), asyncio.Event(), 0
        self.wf = Workflow("slow", idempotent=True)

        @self.wf.node
        async def first() -> str:
            return "x" * 2000

        @self.wf.node
        async def stays(first: str) -> int:
            self.calls += 1
            self.begun.set()
            await self.go.wait()
            return self.calls


async def test_a_run_under_way_is_interrupted_in_the_copy_and_nobodys(db: Path, copy: Path) -> None:
    """The process that drives the original lives on this machine: it locks nothing in the copy."""
    slow = Slow()
    async with Engine(db, workflows=[slow.wf], spill_bytes=1000) as engine:
        handle = await engine.start(slow.wf, key="night")
        await slow.begun.wait()
        made = await asyncio.to_thread(backup, db, copy)
        assert made.interrupted == (handle.run_id,)
        assert problems(copy) == []

        other = Slow()
        other.go.set()
        async with Engine(copy, workflows=[other.wf], spill_bytes=1000, wake=True) as second:
            assert (await second.get(handle.run_id)).status is RunStatus.INTERRUPTED
            result = await second.run(other.wf, key="night")  # its key is free for us
            assert (result.run_id, set(result.executed), set(result.reused)) == (
                handle.run_id, {"stays"}, {"first"},
            )  # fmt: skip

        assert (await engine.get(handle.run_id)).status is RunStatus.RUNNING
        slow.go.set()
        assert (await handle.result())["stays"] == 1
    assert problems(db) == []
    assert [name for name, old in rows(db).items() if old != rows(copy)[name]], "two histories from here on"


WRITER = """
import asyncio, sys
from dagresume import Context, Engine, Workflow

wf = Workflow("load", idempotent=True)

@wf.node
async def items(n: int) -> list[int]:
    return list(range(n))

@wf.node(for_each={"x": "items"}, concurrency=32)
async def one(x: int, ctx: Context) -> str:
    if x % 1000 == 999:
        print("full speed", flush=True)
    return f"{x:06}" * (1000 if x % 7 == 0 else 10)

async def main():
    async with Engine(sys.argv[1], synchronous="normal", spill_bytes=5000) as engine:
        await engine.run(wf, {"n": 1_000_000})

asyncio.run(main())
"""


async def test_a_copy_is_made_while_another_process_writes_at_full_speed(db: Path, copy: Path) -> None:
    """It ends, holds up nobody, and has every file of every event that is in it."""
    command = [sys.executable, "-c", WRITER, str(db)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None
            counts = []
            for force in (False, True):
                assert writer.stdout.readline() == "full speed\n"
                made = backup(db, copy, force=force)
                counts.append((len(rows(copy)["dagresume_events"]), made.files))
                assert problems(copy) == []
                assert writer.poll() is None
        finally:
            writer.kill()
    assert 0 < counts[0][0] < counts[1][0]
    assert 0 < counts[0][1] < counts[1][1]


async def test_a_run_that_is_pruned_meanwhile_is_left_out(
    db: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, gone = await run(db), await run(db, key="second")
    copy_database = of_backup._copy_database

    def and_prune(source: Path, draft: Path) -> None:
        copy_database(source, draft)
        with opened(db) as conn:
            for table in ("events", "logs", "runs"):
                conn.execute(f"DELETE FROM dagresume_{table} WHERE run = 2")
        for kind in ("blobs", "artifacts"):
            for file in Path(f"{db}.{kind}", gone).rglob("*.*" if kind == "artifacts" else "*"):
                file.unlink()

    monkeypatch.setattr(of_backup, "_copy_database", and_prune)
    made = backup(db, copy)
    assert (made.runs, made.findings) == (1, ())
    assert problems(copy) == []
    with opened(copy) as conn:
        assert conn.execute("SELECT run_id FROM dagresume_runs").fetchall() == [(kept,)]
        assert conn.execute("SELECT count(*) FROM dagresume_events WHERE run = 2").fetchone() == (
            1,
        )  # the last
    assert not list(Path(f"{copy}.blobs", gone).rglob("*"))


# -- what the source lacks, and what is refused -----------------------------------------------------------


async def test_what_the_source_lacks_is_told_and_the_rest_copied(db: Path, copy: Path) -> None:
    run_id = await run(db)
    [file] = Path(f"{db}.blobs", run_id).iterdir()
    file.unlink()
    made = backup(db, copy)
    [finding] = made.findings
    assert (finding.kind, "big" in finding.text) == ("blob", True)
    assert rows(copy) == rows(db)


async def test_a_damaged_database_takes_the_place_of_no_copy(db: Path, copy: Path) -> None:
    await run(db)
    backup(db, copy)
    with db.open("r+b") as file:
        file.seek(5 * 4096)
        file.write(os.urandom(4096))
    before = picture(copy.parent), picture(db.parent)
    with pytest.raises(StoreError, match="damaged"):
        backup(db, copy, force=True)
    assert (picture(copy.parent), picture(db.parent)) == before


def directory(path: Path) -> None:
    path.mkdir()


def somebody_elses(path: Path) -> None:
    with opened(path) as conn:
        conn.execute("CREATE TABLE theirs(x)")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (lambda path: None, "no such file"),
        (directory, "is a folder"),
        (lambda path: path.touch(), "is empty"),
        (lambda path: path.write_bytes(b"x"), "not a database"),
        (lambda path: path.write_bytes(b"JPEG" * 3000), "not a database"),
        (
            lambda path: sqlite3.connect(path).execute("CREATE TABLE t(x)").connection.close(),
            "another program",
        ),
    ],
    ids=["missing", "folder", "empty", "one byte", "picture", "somebody else's"],
)
def test_what_is_no_database_of_ours_is_not_copied(source: Any, told: str, db: Path, copy: Path) -> None:
    source(db)
    before = picture(db.parent.parent)
    with pytest.raises(StoreError, match=told) as caught:
        backup(db, copy)
    assert "\n" not in str(caught.value)
    assert str(db) in str(caught.value)
    assert picture(db.parent.parent) == before


async def test_places_where_there_can_be_no_copy_are_refused(db: Path, copy: Path) -> None:
    await run(db)
    copy.write_text("somebody's")
    linked = copy.with_name("link.db")
    linked.symlink_to(db)
    Path(f"{copy.parent}/other.db.blobs").mkdir()
    before = picture(db.parent.parent)
    for place, told in (
        (copy, "there already"),
        (db, "the database itself"),
        (linked, "the database itself"),
        (Path(f"{db}.blobs/copy.db"), "lies inside"),
        (Path(f"{db}.artifacts/x"), "lies inside"),
        (copy.parent, "no plain file"),
        (copy.parent / "absent" / "copy.db", "no folder"),
        (copy.parent / "other.db", "there already"),
    ):
        with pytest.raises(BackupRefused, match=told):
            backup(db, place)
    assert picture(db.parent.parent) == before


async def test_by_force_an_earlier_copy_is_replaced_with_its_files(db: Path, copy: Path) -> None:
    old = await run(db)
    backup(db, copy)
    with opened(db) as conn:
        conn.execute("DELETE FROM dagresume_runs WHERE run_id = ?", [old])
        conn.execute("DELETE FROM dagresume_events")
    for kind in ("blobs", "artifacts"):
        Path(f"{db}.{kind}").rename(f"{db}.{kind}.gone")
    new = await run(db)
    with pytest.raises(BackupRefused):
        backup(db, copy)
    made = backup(db, copy, force=True)
    assert (made.runs, problems(copy)) == (1, [])
    assert {folder.name for folder in Path(f"{copy}.blobs").iterdir()} == {new}
    assert [f for f in examine(copy) if f.kind == "orphan"] == []


async def test_a_copy_that_is_open_is_not_replaced(db: Path, copy: Path) -> None:
    """Its log would be taken for that of the new one."""
    await run(db)
    backup(db, copy)
    program = "from dagresume import Engine\nimport asyncio, sys\nasync def main():\n"
    program += "    async with Engine(sys.argv[1]):\n        print('open', flush=True); sys.stdin.read()\n"
    command = [sys.executable, "-c", program + "asyncio.run(main())", str(copy)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(BackupRefused, match="open in another process"):
            backup(db, copy, force=True)
        other.communicate()
    assert problems(copy) == []
    backup(db, copy, force=True)


async def test_an_error_on_the_way_leaves_nothing_behind(
    db: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run(db)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", str(copy))

    before = picture(copy.parent)
    for step in ("_copy_database", "_copy_files", "_sync_all", "_verified", "_move"):
        with monkeypatch.context() as patch:
            patch.setattr(of_backup, step, full)
            with pytest.raises(StoreError, match="No space left on device"):
                backup(db, copy)
        assert picture(copy.parent) == before, step
    backup(db, copy)


PROGRAM = """
import os, sys
import encodings.idna
from dagresume.backup import backup
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
print(backup(sys.argv[1], sys.argv[2]).runs)
"""


@pytest.mark.skipif(os.name == "nt", reason="the permissions are POSIX's")
@pytest.mark.parametrize("index", [True, False])
def test_a_read_only_source_can_be_copied(index: bool) -> None:
    """As somebody who is not root; the log is there, its index not always."""
    with tempfile.TemporaryDirectory() as place:
        home, safe = Path(place, "home"), Path(place, "safe")
        for folder, mode in ((home, 0o755), (safe, 0o777), (Path(place), 0o755)):
            folder.mkdir(exist_ok=True)
            folder.chmod(mode)
        die(home / "runs.db")
        if not index:
            Path(home, "runs.db-shm").unlink()
        for file in home.rglob("*"):
            file.chmod(0o555 if file.is_dir() else 0o444)
        home.chmod(0o555)
        command = [sys.executable, "-c", PROGRAM, str(home / "runs.db"), str(safe / "copy.db")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
        home.chmod(0o755)
        assert (done.stdout, done.stderr) == ("1\n", "")
        assert problems(safe / "copy.db") == []


async def test_what_nodes_put_aside_is_copied_as_it_is(db: Path, copy: Path) -> None:
    made = Workflow("files", idempotent=True)

    @made.node
    async def put(ctx: Context) -> None:
        (ctx.artifacts / "deep").mkdir()
        (ctx.artifacts / "deep" / "data.bin").write_bytes(b"\0\1")
        (ctx.artifacts / "link").symlink_to("/etc/hostname")

    async with Engine(db) as engine:
        run_id = (await engine.run(made)).run_id
    backup(db, copy)
    [folder] = Path(f"{copy}.artifacts", run_id).iterdir()
    assert (folder / "deep" / "data.bin").read_bytes() == b"\0\1"
    assert str((folder / "link").readlink()) == "/etc/hostname"
