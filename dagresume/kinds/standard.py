"""The standard library; its dataclasses come back without `__init__`, its named tuples without `__new__`."""

from __future__ import annotations

import dataclasses
from base64 import b64decode, b64encode
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from functools import partial
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, Final
from uuid import UUID

from dagresume.kinds import Form, Kind, default


def kind(cls: Any) -> Kind | None:
    # a metaclass may answer to any name
    if isinstance(getattr(cls, "__dataclass_fields__", None), dict):
        fields = {field.name: field for field in dataclasses.fields(cls)}
        return Kind(
            tuple(fields),
            lambda name: default(fields[name].default, fields[name].default_factory, dataclasses.MISSING),
        )
    if issubclass(cls, tuple) and isinstance(getattr(cls, "_field_defaults", None), dict):
        names = cls._fields
        return Kind(
            names,
            cls._field_defaults.__getitem__,
            lambda fields, late: tuple.__new__(cls, [{**fields, **late}[name] for name in names]),
        )
    return None


def _zone_info() -> Any:
    from zoneinfo import ZoneInfo  # with what it needs to find the zones: only for times that have one

    return ZoneInfo


def _from_moment(value: datetime | time) -> Any:
    zone: Any = value.tzinfo
    if (zone is None or zone is UTC) and not value.fold:
        return value.isoformat()
    if type(zone) is _zone_info() and zone.key:
        return [value.isoformat(), zone.key, value.fold]
    if zone is None or type(zone) is timezone:
        return [value.isoformat(), zone and list(zone.__getinitargs__()), value.fold]  # type: ignore[attr-defined]
    kind = f"{type(zone).__module__}.{type(zone).__qualname__}"
    raise TypeError(f"Its tzinfo is a {kind}: use zoneinfo.ZoneInfo or datetime.timezone.")


def _to_moment(cls: Any, told: Any) -> Any:
    if type(told) is str:
        return cls.fromisoformat(told)
    iso, zone, fold = told
    zone = _zone_info()(zone) if type(zone) is str else zone and timezone(*zone)
    return cls.fromisoformat(iso).replace(tzinfo=zone, fold=fold)


def _from_bytes(value: bytes | bytearray) -> str:
    return b64encode(value).decode()


_to_bytes = partial(b64decode, validate=True)

FORMS: Final = (
    Form("bytes", bytes, _from_bytes, _to_bytes),
    Form("bytearray", bytearray, _from_bytes, lambda text: bytearray(_to_bytes(text))),
    Form("complex", complex, lambda x: [x.real, x.imag], lambda told: complex(*told)),
    Form("decimal", Decimal, str, Decimal),
    Form("uuid", UUID, str, UUID),
    Form("datetime", datetime, _from_moment, partial(_to_moment, datetime)),
    Form("time", time, _from_moment, partial(_to_moment, time)),
    Form("date", date, date.isoformat, date.fromisoformat),
    Form(
        "timedelta", timedelta, lambda x: [x.days, x.seconds, x.microseconds], lambda told: timedelta(*told)
    ),
    *(Form(cls.__name__, cls, str, cls) for cls in (PosixPath, WindowsPath, PurePosixPath, PureWindowsPath)),
)
