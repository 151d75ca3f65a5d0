"""`dagresume rollback`: it shows, it asks, it undoes; and what the other commands say of such a run."""

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Cli

FLOW = """
    from pathlib import Path
    from dagresume import Workflow

    def note(word):
        with open("effects.txt", "a") as file:
            file.write(word + "\\n")

    def undo(output, ctx):
        note(f"undo {ctx.path} {output}")
        if Path("broken").exists() and ctx.path == "book":
            raise OSError("the hotel does not answer")

    def flow(name, on_failure=None):
        wf = Workflow(name, on_failure=on_failure)

        @wf.node(compensate=undo)
        async def book() -> int:
            return 7

        @wf.node(for_each={"n": "guests"}, compensate=undo, depends_on="book", concurrency=1)
        async def invite(n: int) -> int:
            return n

        @wf.node(idempotent=True)
        async def guests() -> list[int]:
            return [1, 2]

        @wf.node(depends_on="invite")
        async def fail() -> None:
            raise ValueError("too late")

        return wf

    wf = flow("party")
    mail = flow("mailed")

    @mail.node
    async def letter() -> None:
        pass

    own = flow("own", "rollback")
"""


@pytest.fixture
def failed(write: Callable[[str, str], Path], cli: Cli) -> str:
    """The id of a run that has failed."""
    write("flow.py", FLOW)
    run_id: str = cli("run flow.py:wf --json").json["run_id"]
    return run_id


APP = ("--app", "flow.py")


def test_it_shows_what_is_undone_in_order_and_needs_a_word(
    failed: str, cli: Cli, effects: Callable[[], list[str]], place: Path
) -> None:
    done = cli("rollback", failed, *APP)
    assert done.code == 4
    assert [line.split() for line in done.out.splitlines()[2:5]] == [
        ["1", "invite[1]"], ["2", "invite[0]"], ["3", "book"]
    ]  # fmt: skip
    assert "3 paths would be undone" in done.error
    assert "--yes" in done.error
    assert not (place / "effects.txt").exists()
    done = cli("rollback", failed, "--yes", *APP)
    assert (done.code, done.err) == (0, "")
    assert "rolled_back (a person asked for it)" in done.out
    assert "3 of 3 paths undone" in done.out
    assert effects() == ["undo invite[1] 2", "undo invite[0] 1", "undo book 7"]


def test_what_the_other_commands_say_of_it(failed: str, cli: Cli) -> None:
    assert cli("rollback", failed, "--yes", *APP).code == 0
    shown = cli("show", failed).out
    assert "rolled_back (a person asked for it)" in shown
    assert "invite ↩ compensated" in " ".join(shown.split())
    assert "2 items: 2 compensated" in shown
    assert "rolled_back" in cli("list").out
    assert cli("list --status rolled_back --json").json[0]["run_id"] == failed
    for command in ("plan", "resume", "retry"):
        done = cli(command, failed, *APP)
        assert (done.code, "was rolled back" in done.error) == (4, True)
    again = cli("rollback", failed, *APP)
    assert (again.code, "nothing was changed" in again.out) == (0, True)
    with contextlib.closing(sqlite3.connect("dagresume.db")) as conn, conn:
        words = dict(conn.execute("SELECT node_id, node_status FROM workflow_checkpoints"))
    assert (words["book"], words["fail"]) == ("skipped", "failed")


def test_only_what_is_below_a_path(failed: str, cli: Cli, effects: Callable[[], list[str]]) -> None:
    done = cli("rollback", failed, "--to", "book", "--yes", "--json", *APP)
    assert done.json["undone"] == ["invite[1]", "invite[0]"]
    assert (done.code, done.json["status"]) == (0, "rolled_back")
    assert len(effects()) == 2
    assert cli("rollback", failed, "--to", "book", *APP).code == 0, "it is rolled back already"
    assert cli("rollback", failed, "--to", "nowhere", *APP).code == 2
    rest = cli("rollback", failed, "--yes", "--json", *APP)
    assert (rest.code, rest.json["undone"]) == (0, ["book"])


def test_a_path_that_is_not_there(failed: str, cli: Cli) -> None:
    done = cli("rollback", failed, "--to", "boook", *APP)
    assert (done.code, "Did you mean 'book'" in done.error) == (2, True)


def test_an_undo_that_fails_is_told_and_tried_again(failed: str, cli: Cli, place: Path) -> None:
    (place / "broken").touch()
    done = cli("rollback", failed, "--yes", *APP)
    assert done.code == 1
    assert "rolling_back (not everything could be undone)" in done.out
    assert "2 of 3 paths undone" in done.out
    assert "book could not be undone: OSError: the hotel does not answer" in done.out
    assert f"dagresume rollback {failed} --app flow.py" in done.out
    shown = cli("show", failed).out
    assert "It stands: its undo failed. OSError: the hotel does not answer" in shown
    assert f"dagresume rollback {failed}" in shown
    cancelled = cli("cancel", failed)
    assert (cancelled.code, "being rolled back" in cancelled.error) == (4, True)
    refused = cli("plan", failed, *APP)
    assert (refused.code, "dagresume rollback" in refused.error) == (4, True)
    (place / "broken").unlink()
    done = cli("rollback", failed, "--yes", "--json", *APP)
    assert (done.code, done.json["undone"]) == (0, ["book"])


def test_what_cannot_be_undone_is_refused_by_name(
    failed: str, cli: Cli, effects: Callable[[], list[str]], place: Path
) -> None:
    run_id = cli("run flow.py:mail --json").json["run_id"]
    done = cli("rollback", run_id, "--yes", *APP)
    assert done.code == 4
    assert "letter" in done.error
    assert f"`dagresume rollback {run_id} --accept-irreversible --app flow.py`" in done.error
    assert not (place / "effects.txt").exists()
    done = cli("rollback", run_id, "--yes", "--accept-irreversible", "--json", *APP)
    assert (done.code, done.json["irreversible"]) == (0, ["letter"])
    assert len(effects()) == 3


def test_a_run_that_undoes_itself_has_failed(failed: str, cli: Cli, place: Path) -> None:
    done = cli("run flow.py:own")
    assert (done.code, "rolled_back (a node failed)" in done.out) == (1, True)
    (place / "broken").touch()
    run_id = cli("run flow.py:own --json").json["run_id"]
    (place / "broken").unlink()
    done = cli("resume", run_id, *APP)
    assert (done.code, "rolled_back (a node failed)" in done.out) == (1, True)


def test_the_code_is_needed(failed: str, cli: Cli) -> None:
    done = cli("rollback", failed, "--yes")
    assert (done.code, "--app" in done.error) == (4, True)
