"""The résumé screening, marked as users mark workflows of their own; run by tests/crash/test_plugin.py."""

from __future__ import annotations

import os
import shutil
import smtplib
from collections.abc import Iterator
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest
from openpyxl import load_workbook

from dagresume.examples import resume_screening
from dagresume.testing import Sweep

RESUMES = Path(resume_screening.__file__).with_name("resumes")
PICKED = ("chen-wei.pdf", "scan-0001.pdf")


class Outbox:
    """A mail server that writes a line for each mail it is given."""

    def __init__(self, *where: Any, **options: Any) -> None: ...

    def __enter__(self) -> Outbox:
        return self

    def __exit__(self, *error: object) -> None: ...

    def ehlo(self) -> None: ...

    def has_extn(self, name: str) -> bool:
        return False

    def send_message(self, mail: EmailMessage) -> None:
        handle = os.open("mails.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(handle, f"{mail['To']}: {mail['Subject']}\n".encode())
        os.close(handle)


def prepare() -> None:
    """In each process: two résumés in the working folder, the local scorer, and our mail server."""
    for name in list(os.environ):
        if name.startswith(("OPENAI_", "SMTP_", "MAIL_", "DAGRESUME_")):
            del os.environ[name]
    os.environ["SMTP_HOST"] = "mail.invalid"
    smtplib.SMTP = Outbox  # type: ignore[assignment,misc]
    Path("cvs").mkdir(exist_ok=True)
    for name in PICKED:
        if not Path("cvs", name).exists():
            shutil.copy(RESUMES / name, "cvs")


def table_is_whole(folder: Path) -> Iterator[str]:
    rows = list(
        load_workbook(folder / "results/screening.xlsx").active.iter_rows(min_row=2, values_only=True)
    )
    if len(rows) != len(PICKED):
        yield f"the table has {len(rows)} rows"


@pytest.mark.dagresume_kill_everywhere(
    resume_screening.workflow,
    inputs={"folder": "cvs", "out": "results", "top": 1},
    setup=prepare,
    effects="mails.log",
    varying=["notify"],  # the name of the mail's file is the key of its run
    check=table_is_whole,
    options={"limits": resume_screening.LIMITS},
)
def test_the_screening_survives_everything(kill_everywhere: Sweep) -> None:
    print(f"\n{kill_everywhere}")
    assert kill_everywhere.undisturbed.effects.total() == 1
    assert 0 < kill_everywhere.refused < len(kill_everywhere.cases)
