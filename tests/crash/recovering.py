"""Workflows that die where they are told, and what the processes of the tests of automatic recovery do."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dagresume import Budget, Context, DagresumeError, Engine, Recovery, Retry, StoreError, Workflow
from dagresume.clock import SystemClock
from dagresume.sqlite import SQLiteStore
from dagresume.store import Outcome, StoreFailed, Unit
from dagresume.testing import StoreWrapper

DB = "runs.db"
ON = Recovery(auto_resume=True)


def note(name: str) -> int:
    """Note that a body began, outside the store; gives how often it has by now."""
    with Path("world").open("a", encoding="utf-8") as world:
        world.write(f"{name}\n")
    return Path("world").read_text(encoding="utf-8").splitlines().count(name)


def note_time(name: str) -> int:
    """Do as `note`, and write down when that was."""
    Path("began").write_text(str(time.time()), encoding="utf-8")
    return note(name)


def dies(name: str, times: int = 1, how: str = "SIGKILL") -> None:
    """End this process in a body, the first so many times."""
    if note(name) <= times:
        os.kill(os.getpid(), signal.Signals[how])


def chain(
    recovery: Recovery | None = ON,
    *,
    idempotent: bool = True,
    times: int = 1,
    version: str = "1",
    more: bool = False,
    first_idempotent: bool = True,
    code: int = 1,
    stops: bool = False,
) -> Workflow:
    """a → b, which ends its process `times` times → c."""
    wf = Workflow("chain", version=version, idempotent=idempotent, recovery=recovery)

    @wf.node(idempotent=first_idempotent)
    async def a() -> int:
        note("a")
        return 1

    how = "SIGSTOP" if stops else "SIGKILL"
    if code == 1:

        @wf.node
        async def b(a: int) -> int:
            dies("b", times, how)
            return a + 1
    else:

        @wf.node
        async def b(a: int) -> int:
            dies("b", times, how)
            return a + 2

    @wf.node
    async def c(b: int, ctx: Context) -> int:
        ctx.usage(tokens_in=10)
        note("c")
        return b + 1

    if more:

        @wf.node
        async def d(c: int) -> int:
            return c

    return wf


def reconciling() -> Workflow:
    """A node that is not idempotent and can tell what became of it."""
    wf = Workflow("chain", recovery=ON)

    async def told(ctx: Context) -> int:
        note("asked")
        return 7

    @wf.node(reconcile=told)
    async def b() -> int:
        dies("b")
        return 7

    return wf


def never_began() -> Workflow:
    """The non-idempotent node is still ahead when the process dies."""
    wf = Workflow("chain", recovery=ON)

    @wf.node(idempotent=True)
    async def b() -> int:
        dies("b")
        return 2

    @wf.node(idempotent=False)
    async def mail(b: int) -> int:
        note("mail")
        return b

    return wf


def unknown() -> Workflow:
    """Nobody can say whether the code of b is the same: it holds something that cannot be stored."""
    wf, lock = Workflow("chain", idempotent=True, recovery=ON), asyncio.Lock()

    @wf.node
    async def b() -> int:
        async with lock:
            dies("b")
        return 2

    return wf


def asking() -> Workflow:
    """An approval is open when the process dies."""
    wf = Workflow("chain", idempotent=True, recovery=ON)

    @wf.node
    async def a() -> int:
        note("a")
        return 1

    wf.approval("ok", depends_on=["a"], prompt="go on?")

    @wf.node(depends_on=["a"])
    async def b(ctx: Context) -> int:
        await until_written("node.waiting")
        dies("b")
        return 2

    @wf.node(depends_on=["ok"])
    async def c() -> int:
        note("c")
        return 3

    return wf


async def until_written(kind: str) -> None:
    """Wait until a record of this kind is in the database."""
    async with Engine(DB) as other:
        async for event in other.events(follow=True):
            if event.kind == kind:
                return


def flaky() -> Workflow:
    """b fails twice; in the back-off after the second failure the process is killed."""
    wf = Workflow("chain", idempotent=True, recovery=ON, retry=Retry(attempts=3, delay=0.6, jitter=0))

    @wf.node
    async def b() -> int:
        if note_time("b") < 4:
            raise ValueError("not yet")
        return 2

    return wf


def abort() -> Workflow:
    """The policy that stops."""
    return chain(Recovery(auto_resume=True, policy="abort"))


def from_start(first_idempotent: bool = True) -> Workflow:
    """The policy that does everything again."""
    rule = Recovery(auto_resume=True, policy="resume_from_start")
    return chain(rule, first_idempotent=first_idempotent)


def budgeted() -> Workflow:
    """A budget that the first node uses up."""
    wf = Workflow("chain", idempotent=True, recovery=ON, budget=Budget(tokens=5))

    @wf.node
    async def a(ctx: Context) -> int:
        ctx.usage(tokens_in=10)
        return 1

    @wf.node
    async def b(a: int) -> int:
        return a

    return wf


def undoing(times: int = 1) -> Workflow:
    """It fails and rolls back; the process dies in the undo of `second`."""
    wf = Workflow("chain", idempotent=True, recovery=ON, on_failure="rollback")

    async def undo_first(output: int, ctx: Context) -> None:
        note("undo first")

    async def undo_second(output: int, ctx: Context) -> None:
        dies("undo second", times)

    @wf.node(compensate=undo_first)
    async def first() -> int:
        return 1

    @wf.node(compensate=undo_second)
    async def second(first: int) -> int:
        return 2

    @wf.node
    async def third(second: int) -> int:
        raise ValueError("no")

    return wf


async def begin(flow: str, how: Any = None, run: Any = None) -> None:
    """Run a workflow, which ends this process."""
    wf = globals()[flow](**how or {})
    async with Engine(DB, workflows=[wf]) as engine:
        await engine.run(wf, raise_on_failure=False, **run or {})


async def recover(flow: str, how: Any = None, known: bool = True, wait: bool = True) -> dict[str, Any]:
    """Recover what is there; tells outcomes, audit events, and how the runs are now."""
    wf = globals()[flow](**how or {})
    async with Engine(DB, workflows=[wf] if known else []) as engine:
        outcomes = await engine.recover(wait=wait)
        return await _told(engine, outcomes)


async def _told(engine: Engine, outcomes: Sequence[Any]) -> dict[str, Any]:
    audit = [event async for event in engine.events() if event.kind.startswith("execution.")]
    infos = await engine.runs()
    return {
        "outcomes": [[o.action, o.reason, o.message, o.attempt, o.status, list(o.paths)] for o in outcomes],
        "audit": [[event.kind, event.reason, event.data] for event in audit],
        "statuses": {info.run_id: [info.status, info.reason] for info in infos},
    }


async def go_on(flow: str, how: Any = None, verb: str = "resume", **options: Any) -> str:
    """Do what a person does: resume or retry the newest run."""
    wf = globals()[flow](**how or {})
    if "budget" in options:
        options["budget"] = Budget(tokens=options["budget"])
    async with Engine(DB, workflows=[wf]) as engine:
        (newest,) = await engine.runs(limit=1)
        result = await getattr(engine, verb)(newest.run_id, raise_on_failure=False, **options)
    return str(result.status)


async def second_failure() -> float:
    """Wait until b has failed twice; gives when the third try is due."""
    async with Engine(DB) as other:
        due: list[float] = []
        async for event in other.events(follow=True):
            if event.kind == "node.failed":
                due.append(event.data["retry_at"] / 1e6)
            if len(due) == 2:
                break
    return due[1]


def began_at() -> float:
    """Give when b began last."""
    return float(Path("began").read_text(encoding="utf-8"))


async def cancel() -> None:
    """Write to the newest run that it is cancelled."""
    async with Engine(DB) as engine:
        (newest,) = await engine.runs(limit=1)
        await engine.cancel(newest.run_id, by="ann")


async def approve(flow: str) -> None:
    """Approve what the newest run waits for."""
    async with Engine(DB) as engine:
        (newest,) = await engine.runs(limit=1)
        await engine.decide(newest.run_id, "ok", by="ann")


async def shown() -> dict[str, str]:
    """Give when the run ended as it is shown, and when its process wrote last."""
    async with Engine(DB) as engine:
        (info,) = await engine.runs()
        written = [e async for e in engine.events() if not e.kind.startswith(("execution.", "run.inter"))]
    return {"finished": str(info.finished_at), "last": str(written[-1].at)}


async def recover_beside_a_run() -> dict[str, Any]:
    """Sweep while this very engine drives a run (B10)."""
    wf, began, gate = Workflow("held", idempotent=True, recovery=ON), asyncio.Event(), asyncio.Event()

    @wf.node
    async def a() -> int:
        note("a")
        began.set()
        await gate.wait()
        return 1

    async with Engine(DB, workflows=[wf]) as engine:
        handle = await engine.start(wf)
        await began.wait()
        outcomes = [*await engine.recover(), *await engine.recover()]
        gate.set()
        await handle.result()
        return await _told(engine, outcomes)


class _FailsOnce(StoreWrapper):
    """Cannot load one run, the first time."""

    def __init__(self, inner: Any, run_id: str) -> None:
        super().__init__(inner)
        self.run_id: str | None = run_id

    async def load(self, run_id: str) -> Any:
        if run_id == self.run_id:
            self.run_id = None
            raise StoreError("the disk was away for a moment")
        return await self.inner.load(run_id)


async def recover_three() -> list[Any]:
    """Three runs, of which the store cannot load the second at first: two sweeps (B94)."""
    wf = chain(times=3)
    async with Engine(DB) as engine:
        run_ids = sorted(info.run_id for info in await engine.runs())
    async with Engine(workflows=[wf], store=_FailsOnce(SQLiteStore(DB), run_ids[1])) as engine:
        return [[[o.run_id, o.action, o.status] for o in await engine.recover()] for _ in range(2)]


class _LosesTheAnswer(StoreWrapper):
    """Commits the unit that makes a run, and says that it could not."""

    lost = False

    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        outcomes = await self.inner.commit(units)
        if not self.lost and any(record.kind == "run.created" for unit in units for record in unit.records):
            self.lost = True
            return [StoreFailed(StoreError("no answer"))] * len(units)
        return outcomes


async def create_without_an_answer() -> list[str]:
    """The run was made, and whoever made it is told otherwise: nobody drives it, nobody waits for it."""
    wf = chain(times=0)
    async with Engine(workflows=[wf], store=_LosesTheAnswer(SQLiteStore(DB))) as engine:
        try:
            await engine.run(wf, key="k")
        except DagresumeError as error:
            told = [f"{type(error).__name__}: {error}"]
        (info,) = await engine.runs()
        told += [info.status, (await engine.run(wf, key="k")).status, str(len(await engine.runs()))]
        return told


async def race(verb: str, big: bool = False) -> list[Any]:
    """Two calls of this engine take up one failed run at once; then a third, while it is driven."""
    wf, began, gate = Workflow("w", idempotent=True, recovery=ON), asyncio.Event(), asyncio.Event()
    second, alive = asyncio.Event(), 0

    @wf.node
    async def a(text: str) -> int:
        nonlocal alive
        note("a")
        if not began.is_set():
            began.set()
            raise ValueError("no")
        alive += 1
        second.set()
        await gate.wait()
        alive -= 1
        return alive

    async with Engine(DB, workflows=[wf], grace_seconds=0.1) as engine:
        inputs = {"text": "x" * (200_000 if big else 1)}
        run_id = (await engine.run(wf, inputs, key="k", raise_on_failure=False)).run_id

        async def go() -> str:
            try:
                if verb == "run":
                    return str((await engine.run(wf, inputs, key="k")).status)
                return str((await getattr(engine, verb)(run_id)).status)
            except DagresumeError as error:
                return type(error).__name__

        both = asyncio.gather(go(), go())
        await second.wait()
        third = await go()
        assert (await engine.recover())[0].reason == "running_here"
        gate.set()
        return [sorted(await both), third, alive]


async def cancelled_meanwhile() -> list[Any]:
    """A run is cancelled between the decision to go on with it and the claim."""
    wf = chain(times=1)
    async with Engine(workflows=[wf], store=_Cancels(SQLiteStore(DB))) as engine:
        async with asyncio.timeout(10):
            outcomes = await engine.recover()
        return [[o.action, o.reason] for o in outcomes]


class _Cancels(StoreWrapper):
    """Lets somebody else cancel the run that is about to be claimed."""

    loads = 0

    async def load(self, run_id: str) -> Any:
        self.loads += 1
        if self.loads == 2:
            async with Engine(DB) as other:
                await other.cancel(run_id, by="ann")
        return await self.inner.load(run_id)


async def pruned_successor() -> list[Any]:
    """A newer run took the key of a run that stopped, completed, and was pruned."""
    wf = chain(times=1)
    async with Engine(DB, workflows=[wf]) as engine:
        (old,) = await engine.runs()
        await engine.run(wf, key="k", fresh=True)
        first = [[o.action, o.reason] for o in await engine.recover()]
        await engine.prune(older_than=0)
        left = [info.run_id == old.run_id for info in await engine.runs()]
        second = [[o.action, o.reason] for o in await engine.recover()]
        again = await engine.run(wf, key="k")
        return [first, left, second, again.run_id != old.run_id]


def answered() -> Workflow:
    """What came and what was said stays, also when all starts over."""
    wf = Workflow("chain", idempotent=True, recovery=Recovery(auto_resume=True, policy="resume_from_start"))
    wf.approval("ok", depends_on=[], prompt="go on?")
    wf.wait_for("paid", "paid", depends_on=[])

    @wf.node
    async def b(ok: Any, paid: Any) -> Any:
        dies("b")
        return [ok["by"], paid]

    return wf


async def answer() -> None:
    """Approve, send, and go on until the process dies."""
    wf = answered()
    async with Engine(DB, workflows=[wf]) as engine:
        run_id = (await engine.run(wf, raise_on_failure=False)).run_id
        await engine.decide(run_id, "ok", by="ann")
        await engine.signal(run_id, "paid", {"id": 4711})
        await engine.resume(run_id)


def conditional(limit: int = 1) -> Workflow:
    """A condition whose code differs with `limit`."""
    wf = Workflow("chain", idempotent=True, recovery=ON)

    @wf.node
    async def b() -> int:
        dies("b")
        return 2

    @wf.node(when=lambda b: b > limit)
    async def pay(b: int) -> int:
        note("pay")
        return b

    return wf


async def fork_that_dies() -> None:
    """The process dies between the making of a fork and its claim."""
    wf = chain(times=0)
    async with Engine(workflows=[wf], store=_DiesAtAClaim(SQLiteStore(DB))) as engine:
        run_id = (await engine.run(wf)).run_id
        await engine.fork(run_id, "c")


class _DiesAtAClaim(StoreWrapper):
    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        if any(record.kind == "run.claimed" for unit in units for record in unit.records):
            os.kill(os.getpid(), signal.SIGKILL)
        return await self.inner.commit(units)


async def recover_later(flow: str, how: Any = None) -> dict[str, Any]:
    """Recover, an hour after all that is stored."""

    class Later(SystemClock):
        @staticmethod
        def now() -> int:
            return SystemClock.now() + 3_600_000_000

    wf = globals()[flow](**how or {})
    async with Engine(DB, workflows=[wf], clock=Later()) as engine:
        return await _told(engine, await engine.recover())


async def recover_in_a_body() -> list[Any]:
    """A body looks after what stopped, with the only slot its own."""
    inner, outer = chain(times=1), Workflow("outer")

    @outer.node
    async def look() -> int:
        return len([o for o in await engine.recover() if o.action == "resumed"])

    async with Engine(DB, workflows=[inner], concurrency=1) as engine:
        async with asyncio.timeout(20):
            return [(await engine.run(outer))["look"]]


async def follow_a_pruned_run() -> str:
    """Somebody follows the events of a run that is pruned."""
    wf = chain(times=0)
    async with Engine(DB, workflows=[wf]) as engine:
        run_id = (await engine.run(wf)).run_id

        async def follow() -> None:
            async for _ in engine.events(run_id, follow=True):
                pass

        follower = asyncio.create_task(follow())
        await asyncio.sleep(0.05)
        await engine.prune(older_than=0)
        try:
            async with asyncio.timeout(10):
                await follower
        except DagresumeError as error:
            return type(error).__name__
        return "ended"
