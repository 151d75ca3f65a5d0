"""Rules as data: retries, limits, join rules, tolerance."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from dagresume import DefinitionError, Limit, Recovery, Retry, RetryAfter, Value
from dagresume.policy import TRIGGERS, Join, join, tolerated

RUN, SKIP, BLOCK = Join.RUN, Join.SKIP, Join.BLOCK

# rows: which kinds of parents there are (completed, skipped, failed); columns in the order of TRIGGERS.
# Typed by hand from DESIGN §4 and CASES B121 B122 B124.
#                      none_failed all_success any_success all_done any_failed
JOINS: dict[tuple[bool, bool, bool], tuple[Join, Join, Join, Join, Join]] = {
    (True, False, False): (RUN, RUN, RUN, RUN, SKIP),
    (False, True, False): (SKIP, SKIP, SKIP, RUN, SKIP),
    (False, False, True): (BLOCK, BLOCK, BLOCK, RUN, RUN),
    (True, True, False): (RUN, SKIP, RUN, RUN, SKIP),
    (True, False, True): (BLOCK, BLOCK, RUN, RUN, RUN),
    (False, True, True): (BLOCK, BLOCK, BLOCK, RUN, RUN),
    (True, True, True): (BLOCK, BLOCK, RUN, RUN, RUN),
}


def test_the_order_of_the_table_is_that_of_the_triggers() -> None:
    assert TRIGGERS == ("none_failed", "all_success", "any_success", "all_done", "any_failed")


@pytest.mark.parametrize("kinds", JOINS)
def test_join_rules(kinds: tuple[bool, bool, bool]) -> None:
    """B121, B122, B124: however many parents of each kind there are."""
    for counts in itertools.product(*((1, 2, 7) if there else (0,) for there in kinds)):
        for trigger, expected in zip(TRIGGERS, JOINS[kinds], strict=True):
            assert join(trigger, *counts) is expected, (trigger, counts)


@pytest.mark.parametrize("trigger", [t for t in TRIGGERS if t != "any_failed"])
def test_a_node_without_parents_runs(trigger: str) -> None:
    assert join(trigger, 0, 0, 0) is RUN


# -- Retry ----------------------------------------------------------------------------------------------


def test_retry_counts_the_first_try() -> None:
    assert Retry().attempts == 1


@pytest.mark.parametrize(
    ("attempt", "seconds"),
    [(1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (7, 30.0), (8, 30.0), (2000, 30.0), (10**9, 30.0)],
)
def test_the_wait_doubles_up_to_its_bound(attempt: int, seconds: float) -> None:
    """B83: no overflow at attempt 2000."""
    assert Retry(5, delay=0.5, backoff=2, max_delay=30, jitter=0.2).wait(attempt, 0.0) == seconds


def test_jitter_only_adds() -> None:
    retry = Retry(5, delay=2, backoff=1, jitter=0.5)
    assert retry.wait(1, 0.0) == 2
    assert retry.wait(1, 0.5) == 2.5
    waits = [retry.wait(k) for k in range(1, 200)]
    assert all(2 <= wait < 3 for wait in waits)
    assert len(set(waits)) > 1


@pytest.mark.parametrize("backoff", [1, 1.0, 1.0000001, 3, math.inf])
def test_any_backoff_gives_a_finite_wait(backoff: float) -> None:
    retry = Retry(3, delay=0.5, backoff=backoff, max_delay=10, jitter=0)
    waits = [retry.wait(attempt, 0.0) for attempt in (1, 2, 3, 100, 100_000)]
    assert waits[0] == 0.5
    assert waits == sorted(waits)
    assert waits[-1] <= 10


@pytest.mark.parametrize("delay", [0, 0.0, None])
def test_no_delay_is_no_wait(delay: float | None) -> None:
    """B83."""
    assert Retry(3, delay=delay).wait(2, 0.9) == 0


def test_a_delay_above_its_bound_is_the_bound() -> None:
    assert Retry(3, delay=100, max_delay=10, jitter=0).wait(1, 0.0) == 10


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attempts", 0),
        ("attempts", -1),
        ("attempts", 1.5),
        ("attempts", True),
        ("attempts", "3"),
        ("delay", -0.1),
        ("delay", math.nan),
        ("delay", math.inf),
        ("delay", "1"),
        ("backoff", 0.5),
        ("backoff", math.nan),
        ("max_delay", -1),
        ("max_delay", math.inf),
        ("jitter", -0.1),
        ("jitter", math.nan),
        ("retry_on", (int,)),
        ("retry_on", "ValueError"),
        ("never", (3,)),
        ("give_up_after", 0),
        ("give_up_after", 1.5),
    ],
)
def test_wrong_retries_are_refused_by_name(name: str, value: Any) -> None:
    """B83."""
    with pytest.raises(DefinitionError, match=name):
        Retry(**{name: value})


def test_which_errors_are_tried_again() -> None:
    retry = Retry(3, retry_on=LookupError, never=(KeyError,))
    assert retry.allows(IndexError())
    assert not retry.allows(KeyError())
    assert not retry.allows(ValueError())
    assert Retry(3).allows(ValueError())
    assert not Retry(3).allows(KeyboardInterrupt())


def test_retries_are_values() -> None:
    assert Retry(3, delay=1) == Retry(3, delay=1.0)
    assert hash(Retry(3)) == hash(Retry(3))
    assert Retry(3) != Retry(4)


# -- the others -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "per_second"),
    [
        ("1/second", 1),
        ("500/minute", 500 / 60),
        ("7200/hour", 2),
        ("86400/day", 1),
        ("2 / seconds", 2),
        ("0.5/second", 0.5),
    ],
)
def test_rates(rate: str, per_second: float) -> None:
    assert Limit(rate=rate).per_second == pytest.approx(per_second)


@pytest.mark.parametrize(
    "rate", ["", "5", "5/", "/minute", "x/minute", "5/fortnight", "0/minute", "-1/hour", "inf/day", "nan/day"]
)
def test_wrong_rates_show_how_to_write_one(rate: str) -> None:
    with pytest.raises(DefinitionError, match="500/minute"):
        Limit(rate=rate)


@pytest.mark.parametrize("concurrency", [0, -1, True])
def test_a_limit_lets_somebody_in(concurrency: Any) -> None:
    with pytest.raises(DefinitionError, match="concurrency"):
        Limit(concurrency=concurrency)


@pytest.mark.parametrize("attempts", [0, 21, True, -3])
def test_recovery_attempts_are_1_to_20(attempts: Any) -> None:
    """R28."""
    with pytest.raises(DefinitionError, match="max_attempts"):
        Recovery(max_attempts=attempts)
    assert (Recovery().auto_resume, Recovery().policy, Recovery().max_attempts) == (
        False,
        "resume_from_last_incomplete",
        3,
    )
    assert Recovery(max_attempts=1).max_attempts == 1
    assert Recovery(max_attempts=20).max_attempts == 20


def test_recovery_policies_are_named() -> None:
    """R24."""
    with pytest.raises(DefinitionError, match="resume_from_start"):
        Recovery(policy="restart")  # type: ignore[arg-type]


def test_retry_after_says_for_how_long() -> None:
    error = RetryAfter(30)
    assert error.retry_after == 30
    assert "30" in str(error)


def test_a_value_is_what_it_holds() -> None:
    assert Value([1]).value == [1]
    assert Value(1) == Value(1)


@pytest.mark.parametrize(
    ("rule", "failed", "total", "ok"),
    [
        (None, 0, 5, True),
        (None, 1, 5, False),
        (0, 1, 5, False),
        (1, 1, 5, True),
        (1, 2, 5, False),
        (0.2, 1, 5, True),
        (0.2, 2, 5, False),
        (1.0, 5, 5, True),
        (0.1, 0, 0, True),
        (1, 0, 0, True),
        (0.3, 3, 10, True),
        (0.29, 3, 10, False),
        (0.29, 29, 100, True),
        (0.57, 57, 100, True),
        (0.58, 29, 50, True),
    ],
)
def test_tolerance(rule: float | None, failed: int, total: int, ok: bool) -> None:
    assert tolerated(rule, failed, total) is ok
