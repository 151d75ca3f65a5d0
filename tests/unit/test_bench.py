"""The figures of a bench are what they say."""

import random
from array import array

import pytest

from dagresume.bench import Spread, Waits
from dagresume.latency import quantile
from dagresume.results import CheckpointLatency


def test_a_spread_is_the_middle_and_both_ends() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([4.0]) == Spread(4.0, 4.0, 4.0)


def test_a_quantile_is_a_value_that_was_there() -> None:
    values = [float(number) for number in range(1000)]
    random.shuffle(values)
    assert [quantile(values, share) for share in (0.5, 0.99, 0.999, 1.0)] == [500.0, 990.0, 999.0, 999.0]
    assert quantile([], 0.5) == 0.0


def test_the_percentiles_are_those_of_the_engine() -> None:
    waits = array("d", [random.random() for _ in range(777)])
    ours, engines = Waits.of(waits), CheckpointLatency.of(waits)
    assert (ours.p50, ours.p95, ours.p99, ours.max, ours.count) == (
        engines.p50,
        engines.p95,
        engines.p99,
        engines.max,
        engines.count,
    )


@pytest.mark.parametrize(
    ("waits", "steps"),
    [
        ([], []),
        ([0.0001], [(0.0001, 1)]),
        ([0.00012, 0.00019, 0.0002], [(0.0002, 3)]),
        ([0.0004, 0.003], [(0.0005, 1), (0.001, 0), (0.002, 0), (0.005, 1)]),
        ([1e-9, 40.0], None),
    ],
)
def test_the_steps_hold_each_wait_once(waits: list[float], steps: list[tuple[float, int]] | None) -> None:
    found = Waits.of(waits).steps
    assert sum(count for _, count in found) == len(waits)
    if steps is not None:
        assert [count for _, count in found] == [count for _, count in steps]
        assert [end for end, _ in found] == pytest.approx([end for end, _ in steps])
    ends = [0.0, *(end for end, _ in found)]
    for (end, count), begin in zip(found, ends, strict=False):
        assert count == sum(begin < wait <= end for wait in waits)
