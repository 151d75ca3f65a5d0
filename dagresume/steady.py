"""Awaiting something to its end, whatever is cancelled meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any, TypeVar

import anyio

__all__ = ["to_its_end"]

T = TypeVar("T")


async def to_its_end(work: Awaitable[T]) -> T:
    """Give the result of `work` once it has ended; if the caller was cancelled meanwhile, raise that."""
    future = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if not future.cancelled() or _is_cancelled():
            await _ended(future)
        raise


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _ended(future: asyncio.Future[Any]) -> None:
    with anyio.CancelScope(shield=True):
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
    if not future.cancelled():
        future.exception()  # seen
