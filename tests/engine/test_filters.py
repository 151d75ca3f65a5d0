"""What is asked for is a value, never a pattern and never SQL (B151, B160)."""

from __future__ import annotations

from typing import Any

import pytest

from dagresume import DagresumeError, Workflow
from tests.engine.kit import Home

NAMES = (
    "a_b",
    "axb",
    "50%",
    "500",
    "A_B",
    "x\\y",
    "x\\\\y",
    "'; DROP TABLE dagresume_runs; --",
    "* OR 1=1",
    "é",
    "É",
)


def workflow(name: str) -> Workflow:
    wf = Workflow(name)

    @wf.node
    async def a() -> str:
        return name

    return wf


async def test_names_and_keys_match_literally(home: Home) -> None:
    made = {}
    for name in NAMES:
        made[name] = (await home.run(workflow(name), key=name)).run_id
    async with home.engine() as engine:
        for name in NAMES:
            assert [info.run_id for info in await engine.runs(workflow=name)] == [made[name]]
            assert [info.run_id for info in await engine.runs(key=name)] == [made[name]]
        for pattern in ("%", "_", "a%", "a__", "*", "", "A_b", "= 1 OR 1=1 --"):
            assert await engine.runs(workflow=pattern) == []
            assert await engine.runs(key=pattern) == []
        assert len(await engine.runs()) == len(NAMES)


@pytest.mark.parametrize(
    "status", ["= 1 OR 1=1 --", "completed' OR '1'='1", "%", "", "COMPLETED", ["failed", "x"]]
)
async def test_a_status_that_is_none_is_refused_before_anything_is_asked(home: Home, status: Any) -> None:
    await home.run(workflow("w"))
    async with home.engine() as engine:
        with pytest.raises(ValueError, match="a run is one of"):
            await engine.runs(status=status)


@pytest.mark.parametrize("run_id", ["' OR 1=1 --", "%", "../../x", "", "\x00", "a" * 10_000])
async def test_an_id_is_a_value(home: Home, run_id: str) -> None:
    result = await home.run(workflow("w"))
    async with home.engine() as engine:
        with pytest.raises(LookupError):
            await engine.get(run_id)
        with pytest.raises(LookupError):
            await engine.cancel(run_id)
        with pytest.raises(LookupError):
            await engine.runs(before=run_id)
        assert (await engine.get(result.run_id)).status == "completed"


async def test_a_limit_is_a_number(sqlite_home: Home) -> None:
    await sqlite_home.run(workflow("w"))
    async with sqlite_home.engine() as engine:
        with pytest.raises((DagresumeError, TypeError)):
            await engine.runs(limit="1; DROP TABLE dagresume_runs")  # type: ignore[arg-type]
        assert len(await engine.runs()) == 1
