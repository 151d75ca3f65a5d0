"""`diff`: what differs between two runs, and an exit code that says whether anything does."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, forget

Write = Callable[[str, str], Path]
PRICES = """
    from dagresume import Context, Workflow
    wf = Workflow("prices", idempotent=True, version="1", secrets=["token"])
    @wf.node
    async def base(n: int, token: str = "t-123456") -> list[int]:
        return list(range(n))
    @wf.node(for_each={"x": "base"})
    async def price(x: int, fee: float, ctx: Context) -> float:
        ctx.usage(cost=fee)
        if x == 3 and fee > 0.15:
            raise ValueError("too dear")
        return round(x * (1 + fee), 3)
    @wf.node(args={"p": "price"})
    async def total(p: list) -> float:
        return sum(p)
"""


@pytest.fixture
def run(write: Write, cli: Cli) -> Callable[..., str]:
    write("prices.py", PRICES)

    def begin(*inputs: str) -> str:
        given = [word for each in inputs for word in ("--input", each)]
        run_id: str = cli("run", "prices.py", *given, "--json").json["run_id"]
        return run_id

    return begin


def test_two_runs_that_did_the_same_are_the_same(run: Callable[..., str], cli: Cli) -> None:
    done = cli("diff", run("n=5", "fee=0.1"), run("n=5", "fee=0.1"))
    assert done.code == 0
    assert "The same: definition, inputs, statuses and outputs." in done.out
    assert cli("diff last last --json").json["same"] is True


def test_inputs_statuses_and_outputs_that_differ_are_named(run: Callable[..., str], cli: Cli) -> None:
    first, second = run("n=5", "fee=0.1"), run("n=5", "fee=0.2")
    done = cli("diff", first, second)
    assert done.code == 1
    assert re.search(r"^fee +0\.1 +0\.2$", done.out, re.MULTILINE)
    assert re.search(r"^price\[3\] +✓ completed +× failed$", done.out, re.MULTILINE)
    assert re.search(r"^total +✓ completed +← upstream_failed$", done.out, re.MULTILINE)
    assert re.search(r"^price\[1\] +1\.1 +1\.2$", done.out, re.MULTILINE)
    assert "price[0]" not in done.out
    assert re.search(r"^cost +0\.5 +1 +× 2$", done.out, re.MULTILINE)
    told = cli("diff", first, second, "--json").json
    assert [change["path"] for change in told["outputs"]] == ["price[1]", "price[2]", "price[4]"]
    assert told["outputs"][0]["values"] == [1.1, 1.2]
    assert told["statuses"][1] == {"path": "price[3]", "statuses": ["completed", "failed"]}
    assert (told["same"], told["definition"]) == (False, [])


def test_definitions_that_differ_are_told_in_words(
    run: Callable[..., str], write: Write, place: Path, cli: Cli
) -> None:
    first = run("n=2", "fee=0.1")
    forget(place)
    write(
        "prices.py",
        PRICES.replace('version="1"', 'version="2"') + "    wf.sleep('rest', 0, depends_on='total')\n",
    )
    second = cli("run prices.py --input n=2 --input fee=0.1 --json").json["run_id"]
    done = cli("diff", first, second)
    assert done.code == 1
    assert "version '1' is now '2'" in done.out
    assert "node rest added" in done.out
    assert re.search(r"^rest +– +✓ completed$", done.out, re.MULTILINE)


def test_secrets_differ_without_being_shown(run: Callable[..., str], cli: Cli) -> None:
    first, second = run("n=1", "fee=0.1", "token=k-987654"), run("n=1", "fee=0.1", "token=k-123987")
    for options in ((), ("--json",)):
        done = cli("diff", first, second, *options)
        assert done.code == 1
        assert "token" in done.out
        assert "***" in done.out
        assert not re.search("987654|123987", done.out)


def test_large_runs_are_compared_in_a_few_lines(run: Callable[..., str], cli: Cli) -> None:
    done = cli("diff", run("n=300", "fee=0.1"), run("n=300", "fee=0.12"))
    assert done.code == 1
    assert len(done.out.splitlines()) < 50
    assert "and 280 more, with --json" in done.out
