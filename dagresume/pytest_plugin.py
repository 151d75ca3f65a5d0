"""The mark `dagresume_kill_everywhere` for pytest: kills a workflow of yours at every commit, and resumes it.

    @pytest.mark.dagresume_kill_everywhere(workflow, inputs={"order": 17}, effects="mails.log")
    def test_the_order_survives_everything(kill_everywhere):
        assert kill_everywhere.refused == 0

Installed, this is the module `dagresume_pytest` beside the package and not in it: pytest imports it at every
start, in every project, and it must not bring the engine along. What is needed is imported at the first
marked test. `-p no:dagresume` leaves it out.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from dagresume.testing import Sweep

MARK: Final = "dagresume_kill_everywhere"
FIXTURE: Final = "kill_everywhere"
_SWEEP: Final = pytest.StashKey["Sweep"]()


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known, for --strict-markers and `pytest --markers`."""
    config.addinivalue_line(
        "markers",
        f"{MARK}(workflow, inputs=None, effects=None, setup=None, varying=(), statements=False, files=False,"
        " every=1, check=None, options=None, processes=2, timeout=30): kill the workflow at every commit,"
        " go on with it in new processes, and see that its result and its effects are those of a run that"
        " nothing happened to (dagresume/docs/testing.md)",
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let a marked test have its sweep, whether or not it asks for it."""
    if not isinstance(item, pytest.Function) or item.get_closest_marker(MARK) is None:
        return
    if FIXTURE not in item.fixturenames:
        item.fixturenames.insert(0, FIXTURE)


@pytest.fixture
def kill_everywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Sweep:
    """What the sweep of a marked test found; the test has failed already if anything was wrong.

    `cases`, `refused` and `kills` count, `undisturbed` is the run that nothing happened to, str() is a table.
    """
    from dagresume.sweeps import sweep_marked

    module, owner, mark = _place(request.node)
    try:
        found = sweep_marked(module, owner, MARK, tmp_path / "crashes", **mark.kwargs)
    except (TypeError, ValueError, LookupError, RuntimeError) as error:
        pytest.fail(f"@pytest.mark.{MARK}: {error}", pytrace=False)
    request.node.stash[_SWEEP] = found
    return found


def _place(item: pytest.Function) -> tuple[Any, str, pytest.Mark]:
    """Give where the mark is written (module and name in it), so that other processes find it there too."""
    from dagresume.plays import find_mark

    found = next(item.iter_markers_with_node(MARK), None)
    if found is None:
        pytest.fail(f"the fixture {FIXTURE} is for tests marked @pytest.mark.{MARK}(workflow)", pytrace=False)
    node, mark = found
    written: Any = getattr(node, "obj", None)
    owner = "" if node is item.getparent(pytest.Module) else getattr(written, "__qualname__", "?")
    if find_mark(item.module, owner, MARK) is not mark:
        pytest.fail(
            f"@pytest.mark.{MARK} of {item.name}: the processes that are killed import {item.module.__file__}"
            " and look for it there. Write it as a decorator of a function or class at the top of the module,"
            " or into `pytestmark`; not into pytest.param, add_marker or a function inside another one.",
            pytrace=False,
        )
    if len(mark.args) > 1:
        pytest.fail(f"@pytest.mark.{MARK} takes one workflow; all else by name: inputs=…", pytrace=False)
    return item.module, owner, mark


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Fail a marked test before its own body runs if its sweep found something wrong."""
    found = pyfuncitem.stash.get(_SWEEP, None)
    if found is not None and found.violations:
        pytest.fail("\n".join([str(found), *found.violations]), pytrace=False)
