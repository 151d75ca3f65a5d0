"""Structs come back with the stored fields, although only their `__init__` can make one; and UNSET does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import msgspec


def fields(cls: type) -> Mapping[str, Callable[[], Any]] | None:
    if not issubclass(cls, msgspec.Struct):
        return None
    return {name: partial(_default, cls, name) for name in cls.__struct_fields__}


def _default(cls: type[msgspec.Struct], name: str) -> Any:
    field = next(field for field in msgspec.structs.fields(cls) if field.name == name)
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    if field.default is msgspec.NODEFAULT:
        raise LookupError(name)
    return field.default


def hints(_cls: type) -> None:
    return None


def trim(_fields: Mapping[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    return rest


def new(cls: type, fields: Mapping[str, Any], late: Mapping[str, Any]) -> Any:
    return cls(**fields, **late)


def encode(value: Any) -> tuple[str, None] | None:
    return ("UNSET", None) if value is msgspec.UNSET else None


READ: Final[Mapping[str, Callable[[Any], Any]]] = {"UNSET": lambda _: msgspec.UNSET}
