"""What is decided about one path, and about all of them, by tables typed from the specification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from dagresume import Workflow
from dagresume.events import (
    CANCELLED,
    COMPLETED,
    FAILED,
    INTERRUPTED,
    RESET,
    RUN_CREATED,
    SKIPPED,
    STARTED,
    WAITING,
    WITHDRAWN,
    Record,
    Snapshot,
    node_record,
    run_record,
)
from dagresume.plan import plan
from dagresume.planner import ABSENT, Body, Vertex, decide, uncertain, uncertain_paths

SAME, OTHER = b"s" * 16, b"o" * 16


def record(kind: str, reason: str | None = None) -> Record:
    return node_record(kind, "a", 1, 0, reason)._replace(input=SAME, seq=5)


# last record, input is now, → idempotent, not idempotent, not idempotent with reconcile
DECISIONS: list[tuple[Record | None, bytes, str, str, str]] = [
    (None, SAME, "run new", "run new", "run new"),
    (record(COMPLETED), SAME, "reuse completed", "reuse completed", "reuse completed"),
    (record(COMPLETED), OTHER, "run input_changed", "hold input_changed", "hold input_changed"),
    (record(STARTED), SAME, "run interrupted", "hold uncertain", "run reconcile"),
    (record(INTERRUPTED), SAME, "run interrupted", "hold uncertain", "run reconcile"),
    (record(CANCELLED), SAME, "run interrupted", "hold uncertain", "run reconcile"),
    (record(FAILED, "error"), SAME, "run failed", "run failed", "run failed"),
    (record(FAILED, "timeout"), OTHER, "run failed", "run failed", "run failed"),
    (record(FAILED, "retry"), SAME, "run failed", "run failed", "run failed"),
    (record(FAILED, "not_serialisable"), SAME, "run failed", "hold uncertain", "run reconcile"),
    (record(WAITING, "held"), SAME, "hold input_changed", "hold input_changed", "hold input_changed"),
    (record(RESET, "asked"), SAME, "run asked", "run asked", "run asked"),
    (record(WITHDRAWN), SAME, "run new", "run new", "run new"),
    (record(SKIPPED), SAME, "run new", "run new", "run new"),
]


@pytest.mark.parametrize(("prior", "now", "idempotent", "plain", "reconcilable"), DECISIONS)
def test_decide(prior: Record | None, now: bytes, idempotent: str, plain: str, reconcilable: str) -> None:
    """C3, C6, C7 and the paragraphs on fingerprints and reconcile."""
    assert " ".join(decide(prior, now, idempotent=True)) == idempotent
    assert " ".join(decide(prior, now, idempotent=True, reconcilable=True)) == idempotent
    assert " ".join(decide(prior, now, idempotent=False)) == plain
    assert " ".join(decide(prior, now, idempotent=False, reconcilable=True)) == reconcilable


@pytest.mark.parametrize(("prior", "_now", "idempotent", "plain", "_reconcilable"), DECISIONS)
def test_uncertain_is_what_decide_calls_so(
    prior: Record | None, _now: bytes, idempotent: str, plain: str, _reconcilable: str
) -> None:
    assert uncertain(prior, idempotent=False) is (plain == "hold uncertain")
    assert not uncertain(prior, idempotent=True)


# -- a whole plan ---------------------------------------------------------------------------------------


class History:
    """A journal typed by hand: each node's last record, with fingerprints as the engine writes them."""

    def __init__(self, wf: Workflow) -> None:
        self.body = Body(wf.compiled)
        self.rules = self.body.rules
        self.by_id = {vertex.id: vertex for vertex in self.rules}
        self.records: list[Record] = [run_record(RUN_CREATED, 1)]
        self.digests: dict[str, bytes] = {}

    def fingerprint(self, vertex: Vertex) -> bytes:
        return vertex.fingerprint(self.digests.get(self.rules[s.place].id, ABSENT) for s in vertex.received)

    def note(self, kind: str, *names: str, reason: str | None = None, **facts: Any) -> History:
        for name in names:
            node, bracket, _ = name.partition("[")
            vertex = self.by_id[node]
            made = node_record(kind, name, 1, 1, reason, **facts)
            if kind == COMPLETED:
                digest = name.encode().ljust(16, b".")[:16]
                made = made._replace(digest=digest, took=2_500_000)
                if not bracket:
                    self.digests[name] = self.fingerprint(vertex) if vertex.pure else digest
            if kind in {COMPLETED, FAILED, STARTED}:
                made = made._replace(input=SAME if bracket else self.fingerprint(vertex))
            self.records.append(made)
        return self

    def plan(self, *, items: bool = False) -> dict[str, str]:
        numbered = [record._replace(seq=n) for n, record in enumerate(self.records, 1)]
        found = plan(self.body, Snapshot(numbered), {}, items=items)
        return {decision.path: f"{decision.action} {decision.reason}" for decision in found}


def workflow(**nodes: Any) -> Workflow:
    """A workflow: node → its value parents, or options beside them."""
    wf = Workflow("w", idempotent=nodes.pop("idempotent", True))

    async def body(**given: Any) -> None: ...

    for name, what in nodes.items():
        options = dict(what) if isinstance(what, Mapping) else {"takes": what}
        takes = options.pop("takes", "").split()
        wf.node(id=name, args={f"in_{t}": t for t in takes}, **options)(body)
    return wf


CHAIN = {"a": "", "b": "a", "c": "b", "side": "a"}


def test_a_run_that_never_began_is_all_run() -> None:
    assert History(workflow(**CHAIN)).plan() == {
        "a": "run new",
        "b": "run upstream_runs",
        "c": "run upstream_runs",
        "side": "run upstream_runs",
    }


def test_a_completed_run_is_all_reuse() -> None:
    history = History(workflow(**CHAIN)).note(COMPLETED, *"abc", "side")
    assert set(history.plan().values()) == {"reuse completed"}


def test_a_failure_and_what_never_ran_below_it() -> None:
    history = History(workflow(**CHAIN)).note(COMPLETED, "a", "side").note(FAILED, "b", reason="error")
    assert history.plan() == {
        "a": "reuse completed",
        "b": "run failed",
        "c": "run upstream_runs",
        "side": "reuse completed",
    }


def test_what_completed_below_a_path_that_runs_is_checked() -> None:
    history = History(workflow(**CHAIN)).note(COMPLETED, *"abc", "side").note(RESET, "b", reason="asked")
    assert history.plan() == {
        "a": "reuse completed",
        "b": "run asked",
        "c": "check input_may_change",
        "side": "reuse completed",
    }


def test_below_what_may_be_held_nothing_is_sure() -> None:
    """A completed child that is not idempotent may be held: then what is below it does not run."""
    history = History(workflow(idempotent=False, **CHAIN))
    history.note(COMPLETED, *"ab", "side").note(RESET, "a", reason="asked")
    assert history.plan()["b"].startswith("check")
    assert history.plan()["c"].startswith("check")


def test_uncertain_paths_hold_and_nothing_below_runs() -> None:
    history = History(workflow(idempotent=False, **CHAIN)).note(COMPLETED, "a").note(STARTED, "b")
    made = history.plan()
    assert made["b"] == "hold uncertain"
    assert made["c"].split()[0] in {"wait", "skip"}
    assert made["side"] == "run new"
    numbered = [record._replace(seq=n) for n, record in enumerate(history.records, 1)]
    assert uncertain_paths(history.body, Snapshot(numbered)) == ["b"]


JOINED = {
    "ok": "",
    "x": "",
    "skipped": {"depends_on": ["ok"], "trigger": "any_failed"},
    "dead": "",
    "handler": {"depends_on": ["dead"], "trigger": "any_failed"},
}


@pytest.mark.parametrize(
    ("trigger", "parents", "expected"),
    [
        ("none_failed", "x ok", "run"),
        ("none_failed", "x skipped", "run"),
        ("none_failed", "x dead", "skip"),
        ("all_success", "x ok", "run"),
        ("all_success", "x skipped", "skip"),
        ("all_success", "x dead", "skip"),
        ("any_success", "x dead", "run"),
        ("any_success", "x skipped", "run"),
        ("all_done", "x dead", "run"),
        ("any_failed", "x dead", "run"),
        ("any_failed", "x ok", "check"),
        ("any_failed", "x skipped", "check"),
    ],
)
def test_joins_over_a_parent_that_runs(trigger: str, parents: str, expected: str) -> None:
    """x runs, ok completed, skipped was skipped, dead failed and was handled: what is sure is said."""
    wf = workflow(**JOINED, j={"depends_on": parents.split(), "trigger": trigger})
    history = History(wf).note(COMPLETED, "ok").note(FAILED, "x", "dead", reason="error")
    history.note(COMPLETED, "handler").note(SKIPPED, "skipped", reason="trigger")
    made = history.plan()
    assert made["x"] == "run failed"
    assert made["skipped"] == "skip trigger"
    assert made["dead"].endswith("handled")
    assert made["j"].split()[0] == expected


def test_pure_nodes_are_planned_only_for_what_takes_their_value() -> None:
    wf = workflow(
        p={"checkpoint": False},
        q={"checkpoint": False, "takes": "p"},
        idle={"checkpoint": False},
        ordering={"checkpoint": False},
        done="idle",
        again={"takes": "q", "depends_on": ["ordering"]},
    )
    history = (
        History(wf)
        .note(COMPLETED, "p", "q", "idle", "ordering", "done")
        .note(FAILED, "again", reason="error")
    )
    assert history.plan() == {
        "p": "run recomputed",
        "q": "run recomputed",
        "idle": "reuse completed",
        "ordering": "reuse completed",
        "done": "reuse completed",
        "again": "run failed",
    }


def test_a_handled_pure_failure_is_not_made_again() -> None:
    wf = workflow(
        p={"checkpoint": False},
        h={"depends_on": ["p"], "trigger": "any_failed"},
        x={"takes": "p", "trigger": "all_done"},
    )
    history = (
        History(wf).note(FAILED, "p", reason="error").note(COMPLETED, "h").note(FAILED, "x", reason="error")
    )
    assert history.plan()["p"].endswith("handled")
    assert not history.plan()["p"].startswith("run")


def test_maps_are_one_decision_with_counts() -> None:
    wf = workflow(items="", m={"for_each": {"n": "items"}}, join="m")
    history = History(wf).note(COMPLETED, "items").note(STARTED, "m", count=4)
    history.note(COMPLETED, "m[0]", "m[2]").note(FAILED, "m[1]", reason="error").note(
        FAILED, "m", reason="items_failed", count=4
    )
    assert list(history.plan()) == ["items", "m", "join"]
    assert history.plan(items=True) == {
        "items": "reuse completed",
        "m": "run items_missing",
        "m[0]": "reuse completed",
        "m[1]": "run failed",
        "m[2]": "reuse completed",
        "m[3]": "run new",
        "join": "run upstream_runs",
    }
    numbered = [record._replace(seq=n) for n, record in enumerate(history.records, 1)]
    [own] = [d for d in plan(history.body, Snapshot(numbered), {}) if d.path == "m"]
    assert dict(own.items) == {"reuse": 2, "run": 2}


def test_a_map_whose_list_is_not_known_yet_is_checked() -> None:
    wf = workflow(items="", m={"for_each": {"n": "items"}})
    assert History(wf).note(FAILED, "items", reason="error").plan()["m"] == "check items_not_known"


def test_tolerated_items_of_a_completed_map_stay() -> None:
    wf = workflow(items="", m={"for_each": {"n": "items"}, "tolerate": 1}, join="m")
    history = History(wf).note(COMPLETED, "items").note(STARTED, "m", count=2)
    history.note(COMPLETED, "m[0]").note(FAILED, "m[1]", reason="error").note(COMPLETED, "m", count=2).note(
        FAILED, "join"
    )
    made = history.plan(items=True)
    assert made["m"].startswith("reuse")
    assert made["m[1]"] == "reuse tolerated"
    assert made["join"] == "run failed"


def test_decisions_carry_what_a_reuse_saves() -> None:
    history = History(workflow(**CHAIN)).note(COMPLETED, "a", usage={"tokens_in": 5}).note(FAILED, "b")
    numbered = [record._replace(seq=n) for n, record in enumerate(history.records, 1)]
    made = {d.path: d for d in plan(history.body, Snapshot(numbered), {})}
    assert made["a"].seconds == 2.5
    assert made["a"].usage == {"tokens_in": 5}
    assert made["b"].seconds is None


def test_the_order_is_that_of_the_definition() -> None:
    wf = workflow(c="", a="c", b="")
    assert list(History(wf).plan()) == list(wf.compiled.ids)


# -- what is inside nodes -------------------------------------------------------------------------------


def nested() -> Workflow:
    inner = Workflow("inner")

    @inner.node
    async def read(x: int) -> int:
        return x

    @inner.node
    async def judge(read: int) -> int:
        return read

    wf = Workflow("outer")

    @wf.node
    async def top() -> int:
        return 1

    wf.subworkflow("sub", inner, args={"x": "top"})

    @wf.node
    async def end(sub: int) -> int:
        return sub

    return wf


def test_a_graph_inside_a_node_is_planned_with_it() -> None:
    history = History(nested())
    assert history.plan() == {
        "top": "run new",
        "sub": "run upstream_runs",
        "sub/read": "run upstream_runs",
        "sub/judge": "run upstream_runs",
        "end": "run upstream_runs",
    }


def test_an_uncertain_path_inside_a_node_holds_the_node() -> None:
    history = History(nested()).note(COMPLETED, "top").note(STARTED, "sub")
    history.records.append(node_record(STARTED, "sub/read", 1, 1))
    made = history.plan()
    assert made["sub/read"] == made["sub"] == "hold uncertain"
    assert made["sub/judge"] == made["end"] == "wait upstream_held"


def test_a_wait_waits() -> None:
    wf = Workflow("w")
    wf.approval("ok", depends_on=(), prompt="?")
    wf.sleep("later", 5, depends_on=["ok"])
    made = History(wf).plan()
    assert made["ok"] == "wait approval"
    assert made["later"] == "wait upstream_waits"
