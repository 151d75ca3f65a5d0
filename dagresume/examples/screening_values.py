"""What the nodes of the résumé screening hand to each other.

They are in a module of their own because `python -m …resume_screening` is called `__main__` while it runs:
the type of a stored value should have the same name in every process that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["invite", "hold", "decline"]


@dataclass(frozen=True, slots=True)
class Resume:
    """One PDF as text; `text` is empty when the file holds pictures only. `name` is its first line."""

    path: str
    name: str
    text: str
    pages: int


@dataclass(frozen=True, slots=True)
class Score:
    """How well a résumé fits the job: `points` from 0 to 100."""

    path: str
    name: str
    points: int
    reason: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """A résumé that was good enough for the detailed evaluation."""

    resume: Resume
    score: Score


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The second, closer look."""

    path: str
    name: str
    verdict: Verdict
    strengths: list[str]
    gaps: list[str]


@dataclass(frozen=True, slots=True)
class Interview:
    """What to ask somebody who is invited."""

    path: str
    name: str
    questions: list[str]
