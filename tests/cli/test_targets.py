"""How workflows are found: modules, files, and the apps of stored runs."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, forget

Write = Callable[[str, str], Path]

ONE = """
    from dagresume import Workflow
    {name} = Workflow("{name}", idempotent=True)
    @{name}.node
    async def f() -> str:
        return __name__
"""


def one(name: str) -> str:
    return ONE.format(name=name)


@pytest.mark.parametrize(
    ("file", "target", "module"),
    [
        ("flow.py", "flow.py", "flow"),
        ("flow.py", "./flow.py", "flow"),
        ("flow.py", "flow.py:wf", "flow"),
        ("flow.py", "flow:wf", "flow"),
        ("flow.py", "flow", "flow"),
        ("deep/down/flow.py", "deep/down/flow.py:wf", "flow"),
        ("my-flow.py", "my-flow.py", "my-flow"),
        ("spaces/näme.py", "spaces/näme.py", "näme"),
    ],
)
def test_a_target_is_a_module_or_a_file(file: str, target: str, module: str, write: Write, cli: Cli) -> None:
    write(file, one("wf"))
    done = cli("run", target, "--json")
    assert (done.code, done.err) == (0, "")
    assert done.json["outputs"]["f"] == module


def test_a_file_in_a_package_is_imported_as_the_part_of_it_that_it_is(write: Write, cli: Cli) -> None:
    write("src/shop/__init__.py", "")
    write("src/shop/names.py", "NAME = 'shop'")
    write("src/shop/flow.py", "from .names import NAME\n" + one("wf").replace("\n    ", "\n"))
    assert cli("run src/shop/flow.py --json").json["outputs"]["f"] == "shop.flow"


def test_a_file_finds_its_neighbours(write: Write, cli: Cli) -> None:
    write("sub/neighbour.py", "NAME = 'neighbour'")
    write(
        "sub/flow.py",
        """
        from neighbour import NAME
        from dagresume import Workflow
        wf = Workflow(NAME)
        @wf.node
        async def f() -> int:
            return 1
        """,
    )
    assert cli("run sub/flow.py --json").json["workflow"] == "neighbour"


def test_an_attribute_may_be_reached_through_others(write: Write, cli: Cli) -> None:
    write("flow.py", one("wf") + "\n    class Flows:\n        main = wf\n")
    assert cli("run flow.py:Flows.main").code == 0


def test_one_workflow_under_two_names_is_one(write: Write, cli: Cli) -> None:
    write("flow.py", one("wf") + "\n    workflow = wf\n")
    assert cli("run flow.py").code == 0


PROBLEMS = [
    ("nope.py", "there is no file nope.py"),
    ("nope/flow.py:wf", "there is no file nope/flow.py"),
    ("nope:wf", "there is no module 'nope'"),
    ("two.nope:wf", "there is no module 'two.nope'"),
    ("two", "two holds 2 workflows. Name one of them: two:a, two:b"),
    ("two.py", "two.py holds 2 workflows. Name one of them: two.py:a, two.py:b"),
    ("none.py", "none.py holds no Workflow"),
    ("two.py:c", "two.py has no 'c'. Workflows in it: a, b"),
    ("two.py:f", "holds function, not a Workflow, under 'f'"),
    ("notes.txt", "notes.txt is not a Python file"),
    ("a b:c", "names no module"),
    ("", "names no module"),
    (".", "names no module"),
    (
        "broken.py",
        "ModuleNotFoundError: No module named 'missing_thing' (broken.py:1)",
    ),
    ("raises.py", "raises.py cannot be imported: RuntimeError: at import (raises.py:2)"),
    ("syntax.py", "syntax.py cannot be imported: SyntaxError: '(' was never closed (syntax.py:1)"),
    ("queue.py", "queue.py has the name of a module of Python itself"),
    ("slash.py", "the node id 'a/b' holds '/'"),
]


@pytest.mark.parametrize(("target", "told"), PROBLEMS)
def test_what_is_wrong_with_a_target_is_told_in_one_line(
    target: str, told: str, place: Path, write: Write, cli: Cli
) -> None:
    write("two.py", one("a") + one("b"))
    write("none.py", "x = 1")
    write("notes.txt", "x")
    write("broken.py", "import missing_thing")
    write("raises.py", "\nraise RuntimeError('at import')")
    write("syntax.py", "f(")
    write("queue.py", one("wf"))
    write("slash.py", one("wf").replace(".node", ".node(id='a/b')"))
    done = cli("run", target)
    assert done.code == 2
    assert told in done.error
    assert not (place / "dagresume.db").exists()


def test_debug_shows_where_an_import_failed(write: Write, cli: Cli) -> None:
    write("broken.py", "import missing_thing")
    done = cli("run broken.py --debug")
    assert "Traceback" in done.err
    assert done.err.splitlines()[-1].startswith("error: broken.py cannot be imported")


# -- stored runs ----------------------------------------------------------------------------------------


@pytest.fixture
def stored(write: Write, cli: Cli) -> str:
    write("flow.py", one("wf"))
    write("other.py", one("other") + one("third"))
    run_id: str = cli("run flow.py --json").json["run_id"]
    return run_id


def test_a_stored_run_without_its_code_is_refused_and_told_how_to_name_it(stored: str, cli: Cli) -> None:
    for words in ("plan last", "plan last --app other.py", "resume last", "retry last"):
        done = cli(words)
        if words == "resume last":  # it is completed: its result is stored
            assert done.code == 0
            continue
        assert done.code == 4
        assert "'wf'" in done.error
        assert "--app" in done.error


@pytest.mark.parametrize(
    "apps",
    ["flow.py", "other.py,flow:wf", "other.py:third,flow", f"other.py{os.pathsep}flow.py", " flow.py , "],
)
def test_apps_may_be_named_by_the_environment(
    apps: str, stored: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGRESUME_APP", apps)
    assert cli("plan last").code == 0


@pytest.mark.skipif(os.pathsep != ":", reason="the separator and the attribute share a colon")
def test_a_bare_name_behind_a_colon_is_an_attribute(
    stored: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGRESUME_APP", "other.py:third:flow.py:wf")
    assert cli("plan last").code == 0


def test_apps_may_be_named_by_the_project(stored: str, write: Write, cli: Cli) -> None:
    write("pyproject.toml", "[tool.dagresume]\napps = ['other.py', 'flow:wf']")
    assert cli("plan last").code == 0
    assert cli("plan last --app other.py").code == 4  # what is given is meant


@pytest.mark.parametrize("text", ["apps = 1", "[tool.dagresume]\napps = 'flow.py'", "[tool]\ndagresume = 1"])
def test_a_project_that_names_no_apps_properly(text: str, stored: str, write: Write, cli: Cli) -> None:
    write("pyproject.toml", text)
    assert cli("plan last").code == (4 if text == "apps = 1" else 2)
    assert cli("show last").code == 0
    assert len(cli("plan last").err.splitlines()) == 1


def test_a_changed_definition_is_refused_naming_what_changed(stored: str, write: Write, cli: Cli) -> None:
    flow = write("flow.py", one("wf").replace("return __name__", 'raise ValueError("x")'))
    forget(flow)
    assert cli("run flow.py").code == 1
    flow = write("flow.py", one("wf") + "\n    @wf.node\n    async def g() -> int:\n        return 1\n")
    forget(flow)
    refused = cli("resume last --app flow.py")
    assert refused.code == 4
    assert "node g added" in refused.error
    assert "--force --app flow.py`" in refused.error
    forced = cli("resume last --app flow.py --force --json")
    assert forced.code == 0
    assert sorted(forced.json["executed"]) == ["f", "g"]


def test_a_workflow_that_is_a_node_of_another_is_not_what_is_meant(
    write: Callable[[str, str], Path], cli: Cli
) -> None:
    write(
        "nested.py",
        """
        from dagresume import Value, Workflow
        inner = Workflow("inner")
        @inner.node
        async def f(x: int) -> int:
            return x
        outer = Workflow("outer")
        outer.subworkflow("step", inner, args={"x": Value(1)})
    """,
    )
    assert cli("run nested.py --json").json["workflow"] == "outer"
    assert cli("run nested.py:inner --input x=1 --json").json["workflow"] == "inner"
