"""Pruning: what ended long ago goes with all that belongs to it, and nothing else is touched (R10, U)."""

import math
import sqlite3
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dagresume import Context, Engine, InputError, Pruned, Retry, RunNotFound, RunStatus, StoreError, Workflow
from dagresume.blobs import BlobStore
from dagresume.clock import SystemClock
from dagresume.contracts import START, completed, created, new_run
from dagresume.forgetting import compact
from dagresume.sessions import this_session
from dagresume.sqlite import SQLiteStore
from dagresume.store import Claim, Clear, Forgotten, LogLine, NewRun, Outcome, Store, Unit
from dagresume.testing import FakeClock, StoreWrapper
from tests.engine.kit import Calls, Home

DAY = 86_400.0
BIG = "x" * 100_000


def flow(calls: Calls, name: str = "w", **options: Any) -> Workflow:
    """One node that leaves a blob, an artifact, a log line and calls made once."""
    wf = Workflow(name, idempotent=True, **options)

    @wf.node
    async def work(ctx: Context) -> str:
        (ctx.artifacts / "file.txt").write_text("12345")
        ctx.log.info("at work")
        await ctx.once("mail", calls.began, "mail", scope="workflow")
        await ctx.once("call", calls.began, "call")
        calls.began("work")
        return BIG

    return wf


@pytest.fixture
def home(db: Path) -> Home:
    return Home(db)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def files(db: Path) -> list[str]:
    """Every file below the folders of blobs and artifacts."""
    return sorted(
        str(path.relative_to(db.parent))
        for kind in ("blobs", "artifacts")
        for path in Path(f"{db}.{kind}").rglob("*")
        if not path.is_dir()
    )


def size(db: Path) -> int:
    return db.stat().st_size


def ask(db: Path, sql: str) -> list[Any]:
    conn = sqlite3.connect(db)
    try:
        return conn.execute(sql).fetchall()
    finally:
        conn.close()


def count(db: Path, table: str) -> int:
    return int(ask(db, f"SELECT count(*) FROM dagresume_{table}")[0][0])


async def test_a_completed_run_goes_with_all_that_belongs_to_it(
    home: Home, db: Path, clock: FakeClock
) -> None:
    """B148: only its own files go; its key is free, and what was made once for the workflow stays made."""
    calls = Calls()
    wf = flow(calls)
    async with home.engine(wf, clock=clock) as engine:
        old = await engine.run(wf, key="k")
    clock.advance(8 * DAY)
    async with home.engine(wf, clock=clock) as engine:
        young = await engine.run(wf, key="other")
        kept = [name for name in files(db) if young.run_id in name]
        assert (len(kept), len(files(db))) == (2, 4)
        foreseen = await engine.prune(dry_run=True)
        assert len(files(db)) == 4
        pruned = await engine.prune()
        assert pruned == foreseen
        assert pruned.run_ids == (old.run_id,)
        assert pruned.runs == {"completed": 1}
        found = (pruned.blobs, pruned.artifacts, pruned.artifact_bytes, pruned.once, pruned.logs)
        assert found == (1, 1, 5, 1, 1)
        assert pruned.blob_bytes == len(BIG) + 2
        assert files(db) == kept
        with pytest.raises(RunNotFound):
            await engine.get(old.run_id)
        calls.clear()
        assert (await engine.run(wf, key="k")).run_id != old.run_id
        assert calls == {"call": 1, "work": 1}
        assert (await engine.result(young.run_id))["work"] == BIG
    assert count(db, "events") == ask(db, "SELECT count(*) FROM dagresume_events WHERE run > 1")[0][0]
    assert ask(db, "SELECT DISTINCT run FROM dagresume_logs ORDER BY 1") == [(2,), (3,)]
    assert ask(db, "SELECT name FROM dagresume_cursors") == []


async def test_only_what_ended_is_deleted_however_old_it_is(home: Home, db: Path, clock: FakeClock) -> None:
    """B145: an approval, a long back-off, an interruption, a rollback that is stuck and a failure stay."""
    calls = Calls()
    calls.broken = {"always", "undo"}
    waits, retries, stopped, stuck, fails = (Workflow(n, idempotent=True) for n in "abcde")
    waits.approval("ok", prompt="?")

    async def body() -> None:
        calls.began("always")

    async def undo(output: Any, ctx: Context) -> None:
        calls.began("undo")

    for wf in (retries, stopped):
        wf.node(id="n", retry=Retry(attempts=2, delay=40 * DAY, max_delay=1e9))(body)
    fails.node(id="n")(body)

    @stuck.node(compensate=undo)
    async def done() -> int:
        return 1

    async with home.engine(*(all_ := (waits, retries, stopped, stuck, fails)), clock=clock) as engine:
        await engine.run(waits)
        left = await engine.start(stopped)
        failed = await engine.run(fails, raise_on_failure=False)
        rolled = await engine.run(stuck)
        rolled = await engine.rollback(rolled.run_id)
        assert rolled.status is RunStatus.ROLLING_BACK
    clock.advance(29 * DAY)
    async with home.engine(*all_, clock=clock) as engine:
        alive = await engine.start(retries)
        before = {info.run_id: info.status.value for info in await engine.runs()}
        assert sorted(before.values()) == ["failed", "interrupted", "rolling_back", "running", "waiting"]
        for dry_run in (True, False):
            for status in (None, "completed", ["completed", "cancelled", "rolled_back", "failed"]):
                pruned = await engine.prune(older_than=0, status=status, dry_run=dry_run)
                assert pruned.run_ids == ()
        assert {info.run_id: info.status.value for info in await engine.runs()} == before
        clock.advance(DAY)
        pruned = await engine.prune(older_than=math.inf)
        assert pruned.run_ids == (failed.run_id,)
        pruned = await engine.prune(older_than=0, failed_older_than=0)
        assert pruned.run_ids == ()
        await alive.cancel()
        assert (await engine.prune(older_than=0)).run_ids == (alive.run_id,)
        await engine.cancel(left.run_id)
        assert (await engine.prune(older_than=0, status="completed")).run_ids == ()
        assert (await engine.prune(older_than=0, status="cancelled")).run_ids == (left.run_id,)


async def test_the_term_begins_at_the_end_of_a_run_and_includes_its_last_moment(
    home: Home, clock: FakeClock
) -> None:
    wf = flow(Calls())
    async with home.engine(wf, clock=clock) as engine:
        await engine.run(wf)
        clock.advance(100)
        assert (await engine.prune(older_than=100.001)).run_ids == ()
        assert len((await engine.prune(older_than=timedelta(seconds=100), dry_run=True)).run_ids) == 1
        assert len((await engine.prune(older_than=100)).run_ids) == 1


async def test_a_memory_store_is_pruned_alike(clock: FakeClock) -> None:
    home, calls = Home(None), Calls()
    wf = Workflow("w", idempotent=True)
    calls.adder(wf)("a")
    async with home.engine(wf, clock=clock) as engine:
        for key in "abc":
            await engine.run(wf, key=key)
        clock.advance(10 * DAY)
        last = await engine.run(wf, key="d")
        foreseen = await engine.prune(dry_run=True)
        pruned = await engine.prune()
        assert pruned == foreseen
        assert (pruned.runs, pruned.events) == ({"completed": 3}, 9)
        assert [info.run_id for info in await engine.runs()] == [last.run_id]
        assert {event.run_id async for event in engine.events()} == {last.run_id}
        assert (await engine.run(wf, key="a")).executed == ["a"]
        assert (await engine.result(last.run_id))["a"] == "a"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"older_than": -1}, "older_than=-1"),
        ({"failed_older_than": timedelta(days=-1)}, "failed_older_than="),
        ({"older_than": math.nan}, "older_than=nan"),
        ({"older_than": True}, "older_than=True"),
        ({"older_than": "7d"}, "older_than='7d'"),
        ({"status": "running"}, "status='running': only runs that have ended"),
        ({"status": ["completed", "interrupted"]}, "status='interrupted'"),
        ({"status": "done"}, "status='done'"),
    ],
)
async def test_what_cannot_be_meant_is_refused(home: Home, options: dict[str, Any], told: str) -> None:
    async with home.engine() as engine:
        with pytest.raises(InputError, match=told):
            await engine.prune(**options)


# -- somebody else at the same moment -------------------------------------------------------------------


class Before(StoreWrapper):
    """Lets something happen once, right before runs are forgotten or a run is claimed."""

    def __init__(self, inner: Store, what: Callable[[], Awaitable[Any]], *, claim: bool = False) -> None:
        super().__init__(inner)
        self.what: Callable[[], Awaitable[Any]] | None = what
        self.claim = claim

    async def happen(self) -> None:
        what, self.what = self.what, None
        if what is not None:
            await what()

    async def forget(self, runs: Mapping[int, int], clear: Clear, *, dry_run: bool = False) -> Forgotten:
        if not self.claim:
            await self.happen()
        return await super().forget(runs, clear, dry_run=dry_run)

    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        if self.claim and any(isinstance(unit.guard, Claim | NewRun) for unit in units):
            await self.happen()
        return await super().commit(units)


async def test_a_run_that_is_taken_up_as_it_is_about_to_go_stays(home: Home, db: Path) -> None:
    wf = flow(Calls())
    run_id = (await home.run(wf)).run_id

    async def again() -> None:
        await home.retry(wf, run_id, "work")

    async with home.engine(wf, wrap=lambda store: Before(store, again)) as engine:
        assert (await engine.prune(older_than=0)).run_ids == ()
        assert (await engine.result(run_id))["work"] == BIG
        assert (await engine.prune(older_than=0)).run_ids == (run_id,)


@pytest.mark.parametrize("how", ["retry", "key"])
async def test_a_run_that_goes_as_it_is_taken_up_is_not_there(home: Home, db: Path, how: str) -> None:
    """Who asks for the run hears so; who asks for its key gets a new run."""
    calls = Calls()
    wf = flow(calls)
    calls.broken = {"work"}
    run_id = (await home.run(wf, key="k")).run_id
    calls.mend()

    async def prune() -> None:
        async with home.engine() as other:
            assert len((await other.prune(failed_older_than=0)).run_ids) == 1

    async with home.engine(wf, wrap=lambda store: Before(store, prune, claim=True)) as engine:
        if how == "retry":
            with pytest.raises(RunNotFound):
                await engine.retry(run_id)
        else:
            result = await engine.run(wf, key="k")
            assert result.run_id != run_id
            assert result.executed == ["work"]


# -- files ----------------------------------------------------------------------------------------------


async def test_a_link_in_place_of_a_folder_is_not_followed(home: Home, db: Path, clock: FakeClock) -> None:
    wf, precious = flow(Calls()), db.parent / "precious"
    async with home.engine(wf, clock=clock) as engine:
        run_id = (await engine.run(wf)).run_id
        clock.advance(1)
        folder = BlobStore(f"{db}.blobs").of(run_id)
        folder.rename(precious)
        folder.symlink_to(precious)
        inner = Path(f"{db}.artifacts") / run_id / "link"
        inner.symlink_to(precious)
        foreseen = await engine.prune(older_than=0, dry_run=True)
        pruned = await engine.prune(older_than=0)
        assert pruned == foreseen
        assert (pruned.blobs, pruned.artifacts, pruned.left) == (0, 1, ())
        assert len(list(precious.iterdir())) == 1
        assert not folder.is_symlink()
        assert not inner.is_symlink()


async def test_folders_that_are_not_of_the_run_stay(home: Home, db: Path, clock: FakeClock) -> None:
    """Also those whose names begin like its id, or that anybody put there."""
    wf = flow(Calls())
    async with home.engine(wf, clock=clock) as engine:
        run_id = (await engine.run(wf)).run_id
        others = [
            Path(f"{db}.{kind}") / name for kind in ("blobs", "artifacts") for name in (f"{run_id}0", "mine")
        ]
        for other in others:
            other.mkdir()
            (other / "file").write_text("precious")
        await engine.prune(older_than=0)
    assert files(db) == sorted(str((other / "file").relative_to(db.parent)) for other in others)


async def test_files_that_cannot_be_removed_are_named_and_tried_again(
    home: Home, db: Path, clock: FakeClock
) -> None:
    """One of them keeps nobody else's from going."""
    wf = flow(Calls())
    async with home.engine(wf, clock=clock) as engine:
        run_ids = [(await engine.run(wf)).run_id for _ in range(3)]
        folder = BlobStore(f"{db}.blobs").of(run_ids[1])
        folder.rename(f"{folder}.moved")
        folder.write_text("in the way")
        pruned = await engine.prune(older_than=0)
        assert sorted(pruned.run_ids) == sorted(run_ids)
        [left] = pruned.left
        assert run_ids[1] in left
        assert {Path(name).parts[1] for name in files(db)} <= {run_ids[1], f"{run_ids[1]}.moved"}
        folder.unlink()
        await engine.run(wf)
        again = await engine.prune(older_than=1000)
        assert (again.resumed > 0, again.left, again.run_ids) == (True, (), ())
        assert not [name for name in files(db) if f"{run_ids[1]}/" in name]
    assert ask(db, "SELECT name FROM dagresume_cursors") == []


# -- the file -------------------------------------------------------------------------------------------


async def filled(store: SQLiteStore, runs: int, nodes: int, output: str = '"x"') -> None:
    """Put runs that completed into a store, quickly."""
    session = await store.open(this_session(SystemClock.now(), 60_000_000))
    for n in range(runs):
        records = [completed(f"a[{k}]", output) for k in range(nodes)]
        ended = completed(None)._replace(kind="run.completed", output=None)  # type: ignore[arg-type]
        lines = [LogLine("a", 1, START, "info", "line")] * (nodes // 10)
        unit = Unit(new_run(f"run-{n}", session), [created(), *records, ended], logs=lines)
        await store.commit([unit])


async def test_space_is_given_back_but_for_what_comes_next(db: Path) -> None:
    store = SQLiteStore(db, synchronous="normal")
    await filled(store, 40, 100, "9" * 5000)
    await store.close()
    full = size(db)
    async with Engine(db, synchronous="normal") as engine:
        pruned = await engine.prune(older_than=0)
    assert pruned.runs == {"completed": 40}
    assert full > 20_000_000
    assert size(db) < full / 5
    assert pruned.given_back > full * 3 / 4
    assert pruned.size == size(db)
    assert 0 < pruned.free <= max(pruned.size // 8, 256 * 4096)
    assert str(pruned).startswith("deleted 40 runs (40 completed), ")
    before = size(db)
    assert compact(str(db), SystemClock()) > 0
    assert size(db) < before
    assert ask(db, "PRAGMA freelist_count") == [(0,)]


async def test_an_older_file_keeps_its_free_space_until_it_is_compacted(db: Path) -> None:
    conn = sqlite3.connect(db)
    conn.execute("PRAGMA auto_vacuum = NONE")
    conn.execute("CREATE TABLE mine(x)")
    conn.close()
    store = SQLiteStore(db, synchronous="normal", adopt=True)
    await filled(store, 10, 100, "9" * 5000)
    await store.close()
    async with Engine(db, synchronous="normal") as engine:
        pruned = await engine.prune(older_than=0)
        assert (len(pruned.run_ids), pruned.given_back) == (10, 0)
        assert pruned.free > pruned.size / 2
        with pytest.raises(StoreError, match="in use by"):
            compact(str(db), SystemClock())
    assert compact(str(db), SystemClock()) > 4_000_000
    assert ask(db, "PRAGMA auto_vacuum") == [(2,)]
    assert ask(db, "SELECT * FROM mine") == []


async def test_definitions_that_no_run_has_go_and_others_stay(home: Home, db: Path, clock: FakeClock) -> None:
    """B146: a definition is as old as its oldest run, and is needed by the newest."""
    first, second = flow(Calls()), flow(Calls(), version="2")
    async with home.engine(first, clock=clock) as engine:
        await engine.run(first)
        clock.advance(300 * DAY)
        await engine.run(second)
        clock.advance(60 * DAY)
        newest = await engine.run(second)
        foreseen = await engine.prune(older_than=30 * DAY, dry_run=True)
        pruned = await engine.prune(older_than=30 * DAY)
        assert pruned == foreseen
        assert (len(pruned.run_ids), pruned.definitions) == (2, 1)
        assert (await engine.result(newest.run_id))["work"] == BIG
    assert ask(db, "SELECT version FROM dagresume_definitions") == [("2",)]
    assert ask(db, "SELECT count(DISTINCT definition) FROM dagresume_definition_nodes") == [(1,)]


async def test_sessions_that_ended_long_ago_go_unless_they_own_a_run(
    home: Home, db: Path, clock: FakeClock
) -> None:
    for _ in range(3):
        async with home.engine(clock=clock):
            pass
    store = home.store(clock)
    session = await store.open(this_session(clock.now(), 1_000_000))
    await store.commit([Unit(new_run("r1", session), [created()])])
    store.abandon()  # as a process that died
    clock.advance(8 * DAY)
    async with home.engine(clock=clock) as engine:
        foreseen = await engine.prune(dry_run=True)
        assert (await engine.prune()).sessions == foreseen.sessions == 3
        assert [info.status for info in await engine.runs()] == [RunStatus.INTERRUPTED]
    assert ask(db, "SELECT session FROM dagresume_sessions ORDER BY 1") == [(session,), (session + 1,)]


def test_what_was_pruned_is_told_in_one_line() -> None:
    pruned = Pruned(
        {"completed": 2, "failed": 1},
        ("a", "b", "c"),
        events=1200,
        once=2,
        blobs=1,
        blob_bytes=70_000,
        dry_run=True,
    )
    assert str(pruned) == (
        "would delete 3 runs (2 completed, 1 failed), 1,200 events, 2 results of ctx.once,"
        " 1 blob file (70 kB)"
    )
    assert str(Pruned({}, ())) == "deleted 0 runs"
    done = Pruned({}, (), resumed=1, events=5, given_back=4096, size=10**6, free=10**5)
    assert str(done) == (
        "deleted 0 runs, 5 events; among them the rest of 1 run of an earlier prune; 4.1 kB given back to the"
        " disk, 100 kB of 1.0 MB free for what comes next"
    )
