"""What the scheduler moves about: paths that are to run, lists that maps run over, units on their way into
the store.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextvars import Context as Variables
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from dagresume import codec, effects
from dagresume import events as ev
from dagresume.clock import Clock
from dagresume.events import Record, Records, Snapshot
from dagresume.executor import Call, Executor
from dagresume.journal import Entry, Journal
from dagresume.masks import Mask
from dagresume.observe import Watch, log
from dagresume.planner import Vertex
from dagresume.policy import NodeFailure
from dagresume.pool import Gate, Pool, Source
from dagresume.results import Stored
from dagresume.store import (
    Claim,
    Committed,
    Loaded,
    LogLine,
    NewRun,
    OnceFound,
    Outcome,
    Owned,
    SqlFailed,
)

__all__ = [
    "OPEN",
    "UNMADE",
    "Cells",
    "Driver",
    "Flight",
    "Former",
    "Input",
    "Job",
    "Listing",
    "Opening",
    "Raw",
    "Raws",
    "Sealed",
    "Services",
    "Step",
    "Values",
    "load_cells",
]

CURRENT: ContextVar[Job | None] = ContextVar("dagresume_job", default=None)
"""The job whose body is running."""
OPEN: Final = 255  # in Scope.state: not settled
LOG_LINES: Final = 1000  # an attempt keeps at most so many
Fetch = Callable[[Sequence[Stored | Record]], Awaitable[list[str]]]
"""Reads outputs of one run from where they lie: a record without data holds its own."""


@dataclass(slots=True)
class Services:
    """What the runs of one engine share. `spill_bytes` None: nothing is put into blobs. `artifacts`: where
    the folders of runs go, None if the store has no file. `flights`: the calls made once that are under way.
    """

    journal: Journal
    pool: Pool
    clock: Clock
    executor: Callable[[str], Executor]
    load: Callable[[str], Awaitable[Loaded | None]]
    fetch: Callable[[str, Sequence[Stored | Record]], Awaitable[list[str]]]
    spill: Callable[[str, str], Awaitable[str]]
    spill_bytes: int | None
    once: Callable[[str, str], Awaitable[OnceFound | None]]
    artifacts: str | None
    fail_fast: bool
    grace: float
    debug: bool
    watch: Watch | None = None
    flights: dict[tuple[str, str], Flight] = field(default_factory=dict)


@dataclass(slots=True)
class Flight:
    """A call made once that is under way: whose it is, when it is over, the time its mark was given."""

    job: Job
    over: asyncio.Future[None]
    at: int = 0


class Driver(Protocol):
    """What jobs and scopes need of the run they belong to."""

    run_id: str
    workflow: str
    services: Services
    snapshot: Snapshot
    todo: deque[tuple[Any, ...]]
    failures: dict[str, NodeFailure]
    inner: dict[str, Any]
    uncertain: list[str]
    lost: list[Exception]
    log_lines: deque[LogLine]
    progress: dict[str, tuple[float, float | None]]
    stopping: tuple[str, str | None, str] | None
    poisoned: bool
    automatic: bool
    backoffs: Any
    wide: list[Any]
    owned: Owned
    mask: Mask
    context: Variables
    waiting: int

    def now(self) -> int: ...
    def gate_of(self, vertex: Vertex) -> Gate | None: ...
    def later(self, *what: Any) -> None: ...
    def advance(self, step: Step) -> None: ...
    def next_attempt(self, path: str) -> int: ...
    def adopt_history(self, job: Job) -> None: ...
    def reset(self, prior: Record, reason: str, step: Step) -> None: ...
    def reused(self, prior: Record, fingerprint: bytes, step: Step) -> None: ...
    def await_word(
        self, scope: Any, vertex: Vertex, path: str, prior: Record | None, step: Step, **what: Any
    ) -> None: ...
    def forgive(self, path: str) -> None: ...
    def failure_at(self, path: str) -> NodeFailure: ...
    def fail(self, vertex: Vertex, path: str, error: Exception, step: Step) -> None: ...
    def cannot_load(self, error: Exception) -> None: ...
    def background(self, work: Coroutine[Any, Any, None]) -> None: ...
    def hand_over(self, step: Step) -> None: ...
    def go_on(self, step: Step) -> None: ...
    def delivered(self, step: Step, outcome: Outcome) -> None: ...
    def opened(self, step: Opening, outcome: Outcome) -> None: ...


# -- values ---------------------------------------------------------------------------------------------


class Raw:
    """An output that is passed on as it is (`checkpoint=False`)."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


UNMADE: Final = Raw(None)
"""The output of a pure node that completed in an earlier process; it is made again if somebody needs it."""


class Cells:
    """The packed outputs of a map's items (or raw, or where they lie), and their digests in one piece."""

    __slots__ = ("cells", "digests", "stored")

    def __init__(self, count: int) -> None:
        self.cells: list[Any] = [None] * count
        self.digests = bytearray(16 * count)
        self.stored = False  # whether some lie in the store

    def __len__(self) -> int:
        return len(self.cells)

    def get(self, k: int) -> tuple[Any, bytes]:
        """Give item k and its digest."""
        return self.cells[k], bytes(self.digests[16 * k : 16 * k + 16])

    def put(self, k: int, cell: Any, digest: bytes) -> None:
        """Set item k."""
        self.cells[k] = cell
        self.digests[16 * k : 16 * k + 16] = digest
        if type(cell) is Stored:
            self.stored = True

    async def load(self, fetch: Fetch) -> None:
        """Have all of them in memory."""
        await load_cells(self.cells, fetch)
        self.stored = False


class Former(Cells):
    """The items of a map that an earlier process completed, as its records say.

    As a rule they are read all at once, or nobody needs them: what each of them is, is put together only when
    somebody asks for one. `cell_of` gives that of a record.
    """

    __slots__ = ("_cell_of", "_records")

    def __init__(self, records: Records, cell_of: Callable[[Record], tuple[str | Stored, bytes]]) -> None:
        self._records, self._cell_of, self.stored = records, cell_of, True

    def __len__(self) -> int:
        return len(self._records)

    def __getattr__(self, name: str) -> Any:
        """Put cells and digests together, which are not there yet."""
        if name not in {"cells", "digests"}:
            raise AttributeError(name)
        found = list(map(self._cell_of, self._records))
        self.cells, self.digests = (
            [cell for cell, _ in found],
            bytearray(b"".join(digest for _, digest in found)),
        )
        return getattr(self, name)

    async def load(self, fetch: Fetch) -> None:
        """Have all of them in memory; in one go if each record holds its own output."""
        records = self._records
        if records.hold_outputs:
            digests, texts = records.column("digest"), records.column("output")
            if None in texts or list(map(codec.digest, texts)) != digests:
                texts = await fetch(records)
            self.cells, self.digests = texts, bytearray(b"".join([digest or bytes(16) for digest in digests]))
            self.stored = False
        else:
            await super().load(fetch)


async def load_cells(cells: list[Any], fetch: Fetch) -> None:
    """Read those of these outputs that lie in the store."""
    missing = [k for k, cell in enumerate(cells) if type(cell) is Stored]
    if missing:
        for k, text in zip(missing, await fetch([cells[k] for k in missing]), strict=True):
            cells[k] = text


@dataclass(slots=True)
class Values:
    """A list that is no map's: its items are packed when they are looked at."""

    values: Sequence[Any]
    types: codec.Types

    def __len__(self) -> int:
        return len(self.values)

    def get(self, k: int) -> tuple[str, bytes]:
        """Give item k, packed, and its digest."""
        text = codec.pack(self.values[k], self.types)
        return text, codec.digest(text)


@dataclass(slots=True)
class Raws:
    """A list that was never packed: its items are passed on as they are, known by their place in it."""

    values: Sequence[Any]
    digest: bytes

    def __len__(self) -> int:
        return len(self.values)

    def get(self, k: int) -> tuple[Raw, bytes]:
        """Give item k and what stands for it in a fingerprint."""
        return Raw(self.values[k]), hashlib.sha256(b"%d:" % k + self.digest).digest()[:16]


Listing = Cells | Values | Raws


class Input(NamedTuple):
    """What a graph was given under one name: packed text, or as it is (`Raw`), its digest, its classes."""

    cell: Any
    digest: bytes
    types: codec.Types


# -- units ----------------------------------------------------------------------------------------------


class Step(Entry):
    """A unit of one run, and what it unlocks once it is durable."""

    __slots__ = ("arrivals", "begins", "ends", "opens", "timed")

    run: Any
    records: list[Record]

    def __init__(self, run: Driver, records: list[Record]) -> None:
        self.guard, self.records, self.run = run.owned, records, run
        self.definition, self.logs, self.sql, self.once = None, (), (), ()
        self.begins: list[Job] = []  # their start records are in it, their slots reserved
        self.opens: list[Source] = []  # ready as soon as it is durable
        self.arrivals: list[tuple[Any, int]] = []  # items of chained maps, likewise
        self.ends: ev.RunStatus | None = None
        self.timed = self.concludes = False  # timed: holds a checkpoint that is waited for

    def annotate(self, path: str, facts: Mapping[str, Any]) -> bool:
        """Add facts to the record in it that says that a path has completed; False if there is none."""
        for place in range(len(self.records) - 1, -1, -1):
            record = self.records[place]
            if record.path == path and record.kind == ev.COMPLETED:
                self.records[place] = record._replace(data=json.dumps(record.facts | dict(facts)))
                return True
        return False

    def delivered(self, outcome: Outcome) -> None:
        self.run.delivered(self, outcome)


class Opening(Step):
    """The unit that makes or claims a run, with everything in it that could be decided already."""

    __slots__ = ("outcome",)

    def __init__(self, run: Driver, guard: NewRun | Claim, records: list[Record]) -> None:
        super().__init__(run, records)
        self.guard = guard
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def delivered(self, outcome: Outcome) -> None:
        try:
            self.run.opened(self, outcome)
        finally:
            if isinstance(outcome, Committed):
                self.run.delivered(self, outcome)
            if not self.outcome.done():
                self.outcome.set_result(outcome)


class Sealed(Step):
    """The completion of a path with statements of its function's own: what follows waits for what becomes of
    it, since they may fail.
    """

    __slots__ = ("settle",)

    def __init__(
        self,
        run: Driver,
        records: list[Record],
        sql: Sequence[effects.Statement],
        settle: Callable[[Outcome], None],
    ) -> None:
        super().__init__(run, records)
        self.sql, self.settle, self.timed = sql, settle, True

    def delivered(self, outcome: Outcome) -> None:
        known = isinstance(outcome, Committed | SqlFailed)
        if known:
            self.settle(outcome)  # first: what it hands over keeps the run from having nothing under way
        self.run.delivered(self, outcome)
        if not known:
            self.settle(outcome)


# -- jobs -----------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Job:
    """One path that is to run, its next attempt. The far end of its context's channel; a source of the pool,
    of itself.

    `tries` counts against the retry budget, `attempt` is never reset. `again`: a pure node that is made
    again. `asking`: only its `when=` is asked, whether it runs at all; `answered`: it has said yes before.
    """

    run: Any
    scope: Any
    vertex: Vertex
    path: str
    fingerprint: bytes
    gate: Gate | None
    feed: Any = None
    index: int | None = None
    cells: list[Any] | tuple[()] = ()  # what it takes of each list
    attempt: int = 1
    tries: int = 1
    generation: int = 0
    reconcile: bool = False
    asking: bool = False
    answered: bool = False
    again: bool = False
    began: float = 0.0
    lines: int = 0
    more: bool = True
    queued: bool = False
    stopped: bool = False
    entered: bool = False
    repeats: bool = False  # its function has begun in this call before
    released: bool = False
    task: asyncio.Task[None] | None = None
    call: Call | None = None
    used: dict[str, float] | None = None
    state: str | None = None
    sql: tuple[effects.Statement, ...] = ()
    held: tuple[tuple[str, str], ...] = ()  # where the calls made once are kept that are under way
    telling: bool = False  # its progress is on its way into the journal
    told: float = float("-inf")  # when it was written last

    @property
    def dropped(self) -> bool:
        return self.run.stopping is not None

    def take(self) -> Job:
        self.more = False
        return self

    @property
    def awaits_record(self) -> bool:
        """Whether it may begin only once its start record is durable (C2)."""
        return not (self.vertex.idempotent or self.reconcile or self.asking)

    def start_record(self) -> Record:
        at = self.run.now() - (self.took() if self.began else 0)  # written late: say when it really began
        return Record(ev.STARTED, self.attempt, at, self.path, None, self.fingerprint)

    def took(self) -> int:
        """Give the microseconds since it began."""
        seconds: float = self.run.services.clock.monotonic() - self.began
        return max(0, round(seconds * 1e6))

    def next(self, attempt: int) -> Job:
        """Give the job of the same path that comes after this one."""
        again = Job(self.run, self.scope, self.vertex, self.path, self.fingerprint, self.gate)
        again.feed, again.index, again.cells = self.feed, self.index, self.cells
        again.attempt, again.tries, again.generation, again.again = (
            attempt,
            self.tries,
            self.generation,
            self.again,
        )
        again.told = self.told
        return again

    # the channel; may be called from any thread

    def log(self, level: str, line: str) -> None:
        self.lines += 1
        if self.lines > LOG_LINES:
            return
        if self.lines == LOG_LINES:
            line = f"an attempt keeps {LOG_LINES} lines; what it logged after this one is dropped"
        line = self.run.mask.text(line)
        self.run.log_lines.append(LogLine(self.path, self.attempt, self.run.now(), level, line))
        getattr(log, level)(line, run=self.run.run_id, path=self.path, attempt=self.attempt)

    def usage(self, usage: Mapping[str, float]) -> None:
        before = self.used or {}
        self.used = {name: before.get(name, 0) + amount for name, amount in usage.items()}

    def progress(self, done: float, total: float | None) -> None:
        self.run.progress[self.path] = (done, total)
        if not self.telling:
            self.telling = True
            self.run.notes.tell(self)

    def ask(self, what: str, *args: Any) -> Future[Any]:
        found: Future[Any] = self.run.notes.ask(self, what, *args)
        return found

    def save_state(self, state: Any) -> Any:
        return effects.save_state(self.ask, state)

    def once(self, key: str, fn: Callable[..., Any], args: tuple[Any, ...], scope: str) -> Any:
        return effects.once(self.ask, key, fn, args, scope)

    def commit_with(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any]) -> None:
        self.run.notes.admit_sql(self)
        self.sql += (effects.statement(sql, parameters),)
