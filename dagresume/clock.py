"""Time as the engine sees it: one place to ask, so that tests can turn it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

import anyio

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Timer(Protocol):
    """A call that is due later."""

    def cancel(self) -> object:
        """Have it not be made."""


class Clock(Protocol):
    """What the engine needs of time; `dagresume.testing.FakeClock` is the other implementation."""

    def now(self) -> int:
        """Give the wall clock in microseconds UTC since 1970; for what is stored."""

    def monotonic(self) -> float:
        """Give seconds that never run backwards; for what is measured."""

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""

    def call_later(self, seconds: float, call: Callable[..., object], *args: Any) -> Timer:
        """Call something on the running loop after `seconds`, unless the timer is cancelled before."""


class SystemClock:
    """The machine's clock."""

    @staticmethod
    def now() -> int:
        return time.time_ns() // 1000

    monotonic = staticmethod(time.monotonic)

    @staticmethod
    async def sleep(seconds: float) -> None:
        await anyio.sleep(seconds)

    @staticmethod
    def call_later(seconds: float, call: Callable[..., object], *args: Any) -> Timer:
        return asyncio.get_running_loop().call_later(seconds, call, *args)


def to_datetime(microseconds: int) -> datetime:
    """Give the aware UTC datetime of a stored time."""
    return _EPOCH + timedelta(microseconds=microseconds)


def to_micros(moment: datetime) -> int:
    """Give an aware datetime as it is stored: microseconds UTC since 1970."""
    return (moment - _EPOCH) // timedelta(microseconds=1)
