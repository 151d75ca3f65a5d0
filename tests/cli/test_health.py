"""`dagresume doctor` and `dagresume backup`."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from dagresume.cli.health import MOST
from tests.cli.conftest import Cli


@pytest.fixture
def ran(pipeline: Path, place: Path, cli: Cli) -> str:
    """The id of a run of the pipeline that has completed."""
    (place / "mended").touch()
    run_id: str = cli("run flow.py --key night --json").json["run_id"]
    (place / "dagresume.db").chmod(0o600)
    return run_id


def alter(place: Path, sql: str) -> None:
    with closing(sqlite3.connect(place / "dagresume.db", isolation_level=None)) as conn:
        conn.execute(sql)


def test_nothing_wrong_is_said_in_a_word(ran: str, cli: Cli) -> None:
    done = cli("doctor")
    assert (done.code, done.out, done.err) == (0, "dagresume.db: nothing is wrong.\n", "")
    assert cli("doctor --json").json == {"path": "dagresume.db", "sound": True, "findings": []}


def test_what_is_wrong_is_one_line_with_the_command_that_mends_it(ran: str, place: Path, cli: Cli) -> None:
    alter(place, "UPDATE dagresume_events SET output = '7' WHERE path = 'score[1]'")
    (place / "dagresume.db").rename(place / "runs.db")
    done = cli("doctor --db runs.db")
    assert done.code == 1
    [line, hint, last] = done.out.splitlines()
    assert "--app TARGET" in hint
    command = f"`dagresume retry {ran} --from 'score[1]' --db runs.db --app flow.py`"
    assert line.startswith(f"× run {ran}: the stored output of score[1] was altered")
    assert last == "runs.db: 1 thing needs you."
    mends = command.strip("`").removeprefix("dagresume ") + " --yes"
    assert command.replace(" --app flow.py", "") in line
    assert cli(*[word.strip("'") for word in mends.split()]).code == 0
    assert cli("doctor --db runs.db").code == 0
    [finding] = cli("doctor --db absent.db --json").json["findings"]
    assert (finding["kind"], finding["severity"]) == ("file", "problem")
    assert not (place / "absent.db").exists()


def test_many_findings_of_a_kind_are_not_all_told(ran: str, place: Path, cli: Cli) -> None:
    for _ in range(MOST + 2):
        cli("run flow.py")
    alter(place, "UPDATE dagresume_runs SET status = 'waiting', wake_at = 0, finished_at = NULL")
    done = cli("doctor")
    assert len([line for line in done.out.splitlines() if "its letter came" in line]) == MOST
    assert "3 more of kind run" in done.out
    found = cli("doctor --json").json["findings"]
    assert len([finding for finding in found if finding["kind"] == "run"]) == MOST + 3


def test_rebuild_mends_the_rows_and_says_which(ran: str, place: Path, cli: Cli) -> None:
    alter(place, "UPDATE dagresume_runs SET status = 'failed', inputs_digest = x'00'")
    done = cli("doctor")
    assert done.code == 1
    assert "status is 'failed', by its journal 'completed'" in done.out
    assert "`dagresume doctor --rebuild`" in done.out
    told = cli("doctor --rebuild")
    assert told.code == 0
    assert f"run {ran}: status is 'failed', by its journal 'completed': mended" in told.out
    assert "2 columns changed" in told.out
    assert "left as they are: workflow, version" in told.out
    again = cli("doctor --rebuild --json")
    assert (again.code, again.json["rebuilt"], again.json["sound"]) == (0, [], True)
    assert "nothing was to be changed" in cli("doctor --rebuild").out
    assert cli("run flow.py --key night --json").json["run_id"] == ran


def test_backup_says_what_it_made_and_where(ran: str, place: Path, cli: Cli) -> None:
    done = cli("backup copy.db")
    assert done.code == 0
    assert done.out.startswith(f"{place / 'copy.db'}: 1 run, 0 files beside it, ")
    assert done.out.endswith(" KB, verified.\n")
    refused = cli("backup copy.db")
    assert (refused.code, "--force" in refused.error) == (2, True)
    made = cli("backup copy.db --force --json").json
    assert (made["runs"], made["interrupted"], made["findings"]) == (1, [], [])
    assert cli("doctor --db copy.db").code == 0
    assert cli("show last --db copy.db --json").json["run_id"] == ran


def test_a_copy_of_a_run_under_way_says_what_it_is(ran: str, place: Path, cli: Cli) -> None:
    alter(place, "UPDATE dagresume_runs SET status = 'running', owner = 1, finished_at = NULL")
    alter(place, "DELETE FROM dagresume_events WHERE kind = 'run.completed'")
    alter(place, "UPDATE dagresume_runs SET updated_at = created_at, usage = NULL")
    done = cli("backup copy.db")
    assert done.code == 0
    assert "1 run under way: interrupted in the copy." in done.out
    assert cli("doctor --db copy.db").code == 0
    assert cli("resume last --app flow.py --db copy.db").code == 0


def test_a_copy_that_lacks_what_its_source_lacks_ends_with_1(ran: str, place: Path, cli: Cli) -> None:
    alter(place, "UPDATE dagresume_events SET output = '7' WHERE path = 'score[1]'")
    done = cli("backup copy.db")
    assert done.code == 1
    assert "so in the original too: run" in done.out
    assert (place / "copy.db").exists()


@pytest.mark.parametrize("command", ["doctor", "doctor --rebuild", "backup copy.db"])
def test_they_are_for_sqlite_files(command: str, cli: Cli, place: Path) -> None:
    done = cli(f"{command} --db postgresql://me:secret@host/db")
    assert done.code == 2
    assert "SQLite" in done.error
    assert "secret" not in done.error
    assert ":memory:" in cli(f"{command} --db :memory:").error
    assert list(place.iterdir()) == []


def test_a_run_whose_process_died_lasted_until_it_was_last_heard_of(ran: str, place: Path, cli: Cli) -> None:
    """B100: not until somebody looked, and not no time at all; and a person can end it."""
    alter(place, "UPDATE dagresume_runs SET status = 'running', owner = 1, finished_at = NULL")
    alter(place, "UPDATE dagresume_runs SET created_at = created_at - 90500000, updated_at = created_at")
    shown = cli("show last").out
    assert "interrupted (the process that drove it died)" in shown
    assert "lasted 1 min 3" in shown
    row = cli("list").out.splitlines()[1]
    assert "interrupted" in row
    assert " ms" not in row
    assert cli("cancel last").code == 0
    assert "cancelled" in cli("show last").out
