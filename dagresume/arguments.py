"""What a body gets: its arguments, fresh objects decoded from what was committed (C7), and its context."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

from dagresume import codec
from dagresume.context import Context
from dagresume.errors import CheckpointLost, MutatedInput, NotLoadable
from dagresume.executor import Call
from dagresume.feeds import Feed
from dagresume.jobs import Driver, Job, Raw
from dagresume.planner import Vertex
from dagresume.policy import NodeFailure, Settled, answer
from dagresume.scopes import Scope
from dagresume.workflow import Binding, Source

__all__ = ["ask", "call", "check_shared", "context", "plain"]


def call(run: Driver, job: Job) -> Call:
    """Put the arguments together: fresh objects, decoded from what was committed (C7)."""
    vertex, fn = job.vertex, job.vertex.node.fn
    assert fn is not None
    values = plain(job.scope, vertex)
    if values is None:
        return _bound(run, job)
    names = vertex.keywords
    by_place = len(values) - len(names)
    by_name = dict(zip(names, values[by_place:], strict=True))
    job.call = Call(fn, values[:by_place], by_name, None if vertex.pure else vertex.types, None, job.path)
    return job.call


def _bound(run: Driver, job: Job) -> Call:
    """Put the arguments together one by one, as the parameters are bound."""
    vertex, by_name, fn = job.vertex, False, job.vertex.node.fn
    assert fn is not None
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    given: Context | None = None
    for binding in vertex.bindings:
        kind = binding.source.kind
        value: Any
        if kind == "context":
            value = given = context(run, job)
        elif kind == "input" and binding.source.name not in job.scope.inputs:
            by_name = True  # its own default; what comes after it is passed by name
            continue
        elif kind == "item":
            value = _item(run, job, binding.source.place)
        elif not isinstance(job.feed, Feed):
            value = _value(run, job.scope, binding.source)
        else:
            value = _shared(run, job, binding)
        if by_name or binding.keyword:
            kwargs[binding.parameter] = value
        else:
            args.append(value)
    job.call = Call(fn, tuple(args), kwargs, None if vertex.pure else vertex.types, given, job.path)
    return job.call


def plain(scope: Scope, vertex: Vertex) -> tuple[Any, ...] | None:
    """Give the outputs of the parents, decoded in one go; None if they are not plain data at hand, or it
    receives anything else.
    """
    parents = vertex.only_parents
    if parents is None:
        return None
    if not parents:
        return ()
    alike = vertex.alike
    if alike is not None and (shared := scope.given.get(alike)) is not None:
        return shared
    values = _decoded(scope, parents)
    if alike is not None and values is not None and all(type(value) in codec.ATOMS for value in values):
        scope.given[alike] = values  # nobody can change these: they need not be made anew
    return values


def _decoded(scope: Scope, parents: tuple[int, ...]) -> tuple[Any, ...] | None:
    out, rules = scope.out, scope.rules
    texts = [out[p] for p in parents]
    for text, p in zip(texts, parents, strict=True):
        if type(text) is not str or rules[p].types is not codec.EMPTY:
            return None
    try:
        return (codec.unpack(texts[0]),) if len(texts) == 1 else tuple(codec.unpack_many(texts))
    except NotLoadable:
        return None  # one by one: then it is known whose it is


def _shared(run: Driver, job: Job, binding: Binding) -> Any:
    """Give what all items of a map receive: decoded once, read-only by contract."""
    shared: dict[str, Any] = job.feed.shared
    if binding.parameter not in shared:
        shared[binding.parameter] = _value(run, job.scope, binding.source)
    return shared[binding.parameter]


def _item(run: Driver, job: Job, place: int) -> Any:
    cell = job.cells[place]
    if isinstance(cell, Raw):
        return cell.value
    source = job.scope.body.origins[job.vertex.index][place]
    if job.vertex.is_loop and job.index:
        return codec.unpack(cell, job.vertex.types)
    if source.kind == "parent":
        return _unpack(run, job.scope, source.place, codec.unpack, cell, job.index)
    return codec.unpack(cell, job.scope.types(source))


def _value(run: Driver, scope: Scope, source: Source) -> Any:
    if source.kind == "constant":
        return copy.deepcopy(source.value)
    if source.kind == "input":
        given = scope.inputs[source.name]
        return given.cell.value if isinstance(given.cell, Raw) else codec.unpack(given.cell, given.types)
    out = scope.out[source.place]
    if type(out) is str:
        return _unpack(run, scope, source.place, codec.unpack, out)
    if out is None:
        return None  # skipped or failed
    if isinstance(out, Raw):
        return out.value
    if scope.rules[source.place].pure:  # what was handed on uncalled is packed all the same
        return [cell.value if isinstance(cell, Raw) else codec.unpack(cell) for cell in out.cells]
    return _unpack(run, scope, source.place, codec.unpack_many, out.cells)


def _unpack(
    run: Driver,
    scope: Scope,
    i: int,
    unpack: Callable[[Any, codec.Types], Any],
    packed: Any,
    item: int | None = None,
) -> Any:
    vertex = scope.rules[i]
    try:
        return unpack(packed, vertex.types)
    except NotLoadable as error:
        path = scope.path(vertex) + (f"[{item}]" if item is not None and vertex.is_map else "")
        raise CheckpointLost(run.run_id, path, f"cannot be loaded: {error.reason}") from error


def context(run: Driver, job: Job) -> Context:
    scope, vertex = job.scope, job.vertex
    skipped: frozenset[str] = frozenset()
    failures: dict[str, NodeFailure] = {}
    if vertex.junction in scope.bad:
        rules = scope.rules
        skipped = frozenset(rules[p].id for p in vertex.parents if scope.state[p] == Settled.SKIPPED)
        failed = [rules[p] for p in vertex.parents if scope.state[p] == Settled.FAILED]
        failures = {parent.id: run.failure_at(scope.path(parent)) for parent in failed}
    return Context(
        run_id=run.run_id, workflow=run.workflow, node=vertex.id, path=job.path, index=job.index,
        attempt=job.attempt, channel=job, generation=job.generation, skipped=skipped, failures=failures,
        state=None if job.state is None else codec.unpack(job.state), root=run.services.artifacts,
    )  # fmt: skip


def check_shared(run: Driver, job: Job) -> None:
    """Find an item that changed what all items of its map share (debug mode)."""
    for binding in job.vertex.bindings:
        source = binding.source
        if binding.parameter not in job.feed.shared or _is_raw(run, job.scope, source):
            continue
        types = job.scope.types(source)
        fresh = _value(run, job.scope, source)
        if codec.pack(job.feed.shared[binding.parameter], types) != codec.pack(fresh, types):
            job.feed.shared[binding.parameter] = fresh
            raise MutatedInput(job.path, binding.parameter)


def _is_raw(run: Driver, scope: Scope, source: Source) -> bool:
    return source.kind == "parent" and scope.rules[source.place].pure


def ask(run: Driver, job: Job) -> bool:
    """Ask a node's `when=` whether it runs with what it would receive."""
    when = job.vertex.node.when
    assert when is not None
    given = {}
    wanted = inspect.signature(when).parameters.values()
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in wanted)
    names = {parameter.name for parameter in wanted}
    for binding in job.vertex.bindings:
        source = binding.source
        if not (anything or binding.parameter in names) or source.kind == "context":
            continue
        if source.kind == "input" and source.name not in job.scope.inputs:
            continue
        item = source.kind == "item"
        given[binding.parameter] = _item(run, job, source.place) if item else _value(run, job.scope, source)
    return answer(when(**given), "when=")
