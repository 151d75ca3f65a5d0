"""The repository keeps the shape that DESIGN gives it, and what the README says is what is run."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOP_LEVEL = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "dagresume", "tests", "benchmarks"}
NOT_OURS = {"__pycache__", "build", "dist", "htmlcov", "PKG-INFO"}

HOME_OF_SOMEBODY = re.compile(r"(?<![\w.~$}>-])/(?:root|work|home|Users)/\w")
PACKAGE_INDEX = re.compile(
    r"https?://[^\s\"'<>)]*(?:pypi|artifactory|nexus|devpi|/simple\b)|--(?:extra-)?index-url"
)


def project_files() -> list[Path]:
    """Every file that belongs to the project: what git would commit, or all of it where there is no git."""
    if (ROOT / ".git").exists() and shutil.which("git"):
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        found = (Path(name) for name in listed.split("\0") if name)
        return [path for path in found if (ROOT / path).is_file()]
    kept: list[Path] = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in NOT_OURS and not name.startswith(".")]
        kept += [(Path(folder) / name).relative_to(ROOT) for name in names if name not in NOT_OURS]
    return kept


def texts() -> list[tuple[Path, str]]:
    found: list[tuple[Path, str]] = []
    for path in project_files():
        try:
            found.append((path, (ROOT / path).read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    return found


def readme_command(name: str) -> str:
    """The command between the README's markers, as `.ci/run` reads it."""
    block = re.search(
        rf"^<!-- {name} -->\n```\w*\n(.+)\n```\n<!-- /{name} -->$",
        (ROOT / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert block, f"README.md has no single line between <!-- {name} --> and <!-- /{name} -->"
    return block[1]


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    program = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    environment = os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "500"}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_top_level_holds_only_what_the_layout_allows() -> None:
    names = {path.parts[0] for path in project_files()}
    assert {name for name in names if not name.startswith(".")} == TOP_LEVEL


def test_no_file_names_a_home_folder_or_a_package_index() -> None:
    named = [
        f"{path}: {line.strip()}"
        for path, text in texts()
        for line in text.splitlines()
        if HOME_OF_SOMEBODY.search(line) or PACKAGE_INDEX.search(line)
    ]
    assert named == []


def test_imports_keep_the_layers() -> None:
    linted = lint_imports(ROOT)
    assert linted.returncode == 0, linted.stdout + linted.stderr


@pytest.fixture
def skeleton(tmp_path: Path) -> Path:
    """A package in which every module that has a place exists and is empty, under the project's contracts."""
    contracts = (ROOT / ".importlinter").read_text(encoding="utf-8")
    (tmp_path / ".importlinter").write_text(contracts, encoding="utf-8")
    (tmp_path / "dagresume").mkdir()
    for module in ["__init__", *re.findall(r"\((\w+)\)", contracts)]:
        (tmp_path / "dagresume" / f"{module}.py").touch()
    return tmp_path


def test_the_contracts_accept_empty_modules(skeleton: Path) -> None:
    linted = lint_imports(skeleton)
    assert linted.returncode == 0, linted.stdout + linted.stderr


@pytest.mark.parametrize(
    ("module", "line"),
    [
        pytest.param("stray", "", id="a module without a place"),
        pytest.param("clock", "import dagresume.engine", id="an import upwards"),
        pytest.param("blobs", "import dagresume.codec", id="an import of a sibling"),
        pytest.param("events", "import os", id="the system in the state machine"),
        pytest.param("planner", "import anyio", id="tasks in the planner"),
        pytest.param("codec", "import pydantic", id="a heavy library in the core"),
        pytest.param("engine", "import dagresume.cli", id="the command line in the core"),
        pytest.param("codec", "from dagresume import Engine", id="an import from the package itself"),
    ],
)
def test_the_contracts_refuse(skeleton: Path, module: str, line: str) -> None:
    if module == "codec":
        (skeleton / "dagresume" / "engine.py").write_text("import dagresume.codec\n", encoding="utf-8")
    (skeleton / "dagresume" / f"{module}.py").write_text(f"{line}\n", encoding="utf-8")
    linted = lint_imports(skeleton)
    assert linted.returncode == 1
    assert f"dagresume.{module}" in linted.stdout[linted.stdout.index("Broken contracts") :]


def test_each_readme_command_makes_its_own_environment() -> None:
    for name in ("demo-command", "test-command"):
        assert readme_command(name).startswith("python3 -m venv .venv && .venv/bin/pip install ")


def test_the_demo_command_ends_in_the_demo() -> None:
    assert readme_command("demo-command").endswith("&& .venv/bin/dagresume demo")


def test_ci_runs_the_readme_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "test-command" in script
    assert readme_command("test-command").endswith("&& .venv/bin/python -m pytest")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    # the script has no second way to run the tests, which could drift from the README's
    assert "pytest" not in script
