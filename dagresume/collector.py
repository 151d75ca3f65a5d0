"""The garbage collector, asked to wait while very many objects are made that all stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["paused"]


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Let the collector rest: it would look through all that was made so far again and again, which takes as
    long as making it. For a stretch of code that awaits nothing; where it was off, it stays off.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
