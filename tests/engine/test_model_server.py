"""A map of five hundred paid calls against a real server that fails in every way, behind one limit."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from dagresume import Limit, NodeTimeout, Retry, RunStatus, Workflow
from tests.engine.kit import Home

ITEMS, AT_ONCE, PER_SECOND = 500, 50, 2000
FAULTS = {"busy": 0.012, "broken": 0.10, "hangs": 0.03, "truncated": 0.08}  # how often, of all calls
PAUSE, TIMEOUT, ANSWER = 0.25, 1.0, (0.03, 0.09)  # seconds


class Model:
    """Answers `POST /items/<n>`, or fails as the seeded script of that item says; counts in the open."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        names, weights = list(FAULTS), list(FAULTS.values())
        names.append("answers")
        weights.append(1 - sum(weights))
        self.script: list[list[str]] = []
        for _ in range(ITEMS):
            faults: list[str] = []
            while len(faults) < 4 and (drawn := rng.choices(names, weights)[0]) != "answers":
                faults.append(drawn)
            self.script.append(faults)
        self.takes = [rng.uniform(*ANSWER) for _ in range(ITEMS)]
        self.asked = Counter[int]()
        self.inside = self.most = 0

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[int]:
        """Listen on the loopback interface; gives the port."""
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0, backlog=200)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            await server.wait_closed()
            while self.inside:  # noqa: ASYNC110  # connections have no event of their own
                await asyncio.sleep(0.001)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            n = int(head.split(b" ")[1].rpartition(b"/")[2])
            self.asked[n] += 1
            faults = self.script[n]
            what = faults[self.asked[n] - 1] if self.asked[n] <= len(faults) else "answers"
            await asyncio.sleep(self.takes[n])
            await self._do(what, n, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has hung up
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            self.inside -= 1

    async def _do(
        self, what: str, n: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if what == "hangs":
            await reader.read()  # until the client has hung up
            return
        body = f"answer {n}".encode()
        status, more = {"busy": (429, f"Retry-After: {PAUSE}\r\n"), "broken": (500, "")}.get(what, (200, ""))
        promised = len(body) + (10 if what == "truncated" else 0)
        writer.write(f"HTTP/1.1 {status} x\r\nContent-Length: {promised}\r\n{more}\r\n".encode() + body)
        await writer.drain()


class Busy(Exception):
    """429; `retry_after`: seconds the server asks to be left alone for."""

    def __init__(self, retry_after: float) -> None:
        self.retry_after = retry_after
        super().__init__(f"429, come back in {retry_after:g} s")


class Broken(Exception):
    """500."""


async def post(port: int, n: int) -> str:
    """Ask once; a body that ends too early is an error."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"POST /items/{n} HTTP/1.1\r\nHost: model\r\nContent-Length: 0\r\n\r\n".encode())
        head, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        status = int(head.split(" ")[1])
        if status == 429:
            raise Busy(float(headers["retry-after"]))
        if status != 200:
            raise Broken(head)
        return (await reader.readexactly(int(headers["content-length"]))).decode()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize("idempotent", [True, False])
async def test_five_hundred_calls_of_a_failing_model_all_get_their_answer(
    sqlite_home: Home, idempotent: bool
) -> None:
    """B7: calls per item as the server's script says, never more at once, none while it asks for a pause."""
    model = Model(seed=7)
    begun: list[float] = []
    pauses: list[float] = []
    wf = Workflow("model", idempotent=idempotent, retry=Retry(6, delay=0.01, jitter=0, never=()))

    @wf.node(for_each={"n": "items"}, limit="llm", timeout=TIMEOUT)
    async def ask(n: int, port: int) -> str:
        begun.append(time.monotonic())
        try:
            return await post(port, n)
        except Busy:
            pauses.append(time.monotonic())
            raise

    limits = {"llm": Limit(concurrency=AT_ONCE, rate=f"{PER_SECOND}/second")}
    async with model.serve() as port, sqlite_home.engine(limits=limits, concurrency=2 * AT_ONCE) as engine:
        started = time.monotonic()
        result = await engine.run(wf, {"items": list(range(ITEMS)), "port": port})
        took = time.monotonic() - started
    assert result.status is RunStatus.COMPLETED
    assert list(result[ask]) == [f"answer {n}" for n in range(ITEMS)]
    assert model.asked == {n: len(faults) + 1 for n, faults in enumerate(model.script)}
    assert model.most == AT_ONCE
    early = [at - pause for at in begun for pause in pauses if 0 < at - pause < PAUSE - 0.001]
    report(model, took, pauses, early)
    # what has its slot may still begin: tasks of the same turn of the loop, start records being written
    assert [seconds for seconds in early if seconds > 0.05] == []


def report(model: Model, took: float, pauses: list[float], early: list[float]) -> None:
    """Print calls and time beside what could be had at best."""
    calls = sum(model.asked.values())
    kinds = Counter(fault for faults in model.script for fault in faults)
    work = sum(seconds * model.asked[n] for n, seconds in enumerate(model.takes)) + kinds["hangs"] * TIMEOUT
    paused = 0.0
    end = 0.0
    for at in sorted(pauses):
        paused += at + PAUSE - max(at, end)
        end = at + PAUSE
    ideal = max(work / AT_ONCE, calls / PER_SECOND) + paused
    print(
        f"{calls} calls for {ITEMS} items ({calls / ITEMS:.2f} each; {dict(kinds)}),"
        f" at most {model.most} at once; {took:.2f} s, of that {paused:.2f} s paused; at best {ideal:.2f} s;"
        f" {len(early)} calls in a pause"
    )


def test_what_the_engine_raises_for_a_hanging_call_is_retried() -> None:
    """The time limit is an error like others: a node that takes it for final says so with `never=`."""
    assert Retry(2).allows(NodeTimeout("ask[0]", TIMEOUT))
    assert not Retry(2, never=NodeTimeout).allows(NodeTimeout("ask[0]", TIMEOUT))
