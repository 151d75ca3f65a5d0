"""What the commands print: text for people, JSON for programs, and never a control code that was stored."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
import traceback
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dagresume import codec, words
from dagresume.masks import NO_SECRETS, without_passwords

__all__ = [
    "STYLES",
    "clean",
    "heard",
    "line",
    "out",
    "picture",
    "print_json",
    "print_traceback",
    "rows",
    "say",
    "warn",
]

STYLES: Final[Mapping[str, str]] = {
    "completed": "green",
    "reuse": "green",
    "running": "blue",
    "rolling_back": "blue",
    "run": "yellow",
    "check": "cyan",
    "waiting": "magenta",
    "hold": "magenta",
    "failed": "bold red",
    "interrupted": "yellow",
    "upstream_failed": "red",
    "cancelled": "dim",
    "pending": "dim",
    "skipped": "dim",
    "skip": "dim",
    "rolled_back": "cyan",
    "compensated": "cyan",
}
_SEQUENCE: Final = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f]).*?(?:\x07|\x1b\\|\x9c|$)"  # OSC and the like: titles, links
    r"|\x1b[ -/]*[0-~]",
    re.DOTALL,
)
_EVENT: Final = re.compile(r"^event=(['\"])(.*?)\1(?= \w+=|$)")  # as structlog renders the message
_LEAST: Final = 24  # columns that the last cell of a row needs
_WIDE: Final = 100_000  # columns of what is not a terminal: nothing is cut
_UNSEEN: Final = frozenset({"Cc", "Cs", "Zl", "Zp"})
_DIRECTIONS: Final = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_TURNS: Final = frozenset(_DIRECTIONS)
_UNSAFE: Final = re.compile(
    f"[\x7f-\x9f\u2028\u2029\ud800-\udfff{_DIRECTIONS}]"
)  # JSON need not escape these


def clean(text: str, *, lines: bool = False) -> str:
    """Give a text without terminal sequences and passwords in URLs, controls spelled out; `lines` keeps line
    ends and tabs.
    """
    if not (text.isascii() and text.isprintable()):
        kept = "\n\t" if lines else ""
        text = "".join(
            char if char in kept or not _is_control(char) else _spelled(char)
            for char in _SEQUENCE.sub("", text)
        )
    return without_passwords(text)


def _is_control(char: str) -> bool:
    """Say whether a character moves the cursor, ends the line, or turns the direction of what follows."""
    return char in _TURNS or unicodedata.category(char) in _UNSEEN


def _spelled(char: str) -> str:
    return " " if char in "\n\t" else char.encode("unicode_escape").decode("ascii")


def line(text: str, most: int = 300) -> str:
    """Give what may stand in one line of a text from anywhere."""
    return clean(words.one_line(text, most))


# -- people ---------------------------------------------------------------------------------------------


def out() -> Console:
    """Give the standard output."""
    return _wide(Console(highlight=False, markup=False, emoji=False, soft_wrap=True))


def err() -> Console:
    """Give the standard error."""
    return _wide(Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True))


def _wide(console: Console) -> Console:
    if not console.is_terminal:
        console.width = _WIDE
    return console


def say(*parts: str | tuple[str, str]) -> None:
    """Print one line made of texts and (text, style) pairs."""
    out().print(_assembled(parts))


def warn(*parts: str | tuple[str, str]) -> None:
    """Print one line to the standard error."""
    err().print(_assembled(parts))


def _assembled(parts: Iterable[str | tuple[str, str]]) -> Text:
    return Text.assemble(
        *(clean(part) if isinstance(part, str) else (clean(part[0]), part[1]) for part in parts)
    )


def rows(headers: Sequence[str], cells: Iterable[Sequence[str]], *, styled: int | None = None) -> None:
    """Print a table; column `styled` holds words that have a style. A terminal folds the last column."""
    console = out()
    body = [[clean(cell) for cell in row] for row in cells]
    widths = [max(map(cell_len, column)) for column in zip(headers, *body, strict=True)]
    if sum(widths[:-1]) + 2 * len(widths) + _LEAST > console.width:
        console.width = _WIDE  # too narrow for columns: the terminal itself folds the lines
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in headers:
        table.add_column(header, no_wrap=header != headers[-1])
    for row in body:
        made = [Text(cell) for cell in row]
        if styled is not None:
            made[styled].stylize(STYLES.get(row[styled], ""))
        table.add_row(*made)
    with console.capture() as captured:
        console.print(table, soft_wrap=False)
    text = captured.get()
    if not console.is_terminal:  # no blanks that only fill the last column
        text = "".join(f"{row.rstrip()}\n" for row in text.splitlines())
    console.file.write(text)


def print_traceback(error: BaseException) -> None:
    """Print where an error comes from."""
    sys.stderr.write(clean("".join(traceback.format_exception(error)), lines=True))


class _Heard(logging.Handler):
    """Prints warnings of the engine and of nodes, one clean line each."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):
            told = _EVENT.sub(r"\2", record.getMessage(), count=1)
            warn((f"{record.levelname.lower()}: ", "yellow"), line(told, 1000))


def heard() -> None:
    """Print what engine and nodes log as a warning, unless the application listens itself."""
    logger = logging.getLogger("dagresume")
    if not logger.hasHandlers():
        handler = _Heard(logging.WARNING)
        logger.addHandler(handler)


# -- programs -------------------------------------------------------------------------------------------


def print_json(value: Any) -> None:
    """Print a value as strict JSON: what JSON has no word for is drawn by `codec.plain`."""
    shown = NO_SECRETS.value(codec.plain(value))
    text = json.dumps(shown, ensure_ascii=False, allow_nan=False, indent=2)
    sys.stdout.write(f"{_UNSAFE.sub(_escaped, text)}\n")


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def picture(value: Any, most: int = 120) -> str:
    """Give a value in one short line: strings as they are, everything else as JSON."""
    text = value if isinstance(value, str) else json.dumps(codec.plain(value), ensure_ascii=False)
    text = clean(" ".join(text.split()) if isinstance(value, str) else text)
    return text if len(text) <= most else f"{text[: most - 1]}…"
