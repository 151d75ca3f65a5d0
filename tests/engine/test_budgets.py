"""Budgets: what a run may use up before it starts nothing more, counted over all its processes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dagresume import Budget, Context, DefinitionError, Retry, RunInterrupted, RunStatus, Workflow
from tests.engine.kit import Boom, Calls, Home, settle


def chain(calls: Calls, *, budget: Budget | None, cost: float = 1.0, **options: Any) -> Workflow:
    """Five nodes, each of which costs something."""
    wf = Workflow("dear", budget=budget, **options)
    for k in range(5):

        def body(k: int = k) -> Any:
            async def pay(ctx: Context) -> int:
                ctx.usage(tokens_in=10, tokens_out=5, cost=cost)
                calls.began(f"n{k}")
                return k

            return pay

        wf.node(id=f"n{k}", depends_on=f"n{k - 1}" if k else ())(body())
    return wf


async def used(home: Home, run_id: str) -> dict[str, float]:
    """Give what the last event that says so says was used up."""
    said = [
        e.data["usage"] for e in await home.events(run_id) if e.kind.startswith("run.") and "usage" in e.data
    ]
    found: dict[str, float] = said[-1]
    return found


async def test_over_the_budget_nothing_starts(home: Home, calls: Calls) -> None:
    wf = chain(calls, budget=Budget(cost=2.5))
    async with home.engine(wf) as engine:
        with pytest.raises(RunInterrupted, match="budget"):
            await engine.run(wf, key="k")
    info = (await _runs(home))[0]
    assert (info.status, info.reason) == ("interrupted", "budget")
    assert dict(calls) == {"n0": 1, "n1": 1, "n2": 1}
    assert await used(home, info.run_id) == {"tokens_in": 30, "tokens_out": 15, "cost": 3.0}
    states = await home.statuses(info.run_id)
    assert (states["n2"], states["n3"]) == ("completed", "pending")


async def _runs(home: Home) -> Any:
    async with home.engine() as engine:
        return await engine.runs()


async def test_tokens_in_and_out_count_together(home: Home, calls: Calls) -> None:
    result = await home.run(chain(calls, budget=Budget(tokens=30)))
    assert (result.status, result.reason) == (RunStatus.INTERRUPTED, "budget")
    assert len(calls) == 2


async def test_the_last_node_may_spend_it_all(home: Home, calls: Calls) -> None:
    """Nothing is left to start: the run has completed."""
    for most in (4.5, 5):
        assert (await home.run(chain(calls, budget=Budget(cost=most)))).status is RunStatus.COMPLETED


async def test_it_counts_over_resumes_until_a_person_raises_it(home: Home, calls: Calls) -> None:
    wf = chain(calls, budget=Budget(cost=2))
    stopped = await home.run(wf)
    assert dict(calls) == {"n0": 1, "n1": 1}
    for _ in range(2):
        again = await home.resume(wf, stopped.run_id)
        assert (again.status, again.reason) == (RunStatus.INTERRUPTED, "budget")
        assert calls.total() == 2
    more = await home.resume(wf, stopped.run_id, budget=Budget(cost=3))
    assert (more.status, calls.total()) == (RunStatus.INTERRUPTED, 3)
    still = await home.resume(wf, stopped.run_id)
    assert (still.status, calls.total()) == (RunStatus.INTERRUPTED, 3), "what a person set stays set"
    done = await home.go_on(wf, stopped.run_id, budget=Budget())
    assert done.status is RunStatus.COMPLETED
    assert calls.total() == 5
    assert (await used(home, stopped.run_id))["cost"] == 5


async def test_a_budget_of_nothing(home: Home, calls: Calls) -> None:
    result = await home.run(chain(calls, budget=Budget(tokens=0)))
    assert (result.status, result.reason) == (RunStatus.INTERRUPTED, "budget")
    assert not calls


async def test_bodies_under_way_finish(home: Home, calls: Calls) -> None:
    """C5: what was begun is paid for, and kept; also when it takes longer than the grace time."""
    wf = Workflow("w", budget=Budget(cost=1))
    spent = asyncio.Event()

    @wf.node
    async def slow(ctx: Context) -> str:
        calls.began("slow")
        await spent.wait()
        for _ in range(5):
            await asyncio.sleep(0.05)
        ctx.usage(cost=1)
        return "kept"

    @wf.node
    async def quick(ctx: Context) -> None:
        await settle(lambda: calls["slow"] == 1)
        ctx.usage(cost=2)
        spent.set()

    @wf.node
    async def below(slow: str) -> None:
        calls.began("below")

    async with home.engine(wf, grace_seconds=0.01) as engine:
        result = await engine.run(wf, raise_on_failure=False)
    assert (result.status, result.reason) == (RunStatus.INTERRUPTED, "budget")
    assert result["slow"] == "kept"
    assert calls["below"] == 0
    assert (await used(home, result.run_id))["cost"] == 3
    done = await home.go_on(wf, result.run_id, budget=Budget(cost=100))
    assert list(done.executed) == ["below"]


async def test_items_of_a_map_stop(home: Home, calls: Calls) -> None:
    """No further item starts; the resume goes on with those that never did."""
    wf = Workflow("w", budget=Budget(tokens=50))

    @wf.node(for_each={"n": "numbers"}, concurrency=1)
    async def pay(n: int, ctx: Context) -> int:
        calls.began(f"pay {n}")
        ctx.usage(tokens_out=10)
        return n

    stopped = await home.run(wf, {"numbers": list(range(10))})
    assert (stopped.reason, len(calls)) == ("budget", 5)
    done = await home.go_on(wf, stopped.run_id, budget=Budget(tokens=1000))
    assert done["pay"] == list(range(10))
    assert set(calls.values()) == {1}


async def test_nodes_inside_count(home: Home, calls: Calls) -> None:
    """Sub-workflows spend their run's budget; a budget of their own means nothing here."""
    inner = chain(calls, budget=Budget(cost=0.5))
    wf = Workflow("outer", budget=Budget(cost=2))
    wf.subworkflow("sub", inner)
    stopped = await home.run(wf)
    assert (stopped.reason, calls.total()) == ("budget", 2)
    done = await home.go_on(wf, stopped.run_id, budget=Budget(cost=9))
    assert done.status is RunStatus.COMPLETED
    assert calls.total() == 5


async def test_attempts_that_fail_have_cost_something(home: Home, calls: Calls) -> None:
    """What they recorded counts: in this process, in the next one, and to stop the retries."""
    wf = chain(calls, budget=Budget(cost=3), retry=Retry(10, delay=0, jitter=0))
    calls.broken = {"n0"}
    stopped = await home.run(wf)
    assert (stopped.status, stopped.reason) == (RunStatus.INTERRUPTED, "budget")
    assert calls["n0"] == 3
    assert (await used(home, stopped.run_id))["cost"] == 3
    calls.mend()
    still = await home.resume(wf, stopped.run_id)
    assert (still.reason, calls.total()) == ("budget", 0)
    done = await home.go_on(wf, stopped.run_id, budget=Budget(cost=100))
    assert done.status is RunStatus.COMPLETED
    assert (await used(home, stopped.run_id))["cost"] == 8


async def test_a_node_that_fails_for_good_has_cost_something(home: Home, calls: Calls) -> None:
    wf = chain(calls, budget=Budget(cost=9))
    calls.broken = {"n1"}
    failed = await home.run(wf)
    assert failed.status is RunStatus.FAILED
    assert (await used(home, failed.run_id))["cost"] == 2
    calls.mend()
    await home.resume(wf, failed.run_id)
    assert (await used(home, failed.run_id))["cost"] == 6


async def test_what_was_cut_off_has_cost_something(home: Home, calls: Calls) -> None:
    wf = Workflow("w", idempotent=True)
    began = asyncio.Event()

    @wf.node
    async def a(ctx: Context) -> None:
        calls.began("a")
        ctx.usage(cost=1)
        began.set()
        if calls["a"] == 1:
            await asyncio.sleep(60)

    async with home.engine(wf, grace_seconds=0) as engine:
        handle = await engine.start(wf)
        await began.wait()
    assert (await used(home, handle.run_id))["cost"] == 1
    await home.resume(wf, handle.run_id)
    assert (await used(home, handle.run_id))["cost"] == 2


async def test_usage_adds_up_in_one_attempt(home: Home) -> None:
    wf = Workflow("w")

    @wf.node
    async def a(ctx: Context) -> None:
        for _ in range(3):
            ctx.usage(tokens_in=1, cost=0.5)

    @wf.node
    def b(ctx: Context) -> None:
        ctx.usage(tokens_out=2)

    result = await home.run(wf)
    assert await used(home, result.run_id) == {"tokens_in": 3, "tokens_out": 2, "cost": 1.5}
    plan = await home.plan(wf, result.run_id)
    assert plan["a"].usage["cost"] == 1.5


async def test_a_budget_beside_an_approval(home: Home, calls: Calls) -> None:
    """Spent while something waits for a person: interrupted, and the wait is there after the resume."""
    wf = chain(calls, budget=Budget(cost=2))
    wf.approval("ap")
    stopped = await home.run(wf)
    assert (stopped.status, stopped.reason) == (RunStatus.INTERRUPTED, "budget")
    async with home.engine() as engine:
        await engine.decide(stopped.run_id, "ap")
    done = await home.go_on(wf, stopped.run_id, budget=Budget(cost=10))
    assert done.status is RunStatus.COMPLETED
    assert done["ap"]["approved"] is True


async def test_a_budget_of_another_size_is_the_same_definition(home: Home, calls: Calls) -> None:
    """§4: the definition hash does not cover the budget."""
    stopped = await home.run(chain(calls, budget=Budget(cost=2)))
    done = await home.resume(chain(calls, budget=Budget(cost=20)), stopped.run_id)
    assert done.status is RunStatus.COMPLETED


@pytest.mark.parametrize("most", [-1, True, float("nan")])
def test_a_budget_is_a_number(most: Any) -> None:
    with pytest.raises(DefinitionError, match="Budget"):
        Budget(cost=most)


async def test_a_failed_node_beside_a_spent_budget(home: Home, calls: Calls) -> None:
    wf = chain(calls, budget=Budget(cost=2))

    @wf.node
    async def bad() -> None:
        raise Boom

    result = await home.run(wf)
    assert (result.status, list(result.failures)) == (RunStatus.INTERRUPTED, ["bad"])
