"""What the database of a dead process holds, read with plain SQL: the engine is not asked about itself."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

__all__ = ["DONE", "Autopsy", "autopsy"]


@dataclass(frozen=True)
class Autopsy:
    """The newest run in a database whose process has died. `status` None: no run was ever made.

    `last`: path → (kind, reason) of the last record that changed its state. `starts`: how many start records
    each path has. `unknown`: paths with a start record after which nothing tells how that attempt ended.
    """

    run_id: str | None = None
    status: str | None = None
    last: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)
    starts: Counter[str] = field(default_factory=Counter)
    unknown: frozenset[str] = frozenset()

    @property
    def completed(self) -> frozenset[str]:
        """The paths whose completion is durable, also of those that were undone afterwards."""
        return frozenset(path for path, (kind, _) in self.last.items() if kind in DONE)


DONE: Final = frozenset({"node.completed", "node.compensated"})


def autopsy(db: str | os.PathLike[str]) -> Autopsy:
    """Give what this database holds. Looks at a copy: to open a database after a crash is to mend it."""
    db = Path(db)
    folder = db.parent / "autopsy"
    folder.mkdir(exist_ok=True)
    try:
        for name in (db.name, f"{db.name}-wal"):
            if (db.parent / name).exists():
                shutil.copyfile(db.parent / name, folder / name)
        with contextlib.closing(sqlite3.connect(folder / db.name)) as conn:
            return _examine(conn)
    finally:
        shutil.rmtree(folder)


def _examine(conn: sqlite3.Connection) -> Autopsy:
    if not conn.execute("SELECT 1 FROM sqlite_master WHERE name = 'dagresume_runs'").fetchone():
        return Autopsy()
    row = conn.execute("SELECT run, run_id, status FROM dagresume_runs ORDER BY run DESC LIMIT 1").fetchone()
    if row is None:
        return Autopsy()
    which = "run = ? AND path IS NOT NULL AND (status IS NOT NULL OR kind = 'node.resolved')"
    sql = f"SELECT path, kind, reason FROM dagresume_events WHERE {which} ORDER BY seq"
    last: dict[str, tuple[str, str | None]] = {}
    starts: Counter[str] = Counter()
    unknown: set[str] = set()
    for path, kind, reason in conn.execute(sql, [row[0]]):
        if kind == "node.resolved":  # a person's word, which the next owner takes
            unknown.discard(path)
            continue
        last[path] = (kind, reason)
        if kind == "node.started":
            starts[path] += 1
            unknown.add(path)
        elif kind != "node.interrupted":
            unknown.discard(path)
    return Autopsy(row[1], row[2], last, starts, frozenset(unknown))
