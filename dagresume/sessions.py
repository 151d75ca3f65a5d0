"""Who we are, and whether a process that owned something still lives.

A session is dead when its lease is over, or at once when host, boot id and pid namespace are ours and no
process with that pid and start time exists (a zombie is dead). Where one of these cannot be read, only the
lease counts.
"""

from __future__ import annotations

import os
import platform
import uuid
from pathlib import Path
from typing import Final, NamedTuple

from dagresume.store import Session

__all__ = ["Machine", "closed", "is_alive", "this_machine", "this_session"]

_PROC: Final = Path("/proc")
_closed: Final[set[str]] = set()


class Machine(NamedTuple):
    """Where process numbers mean the same thing: None is what cannot be read here."""

    host: str
    boot_id: str | None
    pid_ns: int | None


def this_machine(proc: Path = _PROC) -> Machine:
    """Give the machine (or container) this process runs on."""
    return Machine(platform.node(), _read(proc / "sys/kernel/random/boot_id"), _inode(proc / "self/ns/pid"))


def this_session(now: int, lease: int, proc: Path = _PROC) -> Session:
    """Give a fresh session of this process, its lease `lease` microseconds long."""
    machine = this_machine(proc)
    pid = os.getpid()
    return Session(uuid.uuid4().hex, *machine, pid, _started(pid, proc), now, now + lease)


def closed(uuid: str) -> None:
    """Note that a session of this process is over, although it could not be said where it is kept (the disk
    was full): so this process need not wait for the end of its lease.
    """
    _closed.add(uuid)


def is_alive(session: Session, now: int, proc: Path = _PROC) -> bool:
    """Say whether this session still lives, as far as can be told from here."""
    if session.expires_at < now or session.uuid in _closed:
        return False
    here = this_machine(proc)
    comparable = None not in (here.boot_id, here.pid_ns, session.pid_started)
    if not comparable or here != Machine(session.host, session.boot_id, session.pid_ns):
        return True
    return _runs(session, proc)


def _runs(session: Session, proc: Path) -> bool:
    """Say whether the very process runs. What is hidden from us (hidepid) is no proof of death."""
    try:
        os.kill(session.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    stat = _stat(session.pid, proc)
    return stat is None or (stat[0] not in "ZXx" and int(stat[19]) == session.pid_started)


def _started(pid: int, proc: Path) -> int | None:
    stat = _stat(pid, proc)
    return int(stat[19]) if stat else None


def _stat(pid: int, proc: Path) -> list[str] | None:
    """Give the fields of a process behind its name (which may hold spaces): state is 0, start time is 19."""
    text = _read(proc / str(pid) / "stat")
    return text.rpartition(")")[2].split() if text else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None
