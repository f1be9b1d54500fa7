"""The most that a request may cost, by its body: whatever the body is."""

from __future__ import annotations

import io
import json
import random
from typing import Any

import pytest

from quota.errors import ConfigError
from quota.terms.api import NO_BODY, RequestBody, Reserve
from support.books import parse_book

CHAT = Reserve(4_096, (("max_tokens",),), 3)

BOOK = """
api = "model"
source = "https://model.example/limits"
read_on = 2026-11-21
[buckets.tokens]
quota = 1_000_000
resets = "1m"
[buckets.requests]
quota = 1_000
resets = "1m"
[default]
get = 1
other = 5
[methods]
chat = {chat}
"""


def body(data: Any) -> RequestBody:
    return RequestBody(data if isinstance(data, bytes) else json.dumps(data).encode())


def test_the_bound_is_the_number_in_the_request_and_a_unit_for_some_bytes_rounded_up() -> None:
    assert RequestBody.of(memoryview(b'{"max_tokens": 100}')) == body({"max_tokens": 100})
    file = io.BytesIO(b"x" * 40)
    file.seek(10)
    assert [RequestBody.of(each) for each in (file, [b"x" * 10, bytearray(20)])] == [RequestBody(None, 30)] * 2
    assert CHAT.bound(body({"max_tokens": 100})) == 100 + 7  # 19 bytes
    assert CHAT.bound(body({"max_tokens": 100, "x": ""})) == 100 + 10  # 28 bytes
    assert Reserve(4_096, (("a", "0", "b/c"),)).bound(body({"a": [{"b/c": 7}]})) == 7
    assert Reserve(50).bound(body({"max_tokens": 100})) == 50
    for text in (b"\xff", "ü".encode("latin-1"), b"\xed\xa0\x80", b"a\nb\t\0"):  # which only some servers read
        for name in (b"max_tokens", b"Max_Tokens"):
            twice = b'{"%b": 9000, "x": "%b", "max_tokens": 1}' % (name, text)
            assert Reserve(10, (("max_tokens",),)).bound(RequestBody(twice)) == 9_000
    for text in (b'{"Max_Tokens": 1}', b'{"max_tokens": 1, "max_tokens": null}'):  # in which some servers read none
        assert Reserve(10, (("max_tokens",),)).bound(RequestBody(text)) == 10
    unread: list[int] = []
    bounds = [Reserve(50, (), 10).bound(RequestBody(each), lambda: unread.append(1)) for each in (b"x" * 101, None)]
    assert (bounds, unread) == ([61, 50], [1])


@pytest.mark.parametrize(
    ("number", "bound"),
    [
        *[(0, 1), (1, 1), (2.0, 2), (2.1, 3), (10**9, 10**9), (10**30, 10**30), (1e300, int(1e300)), ("64", 64)],
        # What is no number from 0 on is the default, and a line says so.
        *((odd, 4_096) for odd in (-1, -0.5, "-7", "7 a", True, False, None, [], {}, [7], float("nan"), float("inf"))),
    ],
)
def test_a_number_from_0_on_is_rounded_up_and_a_call_costs_a_unit_at_least(number: Any, bound: int) -> None:
    unread: list[object] = []
    assert Reserve(4_096, (("max_tokens",),)).bound(body({"max_tokens": number}), lambda: unread.append(1)) == bound
    assert len(unread) == (bound == 4_096 and number is not None)


def test_no_body_raises_and_an_unreadable_or_very_long_one_counts_by_its_length() -> None:
    no_json = (b"", b"{", b"null", b"[]", b'"max_tokens"', b"\xff\xfe", b"7", b"[" * 100_000)
    for content in (*no_json, b'{"max_tokens": ' + b"9" * 5_000):
        assert CHAT.bound(RequestBody(content)) == 4_096 + -(-len(content) // 3)
    unknown = (NO_BODY, RequestBody(None, 30), RequestBody(None))
    assert [CHAT.bound(each) for each in unknown] == [4_096, 4_106, 4_096]
    long = b'{"max_tokens": 5, "x": "' + b"x" * 16_000_000 + b'"}'
    assert CHAT.bound(RequestBody(long)) == 4_096 + -(-len(long) // 3)
    assert CHAT.bound(RequestBody(long[:-1_000_000] + b'"}')) == 5 + -(-(len(long) - 1_000_000 + 2) // 3)
    dice = random.Random(7)
    whole = json.dumps({"max_tokens": 100, "messages": [{"role": "user", "content": "é" * 30}], "n": [1, 2.5]}).encode()
    for _ in range(3_000):
        content = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            content[dice.randrange(len(content))] = dice.randrange(256)
        bound = CHAT.bound(RequestBody(bytes(content[: dice.randint(0, len(content))])))
        assert (type(bound), bound >= 1) == (int, True)


def test_a_book_may_have_a_reservation_in_place_of_units() -> None:
    reserve = '{ json = "/max_tokens", default = 4_096, bytes_per_unit = 3 }'
    chat = f'[{{ reserve = {reserve} }}, {{ units = 1, bucket = "requests" }}]'
    first, second = parse_book(BOOK.format(chat=chat), "b").price("chat").parts
    assert (first.bucket, first.units, first.reserve, str(first)) == ("tokens", 4_096, CHAT, "4,096 tokens reserved")
    assert (second.bucket, second.units, second.reserve) == ("requests", 1, None)
    book = parse_book(BOOK.format(chat='{ reserve = { json = ["/old", "/new"], default = 9 } }'), "b")
    of_two = book.price("chat").parts[0].reserve or Reserve(1)
    assert [of_two.bound(body(sent)) for sent in ({}, {"new": 3}, {"old": 4, "new": 3})] == [9, 3, 4]
    dated = "{ prices = [{ units = 5 }, { reserve = { default = 9 }, since = 2026-12-01 }] }"
    assert parse_book(BOOK.format(chat=dated), "b").price("chat").parts[0].reserve == Reserve(9)


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ("{ reserve = { default = 9 }, units = 5 }", "chat.units: cannot be combined with reserve"),
        ('[{ units = 1 }, { bucket = "requests", reserve = { default = 9 } }]', "only the first bucket can have it"),
        ("{ reserve = {} }", "chat.reserve.default: missing"),
        ("{ reserve = { default = 0 } }", "chat.reserve.default: 0 is not a whole number from 1 to"),
        ('{ reserve = { default = 9, json = "max_tokens" } }', "is no JSON pointer"),
        ('{ reserve = { default = 9, jsn = "/a" } }', "chat.reserve.jsn: unknown key; did you mean 'json'?"),
    ],
)
def test_an_invalid_reserve_is_one_line(chat: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_book(BOOK.format(chat=chat), "b")
    assert message in str(refused.value)
    assert str(refused.value).isprintable()
