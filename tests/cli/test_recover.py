"""`recover` and `audit`."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import Cli

FLOW = """
    import os
    from pathlib import Path
    from dagresume import Recovery, Workflow

    nightly = Workflow("nightly", idempotent=True, recovery=Recovery(auto_resume=True))
    mailer = Workflow("mailer", recovery=Recovery(auto_resume=True))

    @nightly.node
    def a() -> int:
        if not Path("died").exists():
            Path("died").touch()
            os._exit(9)
        return 1

    @mailer.node
    def mail() -> int:
        os._exit(9)
"""
Write = Callable[[str, str], Path]


def die(name: str) -> None:
    command = [sys.executable, "-m", "dagresume", "run", f"flow.py:{name}"]
    assert subprocess.run(command, check=False).returncode == 9


def test_what_may_go_on_goes_on_and_the_rest_is_explained(cli: Cli, write: Write) -> None:
    write("flow.py", FLOW)
    die("nightly")
    die("mailer")
    done = cli("recover", "--app", "flow.py:nightly")
    assert done.code == 0
    assert "nightly: resumed, now completed" in done.out
    assert "name it with --app" in done.out
    found = cli("recover", "--app", "flow.py:mailer", "--json").json
    assert [(each["action"], each["reason"], each["paths"]) for each in found] == [
        ("skipped", "not_idempotent", ["mail"])
    ]
    assert "`dagresume retry" in cli("recover", "--app", "flow.py:mailer").out


def test_the_audit_says_what_was_decided_and_can_be_filtered(cli: Cli, write: Write) -> None:
    """R29."""
    write("flow.py", FLOW)
    die("nightly")
    die("mailer")
    for _ in range(2):
        cli("recover", "--app", "flow.py:nightly", "--app", "flow.py:mailer")
    kinds = [event["kind"] for event in cli("audit", "--json").json]
    assert kinds.count("run.created") == 2
    assert "execution.auto_resume.skipped" in kinds  # before or after the end of the one that goes on
    chosen = cli("audit", "--type", "execution.auto_resume", "--json").json
    assert [(event["kind"], event["data"]["attempt"]) for event in chosen] == [("execution.auto_resume", 1)]
    assert "attempt 1 of 3" in cli("audit").out
    assert "not_idempotent" in cli("audit", "last").out
    assert cli("audit", "--type", "nothing.such").out == "Nothing of this type is recorded.\n"


def test_nothing_to_recover_is_said(cli: Cli, write: Write) -> None:
    write("flow.py", FLOW.replace("os._exit(9)", "return 2"))
    assert cli("run", "flow.py:mailer").code == 0
    done = cli("recover", "--app", "flow.py:mailer")
    assert (done.code, done.out) == (0, "No run has stopped without an end.\n")
