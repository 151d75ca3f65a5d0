"""A person's word to a run: approve, reject, signal, resolve."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Cli

Write = Callable[[str, str], Path]

PAY = """
    from dagresume import Workflow
    pay = Workflow("pay")
    pay.approval("ok", prompt="Pay it?")
    @pay.node
    async def paid(ok: dict) -> str:
        return f"{ok['by']}: {ok['comment']}"
    pay.wait_for("receipt", "receipt", depends_on="paid")
"""


@pytest.fixture
def waiting(write: Write, cli: Cli) -> str:
    """The id of a run that waits for a person."""
    write("flow.py", PAY)
    done = cli("run flow.py --json")
    assert done.code == 3
    run_id: str = done.json["run_id"]
    return run_id


def test_an_approval_by_another_process_lets_the_run_go_on(waiting: str, cli: Cli) -> None:
    """B142: what is before it is not repeated, what is after it gets the decision."""
    assert "Pay it?" in cli("show last").out
    assert "approve" in cli("show last").out
    said = cli("approve last --by ann --comment fine --json").json
    assert (said["path"], said["approved"], said["by"]) == ("ok", True, "ann")
    resumed = cli("resume last --app flow.py --json")
    assert (resumed.code, resumed.json["executed"]) == (3, ["paid"])
    cli("signal last receipt --payload 7")
    done = cli("resume last --app flow.py --json").json
    assert done["outputs"]["receipt"] == 7


def test_the_first_word_wins(waiting: str, cli: Cli) -> None:
    """B139: the same answer again is accepted, another one is refused."""
    cli("approve last ok --by ann")
    cli("approve last ok --by bob")
    for _ in range(2):
        refused = cli("reject last ok")
        assert refused.code == 4
        assert "already approved by ann" in refused.error
        cli("resume last --app flow.py")


def test_a_rejection_fails_its_node(waiting: str, cli: Cli) -> None:
    cli("reject last --by ann --comment dear")
    done = cli("resume last --app flow.py")
    assert "rejected by ann: dear" in done.out + done.err


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ("approve last paid", 4, "does not wait"),
        ("approve last nothing", 4, "does not wait"),
        ("signal last receipt --payload {", 2, "not JSON"),
        ("resolve last paid", 2, "either --output JSON"),
        ("resolve last paid --output 1", 4, "does not wait"),
    ],
)
def test_what_nobody_asked_for_is_refused(waiting: str, cli: Cli, command: str, code: int, says: str) -> None:
    done = cli(command)
    assert done.code == code
    assert says in done.error
