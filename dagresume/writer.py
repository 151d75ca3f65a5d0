"""The connection that writes: many units in one transaction, each behind its guard.

The plain case, completions of nodes in runs we own, is one statement that commits by itself: every step of
SQLite gives the interpreter's lock away and waits for it, so that the number of statements is what a busy
program feels. Everything else is a transaction of several statements. After an error each unit is tried
again alone.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dagresume.errors import StoreError
from dagresume.events import LETTERS, Record, RunStatus, projection
from dagresume.schema import EVENT_COLUMNS, busy, explained, persist
from dagresume.sessions import is_alive
from dagresume.store import (
    SYSTEM_CLOCK,
    Claim,
    Committed,
    Definition,
    Holder,
    Inbox,
    NewRun,
    OnceRow,
    Orphaned,
    Outcome,
    Owned,
    Refused,
    RunRow,
    Session,
    SqlFailed,
    StoreFailed,
    Unique,
    Unit,
    completes,
    first_row,
    projected,
    refuse_contents,
    revival,
)
from dagresume.wal import Wal

if TYPE_CHECKING:
    from dagresume.clock import Clock

__all__ = ["Worker", "Writer", "holder"]

_committed: Final[Callable[[tuple[int, int, int]], Committed]] = partial(tuple.__new__, Committed)
LOOK: Final = 0.25
"""Seconds between two looks whether the files are still there."""
_WIDTH: Final = EVENT_COLUMNS.count(",") + 1
_MOST_ROWS: Final = 1024
_RUN_COLUMNS: Final = ", ".join(RunRow._fields)
_INSERT_RUN: Final = (
    f"INSERT INTO dagresume_runs({_RUN_COLUMNS.partition(', ')[2]})"
    f" VALUES ({', '.join('?' * (len(RunRow._fields) - 1))})"
)
_INSERT: Final = f"INSERT INTO dagresume_events(run, {EVENT_COLUMNS})"
_INSERT_ONE: Final = f"{_INSERT} VALUES ({', '.join('?' * (_WIDTH + 1))})"


@lru_cache(maxsize=64)
def _insert_owned(rows: int, many_runs: bool) -> str:
    """Give the statement that inserts up to `rows` records of the runs that are owned as its parameters say.

    A row of NULLs is no record. Few sizes are used, so that few statements are prepared.
    """
    if many_runs:
        width, run, first, epoch = _WIDTH + 2, "column1", 2, f"column{_WIDTH + 2}"
    else:
        width, run, first, epoch = _WIDTH, "?", 1, "?"
    values = ", ".join([f"({', '.join('?' * width)})"] * rows)
    columns = ", ".join(f"column{n}" for n in range(first, first + _WIDTH))
    return (
        f"{_INSERT} SELECT {run}, {columns} FROM (VALUES {values}) WHERE column{first} IS NOT NULL"
        f" AND EXISTS(SELECT 1 FROM dagresume_runs WHERE run = {run} AND epoch = {epoch} AND owner = ?"
        " AND status <> 'interrupted')"
    )


@lru_cache(maxsize=64)
def _update_run(names: tuple[str, ...]) -> str:
    setters = ", ".join(f"{name} = ?" for name in names)
    return f"UPDATE dagresume_runs SET {setters} WHERE run = ?"


class _Plain(NamedTuple):
    """One statement for many units."""

    sql: str
    parameters: list[Any]
    rows: int
    changes_rows: bool


class _Place(NamedTuple):
    """Where a unit whose guard holds is written."""

    run: int
    epoch: int
    before: tuple[Record, ...] = ()


class _UserError(Exception):
    """The user's own statement failed; its error is the cause."""


class Worker(sqlite3.Connection):
    """A connection whose `commit()` does the next job on its desk, in its own thread: one hop."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.desk: deque[tuple[Callable[[], Any], list[Any]]] = deque()

    def commit(self) -> None:
        """Do the job that has waited longest; its result goes into the box beside it."""
        job, box = self.desk.popleft()
        box.append(job())


class Writer(Worker):
    """The one connection that writes to a file from this engine, by `execute` and `executemany` alone."""

    path: str = ""
    commits: int = 0
    clock: Clock = SYSTEM_CLOCK

    def set_up(self, path: str, clock: Clock) -> None:
        """Get ready to write to the file at `path`."""
        self.path, self.clock = path, clock
        self.wal = Wal(path)
        self._files: dict[str, tuple[int, int] | None] = {}
        self._look_at = 0.0
        self._holes: dict[int, StoreFailed] = {}
        self._defined: dict[tuple[str, bytes], int] = {}  # definitions met in this transaction
        variables = self.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER)
        most = min(_MOST_ROWS, (variables - 3) // (_WIDTH + 2))
        self._most_rows = 1 << (most.bit_length() - 1)

    def watch(self) -> None:
        """From now on, both files are there: notice if they are taken away."""
        self._files = {each: _file_at(each) for each in (self.path, f"{self.path}-wal")}

    def write(self, units: Sequence[Unit]) -> list[Outcome]:
        """Make these units durable; one outcome for each, in order."""
        self._holes.clear()
        gone = self._gone()
        if gone is not None:
            return self._spoilt(units, gone)
        commits = self.commits
        outcomes: list[Outcome] = []
        for group in _groups(units):
            outcomes += self._together(group)
        sizes = [len(record.output or ()) for unit in units for record in unit.records]
        self.wal.note(self.commits - commits, len(sizes), sum(sizes))
        return outcomes

    def tend(self) -> None:
        """Look after the log. What is written is written: whatever goes wrong here is no unit's failure."""
        with contextlib.suppress(Exception):
            self.wal.tend(self)

    def _gone(self) -> StoreError | None:
        """Say if the files that are written to are no longer those at our path; looks now and then.

        SQLite would go on writing to files that nobody can find any more.
        """
        now = time.monotonic()
        if now < self._look_at:
            return None
        for path, file in self._files.items():
            if _file_at(path) != file:
                return _moved(self.path, path)
        self._look_at = now + LOOK
        return None

    # one transaction, and what is done when it fails

    def _together(self, units: Sequence[Unit]) -> Sequence[Outcome]:
        if self._holes and any(map(self._untrue, units)):
            return list(map(self._alone, units))
        plain = self._plain(units)
        if plain is None or plain.changes_rows:
            return self._slowly(units)
        try:
            inserted, last = persist(self, partial(self._insert, plain))
        except Exception as error:
            return self._spoilt(units, error) if busy(error) else list(map(self._alone, units))
        self.commits += 1
        try:
            written = self._shares(units, plain, inserted, last)
        except Exception as error:
            # Some of it is written, nobody knows which: trying again could write it twice.
            return self._spoilt(units, error)
        left = [unit for unit, outcome in zip(units, written, strict=True) if outcome is None]
        decided = iter(self._slowly(left) if left else ())
        return [outcome or next(decided) for outcome in written]

    def _slowly(self, units: Sequence[Unit]) -> Sequence[Outcome]:
        try:
            return persist(self, partial(self._transaction, units))
        except _UserError as error:
            return [self._failed(units[0], SqlFailed(_cause(error)))]
        except Exception as error:
            # A locked database is no single unit's fault.
            one = len(units) == 1 or busy(error)
            return self._spoilt(units, error) if one else list(map(self._alone, units))

    def _spoilt(self, units: Sequence[Unit], error: Exception) -> list[Outcome]:
        return [self._failed(unit, StoreFailed(explained(self.path, error))) for unit in units]

    def _alone(self, unit: Unit) -> Outcome:
        if self._untrue(unit):
            return self._holes[unit.guard.run]  # type: ignore[union-attr]  # only a unit with a run is untrue
        return self._slowly([unit])[0]

    def _untrue(self, unit: Unit) -> bool:
        """Say whether the unit declares a run completed of which a unit before it is missing."""
        return getattr(unit.guard, "run", 0) in self._holes and completes(unit)

    def _failed(self, unit: Unit, outcome: StoreFailed | SqlFailed) -> Outcome:
        run = getattr(unit.guard, "run", 0)
        if run:
            self._holes[run] = StoreFailed(outcome.error)
        return outcome

    def _transaction(self, units: Sequence[Unit]) -> list[Outcome]:
        self._defined.clear()
        self.execute("BEGIN IMMEDIATE")
        outcomes: list[Outcome] = []
        for stretch in _stretches(units):
            outcomes += self._stretch(stretch)
        self.execute("COMMIT")
        self.commits += 1
        return outcomes

    def _stretch(self, units: Sequence[Unit]) -> list[Outcome]:
        # Alone, a unit is looked at by its guard first: a refusal is not to be hidden by a value that fails.
        plain = self._plain(units) if len(units) > 1 else None
        if plain is None:
            return list(map(self._apply, units))
        written = self._shares(units, plain, *self._insert(plain))
        if plain.changes_rows:
            both = zip(units, written, strict=True)
            self._update_all([(it.run, projected(unit)) for unit, it in both if it and _changes_row(unit)])
        return [outcome or self._apply(unit) for unit, outcome in zip(units, written, strict=True)]

    # the plain case

    def _plain(self, units: Sequence[Unit]) -> _Plain | None:
        """Give the one statement for these units; None if they need more than that."""
        owners: dict[int, Owned] = {}
        rows = 0
        last: Any = None
        for unit in units:
            if not _is_plain(unit):
                return None
            guard = unit.guard
            if guard is not last:
                assert isinstance(guard, Owned)
                last = guard
                if owners.setdefault(guard.run, guard) != guard:
                    return None
            rows += len(unit.records)
        if rows > self._most_rows or len({guard.session for guard in owners.values()}) != 1:
            return None
        changes_rows = any(map(_changes_row, units))
        size = 1 << (rows - 1).bit_length()
        if len(owners) == 1:
            return _Plain(_insert_owned(size, False), _of_one_run(units, size - rows), rows, changes_rows)
        return _Plain(_insert_owned(size, True), _of_many_runs(units, size - rows), rows, changes_rows)

    def _insert(self, plain: _Plain) -> tuple[int, int]:
        """Insert the records of all units whose run is ours; gives their number and the last seq."""
        cursor = self.execute(plain.sql, plain.parameters)
        return cursor.rowcount, cursor.lastrowid or 0

    def _shares(
        self, units: Sequence[Unit], plain: _Plain, inserted: int, last: int
    ) -> list[Committed | None]:
        """Give what became of each unit: None if its run was not ours."""
        seq = last - inserted
        runs = None if inserted == plain.rows else self._runs_written(seq, inserted)
        outcomes: list[Committed | None] = []
        for unit in units:
            guard: Any = unit.guard  # an Owned
            if runs is None or guard.run in runs:
                seq += len(unit.records)
                outcomes.append(_committed((seq, guard.run, guard.epoch)))
            else:
                outcomes.append(None)
        return outcomes

    def _runs_written(self, after: int, rows: int) -> set[int]:
        """Give the runs that were ours: the rows of the others were left out without a word."""
        if not rows:
            return set()
        sql = "SELECT DISTINCT run FROM dagresume_events WHERE seq > ? AND seq <= ?"
        return {run for (run,) in self.execute(sql, [after, after + rows]).fetchall()}

    # one unit inside the transaction

    def _apply(self, unit: Unit) -> Outcome:
        if unit.once and self._is_overtaken(unit.once):
            return Refused("once")
        place = _GUARDS[type(unit.guard)](self, unit.guard, unit)
        if isinstance(place, Refused):
            return place
        seq = self._append(place.run, (*place.before, *unit.records))
        if not isinstance(unit.guard, NewRun):
            self._update(place.run, self._columns(unit, place.before))
        if unit.logs:
            sql = "INSERT INTO dagresume_logs(run, path, attempt, at, level, line) VALUES (?, ?, ?, ?, ?, ?)"
            self.executemany(sql, [(place.run, *line) for line in unit.logs])
        if unit.once:
            self._mark(place.run, unit.once)
        if unit.sql:
            self._run_users_sql(unit.sql)
        return Committed(seq, place.run, place.epoch)

    def _is_overtaken(self, rows: Sequence[OnceRow]) -> bool:
        """Say whether a row is not the one that was seen when these were made."""
        known = "SELECT at FROM dagresume_once WHERE scope = ? AND key = ?"
        found = (self.execute(known, [row.scope, row.key]).fetchone() for row in rows)
        return any((there[0] if there else None) != row.saw for there, row in zip(found, rows, strict=True))

    def _mark(self, run: int, rows: Sequence[OnceRow]) -> None:
        for row in rows:
            if row.state == "free":
                self.execute("DELETE FROM dagresume_once WHERE scope = ? AND key = ?", [row.scope, row.key])
            else:
                values = [row.scope, row.key, run, row.path, row.state, row.result, row.at]
                self.execute("INSERT OR REPLACE INTO dagresume_once VALUES (?, ?, ?, ?, ?, ?, ?)", values)

    def _append(self, run: int, records: Sequence[Record]) -> int:
        """Insert records; gives the seq of the last one, 0 if there is none."""
        if not records:
            return 0
        if len(records) == 1:
            return self.execute(_INSERT_ONE, (run, *records[0][:_WIDTH])).lastrowid or 0
        self.executemany(_INSERT_ONE, [(run, *record[:_WIDTH]) for record in records])
        return int(self.execute("SELECT last_insert_rowid()").fetchone()[0])

    def _columns(self, unit: Unit, before: Sequence[Record] = ()) -> dict[str, Any]:
        columns: dict[str, Any] = {}
        for record in before:
            columns |= projection(record) or {}
        columns |= projected(unit)
        if unit.definition:
            columns |= {"definition": self._define(unit.definition), "version": unit.definition.version}
        return columns

    def _update(self, run: int, columns: dict[str, Any]) -> None:
        read = columns.pop("read", None)
        if read is not None and self._unread(run, read):
            columns["wake_at"] = 0
        if columns:
            self.execute(_update_run(tuple(columns)), [*columns.values(), run])

    def _update_all(self, changes: Sequence[tuple[int, dict[str, Any]]]) -> None:
        """Do as `_update` does for each; runs that end together change the same columns."""
        alike: dict[tuple[str, ...], list[list[Any]]] = {}
        for run, columns in changes:
            if "read" in columns:
                self._update(run, columns)
            elif columns:
                alike.setdefault(tuple(columns), []).append([*columns.values(), run])
        for names, rows in alike.items():
            self.executemany(_update_run(names), rows)

    def _unread(self, run: int, read: int) -> bool:
        """Say whether a letter to the run came after this seq."""
        kinds = ", ".join("?" * len(LETTERS))
        which = f"kind IN ({kinds}) AND status IS NULL AND seq > ? AND run = ?"
        sql = f"SELECT 1 FROM dagresume_events WHERE {which} LIMIT 1"
        return self.execute(sql, [*LETTERS, read, run]).fetchone() is not None

    def _define(self, definition: Definition) -> int:
        """Give the number of this definition, stored now if it is not there yet."""
        known = definition.workflow, definition.hash
        number = self._defined.get(known)
        if number is None:
            number = self._defined[known] = self._find_or_store(definition)
        return number

    def _find_or_store(self, definition: Definition) -> int:
        find = "SELECT definition FROM dagresume_definitions WHERE workflow = ? AND hash = ?"
        found = self.execute(find, [definition.workflow, definition.hash]).fetchone()
        if found:
            return int(found[0])
        insert = (
            "INSERT INTO dagresume_definitions(workflow, version, hash, graph, created_at)"
            " VALUES (?, ?, ?, ?, ?)"
        )
        number = self.execute(insert, [*definition[:4], self.clock.now()]).lastrowid or 0
        nodes = [(number, node, place, kind) for place, (node, kind) in enumerate(definition.nodes)]
        for some in (nodes[start : start + 128] for start in range(0, len(nodes), 128)):
            values = ", ".join(["(?, ?, ?, ?)"] * len(some))  # a statement each would take twice as long
            self.execute(f"INSERT INTO dagresume_definition_nodes VALUES {values}", [*chain(*some)])
        return number

    def _run_users_sql(self, statements: Sequence[tuple[str, Sequence[Any] | Mapping[str, Any]]]) -> None:
        self.set_authorizer(_allow_users_sql)
        sql = ""
        try:
            for sql, parameters in statements:
                self.execute(sql, parameters).fetchall()
        except Exception as error:
            raise _UserError from _named(error, sql)
        finally:
            self.set_authorizer(None)
        if not self.in_transaction:
            raise _UserError from sqlite3.OperationalError("a statement ended the transaction it was part of")

    # guards

    def _owned(self, guard: Owned, unit: Unit) -> Refused | _Place:
        row = self._row(guard.run)
        if row is None:
            return Refused("missing")
        if (row.owner, row.epoch) != (guard.session, guard.epoch):
            return Refused("lost", holder(self, row.owner, self.clock), row.run_id)
        revived = row.status == RunStatus.INTERRUPTED
        return _Place(row.run, row.epoch, (revival(unit, self.clock),) if revived else ())

    def _new_run(self, guard: NewRun, unit: Unit) -> Refused | _Place:
        if refused := self._existing(guard) or (self._take_key(guard) if guard.key is not None else None):
            return refused
        set_by_records = self._columns(unit)
        set_by_records.pop("read", None)
        row = first_row(0, guard, unit, self.clock)._replace(**set_by_records)
        return _Place(self.execute(_INSERT_RUN, row[1:]).lastrowid or 0, row.epoch)

    def _existing(self, guard: NewRun) -> Refused | None:
        found = self.execute(f"SELECT {_RUN_COLUMNS} FROM dagresume_runs WHERE run_id = ?", [guard.run_id])
        there = found.fetchone()
        if there is None:
            return None
        row = RunRow(*there)
        return Refused("exists", holder(self, row.owner, self.clock), row.run_id)

    def _take_key(self, guard: NewRun) -> Refused | None:
        newest = self._of_key(guard.workflow, str(guard.key))
        owner = holder(self, newest.owner, self.clock) if newest else None
        if (newest.run if newest else None) != guard.saw or (owner and owner.alive):
            return self._key_taken(newest)
        if newest:
            take = "UPDATE dagresume_runs SET holds_key = 0 WHERE workflow = ? AND key = ? AND holds_key = 1"
            self.execute(take, [guard.workflow, guard.key])
        return None

    def _claim(self, guard: Claim, unit: Unit) -> Refused | _Place:
        row = self._row(guard.run)
        if row is None:
            return Refused("missing")
        owner = holder(self, row.owner, self.clock)
        if owner and owner.alive:
            return Refused("locked", owner, row.run_id)
        # `+run`: what came after `seen` is little, the run's own records may be a million.
        newer = "SELECT 1 FROM dagresume_events WHERE seq > ? AND +run = ? LIMIT 1"
        if self.execute(newer, [guard.seen, row.run]).fetchone():
            return Refused("changed", owner, row.run_id)
        if row.key is not None and guard.takes_key and not row.holds_key:
            rival = self._of_key(row.workflow, row.key, "AND holds_key = 1")
            if rival:
                return self._key_taken(rival)
        take = "UPDATE dagresume_runs SET owner = ?, epoch = epoch + 1, holds_key = ? WHERE run = ?"
        self.execute(take, [guard.session, int(guard.takes_key or row.holds_key), row.run])
        return _Place(row.run, row.epoch + 1)

    def _orphaned(self, guard: Orphaned, unit: Unit) -> Refused | _Place:
        row = self._row(guard.run)
        if row is None:
            return Refused("missing")
        owner = holder(self, row.owner, self.clock)
        if (row.owner, row.epoch) != (guard.session, guard.epoch):
            return Refused("lost", owner, row.run_id)
        if owner and owner.alive:
            return Refused("locked", owner, row.run_id)
        return _Place(row.run, row.epoch)

    def _inbox(self, guard: Inbox, unit: Unit) -> Refused | _Place:
        row = self._row(guard.run)
        if row is None:
            return Refused("missing")
        if guard.unless is not None:
            kind, path = guard.unless
            sql = (
                "SELECT 1 FROM dagresume_events WHERE run = ? AND path IS ? AND seq > ? AND kind = ? LIMIT 1"
            )
            if self.execute(sql, [row.run, path, guard.after, kind]).fetchone():
                return Refused("exists", holder(self, row.owner, self.clock), row.run_id)
        return _Place(row.run, row.epoch)

    def _unique(self, guard: Unique, unit: Unit) -> Refused | _Place:
        sql = "INSERT INTO dagresume_cursors VALUES (?, NULL, ?) ON CONFLICT DO NOTHING"
        if not self.execute(sql, [guard.name, self.clock.now()]).rowcount:
            return Refused("exists")
        refuse_contents(unit)
        return _Place(0, 0)

    def _row(self, run: int) -> RunRow | None:
        found = self.execute(f"SELECT {_RUN_COLUMNS} FROM dagresume_runs WHERE run = ?", [run]).fetchone()
        return RunRow(*found) if found else None

    def _of_key(self, workflow: str, key: str, which: str = "") -> RunRow | None:
        """Give the newest run of a key."""
        sql = f"SELECT {_RUN_COLUMNS} FROM dagresume_runs WHERE workflow = ? AND key = ? {which}"
        found = self.execute(f"{sql} ORDER BY run DESC LIMIT 1", [workflow, key]).fetchone()
        return RunRow(*found) if found else None

    def _key_taken(self, row: RunRow | None) -> Refused:
        if row is None:
            return Refused("key_taken")
        return Refused("key_taken", holder(self, row.owner, self.clock), row.run_id)


_GUARDS: Final[dict[type, Callable[[Writer, Any, Unit], Refused | _Place]]] = {
    Owned: Writer._owned,
    NewRun: Writer._new_run,
    Claim: Writer._claim,
    Orphaned: Writer._orphaned,
    Inbox: Writer._inbox,
    Unique: Writer._unique,
}


def holder(conn: sqlite3.Connection, session: int | None, clock: Clock) -> Holder | None:
    """Give who this session is, and whether it lives as far as can be told from here."""
    if session is None:
        return None
    columns = ", ".join(Session._fields)
    sql = f"SELECT ended_at, {columns} FROM dagresume_sessions WHERE session = ?"
    found = conn.execute(sql, [session]).fetchone()
    if found is None:
        return Holder(session, "", "", 0, 0, False)
    known = Session(*found[1:])
    alive = found[0] is None and is_alive(known, clock.now())
    return Holder(session, known.uuid, known.host, known.pid, known.started_at, alive)


def _file_at(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116  # asked while runs are busy: a Path costs as much again
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _moved(database: str, path: str) -> StoreError:
    if path == database:
        advice = (
            "What was written since is in a file that nobody finds. Put the file back, or close the engine"
            " and go on with what is there now"
        )
    else:
        advice = "Close the engine, which copies what the log holds into the database, then resume"
    return StoreError(f"{path} was deleted or replaced while it was open. {advice}.")


# -- how units go together ------------------------------------------------------------------------------


def _groups(units: Sequence[Unit]) -> Iterator[Sequence[Unit]]:
    """Cut where a unit has SQL of the user's: it has a transaction of its own."""
    group: list[Unit] = []
    for unit in units:
        if unit.sql and group:
            yield group
            group = []
        group.append(unit)
        if unit.sql:
            yield group
            group = []
    if group:
        yield group


def _is_plain(unit: Unit) -> bool:
    if type(unit.guard) is not Owned or unit.definition or unit.logs or unit.sql or unit.once:
        return False
    return bool(unit.records)


def _changes_row(unit: Unit) -> bool:
    for record in unit.records:  # noqa: SIM110  # asked for every unit: any() would cost twice as much
        if record.path is None and projection(record):
            return True
    return False


def _stretches(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """Cut between plain units and others, and behind a plain one whose run's row changes with it."""
    stretch: list[Unit] = []
    changed: set[int] = set()
    plain = False
    for unit in units:
        run = getattr(unit.guard, "run", 0)
        if stretch and (_is_plain(unit) != plain or run in changed):
            yield stretch
            stretch, changed = [], set()
        plain = _is_plain(unit)
        stretch.append(unit)
        if plain and _changes_row(unit):
            changed.add(run)
    if stretch:
        yield stretch


def _of_one_run(units: Sequence[Unit], spare: int) -> list[Any]:
    guard = units[0].guard
    assert isinstance(guard, Owned)
    parameters: list[Any] = [guard.run]
    for unit in units:
        for record in unit.records:
            parameters += record[:_WIDTH]
    return [*parameters, *[None] * (spare * _WIDTH), guard.run, guard.epoch, guard.session]


def _of_many_runs(units: Sequence[Unit], spare: int) -> list[Any]:
    parameters: list[Any] = []
    session = None
    for unit in units:
        guard = unit.guard
        assert isinstance(guard, Owned)
        session = guard.session
        for record in unit.records:
            parameters.append(guard.run)
            parameters += record[:_WIDTH]
            parameters.append(guard.epoch)
    return [*parameters, *[None] * (spare * (_WIDTH + 2)), session]


# -- a user's own statements ----------------------------------------------------------------------------

_FREE: Final = frozenset(
    {sqlite3.SQLITE_READ, sqlite3.SQLITE_SELECT, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
)
_FORBIDDEN: Final = frozenset(
    {
        sqlite3.SQLITE_TRANSACTION,
        sqlite3.SQLITE_SAVEPOINT,
        sqlite3.SQLITE_ATTACH,
        sqlite3.SQLITE_DETACH,
        sqlite3.SQLITE_PRAGMA,
    }
)
_NOT_HERE: Final = (
    "no transaction control, ATTACH, PRAGMA or change of the engine's own tables beside a checkpoint"
)
_ROWS: Final = frozenset({sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE})
# The last two are SQLite's own tables through which ours could be changed.
_OURS: Final = ("dagresume_", "workflow_checkpoints", "sqlite_sequence", "sqlite_dbpage")


def _allow_users_sql(
    action: int, first: str | None, second: str | None, database: str | None, source: str | None
) -> int:
    """Refuse what would end our transaction or touch our tables; asked while a statement is prepared."""
    if action in _FREE:
        return sqlite3.SQLITE_OK
    names = (first,) if action in _ROWS else (first, second)
    ours = any(name and name.lower().startswith(_OURS) for name in names)
    return sqlite3.SQLITE_DENY if ours or action in _FORBIDDEN else sqlite3.SQLITE_OK


def _named(error: Exception, sql: str) -> Exception:
    """Give the error with the statement it came from, as the same type of error if that can be made."""
    shown = " ".join(str(sql).split())
    shown = shown if len(shown) <= 200 else f"{shown[:199]}…"
    code = getattr(error, "sqlite_errorcode", None)
    denied = f": {_NOT_HERE}" if code == sqlite3.SQLITE_AUTH else ""
    if not isinstance(error, sqlite3.Error | sqlite3.Warning | OverflowError | TypeError):
        return error
    named = type(error)(f"{error}{denied} (in {shown!r})")
    if isinstance(named, sqlite3.Error) and code is not None:
        named.sqlite_errorcode, named.sqlite_errorname = code, getattr(error, "sqlite_errorname", "")
    return named


def _cause(error: Exception) -> Exception:
    cause = error.__cause__
    return cause if isinstance(cause, Exception) else error
