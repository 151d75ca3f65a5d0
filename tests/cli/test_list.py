"""`list`: what is asked for is matched letter by letter, by time too, and the table fits the terminal."""

import re
import sqlite3
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from dagresume.cli.listing import shortened
from tests.cli.conftest import Cli

Write = Callable[[str, str], Path]
NAMES = ("a_b", "axb", "50%", "500", "A_B", "x\\y", "x%y")

NAMED = """
    from dagresume import Workflow
    def named(name):
        wf = Workflow(name, idempotent=True)
        @wf.node
        async def f(x: object = 1) -> object:
            return x
        return wf
"""


@pytest.fixture
def named(write: Write, cli: Cli) -> dict[str, str]:
    """Runs whose workflow and key bear these names: name → run id."""
    lines = "".join(f"    w{n} = named({name!r})\n" for n, name in enumerate(NAMES))
    write("names.py", NAMED + lines)
    ids = {}
    for n, name in enumerate(NAMES):
        ids[name] = cli("run", f"names.py:w{n}", "--key", name, "--json").json["run_id"]
    return ids


def ids(cli: Cli, *options: str) -> list[str]:
    return [run["run_id"] for run in cli("list", *options, "--json").json]


def test_names_and_keys_are_matched_letter_by_letter(named: dict[str, str], cli: Cli) -> None:
    """B160: no wildcard, no pattern, and capitals are other letters."""
    for name in NAMES:
        assert ids(cli, "--workflow", name) == [named[name]]
        assert ids(cli, "--key", name) == [named[name]]
    for pattern in ("a%", "_", "%", "a_", "50", "5%", "X\\Y", "= 1 OR 1=1 --", ""):
        assert ids(cli, "--workflow", pattern) == []
        assert ids(cli, "--key", pattern) == []
    assert "No such runs." in cli("list", "--key", "%").out


def aged(place: Path, minutes: list[int]) -> None:
    """Have the runs be so many minutes old, the first one first."""
    with sqlite3.connect(place / "dagresume.db") as connection:
        for run, age in enumerate(minutes, 1):
            connection.execute(
                "UPDATE dagresume_runs SET created_at = created_at - ? WHERE run = ?", [age * 60_000_000, run]
            )
    connection.close()


def test_runs_may_be_narrowed_by_time_and_by_a_run(named: dict[str, str], place: Path, cli: Cli) -> None:
    found = [named[name] for name in NAMES]
    aged(place, [1000, 500, 200, 90, 30, 10, 0])
    newest = list(reversed(found))
    assert ids(cli, "--since", "1h") == newest[:3]
    assert ids(cli, "--since", "45min", "--before", "5min") == newest[1:3]
    assert ids(cli, "--before", "1.5h", "--limit", "2") == newest[3:5]
    assert ids(cli, "--before", found[2]) == newest[5:]
    assert ids(cli, "--before", found[2][:24], "--workflow", "axb") == [found[1]]
    day = datetime.now().astimezone() - timedelta(minutes=300)
    assert ids(cli, "--before", day.isoformat()) == newest[5:]
    assert ids(cli, "--since", f"{day + timedelta(days=2):%Y-%m-%d}") == []


@pytest.mark.parametrize("word", ["yesterday", "3 lightyears", "25:61", "2026-13-01", "", "\x1b[31m", "-1h"])
@pytest.mark.parametrize("option", ["--since", "--before"])
def test_what_is_no_time_is_told_in_one_line(option: str, word: str, named: dict[str, str], cli: Cli) -> None:
    done = cli("list", option, word)
    assert (done.code, done.out) == (2, "")
    assert option in done.error
    assert "2h" in done.error
    assert "\x1b" not in done.error


def test_as_many_interrupted_runs_as_there_are_are_listed(
    named: dict[str, str], place: Path, cli: Cli
) -> None:
    """One whose process died is stored as running; those that run do not take the places of those wanted."""
    with sqlite3.connect(place / "dagresume.db") as connection:
        connection.execute(
            "UPDATE dagresume_runs SET status = 'interrupted', reason = 'shutdown' WHERE run < 3"
        )
        connection.execute("UPDATE dagresume_runs SET status = 'running', owner = 999 WHERE run IN (3, 5)")
    connection.close()
    found = [named[name] for name in NAMES]
    assert ids(cli, "--status", "interrupted", "--limit", "3") == [found[4], found[2], found[1]]
    assert ids(cli, "--status", "running", "--limit", "1") == []
    by_id = {run["run_id"]: run["needs"] for run in cli("list --json").json}
    assert by_id[found[4]] == "needs a resume: the process that drove it died"
    assert by_id[found[3]] == ""


@pytest.mark.parametrize("columns", [80, 140])
def test_the_table_fits_the_terminal(
    columns: int, named: dict[str, str], cli: Cli, monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    write("long.py", "from names import named\nwf = named('a_workflow_of_a_name')\n")
    assert cli("run", "long.py", "--key", "/some/where/in/the/house/of/résumés").code == 0
    for name, value in (
        ("FORCE_COLOR", "1"),
        ("NO_COLOR", "1"),
        ("COLUMNS", str(columns)),
        ("TERM", "xterm"),
    ):
        monkeypatch.setenv(name, value)
    for command in ("list", "audit", "show last"):
        told = re.sub(r"\x1b\[\d?m", "", cli(command).out).splitlines()
        assert max(map(len, told)) <= columns, told
    shown = cli("list").out.splitlines()[1].split()[0]
    assert shown == named.get("", cli("list --json").json[0]["run_id"])[: len(shown)]
    assert len(shown) == 36 if columns == 140 else 12 <= len(shown) < 36
    assert cli("show", shown, "--json").code == 0


def test_an_id_is_cut_to_what_still_names_the_run() -> None:
    ids = ["01a231b6-ed44-7aa5-a", "01a231b6-ed44-7bb5-a", "01a231b6-ed45-7aa5-a"]
    assert shortened(ids) == {
        ids[0]: "01a231b6-ed44-7a",
        ids[1]: "01a231b6-ed44-7b",
        ids[2]: "01a231b6-ed45",
    }
