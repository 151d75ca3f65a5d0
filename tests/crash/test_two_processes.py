"""B106, B109: two processes and one run."""

import json
import signal
import sqlite3
from collections import Counter
from pathlib import Path

from dagresume.testing import autopsy
from tests.crash.conftest import Play, until
from tests.crash.flows import world

LEASE = {"lease_seconds": 0.6}


def test_a_process_that_slept_through_its_lease_stops(play: Play, tmp_path: Path) -> None:
    """B106: another takes the run; the sleeper's next write is refused and it fires no further edge."""
    sleeper = play("go", flow="patient", options=LEASE)
    until(lambda: len(world(tmp_path)) == 2)
    sleeper.kill(signal.SIGSTOP)
    refused = play("go", flow="patient", how="resume").wait().told
    assert refused["error"] == "RunLocked"
    assert str(sleeper.pid) in refused["message"]
    ended = play("wait_to_take_over", flow="patient", options=LEASE).wait().told
    assert ended["executed"] == ["b", "c", "d"]
    assert ended["reused"] == ["a"]
    lines = world(tmp_path)
    sleeper.kill(signal.SIGCONT)
    assert sleeper.wait().told["error"] == "LeaseLost"
    assert world(tmp_path) == lines
    assert Counter(line.split()[0] for line in lines) == {"a": 1, "b": 2, "c": 1, "d": 1}
    state = autopsy(tmp_path / "runs.db")
    assert state.status == "completed"
    assert state.completed == {"a", "b", "c", "d"}
    with sqlite3.connect(tmp_path / "runs.db") as conn:
        runs = conn.execute("SELECT epoch, owner FROM dagresume_runs").fetchall()
    conn.close()
    assert runs == [(2, None)]


def test_a_process_that_wakes_while_the_other_works_stops(play: Play, tmp_path: Path) -> None:
    """B106: both alive at once; nothing begins twice but what was under way."""
    sleeper = play("go", flow="patient", options=LEASE)
    until(lambda: len(world(tmp_path)) == 2)
    sleeper.kill(signal.SIGSTOP)
    other = play("wait_to_take_over", flow="patient", options=LEASE)
    until(lambda: len(world(tmp_path)) == 3)
    sleeper.kill(signal.SIGCONT)
    assert sleeper.wait().told["error"] == "LeaseLost"
    assert other.wait().told["status"] == "completed"
    begun = Counter(tuple(line.split()) for line in world(tmp_path))
    mine = {path for path, pid in begun if pid == str(sleeper.pid)}
    assert mine == {"a", "b"}
    assert sum(begun.values()) == 5


def test_one_key_makes_one_run_whoever_starts_it(play: Play, tmp_path: Path) -> None:
    """B109: four processes, each ten times at once."""
    children = [play("start_ten", flow="patient") for _ in range(4)]
    told = [json.loads(json.dumps(child.wait().told)) for child in children]
    assert len({run_id for each in told for run_id in each["runs"]}) == 1
    assert sum(each["started"] for each in told) >= 1
    with sqlite3.connect(tmp_path / "runs.db") as conn:
        assert conn.execute("SELECT count(*) FROM dagresume_runs").fetchone() == (1,)
    conn.close()
    assert Counter(line.split()[0] for line in world(tmp_path)) == {"a": 1, "b": 1, "c": 1, "d": 1}
