"""Writes that fail: no swallowed error, no completed run with a hole (C8)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dagresume import (
    Context,
    Engine,
    RunFailed,
    RunResult,
    RunStatus,
    StoreError,
    StoreFull,
    UncertainNode,
    Workflow,
)
from dagresume.clock import SystemClock
from dagresume.errors import InputError
from dagresume.events import Record
from dagresume.store import Outcome, Store, StoreFailed, Unit
from tests.engine.kit import Calls, FaultyStore, Home, Spoil, listing


def failing(
    spoils: Spoil, error: Callable[[], Exception] = lambda: StoreFull("disk", "no space left")
) -> Any:
    """Give a wrapper of stores that does not write what `spoils` says yes to."""
    return lambda store: FaultyStore(store, spoils, error)


def chain(calls: Calls, *, idempotent: bool) -> Workflow:
    wf = Workflow("chain", idempotent=idempotent)
    add = calls.adder(wf)
    add("a")
    add("b", "a")
    add("c", "b")
    return wf


async def attempt(engine: Engine, wf: Workflow) -> RunResult | BaseException:
    try:
        return await engine.run(wf)
    except Exception as error:
        return error


@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_lost_success_fails_the_run_and_names_the_node(
    home: Home, calls: Calls, idempotent: bool
) -> None:
    """B02, B29: at once; nothing below begins; the cause is the store's error."""
    wf = chain(calls, idempotent=idempotent)
    async with home.engine(wrap=failing(lambda _, r: (r.kind, r.path) == ("node.completed", "a"))) as engine:
        async with asyncio.timeout(2):
            with pytest.raises(RunFailed) as caught:
                await engine.run(wf)
        [info] = await engine.runs()
    assert list(caught.value.failures) == ["a"]
    assert "no space left" in caught.value.failures["a"].message
    assert isinstance(caught.value.__cause__, StoreFull)
    assert calls == {"a": 1}
    assert info.status in {RunStatus.FAILED, RunStatus.INTERRUPTED}
    assert (await home.statuses(info.run_id))["a"] != "completed"


async def test_after_a_lost_success_an_idempotent_chain_can_go_on(home: Home, calls: Calls) -> None:
    wf = chain(calls, idempotent=True)
    async with home.engine(wrap=failing(lambda _, r: (r.kind, r.path) == ("node.completed", "b"))) as engine:
        with pytest.raises(RunFailed) as caught:
            await engine.run(wf)
    result = await home.resume(wf, caught.value.run_id)
    assert result.status is RunStatus.COMPLETED
    assert calls == {"a": 1, "b": 2, "c": 1}


async def test_a_lost_end_is_no_success(home: Home, calls: Calls) -> None:
    """C8: the caller is told; a resume finds everything done."""
    wf = chain(calls, idempotent=True)
    async with home.engine(wrap=failing(lambda _, r: r.kind == "run.completed")) as engine:
        with pytest.raises((StoreError, RunFailed)):
            await engine.run(wf)
        [info] = await engine.runs()
    assert info.status is not RunStatus.COMPLETED
    result = await home.resume(wf, info.run_id)
    assert result.status is RunStatus.COMPLETED
    assert calls["a"] == calls["b"] == 1


async def test_a_run_that_cannot_be_created_runs_nothing(home: Home, calls: Calls) -> None:
    wf = chain(calls, idempotent=True)
    async with home.engine(wrap=failing(lambda _, r: r.kind == "run.created")) as engine:
        with pytest.raises(StoreFull):
            await engine.run(wf)
        assert await engine.runs() == []
        with pytest.raises(StoreFull):
            await engine.start(wf)
    assert not calls


async def test_a_run_that_cannot_be_claimed_runs_nothing_and_can_be_later(home: Home, calls: Calls) -> None:
    wf = chain(calls, idempotent=True)
    calls.broken = {"b"}
    run_id = (await home.run(wf)).run_id
    calls.mend()
    async with home.engine(wf, wrap=failing(lambda _, r: r.kind == "run.claimed")) as engine:
        with pytest.raises(StoreFull):
            await engine.resume(run_id)
    assert not calls
    assert (await home.resume(wf, run_id)).status is RunStatus.COMPLETED


async def test_one_runs_fault_is_never_its_neighbours(home: Home, calls: Calls) -> None:
    bad, good = Workflow("bad"), Workflow("good")
    calls.adder(bad)("x")
    listing(good, range(20))

    @good.node(for_each={"n": "items"})
    async def item(n: int) -> int:
        await asyncio.sleep(0)
        return n

    async with home.engine(wrap=failing(lambda _, r: r.path == "x")) as engine:
        found = await asyncio.gather(attempt(engine, bad), attempt(engine, good))
    assert isinstance(found[0], Exception)
    assert isinstance(found[1], RunResult)
    assert found[1]["item"] == list(range(20))


async def test_a_failed_start_record_means_the_body_never_began(home: Home, calls: Calls) -> None:
    """C2."""
    wf = chain(calls, idempotent=False)
    async with home.engine(wrap=failing(lambda _, r: (r.kind, r.path) == ("node.started", "b"))) as engine:
        with pytest.raises((RunFailed, StoreError)):
            await engine.run(wf)
        [info] = await engine.runs()
    assert calls == {"a": 1}
    assert info.status is not RunStatus.COMPLETED


async def test_a_store_that_raises_fails_the_run_too(home: Home, calls: Calls) -> None:
    class Raising:
        def __init__(self, inner: Store) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
            if any(record.path == "b" for unit in units for record in unit.records):
                raise RuntimeError("a bug of the store")
            return await self._inner.commit(units)

    wf = chain(calls, idempotent=True)
    async with home.engine(wrap=lambda store: Raising(store)) as engine:
        found = await attempt(engine, wf)
        assert isinstance(found, Exception)
        [info] = await engine.runs()
    assert info.status is not RunStatus.COMPLETED
    assert calls["c"] == 0


class Dying:
    """A store in front of another that fails every transaction from the nth on, as a dead process would."""

    def __init__(self, inner: Store, after: int) -> None:
        self._inner, self._left = inner, after
        self.transactions = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        """Commit while it lives."""
        if self._left <= 0:
            return [StoreFailed(StoreError("dead")) for _ in units]
        self._left -= 1
        self.transactions += 1
        return await self._inner.commit(units)


def rich(calls: Calls, *, idempotent: bool) -> Workflow:
    """Six nodes: a map, a chained map, a pure node, a retry, a join."""
    wf = Workflow("rich", idempotent=idempotent)
    listing(wf, range(3))

    @wf.node(checkpoint=False, idempotent=True)
    async def pure(items: list[int]) -> int:
        return len(items)

    @wf.node(for_each={"n": "items"})
    async def first(n: int, pure: int, ctx: Context) -> int:
        calls.began(ctx.path)
        return n + pure

    @wf.node(for_each={"x": "first"})
    async def second(x: int, ctx: Context) -> int:
        calls.began(ctx.path)
        return x * 2

    @wf.node
    async def join(second: list[int]) -> int:
        calls.began("join")
        return sum(second)

    calls.adder(wf)("beside")
    return wf


async def go_on(home: Home, wf: Workflow, run_id: str) -> tuple[RunResult, tuple[str, ...]]:
    """Resume, or retry what is refused as uncertain; gives what was refused, too."""
    async with home.engine(wf) as engine:
        try:
            return await engine.resume(run_id), ()
        except UncertainNode as error:
            refused = error.paths
        return await engine.retry(run_id), refused


@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_store_that_dies_at_every_commit(home: Home, idempotent: bool) -> None:
    """B05 in one process: whatever was committed last, the run ends with the same result, nothing done twice.

    Not idempotent: what had begun is refused and named, and a person's retry runs that alone.
    """
    reference = (await home.run(rich(Calls(), idempotent=idempotent)))["join"]
    for commits in range(1, 40):
        calls = Calls()
        wf = rich(calls, idempotent=idempotent)
        dying: list[Dying] = []

        def wrap(store: Store, commits: int = commits) -> Any:
            dying.append(Dying(store, commits))  # noqa: B023
            return dying[-1]  # noqa: B023

        async with home.engine(wrap=wrap) as engine:
            found = await attempt(engine, wf)
            newest = (await engine.runs(limit=1))[0]
        if isinstance(found, RunResult):
            assert dying[0].transactions <= commits
            assert commits > 3
            return
        assert newest.status is not RunStatus.COMPLETED
        done = {path for path, how in (await home.statuses(newest.run_id)).items() if how == "completed"}
        began = dict(calls)
        calls.clear()
        result, refused = await go_on(home, wf, newest.run_id)
        assert result.status is RunStatus.COMPLETED
        assert result["join"] == reference
        assert not done & set(result.executed) - {"pure"}
        assert set(calls.values()) <= {1}
        again = {name for name in began if calls[name]}
        assert again <= {name for name in began if name not in done}
        if not idempotent:
            assert again == began.keys() & set(refused)
        else:
            assert refused == ()
    pytest.fail("it never ended by itself")


async def test_records_of_one_path_keep_their_order(home: Home, calls: Calls) -> None:
    """A trace of a path is started, completed; attempts rise; the seq rises within a run."""
    wf = rich(calls, idempotent=False)
    run_id = (await home.run(wf)).run_id
    events = await home.events(run_id)
    assert [e.seq for e in events] == sorted({e.seq for e in events})
    by_path: dict[str, list[str]] = {}
    for event in events:
        if event.path:
            by_path.setdefault(event.path, []).append(event.kind)
    for path, kinds in by_path.items():
        assert kinds[-1] == "node.completed", path
        assert kinds.count("node.completed") == 1


async def test_success_rows_equal_executed_nodes(home: Home, calls: Calls) -> None:
    """B02's invariant."""
    wf = rich(calls, idempotent=True)
    result = await home.run(wf)
    completed = [e.path for e in await home.events(result.run_id) if e.kind == "node.completed"]
    assert sorted(path for path in completed if path and path not in {"first", "second"}) == sorted(
        result.executed
    )


def _is_start(_: Unit, record: Record) -> bool:
    return record.kind == "node.started"


async def test_late_start_records_that_fail_do_not_hang(home: Home) -> None:
    """Start records nobody waits for: their loss shows at the latest with the completion."""
    wf = Workflow("late", idempotent=True)
    gate = asyncio.Event()

    @wf.node
    async def a() -> int:
        await gate.wait()
        return 1

    stores: list[FaultyStore] = []

    def wrap(store: Store) -> Any:
        stores.append(FaultyStore(store, _is_start, lambda: StoreError("lost")))
        return stores[-1]

    async with home.engine(wrap=wrap) as engine, asyncio.timeout(10):
        handle = await engine.start(wf)
        while not stores[0].spoilt:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        gate.set()
        with pytest.raises((StoreError, RunFailed)):
            await handle.result()


async def test_what_is_queued_behind_a_lost_unit_is_not_written(home: Home, calls: Calls) -> None:
    """A failed commit poisons its run: else there is a run with a hole."""
    wf = Workflow("behind", idempotent=True)
    returned = asyncio.Event()

    class Late(FaultyStore):
        async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
            if any(record.path == "x" for unit in units for record in unit.records):
                reached.set()
                await returned.wait()
                for _ in range(10):
                    await asyncio.sleep(0)
            return await super().commit(units)

    reached = asyncio.Event()

    @wf.node
    async def x() -> int:
        return 1

    @wf.node
    async def y() -> int:
        await reached.wait()
        returned.set()
        return 2

    calls.adder(wf)("below", "y")

    def wrap(store: Store) -> Any:
        return Late(
            store, lambda _, r: (r.kind, r.path) == ("node.completed", "x"), lambda: StoreError("lost")
        )

    async with home.engine(wrap=wrap) as engine:
        with pytest.raises(RunFailed) as caught:
            await engine.run(wf)
    assert next(iter(caught.value.failures)) == "x"
    assert (await home.statuses(caught.value.run_id))["y"] != "completed"
    assert not calls


class Fussy(SystemClock):
    """A clock that does not take every time."""

    def call_later(  # type: ignore[override]  # static there
        self, seconds: float, call: Callable[..., object], *args: Any
    ) -> Any:
        if seconds == 4321:
            raise OverflowError("too long for this clock")
        return super().call_later(seconds, call, *args)


async def test_an_error_while_a_commit_is_told_of_ends_that_run_alone(home: Home) -> None:
    """Whatever goes wrong between a commit and what it unlocks: the run says so, the engine goes on."""
    odd, sound = Workflow("odd", timeout=4321, idempotent=True), Workflow("sound", idempotent=True)

    @odd.node
    @sound.node
    async def a() -> int:
        return 1

    async with home.engine(clock=Fussy()) as engine:
        with pytest.raises(OverflowError, match="too long"):
            await asyncio.wait_for(engine.run(odd), 5)
        assert (await asyncio.wait_for(engine.run(sound), 5))["a"] == 1


@pytest.mark.parametrize(("key", "window"), [(3, None), ("k" * 1001, None), ("k", -1), ("k", True)])
async def test_a_key_that_is_none(home: Home, key: Any, window: Any) -> None:
    wf = Workflow("w")
    async with home.engine(wf) as engine:
        with pytest.raises(InputError, match=r"key=|window="):
            await engine.run(wf, key=key, window=window)
