"""The help is complete and quick."""

import subprocess
import sys

import pytest

from dagresume.cli import COMMANDS
from tests.cli.conftest import Cli


def test_the_help_lists_every_command(cli: Cli) -> None:
    done = cli("--help")
    assert done.code == 0
    for name in COMMANDS:
        assert f"\n  {name} " in done.out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_of_a_command_what_its_own_help_says(name: str, cli: Cli) -> None:
    done = cli(f"{name} --help")
    assert done.code == 0
    assert COMMANDS[name][1] in " ".join(done.out.split())
    assert "--debug" in done.out


def test_no_word_at_all_is_a_call_for_help(cli: Cli) -> None:
    done = cli("")
    assert done.code == 2
    assert done.out == cli("--help").out


def test_the_help_loads_no_command() -> None:
    program = """
import sys
from dagresume.cli import main
try:
    main()
except SystemExit:
    pass
print([name for name in sys.modules if name.startswith("dagresume.cli.")], file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, "--help"], capture_output=True, text=True, check=True
    )
    assert "Commands:" in done.stdout
    assert done.stderr.strip() == "[]"


def test_the_version(cli: Cli) -> None:
    done = cli("--version")
    assert (done.code, done.out.split()[0]) == (0, "dagresume")
