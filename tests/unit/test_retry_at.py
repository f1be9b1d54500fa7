"""When it fits again, row by row: each border of the walk through the log, of calendar edges and of paces."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

import pytest

from quota.common.clock import NEVER
from quota.deciding.retry_at import Clocks, Occupancy, retry_at, room_at
from quota.ledger.entry import Entry
from quota.ledger.unlogged import Expiries, UnloggedUsage
from quota.terms.limits import DAY_MS, HOUR_MS, Calendar, Limit, Selector, Sliding, View

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from quota.deciding.retry_at import ReadEntries
    from quota.terms.limits import Window

MIDNIGHT = int(datetime(2026, 7, 1, tzinfo=UTC).timestamp()) * 1000


def at(hour: float, day: int = 0) -> int:
    return MIDNIGHT + day * DAY_MS + round(hour * HOUR_MS)


NOW = at(14)
EDGE = at(0, day=1)


ALL = Selector()


def limit(window: Window, *, paced: bool = False, selector: Selector = ALL) -> Limit:
    return Limit("limit", 10_000, View(selector, window), 10_000, 0, paced)


SLIDING = limit(Sliding(DAY_MS))
CALENDAR = limit(Calendar("day", "UTC"))
PACED = limit(Calendar("day", "UTC"), paced=True)
PACED_HOUR = limit(Calendar("hour", "UTC"), paced=True)

Log = tuple[tuple[int, int], ...]
"""Charges: (when, units)."""

FIVE: Log = tuple((at(hour), 100) for hour in (9, 10, 11, 12, 13))


class Row(NamedTuple):
    says: str
    room_ms: int
    limit: Limit = SLIDING
    cost: int = 100
    used: int = 500
    cap: int = 500
    log: Log = FIVE
    unlogged: Expiries = ()
    now_ms: int = NOW
    caller_ms: int | None = None
    newest_ms: int = NOW
    from_ms: int | None = None
    leaving_ms: int | None = None

    def occupancy(self) -> Occupancy:
        lost = UnloggedUsage("view", "epoch", self.unlogged, (0, 0))
        unlogged = (lost,) if self.unlogged else ()
        return Occupancy(self.limit, self.cap, self.cost, self.used, unlogged, True, self.leaving_ms)

    def clocks(self) -> Clocks:
        return Clocks(self.now_ms, self.now_ms if self.caller_ms is None else self.caller_ms, self.newest_ms)

    def since_ms(self) -> int:
        return self.now_ms if self.from_ms is None else self.from_ms


def entry(at_ms: int, units: int, bucket: str = "units") -> Entry:
    return Entry(at_ms, 1, units, units, bucket, "method", "job", "", "")


def reading(log: Log) -> ReadEntries:
    def read(first_ms: int, last_ms: int) -> Iterable[Entry]:
        return [entry(at_ms, units) for at_ms, units in log if first_ms <= at_ms <= last_ms]

    return read


def unreadable(first_ms: int, last_ms: int) -> Iterator[Entry]:
    raise AssertionError("nothing that is looked for is in the log")


SLIDES = [
    # The charges leave one by one, each 24 h after it came, until enough has left and no sooner.
    Row("one of five has left", at(9, day=1)),
    Row("two of five have left", at(10, day=1), cost=200),
    Row("a unit more needs a third", at(11, day=1), cost=201),
    Row("all five have left", at(13, day=1), cost=500),
    Row("what is free already counts", at(9, day=1), cost=200, cap=600),
    Row("a unit less is free", at(10, day=1), cost=201, cap=600),
    # A call that is larger than the cap never fits, one of its size does.
    Row("larger than the cap", NEVER, cost=501),
    Row("larger than the cap, whatever the ledger said", NEVER, cost=501, leaving_ms=at(9)),
    # The window is open at its start: what came exactly 24 h ago has left.
    Row("came 24 h ago", at(9, day=1), log=((NOW - DAY_MS, 100), *FIVE)),
    Row("came 24 h less 1 ms ago", NOW + 1, log=((NOW - DAY_MS + 1, 100), *FIVE)),
    # Charges dated ahead of now, by a clock that stood ahead, are in the log too.
    Row("all is dated ahead", at(15, day=1), log=((at(15), 500),), newest_ms=at(15)),
    # Nothing in the log can free it: it was given back while we looked.
    Row("the log is empty", NOW, log=()),
    Row("the log is empty, asked for later", at(20), log=(), from_ms=at(20)),
    Row("less is in the log than was used", NOW, log=((at(9), 100),), cost=300),
    # Never before the time that was asked for.
    Row("room was there before", at(9, day=1) + 1, from_ms=at(9, day=1) + 1),
    Row("room is there later", at(9, day=1), from_ms=at(9, day=1) - 1),
    # Unlogged usage counts until before its end. What ended by now is not in `used` any more.
    Row("unlogged usage ended now", at(9, day=1), unlogged=((100, NOW),)),
    Row("unlogged usage ends in 1 ms", NOW + 1, used=600, cap=600, unlogged=((100, NOW + 1),)),
    Row("an entry and unlogged usage leave at once", at(9, day=1), cost=200, unlogged=((100, at(9, day=1)),)),
    Row("unlogged usage ends between two entries", at(9.5, day=1), cost=200, unlogged=((100, at(9.5, day=1)),)),
    Row("unlogged usage alone", at(16), log=(), used=200, cap=200, unlogged=((100, at(16)), (100, at(17)))),
    # The ledger said which charge must leave: the log is not read.
    Row("the ledger said it", at(11, day=1), leaving_ms=at(11)),
    Row("the ledger said it, asked for later", at(12, day=1), leaving_ms=at(11), from_ms=at(12, day=1)),
]


@pytest.mark.parametrize("row", SLIDES, ids=lambda row: row.says)
def test_a_sliding_window_has_room_when_enough_has_left(row: Row) -> None:
    read = unreadable if row.leaving_ms is not None else reading(row.log)
    assert room_at(row.occupancy(), row.clocks(), read, row.since_ms()) == row.room_ms


CALENDARS = [
    # Everything leaves at the edge.
    Row("at the edge", EDGE, CALENDAR),
    Row("at the edge, all of it", EDGE, CALENDAR, cost=500),
    Row("at the edge, asked for 1 ms before", EDGE, CALENDAR, from_ms=EDGE - 1),
    Row("at the edge, asked for then", EDGE, CALENDAR, from_ms=EDGE),
    Row("in the new window, asked for 1 ms later", EDGE + 1, CALENDAR, from_ms=EDGE + 1),
    Row("room is there now", NOW, CALENDAR, used=400),
    Row("a unit is missing", EDGE, CALENDAR, used=401),
    Row("what the ledger says of sliding windows is not for these", EDGE, CALENDAR, leaving_ms=at(9)),
    # Charges dated behind the edge, by a clock that went back, count there.
    Row(
        "what is dated behind the edge leaves room", EDGE, CALENDAR, log=((at(1, day=1), 400),), newest_ms=at(1, day=1)
    ),
    Row("it leaves a unit too few", at(0, day=2), CALENDAR, log=((at(1, day=1), 401),), newest_ms=at(1, day=1)),
    Row("dated at the edge itself", at(0, day=2), CALENDAR, log=((EDGE, 401),), newest_ms=EDGE),
    Row("dated 1 ms before the edge", EDGE, CALENDAR, log=((EDGE - 1, 401),), newest_ms=EDGE - 1),
    Row("two edges are full", at(0, day=3), CALENDAR, log=((EDGE, 500), (at(1, day=2), 500)), newest_ms=at(1, day=2)),
    # Unlogged usage counts until before its end, over an edge too.
    Row("its end makes room", at(16), CALENDAR, used=500, unlogged=((200, at(16)),), cost=200),
    Row("the first of two ends makes room", at(15), CALENDAR, unlogged=((100, at(15)), (100, at(16)))),
    Row("the second of two ends makes room", at(16), CALENDAR, unlogged=((100, at(15)), (100, at(16))), cost=200),
    Row("its end makes a unit too little", EDGE, CALENDAR, unlogged=((200, at(16)),), cost=201),
    Row("it counts at the edge", at(2, day=1), CALENDAR, unlogged=((400, at(2, day=1)),), cost=200),
    Row("it ends at the edge", EDGE, CALENDAR, unlogged=((400, EDGE),), cost=500),
    Row("what ended now was not counted", EDGE, CALENDAR, unlogged=((100, NOW),)),
    Row("it ends before the time asked for", at(17), CALENDAR, unlogged=((100, at(16)),), from_ms=at(17)),
    Row("it ends at the time asked for", at(16), CALENDAR, unlogged=((100, at(16)),), from_ms=at(16)),
    # A pace of 2,400 in a day gives 100 an hour, three hours ahead.
    Row("the pace has come so far", at(13), PACED, cap=2_400, used=1_500, now_ms=at(12)),
    Row("it needs a unit more", at(13.01), PACED, cap=2_400, used=1_501, now_ms=at(12)),
    Row("it was so far before", NOW, PACED, cap=2_400, used=1_500),
    Row("it was so far before the time asked for", at(15), PACED, cap=2_400, used=1_500, from_ms=at(15)),
    Row("it gives all three hours before the edge", at(21), PACED, cap=2_400, used=2_300),
    Row("there is no more to give", EDGE, PACED, cap=2_400, used=2_301),
    Row("an unused window has room at once", EDGE, PACED, cap=2_400, used=2_400, cost=2_400),
    Row("its end is before the pace is so far", at(17), PACED, cap=2_400, used=2_000, unlogged=((100, at(16)),)),
    Row("its end makes room", at(18.5), PACED, cap=2_400, used=2_060, unlogged=((100, at(18.5)),)),
    Row("the pace is so far before it ends", at(18), PACED, cap=2_400, used=2_000, unlogged=((100, at(19)),)),
    # The pace goes by the caller's clock, the edge by the ledger's.
    Row("the caller is an hour behind", at(14), PACED, cap=2_400, used=1_500, now_ms=at(12), caller_ms=at(11)),
    Row("the caller is past the edge", EDGE, PACED, now_ms=EDGE - 2_000, caller_ms=EDGE + 1_000),
    Row("the caller's pace is full 7.5 minutes before its edge", at(12.875), PACED_HOUR, used=400, now_ms=at(12)),
    Row("the caller's edge comes too late", at(13), PACED_HOUR, used=400, now_ms=at(12.5), caller_ms=at(12.3)),
    Row(
        "the pace would be full at the ledger's edge, where all has been used that is dated behind it",
        at(14),
        PACED_HOUR,
        used=400,
        log=((at(13.5), 500),),
        now_ms=at(12.5),
        caller_ms=at(12.375),
        newest_ms=at(13.5),
    ),
]


@pytest.mark.parametrize("row", CALENDARS, ids=lambda row: row.says)
def test_a_calendar_window_has_room_at_its_edge_or_when_its_pace_gives_it(row: Row) -> None:
    assert room_at(row.occupancy(), row.clocks(), reading(row.log), row.since_ms()) == row.room_ms


def test_the_log_is_not_read_for_the_present_calendar_window_nor_for_one_that_no_charge_is_dated_in() -> None:
    """Its usage is in the ledger's answer."""
    for row in (
        Row("", NOW, CALENDAR, used=400),
        Row("", EDGE, CALENDAR),
        Row("", at(0, day=2), CALENDAR, now_ms=EDGE, newest_ms=EDGE),
    ):
        assert room_at(row.occupancy(), row.clocks(), unreadable, row.since_ms()) == row.room_ms


def test_only_what_a_limit_counts_leaves_its_window() -> None:
    """Of two buckets it counts one; of calls, each as one."""
    log = [entry(at(9), 50, "search"), entry(at(10), 50), entry(at(11), 50, "search"), entry(at(12), 0)]
    search = limit(Sliding(DAY_MS), selector=Selector(buckets=("search",)))
    calls = limit(Sliding(DAY_MS), selector=Selector(count="calls"))
    clocks = Clocks(NOW, NOW, NOW)
    for one, used, cost, room_ms in (
        (search, 100, 50, at(9, day=1)),
        (search, 100, 51, at(11, day=1)),
        (search, 100, 100, at(11, day=1)),
        (calls, 3, 1, at(9, day=1)),
        (calls, 3, 2, at(10, day=1)),
        (calls, 3, 3, at(11, day=1)),
    ):
        occupancy = Occupancy(one, used, cost, used, (), True)
        assert room_at(occupancy, clocks, lambda *_: log, NOW) == room_ms


# -- several limits ----------------------------------------------------------------------------------------------------

SOON = Row("the sliding one has room at 09:00", 0)
EDGED = Row("the calendar one at midnight", 0, CALENDAR)
FREE = SOON._replace(says="has room", cost=10_000, cap=1)
"""Would never have room, were it asked: it is not full."""


@pytest.mark.parametrize(
    ("rows", "full", "room_ms", "longest"),
    [
        ([SOON], [True], at(9, day=1), 0),
        ([SOON, EDGED], [True, True], at(9, day=1), 0),
        ([EDGED, SOON], [True, True], at(9, day=1), 1),
        # Of two that hold it back equally long, the first is named.
        ([SOON, SOON], [True, True], at(9, day=1), 0),
        # One that is not full has no say.
        ([FREE, EDGED, FREE], [False, True, False], EDGE, 1),
        ([FREE, SOON], [True, True], NEVER, 0),
        ([PACED_ONE := EDGED._replace(limit=PACED, used=1, cap=2_400), FREE], [False, True], NEVER, 1),
        # 2,000 are used, 380 more are dated an hour into tomorrow. There the pace gives 980 at 06:48, at midnight 300.
        ([PACED_ONE._replace(used=2_000, cost=600, log=((at(1, 1), 380),), newest_ms=at(1, 1))], [True], at(6.8, 1), 0),
    ],
)
def test_all_limits_have_room_and_the_one_that_holds_back_longest_is_named(
    rows: list[Row], full: list[bool], room_ms: int, longest: int
) -> None:
    occupancies = [row.occupancy()._replace(full=one) for row, one in zip(rows, full, strict=True)]
    assert retry_at(occupancies, rows[0].clocks(), reading(rows[0].log), NOW) == (room_ms, longest)


def test_a_paced_limit_that_does_not_refuse_must_have_room_when_the_others_have() -> None:
    """At 09:00 tomorrow the sliding limit has room. What is dated there by then is ahead of the pace until 14:00."""
    log = ((at(9), 1_000), (at(8, day=1), 1_500))
    sliding = Occupancy(SLIDING, 2_500, 200, 2_500, (), True)
    paced = Occupancy(PACED, 2_400, 200, 1_000, (), False)
    found = retry_at([paced, sliding], Clocks(NOW, NOW, at(8, day=1)), reading(log), NOW)
    assert found == (at(14, day=1), 1)


def test_nothing_is_before_the_time_that_was_asked_for() -> None:
    for row in (SOON, EDGED):
        later_ms = at(20, day=1)
        assert retry_at([row.occupancy()], row.clocks(), reading(row.log), later_ms) == (later_ms, 0)
