"""Processes to kill: a zygote has imported your code and forks a fresh child for each call (`os.fork`)."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["Child", "Ended", "Zygote", "be_a_zygote", "load", "load_module"]


def load(reference: str) -> Any:
    """Import `package.module:attribute` or `path/file.py:attribute`."""
    module, _, attribute = reference.rpartition(":")
    found: Any = _module(module)
    for name in attribute.split("."):
        found = getattr(found, name)
    return found


def load_module(name: str, file: str) -> Any:
    """Import a module by its name if that leads to this file, else by its file."""
    with contextlib.suppress(ImportError):
        found = importlib.import_module(name)
        if getattr(found, "__file__", None) == file:
            return found
    return _module(file)


def _module(name: str) -> Any:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name).resolve()
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    `signal`: what killed it, 0 if nothing did. `hung`: it did not end in time and was killed.
    `told`: what its function gave; `error`: the traceback of what it raised.
    """

    signal: int = 0
    told: Any = None
    error: str | None = None
    hung: bool = False

    @property
    def killed(self) -> bool:
        return self.signal == signal.SIGKILL and not self.hung


class Child:
    """A process forked from a zygote: `pid`, `kill()`, `wait()`."""

    def __init__(self, zygote: Zygote, number: int, pid: int) -> None:
        self._zygote, self._number, self.pid = zygote, number, pid
        self._ended: Ended | None = None

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send it a signal; SIGKILL unless told otherwise."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signum)

    def wait(self, timeout: float = 30.0) -> Ended:
        """Give how it ended; one that has not ended after `timeout` seconds is killed."""
        if self._ended is None:
            message = self._zygote._hear(self._number, timeout)
            hung = message is None
            if message is None:
                self.kill(signal.SIGUSR1)  # it says on stderr where each of its threads is
                time.sleep(0.1)
                self.kill()
                message = self._zygote._hear(self._number, timeout) or {}
            self._ended = Ended(message.get("signal", 0), message.get("told"), message.get("error"), hung)
        return self._ended


class Zygote:
    """A process that has imported what is needed, has no threads, and forks a child for each call.

    `imports`: references (`package.module:attribute`, `path/file.py:attribute`) or modules to import
    beforehand; a pair is the name of a module and its file. A child costs some milliseconds instead of the
    start of an interpreter. Use it as a context manager, from one thread.
    """

    def __init__(self, *imports: str | tuple[str, str]) -> None:
        if not hasattr(os, "fork"):
            raise RuntimeError("this system has no os.fork: run what kills processes on Linux or macOS")
        program = "from dagresume.zygote import be_a_zygote; be_a_zygote()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._numbers = itertools.count(1)
        self._heard: dict[int, dict[str, Any]] = {}
        self._rest = b""
        self._say({"imports": imports, "path": sys.path})
        ready = self._hear(0, 60.0)
        if ready is None or "error" in ready:
            self.close()
            raise RuntimeError(
                f"a process that imports {', '.join(map(str, imports))} did not get ready: {ready}"
            )

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End it, and its children."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def call(self, function: str, folder: str | os.PathLike[str], /, **arguments: Any) -> Child:
        """Call a function (a reference; plain or async) in a child whose working folder is `folder`.

        The arguments and what it gives must be JSON. The child ends without ceremony when the function
        returns.
        """
        number = next(self._numbers)
        self._say({"call": number, "function": function, "folder": os.fspath(folder), "arguments": arguments})
        born = self._hear(-number, 30.0)
        if born is None:
            raise RuntimeError("the zygote does not answer")
        return Child(self, number, born["pid"])

    def _say(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    def _hear(self, number: int, timeout: float) -> dict[str, Any] | None:
        """Give the message about this call; None if there is none in time."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout
        while number not in self._heard:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._process.stdout], [], [], left)[0]:
                return None
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                return {"error": "the zygote has ended"}
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                self._heard[message.pop("about")] = message
        return self._heard.pop(number)


def be_a_zygote() -> None:
    """Be that process: orders come in on stdin, messages go out where stdout was."""
    out = os.dup(1)
    os.dup2(2, 1)  # what bodies print is no message
    nursery = _Nursery(out)
    with open(0, "rb", buffering=0, closefd=False) as orders:  # a descriptor has no path
        first = json.loads(orders.readline())
        sys.path[:] = first["path"]
        try:
            for reference in first["imports"]:
                _import(reference)
            if threading.active_count() > 1:
                raise RuntimeError(f"the import started threads: {threading.enumerate()[1:]}")
        except BaseException:
            nursery.say(0, error=traceback.format_exc())
            return
        gc.collect()
        gc.freeze()
        nursery.say(0)
        nursery.serve(orders.fileno())


def _import(what: str | list[str]) -> None:
    if isinstance(what, list):
        load_module(*what)
    else:
        load(what) if ":" in what else _module(what)


class _Nursery:
    """The zygote's side: children and the pipes they tell their end by."""

    def __init__(self, out: int) -> None:
        self._out = out
        self._children: dict[int, tuple[int, int, bytearray]] = {}  # pipe: number, pid, what came through it

    def say(self, about: int, **facts: Any) -> None:
        os.write(self._out, json.dumps({"about": about, **facts}).encode() + b"\n")

    def serve(self, orders: int) -> None:
        rest = b""
        while True:
            for pipe in select.select([orders, *self._children], [], [])[0]:
                if pipe != orders:
                    self._listen(pipe)
                    continue
                data = os.read(orders, 1 << 16)
                if not data:
                    self._end()
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._fork(json.loads(line))

    def _fork(self, order: Mapping[str, Any]) -> None:
        pipe, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(self._out)
            os.close(pipe)
            for other in self._children:
                os.close(other)
            _live(told, order)
        os.close(told)
        self._children[pipe] = (order["call"], pid, bytearray())
        self.say(-order["call"], pid=pid)

    def _listen(self, pipe: int) -> None:
        number, pid, heard = self._children[pipe]
        data = os.read(pipe, 1 << 16)
        heard += data
        if data:
            return
        os.close(pipe)
        del self._children[pipe]
        _, status = os.waitpid(pid, 0)
        told = json.loads(heard) if heard else {}
        self.say(number, signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, **told)

    def _end(self) -> None:
        for _, pid, _ in self._children.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _live(told: int, order: Mapping[str, Any]) -> NoReturn:
    """Be a child: do what was asked, tell it, and be gone."""
    try:
        with contextlib.suppress(RuntimeError, ValueError):  # stderr is no file
            faulthandler.register(signal.SIGUSR1)
        os.chdir(order["folder"])
        given = load(order["function"])(**order["arguments"])
        if inspect.isawaitable(given):
            given = asyncio.run(_awaited(given))
        message = {"told": given}
    except BaseException:
        message = {"error": traceback.format_exc()}
    left = memoryview(json.dumps(message).encode())
    while left:
        left = left[os.write(told, left) :]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


async def _awaited(given: Any) -> Any:
    return await given
