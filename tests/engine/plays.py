"""What the child processes of the engine tests run: loops to kill, runs that wait. Each works in a folder of
its own; its database is `runs.db`, the world outside is `world.log`.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dagresume import Context, DagresumeError, Engine, Value, Workflow

DB, WORLD = "runs.db", Path("world.log")


def leave(line: str) -> None:
    """Append a line, at once and whole."""
    handle = os.open(WORLD, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(handle, f"{line}\n".encode())
    os.close(handle)


def world(folder: Path = Path()) -> list[str]:
    """What has happened outside, in order."""
    file = folder / WORLD
    return file.read_text().splitlines() if file.exists() else []


def until(true: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for what another process does."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "what the other process was to do did not happen"
        time.sleep(0.001)


# -- loops ----------------------------------------------------------------------------------------------

long = Workflow("long", idempotent=True)


@long.loop(id="count", initial=Value(0), until=lambda state: state == 5000, max_iterations=5000)
async def count(state: int, ctx: Context) -> int:
    leave(ctx.path)
    return state + 1


two = Workflow("two", idempotent=True)
_body = Workflow("body")


@_body.node
async def draw(state: list[float], ctx: Context) -> float:
    drawn = random.random()
    leave(f"draw {len(state)} {drawn}")
    return drawn


@_body.node
async def keep(state: list[float], draw: float) -> list[float]:
    leave(f"keep {len(state)}")
    if len(state) == 2 and world().count("keep 2") == 1:
        await asyncio.sleep(60)
    return [*state, draw]


two.loop("refine", _body, initial=Value([]), until=lambda state: len(state) == 4, max_iterations=9)


nested = Workflow("nested", idempotent=True)
_round = Workflow("round")


@_round.loop(id="inner", initial="state", until=lambda s: s[1] == 2, max_iterations=5)
async def inner(state: list[int]) -> list[int]:
    leave(f"({state[0]},{state[1]})")
    if state == [1, 1] and world().count("(1,1)") == 1:
        await asyncio.sleep(60)
    return [state[0], state[1] + 1]


@_round.node(args={"found": "inner"})
async def up(found: list[int]) -> list[int]:
    return [found[0] + 1, 0]


nested.loop("outer", _round, initial=Value([0, 0]), until=lambda s: s[0] == 3, max_iterations=5)


# -- waits ----------------------------------------------------------------------------------------------

pays = Workflow("pays")


@pays.node
async def order() -> int:
    leave("order")
    return 42


pays.approval("ap", depends_on=order, prompt="Pay?")


@pays.node
async def pay(ap: dict[str, Any], order: int) -> str:
    leave(f"pay {ap['by']}")
    return f"{order} by {ap['by']}"


sleeps = Workflow("sleeps")


@sleeps.node
async def before() -> None:
    leave("before")


sleeps.sleep("nap", 0.4, depends_on=before)


@sleeps.node(depends_on="nap")
async def behind() -> str:
    leave("behind")
    return "awake"


async def go(flow: str, how: str = "run", options: Any = None, **asked: Any) -> dict[str, Any]:
    """Run a workflow, or resume its newest run."""
    wf = globals()[flow]
    async with Engine(DB, workflows=[wf], **options or {}) as engine:
        try:
            if how == "run":
                result = await engine.run(wf, key="k", **asked)
            else:
                (newest,) = await engine.runs(limit=1)
                result = await engine.resume(newest.run_id, **asked)
        except DagresumeError as error:
            return {"error": type(error).__name__, "message": str(error)}
        return {
            "run_id": result.run_id,
            "status": result.status,
            "reason": result.reason,
            "outputs": dict(result.outputs),
            "executed": len(result.executed),
            "reused": len(result.reused),
        }


async def say(approve: bool, by: str, gate: str = "") -> dict[str, Any]:
    """Decide about `ap` of the newest run, once the file `gate` is there."""
    async with Engine(DB) as engine:
        (newest,) = await engine.runs(limit=1)
        leave(f"ready {by}")
        while gate and not Path(gate).exists():  # noqa: ASYNC110, ASYNC240  # another process opens it
            await asyncio.sleep(0)
        try:
            await engine.decide(newest.run_id, "ap", approve, by=by)
        except DagresumeError as error:
            return {"error": type(error).__name__, "message": str(error)}
        return {"said": approve}


async def wake(flow: str, seconds: float = 60.0) -> None:
    """Be an engine that wakes what waits."""
    async with Engine(DB, workflows=[globals()[flow]], wake=True):
        leave("here")
        await asyncio.sleep(seconds)


async def cancel(by: str) -> str:
    """Cancel the newest run."""
    async with Engine(DB) as engine:
        (newest,) = await engine.runs(limit=1)
        await engine.cancel(newest.run_id, by)
        return (await engine.get(newest.run_id)).status
