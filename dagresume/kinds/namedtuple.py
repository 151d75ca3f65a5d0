"""Tuples with names come back item by item, without a `__new__` of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any


def fields(cls: Any) -> Mapping[str, Callable[[], Any]] | None:
    defaults = getattr(cls, "_field_defaults", None)
    if not (issubclass(cls, tuple) and isinstance(defaults, dict)):
        return None
    return {name: partial(defaults.__getitem__, name) for name in cls._fields}


def hints(_cls: type) -> None:
    return None


def trim(_fields: Mapping[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    return rest


def new(cls: Any, fields: Mapping[str, Any], late: Mapping[str, Any]) -> Any:
    held = {**fields, **late}
    return tuple.__new__(cls, [held[name] for name in cls._fields])
