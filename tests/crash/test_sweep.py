"""A3, B05: a run killed at any commit or SQL statement goes on in a new process as if nothing had been."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dagresume.testing import Point, Sweep, autopsy, sweep
from tests.crash.flows import world

INPUTS = {"start": 5}
AFTER = [Point("after commit", n) for n in (1, 2, 4, 6)]


def one_effect_each(folder: Path) -> Iterator[str]:
    """No effect is missing and none happened twice: what `reconcile` is for."""
    counts = Counter(line.split()[0] for line in world(folder))
    for path in ["a", "b", "c", "d", "e", "m[0]", "m[1]", "m[2]"]:
        if counts[path] != 1:
            yield f"the effect of {path} happened {counts[path]} times"


def shown(found: Sweep) -> Sweep:
    print(f"\n{found}")
    found.check()
    return found


def test_idempotent_nodes_just_go_on(tmp_path: Path) -> None:
    found = shown(sweep("tests.crash.flows:idempotent", INPUTS, tmp_path, every=13))
    assert found.refused == 0
    assert found.undisturbed.begun["b"] == 2


def test_uncertain_nodes_stop_a_resume_and_a_person_goes_on(tmp_path: Path) -> None:
    found = shown(sweep("tests.crash.flows:careful", INPUTS, tmp_path, every=13))
    assert 0 < found.refused < len(found.cases)


def test_nodes_that_reconcile_need_nobody(tmp_path: Path) -> None:
    found = shown(sweep("tests.crash.flows:asking", INPUTS, tmp_path, every=13, check=one_effect_each))
    assert found.refused == 0


def test_pure_nodes_chained_maps_blobs_threads_and_handled_failures(tmp_path: Path) -> None:
    shown(sweep("tests.crash.flows:mixed_careful", INPUTS, tmp_path, "commits"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "variant", ["idempotent", "careful", "asking", "mixed_idempotent", "mixed_careful", "mixed_asking"]
)
def test_every_point_and_every_point_of_going_on(tmp_path: Path, variant: str) -> None:
    check = one_effect_each if variant == "asking" else None
    found = shown(sweep(f"tests.crash.flows:{variant}", INPUTS, tmp_path, again=AFTER, check=check))
    assert sum(case.killed == 2 for case in found.cases) > 100


@pytest.mark.parametrize("mutant", ["start_record_after_the_body", "commit_not_awaited"])
def test_the_sweep_finds_a_broken_engine(tmp_path: Path, mutant: str) -> None:
    setup = f"tests.crash.mutants:{mutant}"
    found = sweep("tests.crash.flows:careful", INPUTS, tmp_path, "commits", setup=setup)
    assert found.undisturbed.violations == []
    wrong = "\n".join(found.violations)
    assert re.search(r"has begun 1 times with 0 durable start records", wrong)
    assert ("before a was durable" in wrong) == (mutant == "commit_not_awaited")
    with pytest.raises(AssertionError, match="begun"):
        found.check()


def test_a_broken_engine_is_found_without_start_records_too(tmp_path: Path) -> None:
    setup = "tests.crash.mutants:commit_not_awaited"
    found = sweep("tests.crash.flows:idempotent", INPUTS, tmp_path, "commits", setup=setup)
    assert any("before a was durable" in text for text in found.violations)
    assert any("the result was given while the run was running" in text for text in found.violations)


def test_the_folder_of_a_violation_is_kept(tmp_path: Path) -> None:
    setup = "tests.crash.mutants:commit_not_awaited"
    points = [Point("before commit", 1), Point("before commit", 3)]
    found = sweep("tests.crash.flows:idempotent", INPUTS, tmp_path, points, setup=setup)
    good, bad = found.cases
    assert (good.violations, good.folder.exists()) == ([], False)
    assert autopsy(bad.folder / "runs.db").status == "completed"
