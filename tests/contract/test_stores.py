"""Both stores of the core keep the contract."""

from pathlib import Path

import pytest

from dagresume.contracts import Clock, MakeStore, StoreContract
from dagresume.sqlite import SQLiteStore
from dagresume.store import MemoryStore


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        first = MemoryStore()
        return lambda clock: MemoryStore(beside=first, clock=clock)


class TestSQLiteStore(StoreContract):
    @pytest.fixture
    def make_store(self, db: Path) -> MakeStore:
        def make(clock: Clock) -> SQLiteStore:
            return SQLiteStore(db, clock=clock)

        return make
