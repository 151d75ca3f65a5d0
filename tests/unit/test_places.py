"""Where a file lies, and who has it open."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dagresume import Engine, places
from dagresume.doctor import Severity, examine
from dagresume.places import FileSystem, file_system, lock_holders, openers
from tests.contract.patients import run

MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:40 / /mnt/team rw,relatime - nfs4 host:/export rw
31 22 0:41 / /mnt/team/local rw,relatime - ext4 /dev/vdb rw
32 22 0:42 / /mnt/with\\040blank rw shared:9 master:2 - fuse.sshfs me@host: rw
33 22 0:43 / /mnt/twice rw - ext4 /dev/vdc rw
34 22 0:44 / /mnt/twice rw - cifs //host/share rw
35 22 0:45 / /tmpfs rw - tmpfs none rw
36 22 0:46 / /layer rw - overlay overlay rw
37 22 0:47 / /c rw - 9p drvfs rw
38 22 0:48 / /ntfs rw - fuseblk /dev/vdd rw
"""


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "mountinfo").write_text(MOUNTS)
    return tmp_path / "proc"


@pytest.mark.parametrize(
    ("path", "kind", "mount", "network"),
    [
        ("/runs.db", "ext4", "/", False),
        ("/mnt/team/runs.db", "nfs4", "/mnt/team", True),
        ("/mnt/teams/runs.db", "ext4", "/", False),
        ("/mnt/team/local/deep/runs.db", "ext4", "/mnt/team/local", False),
        ("/mnt/with blank/runs.db", "fuse.sshfs", "/mnt/with blank", True),
        ("/mnt/twice/runs.db", "cifs", "/mnt/twice", True),
        ("/tmpfs/runs.db", "tmpfs", "/tmpfs", False),
        ("/layer/runs.db", "overlay", "/layer", False),
        ("/c/runs.db", "9p", "/c", True),
        ("/ntfs/runs.db", "fuseblk", "/ntfs", False),
    ],
)
def test_the_file_system_is_that_mounted_last_around_the_file(
    path: str, kind: str, mount: str, network: bool, proc: Path
) -> None:
    found = file_system(path, proc)
    assert found == FileSystem(kind, mount)
    assert found.network is network
    assert bool(found.warning) is network


def test_where_the_system_does_not_tell_nothing_is_known(tmp_path: Path) -> None:
    assert file_system("/runs.db", tmp_path) is None
    assert openers(tmp_path / "absent") == []
    assert lock_holders(tmp_path, 1, 2, tmp_path) == []


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_it_is_known_of_this_machine(tmp_path: Path) -> None:
    found = file_system(tmp_path)
    assert found is not None
    assert tmp_path.is_relative_to(found.mount)


def on(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Have all files lie on such a file system."""
    here = FileSystem(kind, "/mnt/team")
    for user in ("dagresume.sqlite", "dagresume.doctor"):
        monkeypatch.setattr(f"{user}.file_system", lambda path: here)


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p"])
async def test_an_engine_on_a_network_file_system_warns_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """B23."""
    on(monkeypatch, kind)
    db = tmp_path / "runs.db"
    with caplog.at_level(logging.WARNING, logger="dagresume"):
        for _ in range(3):
            await run(db, key="k")
    [warning] = [told for told in caplog.messages if str(db) in told]
    for word in (str(db), kind, "/mnt/team", "postgresql://", "local disk"):
        assert word in warning
    [finding] = [f for f in examine(db) if f.kind == "file_system"]
    assert finding.severity is Severity.PROBLEM
    assert kind in finding.text


async def test_a_local_disk_is_not_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for kind in ("ext4", "overlay", "tmpfs"):
        on(monkeypatch, kind)
        async with Engine(tmp_path / f"{kind}.db"):
            pass
        assert [f for f in examine(tmp_path / f"{kind}.db") if f.severity is Severity.PROBLEM] == []
    assert caplog.messages == []
    assert {f.kind for f in examine(tmp_path / "overlay.db")} >= {"file_system"}


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_who_has_a_file_open_and_locks_a_byte_of_it_is_found(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 200)
    program = """
import fcntl, sys
opened = open(sys.argv[1], "r+b")
fcntl.lockf(opened, fcntl.LOCK_SH if sys.argv[2] == "read" else fcntl.LOCK_EX, 3, 120)
print("locked", flush=True)
sys.stdin.read()
"""
    for how in ("read", "write"):
        command = [sys.executable, "-c", program, str(file), how]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "locked\n"
            try:
                [opener] = openers(file)
                assert opener.pid == other.pid
                assert str(opener).startswith(f"process {other.pid} ({sys.executable}")
                assert lock_holders(file, 122, 130) == [(opener, how == "write")]
                assert lock_holders(file, 123, 130) == lock_holders(file, 1, 119) == []
            finally:
                other.communicate()
    assert openers(file) == []
    assert places.Process.of(0, tmp_path) == (0, "")
    assert str(places.Process(4, "")) == "process 4"
    with file.open():
        assert openers(file) == [], f"we ({os.getpid()}) are not among them"
