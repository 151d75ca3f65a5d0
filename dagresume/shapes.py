"""Which classes may be stored, by annotations and registration; and the state of their objects.

Objects are taken apart into fields and come back without `__init__` and `__post_init__`: what these did is
part of the state. Attributes beside the fields are kept, cached properties are not. A field that the class
has gained since then takes its default; one that it has lost refuses.
"""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType, MemberDescriptorType
from typing import Any, Final, ForwardRef, Literal, TypeVar, get_args, get_origin

from dagresume.errors import DefinitionError, NotLoadable
from dagresume.kinds import Kind, loaded

__all__ = ["EMPTY", "Shape", "Types", "known", "name_of", "register", "shape_of", "types_of"]

T = TypeVar("T")
Types = Mapping[str, type]
EMPTY: Final[Types] = MappingProxyType({})
"""No storable classes: what `types_of` gives for plain hints, always this one object."""


# -- the state of an object -----------------------------------------------------------------------------


class Shape:
    """How objects of one class are taken apart and made again."""

    def __init__(self, cls: Any, kind: Kind) -> None:
        self.cls, self.kind = cls, kind
        # by their descriptors: neither `__setattr__` nor `frozen` stands in front of them
        slots = [item for base in reversed(cls.__mro__) for item in vars(base).items()]
        self.slots: dict[str, Any] = {k: slot for k, slot in slots if isinstance(slot, MemberDescriptorType)}

    def take(self, value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Give the fields and what else must be stored, past properties, `__getattr__` and class defaults."""
        names = self.kind.names
        state = dict(zip(names, tuple.__iter__(value), strict=True)) if isinstance(value, tuple) else {}
        for name, slot in self.slots.items():
            try:
                state[name] = slot.__get__(value)
            except AttributeError:  # not set
                continue
        state |= getattr(value, "__dict__", {})
        fields = {name: state.pop(name) for name in names if name in state}
        if not state:
            return fields, state
        return fields, {k: held for k, held in self.kind.trim(fields, state).items() if self._keeps(k)}

    def _keeps(self, name: str) -> bool:
        static = inspect.getattr_static(self.cls, name, None)
        return name != "__orig_class__" and not isinstance(static, cached_property)  # Box[int](…) leaves that

    def make(self, fields: dict[str, Any], rest: dict[str, Any]) -> Any:
        """Give the object that was taken apart."""
        if lost := fields.keys() - set(self.kind.names):
            gone = f"{name_of(self.cls)} has no field {min(lost)!r} any more."
            raise NotLoadable(f"{gone} Give it back, or run its node again.")
        late = {name: self._late(name) for name in self.kind.names if name not in fields}
        value = self.kind.new(fields, late) if self.kind.new else object.__new__(self.cls)
        for name, held in (rest if isinstance(value, tuple) else {**fields, **late, **rest}).items():
            if slot := self.slots.get(name):
                slot.__set__(value, held)
            else:
                value.__dict__[name] = held
        return value

    def _late(self, name: str) -> Any:
        try:
            return self.kind.default(name)
        except Exception as error:
            new = f"{name_of(self.cls)} has a new field {name!r}, which a stored one lacks."
            raise NotLoadable(f"{new} Give it a default, or run its node again.") from error


@lru_cache(maxsize=1024)
def shape_of(cls: Any) -> Shape | None:
    """Give how objects of a class with fields are stored; None: it has none, or is an Enum."""
    kinds = () if issubclass(cls, Enum) else (module.kind(cls) for module in loaded())
    kind = next((kind for kind in kinds if kind), None)
    try:
        if kind and not kind.new:
            object.__new__(cls)
    except TypeError:  # built on dict, Exception, …: there is state that no attribute holds
        return None
    return Shape(cls, kind) if kind else None


# -- which classes may be stored ------------------------------------------------------------------------


def name_of(cls: type) -> str:
    """Give the name of a class in stored text, `module:qualname`."""
    module = cls.__module__
    if module in {"__main__", "__mp_main__"}:
        # `python flow.py`, its spawned workers and `import flow` must mean the same class
        main = sys.modules.get(module)
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec else Path(file).stem if file else "__main__"
    return f"{module}:{cls.__qualname__}"


_registered: dict[str, type] = {}


def register(cls: type[T]) -> type[T]:
    """Give the class back, now storable everywhere with all that its fields name; usable as a decorator."""
    if not (isinstance(cls, type) and _is_storable(cls)):
        kinds = "a dataclass, NamedTuple, attrs class, pydantic model, msgspec Struct or Enum"
        raise DefinitionError(f"codec.register({cls!r}): give it {kinds}.")
    _add(_registered, cls)
    return cls


def known(types: Types) -> Types:
    """Give these classes and the registered ones with all that their fields name."""
    return {**types_of(*_registered.values()), **types}


def _is_storable(cls: Any) -> bool:
    return issubclass(cls, Enum) or shape_of(cls) is not None


def _add(found: dict[str, type], cls: type) -> None:
    name, main = name_of(cls), sys.modules["__main__"]
    if found.get(name, cls) is not cls and not (
        cls.__module__ == "__main__" and (hasattr(sys, "ps1") or not hasattr(main, "__file__"))
    ):
        raise DefinitionError(
            f"two different classes are called {name}. Stored values are told apart by that name: rename one,"
            " or define it once, at the top level of its module."
        )
    found[name] = cls


_searches: dict[tuple[int, ...], tuple[tuple[Any, ...], Types]] = {}


def types_of(*hints: Any) -> Types:
    """Give the storable classes that resolved annotations lead to, also through the fields of classes."""
    key = tuple(map(id, hints))  # they may be unhashable; they are held, so that no id is used again
    found = _searches.get(key)
    if found is None:
        types, complete = _search(hints)
        if not complete:  # a name may be defined later
            return types
        if len(_searches) >= 1024:
            _searches.clear()
        found = _searches[key] = hints, types
    return found[1]


_Hints = list[tuple[Any, type | None]]  # each with the class in whose body it stands


def _search(hints: tuple[Any, ...]) -> tuple[Types, bool]:
    """Give the classes, and whether every name was known; a loop, for they name each other in long chains."""
    found: dict[str, type] = {}
    seen: dict[int, Any] = {}  # by id, and held so that no id is given away again
    unknown: _Hints = []
    todo: _Hints = [(hint, None) for hint in hints]
    while todo:
        hint, owner = todo.pop()
        if isinstance(hint, str | ForwardRef):
            try:
                todo.append((_evaluate(hint, owner, found), owner))
            except Exception:  # names of an unreachable function, of TYPE_CHECKING imports: best effort
                unknown.append((hint, owner))
        elif id(hint) not in seen:
            seen[id(hint)] = hint
            todo += _parts(hint, owner)
            if isinstance(hint, type) and get_origin(hint) is None and _is_storable(hint):
                _add(found, hint)
                todo, unknown = todo + unknown, []  # which may mean a class found only now
    return MappingProxyType(found) if found else EMPTY, not unknown


def _evaluate(hint: str | ForwardRef, owner: type | None, found: dict[str, type]) -> Any:
    text = hint if isinstance(hint, str) else hint.__forward_arg__
    module = getattr(hint, "__forward_module__", None) or getattr(owner, "__module__", None)
    names = {cls.__name__: cls for cls in found.values()}
    if owner is not None:
        names |= {owner.__name__: owner, **vars(owner)}
    # an annotation written in the program, never text from the store
    return eval(text, {**vars(typing), **vars(sys.modules.get(str(module), typing))}, names)


def _parts(hint: Any, owner: type | None) -> _Hints:
    """Give what a hint is made of: `list[A]`, `A | B`, `type X = …`, NewType, TypeVar, a class, …"""
    origin, parts = get_origin(hint), []
    if isinstance(hint, type) and origin is None:
        return _field_hints(hint)
    if isinstance(hint, list):  # the parameters of a Callable
        parts = hint
    elif origin is Literal:
        parts = [type(value) for value in get_args(hint) if isinstance(value, Enum)]
    elif origin is typing.Annotated:
        parts = [hint.__origin__]
    else:
        inner = [getattr(hint, name, None) for name in ("__value__", "__supertype__", "__bound__")]
        parts = [origin, *get_args(hint), *inner, *getattr(hint, "__constraints__", ())]
    return [(part, owner) for part in parts]


_FORWARDREF: Any = {"format": 3} if sys.version_info >= (3, 14) else {}  # names of later stay unresolved


def _field_hints(cls: type) -> _Hints:
    shape = shape_of(cls)
    if shape and shape.kind.hints is not None:
        return [(hint, cls) for hint in shape.kind.hints]
    if shape or typing.is_typeddict(cls):
        return [(hint, b) for b in cls.__mro__ for hint in inspect.get_annotations(b, **_FORWARDREF).values()]
    return []
