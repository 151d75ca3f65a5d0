"""The comparison with other engines, tried on scripts that stand for an engine: no engine and no network."""

import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.peers.__main__ import (
    DAGRESUME,
    Kept,
    Peer,
    PeerFailed,
    Stand,
    interleaved,
    measured,
    once,
    row,
)
from benchmarks.peers.disk import PerStep, Seen, seen, waits

KEEPS = """
import sys
sys.path.insert(0, {harness!r})
from pathlib import Path
import harness
LOG = {log}
async def run(work, steps, folder, again):
    done = len((folder / "log").read_text()) if (folder / "log").exists() else 0
    for number in range(done, steps):
        harness.step(number)
        if LOG:
            with (folder / "log").open("a") as log: log.write(".")
    if work == "fanout":
        harness.last(steps)
    return steps * {us} / 1e6
harness.main("no such package", run)
"""
Script = Callable[[str], Peer]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    def make(text: str) -> Peer:
        file = tmp_path / f"{len(list(tmp_path.glob('*.py')))}.py"
        file.write_text(text, encoding="utf-8")
        return Peer(file.stem, str(file), "", 3)

    return make


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    monkeypatch.setattr(peers, "CHAIN", 5)
    monkeypatch.setattr(peers, "KEPT", 4)
    monkeypatch.setattr(shutil, "which", lambda _name: None)  # nothing is traced
    return Stand(tmp_path, tmp_path)


def keeping(*, us: float, log: bool = True) -> str:
    return KEEPS.format(harness=str(peers.HERE), us=us, log=log)


def test_the_ratio_is_of_pairs_and_a_peer_that_loses_steps_counts_for_no_goal(
    script: Script, stand: Stand
) -> None:
    ours, slow, careless = (
        script(keeping(us=10)),
        script(keeping(us=400)),
        script(keeping(us=80, log=False)),
    )
    rows, failures = measured(stand, [slow, careless], 2, ours)
    assert failures == []
    assert [(each.work.split()[0], round(each.measured.median, 6), each.rounds) for each in rows] == [
        ("chain", 0.025, 2),
        ("chain", 0.125, 2),
        ("fanout", 0.025, 2),
        ("fanout", 0.125, 2),
    ]
    assert "0 in a chain and 0 in a fanout ran again" in rows[0].durability
    assert "40.0 times as fast" in rows[0].note
    assert "no goal" not in rows[0].note
    assert "4 in a chain and 4 in a fanout ran again" in rows[1].durability
    assert "counts for no goal" in rows[1].note
    assert [each.met for each in rows] == [True, None, False, None]
    assert [each.counts for each in rows] == [True, False, True, False]


def test_a_peer_that_fails_is_told_with_its_last_line_and_the_others_are_measured(
    script: Script, stand: Stand
) -> None:
    ours, bad = script(keeping(us=10)), script("raise SystemExit('first\\nno such engine')")
    good = script(keeping(us=100))
    rows, failures = measured(stand, [bad, good], 1, ours)
    assert {each.against.split()[0] for each in rows} == {good.name}
    assert [(each.work, each.against) for each in failures] == [
        ("kill and resume", bad.name),
        ("chain of 5", bad.name),
        ("fanout of 3", bad.name),
    ]
    assert all(each.error.endswith("no such engine") for each in failures)


def test_a_peer_that_failed_in_a_later_round_has_no_row(script: Script, stand: Stand) -> None:
    flag = stand.folder / "flag"
    bad = script(
        f"from pathlib import Path; p = Path({str(flag)!r})\n"
        "if p.exists(): raise SystemExit('the second time')\n"
        "p.touch(); print('{\"us\": 1}')"
    )
    samples, failures = interleaved(stand, (bad,), "chain", 3)
    assert samples == {}
    assert [str(each) for each in failures] == [f"{bad.name}, chain of 5: exit 1: the second time"]


def test_a_peer_that_does_not_end_is_ended_with_what_it_started(tmp_path: Path) -> None:
    """The child has the pipe too: were it left alive, reading the pipe to its end would wait for it."""
    text = (
        "import os, signal, subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "signal.pause()"
    )
    with pytest.raises(PeerFailed, match=r"more than 0\.5 s"):
        once([sys.executable, "-c", text], {}, patience=0.5)


@pytest.mark.parametrize("text", ["", "print('not JSON')"])
def test_a_peer_that_tells_no_figure_has_failed(text: str) -> None:
    with pytest.raises(PeerFailed, match="exit 0: it said nothing"):
        once([sys.executable, "-c", text], {})


def test_a_server_has_a_goal_of_its_own_for_the_chain_alone() -> None:
    server = Peer("it", "", "", 10, embedded=False)
    told = [{"us": 1.0, "version": "1", "python": "3"}]
    goals = [row(work, server, told, told, Kept({})).limit for work in ("chain", "fanout")]
    assert goals == [0.25, 0.02]


RECORD = """\
7 fsync(5</d/it.db-journal>) = 0
7 fdatasync(5</d/it.db-wal> <unfinished ...>
8 fsync(6</d/it.db>) = 0
7 <... fdatasync resumed>) = 0
8 fsync(9</d>) = 0
"""


def test_each_call_is_counted_once_by_the_kind_of_its_file() -> None:
    assert waits(RECORD) == {"-journal": 1, "-wal": 1, ".db": 1, "other": 1}


@pytest.mark.parametrize(
    ("journal", "synchronous", "calls"),
    [
        ("delete", "full", {"-journal": 2.0, ".db": 1.0}),
        ("delete", "normal", {"-journal": 1.0, ".db": 1.0}),
        ("delete", "off", {}),
        ("wal", "full", {"-wal": 1.0}),
        ("wal", "normal", {"-wal": 0.01}),
    ],
)
def test_the_setting_is_read_from_what_was_done(
    journal: str, synchronous: str, calls: dict[str, float]
) -> None:
    none = Seen({}, journal == "wal")
    long = Seen({kind: int(each * 100) for kind, each in calls.items()}, journal == "wal", 100)
    found = PerStep.between(none, long, 100)
    assert found.synchronous.startswith(synchronous.upper())
    assert found.total == pytest.approx(sum(calls.values()))


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_the_journal_mode_and_the_commits_are_read_from_the_database(tmp_path: Path, journal: str) -> None:
    def made(commits: int) -> Seen:
        file = tmp_path / str(commits) / "it.db"
        file.parent.mkdir()
        with closing(sqlite3.connect(file, isolation_level=None)) as connection:
            connection.execute(f"PRAGMA journal_mode = {journal}")
            connection.execute("CREATE TABLE t (x)")
            for _ in range(commits):
                connection.execute("INSERT INTO t VALUES (1)")
        return seen("", file.parent)

    few, many = made(2), made(12)
    assert many.wal is (journal == "wal")
    if journal == "delete":
        assert PerStep.between(few, many, 10).commits == 1.0


def test_an_engine_without_sqlite_is_said_to_have_none(tmp_path: Path) -> None:
    assert str(PerStep.between(Seen({}, None), seen(RECORD, tmp_path), 4)) == (
        "no SQLite of its own, 1.00 fsyncs a step"
    )
    assert DAGRESUME.embedded
