"""A database of every schema that there ever was opens and goes on (B149)."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from dagresume import Engine, RunStatus
from dagresume.doctor import Severity, examine
from dagresume.schema import VERSION
from tests.fixtures.make_schema import stored

FILES = sorted((Path(__file__).parents[1] / "fixtures").glob("schema-*.sql"))


def test_there_is_one_of_each() -> None:
    assert [file.stem for file in FILES] == [f"schema-{number}" for number in range(1, VERSION + 1)]


def load(file: Path, db: Path) -> None:
    with closing(sqlite3.connect(db, isolation_level=None)) as conn:
        conn.executescript(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
async def test_it_opens_and_its_runs_go_on(file: Path, tmp_path: Path) -> None:
    db = tmp_path / "runs.db"
    load(file, db)
    wf = stored(False)
    async with Engine(db, workflows=[wf]) as engine:
        failed, completed = sorted(await engine.runs(), key=lambda info: info.status, reverse=True)
        assert (failed.status, completed.status) == (RunStatus.FAILED, RunStatus.COMPLETED)
        assert (await engine.result(completed.run_id))["total"] == 14
        result = await engine.run(wf, {"count": 3}, key="night")
        assert (result.run_id, result["total"], set(result.executed)) == (failed.run_id, 5, {"total"})
        again = await engine.retry(completed.run_id, "square[1]")
        assert again["total"] == 14
    assert [str(f) for f in examine(db) if f.severity is Severity.PROBLEM] == []
    with closing(sqlite3.connect(db)) as conn:
        assert conn.execute("PRAGMA user_version").fetchone() == (VERSION,)
