"""Rollback: what completed is undone, the last first, durably; B136, B137 and the kind they stand for."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import networkx as nx
import pytest

from dagresume import (
    AlreadyRunning,
    CheckpointLost,
    Context,
    DefinitionError,
    Engine,
    Irreversible,
    NodeTimeout,
    NoOutput,
    Retry,
    RetryAfter,
    RolledBack,
    RunCancelled,
    RunFailed,
    RunLocked,
    RunResult,
    Value,
    VersionMismatch,
    Workflow,
    WorkflowNotRegistered,
)
from dagresume.context import idempotency_key
from dagresume.testing import FakeClock
from tests.engine.kit import Boom, Calls, FaultyStore, Home, SlowStore, listing, settle

pytestmark = pytest.mark.anyio


class Undos(Calls):
    """Counts undos, notes what each was given, and breaks those in `broken`."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[str, Any] = {}
        self.contexts: dict[str, list[Context]] = {}

    async def undo(self, output: Any, ctx: Context) -> None:
        self.outputs[ctx.path] = output
        self.contexts.setdefault(ctx.path, []).append(ctx)
        self.began(ctx.path)


@pytest.fixture
def undos() -> Undos:
    return Undos()


async def rollback(home: Home, wf: Workflow, run_id: str, to: Any = None, **options: Any) -> RunResult:
    async with home.engine(wf) as engine:
        return await engine.rollback(run_id, to, **options)


def chain(calls: Calls, undos: Undos, count: int = 4, **options: Any) -> Workflow:
    """t1 → t2 → …, each can be undone."""
    wf = Workflow("chain", **options)
    add = calls.adder(wf)
    for n in range(1, count + 1):
        add(f"t{n}", *([f"t{n - 1}"] if n > 1 else []), compensate=undos.undo)
    return wf


# -- order ----------------------------------------------------------------------------------------------


async def test_a_chain_is_undone_from_its_end_and_not_the_node_that_failed(
    home: Home, calls: Calls, undos: Undos
) -> None:
    """B136."""
    wf = chain(calls, undos)
    calls.broken.add("t4")
    run_id = (await home.run(wf)).run_id
    result = await rollback(home, wf, run_id)
    assert undos.order == ["t3", "t2", "t1"]
    assert undos.outputs == {"t1": "t1", "t2": "t2", "t3": "t3"}
    assert (result.status, list(result.failures)) == ("rolled_back", ["t4"])
    assert await home.statuses(run_id) == dict.fromkeys(["t1", "t2", "t3"], "compensated") | {"t4": "failed"}
    assert (await home.info(run_id)).status == "rolled_back"
    kinds = [(e.kind, e.path) for e in await home.events(run_id)]
    start = kinds.index(("run.rolling_back", None))
    assert kinds[start + 1 :] == [
        (kind, path) for path in ("t3", "t2", "t1") for kind in ("undo.started", "node.compensated")
    ] + [("run.rolled_back", None)]


async def test_in_a_diamond_what_uses_a_node_is_undone_before_it(
    home: Home, calls: Calls, undos: Undos
) -> None:
    """B136: in the order of completion at run time, not that of the definition."""
    wf = Workflow("diamond")
    gate = asyncio.Event()

    async def slow() -> str:
        await gate.wait()
        return "b"

    async def opens() -> str:
        gate.set()
        return "c2"

    add = calls.adder(wf)
    add("a", compensate=undos.undo)
    wf.node(id="b", depends_on="a", compensate=undos.undo)(slow)
    add("c", "a", compensate=undos.undo)
    wf.node(id="c2", depends_on="c", compensate=undos.undo)(opens)
    add("d", "b", "c2", compensate=undos.undo)
    run_id = (await home.run(wf)).run_id
    assert (await rollback(home, wf, run_id)).status == "rolled_back"
    assert undos.order == ["d", "b", "c2", "c", "a"]


async def test_a_node_that_ran_again_is_undone_after_what_used_it(
    home: Home, calls: Calls, undos: Undos
) -> None:
    """It gave the same again, so what is below was reused: it completed last, and is needed longest."""

    def again(version: str) -> Workflow:
        wf = Workflow("again", idempotent=True)
        listing(wf, [1, 2])
        wf.node(id="a", args={"x": "items"}, version=version, compensate=undos.undo)(lambda x: 1)
        wf.node(id="b", args={"x": "a"}, compensate=undos.undo)(lambda x: [x, x])
        wf.node(id="m", for_each={"x": "b"}, version=version, compensate=undos.undo)(lambda x: x)
        wf.node(id="n", for_each={"x": "m"}, concurrency=1, compensate=undos.undo)(lambda x: x)
        calls.adder(wf)("end", "n")
        return wf

    calls.broken.add("end")
    run_id = (await home.run(again("1"))).run_id
    wf = again("2")
    result = await home.resume(wf, run_id)
    assert set(result.executed) == {"a", "m[0]", "m[1]", "end"}
    await rollback(home, wf, run_id)
    place = {path: n for n, path in enumerate(undos.order)}
    assert len(place) == 6
    assert max(place["n[0]"], place["n[1]"], place["m[0]"], place["m[1]"]) < place["b"] < place["a"]
    assert place["n[0]"] < place["m[0]"]
    assert place["n[1]"] < place["m[1]"]


async def turn(pause: int) -> None:
    """Let the others go first, so many times."""
    for _ in range(pause):
        await asyncio.sleep(0)


async def test_random_graphs_respect_every_edge(home: Home, undos: Undos) -> None:
    """B136 for any graph."""
    for seed in range(5):
        graph = nx.gnp_random_graph(12, 0.25, seed=seed, directed=True)
        edges = [(f"n{a}", f"n{b}") for a, b in graph.edges if a < b]
        wf = Workflow(f"random{seed}")
        for n in range(12):
            after = [a for a, b in edges if b == f"n{n}"]
            args = {"pause": Value((n * 7 + seed) % 5)}
            wf.node(id=f"n{n}", depends_on=after, args=args, compensate=undos.undo)(turn)
        run_id = (await home.run(wf)).run_id
        completed = [e.path for e in await home.events(run_id) if e.kind == "node.completed"]
        await rollback(home, wf, run_id)
        assert undos.order == completed[::-1]
        assert all(undos.order.index(b) < undos.order.index(a) for a, b in edges)
        undos.mend()


async def test_a_very_long_chain(sqlite_home: Home, undos: Undos) -> None:
    """No recursion over the graph."""
    wf = Workflow("long", idempotent=True)
    for n in range(1500):
        wf.node(id=f"n{n}", depends_on=[f"n{n - 1}"] if n else [], compensate=undos.undo)(lambda: None)
    run_id = (await sqlite_home.run(wf)).run_id
    assert (await rollback(sqlite_home, wf, run_id)).status == "rolled_back"
    assert undos.order == [f"n{n}" for n in reversed(range(1500))]


# -- maps, loops, inner workflows -----------------------------------------------------------------------


async def test_items_of_maps_each_by_their_own_path(home: Home, undos: Undos) -> None:
    wf = Workflow("maps")
    listing(wf, [1, 2, 3])

    async def double(x: int) -> int:
        if x == 3:
            raise Boom
        return 2 * x

    wf.node(for_each={"x": "items"}, concurrency=1, compensate=undos.undo)(double)
    first = await home.run(wf)
    result = await rollback(home, wf, first.run_id)
    assert undos.order == ["double[1]", "double[0]"]
    assert undos.outputs == {"double[0]": 2, "double[1]": 4}
    assert result.status == "rolled_back"
    assert undos.contexts["double[1]"][0].index == 1
    statuses = await home.statuses(first.run_id)
    assert statuses == {
        "items": "completed", "double": "failed", "double[0]": "compensated", "double[1]": "compensated",
        "double[2]": "failed",
    }  # fmt: skip


async def test_chained_maps_are_undone_item_by_item(home: Home, undos: Undos) -> None:
    wf = Workflow("chained")
    listing(wf, [1, 2, 3])

    async def up(x: int) -> int:
        return x + 1

    async def over(y: int) -> int:
        return y + 1

    wf.node(for_each={"x": "items"}, concurrency=1, compensate=undos.undo)(up)
    wf.node(for_each={"y": "up"}, concurrency=1, compensate=undos.undo)(over)
    run_id = (await home.run(wf)).run_id
    done = [e.path for e in await home.events(run_id) if e.kind == "node.completed"]
    done = [path for path in done if path and path.endswith("]")]
    result = await rollback(home, wf, run_id)
    assert undos.order == done[::-1]
    assert all(undos.order.index(f"over[{k}]") < undos.order.index(f"up[{k}]") for k in range(3))
    assert (await home.statuses(run_id))["up"] == "compensated"
    with pytest.raises(NoOutput, match="compensated"):
        result["up"]
    with pytest.raises(NoOutput, match="compensated"):
        result["up[1]"]


async def test_a_moved_item_is_undone_with_its_own_output(home: Home, calls: Calls, undos: Undos) -> None:
    """Its output lies elsewhere, and it did not complete anew when it moved."""

    def moved(version: str, *values: int) -> Workflow:
        wf = Workflow("moved")

        async def items() -> list[int]:
            return list(values)

        async def keep(x: int) -> int:
            return x

        wf.node(idempotent=True, version=version)(items)
        wf.node(for_each={"x": "items"}, concurrency=1, compensate=undos.undo)(keep)
        calls.adder(wf)("used", "keep", idempotent=True, compensate=undos.undo)
        calls.adder(wf)("end", "used")
        return wf

    calls.broken.add("end")
    run_id = (await home.run(moved("1", 10, 20, 30))).run_id
    wf = moved("2", 30, 20, 10)
    calls.broken.add("end")
    assert (await home.resume(wf, run_id)).status == "failed"
    await rollback(home, wf, run_id)
    assert undos.outputs == {"used": "used", "keep[0]": 30, "keep[1]": 20, "keep[2]": 10}
    assert undos.order == ["used", "keep[0]", "keep[1]", "keep[2]"]


async def test_rounds_of_a_loop_the_last_first(home: Home, undos: Undos) -> None:
    wf = Workflow("loop")

    async def refine(state: int) -> int:
        return state + 1

    wf.loop(
        "refine", refine, initial=Value(0), until=lambda s: s >= 12, max_iterations=20, compensate=undos.undo
    )
    run_id = (await home.run(wf)).run_id
    result = await rollback(home, wf, run_id)
    assert undos.order == [f"refine[{n}]" for n in reversed(range(12))]
    assert undos.outputs["refine[4]"] == 5
    assert result.status == "rolled_back"
    assert (await home.statuses(run_id))["refine"] == "compensated"


async def test_a_round_that_ran_again_is_undone_after_those_that_came_after_it(
    home: Home, calls: Calls, undos: Undos
) -> None:
    def rounds(version: str, first: int) -> Workflow:
        wf = Workflow("loop", idempotent=True)

        async def grow(state: int) -> int:
            return max(state, 5) + 1

        wf.node(id="a", version=version)(lambda: first)
        wf.loop("l", grow, initial="a", until=lambda s: s == 8, max_iterations=5, compensate=undos.undo)
        calls.adder(wf)("end", "l")
        return wf

    calls.broken.add("end")
    run_id = (await home.run(rounds("1", 1))).run_id
    wf = rounds("2", 2)
    assert set((await home.resume(wf, run_id)).executed) == {"a", "l[0]", "end"}
    await rollback(home, wf, run_id)
    assert undos.order == ["l[2]", "l[1]", "l[0]"]


def nested(undos: Undos, after: Callable[..., Any]) -> Workflow:
    inner = Workflow("inner")

    async def first(cv: str) -> str:
        return cv + "1"

    async def second(x: str) -> str:
        return x + "2"

    inner.node(compensate=undos.undo)(first)
    inner.node(args={"x": "first"}, compensate=undos.undo)(second)
    wf = Workflow("outer")
    listing(wf, ["a", "b"], "cvs")
    wf.subworkflow("screen", inner, for_each={"cv": "cvs"}, concurrency=1)
    wf.subworkflow("one", inner, args={"cv": Value("z")}, depends_on="screen")
    wf.node(id="after", depends_on="one", compensate=undos.undo)(after)
    return wf


async def test_nodes_of_inner_workflows_each_by_their_own_path(home: Home, undos: Undos) -> None:
    async def after() -> str:
        return "end"

    wf = nested(undos, after)
    run_id = (await home.run(wf)).run_id
    result = await rollback(home, wf, run_id)
    assert undos.order == [
        "after", "one/second", "one/first",
        "screen[1]/second", "screen[1]/first", "screen[0]/second", "screen[0]/first",
    ]  # fmt: skip
    assert undos.outputs["screen[1]/second"] == "b12"
    ctx = undos.contexts["screen[1]/second"][0]
    assert (ctx.node, ctx.workflow, ctx.run_id) == ("second", "outer", run_id)
    statuses = await home.statuses(run_id)
    assert statuses.pop("cvs") == "completed"
    assert set(statuses.values()) == {"compensated"}
    assert "one" not in result


async def test_a_round_that_is_a_workflow_is_undone_before_what_is_inside(home: Home, undos: Undos) -> None:
    inner = Workflow("inner")

    async def step(state: int) -> int:
        return state + 1

    inner.node(compensate=undos.undo)(step)
    wf = Workflow("loop")
    wf.loop("go", inner, initial=Value(0), until=lambda s: s >= 2, max_iterations=5, compensate=undos.undo)
    undos.broken.add("go[1]")
    run_id = (await home.run(wf)).run_id
    assert (await rollback(home, wf, run_id)).status == "rolling_back"
    assert undos.order == ["go[1]", "go[1]/step", "go[0]", "go[0]/step"]
    undos.mend()
    assert (await rollback(home, wf, run_id)).status == "rolled_back"
    assert undos.order == ["go[1]"]


# -- only below a node ----------------------------------------------------------------------------------


async def test_only_what_is_below_a_node(home: Home, calls: Calls, undos: Undos) -> None:
    wf = Workflow("wide")
    add = calls.adder(wf)
    for name, above in (("a", ""), ("b", "a"), ("c", "a"), ("d", "b"), ("e", "")):
        add(name, *filter(None, [above]), compensate=undos.undo)
    first = await home.run(wf)
    result = await rollback(home, wf, first.run_id, "b")
    assert undos.order == ["d"]
    assert result["b"] == "b"
    assert result.status == "rolled_back"
    fn = wf.nodes["a"].fn
    again = await home.run(wf)
    await rollback(home, wf, again.run_id, fn)
    assert sorted(undos.order[1:]) == ["b", "c", "d"]


async def test_only_what_is_below_an_inner_path(home: Home, undos: Undos) -> None:
    async def after() -> str:
        return "end"

    wf = nested(undos, after)
    run_id = (await home.run(wf)).run_id
    await rollback(home, wf, run_id, "screen[0]/first")
    assert undos.order == ["after", "one/second", "one/first", "screen[0]/second"]


async def test_only_what_is_below_an_item_or_a_round(home: Home, undos: Undos) -> None:
    wf = Workflow("below")
    listing(wf, [1, 2])

    async def up(x: int) -> int:
        return x

    async def over(x: int) -> int:
        return x

    async def refine(state: list[int]) -> list[int]:
        return [*state, 0]

    wf.node(for_each={"x": "items"}, compensate=undos.undo)(up)
    wf.node(for_each={"x": "up"}, compensate=undos.undo)(over)
    wf.loop(
        "refine", refine, initial="over", until=lambda s: len(s) > 4, max_iterations=9, compensate=undos.undo
    )
    first, second = [(await home.run(wf)).run_id for _ in range(2)]
    await rollback(home, wf, first, "up[1]")
    assert undos.order == ["refine[2]", "refine[1]", "refine[0]", "over[1]"]
    undos.mend()
    await rollback(home, wf, second, "refine[0]")
    assert undos.order == ["refine[2]", "refine[1]"]


async def test_a_node_that_is_not_there(home: Home, calls: Calls, undos: Undos) -> None:
    wf = chain(calls, undos, 2)
    run_id = (await home.run(wf)).run_id
    for to in ("t3", "t1[0]", "t1/x", "["):
        with pytest.raises(DefinitionError):
            await rollback(home, wf, run_id, to)
    assert not undos
    assert (await home.info(run_id)).status == "completed"


async def test_going_on_keeps_what_was_to_be_kept(home: Home, calls: Calls, undos: Undos) -> None:
    wf = chain(calls, undos, 3)
    run_id = (await home.run(wf)).run_id
    undos.broken.add("t3")
    assert (await rollback(home, wf, run_id, "t1")).status == "rolling_back"
    undos.mend()
    assert (await rollback(home, wf, run_id)).status == "rolled_back"
    assert undos.order == ["t3"]
    assert (await home.statuses(run_id))["t1"] == "completed"


# -- what cannot be undone ------------------------------------------------------------------------------


def mixed(undos: Undos) -> Workflow:
    wf = Workflow("mixed")

    async def nothing() -> str:
        return "x"

    wf.node(id="a", compensate=undos.undo)(nothing)
    wf.node(id="mail", depends_on="a")(nothing)
    wf.node(id="read", depends_on="a", idempotent=True)(nothing)
    wf.node(id="pure", depends_on="a", idempotent=True, checkpoint=False, compensate=undos.undo)(nothing)
    wf.approval("ask", depends_on="a", prompt="?")
    return wf


async def test_irreversible_paths_are_named_first_and_nothing_is_undone(home: Home, undos: Undos) -> None:
    wf = mixed(undos)
    run_id = (await home.run(wf)).run_id
    with pytest.raises(Irreversible, match=r"mail.*accept_irreversible=True") as refused:
        await rollback(home, wf, run_id)
    assert refused.value.paths == ("mail",)
    assert not undos
    assert (await home.info(run_id)).status == "waiting"
    async with home.engine(wf) as engine:
        plan = await engine.plan_rollback(run_id)
    assert (plan.paths, plan.irreversible, plan.uncertain) == (("a",), ("mail",), ())
    result = await rollback(home, wf, run_id, accept_irreversible=True)
    assert result.status == "rolled_back"
    assert undos.order == ["a"]
    statuses = await home.statuses(run_id)
    assert (statuses["mail"], statuses["read"]) == ("completed", "completed")
    (end,) = [e for e in await home.events(run_id) if e.kind == "run.rolled_back"]
    assert end.data["left"] == ["mail"]


async def test_uncertain_paths_are_named_likewise(home: Home, undos: Undos) -> None:
    wf = Workflow("uncertain")
    wf.node(id="a", compensate=undos.undo)(lambda: 1)

    async def b() -> set[object]:
        return {object()}  # it ran, and what it gave cannot be stored

    wf.node(depends_on="a", compensate=undos.undo)(b)
    run_id = (await home.run(wf)).run_id
    with pytest.raises(Irreversible, match="whether b took effect") as refused:
        await rollback(home, wf, run_id)
    assert (refused.value.paths, refused.value.uncertain) == ((), ("b",))
    assert (await rollback(home, wf, run_id, "b")).status == "rolled_back", "not below b"
    assert not undos


async def test_what_a_person_says_that_an_uncertain_path_gave_is_undone(home: Home, undos: Undos) -> None:
    wf = Workflow("resolved")

    async def give() -> set[object]:
        return {object()}

    for node in ("a", "b"):
        wf.node(id=node, compensate=undos.undo)(give)
    run_id = (await home.run(wf)).run_id
    async with home.engine(wf) as engine:
        await engine.resolve(run_id, "a", output={"id": 7})
        await engine.resolve(run_id, "b", failed="never sent")
        assert (await engine.rollback(run_id)).status == "rolled_back"
    assert undos.outputs == {"a": {"id": 7}}


async def test_a_held_path_has_taken_effect_and_is_undone(home: Home, calls: Calls, undos: Undos) -> None:
    def held(version: str, value: int) -> Workflow:
        wf = Workflow("held")
        wf.node(id="a", idempotent=True, version=version)(lambda: value)
        wf.node(id="b", args={"x": "a"}, compensate=undos.undo)(lambda x: x * 10)
        calls.adder(wf)("end", "b")
        return wf

    calls.broken.add("end")
    run_id = (await home.run(held("1", 1))).run_id
    wf = held("2", 2)
    assert (await home.resume(wf, run_id)).reason == "held"
    assert (await rollback(home, wf, run_id)).status == "rolled_back"
    assert undos.outputs == {"b": 10}
    assert (await home.statuses(run_id))["b"] == "compensated"


# -- undos that fail ------------------------------------------------------------------------------------


async def test_the_others_are_tried_and_then_only_what_is_missing(
    home: Home, calls: Calls, undos: Undos
) -> None:
    """B137."""
    wf = chain(calls, undos)
    calls.broken.add("t4")
    undos.broken.add("t2")
    run_id = (await home.run(wf)).run_id
    result = await rollback(home, wf, run_id)
    assert undos.order == ["t3", "t2", "t1"]
    assert (result.status, result.reason) == ("rolling_back", "compensation_failed")
    assert {p: (f.type, f.reason) for p, f in result.failures.items()} == {
        "t4": ("tests.engine.kit.Boom", "error"),
        "t2": ("tests.engine.kit.Boom", "compensation_failed"),
    }
    info = await home.info(run_id)
    assert (info.status, info.reason, info.owner) == ("rolling_back", "compensation_failed", None)
    assert list(info.failures) == ["t4", "t2"]
    assert (info.nodes["t2"].status, info.nodes["t2"].reason) == ("completed", "compensation_failed")
    async with home.engine(wf) as engine:
        assert set((await engine.result(run_id)).failures) == {"t4", "t2"}
        with pytest.raises(RunFailed, match="rollback"):
            await engine.resume(run_id)
    assert undos["t2"] == 2
    undos.mend()
    calls.mend()
    result = await home.resume(wf, run_id)
    assert undos.order == ["t2"]
    assert (result.status, list(result.failures)) == ("rolled_back", ["t4"])
    assert not calls, "resume undoes, it does not run"
    assert undos.contexts["t2"][-1].attempt == 3


async def test_the_retry_policy_of_the_node_is_that_of_its_undo(home: Home) -> None:
    wf = Workflow("retried", retry=Retry(3, delay=0.001))
    attempts: list[tuple[int, str]] = []

    async def undo(output: Any, ctx: Context) -> None:
        attempts.append((ctx.attempt, ctx.idempotency_key))
        if ctx.attempt == 1:
            raise RetryAfter(0.001)
        if ctx.attempt < 3:
            raise Boom

    wf.node(id="a", compensate=undo)(lambda: 1)
    run_id = (await home.run(wf)).run_id
    assert (await rollback(home, wf, run_id)).status == "rolled_back"
    assert [n for n, _ in attempts] == [1, 2, 3]
    assert len({key for _, key in attempts}) == 1
    assert attempts[0][1] != idempotency_key(run_id, "a")
    told = [(e.kind, e.reason, e.attempt) for e in await home.events(run_id) if e.kind.startswith("undo")]
    assert told == [
        ("undo.started", None, 1), ("undo.failed", "retry", 1),
        ("undo.started", None, 2), ("undo.failed", "retry", 2), ("undo.started", None, 3),
    ]  # fmt: skip


async def test_a_timeout_holds_for_the_undo_too(home: Home) -> None:
    wf = Workflow("slow")

    async def undo(output: Any, ctx: Context) -> None:
        await asyncio.sleep(3600)

    wf.node(id="a", timeout=0.02, compensate=undo)(lambda: 1)
    run_id = (await home.run(wf)).run_id
    result = await rollback(home, wf, run_id)
    assert isinstance(result.failures["a"].exception, NodeTimeout)
    assert result.status == "rolling_back"


async def test_an_output_that_cannot_be_read_fails_its_undo_alone(
    sqlite_home: Home, calls: Calls, undos: Undos
) -> None:
    wf = chain(calls, undos, 2)

    async def big() -> str:
        return "x" * 1000

    wf.node(depends_on="t2", compensate=undos.undo)(big)
    async with sqlite_home.engine(wf, spill_bytes=100) as engine:
        run_id = (await engine.run(wf)).run_id
    assert sqlite_home.path is not None
    (blob,) = [p for p in sqlite_home.path.with_name("runs.db.blobs").rglob("*") if p.is_file()]
    text = blob.read_bytes()
    blob.unlink()
    result = await rollback(sqlite_home, wf, run_id)
    assert isinstance(result.failures["big"].exception, CheckpointLost)
    assert undos.order == ["t2", "t1"]
    blob.write_bytes(text)
    assert (await rollback(sqlite_home, wf, run_id)).status == "rolled_back"
    assert undos.outputs["big"] == "x" * 1000


async def test_an_undo_that_raises_cancelled_error_by_itself_has_failed(home: Home) -> None:
    wf = Workflow("odd")

    async def undo(output: Any, ctx: Context) -> None:
        raise asyncio.CancelledError

    wf.node(id="a", compensate=undo)(lambda: 1)
    run_id = (await home.run(wf)).run_id
    result = await rollback(home, wf, run_id)
    assert (result.status, list(result.failures)) == ("rolling_back", ["a"])


# -- what an undo gets ----------------------------------------------------------------------------------


@dataclass
class Booking:
    number: int


async def test_outputs_come_back_as_what_they_were_and_plain_functions_run_in_threads(home: Home) -> None:
    wf, seen, variable = Workflow("typed"), list[Any](), contextvars.ContextVar("v", default="")

    async def book() -> Booking:
        return Booking(7)

    def undo(output: Booking, ctx: Context) -> None:
        ctx.log.info("undone", number=output.number)
        seen.append((output, threading.current_thread() is threading.main_thread(), variable.get(), ctx.path))

    async def undo_later(output: None, ctx: Context) -> None:
        seen.append((output, variable.get()))

    wf.node(compensate=undo)(book)
    wf.node(id="late", depends_on="book", compensate=lambda output, ctx: undo_later(output, ctx))(
        lambda: None
    )
    run_id = (await home.run(wf)).run_id
    variable.set("caller's")
    async with home.engine(wf) as engine:
        await engine.rollback(run_id)
        lines = [line.line for _, line in await engine.logs(run_id)]
    assert seen == [(None, "caller's"), (Booking(7), False, "caller's", "book")]
    assert lines == ["undone number=7"]


async def test_a_retried_node_is_undone_with_what_it_gave_last(home: Home, undos: Undos) -> None:
    numbers = iter([1, 2])
    wf = Workflow("twice", idempotent=True)
    wf.node(id="a", compensate=undos.undo)(lambda: next(numbers))
    run_id = (await home.run(wf)).run_id
    await home.retry(wf, run_id, "a")
    await rollback(home, wf, run_id)
    assert undos.outputs == {"a": 2}


# -- which runs -----------------------------------------------------------------------------------------


async def test_a_run_that_somebody_drives_is_locked(home: Home, undos: Undos) -> None:
    wf, gate = Workflow("live"), asyncio.Event()

    async def a() -> None:
        await gate.wait()

    wf.node(compensate=undos.undo)(a)
    async with home.engine(wf) as engine:
        handle = await engine.start(wf)
        with pytest.raises(RunLocked):
            await engine.rollback(handle.run_id)
        with pytest.raises(RunLocked):
            await rollback(home, wf, handle.run_id)
        gate.set()
        await handle.result()
        assert (await engine.rollback(handle.run_id)).status == "rolled_back"
        assert (await engine.rollback(handle.run_id)).status == "rolled_back"
    assert undos["a"] == 1


async def test_rolled_back_runs_do_not_go_on(home: Home, calls: Calls, undos: Undos) -> None:
    wf = chain(calls, undos, 2)
    run_id = (await home.run(wf, key="k")).run_id
    await rollback(home, wf, run_id)
    async with home.engine(wf) as engine:
        for going_on in (engine.resume(run_id), engine.retry(run_id), engine.retry(run_id, "t1")):
            with pytest.raises(RolledBack):
                await going_on
        for asking in (engine.plan(run_id), engine.plan_rollback(run_id)):
            with pytest.raises(RolledBack):
                await asking
        stored = await engine.rollback(run_id)
        assert (stored.status, stored.reason, "t1" in stored) == ("rolled_back", "asked", False)
        new = await engine.run(wf, key="k")
    assert new.run_id != run_id
    assert calls["t1"] == 2


async def test_a_cancelled_run_is_undone_although_its_key_is_anothers(
    home: Home, calls: Calls, undos: Undos
) -> None:
    wf = chain(calls, undos, 2)
    calls.broken.add("t2")
    old = (await home.run(wf, key="k")).run_id
    async with home.engine(wf) as engine:
        await engine.cancel(old)
        with pytest.raises(RunCancelled):
            await engine.resume(old)
        calls.mend()
        new = await engine.run(wf, key="k")
        assert (await engine.rollback(old)).status == "rolled_back"
        assert undos.order == ["t1"]
        assert (await engine.run(wf, key="k")).run_id == new.run_id


async def test_a_run_that_is_rolling_back_is_only_undone(home: Home, calls: Calls, undos: Undos) -> None:
    wf = chain(calls, undos, 2)
    undos.broken.add("t1")
    run_id = (await home.run(wf, key="k")).run_id
    await rollback(home, wf, run_id)
    calls.mend()
    async with home.engine(wf) as engine:
        with pytest.raises(RolledBack, match="being rolled back"):
            await engine.plan(run_id)
        with pytest.raises(RolledBack, match="being rolled back"):
            await engine.retry(run_id, "t1")
        await engine.cancel(run_id)
        assert (await engine.get(run_id)).status == "rolling_back"
        assert (await engine.plan_rollback(run_id)).paths == ("t1",)
        undos.mend()
        going_on = await engine.run(wf, key="k")
        assert (going_on.run_id, going_on.status) == (run_id, "rolled_back")
        assert (await engine.run(wf, key="k")).run_id != run_id
    assert undos.order == ["t1"]


async def test_the_code_is_needed_and_must_be_that_of_the_run(home: Home, calls: Calls, undos: Undos) -> None:
    wf = chain(calls, undos, 2)
    run_id = (await home.run(wf)).run_id
    async with home.engine() as engine:
        with pytest.raises(WorkflowNotRegistered):
            await engine.rollback(run_id)
    with pytest.raises(VersionMismatch):
        await rollback(home, chain(calls, undos, 3), run_id)
    assert not undos


async def test_a_run_with_nothing_to_undo(home: Home) -> None:
    wf = Workflow("empty", idempotent=True)
    wf.node(id="a")(lambda: 1)
    run_id = (await home.run(wf)).run_id
    result = await rollback(home, wf, run_id)
    assert (result.status, result["a"]) == ("rolled_back", 1)


async def test_a_rollback_that_the_store_refuses(home: Home, calls: Calls, undos: Undos) -> None:
    """C8: what could not be written is said, and can be done again."""
    wf = chain(calls, undos, 3)
    run_id = (await home.run(wf)).run_id

    def faulty(inner: Any) -> Any:
        return FaultyStore(
            inner,
            lambda _, record: record.kind == "node.compensated" and record.path == "t2",
            lambda: OSError("no space"),
        )

    async with home.engine(wf, wrap=faulty) as engine:
        with pytest.raises(OSError, match="no space"):
            await engine.rollback(run_id)
        info = await engine.get(run_id)
        assert (info.status, info.reason, info.owner) == ("rolling_back", "not_stored", None)
    assert undos.order == ["t3", "t2"]
    undos.mend()
    await rollback(home, wf, run_id)
    assert undos.order == ["t2", "t1"]


# -- stopped in the middle ------------------------------------------------------------------------------


def gated(undos: Undos, reached: asyncio.Event, gate: asyncio.Event) -> Workflow:
    """t1 → t2; the undo of t2 waits for the gate."""
    wf = Workflow("gated")

    async def undo(output: Any, ctx: Context) -> None:
        reached.set()
        await gate.wait()
        await undos.undo(output, ctx)

    wf.node(id="t1", compensate=undos.undo)(lambda: 1)
    wf.node(id="t2", depends_on="t1", compensate=undo)(lambda: 2)
    return wf


async def test_leaving_the_engine_lets_the_undo_under_way_end(home: Home, undos: Undos) -> None:
    reached, gate = asyncio.Event(), asyncio.Event()
    wf = gated(undos, reached, gate)
    run_id = (await home.run(wf)).run_id
    async with home.engine(wf) as engine:
        work = asyncio.create_task(engine.rollback(run_id))
        await reached.wait()
        asyncio.get_running_loop().call_later(0.02, gate.set)
    result = await work
    assert (result.status, result.reason) == ("rolling_back", "shutdown")
    assert undos.order == ["t2"]
    assert (await home.statuses(run_id))["t2"] == "compensated"
    info = await home.info(run_id)
    assert (info.status, info.reason) == ("rolling_back", "shutdown")
    assert (await home.resume(wf, run_id)).status == "rolled_back"
    assert undos.order == ["t2", "t1"]


async def test_an_undo_that_takes_longer_stands_as_begun(home: Home, undos: Undos) -> None:
    reached, gate = asyncio.Event(), asyncio.Event()
    wf = gated(undos, reached, gate)
    run_id = (await home.run(wf)).run_id
    async with home.engine(wf, grace_seconds=0.01) as engine:
        work = asyncio.create_task(engine.rollback(run_id))
        await reached.wait()
    assert (await work).status == "rolling_back"
    node = (await home.info(run_id)).nodes["t2"]
    assert (node.status, node.reason) == ("completed", "undo_started")
    gate.set()
    assert (await home.resume(wf, run_id)).status == "rolled_back"
    assert undos.order == ["t2", "t1"]


async def test_a_cancelled_caller_lets_go_of_the_run(home: Home, undos: Undos) -> None:
    reached, gate = asyncio.Event(), asyncio.Event()
    wf = gated(undos, reached, gate)
    run_id = (await home.run(wf)).run_id
    async with home.engine(wf) as engine:
        work = asyncio.create_task(engine.rollback(run_id))
        await reached.wait()
        work.cancel()
        await asyncio.sleep(0)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert (await engine.get(run_id)).reason == "cancelled"
        async with home.engine(wf) as other:  # though this engine is still open
            assert (await other.rollback(run_id)).status == "rolled_back"
    assert undos.order == ["t2", "t1"]


async def test_a_caller_cancelled_while_the_run_is_claimed(home: Home, calls: Calls, undos: Undos) -> None:
    wf = chain(calls, undos, 2)
    run_id = (await home.run(wf)).run_id
    slow: list[SlowStore] = []

    def wrap(inner: Any) -> Any:
        slow.append(SlowStore(inner, lambda _, record: record.kind == "run.rolling_back"))
        return slow[0]

    async with home.engine(wf, wrap=wrap) as engine:
        work = asyncio.create_task(engine.rollback(run_id))
        await slow[0].reached.wait()
        work.cancel()
        await asyncio.sleep(0)
        slow[0].gate.set()
        with pytest.raises(asyncio.CancelledError):
            await work
    assert (await rollback(home, wf, run_id)).status == "rolled_back"
    assert undos.order == ["t2", "t1"]


async def test_stopped_while_waiting_for_another_attempt(home: Home, undos: Undos) -> None:
    wf, clock = Workflow("waits", retry=Retry(2, delay=100)), FakeClock()
    wf.node(id="a", compensate=undos.undo)(lambda: 1)
    undos.broken.add("a")
    run_id = (await home.run(wf)).run_id
    async with home.engine(wf, clock=clock) as engine:
        work = asyncio.create_task(engine.rollback(run_id))
        await settle(lambda: undos["a"] == 1 and clock.sleeping == 1)
    assert (await work).reason == "shutdown"
    undos.mend()
    assert (await rollback(home, wf, run_id)).status == "rolled_back"
    assert undos["a"] == 1


# -- on_failure="rollback" ------------------------------------------------------------------------------


async def test_a_run_undoes_itself_when_it_fails(
    home: Home, calls: Calls, undos: Undos, caplog: pytest.LogCaptureFixture
) -> None:
    wf = chain(calls, undos, 3, on_failure="rollback")
    calls.adder(wf)("mail", "t1")
    calls.broken.add("t3")
    with caplog.at_level(logging.WARNING, "dagresume"):
        async with home.engine() as engine:
            with pytest.raises(RunFailed, match="start a new run") as failed:
                await engine.run(wf, key="k")
    assert isinstance(failed.value.__cause__, Boom)
    assert undos.order == ["t2", "t1"]
    assert "mail" in caplog.text
    run_id = failed.value.run_id
    kinds = [e.kind for e in await home.events(run_id)]
    assert "run.failed" not in kinds
    assert kinds.index("run.rolling_back") < kinds.index("undo.started") < kinds.index("run.rolled_back")
    info = await home.info(run_id)
    assert (info.status, info.reason) == ("rolled_back", "node_failed")
    undos.mend()
    result = await home.run(wf, key="k")
    assert result.run_id != run_id
    assert (result.status, list(result.failures), undos.order) == ("rolled_back", ["t3"], ["t2", "t1"])
    assert result.executed[0] == "t1"
    assert "t1" not in result


async def test_a_run_that_completes_undoes_nothing(home: Home, calls: Calls, undos: Undos) -> None:
    wf = chain(calls, undos, 2, on_failure="rollback")
    assert (await home.run(wf)).status == "completed"
    assert not undos


async def test_undos_that_fail_after_a_run_failed(home: Home, calls: Calls, undos: Undos) -> None:
    wf = chain(calls, undos, 3, on_failure="rollback")
    calls.broken.add("t3")
    undos.broken.add("t1")
    async with home.engine() as engine:
        handle = await engine.start(wf)
        with pytest.raises(RunFailed) as failed:
            await handle.result()
        assert list(failed.value.failures) == ["t3", "t1"]
        calls.mend()
        undos.mend()
        with pytest.raises(RunFailed):
            await engine.resume(handle.run_id)
    assert undos.order == ["t1"]
    assert not calls
    assert (await home.info(handle.run_id)).status == "rolled_back"


async def test_left_while_it_undoes_itself(home: Home, undos: Undos) -> None:
    reached, gate, calls = asyncio.Event(), asyncio.Event(), Calls()
    wf = gated(undos, reached, gate)
    wf.on_failure = "rollback"
    calls.broken.add("t3")
    calls.adder(wf)("t3", "t2")
    async with home.engine(grace_seconds=0.01) as engine:
        work = asyncio.create_task(engine.run(wf, raise_on_failure=False))
        await reached.wait()
    result = await work
    assert (result.status, result.reason) == ("rolling_back", "shutdown")
    gate.set()
    calls.mend()
    result = await home.resume(wf, result.run_id)
    assert (result.status, undos.order) == ("rolled_back", ["t2", "t1"])
    assert not calls


async def test_the_caller_is_cancelled_while_the_run_undoes_itself(home: Home, undos: Undos) -> None:
    reached, gate, calls = asyncio.Event(), asyncio.Event(), Calls()
    wf = gated(undos, reached, gate)
    wf.on_failure = "rollback"
    calls.broken.add("t3")
    calls.adder(wf)("t3", "t2")
    async with home.engine() as engine:
        work = asyncio.create_task(engine.run(wf))
        await reached.wait()
        work.cancel()
        await asyncio.sleep(0)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await work
        (info,) = await engine.runs()
        assert (info.status, info.reason, info.owner) == ("rolling_back", "cancelled", None)
    await home.resume(wf, info.run_id)
    assert undos.order == ["t2", "t1"]


async def test_a_person_does_not_cancel_a_rollback(home: Home, undos: Undos) -> None:
    reached, gate = asyncio.Event(), asyncio.Event()
    wf = gated(undos, reached, gate)
    run_id = (await home.run(wf)).run_id
    async with home.engine(wf) as engine:
        work = asyncio.create_task(engine.rollback(run_id))
        await reached.wait()
        with pytest.raises(RunLocked):
            await engine.rollback(run_id)
        with pytest.raises(AlreadyRunning):
            await _same_key(engine, home, wf)
        cancelling = asyncio.create_task(engine.cancel(run_id))
        await asyncio.sleep(0)
        gate.set()
        await cancelling
        assert (await work).status == "rolled_back"


async def _same_key(engine: Engine, home: Home, wf: Workflow) -> None:
    """Begin a run of a key, and again while the first one is undone."""
    reached, gate, undos = asyncio.Event(), asyncio.Event(), Undos()
    other = gated(undos, reached, gate)
    await engine.run(other, key="k")
    (newest, *_) = await engine.runs(key="k")
    work = asyncio.create_task(engine.rollback(newest.run_id))
    await reached.wait()
    try:
        await engine.run(other, key="k")
    finally:
        gate.set()
        await work


@pytest.mark.parametrize("how", ["timeout", "fail_fast"])
async def test_however_a_run_fails(home: Home, undos: Undos, how: str) -> None:
    wf = Workflow("fails", on_failure="rollback", timeout=0.1 if how == "timeout" else None, idempotent=True)
    wf.node(id="a", compensate=undos.undo)(lambda: 1)

    async def waits() -> None:
        await asyncio.sleep(3600)

    def fails() -> None:
        raise Boom

    wf.node(depends_on="a")(waits)
    if how == "fail_fast":
        wf.node(depends_on="a")(fails)
    async with home.engine(fail_fast=how == "fail_fast") as engine:
        result = await engine.run(wf, raise_on_failure=False)
    assert (result.status, result.reason, undos.order) == ("rolled_back", how, ["a"])


async def test_what_is_uncertain_keeps_a_run_from_undoing_itself(home: Home, undos: Undos) -> None:
    wf = Workflow("cut", on_failure="rollback", timeout=0.1)
    wf.node(id="a", compensate=undos.undo)(lambda: 1)

    async def waits() -> None:
        await asyncio.sleep(3600)

    wf.node(depends_on="a")(waits)
    result = await home.run(wf)
    assert (result.status, result.reason) == ("failed", "timeout")
    assert not undos
    with pytest.raises(Irreversible, match="waits"):
        await rollback(home, wf, result.run_id)


async def test_a_thread_that_outlives_its_timeout_is_not_called_twice_at_once(home: Home) -> None:
    wf, gate, began = Workflow("thread", retry=Retry(3, delay=0)), threading.Event(), list[float]()

    def undo(output: Any, ctx: Context) -> None:
        began.append(time.monotonic())
        gate.wait(5)

    wf.node(id="a", timeout=0.02, compensate=undo)(lambda: 1)
    run_id = (await home.run(wf)).run_id
    result = await rollback(home, wf, run_id)
    gate.set()
    assert (result.status, len(began)) == ("rolling_back", 1)


async def test_what_a_rollback_kept_can_be_undone_later(home: Home) -> None:
    """R16: asked again for more, it said `rolled_back` and did nothing."""
    undone: list[str] = []

    async def undo(output: int, ctx: Context) -> None:
        undone.append(ctx.path)

    wf = Workflow("w")
    for id_, above in (("a", []), ("b", ["a"]), ("c", ["b"]), ("d", ["c"])):

        async def body() -> int:
            return 1

        wf.node(id=id_, depends_on=above, compensate=undo)(body)

    async with home.engine() as engine:
        run_id = (await engine.run(wf)).run_id
        assert (await engine.rollback(run_id, to="c")).status == "rolled_back"
        assert undone == ["d"]
        assert (await engine.plan_rollback(run_id, to="a")).paths == ("c", "b")
        await engine.rollback(run_id, to="a")
        assert undone == ["d", "c", "b"]
        await engine.rollback(run_id)
        assert undone == ["d", "c", "b", "a"]
        await engine.rollback(run_id)
        assert undone == ["d", "c", "b", "a"]
        assert {str(node.status) for node in (await engine.get(run_id)).nodes.values()} == {"compensated"}
