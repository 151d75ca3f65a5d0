"""What outputs of different sizes cost: a chain of nodes that give a text each and take nothing.

Up to the spill limit an output lies in its row, beyond it in a file of its own. Against it stands the same
text with the same digest (SHA-256 of its bytes): an INSERT and COMMIT of the standard library's sqlite3, or a
file that is written, synchronised, renamed into place, and its folder synchronised, without which a file
need not survive a loss of power.
"""

import functools
import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import networkx as nx

from benchmarks.commit import Contender, Sample, compare
from benchmarks.rows import Row, pair
from dagresume import Engine, Workflow

SIZES = ((1 << 10, 300, "1 KiB"), (64 << 10, 100, "64 KiB"), (1 << 20, 24, "1 MiB"), (10_000_000, 8, "10 MB"))
IN_ROWS = 64 << 10


def giving(text: str, nodes: int) -> Workflow:
    async def give() -> str:
        return text

    graph: nx.DiGraph[str] = nx.DiGraph()
    for number in range(nodes):
        graph.add_node(f"n{number}", run=give, idempotent=True)
        if number:
            graph.add_edge(f"n{number - 1}", f"n{number}")
    return Workflow.from_graph("giving", graph)


def ours(text: str, nodes: int, folder: Path) -> Sample:
    workflow = giving(text, nodes)

    async def main() -> float:
        async with Engine(folder / "runs.db", workflows=[workflow]) as engine:
            begun = time.perf_counter()
            await engine.run(workflow)
            return time.perf_counter() - begun

    return Sample(anyio.run(main) / nodes * 1e6)


def in_rows(text: str, nodes: int, folder: Path, *, encode: Callable[[str], str]) -> Sample:
    with closing(sqlite3.connect(folder / "raw.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(
            "CREATE TABLE checkpoint (run INTEGER, path TEXT, at INTEGER, digest BLOB, output TEXT)"
        )
        begun = time.perf_counter()
        for number in range(nodes):
            output = encode(text)
            row: list[Any] = [
                1,
                f"n{number}",
                time.time_ns(),
                hashlib.sha256(output.encode()).digest(),
                output,
            ]
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO checkpoint VALUES (?, ?, ?, ?, ?)", row)
            connection.execute("COMMIT")
        return Sample((time.perf_counter() - begun) / nodes * 1e6)


def in_files(text: str, nodes: int, folder: Path, *, encode: Callable[[str], str]) -> Sample:
    begun = time.perf_counter()
    for number in range(nodes):
        output = encode(text).encode()
        name = hashlib.sha256(output).hexdigest()
        with (folder / "new").open("wb") as file:
            file.write(output)
            file.flush()
            os.fsync(file.fileno())
        (folder / "new").rename(folder / f"{name}-{number}")
        place = os.open(folder, os.O_RDONLY)
        os.fsync(place)
        os.close(place)
    return Sample((time.perf_counter() - begun) / nodes * 1e6)


def measure(*, rounds: int, scale: float, folder: Path) -> list[Row]:
    rows = []
    for size, nodes, name in SIZES:
        count = max(2, round(nodes * scale))
        text = "".join(chr(97 + number % 26) for number in range(size - 2))  # with its quotes it has the size
        raw = in_rows if size <= IN_ROWS else in_files
        against = (
            "sqlite3 INSERT + COMMIT" if size <= IN_ROWS else "file + fsync + rename + fsync of its folder"
        )
        contenders: dict[str, Contender] = {
            against: functools.partial(raw, json.dumps(text), count, encode=str),
            f"{against}, encoding": functools.partial(raw, text, count, encode=json.dumps),
            "dagresume": functools.partial(ours, text, count),
        }
        ratios = [("dagresume", other) for other in contenders if other != "dagresume"]
        report = compare(f"outputs of {name}", count, contenders, ratios, rounds=rounds, folder=folder)
        for other, limit in ((against, 1.5), (f"{against}, encoding", 1.5)):
            work = f"an output of {name}"
            rows.append(
                pair(
                    "values",
                    report,
                    "dagresume",
                    other,
                    limit,
                    rounds=rounds,
                    work=work,
                    figures="µs per output",
                )
            )
    return rows
