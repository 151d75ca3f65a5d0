"""How much disk runs will take: from the layout of SQLite's pages and what is written beside outputs.

    bytes of a run = rows of the run + nodes × (row of a checkpoint + its index entries, or its file)

A row that fits into a page shares it with as many others as fit; a longer one keeps a part of itself in its
page, the rest fills pages of its own (https://www.sqlite.org/fileformat2.html, section 1.6). What a row holds
beside the output, its index entries, and what a run has beside its nodes were measured with the engine
itself; a test measures them again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from dagresume import words

__all__ = ["Estimate", "estimate"]

_PAGE: Final = 4096
_CELL: Final = 8
"""Bytes of a row beside its contents: its lengths, its number, its place in the page."""
_CHECKPOINT: Final = 96
"""Measured: a completed record without its output (kind, path, times, fingerprint, digest)."""
_INDEXED: Final = 52
"""Measured: its entry in the index by path, with what pages leave free as they are split."""
_RUN: Final = 750
"""Measured: the row of a run with its index entries, its first record and its last."""
_FILE: Final = 700
"""Measured: the folder entry, inode and note of a big output's file, besides its blocks."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The disk that runs take, in bytes: each `run`, a `day`, a `month` (30 days) of them.

    `at_rest`: what is there at any time if runs are kept for `keep_days` and then pruned. `str()` is a line
    for people.
    """

    nodes: int
    size: int
    runs_per_day: float
    keep_days: float
    run: int
    day: int
    month: int
    at_rest: int

    def __str__(self) -> str:
        return (
            f"{self.nodes:,} nodes × {words.size(self.size)} × {words.amount(self.runs_per_day)} runs a day:"
            f" {words.size(self.run)} a run, {words.size(self.day)} a day, {words.size(self.month)} a month;"
            f" kept for {words.duration(self.keep_days * 86_400)}: {words.size(self.at_rest)} at rest"
        )


def estimate(
    nodes: int, size: int, runs_per_day: float, keep_days: float = 7.0, *, spill_bytes: int = 65536
) -> Estimate:
    """Give the disk that so many runs take: `size` is the bytes of one packed output (JSON text).

    Outputs over `spill_bytes` are files beside the database. At rest, an eighth more is free space that the
    next runs use. Logs, artifacts and retried attempts come on top of it.
    """
    run = _RUN + nodes * (_node(size, spill_bytes) + _INDEXED)
    day = run * runs_per_day
    return Estimate(
        nodes, size, runs_per_day, keep_days, round(run), round(day), round(30 * day),
        round(day * keep_days * 8 / 7),
    )  # fmt: skip


def _node(size: int, spill_bytes: int) -> float:
    if size > spill_bytes:
        return _row(_CHECKPOINT + 80) + math.ceil(size / _PAGE) * _PAGE + _FILE
    return _row(_CHECKPOINT + size)


def _row(payload: int) -> float:
    """Give the bytes of pages that a row takes, appended behind others of its kind."""
    local, pages = payload, 0
    if payload > _PAGE - 35:
        least = (_PAGE - 12) * 32 // 255 - 23
        local = least + (payload - least) % (_PAGE - 4)
        local = local if local <= _PAGE - 35 else least
        pages = math.ceil((payload - local) / (_PAGE - 4))
    fit = max(1, (_PAGE - 8) // (local + _CELL + (4 if pages else 0)))
    return _PAGE / fit + pages * _PAGE
