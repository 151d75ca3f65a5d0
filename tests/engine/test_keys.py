"""Business keys and ownership."""

from __future__ import annotations

import asyncio
import math
import uuid
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from dagresume import AlreadyRunning, InputsChanged, RunLocked, RunStatus, UncertainNode, Workflow
from dagresume.events import RUN_COMPLETED, RUN_CREATED, RUN_INTERRUPTED, run_record
from dagresume.sessions import this_session
from dagresume.store import Committed, Guard, NewRun, Orphaned, Outcome, Owned, Unit
from dagresume.testing import StoreWrapper
from tests.engine.kit import Calls, Home, TurnedClock, settle


def simple(calls: Calls, gate: asyncio.Event | None = None) -> Workflow:
    wf = Workflow("keyed", idempotent=True)

    @wf.node
    async def a(k: int = 1) -> int:
        calls.began("a")
        if gate is not None:
            await gate.wait()
        return k

    @wf.node
    async def b(a: int) -> int:
        calls.began("b")
        return a

    return wf


async def test_a_completed_key_gives_its_stored_result(home: Home, calls: Calls) -> None:
    """B115: never repeated, never silently "done" without a run."""
    wf = simple(calls)
    first = await home.run(wf, key="k")
    again = await home.run(wf, key="k")
    assert again.run_id == first.run_id
    assert again.status is RunStatus.COMPLETED
    assert again["b"] == 1
    assert (list(again.executed), set(again.reused)) == ([], {"a", "b"})
    assert calls == {"a": 1, "b": 1}


async def test_fresh_starts_a_new_run_of_a_completed_key(home: Home, calls: Calls) -> None:
    wf = simple(calls)
    first = await home.run(wf, key="k")
    second = await home.run(wf, {"k": 2}, key="k", fresh=True)
    assert second.run_id != first.run_id
    assert second["b"] == 2
    assert (await home.run(wf, {"k": 2}, key="k")).run_id == second.run_id  # the newest one counts


async def test_a_failed_key_is_resumed(home: Home, calls: Calls) -> None:
    """B115."""
    wf = simple(calls)
    calls.broken = {"b"}
    first = await home.run(wf, key="k")
    calls.mend()
    second = await home.run(wf, key="k")
    assert second.run_id == first.run_id
    assert dict(calls) == {"b": 1}


async def test_a_cancelled_key_is_free(home: Home, calls: Calls) -> None:
    wf = simple(calls)
    calls.broken = {"b"}
    first = await home.run(wf, key="k")
    async with home.engine(wf) as engine:
        await engine.cancel(first.run_id)
    calls.mend()
    second = await home.run(wf, {"k": 5}, key="k")
    assert second.run_id != first.run_id
    assert second["b"] == 5


async def test_a_completed_key_older_than_its_window_is_free(home: Home, calls: Calls) -> None:
    wf = simple(calls)
    clock = TurnedClock()
    async with home.engine(clock=clock) as engine:
        first = await engine.run(wf, key="k", window=60)
        assert (await engine.run(wf, key="k", window=60)).run_id == first.run_id
        clock.ahead = 61
        assert (await engine.run(wf, key="k")).run_id == first.run_id  # no window: for ever
        second = await engine.run(wf, key="k", window=60)
        assert second.run_id != first.run_id


async def test_keys_of_other_workflows_do_not_meet(home: Home, calls: Calls) -> None:
    one, two = Workflow("one"), Workflow("two")
    calls.adder(one)("a")
    calls.adder(two)("a")
    first, second = await home.run(one, key="k"), await home.run(two, key="k")
    assert first.run_id != second.run_id
    assert calls["a"] == 2


@pytest.mark.parametrize("key", ["a'b", "%", "a_b", "", "é", "k" * 1000])
async def test_any_text_is_a_key_and_means_itself(home: Home, calls: Calls, key: str) -> None:
    wf = simple(calls)
    other = await home.run(wf, key="axb")
    first = await home.run(wf, key=key)
    assert first.run_id != other.run_id
    assert (await home.run(wf, key=key)).run_id == first.run_id


async def test_a_live_key_names_its_holder(home: Home, calls: Calls) -> None:
    gate = asyncio.Event()
    wf = simple(calls, gate)
    async with home.engine() as engine, home.engine() as other:
        handle = await engine.start(wf, key="k")
        for asking in (engine, other):
            with pytest.raises(AlreadyRunning, match=handle.run_id) as caught:
                await asking.run(wf, key="k")
            assert caught.value.run_id == handle.run_id
            assert "process" in caught.value.holder
        gate.set()
        await handle.result()
        assert (await other.run(wf, key="k")).run_id == handle.run_id


async def test_a_live_run_is_locked_for_resume_and_retry(home: Home, calls: Calls) -> None:
    gate = asyncio.Event()
    wf = simple(calls, gate)
    async with home.engine(wf) as engine, home.engine(wf) as other:
        handle = await engine.start(wf)
        for asking in (engine, other):
            with pytest.raises(RunLocked, match=handle.run_id):
                await asking.resume(handle.run_id)
            with pytest.raises(RunLocked):
                await asking.retry(handle.run_id, "a")
        gate.set()
        await handle.result()
    assert calls == {"a": 1, "b": 1}


async def test_ten_starts_of_one_key_make_one_run(home: Home, calls: Calls) -> None:
    """B109: one run; the others are told which."""
    gate = asyncio.Event()
    wf = simple(calls, gate)
    async with home.engine() as engine, home.engine() as other:
        found = await asyncio.gather(
            *((engine if n % 2 else other).start(wf, key="k") for n in range(10)), return_exceptions=True
        )
        made = [each for each in found if not isinstance(each, BaseException)]
        refused = [each for each in found if isinstance(each, AlreadyRunning)]
        assert (len(made), len(refused)) == (1, 9)
        assert {each.run_id for each in refused} == {made[0].run_id}
        gate.set()
        await made[0].result()
        assert len(await engine.runs()) == 1
    assert calls == {"a": 1, "b": 1}


async def test_two_engines_resume_one_key_once(home: Home, calls: Calls) -> None:
    gate = asyncio.Event()
    wf = simple(calls, gate)
    calls.broken = {"a"}
    gate.set()
    first = await home.run(wf, key="k")
    gate.clear()
    calls.mend()
    async with home.engine() as engine, home.engine() as other:
        found = await asyncio.gather(
            engine.start(wf, key="k"), other.start(wf, key="k"), return_exceptions=True
        )
        made = [each for each in found if not isinstance(each, BaseException)]
        assert len(made) == 1
        assert [type(each) for each in found if isinstance(each, BaseException)] == [AlreadyRunning]
        gate.set()
        assert (await made[0].result()).run_id == first.run_id
    assert dict(calls) == {"a": 1, "b": 1}


async def test_other_inputs_are_refused_naming_the_input(home: Home, calls: Calls) -> None:
    """B91: on a resume, and on a completed run; nothing is changed."""
    wf = simple(calls)
    calls.broken = {"b"}
    first = await home.run(wf, {"k": 1}, key="k")
    for _ in range(2):
        async with home.engine() as engine:
            with pytest.raises(InputsChanged, match=r"\bk\b") as caught:
                await engine.run(wf, {"k": 2}, key="k")
            assert (caught.value.run_id, caught.value.names) == (first.run_id, ("k",))
            with pytest.raises(InputsChanged):
                await engine.run(wf, key="k")
        calls.mend()
        await home.run(wf, {"k": 1}, key="k")


SAME: list[tuple[Any, Any]] = [
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({"x": {3, 1, 2}}, {"x": {1, 2, 3}}),
    (math.nan, math.nan),
    ([math.inf, -math.inf], [math.inf, -math.inf]),
    (b"\x00\xff", b"\x00\xff"),
    (Decimal("1.10"), Decimal("1.10")),
    (uuid.UUID(int=3), uuid.UUID(int=3)),
    (datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)),
    ("a\x00\ud800", "a\x00\ud800"),
    (2**100, 2**100),
]
OTHER: list[tuple[Any, Any]] = [
    (1, "1"),
    (1, True),
    (1, 1.0),
    (0.0, -0.0),
    ([1, 2], [2, 1]),
    ((1, 2), [1, 2]),
    ({1: "a"}, {"1": "a"}),
    (b"a", "a"),
    (None, False),
    ({1, 2}, frozenset({1, 2})),
    (Decimal("1.1"), Decimal("1.10")),
]


def takes_anything() -> Workflow:
    wf = Workflow("compare")

    @wf.node
    async def a(t: Any) -> None: ...

    return wf


@pytest.mark.parametrize(("first", "second"), SAME)
async def test_equal_inputs_raise_no_alarm(sqlite_home: Home, first: Any, second: Any) -> None:
    """B92."""
    wf = takes_anything()
    one = await sqlite_home.run(wf, {"t": first}, key="k")
    assert (await sqlite_home.run(wf, {"t": second}, key="k")).run_id == one.run_id


@pytest.mark.parametrize(("first", "second"), OTHER)
async def test_different_inputs_are_noticed(sqlite_home: Home, first: Any, second: Any) -> None:
    """B92."""
    wf = takes_anything()
    await sqlite_home.run(wf, {"t": first}, key="k")
    async with sqlite_home.engine() as engine:
        with pytest.raises(InputsChanged, match=r"\bt\b"):
            await engine.run(wf, {"t": second}, key="k")


async def test_the_order_of_the_inputs_does_not_matter(home: Home) -> None:
    """B92."""
    wf = Workflow("order")

    @wf.node
    async def a(x: int, y: int) -> int:
        return x - y

    first = await home.run(wf, {"x": 1, "y": 2}, key="k")
    assert (await home.run(wf, {"y": 2, "x": 1}, key="k")).run_id == first.run_id


async def test_big_inputs_are_compared_and_come_back(sqlite_home: Home, calls: Calls) -> None:
    """B71: inputs above the threshold lie in a file."""
    wf = Workflow("big")
    broken = [True]

    @wf.node(idempotent=True)
    async def a(text: str, other: int) -> int:
        if broken:
            raise ValueError
        return len(text) + other

    big = "x" * 300_000
    first = await sqlite_home.run(wf, {"text": big, "other": 1}, key="k")
    async with sqlite_home.engine() as engine:
        with pytest.raises(InputsChanged, match="text"):
            await engine.run(wf, {"text": big + "y", "other": 1}, key="k")
    broken.clear()
    result = await sqlite_home.run(wf, {"text": big, "other": 1}, key="k")
    assert result.run_id == first.run_id
    assert result[a] == 300_001


async def test_a_key_taken_by_a_newer_run_is_not_taken_back(home: Home, calls: Calls) -> None:
    """`retry(from_node=…)` takes the key of a cancelled run back: refused while a newer run holds it."""
    wf = simple(calls)
    calls.broken = {"b"}
    old = (await home.run(wf, key="k")).run_id
    async with home.engine(wf) as engine:
        await engine.cancel(old)
    calls.mend()
    new = await home.run(wf, key="k")
    async with home.engine(wf) as engine:
        with pytest.raises(AlreadyRunning, match=new.run_id):
            await engine.retry(old, "a")
    assert (await home.info(old)).status is RunStatus.CANCELLED


async def test_a_run_at_rest_can_be_cancelled_although_a_newer_one_has_its_key(
    home: Home, calls: Calls
) -> None:
    """It needs the key no more."""
    wf = simple(calls)
    calls.broken = {"b"}
    old = (await home.run(wf, key="k")).run_id
    calls.mend()
    new = await home.run(wf, key="k", fresh=True)
    async with home.engine() as engine:
        await engine.cancel(old)
    assert (await home.info(old)).status is RunStatus.CANCELLED
    assert (await home.run(wf, key="k")).run_id == new.run_id


async def test_a_late_owner_whose_key_was_given_away_goes_on_without_it(home: Home) -> None:
    """It was thought dead, marked interrupted, and a new run of the key was begun."""
    clock = TurnedClock()
    stores = [home.store(clock) for _ in range(2)]
    numbers = [
        await store.open(this_session(clock.now(), lease)._replace(boot_id=None))
        for store, lease in zip(stores, (1, 10**12), strict=True)
    ]

    async def commit(which: int, guard: Guard, kind: str) -> Outcome:
        [outcome] = await stores[which].commit([Unit(guard, [run_record(kind, clock.now())])])
        return outcome

    try:
        first = NewRun("r1", "w", "1", "k", None, numbers[0], "manual", "{}", b"")
        assert await commit(0, first, RUN_CREATED) == Committed(1, 1, 1)
        clock.ahead = 1.0
        await commit(1, Orphaned(1, numbers[0], 1), RUN_INTERRUPTED)
        second = replace(first, run_id="r2", saw=1, session=numbers[1])
        assert isinstance(await commit(1, second, RUN_CREATED), Committed)
        late = await commit(0, Owned(1, numbers[0], 1), RUN_COMPLETED)
        assert isinstance(late, Committed)
        rows = [loaded.row for name in ("r1", "r2") if (loaded := await stores[1].load(name))]
        assert [(row.status, row.holds_key) for row in rows] == [("completed", 0), ("running", 1)]
    finally:
        for store in stores:
            await store.close()


async def test_the_owner_is_a_session_not_a_name(home: Home, calls: Calls) -> None:
    """B101: two engines of one process are two owners; one that ended owns nothing any more."""
    gate = asyncio.Event()
    wf = simple(calls, gate)
    first = home.engine(wf, grace_seconds=0)
    await first.__aenter__()
    handle = await first.start(wf, key="k")
    await settle(lambda: calls["a"] == 1)
    await first.__aexit__(None, None, None)
    info = await home.info(handle.run_id)
    assert (info.status, info.reason, info.owner) == (RunStatus.INTERRUPTED, "shutdown", None)
    gate.set()
    result = await home.run(wf, key="k")
    assert result.run_id == handle.run_id
    assert result.status is RunStatus.COMPLETED
    assert calls == {"a": 2, "b": 1}


async def test_an_uncertain_key_is_refused_naming_the_path(home: Home, calls: Calls) -> None:
    gate = asyncio.Event()
    wf = Workflow("not idempotent")

    @wf.node
    async def a() -> None:
        calls.began("a")
        await gate.wait()

    engine = home.engine(wf, grace_seconds=0)
    async with engine:
        await engine.start(wf, key="k")
        await settle(lambda: calls["a"] == 1)
    async with home.engine() as later:
        with pytest.raises(UncertainNode, match=r"\ba\b"):
            await later.run(wf, key="k")
    assert calls == {"a": 1}


async def test_a_run_that_ends_as_it_is_opened_is_nobodys(home: Home) -> None:
    """The unit that makes or claims a run may hold its end too: then nobody owns it."""
    empty = Workflow("empty")
    async with home.engine() as engine:
        first = await engine.run(empty, key="k")
        again = await engine.run(empty, key="k")
        assert again.run_id == first.run_id
        assert (await engine.get(first.run_id)).owner is None


async def test_a_fresh_run_does_not_take_the_key_of_one_that_was_just_taken_up(
    home: Home, calls: Calls
) -> None:
    """B109: between its look and its commit somebody else resumes the run it saw at rest."""
    calls.broken = {"b"}
    gate = asyncio.Event()
    old = await home.run(simple(calls), key="k")
    calls.mend()
    wf = Workflow("keyed", idempotent=True)

    @wf.node
    async def a(k: int = 1) -> int:
        return k

    @wf.node
    async def b(a: int) -> int:
        calls.began("b")
        await gate.wait()
        return a

    async with home.engine(wf) as other:
        going: list[asyncio.Task[Any]] = []

        class Slow(StoreWrapper):
            async def find(self, **wanted: Any) -> Any:
                found = await super().find(**wanted)
                if not going:
                    going.append(asyncio.create_task(other.resume(old.run_id, force=True)))
                    await settle(lambda: calls["b"] == 1)
                return found

        async with home.engine(wf, wrap=Slow) as engine:
            with pytest.raises(AlreadyRunning, match=old.run_id):
                await engine.run(wf, key="k", fresh=True)
        gate.set()
        assert (await going[0])["b"] == 1
