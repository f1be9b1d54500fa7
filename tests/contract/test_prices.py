"""A price that changes on a day, in a process that lives on."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from support.books import parse_book
from support.setup import Setup, limit

UPLOAD = "videos.insert"  # 1,600 until 2025-12-03, 100 from 2025-12-04


def at(text: str, zone: str = "America/Los_Angeles") -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp() * 1000)


CHANGE_MS = at("2025-12-04 00:00:00")


@pytest.mark.parametrize("zone", ["America/Los_Angeles", "Asia/Kolkata", "Pacific/Auckland", "UTC"])
def test_a_price_changes_at_midnight_in_the_books_zone(setup: Setup, zone: str) -> None:
    book = parse_book(
        f"""
        api = "x"
        source = "the tests"
        read_on = 2026-11-01
        default = {{ get = 1, other = 1 }}
        buckets.units = {{ quota = 100, resets = {{ calendar = "month", zone = "{zone}" }} }}
        buckets.more = {{ quota = 100, resets = "1h" }}
        [methods]
        "a.list" = {{ prices = [
            {{ units = 1 }},
            {{ units = 2, since = 2026-03-08 }},
            {{ units = 3, bucket = "more", since = 2026-03-09 }},
        ] }}
        """,
        "book",
    )
    budget = setup.budget(limit(500, buckets=()), book=book)
    costs = []
    for day in ("2026-03-08", "2026-03-09"):
        for setup.now_ms in (at(day, zone) - 1, at(day, zone)):
            costs.append(budget.charge("a.list").cost_units)
    assert costs == [1, 2, 2, 3]
    assert setup.entries()[-1].bucket == "more"
    assert budget.charge("a.list", units=9).admitted
    assert setup.entries()[-1].bucket == "more"
    assert book.zone == zone


def test_the_state_of_a_budget_uses_the_price_of_the_day(setup: Setup) -> None:
    """A limit that counts uploads alone is full as long as the cheapest of them does not fit."""
    budget = setup.budget(limit(2_000, methods=("videos.insert",)))
    setup.now_ms = CHANGE_MS - 10
    budget.charge(UPLOAD)
    assert budget.outlook().room_ms[0] is not None
    setup.now_ms = CHANGE_MS
    assert budget.outlook().room_ms[0] is None
