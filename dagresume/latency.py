"""How long results waited to be durable, in a form that is small, adds up, and can be asked with SQL.

The waits of a run become a histogram with a tenth between two steps, whose keys are the waits themselves in
microseconds. Those of many runs are added up; a percentile is then the first wait with enough below it.
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

__all__ = ["added", "coarse", "percentile", "quantile", "summary"]

_SAMPLE: Final = 4096
"""Waits that are looked at; more of them are represented by as many, so that the loop is never held up."""
_STEPS: Final = [0, *dict.fromkeys(round(10 ** (k / 24)) for k in range(9 * 24 + 1))]
"""Microseconds up to a quarter of an hour and some; what lies between two is counted with the larger one."""


_COARSE: Final = [step * 10**power for power in range(10) for step in (1, 2, 5)]


def summary(waits: array[float]) -> dict[str, Any]:
    """Give the histogram of these waits (seconds), their number, percentiles and longest; in microseconds.

    The number and the longest are exact, the rest is from a sample if there are very many.
    """
    count = len(waits)
    sample = waits if count <= _SAMPLE else [waits[n] for n in random.sample(range(count), _SAMPLE)]
    steps = Counter(_STEPS[min(bisect_left(_STEPS, round(wait * 1e6)), len(_STEPS) - 1)] for wait in sample)
    share = count / len(sample)
    found = {wait: max(1, round(steps[wait] * share)) for wait in sorted(steps)}
    longest = round(max(waits) * 1e6)
    told = {f"p{share}": min(percentile(found, share / 100), longest) for share in (50, 95, 99)}
    return {"count": count, **told, "max": longest, "waits": found}


def added(summaries: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Give one histogram for many."""
    found: Counter[int] = Counter()
    for each in summaries:
        for wait, count in each["waits"].items():
            found[int(wait)] += count
    return dict(sorted(found.items()))


def percentile(waits: Mapping[int, int], share: float) -> int:
    """Give the shortest wait that this share of all in a histogram does not exceed, in microseconds."""
    needed, seen = share * sum(waits.values()), 0
    for wait, count in waits.items():
        seen += count
        if seen >= needed:
            return wait
    return 0


def coarse(waits: Mapping[int, int]) -> tuple[tuple[float, int], ...]:
    """Give a histogram in steps of 1, 2 and 5: (upper end of a step in seconds, how many waits lie in it),
    the empty ones between the first and the last too.
    """
    found: Counter[int] = Counter()
    for wait, count in waits.items():
        found[min(bisect_left(_COARSE, wait), len(_COARSE) - 1)] += count
    if not found:
        return ()
    return tuple((_COARSE[n] / 1e6, found[n]) for n in range(min(found), max(found) + 1))


def quantile(values: Iterable[float], share: float) -> float:
    """Give the value that this share of all does not exceed (nearest rank); 0 for none."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else 0.0
