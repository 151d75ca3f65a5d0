"""The parts of the résumé screening, one by one: model client, local scorer, parser, table, mail."""

from __future__ import annotations

import json
import os
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from email import message_from_bytes, policy
from pathlib import Path
from typing import Any

import httpx
import pytest
from openpyxl import load_workbook
from pypdf.errors import PyPdfError

from dagresume import ItemFailure, RetryAfter
from dagresume.examples import resume_screening, screening_local
from dagresume.examples.resume_screening import JOB, candidates, chosen_model, parse, plain_text, shortlist
from dagresume.examples.screening_local import LocalModel, points, years
from dagresume.examples.screening_model import (
    EVALUATE,
    MAX_LETTERS,
    SCORE,
    SUGGEST,
    BadAnswer,
    Completion,
    Counted,
    ModelRefused,
    ModelUnavailable,
    append_line,
    read,
    read_ledger,
    request,
)
from dagresume.examples.screening_openai import OpenAIModel, retry_after
from dagresume.examples.screening_report import (
    Post,
    Row,
    make_mail,
    make_rows,
    printable,
    table_bytes,
    table_key,
    write_whole,
)
from dagresume.examples.screening_values import Evaluation, Interview, Resume, Score
from tests.examples.conftest import (
    Fault,
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
KEY = "sk-test-secret"
ASK = request(SCORE, job=JOB, text="Python 2010 – 2020", path="score[0]", key="k")


def ask_model(reply: httpx.Response | Exception, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ask an endpoint that gives this reply; the result is a coroutine."""

    def answer(_: httpx.Request) -> httpx.Response:
        if isinstance(reply, Exception):
            raise reply
        return reply

    real = httpx.AsyncClient

    def client(**options: Any) -> httpx.AsyncClient:
        return real(transport=httpx.MockTransport(answer), **options)

    monkeypatch.setattr(httpx, "AsyncClient", client)
    return OpenAIModel("http://model.example/v1", KEY).complete(ASK)


# -- the model client -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (httpx.Response(500), ModelUnavailable),
        (httpx.Response(502, html="<h1>Bad gateway</h1>"), ModelUnavailable),
        (httpx.Response(408), ModelUnavailable),
        (httpx.Response(429), ModelUnavailable),
        (httpx.Response(429, headers={"Retry-After": "soon"}), ModelUnavailable),
        (httpx.Response(429, headers={"Retry-After": "7"}), RetryAfter),
        (httpx.Response(503, headers={"Retry-After": "7"}), RetryAfter),
        (httpx.Response(429, json={"error": {"code": "insufficient_quota", "message": "pay"}}), ModelRefused),
        (httpx.Response(400), ModelRefused),
        (httpx.Response(401), ModelRefused),
        (httpx.Response(404), ModelRefused),
        (httpx.Response(301, headers={"Location": "http://elsewhere.example"}), ModelRefused),
        (httpx.Response(204), ModelRefused),
        (httpx.ReadTimeout("slow"), ModelUnavailable),
        (httpx.ConnectError("gone"), ModelUnavailable),
        (httpx.RemoteProtocolError("cut"), ModelUnavailable),
        (httpx.Response(200, text="not json"), ModelUnavailable),
        (httpx.Response(200, json={"choices": []}), ModelUnavailable),
        (httpx.Response(200, json={"choices": [{"message": {"content": None}}]}), ModelUnavailable),
        (
            httpx.Response(200, json={"choices": [{"message": {"content": "{"}, "finish_reason": "length"}]}),
            ModelUnavailable,
        ),
    ],
)
async def test_each_fault_of_the_endpoint_has_its_error(
    reply: httpx.Response | Exception, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(error) as caught:
        await ask_model(reply, monkeypatch)
    assert type(caught.value) is error


async def test_retry_after_is_honoured_to_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RetryAfter) as caught:
        await ask_model(httpx.Response(429, headers={"Retry-After": "7"}), monkeypatch)
    assert caught.value.retry_after == 7


async def test_an_answer_comes_with_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {
        "choices": [{"message": {"content": "{}"}}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }
    assert await ask_model(httpx.Response(200, json=body), monkeypatch) == Completion("{}", 3, 2)


@pytest.mark.parametrize("status", [400, 401, 500])
async def test_a_key_that_the_server_repeats_is_not_repeated_by_us(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"error": {"message": "x" * 190 + f"{KEY} is no key of ours"}}  # the cut at 200 falls into the key
    with pytest.raises((ModelRefused, ModelUnavailable)) as caught:
        await ask_model(httpx.Response(status, json=said), monkeypatch)
    assert KEY[:6] not in str(caught.value)


def test_the_key_is_not_in_the_repr_and_must_be_sendable() -> None:
    assert KEY not in repr(OpenAIModel("http://model.example", KEY))
    with pytest.raises(ModelRefused, match="OPENAI_API_KEY") as caught:
        OpenAIModel("http://model.example", f"{KEY}\nx")
    assert KEY not in str(caught.value)
    with pytest.raises(ModelRefused, match="OPENAI_BASE_URL"):
        OpenAIModel("model.example", KEY)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("", None),
        ("0", 0),
        (" 12 ", 12),
        ("-3", None),
        ("nan", None),
        ("Mon, 30 Nov 2026 12:00:30 GMT", 30),
        ("Mon, 30 Nov 2026 11:00:00 GMT", 0),
    ],
)
def test_retry_after_in_both_forms(header: str | None, seconds: float | None) -> None:
    assert retry_after(header, datetime(2026, 11, 30, 12, tzinfo=UTC)) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Sure!",
        "```json\n{}\n```",
        "[]",
        '{"points": 50}',
        '{"points": "50", "reason": "x"}',
        '{"points": 50.5, "reason": "x"}',
        '{"points": true, "reason": "x"}',
        '{"points": 101, "reason": "x"}',
        '{"points": -1, "reason": "x"}',
        '{"points": 50, "reason": ""}',
        '{"points": 50, "reason": "x", "hire": true}',
    ],
)
def test_an_answer_in_another_shape_is_refused_without_quoting_it(text: str) -> None:
    with pytest.raises(BadAnswer) as caught:
        read(SCORE, Completion(text))
    assert not text or text not in str(caught.value)


def test_a_very_long_resume_is_cut() -> None:
    assert len(request(SCORE, job="", text="x" * (MAX_LETTERS + 1), path="p", key="k").text) == MAX_LETTERS


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (busy, RetryAfter),
        (broken, ModelUnavailable),
        (hangs, ModelUnavailable),
        (truncated, ModelUnavailable),
        (talks, BadAnswer),
        (exaggerates, BadAnswer),
        (forbidden, ModelRefused),
    ],
)
async def test_each_fault_on_the_wire_has_its_error(
    fault: Fault, error: type[Exception], loopback: LoopbackModel
) -> None:
    loopback.faults = iter([(fault,)])
    with pytest.raises(error) as caught:
        read(SCORE, await chosen_model(os.environ).complete(ASK))
    assert type(caught.value) is error
    assert read(SCORE, await chosen_model(os.environ).complete(ASK)).points == points(JOB, ASK.text)
    assert loopback.asked == {"k": 2}


# -- choosing and counting ------------------------------------------------------------------------------


def test_without_a_key_the_local_scorer_answers(tmp_path: Path) -> None:
    assert isinstance(chosen_model({"OPENAI_API_KEY": " "}), LocalModel)
    counted = chosen_model({"DAGRESUME_CALLS_FILE": str(tmp_path / "calls")})
    assert isinstance(counted, Counted)
    assert isinstance(counted.model, LocalModel)


def test_the_environment_describes_the_model() -> None:
    environ = {"OPENAI_API_KEY": f"{KEY}\n", "OPENAI_BASE_URL": "http://m/v1", "OPENAI_MODEL": "m"}
    assert chosen_model({**environ, "OPENAI_TIMEOUT": "2"}) == OpenAIModel("http://m/v1", KEY, "m", 2.0)


async def test_a_call_is_in_the_ledger_once_it_is_answered(tmp_path: Path) -> None:
    ledger = tmp_path / "calls"
    assert read_ledger(ledger) == []
    await Counted(LocalModel(), ledger).complete(ASK)
    assert read_ledger(ledger) == [{"task": "score", "path": "score[0]", "key": "k"}]
    with ledger.open("a") as file:
        file.write('{"task": "sc')
    assert len(read_ledger(ledger)) == 1


def test_lines_of_many_writers_do_not_mix(tmp_path: Path) -> None:
    ledger, line = tmp_path / "calls", json.dumps({"x": "y" * 500})

    def write() -> None:
        for _ in range(50):
            append_line(ledger, line)

    writers = [threading.Thread(target=write) for _ in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert ledger.read_text().splitlines() == [line] * 400


# -- the local scorer -----------------------------------------------------------------------------------


def test_points_grow_with_words_and_years_in_common() -> None:
    assert points("Python, 5 years", "Python 2010 – 2020") == 100
    assert points("Python, 10 years", "Python 2015 – 2020") == 90
    assert points("Python, 5 years", "Cobol") == 0
    assert points("", "Python") == 0
    assert years("2010 – 2012, 2015-2020") == 10
    assert years("2020") == 0


@pytest.mark.parametrize("task", [SCORE, EVALUATE, SUGGEST])
async def test_the_local_scorer_answers_each_task_in_its_shape(task: Any) -> None:
    ask = request(task, job=JOB, text="Python\ngap: kafka", path="p", key="k")
    read(task, await LocalModel().complete(ask))


def test_the_local_scorer_says_the_same_in_every_process() -> None:
    code = (
        "from dagresume.examples.screening_local import ANSWERS, latency\n"
        "text = 'Python asyncio 2010 – 2015'\n"
        "print([(name, answer('Python asyncio SQLite 3 years', text)) for name, answer in ANSWERS.items()],"
        " latency(text))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(said) == 1
    assert 0.02 <= screening_local.latency("x") <= 0.04


# -- reading PDFs ---------------------------------------------------------------------------------------


def test_the_shipped_resumes_are_what_they_say() -> None:
    files = candidates(str(RESUMES))
    assert len(files) >= 24
    assert files == sorted(files)
    assert sum(Path(file).stat().st_size for file in files) < 600_000


@pytest.mark.parametrize(
    ("file", "name", "within", "pages"),
    [
        ("amara-okafor", "Amara Okafor", "exactly-once booking", 1),
        ("bjorn-aasen", "Bjørn Åsen", "40 million rows", 1),
        ("chen-wei", "陈伟", "故障后只重跑失败的子图", 1),
        ("dimitra-papadaki", "Δήμητρα Παπαδάκη", "Κατανεμημένα συστήματα", 1),
        ("hana-sato", "佐藤 花子", "チェックポイントからの再開", 1),
        ("kim-min-su", "김민수", "비동기 작업 큐", 1),
        ("layla-haddad", "ليلى حداد", "مهندسة برمجيات", 1),
        ("nikolai-petrov", "Николай Петров", "контрольные точки", 1),
        ("priya-raghunathan", "Priya Raghunathan", "Patents", 2),
        ("scan-0001", "scan-0001", "", 1),
    ],
)
def test_a_pdf_becomes_its_text(file: str, name: str, within: str, pages: int) -> None:
    resume = parse(str(RESUMES / f"{file}.pdf"))
    assert (resume.name, resume.pages) == (name, pages)
    assert within in resume.text
    assert bool(within) == bool(resume.text)


def test_a_damaged_pdf_raises() -> None:
    with pytest.raises(PyPdfError):
        parse(str(RESUMES / "upload-cut-off.pdf"))


def test_glyphs_become_letters() -> None:
    assert plain_text("\x7f e\ufb03cient\x00 \ufedf\ufef4\ufee0\ufef0\nx ") == "efficient ليلى\nx"


def test_only_pdfs_are_candidates(tmp_path: Path) -> None:
    for name in ("b.pdf", "a.PDF", "notes.txt"):
        (tmp_path / name).touch()
    assert [Path(file).name for file in candidates(str(tmp_path))] == ["a.PDF", "b.pdf"]
    with pytest.raises(FileNotFoundError):
        candidates(str(tmp_path / "nowhere"))


# -- shortlist, rows, table -----------------------------------------------------------------------------

FAILED = ItemFailure(path="parse[2]", type="PdfStreamError", message="Stream has ended unexpectedly")
RESUMES_READ: list[Resume | ItemFailure | None] = [
    Resume("f/a.pdf", "Ada", "Python", 1),
    Resume("f/b.pdf", "b", "", 2),
    FAILED,
    Resume("f/d.pdf", "Dan", "x", 1),
]
SCORES: list[Score | ItemFailure | None] = [
    Score("f/a.pdf", "Ada", 40, "fair"),
    None,
    FAILED,
    Score("f/d.pdf", "Dan", 90, "good"),
]
FILES = ["f/a.pdf", "f/b.pdf", "f/c.pdf", "f/d.pdf"]


def test_the_shortlist_passes_over_what_has_no_score() -> None:
    assert [one.score.name for one in shortlist(RESUMES_READ, SCORES, top=5)] == ["Dan", "Ada"]
    assert [one.score.name for one in shortlist(RESUMES_READ, SCORES, top=1)] == ["Dan"]
    assert shortlist([], [], top=5) == []


@pytest.fixture
def rows() -> list[Row]:
    evaluated = [Evaluation("f/d.pdf", "Dan", "invite", ["python"], ["kafka"])]
    return make_rows(FILES, RESUMES_READ, SCORES, evaluated, [Interview("f/d.pdf", "Dan", ["Why?", "When?"])])


def test_every_file_has_a_row_and_failures_come_last(rows: list[Row]) -> None:
    assert [(row.name, row.points, row.state) for row in rows] == [
        ("Dan", 90, "invite"),
        ("Ada", 40, "scored"),
        ("b", None, "no text"),
        ("c", None, "unreadable"),
    ]
    assert rows[3].remark == "PdfStreamError: Stream has ended unexpectedly"


def test_the_table_opens_and_says_who_wrote_it(rows: list[Row], tmp_path: Path) -> None:
    file = tmp_path / "deep" / "t.xlsx"
    write_whole(file, table_bytes(rows, key="the-key"))
    assert table_key(file) == "the-key"
    sheet = load_workbook(file).active
    assert [cell.value for cell in sheet[2]] == [
        "Dan",
        90,
        "invite",
        "good",
        "python",
        "kafka",
        "Why?\nWhen?",
        "d.pdf",
    ]
    assert sheet.max_row == 5
    assert [path.name for path in file.parent.iterdir()] == ["t.xlsx"]


def test_a_formula_in_a_resume_stays_text(tmp_path: Path) -> None:
    file = tmp_path / "t.xlsx"
    row = Row("f.pdf", '=HYPERLINK("http://evil.example")', "scored", "bell\x07 and \ud800" + "x" * 40_000, 1)
    write_whole(file, table_bytes([row], key="k"))
    sheet = load_workbook(file).active
    assert (sheet["A2"].data_type, sheet["A2"].value) == ("s", row.name)
    assert sheet["D2"].value.startswith("bell and ?x")


def test_a_foreign_or_missing_table_has_no_key(tmp_path: Path) -> None:
    assert table_key(tmp_path / "none.xlsx") is None
    (tmp_path / "x.xlsx").write_text("not a zip")
    assert table_key(tmp_path / "x.xlsx") is None


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):  # noqa: PT011  (which one depends on the system)
        write_whole(tmp_path / "taken", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_printable_keeps_what_can_be_kept() -> None:
    assert printable("tab\t line\n 名 \x00\x1b\udcff") == "tab\t line\n 名 ?"


# -- mail -----------------------------------------------------------------------------------------------


def test_the_mail_lists_the_failed_and_carries_the_key(rows: list[Row], tmp_path: Path) -> None:
    (tmp_path / "t.xlsx").write_bytes(b"table")
    mail = make_mail(
        rows, tmp_path / "t.xlsx", key="k-1", sender="Jobs <jobs@firm.example>", to="hr@firm.example"
    )
    read_back = message_from_bytes(mail.as_bytes(), policy=policy.default)
    assert read_back["Message-ID"] == "<k-1@firm.example>"
    text = read_back.get_body(("plain",)).get_content()  # type: ignore[union-attr]
    assert "90  Dan: invite" in text
    assert "c.pdf: unreadable (PdfStreamError" in text
    assert "b.pdf: no text" in text
    [attached] = read_back.iter_attachments()
    assert attached.get_content() == b"table"


class Mailbox(socketserver.StreamRequestHandler):
    """Just enough of SMTP to take one mail; it offers no TLS."""

    def handle(self) -> None:
        self.wfile.write(b"220 ready\r\n")
        for line in self.rfile:
            verb = line.split()[0].upper()
            if verb == b"QUIT":
                self.wfile.write(b"221 bye\r\n")
                return
            if verb == b"DATA":
                self.wfile.write(b"354 go on\r\n")
                mail = b"".join(iter(self.rfile.readline, b".\r\n"))
                self.server.mails.append(mail)  # type: ignore[attr-defined]
            self.wfile.write(b"250 ok\r\n")


@pytest.fixture
def mailbox() -> Iterator[socketserver.TCPServer]:
    with socketserver.TCPServer(("127.0.0.1", 0), Mailbox) as server:
        server.mails = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_mail_is_sent_where_a_host_is_named(mailbox: Any, rows: list[Row], tmp_path: Path) -> None:
    (tmp_path / "t.xlsx").write_bytes(b"table")
    mail = make_mail(rows, tmp_path / "t.xlsx", key="k-1", sender="jobs@firm.example", to="hr@firm.example")
    assert not Post.from_environment({}).send(mail)
    host, port = mailbox.server_address
    environ = {"SMTP_HOST": host, "SMTP_PORT": str(port)}
    assert Post.from_environment(environ).send(mail)
    [sent] = mailbox.mails
    assert b"Message-ID: <k-1@firm.example>" in sent


def test_a_password_is_not_sent_without_tls(mailbox: Any, rows: list[Row], tmp_path: Path) -> None:
    (tmp_path / "t.xlsx").write_bytes(b"table")
    mail = make_mail(rows, tmp_path / "t.xlsx", key="k-1", sender="a@b.example", to="c@d.example")
    host, port = mailbox.server_address
    post = Post(host, port, "user", "hunter2", "a@b.example", "c@d.example")
    with pytest.raises(OSError, match="no TLS"):
        post.send(mail)
    assert "hunter2" not in repr(post)
    assert mailbox.mails == []
