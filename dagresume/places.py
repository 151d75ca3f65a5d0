"""Where a file lies, and which processes have it open: what can be told of it without touching it.

A file is never opened here: closing any descriptor of a database drops the locks that SQLite holds on it for
this process. Where the system does not tell (other than Linux), the answer is None, or nobody.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["FileSystem", "Process", "file_system", "lock_holders", "openers"]

_PROC: Final = Path("/proc")
_NETWORK: Final = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "coda", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4"}
    | {"ocfs2", "orangefs", "prl_fs", "pvfs2", "smb2", "smb3", "smbfs", "vboxsf", "virtiofs", "vmhgfs"}
)
_FLEETING: Final = frozenset({"ramfs", "tmpfs"})
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")


class FileSystem(NamedTuple):
    """A mounted file system: its type as the kernel calls it, and where it is mounted."""

    type: str
    mount: str

    @property
    def network(self) -> bool:
        """Whether its locks and its memory may not be those of one machine: NFS, SMB, FUSE and the like."""
        return self.type in _NETWORK or self.type == "fuse" or self.type.startswith("fuse.")

    @property
    def fleeting(self) -> bool:
        """Whether it is gone with the power."""
        return self.type in _FLEETING

    @property
    def layered(self) -> bool:
        """Whether it is a container's own layer, which goes with the container."""
        return self.type in {"overlay", "aufs"}

    @property
    def warning(self) -> str:
        """What a database on this one must be told; empty if nothing is wrong with it."""
        if not self.network:
            return ""
        return (
            f"it lies on a network file system ({self.type}, mounted at {self.mount}), where SQLite's locks"
            " and its log do not hold: runs can be driven twice and the file be damaged. Use PostgreSQL"
            " (postgresql://…) or a local disk."
        )


def file_system(path: str | os.PathLike[str], proc: Path = _PROC) -> FileSystem | None:
    """Give the file system that holds this file, or would; None where that cannot be told."""
    place = os.path.realpath(path)
    found: FileSystem | None = None
    for mounted in _mounts(proc):
        inside = place == mounted.mount or place.startswith(mounted.mount.rstrip("/") + "/")
        # What was mounted later at the same place lies on top.
        if inside and (found is None or len(mounted.mount) >= len(found.mount)):
            found = mounted
    return found


def _mounts(proc: Path) -> Iterator[FileSystem]:
    with contextlib.suppress(OSError):
        for line in (proc / "self/mountinfo").read_text(errors="surrogateescape").splitlines():
            before, _, after = line.partition(" - ")
            mount = _ESCAPED.sub(lambda found: chr(int(found[1], 8)), before.split()[4])
            yield FileSystem(after.split()[0], mount)


class Process(NamedTuple):
    """A process on this machine: its number, and the command that it is."""

    pid: int
    command: str

    def __str__(self) -> str:
        if self.pid <= 0:
            return "a process that cannot be seen from here (of another container)"
        if self.pid == os.getpid():
            return f"this process ({self.pid})"
        return f"process {self.pid} ({self.command})" if self.command else f"process {self.pid}"

    @classmethod
    def of(cls, pid: int, proc: Path = _PROC) -> Process:
        """Give what is known of the process with this number."""
        try:
            words = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            words = []
        return cls(pid, " ".join(" ".join(words).split())[:80])


def openers(path: str | os.PathLike[str], proc: Path = _PROC) -> list[Process]:
    """Give the processes that have this file open, as far as we may see; we are not among them."""
    try:
        wanted = Path(path).stat()
    except OSError:
        return []
    others = (folder for folder in _numbered(proc) if int(folder.name) != os.getpid())
    return [Process.of(int(folder.name), proc) for folder in others if _has_open(folder, wanted)]


def _numbered(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from (entry for entry in folder.iterdir() if entry.name.isdecimal())


def _has_open(folder: Path, wanted: os.stat_result) -> bool:
    for descriptor in _numbered(folder / "fd"):
        with contextlib.suppress(OSError):
            found = descriptor.stat()
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                return True
    return False


def lock_holders(
    path: str | os.PathLike[str], first: int, last: int, proc: Path = _PROC
) -> list[tuple[Process, bool]]:
    """Give who holds a lock on one of these bytes of a file just now, and whether it is a lock to write."""
    try:
        wanted = Path(path).stat()
        lines = (proc / "locks").read_text().splitlines()
    except OSError:
        return []
    where = f"{os.major(wanted.st_dev):02x}:{os.minor(wanted.st_dev):02x}:{wanted.st_ino}"
    found: dict[int, bool] = {}
    for line in lines:  # 1: POSIX  ADVISORY  READ 4242 fe:00:1234 123 123
        words = line.split()
        if len(words) != 8 or words[1] == "->" or words[5] != where:
            continue
        begin, end = int(words[6]), float("inf") if words[7] == "EOF" else int(words[7])
        if begin <= last and end >= first:
            found[int(words[4])] = words[3] == "WRITE" or found.get(int(words[4]), False)
    return [(Process.of(pid, proc), writes) for pid, writes in found.items()]
