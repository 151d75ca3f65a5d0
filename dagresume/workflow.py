"""Workflows as people declare them: a named, versioned DAG of functions, checked before anything runs."""

from __future__ import annotations

import inspect
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

import networkx as nx

from dagresume.context import Context
from dagresume.errors import (
    BindingError,
    CycleError,
    DefinitionError,
    DuplicateNode,
    InputError,
    MissingInput,
    UnknownDependency,
)
from dagresume.policy import TRIGGERS, Budget, Recovery, Retry, Trigger, Value

__all__ = ["Binding", "Graph", "Node", "Source", "Workflow", "is_async", "nearest"]

F = TypeVar("F", bound=Callable[..., Any])
B = TypeVar("B", bound="Callable[..., Any] | Workflow")
P = ParamSpec("P")
R = TypeVar("R", covariant=True)
S = TypeVar("S")
Executor = Literal["loop", "thread", "process", "dask", "ray"]

Ref = str | Callable[..., Any] | Value


@dataclass(frozen=True, slots=True)
class Signature:
    """What a node's function takes and gives, with its annotations resolved."""

    parameters: tuple[tuple[str, Any, bool, bool], ...]  # name, annotation, has a default, keyword only
    returns: Any
    accepts_any: bool
    asynchronous: bool


@dataclass(frozen=True, slots=True)
class Approval:
    """A node that waits for a person's word."""

    prompt: str


@dataclass(frozen=True, slots=True)
class Sleep:
    """A node that ends after so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class WaitFor:
    """A node that waits for a signal of this name."""

    event: str


@dataclass(frozen=True, slots=True)
class Inner:
    """A node that is a workflow itself."""

    workflow: Workflow


@dataclass(frozen=True, slots=True)
class Loop:
    """A node whose body, a function or a workflow, runs in rounds: each receives what the one before gave.

    `state` is the parameter (of a workflow: the input) that receives it.
    """

    initial: str | Value
    until: Callable[[Any], Any]
    max_iterations: int
    state: str
    workflow: Workflow | None = None


What = Approval | Sleep | WaitFor | Inner | Loop | None
WAITS: Final = (Approval, Sleep, WaitFor)
_TYPES: Final = {
    Approval: "approval",
    Sleep: "sleep",
    WaitFor: "wait_for",
    Inner: "subworkflow",
    Loop: "loop",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One vertex as it was declared. Ids and names of parents are not resolved yet.

    `what` says what it is if it is more, or less, than a function; `fn` is None if it has none.
    """

    id: str
    fn: Callable[..., Any] | None
    signature: Signature
    what: What = None
    depends_on: tuple[str, ...] = ()
    args: Mapping[str, str | Value] = field(default_factory=dict)
    for_each: Mapping[str, str] = field(default_factory=dict)
    concurrency: int | None = None
    tolerate: float | None = None
    idempotent: bool | None = None
    checkpoint: bool = True
    retry: Retry | None = None
    timeout: float | None = None
    limit: str | None = None
    when: Callable[..., Any] | None = None
    trigger: Trigger = "none_failed"
    compensate: Callable[..., Any] | None = None
    reconcile: Callable[..., Any] | None = None
    version: str = ""
    executor: Executor | None = None

    @property
    def type(self) -> str:
        """What it is, in the words of the stored definition."""
        kind = "node" if self.what is None else _TYPES[type(self.what)]
        return "map" if self.for_each and kind == "node" else kind

    @property
    def workflow(self) -> Workflow | None:
        """The workflow inside it, if there is one."""
        return self.what.workflow if isinstance(self.what, Inner | Loop) else None


class Mapped(Protocol[P, R]):
    """A function that a map calls for each item: the function itself, which a type checker knows to give a
    list of what it returns (`result[fn]`).
    """

    __name__: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    if TYPE_CHECKING:

        def _is_called_for_each_item(self) -> None: ...


class _ToMap(Protocol):
    def __call__(self, fn: Callable[P, S], /) -> Mapped[P, S]: ...


class OneNodeOptions(TypedDict, total=False):
    """The options of `@wf.node` but `for_each`."""

    id: str | None
    depends_on: Iterable[Ref] | Ref
    args: Mapping[str, Ref] | None
    concurrency: int | None
    tolerate: float | None
    idempotent: bool | None
    checkpoint: bool
    retry: Retry | None
    timeout: float | None
    limit: str | None
    when: Callable[..., Any] | None
    trigger: Trigger
    compensate: Callable[..., Any] | None
    reconcile: Callable[..., Any] | None
    version: str
    executor: Executor | None


class NodeOptions(OneNodeOptions, total=False):
    """The options of `@wf.node`; `Workflow.node` says how its parameters are fed."""

    for_each: Mapping[str, Ref] | None


class InnerOptions(TypedDict, total=False):
    """The options of `wf.subworkflow` beside its own."""

    depends_on: Iterable[Ref] | Ref
    concurrency: int | None
    tolerate: float | None
    idempotent: bool | None
    when: Callable[..., Any] | None
    trigger: Trigger
    version: str


@dataclass(frozen=True, slots=True)
class Migration:
    """How runs of an older version are taken over: what nodes are called now, which are gone, how outputs
    change.
    """

    rename: Mapping[str, str]
    drop: frozenset[str]
    transform: Mapping[str, Callable[[Any], Any]]


class Workflow:
    """A named, versioned DAG of nodes.

    `idempotent` and `retry` are the defaults of its nodes; `inputs` (name → type) declares the run inputs,
    else they are what the nodes' parameters ask for; `output` names the node whose output is the workflow's.
    `on_failure="rollback"`: a run that fails undoes at once what its nodes have a `compensate=` for. Nodes
    are added with `@wf.node`; they may be declared in any order.

    `secrets`: names of run inputs, and of keys and fields anywhere inside them (upper or lower case is the
    same), whose values are shown nowhere: in the log and the log lines of nodes, in failures and events, and
    by the command line they are `***`. Where such a name is a key, its value is hidden whatever it is; texts
    are searched for the values, also as they stand in URLs and JSON, but not for those of less than 4
    characters (numbers: 6). Those of workflows inside this one count too. What is stored of inputs and
    outputs is plain, so that a run can be resumed: the database is as secret as they are. The exception
    object that reaches the caller is left as it is. Adding a name makes no run refuse; it holds from the next
    resume on.
    """

    def __init__(
        self,
        name: str,
        *,
        version: str = "1",
        inputs: Mapping[str, Any] | None = None,
        output: Ref | None = None,
        idempotent: bool | None = None,
        recovery: Recovery | None = None,
        retry: Retry | None = None,
        timeout: float | None = None,
        budget: Budget | None = None,
        on_failure: Literal["rollback"] | None = None,
        secrets: Iterable[str] = (),
    ) -> None:
        self.name = _checked_id(name, "workflow name")
        self.version = str(version)
        self.idempotent, self.retry, self.timeout, self.budget = idempotent, retry, timeout, budget
        self.recovery = recovery or Recovery()
        if isinstance(secrets, str):
            raise DefinitionError(f"workflow {name!r}: secrets={secrets!r}: give the names in a tuple.")
        self.on_failure, self.secrets = on_failure, frozenset(map(str, secrets))
        self._declared = None if inputs is None else dict(inputs)
        self._output = output
        self._nodes: dict[str, Node] = {}
        self._inside: list[Workflow] = []
        self._graph: Graph | None = None
        self._checked: Graph | None = None
        self.migrations: dict[str, Migration] = {}
        if (problem := _workflow_problem(self)) is not None:
            raise DefinitionError(f"workflow {name!r}: {problem}")

    def __repr__(self) -> str:
        return f"Workflow({self.name!r}, version={self.version!r}, nodes={len(self._nodes)})"

    # -- declaring ------------------------------------------------------------------------------------

    @overload
    def node(self, fn: F, /) -> F: ...

    @overload
    def node(self, /, *, for_each: Mapping[str, Ref], **options: Unpack[OneNodeOptions]) -> _ToMap: ...

    @overload
    def node(self, /, *, for_each: None = None, **options: Unpack[OneNodeOptions]) -> Callable[[F], F]: ...

    def node(self, fn: F | None = None, /, **options: Unpack[NodeOptions]) -> Any:
        """Add a function as a node; the function itself comes back, so it can be called in unit tests.

        Each parameter is fed in this order: annotated `Context` → the context; named in `args` → that parent,
        run input or `Value`; named in `for_each` → one item of that parent or run input; the id of another
        node → its output; else a run input (a default makes it optional).

        `compensate`: a function over (output, ctx) that undoes what the node did, for `Engine.rollback`.

        Raises DefinitionError (DuplicateNode, BindingError) for what cannot work whatever else is declared.
        """
        scope = _caller_locals()
        if fn is not None:
            self._add(fn, scope, options)
            return fn

        def decorate(function: F) -> F:
            self._add(function, scope, options)
            return function

        return decorate

    def _add(self, fn: Callable[..., Any], scope: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._put(declare(fn, scope, **options))

    def _put(self, node: Node) -> None:
        if node.id in self._nodes and not (node.fn is not None and _replaces(node.fn)):
            raise DuplicateNode(self.name, node.id)
        self._nodes[node.id] = node
        self._graph = None

    def approval(
        self,
        id: str,
        *,
        depends_on: Iterable[Ref] | Ref = (),
        prompt: str = "",
        timeout: float | None = None,
        trigger: Trigger = "none_failed",
    ) -> None:
        """Add a node that waits for a person's word (`Engine.decide`).

        Its output is `{"approved": True, "by": …, "comment": …, "at": ISO time}`; a rejection fails it with
        the reason `rejected`, and so does the end of `timeout` (seconds) with the reason `timeout`.
        """
        self._put(_waiting(id, Approval(str(prompt)), depends_on, timeout, trigger))

    def sleep(
        self,
        id: str,
        seconds: float,
        *,
        depends_on: Iterable[Ref] | Ref = (),
        trigger: Trigger = "none_failed",
    ) -> None:
        """Add a node that completes, with None, `seconds` after what it depends on; no process need live
        meanwhile.
        """
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 1e9:
            raise DefinitionError(f"node {id!r}: sleep for {seconds!r}? Give seconds, 0 or more.")
        self._put(_waiting(id, Sleep(float(seconds)), depends_on, None, trigger))

    def wait_for(
        self,
        id: str,
        event: str,
        *,
        depends_on: Iterable[Ref] | Ref = (),
        timeout: float | None = None,
        trigger: Trigger = "none_failed",
    ) -> None:
        """Add a node that waits for `Engine.signal(run_id, event, payload)`; its output is the payload.

        Each signal is taken by one wait; one that comes early is kept for it. After `timeout` seconds it
        fails.
        """
        if not isinstance(event, str) or not event:
            raise DefinitionError(f"node {id!r}: the event to wait for is {event!r}; give its name.")
        self._put(_waiting(id, WaitFor(event), depends_on, timeout, trigger))

    def subworkflow(
        self,
        id: str,
        other: Workflow,
        *,
        args: Mapping[str, Ref] | None = None,
        for_each: Mapping[str, Ref] | None = None,
        **options: Unpack[InnerOptions],
    ) -> None:
        """Add a workflow as a node of this one; its paths lie below the node's: `screen/score`.

        Each input of `other` is fed like a parameter: named in `args` → that parent, run input or `Value`;
        named in `for_each` → one item of it, one inner graph for each (`screen[3]/score`); else the node or
        the run input of its name. The output is that of `Workflow(output=…)`, else of its only sink, else a
        dict of its sinks. It lives in the outer run: one owner, one key, one budget; its own `timeout`,
        `budget`, `recovery` and `on_failure` do not apply there.
        """
        if not isinstance(other, Workflow):
            raise DefinitionError(f"node {id!r}: a sub-workflow is a Workflow, not {other!r}.")
        self._put(declare(None, {}, id=id, what=Inner(other), args=args, for_each=for_each, **options))

    @overload
    def loop(
        self,
        id: str | None = None,
        body: None = None,
        *,
        initial: Ref,
        until: Callable[[Any], Any],
        max_iterations: int,
        **options: Any,
    ) -> Callable[[F], F]: ...

    @overload
    def loop(
        self,
        id: str | None,
        body: B,
        *,
        initial: Ref,
        until: Callable[[Any], Any],
        max_iterations: int,
        **options: Any,
    ) -> B: ...

    def loop(
        self,
        id: str | None = None,
        body: Callable[..., Any] | Workflow | None = None,
        *,
        initial: Ref,
        until: Callable[[Any], Any],
        max_iterations: int,
        **options: Any,
    ) -> Any:
        """Add a loop: `body` runs in rounds (`refine[0]`, `refine[1]`, …), each with what the last one gave.

        `body` is a function (without it, this is a decorator) or a Workflow with the input `state`. The
        parameter `state`, else its first one, receives `initial` (a parent, a run input or `Value`) and then
        each round's output; the others are fed as a node's. `options` are those of a node, `for_each` too
        (`refine[3]/refine[0]`). `until(state)` is asked after each round; at `max_iterations`
        rounds without a yes the node fails, its rounds are kept. The output is the last state.
        """
        scope = _caller_locals()
        if body is None:

            def decorate(fn: F) -> F:
                self._add_loop(id, fn, scope, initial, until, max_iterations, options)
                return fn

            return decorate
        self._add_loop(id, body, scope, initial, until, max_iterations, options)
        return body

    def _add_loop(
        self,
        id: str | None,
        body: Callable[..., Any] | Workflow,
        scope: Mapping[str, Any],
        initial: Ref,
        until: Callable[[Any], Any],
        max_iterations: int,
        options: Mapping[str, Any],
    ) -> None:
        if not _whole(max_iterations):
            raise DefinitionError(f"loop {id!r}: max_iterations={max_iterations!r}: a whole number from 1.")
        first = initial if isinstance(initial, Value) else _name(initial)
        inner = body if isinstance(body, Workflow) else None
        if inner is not None and id is None:
            raise DefinitionError("a loop over a workflow needs an id: wf.loop('refine', body, …).")
        if options.get("for_each"):
            self._put(_loop_in_map(id, body, scope, first, until, max_iterations, options))
            return
        fn = None if isinstance(body, Workflow) else body
        signature = None if fn is None else _signature(str(id or _name(fn)), fn, scope)
        state = (
            "state" if signature is None else _state_of(str(id or _name(fn)), signature, options.get("args"))
        )
        loop = Loop(first, until, max_iterations, state, inner)
        self._put(declare(fn, scope, **{**options, "id": id, "what": loop, "signature": signature}))

    def migrate(
        self,
        from_version: str,
        *,
        rename: Mapping[str, Ref] | None = None,
        drop: Iterable[Ref] | Ref = (),
        transform: Mapping[Any, Callable[[Any], Any]] | None = None,
    ) -> None:
        """Let runs of an older version go on as runs of this one.

        `rename`: old node id → new one; `drop`: nodes that are gone; `transform`: new node id → function that
        makes the new output of the old, of a map that of each item. What completed stays completed, and what
        is inside a node moves with it; nodes that are new run.
        """
        if str(from_version) == self.version:
            raise DefinitionError(
                f"workflow {self.name!r}: migrate({from_version!r}) leads from a version to itself;"
                " raise version=."
            )
        names = {_name(old): _name(new) for old, new in (rename or {}).items()}
        outputs = {_name(node): change for node, change in (transform or {}).items()}
        found = Migration(names, frozenset(_names(drop)), outputs)
        both = found.drop.intersection(found.rename)
        if both:
            raise DefinitionError(
                f"workflow {self.name!r}: migrate({from_version!r}): node {min(both)!r} is renamed and"
                " dropped; say one of both."
            )
        self.migrations[str(from_version)] = found

    @classmethod
    def from_graph(cls, name: str, graph: nx.DiGraph[Any], **options: Any) -> Workflow:
        """Give the workflow of a networkx DiGraph: node attribute `run=` is its function, the others its
        options.

        An edge attribute `arg="…"` binds the parent to that parameter of the child; an edge without it whose
        parent's id is no parameter orders the two.
        """
        wf = cls(name, **options)
        scope = _caller_locals()
        signatures: dict[Any, Signature] = {}
        for id_, attributes in graph.nodes(data=True):
            rest = dict(attributes)
            fn = rest.pop("run", None)
            if not callable(fn):
                raise DefinitionError(
                    f"node {id_!r} of the graph has no function: graph.add_node({id_!r}, run=…)."
                )
            try:
                signature = signatures.get(fn) or signatures.setdefault(fn, _signature(str(id_), fn, scope))
            except TypeError:  # not hashable
                signature = _signature(str(id_), fn, scope)
            args = dict(rest.pop("args", None) or {})
            after = list(_names(rest.pop("depends_on", ())))
            arg: str | None
            for parent, _, arg in graph.in_edges(id_, data="arg"):
                if arg is None:
                    after.append(str(parent))
                elif arg not in (rest.get("for_each") or {}):
                    args[arg] = str(parent)
            node = declare(fn, scope, id=str(id_), args=args, depends_on=after, signature=signature, **rest)
            if node.id in wf._nodes:
                raise DuplicateNode(name, node.id)
            wf._nodes[node.id] = node
        return wf

    # -- reading --------------------------------------------------------------------------------------

    @property
    def compiled(self) -> Graph:
        """The checked graph of what is declared now; unchanged by what is declared later."""
        graph = self._compile(())
        if graph is not self._checked:
            graph.check_pure()
            self._checked = graph
        return graph

    def _compile(self, above: tuple[str, ...]) -> Graph:
        """Give the graph, also as a part of other workflows: `above` are their names."""
        if self.name in above:
            chain = " → ".join((*above[above.index(self.name) :], self.name))
            raise DefinitionError(f"workflow {self.name!r} contains itself: {chain}.")
        if self._graph is None:
            self._inside = [node.workflow for node in self._nodes.values() if node.workflow is not None]
        elif not self._inside:
            return self._graph
        graphs = {id(wf): wf._compile((*above, self.name)) for wf in self._inside}
        if self._graph is None or any(graphs[key] is not self._graph.inner[key] for key in graphs):
            self._graph = Graph(self, graphs)
        return self._graph

    @property
    def graph(self) -> nx.DiGraph[Any]:
        """A frozen networkx DiGraph of the nodes: `nx.descendants(wf.graph, "a")` just works."""
        return self.compiled.networkx()

    @property
    def inputs(self) -> dict[str, Any]:
        """The run inputs: name → annotation (`inspect.Parameter.empty`: none)."""
        return {
            name: hints[0] if hints else inspect.Parameter.empty
            for name, hints in self.compiled.inputs.items()
        }

    @property
    def nodes(self) -> Mapping[str, Node]:
        """The declared nodes by id, in the order of their declaration."""
        return dict(self._nodes)

    @property
    def output(self) -> str | None:
        """The id of the node whose output is the workflow's; None: its only sink, or all of them."""
        return None if self._output is None else _name(self._output)


# -- one node -------------------------------------------------------------------------------------------

_OPTIONS: Final = frozenset(Node.__dataclass_fields__) - {"fn", "signature", "what"}
_NOTHING: Final = Signature((), None, False, True)


def _waiting(
    id: str, what: What, depends_on: Iterable[Ref] | Ref, timeout: float | None, trigger: Trigger
) -> Node:
    return declare(None, {}, id=id, what=what, depends_on=depends_on, timeout=timeout, trigger=trigger)


def _state_of(node: str, signature: Signature, args: Mapping[str, Any] | None) -> str:
    """Give the parameter of a loop's function that receives the state: `state`, else the first that nothing
    feeds.
    """
    names = [name for name, annotation, *_ in signature.parameters if not _is_context(annotation)]
    free = [name for name in names if name not in (args or {})]
    if not free:
        raise BindingError(node, "state", "a loop's function needs a parameter that receives the state.")
    return "state" if "state" in free else free[0]


def _loop_in_map(
    id: str | None,
    body: Callable[..., Any] | Workflow,
    scope: Mapping[str, Any],
    initial: str | Value,
    until: Callable[[Any], Any],
    max_iterations: int,
    options: Mapping[str, Any],
) -> Node:
    """A loop with `for_each` is a map over a workflow that holds the loop: `refine[3]/refine[0]`."""
    name = _checked_id(_name(body) if id is None else id, "node id")
    outer = {key: options[key] for key in InnerOptions.__annotations__ if key in options}
    own = {
        key: value
        for key, value in options.items()
        if key not in outer and key not in {"for_each", "args", "id"}
    }
    inner = Workflow(name)
    inner._add_loop(name, body, scope, initial, until, max_iterations, own)
    args = dict(options.get("args") or {})
    if isinstance(initial, str) and initial not in options["for_each"]:
        args.setdefault(initial, initial)
    return declare(None, {}, id=name, what=Inner(inner), args=args, for_each=options["for_each"], **outer)


def declare(
    fn: Callable[..., Any] | None,
    scope: Mapping[str, Any],
    *,
    id: str | None = None,
    what: What = None,
    signature: Signature | None = None,
    depends_on: Iterable[Ref] | Ref = (),
    args: Mapping[str, Ref] | None = None,
    for_each: Mapping[str, Ref] | None = None,
    **options: Any,
) -> Node:
    """Give the node of a function and its options, or a DefinitionError."""
    if unknown := options.keys() - _OPTIONS:
        raise DefinitionError(
            f"{unknown.pop()!r} is no option of a node. Options: {', '.join(sorted(_OPTIONS))}."
        )
    if what is None and not callable(fn):
        raise DefinitionError(f"a node is made of a function, not of {fn!r}. With options: @wf.node(…).")
    node_id = _checked_id(_name(fn) if id is None else id, "node id")
    if for_each is not None and not for_each:
        raise DefinitionError(
            f"node {node_id!r}: for_each={{}} names no parameter. Write for_each={{'item': 'parent'}}."
        )
    node = Node(
        id=node_id,
        fn=fn,
        what=what,
        signature=signature or (_NOTHING if fn is None else _signature(node_id, fn, scope)),
        depends_on=tuple(dict.fromkeys(_names(depends_on))),
        args={
            parameter: ref if isinstance(ref, Value) else _name(ref)
            for parameter, ref in (args or {}).items()
        },
        for_each={parameter: _name(ref) for parameter, ref in (for_each or {}).items()},
        **options,
    )
    _check_options(node)
    return node


def _check_options(node: Node) -> None:
    names = {name for name, *_ in node.signature.parameters}
    for option, given in (("args", node.args), ("for_each", node.for_each)):
        for parameter in given:
            if parameter not in names and not node.signature.accepts_any and node.fn is not None:
                raise BindingError(
                    node.id, parameter, f"named in {option}=, but {_name(node.fn)}() has no such parameter."
                )
            if option == "for_each" and parameter in node.args:
                raise BindingError(node.id, parameter, "named in args= and in for_each=; keep one of them.")
    _check_reconcile(node, names)
    _check_when(node, names | node.args.keys() | node.for_each.keys())
    problem = _problem(node)
    if problem:
        raise DefinitionError(f"node {node.id!r}: {problem}")


def _check_reconcile(node: Node, names: set[str]) -> None:
    """`reconcile=` may ask for the context and for what the node itself receives."""
    if node.reconcile is None or not callable(node.reconcile):
        return
    for parameter in inspect.signature(node.reconcile).parameters.values():
        optional = parameter.default is not parameter.empty or parameter.kind is parameter.VAR_KEYWORD
        if parameter.name not in names | {"ctx"} and not optional:
            problem = f"asked for by reconcile=, but {_name(node.fn)}() has none (the context is `ctx`)."
            raise BindingError(node.id, parameter.name, problem)


def _check_when(node: Node, names: set[str]) -> None:
    """`when=` may ask for what the node itself receives."""
    if node.when is None:
        return
    if not callable(node.when) or is_async(node.when):
        raise DefinitionError(f"node {node.id!r}: when= takes a plain function over its parameters.")
    for parameter in inspect.signature(node.when).parameters.values():
        optional = parameter.default is not parameter.empty or parameter.kind is parameter.VAR_KEYWORD
        if parameter.name not in names and not optional and node.fn is not None:
            raise BindingError(
                node.id, parameter.name, "asked for by when=, but the node receives no such thing."
            )


def _problem(node: Node) -> str | None:
    """Give what is wrong with a node's options by themselves; None if nothing is."""
    tolerate, concurrency, timeout = node.tolerate, node.concurrency, node.timeout
    checks = (
        (node.trigger not in TRIGGERS, f"trigger={node.trigger!r} is none of {', '.join(TRIGGERS)}."),
        (
            (concurrency is not None or tolerate is not None) and not node.for_each,
            "concurrency= and tolerate= are for maps; add for_each=.",
        ),
        (
            concurrency is not None and not _whole(concurrency),
            f"concurrency={concurrency!r}: a whole number from 1.",
        ),
        (
            tolerate is not None and not _is_tolerance(tolerate),
            f"tolerate={tolerate!r}: a count (int) or a share (float, more than 0 and at most 1).",
        ),
        (
            timeout is not None and not _is_seconds(timeout),
            f"timeout={timeout!r}: seconds, more than 0.",
        ),
        (
            isinstance(node.what, Approval | WaitFor) and timeout is not None and timeout > _LONGEST_WAIT,
            f"timeout={timeout!r}: leave it out to wait without an end.",
        ),
        (
            not isinstance(node.idempotent, bool | None),
            f"idempotent={node.idempotent!r} is neither True, False nor None (the workflow's word).",
        ),
        (not isinstance(node.retry, Retry | None), f"retry={node.retry!r}: write Retry(attempts=…)."),
        (not isinstance(node.version, str), f"version={node.version!r}: a string."),
        (
            node.executor not in {None, "loop", "thread", "process", "dask", "ray"},
            f"executor={node.executor!r} is none of loop, thread, process, dask, ray.",
        ),
        (
            node.executor == "loop" and not node.signature.asynchronous,
            "a plain function would block the event loop; leave executor= out (thread) or make it async.",
        ),
        (
            node.executor in {"thread", "process"} and node.signature.asynchronous,
            f"executor={node.executor!r} takes a plain function, this one is async.",
        ),
        (node.reconcile is not None and not callable(node.reconcile), "reconcile= takes an async function."),
        (
            node.compensate is not None and not callable(node.compensate),
            "compensate= takes an async function.",
        ),
        (
            isinstance(node.what, Loop) and not node.checkpoint,
            "checkpoint=False is not for loops: their rounds are what a resume goes on from.",
        ),
        (
            isinstance(node.what, Loop) and (not callable(node.what.until) or is_async(node.what.until)),
            "until= takes a plain function of the state.",
        ),
    )
    return next((message for wrong, message in checks if wrong), None)


_LONGEST_WAIT = 1e10  # seconds, some 300 years: its end is a time that can be stored


def _workflow_problem(wf: Workflow) -> str | None:
    """Give what is wrong with a workflow's options by themselves; None if nothing is."""
    checks = (
        (
            wf.on_failure not in {None, "rollback"},
            f"on_failure={wf.on_failure!r} is neither None nor 'rollback'.",
        ),
        (
            not isinstance(wf.idempotent, bool | None),
            f"idempotent={wf.idempotent!r} is neither True, False nor None.",
        ),
        (
            wf.timeout is not None and not _is_seconds(wf.timeout),
            f"timeout={wf.timeout!r}: seconds, more than 0.",
        ),
        (not isinstance(wf.retry, Retry | None), f"retry={wf.retry!r}: write Retry(attempts=…)."),
        (not isinstance(wf.budget, Budget | None), f"budget={wf.budget!r}: write Budget(tokens=…, cost=…)."),
        (
            not isinstance(wf.recovery, Recovery),
            f"recovery={wf.recovery!r}: write Recovery(auto_resume=True).",
        ),
    )
    return next((message for wrong, message in checks if wrong), None)


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_tolerance(value: object) -> bool:
    if isinstance(value, bool):
        return False
    return value >= 0 if isinstance(value, int) else isinstance(value, float) and 0 < value <= 1


def _checked_id(given: object, what: str) -> str:
    if not isinstance(given, str):
        raise DefinitionError(f"the {what} {given!r} is not a string.")
    name = unicodedata.normalize("NFC", given)
    wrong = next((c for c in name if c in "/[]" or unicodedata.category(c) in {"Cc", "Cs", "Zl", "Zp"}), None)
    if wrong is not None:
        raise DefinitionError(
            f"the {what} {given!r} holds {wrong!r}; '/', '[', ']' and control characters are not allowed."
        )
    if not name or len(name) > 200:
        raise DefinitionError(f"the {what} {given[:40]!r} has {len(name)} characters; it needs 1 to 200.")
    return name


def _name(ref: object) -> str:
    """Give the node id that a reference means: a string is one, a function stands for its name."""
    if isinstance(ref, str):
        return unicodedata.normalize("NFC", ref)
    name = getattr(ref, "__name__", None) or getattr(getattr(ref, "func", None), "__name__", None)
    if not callable(ref) or not isinstance(name, str):
        raise DefinitionError(f"{ref!r} does not name a node: give its id or its function.")
    return name


def _names(refs: Iterable[Ref] | Ref) -> list[str]:
    if isinstance(refs, str) or callable(refs):
        refs = (refs,)
    return [_name(ref) for ref in refs]  # type: ignore[union-attr]


def _replaces(fn: Callable[..., Any]) -> bool:
    """Say whether a function typed again at a prompt replaces the node of its id."""
    return getattr(fn, "__module__", "") == "__main__" and (hasattr(sys, "ps1") or "ipykernel" in sys.modules)


# -- signatures -----------------------------------------------------------------------------------------


def _caller_locals() -> Mapping[str, Any]:
    """Give the local names where a workflow is being declared: annotations may use classes defined there."""
    frame = sys._getframe(2)
    return {} if frame.f_locals is frame.f_globals else dict(frame.f_locals)


def _signature(node_id: str, fn: Callable[..., Any], scope: Mapping[str, Any]) -> Signature:
    target = _unwrap(fn)
    if inspect.isasyncgenfunction(target) or inspect.isgeneratorfunction(target):
        raise DefinitionError(f"node {node_id!r}: {_name(fn)}() is a generator. Return a list instead.")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError) as error:
        raise DefinitionError(f"node {node_id!r}: {fn!r} has no signature that can be read.") from error
    resolve = _Resolver(target, scope)
    parameters, accepts_any = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            accepts_any = True
            continue
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY}:
            kind = "*" + parameter.name if parameter.kind is parameter.VAR_POSITIONAL else "positional-only"
            raise BindingError(
                node_id, parameter.name, f"{kind} parameters cannot be fed by name. Name each of them."
            )
        has_default = parameter.default is not parameter.empty
        keyword = parameter.kind is parameter.KEYWORD_ONLY
        parameters.append((parameter.name, resolve(parameter.annotation), has_default, keyword))
    return Signature(tuple(parameters), resolve(signature.return_annotation), accepts_any, is_async(fn))


def _unwrap(fn: Callable[..., Any]) -> Callable[..., Any]:
    while True:
        if isinstance(fn, type):
            return fn
        inner = getattr(fn, "func", None) or getattr(fn, "__func__", None)
        if inner is None and not inspect.isroutine(fn) and not hasattr(fn, "__wrapped__"):
            inner = getattr(type(fn), "__call__", None)  # noqa: B004  # an object with __call__
            if not inspect.isfunction(inner):
                return fn
        inner = inner or getattr(fn, "__wrapped__", None)
        if inner is None or inner is fn:
            return fn
        fn = inner


def is_async(fn: Callable[..., Any]) -> bool:
    while callable(inner := getattr(fn, "func", None)):
        fn = inner
    if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(inspect.unwrap(fn)):
        return True  # also behind a plain decorator, which hands the coroutine on
    return not inspect.isroutine(fn) and inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


class _Resolver:
    """Turns annotations into what they mean: from the function's module, its closure, and where it was
    declared.
    """

    def __init__(self, fn: Callable[..., Any], scope: Mapping[str, Any]) -> None:
        self._globals: dict[str, Any] = getattr(fn, "__globals__", {})
        code, cells = getattr(fn, "__code__", None), getattr(fn, "__closure__", None) or ()
        self._locals = dict(scope)
        for name, cell in zip(code.co_freevars if code else (), cells, strict=True):
            try:
                self._locals[name] = cell.cell_contents
            except ValueError:  # not filled yet: a class defined further down
                continue

    def __call__(self, annotation: Any) -> Any:
        if not isinstance(annotation, str):
            return annotation
        try:
            # an annotation is code of the same module as the function it stands at
            return eval(annotation, self._globals, self._locals)
        except Exception:
            # imported for type checkers only: the context is known by its name, anything else means "any"
            last = annotation.rpartition(".")[2].strip()
            return Context if last == "Context" else Any


# -- the checked graph ----------------------------------------------------------------------------------


class Source(NamedTuple):
    """Where a value comes from: `kind` is context, parent, item, input or constant."""

    kind: Literal["context", "parent", "item", "input", "constant"]
    place: int = -1  # parent: the vertex; item: which for_each entry
    name: str = ""  # input
    value: Any = None  # constant


class Binding(NamedTuple):
    """What feeds one parameter."""

    parameter: str
    source: Source
    keyword: bool
    optional: bool
    annotation: Any


class Graph:
    """A workflow, checked and turned into numbers: vertex i is the i-th node in a topological order.

    Frozen: what is declared later makes a new one. `parents` and `children` hold each vertex once, however
    many parameters an edge feeds.
    """

    def __init__(self, wf: Workflow, inner: Mapping[int, Graph]) -> None:
        self.workflow, self.version, self.idempotent = wf.name, wf.version, wf.idempotent
        self.retry, self.recovery, self.timeout = wf.retry or Retry(), wf.recovery, wf.timeout
        self.budget, self.on_failure, self.migrations = wf.budget, wf.on_failure, wf.migrations
        self.inner = inner
        self.secrets: frozenset[str] = wf.secrets.union(*(graph.secrets for graph in inner.values()))
        declared = {id_: self._with_inputs(node) for id_, node in wf._nodes.items()}
        self._declared_inputs = wf._declared
        self._sources: dict[str, Source] = {}
        self.inputs: dict[str, list[Any]] = {name: [hint] for name, hint in (wf._declared or {}).items()}
        self.required: dict[str, str] = dict.fromkeys(self.inputs, "")
        for name in self.inputs:
            if name in declared:
                raise DefinitionError(
                    f"workflow {wf.name!r}: {name!r} is declared as an input and is a node too."
                )
        edges = {id_: self._edges(node, declared) for id_, node in declared.items()}
        order = _topological(wf.name, {id_: found[0] for id_, found in edges.items()})
        self.ids: tuple[str, ...] = tuple(order)
        self.index: dict[str, int] = {id_: i for i, id_ in enumerate(order)}
        self.nodes: tuple[Node, ...] = tuple(declared[id_] for id_ in order)
        self.parents: tuple[tuple[int, ...], ...] = tuple(
            tuple(sorted(self.index[p] for p in edges[id_][0])) for id_ in order
        )
        children: list[list[int]] = [[] for _ in order]
        for i, parents in enumerate(self.parents):
            for parent in parents:
                children[parent].append(i)
        self.children: tuple[tuple[int, ...], ...] = tuple(map(tuple, children))
        self.bindings: tuple[tuple[Binding, ...], ...] = tuple(
            tuple(self._binding(declared[id_], name, where) for name, where in edges[id_][1]) for id_ in order
        )
        self.sources: tuple[tuple[Source, ...], ...] = tuple(
            tuple(self._source(ref) for ref in _listed(node)) for node in self.nodes
        )
        self.output: int | None = self._output(wf.output)
        self._networkx: nx.DiGraph[Any] | None = None
        self.program: Any = None  # what an engine makes of it, once

    def __len__(self) -> int:
        return len(self.ids)

    def check_pure(self, enclosing: bool | None = None) -> None:
        """Raise DefinitionError for a node that is not stored and may not run again, here or in an inner
        workflow.
        """
        default = enclosing if self.idempotent is None else self.idempotent
        for node in self.nodes:
            own = default if node.idempotent is None else node.idempotent
            if not node.checkpoint and not own:
                raise DefinitionError(
                    f"node {node.id!r}: checkpoint=False is for pure nodes, which may run again:"
                    " add idempotent=True."
                )
            if node.workflow is not None:
                self.inner[id(node.workflow)].check_pure(own)

    def _with_inputs(self, node: Node) -> Node:
        """Give a node that holds a workflow the parameters that its inputs are."""
        if node.workflow is None:
            return node
        graph = self.inner[id(node.workflow)]
        if isinstance(node.what, Loop) and "state" not in graph.inputs:
            raise DefinitionError(
                f"loop {node.id!r}: workflow {graph.workflow!r} has no input 'state'; one of its nodes must"
                " take it."
            )
        for name in (*node.args, *node.for_each):
            if name not in graph.inputs:
                near = nearest(name, graph.inputs)
                hint = f" Did you mean {near!r}?" if near else ""
                raise BindingError(node.id, name, f"workflow {graph.workflow!r} has no such input.{hint}")
        parameters = tuple(
            (
                name,
                hints[0] if hints else inspect.Parameter.empty,
                graph.required.get(name) == "optional",
                True,
            )
            for name, hints in graph.inputs.items()
        )
        returns = inspect.Parameter.empty
        return replace(node, signature=Signature(parameters, returns, False, True))

    def _edges(
        self, node: Node, declared: Mapping[str, Node]
    ) -> tuple[dict[str, None], list[tuple[tuple[str, Any, bool, bool], str | Value | None]]]:
        """Give a node's parents and where each of its parameters comes from (None: the context)."""
        parents: dict[str, None] = {}
        for after in node.depends_on:
            if after not in declared:
                raise UnknownDependency(node.id, after, nearest(after, declared))
            parents[after] = None
        where: list[tuple[tuple[str, Any, bool, bool], str | Value | None]] = []
        named = {name for name, *_ in node.signature.parameters}
        extra = [
            (name, inspect.Parameter.empty, False, True)
            for name in (*node.args, *node.for_each)
            if name not in named
        ]
        for parameter in (*node.signature.parameters, *extra):
            name, annotation, has_default, _ = parameter
            if _is_context(annotation):
                where.append((parameter, None))
                continue
            ref: str | Value = node.args.get(name) or node.for_each.get(name) or name
            if isinstance(node.what, Loop) and name == node.what.state:
                ref = node.what.initial
            if isinstance(ref, str):
                if ref in declared and (ref != node.id or name in node.args or name in node.for_each):
                    parents[ref] = None
                elif not self._takes_input(node, name, ref, annotation, has_default, declared):
                    continue  # a default that nothing declared feeds: the function's own
            where.append((parameter, ref))
        return parents, where

    def _takes_input(
        self,
        node: Node,
        name: str,
        ref: str,
        annotation: Any,
        has_default: bool,
        declared: Mapping[str, Node],
    ) -> bool:
        """Note that a node wants the run input `ref`; False if its own default has to do."""
        if self._declared_inputs is not None and ref not in self._declared_inputs:
            if has_default and ref == name:
                return False
            known = [*declared, *self._declared_inputs]
            raise UnknownDependency(node.id, ref, nearest(ref, known), f"(parameter {name!r}) asks for")
        hints = self.inputs.setdefault(ref, [])
        if name not in node.for_each and annotation is not inspect.Parameter.empty:
            hints.append(annotation)
        elif name in node.for_each and annotation is not inspect.Parameter.empty:
            hints.append(list[annotation])
        if has_default and self._declared_inputs is None:
            self.required.setdefault(ref, "optional")
        else:
            self.required[ref] = ""
        return True

    def _source(self, ref: str | Value | None) -> Source:
        if ref is None:
            return Source("context")
        if isinstance(ref, Value):
            return Source("constant", value=ref.value)
        found = self._sources.get(ref)
        if found is None:
            parent = self.index.get(ref)
            found = Source("input", name=ref) if parent is None else Source("parent", place=parent)
            self._sources[ref] = found
        return found

    def _binding(
        self, node: Node, parameter: tuple[str, Any, bool, bool], where: str | Value | None
    ) -> Binding:
        name, annotation, has_default, keyword = parameter
        if name in node.for_each and where is not None:
            source = Source("item", place=list(node.for_each).index(name))
        elif isinstance(node.what, Loop) and name == node.what.state:
            source = Source("item", place=0)
        elif isinstance(where, str) and where == node.id:
            source = Source("input", name=where)
        else:
            source = self._source(where)
        return Binding(name, source, keyword, has_default, annotation)

    def _output(self, name: str | None) -> int | None:
        if name is None:
            return None
        if name not in self.index:
            raise UnknownDependency("output", name, nearest(name, self.index), "of the workflow names")
        return self.index[name]

    def networkx(self) -> nx.DiGraph[Any]:
        """Give the graph as a frozen networkx DiGraph, made once."""
        if self._networkx is None:
            graph: nx.DiGraph[Any] = nx.DiGraph(name=self.workflow)
            for node in self.nodes:
                graph.add_node(node.id, run=node.fn)
            for i, parents in enumerate(self.parents):
                graph.add_edges_from((self.ids[parent], self.ids[i]) for parent in parents)
                for binding in self.bindings[i]:
                    if binding.source.kind == "parent":
                        graph.edges[self.ids[binding.source.place], self.ids[i]]["arg"] = binding.parameter
            self._networkx = nx.freeze(graph)
        return self._networkx

    def check_inputs(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Give a run inputs, or an InputError that names what is missing or unknown and the nearest name."""
        inputs = dict(given or {})
        odd = next((name for name in inputs if not isinstance(name, str)), None)
        if odd is not None:
            raise InputError(f"the names of inputs are strings, not {odd!r}.")
        for name in inputs:
            if name not in self.inputs:
                if name in self.index:
                    raise InputError(f"{name!r} is a node of workflow {self.workflow!r}, not an input.")
                near = nearest(name, [*self.inputs, *self.index])
                hint = (
                    f" Did you mean {near!r}?" if near else f" It takes: {', '.join(self.inputs) or 'none'}."
                )
                raise InputError(f"workflow {self.workflow!r} has no input {name!r}.{hint}")
        missing = [name for name, kind in self.required.items() if name not in inputs and kind != "optional"]
        if missing:
            near = nearest(missing[0], self.index)
            hint = f" Or did you mean the node {near!r}?" if near else ""
            raise MissingInput(self.workflow, missing, hint)
        return inputs


def _listed(node: Node) -> Iterable[str | Value]:
    """Give what a node takes one by one: the lists of a map, the state of a loop."""
    return (node.what.initial,) if isinstance(node.what, Loop) else node.for_each.values()


def _is_context(annotation: Any) -> bool:
    return annotation is Context or (isinstance(annotation, type) and issubclass(annotation, Context))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Give the known name that was probably meant."""
    from difflib import get_close_matches  # only for what is wrong

    found = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def _topological(workflow: str, parents: Mapping[str, Iterable[str]]) -> Sequence[str]:
    """Give the ids in a topological order that keeps the order of declaration where it can (Kahn)."""
    left = dict.fromkeys(parents, 0)
    children: dict[str, list[str]] = {id_: [] for id_ in parents}
    for id_, above in parents.items():
        for parent in above:
            left[id_] += 1
            children[parent].append(id_)
    order = [id_ for id_, count in left.items() if not count]
    for id_ in order:  # grows while it is walked
        for child in children[id_]:
            left[child] -= 1
            if not left[child]:
                order.append(child)
    if len(order) < len(left):
        stuck = {id_: list(above) for id_, above in parents.items() if left[id_]}
        raise CycleError(workflow, _cycle(stuck))
    return order


def _cycle(parents: Mapping[str, Sequence[str]]) -> list[str]:
    """Walk upwards from anywhere: every node left over has a parent that is left over too, so the walk must
    return.
    """
    walk: dict[str, None] = {}
    here = next(iter(parents))
    while here not in walk:
        walk[here] = None
        here = next(parent for parent in parents[here] if parent in parents)
    steps = list(walk)
    circle = steps[steps.index(here) :][::-1]
    first = circle.index(min(circle, key=list(parents).index))
    circle = circle[first:] + circle[:first]
    return [*circle, circle[0]]
