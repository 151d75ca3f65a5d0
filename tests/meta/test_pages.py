"""H4: every command, option, setting, error, event, status and reason is documented; pages are current."""

import inspect
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dagresume
from dagresume import Budget, Engine, Limit, NodeStatus, Recovery, Retry, RunStatus, Workflow, events
from dagresume.cli import COMMANDS, app
from dagresume.cli.pages import titles
from dagresume.errors import DagresumeError
from dagresume.workflow import NodeOptions
from tests.meta.reference import DOCS, PAGES

ROOT = Path(__file__).parents[2]


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def named(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", text))


@pytest.mark.parametrize("name", PAGES)
def test_what_follows_from_the_code_is_current(name: str) -> None:
    assert page(name) == PAGES[name](), "python -m tests.meta.reference writes it"


def test_every_command_and_option_is_described() -> None:
    text = page("cli.md")
    assert set(re.findall(r"^## `dagresume (\w+)", text, re.MULTILINE)) == set(COMMANDS)
    for command in COMMANDS:
        shown = CliRunner().invoke(app, [command, "--help"]).output
        described = text.partition(f"## `dagresume {command}")[2].partition("\n## ")[0]
        options = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", shown)) - {"--help"}
        assert not {option for option in options if option not in described}, command


def section(title: str) -> set[str]:
    return named(page("settings.md").partition(f"\n## {title}\n")[2].partition("\n## ")[0])


@pytest.mark.parametrize("kind", [Engine, Workflow, Retry, Recovery])
def test_every_setting_is_described(kind: type) -> None:
    assert not set(inspect.signature(kind).parameters) - section(kind.__name__)


def test_every_option_of_a_node_is_described() -> None:
    assert not set(NodeOptions.__annotations__) - section("Nodes")


@pytest.mark.parametrize("kind", [Limit, Budget])
def test_every_option_of_limits_and_budgets_is_described(kind: type) -> None:
    described = section("Limit and Budget")
    assert {f"{kind.__name__}({name}=…)" for name in inspect.signature(kind).parameters} <= described


def test_every_error_is_described() -> None:
    public = [getattr(dagresume, name) for name in dagresume.__all__]
    kinds = {each.__name__ for each in public if inspect.isclass(each) and issubclass(each, DagresumeError)}
    assert kinds <= named(page("errors.md"))
    assert len(kinds) > 40


def test_every_event_status_and_reason_is_described() -> None:
    described = named(page("events.md"))
    kinds = {
        v
        for v in vars(events).values()
        if isinstance(v, str) and re.fullmatch(r"(node|run|undo|execution)\.[a-z_.]+", v)
    }
    assert len(kinds) == 30
    assert not (kinds | set(RunStatus) | set(NodeStatus)) - described
    told = {kind for kind in described if re.match(r"(node|run|undo|execution)\.", kind)}
    assert not told - kinds


def test_every_promise_of_the_contract_names_tests_that_are_there() -> None:
    text = page("contract.md")
    assert re.findall(r"^## (C\d)", text, re.MULTILINE) == [f"C{n}" for n in range(1, 10)]
    files = re.findall(r"`(tests/[\w/]+\.py)`", text)
    assert len(files) >= 18
    assert not [file for file in files if not (ROOT / file).is_file()]


def test_links_between_pages_lead_somewhere() -> None:
    for file in (*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "benchmarks/README.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", file.read_text(encoding="utf-8")):
            assert (file.parent / target).exists(), f"{file.name}: {target}"


def test_docs_lists_and_shows_every_page() -> None:
    listed = CliRunner().invoke(app, ["docs"]).output
    assert set(titles()) == {file.stem for file in DOCS.glob("*.md")}
    for topic, title in titles().items():
        assert title, topic
        assert topic in listed
        assert CliRunner().invoke(app, ["docs", topic]).output == page(f"{topic}.md")
    found = json.loads(CliRunner().invoke(app, ["docs", "--json"]).output)
    assert {entry["topic"] for entry in found} == set(titles())


def test_a_page_that_is_not_there_is_said_with_the_nearest() -> None:
    done = CliRunner().invoke(app, ["docs", "durabilty"])
    assert done.exit_code == 2
    assert done.stderr == "error: there is no page 'durabilty'. Did you mean durability?\n"
