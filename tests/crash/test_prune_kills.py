"""A prune killed at any of its steps leaves no half run, and the next one ends what it began."""

import os
import shutil
import signal
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dagresume import Context, Engine, Workflow
from dagresume.sqlite import SQLiteStore
from dagresume.testing import Zygote
from dagresume.writer import Writer
from tests.crash.conftest import Play

OLD, KEPT = ("k1", "k10", "k2"), ("k1", "k3")
ARTIFACT = "12345"
BIG = "x" * 5000


def flow(name: str) -> Workflow:
    wf = Workflow(name, idempotent=True)

    @wf.node
    async def a(fails: bool, ctx: Context) -> str:
        for n in range(2):
            (ctx.artifacts / f"file{n}").write_text(ARTIFACT)
        ctx.log.info("at work")
        await ctx.once("call", str, "done")
        await ctx.once("mail", str, "sent", scope="workflow")
        return BIG

    @wf.node(args={"given": "a"})
    async def b(given: str, fails: bool) -> str:
        if fails:
            raise ValueError("b")
        return given * 2

    return wf


old, kept = flow("old"), flow("kept")


class Steps:
    """Counts what a process does to its database and its files, and ends the process at the n-th step."""

    def __init__(self, fatal: int | None) -> None:
        self.counts, self.count, self.fatal = False, 0, fatal

    def __call__(self, *_: object) -> None:
        self.count += self.counts
        if self.counts and self.count == self.fatal:
            die()


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


async def prune(fatal: int | None) -> dict[str, Any]:
    """Prune the database in the working folder, and die at this step; gives how many there were."""
    steps = Steps(fatal)

    class Traced(Writer):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            self.set_trace_callback(steps)

    sys.addaudithook(lambda event, _: steps() if event in {"os.remove", "os.rmdir", "os.unlink"} else None)
    store = SQLiteStore("runs.db", synchronous="normal")
    store.connection_class = Traced
    async with Engine(store=store, spill_bytes=1000) as engine:
        steps.counts = True
        pruned = await engine.prune(older_than=0, failed_older_than=0, workflow="old")
        steps.counts = False
    return {"steps": steps.count, "runs": len(pruned.run_ids), "line": str(pruned)}


async def make(folder: Path) -> dict[str, str]:
    """Make runs to be pruned, and others; gives run id → key."""
    made = {}
    async with Engine(folder / "runs.db", synchronous="normal", spill_bytes=1000) as engine:
        for n, key in enumerate(OLD):
            result = await engine.run(old, {"fails": n == 1}, key=key, raise_on_failure=False)
            made[result.run_id] = key
        for key in KEPT:
            await engine.run(kept, {"fails": False}, key=key)
    return made


def ask(db: Path, sql: str) -> list[Any]:
    conn = sqlite3.connect(db)
    try:
        return conn.execute(sql).fetchall()
    finally:
        conn.close()


def belongings(db: Path) -> dict[str, int]:
    """How many rows and files there are of each run, by its id."""
    found: dict[str, int] = {}
    for run_id, run in ask(db, "SELECT run_id, run FROM dagresume_runs"):
        tables = ("events", "logs")
        counts = [ask(db, f"SELECT count(*) FROM dagresume_{t} WHERE run = {run}")[0][0] for t in tables]
        counts += ask(db, f"SELECT count(*) FROM dagresume_once WHERE scope = 'run:{run_id}'")[0]
        folders = [Path(f"{db}.{kind}") / run_id for kind in ("blobs", "artifacts")]
        files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
        found[run_id] = sum(counts) + len(files)
    return found


def strays(db: Path) -> list[Any]:
    """Rows and files of runs that are not there, and notes of runs to be forgotten."""
    known = {run_id for (run_id,) in ask(db, "SELECT run_id FROM dagresume_runs")}
    gone = "run NOT IN (SELECT run FROM dagresume_runs)"
    found = [row for t in ("events", "logs") for row in ask(db, f"SELECT * FROM dagresume_{t} WHERE {gone}")]
    scopes = ask(db, "SELECT scope FROM dagresume_once WHERE scope LIKE 'run:%'")
    found += [scope for (scope,) in scopes if scope.removeprefix("run:") not in known]
    folders = [folder for kind in ("blobs", "artifacts") for folder in Path(f"{db}.{kind}").iterdir()]
    found += [folder for folder in folders if folder.name not in known]
    return found + ask(db, "SELECT name FROM dagresume_cursors")


async def look(case: Path, made: dict[str, str], before: dict[str, int]) -> set[str]:
    """Check what every reader sees after a kill; gives the runs to be pruned that are still there."""
    after = belongings(case / "runs.db")
    assert after == {run_id: before[run_id] for run_id in after}, "half a run is left"
    assert set(before) - set(after) <= set(made)
    async with Engine(case / "runs.db", workflows=[old, kept], synchronous="normal") as engine:
        assert {event.run_id async for event in engine.events()} == set(after)
        for run_id in after:
            result = await engine.result(run_id)
            assert result["a"] == BIG
            assert (await engine.get(run_id)).status == result.status
    return set(after) & set(made)


async def finish(case: Path, made: dict[str, str], left: set[str]) -> None:
    """Start a run with the key of one that is gone, prune again: then all of the old ones is gone."""
    async with Engine(
        case / "runs.db", workflows=[old, kept], synchronous="normal", spill_bytes=1000
    ) as engine:
        keys = [key for run_id, key in made.items() if run_id not in left]
        newer = [(await engine.run(old, {"fails": False}, key=key)).run_id for key in keys[:1]]
        newer += [(await engine.run(kept, {"fails": False}, key="last")).run_id]
        assert all(run_id not in made for run_id in newer)
        foreseen = await engine.prune(older_than=0, failed_older_than=0, workflow="old", dry_run=True)
        pruned = await engine.prune(older_than=0, failed_older_than=0, workflow="old")
        assert pruned == foreseen
        assert set(pruned.run_ids) == left | {*newer[: len(keys[:1])]}
    assert strays(case / "runs.db") == []
    [(mails,)] = ask(case / "runs.db", "SELECT count(*) FROM dagresume_once WHERE scope LIKE 'workflow:%'")
    assert mails == 2


def cases(folder: Path) -> Iterator[Path]:
    """Copies of what is in a folder, one after the other."""
    for n in range(10_000):
        case = folder.with_name(f"case{n}")
        shutil.copytree(folder, case)
        yield case
        shutil.rmtree(case)


@pytest.mark.timeout(240)
async def test_a_prune_killed_at_any_step_leaves_no_half_run(nursery: Zygote, tmp_path: Path) -> None:
    template = tmp_path / "made"
    template.mkdir()
    made = await make(template)
    before = belongings(template / "runs.db")
    assert strays(template / "runs.db") == []
    seen = set()
    for n, case in enumerate(cases(template), 1):
        ended = nursery.call("tests.crash.test_prune_kills:prune", case, fatal=n).wait()
        left = await look(case, made, before)
        seen.add(len(left))
        await finish(case, made, left)
        if not ended.killed:
            assert ended.error is None, ended.error
            assert (ended.told["runs"], left) == (3, set())
            break
    print(f"killed at each of {n - 1} steps; runs left then: {sorted(seen)}")
    assert n > 50
    assert seen == {0, 3}  # their rows go in one transaction


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_prune_that_is_killed_again_and_again_comes_to_its_end(
    nursery: Zygote, tmp_path: Path
) -> None:
    """Each call goes some steps further than where the one before began, whatever that had done."""
    template = tmp_path / "made"
    template.mkdir()
    made = await make(template)
    before = belongings(template / "runs.db")
    total = 0
    for stride in (3, 7, 12, 20, 31):
        case = next(cases(template))
        for calls in range(1, 200):
            ended = nursery.call("tests.crash.test_prune_kills:prune", case, fatal=stride * calls).wait()
            left = await look(case, made, before)
            total += 1
            if not ended.killed:
                break
        await finish(case, made, left)
        shutil.rmtree(case)
    print(f"{total} prunes, each killed but the last of each series")
    assert total > 20


async def busy(runs: int, width: int) -> dict[str, Any]:
    """Run maps one after the other in the working folder; gives the longest wait of a checkpoint."""
    wf = Workflow("busy")

    @wf.node
    async def items() -> list[int]:
        return list(range(width))

    @wf.node(for_each={"x": "items"})
    async def f(x: int) -> str:
        return str(x) * 200

    longest = 0.0
    async with Engine("runs.db") as engine:
        for n in range(runs):
            result = await engine.run(wf, key=str(n))
            assert result.status == "completed"
            assert len(result.executed) == width + 1
            longest = max(longest, result.stats.checkpoint_latency.max)
    return {"longest": longest}


async def test_a_prune_beside_a_busy_engine_of_another_process(
    play: Play, nursery: Zygote, tmp_path: Path
) -> None:
    """What has ended goes at once, over and over; what runs is not disturbed."""
    made = await make(tmp_path)
    child = nursery.call("tests.crash.test_prune_kills:busy", tmp_path, runs=60, width=100)
    gone = 0
    async with Engine(tmp_path / "runs.db", synchronous="normal") as engine:
        while not (ended := nursery_said(child)):
            pruned = await engine.prune(older_than=0, failed_older_than=0)
            gone += len(pruned.run_ids)
    assert ended.error is None, ended.error
    async with Engine(tmp_path / "runs.db", workflows=[kept], synchronous="normal") as engine:
        await engine.run(kept, {"fails": False}, key="last")
        gone += len((await engine.prune(older_than=0, failed_older_than=0, workflow="busy")).run_ids)
    assert gone >= len(made) + len(KEPT) + 60
    assert strays(tmp_path / "runs.db") == []
    print(f"{gone} runs pruned; the longest wait of a checkpoint was {ended.told['longest'] * 1000:.0f} ms")


def nursery_said(child: Any) -> Any:
    """How a child ended; None if it has not."""
    return child.wait() if not Path(f"/proc/{child.pid}").exists() else None
