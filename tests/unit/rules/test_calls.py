"""What a call costs and what each limit may hold for it, row by row: each border of a grant, a price and a cap."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime
from itertools import count

import pytest

from quota.common.clock import NEVER
from quota.errors import CostExceedsLimit, UsageError
from quota.rules.calls import (
    ALWAYS,
    CONFIRM_MS,
    MAX_KEPT,
    Checklist,
    Checklists,
    cap,
    charge_units,
    charges_of,
    granted_units,
    lowers,
    wanted_grants,
)
from quota.rules.entry import START, Entry
from quota.rules.facts import Grant
from quota.terms.api import Reserve
from quota.terms.costs import Bucket, CostBook, Part, Price, Quota
from quota.terms.limits import DAY_MS, HOUR_MS, MAX_UNITS, Calendar, Limit, Selector, Sliding, View, Window

MIDNIGHT = int(datetime(2026, 7, 1, tzinfo=UTC).timestamp()) * 1000
NEXT_MIDNIGHT = MIDNIGHT + DAY_MS
NOON = MIDNIGHT + DAY_MS // 2
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
        "items.both": (Price((Part("units", 3), Part("search", 1)), date(2026, 1, 1)),),
        "items.insert": (
            Price((Part("units", 50),)),
            Price((Part("units", 60, Reserve(60)),), date(2026, 7, 2)),
            Price((Part("search", 1),), date(2026, 7, 3)),
        ),
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
    shadow: bool = False,
    name: str = "day",
) -> Limit:
    return Limit(name, units, View(selector, window), 10_000, headroom, paced, shadow=shadow)


SEARCH = limit(selector=Selector(buckets=("search",)), name="search")


def checklists(
    *limits: Limit, leave: Mapping[str, Mapping[str, int]] | None = None, now_ms: int = MIDNIGHT
) -> Checklists:
    return Checklists("main", BOOK, limits, leave or {}, lambda: now_ms)


def costs(made: Checklist) -> tuple[int, ...]:
    return tuple(check.cost_units for check in made.checks)


@pytest.mark.parametrize(
    ("held", "units"),
    [
        # A grant lowers a limit on its bucket, less the limit's headroom, down to nothing.
        (limit(), 300),
        (limit(headroom=1), 299),
        (limit(headroom=300), 0),
        # It says nothing about other buckets, about several or all, or about calls.
        (SEARCH, None),
        (limit(selector=Selector(buckets=("units", "search"))), None),
        (limit(selector=Selector(buckets=("units",), count="calls")), None),
        (limit(selector=Selector(buckets=("units",), methods=("items.list",))), 300),
        # Nor about windows that are longer than the longest day.
        (limit(window=Sliding(25 * HOUR_MS)), 300),
        (limit(window=Sliding(25 * HOUR_MS + 1)), None),
        (limit(window=Calendar("month", "UTC")), None),
    ],
)
def test_a_grant_lowers_a_limit_of_its_bucket_alone(held: Limit, units: int | None) -> None:
    assert granted_units(held, {"units": 300}) == units
    assert granted_units(held, {"others": 300}) is None


@pytest.mark.parametrize(("headroom", "lowered"), [(0, False), (1, True)])
def test_a_grant_of_what_a_limit_holds_lowers_nothing(headroom: int, lowered: bool) -> None:
    held = limit(headroom=headroom)
    assert lowers([held], "units", held.limit_units) is lowered


@pytest.mark.parametrize(
    ("heard", "standing", "wanted"),
    [
        # A grant that lowers a limit is remembered, any other is not.
        ({"units": 300}, (), (Grant("units", 300, NOON, NOON + DAY_MS),)),
        ({"units": 1_000}, (), ()),
        # One that lowers nothing any more is forgotten.
        ({"units": 1_000}, (Grant("units", 300, NOON - 1, NEXT_MIDNIGHT),), ()),
        # What upstream does not speak of stands for as long as it is believed.
        ({}, (Grant("units", 300, NOON - 1, NOON + 1),), (Grant("units", 300, NOON - 1, NOON + 1),)),
        ({}, (Grant("units", 300, NOON - 1, NOON),), ()),
        # The same number is not written again for a day.
        (
            {"units": 300},
            (Grant("units", 300, NOON - CONFIRM_MS + 1, NEXT_MIDNIGHT),),
            (Grant("units", 300, NOON - CONFIRM_MS + 1, NEXT_MIDNIGHT),),
        ),
        (
            {"units": 300},
            (Grant("units", 300, NOON - CONFIRM_MS, NEXT_MIDNIGHT),),
            (Grant("units", 300, NOON, NOON + DAY_MS),),
        ),
        ({"units": 301}, (Grant("units", 300, NOON - 1, NEXT_MIDNIGHT),), (Grant("units", 301, NOON, NOON + DAY_MS),)),
    ],
)
def test_the_right_grants_are_kept(
    heard: Mapping[str, int], standing: tuple[Grant, ...], wanted: tuple[Grant, ...]
) -> None:
    assert wanted_grants([limit()], heard, standing, NOON, DAY_MS) == wanted


PACED = limit(2_400, paced=True)
"""An eighth ahead of an even spending: 300 at midnight, 1,500 at noon, all of it from 21:00 on."""


@pytest.mark.parametrize(
    ("held", "leave", "cost", "now_ms", "granted", "units"),
    [
        # What the job leaves to others is not its own.
        (limit(), 0, 1, NOON, {}, 1_000),
        (limit(), 1_000, 1, NOON, {}, 0),
        # A grant lowers the limit and never raises it. The job leaves its part of what is left.
        (limit(), 0, 1, NOON, {"units": 999}, 999),
        (limit(), 0, 1, NOON, {"units": 1_001}, 1_000),
        (limit(), 100, 1, NOON, {"units": 900}, 800),
        (limit(), 0, 1, NOON, {"search": 1}, 1_000),
        # A pace gives so much by now, at least one call, and never more than all.
        (PACED, 0, 1, MIDNIGHT, {}, 300),
        (PACED, 0, 1, NOON, {}, 1_500),
        (PACED, 0, 301, MIDNIGHT, {}, 301),
        (PACED, 0, 2_401, MIDNIGHT, {}, 2_400),
        (PACED, 1_200, 1, NOON, {}, 750),
        (PACED, 0, 1, NOON, {"units": 240}, 150),
        (limit(7, paced=True), 0, 0, MIDNIGHT, {}, 1),
        # Without a time the pace does not count.
        (PACED, 400, 1, None, {"units": 2_000}, 1_600),
    ],
)
def test_the_number_enforced_is_what_grants_leaving_and_pace_make_of_a_limit(
    held: Limit, leave: int, cost: int, now_ms: int | None, granted: Mapping[str, int], units: int
) -> None:
    assert cap(held, leave, cost, now_ms, granted) == units
    made = checklists(held, leave={"job": {"day": leave}}).of("items.list", (), {held: cost}, "job")
    assert made.caps_at(now_ms, granted) == (units,), "`leave` did not lower the limit of a decision"


def test_a_call_that_costs_as_much_as_a_limit_holds_fits_and_a_unit_more_never_does() -> None:
    made = checklists(limit(100), leave={"backfill": {"day": 40}})
    for units, job in ((100, ""), (60, "backfill")):
        assert costs(made["items.list", units, None, job]) == (units,)
        with pytest.raises(CostExceedsLimit, match="can never fit; raise the limit or make a cheaper call") as raised:
            made.make(("items.list", units + 1, None, job))
        assert ("after leaving 40:" in str(raised.value)) == ("after leaving" in str(raised.value)) == bool(job)
    with pytest.raises(CostExceedsLimit, match="holds 0 after leaving 102:"):
        checklists(limit(100), leave={"backfill": {"day": 102}}).make(("items.list", 1, None, "backfill"))
    assert checklists(limit(100, shadow=True))["items.list", 101, None, ""].checks, "more than a shadow limit holds"


def test_calls_together_fit_as_one_that_costs_their_sum() -> None:
    made = checklists(limit(100), limit(5, selector=Selector(count="calls"), name="calls"))
    cheap, dear = made["items.list", 20, None, ""], made["items.insert", 40, None, ""]
    together = made.sum_of([cheap, dear, cheap, cheap], "")
    assert (together.method, together.units, costs(together)) == ("items.list", 100, (100, 4))
    assert (together.closed_by, together.calls) == (("units",), (cheap, dear, cheap, cheap))
    with pytest.raises(
        CostExceedsLimit, match=r"5 calls together cost 120 units and limit 'day' .* make fewer calls at once"
    ):
        made.sum_of([cheap, dear, cheap, cheap, cheap], "")
    cheapest = made["items.list", 1, None, ""]
    assert costs(made.sum_of([cheapest] * 5, "")) == (5, 5)
    with pytest.raises(CostExceedsLimit, match="6 calls together cost 6 calls and limit 'calls'"):
        made.sum_of([cheapest] * 6, "")


def test_a_call_has_ten_buckets_at_most() -> None:
    parts = tuple([Part(f"bucket-{n}", 1) for n in range(11)])
    made = checklists(limit(100))
    assert made.make(("items.list", None, parts[:10], "")).parts == parts[:10]
    with pytest.raises(UsageError, match="charges in 11 buckets; the most is 10"):
        made.make(("items.list", None, parts, ""))


def test_a_checklist_of_former_calls_uses_their_recorded_costs() -> None:
    made = checklists(limit(100), limit(100, selector=SEARCH.view.selector, name="search"))
    former = made.of_former("items.list", 100, "", 2, {}, None)
    assert (costs(former), former.closed_by, former.priced) == ((100,), ("units",), ALWAYS)
    assert made.of_former("items.list", 100, "", 2, {}, "search").closed_by == ("units", "search")
    assert costs(made.of_former("items.list", 100, "", 2, {"day": 90, "search": 10}, None)) == (90, 10)
    book = BOOK._replace(default_get=BOOK.methods["items.find"][0])
    unnamed = Checklists("main", book, made.shown, {}, lambda: NOON).of_former("GET **", 7, "", 1, {}, None)
    assert (unnamed.parts, unnamed.closed_by) == ((Part("search", 7),), ("search",))
    with pytest.raises(CostExceedsLimit, match="2 calls together cost 101 units"):
        made.of_former("items.list", 100, "", 2, {"search": 101}, None)


@pytest.mark.parametrize(
    ("kind", "bucket", "units"),
    [
        (("items.find", None, None, ""), "search", 1),
        (("items.find", 5, None, ""), "search", 5),
        (("x", None, (Part("search", 5),), ""), "search", 5),
        (("x", 5, None, ""), "units", 5),
    ],
)
def test_a_call_is_charged_to_the_bucket_it_is_given_or_priced_in_else_to_the_main_one(
    kind: tuple[str, int | None, tuple[Part, ...] | None, str], bucket: str, units: int
) -> None:
    made = checklists(limit(), SEARCH)[kind]
    assert (made.parts, made.units, made.priced) == ((Part(bucket, units),), units, ALWAYS)
    assert [check.limit.view.selector.buckets for check in made.checks] == [(bucket,)]


def test_a_limit_counts_of_a_call_the_buckets_that_it_selects() -> None:
    everything = limit(selector=Selector(), name="all")
    calls = limit(selector=Selector(count="calls"), name="calls")
    others = limit(selector=Selector(jobs=("other",)), name="others")
    made = checklists(limit(), SEARCH, everything, calls, others)["items.both", None, None, "job"]
    costs = {check.limit.name: check.cost_units for check in made.checks}
    assert costs == {"day": 3, "search": 1, "all": 4, "calls": 2}
    assert made.closed_by == ("units", "search")


def test_a_look_asks_for_the_cheapest_call() -> None:
    look = checklists(limit(2_000)).of_a_look()
    assert (look.units, costs(look), look.parts, look.checks[0].cap_units) == (1, (1,), (Part("units", 1),), 2_000)
    dearer = BOOK._replace(methods={}, default_get=BOOK.default_other)
    assert Checklists("main", dearer, (limit(),), {}, lambda: NOON).of_a_look().units == 50


@pytest.mark.parametrize(("units", "fits"), [(0, False), (1, True), (MAX_UNITS, True), (MAX_UNITS + 1, False)])
def test_a_charge_is_of_one_unit_up_to_the_most(units: int, fits: bool) -> None:
    if fits:
        assert charge_units(units) == units
    else:
        with pytest.raises(CostExceedsLimit if units else UsageError, match="a charge is a whole number from 1 to"):
            charge_units(units)


def test_a_checklist_is_kept_for_the_next_call_of_its_kind_up_to_so_many() -> None:
    made = checklists(limit(10_000))
    kept = [made["items.list", units, None, ""] for units in range(1, MAX_KEPT + 1)]
    assert all(made["items.list", units, None, ""] is checklist for units, checklist in enumerate(kept, 1))
    assert made["items.list", MAX_KEPT + 1, None, ""] is not made["items.list", MAX_KEPT + 1, None, ""]
    assert len(made.kept) == MAX_KEPT


def test_a_price_holds_from_its_midnight_until_before_the_next_one() -> None:
    """50 units until 2026-07-02, then 60 that are reserved for a day, then one of another bucket."""
    now_ms, last_ms = MIDNIGHT, NEXT_MIDNIGHT + DAY_MS
    made = Checklists("main", BOOK, (limit(),), {}, lambda: now_ms)
    kind = "items.insert", None, None, "job"
    before = made[kind]
    assert (before.units, before.priced) == (50, (0, NEXT_MIDNIGHT))
    now_ms = NEXT_MIDNIGHT - 1
    assert made[kind] is before
    now_ms = NEXT_MIDNIGHT
    after = made[kind]
    assert (after.units, made.least_reserved("items.insert"), after.priced) == (60, 60, (NEXT_MIDNIGHT, last_ms))
    assert made[kind] is after
    now_ms = last_ms
    assert (made[kind].parts, made[kind].priced) == ((Part("search", 1),), (last_ms, NEVER))
    now_ms = -1
    assert (made[kind].units, made.least_reserved("items.insert")) == (50, None), "the clock went back, to before 1970"


def test_each_call_is_charged_under_a_key_of_its_own_and_each_further_bucket_under_that_and_a_number() -> None:
    made, numbers = checklists(limit(), SEARCH), count()
    both, free, cheap = made["items.both", None, None, ""], made["free", None, (), ""], made["x", 2, None, ""]
    charges = charges_of([both, free, cheap], "job", "DE", lambda: f"k{next(numbers)}")
    assert charges == (
        Entry(START, 3, "units", "items.both", "job", "DE", "k0"),
        Entry(START, 1, "search", "items.both", "job", "DE", "k0+1"),
        Entry(START, 2, "units", "x", "job", "DE", "k1"),
    )
    reserved = charges_of([both], "job", "DE", lambda: "k", reserved=True)
    assert [charge.key for charge in reserved] == ["k~", "k~+1"]
