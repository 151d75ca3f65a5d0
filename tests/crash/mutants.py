"""Faults put into the engine on purpose: a sweep that does not find them is worth nothing."""

import asyncio
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dagresume import blobs
from dagresume.jobs import Job, Step
from dagresume.journal import Entry, Journal
from dagresume.scheduler import Run
from dagresume.store import Committed, Outcome, Owned


def put(where: Any, **instead: Any) -> None:
    for name, value in instead.items():
        setattr(where, name, value)


def start_record_after_the_body() -> None:
    """No body waits for its start record; it is written with what the body gave."""
    hand_over = Run.hand_over

    def late(run: Run, step: Step, **options: Any) -> None:
        ends = [record for record in step.records if record.kind in {"node.completed", "node.failed"}]
        step.records[:0] = [
            end._replace(kind="node.started", reason=None, output=None, data=None)
            for end in ends
            if "count" not in end.facts  # a map itself has no body
        ]
        hand_over(run, step, **options)

    put(Job, awaits_record=property(lambda job: False))
    put(Run, hand_over=late)


def commit_not_awaited() -> None:
    """What a commit unlocks goes on at once; the commit itself comes a little later."""
    commit, write = Journal._commit, Journal.write
    last: list[asyncio.Future[Any]] = []

    async def at_once(journal: Journal, batch: list[Entry]) -> Sequence[Outcome]:
        owned = [entry.guard for entry in batch if isinstance(entry.guard, Owned)]
        if len(owned) < len(batch):
            return await commit(journal, batch)
        before = last[-1] if last else None

        async def later() -> None:
            if before is not None:
                await before
            await asyncio.sleep(0.004)
            await commit(journal, batch)

        last.append(asyncio.ensure_future(later()))
        return [Committed(0, guard.run, guard.epoch) for guard in owned]

    async def to_the_end(journal: Journal) -> None:
        await write(journal)
        if last:
            await last[-1]

    put(Journal, _commit=at_once, write=to_the_end)


def blobs_written_in_place() -> None:
    """A big output is written to the file of its final name."""

    def put_in_place(folder: Path, content: bytes) -> str:
        name = hashlib.sha256(content).hexdigest()
        with os.fdopen(os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(content)
        return name

    put(blobs, _put=put_in_place)
