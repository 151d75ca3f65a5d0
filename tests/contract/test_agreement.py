"""Whatever is written, in whatever order: the file and the memory store answer the same."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dagresume.contracts import LEASE, START, Clock, created, definition
from dagresume.events import Record
from dagresume.sessions import this_session
from dagresume.sqlite import SQLiteStore
from dagresume.store import (
    Claim,
    Committed,
    Inbox,
    LogLine,
    MemoryStore,
    NewRun,
    OnceRow,
    Orphaned,
    Outcome,
    Owned,
    Refused,
    Store,
    StoreFailed,
    Unique,
    Unit,
)

few = st.integers(1, 3)
epochs = st.integers(0, 3)
seqs = st.integers(0, 12)
paths = st.sampled_from([None, "a", "b"])
node_kinds = st.sampled_from(["node.completed", "node.failed", "node.started"])
run_kinds = st.sampled_from(
    [
        "run.created",
        "run.completed",
        "run.failed",
        "run.waiting",
        "run.interrupted",
        "run.cancelled",
        "run.note",
    ]
)
nodes = st.builds(
    lambda kind, path, output: Record(kind, 1, START, path, output=output),
    node_kinds,
    st.sampled_from(["a", "b", "\ud800"]),
    st.sampled_from([None, "1"]),
)
of_runs = st.builds(lambda kind: Record(kind, None, START, None), run_kinds)
records = st.lists(nodes | of_runs, max_size=3)
guards = st.one_of(
    st.builds(Owned, few, few, epochs),
    st.builds(Owned, few, few, epochs),
    st.builds(
        lambda n, key, saw, session: NewRun(f"r{n}", "w", "1", key, saw, session, "manual", "{}", b"d"),
        st.integers(1, 4),
        st.sampled_from([None, "k"]),
        st.none() | few,
        st.none() | few,
    ),
    st.builds(Claim, few, few, seqs),
    st.builds(Orphaned, few, few, epochs),
    st.builds(Inbox, few, st.none() | st.tuples(node_kinds | run_kinds, paths), seqs),
    st.builds(Unique, st.sampled_from(["n", "m"])),
)
times = st.sampled_from([START, START + 1])
once = st.builds(
    OnceRow,
    st.just("s"),
    st.sampled_from(["k", "l"]),
    st.just("a"),
    st.sampled_from(["started", "done", "free"]),
    st.sampled_from([None, "1"]),
    times,
    st.none() | times,
)
units = st.builds(
    Unit,
    guards,
    records,
    st.none() | st.sampled_from([definition("[1]"), definition("[2]", "2")]),
    st.lists(st.just(LogLine("a", 1, START, "info", "line")), max_size=1),
    st.just(()),
    st.lists(once, max_size=2),
)
steps = st.one_of(
    st.lists(units, max_size=5),
    st.lists(units, max_size=5),
    st.tuples(st.just("renew"), st.integers(0, 2)),
    st.tuples(st.just("close"), st.integers(1, 2)),
    st.just("a lease later"),
)
# Every story begins with runs that are owned, or most of what follows would be refused.
prologue = [
    Unit(NewRun(f"r{n}", "w", "1", key, None, n, "manual", "{}", b"d"), [created()])
    for n, key in ((1, "k"), (2, None))
]


def comparable(outcome: Outcome) -> Any:
    """What must be the same: the holder too, but for the uuid of its session."""
    if isinstance(outcome, StoreFailed):
        return StoreFailed
    if isinstance(outcome, Refused) and outcome.holder:
        return outcome._replace(holder=outcome.holder._replace(uuid=""))
    return outcome


async def state(store: Store) -> Any:
    seen: list[Any] = [await store.tail(0), await store.find(status=["running", "failed"])]
    for row, _ in await store.find():
        loaded = await store.load(row.run_id)
        assert loaded is not None
        outputs = await store.output([record.seq or 0 for record in loaded.records])
        seen.append((row, loaded.records, loaded.graph, outputs, await store.logs(row.run_id)))
        seen.append(loaded.holder and loaded.holder._replace(uuid=""))
    seen[1] = [row for row, _ in seen[1]]
    for key in ("k", "l"):
        found = await store.once("s", key)
        seen.append(found and (found.row, found.run_id, found.holder and found.holder._replace(uuid="")))
    return seen


async def tell(stores: list[Store], clock: Clock, story: list[Any]) -> list[Any]:
    """Let a story happen to a store with three sessions, the first of which lives long; give its answers."""
    for n, store in enumerate(stores):
        await store.open(this_session(clock.now(), LEASE if n else 1000 * LEASE))
    answers: list[Any] = [await stores[0].commit(prologue)]
    for step in story:
        if step == "a lease later":
            clock.time += LEASE + 1
        elif isinstance(step, list):
            answers.append([comparable(outcome) for outcome in await stores[0].commit(step)])
        elif step[0] == "renew":
            answers.append(stores[step[1]].renew(clock.now() + LEASE))
        else:
            await stores[step[1]].close()
    answers.append(await state(stores[0]))
    for store in stores:
        await store.close()
    return answers


@settings(max_examples=150, deadline=None)
@given(st.lists(steps, max_size=8))
def test_the_stores_answer_alike(story: list[Any]) -> None:
    async def both() -> None:
        clock = Clock()
        first = MemoryStore(clock=clock)
        memory = [first, *(MemoryStore(beside=first, clock=clock) for _ in range(2))]
        expected = await tell([*memory], clock, story)
        clock = Clock()
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder, "runs.db")
            files = [SQLiteStore(place, synchronous="normal", clock=clock) for _ in range(3)]
            found = await tell([*files], clock, story)
        assert found == expected

    asyncio.run(both())


def test_the_comparison_sees_something() -> None:
    """A story in which much is accepted, so that the property above is not about refusals alone."""

    async def one() -> None:
        clock = Clock()
        first = MemoryStore(clock=clock)
        stores: list[Store] = [first, *(MemoryStore(beside=first, clock=clock) for _ in range(2))]
        story = [
            [Unit(Owned(1, 1, 1), [Record("run.failed", None, START, None)])],
            [Unit(Claim(1, 1, 3))],
        ]
        answers = await tell(stores, clock, story)
        assert answers[:3] == [
            [Committed(1, 1, 1), Committed(2, 2, 1)],
            [Committed(3, 1, 1)],
            [Committed(0, 1, 2)],
        ]

    asyncio.run(one())
