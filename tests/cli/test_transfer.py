"""`dagresume export` and `import`: whole runs, or nothing of them."""

import json
import os
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from dagresume.doctor import examine, sound
from dagresume.errors import ImportRefused
from dagresume.transfer import export_runs, import_runs
from tests.cli.conftest import Cli

Write = Callable[[str, str], Path]
DATABASES = ("other.db", "dagresume.db")
FLOW = """
    import os
    from dagresume import Context, Workflow

    wf = Workflow("moved", idempotent=True)

    @wf.node
    async def numbers(count: int) -> list[int]:
        return list(range(count))

    @wf.node(for_each={"n": "numbers"})
    async def doubled(n: int, ctx: Context) -> int:
        ctx.log.info("doubling", n=n)
        if n == 3 and not os.path.exists("mended"):
            raise ValueError("not three")
        return 2 * n

    @wf.node
    async def big(count: int) -> str:
        return "x" * 100_000

    @wf.node
    async def once(count: int, ctx: Context) -> int:
        return await ctx.once("paid", one)

    async def one() -> int:
        return 1

    wf.wait_for("paid", "payment", depends_on=["once"])

    @wf.node
    async def total(doubled: list[int], paid: dict, big: str) -> list:
        return [sum(doubled), paid, len(big)]
"""


@pytest.fixture
def failed(cli: Cli, write: Write) -> str:
    """A run with a failed item, a big output, a call made once, a signal that came, log lines; its id."""
    write("flow.py", FLOW)
    assert cli("run flow.py --input count=5 --key k").code in {1, 3}
    run_id: str = cli("list --json").json[0]["run_id"]
    assert (
        cli('signal last payment --payload {"cents":5}'.replace('{"cents":5}', "'{\"cents\": 5}'")).code == 0
    )
    assert cli("resume last --app flow.py").code == 1
    return run_id


def test_a_run_that_was_moved_goes_on_as_it_would_have(failed: str, cli: Cli) -> None:
    assert cli("export last -o runs.jsonl").code == 0
    done = cli("import runs.jsonl --db other.db")
    assert (done.code, done.err) == (0, "")
    assert "1 run imported into other.db." in done.out
    Path("mended").touch()
    assert cli("resume last --app flow.py --db other.db").code == 0
    assert cli("resume last --app flow.py").code == 0
    moved, original = (cli(f"show last --json --db {db}").json for db in DATABASES)
    assert moved["run_id"] == original["run_id"] == failed
    statuses = [{node["path"]: node["status"] for node in told["nodes"]} for told in (moved, original)]
    assert statuses[0] == statuses[1]
    outputs = [
        cli(f"run flow.py --input count=5 --key k --json --db {db}").json["outputs"]
        for db in ("other.db", "dagresume.db")
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0]["total"] == [20, {"cents": 5}, 100_000]
    logs = [[line.split()[2:] for line in cli(f"logs last --db {db}").out.splitlines()] for db in DATABASES]
    assert logs[0] == logs[1]
    assert sound(examine("other.db"))


def test_what_is_imported_is_exported_as_it_came(failed: str, cli: Cli) -> None:
    for n in range(3):
        assert cli(f"run flow.py --input count=2 --key other{n}").code == 3
    first = list(export_runs("dagresume.db"))
    Path("all.jsonl").write_text("".join(first))
    assert cli("run flow.py --input count=1 --db other.db").code == 3  # so that all numbers are others there
    assert cli("import all.jsonl --db other.db").code == 0
    ids = [json.loads(line)["run"]["run_id"] for line in first if line.startswith('{"dagresume"')]
    assert list(export_runs("other.db", ids)) == first
    assert len(ids) == 4


def test_every_line_is_json_that_says_what_it_is(failed: str, cli: Cli) -> None:
    lines = [json.loads(line) for line in cli("export last").out.splitlines()]
    kinds = [next(iter(line)) for line in lines]
    assert kinds[0] == "dagresume"
    assert kinds[-1] == "end"
    assert {"blob", "event", "once", "log"} == set(kinds[1:-1])
    events = [line for line in lines if "event" in line]
    assert events[0]["kind"] == "run.created"
    (done,) = [line for line in events if line["kind"] == "node.completed" and line["path"] == "numbers"]
    assert done["output"] == [0, 1, 2, 3, 4]
    assert done["at"].endswith("+00:00")


def test_what_is_there_already_is_said_or_passed_over(failed: str, cli: Cli) -> None:
    cli("export last -o runs.jsonl")
    again = cli("import runs.jsonl")
    assert again.code == 4
    assert (
        again.error == f"error: runs.jsonl:1: run {failed} is there already; --skip-existing passes over it"
    )
    assert cli("import runs.jsonl --skip-existing --json").json == []


def test_a_key_that_is_held_is_not_taken(failed: str, cli: Cli) -> None:
    cli("export last -o runs.jsonl")
    assert cli("run flow.py --input count=5 --key k --db other.db").code in {1, 3}
    refused = cli("import runs.jsonl --db other.db")
    assert refused.code == 4
    assert "has the key 'k', held by run" in refused.error
    assert len(cli("list --json --db other.db").json) == 1


def test_a_run_that_was_under_way_is_interrupted_in_the_copy(failed: str, cli: Cli) -> None:
    with closing(sqlite3.connect("dagresume.db", isolation_level=None)) as conn:
        conn.execute("UPDATE dagresume_runs SET status = 'running', owner = 1")
    cli("export last -o runs.jsonl")
    assert cli("import runs.jsonl --db other.db --json").json[0]["status"] == "interrupted"
    assert cli("list --json --db other.db").json[0]["status"] == "interrupted"
    Path("mended").touch()
    assert cli("resume last --app flow.py --db other.db").code == 0


def rows(db: str) -> dict[str, int]:
    with closing(sqlite3.connect(db)) as conn:
        tables = ("runs", "events", "definitions", "once", "logs")
        return {t: conn.execute(f"SELECT count(*) FROM dagresume_{t}").fetchone()[0] for t in tables}


def test_a_line_that_was_cut_altered_or_lost_is_named_and_nothing_is_written(failed: str, cli: Cli) -> None:
    lines = list(export_runs("dagresume.db"))
    cli("run flow.py --input count=1 --db other.db")
    before, random_ = rows("other.db"), random.Random(7)
    files = sorted(Path().rglob("other.db.blobs/**/*"))
    for n, line in enumerate(lines):
        cut = line[: random_.randrange(len(line) // 2)] + "\n"
        twice = [line, line] if n < len(lines) - 1 else ["{}"]
        for altered in ([cut], [], twice, ['{"what": 1}\n'], ["null\n"], [line.replace(":", ";", 1)]):
            broken = [*lines[:n], *altered, *lines[n + 1 :]]
            with pytest.raises(ImportRefused, match=r"^there:\d+: "):
                import_runs("other.db", broken, source="there")
            assert rows("other.db") == before
    assert sorted(Path().rglob("other.db.blobs/**/*")) == files
    with pytest.raises(ImportRefused, match="checksum does not match"):
        import_runs("other.db", [line.replace("[0,1,2,3,4]", "[0,1,2,3,5]") for line in lines])
    with pytest.raises(ImportRefused, match="checksum does not match"):
        import_runs("other.db", [line.replace("xxxx", "xxxy", 1) for line in lines])
    assert len(import_runs("other.db", lines)) == 1


def test_an_import_that_is_killed_leaves_whole_runs(failed: str, cli: Cli) -> None:
    for n in range(2):
        cli(f"run flow.py --input count=2 --key other{n}")
    lines = list(export_runs("dagresume.db"))
    ends = [n for n, line in enumerate(lines) if line.startswith('{"end"')]
    cli("run flow.py --input count=1 --db other.db")
    for at in range(0, len(lines), 3):

        def dying(at: int = at) -> object:
            for n, line in enumerate(lines):
                if n == at:
                    os._exit(9)
                yield line

        child = os.fork()
        if not child:
            import_runs("other.db", dying())  # type: ignore[arg-type]
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        found = cli("list --json --db other.db").json
        assert len(found) == 1 + sum(end < at for end in ends)
        with closing(sqlite3.connect("other.db", isolation_level=None)) as conn:
            conn.execute("DELETE FROM dagresume_events WHERE run > 1")
            conn.execute("DELETE FROM dagresume_runs WHERE run > 1")
            conn.execute("DELETE FROM dagresume_once WHERE run > 1")
            conn.execute("DELETE FROM dagresume_logs WHERE run > 1")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("export", "name the runs to export, or give --all"),
        ("export last --all", "name the runs to export, or give --all"),
        ("export --all --db none.db", "there is no database none.db"),
        ("export 0199", "no run"),
        ("export last -o flow.py", "--output flow.py: it is there already"),
        ("import none.jsonl", "none.jsonl: No such file or directory"),
        ("import flow.py --db new.db", "flow.py:2: this line is no JSON object"),
        ("import dagresume.db --db new.db", "dagresume.db: this is no text in UTF-8"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(failed: str, cli: Cli, words: str, told: str) -> None:
    done = cli(words)
    assert done.code in {2, 4}
    assert told in done.error


@pytest.mark.parametrize("damage", ["theirs", "newer", "no database", "folder"])
def test_a_database_that_is_not_ours_is_left_alone(failed: str, cli: Cli, damage: str) -> None:
    cli("export last -o runs.jsonl")
    target = Path("other.db")
    if damage == "folder":
        target.mkdir()
    elif damage == "no database":
        target.write_bytes(b"x" * 9000)
    elif damage == "theirs":
        with closing(sqlite3.connect(target)) as conn:
            conn.execute("CREATE TABLE theirs(x)")
    else:
        cli("run flow.py --input count=1 --db other.db")
        with closing(sqlite3.connect(target, isolation_level=None)) as conn:
            conn.execute("UPDATE dagresume_meta SET value = '99' WHERE name = 'schema_version'")
    before = target.read_bytes() if target.is_file() else b""
    done = cli("import runs.jsonl --db other.db")
    assert done.code in {2, 4}
    assert "other.db" in done.error
    assert (target.read_bytes() if target.is_file() else b"") == before


def test_an_export_is_for_its_owner_alone(failed: str, cli: Cli) -> None:
    cli("export --all --output runs.jsonl")
    assert Path("runs.jsonl").stat().st_mode & 0o777 == 0o600
