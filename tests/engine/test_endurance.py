"""Thousands of runs in one process leave nothing behind: see `endurance`, which is the process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WAL = 64 * 2**20
KEPT = 25_000  # bytes of a result that somebody keeps: it knows its run, and tells of any path of it


def measure(folder: Path, play: str, runs: int, after: int) -> dict[str, Any]:
    """Let it happen in a process of its own; `after`: runs of warming up that the slopes leave out."""
    command = [sys.executable, "-m", "tests.engine.endurance", str(folder), play, str(runs), str(after)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    print(f"\n{play} × {runs}: {found}")
    return found


def check_held(found: dict[str, Any]) -> None:
    for what, before in found["before"].items():
        assert abs(found["after"][what] - before) <= 3, (
            f"{what}: {before} before, {found['after'][what]} after"
        )


def test_short_runs_leave_nothing(tmp_path: Path) -> None:
    """G6, a few of them: no object more than before; the resident size alone would be too coarse here."""
    found = measure(tmp_path, "short_runs", 3000, 1000)
    check_held(found)
    assert found["objects a run"] < 1
    assert found["bytes a run"] < 2000
    assert found["wal"] <= WAL


def test_what_is_kept_is_seen(tmp_path: Path) -> None:
    """The measure itself: results that are kept show, in objects and in bytes."""
    found = measure(tmp_path, "kept_handles", 750, 250)
    assert found["objects a run"] > 5
    assert 1000 < found["bytes a run"] < KEPT


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_four_thousand_short_runs_leave_nothing(tmp_path: Path) -> None:
    """G6: the slope of the resident size over the last 20,000, and no run or key slower than the first."""
    found = measure(tmp_path, "short_runs", 24_000, 4_000)
    check_held(found)
    assert found["bytes a run"] < 50
    assert found["objects a run"] < 0.05
    assert found["wal"] <= WAL
    assert found["last"] < 1.5 * found["first"]
    assert found["key late"] < 6 * found["key early"], "a key is looked for in an index"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("play", "runs", "after", "most"),
    [
        # The resident size shows for a while how the page caches of SQLite and the index of its log fill:
        # over few runs what is sharp is the number of objects.
        ("failing", 14_000, 7000, 200),
        ("cancelled", 14_000, 7000, 200),
        ("resumed", 2000, 500, 3000),
        ("followers", 2000, 500, 400),
        ("engines", 300, 100, 8000),
    ],
)
def test_what_ends_otherwise_leaves_nothing_either(
    tmp_path: Path, play: str, runs: int, after: int, most: int
) -> None:
    """G6: failing, cancelled and resumed runs, consumers of events, engines that open and close."""
    found = measure(tmp_path, play, runs, after)
    check_held(found)
    assert found["objects a run"] < 0.1
    assert found["bytes a run"] < most
    assert found["wal"] <= WAL


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_foreign_reader_stops_nothing(tmp_path: Path) -> None:
    """G6: the log grows while it holds its snapshot, and no longer."""
    found = measure(tmp_path, "foreign_reader", 3000, 500)
    check_held(found)
    assert found["wal"] > 32 * 2**20, "the reader held nothing up"
    assert found["wal after"] <= WAL
