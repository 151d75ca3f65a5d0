"""The rows of runs made again from the journal alone, and held against those that are stored.

The row of a run is a projection of its journal, written in the same transaction. Some of its columns say what
the journal does not: who drives the run, its key, its workflow. Those stay as they are (`LEFT_OUT`).
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

from dagresume import schema
from dagresume.errors import RunLocked, StoreError
from dagresume.events import LETTERS, RUN_CREATED, Record, RunStatus, projection, unread
from dagresume.program import inputs_digest
from dagresume.store import SYSTEM_CLOCK, RunRow
from dagresume.wal import uri
from dagresume.writer import holder

__all__ = ["LEFT_OUT", "Change", "differences", "rebuild"]

LEFT_OUT: Final = ("workflow", "version", "definition", "key", "owner", "epoch", "source", "inputs")
"""Columns of a run's row that its journal does not hold."""
_FIELDS: Final = "e.kind, e.attempt, e.at, e.path, e.reason, e.input, e.digest, e.size, e.took, e.data"
_ROWS: Final = ", ".join(f"r.{name}" for name in RunRow._fields)


class Change(NamedTuple):
    """A column of a run's row that differs from what its journal says."""

    run_id: str
    column: str
    stored: Any
    rebuilt: Any

    def __str__(self) -> str:
        return f"{self.column} is {_shown(self.stored)}, by its journal {_shown(self.rebuilt)}"


def _shown(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)


def differences(conn: sqlite3.Connection) -> Iterator[Change]:
    """Give what differs, run by run; the keys come last, since they are a matter between runs."""
    keys: dict[tuple[str, str], list[tuple[int, int, bool]]] = {}
    rows: dict[int, RunRow] = {}
    for row, records in _journals(conn):
        columns = columns_of(row, records, conn)
        if row.key is not None:
            columns.pop("holds_key", None)
            keys.setdefault((row.workflow, row.key), []).extend(_takings(row, records))
            rows[row.run] = row
        for name, value in columns.items():
            if getattr(row, name) != value:
                yield Change(row.run_id, name, getattr(row, name), value)
    for takings in keys.values():
        for run, holds in _holders(takings).items():
            if rows[run].holds_key != holds:
                yield Change(rows[run].run_id, "holds_key", rows[run].holds_key, holds)


def _journals(conn: sqlite3.Connection) -> Iterator[tuple[RunRow, list[Record]]]:
    """Give each run with what was written of the run itself, and the letters to it, in order."""
    # By the index of what changes no path's state: a run's million outputs are not touched.
    told = (
        "SELECT seq FROM dagresume_events WHERE status IS NULL AND (kind >= 'run.' AND kind < 'run/'"
        f" OR kind IN ({', '.join(repr(kind) for kind in LETTERS)}))"
    )
    sql = (
        f"SELECT {_ROWS}, {_FIELDS}, NULL, e.seq FROM dagresume_events AS e"
        f" JOIN dagresume_runs AS r ON r.run = e.run WHERE e.seq IN ({told}) ORDER BY e.run, e.seq"
    )
    width = len(RunRow._fields)
    for _, found in groupby(conn.execute(sql), itemgetter(0)):
        lines = list(found)
        yield RunRow(*lines[0][:width]), [Record(*line[width:]) for line in lines]


def columns_of(row: RunRow, records: Iterable[Record], conn: sqlite3.Connection) -> dict[str, Any]:
    """Give the columns of a run's row that its journal holds. From `row` only what the journal lacks."""
    columns: dict[str, Any] = {}
    letters: list[int] = []
    for record in records:
        if record.kind == RUN_CREATED:
            columns |= _first(row, record, conn)
        columns |= projection(record) or {}
        if record.kind == RUN_CREATED and not row.epoch:
            columns["status"] = RunStatus.PENDING.value  # nobody has owned it yet
        if record.kind in LETTERS:
            letters.append(record.seq or 0)
        read = unread(record)
        if read is not None and any(letter > read for letter in letters):
            columns["wake_at"] = 0
    return columns


def _first(row: RunRow, record: Record, conn: sqlite3.Connection) -> dict[str, Any]:
    """Give what the first record of a run says of it, and what a new run has."""
    facts = record.facts
    columns: dict[str, Any] = {
        "created_at": record.at,
        "holds_key": 1,
        "wake_at": None,
        "finished_at": None,
        "usage": None,
        "auto_resumes": 0,
        "recoveries": 0,
        "forked_at_seq": facts.get("forked_at_seq"),
    }
    if "inputs" in facts:
        packed = {name: ("", bytes.fromhex(digest)) for name, digest in facts["inputs"].items()}
        columns["inputs_digest"] = inputs_digest(packed)
    source = facts.get("forked_from")
    found = conn.execute("SELECT run FROM dagresume_runs WHERE run_id = ?", [source]).fetchone()
    if source is None or found:
        columns["forked_from"] = found[0] if found else None
    return columns


def _takings(row: RunRow, records: Iterable[Record]) -> Iterator[tuple[int, int, bool]]:
    """Give (seq, run, takes) each time the run takes its key or gives it up."""
    for record in records:
        held = (projection(record) or {}).get("holds_key", 1 if record.kind == RUN_CREATED else None)
        if held is not None:
            yield record.seq or 0, row.run, bool(held)


def _holders(takings: list[tuple[int, int, bool]]) -> dict[int, int]:
    """Give for each run of a key whether it holds the key at the end; taking it takes it from the rest."""
    held: dict[int, int] = {}
    for _, run, takes in sorted(takings):
        if takes:
            held = dict.fromkeys(held, 0)
        held[run] = int(takes)
    return held


def rebuild(path: str | os.PathLike[str]) -> list[Change]:
    """Make the rows of all runs agree with the journal, in one transaction; gives what was changed.

    RunLocked if a living session drives a run; StoreError for a file that is not ours or cannot be written.
    """
    place = os.path.abspath(path)  # noqa: PTH100  # Path.absolute() keeps `..`
    if not Path(place).is_file() or not Path(place).stat().st_size:
        raise StoreError(f"{place}: there is no database here. Name one with --db.")
    try:
        with closing(sqlite3.connect(uri(place), uri=True, isolation_level=None, timeout=5.0)) as conn:
            return _rebuilt(conn, place)
    except sqlite3.Error as error:
        raise schema.explained(place, error) from error


def _rebuilt(conn: sqlite3.Connection, place: str) -> list[Change]:
    conn.execute("BEGIN IMMEDIATE")
    if not schema.examine(conn, place, adopt=False):
        raise StoreError(f"{place} holds no runs: nothing is to be rebuilt.")
    owners = "SELECT owner, run_id FROM dagresume_runs WHERE owner IS NOT NULL GROUP BY owner"
    for owner, run_id in conn.execute(owners).fetchall():
        who = holder(conn, owner, SYSTEM_CLOCK)
        if who is not None and who.alive:
            raise RunLocked(run_id, str(who), advice=" Nothing was rebuilt; wait for its end, or stop it.")
    changes = list(differences(conn))
    # A key that one run gives up is free before another one takes it.
    for change in sorted(changes, key=lambda change: (change.column == "holds_key", change.rebuilt == 1)):
        sql = f"UPDATE dagresume_runs SET {change.column} = ? WHERE run_id = ?"
        conn.execute(sql, [change.rebuilt, change.run_id])
    conn.execute("COMMIT")
    return changes
