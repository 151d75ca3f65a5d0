"""What a run waits for: a person's word, a signal, the end of a sleep, what to do with a path that is held.

A wait is a record with the time it is over, and an entry here while a process drives the run. Nothing else is
held: a run that only waits can be let go of, and goes on in another process from its records and the letters
that came.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from dagresume import codec
from dagresume import events as ev
from dagresume.clock import Timer, to_datetime
from dagresume.errors import NodeTimeout
from dagresume.events import Record
from dagresume.jobs import Driver, Step
from dagresume.observe import tell
from dagresume.planner import Vertex
from dagresume.policy import NodeFailure
from dagresume.results import Stored
from dagresume.workflow import Approval, Sleep, WaitFor

__all__ = ["Waiting", "Waits"]


@dataclass(slots=True, eq=False)
class Waiting:
    """One path that waits. `due`: when that is over by itself, microseconds UTC. `kept`: where its old output
    is.
    """

    scope: Any
    vertex: Vertex
    path: str
    reason: str
    attempt: int
    fingerprint: bytes
    feed: Any = None
    index: int = -1
    due: int | None = None
    kept: dict[str, Any] | None = None
    timer: Timer | None = None


class Waits:
    """The open waits of one run, and what letters and time do to them."""

    def __init__(self, run: Driver) -> None:
        self._run = run
        self.open: dict[str, Waiting] = {}
        self.signals = run.snapshot.signals
        self.read = run.snapshot.read
        """The seq of the last letter that was looked at."""

    @property
    def for_people(self) -> bool:
        """Whether something else than time has to come."""
        return any(waiting.reason != "sleep" for waiting in self.open.values())

    @property
    def reason(self) -> str:
        """Why the run waits: what only a person can say comes first."""
        reasons = {waiting.reason for waiting in self.open.values()}
        return next(word for word in (ev.HELD, "approval", "event", "sleep") if word in reasons)

    @property
    def wake_at(self) -> int | None:
        """When the first of the waits is over by itself."""
        return min((w.due for w in self.open.values() if w.due is not None), default=None)

    def start(self) -> None:
        """Let time end waits from now on: the run is ours, and can be written to."""
        for waiting in self.open.values():
            self._set_timer(waiting)

    def stop(self) -> None:
        """Let no time end a wait any more: the run is being let go of."""
        for waiting in self.open.values():
            if waiting.timer is not None:
                waiting.timer.cancel()
                waiting.timer = None

    def cancelled(self) -> list[Record]:
        """Give the records that nothing waits any more. What is held keeps where its output is."""
        now = self._run.now()
        waits = (w for w in self.open.values() if w.reason != ev.HELD)
        return [ev.wait_cancelled(w.path, w.attempt, now) for w in waits]

    # -- opening --------------------------------------------------------------------------------------

    def begin(
        self,
        scope: Any,
        vertex: Vertex,
        path: str,
        prior: Record | None,
        step: Step,
        *,
        fingerprint: bytes,
        feed: Any = None,
        index: int = -1,
    ) -> None:
        """Let a path wait; if what it waits for is there already, it ends with this step."""
        open_before = prior is not None and prior.kind == ev.WAITING
        attempt = (prior.attempt or 1) if open_before and prior else self._run.next_attempt(path)
        waiting = Waiting(scope, vertex, path, _reason(vertex), attempt, fingerprint, feed, index)
        if waiting.reason == ev.HELD:
            waiting.attempt = (prior.attempt or 1) if prior else 1
            waiting.kept = prior.facts.get("kept") if open_before and prior else _kept(prior)
        elif open_before and prior is not None:
            waiting.due = prior.facts.get("due")
        else:
            waiting.due = self._due(vertex)
        if not open_before and not self._is_over(waiting):
            step.records.append(self._record(waiting))
        word = self._run.snapshot.decisions.get(path) if open_before else None
        if word is not None and prior is not None and (word.seq or 0) > (prior.seq or 0):
            self._decided(waiting, word, step)
        elif waiting.kept is not None and waiting.kept.get("input") == fingerprint.hex():
            self._keep(waiting, step)
        elif isinstance(vertex.node.what, WaitFor) and (signal := self._signal(vertex.node.what.event)):
            self._signalled(waiting, signal, step)
        elif self._is_over(waiting):
            self._over(waiting, step)
        else:
            self.open[path] = waiting
            if self._run.owned.run:
                self._set_timer(waiting)

    def _due(self, vertex: Vertex) -> int | None:
        what = vertex.node.what
        seconds = what.seconds if isinstance(what, Sleep) else vertex.node.timeout
        return None if seconds is None else self._run.now() + round(seconds * 1e6)

    def _is_over(self, waiting: Waiting) -> bool:
        return waiting.due is not None and waiting.due <= self._run.now()

    def _set_timer(self, waiting: Waiting) -> None:
        if waiting.due is not None:
            seconds = max(0.0, (waiting.due - self._run.now()) / 1e6)
            # clocks that differ a little must not make it ask again and again
            waiting.timer = self._run.services.clock.call_later(seconds + 0.001, self._time_is_over, waiting)

    def _record(self, waiting: Waiting) -> Record:
        facts: dict[str, Any] = {}
        what = waiting.vertex.node.what
        if waiting.due is not None:
            facts["due"] = waiting.due
        if waiting.kept is not None:
            facts["kept"] = waiting.kept
        elif isinstance(what, Approval):
            facts["prompt"] = what.prompt
        elif isinstance(what, WaitFor):
            facts["event"] = what.event
        at = self._run.now()
        record = ev.node_record(ev.WAITING, waiting.path, waiting.attempt, at, waiting.reason, **facts)
        return record._replace(input=waiting.fingerprint)

    # -- what comes -----------------------------------------------------------------------------------

    def letter(self, record: Record) -> None:
        """Act on a letter, once, however often it is brought."""
        if (record.seq or 0) <= self.read or self._run.stopping is not None:
            return  # what comes while the run is let go of is found by whoever takes it up
        self.read = record.seq or 0
        if record.kind == ev.SIGNALLED:
            self.signals[self.read] = record
            event = record.facts.get("event")
            names = ((w, w.vertex.node.what) for w in self.open.values())
            waiting = next(
                (w for w, what in names if isinstance(what, WaitFor) and what.event == event), None
            )
            self._act(waiting, self._signalled, record)
        elif record.kind == ev.DECIDED:
            self._run.snapshot.decisions[record.path or ""] = record  # its wait may not be open here yet
            self._act(self.open.get(record.path or ""), self._decided, record)

    def _act(self, waiting: Waiting | None, act: Any, *what: Any) -> None:
        """End a wait in a step of its own; not while the run is being stopped: whoever resumes it does it."""
        if waiting is None or self._run.stopping is not None:
            return
        step = Step(self._run, [])
        self._close(waiting)
        act(waiting, *what, step)
        self._run.hand_over(step)

    def _time_is_over(self, waiting: Waiting) -> None:
        waiting.timer = None
        if waiting.path not in self.open:
            return
        if self._is_over(waiting):
            self._act(waiting, self._over)
        else:  # the wall clock went back, or two clocks differ
            self._set_timer(waiting)

    def _close(self, waiting: Waiting) -> None:
        self.open.pop(waiting.path, None)
        if waiting.timer is not None:
            waiting.timer.cancel()
            waiting.timer = None

    def _signal(self, event: str) -> Record | None:
        return next((s for s in self.signals.values() if s.facts.get("event") == event), None)

    # -- how waits end --------------------------------------------------------------------------------

    def _decided(self, waiting: Waiting, word: Record, step: Step) -> None:
        facts = word.facts
        if waiting.kept is not None:
            if facts["approved"]:
                self._again(waiting, step)
            else:
                self._keep(waiting, step)
        elif facts["approved"]:
            told = {name: facts[name] for name in ("approved", "by", "comment")}
            text = codec.pack(told | {"at": to_datetime(word.at).isoformat()})
            self._completed(waiting, None, codec.digest(text), step, None, text)
        else:
            who = f" by {facts['by']}" if facts["by"] else ""
            message = f"rejected{who}" + (f": {facts['comment']}" if facts["comment"] else "")
            self._failed(
                waiting, NodeFailure(waiting.path, waiting.attempt, "Rejected", message), "rejected", step
            )

    def _signalled(self, waiting: Waiting, signal: Record, step: Step) -> None:
        seq = signal.seq or 0
        self.signals.pop(seq, None)
        digest = signal.digest or bytes(16)
        self._completed(waiting, Stored(waiting.path, seq, digest), digest, step, {"signal": seq, "seq": seq})

    def _over(self, waiting: Waiting, step: Step) -> None:
        if waiting.reason == "sleep":
            self._completed(waiting, None, codec.digest("null"), step, None, "null")
            return
        error = NodeTimeout(waiting.path, waiting.vertex.node.timeout or 0.0)
        self._failed(
            waiting, tell(waiting.path, waiting.attempt, error, "timeout", self._run.mask), "timeout", step
        )

    def _completed(
        self,
        waiting: Waiting,
        cell: Stored | None,
        digest: bytes,
        step: Step,
        facts: dict[str, Any] | None,
        text: str | None = None,
        reason: str | None = None,
    ) -> None:
        head = (ev.COMPLETED, waiting.attempt, self._run.now(), waiting.path, reason)
        size = None if text is None else len(text)
        told = None if facts is None else json.dumps(facts)
        step.records.append(Record(*head, waiting.fingerprint, digest, size, None, told, text))
        out = text if cell is None else cell
        waiting.scope.put(waiting.vertex, out, digest, step, waiting.feed, waiting.index)

    def _failed(self, waiting: Waiting, failure: NodeFailure, reason: str, step: Step) -> None:
        at = self._run.now()
        record = ev.node_record(ev.FAILED, waiting.path, waiting.attempt, at, reason, **failure.facts)
        step.records.append(record._replace(input=waiting.fingerprint))
        found = NodeFailure(
            waiting.path, waiting.attempt, failure.type, failure.message, failure.traceback, reason,
            None, failure.exception,
        )  # fmt: skip
        waiting.scope.put_failed(waiting.vertex, found, step, waiting.feed, waiting.index)

    def _keep(self, waiting: Waiting, step: Step) -> None:
        """What a held path gave before stays, although its input is another one now."""
        kept = waiting.kept or {}
        digest = bytes.fromhex(kept["digest"])
        cell = Stored(waiting.path, kept.get("seq", 0), digest, kept.get("blob"))
        facts: dict[str, Any] = {name: kept[name] for name in ("seq", "blob") if name in kept}
        self._completed(waiting, cell, digest, step, facts, None, "kept")

    def _again(self, waiting: Waiting, step: Step) -> None:
        """A held path runs again: a person said so."""
        run = self._run
        prior = ev.node_record(ev.WAITING, waiting.path, waiting.attempt, run.now(), ev.HELD)
        run.reset(prior, "asked", step)
        if waiting.feed is not None:
            waiting.feed.reopen(waiting.index, step)
        else:
            waiting.scope.run_again(waiting.vertex, waiting.fingerprint, step)


def _reason(vertex: Vertex) -> str:
    what = vertex.node.what
    if isinstance(what, Approval):
        return "approval"
    if isinstance(what, WaitFor):
        return "event"
    return "sleep" if isinstance(what, Sleep) else ev.HELD


def _kept(prior: Record | None) -> dict[str, Any] | None:
    """Give where the output of a path that is to be held is."""
    if prior is None:
        return None
    found = Stored.of(prior)
    kept: dict[str, Any] = {"seq": found.seq, "digest": found.digest.hex()}
    if found.blob is not None:
        kept["blob"] = found.blob
    if prior.input is not None:
        kept["input"] = prior.input.hex()
    return kept
