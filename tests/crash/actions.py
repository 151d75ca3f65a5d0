"""What the processes of the matrix are killed in: going on with a run that died, migrating, and so on.

Each action is called again after a kill, as a person or a program would, until it says how it ended.
"""

from __future__ import annotations

import sqlite3
from typing import Any, Final

from dagresume import Engine, RunResult, RunStatus, UncertainNode, codec, schema
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
