"""A stored definition as JSON text, in which nodes that differ in nothing but their id say so.

A layer that is joined to the whole layer above it has as many edges as the product of both: written out, a
graph of 3,000 nodes takes 8 MB, which each new version of it would write and each resume would read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["folded", "unfolded"]

_write: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode


def folded(told: Mapping[str, Any]) -> str:
    """Give a told graph as JSON text. `like`: the id of a node before it that is the same but for its id."""
    return _write(_folded(told))


def _folded(told: Mapping[str, Any]) -> dict[str, Any]:
    first: dict[str, str] = {}
    nodes = []
    for node in told["nodes"]:
        if "body" in node:
            nodes.append(node | {"body": _folded(node["body"])})
            continue
        rest = _write(node | {"id": ""})
        same = first.setdefault(rest, node["id"])
        nodes.append(node if same == node["id"] else {"id": node["id"], "like": same})
    return {**told, "nodes": nodes}


def unfolded(text: str) -> dict[str, Any]:
    """Give the told graph, with everything written out at each node; ValueError, KeyError or TypeError if it
    is none.
    """
    told: dict[str, Any] = json.loads(text)
    bodies = [told]
    while bodies:
        body = bodies.pop()
        by_id = {node["id"]: node for node in body["nodes"]}
        body["nodes"] = [
            by_id[node["like"]] | {"id": node["id"]} if "like" in node else node for node in body["nodes"]
        ]
        bodies += [node["body"] for node in body["nodes"] if "body" in node]
    return told
