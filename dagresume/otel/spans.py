"""The spans of a run, made of what the engine says and of the records that have become durable.

A span for each drive of a run, below it one for each path, below that one for each attempt, which is the
current span in the body; and one for each transaction. A path ends when its record is durable, an attempt
when its body has ended. A drive that goes on with a run links to the one before it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final

from opentelemetry import context as contexts
from opentelemetry import metrics, propagate, trace
from opentelemetry.trace import Link, Span, Status, StatusCode

from dagresume import events as ev
from dagresume.events import Record, RunStatus
from dagresume.otel.elsewhere import attached
from dagresume.otel.metrics import Instruments
from dagresume.store import Committed, Outcome, Owned, Unit

__all__ = ["ATTRIBUTES", "OpenTelemetry"]

ATTRIBUTES: Final[Mapping[str, str]] = {
    "dagresume.workflow": "the workflow's name",
    "dagresume.run_id": "the run",
    "dagresume.node": "the node's id, which is the span's name too",
    "dagresume.path": "the path, with the number of its item or round",
    "dagresume.attempt": "the number of the attempt, counted over all processes",
    "dagresume.status": "how a run, a path or an attempt ended",
    "dagresume.reason": "the machine-readable reason beside it",
    "dagresume.executed": "of a run: paths whose function has run in this drive",
    "dagresume.reused": "of a run: paths that had completed before this drive began",
    "dagresume.skipped": "of a run: paths that were skipped in this drive",
    "dagresume.failed": "of a run: paths that failed in this drive",
    "dagresume.usage.tokens_in": "what an attempt used up, likewise `tokens_out`, `cost` and others",
    "dagresume.commit.units": "of a transaction: the units in it, each of one run",
    "dagresume.commit.rows": "of a transaction: its rows",
    "dagresume.commit.refused": "of a transaction: units that were not written",
}
"""Every attribute of our spans. Inputs, outputs and what secrets hide are in none of them."""

_ENDS: Final = {
    ev.COMPLETED: "completed",
    ev.FAILED: "failed",
    ev.SKIPPED: "skipped",
    ev.INTERRUPTED: "interrupted",
    ev.CANCELLED: "cancelled",
    ev.WITHDRAWN: "pending",
    ev.RESET: "pending",
    ev.COMPENSATED: "compensated",
    ev.UNDO_FAILED: "undo_failed",
}
_BAD: Final = frozenset({RunStatus.FAILED, RunStatus.INTERRUPTED})


def _enclosing(path: str) -> str | None:
    """Give the path that this one is a part of; None: of the run itself."""
    if path.endswith("]"):
        return path[: path.rindex("[")]
    return path.rpartition("/")[0] or None


def _node(path: str) -> str:
    return path.rpartition("/")[2].partition("[")[0]


class _Drive:
    """One run while it is driven here: its span, and those that are open below it."""

    def __init__(self, run: Any, span: Span) -> None:
        self.run, self.span = run, span
        self.context = trace.set_span_in_context(span)
        self.paths: dict[str, tuple[Span, contexts.Context]] = {}
        self.attempts: dict[tuple[str, int], Span] = {}
        self.counted: Counter[str] = Counter()


class OpenTelemetry:
    """Makes spans and metrics of what an engine does: `Engine(observer=OpenTelemetry())`.

    `tracer_provider`, `meter_provider`: others than those the process has set. Without the SDK everything it
    does comes to nothing. One may serve several engines.
    """

    def __init__(self, *, tracer_provider: Any = None, meter_provider: Any = None) -> None:
        ours = version("dagresume")
        self._tracer = trace.get_tracer("dagresume", ours, tracer_provider)
        self._instruments = Instruments(metrics.get_meter("dagresume", ours, meter_provider))
        self._drives: dict[str, _Drive] = {}

    # -- what the engine says -------------------------------------------------------------------------

    def opens(self, run: Any, carrier: Mapping[str, str]) -> Mapping[str, str]:
        """Begin the span of a drive, below whatever span its caller is in; gives its trace context."""
        told = {"dagresume.workflow": run.workflow, "dagresume.run_id": run.run_id}
        before = trace.get_current_span(propagate.extract(carrier, contexts.Context())).get_span_context()
        links = [Link(before)] if before.is_valid else []
        name = f"{'undo' if run.status is RunStatus.ROLLING_BACK else 'run'} {run.workflow}"
        span = self._tracer.start_span(name, attributes=told, links=links, start_time=run.now() * 1000)
        drive = self._drives[run.run_id] = _Drive(run, span)
        run.ended.add_done_callback(functools.partial(self._ended, drive))
        contexts.attach(drive.context)
        kept: dict[str, str] = {}
        propagate.inject(kept, drive.context)
        return kept

    def begins(self, job: Any) -> None:
        """Begin the span of an attempt, and that of its path if it is its first one here; it is the current
        one in the body.
        """
        drive = self._drives.get(job.run.run_id)
        if drive is None:
            return
        run, path, node = drive.run, job.path, job.vertex.id
        at = run.now() * 1000
        told = {"dagresume.path": path, "dagresume.node": node, "dagresume.attempt": job.attempt}
        name = f"attempt {node}" if job.run.status is not RunStatus.ROLLING_BACK else f"undo {node}"
        span = self._tracer.start_span(name, self._path(drive, path, at), attributes=told, start_time=at)
        drive.attempts[path, job.attempt] = span
        contexts.attach(trace.set_span_in_context(span))
        self._instruments.count("dagresume.attempts", workflow=run.workflow, node=node)
        if job.attempt > 1:
            self._instruments.count("dagresume.retries", workflow=run.workflow, node=node)

    def around(self) -> Callable[..., Any] | None:
        """Give what attaches the span of the attempt in another process."""
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        return functools.partial(attached, carrier) if carrier else None

    def commits(self, units: Sequence[Unit]) -> Callable[[Sequence[Outcome]], None]:
        """Begin the span of a transaction: below the run if all of it is of one, else with links to them."""
        drives = {id(drive): drive for unit in units if (drive := self._drive_of(unit)) is not None}
        clock = next((drive.run for drive in drives.values()), None)
        if clock is None:
            return lambda outcomes: None
        told = {"dagresume.commit.units": len(units), "dagresume.commit.rows": _rows(units)}
        begun = clock.now()
        alone = next(iter(drives.values())) if len(drives) == 1 else None
        span = self._tracer.start_span(
            "commit",
            contexts.Context() if alone is None else alone.context,
            attributes=told,
            links=[] if alone is not None else [Link(d.span.get_span_context()) for d in drives.values()],
            start_time=begun * 1000,
        )
        return functools.partial(self._committed, units, span, clock, begun)

    # -- what has become durable ----------------------------------------------------------------------

    def _committed(
        self, units: Sequence[Unit], span: Span, clock: Any, begun: int, outcomes: Sequence[Outcome]
    ) -> None:
        now = clock.now()
        refused = sum(type(outcome) is not Committed for outcome in outcomes)
        if refused:
            span.set_attribute("dagresume.commit.refused", refused)
            span.set_status(Status(StatusCode.ERROR))
        span.end(now * 1000)
        self._instruments.note("dagresume.commit.duration", [(now - begun) / 1e6])
        self._instruments.note("dagresume.commit.rows", [_rows(units)])
        for unit, outcome in zip(units, outcomes, strict=True):
            drive = self._drive_of(unit) if type(outcome) is Committed else None
            if drive is None:
                continue
            if getattr(unit, "timed", False):
                waited = max(0.0, drive.run.services.journal.durable_at - unit.appended)  # type: ignore[attr-defined]
                self._instruments.note("dagresume.checkpoint.latency", [waited])
            for record in unit.records:
                self._durable(drive, record, now * 1000)

    def _drive_of(self, unit: Unit) -> _Drive | None:
        run = getattr(unit, "run", None)
        if run is not None:
            return self._drives.get(run.run_id)
        if isinstance(unit.guard, Owned):  # of a rollback
            number = unit.guard.run
            return next((drive for drive in self._drives.values() if drive.run.owned.run == number), None)
        return None

    def _durable(self, drive: _Drive, record: Record, now: int) -> None:
        path = record.path
        if path is None:
            if record.kind == ev.RUN_CLAIMED:
                self._instruments.count("dagresume.recoveries", workflow=drive.run.workflow)
            return
        if record.kind == ev.WAITING or record.kind == ev.UNDO_STARTED:
            self._path(drive, path, record.at * 1000)
        elif record.kind in _ENDS:
            self._settle(drive, path, record, now)

    def _settle(self, drive: _Drive, path: str, record: Record, now: int) -> None:
        status = _ENDS[record.kind]
        facts = record.facts
        told: dict[str, Any] = {"dagresume.status": status}
        if record.reason is not None:
            told["dagresume.reason"] = record.reason
        told |= {f"dagresume.usage.{name}": used for name, used in facts.get("usage", {}).items()}
        self._end_attempt(drive, record, told, facts if status in {"failed", "undo_failed"} else None)
        if record.kind == ev.FAILED and record.reason == ev.RETRY:
            return
        drive.counted[status] += 1
        if status in {"completed", "failed"}:
            self._path(drive, path, record.at * 1000)  # it may have ended without a body, by a person's word
        span, _ = drive.paths.pop(path, (None, None))
        if span is not None:
            _close(span, told, now, status == "failed")
        if record.kind in {ev.RESET, ev.WITHDRAWN}:
            return
        node = _node(path)
        self._instruments.count("dagresume.nodes", workflow=drive.run.workflow, node=node, status=status)
        if record.took is not None and status == "completed":
            self._instruments.note(
                "dagresume.node.duration", [record.took / 1e6], workflow=drive.run.workflow, node=node
            )

    def _path(self, drive: _Drive, path: str, at: int) -> contexts.Context:
        """Give the context of a path's span; it and those around it begin now if they have not."""
        missing = []
        place: str | None = path
        while place is not None and place not in drive.paths:
            missing.append(place)
            place = _enclosing(place)
        around = drive.context if place is None else drive.paths[place][1]
        for name in reversed(missing):
            told = {"dagresume.path": name, "dagresume.node": _node(name)}
            span = self._tracer.start_span(_node(name), around, attributes=told, start_time=at)
            around = trace.set_span_in_context(span)
            drive.paths[name] = span, around
        return around

    @staticmethod
    def _end_attempt(
        drive: _Drive, record: Record, told: Mapping[str, Any], failure: Mapping[str, Any] | None
    ) -> None:
        span = drive.attempts.pop((record.path or "", record.attempt or 1), None)
        if span is None:
            return
        at = record.at * 1000
        if failure is not None:
            said = {
                f"exception.{name}": str(failure.get(fact, ""))
                for name, fact in (("type", "type"), ("message", "message"), ("stacktrace", "traceback"))
            }
            span.add_event("exception", said, at)
        _close(span, told, at, failure is not None)

    def _ended(self, drive: _Drive, _: Any) -> None:
        """The drive is over: what is still open below it ends with it."""
        run, at = drive.run, drive.run.now() * 1000
        if self._drives.get(run.run_id) is drive:
            del self._drives[run.run_id]
        cut = {"dagresume.status": str(run.status)}
        for span in (*drive.attempts.values(), *(span for span, _ in reversed(drive.paths.values()))):
            _close(span, cut, at, bad=run.error is not None)
        drive.attempts.clear()
        drive.paths.clear()
        told: dict[str, Any] = {"dagresume.status": str(run.status)}
        if run.reason is not None:
            told["dagresume.reason"] = run.reason
        snapshot = getattr(run, "snapshot", None)
        if snapshot is not None:
            executed = len(run.executed)
            told |= {"dagresume.executed": executed, "dagresume.reused": _completed(snapshot)}
            told |= {f"dagresume.{name}": drive.counted[name] for name in ("skipped", "failed")}
        if run.error is not None:
            drive.span.add_event("exception", {"exception.type": type(run.error).__qualname__}, at)
        _close(drive.span, told, at, bad=run.error is not None or run.status in _BAD)
        self._instruments.count("dagresume.runs", workflow=run.workflow, status=str(run.status))


def _rows(units: Sequence[Unit]) -> int:
    return sum(len(unit.records) for unit in units)


def _completed(snapshot: Any) -> int:
    """Give how many paths had completed when the drive began, and stand."""
    return len(snapshot.paths) - sum(1 for _ in snapshot.unfinished())


def _close(span: Span, told: Mapping[str, Any], at: int, bad: bool) -> None:
    span.set_attributes(dict(told))
    if bad:
        span.set_status(Status(StatusCode.ERROR))
    span.end(at)
