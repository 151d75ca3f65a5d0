"""Structs come back with the stored fields, although only `__init__` can make one; and so does UNSET."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from dagresume.kinds import Form, Kind, default


def kind(cls: type) -> Kind | None:
    if not issubclass(cls, msgspec.Struct):
        return None
    return Kind(
        cls.__struct_fields__, lambda name: _default(cls, name), lambda fields, late: cls(**fields, **late)
    )


def _default(cls: type[msgspec.Struct], name: str) -> Any:
    field = next(field for field in msgspec.structs.fields(cls) if field.name == name)
    return default(field.default, field.default_factory, msgspec.NODEFAULT)


FORMS: Final = (Form("UNSET", msgspec.UnsetType, lambda _: None, lambda _: msgspec.UNSET),)
