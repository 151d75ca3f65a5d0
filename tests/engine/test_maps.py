"""Maps: one node over the items of a list."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dagresume import Context, ItemFailure, MutatedInput, NodeStatus, NoOutput, Retry, RunStatus, Workflow
from tests.engine.kit import Boom, Calls, Home, listing, settle


async def test_a_map_over_a_run_input(home: Home) -> None:
    wf = Workflow("input")

    @wf.node(for_each={"n": "numbers"})
    async def double(n: int) -> int:
        return n * 2

    assert (await home.run(wf, {"numbers": [1, 2, 3]}))["double"] == [2, 4, 6]
    assert (await home.run(wf, {"numbers": (1, 2)}))["double"] == [2, 4]


async def test_results_come_in_the_order_of_the_input(home: Home) -> None:
    wf = Workflow("order")
    listing(wf, range(5))
    gates = [asyncio.Event() for _ in range(6)]
    gates[5].set()

    @wf.node(for_each={"n": "items"})
    async def item(n: int) -> int:
        await gates[n + 1].wait()
        gates[n].set()
        return n

    result = await home.run(wf)
    assert result["item"] == [0, 1, 2, 3, 4]
    assert result.outputs["item[3]"] == 3
    assert set(result.executed) == {"items", *(f"item[{k}]" for k in range(5))}


async def test_several_lists_are_zipped_strictly(home: Home) -> None:
    wf = Workflow("zip")
    listing(wf, [1, 2], "left")
    listing(wf, ["a", "b"], "right")

    @wf.node(for_each={"x": "left", "y": "right", "z": "given"})
    async def pair(x: int, y: str, z: bool) -> tuple[int, str, bool]:
        return x, y, z

    assert (await home.run(wf, {"given": [True, False]}))["pair"] == [(1, "a", True), (2, "b", False)]
    result = await home.run(wf, {"given": [True]})
    assert list(result.failures) == ["pair"]
    assert "z: 1" in result.failures["pair"].message
    assert "pair[0]" not in result.executed


@pytest.mark.parametrize("value", ["abc", {"a": 1}, 3, None])
async def test_a_map_over_what_is_no_list_fails_by_name(home: Home, value: object) -> None:
    wf = Workflow("no list")

    @wf.node
    async def gives() -> object:
        return value

    @wf.node(for_each={"n": "gives"})
    async def item(n: int) -> int:
        return n

    result = await home.run(wf)
    assert list(result.failures) == ["item"]
    assert "gives" in result.failures["item"].message
    assert type(value).__name__ in result.failures["item"].message


async def test_a_map_over_nothing_completes_with_nothing(home: Home, calls: Calls) -> None:
    """B58, B59: maps of maps of nothing too; no body is called; the same on resume."""
    wf = Workflow("nothing")
    listing(wf, [])

    @wf.node(for_each={"n": "items"})
    async def f(n: int) -> int:
        calls.began("f")
        return n

    @wf.node(for_each={"n": "f"})
    async def g(n: int) -> int:
        calls.began("g")
        return n

    @wf.node
    async def join(g: list[int]) -> int:
        return len(g)

    @wf.node
    async def after(join: int) -> int:
        calls.began("after")
        return join

    calls.broken = {"after"}
    first = await home.run(wf)
    assert (first["f"], first["g"], first[join]) == ([], [], 0)
    calls.broken = set()
    result = await home.resume(wf, first.run_id)
    assert (result["f"], result["g"], result[join], result[after]) == ([], [], 0, 0)
    assert calls == {"after": 2}


async def test_not_expanded_yet_is_not_the_same_as_empty(home: Home, calls: Calls) -> None:
    """B56: the producer failed; on resume producer, items and join run in this order."""
    wf = Workflow("not yet")

    @wf.node
    async def gen() -> list[int]:
        calls.began("gen")
        return [1, 2]

    @wf.node(for_each={"n": "gen"})
    async def item(n: int) -> int:
        calls.began("item")
        return n

    @wf.node
    async def join(item: list[int]) -> int:
        calls.began("join")
        return sum(item)

    calls.broken = {"gen"}
    run_id = (await home.run(wf)).run_id
    plan = await home.plan(wf, run_id)
    assert [plan[name].action for name in ("gen", "item", "join")] == ["run", "check", "run"]
    calls.mend()
    assert (await home.resume(wf, run_id))[join] == 3
    assert calls.order == ["gen", "item", "item", "join"]


async def test_none_stands_only_where_the_body_gave_none(home: Home) -> None:
    """B53."""
    wf = Workflow("none")
    listing(wf, range(3))

    @wf.node(for_each={"n": "items"})
    async def item(n: int) -> dict[str, int] | None:
        await asyncio.sleep(0)
        return {"v": n} if n != 1 else None

    assert (await home.run(wf))["item"] == [{"v": 0}, None, {"v": 2}]


async def test_a_failed_map_has_tried_all_its_items(home: Home, calls: Calls) -> None:
    wf = Workflow("all tried")
    listing(wf, range(10))

    @wf.node(for_each={"n": "items"}, concurrency=1)
    async def item(n: int) -> int:
        calls.began(f"{n}")
        return n

    @wf.node
    async def join(item: list[int]) -> None:
        calls.began("join")

    calls.broken = {"2", "5"}
    result = await home.run(wf)
    assert list(result.failures) == ["item[2]", "item[5]"]
    assert len(calls) == 10
    assert (await home.statuses(result.run_id))["join"] == "upstream_failed"


async def test_resume_runs_only_the_items_that_are_missing(home: Home, calls: Calls) -> None:
    """E, B11: and its join once."""
    wf = Workflow("missing")
    listing(wf, range(10))

    @wf.node(for_each={"n": "items"})
    async def item(n: int) -> int:
        calls.began(f"{n}")
        return n * n

    @wf.node
    async def join(item: list[int]) -> int:
        calls.began("join")
        return sum(item)

    calls.broken = {"2", "5"}
    run_id = (await home.run(wf)).run_id
    plan = await home.plan(wf, run_id, items=True)
    assert (plan["item"].action, dict(plan["item"].items)) == ("run", {"reuse": 8, "run": 2})
    assert {p for p, d in plan.items() if d.action == "run"} == {"item", "item[2]", "item[5]", "join"}
    calls.mend()
    result = await home.resume(wf, run_id)
    assert dict(calls) == {"2": 1, "5": 1, "join": 1}
    assert result[join] == 285
    assert set(result.executed) == {"item[2]", "item[5]", "join"}
    assert set(result.reused) == {"items", *(f"item[{k}]" for k in range(10) if k not in {2, 5})}


async def test_items_of_a_failed_map_have_their_outputs(home: Home) -> None:
    """What is stored can be asked for, live and later; a failed item says that it is failed."""
    wf = Workflow("half")
    listing(wf, range(3))

    @wf.node(for_each={"n": "items"})
    async def item(n: int) -> int:
        if n == 1:
            raise Boom
        return n

    live = await home.run(wf)
    async with home.engine(wf) as engine:
        for result in (live, await engine.result(live.run_id)):
            with pytest.raises(NoOutput, match="is failed"):
                result.outputs["item"]
            with pytest.raises(NoOutput, match="is failed"):
                result.outputs["item[1]"]
            with pytest.raises(NoOutput, match="does not exist"):
                result.outputs["item[3]"]
            assert result.outputs["item[2]"] == 2


@pytest.mark.parametrize(
    ("tolerate", "ends"), [(1, "failed"), (2, "completed"), (0.19, "failed"), (0.2, "completed")]
)
async def test_tolerate_is_a_count_or_a_share(home: Home, tolerate: float, ends: str) -> None:
    wf = Workflow("tolerate")
    listing(wf, range(10))

    @wf.node(for_each={"n": "items"}, tolerate=tolerate)
    async def item(n: int) -> int:
        if n in {3, 7}:
            raise Boom(f"no {n}")
        return n

    @wf.node
    async def join(item: list[int | ItemFailure]) -> list[str]:
        return [type(each).__name__ for each in item]

    result = await home.run(wf)
    assert result.status == ends
    if ends == "completed":
        assert result[join].count("ItemFailure") == 2
        failure = result["item"][3]
        assert isinstance(failure, ItemFailure)
        assert (failure.path, failure.message) == ("item[3]", "no 3")
        assert result.failures == {}


async def test_tolerated_failures_stay_so_on_resume(home: Home, calls: Calls) -> None:
    wf = Workflow("stay")
    listing(wf, range(4))

    @wf.node(for_each={"n": "items"}, tolerate=0.5)
    async def item(n: int) -> int:
        calls.began(f"{n}")
        return n

    @wf.node
    async def join(item: list[int | ItemFailure]) -> list[str]:
        calls.began("join")
        return [type(each).__name__ for each in item]

    calls.broken = {"1", "join"}
    run_id = (await home.run(wf)).run_id
    plan = await home.plan(wf, run_id, items=True)
    assert plan["item[1]"].action == "reuse"
    calls.mend()
    result = await home.resume(wf, run_id)
    assert dict(calls) == {"join": 1}
    assert result[join] == ["int", "ItemFailure", "int", "int"]
    calls.mend()
    result = await home.retry(wf, run_id)  # tolerated: not among everything that failed
    assert not calls
    assert (await home.info(run_id)).failures == {}


async def test_give_up_after_stops_a_map_that_only_fails(home: Home, calls: Calls) -> None:
    wf = Workflow("give up", retry=Retry(give_up_after=3))
    listing(wf, range(100))
    mended = [False]

    @wf.node(for_each={"n": "items"}, concurrency=1)
    async def item(n: int) -> int:
        calls.began("item")
        if n < 50 and not mended[0]:
            raise Boom
        return n

    result = await home.run(wf)
    assert calls["item"] == 3
    assert list(result.failures) == ["item[0]", "item[1]", "item[2]"]
    mended[0] = True
    result = await home.resume(wf, result.run_id)
    assert result["item"] == list(range(100))
    assert calls["item"] == 103


async def test_concurrency_bounds_the_items_of_a_map(home: Home) -> None:
    wf = Workflow("bounded")
    listing(wf, range(30))
    alive = [0, 0]

    @wf.node(for_each={"n": "items"}, concurrency=3)
    async def item(n: int) -> int:
        alive[0] += 1
        alive[1] = max(alive)
        for _ in range(5):
            await asyncio.sleep(0)
        alive[0] -= 1
        return n

    await home.run(wf)
    assert alive == [0, 3]


async def test_a_wide_map_does_not_starve_another_branch(home: Home) -> None:
    wf = Workflow("fair")
    listing(wf, range(200))
    seen: list[str] = []

    @wf.node(for_each={"n": "items"})
    async def wide(n: int) -> None:
        seen.append("wide")
        await asyncio.sleep(0)

    @wf.node(depends_on=["items"])
    async def narrow() -> None:
        seen.append("narrow")

    async with home.engine(concurrency=2) as engine:
        await engine.run(wf)
    assert seen.index("narrow") < 20


async def test_a_chained_map_streams(home: Home) -> None:
    """Item i begins when item i above has completed, though others above have not."""
    wf = Workflow("stream")
    listing(wf, range(2))
    passed = asyncio.Event()

    @wf.node(for_each={"n": "items"})
    async def first(n: int) -> int:
        if n == 0:
            await passed.wait()  # ends only after item 1 went through the second map
        return n + 10

    @wf.node(for_each={"n": "first"})
    async def second(n: int) -> int:
        if n == 11:
            passed.set()
        return n * 2

    assert (await home.run(wf))["second"] == [20, 22]


async def test_none_and_item_failures_pass_a_chained_map_uncalled(home: Home, calls: Calls) -> None:
    wf = Workflow("pass")
    listing(wf, range(4))

    @wf.node(for_each={"n": "items"}, tolerate=1)
    async def first(n: int) -> int | None:
        if n == 2:
            raise Boom
        return None if n == 1 else n

    @wf.node(for_each={"x": "first"})
    async def second(x: int) -> int:
        calls.began(str(x))
        return x

    @wf.node(for_each={"x": "second"})
    async def third(x: int) -> int:
        calls.began(str(x))
        return x

    result = await home.run(wf)
    assert dict(calls) == {"0": 2, "3": 2}
    for stage in ("second", "third"):
        assert [type(each).__name__ for each in result[stage]] == ["int", "NoneType", "ItemFailure", "int"]
    assert "second[1]" not in result.executed


async def test_none_passes_a_chained_map_uncalled_on_resume_too(home: Home, calls: Calls) -> None:
    """C7: live equals resumed, also where the map above completed in an earlier process."""
    wf = Workflow("pass later")
    listing(wf, range(3))

    @wf.node
    async def other() -> int:
        calls.began("other")
        return 5

    @wf.node(for_each={"n": "items"}, tolerate=1)
    async def first(n: int) -> int | None:
        if n == 2:
            raise Boom
        return None if n == 1 else n

    @wf.node(for_each={"x": "first"})
    async def second(x: int, other: int) -> int:
        calls.began(f"second {x!r}")
        return x + other

    calls.broken = {"other"}
    run_id = (await home.run(wf)).run_id
    calls.mend()
    result = await home.resume(wf, run_id)
    assert dict(calls) == {"other": 1, "second 0": 1}
    assert result["second"][:2] == [5, None]
    assert isinstance(result["second"][2], ItemFailure)


async def test_a_failed_item_blocks_only_what_takes_it_below(home: Home, calls: Calls) -> None:
    wf = Workflow("blocks")
    listing(wf, range(3))

    @wf.node(for_each={"n": "items"})
    async def first(n: int) -> int:
        calls.began(f"first {n}")
        return n

    @wf.node(for_each={"x": "first"})
    async def second(x: int) -> int:
        calls.began(f"second {x}")
        return x

    @wf.node
    async def join(second: list[int]) -> int:
        calls.began("join")
        return sum(second)

    calls.broken = {"first 1"}
    result = await home.run(wf)
    assert list(result.failures) == ["first[1]"]
    assert set(calls) == {"first 0", "first 1", "first 2", "second 0", "second 2"}
    calls.mend()
    result = await home.resume(wf, result.run_id)
    assert dict(calls) == {"first 1": 1, "second 1": 1, "join": 1}
    assert result[join] == 3


async def test_a_chained_map_below_a_failed_one_was_not_interrupted(home: Home) -> None:
    """Every node ends settled: what a failure blocks is `upstream_failed`, not running or interrupted."""
    wf = Workflow("settled")
    listing(wf, range(3))

    @wf.node(for_each={"n": "items"})
    async def first(n: int) -> int:
        if n == 1:
            raise Boom
        return n

    @wf.node(for_each={"x": "first"})
    async def second(x: int) -> int:
        return x

    info = await home.info((await home.run(wf)).run_id)
    assert info.nodes["second"].status is NodeStatus.UPSTREAM_FAILED


async def test_an_item_failing_in_a_chain_is_retried_item_by_item(home: Home, calls: Calls) -> None:
    """`retry(from_node=path of an item)`: of a chained map only the items below the named one."""
    wf = Workflow("items")
    listing(wf, range(3))

    @wf.node(for_each={"n": "items"})
    async def first(n: int) -> int:
        calls.began(f"first {n}")
        return n

    @wf.node(for_each={"x": "first"})
    async def second(x: int) -> int:
        calls.began(f"second {x}")
        return x

    @wf.node
    async def join(second: list[int]) -> int:
        calls.began("join")
        return sum(second)

    run_id = (await home.run(wf)).run_id
    calls.mend()
    result = await home.retry(wf, run_id, "first[1]")
    assert result.status is RunStatus.COMPLETED
    assert dict(calls) == {"first 1": 1, "second 1": 1, "join": 1}
    assert result[join] == 3


async def test_index_and_path_of_an_item(home: Home) -> None:
    wf = Workflow("context")
    listing(wf, "ab")

    @wf.node(for_each={"x": "items"})
    async def item(x: str, ctx: Context) -> tuple[int | None, str, str]:
        return ctx.index, ctx.path, ctx.node

    assert (await home.run(wf))["item"] == [(0, "item[0]", "item"), (1, "item[1]", "item")]


# -- a list that changed --------------------------------------------------------------------------------


def changing(calls: Calls, values: list[Any], version: str, *, idempotent: bool) -> Workflow:
    """A workflow whose list is made anew when the version of the node that makes it changes."""
    wf = Workflow("changing")

    @wf.node(idempotent=True, version=version)
    async def items() -> list[Any]:
        return list(values)

    @wf.node(for_each={"n": "items"}, idempotent=idempotent)
    async def item(n: Any) -> Any:
        calls.began(str(n))
        return [n]

    @wf.node(idempotent=True)
    async def join(item: list[Any]) -> Any:
        calls.began("join")
        return item

    return wf


async def test_a_moved_item_is_reused(home: Home, calls: Calls) -> None:
    """B76: items are matched by value and occurrence, not by place."""
    first = changing(calls, ["a", "b", "b", "c"], "1", idempotent=False)
    calls.broken = {"join"}
    run_id = (await home.run(first)).run_id
    calls.mend()
    second = changing(calls, ["b", "c", "a", "b"], "2", idempotent=False)
    result = await home.resume(second, run_id)
    assert dict(calls) == {"join": 1}
    assert result["join"] == [["b"], ["c"], ["a"], ["b"]]
    assert result["item"] == result["join"]
    async with home.engine(second) as engine:
        assert (await engine.result(run_id))["item"] == result["join"]


async def test_one_item_fewer_and_one_more(home: Home, calls: Calls) -> None:
    """B76: what is gone is out of the result, what is new runs, the rest is reused."""
    calls.broken = {"join"}
    run_id = (await home.run(changing(calls, ["a", "b", "c"], "1", idempotent=False))).run_id
    calls.mend()
    calls.broken = {"join"}
    fewer = await home.resume(changing(calls, ["a", "c"], "2", idempotent=False), run_id)
    assert dict(calls) == {"join": 1}
    assert fewer["item"] == [["a"], ["c"]]
    calls.mend()
    more = await home.resume(changing(calls, ["x", "a", "c", "y"], "3", idempotent=False), run_id)
    assert dict(calls) == {"x": 1, "y": 1, "join": 1}
    assert more["item"] == [["x"], ["a"], ["c"], ["y"]]
    assert set((await home.info(run_id)).nodes) >= {"item[0]", "item[3]"}


async def test_a_changed_value_reruns_if_idempotent(home: Home, calls: Calls) -> None:
    """B76."""
    calls.broken = {"join"}
    run_id = (await home.run(changing(calls, ["a", "b"], "1", idempotent=True))).run_id
    calls.mend()
    result = await home.resume(changing(calls, ["a", "B"], "2", idempotent=True), run_id)
    assert dict(calls) == {"B": 1, "join": 1}
    assert result["join"] == [["a"], ["B"]]


async def test_a_changed_value_is_held_if_not_idempotent(home: Home, calls: Calls) -> None:
    """B76: the run waits for a person, and what is below does not run with the old value."""
    calls.broken = {"join"}
    run_id = (await home.run(changing(calls, ["a", "b"], "1", idempotent=False))).run_id
    calls.mend()
    wf = changing(calls, ["a", "B"], "2", idempotent=False)
    result = await home.resume(wf, run_id)
    assert (result.status, result.reason) == (RunStatus.WAITING, "held")
    assert not calls
    info = await home.info(run_id)
    assert info.status is RunStatus.WAITING
    assert info.nodes["item[1]"].status is NodeStatus.WAITING
    plan = await home.plan(wf, run_id, items=True)
    assert plan["item[1]"].action == "hold"
    result = await home.retry(wf, run_id)  # a person's word: everything held
    assert result.status is RunStatus.COMPLETED
    assert result["join"] == [["a"], ["B"]]
    assert dict(calls) == {"B": 1, "join": 1}


async def test_failed_items_of_a_list_that_changed(home: Home, calls: Calls) -> None:
    calls.broken = {"b"}
    run_id = (await home.run(changing(calls, ["a", "b", "c"], "1", idempotent=True))).run_id
    calls.mend()
    result = await home.resume(changing(calls, ["c", "b", "d", "a"], "2", idempotent=True), run_id)
    assert dict(calls) == {"b": 1, "d": 1, "join": 1}
    assert result["join"] == [["c"], ["b"], ["d"], ["a"]]


# -- what items share -----------------------------------------------------------------------------------


async def test_debug_notices_a_changed_broadcast_output(home: Home) -> None:
    wf = Workflow("mutates")
    listing(wf, range(2))

    @wf.node
    async def shared() -> dict[str, int]:
        return {}

    @wf.node(for_each={"n": "items"})
    async def item(n: int, shared: dict[str, int]) -> int:
        shared["x"] = n
        return n

    async with home.engine(debug=True) as engine:
        result = await engine.run(wf, raise_on_failure=False)
    assert set(result.failures) == {"item[0]", "item[1]"}
    assert isinstance(result.failures["item[0]"].exception, MutatedInput)
    assert result["shared"] == {}


async def test_debug_notices_a_changed_broadcast_input(home: Home) -> None:
    wf = Workflow("mutates")
    listing(wf, range(2))

    @wf.node(for_each={"n": "items"})
    async def item(n: int, shared: dict[str, int]) -> int:
        shared["x"] = n
        return n

    async with home.engine(debug=True) as engine:
        result = await engine.run(wf, {"shared": {}}, raise_on_failure=False)
    assert set(result.failures) == {"item[0]", "item[1]"}
    assert isinstance(result.failures["item[0]"].exception, MutatedInput)


async def test_debug_lets_a_pure_parent_be_anything(home: Home) -> None:
    wf = Workflow("pure", idempotent=True)
    listing(wf, range(2))

    @wf.node(checkpoint=False)
    async def add() -> Any:
        return lambda n: n + 1

    @wf.node(for_each={"n": "items"})
    async def item(n: int, add: Any) -> int:
        return int(add(n))

    async with home.engine(debug=True) as engine:
        assert (await engine.run(wf))["item"] == [1, 2]


async def test_an_item_is_an_object_of_its_own(home: Home) -> None:
    wf = Workflow("own")
    same = {"x": 0}
    listing(wf, [same, same])

    @wf.node(for_each={"d": "items"}, retry=Retry(2, delay=0))
    async def item(d: dict[str, int], ctx: Context) -> dict[str, int]:
        assert d == {"x": 0}
        d["x"] += 1
        if ctx.attempt == 1:
            raise Boom
        return d

    assert (await home.run(wf))["item"] == [{"x": 1}, {"x": 1}]


async def test_fifty_items_that_end_in_one_tick_each_count_once(home: Home) -> None:
    """B62: each body once, each child once."""
    for _ in range(5):
        wf, counts = Workflow("tick"), Calls()
        listing(wf, range(50))
        gate = asyncio.Event()

        @wf.node(for_each={"n": "items"})
        async def item(n: int, _counts: Any = None, *, _gate: asyncio.Event | None = None) -> int:
            counts.began(str(n))  # noqa: B023  # called within this turn
            await gate.wait()  # noqa: B023
            return n

        @wf.node
        async def join(item: list[int]) -> int:
            counts.began("join")  # noqa: B023
            return sum(item)

        async with home.engine() as engine:
            handle = await engine.start(wf)
            await settle(lambda: len(counts) == 50)  # noqa: B023
            gate.set()
            assert (await handle.result())[join] == 1225
        assert set(counts.values()) == {1}


async def test_two_maps_of_different_speed_join_once(home: Home, calls: Calls) -> None:
    """B64."""
    wf = Workflow("two maps")
    listing(wf, range(5))

    @wf.node(for_each={"n": "items"})
    async def fast(n: int) -> int:
        calls.began(f"fast {n}")
        return n

    @wf.node(for_each={"n": "items"})
    async def slow(n: int) -> int:
        calls.began(f"slow {n}")
        for _ in range(20):
            await asyncio.sleep(0)
        return n

    @wf.node
    async def join(fast: list[int], slow: list[int]) -> int:
        calls.began("join")
        return sum(fast) + sum(slow)

    assert (await home.run(wf))[join] == 20
    assert set(calls.values()) == {1}
    assert len(calls) == 11


async def test_a_map_with_a_skipped_parent_completes(home: Home, calls: Calls) -> None:
    """Join rules hold for maps too: none_failed with a skipped parent, all_done with a failed one."""
    wf = Workflow("joined")
    listing(wf, [1, 2])
    add = calls.adder(wf)
    add("bad")
    add("skipped", "items", trigger="any_failed")
    calls.broken = {"bad"}

    @wf.node(for_each={"n": "items"}, depends_on=["skipped"])
    async def first(n: int) -> int:
        return n

    @wf.node(for_each={"n": "items"}, trigger="all_done")
    async def second(n: int, bad: str | None) -> str:
        return f"{n} {bad}"

    @wf.node(for_each={"x": "first"}, depends_on=["skipped"])
    async def third(x: int) -> int:
        return x * 10

    result = await home.run(wf)
    assert list(result.failures) == ["bad"]
    assert (result["first"], result["second"], result["third"]) == ([1, 2], ["1 None", "2 None"], [10, 20])
