"""What is refused in one clear line before it does harm: options, answers, amounts that mean nothing."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from dagresume import Budget, Context, DefinitionError, InputError, RunInterrupted, RunStatus, Value, Workflow
from tests.engine.kit import Home


async def agrees(state: int) -> bool:
    return state >= 3


async def step(state: int) -> int:
    return state + 1


def test_an_async_until_is_refused() -> None:
    """Q: a coroutine is true whatever it says, so the loop would end after its first round."""
    with pytest.raises(DefinitionError, match="until= takes a plain function"):
        Workflow("w").loop("l", step, initial=Value(0), until=agrees, max_iterations=5)


@pytest.mark.filterwarnings("error")
async def test_a_condition_that_gives_something_to_await_fails_its_node(home: Home) -> None:
    wf = Workflow("w", idempotent=True)
    wf.loop("l", step, initial=Value(0), until=lambda state: agrees(state), max_iterations=5)
    wf.node(id="n", when=lambda state: agrees(state))(step)
    result = await home.run(wf, {"state": 1})
    assert (result.status, list(result.executed)) == (RunStatus.FAILED, ["l[0]"])
    for path, option in (("l", "until="), ("n", "when=")):
        assert result.failures[path].message.startswith(f"{option} gave something to await")


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": "60"},
        {"timeout": 0},
        {"budget": 3},
        {"retry": 3},
        {"recovery": 3},
        {"idempotent": "no"},
    ],
    ids=str,
)
def test_options_of_a_workflow_are_looked_at(options: dict[str, Any]) -> None:
    """They were found out when the run had begun, some by never ending."""
    with pytest.raises(DefinitionError, match=f"workflow 'w': {next(iter(options))}="):
        Workflow("w", **options)


@pytest.mark.parametrize(
    "options", [{"timeout": "60"}, {"retry": 3}, {"idempotent": "no"}, {"version": 3}], ids=str
)
def test_options_of_a_node_are_looked_at(options: dict[str, Any]) -> None:
    with pytest.raises(DefinitionError, match=f"node 'step': {next(iter(options))}="):
        Workflow("w").node(**options)(step)


@pytest.mark.parametrize("seconds", [math.inf, 1e300])
def test_a_wait_ends_at_a_time_that_can_be_told(seconds: float) -> None:
    with pytest.raises(DefinitionError, match="leave it out"):
        Workflow("w").approval("ok", prompt="?", timeout=seconds)
    with pytest.raises(DefinitionError, match="leave it out"):
        Workflow("w").wait_for("ok", "event", timeout=seconds)


async def test_usage_is_a_number_from_0(home: Home) -> None:
    """R35: with NaN in the sum no budget would ever be used up."""
    wf = Workflow("w")

    @wf.node
    async def node(ctx: Context) -> str:
        said = []
        for amount in ({"cost": math.nan}, {"tokens_in": -1}, {"tokens_out": "many"}):
            try:
                ctx.usage(**amount)
            except ValueError as error:
                said.append(str(error))
        return "; ".join(said)

    told = (await home.run(wf))["node"]
    assert told == (
        "usage(cost=nan): a number, 0 or more; usage(tokens_in=-1): a number, 0 or more;"
        " usage(tokens_out='many'): a number, 0 or more"
    )


async def test_the_end_of_a_budget_names_the_way_on(home: Home) -> None:
    """B104: a resume with the same budget goes nowhere."""
    wf = Workflow("w", idempotent=True, budget=Budget(cost=1))

    @wf.node
    async def a(ctx: Context) -> int:
        ctx.usage(cost=2)
        return 1

    @wf.node
    async def b(a: int) -> int:
        return a

    async with home.engine() as engine:
        with pytest.raises(RunInterrupted, match=r"budget=Budget\(…\)") as caught:
            await engine.run(wf)
        result = await engine.resume(caught.value.run_id, budget=Budget(cost=5))
    assert result.status == RunStatus.COMPLETED


async def test_resolve_says_one_thing(home: Home) -> None:
    wf = Workflow("w")

    @wf.node(timeout=0.05)
    def slow() -> int:
        time.sleep(0.3)
        return 1

    run_id = (await home.run(wf)).run_id
    async with home.engine(wf) as engine:
        with pytest.raises(InputError, match="say either output="):
            await engine.resolve(run_id, "slow")
        with pytest.raises(InputError, match="say either output="):
            await engine.resolve(run_id, "slow", output=1, failed="no")
        await engine.resolve(run_id, "slow", output=None)
        assert (await engine.resume(run_id))["slow"] is None
