"""What the processes of the matrix are killed in: going on with a run that died, migrating, and so on.

Each action is called again after a kill, as a person or a program would, until it says how it ended.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any, Final

from dagresume import Engine, Recovery, RunResult, RunStatus, UncertainNode, Workflow, codec, schema
from dagresume.plays import DATABASE, play, speak
from tests.crash import flows

SPILL: Final = 4
"""Bytes over which an output goes into a file: so small that some of every workflow do."""


async def cut_off(flow: str, start: int, commit: int, **_: Any) -> None:
    """Run a workflow and be killed after this commit."""
    source = {"target": f"tests.crash.flows:{flow}", "inputs": codec.pack({"start": start})}
    await play(source, "k", {"spill_bytes": SPILL}, point=("after commit", commit))


async def go_on(engine: Engine, **_: Any) -> Any:
    """Resume the newest run as a person would: look, and retry what nobody knows about."""
    (newest,) = await engine.runs(limit=1)
    try:
        result = await engine.resume(newest.run_id, raise_on_failure=False)
    except UncertainNode:
        result = await engine.retry(newest.run_id, raise_on_failure=False)
    return told(await _to_the_end(engine, result))


async def _to_the_end(engine: Engine, result: RunResult) -> RunResult:
    (workflow,) = engine._registered.values()
    while result.status is RunStatus.WAITING:
        await speak(engine, workflow, result.run_id)
        result = await engine.resume(result.run_id, raise_on_failure=False)
    return result


def told(result: RunResult) -> dict[str, Any]:
    outputs = {id_: codec.canonical(value) for id_, value in result.outputs.items()}
    return {"status": result.status, "outputs": outputs}


# -- without a person -----------------------------------------------------------------------------------


def let_recover() -> None:
    """Let every workflow of these tests go on by itself, however often its process has died."""
    for found in vars(flows).values():
        if isinstance(found, Workflow):
            found.recovery = Recovery(auto_resume=True, max_attempts=20)


async def cut_off_to_recover(**arguments: Any) -> None:
    """Do as `cut_off` does, with a workflow that goes on by itself."""
    let_recover()
    await cut_off(**arguments)


async def recover(engine: Any, flow: str, **_: Any) -> Any:
    """Recover as an application does when it starts; what that left to a person, a person then does.

    Only where nodes are neither idempotent nor can be asked may anything else be left than approvals.
    """
    left = {each.reason for each in await engine.recover(wait=True) if each.action != "resumed"}
    given = {} if "careful" in flow else {"left": sorted(left - {"waiting_for_approval"})}
    return given | await go_on(engine)


async def done_and_cut_off(flow: str, start: int, **more: Any) -> None:
    """Leave a run that has completed and one whose process was killed."""
    source = {"target": f"tests.crash.flows:{flow}", "inputs": codec.pack({"start": start})}
    await play(source, "done", {"spill_bytes": SPILL})
    await cut_off(flow, start, **more)


async def prune(engine: Any, **_: Any) -> Any:
    """Delete the run that has completed; say what is left of runs, of records and of files."""
    await engine.prune(older_than=0, failed_older_than=0)
    left = {info.run_id: info.status for info in await engine.runs()}
    with sqlite3.connect(DATABASE) as conn:
        events = conn.execute(
            "SELECT count(*) FROM dagresume_events WHERE run NOT IN (SELECT run FROM dagresume_runs)"
        )
        orphans = events.fetchone()[0]
    conn.close()
    return {"runs": sorted(left.values()), "orphans": orphans, "files": _files_beside(set(left))}


def _files_beside(left: set[str]) -> int:
    """Count the files of runs that are not there."""
    return sum(file.parent.name not in left for file in Path(f"{DATABASE}.blobs").glob("*/*"))


# -- a newer schema -------------------------------------------------------------------------------------

NEWER: Final = (
    "CREATE TABLE dagresume_extra(run INTEGER PRIMARY KEY, length INTEGER)",
    "INSERT INTO dagresume_extra SELECT run, count(*) FROM dagresume_events GROUP BY run",
    "ALTER TABLE dagresume_runs ADD COLUMN extra TEXT",
    "UPDATE dagresume_runs SET extra = 'none'",
)


def with_a_newer_schema() -> None:
    """Let this process know a version of the tables that is newer than the file's."""
    schema.MIGRATIONS = (*schema.MIGRATIONS, NEWER)  # type: ignore[misc,assignment]
    schema.VERSION = len(schema.MIGRATIONS)  # type: ignore[misc]


async def look_at_the_tables(engine: Engine, **_: Any) -> Any:
    """Say what the tables hold once the engine has opened them, and that its runs are as they were."""
    (newest,) = await engine.runs(limit=1)
    info = await engine.get(newest.run_id)
    with sqlite3.connect(DATABASE) as conn:
        extra = conn.execute("SELECT run, length FROM dagresume_extra").fetchall()
        runs = conn.execute("SELECT run, extra FROM dagresume_runs").fetchall()
        (version,) = conn.execute("PRAGMA user_version").fetchone()
    conn.close()
    nodes = {path: node.status for path, node in info.nodes.items()}
    return {"extra": extra, "runs": runs, "version": version, "nodes": nodes}


VARIANTS: Final = ("idempotent", "careful", "asking")


def flow_of(workflow: str, variant: str) -> str:
    """Give the name of a sweep workflow in one of its three variants."""
    name = variant if workflow == "diamond" else f"{workflow}_{variant}"
    assert hasattr(flows, name)
    return name
