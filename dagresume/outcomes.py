"""What a run gives back: of one that was driven here, of one that is only stored, of one that was undone."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

from dagresume import codec
from dagresume import events as ev
from dagresume.errors import BudgetExceeded, RunCancelled, RunFailed, RunInterrupted
from dagresume.events import Record, RunStatus, Snapshot
from dagresume.feeds import NULL, item_failure
from dagresume.graphs import unfolded
from dagresume.jobs import OPEN, Cells
from dagresume.masks import Mask
from dagresume.observe import failure_of
from dagresume.planner import is_body
from dagresume.policy import Settled
from dagresume.program import Program
from dagresume.results import Cell, Fetch, Lazily, Outputs, RunResult, Stats, Stored
from dagresume.scheduler import Run
from dagresume.store import Loaded
from dagresume.undo import ASKED, Rollback
from dagresume.views import run_info, runs_function

__all__ = ["live_result", "raise_if_bad", "stored_result", "undone_result"]


def live_result(run: Run, fetch: Fetch, now: float) -> RunResult:
    """Give the result of a run that was driven here; `now`: the clock's monotonic seconds."""
    prior, body = run.snapshot, run.body
    outputs = Outputs(
        _cells(run), body.types, partial(_status_at, run), fetch, _parts(run), partial(_find, run)
    )

    def reused() -> list[str]:
        executed = set(run.executed)
        return [
            path for path, record in prior.paths.items()
            if record.kind == ev.COMPLETED and path not in executed
            and (vertex := body.at(path)) is not None and is_body(vertex, path)
        ]  # fmt: skip

    return RunResult(
        run.run_id, run.workflow, run.status, run.reason, outputs, run.unhandled(), run.executed,
        Lazily(reused), Stats(run.commits, now - run.began, run.waits), body.ids, run.mask,
    )  # fmt: skip


def stored_result(loaded: Loaded, program: Program | None, fetch: Fetch, mask: Mask) -> RunResult:
    """Give the result of a run from what is stored of it."""
    snapshot = Snapshot(loaded.records)
    graph = unfolded(loaded.graph)
    types = {} if program is None else program.body.types
    cells: dict[str, Cell] = {}
    parts: dict[str, list[str | Stored | None]] = {}
    for node in graph["nodes"]:
        record = snapshot.paths.get(node["id"])
        if record is None or not node.get("checkpoint", True):
            continue
        if "for_each" in node:
            (cells if record.kind == ev.COMPLETED else parts)[node["id"]] = _items(snapshot, record)
        elif record.kind == ev.COMPLETED:
            cells[node["id"]] = Stored.of(record)
    info = run_info(loaded.row, loaded.holder, loaded)

    def status(path: str) -> str | None:
        found = info.nodes.get(path)
        return None if found is None else found.status

    reused = Lazily(
        lambda: [p for p, r in snapshot.paths.items() if r.kind == ev.COMPLETED and runs_function(graph, p)]
    )
    body = None if program is None else program.body

    def find(path: str) -> tuple[Cell, codec.Types] | None:
        record = snapshot.paths.get(path)
        vertex = None if body is None else body.at(path)
        if record is None or record.kind != ev.COMPLETED or (vertex is not None and vertex.pure):
            return None
        cell: Cell = _items(snapshot, record) if "count" in record.facts else Stored.of(record)
        return cell, codec.EMPTY if vertex is None else vertex.types

    return RunResult(
        loaded.row.run_id,
        loaded.row.workflow,
        info.status,
        info.reason,
        Outputs(cells, types, status, fetch, parts, find),
        dict(info.failures),
        [],
        reused,
        Stats(0, 0.0, array("d")),
        {} if program is None else program.body.ids,
        mask,
    )


def undone_result(
    stored: Callable[[Loaded], RunResult], now: float, run: Run | Rollback, undoing: Rollback
) -> RunResult:
    """Give the result of a run that was rolled back in this call, as it is stored."""
    assert undoing.loaded is not None  # else there were an error
    result = stored(undoing.loaded)
    result.stats = Stats(undoing.commits, now - run.began, array("d"))
    if isinstance(run, Run):  # it ran here too
        executed = set(run.executed)
        result.executed = run.executed
        result.reused = [path for path in result.reused if path not in executed]
        result.stats = Stats(run.commits + undoing.commits, result.stats.seconds, run.waits)
        result.failures = run.unhandled()
    result.failures |= undoing.failures
    return result


def _items(snapshot: Snapshot, record: Record) -> list[Any]:
    """Give where the items of a map lie; of one that has not completed, None for what is not there."""
    cells: list[str | Stored | None] = []
    for k in range(record.facts.get("count", 0)):
        item = snapshot.paths.get(f"{record.path}[{k}]")
        if item is not None and item.kind == ev.COMPLETED:
            cells.append(Stored.of(item))
        elif item is not None and item.kind == ev.SKIPPED:
            cells.append(NULL)
        elif item is not None and record.kind == ev.COMPLETED:
            cells.append(item_failure(failure_of(item)))
        else:
            cells.append(None)
    return cells


def _cells(run: Run) -> dict[str, Cell]:
    """Give the outputs of the root's nodes by id, packed or where they lie."""
    state, outs = run.root.state, run.root.out
    done = [v for v in run.rules if state[v.index] == Settled.COMPLETED and not v.pure]
    return {v.id: out.cells if isinstance(out := outs[v.index], Cells) else out for v in done}


def _status_at(run: Run, path: str) -> str | None:
    """Give how a path ended; None if there is no such path."""
    vertex = run.body.at(path)
    if vertex is None:
        return None
    for paths, word in (
        (run.desk.open, "waiting"),
        (run.uncertain, "interrupted"),
        (run.failures, "failed"),
    ):
        if any(p == path or p.startswith((path + "[", path + "/")) for p in paths):
            return word
    (node, index), *deeper = ev.segments(path)
    if deeper:
        return "completed" if path in run.inner else "pending"
    i = run.body.by_id[node].index
    if index is not None:
        return _item_status(run, i, index)
    state = run.root.state[i]
    names = {OPEN: "pending", Settled.OPEN_QUESTION: "pending", Settled.FAILED: "upstream_failed"}
    return names.get(state) or Settled(state).name.lower()


def _item_status(run: Run, i: int, k: int) -> str | None:
    out = run.root.out[i]
    cells = (
        run.root.feeds[i].cells.cells if i in run.root.feeds else out.cells if isinstance(out, Cells) else []
    )
    if k >= len(cells):
        return None
    return "pending" if cells[k] is None else "completed"


def _parts(run: Run) -> dict[str, list[Any]]:
    """Give the items of maps that have not completed, by node; None where there is none."""
    feeds = (
        (run.rules[i], feed) for i, feed in run.root.feeds.items() if run.root.state[i] != Settled.COMPLETED
    )
    return {vertex.id: feed.cells.cells for vertex, feed in feeds if not vertex.pure}


def _find(run: Run, path: str) -> tuple[Cell, codec.Types] | None:
    """Give the output of a path below the root's own nodes, or where it lies; None if there is none."""
    vertex = run.body.at(path)
    if vertex is None or vertex.pure or path in run.body.by_id:
        return None
    cell = run.inner.get(path)
    prior = run.snapshot.paths.get(path)
    if cell is None and prior is not None and prior.kind == ev.COMPLETED:
        cell = run.root.former_items(prior) if "count" in prior.facts else Stored.of(prior)
    found = cell.cells if isinstance(cell, Cells) else cell
    return None if found is None else (found, vertex.types)


def raise_if_bad(result: RunResult) -> None:
    """Raise what it means that a run has not completed: RunFailed, RunCancelled, RunInterrupted."""
    status, run_id = result.status, result.run_id
    if status is RunStatus.ROLLED_BACK and result.reason == ASKED:
        return
    if status in {RunStatus.FAILED, RunStatus.ROLLED_BACK, RunStatus.ROLLING_BACK}:
        advice = ""
        if status is RunStatus.ROLLED_BACK:
            advice = "What it had done is undone: mend the cause, then start a new run."
        elif status is RunStatus.ROLLING_BACK:
            advice = (
                f"Not all of what it had done is undone: `dagresume rollback {run_id}` goes on with that."
            )
        error = RunFailed(run_id, result.failures, f"it failed ({result.reason})", advice)
        cause = next((f.exception for f in result.failures.values() if f.exception is not None), None)
        raise error from cause
    if result.status is RunStatus.CANCELLED:
        raise RunCancelled(result.run_id, "")
    if result.status is RunStatus.INTERRUPTED and result.reason == "budget":
        raise BudgetExceeded(result.run_id)
    if result.status is RunStatus.INTERRUPTED:
        raise RunInterrupted(result.run_id, result.reason or "interrupted")
