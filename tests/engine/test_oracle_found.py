"""What random workflows have found (`tests/property/test_oracle.py`), each as small as it gets."""

from __future__ import annotations

import asyncio
import sqlite3
from typing import Any

import pytest

from dagresume import NoOutput, RunStatus, Workflow
from dagresume.testing import FakeClock
from tests.engine.kit import Boom, Calls, Home


def edited(calls: Calls, version: str = "1", numbers: tuple[int, ...] = (0, 1, 2)) -> Workflow:
    """A list, a map over it and a node below, all idempotent; the list is another one in another version."""
    wf = Workflow("edited", idempotent=True)

    @wf.node(version=version)
    async def listed() -> list[int]:
        calls.began("listed")
        return list(numbers)

    @wf.node(for_each={"n": "listed"})
    async def each(n: int) -> int:
        calls.began(f"each {n}")
        return n

    @wf.node
    async def below(each: list[int]) -> int:
        calls.began("below")
        return sum(each)

    return wf


# -- what the plan says of items ------------------------------------------------------------------------


async def test_items_of_a_map_that_waits_are_not_planned_to_run(home: Home, calls: Calls) -> None:
    """R33: every `run` runs."""

    def make(version: str) -> Workflow:
        wf = Workflow("waits")

        @wf.node(version=version)
        async def above() -> str:
            return version

        @wf.node(for_each={"x": "xs"}, idempotent=True)
        async def each(x: int, above: str) -> int:
            calls.began(f"each {x}")
            return x

        return wf

    calls.broken = {"each 0"}
    run_id = (await home.run(make("1"), {"xs": [0]})).run_id
    calls.mend()
    plan = await home.plan(make("2"), run_id, items=True)
    assert (plan["above"].action, plan["each"].action) == ("hold", "wait")
    result = await home.resume(make("2"), run_id)
    assert result.executed == []
    assert plan["each[0]"].action == "wait"


async def test_items_that_may_go_are_not_planned_to_run(home: Home, calls: Calls) -> None:
    """R33: where the list itself is made anew, nobody knows which items there will be."""
    calls.broken = {"each 2"}
    run_id = (await home.run(edited(calls))).run_id
    calls.mend()
    shorter = edited(calls, "2", (0, 1))
    plan = await home.plan(shorter, run_id, items=True)
    assert (plan["listed"].action, plan["each"].action) == ("run", "check")
    result = await home.resume(shorter, run_id)
    assert list(result.executed) == ["listed", "below"]
    assert plan["each[2]"].action == "check"


async def test_items_that_may_be_passed_are_not_planned_to_run(home: Home, calls: Calls) -> None:
    """R33: a chained item whose parent gives None is handed on uncalled."""
    wf = Workflow("passes", idempotent=True)

    @wf.node(for_each={"x": "xs"})
    async def first(x: int) -> int | None:
        calls.began(f"first {x}")
        return x or None

    @wf.node(for_each={"y": "first"})
    async def second(y: int) -> int:
        calls.began(f"second {y}")
        return y

    calls.broken = {"first 0"}
    run_id = (await home.run(wf, {"xs": [0, 1]})).run_id
    calls.mend()
    plan = await home.plan(wf, run_id, items=True)
    assert plan["second"].action == "check"
    result = await home.resume(wf, run_id)
    assert list(result.executed) == ["first[0]"]
    assert "second[0]" not in plan or plan["second[0]"].action == "check"


async def test_items_of_a_blocked_map_are_not_planned_to_run(home: Home, calls: Calls) -> None:
    """R33: what is above it failed for good and was handled."""

    def make(version: str) -> Workflow:
        wf = Workflow("blocked", idempotent=True)

        @wf.node(version=version)
        async def above() -> str:
            calls.began(f"above {version}")
            return version

        @wf.node(depends_on=["above"], trigger="any_failed")
        async def handler() -> None: ...

        @wf.node(for_each={"x": "xs"})
        async def each(x: int, above: str) -> int:
            calls.began(f"each {x}")
            return x

        @wf.node
        async def other() -> None:
            calls.began("other")

        return wf

    calls.broken = {"each 0", "other"}
    run_id = (await home.run(make("1"), {"xs": [0]})).run_id
    calls.broken = {"above 2", "other"}
    result = await home.resume(make("2"), run_id)
    assert list(result.failures) == ["other"]
    plan = await home.plan(make("2"), run_id, items=True)
    assert (plan["above"].reason, plan["each"].action) == ("handled", "skip")
    assert plan["each[0]"].action == "skip"


async def test_a_held_node_is_not_planned_to_run(home: Home, calls: Calls) -> None:
    """R33: it waits for a person's word, and what is below it waits too, whatever runs above."""

    def make(version: str) -> Workflow:
        wf = Workflow("held")

        @wf.node(version=version, idempotent=True)
        async def a() -> str:
            return version

        @wf.node
        async def b(a: str) -> str:
            return a

        @wf.node
        async def c(b: str) -> str:
            calls.began("c")
            return b

        return wf

    calls.broken = {"c"}
    run_id = (await home.run(make("1"))).run_id
    calls.mend()
    await home.resume(make("2"), run_id)
    assert (await home.statuses(run_id))["b"] == "waiting"
    plan = await home.plan(make("3"), run_id)
    result = await home.resume(make("3"), run_id)
    assert list(result.executed) == ["a"]
    assert (plan["a"].action, plan["b"].action, plan["c"].action) == ("run", "hold", "wait")


# -- nodes that are blocked now, and were not before ----------------------------------------------------


async def blocked_below_an_edit(home: Home, calls: Calls) -> tuple[Any, str, Workflow]:
    """Run to a failure elsewhere, edit the list, and resume: the map fails, what had completed below is
    blocked."""

    def make(version: str, numbers: tuple[int, ...]) -> Workflow:
        wf = edited(calls, version, numbers)
        calls.adder(wf)("other")
        return wf

    calls.broken = {"other", "each 7"}
    run_id = (await home.run(make("1", (0, 1)))).run_id
    wf = make("2", (0, 7))
    result = await home.resume(wf, run_id)
    assert set(result.failures) == {"each[1]", "other"}
    with pytest.raises(NoOutput, match="upstream_failed"):
        result["below"]
    return result, run_id, wf


async def test_a_blocked_node_has_no_output_in_the_stored_result_either(home: Home, calls: Calls) -> None:
    """C7: the result that the call gave and the stored one are the same."""
    result, run_id, wf = await blocked_below_an_edit(home, calls)
    async with home.engine(wf) as engine:
        stored = await engine.result(run_id)
    assert set(stored.outputs) == set(result.outputs)


async def test_a_blocked_node_is_shown_as_blocked(home: Home, calls: Calls) -> None:
    """DESIGN §2: upstream_failed is how a node ended, in every view."""
    _, run_id, _ = await blocked_below_an_edit(home, calls)
    assert (await home.statuses(run_id))["below"] == "upstream_failed"


async def test_a_blocked_node_is_no_success_in_sql(sqlite_home: Home, calls: Calls) -> None:
    """R5: the view of the checkpoints says what the engine says."""
    _, run_id, _ = await blocked_below_an_edit(sqlite_home, calls)
    assert sqlite_home.path is not None
    with sqlite3.connect(sqlite_home.path) as conn:
        sql = "SELECT node_status FROM workflow_checkpoints WHERE workflow_id = ? AND node_id = 'below'"
        rows = conn.execute(sql, (run_id,)).fetchall()
    conn.close()
    assert rows == [("pending",)]


async def test_a_failed_node_that_is_blocked_now_is_no_failure(home: Home, calls: Calls) -> None:
    """The failures of a run are those that the call gave."""

    def make(version: str) -> Workflow:
        wf = Workflow("both")

        @wf.node(version=version, idempotent=True)
        async def a() -> str:
            calls.began(f"a {version}")
            return version

        @wf.node
        async def b(a: str) -> str:
            calls.began("b")
            return a

        return wf

    calls.broken = {"b", "a 2"}
    run_id = (await home.run(make("1"))).run_id
    result = await home.resume(make("2"), run_id)
    assert set(result.failures) == {"a"}
    assert set((await home.info(run_id)).failures) == {"a"}


# -- maps that run beside the failure above them --------------------------------------------------------


def streamed(calls: Calls, *, tolerate: int | None) -> Workflow:
    """A chained map, one of whose items fails, below a map that fails and is handled."""
    wf = Workflow("streamed", idempotent=True)

    @wf.node(for_each={"x": "xs"})
    async def above(x: int) -> int:
        calls.began(f"above {x}")
        return x

    @wf.node(for_each={"y": "above"}, tolerate=tolerate)
    async def below(y: int) -> int:
        calls.began(f"below {y}")
        raise Boom("below")

    @wf.node(depends_on=["above"], trigger="any_failed")
    async def handler() -> None: ...

    calls.broken = {"above 1"}
    return wf


async def test_a_tolerated_failure_of_a_blocked_map_fails_nothing(home: Home, calls: Calls) -> None:
    """One failed item of one that may fail: the map is blocked by what is above it, which was handled."""
    wf = streamed(calls, tolerate=1)
    result = await home.run(wf, {"xs": [0, 1]})
    assert calls["below 0"] == 1
    assert result.status is RunStatus.COMPLETED
    assert (await home.statuses(result.run_id))["below"] == "upstream_failed"


async def test_a_run_does_not_complete_by_resuming_nothing(home: Home, calls: Calls) -> None:
    """C7: live and resumed give the same answer. The map is blocked, by a failure that was handled; that some
    of its items could run before that was known, and failed, is no matter."""
    wf = streamed(calls, tolerate=None)
    first = await home.run(wf, {"xs": [0, 1]})
    assert (first.status, first.failures) == (RunStatus.COMPLETED, {})
    again = await home.resume(wf, first.run_id)
    assert again.status is RunStatus.COMPLETED
    assert calls["below 0"] == 1


# -- what nobody can get on with ------------------------------------------------------------------------


async def test_an_uncertain_node_is_said_although_a_handler_has_completed(home: Home, calls: Calls) -> None:
    """C6: the handler had completed since the node was blocked then; now the node may have taken effect.

    Resume does not name it, and retry does not run it: the run can never go on.
    """
    wf = Workflow("for ever")
    entered = asyncio.Event()

    @wf.node
    async def a() -> None:
        calls.began("a")

    @wf.node(depends_on=["a"])
    async def b() -> None:
        calls.began("b")
        entered.set()
        if calls["b"] == 1:
            await asyncio.Event().wait()

    @wf.node(depends_on=["b"], trigger="any_failed")
    async def handler() -> None: ...

    calls.broken = {"a"}
    run_id = (await home.run(wf)).run_id
    calls.mend()
    async with home.engine(wf, grace_seconds=0) as engine:
        going_on = asyncio.create_task(engine.resume(run_id, raise_on_failure=False))
        await entered.wait()
    assert (await going_on).status is RunStatus.INTERRUPTED
    assert (await home.statuses(run_id))["b"] == "interrupted"
    result = await home.retry(wf, run_id)
    assert calls["b"] == 2
    assert result.status is RunStatus.COMPLETED


async def test_below_what_may_be_held_a_failure_that_was_dealt_with_makes_nothing_certain(
    home: Home, calls: Calls
) -> None:
    """`ready` may be held, since its input changes; then nothing below it has its turn, be it as it was.

    The plan said that `end` runs, and it did not.
    """
    wf = Workflow("held above")

    @wf.node
    async def source() -> int:
        calls.began("source")
        return 1

    @wf.node(depends_on=["source"])
    async def first() -> int:
        calls.began("first")
        return 2

    @wf.node(trigger="all_done")
    async def ready(first: int | None) -> None:
        calls.began("ready")

    @wf.node(depends_on=["ready"])
    async def fails() -> None:
        calls.began("fails")

    @wf.node(depends_on=["fails"], trigger="any_failed")
    async def handler() -> None:
        calls.began("handler")

    @wf.node(depends_on=["source", "handler"])
    async def end() -> None:
        calls.began("end")

    calls.broken = {"first", "fails", "end"}
    run_id = (await home.run(wf)).run_id
    assert calls["handler"] == calls["end"] == 1
    calls.mend()
    plan = await home.plan(wf, run_id)
    assert plan["ready"].action == "check"
    assert plan["end"].action == "check"
    await home.resume(wf, run_id)
    assert calls["end"] == 0
    assert (await home.statuses(run_id))["ready"] == "waiting"


# -- the test kit ---------------------------------------------------------------------------------------


async def test_a_clock_that_jumps_goes_on_after_each_call() -> None:
    """`autojump`: whenever all there is to do waits for the clock."""
    clock, called = FakeClock(autojump=0.01), list[int]()
    clock.call_later(1, called.append, 1)
    clock.call_later(2, called.append, 2)
    await asyncio.sleep(0.3)
    assert called == [1, 2]


async def test_a_clock_that_jumps_gets_there() -> None:
    """0.9 + (1.9000000000000001 - 0.9) < 1.9000000000000001."""
    clock, slept = FakeClock(autojump=0.01), list[float]()

    async def sleep(seconds: float) -> None:
        await clock.sleep(seconds)
        slept.append(seconds)

    sleepers = [asyncio.create_task(sleep(seconds)) for seconds in (0.9, 1.9000000000000001)]
    await asyncio.sleep(0.3)
    for sleeper in sleepers:
        sleeper.cancel()
    assert slept == [0.9, 1.9000000000000001]
