"""Paths, and what records mean together."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from dagresume.events import (
    CANCELLED,
    COMPLETED,
    FAILED,
    INTERRUPTED,
    ONCE_UNCERTAIN,
    PROGRESS,
    R5_WORDS,
    RESET,
    RETRY,
    RUN_CANCELLED,
    RUN_CLAIMED,
    RUN_COMPLETED,
    RUN_CREATED,
    RUN_FAILED,
    RUN_INTERRUPTED,
    SKIPPED,
    STARTED,
    STATE,
    WAITING,
    WITHDRAWN,
    Event,
    NodeStatus,
    Record,
    Records,
    RunStatus,
    Snapshot,
    enclosing,
    node_record,
    projection,
    run_record,
    segments,
    status_of,
)


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("a", [("a", None)]),
        ("a[0]", [("a", 0)]),
        ("score[17]", [("score", 17)]),
        ("screen[3]/evaluate", [("screen", 3), ("evaluate", None)]),
        ("a/b[1]/c[20]", [("a", None), ("b", 1), ("c", 20)]),
        ("节点[2]", [("节点", 2)]),
        (" a.b:c#0%2F ", [(" a.b:c#0%2F ", None)]),
    ],
)
def test_paths(path: str, parts: list[tuple[str, int | None]]) -> None:
    assert segments(path) == parts


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "a/",
        "/a",
        "a//b",
        "a[",
        "a]",
        "a[]",
        "a[01]",
        "a[-1]",
        "a[1",
        "a[1]b",
        "a[1][2]",
        "[1]",
        "a[x]",
        "a[1]/",
        "a[\uff11]",
    ],
)
def test_what_is_no_path(path: str) -> None:
    with pytest.raises(ValueError, match="is not a path"):
        segments(path)


def test_what_encloses_a_path() -> None:
    assert enclosing("a[1]/b[2]") == ["a[1]/b", "a[1]", "a"]
    assert enclosing("a") == []


@pytest.mark.parametrize(
    ("record", "status"),
    [
        (None, NodeStatus.PENDING),
        (node_record(STARTED, "a", 1, 0), NodeStatus.RUNNING),
        (node_record(COMPLETED, "a", 1, 0), NodeStatus.COMPLETED),
        (node_record(FAILED, "a", 1, 0, "error"), NodeStatus.FAILED),
        (node_record(FAILED, "a", 1, 0, RETRY), NodeStatus.WAITING),
        (node_record(SKIPPED, "a", 0, 0), NodeStatus.SKIPPED),
        (node_record(INTERRUPTED, "a", 1, 0), NodeStatus.INTERRUPTED),
        (node_record(CANCELLED, "a", 1, 0), NodeStatus.CANCELLED),
        (node_record(RESET, "a", 1, 0), NodeStatus.PENDING),
        (node_record(WITHDRAWN, "a", 1, 0), NodeStatus.PENDING),
        (node_record(WAITING, "a", 1, 0, "held"), NodeStatus.WAITING),
    ],
)
def test_what_a_last_record_means(record: Record | None, status: NodeStatus) -> None:
    assert status_of(record) is status


R5 = {
    STARTED: "running",
    COMPLETED: "success",
    FAILED: "failed",
    SKIPPED: "skipped",
    INTERRUPTED: "running",
    CANCELLED: "pending",
    RESET: "pending",
    WITHDRAWN: "pending",
    WAITING: "running",
}


@pytest.mark.parametrize("kind", R5)
def test_the_words_of_the_checkpoint_record(kind: str) -> None:
    """R5; `running` = running, waiting, interrupted; `pending` = the rest."""
    assert node_record(kind, "a", 1, 0).changes_path
    assert R5_WORDS[kind] == R5[kind]


def numbered(*records: Record) -> list[Record]:
    return [record._replace(seq=n) for n, record in enumerate(records, 1)]


def test_the_last_record_with_a_status_wins() -> None:
    snapshot = Snapshot(
        numbered(
            run_record(RUN_CREATED, 5),
            node_record(STARTED, "a", 1, 6),
            node_record(COMPLETED, "b", 1, 7),
            node_record(FAILED, "a", 1, 8),
            Record("node.noted", 1, 9, "a"),
            node_record(RESET, "b", 1, 10),
        )
    )
    assert {path: record.kind for path, record in snapshot.paths.items()} == {"a": FAILED, "b": RESET}
    assert snapshot.last_seq == 6
    assert (snapshot.status, snapshot.started_at) == (RunStatus.RUNNING, 5)


def test_folding_in_pieces_is_folding_at_once() -> None:
    records = numbered(
        run_record(RUN_CREATED, 1),
        node_record(STARTED, "a", 1, 2),
        node_record(COMPLETED, "a", 1, 3),
        run_record(RUN_FAILED, 4),
        run_record(RUN_CLAIMED, 5),
        node_record(RESET, "a", 1, 6),
        node_record(STARTED, "a", 2, 7),
    )
    whole = Snapshot(records)
    for cut in range(len(records) + 1):
        pieces = Snapshot(records[:cut])
        pieces.fold(records[cut:])
        for name in Snapshot.__slots__:
            assert getattr(pieces, name) == getattr(whole, name), (cut, name)


def test_rows_mean_what_the_records_made_of_them_mean() -> None:
    """A store may give plain tuples: each becomes a record when somebody looks at it."""
    records = numbered(
        run_record(RUN_CREATED, 1),
        node_record(STARTED, "a", 1, 2),
        node_record(COMPLETED, "b", 1, 3),
        node_record(COMPLETED, "c", 1, 4, usage={"tokens": 3}),
        node_record(FAILED, "d", 1, 5),
        node_record(COMPLETED, "a", 1, 6),
        node_record(RESET, "b", 1, 7),
    )
    lazy = Records([tuple(record) for record in records])
    assert (len(lazy), lazy[-1], list(lazy[1:3]), list(lazy)) == (7, records[-1], records[1:3], records)
    assert lazy == records
    assert lazy != records[:-1]
    assert {type(record) for record in [lazy[0], *lazy, *lazy[2:4]]} == {Record}
    assert lazy.column("path") == [record.path for record in records]
    found, expected = Snapshot(lazy), Snapshot(records)
    for name in Snapshot.__slots__:
        assert getattr(found, name) == getattr(expected, name), name
    paths = found.paths
    assert list(paths.items()) == list(zip(paths, paths.values(), strict=True))
    looked_at = [paths["c"], paths.get("c"), *paths.values(), *dict(paths.copy().items()).values()]
    assert {type(record) for record in looked_at} == {Record}
    assert (paths.get("z"), paths.find(["z", "c"])) == (None, [None, tuple(records[3])])
    assert dict(paths.telling()) == {"c": records[3]}
    assert dict(found.unfinished()) == {"b": records[6], "d": records[4]}


def test_only_some_records_hold_their_outputs() -> None:
    held = node_record(COMPLETED, "a", 1, 1)
    assert Records([held, held]).hold_outputs
    for other in (node_record(COMPLETED, "b", 1, 1, blob="…"), node_record(SKIPPED, "b", 1, 1)):
        assert not Records([held, other]).hold_outputs


def test_only_a_completed_path_that_is_reset_is_a_new_operation() -> None:
    """The generation rises only when a *completed* path is run again."""
    snapshot = Snapshot(
        numbered(
            run_record(RUN_CREATED, 1),
            node_record(FAILED, "a", 1, 2),
            node_record(RESET, "a", 1, 3),
            node_record(STARTED, "a", 2, 4),
            node_record(INTERRUPTED, "a", 2, 5),
            node_record(RESET, "a", 2, 6),
        )
    )
    assert snapshot.generations.get("a", 0) == 0
    snapshot.fold(
        [node_record(COMPLETED, "a", 3, 7), node_record(RESET, "a", 3, 8), node_record(RESET, "a", 3, 9)]
    )
    assert snapshot.generations["a"] == 1


def test_a_manual_claim_gives_a_fresh_budget_an_automatic_one_does_not() -> None:
    """B80: attempts count over processes for automatic resumes."""

    def used(automatic: bool) -> int:
        snapshot = Snapshot(
            numbered(
                run_record(RUN_CREATED, 1),
                node_record(FAILED, "a", 1, 2, RETRY),
                node_record(FAILED, "a", 2, 3, RETRY),
                run_record(RUN_INTERRUPTED, 4),
                run_record(RUN_CLAIMED, 5, automatic=automatic),
                node_record(FAILED, "a", 3, 6, RETRY),
            )
        )
        return snapshot.attempts_used("a")

    assert used(automatic=True) == 3
    assert used(automatic=False) == 1


def test_the_row_of_a_run_follows_its_records() -> None:
    assert projection(run_record(RUN_COMPLETED, 7)) == {
        "status": "completed",
        "reason": None,
        "updated_at": 7,
        "finished_at": 7,
        "wake_at": None,
    }
    cancelled = projection(run_record(RUN_CANCELLED, 7, "cancelled"))
    assert cancelled is not None
    assert cancelled["holds_key"] == 0
    claimed = projection(run_record(RUN_CLAIMED, 8))
    assert claimed is not None
    assert (claimed["status"], claimed["finished_at"], claimed["holds_key"]) == ("running", None, 1)
    assert projection(run_record("run.cancel_requested", 9)) is None


def test_final_statuses() -> None:
    assert {status for status in RunStatus if status.final} == {"completed", "cancelled", "rolled_back"}


def test_events_show_aware_times_and_plain_data() -> None:
    record = node_record(FAILED, "a", 2, 1_000_000, "error", message="m")._replace(
        seq=7, took=2_500_000, size=3
    )
    event = Event.of("r", record)
    assert event.at == datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert (event.seq, event.run_id, event.kind, event.path, event.attempt, event.reason) == (
        7,
        "r",
        FAILED,
        "a",
        2,
        "error",
    )
    assert event.data == {"message": "m", "seconds": 2.5, "size": 3}


def test_the_state_of_a_path_is_what_it_saved_last_until_it_runs_again() -> None:
    """It changes no status; a path that had completed begins without one."""
    records = [
        node_record(STARTED, "a", 1, 1),
        node_record(STATE, "a", 1, 2),
        node_record(PROGRESS, "a", 1, 3, done=1, total=2),
        node_record(STATE, "a", 1, 4),
    ]
    snapshot = Snapshot(records)
    assert (snapshot.paths["a"], snapshot.states["a"]) == (records[0], records[3])
    snapshot.apply(node_record(RESET, "a", 1, 5, "asked"))
    assert snapshot.states["a"] == records[3]
    snapshot.fold([node_record(COMPLETED, "a", 2, 6), node_record(RESET, "a", 2, 7, "asked")])
    assert snapshot.states == {}


def test_what_a_person_has_answered_for_is_remembered() -> None:
    once = ["run:r", "key"]
    snapshot = Snapshot(
        [
            node_record(STARTED, "a", 3, 1),
            node_record(RESET, "a", 3, 2, "asked"),
            node_record(INTERRUPTED, "b", 2, 3, ONCE_UNCERTAIN, once=once),
            node_record(RESET, "b", 2, 4, "asked"),
            node_record(STARTED, "b", 3, 5),
            node_record(INTERRUPTED, "c", 1, 6, "abandoned"),
            node_record(RESET, "c", 1, 7, "not_done"),
            node_record(COMPLETED, "d", 1, 8),
            node_record(RESET, "d", 1, 9, "input_changed"),
        ]
    )
    assert snapshot.forgiven == {"a": (3, None), "b": (2, once), "c": (1, None)}
