"""The store in one SQLite file.

Two connections, each with a thread of its own: one writes (see `writer`), one reads. Every call is one hop
to its thread and one answer back: no cursor and no transaction is ever open between two awaits.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import aiosqlite

from dagresume import forks
from dagresume.errors import StoreError
from dagresume.events import R5_WORDS, Record, Records
from dagresume.forgetting import foresee, forget
from dagresume.observe import log
from dagresume.places import file_system
from dagresume.schema import (
    EVENT_COLUMNS,
    examine,
    explained,
    make_private,
    migrate,
    persist,
    refuse_cut,
    refuse_read_only,
    use_wal,
)
from dagresume.sessions import closed
from dagresume.steady import to_its_end
from dagresume.store import (
    SYSTEM_CLOCK,
    Clear,
    CommitCancelled,
    Forgotten,
    Holder,
    Loaded,
    LogLine,
    OnceFound,
    OnceRow,
    Outcome,
    RunRow,
    Session,
    Unit,
)
from dagresume.wal import SIZE_LIMIT, uri
from dagresume.writer import Worker, Writer, holder

if TYPE_CHECKING:
    from dagresume.clock import Clock

__all__ = ["SQLiteStore"]

T = TypeVar("T")
_TIMEOUT: Final = 5.0
_RUN_COLUMNS: Final = ", ".join(RunRow._fields)
_SESSION: Final = ", ".join(Session._fields)
_IS_SMALL: Final = "size <= 128 AND typeof(output) = 'text'"
"""Of an output that is read with its record: a resume is likely to need it."""
_RECORD: Final = f"{EVENT_COLUMNS.removesuffix(', output')}, NULL, seq"
"""The columns of a `Record` without its output, whose pages a reader of the journal never touches."""


class SQLiteStore:
    """A durable home for runs in one file on a local disk.

    `synchronous`: "full" survives the loss of power, "normal" the death of the process. `adopt`: put the
    tables into a database of somebody else. An error of the file itself is a StoreError that names it.
    """

    persistent = True
    connection_class: type[Writer] = Writer
    """The connection that writes; a subclass may watch or disturb what it does (see `dagresume.testing`)."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        synchronous: Literal["full", "normal"] = "full",
        adopt: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if synchronous not in ("full", "normal"):
            raise ValueError(f"synchronous={synchronous!r}: 'full' or 'normal'")
        self.name = os.fspath(path)
        self.commits = 0
        self._path = os.path.abspath(self.name)  # noqa: PTH100  # Path.absolute() keeps `..`
        self._synchronous = synchronous
        self._adopt = adopt
        self._clock = clock
        self._session: int | None = None
        self._known: Session | None = None
        self._pid = os.getpid()
        self._connections: list[tuple[aiosqlite.Connection, Worker]] = []
        self._opened: tuple[int, int] | None = None
        self._tending: asyncio.Task[None] | None = None

    # opening and closing

    async def open(self, session: Session) -> int:
        """Make the file ready and register this session; gives its number.

        Raises StoreCorrupt and SchemaTooNew for a file that is not ours to write to (it stays as it is), and
        StoreReadOnly where nothing can be written.
        """
        if self._connections:
            raise StoreError(f"{self.name} is open already")
        self._pid = os.getpid()
        self._refuse_inherited()
        try:
            await to_its_end(self._open(session))
        except BaseException:
            await self.close()
            raise
        assert self._session is not None
        self._known = session
        _warn_of_place(self._path)
        return self._session

    def _refuse_inherited(self) -> None:
        """SQLite takes the locks that the parent of a forked process held for its own, and they are not."""
        if forks.is_inherited(self._path):
            raise StoreError(
                f"{self.name} was open in the process from which this one was forked: SQLite's locks do not"
                " survive that, and what is written here could be lost. Start this process afresh:"
                " multiprocessing.get_context('spawn'), or a program of its own."
            )

    async def _open(self, session: Session) -> None:
        refuse_cut(self._path)
        refuse_read_only(self._path)
        connection, writer = await self._connect(
            self._path, self.connection_class, first=partial(make_private, self._path)
        )
        assert isinstance(writer, Writer)
        try:
            self._session = await _hop(connection, writer, partial(self._prepare, writer, session))
            self._opened = forks.opened(self._path, asyncio.get_running_loop())
            connection, reader = await self._connect(uri(self._path), Worker, uri=True)
            await _hop(connection, reader, partial(_prepare_to_read, reader))
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise explained(self._path, error) from error

    async def _connect(
        self, place: str, kind: type[Worker], *, first: Callable[[], None] | None = None, **options: Any
    ) -> tuple[aiosqlite.Connection, Worker]:
        made: list[Worker] = []
        errors: list[sqlite3.Error] = []

        def factory(*arguments: Any, **rest: Any) -> Worker:
            # Nobody waits for the thread of a connection that was not made; it would speak to a closed loop.
            if first is not None:
                first()
            try:
                made.append(kind(*arguments, **rest))
            except sqlite3.Error as error:
                errors.append(error)
                made.append(Worker(":memory:"))
            return made[0]

        connection = await aiosqlite.connect(
            place, factory=factory, isolation_level=None, timeout=_TIMEOUT, **options
        )
        self._connections.append((connection, made[0]))
        if errors:
            raise explained(self._path, errors[0])
        return connection, made[0]

    def _prepare(self, writer: Writer, session: Session) -> int:
        persist(writer, partial(examine, writer, self._path, self._adopt))
        writer.execute("PRAGMA auto_vacuum = INCREMENTAL").fetchall()  # heard only by a file that is new
        persist(writer, partial(use_wal, writer, self._path))
        for pragma in (
            f"synchronous = {self._synchronous}",
            "wal_autocheckpoint = 0",
            f"journal_size_limit = {SIZE_LIMIT}",
            "foreign_keys = 0",
        ):
            writer.execute(f"PRAGMA {pragma}").fetchall()
        writer.set_up(self._path, self._clock)
        number = persist(writer, partial(self._register, writer, session))
        writer.watch()
        return number

    def _register(self, writer: Writer, session: Session) -> int:
        writer.execute("BEGIN IMMEDIATE")
        migrate(writer, self._path, self._adopt, self._clock.now())
        marks = ", ".join("?" * len(session))
        sql = f"INSERT INTO dagresume_sessions({_SESSION}) VALUES ({marks})"
        number = writer.execute(sql, session).lastrowid
        writer.execute("COMMIT")
        return number or 0

    async def close(self) -> None:
        """End the session, empty the log and let the file go."""
        if self._connections:
            await to_its_end(self._close())

    async def _close(self) -> None:
        connections, self._connections = self._connections[::-1], []
        session, self._session = self._session, None
        try:
            if session is not None and os.getpid() == self._pid:
                connection, worker = connections[-1]
                await _hop(connection, worker, partial(self._end, worker, session))
        finally:
            try:
                for connection, _ in connections:
                    await connection.close()
            except asyncio.CancelledError:  # the loop is taken down, and this task with it
                for connection, _ in connections:
                    connection.stop()
                raise
            finally:
                forks.closed(self._opened)
                self._opened = None

    def _end(self, writer: Worker, session: int) -> None:
        sql = "UPDATE dagresume_sessions SET ended_at = ? WHERE session = ? AND ended_at IS NULL"
        try:
            writer.execute(sql, [self._clock.now(), session])
        except sqlite3.Error:
            if self._known is not None:
                closed(self._known.uuid)  # to other processes it ends when its lease does
        if isinstance(writer, Writer):
            writer.wal.close(writer)

    def abandon(self) -> None:
        """Stop the connections' threads, which would keep an interpreter from ending; from any thread."""
        connections, self._connections = self._connections, []
        for connection, _ in connections:
            connection.stop()

    def renew(self, expires_at: int) -> bool:
        """Prolong this session's lease; for a thread of its own. False: the session is gone."""
        session, known = self._session, self._known
        if session is None or known is None:
            return False
        ours = "session = ? AND uuid = ? AND ended_at IS NULL"  # the file may be another by now
        sql = f"UPDATE dagresume_sessions SET expires_at = ? WHERE {ours}"
        # Who was away for long may have been cleared away as dead.
        marks = ", ".join("?" * (1 + len(known)))
        again = f"INSERT OR IGNORE INTO dagresume_sessions(session, {_SESSION}) VALUES ({marks})"
        try:
            with self._visit(timeout=1.0) as conn:
                conn.execute("PRAGMA synchronous = NORMAL")
                conn.execute("PRAGMA wal_autocheckpoint = 0").fetchall()
                if conn.execute(sql, [expires_at, session, known.uuid]).rowcount:
                    return True
                return bool(conn.execute(again, [session, *known._replace(expires_at=expires_at)]).rowcount)
        except sqlite3.Error as error:
            raise explained(self._path, error) from error

    @contextlib.contextmanager
    def _visit(self, timeout: float = _TIMEOUT) -> Iterator[sqlite3.Connection]:
        """Give a connection for this moment, in whatever thread we are."""
        conn = sqlite3.connect(uri(self._path), uri=True, isolation_level=None, timeout=timeout)
        with contextlib.closing(conn):
            yield conn

    # the one verb

    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        """Write these units in one durable transaction; one outcome for each, in order.

        Units with SQL of the user's have a transaction of their own. Cancelled, this ends after the writing
        has, which cannot be stopped in the middle: CommitCancelled says what became of the units.
        """
        connection, writer = self._at(0)
        assert isinstance(writer, Writer)
        outcomes: list[list[Outcome]] = []
        try:
            await _hop(connection, writer, lambda: outcomes.append(writer.write(units)))
            return outcomes[0]
        except asyncio.CancelledError as error:
            with contextlib.suppress(asyncio.CancelledError):
                await to_its_end(_hop(connection, writer, _nothing))
            if outcomes:
                raise CommitCancelled(outcomes[0]) from error
            raise
        finally:
            self.commits = writer.commits
            if self._tending is None and writer.wal.needs_care:
                self._tend(connection, writer)

    def _tend(self, connection: aiosqlite.Connection, writer: Writer) -> None:
        """Have the log looked after behind what was just written: no result waits for that."""
        self._tending = asyncio.ensure_future(_hop(connection, writer, writer.tend))
        self._tending.add_done_callback(self._tended)

    def _tended(self, task: asyncio.Task[None]) -> None:
        self._tending = None
        if not task.cancelled():
            task.exception()  # the connection is closed: nothing is left to look after

    async def forget(self, runs: Mapping[int, int], clear: Clear, *, dry_run: bool = False) -> Forgotten:
        """Remove ended runs for ever: number of each → the epoch under which it was seen.

        In short transactions, between which others write. See `forgetting`.
        """
        if dry_run:
            return await foresee(self._read, self._clock, runs, clear)
        return await forget(self._write, self._read, self._clock, runs, clear)

    async def _write(self, job: Callable[[Writer], T]) -> T:
        """Do `job` on the connection that writes."""
        connection, writer = self._at(0)
        assert isinstance(writer, Writer)
        try:
            return await _hop(connection, writer, partial(job, writer))
        except sqlite3.Error as error:
            raise explained(self._path, error) from error
        finally:
            self.commits = writer.commits

    def _at(self, place: int) -> tuple[aiosqlite.Connection, Worker]:
        if not self._connections:
            raise StoreError(f"{self.name} is not open")
        if os.getpid() != self._pid:
            raise StoreError(
                f"{self.name} was opened by another process, from which this one was forked. Open an engine"
                " of this process' own."
            )
        return self._connections[place]

    # readers

    async def _read(self, job: Callable[[sqlite3.Connection], T]) -> T:
        """Do `job` on the reading connection, in one read transaction."""
        connection, reader = self._at(1)
        try:
            return await _hop(
                connection, reader, partial(persist, reader, partial(_in_one_view, reader, job))
            )
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise explained(self._path, error) from error

    async def load(self, run_id: str) -> Loaded | None:
        """Give a run with its journal, or None."""
        return await self._read(partial(self._load, run_id))

    def _load(self, run_id: str, conn: sqlite3.Connection) -> Loaded | None:
        sql = f"SELECT {_RUN_COLUMNS} FROM dagresume_runs WHERE run_id = ?"
        found = conn.execute(sql, [run_id]).fetchone()
        if found is None:
            return None
        row = RunRow(*found)
        # A list of row numbers comes sorted: in order without sorting the rows.
        which = "seq IN (SELECT seq FROM dagresume_events WHERE run = ?)"
        try:
            records = _records(conn, which, row.run, f"CASE WHEN {_IS_SMALL} THEN output END")
        except (sqlite3.OperationalError, UnicodeDecodeError):
            records = _records(conn, which, row.run, "NULL")  # whoever needs the one that is broken finds out
        graphs = "SELECT graph FROM dagresume_definitions WHERE definition = ?"
        graph = conn.execute(graphs, [row.definition]).fetchone()
        owner = holder(conn, row.owner, self._clock)
        return Loaded(row, records, graph[0] if graph else "", owner)

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
        wanted = {
            "workflow = ?": workflow, "key = ?": key, "run < ?": before, "wake_at <= ?": due,
            "created_at >= ?": since, "created_at < ?": until, "run_id >= ?": starting,
            # no LIKE: it takes a wildcard for one, and capitals for small letters
            "run_id < ?": None if starting is None else starting + chr(0x10FFFF),
        }  # fmt: skip
        return await self._read(
            partial(self._find, {k: v for k, v in wanted.items() if v is not None}, status, limit)
        )

    def _find(
        self, wanted: dict[str, Any], status: Sequence[str] | None, limit: int, conn: sqlite3.Connection
    ) -> list[tuple[RunRow, Holder | None]]:
        # One question for each status: each of them comes newest first from the index, and ends at the limit.
        questions = [wanted] if status is None else [wanted | {"status = ?": word} for word in set(status)]
        rows: list[RunRow] = []
        for question in questions:
            where = f"WHERE {' AND '.join(question)}" if question else ""
            sql = f"SELECT {_RUN_COLUMNS} FROM dagresume_runs {where} ORDER BY run DESC LIMIT ?"
            rows += map(RunRow._make, conn.execute(sql, [*question.values(), limit]))
        rows = sorted(rows, reverse=True)[:limit]
        holders = {owner: holder(conn, owner, self._clock) for owner in {row.owner for row in rows}}
        return [(row, holders[row.owner]) for row in rows]

    async def tail(
        self, after: int, *, run_id: str | None = None, kinds: Sequence[str] | None = None, limit: int = 1000
    ) -> list[tuple[str, Record]]:
        """Give (run id, record without output) of the journal after a seq, in order."""
        return await self._read(partial(_tail, after, run_id, kinds, limit))

    async def output(self, seqs: Sequence[int]) -> list[str | None]:
        """Give the packed outputs of these records, in the order asked for; None where there is none."""
        return await self._read(partial(_outputs, seqs))

    def output_now(self, seqs: Sequence[int]) -> list[str | None]:
        """Do the same without an event loop, from any thread, also after `close`."""
        try:
            with self._visit() as conn:
                return _outputs(seqs, conn)
        except sqlite3.Error as error:
            raise explained(self._path, error) from error

    async def logs(self, run_id: str, *, after: int = 0, limit: int = 1000) -> list[tuple[int, LogLine]]:
        """Give (id, line) of what the nodes of a run logged, in order."""
        return await self._read(partial(_logs, run_id, after, limit))

    async def once(self, scope: str, key: str) -> OnceFound | None:
        """Give what is known of a call that is made once, or None."""
        return await self._read(partial(self._once, scope, key))

    def _once(self, scope: str, key: str, conn: sqlite3.Connection) -> OnceFound | None:
        sql = (
            "SELECT o.path, o.state, o.result, o.at, r.run_id, r.owner FROM dagresume_once AS o"
            " LEFT JOIN dagresume_runs AS r ON r.run = o.run WHERE o.scope = ? AND o.key = ?"
        )
        found = conn.execute(sql, [scope, key]).fetchone()
        if found is None:
            return None
        *facts, run_id, owner = found
        return OnceFound(OnceRow(scope, key, *facts), run_id or "", holder(conn, owner, self._clock))

    async def changed(self) -> int:
        """Give a number that differs from the last one if another connection has written since."""
        connection, writer = self._at(0)
        try:
            rows = await _hop(connection, writer, lambda: writer.execute("PRAGMA data_version").fetchone())
        except sqlite3.Error as error:
            raise explained(self._path, error) from error
        return int(rows[0])


# -- in the thread of a connection ----------------------------------------------------------------------


def _prepare_to_read(reader: Worker) -> None:
    reader.execute("PRAGMA query_only = 1")
    # Now it knows the tables and views, which the first who asks something would wait for.
    persist(reader, lambda: reader.execute("SELECT 1 FROM dagresume_runs LIMIT 0").fetchall())


def _in_one_view(conn: sqlite3.Connection, job: Callable[[sqlite3.Connection], T]) -> T:
    conn.execute("BEGIN")
    found = job(conn)
    conn.execute("COMMIT")
    return found


def _tail(
    after: int,
    run_id: str | None,
    kinds: Sequence[str] | None,
    limit: int,
    conn: sqlite3.Connection,
) -> list[tuple[str, Record]]:
    where, values = ["seq > ?"], [after]
    if run_id is not None:
        run = conn.execute("SELECT run FROM dagresume_runs WHERE run_id = ?", [run_id]).fetchone()
        where = ["seq IN (SELECT seq FROM dagresume_events WHERE run = ? AND seq > ?)"]
        values = [run[0] if run else 0, after]
    if kinds is not None:
        where.append(f"e.kind IN ({', '.join('?' * len(kinds))})")
        if run_id is None and R5_WORDS.keys().isdisjoint(kinds):
            where.append("e.status IS NULL")  # what the index of such kinds holds
    return _tailed(conn, " AND ".join(where), [*values, *(kinds or ()), limit])


def _tailed(conn: sqlite3.Connection, where: str, values: Sequence[Any]) -> list[tuple[str, Record]]:
    columns = ", ".join(f"e.{name}" if name != "NULL" else name for name in _RECORD.split(", "))
    # CROSS: in the order of the journal. What is left of a run that is being forgotten is nobody's.
    sql = (
        f"SELECT r.run_id, {columns} FROM dagresume_events AS e CROSS JOIN dagresume_runs AS r"
        f" ON r.run = e.run WHERE {where} ORDER BY seq LIMIT ?"
    )
    return [(row[0], Record._make(row[1:])) for row in conn.execute(sql, values)]


def _records(conn: sqlite3.Connection, which: str, run: int, output: str) -> Records:
    """Give the records of a run in order, each with the output that this expression gives."""
    columns = _RECORD.replace("NULL", output)
    sql = f"SELECT {columns} FROM dagresume_events WHERE {which} ORDER BY seq"
    return Records(conn.execute(sql, [run]).fetchall())


def _outputs(seqs: Sequence[int], conn: sqlite3.Connection) -> list[str | None]:
    if len(seqs) > 1 and list(seqs) == list(range(seqs[0], seqs[0] + len(seqs))):
        sql = "SELECT output FROM dagresume_events WHERE seq BETWEEN ? AND ? ORDER BY seq"
        rows = conn.execute(sql, [seqs[0], seqs[-1]]).fetchall()
        if len(rows) == len(seqs):
            return [text for (text,) in rows]
    join = "json_each(?) AS asked CROSS JOIN dagresume_events AS e ON e.seq = asked.value"
    sql = f"SELECT e.seq, e.output FROM {join}"
    found = dict(conn.execute(sql, [json.dumps(list(seqs))]).fetchall())
    return [found.get(seq) for seq in seqs]


def _logs(run_id: str, after: int, limit: int, conn: sqlite3.Connection) -> list[tuple[int, LogLine]]:
    sql = (
        "SELECT id, path, attempt, at, level, line FROM dagresume_logs"
        " WHERE run = (SELECT run FROM dagresume_runs WHERE run_id = ?) AND id > ? ORDER BY id LIMIT ?"
    )
    return [(row[0], LogLine(*row[1:])) for row in conn.execute(sql, [run_id, after, limit])]


def _nothing() -> None:
    pass


@cache
def _warn_of_place(path: str) -> None:
    """Say once of a file that the file system it lies on does not keep what SQLite needs."""
    found = file_system(path)
    if found is not None and found.network:
        log.warning(f"{path}: {found.warning}")


# -- between the loop and the thread --------------------------------------------------------------------


async def _hop(connection: aiosqlite.Connection, worker: Worker, job: Callable[[], T]) -> T:
    """Do `job` in the connection's thread: in the order of the calls, also if a call is cancelled."""
    box: list[T] = []
    worker.desk.append((job, box))
    await connection.commit()
    return box[0]
