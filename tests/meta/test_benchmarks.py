"""The benchmarks run, and the READMEs say what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import table, values
from benchmarks.goals import ROWS
from benchmarks.rows import told

ROOT = Path(__file__).parents[2]
LITTLE = 0.002
LINES = {"chain": 4, "fanout": 2, "layers": 2, "calls": 4, "runs": 2, "hog": 1, "maps": 3, "values": 7,
         "resuming": 6, "planning": 2, "starting": 2, "tail": 1}  # fmt: skip


def test_every_benchmark_is_in_the_table() -> None:
    assert LINES.keys() == ROWS.keys()


@pytest.mark.parametrize("name", ROWS)
def test_each_benchmark_measures(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At small scale, so that none of them rots; what it finds then says nothing."""
    monkeypatch.setattr(values, "SIZES", values.SIZES[:-1])  # 10 MB goes the way of 1 MiB
    rows = ROWS[name](rounds=1, scale=LITTLE, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
    data = json.loads(json.dumps(told(rows, tmp_path, 100.0, LITTLE)))
    assert len(data["rows"]) == LINES[name]
    for row in data["rows"]:
        assert 0 < row["measured"]["low"] <= row["measured"]["median"] <= row["measured"]["high"]
        assert (row["met"] is None) == (not row["counts"])
        assert row["command"] == f"python -m benchmarks.goals {name}"
        assert row["durability"]
        assert table.line([row["work"], table.goal(row), table.measured(row)]).count("|") == 4


@pytest.mark.parametrize("words", ["goals chain", "shapes fanout", "commit --nodes 20"])
def test_the_commands_write_json(words: str, tmp_path: Path) -> None:
    module, *options = words.split()
    options += ["--json", str(tmp_path / "found.json")] if module == "goals" else ["--json"]
    options += {"commit": [], "shapes": ["--scale", "0.01"], "goals": ["--scale", "small"]}[module]
    command = [sys.executable, "-m", f"benchmarks.{module}", *options, "--rounds", "1"]
    command += ["--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    text = (tmp_path / "found.json").read_text() if module == "goals" else done.stdout
    found = json.loads(text)
    assert found["machine"]["cores"] >= 1
    assert found["rows" if module == "goals" else "reports"]
    assert module != "goals" or {row["met"] for row in found["rows"]} == {None}  # no goal is met in small


# -- the tables -------------------------------------------------------------------------------------------


def test_the_readmes_agree_with_the_results() -> None:
    old = [path.name for path, text, wanted in table.pages() if text != wanted]
    assert old == [], "run `python -m benchmarks.table`"


def test_each_goal_has_a_result() -> None:
    assert {each.row["key"] for each in table.newest()} >= ROWS.keys()


def row(**changes: Any) -> dict[str, Any]:
    spread = {"median": 1.5, "low": 1.25, "high": 1.75}
    made = {
        "key": "chain", "work": "a chain", "against": "raw", "limit": 1.6, "counts": True,
        "unit": "×", "measured": spread, "ours": spread, "theirs": None, "figures": "µs", "rounds": 5,
        "durability": "FULL", "note": "",
        "python": "3.11.7", "met": True, "goal": "≤ 1.6 ×", "command": "python -m benchmarks.goals chain",
    }  # fmt: skip
    return made | changes


def keep(folder: Path, name: str, date: str, *rows: dict[str, Any], scale: float = 1) -> None:
    machine = {"processor": "P", "cores": 2, "system": "S", "kernel": "K", "file_system": "ext4",
               "fdatasync_us": 200.0, "commit": "abc", "sqlite": "3.40"}  # fmt: skip
    data = {"date": date, "machine": machine, "scale": scale, "rows": rows}
    (folder / f"{name}.json").write_text(json.dumps(data), encoding="utf-8")


def test_the_newest_result_of_each_row_counts(tmp_path: Path) -> None:
    keep(tmp_path, "b", "2026-01-01", row(note="old"), row(work="layers", key="layers"))
    keep(tmp_path, "a", "2026-01-03T10:00:00+00:00", row(note="new"))
    keep(tmp_path, "d", "2026-01-03T09:00:00+00:00", row(note="earlier that day"))
    keep(tmp_path, "c", "2026-01-04", row(note="small"), scale=0.01)
    found = table.newest(tmp_path)
    assert [(each.row["work"], each.row["note"]) for each in found] == [("a chain", "new"), ("layers", "")]
    text = table.long(found)
    assert "Measured 2026-01-03" in text
    assert "Measured 2026-01-01" in text
    assert "small" not in text


def test_another_version_of_a_peer_takes_its_place(tmp_path: Path) -> None:
    versions = ("Kairo 1.0 on Python 3.11.7", "Kairo 1.1 on Python 3.12.1")
    for day, version in enumerate(versions):
        keep(tmp_path, str(day), f"2026-01-0{day}", row(key="run --envs FOLDER", against=version))
    assert [each.row["against"] for each in table.newest(tmp_path)] == ["Kairo 1.1 on Python 3.12.1"]


def test_the_short_table_holds_the_goals_and_says_what_is_missed(tmp_path: Path) -> None:
    missed = row(work="a fan-out", met=False, measured={"median": 1234.5, "low": 1.0, "high": 2000.0})
    keep(tmp_path, "a", "2026-01-01", row(), missed, row(work="beside", counts=False, met=None))
    text = table.short(table.newest(tmp_path))
    assert "| a chain | raw | ≤ 1.6 × | 1.5 × (1.25 – 1.75) | yes | FULL | 3.11.7 |" in text
    assert "| a fan-out | raw | ≤ 1.6 × | 1,234 × (1 – 2,000) | **no** |" in text
    assert "beside" not in text


def test_a_readme_without_a_place_for_it_is_refused() -> None:
    with pytest.raises(SystemExit, match="no single place"):
        table.rendered("# Title\n", "table")
