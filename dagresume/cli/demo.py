"""`dagresume demo`."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from dagresume.cli.command import FAILED, Command, Debug, Problem, commands

__all__ = ["group"]

group = commands()
NEEDED = ("pypdf", "openpyxl", "httpx")


@group.command("demo", cls=Command)
def demo(
    folder: Annotated[
        Path | None, typer.Argument(help="Where to play; kept. Without it: a temporary folder.")
    ] = None,
    debug: Debug = False,
) -> None:
    """See it survive: screen 200 résumés, kill the process, look at the plan, go on."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise Problem(f"the demo needs {', '.join(missing)}: pip install 'dagresume[demo]'", FAILED)
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Problem(f"{folder} is not an empty folder; the demo fills one")
    # examples stand above the command line, so they are found at run time
    raise typer.Exit(import_module("dagresume.examples.demo").main(folder))
