"""What a resume runs and what it leaves alone."""

from __future__ import annotations

import pytest

from dagresume import (
    Context,
    DefinitionError,
    Retry,
    RunFailed,
    RunNotFound,
    RunStatus,
    StoreError,
    UncertainNode,
    Workflow,
    WorkflowNotRegistered,
)
from dagresume.store import Store
from tests.engine.kit import Boom, Calls, FaultyStore, Home


def diamond(calls: Calls) -> Workflow:
    """A diamond whose left side goes on, beside a long branch that has nothing to do with it."""
    wf = Workflow("diamond")
    add = calls.adder(wf)
    add("top")
    add("left", "top")
    add("right", "top")
    add("bottom", "left", "right")
    add("after", "bottom")
    for k in range(10):
        add(f"long{k}", *([f"long{k - 1}"] if k else []))
    return wf


async def test_a_failure_blocks_its_descendants_only(home: Home, calls: Calls) -> None:
    """A2, C9: the unrelated branch and the other side of the diamond end before the run does."""
    wf = diamond(calls)
    calls.broken = {"left"}
    result = await home.run(wf)
    assert result.status is RunStatus.FAILED
    assert list(result.failures) == ["left"]
    assert set(calls) == {"top", "left", "right", *(f"long{k}" for k in range(10))}
    states = await home.statuses(result.run_id)
    assert states["long9"] == "completed"
    assert states["bottom"] == states["after"] == "upstream_failed"


async def test_plan_names_exactly_what_the_resume_runs(home: Home, calls: Calls) -> None:
    """A2: the failed node and its never-run descendants, nothing else."""
    wf = diamond(calls)
    calls.broken = {"left"}
    run_id = (await home.run(wf)).run_id
    plan = await home.plan(wf, run_id)
    will_run = {path for path, decision in plan.items() if decision.action in {"run", "check"}}
    assert will_run == {"left", "bottom", "after"}
    assert {path for path, decision in plan.items() if decision.action == "reuse"} == set(plan) - will_run
    calls.mend()
    result = await home.resume(wf, run_id)
    assert result.status is RunStatus.COMPLETED
    assert dict(calls) == {"left": 1, "bottom": 1, "after": 1}
    assert list(result.executed) == ["left", "bottom", "after"]
    assert set(result.reused) == {"top", "right", *(f"long{k}" for k in range(10))}
    assert result["after"] == "after"


async def test_planning_changes_and_executes_nothing(home: Home, calls: Calls) -> None:
    wf = diamond(calls)
    calls.broken = {"left"}
    run_id = (await home.run(wf)).run_id
    before, ran = await home.events(run_id), dict(calls)
    await home.plan(wf, run_id, items=True)
    assert await home.events(run_id) == before
    assert dict(calls) == ran


async def test_resume_of_a_completed_run_gives_its_stored_result(home: Home, calls: Calls) -> None:
    wf = diamond(calls)
    run_id = (await home.run(wf)).run_id
    calls.mend()
    result = await home.resume(wf, run_id)
    assert result.status is RunStatus.COMPLETED
    assert not calls
    assert list(result.executed) == []
    assert set(result.reused) == set(wf.nodes)
    assert result["after"] == "after"


async def test_a_second_failure_can_be_resumed_again(home: Home, calls: Calls) -> None:
    wf = diamond(calls)
    calls.broken = {"left"}
    run_id = (await home.run(wf)).run_id
    calls.broken = {"after"}
    assert list((await home.resume(wf, run_id)).failures) == ["after"]
    calls.broken = set()
    result = await home.resume(wf, run_id)
    assert list(result.executed) == ["after"]
    assert calls["left"] == 2
    assert calls["bottom"] == 1


async def test_a_join_runs_once_over_two_processes(home: Home, calls: Calls) -> None:
    """B11."""
    wf = Workflow("join")

    @wf.node
    async def numbers() -> list[int]:
        return [1, 2, 3]

    @wf.node(for_each={"n": "numbers"})
    async def double(n: int) -> int:
        calls.began("double")
        return n * 2

    @wf.node
    async def total(double: list[int]) -> int:
        calls.began("total")
        return sum(double)

    calls.broken = {"total"}
    run_id = (await home.run(wf)).run_id
    calls.broken = set()
    result = await home.resume(wf, run_id)
    assert result[total] == 12
    assert calls == {"double": 3, "total": 2}
    completed = [e for e in await home.events(run_id) if e.kind == "node.completed" and e.path == "total"]
    assert len(completed) == 1


async def test_no_child_starts_before_its_parents_ended_also_on_resume(home: Home, calls: Calls) -> None:
    """B13: for each edge, the parent's completion is in the journal before the child's start."""
    wf = Workflow("order")
    add = calls.adder(wf)
    add("a")
    add("b", "a")
    add("d", "a")
    add("c", "b", "d")
    calls.broken = {"b"}
    run_id = (await home.run(wf)).run_id
    calls.broken = set()
    await home.resume(wf, run_id)
    events = await home.events(run_id)
    ended = {e.path: e.seq for e in events if e.kind == "node.completed"}
    started = {e.path: e.seq for e in events if e.kind == "node.started"}
    for parent, child in wf.graph.edges:
        assert ended[parent] <= started[child]


async def test_retry_from_a_node_runs_it_and_all_below_again(home: Home, calls: Calls) -> None:
    """B14: unrelated branches and what lies above are left alone, non-idempotent or not."""
    wf = Workflow("retry")
    add = calls.adder(wf)
    add("a")
    add("b", "a")
    add("c", "b")
    add("other", "a")
    run_id = (await home.run(wf)).run_id
    result = await home.retry(wf, run_id, "b")
    assert result.status is RunStatus.COMPLETED
    assert dict(calls) == {"a": 1, "b": 2, "c": 2, "other": 1}
    assert list(result.executed) == ["b", "c"]
    assert set(result.reused) == {"a", "other"}


async def test_old_outputs_stay_in_the_journal_and_out_of_the_result(home: Home) -> None:
    """B14: history is kept, not mixed in."""
    wf = Workflow("history")
    given = iter([1, 2])

    @wf.node
    async def a() -> int:
        return next(given)

    @wf.node
    async def b(a: int) -> int:
        return a * 10

    first = await home.run(wf)
    assert first[b] == 10
    again = await home.retry(wf, first.run_id, a)
    assert (again[a], again[b]) == (2, 20)
    kinds = [(e.kind, e.attempt) for e in await home.events(first.run_id) if e.path == "a"]
    assert [k for k in kinds if k[0] == "node.completed"] == [("node.completed", 1), ("node.completed", 2)]


async def test_retry_takes_the_decorated_function_whatever_its_node_is_called(
    home: Home, calls: Calls
) -> None:
    """Wherever a node is named, the decorated function is accepted too."""
    wf = Workflow("by function")

    @wf.node(id="another name")
    async def a() -> int:
        calls.began("a")
        return 1

    run_id = (await home.run(wf)).run_id
    result = await home.retry(wf, run_id, a)
    assert list(result.executed) == ["another name"]


async def test_retry_from_an_unknown_node_says_so_and_changes_nothing(home: Home, calls: Calls) -> None:
    wf = diamond(calls)
    run_id = (await home.run(wf)).run_id
    before = await home.events(run_id)
    async with home.engine(wf) as engine:
        with pytest.raises(Exception, match="botom") as caught:
            await engine.retry(run_id, "botom")
        assert "bottom" in str(caught.value)  # the nearest name
    assert await home.events(run_id) == before


@pytest.mark.parametrize("path", ["item[5]", "item[0]/x", "numbers[0]", "item[", "x/item"])
async def test_retry_from_a_path_that_does_not_exist_changes_nothing(
    home: Home, calls: Calls, path: str
) -> None:
    wf = Workflow("paths")

    @wf.node
    async def numbers() -> list[int]:
        calls.began("numbers")
        return [1, 2]

    @wf.node(for_each={"n": "numbers"})
    async def item(n: int) -> int:
        calls.began("item")
        return n

    run_id = (await home.run(wf)).run_id
    before = await home.events(run_id)
    async with home.engine(wf) as engine:
        with pytest.raises((DefinitionError, LookupError, ValueError)) as caught:
            await engine.retry(run_id, path)
    assert path in str(caught.value)
    assert await home.events(run_id) == before
    assert calls == {"numbers": 1, "item": 2}


async def test_retry_reopens_a_cancelled_run(home: Home, calls: Calls) -> None:
    wf = diamond(calls)
    calls.broken = {"left"}
    run_id = (await home.run(wf)).run_id
    async with home.engine(wf) as engine:
        await engine.cancel(run_id, by="me")
    assert (await home.info(run_id)).status is RunStatus.CANCELLED
    calls.mend()
    result = await home.retry(wf, run_id, "left")
    assert result.status is RunStatus.COMPLETED
    assert set(calls) == {"left", "bottom", "after"}


async def test_retry_with_nothing_to_do_gives_the_stored_result(home: Home, calls: Calls) -> None:
    wf = diamond(calls)
    run_id = (await home.run(wf)).run_id
    calls.mend()
    result = await home.retry(wf, run_id)
    assert result.status is RunStatus.COMPLETED
    assert not calls
    assert result["after"] == "after"


async def test_the_idempotency_key_is_one_for_all_attempts_and_processes(home: Home) -> None:
    """B07: attempts differ, the key does not; only a completed path that runs again gets another."""
    wf = Workflow("keys", retry=Retry(2, delay=0))
    seen: list[tuple[int, str]] = []
    broken = [True]

    @wf.node
    async def a(ctx: Context) -> str:
        seen.append((ctx.attempt, ctx.idempotency_key))
        if broken:
            raise Boom
        return ctx.idempotency_key

    run_id = (await home.run(wf)).run_id
    broken.clear()
    await home.resume(wf, run_id)
    assert [attempt for attempt, _ in seen] == [1, 2, 3]
    assert len({key for _, key in seen}) == 1
    await home.retry(wf, run_id, a)
    assert seen[-1][0] == 4
    assert seen[-1][1] != seen[0][1]


async def test_keys_of_items_and_runs_differ(home: Home) -> None:
    wf = Workflow("keys of items")
    keys: list[str] = []

    @wf.node
    async def numbers() -> list[int]:
        return [1, 1, 1]

    @wf.node(for_each={"n": "numbers"})
    async def item(n: int, ctx: Context) -> int:
        keys.append(ctx.idempotency_key)
        return n

    await home.run(wf)
    await home.run(wf)
    assert len(set(keys)) == 6


async def test_an_unknown_run_is_not_found(home: Home, calls: Calls) -> None:
    async with home.engine(diamond(calls)) as engine:
        for ask in (engine.resume, engine.retry, engine.plan, engine.get, engine.result, engine.cancel):
            with pytest.raises(RunNotFound, match="nowhere"):
                await ask("nowhere")


async def test_a_stored_run_needs_its_workflow_registered(home: Home, calls: Calls) -> None:
    """The message says what to register; register makes it work."""
    wf = diamond(calls)
    calls.broken = {"left"}
    run_id = (await home.run(wf)).run_id
    calls.mend()
    async with home.engine() as engine:
        with pytest.raises(WorkflowNotRegistered, match=r"diamond.*register"):
            await engine.resume(run_id)
        engine.register(wf)
        assert (await engine.resume(run_id)).status is RunStatus.COMPLETED


async def test_getting_and_listing_need_no_code(home: Home, calls: Calls) -> None:
    wf = diamond(calls)
    calls.broken = {"left"}
    run_id = (await home.run(wf)).run_id
    async with home.engine() as engine:
        info = await engine.get(run_id)
        assert info.nodes["left"].failure is not None
        assert list(info.failures) == ["left"]
        assert [r.run_id for r in await engine.runs()] == [run_id]
        stored = await engine.result(run_id)
        assert stored["right"] == "right"
        assert [e.kind async for e in engine.events(run_id)][-1] == "run.failed"


def _lose_completion_of(path: str) -> object:
    def wrap(store: Store) -> Store:
        return FaultyStore(
            store,
            lambda _, record: record.kind == "node.completed" and record.path == path,
            lambda: StoreError("the disk is gone"),
        )

    return wrap


async def uncertain_run(home: Home, wf: Workflow, path: str) -> str:
    """Make a run in which `path` began, and whose result never reached the store."""
    async with home.engine(wrap=_lose_completion_of(path)) as engine:  # type: ignore[arg-type]
        with pytest.raises(RunFailed):
            await engine.run(wf)
        [info] = await engine.runs()
    return info.run_id


async def test_an_uncertain_path_is_neither_run_nor_skipped_by_resume(home: Home, calls: Calls) -> None:
    """C6: refused, naming the path and the ways out; nothing changes."""
    wf = Workflow("uncertain")
    add = calls.adder(wf)
    add("a")
    add("b", "a")
    run_id = await uncertain_run(home, wf, "a")
    plan = await home.plan(wf, run_id)
    assert (plan["a"].action, plan["a"].reason) == ("hold", "uncertain")
    before = await home.events(run_id)
    async with home.engine(wf) as engine:
        with pytest.raises(UncertainNode, match=r"\ba\b.*retry") as caught:
            await engine.resume(run_id)
        assert caught.value.paths == ("a",)
    assert await home.events(run_id) == before
    assert calls["a"] == 1


async def test_retry_runs_what_is_uncertain(home: Home, calls: Calls) -> None:
    wf = Workflow("uncertain")
    add = calls.adder(wf)
    add("a")
    add("b", "a")
    run_id = await uncertain_run(home, wf, "a")
    result = await home.retry(wf, run_id)
    assert result.status is RunStatus.COMPLETED
    assert calls == {"a": 2, "b": 1}


async def test_an_idempotent_path_is_never_uncertain(home: Home, calls: Calls) -> None:
    wf = Workflow("idempotent", idempotent=True)
    add = calls.adder(wf)
    add("a")
    add("b", "a")
    run_id = await uncertain_run(home, wf, "a")
    result = await home.resume(wf, run_id)
    assert result.status is RunStatus.COMPLETED
    assert calls == {"a": 2, "b": 1}


async def test_a_failed_map_item_of_a_tolerant_map_is_not_uncertain(home: Home, calls: Calls) -> None:
    """Tolerated failures stay so on resume, whatever their reason was."""
    wf = Workflow("tolerated")

    @wf.node
    async def numbers() -> list[int]:
        return [0, 1, 2]

    @wf.node(for_each={"n": "numbers"}, tolerate=1)
    async def item(n: int) -> object:
        calls.began("item")
        return object() if n == 1 else n

    @wf.node
    async def end(item: list[object]) -> int:
        calls.began("end")
        return len(item)

    calls.broken = {"end"}
    run_id = (await home.run(wf)).run_id
    calls.broken = set()
    result = await home.resume(wf, run_id)
    assert result[end] == 3
    assert calls["item"] == 3


async def test_a_handled_failure_does_not_stop_a_resume(home: Home, calls: Calls) -> None:
    """B08: what is handled is not run again by resume, and is not uncertain either."""
    wf = Workflow("handled")

    @wf.node
    async def a() -> object:
        calls.began("a")
        return object()  # cannot be stored: its effect has happened

    @wf.node(depends_on=["a"], trigger="any_failed")
    async def h() -> int:
        calls.began("h")
        return 1

    @wf.node
    async def b(h: int) -> int:
        calls.began("b")
        return h

    calls.broken = {"b"}
    run_id = (await home.run(wf)).run_id
    calls.broken = set()
    result = await home.resume(wf, run_id)
    assert result.status is RunStatus.COMPLETED
    assert dict(calls) == {"a": 1, "h": 1, "b": 2}
