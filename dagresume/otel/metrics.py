"""The instruments: what is counted and timed, under which names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter

__all__ = ["INSTRUMENTS", "Instruments"]

_SECONDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_ROWS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)

INSTRUMENTS: Final[Mapping[str, tuple[str, str, str]]] = {
    "dagresume.runs": ("counter", "{run}", "Drives of runs that have ended, by workflow and status"),
    "dagresume.nodes": ("counter", "{path}", "Paths that have ended, by workflow, node and status"),
    "dagresume.attempts": ("counter", "{attempt}", "Attempts that have begun, by workflow and node"),
    "dagresume.retries": ("counter", "{attempt}", "Attempts after the first of a path, by workflow and node"),
    "dagresume.recoveries": ("counter", "{run}", "Runs that somebody went on with, by workflow"),
    "dagresume.node.duration": ("histogram", "s", "How long the bodies of completed paths took"),
    "dagresume.checkpoint.latency": (
        "histogram",
        "s",
        "From the return of a body to a durable result",
    ),
    "dagresume.commit.duration": ("histogram", "s", "How long a transaction took"),
    "dagresume.commit.rows": ("histogram", "{row}", "Rows in a transaction"),
}
"""Each instrument: its kind, its unit, and what it tells."""


class Instruments:
    """The instruments of one meter, by name."""

    def __init__(self, meter: Meter) -> None:
        self._counters: dict[str, Any] = {}
        self._histograms: dict[str, Any] = {}
        for name, (kind, unit, told) in INSTRUMENTS.items():
            if kind == "counter":
                self._counters[name] = meter.create_counter(name, unit=unit, description=told)
                continue
            bounds: Sequence[float] | None = _ROWS if unit == "{row}" else _SECONDS
            if name == "dagresume.node.duration":  # anything between a microsecond and a day: the SDK's own
                bounds = None
            self._histograms[name] = meter.create_histogram(
                name, unit=unit, description=told, explicit_bucket_boundaries_advisory=bounds
            )

    def count(self, name: str, **attributes: str) -> None:
        """Count one more."""
        self._counters[name].add(1, _named(attributes))

    def note(self, name: str, values: Iterable[float], **attributes: str) -> None:
        """Note values: seconds, or rows."""
        told, record = _named(attributes), self._histograms[name].record
        for value in values:
            record(value, told)


def _named(attributes: Mapping[str, str]) -> dict[str, str]:
    return {f"dagresume.{name}": value for name, value in attributes.items()}
