"""What one durable checkpoint costs: a chain, where every node waits for the commit of the one before it.

    python -m benchmarks.commit [--nodes 1000] [--rounds 5] [--folder .] [--json]

Printed beside it, measured in the same interleaved rounds on the same disk: an append with fdatasync, the
standard library's sqlite3 with one INSERT and COMMIT per node (WAL, synchronous FULL; also with a WAL as
large from the start as ours), and the same chain under anyio alone, which keeps nothing. All settings of
the engine are the defaults. The time of a run holds everything after `Engine` is open with the Workflow
registered (which checks it): storing its definition, the nodes, the end of the run. A second run, whose
definition is stored already, is told beside it. Durable rows of both are counted afterwards, in the closed
database.

The other benchmarks take their rounds and baselines from here; what `dagresume bench` measures too is in
`dagresume.bench`.
"""

import argparse
import functools
import gc
import json
import os
import platform
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import anyio

from dagresume import Workflow
from dagresume.bench import (
    MEMORY_SPEED,
    Spread,
    Waits,
    chain,
    drive,
    first,
    raw_commits,
    step,
    sync_cost,
)


@dataclass(frozen=True)
class Sample:
    """One contender in one round: microseconds per node, and what else is worth telling."""

    microseconds: float
    facts: Mapping[str, float] = field(default_factory=dict)


Contender = Callable[[Path], Sample]
CAREFUL = "dagresume, not idempotent"


def shown(spread: Spread) -> str:
    """Give a spread as a column of a report."""
    return f"{spread.median:9.2f}  [{spread.low:.2f} .. {spread.high:.2f}]"


@dataclass(frozen=True)
class Report:
    """All contenders over all rounds, in the order in which they ran."""

    title: str
    nodes: int
    microseconds: dict[str, Spread]
    ratios: dict[str, Spread]  # of pairs from one round
    facts: dict[str, dict[str, Spread]]
    samples: dict[str, list[Sample]]  # round by round

    def each(self, name: str, fact: str = "") -> list[float]:
        """Give the microseconds, or a fact, of a contender in each round."""
        return [sample.facts[fact] if fact else sample.microseconds for sample in self.samples[name]]

    def show(self) -> None:
        print(f"\n{self.title}: {self.nodes:,} nodes, µs per node, median [lowest .. highest]")
        for name, spread in self.microseconds.items():
            print(f"  {name:<50}{shown(spread)}")
        for name, spread in self.ratios.items():
            print(f"  {name:<50}{shown(spread)} ×")
        for name, facts in self.facts.items():
            told = "   ".join(f"{fact} {spread.median:,.6g}" for fact, spread in facts.items())
            print(f"  {name:<50}{told}")


def compare(
    title: str,
    nodes: int,
    contenders: Mapping[str, Contender],
    ratios: list[tuple[str, str]],
    *,
    rounds: int,
    folder: Path,
) -> Report:
    """Let each contender run once in every round, in an empty folder; a first round warms up, uncounted.

    Who begins changes from round to round, and what the one before has written reaches the disk first.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(rounds + 1):
        begin = number % len(names)
        for name in (*names[begin:], *names[:begin]):
            with tempfile.TemporaryDirectory(dir=folder, prefix=".bench-") as empty:
                gc.collect()
                os.sync()
                sample = contenders[name](Path(empty))
            if number:
                samples[name].append(sample)
    times = {name: [sample.microseconds for sample in taken] for name, taken in samples.items()}
    return Report(
        title,
        nodes,
        {name: Spread.of(taken) for name, taken in times.items()},
        {
            f"{one} / {other}": Spread.of([a / b for a, b in zip(times[one], times[other], strict=True)])
            for one, other in ratios
        },
        {
            name: {fact: Spread.of([each.facts[fact] for each in taken]) for fact in taken[0].facts}
            for name, taken in samples.items()
            if taken[0].facts
        },
        samples,
    )


# the baselines


def fdatasync(folder: Path, times: int = 200) -> Sample:
    """Append a row's worth of bytes and wait until the disk has them; the median of many."""
    return Sample(statistics.median(sync_cost(folder, times)) * 1e6)


def raw_sqlite(folder: Path, *, rows: int, wal_bytes: int = 0) -> Sample:
    """Do one INSERT and COMMIT per node in this thread; with `wal_bytes` the log has that size before."""
    waits = Waits.of(taken := raw_commits(folder, rows, wal_bytes=wal_bytes))
    return Sample(statistics.fmean(taken) * 1e6, {"p50 ms": waits.p50 * 1e3, "p99 ms": waits.p99 * 1e3})


def without_engine(work: Callable[[], Awaitable[None]], nodes: int, _folder: Path) -> Sample:
    """Run the same work under anyio alone."""

    async def main() -> float:
        begun = time.perf_counter()
        await work()
        return time.perf_counter() - begun

    return Sample(anyio.run(main) / nodes * 1e6)


# the engine


def with_engine(make: Callable[[], Workflow], nodes: int, folder: Path) -> Sample:
    """Run a new Workflow twice in a new database, default settings, and count the rows afterwards."""
    database = folder / "runs.db"
    driven = anyio.run(drive, make(), nodes, database)
    if (durable := durable_rows(database)) != 2 * nodes:
        raise SystemExit(f"{durable} rows of two runs of {nodes} nodes are durable")
    waits = Waits.of(driven.waits)
    facts = {
        "second run µs": driven.again / nodes * 1e6,
        "rows": float(durable),
        "commits": float(driven.commits),
        "p50 ms": waits.p50 * 1e3,
        "p99 ms": waits.p99 * 1e3,
    }
    return Sample(driven.seconds / nodes * 1e6, facts)


def durable_rows(database: Path) -> int:
    query = "SELECT count(*) FROM workflow_checkpoints WHERE node_status = 'success'"
    with closing(sqlite3.connect(database)) as connection:
        count: int = connection.execute(query).fetchone()[0]
    return count


# the chain


async def bare_chain(nodes: int) -> None:
    """Give each node a task of its own, as the engine does, begun when the one before it has ended."""
    results: dict[str, int] = {}

    async def run(number: int) -> None:
        results[f"n{number}"] = await (step(results[f"n{number - 1}"]) if number else first())
        if number + 1 < nodes:
            group.start_soon(run, number + 1)

    async with anyio.create_task_group() as group:
        group.start_soon(run, 0)
    if results[f"n{nodes - 1}"] != nodes - 1:
        raise SystemExit("the chain came out wrong")


def compare_chain(nodes: int, *, rounds: int, folder: Path) -> Report:
    contenders: dict[str, Contender] = {
        "append + fdatasync": fdatasync,
        "anyio alone": functools.partial(without_engine, functools.partial(bare_chain, nodes), nodes),
        "sqlite3": functools.partial(raw_sqlite, rows=nodes),
        "sqlite3, large WAL": functools.partial(raw_sqlite, rows=nodes, wal_bytes=4 << 20),
        "dagresume": functools.partial(with_engine, functools.partial(chain, nodes, idempotent=True), nodes),
        CAREFUL: functools.partial(with_engine, functools.partial(chain, nodes, idempotent=False), nodes),
    }
    ratios = [
        ("dagresume", "sqlite3"),
        (CAREFUL, "sqlite3"),
        ("dagresume", "sqlite3, large WAL"),
        (CAREFUL, "sqlite3, large WAL"),
    ]
    return compare("chain", nodes, contenders, ratios, rounds=rounds, folder=folder)


# the command line


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument(
        "--folder", type=Path, default=Path(), help="where the databases are made (default .)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def machine() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
    }


def show(reports: list[Report], *, as_json: bool) -> None:
    """Print the reports, and a warning where the folder lies in memory: then nothing was written through."""
    if as_json:
        print(json.dumps({"machine": machine(), "reports": [asdict(report) for report in reports]}, indent=2))
    else:
        print("  ".join(f"{name} {value}" for name, value in machine().items()))
        for report in reports:
            report.show()
    if any(report.microseconds["append + fdatasync"].median < MEMORY_SPEED * 1e6 for report in reports):
        print("warning: this folder is not on a disk; give one with --folder", file=sys.stderr)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--nodes", type=int, default=1000, help="length of the chain (default 1000)")
    options = parser.parse_args()
    report = compare_chain(options.nodes, rounds=options.rounds, folder=options.folder)
    show([report], as_json=options.json)


if __name__ == "__main__":
    main()
