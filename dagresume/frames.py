"""What a write-ahead log of SQLite holds, read without SQLite: how far it is whole, and what lies behind.

The format is that of https://www.sqlite.org/fileformat2.html#walformat: a header, then frames of one page
each, every checksum going on from the one before. SQLite reads up to the last whole transaction before the
first frame that does not fit, and takes the rest for what is left of an older log.
"""

from __future__ import annotations

import os
import struct
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

__all__ = ["Log", "look"]

_HEADER: Final = struct.Struct(">8I")
_FRAME: Final = struct.Struct(">6I")
_MAGIC: Final = {0x377F0682: "little", 0x377F0683: "big"}
_MASK: Final = 0xFFFFFFFF


class Log(NamedTuple):
    """How much of a log is read, and what of it is not: frames and whole transactions of either.

    `sound` False: its header is damaged, so nothing of it is read.
    """

    sound: bool
    commits: int = 0
    frames: int = 0
    lost_frames: int = 0
    lost_commits: int = 0


def look(path: str | os.PathLike[str], *, until_commit: bool = False) -> Log | None:
    """Give what the log beside this database holds; None if there is none. `until_commit`: the first whole
    transaction is enough.
    """
    try:
        with Path(f"{os.fspath(path)}-wal").open("rb") as file:
            return _look(file, until_commit)
    except OSError:
        return None


def _look(file: BinaryIO, until_commit: bool) -> Log | None:
    head = file.read(_HEADER.size)
    if not head.strip(b"\0"):
        return None
    if len(head) < _HEADER.size:
        return Log(False)
    magic, _, size, _, *salts, first, second = _HEADER.unpack(head)
    order = _MAGIC.get(magic)
    if order is None or _sum(head[:24], order, (0, 0)) != (first, second):
        return Log(False, lost_frames=max(0, os.fstat(file.fileno()).st_size // 4096))
    state = (first, second)
    read, commits, whole, lost, lost_commits, fits = 0, 0, 0, 0, 0, True
    for header, page in _frames(file, size):
        _, truncated, *told = _FRAME.unpack(header)
        if told[:2] != salts:
            break  # what an older log has left
        if fits:
            state = _sum(page, order, _sum(header[:8], order, state))
            fits = state == (told[2], told[3])
        if fits:
            read += 1
            commits += truncated > 0
            whole = read if truncated else whole
        else:
            lost += 1
            lost_commits += truncated > 0
        if commits and until_commit:
            break
    return Log(True, commits, whole, lost, lost_commits)


def _frames(file: BinaryIO, size: int) -> Iterator[tuple[bytes, bytes]]:
    while True:
        frame = file.read(_FRAME.size + size)
        if len(frame) < _FRAME.size + size:
            return
        yield frame[: _FRAME.size], frame[_FRAME.size :]


def _sum(content: bytes, order: str, state: tuple[int, int]) -> tuple[int, int]:
    words = array("I", content)
    if order != sys.byteorder:
        words.byteswap()
    first, second = state
    for k in range(0, len(words), 2):
        first = (first + words[k] + second) & _MASK
        second = (second + words[k + 1] + first) & _MASK
    return first, second
