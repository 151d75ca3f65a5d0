"""Nodes that can tell what became of an attempt nobody knows about."""

from __future__ import annotations

from typing import Any

import pytest

from dagresume import NOT_DONE, Context, RunFailed, RunStatus, StoreError, UncertainNode, Workflow
from dagresume.store import Store
from tests.engine.kit import Boom, Calls, FaultyStore, Home, listing


class Outside:
    """What the node does elsewhere, and what can be asked there."""

    def __init__(self) -> None:
        self.done: dict[str, int] = {}
        self.asked: list[tuple[str, int, int]] = []


def paying(outside: Outside, calls: Calls, answer: Any = None) -> Workflow:
    wf = Workflow("paying")

    async def reconcile(ctx: Context, amount: int) -> Any:
        outside.asked.append((ctx.idempotency_key, ctx.attempt, amount))
        if answer is not None:
            raise answer
        return outside.done.get(ctx.idempotency_key, NOT_DONE)

    @wf.node(idempotent=True)
    async def amount() -> int:
        return 3

    @wf.node(reconcile=reconcile)
    async def pay(amount: int, ctx: Context) -> int:
        calls.began("pay")
        outside.done[ctx.idempotency_key] = amount * 10
        return amount * 10

    @wf.node
    async def after(pay: int) -> int:
        calls.began("after")
        return pay

    return wf


async def lose(home: Home, wf: Workflow, kind: str, path: str) -> str:
    """Run until the record of this kind and path is lost, and give the run."""

    def wrap(store: Store) -> Store:
        return FaultyStore(store, lambda _, r: (r.kind, r.path) == (kind, path), lambda: StoreError("lost"))

    async with home.engine(wrap=wrap) as engine:
        with pytest.raises(RunFailed):
            await engine.run(wf)
        [info] = await engine.runs()
    return info.run_id


async def test_its_answer_is_the_output_and_nothing_runs_twice(home: Home, calls: Calls) -> None:
    """B07: asked under the key of the attempt."""
    outside = Outside()
    wf = paying(outside, calls)
    run_id = await lose(home, wf, "node.completed", "pay")
    plan = await home.plan(wf, run_id)
    assert plan["pay"].reason == "reconcile"
    result = await home.resume(wf, run_id)
    assert (result["pay"], result["after"]) == (30, 30)
    assert dict(calls) == {"pay": 1, "after": 1}
    assert "pay" not in result.executed
    [(key, _, amount)] = outside.asked
    assert key in outside.done
    assert amount == 3


async def test_not_done_runs_it_again_under_the_same_key(home: Home, calls: Calls) -> None:
    outside = Outside()
    wf = paying(outside, calls)
    run_id = await lose(home, wf, "node.completed", "pay")
    [first] = outside.done
    outside.done.clear()
    result = await home.resume(wf, run_id)
    assert result["after"] == 30
    assert dict(calls) == {"pay": 2, "after": 1}
    assert list(outside.done) == [first]


async def test_if_it_raises_the_path_stays_uncertain(home: Home, calls: Calls) -> None:
    outside = Outside()
    wf = paying(outside, calls, Boom("the other side is down"))
    run_id = await lose(home, wf, "node.completed", "pay")
    result = await home.resume(wf, run_id)
    assert result.status is RunStatus.INTERRUPTED
    assert calls == {"pay": 1}
    mended = paying(outside, calls)
    assert (await home.resume(mended, run_id))["after"] == 30
    assert calls == {"pay": 1, "after": 1}


async def test_it_is_not_asked_about_what_never_began_or_failed(home: Home, calls: Calls) -> None:
    outside = Outside()
    wf = paying(outside, calls)
    calls.broken = {"pay"}
    run_id = (await home.run(wf)).run_id
    calls.mend()
    result = await home.resume(wf, run_id)
    assert result["after"] == 30
    assert outside.asked == []


async def test_a_persons_retry_does_not_ask(home: Home, calls: Calls) -> None:
    """retry(run): everything uncertain runs again, on a person's word."""
    outside = Outside()
    wf = paying(outside, calls)
    run_id = await lose(home, wf, "node.completed", "pay")
    result = await home.retry(wf, run_id)
    assert result.status is RunStatus.COMPLETED
    assert outside.asked == []
    assert calls == {"pay": 2, "after": 1}


async def test_items_reconcile_one_by_one(home: Home, calls: Calls) -> None:
    wf = Workflow("items")
    listing(wf, range(3))
    asked: list[str] = []

    async def reconcile(n: int, ctx: Context) -> int:
        asked.append(ctx.path)
        return n + 100

    @wf.node(for_each={"n": "items"}, reconcile=reconcile)
    async def item(n: int) -> int:
        calls.began(f"item {n}")
        return n

    run_id = await lose(home, wf, "node.completed", "item[1]")
    result = await home.resume(wf, run_id)
    assert result.status is RunStatus.COMPLETED
    assert set(calls.values()) == {1}
    assert "item[1]" in asked
    assert result["item"][1] == 101


async def test_without_it_the_run_is_refused(home: Home, calls: Calls) -> None:
    wf = Workflow("plain")
    calls.adder(wf)("pay")
    run_id = await lose(home, wf, "node.completed", "pay")
    async with home.engine(wf) as engine:
        with pytest.raises(UncertainNode, match="pay"):
            await engine.resume(run_id)
