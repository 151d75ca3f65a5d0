"""Whatever the codec accepts comes back equal, of the same type, and is written alike every time."""

from __future__ import annotations

import enum
import json
import math
import struct
import sys
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, timedelta, timezone
from decimal import Decimal
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import attrs
import msgspec
import numpy as np
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagresume import codec
from dagresume.errors import NotLoadable, OutputNotSerializable
from dagresume.kinds import TAGS
from dagresume.policy import ItemFailure


class Kind(enum.Enum):
    A = "a"
    B = ("b", 1)


class Bits(enum.IntFlag):
    R = 1
    W = 2
    X = 4


@dataclass(frozen=True)
class Frozen:
    key: Any
    tag: str = "$dr"


@dataclass(slots=True)
class Node:
    value: Any
    below: list[Node] = field(default_factory=list)


class Pair(NamedTuple):
    left: Any
    right: Any


@attrs.define
class Attr:
    a: Any
    _b: Any = None


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    a: Any
    b: int = 0


class Struct(msgspec.Struct, frozen=True):
    a: Any
    b: Any = msgspec.UNSET


TYPES = codec.types_of(Kind, Bits, Frozen, Node, Pair, Attr, Model, Struct)

# every code point, lone surrogates too, and what could be mistaken for a form
text = (
    st.text(st.characters())
    | st.text(st.sampled_from('"\\$dr:v\ud800\udc00\0{}[],'))
    | st.sampled_from(["$dr", "v"])
)
zones = (
    st.none()
    | st.just(UTC)
    | st.sampled_from(["Europe/Berlin", "America/St_Johns", "Asia/Kathmandu", "UTC"]).map(ZoneInfo)
    | st.timedeltas(timedelta(hours=-23), timedelta(hours=23)).map(timezone)
    | st.timedeltas(timedelta(hours=-23), timedelta(hours=23)).map(lambda offset: timezone(offset, "named"))
)
folds = st.sampled_from([0, 1])
moments = st.builds(
    lambda moment, zone, fold: moment.replace(tzinfo=zone, fold=fold),
    st.datetimes() | st.times(),
    zones,
    folds,
)
whole = st.integers() | st.integers(-5, 5).map(lambda n: n * 10**700)
numbers = st.decimals().filter(lambda number: not number.is_snan())  # such a one has no hash
scalars = (
    st.none() | st.booleans() | whole | st.floats() | st.complex_numbers() | text | st.binary() | numbers
    | st.fractions().map(lambda f: Decimal(f.numerator)) | st.uuids() | st.dates() | moments | st.timedeltas()
    | text.map(PurePosixPath) | text.map(PureWindowsPath) | st.sampled_from(list(Kind))
    | st.integers(0, 7).map(Bits)
)  # fmt: skip
numpy_scalars = (
    st.floats().map(np.float64) | st.floats(width=32).map(np.float32) | st.integers(-9, 9).map(np.int16)
    | st.booleans().map(np.bool_) | st.integers(-(2**62), 2**62).map(lambda n: np.datetime64(n, "us"))
)  # fmt: skip


def _hashable(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(inner, max_size=3).map(tuple)
        | st.frozensets(inner, max_size=3)
        | st.builds(Frozen, inner, text)
        | st.builds(Pair, inner, inner)
        | st.builds(Struct, inner)
    )


keys = st.recursive(scalars, _hashable, max_leaves=5)


def _any(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(text, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=3)
        | st.fixed_dictionaries(
            {"$dr": inner | st.sampled_from(["tuple", "obj", "pickle"])}, optional={"v": inner, "t": text}
        )
        | st.sets(keys, max_size=4)
        | st.builds(deque, st.lists(inner, max_size=3), st.none() | st.integers(3, 5))
        | st.binary().map(bytearray)
        | numpy_scalars
        | st.just(Decimal("-sNaN7"))
        | st.builds(Node, inner, st.lists(st.builds(Node, inner), max_size=2))
        | st.builds(Attr, inner, inner)
        | st.builds(
            lambda a, extras: Model(a=a, **extras),
            inner,
            st.dictionaries(st.sampled_from(["x", "$dr"]), inner),
        )
        | st.builds(ItemFailure, text, text, text)
    )


values = st.recursive(keys, _any, max_leaves=12)


def look(value: Any) -> Any:
    """The value as a tree of (type, parts): what two values must share to be the same."""
    kind = type(value)
    return kind, _parts(value, kind)


def _parts(value: Any, kind: type) -> Any:
    if issubclass(kind, dict):
        return [(look(key), look(item)) for key, item in value.items()]
    if kind in (list, tuple, deque, Pair):
        return [*map(look, value), getattr(value, "maxlen", None)]
    if kind in (set, frozenset):
        return sorted(map(look, value), key=repr)
    if kind in (Frozen, Node, Attr, ItemFailure, Struct):
        return [look(getattr(value, name)) for name in _names(kind)]
    if kind is Model:
        return [look(value.__dict__), look(value.model_extra), value.model_fields_set]
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack("d", value)
    return repr(value)  # tells fold and zone, NaN and -0.0, precision and flavour apart


def _names(kind: Any) -> list[str]:
    by_attrs = [one.name for one in getattr(kind, "__attrs_attrs__", ())]
    return by_attrs or list(getattr(kind, "__struct_fields__", ())) or list(kind.__dataclass_fields__)


@given(values)
@settings(max_examples=600, deadline=None)
def test_round_trip(value: Any) -> None:
    """B41, B46, B47, B49, B154: for every value accepted, equal and of the same type at every depth."""
    packed = codec.pack(value, TYPES)
    packed.encode()
    json.loads(packed, parse_constant=pytest.fail)
    back = codec.unpack(packed, TYPES)
    assert look(back) == look(value)
    assert codec.pack(back, TYPES) == packed
    assert look(codec.unpack(codec.canonical(value, TYPES), TYPES))[0] is type(value)
    assert codec.canonical(back, TYPES) == codec.canonical(value, TYPES)


@given(st.lists(values, max_size=4))
@settings(max_examples=100, deadline=None)
def test_many_are_the_same_as_one_by_one(several: list[Any]) -> None:
    texts = [codec.pack(value, TYPES) for value in several]
    assert look(codec.unpack_many(texts, TYPES)) == look([codec.unpack(packed, TYPES) for packed in texts])


@given(st.dictionaries(text, values, min_size=2, max_size=5), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_canonical_text_knows_no_dict_order(value: dict[str, Any], random: Any) -> None:
    items = list(value.items())
    random.shuffle(items)
    assert codec.canonical(dict(items), TYPES) == codec.canonical(value, TYPES)


@given(values, values)
@settings(max_examples=200, deadline=None)
def test_different_values_have_different_texts(a: Any, b: Any) -> None:
    if look(a) != look(b):
        assert codec.pack(a, TYPES) != codec.pack(b, TYPES)


@given(values | st.builds(object) | st.lists(st.builds(object)))
@settings(max_examples=200, deadline=None)
def test_a_picture_is_always_strict_json(value: Any) -> None:
    drawn = json.dumps(codec.plain(value), allow_nan=False, ensure_ascii=False)
    drawn.encode()


plain_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text | st.just("$dr"), inner, max_size=4),
    max_leaves=15,
)


@given(plain_json, st.sampled_from([*sorted(codec._READ), *sorted(TAGS), "obj", "enum", "pickle", "exec"]))
@settings(max_examples=400, deadline=None)
def test_a_strange_row_gives_a_value_or_not_loadable(value: Any, tag: str) -> None:
    """B152: never another error, never a value that cannot be stored again."""
    row = json.dumps({"$dr": tag, "v": value, "t": "os:system", "shape": value, "dtype": value, "x": value})
    before = set(sys.modules)
    try:
        back = codec.unpack(row, TYPES)
    except NotLoadable:
        pass
    else:
        codec.plain(back)
    fresh = {name.partition(".")[0] for name in set(sys.modules) - before}
    helpers = {"_strptime", "dagresume", "encodings", "importlib", "numpy", "tzdata", "zoneinfo"}
    assert fresh <= helpers  # none by a name in the row


@given(
    st.recursive(
        st.just(object()) | scalars,
        lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=9), inner),
    )
)
@settings(max_examples=100, deadline=None)
def test_a_refusal_names_a_place_that_is_there(value: Any) -> None:
    try:
        codec.pack(value, TYPES)
    except OutputNotSerializable as refused:
        found = value
        for step in _steps(refused.place):
            found = found[step]
        assert type(found) is object


def _steps(place: str) -> list[Any]:
    """Read a place as Python would: `.name` and `[…]`."""
    steps: list[Any] = []
    rest = place[1:]
    while rest:
        if rest[0] == ".":
            name = rest[1:].split(".")[0].split("[")[0]
            steps.append(name)
            rest = rest[1 + len(name) :]
        else:
            step, end = json.JSONDecoder().raw_decode(rest, 1)
            steps.append(step)
            rest = rest[end + 1 :]
    return steps
