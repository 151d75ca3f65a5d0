"""`dagresume run`: what it takes, what it prints, how it exits."""

import asyncio
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dagresume import run_sync
from tests.cli.conftest import Cli, forget

Write = Callable[[str, str], Path]
Effects = Callable[[], list[str]]


def test_a_run_that_completes_exits_0_and_shows_its_last_outputs(
    pipeline: Path, place: Path, cli: Cli
) -> None:
    (place / "mended").touch()
    done = cli("run flow.py")
    assert (done.code, done.err) == (0, "")
    assert re.match(r"run [0-9a-f-]{36} of pipeline: completed\n  7 paths executed, 0 reused", done.out)
    assert re.search(r"· \d+ commits · checkpoints durable after [\d.]+ ms \(p50\)", done.out)
    assert '  report  {"sum": 14}' in done.out
    assert "  mail    null" in done.out
    assert "names  " not in done.out


def test_a_failure_exits_1_and_names_path_error_place_and_remedy(pipeline: Path, cli: Cli) -> None:
    done = cli("run flow.py --db runs.db")
    line = next(n for n, text in enumerate(pipeline.read_text().splitlines(), 1) if "raise" in text)
    assert done.code == 1
    assert f"× score[2] failed: ValueError: no score for 2\n  at flow.py:{line}\n" in done.out
    assert re.search(r"\n  dagresume resume [0-9a-f-]{36} --db runs.db --app flow.py\n", done.out)


def test_the_command_that_is_offered_works_when_it_is_pasted(
    pipeline: Path, place: Path, cli: Cli, effects: Effects
) -> None:
    db = "a folder/it's runs.db"
    (place / "a folder").mkdir()
    failed = cli("run", "flow.py", "--db", db)
    offered = re.search(r"^  dagresume (resume .*)$", failed.out, re.MULTILINE)
    assert offered is not None
    (place / "mended").touch()
    before = len(effects())
    done = cli(offered[1])
    assert done.code == 0
    assert "2 paths executed, 5 reused" in done.out
    assert effects()[before:] == ["score 2"]


def test_failures_that_are_alike_are_told_together(write: Write, cli: Cli) -> None:
    write(
        "many.py",
        """
        from dagresume import Workflow
        wf = Workflow("many", idempotent=True)
        @wf.node(for_each={"x": "xs"})
        async def f(x: int) -> int:
            raise RuntimeError("no\\nsecond line" if x < 40 else f"other {x}")
        """,
    )
    done = cli("run many.py --input xs=" + str(list(range(60))).replace(" ", ""))
    assert "× f[0], f[1], f[2] and 37 more failed: RuntimeError: no\n" in done.out
    assert "second line" not in done.out
    assert re.search(r"\n  and 11 more: dagresume show [0-9a-f-]{36}\n", done.out)


def test_json_is_strict_and_tells_nothing_from_null(pipeline: Path, cli: Cli) -> None:
    done = cli("run flow.py --json")
    assert (done.code, done.err) == (1, "")
    told = done.json
    assert told["status"] == "failed"
    assert told["outputs"] == {"names": [0, 1, 2, 3], "mail": None}
    assert told["failures"]["score[2]"]["message"] == "no score for 2"
    assert sorted(told["executed"]) == ["mail", "names", "score[0]", "score[1]", "score[2]", "score[3]"]
    assert told["stats"]["checkpoint_latency"]["count"] > 0


def test_values_json_has_no_word_for_are_drawn(write: Write, cli: Cli) -> None:
    write(
        "odd.py",
        """
        from datetime import date
        from dagresume import Workflow
        wf = Workflow("odd")
        @wf.node
        async def f() -> list:
            return [float("nan"), float("inf"), (1, 2), date(2026, 1, 2), b"ab", {3: 4}]
        """,
    )
    assert cli("run odd.py --json").json["outputs"]["f"] == [
        None,
        None,
        [1, 2],
        "2026-01-02",
        "YWI=",
        {"3": 4},
    ]


def test_a_key_gives_its_stored_result_and_fresh_a_new_run(
    pipeline: Path, place: Path, cli: Cli, effects: Effects
) -> None:
    (place / "mended").touch()
    first = cli("run flow.py --key today --json").json
    again = cli("run flow.py --key today")
    assert again.code == 0
    assert "nothing was executed; 7 paths completed before" in again.out
    assert len(effects()) == 5
    assert cli("run flow.py --key today --window 0 --json").json["run_id"] != first["run_id"]
    assert cli("run flow.py --key today --fresh --json").json["executed"] != []
    assert len(effects()) == 15


def test_a_key_with_other_inputs_is_an_error_in_words_of_the_command_line(
    pipeline: Path, place: Path, cli: Cli
) -> None:
    (place / "mended").touch()
    cli("run flow.py --key today")
    done = cli("run flow.py --key today --input count=2")
    assert done.code == 2
    assert "count" in done.error
    assert "--fresh" in done.error
    assert "fresh=True" not in done.error


INPUTS = """
    from pathlib import Path
    from typing import Any
    from dagresume import Workflow
    wf = Workflow("inputs", idempotent=True)
    @wf.node
    async def f(text: str, maybe: str | None, any_: Any, folder: Path = Path("."), n: int = 3) -> list:
        return [text, maybe, any_, str(folder), n]
"""


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ("text=007 maybe=null any_=007", ["007", None, "007", ".", 3]),
        ("text=true maybe=1.5 any_=true", ["true", "1.5", True, ".", 3]),
        ('text= maybe=a=b any_=[1,{"a":null}] n=-4', ["", "a=b", [1, {"a": None}], ".", -4]),
        ("text=null maybe= any_=NaN folder=/x/y", ["null", "", "NaN", "/x/y", 3]),
        ("text=[1] maybe={} any_=null", ["[1]", "{}", None, ".", 3]),
    ],
)
def test_inputs_are_json_unless_they_are_declared_as_text(
    given: str, seen: list[object], write: Write, cli: Cli
) -> None:
    write("flow.py", INPUTS)
    words = [word for pair in given.split(" ") for word in ("--input", pair)]
    assert cli("run", "flow.py", *words, "--json").json["outputs"]["f"] == seen


def test_inputs_of_a_file_yield_to_those_that_are_given(write: Write, cli: Cli) -> None:
    write("flow.py", INPUTS)
    write("in.json", '{"text": "a", "maybe": null, "any_": 1}')
    done = cli("run flow.py --inputs in.json --input any_=2 --json")
    assert done.json["outputs"]["f"] == ["a", None, 2, ".", 3]


LIMITED = """
    from dagresume import Workflow
    wf = Workflow("limited", idempotent=True)
    @wf.node(limit="llm")
    async def f() -> int:
        return 1
"""


def test_limits_are_given_on_the_command_line_and_named_if_they_are_not(write: Write, cli: Cli) -> None:
    write("flow.py", LIMITED)
    refused = cli("run flow.py")
    assert refused.code == 2
    assert "--limit llm=8" in refused.error
    assert not Path("dagresume.db").exists()
    assert cli("run flow.py --limit llm=1 --limit llm=500/minute").code == 0
    assert cli("resume last --app flow.py").code == 2
    assert cli("resume last --app flow.py --limit llm=9/second").code == 0


def test_an_output_that_cannot_be_stored_is_told_with_its_place(write: Write, cli: Cli) -> None:
    write(
        "flow.py",
        """
        from dagresume import Workflow
        wf = Workflow("w")
        @wf.node
        async def f() -> list:
            return [1, object()]
        """,
    )
    done = cli("run flow.py")
    assert done.code == 1
    assert "× f failed: OutputNotSerializable: " in done.out
    assert "$[1] is object" in done.out
    assert re.search(r"\n  dagresume retry [0-9a-f-]{36} --app flow.py\n", done.out)  # resume would refuse


HELD = """
    from pathlib import Path
    from dagresume import Workflow
    wf = Workflow("held", idempotent=True)
    @wf.node(version="1")
    async def price() -> int:
        return int(Path("price").read_text())
    @wf.node(idempotent=False)
    async def pay(price: int) -> int:
        with open("effects.txt", "a") as file:
            file.write(f"pay {price}\\n")
        return price
    @wf.node
    async def late(price: int, pay: int) -> int:
        return 1 // (price - 1)
"""


def test_a_run_held_for_a_person_exits_3_and_goes_on_with_their_word(
    write: Write, cli: Cli, effects: Effects
) -> None:
    flow = write("flow.py", HELD)
    write("price", "1")
    assert cli("run flow.py").code == 1
    write("price", "5")
    flow.write_text(flow.read_text().replace('version="1"', 'version="2"'))
    forget(flow)
    held = cli("resume last --app flow.py")
    assert held.code == 3
    assert ": waiting (a person has to decide about a path)" in held.out
    assert effects() == ["pay 1"]
    asked = cli("retry last --app flow.py")
    assert asked.code == 4
    assert "pay" in asked.error
    assert "--yes" in asked.error
    assert cli("retry last --app flow.py --yes").code == 0
    assert effects() == ["pay 1", "pay 5"]


def test_runs_of_the_command_line_and_of_the_api_are_one(pipeline: Path, place: Path, cli: Cli) -> None:
    (place / "mended").touch()
    namespace: dict[str, object] = {"__name__": "flow"}
    exec(compile(pipeline.read_text(), "flow.py", "exec"), namespace)
    result = run_sync(namespace["wf"], db="runs.db")  # type: ignore[arg-type]
    assert cli("list --db runs.db --json").json[0]["run_id"] == result.run_id


class Theirs(asyncio.SelectorEventLoop):
    """An event loop of somebody else."""


@pytest.mark.parametrize(
    ("uvloop", "loop"),
    [(SimpleNamespace(new_event_loop=Theirs), "Theirs"), (None, "_UnixSelectorEventLoop")],
    ids=["installed", "not there"],
)
def test_bodies_run_on_uvloop_where_it_is_installed(
    uvloop: object, loop: str, write: Write, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", uvloop)
    write(
        "where.py",
        """
        import asyncio
        from dagresume import Workflow

        wf = Workflow("where")

        @wf.node
        async def loop() -> str:
            return type(asyncio.get_running_loop()).__name__
        """,
    )
    assert cli("run where.py --json").json["outputs"]["loop"] == loop
