"""Random graphs against a model: what runs, what is reused, how everything ends, and that the plan knew it.

The model is written from DESIGN alone: join rules, maps, pass-through, input fingerprints, hold. Bodies
give text made of their inputs, so that a changed input changes everything below it (unless a node is
constant: early cut-off).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from dagresume import NoOutput, RunStatus, Workflow
from dagresume.policy import Trigger
from tests.engine.kit import Boom, Home

TRIGGERS: tuple[Trigger, ...] = ("none_failed", "all_success", "any_success", "all_done", "any_failed")
FAILED = {"failed", "blocked"}
HELD = {"held", "waits"}  # not settled: below it nothing is decided


@dataclass
class Spec:
    name: str
    takes: list[str]
    after: list[str]
    trigger: Trigger = "none_failed"
    idempotent: bool = True
    pure: bool = False
    constant: bool = False
    source: str | None = None  # of a map: a list node or another map
    tolerate: int | None = None
    gives_list: int | None = None

    @property
    def parents(self) -> list[str]:
        return list(dict.fromkeys([*self.after, *([self.source] if self.source else []), *self.takes]))


@dataclass
class State:
    """What the model knows of a run: by path the last record, and how each node ended in the last call."""

    records: dict[str, tuple[str, Any, Any]] = field(default_factory=dict)  # status, input, output
    ended: dict[str, str] = field(default_factory=dict)
    executed: set[str] = field(default_factory=set)


def make_specs(rng: random.Random) -> list[Spec]:
    specs: list[Spec] = []
    for n in range(rng.randint(2, 8)):
        names = [spec.name for spec in specs]
        lists = [spec for spec in specs if spec.gives_list is not None or spec.source]
        parents = rng.sample(names, min(len(names), rng.choice([0, 1, 1, 2, 3])))
        cut = rng.randint(0, len(parents))
        spec = Spec(f"n{n}", parents[:cut], parents[cut:], idempotent=rng.random() < 0.6)
        roll = rng.random()
        if roll < 0.2:
            spec.gives_list = rng.randint(0, 3)
        elif roll < 0.45 and lists:
            source = rng.choice(lists)
            spec.source = source.name
            spec.takes = [name for name in spec.takes if name != source.name]
            spec.after = [name for name in spec.after if name != source.name]
            spec.tolerate = rng.choice([None, None, 1])
        else:
            if parents and rng.random() < 0.5:
                spec.trigger = rng.choice(TRIGGERS)
            spec.constant = rng.random() < 0.2
            if rng.random() < 0.2:
                spec.pure = spec.idempotent = True
        specs.append(spec)
    return specs


def joined(trigger: str, ended: list[str]) -> str:
    if HELD & set(ended):
        return "wait"
    failed = sum(how in FAILED for how in ended)
    skipped, completed = ended.count("skipped"), ended.count("completed")
    match trigger:
        case _ if not ended or trigger == "all_done":
            return "run"
        case "any_failed":
            return "run" if failed else "skip"
        case "any_success":
            return "run" if completed else "block" if failed else "skip"
        case "all_success":
            return "block" if failed else "skip" if skipped else "run"
        case _:
            return "block" if failed else "run" if completed else "skip"


class Model:
    """Says what a call of the engine does, from what the store holds."""

    def __init__(self, specs: list[Spec], broken: set[str], before: State | None, seen: set[str]) -> None:
        self.specs, self.broken = {spec.name: spec for spec in specs}, broken
        self.prior = dict(before.records) if before else {}
        self.seen = seen  # what did begin: asked only where that is a matter of timing
        self.now = State(dict(self.prior))
        self.value: dict[str, Any] = {}
        self.print: dict[str, Any] = {}  # what stands for a node in the fingerprints below it
        for spec in specs:
            self._node(spec)
        for spec in reversed(specs):  # what a running node needs of pure ones is made again
            if spec.pure and self.now.ended[spec.name] == "completed" and spec.name not in self.now.executed:
                takers = [s for s in specs if spec.name in s.takes]
                empty = any(taker.source and not self.specs_items(taker) for taker in takers)
                if any(self._ran(taker) for taker in takers) or (empty and spec.name in seen):
                    self.now.executed.add(spec.name)

    def _ran(self, spec: Spec) -> bool:
        return any(path == spec.name or path.startswith(spec.name + "[") for path in self.now.executed)

    def _handled(self, spec: Spec) -> bool:
        handlers = (child for child in self.specs.values() if child.trigger == "any_failed")
        return any(
            spec.name in child.parents and self.prior.get(child.name, "?")[0] == "completed"
            for child in handlers
        )

    def _node(self, spec: Spec) -> None:
        now = self.now
        how = joined(spec.trigger, [now.ended[parent] for parent in spec.parents])
        if spec.source and how in {"block", "wait"}:
            self._stream(spec)
        if how != "run":
            now.ended[spec.name] = {"skip": "skipped", "block": "blocked", "wait": "waits"}[how]
            if how == "skip":
                now.records[spec.name] = ("skipped", None, None)
            self.print[spec.name] = self.value[spec.name] = None
            return
        if self.prior.get(spec.name, "?")[0] == "failed" and self._handled(spec):
            now.ended[spec.name] = "failed"
            self.print[spec.name] = self.value[spec.name] = None
            return
        if spec.source:
            self._map(spec)
        else:
            self._plain(spec)

    def _plain(self, spec: Spec) -> None:
        given = tuple(self.print[parent] for parent in spec.takes)
        values = [self.value[parent] for parent in spec.takes]
        how, out = self._path(spec, spec.name, given, values)
        self.now.ended[spec.name] = how
        self.value[spec.name] = out if how == "completed" else None
        self.print[spec.name] = (
            (spec.name, "pure", given) if spec.pure and how == "completed" else self.value[spec.name]
        )

    def _path(self, spec: Spec, path: str, given: Any, values: list[Any]) -> tuple[str, Any]:
        prior = self.prior.get(path)
        if prior and prior[0] == "completed" and prior[1] == given:
            return "completed", prior[2]
        if prior and prior[0] in {"completed", "held"} and not spec.idempotent and prior[1] != given:
            self.now.records[path] = ("held", prior[1], prior[2])
            return "held", None
        self.now.executed.add(path)
        if path in self.broken:
            self.now.records[path] = ("failed", given, None)
            return "failed", None
        out = output(spec, path, values)
        self.now.records[path] = ("completed", given, out)
        return "completed", out

    def _item(self, spec: Spec, k: int, above: Any) -> tuple[str, Any]:
        path = f"{spec.name}[{k}]"
        given = (above, *(self.print[parent] for parent in spec.takes))
        if self.specs[spec.source or ""].source and (above is None or above == FAILURE):
            self.now.records[path] = ("completed", given, above)  # passes uncalled
            return "completed", above
        how, out = self._path(spec, path, given, [above, *(self.value[parent] for parent in spec.takes)])
        return how, out

    def _map(self, spec: Spec) -> None:
        source = self.value[spec.source or ""]
        source = [] if source is None else source
        given = (tuple(source), *(self.print[parent] for parent in spec.takes))
        prior = self.prior.get(spec.name)
        if prior and prior[0] == "completed" and prior[1] == given:
            self.now.ended[spec.name] = "completed"
            self.value[spec.name] = self.print[spec.name] = prior[2]
            return
        found = [self._item(spec, k, above) for k, above in enumerate(source)]
        failed = sum(how == "failed" for how, _ in found)
        held = any(how == "held" for how, _ in found)
        if held or failed > (spec.tolerate or 0):
            self.now.ended[spec.name] = "held" if held else "failed"
            self.now.records[spec.name] = ("failed", given, None)
            self.value[spec.name] = self.print[spec.name] = None
            return
        out = tuple(value if how == "completed" else FAILURE for how, value in found)
        self.now.ended[spec.name] = "completed"
        self.now.records[spec.name] = ("completed", given, out)
        self.value[spec.name] = self.print[spec.name] = out

    def _stream(self, spec: Spec) -> None:
        """A chained map blocked only by the map above: what went through above went on here."""
        above = self.specs[spec.source or ""]
        others = [self.now.ended[parent] for parent in spec.parents if parent != above.name]
        if not above.source or any(how != "completed" for how in others):
            return
        if self.now.ended[above.name] not in FAILED | HELD:
            return
        if not any(path.startswith(spec.name + "[") for path in self.seen):
            return  # the map above had failed before the other parents ended
        for k in range(len(self.specs_items(above))):
            path = f"{above.name}[{k}]"
            record = self.now.records.get(path)
            if record and record[0] == "completed" and (path in self.now.executed or path in self.prior):
                self._item(spec, k, record[2])

    def specs_items(self, spec: Spec) -> list[int]:
        while spec.source:
            spec = self.specs[spec.source]
        return list(range(spec.gives_list or 0))


FAILURE = "<failure>"


def output(spec: Spec, path: str, values: list[Any]) -> Any:
    if spec.gives_list is not None:
        return [f"{spec.name}.{k}" for k in range(spec.gives_list)]
    if spec.constant:
        return f"{spec.name} const"
    if spec.source and path.endswith("[1]") and spec.name.endswith(("3", "5")):
        return None
    return f"{path}({plain(values)})"


def plain(value: Any) -> Any:
    """Write what a body received as the model does."""
    if isinstance(value, list | tuple):
        return "[" + ",".join(plain(each) for each in value) + "]"
    if type(value).__name__ == "ItemFailure":
        return FAILURE
    return str(value)


def build(specs: list[Spec], broken: set[str]) -> Workflow:
    wf = Workflow("random")

    def add(spec: Spec) -> None:
        from dagresume import Context

        async def body(ctx: Context, **given: Any) -> Any:
            if ctx.path in broken:
                raise Boom(ctx.path)
            names = [*(["item"] if spec.source else []), *(f"in_{name}" for name in spec.takes)]
            return output(spec, ctx.path, [given[name] for name in names])

        options: dict[str, Any] = {}
        if spec.source:
            options = {"for_each": {"item": spec.source}, "tolerate": spec.tolerate}
        wf.node(
            id=spec.name,
            depends_on=spec.after,
            args={f"in_{name}": name for name in spec.takes},
            trigger=spec.trigger,
            idempotent=spec.idempotent,
            checkpoint=not spec.pure,
            **options,
        )(body)

    for spec in specs:
        add(spec)
    return wf


def breakable(specs: list[Spec]) -> list[str]:
    paths: list[str] = []
    by_name = {spec.name: spec for spec in specs}
    for spec in specs:
        root = spec
        while root.source:
            root = by_name[root.source]
        if spec.source:
            paths += [f"{spec.name}[{k}]" for k in range(root.gives_list or 0)]
        elif spec.gives_list is None:
            paths.append(spec.name)
    return paths


def check_ends(model: State, specs: list[Spec], result: Any) -> None:
    assert set(result.executed) == model.executed
    for spec in specs:
        if model.ended[spec.name] == "completed" and not spec.pure:
            expected = model.records[spec.name][2]
            assert plain(result[spec.name]) == plain(expected), spec.name
        else:
            with pytest.raises(NoOutput):
                result[spec.name]
    failed = {path for path, (how, _, _) in model.records.items() if how == "failed"}
    assert set(result.failures) <= failed


def check_plan(plan: dict[str, Any], model: State, specs: list[Spec], result: Any) -> None:
    executed = set(result.executed)
    maps = {spec.name for spec in specs if spec.source}
    for spec in specs:
        decision = plan[spec.name]
        ran = spec.name in executed or any(path.startswith(spec.name + "[") for path in executed)
        if decision.action == "run" and spec.name not in maps:
            assert ran, f"{spec.name} is planned to run ({decision.reason})"
        if decision.action in {"reuse", "skip", "hold", "wait"} and not (
            decision.action == "hold" and spec.name in maps
        ):
            assert not ran, f"{spec.name} ran and is planned as {decision.action} ({decision.reason})"
        if decision.action == "reuse" and decision.reason != "handled" and spec.name not in maps:
            assert spec.name in set(result.reused), f"{spec.name} is planned as reuse"
        if decision.action == "skip":
            assert model.ended[spec.name] in {"skipped", "blocked"}, spec.name


async def play(seed: int) -> None:
    rng = random.Random(seed)
    specs = make_specs(rng)
    paths = breakable(specs)
    broken = set(rng.sample(paths, min(len(paths), rng.randint(0, 3))))
    home = Home(None)
    wf = build(specs, broken)
    first = await home.run(wf)
    model = Model(specs, broken, None, set(first.executed)).now
    check_ends(model, specs, first)
    run_id = first.run_id
    for _ in range(3):
        if first.status is RunStatus.COMPLETED:
            break
        plan = await home.plan(wf, run_id)
        remains = (
            set(rng.sample(sorted(broken), rng.randint(0, len(broken)))) if rng.random() < 0.4 else set[str]()
        )
        pures = {
            spec.name for spec in specs if spec.pure and model.records.get(spec.name, "?")[0] == "completed"
        }
        broken.intersection_update(remains - pures)
        result = await home.resume(wf, run_id)
        model = Model(specs, broken, model, set(result.executed)).now
        check_ends(model, specs, result)
        if not broken:
            check_plan(plan, model, specs, result)
            stored = await home.statuses(run_id)
            for spec in specs:
                if model.ended[spec.name] in {"completed", "skipped"}:
                    assert stored[spec.name] == model.ended[spec.name]
        first = result


@pytest.mark.parametrize("start", range(0, 400, 100))
async def test_random_graphs_do_what_the_model_says(start: int) -> None:
    """A2, R14, R33, C3, C9: run, plan and resumes of a hundred random graphs."""
    for seed in range(start, start + 100):
        try:
            await play(seed)
        except (Exception, pytest.fail.Exception) as error:
            error.add_note(f"seed {seed}")
            raise


async def retry_somewhere(seed: int) -> None:
    """From a random path of a completed run: it and all below run again, and what they need of pure ones."""
    rng = random.Random(seed)
    specs = make_specs(rng)
    home, wf = Home(None), build(specs, set())
    first = await home.run(wf)
    began = set(first.executed)
    if first.status is not RunStatus.COMPLETED or not began:
        return
    start = rng.choice(sorted(began))
    by_name = {spec.name: spec for spec in specs}
    again = {start}
    node, _, index = start.partition("[")
    for spec in specs:  # in topological order
        for parent in spec.parents:
            whole = parent in again or (parent == node and not index)
            if whole:
                again.add(spec.name)
            elif any(path.startswith(parent + "[") for path in again):
                one = f"[{index}" if by_name[parent].source and spec.source == parent else ""
                again.add(spec.name + one)
    expected = {path for path in began if path in again or path.partition("[")[0] in again}
    result = await home.retry(wf, first.run_id, start)
    assert result.status is RunStatus.COMPLETED
    pure = {spec.name for spec in specs if spec.pure}
    assert set(result.executed) - pure == expected - pure, f"from {start}"
    assert expected <= set(result.executed)
    for name in first.outputs:
        assert plain(result[name]) == plain(first[name])


@pytest.mark.parametrize("start", range(0, 200, 100))
async def test_retry_from_anywhere_runs_that_and_all_below(start: int) -> None:
    """B14: nothing else."""
    for seed in range(start, start + 100):
        try:
            await retry_somewhere(seed)
        except (Exception, pytest.fail.Exception) as error:
            error.add_note(f"seed {seed}")
            raise
