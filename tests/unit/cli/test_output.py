"""A table takes the first layout that fits, at the width of any terminal: names, numbers and times stay whole."""

from __future__ import annotations

import io
import random
import re
from typing import Any

import pytest
from rich.console import Console, Group

from quota.cli.output import FirstThatFits, layouts, render_parts
from quota.reports.status import read_status
from quota.session import Session
from quota.settings.load import load_settings
from quota.wording import Line, Table, Tone, status_parts

WORDS = ("", "day", "pacific-day", "9,500", "search.list", "in 15h 31m", "名前", "é", "two words", "a/b_c-d@e", "x" * 9)


def shown(what: Any, width: int, *, colours: bool = False) -> str:
    system: Any = "standard" if colours else None
    console = Console(file=io.StringIO(), width=width, highlight=False, force_terminal=colours, color_system=system)
    console.print(what)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def random_table(r: random.Random) -> Table:
    headings = [r.choice(WORDS[1:]) for _ in range(r.randint(1, 6))]
    rows = [[r.choice(WORDS) for _ in headings] for _ in range(r.randint(0, 5))]
    footer = ["total", *(r.choice(WORDS) for _ in headings[1:])] if r.random() < 0.4 else ()
    tones: list[Tone] = [r.choice(("", "bad", "note")) for _ in rows] if r.random() < 0.5 else []
    numbers = [n for n in range(len(headings)) if r.random() < 0.4]
    return Table(headings, rows, numbers=numbers, tones=tones, footer=footer, without=(1, 2))


@pytest.mark.parametrize("seed", range(8))
def test_the_first_layout_that_fits_is_shown(seed: int) -> None:
    table = random_table(random.Random(seed))
    each = [*layouts(table)]
    for width in (10, 20, 40, 80):
        first = next((lines for lines in each if max(line.cell_len for line in lines) <= width), each[-1])
        assert shown(FirstThatFits(table), width) == shown(Group(*first), width)


def test_a_word_that_is_too_long_is_broken() -> None:
    table = Table(("job", "units"), [("x" * 60, "9,500")], numbers=(1,))
    assert shown(FirstThatFits(table), 20).splitlines()[2:4] == ["x" * 12 + "   9,500"[2:], "x" * 12 + " " * 6]
    table = Table(("at noon", "id"), [("a/b trending", "x" * 30)], whole=(1,))
    for width, row in ((37, ["a/b    " + "x" * 30, "trendi", "ng"]), (20, ["a/b trending xxxxxxx"])):
        assert [line.rstrip() for line in shown(FirstThatFits(table), width).splitlines()][-len(row) :] == row


@pytest.mark.parametrize("width", [24, 36])
def test_a_column_without_text_takes_no_room(width: int) -> None:
    table = Table(("at", "", "id"), [("2026-11-30T17:55:47+00:00", "", "x" * 9)], whole=(2,))
    assert "17:55:47+00:00" in shown(FirstThatFits(table), width)


@pytest.mark.parametrize("text", ["open", "  indented", "a long line that is folded", "y" * 45, "a\x1bb[bold]c"])
def test_a_line_is_plain_text(text: str) -> None:
    output = shown(render_parts([Line(text)]), 24)
    assert "".join(output.split()) == "".join(text.replace("\x1b", "\\x1b").split())
    assert all(len(row) <= 24 for row in output.splitlines())


def test_a_line_is_indented_as_a_whole_and_an_empty_one_stays() -> None:
    parts = [Line("one"), Line(""), Line("  two words")]
    assert [row.rstrip() for row in shown(render_parts(parts), 7).splitlines()] == ["one", "", "  two", "  words"]


NOW_MS = 1_795_255_200_000
WIDTHS = [40, 50, 60, 72, 80, 120]
CONFIG = """\
[credentials.main]
api = "youtube-v3"
[jobs.keywords]
fetch = "search"
schedule = "every 45m"
regions = ["US", "GB", "DE", "FR", "IN", "BR", "AU"]
options = { words = "x" }
"""


@pytest.fixture
def session(state_dir: object, tmp_path: object) -> Session:
    with open("quota.toml", "w", encoding="utf-8") as file:  # in the test's own folder
        file.write(CONFIG)
    return Session(load_settings(), clock=lambda: NOW_MS)


@pytest.mark.parametrize("full", [False, True])
def test_a_status_keeps_its_numbers_whole(session: Session, full: bool) -> None:
    with session:
        session.budget().charge("search.list", units=9_500 if full else 2_700)
        status = read_status(session)
    for width in WIDTHS:
        lines = shown(render_parts(status_parts(status)), width).splitlines()
        assert all(len(line) <= width for line in lines)
        text = "\n".join(lines)
        (day,) = [line for line in lines if re.match(r"day +", line)]
        for word in ("9,500", "0", "in 24h 00m") if full else ("2,700", "6,800"):
            assert re.search(rf"(?<![\d,]){word}(?![\d,])", day)
        assert "pacific-day" in text
        assert "…" not in text
        zone = [line for line in lines if "day@America" in line]
        assert all(re.search(r"day@America/(Los_(Angeles)?)? ", line) for line in zone)
        assert bool(zone) is (width >= (60 if full else 50)), "the window goes first: the limit's name stands for it"
        assert (day.count("9,500") == 1 + full) is (width >= (50 if full else 40)), "then the number of the limit"
        assert ("room again" in text) is full, "nobody waits for what has room"
