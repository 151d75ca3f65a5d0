"""What people get to see of a run: the log, and errors as plain text."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import structlog

from dagresume.clock import to_datetime
from dagresume.events import Record
from dagresume.masks import NO_SECRETS, Mask, without_passwords
from dagresume.policy import NodeFailure

__all__ = ["describe_error", "failure_of", "log", "tell"]

_PACKAGE: Final = Path(__file__).parent
_KEEP: Final = 16_384  # characters of a message or traceback


class _Log:
    """structlog's logger: the application's own configuration if it made one, else through stdlib logging.

    An embedding application that configured neither sees warnings only, as with any library.
    """

    def __init__(self) -> None:
        self._stdlib = structlog.wrap_logger(
            logging.getLogger("dagresume"),
            wrapper_class=structlog.stdlib.BoundLogger,
            processors=[
                structlog.stdlib.filter_by_level,
                structlog.processors.KeyValueRenderer(key_order=["event"], drop_missing=True),
            ],
        )

    def _target(self) -> Any:
        return structlog.get_logger("dagresume") if structlog.is_configured() else self._stdlib

    @property
    def verbose(self) -> bool:
        """Whether events of level debug can reach anybody; asked once a run, so that nodes need not."""
        return structlog.is_configured() or logging.getLogger("dagresume").isEnabledFor(logging.DEBUG)

    def debug(self, event: str, **values: Any) -> None:
        self._target().debug(event, **_shown(values))

    def info(self, event: str, **values: Any) -> None:
        self._target().info(event, **_shown(values))

    def warning(self, event: str, **values: Any) -> None:
        self._target().warning(event, **_shown(values))

    def error(self, event: str, **values: Any) -> None:
        self._target().error(event, **_shown(values))


def _shown(values: Mapping[str, Any]) -> dict[str, Any]:
    """Whatever a text holds, it is no password of a URL."""
    return {name: without_passwords(v) if isinstance(v, str) else v for name, v in values.items()}


log: Final = _Log()


def tell(path: str, attempt: int, error: BaseException, reason: str, mask: Mask) -> NodeFailure:
    """Give the failure of an attempt as data; what `mask` hides is in none of its texts."""
    told = describe_error(error, mask)
    return NodeFailure(path, attempt, told["type"], told["message"], told["traceback"], reason, None, error)


def describe_error(error: BaseException, mask: Mask = NO_SECRETS) -> dict[str, str]:
    """Give `type` (qualified name), `message` and `traceback` of an error as text; never fails, never keeps
    the object.
    """
    told = getattr(error, "told", None)  # raised elsewhere, arrived as text
    if isinstance(told, Mapping):
        return {name: _cut(mask.text(str(told.get(name, "")))) for name in ("type", "message", "traceback")}
    kind = type(error)
    name = (
        kind.__qualname__
        if kind.__module__ in {"builtins", "__main__"}
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    try:
        message = str(error)
    except Exception as problem:
        message = f"<str() of it failed: {type(problem).__name__}>"
    try:
        shown = "".join(traceback.format_exception(kind, error, _users_part(error.__traceback__)))
    except Exception:
        shown = ""
    # hidden before it is cut: of half a secret nothing would be known
    return {"type": name, "message": _cut(mask.text(message)), "traceback": _cut(mask.text(shown))}


def _users_part(tb: TracebackType | None) -> TracebackType | None:
    """Leave out the engine's own frames above the user's code."""
    start = tb
    while start is not None and Path(start.tb_frame.f_code.co_filename).parent == _PACKAGE:
        start = start.tb_next
    return start


def _cut(text: str) -> str:
    if len(text) <= _KEEP:
        return text
    half = _KEEP // 2
    return f"{text[:half]}\n… {len(text) - _KEEP} characters left out …\n{text[-half:]}"


def failure_of(record: Record) -> NodeFailure:
    """Give the failure that a stored record tells of."""
    facts = record.facts
    kind, message, traceback_ = (str(facts.get(name, "")) for name in ("type", "message", "traceback"))
    path, attempt = record.path or "", record.attempt or 0
    return NodeFailure(path, attempt, kind, message, traceback_, record.reason, to_datetime(record.at))
