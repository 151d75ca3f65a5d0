"""`dagresume prune` says exactly what it deletes, and deletes nothing else; `dagresume stats` how it does."""

import re
import sqlite3
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from dagresume.cli.keeping import size, term
from tests.cli.conftest import Cli

Write = Callable[[str, str], Path]

QUICK = """
    from dagresume import Workflow
    quick = Workflow("quick", idempotent=True)
    @quick.node
    async def f(x: object = 1) -> object:
        return x
"""


@pytest.fixture
def runs(pipeline: Path, write: Write, cli: Cli) -> list[str]:
    """A failed run of the pipeline, and two that completed, one of another workflow."""
    write("quick.py", QUICK)
    failed = cli("run flow.py --key night --json").json["run_id"]
    quick = cli("run quick.py --json").json["run_id"]
    Path("mended").touch()
    done = cli("run flow.py --key day --json").json["run_id"]
    return [failed, quick, done]


def there(cli: Cli) -> list[str]:
    return [run["run_id"] for run in cli("list --json").json][::-1]


def test_nothing_is_old_enough_by_default(runs: list[str], cli: Cli) -> None:
    done = cli("prune")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("deleted 0 runs; 0 bytes given back to the disk, ")
    assert there(cli) == runs


def test_what_ended_goes_and_a_failed_run_has_its_own_term(runs: list[str], cli: Cli) -> None:
    foreseen = cli("prune --older-than 0s --dry-run")
    assert foreseen.out.startswith("would delete 2 runs (2 completed), ")
    assert there(cli) == runs
    done = cli("prune --older-than 0s")
    assert done.out.startswith(foreseen.out.strip().replace("would delete", "deleted"))
    assert there(cli) == runs[:1]
    assert cli("prune --older-than 0 --failed-older-than 1h").out.startswith("deleted 0 runs")
    assert cli("prune --failed-older-than 0").out.startswith("deleted 1 run (1 failed), ")
    assert there(cli) == []


def test_json_is_complete_and_the_same_dry_or_not(runs: list[str], cli: Cli) -> None:
    words = "prune --older-than 0 --failed-older-than 0 --workflow pipeline --json"
    foreseen, done = cli(f"{words} --dry-run").json, cli(words).json
    assert foreseen.pop("dry_run") is True
    assert done.pop("dry_run") is False
    for said in (foreseen, done):
        del said["size"], said["free"], said["given_back"]
    assert foreseen == done
    assert sorted(done["run_ids"]) == sorted([runs[0], runs[2]])
    assert done["runs"] == {"completed": 1, "failed": 1}
    assert done["logs"] == 8
    assert there(cli) == [runs[1]]


def test_status_narrows_and_may_be_repeated(runs: list[str], cli: Cli) -> None:
    zero = "prune --older-than 0 --failed-older-than 0"
    assert cli(f"{zero} --status cancelled --status rolled_back").out.startswith("deleted 0 runs")
    assert cli(f"{zero} --status failed").out.startswith("deleted 1 run (1 failed)")
    assert there(cli) == runs[1:]


def test_a_pruned_run_frees_its_key(runs: list[str], cli: Cli) -> None:
    cli("prune --older-than 0")
    again = cli("run flow.py --key day --json").json
    assert again["run_id"] not in runs
    assert len(again["executed"]) == 7


def test_vacuum_gives_all_free_space_back(runs: list[str], cli: Cli) -> None:
    assert cli("run", "quick.py", "--input", f"x={'y' * 60_000}").code == 0
    done = cli("prune --older-than 0 --vacuum")
    assert done.code == 0
    assert done.out.splitlines()[1].startswith("the file was written anew: ")
    conn = sqlite3.connect("dagresume.db")
    assert conn.execute("PRAGMA freelist_count").fetchone() == (0,)
    conn.close()
    assert there(cli) == runs[:1]


def test_a_file_that_keeps_its_space_is_told_what_to_do(cli: Cli, write: Write) -> None:
    write("quick.py", QUICK)
    conn = sqlite3.connect("old.db")
    conn.execute("PRAGMA auto_vacuum = NONE")
    conn.execute("VACUUM")
    conn.close()
    for n in range(60):
        assert cli("run", "quick.py", "--db", "old.db", "--input", f"x={n}{'y' * 60_000}").code == 0
    done = cli("prune --older-than 0 --db old.db")
    assert "0 bytes given back" in done.out
    assert "`dagresume prune --vacuum --db old.db` gives it back" in done.out
    more = cli("prune --vacuum --db old.db --json").json
    assert more["given_back"] > 3_000_000


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("prune --older-than soon", "--older-than 'soon': a time as in 7d, 12h, 30m or 90s"),
        ("prune --older-than=-1d", "--older-than '-1d': a time as in"),
        ("prune --failed-older-than 3y", "--failed-older-than '3y': a time as in"),
        ("prune --failed-older-than 99999999999d", "--failed-older-than '99999999999d': more than"),
        ("prune --status running", "--status='running': only runs that have ended are pruned"),
        ("prune --status done", "--status='done': a run is one of"),
        ("prune --vacuum --dry-run", "--vacuum needs a database file"),
        ("prune --db nowhere.db", "there is no database nowhere.db"),
    ],
)
def test_what_cannot_be_meant_is_told_in_one_line(words: str, told: str, runs: list[str], cli: Cli) -> None:
    done = cli(words)
    assert (done.code, done.out) == (2, "")
    assert told in done.error
    assert there(cli) == runs


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("7d", 604_800), ("12h", 43_200), ("30m", 1800), ("30 min", 1800), ("90s", 90), ("1.5h", 5400),
     ("2w", 1_209_600), ("0", 0), (" 0 ", 0)],
)  # fmt: skip
def test_times_are_read(text: str, seconds: float) -> None:
    assert term("--older-than", text).total_seconds() == seconds


# -- stats ----------------------------------------------------------------------------------------------


def test_stats_say_how_runs_and_recoveries_do(runs: list[str], cli: Cli) -> None:
    done = cli("stats")
    assert (done.code, done.err) == (0, "")
    lines = dict(line.split("  ", 1) for line in done.out.partition("\n\n")[0].splitlines())
    told = {name: text.strip() for name, text in lines.items()}
    assert told["runs"] == "3 (2 completed, 1 failed)"
    assert told["recoveries"] == "0"
    assert told["recoveries a run"] == "0.00"
    assert re.fullmatch(r"p50 .*s, p95 .*s, p99 .*s, max .*s \(\d+ waits?\)", told["checkpoint latency"])
    assert re.match(r"database \d+ kB", told["disk"])


def test_an_alarm_says_which_command_shows_more(pipeline: Path, cli: Cli) -> None:
    run_id = cli("run flow.py --key night --db other.db --json").json["run_id"]
    cli(f"resume {run_id} --app flow.py --db other.db")
    done = cli("stats --db other.db")
    [alarm] = [line for line in done.out.splitlines() if line.startswith("alarm: ")]
    assert "Only 0% of the recoveries ended well (alarm under 90%)." in alarm
    assert f"`dagresume show {run_id} --db other.db`" in alarm
    told = cli("stats --db other.db --json").json
    assert told["runs"] == {"failed": 1}
    assert (told["recoveries"], told["recoveries_failed"], told["recovery_rate"]) == (1, 1, 0.0)
    assert [each["name"] for each in told["alarms"]] == ["recovery_success_rate"]
    assert told["disk"]["database"] > 0
    assert set(told["checkpoint_latency"]) == {"p50", "p95", "p99", "max", "count"}


def test_the_disk_that_runs_will_take_is_estimated_without_a_database(place: Path, cli: Cli) -> None:
    """R10."""
    done = cli("stats --estimate --nodes 100 --size 5k --runs-per-day 1000")
    assert done.out.startswith(
        "100 nodes × 5.0 kB × 1,000 runs a day: 518 kB a run, 518 MB a day, 16 GB a month;"
    )
    assert list(place.iterdir()) == []
    one = cli("stats --estimate --keep 14d --json").json
    assert one["at_rest"] == pytest.approx(one["day"] * 14 * 8 / 7)
    assert one["month"] == pytest.approx(30 * one["day"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("stats --estimate --size much", "--size 'much': bytes as in 800, 5k or 1.5M"),
        ("stats --estimate --keep ever", "--keep 'ever': a time as in"),
        ("stats --estimate --nodes 0", "--nodes"),
        ("stats --db nowhere.db", "there is no database nowhere.db"),
    ],
)
def test_what_cannot_be_counted_is_told_in_one_line(words: str, told: str, cli: Cli) -> None:
    done = cli(words)
    assert (done.code, done.out) == (2, "")
    assert told in done.error


@pytest.mark.parametrize(("text", "count"), [("800", 800), ("5k", 5000), ("5 kB", 5000), ("1.5M", 1_500_000)])
def test_sizes_are_read(text: str, count: int) -> None:
    assert size("--size", text) == count


def test_stats_draws_how_long_results_waited(runs: list[str], cli: Cli) -> None:
    told = cli("stats --svg waits.svg")
    shown = re.findall(r"≤ +([\d.]+ \S+) +[█·]* +(\d+)", told.out)
    waits = cli("stats --json").json["waits"]
    assert [int(count) for _, count in shown] == [count for _, count in waits]
    assert sum(count for _, count in waits) == cli("stats --json").json["checkpoint_latency"]["count"]
    root = ET.fromstring(Path("waits.svg").read_text(encoding="utf-8"))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {f"≤ {upto}" for upto, _ in shown} <= set(texts)


def test_a_picture_that_cannot_be_written_is_said(runs: list[str], cli: Cli) -> None:
    assert cli("stats --svg no/where.svg").error == "error: --svg no/where.svg: No such file or directory"
