"""The checkpoint saver for LangGraph: the official suite, kills between supersteps, bytes of strangers."""

import asyncio
import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

pytest.importorskip("langgraph.graph")
pytest.importorskip("langgraph.checkpoint.conformance")

from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.conformance.report import ProgressCallbacks
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from dagresume import Context, Engine, Workflow
from dagresume.doctor import examine, sound
from dagresume.langgraph import DagresumeSaver, GraphInterrupted, run_graph

GRAPH = """
    import operator
    import os
    import sys
    from pathlib import Path
    from typing import Annotated, TypedDict

    from langgraph.graph import END, START, StateGraph

    from dagresume.langgraph import DagresumeSaver

    class State(TypedDict):
        done: Annotated[list[str], operator.add]

    def step(name):
        def run(state):
            with open("ran.log", "a") as log:
                log.write(name + "\\n")
            if name == os.environ.get("DIE") and not Path("died").exists():
                Path("died").touch()
                os._exit(9)
            return {"done": [name]}
        return run

    def build(saver):
        graph = StateGraph(State)
        names = ["a", "b", "c", "d"]
        for name in names:
            graph.add_node(name, step(name))
        graph.add_edge(START, "a")
        for one, other in zip(names, names[1:]):
            graph.add_edge(one, other)
        graph.add_edge("d", END)
        return graph.compile(checkpointer=saver)
"""


def load(folder: Path, text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "graph"}
    exec(compile(dedent(text), str(folder / "graph.py"), "exec"), names)
    return names


async def test_the_official_suite_passes_in_full(tmp_path: Path) -> None:
    numbers = iter(range(1000))

    @checkpointer_test(name="DagresumeSaver")
    async def made() -> AsyncIterator[DagresumeSaver]:
        async with DagresumeSaver(tmp_path / f"{next(numbers)}.db") as saver:
            yield saver

    report = await validate(made, progress=ProgressCallbacks.default())
    report.print_report()
    assert report.passed_all()
    assert report.conformance_level() == "FULL"


async def test_it_lives_in_the_file_of_an_engine(
    db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = load(tmp_path, GRAPH)
    wf = Workflow("w", idempotent=True)

    @wf.node
    async def one() -> int:
        return 1

    monkeypatch.chdir(tmp_path)
    async with Engine(db) as engine, DagresumeSaver(db) as saver:
        graph = names["build"](saver)
        given, _ = await asyncio.gather(
            graph.ainvoke({"done": []}, {"configurable": {"thread_id": "t"}}), engine.run(wf)
        )
        assert given["done"] == ["a", "b", "c", "d"]
    assert sound(examine(db))
    async with Engine(db) as engine:
        assert len(await engine.runs()) == 1


RUN = """
    import asyncio
    import sys
    from dagresume import Context, Engine, Workflow
    from dagresume.langgraph import run_graph
    from graph import build
    from dagresume.langgraph import DagresumeSaver

    wf = Workflow("outer", idempotent=True)
    graph = build(DagresumeSaver("runs.db"))

    @wf.node
    async def inner(ctx: Context) -> list[str]:
        return (await run_graph(graph, {"done": []}, ctx))["done"]

    async def main():
        async with Engine("runs.db") as engine:
            print((await engine.run(wf, key="k"))["inner"])

    asyncio.run(main())
"""


@pytest.mark.parametrize("at", ["a", "b", "c", "d"])
def test_a_graph_inside_a_node_goes_on_where_it_was_killed(tmp_path: Path, at: str) -> None:
    (tmp_path / "graph.py").write_text(dedent(GRAPH))
    (tmp_path / "run.py").write_text(dedent(RUN))
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}", "DIE": at}
    command = [sys.executable, "run.py"]
    first = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert first.returncode == 9, first.stderr
    second = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert second.stdout == "['a', 'b', 'c', 'd']\n", second.stderr
    ran = (tmp_path / "ran.log").read_text().split()
    assert ran == sorted(["a", "b", "c", "d", at]), "only the superstep that was cut off ran again"


async def test_a_graph_that_waits_for_a_person_is_said(db: Path) -> None:
    from typing import TypedDict

    from langgraph.graph import START, StateGraph
    from langgraph.types import interrupt

    class State(TypedDict):
        answer: str

    builder = StateGraph(State)
    builder.add_node("ask", lambda state: {"answer": interrupt("pay?")})
    builder.add_edge(START, "ask")
    wf = Workflow("w", idempotent=True)
    with DagresumeSaver(db) as saver:
        graph = builder.compile(checkpointer=saver)

        @wf.node
        async def inner(ctx: Context) -> Any:
            return await run_graph(graph, {"answer": ""}, ctx)

        async with Engine(db) as engine:
            result = await engine.run(wf, raise_on_failure=False)
    assert "wf.approval" in result.failures["inner"].message
    assert result.failures["inner"].type == f"{GraphInterrupted.__module__}.{GraphInterrupted.__qualname__}"


def test_nothing_is_unpickled(db: Path) -> None:
    config = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
    with DagresumeSaver(db) as saver:
        checkpoint = {
            "id": "1",
            "v": 1,
            "ts": "",
            "channel_values": {},
            "channel_versions": {},
            "versions_seen": {},
        }
        saver.put(config, checkpoint, {}, {})
        with closing(sqlite3.connect(db, isolation_level=None)) as conn:
            conn.execute(
                "UPDATE langgraph_checkpoints SET type = 'pickle', checkpoint = ?",
                [b"cos\nsystem\n(S'touch pwned'\ntR."],
            )
        with pytest.raises(NotImplementedError, match="pickle"):
            saver.get_tuple(config)
    assert not Path("pwned").exists()


def test_the_program_of_the_page(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "dagresume/docs/langgraph.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    (tmp_path / "agent.py").write_text(program)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "agent.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == shown, done.stderr


async def test_retention_keeps_what_the_newest_rests_on(
    db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = load(tmp_path, GRAPH)
    config = {"configurable": {"thread_id": "t"}}
    async with DagresumeSaver(db) as saver:
        graph = names["build"](saver)
        given = await graph.ainvoke({"done": []}, config, durability="sync")
        before = [each async for each in saver.alist(config)]
        saver.prune(["t"])
        after = [each async for each in saver.alist(config)]
        assert len(after) < len(before)
        assert (await graph.aget_state(config)).values == given
        saver.copy_thread("t", "u")
        assert (await graph.aget_state({"configurable": {"thread_id": "u"}})).values == given
        saver.delete_thread("t")
        assert saver.get_tuple(config) is None


def test_how_long_a_put_takes(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
    took = []
    with DagresumeSaver(db) as saver:
        for n in range(200):
            checkpoint = {
                "id": f"{n:06}", "v": 1, "ts": "", "channel_values": {"x": "y" * 500}, "channel_versions": {},
                "versions_seen": {},
            }  # fmt: skip
            begun = time.perf_counter()
            config = saver.put(config, checkpoint, {"step": n}, {})
            took.append(time.perf_counter() - begun)
    with capsys.disabled():
        print(f"\nput: p50 {sorted(took)[100] * 1e6:.0f} µs, p95 {sorted(took)[190] * 1e6:.0f} µs")


@dataclass
class Mine:
    """A class of the user's."""

    value: int


def put_one(saver: DagresumeSaver, value: Any) -> Any:
    config = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
    values = {"channel_values": {"x": value}, "channel_versions": {}, "versions_seen": {}}
    checkpoint = {"id": "1", "v": 1, "ts": "", **values}
    saver.put(config, checkpoint, {}, {})
    return saver.get_tuple(config).checkpoint["channel_values"]["x"]


def test_no_class_is_made_that_was_not_allowed(db: Path, tmp_path: Path) -> None:
    with DagresumeSaver(db) as saver:
        assert not isinstance(put_one(saver, Mine(3)), Mine)
    with DagresumeSaver(tmp_path / "allowed.db", types=[Mine]) as saver:
        assert put_one(saver, Mine(3)) == Mine(3)


@pytest.mark.filterwarnings("ignore")
def test_no_function_is_called_that_a_stored_value_names(db: Path) -> None:
    """As an attacker would write it: an extension of LangGraph's own format that names `eval`."""
    ormsgpack = pytest.importorskip("ormsgpack")
    called = ormsgpack.packb(("builtins", "eval", "6*7"))
    told = ormsgpack.packb({"channel_values": {"x": ormsgpack.Ext(0, called)}, "id": "1"})
    with DagresumeSaver(db) as saver:
        put_one(saver, 1)
        with closing(sqlite3.connect(db, isolation_level=None)) as conn:
            conn.execute("UPDATE langgraph_checkpoints SET checkpoint = ?", [told])
        found = saver.get_tuple({"configurable": {"thread_id": "t"}})
        loose = JsonPlusSerializer(allowed_msgpack_modules=True).loads_typed(("msgpack", told))
    assert loose["channel_values"]["x"] == 42, "else this test tests nothing"
    assert found.checkpoint["channel_values"]["x"] != 42


async def test_a_graph_that_stops_before_a_node_has_not_completed(db: Path, tmp_path: Path) -> None:
    graph_text = GRAPH.replace("checkpointer=saver)", 'checkpointer=saver, interrupt_before=["b"])')
    names = load(tmp_path, graph_text.replace('open("ran.log", "a")', "open(os.devnull, 'a')"))
    wf = Workflow("w", idempotent=True)
    with DagresumeSaver(db) as saver:
        graph = names["build"](saver)

        @wf.node
        async def inner(ctx: Context) -> Any:
            return await run_graph(graph, {"done": []}, ctx)

        async with Engine(db) as engine:
            result = await engine.run(wf, raise_on_failure=False)
    assert "before b" in result.failures["inner"].message
