"""What an engine does to its disk, seen from outside: calls that wait for it, and its database's head.

Nothing here asks the engine. Which files are synchronised is read from strace's record (`strace -f -y`), the
journal mode and the number of commits from the header of the SQLite file (https://sqlite.org/fileformat.html).
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

WAIT = re.compile(r"\b(?:fsync|fdatasync)\(\d+<([^>]*)>")
MAGIC = b"SQLite format 3\x00"
WAL = 2  # the "file format write version" of a database that has a write-ahead log


@dataclass(frozen=True)
class Seen:
    """What one run has done: calls of fsync and fdatasync by kind of file, and the database's header."""

    waits: Mapping[str, int]
    wal: bool | None  # None: no SQLite file
    changes: int = 0  # SQLite's change counter: transactions, unless there is a write-ahead log


def waits(record: str) -> Counter[str]:
    """Count the calls in strace's record by the kind of file; one that was interrupted is told once."""
    return Counter(_kind(file) for file in WAIT.findall(record))


def _kind(file: str) -> str:
    for ending in ("-wal", "-journal", ".db"):
        if file.endswith(ending):
            return ending
    return "other"


def seen(record: str, folder: Path) -> Seen:
    """Give what a run has done whose record is `record` and whose files are in `folder`."""
    found = waits(record)
    for file in sorted(folder.glob("*.db")):
        head = file.read_bytes()[:100]
        if head.startswith(MAGIC):
            return Seen(found, head[18] == WAL, int.from_bytes(head[24:28], "big"))
    return Seen(found, None)


@dataclass(frozen=True)
class PerStep:
    """What a step costs the disk: the difference of a long run and a short one, so that no start is in it."""

    waits: Mapping[str, float]
    wal: bool | None
    commits: float | None  # with a write-ahead log: those that waited for the disk

    @classmethod
    def between(cls, short: Seen, long: Seen, steps: int) -> "PerStep":
        """`steps`: how many more the long run has."""
        kinds = sorted(short.waits.keys() | long.waits.keys())
        each = {kind: (long.waits.get(kind, 0) - short.waits.get(kind, 0)) / steps for kind in kinds}
        if long.wal is None:
            commits = None
        else:
            commits = each.get("-wal", 0.0) if long.wal else (long.changes - short.changes) / steps
        return cls(each, long.wal, commits)

    @property
    def total(self) -> float:
        return sum(self.waits.values())

    @property
    def synchronous(self) -> str:
        """Name the setting that was seen: at each commit FULL waits for the log, or for the journal twice."""
        if self.wal:
            return "FULL" if self.waits.get("-wal", 0.0) >= 0.5 else "NORMAL or OFF"
        for setting, times in (("FULL", 1.5), ("NORMAL", 0.5)):
            if self.commits and self.waits.get("-journal", 0.0) / self.commits >= times:
                return setting
        return "OFF"

    def __str__(self) -> str:
        counted = f"{self.total:.2f} fsyncs a step"
        if self.commits is None:
            return f"no SQLite of its own, {counted}"
        journal = "WAL" if self.wal else "rollback journal"
        return f"{journal}, synchronous={self.synchronous}, {self.commits:.2f} commits and {counted}"
