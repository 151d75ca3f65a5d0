"""What the README says is done here as it stands there."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder with the README's workflow in it, and something to count."""
    (tmp_path / "flow.py").write_text(blocks("python")[0])
    (tmp_path / "one.md").write_text("three words here")
    (tmp_path / "two.md").write_text("two more")
    return tmp_path


def python(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], cwd=folder, capture_output=True, text=True, timeout=50)


def test_the_first_workflow_runs_and_then_reuses(folder: Path) -> None:
    first = python(folder, "flow.py")
    assert first.stdout == "5 words in 2 files\n4 executed, 0 reused\n", first.stderr
    again = python(folder, "flow.py")
    assert again.stdout == "5 words in 2 files\n0 executed, 4 reused\n", again.stderr


def test_the_commands_work_in_their_order(folder: Path) -> None:
    lines = [line.partition("#")[0].split() for block in blocks("console") for line in block.splitlines()]
    commands = [line[1:] for line in lines if line[:1] == ["dagresume"]]
    words = "run list show watch graph plan resume retry fork explain logs docs doctor doctor backup"
    assert [command[0] for command in commands] == words.split()
    for command in commands:
        done = python(folder, "-m", "dagresume", *command)
        assert done.returncode == 0, (command, done.stdout, done.stderr)


def test_the_second_workflow_waits_and_goes_on(folder: Path) -> None:
    (folder / "claim.py").write_text(blocks("python")[1])
    done = python(folder, "claim.py")
    told = "waiting approval\npaid 3, signed by ann {'number': 4711} True\n"
    assert done.stdout == told, done.stderr


def test_the_queries_are_understood_by_a_real_database(folder: Path) -> None:
    assert python(folder, "flow.py").returncode == 0
    with sqlite3.connect(folder / "runs.db") as conn:
        for query in blocks("sql")[0].split(";\n"):
            conn.execute(query).fetchall()
    conn.close()
