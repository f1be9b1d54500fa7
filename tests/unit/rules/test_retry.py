"""When a call fits again, row by row: as charges leave, at the edges of calendars, and as a pace gives more."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

import pytest

from quota.common.clock import NEVER
from quota.rules.entry import Entry, Others
from quota.rules.retry import LimitAtCall, retry_at, room_at
from quota.rules.total import total_of
from quota.terms.limits import DAY_MS, HOUR_MS, Calendar, Limit, Selector, Sliding, View, Window

MIDNIGHT = int(datetime(2026, 7, 1, tzinfo=UTC).timestamp()) * 1000


def at(hour: float, day: int = 0) -> int:
    return MIDNIGHT + day * DAY_MS + round(hour * HOUR_MS)


NOW = at(14)
EDGE = at(0, day=1)

Charges = tuple[tuple[int, int], ...]
"""When, and how many units."""

Heard = tuple[tuple[str, int, int], ...]
"""What others used: under which name, until when, and how many units."""

FIVE: Charges = tuple((at(hour), 100) for hour in (9, 10, 11, 12, 13))


def limit(window: Window, *, paced: bool = False) -> Limit:
    return Limit("limit", 10_000, View(Selector(), window), 10_000, 0, paced)


SLIDING = limit(Sliding(DAY_MS))
CALENDAR = limit(Calendar("day", "UTC"))
PACED = limit(Calendar("day", "UTC"), paced=True)


class Totals:
    """The totals of all views over one log, all of it read."""

    def __init__(self, charges: Charges, others: Heard = (), now_ms: int = NOW) -> None:
        self.now_ms = now_ms
        self.entries = [Entry((ms, n), units, "units", "m", "", "", f"{n}") for n, (ms, units) in enumerate(charges)]
        self.entries += [
            Entry((now_ms, 100 + n), units, "units", "", "", "", f"o{n}", "others", name, (0, until_ms))
            for n, (name, until_ms, units) in enumerate(others)
        ]
        self.entries.sort()

    def used_units(self, view: View) -> int:
        return total_of(view, self.entries, self.now_ms).used_units

    def frees_at_ms(self, view: View, units: int) -> int | None:
        return total_of(view, self.entries, self.now_ms).frees_at_ms(units)

    def used_after(self, view: View, at_ms: int) -> int:
        used_units = total_of(view, self.entries, self.now_ms).used_after(at_ms)
        assert used_units is not None
        return used_units

    def others(self, view: View) -> list[Others]:
        total = total_of(view, self.entries, self.now_ms)
        return total.others_after(total.at_ms)


class Row(NamedTuple):
    says: str
    room_ms: int
    limit: Limit = SLIDING
    cost: int = 100
    cap: int = 500
    charges: Charges = FIVE
    others: Heard = ()
    now_ms: int = NOW
    from_ms: int = 0

    def totals(self) -> Totals:
        return Totals(self.charges, self.others, self.now_ms)

    def at_call(self, *, refuses: bool = True) -> LimitAtCall:
        return LimitAtCall(self.limit, self.cap, self.cost, self.totals().used_units(self.limit.view), refuses)


SLIDES = [
    # The charges leave one by one, each 24 h after it came, until enough has left and no sooner.
    Row("the first of five has left", at(9, day=1)),
    Row("two of five have left", at(10, day=1), cost=200),
    Row("a unit more needs a third", at(11, day=1), cost=201),
    Row("all five have left", at(13, day=1), cost=500),
    Row("a unit less is free", at(10, day=1), cost=201, cap=600),
    Row("it costs more than the cap", NEVER, cost=501),
    # The window is open at its start: what came exactly 24 h ago has left.
    Row("a charge came 24 h less 1 ms ago", NOW + 1, charges=((NOW - DAY_MS + 1, 100), *FIVE), cap=600),
    Row("all is dated ahead", at(15, day=1), charges=((at(15), 500),)),
    # Never before the time that was asked for.
    Row("room was there before", at(9, day=1) + 1, from_ms=at(9, day=1) + 1),
    # What others used counts until before its end.
    Row("others end between two charges", at(9.5, day=1), cap=600, cost=200, others=(("a", at(9.5, day=1), 100),)),
    Row("others and a charge leave at once", at(9, day=1), cap=600, cost=200, others=(("a", at(9, day=1), 100),)),
    Row("of one name the smaller leaves first", at(17), cap=700, others=(("a", at(16), 100), ("a", at(17), 200))),
]

CALENDARS = [
    Row("everything leaves at the edge", EDGE, CALENDAR, cost=500),
    Row("asked for at the edge", EDGE, CALENDAR, from_ms=EDGE),
    Row("a unit is missing", EDGE, CALENDAR, cap=599),
    # Charges dated behind the edge, by a clock that went back, count there.
    Row("what is dated behind the edge leaves room", EDGE, CALENDAR, charges=(*FIVE, (at(1, day=1), 400))),
    Row("two edges are full", at(0, day=3), CALENDAR, charges=(*FIVE, (EDGE, 500), (at(1, day=2), 500))),
    # What others used may end within a window, and no later than a charge of now.
    Row("others end and make room", at(16), CALENDAR, cap=600, others=(("a", at(16), 100),)),
    Row("the second of two makes room", at(17), CALENDAR, cap=600, others=(("a", at(16), 50), ("b", at(17), 50))),
    # A pace of 2,400 in a day gives 100 an hour, three hours ahead.
    Row("the pace has come so far", NOW, PACED, cap=2_400, charges=((at(1), 1_500),)),
    Row("the pace gives all three hours before the edge", at(21), PACED, cap=2_400, charges=((at(1), 2_300),)),
    Row("the pace has no more to give", EDGE, PACED, cap=2_400, charges=((at(1), 2_301),)),
    Row("an unused window has room for any call", EDGE, PACED, cap=2_400, cost=2_400, charges=((at(1), 1),)),
    Row("at the edge the pace begins anew", at(1, 1), PACED, cap=2_400, charges=((at(1), 2_400), (EDGE, 300))),
    Row("others end first", at(16), PACED, cap=2_400, charges=((at(1), 1_700),), others=(("a", at(16), 300),)),
    Row("the pace is first", at(18), PACED, cap=2_400, charges=((at(1), 1_700),), others=(("a", at(19), 300),)),
]


@pytest.mark.parametrize("row", [*SLIDES, *CALENDARS], ids=lambda row: row.says)
def test_a_window_has_room_when_enough_has_left_or_at_its_edge_or_when_its_pace_gives_it(row: Row) -> None:
    assert room_at(row.at_call(), row.totals(), row.from_ms or row.now_ms) == row.room_ms


@pytest.mark.parametrize(
    ("cost", "lapses_ms", "from_ms", "room_ms"),
    [
        # Upstream grants 300 until some time, then the limit holds 500 again. 500 are used.
        (100, at(18), NOW, at(9, day=1)),  # then one charge of five must leave
        (100, at(10, day=1), NOW, at(10, day=1)),  # two have left by then
        (100, at(12, day=1), NOW, at(11, day=1)),  # three have left, and the call fits into 300
        (301, at(18), NOW, at(12, day=1)),  # more than is granted fits when that has ended, and enough has left
        (501, at(18), NOW, NEVER),
        (100, at(18), at(20, day=1), at(20, day=1)),
    ],
)
def test_a_grant_holds_a_limit_down_until_it_ends(cost: int, lapses_ms: int, from_ms: int, room_ms: int) -> None:
    full = Row("", 0, cost=cost, cap=300).at_call()._replace(lapses_ms=lapses_ms, lapsed_units=500)
    assert room_at(full, Totals(FIVE), from_ms) == room_ms


SOON = Row("the sliding window has room at 09:00", 0)
EDGED = Row("the calendar window at midnight", 0, CALENDAR)
TOO_DEAR = SOON._replace(cost=10_000, cap=1)


@pytest.mark.parametrize(
    ("rows", "refuse", "room_ms", "longest"),
    [
        ([SOON, EDGED], [True, True], at(9, day=1), 0),
        # Of two that hold it back equally long, the first is named.
        ([SOON, SOON], [True, True], at(9, day=1), 0),
        # A limit that has room has no say.
        ([TOO_DEAR, EDGED, TOO_DEAR], [False, True, False], EDGE, 1),
        ([TOO_DEAR, SOON], [True, True], NEVER, 0),
    ],
)
def test_all_limits_have_room_and_the_limit_that_holds_the_call_back_longest_is_named(
    rows: list[Row], refuse: list[bool], room_ms: int, longest: int
) -> None:
    limits = [row.at_call(refuses=refuses) for row, refuses in zip(rows, refuse, strict=True)]
    assert retry_at(limits, Totals(FIVE), NOW) == (room_ms, longest)


def test_a_paced_limit_that_does_not_refuse_must_have_room_when_the_others_have() -> None:
    """At 09:00 tomorrow the sliding limit has room. What is dated there by then is ahead of the pace until 14:00."""
    totals = Totals(((at(9), 1_000), (at(8, day=1), 1_500)))
    sliding = LimitAtCall(SLIDING, 2_500, 200, 2_500, refuses=True)
    paced = LimitAtCall(PACED, 2_400, 200, 1_000, refuses=False)
    assert retry_at([paced, sliding], totals, NOW) == (at(14, day=1), 1)


def test_a_paced_limit_that_has_room_holds_nothing_back() -> None:
    paced = LimitAtCall(PACED, 2_400, 100, 1_000, refuses=False)
    assert retry_at([paced], Totals(((at(9), 1_000),)), NOW) == (NOW, 0)
