"""What refuses names the command that goes on: it is run as it stands there, and the run goes on (B104)."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, Done, forget

Write = Callable[[str, str], Path]

FLOW = """
    import os
    from pathlib import Path
    from dagresume import Workflow

    wf = Workflow("mailer", version="1")

    @wf.node(idempotent=True)
    async def text(word: str = "hello") -> str:
        return word

    @wf.node
    async def mail(text: str) -> int:
        with open("effects.txt", "a") as file:
            file.write(text + "\\n")
        if Path("die").exists():
            os.kill(os.getpid(), 9)
        return len(text)

    @wf.node(idempotent=True)
    async def done(mail: int) -> int:
        if Path("fail").exists():
            raise ValueError("not yet")
        return mail
"""


@pytest.fixture
def flow(write: Write, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node with an effect between two without; the code is known to every command."""
    monkeypatch.setenv("DAGRESUME_APP", "flow.py")
    return write("flow.py", FLOW)


def ways(done: Done) -> list[list[str]]:
    """The commands that a refusal names, as words after `dagresume`."""
    assert done.code not in {0, 1}, done
    found = [shlex.split(text)[1:] for text in re.findall(r"`(dagresume [^`]*)`", done.error)]
    assert found, f"no way out: {done.error}"
    return found


def way(done: Done, command: str) -> list[str]:
    """The one of them that begins with this word."""
    [found] = [words for words in ways(done) if words[0] == command]
    return found


def died(flow: Path, cli: Cli, shell: Cli) -> str:
    """The id of a run whose process died in the node with an effect."""
    Path("die").touch()
    assert shell("run flow.py --key night").code == -signal.SIGKILL
    Path("die").unlink()
    run_id: str = cli("list --json").json[0]["run_id"]
    return run_id


def status(cli: Cli) -> str:
    told: str = cli("show last --json").json["status"]
    return told


@pytest.mark.skipif(os.name == "nt", reason="a signal kills it")
@pytest.mark.parametrize("command", ["resolve", "retry", "show"])
def test_an_uncertain_node(command: str, flow: Path, cli: Cli, shell: Cli) -> None:
    run_id = died(flow, cli, shell)
    for refusing in (f"resume {run_id}", "run flow.py --key night"):
        refused = cli(refusing)
        assert refused.code == 4
        words = way(refused, command)
        assert words[1] == run_id
    if "…" in words:  # --output … | --failed …: what a person knows
        at = words.index("…")
        words = [*words[:at], "5", *words[words.index("…", at + 1) + 1 :]]
    assert cli(*words).code == 0
    if command == "resolve":
        assert cli(f"resume {run_id}").code == 0
    if command != "show":
        assert status(cli) == "completed"
        assert len(Path("effects.txt").read_text().split()) == (2 if command == "retry" else 1)


def test_another_version(flow: Path, cli: Cli, place: Path) -> None:
    Path("fail").touch()
    assert cli("run flow.py --key night").code == 1
    Path("fail").unlink()
    flow.write_text(flow.read_text().replace('version="1"', 'version="2"'))
    forget(place)
    for refusing in ("resume last", "run flow.py --key night"):
        words = way(cli(refusing), "resume")
    assert "--force" in words
    assert cli(*words).code == 0
    assert status(cli) == "completed"
    assert Path("effects.txt").read_text() == "hello\n"


def test_other_inputs(flow: Path, cli: Cli) -> None:
    assert cli("run flow.py --key night").code == 0
    words = way(cli("run flow.py --key night --input word=bye"), "fork")
    assert cli(*words, "--input", "word=bye").code == 0
    assert Path("effects.txt").read_text() == "hello\nbye\n"


@contextmanager
def living(run: str) -> Iterator[None]:
    """Have another process drive a run that stays."""
    command = [sys.executable, "-m", "dagresume", *shlex.split(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as other:
        try:
            while not Path("begun").exists():
                assert other.poll() is None
            yield
        finally:
            other.terminate()


STAYS = """
    import asyncio
    from pathlib import Path
    from dagresume import Workflow

    wf = Workflow("stays", idempotent=True)

    @wf.node
    async def stay() -> None:
        if not Path("begun").exists():
            Path("begun").touch()
            await asyncio.sleep(40)
"""


def test_a_run_that_somebody_drives(write: Write, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGRESUME_APP", "stays.py")
    write("stays.py", STAYS)
    with living("run stays.py --key night"):
        for refusing in ("resume last", "retry last", "rollback last --yes", "run stays.py --key night"):
            refused = cli(refusing)
            assert refused.code == 4
            words = way(refused, "cancel")
        assert cli(*words).code == 0
    assert status(cli) == "cancelled"
    assert cli("run stays.py --key night").code == 0


def test_what_cannot_be_undone_and_what_is_undone(flow: Path, cli: Cli) -> None:
    assert cli("run flow.py").code == 0
    words = way(cli("rollback last --yes"), "rollback")
    assert "--accept-irreversible" in words
    assert cli(*words, "--yes").code == 0
    assert status(cli) == "rolled_back"
    for refusing in ("resume last", "retry last"):
        words = way(cli(refusing), "fork")
    assert cli(*words).code == 0
    assert status(cli) == "completed"


def test_a_stored_output_that_is_lost(flow: Path, cli: Cli) -> None:
    Path("fail").touch()
    assert cli("run flow.py").code == 1
    Path("fail").unlink()
    with closing(sqlite3.connect("dagresume.db", isolation_level=None)) as conn:
        conn.execute("UPDATE dagresume_events SET output = '7' WHERE path = 'text'")
        conn.execute("UPDATE dagresume_events SET output = '8' WHERE path = 'mail'")
    done, command = cli("resume last"), ""
    for _ in range(2):  # each way on meets the next value that is lost
        assert done.code == 1
        [command] = set(re.findall(r"`(dagresume retry [^`]*)`", done.err + done.out))
        done = cli(*shlex.split(command)[1:], "--yes")
    assert (done.code, command.split()[4]) == (0, "text")
    assert status(cli) == "completed"
    assert cli("doctor").code == 0


def test_what_the_doctor_says_of_a_stored_output_that_is_lost(flow: Path, cli: Cli) -> None:
    assert cli("run flow.py").code == 0
    with closing(sqlite3.connect("dagresume.db", isolation_level=None)) as conn:
        conn.execute("UPDATE dagresume_events SET output = '8' WHERE path = 'mail'")
    diagnosed = cli("doctor")
    [command] = set(re.findall(r"`(dagresume retry [^`]*)`", diagnosed.out))
    assert cli(*shlex.split(command)[1:], "--yes").code == 0
    assert cli("doctor").code == 0


@pytest.mark.skipif(os.name == "nt", reason="a signal kills it")
def test_what_the_doctor_says_of_a_run_whose_process_died(flow: Path, cli: Cli, shell: Cli) -> None:
    run_id = died(flow, cli, shell)
    told = cli("doctor")
    assert told.code == 1
    [command] = re.findall(r"`(dagresume resume [^`]*)`", told.out)
    words = way(cli(*shlex.split(command)[1:]), "retry")  # which names the way on: its effect is uncertain
    assert (words[1], cli(*words).code) == (run_id, 0)
    assert cli("doctor").code == 0


def test_code_that_is_not_known(flow: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("fail").touch()
    assert cli("run flow.py").code == 1
    Path("fail").unlink()
    monkeypatch.delenv("DAGRESUME_APP")
    refused = cli("resume last")
    assert (refused.code, "--app path/flow.py" in refused.error) == (4, True)
    assert cli("resume last --app flow.py").code == 0


def test_a_run_that_was_cancelled(flow: Path, cli: Cli) -> None:
    Path("fail").touch()
    assert cli("run flow.py --key night").code == 1
    Path("fail").unlink()
    assert cli("cancel last").code == 0
    refused = cli("resume last")
    assert refused.code in {1, 4}
    [command] = re.findall(r"`(dagresume retry [^`]*)`", refused.err)
    words = [{"NODE": "done"}.get(word, word) for word in shlex.split(command)[1:]]
    assert cli(*words, "--yes").code == 0
    assert status(cli) == "completed"


def test_an_unknown_run(flow: Path, cli: Cli) -> None:
    assert cli("run flow.py").code == 0
    assert cli(*way(cli("show 01a22ebc-7393-7ee6-b8f1-0e98ebbe00aa"), "list")).code == 0
