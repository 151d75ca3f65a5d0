"""What happened to one path each time its run was driven, and why: read from the journal and the stored
definition, without any code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from unicodedata import normalize

from dagresume import words
from dagresume.clock import to_datetime
from dagresume.errors import DefinitionError
from dagresume.events import (
    CANCELLED,
    COMPENSATED,
    COMPLETED,
    COPIED,
    FAILED,
    INTERRUPTED,
    MIGRATED,
    MOVED,
    RESET,
    RETRY,
    RUN_CLAIMED,
    RUN_CREATED,
    SKIPPED,
    STARTED,
    WAITING,
    WITHDRAWN,
    Record,
    Snapshot,
    names,
    segments,
)
from dagresume.graphs import unfolded
from dagresume.store import Loaded
from dagresume.workflow import nearest

__all__ = ["Explanation", "Received", "Step", "explain"]

Told = Mapping[str, Any]
_KEPT: Final = frozenset({COPIED, MIGRATED, MOVED, "kept", "resolved", "passed"})
"""Reasons of a completion for which nothing was executed."""
_CUT_OFF: Final = frozenset({STARTED, INTERRUPTED, CANCELLED})


@dataclass(frozen=True, slots=True)
class Received:
    """What a parameter received: `source` is a path, or `input NAME` for a run input. `digest`: that of what
    it was then, in hex, None if that is not known. `changed`: whether it was another thing than the time
    before; None if there was none.
    """

    parameter: str
    source: str
    digest: str | None = None
    changed: bool | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What became of a path in one of the times its run was driven.

    `drive`: how it came to that (run, resume, retry, fork), `seq` and `at`: when. `did`: ran, reused,
    skipped, waited, copied, migrated, moved, kept, resolved, passed, not_reached, and `why`. `changed`: what
    it received that was another thing than before. `attempts`: their numbers; `outcome`: the last status.
    `code`: the hash of its function then, `code_changed` whether that is another than the time before.
    `received`: what came to it, if it ran or was reused. `cut_at`: when the attempt before was cut off.
    `seconds`: how long its last attempt took; `error`: what that ended with.
    """

    drive: str
    seq: int
    at: datetime
    did: str
    why: str | None
    changed: tuple[str, ...] = ()
    attempts: tuple[int, ...] = ()
    outcome: str | None = None
    code: str | None = None
    code_changed: bool = False
    received: tuple[Received, ...] = ()
    cut_at: datetime | None = None
    seconds: float | None = None
    error: str | None = None

    @property
    def sentence(self) -> str:
        """What was done with the path, and why, as one sentence."""
        return words.explained(self.did, self.why, self.changed, self.cut_at)

    def __str__(self) -> str:
        parts = [f"{words.local_time(self.at)}  {self.drive}: {_sentence(self)}"]
        if self.attempts:
            listed = ", ".join(map(str, self.attempts))
            parts.append(f"attempt{'s'[: len(self.attempts) > 1]} {listed}")
        if self.outcome is not None and self.did == "ran":
            parts.append(self.outcome)
        if self.code is not None:
            parts.append(f"code {self.code[:12]}{' (changed)' if self.code_changed else ''}")
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The history of one path, a step for each time its run was driven; `str()` is a text for people."""

    run_id: str
    path: str
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.path} in run {self.run_id}", *(f"  {step}" for step in self.steps)])


def _sentence(step: Step) -> str:
    told = words.EXPLAINED.get((step.did, step.why or "")) or words.EXPLAINED.get((step.did, ""))
    sentence = told or f"{step.did} ({step.why})"
    return f"{sentence}: {', '.join(step.changed)}" if step.changed else sentence


def explain(loaded: Loaded, path: str) -> Explanation:
    """Give the history of a path; DefinitionError if the run's definition has no such path."""
    path = normalize("NFC", path)
    graph = unfolded(loaded.graph)
    received = _received(graph, path)
    snapshot = Snapshot(loaded.records)
    _refuse_beyond(snapshot, path)
    story = _Story(loaded.records, path, received)
    return Explanation(loaded.row.run_id, path, tuple(story.steps()))


def _refuse_beyond(snapshot: Snapshot, path: str) -> None:
    """Refuse an item past the end of its map."""
    whole = ""
    for node, index in segments(path):
        whole += node
        count = snapshot.counts.get(whole)
        item = whole if index is None else f"{whole}[{index}]"
        if index is not None and count is not None and index >= count and item not in snapshot.paths:
            raise DefinitionError(f"there is no path {path!r} in this run: {whole} has {count} items.")
        whole = f"{item}/"


class _Story:
    def __init__(self, records: Sequence[Record], path: str, received: Mapping[str, tuple[str, str]]) -> None:
        self.path, self.parameters = path, received
        self.received = {called: where for called, where in received.values() if where}
        self.tried = 0  # the seq of the last attempt so far
        self.records = records
        self.codes: Mapping[str, str] = {}
        watched = {path, *self.received.values()}
        self.own = [record for record in records if record.path in watched]
        self.inputs: Mapping[str, str] = {}

    def steps(self) -> Iterator[Step]:
        """Give a step for each time the run was driven."""
        drives = list(self._drives())
        last: Record | None = None
        code: str | None = None
        for n, drive in enumerate(drives):
            end = drives[n + 1].seq if n + 1 < len(drives) else None
            mine = [r for r in self.own if r.path == self.path and _between(r, drive.seq, end)]
            mine = [record for record in mine if record.changes_path]
            facts = drive.facts
            self.codes = facts.get("codes", self.codes)
            before, code = code, self.codes.get(names(self.path), self.codes.get("*"))
            yield self._step(drive, mine, last, before, code, end or self.records[-1].seq or 0)
            last = mine[-1] if mine else last

    def _drives(self) -> Iterator[Record]:
        """Give the records with which driving began; a fork is made and claimed: that is one time."""
        forked = False
        for record in self.records:
            if record.kind == RUN_CREATED:
                forked = "forked_from" in record.facts
                yield record
            elif record.kind == RUN_CLAIMED:
                if not forked:
                    yield record
                forked = False

    def _step(
        self,
        drive: Record,
        mine: Sequence[Record],
        last: Record | None,
        before: str | None,
        code: str | None,
        end_seq: int,
    ) -> Step:
        facts = drive.facts
        did, why = _did(mine, last)
        attempts = tuple(dict.fromkeys(r.attempt or 1 for r in mine if _is_attempt(r)))
        other = before is not None and code != before
        changed: tuple[str, ...] = ()
        if did == "ran" and why == "asked" and facts.get("code_changed") and other:
            why = "code_changed"
        if did == "ran" and why == "input_changed":
            changed = self._changed(last, mine)
        tried = next((r.seq or 0 for r in mine if _is_attempt(r)), 0)
        received: tuple[Received, ...] = ()
        if did in {"ran", "reused"}:
            received = tuple(self._came(tried or self.tried, self.tried))
        self.tried = max((r.seq or 0 for r in mine if _is_attempt(r)), default=self.tried)
        end = mine[-1] if mine else None
        if did == "not_reached":
            changed = tuple(self._missing(end_seq))
        kind = "fork" if "forked_from" in facts else str(facts.get("by", "run"))
        shown = code if code not in {None, "unknown"} else None
        outcome = mine[-1] if mine else last
        return Step(
            kind, drive.seq or 0, to_datetime(drive.at), did, why, changed, attempts,
            None if outcome is None else _outcome(outcome), shown, other, received,
            to_datetime(last.at) if last is not None and why == "interrupted" else None,
            None if end is None or end.took is None else end.took / 1e6,
            _error(end) if end is not None and end.kind == FAILED else None,
        )  # fmt: skip

    def _missing(self, seq: int) -> Iterator[str]:
        """Give what it needs that had given nothing by then."""
        return (path for path in self.received.values() if self._digest(path, seq) is None)

    def _came(self, now: int, then: int) -> Iterator[Received]:
        """Give what each parameter received by the attempt of one seq, compared with that of another one."""
        for parameter, (called, path) in self.parameters.items():
            digest = self._digest(path, now) if path else None
            before = self._digest(path, then) if path and then else None
            changed = digest != before if digest is not None and before is not None else None
            yield Received(parameter, called, None if digest is None else digest.hex(), changed)

    def _changed(self, last: Record | None, mine: Sequence[Record]) -> tuple[str, ...]:
        """Name what the path received that is another thing now: by the digests of its parents, then and
        now.
        """
        then = self._completed_before(last)
        now = next((r.seq or 0 for r in mine if _is_attempt(r)), 0)
        return tuple(
            name
            for name, path in self.received.items()
            if self._digest(path, then) != self._digest(path, now)
        )

    def _completed_before(self, last: Record | None) -> int:
        end = 0 if last is None else last.seq or 0
        own = (r.seq or 0 for r in self.own if r.path == self.path and r.kind == COMPLETED)
        return max((seq for seq in own if seq <= end), default=0)

    def _digest(self, path: str, seq: int) -> bytes | None:
        """Give the digest of what a path had given by then."""
        done = [r for r in self.own if r.path == path and r.kind == COMPLETED and (r.seq or 0) <= seq]
        return (done[-1].digest or done[-1].input) if done else None


def _between(record: Record, start: int | None, end: int | None) -> bool:
    seq = record.seq or 0
    return seq >= (start or 0) and (end is None or seq < end)


def _is_attempt(record: Record) -> bool:
    """Say whether a record is of an attempt whose body began."""
    if record.kind in {STARTED, INTERRUPTED, CANCELLED}:
        return record.reason not in {COPIED, MIGRATED}
    if record.kind == FAILED:
        return record.reason not in {"resolved", "rejected"}
    return record.kind == COMPLETED and record.reason not in _KEPT and "seq" not in record.facts


def _did(mine: Sequence[Record], last: Record | None) -> tuple[str, str | None]:
    """Give what was done with a path in one time, and why."""
    if any(_is_attempt(record) for record in mine):
        return "ran", _why(mine, last)
    for record in reversed(mine):
        if record.kind == COMPLETED:
            return (record.reason, None) if record.reason else ("reused", "completed")
        if record.kind in {WAITING, SKIPPED, FAILED, COMPENSATED}:
            did = {WAITING: "waited", SKIPPED: "skipped", FAILED: "failed"}.get(record.kind, "undone")
            return did, record.reason
        if record.kind == WITHDRAWN:
            return "not_reached", record.reason
    if last is None or last.kind in {RESET, WITHDRAWN}:
        return "not_reached", None
    if last.kind == COMPLETED:
        return "reused", "completed"
    did = {SKIPPED: "skipped", WAITING: "waited", FAILED: "left"}.get(last.kind, "not_reached")
    return did, last.reason if did != "not_reached" else None


def _why(mine: Sequence[Record], last: Record | None) -> str:
    for record in mine:
        if _is_attempt(record):
            break
        if record.kind == RESET:
            return record.reason or "asked"
    if last is None or last.kind in {WITHDRAWN, SKIPPED}:
        return "new"
    if last.kind == RESET:
        return last.reason or "asked"
    if last.kind == FAILED:
        return "failed"
    if last.kind in _CUT_OFF:
        return "interrupted"
    return "input_changed"


def _error(record: Record) -> str:
    facts = record.facts
    return words.error_in_words(facts.get("type", ""), facts.get("message", ""))


def _outcome(record: Record) -> str:
    if record.kind == FAILED and record.reason == RETRY:
        return "waiting for its next try"
    return record.kind.removeprefix("node.")


# -- what a path receives -------------------------------------------------------------------------------


def _received(graph: Told, path: str) -> dict[str, tuple[str, str]]:
    """Give for each parameter of a path how what it receives is called, and from which path that is."""
    try:
        steps = segments(path)
    except ValueError as error:
        raise DefinitionError(str(error)) from None
    told: Told = {"body": graph}
    prefix = ""
    outer: dict[str, tuple[str, str]] = {}  # the inputs of the graph here: name → (called, path)
    for n, (node, index) in enumerate(steps):
        body = told.get("body", {"nodes": []})
        found = {each["id"]: each for each in body["nodes"]}
        if node not in found:
            near = nearest(node, found)
            hint = f" Did you mean {prefix + near!r}?" if near else ""
            raise DefinitionError(f"the run has no path {path!r}: there is no node {node!r}.{hint}")
        told = found[node]
        outer = dict(_sources(told, prefix, index, outer, found))
        if n + 1 < len(steps):
            prefix += node + ("" if index is None else f"[{index}]") + "/"
    return outer


def _sources(
    node: Told,
    prefix: str,
    index: int | None,
    inputs: Mapping[str, tuple[str, str]],
    beside: Mapping[str, Told],
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Give for each parameter how what it receives is called, and from which path that comes (empty: from no
    path).
    """
    lists = node.get("for_each") or {}
    state = node.get("state")
    for name, source in (node.get("parameters") or {}).items():
        if name == state and index:
            before = f"{prefix}{node['id']}[{index - 1}]"
            yield name, (before, before)
            continue
        told = str(node.get("initial", "")) if name == state else source
        kind, _, what = told.partition(" ")
        if kind == "item":
            what = lists[name]
            kind = "node" if what in beside else "input"
        if kind == "node":
            chained = name in lists and index is not None and "for_each" in beside[what]
            where = f"{prefix}{what}" + (f"[{index}]" if chained else "")
            yield name, (where, where)
        elif kind == "input":
            yield name, inputs.get(what, (f"input {what}", ""))
