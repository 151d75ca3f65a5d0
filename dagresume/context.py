"""What a node's function may ask of the engine: a parameter annotated `Context` receives it."""

from __future__ import annotations

import hashlib
import math
import numbers
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from dagresume.errors import StoreError

if TYPE_CHECKING:
    from dagresume.policy import NodeFailure

__all__ = ["Channel", "Context", "NodeLog", "artifacts_of", "idempotency_key"]

_PLAIN: Final = re.compile(r"[0-9a-z][0-9a-z-]{0,79}")
_NAMESPACE = uuid.UUID("6f2d9a52-6d0c-5f0e-9a55-64a6a3d6e1c7")


def idempotency_key(run_id: str, path: str, generation: int = 0) -> str:
    """Give the key under which the outside world sees one path: the same for every attempt and process."""
    return str(uuid.uuid5(_NAMESPACE, f"{run_id}\n{path}\n{generation}"))


def artifacts_of(root: str, run_id: str, path: str) -> Path:
    """Give the folder for the files of one path of a run; it need not exist."""
    run = run_id if _PLAIN.fullmatch(run_id) else f"_{_file_name(run_id)}"
    return Path(root, run, _file_name(path))


def _file_name(name: str) -> str:
    """Give a file name that is safe everywhere and another one for every name, also where upper and lower
    case or two ways to write é are the same: a readable rest and a digest.
    """
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:32]
    rest = re.sub(r"[^A-Za-z0-9_]+", "-", name)[:100].strip("-")
    return f"{rest}-{digest}" if rest else digest


class Channel(Protocol):
    """How a context reaches the engine; the far end may be in another thread, process or machine."""

    def log(self, level: str, line: str) -> None:
        """Keep a line with the run."""

    def usage(self, usage: Mapping[str, float]) -> None:
        """Add to what the attempt has used up."""

    def progress(self, done: float, total: float | None) -> None:
        """Tell how far the attempt got."""

    def ask(self, what: str, *args: Any) -> Future[Any]:
        """Send a request that the engine answers; from any thread."""

    def save_state(self, state: Any) -> Any:
        """Keep the state for the next attempt."""

    def once(self, key: str, fn: Callable[..., Any], args: tuple[Any, ...], scope: str) -> Any:
        """Give what the call gives, or gave before."""

    def commit_with(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any]) -> None:
        """Have a statement run in the transaction of the attempt's checkpoint."""


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
    path), `skipped` (ids of parents that were skipped), `failures` (id of parent → NodeFailure), `log`,
    `state` (what an earlier attempt saved last with `save_state`, else None).

    `save_state` and `once` are awaited where an event loop runs. Elsewhere (a plain function in a thread or
    process) they block and give the value.
    """

    __slots__ = (
        "_channel",
        "_generation",
        "_root",
        "attempt",
        "failures",
        "index",
        "log",
        "node",
        "path",
        "run_id",
        "skipped",
        "state",
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
        state: Any = None,
        root: str | None = None,
    ) -> None:
        self.run_id, self.workflow, self.node, self.path = run_id, workflow, node, path
        self.index, self.attempt, self.skipped = index, attempt, skipped
        self.failures = failures or {}
        self.state = state
        self._channel, self._generation, self._root = channel, generation, root
        self.log = NodeLog(channel.log)

    @property
    def idempotency_key(self) -> str:
        """A uuid for the outside world to recognise a repetition by; changes only when a completed path is
        run again.
        """
        return idempotency_key(self.run_id, self.path, self._generation)

    def usage(self, *, tokens_in: int = 0, tokens_out: int = 0, cost: float = 0.0) -> None:
        """Add what this attempt has used up; kept with its checkpoint."""
        given = {"tokens_in": tokens_in, "tokens_out": tokens_out, "cost": cost}
        self._channel.usage({name: _used(name, amount) for name, amount in given.items()})

    def progress(self, done: float, total: float | None = None) -> None:
        """Tell observers how far this attempt got; the journal gets it twice a second at most."""
        self._channel.progress(_finite(done), None if total is None else _finite(total))

    @property
    def artifacts(self) -> Path:
        """A folder for the files of this path, made now if it is not there; empty when an attempt begins.

        Only its owner may look into it. It stays when the path has completed. StoreError where the engine has
        no file to put it beside.
        """
        if self._root is None:
            raise StoreError(
                f"{self.path}: ctx.artifacts needs a database file to put the folder beside, ':memory:' has"
                " none. Give the engine one: Engine('runs.db')."
            )
        folder = artifacts_of(self._root, self.run_id, self.path)
        for place in (folder.parent.parent, folder.parent, folder):
            place.mkdir(mode=0o700, exist_ok=True)
        return folder

    def save_state(self, state: Any) -> Any:
        """Await this: keep `state` for the next attempt, durable when it returns; the last one is kept.

        The next attempt, also one in another process, finds it as `ctx.state`, decoded anew. It is gone when
        the path is run again after it had completed, or with other inputs.
        """
        return self._channel.save_state(state)

    def once(
        self, key: str, fn: Callable[..., Any], *args: Any, scope: Literal["run", "workflow"] = "run"
    ) -> Any:
        """Await this: call `fn(*args)`, plain or async, and give its result as it is stored; when it was
        called for this key before, give the stored result without a call.

        The key counts within the run, or within all runs of workflows of this name. That the call begins is
        durable before it does. If `fn` raises an Exception, the call counts as not made. If it was cut off (a
        killed process, a cancellation), an idempotent node calls again; else OnceUncertain is raised and the
        path is uncertain until a person has spoken. A call of the key that is under way in this engine is
        waited for; one under way in another process is OnceInFlight. A plain `fn` is called where the body
        runs, on the loop too.
        """
        return self._channel.once(key, fn, args, scope)

    def commit_with(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> None:
        """Have this statement run in the same transaction as this attempt's checkpoint: both or neither.

        Statements run in the order of the calls, in the engine's database, when the function has returned.
        One that fails fails this attempt alone. What would end the transaction or touch the engine's own
        tables is refused. Not with `checkpoint=False`, ":memory:", or in other processes.
        """
        self._channel.commit_with(sql, params)


def _used(name: str, amount: float) -> float:
    """Refuse what would make a budget mean nothing: NaN is never more than a limit."""
    if not isinstance(amount, numbers.Real) or not math.isfinite(amount) or amount < 0:
        raise ValueError(f"usage({name}={amount!r}): a number, 0 or more")
    return int(amount) if isinstance(amount, numbers.Integral) else float(amount)


def _finite(number: float) -> float:
    found = int(number) if isinstance(number, int) else float(number)
    if not math.isfinite(found):
        raise ValueError(f"progress({number!r}): a finite number")
    return found
