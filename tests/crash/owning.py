"""Runs that several processes want, and what those processes do. Each works in its folder, on `runs.db`.

What begins is noted in `world.log`, outside the store: path, process, seconds on the machine's clock.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from pathlib import Path
from typing import Any
from unittest import mock

from dagresume import Context, DagresumeError, Engine, Limit, Retry, StoreError, UncertainNode, Workflow
from dagresume.sqlite import SQLiteStore
from dagresume.store import Store
from dagresume.testing import StoreWrapper
from tests.crash.flows import die, leave, world

DB = "runs.db"
REFUSED = Path("refused.log")


def note(path: str) -> None:
    """Note that a body begins in this process now."""
    leave(f"{path} {os.getpid()} {time.monotonic():.3f}")


def begun(folder: Path = Path()) -> list[tuple[str, int, float]]:
    """What has begun: path, process, when."""
    lines = (line.split() for line in world(folder))
    return [(path, int(pid), float(at)) for path, pid, at in lines]


def is_there(file: str) -> bool:
    """Say whether another process has left this file."""
    return Path(file).exists()


def lines_of(file: Path) -> list[str]:
    """Give what processes have left in this file."""
    return file.read_text().splitlines() if file.exists() else []


# -- a run that eight processes want ---------------------------------------------------------------------


def contest(*, dies: bool = False, idempotent: bool = True) -> Workflow:
    """a → b, which ends the first process or else lasts until seven others were refused → c."""
    wf = Workflow("contest", idempotent=idempotent)

    @wf.node
    async def a(ctx: Context) -> str:
        note(ctx.path)
        return "a"

    @wf.node
    async def b(a: str, ctx: Context) -> str:
        note(ctx.path)
        if dies and not is_there("prepared"):
            leave("", Path("prepared"))
            die()
        deadline = time.monotonic() + 10
        while len(lines_of(REFUSED)) < 7 and time.monotonic() < deadline:  # noqa: ASYNC110  # by others
            await asyncio.sleep(0.002)
        return a + "b"

    @wf.node
    async def c(b: str, ctx: Context) -> str:
        note(ctx.path)
        return b + "c"

    return wf


async def start_and_die() -> None:
    """Drive the contest until it ends this process."""
    async with Engine(DB) as engine:
        await engine.run(contest(dies=True), key="k")


async def compete(how: str, *, dies: bool = True, idempotent: bool = True, bypass: bool = False) -> Any:
    """Stand at the barrier, then try to get the run: resume it, or run it by its key."""
    if bypass:
        bypass_the_lease()
    wf = contest(dies=dies, idempotent=idempotent)
    async with Engine(DB, workflows=[wf]) as engine:
        leave(str(os.getpid()), Path("ready.log"))
        runs = await engine.runs(limit=1)
        while not is_there("gate"):  # noqa: ASYNC110  # another process opens it
            await asyncio.sleep(0)
        try:
            if how == "resume":
                result = await engine.resume(runs[0].run_id)
            elif how == "start":
                result = await (await engine.start(wf, key="k")).result()
            else:
                result = await engine.run(wf, key="k")
        except DagresumeError as error:
            leave(str(os.getpid()), REFUSED)
            return {"error": type(error).__name__, "message": str(error)}
        return {"run_id": result.run_id, "executed": list(result.executed), "c": result["c"]}


def bypass_the_lease() -> None:
    """Take every other session for dead, as a broken lease would."""
    mock.patch("dagresume.writer.is_alive", return_value=False).start()


# -- a run whose owner sleeps ----------------------------------------------------------------------------


async def nap(ctx: Context) -> str:
    """Begin, and take a while."""
    note(ctx.path)
    await asyncio.sleep(0.15)
    return ctx.path


def fan(*, count: int = 12, idempotent: bool = True) -> Workflow:
    """Many items, four at a time."""
    wf = Workflow("fan", idempotent=idempotent)

    @wf.node
    async def items(ctx: Context) -> list[int]:
        note(ctx.path)
        return list(range(count))

    @wf.node(for_each={"n": "items"}, concurrency=4)
    async def each(n: int, ctx: Context) -> int:
        await nap(ctx)
        return n

    return wf


def line(*, idempotent: bool) -> Workflow:
    """One after the other."""
    wf = Workflow("line", idempotent=idempotent)
    above: list[str] = []
    for node in "abcde":
        wf.node(id=node, depends_on=above)(nap)
        above = [node]
    return wf


def limited() -> Workflow:
    """Many nodes in front of one place."""
    wf = Workflow("limited", idempotent=True)
    for n in range(8):
        wf.node(id=f"n{n}", limit="two")(nap)
    return wf


def retrying() -> Workflow:
    """Its next attempts become due while its owner sleeps."""
    wf = Workflow("retrying", idempotent=True, retry=Retry(10, delay=0.5, backoff=1, jitter=0))

    async def fails(ctx: Context) -> str:
        note(ctx.path)
        if is_there("mended"):
            return ctx.path
        raise ConnectionError("not yet")

    for n in range(3):
        wf.node(id=f"n{n}")(fails)
    return wf


def sleeping() -> Workflow:
    """Its sleep is over while its owner sleeps too."""
    wf = Workflow("sleeping", idempotent=True)
    wf.node(id="first")(nap)
    wf.sleep("rest", 0.5, depends_on=["first"])
    for n in range(3):
        wf.node(id=f"n{n}", depends_on=["rest"])(nap)
    return wf


def rounds() -> Workflow:
    """A loop, and a graph for each of a few items."""
    wf = Workflow("rounds", idempotent=True)

    @wf.loop(initial="start", until=lambda state: state >= 6, max_iterations=10, idempotent=True)
    async def turn(state: int, ctx: Context) -> int:
        await nap(ctx)
        return state + 1

    return wf


def steps() -> Workflow:
    """Sixteen short ones, in two branches: something ends every few milliseconds."""
    wf = Workflow("steps", idempotent=True)

    async def step(ctx: Context) -> str:
        note(ctx.path)
        await asyncio.sleep(0.03)
        leave(ctx.path, Path("returned.log"))
        return ctx.path

    for branch, odd in (("x", 0.0), ("y", 1.0)):
        above: list[str] = []
        for n in range(8):
            wf.node(id=f"{branch}{n}", depends_on=above, timeout=30 + odd)(step)
            above = [f"{branch}{n}"]
    return wf


def graphs() -> Workflow:
    """A graph for each of four items, two nodes in each, a plain function among them."""
    inner = Workflow("inner", output="second")

    @inner.node
    async def first(n: int, ctx: Context) -> int:
        await nap(ctx)
        return n

    @inner.node
    def second(first: int, ctx: Context) -> int:
        note(ctx.path)
        time.sleep(0.15)
        return first

    wf = Workflow("graphs", idempotent=True)
    wf.subworkflow("each", inner, for_each={"n": "numbers"}, concurrency=4)
    return wf


def buyer() -> Workflow:
    """It pays once, after a while."""
    wf = Workflow("buyer", idempotent=True)

    async def pay() -> int:
        leave(str(os.getpid()), Path("paid.log"))
        return 7

    @wf.node
    async def buys(ctx: Context) -> int:
        await nap(ctx)
        return int(await ctx.once("price", pay))

    @wf.node
    async def keeps(buys: int, ctx: Context) -> int:
        await nap(ctx)
        await ctx.save_state(buys)
        return buys

    return wf


def undoable() -> Workflow:
    """Three nodes whose undos take a while, and one that fails."""
    wf = Workflow("undoable", on_failure="rollback")

    async def act(ctx: Context) -> str:
        return ctx.path

    async def undo(output: str, ctx: Context) -> None:
        note(f"undo:{ctx.path}")
        await asyncio.sleep(0.15)

    async def fails() -> None:
        raise ValueError("it is to be undone")

    above: list[str] = []
    for node in "abc":
        wf.node(id=node, depends_on=above, compensate=undo)(act)
        above = [node]
    wf.node(id="fails", depends_on=above)(fails)
    return wf


FLOWS = {
    "fan": fan(),
    "wide fan": fan(count=32),
    "unsafe fan": fan(idempotent=False),
    "line": line(idempotent=True),
    "unsafe line": line(idempotent=False),
    "limited": limited(),
    "retrying": retrying(),
    "sleeping": sleeping(),
    "rounds": rounds(),
    "steps": steps(),
    "graphs": graphs(),
    "buyer": buyer(),
    "undoable": undoable(),
}
INPUTS: dict[str, dict[str, Any]] = {"rounds": {"start": 0}, "graphs": {"numbers": [0, 1, 2, 3]}}
OPTIONS: dict[str, Any] = {"limits": {"two": Limit(concurrency=2)}}


async def drive(flow: str, lease: float, *, store: str = "plain") -> dict[str, Any]:
    """Run a flow under a short lease."""
    made: Store | None = None if store == "plain" else _STORES[store](SQLiteStore(DB))
    async with Engine(DB, store=made, lease_seconds=lease, **OPTIONS) as engine:
        told = await said(engine.run(FLOWS[flow], INPUTS.get(flow), key="k"))
        return told | {"stats": await attempts(engine)}


async def said(work: Any) -> dict[str, Any]:
    """Give how it went, as JSON."""
    try:
        result = await work
    except UncertainNode as error:
        return {"error": "UncertainNode", "paths": list(error.paths), "message": str(error)}
    except DagresumeError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"status": result.status, "executed": list(result.executed), "reused": sorted(result.reused)}


async def attempts(engine: Engine) -> dict[str, int]:
    (run,) = await engine.runs(limit=1)
    return {path: node.attempt or 0 for path, node in (await engine.get(run.run_id)).nodes.items()}


async def take_over(flow: str, lease: float, *, bypass: bool = False) -> dict[str, Any]:
    """Resume the run as soon as nobody holds it; with a person's word where that is needed."""
    if bypass:
        bypass_the_lease()
    deadline = time.monotonic() + 20
    async with Engine(DB, workflows=[FLOWS[flow]], lease_seconds=lease, **OPTIONS) as engine:
        (run,) = await engine.runs(limit=1)
        while True:
            told = await said(engine.resume(run.run_id))
            if told.get("error") == "UncertainNode":
                again = await said(engine.retry(run.run_id))
                return again | {"uncertain": told["paths"]}
            if told.get("error") != "RunLocked" or time.monotonic() > deadline:
                return told
            await asyncio.sleep(0.03)


async def mark_interrupted(lease: float) -> list[Any]:
    """Sweep until the run of a session that seems dead was marked; nothing resumes by itself."""
    async with Engine(DB, lease_seconds=lease) as engine:
        while not (found := await engine.recover()):  # noqa: ASYNC110  # until its lease is over
            await asyncio.sleep(0.05)
        (run,) = await engine.runs(limit=1)
        return [len(found), run.status]


async def cancel_later(seconds: float) -> dict[str, Any]:
    """Cancel the newest run after a while, from here."""
    async with Engine(DB) as engine:
        (run,) = await engine.runs(limit=1)
        leave("", Path("looked"))
        await asyncio.sleep(seconds)
        await engine.cancel(run.run_id, by="ann")
        return {}


async def at_the_gate(what: str) -> dict[str, Any]:
    """Resume the newest run, or cancel it, when the gate opens."""
    async with Engine(DB, workflows=[FLOWS["steps"]]) as engine:
        (run,) = await engine.runs(limit=1)
        leave(str(os.getpid()), Path("ready.log"))
        while not is_there("gate"):  # noqa: ASYNC110  # another process opens it
            await asyncio.sleep(0)
        if what == "resume":
            return await said(engine.resume(run.run_id))
        await engine.cancel(run.run_id, by="ann")
        return {}


# -- stores that do not renew ----------------------------------------------------------------------------


class _Blocked(StoreWrapper):
    """Does not come back from a renewal while the file `blocked` is there."""

    def renew(self, expires_at: int) -> bool:
        while Path("blocked").exists():
            time.sleep(0.005)
        return self.inner.renew(expires_at)


class _Failing(StoreWrapper):
    """Cannot renew while the file `blocked` is there."""

    def renew(self, expires_at: int) -> bool:
        if Path("blocked").exists():
            raise StoreError("the renewals of this test fail")
        return self.inner.renew(expires_at)


_STORES = {"blocked": _Blocked, "failing": _Failing}


# -- bodies that block the loop --------------------------------------------------------------------------

blocking = Workflow("blocking", idempotent=False)


@blocking.node
async def hogs(ctx: Context) -> str:
    note(ctx.path)
    time.sleep(1.2)  # noqa: ASYNC251  # that is what is tested: four leases
    return ctx.path


@blocking.node
async def goes_on(hogs: str, ctx: Context) -> str:
    note(ctx.path)
    return hogs


FLOWS["blocking"] = blocking


async def pester(flow: str) -> dict[str, Any]:
    """Try to resume a run of a living owner until it has ended; gives what was said, and how often."""
    found: dict[str, int] = {}
    async with Engine(DB, workflows=[FLOWS[flow]]) as engine:
        (run,) = await engine.runs(limit=1)
        while True:
            told = await said(engine.resume(run.run_id))
            word = told.get("error") or f"{told['status']} {told['executed']}"
            found[word] = found.get(word, 0) + 1
            if word != "RunLocked":
                return found
            await asyncio.sleep(0.02)


async def refused_once(flow: str) -> dict[str, Any]:
    """Try once to resume the run."""
    async with Engine(DB, workflows=[FLOWS[flow]]) as engine:
        (run,) = await engine.runs(limit=1)
        told = await said(engine.resume(run.run_id))
        return {told.get("error", "went on"): told.get("message", "")}


# -- a locked database -----------------------------------------------------------------------------------


def lock(seconds: float) -> None:
    """Hold the write lock of the database, as another program could."""
    with sqlite3.connect(DB, isolation_level=None) as conn:
        conn.execute("BEGIN IMMEDIATE")
        Path("locked").touch()
        time.sleep(seconds)
        conn.execute("ROLLBACK")
    conn.close()
