"""What an engine makes is for its owner alone; what was there keeps the permissions it had."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dagresume import Context, Engine, StoreError, Workflow, run_sync
from dagresume.sqlite import SQLiteStore
from tests.contract.test_sqlite_file import opened

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has other permissions")


@pytest.fixture(params=[0o000, 0o022], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """What the process takes away from every file that is made."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def permit(path: Path, permissions: int) -> None:
    path.chmod(permissions)


def link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def beside(db: Path) -> tuple[dict[str, int], dict[str, int]]:
    """The permissions of files and folders, without what nodes made."""
    places = [place for place in db.parent.rglob("*") if place.name != "note"]
    files, folders = (
        {str(p.relative_to(db.parent)): mode(p) for p in places if p.is_dir() is wanted}
        for wanted in (False, True)
    )
    return files, folders


async def test_a_new_database_and_what_is_beside_it_are_for_the_owner_alone(db: Path, umask: int) -> None:
    wf = Workflow("w", idempotent=True)

    @wf.node
    async def a(ctx: Context) -> str:
        (ctx.artifacts / "note").write_text("x")
        return "x" * 100_000

    async with Engine(db) as engine:
        await engine.run(wf)
        files, folders = beside(db)
    assert {"runs.db", "runs.db-wal", "runs.db-shm"} < files.keys()
    assert set(files.values()) == {0o600}
    assert {"runs.db.blobs", "runs.db.artifacts"} < folders.keys()
    assert set(folders.values()) == {0o700}
    assert (len(files), len(folders)) == (4, 5)


async def test_a_database_that_is_there_keeps_its_permissions(db: Path, umask: int) -> None:
    await (await opened(db)).close()
    permit(db, 0o664)
    store = await opened(db)
    try:
        assert mode(db) == 0o664
        assert mode(db.with_name("runs.db-wal")) == 0o664
    finally:
        await store.close()
    assert mode(db) == 0o664


@pytest.mark.parametrize("made", ["empty", "foreign"])
async def test_a_file_of_somebody_else_is_not_changed(db: Path, made: str, umask: int) -> None:
    connection = sqlite3.connect(db)
    connection.execute("CREATE TABLE theirs(x)" if made == "foreign" else "SELECT 1")
    connection.close()
    permit(db, 0o640)
    store = await opened(db, adopt=True)
    await store.close()
    assert mode(db) == 0o640


async def test_a_link_to_nothing_leads_to_a_private_file(db: Path, tmp_path: Path, umask: int) -> None:
    target = tmp_path / "target.db"
    link(db, target)
    await (await opened(db)).close()
    assert mode(target) == 0o600


async def test_where_no_file_can_be_made_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no folder"):
        await opened(tmp_path / "no" / "runs.db")
    with pytest.raises(StoreError, match="it is a folder"):
        await opened(tmp_path)
    assert os.listdir(tmp_path) == []  # noqa: PTH208


async def test_twenty_that_open_at_once_find_one_private_file(db: Path, umask: int) -> None:
    """B20."""
    stores = await asyncio.gather(*(opened(db) for _ in range(20)))
    assert mode(db) == 0o600
    for store in stores:
        await store.close()
    assert len({id(store) for store in stores if isinstance(store, SQLiteStore)}) == 20


def test_four_processes_that_open_at_once_find_one_private_file(db: Path) -> None:
    """B20."""
    code = """
import os, sys
os.umask(0)
from dagresume import Workflow, run_sync
wf = Workflow("w")
@wf.node
async def a() -> int: return 1
sys.stdin.readline()
assert run_sync(wf, db=sys.argv[1])["a"] == 1
"""
    command = [sys.executable, "-c", code, str(db)]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        _, told = child.communicate(timeout=50)
        assert (child.returncode, told) == (0, "")
    assert mode(db) == 0o600


def test_a_run_that_is_not_async_makes_a_private_file_too(db: Path, umask: int) -> None:
    wf = Workflow("w")

    @wf.node
    async def a() -> int:
        return 1

    assert run_sync(wf, db=db)["a"] == 1
    assert mode(db) == 0o600
