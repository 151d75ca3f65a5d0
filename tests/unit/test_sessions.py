"""Whether a session lives: by its lease, and by its process where that can be told."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dagresume.sessions import is_alive, this_machine, this_session
from dagresume.store import Session

NOW, LEASE = 1_000_000, 500_000
linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


def of_process(pid: int) -> Session:
    """The session that the process `pid` would have."""
    mine = this_session(NOW, LEASE)
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return mine._replace(pid=pid, pid_started=int(stat[19]))


def test_a_session_is_of_this_process_and_unique() -> None:
    """B101: identity is a fresh uuid, never the host's name or the process number alone."""
    one, two = this_session(NOW, LEASE), this_session(NOW, LEASE)
    assert one.uuid != two.uuid
    assert one._replace(uuid="") == two._replace(uuid="")
    assert (one.pid, one.started_at, one.expires_at) == (os.getpid(), NOW, NOW + LEASE)
    assert one[1:4] == this_machine()


def test_it_lives_as_long_as_its_lease() -> None:
    session = this_session(NOW, LEASE)
    assert is_alive(session, NOW)
    assert is_alive(session, NOW + LEASE)
    assert not is_alive(session, NOW + LEASE + 1)


@linux
def test_it_is_dead_at_once_when_its_process_is() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    session = of_process(child.pid)
    assert is_alive(session, NOW)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{child.pid}").exists(), "it should be a zombie now"
    assert not is_alive(session, NOW)
    child.communicate()
    assert not is_alive(session, NOW)


@linux
def test_another_process_with_its_number_is_not_it() -> None:
    session = this_session(NOW, LEASE)
    assert session.pid_started is not None
    assert not is_alive(session._replace(pid_started=session.pid_started - 1), NOW)


@linux
def test_a_process_may_be_called_anything(tmp_path: Path) -> None:
    program = tmp_path / "a) Z 1 (b"
    shutil.copy(shutil.which("cat") or "", program)
    child = subprocess.Popen([program], stdin=subprocess.PIPE)
    session = of_process(child.pid)
    assert is_alive(session, NOW)
    child.kill()
    child.communicate()
    assert not is_alive(session, NOW)


@linux
@pytest.mark.parametrize(
    "elsewhere",
    [{"host": "elsewhere"}, {"boot_id": "x"}, {"boot_id": None}, {"pid_ns": 1}, {"pid_ns": None}],
)
def test_of_a_process_elsewhere_only_the_lease_counts(elsewhere: dict[str, object]) -> None:
    session = this_session(NOW, LEASE)._replace(pid=2**22 + 1, **elsewhere)  # type: ignore[arg-type]
    assert is_alive(session, NOW)
    assert not is_alive(session, NOW + LEASE + 1)


def test_where_nothing_can_be_read_only_the_lease_counts(tmp_path: Path) -> None:
    session = this_session(NOW, LEASE, proc=tmp_path)
    assert (session.boot_id, session.pid_ns, session.pid_started) == (None, None, None)
    dead = session._replace(pid=2**22 + 1)
    assert is_alive(dead, NOW, proc=tmp_path)
    assert is_alive(dead, NOW)
    assert not is_alive(dead, NOW + LEASE + 1)


@linux
def test_a_process_that_is_hidden_from_us_is_not_dead(tmp_path: Path) -> None:
    """With hidepid the files of others cannot be read; the process answers to its number all the same."""
    for name in ("sys/kernel/random/boot_id", "self/ns/pid"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("x")
    session = this_session(NOW, LEASE, proc=tmp_path)._replace(pid_started=7)
    assert is_alive(session, NOW, proc=tmp_path)
    assert not is_alive(session._replace(pid=2**22 + 1), NOW, proc=tmp_path)
