"""Classes of attrs come back without `__init__`, validators and converters."""

from __future__ import annotations

from typing import Any, Final

import attr

from dagresume.kinds import Form, Kind

_HASH = "_attrs_cached_hash"  # of str holds in one process only; where it is None, attrs makes it anew


def kind(cls: Any) -> Kind | None:
    if not isinstance(getattr(cls, "__attrs_attrs__", None), tuple):  # a metaclass may answer to any name
        return None
    fields = attr.fields_dict(cls)
    return Kind(tuple(fields), lambda name: _default(fields[name].default), trim=_trim)


def _default(default: Any) -> Any:
    made = isinstance(default, attr.Factory)  # type: ignore[arg-type]
    if default is attr.NOTHING or (made and default.takes_self):
        raise LookupError
    return default.factory() if made else default


def _trim(_fields: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    return {**rest, _HASH: None} if _HASH in rest else rest


FORMS: Final[tuple[Form, ...]] = ()
