"""G2: the power goes, at every fsync of a run and at random moments between them.

One run is made on a file system that notes every change (`lossyfs`); of each moment the disk that would be
left is built (`disk`), opened, compared with what had been acknowledged by then, and its run resumed.

    python -m pytest -m slow -s tests/crash/test_power_loss.py
"""

import asyncio
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, get_args

import pytest

from tests.crash import lossyfs
from tests.crash.disk import Disk, How, Step, read_log
from tests.crash.witness import FLAWS, Verdict, examine, hear, right

ROOT = Path(__file__).parents[2]
PAGES = 360
"""So many that the log is copied back in the middle of the run."""
SLOW = [pytest.mark.slow, pytest.mark.timeout(1200)]


def recorded(folder: Path, synchronous: str, flaw: str = "") -> list[Step]:
    """Make one run on the lossy file system; gives all that happened there."""
    if lossyfs.MISSING:
        pytest.skip(lossyfs.MISSING)
    try:
        with lossyfs.mounted(folder) as (mount, log):
            notes = mount / lossyfs.NOTES
            program = [sys.executable, "-m", "tests.crash.witness", str(mount / "runs.db"), str(notes)]
            subprocess.run([*program, synchronous, str(PAGES), flaw], cwd=ROOT, check=True, timeout=120)
    except OSError as error:
        pytest.skip(str(error))
    return list(read_log(log))


def syncs_of(path: str, steps: list[Step]) -> list[int]:
    """Give the fsyncs of all files that were made under this name."""
    made = (step.facts for step in steps if step.op == "create")
    files = {facts["file"] for facts in made if facts["path"] == path}
    return [n for n, step in enumerate(steps) if step.op == "fsync" and step.facts["file"] in files]


class Cut(NamedTuple):
    """One moment, and what was found there."""

    step: int
    how: How
    verdict: Verdict


def cuts_at_syncs(steps: list[Step], every: int) -> set[int]:
    """Give the moments just before each fsync has its effect, and the end: a disk that forgets what was not
    synced has the most to lose there.
    """
    syncs = [n for n, step in enumerate(steps) if step.syncs]
    return {*syncs[::every], len(steps)}


def played(steps: list[Step], moments: dict[int, list[How]], folder: Path) -> Iterator[Cut]:
    """Let the power go at each of these moments."""
    disk = Disk()
    for n in range(len(steps) + 1):
        for turn, how in enumerate(moments.get(n, ())):
            place = folder / f"{n}-{turn}-{how}"
            place.mkdir()
            disk.leave(place, how, random.Random(n * 1000 + turn))
            yield Cut(n, how, asyncio.run(examine(place / "runs.db", hear(disk.notes), PAGES)))
            shutil.rmtree(place)
        if n < len(steps):
            disk.take(steps[n])


def at_every_sync(steps: list[Step], every: int, *hows: How) -> dict[int, list[How]]:
    return {n: list(hows) for n in cuts_at_syncs(steps, every)}


def at_random(steps: list[Step], count: int) -> dict[int, list[How]]:
    chance = random.Random(4)
    return {n: ["torn"] * times for n, times in Counter(chance.choices(range(len(steps)), k=count)).items()}


def shown(title: str, steps: list[Step], cuts: list[Cut]) -> None:
    losing = [cut for cut in cuts if cut.verdict.lost]
    syncs, writes = sum(step.syncs for step in steps), sum(step.op == "write" for step in steps)
    copied = len(syncs_of("/runs.db", steps))
    hows = ", ".join(f"{count} {how}" for how, count in sorted(Counter(cut.how for cut in cuts).items()))
    print(
        f"\n{title}: {len(steps)} steps ({writes} writes, {syncs} fsyncs, {copied} of the database),"
        f" {len(cuts)} cuts ({hows}):"
        f" acknowledged records lost at {len(losing)}, at most {max(c.verdict.lost for c in cuts)};"
        f" wrong otherwise at {sum(bool(cut.verdict.wrong) for cut in cuts)}"
    )


@pytest.mark.parametrize(("every", "count"), [pytest.param(1, 200, marks=SLOW), (80, 3)])
def test_full_keeps_what_was_acknowledged_whenever_the_power_goes(
    tmp_path: Path, every: int, count: int
) -> None:
    """C1, B04: records, marks and spilled outputs; nothing completed runs twice; the result is the same."""
    steps = recorded(tmp_path, "full")
    moments = at_every_sync(steps, every, "strict", "eager")
    for n, hows in at_random(steps, count).items():
        moments[n] = [*moments.get(n, []), *hows]
    cuts = list(played(steps, moments, tmp_path))
    shown("full", steps, cuts)
    assert [cut for cut in cuts if cut.verdict.lost or cut.verdict.wrong] == []
    assert {cut.how for cut in cuts} == set(get_args(How))
    assert max(cut.verdict.reused for cut in cuts) >= len(right(PAGES))
    copied = len(syncs_of("/runs.db", steps))
    assert copied >= 4, "the log was copied back in the middle of the run, and at both ends"


@pytest.mark.parametrize("count", [pytest.param(200, marks=SLOW), 0])
def test_normal_loses_what_came_last_and_nothing_else(tmp_path: Path, count: int) -> None:
    """What is lost runs again: the file is sound, the result the same. That it loses something shows that
    the test can tell.
    """
    steps = recorded(tmp_path, "normal")
    of_the_log: dict[int, list[How]] = {n: ["strict"] for n in syncs_of("/runs.db-wal", steps)}
    moments = {**at_every_sync(steps, 1, "strict"), **at_random(steps, count)} if count else of_the_log
    cuts = list(played(steps, moments, tmp_path))
    shown("normal", steps, cuts)
    assert [cut for cut in cuts if cut.verdict.wrong] == []
    assert any(cut.verdict.lost for cut in cuts)


@pytest.mark.parametrize("flaw", sorted(FLAWS))
@pytest.mark.parametrize("every", [pytest.param(5, marks=SLOW)])
def test_a_store_that_leaves_out_an_fsync_is_found(tmp_path: Path, flaw: str, every: int) -> None:
    """The test of the test."""
    steps = recorded(tmp_path, "full", flaw)
    cuts = list(played(steps, at_every_sync(steps, every, "strict", "eager"), tmp_path))
    shown(f"without fsync of {flaw}", steps, cuts)
    assert any(cut.verdict.wrong for cut in cuts)
