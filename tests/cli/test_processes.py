"""Signals, pipes, and what two processes do to each other: the real program in real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Cli

Write = Callable[[str, str], Path]
Spawn = Callable[..., subprocess.Popen[str]]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")

FLOW = """
    import asyncio, time
    from dagresume import Workflow

    def ready():
        print("ready", flush=True)

    wf = Workflow("wf", idempotent=True)
    @wf.node
    async def first() -> int:
        return 1
    @wf.node
    async def long(first: int) -> int:
        ready()
        await asyncio.sleep(600)
        return 2

    short = Workflow("short", idempotent=True)
    @short.node
    async def paid() -> int:
        ready()
        await asyncio.sleep(0.5)
        return 1
    @short.node
    async def after(paid: int) -> int:
        return paid

    thread = Workflow("thread")
    @thread.node
    def blocked() -> int:
        ready()
        time.sleep(600)
        return 1

    stubborn = Workflow("stubborn")
    @stubborn.node
    async def ignores() -> int:
        ready()
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                pass

    helper = Workflow("helper")
    @helper.node
    async def in_helper() -> int:
        ready()
        await asyncio.to_thread(time.sleep, 600)
        return 1

    loop = Workflow("loop")
    @loop.node
    async def blocks() -> int:
        ready()
        time.sleep(600)
        return 1
"""


@pytest.fixture
def spawn(write: Write) -> Iterator[Spawn]:
    """Start a run in a process of its own and wait until its node says that it runs."""
    write("flow.py", FLOW)
    started: list[subprocess.Popen[str]] = []

    def begin(workflow: str, *words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "dagresume", "run", f"flow.py:{workflow}", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("workflow", "number"),
    [
        ("wf", signal.SIGINT),
        ("wf", signal.SIGTERM),
        ("thread", signal.SIGINT),
        ("stubborn", signal.SIGTERM),
        ("helper", signal.SIGINT),
    ],
)
def test_a_signal_interrupts_the_run_within_seconds_and_exits_130(
    workflow: str, number: signal.Signals, spawn: Spawn, cli: Cli
) -> None:
    process = spawn(workflow)
    began = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert time.monotonic() - began < 12
    assert f"of {workflow}: interrupted (its process was asked to stop)" in out
    assert err.startswith("interrupting: ")
    assert "Traceback" not in err, err
    run = cli("list --json").json[0]
    assert run["status"] == "interrupted"
    command = "resume" if workflow == "wf" else "retry"  # the others are not idempotent
    assert f"\n  dagresume {command} {run['run_id']} --app flow.py:{workflow}\n" in out


def test_what_ends_in_time_after_the_signal_is_kept(spawn: Spawn, cli: Cli) -> None:
    process = spawn("short")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    nodes = {node["path"]: node["status"] for node in cli("show last --json").json["nodes"]}
    assert nodes["paid"] == "completed"
    assert cli("resume last --app flow.py:short --json").json["reused"][0] == "paid"


def test_a_second_signal_ends_the_process_at_once(spawn: Spawn, cli: Cli) -> None:
    process = spawn("stubborn")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("interrupting: ")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert time.monotonic() - began < 2
    assert cli("list --json").json[0]["status"] == "interrupted"  # owner_died


def test_signals_reach_a_process_whose_loop_is_blocked(spawn: Spawn) -> None:
    process = spawn("loop")
    process.send_signal(signal.SIGINT)
    while process.poll() is None:  # signals may be taken together, so one more until it has gone
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    assert process.returncode == 130


def test_a_run_that_is_driven_elsewhere_is_refused_with_4(spawn: Spawn, cli: Cli) -> None:
    process = spawn("wf", "--key", "k")
    for words in ("run flow.py:wf --key k", "resume last --app flow.py", "retry last --app flow.py"):
        done = cli(words)
        assert done.code == 4
        assert f"process {process.pid}" in done.error
        assert "`dagresume cancel " in done.error
    assert f"driven by {os.uname().nodename} (process {process.pid})" in cli("show last").out
    assert cli("list --json").json[0]["status"] == "running"


def test_a_run_can_be_cancelled_from_another_process(spawn: Spawn, cli: Cli) -> None:
    process = spawn("wf")
    done = cli("cancel last --by ann")
    assert done.code == 0
    assert "of wf: cancelled" in done.out
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "of wf: cancelled" in out
    assert "--from NODE" in out


@pytest.mark.parametrize("words", ["list", "show last --json"])
def test_a_reader_that_leaves_is_no_error(words: str, write: Write, cli: Cli) -> None:
    write("flow.py", FLOW)
    assert cli("run flow.py:short").code == 0
    command = [sys.executable, "-m", "dagresume", *words.split()]
    listing = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert listing.stdout is not None
    listing.stdout.close()
    assert listing.stderr is not None
    assert listing.stderr.read() == ""
    listing.stderr.close()
    listing.wait(timeout=30)
