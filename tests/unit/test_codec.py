"""What the codec promises: the same value and type, or a refusal that says where, what and what to do."""

from __future__ import annotations

import enum
import json
import math
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass, field, fields, make_dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from functools import cached_property
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import MappingProxyType, SimpleNamespace
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, TypedDict, TypeVar, Union
from uuid import UUID, uuid1
from zoneinfo import ZoneInfo

import attrs
import msgspec
import numpy as np
import pydantic
import pytest

from dagresume import codec
from dagresume.errors import DefinitionError, NotLoadable, OutputNotSerializable
from dagresume.policy import ItemFailure

ROOT = Path(__file__).parents[2]
T = TypeVar("T")


class Color(enum.Enum):
    RED = "r"
    CRIMSON = "r"  # noqa: PIE796  an alias of RED
    BLUE = ("b", 2)


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    YES = "yes"


class Right(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


class Bits(enum.IntFlag):
    A = 1
    B = 2


@dataclass
class Point:
    x: int
    y: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slotted:
    name: str
    tags: tuple[str, ...] = ()


@dataclass
class Counted:
    """`__post_init__` doubles: run a second time, it would double again."""

    raw: int
    start: InitVar[int] = 1
    doubled: int = field(init=False)

    def __post_init__(self, start: int) -> None:
        self.doubled = self.raw * 2 + start
        self.note = "beside the fields"

    @cached_property
    def costly(self) -> object:
        return object()


@dataclass
class Private:
    __slots__ = ("__hidden", "beside")
    beside: int

    def hide(self, value: int) -> Private:
        self.__hidden = value
        return self

    def hidden(self) -> int:
        return self.__hidden


@dataclass
class Box(Generic[T]):
    content: T


@dataclass
class Tree:
    value: int
    children: list[Tree] = field(default_factory=list)
    color: Color | None = None


class Pair(NamedTuple):
    left: Any
    right: Any = 0


Plain = namedtuple("Plain", "a b")


@attrs.define
class Attr:
    a: int
    _b: str = "b"


@attrs.define(frozen=True, cache_hash=True, slots=False)
class Hashed:
    text: str


@attrs.frozen(cache_hash=True)
class HashedSlots:
    text: str


class Inner(pydantic.BaseModel):
    n: int = 0


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    a: int
    b: str | None = None
    inner: Inner | None = None
    _secret: int = pydantic.PrivateAttr(default=1)

    @pydantic.model_validator(mode="after")
    def shout(self) -> Model:
        if self.a < 0:
            raise ValueError("validated again")
        return self


def model(**extras: Any) -> Model:
    return Model(a=1, **extras)


class Root(pydantic.RootModel[list[int]]):
    pass


class Wrap(pydantic.BaseModel, Generic[T]):
    item: T


class Struct(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    first_name: str
    note: str | msgspec.UnsetType = msgspec.UNSET


class Doubling(msgspec.Struct):
    n: int

    def __post_init__(self) -> None:
        self.n *= 2


TYPES = codec.types_of(
    Color, Level, Word, Right, Bits, Point, Slotted, Counted, Private, Box, Tree, Pair, Plain, Attr, Hashed,
    HashedSlots, Inner, Model, Root, Wrap[int], Struct, Doubling,
)  # fmt: skip


def same(a: Any, b: Any) -> bool:
    """Equal value and equal type, all the way down; NaN equals NaN, 0.0 is not -0.0, order counts."""
    return type(a) is type(b) and look(a) == look(b)


def look(value: Any) -> Any:
    """What tells a value from all others, in types whose equality can be trusted."""
    kind = type(value)
    if issubclass(kind, dict):
        parts: Any = [(look(key), look(item)) for key, item in value.items()]
        parts.append(look(getattr(value, "default_factory", None)))
    elif issubclass(kind, list | tuple | deque):
        parts = [look(item) for item in value]
        parts.append(getattr(value, "maxlen", None))
    elif issubclass(kind, set | frozenset):
        parts = sorted((look(item) for item in value), key=repr)
    elif kind in (Point, Box, Slotted, Tree):
        parts = [look(getattr(value, one.name)) for one in fields(value)]
    elif kind in (float, complex, Decimal, datetime, time):
        parts = repr(value)  # tells zones, fold, -0.0 and NaN apart
    else:
        parts = value
    return (kind, parts)


def again(value: Any, types: codec.Types = TYPES) -> Any:
    text = codec.pack(value, types)
    text.encode()  # every store takes it
    json.loads(text, parse_constant=pytest.fail)  # JSON to the letter: no NaN, no Infinity
    return codec.unpack(text, types)


# -- plain data and tagged forms ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        1.5,
        "",
        "é 节点 😀",
        [],
        {},
        {"a": [1, {"b": None}], "": "$dr"},
        "x\0y",
        "\x1f\u2028",
        -0.0,
    ],
)
def test_plain_data_is_ordinary_json(value: Any) -> None:
    """B46, B52: what JSON can say is said in plain JSON, unescaped, compact, and comes back."""
    assert codec.pack(value) == json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert same(again(value, codec.EMPTY), value)


def test_plain_data_of_a_reader_of_json_text_with_space() -> None:
    assert codec.unpack(' { "a" : [ 1 , 2 ] } \n') == {"a": [1, 2]}


TAGGED: list[Any] = [
    (), (1, (2, [3])), {1, "1", (2,)}, {True, 2}, frozenset({frozenset(), None}), b"\0\xff", bytearray(b"ab"),
    deque([1, (2,)], maxlen=3), deque(), 1 + 2j, complex(-0.0, math.inf),
    Decimal("1.10"), Decimal("-0"), Decimal("sNaN12"), Decimal("Infinity"), Decimal("1e-999999"),
    UUID(int=5), Path("a/b"), Path(), PurePosixPath("/x"), PureWindowsPath("c:\\x"), Path("\udcff/é"),
    date(1, 1, 1), date(9999, 12, 31), timedelta(-1, 3, 5), timedelta.max, timedelta.min,
    time(1, 2, 3, 4), time(1, 2, fold=1),
    time(1, tzinfo=UTC, fold=1), time(2, tzinfo=timezone(timedelta(0), "Z")),
    time(5, tzinfo=UTC), time(5, tzinfo=ZoneInfo("Europe/Berlin")),
    datetime(2026, 1, 2, 3), datetime.min, datetime.max, datetime(2026, 1, 2, tzinfo=UTC),  # noqa: DTZ001, DTZ901
    datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
    datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=0),
    datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=-5, seconds=7, microseconds=9))),
    datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=1), "CET\ud800")),
    time(0, tzinfo=timezone(timedelta(microseconds=1))),
    time(0, tzinfo=timezone(-timedelta(microseconds=1), "n")),
    math.nan, math.inf, -math.inf, {"x": math.nan, "s": "[NaN]"},
    10**700, -(10**5000), 7**6000, {"big": [10**4500]},
    "\ud800", "\udcff", "\ud800\udc00", "back\\slash\udfff\n\"'", {"\udc80": 1}, {"a": "\ud800"},
    {1: "a", "1": "b"}, {None: 1, True: 2, 1.5: 3, (1, 2): 4, b"k": 5, "z": 6}, {Color.RED: 1, Level.LOW: 2},
    {Word.YES: 1}, {np.str_("a"): 1}, {"b": 1, 2: 1, "a": 1}, {math.inf: 1},
    {frozenset({1, (2,)}): {"in": {3: 4}}},
    ItemFailure("a[1]", "ValueError", "no"), [{"plain": 1}, (1,), {"plain": 2}],
]  # fmt: skip


@pytest.mark.parametrize("value", TAGGED, ids=lambda value: type(value).__name__)
def test_every_form_comes_back_as_itself(value: Any) -> None:
    """B41, B46, B47, B49: equal value and type, recursively."""
    assert same(again(value), value)
    assert same(again({"deep": [value, (value,)]}), {"deep": [value, (value,)]})


@pytest.mark.parametrize(
    "value",
    [
        {"$dr": "datetime", "v": "x"},
        {"$dr": "tuple", "v": [1]},
        {"$dr": None},
        {"$dr": {"$dr": {"$dr": "dict", "v": [["$dr", 1]]}}},
        {"a": [{"$dr": "pickle", "v": "gASVCgAAAA=="}], "b": {"$dr": "obj", "t": "os:system", "v": {}}},
        {"__type__": "os.system", "args": ["touch pwned"]},
        {'x"$dr': 1, '"$dr":': '"$dr":', "$dr": 2},
        '{"$dr":"tuple","v":[]}',
        {"$dr": (1,)},
    ],
)
def test_user_data_that_looks_like_a_form_comes_back_identical(value: Any) -> None:
    """B152, B154: nested too, and inside other forms."""
    assert same(again(value), value)
    assert same(again((value, {1: value})), (value, {1: value}))


def test_each_reader_gets_an_object_of_its_own() -> None:
    """B171: what one reader does to its value, no other sees."""
    text = codec.pack({"a": [1, {2}], "p": Point(1, [2])}, TYPES)
    first, second = codec.unpack(text, TYPES), codec.unpack(text, TYPES)
    first["a"][1].add(3)
    first["p"].y.append(4)
    assert second == {"a": [1, {2}], "p": Point(1, [2])}


def test_integers_survive_a_reader_with_a_lower_digit_limit() -> None:
    value = [10**4000, {"n": 10**660}]
    text = codec.pack(value)
    before = sys.get_int_max_str_digits()
    try:
        sys.set_int_max_str_digits(640)
        assert codec.unpack(text) == value
        assert codec.unpack(codec.pack(value)) == value
    finally:
        sys.set_int_max_str_digits(before)


def test_sql_can_look_inside() -> None:
    text = codec.pack([Point(1, {"k": 2})], TYPES)
    assert json.loads(text)[0]["v"] == {"x": 1, "y": {"k": 2}}
    assert json.loads(codec.pack(datetime(2026, 1, 2, tzinfo=UTC)))["v"] == "2026-01-02T00:00:00+00:00"


# -- objects --------------------------------------------------------------------------------------------

OBJECTS: list[Any] = [
    Color.RED, Color.CRIMSON, Color.BLUE, Level.LOW, Word.YES, Right.READ, Right.READ | Right.WRITE, Right(0),
    Bits.A | Bits.B, Bits(8) | Bits.A, {Color.RED: [Level.LOW]},
    Point(1, (2, {3})), Slotted(name="n", tags=("a",)), Tree(1, [Tree(2, color=Color.BLUE)]), Box(Point(1)),
    Pair(1, (2,)), Plain({1}, None), Attr(1, "c"), Hashed("t"), HashedSlots("t"),
    Inner(), Inner(n=0), Model(a=1), Model(a=1, b=None), model(more=(1, 2)), Model(a=1, inner=Inner(n=2)),
    Root([1, 2]), Wrap[int](item=3), Struct(first_name="f"), Struct(first_name="f", note=""), msgspec.UNSET,
    {Slotted(name="k"), Pair(1, 2)},
]  # fmt: skip


@pytest.mark.parametrize("value", OBJECTS, ids=repr)
def test_objects_come_back_as_themselves(value: Any) -> None:
    """B41, and hash, where they have one: they may be keys."""
    back = again(value)
    assert same(back, value)
    assert same(again([{"v": (value,)}]), [{"v": (value,)}])
    if type(value).__hash__ is not None and not isinstance(value, dict | set):
        try:
            expected = hash(value)
        except TypeError:
            return
        assert hash(again(value)) == expected


def test_dataclass_state_is_kept_and_post_init_does_not_run_again() -> None:
    value = Counted(3, start=5)
    assert value.costly  # cached: not state, made anew on demand
    back = again(value)
    assert vars(back) == {"raw": 3, "doubled": 11, "note": "beside the fields"}
    assert again(Private(1).hide(2)).hidden() == 2


def test_typing_leaves_no_trace() -> None:
    box = Box[int](1)
    assert vars(again(box)) == {"content": 1}


def test_a_cached_hash_is_not_carried_into_another_process() -> None:
    for value in (Hashed("t"), HashedSlots("t")):
        fresh = codec.pack(value, TYPES)
        hash(value)
        assert codec.pack(value, TYPES) == fresh


def test_pydantic_keeps_what_was_set_extras_and_private_and_does_not_validate_again() -> None:
    value = model(extra_one=[Pair(1, 2)])
    value._secret = 7
    value.__dict__["a"] = -5  # would not pass the validator
    back = again(value)
    assert back == value
    assert back.model_fields_set == {"a", "extra_one"}
    assert back.model_extra == {"extra_one": [Pair(1, 2)]}
    assert back._secret == 7
    assert again(Model(a=1, b=None)).model_fields_set == {"a", "b"}


def test_msgspec_fields_are_as_stored_although_post_init_runs() -> None:
    assert again(Doubling(2)).n == 4


def test_only_named_classes_are_stored() -> None:
    advice = r"\$\.items\[1\] is .*Point.*-> Point.*register\(Point\)"
    with pytest.raises(OutputNotSerializable, match=advice) as info:
        codec.pack({"items": [1, Point(1)]})
    assert (info.value.node, info.value.place) == (None, "$.items[1]")
    assert info.value.type_name.endswith(".Point")
    with pytest.raises(OutputNotSerializable, match=r"\$\.y\[0\]\.content\.keys\(\)\[1\]"):
        codec.pack(Point(1, [Box({1: 2, Color.RED: 3})]), codec.types_of(Point, Box))


def local(n: int) -> Any:
    @dataclass
    class Local:
        value: int
        other: Nested | None = None

    @dataclass
    class Nested:
        word: str

    return Local(n, Nested("w")), codec.types_of(list[Local], Nested)


def test_local_classes_come_back_as_the_class_the_annotation_names() -> None:
    value, types = local(1)
    text = codec.pack([value], types)
    assert codec.unpack(text, types) == [value]
    _, types_of_next_process = local(2)
    back = codec.unpack(text, types_of_next_process)[0]
    assert type(back) is types_of_next_process[next(name for name in types if name.endswith("Local"))]
    with pytest.raises(OutputNotSerializable, match="Another class of that name"):
        codec.pack(value, types_of_next_process)


# -- what is refused ------------------------------------------------------------------------------------


class ListPlus(list[int]):
    pass


class Zone(tzinfo):
    def utcoffset(self, moment: datetime | None, /) -> timedelta:
        return timedelta(0)

    def dst(self, moment: datetime | None, /) -> None:
        return None

    def tzname(self, moment: datetime | None, /) -> str:
        return "mine"


@dataclass
class Mapped(dict[str, int]):
    a: int


@dataclass
class Late:
    later: str = field(init=False)


class Ghost(enum.Enum):
    A = 1

    @classmethod
    def _missing_(cls, value: object) -> Any:
        ghost: Any = object.__new__(cls)
        ghost._name_, ghost._value_ = "B", value
        return ghost


class Frame:
    __module__ = "pandas.core.frame"


async def coroutine() -> None: ...


def generator() -> Iterator[int]:
    yield 1


def unawaited() -> Any:
    made = coroutine()
    made.close()
    return made


OVERLAPPING = np.dtype({"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [0, 2]})
REFUSED: list[tuple[Callable[[], Any], str, str]] = [
    (object, "object", "Return plain data"),
    (lambda: ListPlus([1]), "ListPlus", "subclass of list"),
    (lambda: type("S", (str,), {})("s"), "S", "subclass of str"),
    (lambda: type("D", (datetime,), {})(2026, 1, 1), "D", "subclass of datetime"),
    (lambda: datetime(2026, 1, 1, tzinfo=Zone()), "datetime", "Zone: use zoneinfo.ZoneInfo"),
    (lambda: Mapped(1), "Mapped", "subclass of dict"),
    (lambda: Ghost("?"), "Ghost", "members"),
    (lambda: lambda: 1, "function", "Return what it makes"),
    (lambda: int, "type", "Return what it makes"),
    (generator, "generator", "list(…)"),
    (lambda: map(str, [1]), "map", "list(…)"),
    (lambda: {"a": 1}.keys(), "dict_keys", "list(…)"),
    (unawaited, "coroutine", "await"),
    (lambda: ValueError("x"), "ValueError", "str(error)"),
    (lambda: MappingProxyType({}), "mappingproxy", "dict(…)"),
    (lambda: defaultdict(list), "defaultdict", "subclass of dict"),
    (lambda: OrderedDict(a=1), "OrderedDict", "subclass of dict"),
    (lambda: Counter("ab"), "Counter", "subclass of dict"),
    (lambda: range(3), "range", "list(…)"),
    (lambda: Model.model_construct(b="x"), "Model", "field 'a' was never set"),
    (lambda: Late(), "Late", "field 'later' was never set"),
    (lambda: ZoneInfo("UTC"), "ZoneInfo", "Return plain data"),
    (lambda: sys.stdout, "", "content or its path"),
    (lambda: slice(1), "slice", "Return plain data"),
    (lambda: ..., "ellipsis", "Return plain data"),
    (lambda: memoryview(b""), "memoryview", "Return plain data"),
    (Frame, "Frame", "ctx.artifacts"),
    (lambda: SimpleNamespace(a=1), "SimpleNamespace", "Return plain data"),
    (lambda: sys.version_info, "version_info", "subclass of tuple"),
    (lambda: np.array([object()]), "ndarray", "tolist()"),
    (lambda: np.array(["a"], dtype=np.dtypes.StringDType()), "ndarray", "convert it"),
    (lambda: np.array([1], np.longdouble), "ndarray", "convert it"),
    (lambda: np.zeros(1, np.dtype((np.record, [("a", "i4")]))), "ndarray", "convert it"),
    (lambda: np.zeros(1, OVERLAPPING), "ndarray", "convert it"),
    (lambda: np.longdouble(1), "longdouble", "Return plain data"),
    (lambda: np.ma.masked_array([1]), "MaskedArray", "subclass of ndarray"),
    (lambda: np.rec.array([(1,)], dtype=[("a", "i4")]), "recarray", "subclass of ndarray"),
]


@pytest.mark.parametrize(
    ("make", "name", "advice"), REFUSED, ids=[name or "stdout" for _, name, _ in REFUSED]
)
@pytest.mark.parametrize("registered", [False, True])
def test_what_would_not_come_back_is_refused_with_place_type_and_advice(
    make: Callable[[], Any], name: str, advice: str, registered: bool
) -> None:
    """B41, B43, B50: never flattened, never str(), never pickled."""
    value = make()
    named = {"Mapped": Mapped, "Ghost": Ghost, "Late": Late, "Model": Model}
    types = codec.types_of(named.get(name)) if registered else codec.EMPTY
    if name in {"Ghost", "Late", "Model"} and not registered:
        advice = f"-> {name}"
    for wrapped, place in ((value, "$"), ({"a b": [(value,)]}, '$["a b"][0][0]'), ([{3: value}], "$[0][3]")):
        with pytest.raises(OutputNotSerializable) as info:
            codec.pack(wrapped, types)
        assert info.value.place == place
        assert name in info.value.type_name
        assert advice in info.value.reason
        assert "\n" not in str(info.value)


def test_refusals_inside_a_set_and_a_key_say_so() -> None:
    places = [({"t": {object}}, "$.t{…}"), ({(1, object): 1}, "$.keys()[0][1]"), ({"é": [object]}, "$.é[0]")]
    for value, place in places:
        with pytest.raises(OutputNotSerializable) as info:
            codec.pack(value)
        assert info.value.place == place


def nested(depth: int, wrap: Callable[[Any], Any]) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


WRAPS: list[Callable[[Any], Any]] = [
    lambda v: [v], lambda v: {"a": v}, lambda v: (v,), lambda v: {1: v}, lambda v: Point(0, v),
    lambda v: deque([v]), lambda v: frozenset({v}), Pair,
]  # fmt: skip


@pytest.mark.parametrize("wrap", WRAPS)
def test_deep_values_come_back_or_are_refused_at_a_named_place(wrap: Callable[[Any], Any]) -> None:
    value = nested(190, wrap)
    assert codec.pack(again(value), TYPES) == codec.pack(value, TYPES)
    with pytest.raises(OutputNotSerializable, match="200 levels"):
        codec.pack(nested(300, wrap), TYPES)


def test_absurdly_deep_values_do_not_crash() -> None:
    for wrap in (lambda v: [v], lambda v: {"a": v}, lambda v: (v,)):
        with pytest.raises(OutputNotSerializable, match="200 levels") as info:
            codec.pack(nested(100_000, wrap))
        assert len(info.value.place) < 250
        assert codec.plain(nested(100_000, wrap)) is not None
    with pytest.raises(NotLoadable):
        codec.unpack("[" * 100_000 + "]" * 100_000)
    with pytest.raises(NotLoadable):
        codec.unpack('{"$dr":' * 100_000 + "1" + "}" * 100_000)


def test_a_full_stack_is_refused_not_a_recursion_error() -> None:
    def descend(left: int) -> str:
        return descend(left - 1) if left else codec.pack(nested(150, lambda v: [v]))

    used = len(__import__("inspect").stack())
    with pytest.raises(OutputNotSerializable, match="call stack"):
        descend(sys.getrecursionlimit() - used - 60)


def test_cycles_are_refused() -> None:
    ring: list[Any] = [1]
    ring.append({"again": ring})
    knot = Point(1)
    knot.y = [knot]
    both: list[Any] = []
    both += [both, both]
    for value in (ring, knot, both):
        with pytest.raises(OutputNotSerializable, match="contains itself"):
            codec.pack(value, TYPES)
        assert "…" in json.dumps(codec.plain(value), ensure_ascii=False)


# -- which classes annotations lead to ------------------------------------------------------------------

UserId = NewType("UserId", Pair)


class Request(TypedDict):
    boxes: list[Box[Slotted]]


@dataclass
class Left:
    right: Right2 | None = None


@dataclass
class Right2:
    left: Union[Left, None] = None  # noqa: UP007  the other spelling
    deep: dict[str, list[tuple[Attr, ...]]] = field(default_factory=dict)


def names(*hints: Any) -> set[str]:
    return {cls.__name__ for cls in codec.types_of(*hints).values()}


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (list[dict[str, Point | None]], {"Point"}),
        (dict[Color, set[Pair]], {"Color", "Pair"}),
        (Tree | None, {"Tree", "Color"}),
        (Annotated[list[Point], "Slotted", Slotted(name="x")], {"Point"}),
        (Literal[Color.RED, "Point", 1], {"Color"}),
        (Left, {"Left", "Right2", "Attr"}),
        (Request, {"Box", "Slotted"}),
        (UserId, {"Pair"}),
        (Box["Point"], {"Box"}),
        (Model, {"Model", "Inner"}),
        (Wrap[Point], {"Wrap[Point]", "Point"}),
        (Callable[[Point], Color], {"Point", "Color"}),
        (Struct, {"Struct"}),
        (TypeVar("Bounded", bound=Point), {"Point"}),
        (tuple[Point, ...], {"Point"}),
    ],
)
def test_annotations_lead_to_their_classes(hint: Any, expected: set[str]) -> None:
    assert names(hint) == expected


@pytest.mark.parametrize(
    "hint", [int, list[dict[str, Any]], None, Any, Literal["a", 1], int | None, T, "Nowhere"]
)
def test_plain_annotations_give_the_one_empty_mapping(hint: Any) -> None:
    assert codec.types_of(hint) is codec.EMPTY
    assert codec.types_of() is codec.EMPTY


class Anything(type):
    def __getattr__(cls, name: str) -> Any:
        return object


class Open(metaclass=Anything):
    pass


def test_a_class_that_answers_to_any_name_is_no_class_with_fields() -> None:
    assert codec.types_of(Open) is codec.EMPTY
    with pytest.raises(OutputNotSerializable, match="Return plain data"):
        codec.pack(Open())


def test_unhashable_annotations_and_long_chains_of_classes() -> None:
    assert names(Annotated[Point, {"unhashable": []}]) == {"Point"}
    last: Any = Point
    for i in range(3000):
        last = make_dataclass(f"C{i}", [("next", last)])
    assert len(codec.types_of(last)) == 3001


def test_a_name_defined_later_is_found_later() -> None:
    @dataclass
    class Early:
        later: LaterClass  # type: ignore[name-defined]  # noqa: F821

    assert names(Early) == {"Early"}
    globals()["LaterClass"] = Point
    try:
        assert names(Early) == {"Early", "Point"}
    finally:
        del globals()["LaterClass"]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="`type X = …` is new in 3.12")
def test_type_statements_even_recursive_ones() -> None:
    space: dict[str, Any] = {"Point": Point, "Color": Color}
    exec(
        "type Json[T] = dict[str, Json[T]] | list[Json[T]] | T | Color\n"
        "type Pointed = Json[Point]\nlisted = list[Json[Point]]",
        space,
    )
    assert names(space["Pointed"]) == {"Point", "Color"}
    assert names(space["listed"]) == {"Point", "Color"}


def test_register_makes_a_class_and_what_it_names_storable_everywhere() -> None:
    @codec.register
    @dataclass
    class Order:
        lines: list[Line]

    @dataclass
    class Line:
        n: int

    codec.register(Line)
    assert codec.unpack(codec.pack([Order([Line(1)])])) == [Order([Line(1)])]
    assert codec.register(Order) is Order
    with pytest.raises(DefinitionError, match="two different classes"):
        codec.register(type("Order", (), {"__qualname__": Order.__qualname__, "__dataclass_fields__": {}}))
    with pytest.raises(DefinitionError, match="dataclass"):
        codec.register(int)


def test_in_an_interactive_main_the_later_class_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    first, second = (make_dataclass("Cell", ["a"], namespace={"__module__": "__main__"}) for _ in range(2))
    for cls in (first, second):
        cls.__module__ = "__main__"
        codec.register(cls)
    assert type(codec.unpack(codec.pack(second(1)))) is second
    with pytest.raises(OutputNotSerializable, match="Another class"):
        codec.pack(first(1))


def test_a_script_and_its_module_mean_the_same_class(tmp_path: Path) -> None:
    """`python flow.py` stores it, a tool that imports flow reads it."""
    (tmp_path / "flow.py").write_text(
        "from dataclasses import dataclass\nfrom dagresume import codec\n"
        "@dataclass\nclass Score:\n    n: int\n"
        "TYPES = codec.types_of(Score)\n"
        "if __name__ == '__main__':\n    print(codec.pack(Score(1), TYPES))\n"
    )
    text = run("flow.py", cwd=tmp_path)
    code = f"import flow; from dagresume import codec; print(codec.unpack({text!r}, flow.TYPES))"
    assert run("-c", code, cwd=tmp_path) == "Score(n=1)"


def run(*args: str, cwd: Path, hash_seed: str = "0") -> str:
    env = {"PYTHONPATH": f"{ROOT}:{cwd}", "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, *args], env=env, cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# -- what is stored cannot be loaded --------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '{"$dr":"pickle","v":"gASVCgAAAAAAAACMBnN5c3RlbQ=="}',
        '{"$dr":"obj","t":"os:system","v":{"command":"touch pwned"}}',
        '{"$dr":"obj","t":"subprocess:Popen","v":{}}',
        '{"$dr":"enum","t":"os:system","v":"A"}',
        '{"$dr":"np","t":"load","v":"x"}',
        '{"$dr":"np","v":["load","x"]}',
        '{"$dr":"ndarray","v":[[1],"C","|O",{"$dr":"bytes","v":"AAAAAAAAAAA="}]}',
        '{"$dr":"ndarray","v":[[99],"C","<f8",{"$dr":"bytes","v":"AAAAAAAAAAA="}]}',
        '{"$dr":"ndarray","v":[[1],"C","<f8",1000000000000]}',
        '{"$dr":["tuple"],"v":[]}',
        '{"$dr":{"a":1},"v":[]}',
        '{"$dr":null}',
        '{"$dr":"tuple"}',
        '{"$dr":"tuple","v":7}',
        '{"$dr":"dict","v":[[[],1]]}',
        '{"$dr":"datetime","v":"yesterday"}',
        '{"$dr":"datetime","v":["2026-01-01T00:00:00","Nowhere/Land",0]}',
        '{"$dr":"datetime","v":["2026-01-01T00:00:00",[1],0]}',
        '{"$dr":"enum","t":["x"],"v":"A"}',
        '{"$dr":"obj","v":{}}',
        '{"$dr":"WindowsPath","v":"x"}' if sys.platform != "win32" else '{"$dr":"PosixPath","v":"x"}',
        "",
        "nul",
        "[1] 2",
        '{"a":1',
    ],
)
def test_a_strange_row_is_refused_not_obeyed(text: str) -> None:
    """B40, B152: no import by name, no pickle, never None."""
    with pytest.raises(NotLoadable) as info:
        codec.unpack(text, TYPES)
    assert info.value.reason.rstrip(".").endswith(("again", "Update dagresume"))
    with pytest.raises(NotLoadable):
        codec.unpack_many(["1", text, "2"], TYPES)


def test_a_form_is_not_made_with_a_class_of_another_kind() -> None:
    point, color = (next(name for name, cls in TYPES.items() if cls is kind) for kind in (Point, Color))
    for row in (
        {"$dr": "enum", "t": point, "v": 7},
        {"$dr": "enum", "t": point, "v": "x"},
        {"$dr": "obj", "t": color, "v": {}},
        {"$dr": "obj", "t": point, "v": {"x": 1, "__class__": 2, "y": 1}},
        {"$dr": "obj", "t": point, "v": [["x", 1]]},
    ):
        with pytest.raises(NotLoadable):
            codec.unpack(json.dumps(row), TYPES)


def test_a_class_that_is_gone_is_named() -> None:
    """B40"""
    text = codec.pack({"a": Point(1)}, TYPES)
    with pytest.raises(NotLoadable, match=r":Point.*annotation.*register.*again"):
        codec.unpack(text)


def evolved(text: str, cls: Any) -> Any:
    """Read a stored Point as if `cls` stood in its place today."""
    name = next(name for name, known in TYPES.items() if known is Point)
    return codec.unpack(text, {name: cls})


def test_a_new_field_with_a_default_takes_it_and_others_refuse() -> None:
    text = codec.pack(Point(1, 2), TYPES)
    kinds: list[Any] = [
        make_dataclass("Point", ["x", "y", ("z", list, field(default_factory=list))]),
        make_dataclass(
            "Point", ["x", "y", ("z", list, field(default_factory=list))], slots=True, frozen=True
        ),
        attrs.make_class("Point", {"x": attrs.field(), "y": attrs.field(), "z": attrs.field(factory=list)}),
        pydantic.create_model("Point", x=int, y=int, z=(list, pydantic.Field(default_factory=list))),
        msgspec.defstruct("Point", ["x", "y", ("z", list, msgspec.field(default_factory=list))]),
        namedtuple("Point", "x y z", defaults=[[]]),
    ]
    for cls in kinds:
        back = evolved(text, cls)
        assert type(back) is cls
        assert (back.x, back.y, back.z) == (1, 2, [])
        assert getattr(back, "model_fields_set", {"x", "y"}) == {"x", "y"}
    needing: list[Any] = [
        make_dataclass("Point", ["x", "y", "z"]),
        attrs.make_class("Point", ["x", "y", "z"]),
        pydantic.create_model("Point", x=int, y=int, z=int),
        msgspec.defstruct("Point", ["x", "y", "z"]),
        namedtuple("Point", "x y z"),
    ]
    for cls in needing:
        with pytest.raises(NotLoadable, match="new field 'z'"):
            evolved(text, cls)
    with pytest.raises(NotLoadable, match="no field 'y' any more"):
        evolved(text, make_dataclass("Point", ["x"]))
    with pytest.raises(NotLoadable, match="no longer"):
        evolved(text, Color)


# -- numpy ----------------------------------------------------------------------------------------------

STRUCT = np.dtype([("a", "<i2"), ("b", [("c", "S3"), ("d", "<f4", (2,))])], align=True)
SCALARS: list[Any] = [
    np.float64(1.5), np.float64("nan"), np.float32(0.1), np.float16(-0.0), np.int64(7),
    np.longlong(7), np.uint8(255), np.bool_(True), np.complex64(1 + 2j), np.str_("é\0"), np.bytes_(b"a\0"),
    np.datetime64("2026-01-01T00:00:00.123456789"), np.datetime64("NaT", "ns"), np.timedelta64(5, "D"),
    np.zeros((), STRUCT)[()],
]  # fmt: skip


@pytest.mark.parametrize("value", SCALARS, ids=repr)
def test_numpy_scalars_keep_their_type(value: Any) -> None:
    """B50: np.float64 is a float to isinstance and would be flattened in silence."""
    back = again({"v": value})["v"]
    assert type(back) is type(value)
    assert back.dtype == value.dtype
    if value.dtype.kind != "V":  # the gaps between fields are nobody's
        assert back.tobytes() == value.tobytes()
    assert codec.pack(back) == codec.pack(value)


def arrays() -> list[Any]:
    grid = np.arange(24.0).reshape(2, 3, 4)
    return [
        grid, grid[:, ::2], np.asfortranarray(grid[0]), grid.T, np.array(5), np.zeros((0, 3)),
        np.array([], "U5"), np.array(["é", "x"]), np.array([b"a", b""]), np.array(["2026", "NaT"], "M8[ns]"),
        np.zeros(2, STRUCT), np.asfortranarray(np.zeros((2, 3), STRUCT)), np.zeros(2, STRUCT)["b"],
        np.arange(3, dtype=">i4"), np.array([True, False]), np.array([1j]),
        np.array([np.nan, -0.0], "f2"), np.array([1, 2], "m8[s]"), np.frombuffer(b"ab", "V1"),
    ]  # fmt: skip


@pytest.mark.parametrize("value", arrays(), ids=lambda a: f"{a.dtype}{a.shape}")
def test_arrays_keep_dtype_shape_order_and_are_writable(value: Any) -> None:
    back = again([value])[0]
    assert type(back) is np.ndarray
    assert (back.dtype, back.shape) == (value.dtype, value.shape)
    assert repr(back.tolist()) == repr(value.tolist())
    if value.dtype.kind != "V":  # the gaps between fields are nobody's
        assert back.tobytes() == value.tobytes()
    assert back.flags.fnc == value.flags.fnc
    assert back.flags.writeable
    assert back.flags.owndata
    assert codec.pack(back) == codec.pack(value)


def test_packing_does_not_load_other_libraries(tmp_path: Path) -> None:
    code = (
        "import sys; from dagresume import codec; from dagresume.errors import OutputNotSerializable\n"
        "before = set(sys.modules)\n"
        "try: codec.pack([object(), (1,)])\nexcept OutputNotSerializable: codec.plain(object())\n"
        "print({'numpy', 'pydantic', 'attr', 'msgspec'} & (set(sys.modules) - before))"
    )
    assert run("-c", code, cwd=tmp_path) == "set()"


def test_a_fresh_process_reads_the_values_of_other_libraries(tmp_path: Path) -> None:
    text = codec.pack([np.float64(1.5), np.arange(2), msgspec.UNSET])
    code = f"from dagresume import codec; x, y, z = codec.unpack({text!r}); print(type(x).__name__, x, y, z)"
    assert run("-c", code, cwd=tmp_path) == "float64 1.5 [0 1] UNSET"


# -- comparing, showing ---------------------------------------------------------------------------------


def test_canonical_text_compares_inputs() -> None:
    """B92"""
    alike: list[tuple[Any, Any]] = [
        ({"a": 1, "b": {"c": 1, "d": 2}}, {"b": {"d": 2, "c": 1}, "a": 1}),
        ({"a": {1, 2}, "b": ()}, {"b": (), "a": {2, 1}}),
        ({1: "a", (2,): "b"}, {(2,): "b", 1: "a"}),
        (math.nan, float("nan")),
        (model(p=1, q=2), model(q=2, p=1)),
    ]
    for a, b in alike:
        assert codec.canonical(a, TYPES) == codec.canonical(b, TYPES)
    apart = [
        1, True, 1.0, "1", -0.0, 0.0, None, "null", [], (), {}, set(), frozenset(), b"", "", [1], (1,), {1},
        {1: 1}, {"1": 1}, {True: 1}, {"a": 1, "b": 2},
        Level.LOW, np.int64(1), np.float64(1), Decimal(1), Decimal("1.0"), [[1], 2], [1, [2]],
    ]  # fmt: skip
    texts = [codec.canonical(value, TYPES) for value in apart]
    assert len(set(texts)) == len(apart)


def test_sets_are_written_alike_under_every_hash_seed(tmp_path: Path) -> None:
    """B92: also inside keys and objects."""
    code = (
        "from dagresume import codec\n"
        "words = {f'w{i}' for i in range(50)} | {(1, 'x'), None, 2.5, frozenset({'p', 'q', 'r'})}\n"
        "print(codec.digest(codec.pack({'s': words, frozenset('abc'): 1})).hex(),"
        " codec.digest(codec.canonical([words])).hex())"
    )
    first, second = (run("-c", code, cwd=tmp_path, hash_seed=seed) for seed in ("1", "4242"))
    assert first == second


def test_digest_is_sixteen_bytes_of_sha256() -> None:
    assert codec.digest("").hex() == "e3b0c44298fc1c149afbf4c8996fb924"
    assert codec.digest("é") != codec.digest("e")


def test_many_texts_are_decoded_at_once() -> None:
    values = [1, (2,), {"$dr": 3}, None, Point(1), "a,b"]
    assert same(codec.unpack_many([codec.pack(value, TYPES) for value in values], TYPES), values)
    assert codec.unpack_many([]) == []
    for broken in (["1,2", "3"], ["", ""], ["[1", "2]"], ["1", "2,"]):
        with pytest.raises(NotLoadable):
            codec.unpack_many(broken)


class Rude:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class RudeList(list[int]):
    def __iter__(self) -> Iterator[int]:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "picture"),
    [
        ({"x": math.nan, "y": -math.inf, 1: (2,), None: {3}}, {"x": None, "y": None, "1": [2], "None": [3]}),
        (datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02T00:00:00+00:00"),
        ([date(2026, 1, 2), time(1), timedelta(seconds=1.5)], ["2026-01-02", "01:00:00", 1.5]),
        (b"\xff", "/w=="),
        ([Decimal("1.0"), UUID(int=0), Path("a"), 1j], ["1.0", str(UUID(int=0)), "a", "1j"]),
        (Point(1, [Color.RED, Level.LOW]), {"x": 1, "y": ["r", 1]}),
        (model(more=2), {"a": 1, "b": None, "inner": None, "more": 2}),
        (Pair(1, Struct(first_name="f")), {"left": 1, "right": {"first_name": "f", "note": "UNSET"}}),
        ([np.float64("nan"), np.arange(2), np.int8(1)], [None, [0, 1], 1]),
        ("\ud800", "\\ud800"),
        ({"\ud800": {(1, 2): 3}}, {"\\ud800": {"[1, 2]": 3}}),
        (deque([1]), [1]),
        (range(10**9), "range(0, 1000000000)"),
        ([Rude(), RudeList()], ["<test_codec.Rude>", "<test_codec.RudeList>"]),
        (10**5000, hex(10**5000)),
        (ItemFailure("a[1]", "E", "m"), {"path": "a[1]", "type": "E", "message": "m"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_picture_for_strict_readers(value: Any, picture: Any) -> None:
    """B47: `--json` output holds no bare NaN; nothing makes it raise."""
    drawn = json.dumps(codec.plain(value), allow_nan=False, ensure_ascii=False)
    drawn.encode()
    loaded = json.loads(drawn)
    expected = json.loads(json.dumps(picture).replace("test_codec.", f"{__name__}."))
    assert loaded == expected


def test_a_key_in_a_place_is_short_and_shown_whatever_it_is() -> None:
    keys = [
        (10**5000, "0x"),
        (None, "null"),
        ((1, "x" * 99), '[1, "xxx'),
        ("x " * 99, '"x x x'),
        (b"k", '"aw=="'),
    ]
    for key, shown in keys:
        with pytest.raises(OutputNotSerializable) as info:
            codec.pack({key: object()})
        assert shown in info.value.place
        assert len(info.value.place) < 70


def test_uuid1_keeps_its_value() -> None:
    value = uuid1()
    assert again(value) == value


def test_members_are_the_values_as_packed() -> None:
    value: dict[str, Any] = {"a": [1, {"x": ","}], 'b"\\': "}", "c": (1,), "é": {}, "": None}
    parts = codec.members(codec.pack(value))
    assert parts == {name: codec.pack(item) for name, item in value.items()}
    assert codec.members("{}") == {}


def test_plain_data_stays_nearly_free(tmp_path: Path) -> None:
    """Beside the standard library in the same moment and in a process without tracing; the bound is loose."""
    code = (
        "import json, timeit\nfrom dagresume import codec\n"
        "value = {'items': [{'name': f'item {i}', 'score': i * 1.1, 'tags': ['a']} for i in range(15)]}\n"
        "text = codec.pack(value)\n"
        "def best(work, *args): return min(timeit.repeat(lambda: work(*args), number=200, repeat=9))\n"
        "print(best(codec.pack, value) / best(json.dumps, value))\n"
        "print(best(codec.unpack, text) / best(json.loads, text))"
    )
    pack, unpack = map(float, run("-c", code, cwd=tmp_path).split())
    assert pack < 3
    assert unpack < 2


@pytest.mark.parametrize("code", [*range(33), ord('"'), ord("\\"), 127, 0xE9, 0x2603, 0x1F642])
def test_a_long_string_is_written_like_a_short_one(code: int) -> None:
    for text in (chr(code) + 5000 * "x", 5000 * "x" + chr(code), 3000 * (chr(code) + "é")):
        packed = codec.pack(text)
        assert packed == json.dumps(text, ensure_ascii=False)
        assert codec.unpack(packed) == text


def test_a_long_string_that_no_file_can_hold_is_tagged() -> None:
    text = 5000 * "x" + "\ud800"
    assert codec.unpack(codec.pack(text)) == text
    assert codec.pack(text).isascii()
