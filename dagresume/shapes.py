"""Which classes may be stored: those that annotations lead to or that are registered, and how each is made.

Objects are stored by their state, field by field, and come back without `__init__` and `__post_init__`: what
these did is part of the state. Attributes beside the fields are kept, cached properties are not. A field that
the class has gained since then takes its default; one that it has lost refuses.
"""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType, MemberDescriptorType
from typing import Any, Final, ForwardRef, Literal, TypeVar, get_args, get_origin

from dagresume.errors import DefinitionError, NotLoadable
from dagresume.kinds import CLASSES, loaded

__all__ = ["EMPTY", "Shape", "Types", "known", "name_of", "register", "shape_of", "types_of"]

T = TypeVar("T")
Types = Mapping[str, type]
EMPTY: Final[Types] = MappingProxyType({})
"""No storable classes: what `types_of` gives for plain hints, always this one object."""

_Hints = list[tuple[Any, type | None]]  # each with the class in whose body it stands


class Shape:
    """How objects of one class are taken apart and made again."""

    def __init__(self, cls: type, kind: Any, fields: Mapping[str, Callable[[], Any]]) -> None:
        self.cls, self.kind, self.fields = cls, kind, fields
        # by their descriptors: neither `__setattr__` nor `frozen` stands in front of them
        self.slots: dict[str, Any] = {
            name: slot
            for base in reversed(cls.__mro__)
            for name, slot in vars(base).items()
            if isinstance(slot, MemberDescriptorType)
        }

    def take(self, value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Give the fields that are set and what else must be stored, past properties and `__getattr__`."""
        state = dict(zip(self.fields, tuple.__iter__(value), strict=True)) if isinstance(value, tuple) else {}
        for name, slot in self.slots.items():
            try:
                state[name] = slot.__get__(value)
            except AttributeError:  # not set
                continue
        state |= getattr(value, "__dict__", {})
        fields = {name: state.pop(name) for name in self.fields if name in state}
        return fields, self._trim(fields, state) if state else state

    def _trim(self, fields: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
        return {
            name: held
            for name, held in self.kind.trim(fields, rest).items()
            if name != "__orig_class__"  # left by Box[int](…)
            and not isinstance(inspect.getattr_static(self.cls, name, None), cached_property)
        }

    def make(self, fields: dict[str, Any], rest: dict[str, Any]) -> Any:
        """Give the object that was taken apart."""
        if lost := fields.keys() - self.fields.keys():
            raise NotLoadable(
                f"{name_of(self.cls)} has no field {min(lost)!r} any more. Give it back, or run its node again."
            )
        late = {name: self._default(name) for name in self.fields if name not in fields}
        value = self.kind.new(self.cls, fields, late)
        for name, held in (rest if isinstance(value, tuple) else {**fields, **late, **rest}).items():
            slot = self.slots.get(name)
            if slot is None:
                value.__dict__[name] = held
            else:
                slot.__set__(value, held)
        return value

    def _default(self, name: str) -> Any:
        try:
            return self.fields[name]()
        except Exception as error:
            raise NotLoadable(
                f"{name_of(self.cls)} has a new field {name!r}, which a stored one lacks. Give it a default,"
                " or run its node again."
            ) from error


@lru_cache(maxsize=1024)
def shape_of(cls: type) -> Shape | None:
    """Give how a class with fields is stored, None for an Enum and all that is not to be stored as an object."""
    if not issubclass(cls, Enum):
        for kind in loaded(CLASSES):
            fields = kind.fields(cls)
            if fields is not None:
                return Shape(cls, kind, fields)
    return None


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
        raise DefinitionError(
            f"codec.register({cls!r}): give it a dataclass, NamedTuple, attrs class, pydantic model,"
            " msgspec Struct or Enum."
        )
    _add(_registered, cls)
    return cls


def known(types: Types) -> Types:
    """Give these classes and the registered ones."""
    return {**types_of(*_registered.values()), **types}


def _is_storable(cls: type) -> bool:
    return issubclass(cls, Enum) or shape_of(cls) is not None


def _add(found: dict[str, type], cls: type) -> None:
    name = name_of(cls)
    interactive = cls.__module__ == "__main__" and (
        hasattr(sys, "ps1") or not hasattr(sys.modules["__main__"], "__file__")
    )
    if found.get(name, cls) is not cls and not interactive:
        raise DefinitionError(
            f"two different classes are called {name}. Stored values are told apart by that name: rename one,"
            " or define it once, at the top level of its module."
        )
    found[name] = cls


_searches: dict[tuple[Any, ...], Types] = {}


def types_of(*hints: Any) -> Types:
    """Give the storable classes that resolved annotations lead to, also through the fields of classes."""
    try:
        types = _searches.get(hints)
    except TypeError:  # an unhashable annotation
        return _search(hints)[0]
    if types is None:
        types, complete = _search(hints)
        if complete:  # else a name may be defined later
            if len(_searches) >= 1024:
                _searches.clear()
            _searches[hints] = types
    return types


def _search(hints: tuple[Any, ...]) -> tuple[Types, bool]:
    """Give the classes, and whether every name was known; a loop, for classes name each other in long chains."""
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
            if not isinstance(hint, type) or get_origin(hint) is not None:
                todo += [(part, owner) for part in _parts(hint)]
            elif _is_storable(hint):
                _add(found, hint)
                todo += _field_hints(hint) + unknown  # which may mean a class found only now
                unknown = []
            elif typing.is_typeddict(hint):
                todo += _field_hints(hint)
    return MappingProxyType(found) if found else EMPTY, not unknown


def _evaluate(hint: str | ForwardRef, owner: type | None, found: dict[str, type]) -> Any:
    text = hint if isinstance(hint, str) else hint.__forward_arg__
    module = getattr(hint, "__forward_module__", None) or getattr(owner, "__module__", None)
    names = {cls.__name__: cls for cls in found.values()}
    if owner is not None:
        names |= {owner.__name__: owner, **vars(owner)}
    # an annotation written in the program, never text from the store
    return eval(text, {**vars(typing), **vars(sys.modules.get(str(module), typing))}, names)


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


def _field_hints(cls: type) -> _Hints:
    if issubclass(cls, Enum):
        return []
    shape = shape_of(cls)
    hints = shape and shape.kind.hints(cls)
    if hints is not None:
        return [(hint, cls) for hint in hints]
    return [(hint, base) for base in cls.__mro__ for hint in _annotations(base).values()]


def _annotations(cls: type) -> Mapping[str, Any]:
    if sys.version_info >= (3, 14):
        import annotationlib

        return annotationlib.get_annotations(cls, format=annotationlib.Format.FORWARDREF)
    return inspect.get_annotations(cls)
