"""Retries, time limits, named limits."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from dagresume import (
    Context,
    DefinitionError,
    Limit,
    NodeStatus,
    NodeTimeout,
    Retry,
    RetryAfter,
    RunInterrupted,
    RunStatus,
    UncertainNode,
    Workflow,
)
from tests.engine.kit import Boom, Calls, Home, listing, settle


async def test_attempts_count_the_first_try(home: Home, calls: Calls) -> None:
    """B80: 1 + 2; the run fails with the last error."""
    wf = Workflow("retries", retry=Retry(3, delay=0))
    calls.adder(wf)("a")
    calls.broken = {"a"}
    result = await home.run(wf)
    assert calls["a"] == 3
    assert result.failures["a"].attempt == 3


async def test_the_waits_are_kept(home: Home, calls: Calls) -> None:
    """B80: gaps are at least the delay, and grow."""
    wf = Workflow("waits", retry=Retry(3, delay=0.05, backoff=2, jitter=0))
    times: list[float] = []

    @wf.node
    async def a() -> None:
        times.append(time.monotonic())
        raise Boom

    await home.run(wf)
    assert times[1] - times[0] >= 0.049
    assert times[2] - times[1] >= 0.099


async def test_a_retried_node_completes_with_its_attempt(home: Home) -> None:
    """B82, B77: four rows in the journal for running, failed, running, success; all_done runs after it."""
    wf = Workflow("twice", retry=Retry(3, delay=0))

    @wf.node
    async def a(ctx: Context) -> int:
        if ctx.attempt == 1:
            raise Boom("first")
        return 7

    @wf.node(depends_on=["a"], trigger="all_done")
    async def child(a: int) -> int:
        return a

    result = await home.run(wf)
    assert result[child] == 7
    assert (await home.info(result.run_id)).nodes["a"].attempt == 2
    rows = [(e.kind, e.attempt) for e in await home.events(result.run_id) if e.path == "a"]
    assert rows == [("node.started", 1), ("node.failed", 1), ("node.started", 2), ("node.completed", 2)]


async def test_all_attempts_are_in_the_history(home: Home) -> None:
    """B82."""
    wf = Workflow("history", retry=Retry(3, delay=0))

    @wf.node
    async def a(ctx: Context) -> None:
        raise Boom(f"attempt {ctx.attempt}")

    result = await home.run(wf)
    told = [e.data["message"] for e in await home.events(result.run_id) if e.kind == "node.failed"]
    assert told == ["attempt 1", "attempt 2", "attempt 3"]
    assert result.failures["a"].message == "attempt 3"


async def test_a_manual_resume_gives_a_fresh_budget(home: Home, calls: Calls) -> None:
    """B80: and attempts count on, over processes."""
    wf = Workflow("fresh", retry=Retry(2, delay=0))
    calls.adder(wf)("a")
    calls.broken = {"a"}
    run_id = (await home.run(wf)).run_id
    result = await home.resume(wf, run_id)
    assert calls["a"] == 4
    assert result.failures["a"].attempt == 4


async def test_only_the_listed_errors_are_retried(home: Home, calls: Calls) -> None:
    wf = Workflow("which", retry=Retry(5, delay=0, retry_on=(LookupError,), never=(KeyError,)))
    errors: dict[str, Exception] = {"key": KeyError(), "index": IndexError(), "value": ValueError()}

    def add(name: str) -> None:
        async def body() -> None:
            calls.began(name)
            raise errors[name]

        wf.node(id=name)(body)

    for name in errors:
        add(name)
    await home.run(wf)
    assert calls == {"key": 1, "index": 5, "value": 1}


async def test_a_waiting_retry_holds_no_slot(home: Home) -> None:
    wf = Workflow("slot")
    free = asyncio.Event()

    @wf.node(retry=Retry(2, delay=0.05, jitter=0))
    async def a(ctx: Context) -> bool:
        if ctx.attempt == 1:
            raise Boom
        return free.is_set()

    @wf.node
    async def b() -> None:
        free.set()

    async with home.engine(concurrency=1) as engine:
        assert (await engine.run(wf))[a]


async def test_an_output_that_cannot_be_stored_is_not_retried(home: Home, calls: Calls) -> None:
    """B43: the node fails at once, naming node, place and type; resume does not repeat the effect."""
    wf = Workflow("lossy", retry=Retry(3, delay=0))

    @wf.node
    async def a() -> object:
        calls.began("a")
        return {"x": [threading.Lock()]}

    calls.adder(wf)("b", "a")
    result = await home.run(wf)
    message = result.failures["a"].message
    assert calls == {"a": 1}
    assert "'a'" in message
    assert "$.x[0]" in message
    assert "lock" in message
    async with home.engine(wf) as engine:
        with pytest.raises(UncertainNode):
            await engine.resume(result.run_id)
    assert calls == {"a": 1}


async def test_a_timed_out_body_fails_with_timeout(home: Home) -> None:
    wf = Workflow("timeout")

    @wf.node(timeout=0.05)
    async def a() -> None:
        await asyncio.Event().wait()

    started = time.monotonic()
    result = await home.run(wf)
    assert time.monotonic() - started < 5
    assert result.failures["a"].reason == "timeout"
    assert isinstance(result.failures["a"].exception, NodeTimeout)
    assert (await home.info(result.run_id)).nodes["a"].reason == "timeout"


async def test_a_timeout_is_retried_like_any_error(home: Home, calls: Calls) -> None:
    wf = Workflow("timeout", idempotent=True)

    @wf.node(timeout=0.05, retry=Retry(2, delay=0))
    async def a(ctx: Context) -> int:
        calls.began("a")
        if ctx.attempt == 1:
            await asyncio.Event().wait()
        return ctx.attempt

    assert (await home.run(wf))[a] == 2


async def test_a_body_that_blocks_the_loop_past_its_time_has_failed(home: Home) -> None:
    """B85: idempotent: failed (timeout), its result is dropped; a child never sees it."""
    wf = Workflow("blocking", idempotent=True)

    @wf.node(timeout=0.05)
    async def a() -> int:
        time.sleep(0.15)  # noqa: ASYNC251  # the fault under test
        return 1

    @wf.node
    async def b(a: int) -> int:
        return a

    result = await home.run(wf)
    assert result.status is RunStatus.FAILED
    assert result.failures["a"].reason == "timeout"
    assert "b" not in result.executed


async def test_a_late_body_that_is_not_idempotent_is_uncertain(home: Home) -> None:
    """B85: its effect has happened; nobody runs it again without a word."""
    wf = Workflow("blocking")

    @wf.node(timeout=0.05)
    async def a() -> int:
        time.sleep(0.15)  # noqa: ASYNC251  # the fault under test
        return 1

    result = await home.run(wf)
    assert result.status is RunStatus.INTERRUPTED
    async with home.engine(wf) as engine:
        with pytest.raises(UncertainNode):
            await engine.resume(result.run_id)


async def test_an_abandoned_thread_leaves_an_uncertain_node_and_its_siblings_finish(
    home: Home, calls: Calls
) -> None:
    """Threads cannot be killed: not idempotent → interrupted, reason abandoned; the run is interrupted."""
    wf = Workflow("thread")
    release = threading.Event()

    @wf.node(timeout=0.05)
    def stuck() -> int:
        release.wait(20)
        return 1

    add = calls.adder(wf)
    add("other")
    add("after", "other")
    add("below", "stuck")
    try:
        async with home.engine(wf) as engine:
            with pytest.raises(RunInterrupted):
                await engine.run(wf)
            [run] = await engine.runs()
            info = await engine.get(run.run_id)
            assert info.status is RunStatus.INTERRUPTED
            assert info.nodes["stuck"].status is NodeStatus.INTERRUPTED
            assert info.nodes["stuck"].reason == "abandoned"
            assert calls == {"other": 1, "after": 1}
            release.set()
            with pytest.raises(UncertainNode):
                await engine.resume(run.run_id)
    finally:
        release.set()


async def test_an_abandoned_thread_of_an_idempotent_node_is_retried_and_its_late_result_dropped(
    home: Home,
) -> None:
    wf = Workflow("thread", idempotent=True)
    release = threading.Event()

    @wf.node(timeout=0.05, retry=Retry(2, delay=0))
    def a(ctx: Context) -> int:
        if ctx.attempt == 1:
            release.wait(20)
        return ctx.attempt

    @wf.node
    async def b(a: int) -> int:
        release.set()
        return a

    result = await home.run(wf)
    assert (result[a], result[b]) == (2, 2)
    assert [
        e.attempt for e in await home.events(result.run_id) if e.kind == "node.completed" and e.path == "a"
    ] == [2]


async def test_a_timed_out_thread_frees_its_slot(home: Home, calls: Calls) -> None:
    wf = Workflow("slot", idempotent=True)
    release = threading.Event()

    @wf.node(timeout=0.05)
    def a() -> None:
        release.wait(20)

    calls.adder(wf)("b")
    try:
        async with home.engine(concurrency=1) as engine:
            await engine.run(wf, raise_on_failure=False)
        assert calls["b"] == 1
    finally:
        release.set()


async def test_a_time_limit_of_the_workflow_ends_the_run(home: Home, calls: Calls) -> None:
    """B86: the body is cancelled, nothing below starts, the run is failed (timeout) and can be resumed."""
    wf = Workflow("limit", timeout=0.1, idempotent=True)

    @wf.node
    async def a() -> None:
        calls.began("a")
        if calls["a"] == 1:
            await asyncio.Event().wait()

    calls.adder(wf)("d", "a")
    before = asyncio.all_tasks()
    async with asyncio.timeout(5):
        result = await home.run(wf)
    assert (result.status, result.reason) == (RunStatus.FAILED, "timeout")
    assert calls == {"a": 1}
    assert asyncio.all_tasks() == before
    assert (await home.resume(wf, result.run_id)).status is RunStatus.COMPLETED


# -- limits ---------------------------------------------------------------------------------------------


async def test_a_limit_bounds_attempts_over_all_runs(home: Home) -> None:
    alive = [0, 0]

    def make(name: str) -> Workflow:
        wf = Workflow(name)
        listing(wf, range(10))

        @wf.node(for_each={"n": "items"}, limit="llm")
        async def item(n: int) -> None:
            alive[0] += 1
            alive[1] = max(alive)
            for _ in range(5):
                await asyncio.sleep(0)
            alive[0] -= 1

        return wf

    async with home.engine(limits={"llm": Limit(concurrency=3)}) as engine:
        await asyncio.gather(*(engine.run(make(name)) for name in "abc"))
    assert alive == [0, 3]


async def test_a_full_limit_does_not_hold_others_back(home: Home, calls: Calls) -> None:
    wf = Workflow("others")
    gate = asyncio.Event()
    listing(wf, range(10))

    @wf.node(for_each={"n": "items"}, limit="llm")
    async def limited(n: int) -> None:
        await gate.wait()

    @wf.node(depends_on=["items"])
    async def free() -> None:
        gate.set()

    async with home.engine(limits={"llm": Limit(concurrency=1)}, concurrency=2) as engine:
        result = await engine.run(wf)
    assert result.status is RunStatus.COMPLETED


async def test_a_rate_spaces_the_starts(home: Home) -> None:
    wf = Workflow("rate")
    listing(wf, range(5))
    times: list[float] = []

    @wf.node(for_each={"n": "items"}, limit="api")
    async def item(n: int) -> None:
        times.append(time.monotonic())

    async with home.engine(limits={"api": Limit(rate="50/second")}) as engine:
        await engine.run(wf)
    assert len(times) == 5
    assert times[-1] - times[0] >= 4 * 0.02 - 0.005


async def test_retry_after_pauses_the_limit_for_all(home: Home) -> None:
    wf = Workflow("pause", retry=Retry(2, delay=0))
    listing(wf, range(6))
    times: list[tuple[int, float]] = []

    @wf.node(for_each={"n": "items"}, limit="api")
    async def item(n: int, ctx: Context) -> None:
        times.append((n, time.monotonic()))
        if n == 0 and ctx.attempt == 1:
            raise RetryAfter(0.2)

    async with home.engine(limits={"api": Limit(concurrency=1)}) as engine:
        result = await engine.run(wf)
    assert result.status is RunStatus.COMPLETED
    assert times[0][0] == 0
    assert all(at - times[0][1] >= 0.19 for _, at in times[1:])
    assert len(times) == 7


async def test_any_error_with_retry_after_seconds_pauses_too(home: Home) -> None:
    class TooMany(Exception):
        retry_after = 0.1

    wf = Workflow("pause", retry=Retry(2, delay=0))
    times: list[float] = []

    @wf.node
    async def a(ctx: Context) -> None:
        times.append(time.monotonic())
        if ctx.attempt == 1:
            raise TooMany

    await home.run(wf)
    assert times[1] - times[0] >= 0.099


async def test_an_unknown_limit_is_refused_before_anything_is_stored(home: Home) -> None:
    wf = Workflow("unknown")

    @wf.node(limit="lmm")
    async def a() -> None: ...

    async with home.engine(limits={"llm": Limit(concurrency=1)}) as engine:
        with pytest.raises(DefinitionError, match=r"'a'.*lmm.*llm"):
            await engine.run(wf)
        assert await engine.runs() == []


async def test_cancelling_a_run_parked_at_a_limit_lets_the_next_one_in(home: Home) -> None:
    gate = asyncio.Event()

    def make(name: str, wait: bool = False) -> Workflow:
        wf = Workflow(name)

        @wf.node(limit="one")
        async def a() -> str:
            if wait:
                await gate.wait()
            return name

        return wf

    async with home.engine(limits={"one": Limit(concurrency=1)}) as engine:
        first = await engine.start(make("first", wait=True))
        second, third = await engine.start(make("second")), await engine.start(make("third"))
        await second.cancel()
        gate.set()
        async with asyncio.timeout(5):
            await first.result()
            assert (await third.result())["a"] == "third"
        assert (await second.result(raise_on_failure=False)).status is RunStatus.CANCELLED


async def test_the_engine_bounds_what_is_alive_over_all_runs(home: Home) -> None:
    alive = [0, 0]
    gate = asyncio.Event()

    def make(name: str) -> Workflow:
        wf = Workflow(name)
        for k in range(5):

            async def body() -> None:
                alive[0] += 1
                alive[1] = max(alive)
                await gate.wait()
                alive[0] -= 1

            wf.node(id=f"n{k}")(body)
        return wf

    async with home.engine(concurrency=4) as engine:
        handles = [await engine.start(make(name)) for name in "abc"]
        await settle(lambda: alive[0] == 4)
        gate.set()
        for handle in handles:
            await handle.result()
    assert alive == [0, 4]


@pytest.mark.parametrize("given", [0, -1])
def test_an_engine_needs_a_slot(given: int, tmp_path: Any) -> None:
    from dagresume import Engine

    with pytest.raises(DefinitionError, match="concurrency"):
        Engine(tmp_path / "x.db", concurrency=given)
