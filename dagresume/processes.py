"""Worker processes of our own: how work gets there, what comes back, how the end of either side is noticed.

A worker is spawned, never forked: the parent has threads and open databases. It runs one piece of work at a
time in its main thread and talks over one pipe; the first byte of a message says what it is: `L` log, `U`
usage, `P` progress, `A` a question, which is answered by an `A` in the order of the questions, and once, at
the end, `D` done or `F` failed. The end of the pipe is the end of the other
side, however it died, so neither outlives the other for long (but native code that keeps the interpreter lock
notices it late). Work is pickled between our own processes; nothing pickled is ever stored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from types import FunctionType, MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dagresume import effects
from dagresume.errors import DagresumeError, DefinitionError, WorkerDied
from dagresume.policy import NodeFailure

if TYPE_CHECKING:
    from dagresume.context import Channel

__all__ = ["RemoteError", "RemoteTraceback", "Worker", "dumps", "opened"]

_GRACE: Final = 1.0  # seconds a worker that was let go may take to leave by itself
_spawn = multiprocessing.get_context("spawn")
_children = threading.Lock()  # multiprocessing keeps its list of children without one


# -- errors ---------------------------------------------------------------------------------------------


class RemoteError(DagresumeError):
    """What a body raised in a worker, as text, since the exception itself cannot travel.

    `.type_name`, `.message`, `.traceback` are the original's.
    """

    def __init__(self, type_name: str, message: str, traceback: str) -> None:
        self.type_name, self.message, self.traceback = type_name, message, traceback
        super().__init__(f"{type_name}: {message}")


class RemoteTraceback(Exception):
    """The `__cause__` of every exception that comes from a worker: what it was there.

    `.type_name`, `.message`, `.traceback`.
    """

    def __init__(self, fault: Fault) -> None:
        self.type_name, self.message, self.traceback = fault.type_name, fault.message, fault.traceback
        super().__init__(f"in the worker process:\n{fault.traceback}")


class Fault(NamedTuple):
    """An exception on its way: facts as text, and pickled if a faithful copy can be made of it."""

    type_name: str
    message: str
    traceback: str
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        """Take down what can be told of an exception, however broken its class is."""
        kind = type(error)
        is_local = kind.__module__ in {"builtins", "__main__", "__mp_main__"}
        name = kind.__qualname__ if is_local else f"{kind.__module__}.{kind.__qualname__}"
        message = _text(error)
        try:
            lines = "".join(traceback.format_exception(kind, error, _users_part(error.__traceback__)))
        except Exception:
            lines = f"{name}: {message}\n"
        return cls(name, message, lines, _pickled(error, message))

    def error(self) -> BaseException:
        """Give the exception itself, or a `RemoteError` in its place."""
        if self.pickled is not None:
            with contextlib.suppress(Exception):  # its class may not be importable on this side
                copy = pickle.loads(self.pickled)
                if isinstance(copy, BaseException):
                    return copy
        return RemoteError(self.type_name, self.message, self.traceback)


def _users_part(tb: TracebackType | None) -> TracebackType | None:
    """Leave out our own frames above the user's code."""
    start = tb
    while start is not None and Path(start.tb_frame.f_code.co_filename).parent == Path(__file__).parent:
        start = start.tb_next
    return start or tb


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return f"<{type(error).__qualname__} whose text cannot be made>"


class _Bare:
    """An exception that is made again without its `__init__`, which may ask for more than `args`."""

    def __init__(self, *what: Any) -> None:
        self.what = what

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_bare, self.what


class _Part:
    """An exception of a group, on its way by itself."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def __reduce__(self) -> tuple[Any, ...]:
        return Fault.error, (self.fault,)


def _make_bare(cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


def _pickled(error: BaseException, message: str) -> bytes | None:
    """Give the first form that comes back as the same class with the same text, else None."""
    for form in _forms(error, message):
        with contextlib.suppress(Exception):
            pickled = pickle.dumps(form, pickle.HIGHEST_PROTOCOL)
            copy = pickle.loads(pickled)
            if type(copy) is type(error) and _text(copy) == message:
                return pickled
    return None


def _forms(error: BaseException, message: str) -> Iterator[Any]:
    if isinstance(error, BaseExceptionGroup):
        parts = [_Part(Fault.of(part)) for part in error.exceptions]
        yield _Bare(type(error), (error.message, parts), vars(error))
    yield error
    state = {name: value for name, value in vars(error).items() if _can_travel(value)}
    yield _Bare(type(error), error.args, state)
    yield _Bare(type(error), (message,), state)


def _can_travel(value: Any) -> bool:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:
        return False
    return True


# -- work on its way ------------------------------------------------------------------------------------


def dumps(channel: Channel | None, fn: Callable[..., Any], *args: Any) -> bytes:
    """Give a call as `Worker.ask` sends it. Where `channel` stands in it, the worker finds its own end of it.

    DefinitionError if a function or class in it cannot be imported by name.
    """
    buffer = io.BytesIO()
    try:
        _Sender(buffer, channel).dump((fn, args))
    except DefinitionError:
        raise
    except Exception as error:
        raise DefinitionError(
            f"this call cannot be sent to a worker process ({type(error).__name__}: {error}). Define the"
            " classes of its arguments and result at the top level, or drop executor='process'."
        ) from error
    return buffer.getvalue()


class _Sender(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, channel: Channel | None) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self._channel = channel

    def reducer_override(self, value: Any) -> Any:
        if type(value) is FunctionType:
            depth = _depth(value)
            return (_undecorated, (value.__module__, value.__qualname__, depth)) if depth else NotImplemented
        if type(value) is MappingProxyType:
            return _read_only, (dict(value),)
        if value is self._channel and value is not None:
            return _channel_here, ()
        if type(value) is NodeFailure and value.exception is not None:
            return dataclasses.replace(value, exception=None).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _depth(fn: FunctionType) -> int:
    """Say how many decorators lie over the function at its name; DefinitionError if it is not to be found."""
    if fn.__module__ == "__main__" and not _main_can_be_imported():
        raise _not_importable(fn, "is defined in an interactive session")
    found: Any = sys.modules.get(fn.__module__)
    for name in fn.__qualname__.split("."):
        found = getattr(found, name, None)
    depth = 0
    while found is not fn:
        if found is None:
            raise _not_importable(fn, _problem(fn))
        found, depth = getattr(found, "__wrapped__", None), depth + 1
    return depth


def _main_can_be_imported() -> bool:
    main = sys.modules["__main__"]
    return bool(getattr(main, "__spec__", None) or getattr(main, "__file__", None))


def _problem(fn: FunctionType) -> str:
    if fn.__name__ == "<lambda>":
        return "is a lambda"
    if "<locals>" in fn.__qualname__:
        return "is defined inside a function"
    return "is not what its module has under that name"


def _not_importable(fn: FunctionType, problem: str) -> DefinitionError:
    return DefinitionError(
        f"executor='process': {fn.__module__}.{fn.__qualname__} {problem}, and a worker process can only"
        " import it by name. Define it with `def` at the top level of a module, or drop executor='process'."
    )


def _read_only(mapping: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(mapping)


def _undecorated(module: str, name: str, depth: int) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    for _ in range(depth):
        found = found.__wrapped__
    return found


# -- in the worker --------------------------------------------------------------------------------------


class _Pipe:
    """The worker's end of a call's channel; mute once the call is answered, whatever threads it left."""

    def __init__(self, conn: Connection) -> None:
        self._conn, self._lock, self._open = conn, threading.Lock(), True
        self._asked: deque[Future[Any]] = deque()

    def log(self, level: str, line: str) -> None:
        self._send(b"L", (level, line))

    def usage(self, usage: Mapping[str, float]) -> None:
        self._send(b"U", (dict(usage),))

    def progress(self, done: float, total: float | None) -> None:
        self._send(b"P", (done, total))

    def save_state(self, state: Any) -> Any:
        return effects.save_state(self.ask, state)

    def once(self, key: str, fn: Callable[..., Any], args: tuple[Any, ...], scope: str) -> Any:
        return effects.once(self.ask, key, fn, args, scope)

    def commit_with(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any]) -> None:
        raise DefinitionError(
            "commit_with has no part in executor='process': the checkpoint is written by the engine. Return"
            " what is to be written, and let a node without executor= write it."
        )

    def ask(self, what: str, *args: Any) -> Future[Any]:
        message = b"A" + pickle.dumps((what, *args))
        question: Future[Any] = Future()
        with self._lock:
            if not self._open:
                raise DagresumeError("this attempt is over; nothing more of it is kept")
            self._asked.append(question)
            self._conn.send_bytes(message)
        return question

    def answered(self, message: bytes) -> None:
        """Take the answer to the oldest question."""
        question, found = self._asked.popleft(), pickle.loads(message[1:])
        if message[:1] == b"D":
            question.set_result(found)
        else:
            question.set_exception(found.error())

    def answer(self, message: bytes) -> None:
        with self._lock:
            self._open = False
            self._conn.send_bytes(message)

    def _send(self, kind: bytes, args: tuple[Any, ...]) -> None:
        message = kind + pickle.dumps(args)
        with self._lock:
            if self._open:
                self._conn.send_bytes(message)


_here: _Pipe | None = None  # of the call that runs in this process


def _channel_here() -> _Pipe:
    assert _here is not None, "unpickled outside of a worker"
    return _here


def _serve(conn: Connection) -> None:
    """Run what comes until the parent hangs up."""
    global _here
    # Ctrl-C and a service manager's stop go to every process, but when a body ends is the engine's word
    usual = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    if hasattr(os, "register_at_fork"):  # a body's own processes are as usual: Pool ends its own by SIGTERM
        os.register_at_fork(after_in_child=lambda: [signal.signal(*one) for one in usual.items()])
    _inherited.add(conn)
    requests: SimpleQueue[bytes | None] = SimpleQueue()
    busy = threading.Event()
    threading.Thread(target=_listen, args=(conn, requests, busy), name="dagresume-pipe", daemon=True).start()
    with contextlib.suppress(OSError):  # the parent has died: what listens notices, and so we end
        conn.send_bytes(b"R")
    while (request := requests.get()) is not None:
        _here = pipe = _Pipe(conn)
        message = _perform(request)
        del request
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        busy.clear()  # before the answer: the next request may come right after it
        pipe.answer(message)
        del message


def _listen(conn: Connection, requests: SimpleQueue[bytes | None], busy: threading.Event) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            request = conn.recv_bytes()
            if request[:1] == b"A":
                _channel_here().answered(request[1:])
                continue
            busy.set()
            requests.put(request)
            del request
    if not busy.is_set():
        requests.put(None)  # the main thread leaves in good order, if it does so soon
        time.sleep(_GRACE)
    os._exit(1)


def _perform(request: bytes) -> bytes:
    try:
        fn, args = _loads(request)
        return b"D" + _answer(fn(*args))
    except BaseException as error:
        return b"F" + pickle.dumps(Fault.of(error), pickle.HIGHEST_PROTOCOL)


def _loads(request: bytes) -> Any:
    try:
        return pickle.loads(request)
    except Exception as error:
        raise DefinitionError(
            f"the worker process cannot load this call ({type(error).__name__}: {error}). It imports"
            " functions and classes by name: their modules must be importable there, and make these names."
        ) from error


def _answer(value: Any) -> bytes:
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise DefinitionError(
            f"the result cannot be sent back from the worker process ({type(error).__name__}: {error})."
            " Return plain data, or drop executor='process'."
        ) from error


# -- in the parent --------------------------------------------------------------------------------------


_inherited: weakref.WeakSet[Connection] = weakref.WeakSet()


def _forget() -> None:
    """Close our ends in a forked child: while it holds one, the other side does not notice our death."""
    for conn in list(_inherited):
        conn.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class Worker:
    """One process and the pipe to it. `ask` and `end` block, for one thread at a time; any may `kill`."""

    def __init__(self) -> None:
        self._conn, theirs = _spawn.Pipe()
        _inherited.add(self._conn)
        self._process = _spawn.Process(target=_serve, args=(theirs,), name="dagresume-worker")
        self._is_ready = self._is_over = False
        self._exitcode: int | None = None
        try:
            with _children:
                self._process.start()
        except BaseException:
            self._conn.close()
            raise
        finally:
            theirs.close()

    def is_alive(self) -> bool:
        """Say whether the process exists."""
        with _children:
            return self._process.is_alive()

    def ask(
        self, path: str, request: bytes, channel: Channel | None, begun: Callable[[], object] | None = None
    ) -> bytes:
        """Give the message that `opened` turns into the result; WorkerDied if the process ended before it.

        `begun` is called when the process is ready and has the request.
        """
        if not self._is_ready:
            self._receive(path)
            self._is_ready = True
        with contextlib.suppress(OSError):  # it died: reading says so
            self._conn.send_bytes(request)
        if begun is not None:
            begun()
        while (message := self._receive(path))[:1] not in {b"D", b"F"}:
            if channel is not None:
                self._heard(channel, message[:1], pickle.loads(memoryview(message)[1:]))
        return message

    def _heard(self, channel: Channel, kind: bytes, args: tuple[Any, ...]) -> None:
        if kind != b"A":
            _pass_on(channel, kind, args)
            return
        try:
            answer = b"AD" + pickle.dumps(channel.ask(*args).result())
        except Exception as error:
            answer = b"AF" + pickle.dumps(Fault.of(error))
        with contextlib.suppress(OSError):  # it died: reading says so
            self._conn.send_bytes(answer)

    def kill(self) -> None:
        """End the process now; whoever waits in `ask` hears of it."""
        with contextlib.suppress(ValueError):  # it was closed meanwhile
            self._process.kill()

    def hang_up(self) -> None:
        """Tell the process to leave."""
        self._conn.close()

    def end(self) -> int | None:
        """Give the exit code once the process is gone; None if it had to be killed because it did not go."""
        if self._is_over:
            return self._exitcode
        self._is_over = True
        self.hang_up()
        went = self._goes()
        self.kill()
        with _children:
            self._process.join()
            self._exitcode = self._process.exitcode if went else None
            with contextlib.suppress(ValueError):  # somebody else's waitpid took it
                self._process.close()
        return self._exitcode

    def _goes(self) -> bool:
        until = time.monotonic() + _GRACE + 0.5
        while time.monotonic() < until:
            # the sentinel tells at once, but not if the body left a child that holds a copy of it
            if wait([self._process.sentinel], 0.05) or not self.is_alive():
                return True
        return False

    def _receive(self, path: str) -> bytes:
        try:
            return self._conn.recv_bytes()
        except (EOFError, OSError):
            pass
        raise WorkerDied(path, self.end(), began=self._is_ready)


def _pass_on(channel: Channel, kind: bytes, args: tuple[Any, ...]) -> None:
    if kind == b"L":
        channel.log(*args)
    elif kind == b"U":
        channel.usage(*args)
    else:
        channel.progress(*args)


def opened(message: bytes) -> Any:
    """Give the result in a message from `Worker.ask`, or raise what the work raised.

    Such an exception has a `told`: `type`, `message` and `traceback` as text, as they were in the worker.
    """
    found = pickle.loads(memoryview(message)[1:])
    if message[:1] == b"D":
        return found
    error: BaseException = found.error()
    told = {"type": found.type_name, "message": found.message, "traceback": found.traceback}
    vars(error).setdefault("told", told)  # not by assignment: its class may be frozen
    raise error from RemoteTraceback(found)
