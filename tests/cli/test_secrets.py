"""What commands show of secrets: nothing (B157)."""

import json
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from dagresume.cli.command import Here
from tests.cli.conftest import Cli

Write = Callable[[str, str], Path]
PASSWORD = "hunter2/x y"
FLOW = """
    from dagresume import Context, Workflow

    wf = Workflow("flow", secrets=("password", "api_key"), idempotent=True)

    @wf.node
    async def gives(password: str, nested: list, ctx: Context) -> dict:
        ctx.log.warning("using", password=password, nested=nested)
        return {"api_key": "made-by-the-node", "list": [password], "url": f"https://h/?p={password}"}

    @wf.node
    async def short(gives: dict) -> str:
        return f"with {gives['list'][0]} and postgres://u:pw@h/db"

    @wf.node
    async def fails(short: str, nested: list) -> None:
        raise ValueError(f"refused: {short} {nested}")
"""
COMMANDS = (
    "show last", "show last --items", "show last --json", "watch last", "diff last last",
    "list --json", "logs last", "logs last --json",
    "explain last fails", "plan last --app flow.py", "plan last --app flow.py --json",
    "resume last --app flow.py", "resume last --app flow.py --json",
    "retry last --app flow.py --from gives --json", "fork last --app flow.py --json",
    "fork last --app flow.py --from gives",
)  # fmt: skip


def assert_hidden(text: str) -> None:
    for secret in (PASSWORD, quote(PASSWORD), "k-123456", "u:pw@", "hunter2"):
        assert secret not in text


def test_no_command_shows_a_secret(write: Write, place: Path, cli: Cli) -> None:
    write("flow.py", FLOW)
    (place / "inputs.json").write_text(
        json.dumps({"password": PASSWORD, "nested": [{"api_key": "k-123456"}]})
    )
    for command in ("run flow.py --inputs inputs.json --json", "run flow.py --inputs inputs.json", *COMMANDS):
        done = cli(command)
        assert done.out, command
        assert_hidden(done.out + done.err)
        if "run flow.py" in command and "--json" in command:
            assert done.json["outputs"]["gives"] == {
                "api_key": "***",
                "list": ["***"],
                "url": "https://h/?p=***",
            }
            assert done.json["outputs"]["short"] == "with *** and postgres://u:***@h/db"
            assert "***" in done.json["failures"]["fails"]["message"]
    assert "***" in cli("logs last").out
    assert "***" in cli("show last").out


def test_a_run_that_completed_shows_its_outputs_without_them(write: Write, cli: Cli) -> None:
    write("flow.py", FLOW.split("    @wf.node\n    async def fails")[0])
    command = [
        "run",
        "flow.py",
        "--input",
        f"password={PASSWORD}",
        "--input",
        'nested=[{"api_key": "k-123456"}]',
        "--key",
        "k",
    ]
    first = cli(*command)
    assert first.code == 0
    assert "with *** and postgres://u:***@h/db" in first.out
    again = cli(*command, "--json")  # from what is stored, nothing is executed
    assert again.json["executed"] == []
    assert again.json["outputs"]["short"] == "with *** and postgres://u:***@h/db"
    assert_hidden(first.out + first.err + again.out + again.err)


DSN = "postgresql://u:pw@h/db"


@pytest.mark.parametrize(
    "command", ["list", "show last", "run flow.py", "resume last --app flow.py", "list --debug"]
)
@pytest.mark.parametrize("by", ["option", "variable"])
def test_the_password_of_the_database_is_not_echoed(
    command: str, by: str, write: Write, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("flow.py", FLOW)
    words = command.split()
    if by == "variable":
        monkeypatch.setenv("DAGRESUME_DB", DSN)
    else:
        words += ["--db", DSN]
    done = cli(*words)
    assert done.code
    assert_hidden(done.out + done.err)


def test_a_command_to_paste_names_a_database_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Here(DSN).command("show", "x") == "dagresume show x --db 'postgresql://u:***@h/db'"
    monkeypatch.setenv("DAGRESUME_DB", DSN)
    assert Here(DSN).command("show", "x") == "dagresume show x"  # the variable says it
    assert Here("other.db").command("show", "x") == "dagresume show x --db other.db"


def test_an_error_of_a_workflow_file_shows_no_password(write: Write, cli: Cli) -> None:
    write("broken.py", f'raise RuntimeError("cannot reach {DSN}")')
    done = cli("run broken.py --debug")
    assert "cannot reach postgresql://u:***@h/db" in done.err
    assert_hidden(done.err)
