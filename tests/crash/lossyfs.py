"""A file system that notes every change in its order, so that any moment at which the power could have gone
can be looked at afterwards (see `disk`).

    python -m tests.crash.lossyfs FOLDER LOG MOUNTPOINT

Programs work under MOUNTPOINT; their files lie in FOLDER, and LOG is told of each write, truncation, name and
fsync before the program learns that it was done. What a program appends to the file NOTES at the top is kept
in the log only: so it says what it knew to be durable at that moment. Needs mfusepy (`pip install
'dagresume[test]'`), Debian's fuse3 and /dev/fuse; runs in the foreground until it is unmounted.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

try:
    import mfusepy as fuse
except (ImportError, OSError) as error:  # no module, or no libfuse
    MISSING: str | None = f"mfusepy cannot be loaded ({error}): pip install mfusepy, apt-get install fuse3"
    Operations: Any = object
else:
    MISSING = None if os.access("/dev/fuse", os.R_OK | os.W_OK) else "/dev/fuse cannot be opened here"
    Operations = fuse.Operations

__all__ = ["MISSING", "NOTES", "mounted"]

NOTES: Final = "NOTES"
_ROOT: Final = Path(__file__).parents[2]
_STAT: Final = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino")
_TIMES: Final = ("st_atime", "st_mtime", "st_ctime")
_STATVFS: Final = (
    "f_bsize",
    "f_frsize",
    "f_blocks",
    "f_bfree",
    "f_bavail",
    "f_files",
    "f_ffree",
    "f_namemax",
)


@contextlib.contextmanager
def mounted(place: Path) -> Iterator[tuple[Path, Path]]:
    """Mount it below `place`; gives the mount point, and the log that is whole once it is left.

    Raises OSError, with what was said, where it cannot be mounted.
    """
    folder, mount, log = place / "volatile", place / "mount", place / "log"
    for each in (folder, mount):
        each.mkdir()
    command = [sys.executable, "-m", "tests.crash.lossyfs", str(folder), str(log), str(mount)]
    keeper = subprocess.Popen(command, cwd=_ROOT, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 10
        while not os.path.ismount(mount):
            if keeper.poll() is not None or time.monotonic() > deadline:
                keeper.kill()
                raise OSError(f"FUSE cannot be mounted here: {keeper.communicate()[1].strip()[-200:]}")
            time.sleep(0.01)
        yield mount, log
    finally:
        if os.path.ismount(mount):
            subprocess.run(["fusermount3", "-u", str(mount)], check=False)
        try:
            keeper.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            keeper.kill()
            keeper.communicate()


class Lossy(Operations):  # type: ignore[misc]  # it has no types
    """Does what it is asked to in `folder`, and notes what a disk would have to remember."""

    use_ns = True

    def __init__(self, folder: str, log: BinaryIO) -> None:
        self._folder, self._log = folder, log
        self._numbers: dict[str, int] = {}
        self._open: dict[int, int] = {}
        self._made = 0

    def _note(self, op: str, data: bytes = b"", **facts: Any) -> None:
        head = json.dumps({"op": op, "size": len(data)} | facts)
        self._log.write(head.encode() + b"\n" + data)

    def _at(self, path: str) -> str:
        return self._folder + path

    def _number(self, path: str) -> int | None:
        """Give the file's number; None for what a disk need not remember (SQLite's shared memory)."""
        return self._numbers.get(path)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        try:
            found = os.lstat(self._at(path))
        except OSError as error:
            raise fuse.FuseOSError(error.errno) from error
        return {k: getattr(found, k) for k in _STAT} | {k: getattr(found, f"{k}_ns") for k in _TIMES}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._at(path))]  # noqa: PTH208

    def access(self, path: str, mode: int) -> int:
        return 0

    def open(self, path: str, flags: int) -> int:
        handle = os.open(self._at(path), flags & ~os.O_EXCL)
        number = self._number(path)
        if number is not None:
            self._open[handle] = number
            if flags & os.O_TRUNC:
                self._note("truncate", file=number, length=0)
        return handle

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        handle = os.open(self._at(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)
        if path == f"/{NOTES}":
            self._open[handle] = -1
        elif not path.endswith("-shm"):
            self._made += 1
            self._numbers[path] = self._open[handle] = self._made
            self._note("create", path=path, file=self._made)
        return handle

    def mkdir(self, path: str, mode: int) -> None:
        try:
            os.mkdir(self._at(path), mode)  # noqa: PTH102
        except OSError as error:
            raise fuse.FuseOSError(error.errno) from error
        self._note("mkdir", path=path)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        written = os.pwrite(fh, data, offset)
        number = self._open.get(fh)
        if number == -1:
            self._note("note", data)
        elif number is not None:
            self._note("write", data, file=number, at=offset)
        return written

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(self._at(path), length)
        number = self._number(path)
        if number is not None:
            self._note("truncate", file=number, length=length)

    def flush(self, path: str, fh: int) -> int:
        return 0

    def release(self, path: str, fh: int) -> None:
        self._open.pop(fh, None)
        os.close(fh)

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        number = self._open.get(fh)
        if number is not None and number > 0:
            self._note("fsync", file=number)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self._note("fsyncdir", path=path)
        return 0

    def unlink(self, path: str) -> None:
        os.unlink(self._at(path))  # noqa: PTH108
        if self._numbers.pop(path, None) is not None:
            self._note("remove", path=path)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._at(path))  # noqa: PTH106
        self._note("remove", path=path)

    def rename(self, old: str, new: str, flags: int = 0) -> None:
        if flags:
            raise fuse.FuseOSError(errno.EINVAL)
        os.rename(self._at(old), self._at(new))  # noqa: PTH104
        number = self._numbers.pop(old, None)
        if number is not None:
            self._numbers[new] = number
            self._note("rename", path=old, new=new)

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._at(path), mode)  # noqa: PTH101

    def chown(self, path: str, uid: int, gid: int) -> int:
        return 0

    def utimens(self, path: str, times: Any = None) -> int:
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._folder)
        return {k: getattr(found, k) for k in _STATVFS}


if __name__ == "__main__":
    if MISSING:
        sys.exit(MISSING)
    with Path(sys.argv[2]).open("wb") as told:
        fuse.FUSE(Lossy(sys.argv[1], told), sys.argv[3], foreground=True, nothreads=True, hard_remove=True)
