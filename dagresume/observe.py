"""What people get to see of a run: the log, errors as plain text, and a seam for telemetry."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import structlog

from dagresume.clock import to_datetime
from dagresume.events import Record
from dagresume.masks import NO_SECRETS, Mask, without_passwords
from dagresume.policy import NodeFailure

if TYPE_CHECKING:
    from dagresume.store import Outcome, Unit

__all__ = ["Observer", "Watch", "describe_error", "failure_of", "log", "observe_by_default", "tell", "watch"]

_T = TypeVar("_T")
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


# -- telemetry ------------------------------------------------------------------------------------------


class Observer(Protocol):
    """Hears what an engine does: `Engine(observer=…)`. All of it is called on the engine's loop and must not
    block.

    A run is an object with `run_id workflow context now() status reason error ended`; a job one with `run
    path attempt vertex`. What an observer raises is logged, and changes nothing of the run.
    """

    def opens(self, run: Any, carrier: Mapping[str, str]) -> Mapping[str, str]:
        """Learn that this process is about to drive a run; `carrier` is what was given here the last time.

        Called in the context that the bodies of the run get copies of. What it gives is kept with the run.
        """

    def begins(self, job: Any) -> None:
        """Learn that the body of an attempt is about to begin; called in the context it will run in."""

    def around(self) -> Callable[..., Any] | None:
        """Give what calls the body if that is elsewhere, with it and its arguments: it travels by pickle.

        Called in the context of the body.
        """

    def commits(self, units: Sequence[Unit]) -> Callable[[Sequence[Outcome]], None]:
        """Learn that a transaction begins; what is given is called with what became of each of its units.

        Units of runs have the attributes `run`, and `timed` and `appended` if something waits for them.
        """


def _tell_nobody(outcomes: Sequence[Outcome]) -> None:
    """Take what became of a transaction for an observer that did not want to know."""


class Watch:
    """An observer whose errors are nobody's but its own."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def opens(self, run: Any, carrier: Mapping[str, str]) -> Mapping[str, str]:
        """Give what the observer wants kept with the run."""
        return self._ask({}, run.context.run, self._observer.opens, run, carrier)

    def begins(self, context: Any, job: Any) -> None:
        """Tell it that a body begins in this context."""
        self._ask(None, context.run, self._observer.begins, job)

    def around(self) -> Callable[..., Any] | None:
        """Give what calls a body in another process."""
        return self._ask(None, self._observer.around)

    def commits(self, units: Sequence[Unit]) -> Callable[[Sequence[Outcome]], None]:
        """Give what is to be called with the outcomes."""
        told: Callable[[Sequence[Outcome]], None]
        told = self._ask(_tell_nobody, self._observer.commits, units)  # type: ignore[arg-type]
        return lambda outcomes: self._ask(None, told, outcomes)

    @staticmethod
    def _ask(otherwise: _T, ask: Callable[..., _T], *args: Any) -> _T:
        try:
            return ask(*args)
        except Exception as error:
            log.warning("an observer raised an error", error=f"{type(error).__name__}: {error}")
            return otherwise


_default: list[Callable[[], Observer]] = []


def observe_by_default(make: Callable[[], Observer] | None) -> None:
    """Let engines made from now on have such an observer, unless they are given one; None: no longer."""
    _default[:] = [] if make is None else [make]


def watch(observer: Observer | None) -> Watch | None:
    """Give an observer, or the one by default, as an engine uses it."""
    if observer is None and _default:
        observer = _default[0]()
    return None if observer is None else Watch(observer)
