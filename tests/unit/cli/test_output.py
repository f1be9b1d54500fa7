"""A table takes the first layout that fits, at the width of any terminal: names, numbers and times stay whole."""

from __future__ import annotations

import io
import random
import re
from datetime import date
from typing import Any

import pytest
from rich.console import Console, RenderableType

from quota.budget import project_of
from quota.cli.output import FirstThatFits, fitting, layouts, line, render_parts, stacked
from quota.cli.reports import spending_tables
from quota.jobs.plan.plan import make_plan, render_plan
from quota.ledger.factory import open_ledger
from quota.reports.spending import read_spending
from quota.reports.status import read_status
from quota.session import Session
from quota.settings.load import load_settings
from quota.wording import Table, Tone, status_parts
from support.setup import budget_of

WORDS = ("", "day", "pacific-day", "9,500", "search.list", "in 15h 31m", "名前", "é", "two words", "a/b_c-d@e", "x" * 9)


def shown(what: Any, width: int, *, colours: bool = False) -> str:
    system: Any = "standard" if colours else None
    console = Console(file=io.StringIO(), width=width, highlight=False, force_terminal=colours, color_system=system)
    console.print(what)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def random_layouts(r: random.Random) -> list[Any]:
    headings = [r.choice(WORDS[1:]) for _ in range(r.randint(1, 6))]
    rows = [[r.choice(WORDS) for _ in headings] for _ in range(r.randint(0, 5))]
    footer = ["total", *(r.choice(WORDS) for _ in headings[1:])] if r.random() < 0.4 else ()
    tones: list[Tone] = [r.choice(("", "bad", "note")) for _ in rows] if r.random() < 0.5 else []
    numbers = [n for n in range(len(headings)) if r.random() < 0.4]
    return [*layouts(Table(headings, rows, numbers=numbers, tones=tones, footer=footer, without=(1, 2)))]


@pytest.mark.parametrize("seed", range(8))
def test_the_first_layout_that_fits_is_shown(seed: int) -> None:
    found = random_layouts(random.Random(seed))
    wide = Console(width=10_000)
    for width in (10, 20, 40, 80):
        first = next((layout for layout in found if wide.measure(layout).maximum <= width), found[-1])
        assert shown(FirstThatFits(iter(found)), width) == shown(first, width)


def test_lines_and_tables_stand_below_each_other_also_when_they_are_drawn_again() -> None:
    parts: list[Any] = []
    for seed in range(8):
        table = FirstThatFits(iter(random_layouts(random.Random(seed))))
        parts += [line("of a project"), table, stacked([line("its notes")])]
    together = stacked(parts)
    for width in (200, 20, 200):
        assert shown(together, width) == "".join(shown(part, width) for part in parts)


def test_headings_and_rows_have_their_styles_on_a_terminal() -> None:
    layout, *_ = layouts(Table(["limit", "used"], [["day", "5"]], numbers=(1,), tones=["bad"], footer=["all", "5"]))
    coloured = shown(layout, 80, colours=True)
    assert "\x1b[1mlimit" in coloured
    assert "\x1b[31mday" in coloured
    assert "\x1b[1mall" in coloured
    assert [row.rstrip() for row in shown(layout, 80).splitlines()] == [
        "limit   used",
        "────────────",
        "day        5",
        "",
        "all        5",
    ]


@pytest.mark.parametrize("text", ["open", "  indented", "a long line that is folded", "y" * 45, "a\x1bb[bold]c"])
def test_a_line_is_plain_text(text: str) -> None:
    found = shown(line(text), 24)
    assert "".join(found.split()) == "".join(text.replace("\x1b", "\\x1b").split())
    assert all(len(row) <= 24 for row in found.splitlines())


# -- what commands print -----------------------------------------------------------------------------------------------

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


def rendered(width: int, what: RenderableType) -> list[str]:
    lines = shown(what, width).splitlines()
    assert all(len(line) <= width for line in lines)
    return lines


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
        lines = rendered(width, render_parts(status_parts(status)))
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


def test_a_spending_keeps_its_names_whole() -> None:
    ledger = open_ledger("sqlite://", clock=lambda: NOW_MS)
    settings = load_settings().credentials["demo"]
    budget = budget_of(ledger, *settings.limits, credential="m", project="m", book=settings.book, clock=lambda: NOW_MS)
    assert budget.charge("search.list", units=2_700, job="backfill-of-channels", region="DE").admitted
    spending = read_spending([project_of(budget)], ["method", "job", "region", "run", "hour"], 0)
    local = read_spending([project_of(budget)], spending.by, 0, local=True)
    assert spending.rows[0][0][-1] == "2026-11-21T10:00:00.000Z", "for programs as it was"
    for width in WIDTHS:
        text = "\n".join(rendered(width, fitting(*spending_tables(local))))
        for word in ("search.", "2026-11-21", "DE", spending.rows[0][0][3], "2,700", "total"):
            assert re.search(rf"(?<![\w:]){re.escape(word)}(?![\d:])", text), word
        assert "10:00:00+00:00" in text
        assert ("backfill-of-channels" in text) is (width not in (40, 72)), "there it is folded behind a hyphen"
        assert "…" not in text


def test_a_plan_keeps_its_rows_on_one_line(session: Session) -> None:
    plan = make_plan(session.settings, NOW_MS, days=3, first_day=date(2026, 11, 22))
    for width in (40, 72, 120):
        lines = rendered(width, render_plan(plan))
        days = [line for line in lines if re.match(r"(Sun|Mon|Tue) 2[2-4] .*[▁▂▃▄▅▆▇█]", line)]
        assert len(days) == 3
        assert all(" 9,494" in line for line in days)
        assert all(("dry at 2026-11-2" in line) is (width >= 80) for line in days)
        assert all(("Nov" in line) is (width not in (40, 80)) for line in days)
        (job,) = [line for line in lines if line.startswith("keywords ")]
        assert re.search(r" 96 +56 ", job)
        assert "…" not in "\n".join(lines)
