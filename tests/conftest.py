"""What every test may ask for."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """asyncio alone: aiosqlite knows no other loop."""
    return "asyncio"


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """Where this test's database will be; the file does not exist yet."""
    return tmp_path / "runs.db"
