"""Removes ended runs from a file in short transactions, so that a kill at any point leaves no half run.

First a run's row goes, and a note in `dagresume_cursors` says that it is being forgotten: its key is free and
no reader finds it any more. Then its records go, some at a time; then what it has outside the file; then the
note. Whoever forgets next goes on with the notes that are left. The last record of the whole journal stays
where it is, so that no seq is given twice, and its run's note with it, until there is a later record.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeVar

import anyio

from dagresume.clock import Clock
from dagresume.errors import StoreError
from dagresume.events import RunStatus
from dagresume.schema import examine, explained, persist
from dagresume.store import Clear, Forgotten, may_go, scope_of
from dagresume.wal import uri
from dagresume.writer import Writer, holder

__all__ = ["compact", "foresee", "forget"]

T = TypeVar("T")
_NOTE: Final = "forgetting:"
_RUNS: Final = 128
"""Runs whose rows go in one transaction, and that are gone through together."""
_AIM: Final = 0.02
"""Seconds that a transaction should take: what others have to write waits that long."""
_FEWEST, _MOST = 128, 4096
"""Rows, or pages, of a transaction."""
_SESSION_KEPT: Final = 7 * 86_400_000_000
_LEAST_FREE: Final = 256
_SHARE_FREE: Final = 8
"""Free pages that stay in the file for what comes next: one in eight, or this many."""
_INCREMENTAL: Final = 2
_MAY_BE_OWNED: Final = tuple(word.value for word in RunStatus if not (word.final or word == RunStatus.FAILED))
_OWNERS: Final = (
    "SELECT owner FROM dagresume_runs WHERE owner IS NOT NULL"
    f" AND status IN ({', '.join(map(repr, _MAY_BE_OWNED))})"
)
_NOTES: Final = (
    "SELECT c.name, CASE WHEN r.run IS NULL THEN c.value ELSE '' END FROM dagresume_cursors AS c"
    " LEFT JOIN dagresume_runs AS r ON r.run_id = c.value WHERE c.name >= ? AND c.name < ?"
)
"""Notes, without the run id of one that is in the store again: its files are another's now."""
_LAST: Final = "SELECT max(seq) FROM dagresume_events"
# `+seq`: the index of the run's own records is the way to them, not the numbers of all.
_RECORDS: Final = f"FROM dagresume_events WHERE run = ? AND +seq < ({_LAST})"


class _Note(NamedTuple):
    """A run that is being forgotten; `run_id` is empty if there is another run of that id."""

    run: int
    run_id: str


class _Swept(NamedTuple):
    """What one transaction removed, the runs of which nothing is left to remove, and whose last record is."""

    rows: Counter[str]
    done: set[int]
    kept: set[int]


class Hop(Protocol):
    """Does a job in the writer's thread, after what was asked for before."""

    def __call__(self, job: Callable[[Writer], T], /) -> Awaitable[T]: ...


class Read(Protocol):
    """Does a job on the connection that reads."""

    def __call__(self, job: Callable[[sqlite3.Connection], T], /) -> Awaitable[T]: ...


async def forget(hop: Hop, read: Read, clock: Clock, runs: Mapping[int, int], clear: Clear) -> Forgotten:
    """Forget these runs (number → the epoch under which each was seen), and what earlier calls have left."""
    work = _Work(hop, clear)
    left = await read(_left)
    for notes in _parts(left):
        await work.finish(notes)
    gone: list[int] = []
    for part in _parts(list(runs.items())):
        notes = await work.begin(part)
        gone += [note.run for note in notes]
        await work.finish(notes)
    definitions = await work.tidy(_delete_definitions, await read(partial(_unused_definitions, ())))
    sessions = await work.tidy(_delete_sessions, await read(partial(_past_sessions, clock)))
    given_back = await work.shrink()
    size, free = await read(_sizes)
    found = Forgotten(gone, len(left), **work.rows, definitions=definitions, sessions=sessions)
    return found._replace(given_back=given_back, free=free, size=size)


async def foresee(read: Read, clock: Clock, runs: Mapping[int, int], clear: Clear) -> Forgotten:
    """Count what `forget` would remove; writes nothing."""
    found, run_ids = await read(partial(_foreseen, clock, runs))
    for run_id in run_ids:
        await clear(run_id)
    return found


# -- step by step ---------------------------------------------------------------------------------------


class _Pace:
    """How many rows a transaction takes so that nobody waits long for it."""

    def __init__(self, hop: Hop) -> None:
        self._hop, self._rows = hop, 2 * _FEWEST

    async def keep(self, job: Callable[[int, Writer], T]) -> T:
        """Do one transaction, then leave the file to others for as long as that took.

        Without the pause another process, which can only look again and again, might never find it free.
        """
        found, took = await self._hop(partial(_timed, partial(job, self._rows)))
        wanted = int(self._rows * min(2.0, _AIM / max(took, 1e-6)))
        self._rows = max(_FEWEST, min(_MOST, wanted))
        await anyio.sleep(min(max(took, 0.001), 0.1))
        return found


def _timed(job: Callable[[Writer], T], writer: Writer) -> tuple[T, float]:
    begun = time.monotonic()
    found = persist(writer, partial(job, writer))
    writer.commits += 1
    writer.wal.note(1, _FEWEST, 0)
    writer.tend()
    return found, time.monotonic() - begun


class _Work:
    """One call of `forget`, and the rows it has removed so far."""

    def __init__(self, hop: Hop, clear: Clear) -> None:
        self._hop, self._clear = hop, clear
        self._pace = _Pace(hop)
        self.rows: Counter[str] = Counter(events=0, logs=0, once=0)

    async def begin(self, runs: Sequence[tuple[int, int]]) -> list[_Note]:
        """Remove the rows of those that may still go; gives their notes."""
        return await _Pace(self._hop).keep(partial(_begin, runs))

    async def finish(self, notes: Sequence[_Note]) -> None:
        """Remove what is left of runs whose rows are gone, and their notes with the last of it."""
        left, kept = {note.run: note for note in notes}, set[int]()
        while left:
            swept = await self._pace.keep(partial(_sweep, list(left.values())))
            self.rows.update(swept.rows)
            kept |= swept.kept
            for run in swept.done:
                del left[run]
        cleared = [note for note in notes if not note.run_id or await self._clear(note.run_id)]
        if over := [note for note in cleared if note.run not in kept]:
            await _Pace(self._hop).keep(partial(_end, over))

    async def tidy(self, delete: Callable[[str, int, Writer], int], numbers: Sequence[int]) -> int:
        """Remove what nothing refers to any more; gives how many."""
        pace = _Pace(self._hop)
        return sum([await pace.keep(partial(delete, json.dumps(part))) for part in _parts(numbers)])

    async def shrink(self) -> int:
        """Give free pages back to the disk, but not those that the next runs will need; gives the bytes."""
        pace, given = _Pace(self._hop), 0
        while back := await pace.keep(_release):
            given += back
        return given


def _parts(things: Sequence[T]) -> list[Sequence[T]]:
    return [things[at : at + _RUNS] for at in range(0, len(things), _RUNS)]


# -- transactions, in the writer's thread ---------------------------------------------------------------


def _begin(runs: Sequence[tuple[int, int]], _rows: int, writer: Writer) -> list[_Note]:
    writer.execute("BEGIN IMMEDIATE")
    notes = []
    for run, seen in runs:
        sql = "SELECT run_id, status, epoch, owner FROM dagresume_runs WHERE run = ?"
        found = writer.execute(sql, [run]).fetchone()
        if found is None or not may_go(found[1], found[2], seen, holder(writer, found[3], writer.clock)):
            continue
        writer.execute("DELETE FROM dagresume_runs WHERE run = ?", [run])
        values = [f"{_NOTE}{run}", found[0], writer.clock.now()]
        writer.execute("INSERT OR REPLACE INTO dagresume_cursors VALUES (?, ?, ?)", values)
        notes.append(_Note(run, found[0]))
    writer.execute("COMMIT")
    return notes


def _sweep(notes: Sequence[_Note], most: int, writer: Writer) -> _Swept:
    writer.execute("BEGIN IMMEDIATE")
    rows: Counter[str] = Counter()
    done, kept = set(), set()
    for note in notes:
        for table, sql, of in _contents(note):
            left = most - rows.total()
            rows[table] += writer.execute(f"{sql} LIMIT ?)", [*of, left]).rowcount
        if rows.total() >= most:
            break
        done.add(note.run)
        if writer.execute("SELECT 1 FROM dagresume_events WHERE run = ? LIMIT 1", [note.run]).fetchone():
            kept.add(note.run)
    writer.execute("COMMIT")
    return _Swept(rows, done, kept)


def _contents(note: _Note) -> list[tuple[str, str, list[int | str]]]:
    """Give the statements, up to their limit, that remove what a run has in each table."""
    logs = "DELETE FROM dagresume_logs WHERE id IN (SELECT id FROM dagresume_logs WHERE run = ?"
    found: list[tuple[str, str, list[int | str]]] = [
        ("events", f"DELETE FROM dagresume_events WHERE seq IN (SELECT seq {_RECORDS}", [note.run]),
        ("logs", logs, [note.run]),
    ]
    if note.run_id:
        scope = scope_of("run", note.run_id)
        once = "DELETE FROM dagresume_once WHERE scope = ? AND key IN (SELECT key FROM dagresume_once"
        found.append(("once", f"{once} WHERE scope = ?", [scope, scope]))
    return found


def _end(notes: Sequence[_Note], _rows: int, writer: Writer) -> None:
    writer.execute("BEGIN IMMEDIATE")
    writer.executemany("DELETE FROM dagresume_cursors WHERE name = ?", [(f"{_NOTE}{n.run}",) for n in notes])
    writer.execute("COMMIT")


def _delete_definitions(numbers: str, _rows: int, writer: Writer) -> int:
    writer.execute("BEGIN IMMEDIATE")
    asked = "definition IN (SELECT value FROM json_each(?))"
    used = "SELECT 1 FROM dagresume_runs AS r WHERE r.definition = d.definition"
    sql = f"DELETE FROM dagresume_definitions AS d WHERE {asked} AND NOT EXISTS ({used})"
    gone = writer.execute(sql, [numbers]).rowcount
    kept = "definition NOT IN (SELECT definition FROM dagresume_definitions)"
    writer.execute(f"DELETE FROM dagresume_definition_nodes WHERE {asked} AND {kept}", [numbers])
    writer.execute("COMMIT")
    return gone


def _delete_sessions(numbers: str, _rows: int, writer: Writer) -> int:
    writer.execute("BEGIN IMMEDIATE")
    asked = "session IN (SELECT value FROM json_each(?))"
    sql = f"DELETE FROM dagresume_sessions WHERE {asked} AND session NOT IN ({_OWNERS})"
    gone = writer.execute(sql, [numbers]).rowcount
    writer.execute("COMMIT")
    return gone


def _release(pages: int, writer: Writer) -> int:
    """Give some free pages at the end of the file back; gives the bytes, 0 if that was all."""
    total, free = _pages(writer)
    excess = free - max(_LEAST_FREE, total // _SHARE_FREE)
    if excess <= 0 or writer.execute("PRAGMA auto_vacuum").fetchone()[0] != _INCREMENTAL:
        return 0
    # It gives a row without columns for each page, of which `execute` asks for the first alone.
    writer.executescript(f"PRAGMA incremental_vacuum({min(pages, excess)})")
    return (total - _pages(writer)[0]) * _page_size(writer)


def compact(path: str, clock: Clock) -> int:
    """Write a file anew without its free pages; gives the bytes given back to the disk. Nobody may use it.

    A file of an older dagresume gives space back by itself from then on. It takes as much free disk as the
    file is big. Raises StoreError if an engine has the file open.
    """
    try:
        conn = sqlite3.connect(uri(path), uri=True, isolation_level=None, timeout=5)
        with contextlib.closing(conn):
            return _compacted(conn, path, clock)
    except sqlite3.Error as error:
        raise explained(path, error) from error


def _compacted(conn: sqlite3.Connection, path: str, clock: Clock) -> int:
    if examine(conn, path, adopt=False) == 0:
        return 0
    sessions = conn.execute("SELECT session FROM dagresume_sessions WHERE ended_at IS NULL").fetchall()
    users = [holder(conn, session, clock) for (session,) in sessions]
    if user := next((user for user in users if user is not None and user.alive), None):
        raise StoreError(f"{path} is in use by {user}: end that first, then compact the file.")
    before = _sizes(conn)[0]
    conn.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
    conn.execute("VACUUM")
    conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return before - _sizes(conn)[0]


# -- reading --------------------------------------------------------------------------------------------


def _left(conn: sqlite3.Connection) -> list[_Note]:
    after = chr(ord(_NOTE[-1]) + 1)
    found = conn.execute(_NOTES, [_NOTE, _NOTE[:-1] + after])
    return [_Note(int(name.removeprefix(_NOTE)), run_id) for name, run_id in found]


def _pages(conn: sqlite3.Connection) -> tuple[int, int]:
    """Give how many pages a file has, and how many of them are free."""
    total, free = (conn.execute(f"PRAGMA {word}").fetchone()[0] for word in ("page_count", "freelist_count"))
    return total, free


def _page_size(conn: sqlite3.Connection) -> int:
    return int(conn.execute("PRAGMA page_size").fetchone()[0])


def _sizes(conn: sqlite3.Connection) -> tuple[int, int]:
    """Give the bytes of a file, and how many of them are free."""
    (total, free), size = _pages(conn), _page_size(conn)
    return total * size, free * size


def _unused_definitions(going: Sequence[int], conn: sqlite3.Connection) -> list[int]:
    """Give the definitions that no run refers to, once these runs are gone."""
    stays = "r.run NOT IN (SELECT value FROM json_each(?))"
    sql = (
        "SELECT d.definition FROM dagresume_definitions AS d WHERE NOT EXISTS"
        f" (SELECT 1 FROM dagresume_runs AS r WHERE r.definition = d.definition AND {stays})"
    )
    return [number for (number,) in conn.execute(sql, [json.dumps(list(going))])]


def _past_sessions(clock: Clock, conn: sqlite3.Connection) -> list[int]:
    """Give the sessions that ended long ago and own nothing."""
    sql = f"SELECT session FROM dagresume_sessions WHERE expires_at < ? AND session NOT IN ({_OWNERS})"
    return [number for (number,) in conn.execute(sql, [clock.now() - _SESSION_KEPT])]


def _foreseen(clock: Clock, runs: Mapping[int, int], conn: sqlite3.Connection) -> tuple[Forgotten, list[str]]:
    going = {}
    for run, seen in runs.items():
        sql = "SELECT run_id, status, epoch, owner FROM dagresume_runs WHERE run = ?"
        found = conn.execute(sql, [run]).fetchone()
        if found is not None and may_go(found[1], found[2], seen, holder(conn, found[3], clock)):
            going[run] = found[0]
    left = _left(conn)
    rows: Counter[str] = Counter(events=0, logs=0, once=0)
    for run, run_id in [*left, *going.items()]:
        rows["events"] += conn.execute(f"SELECT count(*) {_RECORDS}", [run]).fetchone()[0]
        rows["logs"] += conn.execute("SELECT count(*) FROM dagresume_logs WHERE run = ?", [run]).fetchone()[0]
        of = "SELECT count(*) FROM dagresume_once WHERE scope = ?"
        rows["once"] += conn.execute(of, [scope_of("run", run_id)]).fetchone()[0] if run_id else 0
    found_all = Forgotten(
        list(going),
        len(left),
        **rows,
        definitions=len(_unused_definitions(list(going), conn)),
        sessions=len(_past_sessions(clock, conn)),
        size=_sizes(conn)[0],
        free=_sizes(conn)[1],
    )
    return found_all, [run_id for _, run_id in [*left, *going.items()] if run_id]
