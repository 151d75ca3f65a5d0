"""Random workflows that die, are edited and resumed, against an evaluator that knows nothing of the engine.

For every case: the values in the end are those that the nodes alone give; nothing that had completed runs
again unless what it receives has changed; and the plan made before each resume was right, path by path.
"""

from __future__ import annotations

import ast
import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dagresume import planner
from dagresume.events import COMPLETED, Record
from dagresume.planner import INPUT_CHANGED, UNCHANGED, Verdict
from dagresume.testing import Zygote
from tests.property import evaluator
from tests.property.stage import DB, Apart, Stage, make_case

QUICK, FULL, MUTANTS, KILLED = 60, 600, 500, 12


def play(stage: Stage) -> Stage:
    """Play a case; what goes wrong is told with the case."""
    try:
        asyncio.run(stage.play())
    except BaseException as error:
        error.add_note(str(stage.case))
        raise
    return stage


def examples(count: int, tally: Counter[str], **options: Any) -> Callable[[], None]:
    """Give the property: called, it plays so many random cases."""

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # what fails is small, and told whole: to shrink it takes minutes
        suppress_health_check=list(HealthCheck),
        **options,
    )
    @given(st.randoms(use_true_random=False))
    def holds(rng: random.Random) -> None:
        stage = play(Stage(make_case(rng)))
        tally.update(cases=1, resumes=stage.resumes, deaths=stage.deaths)
        tally.update(stage.planned)

    return holds


def run_property(count: int) -> None:
    tally = Counter[str]()
    examples(count, tally)()
    print(dict(tally))
    assert tally["cases"] >= count
    assert tally["resumes"] >= count / 3
    assert tally["deaths"] >= count / 6
    wild = {"run", "reuse", "check"} if count == QUICK else {"run", "reuse", "check", "hold", "wait", "skip"}
    assert wild <= set(tally), "the cases are too tame"


def test_runs_give_what_the_nodes_give_and_plans_come_true() -> None:
    """B3, A2, B13, R14, R33, C3: some of the cases; all of them are slow."""
    run_property(QUICK)


@pytest.mark.slow
@pytest.mark.timeout(290)
def test_hundreds_of_runs_give_what_the_nodes_give_and_plans_come_true() -> None:
    """B3, A2, B13, R14, R33, C3."""
    run_property(FULL)


@pytest.mark.timeout(120)
def test_the_same_over_processes_that_are_killed(tmp_path: Path) -> None:
    """B3, B05: on a file, with SIGKILL at a commit."""
    deaths = 0
    with Zygote("tests.property.stage") as zygote:
        for seed in range(KILLED):
            folder = tmp_path / str(seed)
            folder.mkdir()
            case = make_case(random.Random(seed))
            stage = play(Stage(case, folder / DB, apart=Apart(zygote, folder, seed)))
            deaths += stage.deaths
    assert deaths >= KILLED / 3


# -- planners that are wrong ----------------------------------------------------------------------------

Decide = Callable[..., Verdict]
PLANS = ("dagresume.plan",)
EVERYWHERE = ("dagresume.planner", *PLANS, "dagresume.scopes", "dagresume.scheduler")


def reuses_too_many(right: Decide) -> Decide:
    """A path is reused although what it receives has changed."""

    def decide(prior: Record | None, fingerprint: bytes | None, **options: Any) -> Verdict:
        verdict = right(prior, fingerprint, **options)
        return UNCHANGED if verdict is INPUT_CHANGED else verdict

    return decide


def runs_too_many(right: Decide) -> Decide:
    """One path runs again although nothing has changed."""

    def decide(prior: Record | None, fingerprint: bytes | None, **options: Any) -> Verdict:
        verdict = right(prior, fingerprint, **options)
        one = prior is not None and prior.path == "n1" and prior.kind == COMPLETED
        return INPUT_CHANGED if one and verdict is UNCHANGED and options["idempotent"] else verdict

    return decide


@pytest.mark.parametrize(
    ("mutant", "modules", "says"),
    [
        (reuses_too_many, EVERYWHERE, "the output of|ended otherwise"),
        (reuses_too_many, PLANS, "ran and was planned as reuse"),
        (runs_too_many, EVERYWHERE, "ran again with the same inputs"),
        (runs_too_many, PLANS, "was planned to run .* and did not"),
    ],
    ids=["reuses too many", "plans to reuse too many", "runs one too many", "plans to run one too many"],
)
def test_a_wrong_planner_is_found(
    monkeypatch: pytest.MonkeyPatch, mutant: Callable[[Decide], Decide], modules: tuple[str, ...], says: str
) -> None:
    """B3: the property fails for planners that are a little wrong, in plan and run or in the plan alone."""
    wrong = mutant(planner.decide)
    for module in modules:
        monkeypatch.setattr(sys.modules[module], "decide", wrong)
    tally = Counter[str]()
    with pytest.raises(AssertionError, match=says):
        examples(MUTANTS, tally, derandomize=True)()
    print(f"found after {tally['cases']} cases")


def test_the_evaluator_knows_nothing_of_the_engine() -> None:
    """B3: an oracle that shares code with what it judges shares its faults."""
    tree = ast.parse(Path(evaluator.__file__).read_text(encoding="utf-8"))
    named = {
        name
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or "."]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert {name.partition(".")[0] for name in named} <= set(sys.stdlib_module_names)
