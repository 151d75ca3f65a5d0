"""Waits in a histogram: small, additive, and near enough to the truth."""

from __future__ import annotations

import json
import random
import time
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagresume.latency import added, percentile, summary
from dagresume.results import CheckpointLatency

waits = st.lists(st.floats(0, 900), min_size=1, max_size=300).map(lambda found: array("d", found))


@given(waits)
def test_a_percentile_is_less_than_a_tenth_too_long_and_never_too_short(found: array[float]) -> None:
    told, exact = summary(found), CheckpointLatency.of(found)
    assert told["count"] == exact.count == sum(told["waits"].values())
    assert told["max"] == round(exact.max * 1e6)
    ranked = sorted(found)
    for name, share in (("p50", 50), ("p95", 95), ("p99", 99)):
        true = ranked[-(-share * len(ranked) // 100) - 1] * 1e6
        assert true - 1 <= told[name] <= true * 1.11 + 2


@given(st.lists(waits, min_size=1, max_size=5))
def test_those_of_many_runs_add_up_to_that_of_all(parts: list[array[float]]) -> None:
    whole = summary(array("d", [wait for part in parts for wait in part]))
    together = added(json.loads(json.dumps(summary(part))) for part in parts)
    assert together == whole["waits"]
    assert min(percentile(together, 0.99), whole["max"]) == whole["p99"]


def test_a_million_waits_are_summed_up_at_once_and_small() -> None:
    source = random.Random(1)
    found = array("d", [source.expovariate(500) for _ in range(1_000_000)])
    found[77] = 3.5
    begun = time.perf_counter()
    told = summary(found)
    took = time.perf_counter() - begun
    exact = CheckpointLatency.of(found)
    print(f"\n1,000,000 waits in {took * 1000:.0f} ms, {len(json.dumps(told))} bytes")
    assert took < 0.5  # sorting them takes longer than that on any machine
    assert len(json.dumps(told)) < 2000
    assert (told["count"], told["max"]) == (1_000_000, 3_500_000)
    for name in ("p50", "p95"):
        assert told[name] / 1e6 == pytest.approx(getattr(exact, name), rel=0.25)
    assert sum(told["waits"].values()) == pytest.approx(1_000_000, rel=0.01)
