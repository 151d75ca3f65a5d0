"""What the scripts of all peers share: the works, the steps' bodies, and how a figure is told.

Each script runs in an environment of its own, which holds its engine and not this project:

    python run_ENGINE.py chain|fanout|resume-chain|resume-fanout STEPS FOLDER

The last line it prints is JSON: `us` per step (from the start of the workflow to its result), `version`,
`python`, `ran` (steps whose bodies ran). `resume-…` is called twice in one folder: the first process is
killed in the last step, the second one goes on; `ran` of the second tells what was not kept (the last step of
a chain is counted, what joins a fan-out is not).
"""

import asyncio
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

JOIN = -1
ran = 0
_deadly = 0  # the step whose body kills this process, counted from 1, or JOIN
_before_death: list[Callable[[], Any]] = []


def step(x: int) -> int:
    """The body of every step."""
    global ran
    ran += 1
    if ran == _deadly:
        die()
    return x + 1


def last(count: int) -> int:
    """The body of the last step, which takes the results of all others."""
    if _deadly == JOIN:
        die()
    return count


def die() -> None:
    """Kill this process as `kill -9` does."""
    (Path(sys.argv[3]) / "killed").touch()
    for call in _before_death:
        call()
    os.kill(os.getpid(), signal.SIGKILL)


def before_death(call: Callable[[], Any]) -> None:
    """Have something done before this process kills itself, such as ending a server it has started."""
    _before_death.append(call)


def main(package: str, run: Callable[[str, int, Path, bool], Awaitable[float]], *, beside: str = "") -> None:
    """Do the work that was asked for. `run` takes the work, how many steps, the folder, and whether an
    earlier process was killed; it gives the seconds the workflow took. `beside`: what else has a version.
    """
    global _deadly
    asked, steps, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    work = asked.removeprefix("resume-")
    again = (folder / "killed").exists()
    if work != asked and not again:
        _deadly = steps if work == "chain" else JOIN
    seconds = asyncio.run(run(work, steps, folder, again))
    try:
        version = version_of(package)
    except PackageNotFoundError:
        version = "of this checkout"
    told = {"us": seconds / steps * 1e6, "ran": ran, "version": f"{version} {beside}".strip()}
    print(json.dumps(told | {"python": platform.python_version()}), flush=True)
    for call in _before_death:
        call()
    os._exit(0)  # the engine's own threads are nobody's business


def clock() -> float:
    return time.perf_counter()


def check(found: object, wanted: object) -> None:
    if found != wanted:
        raise SystemExit(f"it came out wrong: {found!r}, not {wanted!r}")
