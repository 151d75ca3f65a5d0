"""Who holds a SQLite file: which processes read or write it just now, as far as the system tells (Linux)."""

from __future__ import annotations

from typing import Final

from dagresume.places import lock_holders

__all__ = ["readers", "writers"]

# https://www.sqlite.org/walformat.html: the locks of a log are bytes of the file `-shm`. A reader of the
# first mark has no need of the log, so that it does not keep it.
_WRITE_BYTE: Final = 120
_READ_BYTES: Final = (124, 127)
_ALL: Final = (0, 1 << 63)


def readers(path: str) -> list[str]:
    """Give the processes that are in the middle of reading, each as text; none if it cannot be told."""
    return [str(who) for who, writes in lock_holders(f"{path}-shm", *_READ_BYTES) if not writes]


def writers(path: str) -> list[str]:
    """Give the processes that keep others from writing, each as text; none if it cannot be told."""
    found = [*lock_holders(f"{path}-shm", _WRITE_BYTE, _WRITE_BYTE), *lock_holders(path, *_ALL)]
    return list(dict.fromkeys(str(who) for who, writes in found if writes))
