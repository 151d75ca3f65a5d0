"""What outputs of different sizes cost: a chain of nodes that give a text each and take nothing.

Up to the spill limit an output lies in its row, beyond it in a file of its own. Against it stands a text of
the same size with the same digest (SHA-256 of its bytes): an INSERT and COMMIT of the standard library's
sqlite3, or a file that is written, synchronised, renamed into place, and its folder synchronised, without
which a file need not survive a loss of power. These two fsyncs are all that a file needs; the row that names
it, which the engine commits after them and a resume cannot do without, is told of as a baseline of its own.
So is JSON's encoding of the text, which the engine does and the goal does not count.
"""

import functools
import hashlib
import itertools
import json
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import anyio
import networkx as nx

from benchmarks.commit import Contender, Sample, compare, durable_rows
from benchmarks.rows import DURABLE, Row, pair
from dagresume import Engine, Workflow

SIZES = ((1 << 10, 300, "1 KiB"), (64 << 10, 100, "64 KiB"), (1 << 20, 24, "1 MiB"), (10_000_000, 8, "10 MB"))
IN_ROWS = 64 << 10
ROW = "sqlite3 INSERT + COMMIT"
FILE = "file + fsync + rename + fsync of its folder"
SPILLED = "fsync of the file and of its folder; ours then commits the row that names it"
Encode = Callable[[str], str]


def giver(size: int) -> Callable[[], str]:
    """Make a function that gives another text at each call, which takes `size` bytes with its quotes."""
    numbers = itertools.count()
    rest = "".join(chr(97 + number % 26) for number in range(size - 10))
    return lambda: f"{next(numbers):08d}{rest}"


def giving(size: int, nodes: int) -> Workflow:
    text = giver(size)

    async def give() -> str:
        return text()

    graph: nx.DiGraph[str] = nx.DiGraph()
    for number in range(nodes):
        graph.add_node(f"n{number}", run=give, idempotent=True)
        if number:
            graph.add_edge(f"n{number - 1}", f"n{number}")
    return Workflow.from_graph("giving", graph)


def ours(size: int, nodes: int, folder: Path) -> Sample:
    workflow, database = giving(size, nodes), folder / "runs.db"

    async def main() -> float:
        async with Engine(database, workflows=[workflow]) as engine:
            begun = time.perf_counter()
            await engine.run(workflow)
            return time.perf_counter() - begun

    taken = anyio.run(main)
    files = sum(path.is_file() for path in (folder / "runs.db.blobs").rglob("*"))
    if durable_rows(database) != nodes or files != (nodes if size > IN_ROWS else 0):
        raise SystemExit(f"{files} files, {durable_rows(database)} rows of {nodes} outputs are durable")
    return Sample(taken / nodes * 1e6)


class Table:
    """A table of checkpoints, as the standard library makes it; one commit for each row."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        for pragma in ("journal_mode = WAL", "synchronous = FULL"):
            connection.execute(f"PRAGMA {pragma}")
        columns = "run INTEGER, path TEXT, at INTEGER, digest BLOB, output TEXT"
        connection.execute(f"CREATE TABLE checkpoint ({columns})")

    def add(self, number: int, digest: bytes, output: str) -> None:
        row = (1, f"n{number}", time.time_ns(), digest, output)
        self._connection.execute("INSERT INTO checkpoint VALUES (?, ?, ?, ?, ?)", row)
        self._connection.commit()


def in_rows(size: int, nodes: int, encode: Encode, folder: Path) -> Sample:
    text = giver(size)
    with closing(sqlite3.connect(folder / "raw.db")) as connection:
        table = Table(connection)
        begun = time.perf_counter()
        for number in range(nodes):
            output = encode(text())
            table.add(number, hashlib.sha256(output.encode()).digest(), output)
        return Sample((time.perf_counter() - begun) / nodes * 1e6)


def in_files(size: int, nodes: int, encode: Encode, folder: Path, *, named: bool = False) -> Sample:
    """`named`: each file is named in a row of its own, too."""
    text = giver(size)
    with closing(sqlite3.connect(folder / "raw.db")) as connection:
        table = Table(connection)
        begun = time.perf_counter()
        for number in range(nodes):
            output = encode(text()).encode()
            digest = hashlib.sha256(output)
            with (folder / "new").open("xb") as file:
                file.write(output)
                file.flush()
                os.fsync(file.fileno())
            (folder / "new").rename(folder / digest.hexdigest())
            place = os.open(folder, os.O_RDONLY)
            os.fsync(place)
            os.close(place)
            if named:
                table.add(number, digest.digest(), digest.hexdigest())
        return Sample((time.perf_counter() - begun) / nodes * 1e6)


def quoted(text: str) -> str:
    """Give the JSON of a text that needs no escapes, at next to no cost."""
    return f'"{text}"'


def measure(*, rounds: int, scale: float, folder: Path) -> list[Row]:
    rows = []
    for size, most, name in SIZES:
        nodes = max(1, round(most * scale))
        raw, against = (in_rows, ROW) if size <= IN_ROWS else (in_files, FILE)
        contenders: dict[str, Contender] = {
            "dagresume": functools.partial(ours, size, nodes),
            against: functools.partial(raw, size, nodes, quoted),
            f"{against}, encoding": functools.partial(raw, size, nodes, json.dumps),
        }
        if size > IN_ROWS:
            named = f"{against}, and an INSERT + COMMIT of its name"
            contenders[named] = functools.partial(in_files, size, nodes, quoted, named=True)
        ratios = [("dagresume", other) for other in contenders if other != "dagresume"]
        report = compare(f"outputs of {name}", nodes, contenders, ratios, rounds=rounds, folder=folder)
        rows += [
            pair(
                "values", report, *both, 1.5, rounds=rounds, figures="µs per output",
                work=f"an output of {name}", durability=DURABLE if size <= IN_ROWS else SPILLED,
                counts=both[1] == against,
            )
            for both in ratios
        ]  # fmt: skip
    return rows
