"""What somebody else wrote into the database file is text and nothing more (B151, B152, B158): every command
ends with its answer or with one clear line, nothing is imported, loaded or written because a row says so.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from typer.testing import CliRunner

from dagresume.cli import app
from dagresume.cli.screen import print_json
from tests.cli.conftest import Cli, Done

Write = Callable[[str, str], Path]

FLOW = """
    from dagresume import Context, Workflow

    wf = Workflow("flow", idempotent=True)

    @wf.node
    async def a(ctx: Context) -> dict:
        ctx.log.info("said")
        return {"x": 1}

    @wf.node(for_each={"n": "items"})
    async def each(n: int) -> int:
        return n

    @wf.node
    async def b(a: dict) -> None:
        raise ValueError("no")

    wf.approval("ok", depends_on="a", prompt="Sure?")
"""
NASTY = "\x1b]0;title\x07\x1b[31m\x9b2J\r\nerror: \u202eforged\u2028 \x00\x7f\x85"
ESCAPES = set(NASTY) - set("]0;title[31m2Jerror: forged \n")


def packed(tree: object) -> tuple[str, bytes]:
    text = json.dumps(tree, separators=(",", ":"))
    return text, hashlib.sha256(text.encode()).digest()[:16]


def outputs(tree: object) -> tuple[str, tuple[object, ...]]:
    """Give SQL that puts another output in the place of that of `a`, with a checksum that is right."""
    text, digest = packed(tree)
    sql = "UPDATE dagresume_events SET output = ?, digest = ?, size = 9 WHERE path = 'a' AND output NOT NULL"
    return sql, (text, digest)


PICKLED = base64.b64encode(b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0btouch pwned\x85R.").decode()
CLAIM = "kind = 'run.created'"
DONE = "path = 'a' AND kind = 'node.completed'"
EVENTS = "UPDATE dagresume_events SET"
DEEP = "[" * 100_000
COUNTS: tuple[object, ...] = (-1, "x", 1.5, None, [])
ATTACKS: dict[str, tuple[str, tuple[object, ...]]] = {
    "run id as a path": ("UPDATE dagresume_runs SET run_id = ?", ("../../x",)),
    "run id of controls": ("UPDATE dagresume_runs SET run_id = ?", (NASTY,)),
    "run status": ("UPDATE dagresume_runs SET status = ?", (NASTY,)),
    "run reason": ("UPDATE dagresume_runs SET reason = ?", (NASTY,)),
    "run names": ("UPDATE dagresume_runs SET workflow = ?, version = ?, key = ?, source = ?", (NASTY,) * 4),
    "run time": ("UPDATE dagresume_runs SET created_at = 'soon'", ()),
    "run time beyond all times": ("UPDATE dagresume_runs SET updated_at = ?", (1 << 62,)),
    "run inputs": ("UPDATE dagresume_runs SET inputs = ?", ("{",)),
    "run inputs a list": ("UPDATE dagresume_runs SET inputs = ?", ("[1]",)),
    "run inputs deep": ("UPDATE dagresume_runs SET inputs = ?", (DEEP,)),
    "run inputs gone": ("UPDATE dagresume_runs SET inputs = NULL", ()),
    "run inputs of a form": ("UPDATE dagresume_runs SET inputs = ?", ('{"items": {"$dr": "os", "v": 1}}',)),
    "owner": ("UPDATE dagresume_runs SET owner = 999, status = 'running'", ()),
    "session": (
        """UPDATE dagresume_sessions SET host = ?, boot_id = 7, pid = 'x', pid_started = 'y', ended_at = NULL,
        expires_at = 'z'""",
        (NASTY,),
    ),
    "no definition": ("DELETE FROM dagresume_definitions", ()),
    **{
        f"definition {graph[:24]}": ("UPDATE dagresume_definitions SET graph = ?", (graph,))
        for graph in (
            "", "{", "null", "[]", '"text"', "5", DEEP, '{"nodes": 5}', '{"nodes": [5]}', '{"nodes": [{}]}',
            '{"nodes": [{"id": 5, "parents": []}]}', '{"nodes": [{"id": "a", "parents": 5, "type": "node"}]}',
            '{"nodes": [], "version": 1, "options": 7}',
            json.dumps({"nodes": [{"id": "a", "type": "node", "parents": [], "body": 5}]}),
            json.dumps({"nodes": [{"id": NASTY, "type": "node", "parents": [NASTY], "function": "os:x"}]}),
        )
    },
    "kind of a node": (f"{EVENTS} kind = ? WHERE {DONE}", (f"node.{NASTY}",)),
    "kind of the run": (f"{EVENTS} kind = 'run.exploded' WHERE {CLAIM}", ()),
    "kind that is not there": (f"{EVENTS} kind = '' WHERE path = 'b'", ()),
    **{
        f"data {data[:24]}": (f"{EVENTS} data = ?", (data,))
        for data in ("", "{", "null", "[1]", '"text"', "7", DEEP, '{"by": [], "codes": 5}')
    },
    **{
        f"data of an output {data}": (f"{EVENTS} data = ?, output = NULL WHERE {DONE}", (data,))
        for data in (
            '{"seq": "x"}', '{"seq": 999}', '{"blob": 5}', '{"blob": "../../../etc/passwd"}',
            '{"blob": "/etc/passwd"}', json.dumps({"blob": "0" * 64}), '{"usage": 5}',
            '{"usage": {"a": "b"}}', '{"signal": []}',
        )
    },
    **{
        f"count {count}": (f"{EVENTS} data = ? WHERE path = 'each'", (json.dumps({"count": count}),))
        for count in COUNTS
    },
    "inputs in a blob": (f"{EVENTS} data = ? WHERE {CLAIM}", ('{"inputs_blob": "../../../etc/passwd"}',)),
    "inputs in a blob of no name": (f"{EVENTS} data = ? WHERE {CLAIM}", ('{"inputs_blob": [5]}',)),
    "inputs of a list": (f"{EVENTS} data = ? WHERE {CLAIM}", ('{"inputs": [], "secrets": 5, "codes": []}',)),
    "forked from": (f"{EVENTS} data = ? WHERE {CLAIM}", (json.dumps({"forked_from": NASTY}),)),
    **{
        f"path {path!r}": (f"{EVENTS} path = ? WHERE path = 'a'", (path,))
        for path in ("../../x", "", "a[", "a[-1]", "/", NASTY, "a[99999999999999999999]", "zzz", "a/b/c", 5)
    },
    "no path": (f"{EVENTS} path = NULL WHERE path = 'a'", ()),
    "types of columns": (
        f"{EVENTS} attempt = 'x', took = 'y', size = 'z', reason = 5, input = 'i', digest = 'd'",
        (),
    ),
    "time of an event": (f"{EVENTS} at = 'soon'", ()),
    "time beyond all times": (f"{EVENTS} at = ?", (1 << 62,)),
    "reason": (f"{EVENTS} reason = ? WHERE path NOT NULL", (NASTY,)),
    "failure": (
        f"{EVENTS} data = ? WHERE path = 'b'",
        (json.dumps({"type": NASTY, "message": NASTY, "traceback": f'File "{NASTY}", line 1, in x\n'}),),
    ),
    "failure of other types": (
        f"{EVENTS} data = ? WHERE path = 'b'", (json.dumps({"type": 5, "message": [], "traceback": {}}),)
    ),
    "question": (f"{EVENTS} data = ? WHERE path = 'ok'", (json.dumps({"prompt": NASTY, "due": "never"}),)),
    "log": ("UPDATE dagresume_logs SET level = ?, line = ?, path = ?", (NASTY,) * 3),
    "log of other types": ("UPDATE dagresume_logs SET level = 5, line = x'00ff', path = 7, at = 'x'", ()),
    "output pickled": outputs({"$dr": "pickle", "v": PICKLED}),
    "output of a class": outputs({"$dr": "obj", "t": "subprocess:Popen", "v": {"args": ["touch", "pwned"]}}),
    "output of a module": outputs({"$dr": "obj", "t": "pwned_module:Thing", "v": {}}),
    "output of an enum": outputs({"$dr": "enum", "t": "signal:Signals", "v": "SIGKILL"}),
    "output as others write it": outputs({"__type__": "os.system", "args": ["touch pwned"]}),
    "output of controls": outputs({NASTY: [NASTY]}),
    "output that is no JSON": (f"{EVENTS} output = 'x' WHERE {DONE}", ()),
}  # fmt: skip
READING = ("list", "show last", "show last --json", "logs last", "watch last", "diff last last")
CHANGING = ("resume last --app flow.py --json",)
MORE = (
    "list --json", "show last --items", "explain last a", "plan last --app flow.py --items",
    "rollback last --app flow.py --yes", "logs last --json", "logs last -f", "diff last last --json",
    "explain last b --json",
    "plan last --app flow.py --json", "approve last ok",
    "retry last --app flow.py --from a --yes --json", "fork last --app flow.py --from b", "cancel last",
    "signal last e --json", "resolve last b --failed why", "resume last --app flow.py",
)  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with a run of which a node failed and another one waits."""
    place = tmp_path_factory.mktemp("original")
    (place / "foreign_flow.py").write_text(dedent(FLOW), encoding="utf-8")
    words = [
        "run",
        str(place / "foreign_flow.py"),
        "--db",
        str(place / "dagresume.db"),
        "--input",
        "items=[1, 2]",
    ]
    path = [*sys.path]
    assert CliRunner().invoke(app, words).exit_code == 3
    sys.path[:] = path
    del sys.modules["foreign_flow"]
    return place / "dagresume.db"


def everything(place: Path) -> Iterator[tuple[str, int]]:
    for file in sorted(place.parent.rglob("*")):
        if "__pycache__" not in file.parts and not file.name.startswith("dagresume.db"):
            yield str(file), file.stat().st_size if file.is_file() else 0


def check(done: Done, command: str) -> None:
    told = f"{command}: {done.out}{done.err}"
    ends = {0, 1, 2, 3, 4} | ({130} if command.startswith("watch") else set())  # that of the run
    assert done.code in ends, told
    assert "Traceback (most" not in done.err, told
    assert "unexpected" not in done.err, told
    assert done.out or done.err, command
    assert not ESCAPES & set(done.out + done.err), told
    if done.code == 0 and "--json" in command:
        assert done.json is not None
    if done.err:
        assert all(line.startswith(("error: ", "warning: ")) for line in done.err.splitlines()), told


@pytest.mark.parametrize(
    ("reading", "changing"), [(READING, CHANGING), pytest.param((), MORE, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("attack", ATTACKS)
def test_what_a_row_says_is_text_and_nothing_more(
    attack: str,
    reading: tuple[str, ...],
    changing: tuple[str, ...],
    original: Path,
    place: Path,
    write: Write,
    cli: Cli,
) -> None:
    sql, values = ATTACKS[attack]
    write("flow.py", FLOW)
    attacked = place / "attacked.db"
    shutil.copy(original, attacked)
    connection = sqlite3.connect(attacked)
    assert connection.execute(sql, values).rowcount
    connection.commit()
    connection.close()
    before = list(everything(place))
    shutil.copy(attacked, "dagresume.db")
    for command in reading:
        check(cli(command), command)
    for command in changing:
        shutil.copy(attacked, "dagresume.db")
        check(cli(command), command)
    assert list(everything(place)) == before
    assert "pwned_module" not in sys.modules


def test_json_says_what_it_was_given_in_characters_that_move_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """B158: strict, and the same value when it is read again."""
    told = {"k\x9b\u202e": "".join(map(chr, range(0x20))) + "\x7f\x85\x9b2J\u2028\u2029\u061c\u2066é😀"}
    print_json(told)
    text = capsys.readouterr().out
    assert json.loads(text) == told
    assert all(char == "\n" or char.isprintable() for char in text)
