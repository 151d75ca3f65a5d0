"""Who holds a SQLite file: which processes read or write it just now, as far as the system tells (Linux)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["readers", "writers"]

_LOCKS: Final = Path("/proc/locks")
# https://www.sqlite.org/walformat.html: the locks of a log are bytes of the file `-shm`. A reader of the
# first mark has no need of the log, so that it does not keep it.
_WRITE_BYTE: Final = 120
_READ_BYTES: Final = range(124, 128)


class _Lock(NamedTuple):
    kind: str
    pid: int
    first: int
    last: int


def readers(path: str) -> list[str]:
    """Give the processes that are in the middle of reading, each as text; none if it cannot be told."""
    return _named(
        lock.pid
        for lock in _held(f"{path}-shm")
        if lock.kind == "READ" and lock.first < _READ_BYTES.stop and lock.last >= _READ_BYTES.start
    )


def writers(path: str) -> list[str]:
    """Give the processes that keep others from writing, each as text; none if it cannot be told."""
    log = (lock for lock in _held(f"{path}-shm") if lock.first <= _WRITE_BYTE <= lock.last)
    return _named(lock.pid for lock in (*log, *_held(path)) if lock.kind == "WRITE")


def _held(file: str) -> Iterator[_Lock]:
    try:
        found = os.stat(file)  # noqa: PTH116
        lines = _LOCKS.read_text().splitlines()
    except OSError:
        return
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    for line in lines:
        words = line.split()
        if len(words) == 8 and words[1] in {"POSIX", "OFDLCK"} and words[5] == place:
            last = 1 << 63 if words[7] == "EOF" else int(words[7])
            yield _Lock(words[3], int(words[4]), int(words[6]), last)


def _named(pids: Iterator[int]) -> list[str]:
    return [_name(pid) for pid in sorted(set(pids))]


def _name(pid: int) -> str:
    if pid <= 0:
        return "a process that cannot be seen from here (of another container)"
    if pid == os.getpid():
        return f"this process ({pid})"
    try:
        return f"process {pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})"
    except OSError:
        return f"process {pid}"
