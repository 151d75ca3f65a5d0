"""What is wrong with a stored run that cannot be read: rows of the database that nobody of ours has written.

Nothing is looked through while all is well: who fails to read a run asks here why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from dagresume import events as ev
from dagresume.clock import to_datetime
from dagresume.errors import StoreError
from dagresume.events import Event, Record, RunStatus
from dagresume.store import Holder, Loaded, LogLine, RunRow
from dagresume.views import RunInfo, run_info

__all__ = [
    "UNREADABLE",
    "explain",
    "line_flaw",
    "readable_event",
    "readable_info",
    "record_flaw",
    "row_flaw",
    "run_flaw",
    "unreadable",
]

UNREADABLE: Final = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What reading goes wrong with where a row holds what we never write."""

_SHOWN: Final = 60
_Test = Callable[[Any], bool]


def run_flaw(loaded: Loaded) -> str | None:
    """Give the first thing that is wrong with a stored run, in words; None if it is sound."""
    found = row_flaw(loaded.row)
    if found is None and not _is_object(loaded.row.inputs or "{}"):
        found = "its inputs are no JSON object"
    if found is None:
        found = _graph_flaw(loaded.graph)
    flaws = (record_flaw(record) for record in loaded.records)
    return found or next((flaw for flaw in flaws if flaw is not None), None)


def row_flaw(row: RunRow) -> str | None:
    """Give what is wrong with the row of a run."""
    if row.status not in set(RunStatus):
        return f"its status is {_shown(row.status)}, which is none"
    return _of_columns(row._asdict(), _ROW)


def record_flaw(record: Record) -> str | None:
    """Give what is wrong with a record of the journal."""
    return next((f"its event {record.seq} {flaw}" for flaw in _record_flaws(record)), None)


def line_flaw(line: LogLine) -> str | None:
    """Give what is wrong with a line that a node logged."""
    found = _of_columns(line._asdict(), _LINE)
    return None if found is None else f"of a line in its log {found}"


def _record_flaws(record: Record) -> Iterator[str]:
    if found := _of_columns(record._asdict(), _RECORD):
        yield f"is none of ours: {found}"
        return
    if record.changes_path and record.path is None:
        yield "is about no path"
    if record.path is not None and not _is_path(record.path):
        yield f"is about {_shown(record.path)}, which is no path"
    if record.data is None:
        return
    facts = _parsed(record.data)
    if not isinstance(facts, dict):
        yield "holds data that are no JSON object"
    elif found := _of_columns(facts, _FACTS):
        yield f"holds data of which {found}"


# -- tests ----------------------------------------------------------------------------------------------


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value >= 0


def _is_bytes(value: Any) -> bool:
    return isinstance(value, bytes)


def _is_time(value: Any) -> bool:
    try:
        to_datetime(value)
    except (TypeError, ArithmeticError, ValueError):
        return False
    return _is_whole(value)


def _is_path(value: Any) -> bool:
    try:
        ev.segments(value)
    except (TypeError, ValueError):
        return False
    return True


def _is_object(text: Any) -> bool:
    return isinstance(_parsed(text), dict)


def _parsed(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None


def _or_none(test: _Test) -> _Test:
    return lambda value: value is None or test(value)


def _list_of(test: _Test) -> _Test:
    return lambda value: isinstance(value, list) and all(map(test, value))


def _object_of(test: _Test) -> _Test:
    return lambda value: isinstance(value, dict) and all(map(test, value.values()))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_ROW: Final[Mapping[str, _Test]] = {
    **dict.fromkeys(("run_id", "workflow", "version", "source"), _is_text),
    **dict.fromkeys(("key", "reason", "inputs"), _or_none(_is_text)),
    **dict.fromkeys(("created_at", "updated_at"), _is_time),
    **dict.fromkeys(("finished_at", "wake_at"), _or_none(_is_time)),
    **dict.fromkeys(("run", "definition", "epoch"), _is_whole),
    "inputs_digest": _or_none(_is_bytes),
}
_RECORD: Final[Mapping[str, _Test]] = {
    "kind": _is_text,
    "at": _is_time,
    **dict.fromkeys(("status", "path", "reason", "data"), _or_none(_is_text)),
    **dict.fromkeys(("attempt", "size", "took"), _or_none(_is_whole)),
    **dict.fromkeys(("input", "digest"), _or_none(_is_bytes)),
}
_LINE: Final[Mapping[str, _Test]] = {
    **dict.fromkeys(("level", "line"), _is_text),
    "path": _or_none(_is_text),
    "attempt": _or_none(_is_whole),
    "at": _is_time,
}
_FACTS: Final[Mapping[str, _Test]] = {
    **dict.fromkeys(("count", "seq", "signal", "read"), _is_count),
    **dict.fromkeys(("due", "retry_at", "wake_at"), _or_none(_is_time)),
    **dict.fromkeys(
        ("type", "message", "traceback", "by", "comment", "prompt", "event", "code", "inputs_blob", "from"),
        _is_text,
    ),
    **dict.fromkeys(("blob", "forked_from", "to"), _or_none(_is_text)),
    **dict.fromkeys(("secrets", "permitted"), _list_of(_is_text)),
    **dict.fromkeys(("codes", "inputs"), _object_of(_is_text)),
    "usage": _object_of(_is_number),
}
"""What is known of the facts of a record; others are not read without a look at what they are."""


def _of_columns(values: Mapping[str, Any], tests: Mapping[str, _Test]) -> str | None:
    wrong = (name for name, value in values.items() if name in tests and not tests[name](value))
    return next((f"{name} is {_shown(values[name])}" for name in wrong), None)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


# -- the definition -------------------------------------------------------------------------------------


def _graph_flaw(text: str) -> str | None:
    graph = _parsed(text)
    if not isinstance(graph, dict):
        return "its definition is gone" if not text else "its definition is no JSON object"
    bodies = [graph]
    while bodies:
        body = bodies.pop()
        nodes = body.get("nodes")
        if not isinstance(nodes, list) or not all(map(_is_node, nodes)):
            return "its definition holds what is no node"
        whole = {node["id"] for node in nodes if "like" not in node}
        if not all(node["like"] in whole for node in nodes if "like" in node):
            return "its definition holds a node that is like none"
        if not isinstance(body.get("options"), dict) or not _is_text(body.get("version")):
            return "its definition has no version or no options"
        bodies += [node["body"] for node in nodes if "body" in node]
    return None


_NODE: Final[Mapping[str, _Test]] = {
    **dict.fromkeys(("id", "type"), _is_text),
    "like": _is_text,
    "parents": _list_of(_is_text),
    "parameters": _object_of(_is_text),
    "for_each": _object_of(_is_text),
    "trigger": _is_text,
    "body": lambda value: isinstance(value, dict),
}


_WHOLE: Final = frozenset({"id", "type", "parents"})


def _is_node(node: Any) -> bool:
    if not isinstance(node, dict) or not ({"id", "like"} <= node.keys() or node.keys() >= _WHOLE):
        return False
    return _of_columns(node, _NODE) is None


# -- reading all the same -------------------------------------------------------------------------------


def readable_info(row: RunRow, holder: Holder | None) -> RunInfo:
    """Give a run as people see it; StoreError if its row is none of ours."""
    try:
        return run_info(row, holder)
    except UNREADABLE as error:
        explain(row.run_id, row_flaw(row), error)
        raise


def readable_event(run_id: str, record: Record) -> Event:
    """Give an event as people see it; StoreError if its row is none of ours."""
    try:
        return Event.of(run_id, record)
    except UNREADABLE as error:
        explain(run_id, record_flaw(record), error)
        raise


def explain(run_id: str, flaw: str | None, error: BaseException) -> None:
    """Raise what is wrong with a stored run; without a flaw the error is a fault of ours."""
    if flaw is not None:
        raise unreadable(run_id, flaw) from error


def unreadable(run_id: str, flaw: str) -> StoreError:
    """Give the error of a stored run that cannot be read."""
    return StoreError(
        f"run {run_id} cannot be read: {flaw}. Somebody else has written to the database, or it was damaged:"
        " `dagresume doctor` says what is sound."
    )
