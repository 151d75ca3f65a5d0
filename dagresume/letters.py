"""Letters: what anybody may write to a run, whoever drives it. Each is one record behind the guard `Inbox`.

They are looked at by the process that drives the run, or by the one that takes it up next; writing one runs
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unicodedata import normalize

from dagresume import codec
from dagresume import events as ev
from dagresume.clock import to_datetime
from dagresume.errors import AlreadyDecided, InputError, NotWaiting
from dagresume.events import Record, RunStatus, Snapshot, status_of
from dagresume.planner import resolution, uncertain
from dagresume.store import Inbox, Loaded, Unit

__all__ = ["decision", "resolved", "same_decision", "signal"]


def signal(loaded: Loaded, event: str, payload: Any, now: int) -> Unit:
    """Give the letter that something of this name has happened; it is kept for a wait that comes later."""
    if not isinstance(event, str) or not event:
        raise InputError(f"the name of a signal is a text, not {event!r}.")
    if RunStatus(loaded.row.status).final:
        raise NotWaiting(loaded.row.run_id, f"event {event!r}", loaded.row.status)
    text = codec.pack(payload)
    record = ev.run_record(ev.SIGNALLED, now, None, event=event)
    record = record._replace(output=text, digest=codec.digest(text), size=len(text))
    return Unit(Inbox(loaded.row.run), [record])


def decision(loaded: Loaded, path: str, approve: bool, by: str, comment: str, now: int) -> Unit | None:
    """Give the letter with a person's word about a path that waits for one; None if it says what was said
    before.

    NotWaiting if nothing waits there (any more), AlreadyDecided if the answer was another one.
    """
    path, run_id = normalize("NFC", path), loaded.row.run_id
    snapshot = Snapshot(loaded.records)
    prior = snapshot.paths.get(path)
    word = snapshot.decisions.get(path)
    asked = _last_wait(loaded.records, path)
    if word is not None and asked is not None and (word.seq or 0) > (asked.seq or 0):
        same_decision(run_id, path, word, approve)
        return None
    if prior is None or prior.kind != ev.WAITING or prior.reason not in {"approval", ev.HELD}:
        raise NotWaiting(run_id, path, _status(loaded, snapshot, prior))
    if RunStatus(loaded.row.status).final:
        raise NotWaiting(run_id, path, f"part of a run that is {loaded.row.status}")
    due = prior.facts.get("due")
    if due is not None and due <= now:
        raise NotWaiting(run_id, path, f"failed: its time was over at {to_datetime(due).isoformat()}")
    record = ev.node_record(
        ev.DECIDED, path, prior.attempt, now, None, approved=bool(approve), by=by, comment=comment
    )
    return Unit(Inbox(loaded.row.run, (ev.DECIDED, path), prior.seq or 0), [record])


def _last_wait(records: Sequence[Record], path: str) -> Record | None:
    waits = (r for r in reversed(records) if r.path == path and r.kind == ev.WAITING)
    return next(waits, None)


def same_decision(run_id: str, path: str, word: Record, approve: bool) -> None:
    """Raise AlreadyDecided if a decision that was taken differs from this one."""
    facts = word.facts
    if facts["approved"] != bool(approve):
        told = "approved" if facts["approved"] else "rejected"
        raise AlreadyDecided(run_id, path, told, facts["by"], to_datetime(word.at))


def resolved(
    loaded: Loaded,
    path: str,
    output: Any,
    failed: str | None,
    by: str,
    now: int,
    types: codec.Types,
    idempotent: bool,
) -> Unit:
    """Give the letter that says what an uncertain path did. `failed` None: it completed with `output`."""
    path, run_id = normalize("NFC", path), loaded.row.run_id
    snapshot = Snapshot(loaded.records)
    prior = snapshot.paths.get(path)
    if prior is None or not uncertain(prior, idempotent):
        raise NotWaiting(run_id, path, _status(loaded, snapshot, prior))
    said = resolution(path, prior, snapshot)
    if said is not None:
        told = "resolved as failed" if said.facts.get("failed") is not None else "resolved with an output"
        raise AlreadyDecided(run_id, path, told, said.facts.get("by", ""), to_datetime(said.at))
    facts: dict[str, Any] = {"by": by}
    if failed is not None:
        record = ev.node_record(ev.RESOLVED, path, prior.attempt, now, None, **facts, failed=str(failed))
    else:
        text = codec.pack(output, types)
        record = ev.node_record(ev.RESOLVED, path, prior.attempt, now, None, **facts)
        record = record._replace(output=text, digest=codec.digest(text), size=len(text))
    return Unit(Inbox(loaded.row.run, (ev.RESOLVED, path), prior.seq or 0), [record])


def _status(loaded: Loaded, snapshot: Snapshot, prior: Record | None) -> str:
    if prior is None:
        return "not begun, or not in this run"
    return status_of(prior).value
