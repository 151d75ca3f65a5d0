"""`dagresume graph`: what a workflow or a run looks like (B73: long chains, hostile names)."""

import json
import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from dagresume.cli.drawing import SUFFIXES
from dagresume.drawing import MOST_BOXES, Drawing
from dagresume.notation import dot, mermaid
from dagresume.svg import COLOURS, graph_svg
from tests.cli.conftest import Cli

Write = Callable[[str, str], Path]

SVG = "{http://www.w3.org/2000/svg}"
FLOW = """
    from dagresume import Workflow

    inner = Workflow("inner", idempotent=True)

    @inner.node
    async def judge(n: int) -> int:
        return n

    wf = Workflow("drawn", idempotent=True)

    @wf.node
    async def numbers() -> list[int]:
        return [1, 2, 3]

    @wf.node(for_each={"n": "numbers"})
    async def tenth(n: int) -> int:
        if n == 2:
            raise ValueError("not two")
        return 10 * n

    wf.subworkflow("check", inner, args={"n": "first"})
    wf.approval("sign", depends_on=["check"], prompt="?")

    @wf.node(idempotent=False)
    async def send(tenth: list[int], sign: dict) -> str:
        return "sent"
"""
NASTY = '<script>alert("x")</script>'
HOSTILE = f"""
    from dagresume import Workflow

    wf = Workflow('<b>"w"<b> --> end', idempotent=True)

    @wf.node(id={NASTY.replace("/", "|")!r})
    async def one() -> int:
        return 1

    @wf.node(id='end; a --> b %% "q" #35; \\\\', args={{"x": one}})
    async def two(x: int) -> int:
        return 1
"""


def test_a_workflow_is_drawn_without_running(cli: Cli, write: Write) -> None:
    write("flow.py", FLOW)
    done = cli("graph flow.py")
    assert done.code == 0
    lines = [re.split(r"\s{2,}", line.strip()) for line in done.out.splitlines()]
    assert lines[0] == ["drawn 1"]
    assert ["1", "numbers"] in lines
    assert ["check", "sub-workflow of 1 node"] in lines
    assert ["2", "tenth", "map", "numbers"] in lines
    assert ["sign", "approval", "check"] in lines
    assert ["3", "send ◇", "tenth, sign"] in lines
    assert not Path("dagresume.db").exists()


def test_a_run_is_drawn_with_its_statuses_and_without_its_code(cli: Cli, write: Write) -> None:
    write("flow.py", FLOW)
    assert cli("run flow.py --input first=1").code == 3
    Path("flow.py").unlink()
    out = " ".join(cli("graph last").out.split())
    assert "drawn: waiting (" in out
    assert "2 tenth × failed 2 of 3, 1 failed numbers" in out
    assert "sign ‖ waiting approval check" in out
    found = {node["node"]: node for node in cli("graph last --json").json["nodes"]}
    assert found["tenth"]["items"] == {"completed": 2, "failed": 1}
    assert found["tenth"]["total"] == 3
    assert found["send"] == {
        "node": "send", "kind": "function", "idempotent": False, "needs": ["tenth", "sign"],
        "status": "pending", "items": None, "total": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("suffix", "begins"), [("svg", "<svg"), ("mmd", "flowchart"), ("dot", "digraph"), ("txt", "drawn")]
)
def test_a_file_is_of_the_format_that_it_is_called(cli: Cli, write: Write, suffix: str, begins: str) -> None:
    write("flow.py", FLOW)
    done = cli(f"graph flow.py --output g.{suffix}")
    assert (done.code, done.out) == (0, "")
    assert Path(f"g.{suffix}").read_text().startswith(begins)
    if suffix != "txt":
        assert cli(f"graph flow.py --format {SUFFIXES['.' + suffix]}").out == Path(f"g.{suffix}").read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("graph flow.py --output g.png", "--output g.png: its name says no format"),
        ("graph flow.py --format png", "--format 'png': text, svg, mermaid, dot"),
        ("graph flow.py -o no/g.svg", "--output no/g.svg: No such file or directory"),
        ("graph nothing.py", "there is no file nothing.py"),
        ("graph 0199", "there is no database dagresume.db"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_a_line(cli: Cli, write: Write, words: str, told: str) -> None:
    write("flow.py", FLOW)
    done = cli(words)
    assert done.code in {2, 4}
    assert done.err.count("\n") == 1
    assert told in done.err


def test_an_svg_stands_alone_and_is_readable_in_light_and_dark(cli: Cli, write: Write) -> None:
    write("flow.py", FLOW)
    cli("run flow.py --input first=1")
    text = cli("graph last --format svg").out
    root = ET.fromstring(text)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {
        "svg", "title", "desc", "style", "rect", "text", "g", "path", "circle",
    }  # fmt: skip
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "url(" not in text
    assert "var(" not in text, "not every program knows variables"
    style = root.findtext(f"{SVG}style") or ""
    for light, dark in (COLOURS["failed"], COLOURS["ink"]):
        assert light in style.partition("@media")[0]
        assert dark in style.partition("@media(prefers-color-scheme:dark)")[2]
    shown = [element.text for element in root.iter(f"{SVG}text")]
    assert {"numbers", "tenth", "2 of 3, 1 failed", "send ◇"} <= set(shown)


def luminance(colour: str) -> float:
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("name", sorted(COLOURS.keys() - {"page", "edge"}))
@pytest.mark.parametrize("ground", [0, 1])
def test_every_colour_can_be_read_on_its_ground(name: str, ground: int) -> None:
    one, other = sorted((luminance(COLOURS[name][ground]), luminance(COLOURS["page"][ground])))
    assert (other + 0.05) / (one + 0.05) >= 4.5


def test_names_are_names_in_every_format(cli: Cli, write: Write) -> None:
    write("flow.py", HOSTILE)
    svg = cli("graph flow.py --format svg").out
    root = ET.fromstring(svg)
    assert not list(root.iter(f"{SVG}script"))
    assert NASTY.replace("/", "|") in [element.text for element in root.iter(f"{SVG}text")]
    drawn = cli("graph flow.py --format mermaid").out.splitlines()
    assert drawn[0] == "flowchart LR"
    assert all(
        re.fullmatch(r' {4}(n\d+\["[^"<>%;]*(#\d+;[^"<>%;]*)*"\]|n\d+ --> n\d+)', line) for line in drawn[1:]
    )
    text = cli("graph flow.py --format dot").out
    quoted = r'"(?:[^"\\\n]|\\.)*"'
    statement = rf"    (?:{quoted} \[label={quoted}\]|{quoted} -> {quoted}|rankdir=LR|node \[.*\]);"
    first, *lines, last = text.splitlines()
    assert re.fullmatch(rf"digraph {quoted} {{", first)
    assert last == "}"
    assert all(re.fullmatch(statement, line) for line in lines)


def chain(count: int) -> str:
    return f"""
    from dagresume import Workflow

    wf = Workflow("chain", idempotent=True)

    def add(n: int) -> None:
        async def step() -> int:
            return n

        wf.node(step, id=f"step_{{n}}", depends_on=[f"step_{{n - 1}}"] if n else [])

    for n in range({count}):
        add(n)
    """


def test_a_chain_of_1500_is_drawn_in_no_time_and_folded(cli: Cli, write: Write) -> None:
    write("flow.py", chain(1500))
    begun = time.monotonic()
    text = cli("graph flow.py").out
    assert time.monotonic() - begun < 5
    assert "step_0 … step_1499" in text
    assert "1,500 nodes" in text
    assert len(cli("graph flow.py --all").out.splitlines()) > 1500
    assert cli("graph flow.py --all --format svg").out.count("<g><title>") == 1500


def layered(depth: int, width: int) -> Drawing:
    nodes = [
        {
            "id": f"l{k}_{n}",
            "type": "node",
            "idempotent": True,
            "parents": [f"l{k - 1}_{p}" for p in range(width)] if k else [],
        }
        for k in range(depth)
        for n in range(width)
    ]
    return Drawing.of(json.dumps({"workflow": "w", "version": "1", "options": {}, "nodes": nodes}))


@pytest.mark.parametrize("form", [graph_svg, mermaid, dot])
def test_nodes_that_are_alike_are_one_box(form: Callable[[Drawing], str]) -> None:
    folded = layered(8, 40).folded()
    assert len(folded.figures) == 8 <= MOST_BOXES
    assert [figure.note for figure in folded.figures.values()] == ["40 nodes"] * 8
    assert folded.edges == [(f"l{k}_0 … l{k}_39", f"l{k + 1}_0 … l{k + 1}_39") for k in range(7)]
    assert "l3_0 … l3_39" in form(folded)
