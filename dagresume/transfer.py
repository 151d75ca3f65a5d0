"""Takes whole runs out of a database as JSON Lines, and puts them into another one.

    from dagresume.transfer import export_runs, import_runs

    with open("runs.jsonl", "w") as file:
        file.writelines(export_runs("runs.db"))
    import_runs("other.db", open("runs.jsonl"))

A run is a line that begins it (its row, its definition, its inputs), a line for each big output, each event,
each call made once and each logged line, and a line that ends it. Events are numbered from 1 on within the
run; what an event says of another one says its number. Outputs stand there as they are stored, as JSON:
secrets among the inputs too, since without them nothing could go on. Artifacts are left out.

A run is imported whole or not at all. One that was under way is interrupted in the copy; who drives the
original is not its owner.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from dagresume import codec, schema
from dagresume.blobs import BlobStore
from dagresume.clock import SystemClock, to_datetime, to_micros
from dagresume.errors import ImportRefused, RunNotFound
from dagresume.events import RUN_INTERRUPTED, Record, RunStatus, projection, run_record
from dagresume.flaws import line_flaw, record_flaw, row_flaw
from dagresume.inventory import blobs_of
from dagresume.peek import peek
from dagresume.store import LogLine, RunRow, scope_of

__all__ = ["FORMAT", "Imported", "export_runs", "import_runs"]

FORMAT: Final = 1
_COUNTED: Final = ("events", "blobs", "once", "logs")
_MANY: Final = 500  # rows that are written at once
_TIMES: Final = ("wake_at", "created_at", "updated_at", "finished_at")
_PLAIN: Final = (
    "run_id", "workflow", "version", "key", "status", "reason", "source", "auto_resumes", "recoveries",
    "forked_at_seq",
)  # fmt: skip
_REFERENCES: Final = ("seq", "signal", "read")
"""Facts of a record that are the number of another one of its run."""
_EVENT: Final = (
    "seq", "run", "kind", "attempt", "at", "path", "reason", "input", "digest", "size", "took", "data",
    "output",
)  # fmt: skip
_write: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


# -- out ------------------------------------------------------------------------------------------------


def export_runs(path: str | os.PathLike[str], run_ids: Sequence[str] | None = None) -> Iterator[str]:
    """Give the lines of these runs, each with its line end; None: of all, the oldest first.

    Of each run what was durable at one moment is told. Raises RunNotFound, StoreError.
    """
    with peek(path) as looked:
        conn = looked.conn
        schema.examine(conn, str(path), adopt=False)
        wanted = [run_id for (run_id,) in conn.execute("SELECT run_id FROM dagresume_runs ORDER BY run")]
        known = set(wanted)
        for run_id in run_ids if run_ids is not None else ():
            if run_id not in known:
                raise RunNotFound(run_id, str(path))
        for run_id in wanted if run_ids is None else run_ids:
            conn.execute("BEGIN")
            try:
                yield from _exported(conn, blobs_of(Path(path)), run_id)
            finally:
                conn.execute("COMMIT")


def _exported(conn: sqlite3.Connection, blobs: BlobStore, run_id: str) -> Iterator[str]:
    row = _row(conn, run_id)
    if row is None:
        return  # it was pruned meanwhile
    (first,) = conn.execute("SELECT min(seq) FROM dagresume_events WHERE run = ?", [row.run]).fetchone()
    offset = (first or 1) - 1
    yield _head(conn, row)
    counts = Counter[str]()
    for file in sorted(blobs.of(run_id).glob("*")):
        if len(file.name) == 64:
            counts["blobs"] += 1
            yield f'{{"blob":"{file.name}","text":{blobs.read(run_id, file.name)}}}\n'
    for event in conn.execute(
        f"SELECT {', '.join(_EVENT)} FROM dagresume_events WHERE run = ? ORDER BY seq", [row.run]
    ):
        counts["events"] += 1
        yield _event_line(event, offset)
    for scope, key, path, state, result, at in conn.execute(
        "SELECT scope, key, path, state, result, at FROM dagresume_once WHERE run = ? ORDER BY scope, key",
        [row.run],
    ):
        counts["once"] += 1
        kind = "run" if scope == scope_of("run", run_id) else "workflow"
        told = {"once": key, "scope": kind, "path": path, "state": state, "result": result, "at": _iso(at)}
        yield f"{_write(told)}\n"
    for path, attempt, at, level, line in conn.execute(
        "SELECT path, attempt, at, level, line FROM dagresume_logs WHERE run = ? ORDER BY id", [row.run]
    ):
        counts["logs"] += 1
        yield f"{_write({'log': line, 'level': level, 'path': path, 'attempt': attempt, 'at': _iso(at)})}\n"
    yield f"{_write({'end': run_id} | {name: counts[name] for name in _COUNTED})}\n"


def _row(conn: sqlite3.Connection, run_id: str) -> RunRow | None:
    columns = ", ".join(RunRow._fields)
    found = conn.execute(f"SELECT {columns} FROM dagresume_runs WHERE run_id = ?", [run_id]).fetchone()
    return None if found is None else RunRow(*found)


def _head(conn: sqlite3.Connection, row: RunRow) -> str:
    told: dict[str, Any] = {name: getattr(row, name) for name in _PLAIN}
    told |= {name: None if (at := getattr(row, name)) is None else _iso(at) for name in _TIMES}
    told["usage"] = None if row.usage is None else json.loads(row.usage)
    told["inputs_digest"] = None if row.inputs_digest is None else row.inputs_digest.hex()
    told["holds_key"] = bool(row.holds_key)
    source = conn.execute("SELECT run_id FROM dagresume_runs WHERE run = ?", [row.forked_from]).fetchone()
    told["forked_from"] = None if source is None else source[0]
    workflow, version, hash_, graph = conn.execute(
        "SELECT workflow, version, hash, graph FROM dagresume_definitions WHERE definition = ?",
        [row.definition],
    ).fetchone()
    definition = {"workflow": workflow, "version": version, "hash": hash_.hex(), "graph": json.loads(graph)}
    return (
        f'{{"dagresume":{FORMAT},"run":{_write(told)},"inputs":{row.inputs or "{}"},'
        f'"definition":{_write(definition)}}}\n'
    )


def _event_line(event: Sequence[Any], offset: int) -> str:
    found = dict(zip(_EVENT, event, strict=True))
    data, output = found.pop("data"), found.pop("output")
    del found["run"]
    found["event"] = found.pop("seq") - offset
    found["at"] = _iso(found["at"])
    for name in ("input", "digest"):
        found[name] = None if found[name] is None else found[name].hex()
    told: dict[str, Any] = {name: found[name] for name in ("event", "kind")}
    told |= {name: value for name, value in found.items() if value is not None}
    if data is not None:
        told["data"] = _moved(json.loads(data), -offset)
    text: str = _write(told)
    return f"{text}\n" if output is None else f'{text[:-1]},"output":{output}}}\n'


def _moved(facts: Mapping[str, Any], by: int) -> dict[str, Any]:
    """Give facts with the numbers of other records moved; 0 is the number of none."""
    moved = {
        name: facts[name] + by for name in _REFERENCES if isinstance(facts.get(name), int) and facts[name]
    }
    if isinstance(facts.get("kept"), dict):
        moved["kept"] = _moved(facts["kept"], by)
    return {**facts, **moved}


def _iso(at: int) -> str:
    return to_datetime(at).isoformat()


# -- in -------------------------------------------------------------------------------------------------


class Imported(NamedTuple):
    """A run that was imported: `status` as it is there now, how many events it has."""

    run_id: str
    workflow: str
    status: str
    events: int


def import_runs(
    path: str | os.PathLike[str],
    lines: Iterable[str],
    *,
    source: str = "<input>",
    skip_existing: bool = False,
) -> list[Imported]:
    """Put runs into an existing database of ours; gives those that were imported.

    Each run is one transaction: of a process that is killed, whole runs stay. `source` is what errors call
    the lines; `skip_existing`: runs that are there already are left as they are.

    Raises ImportRefused, which names the line, for what is no export of ours, was altered or cut off, and for
    a run or key that is there already; StoreError.
    """
    reader = _Lines(lines, source)
    done = []
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=60)) as conn:
        schema.examine(conn, str(path), adopt=False)
        conn.execute("PRAGMA synchronous = FULL")
        while (head := reader.next()) is not None:
            found = _Import(conn, blobs_of(Path(path)), reader, head)
            if found.is_there:
                if not skip_existing:
                    raise reader.refused(
                        f"run {found.row.run_id} is there already; --skip-existing passes over it"
                    )
                found.pass_over()
            else:
                done.append(found.whole(str(path)))
    return done


class _Lines:
    """The lines of an export: each a JSON object, with its number for errors."""

    def __init__(self, lines: Iterable[str], source: str) -> None:
        self._lines, self._source = iter(lines), source
        self.number = 0

    def next(self) -> dict[str, Any] | None:
        """Give the next line, its members still packed; None at the end."""
        for line in self._lines:
            self.number += 1
            if not line.strip():
                continue
            try:
                return dict(codec.members(line))
            except (ValueError, AttributeError, RecursionError):
                raise self.refused("this line is no JSON object") from None
        return None

    def refused(self, told: str) -> ImportRefused:
        """Give the error for the line that was read last."""
        return ImportRefused(f"{self._source}:{self.number}: {told}", self.number)

    @contextlib.contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Name the line for whatever is wrong with it."""
        try:
            yield
        except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
            missing = (
                f"{what} lacks {error}" if isinstance(error, KeyError) else f"{what} cannot be read: {error}"
            )
            raise self.refused(missing) from None


class _Import:
    """One run on its way in."""

    def __init__(
        self, conn: sqlite3.Connection, blobs: BlobStore, reader: _Lines, head: Mapping[str, str]
    ) -> None:
        self._conn, self._blobs, self._reader = conn, blobs, reader
        with reader.reading("the line that begins a run"):
            if json.loads(head.get("dagresume", "0")) != FORMAT:
                raise reader.refused(
                    f"no run begins here: an export of dagresume, format {FORMAT}, is to have one"
                )
            told, self._definition = json.loads(head["run"]), json.loads(head["definition"])
            self._holds_key, self._source = bool(told["holds_key"]), told["forked_from"]
            times: dict[str, Any] = {
                name: None if told[name] is None else _micros(told[name]) for name in _TIMES
            }
            usage = None if told["usage"] is None else json.dumps(told["usage"])
            digest = None if told["inputs_digest"] is None else bytes.fromhex(told["inputs_digest"])
            self.row = RunRow(
                **{name: told[name] for name in _PLAIN}, **times, run=0, definition=0, owner=None, epoch=0,
                holds_key=int(self._holds_key), forked_from=None, usage=usage, inputs_digest=digest,
                inputs=head["inputs"],
            )  # fmt: skip
            if (flaw := row_flaw(self.row)) is not None:
                raise ValueError(flaw)
        self._counts = Counter[str]()
        self._offset = 0

    @property
    def is_there(self) -> bool:
        """Whether the database has this run."""
        return _row(self._conn, self.row.run_id) is not None

    def pass_over(self) -> None:
        """Read the lines of this run and do nothing with them."""
        while (line := self._reader.next()) is not None:
            if "end" in line:
                return
        raise self._reader.refused(f"the export ends in the middle of run {self.row.run_id}")

    def whole(self, path: str) -> Imported:
        """Write the run in one transaction; nothing is left of it if that fails."""
        conn, folder = self._conn, self._blobs.of(self.row.run_id)
        kept = folder.exists()
        conn.execute("BEGIN IMMEDIATE")
        try:
            status = self._written()
            conn.execute("COMMIT")
        except BaseException as error:
            if conn.in_transaction:
                conn.execute("ROLLBACK")
            if not kept:
                shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, sqlite3.Error):
                raise schema.explained(path, error) from error
            raise
        return Imported(self.row.run_id, self.row.workflow, status, self._counts["events"])

    def _written(self) -> str:
        conn = self._conn
        (last,) = conn.execute("SELECT coalesce(max(seq), 0) FROM dagresume_events").fetchone()
        self._offset = last
        run = self._insert_row()
        rows: list[tuple[Any, ...]] = []
        ended = False
        while not ended and (line := self._reader.next()) is not None:
            if "event" in line:
                rows.append(self._event(run, line))
            elif "end" in line:
                self._check_end(line)
                ended = True
            elif "blob" in line:
                self._blob(line)
            elif "once" in line:
                self._once(run, line)
            elif "log" in line:
                self._log(run, line)
            else:
                raise self._reader.refused("this line is none of an export")
            if len(rows) >= _MANY or ended:
                self._insert_events(rows)
                rows.clear()
        if not ended:
            raise self._reader.refused(f"the export ends in the middle of run {self.row.run_id}")
        return self._cut_off(run)

    def _insert_row(self) -> int:
        conn, row = self._conn, self.row
        if row.key is not None and self._holds_key:
            holder = conn.execute(
                "SELECT run_id FROM dagresume_runs WHERE workflow = ? AND key = ? AND holds_key = 1",
                [row.workflow, row.key],
            ).fetchone()
            if holder is not None:
                raise self._reader.refused(
                    f"run {row.run_id} has the key {row.key!r}, held by run {holder[0]} here: prune that one"
                )
        source = conn.execute("SELECT run FROM dagresume_runs WHERE run_id = ?", [self._source]).fetchone()
        made = row._replace(definition=self._definition_number(), forked_from=source[0] if source else None)
        names = [name for name in RunRow._fields if name != "run"]
        marks = ", ".join("?" * len(names))
        found = conn.execute(
            f"INSERT INTO dagresume_runs({', '.join(names)}) VALUES ({marks})",
            [getattr(made, n) for n in names],
        )
        return found.lastrowid or 0

    def _definition_number(self) -> int:
        conn, told = self._conn, self._definition
        with self._reader.reading("the definition"):
            workflow, version, hash_ = told["workflow"], told["version"], bytes.fromhex(told["hash"])
            nodes = [(node["id"], node.get("type")) for node in told["graph"]["nodes"]]
            graph = _write(told["graph"])
        found = conn.execute(
            "SELECT definition FROM dagresume_definitions WHERE workflow = ? AND hash = ?", [workflow, hash_]
        ).fetchone()
        if found is not None:
            return int(found[0])
        kinds = {node["id"]: node["type"] for node in told["graph"]["nodes"] if "type" in node}
        like = {node["id"]: node["like"] for node in told["graph"]["nodes"] if "like" in node}
        number = conn.execute(
            "INSERT INTO dagresume_definitions(workflow, version, hash, graph, created_at)"
            " VALUES (?, ?, ?, ?, ?)",
            [workflow, version, hash_, graph, self.row.created_at],
        ).lastrowid
        conn.executemany(
            "INSERT INTO dagresume_definition_nodes VALUES (?, ?, ?, ?)",
            [(number, id_, n, kind or kinds[like[id_]]) for n, (id_, kind) in enumerate(nodes)],
        )
        return number or 0

    def _event(self, run: int, line: Mapping[str, str]) -> tuple[Any, ...]:
        with self._reader.reading("the event"):
            told = {name: json.loads(text) for name, text in line.items() if name != "output"}
            data = None if "data" not in told else json.dumps(_moved(told["data"], self._offset))
            hexed = {name: bytes.fromhex(told[name]) for name in ("input", "digest") if name in told}
            record = Record(
                told["kind"], told.get("attempt"), _micros(told["at"]), told.get("path"), told.get("reason"),
                hexed.get("input"), hexed.get("digest"), told.get("size"), told.get("took"), data,
                line.get("output"), told["event"] + self._offset,
            )  # fmt: skip
            if (flaw := record_flaw(record)) is not None:
                raise ValueError(flaw)
            if told["event"] <= 0:
                raise ValueError(f"its number is {told['event']}")
        self._check_digest(record)
        self._counts["events"] += 1
        *columns, seq = record
        return (seq, run, *columns)

    def _check_digest(self, record: Record) -> None:
        if record.output is None or not record.digest or record.size != len(record.output):
            return  # what has no digest of its own output: letters, states
        if codec.digest(record.output) != record.digest:
            raise self._reader.refused(
                f"the output of {record.path} was altered: its checksum does not match"
            )

    def _insert_events(self, rows: Sequence[tuple[Any, ...]]) -> None:
        marks = ", ".join("?" * len(_EVENT))
        try:
            self._conn.executemany(
                f"INSERT INTO dagresume_events({', '.join(_EVENT)}) VALUES ({marks})", rows
            )
        except (sqlite3.IntegrityError, OverflowError) as error:
            raise self._reader.refused(
                f"the events of run {self.row.run_id} are not in order ({error})"
            ) from None

    def _blob(self, line: Mapping[str, str]) -> None:
        with self._reader.reading("the big output"):
            name, text = json.loads(line["blob"]), line["text"]
        self._counts["blobs"] += 1
        if self._blobs.write(self.row.run_id, text) != name:
            raise self._reader.refused(f"the big output {name} was altered: its checksum does not match")

    def _once(self, run: int, line: Mapping[str, str]) -> None:
        with self._reader.reading("the call made once"):
            told = {name: json.loads(text) for name, text in line.items()}
            of = self.row.run_id if told["scope"] == "run" else self.row.workflow
            values = [
                scope_of(told["scope"], of), told["once"], run, told["path"], told["state"], told["result"],
                _micros(told["at"]),
            ]  # fmt: skip
        self._counts["once"] += 1
        self._conn.execute("INSERT OR IGNORE INTO dagresume_once VALUES (?, ?, ?, ?, ?, ?, ?)", values)

    def _log(self, run: int, line: Mapping[str, str]) -> None:
        with self._reader.reading("the logged line"):
            told = {name: json.loads(text) for name, text in line.items()}
            found = LogLine(told["path"], told["attempt"], _micros(told["at"]), told["level"], told["log"])
            if (flaw := line_flaw(found)) is not None:
                raise ValueError(flaw)
        self._counts["logs"] += 1
        sql = "INSERT INTO dagresume_logs(run, path, attempt, at, level, line) VALUES (?, ?, ?, ?, ?, ?)"
        self._conn.execute(sql, [run, *found])

    def _check_end(self, line: Mapping[str, str]) -> None:
        with self._reader.reading("the line that ends a run"):
            told = {name: json.loads(text) for name, text in line.items()}
            counted = {name: told[name] for name in ("end", *_COUNTED)}
        if counted != {"end": self.row.run_id} | {name: self._counts[name] for name in _COUNTED}:
            raise self._reader.refused(f"lines of run {self.row.run_id} are missing, or there are too many")

    def _cut_off(self, run: int) -> str:
        """Interrupt what was under way: nobody drives the copy."""
        if self.row.status != RunStatus.RUNNING:
            return self.row.status
        record = run_record(RUN_INTERRUPTED, SystemClock.now(), "owner_died", by="import")
        columns = projection(record) or {}
        self._conn.execute(
            "INSERT INTO dagresume_events(run, kind, at, reason, data) VALUES (?, ?, ?, ?, ?)",
            [run, record.kind, record.at, record.reason, record.data],
        )
        setters = ", ".join(f"{name} = ?" for name in columns)
        self._conn.execute(f"UPDATE dagresume_runs SET {setters} WHERE run = ?", [*columns.values(), run])
        self._counts["events"] += 1
        return RunStatus.INTERRUPTED.value


def _micros(text: str) -> int:
    return to_micros(datetime.fromisoformat(text))
