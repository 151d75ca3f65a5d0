"""The model as the screening sees it: one verb, three tasks, and answers that are checked first.

`screening_openai` and `screening_local` are the two behind `Model`. Errors say by their class what to do:

    RetryAfter (of dagresume)   busy: the whole limit pauses for as long as the other side asks
    ModelUnavailable            a fault that may pass: try again with back-off
    BadAnswer                   it answered, but not what was asked: try again
    ModelRefused                it will never accept this: fail at once, a person must look
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Generic, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dagresume.examples.screening_values import Verdict

MAX_LETTERS = 30_000
"""A longer résumé is cut before it is sent: nobody wants to pay for an appendix of 400 pages."""


class ModelUnavailable(Exception):
    """The model could not be reached, broke down, or stopped in the middle of its answer."""


class BadAnswer(Exception):
    """The model's answer is not the JSON it was asked for."""


class ModelRefused(Exception):
    """The model rejects the request itself (key, quota, size); trying again would change nothing."""


# -- tasks and their answers ----------------------------------------------------------------------------

Sentence = Annotated[str, Field(min_length=1, max_length=2000)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Marks(_Strict):
    """The answer to SCORE."""

    points: Annotated[int, Field(ge=0, le=100)]
    reason: Sentence


class Assessment(_Strict):
    """The answer to EVALUATE."""

    verdict: Verdict
    strengths: Annotated[list[Sentence], Field(max_length=20)]
    gaps: Annotated[list[Sentence], Field(max_length=20)]


class Questions(_Strict):
    """The answer to SUGGEST."""

    questions: Annotated[list[Sentence], Field(min_length=1, max_length=20)]


A = TypeVar("A", bound=BaseModel)


@dataclass(frozen=True)
class Task(Generic[A]):
    """Something the model can be asked for, and the shape its answer must have."""

    name: str
    instruction: str
    answer: type[A]


SCORE = Task(
    "score",
    "Say how well the résumé fits the job. Answer with one JSON object:"
    ' {"points": whole number from 0 (not at all) to 100 (perfectly), "reason": one sentence}.',
    Marks,
)
EVALUATE = Task(
    "evaluate",
    "Evaluate the résumé against each demand of the job. Answer with one JSON object:"
    ' {"verdict": "invite", "hold" or "decline", "strengths": [short sentences], "gaps": [short sentences]}.',
    Assessment,
)
SUGGEST = Task(
    "suggest",
    "From this evaluation, suggest at most five interview questions that would settle what is still open."
    ' Answer with one JSON object: {"questions": [one sentence each]}.',
    Questions,
)


# -- asking ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: `path` names the node that asks, `key` is the same for every try of it."""

    task: str
    instruction: str
    job: str
    text: str
    path: str
    key: str


@dataclass(frozen=True, slots=True)
class Completion:
    """The model's answer as it came (it should be JSON) and what it cost in tokens."""

    text: str
    tokens_in: int = 0
    tokens_out: int = 0


class Model(Protocol):
    """Anything that answers an `Ask`."""

    async def complete(self, ask: Ask) -> Completion: ...


def request(task: Task[A], *, job: str, text: str, path: str, key: str) -> Ask:
    """Make the `Ask` for a task; the text is cut at `MAX_LETTERS`."""
    return Ask(task.name, task.instruction, job, text[:MAX_LETTERS], path, key)


def read(task: Task[A], completion: Completion) -> A:
    """Give the checked answer; `BadAnswer` says what is wrong with it, without quoting it."""
    try:
        return task.answer.model_validate_json(completion.text)
    except ValidationError as error:
        raise BadAnswer(f"the model's answer to {task.name!r} is no use: {first_problem(error)}") from None


def first_problem(error: ValidationError) -> str:
    """Say the first thing wrong with a value, and where, but not the value: it may hold private data."""
    first = error.errors(include_input=False, include_url=False)[0]
    place = ".".join(map(str, first["loc"])) or "as a whole"
    return f"{place}: {first['msg']}"


# -- counting -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted:
    """A model that writes a line for every answer, so that calls can be counted outside the store."""

    model: Model
    ledger: Path

    async def complete(self, ask: Ask) -> Completion:
        completion = await self.model.complete(ask)
        append_line(self.ledger, json.dumps({"task": ask.task, "path": ask.path, "key": ask.key}))
        return completion


def append_line(file: Path, line: str) -> None:
    """Append one line in one write: lines of several processes never mix, and a kill leaves none halved."""
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


def read_ledger(file: Path) -> list[dict[str, str]]:
    """Give the calls written so far, without a line only half there; none if there is no ledger yet."""
    if not file.exists():
        return []
    whole, _, _ = file.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]
