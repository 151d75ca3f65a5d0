"""`dagresume docs`: the documentation, which is a part of the package."""

import difflib
import re
import sys
from collections.abc import Iterator
from importlib import resources
from typing import Annotated

import typer

from dagresume.cli.command import Command, Debug, Json, Problem, commands
from dagresume.cli.screen import out, print_json, rows, say

__all__ = ["group", "titles"]

group = commands()


def titles() -> dict[str, str]:
    """Give the name of each page and what it is about, in the order of the alphabet."""
    return {name: _title(text) for name, text in sorted(_pages())}


def _pages() -> Iterator[tuple[str, str]]:
    for file in resources.files("dagresume").joinpath("docs").iterdir():
        if file.name.endswith(".md"):
            yield file.name.removesuffix(".md"), file.read_text(encoding="utf-8")


def _title(text: str) -> str:
    found = re.match(r"# (.+)", text)
    return found[1] if found else ""


@group.command("docs", cls=Command)
def docs(
    topic: Annotated[
        str, typer.Argument(metavar="[TOPIC]", help="The page; without it all are listed.")
    ] = "",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Read the documentation."""
    pages = dict(_pages())
    name = topic.lower().removesuffix(".md")
    if not name:
        listed = titles()
        if as_json:
            print_json([{"topic": each, "title": title} for each, title in listed.items()])
            return
        rows(("topic", "about"), listed.items())
        say("")
        say("dagresume docs TOPIC shows one.")
        return
    if name not in pages:
        near = difflib.get_close_matches(name, pages, 1, 0.4)
        hint = f" Did you mean {near[0]}?" if near else " `dagresume docs` lists them."
        raise Problem(f"there is no page {topic!r}.{hint}")
    if as_json:
        print_json({"topic": name, "title": _title(pages[name]), "text": pages[name]})
    elif (console := out()).is_terminal:
        from rich.markdown import Markdown  # loaded where it is drawn

        console.soft_wrap = False
        console.print(Markdown(pages[name]), width=min(console.width, 110))
    else:
        sys.stdout.write(pages[name])
