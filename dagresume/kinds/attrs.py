"""Classes of attrs come back attribute by attribute, without `__init__`, validators and converters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attr

from dagresume.kinds import is_bare

_HASH = "_attrs_cached_hash"  # of str holds in one process only; where it is None, attrs makes it anew


def fields(cls: Any) -> Mapping[str, Callable[[], Any]] | None:
    if not (attr.has(cls) and is_bare(cls)):
        return None
    return {field.name: partial(_default, field) for field in attr.fields(cls)}


def _default(field: Any) -> Any:
    default = field.default
    if not isinstance(default, attr.Factory):  # type: ignore[arg-type]
        if default is attr.NOTHING:
            raise LookupError(field.name)
        return default
    if default.takes_self:
        raise LookupError(field.name)
    return default.factory()


def hints(_cls: type) -> None:
    return None


def trim(_fields: Mapping[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    return {**rest, _HASH: None} if _HASH in rest else rest


def new(cls: type, _fields: Mapping[str, Any], _late: Mapping[str, Any]) -> Any:
    return object.__new__(cls)
