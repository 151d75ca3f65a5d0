"""G8: the mark that kills a user's own workflow at every commit, as users meet it: in their own pytest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(180)  # each is a pytest of its own

ROOT = Path(__file__).parents[2]
PLUGIN = ("-p", "no:dagresume", "-p", "dagresume.pytest_plugin")  # as it lies here, installed or not

HEAD = '''
import os
from pathlib import Path
import pytest
from dagresume import Context, NOT_DONE, Workflow

def send(line, file="mails.log"):
    handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(handle, f"{line}\\n".encode())
    os.close(handle)

def letters(**options):
    """Writes a letter and sends it; `options` are those of the node that sends."""
    wf = Workflow("letters", idempotent=True)

    @wf.node
    async def write(to: str) -> str:
        return f"dear {to}"

    @wf.node(**options)
    async def mail(write: str) -> str:
        send(write)
        return write.upper()

    return wf

'''


def run(
    folder: Path, text: str, *options: str, plugin: tuple[str, ...] = PLUGIN
) -> subprocess.CompletedProcess[str]:
    """Run pytest on a module in a folder of its own, strictly and without our configuration."""
    (folder / "test_mine.py").write_text(HEAD + text, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n", encoding="utf-8")
    return pytest_in(folder, *plugin, "--strict-markers", "-rA", "-v", *options, "test_mine.py")


def pytest_in(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )


def outcomes(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """What became of each test."""
    lines = re.findall(r"^test_mine\.py::(\S+) (PASSED|FAILED|ERROR)", done.stdout, re.MULTILINE)
    return dict(lines)


def test_a_mail_without_a_key_is_caught_and_one_that_asks_is_not(tmp_path: Path) -> None:
    """The wrong one says of itself that it may run twice: killed after the mail, it sends it again."""
    done = run(
        tmp_path,
        """
careful, wrong = letters(idempotent=False), letters()

@pytest.mark.dagresume_kill_everywhere(careful, inputs={"to": "ann"}, effects="mails.log")
def test_careful(kill_everywhere):
    assert kill_everywhere.undisturbed.effects == {"dear ann": 1}
    assert 0 < kill_everywhere.refused < len(kill_everywhere.cases)
    assert set(kill_everywhere.kills) == {"before commit", "after commit"}

@pytest.mark.dagresume_kill_everywhere(wrong, inputs={"to": "ann"}, effects="mails.log")
def test_wrong():
    raise AssertionError("the body does not run")
""",
    )
    assert outcomes(done) == {"test_careful": "PASSED", "test_wrong": "FAILED"}, done.stdout + done.stderr
    found = re.findall(r"^(\w+ commit \d+): (.*)$", done.stdout, re.MULTILINE)
    assert found, done.stdout
    for point, text in found:
        assert point.startswith(("before commit", "after commit"))
        assert text.startswith("the effect 'dear ann' of mail happened twice, undisturbed once.")
        assert "mail is declared idempotent" in text
    assert "the body does not run" not in done.stdout


def test_marks_of_all_kinds(tmp_path: Path) -> None:
    """On a class, with functions for everything, in async tests; at every statement; without effects."""
    done = run(
        tmp_path,
        """
def shelf():
    wf = Workflow("shelf")

    async def look(ctx: Context, things: tuple) -> object:
        return len(things) if Path(f"{ctx.idempotency_key}.put").exists() else NOT_DONE

    @wf.node(reconcile=look)
    async def put(things: tuple, ctx: Context) -> int:
        Path(f"{ctx.idempotency_key}.put").write_text("\\n".join(things))
        return len(things)

    return wf

def there():
    return [Path.cwd()]

@pytest.mark.dagresume_kill_everywhere(
    workflow=shelf,
    inputs={"things": ("tea", "salt")},
    effects=lambda folder: [line for file in folder.glob("*.put") for line in file.read_text().split("\\n")],
    setup=lambda: Path("was here").touch(),
    check=lambda folder: [] if (folder / "was here").exists() else ["no setup"],
    options={"synchronous": "normal"},
    processes=1,
)
class TestShelf:
    @pytest.mark.anyio
    @pytest.mark.parametrize("anyio_backend", ["asyncio"])
    async def test_async(self, kill_everywhere):
        assert kill_everywhere.undisturbed.effects == {"tea": 1, "salt": 1}
        assert kill_everywhere.refused == 0

@pytest.mark.dagresume_kill_everywhere("test_mine:shelf", inputs={"things": ()}, statements=True, every=9)
def test_statements(kill_everywhere):
    assert kill_everywhere.kills["statement"] > 3
""",
    )
    assert set(outcomes(done).values()) == {"PASSED"}, done.stdout + done.stderr
    assert len(outcomes(done)) == 2


def test_what_is_wrong_with_a_mark_is_said(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
wf = letters()
mark = pytest.mark.dagresume_kill_everywhere

@pytest.mark.parametrize("n", [pytest.param(1, marks=mark(wf, inputs={"to": "ann"}))])
def test_param(n): ...

@mark(wf, inputs={"to": "ann"}, effekts="mails.log")
def test_typo(): ...

@mark(17)
def test_number(): ...

@mark(wf, inputs={"to": "ann"}, effects="mail.log")
def test_misspelt(): ...

@mark(wf, inputs={"to": "ann"}, effects="mails.log", varying=["nosuch"])
def test_no_node(): ...

@mark(wf)
def test_inputs(): ...

def test_unmarked(kill_everywhere): ...

def other(to: str) -> str:
    return f"{to} {os.getpid()}"

vague = Workflow("vague", idempotent=True)
vague.node(id="other")(other)

@mark(vague, inputs={"to": "ann"}, effects="mails.log")
def test_vague(): ...
""",
    )
    said = done.stdout
    assert set(outcomes(done).values()) == {"ERROR", "FAILED"}, said
    assert "Write it as a decorator of a function or class at the top of the module" in said
    assert "unexpected keyword argument 'effekts'" in said
    assert "is neither a Workflow nor a function that gives one" in said
    assert "needs the input 'to'" in said
    assert "effects='mail.log': the run that nothing happened to had no effect there" in said
    assert "varying: there is no node 'nosuch'" in said
    assert "the fixture kill_everywhere is for tests marked @pytest.mark.dagresume_kill_everywhere" in said
    assert "differ in the outputs of other. If they may, say so: varying=['other']" in said


def test_the_engine_is_not_loaded_for_tests_without_the_mark(tmp_path: Path) -> None:
    """Installed it is a module beside the package; here it is loaded from a copy, as the wheel has one."""
    copy = (ROOT / "dagresume/pytest_plugin.py").read_text(encoding="utf-8")
    (tmp_path / "dagresume_pytest.py").write_text(copy, encoding="utf-8")
    (tmp_path / "test_mine.py").write_text(
        "import sys\ndef test_nothing(): assert 'dagresume' not in sys.modules\n", encoding="utf-8"
    )
    options = ("-p", "no:dagresume", "-p", "dagresume_pytest", "--strict-markers", "-q")
    assert pytest_in(tmp_path, *options, "test_mine.py").returncode == 0
    listed = pytest_in(tmp_path, *options, "--markers")
    assert "@pytest.mark.dagresume_kill_everywhere(workflow" in listed.stdout
    without = pytest_in(tmp_path, "-p", "no:dagresume", "--markers")
    assert "dagresume_kill_everywhere" not in without.stdout


def test_the_wheel_has_the_plugin_beside_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dagresume = "dagresume_pytest"' in text
    assert '"dagresume/pytest_plugin.py" = "dagresume_pytest.py"' in text


def test_the_resume_screening_survives_everything() -> None:
    """G8: its mail is sent once and its table is whole, wherever it is killed."""
    done = pytest_in(ROOT, *PLUGIN, "-q", "-s", "tests/examples/marked_screening.py")
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
