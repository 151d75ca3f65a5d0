"""Big outputs as files beside the database: `<database>.blobs/<run>/<sha256 of the text>`.

A file is durable before its name is given away, and is checked when it is read. Files are never shared
between runs, so that a run's folder can go once its rows have gone.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dagresume.errors import StoreError, StoreFull, StoreReadOnly

__all__ = ["BlobLost", "BlobStore", "explained", "measure", "remove", "sync_folder"]

_PLAIN: Final = re.compile(r"[0-9a-z][0-9a-z-]{0,79}")
_NAME: Final = re.compile(r"[0-9a-f]{64}")
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_LONG: Final = 1 << 19
"""Bytes from which on a thread for the digest saves more than it costs."""
_READ_ONLY: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR})


class BlobLost(Exception):
    """A file is gone or altered; the message completes the sentence "the stored output of … "."""


class BlobStore:
    """Text files of runs below one folder. Everything here blocks: call it in a thread."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def write(self, run_id: str, text: str) -> str:
        """Give the name under which this text is durable when this returns.

        The same text has the same name; it is written again, which mends a file that was altered.
        """
        content = text.encode()
        folder = self.of(run_id)
        with explained(folder):
            self._make(folder)
            return _put(folder, content)

    def read(self, run_id: str, name: str) -> str:
        """Give the text back; BlobLost if its file is gone or holds something else."""
        if not _NAME.fullmatch(name):
            raise BlobLost(f"has no valid file name ({name!r})")
        path = self.of(run_id) / name
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise BlobLost(f"is gone: there is no file {path}") from None
        except OSError as error:
            raise BlobLost(f"cannot be read: {error}") from error
        if hashlib.sha256(content).hexdigest() != name:
            raise BlobLost(f"was altered: the checksum of {path} is another")
        return content.decode()

    def remove_run(self, run_id: str) -> None:
        """Remove all files of a run; it may have none."""
        remove(self.of(run_id))

    def of(self, run_id: str) -> Path:
        """Give a run's folder, which need not exist: its id, or where that is no safe file name, a readable
        rest and a digest.
        """
        if _PLAIN.fullmatch(run_id):
            return self.folder / run_id
        digest = hashlib.sha256(run_id.encode(errors="surrogatepass")).hexdigest()
        rest = re.sub(r"[^0-9a-z]+", "-", run_id.lower())[:40].strip("-")
        return self.folder / f"{rest}~{digest[:32]}"

    def _make(self, folder: Path) -> None:
        for place in (self.folder, folder):
            try:
                place.mkdir(mode=0o700)
            except FileExistsError:
                continue
            sync_folder(place.parent)


def remove(folder: Path) -> None:
    """Remove a folder with all that is in it, if it is there; a link in its place goes, not what it shows."""
    with explained(folder), contextlib.suppress(FileNotFoundError):
        if folder.is_symlink():
            folder.unlink()
        else:
            shutil.rmtree(folder)


def measure(folder: Path) -> tuple[int, int]:
    """Give how many files are in a folder and below it, and their bytes; no link is followed."""
    count = size = 0
    with explained(folder):
        if folder.is_symlink():
            return 0, 0
        for place, _, names in os.walk(folder):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    size += os.lstat(os.path.join(place, name)).st_size  # noqa: PTH118  # twice as fast
                    count += 1
    return count, size


class _Name:
    """The name of a content, which is found meanwhile where that takes long: the disk is as slow."""

    def __init__(self, content: bytes) -> None:
        self._content, self._found = content, ""
        self._finder: threading.Thread | None = None
        if len(content) >= _LONG:
            self._finder = threading.Thread(target=self._find, name="dagresume-digest", daemon=True)
            self._finder.start()

    def _find(self) -> None:
        self._found = hashlib.sha256(self._content).hexdigest()

    def __str__(self) -> str:
        if self._finder is not None:
            self._finder.join()
        if not self._found:
            self._find()
        return self._found


def _put(folder: Path, content: bytes) -> str:
    """Write a file so that after a crash it is there as a whole or not at all; gives its name."""
    name = _Name(content)
    draft = folder / f".{uuid.uuid4().hex}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        draft.replace(folder / str(name))
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(folder)
    return str(name)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the system can (Windows cannot open one)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Raise our error, which names this folder, for one of the system's, which becomes its cause."""
    try:
        yield
    except OSError as error:
        problem = error.strerror or str(error)
        if error.errno in _FULL:
            raise StoreFull(str(folder), problem) from error
        if error.errno in _READ_ONLY:
            raise StoreReadOnly(str(folder), problem) from error
        raise StoreError(f"{folder}: {problem}") from error
