"""What every store does, as one suite of behaviour: subclass `StoreContract` and say how a store is made.

The only part of `dagresume.testing` that needs pytest.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import count
from typing import Any, NamedTuple, NoReturn

import anyio
import pytest

from dagresume.errors import StoreError
from dagresume.events import Record, RunStatus, run_record
from dagresume.sessions import this_session
from dagresume.store import (
    Claim,
    Committed,
    Definition,
    Guard,
    Inbox,
    Loaded,
    LogLine,
    NewRun,
    OnceRow,
    Orphaned,
    Outcome,
    Owned,
    Refused,
    RunRow,
    SqlFailed,
    Store,
    StoreFailed,
    Unique,
    Unit,
)

START = 1_796_000_000_000_000
SECOND = 1_000_000
LEASE = 30 * SECOND


class Clock:
    """A wall clock that stands still until it is told."""

    def __init__(self) -> None:
        self.time = START

    def now(self) -> int:
        return self.time

    def monotonic(self) -> float:
        return self.time / SECOND

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("a store waits for nothing")

    def call_later(self, seconds: float, call: Callable[..., object], *args: Any) -> NoReturn:
        raise AssertionError("a store waits for nothing")


class Engine(NamedTuple):
    """One session of a store."""

    store: Store
    session: int

    async def one(self, guard: Guard, *records: Record, **more: Any) -> Outcome:
        [outcome] = await self.store.commit([Unit(guard, records, **more)])
        return outcome

    async def new(self, run_id: str = "r1", **options: Any) -> Owned:
        """Make a run and give the guard of its owner."""
        made = await self.one(new_run(run_id, self.session, **options), created())
        assert isinstance(made, Committed)
        return Owned(made.run, self.session, made.epoch)

    async def row(self, run_id: str = "r1") -> RunRow:
        return (await self.all(run_id)).row

    async def kinds(self, run_id: str = "r1") -> list[str]:
        return [record.kind for record in (await self.all(run_id)).records]

    async def all(self, run_id: str = "r1") -> Loaded:
        loaded = await self.store.load(run_id)
        assert loaded is not None
        return loaded


def new_run(run_id: str = "r1", session: int | None = None, **options: Any) -> NewRun:
    facts: dict[str, Any] = {"workflow": "w", "version": "1", "key": None, "saw": None, "source": "manual"}
    facts |= {"inputs": "{}", "inputs_digest": b"\0" * 16}
    return NewRun(run_id=run_id, session=session, **(facts | options))


def created(at: int = START) -> Record:
    return run_record("run.created", at)


def completed(path: str = "a", output: str | None = "1", at: int = START) -> Record:
    return Record("node.completed", 1, at, path, size=1, output=output)


def definition(graph: str = "{}", version: str = "1", nodes: Sequence[str] = ("a", "b")) -> Definition:
    return Definition("w", version, graph.encode(), graph, tuple((node, "function") for node in nodes))


Opener = Callable[..., Awaitable[Engine]]
MakeStore = Callable[[Clock], Store]


class StoreContract:
    """The suite. Subclass it in a test module and give the fixture `make_store`.

        class TestMyStore(StoreContract):
            @pytest.fixture
            def make_store(self, tmp_path):
                return lambda clock: MyStore(tmp_path / "runs.db", clock=clock)

    It gives a function that takes a clock and makes a store; each call makes another one on the same data, as
    several processes have them. The tests run on asyncio, with the pytest plugin that anyio brings along.
    """

    pytestmark = pytest.mark.anyio

    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    @pytest.fixture
    def make_store(self) -> MakeStore:
        raise NotImplementedError("give the fixture make_store: a function of a clock that makes a store")

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    async def enter(self, make_store: MakeStore, clock: Clock) -> AsyncIterator[Opener]:
        stores: list[Store] = []

        async def opener(lease: int = LEASE) -> Engine:
            store = make_store(clock)
            stores.append(store)
            return Engine(store, await store.open(this_session(clock.now(), lease)))

        yield opener
        for store in stores:
            await store.close()

    # runs and records

    async def test_a_new_run_is_there_with_all_that_was_said_of_it(self, enter: Opener) -> None:
        engine = await enter()
        made = await engine.one(
            new_run(
                "r1", engine.session, key="k", source="webhook", inputs='{"x": 1}', inputs_digest=b"d" * 16
            ),
            created(),
            definition=definition('{"nodes": []}'),
        )
        assert made == Committed(1, 1, 1)
        row, records, graph, owner = await engine.all()
        assert row == RunRow(
            run=1, run_id="r1", workflow="w", version="1", definition=row.definition, key="k", holds_key=1,
            status="running", reason=None, owner=engine.session, epoch=1, wake_at=None, source="webhook",
            auto_resumes=0, recoveries=0, forked_from=None, forked_at_seq=None, created_at=START,
            updated_at=START, finished_at=None, usage=None, inputs_digest=b"d" * 16, inputs='{"x": 1}',
        )  # fmt: skip
        assert records == [created()._replace(seq=1)]
        assert graph == '{"nodes": []}'
        assert owner is not None
        assert owner.session == engine.session
        assert owner.alive

    async def test_an_unknown_run_is_none(self, enter: Opener) -> None:
        engine = await enter()
        assert await engine.store.load("r1") is None
        assert await engine.store.tail(0, run_id="r1") == []
        assert await engine.store.logs("r1") == []
        assert await engine.store.find() == []

    @pytest.mark.parametrize(
        "record",
        [
            Record("k", None, 0, None),
            Record(
                "node.completed",
                3,
                START,
                "a[1]/b",
                "why",
                b"\0" * 16,
                b"\xff" * 16,
                7,
                8,
                "{}",
                "1",
            ),
            Record("node.completed", 1, START, "ü/🙂", "", b"", b"", 0, 0, "", ""),
            Record("node.completed", -1, -1, "a\x00b", "a'b\"c", output="x\x00y\n\r"),
            Record("node.completed", 2**63 - 1, -(2**63), "a", output="9" * 1_000_000),
        ],
    )
    async def test_a_record_comes_back_as_it_was(self, enter: Opener, record: Record) -> None:
        engine = await enter()
        guard = await engine.new()
        done = await engine.one(guard, record)
        assert isinstance(done, Committed)
        found = (await engine.all()).records[-1]
        assert found == record._replace(seq=done.seq, output=found.output)
        assert found.output in (None, record.output)  # a store may leave small ones in
        assert await engine.store.output([done.seq]) == [record.output]

    async def test_seqs_rise_in_the_order_of_the_units(self, enter: Opener) -> None:
        engine = await enter()
        guard = await engine.new()
        outcomes = await engine.store.commit(
            [Unit(guard, [completed("a"), completed("b")]), Unit(guard, [completed("c")])]
        )
        assert outcomes == [Committed(3, 1, 1), Committed(4, 1, 1)]
        found = [(record.seq, record.path) for record in (await engine.all()).records]
        assert found == [(1, None), (2, "a"), (3, "b"), (4, "c")]

    @pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 255, 256, 257, 1024, 1025, 3000])
    async def test_a_batch_of_any_size_is_one_transaction(self, enter: Opener, size: int) -> None:
        engine = await enter()
        guards = [await engine.new(f"r{n}") for n in range(3)]
        for owners in (guards[:1], guards):
            commits = engine.store.commits
            units = [Unit(owners[n % len(owners)], [completed(f"a[{n}]")]) for n in range(size)]
            outcomes = await engine.store.commit(units)
            assert engine.store.commits == commits + 1
            seqs = [outcome.seq for outcome in outcomes if isinstance(outcome, Committed)]
            assert seqs == list(range(seqs[0], seqs[0] + size))
            assert [outcome.run for outcome in outcomes] == [unit.guard.run for unit in units]  # type: ignore[union-attr]
        assert len(await engine.store.tail(0, limit=10_000)) == 3 + 2 * size

    async def test_one_unit_of_many_records(self, enter: Opener) -> None:
        engine = await enter()
        guard = await engine.new()
        done = await engine.one(guard, *(completed(f"a[{n}]") for n in range(5000)))
        assert done == Committed(5001, 1, 1)
        assert [r.seq for r in (await engine.all()).records] == list(range(1, 5002))

    async def test_no_units_are_no_transaction(self, enter: Opener) -> None:
        engine = await enter()
        assert await engine.store.commit([]) == []

    async def test_a_unit_may_have_no_records(self, enter: Opener) -> None:
        engine = await enter()
        guard = await engine.new()
        assert await engine.one(guard) == Committed(0, 1, 1)

    # owners

    async def test_whoever_does_not_own_a_run_writes_nothing(self, enter: Opener) -> None:
        """B112."""
        engine, other = await enter(), await enter()
        guard = await engine.new()
        for wrong in (
            Owned(guard.run, other.session, guard.epoch),
            Owned(guard.run, guard.session, guard.epoch + 1),
            Owned(guard.run, guard.session, 0),
        ):
            for writer in (engine, other):
                refused = await writer.one(wrong, completed("stolen"))
                assert isinstance(refused, Refused)
                assert refused.reason == "lost"
                assert refused.run_id == "r1"
                assert refused.holder is not None
                assert refused.holder.session == engine.session
        assert await engine.one(Owned(99, engine.session, 1), completed()) == Refused("missing")
        assert await engine.kinds() == ["run.created"]

    async def test_a_refused_unit_leaves_its_neighbours_alone(self, enter: Opener) -> None:
        engine = await enter()
        mine, lost = await engine.new("r1"), await engine.new("r2")
        stale = Owned(lost.run, lost.session, lost.epoch + 1)
        units = [
            Unit(guard, [completed(f"{n}{path}") for path in "ab"])
            for n, guard in enumerate([mine, stale, mine, lost, stale, Owned(99, engine.session, 1), mine])
        ]
        outcomes = await engine.store.commit(units)
        assert [getattr(outcome, "reason", "") for outcome in outcomes] == [
            "",
            "lost",
            "",
            "",
            "lost",
            "missing",
            "",
        ]
        for unit, outcome in zip(units, outcomes, strict=True):
            records = [*(await engine.all("r1")).records, *(await engine.all("r2")).records]
            stored = {record.path: record.seq for record in records}
            if isinstance(outcome, Committed):
                assert stored[unit.records[-1].path] == outcome.seq
            else:
                assert unit.records[0].path not in stored

    async def test_only_the_runs_that_were_lost_are_refused(self, enter: Opener) -> None:
        engine = await enter()
        guards = [await engine.new(f"r{n}") for n in range(5)]
        stale = [Owned(g.run, g.session, g.epoch + (g.run % 2)) for g in guards]
        outcomes = await engine.store.commit([Unit(g, [completed(f"{n}")]) for n in range(3) for g in stale])
        for unit, outcome in zip([g for _ in range(3) for g in stale], outcomes, strict=True):
            assert isinstance(outcome, Refused if unit.run % 2 else Committed)
        for guard in guards:
            assert len(await engine.kinds(f"r{guard.run - 1}")) == (1 if guard.run % 2 else 4)

    async def test_an_owner_that_lets_go_owns_nothing_more(self, enter: Opener) -> None:
        engine = await enter()
        for n, kind in enumerate(
            ["run.completed", "run.failed", "run.interrupted", "run.waiting", "run.cancelled"]
        ):
            guard = await engine.new(f"r{n}")
            first, second = await engine.store.commit(
                [Unit(guard, [completed(), run_record(kind, START + 1)]), Unit(guard, [completed("late")])]
            )
            assert isinstance(first, Committed)
            assert second == Refused("lost", None, f"r{n}")
            row, records, _, owner = await engine.all(f"r{n}")
            assert (row.status, row.owner, row.epoch) == (kind.removeprefix("run."), None, 1)
            assert owner is None
            assert [record.path for record in records] == [None, "a", None]

    async def test_the_row_is_the_projection_of_its_records(self, enter: Opener) -> None:
        engine = await enter()
        guard = await engine.new()
        await engine.one(guard, run_record("run.waiting", START + 5, "held", wake_at=START + 99))
        row = await engine.row()
        assert (row.status, row.reason, row.updated_at) == ("waiting", "held", START + 5)
        assert (row.wake_at, row.finished_at) == (START + 99, None)
        claimed = await engine.one(Claim(1, engine.session, 2), run_record("run.claimed", START + 6))
        assert claimed == Committed(3, 1, 2)
        row = await engine.row()
        assert (row.status, row.reason, row.wake_at, row.owner) == ("running", None, None, engine.session)
        await engine.one(Owned(1, engine.session, 2), run_record("run.cancelled", START + 7, "by a person"))
        row = await engine.row()
        assert (row.status, row.finished_at, row.holds_key) == ("cancelled", START + 7, 0)

    # claims

    async def test_a_run_whose_owner_lives_is_locked(self, enter: Opener) -> None:
        engine, other = await enter(), await enter()
        await engine.new()
        for whoever in (engine, other):
            refused = await whoever.one(Claim(1, whoever.session, 1), run_record("run.claimed", START))
            assert isinstance(refused, Refused)
            assert (refused.reason, refused.run_id) == ("locked", "r1")
            assert refused.holder is not None
            assert refused.holder.alive
        assert await engine.one(Claim(9, engine.session, 0)) == Refused("missing")
        assert (await engine.row()).epoch == 1

    async def test_the_run_of_a_closed_session_can_be_claimed(self, enter: Opener) -> None:
        engine, other = await enter(), await enter()
        await engine.new()
        await engine.store.close()
        owner = (await other.all()).holder
        assert owner is not None
        assert not owner.alive
        claimed = await other.one(Claim(1, other.session, 1), run_record("run.claimed", START + 1))
        assert claimed == Committed(2, 1, 2)
        assert await other.one(Owned(1, other.session, 2), completed()) == Committed(3, 1, 2)

    async def test_whoever_is_fenced_off_writes_nothing_more(self, enter: Opener, clock: Clock) -> None:
        """B106, B112: also when its late write comes in one batch with others."""
        engine, other = await enter(), await enter(lease=100 * LEASE)
        mine, kept = await engine.new("r1"), await engine.new("r2")
        clock.time += LEASE + 1
        await other.one(Claim(1, other.session, 2), run_record("run.claimed", clock.now()))
        late, fine = await engine.store.commit([Unit(mine, [completed("late")]), Unit(kept, [completed()])])
        assert isinstance(late, Refused)
        assert late.reason == "lost"
        assert late.holder is not None
        assert (late.holder.session, late.holder.alive) == (other.session, True)
        assert isinstance(fine, Committed)
        assert await engine.kinds() == ["run.created", "run.claimed"]

    async def test_a_lease_holds_until_it_is_over_and_can_be_renewed(
        self, enter: Opener, clock: Clock
    ) -> None:
        engine, other = await enter(), await enter(lease=100 * LEASE)
        await engine.new()
        clock.time += LEASE
        assert isinstance(await other.one(Claim(1, other.session, 1)), Refused)
        assert engine.store.renew(clock.now() + LEASE)
        clock.time += LEASE
        assert isinstance(await other.one(Claim(1, other.session, 1)), Refused)
        clock.time += 1
        assert isinstance(await other.one(Claim(1, other.session, 1)), Committed)

    async def test_a_claim_that_saw_an_older_state_is_refused(self, enter: Opener) -> None:
        engine = await enter()
        guard = await engine.new()
        await engine.one(guard, run_record("run.failed", START))
        await engine.one(Inbox(1), run_record("run.note", START))
        refused = await engine.one(Claim(1, engine.session, 2), run_record("run.claimed", START))
        assert refused == Refused("changed", None, "r1")
        await engine.new("r2")
        assert isinstance(await engine.one(Claim(1, engine.session, 3)), Committed)

    async def test_two_claims_at_once_are_one(self, enter: Opener) -> None:
        engines = [await enter() for _ in range(5)]
        guard = await engines[0].new()
        await engines[0].one(guard, run_record("run.failed", START))
        outcomes: list[Outcome] = []

        async def claim(engine: Engine) -> None:
            outcomes.append(await engine.one(Claim(1, engine.session, 2), run_record("run.claimed", START)))

        async with anyio.create_task_group() as group:
            for engine in engines:
                group.start_soon(claim, engine)
        assert [type(outcome) for outcome in outcomes].count(Committed) == 1
        assert (await engines[0].kinds()).count("run.claimed") == 1

    # orphans

    async def test_an_orphan_is_marked_and_its_owner_may_still_come_back(
        self, enter: Opener, clock: Clock
    ) -> None:
        engine, other = await enter(), await enter(lease=100 * LEASE)
        guard = await engine.new()
        mark = Orphaned(1, engine.session, 1)
        interrupted = run_record("run.interrupted", START + 1, "lease over")
        refused = await other.one(mark, interrupted)
        assert isinstance(refused, Refused)
        assert refused.reason == "locked"
        clock.time += LEASE + 1
        assert await other.one(mark, interrupted) == Committed(2, 1, 1)
        row = await other.row()
        assert (row.status, row.reason, row.owner, row.epoch) == (
            "interrupted",
            "lease over",
            engine.session,
            1,
        )
        done = await engine.one(guard, completed(at=START + 7))
        assert done == Committed(4, 1, 1)
        row, records, *_ = await engine.all()
        assert (row.status, row.reason, row.updated_at) == ("running", None, START + 7)
        assert [record.kind for record in records[-2:]] == ["run.revived", "node.completed"]

    async def test_a_run_comes_back_to_life_once_in_a_batch(self, enter: Opener, clock: Clock) -> None:
        engine, other = await enter(), await enter(lease=100 * LEASE)
        guard, fine = await engine.new("r1"), await engine.new("r2")
        clock.time += LEASE + 1
        await other.one(Orphaned(1, engine.session, 1), run_record("run.interrupted", START))
        outcomes = await engine.store.commit(
            [Unit(guard, [completed("a")]), Unit(fine, [completed("x")]), Unit(guard, [completed("b")])]
        )
        assert all(isinstance(outcome, Committed) for outcome in outcomes)
        assert (await engine.kinds()).count("run.revived") == 1
        assert [r.path for r in (await engine.all()).records if r.path] == ["a", "b"]

    async def test_an_orphan_that_somebody_took_is_left_alone(self, enter: Opener, clock: Clock) -> None:
        engine, other = await enter(), await enter(lease=100 * LEASE)
        guard = await engine.new()
        clock.time += LEASE + 1
        await other.one(Claim(1, other.session, 1), run_record("run.claimed", START))
        for mark in (Orphaned(1, engine.session, 1), Orphaned(1, other.session, 1)):
            refused = await other.one(mark, run_record("run.interrupted", START))
            assert isinstance(refused, Refused)
            assert refused.reason == "lost"
        assert await other.one(Orphaned(9, engine.session, 1)) == Refused("missing")
        assert isinstance(await engine.one(guard, completed()), Refused)
        assert (await other.row()).status == "running"

    # keys

    async def test_a_key_is_given_once(self, enter: Opener) -> None:
        """B109."""
        engines = [await enter() for _ in range(4)]
        outcomes: list[Outcome] = []

        async def start(engine: Engine, n: int) -> None:
            guard = new_run(f"r{n}", engine.session, key="k")
            outcomes.append(await engine.one(guard, created()))

        async with anyio.create_task_group() as group:
            for n in range(10):
                group.start_soon(start, engines[n % 4], n)
        made = [outcome for outcome in outcomes if isinstance(outcome, Committed)]
        refused = [outcome for outcome in outcomes if isinstance(outcome, Refused)]
        assert len(made) == 1
        assert len(refused) == 9
        [(row, owner)] = await engines[0].store.find()
        assert {(r.reason, r.run_id) for r in refused} == {("key_taken", row.run_id)}
        assert {r.holder for r in refused} == {owner}

    async def test_a_key_is_literal_and_of_one_workflow(self, enter: Opener) -> None:
        """B160."""
        engine = await enter()
        keys = ["a_b", "axb", "A_B", "50%", "500", "x\\y", "", " ", "ü", "u\u0308", "k\x00"]
        for n, key in enumerate(keys):
            await engine.new(f"r{n}", key=key)
            await engine.new(f"s{n}", key=key, workflow="W")
        for n, key in enumerate(keys):
            found = [row.run_id for row, _ in await engine.store.find(workflow="w", key=key)]
            assert found == [f"r{n}"]

    async def test_a_newer_run_takes_the_key(self, enter: Opener) -> None:
        engine = await enter()
        first = await engine.new("r1", key="k")
        assert isinstance(await engine.one(new_run("r2", engine.session, key="k")), Refused)
        assert isinstance(await engine.one(new_run("r2", engine.session, key="k", saw=9)), Refused)
        await engine.one(first, run_record("run.failed", START))
        second = await engine.new("r2", key="k", saw=first.run)
        assert [(await engine.row(r)).holds_key for r in ("r1", "r2")] == [0, 1]
        stale = await engine.one(new_run("r3", engine.session, key="k", saw=first.run), created())
        assert isinstance(stale, Refused)
        assert stale.run_id == "r2"
        await engine.one(second, run_record("run.completed", START))
        await engine.new("r3", key="k", saw=second.run)
        assert [(await engine.row(r)).holds_key for r in ("r1", "r2", "r3")] == [0, 0, 1]

    async def test_no_newer_run_takes_the_key_of_one_that_is_driven(self, enter: Opener) -> None:
        """B109: the run that was seen at rest was taken up meanwhile."""
        engine, other = await enter(), await enter()
        first = await engine.new("r1", key="k")
        await engine.one(first, run_record("run.failed", START))
        await other.one(Claim(1, other.session, 2), run_record("run.claimed", START))
        refused = await engine.one(new_run("r2", engine.session, key="k", saw=first.run), created())
        assert isinstance(refused, Refused)
        assert (refused.reason, refused.run_id) == ("key_taken", "r1")
        assert refused.holder is not None
        assert (refused.holder.session, refused.holder.alive) == (other.session, True)

    async def test_a_run_that_was_thought_dead_comes_back_without_the_key_it_lost(
        self, enter: Opener, clock: Clock
    ) -> None:
        engine, other = await enter(), await enter(lease=100 * LEASE)
        guard = await engine.new("r1", key="k")
        clock.time += LEASE + 1
        await other.one(Orphaned(1, engine.session, 1), run_record("run.interrupted", START))
        await other.new("r2", key="k", saw=1)
        assert isinstance(await engine.one(guard, completed()), Committed)
        assert [(await engine.row(r)).holds_key for r in ("r1", "r2")] == [0, 1]
        assert (await engine.row()).status == "running"

    async def test_no_key_is_no_lock(self, enter: Opener) -> None:
        engine = await enter()
        for n in range(3):
            await engine.new(f"r{n}")
        assert len(await engine.store.find()) == 3

    async def test_a_run_takes_its_key_back_unless_another_has_it(self, enter: Opener) -> None:
        engine = await enter()
        first = await engine.new("r1", key="k")
        await engine.one(first, run_record("run.failed", START))
        second = await engine.new("r2", key="k", saw=1)
        await engine.one(second, run_record("run.cancelled", START))
        assert await engine.one(Claim(1, engine.session, 2), run_record("run.claimed", START)) == Committed(
            5, 1, 2
        )
        assert [(await engine.row(r)).holds_key for r in ("r1", "r2")] == [1, 0]
        refused = await engine.one(Claim(2, engine.session, 5), run_record("run.claimed", START))
        assert isinstance(refused, Refused)
        assert (refused.reason, refused.run_id) == ("key_taken", "r1")
        assert refused.holder is not None
        assert refused.holder.session == engine.session

    async def test_a_run_that_needs_no_key_leaves_it_where_it_is(self, enter: Opener) -> None:
        engine = await enter()
        first = await engine.new("r1", key="k")
        await engine.one(first, run_record("run.failed", START))
        second = await engine.new("r2", key="k", saw=1)
        await engine.one(second, run_record("run.completed", START))
        for run in (1, 2):
            seen = 4 if run == 1 else 5
            claim = Claim(run, engine.session, seen, takes_key=False)
            claimed = await engine.one(claim, run_record("run.rolling_back", START))
            assert isinstance(claimed, Committed)
            assert (claimed.run, claimed.epoch) == (run, 2)
        assert [(await engine.row(r)).holds_key for r in ("r1", "r2")] == [0, 1]
        assert [(await engine.row(r)).owner for r in ("r1", "r2")] == [engine.session] * 2

    @pytest.mark.parametrize("reason", [None, "asked", "compensation_failed", "shutdown"])
    async def test_a_run_that_rolls_back_is_kept_until_it_rests(
        self, enter: Opener, reason: str | None
    ) -> None:
        engine = await enter()
        first = await engine.new("r1", key="k")
        await engine.one(first, run_record("run.rolling_back", START, reason))
        row = await engine.row("r1")
        kept = reason in {None, "asked"}
        assert (row.status, row.owner) == ("rolling_back", engine.session if kept else None)
        assert row.finished_at is None

    async def test_a_run_id_is_given_once(self, enter: Opener) -> None:
        engine = await enter()
        await engine.new()
        refused = await engine.one(new_run("r1", engine.session), created())
        assert isinstance(refused, Refused)
        assert (refused.reason, refused.run_id) == ("exists", "r1")
        assert len(await engine.store.find()) == 1

    async def test_a_run_without_owner_waits_to_be_claimed(self, enter: Opener) -> None:
        engine = await enter()
        assert await engine.one(new_run("r1", None, key="k"), created()) == Committed(1, 1, 0)
        row = await engine.row()
        assert (row.status, row.owner, row.epoch, row.holds_key) == ("pending", None, 0, 1)
        assert await engine.one(Claim(1, engine.session, 1), run_record("run.claimed", START)) == Committed(
            2, 1, 1
        )
        assert (await engine.row()).status == "running"

    async def test_a_fork_knows_where_it_comes_from(self, enter: Opener) -> None:
        engine = await enter()
        await engine.new("r1")
        await engine.new("r2", forked_from=1, forked_at_seq=1)
        row = await engine.row("r2")
        assert (row.forked_from, row.forked_at_seq) == (1, 1)

    # letters and names

    async def test_anybody_may_write_a_letter(self, enter: Opener) -> None:
        engine, other = await enter(), await enter()
        await engine.new()
        letter = run_record("run.cancel_requested", START, by="me")
        assert await other.one(Inbox(1), letter) == Committed(2, 1, 1)
        row = await engine.row()
        assert (row.status, row.owner) == ("running", engine.session)
        assert await other.one(Inbox(7), letter) == Refused("missing")

    async def test_the_first_letter_wins(self, enter: Opener) -> None:
        """B139."""
        engine, other = await enter(), await enter()
        await engine.new()
        for path in ("ap", None):
            guard = Inbox(1, unless=("approval.decided", path))
            decided = Record("approval.decided", None, START, path)
            outcomes: list[Outcome] = [await e.one(guard, decided) for e in (engine, other, engine)]
            assert [type(outcome) for outcome in outcomes] == [Committed, Refused, Refused]
            assert getattr(outcomes[1], "reason", None) == "exists"
        assert isinstance(await engine.one(Inbox(1, unless=("approval.decided", "a")), created()), Committed)
        assert isinstance(await engine.one(Inbox(1, unless=("run.created", "ap")), created()), Committed)

    async def test_a_letter_of_an_earlier_round_is_no_obstacle(self, enter: Opener) -> None:
        engine = await enter()
        await engine.new()
        decided = Record("approval.decided", None, START, "ap")
        first = await engine.one(Inbox(1, unless=(decided.kind, "ap")), decided)
        assert isinstance(first, Committed)
        assert isinstance(
            await engine.one(Inbox(1, (decided.kind, "ap"), after=first.seq - 1), decided), Refused
        )
        assert isinstance(
            await engine.one(Inbox(1, (decided.kind, "ap"), after=first.seq), decided), Committed
        )

    async def test_a_name_is_used_once(self, enter: Opener) -> None:
        engine, other = await enter(), await enter()
        assert await engine.one(Unique("tick:1")) == Committed(0)
        outcomes = await other.store.commit([Unit(Unique(name)) for name in ("tick:1", "tick:2", "tick:2")])
        assert outcomes == [Refused("exists"), Committed(0), Refused("exists")]

    # definitions and logs

    async def test_a_definition_is_stored_once_and_can_change_with_a_claim(self, enter: Opener) -> None:
        engine = await enter()
        for n in (1, 2):
            await engine.one(new_run(f"r{n}", engine.session), created(), definition=definition("[1]"))
        assert (await engine.row("r1")).definition == (await engine.row("r2")).definition
        await engine.one(Owned(1, engine.session, 1), run_record("run.failed", START))
        await engine.one(
            Claim(1, engine.session, 3), run_record("run.claimed", START), definition=definition("[2]", "2")
        )
        row, _, graph, _ = await engine.all("r1")
        assert (row.version, graph) == ("2", "[2]")
        row, _, graph, _ = await engine.all("r2")
        assert (row.version, graph) == ("1", "[1]")

    async def test_log_lines_go_in_with_their_unit_and_come_out_in_order(self, enter: Opener) -> None:
        engine = await enter()
        guard, other = await engine.new("r1"), await engine.new("r2")
        lines = [LogLine("a", 1, START + n, "info", f"line {n}") for n in range(5)]
        await engine.store.commit(
            [
                Unit(guard, [completed()], logs=lines[:3]),
                Unit(other, [], logs=[LogLine(None, None, START, "debug", "")]),
                Unit(
                    Owned(1, engine.session, 9), [completed()], logs=[LogLine("x", 1, START, "info", "never")]
                ),
            ]
        )
        await engine.one(guard, logs=lines[3:])
        found = await engine.store.logs("r1")
        assert [line for _, line in found] == lines
        assert found == sorted(found)
        assert await engine.store.logs("r1", after=found[1][0], limit=2) == found[2:4]
        assert [line for _, line in await engine.store.logs("r2")] == [
            LogLine(None, None, START, "debug", "")
        ]

    # what fails

    @pytest.mark.parametrize(
        "poison",
        [
            completed("p", at=2**63),
            completed("p", at=-(2**63) - 1),
            completed("p\ud800"),
            completed("p", output="\udcff"),
            Record("node.failed", 2**70, START, "p"),
            Record("node.failed", 1, START, "p", "\ud800"),
            Record("node.failed", 1, START, "p", data="\ud800"),
        ],
    )
    async def test_a_value_that_cannot_be_stored_hurts_its_own_unit_alone(
        self, enter: Opener, poison: Record
    ) -> None:
        engine = await enter()
        one, two = await engine.new("r1"), await engine.new("r2")
        for neighbours in (1, 2, 100):
            units = [Unit(g, [completed(f"{n}")]) for n in range(neighbours) for g in (one, two)]
            units.insert(neighbours, Unit(one, [completed("with"), poison, completed("them")]))
            outcomes = await engine.store.commit(units)
            [failed] = [outcome for outcome in outcomes if not isinstance(outcome, Committed)]
            assert failed is outcomes[neighbours]
            assert isinstance(failed, StoreFailed)
            assert isinstance(failed.error, StoreError)
            assert failed.error.__cause__ is not None
        assert isinstance(await engine.one(one, completed("after")), Committed)
        paths = {record.path for record in (await engine.all()).records}
        assert not paths & {"with", "p", "them"}

    async def test_poison_in_a_log_line_or_an_input_hurts_its_own_unit_alone(self, enter: Opener) -> None:
        engine = await enter()
        guard = await engine.new("r1")
        outcomes = await engine.store.commit(
            [
                Unit(guard, [completed("a")]),
                Unit(guard, [completed("b")], logs=[LogLine("b", 1, START, "info", "\ud800")]),
                Unit(new_run("r2", engine.session, inputs="\ud800"), [created()]),
                Unit(new_run("r3", engine.session, key="\ud800"), [created()]),
                Unit(Unique("\ud800")),
                Unit(Unique("name"), [created()]),
                Unit(new_run("r4", engine.session), [created()]),
            ]
        )
        assert [type(o) for o in outcomes] == [Committed, *[StoreFailed] * 5, Committed]
        assert {row.run_id for row, _ in await engine.store.find()} == {"r1", "r4"}
        assert [r.path for r in (await engine.all()).records] == [None, "a"]
        assert await engine.store.logs("r1") == []

    async def test_no_run_is_completed_behind_a_hole(self, enter: Opener) -> None:
        """C8."""
        engine = await enter()
        one, two = await engine.new("r1"), await engine.new("r2")
        ending = [completed("z"), run_record("run.completed", START)]
        outcomes = await engine.store.commit(
            [
                Unit(one, [completed("p\ud800")]),
                Unit(one, [completed("q")]),
                Unit(one, ending),
                Unit(two, ending),
            ]
        )
        assert [type(o) for o in outcomes] == [StoreFailed, Committed, StoreFailed, Committed]
        assert [(await engine.row(r)).status for r in ("r1", "r2")] == ["running", "completed"]

    async def test_sql_of_the_user_needs_a_store_that_lasts(self, enter: Opener) -> None:
        engine = await enter()
        if engine.store.persistent:
            return
        guard = await engine.new()
        failed = await engine.one(guard, completed(), sql=[("SELECT 1", [])])
        assert isinstance(failed, SqlFailed)
        assert await engine.kinds() == ["run.created"]

    # calls that are made once

    async def test_what_is_known_of_a_call_replaces_what_was_seen_of_it(self, enter: Opener) -> None:
        engine = await enter()
        guard = await engine.new()
        assert await engine.store.once("s", "k") is None
        started = OnceRow("s", "k", "a", "started", "1", START)
        assert isinstance(await engine.one(guard, once=[started]), Committed)
        found = await engine.store.once("s", "k")
        assert found is not None
        assert (found.row, found.run_id) == (started, "r1")
        assert found.holder is not None
        assert (found.holder.session, found.holder.alive) == (engine.session, True)
        done = OnceRow("s", "k", "a", "done", '{"x": 1}', START + 1, saw=START)
        assert isinstance(await engine.one(guard, completed(), once=[done]), Committed)
        found = await engine.store.once("s", "k")
        assert found is not None
        assert found.row == done._replace(saw=None)
        assert await engine.store.once("s", "other") is await engine.store.once("other", "k") is None

    async def test_a_call_that_another_one_overtook_is_refused_with_its_unit(self, enter: Opener) -> None:
        one, two = await enter(), await enter()
        first, second = await one.new("r1"), await two.new("r2")
        mark = OnceRow("s", "k", "a", "started", "1", START)
        outcomes = [
            await one.one(first, once=[mark]),
            await two.one(second, completed(), once=[mark._replace(path="b")]),
            await two.one(second, completed(), once=[mark._replace(state="done", saw=START - 1)]),
            await two.one(second, completed(), once=[mark._replace(key="new", saw=START)]),
        ]
        assert [type(outcome) for outcome in outcomes] == [Committed, *[Refused] * 3]
        assert {outcome.reason for outcome in outcomes if isinstance(outcome, Refused)} == {"once"}
        assert await two.kinds("r2") == ["run.created"]
        found = await two.store.once("s", "k")
        assert found is not None
        assert (found.row, found.run_id) == (mark, "r1")
        assert await two.store.once("s", "new") is None

    async def test_a_mark_that_is_taken_back_is_gone(self, enter: Opener) -> None:
        engine = await enter()
        guard = await engine.new()
        await engine.one(guard, once=[OnceRow("s", "k", "a", "started", "1", START)])
        assert isinstance(
            await engine.one(guard, once=[OnceRow("s", "k", "a", "free", None, START + 1, saw=START)]),
            Committed,
        )
        assert await engine.store.once("s", "k") is None

    async def test_only_the_owner_of_a_run_marks_calls_in_it(self, enter: Opener) -> None:
        engine = await enter()
        guard = await engine.new()
        mark = OnceRow("s", "k", "a", "started", "1", START)
        lost = await engine.one(Owned(guard.run, guard.session, guard.epoch + 1), once=[mark])
        assert isinstance(lost, Refused)
        assert lost.reason == "lost"
        broken = await engine.one(guard, completed(), once=[mark._replace(key="\ud800")])
        assert isinstance(broken, StoreFailed)
        assert await engine.store.once("s", "k") is None
        assert await engine.kinds() == ["run.created"]

    async def test_a_unit_without_a_run_marks_no_call(self, enter: Opener) -> None:
        engine = await enter()
        mark = OnceRow("s", "k", "a", "started", "1", START)
        assert isinstance(await engine.one(Unique("name"), once=[mark]), StoreFailed)
        assert isinstance(await engine.one(Unique("name")), Committed)

    # readers

    async def test_the_journal_can_be_followed(self, enter: Opener) -> None:
        engine = await enter()
        one, two = await engine.new("r1"), await engine.new("r2")
        await engine.store.commit([Unit(g, [completed(f"{n}")]) for n in range(4) for g in (one, two)])
        await engine.one(Inbox(1), Record("execution.auto_resume", None, START, None))
        whole = await engine.store.tail(0)
        assert [record.seq for _, record in whole] == list(range(1, 12))
        assert {record.output for _, record in whole} == {None}
        assert await engine.store.tail(5) == whole[5:]
        assert await engine.store.tail(2, limit=3) == whole[2:5]
        assert await engine.store.tail(11) == []
        mine = [entry for entry in whole if entry[0] == "r1"]
        assert await engine.store.tail(0, run_id="r1") == mine
        assert await engine.store.tail(mine[1][1].seq or 0, run_id="r1", limit=2) == mine[2:4]
        kinds = ["execution.auto_resume", "run.created"]
        some = [entry for entry in whole if entry[1].kind in kinds]
        assert await engine.store.tail(0, kinds=kinds) == some
        assert await engine.store.tail(1, kinds=kinds, limit=1) == some[1:2]
        assert await engine.store.tail(0, run_id="r1", kinds=kinds) == [e for e in some if e[0] == "r1"]
        ended = await engine.store.tail(0, kinds=["node.completed", "run.created"])
        assert ended == [entry for entry in whole if entry[1].kind in {"node.completed", "run.created"}]
        assert await engine.store.tail(0, kinds=[]) == []

    async def test_outputs_come_in_the_order_asked_for(self, enter: Opener) -> None:
        engine = await enter()
        guard = await engine.new()
        await engine.one(guard, *(completed(f"{n}", str(n)) for n in range(2000)), completed("none", None))
        asked = [3, 2, 2001, 3, 1, 2002, 99_999, 0, -1]
        expected = ["1", "0", "1999", "1", None, None, None, None, None]
        assert await engine.store.output(asked) == expected
        assert engine.store.output_now(asked) == expected
        assert await engine.store.output([]) == []
        assert await engine.store.output(range(2, 2002)) == [str(n) for n in range(2000)]
        assert await anyio.to_thread.run_sync(engine.store.output_now, asked) == expected
        await engine.store.close()
        assert engine.store.output_now(asked) == expected

    async def test_runs_are_found_newest_first_by_all_that_is_asked(self, enter: Opener) -> None:
        engine = await enter()
        numbers = count(1)
        for workflow in ("w", "v"):
            for status in ("running", "failed", "completed"):
                for _ in range(3):
                    guard = await engine.new(f"r{next(numbers)}", workflow=workflow)
                    if status != "running":
                        await engine.one(guard, run_record(f"run.{status}", START))

        async def found(**question: Any) -> list[int]:
            return [row.run for row, _ in await engine.store.find(**question)]

        assert await found() == list(range(18, 0, -1))
        assert await found(limit=2) == [18, 17]
        assert await found(before=4) == [3, 2, 1]
        assert await found(workflow="w", status=["failed"]) == [6, 5, 4]
        assert await found(status=["failed", "completed"], limit=4) == [18, 17, 16, 15]
        assert await found(status=["failed", "failed"], before=15) == [14, 13, 6, 5, 4]
        assert await found(status=[]) == []
        assert await found(workflow="W") == []
        assert await found(key="") == []
        assert await found(starting="r1", limit=3) == [18, 17, 16]
        assert await found(starting="r18", workflow="v") == [18]
        assert await found(starting="R18") == await found(starting="r_8") == await found(starting="r%") == []
        assert await found(since=START, limit=1) == [18]
        assert await found(since=START + 10**15) == await found(until=START - 10**15) == []
        assert len(await found(until=START + 10**15)) == 18
        owners = {row.run: owner.session if owner else None for row, owner in await engine.store.find()}
        assert [owners[n] for n in (18, 12, 1)] == [None, engine.session, engine.session]

    async def test_others_see_what_was_committed_at_once(self, enter: Opener) -> None:
        engine, other = await enter(), await enter()
        guard = await engine.new()
        before = await other.store.changed()
        assert await other.store.changed() == before
        own = await engine.store.changed()
        await engine.one(guard, completed())
        assert await other.store.changed() != before
        assert await engine.store.changed() == own
        assert await other.kinds() == ["run.created", "node.completed"]

    # opening and closing

    async def test_a_closed_store_says_so(self, enter: Opener) -> None:
        engine = await enter()
        guard = await engine.new()
        await engine.store.close()
        await engine.store.close()
        with pytest.raises(StoreError, match="not open"):
            await engine.one(guard, completed())
        assert not engine.store.renew(START + LEASE)

    async def test_sessions_have_numbers_of_their_own(self, enter: Opener) -> None:
        engines = [await enter() for _ in range(3)]
        assert len({engine.session for engine in engines}) == 3
        await engines[0].store.close()
        assert (await enter()).session not in {engine.session for engine in engines}

    async def test_what_was_committed_outlives_the_session(self, enter: Opener) -> None:
        engine = await enter()
        guard = await engine.new()
        await engine.one(guard, completed(), run_record("run.completed", START))
        await engine.store.close()
        later = await enter()
        assert await later.kinds() == ["run.created", "node.completed", "run.completed"]
        assert (await later.row()).status == RunStatus.COMPLETED
