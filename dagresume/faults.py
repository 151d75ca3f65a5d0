"""Faults of your choice in an engine of yours: what fails, is late, is not stored, or kills the process."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dagresume.clock import Clock
from dagresume.engine import Engine
from dagresume.errors import StoreFull
from dagresume.events import Record
from dagresume.executor import Call, Executor
from dagresume.fakes import StoreWrapper
from dagresume.jobs import CURRENT
from dagresume.killpoints import die
from dagresume.store import Outcome, Store, StoreFailed, Unit
from dagresume.undo import UndoContext

__all__ = ["Fault", "Faults", "FaultyEngine"]

Error = BaseException | type[BaseException]


class Fault(NamedTuple):
    """One that happened: `what` ("failed", "delayed", "refused"), `where` (a path, or "commit 3"), and the
    attempt of the path.
    """

    what: str
    where: str
    attempt: int = 0


@dataclass(frozen=True)
class _Failure:
    """Attempts of paths that fail: the n-th one, or each with some probability."""

    paths: re.Pattern[str]
    error: Error
    attempt: int | None
    probability: float
    after: bool
    undo: bool


@dataclass(frozen=True)
class _Delay:
    paths: re.Pattern[str]
    seconds: float
    attempt: int | None


@dataclass(frozen=True)
class _Refusal:
    """Writes that the store refuses: the n-th commit, or what holds a record that is meant."""

    commit: int | None
    record: Callable[[Record], bool] | None
    error: Error
    times: int | None


class Faults:
    """What is to go wrong, and an engine in which it does.

        faults = Faults(seed=7)
        faults.fail("score[3]", attempt=1, error=ConnectionError("no answer"))
        faults.fail_randomly(0.1, "score[*]")
        faults.refuse(commit=5)
        async with faults.engine("runs.db", workflows=[wf]) as engine:
            result = await engine.run(wf, raise_on_failure=False)
        assert result.failures and faults.happened
        async with Engine("runs.db", workflows=[wf]) as engine:     # the cause is gone
            await engine.resume(result.run_id)

    A path is named as it is in a run (`score[3]`, `screen[3]/evaluate`); `*` stands for anything. `attempt`
    is that of the path, counted from 1 over all processes. Each method gives the object itself, so that they
    can be chained. What happened is in `happened`, in order. One object may serve several engines, one after
    the other: commits are counted by each engine anew.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.happened: list[Fault] = []
        self._failures: list[_Failure] = []
        self._delays: list[_Delay] = []
        self._refusals: list[_Refusal] = []
        self._refused: dict[_Refusal, int] = {}
        self._kills: set[tuple[str, int]] = set()

    # -- what is to happen ----------------------------------------------------------------------------

    def fail(
        self,
        path: str,
        attempt: int | None = 1,
        error: Error = RuntimeError,
        *,
        after: bool = False,
        undo: bool = False,
    ) -> Faults:
        """Let this attempt of the path raise `error` (an exception or its class); None: every attempt.

        `after`: when its body has returned, so that its effect has happened. `undo`: the attempt to undo it
        (`compensate=`) instead.

            Faults().fail("pay", attempt=1, error=TimeoutError("no answer"), after=True)
        """
        if attempt is not None:
            _check_number("attempt", attempt)
        self._failures.append(_Failure(_pattern(path), error, attempt, 1.0, after, undo))
        return self

    def fail_randomly(
        self, probability: float, paths: str = "*", error: Error = RuntimeError, *, after: bool = False
    ) -> Faults:
        """Let each attempt of these paths raise `error` with a probability from 0 to 1.

        Decided by (seed, path, attempt) alone: the same seed gives the same failures, whatever runs at the
        same time and in whatever order.

            Faults(seed=7).fail_randomly(0.2, "score[*]", ConnectionError("no answer"))
        """
        if not 0 <= probability <= 1:
            raise ValueError(f"fail_randomly({probability!r}): a probability from 0 to 1")
        self._failures.append(_Failure(_pattern(paths), error, None, probability, after, undo=False))
        return self

    def delay(self, path: str, seconds: float, attempt: int | None = None) -> Faults:
        """Let this attempt of the path (None: every one) wait so many seconds on the engine's clock before
        its body begins. The time counts against the node's `timeout=`.

            Faults().delay("score[*]", 2.5)
        """
        if attempt is not None:
            _check_number("attempt", attempt)
        if not seconds >= 0:
            raise ValueError(f"delay(…, {seconds!r}): seconds, 0 or more")
        self._delays.append(_Delay(_pattern(path), seconds, attempt))
        return self

    def refuse(
        self,
        commit: int | None = None,
        *,
        record: Callable[[Record], bool] | None = None,
        error: Error | None = None,
        times: int | None = 1,
    ) -> Faults:
        """Let the store not write the n-th commit, or what holds a record for which `record` is true.

        `error`: what the store says (StoreFull unless told otherwise). `times`: how often a record is
        refused; None: always. Give either `commit` or `record`.

            Faults().refuse(commit=4)
            Faults().refuse(record=lambda r: (r.kind, r.path) == ("node.completed", "pay"))
        """
        if (commit is None) == (record is None):
            raise ValueError("refuse(): give either commit=n or record=predicate")
        if commit is not None:
            _check_number("commit", commit)
        said = StoreFull("the store", "no space left (a fault put in on purpose)") if error is None else error
        self._refusals.append(_Refusal(commit, record, said, times))
        return self

    def kill(self, commit: int, when: str = "after") -> Faults:
        """Kill this process before or after its n-th commit, as a power cut would (SIGKILL).

        For a process of the test's own, as `Zygote.call` gives one.

            Faults().kill(commit=3, when="before")
        """
        _check_number("commit", commit)
        if when not in {"before", "after"}:
            raise ValueError(f"kill(when={when!r}): 'before' or 'after'")
        self._kills.add((when, commit))
        return self

    # -- where it happens -----------------------------------------------------------------------------

    def engine(self, url: str | Path = "dagresume.db", **options: Any) -> Engine:
        """Give an engine in which all this happens; takes what `Engine` takes, also `":memory:"`."""
        return FaultyEngine(self, url, **options)

    def store(self, inner: Store) -> Store:
        """Give a store in which the refusals and kills happen, for a test of a store alone."""
        return _FaultyStore(inner, self)

    # -- what happens ---------------------------------------------------------------------------------

    def _error(self, path: str, attempt: int, *, undoing: bool, after: bool) -> BaseException | None:
        for failure in self._failures:
            if (failure.undo, failure.after) != (undoing, after) or not failure.paths.fullmatch(path):
                continue
            if failure.attempt not in {None, attempt}:
                continue
            if failure.probability < 1 and self._draw(path, attempt) >= failure.probability:
                continue
            self.happened.append(Fault("failed", path, attempt))
            return _made(failure.error, f"{path}, attempt {attempt}, fails on purpose")
        return None

    def _draw(self, path: str, attempt: int) -> float:
        return random.Random(f"{self.seed} {path} {attempt}").random()

    def _seconds(self, path: str, attempt: int) -> float:
        return sum(
            delay.seconds
            for delay in self._delays
            if delay.paths.fullmatch(path) and delay.attempt in {None, attempt}
        )

    def _refusal(self, commit: int, unit: Unit) -> Exception | None:
        for refusal in self._refusals:
            done = self._refused.get(refusal, 0)
            if refusal.record is None:
                if refusal.commit != commit:
                    continue
            elif done == refusal.times or not any(map(refusal.record, unit.records)):
                continue
            self._refused[refusal] = done + 1
            error = _made(refusal.error, f"commit {commit} is refused on purpose")
            if not isinstance(error, Exception):
                raise error
            self.happened.append(Fault("refused", f"commit {commit}"))
            return error
        return None

    def _die_at(self, when: str, commit: int) -> None:
        if (when, commit) in self._kills:
            die()


class FaultyEngine(Engine):
    """An engine in which faults happen: between it and its store, and around each body."""

    def __init__(self, faults: Faults, url: str | Path, **options: Any) -> None:
        super().__init__(url, **options)
        self._faults = faults
        self._store = faults.store(self._store)

    def _executor(self, name: str) -> Executor:
        return _FaultyExecutor(super()._executor(name), self._faults, self._clock)


class _FaultyExecutor:
    def __init__(self, inner: Executor, faults: Faults, clock: Clock) -> None:
        self._inner, self._faults, self._clock = inner, faults, clock

    async def run(self, call: Call) -> Any:
        faults, undoing = self._faults, isinstance(call.context, UndoContext)
        job = CURRENT.get()
        attempt = call.context.attempt if call.context is not None else 1 if job is None else job.attempt
        seconds = 0.0 if undoing else faults._seconds(call.path, attempt)
        if seconds:
            faults.happened.append(Fault("delayed", call.path, attempt))
            await self._clock.sleep(seconds)
        error = faults._error(call.path, attempt, undoing=undoing, after=False)
        if error is not None:
            raise error
        result = await self._inner.run(call)
        error = faults._error(call.path, attempt, undoing=undoing, after=True)
        if error is not None:
            raise error
        return result

    async def close(self) -> None:
        await self._inner.close()


class _FaultyStore(StoreWrapper):
    def __init__(self, inner: Store, faults: Faults) -> None:
        super().__init__(inner)
        self._faults, self._count = faults, 0

    async def commit(self, units: Sequence[Unit]) -> list[Outcome]:
        self._count += 1
        self._faults._die_at("before", self._count)
        errors = [self._faults._refusal(self._count, unit) for unit in units]
        kept = [unit for unit, error in zip(units, errors, strict=True) if error is None]
        written = iter(await self.inner.commit(kept) if kept else [])
        outcomes = [next(written) if error is None else StoreFailed(error) for error in errors]
        self._faults._die_at("after", self._count)
        return outcomes


def _pattern(paths: str) -> re.Pattern[str]:
    """Give what matches these paths: `*` is anything, all else (brackets too) is itself."""
    return re.compile(".*".join(map(re.escape, paths.split("*"))), re.DOTALL)


def _made(error: Error, text: str) -> BaseException:
    return error(text) if isinstance(error, type) else error


def _check_number(name: str, n: int) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"{name}={n!r}: a whole number from 1 upwards")
