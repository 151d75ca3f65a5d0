"""Why a stored run cannot be read: nothing that we write ourselves is ever called a flaw."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest

from dagresume import NOT_DONE, Context, Retry, StoreError, Workflow
from dagresume.flaws import line_flaw, run_flaw
from tests.engine.kit import Boom, Home


def everything() -> Workflow:
    """A workflow that writes records of about every kind."""
    wf = Workflow("all", retry=Retry(2, delay=0), secrets=["password"], idempotent=True)

    async def undo(output: Any) -> None:
        raise Boom

    @wf.node(compensate=lambda output, ctx: undo(output))
    async def a(password: str, ctx: Context) -> int:
        ctx.log.info("a")
        ctx.usage(tokens_in=1, cost=0.5)
        ctx.progress(1, 2)
        await ctx.save_state({"n": 1})
        return await ctx.once("key", lambda: 7)  # type: ignore[no-any-return]

    @wf.node(for_each={"n": "items"}, tolerate=1)
    async def each(n: int) -> int:
        if n:
            raise Boom("no")
        return n

    @wf.node(when=lambda a: a < 0)
    async def skipped(a: int) -> None: ...

    @wf.node
    async def fails(a: int) -> None:
        raise Boom("x" * 100_000)

    @wf.node(reconcile=lambda ctx: NOT_DONE, idempotent=False)
    async def effect(a: int) -> str:
        return "x" * 100_000

    @wf.loop("rounds", initial="a", until=lambda state: state > 8, max_iterations=5)
    async def rounds(state: int) -> int:
        return state + 1

    inner = Workflow("inner", idempotent=True)
    inner.approval("ok", prompt="Sure?", timeout=1000)
    inner.wait_for("event", "event")
    inner.sleep("pause", 0)
    wf.subworkflow("inner", inner)
    return wf


async def test_what_we_write_has_no_flaw(home: Home) -> None:
    wf, run_ids = everything(), []
    inputs = {"password": "hunter22", "items": [0, 1]}

    async with home.engine(wf) as engine:
        first = (await engine.run(wf, inputs, key="k", raise_on_failure=False)).run_id
        await engine.decide(first, "inner/ok", comment="yes")
        await engine.signal(first, "event", {"x": 1})
        await engine.resume(first, raise_on_failure=False)
        await engine.retry(first, "each", raise_on_failure=False)
        fork = (await engine.fork(first, "a", inputs={"password": "other"}, raise_on_failure=False)).run_id
        await engine.cancel(fork, "somebody")
        await engine.rollback(first, accept_irreversible=True)
        run_ids += [first, fork]
        kinds = set()
        for run_id in run_ids:
            loaded = await engine._store.load(run_id)
            assert loaded is not None
            kinds |= {record.kind for record in loaded.records}
            assert run_flaw(loaded) is None
            assert [line_flaw(line) for _, line in await engine.logs(run_id)] == [None] * 1
    assert len(kinds) >= 16, kinds


async def test_an_error_of_ours_is_not_called_a_flaw(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is sound: what goes wrong in reading it is our fault, and is raised as it is."""
    wf = Workflow("w")

    @wf.node
    async def a() -> None: ...

    run_id = (await home.run(wf)).run_id

    def wrong(*_: object, **__: object) -> None:
        raise KeyError("ours")

    for module in ("engine", "flaws"):
        monkeypatch.setattr(f"dagresume.{module}.run_info", wrong)
    async with home.engine() as engine:
        with pytest.raises(KeyError, match="ours"):
            await engine.get(run_id)
        with pytest.raises(KeyError, match="ours"):
            await engine.runs()


async def test_the_error_names_the_run_and_what_is_wrong(sqlite_home: Home) -> None:
    wf = Workflow("w")

    @wf.node
    async def a() -> None: ...

    run_id = (await sqlite_home.run(wf, key="k")).run_id
    assert sqlite_home.path is not None
    connection = sqlite3.connect(sqlite_home.path)
    with connection:
        connection.execute("UPDATE dagresume_events SET data = '[' WHERE kind = 'run.created'")
    connection.close()
    async with sqlite_home.engine(wf) as engine:
        told = rf"run {run_id} cannot be read: its event 1 holds data that are no JSON object.*doctor"
        with pytest.raises(StoreError, match=told):
            await engine.get(run_id)
        with pytest.raises(StoreError, match=told):
            await engine.run(wf, key="k")
        with pytest.raises(StoreError, match=told):
            [event async for event in engine.events(run_id)]
