"""Bodies in other processes: what travels with them, so that their spans find their parent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["attached"]


def attached(carrier: Mapping[str, str], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function as a part of the trace that a carrier tells of."""
    from opentelemetry import context, propagate

    token = context.attach(propagate.extract(carrier))
    try:
        return fn(*args, **kwargs)
    finally:
        context.detach(token)
