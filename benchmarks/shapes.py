"""What a node costs in graphs of different shapes.

    python -m benchmarks.shapes [chain] [fanout] [layers] [--scale 1.0] [--rounds 5] [--folder .] [--json]

- chain: 1,000 nodes one after the other;
- fanout: 10,000 nodes that all need the same one, and do next to nothing;
- layers: 30 layers of 100 nodes, each of which takes the outputs of all 100 nodes above it.

Each runs idempotent and not idempotent, beside the baselines that `benchmarks.commit` explains. The one that
counts for wide graphs is anyio alone: a task group with a task per node, the same work and nothing kept.
"""

import functools
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import networkx as nx

from benchmarks.commit import (
    CAREFUL,
    Contender,
    Report,
    arguments,
    compare,
    compare_chain,
    fdatasync,
    raw_sqlite,
    show,
    with_engine,
    without_engine,
)
from dagresume import Workflow
from dagresume.bench import fanout, first, step

RAW_ROWS = 2000  # enough for a mean per row; a row is a commit


def compare_wide(
    title: str,
    nodes: int,
    make: Callable[..., Workflow],
    bare: Callable[[], Awaitable[None]],
    *,
    rounds: int,
    folder: Path,
) -> Report:
    ours, careful = (functools.partial(make, idempotent=idempotent) for idempotent in (True, False))
    contenders: dict[str, Contender] = {
        "append + fdatasync": fdatasync,
        "anyio alone": functools.partial(without_engine, bare, nodes),
        "sqlite3": functools.partial(raw_sqlite, rows=min(nodes, RAW_ROWS)),
        "dagresume": functools.partial(with_engine, ours, nodes),
        CAREFUL: functools.partial(with_engine, careful, nodes),
    }
    ratios = [(one, other) for other in ("anyio alone", "sqlite3") for one in ("dagresume", CAREFUL)]
    return compare(title, nodes, contenders, ratios, rounds=rounds, folder=folder)


# one node, and many that need it


async def bare_fanout(width: int) -> None:
    results = {"root": await first()}

    async def run(name: str) -> None:
        results[name] = await step(results["root"])

    async with anyio.create_task_group() as group:
        for number in range(width):
            group.start_soon(run, f"n{number}")
    if sum(results.values()) != width:
        raise SystemExit("the fan-out came out wrong")


def compare_fanout(scale: float, *, rounds: int, folder: Path) -> Report:
    width = round(10_000 * scale)
    make, bare = functools.partial(fanout, width), functools.partial(bare_fanout, width)
    return compare_wide("fanout", width + 1, make, bare, rounds=rounds, folder=folder)


# layers, each node joined to the whole layer above it


def joining(width: int) -> Callable[..., Awaitable[int]]:
    """Make a node function with a parameter for each parent: a parent binds to one of its own."""
    names = [f"p{number}" for number in range(width)]
    parameters = ", ".join(f"{name}: int" for name in names)
    text = f"async def join({parameters}) -> int:\n    return max({', '.join(names)}) + 1\n"
    made: dict[str, Callable[..., Awaitable[int]]] = {}
    exec(text, {"__name__": __name__}, made)
    return made["join"]


def layers(depth: int, width: int, *, idempotent: bool) -> Workflow:
    join = joining(width)
    graph: nx.DiGraph[str] = nx.DiGraph()
    for layer in range(depth):
        for number in range(width):
            graph.add_node(f"l{layer}.{number}", run=join if layer else first)
            if layer:
                for parent in range(width):
                    graph.add_edge(f"l{layer - 1}.{parent}", f"l{layer}.{number}", arg=f"p{parent}")
    return Workflow.from_graph("layers", graph, idempotent=idempotent)


async def bare_layers(depth: int, width: int, join: Callable[..., Awaitable[int]]) -> None:
    above: list[int] = []

    async def run(number: int) -> None:
        below[number] = await (join(*above) if above else first())

    for _ in range(depth):
        below = [0] * width
        async with anyio.create_task_group() as group:
            for number in range(width):
                group.start_soon(run, number)
        above = below
    if above != [depth - 1] * width:
        raise SystemExit("the layers came out wrong")


def compare_layers(scale: float, *, rounds: int, folder: Path) -> Report:
    depth, width = max(2, round(30 * scale)), 100
    make = functools.partial(layers, depth, width)
    bare = functools.partial(bare_layers, depth, width, joining(width))
    return compare_wide("layers", depth * width, make, bare, rounds=rounds, folder=folder)


def compare_line(scale: float, *, rounds: int, folder: Path) -> Report:
    return compare_chain(round(1000 * scale), rounds=rounds, folder=folder)


SHAPES: dict[str, Callable[..., Report]] = {
    "chain": compare_line,
    "fanout": compare_fanout,
    "layers": compare_layers,
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"{', '.join(SHAPES)} (default: all)")
    parser.add_argument("--scale", type=float, default=1.0, help="larger or smaller graphs (default 1.0)")
    options = parser.parse_args()
    unknown = [name for name in options.shapes if name not in SHAPES]
    if unknown:
        parser.error(f"no shape {unknown[0]!r}: choose from {', '.join(SHAPES)}")
    reports = [
        SHAPES[name](options.scale, rounds=options.rounds, folder=options.folder)
        for name in options.shapes or SHAPES
    ]
    show(reports, as_json=options.json)


if __name__ == "__main__":
    main()
