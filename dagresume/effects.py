"""What a body asks to be kept while it runs, seen from the body: on the loop, in a thread, in a process.

A request goes through the channel and a future brings the answer. Where an event loop runs, the caller gets
something to await; elsewhere the call blocks and gives the value itself.
"""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

import anyio.lowlevel

from dagresume import codec
from dagresume.errors import OutputNotSerializable
from dagresume.steady import to_its_end

__all__ = ["SCOPES", "Ask", "Statement", "once", "save_state", "statement"]

Ask = Callable[..., "Future[Any]"]
"""Sends a request (its name and arguments) to the engine; from any thread."""
Steps = Generator[tuple[str, Any], Any, Any]
"""Gives what is to be waited for, one after the other and how, and returns the result."""
LEAVE: Final = "leave"  # an answer that a cancelled body need not wait for
STAY: Final = "stay"  # one that it waits for: what the engine writes it writes to the end
CALL: Final = "call"  # the user's own awaitable
Statement = tuple[str, Sequence[Any] | Mapping[str, Any]]
SCOPES: Final = ("run", "workflow")


def save_state(ask: Ask, state: Any) -> Any:
    """Have the engine keep `state` for the next attempt."""
    return _carried_out(_saving(ask, state))


def once(ask: Ask, key: str, fn: Callable[..., Any], args: tuple[Any, ...], scope: str) -> Any:
    """Give what `fn(*args)` gives, or gave when it was called for this key before."""
    if not isinstance(key, str) or not key:
        raise ValueError(f"once({key!r}, …): the key is a string that names the call, and not empty")
    if scope not in SCOPES:
        raise ValueError(f"once({key!r}, …, scope={scope!r}): 'run' or 'workflow'")
    if not callable(fn):
        raise TypeError(
            f"once({key!r}, …): give the function and its arguments, once(key, fn, *args), not the result of"
            f" calling it ({type(fn).__name__})"
        )
    key.encode()
    return _carried_out(_calling(ask, key, fn, args, scope))


def statement(sql: str, parameters: Sequence[Any] | Mapping[str, Any]) -> Statement:
    """Give a statement as it is now, whatever becomes of the list of its parameters."""
    if not isinstance(sql, str):
        raise TypeError(f"commit_with takes one SQL statement as a string, not {type(sql).__name__}")
    return sql, dict(parameters) if isinstance(parameters, Mapping) else tuple(parameters)


def _saving(ask: Ask, state: Any) -> Steps:
    yield STAY, ask("save_state", _packed(state, codec.EMPTY, "ctx.state"))


def _calling(ask: Ask, key: str, fn: Callable[..., Any], args: tuple[Any, ...], scope: str) -> Steps:
    types = _types(fn)
    state, text = yield from _marking(ask, key, scope)
    if state == "done":
        return codec.unpack(text, types)
    try:
        value = fn(*args)
        if inspect.isawaitable(value):
            value = yield CALL, value
    except Exception:  # it is known to have failed; if it was cut off, nobody knows, and the mark stays
        yield STAY, ask("take_back", scope, key)
        raise
    text = _packed(value, types, f"once({key!r})")
    yield STAY, ask("keep", scope, key, text)
    return codec.unpack(text, types)


def _marking(ask: Ask, key: str, scope: str) -> Generator[Any, Any, tuple[str, str]]:
    """Give the state of the call: done, with its packed result, or started: this body is to make it."""
    while True:
        yield LEAVE, ask("wait", scope, key)
        mark = ask("begin", scope, key)
        try:
            state, text = yield STAY, mark
        except asyncio.CancelledError:
            if mark.exception() is None and mark.result()[0] == "started":
                yield STAY, ask("take_back", scope, key)  # it was never made
            raise
        if state != "busy":  # somebody else came between
            return state, text


def _packed(value: Any, types: codec.Types, what: str) -> str:
    try:
        return codec.pack(value, types)
    except OutputNotSerializable as error:
        place = f"{what}{error.place[1:]}"
        raise OutputNotSerializable(None, place, error.type_name, error.reason) from None


def _types(fn: Callable[..., Any]) -> codec.Types:
    """Give the classes that a function says its result may hold."""
    try:
        return codec.types_of(typing.get_type_hints(fn).get("return"))
    except Exception:  # it has no annotations that mean something here
        return codec.EMPTY


# -- waiting where there is a loop, and where there is none ---------------------------------------------


def _carried_out(steps: Steps) -> Any:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _blocking(steps)
    return _awaiting(steps)


async def _awaiting(steps: Steps) -> Any:
    try:
        how, wish = next(steps)
        while True:
            try:
                if how == CALL:
                    got = await wish
                elif how == LEAVE:
                    got = await asyncio.wrap_future(wish)
                else:
                    got = await to_its_end(asyncio.wrap_future(wish))
                    await anyio.lowlevel.checkpoint_if_cancelled()
            except BaseException as error:
                how, wish = steps.throw(error)
            else:
                how, wish = steps.send(got)
    except StopIteration as end:
        return end.value


def _blocking(steps: Steps) -> Any:
    try:
        how, wish = next(steps)
        while True:
            try:
                got = asyncio.run(_awaited(wish)) if how == CALL else wish.result()
            except BaseException as error:
                how, wish = steps.throw(error)
            else:
                how, wish = steps.send(got)
    except StopIteration as end:
        return end.value


async def _awaited(work: Awaitable[Any]) -> Any:
    return await work
