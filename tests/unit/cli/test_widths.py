"""What is shown for people, at the width of any terminal: names, numbers and times stay whole."""

from __future__ import annotations

import io
import re
from datetime import date

import pytest
from rich.console import Console, RenderableType

from quota.budget import project_of
from quota.cli.render import render_spending, render_status
from quota.jobs.plan.plan import make_plan, render_plan
from quota.ledger.factory import open_ledger
from quota.reports.spending import read_spending
from quota.reports.status import read_status
from quota.session import Session
from quota.settings.load import load_settings
from support.setup import budget_of

NOW_MS = 1_795_255_200_000
WIDTHS = [40, 50, 60, 72, 80, 120]
CONFIG = """\
[credentials.main]
api = "youtube-v3"
[jobs.keywords]
fetch = "search"
schedule = "every 45m"
regions = ["K1", "K2", "K3", "K4", "K5", "K6", "K7"]
options = { words = "x" }
"""


def shown(width: int, what: RenderableType) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(what)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # the StringIO above
    assert all(len(line) <= width for line in lines)
    return lines


@pytest.fixture
def session(state_dir: object, tmp_path: object) -> Session:
    with open("quota.toml", "w", encoding="utf-8") as file:  # in the test's own folder
        file.write(CONFIG)
    return Session(load_settings(), clock=lambda: NOW_MS)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("full", [False, True])
def test_a_status_keeps_its_numbers_whole(session: Session, width: int, full: bool) -> None:
    with session:
        for _ in range(95 if full else 27):
            session.budget().charge("search.list")
        lines = shown(width, render_status(read_status(session)))
    text = "\n".join(lines)
    (day,) = [line for line in lines if re.match(r"day +", line)]
    for word in ("9,500", "0", "in 24h 00m") if full else ("2,700", "6,800"):
        assert re.search(rf"(?<![\d,]){word}(?![\d,])", day)
    assert "pacific-day" in text
    assert "…" not in text
    zone = [line for line in lines if "day@America" in line]
    assert all(re.search(r"day@America/(Los_(Angeles)?)? ", line) for line in zone)
    assert bool(zone) is (width >= (60 if full else 50)), (
        "the window is the first to go: the limit's name stands for it"
    )
    assert (day.count("9,500") == 1 + full) is (width >= (50 if full else 40)), "then the number of the limit"
    assert ("room again" in text) is full, "nobody waits for what has room"


@pytest.mark.parametrize("width", WIDTHS)
def test_a_spending_keeps_its_names_whole(width: int) -> None:
    ledger = open_ledger("sqlite://", clock=lambda: NOW_MS)
    settings = load_settings().credentials["demo"]
    budget = budget_of(ledger, *settings.limits, credential="m", project="m", book=settings.book, clock=lambda: NOW_MS)
    assert budget.charge("search.list", units=2_700, job="backfill-of-channels", region="DE").admitted
    spending = read_spending([project_of(budget)], ["method", "job", "region", "run", "hour"], 0)
    local = read_spending([project_of(budget)], spending.by, 0, local=True)
    lines = shown(width, render_spending(local))
    text = "\n".join(lines)
    assert spending.rows[0][0][-1] == "2026-11-21T10:00:00.000Z", "for programs as it was"
    for word in ("search.", "2026-11-21", "DE", spending.rows[0][0][3], "2,700", "total"):
        assert re.search(rf"(?<![\w:]){re.escape(word)}(?![\d:])", text), word
    assert "10:00:00+00:00" in text
    assert ("backfill-of-channels" in text) is (width not in (40, 72)), "there it is folded behind a hyphen"
    assert "…" not in text


@pytest.mark.parametrize("width", WIDTHS)
def test_a_plan_keeps_its_rows_on_one_line(session: Session, width: int) -> None:
    plan = make_plan(session.settings, NOW_MS, days=3, first_day=date(2026, 11, 22))
    lines = shown(width, render_plan(plan))
    days = [line for line in lines if re.match(r"(Sun|Mon|Tue) 2[2-4] .*[▁▂▃▄▅▆▇█]", line)]
    assert len(days) == 3
    assert all(" 9,494" in line for line in days)
    assert all(("dry at 2026-11-2" in line) is (width >= 80) for line in days)
    assert all(("Nov" in line) is (width not in (40, 80)) for line in days)
    (job,) = [line for line in lines if line.startswith("keywords ")]
    assert re.search(r" 96 +56 ", job)
    assert "…" not in "\n".join(lines)
