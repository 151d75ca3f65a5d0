"""`when=`: what runs, what is skipped, what is asked and when; joins below what was skipped (cases Q)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dagresume import BindingError, Context, DefinitionError, Retry, RunStatus, Value, Workflow
from tests.engine.kit import Calls, Home, listing


async def test_what_is_asked_decides(home: Home, calls: Calls) -> None:
    wf = Workflow("w")

    @wf.node
    async def n() -> int:
        return 5

    def gate(name: str, answer: Any) -> Any:
        def when(n: int) -> Any:
            calls.began(f"when {name} {n}")
            return answer

        return when

    for name, answer in [("yes", 1), ("no", ""), ("none", None), ("true", True)]:

        def body(name: str = name) -> Any:
            async def run(n: int) -> str:
                calls.began(name)
                return name

            return run

        wf.node(id=name, when=gate(name, answer))(body())
    result = await home.run(wf)
    assert result.status is RunStatus.COMPLETED
    assert dict(result.outputs) == {"n": 5, "yes": "yes", "true": "true"}
    states = await home.statuses(result.run_id)
    assert (states["no"], states["none"]) == ("skipped", "skipped")
    assert (await home.info(result.run_id)).nodes["no"].reason == "condition"
    assert calls["when no 5"] == calls["when yes 5"] == 1
    assert list(result.executed) == ["n", "yes", "true"]


async def test_a_condition_that_raises_fails_its_node(home: Home, calls: Calls) -> None:
    """The node fails with what its condition raised; the resume asks again."""
    wf = Workflow("w")

    def when() -> bool:
        calls.began("when")
        return True

    @wf.node(when=when)
    async def a() -> str:
        calls.began("a")
        return "a"

    @wf.node
    async def b(a: str) -> str:
        calls.began("b")
        return a

    calls.broken = {"when"}
    failed = await home.run(wf)
    assert list(failed.failures) == ["a"]
    assert failed.failures["a"].message == "when"
    assert dict(calls) == {"when": 1}
    calls.mend()
    result = await home.go_on(wf, failed.run_id)
    assert result["b"] == "a"
    assert dict(calls) == {"when": 1, "a": 1, "b": 1}


async def test_a_condition_that_raises_in_a_careful_node_is_no_question(home: Home, calls: Calls) -> None:
    """Its body never began: nobody has to say what it did. B103's neighbour."""
    wf, inner = Workflow("w", idempotent=False), Workflow("inner")

    def when(n: int) -> bool:
        calls.began(f"when {n}")
        return True

    async def x(n: int) -> int:
        return n

    wf.node(id="m", for_each={"n": "numbers"}, when=when)(x)
    inner.node(id="x")(x)
    wf.subworkflow("s", inner, for_each={"n": "numbers"}, when=when)
    wf.subworkflow("one", inner, args={"n": Value(7)}, when=when)
    wf.loop("l", x, initial=Value(8), until=lambda s: True, max_iterations=2, when=lambda n: when(n))
    calls.broken = {"when 1", "when 7", "when 8"}
    failed = await home.run(wf, {"numbers": [0, 1, 2]})
    assert set(failed.failures) == {"m[1]", "s[1]", "one", "l"}
    assert {failure.reason for failure in failed.failures.values()} == {"condition_failed"}
    assert list((await home.info(failed.run_id)).failures) == ["m[1]", "s[1]", "one", "l"]
    calls.mend()
    result = await home.go_on(wf, failed.run_id)
    assert dict(result.outputs) == {"m": [0, 1, 2], "s": [0, 1, 2], "one": 7, "l": 8}


async def test_a_condition_that_raises_for_one_item_fails_the_run(home: Home, calls: Calls) -> None:
    """C8: a map that failed for nothing but its condition is a failure of the run."""
    wf, inner = Workflow("w"), Workflow("inner")

    @inner.node
    async def x(n: int) -> int:
        return n

    def when(n: int) -> bool:
        calls.began(f"when {n}")
        return True

    wf.subworkflow("s", inner, for_each={"n": "numbers"}, when=when)
    calls.broken = {"when 1"}
    failed = await home.run(wf, {"numbers": [0, 1]})
    assert failed.status is RunStatus.FAILED
    assert list(failed.failures) == ["s[1]"]


async def test_a_condition_is_not_tried_again_and_not_left_out(home: Home, calls: Calls) -> None:
    """A retry is for bodies: after a condition raised nothing runs that nobody said yes to."""
    wf = Workflow("w", retry=Retry(3, delay=0, jitter=0))

    def when(n: int) -> bool:
        calls.began("when")
        return False

    async def body(n: int) -> int:
        calls.began("body")
        return n

    wf.node(id="a", args={"n": Value(0)}, when=when)(body)
    wf.node(id="m", for_each={"n": "numbers"}, when=when)(body)
    calls.broken = {"when"}
    failed = await home.run(wf, {"numbers": [0]})
    assert set(failed.failures) == {"a", "m[0]"}
    assert dict(calls) == {"when": 2}
    calls.mend()
    result = await home.go_on(wf, failed.run_id)
    assert dict(result.outputs) == {"m": [None]}
    assert dict(calls) == {"when": 2}


@pytest.mark.parametrize("chained", [True, False])
async def test_no_more_graphs_are_open_than_allowed(home: Home, chained: bool) -> None:
    """`concurrency=` of a map over sub-workflows holds, also where items are skipped or handed on."""
    wf, inner = Workflow("w"), Workflow("inner")
    now = most = 0

    @inner.node
    async def x(n: int) -> int:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        return n

    @inner.node
    async def y(x: int) -> int:
        nonlocal now
        now -= 1
        return x

    @wf.node(for_each={"n": "numbers"})
    async def above(n: int) -> int | None:
        return n or None

    wf.subworkflow(
        "s", inner, for_each={"n": above if chained else "numbers"}, concurrency=2,
        when=None if chained else lambda n: n > 0,
    )  # fmt: skip
    result = await home.run(wf, {"numbers": [0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 6, 7]})
    assert result["s"] == [None, 1, None, 2, None, 3, None, 4, None, 5, 6, 7]
    assert most == 2


async def test_what_was_answered_is_not_asked_again(home: Home, calls: Calls) -> None:
    """A resume with the same input asks neither what was skipped nor what had begun."""
    wf = Workflow("w")

    def when(n: int) -> bool:
        calls.began(f"when {n}")
        return n != 1

    async def body(n: int) -> int:
        calls.began(f"body {n}")
        return n

    for n in range(3):
        wf.node(id=f"n{n}", args={"n": Value(n)}, when=when)(body)
    calls.broken = {"body 2"}
    failed = await home.run(wf)
    assert list(failed.failures) == ["n2"]
    plan = await home.plan(wf, failed.run_id)
    assert [(plan[f"n{n}"].action, plan[f"n{n}"].reason) for n in range(3)] == [
        ("reuse", "completed"), ("skip", "condition"), ("run", "failed"),
    ]  # fmt: skip
    calls.mend()
    result = await home.go_on(wf, failed.run_id)
    assert dict(calls) == {"body 2": 1}
    assert dict(result.outputs) == {"n0": 0, "n2": 2}


async def test_another_input_is_asked_about_anew(home: Home, calls: Calls) -> None:
    """A node above that runs again: what was skipped may run, what ran may be skipped."""
    wf = Workflow("w", idempotent=True)

    @wf.node
    async def top() -> int:
        calls.began("top")
        return calls["top"]

    def odd(top: int) -> bool:
        calls.began("when")
        return top % 2 == 1

    @wf.node(when=odd)
    async def a(top: int) -> int:
        return top

    @wf.node(when=lambda top: not top % 2)
    async def b(top: int) -> int:
        return top

    first = await home.run(wf)
    assert dict(first.outputs) == {"top": 1, "a": 1}
    again = await home.retry(wf, first.run_id, "top")
    assert dict(again.outputs) == {"top": 2, "b": 2}
    assert again.status is RunStatus.COMPLETED
    states = await home.statuses(first.run_id)
    assert (states["a"], states["b"]) == ("skipped", "completed")
    async with home.engine(wf) as engine:
        assert dict((await engine.result(first.run_id)).outputs) == {"top": 2, "b": 2}


async def test_items_are_asked_one_by_one(home: Home, calls: Calls) -> None:
    """Per item in a map; skipped ones are None in the list, and pass through a chained map uncalled."""
    wf = Workflow("w")
    listing(wf, [0, 1, 2, 3])

    def even(n: int) -> bool:
        calls.began(f"when {n}")
        return n % 2 == 0

    @wf.node(for_each={"n": "items"}, when=even)
    async def some(n: int) -> str:
        calls.began(f"some {n}")
        return f"<{n}>"

    @wf.node(for_each={"text": "some"})
    async def chained(text: str) -> str:
        calls.began(f"chained {text}")
        return text + "!"

    @wf.node
    async def last(some: list[Any], chained: list[Any]) -> list[Any]:
        calls.began("last")
        return [some, chained]

    calls.broken = {"some 2", "last"}
    failed = await home.run(wf)
    assert list(failed.failures) == ["some[2]"]
    states = await home.statuses(failed.run_id)
    assert [states[f"some[{n}]"] for n in range(4)] == ["completed", "skipped", "failed", "skipped"]
    assert calls["chained <0>"] == 1
    calls.mend()
    calls.broken = {"last"}
    failed = await home.go_on(wf, failed.run_id)
    assert dict(calls) == {"some 2": 1, "chained <2>": 1, "last": 1}
    calls.mend()
    result = await home.go_on(wf, failed.run_id)
    assert dict(calls) == {"last": 1}
    assert result["last"] == [["<0>", None, "<2>", None], ["<0>!", None, "<2>!", None]]
    async with home.engine(wf) as engine:
        stored = await engine.result(failed.run_id)
    assert stored["some"] == ["<0>", None, "<2>", None], "a skipped item is None in a stored result too"


async def test_all_items_skipped(home: Home) -> None:
    wf = Workflow("w")

    @wf.node(for_each={"n": "numbers"}, when=lambda n: False)
    async def none(n: int) -> int:
        return n

    @wf.node
    async def last(none: list[None]) -> int:
        return len(none)

    result = await home.run(wf, {"numbers": [1, 2]})
    assert result["none"] == [None, None]
    assert result["last"] == 2
    assert dict((await home.run(wf, {"numbers": []})).outputs) == {"none": [], "last": 0}


async def test_a_sub_workflow_that_is_not_wanted(home: Home, calls: Calls) -> None:
    """Nothing inside it exists; on resume neither."""
    wf, inner = Workflow("w"), Workflow("inner")

    @inner.node
    async def x(n: int) -> int:
        calls.began(f"x {n}")
        return n

    def big(n: int) -> bool:
        calls.began(f"when {n}")
        return n > 1

    wf.subworkflow("no", inner, args={"n": Value(0)}, when=big)
    wf.subworkflow("yes", inner, args={"n": Value(2)}, when=big)
    wf.subworkflow("each", inner, for_each={"n": "numbers"}, when=big)

    @wf.node(trigger="all_done")
    async def last(no: int | None, yes: int, each: list[Any], ctx: Context) -> list[Any]:
        calls.began("last")
        return [no, yes, each, sorted(ctx.skipped)]

    calls.broken = {"last"}
    failed = await home.run(wf, {"numbers": [1, 5]})
    states = await home.statuses(failed.run_id)
    assert states["no"] == states["each[0]"] == "skipped"
    assert not {"no/x", "each[0]/x"} & states.keys()
    calls.mend()
    result = await home.go_on(wf, failed.run_id)
    assert result["last"] == [None, 2, [None, 5], ["no"]]
    assert dict(calls) == {"last": 1}


async def test_the_plan_of_items_that_were_not_asked_yet(home: Home, calls: Calls) -> None:
    """Whether anything inside them runs depends on their condition: `check`, all the way down."""
    wf, inner = Workflow("w", idempotent=True), Workflow("inner")
    began = asyncio.Event()

    @inner.node
    async def x(n: int) -> int:
        calls.began(f"x {n}")
        began.set()
        if n == 1 and calls["x 1"] == 1:
            await asyncio.sleep(60)
        return n

    @inner.node(for_each={"k": "numbers"})
    async def y(k: int, x: int) -> int:
        return k * x

    wf.subworkflow("each", inner, for_each={"n": "numbers"}, when=lambda n: n < 3, concurrency=1)
    async with home.engine(wf, grace_seconds=0) as engine:
        handle = await engine.start(wf, {"numbers": [1, 2, 3]})
        await began.wait()
    plan = await home.plan(wf, handle.run_id, items=True)
    assert plan["each[0]/x"].action == "run"
    assert plan["each[1]/x"].action == plan["each[2]/x"].action == plan["each[2]"].action == "check"
    result = await home.go_on(wf, handle.run_id)
    assert result["each"] == [[1, 2, 3], [2, 4, 6], None]


async def test_a_sub_workflow_that_had_begun_is_not_asked_again(home: Home, calls: Calls) -> None:
    wf, inner = Workflow("w"), Workflow("inner")

    @inner.node
    async def x(n: int) -> int:
        calls.began(f"x {n}")
        return n

    def when(n: int) -> bool:
        calls.began(f"when {n}")
        return True

    wf.subworkflow("sub", inner, args={"n": Value(0)}, when=when)
    wf.subworkflow("each", inner, for_each={"n": "numbers"}, when=when)
    calls.broken = {"x 0", "x 5"}
    failed = await home.run(wf, {"numbers": [1, 5]})
    calls.mend()
    result = await home.go_on(wf, failed.run_id)
    assert result["each"] == [1, 5]
    assert {name for name in calls if name.startswith("x")} == {"x 0", "x 5"}
    assert dict(calls) == {"x 0": 1, "x 5": 1}, "the condition was asked again about the same input"


async def test_items_that_had_begun_are_not_asked_again(home: Home, calls: Calls) -> None:
    wf = Workflow("w")

    def when(n: int) -> bool:
        calls.began(f"when {n}")
        return True

    @wf.node(for_each={"n": "numbers"}, when=when)
    async def m(n: int) -> int:
        calls.began(f"m {n}")
        return n

    calls.broken = {"m 5"}
    failed = await home.run(wf, {"numbers": [1, 5]})
    calls.mend()
    assert (await home.go_on(wf, failed.run_id))["m"] == [1, 5]
    assert dict(calls) == {"m 5": 1}, "the condition was asked again about the same input"


async def test_a_loop_that_is_not_wanted(home: Home, calls: Calls) -> None:
    """`when` of a loop is asked once, about what the first round receives, not before each round."""
    wf = Workflow("w")

    def when(state: int) -> bool:
        calls.began(f"when {state}")
        return state >= 0

    async def body(state: int) -> int:
        calls.began(f"round {state}")
        return state + 1

    for name, start in [("yes", 0), ("no", -5)]:
        wf.loop(name, body, initial=Value(start), until=lambda s: s == 3, max_iterations=9, when=when)
    calls.broken = {"round 2"}
    failed = await home.run(wf)
    assert list(failed.failures) == ["yes[2]"]
    calls.mend()
    result = await home.go_on(wf, failed.run_id)
    assert dict(result.outputs) == {"yes": 3}
    assert dict(calls) == {"round 2": 1}


async def test_a_join_waits_for_the_branch_that_runs(home: Home, calls: Calls) -> None:
    """B121: one side slow, one skipped; the join runs with the one, and is told of the other."""
    wf = Workflow("w")
    gate = asyncio.Event()

    @wf.node
    async def branch() -> str:
        return "a"

    @wf.node(when=lambda branch: branch == "a")
    async def a(branch: str) -> int:
        await gate.wait()
        return 1

    @wf.node(when=lambda branch: branch == "b")
    async def b(branch: str) -> int:
        calls.began("b")
        gate.set()
        return 2

    @wf.node(depends_on="branch")
    async def beside() -> None:
        gate.set()

    @wf.node
    async def join(a: int | None, b: int | None, ctx: Context) -> list[Any]:
        calls.began("join")
        return [a, b, sorted(ctx.skipped)]

    result = await home.run(wf)
    assert result["join"] == [1, None, ["b"]]
    assert dict(calls) == {"join": 1}


@pytest.mark.parametrize(
    ("trigger", "ends"),
    [
        ("none_failed", "completed"),
        ("any_success", "completed"),
        ("all_success", "skipped"),
        ("all_done", "completed"),
        ("any_failed", "skipped"),
    ],
)
async def test_joins_below_one_of_two(home: Home, calls: Calls, trigger: Any, ends: str) -> None:
    """B122: live, and the same on resume."""
    wf = Workflow("w")

    @wf.node(when=lambda take: take == "x")
    async def x(take: str) -> str:
        return "x"

    @wf.node(when=lambda take: take == "y")
    async def y(take: str) -> str:
        return "y"

    @wf.node(trigger=trigger)
    async def z(x: str | None, y: str | None, ctx: Context) -> list[Any]:
        calls.began("z")
        return [x, y, sorted(ctx.skipped)]

    @wf.node
    async def other() -> None:
        calls.began("other")

    calls.broken = {"other"}
    failed = await home.run(wf, {"take": "x"})
    for _ in range(2):
        assert (await home.statuses(failed.run_id))["z"] == ends
        if ends == "completed":
            assert failed["z"] == ["x", None, ["y"]]
        calls.mend()
        failed = await home.go_on(wf, failed.run_id)
        assert calls["z"] == 0


@pytest.mark.parametrize(
    ("trigger", "ends"),
    [
        ("none_failed", "skipped"),
        ("any_success", "skipped"),
        ("all_success", "skipped"),
        ("all_done", "completed"),
        ("any_failed", "skipped"),
    ],
)
async def test_joins_below_nothing(home: Home, calls: Calls, trigger: Any, ends: str) -> None:
    """B124: both sides skipped; also what is below the join, and on resume."""
    wf = Workflow("w")
    for name in "pq":
        wf.node(id=name, when=lambda: False)(_nothing)

    @wf.node(trigger=trigger)
    async def j(p: Any, q: Any, ctx: Context) -> list[Any]:
        calls.began("j")
        return [p, q, sorted(ctx.skipped)]

    @wf.node
    async def below(j: Any) -> Any:
        return j

    @wf.node
    async def other() -> None:
        calls.began("other")

    calls.broken = {"other"}
    failed = await home.run(wf)
    for _ in range(2):
        states = await home.statuses(failed.run_id)
        assert (states["j"], states["below"]) == (ends, ends)
        if ends == "completed":
            assert failed["below"] == [None, None, ["p", "q"]]
        calls.mend()
        failed = await home.go_on(wf, failed.run_id)


async def _nothing() -> None:
    return None


async def test_joins_inside_a_sub_workflow_in_a_map(home: Home, calls: Calls) -> None:
    """B121, B124 in each item by itself."""
    wf, inner = Workflow("w"), Workflow("inner", output="j")

    @inner.node(when=lambda n: n > 0)
    async def p(n: int) -> int:
        return n

    @inner.node(when=lambda n: n > 1)
    async def q(n: int) -> int:
        return n

    @inner.node
    async def j(p: Any, q: Any, ctx: Context) -> list[Any]:
        calls.began("j")
        return [p, q, sorted(ctx.skipped)]

    wf.subworkflow("each", inner, for_each={"n": "numbers"})

    @wf.node
    async def last(each: list[Any]) -> list[Any]:
        calls.began("last")
        return each

    calls.broken = {"last"}
    failed = await home.run(wf, {"numbers": [0, 1, 2]})
    assert calls["j"] == 2
    states = await home.statuses(failed.run_id)
    assert [states.get(f"each[{n}]/j") for n in range(3)] == ["skipped", "completed", "completed"]
    calls.mend()
    result = await home.go_on(wf, failed.run_id)
    assert result["last"] == [None, [1, None, ["q"]], [2, 2, []]]
    assert dict(calls) == {"last": 1}


async def test_a_condition_gets_objects_of_its_own(home: Home) -> None:
    """C7: what it does to them the body does not see."""
    wf = Workflow("w")

    @wf.node
    async def give() -> list[int]:
        return [1]

    def spoil(give: list[int]) -> bool:
        give.append(2)
        return True

    @wf.node(when=spoil)
    async def take(give: list[int]) -> list[int]:
        return give

    @wf.node(for_each={"item": "lists"}, when=lambda item: item.append(9) is None)
    async def each(item: list[int]) -> list[int]:
        return item

    result = await home.run(wf, {"lists": [[1], [2]]})
    assert result["take"] == [1]
    assert result["each"] == [[1], [2]]


def test_conditions_are_checked_when_they_are_declared() -> None:
    wf = Workflow("w")
    with pytest.raises(BindingError):
        wf.node(id="a", when=lambda typo: True)(_nothing)

    async def later(n: int) -> bool:
        return True

    with pytest.raises(DefinitionError, match="plain function"):
        wf.node(id="a", when=later)(_nothing)


async def test_a_condition_sees_defaults_and_inputs(home: Home) -> None:
    """A subset of the parameters; an input left to its default is the condition's own to default."""
    wf = Workflow("w")

    @wf.node(when=lambda n, limit=3: n < limit)
    async def a(n: int, limit: int = 3) -> int:
        return n

    assert dict((await home.run(wf, {"n": 2})).outputs) == {"a": 2}
    assert dict((await home.run(wf, {"n": 4})).outputs) == {}
    assert dict((await home.run(wf, {"n": 4, "limit": 5})).outputs) == {"a": 4}
