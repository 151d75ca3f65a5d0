"""B6, B136, B137: a rollback killed at any of its commits goes on in a new process with what is missing."""

import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dagresume.testing import Zygote, autopsy
from tests.crash.flows import world

PATHS = ["a", "b", "c", "d", "m[0]", "m[1]", "m[2]", "l[0]", "l[1]", "s/x", "s/y"]
LEVELS = [["s/y"], ["s/x"], ["l[1]"], ["l[0]"], ["m[0]", "m[1]", "m[2]"], ["d"], ["b", "c"], ["a"]]
"""What is undone before what."""


class Place:
    """A folder in which a run has failed, to be copied for each case."""

    def __init__(self, nursery: Zygote, folder: Path) -> None:
        self.nursery, self.folder = nursery, folder
        self._count = 0

    def play(self, folder: Path, flow: str, how: str, at: tuple[str, int] | None = None) -> Any:
        return self.nursery.call("tests.crash.plays:die_at", folder, flow=flow, how=how, at=at).wait()

    def case(self, broken: bool) -> Path:
        """Give a new folder with the run in it, and perhaps an undo that fails."""
        self._count += 1
        case = self.folder.with_name(f"case{self._count}")
        if self.folder.exists():
            shutil.copytree(self.folder, case)
        else:
            case.mkdir()
        if broken:
            (case / "broken").touch()
        return case


@pytest.fixture
def place(nursery: Zygote, tmp_path: Path) -> Place:
    return Place(nursery, tmp_path / "failed")


def failed(place: Place) -> Place:
    place.folder.mkdir()
    assert place.play(place.folder, "undone_by_hand", "run").told["status"] == "failed"
    return place


def undone(folder: Path) -> list[str]:
    """The paths whose undo took effect, in order."""
    return [line.split()[1] for line in world(folder) if line.startswith("undone ")]


def undoing(folder: Path) -> list[str]:
    """The paths whose undo began, in order."""
    return [line.split()[1] for line in world(folder) if line.startswith("undoing ")]


def begun(folder: Path) -> set[str]:
    """The paths whose undo is durably begun, and not known to have ended."""
    conn = sqlite3.connect(folder / "runs.db")
    rows = conn.execute(
        "SELECT path, kind FROM dagresume_events WHERE path IS NOT NULL ORDER BY seq"
    ).fetchall()
    conn.close()
    return {path for path, kind in dict(rows).items() if kind == "undo.started"}


def points(commits: int) -> Iterator[tuple[str, int]]:
    for n in range(1, commits + 1):
        yield from (("before", n), ("after", n))


def in_order(lines: list[str]) -> None:
    """For each edge a → b, all there is of undoing b comes before what there is of undoing a."""
    place = {path: n for n, level in enumerate(LEVELS) for path in level}
    levels = [place[path] for path in lines]
    assert levels == sorted(levels), lines


def check(folder: Path, before: list[str], flying: set[str], *, broken: bool) -> None:
    """What two processes did: everything once, only what was in flight perhaps twice."""
    counts = Counter(undone(folder))
    assert sorted(counts) == sorted(PATHS)
    twice = {path for path, count in counts.items() if count > 1}
    assert twice <= flying, "undone twice, and was not in flight"
    second = undoing(folder)[len(before) :]
    assert len(second) == len(set(second))
    in_order([path for path in undoing(folder) if not (broken and path == "c")])
    keys = {(*line.split()[1:],) for line in world(folder) if line.startswith("undoing ")}
    assert len(keys) == len({key for _, key in keys}) == len(PATHS), "the key of an undo outlives its process"
    last = autopsy(folder / "runs.db")
    assert last.status == "rolled_back"
    assert {path for path, (kind, _) in last.last.items() if kind == "node.compensated"} >= set(PATHS)


@pytest.mark.parametrize("broken", [False, True])
def test_killed_at_every_commit(place: Place, broken: bool) -> None:
    failed(place)
    calm = place.case(broken)
    told = place.play(calm, "undone_by_hand", "rollback").told
    in_order(undoing(calm))
    if broken:
        assert (told["status"], sorted(told["failures"])) == ("rolling_back", ["c", "end"])
        assert sorted(undone(calm)) == sorted(set(PATHS) - {"c"})
        (calm / "mended").touch()
        assert place.play(calm, "undone_by_hand", "rollback").told["status"] == "rolled_back"
        assert undone(calm)[len(PATHS) - 1 :] == ["c"]
    else:
        assert (told["status"], told["failures"]) == ("rolled_back", ["end"])
        assert undone(calm) == undoing(calm)
    assert told["commits"] == len(PATHS) + 2, "one commit for each undo"
    for point in points(told["commits"]):
        folder = place.case(broken)
        assert place.play(folder, "undone_by_hand", "rollback", point).killed
        before, flying = undoing(folder), begun(folder)
        durable = {
            p for p, (kind, _) in autopsy(folder / "runs.db").last.items() if kind == "node.compensated"
        }
        assert len(flying) <= 1
        (folder / "mended").touch()
        again = place.play(folder, "undone_by_hand", "resume" if point[1] % 2 else "rollback")
        if point == ("before", 1):  # it was never begun: resume would run the run
            assert again.told["status"] == "failed"
            continue
        after = undoing(folder)[len(before) :]
        assert set(after) == set(PATHS) - durable, "only what is missing"
        check(folder, before, flying, broken=broken)


def test_a_run_that_undoes_itself_killed_at_every_commit(place: Place) -> None:
    calm = place.case(broken=False)
    told = place.play(calm, "undoes_itself", "run").told
    assert (told["status"], told["failures"]) == ("rolled_back", ["end"])
    in_the_middle = 0
    for point in points(told["commits"]):
        folder = place.case(broken=False)
        place.play(folder, "undoes_itself", "run", point)
        if autopsy(folder / "runs.db").status != "rolling_back":
            continue
        in_the_middle += 1
        before, flying = undoing(folder), begun(folder)
        assert place.play(folder, "undoes_itself", "resume").told["status"] == "rolled_back"
        check(folder, before, flying, broken=False)
    assert in_the_middle > len(PATHS)


def test_killed_twice(place: Place) -> None:
    """The process that goes on is killed too, at every commit of its own."""
    failed(place)
    first = ("after", 5)
    calm = place.case(broken=False)
    assert place.play(calm, "undone_by_hand", "rollback", first).killed
    commits = place.play(calm, "undone_by_hand", "rollback").told["commits"]
    for point in points(commits):
        folder = place.case(broken=False)
        assert place.play(folder, "undone_by_hand", "rollback", first).killed
        flying = begun(folder)
        assert place.play(folder, "undone_by_hand", "rollback", point).killed
        before = undoing(folder)
        flying |= begun(folder)
        assert place.play(folder, "undone_by_hand", "rollback").told["status"] == "rolled_back"
        check(folder, before, flying, broken=False)
