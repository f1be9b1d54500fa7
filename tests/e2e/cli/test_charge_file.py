"""`quota charge --file`: several calls in one step, from a file or a pipe."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from support.commands import Quota, one_line
from support.configurations import limited

CALLS = """
# two searches, and what is to be known of what they find
search.list
videos.list 3   # three pages

search.list
"""


@pytest.fixture
def quota(quota: Quota) -> Quota:
    quota.configure(limited(205))
    (quota.folder / "calls.txt").write_text(CALLS, encoding="utf-8")
    return quota


def charged(quota: Quota) -> list[tuple[str, int, str, str]]:
    lines = [json.loads(line) for line in quota("log", "--json").stdout.splitlines()]
    return [(line["id"], line["units"], line["job"], line["region"]) for line in lines]


def test_all_are_charged_and_each_has_its_line_and_its_id(quota: Quota) -> None:
    done = quota("charge", "--file", "calls.txt", "--job", "backfill", "--region", "DE")
    assert done.returncode == 0, done.stderr
    *lines, total = done.stdout.splitlines()
    assert total == "3 calls, 203 units charged together; 2 units left after all of them"
    ids = [line.rpartition("; id ")[2] for line in lines]
    search, videos = "admitted search.list (100 units)", "admitted videos.list (3 units)"
    assert [line.partition(" on ")[0] for line in lines] == [search, videos, search]
    assert charged(quota) == [(id_, units, "backfill", "DE") for id_, units in zip(ids, (100, 3, 100), strict=True)]


def test_no_call_is_charged_if_not_all_fit(quota: Quota) -> None:
    assert quota("charge", "videos.list", "--units", "3").returncode == 0
    done = quota("charge", "--file", "calls.txt")
    error = one_line(done, 75)
    assert done.stdout == ""
    assert "limit 'day' has 3 of 205 units used, and these 3 calls need 203 together; next at " in error
    assert len(charged(quota)) == 1
    assert [each["calls"] for each in quota.json("spend")["refused"]] == [3]
    assert quota("charge", "videos.list", "--units", "203").returncode == 75
    kept = [json.loads(line) for line in quota("log", "--refused", "--json").stdout.splitlines()]
    of_each = [(each["method"], each["calls"], each["cost_units"]) for each in kept]
    assert of_each == [("search.list", 3, 203), ("videos.list", 1, 203)]
    lines = quota("log", "--refused").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join("\n".join(lines).split())
    assert text.index(" search.list 203 - ") < text.index(" +2 ") < text.index(" videos.list 203 - ")


@pytest.mark.parametrize("text", ["videos.list\\nvideos.list 2", "\\xef\\xbb\\xbfvideos.list\\r\\nvideos.list 2\\r\\n"])
def test_charge_file_dash_reads_stdin(quota: Quota, text: str) -> None:
    done = quota.shell(f"printf {shlex.quote(text)} | quota charge --file -")
    assert done.returncode == 0, done.stderr
    assert [line[1] for line in charged(quota)] == [1, 2]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("# nothing\n\n", "no call in it"),
        ("videos.list 1 2", "line 1: 'videos.list 1 2' is not METHOD [UNITS]"),
        ("videos.list\nvideos.list ²", "line 2: UNITS '²' is not a whole number from 1 to 999,999,999,999,999"),
        ("videos.list " + "9" * 5_000, f"line 1: UNITS '{'9' * 56}... is not a whole number"),
        ("videos.list\n" * 100 + "# one more\nvideos.list", "line 102: more than 100 calls cannot be charged"),
        ("videos.list\nvideo.list", "line 2: cost book 'youtube-v3' has no method 'video.list'; did you mean"),
        ("videos.list\nvideo.list", "Or give its units: METHOD UNITS"),
        ("videos.list\nvideos.list 206", "line 2: videos.list costs 206 units and limit 'day'"),
        ("videos.list 103\n" * 2, "can never fit"),
    ],
)
def test_a_wrong_file_of_calls_is_one_line_and_charges_nothing(quota: Quota, text: str, word: str) -> None:
    (quota.folder / "these.txt").write_text(text, encoding="utf-8")
    error = one_line(quota("charge", "--file", "these.txt"), 2)
    assert error.startswith("calls 'these.txt'") or "2 calls together" in error
    assert word in error
    assert charged(quota) == []


def test_a_file_is_read_up_to_64_kib(quota: Quota) -> None:
    (quota.folder / "these.txt").write_bytes(b"videos.list 0000000000000002\n".ljust(65_536, b"#"))
    assert quota("charge", "--file", "these.txt").returncode == 0
    assert [line[1] for line in charged(quota)] == [2]
    done = quota.shell("ulimit -v 2000000; quota charge --file - < <(yes '# nothing')")
    assert "larger than 64 KiB, so it is not a list of calls" in one_line(done, 2)


def test_a_file_that_cannot_be_read_is_one_line(quota: Quota, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"videos.list\nvideos.list # caf\xe9")
    missing = "cannot be read: No such file or directory; name a file with METHOD [UNITS] on each line, or - for stdin"
    assert missing in one_line(quota("charge", "--file", "nowhere.txt"), 2)
    latin = one_line(quota("charge", "--file", "latin.txt"), 2)
    assert "line 2: not UTF-8 text; save the file as UTF-8" in latin
    line = one_line(quota.shell("quota charge --file - <&-"), 2)
    assert line == "calls from stdin: no call in it; write METHOD [UNITS] on a line"


def test_a_method_with_units_may_have_any_name(quota: Quota) -> None:
    (quota.folder / "these.txt").write_text("my.own 5\n", encoding="utf-8")
    assert quota("charge", "--file", "these.txt").stdout.count("\n") == 1, "a lone call needs no total"
    assert [line[1] for line in charged(quota)] == [5]
