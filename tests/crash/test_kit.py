"""The test kit itself: the clock that is turned, the processes that are forked."""

import asyncio
import os
from pathlib import Path

import pytest

from dagresume import Engine, Workflow
from dagresume.store import MemoryStore
from dagresume.testing import FakeClock, Point, StoreWrapper, Zygote, autopsy, sweep
from tests.crash import flows


async def test_a_fake_clock_stands_still_until_it_is_turned() -> None:
    clock = FakeClock(1_000_000)
    woken: list[str] = []

    async def sleep(seconds: float, name: str) -> None:
        await clock.sleep(seconds)
        woken.append(name)

    async with asyncio.TaskGroup() as tasks:
        for seconds, name in [(20, "late"), (10, "early"), (0, "at once")]:
            tasks.create_task(sleep(seconds, name))
        await asyncio.sleep(0.01)
        assert clock.sleeping == 2
        clock.advance(9.5)
        await asyncio.sleep(0.01)
        assert woken == ["at once"]
        assert (clock.now(), clock.monotonic()) == (10_500_000, 9.5)
        clock.advance(100)
    assert woken == ["at once", "early", "late"]
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)


async def test_a_fake_clock_jumps_by_itself_to_what_is_next() -> None:
    clock = FakeClock(autojump=0.005)
    for _ in range(3):
        await clock.sleep(3600)
    assert clock.monotonic() == 3 * 3600
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(clock.sleep(50))
        tasks.create_task(clock.sleep(70))
    assert clock.monotonic() == 3 * 3600 + 70


async def test_a_cancelled_sleeper_is_forgotten() -> None:
    clock = FakeClock(autojump=0.005)
    sleeper = asyncio.create_task(clock.sleep(1e6))
    await asyncio.sleep(0)
    sleeper.cancel()
    await clock.sleep(5)
    assert clock.monotonic() == 5
    assert clock.sleeping == 0


async def test_an_engine_takes_its_times_from_the_clock() -> None:
    clock = FakeClock(1_000_000)
    wf = Workflow("w")

    @wf.node
    async def a() -> None:
        clock.advance(60)

    async with Engine(clock=clock, store=StoreWrapper(MemoryStore(clock=clock))) as engine:
        result = await engine.run(wf)
        info = await engine.get(result.run_id)
    assert info.nodes["a"].seconds == 60
    assert info.created_at.timestamp() == 1


def test_a_child_tells_what_it_gave_and_what_it_raised(nursery: Zygote, tmp_path: Path) -> None:
    assert nursery.call("os:getcwd", tmp_path).wait().told == str(tmp_path)
    pids = {nursery.call("os:getpid", tmp_path).wait().told for _ in range(3)}
    assert len(pids) == 3
    assert os.getpid() not in pids
    ended = nursery.call("tests.crash.plays:go", tmp_path, flow="no such flow").wait()
    assert "AttributeError" in (ended.error or "")
    assert not ended.killed


def test_a_child_that_hangs_says_where_and_is_killed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Zygote("tests.crash.plays") as zygote:
        ended = zygote.call("tests.crash.plays:stay", tmp_path).wait(timeout=0.3)
    assert ended.hung
    assert not ended.killed
    assert "most recent call first" in capfd.readouterr().err


def test_what_cannot_be_imported_is_said(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise LookupError('broken on purpose')")
    with pytest.raises(RuntimeError, match="broken on purpose"):
        Zygote(f"{tmp_path / 'broken.py'}:wf")


def test_an_autopsy_changes_nothing(nursery: Zygote, tmp_path: Path) -> None:
    assert nursery.call("tests.crash.plays:go", tmp_path, flow="unsafe_a").wait().killed
    files = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    state = autopsy(tmp_path / "runs.db")
    assert (state.status, dict(state.starts), set(state.unknown)) == ("running", {"a": 1}, {"a"})
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == files
    assert autopsy(tmp_path / "none.db").run_id is None


def test_a_sweep_of_a_workflow_in_a_file(tmp_path: Path) -> None:
    """What a user writes: no helper in the workflow, a factory, points of one's own."""
    (tmp_path / "shop.py").write_text(
        "from dagresume import Workflow\n"
        "def shop():\n"
        "    wf = Workflow('shop', idempotent=True)\n"
        "    @wf.node\n"
        "    async def order(item: str) -> str: return item\n"
        "    @wf.node\n"
        "    def ship(order: str) -> str: return order.upper()\n"
        "    return wf\n"
    )
    points = [Point("before commit", 1), Point("after commit", 2), Point("statement", 10_000)]
    found = sweep(f"{tmp_path / 'shop.py'}:shop", {"item": "tea"}, tmp_path / "crashes", points)
    found.check()
    assert found.undisturbed.outputs == {"order": '"tea"', "ship": '"TEA"'}
    assert [case.killed for case in found.cases] == [1, 1, 0]
    assert [str(case) for case in found.cases] == ["before commit 1", "after commit 2", "statement 10000"]
    assert list((tmp_path / "crashes").iterdir()) == []


def test_a_check_of_ones_own_is_heard(tmp_path: Path) -> None:
    def check(folder: Path) -> list[str]:
        return [] if "e 230" in flows.world(folder) else ["the last effect is missing"]

    found = sweep("tests.crash.flows:idempotent", {"start": 5}, tmp_path, [], check=check)
    assert found.undisturbed.violations == ["the last effect is missing"]


SHOP = """
import os
from dagresume import Workflow

late = []

def leave(line):
    handle = os.open("world.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(handle, f"{line}\\n".encode())
    os.close(handle)

def listed(folder):
    file = folder / "world.log"
    return file.read_text().split() if file.exists() else []

def shop(**options):
    wf = Workflow("shop", idempotent=True)

    @wf.node
    async def order(item: str) -> str:
        return item

    @wf.node(**options)
    async def ship(order: str) -> str:
        leave("packed")
        leave("sent")
        return order

    return wf

careful = shop(idempotent=False)

def forgetful():
    wf = Workflow("forgetful")

    @wf.node
    async def note(item: str) -> str:
        late.append(item)  # nothing has left the process yet
        return item

    @wf.node
    async def flush(note: str) -> int:
        for line in late:
            leave(line)
        return len(note)

    return wf
"""


@pytest.mark.parametrize("effects", ["world.log", "shop.py:listed"])
def test_whoever_looks_goes_on_with_what_is_uncertain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, effects: str
) -> None:
    """Also when the process that goes on is killed again, before or after the person's word is durable."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop.py").write_text(SHOP)
    found = sweep(
        f"{tmp_path / 'shop.py'}:careful",
        {"item": "tea"},
        "crashes",
        [Point("before commit", 3)],
        again=[Point("before commit", 3)] if effects == "world.log" else [],
        every=50,
        effects=effects.replace("shop.py", str(tmp_path / "shop.py")),
        processes=1,
    )
    found.check()
    assert found.undisturbed.effects == {"packed": 1, "sent": 1}
    assert found.refused == len(found.cases)
    assert any(case.killed == 2 for case in found.cases) == (effects == "world.log")


def test_an_effect_that_was_lost_is_missed(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    target, crashes = f"{tmp_path / 'shop.py'}:forgetful", tmp_path / "crashes"
    points = [Point("after commit", 2)]
    found = sweep(target, {"item": "tea"}, crashes, points, effects="world.log", processes=1)
    (text,) = found.violations
    assert text.startswith("after commit 2: the effect 'tea' of flush never happened, undisturbed once.")


def test_effects_for_other_processes_are_named_not_given(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a file name, or a reference"):
        sweep("tests.crash.flows:careful", None, tmp_path, effects=flows.world)
