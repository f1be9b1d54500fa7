"""`quota charge --file`: several calls in one step, from a file or a pipe."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

import pytest

from support.commands import Quota, one_line

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """
[ledger]
url = "sqlite:///ledger.db"
[credentials.main]
api = "youtube-v3"
project = "p"
[[credentials.main.limits]]
name = "day"
units = 205
window = "24h"
"""
CALLS = """
# two searches, and what is to be known of what they find
search.list
videos.list 3   # three pages

search.list
"""


@pytest.fixture
def quota(tmp_path: Path) -> Quota:
    quota = Quota(tmp_path)
    quota.configure(CONFIG)
    (tmp_path / "calls.txt").write_text(CALLS, encoding="utf-8")
    return quota


def charged(quota: Quota) -> list[tuple[str, int, str, str]]:
    lines = [json.loads(line) for line in quota("log", "--json").stdout.splitlines()]
    return [(line["id"], line["units"], line["job"], line["region"]) for line in lines]


def test_all_are_charged_and_each_has_its_line_and_its_id(quota: Quota) -> None:
    done = quota("charge", "--file", "calls.txt", "--job", "backfill", "--region", "DE")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    ids = [line.rpartition("; id ")[2] for line in lines]
    assert [line.partition(" on ")[0] for line in lines] == [
        "admitted search.list (100 units)",
        "admitted videos.list (3 units)",
        "admitted search.list (100 units)",
    ]
    assert charged(quota) == [
        (ids[0], 100, "backfill", "DE"),
        (ids[1], 3, "backfill", "DE"),
        (ids[2], 100, "backfill", "DE"),
    ]


def test_none_is_charged_where_not_all_fit_and_one_line_says_so(quota: Quota) -> None:
    assert quota("charge", "videos.list", "--units", "3").returncode == 0
    done = quota("charge", "--file", "calls.txt")
    said = one_line(done, 75)
    assert done.stdout == ""
    assert "limit 'day' has 3 of 205 units used, and these 3 calls need 203 together; next at " in said
    assert len(charged(quota)) == 1
    assert [one["calls"] for one in quota.json("spend")["refused"]] == [3]


def test_json_is_a_list_of_decisions(quota: Quota) -> None:
    decisions = quota.json("charge", "--file", "calls.txt")
    assert [(one["method"], one["cost_units"], one["remaining_units"]) for one in decisions] == [
        ("search.list", 100, 2),
        ("videos.list", 3, 2),
        ("search.list", 100, 2),
    ]
    assert [one["id"] for one in decisions] == [line[0] for line in charged(quota)]


@pytest.mark.parametrize("text", ["videos.list\\nvideos.list 2", "\\xef\\xbb\\xbfvideos.list\\r\\nvideos.list 2\\r\\n"])
def test_a_dash_reads_stdin(quota: Quota, text: str) -> None:
    done = quota.shell(f"printf {shlex.quote(text)} | quota charge --file -")
    assert done.returncode == 0, done.stderr
    assert [line[1] for line in charged(quota)] == [1, 2]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "no call in it"),
        ("# nothing\n\n", "no call in it"),
        ("videos.list 1 2", "line 1: 'videos.list 1 2' is not METHOD [UNITS]"),
        ("videos.list\nvideos.list x", "line 2: 'videos.list x' is not METHOD [UNITS]"),
        ("videos.list -1", "line 1:"),
        ("videos.list 0", "whole number from 1"),
        ("videos.list ²", "line 1:"),
        ("videos.list 9999999999", "whole number from 1"),
        ("videos.list\n" * 101, "1 to 100 calls"),
        ("videos.list\nvideo.list", "did you mean 'videos.list'"),
        ("videos.list\nvideo.list", "Or give its units: METHOD UNITS"),
        ("videos.list 206", "can never fit"),
        ("videos.list 103\n" * 2, "can never fit"),
    ],
)
def test_what_cannot_be_charged_is_one_line_and_nothing_is_charged(quota: Quota, text: str, word: str) -> None:
    (quota.folder / "these.txt").write_text(text, encoding="utf-8")
    assert word in one_line(quota("charge", "--file", "these.txt"), 2)
    assert charged(quota) == []


@pytest.mark.parametrize(
    ("name", "word"), [("nowhere.txt", "No such file"), (".", "Is a directory"), ("latin.txt", "not text in UTF-8")]
)
def test_a_file_that_cannot_be_read_is_one_line(quota: Quota, tmp_path: Path, name: str, word: str) -> None:
    (tmp_path / "latin.txt").write_bytes(b"videos.list # caf\xe9")
    assert word in one_line(quota("charge", "--file", name), 2)


def test_a_closed_stdin_has_no_calls(quota: Quota) -> None:
    assert "no call in it" in one_line(quota.shell("quota charge --file - <&-"), 2)


@pytest.mark.parametrize(
    "words",
    [[], ["--units", "3"], ["videos.list", "--file", "calls.txt"], ["--file", "calls.txt", "--units", "3"]],
)
def test_a_method_or_a_file(quota: Quota, words: list[str]) -> None:
    said = one_line(quota("charge", *words), 2)
    assert "METHOD, with --units if need be, or --file CALLS alone" in said
