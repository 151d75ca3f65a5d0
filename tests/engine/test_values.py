"""Live equals resumed: what was committed is what every reader gets."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import sqlite3
import threading
from collections import deque
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import pytest

from dagresume import CheckpointLost, Context, Retry, RunInterrupted, RunStatus, Workflow
from tests.engine.kit import Boom, Calls, Home


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.0


class Pair(NamedTuple):
    left: int
    right: Point


class Colour(enum.Enum):
    RED = 1


PLAIN: list[Any] = [
    None,
    {},
    [],
    (),
    0,
    "",
    False,
    1.0,
    {"x": math.inf, "s": "[NaN]"},
    -0.0,
    {(1, 2), (3, 4)},
    frozenset({1, 2}),
    {2: "a", "2": "b", None: 1, (1, 2): 3, 1.5: 2},
    {True: 1},
    b"\x00\xff",
    "x\x00y",
    "\ud800",
    "\udcff",
    datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
    datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=5, minutes=30))),
    datetime(2026, 1, 2),  # noqa: DTZ001  # a naive one stays naive
    date(2026, 1, 2),
    time(1, 2, 3),
    timedelta(days=-1, microseconds=3),
    Decimal("1.10"),
    UUID(int=5),
    PurePosixPath("/a/b"),
    1 + 2j,
    deque([1, 2], maxlen=3),
    2**200,
    {"__dagresume__": "datetime", "v": "x"},
    {"$": "datetime", "v": 1},
    {"!": 1},
    [{"a": (1, [2, {"b": {3}}])}],
    "<script>alert(1)</script>",
]


def same(left: Any, right: Any) -> bool:
    """Equal, and of the same type all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return [*map(_sided, left)] == [*map(_sided, right)] and all(
            same(a, b) for a, b in zip(left.values(), right.values(), strict=True)
        )
    if isinstance(left, list | tuple | deque):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return math.copysign(1, left) == math.copysign(1, right) and left == right
    return bool(left == right)


def _sided(key: Any) -> tuple[type, Any]:
    return type(key), key


def passing(value: Any, broken: list[bool], seen: list[Any]) -> Workflow:
    wf = Workflow("passing")

    @wf.node
    async def a() -> Any:
        return value

    @wf.node
    async def b(a: Any) -> Any:
        seen.append(a)
        if broken:
            raise Boom
        return a

    return wf


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: ascii(value)[:40])
async def test_a_value_is_the_same_live_and_resumed(home: Home, value: Any) -> None:
    """B41, B46, B47, B49, B52, B154: equal, of the same type, for the child, the caller and later readers."""
    broken, seen = [True], list[Any]()
    wf = passing(value, broken, seen)
    first = await home.run(wf)
    broken.clear()
    result = await home.resume(wf, first.run_id)
    async with home.engine(wf) as engine:
        stored = await engine.result(first.run_id)
    for found in (*seen, first["a"], result["a"], result["b"], stored["a"], stored["b"]):
        assert same(found, value)


async def test_nan_stays_nan(home: Home) -> None:
    """B47."""
    broken, seen = [True], list[Any]()
    wf = passing({"x": math.nan}, broken, seen)
    first = await home.run(wf)
    broken.clear()
    await home.resume(wf, first.run_id)
    assert [math.isnan(each["x"]) for each in seen] == [True, True]


async def test_annotated_types_come_back_as_themselves(home: Home) -> None:
    """B41, R9: through list, dict, union; local classes too."""

    @dataclasses.dataclass
    class Local:
        points: list[Point]

    wf = Workflow("types")
    broken = [True]
    seen: list[Any] = []

    @wf.node
    async def local() -> Local:
        return Local([Point(1)])

    @wf.node
    async def mapping() -> dict[str, Pair | None]:
        return {"a": Pair(1, Point(2)), "b": None}

    @wf.node
    async def colour() -> Colour | int:
        return Colour.RED

    @wf.node
    async def child(local: Local, mapping: dict[str, Pair | None], colour: Colour, given: Point) -> None:
        seen.append((local, mapping, colour, given))
        if broken:
            raise Boom

    run_id = (await home.run(wf, {"given": Point(9)})).run_id
    broken.clear()
    await home.resume(wf, run_id)
    assert len(seen) == 2
    for found in seen:
        assert found == (Local([Point(1)]), {"a": Pair(1, Point(2)), "b": None}, Colour.RED, Point(9))
        assert type(found[0]) is Local
        assert type(found[1]["a"]) is Pair
        assert type(found[1]["a"].right) is Point


async def test_numpy_values_keep_their_types(home: Home) -> None:
    """B50: a numpy float is a float to json, and must not become one."""
    values = [
        np.float64(1.5),
        np.int64(7),
        np.bool_(True),
        np.array(3),
        np.array(["2026-01-01"], dtype="M8[D]"),
    ]
    broken, seen = [True], list[Any]()
    wf = passing(values, broken, seen)
    run_id = (await home.run(wf)).run_id
    broken.clear()
    await home.resume(wf, run_id)
    for found in seen:
        assert [type(each) for each in found] == [type(each) for each in values]
        assert all(bool(np.all(a == b)) for a, b in zip(found, values, strict=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda: (_ for _ in ()),
        lambda: threading.Lock(),
        lambda: open("/dev/null"),  # noqa: PTH123, SIM115
        lambda: lambda: 1,
        lambda: np.array([object()]),
        lambda: Exception("x"),
    ],
    ids=["generator", "lock", "file", "lambda", "object array", "exception"],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
async def test_what_cannot_be_stored_fails_its_node(
    home: Home, make: Callable[[], Any], calls: Calls
) -> None:
    """B43, B02: never pickled, never str(); children are blocked."""
    wf = Workflow("lossy", retry=Retry(3, delay=0))

    @wf.node
    async def a() -> Any:
        calls.began("a")
        return {"x": [make()]}

    calls.adder(wf)("b", "a")
    result = await home.run(wf)
    assert list(result.failures) == ["a"]
    assert "$.x[0]" in result.failures["a"].message
    assert calls == {"a": 1}
    assert result.status is RunStatus.FAILED


async def test_every_consumer_has_an_object_of_its_own(home: Home) -> None:
    """B171, C7: siblings, second attempts, the caller and later readers see the value as committed."""
    wf = Workflow("own", retry=Retry(2, delay=0))
    seen: list[list[int]] = []
    original = [3, 1, 2]
    broken = [True]

    @wf.node
    async def a() -> list[int]:
        return original

    @wf.node
    async def b(a: list[int], ctx: Context) -> list[int]:
        seen.append(list(a))
        a.sort()
        if ctx.attempt == 1:
            raise Boom
        return a

    @wf.node
    async def c(a: list[int], b: list[int]) -> None:
        seen.append(list(a))
        a.clear()
        b.clear()
        if broken:
            raise Boom

    first = await home.run(wf)
    original.append(99)
    first["a"].append(4)
    assert first["a"] == [3, 1, 2]
    broken.clear()
    result = await home.resume(wf, first.run_id)
    assert seen == [[3, 1, 2]] * 5
    assert (result["a"], result["b"]) == ([3, 1, 2], [1, 2, 3])


async def test_inputs_and_constants_are_objects_of_their_own(home: Home) -> None:
    """C7."""
    from dagresume import Value

    wf = Workflow("inputs")
    given, constant = {"x": [1]}, {"y": [1]}
    seen: list[Any] = []

    def add(name: str) -> None:
        async def body(given: dict[str, list[int]], fixed: dict[str, list[int]]) -> None:
            seen.append(json.dumps([given, fixed]))
            given["x"].append(2)
            fixed["y"].append(2)

        wf.node(id=name, args={"fixed": Value(constant)})(body)

    add("a")
    add("b")
    await home.run(wf, {"given": given})
    await home.run(wf, {"given": given})
    assert set(seen) == {'[{"x": [1]}, {"y": [1]}]'}
    assert (given, constant) == ({"x": [1]}, {"y": [1]})


async def test_the_callers_later_changes_do_not_reach_the_run(home: Home) -> None:
    wf = Workflow("later")

    @wf.node
    async def a(given: list[int]) -> list[int]:
        return given

    given = [1]
    async with home.engine() as engine:
        handle = await engine.start(wf, {"given": given})
        given.append(2)
        assert (await handle.result())[a] == [1]


# -- stored values that cannot be had -------------------------------------------------------------------


def tamper(path: Path, sql: str, *values: Any) -> None:
    with sqlite3.connect(path) as connection:
        assert connection.execute(sql, values).rowcount == 1
    connection.close()


async def half_done(home: Home, calls: Calls, text: str = "value") -> tuple[Workflow, str]:
    wf = Workflow("lost", idempotent=True)

    @wf.node
    async def a() -> str:
        calls.began("a")
        return text

    @wf.node
    async def b(a: str) -> str:
        calls.began("b")
        return a

    @wf.node
    async def other() -> int:
        calls.began("other")
        return 1

    calls.broken = {"b", "other"}
    run_id = (await home.run(wf)).run_id
    calls.mend()
    return wf, run_id


async def test_an_altered_output_stops_the_resume_before_its_reader(sqlite_home: Home, calls: Calls) -> None:
    """B40, B155: the error names run, node and reason; the unrelated branch runs; never None."""
    wf, run_id = await half_done(sqlite_home, calls)
    assert sqlite_home.path is not None
    tamper(
        sqlite_home.path,
        "UPDATE dagresume_events SET output = '\"vaLue\"' WHERE path = 'a' AND kind = 'node.completed'",
    )
    async with sqlite_home.engine(wf) as engine:
        with pytest.raises(CheckpointLost, match=rf"{run_id}.*\ba\b.*checksum") as caught:
            await engine.resume(run_id)
        assert caught.value.path == "a"
    assert calls["b"] == 0
    assert calls["other"] == 1
    # what the message offers works
    result = await sqlite_home.retry(wf, run_id, "a")
    assert result["b"] == "value"


async def test_an_output_that_is_gone_is_not_none(sqlite_home: Home, calls: Calls) -> None:
    """B40."""
    wf, run_id = await half_done(sqlite_home, calls)
    assert sqlite_home.path is not None
    tamper(
        sqlite_home.path,
        "UPDATE dagresume_events SET output = NULL WHERE path = 'a' AND kind = 'node.completed'",
    )
    async with sqlite_home.engine(wf) as engine:
        with pytest.raises(CheckpointLost, match="a"):
            await engine.resume(run_id)
        stored = await engine.result(run_id)
        with pytest.raises(CheckpointLost):
            stored["a"]
    assert calls["b"] == 0


def blobs(home: Home) -> list[Path]:
    return [path for path in Path(f"{home.path}.blobs").rglob("*") if path.is_file()]


async def test_a_spilled_output_that_is_altered_or_gone(sqlite_home: Home, calls: Calls) -> None:
    """B155."""
    wf, run_id = await half_done(sqlite_home, calls, "x" * 200_000)
    [blob] = blobs(sqlite_home)
    content = blob.read_bytes()
    for damage in (content[:-1], content.replace(b"x", b"y", 1), None):
        if damage is None:
            blob.unlink()
        else:
            blob.write_bytes(damage)
        async with sqlite_home.engine(wf) as engine:
            with pytest.raises(CheckpointLost, match=r"\ba\b"):
                await engine.resume(run_id)
        assert calls["b"] == 0
    result = await sqlite_home.retry(wf, run_id, "a")
    assert len(result["b"]) == 200_000


async def test_a_type_that_is_gone_stops_the_resume(home: Home, calls: Calls) -> None:
    """B40: never a dict where a Point was."""

    def make(annotation: Any) -> Workflow:
        wf = Workflow("types")

        async def a() -> Any:
            return Point(1)

        async def b(a: Any) -> Any:
            calls.began("b")
            return a

        a.__annotations__["return"] = annotation
        wf.node(a)
        wf.node(b)
        return wf

    calls.broken = {"b"}
    run_id = (await home.run(make(Point))).run_id
    calls.mend()
    async with home.engine(make(int)) as engine:
        with pytest.raises((CheckpointLost, RunInterrupted), match=r"\ba\b.*Point"):
            await engine.resume(run_id)
    assert not calls
    result = await home.resume(make(Point), run_id)
    assert result["a"] == Point(1)


async def test_big_outputs_lie_in_files_and_come_back(sqlite_home: Home) -> None:
    """B71, B74: map items too, under node ids that are no file names."""
    wf = Workflow("big")
    broken = [True]
    ids = ["a:b", "a.b", "a#0", "a%2Fb", " a", "节点", "CON", "nul.txt", "Node", "node", "..", "x" * 200]

    def add(name: str) -> None:
        async def body() -> str:
            return name * 2000 + "x" * 100_000

        wf.node(id=name)(body)

    for name in ids:
        add(name)

    @wf.node
    async def numbers() -> list[int]:
        return [0, 1]

    @wf.node(for_each={"n": "numbers"})
    async def item(n: int) -> str:
        return str(n) * 100_000

    @wf.node(depends_on=ids)
    async def end(item: list[str]) -> int:
        if broken:
            raise Boom
        return sum(map(len, item))

    run_id = (await sqlite_home.run(wf)).run_id
    broken.clear()
    result = await sqlite_home.resume(wf, run_id)
    for name in ids:
        assert result[name] == name * 2000 + "x" * 100_000
    assert result[end] == 200_000
    files = [path.name for path in blobs(sqlite_home)]
    assert len(files) >= len(ids)
    assert all(len(name) <= 255 and name.isascii() for name in files)
    assert sqlite_home.path is not None
    assert sqlite_home.path.stat().st_size < 10_000_000
