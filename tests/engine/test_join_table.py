"""The table of join rules, typed by hand: what a node does for each way its parents end, live and resumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, get_args

import pytest

import dagresume
from dagresume import Context, RunStatus, Workflow
from dagresume.policy import TRIGGERS, Trigger
from dagresume.workflow import NodeOptions
from tests.engine.kit import Boom, Home

RULES: Final[tuple[Trigger, ...]] = ("none_failed", "all_success", "any_success", "all_done", "any_failed")

# How the parents ended, then what a node does with the rules in the order above. From DESIGN §4 and CASES
# B08, B121, B122, B124, by hand: nothing here is computed.
TABLE: Final = """
completed                                | runs    | runs    | runs    | runs | skipped
skipped                                  | skipped | skipped | skipped | runs | skipped
failed                                   | blocked | blocked | blocked | runs | runs
upstream_failed                          | blocked | blocked | blocked | runs | runs
handled                                  | blocked | blocked | blocked | runs | runs
completed + completed                    | runs    | runs    | runs    | runs | skipped
completed + skipped                      | runs    | skipped | runs    | runs | skipped
completed + failed                       | blocked | blocked | runs    | runs | runs
completed + upstream_failed              | blocked | blocked | runs    | runs | runs
completed + handled                      | blocked | blocked | runs    | runs | runs
skipped + skipped                        | skipped | skipped | skipped | runs | skipped
skipped + failed                         | blocked | blocked | blocked | runs | runs
skipped + upstream_failed                | blocked | blocked | blocked | runs | runs
skipped + handled                        | blocked | blocked | blocked | runs | runs
failed + failed                          | blocked | blocked | blocked | runs | runs
failed + upstream_failed                 | blocked | blocked | blocked | runs | runs
failed + handled                         | blocked | blocked | blocked | runs | runs
upstream_failed + upstream_failed        | blocked | blocked | blocked | runs | runs
upstream_failed + handled                | blocked | blocked | blocked | runs | runs
handled + handled                        | blocked | blocked | blocked | runs | runs
completed + completed + completed        | runs    | runs    | runs    | runs | skipped
completed + completed + skipped          | runs    | skipped | runs    | runs | skipped
completed + skipped + skipped            | runs    | skipped | runs    | runs | skipped
skipped + skipped + skipped              | skipped | skipped | skipped | runs | skipped
completed + completed + failed           | blocked | blocked | runs    | runs | runs
completed + skipped + failed             | blocked | blocked | runs    | runs | runs
completed + skipped + upstream_failed    | blocked | blocked | runs    | runs | runs
completed + skipped + handled            | blocked | blocked | runs    | runs | runs
skipped + skipped + failed               | blocked | blocked | blocked | runs | runs
failed + upstream_failed + handled       | blocked | blocked | blocked | runs | runs
"""
OUTCOMES: Final = ("completed", "skipped", "failed", "upstream_failed", "handled")
SHOWN: Final = {"runs": "completed", "skipped": "skipped", "blocked": "upstream_failed"}
WAYS: Final = ("trigger", "when") if "when" in NodeOptions.__annotations__ else ("trigger",)

Row = tuple[str, ...]


def cells(lines: Iterable[str]) -> Iterator[tuple[Row, Row]]:
    """Read lines of a table: the parents, then a word for each rule."""
    for line in lines:
        parents, *answers = (cell.strip() for cell in line.strip().strip("|").split("|"))
        yield tuple(parents.split(" + ")), tuple(answers)


ROWS: Final[dict[Row, Row]] = dict(cells(TABLE.strip().splitlines()))


class Play:
    """A workflow in which each row of the table is one node `join-<row>` with parents of its own."""

    def __init__(self, rule: Trigger, *, way: str, last_first: bool) -> None:
        self.wf = Workflow("joins")
        self.way, self.mended = way, False
        self.began: Counter[str] = Counter()
        self.seen: dict[str, tuple[set[str], set[str], dict[str, Any]]] = {}
        self.parents: dict[str, dict[str, str]] = {}  # join → parent → how it is to end
        self.node("ok")
        self.node("bad", breaks=True)
        self.elsewhere()
        for n, row in enumerate(ROWS):
            names = {f"p{n}.{place}": how for place, how in enumerate(row)}
            for place, (name, how) in enumerate(names.items()):
                late = len(row) - place if last_first else place
                self.parent(name, how, late)
            self.join(f"join{n}", names, rule)

    def node(self, id: str, *after: str, breaks: bool = False, **options: Any) -> None:
        """Add a node that is counted, and fails every time if it `breaks`."""

        async def body() -> str:
            self.began[id] += 1
            if breaks:
                raise Boom(id)
            return id

        self.wf.node(id=id, depends_on=after, **options)(body)

    def elsewhere(self) -> None:
        """Add a node that no other has to do with; it fails until it is mended."""

        @self.wf.node
        async def elsewhere() -> None:
            if not self.mended:
                raise Boom("elsewhere")

    def parent(self, id: str, how: str, late: int) -> None:
        """Add a node that ends so, after `late` others one after the other."""
        above = "bad" if how == "upstream_failed" else "ok"
        for n in range(late):
            if how != "upstream_failed":
                self.node(f"{id}.{n}", above)
                above = f"{id}.{n}"
        if how == "skipped":
            self.skipped(id, above)
            return
        self.node(id, above, breaks=how in {"failed", "handled"})
        if how == "handled":
            self.node(f"{id}.handler", id, trigger="any_failed")

    def skipped(self, id: str, above: str) -> None:
        """Add a node that is skipped, below one that completes."""
        options: dict[str, Any] = (
            {"trigger": "any_failed"} if self.way == "trigger" else {"when": lambda: False}
        )
        self.node(id, above, **options)

    def join(self, id: str, parents: dict[str, str], rule: Trigger) -> None:
        """Add the node that is asked about."""
        self.parents[id] = parents

        async def body(ctx: Context, **given: Any) -> str:
            self.began[id] += 1
            self.seen[id] = set(ctx.skipped), set(ctx.failures), {parents_of[k]: v for k, v in given.items()}
            return id

        parents_of = {f"in{n}": name for n, name in enumerate(parents)}
        self.wf.node(id=id, args=dict(parents_of), trigger=rule)(body)

    def answers(self, states: dict[str, str]) -> dict[Row, str]:
        """Give what each join did, by what the store shows of it and by whether its body began."""
        words = {shown: word for word, shown in SHOWN.items()}
        found: dict[Row, str] = {}
        for row, id in zip(ROWS, self.parents, strict=True):
            word = words.get(states[id], states[id])
            began = self.began[id]
            found[row] = word if began == (word == "runs") else f"{word}, and its body began {began} times"
        return found

    def check_parents(self, states: dict[str, str]) -> None:
        """See that the parents ended as the table says, and that the joins that ran were told so."""
        for id, parents in self.parents.items():
            for name, how in parents.items():
                assert states[name] == ("failed" if how == "handled" else how), name
                if how == "handled":
                    assert states[f"{name}.handler"] == "completed"
            if id not in self.seen:
                continue
            skipped, failed, given = self.seen[id]
            assert skipped == {name for name, how in parents.items() if how == "skipped"}
            assert failed == {name for name, how in parents.items() if how not in {"completed", "skipped"}}
            assert given == {name: name if how == "completed" else None for name, how in parents.items()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("last_first", [False, True], ids=["in order", "last first"])
@pytest.mark.parametrize("rule", RULES)
async def test_a_node_does_what_the_table_says_live_and_resumed(
    home: Home, rule: Trigger, last_first: bool, way: str
) -> None:
    """B2, B121, B122, B124, B08, B89: live; resumed; resumed with a failure elsewhere mended; once more."""
    play = Play(rule, way=way, last_first=last_first)
    expected = {row: answers[RULES.index(rule)] for row, answers in ROWS.items()}
    run_id = (await home.run(play.wf)).run_id
    for mended in (False, False, True, True):
        states = await home.statuses(run_id)
        assert play.answers(states) == expected
        play.check_parents(states)
        play.mended = mended
        result = await home.resume(play.wf, run_id)
        assert ("elsewhere" in result.failures) != mended
        assert result.status is RunStatus.FAILED  # `bad` is never mended
        assert not {path for path in result.executed if path.startswith("join")}
    states = await home.statuses(run_id)
    assert play.answers(states) == expected
    play.check_parents(states)


@pytest.mark.parametrize("rule", RULES)
async def test_the_plan_knows_what_a_join_will_do(home: Home, rule: Trigger) -> None:
    """R33: where no parent runs again, the plan says the same as the table."""
    play = Play(rule, way="trigger", last_first=False)
    run_id = (await home.run(play.wf)).run_id
    plan = await home.plan(play.wf, run_id)
    for (row, answers), id in zip(ROWS.items(), play.parents, strict=True):
        found = plan[id]
        if {"failed", "upstream_failed"} & set(row):
            continue  # these parents run again, and may complete
        word = answers[RULES.index(rule)]
        wanted = {"runs": ("reuse", "completed"), "skipped": ("skip", "trigger")}
        assert (found.action, found.reason) == wanted.get(word, ("skip", "upstream_failed")), row


def test_the_table_is_whole() -> None:
    """A row for each single outcome and each pair; a word for each rule; and no other words."""
    assert RULES == TRIGGERS == get_args(Trigger)
    singles = [(one,) for one in OUTCOMES]
    pairs = [(one, other) for n, one in enumerate(OUTCOMES) for other in OUTCOMES[n:]]
    assert list(ROWS)[:20] == singles + pairs
    assert len(ROWS) == len(TABLE.strip().splitlines()) == 30
    assert {len(answers) for answers in ROWS.values()} == {len(RULES)}
    assert {answer for answers in ROWS.values() for answer in answers} == set(SHOWN)


def test_the_page_shows_this_table() -> None:
    """What people read is what is tested."""
    page = (Path(dagresume.__file__).parent / "docs" / "join-rules.md").read_text(encoding="utf-8")
    shown = page.partition("<!-- table -->\n")[2].partition("<!-- /table -->")[0].splitlines()
    head, ruler, *lines = shown
    assert head == f"| parents | {' | '.join(RULES)} |"
    assert ruler == "|---" * (1 + len(RULES)) + "|"
    assert dict(cells(lines)) == ROWS
    assert len(lines) == len(ROWS)
