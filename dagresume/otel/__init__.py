"""Spans and metrics for OpenTelemetry (the extra `otel`): `Engine(observer=OpenTelemetry())`.

    from dagresume.otel import OpenTelemetry

    async with Engine("runs.db", observer=OpenTelemetry()) as engine: ...

`Instrumentor().instrument()` gives one to every engine made after it; `opentelemetry-instrument` calls that
by itself. The library is loaded when the first observer is made, not by importing this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dagresume.observe import observe_by_default

if TYPE_CHECKING:
    from dagresume.otel.spans import OpenTelemetry

__all__ = ["Instrumentor", "OpenTelemetry"]


def __getattr__(name: str) -> Any:
    if name != "OpenTelemetry":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from dagresume.otel.spans import OpenTelemetry
    except ImportError as error:
        raise ImportError(
            "OpenTelemetry is not installed: pip install 'dagresume[otel]'", name=error.name
        ) from error
    globals()[name] = OpenTelemetry
    return OpenTelemetry


class Instrumentor:
    """Gives every engine that is made from now on an observer; what `opentelemetry-instrument` looks for."""

    def instrument(self, **providers: Any) -> None:
        """Begin; `tracer_provider` and `meter_provider`: others than the process's own."""
        from dagresume.otel.spans import OpenTelemetry

        chosen = {name: providers.get(name) for name in ("tracer_provider", "meter_provider")}
        observe_by_default(lambda: OpenTelemetry(**chosen))

    def uninstrument(self, **_: Any) -> None:
        """End it; engines that are open keep theirs."""
        observe_by_default(None)
