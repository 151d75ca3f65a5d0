"""The code hash changes with what a callable does and with nothing else."""

import __future__

import ast
import doctest
import functools
import gc
import linecache
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import pytest

from dagresume import codehash
from dagresume.codehash import UNKNOWN, code_hash
from dagresume.definition import describe_callable

Node = Callable[..., Any]


class Files:
    """Loads source texts as modules, each from a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def load(self, text: str, name: str = "node") -> Any:
        self.count += 1
        path = self.folder / f"flow{self.count}.py"
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return self.run(path)[name]

    def run(self, path: Path) -> dict[str, Any]:
        module: dict[str, Any] = {"__name__": path.stem}
        exec(compile(path.read_bytes(), str(path), "exec"), module)
        return module


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


BASE = """
async def node(path: str, limit: int = 3) -> list[str]:
    found = []
    for part in path.split("/"):
        if len(part) > limit:
            found.append(f"{part:>{limit}}")
    return found
"""

NO_CHANGE = {
    "comment": BASE.replace("found = []", "found = []  # nothing yet"),
    "blank lines": "\n\n\n" + BASE.replace("found = []", "found = []\n\n"),
    "formatting": BASE.replace('path.split("/")', "(\n        path . split('/')\n    )"),
    "docstring": BASE.replace("    found = []", '    """Find."""\n    found = []'),
    "its own name": BASE.replace("def node", "def renamed") + "\nnode = renamed",
    "a function before it": "def other():\n    return 1\n" + BASE,
    "a decorator that gives it back": "def keep(fn):\n    return fn\n\n@keep\n@keep\n" + BASE.lstrip(),
    "spelling of a number": BASE.replace("= 3", "= 0x3"),
    "spelling of a default": "THREE = 3\n" + BASE.replace("= 3", "= THREE"),
    "pieces of a string": BASE.replace('"/"', '"" "/"'),
}

CHANGE = {
    "operator": BASE.replace("> limit", ">= limit"),
    "string": BASE.replace('"/"', '":"'),
    "format": BASE.replace(":>{", ":<{"),
    "default": BASE.replace("= 3", "= 4"),
    "type of a default": BASE.replace("= 3", "= 3.0"),
    "default taken away": BASE.replace(" = 3", ""),
    "parameter": BASE.replace("limit: int", "*, limit: int"),
    "annotation": BASE.replace("path: str", "path: bytes"),
    "what it returns": BASE.replace("list[str]:", "set[str]:"),
    "statement": BASE.replace("    return found", "    found.sort()\n    return found"),
    "order": BASE.replace("path: str, limit: int = 3", "limit: int = 3, path: str = ''"),
    "not async": BASE.replace("async def", "def"),
    "called helper": BASE.replace("len(part)", "abs(part)"),
    "inner docstring is none": BASE.replace("    return found", '    "a"; return found or "a"'),
}


@pytest.mark.parametrize("text", NO_CHANGE.values(), ids=NO_CHANGE)
def test_an_edit_that_cannot_matter_keeps_the_hash(files: Files, text: str) -> None:
    assert text != BASE
    assert code_hash(files.load(text)) == code_hash(files.load(BASE)) != UNKNOWN


@pytest.mark.parametrize("text", CHANGE.values(), ids=CHANGE)
def test_an_edit_that_matters_changes_the_hash(files: Files, text: str) -> None:
    assert text != BASE
    assert UNKNOWN != code_hash(files.load(text)) != code_hash(files.load(BASE))


def test_it_is_sixteen_hex_digits(files: Files) -> None:
    digits = code_hash(files.load(BASE))
    assert len(digits) == 16
    int(digits, 16)


def test_inner_functions_and_classes_count_but_not_their_docstrings(files: Files) -> None:
    text = """
    def node():
        class Inner:
            "{0}"
            def method(self):
                "{0}"
                return {1}
        return Inner
    """
    first, documented, changed = (
        code_hash(files.load(text.format(*words))) for words in [("a", 1), ("b", 1), ("a", 2)]
    )
    assert first == documented != changed


def test_global_helpers_are_not_followed(files: Files) -> None:
    text = "def helper():\n    return {}\n\ndef node():\n    return helper()\n"
    assert code_hash(files.load(text.format(1))) == code_hash(files.load(text.format(2))) != UNKNOWN


# captures


def factory(value: object) -> Node:
    def node() -> object:
        return value

    return node


def test_captured_values_count() -> None:
    assert code_hash(factory(1)) == code_hash(factory(1)) != UNKNOWN
    assert len({code_hash(factory(value)) for value in (1, 2, True, 1.0, "1", None, [1], (1,))}) == 8


def test_a_captured_value_that_cannot_be_stored_gives_unknown() -> None:
    assert code_hash(factory(object())) == UNKNOWN
    assert code_hash(factory([1, threading.Lock()])) == UNKNOWN
    assert code_hash(factory({"lock": threading.Lock()})) == UNKNOWN


def test_a_default_that_cannot_be_stored_gives_unknown(files: Files) -> None:
    assert code_hash(files.load("def node(x=object()):\n    return x\n")) == UNKNOWN
    assert code_hash(files.load("def node(*, x=object()):\n    return x\n")) == UNKNOWN


def test_keyword_defaults_count(files: Files) -> None:
    hashes = {
        code_hash(files.load(f"def node(*, x={x}, y={y}):\n    return x, y\n")) for x, y in [(1, 2), (2, 1)]
    }
    assert len(hashes) == 2
    assert UNKNOWN not in hashes


def test_captured_functions_are_followed(files: Files) -> None:
    text = """
    def make(helper):
        def node():
            return helper()
        return node

    def one():
        return {}

    node = make(one)
    """
    assert code_hash(files.load(text.format(1))) == code_hash(files.load(text.format(1)))
    assert UNKNOWN != code_hash(files.load(text.format(1))) != code_hash(files.load(text.format(2)))


def test_captured_functions_within_lists_and_dicts_are_followed() -> None:
    one, two = factory(1), factory(2)
    assert UNKNOWN != code_hash(factory([one, two])) != code_hash(factory([two, one]))
    assert UNKNOWN != code_hash(factory({"a": one})) != code_hash(factory({"a": two}))


def test_captured_classes_modules_and_builtins_count_by_name() -> None:
    hashes = {code_hash(factory(value)) for value in (int, str, math, os, len, math.floor)}
    assert len(hashes) == 6
    assert UNKNOWN not in hashes


def test_a_builtin_method_counts_with_its_object() -> None:
    assert UNKNOWN != code_hash(factory("a".join)) != code_hash(factory("b".join))


def test_a_function_that_captures_itself_has_a_hash(files: Files) -> None:
    text = """
    def make(step):
        def node(n):
            return n and node(n - step)
        return node
    node = make({})
    """
    assert UNKNOWN != code_hash(files.load(text.format(1))) != code_hash(files.load(text.format(2)))


def test_a_list_that_holds_itself_is_unknown_or_known_but_never_an_error() -> None:
    loop: list[object] = []
    loop.append(loop)
    assert code_hash(factory(loop)) == code_hash(factory(loop))


def test_a_captured_variable_without_a_value_gives_unknown(files: Files) -> None:
    text = """
    def make():
        def node():
            return later
        if {}:
            later = 1
        return node
    node = make()
    """
    assert code_hash(files.load(text.format(False))) == UNKNOWN != code_hash(files.load(text.format(True)))


# partials, methods, objects


def add(a: int, b: object = 0, *, c: int = 0) -> object:
    return a, b, c


def test_partial_arguments_count() -> None:
    hashes = [
        code_hash(fn)
        for fn in (
            add,
            functools.partial(add),
            functools.partial(add, 1),
            functools.partial(add, 2),
            functools.partial(add, b=1),
            functools.partial(add, c=1),
            functools.partial(add, 1, c=1),
        )
    ]
    assert len(set(hashes)) == 7
    assert UNKNOWN not in hashes


def test_the_order_of_keywords_does_not_count() -> None:
    assert code_hash(functools.partial(add, b=1, c=2)) == code_hash(functools.partial(add, c=2, b=1))


def test_a_partial_of_partials_is_one_partial() -> None:
    assert code_hash(functools.partial(functools.partial(add, 1), 2)) == code_hash(
        functools.partial(add, 1, 2)
    )


def test_a_partial_argument_that_cannot_be_stored_gives_unknown() -> None:
    assert code_hash(functools.partial(add, 1, object())) == UNKNOWN


class Scorer:
    """Has a state, and is one of the things a node can be."""

    def __init__(self, weight: object) -> None:
        self.weight = weight

    def score(self, x: int) -> object:
        return x, self.weight

    def other(self, x: int) -> object:
        return x

    def __call__(self, x: int) -> object:
        return x, self.weight

    @classmethod
    def made(cls, x: int) -> object:
        return cls, x

    @staticmethod
    def plain(x: int) -> int:
        return x


class Slotted:
    __slots__ = ("__hidden", "weight")

    def __init__(self, weight: object, hidden: object) -> None:
        self.weight, self.__hidden = weight, hidden

    def __call__(self) -> object:
        return self.weight, self.__hidden


class Listed(list[int]):
    def __call__(self) -> int:
        return len(self)


def test_methods_count_with_their_object() -> None:
    assert code_hash(Scorer(1).score) == code_hash(Scorer(1).score) != UNKNOWN
    assert len({code_hash(fn) for fn in (Scorer(1).score, Scorer(2).score, Scorer(1).other, Scorer(1))}) == 4
    assert code_hash(Scorer(object()).score) == UNKNOWN


def test_class_methods_and_static_methods_have_a_hash() -> None:
    assert UNKNOWN not in {code_hash(Scorer.made), code_hash(Scorer.plain)}
    assert code_hash(Scorer.__dict__["plain"]) == UNKNOWN


def test_callable_objects_count_with_their_state() -> None:
    assert code_hash(Scorer(1)) == code_hash(Scorer(1)) != UNKNOWN
    assert code_hash(Scorer(1)) != code_hash(Scorer(2))
    assert code_hash(Scorer(object())) == UNKNOWN


def test_slots_are_state_and_private_ones_too() -> None:
    assert len({code_hash(Slotted(*state)) for state in [(1, 1), (2, 1), (1, 2)]} - {UNKNOWN}) == 3


class PartialOfOurs(functools.partial[object]):
    def __call__(self, *args: object, **kwargs: object) -> object:
        return super().__call__(*args, **kwargs)


class Named(NamedTuple):
    weight: int

    def score(self) -> int:
        return self.weight


def test_state_that_attributes_may_not_show_gives_unknown() -> None:
    assert code_hash(Listed([1])) == UNKNOWN
    assert code_hash(PartialOfOurs(add, 1)) == UNKNOWN
    assert code_hash(Named(1).score) == UNKNOWN


class Proxy:
    """Pretends to be the function it stands for, as proxies do."""

    def __init__(self, target: Node) -> None:
        self.target = target

    @property
    def __class__(self) -> type:
        return type(self.target)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        raise NotImplementedError

    def __call__(self) -> object:
        return [self.target()]


def test_a_proxy_that_pretends_to_be_a_function_counts_with_its_target() -> None:
    hashes = {code_hash(fn) for fn in (Proxy(factory(1)), Proxy(factory(2)), factory(1))}
    assert len(hashes - {UNKNOWN}) == 3


def test_captured_objects_are_not_asked_for_attributes() -> None:
    class Lazy:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError(name)

    assert code_hash(factory(Lazy())) == UNKNOWN


# wrappers

WRAPPED = """
import functools

def repeated(times):
    def decorate(fn):
        {wraps}
        def wrapper(*args):
            for _ in range(times):
                result = {call}
            return result
        return wrapper
    return decorate

@repeated({times})
def node(x):
    "{doc}"
    return x + {plus}
"""
PLAIN: dict[str, object] = {
    "wraps": "@functools.wraps(fn)",
    "call": "fn(*args)",
    "times": 2,
    "plus": 1,
    "doc": "Score it.",
}


@pytest.mark.parametrize("wraps", ["@functools.wraps(fn)", ""], ids=["wraps", "bare"])
@pytest.mark.parametrize(
    "edit", [{"times": 3}, {"plus": 2}, {"call": "fn(*args) or 0"}, {"doc": "Score it well."}], ids=str
)
def test_wrapper_and_wrapped_both_count(files: Files, edit: dict[str, object], wraps: str) -> None:
    base = PLAIN | {"wraps": wraps}
    first, same, edited = (
        code_hash(files.load(WRAPPED.format(**words))) for words in (base, base, base | edit)
    )
    assert first == same
    assert UNKNOWN not in {first, edited}
    assert first != edited


def test_what_is_wrapped_counts_even_if_the_wrapper_does_not_hold_it(files: Files) -> None:
    text = """
    import functools

    def plain():
        return {}

    @functools.wraps(plain)
    def node():
        return registry["plain"]()
    """
    assert UNKNOWN != code_hash(files.load(text.format(1))) != code_hash(files.load(text.format(2)))


def test_a_cached_function_is_followed(files: Files) -> None:
    text = "import functools\n\n@functools.lru_cache\ndef node(x):\n    return x + {}\n"
    assert UNKNOWN != code_hash(files.load(text.format(1))) != code_hash(files.load(text.format(2)))


def test_a_wrapper_from_the_standard_library_is_known_by_name(files: Files) -> None:
    text = "import contextlib\n\n@contextlib.contextmanager\ndef node():\n    yield {}\n"
    assert UNKNOWN != code_hash(files.load(text.format(1))) != code_hash(files.load(text.format(2)))


def test_functions_that_wrap_each_other_have_a_hash() -> None:
    one, two = factory(1), factory(2)
    one.__wrapped__, two.__wrapped__ = two, one  # type: ignore[attr-defined]
    assert UNKNOWN != code_hash(one) != code_hash(two)


# where the source is


def test_a_lambda_alone_on_its_line_has_a_hash(files: Files) -> None:
    fns = files.load("node = [\n    lambda x: x + 1,\n    lambda x: x + 2,\n    lambda: 3,\n]\n")
    alone = [files.load(f"node = {each}\n") for each in ("lambda x: x + 1", "lambda x: x + 2", "lambda: 3")]
    hashes = [code_hash(fn) for fn in fns]
    assert len({*hashes} - {UNKNOWN}) == 3
    assert hashes == [code_hash(fn) for fn in alone]


def test_different_lambdas_on_one_line_are_unknown(files: Files) -> None:
    fns = files.load("node = [lambda x: x + 1, lambda x: x + 2]\n")
    assert [code_hash(fn) for fn in fns] == [UNKNOWN, UNKNOWN]
    within = files.load("node = lambda: (lambda: 5)\n")
    assert [code_hash(within), code_hash(within())] == [UNKNOWN, UNKNOWN]


def test_lambdas_on_one_line_with_the_same_text_have_its_hash(files: Files) -> None:
    fns = files.load("node = [lambda x: x + 1, lambda x: x + 1]\n")
    assert {code_hash(fn) for fn in fns} == {code_hash(files.load("node = lambda x: x + 1\n"))} != {UNKNOWN}


def test_a_loop_of_lambdas_differs_by_what_they_capture(files: Files) -> None:
    fns = files.load("node = [lambda x, i=i: x + i for i in range(3)]\n")
    assert len({code_hash(fn) for fn in fns} - {UNKNOWN}) == 3


def test_what_has_no_source_is_unknown() -> None:
    made: dict[str, Any] = {}
    exec("def node():\n    return 1\n", made)
    for fn in (len, math.sqrt, "".join, int, Scorer, made["node"], functools.partial(math.pow, 2)):
        assert code_hash(fn) == UNKNOWN


@pytest.mark.parametrize(
    ("before", "flags"),
    [
        pytest.param("", 0, id="plain"),
        pytest.param("await later\n", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, id="await at the top"),
        pytest.param("", __future__.annotations.compiler_flag, id="an earlier cell's future import"),
    ],
)
def test_text_that_linecache_has_is_source_enough(before: str, flags: int) -> None:
    """As notebooks and newer interactive interpreters leave it there."""
    text, name = f"{before}def node():\n    def inner(x: a.b) -> None: ...\n    return inner\n", "<cell 1>"
    lines = text.splitlines(keepends=True)
    code = compile(text, name, "exec", flags=flags, dont_inherit=True)
    node = FunctionType(next(each for each in code.co_consts if isinstance(each, CodeType)), {})
    linecache.cache[name] = (len(text), None, lines, name)
    try:
        assert code_hash(node) != UNKNOWN
    finally:
        del linecache.cache[name]


def test_doctests_have_a_source() -> None:
    text = ">>> def node(): return 1\n>>> seen.append(code_hash(node))\n"
    seen: list[str] = []
    test = doctest.DocTestParser().get_doctest(
        text, {"code_hash": code_hash, "seen": seen}, "sample", None, 0
    )
    doctest.DocTestRunner().run(test)
    assert seen
    assert seen[0] != UNKNOWN


@pytest.mark.parametrize("change", ["return 2", "return 1 if node else 2", "pass"])
def test_a_file_edited_since_it_was_loaded_gives_unknown(files: Files, tmp_path: Path, change: str) -> None:
    node = files.load("def node():\n    return 1\n")
    (tmp_path / "flow1.py").write_text(f"def node():\n    {change}\n", encoding="utf-8")
    assert code_hash(node) == UNKNOWN


def test_a_file_that_is_gone_gives_unknown(files: Files, tmp_path: Path) -> None:
    node = files.load("def node():\n    return 1\n")
    (tmp_path / "flow1.py").unlink()
    assert code_hash(node) == UNKNOWN


def test_a_file_that_no_longer_parses_gives_unknown(files: Files, tmp_path: Path) -> None:
    node = files.load("def node():\n    return 1\n")
    (tmp_path / "flow1.py").write_text("def node(:\n", encoding="utf-8")
    assert code_hash(node) == UNKNOWN


BELOW = "def node(x):\n    return x + 1\n\n\ndef other():\n    return 1\n"


@pytest.mark.parametrize(
    "edit",
    [
        ("x + 1", "x - 1"),
        ("+ 1", "+ 2"),
        ("(x)", "(x, y=0)"),
        ("node(x)", "node(y)"),
        ("def node", "async def node"),
        ("return x", "yield x"),
        ("    return x", "    x += 1; return x"),
    ],
    ids=str,
)
def test_no_edit_of_a_loaded_function_goes_unseen(
    files: Files, tmp_path: Path, edit: tuple[str, str]
) -> None:
    node = files.load(BELOW)
    (tmp_path / "flow1.py").write_text(BELOW.replace(*edit), encoding="utf-8")
    assert code_hash(node) == UNKNOWN


def test_no_edit_of_what_a_loaded_function_holds_goes_unseen(files: Files, tmp_path: Path) -> None:
    text = "def node(x):\n    def inner():\n        return [lambda: (x, {})]\n    return inner\n"
    node, other = files.load(text.format(1)), files.load(text.format(1))
    (tmp_path / "flow1.py").write_text(text.format(2), encoding="utf-8")
    assert code_hash(node) == UNKNOWN != code_hash(other)


def test_an_edit_below_a_loaded_function_keeps_its_hash(files: Files, tmp_path: Path) -> None:
    node, other = files.load(BELOW), files.load(BELOW)
    (tmp_path / "flow1.py").write_text(BELOW.replace("return 1", "return 2"), encoding="utf-8")
    assert code_hash(node) == code_hash(other) != UNKNOWN


def test_an_edit_that_moved_a_loaded_function_gives_unknown(files: Files, tmp_path: Path) -> None:
    node = files.load(BELOW)
    (tmp_path / "flow1.py").write_text(f"import os\n\n\n{BELOW}", encoding="utf-8")
    assert code_hash(node) == UNKNOWN


def test_a_function_that_has_run_and_is_traced_keeps_its_hash(files: Files) -> None:
    """Running and tracing it rewrite the code in place: quicker instructions, hooks."""
    text = """
    def node(x):
        t = 0
        for i in range(x):
            t += i if i % 2 else len([i])
        return t
    """
    node, before = files.load(text), code_hash(files.load(text))
    tracer = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        for _ in range(100):
            node(10)
        assert code_hash(node) == before != UNKNOWN
    finally:
        sys.settrace(tracer)


def test_a_reloaded_file_has_the_hash_of_its_new_text(files: Files, tmp_path: Path) -> None:
    before = code_hash(files.load("def node():\n    return 1\n"))
    (tmp_path / "flow1.py").write_text("def node():\n    return 12\n", encoding="utf-8")
    assert UNKNOWN != code_hash(files.run(tmp_path / "flow1.py")["node"]) != before


def asserting(x: int) -> int:
    assert x > 1, "the test runner has rewritten this function"
    return x


def test_a_function_that_a_test_runner_rewrote_is_unknown(files: Files) -> None:
    text = """
    def node(x: int) -> int:
        assert x > 1, "nobody has rewritten this function"
        return x
    """
    assert code_hash(asserting) == UNKNOWN != code_hash(files.load(text))


def test_a_declared_encoding_is_read(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "latin.py"
    path.write_bytes("# -*- coding: latin-1 -*-\ndef node():\n    return 'é'\n".encode("latin-1"))
    assert (
        code_hash(files.run(path)["node"])
        == code_hash(files.load("def node():\n    return 'é'\n"))
        != UNKNOWN
    )


def test_a_deep_expression_has_a_hash(files: Files) -> None:
    assert code_hash(files.load(f"def node(x):\n    return {' + '.join(['x'] * 500)}\n")) != UNKNOWN


def test_where_a_missing_thing_stands_counts(files: Files) -> None:
    """`**a` has no key, a keyword-only parameter may have no default: their places are told."""
    for first, second in [
        ("{**a, 'k': b}", "{'k': a, **b}"),
        ("(lambda *, c=1, d: c)", "(lambda *, c, d=1: c)"),
        ("x[a:]", "x[:a]"),
        ("f'{a}b'", "f'{a!r}b'"),
        ("f'{a}b'", "f'b{a}'"),
        ("None", "..."),
    ]:
        hashes = {
            code_hash(files.load(f"def node(a, b, x):\n    return {text}\n")) for text in (first, second)
        }
        assert len(hashes - {UNKNOWN}) == 2


# across processes and versions

ZOO = r'''
import contextlib
import functools
import shutil

def repeated(times):
    def decorate(fn):
        @functools.wraps(fn)
        async def wrapper(*args):
            return [await fn(*args) for _ in range(times)]
        return wrapper
    return decorate

@repeated(3)
async def scored(path: str, *, limit: int = 3, sep="\u00e9") -> "list[str]":
    """Score.

    More.
    """
    async with path as p, limit:
        match p:
            case {"a": [1, *rest], **others} if rest:
                return "\U0001fae8" f"{p:>{limit}}" f"{p!r:{{}}}{others=}" "x" f"{p:}"
            case str() | None:
                return {1, 2, "three", 4.5, 6j, b"7", ..., True}
    try:
        x: int = 2**64 + 0xFF_FF
        del x
    except* (ValueError, KeyError) as group:
        raise RuntimeError from group
    return [y async for y in p if (z := y) in {1, 2, 3} and -z < 1e400 < "\ud800"]

@contextlib.asynccontextmanager
async def opened(path):
    yield path

def make(value):
    def inner(x, /, y=(1, 2)):
        class C(dict, metaclass=type):
            "doc"
            a: int
            @property
            def b(self):
                return lambda *a, **k: (value, a, k, self, x, y)
        return C
    return inner

class Callable:
    def __init__(self): self.names = frozenset({"a", "b", "c"})
    def __call__(self, x): return x[1:2, ::3]

ZOO = [scored, opened, make({"a": [1]}), functools.partial(make(2.5), 1, y="z"), Callable()]
ZOO += [
    lambda x: x,
    lambda: 7,
    functools.partial(shutil.rmtree, "here"),
]
'''

CHILD = """
import sys
from dagresume.codehash import code_hash
module = {"__name__": "zoo"}
exec(compile(open(sys.argv[1], "rb").read(), sys.argv[1], "exec"), module)
print(*map(code_hash, module["ZOO"]))
"""


def hashes_in(python: str, zoo: Path, **environment: str) -> list[str]:
    root = Path(codehash.__file__).parents[1]
    paths = os.pathsep.join([str(root), sysconfig.get_path("purelib")])
    child = subprocess.run(
        [python, "-c", CHILD, str(zoo)],
        env=os.environ | {"PYTHONPATH": paths} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return child.stdout.split()


def interpreter(version: str) -> str:
    found = shutil.which(f"python{version}")
    if found is None or subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode:
        pytest.skip(f"no python{version} here")
    return found


@pytest.fixture
def zoo(files: Files) -> tuple[Path, list[str]]:
    fns = files.load(ZOO, "ZOO")
    return files.folder / "flow1.py", [code_hash(fn) for fn in fns]


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_another_process_gives_the_same(zoo: tuple[Path, list[str]], seed: str) -> None:
    path, here = zoo
    assert len(set(here) - {UNKNOWN}) == 8
    assert hashes_in(sys.executable, path, PYTHONHASHSEED=seed) == here


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_another_python_gives_the_same(zoo: tuple[Path, list[str]], version: str) -> None:
    path, here = zoo
    assert hashes_in(interpreter(version), path) == here


def test_switched_off_positions_change_nothing_but_what_they_hide(zoo: tuple[Path, list[str]]) -> None:
    path, here = zoo
    there = hashes_in(sys.executable, path, PYTHONNODEBUGRANGES="1")
    assert there == here


# cost


def test_twenty_thousand_nodes_of_one_factory_read_their_file_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fns = [factory(i) for i in range(20_000)]
    reads = 0
    original = linecache.getlines

    def counted(name: str, module: dict[str, Any] | None = None) -> list[str]:
        nonlocal reads
        reads += 1
        return original(name, module)

    monkeypatch.setattr(linecache, "getlines", counted)
    begun = time.perf_counter()
    hashes = {code_hash(fn) for fn in fns}
    seconds = time.perf_counter() - begun
    assert len(hashes) == 20_000
    assert reads <= 1
    assert seconds < 2


def test_five_thousand_lambdas_of_one_file_take_no_quadratic_time(files: Files) -> None:
    lines = "".join(f"    lambda x: x + {i % 10},\n" for i in range(5_000))
    fns = files.load(f"node = [\n{lines}]\n")
    begun = time.perf_counter()
    assert len({code_hash(fn) for fn in fns}) == 10
    assert time.perf_counter() - begun < 5


def test_code_that_is_gone_is_forgotten(files: Files) -> None:
    node = files.load(BASE)
    code_hash(node)
    gc.collect()
    before = len(codehash._digests)
    del node
    gc.collect()
    assert len(codehash._digests) < before


# names for people


def test_describe_callable_names_what_people_know() -> None:
    here = __name__
    assert describe_callable(add) == f"{here}:add"
    assert describe_callable(functools.partial(functools.partial(add, 1), 2)) == f"{here}:add"
    assert describe_callable(Scorer(1).score) == f"{here}:Scorer.score"
    assert describe_callable(Scorer(1)) == f"{here}:Scorer"
    assert describe_callable(Scorer) == f"{here}:Scorer"
    assert describe_callable(factory(1)) == f"{here}:factory.<locals>.node"
    assert describe_callable(len) == "builtins:len"
    assert describe_callable("".join) == "builtins:str.join"
