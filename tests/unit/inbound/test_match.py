"""Which paths a pattern means, and that no spelling of a path gets around a rule."""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Callable
from unicodedata import normalize

import pytest

from quota.errors import ConfigError
from quota.inbound.rules import names, parse_pattern, readings

INPUTS = int(os.environ.get("QUOTA_TEST_INPUTS", "20000"))


def matches(pattern: str, path: str) -> bool:
    return any(parse_pattern(pattern).matches(reading) for reading in readings(path))


@pytest.mark.parametrize(
    ("pattern", "path", "meant"),
    [
        ("/", "/", True),
        ("/login", "/login", True),
        ("/login", "/login/", True),
        ("/login", "/LOGIN", True),
        ("/login", "/login\n", True),
        ("/api/*", "/api", True),
        ("/api/*", "/api/a/b/c", True),
        ("/api/*", "/apis", False),
        ("/*", "/a/b", True),
        ("/users/{id}", "/users/7", True),
        ("/users/{id}", "/users", False),
        ("/users/{id}", "/users/7/edit", False),
        # What an application may make of a path, it may make of this one.
        ("/login", "/x/../login", True),
        ("/x/*", "/x/../login", True),
        ("/caf\u00e9", "/cafe\u0301", True),
        ("/login", "/lo\u017fgin", False),
        ("/v1/login", "/v\u0661/login", True),  # an Arabic 1
        *(("/login", f"{begin}login", True) for begin in ("http://x/", "HTTP://x:1//", "x:/", "http:", "http:///")),
        ("/login", "/login#x", True),
        ("/login", "http://x/login?a#b", True),
        ("/a/*", "http://a/b", False),
        # Bytes that are no UTF-8, as a WSGI server hands them over: left out, replaced, or taken for Latin-1.
        ("/login", "/lo\udcffgin", True),
        ("/users/{id}", "/us\udcffers/\ufffd", True),
        ("/login", "/x\udcff/../login", True),
        ("/caf\u00e9", "/caf\udce9", True),
        ("/a/*", "/\udcff\ud800", False),
        # Of more marks than anybody writes on a letter only the first ones are compared.
        ("/a" + "\u0323" * 30, "/a" + "\u0323" * 40_000, True),
        ("/" + "\u1f82" * 31, "/" + "\u1f82" * 32, False),
    ],
)
def test_a_pattern_matches_its_paths(pattern: str, path: str, meant: bool) -> None:
    assert matches(pattern, path) is meant


@pytest.mark.parametrize(
    "pattern",
    ["", "/a?b=c", "/a%20b", "/*/b", "/a*", "/{a}b", "/users/<id>", "/users/\\d+", "/a/../b", "/a\nb", "/" + "a" * 256],
)
def test_an_invalid_pattern_is_refused_with_right_patterns(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a decoded path .* write for example /login, /users/\{id\}"):
        parse_pattern(pattern)


@pytest.mark.parametrize(
    ("first", "second", "covered"),
    [
        ("/*", "/a", True),
        ("/a/*", "/a/{x}/c", True),
        ("/a/*", "/*", False),
        ("/{x}", "/a", True),
        ("/a", "/{x}", False),
        ("/{x}/*", "/a/*", True),
        ("/A", "/a/", True),
    ],
)
def test_a_pattern_may_cover_another_pattern(first: str, second: str, covered: bool) -> None:
    assert parse_pattern(first).covers(parse_pattern(second)) is covered


def joined(path: str) -> str:
    return "/" + "/".join(segment for segment in path.split("/") if segment)


def resolved(path: str) -> str:
    """As RFC 3986 does it: an empty segment is a segment."""
    kept: list[str] = []
    segments = path.split("/")[1:]
    for n, segment in enumerate(segments):
        if segment == "..":
            del kept[-1:]
        elif segment != ".":
            kept.append(segment)
        if segment in (".", "..") and n == len(segments) - 1:
            kept.append("")
    return "/" + "/".join(kept)


STEPS: list[Callable[[str], str]] = [
    joined,
    resolved,
    str.lower,
    str.casefold,
    str.upper,
    lambda path: normalize("NFC", path),
    lambda path: normalize("NFKC", path),
    lambda path: path.rstrip("/") or "/",
]
PIECES = [
    *("/", "//", "..", ".", "login", "LOGIN", "a", "ﬁ", "\uff2c\uff2f\uff27\uff29\uff2e"),
    *("login\u212a", "\uff0e\uff0e", "\uff0f", "é", "e\u0301", "ß", "\u0131", "\u0130", "I\u0307", "\u017f"),
]
ROUTES = ["/login", "/a/login", "/fi", "/é", "/logink", "/ss", "/a", "/i", "/login/s"]


def test_no_spelling_reaches_a_route_past_its_rule() -> None:
    rng = random.Random(7)
    patterns = {route: parse_pattern(route) for route in ROUTES}
    reached = 0
    for _ in range(INPUTS):
        path = "/" + "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 6)))
        route = path
        for step in (rng.choice(STEPS) for _ in range(rng.randint(0, 5))):
            route = step(route)
        for pattern in [pattern for pattern in patterns if re.fullmatch(pattern, route, re.IGNORECASE)]:
            reached += 1
            assert any(patterns[pattern].matches(reading) for reading in readings(path)), (path, route)
    assert reached > INPUTS / 40


LETTERS = [letter for letter in map(chr, range(sys.maxunicode)) if letter.isalpha()]


def test_every_letter_counts_as_those_that_a_comparison_without_case_takes_for_it() -> None:
    cased = "".join(letter for letter in LETTERS if letter.lower() != letter or letter.upper() != letter)
    alike = [(letter, other) for letter in cased for other in re.findall(letter, cased, re.IGNORECASE)]
    assert len(alike) > len(cased)
    assert [pair for pair in alike if not matches(f"/{pair[0]}", f"/{pair[1]}")] == []


@pytest.mark.parametrize("form", [str.lower, str.upper, str.title, str.casefold, lambda text: normalize("NFKC", text)])
def test_every_letter_counts_as_what_an_application_makes_of_it(form: Callable[[str], str]) -> None:
    changed = [(letter, form(letter)) for letter in LETTERS if form(letter) != letter]
    routes = [(f"/{letter}", f"/{other}") for letter, other in changed if other.isprintable()]
    assert [pair for pair in routes if not (matches(*pair) and matches(*reversed(pair)))] == []


@pytest.mark.parametrize("route", ["/a/login", "/a/b/login", "/login"])
def test_dots_that_leave_a_mount_are_resolved(route: str) -> None:
    called = names("/a/b/../login", "/a/b")
    assert any(parse_pattern(route).matches(name) for reading in called for name in reading)
