"""What a stored run means when the definition, the code or a node's version is another now."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from dagresume import NodeStatus, Retry, RunStatus, VersionMismatch, Workflow, WorkflowNotRegistered
from tests.engine.kit import Calls, Home


def straight(calls: Calls, *, middle: bool = False, version: str = "1", **options: Any) -> Workflow:
    wf = Workflow("flow", version=version)
    add = calls.adder(wf)
    add("a")
    if middle:
        add("n", "a")
    add("b", "n" if middle else "a", **options)
    return wf


async def test_a_node_more_is_refused_by_name(home: Home, calls: Calls) -> None:
    """B88: by resume, by retry and by key; nothing is changed."""
    calls.broken = {"b"}
    run_id = (await home.run(straight(calls), key="k")).run_id
    calls.mend()
    changed = straight(calls, middle=True)
    before = await home.events(run_id)
    async with home.engine(changed) as engine:
        for ask in (
            functools.partial(engine.resume, run_id),
            functools.partial(engine.retry, run_id),
            functools.partial(engine.run, changed, key="k"),
        ):
            with pytest.raises(VersionMismatch, match=r"node n added.*force") as caught:
                await ask()
            assert any("n added" in each for each in caught.value.differences)
    assert await home.events(run_id) == before
    assert not calls


async def test_forced_it_goes_on_with_the_new_definition(home: Home, calls: Calls) -> None:
    """B88: n runs, a does not."""
    calls.broken = {"b"}
    run_id = (await home.run(straight(calls))).run_id
    calls.mend()
    changed = straight(calls, middle=True)
    result = await home.resume(changed, run_id, force=True)
    assert result.status is RunStatus.COMPLETED
    assert dict(calls) == {"n": 1, "b": 1}
    calls.mend()  # from now on it is a run of the new definition
    assert (await home.resume(changed, run_id)).status is RunStatus.COMPLETED
    assert set((await home.info(run_id)).nodes) == {"a", "n", "b"}
    async with home.engine(straight(calls)) as engine:
        with pytest.raises(VersionMismatch, match="n removed"):
            await engine.retry(run_id, "b")


async def test_a_node_less_forced(home: Home, calls: Calls) -> None:
    calls.broken = {"b"}
    run_id = (await home.run(straight(calls, middle=True))).run_id
    calls.mend()
    result = await home.resume(straight(calls), run_id, force=True)
    assert result.status is RunStatus.COMPLETED
    assert dict(calls) == {"b": 1}
    assert "n" not in result.outputs


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"trigger": "all_done"}, "trigger"),
        ({"retry": Retry(3)}, "retry"),
        ({"timeout": 5.0}, "timeout"),
        ({"idempotent": True}, "idempotent"),
    ],
)
async def test_another_option_is_refused_by_name(
    home: Home, calls: Calls, options: dict[str, Any], says: str
) -> None:
    """B89: a join rule that changed is never taken up silently."""
    calls.broken = {"b"}
    run_id = (await home.run(straight(calls))).run_id
    async with home.engine(straight(calls, **options)) as engine:
        with pytest.raises(VersionMismatch, match=rf"node b.*{says}"):
            await engine.resume(run_id)


async def test_another_version_is_another_workflow(home: Home, calls: Calls) -> None:
    """R15: (name, version) among the workflows given to the engine."""
    calls.broken = {"b"}
    first, second = straight(calls), straight(calls, version="2")
    run_id = (await home.run(first, key="k")).run_id
    calls.mend()
    async with home.engine(second) as engine:
        with pytest.raises(VersionMismatch, match=r"'1'.*'2'"):
            await engine.resume(run_id)
        with pytest.raises(VersionMismatch):
            await engine.run(second, key="k")
        engine.register(first)
        assert (await engine.resume(run_id)).status is RunStatus.COMPLETED
    other = Workflow("another")
    async with home.engine(other) as engine:
        with pytest.raises(WorkflowNotRegistered, match="flow"):
            await engine.plan(run_id)


async def test_other_code_changes_nothing_by_itself(home: Home, calls: Calls) -> None:
    """The code hash never makes a completed path run."""

    def make(value: int) -> Workflow:
        wf = Workflow("code")
        if value == 1:

            @wf.node
            async def a() -> int:
                calls.began("a")
                return 1
        else:

            @wf.node
            async def a() -> int:
                calls.began("a")
                return 2

        @wf.node
        async def b(a: int) -> int:
            calls.began("b")
            return a

        return wf

    calls.broken = {"b"}
    run_id = (await home.run(make(1))).run_id
    calls.mend()
    result = await home.resume(make(2), run_id)
    assert result["b"] == 1
    assert dict(calls) == {"b": 1}


def versioned(calls: Calls, version: str, value: int, *, idempotent: bool = True) -> Workflow:
    wf = Workflow("versioned", idempotent=idempotent)

    @wf.node(version=version, idempotent=True)
    async def a() -> int:
        calls.began("a")
        return value

    @wf.node
    async def b(a: int) -> int:
        calls.began("b")
        return a * 10

    @wf.node
    async def c(b: int) -> int:
        calls.began("c")
        return b + 1

    @wf.node
    async def beside() -> int:
        calls.began("beside")
        return 5

    @wf.node
    async def end(c: int, beside: int) -> int:
        calls.began("end")
        return c + beside

    return wf


async def test_an_early_cut_off(home: Home, calls: Calls) -> None:
    """A parent that ran again because something changed and came out the same: its children are reused."""
    calls.broken = {"end"}
    run_id = (await home.run(versioned(calls, "1", 3))).run_id
    calls.mend()
    wf = versioned(calls, "2", 3)
    plan = await home.plan(wf, run_id)
    assert [plan[n].action for n in ("a", "b", "c", "beside", "end")] == [
        "run",
        "check",
        "check",
        "reuse",
        "run",
    ]
    result = await home.resume(wf, run_id)
    assert dict(calls) == {"a": 1, "end": 1}
    assert result["end"] == 36
    assert set(result.reused) == {"b", "c", "beside"}


async def test_a_really_changed_input_runs_what_is_idempotent(home: Home, calls: Calls) -> None:
    calls.broken = {"end"}
    run_id = (await home.run(versioned(calls, "1", 3))).run_id
    calls.mend()
    result = await home.resume(versioned(calls, "2", 4), run_id)
    assert dict(calls) == {"a": 1, "b": 1, "c": 1, "end": 1}
    assert result["end"] == 46


async def test_a_really_changed_input_holds_what_is_not(home: Home, calls: Calls) -> None:
    """C3: the run waits, the old output is kept, what is below does not run."""
    calls.broken = {"end"}
    run_id = (await home.run(versioned(calls, "1", 3, idempotent=False))).run_id
    calls.mend()
    wf = versioned(calls, "2", 4, idempotent=False)
    plan = await home.plan(wf, run_id)
    assert plan["b"].action == "check"
    assert plan["end"].action == "check"  # it does not run if b is held
    result = await home.resume(wf, run_id)
    assert (result.status, result.reason) == (RunStatus.WAITING, "held")
    assert dict(calls) == {"a": 1}
    info = await home.info(run_id)
    assert (info.nodes["b"].status, info.nodes["b"].reason) == (NodeStatus.WAITING, "held")
    plan = await home.plan(wf, run_id)
    assert plan["b"].action == "hold"
    assert plan["end"].action != "run"
    again = await home.resume(wf, run_id)  # resume alone changes nothing
    assert again.status is RunStatus.WAITING
    assert dict(calls) == {"a": 1}
    calls.mend()
    result = await home.retry(wf, run_id)  # b, on a person's word; now what c receives has changed too
    assert (result.status, result.reason) == (RunStatus.WAITING, "held")
    result = await home.retry(wf, run_id)
    assert result.status is RunStatus.COMPLETED
    assert result["end"] == 46
    assert dict(calls) == {"b": 1, "c": 1, "end": 1} or dict(calls) == {"b": 1, "end": 1}


async def test_a_version_of_a_node_is_no_other_definition(home: Home, calls: Calls) -> None:
    calls.broken = {"end"}
    run_id = (await home.run(versioned(calls, "1", 3), key="k")).run_id
    calls.mend()
    assert (await home.run(versioned(calls, "9", 3), key="k")).run_id == run_id


async def test_a_renamed_function_of_one_node_is_no_other_definition(home: Home, calls: Calls) -> None:
    """Definition hash: nodes, edges and options, never code."""

    def make(which: int) -> Workflow:
        wf = Workflow("names")

        async def one() -> int:
            calls.began("x")
            return 1

        async def two() -> int:
            calls.began("x")
            return 1

        wf.node(id="x")(one if which == 1 else two)
        return wf

    calls.broken = {"x"}
    run_id = (await home.run(make(1))).run_id
    calls.mend()
    assert (await home.resume(make(2), run_id)).status is RunStatus.COMPLETED
