"""`watch` and `logs -f` follow a run of another process, end when it does, and leave it alone."""

import json
import os
import pty
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.cli.conftest import Cli

Write = Callable[[str, str], Path]
GATED = """
    import asyncio
    from pathlib import Path
    from dagresume import Context, Workflow

    wf = Workflow("gated", idempotent=True)

    @wf.node
    async def top(count: int = 8) -> list[int]:
        return list(range(count))

    @wf.node(for_each={"x": "top"}, tolerate=2)
    async def score(x: int, ctx: Context) -> int:
        ctx.log.info("scored", x=x)
        if x == 3:
            ctx.log.warning("bad one")
            raise ValueError("no score")
        while x == 5 and not Path("gate").exists():
            await asyncio.sleep(0.02)
        return x

    @wf.node(args={"scores": "score"})
    async def end(scores: list, ctx: Context) -> int:
        ctx.log.info("the end")
        return len(scores)
"""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


def has_begun(place: Path) -> bool:
    """Whether seven items have ended and the one at the gate has begun."""
    path = place / "dagresume.db"
    if not path.exists():
        return False
    with closing(sqlite3.connect(path)) as connection:
        try:
            sql = "SELECT count(*) FROM dagresume_events WHERE path LIKE 'score[%' AND kind <> 'node.started'"
            ended = connection.execute(sql).fetchone()[0]
            sql = "SELECT count(*) FROM dagresume_events WHERE path = 'score[5]'"
            return bool(ended == 7 and connection.execute(sql).fetchone()[0])
        except sqlite3.OperationalError:
            return False


@pytest.fixture
def running(write: Write, place: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run that another process drives, waiting at its gate."""
    write("gated.py", GATED)
    command = [sys.executable, "-m", "dagresume", "run", "gated.py"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: has_begun(place))
            yield process
        finally:
            process.kill()


def begun(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "dagresume", *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )


def line_with(process: subprocess.Popen[str], word: str) -> list[str]:
    """Read what a command prints up to the line that holds a word."""
    told = []
    assert process.stdout is not None
    for line in process.stdout:
        told.append(line)
        if word in line:
            return told
    pytest.fail(f"{word!r} never came: {told}")


def test_watch_follows_a_run_of_another_process_and_ends_with_it(
    running: subprocess.Popen[bytes], place: Path
) -> None:
    watching = begun("watch")
    assert any("✓ completed   top" in line for line in line_with(watching, "running     score: 7 of 8"))
    (place / "gate").touch()
    out, err = watching.communicate(timeout=40)
    assert (watching.returncode, err) == (0, "")
    assert "✓ completed   score" in out
    assert "✓ completed   end" in out
    assert "completed in" in out.splitlines()[-1]
    assert "1 failed item was tolerated" in out.splitlines()[-1]
    assert "score[" not in out.replace("score[3]", "")  # no rows of items
    assert running.wait(30) == 0


def test_a_run_that_dies_meanwhile_is_shown_as_dead(running: subprocess.Popen[bytes]) -> None:
    watching = begun("watch", "last")
    line_with(watching, "running     score")
    running.kill()
    running.wait()
    out, _ = watching.communicate(timeout=40)
    assert watching.returncode == 130
    assert "interrupted (the process that drove it died)" in out
    assert "Nothing uncertain was under way: resuming is safe." in out
    assert "? interrupted score" in out


def test_who_stops_watching_leaves_the_run_alone(running: subprocess.Popen[bytes], place: Path) -> None:
    for command in (["watch"], ["logs", "last", "-f"]):
        watching = begun(*command)
        line_with(watching, "score")
        watching.send_signal(signal.SIGINT)
        _, err = watching.communicate(timeout=30)
        assert watching.returncode == 130
        assert err == "no longer watching; the run is left alone\n"
    assert running.poll() is None
    (place / "gate").touch()
    assert running.wait(30) == 0


def test_watch_as_json_gives_each_event_and_the_run_at_last(
    running: subprocess.Popen[bytes], place: Path
) -> None:
    watching = begun("watch", "--json")
    (place / "gate").touch()
    out, _ = watching.communicate(timeout=40)
    told = [json.loads(line) for line in out.splitlines()]
    assert told[-1]["status"] == "completed"
    assert told[-1]["headline"].startswith("All ")
    assert {event["kind"] for event in told[:-1]} <= {
        "node.started", "node.completed", "node.failed", "run.completed"
    }  # fmt: skip


def test_logs_follows_until_the_run_rests(running: subprocess.Popen[bytes], place: Path) -> None:
    following = begun("logs", "last", "--follow", "--level", "info")
    line_with(following, "bad one")
    (place / "gate").touch()
    out, err = following.communicate(timeout=40)
    assert (following.returncode, err) == (0, "")
    *_, last, status = out.splitlines()
    assert last.endswith("end: the end")
    assert re.fullmatch(r"run \S+ of gated: completed", status)


def test_a_run_that_has_ended_is_shown_once(write: Write, cli: Cli, place: Path) -> None:
    (place / "gate").touch()
    write("gated.py", GATED)
    assert cli("run gated.py").code == 0
    done = cli("watch")
    assert done.code == 0
    assert done.out.splitlines()[-2].endswith("of gated: completed")


def test_on_a_terminal_it_is_a_tree_that_lives(running: subprocess.Popen[bytes], place: Path) -> None:
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "30", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "dagresume", "watch"]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as watching:
        os.close(theirs)
        told, opened = "", False
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not chunk:
                break
            told += chunk.decode(errors="replace")
            if not opened and "6 of 8 · 1 failed" in told:
                (place / "gate").touch()
                opened = True
        os.close(ours)
        assert watching.wait(30) == 0
    assert opened, told
    assert "\x1b[3" not in told  # NO_COLOR: the cursor moves, and nothing has a colour
    told = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", told)
    assert re.search(r"▶ score +running +█+×▒?░?  6 of 8 · 1 failed", told)
    assert "score: 6 of 8 done, 1 running." in told
    assert "· end " in told
    assert "✓ end " in told
    assert max(map(len, re.split("[\r\n]+", told.partition("run 0")[0]))) <= 80


# -- logs, narrowed -------------------------------------------------------------------------------------


@pytest.fixture
def ended(write: Write, cli: Cli, place: Path) -> None:
    (place / "gate").touch()
    write("gated.py", GATED)
    assert cli("run gated.py").code == 0


@pytest.mark.usefixtures("ended")
def test_logs_may_be_narrowed_by_path_node_and_level(cli: Cli) -> None:
    def paths(*options: str) -> list[str]:
        return [line["path"] for line in cli("logs", "last", *options, "--json").json]

    assert len(paths()) == 10
    assert paths("score[3]") == ["score[3]", "score[3]"]
    assert len(paths("score")) == 9
    assert paths("end") == paths("--node", "end") == ["end"]
    assert paths("sco") == paths("score[") == []
    assert paths("--level", "warning") == ["score[3]"]
    assert paths("--level", "WARN", "--node", "end") == []
    assert len(paths("--node", "end", "--node", "score")) == 10
    wrong = cli("logs last --level loud")
    assert wrong.code == 2
    assert "debug, info, warning, error, critical" in wrong.error


@pytest.mark.usefixtures("ended")
def test_what_a_node_logged_before_it_failed_is_shown(cli: Cli) -> None:
    """B164: the lines of an attempt that raised are stored and shown."""
    lines = cli("logs last score[3]").out.splitlines()
    assert [re.sub(r"^\S+ \S+ ", "", line) for line in lines] == [
        "info    score[3]: scored x=3",
        "warning score[3]: bad one",
    ]
