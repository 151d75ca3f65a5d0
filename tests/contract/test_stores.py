"""Both stores of the core keep the contract, and users can hold theirs to it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dagresume.contracts import Clock, MakeStore
from dagresume.sqlite import SQLiteStore
from dagresume.store import MemoryStore
from dagresume.testing import StoreContract

ROOT = Path(__file__).parents[2]


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


STORES_OF_USERS = '''
import pytest
from dagresume.store import Committed, MemoryStore
from dagresume.testing import StoreContract, StoreWrapper

class Forgetful(StoreWrapper):
    """Says that everything is written, and writes no log lines."""

    async def commit(self, units):
        for unit in units:
            unit.logs = ()
        return await self.inner.commit(units)

class TestGood(StoreContract):
    @pytest.fixture
    def make_store(self):
        first = MemoryStore()
        return lambda clock: StoreWrapper(MemoryStore(beside=first, clock=clock))

class TestForgetful(StoreContract):
    @pytest.fixture
    def make_store(self):
        first = MemoryStore()
        return lambda clock: Forgetful(MemoryStore(beside=first, clock=clock))
'''


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder without our configuration."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )


def test_a_store_of_somebody_else_is_held_to_it(tmp_path: Path) -> None:
    """In a bare pytest: the suite brings along what it needs, and finds what a store gets wrong."""
    (tmp_path / "test_theirs.py").write_text(STORES_OF_USERS, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n", encoding="utf-8")
    done = run(
        tmp_path, "-m", "pytest", "-p", "no:cacheprovider", "--strict-markers", "-q", "-rf", "--tb=line"
    )
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert failed, done.stdout + done.stderr
    assert all("TestForgetful" in line and "log" in line for line in failed), done.stdout
    assert " error" not in done.stdout.splitlines()[-1]


def test_without_pytest_only_the_suite_is_missing(tmp_path: Path) -> None:
    (tmp_path / "no_pytest.py").write_text(
        "import sys\n"
        "sys.modules['pytest'] = None\n"
        "import dagresume.testing\n"
        "assert dagresume.testing.sweep and dagresume.testing.Faults\n"
        "try:\n"
        "    from dagresume.testing import StoreContract\n"
        "except ImportError as error:\n"
        "    print(error)\n",
        encoding="utf-8",
    )
    done = run(tmp_path, "no_pytest.py")
    assert done.stdout == "StoreContract is a suite of pytest's: pip install pytest\n", done.stderr


def test_the_engine_loads_nothing_of_the_kit(tmp_path: Path) -> None:
    names = "testing sweeps stages plays faults killpoints zygote autopsy fakes contracts pytest_plugin"
    (tmp_path / "light.py").write_text(
        "import sys\n"
        "import dagresume\n"
        f"loaded = [name for name in {names.split()!r} if f'dagresume.{{name}}' in sys.modules]\n"
        "print(loaded, 'pytest' in sys.modules)\n",
        encoding="utf-8",
    )
    assert run(tmp_path, "light.py").stdout == "[] False\n"
    done = run(tmp_path, "-c", f"import dagresume; [__import__('dagresume.' + n) for n in {names.split()!r}]")
    assert done.returncode == 0, done.stderr


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    import dagresume.testing as kit

    assert all(hasattr(kit, name) for name in kit.__all__)
    with pytest.raises(AttributeError, match="StoreContrakt"):
        _ = kit.StoreContrakt
