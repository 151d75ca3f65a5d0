"""Models come back as they were, what was set and private too, without being validated again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pydantic import BaseModel

from dagresume.kinds import is_bare


def fields(cls: type) -> Mapping[str, Callable[[], Any]] | None:
    if not (issubclass(cls, BaseModel) and is_bare(cls)):
        return None
    if not cls.__pydantic_complete__:
        cls.model_rebuild(raise_errors=False)
    return {name: partial(_default, cls, name) for name in cls.model_fields}


def _default(cls: type[BaseModel], name: str) -> Any:
    field = cls.model_fields[name]
    if field.is_required():
        raise LookupError(name)
    return field.get_default(call_default_factory=True)


def hints(cls: type[BaseModel]) -> list[Any]:
    return [field.annotation for field in cls.model_fields.values()]


def trim(fields: Mapping[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    usual = _usual(fields)
    return {name: held for name, held in rest.items() if name not in usual or held != usual[name]}


def new(cls: type[BaseModel], fields: Mapping[str, Any], _late: Mapping[str, Any]) -> Any:
    model = object.__new__(cls)
    for name, held in _usual(fields).items():
        object.__setattr__(model, name, held)
    return model


def _usual(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "__pydantic_fields_set__": set(fields),
        "__pydantic_extra__": None,
        "__pydantic_private__": None,
    }
