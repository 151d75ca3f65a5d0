"""What a run keeps for its bodies while they run: state, progress, calls made once.

Everything here runs on the engine's loop, except `ask` and `tell`, which bodies call from anywhere. What is
kept is written beside the units of the run, so that it settles nothing and nothing waits for it but the body.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import anyio

from dagresume import codec
from dagresume import events as ev
from dagresume.blobs import explained
from dagresume.context import artifacts_of
from dagresume.errors import DagresumeError, DefinitionError, OnceInFlight, OnceUncertain, StoreError
from dagresume.events import Record
from dagresume.jobs import Flight, Job
from dagresume.journal import Entry
from dagresume.results import Stored
from dagresume.store import Committed, OnceFound, OnceRow, Outcome, Refused, scope_of

__all__ = ["Notes"]

TELL_AFTER: Final = 0.5
"""Seconds between two records of the progress of one path."""
_OVERTAKEN: Final = Refused("once")


class _Note(Entry):
    """Records beside the steps of a run; `done` gets what became of them."""

    __slots__ = ("done", "whose")

    def __init__(self, run: Any, records: Sequence[Record], once: Sequence[OnceRow] = ()) -> None:
        super().__init__(run.owned, records, once=once)
        # The journal knows no run of it: a mark that came too late is no hole in the run.
        self.run, self.concludes, self.whose = None, False, run
        self.done: asyncio.Future[Outcome] = run.loop.create_future()

    def delivered(self, outcome: Outcome) -> None:
        if isinstance(outcome, Committed):
            self.whose.count_commit()
        elif outcome != _OVERTAKEN:
            self.whose.not_written(outcome, self.records)
        if not self.done.done():
            self.done.set_result(outcome)


class Notes:
    """What one run keeps for its bodies."""

    def __init__(self, run: Any) -> None:
        self._run, self._services = run, run.services
        root = self._services.artifacts
        self.resumed = bool(run.snapshot.last_seq)
        self._left_files = bool(
            self.resumed and root is not None and artifacts_of(root, run.run_id, "").parent.exists()
        )

    # -- from any thread ------------------------------------------------------------------------------

    def ask(self, job: Job, what: str, *args: Any) -> Future[Any]:
        """Have a request of a body answered on the loop."""
        work = _REQUESTS[what](self, job, *args)
        try:
            return asyncio.run_coroutine_threadsafe(work, self._run.loop)
        except RuntimeError:  # the loop is closed
            work.close()
            raise self._over(job) from None

    def tell(self, job: Job) -> None:
        """Have the progress of a job written into the journal, soon."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._run.loop.call_soon_threadsafe(self._tell, job)

    def admit_sql(self, job: Job) -> None:
        """Raise unless statements can go with the checkpoint of this job."""
        node = job.vertex.node
        if job.vertex.pure:
            raise DefinitionError(
                f"{job.path}: commit_with puts statements into the transaction of the checkpoint, and with"
                " checkpoint=False there is none. Drop checkpoint=False."
            )
        if self._services.artifacts is None:
            raise StoreError(
                f"{job.path}: commit_with needs a database file, ':memory:' runs no SQL. Give the engine one:"
                " Engine('runs.db')."
            )
        if node.executor not in {None, "loop", "thread"}:
            raise DefinitionError(
                f"{job.path}: commit_with has no part in executor={node.executor!r}: the checkpoint is"
                " written by the engine. Return what is to be written, and let a node without executor="
                " write it."
            )

    # -- before a body begins -------------------------------------------------------------------------

    def prepares(self, job: Job) -> bool:
        """Say whether `prepare` has something to do before this attempt."""
        return job.path in self._run.snapshot.states or self._clears(job)

    def _clears(self, job: Job) -> bool:
        if job.reconcile or not (self._left_files or job.attempt > 1):
            return False
        return self._services.artifacts is not None and self._folder(job).exists()

    def _folder(self, job: Job) -> Path:
        return artifacts_of(self._services.artifacts, self._run.run_id, job.path)

    async def prepare(self, job: Job) -> None:
        """Fetch the state that the attempt before has left, and clear away its files."""
        if self._clears(job):
            with explained(self._folder(job)):
                await anyio.to_thread.run_sync(shutil.rmtree, self._folder(job))
        snapshot = self._run.snapshot
        saved, last = snapshot.states.get(job.path), snapshot.paths.get(job.path)
        if saved is None or saved.input != job.fingerprint:
            return
        if last is not None and last.kind == ev.COMPLETED:
            return  # a pure one, made again
        (job.state,) = await self._services.fetch(self._run.run_id, [Stored.of(saved)])

    def left(self, job: Job) -> None:
        """The attempt is over: calls it left under way are no longer waited for."""
        for where in job.held:
            self._land(job, where)

    # -- progress -------------------------------------------------------------------------------------

    def _tell(self, job: Job) -> None:
        wait = job.told + TELL_AFTER - self._services.clock.monotonic()
        if wait > 0:
            self._services.clock.call_later(wait, self._write_progress, job)
        else:
            self._write_progress(job)

    def _write_progress(self, job: Job) -> None:
        job.telling = False
        if not self._is_live(job):
            return
        job.told = self._services.clock.monotonic()
        done, total = self._run.progress[job.path]
        facts = {"done": done, "total": total}
        record = ev.node_record(ev.PROGRESS, job.path, job.attempt, self._run.now(), **facts)
        self._services.journal.append(_Note(self._run, [record]), quietly=True)

    # -- state ----------------------------------------------------------------------------------------

    async def _save_state(self, job: Job, text: str) -> None:
        self._check_live(job)
        digest, limit = codec.digest(text), self._services.spill_bytes
        saved = ev.node_record(ev.STATE, job.path, job.attempt, self._run.now())
        saved = saved._replace(input=job.fingerprint, digest=digest, size=len(text), output=text)
        if limit is not None and len(text) > limit:
            facts = codec.pack({"blob": await self._services.spill(self._run.run_id, text)})
            saved = saved._replace(output=None, data=facts)
            self._check_live(job)
        outcome = await self._write(job, [saved])
        if isinstance(outcome, Committed):
            self._run.snapshot.apply(saved._replace(output=None, seq=outcome.seq))

    # -- calls made once ------------------------------------------------------------------------------

    async def _wait(self, job: Job, scope: str, key: str) -> None:
        """Return when no call of this key is under way in this engine."""
        where = self._place(scope, key)
        while (flight := self._services.flights.get(where)) is not None:
            if flight.job is job:
                raise OnceInFlight(job.path, key, "this very attempt")
            await asyncio.wait([flight.over])

    async def _begin(self, job: Job, scope: str, key: str) -> tuple[str, str | None]:
        """Give ("done", its stored result), ("busy", None) if the call is under way, or ("started", None)
        once it is durable that this job makes the call now.
        """
        self._check_live(job)
        where = self._place(scope, key)
        if where in self._services.flights:
            return "busy", None
        self._services.flights[where] = Flight(job, self._run.loop.create_future())
        job.held += (where,)
        state: tuple[str, str | None] = "busy", None
        try:
            found = await self._services.once(*where)
            self._check_live(job)
            if found is not None and found.row.state == "done":
                state = "done", found.row.result
            else:
                self._check_free(job, key, scope, where, found)
                if await self._mark(job, where, "started", str(job.attempt), found and found.row.at):
                    state = "started", None
        finally:
            if state[0] != "started":
                self._land(job, where)
        return state

    async def _keep(self, job: Job, scope: str, key: str, text: str) -> None:
        await self._end(job, scope, key, "done", text)

    async def _take_back(self, job: Job, scope: str, key: str) -> None:
        await self._end(job, scope, key, "free", None)

    async def _end(self, job: Job, scope: str, key: str, state: str, text: str | None) -> None:
        self._check_live(job)
        where = self._place(scope, key)
        try:
            if not await self._mark(job, where, state, text, self._services.flights[where].at):
                raise OnceInFlight(job.path, key, "another process, which took the call over")
        finally:
            self._land(job, where)

    async def _mark(
        self, job: Job, where: tuple[str, str], state: str, result: str | None, saw: int | None
    ) -> bool:
        """Write what is known of a call; False if the row that was seen is not there any more."""
        at = max(self._run.now(), (saw or 0) + 1)  # rows are told apart by it
        self._services.flights[where].at = at
        row = OnceRow(*where, job.path, state, result, at, saw)
        return isinstance(await self._write(job, [], [row]), Committed)

    def _check_free(
        self, job: Job, key: str, scope: str, where: tuple[str, str], found: OnceFound | None
    ) -> None:
        """Raise if a call of this key has begun and nobody knows how it ended."""
        if found is None:
            return
        row, run_id, holder = found
        ours = run_id == self._run.run_id
        if not ours and holder is not None and holder.alive and holder.session != self._run.owned.session:
            raise OnceInFlight(job.path, key, f"run {run_id} ({row.path}), driven by {holder}")
        nothing: tuple[int, list[str] | None] = (0, None)
        forgiven = self._run.snapshot.forgiven
        answered = ours and forgiven.get(row.path, nothing)[0] >= int(row.result or 0)
        if not (ours and row.path == job.path):  # somebody else's: it was asked about here
            answered = answered or forgiven.get(job.path, nothing)[1] == list(where)
        if job.vertex.idempotent or answered:
            return
        began = f"{row.path}, attempt {row.result}" if ours else f"run {run_id or 'unknown'} ({row.path})"
        raise OnceUncertain(self._run.run_id, job.path, key, scope, began)

    def place_of(self, error: OnceUncertain) -> list[str]:
        """Give where the call of this error is kept."""
        return list(self._place(error.scope, error.key))

    def _place(self, scope: str, key: str) -> tuple[str, str]:
        of = self._run.run_id if scope == "run" else self._run.workflow
        return scope_of(scope, of), key

    def _land(self, job: Job, where: tuple[str, str]) -> None:
        if where in job.held:
            job.held = tuple(other for other in job.held if other != where)
            self._services.flights.pop(where).over.set_result(None)

    # -- writing --------------------------------------------------------------------------------------

    async def _write(self, job: Job, records: list[Record], once: Sequence[OnceRow] = ()) -> Outcome:
        """Write it durably, with the start of the attempt if that is not written yet; raises if it cannot be
        written at all.
        """
        journal = self._services.journal
        begins = journal.forget(job)
        note = _Note(self._run, [job.start_record(), *records] if begins else records, once)
        journal.append(note)
        outcome = await note.done
        if outcome == _OVERTAKEN:
            if begins and self._is_live(job):
                journal.later(job)
        elif not isinstance(outcome, Committed):
            raise self._run.error or StoreError(f"{job.path}: not written: {outcome}")
        return outcome

    def _is_live(self, job: Job) -> bool:
        return job in self._run.live and self._run.error is None

    def _check_live(self, job: Job) -> None:
        if not self._is_live(job):
            raise self._over(job)

    @staticmethod
    def _over(job: Job) -> DagresumeError:
        return DagresumeError(f"{job.path}: attempt {job.attempt} is over, nothing more of it is kept")


_REQUESTS: Final[Mapping[str, Callable[..., Coroutine[Any, Any, Any]]]] = {
    "save_state": Notes._save_state,
    "wait": Notes._wait,
    "begin": Notes._begin,
    "keep": Notes._keep,
    "take_back": Notes._take_back,
}
