"""`dagresume bench`: the figures are there, fit a terminal, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from dagresume.bench import Bench, measure
from dagresume.cli import bench
from tests.cli.conftest import Cli

NAMES = [
    "append and fsync",
    "sqlite3: INSERT, COMMIT",
    "chain, idempotent",
    "chain, not idempotent",
    "fan-out, idempotent",
    "fan-out, not idempotent",
]


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let --quick be quicker."""
    monkeypatch.setattr(bench, "_QUICK", {"seconds": 0.0, "nodes": 20, "width": 50})


def test_the_figures_are_those_of_the_work(place: Path, cli: Cli) -> None:
    done = cli("bench --quick --json --concurrency 8")
    assert (done.code, done.err) == (0, "" if not done.json["in_memory"] else done.err)
    told = done.json
    assert (told["folder"], told["synchronous"], told["concurrency"]) == (str(place), "full", 8)
    assert [each["name"] for each in told["measures"]] == NAMES
    for each in told["measures"]:
        assert 0 < each["seconds"]["low"] <= each["seconds"]["median"] <= each["seconds"]["high"] < 5
        assert (each["commits"] is None) == (each["name"] in NAMES[:2])
    counts = {name: waits["count"] for name, waits in told["waits"].items()}
    sizes = [told["nodes"], told["nodes"], told["width"] + 1, told["width"] + 1]
    assert counts == dict(zip(NAMES[2:], [told["rounds"] * size for size in sizes], strict=True))
    for waits in told["waits"].values():
        assert 0 < waits["p50"] <= waits["p95"] <= waits["p99"] <= waits["p999"] <= waits["max"]
        assert sum(step["count"] for step in waits["steps"]) == waits["count"]
        assert waits["steps"][-1]["upto"] >= waits["max"]
    assert list(place.iterdir()) == []


def test_the_table_fits_a_terminal(place: Path, cli: Cli) -> None:
    done = cli("bench --quick --synchronous normal")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert max(map(cell_len, lines)) <= 80
    assert [name for name in NAMES if not any(line.startswith(name) for line in lines)] == []
    assert "p99.9" in done.out
    assert "█" in done.out
    assert "\x1b" not in done.out
    assert "synchronous normal" in done.out
    assert str(place) in done.err
    assert list(place.iterdir()) == []


def test_it_measures_where_the_database_is(place: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[Path] = []

    async def noted(folder: Path, **settings: Any) -> Bench:
        places.append(folder)
        return await measure(folder, **settings)

    monkeypatch.setattr(bench, "measure", noted)
    for name in ("data", "other"):
        (place / name).mkdir()
    assert cli("bench --quick --json --db data/runs.db").code == 0
    assert cli("bench --quick --json --db data/runs.db --folder other").code == 0
    assert places == [place / "data", place / "other"]
    assert [list(folder.iterdir()) for folder in places] == [[], []]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--folder absent", "--folder"),
        ("--folder file", "--folder"),
        ("--db absent/runs.db", "--folder"),
        ("--db :memory:", "--folder"),
        ("--db postgresql://host/db", "--folder"),
        ("--synchronous never", "full or normal"),
        ("--concurrency 0", "--concurrency"),
    ],
)
def test_what_cannot_be_measured_is_told_and_nothing_made(
    options: str, told: str, place: Path, cli: Cli
) -> None:
    (place / "file").touch()
    done = cli(f"bench --quick --json {options}")
    assert (done.code, told in done.error) == (2, True)
    assert [path.name for path in place.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), sqlite3.OperationalError("disk I/O")]
)
def test_a_folder_in_which_nothing_can_be_written_is_named(
    error: Exception, place: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(folder: Path, **settings: Any) -> Bench:
        raise error

    monkeypatch.setattr(bench, "measure", refused)
    done = cli("bench --quick --json")
    assert (done.code, str(place) in done.error, "--folder" in done.error) == (2, True, True)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_bench_leaves_nothing_behind(place: Path, signum: signal.Signals) -> None:
    command = [sys.executable, "-m", "dagresume", "bench", "--folder", str(place)]
    place.joinpath("theirs").touch()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 30
        while not list(place.glob(".dagresume-bench-*/*/runs.db-wal")):  # an engine is at work
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signum)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert out == ""
    assert err.splitlines()[-1] == "error: interrupted"
    assert [path.name for path in place.iterdir()] == ["theirs"]


def test_the_help_does_not_load_it() -> None:
    program = "import sys; from dagresume.cli import app; sys.exit('dagresume.bench' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], env=os.environ, check=False).returncode == 0
