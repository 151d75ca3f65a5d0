"""B157: declared secrets, and passwords in URLs, are shown nowhere; what is stored is plain."""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from dagresume import Context, DefinitionError, Engine, Retry, RunFailed, RunResult, Workflow, masks
from dagresume.sqlite import SQLiteStore
from tests.engine.kit import Home

PASSWORD = "hunter2/ü&x"
KEY = "k-123456"
DSN = "postgres://u:pw-of-the-dsn@h/db"
SECRETS = (
    PASSWORD,
    quote(PASSWORD),
    quote(PASSWORD, safe=""),
    json.dumps(PASSWORD)[1:-1],
    KEY,
    "pw-of-the-dsn",
)


@dataclass
class Login:
    user: str
    token: str


INPUTS: dict[str, Any] = {
    "password": PASSWORD,
    "nested": [{"api_key": KEY}],
    "login": Login("somebody", "t-987654"),
    "dsn": DSN,
}
EVERY = (*SECRETS, "t-987654")


def assert_hidden(text: str) -> None:
    for secret in EVERY:
        assert secret not in text


class Refused(Exception):
    """What a node fails with: it says everything it knows."""


def leaky(**options: Any) -> Workflow:
    """A workflow whose nodes tell their secrets wherever they can."""
    wf = Workflow("leaky", secrets=("password", "api_key", "token"), idempotent=True, **options)

    def complaint(password: str, nested: list[Any], login: Login, dsn: str) -> Refused:
        return Refused(f"{password} {nested} {login} {quote(password, safe='')} {json.dumps(password)} {dsn}")

    @wf.node
    async def says(password: str, nested: list[Any], login: Login, dsn: str, ctx: Context) -> str:
        ctx.log.warning(
            " ".join(("trying", password)), nested=nested, login=login, url=f"https://h/?q={quote(password)}"
        )
        ctx.log.info(dsn)
        return f"{password} {nested}"

    @wf.node
    def threaded(password: str, ctx: Context) -> str:
        ctx.log.error(" ".join(("from a thread", password)))
        return password

    @wf.node(retry=Retry(2, delay=0))
    async def fails(password: str, nested: list[Any], login: Login, dsn: str) -> None:
        try:
            raise ValueError(nested[0]["api_key"])
        except ValueError as error:
            raise complaint(password, nested, login, dsn) from error

    @wf.node(for_each={"n": "nested"}, tolerate=1)
    async def item(n: dict[str, str], password: str) -> None:
        raise Refused(password + n["api_key"])

    @wf.node(when=lambda password: {}[password])
    async def asks(password: str) -> None: ...

    inner = Workflow("inner", idempotent=True)

    @inner.node
    async def deep(password: str) -> None:
        raise Refused(password)

    wf.subworkflow("inner", inner)

    @wf.loop("rounds", initial="password", until=lambda state: {}[state], max_iterations=2)
    async def rounds(state: str) -> str:
        return state

    return wf


async def shown_of(home: Home, result: RunResult) -> str:
    """Everything that anybody gets to see of a run beside its outputs."""
    async with home.engine() as engine:
        info = await engine.get(result.run_id)
        events = [event async for event in engine.events(result.run_id)]
        lines = await engine.logs(result.run_id)
        explained = [str(await engine.explain(result.run_id, node)) for node in info.nodes if "[" not in node]
        rows = await engine.runs()
    return "\n".join(map(repr, [result, info, info.nodes, info.failures, events, lines, explained, rows]))


async def test_secrets_are_in_nothing_that_is_shown(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "dagresume")
    result = await home.run(leaky(), INPUTS)
    assert set(result.failures) == {"fails", "asks", "inner/deep", "rounds"}
    shown = await shown_of(home, result)
    assert_hidden(shown)
    assert_hidden(caplog.text)
    for failure in result.failures.values():
        assert_hidden(failure.message + failure.traceback)
        assert "***" in failure.message + failure.traceback
    assert "trying ***" in caplog.text
    assert "from a thread ***" in shown
    assert "postgres://u:***@h/db" in shown
    assert result["says"] == f"{PASSWORD} {INPUTS['nested']}"  # outputs are what they are


async def test_the_live_exception_stays_the_users(home: Home) -> None:
    async with home.engine() as engine:
        with pytest.raises(RunFailed) as caught:
            await engine.run(leaky(), INPUTS)
    assert_hidden(str(caught.value) + repr(caught.value))
    assert PASSWORD in str(caught.value.__cause__)


async def test_in_another_process_they_are_as_secret(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    """A resume reads its inputs from the store, also where they lie in a blob."""
    first = await home.run(leaky(), INPUTS)
    result = await home.resume(leaky(), first.run_id)
    assert result.executed
    assert_hidden(await shown_of(home, result))
    assert_hidden(caplog.text)


async def test_in_a_fork_they_are_as_secret(home: Home) -> None:
    first = await home.run(leaky(), INPUTS)
    async with home.engine(leaky()) as engine:
        fork = await engine.fork(
            first.run_id, "fails", inputs={"password": "another-one"}, raise_on_failure=False
        )
    shown = await shown_of(home, fork)
    assert_hidden(shown)
    assert "another-one" not in shown


async def test_inputs_in_a_blob_are_read_when_something_is_to_be_hidden(sqlite_home: Home) -> None:
    wf = Workflow("big", secrets=["token"], idempotent=True)

    @wf.node
    async def a(token: str) -> None:
        raise Refused(token)

    token = "secret" * 20_000
    async with sqlite_home.engine() as engine:
        first = await engine.run(wf, {"token": token}, raise_on_failure=False)
    async with sqlite_home.engine(wf) as engine:
        result = await engine.resume(first.run_id, raise_on_failure=False)
        assert result.failures["a"].message == "***"
        stored = await engine.result(first.run_id)
        assert stored.mask.text(f"a {token} b") == "a *** b"


async def test_failing_undos_show_nothing(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    wf = Workflow("undo", secrets=["password"])

    async def undo(output: str, ctx: Context) -> None:
        ctx.log.info(" ".join(("undoing", output)))
        raise Refused(output)

    @wf.node(compensate=undo)
    async def a(password: str) -> str:
        return password

    first = await home.run(wf, {"password": PASSWORD})
    async with home.engine(wf) as engine:
        result = await engine.rollback(first.run_id)
    assert result.failures["a"].message == "***"
    shown = await shown_of(home, result)
    assert_hidden(shown + caplog.text)
    assert "undoing ***" in shown


async def test_undoing_by_itself_shows_nothing_either(home: Home) -> None:
    wf = Workflow("undo", secrets=["password"], on_failure="rollback")

    async def undo(output: str) -> None:
        raise Refused(output)

    @wf.node(compensate=undo)
    async def a(password: str) -> str:
        return password

    @wf.node
    async def b(a: str) -> None:
        raise Refused(a)

    result = await home.run(wf, {"password": PASSWORD})
    assert set(result.failures) == {"a", "b"}
    assert_hidden(await shown_of(home, result))


def in_a_process(password: str, ctx: Context) -> None:
    """The body of a node."""
    ctx.log.warning(" ".join(("elsewhere", password)))
    raise Refused(password)


async def test_from_another_process_nothing_is_shown_either(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    wf = Workflow("process", secrets=["password"])
    wf.node(id="a", executor="process")(in_a_process)
    result = await home.run(wf, {"password": PASSWORD})
    assert result.failures["a"].message == "***"
    shown = await shown_of(home, result)
    assert_hidden(shown + caplog.text)
    assert "elsewhere ***" in shown


async def test_what_people_say_is_masked_too(home: Home) -> None:
    wf = Workflow("asks", secrets=["password"])

    @wf.node
    async def a(password: str) -> str:
        return "ok"

    wf.approval("ok", depends_on=["a"], prompt="?")
    wf.approval("not", depends_on=["a"], prompt="?")
    first = await home.run(wf, {"password": PASSWORD})
    async with home.engine() as engine:
        await engine.decide(first.run_id, "ok", comment=f"use {PASSWORD}")
        await engine.decide(first.run_id, "not", approve=False, comment=f"not with {PASSWORD}")
    result = await home.resume(wf, first.run_id)
    assert result["ok"]["comment"] == "use ***"
    assert "***" in result.failures["not"].message
    assert_hidden(await shown_of(home, result))


async def test_a_person_who_resolves_shows_nothing(home: Home) -> None:
    wf = Workflow("uncertain", secrets=["password"])

    async def unknown(ctx: Context) -> None:
        raise Refused("nobody knows")

    @wf.node(executor="thread", timeout=0.05)
    def a(password: str) -> None:
        released.wait(20)

    released = threading.Event()
    try:
        first = await home.run(wf, {"password": PASSWORD})
    finally:
        released.set()
    async with home.engine(wf) as engine:
        await engine.resolve(first.run_id, "a", failed=f"it used {PASSWORD}")
        result = await engine.resume(first.run_id, raise_on_failure=False)
    assert result.failures["a"].message == "it used ***"
    assert_hidden(await shown_of(home, result))


async def test_no_digest_tells_whoever_guesses(home: Home) -> None:
    result = await home.run(leaky(), INPUTS)
    [created] = [event for event in await home.events(result.run_id) if event.kind == "run.created"]
    assert set(created.data["inputs"].values()) == {"***"}


async def test_what_is_stored_is_plain(sqlite_home: Home) -> None:
    """It has to be: a resume needs it. The file is for its owner alone."""
    result = await sqlite_home.run(leaky(), INPUTS)
    assert sqlite_home.path is not None
    connection = sqlite3.connect(sqlite_home.path)
    [(inputs,)] = connection.execute("SELECT inputs FROM dagresume_runs").fetchall()
    texts = connection.execute("SELECT coalesce(data, '') FROM dagresume_events").fetchall()
    texts += connection.execute("SELECT line FROM dagresume_logs").fetchall()
    connection.close()
    assert json.loads(inputs)["password"] == PASSWORD
    assert result["threaded"] == PASSWORD
    assert len(texts) > 10
    for (text,) in texts:
        assert_hidden(text)


async def test_a_name_that_is_added_makes_no_run_refuse(home: Home, calls: Any) -> None:
    def flow(*secrets: str) -> Workflow:
        wf = Workflow("grows", secrets=secrets, idempotent=True)

        @wf.node
        async def a(password: str) -> str:
            return "a"

        @wf.node
        async def b(a: str, password: str) -> None:
            raise Refused(password)

        return wf

    first = await home.run(flow(), {"password": PASSWORD})
    assert first.failures["b"].message == PASSWORD  # nobody had said that it is secret
    second = await home.resume(flow("password"), first.run_id)
    assert second.executed == ["b"]
    assert second.failures["b"].message == "***"
    third = await home.resume(flow(), first.run_id)
    assert third.failures["b"].message == "***"  # what was secret once stays so for this run


async def test_secrets_of_inner_workflows_count(home: Home) -> None:
    inner = Workflow("inner", secrets=["token"])

    @inner.node
    async def a(token: str) -> None:
        raise Refused(token)

    outer = Workflow("outer")
    outer.subworkflow("inner", inner, args={"token": "token"})
    result = await home.run(outer, {"token": "t-987654"})
    [failure] = [f for f in result.failures.values() if f.message]
    assert failure.message == "***"


def test_one_text_is_not_taken_for_a_list_of_letters() -> None:
    with pytest.raises(DefinitionError, match="tuple"):
        Workflow("w", secrets="password")


async def test_a_url_with_a_password_is_shown_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Named(SQLiteStore):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            self.name = DSN

    engine = Engine(store=Named(tmp_path / "runs.db"))
    assert repr(engine) == "Engine('postgres://u:***@h/db', closed)"
    async with engine:
        with pytest.raises(LookupError, match=r"u:\*\*\*@h"):
            await engine.get("0" * 32)
    with pytest.raises(Exception, match="postgresql") as caught:
        Engine("postgresql://u:pw-of-the-dsn@h/db")
    assert_hidden(str(caught.value))


async def test_without_secrets_nothing_is_masked_but_urls(home: Home) -> None:
    wf = Workflow("open")

    @wf.node
    async def a(password: str) -> None:
        raise Refused(f"{password} {DSN}")

    result = await home.run(wf, {"password": PASSWORD})
    assert result.failures["a"].message == f"{PASSWORD} postgres://u:***@h/db"


async def test_a_run_that_shows_nothing_never_looks_for_secrets(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cost for each node: neither values nor patterns are made before a text is to be hidden."""
    asked: list[object] = []

    def noted(*what: object) -> list[str]:
        asked.append(what)
        return []

    monkeypatch.setattr(masks, "_under", noted)
    wf = Workflow("quiet", secrets=["password"])

    @wf.node
    async def a(password: str) -> str:
        return password

    assert (await home.run(wf, {"password": PASSWORD}))["a"] == PASSWORD
    assert asked == []
