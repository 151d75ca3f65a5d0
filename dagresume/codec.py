"""Values as JSON text that gives back the same value of the same type, or an error that says why not.

    pack(value, types) -> text        unpack(text, types) -> value        register(Score)

Plain data (dict with str keys, list, str, int, float, bool, None; exact types) is ordinary JSON, so that
SQL can look inside. What JSON has no word for is an object with the key `$dr`, from a closed list of forms:

    {"$dr": "tuple", "v": [1, 2]}                              and so on: `_FORMS` lists them
    {"$dr": "obj", "t": "shop.model:Order", "v": {"id": 7}}    dataclass, attrs, NamedTuple, pydantic, msgspec
    {"$dr": "enum", "t": "shop.model:State", "v": "PAID"}
    {"$dr": "np", …}, {"$dr": "ndarray", …}                    numpy scalars and arrays

A dict that has the key `$dr` itself, or keys that are no clean str, is written as pairs (`"dict"`), so that
user data is never taken for a form. Class names in a text are looked up among the classes given in `types`
(what the annotations lead to: `types_of`) and the registered ones. Nothing is imported because a text names
it but our own module for a form of numpy or msgspec, and nothing is ever unpickled.

Not kept: which parts of a value were one shared object, the read-only flag and memory layout of arrays
(Fortran order is kept), the `is_safe` of a UUID.
"""

from __future__ import annotations

import hashlib
import io
import json
import json.encoder
import math
from base64 import b64decode, b64encode
from collections import abc, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag
from functools import partial
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from types import FunctionType, NoneType
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

from dagresume.errors import NotLoadable, OutputNotSerializable
from dagresume.kinds import FORMS, VALUES, loaded, twin
from dagresume.policy import ItemFailure
from dagresume.shapes import EMPTY, Types, known, name_of, register, shape_of, types_of

__all__ = [
    "EMPTY",
    "Types",
    "canonical",
    "digest",
    "members",
    "pack",
    "plain",
    "register",
    "types_of",
    "unpack",
]
__all__ += ["unpack_many"]

_TAG = "$dr"
_MARK = f'"{_TAG}":'
_DEPTH = 200  # levels of containers; a level is up to 3 Python frames here and 3 of SQLite's 1000 JSON levels
_ATOMS = frozenset({str, int, float, bool, NoneType})

_Encode = Callable[[Any, int], Iterable[str]]


# -- plain data: one walk, one encoding, one decoding ---------------------------------------------------


def _encoder(*, sort_keys: bool) -> _Encode:
    # what json.dumps builds anew in every call; no cycle check: the walk before it is bounded
    quote = json.encoder.encode_basestring
    encode: _Encode = json.encoder.c_make_encoder(  # type: ignore[attr-defined]
        None, None, quote, None, ":", ",", sort_keys, False, False
    )
    return encode


_encode: Final = _encoder(sort_keys=False)
_encode_sorted: Final = _encoder(sort_keys=True)
_scan: Final[Callable[[str, int], tuple[Any, int]]] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


def _is_plain(value: Any, room: int = _DEPTH) -> bool:
    """Say whether a dict or list holds plain data only, by exact type: a subclass comes back as its base."""
    if type(value) is dict:
        for key in value:
            if type(key) is not str:
                return False
        value = value.values()
    for item in value:
        kind = type(item)
        if kind not in _ATOMS and (
            (kind is not dict and kind is not list) or not room or not _is_plain(item, room - 1)
        ):
            return False
    return True


def _plain_text(value: Any, encode: _Encode) -> str | None:
    kind = type(value)
    try:
        if kind not in _ATOMS and ((kind is not dict and kind is not list) or not _is_plain(value)):
            return None
        text = "".join(encode(value, 0))
    except (ValueError, RecursionError):
        return None  # NaN, ±inf, an int beyond the interpreter's digit limit; or the stack is full already
    return text if _MARK not in text and _is_clean(text) else None


def _is_clean(text: str) -> bool:
    """Say whether UTF-8 can hold it: no lone surrogates."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def pack(value: Any, types: Types = EMPTY) -> str:
    """Give JSON text from which `unpack` makes the same value and type, or raise `OutputNotSerializable`."""
    text = _plain_text(value, _encode)
    return _Packer(types, _encode).whole(value) if text is None else text


def canonical(value: Any, types: Types = EMPTY) -> str:
    """Give `pack`'s text with sorted keys, to compare values by: 1, True and "1" differ, NaN equals NaN."""
    text = _plain_text(value, _encode_sorted)
    return _Packer(types, _encode_sorted).whole(value) if text is None else text


def unpack(text: str, types: Types = EMPTY) -> Any:
    """Give the value that was packed, all of it made anew, or raise `NotLoadable` and say what is unknown."""
    if _MARK not in text:
        scan, hook = _scan, None
    else:
        hook = partial(_revive, known(types))
        scan = json.JSONDecoder(object_hook=hook).scan_once  # type: ignore[attr-defined]
    try:
        value, end = scan(text, 0)
    except (StopIteration, ValueError, RecursionError):
        end = -1
    return value if end == len(text) else _unpack_slowly(text, hook)


def _unpack_slowly(text: str, hook: Callable[[dict[str, Any]], Any] | None) -> Any:
    # white space around it, integers beyond this interpreter's digit limit (Decimal has none), or an error
    try:
        return json.JSONDecoder(object_hook=hook, parse_int=lambda digits: int(Decimal(digits))).decode(text)
    except (ValueError, ArithmeticError, RecursionError) as error:
        raise NotLoadable(
            f"It is not the JSON text that was stored ({error}). Run its node again."
        ) from error


def unpack_many(texts: Sequence[str], types: Types = EMPTY) -> list[Any]:
    """Give the values of many texts, decoded in one go."""
    try:
        values: list[Any] = unpack(f"[{','.join(texts)}]", types)
    except NotLoadable:
        values = []
    # a broken text can borrow a bracket or comma from its neighbour: then one by one, for the right error
    return values if len(values) == len(texts) else [unpack(text, types) for text in texts]


def members(text: str) -> dict[str, str]:
    """Give the members of a packed dict of plain string keys, each still packed, as they stand there."""
    found: dict[str, str] = {}
    place = 1
    while text[place] != "}":
        name, end = _scan(text, place)
        _, place = _scan(text, end + 1)
        found[name] = text[end + 1 : place]
        if text[place] == ",":
            place += 1
    return found


def digest(text: str) -> bytes:
    """Give 16 bytes that stand for a packed text."""
    return hashlib.sha256(text.encode()).digest()[:16]


# -- the tagged forms, written --------------------------------------------------------------------------


class _Packer:
    """Turns one value into plain JSON data, and knows where in the value it is."""

    __slots__ = ("encode", "names", "trail", "types")

    def __init__(self, types: Types, encode: _Encode) -> None:
        self.types, self.encode = types, encode
        self.trail: list[list[Any]] = []  # of each container around: itself, how to show a step, the step
        self.names: dict[type, str] | None = None

    def whole(self, value: Any) -> str:
        try:
            return self.text(self.any(value))
        except RecursionError:
            raise self.refusal(value, "It is nested too deep for the call stack: flatten it.") from None

    def text(self, tree: Any) -> str:
        return "".join(self.encode(tree, 0))

    def any(self, value: Any) -> Any:
        return _WRITE.get(type(value), _Packer.other)(self, value)

    def parts(self, owner: Any, parts: Iterable[tuple[Any, Any]], show: Callable[[Any], str]) -> list[Any]:
        """Give the tree of each part of a container; the parts come with the steps that lead to them."""
        if len(self.trail) >= _DEPTH:
            if any(around is owner for around, _, _ in self.trail):
                raise self.refusal(owner, "It contains itself: return the parts, and ids where they meet.")
            advice = f"It lies more than {_DEPTH} levels deep: flatten it, or return it as text."
            raise self.refusal(owner, advice)
        spot, trees = [owner, show, None], []
        self.trail.append(spot)
        for spot[2], part in parts:
            trees.append(_WRITE.get(type(part), _Packer.other)(self, part))
        self.trail.pop()
        return trees

    def items(self, value: Iterable[Any]) -> list[Any]:
        return self.parts(value, enumerate(value), "[{}]".format)

    def elements(self, value: Iterable[Any]) -> list[Any]:
        # the same under every PYTHONHASHSEED
        return sorted(self.parts(value, enumerate(value), "{{…}}".format), key=self.text)

    def pairs(self, value: dict[Any, Any]) -> list[Any]:
        keys = self.parts(value, enumerate(value), ".keys()[{}]".format)
        pairs = list(zip(keys, self.parts(value, value.items(), _show_key), strict=True))
        return sorted(pairs, key=self.text) if self.encode is _encode_sorted else pairs

    def mapping(self, value: dict[Any, Any], owner: Any = None) -> dict[str, Any]:
        if _TAG in value or not all(type(key) is str and _is_clean(key) for key in value):
            return {_TAG: "dict", "v": self.pairs(value)}
        trees = self.parts(value if owner is None else owner, value.items(), _show_key)
        return dict(zip(value, trees, strict=True))

    def string(self, value: str) -> Any:
        return value if _is_clean(value) else {_TAG: "str", "v": value.encode("unicode_escape").decode()}

    def integer(self, value: int) -> Any:
        # decimal digits may be refused by this interpreter or the one that reads them, hexadecimal never
        return value if value.bit_length() <= 2000 else {_TAG: "int", "v": hex(value)}

    def number(self, value: float) -> Any:
        return value if math.isfinite(value) else {_TAG: "float", "v": repr(value)}

    def moment(self, value: datetime | time) -> Any:
        zone: Any = value.tzinfo
        if (zone is None or zone is UTC) and not value.fold:
            return value.isoformat()
        if type(zone) is ZoneInfo and zone.key:
            told: Any = zone.key
        elif zone is None or type(zone) is timezone:
            told = zone and self.items(zone.__getinitargs__())
        else:
            kind = _type_name(type(zone))
            raise self.refusal(value, f"Its tzinfo is a {kind}: use zoneinfo.ZoneInfo or datetime.timezone.")
        return [value.isoformat(), told, value.fold]

    def other(self, value: Any) -> dict[str, Any]:
        cls = type(value)
        if isinstance(value, Enum):
            return self.member(value)
        if shape_of(cls) is not None:
            return self.object(value)
        try:
            for library in loaded(VALUES):
                if told := library.encode(value):
                    return {_TAG: told[0], "v": self.any(told[1])}
        except TypeError as error:
            raise self.refusal(value, str(error)) from None
        raise self.refusal(value, _advice(cls))

    def object(self, value: Any) -> dict[str, Any]:
        shape: Any = shape_of(type(value))
        fields, rest = shape.take(value)
        if lacking := shape.fields.keys() - fields.keys():
            raise self.refusal(value, f"Its field {min(lacking)!r} was never set: give it a value.")
        tree = {_TAG: "obj", "t": self.name(value), "v": self.mapping(fields, value)}
        return {**tree, "x": self.mapping(rest, value)} if rest else tree

    def member(self, value: Enum) -> dict[str, Any]:
        cls, name = type(value), self.name(value)
        if cls.__members__.get(value._name_) is value:
            return {_TAG: "enum", "t": name, "v": value._name_}
        if isinstance(value, Flag):  # several members at once
            return {_TAG: "enum", "t": name, "v": self.integer(value.value)}
        raise self.refusal(value, "It is not one of the members its class lists: return its value.")

    def name(self, value: Any) -> str:
        if self.names is None:
            self.names = {cls: name for name, cls in known(self.types).items()}
        name = self.names.get(type(value))
        if name is None:
            raise self.refusal(value, self.stranger(type(value)))
        return name

    def stranger(self, cls: type) -> str:
        if name_of(cls) in known(self.types):
            return "Another class of that name is the known one (defined twice, or its module loaded twice)."
        return (
            f"Name it in the node's return annotation (`-> {cls.__name__}`, `-> list[{cls.__name__}]`),"
            f" call dagresume.codec.register({cls.__name__}) once, or return plain data."
        )

    def refusal(self, value: Any, reason: str) -> OutputNotSerializable:
        place = "$" + "".join(show(step) for _, show, step in self.trail)
        if len(place) > 200:
            place = f"{place[:100]}…{place[-60:]}"
        return OutputNotSerializable(None, place, _type_name(type(value)), reason)


def _type_name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _show_key(key: Any) -> str:
    named = type(key) is str and key.isidentifier()
    return f".{key}" if named else f"[{json.dumps(plain(key))[:60]}]"


def _base64(_packer: _Packer, value: bytes | bytearray) -> str:
    return b64encode(value).decode()


def _unbase64(text: str) -> bytes:
    return b64decode(text, validate=True)


def _as_text(packer: _Packer, value: Any) -> Any:
    return packer.string(str(value))


def _moment(cls: Any, told: Any) -> Any:
    if type(told) is str:
        return cls.fromisoformat(told)
    iso, zone, fold = told
    zone = ZoneInfo(zone) if type(zone) is str else zone and timezone(*zone)
    return cls.fromisoformat(iso).replace(tzinfo=zone, fold=fold)


_Write = Callable[[_Packer, Any], Any]
_FORMS: Final[tuple[tuple[str, type, _Write, Callable[[Any], Any]], ...]] = (
    ("tuple", tuple, _Packer.items, tuple),
    ("set", set, _Packer.elements, set),
    ("frozenset", frozenset, _Packer.elements, frozenset),
    ("deque", deque, lambda packer, value: [packer.items(value), value.maxlen], lambda told: deque(*told)),
    ("bytes", bytes, _base64, _unbase64),
    ("bytearray", bytearray, _base64, lambda text: bytearray(_unbase64(text))),
    ("complex", complex, lambda packer, x: packer.items((x.real, x.imag)), lambda told: complex(*told)),
    ("decimal", Decimal, _as_text, Decimal),
    ("uuid", UUID, _as_text, UUID),
    ("datetime", datetime, _Packer.moment, partial(_moment, datetime)),
    ("time", time, _Packer.moment, partial(_moment, time)),
    ("date", date, lambda _packer, day: day.isoformat(), date.fromisoformat),
    ("timedelta", timedelta, lambda _, x: [x.days, x.seconds, x.microseconds], lambda told: timedelta(*told)),
    *((cls.__name__, cls, _as_text, cls) for cls in (PosixPath, WindowsPath, PurePosixPath, PureWindowsPath)),
)


def _tagged(tag: str, write: _Write) -> _Write:
    return lambda packer, value: {_TAG: tag, "v": write(packer, value)}


_WRITE: Final[dict[type, _Write]] = {
    bool: lambda _packer, value: value,
    NoneType: lambda _packer, value: value,
    str: _Packer.string,
    int: _Packer.integer,
    float: _Packer.number,
    list: _Packer.items,
    dict: _Packer.mapping,
    **{cls: _tagged(tag, write) for tag, cls, write, _ in _FORMS},
}


# -- the tagged forms, read -----------------------------------------------------------------------------

_READ: Final[dict[str, Callable[[Any], Any]]] = {
    "str": lambda text: text.encode().decode("unicode_escape"),  # holds lone surrogates
    "int": lambda digits: int(digits, 16),
    "float": float,
    "dict": dict,
    **{tag: read for tag, _, _, read in _FORMS},
}


def _revive(classes: Types, found: dict[str, Any]) -> Any:
    """Give what one decoded JSON object stands for; called by the decoder from the innermost outwards."""
    if _TAG not in found:
        return found
    tag = found[_TAG]
    try:
        if tag in _READ:
            return _READ[tag](found["v"])
        if tag in _READ_NAMED:
            return _READ_NAMED[tag](_class(found["t"], classes), found)
        if tag in FORMS:
            return twin(FORMS[tag]).READ[tag](found["v"])
    except (NotLoadable, MemoryError):
        raise
    except Exception as error:
        raise NotLoadable(
            f"The form {tag!r} in it cannot be made again here ({type(error).__name__}: {error})."
            " Run its node again."
        ) from error
    raise NotLoadable(
        f"It holds the form {tag!r}, which this version of dagresume does not know. Update dagresume."
    )


def _class(name: str, classes: Types) -> type:
    try:
        return classes[name]
    except KeyError:
        raise NotLoadable(
            f"It holds a {name}, a class not known here. Name it in the annotation of the node that gives it,"
            " or call dagresume.codec.register with it; if the class is gone or renamed, run the node again."
        ) from None


def _object(cls: type, found: dict[str, Any]) -> Any:
    shape = shape_of(cls)
    if shape is None:
        raise NotLoadable(f"{found['t']} is no longer a class that holds fields. Run its node again.")
    return shape.make(found["v"], found.get("x", {}))


def _member(cls: type, found: dict[str, Any]) -> Any:
    if not issubclass(cls, Enum):
        raise NotLoadable(f"{found['t']} is no longer an Enum. Run its node again.")
    label = found["v"]
    return cls[label] if type(label) is str else cls(label)


_READ_NAMED: Final = {"obj": _object, "enum": _member}


# -- what is refused ------------------------------------------------------------------------------------

_LIBRARIES: Final = {"pandas", "polars", "pyarrow", "torch", "tensorflow", "jax", "PIL"}
_ADVICE: Final[tuple[tuple[Any, str], ...]] = (
    (io.IOBase, "Return its content or its path."),
    (abc.Awaitable, "It was never awaited: write `await` before the call."),
    (
        (abc.Iterator, abc.AsyncIterator, abc.MappingView),
        "It can be read only once or changes later: return list(…) of it.",
    ),
    (range, "Return list(…) of it."),
    (BaseException, "Return str(error) or plain data about it, or raise it."),
    ((FunctionType, type), "Return what it makes, or its name."),
    (abc.Mapping, "Return dict(…) of it."),
    (
        object,
        "Return plain data, or a dataclass, NamedTuple or Enum that the node's return annotation names.",
    ),
)


def _advice(cls: type) -> str:
    if cls.__module__.partition(".")[0] in _LIBRARIES:
        return "Return plain data made of it, or write it to a file (ctx.artifacts) and return the path."
    for base in cls.__mro__:
        if base in _WRITE:
            name = base.__name__
            return f"It is a subclass of {name} and would come back as a mere {name}: convert it."
    return next(advice for kinds, advice in _ADVICE if issubclass(cls, kinds))


# -- a picture for people and other programs ------------------------------------------------------------

_Draw = Callable[[Any], Any]


def plain(value: Any) -> Any:
    """Give a picture of the value that every strict JSON parser reads; lossy, and it never raises."""
    return _picture(value, ())


def _picture(value: Any, above: tuple[int, ...]) -> Any:
    if id(value) in above or len(above) > _DEPTH // 2:
        return "…"
    try:
        draw = next(draw for kinds, draw in _PICTURES if isinstance(value, kinds))
        return draw(value, partial(_picture, above=(*above, id(value))))
    except Exception:
        return f"<{_type_name(type(value))}>"


def _draw_text(value: Any, _draw: _Draw) -> str:
    return str(value).encode("utf-8", "backslashreplace").decode()


def _draw_mapping(value: Mapping[Any, Any], draw: _Draw) -> dict[str, Any]:
    return {_draw_text(draw(key), draw): draw(item) for key, item in value.items()}


def _draw_any(value: Any, draw: _Draw) -> Any:
    cls: type = type(value)
    shape = shape_of(cls)
    if shape is not None:
        return _draw_mapping(shape.take(value)[0] | (getattr(value, "model_extra", None) or {}), draw)
    if isinstance(value, abc.Sequence | deque) and not isinstance(value, range):
        return [draw(item) for item in value]
    if hasattr(value, "tolist"):  # numpy
        return draw(value.tolist())
    return _draw_text(repr(value)[:1000], draw)


_PICTURES: Final[tuple[tuple[Any, Callable[[Any, _Draw], Any]], ...]] = (
    (Enum, lambda value, draw: draw(value.value)),
    ((bool, NoneType), lambda value, _draw: value),
    (str, _draw_text),
    (int, lambda value, _draw: int(value) if value.bit_length() <= 2000 else hex(value)),
    (float, lambda value, _draw: float(value) if math.isfinite(value) else None),
    ((bytes, bytearray, memoryview), lambda value, _draw: b64encode(value).decode()),
    ((datetime, date, time), lambda value, _draw: value.isoformat()),
    (timedelta, lambda value, _draw: value.total_seconds()),
    ((Decimal, UUID, PurePath, complex), _draw_text),
    (abc.Mapping, _draw_mapping),
    (abc.Set, lambda value, draw: sorted((draw(item) for item in value), key=repr)),
    (object, _draw_any),
)

register(ItemFailure)
