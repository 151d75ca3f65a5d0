"""What a person's word to run something again reaches: paths of any depth, and the narrower forms."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest

from dagresume import Context, DefinitionError, RunStatus, Value, Workflow
from dagresume.events import COMPLETED, RUN_CREATED, Snapshot, node_record, run_record
from dagresume.program import Asked, Program, to_reset
from tests.engine.kit import Calls, Home, listing


def screening(calls: Calls, *, idempotent: bool = False) -> Workflow:
    """A map over an inner workflow of three nodes, one of them a map; beside and below it plain nodes."""
    inner = Workflow("inner")

    @inner.node
    async def read(cv: str) -> list[str]:
        calls.began(f"read {cv}")
        return [cv + "x", cv + "y"]

    @inner.node(for_each={"part": "read"})
    async def score(part: str) -> str:
        calls.began(f"score {part}")
        return part.upper()

    @inner.node
    async def aside(cv: str) -> str:
        calls.began(f"aside {cv}")
        return cv

    @inner.node
    async def evaluate(score: list[str], aside: str) -> str:
        calls.began(f"evaluate {aside}")
        return "+".join(score)

    wf = Workflow("outer", idempotent=idempotent or None)
    listing(wf, ["a", "b", "c"], "cvs")
    wf.subworkflow("screen", inner, for_each={"cv": "cvs"})
    add = calls.adder(wf)
    add("beside", "cvs")
    add("report", "screen")
    return wf


async def test_a_node_its_descendants_and_nothing_else(home: Home, calls: Calls) -> None:
    """B14: a→b→c and an unrelated branch; the old outputs stay in the journal."""
    wf = Workflow("w")
    add = calls.adder(wf)
    add("a")
    add("b", "a")
    add("c", "b")
    add("other", "a")
    run_id = (await home.run(wf)).run_id
    calls.mend()
    result = await home.retry(wf, run_id, "b")
    assert list(result.executed) == ["b", "c"]
    assert result.status is RunStatus.COMPLETED
    events = await home.events(run_id)
    assert [e.path for e in events if e.kind == "node.reset"] == ["b", "c"]
    assert sum(e.kind == "node.completed" and e.path == "b" for e in events) == 2
    assert [e.data.get("from") for e in events if e.kind == "run.claimed"] == ["b"]


async def test_an_item_of_a_map_inside_a_sub_workflow_of_a_map(home: Home, calls: Calls) -> None:
    """B10: only that item, what is below it, and what encloses it; the states hold up to the root."""
    wf = screening(calls)
    run_id = (await home.run(wf)).run_id
    calls.mend()
    result = await home.retry(wf, run_id, "screen[1]/score[0]")
    assert list(result.executed) == ["screen[1]/score[0]", "screen[1]/evaluate", "report"]
    events = await home.events(run_id)
    reset = {event.path for event in events if event.kind == "node.reset"}
    assert reset == {
        "screen",
        "screen[1]",
        "screen[1]/score",
        "screen[1]/score[0]",
        "screen[1]/evaluate",
        "report",
    }
    statuses = await home.statuses(run_id)
    assert set(statuses.values()) == {"completed"}
    assert statuses.keys() >= {"screen", "screen[1]", "screen[1]/score", "screen[1]/score[0]", "report"}
    assert "screen[0]/score[0]" in result.reused
    assert result["screen"] == ["AX+AY", "BX+BY", "CX+CY"]


async def test_a_node_in_an_item_of_a_map_over_sub_workflows(home: Home, calls: Calls) -> None:
    wf = screening(calls)
    run_id = (await home.run(wf)).run_id
    calls.mend()
    assert list((await home.retry(wf, run_id, "screen[2]/aside")).executed) == [
        "screen[2]/aside",
        "screen[2]/evaluate",
        "report",
    ]
    assert set((await home.retry(wf, run_id, "screen[0]")).executed) == {
        "screen[0]/read", "screen[0]/aside", "screen[0]/score[0]", "screen[0]/score[1]",
        "screen[0]/evaluate", "report",
    }  # fmt: skip


def rounds(calls: Calls) -> Workflow:
    wf = Workflow("loop")

    async def refine(state: int, ctx: Context) -> int:
        calls.began(ctx.path)
        return state + 1

    wf.loop("refine", refine, initial="start", until=lambda state: state >= 5, max_iterations=9)
    calls.adder(wf)("after", "refine")
    return wf


async def test_a_round_the_later_ones_and_what_is_below_the_loop(home: Home, calls: Calls) -> None:
    wf = rounds(calls)
    run_id = (await home.run(wf, {"start": 0})).run_id
    calls.mend()
    plan = {
        d.path: f"{d.action} {d.reason}" for d in await planned(home, wf, run_id, Asked(retry="refine[3]"))
    }
    assert plan["refine"] == "run asked"
    assert plan["refine[2]"] == "reuse completed"
    assert plan["refine[3]"] == "run asked"
    assert plan["refine[4]"].startswith("check")
    assert plan["after"] == "run asked"
    result = await home.retry(wf, run_id, "refine[3]")
    assert list(result.executed) == ["refine[3]", "refine[4]", "after"]
    assert result["refine"] == 5


async def test_a_round_of_a_loop_over_a_sub_workflow(home: Home, calls: Calls) -> None:
    inner = Workflow("inner")

    @inner.node
    async def first(state: int) -> int:
        calls.began(f"first {state}")
        return state + 1

    @inner.node
    async def second(first: int) -> int:
        return first

    wf = Workflow("outer")
    wf.loop("again", inner, initial="start", until=lambda state: state >= 3, max_iterations=9)
    run_id = (await home.run(wf, {"start": 0})).run_id
    result = await home.retry(wf, run_id, "again[1]/second")
    assert list(result.executed) == ["again[1]/second", "again[2]/first", "again[2]/second"]
    assert result["again"] == 3


def chained(calls: Calls, *, broken: frozenset[int] = frozenset(), tolerate: int | None = None) -> Workflow:
    wf = Workflow("chained")
    listing(wf, [0, 1, 2, 3])

    @wf.node(for_each={"n": "items"}, tolerate=tolerate)
    async def one(n: int) -> int:
        calls.began(f"one {n}")
        if f"{n}" in calls.broken:
            raise ValueError(n)
        return n

    @wf.node(for_each={"n": "one"})
    async def two(n: int) -> int:
        calls.began(f"two {n}")
        return n

    @wf.node
    async def total(two: list[Any]) -> int:
        calls.began("total")
        return len(two)

    calls.broken |= {str(n) for n in broken}
    return wf


async def test_an_item_and_below_it_in_chained_maps_only_the_same_item(home: Home, calls: Calls) -> None:
    wf = chained(calls)
    run_id = (await home.run(wf)).run_id
    calls.mend()
    assert list((await home.retry(wf, run_id, "one[2]")).executed) == ["one[2]", "two[2]", "total"]
    assert list((await home.retry(wf, run_id, "two[1]")).executed) == ["two[1]", "total"]
    assert calls["total"] == 2


async def test_only_failed_takes_the_failed_items_of_a_map_those_tolerated_too(
    home: Home, calls: Calls
) -> None:
    wf = chained(calls, broken=frozenset({1, 3}), tolerate=2)
    first = await home.run(wf)
    assert first.status is RunStatus.COMPLETED
    calls.mend()
    result = await home.retry(wf, first.run_id, "one", only_failed=True)
    assert set(result.executed) == {"one[1]", "one[3]", "two[1]", "two[3]", "total"}
    calls.mend()
    again = await home.retry(wf, first.run_id, "one", only_failed=True)
    assert list(again.executed) == []
    assert not calls


async def test_only_failed_of_a_map_over_sub_workflows_keeps_what_completed_in_an_item(
    home: Home, calls: Calls
) -> None:
    inner = Workflow("inner")

    @inner.node
    async def read(cv: str) -> str:
        calls.began(f"read {cv}")
        return cv

    @inner.node
    async def judge(read: str) -> str:
        calls.began(f"judge {read}")
        return read

    wf = Workflow("outer")
    listing(wf, ["a", "b"], "cvs")
    wf.subworkflow("screen", inner, for_each={"cv": "cvs"}, tolerate=1)
    calls.adder(wf)("report", "screen")
    calls.broken = {"judge b"}
    run_id = (await home.run(wf)).run_id
    calls.mend()
    result = await home.retry(wf, run_id, "screen", only_failed=True)
    assert list(result.executed) == ["screen[1]/judge", "report"]
    assert result["screen"] == ["a", "b"]


@pytest.mark.parametrize("same", [True, False])
async def test_only_changed_runs_below_only_what_receives_something_else(
    home: Home, calls: Calls, same: bool
) -> None:
    """Non-idempotent ones too, and without asking."""
    wf, gives = Workflow("w"), ["before"]

    @wf.node
    async def top() -> str:
        calls.began("top")
        return gives[0]

    @wf.node
    async def left(top: str) -> str:
        calls.began("left")
        return "left"

    @wf.node
    async def below(left: str) -> str:
        calls.began("below")
        return "below"

    run_id = (await home.run(wf)).run_id
    calls.mend()
    gives[0] = "before" if same else "after"
    asked = Asked(retry="top", only_changed=True)
    plan = {d.path: d for d in await planned(home, wf, run_id, asked)}
    assert plan["left"].action == "check"
    assert plan["left"].repeats == "completed"
    result = await home.retry(wf, run_id, top, only_changed=True)
    assert result.status is RunStatus.COMPLETED
    assert list(result.executed) == ["top"] if same else ["top", "left"]
    claimed = [event for event in await home.events(run_id) if event.kind == "run.claimed"]
    assert claimed[-1].data["permitted"] == ["below", "left"]


async def test_only_changed_inside_a_sub_workflow(home: Home, calls: Calls) -> None:
    wf = screening(calls)
    run_id = (await home.run(wf)).run_id
    result = await home.retry(wf, run_id, "screen[1]/score[1]", only_changed=True)
    assert list(result.executed) == ["screen[1]/score[1]"]
    assert result.status is RunStatus.COMPLETED


BROKEN: set[int] = set()
"""Items of `mixed` that fail; a global, since what a body captures may make its code unknown."""


def coded(change: str = "") -> Workflow:
    """a→b→c beside side, and a sub-workflow with a node of its own; one of them may have other code."""
    wf, inner = Workflow("coded"), Workflow("inner")

    def body(name: str) -> Callable[[], Any]:
        async def plain() -> str:
            return name

        async def edited() -> str:
            return name + ""

        return edited if name == change else plain

    for name, *after in (("a",), ("b", "a"), ("c", "b"), ("side", "a")):
        wf.node(id=name, depends_on=after)(body(name))
    for name, *after in (("x",), ("y", "x"), ("z",)):
        inner.node(id=name, depends_on=after)(body(name))
    wf.subworkflow("sub", inner, depends_on=["a"])
    return wf


@pytest.mark.parametrize(
    ("change", "runs"),
    [("b", ["b", "c"]), ("side", ["side"]), ("x", ["sub/x", "sub/y"]), ("z", ["sub/z"]), ("", [])],
)
async def test_code_changed_runs_exactly_what_has_other_code_and_what_is_below(
    home: Home, change: str, runs: list[str]
) -> None:
    run_id = (await home.run(coded())).run_id
    result = await home.retry(coded(change), run_id, code_changed=True)
    assert sorted(result.executed) == runs
    assert result.status is RunStatus.COMPLETED
    again = await home.retry(coded(change), run_id, code_changed=True)
    assert list(again.executed) == []


async def test_code_changed_knows_which_items_ran_with_the_old_code(home: Home) -> None:
    """A run that was resumed with other code has outputs of both."""

    def flow(edited: bool) -> Workflow:
        wf = Workflow("mixed", idempotent=True)
        listing(wf, [0, 1, 2, 3])

        async def old(n: int) -> int:
            if n in BROKEN:
                raise ValueError(n)
            return n

        async def new(n: int) -> int:
            return n * 1

        wf.node(id="m", for_each={"n": "items"})(new if edited else old)
        return wf

    BROKEN.update({1, 2})
    run_id = (await home.run(flow(False))).run_id
    assert list((await home.resume(flow(True), run_id)).executed) == ["m[1]", "m[2]"]
    result = await home.retry(flow(True), run_id, code_changed=True)
    assert list(result.executed) == ["m[0]", "m[3]"]


async def test_a_cancelled_run_is_opened_again_by_a_path(home: Home, calls: Calls) -> None:
    wf = chained(calls, broken=frozenset({0}))
    run_id = (await home.run(wf)).run_id
    async with home.engine(wf) as engine:
        await engine.cancel(run_id)
    calls.mend()
    assert (await home.retry(wf, run_id, "one[0]")).status is RunStatus.COMPLETED


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("scren", "Did you mean 'screen'"),
        ("screen[1]/evalute", r"Did you mean 'screen\[1\]/evaluate'"),
        ("screen[7]", "has 3 items"),
        ("screen/evaluate", r"screen\[0\]"),
        ("beside[0]", "no items"),
        ("beside/x", "no other nodes"),
        ("screen[", "not a path"),
    ],
)
async def test_a_path_that_is_not_there_is_told_and_changes_nothing(
    home: Home, calls: Calls, path: str, says: str
) -> None:
    wf = screening(calls)
    run_id = (await home.run(wf)).run_id
    before = await home.events(run_id)
    with pytest.raises(DefinitionError, match=says):
        await home.retry(wf, run_id, path)
    assert await home.events(run_id) == before


@pytest.mark.parametrize(
    "options",
    [
        {"only_failed": True},
        {"only_changed": True},
        {"from_node": "screen", "code_changed": True},
        {"from_node": "beside", "only_failed": True},
        {"from_node": "screen[0]", "only_failed": True},
    ],
)
async def test_forms_that_mean_nothing_are_refused(home: Home, calls: Calls, options: dict[str, Any]) -> None:
    wf = screening(calls)
    run_id = (await home.run(wf)).run_id
    with pytest.raises(DefinitionError):
        await home.retry(wf, run_id, **options)


async def planned(home: Home, wf: Workflow, run_id: str, asked: Asked) -> list[Any]:
    async with home.engine(wf) as engine:
        return await engine.plan(run_id, items=True, asked=asked)


@pytest.mark.parametrize(
    "asked",
    [
        Asked(retry="screen[1]/score[0]"),
        Asked(retry="screen[2]/aside"),
        Asked(retry="screen[0]"),
        Asked(retry="screen"),
        Asked(retry="cvs"),
        Asked(retry="beside"),
    ],
    ids=lambda asked: str(asked.retry),
)
async def test_the_plan_of_a_retry_is_what_it_does(home: Home, calls: Calls, asked: Asked) -> None:
    """Every `run` runs, every `reuse` is reused, nothing else runs; what has an effect once more is named."""
    wf = screening(calls)
    run_id = (await home.run(wf)).run_id
    before = await home.events(run_id)
    plan = await planned(home, wf, run_id, asked)
    assert await home.events(run_id) == before
    assert len({d.path for d in plan}) == len(plan)
    result = await home.retry(wf, run_id, asked.retry)
    runs = {d.path for d in plan if d.action == "run"}
    executed = set(result.executed)
    functions = executed | set(result.reused)
    assert runs & functions <= executed
    assert not executed & {d.path for d in plan if d.action == "reuse"}
    assert executed <= {d.path for d in plan if d.action in {"run", "check"}}
    repeated = {d.path for d in plan if d.repeats == "completed"}
    assert repeated == executed - {"cvs"}  # which is idempotent


@pytest.mark.parametrize("seed", range(15))
async def test_in_any_graph_a_retry_runs_the_node_and_its_descendants(
    home: Home, calls: Calls, seed: int
) -> None:
    chance = random.Random(seed)
    wf = Workflow("any", idempotent=chance.choice([True, False]))
    add = calls.adder(wf)
    for k in range(12):
        add(f"n{k}", *(f"n{p}" for p in range(k) if chance.random() < 0.25))
    run_id = (await home.run(wf)).run_id
    start = f"n{chance.randrange(12)}"
    plan = {d.path: d.action for d in await planned(home, wf, run_id, Asked(retry=start))}
    result = await home.retry(wf, run_id, start)
    expected = {start} | nx.descendants(wf.graph, start)
    assert set(result.executed) == {path for path, action in plan.items() if action == "run"} == expected
    fork = await home_fork(home, wf, run_id, start)
    assert set(fork) == expected


async def home_fork(home: Home, wf: Workflow, run_id: str, start: str) -> list[str]:
    async with home.engine(wf) as engine:
        return list((await engine.fork(run_id, start)).executed)


def test_a_hundred_thousand_items_are_no_matter(calls: Calls) -> None:
    wf = chained(calls)
    program, count = Program(wf.compiled), 100_000
    records = [run_record(RUN_CREATED, 1, codes=program.codes)]
    for node in ("one", "two"):
        records += [node_record(COMPLETED, f"{node}[{k}]", 1, 1) for k in range(count)]
        records.append(node_record(COMPLETED, node, 1, 1, count=count))
    snapshot = Snapshot(record._replace(seq=n) for n, record in enumerate(records, 1))
    began = time.perf_counter()
    assert to_reset(program, snapshot, Asked(retry=f"one[{count - 1}]")) == [
        f"one[{count - 1}]", "one", f"two[{count - 1}]", "two",
    ]  # fmt: skip
    assert len(to_reset(program, snapshot, Asked(retry="one"))) == 2 * count + 2
    assert time.perf_counter() - began < 5


async def test_a_retry_does_not_repeat_what_a_person_said_was_done(home: Home, calls: Calls) -> None:
    """Of three paths nobody knows about, one took effect, one did not, and one is still uncertain."""
    wf = Workflow("w")
    begun = asyncio.Semaphore(0)

    for name in ("sent", "lost", "unknown"):

        async def body(name: str = name) -> str:
            calls.began(name)
            if calls[name] == 1:
                begun.release()
                await asyncio.Event().wait()
            return name

        wf.node(id=name, args={"name": Value(name)})(body)

    async with home.engine(wf, grace_seconds=0.0) as engine:
        handle = await engine.start(wf)
        for _ in range(3):
            await begun.acquire()
    async with home.engine(wf) as engine:
        await engine.resolve(handle.run_id, "sent", output="by post")
        await engine.resolve(handle.run_id, "lost", failed="it came back")
        plan = {d.path: d.action for d in await engine.plan(handle.run_id, asked=Asked(retry=""))}
    assert plan == {"sent": "reuse", "lost": "run", "unknown": "run"}
    result = await home.retry(wf, handle.run_id)
    assert sorted(result.executed) == ["lost", "unknown"]
    assert result["sent"] == "by post"
    assert calls == {"sent": 1, "lost": 2, "unknown": 2}
