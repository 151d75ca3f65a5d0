"""G7: a table of storage faults: what was done to the store, what the caller saw, what a resume did.

    python -m pytest -s tests/engine/test_storage_faults.py

Each run is a → big → b → c; the fault comes while b runs, or before the file is opened. Elsewhere: errors of
single statements, group commits and late records (`test_faults`, `test_sqlite_writes`), files that are not
ours, read-only places for those who are not root and file systems without a log (`test_sqlite_file`), altered
rows and spilled files (`test_values`), every fsync and write (`test_injected_errors`), loss of power
(`test_power_loss`), kills (`tests/crash`).
"""

from __future__ import annotations

import asyncio
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
    Context,
    DagresumeError,
    Engine,
    Retry,
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
from tests.engine.kit import Calls, Home, TurnedClock

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


# -- what belongs to somebody else ----------------------------------------------------------------------

FORKING = """
import asyncio, os, sys, threading
from dagresume import Engine, StoreError, Workflow

wf = Workflow("w", idempotent=True)

@wf.node
async def a() -> int:
    pid = os.fork()
    if not pid:
        {child}
    _, status = await asyncio.to_thread(os.waitpid, pid, 0)
    print("the child ended with", os.waitstatus_to_exitcode(status), flush=True)
    return 1

def own() -> None:
    async def opening() -> None:
        try:
            async with Engine("runs.db"):
                os._exit(1)
        except StoreError as error:
            print(error, flush=True)
            os._exit(7)
    asyncio.run(opening())

def other() -> None:
    async def opening() -> None:
        async with Engine("other.db") as engine:
            assert (await engine.run(quiet))["b"] == 2
        os._exit(0)
    asyncio.run(opening())

quiet = Workflow("quiet")

@quiet.node
async def b() -> int:
    return 2

def in_thread(work) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    os._exit(5)

async def main() -> None:
    async with Engine("runs.db") as engine:
        assert (await engine.run(wf, key="k"))["a"] == 1
        assert (await engine.run(quiet))["b"] == 2
    print("the parent is well", flush=True)

asyncio.run(main())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("child", "code", "seen"),
    [
        ("os._exit(0)", 0, ""),
        ("sys.exit(3)", 1, ""),
        ("raise ValueError", 1, ""),
        ("in_thread(own)", 7, "was open in the process from which this one was forked"),
        ("in_thread(other)", 0, ""),
    ],
    ids=["leaves at once", "exits", "raises", "opens the same file", "opens another file"],
)
def test_a_child_forked_in_a_body(tmp_path: Path, table: list[Row], child: str, code: int, seen: str) -> None:
    """B25: it ends, and its parent is well. asyncio lets no loop go on in a forked child, which ends with 1.

    A second engine on the same file in the child would write behind its parent's back: SQLite takes the
    parent's locks for the child's own, and what the child commits is lost when the parent closes.
    """
    (tmp_path / "program.py").write_text(FORKING.format(child=child))
    command = [sys.executable, "-W", "ignore", "program.py"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert f"the child ended with {code}\n" in ended.stdout
    assert ended.stdout.endswith("the parent is well\n")
    assert seen in ended.stdout
    with contextlib.closing(sqlite3.connect(tmp_path / "runs.db")) as conn:
        assert conn.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    told = ended.stdout.splitlines()[0] if seen else f"the child ended with {code}"
    table.append(Row(f"a body forks, and the child: {child}", told, "the parent's run completed"))


# -- time -----------------------------------------------------------------------------------------------

DAY = 86_400.0


@pytest.mark.parametrize("turn", [-DAY, DAY, -400 * DAY], ids=["back a day", "on a day", "back a year"])
@pytest.mark.parametrize("when", ["between", "during"])
async def test_a_clock_that_is_turned(scene: Scene, turn: float, when: str) -> None:
    """Order is that of the journal, not of its times; a retry's pause is measured, not looked up."""
    clock = TurnedClock()

    def turned() -> None:
        clock.ahead += turn

    if when == "during":
        scene.meanwhile["b"] = turned
    scene.calls.broken = {"c"}
    failed = await scene.run(clock=clock)
    assert isinstance(failed, RunFailed)
    scene.calls.mend()
    if when == "between":
        turned()
    result = await scene.run(clock=clock)
    assert isinstance(result, RunResult), repr(result)
    assert result["c"] == BIG + 1
    assert scene.calls == {"c": 1}
    async with Engine(scene.path, workflows=[scene.wf], clock=clock) as engine:
        seqs = [event.seq for event in [event async for event in engine.events(failed.run_id)]]
        assert seqs == sorted(set(seqs))
        again = await engine.run(scene.wf, key="k", window=10 * DAY)
        assert again.run_id == failed.run_id, "it is not older than the window"
    scene.note(f"the clock is turned by {turn / DAY:+.0f} days {when} runs", "the result", "ran c alone")


async def test_pauses_and_limits_do_not_hang_on_the_wall_clock(sqlite_home: Home) -> None:
    clock = TurnedClock()
    wf = Workflow("pausing", idempotent=True, retry=Retry(3, delay=0.01))
    tries: list[int] = []

    @wf.node(timeout=5)
    async def a() -> int:
        tries.append(1)
        clock.ahead += DAY if len(tries) == 1 else -2 * DAY
        if len(tries) < 3:
            raise ConnectionError("again")
        return 1

    async with sqlite_home.engine(clock=clock) as engine:
        assert (await engine.run(wf))["a"] == 1
    assert len(tries) == 3


# -- beside the database --------------------------------------------------------------------------------


def folders_of_parts(artifacts: Path) -> list[Path]:
    """Give the folders into which bodies have put their part."""
    return [path.parent for path in artifacts.rglob("part")]


async def test_files_of_an_attempt_that_cannot_be_cleared_away(sqlite_home: Home) -> None:
    """The error is ours, names the folder, and has the system's as its cause."""
    wf = Workflow("filing", idempotent=True)
    broken = True

    @wf.node
    async def files(ctx: Context) -> int:
        ctx.artifacts.joinpath("part").write_text("x")
        if broken:
            raise ConnectionError("later")
        return 1

    failed = await sqlite_home.run(wf)
    [folder] = folders_of_parts(Path(f"{sqlite_home.path}.artifacts"))
    shutil.rmtree(folder)
    folder.write_text("a file where the folder was")
    broken = False
    async with sqlite_home.engine(wf) as engine:
        with pytest.raises(StoreError, match=str(folder)) as caught:
            await engine.resume(failed.run_id)
        assert isinstance(caught.value.__cause__, OSError)
    folder.unlink()
    assert (await sqlite_home.resume(wf, failed.run_id))["files"] == 1


class OnceDeaf(Writer):
    """Cannot say once whether others have written."""

    failures = 0

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        if sql == "PRAGMA data_version" and not self.failures:
            type(self).failures += 1
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode, error.sqlite_errorname = sqlite3.SQLITE_IOERR, "SQLITE_IOERR_READ"
            raise error
        return super().execute(sql, *parameters)


async def test_letters_are_read_on_after_an_error(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C8: the task that looks for what other processes wrote does not die of one failed look."""
    monkeypatch.setattr(OnceDeaf, "failures", 0)
    wf = Workflow("asking")
    wf.approval("may", depends_on=[], prompt="May it?")
    store = Store(db, OnceDeaf)
    async with Engine(store=store, workflows=[wf]) as engine, Engine(db, workflows=[wf]) as other:
        running = asyncio.create_task(engine.run(wf, wait="all"))
        while not OnceDeaf.failures:  # noqa: ASYNC110  # it has no event
            await asyncio.sleep(0.01)
        [info] = await other.runs()
        await other.decide(info.run_id, "may", by="me")
        assert (await asyncio.wait_for(running, 10))["may"]["approved"]


# -- readers that stay ----------------------------------------------------------------------------------


async def test_a_reader_that_stays_is_named(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B26: the log grows while another program holds a snapshot; a warning says so once and names it."""
    monkeypatch.setattr("dagresume.wal._TOO_LONG", 1000)
    monkeypatch.setattr("dagresume.wal._WARN", 1200)
    wf = Workflow("writing", idempotent=True)

    @wf.node
    async def numbers(count: int) -> list[int]:
        return list(range(count))

    @wf.node(for_each={"n": "numbers"}, concurrency=1)
    async def write(n: int) -> str:
        return f"{n:04}" * 10_000

    warning = "log grows"
    async with Engine(scene.path, synchronous="normal") as engine:
        await engine.run(wf, {"count": 5})
        with held(scene.path, "BEGIN") as reader:
            await engine.run(wf, {"count": 500})
            said = [record.getMessage() for record in caplog.records if warning in record.getMessage()]
            grown = scene.log_size
        await engine.run(wf, {"count": 300})
        assert scene.log_size <= 12 << 20, "it has started over"
    assert len(said) == 1
    if sys.platform == "linux":
        assert f"process {reader.pid}" in said[0]
    assert "MiB" in said[0]
    assert grown > 12 << 20
    seen = said[0].replace(str(scene.path), "runs.db").replace(str(reader.pid), "N")
    scene.note(
        "another program reads in one transaction all the time", seen, "the log started over by itself"
    )
