"""Forgetting runs that ended: what goes, what stays, and what a call that was cut off leaves to the next."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from dagresume.contracts import LEASE, START, Clock, Engine, completed, created, definition, new_run
from dagresume.errors import StoreError
from dagresume.events import Record, run_record
from dagresume.sessions import this_session
from dagresume.sqlite import SQLiteStore
from dagresume.store import (
    Claim,
    Committed,
    Inbox,
    LogLine,
    MemoryStore,
    OnceRow,
    Orphaned,
    Owned,
    Refused,
    Store,
    Unit,
    scope_of,
)

Opener = Callable[..., Awaitable[Engine]]
ENDS = ["run.completed", "run.cancelled", "run.rolled_back", "run.failed"]
RESTS = [None, "run.waiting", "run.interrupted", "run.rolling_back"]


@pytest.fixture(params=["memory", "sqlite"])
def make_store(request: pytest.FixtureRequest, db: Path) -> Callable[[Clock], Store]:
    if request.param == "sqlite":
        return lambda clock: SQLiteStore(db, clock=clock)
    first = MemoryStore()
    return lambda clock: MemoryStore(beside=first, clock=clock)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def enter(make_store: Callable[[Clock], Store], clock: Clock) -> AsyncIterator[Opener]:
    stores: list[Store] = []

    async def opener(lease: int = LEASE) -> Engine:
        store = make_store(clock)
        stores.append(store)
        return Engine(store, await store.open(this_session(clock.now(), lease)))

    yield opener
    for store in stores:
        await store.close()


class Cleared(list[str]):
    """Notes whose files were to be removed; refuses those in `stuck`."""

    def __init__(self, *stuck: str) -> None:
        super().__init__()
        self.stuck = set(stuck)

    async def __call__(self, run_id: str) -> bool:
        self.append(run_id)
        return run_id not in self.stuck


async def ended(
    engine: Engine, run_id: str = "r1", kind: str | None = "run.completed", **options: Any
) -> Owned:
    """Make a run with two nodes that came to this end."""
    guard = await engine.new(run_id, **options)
    last = [] if kind is None else [run_record(kind, START)]
    await engine.one(guard, completed("a"), completed("b"), *last)
    return guard


async def another(engine: Engine) -> None:
    """Make a run that goes on: the last record of the journal is its."""
    await engine.new("other")


@pytest.mark.parametrize("kind", ENDS)
async def test_a_run_that_ended_is_gone_for_every_reader(enter: Opener, kind: str) -> None:
    engine, cleared = await enter(), Cleared()
    guard = await ended(engine, kind=kind)
    await another(engine)
    gone = await engine.store.forget({guard.run: guard.epoch}, cleared)
    assert (gone.runs, gone.events, gone.resumed) == ([1], 4, 0)
    assert cleared == ["r1"]
    assert await engine.store.load("r1") is None
    assert [row.run_id for row, _ in await engine.store.find()] == ["other"]
    assert [run_id for run_id, _ in await engine.store.tail(0)] == ["other"]
    assert await engine.store.tail(0, run_id="r1") == []
    assert await engine.store.output([1, 2, 3]) == [None] * 3
    assert await engine.store.forget({guard.run: guard.epoch}, cleared) == gone._replace(runs=[], events=0)


@pytest.mark.parametrize("kind", RESTS)
async def test_what_may_go_on_stays_also_without_a_living_owner(
    enter: Opener, clock: Clock, kind: str | None
) -> None:
    """B145."""
    engine = await enter()
    guard = await ended(engine, kind=kind)
    await another(engine)
    clock.time += 2 * LEASE
    other = await enter()
    gone = await other.store.forget({guard.run: guard.epoch}, Cleared())
    assert (gone.runs, gone.events) == ([], 0)
    assert len((await other.all("r1")).records) == (3 if kind is None else 4)


async def test_an_orphan_stays(enter: Opener, clock: Clock) -> None:
    engine = await enter()
    guard = await ended(engine, kind=None)
    clock.time += 2 * LEASE
    other = await enter()
    await other.one(Orphaned(guard.run, guard.session, guard.epoch), run_record("run.interrupted", START))
    assert (await other.store.forget({guard.run: guard.epoch}, Cleared())).runs == []


async def test_a_run_that_was_taken_up_since_it_was_seen_stays(enter: Opener) -> None:
    engine = await enter()
    guard = await ended(engine, kind="run.failed")
    for record in ("run.claimed", "run.failed"):
        last = (await engine.all("r1")).records[-1].seq or 0
        claim = Claim(guard.run, engine.session, last)
        await engine.one(
            claim if record == "run.claimed" else Owned(1, engine.session, 2), run_record(record, START)
        )
        assert (await engine.store.forget({guard.run: guard.epoch}, Cleared())).runs == []
    assert (await engine.store.forget({guard.run: 2}, Cleared())).runs == [1]


async def test_nothing_can_be_written_to_a_run_that_is_gone(enter: Opener) -> None:
    engine = await enter()
    guard = await ended(engine, key="k")
    await another(engine)
    await engine.store.forget({guard.run: guard.epoch}, Cleared())
    letter = Record("run.signalled", None, START, None)
    for wrong in (guard, Claim(guard.run, engine.session, 99), Inbox(guard.run)):
        assert await engine.one(wrong, letter) == Refused("missing")


async def test_its_key_is_free_and_no_number_is_given_again(enter: Opener) -> None:
    engine = await enter()
    guard = await ended(engine, key="k")
    await engine.store.forget({guard.run: guard.epoch}, Cleared())
    assert await engine.store.find(workflow="w", key="k") == []
    made = await engine.one(new_run("r2", engine.session, key="k"), created())
    assert isinstance(made, Committed)
    assert (made.run, made.seq) == (2, 5)


async def test_no_seq_is_given_twice_when_the_last_record_was_of_a_forgotten_run(enter: Opener) -> None:
    engine = await enter()
    guards = [await ended(engine, f"r{n}") for n in range(3)]
    gone = await engine.store.forget({guard.run: guard.epoch for guard in guards}, Cleared())
    assert gone.runs == [1, 2, 3]
    assert await engine.store.tail(0) == []
    made = await engine.one(new_run("r9", engine.session), created())
    assert isinstance(made, Committed)
    assert (made.run, made.seq) == (4, 13)
    later = await engine.store.forget({}, Cleared())
    assert gone.events + later.events == 12
    assert [record.seq for _, record in await engine.store.tail(0)] == [13]


async def test_calls_made_once_go_with_their_run_and_stay_with_their_workflow(enter: Opener) -> None:
    """A mail that was sent once for all runs of a workflow is not sent again because a run is forgotten."""
    engine = await enter()
    guard = await engine.new("run-1", key="k")
    twin = await engine.new("run-10")

    def row(scope: str) -> OnceRow:
        return OnceRow(scope, "mail", "a", "done", "1", START)

    await engine.one(
        guard,
        run_record("run.completed", START),
        once=[row(scope_of("run", "run-1")), row(scope_of("workflow", "w"))],
    )
    await engine.one(twin, completed(), once=[row(scope_of("run", "run-10"))])
    gone = await engine.store.forget({guard.run: guard.epoch}, Cleared())
    assert gone.once == 1
    assert await engine.store.once("run:run-1", "mail") is None
    assert await engine.store.once("run:run-10", "mail") is not None
    kept = await engine.store.once("workflow:w", "mail")
    assert kept is not None
    assert (kept.row.result, kept.run_id, kept.holder) == ("1", "", None)


async def test_log_lines_go_with_their_run_alone(enter: Opener) -> None:
    engine = await enter()
    guards = [await engine.new(run_id) for run_id in ("run-1", "run-10", "run-11")]
    for guard in guards:
        lines = [LogLine("a", 1, START, "info", f"{guard.run} {n}") for n in range(3)]
        await engine.one(guard, completed(), logs=lines)
    await engine.one(guards[0], run_record("run.completed", START))
    await engine.one(guards[1], completed("b"))
    gone = await engine.store.forget({1: 1}, Cleared())
    assert gone.logs == 3
    for guard, run_id in zip(guards[1:], ("run-10", "run-11"), strict=True):
        told = [line.line for _, line in await engine.store.logs(run_id)]
        assert told == [f"{guard.run} {n}" for n in range(3)]


async def test_a_dry_run_counts_what_then_goes_and_changes_nothing(enter: Opener) -> None:
    engine = await enter()
    for n, kind in enumerate([*ENDS, *RESTS, *ENDS]):
        await ended(engine, f"r{n}", kind, key=f"k{n}")
    rows = {row.run: row.epoch for row, _ in await engine.store.find()}
    before = await engine.store.tail(0)
    cleared, then = Cleared(), Cleared()
    foreseen = await engine.store.forget(rows, cleared, dry_run=True)
    assert await engine.store.tail(0) == before
    assert len(foreseen.runs) == 8
    done = await engine.store.forget(rows, then)
    assert done[:7] == foreseen[:7]  # the rest is about the file, which a dry run leaves as it is
    assert sorted(cleared) == sorted(then)
    assert {row.status for row, _ in await engine.store.find()} == {
        "running", "waiting", "interrupted", "rolling_back",
    }  # fmt: skip


async def test_files_that_could_not_be_removed_are_asked_for_again(enter: Opener) -> None:
    engine, cleared = await enter(), Cleared("r1")
    one, other = await ended(engine, "r1"), await ended(engine, "r2")
    await another(engine)
    assert (await engine.store.forget({one.run: 1, other.run: 1}, cleared)).runs == [1, 2]
    again = await engine.store.forget({}, cleared)
    assert (again.runs, again.resumed) == ([], 1)
    foreseen = await engine.store.forget({}, Cleared(), dry_run=True)
    cleared.stuck.clear()
    last = await engine.store.forget({}, cleared)
    assert last.resumed == foreseen.resumed == 1
    assert cleared == ["r1", "r2", "r1", "r1"]
    assert (await engine.store.forget({}, cleared)).resumed == 0


async def test_an_unknown_run_and_one_that_is_gone_are_nothing(enter: Opener) -> None:
    engine = await enter()
    assert (await engine.store.forget({7: 1}, Cleared())).runs == []
    assert (await engine.store.forget({}, Cleared())).runs == []


async def test_many_runs_go_in_one_call(enter: Opener) -> None:
    engine = await enter()
    units = [
        Unit(new_run(f"r{n}", engine.session), [created(), run_record("run.completed", START)])
        for n in range(300)
    ]
    await engine.store.commit(units)
    await another(engine)
    cleared = Cleared()
    gone = await engine.store.forget(dict.fromkeys(range(1, 301), 1), cleared)
    assert gone.runs == list(range(1, 301))
    assert gone.events == 600
    assert len(cleared) == 300


async def test_a_closed_store_forgets_nothing(enter: Opener) -> None:
    engine = await enter()
    await engine.store.close()
    with pytest.raises(StoreError):
        await engine.store.forget({}, Cleared())


async def test_a_run_whose_definition_others_use_leaves_it(enter: Opener) -> None:
    """B146."""
    engine = await enter()
    for n in range(2):
        await engine.one(
            new_run(f"r{n}", engine.session),
            created(),
            run_record("run.completed", START),
            definition=definition("{}"),
        )
    await another(engine)
    gone = await engine.store.forget({1: 1}, Cleared())
    assert gone.definitions == 0
    assert (await engine.all("r1")).graph == "{}"
