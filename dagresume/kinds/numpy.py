"""Scalars keep their type; arrays keep dtype, shape, Fortran order and bytes."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.lib.format import descr_to_dtype, dtype_to_descr

from dagresume.kinds import Form

# not long double, which differs by platform
_SCALARS: Final = {np.dtype(code).type for code in f"?efdFDSU{np.typecodes['AllInteger']}"}
_NAMED: Final = {cls.__name__: cls for cls in _SCALARS}


def kind(_cls: type) -> None:
    return None


def _from_scalar(value: Any) -> list[Any]:
    for base in (str, bytes):
        if isinstance(value, base):  # item() would cut NULs off its end
            return [type(value).__name__, base.__getitem__(value, slice(None))]  # type: ignore[index]
    return [type(value).__name__, value.item()]


def _to_scalar(told: list[Any]) -> Any:
    return _NAMED[told[0]](told[1])


def _from_array(array: Any) -> list[Any]:
    dtype = array.dtype
    advice = f"An array of {dtype} cannot be stored: convert it, or return array.tolist()."
    # objects would be pickled, other kinds keep their items elsewhere
    if dtype.hasobject or dtype.kind not in "biufcmMSUV" or dtype.char in "gG":
        raise TypeError(advice)
    try:
        descr = dtype_to_descr(dtype)
        back = descr_to_dtype(descr)
    except ValueError:  # fields that overlap
        raise TypeError(advice) from None
    if back != dtype or back.type is not dtype.type:
        raise TypeError(advice)
    held = array.astype(_gapless(dtype), order="K", copy=False)
    return [list(array.shape), "F" if array.flags.fnc else "C", descr, held.tobytes("A")]


def _gapless(dtype: Any) -> Any:
    if dtype.names is None:
        return dtype
    from numpy.lib.recfunctions import repack_fields  # slow to load

    return repack_fields(dtype, recurse=True)  # the gaps between fields hold whatever was in memory


def _from_item(value: Any) -> list[Any]:
    return [None, *_from_array(np.asarray(value))[1:]]


def _to_array(told: list[Any]) -> Any:
    shape, order, descr, held = told
    dtype: Any = descr_to_dtype(descr)
    if dtype.hasobject:  # never written: this would make pointers of stored bytes
        raise TypeError("an array of Python objects")
    array: Any = np.ndarray(shape or (), _gapless(dtype), memoryview(held), order=order)
    array = array.astype(dtype, order="K")  # a copy that owns its memory
    return array[()] if shape is None else array


FORMS: Final = (
    Form("ndarray", np.ndarray, _from_array, _to_array),
    # for these Python has no such number, time or record
    *(Form("ndarray", cls, _from_item, _to_array) for cls in (np.datetime64, np.timedelta64, np.void)),
    *(Form("np", cls, _from_scalar, _to_scalar) for cls in _SCALARS),
)
