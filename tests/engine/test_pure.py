"""`checkpoint=False`: computed again when somebody needs it, never stored."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dagresume import DefinitionError, NoOutput, Retry, RunStatus, Workflow
from tests.engine.kit import Boom, Calls, CountingStore, Home, listing


async def test_a_pure_output_may_be_anything_and_is_shared(home: Home) -> None:
    wf = Workflow("pure", idempotent=True)
    lock = threading.Lock()
    seen: list[object] = []

    @wf.node(checkpoint=False)
    async def p() -> Any:
        return lock

    @wf.node
    async def a(p: Any) -> None:
        seen.append(p)

    @wf.node
    async def b(p: Any) -> None:
        seen.append(p)

    result = await home.run(wf)
    assert result.status is RunStatus.COMPLETED
    assert seen == [lock, lock]
    assert "p" not in result.outputs
    with pytest.raises(NoOutput, match="checkpoint=False"):
        result["p"]


async def test_it_is_made_again_only_for_what_runs(home: Home, calls: Calls) -> None:
    """The plan says so too: `run`, reason recomputed."""
    wf = Workflow("again")

    def pure(name: str) -> None:
        async def body() -> str:
            calls.began(name)
            return name

        wf.node(id=name, checkpoint=False, idempotent=True)(body)

    pure("needed")
    pure("idle")
    pure("ordering")

    @wf.node
    async def done(idle: str) -> str:
        calls.began("done")
        return idle

    @wf.node(depends_on=["ordering"])
    async def broken(needed: str) -> str:
        calls.began("broken")
        return needed

    calls.broken = {"broken"}
    run_id = (await home.run(wf)).run_id
    assert set(calls) == {"needed", "idle", "ordering", "done", "broken"}
    plan = await home.plan(wf, run_id)
    assert (plan["needed"].action, plan["needed"].reason) == ("run", "recomputed")
    assert plan["idle"].action == plan["ordering"].action == "reuse"
    calls.mend()
    result = await home.resume(wf, run_id)
    assert dict(calls) == {"needed": 1, "broken": 1}
    assert list(result.executed) == ["needed", "broken"]
    assert set(result.reused) == {"idle", "ordering", "done"}


async def test_a_chain_of_pure_nodes_is_made_again_in_order(home: Home, calls: Calls) -> None:
    wf = Workflow("chain", idempotent=True)

    @wf.node(checkpoint=False)
    async def p() -> list[int]:
        calls.began("p")
        return [1]

    @wf.node(checkpoint=False)
    async def q(p: list[int]) -> list[int]:
        calls.began("q")
        return [*p, 2]

    @wf.node
    async def a(q: list[int], p: list[int]) -> list[int]:
        calls.began("a")
        return q + p

    calls.broken = {"a"}
    run_id = (await home.run(wf)).run_id
    calls.mend()
    result = await home.resume(wf, run_id)
    assert calls.order == ["p", "q", "a"]
    assert result[a] == [1, 2, 1]


async def test_a_recomputed_parent_never_makes_its_child_run(home: Home, calls: Calls) -> None:
    """Its own fingerprint stands for it: a random value made again is no changed input."""
    wf = Workflow("random")
    values = iter(range(100))

    @wf.node(checkpoint=False, idempotent=True)
    async def p() -> int:
        calls.began("p")
        return next(values)

    @wf.node
    async def done(p: int) -> int:
        calls.began("done")
        return p

    @wf.node
    async def broken(p: int) -> int:
        calls.began("broken")
        return p

    calls.broken = {"broken"}
    run_id = (await home.run(wf)).run_id
    calls.mend()
    result = await home.resume(wf, run_id)
    assert dict(calls) == {"p": 1, "broken": 1}
    assert (result[done], result[broken]) == (0, 1)


async def test_a_pure_node_that_fails_blocks_what_is_below(home: Home, calls: Calls) -> None:
    wf = Workflow("fails", idempotent=True)

    @wf.node(checkpoint=False)
    async def p() -> int:
        calls.began("p")
        return 1

    @wf.node
    async def a(p: int) -> int:
        calls.began("a")
        return p

    calls.broken = {"p"}
    result = await home.run(wf)
    assert list(result.failures) == ["p"]
    calls.mend()
    assert (await home.resume(wf, result.run_id))[a] == 1


async def test_a_pure_node_that_fails_when_made_again_fails_the_run(home: Home, calls: Calls) -> None:
    wf = Workflow("fails again", idempotent=True)

    @wf.node(checkpoint=False)
    async def p() -> int:
        calls.began("p")
        return 1

    @wf.node
    async def a(p: int) -> int:
        calls.began("a")
        return p

    calls.broken = {"a"}
    run_id = (await home.run(wf)).run_id
    calls.broken = {"p"}
    result = await home.resume(wf, run_id)
    assert result.status is RunStatus.FAILED
    assert list(result.failures) == ["p"]
    calls.mend()
    result = await home.resume(wf, run_id)
    assert result.status is RunStatus.COMPLETED
    assert dict(calls) == {"p": 1, "a": 1}


async def test_a_pure_map_is_made_again_as_a_whole(home: Home, calls: Calls) -> None:
    wf = Workflow("map", idempotent=True)
    listing(wf, range(3))

    @wf.node(for_each={"n": "items"}, checkpoint=False)
    async def p(n: int) -> Any:
        calls.began("p")
        return lambda: n

    @wf.node
    async def a(p: list[Any]) -> int:
        calls.began("a")
        return sum(each() for each in p)

    calls.broken = {"a"}
    run_id = (await home.run(wf)).run_id
    calls.mend()
    result = await home.resume(wf, run_id)
    assert result[a] == 3
    assert dict(calls) == {"p": 3, "a": 1}


async def test_a_map_over_a_pure_list(home: Home, calls: Calls) -> None:
    wf = Workflow("over pure", idempotent=True)

    @wf.node(checkpoint=False)
    async def things() -> list[Any]:
        calls.began("things")
        return [lambda n=n: n for n in range(3)]

    @wf.node(for_each={"thing": "things"})
    async def item(thing: Any) -> int:
        n = int(thing())
        calls.began(f"item {n}")
        return n

    calls.broken = {"item 1"}
    run_id = (await home.run(wf)).run_id
    calls.mend()
    result = await home.resume(wf, run_id)
    assert result[item] == [0, 1, 2]
    assert dict(calls) == {"things": 1, "item 1": 1}


async def test_a_pure_node_is_retried_like_any(home: Home, calls: Calls) -> None:
    wf = Workflow("retried", idempotent=True, retry=Retry(2, delay=0))

    @wf.node(checkpoint=False)
    async def p() -> int:
        calls.began("p")
        if calls["p"] == 1:
            raise Boom
        return 1

    @wf.node
    async def a(p: int) -> int:
        return p

    assert (await home.run(wf))[a] == 1


async def test_pure_nodes_cost_no_commits_of_their_own(home: Home) -> None:
    """§5: their rows ride with others."""
    wf = Workflow("cheap", idempotent=True)
    stores: list[CountingStore] = []

    async def p(x: int = 0) -> int:
        return x + 1

    for k in range(100):
        wf.node(id=f"p{k}", checkpoint=False, args={"x": f"p{k - 1}"} if k else {})(p)

    @wf.node(args={"x": "p99"})
    async def a(x: int) -> int:
        return x

    def counted(store: Any) -> Any:
        stores.append(CountingStore(store))
        return stores[-1]

    async with home.engine(wrap=counted) as engine:
        assert (await engine.run(wf))[a] == 100
    assert len(stores[0].transactions) <= 5


def test_a_pure_node_must_be_idempotent() -> None:
    """`checkpoint=False` (needs idempotent): the node's word or its workflow's."""
    wf = Workflow("not idempotent")

    @wf.node(checkpoint=False)
    async def p() -> int:
        return 1

    with pytest.raises(DefinitionError, match=r"'p'.*idempotent"):
        _ = wf.graph
    fine = Workflow("idempotent", idempotent=True)
    fine.node(checkpoint=False)(p)
    assert len(fine.graph) == 1


def test_a_long_chain_of_pure_nodes_is_made_again_without_recursion() -> None:
    """I, B67."""
    import asyncio

    broken = [True]
    wf = Workflow("long", idempotent=True)

    async def p(x: int = 0) -> int:
        return x + 1

    for k in range(1500):
        wf.node(id=f"p{k}", checkpoint=False, args={"x": f"p{k - 1}"} if k else {})(p)

    @wf.node(args={"x": "p1499"})
    async def a(x: int) -> int:
        if broken:
            raise Boom
        return x

    async def both() -> Any:
        home = Home(None)
        run_id = (await home.run(wf)).run_id
        broken.clear()
        return await home.resume(wf, run_id)

    assert asyncio.run(both())[a] == 1500


async def test_a_pure_map_hands_on_what_it_is_not_called_with(home: Home, calls: Calls) -> None:
    wf = Workflow("mixed", idempotent=True)
    listing(wf, [1, None, 2])

    @wf.node(for_each={"x": "items"})
    async def first(x: int | None) -> int | None:
        return x

    @wf.node(for_each={"x": "first"}, checkpoint=False)
    async def second(x: int) -> int:
        calls.began(f"second {x}")
        return x * 10

    @wf.node
    async def join(second: list[int | None]) -> list[int | None]:
        return second

    assert (await home.run(wf))["join"] == [10, None, 20]
    assert dict(calls) == {"second 1": 1, "second 2": 1}
