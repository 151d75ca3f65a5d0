"""SIGINT and SIGTERM to the real program while it has a lot to do."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Cli

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")

FLOW = """
    import asyncio, atexit, os, time
    from dagresume import Context, Workflow

    def note(word, name="effects.txt"):
        file = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(file, f"{word} {time.monotonic():.4f}\\n".encode())
        os.close(file)

    def add(wf, count):
        @wf.node(idempotent=True)
        async def numbers() -> list[int]:
            return list(range(count))

    many = Workflow("many", idempotent=True)
    add(many, 50)
    @many.node(for_each={"n": "numbers"}, concurrency=50)
    async def long(n: int, ctx: Context) -> int:
        note(f"begun {ctx.path}")
        await asyncio.sleep(600 if n % 2 else 1.0)
        note(f"ended {ctx.path}")
        return n
    @many.node
    async def after(long: list[int]) -> int:
        note("begun after")
        return len(long)

    stubborn = Workflow("stubborn", idempotent=True)
    add(stubborn, 50)
    @stubborn.node(for_each={"n": "numbers"}, concurrency=50)
    async def ignores(n: int, ctx: Context) -> int:
        note(f"begun {ctx.path}")
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                pass

    def tiny(idempotent):
        wf = Workflow("tiny", idempotent=idempotent)
        add(wf, 2000)
        @wf.node(for_each={"n": "numbers"})
        async def each(n: int, ctx: Context) -> int:
            note(f"begun {ctx.path}")
            if str(n) == os.environ.get("SIGNAL_AT"):
                note("sent signal")
                os.kill(os.getpid(), int(os.environ["SIGNAL"]))
            await asyncio.sleep(0)
            note(f"ended {ctx.path}")
            return n
        @wf.node
        async def total(each: list[int]) -> int:
            return sum(each)
        return wf

    safe, unsafe = tiny(True), tiny(False)

    quick = Workflow("quick", idempotent=True)
    @quick.node
    async def once() -> int:
        atexit.register(linger)
        return 1
    def linger():
        note("begun exiting")
        time.sleep(600)
"""

Spawn = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def spawn(write: Callable[[str, str], Path]) -> Iterator[Spawn]:
    """Run a workflow of `FLOW` in a process of its own."""
    write("flow.py", FLOW)
    started: list[subprocess.Popen[str]] = []

    def begin(workflow: str, **variables: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "dagresume", "run", f"flow.py:{workflow}", "--synchronous", "normal"]
        started.append(
            subprocess.Popen(
                command, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def effects(word: str, place: Path) -> list[tuple[str, float]]:
    """Give what was noted with this word: path, when."""
    file = place / "effects.txt"
    lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    return [(path, float(at)) for *said, path, at in lines if said == [word]]


def wait_for(count: int, place: Path) -> None:
    """Wait until so many bodies have begun."""
    deadline = time.monotonic() + 30
    while len(effects("begun", place)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def completed(place: Path) -> Counter[str]:
    """Count the completions of each path."""
    with contextlib.closing(sqlite3.connect(place / "dagresume.db")) as conn:
        return Counter(
            p for (p,) in conn.execute("SELECT path FROM dagresume_events WHERE status = 'success'")
        )


def ended(process: subprocess.Popen[str], signum: signal.Signals, within: float) -> float:
    """Send a signal, wait for the end; gives when it was sent (the latest moment it can have come)."""
    process.send_signal(signum)
    sent = time.monotonic()
    process.communicate(timeout=30)
    assert time.monotonic() - sent < within
    assert process.returncode == 130
    return sent


@pytest.mark.parametrize("signum", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_fifty_bodies_get_their_grace(spawn: Spawn, cli: Cli, place: Path, signum: signal.Signals) -> None:
    """B127, B130: those that return in time are kept, the others are cut off, nothing else begins."""
    process = spawn("many")
    wait_for(50, place)
    ended(process, signum, 3.0 + 3.0)
    kept = {path for path, _ in effects("ended", place)}
    assert kept == {f"long[{n}]" for n in range(0, 50, 2)}
    assert completed(place) == dict.fromkeys(kept | {"numbers"}, 1)
    shown = cli("show last --json").json
    assert shown["status"] == "interrupted"
    assert len(effects("begun", place)) == 50


def test_a_second_signal_ends_fifty_stubborn_bodies_at_once(spawn: Spawn, cli: Cli, place: Path) -> None:
    process = spawn("stubborn")
    wait_for(50, place)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("interrupting: ")
    ended(process, signal.SIGTERM, 1.5)
    assert cli("list --json").json[0]["status"] == "interrupted"


def interrupt_tiny(spawn: Spawn, place: Path, flow: str, at: int, signum: signal.Signals) -> float:
    """Let the signal come as this item begins; gives how long afterwards the last body began."""
    process = spawn(flow, SIGNAL_AT=str(at), SIGNAL=str(int(signum)))
    process.communicate(timeout=30)
    assert process.returncode == 130
    ((_, sent),) = effects("sent", place)
    kept = {path for path, _ in effects("ended", place)}
    assert at // 2 < len(kept) < 2000
    done = completed(place)
    del done["numbers"]
    assert done == dict.fromkeys(kept, 1), "what returned is not what is kept"
    return max(moment for _, moment in effects("begun", place)) - sent


def finish_tiny(cli: Cli, place: Path, flow: str) -> None:
    """Let it go on: each body returns once, over both processes."""
    done = cli(f"retry last --yes --app flow.py:{flow} --synchronous normal --json")
    assert done.code == 0, done.err
    assert done.json["outputs"]["total"] == sum(range(2000))
    assert Counter(path for path, _ in effects("ended", place)) == {f"each[{n}]": 1 for n in range(2000)}
    assert set(completed(place).values()) == {1}


def test_thousands_of_tiny_bodies_stop_at_a_signal(spawn: Spawn, cli: Cli, place: Path) -> None:
    """B130, C5."""
    assert interrupt_tiny(spawn, place, "unsafe", 700, signal.SIGTERM) < 0.25
    assert cli("show last --json").json["status"] == "interrupted"
    finish_tiny(cli, place, "unsafe")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("flow", ["safe", "unsafe"])
def test_a_signal_may_come_at_any_moment_under_load(spawn: Spawn, cli: Cli, place: Path, flow: str) -> None:
    rng = random.Random(flow)
    lags = []
    for n in range(20):
        signum = [signal.SIGINT, signal.SIGTERM][n % 2]
        lags.append(interrupt_tiny(spawn, place, flow, rng.randint(0, 1500), signum))
        finish_tiny(cli, place, flow)
        for file in [*place.glob("dagresume.db*"), place / "effects.txt"]:
            file.unlink()
    print(f"\n{flow}: 20 signals, the last body began at most {1000 * max(lags):.0f} ms after one")


def test_a_signal_after_the_end_of_the_run_changes_nothing(spawn: Spawn, cli: Cli, place: Path) -> None:
    """B128: between the commit of the success and the end of the process."""
    process = spawn("quick")
    wait_for(1, place)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=5)
    assert cli("show last --json").json["status"] == "completed"
