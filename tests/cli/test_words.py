"""Every decision the planner can give has a sentence."""

import ast
import inspect
from collections.abc import Iterator

import pytest

from dagresume import plan, planner, words


def strings(node: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def actions(node: ast.AST) -> set[str]:
    names = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and n.attr.isupper()}
    return {planner.Action[name].value for name in names}


def decisions_in_source() -> Iterator[tuple[str, str]]:
    """Every (action, reason) that the planner writes down as such."""
    source = inspect.getsource(planner) + inspect.getsource(plan)
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            continue
        offset = {"Verdict": 0, "Decision": 1}.get(call.func.id)
        if offset is None or len(call.args) < offset + 2:
            continue
        for action in actions(call.args[offset]):
            for reason in strings(call.args[offset + 1]):
                yield action, reason


def test_the_search_finds_the_planners_decisions() -> None:
    found = set(decisions_in_source())
    assert {("run", "new"), ("reuse", "completed"), ("hold", "uncertain"), ("skip", "trigger")} <= found
    assert len(found) >= 18


def test_every_decision_of_the_planner_has_a_sentence() -> None:
    assert set(decisions_in_source()) - words.DECISIONS.keys() == set()


def test_every_sentence_is_one() -> None:
    sentences = [*words.DECISIONS.values(), *words.NODE_REASONS.values()]
    assert [text for text in sentences if not (text[0].isupper() and text.endswith("."))] == []
    assert {action for action, _ in words.DECISIONS} <= {str(action) for action in planner.Action}


def test_a_word_without_a_sentence_is_shown_as_it_is() -> None:
    assert words.decision("run", "moon_phase") == "Run: moon phase."
    assert words.node_reason("moon_phase") == "Moon phase."
    assert words.run_reason("moon_phase") == "moon phase"


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (None, ""),
        (0.0, "0 ms"),
        (0.00042, "0.4 ms"),
        (0.0123, "12 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1 min"),
        (573, "9 min 33 s"),
        (7500, "2 h 5 min"),
        (273600, "3 d 4 h"),
    ],
)
def test_durations_in_words(seconds: float | None, told: str) -> None:
    assert words.duration(seconds) == told


def test_usage_in_words() -> None:
    used = {"tokens_in": 1200, "tokens_out": 300, "cost": 0.25, "pages": 7}
    assert words.usage(used) == "1,200 tokens in, 300 tokens out, cost 0.25, pages 7"
    assert words.usage({"tokens_in": 0, "cost": 0.0}) == ""
