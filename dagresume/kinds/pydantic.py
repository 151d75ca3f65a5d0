"""Models come back as they were, what was set and private too, without being validated again."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel

from dagresume.kinds import Form, Kind


def kind(cls: type) -> Kind | None:
    if not issubclass(cls, BaseModel) or cls is BaseModel:
        return None
    if not cls.__pydantic_complete__:
        cls.model_rebuild(raise_errors=False)
    fields = cls.model_fields
    return Kind(
        tuple(fields),
        lambda name: _default(cls, name),
        lambda fields, _late: _new(cls, fields),
        _trim,
        [field.annotation for field in fields.values()],  # resolved, also for generic models
    )


def _default(cls: type[BaseModel], name: str) -> Any:
    field = cls.model_fields[name]
    if field.is_required():
        raise LookupError
    return field.get_default(call_default_factory=True)


def _new(cls: type[BaseModel], fields: dict[str, Any]) -> BaseModel:
    model = object.__new__(cls)
    for name, held in _usual(fields).items():
        object.__setattr__(model, name, held)
    return model


def _trim(fields: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    usual = _usual(fields)
    return {name: held for name, held in rest.items() if name not in usual or held != usual[name]}


def _usual(fields: dict[str, Any]) -> dict[str, Any]:
    hidden: dict[str, Any] = dict.fromkeys(("__pydantic_extra__", "__pydantic_private__"))
    return {"__pydantic_fields_set__": set(fields), **hidden}


FORMS: Final[tuple[Form, ...]] = ()
