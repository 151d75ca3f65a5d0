"""The sentences in which people read what the engine decided: one place for the command line and the page.

Keys are the machine-readable words of decisions, paths and runs. A word without a sentence is shown as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final

__all__ = [
    "DECISIONS",
    "EXPLAINED",
    "HEADLINES",
    "KINDS",
    "NODE_REASONS",
    "RUN_REASONS",
    "all_completed",
    "amount",
    "cancelled",
    "counted",
    "cut_off",
    "decision",
    "duration",
    "error_in_words",
    "explained",
    "listed",
    "local_time",
    "local_time_of",
    "map_progress",
    "needs",
    "node_reason",
    "one_line",
    "rolled_back",
    "run_reason",
    "running",
    "short_time",
    "size",
    "stopped",
    "usage",
    "waits",
]

DECISIONS: Final[Mapping[tuple[str, str], str]] = {
    ("reuse", "completed"): "Reused: completed, and its input has not changed.",
    ("reuse", "handled"): "Left as it is: it failed, and a node below it has dealt with that.",
    ("reuse", "tolerated"): "Left as it is: its failure is within what its map tolerates.",
    ("reuse", "kept"): "Reused although its input changed: a person decided so.",
    ("reuse", "resolved"): "Not run: a person has said what it did.",
    ("run", "approved"): "Goes on: a person approved it.",
    ("run", "due"): "Ends at once: its time is over.",
    ("run", "inner_missing"): "Goes on with what is missing inside it.",
    ("run", "rejected"): "Fails: a person rejected it.",
    ("run", "rounds_missing"): "Goes on with its next round.",
    ("run", "signalled"): "Goes on: what it waits for has come.",
    ("run", "timeout"): "Fails: nobody answered in time.",
    ("run", "new"): "Runs: nothing of it is recorded yet.",
    ("run", "asked"): "Runs again: a person asked for it.",
    ("run", "failed"): "Runs again: it failed.",
    ("run", "input_changed"): "Runs again: its input changed.",
    ("run", "interrupted"): "Runs again: it was cut off, and repeating it does no harm.",
    ("run", "items_missing"): "Runs those of its items that have not completed.",
    ("run", "recomputed"): "Runs again: its output is not stored, and a node that runs needs it.",
    (
        "run",
        "reconcile",
    ): "Cut off: its reconcile function is asked whether it took effect; if not, it runs again.",
    ("run", "upstream_runs"): "Runs once the nodes above it have run.",
    ("run", "decided"): "Ends at once: a person has approved it.",
    ("check", "condition"): "Runs if its condition holds.",
    ("check", "rounds_missing"): "Runs another round if its last one did not reach the end.",
    ("skip", "condition"): "Skipped: its condition does not hold.",
    ("skip", "max_iterations"): "Fails without running: it has used up its rounds.",
    ("wait", "approval"): "Waits for a person's word.",
    ("wait", "event"): "Waits for a signal.",
    ("wait", "inner_waits"): "Waits: something inside it does.",
    ("wait", "items_wait"): "Waits: some of its items do.",
    ("wait", "rounds_wait"): "Waits: something in its round does.",
    ("wait", "sleep"): "Waits until its time is over.",
    ("wait", "upstream_waits"): "Waits for what a node above it waits for.",
    ("check", "no_room"): "Runs if the others of its map that are open leave room.",
    ("check", "signalled"): "Goes on if no other node takes the signal first.",
    ("check", "depends_on_parents"): "Runs or not, as the nodes above it end.",
    ("check", "input_may_change"): "Reused if its input comes out the same; a node above it runs first.",
    ("check", "items_changed"): "Its list changed: items that are in it as before are reused.",
    ("check", "items_not_known"): "Its items are known once the node above it has run.",
    ("check", "upstream_runs"): "Runs once the nodes above it have run, if their outcome lets it.",
    ("check", "recomputed"): "Runs again if a node that needs its output does: the output is not stored.",
    ("skip", "trigger"): "Skipped: the nodes above it did not end as its trigger asks.",
    ("skip", "upstream_failed"): "Does not run: something it needs has failed.",
    ("wait", "no_room"): "Waits for room: others of its map are open and wait.",
    ("wait", "upstream_held"): "Waits until a person has decided about a path above it.",
    ("hold", "input_changed"): "Held for a person: completed, its input changed, and it is not idempotent.",
    ("hold", "uncertain"): "Held for a person: it began, and nobody knows whether it took effect.",
}
"""(action, reason) of a decision → what will happen and why."""

NODE_REASONS: Final[Mapping[str, str]] = {
    "again": "It was blocked for a while; what it had given still holds.",
    "approval": "Waits for a person's word.",
    "condition": "Skipped: its condition does not hold.",
    "event": "Waits for a signal.",
    "inner_failed": "Something inside it failed.",
    "kept": "Its input changed; a person wants to keep what it gave.",
    "max_iterations": "It has used up its rounds.",
    "rejected": "A person has rejected it.",
    "resolved": "A person has said what it did.",
    "round_failed": "One of its rounds failed.",
    "round_gone": "Its loop ends before this round now.",
    "sleep": "Waits until its time is over.",
    "until_failed": "The question whether it has reached its end raised an error.",
    "abandoned": "Its thread did not stop in time; nobody knows whether it took effect.",
    "asked": "A person asked for it to run again.",
    "cancelled": "Stopped while it was running.",
    "compensation_failed": "It stands: its undo failed.",
    "copied": "Its output was copied from the run this one was forked from.",
    "condition_failed": "Its condition raised an error.",
    "error": "Its function raised an error.",
    "failed_in_row": "Not started: too many items before it failed in a row.",
    "fail_fast": "Stopped because another node failed.",
    "held": "Held for a person: completed, its input changed, and it is not idempotent.",
    "inner_undone": "What is inside it was undone.",
    "input_changed": "Runs again: its input changed.",
    "input_lost": "Not started: a stored value it needs could not be read.",
    "interrupted": "Cut off while it was running.",
    "item_gone": "Its item is no longer in the list.",
    "items_failed": "Some of its items failed.",
    "migrated": "It completed under an older version of the workflow.",
    "moved": "Its item stands at another place of the list now; the output was kept.",
    "not_done": "Its reconcile function said that it had not taken effect.",
    "not_serialisable": "It ended, but what it returned cannot be stored.",
    "not_stored": "It ended, but the database did not take its result.",
    "once_uncertain": "A call it makes once had begun before; nobody knows whether it took effect.",
    "paused": "Not started yet: the other side asked for a pause.",
    "reconcile_failed": "Its reconcile function raised an error; nobody knows whether it took effect.",
    "reconciled": "Its reconcile function said what it had done.",
    "retry": "Failed, and is tried again.",
    "shutdown": "Cut off when its process shut down.",
    "stopped": "Not started: the run was stopped first.",
    "timeout": "It took longer than its timeout.",
    "trigger": "The nodes above it did not end as its trigger asks.",
    "undo_started": "Its undo was begun, and is not known to have ended.",
    "upstream_failed": "Something it needs has failed.",
}
"""Reason of a path's status → why it is so."""

RUN_REASONS: Final[Mapping[str, str]] = {
    "approval": "a person has to approve",
    "asked": "a person asked for it",
    "budget": "its budget is used up",
    "cancelled": "it was cancelled",
    "compensation_failed": "not everything could be undone",
    "event": "it waits for a signal",
    "sleep": "it waits until a time is over",
    "checkpoint_lost": "a stored value is missing or was altered",
    "fail_fast": "a node failed and the others were stopped",
    "held": "a person has to decide about a path",
    "interrupted": "it was stopped",
    "node_failed": "a node failed",
    "not_opened": "it was stopped before it began",
    "not_stored": "the database did not take a result",
    "owner_died": "the process that drove it died",
    "shutdown": "its process was asked to stop",
    "stuck": "no node could go on",
    "timeout": "it took longer than its timeout",
    "uncertain": "nobody knows whether a path took effect",
}
"""Reason of a run's status → why, as the end of a sentence."""


EXPLAINED: Final[Mapping[tuple[str, str], str]] = {
    ("ran", "new"): "ran: nothing of it was recorded yet",
    ("ran", "asked"): "ran again: a person asked for it",
    ("ran", "failed"): "ran again: it had failed",
    ("ran", "interrupted"): "ran again: it had been cut off",
    ("ran", "input_changed"): "ran again: what it receives had changed",
    ("ran", "code_changed"): "ran again: its code had changed",
    ("ran", "not_done"): "ran again: its reconcile function said that it had not taken effect",
    ("reused", "completed"): "reused: it had completed",
    ("skipped", "condition"): "skipped: its condition said no",
    ("skipped", "trigger"): "skipped: the nodes above it did not end as its trigger asks",
    ("waited", "approval"): "waited for a person's approval",
    ("waited", "event"): "waited for an event",
    ("waited", "sleep"): "waited for a time to pass",
    ("waited", "held"): "held for a person: its input had changed, and it is not idempotent",
    ("copied", ""): "not executed: its output was copied from the run this one was forked from",
    ("migrated", ""): "not executed: it had completed under an older version",
    ("moved", ""): "not executed: its item stands at another place of the list, the output was kept",
    ("kept", ""): "not executed: a person let its old output stand",
    ("resolved", ""): "not executed: a person said what it had done",
    ("passed", ""): "not executed: the item above gave nothing to call it with",
    ("not_reached", ""): "not reached",
    ("failed", ""): "failed",
    ("left", ""): "left as it was: it had failed",
    ("undone", ""): "undone",
}
"""(what was done, why) of a path in a time its run was driven → the same in words."""


_DONE: Final[Mapping[tuple[str, str], str]] = {
    ("ran", "new"): "Ran: no checkpoint.",
    ("ran", "asked"): "Ran again: a person asked.",
    ("reused", "completed"): "Reused: completed and its input has not changed.",
    ("skipped", "condition"): "Its condition was false.",
}


def explained(did: str, why: str | None, changed: Sequence[str], cut_at: datetime | None) -> str:
    """Give the sentence for what was done with a path once, and why."""
    if did == "not_reached" and changed:
        return f"Not reached: needs {listed(changed)}."
    if did == "ran" and changed:
        return f"Ran again: its input from {listed(changed)} changed."
    if did == "ran" and cut_at is not None:
        return f"Ran again: cut off at {local_time(cut_at)}."
    told = _DONE.get((did, why or "")) or EXPLAINED.get((did, why or "")) or EXPLAINED.get((did, ""))
    told = told or (f"{_bare(did)}: {_bare(why)}" if why else _bare(did))
    return f"{told[0].upper()}{told[1:].rstrip('.')}."


def decision(action: str, reason: str) -> str:
    """Give the sentence for what will be done with a path, and why."""
    return DECISIONS.get((str(action), reason)) or f"{str(action).capitalize()}: {_bare(reason)}."


def node_reason(reason: str | None) -> str:
    """Give the sentence for the reason of a path's status; empty if there is none."""
    return "" if not reason else NODE_REASONS.get(reason) or f"{_bare(reason).capitalize()}."


def run_reason(reason: str | None) -> str:
    """Give the reason of a run's status as the end of a sentence; empty if there is none."""
    return "" if not reason else RUN_REASONS.get(reason) or _bare(reason)


def _bare(word: str) -> str:
    return word.replace("_", " ")


KINDS: Final[Mapping[str, str]] = {
    "map": "map",
    "loop": "loop",
    "sub_workflow": "sub-workflow",
    "approval": "approval",
    "sleep": "sleep",
    "event": "waits for a signal",
}
"""What a node is that is more, or less, than a function that runs once."""

# -- how a run is, in one sentence ----------------------------------------------------------------------

HEADLINES: Final[Mapping[str, str]] = {
    "pending": "Waits for its turn: nobody has begun with it.",
    "between": "Under way; no node is running at this moment.",
    "waiting": "Waits: see which node, and what for.",
    "failed": "Stopped: {reason}.",
    "rolling_back": "Undoing: {} of {} completed steps are undone, newest first.",
}
"""Sentences about a run that need no more than their numbers."""


def map_progress(node: str, done: int, total: int, running: int) -> str:
    """Say how far the map is that a run is at."""
    return f"{node}: {done:,} of {total:,} done, {running:,} running."


def running(nodes: Sequence[str]) -> str:
    """Say which nodes run."""
    return f"{listed(nodes)} {'is' if len(nodes) == 1 else 'are'} running."


def waits(node: str, reason: str, what: str | None, due: datetime | None) -> str:
    """Say what a node waits for, and until when."""
    expires = f" Expires at {local_time(due)}." if due is not None else ""
    if reason == "approval":
        return f"{node} asks you: {what or 'approve it?'}{expires}"
    if reason == "event":
        return f"{node} waits for the signal {what}.{expires}"
    if reason == "held":
        return f"{node} is held for you: its input changed, and it is not idempotent."
    if due is not None:
        why = "is tried again" if reason == "retry" else "waits until"
        return f"{node} {why} {'at ' if reason == 'retry' else ''}{local_time(due)}."
    return f"{node} waits."


def all_completed(count: int, seconds: float, reused: int, saved: float, cost: float, tolerated: int) -> str:
    """Say that a run has completed, what was tolerated, and what resuming it saved."""
    told = f"{'All ' if count != 1 else ''}{counted(count, 'path')} completed in {duration(seconds)}"
    if tolerated:
        told += f"; {counted(tolerated, 'failed item')} {'was' if tolerated == 1 else 'were'} tolerated"
    if not reused:
        return f"{told}."
    money = f" and {amount(cost)} in cost" if cost else ""
    kept = f"{reused:,} {'was' if reused == 1 else 'were'} reused by the last resume"
    return f"{told}; {kept}, which saved {duration(saved)} of work{money}."


def error_in_words(kind: str, message: str) -> str:
    """Give an error as a part of a sentence."""
    told = one_line(message, 100).rstrip(".")
    name = kind.removeprefix("dagresume.errors.").removeprefix("builtins.")
    return f"{name}: {told}" if name and told else name or told or "it failed"


def stopped(path: str, error: str, attempts: int, others: int, blocked: int, *, everything: bool) -> str:
    """Say where a run has failed and what became of the rest."""
    tries = f", all {attempts} attempts are used" if attempts > 1 else ""
    more = f" {counted(others, 'other path')} failed too." if others else ""
    behind = f" {counted(blocked, 'node')} behind it did not run" if blocked else ""
    rest = "every other branch finished" if everything else "the others were stopped"
    end = f"{behind}; {rest}." if behind else f" {rest[0].upper()}{rest[1:]}."
    return f"Stopped at {path}: {error}{tries}.{more}{end}"


def cut_off(moment: datetime, uncertain: Sequence[str], kept: int, *, died: bool, reason: str | None) -> str:
    """Say that a run was cut off, and whether going on is safe."""
    at = local_time(moment)
    was = "was" if len(uncertain) == 1 else "were"
    while_ = f" while {listed(uncertain)} {was} running" if uncertain else ""
    if died:
        told = f"The process died at {at}{while_}."
    else:
        why = run_reason(reason)
        told = f"Interrupted at {at}{while_}{f': {why}' if why else ''}."
    if uncertain:
        effect = "its effect" if len(uncertain) == 1 else "their effects"
        told += f" Nobody knows yet whether {effect} happened, so nothing goes on by itself."
    else:
        told += " Nothing uncertain was under way: resuming is safe."
    return f"{told} {_finished(kept)}"


def _finished(kept: int) -> str:
    return f"{counted(kept, 'finished path')} {'is' if kept == 1 else 'are'} kept."


def cancelled(by: str, moment: datetime, kept: int) -> str:
    """Say who stopped a run, and what that means."""
    who = f" by {by}" if by else ""
    return f"Cancelled{who} at {local_time(moment)}. {_finished(kept)} It never resumes by itself."


def rolled_back(by: str, undone: int, of: int, left: Sequence[str]) -> str:
    """Say what was undone and what was not."""
    who = f" by {by}" if by else ""
    rest = f"; {len(left):,} could not be undone: {listed(left)}" if left else ""
    return f"Rolled back{who}: {undone:,} of {of:,} undone{rest}."


_NEEDS: Final[Mapping[str, str]] = {
    "approval": "an answer",
    "held": "a decision",
    "uncertain": "a decision",
    "event": "a signal",
    "budget": "a larger budget",
    "failed": "a look",
    "interrupted": "a resume",
    "rolling_back": "a rollback",
}


def needs(status: str, reason: str | None) -> str:
    """Say what a run needs of a person, and why; empty if it needs nothing."""
    told = run_reason(reason)
    if status == "rolling_back" and reason is None:
        return ""
    need = _NEEDS.get(reason or "") if status in {"waiting", "interrupted", "failed"} else None
    need = need or _NEEDS.get(status)
    if need is None:
        return told if status == "waiting" else ""
    return f"needs {need}: {told}" if told else f"needs {need}"


def listed(paths: Sequence[str], most: int = 3) -> str:
    """Give the first few of some names: `a, b, c and 7 more`."""
    named = ", ".join(paths[:most])
    return f"{named} and {len(paths) - most:,} more" if len(paths) > most else named


# -- amounts and times ----------------------------------------------------------------------------------


def duration(seconds: float | None) -> str:
    """Give a duration in words: `0.4 ms`, `12 ms`, `1.2 s`, `9 min 33 s`, `2 h 5 min`; empty for None."""
    if seconds is None:
        return ""
    if seconds < 0.9995:
        ms = seconds * 1000
        return f"{ms:.0f} ms" if ms >= 9.95 else f"{ms:.1f} ms" if ms >= 0.05 else "0 ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, small, rest in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            below = whole % size // small
            return f"{whole // size} {unit} {below} {rest}" if below else f"{whole // size} {unit}"
    return f"{whole} s"


def local_time(moment: datetime | None) -> str:
    """Give a time as a clock on the wall here shows it, to the second; empty for None."""
    return "" if moment is None else f"{moment.astimezone():%Y-%m-%d %H:%M:%S}"


def local_time_of(microseconds: int) -> str:
    """Give a stored time (microseconds UTC) as a clock on the wall here shows it, without the date."""
    return f"{datetime.fromtimestamp(microseconds / 1e6).astimezone():%H:%M:%S}"


def short_time(moment: datetime | None) -> str:
    """Give a time in the year that it is, without the year: `12-01 13:06`; empty for None."""
    return "" if moment is None else f"{moment.astimezone():%m-%d %H:%M}"


def amount(value: float) -> str:
    """Give a number with its thousands apart and no digits that say nothing."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4f}".rstrip("0").rstrip(".")


def counted(count: int, noun: str) -> str:
    """Give a number of things: `1 path`, `1,200 paths`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size(count: float) -> str:
    """Give a number of bytes in words, in powers of 1,000: `0 bytes`, `820 bytes`, `4.1 kB`, `15 GB`."""
    if count < 1000:
        return counted(round(count), "byte")
    value, units = count / 1000, iter(("kB", "MB", "GB", "TB"))
    unit = next(units)
    while value >= 999.5 and unit != "TB":
        value, unit = value / 1000, next(units)
    return f"{value:,.1f} {unit}" if value < 9.95 else f"{value:,.0f} {unit}"


def usage(used: Mapping[str, float]) -> str:
    """Give what was used up in words: `1,200 tokens in, 300 tokens out, cost 0.25`; empty for nothing."""
    names = {"tokens_in": "{} tokens in", "tokens_out": "{} tokens out", "cost": "cost {}"}
    told: Iterable[tuple[str, float]] = ((n, v) for n, v in used.items() if v)
    return ", ".join(names.get(name, name + " {}").format(amount(value)) for name, value in told)


def one_line(text: str, most: int = 300) -> str:
    """Give a text's first line with something on it, cut to `most` characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= most else line[: most - 1] + "…"
