"""Dataclasses come back attribute by attribute, without `__init__` and `__post_init__`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dagresume.kinds import is_bare


def fields(cls: Any) -> Mapping[str, Callable[[], Any]] | None:
    # a metaclass may answer to any name
    if not (isinstance(getattr(cls, "__dataclass_fields__", None), dict) and is_bare(cls)):
        return None
    return {field.name: partial(_default, field) for field in dataclasses.fields(cls)}


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    if field.default is dataclasses.MISSING:
        raise LookupError(field.name)
    return field.default


def hints(_cls: type) -> None:
    return None


def trim(_fields: Mapping[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    return rest


def new(cls: type, _fields: Mapping[str, Any], _late: Mapping[str, Any]) -> Any:
    return object.__new__(cls)
