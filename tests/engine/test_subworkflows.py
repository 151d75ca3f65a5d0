"""Workflows inside nodes: what they give, how they fail, what a resume leaves alone in them (cases S)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from dagresume import (
    AlreadyRunning,
    BindingError,
    Context,
    DefinitionError,
    NoOutput,
    Retry,
    RunFailed,
    RunStatus,
    UncertainNode,
    Value,
    Workflow,
)
from tests.engine.kit import Boom, Calls, Home


def nested(calls: Calls, depth: int, *, idempotent: bool | None = None) -> Workflow:
    """w1{w2{…{x}}}, with a node before and one after the inner workflow at each level."""
    inner: Workflow | None = None
    for level in range(depth, 0, -1):
        wf = Workflow(f"w{level}", idempotent=idempotent if level == 1 else None)

        def before(level: int = level) -> Any:
            async def body(n: int) -> int:
                calls.began(f"before{level}")
                return n + 1

            return body

        def after(level: int = level) -> Any:
            async def body(sub: int) -> int:
                calls.began(f"after{level}")
                return sub + 100

            return body

        wf.node(id="before")(before())
        if inner is None:

            @wf.node(id="sub")
            async def x(before: int) -> int:
                calls.began("x")
                return before

        else:
            wf.subworkflow("sub", inner, args={"n": "before"})
        wf.node(id="after")(after())
        inner = wf
    assert inner is not None
    return inner


async def test_three_levels_end_when_the_innermost_does(home: Home, calls: Calls) -> None:
    """B131: the status of everything around is evaluated again up to the root, and `after` runs once."""
    wf = nested(calls, 3)
    calls.broken = {"x"}
    failed = await home.run(wf, {"n": 0})
    assert failed.status is RunStatus.FAILED
    assert list(failed.failures) == ["sub/sub/sub"]
    states = await home.statuses(failed.run_id)
    assert states["sub"] == states["sub/sub"] == states["sub/sub/sub"] == "failed"
    calls.mend()
    result = await home.go_on(wf, failed.run_id)
    assert result.status is RunStatus.COMPLETED
    assert dict(calls) == {"x": 1, "after3": 1, "after2": 1, "after1": 1}
    assert list(result.executed) == ["sub/sub/sub", "sub/sub/after", "sub/after", "after"]
    assert result["after"] == 303
    states = await home.statuses(failed.run_id)
    assert states["sub"] == states["sub/sub"] == states["sub/sub/sub"] == states["after"] == "completed"
    assert (await home.info(failed.run_id)).failures == {}


async def test_depth_thirty(home: Home, calls: Calls) -> None:
    wf = nested(calls, 30)
    calls.broken = {"x"}
    failed = await home.run(wf, {"n": 0})
    assert list(failed.failures) == ["/".join(["sub"] * 30)]
    calls.mend()
    result = await home.go_on(wf, failed.run_id)
    assert result["after"] == 30 + 30 * 100
    assert len(result.executed) == 31
    assert len(result.reused) == 30
    assert "before1" not in calls


async def test_the_error_names_the_inner_path(home: Home, calls: Calls) -> None:
    """B133: the node fails with the inner path and the inner error in its own, and the real cause."""
    wf = nested(calls, 2)
    calls.broken = {"x"}
    async with home.engine(wf) as engine:
        with pytest.raises(RunFailed) as caught:
            await engine.run(wf, {"n": 0})
        info = await engine.get(caught.value.run_id)
    assert list(caught.value.failures) == ["sub/sub"]
    assert isinstance(caught.value.__cause__, Boom)
    outer = info.nodes["sub"]
    assert (outer.status, outer.reason) == ("failed", "inner_failed")
    assert outer.failure is not None
    assert outer.failure.type == caught.value.failures["sub/sub"].type
    assert outer.failure.message == "sub/sub: x"
    assert list(info.failures) == ["sub/sub"]


async def test_a_sub_workflow_cut_off_is_interrupted_with_all_around_it(home: Home, calls: Calls) -> None:
    """B133: cancelled from outside; in bounded time, and a resume goes on inside."""
    wf = Workflow("outer", idempotent=True)
    inner = Workflow("inner")
    began = asyncio.Event()

    @inner.node
    async def first() -> int:
        calls.began("first")
        return 1

    @inner.node
    async def x(first: int) -> int:
        calls.began("x")
        began.set()
        if calls["x"] == 1:
            await asyncio.sleep(60)
        return first + 1

    wf.subworkflow("sub", inner)
    async with home.engine(wf) as engine:
        handle = await engine.start(wf)
        await began.wait()
    info = await home.info(handle.run_id)
    assert (info.status, info.reason) == ("interrupted", "shutdown")
    assert info.nodes["sub"].status == info.nodes["sub/x"].status == "interrupted"
    result = await home.go_on(wf, handle.run_id)
    assert result["sub"] == 2
    assert calls == {"first": 1, "x": 2}


async def test_cancelled_by_a_person_inside_and_out(home: Home) -> None:
    """B133: nothing inside goes on after a cancel."""
    wf, inner = Workflow("outer", idempotent=True), Workflow("inner")
    began = asyncio.Event()

    @inner.node
    async def x() -> None:
        began.set()
        await asyncio.sleep(60)

    wf.subworkflow("sub", inner)
    async with home.engine(wf) as engine:
        handle = await engine.start(wf)
        await began.wait()
        await handle.cancel(by="me")
        result = await handle.result(raise_on_failure=False)
    assert result.status is RunStatus.CANCELLED
    assert (await home.statuses(handle.run_id))["sub/x"] == "cancelled"


@pytest.mark.parametrize("careful", [True, False])
async def test_an_uncertain_inner_path_stops_a_resume(home: Home, calls: Calls, careful: bool) -> None:
    """C6 inside: the word of the step is the default inside (unless the inner workflow has its own)."""
    wf, inner = Workflow("outer", idempotent=True), Workflow("inner")
    began = asyncio.Event()

    @inner.node
    async def x() -> int:
        calls.began("x")
        began.set()
        if calls["x"] == 1:
            await asyncio.sleep(60)
        return 7

    wf.subworkflow("sub", inner, idempotent=not careful)
    async with home.engine(wf) as engine:
        handle = await engine.start(wf)
        await began.wait()
    plan = await home.plan(wf, handle.run_id)
    if careful:
        assert plan["sub/x"].action == plan["sub"].action == "hold"
        with pytest.raises(UncertainNode) as caught:
            await home.resume(wf, handle.run_id)
        assert list(caught.value.paths) == ["sub/x"]
        assert calls["x"] == 1
        result = await home.retry(wf, handle.run_id)
    else:
        result = await home.go_on(wf, handle.run_id)
    assert result["sub"] == 7
    assert calls["x"] == 2


async def test_an_inner_workflow_has_its_own_word(home: Home) -> None:
    wf = Workflow("outer", idempotent=True)
    careful, plain = Workflow("careful", idempotent=False), Workflow("plain")

    async def body() -> int:
        return 1

    careful.node(id="x")(body)
    plain.node(id="x")(body)
    plain.node(id="y", idempotent=False)(body)
    wf.subworkflow("a", careful)
    wf.subworkflow("b", plain)
    result = await home.run(wf)
    started = {e.path for e in await home.events(result.run_id) if e.kind == "node.started"}
    assert {"a/x", "b/y"} <= started
    assert result.outputs["b"] == {"x": 1, "y": 1}


async def test_the_key_of_an_inner_workflow_locks_nothing(home: Home) -> None:
    """B134: run by itself with a key, and at the same time inside another run with the same key."""
    inner, wf = Workflow("inner"), Workflow("outer")
    gate = asyncio.Event()

    @inner.node
    async def x() -> int:
        await gate.wait()
        return 1

    wf.subworkflow("sub", inner)
    async with home.engine(wf, inner) as engine:
        alone = await engine.start(inner, key="k")
        within = await engine.start(wf, key="k")
        with pytest.raises(AlreadyRunning):
            await engine.start(inner, key="k")
        gate.set()
        assert (await alone.result())["x"] == (await within.result())["sub"] == 1
        assert len(await engine.runs()) == 2


async def test_a_map_over_sub_workflows_with_one_failing_inner_node(home: Home, calls: Calls) -> None:
    """B95: what lay below the failure inside runs after the mend; nothing else does, and nothing hangs."""
    wf, inner = Workflow("outer"), Workflow("inner")

    @inner.node
    async def a(n: int) -> int:
        calls.began(f"a{n}")
        return n

    @inner.node
    async def b(a: int) -> int:
        calls.began(f"b{a}")
        return a * 10

    @inner.node
    async def c(b: int) -> int:
        calls.began(f"c{b}")
        return b + 1

    wf.subworkflow("sub", inner, for_each={"n": "numbers"})

    @wf.node(args={"found": "sub"})
    async def total(found: list[int]) -> int:
        calls.began("total")
        return sum(found)

    numbers = list(range(200))
    calls.broken = {"b77"}
    failed = await home.run(wf, {"numbers": numbers})
    assert list(failed.failures) == ["sub[77]/b"]
    assert (calls.total(), calls["c770"], calls["total"]) == (599, 0, 0)
    assert failed.outputs["sub[76]/c"] == 761
    calls.mend()
    result = await home.go_on(wf, failed.run_id)
    assert list(result.executed) == ["sub[77]/b", "sub[77]/c", "total"]
    assert result["total"] == sum(n * 10 + 1 for n in numbers)
    assert dict(calls) == {"b77": 1, "c770": 1, "total": 1}


async def test_tolerated_sub_workflows_stay_so(home: Home, calls: Calls) -> None:
    """An inner failure that is tolerated is none of the run, and no resume runs it again."""
    wf, inner = Workflow("outer"), Workflow("inner")

    @inner.node
    async def x(n: int) -> int:
        calls.began(f"x{n}")
        return n

    wf.subworkflow("sub", inner, for_each={"n": "numbers"}, tolerate=1)

    @wf.node(args={"found": "sub"})
    async def last(found: list[Any]) -> int:
        calls.began("last")
        return len([one for one in found if isinstance(one, int)])

    calls.broken = {"x1", "last"}
    failed = await home.run(wf, {"numbers": [0, 1, 2]})
    assert list(failed.failures) == ["last"]
    assert list((await home.info(failed.run_id)).failures) == ["last"]
    calls.mend()
    result = await home.go_on(wf, failed.run_id)
    assert result["last"] == 2
    assert dict(calls) == {"last": 1}
    assert result["sub"][1].path == "sub[1]"


async def test_retries_inside(home: Home, calls: Calls) -> None:
    """B82: an inner node has its own retry, and its workflow's."""
    wf, inner = Workflow("outer"), Workflow("inner", retry=Retry(3, delay=0, jitter=0))

    @inner.node
    async def x(ctx: Context) -> int:
        calls.began("x")
        if ctx.attempt < 3:
            raise Boom(str(ctx.attempt))
        return ctx.attempt

    wf.subworkflow("sub", inner)
    assert (await home.run(wf))["sub"] == 3


async def test_outputs_named_single_and_many(home: Home) -> None:
    wf = Workflow("outer")
    named, single, many, nothing = (Workflow(name) for name in ("named", "single", "many", "nothing"))
    named = Workflow("named", output="a")

    async def one() -> int:
        return 1

    async def none() -> None:
        return None

    for inner in (named, single):
        inner.node(id="a")(one)
        inner.node(id="b", depends_on="a")(none if inner is single else one)
    many.node(id="left")(one)
    many.node(id="right")(none)
    wf.subworkflow("named", named)
    wf.subworkflow("single", single)
    wf.subworkflow("many", many)
    wf.subworkflow("nothing", nothing)
    result = await home.run(wf)
    assert result["named"] == 1
    assert result["single"] is None
    assert result["many"] == {"left": 1, "right": None}
    assert result["nothing"] == {}
    async with home.engine(wf) as engine:
        stored = await engine.result(result.run_id)
    assert dict(stored.outputs) == dict(result.outputs)
    assert stored.outputs["many/left"] == 1
    with pytest.raises(NoOutput):
        result.outputs["many/middle"]


async def test_arguments_defaults_and_constants(home: Home) -> None:
    """Each inner input: args (parent, run input, constant), the node or input of its name, its default."""
    wf, inner = Workflow("outer"), Workflow("inner")

    @inner.node
    async def told(a: int, b: list[int], c: str = "own", d: int = 4, *, e: int = 5) -> list[Any]:
        b.append(0)
        return [a, b, c, d, e]

    @wf.node
    async def d() -> int:
        return 40

    wf.subworkflow("sub", inner, args={"a": "start", "b": Value([1, 2])})
    wf.subworkflow("twice", inner, args={"a": d, "b": Value([1, 2]), "e": Value(6)})
    result = await home.run(wf, {"start": 1})
    assert result["sub"] == [1, [1, 2, 0], "own", 40, 5]
    assert result["twice"] == [40, [1, 2, 0], "own", 40, 6]
    wf.subworkflow("typo", inner, args={"a": "start", "b": Value([]), "typo": Value(1)})
    with pytest.raises(BindingError, match="no such input"):
        wf.graph  # noqa: B018  # it is compiled


def test_a_workflow_cannot_contain_itself() -> None:
    wf, inner = Workflow("outer"), Workflow("inner")
    wf.subworkflow("sub", inner)
    inner.subworkflow("sub", wf)
    with pytest.raises(DefinitionError, match="contains itself"):
        wf.graph  # noqa: B018  # it is compiled


@dataclass
class Card:
    name: str
    marks: list[int]


async def test_objects_cross_the_borders_as_themselves_and_are_not_shared(home: Home, calls: Calls) -> None:
    """C7: a dataclass in and out of two levels; what one node does to its copy nobody else sees."""
    wf, middle, inner = Workflow("outer"), Workflow("middle"), Workflow("inner")

    @inner.node
    async def spoil(card: Card) -> Card:
        calls.began("spoil")
        assert type(card) is Card
        card.marks.append(9)
        return card

    @inner.node
    async def see(card: Card, spoil: Card) -> list[Card]:
        assert type(spoil) is Card
        return [card, spoil]

    middle.subworkflow("deep", inner)
    wf.subworkflow("sub", middle, args={"card": "make"})

    @wf.node
    async def make() -> Card:
        return Card("ann", [1])

    @wf.node(args={"found": "sub"})
    async def last(found: list[Card], make: Card) -> Card:
        calls.began("last")
        assert [type(card) for card in found] == [Card, Card]
        assert found == [Card("ann", [1]), Card("ann", [1, 9])]
        assert make == Card("ann", [1])
        return found[1]

    calls.broken = {"last"}
    failed = await home.run(wf)
    assert failed["sub"] == [Card("ann", [1]), Card("ann", [1, 9])]
    calls.mend()
    result = await home.go_on(wf, failed.run_id)
    assert result["last"] == Card("ann", [1, 9])
    assert dict(calls) == {"last": 1}
    assert result["sub/deep/spoil"] == Card("ann", [1, 9])


async def test_a_dataclass_as_a_run_input_of_an_inner_node(home: Home) -> None:
    """C7: only the inner node says what it is; the run input and the items of a list too."""
    wf, inner = Workflow("outer"), Workflow("inner")

    @inner.node
    async def name(card: Card) -> str:
        assert type(card) is Card
        return card.name

    wf.subworkflow("one", inner)
    wf.subworkflow("each", inner, for_each={"card": "cards"})
    result = await home.run(wf, {"card": Card("ann", []), "cards": [Card("bob", []), Card("cy", [])]})
    assert result["one"] == "ann"
    assert result["each"] == ["bob", "cy"]


@pytest.mark.parametrize("spill", [100, 1 << 20])
async def test_big_outputs_cross_the_borders(sqlite_home: Home, calls: Calls, spill: int) -> None:
    """Outputs over `spill_bytes` into, inside and out of sub-workflows, also from an earlier process."""
    wf, inner = Workflow("outer", idempotent=True), Workflow("inner")
    both = Workflow("both")

    @wf.node
    async def source() -> str:
        calls.began("source")
        return "s" * 5000

    @inner.node
    async def double(text: str) -> str:
        calls.began("double")
        return text * 2

    @inner.node
    async def cut(double: str) -> str:
        calls.began("cut")
        return double[:6000]

    for name in ("left", "right"):

        def body(name: str = name) -> Any:
            async def side(text: str) -> str:
                calls.began(name)
                return name[0] * len(text)

            return side

        both.node(id=name)(body())
    wf.subworkflow("sub", inner, args={"text": "source"})
    wf.subworkflow("pair", both, args={"text": "sub"})
    wf.subworkflow("each", inner, for_each={"text": "texts"})

    @wf.node
    async def total(sub: str, pair: dict[str, str], each: list[str]) -> list[int]:
        calls.began("total")
        return [len(sub), *(len(text) for text in pair.values()), *map(len, each)]

    expected = [6000, 6000, 6000, 6000, 6000]
    inputs = {"texts": ["a" * 4000, "b" * 4000]}
    async with sqlite_home.engine(wf, spill_bytes=spill) as engine:
        calls.broken = {"cut"}
        failed = await engine.run(wf, inputs, raise_on_failure=False)
    for broken in ("left", "total", ""):
        calls.mend()
        calls.broken = {broken}
        plan = await sqlite_home.plan(wf, failed.run_id, items=True)
        assert plan["source"].action == "reuse"
        async with sqlite_home.engine(wf, spill_bytes=spill) as engine:
            result = await engine.resume(failed.run_id, raise_on_failure=False)
    assert dict(calls) == {"total": 1}
    assert result["total"] == expected
    assert result["pair/right"] == "r" * 6000
    async with sqlite_home.engine(wf) as engine:
        stored = await engine.result(failed.run_id)
        assert stored["pair"] == {"left": "l" * 6000, "right": "r" * 6000}
        assert stored["each"] == ["a" * 6000, "b" * 6000]


async def test_pure_nodes_at_the_border(home: Home, calls: Calls) -> None:
    """What a pure node gave goes in as it is, and comes out packed; it is made again if somebody needs it."""
    wf, inner = Workflow("outer", idempotent=True), Workflow("inner")

    @wf.node(checkpoint=False)
    async def raw() -> set[int]:
        calls.began("raw")
        return {1, 2}

    @inner.node(checkpoint=False)
    async def more(given: set[int]) -> list[int]:
        calls.began("more")
        return sorted(given)

    wf.subworkflow("sub", inner, args={"given": "raw"})

    @wf.node
    async def last(sub: list[int]) -> int:
        calls.began("last")
        return sum(sub)

    calls.broken = {"last"}
    failed = await home.run(wf)
    calls.mend()
    result = await home.go_on(wf, failed.run_id)
    assert result["last"] == 3
    assert dict(calls) == {"last": 1}, "the sub-workflow's output is stored: nothing is made again"


async def test_a_pure_sink_is_made_again_for_the_output(home: Home, calls: Calls) -> None:
    """C7: what a pure node gives goes into the output of its workflow, also when it completed earlier."""
    wf, inner = Workflow("outer", idempotent=True), Workflow("inner")

    @inner.node(checkpoint=False)
    async def pure() -> int:
        calls.began("pure")
        return 5

    @inner.node
    async def other() -> int:
        calls.began("other")
        return 6

    wf.subworkflow("sub", inner)
    calls.broken = {"other"}
    failed = await home.run(wf)
    calls.mend()
    result = await home.go_on(wf, failed.run_id)
    assert result["sub"] == {"pure": 5, "other": 6}
    assert dict(calls) == {"pure": 1, "other": 1}


@pytest.mark.parametrize("inside", [True, False])
async def test_one_of_two_pure_nodes_cannot_be_made_again(home: Home, calls: Calls, inside: bool) -> None:
    """The run fails with it, once the other one has ended too; the next resume makes both."""
    wf, inner = Workflow("outer", idempotent=True), Workflow("inner")
    into = inner if inside else wf

    @into.node(checkpoint=False)
    async def quick() -> int:
        calls.began("quick")
        return 1

    @into.node(checkpoint=False)
    async def slow() -> int:
        calls.began("slow")
        await asyncio.sleep(0.05)
        return 2

    @into.node(depends_on=[quick, slow])
    async def other() -> int:
        calls.began("other")
        return 3

    if inside:
        wf.subworkflow("sub", inner)
        inner._output = "total"

    @into.node
    async def total(quick: int, slow: int, other: int) -> int:
        return quick + slow + other

    calls.broken = {"other"}
    failed = await home.run(wf)
    calls.mend()
    calls.broken = {"quick"}
    again = await home.resume(wf, failed.run_id)
    assert again.status is RunStatus.FAILED
    assert list(again.failures) == ["sub/quick" if inside else "quick"]
    calls.mend()
    result = await home.resume(wf, failed.run_id)
    assert result["sub" if inside else "total"] == 6


async def test_a_changed_step_above_changes_what_is_inside(home: Home, calls: Calls) -> None:
    """A retried node above gives something else: idempotent inner paths run again, careful ones are held."""
    wf, inner = Workflow("outer", idempotent=True), Workflow("inner")

    @wf.node
    async def top() -> int:
        calls.began("top")
        return calls["top"]

    @inner.node
    async def x(n: int) -> int:
        calls.began("x")
        return n

    @inner.node
    async def apart() -> int:
        calls.began("apart")
        return 0

    wf.subworkflow("sub", inner, args={"n": "top"})
    first = await home.run(wf)
    result = await home.retry(wf, first.run_id, "top")
    assert result["sub"] == {"x": 2, "apart": 0}


async def test_a_retry_of_everything_failed_resumes_inside(home: Home, calls: Calls) -> None:
    wf = nested(calls, 2)
    calls.broken = {"x"}
    failed = await home.run(wf, {"n": 0})
    calls.mend()
    result = await home.retry(wf, failed.run_id)
    assert result.status is RunStatus.COMPLETED
    assert dict(calls) == {"x": 1, "after2": 1, "after1": 1}


async def test_many_levels_of_maps(home: Home, calls: Calls) -> None:
    """A map over sub-workflows in a map over sub-workflows; the paths tell them apart."""
    wf, middle, inner = Workflow("outer", idempotent=True), Workflow("middle"), Workflow("inner")

    @inner.node
    async def x(n: int, ctx: Context) -> str:
        calls.began(ctx.path)
        return f"{ctx.path}={n}"

    middle.subworkflow("col", inner, for_each={"n": "row"})
    wf.subworkflow("rows", middle, for_each={"row": "table"})
    table = [[1, 2], [], [3]]
    expected = [["rows[0]/col[0]/x=1", "rows[0]/col[1]/x=2"], [], ["rows[2]/col[0]/x=3"]]
    calls.broken = {"rows[0]/col[1]/x"}
    failed = await home.run(wf, {"table": table})
    assert list(failed.failures) == ["rows[0]/col[1]/x"]
    calls.mend()
    result = await home.go_on(wf, failed.run_id)
    assert result["rows"] == expected
    assert dict(calls) == {"rows[0]/col[1]/x": 1}
    async with home.engine(wf) as engine:
        stored = await engine.result(failed.run_id)
    for each in (result, stored):
        assert each.outputs["rows[0]"] == each.outputs["rows[0]/col"] == expected[0]
        assert each.outputs["rows[0]/col[1]"] == each.outputs["rows[0]/col[1]/x"] == expected[0][1]


async def test_maps_of_one_name_inside_and_out(home: Home, calls: Calls) -> None:
    """A path is looked up as a whole, not by its last node."""
    wf, inner = Workflow("outer"), Workflow("inner")

    async def here(n: int) -> str:
        return f"out {n}"

    async def there(n: int) -> str:
        return f"in {n}"

    wf.node(id="m", for_each={"n": "numbers"})(here)
    inner.node(id="m", for_each={"n": "numbers"})(there)
    inner.node(id="x", depends_on="m")(_text)
    wf.subworkflow("sub", inner)

    @wf.node(depends_on="sub")
    async def last() -> None:
        calls.began("last")

    calls.broken = {"last"}
    failed = await home.run(wf, {"numbers": [1, 2]})
    assert failed.outputs["sub/m"] == ["in 1", "in 2"]
    calls.mend()
    result = await home.go_on(wf, failed.run_id)
    async with home.engine(wf) as engine:
        stored = await engine.result(result.run_id)
    for each in (result, stored):
        assert each.outputs["sub/m[1]"] == "in 2"
        assert each.outputs["sub/m"] == ["in 1", "in 2"]
        assert each.outputs["m[1]"] == "out 2"
        with pytest.raises(NoOutput):
            each.outputs["sub/m[2]"]


async def _text() -> str:
    return ""


async def test_what_is_inside_takes_slots_and_what_encloses_it_none(home: Home) -> None:
    """One slot in the engine: a map over sub-workflows of maps still ends."""
    wf, inner = Workflow("outer"), Workflow("inner")
    now = most = 0

    @inner.node(for_each={"n": "row"})
    async def x(n: int) -> int:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        return n

    wf.subworkflow("rows", inner, for_each={"row": "table"})
    async with home.engine(concurrency=1) as engine:
        result = await engine.run(wf, {"table": [[1, 2, 3]] * 5})
    assert result["rows"] == [[1, 2, 3]] * 5
    assert most == 1


async def test_a_failed_inner_node_that_is_handled_inside_is_no_failure(home: Home, calls: Calls) -> None:
    """B08 inside: a handler in the sub-workflow has completed; a resume runs neither again."""
    wf, inner = Workflow("outer"), Workflow("inner")

    @inner.node
    async def a() -> None:
        calls.began("a")
        raise Boom

    @inner.node(depends_on="a", trigger="any_failed")
    async def h() -> str:
        calls.began("h")
        return "handled"

    wf.subworkflow("sub", inner)

    @wf.node
    async def b(sub: str) -> str:
        calls.began("b")
        return sub

    calls.broken = {"b"}
    failed = await home.run(wf)
    assert list(failed.failures) == ["b"]
    calls.mend()
    result = await home.go_on(wf, failed.run_id)
    assert result["b"] == "handled"
    assert dict(calls) == {"b": 1}


async def test_a_failed_sub_workflow_can_be_handled_outside(home: Home, calls: Calls) -> None:
    """B08: `any_failed` beside a sub-workflow; the handler names it and stays done."""
    wf = Workflow("outer")
    wf.subworkflow("sub", nested(calls, 2), args={"n": Value(0)})

    @wf.node(depends_on="sub", trigger="any_failed")
    async def h(ctx: Context) -> str:
        calls.began("h")
        return ctx.failures["sub"].path

    @wf.node
    async def b(h: str) -> str:
        calls.began("b")
        return h

    calls.broken = {"x", "b"}
    failed = await home.run(wf)
    assert list(failed.failures) == ["b"]
    calls.mend()
    result = await home.go_on(wf, failed.run_id)
    assert result.status is RunStatus.COMPLETED
    assert result["b"].startswith("sub")
    assert dict(calls) == {"b": 1}
