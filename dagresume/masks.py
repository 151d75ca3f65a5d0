"""What is never shown: the values of declared secrets, and passwords in URLs.

A `Mask` is made once for a run, from the names its workflow declares as secret and its packed inputs, and is
asked for every text that is made of the run: failures, log lines, what the commands print. It looks for
values only when it is first asked, so that a run without failures and log lines costs nothing.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, quote_plus

__all__ = ["HIDDEN", "NO_SECRETS", "Mask", "without_passwords"]

HIDDEN: Final = "***"
_SHORTEST: Final = 4
"""Characters of a text that is looked for; a shorter one would be found in half of all words."""
_SHORTEST_NUMBER: Final = 6
_SHORTEST_LINE: Final = 8
_WORDS: Final = frozenset({"true", "false", "none", "null"})

# -- passwords in URLs ----------------------------------------------------------------------------------

_URL: Final = re.compile(r"""(?<![a-zA-Z0-9+.\-])([a-zA-Z][a-zA-Z0-9+.\-]*://)([^\s"'<>`]+)""")
_END_OF_HOST: Final = re.compile(r"[/?#\\]")
_WORD: Final = r"(?:pass(?:word|wd|phrase)?|pwd|secret|token|api[_-]?key|access[_-]?key)"
_PARAMETER: Final = re.compile(rf"([?&;][\w.\-]*?{_WORD}=)([^\s\"'<>`&;#]+)", re.IGNORECASE)
_SETTING: Final = re.compile(
    r"""(?<![?&;\w])(\w*(?:password|passwd|pwd)=)('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s"',;&)]+)""",
    re.IGNORECASE,
)


def without_passwords(text: str) -> str:
    """Give a text in which no URL shows its password (`scheme://user:***@host`, `?password=***`), nor does
    `password=…`.
    """
    if "=" in text:
        text = _SETTING.sub(rf"\1{HIDDEN}", _PARAMETER.sub(rf"\1{HIDDEN}", text))
    return _URL.sub(_url_without_password, text) if "://" in text else text


def _url_without_password(found: re.Match[str]) -> str:
    scheme, rest = found[1], found[2]
    host = rest[: end.start()] if (end := _END_OF_HOST.search(rest)) else rest
    if "@" in host:
        user, at, place = host.rpartition("@")
        behind = rest[len(host) :]
    elif not host.startswith("[") and not _is_port(host.partition(":")[2]) and "@" in rest:
        user, at, place = rest.rpartition("@")  # somebody wrote a password with a slash in it as it is
        behind = ""
    else:
        return found[0]
    name, colon, _ = user.partition(":")
    return f"{scheme}{name}{colon}{HIDDEN if colon else ''}{at}{place}{behind}"


def _is_port(text: str) -> bool:
    return not text or text.isdecimal()


# -- the secrets of one run -----------------------------------------------------------------------------


class Mask:
    """Hides the secrets of one run: what its inputs hold under these names, wherever it turns up.

    `inputs`: the packed inputs by name (see `codec`), or what gives them. Where they cannot be read, nobody
    knows what is secret, and nothing is shown.
    """

    __slots__ = ("_find", "_inputs", "names")

    def __init__(
        self,
        names: Iterable[str] = (),
        inputs: Mapping[str, str] | Callable[[], Mapping[str, str]] | None = None,
    ) -> None:
        self.names = frozenset(name.casefold() for name in names)
        self._inputs = inputs
        self._find: Callable[[str], str] | None = None

    def text(self, text: str) -> str:
        """Give a text without the secrets."""
        if self.names:
            find = self._find
            if find is None:
                find = self._find = self._finder()
            text = find(text)
        return without_passwords(text)

    def value(self, value: Any) -> Any:
        """Give plain data (`codec.plain`) without the secrets: by name where a key is one, else as text."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {
                self.text(key): HIDDEN if self.names and key.casefold() in self.names else self.value(item)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if self.names and isinstance(value, int | float) and not isinstance(value, bool):
            return HIDDEN if self.text(shown := str(value)) != shown else value
        return value

    def _finder(self) -> Callable[[str], str]:
        try:
            packed = self._inputs() if callable(self._inputs) else self._inputs or {}
            values = {text for value in self._values(packed) for text in _forms(value)}
        except Exception:
            return lambda _text: HIDDEN
        named = _named(self.names)
        if not values:
            return named
        longest_first = "|".join(map(re.escape, sorted(values, key=len, reverse=True)))
        found = re.compile(longest_first)
        return lambda text: named(found.sub(HIDDEN, text))

    def _values(self, packed: Mapping[str, str]) -> Iterator[str]:
        """Give the texts of all values under a secret name."""
        quoted = [json.dumps(name)[1:-1] for name in self.names]
        for name, text in packed.items():
            secret = name.casefold() in self.names
            if secret or any(word in text.casefold() for word in quoted):
                yield from _under(json.loads(text), self.names, secret)


NO_SECRETS: Final = Mask()
"""Hides what is never shown of any run: passwords in URLs."""


def _under(tree: Any, names: frozenset[str], secret: bool) -> Iterator[str]:
    """Give the texts of the values in a packed tree that are secret, or lie under a secret name."""
    todo = [(tree, secret)]
    while todo:
        part, secret = todo.pop()
        if isinstance(part, dict) and "$dr" in part:  # one of codec's forms: its name and class are no values
            inside = [part.get("v"), part.get("x")]
            if part["$dr"] == "dict" and isinstance(inside[0], list):
                todo += [(value, secret or _is_name(key, names)) for key, value in inside[0]]
            else:
                todo += [(each, secret) for each in inside]
            if secret and part["$dr"] in {"bytes", "bytearray"}:
                yield from _of_bytes(part.get("v"))
        elif isinstance(part, dict):
            todo += [(value, secret or _is_name(key, names)) for key, value in part.items()]
        elif isinstance(part, list):
            todo += [(each, secret) for each in part]
        elif secret and part is not None:
            yield str(part)


def _is_name(key: Any, names: frozenset[str]) -> bool:
    return isinstance(key, str) and key.casefold() in names


def _of_bytes(packed: Any) -> Iterator[str]:
    try:
        content = base64.b64decode(packed)
    except (binascii.Error, TypeError, ValueError):
        return
    yield repr(content)[2:-1]
    yield content.hex()
    yield content.decode("utf-8", "ignore")


def _forms(value: str) -> Iterator[str]:
    """Give the ways in which a value stands in texts; none if it is too short to tell it from any word."""
    least = _SHORTEST_NUMBER if _is_number(value) else _SHORTEST
    if len(value.strip()) < least or value.casefold() in _WORDS:
        return
    lines = value.splitlines()
    parts = [value, value.strip(), *(line for line in lines if len(line.strip()) >= _SHORTEST_LINE)]
    for part in parts if len(lines) > 1 else parts[:2]:
        if len(part) < _SHORTEST:
            continue
        utf8 = part.encode("utf-8", "backslashreplace")
        in_url = {quote(utf8), quote(utf8, safe=""), quote_plus(utf8)}
        escaped = {json.dumps(part)[1:-1], json.dumps(part, ensure_ascii=False)[1:-1], repr(part)[1:-1]}
        yield part
        yield from in_url
        yield from (re.sub(r"%[0-9A-F]{2}", lambda hex_: hex_[0].lower(), url) for url in in_url)
        yield from escaped
        yield from (json.dumps(text)[1:-1] for text in escaped)
        yield from (repr(text)[1:-1] for text in escaped)
        yield base64.b64encode(utf8).decode()


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _named(names: frozenset[str]) -> Callable[[str], str]:
    """Give what hides the value behind `name=…`, `"name": …` and `'name': …`."""
    any_name = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    value = r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s"',;&)}\]]+)"""
    found = re.compile(
        rf"""((?<!\w)(?:{any_name})=|(["'])(?:{any_name})\2\s*:\s*){value}""", re.IGNORECASE | re.DOTALL
    )
    return lambda text: found.sub(rf"\1{HIDDEN}", text)
