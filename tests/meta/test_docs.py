"""What the page on testing shows is done here as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dagresume import pytest_plugin, testing

pytestmark = pytest.mark.timeout(180)  # each is a pytest of its own

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "dagresume/docs/testing.md").read_text(encoding="utf-8")


def pytest_in(folder: Path, *options: str) -> str:
    """Run the page's tests in a folder and give what pytest said."""
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        name = re.match(r"# (\w+\.py)\n", block)
        assert name
        (folder / name[1]).write_text(block, encoding="utf-8")
    plugin = ["-p", "no:dagresume", "-p", "dagresume.pytest_plugin", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugin, "--strict-markers", "-q", "-rA", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=150
    )
    return done.stdout + done.stderr


def test_the_tests_of_the_page_pass(tmp_path: Path) -> None:
    assert "2 passed" in pytest_in(tmp_path)


def test_the_mistake_of_the_page_is_found(tmp_path: Path) -> None:
    pytest_in(tmp_path, "--collect-only")
    file = tmp_path / "test_order.py"
    wrong = file.read_text(encoding="utf-8").replace("@order.node(idempotent=False)", "@order.node")
    (tmp_path / "test_wrong.py").write_text(wrong, encoding="utf-8")
    said = " ".join(pytest_in(tmp_path, "test_wrong.py").split())
    shown = re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert shown
    assert " ".join(shown[1].split()) in said


def test_the_page_names_all_there_is() -> None:
    for name in testing.__all__:
        if name not in {"Autopsy", "Case", "Child", "Ended", "Sweep"}:  # what the others give
            assert f"`{name}" in PAGE or f"{name}(" in PAGE, name
    text = Path(pytest_plugin.__file__).read_text(encoding="utf-8")
    options = re.search(
        r"\(workflow, (.*?)\): kill", text.replace('"\n        f"', "").replace('"\n        "', "")
    )
    assert options
    for option in re.findall(r"(\w+)=", options[1]):
        assert f"`{option}" in PAGE, option
