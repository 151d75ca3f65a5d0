"""Histograms of how long results waited: in the terminal, and as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from dagresume.cli.command import Problem
from dagresume.cli.screen import say

__all__ = ["Svg", "brief", "draw", "save"]

_BAR: Final = 44  # columns of the longest bar
Steps = Sequence[tuple[float, int]]
Svg = Annotated[
    Path | None, typer.Option("--svg", metavar="FILE", help="Also draw the histogram into this file.")
]


def draw(title: str, steps: Steps) -> None:
    """Print a histogram: a step whose bar is too short to be seen has a dot."""
    say()
    say((title, "bold"))
    most = max(count for _, count in steps)
    for end, count in steps:
        bar = "█" * round(count / most * _BAR) or ("·" if count else "")
        say(f"  ≤ {brief(end):>7} ", (f"{bar:<{_BAR}}", "cyan"), f" {count:>9,}")


def save(title: str, named: Mapping[str, Steps], output: Path) -> None:
    """Draw histograms into an SVG file."""
    from dagresume.svg import histogram_svg  # loaded where it is drawn

    rows = [(name, [(f"≤ {brief(end)}", count) for end, count in steps]) for name, steps in named.items()]
    try:
        output.write_text(histogram_svg(title, rows), encoding="utf-8")
    except OSError as error:
        raise Problem(f"--svg {output}: {error.strerror or error}") from error


def brief(seconds: float) -> str:
    """Give a time with three figures and its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            value = seconds / size
            return f"{value:.0f} {unit}" if value >= 99.5 else f"{value:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
