"""A price that changes on a day, in a process that lives on."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from click.testing import CliRunner

from quota.cli.program import cli
from quota.terms.costs import CostBook
from support.books import parse_book
from support.setup import Setup, limit

UPLOAD = "videos.insert"  # 1,600 until 2025-12-03, 100 from 2025-12-04


def at(text: str, zone: str = "America/Los_Angeles") -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp() * 1000)


CHANGE_MS = at("2025-12-04 00:00:00")
HEAD = """
api = "x"
source = "the tests"
read_on = 2026-11-01
default = { get = 1, other = 1 }
"""


def a_book(tables: str) -> CostBook:
    return parse_book(HEAD + tables, "book")


@pytest.mark.parametrize("zone", ["America/Los_Angeles", "Asia/Kolkata", "Pacific/Auckland", "UTC"])
def test_a_price_changes_at_midnight_in_the_books_zone(setup: Setup, zone: str) -> None:
    book = a_book(
        f"""
        buckets.units = {{ quota = 100, resets = {{ calendar = "month", zone = "{zone}" }} }}
        buckets.more = {{ quota = 100, resets = "1h" }}
        [methods]
        "a.list" = {{ prices = [
            {{ units = 1 }},
            {{ units = 2, since = 2026-03-08 }},
            {{ units = 3, bucket = "more", since = 2026-03-09 }},
        ] }}
        """
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


def test_the_cost_book_is_shown_with_the_prices_to_come(state_dir: Path) -> None:
    (state_dir.parent / "book.toml").write_text(
        HEAD
        + """
        buckets.units = { quota = 1_000, resets = { calendar = "day", zone = "UTC" } }
        methods."a.add" = { prices = [{ units = 3 }, { units = 700, since = 2099-01-01 }] }
        """
    )
    shown = CliRunner().invoke(cli, ["book", "show", "./book.toml"])
    assert "a.add       3  units; 700 units from 2099-01-01" in shown.output
    (method,) = json.loads(CliRunner().invoke(cli, ["book", "show", "./book.toml", "--json"]).output)["methods"]
    now, then = ([{"bucket": "units", "units": units}] for units in (3, 700))
    later = {"units": 700, "bucket": "units", "parts": then, "since": "2099-01-01"}
    assert method == {"method": "a.add", "units": 3, "bucket": "units", "parts": now, "next": later}
