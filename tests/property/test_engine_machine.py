"""Whatever is done to runs, by engines that live, are stalled or are killed: nothing lost, nothing twice.

A state machine drives two engines on one store, commit by commit and body by body.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import networkx as nx
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as play

from dagresume.errors import (
    DagresumeError,
    LeaseLost,
    RunCancelled,
    RunLocked,
    StoreError,
    UncertainNode,
)
from dagresume.journal import Entry, Journal
from dagresume.store import Committed, Outcome, Owned
from tests.property import engine_stage as on
from tests.property.engine_stage import FLOWS, SECOND, SETTLES, SHAPES, Body, Line, Seat, Stage
from tests.property.test_store_machine import no_fence

STEPS, QUICK, MUTANT = 50_000, 2_400, 20_000
STORY = 80
NAMES = list(FLOWS)
LETS_GO = {"run.completed", "run.failed", "run.waiting", "run.interrupted", "run.cancelled"}
number = st.integers(0, 63)
few = st.integers(0, 3)


Act = TypeVar("Act", bound=Callable[..., None])


def about_a_run(act: Act) -> Act:
    """Leave it out while there is no run: no precondition, for what is drawn must not depend on threads."""

    @wraps(act)
    def when_there_is_one(self: EngineMachine, **drawn: Any) -> None:
        if self.has_runs:
            act(self, **drawn)

    return cast("Act", when_there_is_one)


class EngineMachine(RuleBasedStateMachine):
    """Two engines, one store, bodies that end when the machine says so."""

    tally: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.stage: Stage | None = None
        self.read = 0
        self.last: dict[str, dict[str, Line]] = {}
        self.resting: dict[str, str] = {}
        self.reopened: Counter[str] = Counter()
        self.words = 0
        self.gave: dict[str, str] = {}  # what the last call about a run ended with

    @initialize(in_file=st.booleans())
    def begin(self, in_file: bool) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.stage = Stage(Path(self.folder.name, "runs.db") if in_file else None)
        for _ in range(2):
            self.on.seats.append(Seat(self.on))

    def teardown(self) -> None:
        if self.stage is None:
            return
        try:
            if not self.on.wrong and not self._failed:
                self._finish()
        finally:
            self.on.close()
            self.folder.cleanup()

    _failed = False

    @property
    def on(self) -> Stage:
        assert self.stage is not None
        return self.stage

    def _seat(self, wanted: int) -> Seat:
        return self.on.seats[wanted % len(self.on.seats)]

    def _run(self, wanted: int) -> str:
        rows = self.on.rows()
        return rows[wanted % len(rows)].run_id

    @property
    def has_runs(self) -> bool:
        return self.read > 0 and bool(self.on.rows())

    def _step(self, name: str, *seats: Seat) -> None:
        """Let what was begun go as far as it goes, and look at everything."""
        self.tally[name] += 1
        for seat in seats or self.on.seats:
            seat.settle()
        self._failed = True
        assert not self.on.wrong, self.on.wrong
        self._read_journal()
        self._read_tasks()
        self._failed = False

    # -- what people and programs ask for -------------------------------------------------------------

    @rule(seat=few, flow=few, key=st.sampled_from([None, None, "k", "l"]), fresh=st.booleans())
    def start(self, seat: int, flow: int, key: str | None, fresh: bool) -> None:
        if len(self.on.rows()) < 12:
            here = self._seat(seat)
            here.do("start", "", here.engine.start(FLOWS[NAMES[flow]], key=key, fresh=fresh))
            self._step("start")

    @rule(seat=few, run=number)
    @about_a_run
    def resume(self, seat: int, run: int) -> None:
        here, run_id = self._seat(seat), self._run(run)
        expected = self._foretold(run_id)
        task = here.do("resume", run_id, here.engine.resume(run_id, raise_on_failure=False, wait="all"))
        self._step("resume")
        if expected is not None:
            assert task.done(), (run_id, expected)
            found = task.exception()
            assert expected == (None if found is None else type(found)), (run_id, expected, found)

    def _foretold(self, run_id: str) -> type[Exception] | None:
        """Give what a resume must be refused with, if it must."""
        row = self.on.row(run_id)
        if any(seat.door.hold or seat.door.held for seat in self.on.seats):
            return None
        if any(seat.session == row.owner and not seat.ghost for seat in self.on.seats):
            return RunLocked
        if any(run_id in seat.engine._runs for seat in self.on.seats):
            return None  # one that others take for dead drives it still
        if row.status == "cancelled":
            return RunCancelled
        if any(line.kind == "run.cancel_requested" for line in self.on.lines(run_id)):
            return None  # that may come first
        return UncertainNode if self._uncertain(run_id) and row.status != "completed" else None

    def _uncertain(self, run_id: str) -> list[str]:
        """Give the paths of which nobody can tell whether they took effect."""
        shape, said = SHAPES[self.on.row(run_id).workflow], set[str]()
        last: dict[str, Line] = {}
        for line in self.on.lines(run_id):
            if line.path is not None and line.kind in SETTLES:
                last[line.path] = line
                said.discard(line.path)
            elif line.path is not None and line.kind == "node.resolved":
                said.add(line.path)
        return [
            path
            for path, line in last.items()
            if line.kind in {"node.started", "node.interrupted", "node.cancelled"}
            and not shape[path.partition("[")[0]].idempotent
            and not (path == "m" and shape["m"].each)
            and path not in said
        ]

    @rule(seat=few, run=number, node=st.none() | number)
    @about_a_run
    def retry(self, seat: int, run: int, node: int | None) -> None:
        here, run_id = self._seat(seat), self._run(run)
        name = None
        if node is not None:
            flow = FLOWS[self.on.row(run_id).workflow]
            name = sorted(flow.graph)[node % len(flow.graph)]
            for reached in {name, *nx.descendants(flow.graph, name)}:
                self.on.asked[run_id, reached] += 1
        self.reopened[run_id] += 1
        here.do("retry", run_id, here.engine.retry(run_id, name, raise_on_failure=False, wait="all"))
        self._step("retry from a node" if name else "retry")

    @rule(seat=few, run=number)
    @about_a_run
    def cancel(self, seat: int, run: int) -> None:
        here, run_id = self._seat(seat), self._run(run)
        here.do("cancel", run_id, here.engine.cancel(run_id, "somebody"))
        self._step("cancel")

    @rule(seat=few, run=number, approve=st.booleans())
    @about_a_run
    def decide(self, seat: int, run: int, approve: bool) -> None:
        here, run_id = self._seat(seat), self._run(run)
        self.words += 1
        here.do("decide", run_id, here.engine.decide(run_id, "ask", approve, f"person {self.words}"))
        self._step("decide")

    @rule(seat=few, run=number)
    @about_a_run
    def signal(self, seat: int, run: int) -> None:
        here, run_id = self._seat(seat), self._run(run)
        self.words += 1
        here.do("signal", run_id, here.engine.signal(run_id, "word", self.words))
        self._step("signal")

    @rule(seat=few, run=number, path=number, failed=st.booleans())
    @about_a_run
    def resolve(self, seat: int, run: int, path: int, failed: bool) -> None:
        here, run_id = self._seat(seat), self._run(run)
        doubtful = self._uncertain(run_id)
        if doubtful:
            said: dict[str, Any] = {"failed": "it did not"} if failed else {"output": "it did"}
            name = doubtful[path % len(doubtful)]
            here.do("resolve", run_id, here.engine.resolve(run_id, name, **said))
            self._step("resolve")

    @rule(seat=few)
    def recover(self, seat: int) -> None:
        here = self._seat(seat)
        here.do("recover", "", here.engine.recover(wait=False))
        self._step("recover")

    @rule(seat=few, age=st.sampled_from([0, 2, 30]))
    def prune(self, seat: int, age: float) -> None:
        """What has ended goes, all of it; everything else stays, and a key that was freed can be taken."""
        here, before = self._seat(seat), self.on.rows()
        if any(s.door.hold or s.door.held for s in self.on.seats):
            return
        lines = Counter(line.run_id for line in self.on.lines())
        task = here.do("prune", "", here.engine.prune(older_than=age, failed_older_than=age))
        while not task.done():  # it lets others write between two of its transactions
            self.on.clock.time += SECOND // 10
            here.settle()
        self._step("prune")
        gone = {row.run_id for row in before} - {row.run_id for row in self.on.rows()}
        ended = {row.run_id for row in before if row.status in {"completed", "cancelled", "failed"}}
        assert gone <= ended, gone - ended
        if age == 0:
            assert gone >= {
                r.run_id for r in before if r.status in {"completed", "cancelled"} and not r.owner
            }
        now = Counter(line.run_id for line in self.on.lines())
        assert not now.keys() & gone, "records of a run that is gone"
        assert all(now[run_id] >= n for run_id, n in lines.items() if run_id not in gone)
        self.tally["runs pruned gave"] += len(gone)

    # -- what bodies do -------------------------------------------------------------------------------

    def _under_way(self) -> list[Body]:
        self.on.bodies = [b for b in self.on.bodies if not b.end.done() and b.seat in self.on.seats]
        return self.on.bodies

    @rule(which=number, well=st.sampled_from([True, True, True, False]), cancel=st.integers(0, 9))
    def end_a_body(self, which: int, well: bool, cancel: int) -> None:
        """A body ends; now and then in the very moment in which its run is cancelled."""
        bodies = self._under_way()
        if not bodies:
            return
        self._end(bodies[which % len(bodies)], well, with_cancel=cancel == 9)

    @rule(well=st.booleans())
    def end_them_all(self, well: bool) -> None:
        if not self._under_way():
            return
        for body in self._under_way():
            idempotent = SHAPES[body.flow][body.path.partition("[")[0]].idempotent
            self._let(body, well or not idempotent)
        self._step("bodies end together")

    def _let(self, body: Body, well: bool) -> None:
        body.end.set_result(well)
        if well:
            self.on.returned[body[:3]] = json.dumps(on.told(body.path, body.given))

    def _end(self, body: Body, well: bool, *, with_cancel: bool) -> None:
        self._let(body, well)
        seat = body.seat
        if with_cancel:
            seat.do("cancel", body.run_id, seat.engine.cancel(body.run_id, "in the same tick"))
        self._step(
            "body ends as its run is cancelled" if with_cancel else f"body {'returns' if well else 'raises'}"
        )
        if well and not seat.ghost and not seat.door.hold and not seat.door.held and not with_cancel:
            lines = self.on.lines(body.run_id)
            kept = any(line[2:5] == ("node.completed", body.path, body.attempt) for line in lines)
            assert kept, f"C5: {body.path} returned and is not kept"

    # -- what happens to engines ----------------------------------------------------------------------

    @rule(
        seat=few,
        how=st.sampled_from(["kill", "leave", "stall", "hold before", "hold after", *["release"] * 3]),
    )
    def disturb(self, seat: int, how: str) -> None:
        """Kill an engine, close one, let all others take one for dead, or hold its commits back."""
        here = self._seat(seat)
        if how in {"kill", "leave"}:
            end = here.kill if how == "kill" else here.leave
            end()
            self.on.seats.remove(here)
            self.on.seats.append(Seat(self.on))
        elif how == "stall":
            here.expire()
        elif how == "release":
            here.release()
        else:
            here.door.hold = how.removeprefix("hold ")
        self._step(how)

    @rule(count=st.integers(1, 5), time=st.booleans())
    def go_well(self, count: int, time: bool) -> None:
        """Some bodies return, one after the other, as on a quiet day."""
        for _ in range(count):
            if self._under_way():
                self._end(self._under_way()[0], True, with_cancel=False)
        if time:
            self.pass_time(1.1)

    @rule(seconds=st.sampled_from([0.1, 0.3, 1.1, 6]))
    def pass_time(self, seconds: float) -> None:
        self.on.clock.time += round(seconds * SECOND)
        self._step("time passes")

    # -- what must be so ------------------------------------------------------------------------------

    def _read_tasks(self) -> None:
        for seat in self.on.seats:
            for what, run_id, task in [t for t in seat.tasks if t[2].done()]:
                error = None if task.cancelled() else task.exception()
                if isinstance(error, StoreError) or (error and not isinstance(error, DagresumeError)):
                    raise AssertionError(f"{what} {run_id}: {error!r}") from error
                assert not isinstance(error, LeaseLost) or seat.ghost, f"{what} {run_id}: {error}"
                self.gave[run_id] = f"{what}: {error!r}"
                self.tally[f"{what} gave {type(error).__name__}" if error else f"{what} is done"] += 1
            seat.tasks = [t for t in seat.tasks if not t[2].done()]

    def _read_journal(self) -> None:
        for line in self.on.lines(after=self.read):
            self.read = line.seq
            known = self.last.setdefault(line.run_id, {})
            if line.path is None:
                self._of_run(line, known)
            elif line.kind in SETTLES:
                self._of_path(line, known)

    def _of_run(self, line: Line, known: dict[str, Line]) -> None:
        rest = self.resting.get(line.run_id)
        if line.kind in {"run.claimed", "run.revived"}:
            facts = json.loads(line.data or "{}")
            asked = self.reopened[line.run_id] and facts.get("by") == "retry"
            assert rest != "run.cancelled" or asked, self._story(line.run_id, "went on by itself")
            assert not facts.get("automatic") or self.on.row(line.run_id).workflow == "lively"
            self.resting.pop(line.run_id, None)
        elif line.kind in LETS_GO:
            self.resting[line.run_id] = line.kind
        if line.kind == "run.completed":
            self._is_whole(line.run_id, known)

    def _is_whole(self, run_id: str, known: dict[str, Line]) -> None:
        """A run that says it completed has all its outputs, and they are what undisturbed bodies give."""
        lines: dict[str | None, Line] = dict(known.items())
        for node, facts in SHAPES[self.on.row(run_id).workflow].items():
            assert known[node].kind == "node.completed", (
                f"C8: {node} is {known[node].kind} in a completed run"
            )
            for path in [f"{node}[{k}]" for k in range(len(on.ITEMS))] if facts.each else [node]:
                found = on.output_of(lines, path)
                given = [on.output_of(lines, p) for p in sorted(facts.after)]
                given = [on.ITEMS[int(path[-2])]] if facts.each else given
                resolved = found == "it did"
                assert facts.what != "function" or resolved or found == on.told(path, given), (
                    path,
                    found,
                    given,
                )

    def _of_path(self, line: Line, known: dict[str, Line]) -> None:
        assert line.path is not None
        rest = self.resting.get(line.run_id)
        # What an owner that was only thought dead writes comes after `run.revived`. Who cancels a run at rest
        # takes it for that alone, and ends its waits.
        waited = line.path in known and known[line.path].kind == "node.waiting"
        own = line.kind == "node.reset" or rest is None or (line.kind == "node.cancelled" and waited)
        assert own, f"{line.kind} of {line.path} came after {rest}"
        node = SHAPES[self.on.row(line.run_id).workflow][line.path.partition("[")[0]]
        if line.kind == "node.completed" and node.what == "approval":
            self._first_word_won(line)
        elif line.kind == "node.completed" and line.output is not None and node.what == "function":
            told = self.on.returned.get((line.run_id, line.path, line.attempt or 0))
            said = json.loads(line.output)
            assert said == "it did" or told == json.dumps(said), (
                f"{line.path} completed with {said}, not {told}"
            )
        known[line.path] = line

    def _first_word_won(self, line: Line) -> None:
        lines = [
            known for known in self.on.lines(line.run_id) if known.path == line.path and known.seq < line.seq
        ]
        asked = max(known.seq for known in lines if known.kind == "node.waiting")
        first = next(known for known in lines if known.kind == "node.decided" and known.seq > asked)
        said, won = json.loads(first.data or "{}"), json.loads(line.output or "{}")
        assert (said["by"], said["approved"]) == (won["by"], won["approved"]), "the first word did not win"

    @invariant()
    def nobody_else_begins(self) -> None:
        assert self.stage is None or not self.on.wrong, self.on.wrong

    def _finish(self) -> None:
        """Whatever has happened: with a new engine every run comes to its end, unless somebody ended it."""
        while self.on.seats:
            self.on.seats.pop().kill()
        here = Seat(self.on)
        self.on.seats.append(here)
        self._step("the end")
        for _ in range(40):
            todo = [row for row in self.on.rows() if row.status not in {"completed", "cancelled"}]
            todo = [row for row in todo if row.holds_key and not self._was_rejected(row.run_id)]
            if not todo:
                return
            for row in todo:
                self._push(here, row.run_id)
            for body in self._under_way():
                self._let(body, True)
            self.on.clock.time += 7 * SECOND
            self._step("the end")
        raise AssertionError(self._story(todo[0].run_id, "did not end"))

    def _story(self, run_id: str, what: str) -> str:
        story = "\n".join(str(line[2:7]) for line in self.on.lines(run_id)[-30:])
        return f"{self.on.row(run_id)} {what}; the last call: {self.gave.get(run_id)}\n{story}"

    def _push(self, here: Seat, run_id: str) -> None:
        if self.on.row(run_id).owner != here.session:
            if self._uncertain(run_id):
                self.reopened[run_id] += 1
                here.do("retry", run_id, here.engine.retry(run_id, raise_on_failure=False, wait="all"))
            else:
                here.do("resume", run_id, here.engine.resume(run_id, raise_on_failure=False, wait="all"))
        waiting = {p for p, line in self.last.get(run_id, {}).items() if line.kind == "node.waiting"}
        if "ask" in waiting:
            here.do("decide", run_id, here.engine.decide(run_id, "ask", True, "the last word"))
        if "word" in waiting:
            here.do("signal", run_id, here.engine.signal(run_id, "word", 0))

    def _was_rejected(self, run_id: str) -> bool:
        known = self.last.get(run_id, {}).get("ask")
        return known is not None and (known.kind, known.reason) == ("node.failed", "rejected")


def run_machine(steps: int, **more: Any) -> Counter[str]:
    EngineMachine.tally.clear()
    options = settings(
        max_examples=-(-steps // STORY),
        stateful_step_count=STORY,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        **more,
    )
    play(EngineMachine, settings=options)
    return EngineMachine.tally


def steps_of(tally: Counter[str]) -> int:
    return sum(n for name, n in tally.items() if " gave" not in name and not name.endswith("is done"))


def test_engines_keep_their_contract() -> None:
    """C1-C6, C8: a thin selection of stories."""
    tally = run_machine(QUICK, derandomize=True, phases=[Phase.generate])
    assert steps_of(tally) >= QUICK / 5


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_engines_keep_their_contract_over_fifty_thousand_steps() -> None:
    """G5: two engines on a file or in memory, killed, stalled, held at a commit, taken for dead."""
    tally = Counter[str]()
    while steps_of(tally) < STEPS:
        tally += run_machine(STEPS - steps_of(tally) + STORY)
    print(f"\n{steps_of(tally)} steps: {dict(tally.most_common())}")


# -- engines that are wrong -----------------------------------------------------------------------------


def start_record_after_the_body(patch: pytest.MonkeyPatch) -> None:
    """No body waits for its start record."""
    from tests.crash import mutants

    patch.setattr(mutants, "put", lambda where, **more: [patch.setattr(where, n, v) for n, v in more.items()])
    mutants.start_record_after_the_body()


def commit_not_awaited(patch: pytest.MonkeyPatch) -> None:
    """What a commit unlocks goes on at once; the commit itself comes a few turns of the loop later."""
    commit = Journal._commit

    async def at_once(journal: Journal, batch: list[Entry]) -> Sequence[Outcome]:
        owned = [entry.guard for entry in batch if isinstance(entry.guard, Owned)]
        if len(owned) < len(batch):
            return await commit(journal, batch)
        before = getattr(journal, "under_way", None)

        async def later() -> None:
            if before is not None:
                await before
            for _ in range(3):
                await asyncio.sleep(0)
            await commit(journal, batch)

        journal.under_way = asyncio.ensure_future(later())  # type: ignore[attr-defined]
        return [Committed(0, guard.run, guard.epoch) for guard in owned]

    patch.setattr(Journal, "_commit", at_once)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("mutant", "says"),
    [(no_fence, "."), (start_record_after_the_body, "C2"), (commit_not_awaited, "C1|C5")],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_engine_that_is_wrong_is_found(
    monkeypatch: pytest.MonkeyPatch, mutant: Callable[[pytest.MonkeyPatch], None], says: str
) -> None:
    """G5: the three seeded faults."""
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match=says) as found:
        run_machine(MUTANT, derandomize=True, phases=[Phase.generate])
    print(f"\n{mutant.__name__}: found after {steps_of(EngineMachine.tally)} steps: {str(found.value)[:150]}")
