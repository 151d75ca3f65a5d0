"""What comes out of the screening: rows, the spreadsheet, the mail."""

from __future__ import annotations

import os
import smtplib
import ssl
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import formatdate, parseaddr
from io import BytesIO
from pathlib import Path
from zipfile import BadZipFile

from openpyxl import Workbook, load_workbook
from openpyxl.cell import WriteOnlyCell
from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE
from openpyxl.styles import Alignment, Font

from dagresume import ItemFailure
from dagresume.examples.screening_values import Evaluation, Interview, Resume, Score

XLSX = ("application", "vnd.openxmlformats-officedocument.spreadsheetml.sheet")
COLUMNS = {
    "Name": 28,
    "Points": 8,
    "State": 14,
    "Remark": 60,
    "Strengths": 36,
    "Gaps": 36,
    "Questions": 70,
    "File": 40,
}
CELL_LETTERS = 32_767  # what a cell of a spreadsheet can hold


@dataclass(frozen=True, slots=True)
class Row:
    """One PDF in the table; `points` is None where nothing could be scored, and `remark` then says why."""

    file: str
    name: str
    state: str
    remark: str
    points: int | None = None
    strengths: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)


def make_rows(
    files: Sequence[str],
    resumes: Sequence[Resume | ItemFailure | None],
    scores: Sequence[Score | ItemFailure | None],
    evaluations: Iterable[Evaluation],
    interviews: Iterable[Interview],
) -> list[Row]:
    """Give one row for each file, the best first, those without a score last."""
    evaluated = {one.path: one for one in evaluations}
    invited = {one.path: one for one in interviews}
    rows = [
        _scored(file, score, evaluated.get(file), invited.get(file))
        if isinstance(score, Score)
        else _unscored(file, resume, score)
        for file, resume, score in zip(files, resumes, scores, strict=True)
    ]
    return sorted(rows, key=lambda row: -1 if row.points is None else row.points, reverse=True)


def _scored(file: str, score: Score, evaluation: Evaluation | None, interview: Interview | None) -> Row:
    return Row(
        file=file,
        name=score.name,
        state=evaluation.verdict if evaluation else "scored",
        remark=score.reason,
        points=score.points,
        strengths=evaluation.strengths if evaluation else [],
        gaps=evaluation.gaps if evaluation else [],
        questions=interview.questions if interview else [],
    )


def _unscored(file: str, resume: Resume | ItemFailure | None, score: ItemFailure | None) -> Row:
    if isinstance(resume, Resume):
        if score is None:
            return Row(file, resume.name, "no text", f"{resume.pages} page(s) without text: a scan, perhaps")
        return Row(file, resume.name, "not scored", f"{score.type}: {score.message}")
    why = f"{resume.type}: {resume.message}" if resume else "not read"
    return Row(file, Path(file).stem, "unreadable", why)


def printable(text: str) -> str:
    """Give the text without what XML and mail cannot hold: control characters, halves of surrogate pairs."""
    legal: str = ILLEGAL_CHARACTERS_RE.sub("", text)
    return legal.encode("utf-8", "replace").decode()


# -- the spreadsheet ------------------------------------------------------------------------------------


def table_bytes(rows: Iterable[Row], key: str) -> bytes:
    """Give the XLSX; `key` goes into its properties, so that `table_key` can tell which run wrote it."""
    book = Workbook(write_only=True)
    book.properties.identifier = key
    book.properties.creator = "dagresume"
    sheet = book.create_sheet("Screening")
    sheet.freeze_panes = "A2"
    for number, width in enumerate(COLUMNS.values()):
        sheet.column_dimensions["ABCDEFGH"[number]].width = width
    sheet.append([_text(sheet, name, bold=True) for name in COLUMNS])
    for row in rows:
        sheet.append(list(_cells(sheet, row)))
    buffer = BytesIO()
    book.save(buffer)
    return buffer.getvalue()


def _cells(sheet: object, row: Row) -> Iterator[object]:
    yield _text(sheet, row.name)
    yield row.points
    for text in (row.state, row.remark, *map("\n".join, (row.strengths, row.gaps, row.questions))):
        yield _text(sheet, text)
    yield _text(sheet, Path(row.file).name)


def _text(sheet: object, text: str, *, bold: bool = False) -> object:
    cell = WriteOnlyCell(sheet, value=printable(text)[:CELL_LETTERS])
    cell.data_type = "s"  # a name that begins with "=" is a name: strangers wrote these, so no formulas
    cell.alignment = Alignment(wrap_text=True, vertical="top")
    cell.font = Font(bold=bold)
    return cell


def table_key(file: Path) -> str | None:
    """Give the key of the run that wrote this table; None if it is not there or not one of ours."""
    try:
        book = load_workbook(file, read_only=True)
    except (FileNotFoundError, BadZipFile, KeyError):
        return None
    try:
        key: str | None = book.properties.identifier
        return key
    finally:
        book.close()


def write_whole(target: Path, data: bytes) -> None:
    """Put a file there completely or not at all, and make it survive a power cut."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as part:
        part.write(data)
        part.flush()
        os.fsync(part.fileno())
    try:
        Path(part.name).replace(target)
    except OSError:
        Path(part.name).unlink()
        raise
    if os.name == "posix":  # elsewhere a folder cannot be opened, and the rename is durable by itself
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


# -- the mail -------------------------------------------------------------------------------------------


def make_mail(rows: Sequence[Row], table: Path, *, key: str, sender: str, to: str) -> EmailMessage:
    """Give the message, the table attached. `key` becomes its Message-ID: sent twice, it is the same mail."""
    mail = EmailMessage(policy=SMTP)
    mail["From"], mail["To"] = sender, to
    mail["Subject"] = (
        f"Screening: {sum(row.points is not None for row in rows)} of {len(rows)} résumés scored"
    )
    mail["Date"] = formatdate(usegmt=True)
    mail["Message-ID"] = f"<{key}@{parseaddr(sender)[1].rpartition('@')[2] or 'localhost'}>"
    mail.set_content(printable("\n".join(_lines(rows))))
    mail.add_attachment(table.read_bytes(), maintype=XLSX[0], subtype=XLSX[1], filename=table.name)
    return mail


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    yield "To invite or to look at again:"
    yield from (f"  {row.points:3}  {row.name}: {row.state}" for row in rows if row.questions)
    missing = [row for row in rows if row.points is None]
    if missing:
        yield ""
        yield "Not scored, please look at these yourself:"
        yield from (f"  {Path(row.file).name}: {row.state} ({row.remark})" for row in missing)


@dataclass(frozen=True)
class Post:
    """Where mail goes: SMTP_HOST, SMTP_PORT, SMTP_USER, SMTP_PASSWORD, MAIL_FROM and MAIL_TO say it."""

    host: str
    port: int
    user: str
    password: str = field(repr=False)
    sender: str
    to: str

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Post:
        """Give the settings; without SMTP_HOST, `send` does nothing."""
        return cls(
            host=environ.get("SMTP_HOST", ""),
            port=int(environ.get("SMTP_PORT") or 587),
            user=environ.get("SMTP_USER", ""),
            password=environ.get("SMTP_PASSWORD", ""),
            sender=environ.get("MAIL_FROM") or "screening@localhost",
            to=environ.get("MAIL_TO") or "recruiting@localhost",
        )

    def send(self, mail: EmailMessage) -> bool:
        """Send it and give True; False if no SMTP_HOST is set. A password never travels unencrypted."""
        if not self.host:
            return False
        tls = ssl.create_default_context()
        if self.port == 465:
            with smtplib.SMTP_SSL(self.host, self.port, timeout=30, context=tls) as server:
                self._hand_over(server, mail)
            return True
        with smtplib.SMTP(self.host, self.port, timeout=30) as server:
            server.ehlo()
            if server.has_extn("starttls"):
                server.starttls(context=tls)
            elif self.user:
                raise smtplib.SMTPNotSupportedError(f"{self.host} offers no TLS: the password was not sent")
            self._hand_over(server, mail)
        return True

    def _hand_over(self, server: smtplib.SMTP, mail: EmailMessage) -> None:
        if self.user:
            server.login(self.user, self.password)
        server.send_message(mail)
