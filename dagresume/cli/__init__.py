"""The command line: one small module for each group of commands, imported when one of its commands is used."""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from importlib.metadata import version
from types import FrameType
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["app", "main"]

COMMANDS: Final = {
    "run": ("running", "Run a workflow; with --key resume its run, or give what it completed with."),
    "resume": ("running", "Run what is missing of a run; what completed is not executed again."),
    "retry": (
        "running",
        "Run again what failed, was cut off or is uncertain; with --from a path and everything below it.",
    ),
    "plan": (
        "plans",
        "Show what a resume would do with each path, why, and what it saves; nothing is executed.",
    ),
    "list": ("reading", "List the runs, newest first."),
    "show": ("reading", "Show one run: the state of each node, and what failed."),
    "cancel": ("reading", "Cancel a run; it never resumes by itself after that."),
    "logs": ("reading", "Print what the nodes of a run logged."),
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

    def invoke(self, ctx: Any) -> Any:
        """Do what the command does; Ctrl-C while its module is being loaded counts as one in the command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dagresume {version('dagresume')}")
        raise typer.Exit


app = typer.Typer(
    name="dagresume",
    cls=Commands,
    help="Run durable DAGs: what completed is never executed twice.",
    epilog="Exit codes: 0 completed, 1 failed or cancelled, 2 usage, 3 waiting, 4 refused, 130 interrupted.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def _dagresume(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Run durable DAGs: what completed is never executed twice."""


def main() -> None:
    """Run the command line; exits with its code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a value never fails for want of a character
    signal.signal(signal.SIGTERM, _terminate)
    app()


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
