"""B1, B05: a run of sub-workflows, loops, conditions and waits, killed at any commit or SQL statement."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dagresume.testing import Point, Sweep, sweep
from tests.crash.flows import world

INPUTS = {"start": 3}
AFTER = [Point("after commit", n) for n in (2, 5, 9, 14)]
PATHS = {
    "items", "each[0]/a", "each[0]/refine[0]", "each[0]/refine[1]", "each[0]/end", "each[1]/a",
    "each[1]/refine[0]", "each[1]/extra", "each[1]/end", "asking[0]/add", "asking[0]/keep", "asking[1]/add",
    "asking[1]/keep", "total",
}  # fmt: skip


def one_effect_each(folder: Path) -> Iterator[str]:
    """No effect is missing and none happened twice: what `reconcile` is for."""
    counts = Counter(line.split()[0] for line in world(folder))
    for path in sorted(PATHS | counts.keys()):
        if counts[path] != (path in PATHS):
            yield f"the effect of {path} happened {counts[path]} times"


def shown(found: Sweep) -> Sweep:
    print(f"\n{found}")
    found.check()
    assert set(found.undisturbed.begun) == PATHS
    return found


def undone(folder: Path) -> Iterator[str]:
    """Everything was undone, each path before what it had used; only what was in flight perhaps twice."""
    lines = [line.split()[1] for line in world(folder) if line.startswith("undone ")]
    counts = Counter(lines)
    for path in sorted((PATHS - {"total"}) | counts.keys()):
        if not (path in PATHS and 1 <= counts[path] <= 3):
            yield f"{path} was undone {counts[path]} times"
    for k in (0, 1):
        inside = [path for path in dict.fromkeys(lines) if path.startswith(f"each[{k}]")]
        if inside and (inside[0], inside[-1]) != (f"each[{k}]/end", f"each[{k}]/a"):
            yield f"undone in the order {inside}"


def test_a_run_that_fails_at_its_end_undoes_all_of_it(tmp_path: Path) -> None:
    found = sweep("tests.crash.flows:ways_undone", INPUTS, tmp_path, every=41, check=undone)
    print(f"\n{found}")
    found.check()
    assert found.refused == 0


def test_idempotent_paths_just_go_on(tmp_path: Path) -> None:
    found = shown(sweep("tests.crash.flows:ways_idempotent", INPUTS, tmp_path, every=41))
    assert found.refused == 0


def test_uncertain_paths_inside_stop_a_resume(tmp_path: Path) -> None:
    found = shown(sweep("tests.crash.flows:ways_careful", INPUTS, tmp_path, every=41))
    assert 0 < found.refused < len(found.cases)


def test_paths_inside_that_reconcile_need_nobody(tmp_path: Path) -> None:
    found = shown(sweep("tests.crash.flows:ways_asking", INPUTS, tmp_path, every=41, check=one_effect_each))
    assert found.refused == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", ["ways_idempotent", "ways_careful", "ways_asking"])
def test_every_point_and_every_point_of_going_on(tmp_path: Path, variant: str) -> None:
    check = one_effect_each if variant == "ways_asking" else None
    found = shown(sweep(f"tests.crash.flows:{variant}", INPUTS, tmp_path, again=AFTER, check=check))
    assert sum(case.killed == 2 for case in found.cases) > 100


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_point_of_a_run_that_undoes_itself(tmp_path: Path) -> None:
    found = sweep("tests.crash.flows:ways_undone", INPUTS, tmp_path, again=AFTER, check=undone)
    print(f"\n{found}")
    found.check()


@pytest.mark.parametrize("mutant", ["start_record_after_the_body", "commit_not_awaited"])
def test_the_sweep_sees_inside(tmp_path: Path, mutant: str) -> None:
    """A broken engine is found by what begins in sub-workflows and loops."""
    setup = f"tests.crash.mutants:{mutant}"
    found = sweep("tests.crash.flows:inside", {"numbers": [2, 3]}, tmp_path, "commits", setup=setup)
    assert found.undisturbed.violations == []
    assert any("with 0 durable start records" in text and "/refine[" in text for text in found.violations)
    assert any("was durable" in text for text in found.violations) == (mutant == "commit_not_awaited")
