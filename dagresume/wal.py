"""Keeps the write-ahead log short: overwriting a small one is 1.3 to 1.8 times faster than growing a big one.

A checkpoint beside a busy writer never catches up with it, so that the log would grow for ever. Therefore
in two steps: a thread copies the bulk back while the writer goes on, then the writer copies the small rest
between two of its transactions; the next one starts the log over. A reader that stays in one transaction
keeps it from that; then the log grows, and a warning says who it is.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from pathlib import Path
from typing import Final

from dagresume.locks import readers
from dagresume.observe import log

__all__ = ["SIZE_LIMIT", "Wal", "uri"]

_PAGE: Final = 4096
_EXTENT: Final = 4 << 20
_STEP: Final = 1 << 20
"""By how much the file is made longer at once: what a short run does not need it does not pay for."""
_AHEAD: Final = 32
"""Frames before its end at which it is made longer; a log that never gets so long is left alone."""
SIZE_LIMIT: Final = 2 * _EXTENT
"""What the file is cut to when the log starts over: more than its usual size, or it would grow each time."""
_BULK: Final = 800
_TOO_FAR: Final = 3 * _BULK
"""Frames after which the writer waits for the copying, which a writer that is never still may hold up."""
_TOO_LONG: Final = (32 << 20) // _PAGE
_WARN: Final = (48 << 20) // _PAGE
"""Frames from which on it is said that the log cannot start over."""
_ROW: Final = 200
"""Bytes that a record and its index entries fill, without its output."""


def uri(path: str) -> str:
    """Give the URI that opens this file and never makes it."""
    return f"{Path(path).as_uri()}?mode=rw"


class Wal:
    """The write-ahead log of one file, as its writer looks after it.

    How many frames (pages) are in it is estimated; what a checkpoint says corrects the next estimate.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._frames = 0.0
        self._left = 0
        self._scale = 1.0
        self._too_long = _TOO_LONG
        self._reach = 0  # frames the file has room for, as far as we know
        self._said: set[str] = set()
        self._copier: threading.Thread | None = None

    def note(self, commits: int, rows: int, size: int) -> None:
        """Note that `commits` transactions wrote `rows` records with `size` bytes of output."""
        self._frames += (3 * commits + (rows * _ROW + size) / _PAGE) * self._scale

    @property
    def needs_care(self) -> bool:
        """Whether there is something to do that takes longer than a transaction."""
        if self._frames < _BULK:
            return self._ends_soon
        copier = self._copier
        return copier is None or self._frames >= _TOO_FAR or not copier.is_alive()

    @property
    def _ends_soon(self) -> bool:
        return self._frames >= max(_AHEAD, self._reach - _AHEAD) and self._reach * _PAGE < _EXTENT

    def tend(self, conn: sqlite3.Connection) -> None:
        """Do what the log needs by now."""
        if self._ends_soon:
            self._extend(conn)
        if self._frames < _BULK:
            return
        if self._copier is None:
            self._copier = threading.Thread(target=self._copy, name="dagresume-checkpoint", daemon=True)
            self._copier.start()
        elif self._frames >= _TOO_FAR or not self._copier.is_alive():
            self._copier.join()
            self._copier = None
            self._finish(conn)

    def close(self, conn: sqlite3.Connection) -> None:
        """Copy everything back and empty the log, unless somebody else uses it just now."""
        if self._copier is not None:
            self._copier.join()
        try:
            conn.execute("PRAGMA busy_timeout = 500")
            conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.Error as error:
            self._warn_of(error)

    def _extend(self, conn: sqlite3.Connection) -> None:
        """Make the file longer, up to what it usually gets: a transaction too big for the cache, undone."""
        self._reach = int(self._frames) + _STEP // _PAGE
        with contextlib.suppress(OSError):
            there = Path(f"{self._path}-wal").stat().st_size // _PAGE
            if there >= self._reach:
                self._reach = there
                return
        cache = conn.execute("PRAGMA cache_size").fetchone()[0]
        with contextlib.suppress(sqlite3.Error):
            conn.execute("PRAGMA cache_size = 16")
            conn.execute("BEGIN IMMEDIATE")
            conn.execute("INSERT INTO dagresume_meta VALUES ('extent', zeroblob(?))", [_STEP])
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        conn.execute(f"PRAGMA cache_size = {cache}")

    def _copy(self) -> None:
        # On any error the writer's own turn copies it all; there is nobody here to tell.
        with contextlib.suppress(sqlite3.Error):
            conn = sqlite3.connect(uri(self._path), uri=True, isolation_level=None)
            with contextlib.closing(conn):
                conn.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    def _finish(self, conn: sqlite3.Connection) -> None:
        try:
            _, length, copied = conn.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except sqlite3.Error as error:
            self._frames = 0.0  # tried again after as many frames more, not at each commit
            self._warn_of(error)
            return
        self._said.discard("copied")
        written = length - self._left if length > self._left else length
        self._scale = min(max(self._scale * written / self._frames, 0.25), 25.0)
        self._left = length if copied < length else 0
        self._frames = 0.0
        if length >= self._too_long:
            self._restart(conn, length)

    def _restart(self, conn: sqlite3.Connection, length: int) -> None:
        """Wait a little for the readers that keep the log from starting over; more seldom if they stay."""
        timeout = conn.execute("PRAGMA busy_timeout").fetchone()[0]
        conn.execute("PRAGMA busy_timeout = 60")
        try:
            # Often and not long: SQLite may wait for a place that new readers share for ever, where a fresh
            # look would find that it need not.
            tries = (conn.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()[0] for _ in range(4))
            done = any(not stuck for stuck in tries)
        finally:
            conn.execute(f"PRAGMA busy_timeout = {timeout}")
        self._too_long = _TOO_LONG if done else 5 * length // 4
        if done:
            self._said.discard("over")
        elif length >= _WARN:
            self._warn_of_readers(length)

    def _warn_of_readers(self, length: int) -> None:
        if self._is_news("over"):
            who = ", ".join(readers(self._path)) or "some process"
            log.warning(
                "the write-ahead log grows: it cannot start over while a transaction reads what is in it",
                file=f"{self._path}-wal",
                size=f"{length * _PAGE >> 20} MiB",
                reader=who,
                advice="end that transaction, or the process; the log starts over by itself then",
            )

    def _warn_of(self, error: sqlite3.Error) -> None:
        if self._is_news("copied"):
            log.warning(
                "the write-ahead log cannot be copied back into the database; what is in it is safe there",
                file=f"{self._path}-wal",
                why=str(error),
                advice="look at the disk and its free space; it is tried again by itself",
            )

    def _is_news(self, what: str) -> bool:
        known = what in self._said
        self._said.add(what)
        return not known
