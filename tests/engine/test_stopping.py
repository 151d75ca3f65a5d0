"""Cancel, interruption, leaving the engine, fail_fast."""

from __future__ import annotations

import asyncio
import contextvars
import time

import anyio
import pytest

from dagresume import (
    Context,
    NodeStatus,
    Retry,
    RunCancelled,
    RunFailed,
    RunInterrupted,
    RunStatus,
    UncertainNode,
    Workflow,
)
from dagresume.store import Session, Store
from dagresume.testing import StoreWrapper
from tests.engine.kit import Boom, Calls, Home, SlowStore, TurnedClock, listing, settle


def waiting(calls: Calls, gate: asyncio.Event, *, idempotent: bool = True) -> Workflow:
    """A chain of three whose middle waits, beside a node that is done quickly."""
    wf = Workflow("waiting", idempotent=idempotent)

    @wf.node
    async def a() -> int:
        calls.began("a")
        return 1

    @wf.node
    async def b(a: int) -> int:
        calls.began("b")
        await gate.wait()
        return a + 1

    @wf.node
    async def c(b: int) -> int:
        calls.began("c")
        return b + 1

    return wf


async def test_cancel_ends_the_run_and_keeps_what_is_done(home: Home, calls: Calls) -> None:
    """C5; a cancelled run never resumes by itself."""
    gate = asyncio.Event()
    wf = waiting(calls, gate)
    before = asyncio.all_tasks()
    async with home.engine(wf) as engine:
        handle = await engine.start(wf)
        await settle(lambda: calls["b"] == 1)
        await handle.cancel(by="me")
        with pytest.raises(RunCancelled, match=handle.run_id):
            await handle.result()
        info = await engine.get(handle.run_id)
        assert info.status is RunStatus.CANCELLED
        assert info.owner is None
        assert [info.nodes[n].status.value for n in "abc"] == ["completed", "cancelled", "pending"]
        with pytest.raises(RunCancelled, match="me"):
            await engine.resume(handle.run_id)
    assert asyncio.all_tasks() == before
    assert calls == {"a": 1, "b": 1}


async def test_a_result_that_came_during_the_cancel_is_kept(home: Home, calls: Calls) -> None:
    """C5: a node that returned has its checkpoint written."""
    wf = Workflow("kept")
    hurry = asyncio.Event()

    @wf.node
    async def a() -> int:
        calls.began("a")
        try:
            await hurry.wait()
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):
                await asyncio.sleep(0)
        return 7

    calls.adder(wf)("b", "a")
    async with home.engine(wf) as engine:
        handle = await engine.start(wf)
        await settle(lambda: calls["a"] == 1)
        await engine.cancel(handle.run_id)
        result = await engine.result(handle.run_id)
    assert result.status is RunStatus.CANCELLED
    assert result["a"] == 7
    assert calls == {"a": 1}


async def test_cancel_reaches_a_run_driven_elsewhere(home: Home, calls: Calls) -> None:
    gate = asyncio.Event()
    wf = waiting(calls, gate)
    async with home.engine() as engine, home.engine() as other:
        handle = await engine.start(wf)
        await settle(lambda: calls["b"] == 1)
        await other.cancel(handle.run_id, by="another")
        async with asyncio.timeout(5):
            with pytest.raises(RunCancelled):
                await handle.result()
        [event] = [e async for e in other.events(handle.run_id) if e.kind == "run.cancel_requested"]
        assert event.data["by"] == "another"


async def test_a_body_may_cancel_its_own_run(home: Home, calls: Calls) -> None:
    """Without waiting for itself."""
    wf = Workflow("itself")
    engine = home.engine(wf, grace_seconds=20)

    @wf.node
    async def a(ctx: Context) -> None:
        await engine.cancel(ctx.run_id)

    calls.adder(wf)("b", "a")
    async with engine, asyncio.timeout(5):
        with pytest.raises(RunCancelled):
            await engine.run(wf)
    assert not calls


async def test_cancel_of_a_resting_run_is_done_at_once(home: Home, calls: Calls) -> None:
    wf = waiting(calls, asyncio.Event())
    calls.broken = {"b"}
    run_id = (await home.run(wf)).run_id
    async with home.engine() as engine:
        await engine.cancel(run_id, by="me")
        assert (await engine.get(run_id)).status is RunStatus.CANCELLED
        before = [e async for e in engine.events(run_id)]
        await engine.cancel(run_id)  # twice is once
        assert [e async for e in engine.events(run_id)] == before


async def test_a_completed_run_stays_completed(home: Home, calls: Calls) -> None:
    """B128: final states stay."""
    gate = asyncio.Event()
    gate.set()
    wf = waiting(calls, gate)
    run_id = (await home.run(wf)).run_id
    async with home.engine() as engine:
        await engine.cancel(run_id)
        assert (await engine.get(run_id)).status is RunStatus.COMPLETED


async def test_a_cancelled_caller_leaves_an_interrupted_run(home: Home, calls: Calls) -> None:
    """B35 (3): CancelledError leaves run(); the store does not say running."""
    gate = asyncio.Event()
    wf = waiting(calls, gate)
    async with home.engine(wf) as engine:
        task = asyncio.create_task(engine.run(wf))
        await settle(lambda: calls["b"] == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        [info] = await engine.runs()
        assert info.status is RunStatus.INTERRUPTED
        assert (await engine.get(info.run_id)).nodes["b"].status is NodeStatus.INTERRUPTED
        gate.set()
        result = await engine.resume(info.run_id)
    assert result["c"] == 3
    assert calls == {"a": 1, "b": 2, "c": 1}


async def test_a_timeout_around_run_is_a_timeout(home: Home, calls: Calls) -> None:
    """B35 (2)."""
    wf = waiting(calls, asyncio.Event())
    async with home.engine(wf) as engine:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.run(wf), 0.1)
        [info] = await engine.runs()
        assert info.status is RunStatus.INTERRUPTED


async def test_an_outer_scope_that_ends_while_bodies_clean_up(home: Home, calls: Calls) -> None:
    """B34: bounded, all statuses durable, no task left, no error about tasks."""
    wf = Workflow("outer")
    inside = asyncio.Barrier(3)

    @wf.node
    async def raises() -> None:
        await inside.wait()
        try:
            await asyncio.Event().wait()
        finally:
            raise RuntimeError("while cleaning up")

    @wf.node
    async def shields() -> int:
        await inside.wait()
        try:
            await asyncio.Event().wait()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.1)
        return 1

    calls.adder(wf)("below", "shields")
    before = asyncio.all_tasks()
    async with home.engine(wf) as engine:
        started = time.monotonic()
        async with anyio.create_task_group() as group:
            group.start_soon(engine.run, wf)
            await inside.wait()
            group.cancel_scope.cancel()
        assert time.monotonic() - started < 2
        [info] = await engine.runs()
        nodes = (await engine.get(info.run_id)).nodes
        assert info.status is RunStatus.INTERRUPTED
        assert nodes["raises"].status is NodeStatus.FAILED
        assert nodes["shields"].status is NodeStatus.INTERRUPTED
    assert asyncio.all_tasks() == before
    assert not calls


async def test_a_cancelled_body_that_is_not_idempotent_is_uncertain(home: Home, calls: Calls) -> None:
    """C6."""
    wf = waiting(calls, asyncio.Event(), idempotent=False)
    async with home.engine(wf) as engine:
        task = asyncio.create_task(engine.run(wf))
        await settle(lambda: calls["b"] == 1)
        task.cancel()
        await asyncio.wait([task])
        [info] = await engine.runs()
        with pytest.raises(UncertainNode) as caught:
            await engine.resume(info.run_id)
        assert caught.value.paths == ("b",)


async def test_leaving_the_engine_gives_bodies_their_grace(home: Home, calls: Calls) -> None:
    """B130: no new body starts, what returns in time is kept, the run is interrupted (shutdown)."""
    gate = asyncio.Event()
    wf = waiting(calls, gate, idempotent=False)
    engine = home.engine(wf, grace_seconds=20)
    async with engine:
        handle = await engine.start(wf)
        await settle(lambda: calls["b"] == 1)
        asyncio.get_running_loop().call_later(0.05, gate.set)
    with pytest.raises(RunInterrupted, match="shutdown"):
        await handle.result()
    assert calls == {"a": 1, "b": 1}
    assert await home.statuses(handle.run_id) == {"a": "completed", "b": "completed", "c": "pending"}
    result = await home.resume(wf, handle.run_id)
    assert result["c"] == 3
    assert calls == {"a": 1, "b": 1, "c": 1}


async def test_bodies_that_outlast_the_grace_are_interrupted(home: Home, calls: Calls) -> None:
    wf = waiting(calls, asyncio.Event())
    async with home.engine(wf, grace_seconds=0.05) as engine:
        handle = await engine.start(wf)
        await settle(lambda: calls["b"] == 1)
    info = await home.info(handle.run_id)
    assert (info.status, info.reason) == (RunStatus.INTERRUPTED, "shutdown")
    assert (info.nodes["b"].status, info.nodes["b"].reason) == (NodeStatus.INTERRUPTED, "shutdown")


async def test_a_body_that_ignores_its_cancellation_does_not_hold_the_engine(
    home: Home, calls: Calls
) -> None:
    wf = Workflow("stubborn", idempotent=True)
    end = asyncio.Event()

    @wf.node
    async def a() -> int:
        calls.began("a")
        while not end.is_set():
            try:
                await end.wait()
            except asyncio.CancelledError:
                continue
        return 1

    started = time.monotonic()
    async with home.engine(wf, grace_seconds=0.1) as engine:
        handle = await engine.start(wf)
        await settle(lambda: calls["a"] == 1)
    assert time.monotonic() - started < 5
    assert (await home.info(handle.run_id)).status is RunStatus.INTERRUPTED
    end.set()
    await asyncio.sleep(0)
    assert (await home.statuses(handle.run_id))["a"] == "interrupted"  # its late result is not written


async def test_a_retry_wait_ends_with_the_engine_and_keeps_its_count(home: Home, calls: Calls) -> None:
    """An open retry wait when the engine is left: interrupted at once."""
    wf = Workflow("backoff", retry=Retry(3, delay=60))
    calls.adder(wf)("a")
    calls.broken = {"a"}
    started = time.monotonic()
    async with home.engine(wf, grace_seconds=30) as engine:
        handle = await engine.start(wf)
        await settle(lambda: bool(calls["a"]))
        async for event in engine.events(handle.run_id, follow=True):
            if event.kind == "node.failed":
                break
    assert time.monotonic() - started < 10
    info = await home.info(handle.run_id)
    assert info.status is RunStatus.INTERRUPTED
    assert info.nodes["a"].status is not NodeStatus.RUNNING
    calls.mend()
    result = await home.resume(wf, handle.run_id)
    assert result.status is RunStatus.COMPLETED
    assert (await home.info(handle.run_id)).nodes["a"].attempt == 2


# -- fail_fast ------------------------------------------------------------------------------------------


async def test_without_fail_fast_everything_else_ends(home: Home, calls: Calls) -> None:
    """C9."""
    wf = Workflow("slow rest")
    failed = asyncio.Event()

    @wf.node
    async def p() -> None:
        failed.set()
        raise Boom

    @wf.node
    async def q() -> int:
        await failed.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        return 1

    calls.adder(wf)("r", "q")
    result = await home.run(wf)
    assert result[q] == 1
    assert calls == {"r": 1}


async def test_fail_fast_cancels_the_other_branches(home: Home, calls: Calls) -> None:
    """B38: q is cancelled naming why, r keeps its attempts, none is running; resume runs p, q, r, not s."""
    wf = Workflow("fail fast", idempotent=True)
    ready = asyncio.Barrier(2)
    tried = asyncio.Event()

    @wf.node
    async def s() -> int:
        calls.began("s")
        return 1

    @wf.node
    async def p(s: int) -> int:
        calls.began("p")
        if calls["p"] == 1:
            await tried.wait()
            await ready.wait()
            raise Boom
        return 1

    @wf.node
    async def q(s: int) -> int:
        calls.began("q")
        if calls["q"] == 1:
            await ready.wait()
            await asyncio.Event().wait()
        return 1

    @wf.node(retry=Retry(5, delay=60))
    async def r(s: int) -> int:
        calls.began("r")
        if calls["r"] == 1:
            tried.set()
            raise Boom
        return 1

    async with home.engine(wf, fail_fast=True) as engine:
        started = time.monotonic()
        with pytest.raises(RunFailed) as caught:
            await engine.run(wf)
        assert time.monotonic() - started < 5
    run_id = caught.value.run_id
    assert list(caught.value.failures) == ["p"]
    info = await home.info(run_id)
    assert info.status is RunStatus.FAILED
    assert (info.nodes["q"].status, info.nodes["q"].reason) == (NodeStatus.CANCELLED, "fail_fast")
    assert info.nodes["r"].status in {NodeStatus.CANCELLED, NodeStatus.PENDING}
    assert info.nodes["r"].attempt == 1
    result = await home.resume(wf, run_id)
    assert result.status is RunStatus.COMPLETED
    assert calls == {"s": 1, "p": 2, "q": 2, "r": 2}


async def test_fail_fast_leaves_handled_and_tolerated_failures_alone(home: Home, calls: Calls) -> None:
    wf = Workflow("dealt with")
    listing(wf, range(3))
    add = calls.adder(wf)
    add("a")
    add("h", "a", trigger="any_failed")
    add("after", "h")
    calls.broken = {"a"}

    @wf.node(for_each={"n": "items"}, tolerate=1)
    async def item(n: int) -> int:
        if n == 1:
            raise Boom
        return n

    async with home.engine(fail_fast=True) as engine:
        result = await engine.run(wf)
    assert result.status is RunStatus.COMPLETED


# -- durable before visible ------------------------------------------------------------------------------


async def test_a_child_begins_only_after_its_parents_result_is_durable(home: Home, calls: Calls) -> None:
    """C1, B01: also an idempotent child."""
    for idempotent in (True, False):
        calls.clear()
        wf = Workflow(f"durable {idempotent}", idempotent=idempotent)
        add = calls.adder(wf)
        add("a")
        add("b", "a")
        slow: list[SlowStore] = []

        def wrap(store: Store) -> Store:
            slow.append(SlowStore(store, lambda _, r: (r.kind, r.path) == ("node.completed", "a")))  # noqa: B023
            return slow[-1]  # noqa: B023

        async with home.engine(wrap=wrap) as engine:
            handle = await engine.start(wf)
            await slow[0].reached.wait()
            for _ in range(50):
                await asyncio.sleep(0)
            assert calls == {"a": 1}
            slow[0].gate.set()
            await handle.result()
            assert calls == {"a": 1, "b": 1}


async def test_a_node_begins_only_after_its_start_record_is_durable(home: Home, calls: Calls) -> None:
    """C2: if it is not idempotent."""
    wf = Workflow("intent")
    calls.adder(wf)("a")
    slow: list[SlowStore] = []

    def wrap(store: Store) -> Store:
        slow.append(SlowStore(store, lambda _, r: (r.kind, r.path) == ("node.started", "a")))
        return slow[-1]

    async with home.engine(wrap=wrap) as engine:
        task = asyncio.create_task(engine.run(wf))
        await slow[0].reached.wait()
        for _ in range(50):
            await asyncio.sleep(0)
        assert not calls
        slow[0].gate.set()
        await task
    assert calls == {"a": 1}


async def test_cancelling_while_a_commit_is_under_way_keeps_the_commit(home: Home, calls: Calls) -> None:
    """B16, B37: not half; the next run writes at once."""
    wf = Workflow("commit")
    add = calls.adder(wf)
    add("a")
    add("b", "a")
    slow: list[SlowStore] = []

    def wrap(store: Store) -> Store:
        slow.append(SlowStore(store, lambda _, r: (r.kind, r.path) == ("node.completed", "a")))
        return slow[-1]

    async with home.engine(wrap=wrap) as engine:
        task = asyncio.create_task(engine.run(wf))
        await slow[0].reached.wait()
        task.cancel()
        await asyncio.sleep(0)
        slow[0].gate.set()
        await asyncio.wait([task])
        [info] = await engine.runs()
        assert (await engine.get(info.run_id)).nodes["a"].status is NodeStatus.COMPLETED
        assert info.status is RunStatus.INTERRUPTED
        assert calls == {"a": 1}
        other = Workflow("next")
        calls.adder(other)("c")
        assert (await engine.run(other)).status is RunStatus.COMPLETED


async def test_a_long_idempotent_node_is_seen_as_running(home: Home, calls: Calls) -> None:
    """§5: its start record is committed alone once it has waited 0.2 s."""
    gate = asyncio.Event()
    wf = waiting(calls, gate)
    async with home.engine() as engine, home.engine() as other:
        handle = await engine.start(wf)
        async for event in other.events(handle.run_id, follow=True):
            if (event.kind, event.path) == ("node.started", "b"):
                break
        assert (await other.get(handle.run_id)).nodes["b"].status is NodeStatus.RUNNING
        gate.set()
        await handle.result()


async def test_turning_the_clock_changes_no_waits(home: Home, calls: Calls) -> None:
    wf = Workflow("clock", retry=Retry(2, delay=0.01))
    clock = TurnedClock()

    @wf.node
    async def a(ctx: Context) -> int:
        if ctx.attempt == 1:
            clock.ahead -= 3600
            raise Boom
        return 1

    async with home.engine(clock=clock) as engine, asyncio.timeout(5):
        result = await engine.run(wf)
        assert result[a] == 1
        [event] = [e async for e in engine.events(result.run_id) if e.kind == "node.completed"]
        assert event.data["seconds"] >= 0


# -- context variables ----------------------------------------------------------------------------------

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")


async def test_context_variables_reach_every_body_and_leak_from_none(home: Home) -> None:
    """B161: async, thread, map item, second attempt."""
    wf = Workflow("context", retry=Retry(2, delay=0))
    listing(wf, range(3))

    @wf.node
    async def asynchronous() -> str:
        found = variable.get()
        variable.set("leaked")
        return found

    @wf.node
    def threaded() -> str:
        found = variable.get()
        variable.set("leaked")
        return found

    @wf.node(for_each={"n": "items"}, depends_on=["asynchronous", "threaded"])
    async def item(n: int) -> str:
        found = variable.get()
        variable.set("leaked")
        return found

    @wf.node
    async def again(item: list[str], ctx: Context) -> str:
        found = variable.get()
        variable.set("leaked")
        if ctx.attempt == 1:
            raise Boom
        return found

    token = variable.set("X")
    try:
        result = await home.run(wf)
    finally:
        variable.reset(token)
    assert result[asynchronous] == result[threaded] == result[again] == "X"
    assert result["item"] == ["X"] * 3


async def test_log_lines_of_a_failed_attempt_are_kept(home: Home) -> None:
    """B164."""
    wf = Workflow("logs")

    @wf.node
    async def a(ctx: Context) -> None:
        ctx.log.info("one")
        ctx.log.warning("two", n=2)
        ctx.log.error("three")
        raise Boom

    run_id = (await home.run(wf)).run_id
    store = home.store()
    async with home.engine() as engine:
        lines = [line for _, line in await engine._store.logs(run_id)]
    assert [(line.path, line.attempt, line.level, line.line) for line in lines] == [
        ("a", 1, "info", "one"),
        ("a", 1, "warning", "two n=2"),
        ("a", 1, "error", "three"),
    ]
    await store.close()


class SlowOpening(StoreWrapper):
    """A store whose opening takes longer than a short lease; counts the renewals."""

    renewed = 0

    async def open(self, session: Session) -> int:
        found = await self.inner.open(session)
        await asyncio.sleep(0.3)
        return found

    def renew(self, expires_at: int) -> bool:
        self.renewed += 1
        return self.inner.renew(expires_at)


async def test_a_lease_counts_from_when_the_session_was_made(home: Home, calls: Calls) -> None:
    """B107: others count from there; what the opening took is gone."""
    stores: list[SlowOpening] = []

    def wrap(store: Store) -> Store:
        stores.append(SlowOpening(store))
        return stores[-1]

    wf = Workflow("late", idempotent=True)

    @wf.node
    async def a() -> int:
        return stores[-1].renewed

    async with home.engine(wrap=wrap, lease_seconds=0.25) as engine:
        assert (await engine.run(wf))[a] >= 1, "it began before a renewal had come"
