"""The values that a database holds and the files beside it: all there, unaltered, and nothing left over."""

from __future__ import annotations

import json
import os
import re
import shlex
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from dagresume import codec
from dagresume.blobs import BlobLost, BlobStore
from dagresume.context import artifacts_of
from dagresume.findings import Finding, in_bytes, note, problem, size_of
from dagresume.peek import Peek
from dagresume.store import SYSTEM_CLOCK, Holder
from dagresume.writer import holder

__all__ = ["Reference", "blobs_of", "leftovers", "outputs", "owners_of", "references", "referred"]

_PAGE: Final = 200
_NAMED: Final = re.compile(r"[0-9a-f]{64}")


class Reference(NamedTuple):
    """A record that says where a stored value is: a blob's name, or the seq of another record."""

    seq: int
    run_id: str
    path: str | None
    blob: str | None
    other: int | None


def _named_in(data: str | None) -> tuple[set[str], int | None]:
    """Give the blobs that a record's data name, wherever in it, and the record that holds its output."""
    if data is None or '"' not in data:
        return set(), None
    facts = json.loads(data)
    found: set[str] = set()
    todo: list[Any] = [facts]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            names = (value[word] for word in ("blob", "inputs_blob") if isinstance(value.get(word), str))
            found.update(name for name in names if _NAMED.fullmatch(name))
            todo += value.values()
        elif isinstance(value, list):
            todo += value
    seq = facts.get("seq") if isinstance(facts, dict) else None
    return found, seq if isinstance(seq, int) else None


def references(conn: sqlite3.Connection) -> Iterator[Reference]:
    """Give every record that names a blob or another record's output, in short reads."""
    which = "(e.data LIKE '%blob\"%' OR e.data LIKE '%\"seq\"%')"
    for seq, run_id, path, data in _paged(conn, "e.data", which):
        blobs, other = _named_in(data)
        for blob in sorted(blobs):
            yield Reference(seq, run_id, path, blob, None)
        if other is not None:
            yield Reference(seq, run_id, path, None, other)


def _paged(conn: sqlite3.Connection, columns: str, which: str) -> Iterator[tuple[Any, ...]]:
    """Give (seq, run id, path, columns …) of records, a page at a time: no reader holds up the log."""
    after = 0
    sql = (
        f"SELECT e.seq, r.run_id, e.path, {columns} FROM dagresume_events AS e"
        f" JOIN dagresume_runs AS r ON r.run = e.run WHERE e.seq > ? AND {which} ORDER BY e.seq LIMIT {_PAGE}"
    )
    while page := conn.execute(sql, [after]).fetchall():
        yield from page
        after = page[-1][0]


def outputs(looked: Peek) -> Iterator[Finding]:
    """What is wrong with the outputs that stand in the records themselves."""
    elsewhere = "(e.data LIKE '%blob\"%' OR e.data LIKE '%\"seq\"%')"
    which = f"e.digest IS NOT NULL AND e.size IS NOT NULL AND {elsewhere} IS NOT TRUE"
    for seq, run_id, path, digest, output in _paged(looked.conn, "e.digest, e.output", which):
        if output is None:
            told = f"the stored output of {path} is missing"
        elif not isinstance(output, str) or codec.digest(output) != digest:
            told = f"the stored output of {path} was altered: its checksum does not match"
        else:
            continue
        yield _of_path(looked.conn, "output", seq, run_id, path, told)


def referred(looked: Peek) -> Iterator[Finding]:
    """What is wrong with the values that records say are elsewhere: in blobs, or in other records."""
    blobs = blobs_of(looked.path)
    known: dict[tuple[str, str], str] = {}
    for seq, run_id, path, blob, other in references(looked.conn):
        if other is not None and not _has_output(looked.conn, other):
            told = f"the output of {path} is that of event {other}, which has none"
            yield _of_path(looked.conn, "output", seq, run_id, path, told)
        if blob is None:
            continue
        if (run_id, blob) not in known:
            known[run_id, blob] = _lost(blobs, run_id, blob)
        if known[run_id, blob]:
            what = f"the stored output of {path}" if path else "the value"
            told = f"{what} {known[run_id, blob]}"
            yield _of_path(looked.conn, "blob", seq, run_id, path, told)


def _lost(blobs: BlobStore, run_id: str, name: str) -> str:
    try:
        blobs.read(run_id, name)
    except BlobLost as error:
        return str(error)
    return ""


def _has_output(conn: sqlite3.Connection, seq: int) -> bool:
    sql = "SELECT output IS NOT NULL OR data LIKE '%blob\"%' FROM dagresume_events WHERE seq = ?"
    row = conn.execute(sql, [seq]).fetchone()
    return bool(row and row[0])


def _of_path(
    conn: sqlite3.Connection, kind: str, seq: int, run_id: str, path: str | None, told: str
) -> Finding:
    """Make the finding of a value that is gone: a problem if it is what the path stands for now."""
    where = f"run {run_id}"
    if path is None:
        again = f"Begin anew with the inputs given again: `dagresume fork {run_id}` with --input"
        return problem(kind, where, f"{told}.", again)
    later = "SELECT 1 FROM dagresume_events WHERE run = (SELECT run FROM dagresume_events WHERE seq = ?)"
    later += " AND path = ? AND seq > ? AND status IS NOT NULL LIMIT 1"
    if conn.execute(later, [seq, path, seq]).fetchone():
        return note(kind, where, f"{told}; only the history of the run needs it.")
    command = f"`dagresume retry {run_id} --from {shlex.quote(path)}`"
    return problem(kind, where, f"{told}.", f"Make it again: {command}")


def blobs_of(path: str | os.PathLike[str]) -> BlobStore:
    """Give the blobs of a database file."""
    return BlobStore(f"{os.fspath(path)}.blobs")


def leftovers(looked: Peek) -> Iterator[Finding]:
    """Give the files beside the database that nothing in it names, of runs that nobody drives."""
    conn, blobs = looked.conn, blobs_of(looked.path)
    owners = owners_of(conn)
    alive = any(who.alive for who in owners.values())
    runs = dict(conn.execute("SELECT run_id, owner FROM dagresume_runs"))
    folders = {blobs.of(run_id).name: run_id for run_id in runs}
    named = {(one.run_id, one.blob) for one in references(conn) if one.blob is not None}
    for folder in _entries(blobs.folder):
        run_id = folders.get(folder.name)
        # A run that is just beginning has its files before it has a row.
        if owners[runs[run_id]].alive if run_id and runs[run_id] in owners else alive and run_id is None:
            continue
        left = [file for file in _entries(folder) if (run_id, file.name) not in named]
        if left:
            yield _leftover(folder, left, run_id)
    yield from _left_artifacts(looked, runs, alive)


def _left_artifacts(looked: Peek, runs: Mapping[str, int | None], alive: bool) -> Iterator[Finding]:
    root = f"{looked.path}.artifacts"
    folders = {artifacts_of(root, run_id, "").parent.name for run_id in runs}
    for folder in _entries(Path(root)):
        if folder.name not in folders and not alive:
            yield note(
                "orphan",
                str(folder),
                "artifacts of a run that is not in the database.",
                f"rm -r {_quoted(folder)}",
            )


def _leftover(folder: Path, left: list[Path], run_id: str | None) -> Finding:
    size = sum(size_of(file) for file in left)
    drafts = sum(file.name.startswith(".") for file in left)
    what = f"{len(left)} file{'s'[: len(left) > 1]} ({in_bytes(size)}) that no event names"
    if drafts:
        what += f", {drafts} of them half written"
    if run_id is None:
        return note(
            "orphan",
            str(folder),
            f"{what}: of a run that is not in the database.",
            f"rm -r {_quoted(folder)}",
        )
    files = " ".join(map(_quoted, left[:5])) + (" …" if len(left) > 5 else "")
    return note("orphan", str(folder), f"{what}.", f"They only cost space: rm {files}")


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def owners_of(conn: sqlite3.Connection) -> dict[int, Holder]:
    """Give who the owners of runs are, by session."""
    owners = [n for (n,) in conn.execute("SELECT DISTINCT owner FROM dagresume_runs WHERE owner IS NOT NULL")]
    return {n: who for n in owners if (who := holder(conn, n, SYSTEM_CLOCK)) is not None}


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
