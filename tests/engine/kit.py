"""What the engine tests share: a home for runs, bodies that break on demand, faulty stores."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dagresume import Decision, Engine, Event, RunInfo, RunResult, Workflow
from dagresume.clock import Clock, SystemClock
from dagresume.events import Record, enclosing
from dagresume.planner import Body, is_body
from dagresume.sqlite import SQLiteStore
from dagresume.store import MemoryStore, Outcome, Store, StoreFailed, Unit, completes

Wrap = Callable[[Store], Store]


class Boom(Exception):
    """What the nodes of these tests fail with."""


class Home:
    """One place where runs are kept; every engine made here is a new one on the same runs."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._memory = MemoryStore() if path is None else None

    def store(self, clock: Clock | None = None) -> Store:
        """Give a new store object on what is kept here."""
        clock = clock or SystemClock()
        if self._memory is not None:
            return MemoryStore(beside=self._memory, clock=clock)
        assert self.path is not None
        return SQLiteStore(self.path, synchronous="normal", clock=clock)  # nobody cuts the power here

    def engine(self, *workflows: Workflow, wrap: Wrap | None = None, **options: Any) -> Engine:
        """Give a new engine that knows these workflows."""
        store = self.store(options.get("clock"))
        options.setdefault("grace_seconds", 0.5)
        return Engine(workflows=workflows, store=wrap(store) if wrap else store, **options)

    async def run(self, wf: Workflow, inputs: dict[str, Any] | None = None, **options: Any) -> RunResult:
        """Run in an engine of its own; failures come in the result."""
        async with self.engine() as engine:
            return await engine.run(wf, inputs, raise_on_failure=False, **options)

    async def resume(self, wf: Workflow, run_id: str, **options: Any) -> RunResult:
        """Resume in an engine of its own; failures come in the result."""
        async with self.engine(wf) as engine:
            return await engine.resume(run_id, raise_on_failure=False, **options)

    async def retry(self, wf: Workflow, run_id: str, from_node: Any = None, **options: Any) -> RunResult:
        """Retry in an engine of its own; failures come in the result."""
        async with self.engine(wf) as engine:
            return await engine.retry(run_id, from_node, raise_on_failure=False, **options)

    async def plan(self, wf: Workflow, run_id: str, *, items: bool = False) -> dict[str, Decision]:
        """Give the plan by path, from an engine of its own."""
        async with self.engine(wf) as engine:
            decisions = await engine.plan(run_id, items=items)
        found = {decision.path: decision for decision in decisions}
        assert len(found) == len(decisions), "a path is planned twice"
        return found

    async def go_on(self, wf: Workflow, run_id: str, **options: Any) -> RunResult:
        """Resume, after a plan that must have said exactly what then runs."""
        plan = await self.plan(wf, run_id, items=True)
        result = await self.resume(wf, run_id, **options)
        foreseen(wf, plan, result.executed)
        return result

    async def info(self, run_id: str) -> RunInfo:
        """Give the run as an engine without any code sees it."""
        async with self.engine() as engine:
            return await engine.get(run_id)

    async def events(self, run_id: str) -> list[Event]:
        """Give all events of a run."""
        async with self.engine() as engine:
            return [event async for event in engine.events(run_id)]

    async def statuses(self, run_id: str) -> dict[str, str]:
        """Give the status of every path."""
        return {path: node.status.value for path, node in (await self.info(run_id)).nodes.items()}


def foreseen(wf: Workflow, plan: dict[str, Decision], executed: Sequence[str], *, ends: bool = True) -> None:
    """Check a plan against what then ran: what is to run runs, what is reused does not, nothing else runs.

    Only paths that a function runs at count. What was not known to exist (a later round, an item of a map not
    spread out) is covered by what encloses it. `ends`: nothing failed on the way, so all of `run` must run.
    """
    body, ran = Body(wf.compiled), set(executed)

    def runs_function(path: str) -> bool:
        vertex = body.at(path)
        return vertex is not None and is_body(vertex, path)

    def said(*actions: str) -> set[str]:
        return {path for path, decision in plan.items() if decision.action in actions}

    may = said("run", "check") if ends else said("run", "check", "wait", "skip")
    unsaid = {p for p in ran - may if p in plan or may.isdisjoint(enclosing(p))}
    assert not unsaid, f"ran, and the plan says {[plan.get(p) for p in unsaid]}"
    assert not said("reuse") & ran
    missed = {path for path in said("run") if runs_function(path)} - ran
    assert not (ends and missed), f"to run by the plan, and did not: {missed}"


class Calls(Counter[str]):
    """Counts how often each body began, and can break them: a name in `broken` raises."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: set[str] = set()
        self.order: list[str] = []

    def began(self, name: str) -> None:
        """Note that a body began, and raise if it is to break."""
        self[name] += 1
        self.order.append(name)
        if name in self.broken:
            raise Boom(name)

    def mend(self) -> None:
        """Break nothing any more, and count from zero."""
        self.broken.clear()
        self.clear()
        self.order.clear()

    def adder(self, wf: Workflow) -> Callable[..., None]:
        """Give a function that adds a node which is counted, and gives its own name."""

        def add(name: str, *after: str, **options: Any) -> None:
            async def body() -> str:
                self.began(name)
                return name

            wf.node(id=name, depends_on=after, **options)(body)

        return add


Spoil = Callable[[Unit, Record], bool]


class FaultyStore:
    """A store in front of another: what `spoils` says yes to is not written, and fails as `error`."""

    def __init__(self, inner: Store, spoils: Spoil, error: Callable[[], Exception]) -> None:
        self._inner, self._spoils, self._error = inner, spoils, error
        self.spoilt = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        """Write what is not spoilt; behind it no run is declared completed, as in every store."""
        bad: set[int] = set()
        holes: set[object] = set()
        for n, unit in enumerate(units):
            run = getattr(unit.guard, "run", None)
            if any(self._spoils(unit, record) for record in unit.records):
                self.spoilt += 1
                holes.add(run)
                bad.add(n)
            elif run in holes and completes(unit):
                bad.add(n)
        good = [unit for n, unit in enumerate(units) if n not in bad]
        outcomes = iter(await self._inner.commit(good) if good else [])
        return [StoreFailed(self._error()) if n in bad else next(outcomes) for n in range(len(units))]


class SlowStore:
    """A store in front of another that commits only when the gate of a kind of record is open."""

    def __init__(self, inner: Store, holds: Spoil) -> None:
        self._inner, self._holds = inner, holds
        self.reached, self.gate = asyncio.Event(), asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        """Commit, after the gate if one of the records is to be held."""
        if any(self._holds(unit, record) for unit in units for record in unit.records):
            self.reached.set()
            await self.gate.wait()
        return await self._inner.commit(units)


class CountingStore:
    """A store in front of another that notes the transactions."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.transactions: list[list[Record]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        """Commit and note."""
        outcomes = await self._inner.commit(units)
        self.transactions.append([record for unit in units for record in unit.records])
        return outcomes


class TurnedClock(SystemClock):
    """A wall clock that can be turned; what is measured stays true."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def now(self) -> int:  # type: ignore[override]  # the base needs no self
        """Give the wall clock in microseconds UTC."""
        return SystemClock.now() + round(self.ahead * 1e6)


def listing(wf: Workflow, values: Sequence[Any], id: str = "items") -> None:
    """Add an idempotent node that gives a list."""

    async def give() -> list[Any]:
        return list(values)

    wf.node(id=id, idempotent=True)(give)


async def settle(condition: Callable[[], bool]) -> None:
    """Let the loop turn until the condition holds; the timeout of the test is the bound."""
    while not condition():  # noqa: ASYNC110  # what it waits for has no event
        await asyncio.sleep(0)
