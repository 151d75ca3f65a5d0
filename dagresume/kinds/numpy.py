"""Scalars keep their type; arrays keep dtype, shape, Fortran order and bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.lib.format import descr_to_dtype, dtype_to_descr
from numpy.lib.recfunctions import repack_fields


def encode(value: Any) -> tuple[str, Any] | None:
    cls = type(value)
    if cls is np.ndarray:
        return "ndarray", _taken_apart(value)
    if not (isinstance(value, np.generic) and getattr(np, cls.__name__, None) is cls):
        return None
    item = None if value.dtype.kind in "mMV" else _item(value)
    if item is None or isinstance(item, np.generic):  # Python has no such number, time or record
        return "ndarray", [None, *_taken_apart(np.asarray(value))[1:]]
    return "np", [cls.__name__, item]


def _item(value: Any) -> Any:
    for base in (str, bytes):  # item() would cut NULs off their end
        if isinstance(value, base):
            return base.__getitem__(value, slice(None))
    return value.item()


def _taken_apart(array: Any) -> list[Any]:
    dtype = array.dtype
    advice = f"An array of {dtype} cannot be stored: convert it, or return array.tolist()."
    # objects would be pickled, other kinds keep their items elsewhere, long double differs by platform
    if dtype.hasobject or dtype.kind not in "biufcmMSUV" or dtype.char in "gG":
        raise TypeError(advice)
    try:
        descr = dtype_to_descr(dtype)
        back = descr_to_dtype(descr)
    except ValueError:  # fields that overlap
        raise TypeError(advice) from None
    if back != dtype or back.type is not dtype.type:
        raise TypeError(advice)
    # the gaps between the fields of a record hold whatever was in memory
    held = array.astype(repack_fields(dtype, recurse=True), order="K", copy=False)
    return [list(array.shape), "F" if array.flags.fnc else "C", descr, held.tobytes("A")]


def _array(told: list[Any]) -> Any:
    shape, order, descr, held = told
    dtype: Any = descr_to_dtype(descr)
    if dtype.hasobject:  # never written: this would make pointers of stored bytes
        raise TypeError("an array of Python objects")
    array: Any = np.ndarray(
        shape or (), repack_fields(dtype, recurse=True), bytearray(memoryview(held)), order=order
    )
    array = array.astype(dtype, order="K")  # a copy that owns its memory
    return array[()] if shape is None else array


def _scalar(told: list[Any]) -> Any:
    name, item = told
    cls = getattr(np, name)
    if not (isinstance(cls, type) and issubclass(cls, np.generic)):
        raise TypeError(f"numpy has no scalar {name!r}")
    return cls(item)


READ: Final[Mapping[str, Callable[[Any], Any]]] = {"np": _scalar, "ndarray": _array}
