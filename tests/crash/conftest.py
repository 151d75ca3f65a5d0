"""Processes to kill."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dagresume.testing import Child, Zygote


@pytest.fixture(scope="session")
def nursery() -> Iterator[Zygote]:
    """A process that has imported the plays, for all tests of this folder."""
    with Zygote("tests.crash.plays") as zygote:
        yield zygote


Play = Callable[..., Child]


@pytest.fixture
def play(nursery: Zygote, tmp_path: Path) -> Play:
    """Begin a play in a new process that works in this test's folder."""

    def begin(name: str, **arguments: Any) -> Child:
        return nursery.call(f"tests.crash.plays:{name}", tmp_path, **arguments)

    return begin


def until(true: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for what another process does."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "what the other process was to do did not happen"
        time.sleep(0.001)
