"""C4, G4: whatever stalls or deceives them, of two processes one drives a run, and the store sees to it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dagresume.testing import Autopsy, Child, Ended, Zygote, autopsy
from tests.crash.conftest import until
from tests.crash.owning import FLOWS, begun

LEASE = 0.6
Play = Callable[..., Child]


@pytest.fixture
def own(nursery: Zygote, tmp_path: Path) -> Play:
    """Begin a play of `owning` in a new process that works in this test's folder."""

    def begin(name: str, **arguments: Any) -> Child:
        return nursery.call(f"tests.crash.owning:{name}", tmp_path, **arguments)

    return begin


def completions(folder: Path) -> Counter[str]:
    """Count how often each path has completed."""
    with contextlib.closing(sqlite3.connect(folder / "runs.db")) as conn:
        found = conn.execute("SELECT path FROM dagresume_events WHERE kind = 'node.completed'").fetchall()
    return Counter(path for (path,) in found)


def rows(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(folder / "runs.db")) as conn:
        return conn.execute(sql).fetchall()


# -- eight at once ---------------------------------------------------------------------------------------


def compete(nursery: Zygote, folder: Path, how: str, **options: Any) -> list[tuple[Child, dict[str, Any]]]:
    """Let eight processes want one run at the same moment; gives what each was told."""
    folder.mkdir()
    if options.get("dies", True):
        assert nursery.call("tests.crash.owning:start_and_die", folder).wait().killed
    (folder / "refused.log").touch()
    children = [nursery.call("tests.crash.owning:compete", folder, how=how, **options) for _ in range(8)]
    ready = folder / "ready.log"
    until(lambda: ready.exists() and len(ready.read_text().splitlines()) == 8)
    (folder / "gate").touch()
    told = []
    for child in children:
        ended = child.wait()
        assert ended.error is None, ended.error
        assert not ended.hung
        told.append((child, ended.told))
    return told


def check_one_winner(folder: Path, told: list[tuple[Child, dict[str, Any]]], *, fresh: bool) -> None:
    """One has driven the run, the seven others were told who; each path completed once."""
    ((winner, won),) = [(child, each) for child, each in told if "error" not in each]
    assert won["c"] == "abc"
    assert won["executed"] == (["a", "b", "c"] if fresh else ["b", "c"])
    for _, each in told:
        if "error" in each:
            assert each["error"] in {"RunLocked", "AlreadyRunning"}, each
            assert f"process {winner.pid})" in each["message"]
    assert rows(folder, "SELECT count(*) FROM dagresume_runs") == [(1,)]
    assert completions(folder) == {"a": 1, "b": 1, "c": 1}
    assert Counter(path for path, pid, _ in begun(folder) if pid == winner.pid) == (
        {"a": 1, "b": 1, "c": 1} if fresh else {"b": 1, "c": 1}
    )
    assert len(begun(folder)) == (3 if fresh else 4)


@pytest.mark.parametrize("how", ["resume", pytest.param("run", marks=pytest.mark.slow)])
def test_of_eight_processes_one_gets_a_dead_ones_run(nursery: Zygote, tmp_path: Path, how: str) -> None:
    """G4, C4: the owner was killed; the others are told who drives it now."""
    check_one_winner(tmp_path / "r", compete(nursery, tmp_path / "r", how), fresh=False)


@pytest.mark.parametrize("how", [pytest.param("run", marks=pytest.mark.slow), "start"])
def test_of_eight_processes_one_makes_the_run_of_a_key(nursery: Zygote, tmp_path: Path, how: str) -> None:
    """B109: exactly one run is made."""
    check_one_winner(tmp_path / "r", compete(nursery, tmp_path / "r", how, dies=False), fresh=True)


def check_bypassed(folder: Path, told: list[tuple[Child, dict[str, Any]]], *, idempotent: bool) -> int:
    """Whoever takes the run from a living owner takes all of it; gives how often that was done."""
    for _, each in told:
        if "error" in each:
            assert each["error"] in {"LeaseLost", "UncertainNode", "RunLocked", "AlreadyRunning"}, each
    assert rows(folder, "SELECT count(*) FROM dagresume_runs") == [(1,)]
    assert max(completions(folder).values(), default=0) <= 1, completions(folder)
    ((epoch, status),) = rows(folder, "SELECT epoch, status FROM dagresume_runs")
    state = autopsy(folder / "runs.db")
    if idempotent:
        assert status == "completed"
        assert completions(folder) == {"a": 1, "b": 1, "c": 1}
    else:
        assert max(Counter(path for path, _, _ in begun(folder)).values()) == 1, begun(folder)
        assert status in {"completed", "interrupted", "running"}
        assert state.completed <= {"a", "b", "c"}
    return int(epoch)


@pytest.mark.parametrize("idempotent", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_eight_processes_that_do_not_see_each_other_lose_nothing(
    nursery: Zygote, tmp_path: Path, idempotent: bool
) -> None:
    """B112: each takes the others for dead; the store refuses whoever was overtaken."""
    told = compete(nursery, tmp_path / "r", "run", dies=False, bypass=True, idempotent=idempotent)
    check_bypassed(tmp_path / "r", told, idempotent=idempotent)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["resume", "run", "new key", "bypassed", "bypassed, not idempotent"])
def test_fifty_times_eight_processes(nursery: Zygote, tmp_path: Path, how: str) -> None:
    """G4."""
    began, taken, lost = time.monotonic(), 0, Counter[str]()
    for n in range(50):
        folder = tmp_path / str(n)
        if how.startswith("bypassed"):
            idempotent = how == "bypassed"
            told = compete(nursery, folder, "run", dies=False, bypass=True, idempotent=idempotent)
            taken += check_bypassed(folder, told, idempotent=idempotent) - 1
        elif how == "new key":
            told = compete(nursery, folder, ["run", "start"][n % 2], dies=False)
            check_one_winner(folder, told, fresh=True)
        else:
            told = compete(nursery, folder, how)
            check_one_winner(folder, told, fresh=False)
        lost.update(each.get("error", "won") for _, each in told)
    print(f"\n{how}: 50 rounds of 8: {dict(lost)}, taken from a living owner {taken} times", end=", ")
    print(f"{time.monotonic() - began:.0f} s")


# -- an owner that sleeps through its lease --------------------------------------------------------------

FIRST = {
    "fan": 5,
    "unsafe fan": 5,
    "line": 2,
    "unsafe line": 2,
    "limited": 2,
    "retrying": 3,
    "sleeping": 1,
    "rounds": 2,
    "graphs": 4,
    "buyer": 1,
}
"""How many bodies have begun when the owner is stopped."""
RESTING = {"retrying", "sleeping"}


def stop_asleep(sleeper: Child, folder: Path, flow: str) -> list[tuple[str, int, float]]:
    """Stop a process when so many bodies have begun; gives them."""
    until(lambda: len(begun(folder)) == FIRST[flow])
    if flow in RESTING:
        time.sleep(0.25)  # its first bodies have ended, and what follows is not due yet
    sleeper.kill(signal.SIGSTOP)
    found = begun(folder)
    assert len(found) == FIRST[flow]
    return found


def check_ended(folder: Path, sleeper: Child, before: list[Any], told: Ended, allowed: int = 0) -> Autopsy:
    """The late owner has begun nothing more, and knows it has lost its lease; nothing was completed twice."""
    assert told.error is None, told.error
    assert told.told["error"] == "LeaseLost", told.told
    mine = [each for each in begun(folder) if each[1] == sleeper.pid]
    late = mine[len(before) :]
    assert len(late) <= allowed, f"begun after the pause: {late}"
    assert max(completions(folder).values()) == 1
    state = autopsy(folder / "runs.db")
    assert state.status == "completed"
    assert rows(folder, "SELECT epoch, owner FROM dagresume_runs")[0][1] is None
    return state


QUICK = {
    ("unsafe line", "late"),
    ("retrying", "late"),
    ("sleeping", "late"),
    ("fan", "meanwhile"),
    ("buyer", "meanwhile"),
}


@pytest.mark.parametrize(
    ("flow", "wakes"),
    [
        pytest.param(flow, wakes, marks=() if (flow, wakes) in QUICK else pytest.mark.slow)
        for flow in FIRST
        for wakes in ("late", "meanwhile", "bypassed")
    ],
)
def test_an_owner_that_slept_begins_nothing_more(own: Play, tmp_path: Path, flow: str, wakes: str) -> None:
    """B106: SIGSTOP beyond the lease, another takes over, SIGCONT `late`: when that has ended the run;
    `meanwhile`: while it works on it. `bypassed`: it did not even wait for the lease.
    """
    sleeper = own("drive", flow=flow, lease=LEASE)
    before = stop_asleep(sleeper, tmp_path, flow)
    (tmp_path / "mended").touch()
    taker = own("take_over", flow=flow, lease=LEASE, bypass=wakes == "bypassed")
    if wakes == "late":
        assert taker.wait().told["status"] == "completed"
    else:
        until(lambda: any(pid == taker.pid for _, pid, _ in begun(tmp_path)))
    sleeper.kill(signal.SIGCONT)
    ended = sleeper.wait()
    told = taker.wait().told
    assert told["status"] == "completed", told
    if flow == "buyer":  # the body that was under way may not pay any more
        assert (tmp_path / "paid.log").read_text().split() == [str(taker.pid)]
    # One that was robbed within its lease hears of it from the store, at its next commit: until then what is
    # idempotent and ready begins in the places that became free.
    allowed = 4 if wakes == "bypassed" and not flow.startswith("unsafe") else 0
    check_ended(tmp_path, sleeper, before, ended, allowed)
    if allowed:
        return
    often = Counter(path for path, _, _ in begun(tmp_path))
    in_flight = {path for path, _, _ in before} - set(told["reused"])
    assert {path for path, times in often.items() if times > 1} <= in_flight
    if flow.startswith("unsafe"):
        assert set(told["uncertain"]) == in_flight  # C6: a person's word was needed for them


def test_an_owner_that_slept_alone_goes_on(own: Play, tmp_path: Path) -> None:
    """C4: only a claim takes a run away. Nobody came, so it renews, looks, and goes on; no attempt is used
    up.
    """
    sleeper = own("drive", flow="fan", lease=LEASE)
    before = stop_asleep(sleeper, tmp_path, "fan")
    time.sleep(2 * LEASE)
    sleeper.kill(signal.SIGCONT)
    told = sleeper.wait().told
    assert told["status"] == "completed"
    assert len(begun(tmp_path)) == 13 > len(before)
    assert set(told["stats"].values()) == {1}


def test_an_owner_that_was_taken_for_dead_goes_on(own: Play, tmp_path: Path) -> None:
    """C4: marking a run interrupted takes it from nobody; what its owner does late is accepted."""
    sleeper = own("drive", flow="fan", lease=LEASE)
    stop_asleep(sleeper, tmp_path, "fan")
    assert own("mark_interrupted", lease=LEASE).wait().told == [1, "interrupted"]
    assert autopsy(tmp_path / "runs.db").status == "interrupted"
    sleeper.kill(signal.SIGCONT)
    assert sleeper.wait().told["status"] == "completed"
    assert autopsy(tmp_path / "runs.db").status == "completed"
    assert len(begun(tmp_path)) == 13
    assert rows(tmp_path, "SELECT epoch FROM dagresume_runs") == [(1,)]


def test_an_owner_that_slept_undoes_nothing_more(own: Play, tmp_path: Path) -> None:
    """B106, for a rollback: the one under way may happen twice, no other."""
    sleeper = own("drive", flow="undoable", lease=LEASE)
    until(lambda: len(begun(tmp_path)) == 1)
    sleeper.kill(signal.SIGSTOP)
    before = begun(tmp_path)
    taker = own("take_over", flow="undoable", lease=LEASE)
    until(lambda: any(pid == taker.pid for _, pid, _ in begun(tmp_path)))
    sleeper.kill(signal.SIGCONT)
    ended = sleeper.wait()
    assert ended.error is None, ended.error
    assert ended.told["error"] == "LeaseLost", ended.told
    taker.wait()
    assert [each for each in begun(tmp_path) if each[1] == sleeper.pid] == before
    often = Counter(path for path, _, _ in begun(tmp_path))
    assert often == {"undo:c": 2, "undo:b": 1, "undo:a": 1}
    assert autopsy(tmp_path / "runs.db").status == "rolled_back"


def test_two_sessions_that_drive_one_run_are_told_apart_by_the_store(own: Play, tmp_path: Path) -> None:
    """B112: the first one's lease is sound and renewed, the second one does not care."""
    first = own("drive", flow="line", lease=30)
    until(lambda: len(begun(tmp_path)) == 2)
    second = own("take_over", flow="line", lease=30, bypass=True)
    lost, won = first.wait(), second.wait()
    assert won.told["status"] == "completed"
    assert lost.told["error"] == "LeaseLost"
    assert f"process {second.pid}" in lost.told["message"]
    assert set(completions(tmp_path).values()) == {1}
    assert len(completions(tmp_path)) == 5
    often = Counter(path for path, _, _ in begun(tmp_path))
    assert sum(often.values()) <= 7  # what was under way when it was taken, and at most one more


# -- renewals that do not come through -------------------------------------------------------------------


@pytest.mark.parametrize("store", ["blocked", pytest.param("failing", marks=pytest.mark.slow)])
def test_without_renewals_nothing_more_begins_until_they_come_again(
    own: Play, tmp_path: Path, store: str
) -> None:
    """B107: by its own clock, though nobody else is there."""
    driver = own("drive", flow="wide fan", lease=LEASE, store=store)
    until(lambda: len(begun(tmp_path)) == 5)
    (tmp_path / "blocked").touch()
    blocked_at = time.monotonic()
    time.sleep(3 * LEASE)
    freed_at = time.monotonic()
    (tmp_path / "blocked").unlink()
    told = driver.wait().told
    assert told["status"] == "completed", told
    assert len(begun(tmp_path)) == 33
    silent = [each for each in begun(tmp_path) if blocked_at + LEASE + 0.05 < each[2] < freed_at]
    assert not silent
    assert any(at > freed_at for _, _, at in begun(tmp_path)), "it was over before the lease was"
    assert set(told["stats"].values()) == {1}


@pytest.mark.parametrize("store", [pytest.param("blocked", marks=pytest.mark.slow), "failing"])
def test_without_renewals_another_takes_over_and_the_first_one_stops(
    own: Play, tmp_path: Path, store: str
) -> None:
    """B107."""
    driver = own("drive", flow="wide fan", lease=LEASE, store=store)
    until(lambda: len(begun(tmp_path)) == 5)
    (tmp_path / "blocked").touch()
    taker = own("take_over", flow="wide fan", lease=30)
    until(lambda: any(pid == taker.pid for _, pid, _ in begun(tmp_path)))
    taken_at = next(at for _, pid, at in begun(tmp_path) if pid == taker.pid)
    told = taker.wait().told
    assert told["status"] == "completed"
    (tmp_path / "blocked").unlink()
    ended = driver.wait()
    assert ended.told["error"] == "LeaseLost", ended.told
    late = [each for each in begun(tmp_path) if each[1] == driver.pid and each[2] > taken_at]
    assert not late
    assert set(completions(tmp_path).values()) == {1}


def test_a_database_that_is_locked_for_longer_than_the_lease_costs_nothing(own: Play, tmp_path: Path) -> None:
    """B107, B113: no renewal and no commit comes through; then all of it does."""
    driver = own("drive", flow="wide fan", lease=LEASE)
    until(lambda: len(begun(tmp_path)) == 5)
    locker = own("lock", seconds=3 * LEASE)
    told = driver.wait().told
    locker.wait()
    assert told["status"] == "completed", told
    assert len(begun(tmp_path)) == 33
    assert set(told["stats"].values()) == {1}


def test_a_body_that_blocks_the_loop_keeps_the_lease(own: Play, tmp_path: Path) -> None:
    """B85, B113: for four leases; others are refused all the while, and no attempt is used up."""
    driver = own("drive", flow="blocking", lease=0.3)
    until(lambda: len(begun(tmp_path)) == 1)
    found = own("pester", flow="blocking").wait().told
    told = driver.wait().told
    assert told["status"] == "completed"
    assert told["stats"] == {"hogs": 1, "goes_on": 1}
    assert found.pop("RunLocked") > 20
    assert found == {"completed []": 1}
    assert [path for path, _, _ in begun(tmp_path)] == ["hogs", "goes_on"]


# -- who is dead -----------------------------------------------------------------------------------------


def dead_owner(own: Play, folder: Path) -> None:
    """Leave a run whose owner was killed, its lease far from over."""
    driver = own("drive", flow="line", lease=600)
    until(lambda: len(begun(folder)) == 2)
    driver.kill()
    driver.wait()


def change_session(folder: Path, sql: str, *values: object) -> None:
    with contextlib.closing(sqlite3.connect(folder / "runs.db", isolation_level=None)) as conn:
        assert conn.execute(sql, values).rowcount >= 1


@pytest.mark.parametrize("what", ["its row is gone", "its number is another's now"])
def test_the_run_of_a_dead_process_is_free_at_once(own: Play, tmp_path: Path, what: str) -> None:
    """B101: identity is a session's, never a number or a name."""
    dead_owner(own, tmp_path)
    if what == "its row is gone":
        change_session(tmp_path, "DELETE FROM dagresume_sessions")
    else:
        change_session(tmp_path, "UPDATE dagresume_sessions SET pid = ?", os.getpid())
    told = own("take_over", flow="line", lease=LEASE).wait(10).told
    assert told["status"] == "completed"
    assert told["reused"] == ["a"]


def test_a_process_whose_row_was_deleted_renews_itself_and_goes_on(own: Play, tmp_path: Path) -> None:
    """B101 (1): somebody has cleared its session away although it lives; nobody took its run."""
    driver = own("drive", flow="line", lease=LEASE)
    until(lambda: len(begun(tmp_path)) == 2)
    change_session(tmp_path, "DELETE FROM dagresume_sessions")
    told = driver.wait().told
    assert told["status"] == "completed"
    assert set(completions(tmp_path).values()) == {1}


PROGRAM = """
import asyncio, sys
from tests.crash.owning import drive
asyncio.run(drive("line", 600))
"""


def spawn(folder: Path, *before: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen([*before, sys.executable, "-c", PROGRAM], cwd=folder, env=environment)


def test_a_zombie_is_dead(own: Play, tmp_path: Path) -> None:
    process = spawn(tmp_path)
    until(lambda: len(begun(tmp_path)) == 2)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    try:
        assert own("take_over", flow="line", lease=LEASE).wait(10).told["status"] == "completed"
    finally:
        process.wait()


def can_unshare() -> bool:
    try:
        done = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True)
    except FileNotFoundError:
        return False
    return done.returncode == 0


@pytest.mark.skipif(sys.platform != "linux" or not can_unshare(), reason="cannot make a pid namespace")
def test_of_a_process_in_another_container_only_the_lease_counts(own: Play, tmp_path: Path) -> None:
    """One machine, one boot id, another pid namespace: its process number means nothing here."""
    process = spawn(tmp_path, "unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    until(lambda: len(begun(tmp_path)) == 2)
    process.kill()
    process.wait()
    ((pid, namespace),) = rows(tmp_path, "SELECT pid, pid_ns FROM dagresume_sessions")
    assert pid < 10
    assert namespace != Path("/proc/self/ns/pid").stat().st_ino
    assert set(own("refused_once", flow="line").wait().told) == {"RunLocked"}
    change_session(tmp_path, "UPDATE dagresume_sessions SET expires_at = 1 WHERE pid_ns = ?", namespace)
    assert own("take_over", flow="line", lease=LEASE).wait(10).told["status"] == "completed"


# -- cancelled from elsewhere ----------------------------------------------------------------------------


def check_cancelled(folder: Path, told: dict[str, Any]) -> str:
    """It is cancelled, or had completed; what returned is kept, and nothing is under way."""
    state = autopsy(folder / "runs.db")
    assert state.status in {"cancelled", "completed"}, state
    if state.status == "completed":
        assert told["status"] == "completed", told
    else:
        assert told["error"] == "RunCancelled", told
        assert "ann" in told["message"] or "cancelled" in told["message"]
    assert rows(folder, "SELECT owner FROM dagresume_runs") == [(None,)]
    file = folder / "returned.log"
    returned = file.read_text().split() if file.exists() else []
    assert state.completed == set(returned), "what returned is not what is kept"
    assert not {path for path, (kind, _) in state.last.items() if kind == "node.started"}
    assert max(Counter(path for path, _, _ in begun(folder)).values()) == 1
    return str(state.status)


def cancel_at(nursery: Zygote, folder: Path, seconds: float) -> str:
    """Cancel a run from another process after so long; gives how it ended."""
    folder.mkdir()
    driver = nursery.call("tests.crash.owning:drive", folder, flow="steps", lease=30)
    until(lambda: (folder / "world.log").exists())
    other = nursery.call("tests.crash.owning:cancel_later", folder, seconds=seconds)
    ended, done = driver.wait(), other.wait()
    assert ended.error is None, ended.error
    assert done.error is None, done.error
    return check_cancelled(folder, ended.told)


def cancel_or_go_on(nursery: Zygote, folder: Path) -> str:
    """Let one process cancel a dead one's run at the moment at which another goes on with it."""
    folder.mkdir()
    owner = nursery.call("tests.crash.owning:drive", folder, flow="steps", lease=30)
    until(lambda: len(begun(folder)) >= 4)
    owner.kill()
    owner.wait()
    (folder / "world.log").unlink()
    before = autopsy(folder / "runs.db").completed
    (folder / "returned.log").write_text("\n".join([*before, ""]))
    play = "tests.crash.owning:at_the_gate"
    goes_on, cancels = (nursery.call(play, folder, what=what) for what in ("resume", "cancel"))
    until(lambda: (folder / "ready.log").exists() and len((folder / "ready.log").read_text().split()) == 2)
    (folder / "gate").touch()
    ended, done = goes_on.wait(), cancels.wait()
    assert ended.error is None, ended.error
    assert done.error is None, done.error
    state = autopsy(folder / "runs.db")
    if ended.told.get("status") == "completed" and state.status == "completed" and not begun(folder):
        return "completed"
    return check_cancelled(folder, ended.told) if begun(folder) else "cancelled first"


def test_a_run_is_cancelled_from_another_process_while_its_nodes_end(nursery: Zygote, tmp_path: Path) -> None:
    """C5, B16."""
    assert cancel_at(nursery, tmp_path / "early", 0.0) == "cancelled"
    cancel_or_go_on(nursery, tmp_path / "both")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_is_cancelled_from_another_process_at_any_moment(nursery: Zygote, tmp_path: Path) -> None:
    rng = random.Random(4)
    ended = Counter(cancel_at(nursery, tmp_path / f"c{n}", rng.uniform(0, 0.3)) for n in range(60))
    raced = Counter(cancel_or_go_on(nursery, tmp_path / f"r{n}") for n in range(60))
    print(f"\n60 cancels while it ran: {dict(ended)}; 60 cancels as another went on with it: {dict(raced)}")


def test_every_flow_is_stopped_somewhere() -> None:
    assert set(FIRST) | {"blocking", "wide fan", "steps", "undoable"} == set(FLOWS)
