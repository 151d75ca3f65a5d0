"""R19: `Faults` puts in what a test of a workflow wants to go wrong, and nothing else."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from dagresume import (
    Context,
    Engine,
    NodeTimeout,
    Retry,
    RunFailed,
    RunStatus,
    StoreError,
    StoreFull,
    Workflow,
)
from dagresume.store import MemoryStore
from dagresume.testing import FakeClock, Faults, Zygote, autopsy

PLACES = pytest.mark.parametrize("place", [":memory:", "runs.db"])


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def shop(begun: list[str], **options: Any) -> Workflow:
    """Two orders are paid one by one, then shipped."""
    wf = Workflow("shop", idempotent=True)

    @wf.node
    async def orders() -> list[str]:
        return ["tea", "salt"]

    @wf.node(for_each={"order": "orders"}, **options)
    async def pay(order: str, ctx: Context) -> str:
        begun.append(f"{ctx.path} {ctx.attempt}")
        return order

    @wf.node(args={"paid": "pay"})
    def ship(paid: list[str]) -> int:
        begun.append("ship")
        return len(paid)

    return wf


@PLACES
async def test_one_attempt_of_one_path_fails(place: str) -> None:
    begun: list[str] = []
    wf = shop(begun, retry=Retry(3, delay=0))
    faults = Faults().fail("pay[1]", attempt=1, error=ConnectionError("no answer"))
    async with faults.engine(place, workflows=[wf]) as engine:
        result = await engine.run(wf)
    assert result["ship"] == 2
    assert sorted(begun) == ["pay[0] 1", "pay[1] 2", "ship"], "the body of that attempt does not run"
    assert faults.happened == [("failed", "pay[1]", 1)]


async def test_attempts_are_counted_over_all_processes() -> None:
    """A function that asks for no context is counted as well."""
    begun: list[str] = []
    wf = shop(begun)
    first, second = Faults().fail("ship", attempt=1), Faults().fail("ship", attempt=2, error=KeyError)
    async with first.engine("runs.db", workflows=[wf]) as engine:
        result = await engine.run(wf, raise_on_failure=False)
    assert result.failures["ship"].type == "RuntimeError"
    async with second.engine("runs.db", workflows=[wf]) as engine:
        failed = await engine.resume(result.run_id, raise_on_failure=False)
    assert (failed.failures["ship"].type, failed.failures["ship"].attempt) == ("KeyError", 2)
    async with second.engine("runs.db", workflows=[wf]) as engine:
        assert (await engine.resume(result.run_id))["ship"] == 2
    assert second.happened == [("failed", "ship", 2)]
    assert begun.count("ship") == 1


@PLACES
async def test_an_attempt_fails_when_its_effect_has_happened(place: str) -> None:
    begun: list[str] = []
    wf = shop(begun, idempotent=False)
    faults = Faults().fail("pay[*]", attempt=None, error=TimeoutError("no answer"), after=True)
    async with faults.engine(place, workflows=[wf]) as engine:
        with pytest.raises(RunFailed, match="no answer"):
            await engine.run(wf)
    assert sorted(begun) == ["pay[0] 1", "pay[1] 1"]


@PLACES
async def test_an_undo_fails(place: str) -> None:
    wf, undone = Workflow("w"), list[int]()

    async def undo(output: int, ctx: Context) -> None:
        undone.append(ctx.attempt)

    @wf.node(compensate=undo)
    async def book() -> int:
        return 1

    faults = Faults().fail("book", attempt=1, undo=True)
    async with faults.engine(place, workflows=[wf]) as engine:
        run_id = (await engine.run(wf)).run_id
        assert (await engine.rollback(run_id)).status is RunStatus.ROLLING_BACK
        assert (await engine.rollback(run_id)).status is RunStatus.ROLLED_BACK
    assert undone == [2]


async def test_the_same_seed_gives_the_same_failures_whatever_runs_beside(tmp_path: Path) -> None:
    wf = Workflow("many", idempotent=True)

    @wf.node(for_each={"n": "numbers"}, tolerate=1.0, retry=Retry(2, delay=0))
    async def item(n: int) -> int:
        await asyncio.sleep(0.001 * (n % 3))
        return n

    async def failed(seed: int, probability: float, concurrency: int) -> set[tuple[str, int]]:
        faults = Faults(seed).fail_randomly(probability, "item[*]", error=ConnectionError)
        async with faults.engine(":memory:", workflows=[wf], concurrency=concurrency) as engine:
            await engine.run(wf, {"numbers": list(range(200))})
        assert len(set(faults.happened)) == len(faults.happened)
        return {(fault.where, fault.attempt) for fault in faults.happened}

    alone, together = await failed(7, 0.2, 1), await failed(7, 0.2, 50)
    assert alone == together
    first = {path for path, attempt in alone if attempt == 1}
    assert 20 <= len(first) <= 60, "one in five of 200"
    assert {path for path, attempt in alone if attempt == 2} < first
    assert await failed(8, 0.2, 50) != alone
    assert await failed(7, 0.0, 50) == set()
    assert len(await failed(7, 1.0, 50)) == 400


async def test_a_path_is_late_on_the_engines_clock() -> None:
    begun: list[str] = []
    wf, clock = shop(begun), FakeClock(autojump=0.02)
    faults = Faults().delay("pay[0]", 3600).delay("pay[*]", 60, attempt=1)
    async with faults.engine(clock=clock, store=MemoryStore(clock=clock), workflows=[wf]) as engine:
        assert (await engine.run(wf))["ship"] == 2
    assert begun == ["pay[1] 1", "pay[0] 1", "ship"]
    assert 3660 <= clock.monotonic() < 3670
    assert set(faults.happened) == {("delayed", "pay[0]", 1), ("delayed", "pay[1]", 1)}


async def test_a_delay_counts_against_the_timeout() -> None:
    begun: list[str] = []
    wf = shop(begun, timeout=0.05)
    async with Faults().delay("pay[0]", 60).engine(":memory:", workflows=[wf]) as engine:
        result = await engine.run(wf, raise_on_failure=False)
    assert isinstance(result.failures["pay[0]"].exception, NodeTimeout)
    assert begun == ["pay[1] 1"]


@PLACES
@pytest.mark.parametrize("n", [1, 2, 3, 4])
async def test_the_nth_commit_is_refused(place: str, n: int) -> None:
    """C8: the run fails with the store's own error; when the cause is gone it goes on."""
    begun: list[str] = []
    wf = shop(begun)
    faults = Faults().refuse(commit=n)
    async with faults.engine(place, workflows=[wf]) as engine:
        with pytest.raises((StoreFull, RunFailed)) as caught:
            await engine.run(wf, key="k")
        assert any(isinstance(error, StoreFull) for error in (caught.value, caught.value.__cause__))
        assert (await engine.run(wf, key="k"))["ship"] == 2
    assert {fault.where for fault in faults.happened} == {f"commit {n}"}


@PLACES
async def test_a_record_is_refused(place: str) -> None:
    begun: list[str] = []
    wf = shop(begun)
    faults = Faults().refuse(
        record=lambda record: (record.kind, record.path) == ("node.completed", "ship"),
        error=StoreError("the disk is on fire"),
        times=2,
    )
    async with faults.engine(place, workflows=[wf]) as engine:
        for _ in range(2):
            with pytest.raises((StoreError, RunFailed)) as caught:
                await engine.run(wf, key="k")
            assert "on fire" in f"{caught.value} {caught.value.__cause__}"
        result = await engine.run(wf, key="k")
    assert result["ship"] == 2
    assert begun.count("ship") == 3
    assert begun.count("pay[0] 1") == 1
    assert [fault.what for fault in faults.happened] == ["refused", "refused"]


async def killed(when: str) -> None:
    """Be killed at the commit that holds the result of `orders`."""
    wf = shop([])
    async with Faults().kill(commit=2, when=when).engine("runs.db", workflows=[wf]) as engine:
        await engine.run(wf)


def test_the_process_is_killed_at_its_nth_commit(tmp_path: Path) -> None:
    with Zygote("tests.engine.test_chosen_faults") as zygote:
        for when, completed in (("before", set()), ("after", {"orders"})):
            folder = tmp_path / when
            folder.mkdir()
            call = zygote.call("tests.engine.test_chosen_faults:killed", folder, when=when)
            assert call.wait().killed
            assert autopsy(folder / "runs.db").completed == completed


async def test_the_store_of_an_engine_is_wrapped_and_nothing_else() -> None:
    """What goes wrong is in the journal like any failure; afterwards it is a database like any other."""
    wf = shop([])
    async with Faults().fail("pay[0]", attempt=1).engine("runs.db", workflows=[wf]) as engine:
        result = await engine.run(wf, raise_on_failure=False)
    with sqlite3.connect("runs.db") as conn:
        sql = "SELECT path FROM dagresume_events WHERE kind = 'node.failed' AND path LIKE 'pay[%'"
        assert conn.execute(sql).fetchall() == [("pay[0]",)]
    conn.close()
    async with Engine("runs.db", workflows=[wf]) as engine:
        assert (await engine.resume(result.run_id))["ship"] == 2


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: Faults().fail("a", attempt=0), "attempt=0: a whole number from 1 upwards"),
        (lambda: Faults().fail_randomly(1.5), "a probability from 0 to 1"),
        (lambda: Faults().delay("a", -1), "seconds, 0 or more"),
        (lambda: Faults().delay("a", float("nan")), "seconds, 0 or more"),
        (lambda: Faults().delay("a", 1, attempt=0), "attempt=0"),
        (lambda: Faults().refuse(), "either commit=n or record=predicate"),
        (lambda: Faults().refuse(1, record=bool), "either commit=n or record=predicate"),
        (lambda: Faults().refuse(commit=0), "commit=0"),
        (lambda: Faults().kill(1, when="during"), "'before' or 'after'"),
        (lambda: Faults().kill(True), "commit=True"),
    ],
)
def test_what_cannot_be_is_said_at_once(wrong: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        wrong()
