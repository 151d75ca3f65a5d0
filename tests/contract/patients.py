"""Databases to look at: sound ones, and those of processes that died."""

from __future__ import annotations

# ruff: noqa: ASYNC240  # nothing else is on the loop
import hashlib
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from dagresume import Context, Engine, Workflow

BIG = "b" * 3000

wf = Workflow("patient", idempotent=True)


@wf.node
async def names(count: int = 3) -> list[int]:
    return list(range(count))


@wf.node(for_each={"x": "names"})
async def score(x: int) -> int:
    return x * x


@wf.node
async def big(names: list[int], ctx: Context) -> str:
    (ctx.artifacts / "note.txt").write_text("kept")
    return BIG


@wf.node
async def last(big: str, score: list[int]) -> int:
    return len(big) + sum(score)


_MADE: dict[str, bytes] = {}
"""What the first run left behind, by its place: most tests begin with a copy of that."""


async def run(db: Path, **options: Any) -> str:
    """Run the workflow to its end; gives the run's id. `big` lies in a blob."""
    if not _MADE:
        with tempfile.TemporaryDirectory() as folder:
            await _run(Path(folder, "db"))
            files = (file for file in Path(folder).rglob("*") if file.is_file())
            _MADE.update({str(file.relative_to(folder)): file.read_bytes() for file in files})
    if db.exists() or options:
        return await _run(db, **options)
    for name, content in _MADE.items():
        place = db.parent / name.replace("db", db.name, 1)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    return next(name for name in _MADE if ".blobs" in name).split("/")[1]


async def _run(db: Path, **options: Any) -> str:
    async with Engine(db, workflows=[wf], spill_bytes=1000) as engine:
        return (await engine.run(wf, {"count": 3}, **options)).run_id


PROGRAM = """
import asyncio, os, sys
from dagresume import Engine
from tests.contract.patients import wf

@wf.node(id="dies", args={"big": "big"}, idempotent=False)
async def dies(big: str) -> None:
    os._exit(9)

async def main():
    async with Engine(sys.argv[1], spill_bytes=1000) as engine:
        await engine.run(wf, {"count": 3}, key="night")

asyncio.run(main())
"""


def die(db: Path) -> str:
    """Have a process die in the middle of a run, the log beside the file; gives the run's id."""
    here = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here), *sys.path])}
    ended = subprocess.run([sys.executable, "-c", PROGRAM, str(db)], env=environment, check=False, timeout=50)
    assert ended.returncode == 9
    assert Path(f"{db}-wal").stat().st_size
    return next(Path(f"{db}.blobs").iterdir()).name


@contextmanager
def opened(db: Path) -> Iterator[sqlite3.Connection]:
    """Open a database by hand; what is changed in it is kept."""
    with closing(sqlite3.connect(db, isolation_level=None)) as conn:
        yield conn


def picture(folder: Path) -> dict[str, tuple[int, str]]:
    """Give what is in a folder, with checksums. Of the log's index, a mere cache, its size only."""
    found = {}
    for file in sorted(folder.rglob("*")):
        content = b"" if file.is_dir() or file.name.endswith("-shm") else file.read_bytes()
        size = 0 if file.is_dir() else file.stat().st_size
        found[str(file.relative_to(folder))] = (size, hashlib.sha256(content).hexdigest())
    return found
