"""Looks at a database that may be in any state: what is wrong, where, and the command that mends it.

    from dagresume.doctor import examine

    for finding in examine("runs.db"):
        print(finding)

Nothing is written and no file is made (see `peek`), also beside a living engine or in a read-only folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sqlite3
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from dagresume import schema
from dagresume.clock import to_datetime
from dagresume.errors import SchemaTooNew, StoreError
from dagresume.events import RunStatus
from dagresume.findings import Finding, Severity, in_bytes, note, problem, size_of, sound
from dagresume.frames import look
from dagresume.inventory import leftovers, outputs, owners_of, referred
from dagresume.peek import Peek, peek
from dagresume.places import Process, file_system, lock_holders, openers
from dagresume.rebuild import differences
from dagresume.store import SYSTEM_CLOCK, Holder
from dagresume.writer import holder

__all__ = ["Finding", "Severity", "examine", "outside", "sound"]

LONG_LOG: Final = 64 << 20
"""Bytes of write-ahead log from which on somebody must be keeping it from starting over."""
LITTLE_SPACE: Final = 100 << 20
UNCLAIMED: Final = 600.0
"""Seconds after which a run that nobody has taken up is looked at as forgotten."""
OVERDUE: Final = 60.0
"""Seconds by which a waiting run may be late to be woken."""
_TRIES: Final = 3
_AT_MOST: Final = 20
_READ_LOCKS: Final = (123, 127)
"""The bytes of the log's index that a reader locks while its transaction is open (SQLite's file format)."""


def examine(path: str | os.PathLike[str]) -> list[Finding]:
    """Give all that can be found in a database file, whatever state it is in; raises nothing for a bad one.

    Reads everything in it, blobs too: seconds for a gigabyte. Problems come first.
    """
    place = os.path.abspath(path)  # noqa: PTH100  # Path.absolute() keeps `..`
    found = list(outside(place))
    if not any(finding.kind == "file" for finding in found):
        found += _inside(place)
    return sorted(found, key=lambda finding: finding.severity is not Severity.PROBLEM)


# -- around the file ------------------------------------------------------------------------------------


def outside(place: str) -> Iterator[Finding]:
    """Give what is wrong with a file as a file, and with where it lies, without opening it."""
    try:
        facts = Path(place).stat()
    except FileNotFoundError:
        yield problem("file", place, "there is no such file.", "Name the database with --db.")
        return
    except OSError as error:
        yield problem("file", place, f"cannot be looked at: {error.strerror}.", _readable(place))
        return
    yield from _as_file(place, facts)
    yield from _disk(place)
    yield from _rights(place, facts)


def _as_file(place: str, facts: os.stat_result) -> Iterator[Finding]:
    if stat.S_ISDIR(facts.st_mode):
        yield problem("file", place, "is a folder.", "Name a file in it with --db.")
    elif not stat.S_ISREG(facts.st_mode):
        yield problem("file", place, "is no file on a disk.", "Name the database with --db.")
    elif not _may(place, os.R_OK):
        yield problem("file", place, "may not be read by you.", _readable(place))
    elif not facts.st_size and size_of(f"{place}-wal"):
        yield problem(
            "file",
            place,
            f"was cut to 0 bytes; its log of {in_bytes(size_of(f'{place}-wal'))} still lies beside it.",
            "Open it with nothing (that would delete the log); restore a backup, or keep both for a rescue.",
        )
    elif not facts.st_size:
        yield note("file", place, "is empty: no runs yet. The first run makes it a database.")
    elif size_of(f"{place}-journal"):
        yield problem(
            "file",
            place,
            "a transaction of another journal mode was cut off: its rollback journal lies beside the file.",
            "Open it once to have it rolled back: `dagresume list`",
        )


def _may(place: str, what: int) -> bool:
    return os.access(place, what, effective_ids=os.access in os.supports_effective_ids)


def _readable(place: str) -> str:
    return f"Let yourself read it: chmod u+r {shlex.quote(place)} (and u+x its folder), as its owner."


def _disk(place: str) -> Iterator[Finding]:
    found = file_system(place)
    if found is not None and found.network:
        yield problem("file_system", place, found.warning)
    elif found is not None and found.fleeting:
        yield note(
            "file_system", place, f"lies in memory ({found.type} at {found.mount}): gone with the power."
        )
    elif found is not None and found.layered:
        told = f"lies in a container's own layer ({found.type} at {found.mount}): gone with the container."
        yield note("file_system", place, told, "Keep it on a volume.")
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(Path(place).parent).free
        if free < LITTLE_SPACE:
            yield problem(
                "space", str(Path(place).parent), f"only {in_bytes(free)} are free.", "Free some space."
            )


def _rights(place: str, facts: os.stat_result) -> Iterator[Finding]:
    folder = str(Path(place).parent)
    if not _may(place, os.W_OK):
        told = "may not be written by you: runs can be looked at by nobody but `dagresume doctor`."
        yield problem(
            "permissions",
            place,
            told,
            f"chmod u+w {shlex.quote(place)}, or work on a copy: `dagresume backup COPY`",
        )
    elif not _may(folder, os.W_OK | os.X_OK):
        told = "no file can be made in it, and SQLite needs two beside the database."
        yield problem(
            "permissions",
            folder,
            told,
            f"chmod u+wx {shlex.quote(folder)}, or work on a copy: `dagresume backup COPY`",
        )
    if os.name != "nt" and facts.st_mode & 0o077 and stat.S_ISREG(facts.st_mode):
        told = f"others on this machine may open it (mode {stat.S_IMODE(facts.st_mode):03o})."
        yield note("permissions", place, told, f"chmod 600 {shlex.quote(place)}, unless that is meant.")


# -- inside it ------------------------------------------------------------------------------------------


def _inside(place: str) -> list[Finding]:
    """Look at the content; again if somebody wrote meanwhile without our seeing it."""
    found: list[Finding] = []
    for _ in range(_TRIES):
        try:
            with peek(place) as looked:
                found = list(_content(looked))
                if not looked.moved:
                    return found
        except sqlite3.Error as error:
            found = [_unopened(place, error)]
            if schema.busy(error):
                return found
    return found


def _unopened(place: str, error: sqlite3.Error) -> Finding:
    if schema.busy(error):
        who = ", ".join(map(str, openers(place)))
        told = f"locked all the time by another program{who and f': {who}'}."
        return problem("locked", place, told, "End it, then look again.")
    return problem("integrity", place, f"SQLite cannot read it: {error}.", _RESTORE)


_RESTORE: Final = (
    "Restore a backup (`dagresume backup` makes them). What can still be read of it:"
    " sqlite3 FILE .recover | sqlite3 NEW"
)


def _content(looked: Peek) -> Iterator[Finding]:
    conn, place = looked.conn, looked.path
    try:
        version = schema.examine(conn, place, adopt=False)
    except SchemaTooNew as error:
        told = f"was written by a newer dagresume (schema {error.found}, this one knows up to {error.known})."
        yield problem("database", place, told, "Update: pip install -U dagresume")
        return
    except StoreError as error:
        told = str(error).removeprefix(f"{place}: ").partition(". The file")[0]
        yield problem("database", place, f"{told}.", "Name the database with --db.")
        return
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        if schema.busy(error):
            raise
        foreign = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_NOTADB
        told = "is no database, or its first bytes were overwritten." if foreign else f"is damaged: {error}."
        yield problem("database", place, told, "Name the database with --db, or restore a backup.")
        return
    yield from _torn(place)
    if not version:
        if size_of(f"{place}-wal"):
            told = "no whole transaction can be read from the log, and all that was stored was in it."
            yield problem("log", f"{place}-wal", told, _RESTORE)
        yield note("database", place, "holds no tables of dagresume yet. The first run makes them.")
        return
    for check in _CHECKS:
        try:
            yield from check(looked)
        except (sqlite3.Error, ValueError, TypeError, KeyError) as error:
            if isinstance(error, sqlite3.Error) and schema.busy(error):
                raise
            about = check.__name__.strip("_").replace("_", " ")
            told = f"{about} could not be looked at: {type(error).__name__}: {error}."
            yield problem("integrity", place, told, _RESTORE)


def _torn(place: str) -> Iterator[Finding]:
    """What of the log is not read any more; while somebody has it open, it is being written."""
    if openers(place):
        return
    log = look(place)
    where = f"{place}-wal"
    if log is not None and not log.sound:
        told = "the log's header is damaged, so nothing that was in it is read."
        yield problem("log", where, told, _RESTORE)
    elif log is not None and log.lost_commits > 1:
        told = (
            f"a frame of the log is damaged: {log.lost_commits} transactions behind it are not read any more."
        )
        yield problem("log", where, told, _RESTORE)
    elif log is not None and log.lost_commits:
        told = "the last transaction in the log is not whole; if it was ever said to be durable, it is lost."
        yield note("log", where, told)


def _pages(looked: Peek) -> Iterator[Finding]:
    for pragma in ("quick_check", "integrity_check"):
        lines = [" ".join(line.split()) for (line,) in looked.conn.execute(f"PRAGMA {pragma}({_AT_MOST})")]
        if lines != ["ok"]:
            only_indexes = all(re.search(r"missing from index|wrong # of entries", line) for line in lines)
            file = shlex.quote(looked.path)
            cure = f"Make the indexes again: sqlite3 {file} REINDEX" if only_indexes else _RESTORE
            yield problem("integrity", looked.path, f"damaged: {'; '.join(lines[:3])}.", cure)
            return


def _schema(looked: Peek) -> Iterator[Finding]:
    conn, place = looked.conn, looked.path
    version = schema.examine(conn, place, adopt=False)
    if version < schema.VERSION:
        told = f"has schema {version}, which the next run brings to {schema.VERSION}."
        yield note("schema", place, told)
        return
    found = {
        (kind, name): sql for kind, name, sql in conn.execute("SELECT type, name, sql FROM sqlite_master")
    }
    for (kind, name), sql in schema.expected().items():
        there = found.get((kind, name))
        if there == sql:
            continue
        told = f"the {kind} {name} {'is missing' if there is None else 'is not as it should be'}."
        drop = "" if there is None else f"DROP {kind.upper()} {name}; "
        again = f"sqlite3 {shlex.quote(place)} {shlex.quote(drop + ' '.join(sql.split()))}"
        yield problem("schema", place, told, _RESTORE if kind == "table" else f"Make it again: {again}")


# -- runs -----------------------------------------------------------------------------------------------


def _projection(looked: Peek) -> Iterator[Finding]:
    conn = looked.conn
    cure = "Make the rows of all runs again from the journal: `dagresume doctor --rebuild`"
    for change in differences(conn):
        yield problem("projection", f"run {change.run_id}", f"{change}.", cure)
    last = "(SELECT max(seq) FROM dagresume_events)"  # it stays when its run goes: no seq is given twice
    pruned = "SELECT 1 FROM dagresume_cursors WHERE name = 'forgetting:' || run"  # the next prune takes them
    gone = f"seq < {last} AND run NOT IN (SELECT run FROM dagresume_runs) AND NOT EXISTS ({pruned})"
    stray = conn.execute(f"SELECT count(*) FROM dagresume_events WHERE {gone}").fetchone()[0]
    if stray:
        yield problem("projection", looked.path, f"{stray} events are of runs that are not there.", _RESTORE)
    empty = "SELECT run_id FROM dagresume_runs AS r WHERE NOT EXISTS"
    empty += " (SELECT 1 FROM dagresume_events AS e WHERE e.run = r.run AND e.path IS NULL)"
    for (run_id,) in conn.execute(empty):
        yield problem("projection", f"run {run_id}", "its journal is gone.", _RESTORE)


def _runs(looked: Peek) -> Iterator[Finding]:
    """Runs that nobody goes on with although somebody should."""
    conn, now = looked.conn, time.time_ns() // 1000
    owners = owners_of(conn)
    live = ", ".join(f"'{status}'" for status in ("running", "rolling_back", "pending", "waiting"))
    sql = "SELECT run_id, workflow, status, owner, wake_at, updated_at, reason FROM dagresume_runs"
    for run_id, workflow, status, owner, wake_at, updated_at, reason in conn.execute(
        f"{sql} WHERE status IN ({live}) ORDER BY run"
    ):
        who = owners.get(owner)
        told = _stuck(status, who, wake_at, updated_at, now, reason)
        if told:
            command = "rollback" if status == RunStatus.ROLLING_BACK else "resume"
            where = f"run {run_id} of {workflow}"
            yield problem("run", where, told, f"Go on with it: `dagresume {command} {run_id}`")
    resting = Counter(
        dict(
            conn.execute(
                "SELECT status, count(*) FROM dagresume_runs WHERE status = 'interrupted' GROUP BY 1"
            )
        )
    )
    for status, count in resting.items():
        cure = (
            "They go on with `dagresume resume RUN`, or `dagresume recover` where their workflow allows it;"
            f" `dagresume list --status {status}` names them."
        )
        yield note("run", looked.path, f"{count} run{'s'[: count > 1]} {status}.", cure)


def _stuck(
    status: str, who: Holder | None, wake_at: int | None, updated_at: int, now: int, reason: str | None
) -> str:
    """Say why nobody goes on with a run; empty if somebody does, or need not."""
    if status == RunStatus.WAITING:
        late = (now - wake_at) / 1e6 if wake_at is not None else 0.0
        if wake_at == 0:
            return "waits for nothing more: its letter came, and nobody has gone on with it."
        return f"was to go on at {_when(wake_at)}, and nobody did." if wake_at and late > OVERDUE else ""
    if who is not None and who.alive:
        return ""
    if status == RunStatus.PENDING:
        waited = (now - updated_at) / 1e6
        return f"was made at {_when(updated_at)}, and nobody has taken it up." if waited > UNCLAIMED else ""
    if status == RunStatus.ROLLING_BACK:
        if who is None:
            return f"is not rolled back to its end ({reason or 'nobody drives it'})."
        return f"nobody rolls it back any more: its last session, {who}, is over."
    if who is None:
        return "is said to be running, and nobody drives it."
    return f"nobody drives it any more: its last session, {who}, is over."


def _when(at: int) -> str:
    return f"{to_datetime(at).astimezone():%Y-%m-%d %H:%M:%S}"


def _sessions(looked: Peek) -> Iterator[Finding]:
    left = [
        n for (n,) in looked.conn.execute("SELECT session FROM dagresume_sessions WHERE ended_at IS NULL")
    ]
    found = [who for n in left if (who := holder(looked.conn, n, SYSTEM_CLOCK)) is not None]
    dead = sum(not who.alive for who in found)
    if dead:
        told = f"{dead} session{'s'[: dead > 1]} ended without saying so (killed, or a lease that ran out)."
        yield note("session", looked.path, told)
    for who in found:
        if who.alive:
            yield note("session", looked.path, f"an engine has it open since {_when(who.started_at)}: {who}.")


def _log(looked: Peek) -> Iterator[Finding]:
    size = size_of(f"{looked.path}-wal")
    if size <= LONG_LOG:
        return
    told = f"the write-ahead log has {in_bytes(size)}"
    # Twice: whoever reads for a moment only is not what keeps it.
    readers = _readers(looked.path)
    if readers:
        time.sleep(0.2)
    stay = [process for process in readers if process in _readers(looked.path)]
    if stay:
        held = ", ".join(map(str, stay))
        cure = f"End that transaction, or the process: kill {stay[0].pid}"
        yield problem("log", f"{looked.path}-wal", f"{told}: {held} keeps a read transaction open.", cure)
    elif users := openers(looked.path):
        yield note("log", f"{looked.path}-wal", f"{told}; in use by {', '.join(map(str, users))}.")
    else:
        cure = "The next engine that ends empties it: `dagresume list`"
        yield problem("log", f"{looked.path}-wal", f"{told}, and nobody has it open.", cure)


def _readers(path: str) -> list[Process]:
    """Give the other processes that read from the log just now, those that a person here can end."""
    found = lock_holders(f"{path}-shm", *_READ_LOCKS)
    return [process for process, _ in found if process.pid > 0 and process.pid != os.getpid()]


_CHECKS: Final[tuple[Callable[[Peek], Iterator[Finding]], ...]] = (
    _pages, _schema, outputs, referred, leftovers, _projection, _runs, _sessions, _log
)  # fmt: skip
