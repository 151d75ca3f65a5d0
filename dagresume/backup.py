"""Copies a database with its files while it is in use.

    from dagresume.backup import backup

    made = backup("runs.db", "/media/disk/runs.db")

The copy is what a process would find that starts after all others have died at one moment: every checkpoint
that was durable then, with its files; what was running is interrupted, and `resume` goes on with it. The
processes that drive the originals are not its owners, and nothing in it runs by itself. Open it only where
the originals are gone: else two would do the same work.

The database is copied in one step inside one read transaction: writers are not held up, and however much they
write meanwhile, it comes to its end. Files are durable before the event that names them and never change, so
they are copied afterwards; a run that was pruned in between is left out of the copy.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dagresume import schema
from dagresume.blobs import BlobStore, sync_folder
from dagresume.clock import SystemClock
from dagresume.context import artifacts_of
from dagresume.doctor import examine, outside
from dagresume.errors import BackupRefused, StoreError
from dagresume.events import RUN_INTERRUPTED, RunStatus, projection, run_record
from dagresume.findings import Finding, Severity
from dagresume.inventory import Reference, blobs_of, references
from dagresume.peek import Peek, peek

__all__ = ["Backup", "backup"]

_TRIES: Final = 5
_OF_A_RUN: Final = ("dagresume_logs", "dagresume_once", "dagresume_runs")
_SPOILT: Final = frozenset({"database", "file", "integrity", "locked"})
"""What makes a copy worthless, so that it takes the place of no other."""
_LACKING: Final = frozenset({"blob", "output", "projection", "schema"})
"""What is wrong with a true copy because it is so in the source."""


@dataclass(frozen=True, slots=True)
class Backup:
    """A copy that is complete, verified and durable: where it is, its size with all files in bytes, how many
    runs and files beside the database it has. `interrupted`: the runs that were under way. `findings`: what
    is wrong with the copy because it is so in the source.
    """

    path: str
    size: int
    runs: int
    files: int
    interrupted: tuple[str, ...]
    findings: tuple[Finding, ...] = ()


def backup(source: str | os.PathLike[str], dest: str | os.PathLike[str], *, force: bool = False) -> Backup:
    """Copy a database, its blobs and its artifacts to `dest`, whoever writes to it meanwhile.

    The copy appears under its name when it is complete, verified and durable; before that only drafts beside
    it are made, which an error removes. `force`: an earlier copy there is replaced.

    Raises BackupRefused where there can be no copy, StoreError for a source that is no sound database of
    ours.
    """
    place, target = Path(os.path.abspath(source)), Path(os.path.abspath(dest))  # noqa: PTH100  # keeps `..`
    _refuse(place, target, force=force)
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.draft")
    try:
        with _explained(target):
            draft.mkdir(mode=0o700)
            made = _drafted(place, draft / "copy", target)
            _put_in_place(draft / "copy", target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return made


# -- what is refused ------------------------------------------------------------------------------------


def _refuse(place: Path, target: Path, *, force: bool) -> None:
    wrong = [finding for finding in outside(str(place)) if finding.kind == "file"]
    if wrong:
        raise BackupRefused(str(wrong[0]))
    if target.exists() and target.samefile(place):
        raise BackupRefused(f"{target} is the database itself. Name another file for the copy.")
    if not target.parent.is_dir():
        raise BackupRefused(f"there is no folder {target.parent}. Make it first, or name another file.")
    real = Path(os.path.realpath(target))
    for own in (f"{place}.blobs", f"{place}.artifacts"):
        if real.is_relative_to(os.path.realpath(own)):
            raise BackupRefused(f"{target} lies inside {own}, which is copied itself. Name another place.")
    for there in (target, _beside(target, "blobs"), _beside(target, "artifacts")):
        _refuse_what_is_there(there, target, force=force)


def _refuse_what_is_there(there: Path, target: Path, *, force: bool) -> None:
    if not os.path.lexists(there):
        return
    if there == target and (there.is_symlink() or not there.is_file()):
        raise BackupRefused(f"{there} is there and is no plain file. Name another file for the copy.")
    if not force:
        raise BackupRefused(f"{there} is there already. --force (force=True) replaces it.")
    if there != target and (there.is_symlink() or not there.is_dir()):
        raise BackupRefused(f"{there} is there and is no folder. Name another file for the copy.")


@contextlib.contextmanager
def _explained(target: Path) -> Iterator[None]:
    """Give an error of the system as one of ours that names the place."""
    try:
        yield
    except sqlite3.Error as error:
        raise schema.explained(str(target), error) from error
    except OSError as error:
        told = f"{error.filename or target}: {error.strerror or error}"
        raise StoreError(
            f"no copy was made: {told}. Name a place with room that you may write to."
        ) from error


# -- the draft ------------------------------------------------------------------------------------------


def _drafted(place: Path, draft: Path, target: Path) -> Backup:
    _copy_database(place, draft)
    with contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as conn:
        conn.execute("PRAGMA journal_mode = DELETE").fetchone()  # one file, which can be read anywhere
        if not schema.examine(conn, str(place), adopt=False):
            raise StoreError(f"{place} holds no runs yet: there is nothing to copy.")
        interrupted = _end_sessions(conn)
        _copy_files(place, draft, conn)
        runs = conn.execute("SELECT count(*) FROM dagresume_runs").fetchone()[0]
    findings = _verified(draft, target)
    _sync_all(draft.parent)
    files = [file for file in draft.parent.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    return Backup(str(target), size, runs, len(files) - 1, interrupted, findings)


def _copy_database(place: Path, draft: Path) -> None:
    for _ in range(_TRIES):
        _make_empty(draft)
        with _source(place) as looked:
            with contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as conn:
                looked.conn.backup(conn, pages=-1)
            if not looked.moved:
                return
    raise StoreError(
        f"{place} is opened and closed by others all the time: it could not be copied. Try again."
    )


@contextlib.contextmanager
def _source(place: Path) -> Iterator[Peek]:
    try:
        with peek(place) as looked:
            schema.examine(looked.conn, str(place), adopt=False)
            yield looked
    except sqlite3.Error as error:
        raise schema.explained(str(place), error) from error


def _make_empty(draft: Path) -> None:
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))


def _end_sessions(conn: sqlite3.Connection) -> tuple[str, ...]:
    """Have no session of the original own anything in the copy; gives the runs that were under way.

    A run that was running is interrupted, as by a sweep after the death of its process. One that was being
    rolled back stays so: what is left of it is to be undone.
    """
    now = SystemClock.now()
    conn.execute("BEGIN")
    conn.execute("UPDATE dagresume_sessions SET ended_at = ? WHERE ended_at IS NULL", [now])
    live = "SELECT run, run_id, status FROM dagresume_runs WHERE status IN ('running', 'rolling_back')"
    found = conn.execute(f"{live} ORDER BY run").fetchall()
    record = run_record(RUN_INTERRUPTED, now, "owner_died", by="backup")
    values = (record.kind, record.at, record.reason, record.data)
    columns = projection(record) or {}
    setters = ", ".join(f"{name} = ?" for name in columns)
    for run in (run for run, _, status in found if status == RunStatus.RUNNING):
        conn.execute(
            "INSERT INTO dagresume_events(run, kind, at, reason, data) VALUES (?, ?, ?, ?, ?)", [run, *values]
        )
        conn.execute(f"UPDATE dagresume_runs SET {setters} WHERE run = ?", [*columns.values(), run])
    conn.execute("COMMIT")
    return tuple(run_id for _, run_id, _ in found)


def _copy_files(place: Path, draft: Path, conn: sqlite3.Connection) -> None:
    blobs, copies = blobs_of(place), blobs_of(draft)
    lacking = {
        found.run_id
        for found in references(conn)
        if found.blob is not None and not _copy_blob(blobs, copies, found)
    }
    for run_id in _pruned(place, lacking):
        _leave_out(conn, run_id)
        copies.remove_run(run_id)
    for (run_id,) in conn.execute("SELECT run_id FROM dagresume_runs").fetchall():
        _copy_artifacts(place, draft, run_id)


def _copy_blob(blobs: BlobStore, copies: BlobStore, found: Reference) -> bool:
    """Copy one file; False if it is not there."""
    assert found.blob is not None
    copy = copies.of(found.run_id) / found.blob
    if copy.exists():
        return True
    copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        _copy_file(blobs.of(found.run_id) / found.blob, copy)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _copy_file(source: Path, copy: Path) -> None:
    shutil.copyfile(source, copy, follow_symlinks=False)
    if not copy.is_symlink():
        copy.chmod(0o600 | stat.S_IMODE(source.stat().st_mode) & 0o100)


def _pruned(place: Path, run_ids: set[str]) -> set[str]:
    """Give those of these runs that are not in the source any more: their rows go before their files."""
    if not run_ids:
        return set()
    with _source(place) as looked:
        found = looked.conn.execute("SELECT run_id FROM dagresume_runs")
        return run_ids - {run_id for (run_id,) in found}


def _leave_out(conn: sqlite3.Connection, run_id: str) -> None:
    """Take a run out of the copy that was pruned while it was copied."""
    (run,) = conn.execute("SELECT run FROM dagresume_runs WHERE run_id = ?", [run_id]).fetchone()
    conn.execute("BEGIN")
    last = "(SELECT max(seq) FROM dagresume_events)"  # stays, so that no seq is given twice
    conn.execute(f"DELETE FROM dagresume_events WHERE run = ? AND seq < {last}", [run])
    for table in _OF_A_RUN:
        conn.execute(f"DELETE FROM {table} WHERE run = ?", [run])
    conn.execute("COMMIT")


def _copy_artifacts(place: Path, draft: Path, run_id: str) -> None:
    """Copy what the nodes of a run put aside. A file that is being written is copied as it is just then."""
    root = artifacts_of(f"{place}.artifacts", run_id, "").parent
    copy = artifacts_of(f"{draft}.artifacts", run_id, "").parent
    for folder, _, names in os.walk(root):
        here = copy / Path(folder).relative_to(root)
        here.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # its node has removed it
                _copy_file(Path(folder, name), here / name)


def _verified(draft: Path, target: Path) -> tuple[Finding, ...]:
    """Examine the copy; StoreError if it is damaged, give what is wrong with it as it is with its source."""
    found = [finding for finding in examine(draft) if finding.severity is Severity.PROBLEM]
    for finding in found:
        if finding.kind in _SPOILT:
            raise StoreError(
                f"no copy was made at {target}: the database is damaged. {finding.text} `dagresume doctor`"
                " says more."
            )
    return tuple(finding for finding in found if finding.kind in _LACKING)


# -- putting it in place --------------------------------------------------------------------------------


def _put_in_place(draft: Path, target: Path) -> None:
    """Give the draft its name: its files first, so that at every moment what is there has all of them."""
    if target.exists():
        _let_go(target)
    others = []
    for kind in ("blobs", "artifacts"):
        old, new = _beside(target, kind), _beside(draft, kind)
        mine = set(_files(new))
        others += [old / name for name in _files(old) if name not in mine]
        _move(new, old)
    draft.replace(target)
    sync_folder(target.parent)
    for file in others:  # of an earlier copy
        file.unlink(missing_ok=True)
        for folder in list(file.parents)[:2]:
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()


def _let_go(target: Path) -> None:
    """Make an earlier copy one file again; BackupRefused if somebody has it open."""
    log, index = Path(f"{target}-wal"), Path(f"{target}-shm")
    if log.exists() or index.exists():
        with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(target)) as conn:
            conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if log.exists() or index.exists():
        raise BackupRefused(f"{target} is open in another process. End it, or name another file.")


def _beside(target: Path, kind: str) -> Path:
    return target.with_name(f"{target.name}.{kind}")


def _files(folder: Path) -> list[Path]:
    """Give all files below a folder, relative to it."""
    found = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    return [file.relative_to(folder) for file in found]


def _move(source: Path, folder: Path) -> None:
    """Move everything below one folder into another one, whose files of the same names it replaces."""
    if not source.exists():
        return
    for place, _, names in os.walk(source):
        there = folder / Path(place).relative_to(source)
        there.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in names:
            Path(place, name).replace(there / name)
        sync_folder(there)


def _sync_all(folder: Path) -> None:
    for place, _, names in os.walk(folder):
        for name in names:
            if not Path(place, name).is_symlink():
                _sync(Path(place, name))
        sync_folder(Path(place))


def _sync(file: Path) -> None:
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())
