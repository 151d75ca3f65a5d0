"""The definition as it is stored: what it is told apart by, and in which words it differs from another."""

from __future__ import annotations

import functools
import hashlib
import json
from typing import TYPE_CHECKING, Any, Final

from dagresume import codec
from dagresume.codehash import UNKNOWN, code_hash
from dagresume.errors import OutputNotSerializable
from dagresume.graphs import folded, unfolded
from dagresume.policy import Retry
from dagresume.store import Definition
from dagresume.workflow import Approval, Loop, Sleep, WaitFor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dagresume.workflow import Graph, Node, Source

__all__ = ["code_hashes", "describe", "describe_callable", "differences", "identity"]


def describe_callable(fn: Callable[..., Any]) -> str:
    """Give 'module:qualname' for people.

    A partial is named by its function, a callable object by its class.
    """
    target: Any = fn
    while isinstance(target, functools.partial):
        target = target.func
    if not isinstance(getattr(target, "__qualname__", None), str):
        target = type(target)
    return f"{getattr(target, '__module__', None) or 'builtins'}:{target.__qualname__}"


def describe(graph: Graph) -> Definition:
    """Give a checked graph as it is stored: nodes, edges and options as JSON, and their hash.

    No code, no captured value and no node's `version=` is in it: those are told from code hashes and
    fingerprints.
    """
    told = _told(graph, False)
    kinds = tuple((node["id"], node["type"]) for node in told["nodes"])
    return Definition(graph.workflow, graph.version, _identity(told), folded(told), kinds)


def _told(graph: Graph, enclosing: bool) -> dict[str, Any]:
    """Give a graph as it is stored, with the graphs inside it; `enclosing`: the default of idempotent around
    it.
    """
    default = enclosing if graph.idempotent is None else graph.idempotent
    options = {
        "idempotent": default,
        "output": None if graph.output is None else graph.ids[graph.output],
        **({"on_failure": graph.on_failure} if graph.on_failure else {}),
    }
    fns = {id(node.fn): node.fn for node in graph.nodes if node.fn is not None}
    names = {key: describe_callable(fn) for key, fn in fns.items()}
    nodes = [_described(graph, i, default, names) for i in range(len(graph))]
    return {"workflow": graph.workflow, "version": graph.version, "options": options, "nodes": nodes}


def identity(text: str) -> bytes:
    """Give the definition hash of a stored definition (16 bytes): all of it but where the functions come
    from.
    """
    return _identity(unfolded(text))


def _identity(told: Mapping[str, Any]) -> bytes:
    return hashlib.sha256(json.dumps(_without_code(told), sort_keys=True).encode()).digest()[:16]


def _without_code(told: Mapping[str, Any]) -> dict[str, Any]:
    nodes = [
        {
            option: _without_code(value) if option == "body" else value
            for option, value in node.items()
            if option != "function"
        }
        for node in told["nodes"]
    ]
    return {**told, "nodes": nodes}


_OPTIONS = ("concurrency", "tolerate", "timeout", "limit", "executor")
_RETRY = ("attempts", "delay", "backoff", "max_delay", "jitter", "give_up_after")


_USUAL: Final = Retry()


def _described(graph: Graph, i: int, default: bool, names: Mapping[int, str]) -> dict[str, Any]:
    """Give a node as it is stored: what is as usual is left out. `names`: of the functions, by identity."""
    node, retry = graph.nodes[i], graph.nodes[i].retry or graph.retry
    feeds = [(b.parameter, b.source) for b in graph.bindings[i] if b.source.kind != "context"]
    told = {
        "id": node.id,
        "type": node.type,
        "function": names.get(id(node.fn)),
        "parents": [graph.ids[p] for p in graph.parents[i]],
        "parameters": {name: _source_told(graph, source) for name, source in feeds} or None,
        "for_each": dict(node.for_each) if node.for_each else None,
        "idempotent": default if node.idempotent is None else node.idempotent,
        "retry": None if retry == _USUAL or node.fn is None else _retry_told(retry),
        **{option: getattr(node, option) for option in _OPTIONS},
        "trigger": None if node.trigger == "none_failed" else node.trigger,
        "checkpoint": None if node.checkpoint else False,
        **{name: True for name in ("when", "compensate", "reconcile") if getattr(node, name) is not None},
        **_what_told(graph, i),
    }
    if node.workflow is not None:
        told["body"] = _told(graph.inner[id(node.workflow)], bool(told["idempotent"]))
    return {name: value for name, value in told.items() if value is not None}


def _what_told(graph: Graph, i: int) -> dict[str, Any]:
    """Give what is particular to a node that is more, or less, than a function."""
    what = graph.nodes[i].what
    if isinstance(what, Approval):
        return {"prompt": what.prompt}
    if isinstance(what, Sleep):
        return {"seconds": what.seconds}
    if isinstance(what, WaitFor):
        return {"event": what.event}
    if isinstance(what, Loop):
        (initial,) = graph.sources[i]
        return {
            "initial": _source_told(graph, initial),
            "state": what.state,
            "max_iterations": what.max_iterations,
        }
    return {}


def _retry_told(retry: Retry) -> dict[str, Any]:
    kinds = {name: [kind.__qualname__ for kind in getattr(retry, name)] for name in ("retry_on", "never")}
    return {name: getattr(retry, name) for name in _RETRY} | kinds


def _source_told(graph: Graph, source: Source) -> str:
    if source.kind == "parent":
        return f"node {graph.ids[source.place]}"
    if source.kind == "input":
        return f"input {source.name}"
    return source.kind


def differences(before: str, after: str) -> list[str]:
    """Give what differs between two stored definitions, in words: nodes added, removed, options changed."""
    return _graph_changes(unfolded(before), unfolded(after))


def _graph_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    was, now = ({node["id"]: node for node in told["nodes"]} for told in (old, new))
    found = []
    if old["version"] != new["version"]:
        found.append(f"version {old['version']!r} is now {new['version']!r}")
    found += [f"node {id_} removed" for id_ in was if id_ not in now]
    found += [f"node {id_} added" for id_ in now if id_ not in was]
    found += [change for id_ in was if id_ in now for change in _changes(id_, was[id_], now[id_])]
    for option, value in old["options"].items():
        if new["options"].get(option) != value:
            found.append(f"{option} was {value!r}, is {new['options'].get(option)!r}")
    return found or ["the order of its nodes changed"]


def _changes(id_: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    found = [
        f"node {id_}: {option} was {_shown(was.get(option))}, is {_shown(now.get(option))}"
        for option in {**was, **now}
        if option not in {"function", "body"} and was.get(option) != now.get(option)
    ]
    if "body" in was and "body" in now and _without_code(was["body"]) != _without_code(now["body"]):
        found += [f"in {id_}: {change}" for change in _graph_changes(was["body"], now["body"])]
    return found


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)


def code_hashes(graph: Graph) -> dict[str, str]:
    """Give the code hash of every node's function, by node id; of an inner workflow's as `outer/inner`.

    What else decides about a node has one too: `node[when=]`, and a constant it receives: `node[parameter]`.
    """
    return dict(_hashes(graph, "", {}))


def _functions(node: Node) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Give a node's function, and those that decide about it, with what stands behind the id for them."""
    until = node.what.until if isinstance(node.what, Loop) else None
    more = {"when": node.when, "until": until, "reconcile": node.reconcile, "compensate": node.compensate}
    if node.fn is not None:
        yield "", node.fn
    for name, fn in more.items():
        if fn is not None:
            yield f"[{name}=]", fn


def _value_hash(value: Any) -> str:
    try:
        return codec.digest(codec.canonical(value)).hex()
    except OutputNotSerializable:  # it is passed on as it is
        return UNKNOWN


def _hashes(graph: Graph, prefix: str, known: dict[int, str]) -> Iterator[tuple[str, str]]:
    for node, bindings in zip(graph.nodes, graph.bindings, strict=True):
        for part, fn in _functions(node):
            found = known.get(id(fn))
            if found is None:
                found = known[id(fn)] = code_hash(fn)
            yield prefix + node.id + part, found
        for binding in bindings:
            if binding.source.kind == "constant":
                yield f"{prefix}{node.id}[{binding.parameter}]", _value_hash(binding.source.value)
        if node.workflow is not None:
            yield from _hashes(graph.inner[id(node.workflow)], f"{prefix}{node.id}/", known)
