"""Which store a URL names and which executor a node: ours, or those that extras bring as entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Literal

from dagresume.clock import Clock
from dagresume.errors import DagresumeError, DefinitionError
from dagresume.executor import Executor, LoopExecutor, ThreadExecutor
from dagresume.sqlite import SQLiteStore
from dagresume.store import MemoryStore, Store

__all__ = ["executor_of", "store_of"]


def store_of(url: str, synchronous: Literal["full", "normal"], adopt: bool, clock: Clock) -> Store:
    """Give the store a URL names; those beside SQLite come from the entry points `dagresume.stores`."""
    if url == ":memory:":
        return MemoryStore(clock=clock)
    scheme, found, rest = url.partition("://")
    if not found:
        return SQLiteStore(url, synchronous=synchronous, adopt=adopt, clock=clock)
    if scheme == "sqlite":
        return SQLiteStore(
            rest.removeprefix("/") or "dagresume.db", synchronous=synchronous, adopt=adopt, clock=clock
        )
    for point in entry_points(group="dagresume.stores", name=scheme):
        made: Store = point.load()(url, synchronous=synchronous, clock=clock)
        return made
    raise DagresumeError(f"no store for {scheme}://…. Give a path, sqlite:///path or ':memory:'.")


def executor_of(name: str, concurrency: int) -> Executor:
    """Give the executor of this name; DefinitionError if the extra that brings it is not installed."""
    if name == "loop":
        return LoopExecutor()
    if name == "thread":
        return ThreadExecutor(concurrency)
    if name == "process":
        from dagresume.crew import ProcessExecutor  # multiprocessing is loaded by who has a use for it

        return ProcessExecutor()
    for point in entry_points(group="dagresume.executors", name=name):
        made: Executor = point.load()()
        return made
    raise DefinitionError(f"executor={name!r} is not installed: pip install 'dagresume[{name}]'")
