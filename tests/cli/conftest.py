"""The command line as its users have it: files in a folder of their own, and commands given there."""

import importlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from typer.testing import CliRunner

from dagresume.cli import app


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its output, read as strictly as JSON is defined."""
        return json.loads(self.out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))

    @property
    def error(self) -> str:
        """The one line of its error."""
        [line] = self.err.splitlines()
        assert line.startswith("error: ")
        return line


def forget(place: Path) -> None:
    """Let what was imported from this file or folder be imported anew."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and Path(file).is_relative_to(place):
            del sys.modules[name]
    for cache in (place if place.is_dir() else place.parent).rglob("__pycache__"):
        shutil.rmtree(cache)  # written within one second: its age says nothing
    importlib.invalidate_caches()


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to work in; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    for name in ("DAGRESUME_DB", "DAGRESUME_APP", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    forget(tmp_path)


@pytest.fixture
def write(place: Path) -> Callable[[str, str], Path]:
    """Write a file of the user's."""

    def written(name: str, text: str) -> Path:
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text), encoding="utf-8")
        return path

    return written


Cli = Callable[..., Done]


@pytest.fixture
def cli() -> Cli:
    """Give a command here, in this process: words, or one line as in a shell."""

    def run(*words: str, answer: str | None = None) -> Done:
        given = shlex.split(words[0]) if len(words) == 1 else list(words)
        result = CliRunner().invoke(app, given, input=answer, prog_name="dagresume")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Done(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def shell() -> Cli:
    """Give a command to the real program, in a process of its own."""

    def run(*words: str, **variables: str) -> Done:
        given = shlex.split(words[0]) if len(words) == 1 else list(words)
        done = subprocess.run(
            [sys.executable, "-m", "dagresume", *given],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=50,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run


PIPELINE = """
    from pathlib import Path
    from dagresume import Context, Workflow

    wf = Workflow("pipeline", idempotent=True)

    def note(word):
        with open("effects.txt", "a") as file:
            file.write(word + "\\n")

    @wf.node
    async def names(count: int = 4) -> list[int]:
        return list(range(count))

    @wf.node(for_each={"x": "names"})
    async def score(x: int, ctx: Context) -> int:
        note(f"score {x}")
        ctx.log.info("scored", x=x)
        ctx.usage(tokens_in=100, tokens_out=10, cost=0.25)
        if x == 2 and not Path("mended").exists():
            raise ValueError(f"no score for {x}")
        return x * x

    @wf.node(idempotent=False)
    async def mail(names: list[int]) -> None:
        note("mail")

    @wf.node(args={"scores": "score"})
    async def report(scores: list[int]) -> dict:
        return {"sum": sum(scores)}
"""


@pytest.fixture
def pipeline(write: Callable[[str, str], Path]) -> Path:
    """A workflow with a node that has an effect and a map, of which one item fails until `mended` exists."""
    return write("flow.py", PIPELINE)


@pytest.fixture
def effects(place: Path) -> Callable[[], list[str]]:
    """What the nodes of the pipeline did, as they noted it outside the store."""
    return lambda: (place / "effects.txt").read_text(encoding="utf-8").split("\n")[:-1]
