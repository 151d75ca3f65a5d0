"""What a mask hides in texts and data, and what it leaves alone (B157)."""

import json
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, quote_plus

import pytest

from dagresume import codec
from dagresume.errors import StoreError
from dagresume.masks import HIDDEN, NO_SECRETS, Mask, without_passwords

SECRET = 'hunter2/ü "x"&é+z\nnext line of it'


def mask(*names: str, **inputs: Any) -> Mask:
    return Mask(names, {name: codec.pack(value) for name, value in inputs.items()})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://u:pw@h/db", "postgresql://u:***@h/db"),
        ("postgres://u:p%40w@h:5432/db?sslmode=require", "postgres://u:***@h:5432/db?sslmode=require"),
        ("postgres://u:p@ss@h/db", "postgres://u:***@h/db"),
        ("postgres://u:p/w#1?@h/db", "postgres://u:***@h/db"),
        ("postgres://u:a:b:c@[::1]:5432/db", "postgres://u:***@[::1]:5432/db"),
        ("redis://:pw@h:6379/0", "redis://:***@h:6379/0"),
        ("mongodb+srv://u:pw@h1,h2/db", "mongodb+srv://u:***@h1,h2/db"),
        ("could not reach 'amqp://u:pw@h//' (3 tries)", "could not reach 'amqp://u:***@h//' (3 tries)"),
        ('{"url":"https://u:pw@h/x"}', '{"url":"https://u:***@h/x"}'),
        ("a://u:one@h b://u:two@h", "a://u:***@h b://u:***@h"),
        ("postgres://h/db?user=u&password=pw&x=1", "postgres://h/db?user=u&password=***&x=1"),
        ("https://h/?api_key=k-1&q=2#top", "https://h/?api_key=***&q=2#top"),
        ("https://h/?access_token=k-1", "https://h/?access_token=***"),
        ("host=h user=u password=pw dbname=d", "host=h user=u password=*** dbname=d"),
        ("connect(password='p w', user='u')", "connect(password=***, user='u')"),
    ],
)
def test_a_password_in_a_url_is_hidden(text: str, shown: str) -> None:
    assert without_passwords(text) == shown
    assert without_passwords(shown) == shown
    assert NO_SECRETS.text(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "http://localhost:8000/a?next=b@c.de",
        "http://h/a:b@c",
        "https://user@h/db",
        "http://[::1]:80/x@y",
        "mail a:b@c",
        "see https://example.org: there it is @ noon",
        "C:\\x://",
        "://:@",
        "",
        "the password is wrong",
    ],
)
def test_what_is_no_password_stays(text: str) -> None:
    assert without_passwords(text) == text


def test_a_long_text_takes_no_long_time() -> None:
    for piece in ("a" * 200_000, "a://" * 50_000, "password=" * 20_000, "?a=" * 60_000, "://u:" * 40_000):
        began = time.perf_counter()
        without_passwords(piece)
        assert time.perf_counter() - began < 5.0, piece[:9]


@pytest.mark.parametrize(
    "form",
    [
        SECRET,
        quote(SECRET),
        quote(SECRET, safe=""),
        quote_plus(SECRET),
        quote(SECRET, safe="").lower(),
        json.dumps(SECRET)[1:-1],
        json.dumps(SECRET, ensure_ascii=False)[1:-1],
        json.dumps(json.dumps(SECRET)),
        repr(SECRET)[1:-1],
        repr({"other": SECRET}),
        "next line of it",
    ],
)
def test_a_value_is_found_in_every_form(form: str) -> None:
    shown = mask("password", password=SECRET).text(f"before {form} after")
    assert "hunter" not in shown
    assert "next" not in shown
    assert shown.startswith("before ")
    assert shown.endswith(" after")


def test_values_are_found_however_deep_and_of_whatever_type() -> None:
    found = mask(
        "token",
        "PIN",
        deep=[{"a": ({"Token": "one-token"},)}, {7: {"token": ["two-token", {"x": b"three-token"}]}}],
        pin=12345678,
        token={"user": "four-token", "on": True, "n": 3, "nothing": None},
    )
    text = "one-token two-token three-token 12345678 four-token True None 3 user"
    assert found.text(text) == "*** *** *** *** *** True None 3 user"


def test_fields_of_a_class_are_keys() -> None:
    @dataclass
    class Login:
        user: str
        password: str

    types = codec.types_of(Login)
    hides = Mask(["password"], {"login": codec.pack(Login("somebody", "hunter22"), types)})
    assert hides.text("somebody: hunter22") == "somebody: ***"


@pytest.mark.parametrize("value", ["abc", True, None, 12345, "12345", 0.5, "true", "null", "", "    "])
def test_what_is_in_half_of_all_texts_is_hidden_by_name_only(value: Any) -> None:
    hides = mask("secret", secret=value)
    assert hides.text(f"abc true null 12345 0.5 {value}     x") == f"abc true null 12345 0.5 {value}     x"
    assert hides.text(f"secret={value!r}") == "secret=***"
    assert hides.value({"secret": value, "list": [{"SECRET": value}]}) == {
        "secret": HIDDEN,
        "list": [{"SECRET": HIDDEN}],
    }


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("api_key=k-1", "api_key=***"),
        ("call(api_key='k 1', n=2)", "call(api_key=***, n=2)"),
        ("{'api_key': 'k 1', 'n': 2}", "{'api_key': ***, 'n': 2}"),
        ('{"API_KEY":"k\\"1","n":2}', '{"API_KEY":***,"n":2}'),
        ("my_api_key=k", "my_api_key=k"),
        ("no api_key was given", "no api_key was given"),
    ],
)
def test_a_value_is_hidden_behind_its_name(text: str, shown: str) -> None:
    assert mask("api_key").text(text) == shown


def test_data_is_hidden_by_value_too() -> None:
    hides = mask("password", password="hunter22", other="plain")
    told = {"url": "x?p=hunter22", "hunter22": ["hunter22", 1, None, True], "n": 2.5, "other": "plain"}
    assert hides.value(told) == {
        "url": "x?p=***",
        HIDDEN: [HIDDEN, 1, None, True],
        "n": 2.5,
        "other": "plain",
    }


def test_a_longer_secret_goes_before_one_that_is_in_it() -> None:
    assert mask("a", "b", a="secret", b="secret-and-more").text("secret-and-more") == HIDDEN


def test_where_inputs_cannot_be_read_nothing_is_shown() -> None:
    def lost() -> dict[str, str]:
        raise StoreError("gone")

    assert Mask(["password"], lost).text("anything") == HIDDEN
    assert Mask(["password"], {"password": "not JSON"}).text("anything") == HIDDEN


def test_nothing_is_looked_for_before_a_text_is_to_be_hidden() -> None:
    asked = []
    hides = Mask(["password"], lambda: asked.append(1) or {"password": '"hunter22"'})  # type: ignore[func-returns-value]
    assert asked == []
    assert hides.text("hunter22") == hides.text("hunter22") == HIDDEN
    assert asked == [1]


def test_ours_errors_hold_no_password() -> None:
    assert str(StoreError("postgresql://u:pw@h/db: refused")) == "postgresql://u:***@h/db: refused"
