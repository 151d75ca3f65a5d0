"""Values as JSON text that gives back the same value of the same type, or an error that says why not.

    pack(value, types) -> text        unpack(text, types) -> value        register(Score)

Plain data (dict with str keys, list, str, int, float, bool, None; exact types) is ordinary JSON, so that
SQL can look inside. What JSON has no word for is an object with the key `$dr`, from a closed list of forms:

    {"$dr": "tuple", "v": [1, 2]}                              likewise set, int, …: see `_WRITE`
    {"$dr": "uuid", "v": "00000000-…"}                         what the modules in `kinds` list as `FORMS`
    {"$dr": "obj", "t": "shop.model:Order", "v": {"id": 7}}    dataclass, NamedTuple, attrs, pydantic, msgspec
                                                               ("x": its attributes beside the fields)
    {"$dr": "enum", "t": "shop.model:State", "v": "PAID"}

A dict that has the key `$dr` itself, or keys that are no clean str, is written as pairs (`"dict"`), so that
user data is never taken for a form. Class names in a text are looked up among the classes given in `types`
(what the annotations lead to: `types_of`) and the registered ones. Nothing but a module of `kinds` is
imported because a text names it, and nothing is ever unpickled.

Not kept: which parts of a value were one shared object, the read-only flag and memory layout of arrays
(Fortran order is kept), the `is_safe` of a UUID.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from base64 import b64encode
from collections import abc, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, Flag
from functools import partial
from json.encoder import c_make_encoder, encode_basestring  # type: ignore[attr-defined]
from types import FunctionType, NoneType
from typing import Any, Final

from dagresume.errors import NotLoadable, OutputNotSerializable
from dagresume.kinds import TAGS, Form, loaded, twin
from dagresume.policy import ItemFailure
from dagresume.shapes import EMPTY, Shape, Types, known, name_of, register, shape_of, types_of

__all__ = ["ATOMS", "EMPTY", "Types", "register", "types_of"]  # of `shapes`
__all__ += ["canonical", "digest", "digest_of", "members", "pack", "plain", "unpack", "unpack_many"]

_TAG = "$dr"
_MARK = f'"{_TAG}":'
_DEPTH = 200  # levels of containers; a level is up to 4 Python frames here and 3 of SQLite's 1000 JSON levels
ATOMS: Final = frozenset({str, int, float, bool, NoneType})
"""The types of plain values that cannot change."""

_LONG: Final = 4096
# the likely ones first
_ESCAPED: Final = ("\n", '"', "\\", *(chr(n) for n in range(32) if chr(n) != "\n"))

_Encode = Callable[[Any, int], Iterable[str]]


# -- plain data: one walk, one encoding, one decoding ---------------------------------------------------

# what json.dumps builds anew in every call; no cycle check: the walk before it is bounded
_make: Final[Callable[..., _Encode]] = partial(c_make_encoder, None, None, encode_basestring, None, ":", ",")
_encode: Final = _make(False, False, False)
_encode_sorted: Final = _make(True, False, False)
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
        if kind not in ATOMS and (
            (kind is not dict and kind is not list) or not room or not _is_plain(item, room - 1)
        ):
            return False
    return True


def _written(value: Any, types: Types, encode: _Encode) -> str:
    kind = type(value)
    try:
        if kind is str:
            text = _quoted(value)
            if text.isascii() or text.encode():
                return text
        elif kind in ATOMS or ((kind is dict or kind is list) and _is_plain(value)):
            text = "".join(encode(value, 0))
            if _MARK not in text and (text.isascii() or text.encode()):
                return text
    except (ValueError, RecursionError):
        pass  # NaN, ±inf, a lone surrogate, an int beyond the digit limit; or the stack is full already
    return _Packer(types, encode).whole(value)


def _quoted(text: str) -> str:
    """Give a string as JSON. Where it is long and nothing in it is to be escaped, that is known sooner by a
    search for each such character than by a look at each that is there.
    """
    if len(text) < _LONG or any(character in text for character in _ESCAPED):
        return encode_basestring(text)
    return f'"{text}"'


def _is_clean(text: str) -> bool:
    """Say whether UTF-8 can hold it: no lone surrogates."""
    return text.isascii() or text.encode(errors="ignore").decode() == text


def pack(value: Any, types: Types = EMPTY) -> str:
    """Give JSON text from which `unpack` makes the same value and type, or raise `OutputNotSerializable`."""
    return _written(value, types, _encode)


def canonical(value: Any, types: Types = EMPTY) -> str:
    """Give `pack`'s text with sorted keys, to compare values by: 1, True and "1" differ, NaN equals NaN."""
    return _written(value, types, _encode_sorted)


def unpack(text: str, types: Types = EMPTY) -> Any:
    """Give the value that was packed, all of it made anew, or raise `NotLoadable` and say what is unknown."""
    scan, hook = _scan, None
    if _MARK in text:
        hook = partial(_revive, known(types))
        scan = json.JSONDecoder(object_hook=hook).scan_once  # type: ignore[attr-defined]
    try:
        value, end = scan(text, 0)
        if end < len(text):
            raise ValueError("there is more behind it")
    except (StopIteration, ValueError, RecursionError):
        return _unpack_slowly(text, hook)
    return value


def _unpack_slowly(text: str, hook: Callable[[dict[str, Any]], Any] | None) -> Any:
    # white space around it, integers beyond this interpreter's digit limit (Decimal has none), or an error
    try:
        return json.JSONDecoder(object_hook=hook, parse_int=lambda digits: int(Decimal(digits))).decode(text)
    except (ValueError, ArithmeticError, RecursionError) as error:
        wrong = f"It is not the JSON text that was stored ({error})."
        raise NotLoadable(f"{wrong} Run its node again.") from error


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
    try:
        tree = _scan(text, 0)[0]
    except (
        StopIteration
    ):  # so json's scanner says that nothing is there; in a coroutine it would mean its end
        raise ValueError("not JSON") from None
    return {name: "".join(_encode(value, 0)) for name, value in tree.items()}


def digest(text: str) -> bytes:
    """Give 16 bytes that stand for a packed text."""
    return hashlib.sha256(text.encode()).digest()[:16]


def digest_of(sha256: str) -> bytes:
    """Give the digest of a text whose whole SHA-256 is known, in hexadecimal."""
    return bytes.fromhex(sha256)[:16]


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
            is_ring = any(around is owner for around, _, _ in self.trail)
            raise self.refusal(owner, _RING if is_ring else _DEEP)
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

    def other(self, value: Any) -> Any:
        cls: Any = type(value)
        if isinstance(value, Enum):
            return self.member(value)
        if shape := shape_of(cls):
            return self.object(value, shape)
        for library in loaded():  # the first such value, or one to refuse
            _adopt(library.FORMS)
        if cls in _WRITE:
            return _WRITE[cls](self, value)
        raise self.refusal(value, _advice(cls))

    def object(self, value: Any, shape: Shape) -> dict[str, Any]:
        tree: dict[str, Any] = {_TAG: "obj", "t": self.name(value)}
        fields, rest = shape.take(value)
        if unset := [name for name in shape.kind.names if name not in fields]:
            raise self.refusal(value, f"Its field {unset[0]!r} was never set: give it a value.")
        tree["v"] = self.mapping(fields, value)
        return {**tree, "x": self.mapping(rest, value)} if rest else tree

    def member(self, value: Enum) -> dict[str, Any]:
        name = self.name(value)
        label: Any = value._name_
        if type(value).__members__.get(label) is not value:
            if not isinstance(value, Flag):
                raise self.refusal(value, "It is not one of the members its class lists: return its value.")
            label = value.value  # several members at once
        return {_TAG: "enum", "t": name, "v": self.any(label)}

    def name(self, value: Any) -> str:
        cls = type(value)
        if self.names is None:
            self.names = {cls: name for name, cls in known(self.types).items()}
        if cls in self.names:
            return self.names[cls]
        if name_of(cls) in self.names.values():
            raise self.refusal(value, _TWICE)
        raise self.refusal(value, _STRANGE.format(cls.__name__))

    def refusal(self, value: Any, reason: str) -> OutputNotSerializable:
        place = "$" + "".join(show(step) for _, show, step in self.trail)
        if len(place) > 200:
            place = f"{place[:100]}…{place[-60:]}"
        return OutputNotSerializable(None, place, _type_name(type(value)), reason)


def _type_name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _show_key(key: Any) -> str:
    if type(key) is str:
        return f".{key}" if key.isidentifier() else f"[{json.dumps(key[:60])}]"
    return f"[{json.dumps(plain(key))[:60]}]"


_WRITE: Final[dict[type, Callable[[_Packer, Any], Any]]] = {
    bool: lambda _, x: x,
    NoneType: lambda _, x: x,
    str: lambda _, x: x if _is_clean(x) else {_TAG: "str", "v": x.encode("unicode_escape").decode()},
    # decimal digits may be refused by this interpreter or the one that reads them, hexadecimal never
    int: lambda _, x: x if x.bit_length() <= 2000 else {_TAG: "int", "v": hex(x)},
    float: lambda _, x: x if math.isfinite(x) else {_TAG: "float", "v": repr(x)},
    list: _Packer.items,
    dict: _Packer.mapping,
    tuple: lambda packer, x: {_TAG: "tuple", "v": packer.items(x)},
    set: lambda packer, x: {_TAG: "set", "v": packer.elements(x)},
    frozenset: lambda packer, x: {_TAG: "frozenset", "v": packer.elements(x)},
    deque: lambda packer, x: {_TAG: "deque", "v": [packer.items(x), x.maxlen]},
}
_READ: Final[dict[str, Callable[[Any], Any]]] = {
    "str": lambda text: text.encode().decode("unicode_escape"),  # holds lone surrogates
    "int": lambda digits: int(digits, 16),
    "float": float,
    "dict": dict,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": lambda told: deque(*told),
}


def _adopt(forms: Iterable[Form]) -> None:
    for form in forms:
        _WRITE[form.cls] = partial(_write, form)
        _READ[form.tag] = form.decode


def _write(form: Form, packer: _Packer, value: Any) -> dict[str, Any]:
    try:
        told = form.encode(value)
    except TypeError as error:
        raise packer.refusal(value, str(error)) from None
    return {_TAG: form.tag, "v": packer.any(told)}


_adopt(twin("standard").FORMS)


# -- the tagged forms, read -----------------------------------------------------------------------------


def _revive(classes: Types, found: dict[str, Any]) -> Any:
    """Give what one decoded JSON object stands for; called by the decoder from the innermost outwards."""
    if _TAG not in found:
        return found
    tag = found[_TAG]
    try:
        if tag in TAGS and tag not in _READ:
            _adopt(twin(TAGS[tag]).FORMS)
        if tag in _READ:
            return _READ[tag](found["v"])
        if tag in ("obj", "enum"):
            return _revive_named(classes.get(found["t"]), tag, found)
    except (NotLoadable, MemoryError):
        raise
    except Exception as error:
        wrong = f"The form {tag!r} in it cannot be made again here ({type(error).__name__}: {error})."
        raise NotLoadable(f"{wrong} Run its node again.") from error
    unknown = f"It holds the form {tag!r}, which this version of dagresume does not know."
    raise NotLoadable(f"{unknown} Update dagresume.")


def _revive_named(cls: Any, tag: str, found: dict[str, Any]) -> Any:
    if cls is None:
        raise NotLoadable(_GONE.format(found["t"]))
    label, shape = found["v"], shape_of(cls)
    if tag == "obj" and shape:
        return shape.make(label, found.get("x", {}))
    if tag == "enum" and issubclass(cls, Enum):
        return cls[label] if type(label) is str else cls(label)
    raise NotLoadable(f"{found['t']} is no longer a class of that kind ({tag!r}). Run its node again.")


# -- what is refused ------------------------------------------------------------------------------------

_RING: Final = "It contains itself: return the parts, and ids where they meet."
_DEEP: Final = f"It lies more than {_DEPTH} levels deep: flatten it, or return it as text."
_TWICE: Final = "Another class of that name is the known one (defined twice, or its module loaded twice)."
_STRANGE: Final = (
    "Name it in the node's return annotation (`-> {0}`, `-> list[{0}]`),"
    " call dagresume.codec.register({0}) once, or return plain data."
)
_GONE: Final = (
    "It holds a {0}, a class not known here. Name it in the annotation of the node that gives it, or call"
    " dagresume.codec.register with it; if the class is gone or renamed, run the node again."
)
_ONCE: Final = "It can be read only once or changes later: return list(…) of it."
_ADVICE: Final[tuple[tuple[Any, str], ...]] = (
    (io.IOBase, "Return its content or its path."),
    (abc.Awaitable, "It was never awaited: write `await` before the call."),
    ((abc.Iterator, abc.AsyncIterator, abc.MappingView), _ONCE),
    (range, "Return list(…) of it."),
    (BaseException, "Return str(error) or plain data about it, or raise it."),
    ((FunctionType, type), "Return what it makes, or its name."),
    (abc.Mapping, "Return dict(…) of it."),
    (
        object,
        "Return plain data, an object that the node's annotation names, or a file's path (ctx.artifacts).",
    ),
)


def _advice(cls: type) -> str:
    if base := next((base.__name__ for base in cls.__mro__ if base in _WRITE), None):
        return f"It is a subclass of {base} and would come back as a mere {base}: convert it."
    return next(advice for kinds, advice in _ADVICE if issubclass(cls, kinds))


# -- a picture for people and other programs ------------------------------------------------------------


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


_Draw = Callable[[Any], Any]


def _draw_text(value: Any, _draw: _Draw) -> str:
    return str(value).encode("utf-8", "backslashreplace").decode()


def _draw_mapping(value: Mapping[Any, Any], draw: _Draw) -> dict[str, Any]:
    return {_draw_text(draw(key), draw): draw(item) for key, item in value.items()}


def _draw_any(value: Any, draw: _Draw) -> Any:
    cls: Any = type(value)
    if shape := shape_of(cls):
        return _draw_mapping(shape.take(value)[0] | (getattr(value, "model_extra", None) or {}), draw)
    if isinstance(value, list | tuple | deque):
        return [draw(item) for item in value]
    # numpy has that, and else: what a person would see
    return draw(value.tolist()) if hasattr(value, "tolist") else draw(str(value)[:1000])


_PICTURES: Final[tuple[tuple[Any, Callable[[Any, _Draw], Any]], ...]] = (
    (Enum, lambda value, draw: draw(value.value)),
    ((bool, NoneType), lambda value, _: value),
    (str, _draw_text),
    (int, lambda value, _: int(value) if value.bit_length() <= 2000 else hex(value)),
    (float, lambda value, _: float(value) if math.isfinite(value) else None),
    ((bytes, bytearray, memoryview), lambda value, _: b64encode(value).decode()),
    ((datetime, date, time), lambda value, _: value.isoformat()),
    (timedelta, lambda value, _: value.total_seconds()),
    (abc.Mapping, _draw_mapping),
    (abc.Set, lambda value, draw: sorted((draw(item) for item in value), key=repr)),
    (object, _draw_any),
)

register(ItemFailure)
