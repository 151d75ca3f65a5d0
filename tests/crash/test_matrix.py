"""G1: killed around and in each commit, at each step of a file, and while something else is done.

The thin form of the table takes a few of each; the whole one is slow and prints its counts (`-m slow -s`).
"""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dagresume import Engine
from dagresume.killpoints import FILES
from dagresume.testing import Point, Sweep, sweep, sweep_action
from tests.crash import test_sweep, test_ways
from tests.crash.actions import SPILL, VARIANTS, flow_of
from tests.crash.flows import world

STARTS = {"diamond": 5, "mixed": 5, "ways": 3}
CUT = {"diamond": 4, "mixed": 5, "ways": 9}
"""The commit after which the run died that others go on with: in the middle."""
ONCE = {"diamond": test_sweep.one_effect_each, "ways": test_ways.one_effect_each}
SPILLS: dict[str, Any] = {"spill_bytes": SPILL}


def checked(workflow: str, variant: str) -> Any:
    return ONCE.get(workflow) if variant == "asking" else None


def runs(workflow: str, variant: str, folder: Path, points: Any, **options: Any) -> Sweep:
    """Kill a run everywhere."""
    return sweep(
        f"tests.crash.flows:{flow_of(workflow, variant)}",
        {"start": STARTS[workflow]},
        folder,
        points,
        check=checked(workflow, variant),
        options=SPILLS,
        **options,
    )


can_recover = pytest.mark.skipif(not hasattr(Engine, "recover"), reason="there is no recover yet")
can_prune = pytest.mark.skipif(not hasattr(Engine, "prune"), reason="there is no prune yet")


def goes_on(
    action: str,
    workflow: str,
    variant: str,
    folder: Path,
    points: Any,
    before: str = "cut_off",
    **options: Any,
) -> Sweep:
    """Kill a process that does this with a run whose process was killed."""
    flow = flow_of(workflow, variant)
    arguments = {"flow": flow, "start": STARTS[workflow], "commit": CUT[workflow]}
    return sweep_action(
        f"tests.crash.actions:{action}",
        folder,
        points,
        before=f"tests.crash.actions:{before}",
        workflows=[f"tests.crash.flows:{flow}"],
        arguments=arguments,
        check=None if action == "prune" else checked(workflow, variant),  # two runs have left effects
        options=SPILLS,
        **options,
    )


def recovers(workflow: str, variant: str, folder: Path, points: Any, **options: Any) -> Sweep:
    """Kill a process that recovers."""
    setup = "tests.crash.actions:let_recover"
    return goes_on("recover", workflow, variant, folder, points, "cut_off_to_recover", setup=setup, **options)


def prunes(workflow: str, variant: str, folder: Path, points: Any, **options: Any) -> Sweep:
    """Kill a process that deletes a run that has completed, beside one that has not."""
    return goes_on("prune", workflow, variant, folder, points, "done_and_cut_off", **options)


def migrates(variant: str, folder: Path, points: Any, **options: Any) -> Sweep:
    """Kill a process that goes on with a run of an older version of its workflow."""

    def each_once(folder: Path) -> Iterator[str]:
        counts = Counter(line.split()[0] for line in world(folder))
        counts["items"] += counts.pop("listed", 0)
        counts.pop("gone", None)
        if variant == "asking" and counts != dict.fromkeys(
            ["first", "items", "each[0]", "each[1]", "last"], 1
        ):
            yield f"the effects are {dict(counts)}"

    return sweep_action(
        "tests.crash.actions:go_on",
        folder,
        points,
        before="tests.crash.actions:cut_off",
        workflows=[f"tests.crash.flows:new_{variant}"],
        arguments={"flow": f"old_{variant}", "start": 5, "commit": 4},
        check=each_once,
        options=SPILLS,
        **options,
    )


def opens(folder: Path, points: Any, **options: Any) -> Sweep:
    """Kill a process that brings the tables of a file to a newer version."""

    def one_or_the_other(folder: Path) -> Iterator[str]:
        conn = sqlite3.connect(folder / "runs.db")
        if conn.execute("PRAGMA integrity_check").fetchone() != ("ok",):
            yield "the file is damaged"
        conn.close()

    return sweep_action(
        "tests.crash.actions:look_at_the_tables",
        folder,
        points,
        before="tests.crash.actions:cut_off",
        arguments={"flow": "careful", "start": 5, "commit": 4},
        setup="tests.crash.actions:with_a_newer_schema",
        check=one_or_the_other,
        **options,
    )


def shown(found: Sweep) -> Sweep:
    print(f"\n{found}\n{dict(found.kills)}")
    found.check()
    assert all(case.killed == len(case.points) for case in found.cases)
    return found


# -- thin -----------------------------------------------------------------------------------------------

SOME = [
    Point("before commit", 1),
    Point("after commit", 1),
    Point("statement", 6),  # while it opens
    Point("statement", 19),  # while it claims
    Point("after commit", 3),
]
WRITTEN = [where for where in FILES if where != "file removal"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_while_a_big_output_is_written(tmp_path: Path, variant: str) -> None:
    """B04: half of it in its file, before it is forced to the disk, before it has its name, and after."""
    output = [Point(where, 2) for where in WRITTEN]  # the first one is that of the inputs
    found = shown(runs("diamond", variant, tmp_path, output, processes=1))
    assert found.undisturbed.passed["in blob write"] >= 2


def test_a_big_output_that_is_written_in_place_is_found(tmp_path: Path) -> None:
    points = [Point("in blob write", n) for n in (1, 2)]
    setup = "tests.crash.mutants:blobs_written_in_place"
    target = "tests.crash.flows:careful"
    found = sweep(target, {"start": 5}, tmp_path, points, setup=setup, options=SPILLS, processes=1)
    torn = r"in blob write \d: runs.db.blobs/\S+ has its name and is not whole"
    assert sum(bool(re.fullmatch(torn, text)) for text in found.violations) >= 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_while_it_claims_and_goes_on(tmp_path: Path, variant: str) -> None:
    shown(goes_on("go_on", "diamond", variant, tmp_path, SOME, processes=1))


@can_recover
@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_while_it_recovers(tmp_path: Path, variant: str) -> None:
    found = shown(recovers("diamond", variant, tmp_path, SOME, processes=1))
    assert found.undisturbed.given["status"] == "completed"
    assert found.undisturbed.given.get("left", []) == []


@can_prune
def test_killed_while_it_prunes(tmp_path: Path) -> None:
    """What is deleted goes whole, in the end; what is not stays."""
    points = [
        Point("statement", 20),
        Point("statement", 24),
        Point("file removal", 1),
        Point("file removal", 2),
    ]
    found = shown(prunes("diamond", "careful", tmp_path, points, processes=1))
    assert found.undisturbed.given == {"runs": ["interrupted"], "orphans": 0, "files": 0}


def test_killed_while_a_run_of_an_older_version_is_taken_over(tmp_path: Path) -> None:
    found = shown(migrates("asking", tmp_path, SOME, processes=1))
    assert found.undisturbed.given["outputs"]["last"] == "110"


def test_killed_while_the_tables_are_brought_to_a_newer_version(tmp_path: Path) -> None:
    """The file is as it was, or as it is to be."""
    found = shown(opens(tmp_path, "statements", every=4, processes=1))
    assert found.undisturbed.given["version"] > 1
    assert found.kills["statement"] > 4


def test_an_action_that_does_not_go_on_is_found(tmp_path: Path) -> None:
    """The action says something else after a kill, fails, or leaves the run in another state."""
    (tmp_path / "counting.py").write_text(
        "from pathlib import Path\n"
        "async def count(engine, most):\n"
        "    file = Path('count')\n"
        "    file.write_text(str(int(file.read_text() if file.exists() else 0) + 1))\n"
        "    n = int(file.read_text())\n"
        "    if n > most:\n"
        "        raise ValueError('called too often')\n"
        "    await engine.runs()\n"
        "    await engine.start(wf())\n"
        "    return n\n"
        "def wf():\n"
        "    from dagresume import Workflow\n"
        "    made = Workflow('w', idempotent=True)\n"
        "    made.node(id='a')(lambda: 1)\n"
        "    return made\n",
        encoding="utf-8",
    )
    action = f"{tmp_path / 'counting.py'}:count"
    points = [Point("before commit", 1)]
    found = sweep_action(action, tmp_path / "two", points, arguments={"most": 2})
    assert found.violations == ["before commit 1: it gave 2, undisturbed 1"]
    found = sweep_action(action, tmp_path / "one", points, arguments={"most": 1})
    assert "called too often" in found.violations[0]
    with pytest.raises(AssertionError, match="called too often"):
        found.check()


def test_what_comes_before_an_action_is_seen_to_work(tmp_path: Path) -> None:
    found = sweep_action("os:getcwd", tmp_path, before="os:stat", arguments={"path": "nowhere"}, processes=1)
    assert "os:stat failed: " in found.violations[0]
    assert "FileNotFoundError" in found.violations[0]
    assert found.cases == []


# -- whole ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("workflow", STARTS)
def test_the_whole_matrix(tmp_path: Path, workflow: str) -> None:
    table: dict[str, Sweep] = {}
    for variant in VARIANTS:
        place = tmp_path / variant
        table[f"{variant}: run"] = runs(workflow, variant, place / "run", "all")
        table[f"{variant}: claim, resume"] = goes_on("go_on", workflow, variant, place / "claim", "all")
        if hasattr(Engine, "recover"):
            table[f"{variant}: recover"] = recovers(workflow, variant, place / "recover", "all")
        if hasattr(Engine, "prune"):
            table[f"{variant}: prune"] = prunes(workflow, variant, place / "prune", "all")
    tell(workflow, table)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_matrix_of_migrations(tmp_path: Path) -> None:
    table = {f"{variant}: migrate": migrates(variant, tmp_path / variant, "all") for variant in VARIANTS}
    tell("versions", table | {"tables: migrate": opens(tmp_path / "tables", "all")})


def tell(name: str, table: dict[str, Sweep]) -> None:
    """Print how many processes were killed at each kind of point, what was refused, what was wrong."""
    kinds = ["before commit", "after commit", "statement", *FILES]
    print("\n" + " | ".join([name, *kinds, "refused", "violations"]))
    for row, found in table.items():
        numbers = [found.kills[where] for where in kinds]
        print(" | ".join([row, *map(str, [*numbers, found.refused, len(found.violations)])]))
    for found in table.values():
        found.check()
