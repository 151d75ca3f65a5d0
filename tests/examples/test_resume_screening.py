"""The résumé screening as a whole: against a model that fails in every way, with damaged files, killed."""

from __future__ import annotations

import asyncio
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from email import message_from_bytes, policy
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import pytest
from openpyxl import load_workbook
from rich.console import Console

from dagresume import Engine, RunFailed, RunResult, UncertainNode
from dagresume.examples import demo, resume_screening
from dagresume.examples.resume_screening import LIMITS, notify, screen, table, workflow
from dagresume.examples.screening_model import read_ledger
from tests.examples.conftest import (
    KEY,
    LoopbackModel,
    broken,
    busy,
    exaggerates,
    forbidden,
    hangs,
    talks,
    truncated,
)

RESUMES = Path(resume_screening.__file__).with_name("resumes")
READABLE = len(list(RESUMES.glob("*.pdf"))) - 2  # one is damaged, one is a scan without text
TOP = 10
PROGRAM = [sys.executable, "-m", "dagresume.examples.resume_screening"]


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_MODEL", "SMTP_HOST", "MAIL_FROM", "MAIL_TO"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DAGRESUME_CALLS_FILE", str(tmp_path / "calls.jsonl"))


@pytest.fixture
def where(tmp_path: Path) -> dict[str, Any]:
    """Give database and output folder."""
    return {"db": str(tmp_path / "screening.db"), "out": tmp_path / "results"}


def rows_of(file: str) -> list[tuple[Any, ...]]:
    """Give the rows of a table, without the headings."""
    return list(load_workbook(file).active.iter_rows(min_row=2, values_only=True))


def mail_text(file: str) -> str:
    """Give what a mail says."""
    mail = message_from_bytes(Path(file).read_bytes(), policy=policy.default)
    text: str = mail.get_body(("plain",)).get_content()  # type: ignore[union-attr]
    return text


def calls(folder: Path) -> Counter[str]:
    return Counter(call["task"] for call in read_ledger(folder / "calls.jsonl"))


def leaks(folder: Path) -> list[Path]:
    """Name every file below the folder that holds the key."""
    return [file for file in folder.rglob("*") if file.is_file() and KEY.encode() in file.read_bytes()]


async def test_each_resume_gets_its_row_and_damaged_ones_are_listed(where: Any, tmp_path: Path) -> None:
    result = await screen(RESUMES, **where, top=TOP)

    rows = rows_of(result[table])
    assert len(rows) == READABLE + 2
    points = [row[1] for row in rows if row[1] is not None]
    assert points == sorted(points, reverse=True)
    assert len(points) == READABLE
    assert [row[2] for row in rows[:TOP]].count("scored") == 0
    assert all(row[6] for row in rows[:TOP])
    assert {(row[7], row[2]) for row in rows[-2:]} == {
        ("scan-0001.pdf", "no text"),
        ("upload-cut-off.pdf", "unreadable"),
    }
    assert calls(tmp_path) == {"score": READABLE, "evaluate": TOP, "suggest": TOP}

    text = mail_text(result[notify])
    assert "upload-cut-off.pdf: unreadable" in text
    assert "scan-0001.pdf: no text" in text


async def test_the_same_folder_again_executes_nothing(where: Any, tmp_path: Path) -> None:
    first = await screen(RESUMES, **where)
    before = calls(tmp_path)
    again = await screen(RESUMES, **where)
    assert again.run_id == first.run_id
    assert len(again.executed) == 0
    assert calls(tmp_path) == before


async def test_more_than_a_fifth_damaged_fails_the_run(where: Any, tmp_path: Path) -> None:
    folder = tmp_path / "cvs"
    folder.mkdir()
    for name in ("amara-okafor", "yusuf-demir", "upload-cut-off"):
        shutil.copy(RESUMES / f"{name}.pdf", folder)
    with pytest.raises(RunFailed) as caught:
        await screen(folder, **where)
    assert any(path.startswith("parse") for path in caught.value.failures)


async def test_a_model_that_fails_in_every_way_still_scores_all(
    where: Any, tmp_path: Path, loopback: LoopbackModel, capfd: pytest.CaptureFixture[str]
) -> None:
    faults = [(broken,), (hangs,), (truncated,), (talks,), (exaggerates,), (broken, truncated), ()]
    loopback.faults = chain([(busy,)], cycle(faults))
    result = await screen(RESUMES, **where, top=TOP)

    assert sum(row[1] is not None for row in rows_of(result[table])) == READABLE
    assert loopback.answered == {"score": READABLE, "evaluate": TOP, "suggest": TOP}
    assert len(loopback.asked) == READABLE + 2 * TOP
    assert max(loopback.asked.values()) <= 3, "nothing is asked again once it was answered"
    assert {request.rpartition(" ")[0] for request in loopback.seen} == {"/v1/chat/completions Bearer"}
    said = "".join(capfd.readouterr())
    assert KEY not in said
    assert leaks(tmp_path) == []


async def test_a_real_endpoint_and_the_local_scorer_fill_the_same_table(
    tmp_path: Path, loopback: LoopbackModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = await screen(RESUMES, db=str(tmp_path / "a.db"), out=tmp_path / "a")
    monkeypatch.delenv("OPENAI_API_KEY")
    local = await screen(RESUMES, db=str(tmp_path / "b.db"), out=tmp_path / "b")
    assert rows_of(remote[table]) == rows_of(local[table])
    assert sum(loopback.asked.values()) == READABLE + 2 * TOP


async def test_a_busy_model_pauses_everybody(where: Any, loopback: LoopbackModel) -> None:
    loopback.faults = iter([(busy,)])
    begun = time.monotonic()
    await screen(RESUMES, **where, top=1)
    assert time.monotonic() - begun >= 1
    assert sum(loopback.asked.values()) <= READABLE + 2 + 1


async def test_a_refused_key_fails_at_once_and_the_rest_is_paid_after_it_is_mended(
    where: Any, tmp_path: Path, loopback: LoopbackModel, capfd: pytest.CaptureFixture[str]
) -> None:
    loopback.faults = iter([()] * 12 + [(forbidden,)] * READABLE)
    with pytest.raises(RunFailed) as caught:
        await screen(RESUMES, **where)
    assert set(loopback.asked.values()) == {1}, "a refusal is not tried again"
    assert "HTTP 401" in str(caught.value)
    assert KEY not in f"{caught.value!r} {caught.value.failures}"

    loopback.faults = cycle([()])
    result = await screen(RESUMES, **where)
    assert loopback.answered == {"score": READABLE, "evaluate": TOP, "suggest": TOP}
    assert len(rows_of(result[table])) == READABLE + 2
    assert leaks(tmp_path) == []
    assert KEY not in "".join(capfd.readouterr())


# -- the program ----------------------------------------------------------------------------------------


def test_the_command_says_which_model_answers_and_where_the_results_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(RESUMES), "--db", str(tmp_path / "s.db"), "--out", str(tmp_path / "out"), "--top", "3"]
    assert resume_screening.main(arguments) == 0
    said = capsys.readouterr().out
    assert "no OPENAI_API_KEY: local deterministic scorer" in said
    assert str(tmp_path / "out" / "screening.xlsx") in said


def test_the_command_fails_with_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(tmp_path / "nowhere"), "--db", str(tmp_path / "s.db"), "--out", str(tmp_path)]
    assert resume_screening.main(arguments) == 1
    assert "candidates" in capsys.readouterr().err


# -- killed ---------------------------------------------------------------------------------------------


def test_killed_at_the_150th_resume_it_goes_on_there(tmp_path: Path) -> None:
    stage = demo.Stage(tmp_path)
    stage.lay_out(200)
    assert demo.run_and_kill(stage, 150, Console(file=io.StringIO())) is None
    before = read_ledger(stage.ledger)
    assert sum(call["task"] == "score" for call in before) >= 150

    plan = asyncio.run(demo.plan(stage))
    recorded = {
        one.path for one in plan if one.action == "reuse" and one.reason == "completed" and not one.items
    }
    assert recorded >= {"candidates", "parse[0]"}
    assert asyncio.run(_resumed(stage, recorded)) == []

    after = read_ledger(stage.ledger)[len(before) :]
    assert recorded.isdisjoint(call["path"] for call in after), "what was recorded is not paid for again"
    asked = Counter(call["path"] for call in before + after)
    assert sum(path.startswith("score[") for path in asked) == 200 - unscorable(200)
    # eight are under way at once, and as many may have returned and wait for their commit
    assert sum(count - 1 for count in asked.values()) <= 16, "only what was in flight can be asked twice"


async def _resumed(stage: demo.Stage, recorded: set[str]) -> list[str]:
    """Resume, and give what was executed although it was recorded."""
    result = await screen(stage.inbox, db=str(stage.db), out=stage.root / "results")
    assert len(rows_of(result[table])) == 200
    assert set(result.reused) >= recorded
    return [path for path in result.executed if path in recorded]


def unscorable(count: int) -> int:
    """Say how many of the demo's files are damaged or empty."""
    names = [file.name for file in sorted(RESUMES.glob("*.pdf"))]
    return sum(names[n % len(names)] in {"scan-0001.pdf", "upload-cut-off.pdf"} for n in range(count))


def test_killed_while_the_mail_is_sent_it_asks_a_person(
    where: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mail_server:
        host, port = mail_server.getsockname()
        environ = {**os.environ, "SMTP_HOST": host, "SMTP_PORT": str(port)}
        arguments = [str(RESUMES), "--db", where["db"], "--out", str(where["out"])]
        with subprocess.Popen([*PROGRAM, *arguments], env=environ, stdout=subprocess.DEVNULL) as child:
            mail_server.settimeout(30)
            connection, _ = mail_server.accept()
            child.kill()
        connection.close()
    before = calls(tmp_path)

    with pytest.raises(UncertainNode) as caught:
        asyncio.run(screen(RESUMES, **where))
    assert caught.value.paths == ("notify",)
    assert calls(tmp_path) == before

    result = asyncio.run(_retried(where["db"], caught.value.run_id))
    assert list(result.executed) == ["rows", "notify"]
    assert calls(tmp_path) == before
    assert [str(file) for file in (where["out"] / "outbox").iterdir()] == [result[notify]], (
        "one key, one file"
    )


async def _retried(db: str, run_id: str) -> RunResult:
    async with Engine(db, workflows=[workflow], limits=LIMITS) as engine:
        return await engine.retry(run_id)


def test_interrupted_from_the_keyboard_the_same_command_goes_on(where: Any, tmp_path: Path) -> None:
    arguments = [str(RESUMES), "--db", where["db"], "--out", str(where["out"])]
    with subprocess.Popen([*PROGRAM, *arguments], stderr=subprocess.PIPE, text=True) as child:
        while calls(tmp_path)["score"] < 5:
            time.sleep(0.005)
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=30)
    assert child.returncode == 130
    assert said == "interrupted; the same command goes on from here\n"
    assert resume_screening.main(arguments) == 0
    assert calls(tmp_path)["score"] <= READABLE + 8


def test_the_demo_kills_explains_and_goes_on_in_time(capfd: pytest.CaptureFixture[str]) -> None:
    begun = time.monotonic()
    out = io.StringIO()
    assert demo.main(console=Console(file=out, highlight=False, soft_wrap=True)) == 0
    said = out.getvalue()
    assert re.search(r"killed with SIGKILL after 1[5-9]\d scores", said)
    assert re.search(r"reuse +\d+", said)
    assert "recorded, and paid for again: 0" in said
    assert "\x1b" not in said, "no colours where nobody sees them"
    assert time.monotonic() - begun < 20
    assert capfd.readouterr() == ("", "")
