"""Write the tables of the READMEs from the newest results.

    python -m benchmarks.table [--check]

Of each row the newest measurement in `results/` counts, whichever file it is in. Only full-size works count.
`--check` writes nothing and says whether the READMEs agree with the results.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.goals import ROWS
from benchmarks.rows import DURABLE

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
SHORT, LONG = HERE.parent / "README.md", HERE / "README.md"
BETWEEN = re.compile(r"(?<=<!-- benchmarks -->\n).*?(?=<!-- /benchmarks -->)", re.DOTALL)
MARKS = {True: "yes", False: "**no**", None: ""}


@dataclass(frozen=True)
class Measured:
    """A row, and the file it comes from."""

    row: dict[str, Any]
    file: dict[str, Any]


def newest(folder: Path = RESULTS) -> list[Measured]:
    """Give the newest measurement of each row, in the order of the benchmarks."""
    found: dict[tuple[str, str, str], Measured] = {}
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    for file in sorted(files, key=lambda file: str(file["date"]), reverse=True):
        if file["scale"] == 1:
            for row in file["rows"]:
                found.setdefault((row["key"], row["work"], _peer(row)), Measured(row, file))
    order = {key: place for place, key in enumerate(ROWS)}  # other engines come last
    return sorted(found.values(), key=lambda each: order.get(each.row["key"], len(order)))


def _peer(row: dict[str, Any]) -> str:
    """Give what a row is measured against, without the versions that make another peer of none."""
    return re.sub(r" \d\S*", "", row["against"]) if row["key"] not in ROWS else str(row["against"])


# -- cells --------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Give a number with three figures that count."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def spread(told: dict[str, float], unit: str = "") -> str:
    middle, ends = number(told["median"]), [number(told["low"]), number(told["high"])]
    around = "" if ends == [middle, middle] else f" ({' – '.join(ends)})"
    return f"{middle}{unit and ' ' + unit}{around}"


def goal(row: dict[str, Any]) -> str:
    return f"≤ {number(row['limit'])} {row['unit']}" if row["counts"] else ""


def measured(row: dict[str, Any]) -> str:
    return spread(row["measured"], row["unit"]) + (f"; {row['note']}" if row["note"] else "")


def figure(row: dict[str, Any], side: str) -> str:
    return spread(row[side], row["figures"]) if row[side] else ""


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n"


def table(headers: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    yield line(headers)
    yield line("---" for _ in headers)
    for row in rows:
        yield line(row)


# -- tables -------------------------------------------------------------------------------------------------


def short(found: list[Measured]) -> str:
    """Give the table of the project's README: the rows that have a goal."""
    headers = ["work", "against", "goal", "measured", "met", "durability", "Python"]
    rows = (
        [
            row["work"],
            row["against"],
            goal(row),
            measured(row),
            MARKS[row["met"]],
            row["durability"].replace(DURABLE, "FULL"),
            row["python"],
        ]
        for row in (each.row for each in found)
        if row["counts"]
    )
    return "".join([*table(headers, rows), "\n", *machines(found)])


def long(found: list[Measured]) -> str:
    """Give the table of the benchmarks' README: all rows with all that is known of them."""
    headers = ["work", "against", "goal", "measured", "met", "ours", "theirs", "rounds", "Python"]
    rows = (
        [
            row["work"],
            row["against"],
            goal(row),
            measured(row),
            MARKS[row["met"]],
            figure(row, "ours"),
            figure(row, "theirs"),
            str(row["rounds"]),
            row["python"],
            f"{row['durability']}; `{row['command']}`",
        ]
        for row in (each.row for each in found)
    )
    return "".join([*table([*headers, "durability; command"], rows), "\n", *machines(found)])


def machines(found: list[Measured]) -> Iterator[str]:
    """Tell where the figures come from, once for each day and machine."""
    told = dict.fromkeys(where(each.file) for each in found)
    yield from (f"- {text}\n" for text in told)


def where(file: dict[str, Any]) -> str:
    here = file["machine"]
    names = ("sqlite", "aiosqlite", "anyio", "networkx")
    versions = ", ".join(f"{name} {here[name]}" for name in names if name in here)
    day, busy = file["date"][:10], here.get("load")
    load = "" if busy is None else f", a load of {busy:g} before it began"
    return (
        f"Measured {day} at commit {here['commit']}: {here['processor']}, {here['cores']} cores,"
        f" {here['system']} {here['kernel']}, {here['file_system']}, append + fdatasync"
        f" {number(here['fdatasync_us'])} µs{load}; {versions}."
    )


def rendered(text: str, made: str) -> str:
    """Give a README with this table between its markers."""
    if len(BETWEEN.findall(text)) != 1:
        raise SystemExit("a README has no single place between <!-- benchmarks --> and <!-- /benchmarks -->")
    return BETWEEN.sub(lambda _: f"\n{made}\n", text)


def pages() -> Iterator[tuple[Path, str, str]]:
    """Give each README, what is in it, and what should be."""
    found = newest()
    for path, made in ((SHORT, short(found)), (LONG, long(found))):
        text = path.read_text(encoding="utf-8")
        yield path, text, rendered(text, made)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    old = [(path, wanted) for path, text, wanted in pages() if text != wanted]
    for path, wanted in old:
        if not options.check:
            path.write_text(wanted, encoding="utf-8")
        print(f"{path.relative_to(HERE.parent)}: {'differs' if options.check else 'written'}")
    sys.exit(bool(old) and options.check)


if __name__ == "__main__":
    main()
