"""The code hash: says whether a callable still does the same, as far as its own text shows it.

It covers

- its syntax tree: no comments, formatting, line numbers, docstring, own name or decorator lines;
- the values of its default arguments, of its closure and of `functools.partial`, as the codec packs them;
- what wraps it and what it wraps, the object behind a bound method, the state of a callable object.

What it calls by a global name is not followed: a node's `version=` is for that. The docstring of a function
that *another* function holds does count, for there are decorators that make a prompt of it.

A text is believed only if it compiles, at the place where the function says it stands, to the very code that
runs: a file edited since it was loaded gives `UNKNOWN`, not the hash of something else.
"""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import hashlib
import inspect
import json
import linecache
import sysconfig
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from dagresume.codec import pack

__all__ = ["UNKNOWN", "code_hash"]

UNKNOWN = "unknown"

_DOCUMENTED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_STANDARD_LIBRARY = (sysconfig.get_path("stdlib"), "<frozen ")


def code_hash(fn: Callable[..., Any]) -> str:
    """Give 16 hex digits that stay while the callable's own code and captured values stay, or `UNKNOWN`.

    They are the same in every process and under every supported Python. `UNKNOWN` where the source cannot be
    had (C functions, classes, `exec`, rewritten by a test runner, edited since it was loaded), is not alone
    (different lambdas on one line), or a captured value cannot be stored.
    """
    try:
        return _digest(_Parts().of_callable(fn))
    except Exception:  # ours say that something cannot be known; foreign objects raise what they like
        return UNKNOWN


def _digest(told: object) -> str:
    return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=8).hexdigest()


class _Parts:
    """What a callable consists of, as JSON."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def of_callable(self, fn: object) -> object:
        if id(fn) in self._seen:  # functions hold themselves and each other
            return self._seen[id(fn)]
        self._seen[id(fn)] = len(self._seen)
        # no isinstance: proxies pretend to be what they stand for
        if type(fn) is FunctionType:
            return self.of_function(fn)
        if type(fn) is functools.partial:
            return ["partial", self.of_callable(fn.func), self.of_value(fn.args), self.of_named(fn.keywords)]
        if type(fn) is MethodType:
            held = self.of_value if isinstance(fn.__self__, type) else self.of_state
            return ["method", self.of_callable(fn.__func__), held(fn.__self__)]
        if type(fn) is functools._lru_cache_wrapper:
            return ["cached", self.of_value(fn.__wrapped__)]
        call = getattr(type(fn), "__call__", None)  # noqa: B004 - the function itself is wanted
        if type(call) is not FunctionType:
            raise LookupError("made in C, or not callable at all")
        return ["object", self.of_callable(call), self.of_state(fn)]

    def of_function(self, fn: FunctionType) -> object:
        code = fn.__code__
        if code.co_filename.startswith(_STANDARD_LIBRARY) and "-packages" not in code.co_filename:
            # its text and its options differ between Python versions, its meaning does not
            told = ["standard", fn.__globals__["__name__"], code.co_qualname]
        else:
            told = [_text_digest(fn), self.of_value(fn.__defaults__), self.of_named(fn.__kwdefaults__ or {})]
        cells = zip(code.co_freevars, fn.__closure__ or (), strict=True)
        captured = self.of_named({name: cell.cell_contents for name, cell in cells})
        return ["function", *told, captured, self.of_value(fn.__dict__.get("__wrapped__"))]

    def of_named(self, values: Mapping[str, Any]) -> dict[str, object]:
        return {name: self.of_value(values[name]) for name in sorted(values)}

    def of_value(self, value: Any) -> object:
        kind = type(value)
        if issubclass(kind, type | ModuleType):  # a helper with a name, like those among a body's globals
            return ["named", getattr(value, "__qualname__", value.__name__)]
        if kind is BuiltinFunctionType:
            return ["builtin", value.__qualname__, self.of_value(value.__self__)]
        if kind is FunctionType:
            return ["held", inspect.cleandoc(value.__doc__ or ""), self.of_callable(value)]
        try:
            return pack(value)
        except Exception:  # beside the codec's own refusal, whatever a foreign object's methods raise
            if kind in (tuple, list):
                return [kind.__name__, *map(self.of_value, value)]
            if kind is dict and all(type(key) is str for key in value):
                return self.of_named(value)
            return self.of_callable(value)

    def of_state(self, thing: object) -> object:
        if type(thing).__new__ is not object.__new__:
            raise LookupError("it may hold more than its attributes show")
        state: Any = object.__getstate__(thing)
        in_dict, in_slots = state if type(state) is tuple else (state, None)
        attributes = {**(in_dict or {}), **(in_slots or {})}
        # the other double underscores are what functools.update_wrapper copies
        own = {k: v for k, v in attributes.items() if k == "__wrapped__" or not k.startswith("__")}
        return [type(thing).__qualname__, self.of_named(own)]


# Digests by code object: one function serves many nodes, and one factory makes many functions of one code.
# By its id, for equal ones can have different texts (their annotations).
_digests: dict[int, str | None] = {}


def _text_digest(fn: FunctionType) -> str:
    code = fn.__code__
    if id(code) not in _digests:
        _digests[id(code)] = _found_digest(code, fn.__globals__)
        weakref.finalize(code, _digests.pop, id(code), None).atexit = False
    digest = _digests[id(code)]
    if digest is None:
        raise LookupError("its source is not to be had")
    return digest


def _found_digest(loaded: CodeType, module: dict[str, Any]) -> str | None:
    linecache.checkcache(loaded.co_filename)
    # notebooks, the interactive interpreter, doctest and zip files leave their text there too
    text = "".join(linecache.getlines(loaded.co_filename, module))
    functions = _functions(text, loaded.co_flags & __future__.annotations.compiler_flag)
    here = functions.get((loaded.co_name, loaded.co_firstlineno), [])
    if loaded not in here:
        return None
    found = {_digest(list(_tree_words(tree))) for tree in here if isinstance(tree, ast.AST)}
    return found.pop() if len(found) == 1 else None


@functools.lru_cache(maxsize=16)
def _functions(text: str, future: int) -> dict[tuple[str, int], list[ast.AST | CodeType]]:
    """Give the functions of a text by name and first line, both as syntax trees and as code."""
    found = defaultdict[tuple[str, int], list[ast.AST | CodeType]](list)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the import has shown them
            tree = ast.parse(text)
            flags = future | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            codes = [compile(tree, "<source>", "exec", flags=flags, dont_inherit=True)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            found["<lambda>", node.lineno].append(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name, [*node.decorator_list, node][0].lineno].append(node)
    for code in codes:
        found[code.co_name, code.co_firstlineno].append(code)
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    return found


def _tree_words(function: ast.AST) -> Iterator[str]:
    """Write a function's syntax tree level by level, the same under every Python version.

    Each node gives its type and the names of its fields; a node in a field gives its own words further down.
    """
    todo = [_bare(function)]
    for node in todo:
        yield type(node).__name__
        for name, value in _fields(node):
            if isinstance(value, ast.AST):
                todo.append(value)
                yield name
            else:
                yield f"{name}={value!a}"


def _bare(function: Any) -> Any:
    """Give it without its name, decorators and defaults: of these the values count, which a function has."""
    bare = copy.copy(function)
    bare.args = copy.copy(function.args)
    bare.name, bare.decorator_list, bare.args.defaults, bare.args.kw_defaults = "", [], [], []
    return bare


def _fields(node: ast.AST) -> Iterator[tuple[str, object]]:
    """Give what a node means: no position, nothing absent (a newer Python has more fields), no docstring."""
    for name, value in ast.iter_fields(node):
        if name in ("ctx", "kind") or value is None:
            continue
        parts: list[Any] = value if isinstance(value, list) else [value]
        if name == "body" and isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            parts = parts[1:]
        elif isinstance(node, ast.JoinedStr):
            # letter by letter: Python versions cut the text of an f-string at different places
            parts = [x for p in parts for x in (str(p.value) if isinstance(p, ast.Constant) else [p])]
        yield from ((name, part) for part in parts)
