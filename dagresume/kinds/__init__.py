"""What the codec must know of single libraries: a thin module for each, with the same names, imported by nobody.

One is loaded when a value may be of a library that the program has loaded, or when a stored form names it.

    fields(cls)              the default of each field by name, as a function (LookupError: it has none);
                             None: this is no class of the library, or its objects hold more than attributes
    hints(cls)               the annotations of its fields; None: those in the bodies of the class and its bases
    trim(fields, rest)       the attributes beside the fields, as far as they must be stored
    new(cls, fields, late)   an object to which all attributes are then given (tuples: with its fields); `late`
                             are the defaults of fields that the class has gained since then
    encode(value)            the form and the data that stand for a value; None: it is none of the library's;
                             TypeError: why it cannot be stored
    READ                     what makes the value of that data, by form
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import Any, Final

__all__ = ["CLASSES", "FORMS", "VALUES", "is_bare", "loaded", "twin"]

CLASSES: Final = {
    "pydantic": "pydantic",
    "msgspec": "msgspec",
    "attrs": "attr",
    "dataclass": "dataclasses",
    "namedtuple": "collections",
}
"""The modules that know classes, and what is loaded if such a class exists; asked in this order."""

VALUES: Final = {"numpy": "numpy", "msgspec": "msgspec"}
"""The modules that know values of other kinds, likewise."""

FORMS: Final = {"np": "numpy", "ndarray": "numpy", "UNSET": "msgspec"}
"""The module that reads a stored form: a closed list."""


@cache
def twin(name: str) -> Any:
    """Give the module for a library, which is imported with it."""
    return import_module(f"{__name__}.{name}")


def loaded(modules: dict[str, str]) -> Iterable[Any]:
    """Give those modules whose libraries the program has loaded."""
    return (twin(name) for name, library in modules.items() if sys.modules.get(library))


def is_bare(cls: type) -> bool:
    """Say whether objects of a class are nothing but attributes: not built on dict, Exception, …"""
    try:
        object.__new__(cls)
    except TypeError:
        return False
    return True
