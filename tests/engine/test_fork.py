"""A new run that begins with what another one has completed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dagresume import (
    AlreadyRunning,
    Context,
    DefinitionError,
    Engine,
    InputError,
    RunResult,
    RunStatus,
    StoreError,
    UncertainNode,
    Workflow,
)
from dagresume.blobs import BlobStore
from dagresume.store import Store
from tests.engine.kit import Calls, FaultyStore, Home


def pipeline(calls: Calls) -> Workflow:
    """Two inputs, used by two branches that meet; a map over a list that is an input."""
    wf = Workflow("pipeline")

    @wf.node
    async def left(a: int) -> int:
        calls.began("left")
        return a * 10

    @wf.node
    async def right(b: int) -> int:
        calls.began("right")
        return b * 10

    @wf.node
    async def both(left: int, right: int) -> int:
        calls.began("both")
        return left + right

    @wf.node(for_each={"n": "numbers"})
    async def double(n: int) -> int:
        calls.began(f"double {n}")
        return n * 2

    @wf.node
    async def total(double: list[int]) -> int:
        calls.began("total")
        return sum(double)

    return wf


INPUTS = {"a": 1, "b": 2, "numbers": [1, 2, 3]}


async def forked(home: Home, wf: Workflow, run_id: str, *from_node: Any, **options: Any) -> RunResult:
    async with home.engine(wf) as engine:
        return await engine.fork(run_id, *from_node, raise_on_failure=False, **options)


async def test_a_fork_runs_the_node_and_below_and_copies_the_rest(home: Home, calls: Calls) -> None:
    wf = pipeline(calls)
    first = await home.run(wf, INPUTS)
    before = await home.events(first.run_id)
    calls.mend()
    result = await forked(home, wf, first.run_id, "left")
    assert result.run_id != first.run_id
    assert list(result.executed) == ["left", "both"]
    assert set(result.reused) == {"right", "double[0]", "double[1]", "double[2]", "total"}
    assert (result["both"], result["double"], result["total"]) == (30, [2, 4, 6], 12)
    assert await home.events(first.run_id) == before
    copied = [event for event in await home.events(result.run_id) if event.reason == "copied"]
    assert {event.path for event in copied} == {
        "right",
        "double[0]",
        "double[1]",
        "double[2]",
        "double",
        "total",
    }
    created = (await home.events(result.run_id))[0]
    assert created.data["forked_from"] == first.run_id
    assert created.data["forked_at_seq"] == before[-1].seq
    info = await home.info(result.run_id)
    assert (info.forked_from, info.source) == (first.run_id, "fork")
    assert {node.status.value for node in info.nodes.values()} == {"completed"}


async def test_a_changed_input_runs_what_uses_it_and_what_is_below(home: Home, calls: Calls) -> None:
    """B91: nothing is held, although nothing is idempotent."""
    wf = pipeline(calls)
    run_id = (await home.run(wf, INPUTS)).run_id
    calls.mend()
    result = await forked(home, wf, run_id, inputs={"b": 5})
    assert list(result.executed) == ["right", "both"]
    assert result["both"] == 60
    assert result.status is RunStatus.COMPLETED


async def test_of_a_list_that_changed_only_other_items_run(home: Home, calls: Calls) -> None:
    wf = pipeline(calls)
    run_id = (await home.run(wf, INPUTS)).run_id
    calls.mend()
    result = await forked(home, wf, run_id, inputs={"numbers": [7, 1, 3]})
    assert dict(calls) == {"double 7": 1, "total": 1}
    assert result["double"] == [14, 2, 6]
    shorter = await forked(home, wf, run_id, inputs={"numbers": [3]})
    assert list(shorter.executed) == ["total"]
    assert shorter["double"] == [6]


async def test_the_same_inputs_copy_everything(home: Home, calls: Calls) -> None:
    wf = pipeline(calls)
    run_id = (await home.run(wf, INPUTS)).run_id
    result = await forked(home, wf, run_id, inputs={"a": 1})
    assert list(result.executed) == []
    assert result["total"] == 12


async def test_a_fork_of_a_failed_run_runs_what_never_completed(home: Home, calls: Calls) -> None:
    wf = pipeline(calls)
    calls.broken = {"double 2", "right"}
    first = await home.run(wf, INPUTS)
    calls.mend()
    result = await forked(home, wf, first.run_id)
    assert result.status is RunStatus.COMPLETED
    assert set(result.executed) == {"right", "both", "double[1]", "total"}
    assert (await home.info(first.run_id)).status is RunStatus.FAILED


async def test_a_fork_of_a_fork_and_a_retry_of_it(home: Home, calls: Calls) -> None:
    wf = pipeline(calls)
    first = (await home.run(wf, INPUTS)).run_id
    second = (await forked(home, wf, first, "left")).run_id
    third = await forked(home, wf, second, "right")
    assert list(third.executed) == ["right", "both"]
    assert third["total"] == 12
    again = await home.retry(wf, third.run_id, "double[1]")
    assert list(again.executed) == ["double[1]", "total"]


async def test_unknown_inputs_and_nodes_are_told(home: Home, calls: Calls) -> None:
    wf = pipeline(calls)
    run_id = (await home.run(wf, INPUTS)).run_id
    with pytest.raises(InputError, match="Did you mean 'numbers'"):
        await forked(home, wf, run_id, inputs={"number": [1]})
    with pytest.raises(InputError, match="is a node"):
        await forked(home, wf, run_id, inputs={"left": 1})
    with pytest.raises(DefinitionError, match="Did you mean 'left'"):
        await forked(home, wf, run_id, "lef")
    async with home.engine() as engine:
        assert len(await engine.runs()) == 1


async def test_uncertain_paths_refuse_unless_they_are_named(home: Home, calls: Calls) -> None:
    wf = Workflow("w")
    began = asyncio.Event()
    calls.adder(wf)("first")

    @wf.node(depends_on="first")
    async def charge() -> str:
        calls.began("charge")
        if calls["charge"] == 1:
            began.set()
            await asyncio.Event().wait()
        return "paid"

    async with home.engine(wf, grace_seconds=0.0) as engine:
        handle = await engine.start(wf)
        await began.wait()
    with pytest.raises(UncertainNode, match="charge"):
        await forked(home, wf, handle.run_id, inputs={})
    result = await forked(home, wf, handle.run_id, "charge")
    assert list(result.executed) == ["charge"]
    assert list((await forked(home, wf, handle.run_id, "first")).executed) == ["first", "charge"]
    async with home.engine(wf) as engine:
        await engine.resolve(handle.run_id, "charge", output="paid at the desk")
    said = await forked(home, wf, handle.run_id)
    assert (list(said.executed), said["charge"]) == ([], "paid at the desk")


async def test_a_fork_takes_its_key(home: Home, calls: Calls) -> None:
    wf = pipeline(calls)
    run_id = (await home.run(wf, INPUTS, key="k")).run_id
    result = await forked(home, wf, run_id, "total", key="k")
    calls.mend()
    assert (await home.run(wf, INPUTS, key="k")).run_id == result.run_id
    assert not calls


async def test_a_key_whose_run_is_alive_refuses_a_fork(home: Home, calls: Calls) -> None:
    wf, slow, gate = pipeline(calls), Workflow("pipeline"), asyncio.Event()

    @slow.node
    async def waits() -> None:
        await gate.wait()

    run_id = (await home.run(wf, INPUTS)).run_id
    async with home.engine(wf) as engine:
        handle = await engine.start(slow, key="k")
        engine.register(wf)
        with pytest.raises(AlreadyRunning):
            await engine.fork(run_id, key="k")
        gate.set()
        await handle.result()


async def test_what_is_inside_nodes_is_copied_too(home: Home, calls: Calls) -> None:
    """Sub-workflows, loops, tolerated failures, conditions and pure nodes."""
    inner = Workflow("inner")

    @inner.node
    async def scale(x: int, factor: int) -> int:
        calls.began(f"scale {x}")
        if x == 2:
            raise ValueError(x)
        return x * factor

    @inner.node
    async def plain(x: int) -> int:
        calls.began(f"plain {x}")
        return x

    @inner.node
    async def sums(scale: int, plain: int) -> int:
        return scale + plain

    wf = Workflow("outer")
    wf.subworkflow("each", inner, args={"factor": "factor"}, for_each={"x": "xs"}, tolerate=1)

    async def grow(state: int) -> int:
        calls.began("grow")
        return state + 1

    wf.loop("grow", grow, initial="start", until=lambda state: state >= 3, max_iterations=9)

    @wf.node(checkpoint=False, idempotent=True)
    async def pure(grow: int) -> int:
        return grow

    @wf.node(when=lambda pure: pure > 99)
    async def rare(pure: int) -> int:
        return pure

    @wf.node
    async def end(each: list[Any], rare: int | None) -> int:
        calls.began("end")
        return len(each)

    inputs = {"xs": [1, 2, 3], "factor": 10, "start": 0}
    first = await home.run(wf, inputs)
    assert first.status is RunStatus.COMPLETED
    calls.mend()
    result = await forked(home, wf, first.run_id, "end")
    assert list(result.executed) == ["end"]
    assert [getattr(x, "path", x) for x in result["each"]] == [11, "each[1]", 33]
    assert result["grow"] == 3
    other = await forked(home, wf, first.run_id, inputs={"factor": 20})
    assert set(other.executed) == {
        "each[0]/scale", "each[0]/sums", "each[1]/scale", "each[2]/scale", "each[2]/sums", "end",
    }  # fmt: skip
    assert [getattr(x, "path", x) for x in other["each"]] == [21, "each[1]", 63]
    more = await forked(home, wf, first.run_id, inputs={"start": 1})
    assert [path for path in more.executed if "grow" in path] == ["grow[0]", "grow[1]"]


async def test_runs_never_share_files(sqlite_home: Home, calls: Calls) -> None:
    wf = Workflow("big")

    @wf.node
    async def big() -> str:
        calls.began("big")
        return "x" * 5000

    @wf.node
    async def small(big: str) -> int:
        calls.began("small")
        return len(big)

    options: dict[str, Any] = {"spill_bytes": 1000}
    async with sqlite_home.engine(wf, **options) as engine:
        first = await engine.run(wf)
        result = await engine.fork(first.run_id, small)
    assert list(result.executed) == ["small"]
    blobs = BlobStore(Path(f"{sqlite_home.path}.blobs"))
    names = {path.parent.name: path.name for path in blobs.folder.rglob("*") if path.is_file()}
    assert names.keys() == {first.run_id, result.run_id}
    blobs.remove_run(first.run_id)
    async with Engine(str(sqlite_home.path), workflows=[wf]) as engine:
        assert (await engine.result(result.run_id))["big"] == "x" * 5000


async def test_a_process_that_dies_behind_the_first_unit_leaves_a_whole_fork(
    home: Home, calls: Calls
) -> None:
    """The copies are there from the first commit on; whoever resumes the run goes on with them."""
    wf = pipeline(calls)
    run_id = (await home.run(wf, INPUTS)).run_id
    calls.mend()

    def faulty(store: Store) -> Store:
        return FaultyStore(
            store, lambda unit, record: record.kind == "run.claimed", lambda: StoreError("gone")
        )

    async with home.engine(wf, wrap=faulty) as engine:
        with pytest.raises(StoreError):
            await engine.fork(run_id, "left")
        [fork, _] = await engine.runs()
    assert (fork.status, not calls) == (RunStatus.PENDING, True)
    result = await home.resume(wf, fork.run_id)
    assert list(result.executed) == ["left", "both"]
    assert result["total"] == 12


async def test_what_was_used_up_is_not_counted_twice(home: Home, calls: Calls) -> None:
    """The copies say what they had cost, and a plan what reusing them saves; the fork has spent nothing."""
    wf = Workflow("paid")

    @wf.node
    async def call(ctx: Context) -> None:
        ctx.usage(cost=1.5)

    calls.adder(wf)("after", "call")
    run_id = (await home.run(wf)).run_id
    result = await forked(home, wf, run_id, "after")
    [ended] = [event for event in await home.events(result.run_id) if event.kind == "run.completed"]
    assert "usage" not in ended.data
    assert (await home.plan(wf, result.run_id))["call"].usage["cost"] == 1.5


async def test_the_code_of_what_was_copied_is_known(home: Home) -> None:
    """What was made by old code is old in the fork too."""

    def flow(edited: bool) -> Workflow:
        wf = Workflow("w")

        async def old() -> int:
            return 1

        async def new() -> int:
            return 2

        async def end(a: int) -> int:
            return a

        wf.node(id="a")(new if edited else old)
        wf.node(id="end")(end)
        return wf

    run_id = (await home.run(flow(False))).run_id
    result = await forked(home, flow(True), run_id, "end")
    assert result["end"] == 1
    again = await home.retry(flow(True), result.run_id, code_changed=True)
    assert list(again.executed) == ["a", "end"]
    assert again["end"] == 2
