"""What a call costs and what each limit may hold for it, row by row: each border of a grant, a price and a cap."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import TYPE_CHECKING

import pytest

from quota.common.clock import NEVER
from quota.deciding.checklist import (
    MAX_CHARGE_UNITS,
    MAX_KEPT,
    Checklists,
    Grants,
    Together,
    believed,
    cap,
    charge_units,
    granted_units,
    lowers,
)
from quota.errors import CostExceedsLimit, UsageError
from quota.ledger.entry import Charge
from quota.ledger.grants import Grant, grants_text
from quota.terms.costs import Bucket, CostBook, Part, Price, Quota
from quota.terms.limits import DAY_MS, HOUR_MS, Calendar, Limit, Selector, Sliding, View

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quota.terms.limits import Window

MIDNIGHT = int(datetime(2026, 7, 1, tzinfo=UTC).timestamp()) * 1000
NEXT_MIDNIGHT = MIDNIGHT + DAY_MS
DAY = Calendar("day", "UTC")
UNITS = Selector(buckets=("units",))

BOOK = CostBook(
    name="test-v1",
    api="test",
    source="https://test.example",
    read_on=date(2026, 6, 1),
    retention_ms=None,
    buckets={"units": Bucket("units", (Quota(1_000, DAY),)), "search": Bucket("search", (Quota(100, DAY),))},
    methods={
        "items.find": (Price((Part("search", 1),), date(2026, 1, 1)),),
        "items.list": (Price((Part("units", 1),), date(2026, 1, 1)),),
        "items.insert": (Price((Part("units", 50),), date(2026, 1, 1)), Price((Part("units", 60),), date(2026, 7, 2))),
    },
    default_get=Price((Part("units", 1),), date(2026, 1, 1)),
    default_other=Price((Part("units", 50),), date(2026, 1, 1)),
    pools=(),
)


def limit(
    units: int = 1_000,
    window: Window = DAY,
    selector: Selector = UNITS,
    *,
    headroom: int = 0,
    paced: bool = False,
    name: str = "day",
) -> Limit:
    return Limit(name, units, View(selector, window), 10_000, headroom, paced)


def checklists(
    *limits: Limit, leave: Mapping[str, Mapping[str, int]] | None = None, now_ms: int = MIDNIGHT
) -> Checklists:
    return Checklists("main", BOOK, limits, leave or {}, lambda: now_ms)


# -- what upstream grants ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "units"),
    [
        # A grant lowers a limit on its bucket, less the limit's headroom, down to nothing.
        (limit(), 300),
        (limit(headroom=1), 299),
        (limit(headroom=299), 1),
        (limit(headroom=300), 0),
        (limit(headroom=301), 0),
        # It says nothing about other buckets, about several or all, or about calls.
        (limit(selector=Selector(buckets=("search",))), None),
        (limit(selector=Selector(buckets=("units", "search"))), None),
        (limit(selector=Selector()), None),
        (limit(selector=Selector(buckets=("units",), count="calls")), None),
        (limit(selector=Selector(buckets=("units",), methods=("items.list",))), 300),
        # Nor about windows that are longer than the longest day.
        (limit(window=Sliding(1)), 300),
        (limit(window=Sliding(25 * HOUR_MS)), 300),
        (limit(window=Sliding(25 * HOUR_MS + 1)), None),
        (limit(window=Calendar("hour", "UTC")), 300),
        (limit(window=Calendar("month", "UTC")), None),
    ],
)
def test_a_grant_lowers_a_limit_of_its_bucket_alone(one: Limit, units: int | None) -> None:
    assert granted_units(one, {"units": 300}) == units
    assert granted_units(one, {"others": 300}) is None


@pytest.mark.parametrize(("headroom", "lowered"), [(0, False), (1, True)])
def test_a_grant_of_what_a_limit_holds_lowers_nothing(headroom: int, lowered: bool) -> None:
    held = limit(headroom=headroom)
    assert lowers([held], "units", held.limit_units) is lowered


def test_grants_are_believed_until_the_first_of_them_ends() -> None:
    first, later = Grant("search", 10, MIDNIGHT, MIDNIGHT + 5), Grant("units", 300, MIDNIGHT, MIDNIGHT + 9)
    text = grants_text([first, later])
    both, one = {"search": 10, "units": 300}, {"units": 300}
    for now_ms, units, since_ms, until_ms in (
        (MIDNIGHT - DAY_MS - 1, {}, 0, MIDNIGHT - DAY_MS),
        (MIDNIGHT - DAY_MS, both, MIDNIGHT - DAY_MS, MIDNIGHT + 5),
        (MIDNIGHT + 4, both, MIDNIGHT - DAY_MS, MIDNIGHT + 5),
        (MIDNIGHT + 5, one, MIDNIGHT + 5, MIDNIGHT + 9),
        (MIDNIGHT + 8, one, MIDNIGHT + 5, MIDNIGHT + 9),
        (MIDNIGHT + 9, {}, MIDNIGHT + 9, NEVER),
    ):
        assert believed(text, now_ms) == Grants(text, units, since_ms, until_ms)


# -- the number enforced -----------------------------------------------------------------------------------------------

NOON = MIDNIGHT + DAY_MS // 2
PACED = limit(2_400, paced=True)
"""An eighth ahead of an even spending: 300 at midnight, 1,500 at noon, all of it from 21:00 on."""


@pytest.mark.parametrize(
    ("one", "leave", "cost", "now_ms", "granted", "units"),
    [
        # What the job leaves to others is not its own.
        (limit(), 0, 1, NOON, {}, 1_000),
        (limit(), 999, 1, NOON, {}, 1),
        (limit(), 1_000, 1, NOON, {}, 0),
        (limit(), 1_001, 1, NOON, {}, 0),
        # A grant lowers the limit and never raises it. The job leaves its part of what is left.
        (limit(), 0, 1, NOON, {"units": 999}, 999),
        (limit(), 0, 1, NOON, {"units": 1_001}, 1_000),
        (limit(), 100, 1, NOON, {"units": 900}, 800),
        (limit(headroom=5), 0, 1, NOON, {"units": 5}, 0),
        (limit(), 0, 1, NOON, {"search": 1}, 1_000),
        # A pace gives so much by now, at least one call, and never more than all.
        (PACED, 0, 1, MIDNIGHT, {}, 300),
        (PACED, 0, 1, NOON, {}, 1_500),
        (PACED, 0, 1, NEXT_MIDNIGHT - 1, {}, 2_400),
        (PACED, 0, 300, MIDNIGHT, {}, 300),
        (PACED, 0, 301, MIDNIGHT, {}, 301),
        (PACED, 0, 2_401, MIDNIGHT, {}, 2_400),
        (PACED, 1_200, 1, NOON, {}, 750),
        (PACED, 0, 1, NOON, {"units": 240}, 150),
        (limit(7, paced=True), 0, 0, MIDNIGHT, {}, 1),
        # Without a time the pace does not count.
        (PACED, 0, 1, None, {}, 2_400),
        (PACED, 400, 1, None, {"units": 2_000}, 1_600),
    ],
)
def test_the_number_enforced_is_what_grants_leaving_and_pace_make_of_a_limit(
    one: Limit, leave: int, cost: int, now_ms: int | None, granted: Mapping[str, int], units: int
) -> None:
    assert cap(one, leave, cost, now_ms, granted) == units


# -- what a call costs -------------------------------------------------------------------------------------------------


def test_a_call_that_costs_as_much_as_a_limit_holds_fits_and_a_unit_more_never_does() -> None:
    made = checklists(limit(100), leave={"backfill": {"day": 40}})
    for units, job in ((100, ""), (60, "backfill")):
        assert made["items.list", units, None, job].costs == (units,)
        with pytest.raises(
            CostExceedsLimit, match="it can never fit; raise the limit or make a cheaper call"
        ) as raised:
            made.make(("items.list", units + 1, None, job))
        assert ("after leaving 40:" in str(raised.value)) == ("after leaving" in str(raised.value)) == bool(job)


def test_calls_together_fit_as_one_that_costs_their_sum() -> None:
    made = checklists(limit(100), limit(5, selector=Selector(count="calls"), name="calls"))
    one, other = made["items.list", 20, None, ""], made["items.insert", 40, None, ""]
    together = made.sum_of([one, other, one, one], "")
    assert (together.method, together.units, together.costs) == ("items.list", 100, (100, 4))
    assert together.closed_by == ("units",)
    assert made.sum_of([other], "").method == "items.insert"
    assert made.sum_of([one] * 5, "").costs == (100, 5)
    with pytest.raises(CostExceedsLimit, match="5 calls together cost 120 units and limit 'day'"):
        made.sum_of([one, other, one, one, one], "")
    cheap = made["items.list", 1, None, ""]
    with pytest.raises(CostExceedsLimit, match="6 calls together cost 6 calls and limit 'calls'"):
        made.sum_of([cheap] * 6, "")


def test_a_call_has_ten_buckets_at_most() -> None:
    parts = tuple([Part(f"bucket-{n}", 1) for n in range(11)])
    made = checklists(limit(100))
    assert made.make(("items.list", None, parts[:10], "")).parts == parts[:10]
    with pytest.raises(UsageError, match="charged to 11 buckets, and a call to 10 at most"):
        made.make(("items.list", None, parts, ""))


def test_former_calls_together_cost_what_is_known_of_each_limit() -> None:
    made = checklists(limit(100), limit(100, selector=Selector(buckets=("search",)), name="search"))
    former = made.of_former("items.list", 100, "", Together(2, {}, None))
    assert (former.costs, former.closed_by, former.priced) == ((100,), ("units",), (0, NEVER))
    assert made.of_former("items.list", 100, "", Together(2, {}, "search")).closed_by == ("units", "search")
    assert checklists(limit(1)).of_former("items.list", 1, "", Together(2, {}, None)).costs == (1,)
    assert made.of_former("items.list", 100, "", Together(2, {"day": 90, "search": 10}, None)).costs == (90, 10)
    with pytest.raises(CostExceedsLimit, match="2 calls together cost 101 units"):
        made.of_former("items.list", 100, "", Together(2, {"search": 101}, None))


def test_a_call_is_charged_to_the_bucket_it_is_given_or_priced_in_else_to_the_main_one() -> None:
    made = checklists(limit(), limit(selector=Selector(buckets=("search",)), name="search"))
    for kind, bucket, units in (
        (("items.find", None, None, ""), "search", 1),
        (("items.find", 5, None, ""), "search", 5),
        (("x", None, (Part("search", 5),), ""), "search", 5),
        (("x", 5, None, ""), "units", 5),
    ):
        one = made[kind]
        assert (one.parts, one.units, one.priced) == ((Part(bucket, units),), units, (0, NEVER))
        assert [x.view.selector.buckets for x in one.limits] == [(bucket,)]
    with pytest.raises(UsageError, match="method"):
        made.make(("", 5, None, ""))


def test_a_look_asks_for_the_cheapest_call_and_is_kept_for_its_book_and_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quota.deciding.checklist._looks", {})  # else it may be full, and is emptied meanwhile
    limits = (limit(),)
    one, same = (Checklists("main", BOOK, limits, {}, lambda: NOON) for _ in range(2))
    other = checklists(limit(2_000))
    look = one.of_a_look()
    assert (look.units, look.costs, look.parts) == (1, (1,), (Part("units", 1),))
    assert same.of_a_look() is look
    assert other.of_a_look() is not look
    assert other.of_a_look().caps == (2_000,)
    dearer = Checklists("main", BOOK._replace(methods={}, default_get=BOOK.default_other), limits, {}, lambda: NOON)
    assert dearer.of_a_look().units == 50
    assert one.of_a_look() is look


@pytest.mark.parametrize(
    ("units", "fits"), [(0, False), (1, True), (MAX_CHARGE_UNITS, True), (MAX_CHARGE_UNITS + 1, False)]
)
def test_a_charge_is_of_one_unit_up_to_the_most(units: int, fits: bool) -> None:
    if fits:
        assert charge_units(units) == units
    else:
        with pytest.raises(UsageError, match="units: a charge is a whole number from 1 to 1,000,000,000"):
            charge_units(units)


def test_a_checklist_is_kept_for_the_next_call_of_its_kind_up_to_so_many() -> None:
    made = checklists(limit(10_000))
    kept = [made["items.list", units, None, ""] for units in range(1, MAX_KEPT + 1)]
    assert all(made["items.list", units, None, ""] is one for units, one in enumerate(kept, 1))
    further = made["items.list", MAX_KEPT + 1, None, ""]
    assert made["items.list", MAX_KEPT + 1, None, ""] is not further
    assert len(made) == MAX_KEPT


# -- when it holds -----------------------------------------------------------------------------------------------------


def test_a_price_holds_from_its_midnight_until_before_the_next_one() -> None:
    """50 units until 2026-07-02, then 60."""
    now_ms = MIDNIGHT
    made = Checklists("main", BOOK, (limit(window=Sliding(1)),), {}, lambda: now_ms)
    old, charges = made["items.insert", None, None, "job"], (Charge(50, "units", "items.insert", "job", "DE", "key"),)
    assert (old.units, old.priced) == (50, (0, NEXT_MIDNIGHT))
    known = old.checks_at(now_ms)
    assert old.checks == (0, NEXT_MIDNIGHT, known)
    for at_ms in (0, NEXT_MIDNIGHT - 1):
        assert made.priced_at(at_ms, old, charges, lambda: "anew") == (old, charges)
    now_ms = NEXT_MIDNIGHT
    new, (charge,) = made.priced_at(now_ms, old, charges, lambda: "anew")
    assert (new.units, new.priced, new) == (60, (NEXT_MIDNIGHT, NEVER), made["items.insert", None, None, "job"])
    assert charge == (60, "units", "items.insert", "job", "DE", "anew")
    now_ms = NEXT_MIDNIGHT - 1
    assert made.priced_at(now_ms, new, (charge,), lambda: "key")[1] == charges


def test_calls_together_are_priced_anew_together() -> None:
    now_ms = MIDNIGHT
    made = Checklists("main", BOOK, (limit(),), {}, lambda: now_ms)
    each = [made["items.insert", None, None, ""], made["items.list", None, None, ""]]
    charges = tuple(Charge(one.units, "units", one.method, "", "", "key") for one in each)
    now_ms = NEXT_MIDNIGHT
    together, priced = made.priced_at(now_ms, made.sum_of(each, ""), charges, lambda: "anew")
    assert (together.units, together.priced) == (61, (NEXT_MIDNIGHT, NEVER))
    assert [charge.units for charge in priced] == [60, 1]


def test_calls_together_have_a_price_while_each_of_them_has() -> None:
    made = checklists(limit())
    old, always = made["items.insert", None, None, ""], made["items.list", None, None, ""]
    assert made.sum_of([always, old], "").priced == (0, NEXT_MIDNIGHT)
    later = checklists(limit(), now_ms=NEXT_MIDNIGHT)["items.insert", None, None, ""]
    assert made.sum_of([always, later], "").priced == (NEXT_MIDNIGHT, NEVER)


def test_checks_hold_until_the_next_edge_of_any_limit() -> None:
    made = checklists(limit(), limit(window=Calendar("hour", "UTC"), name="hour"), limit(window=Sliding(1), name="ms"))
    one = made["items.list", None, None, ""]
    at_midnight = one.checks_at(MIDNIGHT)
    assert [check.edges and check.edges[0] for check in at_midnight] == [MIDNIGHT, MIDNIGHT, None]
    assert one.checks == (MIDNIGHT, MIDNIGHT + HOUR_MS, at_midnight)
    an_hour_later = one.checks_at(MIDNIGHT + HOUR_MS)
    assert [check.edges and check.edges[0] for check in an_hour_later] == [MIDNIGHT, MIDNIGHT + HOUR_MS, None]
    assert one.checks == (MIDNIGHT + HOUR_MS, MIDNIGHT + 2 * HOUR_MS, an_hour_later)
    assert one.checks_at(MIDNIGHT + HOUR_MS - 1) == at_midnight, "the clock went back"


def test_checks_of_a_paced_limit_are_made_for_each_moment() -> None:
    one = checklists(limit(2_400, paced=True))["items.list", None, None, ""]
    assert [one.checks_at(now_ms)[0].cap_units for now_ms in (NOON, NOON + HOUR_MS, NOON)] == [1_500, 1_600, 1_500]
    assert one.checks == (0, 0, ())


def test_grants_take_the_place_of_others_in_what_is_kept() -> None:
    made = checklists(limit(), leave={"backfill": {"day": 100}})
    before = made["items.list", None, None, "backfill"]
    assert before.checks_at(MIDNIGHT)[0].cap_units == 900
    after = made.with_grants(before, Grants("text", {"units": 300}, until_ms=MIDNIGHT + 5))
    assert made["items.list", None, None, "backfill"] is after
    assert after.checks_at(MIDNIGHT)[0].cap_units == 200
    assert after.checks[:2] == (MIDNIGHT, MIDNIGHT + 5)
    assert before.checks_at(MIDNIGHT)[0].cap_units == 900
