"""What worker processes import: nothing heavy, since the time it takes counts."""

import asyncio
import time
from typing import Any

from dagresume.context import Context


def nap(n: int) -> int:
    """Take a while."""
    time.sleep(0.15)
    return n


def commits_with(ctx: Context) -> None:
    """Ask for what a process cannot have."""
    ctx.commit_with("SELECT 1")


def _made(attempt: int) -> str:
    return f"once in {attempt}"


async def _made_in_a_while(attempt: int) -> str:
    await asyncio.sleep(0)
    return f"once in {attempt}"


def keeps(ctx: Context) -> list[Any]:
    """Save a state, call once, leave a file, and fail the first time."""
    files = sorted(file.name for file in ctx.artifacts.iterdir())
    (ctx.artifacts / "a file").write_text("x")
    ctx.progress(ctx.attempt, 2)
    found = ctx.once("k", _made_in_a_while, ctx.attempt)
    if ctx.attempt == 1:
        ctx.save_state(f"state of {ctx.attempt}")
        raise ConnectionError("the first attempt fails")
    return [ctx.state, found, sorted(file.name for file in ctx.artifacts.iterdir()), files]


def keeps_with_a_loop(ctx: Context) -> list[Any]:
    """Do the same in a loop of its own."""

    async def body() -> list[Any]:
        found = await ctx.once("k", _made, ctx.attempt)
        if ctx.attempt == 1:
            await ctx.save_state({"n": 1})
            raise ConnectionError("the first attempt fails")
        return [ctx.state, found]

    return asyncio.run(body())


def _cut_off() -> None:
    raise KeyboardInterrupt


def cuts_off(ctx: Context) -> None:
    """Leave a call without a result, then ask for it again."""
    try:
        ctx.once("k", _cut_off)
    except KeyboardInterrupt:
        raise ConnectionError("nobody knows what the call did") from None
