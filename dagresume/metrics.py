"""How recoveries go and how long checkpoints take, over all runs of a store, with alarms (R17).

Read from the journal: the claims that went on with a stopped run, how each of these drives ended, and the
waits that each drive noted at its end. The views `dagresume_recoveries`, `dagresume_latency`,
`dagresume_metrics` and `dagresume_alarms` say the same to whoever asks with SQL.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from dagresume import words
from dagresume.events import (
    RUN_CANCELLED,
    RUN_CLAIMED,
    RUN_COMPLETED,
    RUN_FAILED,
    RUN_INTERRUPTED,
    RUN_ROLLED_BACK,
    RUN_ROLLING_BACK,
    RUN_WAITING,
    Record,
    RunStatus,
    status_set_by,
)
from dagresume.latency import added, coarse, percentile
from dagresume.results import CheckpointLatency
from dagresume.store import Store
from dagresume.views import run_info

__all__ = ["Alarm", "Metrics", "measured"]

LOWEST_RATE: Final = 0.9
MOST_RECOVERIES: Final = 2.0
LONGEST_WAIT: Final = 1.0
_PAGE: Final = 2000
_STARTS: Final = (RUN_CLAIMED, RUN_ROLLING_BACK)
_GOOD: Final = frozenset({RUN_COMPLETED, RUN_WAITING, RUN_ROLLED_BACK})
_ENDS: Final = (*sorted(_GOOD), RUN_FAILED, RUN_INTERRUPTED, RUN_CANCELLED)
_LIVE: Final = (RunStatus.PENDING, RunStatus.RUNNING, RunStatus.ROLLING_BACK)


@dataclass(frozen=True, slots=True)
class Alarm:
    """A figure that is beyond its threshold; `str()` is a sentence that says what to look at."""

    name: str
    value: float
    threshold: float
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class Metrics:
    """How the runs of a store do; what was pruned no longer counts.

    `runs`: how many by status. A recovery goes on with a run that failed or was interrupted (a wake does
    not); it `succeeded` if that drive ended completed or waiting (or rolled back, if it went on with that),
    and failed if it stopped again. One that still runs, or that a person cancelled, is neither.
    `recovery_rate`: the share that succeeded, None if none has ended. `checkpoint_latency`: seconds that
    results waited to be durable, in steps of a tenth; `alarms`: what is beyond its threshold. `waits`: the
    histogram of those waits, (upper end of a step in seconds, how many lie in it).
    """

    runs: Mapping[str, int]
    recoveries: int
    recoveries_succeeded: int
    recoveries_failed: int
    recoveries_per_run: float
    checkpoint_latency: CheckpointLatency
    alarms: tuple[Alarm, ...] = ()
    waits: tuple[tuple[float, int], ...] = field(default=(), repr=False)

    @property
    def recovery_rate(self) -> float | None:
        """The share of the recoveries that ended well, 0 to 1; None if none has ended."""
        ended = self.recoveries_succeeded + self.recoveries_failed
        return self.recoveries_succeeded / ended if ended else None


async def measured(store: Store) -> Metrics:
    """Read the journal of a store; what a run's nodes did is not touched."""
    history: dict[str, list[Record]] = defaultdict(list)
    for kind in (*_STARTS, *_ENDS):
        async for run_id, record in _all(store, kind):
            history[run_id].append(record)
    for records in history.values():
        records.sort(key=lambda record: record.seq or 0)
    recoveries = {run_id: list(_recoveries(records)) for run_id, records in history.items()}
    outcomes = Counter(outcome for ended in recoveries.values() for outcome in ended)
    runs = await _statuses(store, history)
    count = sum(map(len, recoveries.values()))
    metrics = Metrics(
        runs,
        count,
        outcomes[True],
        outcomes[False],
        count / max(1, sum(runs.values())),
        _latency(summaries := _summaries(history)),
        waits=coarse(added(each for _, each in summaries)),
    )
    return _with_alarms(metrics, recoveries, summaries)


async def _all(store: Store, kind: str) -> AsyncIterator[tuple[str, Record]]:
    """One kind at a time: these come from the index in their order."""
    after = 0
    while page := await store.tail(after, kinds=[kind], limit=_PAGE):
        for run_id, record in page:
            after = record.seq or after
            yield run_id, record


def _recoveries(records: Sequence[Record]) -> Iterable[bool | None]:
    """Give for each recovery of a run whether it ended well; None: it runs, or a person cancelled it."""
    for n, record in enumerate(records):
        if record.kind in _STARTS and "recoveries" in record.facts:
            end = records[n + 1].kind if n + 1 < len(records) else RUN_CANCELLED
            yield None if end == RUN_CANCELLED else end in _GOOD


async def _statuses(store: Store, history: Mapping[str, Sequence[Record]]) -> dict[str, int]:
    live: dict[str, str] = {}
    before = None
    while page := await store.find(status=[word.value for word in _LIVE], before=before, limit=_PAGE):
        live |= {row.run_id: run_info(row, holder).status.value for row, holder in page}
        before = page[-1][0].run
    last = (records[-1] for run_id, records in history.items() if run_id not in live)
    ended = (status.value for record in last if (status := status_set_by(record)) is not None)
    return dict(sorted(Counter([*live.values(), *ended]).items()))


Summary = tuple[str, Mapping[str, Any]]


def _summaries(history: Mapping[str, Sequence[Record]]) -> list[Summary]:
    """Give (run id, summary of its waits) of every drive that noted them at its end."""
    ends = ((run_id, record) for run_id, records in history.items() for record in records)
    found = ((run_id, record.facts.get("latency")) for run_id, record in ends)
    return [(run_id, latency) for run_id, latency in found if latency is not None]


def _latency(summaries: Sequence[Summary]) -> CheckpointLatency:
    waits = added(latency for _, latency in summaries)
    longest = max((latency["max"] for _, latency in summaries), default=0) / 1e6
    p50, p95, p99 = (min(percentile(waits, share) / 1e6, longest) for share in (0.5, 0.95, 0.99))
    return CheckpointLatency(p50, p95, p99, longest, sum(latency["count"] for _, latency in summaries))


# -- alarms ---------------------------------------------------------------------------------------------


def _with_alarms(
    metrics: Metrics, recoveries: Mapping[str, Sequence[bool | None]], summaries: Sequence[Summary]
) -> Metrics:
    found = []
    rate, mean, latency = metrics.recovery_rate, metrics.recoveries_per_run, metrics.checkpoint_latency
    if rate is not None and rate < LOWEST_RATE:
        worst = max(recoveries, key=lambda run_id: list(recoveries[run_id]).count(False))
        told = (
            f"Only {rate:.0%} of the recoveries ended well (alarm under {LOWEST_RATE:.0%}). Look at what"
            f" stops again, most often in this run: `dagresume show {worst}`."
        )
        found.append(Alarm("recovery_success_rate", rate, LOWEST_RATE, told))
    if mean > MOST_RECOVERIES:
        most = max(recoveries, key=lambda run_id: len(recoveries[run_id]))
        told = (
            f"Runs are recovered {mean:.1f} times on average (alarm over {MOST_RECOVERIES:g}). Look at what"
            f" stops them; most often, {len(recoveries[most])} times: `dagresume audit {most}`."
        )
        found.append(Alarm("recoveries_per_run", mean, MOST_RECOVERIES, told))
    if latency.p99 > LONGEST_WAIT:
        slowest = max(summaries, key=lambda each: each[1]["max"])[0]
        told = (
            f"One checkpoint in a hundred waits {words.duration(latency.p99)} or longer to be durable (alarm"
            f" over {words.duration(LONGEST_WAIT)}). Look at the disk, at what else holds the database, and"
            f" at functions that block the event loop; the longest was in run {slowest}."
        )
        found.append(Alarm("checkpoint_latency_p99", latency.p99, LONGEST_WAIT, told))
    return replace(metrics, alarms=tuple(found))
