"""Where a process is killed: at a commit, at a statement of SQL, or at a step of a file beside the database.

Nothing in the engine knows of it. Commits are counted by a store around the store, statements by SQLite's own
trace, and what is done to files by `os` functions that are exchanged for the rest of the process' life.
"""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, NoReturn

from dagresume.fakes import StoreWrapper
from dagresume.sqlite import SQLiteStore
from dagresume.store import Outcome, Store, Unit
from dagresume.writer import Writer

__all__ = ["COMMITS", "FILES", "STATEMENTS", "Fate", "Point", "Where", "die", "doomed"]

Where = Literal[
    "before commit",
    "after commit",
    "statement",
    "in blob write",
    "before blob fsync",
    "before blob rename",
    "after blob rename",
    "file removal",
]
COMMITS: Final[tuple[Where, ...]] = ("before commit", "after commit")
STATEMENTS: Final[tuple[Where, ...]] = ("statement",)
FILES: Final[tuple[Where, ...]] = (
    "in blob write",
    "before blob fsync",
    "before blob rename",
    "after blob rename",
    "file removal",
)


class Point(NamedTuple):
    """A moment in a process, counted from 1.

    `where`: before or after its n-th commit; as its n-th SQL `statement` begins; with half of its n-th big
    output in its file, before that file is forced to the disk, before it gets its name, and before that name
    is forced to the disk; before it removes its n-th file or folder.
    """

    where: Where
    n: int

    def __str__(self) -> str:
        return f"{self.where} {self.n}"


class Fate:
    """Counts what a process does (`passed`), and ends the process at the point. Safe in several threads."""

    def __init__(self, point: Point | None) -> None:
        self._point = point
        self._lock = threading.Lock()
        self.passed: Counter[Where] = Counter()

    def passes(self, where: Where, last: Callable[[], object] | None = None) -> None:
        """Count one more of these; at the point do the last thing, and die."""
        with self._lock:
            self.passed[where] += 1
            due = self._point == (where, self.passed[where])
        if due:
            if last is not None:
                last()
            die()


def die() -> NoReturn:
    """End this process as a kill from outside would: nothing is closed, flushed or told."""
    os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(1)


class _DoomedStore(StoreWrapper):
    def __init__(self, inner: Store, fate: Fate) -> None:
        super().__init__(inner)
        self._fate = fate

    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        self._fate.passes("before commit")
        outcomes = await self.inner.commit(units)
        self._fate.passes("after commit")
        return outcomes


def doomed(path: str, fate: Fate, **options: Any) -> Store:
    """Give a SQLite store whose commits, statements and files are counted by the fate of this process."""

    class Traced(Writer):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            self.set_trace_callback(lambda _: fate.passes("statement"))

    store = SQLiteStore(path, **options)
    store.connection_class = Traced
    _Files(fate, f"{Path(path).absolute()}.blobs{os.sep}").watch()
    return _DoomedStore(store, fate)


class _Files:
    """Counts what is done to files, for good: this process lives for one run and is not used again."""

    def __init__(self, fate: Fate, folder: str) -> None:
        self._fate, self._folder = fate, folder
        self._drafts: set[int] = set()  # descriptors of files that are being written
        self._open, self._fdopen, self._fsync, self._replace = os.open, os.fdopen, os.fsync, os.replace

    def watch(self) -> None:
        """Exchange what `os` does with files."""
        removing = {name: self._removing(getattr(os, name)) for name in ("unlink", "rmdir")}
        written = {"open": self.open, "fdopen": self.fdopen, "fsync": self.fsync, "replace": self.replace}
        for name, function in (written | removing).items():
            setattr(os, name, function)

    def _is_inside(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and os.path.abspath(path).startswith(self._folder)  # noqa: PTH100

    def open(self, path: Any, flags: int, *rest: Any, **more: Any) -> int:
        descriptor = self._open(path, flags, *rest, **more)
        self._drafts.discard(descriptor)
        if flags & os.O_CREAT and self._is_inside(path):
            self._drafts.add(descriptor)
        return descriptor

    def fdopen(self, descriptor: int, mode: str = "r", *rest: Any, **more: Any) -> Any:
        if descriptor not in self._drafts:
            return self._fdopen(descriptor, mode, *rest, **more)
        return io.BufferedWriter(_Torn(descriptor, mode, self._fate))

    def fsync(self, descriptor: int) -> None:
        if descriptor in self._drafts:
            self._fate.passes("before blob fsync")
        self._fsync(descriptor)

    def replace(self, source: Any, target: Any, **more: Any) -> None:
        inside = self._is_inside(target)
        if inside:
            self._fate.passes("before blob rename")
        self._replace(source, target, **more)
        if inside:
            self._fate.passes("after blob rename")

    def _removing(self, function: Callable[..., None]) -> Callable[..., None]:
        def watched(path: Any, **more: Any) -> None:
            self._fate.passes("file removal")
            function(path, **more)

        return watched


class _Torn(io.FileIO):
    """A file that may end in the middle of what is written to it."""

    def __init__(self, descriptor: int, mode: str, fate: Fate) -> None:
        super().__init__(descriptor, mode.replace("b", ""))
        self._fate = fate

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        self._fate.passes("in blob write", lambda: super(_Torn, self).write(view[: len(view) // 2]))
        return super().write(view)
