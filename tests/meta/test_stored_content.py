"""Nothing that is stored is ever taken for code (B152): who may evaluate, import or unpickle, and what."""

from __future__ import annotations

import ast
import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import anyio.to_thread

import dagresume
from dagresume import Engine, Workflow

PACKAGE = Path(dagresume.__file__).parent
DANGEROUS = {
    "eval", "exec", "compile", "__import__", "import_module", "system", "popen", "load", "loads", "Unpickler",
    "run_path", "run_module", "full_load", "unsafe_load",
}  # fmt: skip
HARMLESS = {"json", "tomllib", "re"}
ALLOWED = {
    "workflow.py": {"eval"},  # annotations of the user's functions
    "shapes.py": {"eval"},  # those of the user's classes
    "codehash.py": {"compile"},  # the source of the user's functions; never executed
    "processes.py": {"loads", "import_module"},  # between our own parent and child, over a pipe of theirs
    "__init__.py": {"import_module"},  # its own modules, from a closed list
    "kinds/__init__.py": {"import_module"},  # its own modules, from a closed list
    "zygote.py": {"import_module"},  # what a test names, in a process of its own
    "cli/__init__.py": {"import_module"},
    "cli/targets.py": {"import_module"},  # what a person names on the command line
    "cli/demo.py": {"import_module"},
}


SERIALISERS = {"pickle", "marshal", "yaml", "shelve", "dill", "cloudpickle", "joblib", "numpy", "np"}


def calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        owner = called.value if isinstance(called, ast.Attribute) else None
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        of = owner.id if isinstance(owner, ast.Name) else ""
        # entry points, stores and jobs have a `load` too
        if name in DANGEROUS and of not in HARMLESS and (name != "load" or of in SERIALISERS):
            yield name


def test_only_these_may_evaluate_import_or_unpickle() -> None:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        if names := set(calls(ast.parse(path.read_text(encoding="utf-8")))):
            found[path.relative_to(PACKAGE).as_posix()] = names
    assert found == ALLOWED


def test_only_what_speaks_to_our_own_workers_knows_pickle() -> None:
    imports = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if {name.partition(".")[0] for name in names} & (SERIALISERS - {"numpy", "np", "yaml"}):
                imports.add(path.name)
    assert imports == {"processes.py"}


READER = """
    import asyncio, sys
    from pathlib import Path
    from dagresume import Engine, DagresumeError

    db, told = sys.argv[1], []
    home = str(Path(db).parent)
    RUNS = ("pickle.", "os.system", "os.exec", "os.posix_spawn", "subprocess.", "marshal.loads", "ctypes.")

    def watch(event, args):
        writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
        if event.startswith(RUNS) or (writes and not str(args[0]).startswith(home)):
            told.append((event, args))
        elif event == "import" and "pwned" in str(args[0]):
            told.append((event, args))

    async def read(show):
        async with Engine(db) as engine:
            for info in await engine.runs():
                result = await engine.result(info.run_id)
                try:
                    show(f"{info.key} given {result['a']!r}")
                except DagresumeError as error:
                    show(f"{info.key} refused {error}")
                [event async for event in engine.events(info.run_id)]
                await engine.explain(info.run_id, "a")

    asyncio.run(read(str))  # what is loaded at first use is loaded now
    sys.addaudithook(watch)
    asyncio.run(read(print))
    assert not told, told
"""
REFUSED = (
    {"$dr": "pickle", "v": "gASV"},
    {"$dr": "obj", "t": "subprocess:Popen", "v": {"args": ["touch", "pwned"]}},
    {"$dr": "obj", "t": "pwned:Thing", "v": {}},
    {"$dr": "enum", "t": "signal:Signals", "v": "SIGKILL"},
    {"$dr": "ndarray", "v": "gASV"},
    {"$dr": "../../pwned", "v": 1},
    {"$dr": ["list"], "v": 1},
    {"$dr": None},
)
GIVEN = (
    {"__type__": "os.system", "args": ["touch pwned"]},
    {"py/object": "pwned.Thing", "!!python/object/apply:os.system": ["touch pwned"]},
)


async def test_reading_a_row_runs_nothing(db: Path) -> None:
    """A form that is not known is refused, and what looks like another library's is plain data."""
    wf = Workflow("w")

    @wf.node
    async def a() -> int:
        return 1

    async with Engine(db) as engine:
        ids = [(await engine.run(wf, key=str(n))).run_id for n in range(len(REFUSED) + len(GIVEN))]
    connection = sqlite3.connect(db)
    with connection:
        for run_id, output in zip(ids, (*REFUSED, *GIVEN), strict=True):
            changed = connection.execute(
                "UPDATE dagresume_events SET output = ?, digest = NULL WHERE kind = 'node.completed'"
                " AND run = (SELECT run FROM dagresume_runs WHERE run_id = ?)",
                [json.dumps(output, separators=(",", ":")), run_id],
            )
            assert changed.rowcount == 1
    connection.close()
    done = await anyio.to_thread.run_sync(read, db)
    assert (done.returncode, done.stderr) == (0, "")
    told = dict(line.split(" ", 1) for line in reversed(done.stdout.splitlines()))
    assert len(told) == len(ids)
    for n, word in enumerate(told.values()):
        if n < len(REFUSED):
            assert word.startswith("refused "), REFUSED[n]
        else:
            assert word == f"given {GIVEN[n - len(REFUSED)]!r}"


def read(db: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", dedent(READER), str(db)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=50, cwd=db.parent)
