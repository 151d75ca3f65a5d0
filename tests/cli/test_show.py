"""`show`: a sentence first, a picture second, data third; of a hundred thousand paths no more than of ten."""

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dagresume.cli.chart import chart, critical_line
from dagresume.events import COMPLETED, Record, node_record, run_record
from dagresume.graphs import folded
from dagresume.store import Loaded, RunRow
from dagresume.timeline import Timeline, timeline
from tests.cli.conftest import Cli

Write = Callable[[str, str], Path]
SECOND = 1_000_000
START = 1_796_000_000 * SECOND


# -- the timeline ---------------------------------------------------------------------------------------


def at(seconds: float) -> int:
    return START + round(seconds * SECOND)


def done(path: str, start: float, stop: float) -> Record:
    return node_record(COMPLETED, path, 1, at(stop))._replace(took=round((stop - start) * SECOND))


def told(records: Sequence[Record], *, parents: dict[str, list[str]], now: float | None = None) -> Timeline:
    numbered = [record._replace(seq=n) for n, record in enumerate(records, 1)]
    nodes = [{"id": id_, "type": "node", "parents": above} for id_, above in parents.items()]
    row = RunRow._make([None] * len(RunRow._fields))
    loaded = Loaded(row, numbered, folded({"nodes": nodes}), None)
    return timeline(loaded, None if now is None else at(now))


def drawn(found: Timeline, order: Sequence[str], width: int = 80) -> list[str]:
    return [line.plain for line in chart(found, order, width)]


KILLED = (
    run_record("run.created", at(0)),
    done("a", 0, 1),
    node_record("node.started", "b", 1, at(1)),
    node_record("node.started", "m[0]", 1, at(1)),
    done("m[1]", 1, 3),
    run_record("run.claimed", at(7200)),
    node_record("node.started", "b", 2, at(7200)),
    done("m[0]", 7200, 7201),
    done("b", 7200, 7204),
    run_record("run.completed", at(7204)),
)
PARENTS = {"a": [], "b": ["a"], "m": ["a"]}


def test_a_stretch_without_a_process_is_a_gap_and_never_a_bar() -> None:
    found = told(KILLED, parents=PARENTS)
    assert [(s.start, s.stop, s.died) for s in found.stretches] == [
        (at(0), at(3), True),
        (at(7200), at(7204), False),
    ]
    assert found.worked == 7 * SECOND
    assert [(bar.start, bar.stop, bar.end) for bar in found.bars["b"]] == [
        (at(1), at(3), "interrupted"),
        (at(7200), at(7204), "completed"),
    ]
    head, a, b, m = drawn(found, ["a", "b", "m"])
    assert "┊1 h 59 min┊" in head
    gap = slice(head.index("┊"), head.rindex("┊") + 1)
    for row in (a, b, m):
        assert row[gap].strip("┊ ") == ""
    assert b[gap.start - 1] == "┤"  # cut off where the process died
    assert a.startswith("▸ a")
    assert m.startswith("  m")
    assert m.endswith("5.0 s, 2 at once")


def test_the_critical_path_is_what_the_end_had_to_wait_for() -> None:
    found = told(KILLED, parents=PARENTS)
    assert [(turn.node, turn.alone) for turn in found.critical] == [("a", SECOND), ("b", 6 * SECOND)]
    assert critical_line(found) == "Critical path, 7.0 s: a 1.0 s → b 6.0 s"


def test_what_runs_goes_on_until_now_and_what_waits_is_no_work() -> None:
    records = [
        run_record("run.created", at(0)),
        node_record("node.started", "a", 1, at(1)),
        node_record("node.waiting", "b", 1, at(2), "approval"),
    ]
    found = told(records, parents={"a": [], "b": []}, now=10)
    assert [(bar.stop, bar.end) for bar in found.bars["a"]] == [(at(10), "running")]
    assert [(bar.stop, bar.end) for bar in found.bars["b"]] == [(at(10), "waiting")]
    head, a, b = drawn(found, ["a", "b"])
    assert "▶" in a
    assert set(b[4:].split("  ")[0].strip()) <= {"┄"}
    assert max(map(len, (head, a, b))) <= 80


@pytest.mark.parametrize("width", [40, 80, 140])
@pytest.mark.parametrize("times", [1, 3, 40])
def test_a_timeline_fits_whatever_the_number_of_gaps(width: int, times: int) -> None:
    records = [run_record("run.created", at(0))]
    for n in range(times):
        records += [run_record("run.claimed", at(n * 100)), done("a", n * 100, n * 100 + 1)]
        records += [run_record("run.failed", at(n * 100 + 1))]
    lines = drawn(told(records, parents={"a": []}), ["a"], width)
    assert len(lines) == 2
    assert max(map(len, lines)) <= max(width, 100 if times == 40 else width)


# -- the command ----------------------------------------------------------------------------------------

STATES = """
    import os
    from dagresume import Workflow
    asks = Workflow("asks", idempotent=True)
    @asks.node
    async def draft() -> str:
        return "text"
    asks.approval("ok", depends_on="draft", prompt="Send it?")
    dies = Workflow("dies")
    @dies.node(idempotent=True)
    async def first() -> int:
        return 1
    @dies.node
    async def pay(first: int) -> int:
        os._exit(9)
    safe = Workflow("safe", idempotent=True)
    @safe.node
    async def one() -> int:
        return 1
    @safe.node
    async def gone(one: int) -> int:
        os._exit(9)
    undone = Workflow("undone", idempotent=True)
    async def back(output, ctx):
        pass
    @undone.node(compensate=back)
    async def book() -> int:
        return 1
"""


def headline(cli: Cli) -> str:
    told = cli("show last --json").json["headline"]
    shown = cli("show last").out
    assert " ".join(told.split()) in " ".join(shown.split())
    return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME", told)


def test_a_run_that_asks_says_what_and_cancelled_who_did_it(write: Write, cli: Cli) -> None:
    write("states.py", STATES)
    assert cli("run states.py:asks").code == 3
    assert headline(cli) == "ok asks you: Send it?"
    assert "First problem: ok" in cli("show last").out
    assert cli("cancel last --by Ann").code == 0
    assert headline(cli) == "Cancelled by Ann at TIME. 1 finished path is kept. It never resumes by itself."


def test_a_run_that_died_says_whether_going_on_is_safe(write: Write, cli: Cli, shell: Cli) -> None:
    write("states.py", STATES)
    shell("run states.py:dies")
    assert headline(cli) == (
        "The process died at TIME while pay was running. Nobody knows yet whether its effect happened, so"
        " nothing goes on by itself. 1 finished path is kept."
    )
    assert "First problem: pay" in cli("show last").out
    shell("run states.py:safe")
    assert headline(cli) == (
        "The process died at TIME. Nothing uncertain was under way: resuming is safe."
        " 1 finished path is kept."
    )


def test_a_run_that_was_undone_says_how_much_of_it(write: Write, cli: Cli) -> None:
    write("states.py", STATES)
    assert cli("run states.py:undone").code == 0
    assert headline(cli).startswith("1 path completed in ")
    assert cli("rollback last --app states.py:undone --yes").code == 0
    assert headline(cli).startswith("Rolled back")
    assert headline(cli).endswith(": 1 of 1 undone.")


CHAIN = """
    from dagresume import Workflow
    wf = Workflow("chain", idempotent=True)
    def node(n):
        if n:
            async def f(x: int) -> int:
                return x + 1
        else:
            async def f() -> int:
                return 0
        wf.node(id=f"n{n}", args={"x": f"n{n - 1}"} if n else {})(f)
    for n in range(1500):
        node(n)
"""
WIDE = """
    from dagresume import Workflow
    wf = Workflow("wide", idempotent=True)
    @wf.node
    async def top(n: int) -> list[int]:
        return list(range(n))
    @wf.node(for_each={"x": "top"})
    async def score(x: int) -> int:
        if x == 777:
            raise ValueError("<script>alert(1)</script> \\x1b[2J")
        return x
    @wf.node(args={"s": "score"})
    async def end(s: list) -> int:
        return len(s)
"""


def test_a_chain_of_1500_nodes_is_shown_at_once(write: Write, cli: Cli) -> None:
    """B73: under 2 s, with the timeline if it is asked for; the critical path names the longest of it."""
    write("chain.py", CHAIN)
    assert cli("run chain.py").code == 0
    start = time.perf_counter()
    done = cli("show last")
    assert time.perf_counter() - start < 2
    assert "All 1,500 paths completed" in done.out
    assert re.search(r"^n1499 +✓ completed", done.out, re.MULTILINE)
    assert "at work" not in done.out
    start = time.perf_counter()
    done = cli("show last --timeline")
    assert time.perf_counter() - start < 4
    assert "(the 8 longest of 1,500)" in done.out


def test_a_map_of_20_000_items_is_one_row(write: Write, cli: Cli) -> None:
    write("wide.py", WIDE)
    assert cli("run wide.py --input n=20000").code == 1
    done = cli("show last")
    assert "Stopped at score[777]: ValueError: <script>alert(1)</script>" in done.out
    assert "\x1b" not in done.out
    assert re.search(r"^score +× failed .* 20,000 items: 19,999 completed, 1 failed$", done.out, re.MULTILINE)
    assert len(done.out.splitlines()) < 40
    told = cli("show last --json").json
    assert told["nodes"][1]["items"] == {"completed": 19_999, "failed": 1}
    assert told["first_problem"] == "score[777]"
    assert [turn["node"] for turn in told["timeline"]["critical"]] == ["top", "score"]
    pages = cli("show last --items").out
    assert "score[196]" in pages
    assert "score[200]" not in pages
    assert re.search(r"^and 19,803 more: dagresume show \S+ --page 2$", pages, re.MULTILINE)
    last = cli("show last --page 101").out
    assert "score[19999]" in last
    assert "page 101 of 101" in last
    assert "there are 101 pages" in cli("show last --page 102").error
    assert len(cli("show last --items --json").json["nodes"]) == 20_003
