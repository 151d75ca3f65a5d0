"""What bodies have kept while they run: calls made once, state, SQL beside a checkpoint, files, progress."""

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dagresume import (
    NOT_DONE,
    Context,
    Engine,
    Event,
    OnceInFlight,
    OnceUncertain,
    OutputNotSerializable,
    Retry,
    RunFailed,
    RunResult,
    StoreError,
    UncertainNode,
    Workflow,
)
from dagresume.context import artifacts_of
from dagresume.store import Outcome, StoreFailed, Unit
from dagresume.testing import StoreWrapper
from tests.engine import bodies
from tests.engine.kit import Boom, Calls, FaultyStore, Home, settle

SOON = Retry(3, delay=0.001)


def asked(db: Path, sql: str) -> list[Any]:
    connection = sqlite3.connect(db)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


async def of_kind(home: Home, run_id: str, kind: str) -> list[Event]:
    return [event for event in await home.events(run_id) if event.kind == kind]


def only_failure(result: RunResult) -> Any:
    (failure,) = result.failures.values()
    return failure


# -- calls made once ------------------------------------------------------------------------------------


@dataclass
class Receipt:
    number: int
    lines: tuple[str, ...]


class Shop:
    """Counts what was bought, and breaks on demand."""

    def __init__(self) -> None:
        self.bought: list[str] = []
        self.breaks: list[BaseException] = []
        self.stopped = False  # whether it is the engine that cancels
        self.reached, self.gate = asyncio.Event(), asyncio.Event()
        self.gate.set()

    async def buy(self, what: str) -> Receipt:
        """Buy something, or break before that."""
        if self.breaks:
            raise self.breaks.pop(0)
        self.bought.append(what)
        self.reached.set()
        await self.gate.wait()
        return Receipt(len(self.bought), (what,))

    def buy_now(self, what: str) -> Receipt:
        """Do the same without a loop."""
        self.bought.append(what)
        return Receipt(len(self.bought), (what,))


def buying(
    shop: Shop, *, idempotent: bool = False, retry: Retry | None = None, scope: Any = "run"
) -> Workflow:
    wf = Workflow("shop", idempotent=idempotent, retry=retry)

    @wf.node
    async def order(ctx: Context) -> int:
        try:
            receipt = await ctx.once("order", shop.buy, "tea", scope=scope)
        except asyncio.CancelledError:
            if shop.stopped:
                raise
            raise Boom("the call was cut off") from None
        assert receipt.lines == ("tea",)
        return int(receipt.number)

    return wf


async def test_a_call_made_once_is_not_made_again_in_its_run(home: Home, calls: Calls) -> None:
    wf, shop = Workflow("w", retry=SOON), Shop()

    @wf.node
    async def first(ctx: Context) -> None:
        found = [await ctx.once("k", shop.buy, "tea"), await ctx.once("now", shop.buy_now, "cup")]
        assert [receipt.lines for receipt in found] == [("tea",), ("cup",)]
        if ctx.attempt < 3:
            raise Boom

    @wf.node(depends_on="first")
    async def second(ctx: Context) -> bool:
        one, two = await ctx.once("k", shop.buy, "tea"), await ctx.once("k", shop.buy, "tea")
        return bool(one == two == Receipt(1, ("tea",)) and one is not two)

    result = await home.run(wf)
    assert result["second"] is True
    assert shop.bought == ["tea", "cup"]
    again = await home.run(wf, fresh=True)
    assert again["second"] is False
    assert shop.bought == ["tea", "cup"] * 2


@pytest.mark.parametrize("value", [None, 0, "", [], {"a": (1, 2)}, {1, 2}])
async def test_what_a_call_gave_is_what_it_gives(home: Home, value: Any) -> None:
    wf, made = Workflow("w", retry=SOON), []

    def give() -> Any:
        made.append(1)
        return value

    @wf.node
    async def node(ctx: Context) -> bool:
        found = await ctx.once("k", give)
        if ctx.attempt == 1:
            raise Boom
        return bool(found == value and type(found) is type(value))

    assert (await home.run(wf))["node"] is True
    assert made == [1]


async def test_a_key_of_the_workflow_counts_in_all_its_runs(home: Home) -> None:
    shop = Shop()
    wf = buying(shop, scope="workflow")
    assert [(await home.run(wf, fresh=True))["order"] for _ in range(3)] == [1, 1, 1]
    other = Workflow("other shop")
    order = wf.nodes["order"].fn
    assert order is not None
    other.node(id="order")(order)
    assert (await home.run(other))["order"] == 2
    assert shop.bought == ["tea", "tea"]


async def test_a_call_that_raised_was_not_made(home: Home) -> None:
    shop = Shop()
    shop.breaks = [Boom("sold out"), Boom("sold out")]
    result = await home.run(buying(shop, retry=SOON))
    assert (result["order"], shop.bought) == (1, ["tea"])
    shop.breaks = [Boom("closed")] * 3
    failed = await home.run(buying(shop, retry=SOON))
    assert only_failure(failed).message == "closed"
    assert (await home.resume(buying(shop, retry=SOON), failed.run_id))["order"] == 2


async def test_a_call_that_was_cut_off_is_uncertain_and_a_person_has_it_made_again(home: Home) -> None:
    shop = Shop()
    shop.breaks = [asyncio.CancelledError()]
    wf = buying(shop, retry=SOON)
    result = await home.run(wf)
    assert (result.status, result.reason) == ("interrupted", "uncertain")
    (record,) = await of_kind(home, result.run_id, "node.interrupted")
    assert (record.reason, record.attempt, shop.bought) == ("once_uncertain", 2, [])
    for part in (
        "order",
        "once('order')",
        "dagresume resolve",
        f"dagresume retry {result.run_id}",
        "attempt 1",
    ):
        assert part in record.data["message"]
    with pytest.raises(UncertainNode):
        await home.resume(wf, result.run_id)
    shop.breaks = [asyncio.CancelledError()]
    again = await home.retry(wf, result.run_id)  # it is made again, and cut off again
    assert (again.reason, shop.bought) == ("uncertain", [])
    assert (await home.retry(wf, result.run_id))["order"] == 1
    assert shop.bought == ["tea"]


async def test_an_idempotent_node_makes_a_call_again_that_was_cut_off(home: Home) -> None:
    shop = Shop()
    shop.breaks = [asyncio.CancelledError()]
    result = await home.run(buying(shop, idempotent=True, retry=SOON))
    assert (result["order"], shop.bought) == (1, ["tea"])


async def test_the_error_of_an_uncertain_call_says_what_it_is_about(home: Home) -> None:
    shop, seen = Shop(), list[OnceUncertain]()
    shop.breaks = [asyncio.CancelledError()]
    wf = Workflow("w")

    @wf.node
    async def one(ctx: Context) -> None:
        await ctx.once("k", shop.buy, "tea")

    @wf.node(depends_on="one", trigger="all_done")
    async def two(ctx: Context) -> None:
        try:
            await ctx.once("k", shop.buy, "tea")
        except OnceUncertain as error:
            seen.append(error)
            raise

    result = await home.run(wf)
    assert result.reason == "uncertain"
    (error,) = seen
    assert (error.run_id, error.path, error.paths) == (result.run_id, "two", ("two",))
    assert (error.key, error.scope) == ("k", "run")
    assert (await home.retry(wf, result.run_id)).reason == "uncertain"  # now the first one asks too
    await home.retry(wf, result.run_id)
    assert shop.bought == ["tea"]


async def test_what_another_run_left_uncertain_waits_for_a_person_here_too(home: Home) -> None:
    shop = Shop()
    shop.breaks = [asyncio.CancelledError()]
    wf = buying(shop, scope="workflow")
    left = await home.run(wf)
    assert only_failure(left).message == "the call was cut off"
    stuck = await home.run(wf, fresh=True)
    assert stuck.reason == "uncertain"
    (record,) = await of_kind(home, stuck.run_id, "node.interrupted")
    assert left.run_id in record.data["message"]
    assert (await home.retry(wf, stuck.run_id))["order"] == 1
    assert (await home.resume(wf, left.run_id))["order"] == 1
    assert shop.bought == ["tea"]


async def test_what_reconcile_says_was_not_done_is_called_again(home: Home) -> None:
    shop = Shop()
    shop.gate.clear()
    wf = Workflow("w")

    async def look(ctx: Context) -> Any:
        shop.gate.set()
        return NOT_DONE

    @wf.node(reconcile=look)
    async def order(ctx: Context) -> int:
        return int((await ctx.once("k", shop.buy, "tea")).number)

    async with home.engine(wf, grace_seconds=0) as engine:
        handle = await engine.start(wf)
        await shop.reached.wait()
    assert (await home.resume(wf, handle.run_id))["order"] == 2


async def test_a_call_under_way_is_waited_for(home: Home) -> None:
    shop = Shop()
    shop.gate.clear()
    wf = buying(shop, scope="workflow")
    async with home.engine(wf) as engine:
        runs = [await engine.start(wf) for _ in range(5)]
        await shop.reached.wait()
        shop.gate.set()
        results = [await run.result() for run in runs]
    assert ([result["order"] for result in results], shop.bought) == ([1] * 5, ["tea"])


async def test_whoever_waits_for_a_call_that_fails_makes_it(home: Home) -> None:
    wf, made = Workflow("w"), list[str]()
    waiting = asyncio.Event()

    async def call(path: str) -> str:
        made.append(path)
        if len(made) == 1:
            await waiting.wait()
            raise Boom
        return path

    @wf.node
    async def one(ctx: Context) -> str:
        return str(await ctx.once("k", call, ctx.path))

    @wf.node
    async def two(ctx: Context) -> str:
        await settle(lambda: bool(made))
        task = asyncio.ensure_future(ctx.once("k", call, ctx.path))
        await asyncio.sleep(0.02)
        waiting.set()
        return str(await task)

    result = await home.run(wf)
    assert (list(result.failures), result["two"], made) == (["one"], "two", ["one", "two"])


async def test_a_run_that_is_stopped_waits_for_nobodys_call(home: Home) -> None:
    shop = Shop()
    shop.gate.clear()
    wf = buying(shop, scope="workflow")
    async with home.engine(wf) as engine:
        first = await engine.start(wf)
        await shop.reached.wait()
        second = await engine.start(wf)
        await asyncio.sleep(0.02)
        await asyncio.wait_for(second.cancel(), 5)
        shop.gate.set()
        assert (await first.result())["order"] == 1


async def test_a_call_under_way_in_another_process_is_an_error_that_passes(home: Home) -> None:
    shop = Shop()
    shop.gate.clear()
    wf = buying(shop, scope="workflow")
    async with home.engine(wf) as engine:
        first = await engine.start(wf)
        await shop.reached.wait()
        busy = await home.run(wf)
        failure = only_failure(busy)
        assert failure.type == "dagresume.errors.OnceInFlight"
        assert first.run_id in failure.message
        shop.gate.set()
        await first.result()
    assert (await home.resume(wf, busy.run_id))["order"] == 1
    assert shop.bought == ["tea"]


async def test_an_attempt_that_calls_again_while_it_calls_is_told_so(home: Home) -> None:
    wf = Workflow("w")

    @wf.node
    async def node(ctx: Context) -> str:
        async def call() -> None:
            await ctx.once("k", call)

        with pytest.raises(OnceInFlight, match="this very attempt"):
            await ctx.once("k", call)
        return str(await ctx.once("k", lambda: "made"))

    assert (await home.run(wf))["node"] == "made"


async def test_a_result_that_cannot_be_stored_leaves_the_call_uncertain(home: Home) -> None:
    wf, made = Workflow("w", retry=SOON), list[int]()

    def call() -> Any:
        made.append(1)
        return [object()]

    @wf.node
    async def node(ctx: Context) -> None:
        await ctx.once("k", call)

    result = await home.run(wf)
    failure = only_failure(result)
    assert isinstance(failure.exception, OutputNotSerializable)
    assert "once('k')[0] is object" in failure.message
    with pytest.raises(UncertainNode):
        await home.resume(wf, result.run_id)
    assert made == [1]


@pytest.mark.parametrize(
    ("ask", "error", "text"),
    [
        (lambda ctx: ctx.once("", print), ValueError, "not empty"),
        (lambda ctx: ctx.once(7, print), ValueError, "a string"),
        (lambda ctx: ctx.once("k", print, scope="engine"), ValueError, "'run' or 'workflow'"),
        (lambda ctx: ctx.once("k", 7), TypeError, r"once\(key, fn, \*args\)"),
        (lambda ctx: ctx.once("\ud800", print), UnicodeEncodeError, "surrogates"),
        (lambda ctx: ctx.commit_with(7), TypeError, "one SQL statement"),
        (lambda ctx: ctx.progress(float("nan")), ValueError, "finite"),
        (lambda ctx: ctx.progress(1, float("inf")), ValueError, "finite"),
    ],
)
async def test_what_makes_no_sense_is_refused_at_once(
    sqlite_home: Home, ask: Callable[[Context], Any], error: type[Exception], text: str
) -> None:
    wf = Workflow("w")

    @wf.node
    async def node(ctx: Context) -> bool:
        with pytest.raises(error, match=text):
            ask(ctx)
        return True

    assert (await sqlite_home.run(wf))["node"] is True


class Rival(StoreWrapper):
    """Another process is always quicker with its mark, once; it fails, so that the call is free again."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.overtook = False

    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        if not self.overtook and any(unit.once for unit in units):
            (unit,) = units
            self.overtook = True
            theirs = [row._replace(path="elsewhere", at=row.at - 1) for row in unit.once]
            await self.inner.commit([Unit(unit.guard, once=theirs)])
            outcomes = await self.inner.commit(units)
            gone = [row._replace(state="free", saw=row.at) for row in theirs]
            await self.inner.commit([Unit(unit.guard, once=gone)])
            return outcomes
        return await self.inner.commit(units)


async def test_whoever_was_overtaken_looks_again(home: Home) -> None:
    """Nothing of the refused unit is lost either: that the attempt has begun was in it."""
    shop = Shop()
    wf = buying(shop, idempotent=True)
    store = Rival(home.store())
    async with Engine(workflows=[wf], store=store) as engine:
        shop.gate.clear()
        handle = await engine.start(wf)
        await shop.reached.wait()
        kinds = [event.kind async for event in engine.events(handle.run_id)]
        shop.gate.set()
        assert (await handle.result())["order"] == 1
    assert store.overtook
    assert kinds == ["run.created", "node.started"]
    assert shop.bought == ["tea"]


class SlowMarks(StoreWrapper):
    """Commits what is known of calls made once only when its gate is open."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.reached, self.gate = asyncio.Event(), asyncio.Event()

    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        if any(unit.once for unit in units):
            self.reached.set()
            await self.gate.wait()
        return await self.inner.commit(units)


@pytest.mark.parametrize("how", ["cancel", "timeout"])
async def test_a_body_cancelled_before_the_call_leaves_no_mark(home: Home, how: str) -> None:
    shop = Shop()
    wf = Workflow("shop")

    @wf.node(timeout=0.05 if how == "timeout" else None)
    async def order(ctx: Context) -> int:
        return int((await ctx.once("order", shop.buy, "tea")).number)

    store = SlowMarks(home.store())
    async with Engine(workflows=[wf], store=store, grace_seconds=0.5) as engine:
        handle = await engine.start(wf)
        await store.reached.wait()
        if how == "cancel":
            task = asyncio.create_task(handle.cancel())
            await asyncio.sleep(0.02)
        else:
            await asyncio.sleep(0.1)
        store.gate.set()
        if how == "cancel":
            await task
        result = await handle.result(raise_on_failure=False)
        assert await engine._store.once(f"run:{result.run_id}", "order") is None
    assert result.status == ("cancelled" if how == "cancel" else "failed")
    assert shop.bought == []


async def test_a_call_that_returned_as_its_body_was_cancelled_is_kept(home: Home) -> None:
    """C5: what was paid for is there the next time."""
    shop = Shop()
    wf = buying(shop)
    store = SlowMarks(home.store())
    store.gate.set()
    async with Engine(workflows=[wf], store=store, grace_seconds=0.5) as engine:
        handle = await engine.start(wf)
        shop.gate.clear()
        await shop.reached.wait()
        store.gate.clear()
        store.reached.clear()
        shop.gate.set()
        await store.reached.wait()
        task = asyncio.create_task(handle.cancel())
        await asyncio.sleep(0.02)
        store.gate.set()
        await task
        await handle.result(raise_on_failure=False)
    assert (await home.retry(wf, handle.run_id, "order"))["order"] == 1
    assert shop.bought == ["tea"]


# -- state ----------------------------------------------------------------------------------------------


async def test_the_next_attempt_finds_what_was_saved_last(home: Home) -> None:
    wf, seen = Workflow("w", retry=Retry(2, delay=0.001)), list[Any]()

    @wf.node
    async def node(ctx: Context) -> int:
        seen.append(ctx.state)
        done = {"pages": list(ctx.state["pages"])} if ctx.state else {"pages": []}
        for _ in range(2):
            done["pages"].append(len(done["pages"]))
            await ctx.save_state(done)
        if len(done["pages"]) < 8:
            raise Boom
        return len(done["pages"])

    result = await home.run(wf)
    assert seen == [None, {"pages": [0, 1]}]
    again = await home.resume(wf, result.run_id)
    assert again["node"] == 8
    assert seen[2:] == [{"pages": [0, 1, 2, 3]}, {"pages": [0, 1, 2, 3, 4, 5]}]
    states = await of_kind(home, result.run_id, "node.state")
    assert [event.attempt for event in states] == [1, 1, 2, 2, 3, 3, 4, 4]
    await home.retry(wf, result.run_id, "node")
    assert seen[4] is None  # it had completed: this is another operation


async def test_a_big_state_goes_into_a_file(sqlite_home: Home) -> None:
    wf = Workflow("w", retry=SOON)

    @wf.node
    async def node(ctx: Context) -> int:
        if ctx.state is None:
            await ctx.save_state("x" * 200_000)
            raise Boom
        return len(ctx.state)

    result = await sqlite_home.run(wf)
    assert result["node"] == 200_000
    (event,) = await of_kind(sqlite_home, result.run_id, "node.state")
    assert (event.data["size"], len(event.data["blob"])) == (200_002, 64)
    assert sqlite_home.path is not None
    assert asked(sqlite_home.path, "SELECT max(length(output)) FROM dagresume_events") == [(6,)]


async def test_state_belongs_to_what_the_path_received(home: Home) -> None:
    wf, seen = Workflow("w", idempotent=True), list[Any]()
    values = [1]

    @wf.node
    async def source() -> list[int]:
        return list(values)

    @wf.node(for_each={"n": "source"})
    async def each(n: int, ctx: Context) -> int:
        seen.append(ctx.state)
        await ctx.save_state(f"of {n}")
        if n < 3:
            raise Boom
        return n

    result = await home.run(wf)
    values[:] = [2]
    await home.retry(wf, result.run_id, "source")
    values[:] = [2]
    await home.resume(wf, result.run_id)
    assert seen == [None, None, "of 2"]


async def test_a_state_is_durable_when_it_is_saved(sqlite_home: Home) -> None:
    wf = Workflow("w", idempotent=True)
    assert sqlite_home.path is not None
    db = sqlite_home.path

    @wf.node
    async def node(ctx: Context) -> list[Any]:
        await ctx.save_state([1])
        return asked(db, "SELECT kind, status, output FROM dagresume_events WHERE path = 'node' ORDER BY seq")

    found = (await sqlite_home.run(wf))["node"]
    assert found == [("node.started", "running", None), ("node.state", None, "[1]")]
    assert asked(db, "SELECT node_status, node_output IS NULL FROM workflow_checkpoints") == [("success", 0)]


async def test_a_state_that_cannot_be_stored_is_refused_by_name(home: Home) -> None:
    wf = Workflow("w")

    @wf.node
    async def node(ctx: Context) -> None:
        await ctx.save_state({"x": [object()]})

    failure = only_failure(await home.run(wf))
    assert "ctx.state.x[0] is object" in failure.message


# -- SQL beside a checkpoint ----------------------------------------------------------------------------

LEDGER = (
    "CREATE TABLE IF NOT EXISTS ledger(path TEXT PRIMARY KEY, amount INTEGER NOT NULL CHECK (amount > 0))"
)


def booking(amounts: Sequence[int] = (1, 2, 3), *more: str, retry: Retry | None = None) -> Workflow:
    """A map whose items each book an amount, between a node that makes the table and one that ends it all."""
    wf = Workflow("bank", retry=retry)

    @wf.node
    async def table(ctx: Context) -> list[int]:
        ctx.commit_with(LEDGER)
        return list(amounts)

    @wf.node(for_each={"amount": "table"})
    async def book(amount: int, ctx: Context) -> int:
        ctx.commit_with("INSERT INTO ledger VALUES (?, ?)", [ctx.path, amount])
        for sql in more if amount == 2 else ():
            ctx.commit_with(sql)
        return amount

    @wf.node(args={"amounts": "book"})
    async def end(amounts: list[int], ctx: Context) -> int:
        ctx.commit_with("INSERT INTO ledger VALUES (:path, :amount)", {"path": "end", "amount": sum(amounts)})
        return sum(amounts)

    return wf


async def test_statements_are_in_the_transaction_of_the_checkpoint(sqlite_home: Home, db: Path) -> None:
    result = await sqlite_home.run(booking())
    assert result["end"] == 6
    assert asked(db, "SELECT * FROM ledger ORDER BY path") == [
        ("book[0]", 1), ("book[1]", 2), ("book[2]", 3), ("end", 6)
    ]  # fmt: skip
    assert result.stats.checkpoint_latency.count == 5
    assert result.stats.commits <= 9  # each its own, beside that of what it unlocks


FAILING = [
    ("INSERT INTO ledger VALUES ('book[1]', 2)", "IntegrityError", "UNIQUE constraint failed"),
    ("INSERT INTO ledger VALUES ('x', -1)", "IntegrityError", "CHECK constraint failed"),
    ("INSERT OR ROLLBACK INTO ledger VALUES ('x', -1)", "IntegrityError", "CHECK constraint failed"),
    ("INSRT INTO ledger", "OperationalError", "syntax error"),
    ("INSERT INTO nowhere VALUES (1)", "OperationalError", "no such table"),
    ("SELECT 1; SELECT 2", "ProgrammingError", "one statement at a time"),
    ("INSERT INTO ledger VALUES (?, 1)", "ProgrammingError", "bindings"),
    ("COMMIT", "DatabaseError", "no transaction control"),
    ("ROLLBACK", "DatabaseError", "no transaction control"),
    ("SAVEPOINT s", "DatabaseError", "no transaction control"),
    ("ATTACH ':memory:' AS other", "DatabaseError", "ATTACH"),
    ("PRAGMA synchronous = OFF", "DatabaseError", "PRAGMA"),
    ("DELETE FROM dagresume_events", "DatabaseError", "the engine's own tables"),
]


@pytest.mark.parametrize(("sql", "kind", "text"), FAILING)
async def test_a_statement_that_fails_fails_its_attempt_alone(
    sqlite_home: Home, db: Path, sql: str, kind: str, text: str
) -> None:
    result = await sqlite_home.run(booking((1, 2, 3), sql, retry=Retry(2, delay=0.001)))
    failure = only_failure(result)
    assert (failure.path, failure.attempt, failure.reason) == ("book[1]", 2, "error")
    assert failure.type == f"sqlite3.{kind}"
    assert text in failure.message
    assert f"(in {sql!r})" in failure.message
    assert asked(db, "SELECT path FROM ledger ORDER BY path") == [("book[0]",), ("book[2]",)]
    states = await sqlite_home.statuses(result.run_id)
    assert states["book[0]"] == states["book[2]"] == "completed"
    assert (states["book[1]"], states["end"]) == ("failed", "upstream_failed")
    mended = booking((1, 2, 3), retry=Retry(2, delay=0.001))
    done = await sqlite_home.resume(mended, result.run_id)
    assert (done["end"], list(done.executed)) == (6, ["book[1]", "end"])
    assert asked(db, "SELECT count(*), sum(amount) FROM ledger") == [(4, 12)]


async def test_an_attempt_that_raises_takes_its_statements_with_it(sqlite_home: Home, db: Path) -> None:
    wf = Workflow("w", retry=SOON)

    @wf.node
    def node(ctx: Context) -> int:
        values = [ctx.attempt]
        ctx.commit_with("CREATE TABLE IF NOT EXISTS t(x)")
        ctx.commit_with("INSERT INTO t VALUES (?)", values)
        values.append(9)
        if ctx.attempt < 3:
            raise Boom
        return ctx.attempt

    assert (await sqlite_home.run(wf))["node"] == 3
    assert asked(db, "SELECT x FROM t") == [(3,)]


async def test_a_completion_with_statements_outlives_a_cancel(sqlite_home: Home, db: Path) -> None:
    """C5."""
    wf = Workflow("w")
    async with sqlite_home.engine(wf) as engine:

        @wf.node
        async def node(ctx: Context) -> int:
            ctx.commit_with("CREATE TABLE t(x)")
            await engine.cancel(ctx.run_id)
            return 1

        @wf.node
        async def below(node: int) -> None:
            raise AssertionError

        result = await engine.run(wf, raise_on_failure=False)
    assert result.status == "cancelled"
    assert await sqlite_home.statuses(result.run_id) == {"node": "completed", "below": "pending"}
    assert asked(db, "SELECT count(*) FROM sqlite_master WHERE name = 't'") == [(1,)]


async def test_statements_have_no_part_where_there_is_no_checkpoint_in_a_file(sqlite_home: Home) -> None:
    def flow(**options: Any) -> Workflow:
        wf = Workflow("w", idempotent=True)

        @wf.node(**options)  # type: ignore[untyped-decorator]  # whatever they are
        async def node(ctx: Context) -> None:
            ctx.commit_with("SELECT 1")

        return wf

    pure = only_failure(await sqlite_home.run(flow(checkpoint=False)))
    assert "checkpoint=False" in pure.message
    memory = only_failure(await Home(None).run(flow()))
    assert "':memory:'" in memory.message
    wf = Workflow("w")
    wf.node(id="node", executor="process")(bodies.commits_with)
    process = only_failure(await sqlite_home.run(wf))
    assert "executor='process'" in process.message


# -- files ----------------------------------------------------------------------------------------------


async def test_files_of_a_path_are_cleared_before_it_runs_again(sqlite_home: Home) -> None:
    wf, seen = Workflow("w", retry=Retry(2, delay=0.001)), list[Any]()
    broken = [True]

    @wf.node
    async def node(ctx: Context) -> str:
        seen.append(sorted(file.name for file in ctx.artifacts.iterdir()))
        (ctx.artifacts / f"part {ctx.attempt}").write_text("x")
        (ctx.artifacts / "folder").mkdir()
        if broken:
            raise Boom
        return str(ctx.artifacts)

    result = await sqlite_home.run(wf)
    broken.clear()
    again = await sqlite_home.resume(wf, result.run_id)
    assert seen == [[], [], []]
    folder = Path(again["node"])
    assert sorted(os.listdir(folder)) == ["folder", "part 3"]  # noqa: PTH208
    assert sqlite_home.path is not None
    assert folder.parent.parent == Path(f"{sqlite_home.path}.artifacts")
    await sqlite_home.retry(wf, result.run_id, "node")
    assert seen[3] == []


async def test_an_attempt_that_looks_at_no_files_clears_them_too(sqlite_home: Home) -> None:
    wf = Workflow("w", retry=SOON)

    @wf.node
    async def node(ctx: Context) -> str:
        folder = artifacts_of(str(sqlite_home.path) + ".artifacts", ctx.run_id, ctx.path)
        if ctx.attempt == 1:
            (ctx.artifacts / "old").write_text("x")
            raise Boom
        return str(folder.exists())

    assert (await sqlite_home.run(wf))["node"] == "False"


async def test_files_need_a_database_file() -> None:
    wf = Workflow("w")

    @wf.node
    async def node(ctx: Context) -> str:
        return str(ctx.artifacts)

    failure = only_failure(await Home(None).run(wf))
    assert isinstance(failure.exception, StoreError)
    assert "':memory:'" in failure.message


# -- threads and processes ------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["thread", "process"])
async def test_bodies_without_a_loop_get_the_values_themselves(sqlite_home: Home, executor: Any) -> None:
    wf = Workflow("w", retry=SOON)
    wf.node(id="node", executor=executor)(bodies.keeps)
    wf.node(id="again", executor=executor, depends_on="node")(bodies.keeps_with_a_loop)
    result = await sqlite_home.run(wf)
    assert result["node"] == ["state of 1", "once in 1", ["a file"], []]
    assert result["again"] == [{"n": 1}, "once in 1"]
    events = await of_kind(sqlite_home, result.run_id, "node.progress")
    assert {"done": 1, "total": 2} in [event.data for event in events]


@pytest.mark.parametrize("executor", ["thread", "process"])
async def test_errors_reach_bodies_without_a_loop(sqlite_home: Home, executor: Any) -> None:
    wf = Workflow("w", retry=SOON)
    wf.node(id="node", executor=executor)(bodies.cuts_off)
    result = await sqlite_home.run(wf)
    assert result.reason == "uncertain"
    (record,) = await of_kind(sqlite_home, result.run_id, "node.interrupted")
    assert (record.reason, record.data["once"]) == ("once_uncertain", [f"run:{result.run_id}", "k"])


async def test_a_thread_that_was_given_up_keeps_nothing_more(home: Home) -> None:
    wf, told, go = Workflow("w", idempotent=True), list[str](), threading.Event()
    ended = threading.Event()

    @wf.node(timeout=0.05)
    def node(ctx: Context) -> None:
        go.wait(10)
        asks: list[Callable[[], Any]] = [lambda: ctx.save_state(1), lambda: ctx.once("k", print)]
        for ask in asks:
            try:
                ask()
            except Exception as error:
                told.append(str(error))
        ended.set()

    async with home.engine(wf) as engine:
        result = await engine.run(wf, raise_on_failure=False)
        go.set()
        await asyncio.to_thread(ended.wait, 10)
    assert only_failure(result).reason == "timeout"
    assert told == ["node: attempt 1 is over, nothing more of it is kept"] * 2


# -- progress and usage ---------------------------------------------------------------------------------


async def test_progress_can_be_followed_and_does_not_flood(home: Home) -> None:
    wf, go = Workflow("w"), asyncio.Event()

    @wf.node
    async def node(ctx: Context) -> int:
        ctx.progress(0)
        await asyncio.sleep(0.01)
        for n in range(1000):
            ctx.progress(n, 1000)
        await go.wait()
        return 1

    seen: list[Any] = []
    async with home.engine(wf) as engine:
        handle = await engine.start(wf)

        async def follow() -> None:
            async for event in engine.events(handle.run_id, follow=True):
                if event.kind == "node.progress":
                    seen.append(event.data)
                if len(seen) == 2:
                    return

        await asyncio.wait_for(follow(), 10)
        go.set()
        result = await handle.result()
    assert seen == [{"done": 0, "total": None}, {"done": 999, "total": 1000}]
    first, last = await of_kind(home, result.run_id, "node.progress")
    assert (last.at - first.at).total_seconds() > 0.45
    assert (await home.statuses(result.run_id)) == {"node": "completed"}


async def test_what_a_failed_attempt_used_up_is_recorded(home: Home) -> None:
    wf = Workflow("w", retry=Retry(2, delay=0.001))

    @wf.node
    async def node(ctx: Context) -> None:
        ctx.usage(tokens_in=10, cost=0.5)
        ctx.usage(tokens_out=1)
        raise Boom

    with pytest.raises(RunFailed) as caught:
        async with home.engine() as engine:
            await engine.run(wf)
    failed = await of_kind(home, caught.value.run_id, "node.failed")
    assert [(event.reason, event.data["usage"]) for event in failed] == [
        ("retry", {"tokens_in": 10, "tokens_out": 1, "cost": 0.5}),
        ("error", {"tokens_in": 10, "tokens_out": 1, "cost": 0.5}),
    ]


# -- when the store fails -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["node.state", "node.progress"])
async def test_a_run_whose_notes_cannot_be_written_does_not_go_on(home: Home, kind: str) -> None:
    """C8."""
    wf, went_on = Workflow("w", retry=SOON), list[bool]()

    @wf.node
    async def node(ctx: Context) -> None:
        if kind == "node.progress":
            ctx.progress(1)
            await asyncio.sleep(10)
        await ctx.save_state(1)
        went_on.append(True)

    def wrap(store: Any) -> Any:
        return FaultyStore(
            store, lambda _, record: record.kind == kind, lambda: StoreError("the disk is gone")
        )

    async with home.engine(wf, wrap=wrap) as engine:
        with pytest.raises(StoreError, match="the disk is gone"):
            await engine.run(wf)
    assert went_on == []


class NoMarks(StoreWrapper):
    """Does not write what is known of calls made once."""

    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        if any(unit.once for unit in units):
            return [StoreFailed(StoreError("the disk is gone")) for _ in units]
        return await self.inner.commit(units)


async def test_a_call_is_not_made_if_its_mark_cannot_be_written(home: Home) -> None:
    shop = Shop()
    wf = buying(shop)
    async with Engine(workflows=[wf], store=NoMarks(home.store()), grace_seconds=0.5) as engine:
        with pytest.raises(StoreError, match="the disk is gone"):
            await engine.run(wf)
        assert engine._services.flights == {}
    assert shop.bought == []


async def test_a_completion_with_statements_that_cannot_be_written_fails_the_run(
    sqlite_home: Home, db: Path
) -> None:
    """C8: this is no failure of the statements."""
    wf = booking()

    def spoils(_: Unit, record: Any) -> bool:
        return bool(record.kind == "node.completed" and record.path == "book[1]")

    def wrap(store: Any) -> Any:
        return FaultyStore(store, spoils, lambda: StoreError("the disk is gone"))

    async with sqlite_home.engine(wf, wrap=wrap) as engine:
        with pytest.raises(RunFailed) as caught:
            await engine.run(wf)
        assert engine._pool.free == 64
    assert {path: f.reason for path, f in caught.value.failures.items()} == {"book[1]": "not_stored"}
    assert "book[1]" not in dict(asked(db, "SELECT * FROM ledger"))
    with pytest.raises(UncertainNode):
        await sqlite_home.resume(wf, caught.value.run_id)
    assert (await sqlite_home.retry(wf, caught.value.run_id))["end"] == 6


@pytest.mark.parametrize("options", [{"concurrency": 1}, {"debug": True}, {"spill_bytes": 0}])
async def test_statements_go_with_every_way_to_run(sqlite_home: Home, db: Path, options: Any) -> None:
    wf = booking(range(1, 30))
    async with sqlite_home.engine(wf, **options) as engine:
        result = await engine.run(wf)
        assert result["end"] == sum(range(1, 30))
        assert engine._pool.free == options.get("concurrency", 64)
    assert asked(db, "SELECT count(*) FROM ledger") == [(30,)]


async def test_when_all_has_ended_nothing_is_held(home: Home) -> None:
    shop = Shop()
    shop.breaks = [Boom("sold out")]
    wf = buying(shop, retry=SOON)
    async with home.engine(wf) as engine:
        await engine.run(wf)
        assert engine._services.flights == {}
