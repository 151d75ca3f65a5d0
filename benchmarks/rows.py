"""What a benchmark says: one line for each goal, with what it was measured against in the same rounds."""

import json
import os
import platform
import sqlite3
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.commit import Report
from dagresume.bench import Spread

DURABLE = "WAL, synchronous=FULL, each result before the next edge"
BESIDE_NOTHING = f"ours: {DURABLE}; theirs keeps nothing"
LIBRARIES = ("aiosqlite", "anyio", "networkx")


@dataclass(frozen=True)
class Row:
    """One goal. `measured` is a ratio if there is something to measure against, else a figure in `unit`."""

    key: str  # of the command that measures it
    work: str
    against: str
    limit: float
    measured: Spread
    unit: str = "×"
    ours: Spread | None = None  # µs per node, or as `figures` says
    theirs: Spread | None = None
    figures: str = "µs per node"
    rounds: int = 1
    durability: str = DURABLE
    note: str = ""
    python: str = field(default_factory=platform.python_version)
    module: str = "benchmarks.goals"
    counts: bool = True  # no: shown beside the others, and there is no goal to miss

    @property
    def met(self) -> bool | None:
        return self.measured.median <= self.limit if self.counts else None

    @property
    def command(self) -> str:
        return f"python -m {self.module} {self.key}"

    @property
    def goal(self) -> str:
        return f"≤ {self.limit:g} {self.unit}" if self.counts else ""

    def told(self) -> dict[str, Any]:
        """Give it as JSON data."""
        return asdict(self) | {"met": self.met, "goal": self.goal, "command": self.command}


def pair(
    key: str,
    report: Report,
    ours: str,
    theirs: str,
    limit: float,
    *,
    rounds: int,
    work: str = "",
    against: str = "",
    figures: str = "µs per node",
    durability: str = DURABLE,
    note: str = "",
    counts: bool = True,
) -> Row:
    """Give the row that compares two contenders of a report."""
    return Row(
        key,
        work or f"{report.title}: {ours}",
        against or theirs,
        limit,
        report.ratios[f"{ours} / {theirs}"],
        ours=report.microseconds[ours],
        theirs=report.microseconds[theirs],
        figures=figures,
        rounds=rounds,
        durability=durability,
        note=note,
        counts=counts,
    )


def show(rows: Iterable[Row]) -> None:
    """Print a table: what was measured, what was aimed at, and whether that was reached."""
    for row in rows:
        mark = {True: "met   ", False: "MISSED", None: "shown "}[row.met]
        spread = f"{row.measured.median:.3g} [{row.measured.low:.3g} .. {row.measured.high:.3g}]"
        goal = f"   (goal {row.goal})" if row.goal else ""
        print(f"{mark}  {row.work}  against {row.against}:  {spread} {row.unit}{goal}")
        told = []
        if row.ours is not None:
            told.append(f"ours {row.ours.median:,.5g} {row.figures}")
        if row.theirs is not None:
            told.append(f"theirs {row.theirs.median:,.5g}")
        told += [f"{row.rounds} rounds", f"Python {row.python}", row.durability, row.note]
        print("        " + " · ".join(filter(None, told)))


def machine(folder: Path) -> dict[str, Any]:
    """Give what the figures depend on."""
    return {
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        **{name: version(name) for name in LIBRARIES},
        "processor": _first("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "system": f"{platform.system()} {platform.machine()}",
        "file_system": _file_system(folder),
        "commit": _commit(),
    }


def _first(file: str, name: str) -> str:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def _file_system(folder: Path) -> str:
    try:
        lines = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    here = str(folder.resolve())
    mounts = [line.split()[1:3] for line in lines]
    around = [(place, kind) for place, kind in mounts if here.startswith(place)]
    return max(around, key=lambda found: len(found[0]))[1] if around else ""


def _commit() -> str:
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return asked.stdout.strip()


def child(module: str, *arguments: str, folder: Path) -> dict[str, Any]:
    """Run a part of a benchmark in a process of its own; gives the JSON it prints last."""
    root = Path(__file__).resolve().parent.parent
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    if done.returncode:
        raise SystemExit(f"{module} {' '.join(arguments)} failed:\n{done.stderr}")
    told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return told


def told(rows: Sequence[Row], folder: Path, fsync: float, scale: float = 1.0) -> dict[str, Any]:
    """Give rows with the machine they were measured on; `fsync` in microseconds."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(folder) | {"fdatasync_us": round(fsync, 1)},
        "scale": scale,
        "rows": [row.told() for row in rows],
    }
