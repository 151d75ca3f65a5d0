"""A run that says what it was told is durable, to a file the fault does not reach; and who checks its word.

    python -m tests.crash.witness DATABASE NOTES SYNCHRONOUS PAGES [FLAW]

Notes, a line each, in the order in which things happened: `acked KIND PATH ATTEMPT` for each record and `once
STATE KEY` for each mark when the commit that holds it had returned, `lost` when one said that it could not
write, `began PATH` when a body began, `paid` when it had its effect, `ended WHAT` how the call ended for its
caller (`cause`: what it was raised from).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from dagresume import Context, DagresumeError, Engine, RunFailed, RunStatus, UncertainNode, Workflow, blobs
from dagresume.sqlite import SQLiteStore
from dagresume.store import Committed, Outcome, Refused, Unit
from dagresume.testing import StoreWrapper

__all__ = ["FLAWS", "KEY", "Account", "Verdict", "examine", "hear", "right", "workflow"]

KEY: Final = "k"
SPILL: Final = 20_000
TEXT: Final = "lorem " * 5000
Tell = Callable[[str], None]


def _text(seed: str, size: int) -> str:
    """Give text that does not compress and is the same each time."""
    blocks = (hashlib.sha256(f"{seed}/{n}".encode()).hexdigest() for n in range(size // 64 + 1))
    return "".join(blocks)[:size]


def _digest(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()


def workflow(tell: Tell = lambda line: None, broken: Callable[[], bool] = lambda: False) -> Workflow:
    """Give the workflow: a map with outputs of some pages of the database, a chain of spilled ones, a call
    made once, saved state, rows of its own beside a checkpoint, and a node that fails while it is `broken`.
    """
    wf = Workflow("witness", idempotent=False)

    @wf.node(idempotent=True)
    async def pages(count: int) -> list[int]:
        tell("began pages")
        return list(range(count))

    @wf.node(for_each={"n": "pages"}, concurrency=3)
    async def page(n: int, ctx: Context) -> str:
        tell(f"began {ctx.path}")
        return _text(f"page{n}", 18_000)

    @wf.node
    async def scan(text: str, ctx: Context) -> str:
        tell(f"began {ctx.path}")
        return _text(text, 40_000)

    @wf.node
    async def sign(scan: str, ctx: Context) -> str:
        tell(f"began {ctx.path}")

        async def pay() -> str:
            tell("paid sign")
            return _text("receipt", 500)

        receipt = await ctx.once("pay", pay)
        await ctx.save_state({"receipt": receipt})
        return _text(scan + receipt, 30_000)

    @wf.node
    async def book(sign: str, ctx: Context) -> int:
        tell(f"began {ctx.path}")
        ctx.commit_with("CREATE TABLE IF NOT EXISTS booked(path TEXT, amount INTEGER)", ())
        ctx.commit_with("INSERT INTO booked VALUES (?, ?)", (ctx.path, len(sign)))
        return len(sign)

    @wf.node
    async def frail(book: int, ctx: Context) -> int:
        tell(f"began {ctx.path}")
        if broken():
            raise ConnectionError("the line is down")
        return book + 1

    @wf.node
    async def report(page: list[str], frail: int, sign: str, ctx: Context) -> str:
        tell(f"began {ctx.path}")
        return _digest(page, frail, sign)

    return wf


def _inputs(pages: int) -> dict[str, Any]:
    return {"count": pages, "text": TEXT}


@cache
def right(pages: int) -> Mapping[str, Any]:
    """Give what the workflow gives for this many pages."""
    items = [_text(f"page{n}", 18_000) for n in range(pages)]
    scan = _text(TEXT, 40_000)
    sign = _text(scan + _text("receipt", 500), 30_000)
    return {
        "pages": list(range(pages)),
        "page": items,
        "scan": scan,
        "sign": sign,
        "book": len(sign),
        "frail": len(sign) + 1,
        "report": _digest(items, len(sign) + 1, sign),
    }


# -- the run --------------------------------------------------------------------------------------------


class _Honest(StoreWrapper):
    """Notes what each commit said."""

    def __init__(self, inner: SQLiteStore, tell: Tell) -> None:
        super().__init__(inner)
        self._tell = tell

    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        outcomes = await self.inner.commit(units)
        for unit, outcome in zip(units, outcomes, strict=True):
            if isinstance(outcome, Committed):
                for record in unit.records:
                    self._tell(f"acked {record.kind} {record.path or '-'} {record.attempt or 0}")
                for row in unit.once:
                    self._tell(f"once {row.state} {row.key}")
            elif not isinstance(outcome, Refused):
                self._tell("lost")
        return outcomes


def _without_file_sync() -> None:
    class Forgetful:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        @staticmethod
        def fsync(descriptor: int) -> None:
            """Do nothing."""

    blobs.os = Forgetful()  # type: ignore[attr-defined, assignment]  # a flaw


def _without_folder_sync() -> None:
    blobs.sync_folder = lambda folder: None  # a flaw


FLAWS: Final[dict[str, Callable[[], None]]] = {
    "files": _without_file_sync,
    "folders": _without_folder_sync,
}
"""What a careless store would leave out; the checks must notice each of them."""


async def _drive(database: str, tell: Tell, synchronous: Literal["full", "normal"], pages: int) -> None:
    """Run until the frail node fails, and in another engine to the end."""
    broken = True
    wf = workflow(tell, lambda: broken)
    for _ in range(2):
        store = _Honest(SQLiteStore(database, synchronous=synchronous), tell)
        try:
            async with Engine(store=store, workflows=[wf], spill_bytes=SPILL) as engine:
                result = await engine.run(wf, _inputs(pages), key=KEY)
                tell(f"ended {result.status} {result['report']}")
        except DagresumeError as error:
            tell(f"ended {type(error).__name__} {error}")
            tell(f"cause {type(error.__cause__).__name__} {error.__cause__}")
            if not isinstance(error, RunFailed) or list(error.failures) != ["frail"]:
                return
        broken = False


def main(
    database: str, notes: str, synchronous: Literal["full", "normal"], pages: str, flaw: str = ""
) -> None:
    """Be the process that is told."""
    file = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def tell(line: str) -> None:
        os.writev(file, [f"{' '.join(line.split())}\n".encode()])  # a call of its own: faults hit `write`

    if flaw:
        FLAWS[flaw]()
    asyncio.run(_drive(database, tell, synchronous, int(pages)))


# -- who checks it --------------------------------------------------------------------------------------


class Account(NamedTuple):
    """What the notes say."""

    acked: Counter[tuple[str, str, int]]
    once: dict[str, str]
    began: Counter[str]
    ended: list[str]
    after_loss: list[str]
    """Bodies that began after a commit had failed."""


def hear(notes: Sequence[str]) -> Account:
    """Read notes."""
    said = Account(Counter(), {}, Counter(), [], [])
    lost = False
    for line in notes:
        what, _, rest = line.partition(" ")
        if what == "acked":
            kind, path, attempt = rest.split(" ")
            said.acked[kind, path, int(attempt)] += 1
        elif what == "once":
            state, _, key = rest.partition(" ")
            said.once[key] = state
        elif what == "began":
            said.began[rest] += 1
            if lost:
                said.after_loss.append(rest)
        elif what in {"ended", "cause"}:
            said.ended.append(line)
        lost = lost or what == "lost"
    return said


class Verdict(NamedTuple):
    """What became of it: acknowledged records that are gone, and everything else that is not right."""

    lost: int
    wrong: list[str]
    reused: int


def _stored(database: Path) -> tuple[Counter[tuple[str, str, int]], dict[str, str], list[str]]:
    """Give what a plain reader finds in the file, if there is one: records, marks, complaints."""
    if not database.exists():
        return Counter(), {}, []
    connection = sqlite3.connect(database)
    try:
        [(sound,)] = connection.execute("PRAGMA integrity_check").fetchall()
        wrong = [] if sound == "ok" else [f"integrity: {sound}"]
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'dagresume_events'").fetchall():
            return Counter(), {}, wrong
        rows = connection.execute(
            "SELECT kind, coalesce(path, '-'), coalesce(attempt, 0) FROM dagresume_events"
        )
        marks = connection.execute("SELECT key, state FROM dagresume_once")
        return Counter(rows.fetchall()), dict(marks.fetchall()), wrong
    finally:
        connection.close()


async def examine(database: Path, said: Account, pages: int) -> Verdict:
    """Compare a database with what had been acknowledged, then go on with its run to the end."""
    there, marks, wrong = _stored(database)
    gone = said.acked - there
    lost = gone.total() + sum(marks.get(key) not in {state, "done"} for key, state in said.once.items())
    executed, outputs = await _go_on(database, pages, wrong)
    kept = {path for kind, path, _ in there if kind == "node.completed"}
    again = kept & set(executed)
    if again:
        wrong.append(f"done twice: {sorted(again)}")
    for path, value in right(pages).items():
        if outputs.get(path) != value:
            wrong.append(f"{path} came out as {str(outputs.get(path))[:60]!r}")
    wrong += _booked(database)
    return Verdict(lost, wrong, len(kept))


async def _go_on(database: Path, pages: int, wrong: list[str]) -> tuple[Sequence[str], dict[str, Any]]:
    wf = workflow()
    try:
        async with Engine(database, workflows=[wf], spill_bytes=SPILL, synchronous="normal") as engine:
            try:
                result = await engine.run(wf, _inputs(pages), key=KEY, raise_on_failure=False)
            except UncertainNode as error:
                result = await engine.retry(error.run_id, raise_on_failure=False)
            if result.status is not RunStatus.COMPLETED:
                wrong.append(f"the resume ended {result.status}: {result.failures}")
            return list(result.executed), dict(result.outputs)
    except Exception as error:
        wrong.append(f"the resume raised {type(error).__name__}: {error}")
        return [], {}


def _booked(database: Path) -> list[str]:
    connection = sqlite3.connect(database)
    try:
        rows = connection.execute("SELECT path, amount FROM booked").fetchall()
    except sqlite3.Error as error:
        rows = [(str(error), 0)]
    finally:
        connection.close()
    return [] if rows == [("book", 30_000)] else [f"booked: {rows}"]


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]  # SYNCHRONOUS is one of two words
