"""What every command shares: its options, and how an error becomes one line and an exit code."""

import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from dagresume.cli import INTERRUPTED
from dagresume.cli.screen import line, print_traceback, warn
from dagresume.errors import (
    AlreadyRunning,
    BackupRefused,
    DagresumeError,
    DecisionError,
    DefinitionError,
    ImportRefused,
    InputError,
    InputsChanged,
    NodeTimeout,
    OwnershipError,
    RecoveryRefused,
    RunInterrupted,
    RunLocked,
    RunNotFound,
    SchemaTooNew,
    StoreCorrupt,
    StoreReadOnly,
    UncertainNode,
    VersionMismatch,
    WorkflowNotRegistered,
)
from dagresume.masks import without_passwords

__all__ = [
    "DEFAULT_DB",
    "FAILED",
    "INTERRUPTED",
    "REFUSED",
    "USAGE",
    "WAITING",
    "Apps",
    "Concurrency",
    "Db",
    "Debug",
    "Here",
    "Json",
    "Limits",
    "Problem",
    "RunId",
    "Synchronous",
    "commands",
]

FAILED, USAGE, WAITING, REFUSED = 1, 2, 3, 4
"""Exit codes; 0 is completed, INTERRUPTED is 130."""
DEFAULT_DB: Final = "dagresume.db"

Db = Annotated[
    str,
    typer.Option(
        "--db", envvar="DAGRESUME_DB", metavar="PATH", help="The database: a path or a URL.", show_envvar=True
    ),
]
Apps = Annotated[
    list[str] | None,
    typer.Option(
        "--app",
        metavar="TARGET",
        help="Where the code of stored runs is: package.module:attribute or path/flow.py. May be repeated;"
        " also DAGRESUME_APP, or apps in [tool.dagresume] of pyproject.toml.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
RunId = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's id, the beginning of it, or `last`.", show_default=False)
]
Limits = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=LIMIT",
        help="A limit that nodes name: llm=8 (at once) or llm=500/minute. May be repeated.",
    ),
]
Concurrency = Annotated[
    int, typer.Option("--concurrency", metavar="N", min=1, help="Attempts under way at once.")
]
Synchronous = Annotated[
    str,
    typer.Option(
        "--synchronous",
        metavar="full|normal",
        help="What a checkpoint survives: full the loss of power, normal the death of the process.",
    ),
]


class Problem(Exception):
    """Something a person can mend; its text is the line that says so."""

    def __init__(self, message: str, code: int = USAGE) -> None:
        self.code = code
        super().__init__(message)


@dataclass(frozen=True)
class Here:
    """What commands given from here need so that they mean the same: the options that were used."""

    db: str = DEFAULT_DB
    apps: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Here":
        """Take them from the options of a command; the target of `run` is the app of what it started."""
        target = options.get("target")
        apps = (target,) if target else options.get("app") or ()
        limits = options.get("limit")
        return cls(
            options.get("db") or DEFAULT_DB, tuple(apps), tuple(limits) if isinstance(limits, list) else ()
        )

    def command(self, name: str, *words: str) -> str:
        """Give a command that can be pasted into a shell."""
        return " ".join(["dagresume", name, *map(shlex.quote, words), *self._options(name)])

    def _options(self, name: str) -> list[str]:
        options, known = [], os.environ.get("DAGRESUME_DB")
        shown = without_passwords(self.db)
        if (known or self.db != DEFAULT_DB) and not (known == self.db != shown):
            options += ["--db", shlex.quote(shown)]
        if name in {"resume", "retry", "fork", "plan", "rollback", "recover"}:
            options += [word for app in self.apps for word in ("--app", shlex.quote(app))]
        if name in {"resume", "retry", "fork", "recover"}:
            options += [word for limit in self.limits for word in ("--limit", shlex.quote(limit))]
        return options

    def completed(self, message: str) -> str:
        """Give a message in which the commands have the options of this one."""
        return re.sub(r"`dagresume (\w+)([^`]*)`", self._complete, message)

    def _complete(self, found: re.Match[str]) -> str:
        name, rest = found[1], found[2]
        options = [] if "--db" in rest else self._options(name)
        return f"`{' '.join([f'dagresume {name}{rest}', *options])}`"


# -- errors ---------------------------------------------------------------------------------------------

_CODES: Final = (
    ((OwnershipError, RecoveryRefused, DecisionError), REFUSED),
    ((DefinitionError, InputError, RunNotFound, StoreCorrupt, StoreReadOnly, SchemaTooNew), USAGE),
    (BackupRefused, USAGE),
    (ImportRefused, REFUSED),
    (RunInterrupted, INTERRUPTED),
)


def exit_code(error: BaseException) -> int:
    """Give the exit code that an error means."""
    if isinstance(error, Problem):
        return error.code
    return next((code for kinds, code in _CODES if isinstance(error, kinds)), FAILED)


def explain(error: BaseException, here: Here) -> str:
    """Give the one line that says what is wrong and which command mends it."""
    if isinstance(error, WorkflowNotRegistered):
        return (
            f"run {error.run_id} is of workflow {error.workflow!r} version {error.version!r}, whose code is"
            " not known here. Name it with --app package.module:workflow or --app path/flow.py, with"
            " DAGRESUME_APP, or under apps in [tool.dagresume] of pyproject.toml."
        )
    if isinstance(error, InputsChanged):
        return (
            f"the newest run with key {error.key!r}, {error.run_id}, was started with other inputs"
            f" (different: {', '.join(error.names)}). Give the same ones, another --key, --fresh for a new"
            f" run, or fork it with the new ones: `{here.command('fork', error.run_id)}` with --input."
        )
    if isinstance(error, UncertainNode):
        return here.completed(str(error)) + f" What is known of it: `{here.command('show', error.run_id)}`"
    if isinstance(error, RunLocked | AlreadyRunning):
        return f"{error} Stop it with `{here.command('cancel', error.run_id)}`, or wait for its end."
    if isinstance(error, VersionMismatch):
        told = "; ".join(error.differences) or "its version"
        forced = here.command("resume", error.run_id, "--force")
        return (
            f"run {error.run_id}: the definition of {error.workflow!r} changed since it started: {told}."
            f" Go on with the new one: `{forced}`; or let it say how it takes such runs over (wf.migrate), or"
            " use the code it started with."
        )
    if isinstance(error, Problem | DagresumeError):
        return here.completed(str(error))
    if isinstance(error, OSError | NodeTimeout):
        return f"{type(error).__name__}: {error}"
    return f"{type(error).__name__}: {error} (unexpected; --debug shows where)"


class Command(TyperCommand):
    """A command that ends with one line on the standard error and an exit code, whatever happens in it."""

    def invoke(self, ctx: Any) -> Any:
        """Do what the command does."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            complain("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # whoever read our output has left; nobody needs to be told
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(FAILED) from None
        except typer.Exit:
            raise
        except typer.Abort:  # an answer that never came
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            if ctx.params.get("debug"):
                print_traceback(error)
            complain(explain(error, Here.of(ctx.params)))
            raise typer.Exit(exit_code(error)) from None


def complain(message: str) -> None:
    """Print the line of an error."""
    warn(("error: ", "bold red"), line(message, 2000))


def commands() -> typer.Typer:
    """Give a home for a group of commands."""
    return typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
