"""G3: the system refuses the n-th fsync or write of a run, once or from then on, with EIO or ENOSPC.

    python -m pytest -m slow -s tests/crash/test_injected_errors.py

strace makes the calls fail. It counts for each thread by itself: the n-th of the writer, and the n-th of the
threads that write spilled outputs and copy the log back. What the process had been told was durable must be
there in all, nothing may begin after a commit that failed, the caller gets our error, and the run goes on
once the disk is well again.
"""

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from dagresume import Engine
from tests.crash.witness import Account, Verdict, examine, hear

ROOT = Path(__file__).parents[2]
PAGES = 150
WARNING = "event='the write-ahead log cannot be copied back"
CALLS = {"sync": "fsync,fdatasync", "write": "pwrite64,write,ftruncate"}
# Of ENOSPC where it does not write (an fsync, a truncation, its shared memory) SQLite says "I/O error".
EXPECTED = {"EIO": {"StoreError"}, "ENOSPC": {"StoreFull", "StoreError"}}


class Case(NamedTuple):
    """The n-th of these calls fails so; `on`: and all that follow. `there`: the file was made before."""

    calls: str
    error: str
    n: int
    on: bool
    there: bool = False

    def __str__(self) -> str:
        return f"{self.calls} {self.n}{'+' if self.on else ''} {self.error}{' there' if self.there else ''}"


class Found(NamedTuple):
    """What came of a case."""

    case: Case
    hits: int
    code: int
    said: Account
    stderr: str
    verdict: Verdict

    @property
    def refused(self) -> str:
        """The type of the error that the caller got, "" if none."""
        ends = [line.split()[1] for line in self.said.ended if line.startswith("ended")]
        causes = [line.split()[1] for line in self.said.ended if line.startswith("cause")]
        if causes and causes[0] == "ConnectionError":  # the node that is to fail at first
            ends, causes = ends[1:], causes[1:]
        if not ends or ends == ["completed"]:
            return "" if ends else "silence"
        return causes[0] if ends[0] == "RunFailed" else ends[0]

    def faults(self) -> Iterator[str]:
        """Say what is not as it must be."""
        if self.verdict.lost:
            yield f"{self.verdict.lost} acknowledged records are gone"
        yield from self.verdict.wrong
        if self.said.after_loss:
            yield f"began after a commit had failed: {self.said.after_loss}"
        said = [line for line in self.stderr.splitlines() if not line.startswith(WARNING)]
        if self.code or said:
            yield f"exit {self.code}: {said}"
        if self.refused not in {"", *EXPECTED[self.case.error]}:
            yield f"the caller got {self.refused}"
        if self.refused and self.said.ended[-1] == "cause NoneType None":
            yield "what the system said is not its cause"
        if not self.refused and not any(line.startswith("ended completed") for line in self.said.ended):
            yield "nobody was told"


async def made(database: Path) -> None:
    async with Engine(database):
        pass


def tried(case: Case, folder: Path) -> Found:
    """Make a run under this fault; then look, and go on without it."""
    place = folder / str(case).replace(" ", "-")
    place.mkdir()
    trace, notes, database = place / "trace", place / "notes", place / "runs.db"
    if case.there:
        asyncio.run(made(database))
    fault = f"inject={CALLS[case.calls]}:error={case.error}:when={case.n}{'+' if case.on else ''}"
    command = ["strace", "-f", "-qq", "--seccomp-bpf", "-o", str(trace), "-e", f"trace={CALLS[case.calls]}"]
    program = [sys.executable, "-m", "tests.crash.witness", str(database), str(notes), "full", str(PAGES)]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run(
        [*command, "-e", fault, *program],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    hits = len(re.findall(r"\(INJECTED\)", trace.read_text()))
    said = hear(notes.read_text().splitlines())
    verdict = asyncio.run(examine(database, said, PAGES))
    shutil.rmtree(place)
    return Found(case, hits, ended.returncode, said, ended.stderr, verdict)


def all_tried(cases: Iterable[Case], folder: Path) -> list[Found]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: apt-get install strace")
    if subprocess.run(["strace", "-qq", "true"], capture_output=True, check=False).returncode:
        pytest.skip("strace may not trace here (ptrace is not permitted)")
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda case: tried(case, folder), cases))


def shown(found: list[Found]) -> None:
    for calls in CALLS:
        for error in EXPECTED:
            some = [each for each in found if (each.case.calls, each.case.error) == (calls, error)]
            if some:
                told = Counter(each.refused or "nothing (tried again and written)" for each in some)
                print(
                    f"\n{calls}, {error}: {len(some)} runs, {sum(each.hits for each in some)} calls refused;"
                    f" acknowledged {sum(each.said.acked.total() for each in some)} records,"
                    f" lost {sum(each.verdict.lost for each in some)};"
                    f" began after a failed commit {sum(len(each.said.after_loss) for each in some)};"
                    f" the caller got {dict(told)}"
                )


def judged(found: list[Found]) -> None:
    shown(found)
    assert [(str(each.case), faults) for each in found if (faults := list(each.faults()))] == []
    assert all(each.hits for each in found), "a fault that hit nothing"
    assert {each.refused for each in found if each.case.on} <= {"StoreError", "StoreFull", ""}


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("error", sorted(EXPECTED))
@pytest.mark.parametrize(
    ("calls", "there", "every"),
    [("sync", False, 1), ("write", False, 1), ("write", True, 8)],
    ids=["sync", "write as the file is made", "every eighth write of a run"],
)
def test_a_refused_call_loses_nothing_and_is_told(
    tmp_path: Path, calls: str, error: str, there: bool, every: int
) -> None:
    """C1, C8: 60 calls, once and from then on."""
    places = range(1, 1 + 60 * every, every)
    judged(all_tried([Case(calls, error, n, on, there) for n in places for on in (False, True)], tmp_path))


def test_some_refused_calls(tmp_path: Path) -> None:
    """C1, C8: a few of them."""
    judged(
        all_tried(
            [
                Case("sync", "EIO", 9, True),
                Case("sync", "EIO", 12, False),
                Case("write", "ENOSPC", 200, True, there=True),
            ],
            tmp_path,
        )
    )
