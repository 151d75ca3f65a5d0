"""Named limits: shared by nodes and runs, fair to long chains, paused for everybody, and free again."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from dagresume import Limit, Retry, RetryAfter, RunCancelled, RunStatus, Workflow
from dagresume.store import Store
from dagresume.testing import FakeClock
from tests.engine.kit import Home, SlowStore, settle

TICK = 0.02  # real seconds of quiet before the fake clock jumps
CHAIN, WIDE = 10, 500


class Jumping(FakeClock):
    """A clock that jumps to what is next, and a nanosecond further: sums of fractions may fall short."""

    def __init__(self) -> None:
        super().__init__(autojump=TICK)

    def advance(self, seconds: float) -> None:
        super().advance(seconds + 1e-9)
        self._expect_quiet()  # a call that was due sets off no further jump by itself


class Inside:
    """Counts in the bodies themselves how many are inside at once, and when they began."""

    def __init__(self, clock: FakeClock | None = None) -> None:
        self.clock = clock
        self.now = self.most = 0
        self.began: list[tuple[str, float]] = []
        self.count = Counter[str]()

    async def __call__(self, name: str, turns: int = 3, seconds: float = 0.0) -> None:
        self.began.append((name, self.clock.monotonic() if self.clock else 0.0))
        self.count[name] += 1
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            for _ in range(turns):
                await asyncio.sleep(seconds)
        finally:
            self.now -= 1


def two_maps(name: str, inside: Inside, *, idempotent: bool) -> Workflow:
    """Two maps and a node of its own, all behind one limit."""
    wf = Workflow(name, idempotent=idempotent)

    @wf.node(for_each={"x": "xs"}, limit="llm")
    async def left(x: int) -> int:
        await inside(f"{name}.left")
        return x

    @wf.node(for_each={"x": "xs"}, limit="llm")
    async def right(x: int) -> int:
        await inside(f"{name}.right", turns=1)
        return x

    @wf.node(limit="llm")
    async def alone() -> None:
        await inside(f"{name}.alone", turns=5)

    return wf


@pytest.mark.parametrize("idempotent", [True, False])
@pytest.mark.parametrize("most", [1, 3, 8])
async def test_concurrency_is_shared_by_nodes_and_runs(home: Home, most: int, idempotent: bool) -> None:
    """Three nodes in each of two runs: together never more than the limit, and all of it is used."""
    inside = Inside()
    one, two = (two_maps(name, inside, idempotent=idempotent) for name in ("one", "two"))
    xs = {"xs": list(range(20))}
    async with home.engine(limits={"llm": Limit(concurrency=most)}) as engine:
        results = await asyncio.gather(engine.run(one, xs), engine.run(two, xs), engine.run(two, xs))
    assert {result.status for result in results} == {RunStatus.COMPLETED}
    assert inside.most == most
    assert len(inside.began) == 3 * 41


@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_rate_is_shared_by_nodes_and_runs(home: Home, idempotent: bool) -> None:
    """One begins each tenth of a second, over everything that names the limit; and not later."""
    clock = Jumping()
    inside = Inside(clock)
    one, two = (two_maps(name, inside, idempotent=idempotent) for name in ("one", "two"))
    async with home.engine(limits={"llm": Limit(rate="10/second")}, clock=clock) as engine:
        await asyncio.gather(engine.run(one, {"xs": [1, 2, 3, 4]}), engine.run(two, {"xs": [1, 2, 3, 4]}))
    at = [time for _, time in inside.began]
    assert len(at) == 18
    gaps = [later - earlier for earlier, later in pairwise(at)]
    assert min(gaps) >= 0.1 - 1e-6
    assert max(gaps) <= 0.1 + 1e-6


async def test_concurrency_and_rate_hold_together(home: Home) -> None:
    """Each begins a tenth of a second after the other, and the third waits for the end of the first."""
    clock = Jumping()
    inside = Inside(clock)
    wf = Workflow("both", idempotent=True)

    @wf.node(for_each={"x": "xs"}, limit="llm")
    async def slow(x: int) -> None:
        await inside("slow", turns=0)
        inside.now += 1
        inside.most = max(inside.most, inside.now)
        await clock.sleep(1.0)
        inside.now -= 1

    async with home.engine(limits={"llm": Limit(concurrency=2, rate="10/second")}, clock=clock) as engine:
        await engine.run(wf, {"xs": list(range(6))})
    at = [round(time, 3) for _, time in inside.began]
    assert at == [0.0, 0.1, 1.0, 1.1, 2.0, 2.1]


# -- pauses ---------------------------------------------------------------------------------------------


def busy_once(name: str, inside: Inside, busy: set[str], clock: FakeClock, retry: Retry) -> Workflow:
    """Two maps behind one limit; the first body of each name in `busy` is asked to come back in 30 s."""
    wf = Workflow(name, idempotent=True, retry=retry)

    def add(id: str) -> None:
        @wf.node(id=id, for_each={"x": "xs"}, limit="llm")
        async def each(x: int) -> int:
            await inside(f"{name}.{id}", turns=0)
            await clock.sleep(0.5)
            if f"{name}.{id}" in busy:
                busy.discard(f"{name}.{id}")
                inside.began.append(("busy", clock.monotonic()))
                raise RetryAfter(30)
            return x

    add("left")
    add("right")
    return wf


def begun_in_the_pause(inside: Inside, seconds: float = 30.0) -> list[tuple[str, float]]:
    """Give what began after somebody was asked to wait, and before that was over."""
    [(_, at)] = [each for each in inside.began if each[0] == "busy"]
    place = inside.began.index(("busy", at))
    return [each for each in inside.began[place + 1 :] if each[1] < at + seconds - 1e-6]


async def test_retry_after_pauses_every_node_of_every_run(home: Home) -> None:
    """The other side asks one for 30 s: nothing behind the limit begins before they are over."""
    clock = Jumping()
    inside, busy = Inside(clock), {"one.left"}
    one, two = (busy_once(name, inside, busy, clock, Retry(2, delay=0)) for name in ("one", "two"))
    xs = {"xs": [1, 2, 3, 4]}
    async with home.engine(limits={"llm": Limit(concurrency=3)}, clock=clock) as engine:
        await asyncio.gather(engine.run(one, xs), engine.run(two, xs))
    assert begun_in_the_pause(inside) == []
    assert sum(inside.count.values()) == 16 + 1
    assert clock.monotonic() < 30 + 5


async def test_retry_after_pauses_although_the_try_was_the_last(home: Home) -> None:
    """The item has failed for good; the other side asks to be left alone all the same."""
    clock = Jumping()
    inside, busy = Inside(clock), {"one.left"}
    one, two = (busy_once(name, inside, busy, clock, Retry(1)) for name in ("one", "two"))
    xs = {"xs": [1, 2, 3, 4]}
    async with home.engine(limits={"llm": Limit(concurrency=3)}, clock=clock) as engine:
        first, second = await asyncio.gather(engine.run(one, xs, raise_on_failure=False), engine.run(two, xs))
    assert (first.status, second.status) == (RunStatus.FAILED, RunStatus.COMPLETED)
    assert begun_in_the_pause(inside) == []


async def test_what_waits_for_its_start_record_does_not_begin_in_a_pause(home: Home) -> None:
    """Not idempotent: its turn had come, its start record was being written, and then came the pause."""
    begun, ask, asked = dict[int, float](), asyncio.Event(), list[float]()
    wf = Workflow("late")

    @wf.node(for_each={"x": "xs"}, limit="llm", retry=Retry(2, delay=0))
    async def each(x: int) -> None:
        begun.setdefault(x, time.monotonic())
        if x == 1 and not asked:
            await ask.wait()
            asked.append(time.monotonic())
            raise RetryAfter(0.5)

    stores: list[SlowStore] = []

    def slow(inner: Store) -> Any:
        stores.append(SlowStore(inner, lambda unit, record: record.path == "each[2]"))
        return stores[0]

    async with home.engine(wrap=slow, limits={"llm": Limit(concurrency=2)}) as engine:
        handle = await engine.start(wf, {"xs": [0, 1, 2]})
        await stores[0].reached.wait()
        ask.set()
        await settle(lambda: bool(asked))
        await asyncio.sleep(0.01)
        stores[0].gate.set()
        await handle.result()
    assert begun[2] >= asked[0] + 0.5


async def test_a_pause_does_not_hold_what_has_no_limit(home: Home) -> None:
    """Who does not ask the other side goes on."""
    clock = Jumping()
    inside, busy = Inside(clock), {"one.left"}
    one = busy_once("one", inside, busy, clock, Retry(2, delay=0))

    @one.node
    async def elsewhere() -> float:
        await clock.sleep(1.0)
        return clock.monotonic()

    @one.node
    async def further(elsewhere: float) -> float:
        return clock.monotonic()

    async with home.engine(limits={"llm": Limit(concurrency=3)}, clock=clock) as engine:
        result = await engine.run(one, {"xs": [1, 2]})
    assert result[further] < 2
    assert clock.monotonic() > 30


# -- fairness -------------------------------------------------------------------------------------------


def chain_beside_a_map(
    inside: Inside, *, idempotent: bool, map_first: bool, seconds: float = 0.0
) -> Workflow:
    """A chain of ten and a map of five hundred behind one limit."""
    wf = Workflow("beside", idempotent=idempotent)

    def add_map() -> None:
        @wf.node(for_each={"x": "xs"}, limit="llm")
        async def wide(x: int) -> int:
            await inside("wide", turns=1, seconds=seconds)
            return x

    def add_chain() -> None:
        for n in range(CHAIN):
            add_link(f"c{n}", [f"c{n - 1}"] if n else [])

    def add_link(name: str, above: list[str]) -> None:
        @wf.node(id=name, depends_on=above, limit="llm")
        async def link() -> None:
            await inside(name, turns=1, seconds=seconds)

    for add in (add_map, add_chain) if map_first else (add_chain, add_map):
        add()
    return wf


@pytest.mark.parametrize("idempotent", [True, False])
@pytest.mark.parametrize("map_first", [True, False])
@pytest.mark.parametrize("most", [1, 4])
async def test_a_wide_map_does_not_starve_a_chain(
    home: Home, most: int, map_first: bool, idempotent: bool
) -> None:
    """B13's neighbour: the critical path gets its turn: ten links end while the map has hardly begun."""
    inside = Inside()
    wf = chain_beside_a_map(inside, idempotent=idempotent, map_first=map_first, seconds=0.004)
    async with home.engine(limits={"llm": Limit(concurrency=most)}) as engine:
        await engine.run(wf, {"xs": list(range(WIDE))})
    names = [name for name, _ in inside.began]
    before = names.index(f"c{CHAIN - 1}") - CHAIN + 1
    print(f"limit {most}: {before} of {WIDE} items had begun when the last of {CHAIN} links did")
    assert names.count("wide") == WIDE
    assert before <= 4 * CHAIN * most


async def test_a_wide_map_does_not_starve_a_chain_behind_a_rate(home: Home) -> None:
    """Every second turn is the chain's."""
    clock = Jumping()
    inside = Inside(clock)
    wf = chain_beside_a_map(inside, idempotent=True, map_first=True)
    async with home.engine(limits={"llm": Limit(rate="100/second")}, clock=clock) as engine:
        await engine.run(wf, {"xs": list(range(40))})
    names = [name for name, _ in inside.began]
    before = names.index(f"c{CHAIN - 1}") - CHAIN + 1
    print(f"rate: {before} of 40 items had begun when the last of {CHAIN} links did")
    assert before <= 2 * CHAIN


async def test_a_wide_run_does_not_starve_a_small_one(home: Home) -> None:
    """Two runs of one engine behind one limit: the small one that came later is done long before."""
    inside = Inside()
    wide, small = (Workflow(name, idempotent=True) for name in ("wide", "small"))
    for wf in (wide, small):

        @wf.node(for_each={"x": "xs"}, limit="llm")
        async def each(x: int, name: str) -> None:
            await inside(name, turns=1, seconds=0.004)

    async with home.engine(limits={"llm": Limit(concurrency=2)}) as engine:
        handle = await engine.start(wide, {"xs": list(range(WIDE)), "name": "wide"})
        await settle(lambda: inside.count["wide"] > 3)
        await engine.run(small, {"xs": list(range(10)), "name": "small"})
        had_begun = inside.count["wide"]
        await handle.result()
    print(f"{had_begun} of {WIDE} items of the wide run had begun when the small one was done")
    assert had_begun < WIDE / 5


# -- leaving the queue ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancelled", "caller cancelled"])
@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_run_that_is_cancelled_in_the_queue_leaves_nothing_behind(
    home: Home, idempotent: bool, how: str
) -> None:
    """Nothing of it began, no task is left of it, and the whole limit is free again."""
    gate, inside = asyncio.Event(), Inside()
    wf = Workflow("holds", idempotent=idempotent)

    @wf.node(for_each={"x": "xs"}, limit="llm")
    async def holds(x: int) -> None:
        await inside("holds")
        await gate.wait()

    queued = two_maps("queued", inside, idempotent=idempotent)
    async with home.engine(limits={"llm": Limit(concurrency=2)}) as engine:
        before = asyncio.all_tasks()
        holder = await engine.start(wf, {"xs": [1, 2]})
        await settle(lambda: inside.count["holds"] == 2)
        running = asyncio.all_tasks()
        handle = await engine.start(queued, {"xs": list(range(20))})
        if how == "cancelled":
            await handle.cancel()
            with pytest.raises(RunCancelled):
                await handle.result()
        else:
            task = asyncio.create_task(engine.run(queued, {"xs": list(range(20))}))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await handle.cancel()
        await settle(lambda: asyncio.all_tasks() <= running | {asyncio.current_task()})
        assert set(inside.count) == {"holds"}
        gate.set()
        await holder.result()
        inside.most = 0
        again = await engine.run(two_maps("later", inside, idempotent=idempotent), {"xs": list(range(20))})
        assert again.status is RunStatus.COMPLETED
        assert inside.most == 2
        await settle(lambda: asyncio.all_tasks() <= before)
    assert not [name for name in inside.count if name.startswith("queued")]


async def test_cancelling_one_that_waits_for_a_rate_leaves_nothing_behind(home: Home) -> None:
    """The timer of the limit is nobody's: the next run waits for its turn, and no longer."""
    clock = FakeClock()
    inside = Inside(clock)
    first, second = (two_maps(name, inside, idempotent=True) for name in ("first", "second"))
    async with home.engine(limits={"llm": Limit(rate="1/minute")}, clock=clock) as engine:
        handle = await engine.start(first, {"xs": [1, 2, 3]})
        await settle(lambda: len(inside.began) == 1)
        await handle.cancel()
        later = await engine.start(second, {"xs": []})
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(inside.began) == 1
        clock.advance(60)
        await later.result()
    assert [(name.partition(".")[0], at) for name, at in inside.began] == [("first", 0.0), ("second", 60.0)]


async def test_leaving_the_engine_with_a_full_queue_is_quick(home: Home) -> None:
    """What waits for its turn is left as it is; the run is resumed where it stood."""
    clock = FakeClock()
    inside = Inside(clock)
    wf = two_maps("left", inside, idempotent=True)
    async with home.engine(limits={"llm": Limit(rate="1/minute")}, clock=clock, grace_seconds=0) as engine:
        handle = await engine.start(wf, {"xs": [1, 2, 3]})
        await settle(lambda: len(inside.began) == 1 and not inside.now)
        run_id = handle.run_id
    assert (await home.info(run_id)).status is RunStatus.INTERRUPTED
    async with home.engine(wf, limits={"llm": Limit()}) as engine:
        result = await engine.resume(run_id)
    assert result.status is RunStatus.COMPLETED
    assert sum(inside.count.values()) == 7
