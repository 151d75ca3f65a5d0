"""Annotations under `from __future__ import annotations`: closures, local classes, wrappers, objects."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import dagresume
from dagresume import Context, Workflow

if TYPE_CHECKING:
    from decimal import Decimal as OnlyForCheckers


@dataclasses.dataclass
class Module:
    x: int


def hints(wf: Workflow, node: str) -> dict[str, Any]:
    signature = wf.nodes[node].signature
    return {name: annotation for name, annotation, *_ in signature.parameters} | {"return": signature.returns}


def kinds(wf: Workflow, node: str) -> dict[str, str]:
    graph = wf.compiled
    return {binding.parameter: binding.source.kind for binding in graph.bindings[graph.index[node]]}


def test_names_of_the_module() -> None:
    wf = Workflow("w")

    @wf.node
    async def a(given: list[Module]) -> dict[str, Module | None]:
        return {"x": given[0]}

    assert hints(wf, "a") == {"given": list[Module], "return": dict[str, Module | None]}


def test_local_classes() -> None:
    @dataclasses.dataclass
    class Local:
        x: int

    wf = Workflow("w")

    @wf.node
    async def a() -> list[Local]:
        return [Local(1)]

    @wf.node
    async def b(a: list[Local]) -> Local:
        return a[0]

    assert hints(wf, "a")["return"] == list[Local]
    assert hints(wf, "b") == {"a": list[Local], "return": Local}


def test_local_classes_of_a_factory() -> None:
    """The function is declared elsewhere than its class."""

    def make() -> tuple[Callable[..., Any], type]:
        class Inner: ...

        async def a(x: Inner) -> Inner:
            return Inner() if x is None else x

        return a, Inner

    fn, inner = make()
    wf = Workflow("w")
    wf.node(fn)
    assert hints(wf, "a") == {"x": inner, "return": inner}


def test_contexts_under_any_name() -> None:
    wf = Workflow("w")

    @wf.node
    async def a(c: Context) -> None: ...

    @wf.node
    async def b(*, where: dagresume.Context) -> None: ...

    assert kinds(wf, "a") == {"c": "context"}
    assert kinds(wf, "b") == {"where": "context"}


def test_a_context_imported_for_checkers_only() -> None:
    namespace: dict[str, Any] = {}
    source = "async def a(ctx: Context, other: OnlyForCheckers) -> OnlyForCheckers: ..."
    exec(compile("from __future__ import annotations\n" + source, "<test>", "exec"), namespace)
    wf = Workflow("w")
    wf.node(namespace["a"])
    assert kinds(wf, "a") == {"ctx": "context", "other": "input"}
    assert hints(wf, "a")["other"] is Any


def test_a_class_that_is_not_there_at_run_time_means_anything() -> None:
    wf = Workflow("w")

    @wf.node
    async def a(x: OnlyForCheckers) -> list[OnlyForCheckers]:
        return [x]

    assert hints(wf, "a") == {"x": Any, "return": Any}


def test_wrappers_objects_methods_and_partials() -> None:
    def logged(fn: Any) -> Any:
        @functools.wraps(fn)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            return await fn(*args, **kwargs)

        return wrapper

    class Thing:
        async def __call__(self, x: Module) -> Module:
            return x

        def method(self, y: Module) -> list[Module]:
            return [y]

    wf = Workflow("w")

    @wf.node
    @logged
    async def wrapped(x: Module, ctx: Context) -> Module:
        return x

    wf.node(id="called")(Thing())
    wf.node(id="bound")(Thing().method)
    wf.node(id="partial")(functools.partial(Thing().method))
    wf.node(id="nested")(functools.partial(functools.partial(wrapped)))
    assert hints(wf, "wrapped") == {"x": Module, "ctx": Context, "return": Module}
    assert hints(wf, "called") == {"x": Module, "return": Module}
    assert hints(wf, "bound") == hints(wf, "partial") == {"y": Module, "return": list[Module]}
    assert hints(wf, "nested") == hints(wf, "wrapped")
    asynchronous = {name: node.signature.asynchronous for name, node in wf.nodes.items()}
    assert asynchronous == {"wrapped": True, "called": True, "bound": False, "partial": False, "nested": True}


def test_functions_made_in_a_loop_capture_what_they_did() -> None:
    wf = Workflow("w")
    for k in range(3):

        async def body(k: int = k) -> int:
            return k

        wf.node(id=f"n{k}")(body)
    assert len(wf.graph) == 3


def test_the_input_of_two_nodes_has_both_their_types() -> None:
    wf = Workflow("w")

    @wf.node
    async def a(x: Module) -> None: ...

    @wf.node
    async def b(x: list[Module]) -> None: ...

    assert wf.compiled.inputs["x"] == [Module, list[Module]]
