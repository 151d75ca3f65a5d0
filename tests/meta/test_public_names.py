"""The names of the package: type checkers read what there is, and nothing is loaded before its time."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dagresume

PACKAGE = Path(dagresume.__file__).parent
HEAVY = {
    "networkx",
    "anyio",
    "aiosqlite",
    "structlog",
    "pydantic",
    "yaml",
    "dagresume.engine",
    "dagresume.codec",
}


def stated() -> dict[str, str]:
    """Give the home of each name, as type checkers read it."""
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text(encoding="utf-8"))
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                home = node.module.partition(".")[2] or name.name
                found[name.name] = home
    return found


def test_type_checkers_read_what_there_is() -> None:
    assert stated() == vars(dagresume)["_HOME_OF"]
    assert set(dagresume.__all__) == set(stated())


@pytest.mark.parametrize("name", dagresume.__all__)
def test_each_name_is_there(name: str) -> None:
    assert getattr(dagresume, name) is not None
    assert name in dir(dagresume)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        getattr(dagresume, "nonsense")  # noqa: B009


def loaded_by(program: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport sys; print('loaded:', *sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.rpartition("loaded:")[2].split())


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_loads_no_engine(arguments: list[str]) -> None:
    program = f"""
import sys
from dagresume.cli import main
sys.argv[1:] = {arguments!r}
try:
    main()
except SystemExit as ended:
    assert not ended.code"""
    assert not HEAVY & loaded_by(program)


def test_the_package_by_itself_loads_nothing() -> None:
    assert not HEAVY & loaded_by("import dagresume")


def test_the_engine_loads_nothing_of_the_command_line() -> None:
    found = loaded_by("from dagresume import Workflow, Engine")
    assert not {"typer", "pydantic", "yaml", "cronsim"} & found
    assert not {name for name in found if name.startswith(("dagresume.cli", "dagresume.testing"))}


FOUNDING = "import aiosqlite, anyio, networkx, structlog"


def test_the_engine_loads_little_beside_what_it_rests_on() -> None:
    """Each of these takes a millisecond or more and is needed by few: it is loaded by who needs it."""
    beside = loaded_by("from dagresume import Workflow, Engine") - loaded_by(FOUNDING)
    assert not {"multiprocessing", "zoneinfo", "difflib", "secrets", "hmac"} & beside
    ours = {name for name in beside if name.startswith("dagresume.")}
    assert not {"dagresume.crew", "dagresume.processes", "dagresume.bench", "dagresume.sync"} & ours
    assert len(ours) <= 65, f"one more than before of {sorted(ours)}: does the engine need it to begin?"
