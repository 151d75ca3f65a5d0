"""Many nodes, many items: no recursion, few commits, few tasks, linear time."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest

from dagresume import Engine, RunStatus, Workflow
from dagresume.store import Store
from tests.engine.kit import Boom, CountingStore, Home, listing


def long_chain(count: int, broken: list[bool], **options: Any) -> Workflow:
    wf = Workflow(f"chain {count}", **options)

    async def body(x: int = 0) -> int:
        return x + 1

    async def last(x: int) -> int:
        if broken:
            raise Boom
        return x + 1

    for k in range(count):
        wf.node(id=f"n{k}", args={"x": f"n{k - 1}"} if k else {})(last if k == count - 1 else body)
    return wf


def counted(stores: list[CountingStore]) -> Any:
    def wrap(store: Store) -> CountingStore:
        stores.append(CountingStore(store))
        return stores[-1]

    return wrap


async def test_a_chain_of_a_thousand_takes_a_commit_per_edge(sqlite_home: Home) -> None:
    """A6, §5: not idempotent, so each start must be durable; it rides with what unlocks it."""
    stores: list[CountingStore] = []
    async with sqlite_home.engine(wrap=counted(stores)) as engine:
        result = await engine.run(long_chain(1000, []))
    assert result["n999"] == 1000
    assert len(stores[0].transactions) <= 1010
    assert result.stats.commits <= 1010
    assert result.stats.checkpoint_latency.count == 1000


async def test_a_fan_out_of_ten_thousand_groups_its_commits(sqlite_home: Home) -> None:
    """A6: at most a tenth of the nodes."""
    wf = Workflow("fan out", idempotent=True)

    async def body() -> int:
        return 1

    for k in range(10_000):
        wf.node(id=f"n{k}")(body)
    stores: list[CountingStore] = []
    async with sqlite_home.engine(wrap=counted(stores)) as engine:
        result = await engine.run(wf)
    assert len(result.outputs) == 10_000
    assert len(stores[0].transactions) <= 1000
    assert result.stats.commits <= 1000


async def test_a_fan_out_that_is_not_idempotent_groups_its_commits_too(sqlite_home: Home) -> None:
    wf = Workflow("fan out")

    async def body() -> int:
        return 1

    for k in range(2000):
        wf.node(id=f"n{k}")(body)
    stores: list[CountingStore] = []
    async with sqlite_home.engine(wrap=counted(stores)) as engine:
        result = await engine.run(wf)
    assert len(result.outputs) == 2000
    assert len(stores[0].transactions) <= 200


async def test_tiny_idempotent_nodes_cost_one_row(sqlite_home: Home) -> None:
    """§5: if its completion reaches the writer first, only the completion is written."""
    stores: list[CountingStore] = []
    async with sqlite_home.engine(wrap=counted(stores)) as engine:
        await engine.run(long_chain(200, [], idempotent=True))
    rows = [record.kind for transaction in stores[0].transactions for record in transaction]
    assert rows.count("node.completed") == 200
    assert rows.count("node.started") <= 20


async def test_a_chain_of_three_thousand_fails_near_its_end_and_resumes_there() -> None:
    """B67."""
    home = Home(None)
    broken = [True]
    wf = long_chain(3000, broken)
    first = await home.run(wf)
    assert list(first.failures) == ["n2999"]
    plan = await home.plan(wf, first.run_id)
    assert [path for path, decision in plan.items() if decision.action != "reuse"] == ["n2999"]
    broken.clear()
    result = await home.resume(wf, first.run_id)
    assert list(result.executed) == ["n2999"]
    assert len(result.reused) == 2999


async def whole_life(count: int) -> float:
    """Validate, run, fail at the end, plan, resume; gives seconds of processor time."""
    home, broken = Home(None), [True]
    gc.collect()
    started = time.process_time()
    wf = long_chain(count, broken)
    assert len(wf.graph) == count
    first = await home.run(wf)
    assert list(first.failures) == [f"n{count - 1}"]
    plan = await home.plan(wf, first.run_id)
    assert sum(decision.action == "run" for decision in plan.values()) == 1
    broken.clear()
    result = await home.resume(wf, first.run_id)
    assert list(result.executed) == [f"n{count - 1}"]
    assert len((await home.info(first.run_id)).nodes) == count
    return time.process_time() - started


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_chain_of_twenty_thousand_is_linear() -> None:
    """A6, B67: at most 2.2 times the time of ten thousand."""
    await whole_life(1000)
    gc.disable()  # when a full collection falls is chance
    try:
        small = min([await whole_life(10_000) for _ in range(3)])
        large = min([await whole_life(20_000) for _ in range(3)])
    finally:
        gc.enable()
    assert large <= 2.2 * small


async def watch(
    engine: Engine, wf: Workflow, alive: list[int], inputs: dict[str, Any] | None = None
) -> tuple[Any, int]:
    """Run and give the result and the most tasks that were alive."""
    most = 0
    before = len(asyncio.all_tasks())
    ended = asyncio.Event()

    async def look() -> None:
        nonlocal most
        while not ended.is_set():
            most = max(most, len(asyncio.all_tasks()) - before)
            await asyncio.sleep(0)

    looker = asyncio.create_task(look())
    result = await engine.run(wf, inputs)
    ended.set()
    await looker
    return result, most


async def items_map(count: int) -> None:
    wf = Workflow("map", idempotent=True)
    alive = [0, 0]

    @wf.node
    async def numbers() -> list[int]:
        return list(range(count))

    @wf.node(for_each={"n": "numbers"})
    async def item(n: int) -> int:
        alive[0] += 1
        alive[1] = max(alive)
        await asyncio.sleep(0)
        alive[0] -= 1
        return n

    @wf.node
    async def join(item: list[int]) -> int:
        assert item == list(range(count))
        return len(item)

    home = Home(None)
    async with home.engine(concurrency=16) as engine:
        result, most = await watch(engine, wf, alive)
    assert result[join] == count
    assert alive == [0, 16]
    assert most <= 16 + 20
    assert len(result.executed) == count + 2


async def test_a_map_makes_only_as_many_tasks_as_run() -> None:
    """B70, I: at most `concurrency` bodies and a few tasks of the engine."""
    await items_map(5000)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_map_of_a_hundred_thousand() -> None:
    """A6, B70."""
    await items_map(100_000)


async def test_a_chain_of_many_chained_maps_needs_no_recursion() -> None:
    """I: items that pass uncalled go all the way down, too."""
    wf = Workflow("maps", idempotent=True)

    async def body(x: int) -> int:
        return x

    @wf.node
    async def numbers() -> list[int | None]:
        return [1, None, 2]

    for k in range(1200):
        wf.node(id=f"m{k}", for_each={"x": f"m{k - 1}" if k else "numbers"})(body)
    result = await Home(None).run(wf)
    assert result.status is RunStatus.COMPLETED
    assert result["m1199"] == [1, None, 2]


async def test_a_failing_item_above_many_chained_maps_needs_no_recursion() -> None:
    wf = Workflow("maps", idempotent=True)

    async def body(x: int) -> int:
        if x == 2:
            raise Boom
        return x

    @wf.node
    async def numbers() -> list[int]:
        return [1, 2]

    for k in range(1200):
        wf.node(id=f"m{k}", for_each={"x": f"m{k - 1}" if k else "numbers"})(body)
    result = await Home(None).run(wf)
    assert list(result.failures) == ["m0[1]"]
    assert len(result.executed) == 1 + 2 + 1199


async def test_one_node_takes_thousands_of_parents() -> None:
    """No quadratic work at a join."""

    async def body() -> int:
        return 1

    async def join(**given: int) -> int:
        return sum(given.values())

    async def timed(count: int) -> float:
        wf = Workflow("join", idempotent=True)
        for k in range(count):
            wf.node(id=f"n{k}")(body)
        wf.node(args={f"x{k}": f"n{k}" for k in range(count)})(join)
        started = time.process_time()
        assert (await Home(None).run(wf))["join"] == count
        return time.process_time() - started

    await timed(200)
    gc.disable()  # when a full collection falls is chance
    try:
        small = min([await timed(500) for _ in range(4)])
        large = min([await timed(2000) for _ in range(3)])
    finally:
        gc.enable()
    assert large <= 12 * small


class ReadingStore(CountingStore):
    """A store that notes which outputs are asked for at once."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.asked: list[int] = []

    async def output(self, seqs: Sequence[int]) -> list[str | None]:
        self.asked.append(len(seqs))
        return await self._inner.output(seqs)


@pytest.mark.parametrize("mapped", [False, True])
async def test_a_resumed_join_reads_what_it_receives_in_one_question(sqlite_home: Home, mapped: bool) -> None:
    broken, given, count = [True], [], 300
    wf = Workflow("join", idempotent=True)
    text = 200 * "x"  # more than a load brings with the records

    async def body(k: int = 0) -> str:
        return f"{k} {text}"

    async def join(**parents: Any) -> int:
        if broken:
            raise Boom
        given.append(parents)
        return len(parents)

    if mapped:
        listing(wf, range(count))
        wf.node(id="n", for_each={"k": "items"})(body)
    else:
        for k in range(count):
            wf.node(id=f"n{k}")(body)
    parents = ["n"] if mapped else [f"n{k}" for k in range(count)]
    wf.node(args={f"p{parent}": parent for parent in parents})(join)
    failed = await sqlite_home.run(wf)
    broken.clear()
    stores: list[ReadingStore] = []

    def wrap(store: Store) -> ReadingStore:
        stores.append(ReadingStore(store))
        return stores[-1]

    async with sqlite_home.engine(wf, wrap=wrap) as engine:
        result = await engine.resume(failed.run_id)
    assert result.executed == ["join"]
    expected = [await body(k) for k in range(count)] if mapped else [await body()]
    assert all(value == expected if mapped else value in expected for value in given[0].values())
    assert stores[0].asked == [count]


async def test_an_item_of_a_large_map_keeps_little(sqlite_home: Home) -> None:
    """§5: at most 200 bytes beyond the same list of values, its result included."""
    values, count = list(range(10_000)), 10_000

    def made() -> Workflow:
        wf = Workflow("large", idempotent=True)
        listing(wf, values)

        @wf.node(for_each={"x": "items"})
        async def item(x: int) -> int:
            return x + 1000

        return wf

    async with sqlite_home.engine() as engine:
        await engine.run(made())  # what is kept once for all is kept now
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            result = await engine.run(made())
            given = result["item"]
            peak = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
    assert (given[-1], len(result.executed)) == (10_999, count + 1)
    assert peak / count <= 200 + 8 + 28 + 30  # a pointer and an int for each value; 300 kB of buffers
