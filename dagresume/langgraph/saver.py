"""Checkpoints of LangGraph graphs in an SQLite file, the one of our runs or another.

Each `put` is one durable transaction when it returns (write-ahead log, synchronous=FULL, unless `normal` was
asked). Values are packed by LangGraph's own serializer in its strict form: nothing is unpickled, and no class
is made that is not on its list of safe ones or among `types`.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    BaseCheckpointSaver,
    CheckpointTuple,
    get_checkpoint_id,
    get_checkpoint_metadata,
)
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from dagresume import schema
from dagresume.clock import SystemClock
from dagresume.errors import StoreError

__all__ = ["DagresumeSaver"]

T = TypeVar("T")
_TABLES: Final = (
    """CREATE TABLE IF NOT EXISTS langgraph_checkpoints(thread TEXT NOT NULL, ns TEXT NOT NULL,
  id TEXT NOT NULL, parent TEXT, run TEXT, type TEXT NOT NULL, checkpoint BLOB NOT NULL,
  metadata_type TEXT NOT NULL, metadata BLOB NOT NULL, PRIMARY KEY(thread, ns, id)) WITHOUT ROWID""",
    """CREATE INDEX IF NOT EXISTS langgraph_checkpoints_run ON langgraph_checkpoints(run)
  WHERE run IS NOT NULL""",
    """CREATE TABLE IF NOT EXISTS langgraph_writes(thread TEXT NOT NULL, ns TEXT NOT NULL, id TEXT NOT NULL,
  task TEXT NOT NULL, idx INTEGER NOT NULL, path TEXT NOT NULL, channel TEXT NOT NULL, type TEXT NOT NULL,
  value BLOB NOT NULL, PRIMARY KEY(thread, ns, id, task, idx)) WITHOUT ROWID""",
)
_COLUMNS: Final = "thread, ns, id, parent, type, checkpoint, metadata_type, metadata"
_OF_ONE: Final = "thread = ? AND ns = ? AND id = ?"


def _strict(types: Iterable[type]) -> JsonPlusSerializer:
    """Give the serializer that makes nothing but what is known to be harmless, and these."""
    allowed = [(each.__module__, each.__name__) for each in types] or None
    return JsonPlusSerializer(pickle_fallback=False, allowed_msgpack_modules=allowed)


class DagresumeSaver(BaseCheckpointSaver):
    """A checkpointer for LangGraph: `graph.compile(checkpointer=DagresumeSaver("runs.db"))`.

    `path`: the file of an engine, or another SQLite file, which is made if it is not there; `":memory:"` is
    kept nowhere. `synchronous`: "full" survives the loss of power, "normal" the death of the process. Usable
    from any thread and loop; close it, or use it as a context manager. `types`: classes of your own that
    checkpoints hold; others come back as plain data. `serde`: a serializer of your own instead of all that.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        synchronous: Literal["full", "normal"] = "full",
        types: Iterable[type] = (),
        serde: Any = None,
    ) -> None:
        super().__init__(serde=serde or _strict(types))
        self._path, self._lock = os.fspath(path), threading.RLock()
        if self._path != ":memory:":
            schema.make_private(self._path)
        try:
            self._conn = sqlite3.connect(
                self._path, isolation_level=None, check_same_thread=False, timeout=60, cached_statements=64
            )
            self._conn.execute("PRAGMA journal_mode = WAL").fetchone()
            self._conn.execute(f"PRAGMA synchronous = {'NORMAL' if synchronous == 'normal' else 'FULL'}")
            self._make_tables()
        except sqlite3.Error as error:
            raise schema.explained(str(Path(self._path)), error) from error

    def _make_tables(self) -> None:
        """Make what is not there yet; a file with nothing in it becomes one of ours, for engines too."""
        self._conn.execute("BEGIN IMMEDIATE")
        if not self._conn.execute("SELECT 1 FROM sqlite_master").fetchone():
            schema.migrate(self._conn, self._path, adopt=False, now=SystemClock.now())
        for statement in _TABLES:
            self._conn.execute(statement)
        self._conn.execute("COMMIT")

    def __enter__(self) -> DagresumeSaver:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> DagresumeSaver:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Let the file go."""
        with self._lock:
            self._conn.close()

    # -- reading --------------------------------------------------------------------------------------

    def get_tuple(self, config: Any) -> Any:
        """Give the checkpoint that is named, or the newest of its thread and namespace, or None."""
        thread, ns, id_ = _place(config)
        which = f"SELECT {_COLUMNS} FROM langgraph_checkpoints WHERE thread = ? AND ns = ?"
        with self._reading():
            if id_ is not None:
                row = self._conn.execute(f"{which} AND id = ?", (thread, ns, id_)).fetchone()
            else:
                row = self._conn.execute(f"{which} ORDER BY id DESC LIMIT 1", (thread, ns)).fetchone()
            return None if row is None else self._tuple(row)

    def list(
        self,
        config: Any,
        *,
        filter: Mapping[str, Any] | None = None,  # noqa: A002  # so LangGraph calls it
        before: Any = None,
        limit: int | None = None,
    ) -> Iterator[Any]:
        """Give checkpoints, the newest first, of one thread and namespace or of all; `filter`: what their
        metadata must hold.
        """
        where, values = [], []
        if config is not None:
            thread, ns, id_ = _place(config, namespace=None)
            for column, value in (("thread", thread), ("ns", ns), ("id", id_)):
                if value is not None:
                    where.append(f"{column} = ?")
                    values.append(value)
        if before is not None and (earlier := get_checkpoint_id(before)) is not None:
            where.append("id < ?")
            values.append(earlier)
        condition = f" WHERE {' AND '.join(where)}" if where else ""
        sql = f"SELECT {_COLUMNS} FROM langgraph_checkpoints{condition} ORDER BY id DESC"
        with self._reading():
            rows = self._conn.execute(sql, values).fetchall()
        given = 0
        for row in rows:
            if limit is not None and given >= limit:
                return
            metadata = self.serde.loads_typed((row[6], row[7]))
            if all(metadata.get(name) == value for name, value in (filter or {}).items()):
                given += 1
                with self._reading():
                    yield self._tuple(row)

    def _tuple(self, row: Sequence[Any]) -> Any:
        thread, ns, id_, parent, kind, packed, metadata_kind, metadata = row
        writes = self._conn.execute(
            f"SELECT task, channel, type, value FROM langgraph_writes WHERE {_OF_ONE}"
            " ORDER BY path, task, idx",
            (thread, ns, id_),
        ).fetchall()
        return CheckpointTuple(
            _config(thread, ns, id_),
            self.serde.loads_typed((kind, packed)),
            self.serde.loads_typed((metadata_kind, metadata)),
            None if parent is None else _config(thread, ns, parent),
            [
                (task, channel, self.serde.loads_typed((type_, value)))
                for task, channel, type_, value in writes
            ],
        )

    # -- writing --------------------------------------------------------------------------------------

    def put(self, config: Any, checkpoint: Any, metadata: Any, new_versions: Any) -> Any:
        """Keep a checkpoint; durable when this returns."""
        thread, ns, parent = _place(config)
        whole = get_checkpoint_metadata(config, metadata)
        kind, packed = self.serde.dumps_typed(checkpoint)
        metadata_kind, told = self.serde.dumps_typed(whole)
        run = whole.get("run_id")
        values = (thread, ns, checkpoint["id"], parent, run and str(run), kind, packed, metadata_kind, told)
        self._write(
            [("INSERT OR REPLACE INTO langgraph_checkpoints VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", [values])]
        )
        return _config(thread, ns, checkpoint["id"])

    def put_writes(
        self, config: Any, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Keep what a task of a checkpoint has written; durable when this returns."""
        thread, ns, id_ = _place(config)
        rows = [
            (
                thread,
                ns,
                id_,
                task_id,
                WRITES_IDX_MAP.get(channel, n),
                task_path,
                channel,
                *self.serde.dumps_typed(value),
            )
            for n, (channel, value) in enumerate(writes)
        ]
        again = "REPLACE" if all(channel in WRITES_IDX_MAP for channel, _ in writes) else "IGNORE"
        self._write([(f"INSERT OR {again} INTO langgraph_writes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)])

    # -- retention ------------------------------------------------------------------------------------

    def delete_thread(self, thread_id: str) -> None:
        """Delete all of a thread."""
        self._write([(f"DELETE FROM {table} WHERE thread = ?", [(str(thread_id),)]) for table in _NAMES])

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints whose metadata names one of these LangGraph runs, with their writes."""
        runs = [(str(run_id),) for run_id in run_ids]
        writes = (
            "DELETE FROM langgraph_writes WHERE (thread, ns, id) IN"
            " (SELECT thread, ns, id FROM langgraph_checkpoints WHERE run = ?)"
        )
        self._write([(writes, runs), ("DELETE FROM langgraph_checkpoints WHERE run = ?", runs)])

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy all of a thread, its whole chain of parents too; what the target holds under the same ids is
        replaced.
        """
        to_from = [(str(target_thread_id), str(source_thread_id))]
        self._write(
            [
                (f"INSERT OR REPLACE INTO {table} SELECT ?, {rest} FROM {table} WHERE thread = ?", to_from)
                for table, rest in zip(_NAMES, _RESTS, strict=True)
            ]
        )

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Delete what is not needed any more: `"delete"` all of these threads; `"keep_latest"` all but the
        newest checkpoint of each namespace and those before it that it rests on (channels that store only
        what was added to them).
        """
        if strategy not in {"keep_latest", "delete"}:
            raise ValueError(f"strategy={strategy!r}: 'keep_latest' or 'delete'")
        for thread in map(str, thread_ids):
            if strategy == "delete":
                self.delete_thread(thread)
                continue
            with self._lock:
                gone = [
                    (thread, ns, id_)
                    for ns in self._namespaces(thread)
                    for id_ in self._superseded(thread, ns)
                ]
                self._write([(f"DELETE FROM {table} WHERE {_OF_ONE}", gone) for table in _NAMES])

    def _namespaces(self, thread: str) -> Sequence[str]:
        with self._reading():
            found = self._conn.execute(
                "SELECT DISTINCT ns FROM langgraph_checkpoints WHERE thread = ?", (thread,)
            )
            return [ns for (ns,) in found]

    def _superseded(self, thread: str, ns: str) -> Sequence[str]:
        with self._reading():
            found = self._conn.execute(
                "SELECT id FROM langgraph_checkpoints WHERE thread = ? AND ns = ? ORDER BY id DESC",
                (thread, ns),
            )
            ids = [id_ for (id_,) in found]
        needed = self._needed(self.get_tuple(_config(thread, ns, ids[0])))
        return [id_ for id_ in ids if id_ not in needed]

    def _needed(self, newest: Any) -> set[str]:
        """Give the newest checkpoint and its ancestors up to where every channel it lacks has a value."""
        needed = {newest.checkpoint["id"]}
        lacking = set(newest.checkpoint.get("channel_versions", {})) - set(
            newest.checkpoint["channel_values"]
        )
        cursor, passed, written = newest.parent_config, [], set()
        while cursor is not None and lacking and (found := self.get_tuple(cursor)) is not None:
            passed.append(found.checkpoint["id"])
            written |= {channel for _, channel, _ in found.pending_writes or ()} & lacking
            ended = lacking & set(found.checkpoint["channel_values"])
            if written:
                needed.update(passed)
            written -= ended
            lacking -= ended
            cursor = found.parent_config
        return needed

    def _write(self, statements: Sequence[tuple[str, Sequence[Sequence[Any]]]]) -> None:
        """Write in one durable transaction."""
        with self._lock:
            try:
                self._conn.execute("BEGIN IMMEDIATE")
                for sql, rows in statements:
                    self._conn.executemany(sql, rows)
                self._conn.execute("COMMIT")
            except BaseException as error:
                if self._conn.in_transaction:
                    self._conn.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error):
                    raise schema.explained(self._path, error) from error
                raise

    def _reading(self) -> Any:
        return self._lock

    # -- the same without blocking a loop ---------------------------------------------------------------

    async def aget_tuple(self, config: Any) -> Any:
        """As `get_tuple`, in a thread."""
        return await self._elsewhere(self.get_tuple, config)

    async def alist(
        self,
        config: Any,
        *,
        filter: Mapping[str, Any] | None = None,  # noqa: A002  # so LangGraph calls it
        before: Any = None,
        limit: int | None = None,
    ) -> AsyncIterator[Any]:
        """As `list`, in a thread."""
        found = await self._elsewhere(lambda: [*self.list(config, filter=filter, before=before, limit=limit)])
        for each in found:
            yield each

    async def aput(self, config: Any, checkpoint: Any, metadata: Any, new_versions: Any) -> Any:
        """As `put`, in a thread."""
        return await self._elsewhere(self.put, config, checkpoint, metadata, new_versions)

    async def aput_writes(
        self, config: Any, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """As `put_writes`, in a thread."""
        await self._elsewhere(self.put_writes, config, writes, task_id, task_path)

    async def adelete_thread(self, thread_id: str) -> None:
        """As `delete_thread`, in a thread."""
        await self._elsewhere(self.delete_thread, thread_id)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """As `delete_for_runs`, in a thread."""
        await self._elsewhere(self.delete_for_runs, run_ids)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """As `copy_thread`, in a thread."""
        await self._elsewhere(self.copy_thread, source_thread_id, target_thread_id)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """As `prune`, in a thread."""
        await self._elsewhere(lambda: self.prune(thread_ids, strategy=strategy))

    @staticmethod
    async def _elsewhere(call: Callable[..., T], *args: Any) -> T:
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, call, *args))


_NAMES: Final = ("langgraph_checkpoints", "langgraph_writes")
_RESTS: Final = (
    "ns, id, parent, run, type, checkpoint, metadata_type, metadata",
    "ns, id, task, idx, path, channel, type, value",
)


def _place(config: Any, namespace: str | None = "") -> tuple[str, Any, str | None]:
    """Give thread, namespace and checkpoint id that a config names."""
    told = config["configurable"]
    if "thread_id" not in told:
        raise StoreError("LangGraph: give a thread: config={'configurable': {'thread_id': '…'}}.")
    return str(told["thread_id"]), told.get("checkpoint_ns", namespace), get_checkpoint_id(config)


def _config(thread: str, ns: str, id_: str) -> dict[str, dict[str, str]]:
    return {"configurable": {"thread_id": thread, "checkpoint_ns": ns, "checkpoint_id": id_}}
