"""Automatic recovery (R21 to R29): what goes on by itself, what does not and why. Processes really die."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dagresume.testing import Child
from tests.crash.conftest import until

HERE = "tests.crash.recovering"


class Stage:
    """A folder in which processes run, die and recover."""

    def __init__(self, nursery: Any, folder: Path) -> None:
        self._nursery, self._folder = nursery, folder

    def call(self, name: str, **arguments: Any) -> Any:
        ended = self._nursery.call(f"{HERE}:{name}", self._folder, **arguments).wait()
        assert ended.error is None, ended.error
        return ended.told

    def begin(self, **arguments: Any) -> Child:
        """Begin a run in a process that does not end by itself."""
        child: Child = self._nursery.call(f"{HERE}:begin", self._folder, **arguments)
        return child

    def die(self, name: str = "begin", **arguments: Any) -> None:
        assert self._nursery.call(f"{HERE}:{name}", self._folder, **arguments).wait().killed

    @property
    def world(self) -> Counter[str]:
        file = self._folder / "world"
        return Counter(file.read_text(encoding="utf-8").splitlines() if file.exists() else ())


@pytest.fixture
def stage(nursery: Any, tmp_path: Path) -> Stage:
    return Stage(nursery, tmp_path)


def only(told: dict[str, Any]) -> tuple[Any, ...]:
    """Give action, reason, message, attempt, status and paths of the one outcome."""
    (outcome,) = told["outcomes"]
    return tuple(outcome)


def statuses(told: dict[str, Any]) -> list[Any]:
    return list(told["statuses"].values())


def test_an_idempotent_run_goes_on_where_it_was(stage: Stage) -> None:
    """R24, B97, B103: nothing completed begins again; the decision is an event with its number."""
    stage.die(flow="chain")
    told = stage.call("recover", flow="chain")
    assert only(told)[:2] == ("resumed", "resume_from_last_incomplete")
    assert only(told)[3:5] == (1, "completed")
    assert told["audit"] == [
        ["execution.auto_resume", "resume_from_last_incomplete", {"attempt": 1, "max_attempts": 3}]
    ]
    assert stage.world == {"a": 1, "b": 2, "c": 1}
    assert stage.call("recover", flow="chain")["outcomes"] == []


def test_a_node_that_kills_its_process_does_not_do_so_for_ever(stage: Stage) -> None:
    """R28: counted durably, over processes; then a person's word counts from the start again."""
    stage.die(flow="chain", how={"times": 99})
    for attempt in range(3):
        stage.die("recover", flow="chain", how={"times": 99})
        assert stage.world["b"] == attempt + 2
    told = stage.call("recover", flow="chain", how={"times": 99})
    assert only(told)[:2] == ("skipped", "attempts_exhausted")
    assert statuses(told) == [["interrupted", "owner_died"]]
    assert [kind for kind, _, _ in told["audit"]] == [
        *["execution.auto_resume"] * 3,
        "execution.auto_resume.skipped",
    ]
    assert stage.world == {"a": 1, "b": 4}
    stage.die("go_on", flow="chain", how={"times": 5})
    assert stage.call("go_on", flow="chain", how={"times": 5}) == "completed"
    assert stage.world == {"a": 1, "b": 6, "c": 1}


def test_after_a_persons_word_the_attempts_count_from_the_start(stage: Stage) -> None:
    one = {"recovery": None, "times": 3}
    stage.die(flow="chain", how=one)
    assert only(stage.call("recover", flow="chain", how=one))[1] == "not_enabled"
    stage.die("go_on", flow="chain", how={"times": 3})
    stage.die("recover", flow="chain", how={"times": 3})
    assert only(stage.call("recover", flow="chain", how={"times": 3}))[3:5] == (2, "completed")


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # reason: how it is begun, how the process that recovers knows it, what a person then says
    "not_enabled": ({"how": {"recovery": None}}, {"how": {"recovery": None}}, {}),
    "not_idempotent": ({"how": {"idempotent": False}}, {"how": {"idempotent": False}}, {"verb": "retry"}),
    "triggered_by_webhook": ({"run": {"source": "webhook"}}, {}, {}),
    "triggered_by_schedule": ({"run": {"source": "schedule"}}, {}, {}),
    "definition_changed": ({}, {"how": {"more": True}}, {"force": True}),
    "code_changed": ({}, {"how": {"code": 2}}, {}),
    "not_registered": ({}, {"known": False}, {}),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_what_stands_in_the_way_is_said_and_a_person_can_go_on(stage: Stage, reason: str) -> None:
    """G9, R25, R26, B98, B103, B104: every reason, from a run that died; what the message says works."""
    begun, known, word = REFUSALS[reason]
    stage.die(flow="chain", **begun)
    told = stage.call("recover", flow="chain", **known)
    assert only(told)[:2] == ("skipped", reason)
    assert statuses(told) == [["interrupted", "owner_died"]]
    ((kind, said, data),) = told["audit"]
    assert (kind, said) == ("execution.auto_resume.skipped", reason)
    assert data["message"] == only(told)[2]
    if reason == "not_idempotent":
        assert only(told)[5] == ["b"]
        assert "b" in data["message"]
    assert stage.world == {"a": 1, "b": 1}
    again = stage.call("recover", flow="chain", **known)
    assert again["audit"] == told["audit"], "said once, not at every sweep"
    how = known.get("how")
    assert stage.call("go_on", flow="chain", how=how, **word) == "completed"
    assert stage.world["a"] == 1


def test_another_version_is_another_definition(stage: Stage) -> None:
    """B98."""
    stage.die(flow="chain")
    found = only(stage.call("recover", flow="chain", how={"version": "2"}))
    assert found[:2] == ("skipped", "definition_changed")
    assert "version '1' is now '2'" in found[2]


def test_code_that_nobody_knows_counts_as_changed(stage: Stage) -> None:
    stage.die(flow="unknown")
    found = only(stage.call("recover", flow="unknown"))
    assert found[:2] == ("skipped", "code_unknown")
    assert "b" in found[2]
    assert stage.call("go_on", flow="unknown") == "completed"


def test_the_abort_policy_leaves_it_interrupted(stage: Stage) -> None:
    """R24."""
    stage.die(flow="abort")
    told = stage.call("recover", flow="abort")
    assert only(told)[:2] == ("skipped", "policy_abort")
    assert statuses(told) == [["interrupted", "owner_died"]]
    assert stage.call("go_on", flow="abort") == "completed"


def test_a_run_that_waits_for_an_approval_stays_with_people(stage: Stage) -> None:
    """R26; once it is approved nothing stands in the way any more."""
    stage.die(flow="asking")
    told = stage.call("recover", flow="asking")
    assert only(told)[:2] == ("skipped", "waiting_for_approval")
    assert only(told)[5] == ["ok"]
    stage.call("approve", flow="asking")
    assert only(stage.call("recover", flow="asking"))[4] == "completed"
    assert stage.world == {"a": 1, "b": 2, "c": 1}


def test_a_used_up_budget_is_a_persons_matter(stage: Stage) -> None:
    stage.call("begin", flow="budgeted")
    assert only(stage.call("recover", flow="budgeted"))[:2] == ("skipped", "budget")
    assert stage.call("go_on", flow="budgeted", budget=1000) == "completed"


def test_what_has_not_begun_does_not_stand_in_the_way(stage: Stage) -> None:
    """A non-idempotent node ahead that never began."""
    stage.die(flow="never_began")
    assert only(stage.call("recover", flow="never_began"))[4] == "completed"
    assert stage.world == {"b": 2, "mail": 1}


def test_a_node_that_can_tell_is_asked(stage: Stage) -> None:
    stage.die(flow="reconciling")
    assert only(stage.call("recover", flow="reconciling"))[4] == "completed"
    assert stage.world == {"b": 1, "asked": 1}


def test_from_the_start_means_all_of_it(stage: Stage) -> None:
    """R24: the completed ones too, with a number of its own in the audit."""
    stage.die(flow="from_start")
    told = stage.call("recover", flow="from_start")
    assert only(told)[:2] == ("resumed", "resume_from_start")
    assert only(told)[4] == "completed"
    assert stage.world == {"a": 2, "b": 2, "c": 1}


def test_from_the_start_is_refused_where_that_repeats_an_effect(stage: Stage) -> None:
    how = {"first_idempotent": False}
    stage.die(flow="from_start", how=how)
    found = only(stage.call("recover", flow="from_start", how=how))
    assert found[:2] == ("skipped", "not_idempotent_completed")
    assert found[5] == ["a"]
    assert stage.call("go_on", flow="from_start", how=how) == "completed"
    assert stage.world == {"a": 1, "b": 2, "c": 1}


def test_the_rest_of_a_back_off_is_waited_out_and_tries_go_on_counting(stage: Stage) -> None:
    """B80: killed between two tries; over both processes there are three."""
    child = stage.begin(flow="flaky")
    due = stage.call("second_failure")
    child.kill()
    assert child.wait().killed
    found = stage.call("recover", flow="flaky")
    assert only(found)[:2] == ("resumed", "resume_from_last_incomplete")
    assert only(found)[4] == "failed"
    assert stage.world == {"b": 3}
    assert stage.call("began_at") >= due


def test_a_rollback_that_was_cut_off_goes_on(stage: Stage) -> None:
    stage.die(flow="undoing")
    told = stage.call("recover", flow="undoing")
    assert only(told)[0] == "resumed"
    assert only(told)[4] == "rolled_back"
    assert stage.world == {"undo second": 2, "undo first": 1}


def test_undos_that_kill_their_process_do_not_do_so_for_ever(stage: Stage) -> None:
    stage.die(flow="undoing", how={"times": 99})
    for _ in range(3):
        stage.die("recover", flow="undoing", how={"times": 99})
    assert only(stage.call("recover", flow="undoing", how={"times": 99}))[:2] == (
        "skipped",
        "attempts_exhausted",
    )
    assert stage.world == {"undo second": 4}


def test_a_sweep_leaves_alone_what_this_engine_drives(stage: Stage) -> None:
    """B10; said once, however often it sweeps."""
    told = stage.call("recover_beside_a_run")
    assert [outcome[:2] for outcome in told["outcomes"]] == [["skipped", "running_here"]] * 2
    assert [[kind, reason] for kind, reason, _ in told["audit"]] == [
        ["execution.auto_resume.skipped", "running_here"]
    ]
    assert stage.world == {"a": 1}


def test_an_error_about_one_run_is_not_the_others(stage: Stage) -> None:
    """B94."""
    for _ in range(3):
        stage.die(flow="chain", how={"times": 3})
    first, second = stage.call("recover_three")
    assert [action for _, action, _ in first] == ["resumed", "failed", "resumed"]
    assert [(action, status) for _, action, status in second] == [("resumed", "completed")]
    assert second[0][0] == first[1][0]


def test_a_cancel_that_nobody_carried_out_is_carried_out(stage: Stage) -> None:
    """R21: a person's cancel never resumes by itself."""
    child = stage.begin(flow="chain", how={"stops": True})
    until(lambda: stage.world["b"])
    stage.call("cancel")
    child.kill()
    assert child.wait().killed
    told = stage.call("recover", flow="chain")
    assert only(told)[:2] == ("cancelled", "cancelled")
    assert statuses(told) == [["cancelled", "cancelled"]]
    assert stage.world == {"a": 1, "b": 1}


def test_two_sweeps_at_once_resume_a_run_once(stage: Stage, nursery: Any, tmp_path: Path) -> None:
    stage.die(flow="chain")
    children = [nursery.call(f"{HERE}:recover", tmp_path, flow="chain") for _ in range(4)]
    told = [child.wait().told for child in children]
    assert sum(outcome[0] == "resumed" for each in told for outcome in each["outcomes"]) == 1
    assert stage.world == {"a": 1, "b": 2, "c": 1}


def test_a_run_whose_making_was_not_answered_is_nobodys(stage: Stage) -> None:
    """F11: it is let go of at once, so that its key is not held by a run that nobody drives."""
    assert stage.call("create_without_an_answer") == [
        "StoreError: no answer",
        "interrupted",
        "completed",
        "1",
    ]


def test_a_run_without_a_process_is_shown_until_its_last_sign_of_life(stage: Stage) -> None:
    """B100."""
    stage.die(flow="chain", how={"recovery": None})
    stage.call("recover", flow="chain", how={"recovery": None})
    shown = stage.call("shown")
    assert shown["finished"] == shown["last"]


# -- what a fresh pair of eyes has found ----------------------------------------------------------------


@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("verb", ["run", "resume", "retry"])
def test_two_that_take_up_a_run_at_once_leave_it_to_the_first(stage: Stage, verb: str, big: bool) -> None:
    """B109, C4: the loser must not make the engine forget the run that the winner drives."""
    both, third, alive = stage.call("race", verb=verb, big=big)
    refused = "AlreadyRunning" if verb == "run" else "RunLocked"
    assert both == sorted([refused, "completed"])
    assert (third, alive) == (refused, 0)
    assert stage.world == {"a": 2}


def test_a_cancel_between_the_decision_and_the_claim_ends_it(stage: Stage) -> None:
    stage.die(flow="chain")
    assert stage.call("cancelled_meanwhile") == [["cancelled", "cancelled"]]
    assert stage.world == {"a": 1, "b": 1}


def test_a_run_whose_key_a_newer_one_took_stays_where_it_is(stage: Stage) -> None:
    """C3: also when the newer one was pruned; its key is free then."""
    stage.die(flow="chain", run={"key": "k"})
    skipped = [["skipped", "superseded"]]
    assert stage.call("pruned_successor") == [skipped, [True], skipped, True]


def test_starting_over_keeps_what_people_said_and_what_came(stage: Stage) -> None:
    stage.die("answer")
    told = stage.call("recover", flow="answered")
    assert only(told)[:2] == ("resumed", "resume_from_start")
    assert only(told)[4] == "completed"


def test_the_code_of_a_condition_counts_too(stage: Stage) -> None:
    """R26."""
    stage.die(flow="conditional")
    found = only(stage.call("recover", flow="conditional", how={"limit": 5}))
    assert found[:2] == ("skipped", "code_changed")
    assert "pay[when=]" in found[2]
    assert only(stage.call("recover", flow="conditional"))[4] == "completed"


def test_a_fork_whose_maker_died_is_seen_to(stage: Stage) -> None:
    stage.die("fork_that_dies")
    assert stage.call("recover", flow="chain", how={"times": 0})["outcomes"] == []
    told = stage.call("recover_later", flow="chain", how={"times": 0})
    assert only(told)[0] == "resumed"
    assert only(told)[4] == "completed"


def test_a_body_that_recovers_lends_its_slot(stage: Stage) -> None:
    stage.die(flow="chain")
    assert stage.call("recover_in_a_body") == [1]


def test_who_follows_a_run_hears_that_it_was_pruned(stage: Stage) -> None:
    assert stage.call("follow_a_pruned_run") == "RunNotFound"
