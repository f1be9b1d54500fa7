"""What the page says of a credential, in the states in which a part of its calls is stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from quota.dashboard.app import Dashboard
from quota.dashboard.pages import Verdict, verdict, when
from quota.dashboard.reading import read_now
from quota.session import Session
from quota.settings.load import load_settings
from quota.terms.limits import HOUR_MS
from support.page import overview

TEN_MS = 1_795_255_200_000
"""Saturday 21 November 2026, 10:00 UTC, 22 h before upstream's midnight."""

CONFIG = """
[ledger]
url = "sqlite:///ledger.db"
[credentials.main]
api = "youtube-v3"
[[credentials.main.limits]]
name = "day"
units = 9_500
window = "24h"
[[credentials.main.limits]]
name = "search"
methods = ["search.list"]
units = UNITS
window = "1h"
"""


class Room:
    def __init__(self, folder: Path) -> None:
        self.now_ms = TEN_MS
        self.path = folder / "quota.toml"
        self.configure("400")

    def configure(self, units: str, more: str = "") -> None:
        self.path.write_text(CONFIG.replace("UNITS", units) + more, encoding="utf-8")
        self.session = Session(load_settings(self.path), clock=lambda: self.now_ms)

    def verdict(self) -> Verdict:
        return verdict(read_now(self.session).status.credentials[0], self.now_ms)


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    monkeypatch.setenv("QUOTA_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("TZ", "UTC")
    room = Room(tmp_path)
    yield room
    room.session.close()


def test_the_verdict_says_closed_then_full_and_until_when(room: Room) -> None:
    budget = room.session.budget("main")
    assert room.verdict() == ("open", "Open", None, "Calls are admitted: 9,500 units.")
    budget.exhaust("units", TEN_MS, TEN_MS + 3 * HOUR_MS, "used up", "host:1")
    assert room.verdict().lead.startswith('"used up"; this machine goes on at 2026-11-21T13:00:')
    budget.reopen("units", "to charge")
    budget.charge("videos.list", units=9_500)
    budget.exhaust("units", TEN_MS, TEN_MS + 3 * HOUR_MS, "used up", "host:1")
    end, lead = when(TEN_MS + 3 * HOUR_MS, TEN_MS), '"used up"; then full until 2026-11-22T10:00:00+00:00.'
    assert room.verdict() == ("closed", "Closed by upstream until", end, lead)


def test_units_of_others_are_in_the_legend_and_the_forecast(room: Room) -> None:
    room.session.budget("main").add_others("units", 70, TEN_MS, TEN_MS + HOUR_MS, "reconciled")
    dashboard = Dashboard(room.session)
    page = overview(dashboard)
    curves = dashboard.curves.get(60).value
    assert curves is not None
    ahead = curves.of["main", "day"].ahead
    assert (ahead[0][1], ahead[-1][1]) == (70, 0)
    assert 'others, as upstream said <span class="number">70</span>' in page


JOB = """
[[credentials.main.limits]]
name = "calendar"
units = 9_500
window = { calendar = "day", zone = "UTC" }
[jobs.trending]
fetch = "trending"
regions = ["US"]
pages = 2
leave = 500
schedule = "*/30 * * * *"
"""


def test_the_verdict_is_full_if_no_job_could_go_on(room: Room) -> None:
    room.configure("400", JOB)
    room.session.budget("main").charge("videos.list", units=9_432)
    shown = room.verdict()
    assert (shown.state, shown.headline) == ("full", "Full for its jobs until")
    why = "limit 'day' has 9,432 of 9,500 units used, this job leaves 500 to others"
    assert shown.lead == f"Job trending: {why}; other calls have 68 units."


def test_the_verdict_is_closed_if_upstream_stops_every_job(room: Room) -> None:
    job = '[jobs.news]\nfetch = "search"\nregions = ["US"]\noptions = { words = "news" }\n'
    room.path.write_text(f'[credentials.main]\napi = "youtube-v3-buckets"\n{job}', encoding="utf-8")
    room.session = Session(load_settings(room.path), clock=lambda: room.now_ms)
    room.session.budget("main").exhaust("search", TEN_MS, TEN_MS + HOUR_MS, "used up", "host:1")
    shown = room.verdict()
    assert (shown.state, shown.headline) == ("closed", "Closed for its jobs until")
    row = json.dumps(read_now(room.session).status.as_json())
    assert '"closed_by": "search", "full_by": null' in row


def test_a_card_says_who_stops_its_calls(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quota.jobs.contributions.host_clock", lambda: room.now_ms)
    trial = '[[credentials.main.limits]]\nname = "trial"\nunits = 1\nwindow = "24h"\nshadow = true\n'
    room.configure("400", trial + JOB)
    room.session.budget("main").charge("videos.list", units=9_500)
    page = overview(Dashboard(room.session))
    assert (page.count(" by day, which stops them longer"), page.count("This limit will stop no run")) == (1, 1)
    room.session.budget("main").exhaust("units", TEN_MS, TEN_MS + 3 * HOUR_MS, "used up", "host:1")
    page = overview(Dashboard(room.session))
    assert (page.count("Its calls are stopped until 2026-11-2"), page.count("This limit will stop no run")) == (3, 1)
