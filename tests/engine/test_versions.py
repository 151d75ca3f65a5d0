"""Several versions of a workflow: which code a stored run means, and how a newer one takes it over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from dagresume import DefinitionError, RunStatus, UncertainNode, VersionMismatch, Workflow
from tests.engine.kit import Calls, Home


def old(calls: Calls) -> Workflow:
    wf = Workflow("flow", version="1")

    @wf.node
    async def fetch(url: str) -> str:
        calls.began("fetch")
        return url

    @wf.node
    async def parse(fetch: str) -> list[int]:
        calls.began("parse")
        return [1, 2, 3]

    @wf.node(for_each={"n": "parse"})
    async def square(n: int) -> int:
        calls.began(f"square {n}")
        return n * n

    @wf.node
    async def report(square: list[int]) -> int:
        calls.began("report")
        return sum(square)

    return wf


def new(calls: Calls, **migration: Any) -> Workflow:
    """`fetch` is called `download` now, and so is the parameter of `parse`; `square` is `power`; `extra` is
    new.
    """
    wf = Workflow("flow", version="2")

    @wf.node
    async def download(url: str) -> str:
        calls.began("download")
        return url

    @wf.node
    async def parse(download: str) -> list[int]:
        calls.began("parse")
        return [1, 2, 3]

    @wf.node(for_each={"value": "parse"})
    async def power(value: int) -> int:
        calls.began(f"power {value}")
        return value * value

    @wf.node
    async def extra(parse: list[int]) -> int:
        calls.began("extra")
        return len(parse)

    @wf.node
    async def report(power: list[int], extra: int) -> int:
        calls.began("report")
        return sum(power) + extra

    if migration.pop("declared", True):
        wf.migrate("1", **{"rename": {"fetch": "download", "square": "power"}, **migration})
    return wf


async def stopped(home: Home, calls: Calls, *broken: str, **options: Any) -> str:
    calls.broken = set(broken)
    result = await home.run(old(calls), {"url": "u"}, **options)
    assert result.status is RunStatus.FAILED
    calls.mend()
    return result.run_id


async def test_what_completed_stays_completed_under_its_new_name(home: Home, calls: Calls) -> None:
    """B8: a renamed node with a migration; of the map the missing item runs, the new node, what is below."""
    run_id = await stopped(home, calls, "square 2")
    wf = new(calls)
    plan = await home.plan(wf, run_id, items=True)
    assert plan["download"].action == plan["parse"].action == plan["power[0]"].action == "reuse"
    assert plan["power[1]"].action == plan["extra"].action == plan["report"].action == "run"
    result = await home.resume(wf, run_id)
    assert result.status is RunStatus.COMPLETED
    assert dict(calls) == {"power 2": 1, "extra": 1, "report": 1}
    assert (result["download"], result["power"], result["report"]) == ("u", [1, 4, 9], 17)
    events = await home.events(run_id)
    migrated = {(event.kind, event.path) for event in events if event.reason == "migrated"}
    assert ("node.withdrawn", "fetch") in migrated
    assert ("node.completed", "download") in migrated
    assert ("node.completed", "power[2]") in migrated
    info = await home.info(run_id)
    assert info.version == "2"
    assert {path for path, node in info.nodes.items() if node.status != "completed"} == set()
    stored = await home.retry(wf, run_id)
    assert (stored["power"], list(stored.executed)) == ([1, 4, 9], [])


async def test_after_a_migration_changes_are_seen_as_ever(home: Home, calls: Calls) -> None:
    run_id = await stopped(home, calls, "square 2")
    wf = new(calls)
    await home.resume(wf, run_id)
    calls.mend()
    result = await home.retry(wf, run_id, "download", only_changed=True)
    assert list(result.executed) == ["download"]
    result = await home.retry(wf, run_id, "power[0]")
    assert list(result.executed) == ["power[0]", "report"]
    assert result["report"] == 17


async def test_a_run_is_taken_over_by_its_key(home: Home, calls: Calls) -> None:
    run_id = await stopped(home, calls, "report", key="k")
    async with home.engine() as engine:
        result = await engine.run(new(calls), {"url": "u"}, key="k")
    assert result.run_id == run_id
    assert sorted(result.executed) == ["extra", "report"]


async def test_without_a_migration_the_differences_are_named(home: Home, calls: Calls) -> None:
    run_id = await stopped(home, calls, "report", key="k")
    wf = new(calls, declared=False)
    before = await home.events(run_id)
    with pytest.raises(VersionMismatch, match=r"node fetch removed.*migrate"):
        await home.resume(wf, run_id)
    with pytest.raises(VersionMismatch):
        await home.run(wf, {"url": "u"}, key="k")
    assert await home.events(run_id) == before
    assert not calls


async def test_each_stored_run_gets_its_own_version(home: Home, calls: Calls) -> None:
    first = await stopped(home, calls, "report")
    async with home.engine(old(calls), new(calls)) as engine:
        assert list((await engine.resume(first)).executed) == ["report"]
        second = await engine.run(new(calls), {"url": "u"})
        assert (await engine.get(first)).version == "1"
        assert (await engine.get(second.run_id)).version == "2"


async def test_outputs_are_transformed_and_what_takes_them_stays(home: Home, calls: Calls) -> None:
    run_id = await stopped(home, calls, "report")
    transform = {"download": str.upper, "power": lambda n: n * 100}
    wf = new(calls, transform=transform)
    result = await home.resume(wf, run_id)
    assert sorted(result.executed) == ["extra", "report"]
    assert (result["download"], result["power"], result["report"]) == ("U", [100, 400, 900], 1403)
    async with home.engine(wf) as engine:
        stored = await engine.result(run_id)
    assert (stored["download"], stored["power"]) == ("U", [100, 400, 900])


async def test_a_transform_that_raises_names_its_node_and_changes_nothing(home: Home, calls: Calls) -> None:
    run_id = await stopped(home, calls, "report")
    before = await home.events(run_id)

    def broken(value: object) -> object:
        raise KeyError("old")

    with pytest.raises(DefinitionError, match=r"node 'download'.*KeyError.*Nothing was changed"):
        await home.resume(new(calls, transform={"download": broken}), run_id)
    assert await home.events(run_id) == before
    assert (await home.info(run_id)).version == "1"


@pytest.mark.parametrize(
    ("migration", "says"),
    [
        ({"rename": {"fetsh": "download"}}, r"version '1' has no node 'fetsh'.*'fetch'"),
        ({"rename": {"fetch": "downlod"}}, r"version '2' has no node 'downlod'.*'download'"),
        ({"drop": ["fetch"]}, r"'fetch' is renamed and dropped"),
        ({"drop": ["nothing"]}, r"no node 'nothing'"),
        ({"rename": {"fetch": "download", "square": "download"}}, r"two nodes would be called 'download'"),
        ({"rename": {"square": "power"}}, r"'fetch' is not in it"),
        ({"transform": {"downlod": str}}, r"no node 'downlod'"),
        ({"rename": {"fetch": "power"}, "drop": ["square"]}, r"'fetch' was a node and 'power' is a map"),
    ],
)
async def test_migrations_that_do_not_fit_are_refused(
    home: Home, calls: Calls, migration: dict[str, Any], says: str
) -> None:
    run_id = await stopped(home, calls, "report")
    before = await home.events(run_id)
    with pytest.raises(DefinitionError, match=says):
        await home.resume(new(calls, **migration), run_id)
    assert await home.events(run_id) == before


async def test_a_dropped_node_is_withdrawn(home: Home, calls: Calls) -> None:
    run_id = await stopped(home, calls, "report")
    wf = new(calls, rename={"fetch": "download"}, drop="square")
    result = await home.resume(wf, run_id)
    assert sorted(result.executed) == ["extra", "power[0]", "power[1]", "power[2]", "report"]
    assert "square" not in result.outputs


async def test_a_new_node_between_two_runs_and_the_old_ones_do_not(home: Home, calls: Calls) -> None:
    """B88: a→b becomes a→n→b."""
    before = Workflow("w", version="1")
    add = calls.adder(before)
    add("a")
    add("b", "a")
    add("c", "b")
    after = Workflow("w", version="2")
    add = calls.adder(after)
    add("a")
    add("n", "a")
    add("b", "n")
    add("c", "b")
    after.migrate("1")
    calls.broken = {"c"}
    run_id = (await home.run(before)).run_id
    calls.mend()
    assert list((await home.resume(after, run_id)).executed) == ["n", "c"]


async def test_uncertain_paths_stay_so_under_their_new_name(home: Home) -> None:
    began = asyncio.Event()

    def flow(version: str, name: str) -> Workflow:
        wf = Workflow("w", version=version)

        async def body() -> None:
            began.set()
            await asyncio.Event().wait()

        wf.node(id=name)(body)
        return wf

    async with home.engine(grace_seconds=0.0) as engine:
        handle = await engine.start(flow("1", "charge"))
        await began.wait()
    wf = flow("2", "pay")
    wf.migrate("1", rename={"charge": "pay"})
    with pytest.raises(UncertainNode, match="pay"):
        await home.resume(wf, handle.run_id)


async def test_what_is_inside_a_node_moves_with_it(home: Home, calls: Calls) -> None:
    def flow(version: str, name: str) -> Workflow:
        inner = Workflow("inner")

        @inner.node
        async def step(x: int) -> int:
            calls.began(f"step {x}")
            return x

        async def grow(state: int) -> int:
            calls.began("grow")
            return state + 1

        wf = Workflow("w", version=version)
        wf.subworkflow(name, inner, for_each={"x": "xs"})
        wf.loop(f"{name}_loop", grow, initial="start", until=lambda state: state >= 2, max_iterations=5)
        wf.approval(f"{name}_ok", depends_on=[name], prompt="?")
        calls.adder(wf)("end", name, f"{name}_loop", f"{name}_ok")
        return wf

    calls.broken = {"step 2"}
    run_id = (await home.run(flow("1", "old"), {"xs": [1, 2], "start": 0})).run_id
    calls.mend()
    wf = flow("2", "new")
    wf.migrate("1", rename={"old": "new", "old_loop": "new_loop", "old_ok": "new_ok"})
    result = await home.resume(wf, run_id)
    assert (result.status, list(result.executed)) == (RunStatus.WAITING, ["new[1]/step"])
    async with home.engine(wf) as engine:
        await engine.decide(run_id, "new_ok")
    ended = await home.resume(wf, run_id)
    assert list(ended.executed) == ["end"]
    assert (ended["new"], ended["new_loop"]) == ([1, 2], 2)


async def test_a_migration_does_not_lose_what_is_inside_a_step(home: Home, calls: Calls) -> None:
    """C3: an inner node that is called otherwise would be paid a second time."""

    def flow(version: str, name: str, drop: tuple[str, ...] = ()) -> Workflow:
        inner = Workflow("inner")

        async def body(x: int) -> int:
            calls.began("pay")
            return x

        inner.node(id=name)(body)
        inner.approval("ok", depends_on=name, prompt="?")
        wf = Workflow("w", version=version)
        wf.subworkflow("sub", inner, args={"x": "x"})
        if version != "1":
            wf.migrate("1", drop=drop)
        return wf

    run_id = (await home.run(flow("1", "pay"), {"x": 1})).run_id
    with pytest.raises(
        DefinitionError, match=r"path 'sub/pay' is not in it, and has completed: keep its name"
    ):
        await home.resume(flow("2", "charge"), run_id)
    assert calls["pay"] == 1
    result = await home.resume(flow("2", "charge", ("sub",)), run_id)
    assert (calls["pay"], result.status) == (2, RunStatus.WAITING)


@pytest.mark.parametrize("inside", [False, True])
async def test_a_migration_does_not_lose_that_a_node_is_uncertain(
    home: Home, calls: Calls, inside: bool
) -> None:
    """C6: a node that may have taken effect is not begun again under another name."""
    began = asyncio.Event()

    def flow(version: str, name: str) -> Workflow:
        async def body() -> int:
            calls.began("pay")
            began.set()
            await asyncio.sleep(30)
            return 1

        wf = inner = Workflow("w", version=version)
        if inside:
            inner = Workflow("inner")
        inner.node(id=name)(body)
        if inside:
            wf.subworkflow("sub", inner)
        if version != "1":
            wf.migrate("1")
        return wf

    async with home.engine(grace_seconds=0.0) as engine:
        handle = await engine.start(flow("1", "pay"))
        await began.wait()
    with pytest.raises(DefinitionError, match="pay' is not in it, and may have taken effect"):
        await home.resume(flow("2", "charge"), handle.run_id)
    assert calls["pay"] == 1


# -- other code, the same definition (B8) ---------------------------------------------------------------


def edited(body: Callable[..., Any]) -> Workflow:
    wf = Workflow("coded")
    wf.node(id="a")(body)

    async def b(a: int) -> int:
        if FAILS:
            raise ValueError
        return a

    wf.node(id="b")(b)
    return wf


FAILS: list[bool] = []


def capturing(value: int) -> Callable[[], Any]:
    async def body() -> int:
        return value

    return body


async def one() -> int:
    return 1


async def two() -> int:
    return 2


@pytest.mark.parametrize(
    ("before", "after"),
    [(one, two), (capturing(1), capturing(2))],
    ids=["an edited body", "a captured value"],
)
async def test_other_code_is_no_reason_to_run_what_completed_until_a_person_says_so(
    home: Home, before: Callable[..., Any], after: Callable[..., Any]
) -> None:
    FAILS.append(True)
    run_id = (await home.run(edited(before))).run_id
    FAILS.clear()
    assert not any(decision.code_changed for decision in (await home.plan(edited(before), run_id)).values())
    plan = await home.plan(edited(after), run_id)
    assert [(d.action, d.code_changed) for d in plan.values()] == [("reuse", True), ("run", False)]
    result = await home.resume(edited(after), run_id)
    assert (list(result.executed), result["b"]) == (["b"], 1)
    again = await home.retry(edited(after), run_id, code_changed=True)
    assert (list(again.executed), again["b"]) == (["a", "b"], 2)
    async with home.engine() as engine:
        told = await engine.explain(run_id, "a")
    assert [step.code_changed for step in told.steps] == [False, True, False]
