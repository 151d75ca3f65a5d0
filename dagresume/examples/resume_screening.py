"""Screen a folder of résumés: parse each PDF, score it, look closer at the best, prepare interviews.

    pip install "dagresume[demo]"
    python -m dagresume.examples.resume_screening cvs/ --db screening.db --out results/

Kill it whenever you like and give the same command again: no résumé that has been scored is paid for twice.
With OPENAI_API_KEY (and OPENAI_BASE_URL, OPENAI_MODEL) set, a real model answers; without it, a local scorer.

    candidates ─→ parse[i] ─→ score[i] ─→ shortlist ─→ evaluate[j] ─→ suggest[j] ─→ rows ─→ table ─→ notify
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path

from pypdf import PdfReader

from dagresume import (
    NOT_DONE,
    Context,
    DagresumeError,
    Engine,
    ItemFailure,
    Limit,
    OwnershipError,
    RecoveryRefused,
    Retry,
    RunResult,
    Workflow,
)
from dagresume.examples.screening_local import LocalModel
from dagresume.examples.screening_model import (
    EVALUATE,
    SCORE,
    SUGGEST,
    A,
    Counted,
    Model,
    ModelRefused,
    Task,
    read,
    request,
)
from dagresume.examples.screening_openai import OpenAIModel
from dagresume.examples.screening_report import (
    Post,
    Row,
    make_mail,
    make_rows,
    table_bytes,
    table_key,
    write_whole,
)
from dagresume.examples.screening_values import Candidate, Evaluation, Interview, Resume, Score

JOB = """Senior Python engineer, durable workflows
You have at least 7 years with Python and asyncio. You know PostgreSQL and SQLite, Docker, Kubernetes and
Linux, you test with pytest, and have built idempotency, retries and recovery, not only read about them."""

LIMITS = {"llm": Limit(concurrency=8)}
MODEL_RETRY = Retry(attempts=6, delay=0.5, backoff=2, max_delay=30, jitter=0.2, never=(ModelRefused,))

workflow = Workflow("resume_screening", version="1")
"""Each node says itself whether it may run twice: `idempotent=True` where that changes nothing outside."""


def chosen_model(environ: Mapping[str, str]) -> Model:
    """Give the model the environment asks for; DAGRESUME_CALLS_FILE names a ledger of its answers."""
    model: Model = OpenAIModel.from_environment(environ) or LocalModel()
    ledger = environ.get("DAGRESUME_CALLS_FILE")
    return Counted(model, Path(ledger)) if ledger else model


async def ask(task: Task[A], ctx: Context, *, job: str, text: str) -> A:
    """Ask the model, check its answer, and book the tokens to the run."""
    question = request(task, job=job, text=text, path=ctx.path, key=ctx.idempotency_key)
    completion = await chosen_model(os.environ).complete(question)
    ctx.usage(tokens_in=completion.tokens_in, tokens_out=completion.tokens_out)
    return read(task, completion)


# -- the workflow ---------------------------------------------------------------------------------------


@workflow.node(idempotent=True)
def candidates(folder: str) -> list[str]:
    """List the PDFs. The list is stored: files that arrive during the run belong to the next one."""
    return sorted(str(file) for file in Path(folder).iterdir() if file.suffix.lower() == ".pdf")


@workflow.node(for_each={"path": "candidates"}, concurrency=4, tolerate=0.2, idempotent=True, timeout=60)
def parse(path: str) -> Resume:
    """Read one PDF, in a thread. A damaged one raises; up to a fifth is tolerated and reported at the end."""
    pages = PdfReader(path).pages
    text = plain_text("\n".join(page.extract_text() for page in pages))
    return Resume(path=path, name=text.split("\n", 1)[0][:80] or Path(path).stem, text=text, pages=len(pages))


def plain_text(extracted: str) -> str:
    """Give letters where a PDF holds glyphs: no ligatures, no joined Arabic forms, no control characters."""
    text = unicodedata.normalize("NFKC", extracted)
    return "".join(char for char in text if char == "\n" or unicodedata.category(char) != "Cc").strip()


@workflow.node(
    for_each={"resume": "parse"},
    concurrency=8,
    limit="llm",
    timeout=60,
    retry=MODEL_RETRY,
    idempotent=True,
)
async def score(resume: Resume, ctx: Context, job: str = JOB) -> Score | None:
    """Begin as soon as its own PDF is parsed. Paid, but a repetition changes nothing: idempotent."""
    if not resume.text:
        return None  # a scan: there is nothing to pay a model for
    marks = await ask(SCORE, ctx, job=job, text=resume.text)
    return Score(path=resume.path, name=resume.name, points=marks.points, reason=marks.reason)


@workflow.node(args={"resumes": "parse", "scores": "score"}, idempotent=True)
def shortlist(
    resumes: list[Resume | ItemFailure | None], scores: list[Score | ItemFailure | None], top: int = 10
) -> list[Candidate]:
    """Keep the `top` best; equal points stay in the order of the files."""
    scored = [
        Candidate(resume, score)
        for resume, score in zip(resumes, scores, strict=True)
        if isinstance(resume, Resume) and isinstance(score, Score)
    ]
    return sorted(scored, key=lambda one: one.score.points, reverse=True)[:top]


@workflow.node(
    for_each={"candidate": "shortlist"},
    concurrency=8,
    limit="llm",
    timeout=60,
    retry=MODEL_RETRY,
    idempotent=True,
)
async def evaluate(candidate: Candidate, ctx: Context, job: str = JOB) -> Evaluation:
    """Take the second, closer look."""
    resume = candidate.resume
    found = await ask(EVALUATE, ctx, job=job, text=resume.text)
    return Evaluation(resume.path, resume.name, found.verdict, list(found.strengths), list(found.gaps))


@workflow.node(
    for_each={"evaluation": "evaluate"},
    concurrency=8,
    limit="llm",
    timeout=60,
    retry=MODEL_RETRY,
    idempotent=True,
)
async def suggest(evaluation: Evaluation, ctx: Context, job: str = JOB) -> Interview:
    """Prepare the interview from what the evaluation left open."""
    lines = [f"verdict: {evaluation.verdict}"]
    lines += [f"strength: {one}" for one in evaluation.strengths] + [f"gap: {one}" for one in evaluation.gaps]
    found = await ask(SUGGEST, ctx, job=job, text="\n".join(lines))
    return Interview(evaluation.path, evaluation.name, list(found.questions))


@workflow.node(
    args={
        "files": "candidates",
        "resumes": "parse",
        "scores": "score",
        "evaluations": "evaluate",
        "interviews": "suggest",
    },
    idempotent=True,
    checkpoint=False,
)
def rows(
    files: list[str],
    resumes: list[Resume | ItemFailure | None],
    scores: list[Score | ItemFailure | None],
    evaluations: list[Evaluation],
    interviews: list[Interview],
) -> list[Row]:
    """Bring it all together. Pure and cheap, so it is not stored: a resume makes it again if it is needed."""
    return make_rows(files, resumes, scores, evaluations, interviews)


async def table_written(out: str, ctx: Context) -> object:
    """Tell whether a run that died at the table had already written it: the file carries the node's key."""
    file = Path(out, "screening.xlsx")
    written = await asyncio.to_thread(table_key, file) == ctx.idempotency_key
    return str(file) if written else NOT_DONE


@workflow.node(args={"listed": "rows"}, idempotent=False, reconcile=table_written)
def table(listed: list[Row], ctx: Context, out: str = ".") -> str:
    """Write the spreadsheet. People add remarks to it: written again, it would take them away."""
    file = Path(out, "screening.xlsx")
    write_whole(file, table_bytes(listed, key=ctx.idempotency_key))
    return str(file)


@workflow.node(args={"listed": "rows", "attachment": "table"}, idempotent=False)
def notify(listed: list[Row], attachment: str, ctx: Context, out: str = ".") -> str:
    """Put the mail into the outbox, then send it where SMTP_HOST is set.

    Nobody can ask a mailbox whether a mail has come. A run that dies in here therefore stops as uncertain and
    waits for a person's word; the Message-ID stays the same, so a mail sent twice is recognised as one.
    """
    key, post = ctx.idempotency_key, Post.from_environment(os.environ)
    mail = make_mail(listed, Path(attachment), key=key, sender=post.sender, to=post.to)
    file = Path(out, "outbox", f"{key}.eml")
    write_whole(file, mail.as_bytes())
    post.send(mail)
    return str(file)


# -- the program ----------------------------------------------------------------------------------------


async def screen(
    folder: Path, *, db: str, out: Path, job: str = JOB, top: int = 10, fresh: bool = False
) -> RunResult:
    """Screen a folder; a run of the same folder that did not finish is continued."""
    inputs = {"folder": str(folder), "job": job, "out": str(out), "top": top}
    async with Engine(db, workflows=[workflow], limits=LIMITS) as engine:
        return await engine.run(workflow, inputs, key=str(folder), fresh=fresh)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the screening from the command line; exit codes as those of `dagresume run`."""
    options = _parser().parse_args(arguments)
    logging.getLogger("pypdf").setLevel(logging.ERROR)  # a damaged file is reported once, in the table
    try:
        if OpenAIModel.from_environment(os.environ) is None:
            print("no OPENAI_API_KEY: local deterministic scorer")
        result = asyncio.run(
            screen(
                options.folder.resolve(),
                db=options.db,
                out=options.out.resolve(),
                job=options.job,
                top=options.top,
                fresh=options.fresh,
            )
        )
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except (DagresumeError, ModelRefused) as error:
        print(error, file=sys.stderr)
        return 4 if isinstance(error, OwnershipError | RecoveryRefused) else 1
    print(f"run {result.run_id}: {result.status}")
    print(f"executed {len(result.executed)} paths, reused {len(result.reused)}")
    print(f"table: {result[table]}")
    print(f"mail:  {result[notify]}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dagresume.examples.resume_screening",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="the folder with the PDFs")
    parser.add_argument(
        "--db", default="screening.db", help="the database of the runs (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path(), help="where table and outbox go (default: here)")
    parser.add_argument("--job", default=JOB, help="the job description (default: a Python engineer's)")
    parser.add_argument(
        "--top", type=int, default=10, help="how many get the closer look (default: %(default)s)"
    )
    parser.add_argument("--fresh", action="store_true", help="a new run, even if this folder has one already")
    return parser


if __name__ == "__main__":
    sys.exit(main())
