"""Loops: rounds, when they end, what a resume goes on from; in maps, around maps, in each other (cases H)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dagresume import Budget, Context, DefinitionError, Retry, RunStatus, UncertainNode, Value, Workflow
from dagresume.testing import Zygote, autopsy
from tests.engine.kit import Boom, Calls, Home
from tests.engine.plays import until, world


def counting(calls: Calls, rounds: int, most: int = 99, retry: Retry | None = None) -> Workflow:
    """A loop that counts to `rounds`."""
    wf = Workflow("counting", idempotent=True)

    def enough(state: int) -> bool:
        calls.began(f"until {state}")
        return state >= rounds

    @wf.loop(id="count", initial=Value(0), until=enough, max_iterations=most, retry=retry)
    async def count(state: int) -> int:
        calls.began(f"round {state}")
        return state + 1

    return wf


async def test_rounds_run_until_it_is_enough(home: Home, calls: Calls) -> None:
    wf = counting(calls, 3)
    result = await home.run(wf)
    assert result["count"] == 3
    assert calls.order == ["round 0", "until 1", "round 1", "until 2", "round 2", "until 3"]
    assert list(result.executed) == ["count[0]", "count[1]", "count[2]"]
    assert result.outputs["count[1]"] == 2
    async with home.engine(wf) as engine:
        stored = await engine.result(result.run_id)
    assert stored["count"] == 3
    assert stored.outputs["count[1]"] == 2
    assert sorted(stored.reused) == ["count[0]", "count[1]", "count[2]"]


async def test_the_first_round_may_be_enough(home: Home, calls: Calls) -> None:
    result = await home.run(counting(calls, 1))
    assert result["count"] == 1
    assert dict(calls) == {"round 0": 1, "until 1": 1}


async def test_a_failing_round_is_gone_on_with(home: Home, calls: Calls) -> None:
    wf = counting(calls, 6)
    calls.broken = {"round 4"}
    failed = await home.run(wf)
    assert list(failed.failures) == ["count[4]"]
    info = await home.info(failed.run_id)
    assert (info.nodes["count"].status, info.nodes["count"].reason) == ("failed", "round_failed")
    calls.mend()
    result = await home.go_on(wf, failed.run_id)
    assert result["count"] == 6
    assert calls.order == ["round 4", "until 5", "round 5", "until 6"]


async def test_at_most_so_many_rounds(home: Home, calls: Calls) -> None:
    """The loop fails with its state kept; a resume runs no round again, with a higher bound it goes on."""
    wf = counting(calls, 6, most=4)
    failed = await home.run(wf)
    assert list(failed.failures) == ["count"]
    assert failed.failures["count"].reason == "max_iterations"
    assert failed.outputs["count[3]"] == 4
    calls.mend()
    again = await home.go_on(wf, failed.run_id)
    assert again.status is RunStatus.FAILED
    assert not calls
    more = counting(calls, 6, most=20)
    result = await home.resume(more, failed.run_id, force=True)
    assert result["count"] == 6
    assert [name for name in calls.order if name.startswith("round")] == ["round 4", "round 5"]


async def test_what_until_said_is_stored_with_the_round(home: Home, calls: Calls) -> None:
    """A resume does not ask again about rounds it has an answer for; it asks where there is none."""
    wf = counting(calls, 5)
    calls.broken = {"until 3"}
    failed = await home.run(wf)
    assert list(failed.failures) == ["count"]
    assert failed.failures["count"].reason == "until_failed"
    calls.mend()
    result = await home.go_on(wf, failed.run_id)
    assert result["count"] == 5
    assert calls.order == ["until 3", "round 3", "until 4", "round 4", "until 5"]


async def test_an_until_that_gives_something_odd(home: Home) -> None:
    wf = Workflow("odd")

    class Odd:
        def __bool__(self) -> bool:
            raise Boom("neither yes nor no")

    @wf.loop(initial=Value(0), until=lambda state: Odd(), max_iterations=3)
    async def count(state: int) -> int:
        return state

    failed = await home.run(wf)
    assert failed.failures["count"].reason == "until_failed"


async def test_until_gets_an_object_of_its_own(home: Home) -> None:
    """C7: what `until` does to the state, no round sees."""
    wf = Workflow("own")

    def spoil(state: list[int]) -> bool:
        state.append(99)
        return len(state) > 3

    @wf.loop(initial=Value([]), until=spoil, max_iterations=9)
    async def grow(state: list[int]) -> list[int]:
        return [*state, len(state)]

    assert (await home.run(wf))["grow"] == [0, 1, 2]


@pytest.mark.parametrize("value", [None, 0, "", [], {}, False])
async def test_falsy_states_are_states(home: Home, value: Any) -> None:
    """B52: a round that gives None has given something."""
    wf = Workflow("falsy")
    seen: list[Any] = []

    @wf.loop(initial="start", until=lambda state: len(seen) == 2, max_iterations=5)
    async def same(state: Any) -> Any:
        seen.append(state)
        return value

    result = await home.run(wf, {"start": 1})
    assert seen == [1, value]
    assert result["same"] == value
    assert type(result["same"]) is type(value)


async def test_other_parameters_are_fed_as_those_of_a_node(home: Home) -> None:
    wf, limit = Workflow("fed"), 10

    @wf.node
    async def step() -> int:
        return 2

    @wf.loop(initial="start", until=lambda total: total >= limit, max_iterations=99, args={"add": step})
    async def add_up(total: int, add: int, factor: int = 1, *, ctx: Context) -> int:
        assert ctx.path == f"add_up[{ctx.index}]"
        return total + add * factor

    assert (await home.run(wf, {"start": 1}))["add_up"] == 11
    assert (await home.run(wf, {"start": 1, "factor": 9}))["add_up"] == 19


async def test_a_loop_over_what_a_node_gives(home: Home, calls: Calls) -> None:
    """A node above that runs again and gives another start: rounds of the old course are no more."""
    wf = Workflow("course", idempotent=True)

    @wf.node
    async def start() -> int:
        calls.began("start")
        return 0 if calls["start"] == 1 else 3

    @wf.loop(initial=start, until=lambda state: state >= 5, max_iterations=9)
    async def count(state: int) -> int:
        calls.began(f"round {state}")
        return state + 1

    first = await home.run(wf)
    assert first["count"] == 5
    calls.order.clear()
    result = await home.retry(wf, first.run_id, "start")
    assert result["count"] == 5
    assert calls.order == ["start", "round 3", "round 4"]
    states = await home.statuses(first.run_id)
    assert [states[f"count[{n}]"] for n in range(5)] == ["completed"] * 2 + ["pending"] * 3
    async with home.engine(wf) as engine:
        stored = await engine.result(first.run_id)
    assert stored["count"] == 5


async def test_rounds_are_retried(home: Home, calls: Calls) -> None:
    wf = counting(calls, 3, retry=Retry(2, delay=0, jitter=0))
    calls.broken = {"round 1"}
    failed = await home.run(wf)
    assert calls["round 1"] == 2
    assert failed.failures["count[1]"].attempt == 2


async def test_an_uncertain_round_stops_a_resume(home: Home, calls: Calls) -> None:
    """C6 in a loop: which round it is, is said; after a person's word it goes on from there."""
    wf = Workflow("careful")
    reached = asyncio.Event()

    @wf.loop(initial=Value(0), until=lambda state: state == 4, max_iterations=9)
    async def count(state: int) -> int:
        calls.began(f"round {state}")
        if state == 2 and calls["round 2"] == 1:
            reached.set()
            await asyncio.sleep(60)
        return state + 1

    async with home.engine(wf) as engine:
        handle = await engine.start(wf)
        await reached.wait()
    plan = await home.plan(wf, handle.run_id, items=True)
    assert (plan["count"].action, plan["count[2]"].action) == ("hold", "hold")
    with pytest.raises(UncertainNode) as caught:
        await home.resume(wf, handle.run_id)
    assert list(caught.value.paths) == ["count[2]"]
    async with home.engine(wf) as engine:
        await engine.resolve(handle.run_id, "count[2]", output=3)
    result = await home.go_on(wf, handle.run_id)
    assert result["count"] == 4
    assert calls.order == ["round 0", "round 1", "round 2", "round 3"]


def body_of_two(calls: Calls) -> Workflow:
    body = Workflow("body")

    @body.node
    async def draw(state: list[float]) -> float:
        calls.began(f"draw {len(state)}")
        return time.perf_counter()

    @body.node
    async def keep(state: list[float], draw: float) -> list[float]:
        calls.began(f"keep {len(state)}")
        return [*state, draw]

    return body


async def test_a_body_of_two_nodes_goes_on_between_them(home: Home, calls: Calls) -> None:
    """B61: what was drawn in the round that broke is what was stored; earlier rounds are left alone."""
    wf = Workflow("outer", idempotent=True)
    wf.loop("refine", body_of_two(calls), initial=Value([]), until=lambda s: len(s) == 4, max_iterations=9)
    calls.broken = {"keep 2"}
    failed = await home.run(wf)
    assert list(failed.failures) == ["refine[2]/keep"]
    drawn = failed.outputs["refine[2]/draw"]
    calls.mend()
    result = await home.go_on(wf, failed.run_id)
    assert calls.order == ["keep 2", "draw 3", "keep 3"]
    assert result["refine"][2] == drawn
    assert len(result["refine"]) == 4
    async with home.engine(wf) as engine:
        stored = await engine.result(failed.run_id)
    for each in (result, stored):
        assert each.outputs["refine[3]"] == result["refine"]
        assert each.outputs["refine[2]/draw"] == drawn


async def test_a_map_over_loops(home: Home, calls: Calls) -> None:
    """`for_each` on a loop: `refine[3]/refine[0]`."""
    wf = Workflow("outer", idempotent=True)

    @wf.loop(for_each={"start": "numbers"}, initial="start", until=lambda s: s >= 3, max_iterations=9)
    async def refine(state: int, ctx: Context) -> int:
        calls.began(ctx.path)
        return state + 1

    calls.broken = {"refine[1]/refine[1]"}
    failed = await home.run(wf, {"numbers": [0, 1, 2, 9]})
    assert list(failed.failures) == ["refine[1]/refine[1]"]
    calls.mend()
    result = await home.go_on(wf, failed.run_id)
    assert result["refine"] == [3, 3, 3, 10]
    assert dict(calls) == {"refine[1]/refine[1]": 1}
    assert result.outputs["refine[0]/refine[2]"] == 3


async def test_a_map_over_loops_of_a_parent_with_other_inputs(home: Home) -> None:
    wf = Workflow("outer")

    @wf.node
    async def starts() -> list[int]:
        return [0, 10]

    @wf.loop(
        for_each={"start": starts}, initial="start", until=lambda s: s % 7 == 0, max_iterations=99,
        concurrency=1, tolerate=1,
    )  # fmt: skip
    async def up(state: int, by: int) -> int:
        return state + by

    assert (await home.run(wf, {"by": 1}))["up"] == [7, 14]


async def test_a_loop_over_maps(home: Home, calls: Calls) -> None:
    """A map in a loop's body: a round whose item failed goes on with that item."""
    wf, body = Workflow("outer", idempotent=True), Workflow("body")

    @body.node(for_each={"n": "state"})
    async def double(n: int, ctx: Context) -> int:
        calls.began(ctx.path)
        return 2 * n

    wf.loop("grow", body, initial="start", until=lambda s: s[0] >= 8, max_iterations=9)
    calls.broken = {"grow[1]/double[2]"}
    failed = await home.run(wf, {"start": [1, 2, 3]})
    assert list(failed.failures) == ["grow[1]/double[2]"]
    calls.mend()
    result = await home.go_on(wf, failed.run_id)
    assert result["grow"] == [8, 16, 24]
    assert calls.order == ["grow[1]/double[2]", *(f"grow[2]/double[{k}]" for k in range(3))]


@pytest.mark.parametrize("asks", [True, False])
async def test_a_loop_that_begins_with_the_list_of_a_map(home: Home, calls: Calls, asks: bool) -> None:
    """The items lie in the store when another process begins the loop."""
    wf = Workflow("outer", idempotent=True)

    @wf.node(for_each={"n": "numbers"})
    async def double(n: int) -> int:
        return 2 * n

    calls.adder(wf)("bad")
    when = (lambda state: len(state) == 3) if asks else None

    @wf.loop(
        initial="double", until=lambda s: s[0] > 9, max_iterations=9, when=when, depends_on="bad"
    )  # fmt: skip
    async def grow(state: list[int]) -> list[int]:
        return [3 * n for n in state]

    calls.broken = {"bad"}
    failed = await home.run(wf, {"numbers": [1, 2, 3]})
    calls.mend()
    result = await home.go_on(wf, failed.run_id)
    assert result["grow"] == [18, 36, 54]


def loop_in_loop(calls: Calls) -> Workflow:
    """Three rounds of two."""
    wf, body = Workflow("outer", idempotent=True), Workflow("body")

    @body.loop(id="inner", initial="state", until=lambda s: s["inner"] == 2, max_iterations=5)
    async def inner(state: dict[str, int]) -> dict[str, int]:
        calls.began(f"({state['outer']},{state['inner'] % 2})")
        return {"outer": state["outer"], "inner": state["inner"] % 2 + 1}

    @body.node(args={"found": "inner"})
    async def up(found: dict[str, int]) -> dict[str, int]:
        return {"outer": found["outer"] + 1, "inner": 0}

    start = Value({"outer": 0, "inner": 0})
    wf.loop("outer", body, initial=start, until=lambda s: s["outer"] == 3, max_iterations=5)
    return wf


async def test_a_loop_in_a_loop(home: Home, calls: Calls) -> None:
    """B65: the key holds the whole path of rounds."""
    wf = loop_in_loop(calls)
    calls.broken = {"(1,1)"}
    failed = await home.run(wf)
    assert calls.order == ["(0,0)", "(0,1)", "(1,0)", "(1,1)"]
    assert list(failed.failures) == ["outer[1]/inner[1]"]
    calls.mend()
    result = await home.go_on(wf, failed.run_id)
    assert calls.order == ["(1,1)", "(2,0)", "(2,1)"]
    assert result["outer"] == {"outer": 3, "inner": 0}


async def test_a_growing_state(sqlite_home: Home, calls: Calls) -> None:
    """From small ones in the database to big ones in files, over a failure in a new process."""
    wf = Workflow("growing", idempotent=True)

    @wf.loop(initial=Value(""), until=lambda s: len(s) >= 40_000, max_iterations=99)
    async def grow(state: str) -> str:
        calls.began(f"round {len(state)}")
        return state + "x" * 2000

    calls.broken = {"round 26000"}
    async with sqlite_home.engine(spill_bytes=10_000) as engine:
        failed = await engine.run(wf, raise_on_failure=False)
    calls.mend()
    plan = await sqlite_home.plan(wf, failed.run_id, items=True)
    assert plan["grow[12]"].action == "reuse"
    assert plan["grow[13]"].action == "run"
    async with sqlite_home.engine(wf, spill_bytes=10_000) as engine:
        result = await engine.resume(failed.run_id)
    assert result["grow"] == "x" * 40_000
    assert calls.order == [f"round {n}" for n in range(26_000, 40_000, 2000)]
    assert len(result.outputs["grow[12]"]) == 26_000


async def test_until_that_failed_counts_no_usage_twice(home: Home, calls: Calls) -> None:
    """A round whose record is written again with the answer has been paid once."""
    wf = Workflow("paid", idempotent=True)

    def enough(state: int) -> bool:
        calls.began(f"until {state}")
        return state == 3

    @wf.loop(initial=Value(0), until=enough, max_iterations=9)
    async def count(state: int, ctx: Context) -> int:
        ctx.usage(tokens_in=100)
        return state + 1

    calls.broken = {"until 1"}
    failed = await home.run(wf)
    for broken in ("until 2", "until 3", ""):
        calls.broken = {broken}
        await home.resume(wf, failed.run_id)
    (last,) = [e for e in await home.events(failed.run_id) if e.kind == "run.completed"]
    assert last.data["usage"]["tokens_in"] == 300


async def test_a_loop_beside_a_failure_and_below_one(home: Home, calls: Calls) -> None:
    wf = Workflow("beside")
    add = calls.adder(wf)
    add("bad")

    @wf.loop(initial=Value(0), until=lambda s: s == 3, max_iterations=9, depends_on="bad")
    async def below(state: int) -> int:
        calls.began("below")
        return state + 1

    @wf.loop(initial=Value(0), until=lambda s: s == 3, max_iterations=9)
    async def beside(state: int) -> int:
        calls.began("beside")
        return state + 1

    calls.broken = {"bad"}
    failed = await home.run(wf)
    assert dict(calls) == {"bad": 1, "beside": 3}
    calls.mend()
    result = await home.go_on(wf, failed.run_id)
    assert result["below"] == 3
    assert dict(calls) == {"bad": 1, "below": 3}


async def test_cancelled_between_rounds(home: Home, calls: Calls) -> None:
    wf = Workflow("endless", idempotent=True)
    third = asyncio.Event()

    @wf.loop(initial=Value(0), until=lambda s: False, max_iterations=1 << 40)
    async def spin(state: int) -> int:
        if state == 3:
            third.set()
        await asyncio.sleep(0)
        return state + 1

    async with home.engine(wf) as engine:
        handle = await engine.start(wf)
        await third.wait()
        await handle.cancel()
        assert (await handle.result(raise_on_failure=False)).status is RunStatus.CANCELLED


async def test_a_budget_ends_a_loop_and_more_of_it_lets_it_go_on(home: Home, calls: Calls) -> None:
    wf = Workflow("dear", idempotent=True, budget=Budget(tokens=30))

    @wf.loop(initial=Value(0), until=lambda s: s == 5, max_iterations=9)
    async def count(state: int, ctx: Context) -> int:
        calls.began(f"round {state}")
        ctx.usage(tokens_in=10)
        return state + 1

    stopped = await home.run(wf)
    assert (stopped.status, stopped.reason) == ("interrupted", "budget")
    assert len(calls) == 3
    result = await home.resume(wf, stopped.run_id, budget=Budget(tokens=1000))
    assert result["count"] == 5
    assert calls.total() == 5


@pytest.mark.parametrize("bad", [0, -1, True, 2.5, None])
def test_max_iterations_is_a_whole_number(bad: Any) -> None:
    with pytest.raises(DefinitionError, match="max_iterations"):
        Workflow("w").loop("l", lambda s: s, initial=Value(0), until=bool, max_iterations=bad)


def test_a_loop_over_a_workflow_needs_an_id_and_an_input_called_state() -> None:
    body = Workflow("body")

    @body.node
    async def a(other: int) -> int:
        return other

    wf = Workflow("w")
    with pytest.raises(DefinitionError, match="needs an id"):
        wf.loop(None, body, initial=Value(0), until=bool, max_iterations=1)
    wf.loop("l", body, initial=Value(0), until=bool, max_iterations=1)
    with pytest.raises(DefinitionError, match="state"):
        wf.graph  # noqa: B018  # it is compiled


@pytest.fixture(scope="module")
def nursery() -> Iterator[Zygote]:
    """A process that has imported the plays."""
    with Zygote("tests.engine.plays") as zygote:
        yield zygote


def killed_when(nursery: Zygote, folder: Path, flow: str, reached: Callable[[], object]) -> None:
    """Run a workflow in a child, and kill that as soon as it has got so far."""
    child = nursery.call("tests.engine.plays:go", folder, flow=flow)
    until(reached)
    child.kill()
    assert child.wait().killed


def resumed(nursery: Zygote, folder: Path, flow: str) -> dict[str, Any]:
    told: dict[str, Any] = nursery.call("tests.engine.plays:go", folder, flow=flow, how="resume").wait().told
    return told


def test_five_thousand_rounds_killed_at_four_thousand(nursery: Zygote, tmp_path: Path) -> None:
    """B4, B68: only the round in flight may begin twice."""
    killed_when(nursery, tmp_path, "long", lambda: len(world(tmp_path)) >= 4000)
    done = autopsy(tmp_path / "runs.db").completed
    before = world(tmp_path)
    assert 4000 <= len(before) < 5000
    told = resumed(nursery, tmp_path, "long")
    assert told["outputs"] == {"count": 5000}
    assert told["executed"] + told["reused"] == 5000
    lines = world(tmp_path)
    print(f"\nkilled at {len(before)} of 5000 rounds, {len(lines)} bodies began in all")
    assert len(lines) <= 5001
    assert set(lines) == {f"count[{n}]" for n in range(5000)}
    assert not done & set(lines[len(before) :])


def test_killed_between_the_two_nodes_of_a_round(nursery: Zygote, tmp_path: Path) -> None:
    """B61: the first of them is not repeated, and what it drew is what was stored."""
    killed_when(nursery, tmp_path, "two", lambda: "keep 2" in world(tmp_path))
    drawn = [float(line.split()[2]) for line in world(tmp_path) if line.startswith("draw")]
    told = resumed(nursery, tmp_path, "two")
    lines = [" ".join(line.split()[:2]) for line in world(tmp_path)]
    assert lines[-4:] == ["keep 2", "keep 2", "draw 3", "keep 3"]
    assert lines.count("draw 2") == 1
    assert told["outputs"]["refine"][:3] == drawn


def test_a_loop_in_a_loop_killed_in_the_middle(nursery: Zygote, tmp_path: Path) -> None:
    """B65: 3 × 2, killed in (1,1); after the resume only (1,1) (2,0) (2,1)."""
    killed_when(nursery, tmp_path, "nested", lambda: "(1,1)" in world(tmp_path))
    assert world(tmp_path) == ["(0,0)", "(0,1)", "(1,0)", "(1,1)"]
    assert resumed(nursery, tmp_path, "nested")["outputs"] == {"outer": [3, 0]}
    assert world(tmp_path)[4:] == ["(1,1)", "(2,0)", "(2,1)"]


async def test_two_and_a_half_and_five_thousand_rounds(sqlite_home: Home, tmp_path: Path) -> None:
    """B4: time and size grow with the number of rounds, not with its square."""
    figures: dict[int, tuple[float, int]] = {}
    for turn, rounds in ((1, 2500), (1, 5000), (2, 2500), (2, 5000), (3, 2500), (3, 5000)):
        home = Home(tmp_path / f"{turn}-{rounds}.db")
        wf = Workflow("count", idempotent=True)

        @wf.loop(initial=Value(0), until=rounds.__eq__, max_iterations=rounds)
        async def count(state: int) -> int:
            return state + 1

        began = time.perf_counter()
        assert (await home.run(wf))["count"] == rounds
        took = time.perf_counter() - began
        assert home.path is not None
        best = min(took, figures.get(rounds, (took, 0))[0])  # what else this machine does is no growth
        figures[rounds] = (best, home.path.stat().st_size)
    ratios = [after / before for before, after in zip(figures[2500], figures[5000], strict=True)]
    print(f"\nloop: {figures}, 5000 against 2500: time x{ratios[0]:.2f}, size x{ratios[1]:.2f}")
    assert max(ratios) <= 2.3
