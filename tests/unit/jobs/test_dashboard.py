"""What the page is told of the schedule."""

from __future__ import annotations

from pathlib import Path

import pytest

from quota.jobs.contributions import forecast
from quota.session import Session
from quota.settings.load import load_settings
from quota.terms.limits import HOUR_MS

MIDNIGHT_MS = 1_795_334_400_000
"""Of America/Los_Angeles, on 22 November 2026."""

CONFIG = """
[credentials.main]
api = "youtube-v3"
limits = [
    { name = "search", methods = ["search.list"], count = "calls", units = 20, window = "24h" },
    { name = "berlin", units = 90_000, window = { calendar = "day", zone = "Europe/Berlin" } },
]
[jobs.concerts]
fetch = "search"
options = { words = "live concert" }
regions = ["US", "DE", "FR"]
schedule = "30 * * * *"
"""


def test_the_forecast_shows_today_that_a_limit_runs_dry_tomorrow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUOTA_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr("quota.jobs.contributions.host_clock", lambda: MIDNIGHT_MS - HOUR_MS)
    path = tmp_path / "quota.toml"
    path.write_text(CONFIG, encoding="utf-8")
    with Session(load_settings(path), clock=lambda: MIDNIGHT_MS - HOUR_MS) as session:
        outlook = forecast(session).forecast
    assert outlook is not None
    search, berlin = outlook.limits["main", "search"], outlook.limits["main", "berlin"]
    assert (search.day_units, search.zone, berlin.zone) == (3, "America/Los_Angeles", "Europe/Berlin")
    assert search.refused_ticks > 10
    assert search.dry_ms == MIDNIGHT_MS + 5 * HOUR_MS + HOUR_MS // 2, "after 20 searches"
    assert (berlin.refused_ticks, berlin.dry_ms) == (0, None)
