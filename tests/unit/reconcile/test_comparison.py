"""Upstream's count beside ours: what only one of them knows, and how long it counts."""

from __future__ import annotations

import pytest

from quota.reconcile.reconcile import Counted, MethodCount, Period, compare
from quota.settings.books import load_book
from quota.terms.limits import HOUR_MS, MINUTE_MS, Calendar

BOOK = load_book("youtube-v3")
PACIFIC = Calendar("day", "America/Los_Angeles")
START = PACIFIC.edges(1_793_000_000_000)[0]
TODAY = Period(START, PACIFIC.edges(START)[1])
NOON = START + 12 * HOUR_MS


def at(minutes: int, units: int, method: str = "videos.list") -> Counted:
    return Counted(START + minutes * MINUTE_MS, units, method)


# Minutes after midnight: (upstream's points, our charges, its newest point) -> (unknown, drift)
ROWS = [
    # Both say the same.
    ([], [], 600, 0, 0),
    ([at(60, 5)], [at(59, 5)], 60, 0, 0),
    # Somebody else.
    ([at(60, 5)], [], 60, 5, 0),
    ([at(60, 5), at(120, 3)], [], 120, 8, 0),
    ([at(60, 5), at(120, 3)], [at(59, 5)], 120, 3, 0),
    # Two methods at one moment are one sum.
    ([at(60, 100, "search.list"), at(60, 5)], [at(59, 100, "search.list")], 60, 5, 0),
    # Ours within the tolerance after a point may be in it, later ones may not.
    ([at(60, 5)], [at(70, 5)], 60, 0, 0),
    ([at(60, 5)], [at(71, 5)], 71, 5, 0),
    # What we charge later explains nothing that upstream had counted before.
    ([at(60, 5), at(300, 5)], [at(200, 5)], 300, 5, 0),
    # Upstream lags: charges shortly before its newest point are no drift, older ones are.
    ([at(60, 5)], [at(30, 5), at(55, 7)], 60, 0, 0),
    ([at(60, 5)], [at(30, 5), at(49, 7)], 60, 0, 7),
    # Both at once: somebody else in the morning, a price too high in the afternoon. Nothing is freed.
    ([at(60, 500), at(600, 1, "search.list")], [at(590, 100, "search.list"), at(580, 900)], 600, 500, 499),
    # The day before is not this day's.
    ([at(0, 50), at(1, 1)], [at(-30, 50)], 60, 1, 0),
    ([at(1, 1)], [at(-5, 1)], 60, 0, 0),
    # A charge after the newest point is not compared.
    ([at(600, 5)], [at(599, 5), at(735, 900)], 720, 0, 0),
]


@pytest.mark.parametrize(("upstream", "ours", "newest", "unknown", "drift"), ROWS)
def test_units_that_only_one_side_counted_are_reported(
    upstream: list[Counted], ours: list[Counted], newest: int, unknown: int, drift: int
) -> None:
    ours, newest_ms = sorted(ours), START + newest * MINUTE_MS
    count = compare("units", TODAY, newest_ms, upstream, ours, BOOK, newest_ms)
    assert (count.unknown_units, count.drift_units) == (unknown, drift)
    assert count.upstream_units == sum(counted.units for counted in upstream if counted.at_ms > START)
    assert count.our_units == sum(
        counted.units for counted in ours if START <= counted.at_ms <= START + newest * MINUTE_MS
    )


def test_a_charge_of_the_last_minutes_before_the_newest_point_is_drift_once_that_is_old() -> None:
    ours = [at(590, 5), at(599, 7)]
    for later, drift, near in ((0, 0, 12), (9, 0, 7), (10, 7, 0), (600, 7, 0)):
        now_ms = START + (599 + later) * MINUTE_MS
        count = compare("units", TODAY, START + 600 * MINUTE_MS, [at(600, 5)], ours, BOOK, now_ms)
        assert (count.drift_units, count.near_units) == (drift, near), later


def test_a_wrong_price_is_reported_with_upstreams_cost() -> None:
    ours = [at(30 + n, 100, "search.list") for n in range(10)]
    count = compare("units", TODAY, NOON, [at(60, 10, "search.list")], ours, BOOK, NOON)
    (row,) = count.methods
    assert row == MethodCount("search.list", 10, 1_000, 10, 100, 1)
    assert count.drift_units == 990


def test_a_refunded_charge_is_no_call() -> None:
    count = compare("units", TODAY, NOON, [at(60, 2)], [at(58, 0), at(59, 1), at(59, 1)], BOOK, NOON)
    assert [(row.our_calls, row.upstream_price_units) for row in count.methods] == [(2, None)]
