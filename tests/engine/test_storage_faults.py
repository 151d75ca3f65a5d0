"""G7: a table of storage faults: what was done to the store, what the caller saw, what a resume did.

    python -m pytest -s tests/engine/test_storage_faults.py

Each run is a → big → b → c; the fault comes while b runs, or before the file is opened. Elsewhere: errors of
single statements, group commits and late records (`test_faults`, `test_sqlite_writes`), files that are not
ours, read-only places for those who are not root and file systems without a log (`test_sqlite_file`), altered
rows and spilled files (`test_values`), every fsync and write (`test_injected_errors`), loss of power
(`test_power_loss`), kills (`tests/crash`).
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dagresume import (
    CheckpointLost,
    DagresumeError,
    Engine,
    RunFailed,
    RunResult,
    RunStatus,
    StoreError,
    StoreFull,
    StoreReadOnly,
    Workflow,
)
from dagresume.sessions import closed
from dagresume.sqlite import SQLiteStore
from dagresume.store import Outcome, Unit
from dagresume.writer import Writer
from tests.engine.kit import Calls

BIG = 100_000


class Row(NamedTuple):
    """A line of the table."""

    done: str
    seen: str
    resumed: str


@pytest.fixture(scope="module")
def table() -> Iterator[list[Row]]:
    """Collects the lines, and shows them when all are there."""
    rows: list[Row] = []
    yield rows
    print("\n\nwhat was done | what the caller saw | what the resume did")
    for row in rows:
        print(" | ".join(row))


class Scene:
    """One run that a fault comes over."""

    def __init__(self, path: Path, table: list[Row]) -> None:
        self.path, self._table = path, table
        self.calls = Calls()
        self.meanwhile: dict[str, Callable[[], object]] = {}
        self.wf = Workflow("scene", idempotent=True)

        @self.wf.node
        async def a() -> int:
            self.calls.began("a")
            return 1

        @self.wf.node
        async def big(a: int) -> str:
            await self._happens("big")
            return "x" * BIG

        @self.wf.node
        async def b(big: str) -> int:
            await self._happens("b")
            return len(big)

        @self.wf.node
        async def c(b: int) -> int:
            await self._happens("c")
            return b + 1

    async def _happens(self, name: str) -> None:
        self.calls.began(name)
        waits = self.meanwhile.get(name, lambda: None)()
        if isinstance(waits, Awaitable):
            await waits

    @property
    def blobs(self) -> list[Path]:
        """The files of spilled outputs."""
        return [path for path in Path(f"{self.path}.blobs").rglob("*") if path.is_file()]

    @property
    def log_size(self) -> int:
        """Bytes of the write-ahead log."""
        return Path(f"{self.path}-wal").stat().st_size

    async def run(self, **options: Any) -> RunResult | Exception:
        """Run in an engine of its own, with what is to happen `meanwhile`; gives the result or the error."""
        if "store" not in options:
            options["url"] = self.path
        try:
            async with Engine(workflows=[self.wf], grace_seconds=0.5, **options) as engine:
                return await engine.run(self.wf, key="k")
        except Exception as error:
            return error
        finally:
            self.meanwhile.clear()

    async def fails(self, kind: type[DagresumeError], **options: Any) -> str:
        """Run into the fault; c must not have begun, and the error names the place. Gives what was seen."""
        return self.judged(await self.run(**options), kind)

    def judged(self, found: RunResult | Exception, kind: type[DagresumeError]) -> str:
        """Check an error and give it as text."""
        assert isinstance(found, DagresumeError), repr(found)
        error = found if isinstance(found, kind) else found.__cause__
        assert type(error) is kind, f"{found!r} from {found.__cause__!r}"
        assert str(self.path) in str(error)
        assert "\n" not in str(error)
        assert self.calls["c"] == 0
        return f"{type(error).__name__}: {str(error).replace(str(self.path), 'runs.db')}"

    async def goes_on(self, *again: str) -> str:
        """Run with the same key once the cause is gone: what was kept is not done again, the rest is."""
        self.calls.clear()
        result = await self.run()
        assert isinstance(result, RunResult), repr(result)
        assert result.status is RunStatus.COMPLETED
        assert result["c"] == BIG + 1
        assert result["big"] == "x" * BIG
        assert list(result.executed) == list(again)
        assert self.calls == dict.fromkeys(again, 1)
        with contextlib.closing(sqlite3.connect(self.path)) as conn:
            assert conn.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return f"ran {', '.join(again) or 'nothing'}; the result is right"

    def note(self, done: str, seen: str, resumed: str) -> None:
        """Put a line into the table."""
        self._table.append(Row(done, seen, resumed))


@pytest.fixture
def scene(db: Path, table: list[Row]) -> Scene:
    """A run in a file of its own."""
    return Scene(db, table)


# -- no space -------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte; skips where none can be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small disk can be mounted by root alone")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def fill(disk: Path, leave: int = 0) -> None:
    """Write until nothing fits any more; then give `leave` bytes back."""
    with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    if leave:
        os.truncate(disk / "filler", (disk / "filler").stat().st_size - leave)


async def test_a_full_disk(tiny: Path, table: list[Row]) -> None:
    scene = Scene(tiny / "runs.db", table)
    scene.meanwhile["b"] = lambda: fill(tiny)
    seen = await scene.fails(StoreFull)
    (tiny / "filler").unlink()
    scene.note("the disk fills up while b runs", seen, await scene.goes_on("b", "c"))


async def test_a_full_disk_when_the_engine_is_opened(tiny: Path, table: list[Row]) -> None:
    scene = Scene(tiny / "runs.db", table)
    fill(tiny)
    seen = await scene.fails(StoreFull)
    (tiny / "filler").unlink()
    scene.note("the disk is full when the engine is opened", seen, await scene.goes_on("a", "big", "b", "c"))


async def test_a_disk_that_is_full_for_a_spilled_output(tiny: Path, table: list[Row]) -> None:
    """What the node gave cannot be kept: as with a failed commit."""
    scene = Scene(tiny / "runs.db", table)
    scene.meanwhile["big"] = lambda: fill(tiny, leave=BIG // 2)
    seen = await scene.fails(StoreFull)
    assert scene.calls["b"] == 0
    assert [path for path in scene.blobs if path.name.startswith(".")] == []
    (tiny / "filler").unlink()
    scene.note("the disk is full for a spilled output", seen, await scene.goes_on("big", "b", "c"))


async def test_a_disk_that_is_full_when_the_log_is_copied_back(
    tiny: Path, table: list[Row], caplog: pytest.LogCaptureFixture
) -> None:
    """At the end of the session too: what is in the log is safe there."""
    scene = Scene(tiny / "runs.db", table)
    scene.meanwhile["b"] = lambda: fill(tiny, leave=60_000)
    found = await scene.run()
    assert isinstance(found, RunResult), found
    assert "cannot be copied back" in caplog.text
    assert "full" in caplog.text
    assert scene.log_size
    (tiny / "filler").unlink()
    seen = f"the result, and the warning: {caplog.records[-1].getMessage()[:70]}…"
    scene.note("the disk is full when the log is copied back, at close", seen, await scene.goes_on())


async def test_a_file_that_may_not_grow(scene: Scene) -> None:
    """RLIMIT_FSIZE, as a quota or a container sets it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (scene.log_size, before[1]))

    scene.meanwhile["b"] = limit
    try:
        seen = await scene.fails(StoreError)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    scene.note("no file may grow while b runs", seen, await scene.goes_on("b", "c"))


class Bounded(Writer):
    """A database that may have no more pages once it is `bounded`."""

    bounded = False

    def write(self, units: Sequence[Unit]) -> list[Outcome]:
        if self.bounded:
            pages = self.execute("PRAGMA page_count").fetchone()[0]
            self.execute(f"PRAGMA max_page_count = {pages}").fetchall()
        return super().write(units)


class Store(SQLiteStore):
    """A store with another writer."""

    def __init__(self, path: Path, writer: type[Writer]) -> None:
        super().__init__(path)
        self.connection_class = writer  # of this one alone


async def test_a_database_that_may_have_no_more_pages(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.meanwhile["big"] = lambda: monkeypatch.setattr(Bounded, "bounded", True)
    seen = await scene.fails(StoreFull, store=Store(scene.path, Bounded), spill_bytes=2 * BIG)
    scene.note("max_page_count is reached", seen, await scene.goes_on("big", "b", "c"))


# -- places and locks -----------------------------------------------------------------------------------


def remount(disk: Path, how: str) -> None:
    """Mount a disk otherwise: ro, rw."""
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


async def test_a_file_system_that_is_mounted_read_only(tiny: Path, table: list[Row]) -> None:
    scene = Scene(tiny / "runs.db", table)
    scene.calls.broken = {"b"}
    assert isinstance(await scene.run(), RunFailed)
    scene.calls.mend()
    remount(tiny, "ro")
    seen = await scene.fails(StoreReadOnly)
    remount(tiny, "rw")
    scene.note("the file system is read-only when the engine is opened", seen, await scene.goes_on("b", "c"))


HOLDER = """
import sqlite3, sys
conn = sqlite3.connect(sys.argv[1], isolation_level=None)
conn.execute(sys.argv[2])
conn.execute("SELECT count(*) FROM dagresume_runs").fetchall()
print("held", flush=True)
sys.stdin.readline()
conn.close()
"""


@contextlib.contextmanager
def held(path: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    """Have another program hold the database; it lets go at the end, or when its stdin is closed."""
    command = [sys.executable, "-c", HOLDER, str(path), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        try:
            yield holder
        finally:
            holder.communicate()


@pytest.mark.parametrize("how", ["BEGIN IMMEDIATE", "BEGIN EXCLUSIVE"])
async def test_a_database_that_another_program_holds_too_long(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("dagresume.schema.PATIENCE", 0.05)
    monkeypatch.setattr("dagresume.sqlite._TIMEOUT", 0.05)
    with contextlib.ExitStack() as stack:
        pids: list[int] = []
        scene.meanwhile["b"] = lambda: pids.append(stack.enter_context(held(scene.path, how)).pid)
        seen = await scene.fails(StoreError)
    assert "locked by" in seen
    if sys.platform == "linux":
        assert f"process {pids[0]}" in seen
        seen = seen.replace(str(pids[0]), "N")
    scene.note(f"another program holds {how} beyond the patience", seen, await scene.goes_on("b", "c"))


async def test_a_database_that_another_program_holds_for_a_while(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagresume.sqlite._TIMEOUT", 0.05)
    tried = threading.Event()

    class Trying(Writer):
        def write(self, units: Sequence[Unit]) -> list[Outcome]:
            tried.set()
            return super().write(units)

    with contextlib.ExitStack() as stack:

        def hold() -> None:
            stack.enter_context(held(scene.path, "BEGIN IMMEDIATE"))
            tried.clear()

            def let_go() -> None:
                tried.wait()
                stack.close()

            letting.append(threading.Thread(target=let_go))
            letting[0].start()

        letting: list[threading.Thread] = []
        scene.meanwhile["b"] = hold
        found = await scene.run(store=Store(scene.path, Trying))
        letting[0].join()
    assert isinstance(found, RunResult), repr(found)
    scene.note("another program holds a lock within the patience", "the result", await scene.goes_on())


@pytest.mark.parametrize("what", ["moved away", "deleted", "replaced by another database"])
async def test_a_file_that_goes_while_the_engine_is_open(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr("dagresume.writer.LOOK", 0.0)
    aside = scene.path.with_name("aside.db")

    def disturb() -> None:
        scene.path.rename(aside)
        if what == "replaced by another database":
            shutil.copy(aside, scene.path)

    scene.meanwhile["b"] = disturb
    seen = await scene.fails(StoreError)
    assert "deleted or replaced" in seen
    if what == "deleted":
        resumed = await scene.goes_on("a", "big", "b", "c")  # nothing of the run is there
    else:
        aside.replace(scene.path)
        resumed = await scene.goes_on("b", "c")
    scene.note(f"the file is {what} while b runs (then put back, unless deleted)", seen, resumed)


async def test_a_log_that_is_deleted_while_the_engine_is_open(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagresume.writer.LOOK", 0.0)
    scene.meanwhile["b"] = Path(f"{scene.path}-wal").unlink
    seen = await scene.fails(StoreError)
    assert "-wal was deleted" in seen
    scene.note("the log is deleted while b runs", seen, await scene.goes_on("b", "c"))


# -- what was damaged -----------------------------------------------------------------------------------


class Image:
    """What was on disk while c ran the first time, as a kill leaves it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.uuid = ""

    def take(self, path: Path) -> None:
        """Copy all that belongs to this database, but for the shared memory."""
        for each in path.parent.glob(f"{path.name}*"):
            if each.is_dir():
                shutil.copytree(each, self._folder / each.name)
            elif not each.name.endswith("-shm"):
                shutil.copy(each, self._folder / each.name)
        with contextlib.closing(sqlite3.connect(path)) as conn:
            [(self.uuid,)] = conn.execute("SELECT uuid FROM dagresume_sessions").fetchall()

    def put(self, place: Path) -> Path:
        """Lay it down in a new place; gives the database."""
        shutil.copytree(self._folder, place)
        return place / "runs.db"


@pytest.fixture
async def image(scene: Scene, tmp_path: Path) -> Image:
    """A database whose run has done a, big and b, all of it in the log."""
    (tmp_path / "image").mkdir()
    image = Image(tmp_path / "image")
    scene.meanwhile["c"] = lambda: image.take(scene.path)
    assert isinstance(await scene.run(), RunResult)
    closed(image.uuid)  # it is over, and the image does not know
    return image


async def outcome_of(scene: Scene) -> str:
    """Go on with what is there: the right result, or an error of ours; nothing else, and nothing wrong."""
    found = await scene.run()
    if isinstance(found, RunResult):
        assert found["c"] == BIG + 1
        assert found["big"] == "x" * BIG
        return f"the right result, {len(found.executed)} executed"
    assert isinstance(found, DagresumeError), repr(found)
    assert not isinstance(found, RunFailed) or isinstance(found.__cause__, DagresumeError), repr(found)
    return type(found.__cause__ if isinstance(found, RunFailed) else found).__name__


def told(found: Counter[str]) -> str:
    return ", ".join(f"{count} × {what}" for what, count in found.most_common())


EVERY_DAMAGE = [pytest.param(400, marks=[pytest.mark.slow, pytest.mark.timeout(600)]), 12]


@pytest.mark.parametrize("count", EVERY_DAMAGE)
@pytest.mark.parametrize("how", ["cut", "flipped"])
async def test_a_torn_log(image: Image, table: list[Row], tmp_path: Path, how: str, count: int) -> None:
    """B05: what is left of it is a beginning of what was written, whole commits each."""
    chance, found = random.Random(count), Counter[str]()
    for n in range(count):
        scene = Scene(image.put(tmp_path / f"{n}"), table)
        damage(Path(f"{scene.path}-wal"), how, chance)
        outcome = await outcome_of(scene)
        found[outcome] += 1
        assert outcome.startswith("the right result"), outcome
        shutil.rmtree(scene.path.parent)
    assert found
    table.append(Row(f"the log is {how} at {count} places after a kill", "nothing", told(found)))


def damage(path: Path, how: str, chance: random.Random) -> None:
    """Cut a file somewhere, or turn one bit in it."""
    content = bytearray(path.read_bytes())
    used = len(content.rstrip(b"\0"))
    place = chance.randrange(used)
    if how == "cut":
        del content[place:]
    else:
        content[place] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def remove(path: str) -> None:
    """Delete a file."""
    Path(path).unlink()


async def test_a_log_that_is_missing(image: Image, table: list[Row], tmp_path: Path) -> None:
    """The log is a part of the database: what it held and was not copied back is gone."""
    scene = Scene(image.put(tmp_path / "without"), table)
    remove(f"{scene.path}-wal")
    resumed = await scene.goes_on("a", "big", "b", "c")
    scene.note("the log is deleted after a kill, before it was copied back", "nothing", resumed)


@pytest.mark.parametrize("count", EVERY_DAMAGE)
@pytest.mark.parametrize("how", ["cut", "flipped"])
async def test_a_damaged_database(
    scene: Scene, table: list[Row], tmp_path: Path, how: str, count: int
) -> None:
    """B28: never a wrong result, never an error that is not ours; what can be read of it says the same."""
    scene.calls.broken = {"b"}
    assert isinstance(await scene.run(), RunFailed)
    chance, found = random.Random(count), Counter[str]()
    for n in range(count):
        place = tmp_path / f"{n}"
        place.mkdir()
        shutil.copy(scene.path, place)
        shutil.copytree(f"{scene.path}.blobs", place / "runs.db.blobs")
        damaged = Scene(place / "runs.db", table)
        damage(damaged.path, how, chance)
        await read_all(damaged)
        found[await outcome_of(damaged)] += 1
        shutil.rmtree(place)
    assert found
    table.append(Row(f"the database is {how} at {count} places", told(found), "as seen"))


async def read_all(scene: Scene) -> None:
    """Ask for everything that can be asked for; errors are ours."""
    with contextlib.suppress(DagresumeError):
        async with Engine(scene.path, workflows=[scene.wf]) as engine:
            for info in await engine.runs():
                with contextlib.suppress(DagresumeError):
                    await engine.get(info.run_id)
                    assert [event async for event in engine.events(info.run_id)]
                    result = await engine.result(info.run_id)
                    assert dict(result.outputs) is not None
                    await engine.plan(info.run_id)
                    await engine.logs(info.run_id)


def swap(first: Path, second: Path) -> None:
    """Exchange two files."""
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


SPOILS: dict[str, Callable[[Path], object]] = {
    "altered by one bit": lambda blob: damage(blob, "flipped", random.Random(1)),
    "cut": lambda blob: damage(blob, "cut", random.Random(1)),
    "deleted": Path.unlink,
    "emptied": lambda blob: blob.write_bytes(b""),
    "swapped with another": lambda blob: swap(blob, next(p for p in blob.parent.iterdir() if p != blob)),
    "deleted with its whole folder": lambda blob: shutil.rmtree(blob.parents[1]),
    "replaced by a folder": lambda blob: blob.rename(blob.with_name("x")).with_name(blob.name).mkdir(),
}


@pytest.mark.parametrize("what", sorted(SPOILS))
async def test_a_spilled_output_that_is_spoilt(scene: Scene, what: str) -> None:
    """B71, B155: refused; the command that the message names makes it again."""
    scene.calls.broken = {"b"}
    failed = await scene.run()
    assert isinstance(failed, RunFailed)
    [blob] = scene.blobs
    (blob.parent / ("0" * 64)).write_text("another")
    scene.calls.mend()
    SPOILS[what](blob)
    found = await scene.run()
    assert isinstance(found, CheckpointLost)
    assert (found.run_id, found.path) == (failed.run_id, "big")
    assert f"dagresume retry {failed.run_id} --from big" in str(found)
    assert scene.calls == {}
    if blob.is_dir():
        blob.rmdir()
    async with Engine(scene.path, workflows=[scene.wf]) as engine:
        result = await engine.retry(failed.run_id, "big")
    assert result["c"] == BIG + 1
    assert scene.calls == {"big": 1, "b": 1, "c": 1}
    seen = str(found).replace(str(scene.path), "runs.db").replace(failed.run_id, "R").replace(blob.name, "…")
    scene.note(f"the file of a spilled output is {what}", seen, "retry --from big ran big, b, c")
