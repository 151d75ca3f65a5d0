"""Bad input, for every command: one line that names what, where and the cure; the code is not 0; nothing is
changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from itertools import product
from pathlib import Path

import pytest

from dagresume.cli import COMMANDS
from tests.cli.conftest import Cli

Write = Callable[[str, str], Path]
RUN = "01a22ebc-7393-7ee6-b8f1-0e98ebbe00aa"
APP = "--app flow.py"
HEAD = "from dagresume import Workflow\nwf = Workflow('w')\n"

CALLS = {
    "run": "run flow.py",
    "resume": f"resume {RUN} {APP}",
    "retry": f"retry {RUN} {APP}",
    "fork": f"fork {RUN} {APP}",
    "rollback": f"rollback {RUN} {APP}",
    "graph": f"graph {RUN}",
    "plan": f"plan {RUN} {APP}",
    "explain": f"explain {RUN} report",
    "list": "list",
    "show": f"show {RUN}",
    "watch": f"watch {RUN}",
    "diff": f"diff {RUN} {RUN}",
    "logs": f"logs {RUN}",
    "cancel": f"cancel {RUN}",
    "approve": f"approve {RUN} report",
    "reject": f"reject {RUN} report",
    "signal": f"signal {RUN} paid",
    "resolve": f"resolve {RUN} report --output 1",
    "recover": f"recover {APP}",
    "audit": f"audit {RUN}",
    "prune": "prune",
    "stats": "stats",
    "doctor": "doctor",
    "backup": "backup copy.db",
    "export": f"export {RUN}",
}
WITHOUT_DATABASE = {"demo", "bench", "docs", "import"}  # which makes one, see test_transfer
OF_A_RUN = [name for name, call in CALLS.items() if RUN in call]
OF_CODE = [name for name, call in CALLS.items() if "flow.py" in call]


def test_every_command_is_in_the_table() -> None:
    assert set(CALLS) | WITHOUT_DATABASE == set(COMMANDS)


def picture(place: Path) -> dict[str, str]:
    """What is in a folder, by checksum; not what Python keeps of the modules it imported."""
    found = {}
    for file in sorted(place.rglob("*")):
        if "__pycache__" not in file.parts:
            found[str(file)] = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "folder"
    return found


def rows(path: Path) -> dict[str, list[object]]:
    """All that is stored; sessions are not, which every look at a database leaves one of."""
    with closing(sqlite3.connect(path)) as conn:
        tables = [n for (n,) in conn.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        kept = [name for name in tables if name not in {"dagresume_sessions", "sqlite_sequence"}]
        return {name: conn.execute(f"SELECT * FROM {name}").fetchall() for name in kept}


# -- the database ---------------------------------------------------------------------------------------


def somebody_elses(db: Path) -> None:
    db.unlink()
    with closing(sqlite3.connect(db)) as conn:
        conn.execute("CREATE TABLE theirs(x)")


def newer(db: Path) -> None:
    with closing(sqlite3.connect(db, isolation_level=None)) as conn:
        conn.execute("UPDATE dagresume_meta SET value = '99' WHERE name = 'schema_version'")


def overwritten(db: Path) -> None:
    with db.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(db.stat().st_size - 4096))


def a_folder(db: Path) -> None:
    db.unlink()
    db.mkdir()


def cut_beside_its_log(db: Path) -> None:
    os.truncate(db, 0)
    Path(f"{db}-wal").write_bytes(b"x" * 5000)


STATES: dict[str, Callable[[Path], object]] = {
    "a picture": lambda db: db.write_bytes(b"\xff\xd8\xff\xe0JFIF" * 2000),
    "one byte": lambda db: db.write_bytes(b"x"),
    "a folder": a_folder,
    "somebody else's": somebody_elses,
    "newer": newer,
    "overwritten": overwritten,
    "cut in the middle": lambda db: os.truncate(db, 20_000),
    "cut to nothing beside its log": cut_beside_its_log,
}
CURES = ("--db", "pip install", "backup", "dagresume doctor")


@pytest.fixture
def db(pipeline: Path, place: Path, cli: Cli) -> Path:
    """A database with a run that failed, and one that completed."""
    assert cli("run flow.py --key night").code == 1
    return place / "dagresume.db"


@pytest.mark.parametrize("state", STATES)
def test_a_bad_database_is_told_of_by_every_command(state: str, db: Path, place: Path, cli: Cli) -> None:
    """B28."""
    STATES[state](db)
    before = picture(place)
    for name, call in CALLS.items():
        done = cli(call)
        line = done.out.splitlines()[0] if name == "doctor" else done.error
        assert (done.code, name) == (1 if name == "doctor" or "damaged" in line else 2, name)
        assert "dagresume.db" in line, name
        assert any(cure in line for cure in CURES), (name, line)
        assert picture(place) == before, name
    assert "dagresume.db" in cli("doctor --rebuild").error
    assert picture(place) == before


@pytest.mark.parametrize("name", [name for name in CALLS if name not in {"run", "doctor"}])
@pytest.mark.parametrize("where", ["absent.db", "absent/folder/runs.db", ":memory:"])
def test_a_database_that_is_not_there_is_not_made(
    name: str, where: str, pipeline: Path, place: Path, cli: Cli
) -> None:
    before = picture(place)
    done = cli(f"{CALLS[name]} --db {where}")
    assert (done.code, where in done.error, "--db" in done.error) == (2, True, True)
    assert picture(place) == before


def test_a_run_in_a_folder_that_is_not_there_makes_none(pipeline: Path, place: Path, cli: Cli) -> None:
    before = picture(place)
    done = cli("run flow.py --db absent/folder/runs.db")
    assert (done.code, f"no folder {place / 'absent/folder'}" in done.error) == (2, True)
    assert picture(place) == before


AS_SOMEBODY = """
import json, os, sys, tempfile
import encodings.idna, anyio._backends._asyncio
from typer.testing import CliRunner
from dagresume.cli import COMMANDS, app

def told(words):
    done = CliRunner().invoke(app, words, prog_name="dagresume")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return [done.exit_code, done.stdout, done.stderr]

sys.path.insert(0, os.getcwd())
sys.dont_write_bytecode = True
for name in COMMANDS:  # all that is imported late: somebody else may not read it
    told([name, "--help"])
here = os.getcwd()
with tempfile.TemporaryDirectory() as elsewhere:
    os.chdir(elsewhere)
    told(["run", f"{here}/flow.py", "--db", ":memory:"])
    os.chdir(here)
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
print(json.dumps({name: told(call.split()) for name, call in json.loads(sys.argv[1]).items()}))
"""


@pytest.mark.skipif(os.name == "nt", reason="the permissions are POSIX's")
def test_a_read_only_folder_is_told_of_by_every_command(db: Path, place: Path) -> None:
    """As somebody who is not root: for root there are no permissions."""
    run_id = rows(db)["dagresume_runs"][0][1]  # type: ignore[index]  # a row
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to others
        here = Path(folder)
        here.chmod(0o755)
        for file in (db, place / "flow.py"):
            (here / file.name).write_bytes(file.read_bytes())
            (here / file.name).chmod(0o444)
        here.chmod(0o555)
        before = picture(here)
        calls = {name: call.replace(RUN, str(run_id)) for name, call in CALLS.items()}
        command = [sys.executable, "-c", AS_SOMEBODY, json.dumps(calls)]
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False, timeout=50)
        assert picture(here) == before
        here.chmod(0o755)
    assert done.returncode == 0, done.stderr
    for name, (code, out, err) in json.loads(done.stdout).items():
        line = out.splitlines()[0] if name == "doctor" else err.rstrip("\n")
        assert "\n" not in line
        assert (code, name) == (1 if name in {"doctor", "backup"} else 2, name), line
        assert str(here) in line or "copy.db" in line, (name, line)
        assert any(word in line for word in ("permissions", "chmod", "may write")), (name, line)


# -- runs and paths -------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", [RUN, "nope", "a/b", "../x", "last ", "", "%", "\x1b[31m", "é" * 300])
@pytest.mark.parametrize("name", OF_A_RUN)
def test_an_unknown_run_changes_nothing(name: str, word: str, db: Path, place: Path, cli: Cli) -> None:
    before = picture(place)
    words = [word if part == RUN else part for part in CALLS[name].split()]
    done = cli(*words)
    assert (done.code, done.out) == (2, "")
    assert "no run" in done.error
    assert "`dagresume list" in done.error
    assert "\x1b" not in done.error
    assert picture(place) == before


@pytest.mark.parametrize("name", OF_A_RUN)
def test_in_an_empty_database_there_is_no_last_run(name: str, pipeline: Path, place: Path, cli: Cli) -> None:
    assert cli("run flow.py --key night").code == 1
    with closing(sqlite3.connect("dagresume.db", isolation_level=None)) as conn:
        conn.execute("DELETE FROM dagresume_runs")
    before = picture(place)
    done = cli(CALLS[name].replace(RUN, "last"))
    assert (done.code, done.error) == (2, "error: there are no runs in dagresume.db")
    assert picture(place) == before


PATHS = ["absent", "a/b/c", "score[99]", "score[x]", "/", "..", "score/", "\x1b[31m"]
NAMING = [
    f"explain {RUN} PATH",
    f"retry {RUN} --from PATH {APP} --yes",
    f"fork {RUN} --from PATH {APP}",
    f"rollback {RUN} --to PATH {APP} --yes",
    f"approve {RUN} PATH",
    f"reject {RUN} PATH",
    f"resolve {RUN} PATH --output 1",
]
NOT_REACHED = (NAMING[0], "score[99]")  # an item that a map may still get can be explained


@pytest.mark.parametrize(("call", "path"), [pair for pair in product(NAMING, PATHS) if pair != NOT_REACHED])
def test_an_unknown_path_is_named_and_nothing_recorded(call: str, path: str, db: Path, cli: Cli) -> None:
    run_id = str(rows(db)["dagresume_runs"][0][1])  # type: ignore[index]  # a row
    before = rows(db)
    done = cli(*[{"PATH": path, RUN: run_id}.get(part, part) for part in call.split()])
    assert done.code in {1, 2, 4}
    assert path.replace("\x1b[31m", "") in done.error
    assert "unexpected" not in done.error
    assert "\x1b" not in done.error
    assert rows(db) == before


# -- code and inputs ------------------------------------------------------------------------------------

TARGETS = [
    ("absent.py", "no file absent.py"),
    ("absent_module:wf", "no module 'absent_module'"),
    ("flow.py:absent", "has no 'absent'"),
    ("empty.py", "no Workflow"),
    ("broken.py", "broken.py:1"),
    ("text.txt", "not a Python file"),
    ("bad-name", "names no module"),
]


@pytest.mark.parametrize(("target", "told"), TARGETS)
@pytest.mark.parametrize("name", OF_CODE)
def test_code_that_is_not_there_changes_nothing(
    name: str, target: str, told: str, db: Path, write: Write, place: Path, cli: Cli
) -> None:
    write("empty.py", "x = 1\n")
    write("broken.py", "1 +\n")
    write("text.txt", "hello\n")
    before = picture(place)
    done = cli(CALLS[name].replace("flow.py", target).replace(RUN, "last"))
    assert done.code == 2
    assert told in done.error
    assert picture(place) == before


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--input cuont=3", "count"),
        ("--input count", "name=value"),
        ("--inputs absent.json", "absent.json"),
        ("--inputs flow.py", "flow.py"),
        ("--limit llm", "llm"),
        ("--synchronous never", "full or normal"),
        ("--window 3", "--key"),
        ("--concurrency 0", "--concurrency"),
        ("--absent", "--absent"),
    ],
)
def test_wrong_options_of_run_make_no_database(
    options: str, told: str, pipeline: Path, place: Path, cli: Cli
) -> None:
    before = picture(place)
    done = cli(f"run flow.py {options}")
    assert (done.code, told in done.error) == (2, True)
    assert picture(place) == before


def test_a_missing_input_makes_no_database(write: Write, place: Path, cli: Cli) -> None:
    write(
        "needs.py", "from dagresume import Workflow\nwf = Workflow('w')\n@wf.node\ndef a(folder: str): ...\n"
    )
    before = picture(place)
    done = cli("run needs.py")
    assert (done.code, "needs the input 'folder'" in done.error) == (2, True)
    assert picture(place) == before


def test_an_output_that_cannot_be_stored_is_named_with_its_place(write: Write, cli: Cli) -> None:
    write(
        "opaque.py",
        "from dagresume import Workflow\nwf = Workflow('w', idempotent=True)\n"
        "@wf.node\ndef a(): return {'items': [1, object()]}\n",
    )
    done = cli("run opaque.py --json")
    assert done.code == 1
    failure = done.json["failures"]["a"]
    assert failure["type"].endswith("OutputNotSerializable")
    assert "$.items[1]" in failure["message"]
    assert "\n" not in failure["message"]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("signal last paid --payload {", "--payload"),
        ("resolve last report --output {", "--output"),
        ("resolve last report", "--output"),
        ("resolve last report --output 1 --failed no", "--output"),
        ("list --status broken", "broken"),
        ("list --limit 0", "--limit"),
        ("show last --at 0", "0"),
        ("backup", "DEST"),
        ("doctor --fix", "--fix"),
    ],
)
def test_other_wrong_words_change_nothing(call: str, told: str, db: Path, cli: Cli) -> None:
    before = rows(db)
    done = cli(call)
    assert (done.code, told in done.error) == (2, True)
    assert rows(db) == before


@pytest.mark.parametrize("id", ["a/b", "a[1]", "", "x" * 201, "a\\x00b"])
def test_an_id_that_no_path_can_hold_is_refused_before_anything_is_made(
    id: str, write: Write, place: Path, cli: Cli
) -> None:
    write(
        "ids.py", f"from dagresume import Workflow\nwf = Workflow('w')\n@wf.node(id='{id}')\ndef a(): ...\n"
    )
    before = picture(place)
    done = cli("run ids.py")
    assert done.code == 2
    assert "ids.py" in done.error
    assert picture(place) == before
