"""Values as JSON text that gives back the same value of the same type, or an error that says why not.

    pack(value, types) -> text        unpack(text, types) -> value        register(Score)

Plain data (dict with str keys, list, str, int, float, bool, None; exact types) is ordinary JSON, so that
SQL can look inside. What JSON has no word for is an object with the key `$dr`, from a closed list of forms:

    {"$dr": "tuple", "v": [1, 2]}                              and so on: `_TABLE` lists them
    {"$dr": "obj", "t": "shop.model:Order", "v": {"id": 7}}    dataclass, attrs, NamedTuple, pydantic, msgspec
    {"$dr": "enum", "t": "shop.model:State", "v": "PAID"}
    {"$dr": "np", …}, {"$dr": "ndarray", …}                    numpy scalars and arrays

A dict that has the key `$dr` itself, or keys that are no clean str, is written as pairs (`"dict"`), so that
user data is never taken for a form. Class names in a text are looked up among the classes given in `types`
(what the annotations lead to: `types_of`) and the registered ones. Nothing is imported because a text names
it, and nothing is ever unpickled.

Objects come back by their state, field by field, without `__init__` and `__post_init__`: what these did is
part of the state. Only msgspec structs cannot be made so: theirs runs, then the stored fields are put back
over it. Attributes beside the fields are kept, cached properties are not. A field that the class has gained
since then takes its default; one that it has lost refuses. Not kept: which parts of a value were one shared
object, the read-only flag and memory layout of arrays (Fortran order is kept), the `is_safe` of a UUID.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
import io
import json
import json.encoder
import math
import sys
import typing
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict, abc, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag
from functools import cached_property, lru_cache, partial
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from types import FunctionType, MappingProxyType, MemberDescriptorType, NoneType
from typing import Any, Final, ForwardRef, Literal, NamedTuple, TypeVar, get_args, get_origin
from uuid import UUID
from zoneinfo import ZoneInfo

from dagresume.errors import DefinitionError, NotLoadable, OutputNotSerializable
from dagresume.policy import ItemFailure

__all__ = [
    "EMPTY",
    "Types",
    "canonical",
    "digest",
    "is_shareable",
    "members",
    "pack",
    "plain",
    "register",
    "types_of",
    "unpack",
    "unpack_many",
]

T = TypeVar("T")
Types = Mapping[str, type]
EMPTY: Final[Types] = MappingProxyType({})
"""No storable classes: what `types_of` gives for plain hints, always this one object."""

_TAG = "$dr"
_MARK = f'"{_TAG}":'
_DEPTH = 200  # levels of containers; a level is up to 3 Python frames here and 3 of SQLite's 1000 JSON levels
_ATOMS = frozenset({str, int, float, bool, NoneType})


# -- plain data: one walk, one encoding, one decoding ---------------------------------------------------


def _encoder(*, sort_keys: bool) -> Callable[[Any, int], Iterable[str]]:
    # what json.dumps builds anew in every call; no cycle check: the walk before it is bounded
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:  # an interpreter without the C accelerator
        slow = json.JSONEncoder(
            ensure_ascii=False, allow_nan=False, sort_keys=sort_keys, separators=(",", ":")
        )
        return lambda value, _level: slow.iterencode(value)
    encode: Callable[[Any, int], Iterable[str]] = make(
        None, None, json.encoder.encode_basestring, None, ":", ",", sort_keys, False, False
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


def _plain_text(value: Any, encode: Callable[[Any, int], Iterable[str]]) -> str | None:
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
    return _Packer(types).text(value) if text is None else text


def canonical(value: Any, types: Types = EMPTY) -> str:
    """Give `pack`'s text with sorted keys, to compare values by: 1, True and "1" differ, NaN equals NaN."""
    text = _plain_text(value, _encode_sorted)
    return _Packer(types, sort=True).text(value) if text is None else text


def unpack(text: str, types: Types = EMPTY) -> Any:
    """Give the value that was packed, all of it made anew, or raise `NotLoadable` and say what is unknown."""
    if _MARK not in text:
        scan, hook = _scan, None
    else:
        hook = partial(_revive, _known(types))
        scan = json.JSONDecoder(object_hook=hook).scan_once  # type: ignore[attr-defined]
    try:
        value, end = scan(text, 0)
    except (StopIteration, ValueError, RecursionError):
        return _unpack_slowly(text, hook)
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


def digest(text: str) -> bytes:
    """Give 16 bytes that stand for a packed text."""
    return hashlib.sha256(text.encode()).digest()[:16]


_SHAREABLE = _ATOMS | {bytes}


def is_shareable(value: Any) -> bool:
    """Say whether several readers may be given this one object: a scalar or a flat tuple of scalars."""
    kind = type(value)
    return kind in _SHAREABLE or (kind is tuple and all(type(item) in _SHAREABLE for item in value))


# -- which classes may be stored ------------------------------------------------------------------------


class _Kind(NamedTuple):
    """A family of classes: its mark, its fields, a field's default (LookupError: none), a bare instance."""

    mark: str
    names: Callable[[Any], Iterable[str]]
    default: Callable[[Any, str], Any]
    new: Callable[[Any, dict[str, Any]], Any]


def _bare(cls: type, _fields: dict[str, Any]) -> Any:
    return object.__new__(cls)


def _pydantic_names(cls: Any) -> Iterable[str]:
    if not cls.__pydantic_complete__:
        cls.model_rebuild()
    return tuple(cls.model_fields)


def _pydantic_default(cls: Any, name: str) -> Any:
    info = cls.model_fields[name]
    if info.is_required():
        raise LookupError(name)
    return info.get_default(call_default_factory=True)


def _attrs_default(cls: Any, name: str) -> Any:
    given = next(field.default for field in cls.__attrs_attrs__ if field.name == name)
    attr = sys.modules["attr"]
    if not isinstance(given, attr.Factory):
        return _default(given, attr.NOTHING, attr.NOTHING)
    if given.takes_self:
        raise LookupError(name)
    return given.factory()


def _msgspec_default(cls: Any, name: str) -> Any:
    msgspec = sys.modules["msgspec"]
    field = next(field for field in msgspec.structs.fields(cls) if field.name == name)
    return _default(field.default, field.default_factory, msgspec.NODEFAULT)


def _dataclass_default(cls: Any, name: str) -> Any:
    field = cls.__dataclass_fields__[name]
    return _default(field.default, field.default_factory, dataclasses.MISSING)


def _default(default: Any, factory: Any, missing: Any) -> Any:
    if default is not missing:
        return default
    if factory is missing:
        raise LookupError
    return factory()


_KINDS: Final = (
    _Kind("__pydantic_fields_set__", _pydantic_names, _pydantic_default, _bare),
    _Kind(
        "__struct_fields__", lambda cls: cls.__struct_fields__, _msgspec_default, lambda cls, has: cls(**has)
    ),
    _Kind(
        "__attrs_attrs__", lambda cls: [field.name for field in cls.__attrs_attrs__], _attrs_default, _bare
    ),
    _Kind(
        "__dataclass_fields__",
        lambda cls: [field.name for field in dataclasses.fields(cls)],
        _dataclass_default,
        _bare,
    ),
    _Kind(
        "_field_defaults",  # NamedTuple
        lambda cls: cls._fields,
        lambda cls, name: cls._field_defaults[name],
        lambda cls, has: tuple.__new__(cls, [has[name] for name in cls._fields]),
    ),
)


def _kind(cls: type) -> _Kind | None:
    # looked up in the classes' own dicts: a metaclass may answer to any name
    return next((kind for kind in _KINDS if any(kind.mark in vars(base) for base in cls.__mro__)), None)


def _is_storable(cls: type) -> bool:
    return issubclass(cls, Enum) or _kind(cls) is not None


_registered: dict[str, type] = {}


def register(cls: type[T]) -> type[T]:
    """Give the class back, now storable everywhere with all that its fields name; usable as a decorator."""
    if not isinstance(cls, type) or not _is_storable(cls):
        raise DefinitionError(
            f"codec.register({cls!r}): give it a dataclass, NamedTuple, attrs class, pydantic model,"
            " msgspec Struct or Enum."
        )
    _add(_registered, cls)
    return cls


def _add(found: dict[str, type], cls: type) -> None:
    name = _name(cls)
    if found.get(name, cls) is not cls and not _is_interactive(cls):
        raise DefinitionError(
            f"two different classes are called {name}. Stored values are told apart by that name: rename one,"
            " or define it once, at the top level of its module."
        )
    found[name] = cls


def _is_interactive(cls: type) -> bool:
    return cls.__module__ == "__main__" and (
        hasattr(sys, "ps1") or not hasattr(sys.modules["__main__"], "__file__")
    )


def _name(cls: type) -> str:
    module = cls.__module__
    if module in {"__main__", "__mp_main__"}:
        # `python flow.py`, its spawned workers and `import flow` must mean the same class
        main = sys.modules.get(module)
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec else Path(file).stem if file else "__main__"
    return f"{module}:{cls.__qualname__}"


def _known(types: Types) -> Types:
    return {**types_of(*_registered.values()), **types}


_closures: dict[tuple[Any, ...], Types] = {}


def types_of(*hints: Any) -> Types:
    """Give the storable classes that resolved annotations lead to, also through the fields of classes."""
    try:
        known = _closures.get(hints)
    except TypeError:  # an unhashable annotation
        return _Closure(hints).types()
    if known is None:
        closure = _Closure(hints)
        known = closure.types()
        if not closure.unresolved:  # else a name may be defined later
            if len(_closures) >= 1024:
                _closures.clear()
            _closures[hints] = known
    return known


class _Closure:
    """What some annotations lead to; a loop, since classes may name each other in circles or long chains."""

    def __init__(self, hints: Iterable[Any]) -> None:
        self.found: dict[str, type] = {}
        self.seen: dict[int, Any] = {}  # by id, and held so that no id is given away again
        self.unresolved: list[tuple[Any, type | None]] = []
        todo: list[tuple[Any, type | None]] = [(hint, None) for hint in hints]
        while todo:
            before = len(self.found)
            while todo:
                self._visit(*todo.pop(), todo)
            if len(self.found) > before:  # a name may mean a class found only now
                todo, self.unresolved = self.unresolved, []

    def types(self) -> Types:
        return MappingProxyType(self.found) if self.found else EMPTY

    def _visit(self, hint: Any, owner: type | None, todo: list[tuple[Any, type | None]]) -> None:
        if isinstance(hint, str | ForwardRef):
            try:
                todo.append((self._evaluate(hint, owner), owner))
            except Exception:  # names of an unreachable function, of TYPE_CHECKING imports: best effort
                self.unresolved.append((hint, owner))
        elif id(hint) not in self.seen:
            self.seen[id(hint)] = hint
            if not isinstance(hint, type) or get_origin(hint) is not None:
                todo += [(part, owner) for part in _parts(hint)]
            elif _is_storable(hint) or typing.is_typeddict(hint):
                if _is_storable(hint):
                    _add(self.found, hint)
                todo += _field_hints(hint)

    def _evaluate(self, hint: str | ForwardRef, owner: type | None) -> Any:
        text = hint if isinstance(hint, str) else hint.__forward_arg__
        module = getattr(hint, "__forward_module__", None) or getattr(owner, "__module__", None)
        space = module if isinstance(module, str) else getattr(module, "__name__", "")
        names = {cls.__name__: cls for cls in self.found.values()}
        if owner is not None:
            names |= {owner.__name__: owner, **vars(owner)}
        # an annotation written in the program, never text from the store
        return eval(text, {**vars(typing), **vars(sys.modules.get(space, typing))}, names)


def _parts(hint: Any) -> list[Any]:
    """Give the parts of a hint that is no class: `list[A]`, `A | B`, `type X = …`, NewType, TypeVar, …"""
    if isinstance(hint, list):  # the parameters of a Callable
        return hint
    origin = get_origin(hint)
    if origin is Literal:
        return [type(value) for value in get_args(hint) if isinstance(value, Enum)]
    if origin is typing.Annotated:
        return [hint.__origin__]
    parts = [getattr(hint, name, None) for name in ("__value__", "__supertype__", "__bound__")]
    return [origin, *get_args(hint), *parts, *getattr(hint, "__constraints__", ())]


def _field_hints(cls: Any) -> list[tuple[Any, type]]:
    if issubclass(cls, Enum):
        return []
    if "__pydantic_fields_set__" in dir(cls):  # pydantic has resolved them, also for generic models
        return [(info.annotation, cls) for info in cls.model_fields.values()]
    hints = [(field.type, cls) for field in getattr(cls, "__attrs_attrs__", ())]  # attr.ib(type=…)
    for base in cls.__mro__:
        hints += [(hint, base) for hint in _annotations(base).values()]
    return hints


def _annotations(cls: type) -> Mapping[str, Any]:
    if sys.version_info >= (3, 14):
        import annotationlib

        return annotationlib.get_annotations(cls, format=annotationlib.Format.FORWARDREF)
    return inspect.get_annotations(cls)


# -- the state of an object -----------------------------------------------------------------------------


class _Shape(NamedTuple):
    kind: _Kind
    names: tuple[str, ...]
    slots: dict[str, Any]  # their descriptors: neither `__setattr__` nor `frozen` stands in front of them


@lru_cache(maxsize=1024)
def _shape(cls: type) -> _Shape | None:
    kind = None if issubclass(cls, Enum) else _kind(cls)
    if kind is None:
        return None
    if kind.new is _bare:
        try:
            _bare(cls, {})
        except TypeError:  # built on dict, Exception, …: there is state that no field holds
            return None
    slots = {
        name: slot
        for base in reversed(cls.__mro__)
        for name, slot in vars(base).items()
        if isinstance(slot, MemberDescriptorType)
    }
    return _Shape(kind, tuple(kind.names(cls)), slots)


def _state(value: Any, shape: _Shape) -> dict[str, Any]:
    """Give an object's attributes by name as they are, past properties, `__getattr__` and class defaults."""
    state = dict(zip(shape.names, tuple.__iter__(value), strict=True)) if isinstance(value, tuple) else {}
    for name, slot in shape.slots.items():
        try:
            state[name] = slot.__get__(value)
        except AttributeError:  # not set
            continue
    return state | getattr(value, "__dict__", {})


def _implied(shape: _Shape, fields: Iterable[str]) -> dict[str, Any]:
    """Give the attributes beside the fields that need not be written down."""
    if shape.kind.mark == "__pydantic_fields_set__":
        hidden: dict[str, Any] = dict.fromkeys(("__pydantic_extra__", "__pydantic_private__"))
        return {"__pydantic_fields_set__": set(fields), **hidden}
    return {}


_CACHED_HASH = "_attrs_cached_hash"  # a hash of str holds in one process only; attrs makes a None anew
_TYPING_NOTE = "__orig_class__"  # left by Box[int](…)


def _beside(cls: type, state: dict[str, Any], implied: dict[str, Any]) -> dict[str, Any]:
    """Give what is left of a state without its fields, as far as it must be written down."""
    return {
        name: None if name == _CACHED_HASH else held
        for name, held in state.items()
        if name != _TYPING_NOTE
        and not (name in implied and held == implied[name])
        and not isinstance(inspect.getattr_static(cls, name, None), cached_property)
    }


def _restore(found: dict[str, Any], known: Types) -> Any:
    cls = _class(found["t"], known)
    shape = _shape(cls)
    if shape is None:
        raise NotLoadable(f"{found['t']} is no longer a class that holds fields. Run its node again.")
    fields, unset = found["v"], found.get("unset", ())
    if lost := fields.keys() - set(shape.names):
        raise NotLoadable(
            f"{found['t']} has no field {min(lost)!r} any more. Give it back, or run its node again."
        )
    extra = {**_implied(shape, fields), **found.get("x", {})}
    for name in shape.names:
        if name not in fields and name not in unset:
            fields[name] = _late_default(cls, shape, name)
    value = shape.kind.new(cls, fields)
    for name, held in (extra if isinstance(value, tuple) else fields | extra).items():
        slot = shape.slots.get(name)
        if slot is None:
            value.__dict__[name] = held
        else:
            slot.__set__(value, held)
    return value


def _late_default(cls: type, shape: _Shape, name: str) -> Any:
    try:
        return shape.kind.default(cls, name)
    except Exception as error:
        raise NotLoadable(
            f"{_name(cls)} has a new field {name!r}, which a stored one lacks. Give it a default,"
            " or run its node again."
        ) from error


def _class(name: str, known: Types) -> type:
    try:
        return known[name]
    except KeyError:
        raise NotLoadable(
            f"It holds a {name}, a class not known here. Name it in the annotation of the node that gives it,"
            " or call dagresume.codec.register with it; if the class is gone or renamed, run the node again."
        ) from None


def _member(found: dict[str, Any], known: Types) -> Any:
    cls, label = _class(found["t"], known), found["v"]
    if not issubclass(cls, Enum):
        raise NotLoadable(f"{found['t']} is no longer an Enum. Run its node again.")
    return cls[label] if type(label) is str else cls(label)


# -- the tagged forms -----------------------------------------------------------------------------------


class _Spot:
    """Where the packer is inside one container."""

    __slots__ = ("owner", "show", "step")

    def __init__(self, owner: Any, show: Callable[[Any], str]) -> None:
        self.owner, self.show = owner, show
        self.step: Any = None


class _Packer:
    """Turns one value into plain JSON data, and knows where in the value it is."""

    __slots__ = ("_names", "sort", "trail", "types")

    def __init__(self, types: Types, *, sort: bool = False) -> None:
        self.types, self.sort = types, sort
        self.trail: list[_Spot] = []
        self._names: dict[type, str] | None = None

    def text(self, value: Any) -> str:
        try:
            return _text(self(value))
        except RecursionError:
            raise self.refusal(value, "It is nested too deep for the call stack: flatten it.") from None

    def __call__(self, value: Any) -> Any:
        return _WRITE.get(type(value), _Packer.other)(self, value)

    def enter(self, owner: Any, show: Callable[[Any], str]) -> _Spot:
        if len(self.trail) >= _DEPTH:
            if any(spot.owner is owner for spot in self.trail):
                raise self.refusal(owner, "It contains itself: return the parts, and ids where they meet.")
            raise self.refusal(
                owner, f"It lies more than {_DEPTH} levels deep: flatten it, or return it as text."
            )
        spot = _Spot(owner, show)
        self.trail.append(spot)
        return spot

    def items(self, value: Iterable[Any], show: Callable[[Any], str] = "[{}]".format) -> list[Any]:
        spot, tree = self.enter(value, show), []
        for spot.step, item in enumerate(value):
            tree.append(_WRITE.get(type(item), _Packer.other)(self, item))
        self.trail.pop()
        return tree

    def elements(self, value: Iterable[Any]) -> list[Any]:
        return sorted(self.items(value, "{{…}}".format), key=_text)  # the same under every PYTHONHASHSEED

    def pairs(self, value: Mapping[Any, Any]) -> list[list[Any]]:
        keys = self.items(value, ".keys()[{}]".format)
        spot, tree = self.enter(value, _show_key), []
        for tree_key, (spot.step, item) in zip(keys, value.items(), strict=True):
            tree.append([tree_key, _WRITE.get(type(item), _Packer.other)(self, item)])
        self.trail.pop()
        return sorted(tree, key=_text) if self.sort and not isinstance(value, OrderedDict) else tree

    def mapping(self, value: dict[Any, Any], owner: Any = None) -> dict[str, Any]:
        if _TAG in value or not all(type(key) is str and _is_clean(key) for key in value):
            return {_TAG: "dict", "v": self.pairs(value)}
        spot = self.enter(value if owner is None else owner, _show_key)
        tree = {}
        for key in sorted(value) if self.sort else value:
            spot.step, item = key, value[key]
            tree[key] = _WRITE.get(type(item), _Packer.other)(self, item)
        self.trail.pop()
        return tree

    def string(self, value: str) -> Any:
        return value if _is_clean(value) else {_TAG: "str", "v": value.encode("unicode_escape").decode()}

    def integer(self, value: int) -> Any:
        # decimal digits may be refused by this interpreter or the one that reads them, hexadecimal never
        return value if value.bit_length() <= 2000 else {_TAG: "int", "v": hex(value)}

    def number(self, value: float) -> Any:
        return value if math.isfinite(value) else {_TAG: "float", "v": repr(value)}

    def moment(self, value: datetime | time) -> Any:
        more = self.zone(value) | ({"fold": 1} if value.fold else {})
        iso = value.isoformat()
        return {"iso": iso, **more} if more else iso

    def zone(self, value: datetime | time) -> dict[str, Any]:
        """Give what the ISO text cannot say of a time's zone."""
        zone = value.tzinfo
        if type(zone) is ZoneInfo and zone.key is not None:
            return {"zone": zone.key}
        if type(zone) is timezone:
            offset, label = zone.utcoffset(None), zone.tzname(None)
            name = {} if label == timezone(offset).tzname(None) else {"name": self.string(label)}
            # some Pythons misread the fraction of a second
            return name | (
                {"offset": [offset.days, offset.seconds, offset.microseconds]} if offset.microseconds else {}
            )
        if zone is None:
            return {}
        kind = _type_name(type(zone))
        raise self.refusal(value, f"Its tzinfo is a {kind}: use zoneinfo.ZoneInfo or datetime.timezone.")

    def default_dict(self, value: defaultdict[Any, Any]) -> Any:
        factory = value.default_factory
        name = next((name for name, known in _FACTORIES.items() if known is factory), None)
        if name is None:
            raise self.refusal(value, "Its default_factory cannot be stored: return dict(value).")
        return [name, self.pairs(value)]

    def other(self, value: Any) -> Any:
        cls: type = type(value)
        shape = _shape(cls)
        if shape is not None:
            return self.object(value, shape)
        return self.member(value) if isinstance(value, Enum) else _foreign(self, value)

    def object(self, value: Any, shape: _Shape) -> dict[str, Any]:
        tree: dict[str, Any] = {_TAG: "obj", "t": self.name(value)}
        state = _state(value, shape)
        fields = {name: state.pop(name) for name in shape.names if name in state}
        tree["v"] = self.mapping(fields, value)
        if state and (state := _beside(type(value), state, _implied(shape, fields))):
            tree["x"] = self.mapping(state, value)
        if len(fields) < len(shape.names):
            tree["unset"] = [name for name in shape.names if name not in fields]
        return tree

    def member(self, value: Enum) -> dict[str, Any]:
        cls, name = type(value), self.name(value)
        if cls.__members__.get(value._name_) is value:
            return {_TAG: "enum", "t": name, "v": value._name_}
        if isinstance(value, Flag):  # several members at once
            return {_TAG: "enum", "t": name, "v": self.integer(value.value)}
        raise self.refusal(value, "It is not one of the members its class lists: return its value.")

    def name(self, value: Any) -> str:
        if self._names is None:
            self._names = {cls: name for name, cls in _known(self.types).items()}
        name = self._names.get(type(value))
        if name is None:
            raise self.refusal(value, self.unknown(type(value)))
        return name

    def unknown(self, cls: type) -> str:
        if _name(cls) in _known(self.types):
            return "Another class of that name is the known one (defined twice, or its module loaded twice)."
        return (
            f"Name it in the node's return annotation (`-> {cls.__name__}`, `-> list[{cls.__name__}]`),"
            f" call dagresume.codec.register({cls.__name__}) once, or return plain data."
        )

    def refusal(self, value: Any, reason: str) -> OutputNotSerializable:
        place = "$" + "".join(spot.show(spot.step) for spot in self.trail)
        if len(place) > 200:
            place = f"{place[:100]}…{place[-60:]}"
        return OutputNotSerializable(None, place, _type_name(type(value)), reason)


def _text(tree: Any) -> str:
    return "".join(_encode(tree, 0))


def _type_name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _show_key(key: Any) -> str:
    if type(key) is str:
        return f".{key}" if key.isidentifier() else f"[{json.dumps(key[:60])}]"
    return f"[{repr(key)[:60]}]" if type(key) in _SHAREABLE else f"[<{_type_name(type(key))}>]"


def _base64(_packer: _Packer, value: bytes | bytearray) -> str:
    return b64encode(value).decode()


def _unbase64(text: str) -> bytes:
    return b64decode(text, validate=True)


def _as_text(packer: _Packer, value: Any) -> Any:
    return packer.string(str(value))


def _read_moment(cls: Any, told: Any) -> Any:
    if type(told) is str:
        return cls.fromisoformat(told)
    moment = cls.fromisoformat(told["iso"])
    zone: Any = moment.tzinfo
    if "zone" in told:
        zone = ZoneInfo(told["zone"])
    elif "offset" in told or "name" in told:
        offset = timedelta(*told["offset"]) if "offset" in told else zone.utcoffset(None)
        zone = timezone(offset, told["name"]) if "name" in told else timezone(offset)
    return moment.replace(tzinfo=zone, fold=told.get("fold", 0))


_FACTORIES: Final[dict[str, Any]] = {
    "none": None,
    **{kind.__name__: kind for kind in (bool, bytes, dict, float, frozenset, int, list, set, str, tuple)},
}

_Write = Callable[[_Packer, Any], Any]
_TABLE: Final[tuple[tuple[str, type | None, _Write | None, Callable[[Any], Any]], ...]] = (
    ("str", None, None, lambda text: text.encode().decode("unicode_escape")),  # holds lone surrogates
    ("int", None, None, lambda digits: int(digits, 16)),
    ("float", None, None, float),
    ("dict", None, None, dict),
    ("tuple", tuple, _Packer.items, tuple),
    ("set", set, _Packer.elements, set),
    ("frozenset", frozenset, _Packer.elements, frozenset),
    ("deque", deque, lambda packer, value: [packer.items(value), value.maxlen], lambda told: deque(*told)),
    ("odict", OrderedDict, _Packer.pairs, OrderedDict),
    ("counter", Counter, _Packer.pairs, lambda told: Counter(dict(told))),
    (
        "defaultdict",
        defaultdict,
        _Packer.default_dict,
        lambda told: defaultdict(_FACTORIES[told[0]], told[1]),
    ),
    (
        "range",
        range,
        lambda packer, value: packer.items((value.start, value.stop, value.step)),
        lambda told: range(*told),
    ),
    ("bytes", bytes, _base64, _unbase64),
    ("bytearray", bytearray, _base64, lambda text: bytearray(_unbase64(text))),
    (
        "complex",
        complex,
        lambda packer, value: packer.items((value.real, value.imag)),
        lambda told: complex(*told),
    ),
    ("decimal", Decimal, _as_text, Decimal),
    ("uuid", UUID, _as_text, UUID),
    ("datetime", datetime, _Packer.moment, partial(_read_moment, datetime)),
    ("time", time, _Packer.moment, partial(_read_moment, time)),
    ("date", date, lambda _packer, value: value.isoformat(), date.fromisoformat),
    (
        "timedelta",
        timedelta,
        lambda _packer, value: [value.days, value.seconds, value.microseconds],
        lambda told: timedelta(*told),
    ),
    *((cls.__name__, cls, _as_text, cls) for cls in (PosixPath, WindowsPath, PurePosixPath, PureWindowsPath)),
)


def _tagged(tag: str, write: _Write) -> _Write:
    return lambda packer, value: {_TAG: tag, "v": write(packer, value)}


def _same(_packer: _Packer, value: Any) -> Any:
    return value


_WRITE: Final[dict[type, _Write]] = {
    bool: _same,
    NoneType: _same,
    str: _Packer.string,
    int: _Packer.integer,
    float: _Packer.number,
    list: _Packer.items,
    dict: _Packer.mapping,
    **{cls: _tagged(tag, write) for tag, cls, write, _ in _TABLE if cls is not None and write is not None},
}
_READ: Final = {tag: read for tag, _, _, read in _TABLE}


def _revive(known: Types, found: dict[str, Any]) -> Any:
    """Give what one decoded JSON object stands for; called by the decoder from the innermost outwards."""
    if _TAG not in found:
        return found
    tag = found[_TAG]
    try:
        if tag in _READ:
            return _READ[tag](found["v"])
        if tag in _READ_WHOLE:
            return _READ_WHOLE[tag](found, known)
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


# -- values of other libraries, which are touched only if the program has loaded them -------------------

_ITEM_TYPES = {bool, int, float, complex, str, bytes}


def _foreign(packer: _Packer, value: Any) -> dict[str, Any]:
    np, msgspec = sys.modules.get("numpy"), sys.modules.get("msgspec")
    if np is not None and type(value) is np.ndarray:
        return _array(packer, value, np)
    if (
        np is not None
        and isinstance(value, np.generic)
        and getattr(np, type(value).__name__, None) is type(value)
    ):
        item = _item(value)
        if type(item) in _ITEM_TYPES:  # not longdouble
            return {_TAG: "np", "t": type(value).__name__, "v": packer(item)}
        return {**_array(packer, np.asarray(value), np), "scalar": True}
    if msgspec is not None and value is msgspec.UNSET:
        return {_TAG: "msgspec.UNSET"}
    raise packer.refusal(value, _advice(type(value)))


def _array(packer: _Packer, array: Any, np: Any) -> dict[str, Any]:
    dtype = array.dtype
    refusal = packer.refusal(
        array, f"An array of {dtype} cannot be stored: convert it, or return array.tolist()."
    )
    if (
        dtype.hasobject or dtype.kind not in "biufcmMSUV" or dtype.char in "gG"
    ):  # long double differs by platform
        raise refusal
    try:
        descr = np.lib.format.dtype_to_descr(dtype)
        back = np.lib.format.descr_to_dtype(descr)
    except ValueError:  # fields that overlap
        raise refusal from None
    if back != dtype or back.type is not dtype.type:
        raise refusal
    tree = {_TAG: "ndarray", "dtype": packer(descr), "shape": list(array.shape)}
    tree["v"] = _base64(packer, array.astype(_gapless(dtype), order="K", copy=False).tobytes("A"))
    return {**tree, "order": "F"} if array.flags.fnc else tree


def _gapless(dtype: Any) -> Any:
    """Give a structured dtype without the gaps between its fields, which hold whatever was in memory."""
    if dtype.names is None:
        return dtype
    return importlib.import_module("numpy.lib.recfunctions").repack_fields(dtype, recurse=True)


def _item(value: Any) -> Any:
    """Give a numpy scalar as what Python has for it; its own `item()` cuts NULs off the end of text."""
    if isinstance(value, str):
        return str.__getitem__(value, slice(None))
    if isinstance(value, bytes):
        return bytes.__getitem__(value, slice(None))
    return value.item() if value.dtype.kind in "biufc" else None


def _read_scalar(found: dict[str, Any], _known: Types) -> Any:
    np = importlib.import_module("numpy")
    cls = getattr(np, found["t"])
    if not (isinstance(cls, type) and issubclass(cls, np.generic)):
        raise NotLoadable(f"numpy has no scalar {found['t']!r}. Run its node again.")
    return cls(found["v"])


def _read_array(found: dict[str, Any], _known: Types) -> Any:
    np = importlib.import_module("numpy")
    dtype = np.lib.format.descr_to_dtype(found["dtype"])
    if dtype.hasobject:  # pack refuses them: this would make pointers of stored bytes
        raise NotLoadable(
            "It holds an array of Python objects, which dagresume never writes. Run its node again."
        )
    raw, shape = bytearray(_unbase64(found["v"])), tuple(found["shape"])
    array = np.ndarray(shape, _gapless(dtype), raw, order=found.get("order", "C"))
    array = array.astype(dtype, order="K")  # a copy that owns its memory
    return array[()] if found.get("scalar") else array


_READ_WHOLE: Final[dict[str, Callable[[dict[str, Any], Types], Any]]] = {
    "obj": _restore,
    "enum": _member,
    "np": _read_scalar,
    "ndarray": _read_array,
    "msgspec.UNSET": lambda _found, _known: importlib.import_module("msgspec").UNSET,
}

_FRAMES = "Return plain data made of it, or write it to a file (ctx.artifacts) and return the path."
_ADVICE_BY_LIBRARY: Final = dict.fromkeys(
    ("pandas", "polars", "pyarrow", "torch", "tensorflow", "jax", "PIL"), _FRAMES
)
_ADVICE: Final[tuple[tuple[Any, str], ...]] = (
    (io.IOBase, "Return its content or its path."),
    (abc.Awaitable, "It was never awaited: write `await` before the call."),
    (
        (abc.Iterator, abc.AsyncIterator, abc.MappingView),
        "It can be read only once or changes later: return list(…) of it.",
    ),
    (BaseException, "Return str(error) or plain data about it, or raise it."),
    ((FunctionType, type), "Return what it makes, or its name."),
    (abc.Mapping, "Return dict(…) of it."),
)
_RETURN = "Return plain data, or a dataclass, NamedTuple or Enum that the node's return annotation names."


def _advice(cls: type) -> str:
    if by_library := _ADVICE_BY_LIBRARY.get(cls.__module__.partition(".")[0]):
        return by_library
    base = next((base for base in cls.__mro__ if base in _WRITE), None)
    if base is not None:
        return (
            f"It is a subclass of {base.__name__} and would come back as a mere {base.__name__}: convert it."
        )
    return next((advice for kinds, advice in _ADVICE if issubclass(cls, kinds)), _RETURN)


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
    cls: type = type(value)
    shape = _shape(cls)
    if shape is not None:
        state = _state(value, shape)
        extra = state.get("__pydantic_extra__") or {}
        return _draw_mapping({name: state[name] for name in shape.names if name in state} | extra, draw)
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
