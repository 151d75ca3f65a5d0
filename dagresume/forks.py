"""What a process that was forked from one with open files inherits, and must leave alone.

SQLite counts in each process which of its files are locked, and a fork copies the counts, not the locks: a
child that opens a file of its parent's anew takes it for locked, and what it commits is lost when the parent
closes. And an event loop shares its selector (epoll) with its copy in the child: where that is closed, as
`sys.exit` in a body does, the parent is no longer woken by its threads.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import weakref
from collections import Counter
from typing import Final

__all__ = ["closed", "is_inherited", "opened"]

File = tuple[int, int]
_opened: Final[Counter[File]] = Counter()
_inherited: Final[set[File]] = set()
_loops: Final[weakref.WeakSet[asyncio.AbstractEventLoop]] = weakref.WeakSet()


def opened(path: str, loop: asyncio.AbstractEventLoop) -> File | None:
    """Note that this process works on a file, on this loop; gives what `closed` wants to be given."""
    _loops.add(loop)
    file = _file(path)
    if file is not None:
        _opened[file] += 1
    return file


def closed(file: File | None) -> None:
    """Note that the file was let go of."""
    if file is not None:
        _opened[file] -= 1


def is_inherited(path: str) -> bool:
    """Say whether this file was open in the process from which this one was forked."""
    return bool(_inherited) and _file(path) in _inherited


def _file(path: str) -> File | None:
    try:
        found = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _inherit() -> None:
    _inherited.update(+_opened)
    _opened.clear()
    for loop in _loops:
        if getattr(loop, "_selector", None) is not None:  # uvloop sees to it by itself
            loop._selector = selectors.DefaultSelector()  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_inherit)
