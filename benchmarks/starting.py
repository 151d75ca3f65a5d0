"""What it costs to import dagresume and to start its command, each time in a new interpreter."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.commit import Sample, compare
from benchmarks.rows import Row, pair
from dagresume.bench import Spread

OURS = "from dagresume import Workflow, Engine"
FOUNDING = "import networkx, anyio, aiosqlite, structlog"
_TIMED = "import time, json; begun = time.perf_counter(); {}; print(json.dumps(time.perf_counter() - begun))"


# As it is where the package is installed: its bytecode is there.
_SURROUNDINGS = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def imported(statement: str, _folder: Path) -> Sample:
    done = subprocess.run(
        [sys.executable, "-c", _TIMED.format(statement)],
        capture_output=True,
        text=True,
        check=True,
        env=_SURROUNDINGS,
    )
    return Sample(json.loads(done.stdout) * 1e6)


def helped() -> float:
    begun = time.perf_counter()
    command = [sys.executable, "-m", "dagresume", "--help"]
    subprocess.run(command, capture_output=True, check=True, env=_SURROUNDINGS)
    return time.perf_counter() - begun


def measure(*, rounds: int, scale: float, folder: Path) -> list[Row]:
    contenders = {
        "the four founding packages": lambda folder: imported(FOUNDING, folder),
        "dagresume": lambda folder: imported(OURS, folder),
    }
    ratios = [("dagresume", "the four founding packages")]
    more = max(1, round(2 * rounds * scale))  # a new interpreter takes a quarter of a second
    report = compare("import", 1, contenders, ratios, rounds=more, folder=folder)
    helped()
    seconds = Spread.of([helped() for _ in range(more)])
    return [
        pair(
            "starting",
            report,
            "dagresume",
            "the four founding packages",
            1.2,
            rounds=more,
            work=f"`{OURS}`",
            against=f"`{FOUNDING}`",
            figures="µs",
            durability="nothing is stored",
        ),
        Row(
            "starting",
            "`dagresume --help`",
            "–",
            0.35,
            seconds,
            unit="s",
            rounds=more,
            durability="nothing is stored",
        ),
    ]
