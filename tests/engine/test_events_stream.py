"""The journal as people read it."""

from __future__ import annotations

import asyncio

from dagresume import Event, Workflow
from tests.engine.kit import Calls, Home, settle


def two(calls: Calls) -> Workflow:
    wf = Workflow("two")
    add = calls.adder(wf)
    add("a")
    add("b", "a")
    return wf


async def test_events_come_in_order_and_can_be_taken_up_again(home: Home, calls: Calls) -> None:
    run_id = (await home.run(two(calls))).run_id
    events = await home.events(run_id)
    assert [(e.kind, e.path) for e in events] == [
        ("run.created", None),
        ("node.started", "a"),
        ("node.completed", "a"),
        ("node.started", "b"),
        ("node.completed", "b"),
        ("run.completed", None),
    ]
    assert all(e.run_id == run_id for e in events)
    assert [e.seq for e in events] == sorted(e.seq for e in events)
    async with home.engine() as engine:
        for n, event in enumerate(events):
            assert [e async for e in engine.events(run_id, after=event.seq)] == events[n + 1 :]


async def test_events_of_all_runs(home: Home, calls: Calls) -> None:
    first, second = (await home.run(two(calls))).run_id, (await home.run(two(calls))).run_id
    async with home.engine() as engine:
        found = [e.run_id async for e in engine.events()]
    assert set(found) == {first, second}
    assert found == sorted(found, key=[first, second].index)


async def test_followed_events_come_as_they_happen_also_from_elsewhere(home: Home, calls: Calls) -> None:
    gate = asyncio.Event()
    wf = Workflow("gated")

    @wf.node
    async def a() -> None:
        calls.began("a")
        await gate.wait()

    async with home.engine() as engine, home.engine() as other:
        handle = await engine.start(wf)
        seen: list[Event] = []

        async def follow() -> None:
            async for event in other.events(handle.run_id, follow=True):
                seen.append(event)
                if event.kind == "run.completed":
                    return

        follower = asyncio.create_task(follow())
        await settle(lambda: calls["a"] == 1)
        while "node.started" not in [event.kind for event in seen]:  # noqa: ASYNC110  # bounded by the test's timeout
            await asyncio.sleep(0.01)
        assert not follower.done()
        gate.set()
        await handle.result()
        async with asyncio.timeout(5):
            await follower
    assert [event.kind for event in seen][-2:] == ["node.completed", "run.completed"]


async def test_an_iteration_that_is_left_blocks_nobody(home: Home, calls: Calls) -> None:
    """B19: no open cursor, no lock."""
    run_id = (await home.run(two(calls))).run_id
    async with home.engine() as engine, asyncio.timeout(5):
        stream = engine.events(run_id)
        await anext(stream)
        assert (await engine.run(two(calls))).outputs["b"] == "b"


async def test_long_journals_come_in_pages(home: Home) -> None:
    wf = Workflow("long", idempotent=True)

    async def body() -> None: ...

    for k in range(2500):
        wf.node(id=f"n{k}")(body)
    run_id = (await home.run(wf)).run_id
    events = await home.events(run_id)
    assert sum(event.kind == "node.completed" for event in events) == 2500
    assert len({event.seq for event in events}) == len(events)
