"""Whatever sessions do to a store, in whatever order, living, late or dead: it answers as its contract says.

A state machine drives the model, a memory store and a file side by side, three sessions on each.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as play

from dagresume import writer
from dagresume.contracts import LEASE, SECOND, START, Clock
from dagresume.events import Record, node_record, projection, run_record
from dagresume.sessions import is_alive, this_session
from dagresume.sqlite import SQLiteStore
from dagresume.store import (
    Claim,
    Definition,
    Inbox,
    LogLine,
    MemoryStore,
    NewRun,
    OnceRow,
    Orphaned,
    Owned,
    Refused,
    SqlFailed,
    Store,
    StoreFailed,
    Unique,
    Unit,
    revival,
)
from tests.property.store_model import Failed, Model

STEPS, QUICK, MUTANT = 50_000, 900, 3_000
STORY = 60
SLOTS = 3

numbers = st.integers(0, 63)
few = st.integers(0, 7)
ENDS = ["run.completed", "run.failed", "run.waiting", "run.interrupted", "run.cancelled", "run.rolled_back"]
KINDS = ["node.started", "node.completed", "node.failed", "node.skipped", "node.reset", "node.waiting"]
LETTERS = ["node.decided", "node.resolved", "run.signalled", "run.cancel_requested"]
DEFINITIONS = [
    Definition("w", version, version.encode(), f'{{"v": {version}}}', (("a", "function"),))
    for version in ("1", "2")
]


class Soul:
    """A process whose number a session has, so that the session dies with it. It ends with us at the latest:
    it reads from a pipe of ours.
    """

    def __init__(self) -> None:
        there, self._here = os.pipe()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        actions = [(os.POSIX_SPAWN_DUP2, there, 0), *((os.POSIX_SPAWN_DUP2, nowhere, n) for n in (1, 2))]
        self.pid = os.posix_spawn("/bin/cat", ["cat"], {}, file_actions=actions)
        os.close(there)
        os.close(nowhere)

    def die(self) -> None:
        """Kill it and wait until it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._here)


class StoreMachine(RuleBasedStateMachine):
    """One file and one memory, three sessions on each, and what they are to answer."""

    tally: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.clock = Clock()
        self.model = Model(START)
        self.book = MemoryStore(clock=self.clock)
        self.slots: list[tuple[int, Store, Store, Soul | None] | None] = [None] * SLOTS
        self.made = 0
        self.touched: set[int] = set()

    @initialize(souls=st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS))
    def begin(self, souls: list[bool]) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.file = Path(self.folder.name, "runs.db")
        for slot, mortal in enumerate(souls):
            self._enter(slot, mortal)
        for slot in range(SLOTS):
            self._commit(slot, [self._new(slot, slot, 0, 0)])

    def teardown(self) -> None:
        if self.loop is None:
            return  # it never began
        with contextlib.ExitStack() as stack:
            stack.callback(self.folder.cleanup)
            stack.callback(self.loop.close)
            for slot in self._inside:
                stack.callback(self._leave, slot, dies=False)
            self._look_at_everything()

    # -- sessions -------------------------------------------------------------------------------------

    def _do(self, work: Awaitable[Any]) -> Any:
        assert self.loop is not None
        return self.loop.run_until_complete(work)

    def _enter(self, slot: int, mortal: bool) -> None:
        soul = Soul() if mortal else None
        memory = MemoryStore(beside=self.book, clock=self.clock)
        file = SQLiteStore(self.file, synchronous="normal", clock=self.clock)
        facts = this_session(self.clock.now(), LEASE * (1 + 9 * (slot == 0)))
        if soul is not None:
            stat = Path(f"/proc/{soul.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            facts = facts._replace(pid=soul.pid, pid_started=int(stat[19]))
        number = self.model.enter(facts)
        assert self._do(memory.open(facts)) == number
        assert self._do(file.open(facts)) == number
        self.slots[slot] = number, memory, file, soul

    def _leave(self, slot: int, *, dies: bool) -> None:
        """End a session: in good order, or by the death of its process."""
        number, memory, file, soul = self._at(slot)
        self.slots[slot] = None
        self.model.sessions[number].gone = True
        self._do(memory.close())  # what shares a process with others does not die alone
        if dies and soul is not None:
            soul.die()
            letting_go = threading.Thread(target=file.abandon)  # as the thread of the lease does
            letting_go.start()
            letting_go.join()
            return
        self._do(file.close())
        if soul is not None:
            soul.die()

    def _at(self, slot: int) -> tuple[int, Store, Store, Soul | None]:
        found = self.slots[slot]
        assert found is not None
        return found

    def _stores(self, wanted: int) -> tuple[Store, Store]:
        _, memory, file, _ = self._at(self._slot(wanted))
        return memory, file

    def _slot(self, wanted: int) -> int:
        """Give a slot that is taken, this one if it is."""
        return next(n % SLOTS for n in range(wanted, wanted + SLOTS) if self.slots[n % SLOTS] is not None)

    @property
    def _inside(self) -> list[int]:
        return [n for n in range(SLOTS) if self.slots[n] is not None]

    # -- making units ---------------------------------------------------------------------------------

    def _run(self, a: int) -> int:
        """Give the number of a run; now and then one that is not there."""
        known = len(self.model.runs)
        return known + 1 if a == 63 or not known else 1 + a % known

    def _new(self, slot: int, a: int, b: int, c: int) -> Unit:
        key = [None, "k", "l"][a % 3]
        same = self.model.of_key("w", key)
        saw = same[-1].number if same else None
        if c == 7:
            saw = None if saw else 1
        self.made += 1
        name = f"r{self.made}" if b != 63 else "r1"
        session = None if c == 6 else self._at(slot)[0]
        guard = NewRun(name, "w", "1", key, saw, session, "manual", "{}", b"d" * 16)
        records = [run_record("run.created", self.clock.now())]
        if c == 5:
            records.append(run_record("run.completed", self.clock.now()))
        return Unit(guard, records, DEFINITIONS[0] if b % 2 else None)

    def _owned(self, slot: int, a: int, b: int, c: int) -> Owned:
        """Give the guard of whoever owns the run, or one that is a little wrong."""
        number = self._run(a)
        run = self.model.runs.get(number)
        session = run.owner if run and run.owner else self._at(slot)[0]
        epoch = run.epoch if run else 1
        if b >= 56:
            session, epoch = [(self._at(slot)[0], epoch), (session, epoch + 1), (session, epoch - 1)][b % 3]
        return Owned(number, session, epoch)

    def _write(self, slot: int, a: int, b: int, c: int) -> Unit:
        paths = ["a", "b", "m[0]", "m[1]/c"]
        at = self.clock.now()
        records = [
            node_record(KINDS[(b + n) % len(KINDS)], paths[(a + n) % 4], 1 + b % 3, at)._replace(
                output=f"{b}" if KINDS[(b + n) % len(KINDS)] == "node.completed" else None
            )
            for n in range(c % 4)
        ]
        return Unit(self._owned(slot, a, b, c), records)

    def _end(self, slot: int, a: int, b: int, c: int) -> Unit:
        guard = self._owned(slot, a, b, c)
        at, kind = self.clock.now(), ENDS[c % len(ENDS)]
        facts: dict[str, Any] = {}
        if kind == "run.waiting":
            run = self.model.runs.get(guard.run)
            facts = {"wake_at": at + b * SECOND, "read": run.last if run and b % 2 else 0}
        records = [run_record(kind, at, "why" if b % 3 else None, **facts)]
        if c == 7:
            records = [node_record("node.completed", "a", 1, at)._replace(output="7"), *records]
        return Unit(guard, records)

    def _claim(self, slot: int, a: int, b: int, c: int) -> Unit:
        number = self._run(a)
        run = self.model.runs.get(number)
        seen = max(0, (run.last if run else 0) - (b == 63))
        kind = ["run.claimed"] * 6 + ["run.rolling_back", "run.cancelled"]
        guard = Claim(number, self._at(slot)[0], seen, takes_key=c != 6)
        return Unit(guard, [run_record(kind[c], self.clock.now())], DEFINITIONS[1] if b == 1 else None)

    def _orphan(self, slot: int, a: int, b: int, c: int) -> Unit:
        owned = self._owned(slot, a, b, c)
        guard = Orphaned(owned.run, owned.session, owned.epoch)
        return Unit(guard, [run_record("run.interrupted", self.clock.now(), "orphaned")])

    def _letter(self, slot: int, a: int, b: int, c: int) -> Unit:
        number = self._run(a)
        kind = LETTERS[b % 4]
        path = "ab"[b // 4 % 2] if kind.startswith("node") else None
        run = self.model.runs.get(number)
        after = [0, run.last if run else 0, max(0, (run.last if run else 0) - 3)][c % 3]
        record = Record(kind, None, self.clock.now(), path, data='{"by": "me"}', output=str(b))
        return Unit(Inbox(number, (kind, path) if c < 6 else None, after), [record])

    def _call(self, slot: int, a: int, b: int, c: int) -> Unit:
        key = "kl"[b % 2]
        known = self.model.once.get(("s", key))
        saw = known[1].at if known else None
        if c == 7:
            saw = START - 1 if saw is None else None
        at = self.clock.now() + len(self.model.journal)  # a row is known by its time
        row = OnceRow("s", key, "a", ["started", "done", "free"][c % 3], str(b), at, saw)
        return Unit(self._owned(slot, a, b, c), [], once=[row])

    def _log(self, slot: int, a: int, b: int, c: int) -> Unit:
        lines = [LogLine("a", 1, self.clock.now(), "info", f"{b} {n}") for n in range(c % 3 + 1)]
        return Unit(self._owned(slot, a, b, c), [], logs=lines)

    def _unique(self, slot: int, a: int, b: int, c: int) -> Unit:
        return Unit(Unique(f"tick {a % 12}"))

    def _spoilt(self, slot: int, a: int, b: int, c: int) -> Unit:
        unit = self._write(slot, a, b, max(c, 1))
        if c % 2:
            return replace(unit, sql=[("SELECT * FROM nowhere", [])])
        return replace(unit, records=[*unit.records, Record("node.failed", 1, START, "\ud800")])

    makers: ClassVar[list[Callable[..., Unit]]] = [
        _new, _write, _write, _write, _end, _claim, _orphan, _letter, _call, _log, _unique, _spoilt,
    ]  # fmt: skip

    # -- what is done to all three --------------------------------------------------------------------

    def _commit(self, slot: int, units: list[Unit]) -> None:
        _, memory, file, _ = self._at(slot)
        expected = self.model.commit(units)
        for store in (memory, file):
            found = self._do(store.commit(units))
            assert [_plain(o) for o in found] == expected, f"{store.name}: {found}, not {expected}: {units}"
        refused = [o.reason for o in expected if isinstance(o, Refused)]
        self.tally.update(f"refused: {reason}" for reason in refused)
        self.tally["units"] += len(units)
        self.touched |= {getattr(unit.guard, "run", 0) for unit in units} | {len(self.model.runs)}

    def _act(self, name: str, maker: Callable[..., Unit], slot: int, a: int, b: int, c: int) -> None:
        self.tally[name] += 1
        slot = self._slot(slot)
        self._commit(slot, [maker(self, slot, a, b, c)])

    @rule(slot=few, a=numbers, b=numbers, c=few)
    def start(self, slot: int, a: int, b: int, c: int) -> None:
        self._act("start", StoreMachine._new, slot, a, b, c)

    @rule(slot=few, a=numbers, b=numbers, c=few)
    def write(self, slot: int, a: int, b: int, c: int) -> None:
        self._act("write", StoreMachine._write, slot, a, b, c)

    @rule(slot=few, a=numbers, b=numbers, c=few)
    def end(self, slot: int, a: int, b: int, c: int) -> None:
        self._act("end", StoreMachine._end, slot, a, b, c)

    @rule(slot=few, a=numbers, b=numbers, c=few)
    def claim(self, slot: int, a: int, b: int, c: int) -> None:
        self._act("claim", StoreMachine._claim, slot, a, b, c)

    @rule(slot=few, a=numbers, b=numbers, c=few)
    def mark_orphan(self, slot: int, a: int, b: int, c: int) -> None:
        self._act("mark orphan", StoreMachine._orphan, slot, a, b, c)

    @rule(slot=few, a=numbers, b=numbers, c=few)
    def send_letter(self, slot: int, a: int, b: int, c: int) -> None:
        self._act("letter", StoreMachine._letter, slot, a, b, c)

    @rule(slot=few, a=numbers, b=numbers, c=few)
    def call_once(self, slot: int, a: int, b: int, c: int) -> None:
        self._act("call once", StoreMachine._call, slot, a, b, c)

    @rule(slot=few, a=numbers, b=numbers, c=few)
    def say(self, slot: int, a: int, b: int, c: int) -> None:
        self._act("log", StoreMachine._log, slot, a, b, c)

    @rule(slot=few, a=numbers)
    def tick(self, slot: int, a: int) -> None:
        self._act("unique", StoreMachine._unique, slot, a, 0, 0)

    @rule(slot=few, a=numbers, b=numbers, c=few)
    def spoil(self, slot: int, a: int, b: int, c: int) -> None:
        self._act("spoilt", StoreMachine._spoilt, slot, a, b, c)

    @rule(
        slot=few,
        wanted=st.lists(st.tuples(st.integers(0, 11), numbers, numbers, few), min_size=2, max_size=7),
        same=st.none() | numbers,
    )
    def write_together(self, slot: int, wanted: list[tuple[int, int, int, int]], same: int | None) -> None:
        """Many units in one transaction, about one run or several: neighbours leave each other alone."""
        self.tally["batch"] += 1
        slot = self._slot(slot)
        units = [
            self.makers[which](self, slot, a if same is None else same, b, c) for which, a, b, c in wanted
        ]
        self._commit(slot, units)

    @rule(slot=few, lease=st.integers(-1, 3))
    def renew(self, slot: int, lease: int) -> None:
        self.tally["renew"] += 1
        number, memory, file, _ = self._at(self._slot(slot))
        until = self.clock.now() + lease * LEASE
        self.model.sessions[number].expires_at = until
        assert memory.renew(until)
        assert file.renew(until)

    @rule(seconds=st.sampled_from([0, 1, 5, 31, 40]))
    def pass_time(self, seconds: int) -> None:
        self.tally["time passes"] += 1
        self.clock.time += seconds * SECOND
        self.model.now = self.clock.time

    @precondition(lambda self: len(self._inside) > 1)
    @rule(slot=few)
    def kill(self, slot: int) -> None:
        self.tally["kill"] += 1
        self._leave(self._slot(slot), dies=True)

    @precondition(lambda self: len(self._inside) > 1)
    @rule(slot=few)
    def leave(self, slot: int) -> None:
        self.tally["leave"] += 1
        self._leave(self._slot(slot), dies=False)

    @precondition(lambda self: len(self._inside) < SLOTS)
    @rule(mortal=st.booleans())
    def enter(self, mortal: bool) -> None:
        self.tally["enter"] += 1
        self._enter(self.slots.index(None), mortal)

    # -- what is seen of all three --------------------------------------------------------------------

    @rule(slot=few, a=numbers, b=numbers, c=few)
    def search(self, slot: int, a: int, b: int, c: int) -> None:
        self.tally["search"] += 1
        wanted: dict[str, Any] = {"limit": 1 + c}
        if a % 2:
            wanted["key"] = "kl"[a // 2 % 2]
        if b % 2:
            wanted["status"] = [["running"], ["failed", "waiting"], ["completed"], []][b // 2 % 4]
        if a % 5 == 0:
            wanted["before"] = self._run(b)
        if b % 5 == 0:
            wanted["due"] = self.clock.now()
        expected = [
            (run.row(), self.model.holder(run))
            for run in reversed(self.model.runs.values())
            if run.guard.key == wanted.get("key", run.guard.key)
            and run.status in wanted.get("status", [run.status])
            and run.number < wanted.get("before", 1 << 60)
            and ("due" not in wanted or (run.wake_at is not None and run.wake_at <= wanted["due"]))
        ][: 1 + c]
        for store in self._stores(slot):
            assert self._do(store.find(**wanted)) == expected, store.name

    @rule(slot=few, a=numbers, b=numbers)
    def follow(self, slot: int, a: int, b: int) -> None:
        self.tally["follow"] += 1
        after = max(0, len(self.model.journal) - a)
        page = self.model.journal[after:]
        if b % 3 == 0:
            page = [(of, record) for of, record in page if record.kind in LETTERS]
        seqs = [record.seq or 0 for _, record in page] + [0, 1 << 40]
        outputs = [self.model.outputs[seq - 1] if 0 < seq < 1 << 40 else None for seq in seqs]
        for store in self._stores(slot):
            kinds = LETTERS if b % 3 == 0 else None
            assert self._do(store.tail(after, kinds=kinds)) == page, store.name
            assert self._do(store.output(seqs)) == outputs, store.name
            assert store.output_now(seqs[-1:]) == [None]

    @invariant()
    def runs_are_what_was_written_to_them(self) -> None:
        touched, self.touched = self.touched, set()
        if touched:
            self._look_at(touched)

    def _look_at(self, runs: Iterable[int]) -> None:
        slot = self._slot(len(self.model.journal))
        for number in runs:
            run = self.model.runs.get(number)
            if run is None:
                continue
            graph = next((g for n, g in self.model.definitions.values() if n == run.definition), "")
            expected = (run.row(), run.records, graph, self.model.holder(run))
            for store in self._stores(slot):
                found = self._do(store.load(run.guard.run_id))
                assert tuple(found) == expected, store.name
            assert _folded(run.records, run.row().status) == [run.status, run.reason, run.finished_at]

    def _look_at_everything(self) -> None:
        self._look_at(self.model.runs)
        for store in self._stores(0):
            assert self._do(store.tail(0, limit=10_000)) == self.model.journal
            for key in "kl":
                known = self.model.once.get(("s", key))
                found = self._do(store.once("s", key))
                assert (found and found.row) == (known and known[1])
                if known:
                    run = self.model.runs[known[0]]
                    assert (found.run_id, found.holder) == (run.guard.run_id, self.model.holder(run))
            for run in self.model.runs.values():
                lines = [line for of, line in self.model.logs if of == run.guard.run_id]
                logs = self._do(store.logs(run.guard.run_id))
                assert [line for _, line in logs] == lines


def _plain(outcome: Any) -> Any:
    return Failed if isinstance(outcome, StoreFailed | SqlFailed) else outcome


def _folded(records: list[Record], status: str) -> list[Any]:
    """Give status, reason and end of a run as the fold of its journal alone; `pending` is not in it."""
    columns: dict[str, Any] = {"status": status, "reason": None, "finished_at": None}
    for record in records:
        columns |= projection(record) or {}
    if status == "pending":
        columns["status"] = status
    return [columns[name] for name in ("status", "reason", "finished_at")]


def options(steps: int, **more: Any) -> settings:
    return settings(
        max_examples=-(-steps // STORY),
        stateful_step_count=STORY,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        **more,
    )


def run_machine(steps: int, **more: Any) -> Counter[str]:
    StoreMachine.tally.clear()
    play(StoreMachine, settings=options(steps, **more))
    return StoreMachine.tally


def steps_of(tally: Counter[str]) -> int:
    return sum(n for name, n in tally.items() if not name.startswith("refused") and name != "units")


def test_a_store_answers_as_its_contract_says() -> None:
    """C4, C8, B106, B109, B112: a thin selection of stories."""
    tally = run_machine(QUICK, derandomize=True, phases=[Phase.generate])
    assert steps_of(tally) >= QUICK / 2


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_store_answers_as_its_contract_says_over_fifty_thousand_steps() -> None:
    """G5: on the file and in memory, outcome by outcome and row by row."""
    tally = Counter[str]()
    while steps_of(tally) < STEPS:
        tally += run_machine(STEPS - steps_of(tally) + STORY)
    print(f"\n{steps_of(tally)} steps: {dict(tally.most_common())}")
    assert {"lost", "locked", "changed", "key_taken", "exists", "missing", "once"} == {
        name.removeprefix("refused: ") for name in tally if name.startswith("refused")
    }


# -- stores that are wrong ------------------------------------------------------------------------------


def no_fence_in_the_file(patch: pytest.MonkeyPatch) -> None:
    """Nobody asks whether the run is still owned by whoever writes to it."""
    insert = writer._insert_owned.__wrapped__

    def unfenced(rows: int, many_runs: bool) -> str:
        return insert(rows, many_runs).replace("owner = ? AND", "(owner = ? OR 1) AND")

    def owned(self: writer.Writer, guard: Owned, unit: Unit) -> Any:
        row = self._row(guard.run)
        if row is None:
            return Refused("missing")
        revived = row.status == "interrupted"
        return writer._Place(row.run, row.epoch, (revival(unit, self.clock),) if revived else ())

    patch.setattr(writer, "_insert_owned", unfenced)
    patch.setitem(writer._GUARDS, Owned, owned)


def no_fence_in_memory(patch: pytest.MonkeyPatch) -> None:
    """The same of the other store."""

    def owned(self: MemoryStore, guard: Owned) -> Refused | None:
        return None if guard.run in self._book.rows else Refused("missing")

    patch.setattr(MemoryStore, "_owned", owned)


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """Neither store asks."""
    no_fence_in_the_file(patch)
    no_fence_in_memory(patch)


def no_lease(patch: pytest.MonkeyPatch) -> None:
    """A session whose lease is over counts as living as long as its process does."""
    patch.setattr(writer, "is_alive", lambda session, now: is_alive(session, session.expires_at))


def no_epoch(patch: pytest.MonkeyPatch) -> None:
    """A claim changes the owner alone."""
    take = MemoryStore._take

    def taken(self: MemoryStore, guard: Claim, unit: Unit) -> int:
        run, epoch = take(self, guard, unit), self._book.rows[guard.run].epoch
        self._set(guard.run, epoch=epoch - 1)
        return run

    patch.setattr(MemoryStore, "_take", taken)


@pytest.mark.parametrize(
    "mutant", [no_fence_in_the_file, no_fence_in_memory, no_lease, no_epoch], ids=lambda m: m.__name__
)
def test_a_store_that_is_wrong_is_found(
    monkeypatch: pytest.MonkeyPatch, mutant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """G5: the first of them is the fence."""
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        run_machine(MUTANT, derandomize=True, phases=[Phase.generate])
    print(f"{mutant.__name__}: found after {steps_of(StoreMachine.tally)} steps")
