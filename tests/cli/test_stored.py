"""The commands about stored runs: list, show, plan, logs, cancel, resume, retry; and which run is meant."""

import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, forget

Write = Callable[[str, str], Path]
Effects = Callable[[], list[str]]

QUICK = """
    from dagresume import Workflow
    quick = Workflow("quick", idempotent=True)
    @quick.node
    async def f(x: object = 1) -> object:
        return x
"""


@pytest.fixture
def failed(pipeline: Path, cli: Cli) -> str:
    """The id of a run of the pipeline, one item of which failed."""
    run_id: str = cli("run flow.py --key night --json").json["run_id"]
    return run_id


# -- which run ------------------------------------------------------------------------------------------


def test_a_run_may_be_named_by_the_beginning_of_its_id_and_the_newest_as_last(
    failed: str, write: Write, cli: Cli
) -> None:
    write("quick.py", QUICK)
    newest = cli("run quick.py --json").json["run_id"]
    assert cli("show last --json").json["run_id"] == newest
    start = next(failed[:n] for n in range(1, 37) if not newest.startswith(failed[:n]))
    assert cli(f"show {start} --json").json["run_id"] == failed
    assert cli(f"show {start.upper()} --json").json["run_id"] == failed
    ambiguous = cli(f"show {start[:-1]}")
    assert ambiguous.code == 2
    assert failed in ambiguous.error
    assert newest in ambiguous.error


@pytest.mark.parametrize("word", ["nope", "a/b", "ffffffff-ffff-7fff-bfff-ffffffffffff", "", "\x1b[31m"])
@pytest.mark.parametrize("command", ["show", "logs", "cancel", "plan", "resume", "retry"])
def test_an_unknown_run_is_told_in_one_line(command: str, word: str, failed: str, cli: Cli) -> None:
    done = cli(command, word, *(("--app", "flow.py") if command in {"plan", "resume", "retry"} else ()))
    assert (done.code, done.out) == (2, "")
    assert "no run" in done.error
    assert "\x1b" not in done.error


@pytest.mark.parametrize("command", ["list", "show last", "logs last", "cancel last", "plan last"])
def test_a_database_that_is_not_there_is_not_made(command: str, place: Path, cli: Cli) -> None:
    done = cli(f"{command} --db sub/other.db")
    assert done.code == 2
    assert "there is no database sub/other.db" in done.error
    assert list(place.iterdir()) == []


def test_the_database_may_be_named_by_the_environment(
    failed: str, place: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "dagresume.db").rename(place / "moved.db")
    monkeypatch.setenv("DAGRESUME_DB", "moved.db")
    assert cli("list --json").json[0]["run_id"] == failed
    assert f"dagresume resume {failed} --db moved.db" in cli("show last").out


# -- list -----------------------------------------------------------------------------------------------


def test_list_shows_the_newest_first_and_may_be_narrowed(failed: str, write: Write, cli: Cli) -> None:
    write("quick.py", QUICK)
    newest = cli("run quick.py --json").json["run_id"]
    told = cli("list --json").json
    assert [run["run_id"] for run in told] == [newest, failed]
    assert (told[1]["key"], told[0]["key"]) == ("night", None)
    for narrowed in ("--status failed", "--workflow pipeline", "--key night", "--status FAILED --key night"):
        assert [run["run_id"] for run in cli(f"list {narrowed} --json").json] == [failed]
    assert [run["run_id"] for run in cli("list --limit 1 --json").json] == [newest]
    assert "No such runs." in cli("list --status cancelled").out
    wrong = cli("list --status broken")
    assert wrong.code == 2
    assert "completed" in wrong.error


def test_a_table_in_a_pipe_is_not_cut(write: Write, shell: Cli) -> None:
    write("quick.py", QUICK)
    key = "k" * 150
    assert shell("run", "quick.py", "--key", key).code == 0
    done = shell("list", COLUMNS="80")
    [header, row] = done.out.splitlines()
    assert header.split() == ["run", "workflow", "key", "status", "created", "lasted", "needs"]
    assert key in row
    assert "completed" in row
    assert "\x1b" not in done.out


# -- show, plan, logs -----------------------------------------------------------------------------------


def test_show_tells_of_each_node_and_of_what_failed(failed: str, place: Path, cli: Cli) -> None:
    (place / "flow.py").unlink()  # needs no code
    done = cli("show last")
    assert done.code == 0
    assert f"run {failed} of pipeline: failed (a node failed)" in done.out
    assert "key night" in done.out
    assert re.search(r"^score +× failed .* 4 items: 3 completed, 1 failed$", done.out, re.MULTILINE)
    assert re.search(r"^report +← upstream_failed +Something it needs has failed\.$", done.out, re.MULTILINE)
    assert "× score[2] failed: ValueError: no score for 2" in done.out
    assert re.search(r'File ".*flow.py", line \d+, in score', done.out)
    assert "score[1]" not in done.out
    assert "Stopped at score[2]: ValueError: no score for 2. 1 node behind it did not run;" in done.out
    assert f"First problem: score[2]  dagresume explain {failed} 'score[2]'" in done.out
    assert re.search(r"^score\[1\] +✓ completed +1 ", cli("show last --items").out, re.MULTILINE)


def test_show_as_json(failed: str, cli: Cli) -> None:
    told = cli("show last --json").json
    assert [node["path"] for node in told["nodes"]] == ["names", "score", "mail", "report"]
    assert told["nodes"][1]["items"] == {"completed": 3, "failed": 1}
    assert "failure" not in told["nodes"][0]
    assert told["failures"]["score[2]"]["type"] == "ValueError"
    assert len(cli("show last --json --items").json["nodes"]) == 8


def test_plan_says_of_each_path_what_and_why_and_what_is_saved(failed: str, cli: Cli) -> None:
    done = cli("plan last --app flow.py")
    assert done.code == 0
    assert re.search(r"^names +reuse .* Reused: completed, and its input has", done.out, re.MULTILINE)
    assert re.search(r"^score +run .* 4 items: 3 reuse, 1 run\. ", done.out, re.MULTILINE)
    assert "300 tokens in, 30 tokens out, cost 0.75" in done.out
    assert f"dagresume resume {failed} --app flow.py" in done.out
    assert "score[2]" not in done.out
    items = cli("plan last --app flow.py --items").out
    assert re.search(r"^score\[2\] +run +Runs again: it failed\.$", items, re.MULTILINE)


def test_plan_as_json(failed: str, cli: Cli, effects: Effects) -> None:
    before = effects()
    told = cli("plan last --app flow.py --json").json
    assert [(d["path"], d["action"]) for d in told["decisions"]][:2] == [("names", "reuse"), ("score", "run")]
    assert told["totals"]["paths"]["reuse"] == 5
    assert told["totals"]["saved"]["tokens_in"] == 300
    assert all(d["sentence"].endswith(".") for d in told["decisions"])
    assert effects() == before


def test_logs_are_told_in_order(failed: str, cli: Cli) -> None:
    lines = cli("logs last").out.splitlines()
    assert [re.sub(r"^\S+ \S+ ", "", line) for line in lines] == [
        f"info    score[{n}]: scored x={n}" for n in range(4)
    ]
    assert [line["path"] for line in cli("logs last --json").json] == [f"score[{n}]" for n in range(4)]


NASTY = """
    from dagresume import Context, Workflow
    wf = Workflow("nasty", idempotent=True)
    @wf.node(id="\\u202enode")
    async def f(ctx: Context) -> str:
        ctx.log.info("log \\x1b]0;title\\x07 \\x9b31m end\\rover")
        return "out \\x1b[2J\\x1b]8;;http://x\\x1b\\\\link \\x07 done \\ud800"
    @wf.node
    async def g(ctx: Context) -> str:
        ctx.log.warning("warn \\x1b[31mred")
        raise ValueError("bad \\x1b[31mred\\x1b[0m \\x08 end")
"""


def test_nothing_stored_reaches_the_terminal_as_a_control_code(
    write: Write, cli: Cli, shell: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("flow.py", NASTY)
    told = [shell("run", "flow.py", "--key", "k\x1b[31my", FORCE_COLOR="")]
    monkeypatch.setenv("FORCE_COLOR", "1")
    told += [cli(words) for words in ("list", "show last", "logs last", "plan last --app flow.py")]
    for done in told:
        for text in (done.out, done.err):
            assert not re.search(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u202e]", text)
            assert set(re.findall(r"\x1b.[^m]*.", text)) <= {
                f"\x1b[{style}m" for style in ("0", "1", "2", "31", "32", "33", "34", "35", "1;31", "36")
            }
    assert "bad red \\x08 end" in told[0].out
    assert "out link \\x07 done" in told[0].out
    assert told[0].err.startswith("warning: warn ")


def test_no_color_is_honoured(failed: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[1;31m× failed" in cli("list").out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "31mfailed" not in cli("list").out


# -- cancel ---------------------------------------------------------------------------------------------


def test_cancel_ends_a_resting_run_for_good(failed: str, cli: Cli) -> None:
    done = cli("cancel last --by ann")
    assert done.code == 0
    assert f"run {failed} of pipeline: cancelled" in done.out
    assert "was cancelled before" in cli("cancel last").out
    resumed = cli("resume last --app flow.py")
    assert resumed.code == 1
    assert "by ann" in resumed.error
    assert f"`dagresume retry {failed} --from NODE --app flow.py`" in resumed.error


def test_a_completed_run_cannot_be_cancelled(write: Write, cli: Cli) -> None:
    write("quick.py", QUICK)
    cli("run quick.py")
    done = cli("cancel last")
    assert done.code == 4
    assert "completed already" in done.error
    assert cli("list --json").json[0]["status"] == "completed"


# -- resume and retry -----------------------------------------------------------------------------------


def test_resume_runs_what_is_missing_and_nothing_else(
    failed: str, place: Path, cli: Cli, effects: Effects
) -> None:
    before = effects()
    (place / "mended").touch()
    done = cli("resume last --app flow.py")
    assert done.code == 0
    assert '  report  {"sum": 14}' in done.out
    assert effects() == [*before, "score 2"]
    again = cli("resume last --app flow.py")
    assert (again.code, effects()) == (0, [*before, "score 2"])
    assert "nothing was executed" in again.out


def test_retry_from_names_what_is_not_idempotent_and_asks_for_yes(
    failed: str, place: Path, cli: Cli, effects: Effects
) -> None:
    (place / "mended").touch()
    before = effects()
    refused = cli("retry last --from names --app flow.py")
    assert refused.code == 4
    assert re.search(r"^names +run +\S+ ms +Runs again: a person asked for it\.$", refused.out, re.MULTILINE)
    assert re.search(r"^score +run .* 4 items: 4 run\. ", refused.out, re.MULTILINE)
    assert "so their effects happen a second time:\n  mail\n" in refused.out
    assert "mail" in refused.error
    assert effects() == before
    done = cli("retry last --from names --app flow.py --yes --json")
    assert done.code == 0
    assert sorted(effects()[len(before) :]) == ["mail", "score 0", "score 1", "score 2", "score 3"]


def test_retry_from_an_item_runs_it_and_what_is_below(
    failed: str, place: Path, cli: Cli, effects: Effects
) -> None:
    (place / "mended").touch()
    before = len(effects())
    done = cli("retry last --from score[1] --app flow.py")
    assert done.code == 0
    assert re.search(r"^score +run .* 4 items: 2 reuse, 2 run\. ", done.out, re.MULTILINE)
    assert sorted(effects()[before:]) == ["score 1", "score 2"]


def test_retry_without_a_path_runs_what_failed(failed: str, place: Path, cli: Cli, effects: Effects) -> None:
    (place / "mended").touch()
    before = len(effects())
    assert cli("retry last --app flow.py").code == 0
    assert effects()[before:] == ["score 2"]


@pytest.mark.parametrize("path", ["nope", "score[9]", "score[", "scores", ""])
def test_retry_from_a_path_that_is_not_there_changes_nothing(
    path: str, failed: str, cli: Cli, effects: Effects
) -> None:
    before = effects()
    done = cli("retry", "last", "--from", path, "--app", "flow.py", "--yes")
    assert done.code == 2
    assert "--from" in done.error
    assert effects() == before


UNCERTAIN = """
    import os
    from pathlib import Path
    from dagresume import Workflow
    wf = Workflow("charge")
    @wf.node
    async def charge() -> str:
        with open("effects.txt", "a") as file:
            file.write("charge\\n")
        if not Path("mended").exists():
            os._exit(9)
        return "paid"
"""


def test_what_nobody_knows_is_refused_by_resume_and_run_again_by_retry(
    write: Write, place: Path, shell: Cli, effects: Effects
) -> None:
    write("flow.py", UNCERTAIN)
    assert shell("run flow.py").code == 9
    assert shell("list --json").json[0]["status"] == "interrupted"
    refused = shell("resume last --app flow.py")
    assert refused.code == 4
    offered = re.search(r"`dagresume (retry [^`]*)`", refused.error)
    assert offered is not None
    assert "Held for a person" in shell("plan last --app flow.py").out
    assert effects() == ["charge"]
    (place / "mended").touch()
    done = shell(offered[1])
    assert done.code == 0
    assert "so their effects may happen a second time:\n  charge\n" in done.out
    assert effects() == ["charge", "charge"]


# -- databases that are not ours ------------------------------------------------------------------------


def foreign(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE theirs(x)")
    connection.close()


def newer(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE dagresume_meta(name TEXT PRIMARY KEY, value TEXT)")
        connection.execute("INSERT INTO dagresume_meta VALUES ('schema_version', '99')")
    connection.close()


STRANGE: dict[str, Callable[[Path], object]] = {
    "text": lambda path: path.write_text("no database"),
    "noise": lambda path: path.write_bytes(bytes(range(256)) * 64),
    "foreign": foreign,
    "newer": newer,
    "folder": Path.mkdir,
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("command", ["run quick.py", "list", "show last", "cancel last"])
def test_a_file_that_is_not_ours_is_refused_and_left_alone(
    kind: str, command: str, write: Write, place: Path, cli: Cli
) -> None:
    write("quick.py", QUICK)
    path = place / "strange.db"
    STRANGE[kind](path)
    before = path.read_bytes() if path.is_file() else b""
    done = cli(f"{command} --db strange.db")
    assert (done.code, done.out) == (2, "")
    assert "strange.db" in done.error
    assert (path.read_bytes() if path.is_file() else b"") == before


def test_a_folder_that_is_not_there_is_told(write: Write, cli: Cli) -> None:
    write("quick.py", QUICK)
    done = cli("run quick.py --db nowhere/runs.db")
    assert done.code == 2
    assert "nowhere" in done.error


def test_a_folder_that_cannot_be_written_to_is_told(write: Write, place: Path, cli: Cli) -> None:
    write("quick.py", QUICK)
    shut = place / "shut"
    shut.mkdir()
    shut.chmod(0o500)
    try:
        (shut / "probe").touch()
    except OSError:
        pass
    else:
        pytest.skip("this user may write everywhere")
    done = cli("run quick.py --db shut/runs.db")
    assert done.code == 2
    assert "cannot be written" in done.error


# -- wrong words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("nope", "No such command 'nope'"),
        ("--nope", "No such option"),
        ("run", "Missing argument 'TARGET'"),
        ("run quick.py --nope", "No such option: --nope"),
        ("run quick.py --input x", "write name=value"),
        ("run quick.py --input =3", "write name=value"),
        ("run quick.py --input y=3", "has no input 'y'"),
        ("run quick.py --inputs nope.json", "--inputs nope.json: No such file"),
        ("run quick.py --inputs quick.py", "--inputs quick.py is not JSON"),
        ("run quick.py --inputs list.json", "holds list; it must be an object"),
        ("run quick.py --concurrency 0", "--concurrency"),
        ("run quick.py --synchronous half", "full or normal"),
        ("run quick.py --limit llm", "write name=8 or name=500/minute"),
        ("run quick.py --limit llm=0", "'0' is no limit"),
        ("run quick.py --limit llm=5/week", "'5/week' is no limit"),
        ("run quick.py --window 5", "give a --key"),
        ("show", "Missing argument 'RUN'"),
        ("list --limit 0", "--limit"),
        ("list --limit x", "--limit"),
    ],
)
def test_wrong_words_exit_2_with_one_line_and_make_no_database(
    words: str, told: str, write: Write, place: Path, cli: Cli
) -> None:
    write("quick.py", QUICK)
    write("list.json", "[1]")
    done = cli(words)
    assert (done.code, done.out) == (2, "")
    assert told in done.error
    assert not (place / "dagresume.db").exists()


def test_a_missing_input_is_named(write: Write, place: Path, cli: Cli) -> None:
    flow = write("quick.py", QUICK.replace("x: object = 1", "x: object"))
    done = cli("run quick.py")
    assert done.code == 2
    assert "'x'" in done.error
    assert not (place / "dagresume.db").exists()
    forget(flow)
    assert cli("run quick.py --input x=1").code == 0


@pytest.mark.parametrize("word", ["%", "_", "0_", "01%", "*", "[0-9]", "' OR 1=1 --"])
def test_the_beginning_of_an_id_is_no_pattern(failed: str, word: str, cli: Cli) -> None:
    """B160."""
    done = cli("show", word)
    assert (done.code, done.out) == (2, "")
    assert "no run" in done.error
