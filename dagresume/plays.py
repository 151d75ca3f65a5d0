"""What the processes of a sweep do: run a workflow in the working folder, go on with it, or anything else.

Each is called in a child of a zygote, with JSON, and tells in JSON what came of it. It dies at its point.
"""

from __future__ import annotations

import inspect
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from dagresume import codec
from dagresume.engine import Engine
from dagresume.errors import NoOutput, RolledBack, RunFailed, UncertainNode
from dagresume.events import HELD, NodeStatus, RunStatus
from dagresume.executor import Call, Executor
from dagresume.killpoints import Fate, Point, Where, doomed
from dagresume.planner import Body, is_body
from dagresume.results import RunResult
from dagresume.undo import UndoContext
from dagresume.workflow import Approval, WaitFor, Workflow
from dagresume.zygote import load, load_module

__all__ = [
    "BEGUN",
    "DATABASE",
    "ENDS",
    "Effects",
    "Piece",
    "Seen",
    "act",
    "describe",
    "effects_in",
    "find_mark",
    "marked_piece",
    "play",
    "speak",
]

DATABASE: Final = "runs.db"
BEGUN: Final = "begun.log"
ENDS: Final = frozenset({RunStatus.COMPLETED, RunStatus.ROLLED_BACK})

Effects = str | Callable[[Path], Iterable[str]]
"""Where the effects of a workflow are seen: a file with a line for each, or what lists them (a reference, or
the function itself).
"""


# -- what is played -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A workflow and what is needed to run it."""

    workflow: Workflow
    inputs: Mapping[str, Any] | None = None
    setup: Callable[[], object] | None = None
    effects: Effects | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def _piece(source: Mapping[str, Any]) -> Piece:
    """Give what a sweep names by references, or what a marked test names by objects."""
    if "mark" not in source:
        setup, inputs = source.get("setup"), source.get("inputs")
        return Piece(
            _workflow(load(source["target"]), source["target"]),
            None if inputs is None else codec.unpack(inputs),
            load(setup) if setup else None,
            source.get("effects"),
        )
    module = load_module(source["module"], source["file"])
    mark = find_mark(module, source["owner"], source["mark"])
    if mark is None:
        raise LookupError(f"{source['file']} has no mark {source['mark']} at {source['owner'] or 'its top'}")
    return marked_piece(mark)


def _workflow(found: Any, name: str) -> Workflow:
    made = found if isinstance(found, Workflow) or not callable(found) else found()
    if not isinstance(made, Workflow):
        raise TypeError(f"{name} is neither a Workflow nor a function that gives one")
    return made


def find_mark(module: Any, owner: str, name: str) -> Any:
    """Give the mark of this name on a test function, a class ("Class.test") or the module (""), or None."""
    found: Any = module
    for part in owner.split(".") if owner else ():
        found = getattr(found, part, None)
    marks = getattr(found, "pytestmark", [])
    for given in marks if isinstance(marks, list | tuple) else [marks]:
        mark: Any = getattr(given, "mark", given)
        if mark.name == name:
            return mark
    return None


def marked_piece(mark: Any) -> Piece:
    """Give what a mark says in its arguments."""
    said = dict(mark.kwargs)
    what = mark.args[0] if mark.args else said.get("workflow")
    if isinstance(what, str):
        what = load(what)
    setup = said.get("setup")
    return Piece(
        _workflow(what, f"the workflow given to @pytest.mark.{mark.name}"),
        said.get("inputs"),
        load(setup) if isinstance(setup, str) else setup,
        said.get("effects"),
        said.get("options") or {},
    )


def effects_in(folder: Path, effects: Effects | None) -> list[str]:
    """Give the effects that are to be seen in this folder: a text for each."""
    if effects is None:
        return []
    if isinstance(effects, str) and ":" in effects:
        effects = load(effects)
    if not isinstance(effects, str):
        return list(map(str, effects(folder)))
    file = folder / effects
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def describe(source: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Give what a check needs to know of the nodes, in their order, and of those inside them."""
    return _described(Body(_piece(source).workflow.compiled))


def _described(body: Body) -> list[dict[str, Any]]:
    rules = body.rules
    return [
        {
            "id": v.id,
            "parents": [rules[p].id for p in v.parents],
            "chained": [rules[p].id for p in v.chained],
            "is_map": v.is_map,
            "idempotent": v.idempotent,
            "reconciles": v.node.reconcile is not None,
            "pure": v.pure,
            "is_loop": v.is_loop,
            "body": None if v.body is None else _described(v.body),
        }
        for v in rules
    ]


# -- what has begun -------------------------------------------------------------------------------------


class _Witness:
    """Writes what begins and what is given to the caller to a file outside the store: a line each.

    `effects`: look for new ones after each body; they are the body's if no other is under way meanwhile.
    """

    def __init__(self, path: Path, effects: Effects | None = None) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._effects = effects
        self._seen: Counter[str] = Counter(effects_in(Path.cwd(), effects))
        self.caused: dict[str, list[str]] = {}

    def note(self, what: str, name: str) -> None:
        os.write(self._file, f"{what}\t{name}\n".encode())

    def look(self, path: str) -> None:
        if self._effects is None:
            return
        now = Counter(effects_in(Path.cwd(), self._effects))
        self.caused.setdefault(path, []).extend((now - self._seen).elements())
        self._seen = now


class _WitnessedExecutor:
    def __init__(self, inner: Executor, witness: _Witness) -> None:
        self._inner, self._witness = inner, witness

    async def run(self, call: Call) -> Any:
        self._witness.note("undone" if isinstance(call.context, UndoContext) else "begun", call.path)
        try:
            return await self._inner.run(call)
        finally:
            self._witness.look(call.path)

    async def close(self) -> None:
        await self._inner.close()


class _WitnessedEngine(Engine):
    """An engine that notes the path of every body it begins."""

    witness: _Witness

    def _executor(self, name: str) -> Executor:
        return _WitnessedExecutor(super()._executor(name), self.witness)


class Seen(NamedTuple):
    """What a witness wrote: how often each path has begun, how many results were given."""

    begun: Counter[str]
    results: int

    @classmethod
    def read(cls, folder: Path) -> Seen:
        file = folder / BEGUN
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        told = [line.split("\t", 1) for line in lines]
        return cls(
            Counter(name for what, name in told if what == "begun"),
            sum(what == "result" for what, _ in told),
        )


def _engine(
    workflows: Sequence[Workflow], options: Mapping[str, Any], fate: Fate, effects: Effects | None = None
) -> _WitnessedEngine:
    files = {name: options[name] for name in ("synchronous",) if name in options}
    rest = {name: value for name, value in options.items() if name not in files}
    engine = _WitnessedEngine(workflows=workflows, store=doomed(DATABASE, fate, **files), **rest)
    engine.witness = _Witness(Path(BEGUN), effects)
    return engine


def _fate(point: tuple[Where, int] | None) -> Fate:
    return Fate(None if point is None else Point(*point))


# -- a workflow -----------------------------------------------------------------------------------------


async def play(
    source: Mapping[str, Any],
    key: str,
    options: dict[str, Any],
    action: str = "run",
    run_id: str | None = None,
    point: tuple[Where, int] | None = None,
    words: Mapping[str, str] | None = None,
    learns: bool = False,
) -> dict[str, Any]:
    """Run, resume or retry in the working folder; die at the point if there is one.

    `action` "look": resolve these paths with the packed outputs in `words`, then retry what is still
    uncertain. `learns`: one body at a time, so that it can be told which one had which effect.
    """
    piece = _piece(source)
    if piece.setup is not None:
        piece.setup()
    fate = _fate(point)
    engine = _engine(
        [piece.workflow],
        options | dict(piece.options) | ({"concurrency": 1} if learns else {}),
        fate,
        piece.effects if learns else None,
    )
    told: dict[str, Any] = {}
    try:
        async with engine:
            result = await _went_on(engine, piece, key, action, run_id, words or {})
            while result.status == RunStatus.WAITING:
                await speak(engine, piece.workflow, result.run_id)
                result = await engine.resume(result.run_id, raise_on_failure=False)
            if result.status not in ENDS:
                raise RunFailed(result.run_id, result.failures, f"it ended {result.status}")
            engine.witness.note("result", result.status)
            told["outputs"] = _outputs(piece.workflow, result)
            told["status"] = result.status
            if learns:
                told["caused"] = engine.witness.caused
                told["gave"] = _gave(piece.workflow, result, engine.witness.caused)
    except UncertainNode as error:
        told["refused"] = list(error.paths)
    except Exception as error:
        told["error"] = f"{type(error).__name__}: {error}"
        told["traceback"] = traceback.format_exc()
    return told | {"passed": fate.passed}


async def _went_on(
    engine: Engine, piece: Piece, key: str, action: str, run_id: str | None, words: Mapping[str, str]
) -> RunResult:
    if run_id is None:
        return await engine.run(piece.workflow, piece.inputs, key=key, raise_on_failure=False)
    for path, text in words.items():
        vertex = Body(piece.workflow.compiled).at(path)
        assert vertex is not None
        await engine.resolve(run_id, path, output=codec.unpack(text, vertex.types), by="sweep")
    try:
        return await (engine.resume if action == "resume" else engine.retry)(run_id, raise_on_failure=False)
    except RolledBack:  # it had undone all of itself before its process died
        return await engine.result(run_id)


def _outputs(workflow: Workflow, result: RunResult) -> dict[str, str]:
    nodes = workflow.nodes
    types = {id_: codec.types_of(node.signature.returns) for id_, node in nodes.items()}
    return {
        id_: codec.canonical(out, types[id_])
        for id_, out in result.outputs.items()
        if not isinstance(nodes[id_].what, Approval)  # it says when
    }


def _gave(workflow: Workflow, result: RunResult, paths: Iterable[str]) -> dict[str, str]:
    """Give what these paths gave, packed: what a person would say of one whose effect is there."""
    body, gave = Body(workflow.compiled), {}
    for path in paths:
        vertex = body.at(path)
        try:
            gave[path] = codec.pack(result.outputs[path], codec.EMPTY if vertex is None else vertex.types)
        except NoOutput:  # it failed, which is tolerated or handled
            continue
    return gave


async def speak(engine: Engine, workflow: Workflow, run_id: str) -> None:
    """Be the people and programs that a run waits for: approve everything, send every event."""
    body = Body(workflow.compiled)
    for path, info in (await engine.get(run_id)).nodes.items():
        vertex = body.at(path)
        if info.status != NodeStatus.WAITING or vertex is None:
            continue
        if isinstance(vertex.node.what, WaitFor):
            await engine.signal(run_id, vertex.node.what.event)
        elif info.reason in {"approval", HELD} and (vertex.waits or is_body(vertex, path)):
            await engine.decide(run_id, path, by="sweep")


# -- anything else --------------------------------------------------------------------------------------


async def act(
    action: str,
    workflows: Sequence[str],
    setup: str | None,
    options: dict[str, Any],
    arguments: Mapping[str, Any],
    point: tuple[Where, int] | None = None,
) -> dict[str, Any]:
    """Call a function with an engine on the database of the working folder; die at the point."""
    if setup:
        load(setup)()
    fate = _fate(point)
    engine = _engine([_workflow(load(target), target) for target in workflows], options, fate)
    async with engine:
        given = load(action)(engine, **arguments)
        if inspect.isawaitable(given):
            given = await given
    return {"given": given, "passed": fate.passed}
