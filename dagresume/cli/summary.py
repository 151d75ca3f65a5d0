"""How a run ended, for people and for programs: what it gave, what failed, and which command goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from dagresume import codec, words
from dagresume.cli.command import FAILED, INTERRUPTED, WAITING, Here
from dagresume.cli.screen import STYLES, clean, line, out, picture, print_json, say
from dagresume.errors import DagresumeError, NoOutput
from dagresume.events import UNDO_FAILED_REASON, RunStatus, segments

if TYPE_CHECKING:
    from dagresume.policy import NodeFailure
    from dagresume.results import RunResult
    from dagresume.views import RunInfo
    from dagresume.workflow import Workflow

__all__ = [
    "as_failure",
    "as_run",
    "code_of",
    "print_failures",
    "print_next",
    "report",
    "shown_output",
    "status_line",
    "title",
]

MOST_FAILURES: Final = 10
_CODES: Final[Mapping[RunStatus, int]] = {
    RunStatus.COMPLETED: 0,
    RunStatus.WAITING: WAITING,
    RunStatus.INTERRUPTED: INTERRUPTED,
}
_FRAME: Final = re.compile(r'^\s*File "(.+)", line (\d+), in ', re.MULTILINE)


def code_of(status: RunStatus) -> int:
    """Give the exit code that a run's status means."""
    return _CODES.get(status, FAILED)


def report(
    result: RunResult, wf: Workflow | None, here: Here, *, as_json: bool, uncertain: Sequence[str] = ()
) -> int:
    """Print how a run ended; gives the exit code."""
    if as_json:
        print_json(_as_result(result))
        return code_of(result.status)
    say(*status_line(result.run_id, result.workflow, result.status, result.reason))
    say(f"  {_work_line(result)}")
    shown = _outputs(result, wf)
    if shown:
        say("")
        width = max(len(name) for name, _ in shown)
        for name, value in shown:
            say(f"  {name:<{width}}  ", (value, "bold"))
    if uncertain or result.failures:
        say("")
    if result.failures:
        print_failures(result.failures, here, result.run_id)
    for path in uncertain[:MOST_FAILURES]:
        say(("? ", "yellow"), (clean(path), "bold"), " was cut off; nobody knows whether it took effect")
    reason = "uncertain" if uncertain else result.reason
    print_next(result.run_id, result.status, reason, here, result.failures)
    return code_of(result.status)


def status_line(
    run_id: str, workflow: str, status: RunStatus, reason: str | None
) -> list[str | tuple[str, str]]:
    """Give the line that names a run and says how it is."""
    told = words.run_reason(reason) if reason != status else ""
    return [
        f"run {run_id} of {clean(workflow)}: ",
        (str(status), STYLES.get(status, "")),
        f" ({told})" if told else "",
    ]


def title(info: RunInfo) -> list[str | tuple[str, str]]:
    """Give the line above a sentence about a run: it names the reason, which the sentence says, if there is
    room.
    """
    parts = status_line(info.run_id, info.workflow, info.status, info.reason)
    fits = sum(len(part if isinstance(part, str) else part[0]) for part in parts) <= out().width
    return parts if fits else status_line(info.run_id, info.workflow, info.status, None)


def _work_line(result: RunResult) -> str:
    stats = result.stats
    if not result.executed and not stats.commits:
        return f"nothing was executed; {words.counted(len(result.reused), 'path')} completed before"
    latency = stats.checkpoint_latency
    parts = [
        f"{words.counted(len(result.executed), 'path')} executed, {len(result.reused):,} reused",
        words.duration(stats.seconds),
        words.counted(stats.commits, "commit"),
    ]
    if latency.count:
        p50, p99 = words.duration(latency.p50), words.duration(latency.p99)
        parts.append(f"checkpoints durable after {p50} (p50), {p99} (p99)")
    return " · ".join(parts)


def _outputs(result: RunResult, wf: Workflow | None) -> list[tuple[str, str]]:
    """Give the outputs at the ends of the graph, each in one short line."""
    if wf is None:
        ids: Sequence[str] = []
    else:
        graph = wf.compiled
        ids = [id_ for id_, children in zip(graph.ids, graph.children, strict=True) if not children]
    return [
        (clean(id_), picture(hidden(result, id_))) for id_ in ids[:MOST_FAILURES] if id_ in result.outputs
    ]


def hidden(result: RunResult, node: str) -> Any:
    """Give a picture of an output in which nothing stands that the workflow keeps secret."""
    (shown,) = result.mask.value({node: codec.plain(result.outputs[node])}).values()
    return shown


def shown_output(result: RunResult, path: str) -> Any:
    """Give a picture of what a path returned; of a class that is not known here, as it is stored."""
    try:
        return hidden(result, path)
    except NoOutput:
        raise
    except DagresumeError:
        return result.mask.value(json.loads(result.outputs.packed(path)))


# -- failures -------------------------------------------------------------------------------------------


def print_failures(failures: Mapping[str, NodeFailure], here: Here, run_id: str) -> None:
    """Print failures, those that are alike together."""
    alike: dict[tuple[str, str, str, str, str], list[NodeFailure]] = {}
    for failure in failures.values():
        place = place_of(failure)
        how = "could not be undone" if failure.reason == UNDO_FAILED_REASON else "failed"
        alike.setdefault((_node(failure.path), how, failure.type, failure.message, place), []).append(failure)
    groups = list(alike.items())
    for (_, how, kind, message, place), same in groups[:MOST_FAILURES]:
        say(("× ", "red"), (_paths(same), "bold"), f" {how}{_attempts(same)}: {_error(kind, message)}")
        if place:
            say((f"  at {clean(place)}", "dim"))
    if len(groups) > MOST_FAILURES:
        rest = sum(len(same) for _, same in groups[MOST_FAILURES:])
        say(f"  and {rest:,} more: {here.command('show', run_id)}")


def _node(path: str) -> str:
    try:
        return "/".join(node for node, _ in segments(path))
    except ValueError:
        return path


def _paths(same: Sequence[NodeFailure]) -> str:
    names = ", ".join(clean(failure.path) for failure in same[:3])
    return f"{names} and {len(same) - 3:,} more" if len(same) > 3 else names


def _attempts(same: Sequence[NodeFailure]) -> str:
    most = max(failure.attempt for failure in same)
    return f" on attempt {most}" if most > 1 else ""


def _error(kind: str, message: str) -> str:
    told, kind = line(message), kind.removeprefix("dagresume.errors.")
    return f"{clean(kind)}: {told}" if told and kind else clean(kind) or told or "its items failed"


def place_of(failure: NodeFailure) -> str:
    """Give file:line of the last frame of a failure that is the user's own; empty if there is none."""
    frames: list[tuple[str, str]] = _FRAME.findall(failure.traceback)
    own = [frame for frame in frames if "site-packages" not in frame[0] and not frame[0].startswith("<")]
    if not frames:
        return ""
    file, number = (own or frames)[-1]
    path = Path(file)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{number}"


def print_next(
    run_id: str,
    status: RunStatus,
    reason: str | None,
    here: Here,
    failures: Mapping[str, NodeFailure] = MappingProxyType({}),
) -> None:
    """Print which command goes on from here, if there is one."""
    if status is RunStatus.FAILED and any(f.reason == "not_serialisable" for f in failures.values()):
        reason = "not_serialisable"
    lines = list(_next(run_id, status, reason, here))
    if lines:
        say("")
    for text in lines:
        say(text)


_KEPT: Final = "Everything that completed is kept."
_NEXT: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "not_serialisable": (f"{_KEPT} Mend what the node returns, then run it again:", ("retry",)),
    "failed": (f"{_KEPT} Mend the cause, then run what is missing:", ("resume",)),
    "uncertain": (f"{_KEPT} Look whether it took effect; to run it again all the same:", ("retry",)),
    "checkpoint_lost": ("See which value is gone, and run its node again with retry --from:", ("show",)),
    "budget": (f"{_KEPT} Give it more: engine.resume(run_id, budget=Budget(…))", ()),
    "interrupted": (f"{_KEPT} To go on:", ("resume",)),
    "held": (
        "A path is held: its input changed, and it is not idempotent. To run it again, or keep what it gave:",
        ("approve", "reject", "resume"),
    ),
    "approval": ("To say yes or no, and then go on:", ("approve", "reject", "resume")),
    "event": (
        "To tell it that what it waits for has happened, and then go on:",
        ("signal EVENT --payload JSON", "resume"),
    ),
    "rolling_back": ("Not everything is undone yet. Mend the cause, then undo the rest:", ("rollback",)),
    "waiting": ("To go on once what it waits for has come:", ("resume",)),
    "cancelled": ("It never resumes by itself. To open it again from a node:", ("retry --from NODE",)),
}
"""Reason or status of a run → what can be done now, and the commands that do it."""


def _next(run_id: str, status: RunStatus, reason: str | None, here: Here) -> Iterable[str]:
    first = status.value if status is RunStatus.FAILED and reason != "not_serialisable" else reason
    found = _NEXT.get(first or "") or _NEXT.get(status.value)
    if found is None:
        return
    told, asked = found
    yield told
    for command in asked:
        name, *rest = command.split()
        yield f"  {here.command(name, run_id, *rest)}"


# -- for programs ---------------------------------------------------------------------------------------


def _as_result(result: RunResult) -> dict[str, Any]:
    outputs = {}
    for id_ in result.outputs:
        try:
            outputs[id_] = hidden(result, id_)
        except NoOutput:
            continue
    latency = result.stats.checkpoint_latency
    return {
        "run_id": result.run_id,
        "workflow": result.workflow,
        "status": result.status,
        "reason": result.reason,
        "executed": list(result.executed),
        "reused": list(result.reused),
        "outputs": outputs,
        "failures": {path: as_failure(failure) for path, failure in result.failures.items()},
        "stats": {
            "seconds": result.stats.seconds,
            "commits": result.stats.commits,
            "checkpoint_latency": {
                "p50": latency.p50,
                "p95": latency.p95,
                "p99": latency.p99,
                "max": latency.max,
                "count": latency.count,
            },
        },
    }


def as_failure(failure: NodeFailure) -> dict[str, Any]:
    """Give a failure as plain data."""
    return {
        "path": failure.path,
        "attempt": failure.attempt,
        "type": failure.type,
        "message": failure.message,
        "reason": failure.reason,
        "place": place_of(failure) or None,
        "traceback": failure.traceback,
        "at": failure.at,
    }


def as_run(info: RunInfo) -> dict[str, Any]:
    """Give the header of a run as plain data."""
    return {
        "run_id": info.run_id,
        "workflow": info.workflow,
        "version": info.version,
        "key": info.key,
        "status": info.status,
        "reason": info.reason,
        "created_at": info.created_at,
        "updated_at": info.updated_at,
        "finished_at": info.finished_at,
        "owner": info.owner,
        "source": info.source,
        "forked_from": info.forked_from,
    }
