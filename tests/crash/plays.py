"""What the processes of the crash tests do. Each works in a folder of its own; its database is `runs.db`."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

from dagresume import AlreadyRunning, DagresumeError, Engine, RunFailed, UncertainNode
from dagresume.sqlite import SQLiteStore
from dagresume.store import Outcome, Unit
from dagresume.testing import StoreWrapper
from tests.crash import flows

DB = "runs.db"


async def go(
    flow: str, how: str = "run", key: str = "k", options: Any = None, **inputs: Any
) -> dict[str, Any]:
    """Run a workflow, or resume or retry its newest run."""
    return await _go(
        getattr(flows, flow), how, key, Engine(DB, workflows=[getattr(flows, flow)], **options or {}), inputs
    )


async def _go(wf: Any, how: str, key: str, engine: Engine, inputs: Any) -> dict[str, Any]:
    async with engine:
        try:
            if how == "run":
                result = await engine.run(wf, inputs, key=key)
            else:
                (newest,) = await engine.runs(limit=1)
                result = await getattr(engine, how)(newest.run_id)
        except DagresumeError as error:
            told: dict[str, Any] = {"error": type(error).__name__, "message": str(error)}
            if isinstance(error, UncertainNode):
                told["paths"] = list(error.paths)
            if isinstance(error, RunFailed):
                told["failures"] = list(error.failures)
            return told
        return {
            "run_id": result.run_id,
            "status": result.status,
            "outputs": dict(result.outputs),
            "executed": list(result.executed),
            "reused": sorted(result.reused),
        }


class _SlowResults(StoreWrapper):
    """Commits what nodes gave 200 ms late, and everything else at once."""

    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        if any(record.kind == "node.completed" for unit in units for record in unit.records):
            await asyncio.sleep(0.2)
        return await self.inner.commit(units)


async def with_slow_results(flow: str) -> dict[str, Any]:
    wf = getattr(flows, flow)
    return await _go(wf, "run", "k", Engine(workflows=[wf], store=_SlowResults(SQLiteStore(DB))), {})


class _DiesWithABlob(StoreWrapper):
    """Ends the process when an output is in its file and its record is not in the database."""

    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        if any("blob" in (record.data or "") for unit in units for record in unit.records):
            os.kill(os.getpid(), signal.SIGKILL)
        return await self.inner.commit(units)


async def die_with_a_blob(flow: str) -> dict[str, Any]:
    wf = getattr(flows, flow)
    return await _go(wf, "run", "k", Engine(workflows=[wf], store=_DiesWithABlob(SQLiteStore(DB))), {})


async def wait_to_take_over(flow: str, options: Any) -> dict[str, Any]:
    """Resume the newest run as soon as nobody holds it."""
    deadline = time.monotonic() + 20
    while True:
        told = await go(flow, "resume", options=options)
        if told.get("error") != "RunLocked" or time.monotonic() > deadline:
            return told
        await asyncio.sleep(0.05)


async def look(run: str = "") -> dict[str, Any]:
    """Say how the newest run and its nodes are, without its code."""
    async with Engine(DB) as engine:
        (newest,) = await engine.runs(limit=1)
        info = await engine.get(newest.run_id)
        return {"status": info.status, "reason": info.reason, "owner": info.owner} | {
            "nodes": {path: node.status for path, node in info.nodes.items()}
        }


async def start_ten(flow: str) -> dict[str, Any]:
    """Start the same key ten times at once."""
    wf = getattr(flows, flow)

    async def start(engine: Engine) -> tuple[str, bool]:
        try:
            handle = await engine.start(wf, key="k")
        except AlreadyRunning as error:
            return error.run_id, False
        await handle.result()
        return handle.run_id, True

    async with Engine(DB) as engine:
        told = await asyncio.gather(*(start(engine) for _ in range(10)))
    return {"runs": sorted({run_id for run_id, _ in told}), "started": sum(mine for _, mine in told)}


async def stay(seconds: float = 60) -> None:
    """Be a living session that drives nothing."""
    async with Engine(DB):
        flows.leave("here")
        await asyncio.sleep(seconds)


class _DiesAt(StoreWrapper):
    """Ends the process before or after its n-th commit; counts them."""

    def __init__(self, at: tuple[str, int] | None) -> None:
        super().__init__(SQLiteStore(DB, synchronous="normal"))
        self._at, self.count = at, 0

    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        self.count += 1
        if self._at == ("before", self.count):
            os.kill(os.getpid(), signal.SIGKILL)
        outcomes = await self.inner.commit(units)
        if self._at == ("after", self.count):
            os.kill(os.getpid(), signal.SIGKILL)
        return outcomes


async def die_at(flow: str, how: str, at: Sequence[Any] | None = None) -> dict[str, Any]:
    """Run a workflow, or roll back or resume its newest run, and die at this commit."""
    wf = getattr(flows, flow)
    store = _DiesAt(None if at is None else (at[0], at[1]))
    async with Engine(workflows=[wf], store=store) as engine:
        if how == "run":
            result = await engine.run(wf, raise_on_failure=False)
        else:
            (newest,) = await engine.runs(limit=1)
            options = {"raise_on_failure": False} if how == "resume" else {}
            result = await getattr(engine, how)(newest.run_id, **options)
    return {"status": result.status, "failures": list(result.failures), "commits": store.count}
