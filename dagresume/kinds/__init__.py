"""What the codec must know of single libraries: a thin module for each, the same names in each.

No other module imports them: one is loaded when a value may be of a library that the program has loaded, or
when a stored form names it.

    kind(cls)    how the objects of a class are stored; None: it is none of the library's
    FORMS        how other values are stored, a row for each type
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Final, NamedTuple

__all__ = ["LIBRARIES", "TAGS", "Form", "Kind", "default", "loaded", "twin"]

LIBRARIES: Final = {
    "numpy": "numpy",
    "pydantic": "pydantic.main",
    "msgspec": "msgspec",
    "attrs": "attr",
    "standard": "sys",
}
"""The module for each library, and what is loaded if the library is; asked in this order."""

TAGS: Final = {"np": "numpy", "ndarray": "numpy", "UNSET": "msgspec"}
"""The module that a stored form needs: a closed list, `standard` apart."""


class Form(NamedTuple):
    """How the values of one type, and of no subclass, are stored."""

    tag: str
    cls: type
    encode: Callable[[Any], Any]
    """The data that stands for a value; TypeError: why it cannot be stored, and what to do."""

    decode: Callable[[Any], Any]


class Kind(NamedTuple):
    """How the objects of a class are stored: by their attributes, some of which are its fields."""

    names: tuple[str, ...]
    """Its fields, in order."""

    default: Callable[[str], Any]
    """The value of a field that a stored object lacks; LookupError: it has none."""

    new: Callable[[dict[str, Any], dict[str, Any]], Any] | None = None
    """An object made of the stored fields and the defaults of the others; None: a bare one. Its attributes
    are set afterwards, but not the items of a tuple."""

    trim: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] = lambda _fields, rest: rest
    """The attributes beside the fields, as far as they must be stored."""

    hints: list[Any] | None = None
    """The annotations of its fields; None: those in the bodies of the class and its bases."""


@cache
def twin(name: str) -> Any:
    """Give the module for a library, which it imports."""
    return import_module(f"{__name__}.{name}")


def loaded() -> list[Any]:
    """Give the modules for the libraries that the program has loaded."""
    return [twin(name) for name, library in LIBRARIES.items() if sys.modules.get(library)]


def default(value: Any, factory: Any, missing: Any) -> Any:
    """Give a default as most libraries describe one."""
    if value is not missing:
        return value
    if factory is missing:
        raise LookupError
    return factory()
