"""A model on the loopback interface that fails in every way a real one does, once for each question."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from typing import Any

import pytest

from dagresume.examples.screening_local import ANSWERS
from dagresume.examples.screening_model import EVALUATE, SCORE, SUGGEST

KEY = "sk-loopback-0123456789abcdef"
TASKS = (SCORE, EVALUATE, SUGGEST)

Fault = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Answers a chat completion, or fails as `server.faults` says."""

    server: LoopbackModel

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fault = self.server.next_fault(self.path, self.headers)
        if fault is not None:
            fault(self)
            return
        question = body["messages"][1]["content"]
        job = question.partition("<job>\n")[2].partition("\n</job>")[0]
        text = question.partition("<document>\n")[2].rpartition("\n</document>")[0]
        task = next(task for task in TASKS if task.instruction in body["messages"][0]["content"])
        self.complete(json.dumps(ANSWERS[task.name](job, text)))
        self.server.answered[task.name] += 1

    def complete(self, content: str) -> None:
        """Answer with this text as the model's."""
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        self.reply(
            200, {"choices": [{"message": {"content": content}, "finish_reason": "stop"}], "usage": usage}
        )

    def reply(
        self, status: int, body: Any, *, headers: dict[str, str] | None = None, missing: int = 0
    ) -> None:
        """Answer; `missing` bytes of the body are promised but never sent."""
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data[: len(data) - missing])

    def log_message(self, *args: Any) -> None:
        """Stay silent: the tests look at what is printed."""


class LoopbackModel(ThreadingHTTPServer):
    """Counts what it was asked (`asked`, by idempotency key) and what it answered (`answered`, by task)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.seen: list[str] = []
        self.faults: Iterator[tuple[Fault, ...]] = cycle([()])
        self.closing = threading.Event()
        self._due: dict[str, Iterator[Fault]] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def next_fault(self, path: str, headers: Any) -> Fault | None:
        """Give what goes wrong with this request; each new key gets the next entry of `faults`."""
        with self._lock:
            key = headers["Idempotency-Key"]
            self.asked[key] += 1
            self.seen.append(f"{path} {headers['Authorization']}")
            return next(self._due.setdefault(key, iter(next(self.faults, ()))), None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stay silent when a client has hung up."""


def busy(handler: Handler) -> None:
    handler.reply(429, {"error": {"message": "slow down"}}, headers={"Retry-After": "1"})


def broken(handler: Handler) -> None:
    handler.reply(
        500, {"error": {"message": f"internal error, request was: {handler.headers['Authorization']}"}}
    )


def hangs(handler: Handler) -> None:
    handler.server.closing.wait()
    handler.close_connection = True


def truncated(handler: Handler) -> None:
    handler.reply(200, {"choices": [{"message": {"content": "{}"}}]}, missing=10)
    handler.close_connection = True


def talks(handler: Handler) -> None:
    handler.complete("Sure! This candidate is great.")


def exaggerates(handler: Handler) -> None:
    handler.complete('{"points": 150, "reason": "wow", "questions": "none", "verdict": "maybe"}')


def forbidden(handler: Handler) -> None:
    handler.reply(401, {"error": {"message": f"Incorrect key: {KEY}", "code": "invalid_api_key"}})


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackModel]:
    """Serve, and point the environment to it."""
    server = LoopbackModel()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    monkeypatch.setenv("OPENAI_TIMEOUT", "0.5")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.closing.set()
    server.shutdown()
    thread.join()
    server.server_close()
