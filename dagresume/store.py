"""What a store must do: one verb that makes things durable, and a few that read.

`commit(units)` is one durable transaction when it returns. A `Unit` is the records of one run behind one
guard; it happens whole or not at all, and a refused unit leaves its neighbours alone. Guards are a closed
list and are checked inside the transaction. Features become kinds of records and guards, never new verbs.
Beside it stand `renew`, which prolongs a lease, and `forget`, which removes runs that have ended.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol

from dagresume.clock import Clock, SystemClock
from dagresume.errors import StoreError
from dagresume.events import (
    LETTERS,
    RUN_COMPLETED,
    RUN_REVIVED,
    Record,
    RunStatus,
    projection,
    releases,
    run_record,
    unread,
)

__all__ = [
    "Claim",
    "Clear",
    "CommitCancelled",
    "Committed",
    "Definition",
    "Forgotten",
    "Guard",
    "Holder",
    "Inbox",
    "Loaded",
    "LogLine",
    "MemoryStore",
    "NewRun",
    "OnceFound",
    "OnceRow",
    "Orphaned",
    "Outcome",
    "Owned",
    "Refused",
    "RunRow",
    "Session",
    "SqlFailed",
    "Store",
    "StoreFailed",
    "Unique",
    "Unit",
]


class RunRow(NamedTuple):
    """The row of a run: a projection of its journal. Times are microseconds UTC, `inputs` packed text."""

    run: int
    run_id: str
    workflow: str
    version: str
    definition: int
    key: str | None
    holds_key: int
    status: str
    reason: str | None
    owner: int | None
    epoch: int
    wake_at: int | None
    source: str
    auto_resumes: int
    recoveries: int
    forked_from: int | None
    forked_at_seq: int | None
    created_at: int
    updated_at: int
    finished_at: int | None
    usage: str | None
    inputs_digest: bytes | None
    inputs: str | None


class Definition(NamedTuple):
    """A workflow's definition as it is stored: `graph` is JSON, `nodes` its (id, type) in order."""

    workflow: str
    version: str
    hash: bytes
    graph: str
    nodes: tuple[tuple[str, str], ...]


class Session(NamedTuple):
    """One living engine: who it is, so that others can tell whether it still lives."""

    uuid: str
    host: str
    boot_id: str | None
    pid_ns: int | None
    pid: int
    pid_started: int | None
    started_at: int
    expires_at: int


class Holder(NamedTuple):
    """Who owns a run: its session, where it lives, since when, and whether it lives as far as can be told."""

    session: int
    uuid: str
    host: str
    pid: int
    started_at: int
    alive: bool

    def __str__(self) -> str:
        return f"{self.host} (process {self.pid})"


class LogLine(NamedTuple):
    """One line a node logged."""

    path: str | None
    attempt: int | None
    at: int
    level: str
    line: str


class OnceRow(NamedTuple):
    """What is known of a call that is made once for its `key` within its `scope`.

    `state`: started, done (`result` is what it gave, packed), or free: it did not happen, and writing this
    removes the row. Of a started one `result` is the number of its attempt. `saw`: the `at` of the row that
    this one takes the place of, None if there was none; with another row there the unit is refused ("once").
    """

    scope: str
    key: str
    path: str
    state: str
    result: str | None
    at: int
    saw: int | None = None


class OnceFound(NamedTuple):
    """A row as it is stored, the run that wrote it ("": it is gone), and who drives that run."""

    row: OnceRow
    run_id: str
    holder: Holder | None


# -- guards ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Owned:
    """The run is owned by this session under this epoch.

    A run that was marked interrupted meanwhile is running again.
    """

    run: int
    session: int
    epoch: int


@dataclass(frozen=True, slots=True)
class NewRun:
    """The newest run of (workflow, key) is still `saw` (None: there is none), and nobody alive drives it.
    Makes the run.

    `session` owns it; None: left pending, for whoever claims it. An older holder of the key gives it up.
    """

    run_id: str
    workflow: str
    version: str
    key: str | None
    saw: int | None
    session: int | None
    source: str
    inputs: str
    inputs_digest: bytes
    forked_from: int | None = None
    forked_at_seq: int | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """The run is unowned or its owner dead, and nothing was written to it after `seen`. Raises the epoch.

    Taking back the key of a run that gave it up is refused while a newer run holds it. `takes_key` False: the
    run needs no key any more, and leaves it as it is.
    """

    run: int
    session: int
    seen: int
    takes_key: bool = True


@dataclass(frozen=True, slots=True)
class Orphaned:
    """That owner is dead. Writes `interrupted`, leaves owner and epoch as they are."""

    run: int
    session: int | None
    epoch: int


@dataclass(frozen=True, slots=True)
class Inbox:
    """A letter from anybody to the run.

    `unless`: refused if a record of this (kind, path) was written after the seq `after`.
    """

    run: int
    unless: tuple[str, str | None] | None = None
    after: int = 0


@dataclass(frozen=True, slots=True)
class Unique:
    """No unit with this name was committed before. It has no run, so there is nothing else in its unit."""

    name: str


Guard = Owned | NewRun | Claim | Orphaned | Inbox | Unique


@dataclass(slots=True)
class Unit:
    """Records of one run behind one guard: all of it happens, or nothing.

    `definition` is stored if it is not there yet, and becomes the run's. `sql` are a user's own statements,
    run inside the same transaction. `once` are marks and results of calls that are made once.
    """

    guard: Guard
    records: Sequence[Record] = ()
    definition: Definition | None = None
    logs: Sequence[LogLine] = ()
    sql: Sequence[tuple[str, Sequence[Any] | Mapping[str, Any]]] = ()
    once: Sequence[OnceRow] = ()


# -- outcomes -------------------------------------------------------------------------------------------


class Committed(NamedTuple):
    """The unit is durable; `seq` is that of its last record, `run` and `epoch` those of its run."""

    seq: int
    run: int = 0
    epoch: int = 0


class Refused(NamedTuple):
    """The guard did not hold; nothing of the unit was written.

    `reason`: lost (another owner), locked (the owner lives), changed (written to meanwhile), key_taken,
    exists, missing, once (another call of that key is known). `run_id` is the run in the way.
    """

    reason: str
    holder: Holder | None = None
    run_id: str | None = None


class SqlFailed(NamedTuple):
    """The user's own statements failed; nothing of the unit was written."""

    error: Exception


class StoreFailed(NamedTuple):
    """The store could not write this unit, also not alone; nothing of it was written."""

    error: Exception


Outcome = Committed | Refused | SqlFailed | StoreFailed


class CommitCancelled(asyncio.CancelledError):
    """The caller of `commit` was cancelled while it wrote; `outcomes`: what became of the units."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = outcomes
        super().__init__()


class Loaded(NamedTuple):
    """A run as it is stored: its row, its journal, its definition's JSON, who owns it.

    The records come without their outputs. A store may leave small ones in: whoever takes one looks whether
    it is what its digest says.
    """

    row: RunRow
    records: Sequence[Record]
    graph: str
    holder: Holder | None


class Forgotten(NamedTuple):
    """What `forget` removed: the numbers of the runs that are gone, and how many rows of which kind.

    `resumed`: runs whose removal an earlier call had begun. Of a file in bytes: its `size`, what is `free` in
    it for what comes next, and what was `given_back` to the disk.
    """

    runs: list[int]
    resumed: int = 0
    events: int = 0
    logs: int = 0
    once: int = 0
    definitions: int = 0
    sessions: int = 0
    given_back: int = 0
    free: int = 0
    size: int = 0


Clear = Callable[[str], Awaitable[bool]]
"""Removes what a run has outside the store, by its run id. False: something is left, ask again next time."""


class Store(Protocol):
    """A durable home for runs. Every reader gives whole answers, never an open cursor."""

    name: str
    """How messages call it; no password in it."""
    persistent: bool
    """Whether what is committed outlives the process: user SQL and spilled outputs need that."""
    commits: int
    """How many transactions were committed so far."""

    async def open(self, session: Session) -> int:
        """Make the store ready (tables, views, migrations) and register this session; gives its number."""

    async def close(self) -> None:
        """End the session and let everything go. Safe to call twice."""

    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        """Write these units in one durable transaction; one outcome for each, in order.

        Cancelled after the writing has begun, it raises CommitCancelled, which holds the outcomes.
        """

    def abandon(self) -> None:
        """Let threads and connections go at once, from any thread: the interpreter is about to end."""

    def renew(self, expires_at: int) -> bool:
        """Prolong this session's lease; called from a thread of its own. False: the session is gone."""

    async def forget(self, runs: Mapping[int, int], clear: Clear, *, dry_run: bool = False) -> Forgotten:
        """Remove ended runs for ever: number of each → the epoch under which it was seen.

        Each is looked at again inside the transaction, and left out unless `may_go`. First its row goes, and
        with it its key and every reader's way to it; then its records in short transactions, and what only
        it used; then `clear` is called for it. A call that was killed at any point is finished by the next
        one, also by one without runs. Calls made once in a workflow (scope "workflow") are kept. `dry_run`:
        only count what the same call would remove; `clear` is called as well, to count too.
        """

    async def load(self, run_id: str) -> Loaded | None:
        """Give a run with its journal, or None."""

    async def find(
        self,
        *,
        workflow: str | None = None,
        key: str | None = None,
        status: Sequence[str] | None = None,
        before: int | None = None,
        due: int | None = None,
        starting: str | None = None,
        since: int | None = None,
        until: int | None = None,
        limit: int = 100,
    ) -> list[tuple[RunRow, Holder | None]]:
        """Give the rows of runs, newest first, that match all of what is given, letter by letter.

        `before`: only runs with a smaller number. `due`: only those that are to be woken by then.
        `starting`: only those whose run id begins with this. `since`, `until`: only those made then or later,
        and earlier than that.
        """

    async def tail(
        self, after: int, *, run_id: str | None = None, kinds: Sequence[str] | None = None, limit: int = 1000
    ) -> list[tuple[str, Record]]:
        """Give (run id, record without output) of the journal after a seq, in order."""

    async def output(self, seqs: Sequence[int]) -> list[str | None]:
        """Give the packed outputs of these records, in the order asked for; None where there is none."""

    def output_now(self, seqs: Sequence[int]) -> list[str | None]:
        """Do the same without an event loop, from any thread, also after `close`."""

    async def logs(self, run_id: str, *, after: int = 0, limit: int = 1000) -> list[tuple[int, LogLine]]:
        """Give (id, line) of what the nodes of a run logged, in order."""

    async def once(self, scope: str, key: str) -> OnceFound | None:
        """Give what is known of a call that is made once, or None."""

    async def changed(self) -> int:
        """Give a number that differs from the last one if another process may have written since."""


# -- what every store does alike ------------------------------------------------------------------------

SYSTEM_CLOCK: Final = SystemClock()


def completes(unit: Unit) -> bool:
    """Say whether this unit declares its run completed.

    Behind a failed unit of the same run that is not so: every store fails such a unit with the same error.
    """
    return any(record.kind == RUN_COMPLETED for record in unit.records)


def stored_error(name: str, error: Exception) -> StoreError:
    """Give the error of a value that no store can hold (a lone surrogate, an integer beyond 64 bits)."""
    found = StoreError(f"{name} cannot store this: {error}")
    found.__cause__ = error
    return found


def revival(unit: Unit, clock: Clock) -> Record:
    """Give the record that goes before `unit` if its owner's run was marked interrupted meanwhile."""
    return run_record(RUN_REVIVED, unit.records[0].at if unit.records else clock.now())


def refuse_contents(unit: Unit) -> None:
    """Raise ValueError if a unit without a run has something to write to one."""
    if unit.records or unit.logs or unit.definition or unit.once:
        raise ValueError("a unit behind Unique has no run: there is nothing else in it")


def first_row(run: int, guard: NewRun, unit: Unit, clock: Clock) -> RunRow:
    """Give the row of a new run before its records are projected on it."""
    owned = guard.session is not None
    now = unit.records[0].at if unit.records else clock.now()
    return RunRow(
        run=run,
        run_id=guard.run_id,
        workflow=guard.workflow,
        version=guard.version,
        definition=0,
        key=guard.key,
        holds_key=1,
        status=(RunStatus.RUNNING if owned else RunStatus.PENDING).value,
        reason=None,
        owner=guard.session,
        epoch=int(owned),
        wake_at=None,
        source=guard.source,
        auto_resumes=0,
        recoveries=0,
        forked_from=guard.forked_from,
        forked_at_seq=guard.forked_at_seq,
        created_at=now,
        updated_at=now,
        finished_at=None,
        usage=None,
        inputs_digest=guard.inputs_digest,
        inputs=guard.inputs,
    )


def projected(unit: Unit) -> dict[str, Any]:
    """Give the columns of the run's row that this unit sets, all its records together.

    `read` is no column: if there are letters to the run after this seq, it is due at once (`wake_at` 0).
    """
    columns: dict[str, Any] = {}
    for record in unit.records:
        if not record.changes_path:
            columns |= projection(record) or {}
            if (read := unread(record)) is not None:
                columns["read"] = read
    guard = unit.guard
    if isinstance(guard, NewRun) and guard.session is None:
        columns["status"] = RunStatus.PENDING.value
    if isinstance(guard, Owned | NewRun | Claim) and any(map(releases, unit.records)):
        columns["owner"] = None
    return columns


def may_go(status: str, epoch: int, seen: int, holder: Holder | None) -> bool:
    """Say whether a run may be removed: it has ended, nobody drives it, and nobody took it up since it was
    seen under the epoch `seen`.
    """
    ended = RunStatus(status).final or status == RunStatus.FAILED
    return ended and epoch == seen and not (holder is not None and holder.alive)


def scope_of(kind: str, of: str) -> str:
    """Give the scope of calls that are made once: in the run or in the workflow called `of`."""
    return f"{kind}:{of}"


# -- in memory ------------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    """One record as readers get it, whose it is, and its output."""

    run: int
    record: Record
    output: str | None


def _seq(entry: _Entry) -> int:
    return entry.record.seq or 0


class _Book:
    """What a memory store holds."""

    def __init__(self) -> None:
        self.rows: dict[int, RunRow] = {}
        self.numbers: dict[str, int] = {}
        self.runs = self.seq = 0  # the last that were given; none is given twice
        self.journal: list[_Entry] = []
        self.by_run: dict[int, list[Record]] = {}
        self.forgotten: dict[int, str] = {}
        self.logs: list[tuple[int, int, LogLine]] = []
        self.once: dict[tuple[str, str], tuple[int, OnceRow]] = {}
        self.names: set[str] = set()
        self.definitions: dict[tuple[str, bytes], int] = {}
        self.graphs = [""]
        self.sessions: dict[int, Session] = {}
        self.ended: set[int] = set()
        self.commits = 0

    def after(self, seq: int) -> Iterator[_Entry]:
        """Give what was written after a seq."""
        return islice(self.journal, bisect_right(self.journal, seq, key=_seq), None)

    def output(self, seq: int) -> str | None:
        """Give the output of a record, if it has one and is there."""
        journal = self.journal  # another one takes its place when runs are forgotten
        place = bisect_right(journal, seq - 1, key=_seq)
        return journal[place].output if place < len(journal) and _seq(journal[place]) == seq else None


class MemoryStore:
    """A store that ends with its process. Several engines share one by `MemoryStore(beside=first)`."""

    name = ":memory:"
    persistent = False

    def __init__(self, *, beside: MemoryStore | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self.commits = 0
        self._clock = clock
        self._book: _Book = beside._book if beside else _Book()
        self._session: int | None = None
        self._guards: dict[type, Callable[[Any], Refused | None]] = {
            Owned: self._owned,
            NewRun: self._new_run,
            Claim: self._claim,
            Orphaned: self._orphaned,
            Inbox: self._inbox,
            Unique: self._unique,
        }
        self._effects: dict[type, Callable[[Any, Unit], int]] = {
            Owned: self._revive,
            NewRun: self._create,
            Claim: self._take,
            Unique: self._use,
        }

    async def open(self, session: Session) -> int:
        """Register this session; gives its number."""
        self._session = len(self._book.sessions) + 1
        self._book.sessions[self._session] = session
        return self._session

    async def close(self) -> None:
        """End the session. What was committed stays for a later `open` of this object."""
        if self._session is not None:
            self._book.ended.add(self._session)
        self._session = None

    def abandon(self) -> None:
        """Nothing to let go of."""

    def renew(self, expires_at: int) -> bool:
        """Prolong this session's lease."""
        if self._session is None:
            return False
        sessions = self._book.sessions
        sessions[self._session] = sessions[self._session]._replace(expires_at=expires_at)
        return True

    # writing

    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        """Write these units; one outcome for each, in order."""
        self._opened()
        outcomes: list[Outcome] = []
        holes: dict[int, StoreFailed] = {}
        for unit in units:
            run = getattr(unit.guard, "run", 0)
            outcome = holes[run] if run in holes and completes(unit) else self._write(unit)
            if run and isinstance(outcome, StoreFailed | SqlFailed):
                holes[run] = StoreFailed(outcome.error)
            outcomes.append(outcome)
        self.commits += 1
        self._book.commits += 1
        return outcomes

    def _write(self, unit: Unit) -> Outcome:
        guard = unit.guard
        refused = self._overtaken(unit) or self._guards[type(guard)](guard)
        if refused:
            return refused
        try:
            _check_storable(unit)
        except ValueError as error:
            return StoreFailed(stored_error(self.name, error))
        if unit.sql:
            return SqlFailed(StoreError(f"{self.name} cannot run SQL of your own: use a database file"))
        before = self._book.seq
        run = self._effects.get(type(guard), _run_of)(guard, unit)
        if not run:
            return Committed(0)
        seq = self._book.seq if self._book.seq > before else 0
        for record in unit.records:
            seq = self._append(run, record)
        self._project(run, unit)
        numbered = enumerate(unit.logs, self._book.logs[-1][1] + 1 if self._book.logs else 1)
        self._book.logs.extend((run, number, line) for number, line in numbered)
        for row in unit.once:
            self._mark(run, row)
        return Committed(seq, run, self._book.rows[run].epoch)

    def _overtaken(self, unit: Unit) -> Refused | None:
        for row in unit.once:
            known = self._book.once.get((row.scope, row.key))
            if (None if known is None else known[1].at) != row.saw:
                return Refused("once")
        return None

    def _mark(self, run: int, row: OnceRow) -> None:
        if row.state == "free":
            self._book.once.pop((row.scope, row.key), None)
        else:
            self._book.once[row.scope, row.key] = run, row._replace(saw=None)

    def _append(self, run: int, record: Record) -> int:
        book = self._book
        book.seq += 1
        kept = record._replace(output=None, seq=book.seq)
        book.journal.append(_Entry(run, kept, record.output))
        book.by_run[run].append(kept)
        return book.seq

    def _project(self, run: int, unit: Unit) -> None:
        columns = projected(unit)
        read = columns.pop("read", None)
        if read is not None and any(
            (r.seq or 0) > read and r.kind in LETTERS for r in self._book.by_run[run]
        ):
            columns["wake_at"] = 0
        if unit.definition:
            columns |= {"definition": self._define(unit.definition), "version": unit.definition.version}
        self._set(run, **columns)

    def _define(self, definition: Definition) -> int:
        book = self._book
        identity = (definition.workflow, definition.hash)
        if identity not in book.definitions:
            book.definitions[identity] = len(book.graphs)
            book.graphs.append(definition.graph)
        return book.definitions[identity]

    def _set(self, run: int, **columns: Any) -> None:
        self._book.rows[run] = self._book.rows[run]._replace(**columns)

    # guards: each says what is in the way

    def _owned(self, guard: Owned) -> Refused | None:
        row = self._book.rows.get(guard.run)
        if row is None:
            return Refused("missing")
        if (row.owner, row.epoch) != (guard.session, guard.epoch):
            return Refused("lost", self._holder(row), row.run_id)
        return None

    def _new_run(self, guard: NewRun) -> Refused | None:
        book = self._book
        if guard.run_id in book.numbers:
            row = book.rows[book.numbers[guard.run_id]]
            return Refused("exists", self._holder(row), row.run_id)
        same = self._of_key(guard.workflow, guard.key)
        newest = same[-1] if same else None
        holder = self._holder(newest)
        driven = holder is not None and holder.alive
        if guard.key is not None and ((newest.run if newest else None) != guard.saw or driven):
            return Refused("key_taken", holder, newest.run_id if newest else None)
        return None

    def _claim(self, guard: Claim) -> Refused | None:
        row = self._book.rows.get(guard.run)
        if row is None:
            return Refused("missing")
        holder = self._holder(row)
        if holder and holder.alive:
            return Refused("locked", holder, row.run_id)
        records = self._book.by_run[row.run]
        if records and (records[-1].seq or 0) > guard.seen:
            return Refused("changed", holder, row.run_id)
        rivals = [other for other in self._of_key(row.workflow, row.key) if other.holds_key]
        if rivals and guard.takes_key and not row.holds_key:
            return Refused("key_taken", self._holder(rivals[-1]), rivals[-1].run_id)
        return None

    def _orphaned(self, guard: Orphaned) -> Refused | None:
        row = self._book.rows.get(guard.run)
        if row is None:
            return Refused("missing")
        holder = self._holder(row)
        if (row.owner, row.epoch) != (guard.session, guard.epoch):
            return Refused("lost", holder, row.run_id)
        return Refused("locked", holder, row.run_id) if holder and holder.alive else None

    def _inbox(self, guard: Inbox) -> Refused | None:
        row = self._book.rows.get(guard.run)
        if row is None:
            return Refused("missing")
        there = ((r.kind, r.path) for r in self._book.by_run[row.run] if (r.seq or 0) > guard.after)
        if guard.unless is not None and guard.unless in there:
            return Refused("exists", self._holder(row), row.run_id)
        return None

    def _unique(self, guard: Unique) -> Refused | None:
        return Refused("exists") if guard.name in self._book.names else None

    # what a guard that holds does before the records; each gives the run's number (0: there is none)

    def _revive(self, guard: Owned, unit: Unit) -> int:
        if self._book.rows[guard.run].status == RunStatus.INTERRUPTED:
            revived = revival(unit, self._clock)
            self._append(guard.run, revived)
            self._set(guard.run, **(projection(revived) or {}))
        return guard.run

    def _create(self, guard: NewRun, unit: Unit) -> int:
        book = self._book
        for row in self._of_key(guard.workflow, guard.key):
            self._set(row.run, holds_key=0)
        book.runs += 1
        run = book.runs
        book.rows[run] = first_row(run, guard, unit, self._clock)
        book.numbers[guard.run_id] = run
        book.by_run[run] = []
        return run

    def _take(self, guard: Claim, unit: Unit) -> int:
        row = self._book.rows[guard.run]
        holds = int(guard.takes_key or row.holds_key)
        self._set(guard.run, owner=guard.session, epoch=row.epoch + 1, holds_key=holds)
        return guard.run

    def _use(self, guard: Unique, unit: Unit) -> int:
        self._book.names.add(guard.name)
        return 0

    def _of_key(self, workflow: str, key: str | None) -> list[RunRow]:
        if key is None:
            return []
        return [row for row in self._book.rows.values() if (row.workflow, row.key) == (workflow, key)]

    def _holder(self, row: RunRow | None) -> Holder | None:
        if row is None or row.owner is None:
            return None
        session = self._book.sessions.get(row.owner)
        if session is None:
            return Holder(row.owner, "", "", 0, 0, False)
        alive = row.owner not in self._book.ended and session.expires_at >= self._clock.now()
        return Holder(row.owner, session.uuid, session.host, session.pid, session.started_at, alive)

    def _opened(self) -> None:
        if self._session is None:
            raise StoreError(f"{self.name} is not open")

    # forgetting

    async def forget(self, runs: Mapping[int, int], clear: Clear, *, dry_run: bool = False) -> Forgotten:
        """Remove ended runs: number of each → the epoch under which it was seen."""
        self._opened()
        book = self._book
        rows = [book.rows[run] for run in runs if run in book.rows]
        going = {
            row.run: row.run_id
            for row in rows
            if may_go(row.status, row.epoch, runs[row.run], self._holder(row))
        }
        left = book.forgotten | going
        found = self._remove(going, dry_run=dry_run)._replace(resumed=len(left) - len(going))
        for run, run_id in left.items():
            if await clear(run_id) and not dry_run:
                book.forgotten.pop(run, None)
        return found

    def _remove(self, runs: Mapping[int, str], *, dry_run: bool) -> Forgotten:
        book = self._book
        scopes = {scope_of("run", run_id) for run_id in runs.values()}
        journal = [entry for entry in book.journal if entry.run not in runs]
        logs = [line for line in book.logs if line[0] not in runs]
        once = {place: row for place, row in book.once.items() if place[0] not in scopes}
        found = Forgotten(
            list(runs),
            events=len(book.journal) - len(journal),
            logs=len(book.logs) - len(logs),
            once=len(book.once) - len(once),
        )
        if not dry_run:
            book.journal, book.logs, book.once = journal, logs, once
            book.forgotten |= runs
            for run, run_id in runs.items():
                del book.rows[run], book.by_run[run], book.numbers[run_id]
        return found

    # reading

    async def load(self, run_id: str) -> Loaded | None:
        """Give a run with its journal, or None."""
        run = self._book.numbers.get(run_id)
        if run is None:
            return None
        book, row = self._book, self._book.rows[run]
        return Loaded(row, book.by_run[run].copy(), book.graphs[row.definition], self._holder(row))

    async def find(
        self,
        *,
        workflow: str | None = None,
        key: str | None = None,
        status: Sequence[str] | None = None,
        before: int | None = None,
        due: int | None = None,
        starting: str | None = None,
        since: int | None = None,
        until: int | None = None,
        limit: int = 100,
    ) -> list[tuple[RunRow, Holder | None]]:
        """Give the rows of runs, newest first, that match all of what is given."""
        made = (since or 0, until or 1 << 63)
        matching = (
            row
            for row in reversed(self._book.rows.values())
            if (workflow is None or row.workflow == workflow)
            and (key is None or row.key == key)
            and (status is None or row.status in status)
            and (before is None or row.run < before)
            and (due is None or (row.wake_at is not None and row.wake_at <= due))
            and (starting is None or row.run_id.startswith(starting))
            and made[0] <= row.created_at < made[1]
        )
        return [(row, self._holder(row)) for row in islice(matching, limit)]

    async def tail(
        self, after: int, *, run_id: str | None = None, kinds: Sequence[str] | None = None, limit: int = 1000
    ) -> list[tuple[str, Record]]:
        """Give (run id, record without output) of the journal after a seq, in order."""
        book = self._book
        matching = (
            (book.rows[run].run_id, record)
            for run, record, _ in book.after(after)
            if (run_id is None or book.rows[run].run_id == run_id) and (kinds is None or record.kind in kinds)
        )
        return list(islice(matching, limit))

    async def output(self, seqs: Sequence[int]) -> list[str | None]:
        """Give the packed outputs of these records, in the order asked for."""
        return self.output_now(seqs)

    def output_now(self, seqs: Sequence[int]) -> list[str | None]:
        """Do the same from any thread."""
        return list(map(self._book.output, seqs))

    async def logs(self, run_id: str, *, after: int = 0, limit: int = 1000) -> list[tuple[int, LogLine]]:
        """Give (id, line) of what the nodes of a run logged, in order."""
        run = self._book.numbers.get(run_id)
        mine = ((number, line) for of, number, line in self._book.logs if of == run and number > after)
        return list(islice(mine, limit))

    async def once(self, scope: str, key: str) -> OnceFound | None:
        """Give what is known of a call that is made once, or None."""
        found = self._book.once.get((scope, key))
        if found is None:
            return None
        run = self._book.rows.get(found[0])
        return OnceFound(found[1], run.run_id if run else "", self._holder(run))

    async def changed(self) -> int:
        """Give how often others wrote here."""
        return self._book.commits - self.commits


def _run_of(guard: Any, unit: Unit) -> int:
    return int(guard.run)


def _check_storable(unit: Unit) -> None:
    """Raise ValueError for what a database could not hold, so that both stores refuse the same values."""
    guard = unit.guard
    for row in (
        *unit.records,
        *unit.logs,
        *unit.once,
        [getattr(guard, field.name) for field in fields(guard)],
    ):
        for value in row:
            if isinstance(value, str):
                value.encode()
            elif isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise ValueError("an integer beyond 64 bits")
    if isinstance(guard, Unique):
        refuse_contents(unit)
