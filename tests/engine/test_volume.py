"""The estimate of the disk that runs take, against what they take."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from dagresume import Engine, Workflow
from dagresume.blobs import measure
from dagresume.volume import estimate


def body(n: int, size: int) -> Callable[[], Awaitable[str]]:
    """Give a function whose packed output has this many bytes."""

    async def give() -> str:
        return f"{n:>{size - 2}}"

    return give


async def disk(db: Path, nodes: int, size: int, runs: int) -> int:
    """Give the bytes that so many real runs take."""
    wf = Workflow("w", idempotent=True)
    for n in range(nodes):
        wf.node(id=f"node {n}")(body(n, size))
    async with Engine(db, synchronous="normal") as engine:
        for n in range(runs):
            await engine.run(wf, key=f"key {n}")
    count, size_of_files = measure(Path(f"{db}.blobs"))
    rows = await anyio.to_thread.run_sync(lambda: db.stat().st_size)
    return rows + size_of_files + count * 2048  # half a block for each file's last one


@pytest.mark.parametrize(
    ("nodes", "size", "runs"),
    [
        (1, 10, 400),
        (100, 20, 40),
        (100, 500, 20),
        (100, 1500, 20),
        (100, 5000, 20),
        (20, 30_000, 10),
        (10, 100_000, 5),
    ],
)
async def test_it_is_within_a_tenth_of_the_truth(db: Path, nodes: int, size: int, runs: int) -> None:
    true, told = await disk(db, nodes, size, runs), estimate(nodes, size, 1).run * runs
    empty = 110_000  # of a file without any run
    print(f"{nodes} nodes x {size} bytes x {runs} runs: {true} bytes, estimated {told}")
    assert told == pytest.approx(true - empty, rel=0.1) or told == pytest.approx(true, rel=0.1)


def test_the_example_of_the_requirement_comes_out() -> None:
    """R10: 100 nodes of 5 KB, 1,000 runs a day: about 500 MB a day, 15 GB a month."""
    found = estimate(100, 5000, 1000)
    assert found.day == pytest.approx(500e6, rel=0.1)
    assert found.month == pytest.approx(15e9, rel=0.1)
    assert found.at_rest == pytest.approx(7 * found.day * 8 / 7)
    assert str(found) == (
        "100 nodes × 5.0 kB × 1,000 runs a day: 518 kB a run, 518 MB a day, 16 GB a month;"
        " kept for 7 d: 4.1 GB at rest"
    )
