"""A stored definition as JSON text, in which nodes that have the same many parents say so once.

A layer that is joined to the whole layer above it has as many edges as the product of both: written out, a
graph of 3,000 nodes takes 8 MB, which each new version of it would write and each resume would read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["folded", "unfolded"]

_MANY: Final = 4
"""Parents from which on a node is told by another that has the same."""
_SHARED: Final = ("parents", "parameters")


def folded(told: Mapping[str, Any]) -> str:
    """Give a told graph as JSON text. `like`: the id of a node before it with the same parents and
    parameters.
    """
    return json.dumps(_folded(told), ensure_ascii=False, separators=(",", ":"), check_circular=False)


def _folded(told: Mapping[str, Any]) -> dict[str, Any]:
    first: dict[Any, str] = {}
    nodes = []
    for node in told["nodes"]:
        if "body" in node:
            node = node | {"body": _folded(node["body"])}
        if len(node["parents"]) >= _MANY:
            same = first.setdefault((*node["parents"], *node.get("parameters", {}).items()), node["id"])
            if same != node["id"]:
                node = {name: value for name, value in node.items() if name not in _SHARED} | {"like": same}
        nodes.append(node)
    return {**told, "nodes": nodes}


def unfolded(text: str) -> dict[str, Any]:
    """Give the told graph, with everything written out at each node; ValueError, KeyError or TypeError if it
    is none.
    """
    told: dict[str, Any] = json.loads(text)
    bodies = [told]
    while bodies:
        nodes = bodies.pop()["nodes"]
        by_id = {node["id"]: node for node in nodes}
        for node in nodes:
            if "like" in node:
                same = by_id[node.pop("like")]
                node |= {name: same[name] for name in _SHARED if name in same}
            if "body" in node:
                bodies.append(node["body"])
    return told
