"""How the journal puts units together: in their order, and a run's end apart from what may yet fail."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagresume.clock import SystemClock
from dagresume.events import Record, run_record
from dagresume.journal import MAX_ROWS, Entry, Journal
from dagresume.store import Committed, Outcome, Owned, Store, Unit


class Run:
    """A writer of units."""

    def __init__(self, number: int) -> None:
        self.owned, self.poisoned = Owned(number, 1, 1), False

    def not_written(self, outcome: Outcome, records: Sequence[Record]) -> None:
        raise AssertionError(outcome)


class Noted(Entry):
    """A unit that notes when it is told."""

    __slots__ = ("name", "told")

    def __init__(self, run: Run, name: str, told: list[str], *, concludes: bool = False) -> None:
        super().__init__(run.owned, [run_record("run.note", 1)])
        self.run, self.name, self.told, self.concludes = run, name, told, concludes

    def delivered(self, outcome: Outcome) -> None:
        assert isinstance(outcome, Committed)
        self.told.append(self.name)


class Transactions:
    """A store that keeps the names of the units of each transaction."""

    def __init__(self) -> None:
        self.found: list[list[str]] = []

    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        self.found.append([cast("Noted", unit).name for unit in units])
        await asyncio.sleep(0)
        return [Committed(1, 1, 1) for _ in units]


def journal_to(store: Transactions, *, more_to_come: bool = False) -> Journal:
    return Journal(
        cast("Store", store),
        SystemClock(),
        more_to_come=lambda: more_to_come,
        after_batch=lambda: None,
        on_cancel=lambda: None,
    )


async def written(entries: Sequence[Noted]) -> list[list[str]]:
    """Hand over units at once; gives the transactions they went in."""
    store = Transactions()
    journal = journal_to(store)
    for entry in entries:
        journal.append(entry)
    journal.close()
    await journal.write()
    assert journal.waiting == 0
    return store.found


async def test_a_run_that_ends_waits_for_the_next_transaction_and_its_neighbours_do_not() -> None:
    one, two, told = Run(1), Run(2), list[str]()
    found = await written(
        [
            Noted(one, "1a", told),
            Noted(one, "1 ends", told, concludes=True),
            Noted(two, "2a", told),
            Noted(one, "1 after", told),
            Noted(two, "2 ends", told, concludes=True),
        ]
    )
    assert found == [["1a", "2a"], ["1 ends", "1 after", "2 ends"]]
    assert told == ["1a", "2a", "1 ends", "1 after", "2 ends"]


async def test_an_end_that_stands_alone_goes_at_once() -> None:
    one, two, told = Run(1), Run(2), list[str]()
    ends = [Noted(run, f"{run.owned.run} ends", told, concludes=True) for run in (one, two)]
    assert await written(ends) == [["1 ends", "2 ends"]]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_whatever_comes_each_run_is_written_in_its_order_and_ends_apart(what: list[tuple[int, bool]]) -> None:
    runs, told = [Run(number) for number in range(4)], list[str]()
    entries = [
        Noted(runs[run], f"{run}.{place}", told, concludes=ends) for place, (run, ends) in enumerate(what)
    ]
    found = asyncio.run(written(entries))
    ends = {entry.name for entry in entries if entry.concludes}
    assert sorted(told) == sorted(entry.name for entry in entries), "each is told once"
    for run in range(4):
        mine = [name for name in told if name.startswith(f"{run}.")]
        assert mine == [entry.name for entry in entries if entry.name.startswith(f"{run}.")]
        for batch in found:
            of_run = [name for name in batch if name.startswith(f"{run}.")]
            assert not ends & set(of_run[1:]), "nothing of the run stands before its end"


async def test_a_long_queue_is_written_in_few_transactions() -> None:
    told: list[str] = []
    many = [Noted(Run(number), str(number), told, concludes=True) for number in range(3 * MAX_ROWS)]
    assert [len(batch) for batch in await written(many)] == [MAX_ROWS] * 3


@pytest.mark.parametrize("more_to_come", [True, False])
async def test_what_ends_a_turn_later_shares_the_commit_while_bodies_run(more_to_come: bool) -> None:
    store, told, run = Transactions(), list[str](), Run(1)
    journal = journal_to(store, more_to_come=more_to_come)
    writing = asyncio.create_task(journal.write())
    await asyncio.sleep(0)
    journal.append(Noted(run, "first", told))
    await asyncio.sleep(0)  # the writer wakes
    journal.append(Noted(run, "a turn later", told))
    journal.close()
    await writing
    together = [["first", "a turn later"]]
    assert store.found == (together if more_to_come else [["first"], ["a turn later"]])


@pytest.mark.parametrize("reason", ["poisoned"])
async def test_what_a_poisoned_run_has_queued_is_refused(reason: str) -> None:
    run, outcomes = Run(1), list[Any]()

    class Told(Noted):
        __slots__ = ()

        def delivered(self, outcome: Outcome) -> None:
            outcomes.append(outcome)

    run.poisoned = True
    assert await written([Told(run, "a", []), Told(run, "ends", [], concludes=True)]) == []
    assert [outcome.reason for outcome in outcomes] == [reason] * 2
