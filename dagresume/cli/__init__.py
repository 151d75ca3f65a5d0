"""The command line: one small module for each group of commands, imported when one of them is used."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from types import FrameType
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["INTERRUPTED", "app", "is_loop_running", "main"]

INTERRUPTED: Final = 130
COMMANDS: Final = {
    "run": ("running", "Run a workflow; with --key resume its run, or give what it completed with."),
    "resume": ("running", "Run what is missing of a run; what completed is not executed again."),
    "retry": (
        "running",
        "Run again what failed, was cut off or is uncertain; with --from a path and everything below it.",
    ),
    "fork": (
        "running",
        "Begin a new run with what another has completed; --from and other inputs say what runs again.",
    ),
    "graph": (
        "drawing",
        "Draw a workflow, or a run with its statuses: for the terminal, as SVG, Mermaid or DOT.",
    ),
    "plan": (
        "plans",
        "Show what a resume would do with each path, why, and what it saves; nothing is executed.",
    ),
    "rollback": ("undoing", "Undo what a run has done, the last first; with --to only what is below a path."),
    "list": ("listing", "List the runs, newest first."),
    "show": (
        "showing",
        "Show one run: how it is, the state of each node, when they were at work, and what failed.",
    ),
    "watch": (
        "watching",
        "Watch a run while it goes on, whichever process drives it; ends when the run does.",
    ),
    "explain": (
        "explaining",
        "Explain one path: what was done with it each time the run was driven, and why.",
    ),
    "diff": (
        "diffing",
        "Say what differs between two runs: definition, inputs, statuses, outputs; and how long nodes took.",
    ),
    "cancel": ("cancelling", "Cancel a run; it never resumes by itself after that."),
    "approve": ("letters", "Approve what a run waits for, or that a held path runs again."),
    "reject": ("letters", "Reject what a run waits for: an approval fails; a held path keeps what it gave."),
    "signal": (
        "letters",
        "Tell a run that something happened; what waits for it takes the payload, now or later.",
    ),
    "resolve": ("letters", "Say what an uncertain path did; it is not run again then."),
    "recover": (
        "recovering",
        "Go on with runs whose process died, where their workflow says so; say of the others why not.",
    ),
    "audit": (
        "recovering",
        "List what was decided about runs: taken up, by whom, ended, resumed by itself or not, and why.",
    ),
    "logs": ("logs", "Print what the nodes of a run logged; -f goes on with what comes."),
    "prune": (
        "keeping",
        "Delete runs that ended long ago, with all that belongs to them; what may go on is never touched.",
    ),
    "stats": (
        "keeping",
        "Show how runs, recoveries and checkpoints do, with alarms; or estimate the disk they will take.",
    ),
    "doctor": ("health", "Look at a database in any state: what is wrong, where, and what mends it."),
    "backup": ("health", "Copy a database with its files while it is in use."),
    "export": (
        "transferring",
        "Write runs as JSON Lines: all events with all outputs, to look at, keep or import elsewhere.",
    ),
    "import": ("transferring", "Put exported runs into a database, which is made if it is not there."),
    "bench": (
        "bench",
        "Measure what durability costs on your disk: a commit, a chain, a fan-out, how long results wait.",
    ),
    "docs": ("pages", "Read the documentation."),
    "demo": ("demo", "See it survive: screen 200 résumés, kill the process, look at the plan, go on."),
}
"""Command → its module and the first sentence of its help, which is shown without importing the module."""


class Commands(TyperGroup):
    """The commands, each loaded with its module when it is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Give the names of the commands in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | None:
        """Give a command."""
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"dagresume.cli.{COMMANDS[cmd_name][0]}")
        command = typer.main.get_group(module.group).commands[cmd_name]
        assert isinstance(command, TyperCommand)
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands without loading any of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, told) for name, (_, told) in COMMANDS.items()])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line; what is wrong with its words is told in one line, as every other error."""
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except (KeyboardInterrupt, typer.Abort):  # while the module of a command was being loaded
            code = INTERRUPTED
        except Exception as error:
            if not hasattr(error, "format_message"):
                raise
            where = getattr(getattr(error, "ctx", None), "command_path", "dagresume")
            told = import_module("dagresume.cli.screen").clean(error.format_message().rstrip("."))
            typer.echo(f"error: {told}. `{where} --help` says more.", err=True)
            code = 2
        sys.exit(code if isinstance(code, int) else 0)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dagresume {import_module('dagresume').__version__}")
        raise typer.Exit


app = typer.Typer(
    name="dagresume",
    cls=Commands,
    help="Run durable DAGs: what completed is never executed twice.",
    epilog="Exit codes: 0 completed, 1 failed or cancelled, 2 usage, 3 waiting, 4 refused, 130 interrupted.",
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def _dagresume(
    ctx: typer.Context,
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Run durable DAGs: what completed is never executed twice."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(2)


def main() -> None:
    """Run the command line; exits with its code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a value never fails for want of a character
    ours = _is_ours()
    before = signal.signal(signal.SIGTERM, _terminate) if ours else None
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED and ours:
            threading.Thread(target=_leave, daemon=True).start()
        raise
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)  # whoever calls this lives on
        _flush()


def _is_ours() -> bool:
    """Say whether the process is there for the command; a notebook, or a program with threads, lives on."""
    return threading.current_thread() is threading.main_thread() and not is_loop_running()


def is_loop_running() -> bool:
    """Say whether an event loop runs in this thread, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _flush() -> None:
    """Write what is still to be printed; that the reader has left is no error."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _leave() -> NoReturn:
    """End an interrupted process although threads of the user's code are still busy."""
    time.sleep(1.0)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(INTERRUPTED)


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
