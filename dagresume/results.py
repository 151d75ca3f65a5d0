"""What a run gives back: outputs decoded when they are asked for, from what was committed."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar, overload
from unicodedata import normalize

from dagresume import codec
from dagresume.errors import NoOutput
from dagresume.events import NodeStatus, Record, RunStatus, segments
from dagresume.latency import quantile
from dagresume.masks import NO_SECRETS, Mask
from dagresume.policy import NodeFailure
from dagresume.workflow import Mapped

__all__ = ["CheckpointLatency", "Outputs", "RunResult", "Stats", "Stored"]

P = ParamSpec("P")
R = TypeVar("R")


class Stored(NamedTuple):
    """Where a packed output lies: the record that holds it, or the blob it refers to, and its digest."""

    path: str
    seq: int
    digest: bytes
    blob: str | None = None

    @classmethod
    def of(cls, record: Record) -> Stored:
        """Give where the output of a completed path lies."""
        if record.data is None:
            return new_stored((record.path, record.seq or 0, record.digest or b"", None))
        facts = record.facts
        seq = facts.get("seq") or record.seq or 0
        return cls(record.path or "", seq, record.digest or b"", facts.get("blob"))


new_stored: Final[Callable[[tuple[Any, ...]], Stored]] = partial(tuple.__new__, Stored)


Cell = str | Stored | Sequence[str | Stored]
"""A packed output, where it lies, or those of the items of a map."""
Fetch = Callable[[Sequence[Stored]], list[str]]


@dataclass(frozen=True, slots=True)
class CheckpointLatency:
    """How long results waited to be durable, in seconds, from the return of the function to the end of the
    commit.
    """

    p50: float
    p95: float
    p99: float
    max: float
    count: int

    @classmethod
    def of(cls, seconds: array[float]) -> CheckpointLatency:
        """Give the percentiles of these waits (nearest rank)."""
        if not seconds:
            return cls(0.0, 0.0, 0.0, 0.0, 0)
        ranked = sorted(seconds)
        p50, p95, p99 = (quantile(ranked, share) for share in (0.5, 0.95, 0.99))
        return cls(p50, p95, p99, ranked[-1], len(ranked))


@dataclass(frozen=True, slots=True)
class Stats:
    """What this call cost: `commits` durable transactions, `seconds` of wall time, and the wait of each
    checkpoint.
    """

    commits: int
    seconds: float
    waits: array[float] = field(repr=False)

    @property
    def checkpoint_latency(self) -> CheckpointLatency:
        """`p50 p95 p99 max count` of the time each result waited to be durable, in seconds."""
        return CheckpointLatency.of(self.waits)


class Outputs(Mapping[str, Any]):
    """The outputs of a run by node id, each decoded anew whenever it is asked for.

    No key for failed, skipped and `checkpoint=False` nodes; asking for one raises NoOutput, which is a
    KeyError and says its status. An item of a map, a round of a loop and a node of an inner workflow are
    found under their path: `outputs["score[3]"]`, `outputs["screen[3]/evaluate"]`.
    """

    def __init__(
        self,
        cells: Mapping[str, Cell],
        types: Mapping[str, codec.Types],
        status: Callable[[str], str | None],
        fetch: Fetch,
        parts: Mapping[str, Sequence[str | Stored | None]] | None = None,
        find: Callable[[str], tuple[Cell, codec.Types] | None] = lambda path: None,
    ) -> None:
        self._cells, self._types, self._status, self._fetch = cells, types, status, fetch
        self._parts = parts or {}  # maps that have not completed: the items that have
        self._find = find  # what lies below the nodes: rounds of loops, nodes of inner workflows

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and normalize("NFC", key) in self._cells

    def __repr__(self) -> str:
        return f"<outputs of {', '.join(self._cells) or 'no node'}>"

    def __getitem__(self, path: str) -> Any:
        path = normalize("NFC", path)  # as node ids are
        cell = self._cells.get(path)
        types = self._types.get(path, codec.EMPTY)
        if cell is None:
            cell, types = self._item(path)
        if isinstance(cell, str):
            return codec.unpack(cell, types)
        if isinstance(cell, Stored):
            return codec.unpack(self._fetch([cell])[0], types)
        return codec.unpack_many(self._texts(cell), types)

    def packed(self, path: str) -> str:
        """Give an output as it is stored, JSON with tagged forms: for looking at it without its classes."""
        path = normalize("NFC", path)
        cell = self._cells.get(path)
        if cell is None:
            cell, _ = self._item(path)
        if isinstance(cell, str):
            return cell
        if isinstance(cell, Stored):
            return self._fetch([cell])[0]
        return f"[{','.join(self._texts(cell))}]"

    def _item(self, path: str) -> tuple[Cell, codec.Types]:
        try:
            (node, index), *inner = segments(path)
        except ValueError:
            raise NoOutput(path, None) from None
        cells = () if inner else self._cells.get(node, self._parts.get(node, ()))
        item = None
        if index is not None and not isinstance(cells, str | Stored) and index < len(cells):
            item = cells[index]
        if item is None and (found := self._find(path)) is not None:
            return found
        if item is None:
            status = self._status(path)
            pure = " checkpoint=False: its output is not stored." if status == NodeStatus.COMPLETED else ""
            raise NoOutput(path, status, pure)
        return item, self._types.get(node, codec.EMPTY)

    def _texts(self, cells: Sequence[str | Stored]) -> list[str]:
        missing = [cell for cell in cells if not isinstance(cell, str)]
        if not missing:
            return cells  # type: ignore[return-value]  # all of them are str
        fetched = iter(self._fetch(missing))
        return [cell if isinstance(cell, str) else next(fetched) for cell in cells]


class _PathList(Sequence[str]):
    """A sequence of paths that equals any other of the same."""

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return list(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


class Lazily(_PathList):
    """A sequence of paths that is put together when somebody looks at it."""

    def __init__(self, make: Callable[[], list[str]]) -> None:
        self._make = make
        self._made: list[str] | None = None

    def __len__(self) -> int:
        return len(self._all())

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def _all(self) -> list[str]:
        if self._made is None:
            self._made = self._make()
        return self._made


class Executed(_PathList):
    """The paths whose function has begun, in that order. Of an item only its map and number are kept, in 8
    bytes: a million paths would take 60 each.
    """

    def __init__(self) -> None:
        self._names: list[str] = []  # of nodes and maps
        self._maps: dict[str, int] = {}  # where the name of a map is among them
        self._which, self._index = array("i"), array("i")

    def append(self, path: str) -> None:
        """Add the path of a function that runs once."""
        self._which.append(len(self._names))
        self._index.append(-1)
        self._names.append(path)

    def append_item(self, path: str, k: int) -> None:
        """Add item k of the map at this path."""
        place = self._maps.get(path)
        if place is None:
            place = self._maps[path] = len(self._names)
            self._names.append(path)
        self._which.append(place)
        self._index.append(k)

    def __len__(self) -> int:
        return len(self._which)

    def __iter__(self) -> Iterator[str]:
        names = self._names
        for which, k in zip(self._which, self._index, strict=True):
            yield names[which] if k < 0 else f"{names[which]}[{k}]"

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return list(self)[index]
        name, k = self._names[self._which[index]], self._index[index]
        return name if k < 0 else f"{name}[{k}]"


@dataclass(slots=True)
class RunResult:
    """How a run ended and what it gave.

    `result[fn]` is the output of a decorated function, typed by it; `result["id"]` that of a node. `executed`
    are the paths whose function began in this call, in that order; `reused` those completed before it and not
    run in it. `failures` is {path: NodeFailure} in the order of the definition. Outputs come as they are;
    `mask` hides in a text, or in plain data, what the workflow declares as secret.
    """

    run_id: str
    workflow: str
    status: RunStatus
    reason: str | None
    outputs: Outputs
    failures: dict[str, NodeFailure]
    executed: Sequence[str]
    reused: Sequence[str]
    stats: Stats
    ids: Mapping[int, str] = field(default_factory=dict, repr=False)
    mask: Mask = field(default=NO_SECRETS, repr=False)

    @overload
    def __getitem__(self, node: Mapped[P, Awaitable[R]]) -> list[R]: ...
    @overload
    def __getitem__(self, node: Mapped[P, R]) -> list[R]: ...
    @overload
    def __getitem__(self, node: Callable[P, Awaitable[R]]) -> R: ...
    @overload
    def __getitem__(self, node: Callable[P, R]) -> R: ...
    @overload
    def __getitem__(self, node: str) -> Any: ...
    def __getitem__(self, node: Any) -> Any:
        return self.outputs[node if isinstance(node, str) else self._id_of(node)]

    def __contains__(self, node: object) -> bool:
        return (node if isinstance(node, str) else self._id_of(node)) in self.outputs

    def _id_of(self, function: object) -> str:
        found = self.ids.get(id(function)) or getattr(function, "__name__", None)
        if not isinstance(found, str):
            raise NoOutput(repr(function), None, " Give a node's id or its function.")
        return found
