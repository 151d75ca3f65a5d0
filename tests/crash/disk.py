"""What is left on a disk when the power goes, at each moment of a log that `lossyfs` has written.

POSIX promises little: a file's content is there as its last fsync left it, a name as the last fsync of its
folder left it. What came later may be there or not. Three disks are made of it:

- `strict`: nothing that was not synced is there, names no more than content;
- `eager`: names and lengths are there at once, content is not (a renamed file that is empty);
- `torn`: of each folder's names the older ones, of each file any of its later writes, in pieces of a sector.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal, NamedTuple

__all__ = ["Disk", "How", "Step", "read_log"]

How = Literal["strict", "eager", "torn"]
_SECTOR: Final = 512


class Step(NamedTuple):
    """One thing that happened to the file system."""

    op: str
    facts: dict[str, Any]
    data: bytes

    @property
    def syncs(self) -> bool:
        """Whether it makes something durable."""
        return self.op in {"fsync", "fsyncdir"}


def read_log(log: Path) -> Iterator[Step]:
    """Give the steps of a log, in order."""
    with log.open("rb") as file:
        while head := file.readline():
            facts = json.loads(head)
            yield Step(facts.pop("op"), facts, file.read(facts.pop("size")))


class _Write(NamedTuple):
    """Bytes put somewhere; without bytes a new length."""

    at: int
    data: bytes | None

    def onto(self, content: bytearray) -> None:
        end = self.at if self.data is None else self.at + len(self.data)
        if len(content) < end:
            content.extend(bytes(end - len(content)))
        if self.data is None:
            del content[self.at :]
        else:
            content[self.at : end] = self.data

    def pieces(self) -> Iterator[_Write]:
        if self.data is None:
            yield self
            return
        first = _SECTOR - self.at % _SECTOR
        cuts = [0, *range(first, len(self.data), _SECTOR), len(self.data)]
        for start, end in pairwise(cuts):
            yield _Write(self.at + start, self.data[start:end])


class _File:
    def __init__(self) -> None:
        self.synced = bytearray()
        self.later: list[_Write] = []

    def sync(self) -> None:
        for write in self.later:
            write.onto(self.synced)
        self.later.clear()

    def left(self, how: How, chance: random.Random) -> bytes | bytearray:
        if how == "strict" or not self.later:
            return self.synced
        content = bytearray(self.synced)
        for write in self.later:
            if how == "eager":
                if write.data is None:
                    write.onto(content)
                continue
            share = chance.choice((0.0, 0.5, 0.9, 1.0))
            for piece in write.pieces():
                if chance.random() < share:
                    piece.onto(content)
        return content


class _Folder:
    def __init__(self) -> None:
        self.names: dict[str, _File | _Folder] = {}
        self.synced: dict[str, _File | _Folder] = {}
        self.later: list[dict[str, _File | _Folder | None]] = []

    def change(self, **names: _File | _Folder | None) -> None:
        self.later.append(names)
        _change(self.names, names)

    def sync(self) -> None:
        self.synced = dict(self.names)
        self.later.clear()

    def left(self, how: How, chance: random.Random) -> dict[str, _File | _Folder]:
        if how == "strict":
            return self.synced
        if how == "eager":
            return self.names
        names = dict(self.synced)
        for change in self.later[: chance.randint(0, len(self.later))]:
            _change(names, change)
        return names


def _change(names: dict[str, _File | _Folder], change: dict[str, _File | _Folder | None]) -> None:
    for name, what in change.items():
        if what is None:
            names.pop(name, None)
        else:
            names[name] = what


class Disk:
    """A disk to which steps happen."""

    def __init__(self) -> None:
        self._top = _Folder()
        self._files: dict[int, _File] = {}
        self._notes = bytearray()

    @property
    def notes(self) -> list[str]:
        """The whole lines that the program had written to NOTES by now."""
        return self._notes.decode().split("\n")[:-1]

    def take(self, step: Step) -> None:
        """Let one more step happen."""
        getattr(self, f"_{step.op}")(step.data, **step.facts)

    def leave(self, place: Path, how: How, chance: random.Random) -> None:
        """Write into the empty folder `place` what is left if the power goes now."""
        _leave(self._top, place, how, chance)

    def _folder(self, path: str) -> tuple[_Folder, str]:
        folder = self._top
        *parents, name = PurePosixPath(path).parts[1:]
        for parent in parents:
            found = folder.names[parent]
            assert isinstance(found, _Folder)
            folder = found
        return folder, name

    def _note(self, data: bytes) -> None:
        self._notes += data

    def _create(self, _: bytes, path: str, file: int) -> None:
        folder, name = self._folder(path)
        self._files[file] = _File()
        folder.change(**{name: self._files[file]})

    def _mkdir(self, _: bytes, path: str) -> None:
        folder, name = self._folder(path)
        folder.change(**{name: _Folder()})

    def _write(self, data: bytes, file: int, at: int) -> None:
        self._files[file].later.append(_Write(at, data))

    def _truncate(self, _: bytes, file: int, length: int) -> None:
        self._files[file].later.append(_Write(length, None))

    def _remove(self, _: bytes, path: str) -> None:
        folder, name = self._folder(path)
        folder.change(**{name: None})

    def _rename(self, _: bytes, path: str, new: str) -> None:
        (folder, old), (to, name) = self._folder(path), self._folder(new)
        assert folder is to, "a name that goes to another folder is not modelled"
        folder.change(**{old: None, name: folder.names[old]})

    def _fsync(self, _: bytes, file: int) -> None:
        self._files[file].sync()

    def _fsyncdir(self, _: bytes, path: str) -> None:
        folder = self._folder(f"{path.rstrip('/')}/*")[0]
        folder.sync()


def _leave(folder: _Folder, place: Path, how: How, chance: random.Random) -> None:
    for name, what in folder.left(how, chance).items():
        if isinstance(what, _Folder):
            (place / name).mkdir()
            _leave(what, place / name, how, chance)
        else:
            (place / name).write_bytes(what.left(how, chance))
