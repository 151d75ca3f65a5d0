"""Writes the pages that follow from the code: `python -m tests.meta.reference`.

cli.md from the commands, errors.md from the errors, api.md from the docstrings of the public names, the lists
of reasons in events.md from the words. A test says whether they are current.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import typer

import dagresume
from dagresume import errors, words
from dagresume.cli import COMMANDS, app
from dagresume.cli.command import exit_code

ABOUT_COMMANDS = """\
`dagresume COMMAND --help` says the same. `--db` (or `DAGRESUME_DB`) names the database, `--json` makes
the output data: one document, or a line each where something is followed.

Exit codes: 0 completed, 1 failed or cancelled, 2 usage, 3 waiting, 4 refused, 130 interrupted. Colour
only on terminals, and not where `NO_COLOR` is set. `dagresume --install-completion` completes commands
and options in your shell."""
ABOUT_ERRORS = """\
All of them are importable from `dagresume`. Each is a `DagresumeError`, carries its facts as
attributes, and its message says what is wrong, where, and which call or command mends it. The command
line prints that line on the standard error and ends with the code of the last column."""
ABOUT_NAMES = """\
Everything here is importable from `dagresume`. Errors have a page of their own
([errors.md](errors.md)), options stand in [settings.md](settings.md)."""
DOCS = Path(dagresume.__file__).parent / "docs"


# -- the command line -----------------------------------------------------------------------------------


def cli() -> str:
    """Give the page about the commands."""
    group: Any = typer.main.get_command(app)
    lines = [
        "# The command line",
        "",
        ABOUT_COMMANDS,
        "",
    ]
    for name in COMMANDS:
        command = group.get_command(None, name)
        lines += [*_command(name, command), ""]
    return "\n".join(lines)


def _command(name: str, command: Any) -> Iterator[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    shown = " ".join(_metavar(p) for p in arguments)
    yield f"## `dagresume {name}{f' {shown}' if shown else ''}`"
    yield ""
    yield _flat(command.help or "")
    described = [p for p in command.params if p.name != "help"]
    rows = [_option(p) for p in described if getattr(p, "help", None)]
    if rows:
        yield ""
        yield "| | |"
        yield "|---|---|"
        yield from rows


def _metavar(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    return name if parameter.required or name.startswith("[") else f"[{name}]"


def _option(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"| `{_metavar(parameter)}` | {_cell(parameter.help)} |".replace("\\|", "\\|")
    names = "`, `".join([*parameter.opts, *parameter.secondary_opts])
    value = "" if parameter.is_flag else f" {parameter.metavar or parameter.name.upper()}"
    return f"| `{names}{value.replace('|', chr(92) + '|')}` | {_cell(parameter.help)} |"


def _cell(text: str) -> str:
    return _flat(text).replace("|", "\\|") if text.strip() else text


def _flat(text: str) -> str:
    """Give a docstring with its paragraphs on a line each."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(text))
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


# -- errors ---------------------------------------------------------------------------------------------


def errors_page() -> str:
    """Give the page about the errors, the general ones first."""
    lines = [
        "# Errors",
        "",
        ABOUT_ERRORS,
        "",
        "| error | is a | what it means | exit code |",
        "|---|---|---|---|",
    ]
    for name in dagresume.__all__:
        kind = getattr(dagresume, name)
        if not (inspect.isclass(kind) and issubclass(kind, errors.DagresumeError)):
            continue
        bases = ", ".join(f"`{name}`" for name in _public_bases(kind))
        code = exit_code(kind.__new__(kind))
        lines.append(f"| `{name}` | {bases} | {_cell(kind.__doc__ or '')} | {code} |")
    return "\n".join([*lines, ""])


def _public_bases(kind: type) -> Iterator[str]:
    for base in kind.__bases__:
        if base.__name__.startswith("_"):
            yield from _public_bases(base)
        else:
            yield base.__name__


# -- the API --------------------------------------------------------------------------------------------


def api() -> str:
    """Give the page about the public names."""
    lines = [
        "# API",
        "",
        ABOUT_NAMES,
        "",
    ]
    for name in dagresume.__all__:
        thing = getattr(dagresume, name)
        if inspect.isclass(thing) and issubclass(thing, errors.DagresumeError):
            continue
        lines += [*_thing(name, thing), ""]
    return "\n".join(lines)


def _thing(name: str, thing: Any) -> Iterator[str]:
    if inspect.ismodule(thing):
        yield f"## `{name}`"
        yield ""
        yield _doc(thing)
        for part in thing.__all__:
            found = getattr(thing, part)
            if inspect.isfunction(found):
                yield from _member(f"{name}.{part}", found)
        return
    if not (inspect.isclass(thing) or inspect.isfunction(thing)):
        yield f"## `{name}`"
        yield ""
        yield f"`{thing!r}`"
        return
    yield f"## `{name}`"
    yield ""
    yield from _signature(name, thing)
    yield _doc(thing)
    if inspect.isclass(thing):
        for part, member in vars(thing).items():
            if not part.startswith("_") and _is_documented(member):
                yield from _member(part, member)


def _is_documented(member: Any) -> bool:
    found = getattr(member, "__func__", member)
    return (inspect.isfunction(found) or isinstance(found, property)) and bool(found.__doc__)


def _member(name: str, member: Any) -> Iterator[str]:
    found = getattr(member, "__func__", member)
    yield ""
    yield f"### `{name}`"
    yield ""
    if not isinstance(found, property):
        yield from _signature(name.rpartition(".")[2], found)
    yield _doc(found)


def _signature(name: str, thing: Callable[..., Any]) -> Iterator[str]:
    if inspect.isclass(thing) and issubclass(thing, Enum):
        return
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(thing)))
    text = f"{name}{signature}".replace("dagresume.", "")
    prefix = "async def " if inspect.iscoroutinefunction(thing) or inspect.isasyncgenfunction(thing) else ""
    told = re.sub(r"<\w+\.\w+: ('\w+')>", r"\1", re.sub(r"<[^<>]* at 0x\w+>", "…", text))
    yield "```text"
    yield textwrap.fill(f"{prefix}{told}", 120, subsequent_indent="    ", break_long_words=False)
    yield "```"
    yield ""


def _doc(thing: Any) -> str:
    text = inspect.getdoc(thing) or ""
    return text if "    " in text else _flat(text)


# -- events ---------------------------------------------------------------------------------------------


def events() -> str:
    """Give the page about events, whose lists of reasons follow from the words."""
    page = (DOCS / "events.md").read_text(encoding="utf-8").partition(REASONS)[0].rstrip()
    lines = [page, "", REASONS, "", "| of a path | |", "|---|---|"]
    lines += [f"| `{reason}` | {told} |" for reason, told in sorted(words.NODE_REASONS.items())]
    lines += ["", "| of a run | |", "|---|---|"]
    lines += [f"| `{reason}` | {told} |" for reason, told in sorted(words.RUN_REASONS.items())]
    lines += ["", "| of a decision (`plan`) | | |", "|---|---|---|"]
    told = sorted(words.DECISIONS.items())
    lines += [f"| `{action}` | `{reason}` | {sentence} |" for (action, reason), sentence in told]
    return "\n".join([*lines, ""])


REASONS = "## Reasons"
PAGES: Mapping[str, Callable[[], str]] = {
    "cli.md": cli,
    "errors.md": errors_page,
    "api.md": api,
    "events.md": events,
}


def main() -> None:
    """Write the pages."""
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
