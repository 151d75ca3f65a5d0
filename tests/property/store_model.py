"""What a store is to answer, written from its contract: runs, owners, epochs, keys, letters, calls made once.

It shares no code with the stores: it knows the guards, records and outcomes by name, and nothing of how
either store looks after them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final

from dagresume.events import Record
from dagresume.store import (
    Claim,
    Committed,
    Holder,
    Inbox,
    LogLine,
    NewRun,
    OnceRow,
    Orphaned,
    Outcome,
    Owned,
    Refused,
    RunRow,
    Session,
    Unique,
    Unit,
)

LETTERS: Final = {"run.cancel_requested", "node.decided", "node.resolved", "run.signalled"}
WAKING: Final = LETTERS - {"run.cancel_requested"}
GOES_ON: Final = {"run.claimed", "run.revived"}
STATUS: Final = {
    "run.created": "running",
    "run.claimed": "running",
    "run.revived": "running",
    "run.waiting": "waiting",
    "run.completed": "completed",
    "run.failed": "failed",
    "run.interrupted": "interrupted",
    "run.cancelled": "cancelled",
    "run.rolling_back": "rolling_back",
    "run.rolled_back": "rolled_back",
}
LET_GO: Final = {
    "run.waiting",
    "run.completed",
    "run.failed",
    "run.interrupted",
    "run.cancelled",
    "run.rolled_back",
}


class Failed(Exception):
    """The store itself could not write a unit: what the model gives in place of the store's own error."""


@dataclass
class Member:
    """A session: it lives until it ends, its process dies or its lease is over."""

    facts: Session
    expires_at: int
    gone: bool = False


@dataclass
class Run:
    """A run as its contract says it: who owns it, under which epoch, what was written to it."""

    number: int
    guard: NewRun
    owner: int | None
    epoch: int
    created_at: int
    status: str
    version: str
    holds_key: int = 1
    definition: int = 0
    reason: str | None = None
    wake_at: int | None = None
    updated_at: int = 0
    finished_at: int | None = None
    records: list[Record] = field(default_factory=list)

    @property
    def last(self) -> int:
        """The seq of its last record."""
        return (self.records[-1].seq or 0) if self.records else 0

    def row(self) -> RunRow:
        """Give the row that every store must show."""
        of = self.guard
        return RunRow(
            self.number, of.run_id, of.workflow, self.version, self.definition, of.key, self.holds_key,
            self.status, self.reason, self.owner, self.epoch, self.wake_at, of.source, 0, 0,
            of.forked_from, of.forked_at_seq, self.created_at, self.updated_at, self.finished_at, None,
            of.inputs_digest, of.inputs,
        )  # fmt: skip


class Model:
    """The whole store, in dictionaries."""

    def __init__(self, now: int) -> None:
        self.now = now
        self.runs: dict[int, Run] = {}
        self.sessions: dict[int, Member] = {}
        self.journal: list[tuple[str, Record]] = []
        self.outputs: list[str | None] = []
        self.logs: list[tuple[str, LogLine]] = []
        self.once: dict[tuple[str, str], tuple[int, OnceRow]] = {}
        self.names: set[str] = set()
        self.definitions: dict[bytes, tuple[int, str]] = {}

    # sessions

    def enter(self, facts: Session) -> int:
        """Register a session."""
        number = len(self.sessions) + 1
        self.sessions[number] = Member(facts, facts.expires_at)
        return number

    def lives(self, session: int | None) -> bool:
        """Say whether a session lives."""
        member = self.sessions.get(session or 0)
        return member is not None and not member.gone and member.expires_at >= self.now

    def holder(self, run: Run | None) -> Holder | None:
        """Give who owns a run."""
        if run is None or run.owner is None:
            return None
        member = self.sessions.get(run.owner)
        if member is None:
            return Holder(run.owner, "", "", 0, 0, False)
        of = member.facts
        return Holder(run.owner, of.uuid, of.host, of.pid, of.started_at, self.lives(run.owner))

    # writing

    def commit(self, units: list[Unit]) -> list[Outcome | type[Failed]]:
        """Give what becomes of these units, and let it happen."""
        holes: set[int] = set()
        outcomes: list[Outcome | type[Failed]] = []
        for unit in units:
            run = getattr(unit.guard, "run", 0)
            declares = any(record.kind == "run.completed" for record in unit.records)
            outcome = Failed if run in holes and declares else self._write(unit)
            if outcome is Failed and run:
                holes.add(run)
            outcomes.append(outcome)
        return outcomes

    def _write(self, unit: Unit) -> Outcome | type[Failed]:
        guard = unit.guard
        in_the_way = self._overtaken(unit) or self._refused(guard)
        if in_the_way:
            return in_the_way
        if any("\ud800" in (record.path or "") for record in unit.records):
            return Failed  # no store holds half a character
        if unit.sql:
            return Failed  # every statement of these tests is wrong
        if isinstance(guard, Unique):
            self.names.add(guard.name)
            return Committed(0)
        return self._written(self._entered(guard, unit), unit)

    def _written(self, run: Run, unit: Unit) -> Committed:
        seq = 0
        records = list(unit.records)
        if isinstance(unit.guard, Owned) and run.status == "interrupted":
            at = records[0].at if records else self.now
            records.insert(0, Record("run.revived", None, at, None))
        for record in records:
            seq = self._append(run, record)
        if isinstance(unit.guard, NewRun) and unit.guard.session is None:
            run.status = "pending"
        if isinstance(unit.guard, Owned | NewRun | Claim) and any(r.kind in LET_GO for r in records):
            run.owner = None
        if unit.definition:
            known = self.definitions.setdefault(
                unit.definition.hash, (len(self.definitions) + 1, unit.definition.graph)
            )
            run.definition, run.version = known[0], unit.definition.version
        self.logs += [(run.guard.run_id, line) for line in unit.logs]
        for row in unit.once:
            if row.state == "free":
                self.once.pop((row.scope, row.key), None)
            else:
                self.once[row.scope, row.key] = run.number, row._replace(saw=None)
        return Committed(seq, run.number, run.epoch)

    def _entered(self, guard: Any, unit: Unit) -> Run:
        if isinstance(guard, NewRun):
            return self._create(guard, unit)
        run = self.runs[guard.run]
        if isinstance(guard, Claim):
            run.owner, run.epoch = guard.session, run.epoch + 1
            run.holds_key = int(guard.takes_key or run.holds_key)
        return run

    def _create(self, guard: NewRun, unit: Unit) -> Run:
        for other in self.of_key(guard.workflow, guard.key):
            other.holds_key = 0
        number = len(self.runs) + 1
        at = unit.records[0].at if unit.records else self.now
        owned = guard.session is not None
        status = "running" if owned else "pending"
        run = Run(number, guard, guard.session, int(owned), at, status, guard.version, updated_at=at)
        self.runs[number] = run
        return run

    def _append(self, run: Run, record: Record) -> int:
        seq = len(self.journal) + 1
        kept = record._replace(seq=seq, output=None)
        run.records.append(kept)
        self.journal.append((run.guard.run_id, kept))
        self.outputs.append(record.output)
        if record.kind in STATUS:
            self._turn(run, record)
        elif record.kind in WAKING:
            run.wake_at = record.at
        return seq

    def _turn(self, run: Run, record: Record) -> None:
        """Let the run's status be what this record says."""
        run.status, run.reason, run.updated_at = STATUS[record.kind], record.reason, record.at
        if record.kind in GOES_ON:
            run.finished_at, run.wake_at = None, None
            run.holds_key = 1 if record.kind == "run.claimed" else run.holds_key
        elif record.kind != "run.created":
            facts = json.loads(record.data or "{}")
            run.finished_at = None if run.status in {"waiting", "rolling_back"} else record.at
            run.wake_at = facts.get("wake_at")
            unread = (r for r in run.records if r.kind in LETTERS and (r.seq or 0) > facts.get("read", 0))
            if record.kind == "run.waiting" and any(unread):
                run.wake_at = 0
            if run.status in {"cancelled", "rolled_back"}:
                run.holds_key = 0

    def of_key(self, workflow: str, key: str | None) -> list[Run]:
        """Give the runs of a key, oldest first."""
        if key is None:
            return []
        return [r for r in self.runs.values() if (r.guard.workflow, r.guard.key) == (workflow, key)]

    # guards: what is in the way

    def _overtaken(self, unit: Unit) -> Refused | None:
        for row in unit.once:
            known = self.once.get((row.scope, row.key))
            if (known[1].at if known else None) != row.saw:
                return Refused("once")
        return None

    def _refused(self, guard: Any) -> Refused | None:
        if isinstance(guard, NewRun):
            return self._new_run(guard)
        if isinstance(guard, Unique):
            return Refused("exists") if guard.name in self.names else None
        run = self.runs.get(guard.run)
        if run is None:
            return Refused("missing")
        reason, other = self._reason(guard, run), run
        if reason == "key_taken":
            other = [r for r in self.of_key(run.guard.workflow, run.guard.key) if r.holds_key][-1]
        return Refused(reason, self.holder(other), other.guard.run_id) if reason else None

    def _reason(self, guard: Owned | Claim | Orphaned | Inbox, run: Run) -> str:
        if isinstance(guard, Inbox):
            later = {(r.kind, r.path) for r in run.records if (r.seq or 0) > guard.after}
            return "exists" if guard.unless in later else ""
        if isinstance(guard, Claim):
            return self._claimed(guard, run)
        if (run.owner, run.epoch) != (guard.session, guard.epoch):
            return "lost"
        return "locked" if isinstance(guard, Orphaned) and self.lives(run.owner) else ""

    def _claimed(self, guard: Claim, run: Run) -> str:
        if self.lives(run.owner):
            return "locked"
        if run.last > guard.seen:
            return "changed"
        rivals = any(r.holds_key for r in self.of_key(run.guard.workflow, run.guard.key))
        return "key_taken" if guard.takes_key and not run.holds_key and rivals else ""

    def _new_run(self, guard: NewRun) -> Refused | None:
        there = next((r for r in self.runs.values() if r.guard.run_id == guard.run_id), None)
        if there:
            return Refused("exists", self.holder(there), there.guard.run_id)
        same = self.of_key(guard.workflow, guard.key)
        newest = same[-1] if same else None
        driven = newest is not None and self.lives(newest.owner)
        if guard.key is None or ((None if newest is None else newest.number) == guard.saw and not driven):
            return None
        return Refused("key_taken", self.holder(newest), None if newest is None else newest.guard.run_id)
