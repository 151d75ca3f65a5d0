"""What a stored run's code is recognised by.

The code hash says whether a callable still does the same, as far as its own text shows it. It covers

- its syntax tree: no comments, formatting, line numbers, docstring, own name or decorator lines;
- the values of its default arguments, of its closure and of `functools.partial`, as the codec packs them;
- what wraps it and what it wraps, the object behind a bound method, the state of a callable object.

What it calls by a global name is not followed: a node's `version=` is for that. The docstring of a function
that *another* function holds does count, for there are decorators that make a prompt of it.
"""

from __future__ import annotations
import __future__

import ast
import functools
import hashlib
import inspect
import itertools
import json
import linecache
import sysconfig
import warnings
import weakref
from collections import defaultdict
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from dagresume.codec import pack
from dagresume.policy import Retry
from dagresume.store import Definition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from dagresume.workflow import Graph, Source

__all__ = ["UNKNOWN", "code_hash", "code_hashes", "describe", "describe_callable", "differences", "identity"]

UNKNOWN = "unknown"

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

_FUTURES = functools.reduce(
    int.__or__, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_CALLABLES = (FunctionType, MethodType, functools.partial, functools._lru_cache_wrapper)
_EMPTY = object()  # what a closure cell holds before its variable has a value
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def code_hash(fn: Callable[..., Any]) -> str:
    """Give 16 hex digits that stay while the callable's own code and captured values stay, or `UNKNOWN`.

    They are the same in every process and under every supported Python. `UNKNOWN` where the source cannot be
    had (C functions, classes, `exec`, a file edited since it was loaded) or a captured value not be stored.
    """
    parts = _Parts()
    try:
        parts.add_callable(fn)
    except (_CannotBeKnown, RecursionError):
        return UNKNOWN
    return hashlib.blake2b(json.dumps(parts.words).encode(), digest_size=8).hexdigest()


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


class _CannotBeKnown(Exception):
    """A part of a callable has no source or cannot be stored."""


class _Parts:
    """What a callable consists of, as the list of words that its hash is taken of."""

    def __init__(self) -> None:
        self.words: list[str] = []
        # by id, which is an object's own while it lives: so the object is kept beside its number
        self._seen: dict[int, tuple[int, object]] = {}

    def add_callable(self, fn: object, *, held: bool = False) -> None:
        """Add what `fn` does; `held`: another function has got hold of it, and may read its docstring."""
        if self._met(fn):
            return
        if type(fn) is FunctionType:  # no isinstance: proxies pretend to be what they stand for
            self._add_function(fn, held=held)
        elif type(fn) is functools.partial:
            self.words.append("partial")
            self.add_callable(fn.func, held=held)
            self._add_value(fn.args)
            self._add_named(fn.keywords)
        elif type(fn) is MethodType:
            self.words.append("method")
            self.add_callable(fn.__func__, held=held)
            self._add_value(fn.__self__, stateful=True)
        elif type(fn) is staticmethod or type(fn) is classmethod:
            self.add_callable(fn.__func__, held=held)
        elif type(fn) is functools._lru_cache_wrapper:
            self.words.append("cached")
            self.add_callable(fn.__wrapped__, held=True)
        else:
            self._add_callable_object(fn)

    def _met(self, thing: object) -> bool:
        """Say whether `thing` has its words already (there are cycles), and then add its number."""
        known = self._seen.get(id(thing))
        if known is None:
            self._seen[id(thing)] = (len(self._seen), thing)
            return False
        self.words += ["again", str(known[0])]
        return True

    def _add_function(self, fn: FunctionType, *, held: bool) -> None:
        if _is_standard(fn.__code__):
            # its text and its options differ between Python versions, its meaning does not
            self.words += ["standard", str(fn.__globals__.get("__name__")), fn.__code__.co_qualname]
        else:
            self.words += ["function", _text_digest(fn)]
            self._add_value(fn.__defaults__)
            self._add_named(fn.__kwdefaults__ or {})
        if held and fn.__doc__:
            self.words += ["doc", inspect.cleandoc(fn.__doc__)]
        if fn.__closure__:
            self._add_named(
                dict(zip(fn.__code__.co_freevars, fn.__closure__, strict=True)), read=_cell_content
            )
        if "__wrapped__" in fn.__dict__:
            self.words.append("wraps")
            self.add_callable(fn.__dict__["__wrapped__"], held=True)

    def _add_callable_object(self, thing: object) -> None:
        call = getattr(type(thing), "__call__", None)  # noqa: B004 - the function itself is wanted
        if type(call) is not FunctionType:
            raise _CannotBeKnown
        self.words.append("object")
        self.add_callable(call)
        self._add_state(thing)

    def _add_named(
        self, values: Mapping[str, Any], read: Callable[[Any], object] = lambda value: value
    ) -> None:
        for name in sorted(values):
            self.words += ["name", name]
            self._add_value(read(values[name]))

    def _add_value(self, value: object, *, stateful: bool = False) -> None:
        """Add a captured value; `stateful`: the object of a bound method, known by its attributes."""
        if isinstance(value, type | ModuleType | BuiltinFunctionType):
            # helpers with a name, like those that a body finds among its globals
            self.words += ["named", getattr(value, "__qualname__", value.__name__)]
            if isinstance(value, BuiltinFunctionType) and not isinstance(value.__self__, ModuleType | None):
                self._add_value(value.__self__)
            return
        if type(value) in _CALLABLES:
            self.add_callable(value, held=True)
            return
        try:
            self.words += ["value", pack(value)]
        except Exception:  # beside the codec's own refusal, whatever a foreign object's methods raise
            self._add_unpacked(value, stateful=stateful)

    def _add_unpacked(self, value: object, *, stateful: bool) -> None:
        if self._met(value):
            return
        if type(value) in (tuple, list):
            self.words += [type(value).__name__, str(len(value))]  # type: ignore[arg-type]
            for item in value:  # type: ignore[attr-defined]
                self._add_value(item)
        elif type(value) is dict and all(type(key) is str for key in value):
            self.words += ["dict", str(len(value))]
            self._add_named(value)
        elif value is _EMPTY:
            self.words.append("empty")
        elif stateful:
            self._add_state(value)
        else:
            self._add_callable_object(value)

    def _add_state(self, thing: object) -> None:
        lineage = type(thing).__mro__[:-1]
        if not all(map(_is_plain_class, lineage)):
            raise _CannotBeKnown
        attributes = dict(getattr(thing, "__dict__", {}))
        for kind in lineage:
            for slot in _slots(kind):
                if hasattr(thing, slot):
                    attributes[slot] = getattr(thing, slot)
        self.words += ["state", type(thing).__qualname__]
        # the other double underscores are what functools.update_wrapper copies
        self._add_named({k: v for k, v in attributes.items() if not k.startswith("__") or k == "__wrapped__"})


def _cell_content(cell: Any) -> object:
    try:
        content: object = cell.cell_contents
    except ValueError:
        return _EMPTY
    return content


def _is_plain_class(kind: type) -> bool:
    """Say whether a class statement alone made it: then its instances have no state but their attributes."""
    made_in_c = isinstance(vars(kind).get("__new__"), BuiltinFunctionType)
    return bool(kind.__flags__ & _HEAP_TYPE) and not made_in_c


def _slots(kind: type) -> Iterable[str]:
    slots = kind.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else slots
    # a private name is kept under its mangled one
    return (
        f"_{kind.__name__.lstrip('_')}{n}" if n.startswith("__") and not n.endswith("__") else n
        for n in names
    )


def _is_standard(code: CodeType) -> bool:
    name = code.co_filename
    return name.startswith("<frozen ") or (
        name.startswith(_STANDARD_LIBRARY) and "site-packages" not in name and "dist-packages" not in name
    )


# Digests by code object: one function serves many nodes, and one factory makes many functions of one code.

_digests: dict[int, tuple[weakref.ref[CodeType], str | None]] = {}


def _text_digest(fn: FunctionType) -> str:
    code, key = fn.__code__, id(fn.__code__)
    if key not in _digests:
        source = _source_of(code, fn.__globals__)
        digest = source.digest(code) if source else None
        _digests[key] = weakref.ref(code, lambda _: _digests.pop(key, None)), digest
    _, known = _digests[key]
    if known is None:
        raise _CannotBeKnown
    return known


def _source_of(code: CodeType, module: dict[str, Any]) -> _Source | None:
    future = code.co_flags & _FUTURES
    path = Path(code.co_filename)
    try:
        stat = path.stat()
    except (OSError, ValueError):
        # notebooks, the interactive interpreter, doctest and zip files leave their text here
        text = "".join(linecache.getlines(code.co_filename, module))
        return _parsed_text(text, future) if text else None
    return _parsed_file(path, stat.st_mtime_ns, stat.st_size, future)


@functools.lru_cache(maxsize=16)
def _parsed_file(path: Path, _modified: int, _size: int, future: int) -> _Source | None:
    try:
        return _parse(path.read_bytes(), future)
    except OSError:
        return None


@functools.lru_cache(maxsize=16)
def _parsed_text(text: str, future: int) -> _Source | None:
    return _parse(text, future)


def _parse(text: str | bytes, future: int) -> _Source | None:
    flags = future | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the import has shown them
            tree = ast.parse(text)
            return _Source(tree, compile(tree, "<source>", "exec", flags=flags, dont_inherit=True))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


class _Source:
    """The functions of one text, as they are there now, to be found by what was once loaded from it."""

    def __init__(self, tree: ast.Module, module: CodeType) -> None:
        self._by_shape: dict[str, list[CodeType]] = defaultdict(list)
        self._by_place: dict[tuple[str, int], list[tuple[str, CodeType]]] = defaultdict(list)
        for shape, code in _shapes(module):
            self._by_shape[shape].append(code)
            self._by_place[code.co_name, code.co_firstlineno].append((shape, code))
        self._nodes: dict[tuple[str, int], list[_Function]] = defaultdict(list)
        for node in ast.walk(tree):
            if isinstance(node, ast.Lambda):
                self._nodes["<lambda>", node.lineno].append(node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.decorator_list[0] if node.decorator_list else node
                self._nodes[node.name, first.lineno].append(node)

    def digest(self, loaded: CodeType) -> str | None:
        """Give the digest of the function that `loaded` came from; None if it is not there, or not alone."""
        shape = _shape(loaded)
        here = self._by_place.get((loaded.co_name, loaded.co_firstlineno), [])
        twins = [code for its_shape, code in here if its_shape == shape] or self._by_shape.get(shape, [])
        nodes = [self._node(twin) for twin in twins] or [self._rewritten(loaded)]
        found = {_tree_digest(node) if node else None for node in nodes}
        return found.pop() if len(found) == 1 else None

    def _node(self, code: CodeType) -> _Function | None:
        nodes = self._nodes.get((code.co_name, code.co_firstlineno), [])
        if len(nodes) > 1:
            nodes = _around(nodes, code)
        return nodes[-1] if nodes else None

    def _rewritten(self, loaded: CodeType) -> _Function | None:
        """Find a function with assert statements, which test runners rewrite: they only add to it."""
        place = (loaded.co_name, loaded.co_firstlineno)
        match self._nodes.get(place, []), self._by_place.get(place, []):
            case [node], [(_, code)] if _vocabulary(code) <= _vocabulary(loaded):
                return node if any(isinstance(part, ast.Assert) for part in ast.walk(node)) else None
        return None


def _around(nodes: list[_Function], code: CodeType) -> list[_Function]:
    """Of lambdas on one line, give those whose body holds all that `code` runs, the innermost last."""
    spans = [
        ((line, column), (end_line, end_column))
        for line, end_line, column, end_column in code.co_positions()
        if line and end_line and column is not None and end_column
    ]
    if not spans:
        # a constant is all it gives; or positions are switched off, and then closures cannot be told apart
        return [node for node in nodes if _shape_alone(node) == _shape(code)][:1]
    begin, end = min(begin for begin, _ in spans), max(end for _, end in spans)
    inside = []
    for node in nodes:
        body = node.body
        if isinstance(body, ast.expr) and (body.lineno, body.col_offset) <= begin and end <= _end(body):
            inside.append(node)
    return sorted(inside, key=lambda node: node.col_offset)


def _end(node: ast.expr) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0


def _shape_alone(node: _Function) -> str:
    """Give the shape of a lambda that nothing encloses."""
    assert isinstance(node, ast.Lambda)
    code = compile(ast.Expression(node), "<source>", "eval", dont_inherit=True)
    return [_shape(each) for each in code.co_consts if isinstance(each, CodeType)][-1]  # after its defaults


_KINDS = (
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)


def _shapes(code: CodeType) -> list[tuple[str, CodeType]]:
    """Give every code object within `code`, itself too, beside its shape."""
    found: list[tuple[str, CodeType]] = []
    _shape(code, found)
    return found


def _shape(code: CodeType, found: list[tuple[str, CodeType]] | None = None) -> str:
    """Digest what a code object does, wherever in its file it stands; good within one process."""
    facts = (
        code.co_name,
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & _KINDS),
        code.co_code,  # without what the running interpreter has specialised in it
        (code.co_names, code.co_varnames, code.co_cellvars, code.co_freevars),
        [_shape(each, found) if isinstance(each, CodeType) else _constant(each) for each in code.co_consts],
    )
    shape = hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()
    if found is not None:
        found.append((shape, code))
    return shape


def _vocabulary(code: CodeType) -> set[str]:
    words = {f"{kind} {name}" for kind in ("co_names", "co_freevars") for name in getattr(code, kind)}
    words.update(f"argument {name}" for name in inspect.getargs(code)[0])
    for constant in code.co_consts:
        words |= _vocabulary(constant) if isinstance(constant, CodeType) else {_constant(constant)}
    return words


def _tree_digest(node: _Function) -> str:
    arguments = node.args
    parts: list[object] = [type(node).__name__, *_undefaulted(arguments)]
    if isinstance(node, ast.Lambda):
        parts.append(node.body)
    else:
        parts += [_without_docstring(node.body), node.returns, getattr(node, "type_params", [])]
    words = "\n".join(word for part in parts for word in _tree_words(part))
    return hashlib.blake2b(words.encode(), digest_size=8).hexdigest()


def _undefaulted(arguments: ast.arguments) -> Iterator[object]:
    """Give the parameters alone: of their defaults the values count, which the function has."""
    for name in arguments._fields:
        if name not in ("defaults", "kw_defaults"):
            yield name
            yield getattr(arguments, name)


def _tree_words(root: object) -> Iterator[str]:
    """Write a syntax tree as words, the same under every Python version. No recursion: trees are deep."""
    stack = [root]
    while stack:
        part = stack.pop()
        if isinstance(part, ast.AST):
            yield f"({type(part).__name__}"
            stack.append(")")
            for name, value in reversed(_fields(part)):
                stack += [value, name]
        elif isinstance(part, list):
            yield "["
            stack.append("]")
            stack += reversed(part)
        else:
            yield part if isinstance(part, str) else _constant(part)


def _fields(node: ast.AST) -> list[tuple[str, object]]:
    """Give what a node means: no position, nothing empty (a newer Python has more fields), no docstring."""
    if isinstance(node, ast.Constant):
        return [("value", _constant(node.value))]
    found = []
    for name, value in ast.iter_fields(node):
        if name in ("ctx", "type_comment") or value is None or value == []:
            continue
        if name == "values" and isinstance(node, ast.JoinedStr):
            value = _joined(value)
        elif name == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            value = _without_docstring(value)
        found.append((name, value))
    return found


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    match body:
        case [ast.Expr(ast.Constant(str())), *rest]:
            return rest
    return body


def _joined(values: list[ast.expr]) -> list[str | ast.expr]:
    """Put the text pieces of an f-string together, which Python versions cut at different places."""
    pieces: list[str | ast.expr] = []
    for is_text, run in itertools.groupby(values, lambda value: isinstance(value, ast.Constant)):
        if not is_text:
            pieces += run
        elif text := "".join(str(value.value) for value in run if isinstance(value, ast.Constant)):
            pieces.append(_constant(text))
    return pieces


def _constant(value: object) -> str:
    """Write a constant with its type, in ASCII: what else is printable depends on the Python version."""
    if isinstance(value, tuple):
        return f"tuple({','.join(map(_constant, value))})"
    if isinstance(value, frozenset):
        return f"frozenset({','.join(sorted(map(_constant, value)))})"
    # hex: Python refuses to write an int of thousands of digits in decimal
    return f"{type(value).__name__}:{hex(value) if type(value) is int else ascii(value)}"


# -- the definition as it is stored ---------------------------------------------------------------------


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


_RETRY = ("attempts", "delay", "backoff", "max_delay", "jitter", "give_up_after")


def _described(graph: Graph, i: int) -> dict[str, Any]:
    node = graph.nodes[i]
    told: dict[str, Any] = {"id": node.id, "type": "map" if node.for_each else "node"}
    told["function"] = describe_callable(node.fn)
    told["parents"] = [graph.ids[p] for p in graph.parents[i]]
    feeds = {
        b.parameter: _source_told(graph, b.source) for b in graph.bindings[i] if b.source.kind != "context"
    }
    if feeds:
        told["parameters"] = feeds
    if node.for_each:
        told["for_each"] = dict(node.for_each)
    told["idempotent"] = graph.idempotent if node.idempotent is None else node.idempotent
    retry = node.retry or graph.retry
    if retry != Retry():
        told["retry"] = {name: getattr(retry, name) for name in _RETRY} | {
            name: [kind.__qualname__ for kind in getattr(retry, name)] for name in ("retry_on", "never")
        }
    for option in ("concurrency", "tolerate", "timeout", "limit", "executor"):
        if getattr(node, option) is not None:
            told[option] = getattr(node, option)
    if node.trigger != "none_failed":
        told["trigger"] = node.trigger
    if not node.checkpoint:
        told["checkpoint"] = False
    if node.reconcile is not None:
        told["reconcile"] = True
    return told


def _source_told(graph: Graph, source: Source) -> str:
    if source.kind == "parent":
        return f"node {graph.ids[source.place]}"
    if source.kind == "input":
        return f"input {source.name}"
    return source.kind


def differences(before: str, after: str) -> list[str]:
    """Give what differs between two stored definitions, in words: nodes added, removed, options changed."""
    old, new = json.loads(before), json.loads(after)
    found = []
    if old["version"] != new["version"]:
        found.append(f"version {old['version']!r} is now {new['version']!r}")
    was, now = ({node["id"]: node for node in told["nodes"]} for told in (old, new))
    found += [f"node {id_} removed" for id_ in was if id_ not in now]
    found += [f"node {id_} added" for id_ in now if id_ not in was]
    for id_ in was:
        if id_ in now:
            found += _changes(id_, was[id_], now[id_])
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
    found: dict[int, str] = {}
    hashes: dict[str, str] = {}
    for node in graph.nodes:
        known = found.get(id(node.fn))
        if known is None:
            known = found[id(node.fn)] = code_hash(node.fn)
        hashes[node.id] = known
    return hashes
