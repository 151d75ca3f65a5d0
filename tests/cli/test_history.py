"""The commands about what has been and what is to be done over: retry's forms, fork, explain, show --at."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, forget

Write = Callable[[str, str], Path]
Effects = Callable[[], list[str]]


@pytest.fixture
def completed(pipeline: Path, place: Path, cli: Cli) -> str:
    """The id of a run of the pipeline that completed."""
    (place / "mended").touch()
    run_id: str = cli("run flow.py --key night --json").json["run_id"]
    return run_id


@pytest.fixture
def failed(pipeline: Path, cli: Cli) -> str:
    """The id of a run of the pipeline, one item of which failed."""
    run_id: str = cli("run flow.py --json").json["run_id"]
    return run_id


def edit(flow: Path, old: str, new: str) -> None:
    forget(flow.parent)
    flow.write_text(flow.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")


# -- retry ----------------------------------------------------------------------------------------------


def test_retry_of_what_has_other_code(completed: str, pipeline: Path, cli: Cli, effects: Effects) -> None:
    before = effects()
    nothing = cli("retry last --code-changed --app flow.py")
    assert (nothing.code, effects()) == (0, before)
    assert "nothing was executed" in nothing.out
    edit(pipeline, '{"sum": sum(scores)}', '{"sum": sum(scores) + 1}')
    assert re.search(
        r"^report +reuse .* Its code has changed", cli("plan last --app flow.py").out, re.MULTILINE
    )
    done = cli("retry last --code-changed --app flow.py")
    assert done.code == 0
    assert re.search(r"^report +run .* a person asked", done.out, re.MULTILINE)
    assert '  report  {"sum": 15}' in done.out
    assert effects() == before


def test_retry_of_only_what_failed(pipeline: Path, place: Path, cli: Cli, effects: Effects) -> None:
    edit(pipeline, '@wf.node(for_each={"x": "names"})', '@wf.node(for_each={"x": "names"}, tolerate=1)')
    edit(pipeline, "sum(scores)", "len(scores)")
    assert cli("run flow.py").code == 0
    before = effects()
    (place / "mended").touch()
    done = cli("retry last --from score --only-failed --app flow.py")
    assert done.code == 0
    assert re.search(r"^score +run .* 4 items: 3 reuse, 1 run\. ", done.out, re.MULTILINE)
    assert effects() == [*before, "score 2"]


def test_retry_of_only_what_changes_names_what_may_happen_twice(
    completed: str, cli: Cli, effects: Effects
) -> None:
    before = effects()
    refused = cli("retry last --from names --only-changed --app flow.py")
    assert refused.code == 4
    assert "would happen a second time:\n  mail\n" in refused.out
    assert cli("retry last --from names --only-changed --app flow.py --yes").code == 0
    assert effects() == before


@pytest.mark.parametrize(
    "words",
    [
        "--only-failed",
        "--only-changed",
        "--code-changed --from score",
        "--code-changed --only-failed",
        "--from mail --only-failed",
        "--from score[1] --only-failed",
    ],
)
def test_forms_that_mean_nothing_are_refused(words: str, completed: str, cli: Cli, effects: Effects) -> None:
    before = effects()
    done = cli(f"retry last {words} --app flow.py --yes")
    assert done.code == 2
    assert "only" in done.error or "--code-changed" in done.error
    assert effects() == before


# -- fork -----------------------------------------------------------------------------------------------


def test_a_fork_is_a_new_run_that_show_traces_back(completed: str, cli: Cli, effects: Effects) -> None:
    before = effects()
    done = cli("fork last --from score[1] --app flow.py --json")
    assert done.code == 0
    assert done.json["executed"] == ["score[1]", "report"]
    assert effects() == [*before, "score 1"]
    assert done.json["run_id"] != completed
    assert f"a fork of {completed}" in cli("show last").out
    assert cli("show last --json").json["forked_from"] == completed
    assert cli(f"show {completed} --json").json["forked_from"] is None


def test_a_fork_with_another_input(completed: str, cli: Cli, effects: Effects) -> None:
    before = effects()
    done = cli("fork last --input count=5 --key other --app flow.py")
    assert done.code == 0
    assert '  report  {"sum": 30}' in done.out
    assert set(effects()[len(before) :]) >= {"mail", "score 4"}
    assert cli("list --json").json[0]["key"] == "other"


@pytest.mark.parametrize(
    ("words", "says"), [("--input cuont=3", "count"), ("--from scores", "Did you mean 'score'")]
)
def test_a_fork_of_what_is_not_there_is_refused(
    words: str, says: str, completed: str, cli: Cli, effects: Effects
) -> None:
    before = effects()
    done = cli(f"fork last {words} --app flow.py")
    assert done.code == 2
    assert says in done.error
    assert effects() == before
    assert len(cli("list --json").json) == 1


# -- explain and show --at ------------------------------------------------------------------------------


def test_explain_says_what_was_done_each_time_and_why(failed: str, place: Path, cli: Cli) -> None:
    (place / "mended").touch()
    cli("resume last --app flow.py")
    done = cli("explain last score[2]")
    head, first, second, returned = done.out.split("\n\n")
    assert head == f"score[2] in run {failed}"
    assert re.search(
        r"1\. run .*\n    Ran: no checkpoint\.\n    attempt 1: failed\n      ValueError: no score for 2",
        first,
    )
    assert re.search(
        r"2\. resume .*\n    Ran again: it had failed\.\n    attempt 2: completed after ", second
    )
    assert re.search(r"^    x +names +[0-9a-f]{12} +not changed$", second, re.MULTILINE)
    assert returned.split() == ["Returned", "4"]
    found = cli("explain last score[0] --json").json
    assert [(step["drive"], step["did"]) for step in found["steps"]] == [("run", "ran"), ("resume", "reused")]


def test_explain_of_a_path_that_is_not_there(failed: str, cli: Cli) -> None:
    done = cli("explain last scroe")
    assert done.code == 2
    assert "Did you mean 'score'" in done.error


def test_show_as_it_was(failed: str, place: Path, cli: Cli) -> None:
    (place / "mended").touch()
    cli("resume last --app flow.py")
    steps = cli("explain last score[2] --json").json["steps"]
    before = cli(f"show last --at {steps[1]['seq'] - 1} --json").json
    assert before["status"] == "failed"
    assert {node["path"]: node["status"] for node in before["nodes"]}["report"] == "upstream_failed"
    assert "resume" not in cli(f"show last --at {steps[1]['seq'] - 1}").out
    assert cli("show last --json").json["status"] == "completed"
    assert cli("show last --at 0").code == 2
