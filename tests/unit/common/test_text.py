"""Whatever a message quotes, it stays short, on one line, and moves no cursor."""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest

from quota.common.clock import NEVER
from quota.common.text import csv_writer, describe, many, members, one_line, printable, quoted, shorten, show, spaced


class Rude:
    def __repr__(self) -> str:
        return "\x1b[31m\n"


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "'a'"),
        ("\x1b[31m", r"'\x1b[31m'"),
        ("x" * 100, "'" + "x" * 56 + "..."),
        pytest.param(10**5_000, "a number that large", id="huge"),
        (Rude(), r"\x1b[31m\n"),
        (Mute(), "this Mute"),
    ],
)
def test_a_value_is_shown_on_one_short_line(value: object, text: str) -> None:
    assert show(value) == text


def test_a_count_and_its_noun_agree() -> None:
    assert [many(count, "unit") for count in (0, 1, 2, 9_500)] == ["0 units", "1 unit", "2 units", "9,500 units"]
    assert [many(count, noun) for noun in ("search", "pass") for count in (1, 3)] == [
        "1 search", "3 searches", "1 pass", "3 passes",
    ]  # fmt: skip


def test_text_is_cut_only_where_it_is_too_long() -> None:
    assert (shorten("abcdef", 6), shorten("abcdefg", 6)) == ("abcdef", "abc...")
    assert one_line("a" * 300 + "\n" + "b" * 300) == "a" * 199 + "..." + "b" * 198


def test_control_characters_become_the_callers_replacement() -> None:
    title = "👨\u200d👩 می\u200cبینم Quoi\u202f? 日本\u3000語 \U0001fae9 🏴\U000e0067\U000e007f"
    assert (printable("a\u200b\u202e\x9b"), printable(title)) == (r"a\u200b\u202e\x9b", title)
    assert (spaced("a\r\n\x1b[0mb"), spaced("a\tb", "?")) == ("a   [0mb", "a?b")


def test_an_error_is_shown_with_its_kind_and_message() -> None:
    assert describe(ValueError("no\n  good")) == "ValueError: no good"
    assert describe(ValueError()) == "ValueError"
    assert len(describe(ValueError("x" * 1_000))) == 300


def test_a_value_in_the_log_reads_one_way_only() -> None:
    assert [quoted(value) for value in (5, "a/b", "a b", 'a"', "a\n", "é e")] == [
        "5", "a/b", '"a b"', r'"a\""', r'"a\n"', '"é e"',
    ]  # fmt: skip


class Row(NamedTuple):
    name: str
    units: int
    since_ms: int
    resets_ms: int | None


ROW = Row("day", 0, 1_000, None)


def test_fields_have_their_names_times_are_text_and_empty_values_may_be_left_out() -> None:
    assert list(members(ROW, "units name").items()) == [("units", 0), ("name", "day")]
    assert members(ROW, "since since_at") == dict.fromkeys(("since", "since_at"), "1970-01-01T00:00:01.000Z")
    assert members(ROW._replace(since_ms=0), "since") == {"since": "1970-01-01T00:00:00.000Z"}
    for never in (None, NEVER):
        assert members(ROW._replace(resets_ms=never), "resets_at") == {"resets_at": None}
    assert members(ROW, "name", if_any="units resets_at since") == {"name": "day", "since": "1970-01-01T00:00:01.000Z"}


def test_csv_at_a_terminal_has_no_control_characters() -> None:
    ours, theirs = os.openpty()
    with open(ours, "rb") as screen, open(theirs, "w") as terminal:
        csv_writer(terminal, ["title\x1b"])({"title\x1b": "red\x1b[31m"})
        terminal.flush()
        assert screen.readline() + screen.readline() == b"title\\x1b\r\nred\\x1b[31m\r\n"
