"""Removes runs that ended long enough ago, with all that belongs to them and nothing that belongs to others.

What is live or may go on is never removed, whatever is asked: running, waiting, interrupted, rolling back, a
failed run younger than its own term. The store looks at each run again when it removes it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final

import anyio

from dagresume import words
from dagresume.blobs import BlobStore, measure, remove
from dagresume.clock import Clock
from dagresume.context import artifacts_of
from dagresume.errors import InputError, StoreError
from dagresume.events import RunStatus
from dagresume.observe import log
from dagresume.store import RunRow, Store
from dagresume.views import wanted_statuses

__all__ = ["FAILED_KEPT", "KEPT", "Pruned", "Term", "Terms", "prune"]

KEPT: Final = timedelta(days=7)
FAILED_KEPT: Final = timedelta(days=30)
Term = timedelta | float
_PAGE: Final = 500
_ENDED: Final = frozenset(word for word in RunStatus if word.final)
_PRUNABLE: Final = _ENDED | {RunStatus.FAILED}


@dataclass(frozen=True, slots=True)
class Pruned:
    """What a prune removed, or with `dry_run` would remove; `str()` is one line that says so.

    `runs`: how many by status, `run_ids` which. `resumed`: runs whose removal an earlier prune had begun.
    Rows: `events`, `logs` (lines), `once` (calls made once in a run), `definitions` no run has any more,
    `sessions` that ended long ago. Files: `blobs` and `artifacts`, each with its `…_bytes`. `left`: a
    sentence for each run whose files could not be removed; the next prune tries again. Bytes of the database
    afterwards: its `size`, what is `free` in it for what comes next, and what was `given_back` to the disk.
    These and `dry_run` do not count when two of these are compared: a dry run equals what then is done.
    """

    runs: Mapping[str, int]
    run_ids: tuple[str, ...]
    resumed: int = 0
    events: int = 0
    logs: int = 0
    once: int = 0
    definitions: int = 0
    sessions: int = 0
    blobs: int = 0
    blob_bytes: int = 0
    artifacts: int = 0
    artifact_bytes: int = 0
    dry_run: bool = field(default=False, compare=False)
    left: tuple[str, ...] = field(default=(), compare=False)
    given_back: int = field(default=0, compare=False)
    free: int = field(default=0, compare=False)
    size: int = field(default=0, compare=False)

    def __str__(self) -> str:
        verb = "would delete" if self.dry_run else "deleted"
        by_status = ", ".join(f"{count:,} {status}" for status, count in self.runs.items())
        told = words.counted(len(self.run_ids), "run") + (f" ({by_status})" if by_status else "")
        parts = [told, *self._parts()]
        line = f"{verb} {', '.join(parts)}"
        if self.resumed:
            line += f"; among them the rest of {words.counted(self.resumed, 'run')} of an earlier prune"
        if self.dry_run or not self.size:
            return line
        free = f"{words.size(self.free)} of {words.size(self.size)} free for what comes next"
        return f"{line}; {words.size(self.given_back)} given back to the disk, {free}"

    def _parts(self) -> list[str]:
        files = (
            (self.blobs, "blob file", self.blob_bytes),
            (self.artifacts, "artifact", self.artifact_bytes),
        )
        rows = (
            (self.events, "event"),
            (self.logs, "log line"),
            (self.once, "result of ctx.once"),
            (self.definitions, "unused definition"),
            (self.sessions, "old session"),
        )
        counts = [_counted(count, noun) for count, noun in rows if count]
        return counts + [
            f"{words.counted(count, noun)} ({words.size(size)})" for count, noun, size in files if count
        ]


def _counted(count: int, noun: str) -> str:
    head, of, rest = noun.partition(" of ")
    return words.counted(count, head) + of + rest


@dataclass(frozen=True, slots=True)
class Terms:
    """Which runs are old enough: those that finished at or before these times (microseconds UTC)."""

    ended: int
    failed: int
    statuses: frozenset[RunStatus]

    @classmethod
    def of(
        cls, now: int, older_than: Term, failed_older_than: Term, status: str | Sequence[str] | None
    ) -> Terms:
        """Take what a person asked for; InputError says what cannot be meant."""
        statuses = (
            _PRUNABLE if status is None else _prunable((status,) if isinstance(status, str) else status)
        )
        ended = now - _microseconds("older_than", older_than)
        return cls(ended, now - _microseconds("failed_older_than", failed_older_than), statuses)

    def cover(self, row: RunRow) -> bool:
        """Say whether this run may be removed."""
        if RunStatus(row.status) not in self.statuses:
            return False
        limit = self.failed if row.status == RunStatus.FAILED else self.ended
        return (row.finished_at or row.updated_at) <= limit


def _prunable(words: Sequence[str]) -> frozenset[RunStatus]:
    try:
        found = frozenset().union(*(wanted_statuses(word) or () for word in words))
    except ValueError as error:
        raise InputError(str(error)) from None
    if never := sorted(found - _PRUNABLE):
        known = ", ".join(sorted(_PRUNABLE))
        raise InputError(f"status={never[0].value!r}: only runs that have ended are pruned: {known}.")
    return found


def _microseconds(name: str, term: Term) -> int:
    seconds = term.total_seconds() if isinstance(term, timedelta) else term
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise InputError(f"{name}={term!r}: a timedelta or seconds, 0 or more.")
    return 1 << 62 if math.isinf(seconds) else round(seconds * 1e6)


async def prune(
    store: Store,
    blobs: BlobStore | None,
    artifacts: str | None,
    clock: Clock,
    terms: Terms,
    *,
    workflow: str | None = None,
    dry_run: bool = False,
) -> Pruned:
    """Remove the runs that the terms cover, and what an earlier prune has left; `dry_run`: only count."""
    old = {row.run: row async for row in _old(store, terms, workflow)}
    files = _Files(blobs, artifacts, dry_run=dry_run)
    gone = await store.forget({run: row.epoch for run, row in old.items()}, files.clear, dry_run=dry_run)
    rows = [old[run] for run in gone.runs]
    return Pruned(
        runs=dict(sorted(Counter(row.status for row in rows).items())),
        run_ids=tuple(row.run_id for row in rows),
        **{name: getattr(gone, name) for name in gone._fields if name != "runs"},
        blobs=files.blobs[0],
        blob_bytes=files.blobs[1],
        artifacts=files.artifacts[0],
        artifact_bytes=files.artifacts[1],
        dry_run=dry_run,
        left=tuple(files.left),
    )


async def _old(store: Store, terms: Terms, workflow: str | None) -> AsyncIterator[RunRow]:
    before = None
    statuses = [status.value for status in terms.statuses]
    while page := await store.find(workflow=workflow, status=statuses, before=before, limit=_PAGE):
        for row, holder in page:
            before = row.run
            if terms.cover(row) and not (holder is not None and holder.alive):
                yield row._replace(inputs=None)


class _Files:
    """What runs have beside the database: counted, and removed unless it is a dry run."""

    def __init__(self, blobs: BlobStore | None, artifacts: str | None, *, dry_run: bool) -> None:
        self._blobs, self._artifacts, self._dry_run = blobs, artifacts, dry_run
        self.blobs = self.artifacts = (0, 0)
        self.left: list[str] = []

    async def clear(self, run_id: str) -> bool:
        """Remove the files of a run; False, and a sentence more in `left`, if that cannot be done."""
        if self._blobs is None and self._artifacts is None:
            return True
        try:
            blobs, artifacts = await anyio.to_thread.run_sync(partial(self._clear, run_id))
        except (StoreError, OSError) as error:
            self.left.append(f"run {run_id}: {error}")
            log.warning("the files of a pruned run could not be removed", run=run_id, why=str(error))
            return False
        self.blobs = _sum(self.blobs, blobs)
        self.artifacts = _sum(self.artifacts, artifacts)
        return True

    def _clear(self, run_id: str) -> tuple[tuple[int, int], tuple[int, int]]:
        folders: list[Path | None] = [
            None if self._blobs is None else self._blobs.of(run_id),
            None if self._artifacts is None else artifacts_of(self._artifacts, run_id, "").parent,
        ]
        sizes = [(0, 0) if folder is None else measure(folder) for folder in folders]
        if not self._dry_run:
            for folder in folders:
                if folder is not None:
                    remove(folder)
        return sizes[0], sizes[1]


def _sum(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] + other[0], one[1] + other[1]
