"""Every figure dagresume aims at, beside what it is measured against.

    python -m benchmarks.goals [ROW...] [--rounds 5] [--scale 1.0] [--minutes 5] [--folder .] [--json FILE]

Both sides of a row run in turn in the same rounds, in this process unless the row says otherwise; shown are
the median and the extremes of the pairs. Settings are the defaults. `--json` keeps what was measured, row by
row as it comes; `python -m benchmarks.table` makes the READMEs' tables of it. The ROWs:
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks import loads, maps, resuming, starting, values
from benchmarks.commit import CAREFUL, compare_chain, fdatasync
from benchmarks.rows import BESIDE_NOTHING, Row, machine, pair, show, told
from benchmarks.shapes import compare_fanout, compare_layers
from dagresume.bench import MEMORY_SPEED


def chain(*, rounds: int, scale: float, folder: Path) -> list[Row]:
    report = compare_chain(max(10, round(1000 * scale)), rounds=rounds, folder=folder)
    raw, large = "sqlite3", "sqlite3, large WAL"
    return [
        pair(
            "chain", report, ours, theirs, limit, rounds=rounds,
            against=f"a raw INSERT + COMMIT per node{', WAL extended before' if theirs == large else ''}",
            work=f"chain of {report.nodes:,}{ours.removeprefix('dagresume')}",
        )
        for theirs, limit in ((raw, 1.6), (large, 2.5))
        for ours in ("dagresume", CAREFUL)
    ]  # fmt: skip


def fanout(*, rounds: int, scale: float, folder: Path) -> list[Row]:
    report = compare_fanout(scale, rounds=rounds, folder=folder)
    return [
        pair(
            "fanout", report, ours, "anyio alone", limit, rounds=rounds,
            against="a bare anyio task per node", durability=BESIDE_NOTHING,
            work=f"fan-out of {report.nodes - 1:,}{ours.removeprefix('dagresume')}",
        )
        for ours, limit in (("dagresume", 0.8), (CAREFUL, 1.0))
    ]  # fmt: skip


def layers(*, rounds: int, scale: float, folder: Path) -> list[Row]:
    report = compare_layers(scale, rounds=rounds, folder=folder)
    work = f"{report.nodes // 100} layers of 100, each joined to the whole one above"
    return [
        pair(
            "layers", report, ours, "anyio alone", 2.0, rounds=rounds, durability=BESIDE_NOTHING,
            against="a bare anyio task per node", work=f"{work}{ours.removeprefix('dagresume')}",
        )
        for ours in ("dagresume", CAREFUL)
    ]  # fmt: skip


SMALL = 0.01  # enough to see that it works
ROWS: dict[str, Callable[..., list[Row]]] = {
    "chain": chain,
    "fanout": fanout,
    "layers": layers,
    "calls": loads.fanout_of_calls,
    "runs": loads.runs,
    "hog": loads.hog,
    "maps": maps.measure,
    "values": values.measure,
    "resuming": resuming.measure,
    "planning": resuming.measure_plan,
    "starting": starting.measure,
    "tail": loads.tail,
}


def size(word: str) -> float:
    """Give the size of the works that a word means: a share of that of the goals."""
    return SMALL if word == "small" else float(word)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n    {', '.join(ROWS)}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "rows", nargs="*", metavar="ROW", help="which (default: all; the last takes 5 minutes)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument("--scale", type=size, default=1.0, help="`small`, or a number (default 1.0)")
    parser.add_argument("--minutes", type=float, help="how long the tail is (default 5, by the scale)")
    parser.add_argument(
        "--folder", type=Path, default=Path(), help="where the databases are made (default .)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows into FILE")
    options = parser.parse_args()
    unknown = [name for name in options.rows if name not in ROWS]
    if unknown:
        parser.error(f"no row {unknown[0]!r}: choose from {', '.join(ROWS)}")
    with tempfile.TemporaryDirectory(dir=options.folder, prefix=".bench-") as empty:
        fsync = fdatasync(Path(empty)).microseconds
    print("  ".join(f"{name} {value}" for name, value in machine(options.folder).items()))
    print(f"append + fdatasync {fsync:.0f} µs")
    found: list[Row] = []
    for name in options.rows or ROWS:
        scale = options.scale if name != "tail" or options.minutes is None else options.minutes / 5
        rows = ROWS[name](rounds=options.rounds, scale=scale, folder=options.folder)
        rows = [replace(row, counts=row.counts and scale == 1) for row in rows]  # the goals are of full size
        show(rows)
        found += rows
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            data = told(found, options.folder, fsync, options.scale)
            options.json.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if fsync < MEMORY_SPEED * 1e6:
        print("warning: this folder is not on a disk; give one with --folder", file=sys.stderr)


if __name__ == "__main__":
    main()
