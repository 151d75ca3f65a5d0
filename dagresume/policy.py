"""Rules as frozen data: retries, recovery, limits, budgets, join triggers, failures. Nothing here does
anything.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum
from typing import Any, Final, Literal

from dagresume.errors import DefinitionError

__all__ = [
    "NOT_DONE",
    "TRIGGERS",
    "UNSAID",
    "Budget",
    "ItemFailure",
    "Limit",
    "NodeFailure",
    "Recovery",
    "Retry",
    "RetryAfter",
    "Settled",
    "Trigger",
    "Value",
    "answer",
    "asked_to_wait",
    "join",
    "tolerated",
]


def _seconds(owner: str, name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise DefinitionError(f"{owner}({name}={value!r}): give seconds, a number that is 0 or more.")
    return float(value)


@dataclass(frozen=True, slots=True, init=False)
class Retry:
    """How often and when a failing attempt is tried again.

    `attempts` counts the first try. The wait before try n+1 is `delay * backoff**(n-1)`, at most `max_delay`,
    plus a random share of up to `jitter` of it; all in seconds. Only errors of `retry_on` and not of `never`
    are retried. `give_up_after`: a map stops starting items after that many failed in a row.
    """

    attempts: int
    delay: float
    backoff: float
    max_delay: float
    jitter: float
    retry_on: tuple[type[BaseException], ...]
    never: tuple[type[BaseException], ...]
    give_up_after: int | None

    def __init__(
        self,
        attempts: int = 1,
        *,
        delay: float | None = 1.0,
        backoff: float = 2.0,
        max_delay: float = 60.0,
        jitter: float = 0.1,
        retry_on: tuple[type[BaseException], ...] | type[BaseException] = (Exception,),
        never: tuple[type[BaseException], ...] | type[BaseException] = (),
        give_up_after: int | None = None,
    ) -> None:
        if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1:
            raise DefinitionError(
                f"Retry(attempts={attempts!r}): give a whole number from 1 (no retry) upwards."
            )
        if give_up_after is not None and (not isinstance(give_up_after, int) or give_up_after < 1):
            raise DefinitionError(
                f"Retry(give_up_after={give_up_after!r}): give a whole number from 1 upwards."
            )
        if not backoff >= 1:
            raise DefinitionError(f"Retry(backoff={backoff!r}): give a factor of 1 or more.")
        put = object.__setattr__
        put(self, "attempts", attempts)
        put(self, "delay", _seconds("Retry", "delay", delay or 0))
        put(self, "backoff", float(backoff))
        put(self, "max_delay", _seconds("Retry", "max_delay", max_delay))
        put(self, "jitter", _seconds("Retry", "jitter", jitter))
        put(self, "retry_on", _classes("retry_on", retry_on))
        put(self, "never", _classes("never", never))
        put(self, "give_up_after", give_up_after)

    def allows(self, error: BaseException) -> bool:
        """Say whether this kind of error is worth another try."""
        return isinstance(error, self.retry_on) and not isinstance(error, self.never)

    def wait(self, attempt: int, draw: float | None = None) -> float:
        """Give the seconds to wait after the failure of try number `attempt` (from 1); `draw` in [0, 1) for
        tests.
        """
        if self.delay == 0:
            return 0.0
        # exponent bounded: 2.0 ** 2000 overflows, and max_delay decides long before
        doublings = (
            min(attempt - 1, 1 + int(math.log(max(self.max_delay / self.delay, 1)) / math.log(self.backoff)))
            if self.backoff > 1
            else 0
        )
        wait = min(self.delay * self.backoff**doublings, self.max_delay)
        return wait * (1 + self.jitter * (random.random() if draw is None else draw))


def _classes(name: str, given: Any) -> tuple[type[BaseException], ...]:
    classes = given if isinstance(given, tuple) else (given,) if isinstance(given, type) else tuple(given)
    for one in classes:
        if not (isinstance(one, type) and issubclass(one, BaseException)):
            raise DefinitionError(f"Retry({name}=…): {one!r} is not an exception class.")
    return classes


@dataclass(frozen=True, slots=True)
class Recovery:
    """What may happen without a person after the process died (R22 to R28). By default nothing does."""

    auto_resume: bool = False
    policy: Literal["resume_from_last_incomplete", "abort", "resume_from_start"] = (
        "resume_from_last_incomplete"
    )
    max_attempts: int = 3

    def __post_init__(self) -> None:
        if self.policy not in {"resume_from_last_incomplete", "abort", "resume_from_start"}:
            raise DefinitionError(
                f"Recovery(policy={self.policy!r}): one of 'resume_from_last_incomplete', 'abort',"
                " 'resume_from_start'."
            )
        if isinstance(self.max_attempts, bool) or not 1 <= self.max_attempts <= 20:
            raise DefinitionError(
                f"Recovery(max_attempts={self.max_attempts!r}): give a whole number from 1 to 20."
            )


_PER = {"second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0}


@dataclass(frozen=True, slots=True)
class Limit:
    """What may run at once, and how often, over all nodes and runs of an engine that name it with `limit=`.

    `concurrency`: at most so many attempts at once. `rate`: "500/minute" (second, minute, hour or day).
    """

    concurrency: int | None = None
    rate: str | None = None
    per_second: float | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        if self.concurrency is not None and (isinstance(self.concurrency, bool) or self.concurrency < 1):
            raise DefinitionError(
                f"Limit(concurrency={self.concurrency!r}): give a whole number from 1 upwards."
            )
        if self.rate is not None:
            object.__setattr__(self, "per_second", _rate(self.rate))


def _rate(text: str) -> float:
    count, _, unit = text.partition("/")
    try:
        value = float(count) / _PER[unit.strip().removesuffix("s")]
    except (ValueError, KeyError):
        value = 0.0
    if not 0 < value < math.inf:
        raise DefinitionError(
            f"Limit(rate={text!r}): write it like '500/minute' (second, minute, hour, day)."
        )
    return value


@dataclass(frozen=True, slots=True)
class Budget:
    """What a run may use up before it stops starting nodes; counted over all its resumes."""

    tokens: int | None = None
    cost: float | None = None

    def __post_init__(self) -> None:
        for name, most in (("tokens", self.tokens), ("cost", self.cost)):
            if most is not None and (isinstance(most, bool) or not most >= 0):
                raise DefinitionError(f"Budget({name}={most!r}): give a number that is 0 or more.")

    def is_spent(self, used: Mapping[str, float]) -> bool:
        """Say whether so much was used up (`tokens_in`, `tokens_out`, `cost`) that nothing more may start."""
        tokens = used.get("tokens_in", 0) + used.get("tokens_out", 0)
        return (self.tokens is not None and tokens >= self.tokens) or (
            self.cost is not None and used.get("cost", 0) >= self.cost
        )


class RetryAfter(Exception):
    """Raise it in a node to be tried again no sooner than `seconds` from now; it pauses the node's limit for
    all.
    """

    def __init__(self, seconds: float, message: str = "") -> None:
        self.retry_after = float(seconds)
        super().__init__(message or f"the other side asks for {seconds:g} s")


_LONGEST_WAIT: Final = 7 * 86_400.0  # seconds; who asks for more does not mean it


def asked_to_wait(error: BaseException) -> float:
    """Give the seconds that the other side asks to be left alone for (`retry_after`), 0 if it does not."""
    try:
        asked = getattr(error, "retry_after", None)
    except Exception:  # a property of somebody else's error
        return 0.0
    sound = isinstance(asked, int | float) and 0 < asked < _LONGEST_WAIT
    return float(asked) if sound and asked is not None else 0.0


class _NotDone:
    def __repr__(self) -> str:
        return "NOT_DONE"


NOT_DONE: Final = _NotDone()
"""What `reconcile=` returns to say that the uncertain attempt had no effect: the node runs again."""
UNSAID: Final[Any] = object()  # an argument that was left out, where None says something


def answer(found: object, asked: str) -> bool:
    """Give what a condition said. A coroutine would be a yes whatever it says."""
    if isinstance(found, Coroutine):
        found.close()
    if isinstance(found, Awaitable):
        raise DefinitionError(
            f"{asked} gave something to await: it takes a plain function, not an async one."
        )
    return bool(found)


@dataclass(frozen=True, slots=True)
class Value:
    """A constant where a name of a parent or input is expected: `args={"limit": Value(10)}`."""

    value: Any


# -- failures as data -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """Why a path failed: plain text, never the exception object. `exception` is set only in the process it
    happened in.
    """

    path: str
    attempt: int
    type: str
    message: str
    traceback: str = ""
    reason: str | None = None
    at: datetime | None = None
    exception: BaseException | None = field(default=None, compare=False, repr=False)

    @property
    def facts(self) -> dict[str, Any]:
        """What is stored of it beside path, attempt and reason."""
        return {"type": self.type, "message": self.message, "traceback": self.traceback}


@dataclass(frozen=True, slots=True)
class ItemFailure:
    """What stands in a map's list in place of an item whose failure was tolerated.

    It does not say on which attempt: a value must not depend on how often the process died.
    """

    path: str
    type: str
    message: str


def tolerated(rule: float | None, failed: int, total: int) -> bool:
    """Say whether `failed` of `total` items are within `tolerate`: an int is a count, a float in (0, 1] a
    share.
    """
    if not failed:
        return True
    if rule is None or rule is False:
        return False
    return failed <= rule if isinstance(rule, int) else failed / total <= rule


# -- join rules -----------------------------------------------------------------------------------------

Trigger = Literal["none_failed", "all_success", "any_success", "all_done", "any_failed"]
TRIGGERS: Final = ("none_failed", "all_success", "any_success", "all_done", "any_failed")


class Settled(IntEnum):
    """How a parent ended, as far as its children are concerned."""

    COMPLETED = 0
    SKIPPED = 1
    FAILED = 2  # upstream_failed counts as failed (DESIGN §4)
    OPEN_QUESTION = 3  # held or uncertain, or below such a one: a person has to speak first


class Join(IntEnum):
    """What a join rule says once all parents are settled."""

    RUN = 0
    SKIP = 1
    BLOCK = 2  # upstream_failed


def join(trigger: str, completed: int, skipped: int, failed: int) -> Join:
    """Decide whether a node runs, is skipped or is blocked, from how many of its parents ended how.

    A node without parents always runs. The table of all outcomes is in the documentation and its test.
    """
    if trigger == "all_done" or not (completed or skipped or failed):
        return Join.RUN
    if trigger == "any_failed":
        return Join.RUN if failed else Join.SKIP
    if trigger == "any_success":
        return Join.RUN if completed else Join.BLOCK if failed else Join.SKIP
    if failed:
        return Join.BLOCK
    if trigger == "all_success":
        return Join.SKIP if skipped else Join.RUN
    return Join.RUN if completed else Join.SKIP
