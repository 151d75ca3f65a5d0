"""What a context gives beyond its facts: folders that no two paths share."""

import os
import re
import unicodedata
from itertools import combinations
from typing import Any

import pytest

from dagresume.context import Context, artifacts_of

NAMES = [
    "Node", "node", "NODE", "é", unicodedata.normalize("NFD", "é"), "CON", "con", "nul.txt", "aux.", "a.",
    "a..", "a", "a ", " a", "a:b", "a/b", "a.b", "a#0", "a[0]", "a[00]", "a%2Fb", "..", ".", "-",
    "节点", "结点", "x" * 300, "x" * 301, "x" * 200 + "[1]", "x" * 200 + "[2]",
    "outer[1]/inner", "outer[1]/inner[1]", "\ud800",
]  # fmt: skip


def test_every_path_has_a_folder_of_its_own_on_every_file_system() -> None:
    """B74, B79."""
    folders = [artifacts_of("root", "run", name) for name in NAMES]
    names = [folder.name for folder in folders]
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,200}", name) for name in names)
    reserved = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\.|$)", re.IGNORECASE)
    assert not any(reserved.match(name) for name in names)
    for (one, its), (other, others) in combinations(zip(NAMES, names, strict=True), 2):
        assert its.casefold() != others.casefold(), (one, other)
    assert {folder.parent for folder in folders} == {artifacts_of("root", "run", "node").parent}


def test_runs_share_no_folder() -> None:
    runs = ["0198-a", "0198-A", "../up", "run", "Run", "a/b"]
    parents = {str(artifacts_of("root", run, "node").parent).casefold() for run in runs}
    assert len(parents) == len(runs)
    assert all(artifacts_of("root", run, "node").parent.parent.name == "root" for run in runs)


def test_a_folder_is_readable_and_stays_what_it_is() -> None:
    """It is found again by the next process, and by the next release."""
    folder = artifacts_of("runs.db.artifacts", "01a2-b3", "screen[3]/evaluate")
    assert folder.name == "screen-3-evaluate-341cad6521cf3a2963b6d136efd12256"
    assert str(folder.parent) == os.path.join("runs.db.artifacts", "01a2-b3")  # noqa: PTH118


@pytest.mark.parametrize(("given", "told"), [((1,), (1, None)), ((True, 2), (1, 2)), ((0.5, 1), (0.5, 1))])
def test_progress_is_told_in_plain_numbers(given: tuple[Any, ...], told: tuple[Any, ...]) -> None:
    seen = []

    class Ear:
        def log(self, level: str, line: str) -> None:
            raise AssertionError

        def progress(self, done: float, total: float | None) -> None:
            seen.append((done, total))

    ear: Any = Ear()
    Context(run_id="r", workflow="w", node="n", path="n", index=None, attempt=1, channel=ear).progress(*given)
    assert seen == [told]
    assert type(seen[0][0]) in {int, float}
