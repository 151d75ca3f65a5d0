"""What one item costs in maps of 10⁴ and 10⁶ items: time, memory, bytes in the file.

Memory is tracemalloc's peak of a whole run in a process of its own, result and list included, less what the
list of values takes that the map gives. Bytes are those of the closed database, emptied log and all, less an
empty database and the outputs themselves.

    python -m benchmarks.maps memory|size ITEMS     (what the benchmark starts; prints JSON)
"""

import functools
import json
import sqlite3
import sys
import tempfile
import time
import tracemalloc
from contextlib import closing
from pathlib import Path

import anyio

from benchmarks.commit import Contender, Sample, Spread, compare
from benchmarks.rows import Row, child, pair
from dagresume import Engine, Workflow

FEW, MANY = 10_000, 1_000_000


def spread_out(items: int) -> Workflow:
    wf = Workflow("items", idempotent=True)

    @wf.node
    async def numbers() -> list[int]:
        return list(range(items))

    @wf.node(for_each={"x": numbers})
    async def doubled(x: int) -> int:
        return 2 * x

    return wf


def timed(items: int, folder: Path) -> Sample:
    wf = spread_out(items)

    async def main() -> float:
        async with Engine(folder / "runs.db", workflows=[wf]) as engine:
            begun = time.perf_counter()
            result = await engine.run(wf)
            taken = time.perf_counter() - begun
            if len(result.executed) != items + 1:
                raise SystemExit(f"{len(result.executed)} of {items + 1} paths ran")
            return taken

    return Sample(anyio.run(main) / items * 1e6)


def memory(items: int, folder: Path) -> float:
    """Give the bytes an item takes at the peak, beyond the list of all outputs."""
    wf = spread_out(items)

    async def main() -> float:
        async with Engine(folder / "runs.db", workflows=[wf]) as engine:
            await engine.run(spread_out(8))  # what is loaded once is no item's
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            values = [2 * x for x in range(items)]
            the_list = tracemalloc.get_traced_memory()[0] - before
            del values
            tracemalloc.reset_peak()
            result = await engine.run(wf)
            if result["doubled"][-1] != 2 * (items - 1):
                raise SystemExit("the map came out wrong")
            return (tracemalloc.get_traced_memory()[1] - before - the_list) / items

    return anyio.run(main)


def size(items: int, folder: Path) -> float:
    """Give the bytes an item takes in the database, beyond its output."""

    def run(count: int) -> int:
        wf, database = spread_out(count), folder / f"runs-{count}.db"

        async def main() -> None:
            async with Engine(database, workflows=[wf]) as engine:
                await engine.run(wf)

        anyio.run(main)
        with closing(sqlite3.connect(database)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            (payload,) = connection.execute("SELECT sum(length(output)) FROM dagresume_events").fetchone()
        return database.stat().st_size - int(payload)

    return (run(items) - run(1)) / items


def measure(*, rounds: int, scale: float, folder: Path) -> list[Row]:
    few, many = round(FEW * scale), round(MANY * scale)
    contenders: dict[str, Contender] = {
        f"a map of {count:,} items": functools.partial(timed, count) for count in (few, many)
    }
    one, other = contenders
    report = compare("map", 1, contenders, [(other, one)], rounds=rounds, folder=folder)
    held = child("benchmarks.maps", "memory", str(many), folder=folder)
    kept = child("benchmarks.maps", "size", str(round(MANY * scale / 10)), folder=folder)
    return [
        pair("maps", report, other, one, 1.15, rounds=rounds, work=other, figures="µs per item"),
        Row(
            "maps",
            f"memory, {many:,} items in one map",
            "the list of their values",
            200,
            Spread.of([held["bytes"]]),
            unit="bytes per item",
        ),
        Row(
            "maps",
            f"size of the file, {round(MANY * scale / 10):,} items in one map",
            "their outputs",
            120,
            Spread.of([kept["bytes"]]),
            unit="bytes per item",
        ),
    ]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=".") as place:
        found = {"memory": memory, "size": size}[sys.argv[1]](int(sys.argv[2]), Path(place))
    print(json.dumps({"bytes": found}))
