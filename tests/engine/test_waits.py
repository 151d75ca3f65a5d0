"""Waits: approvals, sleeps, signals, held paths; who goes on with a run that waits, and when (cases T)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from dagresume import (
    AlreadyDecided,
    AlreadyRunning,
    Engine,
    InputsChanged,
    NotWaiting,
    RunCancelled,
    RunStatus,
    UncertainNode,
    Value,
    Workflow,
)
from dagresume.events import Record
from dagresume.store import Outcome, Store, Unit
from dagresume.testing import StoreWrapper, Zygote, autopsy
from tests.engine.kit import Calls, Home, SlowStore, TurnedClock, settle
from tests.engine.plays import until, world


def approved(calls: Calls, **options: Any) -> Workflow:
    """order → ap → pay."""
    wf = Workflow("approved", **options)

    @wf.node
    async def order() -> int:
        calls.began("order")
        return 42

    wf.approval("ap", depends_on=order, prompt="Pay?")

    @wf.node
    async def pay(ap: dict[str, Any], order: int) -> list[Any]:
        calls.began("pay")
        return [order, ap["by"]]

    return wf


async def waits(home: Home, wf: Workflow, inputs: dict[str, Any] | None = None, **options: Any) -> str:
    """Run it until it waits; give its id."""
    result = await home.run(wf, inputs, **options)
    assert result.status is RunStatus.WAITING
    return result.run_id


async def decide(home: Home, run_id: str, path: str, approve: bool = True, **options: Any) -> None:
    """Decide in an engine without the code."""
    async with home.engine() as engine:
        await engine.decide(run_id, path, approve, **options)


async def signal(home: Home, run_id: str, event: str, payload: Any = None) -> None:
    async with home.engine() as engine:
        await engine.signal(run_id, event, payload)


async def comes(home: Home, run_id: str, status: str, seconds: float = 10.0) -> None:
    """Wait until a run has a status, as an engine without code sees it."""
    async with asyncio.timeout(seconds):
        while (await home.info(run_id)).status != status:  # noqa: ASYNC110  # another engine does it
            await asyncio.sleep(0.02)


# -- approvals ------------------------------------------------------------------------------------------


async def test_a_run_waits_for_a_person_and_goes_on(home: Home, calls: Calls) -> None:
    """B142: what came before is not repeated, what comes after gets what was said."""
    wf = approved(calls)
    run_id = await waits(home, wf)
    info = await home.info(run_id)
    assert (info.status, info.reason, info.owner) == ("waiting", "approval", None)
    assert (info.nodes["ap"].status, info.nodes["pay"].status) == ("waiting", "pending")
    assert (await home.plan(wf, run_id))["ap"].action == "wait"
    still = await home.go_on(wf, run_id)
    assert still.status is RunStatus.WAITING
    await decide(home, run_id, "ap", by="ann", comment="fine")
    assert (await home.plan(wf, run_id))["ap"].action == "run"
    assert (await home.info(run_id)).status == "waiting", "to decide runs nothing"
    result = await home.go_on(wf, run_id)
    assert result["pay"] == [42, "ann"]
    assert dict(calls) == {"order": 1, "pay": 1}
    assert list(result.executed) == ["pay"]
    said = result["ap"]
    assert {name: said[name] for name in ("approved", "by", "comment")} == {
        "approved": True, "by": "ann", "comment": "fine",
    }  # fmt: skip
    assert datetime.fromisoformat(said["at"]).tzinfo is not None


async def test_a_rejection_fails_its_node_for_good(home: Home, calls: Calls) -> None:
    """The reason is `rejected`; who and why is in the message; a resume asks once more."""
    wf = approved(calls)
    run_id = await waits(home, wf)
    await decide(home, run_id, "ap", False, by="bob", comment="too dear")
    failed = await home.resume(wf, run_id)
    assert failed.status is RunStatus.FAILED
    failure = failed.failures["ap"]
    assert failure.reason == "rejected"
    assert "bob" in failure.message
    assert "too dear" in failure.message
    assert calls["pay"] == 0
    with pytest.raises(AlreadyDecided):
        await decide(home, run_id, "ap")
    assert (await home.resume(wf, run_id)).status is RunStatus.WAITING
    await decide(home, run_id, "ap", by="ann")
    assert (await home.go_on(wf, run_id))["pay"] == [42, "ann"]


async def test_the_first_word_wins(home: Home, calls: Calls) -> None:
    """B139: the same again is accepted, another one is refused and told what was said; after the end too."""
    wf = approved(calls)
    run_id = await waits(home, wf)
    await decide(home, run_id, "ap", by="ann")
    for _ in range(2):
        await decide(home, run_id, "ap", by="cy")
        with pytest.raises(AlreadyDecided) as caught:
            await decide(home, run_id, "ap", False, by="bob")
        assert "approved" in str(caught.value)
        assert "ann" in str(caught.value)
        await home.resume(wf, run_id)
    assert (await home.info(run_id)).status == "completed"
    assert calls["pay"] == 1
    decided = [e for e in await home.events(run_id) if e.kind == "node.decided"]
    assert len(decided) == 1


@pytest.mark.parametrize("path", ["order", "pay", "nothing", "ap[0]", "ap/x", ""])
async def test_nothing_waits_there(home: Home, calls: Calls, path: str) -> None:
    run_id = await waits(home, approved(calls))
    with pytest.raises(NotWaiting):
        await decide(home, run_id, path)


async def test_not_before_it_waits_and_not_in_a_cancelled_run(home: Home, calls: Calls) -> None:
    wf = approved(calls)
    calls.broken = {"order"}
    failed = await home.run(wf)
    with pytest.raises(NotWaiting):
        await decide(home, failed.run_id, "ap")
    calls.mend()
    run_id = await waits(home, wf)
    async with home.engine() as engine:
        await engine.cancel(run_id, by="dan")
        assert (await engine.get(run_id)).status == "cancelled"
    with pytest.raises(NotWaiting):
        await decide(home, run_id, "ap")
    with pytest.raises(RunCancelled):
        await home.resume(wf, run_id)
    assert calls["pay"] == 0


async def test_too_late(home: Home, calls: Calls) -> None:
    """After its time is over an approval has failed, whoever comes; also if no process looked at it."""
    wf, clock = Workflow("late"), TurnedClock()
    wf.approval("ap", timeout=60)

    @wf.node
    async def pay(ap: Any) -> None:
        calls.began("pay")

    async with home.engine(wf, clock=clock) as engine:
        result = await engine.run(wf)
        run_id = result.run_id
        assert result.status is RunStatus.WAITING
    clock.ahead = 61
    async with home.engine(wf, clock=clock) as engine:
        with pytest.raises(NotWaiting, match="time was over"):
            await engine.decide(run_id, "ap")
        plan = {d.path: d for d in await engine.plan(run_id)}
        assert (plan["ap"].action, plan["ap"].reason) == ("run", "timeout")
        failed = await engine.resume(run_id, raise_on_failure=False)
    assert failed.failures["ap"].reason == "timeout"
    assert not calls


async def test_a_word_in_time_counts_when_the_resume_comes_late(home: Home, calls: Calls) -> None:
    wf, clock = Workflow("late"), TurnedClock()
    wf.approval("ap", timeout=60)
    async with home.engine(wf, clock=clock) as engine:
        run_id = (await engine.run(wf)).run_id
        await engine.decide(run_id, "ap", by="ann")
    clock.ahead = 1000
    async with home.engine(wf, clock=clock) as engine:
        result = await engine.resume(run_id)
    assert result["ap"]["by"] == "ann"


async def test_a_run_that_stays_hears_at_once(home: Home, calls: Calls) -> None:
    """`wait="all"`: the call stays, owned and running, and goes on within a second of the word."""
    wf = approved(calls)
    async with home.engine(wf) as engine:
        task = asyncio.create_task(engine.run(wf, key="k", wait="all"))
        await settle(lambda: calls["order"] == 1)
        (info,) = await _until_waiting(engine)
        assert info.status == "running"
        with pytest.raises(AlreadyRunning):
            await engine.run(wf, key="k")
        await decide(home, info.run_id, "ap", by="ann")
        async with asyncio.timeout(2):
            assert (await task)["pay"] == [42, "ann"]


async def _until_waiting(engine: Any) -> list[Any]:
    """Give the runs once one has a path that waits."""
    while True:
        infos = await engine.runs()
        for info in infos:
            nodes = (await engine.get(info.run_id)).nodes
            if any(node.status == "waiting" for node in nodes.values()):
                return list(infos)
        await asyncio.sleep(0.01)


async def test_two_approvals_one_after_the_other(home: Home, calls: Calls) -> None:
    """B143: a word about the one is none about the other."""
    wf = Workflow("two")
    wf.approval("ap1")

    @wf.node(depends_on="ap1")
    async def x() -> None:
        calls.began("x")

    wf.approval("ap2", depends_on=x)
    run_id = await waits(home, wf)
    with pytest.raises(NotWaiting):
        await decide(home, run_id, "ap2")
    await decide(home, run_id, "ap1", by="one")
    assert (await home.go_on(wf, run_id)).status is RunStatus.WAITING
    await decide(home, run_id, "ap1", by="again")
    assert (await home.go_on(wf, run_id)).status is RunStatus.WAITING
    await decide(home, run_id, "ap2", by="two")
    result = await home.go_on(wf, run_id)
    assert (result["ap1"]["by"], result["ap2"]["by"]) == ("one", "two")
    assert dict(calls) == {"x": 1}


async def test_a_loop_with_an_approval_in_its_body(home: Home, calls: Calls) -> None:
    """B143: each round has its own; three rounds, three processes, three words."""
    wf, body = Workflow("loop"), Workflow("body")

    @body.node
    async def draft(state: int) -> int:
        calls.began(f"draft {state}")
        return state + 1

    body.approval("ap", depends_on=draft)

    @body.node
    async def done(draft: int, ap: dict[str, Any]) -> int:
        calls.began(f"done {draft} {ap['by']}")
        return draft

    body._output = "done"
    wf.loop("refine", body, initial=Value(0), until=lambda s: s == 3, max_iterations=5)
    run_id = await waits(home, wf)
    for n in range(3):
        assert (await home.info(run_id)).nodes[f"refine[{n}]/ap"].status == "waiting"
        with pytest.raises(NotWaiting):
            await decide(home, run_id, f"refine[{n + 1}]/ap")
        await decide(home, run_id, f"refine[{n}]/ap", by=f"p{n}")
        result = await home.go_on(wf, run_id)
    assert result["refine"] == 3
    assert calls.order == ["draft 0", "done 1 p0", "draft 1", "done 2 p1", "draft 2", "done 3 p2"]


async def test_a_map_of_sub_workflows_with_an_approval_each(home: Home, calls: Calls) -> None:
    """What is decided goes on, what was rejected fails, the rest waits."""
    wf, inner = Workflow("outer"), Workflow("inner", output="after")
    inner.approval("ap")

    @inner.node
    async def after(ap: dict[str, Any], n: int) -> int:
        calls.began(f"after {n}")
        return n

    wf.subworkflow("each", inner, for_each={"n": "numbers"}, tolerate=1)

    @wf.node
    async def last(each: list[Any]) -> int:
        calls.began("last")
        return sum(n for n in each if isinstance(n, int))

    run_id = await waits(home, wf, {"numbers": [1, 2, 3]})
    await decide(home, run_id, "each[1]/ap")
    assert (await home.go_on(wf, run_id)).status is RunStatus.WAITING
    assert dict(calls) == {"after 2": 1}
    await decide(home, run_id, "each[0]/ap", False)
    still = await home.resume(wf, run_id)
    assert still.status is RunStatus.WAITING
    await decide(home, run_id, "each[2]/ap")
    result = await home.go_on(wf, run_id)
    assert result["last"] == 5
    assert dict(calls) == {"after 2": 1, "after 3": 1, "last": 1}


async def test_something_failed_and_something_is_open(home: Home, calls: Calls) -> None:
    """`waiting`, with the failures in the result; the word and the mend both go on."""
    wf = approved(calls)
    calls.adder(wf)("bad")
    calls.broken = {"bad"}
    result = await home.run(wf)
    assert (result.status, list(result.failures)) == (RunStatus.WAITING, ["bad"])
    calls.mend()
    await decide(home, result.run_id, "ap")
    result = await home.go_on(wf, result.run_id)
    assert result.status is RunStatus.COMPLETED
    assert dict(calls) == {"bad": 1, "pay": 1}


async def test_an_uncertain_path_beside_an_approval(home: Home, calls: Calls) -> None:
    wf = approved(calls)
    reached = asyncio.Event()

    @wf.node
    async def careful() -> int:
        calls.began("careful")
        reached.set()
        await asyncio.sleep(60)
        return 0

    async with home.engine(wf, grace_seconds=0) as engine:
        handle = await engine.start(wf)
        await reached.wait()
        await _until_waiting(engine)
    assert (await home.info(handle.run_id)).status == "interrupted"
    await decide(home, handle.run_id, "ap")
    with pytest.raises(UncertainNode):
        await home.resume(wf, handle.run_id)
    async with home.engine(wf) as engine:
        await engine.resolve(handle.run_id, careful, output=5)
    result = await home.go_on(wf, handle.run_id)
    assert (result["careful"], result["pay"]) == (5, [42, ""])
    assert calls == {"order": 1, "careful": 1, "pay": 1}


async def test_an_approval_that_is_not_needed(home: Home, calls: Calls) -> None:
    """Triggers: an approval for what failed only; skipped when nothing did, asked when something did."""
    wf = Workflow("w")
    calls.adder(wf)("a")
    wf.approval("help", depends_on="a", trigger="any_failed")
    assert (await home.run(wf)).status is RunStatus.COMPLETED
    calls.broken = {"a"}
    run_id = await waits(home, wf)
    await decide(home, run_id, "help")
    result = await home.go_on(wf, run_id)
    assert result.status is RunStatus.COMPLETED, "the failure was handled"
    assert calls["a"] == 3, "until it is handled a resume tries it again"


# -- sleeps ---------------------------------------------------------------------------------------------


async def test_a_sleep_is_stayed_for(home: Home, calls: Calls) -> None:
    """`wait="timers"`, the default: the call stays; no slot is held."""
    wf = Workflow("sleeps")
    wf.sleep("nap", 0.1)

    @wf.node(depends_on="nap")
    async def after() -> str:
        return "awake"

    wf.node(id="other")(_nothing)
    async with home.engine(wf, concurrency=1) as engine:
        result = await engine.run(wf)
    assert result["after"] == "awake"
    assert result["nap"] is None
    assert result.stats.seconds >= 0.1


async def _nothing() -> None:
    return None


async def test_a_sleep_that_ends_while_no_process_lives(home: Home, calls: Calls) -> None:
    """Its end is stored: nobody sleeps again."""
    wf, clock = Workflow("sleeps"), TurnedClock()
    wf.sleep("nap", 3600)

    @wf.node(depends_on="nap")
    async def after() -> str:
        calls.began("after")
        return "awake"

    async with home.engine(wf, clock=clock) as engine:
        result = await engine.run(wf, wait="none")
        assert (result.status, result.reason) == (RunStatus.WAITING, "sleep")
        again = await engine.resume(result.run_id, wait="none")
        assert again.status is RunStatus.WAITING
    clock.ahead = 3601
    async with home.engine(wf, clock=clock) as engine:
        plan = {d.path: d for d in await engine.plan(result.run_id)}
        assert (plan["nap"].action, plan["after"].action) == ("run", "run")
        ended = await engine.resume(result.run_id, wait="none")
    assert ended["after"] == "awake"


async def test_none_returns_at_the_first_standstill(home: Home, calls: Calls) -> None:
    wf = Workflow("w")
    wf.sleep("nap", 60)
    wf.approval("ap")
    wf.wait_for("event", "e")
    calls.adder(wf)("a")
    for wait in ("none", "timers"):
        result = await home.run(wf, wait=wait)
        assert (result.status, result.reason) == (RunStatus.WAITING, "approval")
        assert calls["a"] == 1
        calls.mend()
    with pytest.raises(ValueError, match="wait="):
        await home.run(wf, wait="some")


async def test_a_sleep_of_nothing(home: Home) -> None:
    wf = Workflow("w")
    wf.sleep("nap", 0)
    result = await home.run(wf, wait="none")
    assert result.status is RunStatus.COMPLETED
    assert dict(result.outputs) == {"nap": None}


# -- signals --------------------------------------------------------------------------------------------


def hears(*nodes: str, event: str = "paid") -> Workflow:
    wf = Workflow("hears")
    for node in nodes:
        wf.wait_for(node, event)

    return wf


async def test_a_signal_brings_its_payload(home: Home) -> None:
    wf = hears("w")
    run_id = await waits(home, wf)
    await signal(home, run_id, "other", 1)
    assert (await home.go_on(wf, run_id)).status is RunStatus.WAITING
    await signal(home, run_id, "paid", {"amount": 3})
    result = await home.go_on(wf, run_id)
    assert result["w"] == {"amount": 3}
    async with home.engine(wf) as engine:
        assert (await engine.result(run_id))["w"] == {"amount": 3}
    with pytest.raises(NotWaiting):
        await signal(home, run_id, "paid")


@pytest.mark.parametrize("payload", [None, 0, "", [], False, {"a": (1, 2)}, b"\x00"])
async def test_falsy_and_odd_payloads(home: Home, payload: Any) -> None:
    """B52, C7: what was sent is what comes."""
    wf = hears("w")
    run_id = await waits(home, wf)
    await signal(home, run_id, "paid", payload)
    result = await home.go_on(wf, run_id)
    assert result["w"] == payload
    assert type(result["w"]) is type(payload)


async def test_early_signals_are_kept(home: Home, calls: Calls) -> None:
    """A signal that comes before its wait is there when the wait begins, also in another process."""
    wf = Workflow("early")
    wf.approval("first")
    wf.wait_for("w", "paid", depends_on="first")
    run_id = await waits(home, wf)
    await signal(home, run_id, "paid", 7)
    assert (await home.resume(wf, run_id)).status is RunStatus.WAITING
    await decide(home, run_id, "first")
    assert (await home.go_on(wf, run_id))["w"] == 7


async def test_each_signal_is_taken_once(home: Home) -> None:
    """Two waits on one event need two signals, and get them in their order."""
    wf = hears("w1", "w2")
    run_id = await waits(home, wf)
    await signal(home, run_id, "paid", "one")
    assert (await home.go_on(wf, run_id)).status is RunStatus.WAITING
    assert (await home.go_on(wf, run_id)).status is RunStatus.WAITING
    await signal(home, run_id, "paid", "two")
    result = await home.go_on(wf, run_id)
    assert {result["w1"], result["w2"]} == {"one", "two"}


async def test_two_signals_at_once_for_two_waits(home: Home) -> None:
    wf = hears("w1", "w2")
    async with home.engine(wf) as engine:
        task = asyncio.create_task(engine.run(wf, wait="all"))
        (info,) = await _until_waiting(engine)
        await asyncio.gather(*(engine.signal(info.run_id, "paid", n) for n in range(2)))
        result = await task
    assert {result["w1"], result["w2"]} == {0, 1}


async def test_a_signal_too_many_is_left_over(home: Home) -> None:
    wf = hears("w")
    run_id = await waits(home, wf)
    for n in range(3):
        await signal(home, run_id, "paid", n)
    assert (await home.go_on(wf, run_id))["w"] == 0


async def test_a_big_payload(sqlite_home: Home) -> None:
    wf = hears("w")

    @wf.node
    async def size(w: str) -> int:
        return len(w)

    run_id = await waits(sqlite_home, wf)
    await signal(sqlite_home, run_id, "paid", "x" * 300_000)
    assert (await sqlite_home.go_on(wf, run_id))["size"] == 300_000


async def test_a_wait_that_is_over(home: Home) -> None:
    wf = Workflow("w")
    wf.wait_for("w", "paid", timeout=0.05)
    result = await home.run(wf, wait="all")
    assert result.failures["w"].reason == "timeout"


async def test_signals_in_rounds_and_sub_workflows(home: Home, calls: Calls) -> None:
    """Each round takes the next one; early ones are kept for later rounds."""
    wf, body = Workflow("outer"), Workflow("body", output="add")
    body.wait_for("more", "more")

    @body.node
    async def add(state: int, more: int) -> int:
        return state + more

    wf.loop("sum", body, initial=Value(0), until=lambda s: s >= 6, max_iterations=9)
    run_id = await waits(home, wf)
    for n in (1, 2):
        await signal(home, run_id, "more", n)
    assert (await home.go_on(wf, run_id)).status is RunStatus.WAITING
    await signal(home, run_id, "more", 3)
    assert (await home.go_on(wf, run_id))["sum"] == 6


# -- keys -----------------------------------------------------------------------------------------------


async def test_the_key_is_held_while_it_waits(home: Home, calls: Calls) -> None:
    """B97's neighbour: the same key resumes, other inputs are refused, a fresh run is another one."""
    wf = Workflow("keyed")
    wf.approval("ap")

    @wf.node
    async def pay(ap: Any, amount: int) -> int:
        calls.began("pay")
        return amount

    run_id = await waits(home, wf, {"amount": 1}, key="k")
    assert await waits(home, wf, {"amount": 1}, key="k") == run_id
    async with home.engine(wf) as engine:
        with pytest.raises(InputsChanged, match="amount"):
            await engine.run(wf, {"amount": 2}, key="k")
    await decide(home, run_id, "ap")
    result = await home.run(wf, {"amount": 1}, key="k")
    assert (result.run_id, result["pay"]) == (run_id, 1)
    assert (await home.run(wf, {"amount": 1}, key="k")).run_id == run_id
    assert calls["pay"] == 1


# -- who wakes it ---------------------------------------------------------------------------------------


async def test_another_engine_wakes_it(home: Home, calls: Calls) -> None:
    """`wake=True`: a word, a signal and the end of a sleep each wake a run nobody drives."""
    wf = approved(calls)
    napping, hearing = Workflow("naps"), hears("w")
    napping.sleep("nap", 0.3)
    async with home.engine(napping) as engine:
        asleep = (await engine.run(napping, wait="none")).run_id
    decided, heard = await waits(home, wf), await waits(home, hearing)
    unknown = Workflow("unknown")
    unknown.approval("ap")
    other = await waits(home, unknown)
    async with home.engine(wf, napping, hearing, wake=True):
        await decide(home, decided, "ap")
        await decide(home, other, "ap")
        await signal(home, heard, "paid")
        for run_id in (decided, heard, asleep):
            await comes(home, run_id, "completed")
    assert (await home.info(other)).status == "waiting", "its code is not known there"
    assert dict(calls) == {"order": 1, "pay": 1}


async def test_a_run_that_is_woken_runs_nothing_again_that_failed(home: Home, calls: Calls) -> None:
    """§4: a wake is the definition's own will, not an automatic resume: as in a process that had stayed."""
    wf = approved(calls)
    calls.adder(wf)("bad")
    calls.broken = {"bad"}
    run_id = await waits(home, wf)
    async with home.engine(wf, wake=True):
        await decide(home, run_id, "ap")
        await comes(home, run_id, "failed")
    assert dict(calls) == {"order": 1, "pay": 1, "bad": 1}


async def test_many_engines_wake_it_once(sqlite_home: Home, calls: Calls) -> None:
    home, wf = sqlite_home, approved(calls)
    ids = [await waits(home, wf) for _ in range(5)]
    async with (
        home.engine(wf, wake=True), home.engine(wf, wake=True), home.engine(wf, wake=True)
    ):  # fmt: skip
        for run_id in ids:
            await decide(home, run_id, "ap")
        for run_id in ids:
            await comes(home, run_id, "completed")
    assert dict(calls) == {"order": 5, "pay": 5}


async def test_a_woken_run_that_waits_again_is_woken_again(home: Home, calls: Calls) -> None:
    wf = Workflow("w")
    for n in range(3):
        wf.approval(f"ap{n}", depends_on=f"ap{n - 1}" if n else ())
        wf.sleep(f"nap{n}", 0.05, depends_on=f"ap{n}")
    run_id = await waits(home, wf)
    async with home.engine(wf, wake=True):
        for n in range(3):
            async with asyncio.timeout(10):
                nodes = (await home.info(run_id)).nodes
                while nodes[f"ap{n}"].status != "waiting":
                    await asyncio.sleep(0.02)
                    nodes = (await home.info(run_id)).nodes
            await decide(home, run_id, f"ap{n}")
        await comes(home, run_id, "completed")


async def test_a_closed_engine_leaves_it_waiting(home: Home, calls: Calls) -> None:
    """The engine is left while a call stays for a person: `waiting`, not interrupted; it can be resumed."""
    wf = approved(calls)
    async with home.engine(wf) as engine:
        task = asyncio.create_task(engine.run(wf, wait="all"))
        (info,) = await _until_waiting(engine)
    result = await task
    assert (result.status, result.reason) == (RunStatus.WAITING, "approval")
    assert (await home.info(info.run_id)).status == "waiting"
    await decide(home, info.run_id, "ap")
    assert (await home.go_on(wf, info.run_id))["pay"] == [42, ""]


async def test_a_cancelled_call_leaves_it_waiting(home: Home, calls: Calls) -> None:
    wf = approved(calls)
    async with home.engine(wf) as engine:
        task = asyncio.create_task(engine.run(wf, wait="all"))
        (info,) = await _until_waiting(engine)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await engine.get(info.run_id)).status == "waiting"
        await engine.decide(info.run_id, "ap")
        assert (await engine.resume(info.run_id)).status is RunStatus.COMPLETED


async def test_cancel_of_a_run_that_stays(home: Home, calls: Calls) -> None:
    """From another engine: the owner hears of it within a second, and nothing runs any more."""
    wf = approved(calls)
    async with home.engine(wf) as engine:
        task = asyncio.create_task(engine.run(wf, wait="all", raise_on_failure=False))
        (info,) = await _until_waiting(engine)
        async with home.engine() as other:
            await other.cancel(info.run_id, by="dan")
        async with asyncio.timeout(2):
            assert (await task).status is RunStatus.CANCELLED
    assert calls["pay"] == 0


# -- letters that come as a run is let go of ------------------------------------------------------------


def lets_go(unit: Unit, record: Record) -> bool:
    return record.kind == "run.waiting"


async def test_a_word_that_comes_as_the_run_is_let_go_of(home: Home, calls: Calls) -> None:
    """The letter is durable before the record that lets go, and nobody has looked at it: it wakes the run."""
    wf = approved(calls)
    slow: list[SlowStore] = []

    def wrap(store: Store) -> Any:
        slow.append(SlowStore(store, lets_go))
        return slow[0]

    async with home.engine(wf, wrap=wrap) as engine:
        task = asyncio.create_task(engine.run(wf))
        await settle(lambda: bool(slow))
        await slow[0].reached.wait()
        run_id = next(iter(engine._runs))
        await decide(home, run_id, "ap", by="ann")
        slow[0].gate.set()
        assert (await task).status is RunStatus.WAITING
    async with home.engine(wf, wake=True):
        await comes(home, run_id, "completed")
    assert dict(calls) == {"order": 1, "pay": 1}


async def test_a_cancel_that_comes_as_the_run_is_let_go_of(home: Home, calls: Calls) -> None:
    """A cancel that was accepted is never lost: nothing of the run goes on after it."""
    wf = approved(calls)
    slow: list[SlowStore] = []

    def wrap(store: Store) -> Any:
        slow.append(SlowStore(store, lets_go))
        return slow[0]

    async with home.engine(wf, wrap=wrap) as engine:
        task = asyncio.create_task(engine.run(wf, raise_on_failure=False))
        await settle(lambda: bool(slow))
        await slow[0].reached.wait()
        run_id = next(iter(engine._runs))
        async with home.engine() as other:
            await other.cancel(run_id, by="dan")
        slow[0].gate.set()
        await task
    await decide_if_it_waits(home, run_id)
    async with home.engine(wf) as engine:
        with pytest.raises(RunCancelled):
            await engine.resume(run_id)
    assert (await home.info(run_id)).status == "cancelled"
    assert calls["pay"] == 0


async def decide_if_it_waits(home: Home, run_id: str) -> None:
    try:
        await decide(home, run_id, "ap")
    except NotWaiting:
        return


class LooksAway(StoreWrapper):
    """Lets something happen between the look at a run and the letter to it."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.reached, self.gate = asyncio.Event(), asyncio.Event()

    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        if any(record.kind == "run.cancel_requested" for unit in units for record in unit.records):
            self.reached.set()
            await self.gate.wait()
        return await self.inner.commit(units)


async def test_a_cancel_of_a_run_that_has_just_been_let_go_of(home: Home, calls: Calls) -> None:
    """The owner lived when the canceller looked, and let go before its letter was written."""
    wf = approved(calls)
    away: list[LooksAway] = []

    def wrap(store: Store) -> Any:
        away.append(LooksAway(store))
        return away[0]

    async with home.engine(wrap=wrap) as other:
        async with home.engine(wf) as engine:
            task = asyncio.create_task(engine.run(wf, wait="all"))
            (info,) = await _until_waiting(engine)
            cancelling = asyncio.create_task(other.cancel(info.run_id))
            await away[0].reached.wait()
        assert (await task).status is RunStatus.WAITING
        away[0].gate.set()
        await cancelling
    assert (await home.info(info.run_id)).status == "cancelled"


class LateClaim(StoreWrapper):
    """Holds the answer about a claim that is durable already."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.reached, self.gate = asyncio.Event(), asyncio.Event()

    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        outcomes = await self.inner.commit(units)
        if any(record.kind == "run.claimed" for unit in units for record in unit.records):
            self.reached.set()
            await self.gate.wait()
        return outcomes


async def test_a_word_that_comes_as_the_run_is_taken_up(home: Home, calls: Calls) -> None:
    """The claim is durable and its owner does not know yet; the letter is read by then, and not lost."""
    wf = approved(calls)
    run_id = await waits(home, wf)
    late: list[LateClaim] = []

    def wrap(store: Store) -> Any:
        late.append(LateClaim(store))
        return late[0]

    async with home.engine(wf, wrap=wrap) as engine:
        task = asyncio.create_task(engine.resume(run_id, wait="all"))
        await settle(lambda: bool(late))
        await late[0].reached.wait()
        await decide(home, run_id, "ap", by="ann")
        await asyncio.sleep(0.6)  # the engine looks for letters meanwhile, twice
        late[0].gate.set()
        async with asyncio.timeout(3):
            assert (await task)["pay"] == [42, "ann"]


async def test_a_sleep_that_ends_as_the_run_is_taken_up(home: Home, calls: Calls) -> None:
    """The claim is on its way when the time is over: nothing is written in a run that is not ours yet."""
    wf = Workflow("sleeps")
    wf.sleep("nap", 0.3)
    run_id = await waits(home, wf, wait="none")
    late: list[LateClaim] = []

    def wrap(store: Store) -> Any:
        late.append(LateClaim(store))
        return late[0]

    async with home.engine(wf, wrap=wrap) as engine:
        task = asyncio.create_task(engine.resume(run_id))
        await settle(lambda: bool(late))
        await late[0].reached.wait()
        await asyncio.sleep(0.4)
        late[0].gate.set()
        assert (await task).status is RunStatus.COMPLETED


@pytest.mark.timeout(120)
async def test_words_at_any_moment(home: Home, calls: Calls) -> None:
    """Many rounds: somebody decides at a random moment of a run that is let go of; with one engine that wakes
    it always ends, and never pays twice.
    """
    wf = approved(calls)
    async with home.engine(wf, wake=True) as engine, home.engine() as other:
        ids = []
        for turn in range(25):
            handle = asyncio.create_task(engine.run(wf, wait="none"))
            await settle(lambda turn=turn: calls["order"] > turn)  # type: ignore[misc]
            run_id = next(iter(engine._runs), None) or (await handle).run_id
            ids.append(run_id)
            for _ in range(turn * 3):
                await asyncio.sleep(0)
            while True:
                try:
                    await other.decide(run_id, "ap")
                    break
                except NotWaiting:
                    await asyncio.sleep(0)
            await handle
        for run_id in ids:
            await comes(home, run_id, "completed")
    assert dict(calls) == {"order": 25, "pay": 25}


# -- held paths -----------------------------------------------------------------------------------------


def changing(calls: Calls, value: int, version: str) -> Workflow:
    """top gives another value under another `version=`; what is below it is not idempotent."""
    wf, below = Workflow("changing"), Workflow("below")

    @wf.node(idempotent=True, version=version)
    async def top() -> int:
        calls.began("top")
        return value

    @below.node
    async def pay(top: int) -> str:
        calls.began("pay")
        return f"paid {top}"

    @below.node(idempotent=True)
    async def tell(pay: str) -> str:
        calls.began("tell")
        return f"told {pay}"

    wf.subworkflow("sub", below)

    @wf.node(idempotent=True)
    async def last(sub: str) -> str:
        calls.began("last")
        return sub

    return wf


async def hold(home: Home, calls: Calls) -> tuple[Workflow, str]:
    """Get the path `sub/pay` held: it completed with what another version of `top` had given."""
    calls.broken = {"last"}
    run_id = (await home.run(changing(calls, 1, "1"))).run_id
    calls.mend()
    wf = changing(calls, 2, "2")
    held = await home.resume(wf, run_id, force=True)
    assert (held.status, held.reason) == (RunStatus.WAITING, "held")
    assert dict(calls) == {"top": 1}
    calls.mend()
    return wf, run_id


async def test_a_held_path_runs_again_if_a_person_says_so(home: Home, calls: Calls) -> None:
    wf, run_id = await hold(home, calls)
    plan = await home.plan(wf, run_id, items=True)
    assert plan["sub/pay"].action == "hold"
    assert (await home.go_on(wf, run_id)).status is RunStatus.WAITING
    assert not calls
    await decide(home, run_id, "sub/pay", True, by="ann")
    result = await home.go_on(wf, run_id)
    assert result["last"] == "told paid 2"
    assert dict(calls) == {"pay": 1, "tell": 1, "last": 1}
    assert (await home.info(run_id)).nodes["sub/pay"].attempt == 2


async def test_a_held_path_keeps_what_it_gave_if_a_person_says_so(home: Home, calls: Calls) -> None:
    wf, run_id = await hold(home, calls)
    await decide(home, run_id, "sub/pay", False, by="ann")
    assert (await home.plan(wf, run_id))["sub/pay"].action == "reuse"
    result = await home.go_on(wf, run_id)
    assert result["last"] == "told paid 1"
    assert result.outputs["sub/pay"] == "paid 1"
    assert dict(calls) == {"last": 1}
    again = await home.resume(wf, run_id)
    assert list(again.executed) == []
    async with home.engine(wf) as engine:
        assert (await engine.result(run_id)).outputs["sub/pay"] == "paid 1"


async def test_a_held_path_is_decided_while_its_run_stays(home: Home, calls: Calls) -> None:
    for yes, gives in [(True, "told paid 2"), (False, "told paid 1")]:
        wf, run_id = await hold(home, calls)
        async with home.engine(wf) as engine:
            task = asyncio.create_task(engine.resume(run_id, wait="all"))
            await settle(lambda engine=engine, run_id=run_id: run_id in engine._runs)  # type: ignore[misc]
            await engine.decide(run_id, "sub/pay", yes)
            assert (await task)["last"] == gives
        calls.mend()


async def test_held_twice_and_back_again(home: Home, calls: Calls) -> None:
    """While it is held the parent gives the first value again: nothing has changed, nobody is asked."""
    _, run_id = await hold(home, calls)
    wf = changing(calls, 1, "3")
    result = await home.resume(wf, run_id, force=True)
    assert result["last"] == "told paid 1"
    assert dict(calls) == {"top": 1, "last": 1}


async def test_a_retry_runs_what_is_held(home: Home, calls: Calls) -> None:
    """A person's word about everything failed, interrupted, uncertain or held."""
    wf, run_id = await hold(home, calls)
    assert (await home.retry(wf, run_id))["last"] == "told paid 2"
    assert dict(calls) == {"pay": 1, "tell": 1, "last": 1}


async def test_held_items_are_decided_one_by_one(home: Home, calls: Calls) -> None:
    """Two items of a map changed: one runs again, one keeps what it gave."""

    def spread(values: list[str], version: str) -> Workflow:
        wf = Workflow("spread")

        @wf.node(idempotent=True, version=version)
        async def top() -> list[str]:
            return values

        @wf.node(for_each={"item": "top"})
        async def pay(item: str) -> str:
            calls.began(f"pay {item}")
            return f"paid {item}"

        @wf.node
        async def last(pay: list[str]) -> list[str]:
            calls.began("last")
            return pay

        return wf

    calls.broken = {"last"}
    run_id = (await home.run(spread(["a", "b", "c"], "1"))).run_id
    calls.mend()
    wf = spread(["A", "b", "C"], "2")
    held = await home.resume(wf, run_id, force=True)
    assert (held.status, held.reason) == (RunStatus.WAITING, "held")
    await decide(home, run_id, "pay[0]", True)
    still = await home.go_on(wf, run_id)
    assert still.status is RunStatus.WAITING
    await decide(home, run_id, "pay[2]", False)
    result = await home.go_on(wf, run_id)
    assert result["last"] == ["paid A", "paid b", "paid c"]
    assert dict(calls) == {"pay A": 1, "last": 1}


@pytest.mark.parametrize("stays", [True, False])
async def test_what_waits_in_a_cancelled_run_waits_no_more(home: Home, calls: Calls, stays: bool) -> None:
    """Who asks for what waits finds nothing of a cancelled run; a retry asks anew."""
    wf = approved(calls)
    if stays:
        async with home.engine(wf) as engine:
            handle = await engine.start(wf)
            run_id = handle.run_id
            await comes_to(engine, run_id, "ap")
            await handle.cancel()
    else:
        run_id = await waits(home, wf)
        async with home.engine() as engine:
            await engine.cancel(run_id)
    assert await home.statuses(run_id) == {"order": "completed", "ap": "cancelled", "pay": "pending"}
    again = await home.retry(wf, run_id, "ap", wait="none")
    assert again.status is RunStatus.WAITING
    await decide(home, run_id, "ap", by="ann")
    assert (await home.resume(wf, run_id))["pay"] == [42, "ann"]
    assert calls == {"order": 1, "pay": 1}


async def comes_to(engine: Engine, run_id: str, path: str) -> None:
    """Wait until a path waits."""
    async for event in engine.events(run_id, follow=True):
        if (event.kind, event.path) == ("node.waiting", path):
            return


async def test_keys_of_cancelled_waits_are_free(home: Home, calls: Calls) -> None:
    wf = approved(calls)
    run_id = await waits(home, wf, key="k")
    async with home.engine() as engine:
        await engine.cancel(run_id)
    assert await waits(home, wf, key="k") != run_id


# -- processes ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nursery() -> Iterator[Zygote]:
    """A process that has imported the plays."""
    with Zygote("tests.engine.plays") as zygote:
        yield zygote


def play(nursery: Zygote, folder: Path, name: str, **arguments: Any) -> Any:
    return nursery.call(f"tests.engine.plays:{name}", folder, **arguments)


def told(nursery: Zygote, folder: Path, name: str, **arguments: Any) -> Any:
    ended = play(nursery, folder, name, **arguments).wait()
    assert ended.error is None
    return ended.told


def test_an_approval_from_another_process(nursery: Zygote, tmp_path: Path) -> None:
    """B9, B142: the first process is gone when the second decides, a third goes on."""
    assert told(nursery, tmp_path, "go", flow="pays")["status"] == "waiting"
    assert told(nursery, tmp_path, "say", approve=True, by="ann") == {"said": True}
    ended = told(nursery, tmp_path, "go", flow="pays")
    assert ended["outputs"]["pay"] == "42 by ann"
    assert world(tmp_path) == ["order", "ready ann", "pay ann"]
    assert told(nursery, tmp_path, "say", approve=True, by="bob") == {"said": True}
    assert told(nursery, tmp_path, "say", approve=False, by="bob")["error"] == "AlreadyDecided"
    assert told(nursery, tmp_path, "go", flow="pays")["outputs"]["pay"] == "42 by ann"
    assert world(tmp_path).count("pay ann") == 1


@pytest.mark.parametrize("turn", range(3))
def test_two_processes_decide_at_once(nursery: Zygote, tmp_path: Path, turn: int) -> None:
    """B139: one True, one False, a barrier: one of them wins, durably, and the other is told so."""
    told(nursery, tmp_path, "go", flow="pays")
    children = [
        play(nursery, tmp_path, "say", approve=yes, by=by, gate="open")
        for yes, by in [(True, "a"), (False, "b")]
    ]
    until(lambda: {"ready a", "ready b"} <= set(world(tmp_path)))
    (tmp_path / "open").touch()
    said = [child.wait().told for child in children]
    assert sum("said" in each for each in said) == 1
    (loser,) = [each for each in said if "said" not in each]
    assert loser["error"] == "AlreadyDecided"
    yes = "said" in said[0]
    ended = told(nursery, tmp_path, "go", flow="pays")
    if yes:
        assert ended["outputs"]["pay"] == "42 by a"
    else:
        assert ended["error"] == "RunFailed"
    assert sum(line.startswith("pay") for line in world(tmp_path)) == yes


def test_a_sleep_over_several_processes(nursery: Zygote, tmp_path: Path) -> None:
    """The process that began it is killed; its end stays where it was."""
    child = play(nursery, tmp_path, "go", flow="sleeps")
    until(lambda: autopsy(tmp_path / "runs.db").last.get("nap") == ("node.waiting", "sleep"))
    child.kill()
    assert child.wait().killed
    ended = told(nursery, tmp_path, "go", flow="sleeps", how="resume")
    assert ended["outputs"]["behind"] == "awake"
    assert world(tmp_path) == ["before", "behind"]


def test_an_engine_that_wakes_in_another_process(nursery: Zygote, tmp_path: Path) -> None:
    """B9: waiting begun here, decided there, gone on with in a third process, within a second."""
    told(nursery, tmp_path, "go", flow="pays")
    waker = play(nursery, tmp_path, "wake", flow="pays")
    until(lambda: "here" in world(tmp_path))
    told(nursery, tmp_path, "say", approve=True, by="ann")
    until(lambda: autopsy(tmp_path / "runs.db").status == "completed", seconds=5)
    assert world(tmp_path).count("pay ann") == 1
    waker.kill()
    assert waker.wait().killed


def test_a_waiting_run_is_cancelled_from_another_process(nursery: Zygote, tmp_path: Path) -> None:
    told(nursery, tmp_path, "go", flow="pays")
    assert told(nursery, tmp_path, "cancel", by="dan") == "cancelled"
    assert told(nursery, tmp_path, "go", flow="pays", how="resume")["error"] == "RunCancelled"
    assert told(nursery, tmp_path, "go", flow="pays")["status"] == "waiting", "its key is free"


def test_killed_while_it_stays_for_a_person(nursery: Zygote, tmp_path: Path) -> None:
    """The process that stayed is killed; the word goes to nobody, and is there for who comes."""
    child = play(nursery, tmp_path, "go", flow="pays", wait="all")
    until(lambda: autopsy(tmp_path / "runs.db").last.get("ap") == ("node.waiting", "approval"))
    child.kill()
    assert child.wait().killed
    assert told(nursery, tmp_path, "say", approve=True, by="ann") == {"said": True}
    assert told(nursery, tmp_path, "go", flow="pays", how="resume")["outputs"]["pay"] == "42 by ann"
    assert world(tmp_path) == ["order", "ready ann", "pay ann"]


async def test_every_item_of_a_wide_map_of_graphs_can_wait_at_once(home: Home, calls: Calls) -> None:
    """A person sees all that waits for a word, however many graphs an engine would run at once."""
    inner, wf = Workflow("inner", idempotent=True), Workflow("w", idempotent=True)

    @inner.node
    async def draft(n: int) -> int:
        calls.began("draft")
        return n

    inner.approval("ok", depends_on=draft)
    wf.subworkflow("each", inner, for_each={"n": "numbers"})
    async with home.engine(wf, concurrency=4) as engine:
        result = await engine.run(wf, {"numbers": list(range(30))})
        info = await engine.get(result.run_id)
        waiting = [path for path, node in info.nodes.items() if path.endswith("/ok")]
        assert len(waiting) == 30
        for path in waiting:
            await engine.decide(result.run_id, path)
        assert (await engine.resume(result.run_id)).status is RunStatus.COMPLETED
    assert calls["draft"] == 30
