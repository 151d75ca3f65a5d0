"""What a node's function may ask of the engine: a parameter annotated `Context` receives it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from dagresume.policy import NodeFailure

__all__ = ["Channel", "Context", "NodeLog", "idempotency_key"]

_NAMESPACE = uuid.UUID("6f2d9a52-6d0c-5f0e-9a55-64a6a3d6e1c7")


def idempotency_key(run_id: str, path: str, generation: int = 0) -> str:
    """Give the key under which the outside world sees one path: the same for every attempt and process."""
    return str(uuid.uuid5(_NAMESPACE, f"{run_id}\n{path}\n{generation}"))


class Channel(Protocol):
    """How a context reaches the engine; the far end may be in another thread, process or machine."""

    def log(self, level: str, line: str) -> None:
        """Keep a line with the run."""

    def usage(self, usage: Mapping[str, float]) -> None:
        """Add to what the attempt has used up."""

    def progress(self, done: float, total: float | None) -> None:
        """Tell how far the attempt got."""


class NodeLog:
    """`ctx.log`: its lines are kept with the run and go to the process's log as well."""

    def __init__(self, write: Callable[[str, str], None]) -> None:
        self._write = write

    def debug(self, message: object, **values: Any) -> None:
        """Keep a line of level debug."""
        self._write("debug", _line(message, values))

    def info(self, message: object, **values: Any) -> None:
        """Keep a line of level info."""
        self._write("info", _line(message, values))

    def warning(self, message: object, **values: Any) -> None:
        """Keep a line of level warning."""
        self._write("warning", _line(message, values))

    def error(self, message: object, **values: Any) -> None:
        """Keep a line of level error."""
        self._write("error", _line(message, values))


def _line(message: object, values: Mapping[str, Any]) -> str:
    text = str(message)
    return " ".join([text, *(f"{name}={value!r}" for name, value in values.items())]) if values else text


class Context:
    """What one attempt knows about itself.

    `run_id`, `workflow`, `node` (its id), `path` (`score[17]`), `index` (the item's position in a map, else
    None), `attempt` (from 1, never reset), `idempotency_key` (the same for every attempt and process of this
    path), `skipped` (ids of parents that were skipped), `failures` (id of parent → NodeFailure), `log`.
    """

    __slots__ = (
        "_channel",
        "_generation",
        "attempt",
        "failures",
        "index",
        "log",
        "node",
        "path",
        "run_id",
        "skipped",
        "workflow",
    )

    def __init__(
        self,
        *,
        run_id: str,
        workflow: str,
        node: str,
        path: str,
        index: int | None,
        attempt: int,
        channel: Channel,
        generation: int = 0,
        skipped: frozenset[str] = frozenset(),
        failures: Mapping[str, NodeFailure] | None = None,
    ) -> None:
        self.run_id, self.workflow, self.node, self.path = run_id, workflow, node, path
        self.index, self.attempt, self.skipped = index, attempt, skipped
        self.failures = failures or {}
        self._channel, self._generation = channel, generation
        self.log = NodeLog(channel.log)

    @property
    def idempotency_key(self) -> str:
        """A uuid for the outside world to recognise a repetition by; changes only when a completed path is
        run again.
        """
        return idempotency_key(self.run_id, self.path, self._generation)

    def usage(self, *, tokens_in: int = 0, tokens_out: int = 0, cost: float = 0.0) -> None:
        """Add what this attempt has used up; kept with its checkpoint."""
        self._channel.usage({"tokens_in": tokens_in, "tokens_out": tokens_out, "cost": cost})

    def progress(self, done: float, total: float | None = None) -> None:
        """Tell observers how far this attempt got."""
        self._channel.progress(done, total)
