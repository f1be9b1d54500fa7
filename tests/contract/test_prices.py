"""A price that changes on a day, in a process that lives on."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

from support.setup import Setup, limit

UPLOAD = "videos.insert"  # 1,600 until 2025-12-03, 100 from 2025-12-04
CHANGE_MS = round(datetime(2025, 12, 4, tzinfo=ZoneInfo("America/Los_Angeles")).timestamp() * 1000)


def test_the_state_of_a_budget_uses_the_price_of_the_day(setup: Setup) -> None:
    """A limit that counts uploads alone is full as long as the cheapest of them does not fit."""
    budget = setup.budget(limit(2_000, methods=("videos.insert",)))
    setup.now_ms = CHANGE_MS - 10
    budget.charge(UPLOAD)
    assert budget.outlook().room_ms[0] is not None
    setup.now_ms = CHANGE_MS
    assert budget.outlook().room_ms[0] is None
