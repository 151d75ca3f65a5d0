"""What happened to one path each time its run was driven, and why; and the run as it was at any event."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dagresume import DefinitionError, Explanation, InputError, RunStatus, Workflow
from dagresume.explain import Step
from tests.engine.kit import Calls, Home


async def explained(home: Home, run_id: str, path: str) -> Explanation:
    async with home.engine() as engine:  # which knows no code
        return await engine.explain(run_id, path)


def told(explanation: Explanation) -> list[tuple[str, str, str | None]]:
    return [(step.drive, step.did, step.why) for step in explanation.steps]


def flow(calls: Calls, gives: list[int]) -> Workflow:
    wf = Workflow("flow", idempotent=True)

    @wf.node
    async def top() -> int:
        calls.began("top")
        return gives[0]

    @wf.node
    async def same() -> int:
        calls.began("same")
        return 0

    @wf.node
    async def left(top: int, same: int) -> int:
        calls.began("left")
        return top

    @wf.node
    async def end(left: int) -> int:
        calls.began("end")
        return left

    return wf


async def test_each_time_the_run_was_driven_is_a_step(home: Home, calls: Calls) -> None:
    wf, gives = flow(calls, [1]), [1]
    calls.broken = {"left"}
    run_id = (await home.run(wf)).run_id
    await home.resume(wf, run_id)
    calls.mend()
    await home.resume(wf, run_id)
    await home.retry(wf, run_id, "left")
    assert gives == [1]
    assert told(await explained(home, run_id, "left")) == [
        ("run", "ran", "new"),
        ("resume", "ran", "failed"),
        ("resume", "ran", "failed"),
        ("retry", "ran", "asked"),
    ]
    found = (await explained(home, run_id, "left")).steps
    assert [step.attempts for step in found] == [(1,), (2,), (3,), (4,)]
    assert [step.outcome for step in found] == ["failed", "failed", "completed", "completed"]
    assert told(await explained(home, run_id, "top")) == [
        ("run", "ran", "new"),
        ("resume", "reused", "completed"),
        ("resume", "reused", "completed"),
        ("retry", "reused", "completed"),
    ]
    assert [step.did for step in (await explained(home, run_id, "end")).steps] == [
        "not_reached",
        "not_reached",
        "ran",
        "ran",
    ]


async def test_what_had_changed_is_named(home: Home, calls: Calls) -> None:
    gives = [1]
    wf = flow(calls, gives)
    run_id = (await home.run(wf)).run_id
    gives[0] = 2
    result = await home.retry(wf, run_id, "top", only_changed=True)
    assert list(result.executed) == ["top", "left", "end"]
    step = (await explained(home, run_id, "left")).steps[-1]
    assert (step.did, step.why, step.changed) == ("ran", "input_changed", ("top",))
    assert "what it receives had changed: top" in str(step)
    assert (await explained(home, run_id, "end")).steps[-1].changed == ("left",)


async def test_items_rounds_and_inner_nodes_name_what_they_take(home: Home, calls: Calls) -> None:
    gives: dict[str, Any] = {"list": [1, 2], "factor": 1}
    inner = Workflow("inner", idempotent=True)

    @inner.node
    async def scale(x: int, factor: int) -> int:
        return x * factor

    wf = Workflow("outer", idempotent=True)

    @wf.node
    async def listed() -> list[int]:
        return list(gives["list"])

    @wf.node
    async def factor() -> int:
        return int(gives["factor"])

    @wf.node(for_each={"x": "listed"})
    async def one(x: int) -> int:
        return x

    @wf.node(for_each={"x": "one"})
    async def two(x: int) -> int:
        return x

    wf.subworkflow("each", inner, for_each={"x": "one"}, args={"factor": "factor"})
    run_id = (await home.run(wf)).run_id
    gives.update({"list": [1, 5], "factor": 1})
    await home.retry(wf, run_id, "listed", only_changed=True)
    assert (await explained(home, run_id, "one[1]")).steps[-1].changed == ("listed",)
    assert (await explained(home, run_id, "two[1]")).steps[-1].changed == ("one[1]",)
    assert told(await explained(home, run_id, "two[0]"))[-1] == ("retry", "reused", "completed")
    assert (await explained(home, run_id, "each[1]/scale")).steps[-1].changed == ("one[1]",)
    gives["factor"] = 3
    await home.retry(wf, run_id, "factor", only_changed=True)
    assert (await explained(home, run_id, "each[0]/scale")).steps[-1].changed == ("factor",)


async def test_code_that_changed_is_why(home: Home) -> None:
    def coded(edited: bool) -> Workflow:
        wf = Workflow("w")

        async def old() -> int:
            return 1

        async def new() -> int:
            return 2

        async def end(a: int) -> int:
            return a

        wf.node(id="a")(new if edited else old)
        wf.node(id="end")(end)
        return wf

    run_id = (await home.run(coded(False))).run_id
    await home.retry(coded(True), run_id, code_changed=True)
    first, second = (await explained(home, run_id, "a")).steps
    assert (second.did, second.why, second.code_changed) == ("ran", "code_changed", True)
    assert first.code != second.code
    assert told(await explained(home, run_id, "end"))[-1] == ("retry", "ran", "asked")


async def test_cut_off_waiting_skipped_and_copied(home: Home, calls: Calls) -> None:
    wf = Workflow("w", idempotent=True)
    began = asyncio.Event()
    calls.adder(wf)("first")
    wf.approval("ok", depends_on="first", prompt="?")

    @wf.node(depends_on="first")
    async def slow() -> None:
        if not began.is_set():
            began.set()
            await asyncio.Event().wait()

    @wf.node(args={"x": "first"}, when=lambda x: x == "never")
    async def rare(x: str) -> None: ...

    async with home.engine(wf, grace_seconds=0.0) as engine:
        run_id = (await engine.start(wf)).run_id
        await began.wait()
    await home.resume(wf, run_id)
    assert told(await explained(home, run_id, "slow")) == [
        ("run", "ran", "new"),
        ("resume", "ran", "interrupted"),
    ]
    assert told(await explained(home, run_id, "ok"))[-1] == ("resume", "waited", "approval")
    assert told(await explained(home, run_id, "rare"))[0] == ("run", "skipped", "condition")
    async with home.engine(wf) as engine:
        await engine.decide(run_id, "ok")
        await engine.resume(run_id)
        fork = await engine.fork(run_id, "slow")
    assert told(await explained(home, fork.run_id, "first")) == [("fork", "copied", None)]
    assert told(await explained(home, fork.run_id, "slow")) == [("fork", "ran", "new")]


async def test_it_reads_as_a_text(home: Home, calls: Calls) -> None:
    wf = flow(calls, [1])
    calls.broken = {"left"}
    run_id = (await home.run(wf)).run_id
    calls.mend()
    await home.resume(wf, run_id)
    lines = str(await explained(home, run_id, "left")).splitlines()
    assert lines[0] == f"left in run {run_id}"
    assert "run: ran: nothing of it was recorded yet; attempt 1; failed" in lines[1]
    assert "resume: ran again: it had failed; attempt 2; completed" in lines[2]
    assert all(isinstance(step, Step) for step in (await explained(home, run_id, "left")).steps)


@pytest.mark.parametrize(
    ("path", "says"), [("lef", "Did you mean 'left'"), ("left[", "not a path"), ("left/x", "no node 'x'")]
)
async def test_a_path_that_is_not_there_is_told(home: Home, calls: Calls, path: str, says: str) -> None:
    run_id = (await home.run(flow(calls, [1]))).run_id
    with pytest.raises(DefinitionError, match=says):
        await explained(home, run_id, path)


async def test_an_item_past_the_end_of_its_map_is_not_there(home: Home, calls: Calls) -> None:
    wf = Workflow("flow", idempotent=True)

    @wf.node(for_each={"n": "numbers"})
    async def item(n: int) -> int:
        return n

    run_id = (await home.run(wf, {"numbers": [1, 2]})).run_id
    assert told(await explained(home, run_id, "item[1]")) == [("run", "ran", "new")]
    with pytest.raises(DefinitionError, match=r"item\[2\].*item has 2 items"):
        await explained(home, run_id, "item[2]")


async def test_the_run_as_it_was_at_any_event(home: Home, calls: Calls) -> None:
    wf = flow(calls, [1])
    calls.broken = {"left"}
    run_id = (await home.run(wf)).run_id
    failed = (await home.events(run_id))[-1].seq
    calls.mend()
    await home.resume(wf, run_id)
    events = await home.events(run_id)
    async with home.engine() as engine:
        past = await engine.get(run_id, at=failed)
        assert (past.status, past.nodes["left"].status) == (RunStatus.FAILED, "failed")
        assert past.nodes["end"].status == "upstream_failed"
        assert list(past.failures) == ["left"]
        running = await engine.get(run_id, at=events[0].seq)
        assert (running.status, running.finished_at) == (RunStatus.RUNNING, None)
        assert {node.status for node in running.nodes.values()} == {"pending"}
        now, last = await engine.get(run_id), await engine.get(run_id, at=events[-1].seq)
        assert now == last
        assert last.status is RunStatus.COMPLETED
        with pytest.raises(InputError, match="did not exist"):
            await engine.get(run_id, at=events[0].seq - 1)
