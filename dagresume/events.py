"""What happens to a run, as immutable records, and what they mean together: the fold.

A `Record` is one row of the journal. `Snapshot.apply` is the only state machine: for every path the last
record with a status wins, in Python here and in SQL in the views. Paths follow the grammar
`id([n])?(/id([n])?)*`.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from functools import partial
from operator import itemgetter
from typing import Any, Final, NamedTuple, overload

from dagresume.clock import to_datetime
from dagresume.masks import HIDDEN

__all__ = [
    "Event",
    "NodeStatus",
    "Paths",
    "Record",
    "Records",
    "RunStatus",
    "Snapshot",
    "projection",
    "segments",
    "status_of",
]


class RunStatus(StrEnum):
    """The state of a run. Final: completed, cancelled, rolled_back. Resting: failed, interrupted, waiting."""

    PENDING = "pending"
    RUNNING = "running"
    WAITING = "waiting"
    COMPLETED = "completed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    CANCELLED = "cancelled"
    ROLLING_BACK = "rolling_back"
    ROLLED_BACK = "rolled_back"

    @property
    def final(self) -> bool:
        """Whether the run never goes on by itself from here."""
        return self in _FINAL


_FINAL: Final = frozenset({RunStatus.COMPLETED, RunStatus.CANCELLED, RunStatus.ROLLED_BACK})


class NodeStatus(StrEnum):
    """The state of a path. `upstream_failed` exists in views only: it is computed, never stored."""

    PENDING = "pending"
    RUNNING = "running"
    WAITING = "waiting"
    COMPLETED = "completed"
    FAILED = "failed"
    SKIPPED = "skipped"
    INTERRUPTED = "interrupted"
    CANCELLED = "cancelled"
    COMPENSATED = "compensated"
    UPSTREAM_FAILED = "upstream_failed"


class Record(NamedTuple):
    """One row of the journal, in the order of its columns. What is not known is None.

    `at` is microseconds UTC, `took` microseconds, `size` bytes of the packed output, `input` the
    fingerprint of what the path received and `digest` that of its output (16 bytes each), `data` small JSON,
    `output` the packed output.
    """

    kind: str
    attempt: int | None
    at: int
    path: str | None
    reason: str | None = None
    input: bytes | None = None
    digest: bytes | None = None
    size: int | None = None
    took: int | None = None
    data: str | None = None
    output: str | None = None
    seq: int | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """`data`, parsed."""
        return json.loads(self.data) if self.data else {}

    @property
    def changes_path(self) -> bool:
        """Whether it changes the state of its path: the last one that does says what that is."""
        return self.kind in _EXACT


STARTED: Final = "node.started"
COMPLETED: Final = "node.completed"
FAILED: Final = "node.failed"
SKIPPED: Final = "node.skipped"
INTERRUPTED: Final = "node.interrupted"
CANCELLED: Final = "node.cancelled"
RESET: Final = "node.reset"
WITHDRAWN: Final = "node.withdrawn"
WAITING: Final = "node.waiting"
COMPENSATED: Final = "node.compensated"
DECIDED: Final = "node.decided"
RESOLVED: Final = "node.resolved"
UNDO_STARTED: Final = "undo.started"
UNDO_FAILED: Final = "undo.failed"
STATE: Final = "node.state"
"""What an attempt saved of its own progress; changes no status, its output is the packed value."""
PROGRESS: Final = "node.progress"
"""How far an attempt says it is: `done`, `total`; changes no status."""

_EXACT: Final[Mapping[str, tuple[NodeStatus, str]]] = {
    STARTED: (NodeStatus.RUNNING, "running"),
    COMPLETED: (NodeStatus.COMPLETED, "success"),
    FAILED: (NodeStatus.FAILED, "failed"),
    SKIPPED: (NodeStatus.SKIPPED, "skipped"),
    INTERRUPTED: (NodeStatus.INTERRUPTED, "running"),
    CANCELLED: (NodeStatus.CANCELLED, "pending"),
    RESET: (NodeStatus.PENDING, "pending"),
    WITHDRAWN: (NodeStatus.PENDING, "pending"),
    WAITING: (NodeStatus.WAITING, "running"),
    COMPENSATED: (NodeStatus.COMPENSATED, "skipped"),
}

RUN_CREATED: Final = "run.created"
RUN_CLAIMED: Final = "run.claimed"
RUN_REVIVED: Final = "run.revived"
RUN_WAITING: Final = "run.waiting"
RUN_COMPLETED: Final = "run.completed"
RUN_FAILED: Final = "run.failed"
RUN_INTERRUPTED: Final = "run.interrupted"
RUN_CANCELLED: Final = "run.cancelled"
RUN_ROLLING_BACK: Final = "run.rolling_back"
RUN_ROLLED_BACK: Final = "run.rolled_back"
CANCEL_REQUESTED: Final = "run.cancel_requested"
SIGNALLED: Final = "run.signalled"
AUTO_RESUME: Final = "execution.auto_resume"
"""The engine goes on with a run by itself (R29): `attempt`, `max_attempts`, `policy`."""
AUTO_RESUME_SKIPPED: Final = "execution.auto_resume.skipped"
"""It does not, and the reason."""
LETTERS: Final = (CANCEL_REQUESTED, DECIDED, RESOLVED, SIGNALLED)
"""What anybody may append to a run: its owner acts on it, or whoever takes it up next."""

_RUN_STATUS: Final[Mapping[str, RunStatus]] = {
    RUN_CREATED: RunStatus.RUNNING,
    RUN_CLAIMED: RunStatus.RUNNING,
    RUN_REVIVED: RunStatus.RUNNING,
    RUN_WAITING: RunStatus.WAITING,
    RUN_COMPLETED: RunStatus.COMPLETED,
    RUN_FAILED: RunStatus.FAILED,
    RUN_INTERRUPTED: RunStatus.INTERRUPTED,
    RUN_CANCELLED: RunStatus.CANCELLED,
    RUN_ROLLING_BACK: RunStatus.ROLLING_BACK,
    RUN_ROLLED_BACK: RunStatus.ROLLED_BACK,
}
AUDITED: Final = (*_RUN_STATUS, *LETTERS, AUTO_RESUME, AUTO_RESUME_SKIPPED)
"""What was decided about runs, by people and by the engine."""
MOVED: Final = (
    "moved"  # reason: an item stands at another place of its list now; its output stays where it was
)
AGAIN: Final = "again"  # reason: it was blocked, and receives now what it had completed with
ONCE_UNCERTAIN: Final = "once_uncertain"  # reason: a call made once began and nobody knows how it ended
COPIED: Final = "copied"  # reason: a fork took the output over from another run
MIGRATED: Final = "migrated"  # reason: it completed under an older version of the definition
_TAKEN_OVER: Final = frozenset({COPIED, MIGRATED})
FROM_START: Final = "from_start"  # reason of a reset: the definition's recovery policy says so
RETRY: Final = "retry"  # reason of a failed attempt that is tried again by itself at data.retry_at
UNDO_FAILED_REASON: Final = "compensation_failed"
UNDO_RESTS: Final = frozenset({UNDO_FAILED_REASON, "cancelled", "shutdown", "not_stored"})
"""Reasons with which a run that rolls back is let go of: somebody has to go on with it."""
CONDITION: Final = "condition"  # reason of a skip: `when=` said no
CONDITION_FAILED: Final = "condition_failed"  # reason of a failure: `when=` raised; nothing of it began
HELD: Final = "held"  # reason of a wait: completed, its input changed, not idempotent; data.kept: its output


R5_WORDS: Final[Mapping[str, str]] = {kind: word for kind, (_, word) in _EXACT.items()}
"""Each kind of event that changes the state of its path → the word of the checkpoint record for it (R5)."""


def has_output(record: Record) -> bool:
    """Say whether this record tells of an output: of a path that has completed, also if it is blocked now."""
    return record.kind == COMPLETED or (record.kind == WITHDRAWN and record.digest is not None)


def status_of(record: Record | None) -> NodeStatus:
    """Give the exact status that this record, the last one of its path, means."""
    if record is None:
        return NodeStatus.PENDING
    if record.kind == FAILED and record.reason == RETRY:
        return NodeStatus.WAITING
    return _EXACT[record.kind][0]


new_record: Final[Callable[[tuple[Any, ...]], Record]] = partial(tuple.__new__, Record)
"""Makes a record of all its columns in order, five times as fast as by their names."""


Row = tuple[Any, ...]
"""The columns of a record as a store gives them; or a `Record`, which is such a tuple."""
_PATH, _DATA, _SEQ = map(Record._fields.index, ("path", "data", "seq"))


class Records(Sequence[Record]):
    """Records of a journal, each made when it is looked at.

    A million named tuples are looked at by the garbage collector again and again; plain ones of plain values
    are let be after the first time.
    """

    __slots__ = ("rows",)

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> Records: ...
    def __getitem__(self, index: int | slice) -> Record | Records:
        return Records(self.rows[index]) if isinstance(index, slice) else new_record(self.rows[index])

    def __iter__(self) -> Iterator[Record]:
        return map(new_record, self.rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self.rows) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def column(self, name: str) -> list[Any]:
        """Give one column of all of them."""
        return list(map(itemgetter(Record._fields.index(name)), self.rows))

    @property
    def hold_outputs(self) -> bool:
        """Whether each tells of an output and holds it itself."""
        return all(row[0] == COMPLETED and row[_DATA] is None for row in self.rows)


class Paths(dict[str, Record]):
    """The last record of each path; like `Records`, each made when it is looked at."""

    __slots__ = ()

    def get(self, path: str, default: Any = None) -> Any:
        row = _get(self, path)
        return default if row is None else row if type(row) is Record else new_record(row)

    def __getitem__(self, path: str) -> Record:
        return new_record(super().__getitem__(path))

    def items(self) -> Iterator[tuple[str, Record]]:  # type: ignore[override]  # once, in order
        return zip(self, self.values(), strict=True)

    def values(self) -> Iterator[Record]:  # type: ignore[override]  # likewise
        return map(new_record, dict.values(self))

    def copy(self) -> Paths:
        return Paths(self)

    def find(self, paths: Iterable[str]) -> list[Row | None]:
        """Give what is there for each of these paths, as it lies there."""
        return [_get(self, path) for path in paths]

    def telling(self) -> Iterator[tuple[str, Record]]:
        """Give the paths whose last record has data."""
        rows = [(path, row) for path, row in dict.items(self) if row[_DATA] is not None]
        return ((path, new_record(row)) for path, row in rows)


_get: Final[Callable[[dict[str, Any], str], Row | None]] = dict.get


def node_record(
    kind: str, path: str, attempt: int | None, at: int, reason: str | None = None, **facts: Any
) -> Record:
    """Make the record of one thing that happened to a path; `facts` become its data."""
    data = json.dumps(facts) if facts else None
    return Record(kind, attempt, at, path, reason, data=data)


def wait_cancelled(path: str, attempt: int | None, at: int) -> Record:
    """Make the record that a path waits no more, since its run was cancelled."""
    return node_record(CANCELLED, path, attempt, at, "cancelled")


def run_record(kind: str, at: int, reason: str | None = None, **facts: Any) -> Record:
    """Make the record of one thing that happened to a run."""
    return Record(kind, None, at, None, reason, data=json.dumps(facts) if facts else None)


def projection(record: Record) -> dict[str, Any] | None:
    """Give the columns of the run's row that this record sets; None if it sets none.

    The row of a run is a projection of its journal: the store applies this in the transaction that holds the
    record, and can rebuild the row from the records alone.
    """
    status = _RUN_STATUS.get(record.kind)
    if status is None:
        return {"wake_at": record.at} if record.kind in _WAKING else None
    columns: dict[str, Any] = {"status": status.value, "reason": record.reason, "updated_at": record.at}
    if record.kind in _COUNTING:
        facts = record.facts
        columns |= {name: facts[name] for name in ("auto_resumes", "recoveries") if name in facts}
    if record.kind in {RUN_CLAIMED, RUN_REVIVED}:
        columns |= {"finished_at": None, "wake_at": None}
        if record.kind == RUN_CLAIMED:  # revived, it has its key still, unless a newer run took it meanwhile
            columns["holds_key"] = 1
    elif status is not RunStatus.RUNNING:
        facts = record.facts
        columns["finished_at"] = None if status in _UNFINISHED else facts.get("last_seen", record.at)
        columns["wake_at"] = facts.get("wake_at")
        if "usage" in facts:
            columns["usage"] = json.dumps(facts["usage"])
        if status in {RunStatus.CANCELLED, RunStatus.ROLLED_BACK}:
            columns["holds_key"] = 0
    return columns


_WAKING: Final = frozenset({DECIDED, RESOLVED, SIGNALLED})


def status_set_by(record: Record) -> RunStatus | None:
    """Give the status that a record gives its run; None if it leaves that as it is."""
    return _RUN_STATUS.get(record.kind)


_COUNTING: Final = frozenset({RUN_CLAIMED, RUN_ROLLING_BACK})
_UNFINISHED: Final = frozenset({RunStatus.WAITING, RunStatus.ROLLING_BACK})
_KEPT: Final = frozenset({RunStatus.RUNNING, RunStatus.ROLLING_BACK})


def releases(record: Record) -> bool:
    """Say whether the owner lets go of the run with this record, if it is the owner who writes it.

    One that rolls back keeps it, until it says that not everything could be undone.
    """
    return _RUN_STATUS.get(record.kind, RunStatus.RUNNING) not in _KEPT or (
        record.kind == RUN_ROLLING_BACK and record.reason in UNDO_RESTS
    )


def unread(record: Record) -> int | None:
    """Give the seq of the last letter the owner has read, if it lets go of the run to wait with this record.

    A letter that came after it wakes the run at once.
    """
    return record.facts.get("read", 0) if record.kind == RUN_WAITING else None


class Event(NamedTuple):
    """One immutable thing that happened to a run, as the public API shows it. `at` is an aware UTC
    datetime.
    """

    seq: int
    run_id: str
    kind: str
    path: str | None
    attempt: int | None
    at: datetime
    reason: str | None
    data: dict[str, Any]

    @classmethod
    def of(cls, run_id: str, record: Record) -> Event:
        """Give the public picture of a stored record."""
        data = record.facts
        if "secrets" in data and "inputs" in data:  # a digest tells whoever guesses a value that it is right
            data["inputs"] = dict.fromkeys(data["inputs"], HIDDEN)
        if record.took is not None:
            data["seconds"] = record.took / 1e6
        if record.size is not None:
            data["size"] = record.size
        return cls(
            record.seq or 0,
            run_id,
            record.kind,
            record.path,
            record.attempt,
            to_datetime(record.at),
            record.reason,
            data,
        )


# -- paths ----------------------------------------------------------------------------------------------

_SEGMENT: Final = re.compile(r"([^/\[\]]+)(?:\[(0|[1-9]\d*)\])?(/|$)")


def segments(path: str) -> list[tuple[str, int | None]]:
    """Split a path into (node id, index or None); ValueError if it breaks the grammar."""
    found: list[tuple[str, int | None]] = []
    end = 0
    while match := _SEGMENT.match(path, end):
        found.append((match[1], None if match[2] is None else int(match[2])))
        end = match.end()
        if not match[3]:
            break
    if end != len(path) or not path or path.endswith("/"):
        raise ValueError(f"{path!r} is not a path: write node, node[3] or outer[2]/inner")
    return found


def names(path: str) -> str:
    """Give a path without its indexes: `screen[3]/evaluate` → `screen/evaluate`."""
    return "/".join(node for node, _ in segments(path)) if "[" in path else path


def enclosing(path: str) -> list[str]:
    """Give what encloses a path, innermost first: `a[1]/b[2]` → `a[1]/b`, `a[1]`, `a`."""
    found = []
    while path:
        if path.endswith("]"):
            path = path[: path.rindex("[")]
        elif "/" in path:
            path = path[: path.rindex("/")]
        else:
            break
        found.append(path)
    return found


_NOTES: Final[Mapping[str, str]] = {
    DECIDED: "decisions",
    RESOLVED: "resolutions",
    UNDO_STARTED: "undone",
    UNDO_FAILED: "undone",
}


# -- the fold -------------------------------------------------------------------------------------------


class Snapshot:
    """The state of one run: the fold of its records, in order.

    `paths` holds the last record with a status of every path that has one. `generations` counts how often a
    completed path was reset; `before` the attempts a path had used up when a person last gave a fresh retry
    budget. `decisions` and `resolutions` are the last letter of each path, `signals` those that no wait has
    taken, by seq; `read` is the seq of the last letter. `used` is what all attempts used up, `budget` what a
    person set. `permitted`: nodes of which a person said that they run again if their input changes ("*":
    all). `secrets`: the names whose values are never shown. `undone`: the last record of every undo that was
    begun. `states` holds what each path saved last, until it is run again after it had completed. `forgiven`:
    up to which attempt somebody answered for a path whose effect was not known, and where the call made once
    is kept that was asked about. `coded`: the code hashes the run was driven with, each with the seq from
    which on. `forked`: it was made for whoever claims it. `recoveries`: how often somebody went on with it
    after it had stopped; `auto_resumes`: how often in a row nobody had asked for that.
    """

    __slots__ = (
        "_met",
        "auto_resumes",
        "before",
        "budget",
        "cancel_by",
        "carrier",
        "claims",
        "coded",
        "codes",
        "counts",
        "decisions",
        "forgiven",
        "forked",
        "fresh_seq",
        "generations",
        "last_seq",
        "paths",
        "permitted",
        "read",
        "reason",
        "recoveries",
        "resolutions",
        "secrets",
        "signals",
        "started_at",
        "states",
        "status",
        "status_at",
        "undone",
        "used",
    )

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.paths = Paths()
        self._met: dict[str, None] = {}  # paths that had a record of another kind than that they completed
        self.generations: dict[str, int] = {}
        self.before: dict[str, int] = {}
        self.codes: dict[str, str] = {}
        self.coded: list[tuple[int, dict[str, str]]] = []
        self.counts: dict[str, int] = {}
        self.states: dict[str, Record] = {}
        self.forgiven: dict[str, tuple[int, list[str] | None]] = {}
        self.status = RunStatus.PENDING
        self.reason: str | None = None
        self.status_at = self.started_at = 0
        self.last_seq = self.fresh_seq = 0
        self.forked = False
        self.claims = self.recoveries = self.auto_resumes = 0
        self.cancel_by: str | None = None
        self.decisions: dict[str, Record] = {}
        self.resolutions: dict[str, Record] = {}
        self.signals: dict[int, Record] = {}
        self.used: dict[str, float] = {}
        self.budget: dict[str, float | None] | None = None
        self.permitted: frozenset[str] = frozenset()
        self.secrets: frozenset[str] = frozenset()
        self.read = 0
        self.undone: dict[str, Record] = {}
        self.carrier: dict[str, str] = {}
        self.fold(records)

    def fold(self, records: Iterable[Record]) -> None:
        """Apply records in their order; in place, one dictionary store for the common kind."""
        paths: dict[str, Row] = self.paths  # type: ignore[assignment]  # which makes records of them
        row: Row | None = None
        for row in records.rows if isinstance(records, Records) else records:
            if row[0] == COMPLETED:
                paths[row[_PATH]] = row
                if row[_DATA] is not None:
                    self._note(new_record(row))
            else:
                self.apply(new_record(row))
        if row is not None and row[_SEQ] is not None:
            self.last_seq = row[_SEQ]

    def apply(self, record: Record) -> None:
        """Apply one record."""
        if record.path is None:
            self._apply_to_run(record)
        elif record.kind in _EXACT:
            self._apply_to_path(record.path, record)
            if record.data is not None and record.kind != STARTED:
                self._note(record)
        elif record.kind in _NOTES:
            notes: dict[str, Record] = getattr(self, _NOTES[record.kind])
            notes[record.path] = record
            if record.kind in LETTERS:
                self.read = record.seq or self.read
        elif record.kind == STATE:
            self.states[record.path] = record

    def _note(self, record: Record) -> None:
        """Note what an attempt used up, how many items a map has, and which signal a wait has taken.

        A record whose output lies with another one, or in another run, says again what was counted.
        """
        facts = record.facts
        if "seq" not in facts and record.reason not in _TAKEN_OVER:
            for name, amount in facts.get("usage", {}).items():
                self.used[name] = self.used.get(name, 0) + amount
        if "count" in facts:
            self.counts[record.path or ""] = facts["count"]
        if "signal" in facts:
            self.signals.pop(facts["signal"], None)

    def _apply_to_path(self, path: str, record: Record) -> None:
        previous = self.paths.get(path)
        if previous is not None:
            if record.kind == RESET:
                self._reset(path, previous, record)
            if path not in self.before and (previous.seq or 0) < self.fresh_seq:
                self.before[path] = previous.attempt or 0
        if record.kind == STARTED and record.data is not None:
            self.counts[path] = record.facts.get("count", 0)
        self.paths[path] = record
        if record.kind != COMPLETED:
            self._met[path] = None

    def unfinished(self) -> Iterator[tuple[str, Record]]:
        """Give the paths whose last record is not that they completed."""
        found = ((path, self.paths[path]) for path in self._met)
        return ((path, record) for path, record in found if record.kind != COMPLETED)

    def _reset(self, path: str, previous: Record, record: Record) -> None:
        if has_output(previous) or previous.kind == WAITING:
            self.generations[path] = self.generations.get(path, 0) + 1
            self.states.pop(path, None)
        if record.reason == FROM_START:
            self.before[path] = previous.attempt or 0
        if record.reason in {"asked", "not_done"}:
            once = previous.facts.get("once") if previous.reason == ONCE_UNCERTAIN else None
            self.forgiven[path] = (record.attempt or 0, once)

    def _apply_to_run(self, record: Record) -> None:
        if record.kind in LETTERS:
            self.read = record.seq or self.read
            if record.kind == CANCEL_REQUESTED:
                self.cancel_by = record.facts.get("by", "")
            else:
                self.signals[record.seq or 0] = record
            return
        status = _RUN_STATUS.get(record.kind)
        if status is None:
            return
        self.status, self.reason, self.status_at = status, record.reason, record.at
        if record.kind in _COUNTING:
            self._recount(record.facts)
        if record.kind == RUN_CREATED:
            facts = record.facts
            self.started_at = record.at
            self.forked = "forked_from" in facts
            self.carrier = facts.get("carrier", {})
            self._set_rules(facts, record.seq or 0)
        elif record.kind == RUN_CLAIMED:
            facts = record.facts
            self.claims += 1
            self.cancel_by = None
            self._set_rules(facts, record.seq or 0)
            if not facts.get("automatic"):
                self.fresh_seq = record.seq or 0
                self.before.clear()

    def _recount(self, facts: Mapping[str, Any]) -> None:
        self.recoveries = facts.get("recoveries", self.recoveries)
        self.auto_resumes = facts.get("auto_resumes", self.auto_resumes)
        self.carrier = facts.get("carrier", self.carrier)

    def _set_rules(self, facts: Mapping[str, Any], seq: int) -> None:
        if "codes" in facts:
            self.codes = facts["codes"]
            self.coded.append((seq, self.codes))
        self.budget = facts.get("budget", self.budget)
        self.secrets |= frozenset(facts.get("secrets", ()))
        self.permitted |= frozenset(facts.get("permitted", ()))

    def permits(self, path: str) -> bool:
        """Say whether a person allowed this path to run again if its input changes, although it is not
        idempotent.
        """
        return bool(self.permitted) and ("*" in self.permitted or names(path) in self.permitted)

    def code_of(self, record: Record) -> str | None:
        """Give the hash of the code that made the output this record stands for; None if that is not
        known.
        """
        facts = record.facts if record.data is not None else {}
        if "code" in facts:
            return str(facts["code"])
        seq = facts.get("seq") or record.seq or 0
        place = bisect_right(self.coded, seq, key=itemgetter(0)) - 1
        codes = self.coded[place][1] if place >= 0 else {}
        return codes.get(names(record.path or ""), codes.get("*"))

    def attempts_used(self, path: str) -> int:
        """Give how many tries this path has used up of its present retry budget."""
        record = self.paths.get(path)
        if record is None:
            return 0
        if (record.seq or 0) < self.fresh_seq:
            return 0
        return (record.attempt or 0) - self.before.get(path, 0)
