"""What a killed process leaves behind, and how the next one goes on (cases A, B, K and N)."""

import sqlite3
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from dagresume.testing import autopsy
from tests.crash.conftest import Play, until
from tests.crash.flows import world


def words(folder: Path, place: int = 0) -> list[str]:
    return [line.split()[place] for line in world(folder)]


@pytest.mark.parametrize("flow", ["safe_c", "unsafe_c"])
def test_a_result_is_durable_before_the_next_body_begins(play: Play, tmp_path: Path, flow: str) -> None:
    """B01: even when results are written late and everything else is not."""
    assert play("with_slow_results", flow=flow).wait().killed
    assert autopsy(tmp_path / "runs.db").completed == {"a", "b"}
    assert play("go", flow=flow, how="retry").wait().told["outputs"] == {"a": "a", "b": "b", "c": "c"}
    assert Counter(words(tmp_path)) == {"a": 1, "b": 1, "c": 2}


def test_an_output_whose_record_was_not_written_is_not_used(play: Play, tmp_path: Path) -> None:
    """B04: killed between the file of a big output and its record."""
    assert play("die_with_a_blob", flow="big").wait().killed
    (orphan,) = [file for file in (tmp_path / "runs.db.blobs").rglob("*") if file.is_file()]
    ended = play("go", flow="big", how="resume").wait().told
    assert ended["executed"] == ["report", "size"]
    assert ended["outputs"]["size"] == [100_000, "2"]
    files = [file for file in (tmp_path / "runs.db.blobs").rglob("*") if file.is_file()]
    assert len(files) == 2
    assert orphan in files  # a run that is not pruned keeps it; it does no harm


def test_the_idempotency_key_outlives_the_process(play: Play, tmp_path: Path) -> None:
    """B07: an outside job goes on when its process dies, and is recognised by its key."""
    child = play("go", flow="outside")
    until(lambda: autopsy(tmp_path / "runs.db").starts["order"])
    child.kill()
    assert child.wait().killed
    until(lambda: any(line.startswith("job") for line in world(tmp_path)))
    assert play("go", flow="outside", how="resume").wait().told["outputs"] == {"order": "done already"}
    first, job, second = (line.split() for line in world(tmp_path))
    assert first[2] == job[1] == second[2]
    assert (first[1], second[1]) == ("1", "2")


def test_what_runs_after_a_resume_runs_after_what_it_needs(play: Play, tmp_path: Path) -> None:
    """B13: one branch had failed, the other was under way."""
    child = play("go", flow="branches")
    until(lambda: autopsy(tmp_path / "runs.db").last.get("b") == ("node.failed", "error"))
    until(lambda: "begin d" in world(tmp_path))
    child.kill()
    assert child.wait().killed
    ended = play("go", flow="branches", how="resume").wait().told
    assert sorted(ended["executed"]) == ["b", "c", "d"]
    lines = world(tmp_path)
    assert lines.count("begin a") == lines.count("begin c") == 1
    last = {line: n for n, line in enumerate(lines)}
    first = {line: n for n, line in reversed(list(enumerate(lines)))}
    for above, below in [("a", "b"), ("a", "d"), ("b", "c"), ("d", "c")]:
        assert last[f"end {above}"] < first[f"begin {below}"]


def test_attempts_end_at_their_number(play: Play, tmp_path: Path) -> None:
    """B80: three bodies, the delay between them."""
    assert play("go", flow="hopeless").wait().told["error"] == "RunFailed"
    assert words(tmp_path) == ["1", "2", "3"]
    at = list(map(float, words(tmp_path, 1)))
    assert all(0.2 <= later - earlier < 1 for earlier, later in pairwise(at))


def test_a_person_who_resumes_gives_a_fresh_budget(play: Play, tmp_path: Path) -> None:
    """B80: killed after attempt 2, in the pause before the third; attempts are never counted anew."""
    child = play("go", flow="hopeless_slowly")
    until(lambda: words(tmp_path) == ["1", "2"])
    until(lambda: autopsy(tmp_path / "runs.db").last.get("attempt") == ("node.failed", "retry"))
    child.kill()
    assert child.wait().killed
    assert play("look").wait().told["status"] == "interrupted"
    assert play("go", flow="hopeless_slowly", how="resume").wait().told["error"] == "RunFailed"
    assert words(tmp_path) == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("how", ["run", "resume"])
def test_a_body_that_may_have_begun_asks_a_person_only_if_it_must(
    play: Play, tmp_path: Path, how: str
) -> None:
    """B103, by hand: idempotent goes on; not idempotent is refused by name, and `retry` does what it says."""
    assert play("go", flow="safe_a").wait().killed
    assert play("go", flow="safe_a", how=how).wait().told["status"] == "completed"
    assert words(tmp_path) == ["a", "a", "b", "c"]


@pytest.mark.parametrize("how", ["run", "resume"])
def test_a_refusal_names_what_is_uncertain(play: Play, tmp_path: Path, how: str) -> None:
    """B103, B104: the way out that the message names works."""
    assert play("go", flow="unsafe_a").wait().killed
    assert play("look").wait().told == {
        "status": "interrupted",
        "reason": "owner_died",
        "owner": None,
        "nodes": {"a": "interrupted", "b": "pending", "c": "pending"},
    }
    refused = play("go", flow="unsafe_a", how=how).wait().told
    assert (refused["error"], refused["paths"]) == ("UncertainNode", ["a"])
    assert "retry" in refused["message"]
    assert words(tmp_path) == ["a"]
    assert play("go", flow="unsafe_a", how="retry").wait().told["executed"] == ["a", "b", "c"]
    assert words(tmp_path) == ["a", "a", "b", "c"]


def test_a_run_is_free_when_its_session_is_gone(play: Play, tmp_path: Path) -> None:
    """B101: nobody knows the owner any more."""
    assert play("go", flow="safe_a").wait().killed
    with sqlite3.connect(tmp_path / "runs.db") as conn:
        conn.execute("DELETE FROM dagresume_sessions")
    conn.close()
    assert play("look").wait().told["status"] == "interrupted"
    assert play("go", flow="safe_a", how="resume").wait().told["status"] == "completed"


def test_another_living_process_is_not_the_one_that_died(play: Play, tmp_path: Path) -> None:
    """B101: the same program on the same host, started again, does not keep the run of its predecessor."""
    assert play("go", flow="safe_a").wait().killed
    bystander = play("stay")
    until(lambda: "here" in world(tmp_path))
    assert play("go", flow="safe_a", how="resume").wait().told["status"] == "completed"
    bystander.kill()
    assert bystander.wait().killed
