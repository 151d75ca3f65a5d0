"""Declaring workflows: what is refused, and that messages help."""

from __future__ import annotations

import functools
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import networkx as nx
import pytest

from dagresume import (
    BindingError,
    Context,
    CycleError,
    DefinitionError,
    DuplicateNode,
    Retry,
    UnknownDependency,
    Value,
    Workflow,
)


async def noop() -> None: ...


def wired(**parents: str) -> Workflow:
    """A workflow of these nodes, each after the one named."""
    wf = Workflow("wired")
    for name, parent in parents.items():
        wf.node(id=name, depends_on=parent.split())(noop)
    return wf


def test_the_decorator_gives_the_function_back() -> None:
    wf = Workflow("w")

    async def a() -> int:
        return 1

    assert wf.node(a) is a
    assert wf.node(id="b")(a) is a


# -- the graph ------------------------------------------------------------------------------------------


def test_a_cycle_is_shown_with_its_path() -> None:
    """B169."""
    with pytest.raises(CycleError, match=r"a → b → c → a|b → c → a → b|c → a → b → c") as caught:
        _ = wired(a="c", b="a", c="b", d="a").graph
    cycle = caught.value.cycle
    assert cycle[0] == cycle[-1]
    assert set(cycle) == {"a", "b", "c"}
    edges = {("c", "a"), ("a", "b"), ("b", "c")}
    assert set(itertools.pairwise(cycle)) == edges


def test_a_node_above_itself_is_refused() -> None:
    """B169."""
    with pytest.raises(CycleError, match="a → a"):
        _ = wired(a="a").graph


def test_the_shortest_way_to_a_cycle_far_away() -> None:
    wf = Workflow("w")
    for k in range(3000):
        wf.node(id=f"n{k}", depends_on=[f"n{k - 1}"] if k else ["n2999"])(noop)
    with pytest.raises(CycleError) as caught:
        _ = wf.graph
    assert len(caught.value.cycle) == 3001


def test_an_unknown_dependency_names_node_name_and_nearest() -> None:
    """B169: never a node made by a typo."""
    with pytest.raises(UnknownDependency, match=r"'score'.*'resume'.*'resumes'") as caught:
        _ = wired(resumes="", score="resume").graph
    assert (caught.value.node, caught.value.name, caught.value.suggestion) == ("score", "resume", "resumes")


def test_edges_named_twice_are_one() -> None:
    """B169."""
    wf = Workflow("w")
    wf.node(id="a")(noop)

    @wf.node(depends_on=["a", "a"], args={"x": "a", "y": "a"})
    async def b(a: None, x: None, y: None) -> None: ...

    assert list(wf.graph.edges) == [("a", "b")]
    assert wf.compiled.parents[1] == (0,)


def test_nodes_may_be_declared_in_any_order() -> None:
    wf = Workflow("w")

    @wf.node
    async def b(a: int) -> int:
        return a

    @wf.node
    async def a() -> int:
        return 1

    assert list(wf.graph.edges) == [("a", "b")]
    assert wf.compiled.ids == ("a", "b")


def test_a_long_chain_is_checked_without_recursion() -> None:
    """B67."""
    wf = Workflow("w")
    for k in range(5_000):
        wf.node(id=f"n{k}", depends_on=[f"n{k - 1}"] if k else [])(noop)
    assert len(wf.graph) == 5_000


def test_the_graph_is_a_frozen_digraph_with_the_functions() -> None:
    wf = wired(a="", b="a")
    assert nx.is_frozen(wf.graph)
    assert wf.graph.nodes["a"]["run"] is noop
    with pytest.raises(nx.NetworkXError):
        wf.graph.add_node("c")


def test_a_name_twice_is_refused() -> None:
    """Outside of an interactive `__main__`."""
    wf = wired(a="")
    with pytest.raises(DuplicateNode, match="'a'"):
        wf.node(id="a")(noop)


@pytest.mark.parametrize("name", ["", "a/b", "a[0]", "a]", "a\x00b", "a\nb", "\ud800", "x" * 201])
def test_ids_that_are_refused(name: str) -> None:
    """B74: with the rule."""
    with pytest.raises(DefinitionError, match=r"not allowed|1 to 200"):
        Workflow("w").node(id=name)(noop)
    with pytest.raises(DefinitionError):
        Workflow(name)


@pytest.mark.parametrize("name", ["a:b", "a.b", "a#0", "a%2Fb", " a", "节点", "x" * 200, "CON", "."])
def test_ids_that_are_fine(name: str) -> None:
    wf = Workflow("w")
    wf.node(id=name)(noop)
    assert list(wf.graph) == [name]


def test_ids_are_normalised() -> None:
    """B79: é composed and decomposed are one id."""
    wf = Workflow("w")
    wf.node(id="e\u0301")(noop)
    assert list(wf.nodes) == ["\u00e9"]
    with pytest.raises(DuplicateNode):
        wf.node(id="\u00e9")(noop)
    wf.node(id="b", depends_on=["e\u0301"])(noop)
    assert list(wf.graph.edges) == [("\u00e9", "b")]


def test_case_matters() -> None:
    wf = wired(Node="", node="", NODE="")
    assert len(wf.graph) == 3


# -- functions ------------------------------------------------------------------------------------------


def test_generators_are_no_nodes() -> None:
    wf = Workflow("w")
    with pytest.raises(DefinitionError, match=r"'a'.*generator"):

        @wf.node
        async def a() -> AsyncIterator[int]:
            yield 1

    with pytest.raises(DefinitionError, match=r"'b'.*generator"):

        @wf.node
        def b() -> Iterator[int]:
            yield 1


def test_star_args_are_refused() -> None:
    wf = Workflow("w")
    with pytest.raises(DefinitionError, match=r"'a'.*args"):

        @wf.node
        async def a(*args: int) -> None: ...

    with pytest.raises(DefinitionError, match=r"'b'.*'x'.*positional"):

        @wf.node
        async def b(x: int, /) -> None: ...


@pytest.mark.parametrize("thing", [3, None, "name", [noop]])
def test_what_is_no_function_is_no_node(thing: Any) -> None:
    with pytest.raises(DefinitionError):
        Workflow("w").node(id="a")(thing)


def test_builtins_without_a_signature_are_refused() -> None:
    with pytest.raises(DefinitionError, match="signature"):
        Workflow("w").node(id="a")(type)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"args": {"y": "b"}}, "'y'.*args"),
        ({"for_each": {"y": "b"}}, "'y'.*for_each"),
        ({"for_each": {}}, "for_each"),
        ({"args": {"x": "b"}, "for_each": {"x": "b"}}, "'x'"),
        ({"concurrency": 3}, "concurrency"),
        ({"tolerate": 1}, "tolerate"),
        ({"for_each": {"x": "b"}, "concurrency": 0}, "concurrency"),
        ({"for_each": {"x": "b"}, "concurrency": 1.5}, "concurrency"),
        ({"for_each": {"x": "b"}, "concurrency": True}, "concurrency"),
        ({"for_each": {"x": "b"}, "tolerate": -1}, "tolerate"),
        ({"for_each": {"x": "b"}, "tolerate": 1.5}, "tolerate"),
        ({"for_each": {"x": "b"}, "tolerate": 0.0}, "tolerate"),
        ({"for_each": {"x": "b"}, "tolerate": True}, "tolerate"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": True}, "timeout"),
        ({"trigger": "none_faild"}, "none_faild.*none_failed"),
        ({"executor": "threads"}, "threads.*thread"),
        ({"executor": "thread"}, "async"),
        ({"reconcile": 3}, "reconcile"),
        ({"timeuot": 3}, "timeuot"),
        ({"depends_on": [3]}, "3"),
        ({"args": {"x": 3}}, "3"),
    ],
)
def test_wrong_options_name_the_node_and_themselves(options: dict[str, Any], says: str) -> None:
    wf = Workflow("w")
    wf.node(id="b")(noop)

    async def a(x: int) -> None: ...

    with pytest.raises(DefinitionError, match=says) as caught:
        wf.node(**options)(a)
    if not {"timeuot", "depends_on"} & set(options) and options.get("args") != {"x": 3}:
        assert "'a'" in str(caught.value)


def test_reconcile_takes_what_its_node_has() -> None:
    """`ctx` and any subset of the node's parameters: said at once, not when it is needed."""

    async def reconcile(ctx: Context, ordr: int) -> None: ...

    wf = Workflow("w")

    async def pay(order: int) -> None: ...

    with pytest.raises(DefinitionError, match=r"'pay'.*'ordr'"):
        wf.node(reconcile=reconcile)(pay)


def test_a_plain_function_is_not_run_on_the_loop() -> None:
    with pytest.raises(DefinitionError, match="event loop"):

        @Workflow("w").node(executor="loop")
        def a() -> None: ...


# -- inputs ---------------------------------------------------------------------------------------------


def test_what_nothing_else_feeds_is_an_input() -> None:
    wf = Workflow("w")

    @wf.node
    async def a(folder: str, limit: int = 3) -> None: ...

    @wf.node(for_each={"x": "many"})
    async def b(x: int, a: None, ctx: Context) -> None: ...

    assert list(wf.inputs) == ["folder", "limit", "many"]
    assert wf.inputs["folder"] is str


def test_declared_inputs_are_all_there_are() -> None:
    wf = Workflow("w", inputs={"folder": str})

    @wf.node
    async def a(foldr: str) -> None: ...

    with pytest.raises(UnknownDependency, match=r"'a'.*'foldr'.*'folder'"):
        _ = wf.graph
    fine = Workflow("w", inputs={"folder": str, "unused": int})

    @fine.node
    async def b(folder: str, own: int = 3) -> None: ...

    assert fine.inputs == {"folder": str, "unused": int}


def test_a_declared_input_is_no_node() -> None:
    wf = Workflow("w", inputs={"a": int})
    wf.node(id="a")(noop)
    with pytest.raises(DefinitionError, match="'a'"):
        _ = wf.graph


def test_an_output_that_does_not_exist() -> None:
    wf = Workflow("w", output="repor")
    wf.node(id="report")(noop)
    with pytest.raises(DefinitionError, match=r"repor.*report"):
        _ = wf.graph


def test_a_parameter_named_like_its_own_node_is_an_input() -> None:
    wf = Workflow("w")

    @wf.node
    async def folder(folder: str) -> str:
        return folder

    assert list(wf.inputs) == ["folder"]
    assert not wf.graph.edges


# -- from_graph -----------------------------------------------------------------------------------------


def graph_of(*edges: tuple[str, str, str | None], **nodes: Callable[..., Any]) -> nx.DiGraph[str]:
    graph: nx.DiGraph[str] = nx.DiGraph()
    for name, fn in nodes.items():
        graph.add_node(name, run=fn)
    for parent, child, arg in edges:
        graph.add_edge(parent, child, **({"arg": arg} if arg else {}))
    return graph


def test_a_graph_without_functions_is_refused_by_name() -> None:
    with pytest.raises(DefinitionError, match=r"'b'.*run="):
        Workflow.from_graph("w", graph_of(("a", "b", None), a=noop))


def test_an_unknown_attribute_of_a_graph_is_refused() -> None:
    graph = graph_of(a=noop)
    graph.nodes["a"]["retries"] = 3
    with pytest.raises(DefinitionError, match="retries"):
        Workflow.from_graph("w", graph)


def test_an_edge_that_binds_no_parameter_is_refused() -> None:
    with pytest.raises(BindingError, match=r"'b'.*'x'"):
        Workflow.from_graph("w", graph_of(("a", "b", "x"), a=noop, b=noop))


def test_a_cyclic_graph_is_refused() -> None:
    with pytest.raises(CycleError):
        _ = Workflow.from_graph("w", graph_of(("a", "b", None), ("b", "a", None), a=noop, b=noop)).graph


def test_a_graph_may_be_changed_afterwards() -> None:
    graph = graph_of(("a", "b", None), a=noop, b=noop)
    wf = Workflow.from_graph("w", graph, version="3", idempotent=True, retry=Retry(2))
    graph.add_edge("b", "a")
    assert list(wf.graph.edges) == [("a", "b")]
    assert (wf.version, wf.idempotent, wf.retry) == ("3", True, Retry(2))


def test_partials_and_values_in_args() -> None:
    async def power(base: int, exponent: int) -> int:
        return int(base**exponent)

    wf = Workflow("w")
    wf.node(functools.partial(power, exponent=2))
    assert list(wf.nodes) == ["power"]
    assert list(wf.inputs) == ["base", "exponent"]  # what a partial binds by name is a default
    wf.node(id="other", args={"base": Value(3), "exponent": Value(2)})(power)
    bindings = {b.parameter: b.source.kind for b in wf.compiled.bindings[wf.compiled.index["other"]]}
    assert bindings == {"base": "constant", "exponent": "constant"}
