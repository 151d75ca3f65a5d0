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
from rich.text import Text

from dagresume import codec, words
from dagresume.masks import NO_SECRETS, without_passwords

__all__ = [
    "GLYPHS",
    "STYLES",
    "clean",
    "heard",
    "is_wide",
    "line",
    "out",
    "paragraph",
    "picture",
    "print_json",
    "print_traceback",
    "rows",
    "say",
    "status",
    "warn",
    "width",
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
GLYPHS: Final[Mapping[str, str]] = {
    "pending": "·",
    "running": "▶",
    "rolling_back": "↩",
    "waiting": "‖",
    "completed": "✓",
    "failed": "×",
    "interrupted": "?",
    "skipped": "»",
    "upstream_failed": "←",
    "cancelled": "■",
    "compensated": "↩",
    "rolled_back": "↩",
}
"""Shape of a status, as the page draws it: no two that differ in colour alone."""
_ROOMY: Final = 110
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


def width() -> int:
    """Give the columns of the terminal; of what is none, more than any line has."""
    return out().width


def is_wide() -> bool:
    """Say whether whole run ids and times have room beside everything else."""
    return out().width >= _ROOMY


def status(word: str) -> str:
    """Give a status with its glyph: shape and word, then colour."""
    return f"{GLYPHS.get(word, ' ')} {word}"


def rows(headers: Sequence[str], cells: Iterable[Sequence[str]], *, styled: int | None = None) -> None:
    """Print a table; column `styled` holds words that have a style. A terminal folds the last column, or
    where it is too narrow for that, gives it a line of its own.
    """
    console = out()
    body = [[clean(cell) for cell in row] for row in cells]
    widths = [max(map(cell_len, column)) for column in zip(headers, *body, strict=True)]
    room = console.width - sum(widths[:-1]) - 2 * (len(widths) - 1)
    below = room < min(_LEAST, widths[-1])
    lines = [_row(headers[:-1] if below else headers, widths, None)]
    lines[0].stylize("bold")
    for row in body:
        folded = [Text(row[-1])] if below or cell_len(row[-1]) <= room else _wrapped(row[-1], room, console)
        lines.append(_row([*row[:-1], "" if below else folded[0].plain.rstrip()], widths, styled))
        indent = 4 if below else sum(widths[:-1]) + 2 * (len(widths) - 1)
        rest = _wrapped(row[-1], console.width - 4, console) if below and row[-1] else folded[1:]
        lines += [Text(" " * indent + each.plain.rstrip()) for each in rest]
    console.print(Text("\n").join(lines))


def _wrapped(text: str, room: int, console: Console) -> list[Text]:
    return list(Text(text).wrap(console, max(room, 10), no_wrap=False)) or [Text("")]


def _row(cells: Sequence[str], widths: Sequence[int], styled: int | None) -> Text:
    """Give a line of a table; without blanks that only fill the last column."""
    last = max((n for n, cell in enumerate(cells) if cell), default=0)
    made = Text()
    for n, cell in enumerate(cells[: last + 1]):
        style = STYLES.get(cell.split(" ", 1)[-1], STYLES.get(cell, "")) if n == styled else ""
        pad = "" if n == last else " " * (widths[n] - cell_len(cell) + 2)
        made.append(cell, style or None)
        made.append(pad)
    return made


def paragraph(text: str, indent: int = 2, style: str = "") -> None:
    """Print a sentence, folded at words on a terminal."""
    console = out()
    for each in _wrapped(clean(text), console.width - indent, console):
        console.print(Text(" " * indent + each.plain.rstrip(), style=style))


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


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print a value as strict JSON: what JSON has no word for is drawn by `codec.plain`."""
    shown = NO_SECRETS.value(codec.plain(value))
    text = json.dumps(shown, ensure_ascii=False, allow_nan=False, indent=indent)
    sys.stdout.write(f"{_UNSAFE.sub(_escaped, text)}\n")


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def picture(value: Any, most: int = 120) -> str:
    """Give a value in one short line: strings as they are, everything else as JSON."""
    text = value if isinstance(value, str) else json.dumps(codec.plain(value), ensure_ascii=False)
    text = clean(" ".join(text.split()) if isinstance(value, str) else text)
    return text if len(text) <= most else f"{text[: most - 1]}…"
