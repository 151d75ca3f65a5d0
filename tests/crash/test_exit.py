"""A8, B125: a program that uses an engine ends, however it ends, and leaves the run resumable."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dagresume.testing import autopsy
from tests.crash.conftest import until

FLOW = """
import asyncio, sys
from dagresume import Context, Engine, Workflow, run_sync

wf = Workflow("w", idempotent=True)

@wf.node
async def a() -> int:
    return 1

@wf.node
async def b(a: int) -> int:
    open("begun", "w").close()
    {body}
    return a + 1
"""
ENGINE = """
async def main():
    async with Engine("runs.db") as engine:
        {inside}
    {after}

asyncio.run(main())
"""
RUN = "result = await engine.run(wf, key='k'); assert result['b'] == 2"


def program(folder: Path, text: str, *options: str) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(text, encoding="utf-8")
    command = [sys.executable, *options, "program.py"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str], seconds: float = 5.0) -> tuple[int, str]:
    """Give exit code and what it said on stderr; it must be over soon."""
    try:
        _, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        pytest.fail(f"the program had not ended after {seconds} seconds")
    return process.returncode, said


STRICT = ("-X", "dev", "-W", "error")


def engine(inside: str = "", after: str = "pass") -> str:
    return ENGINE.format(inside=f"{RUN}; {inside}" if inside else RUN, after=after)


SYNC = "assert run_sync(wf, db='runs.db')['b'] == 2"


@pytest.mark.parametrize(
    ("body", "main", "code", "says"),
    [
        pytest.param("pass", engine(), 0, "", id="all is well"),
        pytest.param("pass", SYNC, 0, "", id="run_sync"),
        pytest.param("1 / 0", engine(), 1, "RunFailed", id="a body raises"),
        pytest.param("1 / 0", SYNC, 1, "RunFailed", id="a body raises in run_sync"),
        pytest.param("pass", engine("1 / 0"), 1, "ZeroDivisionError", id="the program raises"),
        pytest.param("pass", engine("sys.exit(7)"), 7, "", id="it exits inside"),
        pytest.param("pass", engine(after="sys.exit(7)"), 7, "", id="it exits behind"),
        pytest.param("sys.exit(7)", engine(), 1, "SystemExit", id="a body exits"),
    ],
)
def test_a_program_that_closes_its_engine_ends_without_a_word(
    tmp_path: Path, body: str, main: str, code: int, says: str
) -> None:
    process = program(tmp_path, FLOW.format(body=body) + main, *STRICT)
    found, said = ended(process, 10.0 if says else 5.0)
    assert found == code, said
    last = "".join(said.splitlines()[-1:])
    assert says in last if says else said == ""
    assert "ResourceWarning" not in said
    assert "never awaited" not in said


FORGOTTEN = """
async def main():
    engine = await Engine("runs.db").__aenter__()
    {rest}

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("rest", "code"),
    [
        pytest.param(RUN, 0, id="it ends"),
        pytest.param("1 / 0", 1, id="it raises"),
        pytest.param("sys.exit(7)", 7, id="it exits"),
        pytest.param("await engine.start(wf)", 0, id="a run is under way"),
    ],
)
def test_a_program_that_forgets_to_close_its_engine_ends(tmp_path: Path, rest: str, code: int) -> None:
    process = program(tmp_path, FLOW.format(body="await asyncio.sleep(0)") + FORGOTTEN.format(rest=rest))
    found, said = ended(process)
    assert found == code, said


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("sync", [True, False])
def test_a_signal_ends_the_program_and_interrupts_the_run(
    tmp_path: Path, signum: signal.Signals, sync: bool
) -> None:
    """Ctrl-C anywhere; SIGTERM in `run_sync` (elsewhere a program that does not handle it is killed)."""
    main = SYNC if sync else engine()
    process = program(tmp_path, FLOW.format(body="await asyncio.sleep(60)") + main)
    until((tmp_path / "begun").exists)
    began = time.monotonic()
    process.send_signal(signum)
    code, said = ended(process)
    assert time.monotonic() - began < 3
    assert code != 0
    state = autopsy(tmp_path / "runs.db")
    assert state.completed == {"a"}
    if signum == signal.SIGINT or sync:
        assert "KeyboardInterrupt" in said
        assert (state.status, state.last["b"][0]) == ("interrupted", "node.interrupted")


WAITS = """
async def main():
    async with Engine("runs.db", grace_seconds=30) as engine:
        await engine.start(wf)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_second_ctrl_c_ends_the_program_in_its_grace(tmp_path: Path) -> None:
    """B127: asyncio lets the first one cancel the main task and the second one end the loop, which cancels
    everything, also the leaving of the engine.
    """
    process = program(tmp_path, FLOW.format(body="await asyncio.sleep(60)") + WAITS)
    until((tmp_path / "begun").exists)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)  # the body has its grace
    process.send_signal(signal.SIGINT)
    code, said = ended(process)
    assert code != 0
    assert "KeyboardInterrupt" in said
    state = autopsy(tmp_path / "runs.db")
    assert state.completed == {"a"}
    assert (state.status, state.last["b"][0]) == ("interrupted", "node.interrupted")


INSIDE = """
async def main():
    run_sync(wf, db="runs.db")

asyncio.run(main())
"""
CELL = """
import signal

async def main():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a notebook
    try:
        run_sync(wf, db="runs.db")
    finally:
        await asyncio.sleep(0)

asyncio.run(main())
"""


@pytest.mark.parametrize("main", [INSIDE, CELL])
def test_ctrl_c_interrupts_run_sync_inside_a_running_loop(tmp_path: Path, main: str) -> None:
    """The run is not left to itself in its thread."""
    process = program(tmp_path, FLOW.format(body="await asyncio.sleep(60)") + main)
    until((tmp_path / "begun").exists)
    process.send_signal(signal.SIGINT)
    code, said = ended(process)
    assert code != 0
    assert "KeyboardInterrupt" in said
    state = autopsy(tmp_path / "runs.db")
    assert (state.status, state.last["b"][0]) == ("interrupted", "node.interrupted")


AFTERWARDS = """
async def main():
    async with Engine("runs.db") as engine:
        await engine.run(wf)
        open("over", "w").close()
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_has_completed_stays_so_whatever_ends_the_program(
    tmp_path: Path, signum: signal.Signals
) -> None:
    """B128: between the commit of its success and the end of the process."""
    process = program(tmp_path, FLOW.format(body="pass") + AFTERWARDS)
    until((tmp_path / "over").exists)
    process.send_signal(signum)
    code, _ = ended(process)
    assert code != 0
    assert autopsy(tmp_path / "runs.db").status == "completed"
