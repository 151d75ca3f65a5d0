"""What the scripts of all peers share: the works, the steps' bodies, and how a figure is told.

Each script runs in an environment of its own, which holds its engine and not this project:

    python run_ENGINE.py chain|fanout|resume STEPS FOLDER

The last line it prints is JSON: `us` per step (from the start of the workflow to its result), `version`,
`python`, `ran` (steps whose bodies ran). `resume` is called twice in one folder: the first process is killed
by the first line of the last step, the second one goes on; `ran` of the second tells what was not kept.
"""

import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

KILLED = 9
ran = 0
_resuming = False
_before_death: list[Callable[[], Any]] = []


def step(x: int) -> int:
    """The body of every step."""
    global ran
    ran += 1
    return x + 1


def last(count: int) -> int:
    """The body of the last step, which takes the results of all others."""
    if _resuming and not (Path(sys.argv[3]) / "killed").exists():
        (Path(sys.argv[3]) / "killed").touch()
        for call in _before_death:
            call()
        os._exit(KILLED)
    return count


def before_death(call: Callable[[], Any]) -> None:
    """Have something done before this process kills itself, such as ending a server it has started."""
    _before_death.append(call)


def main(package: str, run: Callable[[str, int, Path, bool], Awaitable[float]]) -> None:
    """Do the work that was asked for. `run` takes the work, how many steps, the folder, and whether an
    earlier process was killed; it gives the seconds the workflow took.
    """
    global _resuming
    work, steps, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    _resuming = work == "resume"
    again = _resuming and (folder / "killed").exists()
    seconds = asyncio.run(run("fanout" if _resuming else work, steps, folder, again))
    told = {"us": seconds / steps * 1e6, "ran": ran, "version": version_of(package)}
    print(json.dumps(told | {"python": platform.python_version()}), flush=True)
    for call in _before_death:
        call()
    os._exit(0)  # the engine's own threads are nobody's business


def clock() -> float:
    return time.perf_counter()


def check(found: object, wanted: object) -> None:
    if found != wanted:
        raise SystemExit(f"it came out wrong: {found!r}, not {wanted!r}")
