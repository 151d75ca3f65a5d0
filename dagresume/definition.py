"""The definition as it is stored: what it is told apart by, and in which words it differs from another."""

from __future__ import annotations

import functools
import hashlib
import json
from typing import TYPE_CHECKING, Any

from dagresume.codehash import code_hash
from dagresume.policy import Retry
from dagresume.store import Definition

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dagresume.workflow import Graph, Source

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
    nodes = [_described(graph, i) for i in range(len(graph))]
    options = {
        "idempotent": graph.idempotent,
        "output": None if graph.output is None else graph.ids[graph.output],
    }
    told = {"workflow": graph.workflow, "version": graph.version, "options": options, "nodes": nodes}
    text = json.dumps(told, ensure_ascii=False, separators=(",", ":"), check_circular=False)
    kinds = tuple((node["id"], node["type"]) for node in nodes)
    return Definition(graph.workflow, graph.version, _identity(told), text, kinds)


def identity(text: str) -> bytes:
    """Give the definition hash of a stored definition (16 bytes): all of it but where the functions come
    from.
    """
    return _identity(json.loads(text))


def _identity(told: Mapping[str, Any]) -> bytes:
    nodes = [
        {option: value for option, value in node.items() if option != "function"} for node in told["nodes"]
    ]
    return hashlib.sha256(json.dumps({**told, "nodes": nodes}, sort_keys=True).encode()).digest()[:16]


_OPTIONS = ("concurrency", "tolerate", "timeout", "limit", "executor")
_RETRY = ("attempts", "delay", "backoff", "max_delay", "jitter", "give_up_after")


def _described(graph: Graph, i: int) -> dict[str, Any]:
    """Give a node as it is stored: what is as usual is left out."""
    node, retry = graph.nodes[i], graph.nodes[i].retry or graph.retry
    feeds = [(b.parameter, b.source) for b in graph.bindings[i] if b.source.kind != "context"]
    told = {
        "id": node.id,
        "type": "map" if node.for_each else "node",
        "function": describe_callable(node.fn),
        "parents": [graph.ids[p] for p in graph.parents[i]],
        "parameters": {name: _source_told(graph, source) for name, source in feeds} or None,
        "for_each": dict(node.for_each) if node.for_each else None,
        "idempotent": graph.idempotent if node.idempotent is None else node.idempotent,
        "retry": None if retry == Retry() else _retry_told(retry),
        **{option: getattr(node, option) for option in _OPTIONS},
        "trigger": None if node.trigger == "none_failed" else node.trigger,
        "checkpoint": None if node.checkpoint else False,
        "reconcile": None if node.reconcile is None else True,
    }
    return {name: value for name, value in told.items() if value is not None}


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
    old, new = json.loads(before), json.loads(after)
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
    return [
        f"node {id_}: {option} was {_shown(was.get(option))}, is {_shown(now.get(option))}"
        for option in {**was, **now}
        if option != "function" and was.get(option) != now.get(option)
    ]


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)


def code_hashes(graph: Graph) -> dict[str, str]:
    """Give the code hash of every node's function, by node id."""
    functions = {id(node.fn): node.fn for node in graph.nodes}
    hashes = {key: code_hash(fn) for key, fn in functions.items()}
    return {node.id: hashes[id(node.fn)] for node in graph.nodes}
