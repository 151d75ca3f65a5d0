"""What bodies had kept when their process was killed: nothing is half there, nothing is paid for twice."""

import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dagresume.testing import Autopsy, Point, Zygote, autopsy, sweep
from tests.crash.conftest import Play
from tests.crash.flows import world
from tests.crash.test_sweep import shown

START = {"start": 5}
BOOKING = {"table", "book[0]", "book[1]", "book[2]", "end"}


def ledger(folder: Path) -> dict[str, int]:
    connection = sqlite3.connect(folder / "runs.db")
    try:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'ledger'").fetchall():
            return {}
        return dict(connection.execute("SELECT path, amount FROM ledger"))
    finally:
        connection.close()


def booked_twice_or_never(folder: Path) -> Iterator[str]:
    if ledger(folder) != {"table": 5, "book[0]": 5, "book[1]": 6, "book[2]": 7, "end": 41}:
        yield f"the ledger ends as {ledger(folder)}"


EVERY = [pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(600)]), 5]


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("flow", ["safe_bank", "unsafe_bank"])
def test_a_statement_is_there_with_its_checkpoint_and_only_then(
    nursery: Zygote, tmp_path: Path, flow: str, every: int
) -> None:
    """Killed at every statement of SQL: the rows of the ledger are the completed nodes that book."""
    order: dict[str, Any] = {
        "source": {"target": f"tests.crash.flows:{flow}", "inputs": '{"start":5}'},
        "key": "k",
        "options": {},
    }

    def play(n: int | None) -> tuple[Path, bool, Autopsy]:
        folder = tmp_path / str(n)
        folder.mkdir()
        point = None if n is None else Point("statement", n)
        ended = nursery.call("dagresume.plays:play", folder, **order, point=point).wait()
        if n is None:
            statements.append(ended.told["passed"]["statement"])
        return folder, ended.killed, autopsy(folder / "runs.db")

    statements: list[int] = []
    folder, _, whole = play(None)
    assert set(ledger(folder)) == whole.completed & BOOKING == BOOKING
    partly = set()
    for n in range(1, statements[0] + 1, every):
        folder, killed, state = play(n)
        assert set(ledger(folder)) == set(state.completed) & BOOKING, f"killed at statement {n}"
        if killed and state.run_id is not None:
            partly.add(len(ledger(folder)))
    assert {0, 1, 2, 3} <= partly


@pytest.mark.parametrize("every", [EVERY[0], 29])
@pytest.mark.parametrize("flow", ["safe_bank", "unsafe_bank"])
def test_a_ledger_is_whole_however_often_its_process_died(tmp_path: Path, flow: str, every: int) -> None:
    target = f"tests.crash.flows:{flow}"
    shown(sweep(target, START, tmp_path, every=every, check=booked_twice_or_never))


@pytest.mark.parametrize("every", [EVERY[0], 29])
@pytest.mark.parametrize("flow", ["safe_keeper", "unsafe_keeper"])
def test_a_run_whose_bodies_keep_things_goes_on_from_everywhere(
    tmp_path: Path, flow: str, every: int
) -> None:
    shown(sweep(f"tests.crash.flows:{flow}", None, tmp_path, every=every, check=hardly_paid_twice))


def hardly_paid_twice(folder: Path) -> Iterator[str]:
    """Only the call that a kill has cut off can have been made again."""
    paid = Counter(line.split()[1] for line in world(folder) if line.startswith("paid"))
    if set(paid) != {"page0", "page1", "page2", "page3", "total"}:
        yield f"paid was {dict(paid)}"
    if sum(paid.values()) > len(paid) + 1:
        yield f"paid twice: {dict(paid)}"


def paid(folder: Path) -> dict[str, int]:
    return dict(Counter(line.split()[1] for line in world(folder) if line.startswith("paid")))


ONCE_EACH = {"page0": 1, "page1": 1, "page2": 1, "page3": 1, "total": 1}


def test_an_idempotent_call_that_was_killed_is_made_again(play: Play, tmp_path: Path) -> None:
    assert play("go", flow="safe_in_call").wait().killed
    ended = play("go", flow="safe_in_call", how="resume").wait().told
    assert ended["outputs"]["total"] == "receipt for total, 4 pages"
    assert paid(tmp_path) == ONCE_EACH | {"page0": 2}


def test_a_call_that_was_killed_is_made_again_on_a_persons_word_only(play: Play, tmp_path: Path) -> None:
    assert play("go", flow="unsafe_in_call").wait().killed
    refused = play("go", flow="unsafe_in_call", how="resume").wait().told
    assert (refused["error"], refused["paths"]) == ("UncertainNode", ["pages"])
    assert paid(tmp_path) == {"page0": 1}
    ended = play("go", flow="unsafe_in_call", how="retry").wait().told
    assert ended["outputs"]["total"] == "receipt for total, 4 pages"
    assert paid(tmp_path) == ONCE_EACH | {"page0": 2}


def test_a_call_whose_result_is_durable_is_not_made_again(play: Play, tmp_path: Path) -> None:
    assert play("go", flow="before_state").wait().killed
    play("go", flow="before_state", how="resume").wait()
    assert paid(tmp_path) == ONCE_EACH


@pytest.mark.parametrize(("flow", "how"), [("safe_after_page", "resume"), ("unsafe_after_page", "retry")])
def test_the_next_process_goes_on_from_the_saved_state_with_an_empty_folder(
    play: Play, tmp_path: Path, flow: str, how: str
) -> None:
    """R31 too: the files of the attempt that was killed are gone."""
    assert play("go", flow=flow).wait().killed
    assert len(list((tmp_path / "runs.db.artifacts").rglob("part"))) == 1
    ended = play("go", flow=flow, how=how).wait().told
    assert ended["outputs"]["pages"] == [f"receipt for page{n}" for n in range(4)]
    lines = world(tmp_path)
    assert [line for line in lines if line.startswith("from")] == ["from 0", "from 3"]
    assert [line for line in lines if line.startswith("files")] == ["files 0", "files 0"]
    assert paid(tmp_path) == ONCE_EACH
    assert autopsy(tmp_path / "runs.db").starts["pages"] == 2


def test_files_of_an_attempt_that_left_nothing_else_are_cleared(play: Play, tmp_path: Path) -> None:
    assert play("go", flow="files").wait().killed
    assert autopsy(tmp_path / "runs.db").starts["leaves"] == 0
    assert play("go", flow="files", how="resume").wait().told["outputs"] == {"leaves": 0}
