"""What tests of workflows need: everything here is imported from here, from nowhere else.

    FakeClock       time that passes when you say so
    Faults          an engine in which what you name fails, is late, is not stored, or kills the process
    StoreWrapper    something between an engine and its store
    StoreContract   what every store does, as a suite of tests to subclass (needs pytest)
    Zygote          a process that has imported your code and forks a fresh one for each call
    autopsy         what a database held when its process had died, read with plain SQL
    sweep           kills a workflow at every commit and every SQL statement, resumes it, says what went wrong
    sweep_action    the same for anything else that is done with an engine

Nothing in the engine knows of this: clock, store and executors are passed in or wrapped, SQL statements are
counted by SQLite's own trace. The zygote needs `os.fork`. How to prove a workflow of your own is in
`dagresume/docs/testing.md`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from dagresume.autopsy import Autopsy, autopsy
from dagresume.fakes import FakeClock, StoreWrapper
from dagresume.faults import Faults
from dagresume.killpoints import Point
from dagresume.stages import Case
from dagresume.sweeps import Sweep, sweep, sweep_action
from dagresume.zygote import Child, Ended, Zygote

if TYPE_CHECKING:
    from dagresume.contracts import StoreContract

__all__ = [
    "Autopsy",
    "Case",
    "Child",
    "Ended",
    "FakeClock",
    "Faults",
    "Point",
    "StoreContract",
    "StoreWrapper",
    "Sweep",
    "Zygote",
    "autopsy",
    "sweep",
    "sweep_action",
]


def __getattr__(name: str) -> Any:
    """Give what needs pytest when it is asked for: nothing else here does."""
    if name != "StoreContract":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import pytest
    except ImportError as error:
        raise ImportError("StoreContract is a suite of pytest's: pip install pytest") from error
    if "dagresume.contracts" not in sys.modules:
        pytest.register_assert_rewrite("dagresume.contracts")
    from dagresume.contracts import StoreContract

    return StoreContract
