"""A price that changes on a day, in a process that lives on."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pytest
from click.testing import CliRunner

from quota.cli.commands import cli
from quota.clients.metering import Meter
from quota.common.clock import NEVER
from quota.deciding.checklist import charges_of
from quota.errors import CostExceedsLimit, LedgerError
from quota.recovery.allowance import Allowance
from quota.settings.books import parse_book
from quota.settings.lint import lint
from quota.settings.load import load_settings
from quota.terms.attribution import is_reservation
from quota.terms.limits import Calendar, Limit, Selector, View
from support.books import BOOK
from support.setup import limit

if TYPE_CHECKING:
    from pathlib import Path

    from quota.ledger.contract import ChargeRequest, ChargeResult
    from support.setup import Setup

UPLOAD = "videos.insert"  # 1,600 until 2025-12-03, 100 from 2025-12-04


def at(text: str, zone: str = "America/Los_Angeles") -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp() * 1000)


CHANGE_MS = at("2025-12-04 00:00:00")
WINDOWS: list[list[Any]] = [
    [limit(50_000)],
    [Limit("day", 50_000, View(Selector(), Calendar("day", "America/Los_Angeles")), 50_000, 0)],
    [
        Limit("day", 50_000, View(Selector(), Calendar("day", "UTC")), 50_000, 0, paced=True),
        limit(50_000, name="sliding"),
    ],
    [],
]


@pytest.mark.parametrize("limits", WINDOWS, ids=["sliding", "calendar", "paced", "default"])
def test_a_budget_that_lives_on_charges_the_price_of_the_day(setup: Setup, limits: list[Any]) -> None:
    setup.now_ms = CHANGE_MS - 1
    budget = setup.budget(*limits or [limit(50_000)])
    costs = [budget.charge(UPLOAD).cost_units]
    for setup.now_ms in (CHANGE_MS, CHANGE_MS + 1, CHANGE_MS + 86_400_000):
        costs += [budget.peek(UPLOAD).cost_units, budget.charge(UPLOAD).cost_units]
    assert costs == [1600, 100, 100, 100, 100, 100, 100]
    assert [entry.units for entry in setup.ledger.read(setup.project, (0, 0), NEVER, 10)] == [1600, 100, 100, 100]


def test_a_clock_that_goes_back_finds_the_old_price(setup: Setup) -> None:
    budget = setup.budget(limit(50_000))
    setup.now_ms = CHANGE_MS
    assert budget.charge(UPLOAD).cost_units == 100
    setup.now_ms = CHANGE_MS - 1
    assert budget.peek(UPLOAD).cost_units == 1600


def test_what_could_never_fit_fits_once_it_is_cheaper(setup: Setup) -> None:
    budget = setup.budget(limit(500))
    setup.now_ms = CHANGE_MS - 1
    with pytest.raises(CostExceedsLimit):
        budget.charge(UPLOAD)
    setup.now_ms = CHANGE_MS
    assert budget.charge(UPLOAD).admitted


@pytest.mark.parametrize("zone", ["America/Los_Angeles", "Asia/Kolkata", "Pacific/Auckland", "UTC"])
def test_it_changes_at_midnight_of_the_books_own_zone(setup: Setup, zone: str) -> None:
    book = parse_book(
        f"""
        api = "x"
        source = "the tests"
        read_on = 2026-11-01
        buckets.units = {{ quota = 100, resets = {{ calendar = "month", zone = "{zone}" }} }}
        buckets.more = {{ quota = 100, resets = "1h" }}
        default = {{ get = 1, other = 1 }}
        [methods]
        "a.list" = {{ prices = [
            {{ units = 1 }},
            {{ units = 2, since = 2026-03-08 }},
            {{ units = 3, bucket = "more", since = 2026-03-09 }},
        ] }}
        """,
        "zoned",
    )
    budget = setup.budget(limit(500, buckets=()), book=book)
    found = []
    for day in ("2026-03-08", "2026-03-09"):
        for setup.now_ms in (at(day, zone) - 1, at(day, zone)):
            found.append(budget.charge("a.list").cost_units)
    assert found == [1, 2, 2, 3]
    assert setup.ledger.read(setup.project, (0, 0), NEVER, 10)[-1].bucket == "more"
    assert budget.charge("a.list", units=9).admitted
    assert setup.ledger.read(setup.project, (0, 0), NEVER, 10)[-1].bucket == "more"
    assert book.zone == zone


@pytest.mark.parametrize("calls", [["a.ask"], ["a.list"], ["a.ask", "a.list"], ["a.list", "a.ask"]])
def test_where_the_price_changes_meanwhile_each_charge_is_reserved_or_not_by_its_own(
    setup: Setup, calls: list[str]
) -> None:
    book = parse_book(
        """
        api = "x"
        source = "the tests"
        read_on = 2026-11-01
        buckets.units = { quota = 100, resets = { calendar = "day", zone = "UTC" } }
        default = { get = 1, other = 1 }
        [methods]
        "a.ask" = { prices = [{ reserve = { default = 5 } }, { reserve = { default = 7 }, since = 2026-03-08 }] }
        "a.list" = { prices = [{ reserve = { default = 1 } }, { units = 2, since = 2026-03-08 }] }
        """,
        "reserving",
    )
    before_ms = at("2026-03-08", "UTC") - 1
    checklists = setup.budget(limit(500), book=book)._account.checklists
    setup.now_ms = before_ms
    keys = iter(map(str, range(100)))
    each = [checklists[call, None, None, ""] for call in calls]
    together = each[0] if len(each) == 1 else checklists.sum_of(each, "")
    charges = charges_of(each, "", "", lambda: next(keys))
    assert all(is_reservation(charge.idempotency_key) for charge in charges)
    setup.now_ms += 1
    _, anew = checklists.priced_at(setup.now_ms, together, charges, lambda: next(keys))
    assert [(one.method, one.units, is_reservation(one.idempotency_key)) for one in anew] == [
        (call, 7 if call == "a.ask" else 2, call == "a.ask") for call in calls
    ]


def test_without_a_calendar_it_changes_at_midnight_utc() -> None:
    book = parse_book(
        """
        api = "x"
        source = "the tests"
        read_on = 2026-11-01
        buckets.units = { quota = 100, resets = "1m" }
        default = { get = 1, other = 1 }
        methods."a.list" = { prices = [{ units = 1 }, { units = 2, since = 2026-03-08 }] }
        """,
        "sliding",
    )
    change_ms = at("2026-03-08", "UTC")
    assert book.price_at("a.list", change_ms - 1) == (book.methods["a.list"][0], (0, change_ms))
    assert book.price_at("a.list", change_ms) == (book.methods["a.list"][1], (change_ms, NEVER))
    assert book.at(change_ms - 1).price("a.list").units == 1


class Away:
    """A ledger that cannot be asked."""

    def __init__(self, ledger: Any) -> None:
        self._ledger = ledger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    def decide(self, request: ChargeRequest, *, commit: bool) -> ChargeResult:
        raise LedgerError("away")

    def repay(self, *args: Any) -> None:
        raise LedgerError("away")


def test_the_allowance_goes_by_the_price_of_the_day_too(setup: Setup, tmp_path: Path) -> None:
    """Also while a debt is owed, whose repaying fails before the ledger is asked anything."""
    allowance = Allowance(str(tmp_path / "allowance.db"), 100, 1_000, lambda: setup.now_ms)
    budget = setup.budget(limit(50_000), allowance=allowance)
    budget._account.ledger = Away(setup.ledger)  # type: ignore[assignment]
    setup.now_ms = CHANGE_MS - 1
    assert budget.charge("videos.list").source == "allowance"
    assert budget.charge(UPLOAD).reason == "ledger-unavailable"
    setup.now_ms = CHANGE_MS + 20_000
    assert [budget.charge(UPLOAD).cost_units, budget.charge(UPLOAD).source] == [100, "allowance"]
    allowance.close()


def test_a_price_that_stands_costs_nothing_to_look_up(setup: Setup) -> None:
    """What one kind of call asks is made once, however often it is asked, and once more when its price changes."""
    setup.now_ms = CHANGE_MS - 10
    asked: list[str] = []
    whole = BOOK.price_at
    budget = setup.budget(limit(50_000))
    budget._account.checklists._book = _Counting(BOOK, asked)  # type: ignore[assignment]
    for setup.now_ms in range(CHANGE_MS - 10, CHANGE_MS + 10):
        budget.peek(UPLOAD)
    assert len(asked) == 2
    assert whole(UPLOAD, CHANGE_MS)[0].units == 100


class _Counting:
    def __init__(self, book: Any, asked: list[str]) -> None:
        self._book, self._asked = book, asked

    def __getattr__(self, name: str) -> Any:
        if name == "price_at":
            self._asked.append(name)
        return getattr(self._book, name)


def test_how_a_budget_stands_goes_by_the_price_of_the_day(setup: Setup) -> None:
    """A limit that counts uploads alone is full as long as the cheapest of them does not fit."""
    budget = setup.budget(limit(2_000, methods=("videos.insert",)))
    setup.now_ms = CHANGE_MS - 10
    budget.charge(UPLOAD)
    assert budget.outlook().room_ms[0] is not None
    setup.now_ms = CHANGE_MS
    assert budget.outlook().room_ms[0] is None


def test_an_exhaustion_closes_the_bucket_that_was_charged(setup: Setup) -> None:
    book = parse_book(
        """
        api = "x"
        source = "the tests"
        read_on = 2026-11-01
        buckets.units = { quota = 100, resets = { calendar = "day", zone = "UTC" } }
        buckets.uploads = { quota = 100, resets = { calendar = "day", zone = "UTC" } }
        default = { get = 1, other = 1 }
        methods."a.add" = { prices = [{ units = 1 }, { units = 1, bucket = "uploads", since = 2099-01-01 }] }
        """,
        "later",
    )
    budget = setup.budget(limit(500, buckets=()), book=book)
    body = b'{"error": {"message": "Spent.", "errors": [{"reason": "quotaExceeded"}]}}'
    Meter(budget).attempt("a.add", "POST").answered(403, body)
    assert [closed.bucket for closed in setup.ledger.notes(setup.project).exhaustions] == ["units"]


def test_a_configuration_is_judged_by_the_prices_of_today(state_dir: Path) -> None:
    """A price of the far future makes no limit too small today."""
    (state_dir.parent / "book.toml").write_text(
        """
        api = "x"
        source = "the tests"
        read_on = 2026-11-01
        buckets.units = { quota = 1_000, resets = { calendar = "day", zone = "UTC" } }
        default = { get = 1, other = 1 }
        methods."a.add" = { prices = [{ units = 1 }, { units = 700, since = 2099-01-01 }] }
        """
    )
    (state_dir.parent / "quota.toml").write_text(
        """
        [credentials.main]
        api = "./book.toml"
        endpoint = "http://127.0.0.1:1"
        limits = [
            { name = "adds", methods = ["a.add"], units = 500, window = "24h" },
            { name = "day", units = 900, window = { calendar = "day", zone = "UTC" } },
        ]
        """
    )
    assert [str(finding) for finding in lint(load_settings()) if "costs" in finding.message] == []


def test_the_cost_book_is_shown_with_the_prices_to_come(state_dir: Path) -> None:
    (state_dir.parent / "book.toml").write_text(
        """
        api = "x"
        source = "the tests"
        read_on = 2026-11-01
        buckets.units = { quota = 1_000, resets = { calendar = "day", zone = "UTC" } }
        default = { get = 1, other = 1 }
        methods."a.add" = { prices = [{ units = 3 }, { units = 700, since = 2099-01-01 }] }
        """
    )
    shown = CliRunner().invoke(cli, ["costs", "--book", "./book.toml"])
    assert "a.add       3  units; 700 units from 2099-01-01" in shown.output
    (method,) = json.loads(CliRunner().invoke(cli, ["costs", "--book", "./book.toml", "--json"]).output)["methods"]
    now, then = ([{"bucket": "units", "units": units}] for units in (3, 700))
    later = {"units": 700, "bucket": "units", "parts": then, "since": "2099-01-01"}
    assert method == {"method": "a.add", "units": 3, "bucket": "units", "parts": now, "next": later}
