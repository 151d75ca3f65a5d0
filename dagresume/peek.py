"""Opens a database file to look at it: reads what is in it, its log too, and makes, changes and removes no
file.

SQLite's own read-only mode does not promise that. It makes the two files of a write-ahead log where they are
missing (and fails where it may not), and it deletes the log beside a file of 0 bytes. So, by what is there:

- the log and its index (`-wal`, `-shm`): somebody may have the file open. Read-only with SQLite's locks; the
  index, a mere cache in shared memory, may be put in order.
- a log without its index (a copy, or a system that was switched off): nobody has the file open. The index is
  kept in our own memory and no lock is taken.
- such a log of which nothing can be read: SQLite would delete it. It is left out, as SQLite would leave it.
- no log, or an empty one: all there is stands in the file, which is read as one that nobody changes.

In the last two, whoever begins to write meanwhile would be overlooked: `Peek.moved` says so, and one looks
again.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dagresume.frames import look

__all__ = ["Peek", "peek"]

_TIMEOUT: Final = 5.0
Facts = tuple[tuple[int, int, int] | None, ...]


class Peek:
    """A file that is being looked at by `conn`."""

    def __init__(self, path: str, conn: sqlite3.Connection, before: Facts, *, locked: bool) -> None:
        self.path, self.conn = path, conn
        self._before, self._locked = before, locked

    @property
    def moved(self) -> bool:
        """Whether somebody may have written since, unseen by us: look again then."""
        return not self._locked and _facts(self.path) != self._before


@contextlib.contextmanager
def peek(path: str | os.PathLike[str]) -> Iterator[Peek]:
    """Open an existing file of more than 0 bytes to look at it. Raises sqlite3.Error if it is no database."""
    place = os.path.abspath(path)  # noqa: PTH100  # Path.absolute() keeps `..`
    before = _facts(place)
    log, index = before[1], before[2]
    locked = log is not None and index is not None
    if locked:
        options = "mode=ro"
    elif log is not None and log[1] and (held := look(place, until_commit=True)) and held.commits:
        options = "mode=ro" if os.name == "nt" else "mode=ro&vfs=unix-none"
    else:
        options = "mode=ro&immutable=1"
    uri = f"{Path(place).as_uri()}?{options}"
    conn = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_TIMEOUT, check_same_thread=False)
    with contextlib.closing(conn):
        if not locked:
            conn.execute("PRAGMA locking_mode = EXCLUSIVE")  # so that no file is made for the log's index
        conn.execute("PRAGMA query_only = 1")
        yield Peek(place, conn, before, locked=locked)


def _facts(path: str) -> Facts:
    """Give what would differ if somebody had written."""
    found: list[tuple[int, int, int] | None] = []
    for name in (path, f"{path}-wal", f"{path}-shm"):
        try:
            stat = Path(name).stat()
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        except OSError:
            found.append(None)
    return tuple(found)
