"""A run from its start to its result: binding, results, failures, queries."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import networkx as nx
import pytest

from dagresume import (
    Context,
    Engine,
    EngineClosed,
    InputError,
    MissingInput,
    NodeStatus,
    NoOutput,
    Retry,
    RunFailed,
    RunStatus,
    Value,
    Workflow,
)
from tests.engine.kit import Boom, Calls, Home, settle


async def test_each_parameter_is_fed_in_the_documented_order(home: Home) -> None:
    """Context, args, for_each, a node's id, a run input, a default."""
    wf = Workflow("binding")
    got: dict[str, Any] = {}

    @wf.node
    async def parent() -> int:
        return 1

    @wf.node
    async def other() -> int:
        return 2

    @wf.node
    async def many() -> list[int]:
        return [7]

    @wf.node(
        args={"parent": "other", "fixed": Value({"x": [1]}), "renamed": "given"}, for_each={"many": "many"}
    )
    async def child(
        ctx: Context,
        parent: int,
        other: int,
        many: int,
        given: str,
        renamed: str,
        fixed: object,
        left: int = 5,
    ) -> None:
        got.update(
            node=ctx.node,
            parent=parent,
            other=other,
            many=many,
            given=given,
            renamed=renamed,
            fixed=fixed,
            left=left,
        )

    await home.run(wf, {"given": "input"})
    assert got == {
        "node": "child",
        "parent": 2,
        "other": 2,
        "many": 7,
        "given": "input",
        "renamed": "input",
        "fixed": {"x": [1]},
        "left": 5,
    }


async def test_a_default_is_an_optional_run_input(home: Home) -> None:
    wf = Workflow("defaults")

    @wf.node
    async def a(first: int = 1, *, second: int = 2) -> tuple[int, int]:
        return first, second

    assert (await home.run(wf))[a] == (1, 2)
    assert (await home.run(wf, {"second": 5}))[a] == (1, 5)
    assert (await home.run(wf, {"first": 4}))[a] == (4, 2)


async def test_a_left_out_default_before_given_parameters(home: Home) -> None:
    """What comes after a default that is left out still gets its own value."""
    wf = Workflow("holes")

    @wf.node
    async def a() -> int:
        return 10

    @wf.node
    async def b(x: int = 1, a: int = 0, y: int = 2) -> list[int]:
        return [x, a, y]

    assert (await home.run(wf, {"y": 3}))[b] == [1, 10, 3]


@pytest.mark.parametrize(
    ("inputs", "error", "says"),
    [
        ({}, MissingInput, "folder"),
        ({"folder": "x", "foldr": "y"}, InputError, "folder"),
        ({"folder": "x", "resume": "y"}, InputError, "resumes"),
        ({"folder": "x", "resumes": "y"}, InputError, "node"),
        ({1: "x"}, InputError, "1"),
    ],
)
async def test_wrong_inputs_name_the_nearest_input_or_node(
    home: Home, inputs: dict[Any, Any], error: type[Exception], says: str
) -> None:
    wf = Workflow("inputs")

    @wf.node
    async def resumes(folder: str) -> list[str]:
        return [folder]

    async with home.engine() as engine:
        with pytest.raises(error, match=says):
            await engine.run(wf, inputs)
        assert await engine.runs() == []


async def test_a_missing_input_that_looks_like_a_node_says_so(home: Home) -> None:
    wf = Workflow("typo")

    @wf.node
    async def resumes() -> list[str]:
        return []

    @wf.node
    async def score(resume: list[str]) -> int:
        return len(resume)

    async with home.engine() as engine:
        with pytest.raises(MissingInput, match=r"resume.*resumes"):
            await engine.run(wf)


async def test_an_input_that_cannot_be_stored_is_named(home: Home) -> None:
    wf = Workflow("input")

    @wf.node
    async def a(handle: object) -> None: ...

    async with home.engine() as engine:
        with pytest.raises(Exception, match="handle"):
            await engine.run(wf, {"handle": object()})
        assert await engine.runs() == []


async def test_a_graph_of_networkx_runs(home: Home) -> None:
    """Edge attribute `arg` binds; an edge without one whose parent is no parameter orders."""
    order: list[str] = []

    async def one() -> int:
        order.append("one")
        return 1

    async def plus(x: int, y: int) -> int:
        order.append("plus")
        return x + y

    async def last(plus: int) -> int:
        order.append("last")
        return plus * 10

    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_node("one", run=one)
    graph.add_node("two", run=one, idempotent=True)
    graph.add_node("plus", run=plus, retry=Retry(2))
    graph.add_node("last", run=last)
    graph.add_edge("one", "plus", arg="x")
    graph.add_edge("two", "plus", arg="y")
    graph.add_edge("plus", "last")
    graph.add_edge("one", "last")
    wf = Workflow.from_graph("graph", graph, version="7")
    assert wf.version == "7"
    assert set(wf.graph.edges) == set(graph.edges)
    result = await home.run(wf)
    assert result["last"] == 20
    assert order == ["one", "one", "plus", "last"]


async def test_the_definition_graph_is_frozen(home: Home, calls: Calls) -> None:
    """B169, B170: it is a frozen DiGraph with as many nodes as were declared; a copy per run."""
    wf = Workflow("frozen")
    add = calls.adder(wf)
    add("a")
    add("b", "a", "a")  # an edge named twice is one
    assert nx.is_frozen(wf.graph)
    assert isinstance(wf.graph, nx.DiGraph)
    assert list(wf.graph.edges) == [("a", "b")]
    assert nx.descendants(wf.graph, "a") == {"b"}
    result = await home.run(wf)
    assert list(result.executed) == ["a", "b"]
    add("c", "b")
    assert len(wf.graph) == 3
    assert list((await home.run(wf)).executed) == ["a", "b", "c"]


async def test_a_workflow_may_grow_while_a_run_of_it_is_on(home: Home, calls: Calls) -> None:
    wf = Workflow("grows")
    gate = asyncio.Event()

    @wf.node
    async def a() -> None:
        calls.began("a")
        await gate.wait()

    async with home.engine() as engine:
        handle = await engine.start(wf)
        await settle(lambda: calls["a"] == 1)
        calls.adder(wf)("b", "a")
        gate.set()
        result = await handle.result()
        assert list(result.executed) == ["a"]


async def test_two_runs_share_one_workflow_at_the_same_time(home: Home) -> None:
    """B170: both runs are independent."""
    wf = Workflow("shared")
    met = asyncio.Barrier(2)

    @wf.node
    async def numbers(n: int) -> list[int]:
        await met.wait()
        return list(range(n))

    @wf.node(for_each={"x": "numbers"})
    async def double(x: int) -> int:
        await asyncio.sleep(0)
        return x * 2

    async with home.engine() as engine:
        first, second = await asyncio.gather(engine.run(wf, {"n": 3}), engine.run(wf, {"n": 5}))
    assert first["double"] == [0, 2, 4]
    assert second["double"] == [0, 2, 4, 6, 8]
    assert first.run_id != second.run_id


async def test_an_empty_workflow_completes_at_once(home: Home) -> None:
    """B169."""
    result = await home.run(Workflow("empty"))
    assert result.status is RunStatus.COMPLETED
    assert dict(result.outputs) == {}


async def test_two_components_both_run(home: Home, calls: Calls) -> None:
    """B169."""
    wf = Workflow("two")
    add = calls.adder(wf)
    add("a")
    add("b")
    assert (await home.run(wf)).status is RunStatus.COMPLETED
    assert calls == {"a": 1, "b": 1}


async def test_run_failed_carries_run_failures_and_cause(home: Home) -> None:
    wf = Workflow("fails")

    @wf.node
    async def b() -> None:
        raise KeyError("b")

    @wf.node
    async def a() -> None:
        raise Boom("why")

    async with home.engine() as engine:
        with pytest.raises(RunFailed) as caught:
            await engine.run(wf)
        error = caught.value
        [info] = await engine.runs()
    assert error.run_id == info.run_id
    assert list(error.failures) == ["b", "a"]  # the order of the definition
    assert isinstance(error.__cause__, KeyError)
    failure = error.failures["a"]
    assert (failure.path, failure.attempt, failure.message) == ("a", 1, "why")
    assert failure.type.endswith("Boom")
    assert "raise Boom" in failure.traceback
    assert "resume" in str(error)
    assert "\n" not in str(error)


async def test_many_failures_at_once_come_in_the_order_of_the_definition(home: Home) -> None:
    wf = Workflow("fails")
    gates = {f"n{k}": asyncio.Event() for k in range(8)}

    def add(name: str, opens: str | None) -> None:
        async def body() -> None:
            await gates[name].wait()
            if opens:
                gates[opens].set()
            raise Boom(name)

        wf.node(id=name)(body)

    for k in range(8):  # they end in the opposite order
        add(f"n{k}", f"n{k - 1}" if k else None)
    gates["n7"].set()
    result = await home.run(wf)
    assert list(result.failures) == [f"n{k}" for k in range(8)]
    assert list((await home.info(result.run_id)).failures) == list(result.failures)


async def test_errors_of_any_shape_are_stored_as_text(home: Home) -> None:
    """B44: nothing of the exception but text is kept; reading never makes the class."""

    class Odd(Exception):
        def __init__(self, code: int, *, detail: str) -> None:
            self.code, self.detail = code, detail
            super().__init__(code)

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    wf = Workflow("errors")
    errors: dict[str, BaseException] = {
        "odd": Odd(3, detail="d"),
        "mute": Mute(),
        "huge": Boom("x" * 1_000_000),
        "group": ExceptionGroup("several", [Boom("1"), KeyError("2")]),
        "surrogate": Boom("\udcff"),
        "nul": Boom("a\x00b"),
        "exit": SystemExit(3),
        "lock": Boom(asyncio.Lock()),
    }

    def add(name: str) -> None:
        async def body() -> None:
            raise errors[name] from ValueError("the reason")

        wf.node(id=name)(body)

    for name in errors:
        add(name)
    result = await home.run(wf)
    assert set(result.failures) == set(errors)
    stored = (await home.info(result.run_id)).failures
    assert set(stored) == set(errors)
    assert "Odd" in stored["odd"].type
    assert "the reason" in stored["odd"].traceback
    assert len(stored["huge"].message) < 100_000
    assert stored["nul"].message == "a\x00b"
    for name, failure in stored.items():
        assert failure.message == result.failures[name].message
        assert failure.type == result.failures[name].type


async def test_a_body_that_raises_cancelled_by_itself_has_failed(home: Home, calls: Calls) -> None:
    """B35 (1): not a hang, not a success; what is below is blocked."""
    wf = Workflow("cancelled inside")

    @wf.node
    async def a() -> None:
        raise asyncio.CancelledError

    calls.adder(wf)("b", "a")
    result = await home.run(wf)
    assert result.status is RunStatus.FAILED
    assert "cancelled from inside" in result.failures["a"].message
    assert not calls


async def test_executed_are_the_bodies_that_began_in_order(home: Home, calls: Calls) -> None:
    wf = Workflow("order")
    add = calls.adder(wf)
    add("a")
    add("b", "a")
    add("c", "b")
    calls.broken = {"c"}
    result = await home.run(wf)
    assert list(result.executed) == ["a", "b", "c"]
    assert len(result.executed) == 3
    assert list(result.reused) == []


async def test_outputs_are_a_lazy_mapping_of_what_is_there(home: Home) -> None:
    """G, B52: `None` is an output; a failed, skipped or unknown node has none, and says its status."""
    wf = Workflow("outputs", idempotent=True)

    @wf.node
    async def none() -> None: ...

    @wf.node
    async def empty() -> dict[str, int]:
        return {}

    @wf.node
    async def bad() -> None:
        raise Boom

    @wf.node(checkpoint=False)
    async def pure() -> int:
        return 3

    @wf.node(depends_on=["none"], trigger="any_failed")
    async def skipped() -> None: ...

    @wf.node
    async def below(bad: None) -> None: ...

    live = await home.run(wf)
    async with home.engine(wf) as engine:
        stored = await engine.result(live.run_id)
        for result in (live, stored):
            assert result["none"] is None
            assert result[none] is None
            assert result["empty"] == {}
            assert set(result.outputs) == {"none", "empty"}
            assert "none" in result.outputs
            assert "bad" not in result.outputs
            statuses = {
                "bad": "failed",
                "skipped": "skipped",
                "below": "upstream_failed",
                "pure": "completed",
            }
            for name, status in statuses.items():
                with pytest.raises(NoOutput, match=status):
                    result.outputs[name]
            with pytest.raises(KeyError, match="does not exist"):
                result["nobody"]
        with pytest.raises(NoOutput, match="checkpoint=False"):
            stored["pure"]


async def test_stats_count_commits_and_waits(home: Home, calls: Calls) -> None:
    wf = Workflow("stats")
    add = calls.adder(wf)
    add("a")
    add("b", "a")
    stats = (await home.run(wf)).stats
    latency = stats.checkpoint_latency
    assert latency.count == 2
    assert 0 <= latency.p50 <= latency.p95 <= latency.p99 <= latency.max < 60
    assert 1 <= stats.commits <= 4


async def test_get_shows_every_path(home: Home) -> None:
    wf = Workflow("get", idempotent=True)

    @wf.node
    async def numbers() -> list[int]:
        return [0, 1]

    @wf.node(for_each={"n": "numbers"})
    async def item(n: int, ctx: Context) -> int:
        ctx.usage(tokens_in=3, cost=0.5)
        if n:
            raise Boom("n")
        return n

    @wf.node
    async def after(item: list[int]) -> None: ...

    @wf.node(depends_on=["item"], trigger="any_success")
    async def never() -> None: ...

    before = datetime.now(UTC) - timedelta(seconds=1)
    result = await home.run(wf)
    info = await home.info(result.run_id)
    assert (info.workflow, info.version, info.key, info.status) == ("get", "1", None, RunStatus.FAILED)
    assert list(info.nodes) == ["numbers", "item", "item[0]", "item[1]", "after", "never"]
    assert info.nodes["numbers"].status is NodeStatus.COMPLETED
    assert info.nodes["numbers"].attempt == 1
    assert info.nodes["numbers"].seconds is not None
    assert info.nodes["item"].status is NodeStatus.FAILED
    assert info.nodes["item[1]"].failure is not None
    assert info.nodes["item[1]"].failure.message == "n"
    assert info.nodes["after"].status is NodeStatus.UPSTREAM_FAILED
    assert info.nodes["never"].status is NodeStatus.UPSTREAM_FAILED
    assert list(info.failures) == ["item[1]"]
    at = info.nodes["numbers"].at
    assert at is not None
    assert before < info.created_at <= at <= info.updated_at
    assert at.utcoffset() == timedelta(0)


async def test_a_live_run_is_seen_as_running_and_owned(home: Home, calls: Calls) -> None:
    wf = Workflow("live")
    gate = asyncio.Event()

    @wf.node
    async def a() -> None:
        calls.began("a")
        await gate.wait()

    calls.adder(wf)("b", "a")
    async with home.engine() as engine, home.engine() as other:
        handle = await engine.start(wf)
        await settle(lambda: calls["a"] == 1)
        for watcher in (engine, other):
            info = await watcher.get(handle.run_id)
            assert info.status is RunStatus.RUNNING
            assert info.owner is not None
            assert info.nodes["a"].status is NodeStatus.RUNNING
            assert info.nodes["b"].status is NodeStatus.PENDING
        gate.set()
        await handle.result()
        info = await other.get(handle.run_id)
        assert (info.status, info.owner) == (RunStatus.COMPLETED, None)
        assert info.finished_at is not None


async def test_runs_are_listed_newest_first_and_filtered(home: Home, calls: Calls) -> None:
    good, bad = Workflow("good"), Workflow("bad")
    calls.adder(good)("a")
    calls.adder(bad)("b")
    calls.broken = {"b"}
    ids = [
        (await home.run(good, key="k")).run_id,
        (await home.run(bad)).run_id,
        (await home.run(good)).run_id,
    ]
    async with home.engine() as engine:

        async def listed(**which: Any) -> list[str]:
            return [run.run_id for run in await engine.runs(**which)]

        assert await listed() == ids[::-1]
        assert await listed(limit=2) == [ids[2], ids[1]]
        assert await listed(before=ids[1]) == [ids[0]]
        assert await listed(workflow="bad") == [ids[1]]
        assert await listed(status="failed") == [ids[1]]
        assert await listed(status=[RunStatus.FAILED, RunStatus.COMPLETED]) == ids[::-1]
        assert await listed(key="k") == [ids[0]]
        assert await listed(key="k%") == []
        with pytest.raises(ValueError, match="complete"):
            await engine.runs(status="complete")


async def test_an_engine_that_is_not_open_says_so(home: Home, calls: Calls) -> None:
    wf = Workflow("closed")
    calls.adder(wf)("a")
    engine = home.engine(wf)
    with pytest.raises(EngineClosed):
        await engine.run(wf)
    async with engine:
        run_id = (await engine.run(wf)).run_id
    for ask in (engine.get, engine.plan, engine.resume, engine.retry, engine.result, engine.cancel):
        with pytest.raises(EngineClosed):
            await ask(run_id)
    with pytest.raises(EngineClosed):
        await engine.start(wf)
    with pytest.raises(EngineClosed):
        [event async for event in engine.events(run_id)]


async def test_a_result_can_be_read_after_its_engine_was_left(sqlite_home: Home) -> None:
    """Outputs are lazy: also those that lie in the store."""
    wf = Workflow("late")
    broken = [True]

    @wf.node
    async def a() -> str:
        return "x" * 100

    @wf.node
    async def big() -> str:
        return "y" * 200_000

    @wf.node
    async def b(a: str) -> None:
        if broken:
            raise Boom

    run_id = (await sqlite_home.run(wf)).run_id
    broken.clear()
    result = await sqlite_home.resume(wf, run_id)
    assert result[a] == "x" * 100
    assert result[big] == "y" * 200_000


async def test_the_result_of_a_live_run_is_refused(home: Home) -> None:
    wf = Workflow("live")
    gate = asyncio.Event()

    @wf.node
    async def a() -> None:
        await gate.wait()

    async with home.engine() as engine, home.engine() as other:
        handle = await engine.start(wf)
        with pytest.raises(Exception, match=handle.run_id):
            await engine.result(handle.run_id)
        assert not handle.done
        gate.set()
        await handle.result()
        assert (await other.result(handle.run_id)).status is RunStatus.COMPLETED


async def test_a_cancelled_waiter_leaves_a_started_run_alone(home: Home) -> None:
    wf = Workflow("waiter")
    gate = asyncio.Event()

    @wf.node
    async def a() -> int:
        await gate.wait()
        return 1

    async with home.engine() as engine:
        handle = await engine.start(wf)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(handle.result(), 0.01)
        gate.set()
        assert (await handle.result())[a] == 1


async def test_the_engine_never_owns_a_second_block(home: Home) -> None:
    engine = home.engine()
    async with engine:
        with pytest.raises(Exception, match="open"):
            await engine.__aenter__()
    assert isinstance(engine, Engine)
