"""A stored definition says what many nodes share once, and reads as if it stood at each of them."""

from __future__ import annotations

import json

import networkx as nx
import pytest

from dagresume import Workflow
from dagresume.definition import describe, identity
from dagresume.graphs import folded, unfolded


async def leaf() -> int:
    return 1


async def join(a: int, b: int, c: int, d: int) -> int:
    return a + b + c + d


def joined(width: int) -> Workflow:
    graph: nx.DiGraph[str] = nx.DiGraph()
    for name in "abcd":
        graph.add_node(name, run=leaf)
    for number in range(width):
        graph.add_node(f"j{number}", run=join)
        for name in "abcd":
            graph.add_edge(name, f"j{number}", arg=name)
    return Workflow.from_graph("joined", graph)


def test_what_many_nodes_share_is_stored_once_and_read_at_each() -> None:
    definition = describe(joined(3).compiled)
    stored = {node["id"]: node for node in json.loads(definition.graph)["nodes"]}
    assert stored["j1"] == {"id": "j1", "like": "j0"}
    assert stored["j2"] == {"id": "j2", "like": "j0"}
    assert stored["j0"]["parents"] == ["a", "b", "c", "d"]
    read = {node["id"]: node for node in unfolded(definition.graph)["nodes"]}
    assert read["j2"]["parents"] == ["a", "b", "c", "d"]
    assert read["j2"]["parameters"] == {name: f"node {name}" for name in "abcd"}
    assert "like" not in read["j2"]
    assert identity(definition.graph) == definition.hash


def test_the_size_of_a_definition_grows_with_its_nodes_and_not_with_its_edges() -> None:
    graph: nx.DiGraph[str] = nx.DiGraph()
    for layer in range(3):
        for number in range(50):
            graph.add_node(f"l{layer}.{number}", run=leaf)
            for parent in range(50) if layer else ():
                graph.add_edge(f"l{layer - 1}.{parent}", f"l{layer}.{number}")
    text = describe(Workflow.from_graph("layers", graph).compiled).graph
    assert len(text) < 60 * graph.number_of_nodes() < 10 * graph.number_of_edges()


def test_a_definition_that_was_written_out_has_the_same_hash() -> None:
    definition = describe(joined(3).compiled)
    assert identity(json.dumps(unfolded(definition.graph))) == definition.hash


def test_other_parameters_or_parents_are_not_alike() -> None:
    four = ["a", "b", "c", "d"]
    nodes = [
        {"id": "one", "parents": four, "parameters": {"x": "node a"}},
        {"id": "two", "parents": four, "parameters": {"y": "node a"}},
        {"id": "three", "parents": four},
        {"id": "four", "parents": [*four, "e"], "parameters": {"x": "node a"}},
        {"id": "five", "parents": four},
        {"id": "six", "parents": four, "timeout": 1.0},
        {"id": "inside", "parents": [], "body": {"nodes": [{"id": "one", "parents": four}]}},
        {"id": "inside too", "parents": [], "body": {"nodes": [{"id": "one", "parents": four}]}},
    ]
    text = folded({"nodes": nodes})
    assert [node.get("like") for node in json.loads(text)["nodes"]] == [None] * 4 + ["three"] + [None] * 3
    assert unfolded(text) == {"nodes": nodes}


@pytest.mark.parametrize("text", ["[]", "{}", '{"nodes": [{"id": "a", "like": "b"}]}', '{"nodes": [1]}', "x"])
def test_what_is_no_definition_is_refused(text: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        unfolded(text)
