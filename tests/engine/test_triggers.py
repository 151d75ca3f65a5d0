"""Branches, joins and failures that are dealt with."""

from __future__ import annotations

from typing import Any

import pytest

from dagresume import Context, NodeStatus, RunStatus, Workflow
from dagresume.policy import Trigger
from tests.engine.kit import Boom, Calls, Home

COMPLETED, SKIPPED, FAILED, BLOCKED = "completed", "skipped", "failed", "upstream_failed"

# trigger → how the parents ended → how the child ends. Typed by hand from DESIGN §4 and CASES B121 B122 B124.
TABLE: list[tuple[Trigger, tuple[str, ...], str]] = [
    ("none_failed", (COMPLETED, COMPLETED), COMPLETED),
    ("none_failed", (COMPLETED, SKIPPED), COMPLETED),
    ("none_failed", (SKIPPED, SKIPPED), SKIPPED),
    ("none_failed", (COMPLETED, FAILED), BLOCKED),
    ("none_failed", (COMPLETED, BLOCKED), BLOCKED),
    ("none_failed", (SKIPPED, FAILED), BLOCKED),
    ("all_success", (COMPLETED, COMPLETED), COMPLETED),
    ("all_success", (COMPLETED, SKIPPED), SKIPPED),
    ("all_success", (COMPLETED, FAILED), BLOCKED),
    ("all_success", (SKIPPED, FAILED), BLOCKED),
    ("any_success", (COMPLETED, FAILED), COMPLETED),
    ("any_success", (COMPLETED, SKIPPED), COMPLETED),
    ("any_success", (SKIPPED, SKIPPED), SKIPPED),
    ("any_success", (FAILED, BLOCKED), BLOCKED),
    ("all_done", (COMPLETED, COMPLETED), COMPLETED),
    ("all_done", (SKIPPED, SKIPPED), COMPLETED),
    ("all_done", (FAILED, BLOCKED), COMPLETED),
    ("any_failed", (COMPLETED, COMPLETED), SKIPPED),
    ("any_failed", (SKIPPED, SKIPPED), SKIPPED),
    ("any_failed", (COMPLETED, FAILED), COMPLETED),
    ("any_failed", (COMPLETED, BLOCKED), COMPLETED),
]


@pytest.mark.parametrize(("trigger", "parents", "ends"), TABLE)
async def test_a_join_follows_its_rule(
    home: Home, calls: Calls, trigger: Trigger, parents: tuple[str, ...], ends: str
) -> None:
    """B121, B122, B124: live, in the store, and again on resume."""
    wf = Workflow("join")
    add = calls.adder(wf)
    add("ok")
    add("bad")
    calls.broken = {"bad"}
    for n, how in enumerate(parents):
        if how == FAILED:
            add(f"p{n}", "ok")
            calls.broken.add(f"p{n}")
        elif how == SKIPPED:
            add(f"p{n}", "ok", trigger="any_failed")
        else:
            add(f"p{n}", "bad" if how == BLOCKED else "ok")
    seen: dict[str, Any] = {}

    @wf.node(depends_on=["p0", "p1"], trigger=trigger)
    async def child(ctx: Context, p0: Any, p1: Any) -> None:
        seen.update(skipped=set(ctx.skipped), failures=set(ctx.failures), p0=p0, p1=p1)

    run_id = (await home.run(wf)).run_id
    for _ in range(2):
        states = await home.statuses(run_id)
        assert states["child"] == ends
        assert tuple(states[f"p{n}"] for n in range(2)) == parents
        if ends == COMPLETED:
            assert seen["skipped"] == {f"p{n}" for n, how in enumerate(parents) if how == SKIPPED}
            assert seen["failures"] == {f"p{n}" for n, how in enumerate(parents) if how in {FAILED, BLOCKED}}
            for n, how in enumerate(parents):
                assert seen[f"p{n}"] == (f"p{n}" if how == COMPLETED else None)
        else:
            assert not seen
        await home.resume(wf, run_id)  # nothing is mended: it ends the same


async def test_a_join_waits_for_all_its_parents(home: Home, calls: Calls) -> None:
    """B121: decided once, when all parents are settled: not at the first success."""
    wf = Workflow("wait")
    order = calls.order
    add = calls.adder(wf)
    add("quick")
    add("s1")
    add("s2", "s1")
    add("s3", "s2")

    @wf.node(trigger="any_success")
    async def join(quick: str, s3: str) -> tuple[str, str]:
        order.append("join")
        return quick, s3

    assert (await home.run(wf))[join] == ("quick", "s3")
    assert order[-1] == "join"


async def test_a_handled_failure_completes_the_run(home: Home, calls: Calls) -> None:
    """B08: and resume neither runs the failed node nor its handler again."""
    wf = Workflow("handled")
    add = calls.adder(wf)
    add("a")
    add("h", "a", trigger="any_failed")
    add("b", "h")
    calls.broken = {"a", "b"}
    first = await home.run(wf)
    assert list(first.failures) == ["b"]
    plan = await home.plan(wf, first.run_id)
    assert plan["a"].reason == "handled"
    assert plan["a"].action != "run"
    assert (plan["h"].action, plan["b"].action) == ("reuse", "run")
    calls.mend()
    result = await home.resume(wf, first.run_id)
    assert result.status is RunStatus.COMPLETED
    assert result.failures == {}
    assert dict(calls) == {"b": 1}
    info = await home.info(first.run_id)
    assert info.status is RunStatus.COMPLETED
    assert info.failures == {}
    assert info.nodes["a"].status is NodeStatus.FAILED


async def test_a_failed_handler_handles_nothing(home: Home, calls: Calls) -> None:
    """A failure is handled when an any_failed child has *completed*: on resume the node itself runs again."""
    wf = Workflow("bad handler")
    add = calls.adder(wf)
    add("a")
    add("h", "a", trigger="any_failed")
    calls.broken = {"a", "h"}
    first = await home.run(wf)
    assert list(first.failures) == ["a", "h"]
    calls.mend()
    result = await home.resume(wf, first.run_id)
    assert result.status is RunStatus.COMPLETED
    assert dict(calls) == {"a": 1}
    assert (await home.statuses(first.run_id))["h"] == "skipped"


async def test_all_done_runs_but_handles_nothing(home: Home, calls: Calls) -> None:
    wf = Workflow("cleanup")
    add = calls.adder(wf)
    add("a")
    add("clean", "a", trigger="all_done")
    calls.broken = {"a"}
    first = await home.run(wf)
    assert first.status is RunStatus.FAILED
    assert calls == {"a": 1, "clean": 1}
    calls.mend()
    result = await home.resume(wf, first.run_id)
    assert result.status is RunStatus.COMPLETED
    assert calls["a"] == 1


async def test_a_handled_failure_retried_from_there_unhandles_it(home: Home, calls: Calls) -> None:
    wf = Workflow("again")
    add = calls.adder(wf)
    add("a")
    add("h", "a", trigger="any_failed")
    calls.broken = {"a"}
    run_id = (await home.run(wf)).run_id
    calls.mend()
    result = await home.retry(wf, run_id, "a")
    assert result.status is RunStatus.COMPLETED
    assert dict(calls) == {"a": 1}
    assert await home.statuses(run_id) == {"a": "completed", "h": "skipped"}
    assert "h" not in result.outputs


async def test_retry_without_a_node_leaves_handled_failures_alone(home: Home, calls: Calls) -> None:
    wf = Workflow("left alone")
    add = calls.adder(wf)
    add("a")
    add("h", "a", trigger="any_failed")
    add("b")
    calls.broken = {"a", "b"}
    run_id = (await home.run(wf)).run_id
    calls.mend()
    await home.retry(wf, run_id)
    assert dict(calls) == {"b": 1}


async def test_ctx_failures_tell_what_happened(home: Home) -> None:
    wf = Workflow("tell")

    @wf.node
    async def a() -> None:
        raise Boom("the reason")

    @wf.node
    async def b(a: None) -> None: ...

    @wf.node(depends_on=["a", "b"], trigger="any_failed")
    async def h(ctx: Context) -> dict[str, tuple[str, str]]:
        return {name: (failure.path, failure.message) for name, failure in ctx.failures.items()}

    told = (await home.run(wf))[h]
    assert told["a"] == ("a", "the reason")
    assert set(told) == {"a", "b"}


async def test_ctx_failures_tell_it_on_resume_too(home: Home, calls: Calls) -> None:
    """C7."""
    wf = Workflow("tell later")

    @wf.node
    async def a() -> None:
        raise Boom("the reason")

    @wf.node
    async def other() -> int:
        calls.began("other")
        return 1

    @wf.node(depends_on=["a"], trigger="any_failed")
    async def h() -> int:
        return 1

    @wf.node(depends_on=["a"], trigger="all_done")
    async def last(ctx: Context, other: int) -> str:
        return ctx.failures["a"].message

    calls.broken = {"other"}
    run_id = (await home.run(wf)).run_id
    calls.mend()
    # other failed: last ran all the same, without it
    result = await home.retry(wf, run_id, "other")
    assert result[last] == "the reason"


async def test_a_failed_map_can_be_handled(home: Home, calls: Calls) -> None:
    wf = Workflow("map")

    @wf.node
    async def numbers() -> list[int]:
        return [0, 1]

    @wf.node(for_each={"n": "numbers"})
    async def item(n: int) -> int:
        calls.began(f"item {n}")
        return n

    @wf.node(depends_on=["item"], trigger="any_failed")
    async def h(ctx: Context) -> str:
        return ctx.failures["item"].message

    @wf.node
    async def b(h: str) -> str:
        calls.began("b")
        return h

    calls.broken = {"item 1", "b"}
    first = await home.run(wf)
    assert list(first.failures) == ["b"]
    calls.mend()
    result = await home.resume(wf, first.run_id)
    assert result[b] == "item 1"
    assert dict(calls) == {"b": 1}


async def test_nothing_below_a_held_node_runs(home: Home, calls: Calls) -> None:
    """A held path has not failed: its handlers and clean-ups wait for the person's word, too."""

    def make(version: str) -> Workflow:
        wf = Workflow("held")

        @wf.node(idempotent=True, version=version)
        async def a() -> str:
            return version

        @wf.node
        async def b(a: str) -> str:
            calls.began("b")
            return a

        add = calls.adder(wf)
        add("handler", "b", trigger="any_failed")
        add("cleanup", "b", trigger="all_done")
        add("either", "a", "b", trigger="any_success")
        return wf

    calls.broken = {"cleanup", "either"}
    run_id = (await home.run(make("1"))).run_id
    calls.mend()
    result = await home.resume(make("2"), run_id)
    assert result.status is RunStatus.WAITING
    assert not calls
    result = await home.retry(make("2"), run_id)
    assert result.status is RunStatus.COMPLETED
    assert dict(calls) == {"b": 1, "cleanup": 1, "either": 1}


async def test_nothing_below_an_uncertain_node_runs(home: Home, calls: Calls) -> None:
    """Nobody knows whether it failed."""
    import threading

    release = threading.Event()
    wf = Workflow("uncertain")

    @wf.node(timeout=0.05)
    def stuck() -> int:
        release.wait(20)
        return 1

    add = calls.adder(wf)
    add("handler", "stuck", trigger="any_failed")
    add("cleanup", "stuck", trigger="all_done")
    try:
        result = await home.run(wf)
    finally:
        release.set()
    assert result.status is RunStatus.INTERRUPTED
    assert not calls
