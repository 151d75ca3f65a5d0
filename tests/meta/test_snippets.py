"""Every program on the pages is run as it stands there, in a folder of its own; it prints what they say."""

import ast
import asyncio
import os
import re
import shlex
import subprocess
import sys
import textwrap
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest

import dagresume

DOCS = Path(dagresume.__file__).parent / "docs"
ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "testing.md": "tests/meta/test_docs.py",
    "README.md": "tests/meta/test_readme.py",
    "langgraph.md": "tests/extras/test_langgraph.py",
}
"""Pages whose programs another test runs."""


class Block(NamedTuple):
    """A block of a page, in the order of the page."""

    language: str
    text: str

    @property
    def name(self) -> str:
        """The file that its first line names; empty if it names none."""
        found = re.match(r"# (\w+\.py)\n", self.text)
        return found[1] if found else ""


def blocks(page: str) -> list[Block]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return [
        Block(language, textwrap.dedent(code))
        for language, code in re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)
    ]


def programs(page: str) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


PAGES = sorted(file.name for file in DOCS.glob("*.md"))
RUN = [page for page in PAGES if programs(page) and page not in ELSEWHERE]


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )


def commands(page: str) -> list[list[str]]:
    """Give the commands of a page; without any each program is run once."""
    told = [line for block in blocks(page) if block.language == "console" for line in block.text.splitlines()]
    return [shlex.split(line)[1:] for line in told] or [
        [block.name] for block in programs(page) if block.name
    ]


@pytest.mark.parametrize(
    "page", [page for page in RUN if page not in {"jupyter.md", "fastapi.md", "ci.md", "otel.md"}]
)
def test_the_programs_of_a_page_print_what_it_says(page: str, tmp_path: Path) -> None:
    for block in programs(page):
        assert block.name, f"{page}: a program names its file in its first line"
        (tmp_path / block.name).write_text(block.text, encoding="utf-8")
    done = [python(tmp_path, *words) for words in commands(page)]
    shown = [block.text for block in blocks(page) if block.language == "text"]
    assert shown, f"{page} says what its programs print"
    assert "".join(each.stdout for each in done) == "".join(shown), done[-1].stderr


def test_the_cells_of_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}

    async def cells() -> None:
        for block in programs("jupyter.md"):
            code = compile(block.text, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            found = eval(code, names)
            if asyncio.iscoroutine(found):
                await found

    with redirect_stdout(StringIO()) as printed:
        asyncio.run(cells())
    (shown,) = [block.text for block in blocks("jupyter.md") if block.language == "text"]
    assert printed.getvalue() == shown


def test_the_service(tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    (program,) = programs("fastapi.md")
    (tmp_path / program.name).write_text(program.text, encoding="utf-8")
    script = """
        from fastapi.testclient import TestClient
        from service import app

        with TestClient(app) as client:
            run_id = client.post("/orders/1", params={"item": "tea"}).json()["run_id"]
            while (found := client.get(f"/orders/{run_id}").json())["status"] != "completed":
                pass
            print(found, client.get("/orders/none").status_code)
        with TestClient(app) as client:
            print(client.get(f"/orders/{run_id}").json())
    """
    done = python(tmp_path, "-W", "ignore", "-c", textwrap.dedent(script))
    completed = "{'status': 'completed', 'output': 'pay 3'}"
    assert done.stdout == f"{completed} 404\n{completed}\n", done.stderr


def test_the_tests_of_the_page_on_integration(tmp_path: Path) -> None:
    (program,) = programs("ci.md")
    (tmp_path / program.name).write_text(program.text, encoding="utf-8")
    plugin = ["-p", "no:dagresume", "-p", "dagresume.pytest_plugin", "-p", "no:cacheprovider"]
    done = python(tmp_path, "-m", "pytest", *plugin, "-q", "-W", "ignore")
    assert "2 passed" in done.stdout, done.stdout


def test_the_program_with_telemetry(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry")
    (program,) = programs("otel.md")
    done = python(tmp_path, "-c", program.text)
    assert done.stdout == "hello ann\n", done.stderr


def test_how_many_programs_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    counted = {page: len(programs(page)) for page in PAGES if programs(page)}
    with capsys.disabled():
        print(f"\n{sum(counted.values())} programs on {len(counted)} pages are run: {counted}")
    assert sum(counted.values()) >= 16


def test_the_programs_are_typed(tmp_path: Path) -> None:
    """mypy --strict finds nothing in what people copy, and knows what a node gives."""
    pytest.importorskip("mypy")
    for page in RUN:
        if page in {
            "jupyter.md",
            "ci.md",
            "fastapi.md",
        }:  # top-level await; fixtures without types; fastapi's Any
            continue
        for block in programs(page):
            (tmp_path / (block.name or f"{page.removesuffix('.md')}_page.py")).write_text(
                block.text, encoding="utf-8"
            )
    done = python(tmp_path, "-m", "mypy", "--strict", "--no-incremental", "--cache-dir=/dev/null", ".")
    assert done.returncode == 0, done.stdout


def test_what_a_node_gives_is_typed(tmp_path: Path) -> None:
    """`result[fn]` is what the function returns, of a map a list of that; its signature is kept."""
    pytest.importorskip("mypy")
    (tmp_path / "typed.py").write_text(
        textwrap.dedent("""
            from typing import assert_type

            from dagresume import Engine, Workflow

            wf = Workflow("typed", idempotent=True)

            @wf.node
            async def numbers(count: int) -> list[int]:
                return [count]

            @wf.node(for_each={"n": numbers}, concurrency=3)
            async def name(n: int) -> str:
                return str(n)

            @wf.node(retry=None)
            def total(numbers: list[int]) -> float:
                return 1.0

            async def main() -> None:
                async with Engine("runs.db") as engine:
                    result = await engine.run(wf, {"count": 1})
                assert_type(result[numbers], list[int])
                assert_type(result[name], list[str])
                assert_type(result[total], float)
                assert_type(await numbers(3), list[int])
                assert_type(await name(n=3), str)
                assert_type(total([1]), float)
        """)
    )
    done = python(tmp_path, "-m", "mypy", "--strict", "--no-incremental", "--cache-dir=/dev/null", "typed.py")
    assert done.returncode == 0, done.stdout
