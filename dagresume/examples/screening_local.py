"""A stand-in for the model that costs nothing: it compares words and years, the same way in every process."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re

from dagresume.examples.screening_model import Ask, Completion

WORD = re.compile(r"[^\W\d_][\w+#]*")
SPAN = re.compile(r"\b((?:19|20)\d\d)\s*[-–—]\s*((?:19|20)\d\d)\b")
ASKED_YEARS = re.compile(r"\b(\d{1,2})\+?\s+years\b")
FILLERS = """about after and are built for from have know least more must not only our own read that the them
they this what when which who with work years you your"""
COMMON = frozenset(FILLERS.split())
ENOUGH = 0.5
"""The share of a job's words that counts as a full match: no résumé repeats the whole advertisement."""


class LocalModel:
    """Answers the three tasks after 20 to 40 milliseconds, which stand for a model's latency."""

    async def complete(self, ask: Ask) -> Completion:
        await asyncio.sleep(latency(ask.text))
        return Completion(json.dumps(ANSWERS[ask.task](ask.job, ask.text), ensure_ascii=False))


def latency(text: str) -> float:
    """Give 0.02 to 0.04 seconds; from a digest, since `hash()` of a text differs between processes."""
    return 0.02 + hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[0] / 255 * 0.02


def words(text: str) -> set[str]:
    """Give the telling words of a text, in small letters."""
    return {word for word in map(str.casefold, WORD.findall(text)) if len(word) > 2} - COMMON


def years(text: str) -> int:
    """Give the years between the first and the last year named in spans such as 2019 – 2026."""
    spans = [(int(first), int(last)) for first, last in SPAN.findall(text)]
    return max((last for _, last in spans), default=0) - min((first for first, _ in spans), default=0)


def asked_years(job: str) -> int:
    """Give the highest number of years a job description asks for."""
    return max(map(int, ASKED_YEARS.findall(job)), default=0)


def points(job: str, text: str) -> int:
    """Give 0 to 100: four fifths for words in common, one fifth for years."""
    wanted, needed = words(job), asked_years(job)
    if not wanted:
        return 0
    skill = min(1.0, len(wanted & words(text)) / len(wanted) / ENOUGH)
    time = min(1.0, years(text) / needed) if needed else 1.0
    return round(80 * skill + 20 * time)


def _score(job: str, text: str) -> dict[str, object]:
    common = ", ".join(sorted(words(job) & words(text))) or "nothing"
    return {"points": points(job, text), "reason": f"In common with the job: {common}; {years(text)} years."}


def _evaluate(job: str, text: str) -> dict[str, object]:
    wanted, has, total = words(job), words(text), points(job, text)
    return {
        "verdict": "invite" if total >= 70 else "hold" if total >= 40 else "decline",
        "strengths": sorted(wanted & has)[:5],
        "gaps": sorted(wanted - has)[:5],
    }


def _suggest(job: str, text: str) -> dict[str, object]:
    gaps = [line.removeprefix("gap: ") for line in text.splitlines() if line.startswith("gap: ")]
    asked = [f"Your résumé does not mention “{gap}”. Where have you met it?" for gap in gaps]
    return {"questions": [*asked[:4], "Which failure taught you most, and what did you change after it?"]}


ANSWERS = {"score": _score, "evaluate": _evaluate, "suggest": _suggest}
