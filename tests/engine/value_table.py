"""Every kind of value in every place, through one process and the next: a program for `test_value_table`.

    python value_table.py DATABASE SIDE_FILE first|second

The first process runs until `end` fails, the second one resumes. What each consumer saw goes to a side file.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import math
import sys
import uuid
from collections import deque
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import attrs
import msgspec
import numpy as np
import pydantic

from dagresume import Engine, Workflow

SIDE, PHASE = Path(sys.argv[2]), sys.argv[3]


@dataclass(frozen=True)
class Box:
    inside: Any


class Point(NamedTuple):
    x: int
    y: int


@attrs.frozen
class Attr:
    n: int


class Model(pydantic.BaseModel):
    n: int = 1


class Struct(msgspec.Struct, frozen=True):
    n: int


class Colour(Enum):
    RED = "r"


Known = Box | Point | Attr | Model | Struct | Colour
VALUES: dict[str, Any] = {
    "None": None,
    "bool": True,
    "str": "ü\x00節",
    "lone surrogate": "a\ud800b",
    "int": 10**30,
    "any-size int": 7 * 10**5000,
    "float": -0.0,
    "NaN": math.nan,
    "inf": -math.inf,
    "list": [1, [2]],
    "dict": {"a": {"b": 1}},
    "own tag": {"$dr": "tuple", "v": [1]},
    "non-string keys": {1: "a", "1": "b", None: 2, (1, 2): 3},
    "tuple": (1, (2, 3)),
    "set": {(1, 2), (3, 4)},
    "frozenset": frozenset({1, 2}),
    "bytes": b"\x00\xff",
    "datetime": dt.datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
    "date": dt.date(2026, 1, 1),
    "time": dt.time(1, 2, 3, 4),
    "timedelta": dt.timedelta(days=-1, microseconds=1),
    "Decimal": Decimal("1.10"),
    "UUID": uuid.UUID(int=5),
    "Path": Path("a/b"),
    "complex": 1 + 2j,
    "deque": deque([1, 2], maxlen=3),
    "dataclass": Box(inside=(1,)),
    "NamedTuple": Point(1, 2),
    "attrs": Attr(3),
    "pydantic": Model(n=4),
    "msgspec": Struct(5),
    "Enum": Colour.RED,
    "numpy scalar": np.float64(1.5),
    "numpy array": np.array([[1, 2], [3, 4]], dtype="int16"),
}
UNHASHABLE = {"list", "dict", "own tag", "non-string keys", "set", "deque", "numpy array", "pydantic"}
wf = Workflow("values", idempotent=True)


def tell(place: str, kind: str, value: Any) -> None:
    write(PHASE, place, kind, value)


def write(phase: str, place: str, kind: str, value: Any) -> None:
    with SIDE.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{phase}\t{place}\t{kind}\t{hash_of(value)!r}\n")


def hash_of(value: Any) -> str:
    """Give a text that tells any two of these values apart, by type too."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.tolist()}"
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__} {sorted(map(hash_of, value))}"
    if isinstance(value, Box):
        return f"Box {hash_of(value.inside)}"
    if isinstance(value, list | tuple | deque):
        return f"{type(value).__name__} {[hash_of(each) for each in value]} {getattr(value, 'maxlen', '')}"
    if isinstance(value, dict):
        return f"dict {[(hash_of(k), hash_of(v)) for k, v in value.items()]}"
    if isinstance(value, int) and value > 10**100:
        return f"int {value % (10**9 + 7)} {value.bit_length()}"
    return f"{type(value).__qualname__} {value!r} {getattr(value, 'fold', '')} {getattr(value, 'tzinfo', '')}"


def declare() -> None:
    for number, (kind, value) in enumerate(VALUES.items()):
        add(number, kind, value)

    @wf.node(depends_on=[f"see{n}" for n in range(len(VALUES))])
    async def end() -> int:
        if PHASE == "first":
            raise ValueError("the first process ends here")
        return 1

    for number, kind in enumerate(VALUES):
        late(number, kind)


def add(number: int, kind: str, value: Any) -> None:
    async def give() -> dict[str, Known] | Any:
        keyed = {} if kind in UNHASHABLE else {value: 1}
        return {"top": value, "list": [value], "dict": {"k": value}, "key": keyed, "field": Box(value)}

    async def top() -> Known | Any:
        return value

    async def each() -> list[Known]:
        return [value, value]

    async def item(x: Any) -> list[Known] | Any:
        tell("map item", kind, x)
        return x

    async def see(t: Any, g: Any) -> None:
        seen(kind, t, g)

    wf.node(id=f"give{number}")(give)
    wf.node(id=f"top{number}")(top)
    wf.node(id=f"each{number}")(each)
    wf.node(id=f"item{number}", for_each={"x": f"each{number}"})(item)
    wf.node(id=f"see{number}", args={"t": f"top{number}", "g": f"give{number}"})(see)


def late(number: int, kind: str) -> None:
    """A consumer that runs in the second process only, and one of the run input."""

    async def again(t: Any, g: Any, m: Any) -> None:
        seen(kind, t, g)
        tell("map item", kind, m[0])
        tell("map item", kind, m[1])

    async def given(inputs: dict[str, Known]) -> None:
        tell("run input", kind, inputs[kind])

    async def given_late(inputs: dict[str, Known]) -> None:
        tell("run input", kind, inputs[kind])

    parents = {"t": f"top{number}", "g": f"give{number}", "m": f"item{number}"}
    wf.node(id=f"again{number}", args=parents, depends_on=["end"])(again)
    wf.node(id=f"given{number}")(given)
    wf.node(id=f"late{number}", depends_on=["end"])(given_late)


def seen(kind: str, top: Any, parts: Any) -> None:
    tell("top level", kind, top)
    tell("in a list", kind, parts["list"][0])
    tell("dict value", kind, parts["dict"]["k"])
    tell("field", kind, parts["field"].inside)
    if parts["key"]:
        tell("dict key", kind, next(iter(parts["key"])))


async def main() -> None:
    async with Engine(sys.argv[1]) as engine:
        result = await engine.run(wf, {"inputs": VALUES}, key="k", raise_on_failure=False)
    assert list(result.failures) == (["end"] if PHASE == "first" else []), result.failures


if __name__ == "__main__":
    declare()
    if PHASE == "first":
        for kind, value in VALUES.items():
            places = ["top level", "in a list", "dict value", "field", "map item", "run input"]
            for place in places + ([] if kind in UNHASHABLE else ["dict key"]):
                write("given", place, kind, value)
    asyncio.run(main())
