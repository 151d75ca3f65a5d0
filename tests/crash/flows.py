"""Workflows that the crash tests kill. Each body leaves a line in a file of the outside world: that is its effect."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dagresume import NOT_DONE, Context, Retry, Workflow

WORLD = Path("world.log")


def leave(line: str, file: Path = WORLD) -> None:
    """Append a line, at once and whole."""
    handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(handle, f"{line}\n".encode())
    os.close(handle)


def world(folder: Path = Path()) -> list[str]:
    """What has happened outside, in order."""
    file = folder / WORLD
    return file.read_text().splitlines() if file.exists() else []


async def work(ctx: Context, value: int) -> int:
    """Have the effect of a path, and say so a moment later."""
    await asyncio.sleep(0.001)
    leave(f"{ctx.path} {value}")
    await asyncio.sleep(0.001)
    return value


async def look(ctx: Context) -> Any:
    """Find out from the outside world what an attempt did."""
    done = dict(line.split(" ") for line in world())
    return int(done[ctx.path]) if ctx.path in done else NOT_DONE


def diamond(*, idempotent: bool, reconcile: Callable[..., Any] | None = None) -> Workflow:
    """Six nodes: a diamond (a, b, c, d), a map over what a gave, a node that fails at first, and a sink."""
    wf = Workflow("diamond", idempotent=idempotent)

    async def numbers(ctx: Context, start: int) -> list[int]:
        return [start, await work(ctx, start + 1), start + 2]

    async def flaky(a: list[int], ctx: Context) -> int:
        if ctx.attempt == 1:
            raise ConnectionError("the first attempt fails")
        return await work(ctx, sum(a))

    async def left(a: list[int], ctx: Context) -> int:
        return await work(ctx, a[0])

    async def join(b: int, c: int, ctx: Context) -> int:
        return await work(ctx, b + c)

    async def item(n: int, ctx: Context) -> int:
        return await work(ctx, 10 * n)

    async def sink(d: int, m: list[int], ctx: Context) -> int:
        return await work(ctx, d + sum(m))

    async def look_for_numbers(start: int, ctx: Context) -> Any:
        found = await look(ctx)
        return found if found is NOT_DONE else [start, found, start + 2]

    known = reconcile is not None
    wf.node(id="a", reconcile=look_for_numbers if known else None)(numbers)
    wf.node(id="b", reconcile=reconcile, retry=Retry(2, delay=0.002))(flaky)
    wf.node(id="c", reconcile=reconcile)(left)
    wf.node(id="d", reconcile=reconcile)(join)
    wf.node(id="m", reconcile=reconcile, for_each={"n": "a"}, concurrency=2)(item)
    wf.node(id="e", reconcile=reconcile)(sink)
    return wf


idempotent = diamond(idempotent=True)
careful = diamond(idempotent=False)
asking = diamond(idempotent=False, reconcile=look)
