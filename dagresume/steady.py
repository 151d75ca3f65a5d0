"""Awaiting something to its end, whatever is cancelled meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import anyio

__all__ = ["to_its_end"]

T = TypeVar("T")


async def to_its_end(work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
    """Give the result of `work` once it has ended; if the caller was cancelled meanwhile, raise that."""
    future = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is None:
        return future.result()
    if not future.cancelled():
        future.exception()  # seen
    raise cancelled
