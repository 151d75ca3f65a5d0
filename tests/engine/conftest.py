"""Every engine test runs on both stores of the core, unless it says otherwise."""

from pathlib import Path

import pytest

from tests.engine.kit import Calls, Home


@pytest.fixture(params=["sqlite", "memory"])
def home(request: pytest.FixtureRequest, db: Path) -> Home:
    """Where the runs of this test are kept."""
    return Home(db if request.param == "sqlite" else None)


@pytest.fixture
def sqlite_home(db: Path) -> Home:
    """A real file, where memory would prove nothing."""
    return Home(db)


@pytest.fixture
def calls() -> Calls:
    """What ran, and what is to break."""
    return Calls()
