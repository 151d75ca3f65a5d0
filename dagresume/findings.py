"""What is found when a database is looked at, as data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

__all__ = ["Finding", "Severity", "in_bytes", "note", "problem", "size_of", "sound"]


class Severity(StrEnum):
    """`problem`: something needs you. `note`: good to know, nothing has to be done."""

    PROBLEM = "problem"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found. `where`: the file, the run or the path; `cure`: what mends it, often a
    command in backticks. `kind`: file, locked, database, schema, integrity, output, blob, orphan, projection,
    run, session, log, file_system, space or permissions.
    """

    kind: str
    severity: Severity
    where: str
    text: str
    cure: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.text}{f' {self.cure}' if self.cure else ''}"


def problem(kind: str, where: str, text: str, cure: str = "") -> Finding:
    """Make a finding that needs somebody."""
    return Finding(kind, Severity.PROBLEM, where, text, cure)


def note(kind: str, where: str, text: str, cure: str = "") -> Finding:
    """Make a finding that needs nobody."""
    return Finding(kind, Severity.NOTE, where, text, cure)


def sound(findings: Iterable[Finding]) -> bool:
    """Say whether none of this needs anybody."""
    return all(finding.severity is not Severity.PROBLEM for finding in findings)


def size_of(path: str | Path) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0


def in_bytes(count: int) -> str:
    size = float(count)
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
