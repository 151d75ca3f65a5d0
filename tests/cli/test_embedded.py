"""The command line inside a program that lives on: a notebook, a thread, a server (B163, B165, B166)."""

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dagresume.cli import main
from tests.cli.conftest import Cli

Write = Callable[[str, str], Path]
FLOW = """
    from dagresume import Workflow
    wf = Workflow("flow")

    @wf.node
    async def a() -> str:
        return "given"

    @wf.node
    def b(a: str) -> str:
        return a
"""
WAITS = """
    import asyncio, os, signal
    from dagresume import Workflow
    wf = Workflow("flow")

    @wf.node
    async def a() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()
"""


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["dagresume", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


async def test_in_a_notebook_it_works(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """B166: a loop is running in this thread."""
    write("flow.py", FLOW)
    handler = signal.getsignal(signal.SIGTERM)
    loop = asyncio.get_running_loop()
    assert call(monkeypatch, "run", "flow.py") == 0
    assert "given" in capsys.readouterr().out
    assert call(monkeypatch, "show", "last") == 0
    assert "completed" in capsys.readouterr().out
    assert call(monkeypatch, "show", "nothing") == 2
    assert "error: no run 'nothing'" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is handler
    assert asyncio.get_running_loop() is loop


async def test_interrupting_a_notebook_interrupts_the_run_and_not_the_kernel(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """B166."""
    write("flow.py", WAITS)
    killed: list[bool] = []
    monkeypatch.setattr("dagresume.cli._leave", lambda: killed.append(True))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # as it is while a cell is executed
    try:
        assert call(monkeypatch, "run", "flow.py") == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert "interrupted" in capsys.readouterr().out
    assert killed == []


def test_in_a_thread_it_works(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write("flow.py", FLOW)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(call(monkeypatch, "run", "flow.py")))
    thread.start()
    thread.join(30)
    assert codes == [0]
    assert "given" in capsys.readouterr().out


def kept() -> tuple[int, int]:
    gc.collect()
    for thread in threading.enumerate():
        if "_connection_worker_thread" in thread.name:
            thread.join(10)
    return len(os.listdir("/proc/self/fd")), threading.active_count()  # noqa: PTH208


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@pytest.mark.parametrize("rounds", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_commands_leave_nothing_open(write: Write, cli: Cli, rounds: int) -> None:
    """B163: reading, failing, refused."""
    write("flow.py", FLOW)
    write("foreign.db", "no database at all" * 100)
    assert cli("run flow.py").code == 0

    def once() -> None:
        assert cli("show last --json").code == 0
        assert cli("list --db foreign.db").code == 2
        assert cli("show nothing").code == 2

    once()
    before = kept()
    for _ in range(rounds):
        once()
    after = kept()
    assert abs(after[0] - before[0]) <= 3
    assert abs(after[1] - before[1]) <= 1
