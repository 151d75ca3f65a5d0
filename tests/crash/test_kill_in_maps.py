"""A4, B55, B56, B61: what a map has done survives its process, item by item."""

import random
import time
from collections import Counter
from pathlib import Path

import pytest

from dagresume.testing import Autopsy, autopsy
from tests.crash.conftest import Play, until
from tests.crash.flows import world

NUMBERS = list(range(10))


def items(state: Autopsy, node: str) -> set[str]:
    return {path for path in state.completed if path.startswith(f"{node}[")}


@pytest.mark.parametrize("seed", [7, pytest.param(8, marks=pytest.mark.slow)])
def test_a_map_killed_twenty_times_in_a_row(play: Play, tmp_path: Path, seed: int) -> None:
    """A4."""
    moment = random.Random(seed)
    numbers = list(range(200))
    kills, done, begun = 0, set[str](), Counter[str]()
    while kills < 20:
        before = len(world(tmp_path))
        child = play("go", flow="many", how="resume" if done or begun else "run", numbers=numbers)
        until(lambda seen=before: len(world(tmp_path)) > seen)  # type: ignore[misc]
        time.sleep(moment.uniform(0.002, 0.03))  # the moment is the point: there is nothing to wait for
        child.kill()
        assert child.wait().killed
        now = Counter(world(tmp_path))
        assert not done & (now - begun).keys(), "a completed item has begun again"
        done, begun = items(autopsy(tmp_path / "runs.db"), "slowly"), now
        assert len(set(begun) - done) <= 16
        assert len(done) < 200, "the map was over before it was killed often enough"
        kills += bool(done)
    ended = play("go", flow="many", how="resume").wait().told
    assert ended["outputs"] == {"slowly": [f"item {n}" for n in numbers]}
    assert not done & (Counter(world(tmp_path)) - begun).keys()
    assert set(ended["executed"]).isdisjoint(done)
    assert len(ended["executed"]) + len(ended["reused"]) == 200


def test_items_cut_off_in_an_idempotent_map_run_again_and_no_other(play: Play, tmp_path: Path) -> None:
    """B55."""
    child = play("go", flow="safe_ten", numbers=NUMBERS)
    until(lambda: len(items(autopsy(tmp_path / "runs.db"), "m")) == 8)
    child.kill()
    assert child.wait().killed
    ended = play("go", flow="safe_ten", how="resume").wait().told
    assert ended["outputs"]["total"] == sum(n * n for n in NUMBERS)
    again = Counter(line.split()[0] for line in world(tmp_path))
    assert {path for path, times in again.items() if times == 2} == {"m[2]", "m[3]"}
    assert again["total"] == 1


def test_items_cut_off_in_a_map_that_is_not_idempotent_wait_for_a_person(play: Play, tmp_path: Path) -> None:
    """B55."""
    child = play("go", flow="unsafe_ten", numbers=NUMBERS)
    until(lambda: len(items(autopsy(tmp_path / "runs.db"), "m")) == 8)
    child.kill()
    assert child.wait().killed
    lines = world(tmp_path)
    refused = play("go", flow="unsafe_ten", how="resume").wait().told
    assert (refused["error"], refused["paths"]) == ("UncertainNode", ["m[2]", "m[3]"])
    assert play("go", flow="unsafe_ten", numbers=NUMBERS).wait().told["error"] == "UncertainNode"
    assert world(tmp_path) == lines
    assert play("look").wait().told["status"] == "interrupted"
    ended = play("go", flow="unsafe_ten", how="retry").wait().told
    assert sorted(ended["executed"]) == ["m[2]", "m[3]", "total"]
    assert ended["outputs"]["total"] == sum(n * n for n in NUMBERS)
    assert [line for line in world(tmp_path) if line.startswith("total")] == ["total 10"]


@pytest.mark.parametrize("count", [3, 0])
def test_a_map_not_spread_out_yet_is_no_map_over_nothing(play: Play, tmp_path: Path, count: int) -> None:
    """B56."""
    assert play("go", flow="late", count=count).wait().told["failures"] == ["source"]
    nodes = play("look").wait().told["nodes"]
    assert nodes == {"source": "failed", "each": "upstream_failed", "whole": "upstream_failed"}
    ended = play("go", flow="late", how="resume").wait().told
    assert ended["outputs"] == {"source": list(range(count)), "each": list(range(count)), "whole": count}
    each = [f"each[{n}]" for n in range(count)]
    assert world(tmp_path)[0:2] == ["source 1", "source 2"]
    assert sorted(world(tmp_path)[2:-1]) == each
    assert world(tmp_path)[-1] == "whole"
    assert play("look").wait().told["nodes"]["each"] == "completed"


def test_the_second_map_of_a_chain_goes_on_with_what_the_first_one_gave(play: Play, tmp_path: Path) -> None:
    """B61: killed between two steps of an item: the first is not repeated, what it drew is what was
    stored."""
    child = play("go", flow="pairs", numbers=[0, 1, 2, 3])
    until(lambda: len(items(autopsy(tmp_path / "runs.db"), "keep")) == 3)
    child.kill()
    assert child.wait().killed
    drawn = dict(line.split() for line in world(tmp_path) if line.startswith("draw"))
    ended = play("go", flow="pairs", how="resume").wait().told
    assert ended["executed"] == ["keep[2]"]
    assert ended["outputs"]["keep"] == [float(drawn[f"draw[{k}]"]) for k in range(4)]
    assert Counter(line.split()[0] for line in world(tmp_path))["draw[2]"] == 1
