"""Plays random workflows through deaths, edits and resumes, and holds what happens against the evaluator."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from dagresume import (
    Context,
    DagresumeError,
    Decision,
    Engine,
    NoOutput,
    Retry,
    RunInfo,
    RunResult,
    RunStatus,
    StoreError,
    UncertainNode,
    Workflow,
)
from dagresume.clock import Clock
from dagresume.store import Outcome, Store, StoreFailed, Unit
from dagresume.testing import StoreWrapper, Zygote
from dagresume.workflow import NodeOptions
from tests.engine.kit import Boom, Home, TurnedClock
from tests.property.evaluator import FAILURE, INPUT, End, Node, compute, evaluate, number, status

CONDITIONS: Final = "when" in NodeOptions.__annotations__
DB: Final = "runs.db"
TRIGGERS: Final = ("none_failed", "all_success", "any_success", "all_done", "any_failed")
MOST_CALLS: Final = 60
STRICT: Final = True
"""Hold the engine to what is known to be wrong, too: it has tests of its own in `test_oracle_found.py`."""
STALE: Final = frozenset[str]()
"""What a node may be shown as although it is blocked now: nothing else."""


class Death(NamedTuple):
    """A process dies at its n-th commit, before it or when it is durable."""

    commit: int
    after: bool


@dataclass
class Call:
    """One call of the engine: what was edited before it, and when its process dies."""

    edited: list[str] = field(default_factory=list)
    world: dict[str, int] = field(default_factory=dict)
    death: Death | None = None
    again: float | None = None  # where in the list of completed paths a person asks for a retry from there
    slots: int = 64


@dataclass
class Case:
    """A workflow, what fails when (path → which of its calls do), and what happens before all is calm."""

    nodes: list[Node]
    xs: list[str]
    script: dict[str, list[int]]
    calls: list[Call]

    def __str__(self) -> str:
        nodes = [f"  {node}" for node in self.nodes]
        return "\n".join([*nodes, f"  xs={self.xs} script={self.script}", *(f"  {c}" for c in self.calls)])


# -- making cases ---------------------------------------------------------------------------------------


def make_case(rng: random.Random) -> Case:
    """Draw a case."""
    nodes: list[Node] = []
    origins: dict[str, str] = {INPUT: INPUT}  # what lists are as long as which
    for n in range(rng.randint(3, 9)):
        node = _node(rng, f"n{n}", nodes, origins)
        if node.kind != "plain":
            origins[node.id] = origins[node.each[0]] if node.each else node.id
        nodes.append(node)
    _keep_handled_failures_the_same(nodes)
    size = rng.randint(0, 3)
    calls = [_call(rng, nodes) for _ in range(rng.randint(3, 6))]
    return Case(nodes, [f"v{k}" for k in range(size)], _script(rng, nodes), calls)


def _node(rng: random.Random, id: str, nodes: list[Node], origins: Mapping[str, str]) -> Node:
    names = [node.id for node in nodes]
    parents = rng.sample(names, min(len(names), rng.choice([0, 1, 1, 2, 2, 3])))
    cut = rng.randint(0, len(parents)) if rng.random() < 0.4 else len(parents)
    node = Node(id, takes=parents[:cut], after=parents[cut:], idempotent=rng.random() < 0.55)
    node.turns, node.attempts = rng.choice([0, 0, 1, 3]), rng.choice([1, 1, 2])
    roll = rng.random()
    if roll < 0.2:
        node.kind, node.size, node.reads = "list", rng.randint(0, 3), rng.random() < 0.5
    elif roll < 0.5:
        _make_map(rng, node, list(origins), origins)
    else:
        _make_plain(rng, node)
    if parents and rng.random() < 0.3:
        node.trigger = rng.choice(TRIGGERS)
    if CONDITIONS and rng.random() < 0.25:
        node.skips_on = rng.randint(0, 2)
    return node


def _make_map(rng: random.Random, node: Node, lists: list[str], origins: Mapping[str, str]) -> None:
    node.kind = "map"
    first = rng.choice(lists)
    alike = [name for name in lists if name != first and origins[name] == origins[first]]
    others = alike if rng.random() < 0.95 else [name for name in lists if name != first]
    node.each = [first, *rng.sample(others, min(len(others), rng.choice([0, 0, 1])))]
    node.takes = [name for name in node.takes if name not in node.each]
    node.after = [name for name in node.after if name not in node.each]
    node.concurrency = rng.choice([None, 1, 2])
    node.none_on = rng.choice([None, None, 0])
    if rng.random() < 0.25:
        node.fails_on, node.tolerate = rng.randint(0, 3), rng.choice([None, 1, 2])
        node.attempts = 1


def _make_plain(rng: random.Random, node: Node) -> None:
    node.coarse, node.reads = rng.random() < 0.3, rng.random() < 0.3
    node.fails = rng.random() < 0.08
    if not (node.reads or node.fails) and rng.random() < 0.2:
        node.pure = node.idempotent = True


def _keep_handled_failures_the_same(nodes: list[Node]) -> None:
    """A handled failure stays one for good: so only what fails for ever may have somebody who handles it."""
    by_id = {node.id: node for node in nodes}
    for node in nodes:
        if node.trigger == "any_failed" and any(_may_come_round(by_id[parent]) for parent in node.parents):
            node.trigger = "all_done"
    for node in nodes:
        if node.trigger == "any_failed":
            for parent in node.parents:
                by_id[parent].skips_on = None if by_id[parent].fails else by_id[parent].skips_on


def _may_come_round(node: Node) -> bool:
    return node.fails_on is not None or len(node.each) > 1


def _script(rng: random.Random, nodes: list[Node]) -> dict[str, list[int]]:
    """Draw which calls of which paths fail although nothing is wrong with what they are given."""
    handled = {parent for node in nodes if node.trigger == "any_failed" for parent in node.parents}
    found: dict[str, list[int]] = {}
    for node in nodes:
        if node.pure or node.fails or node.tolerate is not None or node.id in handled:
            continue
        paths = [f"{node.id}[{k}]" for k in range(4)] if node.kind == "map" else [node.id]
        for path in paths:
            if rng.random() < 0.35:
                found[path] = sorted(rng.sample(range(1, 5), rng.randint(1, 3)))
    return found


def _call(rng: random.Random, nodes: list[Node]) -> Call:
    call = Call(slots=rng.choice([1, 3, 64]))
    for node in nodes:
        if node.reads:
            call.world[node.id] = rng.randint(0, 5)
        if rng.random() < 0.2:
            call.edited.append(node.id)
    if rng.random() < 0.5:
        call.death = Death(rng.randint(1, 10), rng.random() < 0.5)
    if rng.random() < 0.25:
        call.again = rng.random()
    return call


# -- what happens outside of the engine -----------------------------------------------------------------


class Execution(NamedTuple):
    """What one call of a function received and found."""

    received: str
    read: int | None


class World:
    """Remembers what began and what it was given, and is what nodes read; in a file if processes die."""

    def __init__(self, case: Case, file: Path | None = None) -> None:
        self.case, self._file = case, file
        self.numbers: dict[str, int] = {}
        self.versions = {node.id: 1 for node in case.nodes}
        self.dead = False
        self.often: Counter[str] = Counter()
        self.returned: dict[tuple[str, int], Execution] = {}
        self.tokens: dict[str, str] = {}
        self.forget()

    def forget(self) -> None:
        """Begin a new call of the engine."""
        self.began: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.flaky: set[str] = set()
        self.dead = False

    def note(self, *what: Any) -> None:
        """Remember something, over the death of the process too."""
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(what) + "\n")
        self.take(*what)

    def read_back(self, file: Path) -> None:
        """Learn what a process that has died had noted."""
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        file.write_text("", encoding="utf-8")
        for line in lines:
            self.take(*json.loads(line))

    def take(
        self, kind: str, path: str, attempt: int = 0, received: str = "", read: int | None = None
    ) -> None:
        """Take in what was noted."""
        if kind == "began":
            self.began[path] += 1
            self.often[path] += 1
        elif kind == "flaky":
            self.flaky.add(path)
        else:
            self.ended[path] += 1
            self.returned[path, attempt] = Execution(received, read)
            self.tokens[path] = received

    def edit(self, call: Call) -> None:
        """Let the world be another one, and the code of some nodes."""
        self.numbers |= call.world
        for name in call.edited:
            self.versions[name] += 1

    async def body(self, node: Node, ctx: Context, values: list[Any]) -> Any:
        """Do what the function of a node does."""
        await self.alive()
        self.note("began", ctx.path)
        given = [plain(value) for value in values]
        read = self.numbers.get(node.id, 0) if node.reads else None
        received = self._received(node, ctx, given)
        for _ in range(node.turns):
            await asyncio.sleep(0)
        await self.alive()
        if self.often[ctx.path] in self.case.script.get(ctx.path, ()):
            self.note("flaky", ctx.path)
            raise Boom(ctx.path)
        found = compute(node, given, read)
        self.note("returned", ctx.path, ctx.attempt, received, read)
        return found

    async def alive(self) -> None:
        """Nothing happens any more in a process that is dead."""
        if self.dead:
            await asyncio.Event().wait()

    def _received(self, node: Node, ctx: Context, given: list[Any]) -> str:
        """Say what stands for that which was received: of a pure node what it was made of, not its value."""
        pure = {each.id for each in self.case.nodes if each.pure}
        missing = ctx.skipped | set(ctx.failures)
        names = [None] * len(node.each) + node.takes
        parts: list[Any] = []
        for name, value in zip(names, given, strict=True):
            absent = name in missing
            parts.append(("absent",) if absent else self.tokens[name] if name in pure and name else value)
        return repr((self.versions[node.id], parts))


def plain(value: Any) -> Any:
    """Write a value as the evaluator does."""
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return FAILURE if type(value).__name__ == "ItemFailure" else value


def build(case: Case, world: World) -> Workflow:
    """Make the workflow of a case."""
    wf = Workflow("drawn", inputs={INPUT: list})
    for node in case.nodes:
        _add(wf, node, world)
    return wf


def _add(wf: Workflow, node: Node, world: World) -> None:
    names = [*(f"each{n}" for n in range(len(node.each))), *(f"in{n}" for n in range(len(node.takes)))]

    async def body(ctx: Context, **given: Any) -> Any:
        return await world.body(node, ctx, [given[name] for name in names])

    options: dict[str, Any] = {}
    if node.each:
        options["for_each"] = {f"each{n}": name for n, name in enumerate(node.each)}
        options |= {"tolerate": node.tolerate, "concurrency": node.concurrency}
    if node.skips_on is not None:
        options["when"] = _condition(node, names)
    wf.node(
        id=node.id,
        depends_on=node.after,
        args={f"in{n}": name for n, name in enumerate(node.takes)},
        trigger=node.trigger,
        idempotent=node.idempotent,
        checkpoint=not node.pure,
        retry=Retry(node.attempts, delay=0),
        version=str(world.versions[node.id]),
        **options,
    )(body)


def _condition(node: Node, names: list[str]) -> Callable[..., bool]:
    """Give a predicate with the parameters of the node, as a person would write it."""
    space: dict[str, Any] = {"number": number, "plain": plain, "wanted": node.skips_on}
    received = ", ".join(f"plain({name})" for name in names)
    text = f"lambda {', '.join(names)}: number('when', [{received}]) % 3 != wanted"
    return eval(text, space)  # type: ignore[no-any-return]


# -- an engine that dies --------------------------------------------------------------------------------


class Dying(StoreWrapper):
    """A store whose process dies at a commit: nothing is written after it, nobody is told."""

    def __init__(self, inner: Store, death: Death, world: World, *, truly: bool = False) -> None:
        super().__init__(inner)
        self._death, self._world, self._truly = death, world, truly
        self._passed = 0

    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        self._passed += 1
        if self._passed == self._death.commit and not self._death.after:
            self._die()
        if not self._world.dead:
            outcomes = await self.inner.commit(units)
            if self._passed != self._death.commit:
                return outcomes
            self._die()
        return [StoreFailed(StoreError("the process is dead"))] * len(units)

    def _die(self) -> None:
        if self._truly:
            os.kill(os.getpid(), signal.SIGKILL)
        self._world.dead = True

    async def close(self) -> None:
        if not self._world.dead:
            await self.inner.close()
        else:
            self.inner.abandon()


class Ended(NamedTuple):
    """How a call of the engine ended: with a result, with a refusal, or neither: it died."""

    finished: bool = False
    refused: tuple[str, ...] = ()


async def drive(engine: Engine, wf: Workflow, xs: list[str], run_id: str | None, how: str) -> Ended:
    """Call the engine once. `how`: resume, retry, or the path to retry from."""
    try:
        if run_id is None:
            await engine.run(wf, {INPUT: xs}, raise_on_failure=False)
        elif how == "resume":
            await engine.resume(run_id, raise_on_failure=False)
        else:
            await engine.retry(run_id, None if how == "retry" else how, raise_on_failure=False)
    except UncertainNode as error:
        return Ended(refused=tuple(error.paths))
    return Ended(finished=True)


class Stage:
    """Plays one case: a new engine for each call, all on the same store."""

    def __init__(self, case: Case, path: Path | None = None, *, apart: Apart | None = None) -> None:
        self.case, self.clock = case, TurnedClock()
        self.home = Home(path)
        self.world = World(case)
        self.apart = apart
        self.by_id = {node.id: node for node in case.nodes}
        self.run_id: str | None = None
        self.resumes = self.deaths = 0
        self.planned: Counter[str] = Counter()

    def engine(self, wf: Workflow, *, slots: int = 64, death: Death | None = None) -> Engine:
        """Give a new engine; whose owner died is free."""
        clock: Clock = self.clock
        store = self.home.store(clock)
        if death is not None:
            store = Dying(store, death, self.world)
        return Engine(workflows=[wf], store=store, clock=clock, concurrency=slots, grace_seconds=0)

    async def play(self) -> None:
        """Play it to its end, and judge it."""
        for call in self.case.calls:
            if await self._completed() and call.again is None:
                break
            await self._call(call)
        for _ in range(MOST_CALLS):
            if await self._at_rest():
                break
            await self._call(Call())
        else:
            raise AssertionError("it does not come to an end")
        await self._judge_end()

    async def _completed(self) -> bool:
        return self.run_id is not None and (await self._info()).status is RunStatus.COMPLETED

    async def _at_rest(self) -> bool:
        """Say whether another call would change nothing: all has been tried in a world without accidents."""
        if self.run_id is None:
            return False
        found = (await self._info()).status
        return found is RunStatus.COMPLETED or (found is RunStatus.FAILED and self.settled)

    settled = False

    async def _info(self) -> RunInfo:
        async with self.engine(build(self.case, self.world)) as engine:
            return await engine.get(self.run_id or "")

    async def _call(self, call: Call) -> None:
        world, case = self.world, self.case
        world.forget()
        world.edit(call)
        wf = build(case, world)
        before: RunInfo | None = None
        planned: dict[str, Decision] = {}
        how = "resume"
        if self.run_id is not None:
            async with self.engine(wf) as engine:
                before = await engine.get(self.run_id)
                plan = await engine.plan(self.run_id, items=True)
                assert plan == await engine.plan(self.run_id, items=True), (
                    "planned twice, planned differently"
                )
            planned = {decision.path: decision for decision in plan}
            assert len(planned) == len(plan), "a path is planned twice"
            how = self._how(call, before)
        ended = await self._play_call(wf, call, how)
        self.settled = ended.finished and not world.flaky and how in {"resume", "retry"}
        if self.run_id is None:
            return
        after = await self._info()
        self._judge_call(ended, how, planned, before, after)

    def _how(self, call: Call, before: RunInfo) -> str:
        done = sorted(path for path, node in before.nodes.items() if node.status == "completed")
        if call.again is not None and done:
            return done[int(call.again * len(done))]
        if self.wants_a_word:
            self.wants_a_word = False
            return self.stuck or "retry"
        return "resume"

    stuck: str | None = None
    """What stays uncertain although a person has said `retry`: it is named then."""

    wants_a_word = False

    async def _play_call(self, wf: Workflow, call: Call, how: str) -> Ended:
        ended = Ended()
        if call.death is not None and self.apart is not None:
            ended = self.apart.play(self, call, how)
        else:
            async with self.engine(wf, slots=call.slots, death=call.death) as engine:
                try:
                    async with asyncio.timeout(20):
                        ended = await drive(engine, wf, self.case.xs, self.run_id, how)
                except (DagresumeError, asyncio.CancelledError):
                    if not self.world.dead:
                        raise
        if self.world.dead:
            ended = Ended()
            self.deaths += 1
            self.clock.ahead += 3600.0  # the lease of the dead is over
        if self.run_id is None:
            async with self.engine(wf) as engine:
                found = await engine.runs()
            self.run_id = found[0].run_id if found else None
        return ended

    # -- judging ----------------------------------------------------------------------------------------

    def _judge_call(
        self,
        ended: Ended,
        how: str,
        planned: Mapping[str, Decision],
        before: RunInfo | None,
        after: RunInfo,
    ) -> None:
        world = self.world
        twice = [path for path, times in world.ended.items() if times > 1]
        assert not twice, f"returned and called again in one process: {twice}"
        if ended.refused:
            assert how == "resume"
            assert not world.began, "refused, and something began"
            held = {path for path, decision in planned.items() if decision.action == "hold"}
            assert set(ended.refused) <= held, f"refused for {ended.refused}, planned to hold: {held}"
        uncertain = [p for p, d in planned.items() if d.reason == "uncertain" and "[" not in p]
        left = [path for path in uncertain if after.nodes[path].status == "interrupted"]
        in_vain = how == "retry" and ended.finished and not STRICT
        self.stuck = left[0] if in_vain and left else None
        self.wants_a_word = bool(ended.refused) or after.status in {RunStatus.WAITING, RunStatus.INTERRUPTED}
        if before is None or how not in {"resume", "retry"}:
            return
        if before.status is not RunStatus.COMPLETED:
            self._judge_why(before)
        if how == "resume":
            self.resumes += 1
            self.planned.update(str(decision.action) for decision in planned.values())
            self._judge_plan(ended, planned, before, after)

    def _judge_why(self, before: RunInfo) -> None:
        """What had completed ran again only because it receives something else, or is something else."""
        for path in self.world.began:
            node = before.nodes.get(path)
            if node is None or node.status != "completed" or node.reason in {"moved", "passed"}:
                continue
            former = self.world.returned.get((path, node.attempt))
            now = [e for (p, a), e in self.world.returned.items() if p == path and a > node.attempt]
            if former is None or not now or self._is_pure(path):
                continue  # it failed this time: what it received is not known
            assert now[-1].received != former.received, f"{path} completed and ran again with the same inputs"

    def _is_pure(self, path: str) -> bool:
        return path in self.by_id and self.by_id[path].pure

    def _judge_plan(
        self, ended: Ended, planned: Mapping[str, Decision], before: RunInfo, after: RunInfo
    ) -> None:
        if before.status is RunStatus.COMPLETED:
            assert not self.world.began, "a completed run was resumed, and something ran"
            return
        actions = {path: decision.action for path, decision in planned.items()}
        for path in self.world.began:
            action = actions.get(path) or actions[path.partition("[")[0]]
            why = planned.get(path) or planned[path.partition("[")[0]]
            assert action in {"run", "check"}, f"{path} ran and was planned as {action} ({why.reason})"
        if not ended.finished:
            return
        for path in planned:
            if path not in self.world.began and self._was_to_run(path, planned, before):
                assert self._excused(path, planned, after), (
                    f"{path} was planned to run ({planned[path].reason}) and did not"
                )

    def _was_to_run(self, path: str, planned: Mapping[str, Decision], before: RunInfo) -> bool:
        """Say whether the plan promises that a path runs; a map itself has no function that could."""
        name, _, item = path.partition("[")
        if not STRICT and (
            (item and planned[name].action != "run") or before.nodes[path].status == "waiting"
        ):
            return False
        return planned[path].action == "run" and (bool(item) or self.by_id[name].kind != "map")

    def _excused(self, path: str, planned: Mapping[str, Decision], after: RunInfo) -> bool:
        """Say whether something above went wrong in this call: a plan supposes that what runs completes."""
        name = path.partition("[")[0]
        if any(self._went_wrong(above, planned, after) for above in self._above(name)):
            return True
        if name != path and (after.nodes[name].status, after.nodes[name].reason) == ("failed", "error"):
            return True  # the map could not be spread out: its lists differ in length
        if planned[path].reason != "recomputed":
            return False
        takers = [n.id for n in self.case.nodes if name in [*n.takes, *n.each]]
        return all(self._excused(taker, planned, after) for taker in takers if planned[taker].action == "run")

    def _above(self, name: str) -> set[str]:
        found, queue = set[str](), [name]
        while queue:
            fresh = set(self.by_id[queue.pop()].parents) - found
            found |= fresh
            queue += fresh
        return found

    def _went_wrong(self, name: str, planned: Mapping[str, Decision], after: RunInfo) -> bool:
        """Say whether a node was to run in this call and has not completed."""
        return planned[name].action in {"run", "check"} and after.nodes[name].status != "completed"

    async def _judge_end(self) -> None:
        """Hold what is stored against what the evaluator makes of the nodes alone."""
        info = await self._info()
        reads: dict[str, int] = {}
        for node in self.case.nodes:
            execution = self.world.returned.get((node.id, info.nodes[node.id].attempt))
            if node.reads and execution is not None and execution.read is not None:
                reads[node.id] = execution.read
        ends = evaluate(self.case.nodes, self.case.xs, reads)
        shown = {node.id: info.nodes[node.id].status.value for node in self.case.nodes}
        wrong = {
            name: (how, ends[name].how)
            for name, how in shown.items()
            if how != ends[name].how and not self._is_known(name, shown, ends)
        }
        assert not wrong, f"ended otherwise than the nodes say (node: is, should be): {wrong}"
        if all(shown[name] == end.how for name, end in ends.items()):
            expected = status(self.case.nodes, ends)
            assert info.status.value == expected, f"the run ended {info.status}, should be {expected}"
        async with self.engine(build(self.case, self.world)) as engine:
            result = await engine.result(self.run_id or "")
        for node in self.case.nodes:
            self._judge_output(result, node, ends[node.id], shown[node.id])

    def _judge_output(self, result: RunResult, node: Node, end: End, shown: str) -> None:
        if end.how == "completed" and not node.pure:
            assert plain(result[node.id]) == end.value, f"the output of {node.id}"
        elif end.how == shown:
            try:
                result[node.id]
            except NoOutput:
                return
            raise AssertionError(f"{node.id} {end.how}, and has an output")

    def _is_known(self, name: str, shown: Mapping[str, str], ends: Mapping[str, End]) -> bool:
        """Say whether a node that is blocked is shown as something else for a reason that has its own test:
        it had ended, or begun, before what is above it failed; what is below it is then shown as pending.
        """
        if ends[name].how != "upstream_failed":
            return False
        above = (parent for parent in self.by_id[name].parents if shown[parent] != ends[parent].how)
        return shown[name] in STALE or (shown[name] == "pending" and any(above))


# -- processes that are killed --------------------------------------------------------------------------

NOTES: Final = "notes.jsonl"


class Apart:
    """Plays the calls that die in processes of their own, which are killed at that commit."""

    def __init__(self, zygote: Zygote, folder: Path, seed: int) -> None:
        self._zygote, self._folder, self._seed = zygote, folder, seed

    def play(self, stage: Stage, call: Call, how: str) -> Ended:
        """Play one call to its end, or the end of its process."""
        world = stage.world
        child = self._zygote.call(
            "tests.property.stage:live_and_die",
            self._folder,
            seed=self._seed,
            numbers=world.numbers,
            versions=world.versions,
            often=dict(world.often),
            tokens=world.tokens,
            run_id=stage.run_id,
            how=how,
            slots=call.slots,
            death=call.death,
        ).wait(20.0)
        world.read_back(self._folder / NOTES)
        assert not child.hung
        assert not child.error, child.error
        if child.killed:
            world.dead = True
            return Ended()
        return Ended(finished=child.told["finished"], refused=tuple(child.told["refused"]))


async def live_and_die(
    seed: int,
    numbers: dict[str, int],
    versions: dict[str, int],
    often: dict[str, int],
    tokens: dict[str, str],
    run_id: str | None,
    how: str,
    slots: int,
    death: list[Any],
) -> dict[str, Any]:
    """Be the process that dies, unless the call ends before."""
    case = make_case(random.Random(seed))
    world = World(case, Path(NOTES))
    world.numbers, world.versions, world.tokens = numbers, versions, tokens
    world.often.update(often)
    store = Dying(Home(Path(DB)).store(), Death(*death), world, truly=True)
    wf = build(case, world)
    async with Engine(workflows=[wf], store=store, concurrency=slots, grace_seconds=0) as engine:
        ended = await drive(engine, wf, case.xs, run_id, how)
    return {"finished": ended.finished, "refused": ended.refused}
