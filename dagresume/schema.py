"""The tables and views of a database file, how a file becomes ours, and what its errors mean.

A file is ours if it has the table `dagresume_meta`. A new (or empty) file becomes ours, a sound SQLite
database of somebody else's only if they asked for it; everything else is refused before a byte is written.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sqlite3
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

from dagresume.errors import SchemaTooNew, StoreCorrupt, StoreError, StoreFull, StoreReadOnly
from dagresume.locks import writers

__all__ = [
    "APPLICATION_ID",
    "EVENT_COLUMNS",
    "VERSION",
    "busy",
    "examine",
    "expected",
    "explained",
    "make_private",
    "migrate",
    "persist",
    "refuse_cut",
    "refuse_read_only",
    "use_wal",
]

_SMALLEST: Final = 512
_NO_SPACE: Final = 1 << 16
"""Free bytes below which a disk counts as full: the shared memory beside a log takes half of that at once."""
_OLDEST: Final = (3, 31)
"""The first SQLite with generated columns (of January 2020)."""
APPLICATION_ID: Final = int.from_bytes(b"dgrs", "big")
EVENT_COLUMNS: Final = "kind, attempt, at, path, reason, input, digest, size, took, data, output"
"""The columns of a record, in the order of `Record`'s fields."""

_LATEST: Final = """e.status IS NOT NULL AND NOT EXISTS (
    SELECT 1 FROM dagresume_events AS n
    WHERE n.run = e.run AND n.path = e.path AND n.seq > e.seq AND n.status IS NOT NULL)"""
_FIRST: Final = """(SELECT f.at FROM dagresume_events AS f
    WHERE f.run = e.run AND f.path = e.path AND f.status IS NOT NULL ORDER BY f.seq LIMIT 1)"""
_NO_EVENT: Final = """NOT EXISTS (
    SELECT 1 FROM dagresume_events AS n WHERE n.run = r.run AND n.path = d.node AND n.status IS NOT NULL)"""
_RETRY_COUNT: Final = "max(coalesce(e.attempt, 1) - 1, 0)"
_INPUT: Final = "nullif(lower(hex(e.input)), '')"


def _iso(column: str) -> str:
    """Give SQL for a time with fixed digits: so its text sorts as the times do."""
    return (
        f"strftime('%Y-%m-%dT%H:%M:%S', {column} / 1000000, 'unixepoch')"
        f" || printf('.%06d+00:00', {column} % 1000000)"
    )


def _checkpoints(status: str, which: str) -> str:
    return f"""
SELECT e.seq AS id, r.run_id AS workflow_id, e.path AS node_id, {status} AS node_status,
       e.output AS node_output, {_INPUT} AS node_input, {_RETRY_COUNT} AS retry_count,
       {_FIRST} AS created_at, e.at AS updated_at
FROM dagresume_events AS e JOIN dagresume_runs AS r ON r.run = e.run
WHERE {which} AND {_LATEST}"""


# An attempt that is tried again by itself is no failure to whoever counts failures. It has an arm of its own,
# so that a question for one status reaches the index on failures.
_RETRIED: Final = "e.status = 'failed' AND e.reason IS 'retry'"
_WORKFLOW_CHECKPOINTS: Final = f"""CREATE VIEW workflow_checkpoints AS
{_checkpoints("e.status", f"NOT ({_RETRIED})")}
UNION ALL
{_checkpoints("'running'", _RETRIED)}
UNION ALL
SELECT NULL, r.run_id, d.node, 'pending', NULL, NULL, 0, r.created_at, r.created_at
FROM dagresume_runs AS r JOIN dagresume_definition_nodes AS d ON d.definition = r.definition
WHERE {_NO_EVENT}"""

_EXACT_CHECKPOINTS: Final = f"""CREATE VIEW dagresume_checkpoints AS
SELECT e.seq AS id, r.run_id AS workflow_id, r.workflow AS workflow, e.path AS node_id,
       CASE WHEN e.kind = 'node.failed' AND e.reason IS 'retry' THEN 'waiting'
            WHEN e.kind = 'node.started' THEN 'running'
            WHEN e.kind IN ('node.reset', 'node.withdrawn') THEN 'pending'
            ELSE substr(e.kind, 6) END AS node_status,
       e.reason AS reason, e.output AS node_output, {_INPUT} AS node_input, {_RETRY_COUNT} AS retry_count,
       e.took / 1e6 AS seconds, {_iso(_FIRST)} AS created_at, {_iso("e.at")} AS updated_at
FROM dagresume_events AS e JOIN dagresume_runs AS r ON r.run = e.run
WHERE {_LATEST}
UNION ALL
SELECT NULL, r.run_id, r.workflow, d.node, 'pending', NULL, NULL, NULL, 0, NULL,
       {_iso("r.created_at")}, {_iso("r.created_at")}
FROM dagresume_runs AS r JOIN dagresume_definition_nodes AS d ON d.definition = r.definition
WHERE {_NO_EVENT}"""

# Nothing of it is stored: the word follows from the kind, and is made when somebody asks for it.
_WORD_OF_KIND: Final = """CASE kind WHEN 'node.completed' THEN 'success' WHEN 'node.started' THEN 'running'
    WHEN 'node.failed' THEN 'failed' WHEN 'node.skipped' THEN 'skipped' WHEN 'node.compensated' THEN 'skipped'
    WHEN 'node.interrupted' THEN 'running' WHEN 'node.waiting' THEN 'running'
    WHEN 'node.cancelled' THEN 'pending' WHEN 'node.reset' THEN 'pending' WHEN 'node.withdrawn' THEN 'pending'
  END"""

# -- monitoring (R17); `dagresume.metrics` reads the same from the journal

_ENDS: Final = (
    "'run.completed', 'run.waiting', 'run.rolled_back', 'run.failed', 'run.interrupted', 'run.cancelled'"
)
_NEXT: Final = f"""(SELECT n.kind FROM dagresume_events AS n
    WHERE n.run = e.run AND n.path IS NULL AND n.seq > e.seq
      AND n.kind IN ('run.claimed', 'run.rolling_back', {_ENDS}) ORDER BY n.seq LIMIT 1)"""
_RECOVERIES: Final = f"""CREATE VIEW dagresume_recoveries AS
SELECT seq, run_id, workflow, started_at, "by", coalesce(substr(ended, 5), 'running') AS ended,
       CASE WHEN ended IN ('run.completed', 'run.waiting', 'run.rolled_back') THEN 1
            WHEN ended IS NOT NULL AND ended <> 'run.cancelled' THEN 0 END AS succeeded
FROM (SELECT e.seq AS seq, r.run_id AS run_id, r.workflow AS workflow, {_iso("e.at")} AS started_at,
             json_extract(e.data, '$.by') AS "by", {_NEXT} AS ended
      FROM dagresume_events AS e CROSS JOIN dagresume_runs AS r ON r.run = e.run
      WHERE e.status IS NULL AND e.kind IN ('run.claimed', 'run.rolling_back')
        AND json_extract(e.data, '$.recoveries') IS NOT NULL)"""

_MEASURED: Final = f"""dagresume_events AS e CROSS JOIN dagresume_runs AS r ON r.run = e.run
WHERE e.status IS NULL AND e.kind IN ('run.rolling_back', {_ENDS})
  AND json_extract(e.data, '$.latency') IS NOT NULL"""
_WAITS: Final = ", ".join(
    f"json_extract(e.data, '$.latency.{name}') / 1e6 AS {name}" for name in ("p50", "p95", "p99", "max")
)
_LATENCY: Final = f"""CREATE VIEW dagresume_latency AS
SELECT e.seq AS seq, r.run_id AS run_id, r.workflow AS workflow, {_iso("e.at")} AS ended_at,
       json_extract(e.data, '$.latency.count') AS checkpoints,
       {_WAITS}
FROM {_MEASURED}"""


_LONGEST: Final = '(SELECT max("max") FROM dagresume_latency)'


def _percentile(share: float) -> str:
    return f"min((SELECT min(wait) / 1e6 FROM ranked WHERE upto >= {share} * total), {_LONGEST})"


_METRICS: Final = f"""CREATE VIEW dagresume_metrics AS
WITH waits(wait, n) AS (
    SELECT CAST(w.key AS INTEGER), sum(w.value)
    FROM (SELECT e.data AS data FROM {_MEASURED}) AS m, json_each(m.data, '$.latency.waits') AS w GROUP BY 1),
ranked(wait, upto, total) AS (SELECT wait, sum(n) OVER (ORDER BY wait), sum(n) OVER () FROM waits)
SELECT 'recovery_success_rate' AS name, (SELECT avg(succeeded) FROM dagresume_recoveries) AS value,
       'under' AS alarm, 0.9 AS threshold
UNION ALL SELECT 'recoveries_per_run',
       (SELECT total(recoveries) FROM dagresume_runs WHERE recoveries > 0)
       / max(1, (SELECT count(*) FROM dagresume_runs)), 'over', 2.0
UNION ALL SELECT 'checkpoint_latency_p50', {_percentile(0.5)}, NULL, NULL
UNION ALL SELECT 'checkpoint_latency_p95', {_percentile(0.95)}, NULL, NULL
UNION ALL SELECT 'checkpoint_latency_p99', {_percentile(0.99)}, 'over', 1.0
UNION ALL SELECT 'checkpoint_latency_max', {_LONGEST}, NULL, NULL"""

_ALARMS: Final = """CREATE VIEW dagresume_alarms AS
SELECT name, value, threshold, CASE name
    WHEN 'recovery_success_rate' THEN 'Too few recoveries end well: look at what stops again'
        || ' (SELECT * FROM dagresume_recoveries WHERE succeeded = 0).'
    WHEN 'recoveries_per_run' THEN 'Runs are recovered too often: look at what stops them'
        || ' (SELECT run_id, recoveries FROM dagresume_runs WHERE recoveries > 0 ORDER BY recoveries DESC).'
    ELSE 'Checkpoints wait too long to be durable: look at the disk, at what else holds the database, and at'
        || ' functions that block the event loop (SELECT * FROM dagresume_latency ORDER BY "max" DESC).'
    END AS message
FROM dagresume_metrics
WHERE (alarm = 'under' AND value < threshold) OR (alarm = 'over' AND value > threshold)"""

_VERSION_1: Final = (
    "CREATE TABLE dagresume_meta(name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE dagresume_definitions(definition INTEGER PRIMARY KEY, workflow TEXT NOT NULL,
  version TEXT NOT NULL, hash BLOB NOT NULL, graph TEXT NOT NULL, created_at INTEGER NOT NULL,
  UNIQUE(workflow, hash))""",
    """CREATE TABLE dagresume_definition_nodes(definition INTEGER NOT NULL, node TEXT NOT NULL,
  position INTEGER NOT NULL, type TEXT NOT NULL, PRIMARY KEY(definition, node)) WITHOUT ROWID""",
    """CREATE TABLE dagresume_sessions(session INTEGER PRIMARY KEY AUTOINCREMENT, uuid TEXT NOT NULL UNIQUE,
  host TEXT NOT NULL, boot_id TEXT, pid_ns INTEGER, pid INTEGER NOT NULL, pid_started INTEGER,
  started_at INTEGER NOT NULL, expires_at INTEGER NOT NULL, ended_at INTEGER)""",
    """CREATE TABLE dagresume_runs(run INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL UNIQUE,
  workflow TEXT NOT NULL, version TEXT NOT NULL, definition INTEGER NOT NULL, key TEXT,
  holds_key INTEGER NOT NULL, status TEXT NOT NULL, reason TEXT, owner INTEGER, epoch INTEGER NOT NULL,
  wake_at INTEGER, source TEXT NOT NULL, auto_resumes INTEGER NOT NULL, recoveries INTEGER NOT NULL,
  forked_from INTEGER, forked_at_seq INTEGER, created_at INTEGER NOT NULL, updated_at INTEGER NOT NULL,
  finished_at INTEGER, usage TEXT, inputs_digest BLOB, inputs TEXT)""",
    """CREATE UNIQUE INDEX dagresume_runs_key ON dagresume_runs(workflow, key)
  WHERE key IS NOT NULL AND holds_key = 1""",
    "CREATE INDEX dagresume_runs_latest ON dagresume_runs(workflow, key) WHERE key IS NOT NULL",
    "CREATE INDEX dagresume_runs_workflow ON dagresume_runs(workflow)",
    "CREATE INDEX dagresume_runs_status ON dagresume_runs(status)",
    "CREATE INDEX dagresume_runs_definition ON dagresume_runs(definition)",
    "CREATE INDEX dagresume_runs_recovered ON dagresume_runs(recoveries) WHERE recoveries > 0",
    # No AUTOINCREMENT: its counter costs another page in every commit (7 % of a small one). Whoever deletes
    # records leaves the last one of the table, so that no seq is given twice. `output` is last: a load
    # without it never touches its overflow pages.
    f"""CREATE TABLE dagresume_events(seq INTEGER PRIMARY KEY, run INTEGER NOT NULL, kind TEXT NOT NULL,
  status TEXT GENERATED ALWAYS AS ({_WORD_OF_KIND}) VIRTUAL,
  attempt INTEGER, at INTEGER NOT NULL, path TEXT, reason TEXT, input BLOB, digest BLOB,
  size INTEGER, took INTEGER, data TEXT, output TEXT)""",
    "CREATE INDEX dagresume_events_path ON dagresume_events(run, path)",
    "CREATE INDEX dagresume_events_failed ON dagresume_events(run, path) WHERE status = 'failed'",
    "CREATE INDEX dagresume_events_audit ON dagresume_events(kind) WHERE status IS NULL",
    """CREATE TABLE dagresume_once(scope TEXT NOT NULL, key TEXT NOT NULL, run INTEGER NOT NULL,
  path TEXT NOT NULL, state TEXT NOT NULL, result TEXT, at INTEGER NOT NULL,
  PRIMARY KEY(scope, key)) WITHOUT ROWID""",
    """CREATE TABLE dagresume_logs(id INTEGER PRIMARY KEY, run INTEGER NOT NULL, path TEXT,
  attempt INTEGER, at INTEGER NOT NULL, level TEXT NOT NULL, line TEXT NOT NULL)""",
    "CREATE INDEX dagresume_logs_run ON dagresume_logs(run)",
    "CREATE TABLE dagresume_cursors(name TEXT PRIMARY KEY, value TEXT, at INTEGER NOT NULL) WITHOUT ROWID",
    _WORKFLOW_CHECKPOINTS,
    _EXACT_CHECKPOINTS,
    _RECOVERIES,
    _LATENCY,
    _METRICS,
    _ALARMS,
)

MIGRATIONS: Final = (_VERSION_1,)
"""The statements that lead from each version to the next; what was released is never edited."""
VERSION: Final = len(MIGRATIONS)


def examine(conn: sqlite3.Connection, path: str, adopt: bool) -> int:
    """Give the version of our tables in this file (0: none yet, and they may be made). Writes nothing.

    Raises StoreCorrupt for what is not ours to write to and SchemaTooNew for what a newer dagresume wrote.
    """
    if conn.in_transaction:
        return _examined(conn, path, adopt)
    conn.execute("BEGIN")  # one view of it: somebody else may be making the tables just now
    try:
        return _examined(conn, path, adopt)
    finally:
        if conn.in_transaction:
            conn.execute("COMMIT")


def _examined(conn: sqlite3.Connection, path: str, adopt: bool) -> int:
    if sqlite3.sqlite_version_info < _OLDEST:
        raise StoreError(
            f"{path}: this Python comes with SQLite {sqlite3.sqlite_version}, which has no generated columns."
            " Take a Python with SQLite 3.31 or newer"
        )
    names = dict(conn.execute("SELECT name, sql FROM sqlite_master"))
    if "dagresume_meta" not in names:
        _refuse_crumbs(path)
        if names or _is_claimed(conn):
            _refuse_or_adopt(conn, path, adopt)
        return 0
    row = conn.execute("SELECT value FROM dagresume_meta WHERE name = 'schema_version'").fetchone()
    if row is None or not str(row[0]).isdecimal():
        raise StoreCorrupt(path, "its table dagresume_meta has no schema_version")
    if int(row[0]) > VERSION:
        raise SchemaTooNew(path, int(row[0]), VERSION)
    if "GENERATED ALWAYS" not in (names.get("dagresume_events") or "GENERATED ALWAYS"):
        raise StoreError(
            f"{path}: a version of dagresume made it that was never released; this one cannot go on with it."
            " Take another file: --db FILE, Engine(FILE)"
        )
    return int(row[0])


def _refuse_crumbs(path: str) -> None:
    """Refuse a file of one byte, which SQLite takes for an empty one."""
    with contextlib.suppress(OSError):
        if 0 < Path(path).stat().st_size < _SMALLEST:
            raise StoreCorrupt(path, "not a database")


def refuse_cut(path: str) -> None:
    """Refuse a file that was cut to 0 bytes, before SQLite deletes the log that still lies beside it."""
    with contextlib.suppress(OSError):
        if not Path(path).stat().st_size and Path(f"{path}-wal").stat().st_size:
            raise StoreCorrupt(path, "cut to 0 bytes, while its log (-wal) still holds data")


def _is_claimed(conn: sqlite3.Connection) -> bool:
    """Say whether somebody marked this database, which has no table yet, as theirs."""
    return any(_pragma(conn, name) for name in ("application_id", "user_version"))


def _refuse_or_adopt(conn: sqlite3.Connection, path: str, adopt: bool) -> None:
    if not adopt:
        raise StoreCorrupt(
            path, "not a dagresume database, but one of another program (adopt=True adds our tables to it)"
        )
    problem = _pragma(conn, "quick_check(1)")
    if problem != "ok":
        raise StoreCorrupt(path, f"not a sound database: {problem}")


def migrate(conn: sqlite3.Connection, path: str, adopt: bool, now: int) -> None:
    """Bring our tables to the version known here, inside the transaction that is open."""
    found = examine(conn, path, adopt)
    if found == VERSION:
        return
    fresh = not (found or conn.execute("SELECT 1 FROM sqlite_master").fetchone() or _is_claimed(conn))
    for statements in MIGRATIONS[found:]:
        for statement in statements:
            conn.execute(statement)
    conn.execute("INSERT OR REPLACE INTO dagresume_meta VALUES ('schema_version', ?)", [str(VERSION)])
    if not found:
        conn.execute("INSERT INTO dagresume_meta VALUES ('created_at', ?)", [str(now)])
    if fresh:
        conn.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    if _pragma(conn, "application_id") == APPLICATION_ID:
        conn.execute(f"PRAGMA user_version = {VERSION}")


def make_private(path: str) -> None:
    """Make a file that is not there, empty and for its owner alone; what SQLite keeps beside it follows it.

    One that is there stays as it is. If none can be made, SQLite says why.
    """
    with contextlib.suppress(OSError):
        os.close(os.open(os.path.realpath(path), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


@cache
def expected() -> dict[tuple[str, str], str]:
    """Give the statement that made each of our tables, indexes and views, by (type, name)."""
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as conn:
        migrate(conn, "", adopt=False, now=0)
        found = conn.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL")
        return {(kind, name): sql for kind, name, sql in found if not name.startswith("sqlite_")}


def use_wal(conn: sqlite3.Connection, path: str) -> None:
    """Switch the file to write-ahead logging; StoreError if it stays in another mode."""
    if _pragma(conn, "journal_mode") == "wal":
        return
    mode = _pragma(conn, "journal_mode = WAL")
    if mode != "wal":
        raise StoreError(
            f"{path}: SQLite cannot keep a write-ahead log here (journal mode is {mode!r}), as on a network"
            " file system. Put the file on a local disk; if several machines share it, use postgresql://…"
        )


def _pragma(conn: sqlite3.Connection, text: str) -> Any:
    row = conn.execute(f"PRAGMA {text}").fetchone()
    return row[0] if row else None


# -- errors ---------------------------------------------------------------------------------------------

_BY_CODE: Final[dict[int, Callable[[str, str], StoreError]]] = {
    sqlite3.SQLITE_FULL: StoreFull,
    sqlite3.SQLITE_READONLY: StoreReadOnly,
    sqlite3.SQLITE_PERM: StoreReadOnly,
    sqlite3.SQLITE_CANTOPEN: StoreReadOnly,
    sqlite3.SQLITE_CORRUPT: StoreCorrupt,
    sqlite3.SQLITE_NOTADB: StoreCorrupt,
}


def _code(error: BaseException) -> int:
    return int(getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF


def busy(error: BaseException) -> bool:
    """Say whether the database was locked by somebody: the one thing that is worth another try."""
    return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


T = TypeVar("T")
PATIENCE: Final = 30.0
"""Seconds for which a locked database is tried again."""


def persist(conn: sqlite3.Connection, job: Callable[[], T]) -> T:
    """Do `job`, again while the database is locked by somebody; after any error no transaction is open."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return job()
        except BaseException as error:
            # Some errors end the transaction by themselves, others leave it open.
            with contextlib.suppress(sqlite3.Error):
                if conn.in_transaction:
                    conn.execute("ROLLBACK")
            if not busy(error) or time.monotonic() >= deadline:
                raise
        time.sleep(0.005)


def explained(path: str, error: Exception) -> StoreError:
    """Give our error for SQLite's, which becomes its cause."""
    if isinstance(error, StoreError):
        return error
    make = _BY_CODE.get(_code(error))
    if isinstance(error, UnicodeDecodeError):  # SQLite's own message quotes what is damaged
        found: StoreError = StoreCorrupt(path, "it is damaged: what is stored as text is none")
    elif busy(error):
        who = ", ".join(writers(path)) or "another program"
        found = StoreError(f"{path}: locked by {who} all the time; end what holds it, then resume")
    elif _code(error) == sqlite3.SQLITE_IOERR:
        found = _of_the_disk(path, f"{error} ({getattr(error, 'sqlite_errorname', 'SQLITE_IOERR')})")
    elif _code(error) == sqlite3.SQLITE_CANTOPEN:
        found = StoreReadOnly(path, *_why_not_opened(path))
    else:
        found = make(path, str(error)) if make else StoreError(f"{path}: {error}")
    found.__cause__ = error
    return found


def _of_the_disk(path: str, problem: str) -> StoreError:
    """Give what an I/O error means: SQLite says no more than that also where the disk is full."""
    folder = Path(path).parent
    with contextlib.suppress(OSError):
        if shutil.disk_usage(folder).free < _NO_SPACE:
            return StoreFull(path, f"{problem}, and no space is left on its disk")
        if hasattr(os, "statvfs") and os.statvfs(folder).f_flag & os.ST_RDONLY:
            return StoreReadOnly(path, f"{problem}; {_MOUNTED_READ_ONLY[0]}", _MOUNTED_READ_ONLY[1])
    return StoreError(
        f"{path}: {problem}. The system could not read or write the file: look at the disk and in the"
        " system's log (dmesg). Resume the run when that is mended: nothing finished is lost."
    )


_MOUNTED_READ_ONLY: Final = (
    "its file system is mounted read-only",
    "Find out why in the system's log (dmesg), mount it writable, then resume the run.",
)


def refuse_read_only(path: str) -> None:
    """Refuse a file that is there and cannot be written, before SQLite makes others of its kind beside it."""
    for each in (path, f"{path}-wal", f"{path}-shm"):
        if Path(each).is_file() and not os.access(each, os.W_OK):
            name = shlex.quote(each)
            advice = f"Change its permissions: chmod u+w {name}; or name another file with --db."
            raise StoreReadOnly(path, f"{each} may not be written to", advice)


def _why_not_opened(path: str) -> tuple[str, str]:
    """Give what is wrong and what mends it."""
    place = Path(path)
    if hasattr(os, "statvfs"):
        with contextlib.suppress(OSError):
            if os.statvfs(place.parent).f_flag & os.ST_RDONLY:
                return _MOUNTED_READ_ONLY
    if place.is_dir():
        return "it is a folder", "Name a file in it with --db."
    if not place.parent.exists():
        return f"there is no folder {place.parent}", "Make it first, or name another file with --db."
    problem = "the file, or one that SQLite keeps beside it, cannot be opened or made"
    return problem, "Change its permissions or name another file with --db."
