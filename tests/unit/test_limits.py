"""Windows, views and limits: the arithmetic that everything else rests on. And the pace of a limit over its window."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, date, datetime, timedelta
from functools import cache
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quota.errors import UsageError
from quota.terms.limits import (
    DAY_MS,
    HOUR_MS,
    MINUTE_MS,
    PERIODS,
    Calendar,
    Count,
    Limit,
    Period,
    Selector,
    Sliding,
    View,
    format_duration,
    paced_units,
    paced_until,
    parse_duration,
)

PACIFIC = "America/Los_Angeles"
PACIFIC_DAY = Calendar("day", PACIFIC)
DAY = Sliding(DAY_MS)


def ms(text: str) -> int:
    """Milliseconds of an ISO time; UTC where it names no offset."""
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


def utc(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M")


@pytest.mark.parametrize(
    ("text", "duration_ms"),
    [("1ms", 1), ("90s", 90_000), ("30m", 1_800_000), ("24h", DAY_MS), ("7d", 7 * DAY_MS), (" 2 h ", 2 * HOUR_MS)],
)
def test_a_duration_is_a_number_and_a_unit(text: str, duration_ms: int) -> None:
    assert parse_duration(text) == duration_ms


@pytest.mark.parametrize(
    "text", ["", "24", "h", "0h", "-1h", "1.5h", "1h30m", "24H", "1 week", "1e3s", "1\nh\n1h", "٣h"]
)
def test_parse_duration_shows_a_text_that_it_rejects(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration; write for example") as error:
        parse_duration(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("duration_ms", "text"),
    [(DAY_MS, "24h"), (7 * DAY_MS, "168h"), (90 * MINUTE_MS, "90m"), (61_000, "61s"), (1_500, "1500ms")],
)
def test_a_duration_is_written_with_the_largest_unit_that_is_exact_up_to_hours(duration_ms: int, text: str) -> None:
    assert format_duration(duration_ms) == text


@given(st.integers(1, 10**11))
def test_writing_a_duration_and_reading_it_back_changes_nothing(duration_ms: int) -> None:
    assert parse_duration(format_duration(duration_ms)) == duration_ms


def test_a_sliding_window_lasts_at_least_a_millisecond() -> None:
    assert Sliding(1).longest_ms == 1
    with pytest.raises(UsageError, match="0 ms: a sliding window is a whole number from 1"):
        Sliding(0)


ZONES = (PACIFIC, "Africa/Cairo", "America/Havana", "Australia/Lord_Howe", "Europe/Dublin", "Antarctica/Troll")


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("period", PERIODS)
def test_periods_follow_each_other_without_gap_or_overlap(zone: str, period: Period) -> None:
    """Around the changes of the clocks in 2026, backwards. None is longer than the log keeps entries for it."""
    calendar = Calendar(period, zone)
    for day in ("10-31", "10-29", "10-24", "10-02", "04-23", "04-03", "03-28", "03-07"):
        at_ms = ms(f"2026-{day}")
        end_ms = at_ms + 3 * DAY_MS
        while at_ms < end_ms:
            start_ms, next_ms = calendar.edges(at_ms)
            assert start_ms <= at_ms < next_ms
            assert next_ms - start_ms <= calendar.longest_ms + (HOUR_MS if zone == "Antarctica/Troll" else 0)
            assert calendar.edges(next_ms - 1) == (start_ms, next_ms)
            assert calendar.edges(next_ms)[0] == next_ms
            at_ms = next_ms


@pytest.mark.parametrize("command", ["status", "demo", "emulate --port 0"])
def test_an_error_names_the_missing_time_zone_package(command: str) -> None:
    program = "import runpy, sys; sys.modules['tzdata'] = None; runpy.run_module('quota', run_name='__main__')"
    env = {**os.environ, "PYTHONTZPATH": ""}
    words = [sys.executable, "-c", program, *command.split()]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (78, 1)
    assert "no time zone data; install the package tzdata" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *((("day", zone), ".* is not a time zone.*") for zone in ("", "Mars/Base", "/etc/passwd", "America", "a\0b")),
        *((("day", zone), ".* is not a time zone.*") for zone in ("localtime", "posixrules", "right/Europe/Berlin")),
        (("day", "x" * 5_000), ".* is not a time zone.*"),
        (("day", "../../etc/passwd"), ".* is not a time zone.*"),
        (("year", "UTC"), "'year' is not a calendar period; use quarter-hour, hour, day, week, month"),
        (("month", "UTC", 0), "0 as the day of a month: that is a whole number from 1 to 31"),
        (("month", "UTC", True), "True as the day of a month: that is a whole number from 1 to 31"),
        (("day", "UTC", 2), "a day has no `day` to begin on; only a month has"),
    ],
)
def test_an_unknown_calendar_or_zone_raises_where_it_is_given(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises((ValueError, UsageError), match=f"^{message}$"):
        Calendar(*arguments)


@pytest.mark.parametrize(
    ("calendar", "at", "edges"),
    [
        # A date that was left out altogether.
        (Calendar("day", "Pacific/Apia"), "2011-12-30T00:00", "2011-12-29T10:00 2011-12-30T10:00 2011-12-31T10:00"),
        # A billing period from the 8th on.
        (Calendar("month", PACIFIC, 8), "2026-03-08T07:59", "2026-02-08T08:00 2026-03-08T08:00 2026-04-08T07:00"),
        # An hour that comes twice counts twice. Hours begin where the wall shows a full one.
        (Calendar("hour", PACIFIC), "2026-11-01T08:30", "2026-11-01T08:00 2026-11-01T09:00 2026-11-01T10:00"),
        (Calendar("hour", "Asia/Kolkata"), "2026-01-10T12:50", "2026-01-10T12:30 2026-01-10T13:30 2026-01-10T14:30"),
        # Quarters of an hour, also where a zone is three quarters off, and in the hour that comes twice.
        (
            Calendar("quarter-hour", "Asia/Kathmandu"),
            "2026-01-10T12:44",
            "2026-01-10T12:30 2026-01-10T12:45 2026-01-10T13:00",
        ),
        (Calendar("quarter-hour", PACIFIC), "2026-11-01T09:14", "2026-11-01T09:00 2026-11-01T09:15 2026-11-01T09:30"),
    ],
    ids=str,
)
def test_a_calendar_period_begins_and_ends_at_its_edges(calendar: Calendar, at: str, edges: str) -> None:
    start_ms, next_ms = calendar.edges(ms(at))
    assert " ".join(map(utc, (start_ms, *calendar.edges(next_ms)))) == edges


def begins(calendar: Calendar, day: date) -> bool:
    """Whether a period begins on this date."""
    if calendar.period == "day":
        return True
    if calendar.period == "week":
        return day.weekday() == 0
    last = (day + timedelta(days=1)).day == 1
    return day.day == calendar.day or (last and day.day < calendar.day)


@cache
def first_shown(zone: str) -> list[tuple[int, date]]:
    """When a wall clock that is read every quarter of an hour for 14 months first shows each date."""
    dates: list[tuple[int, date]] = []
    for at_ms in range(ms("2027-12-01"), ms("2029-02-01"), 15 * MINUTE_MS):
        shown = datetime.fromtimestamp(at_ms // 1000, UTC).astimezone(ZoneInfo(zone)).date()
        if not dates or shown > dates[-1][1]:
            dates.append((at_ms, shown))
    return dates


@pytest.mark.parametrize("zone", [*ZONES, "Asia/Beirut", "UTC"])
@pytest.mark.parametrize(
    ("period", "day"),
    [("day", 1), ("week", 1), ("month", 1), ("month", 31)],
)
def test_calendar_periods_agree_with_a_wall_clock(zone: str, period: Period, day: int) -> None:
    calendar = Calendar(period, zone, day)
    changes = [at_ms for at_ms, shown in first_shown(zone)[1:] if begins(calendar, shown)]
    assert len(changes) >= 13
    assert (calendar.longest_ms % DAY_MS == 0) == (zone == "UTC")
    for start_ms, next_ms in pairwise(changes):
        assert next_ms - start_ms <= calendar.longest_ms or zone == "Antarctica/Troll", "its clocks change by two hours"
        for at_ms in (next_ms - 1, (start_ms + next_ms) // 2, start_ms + 1, start_ms):
            assert calendar.edges(at_ms) == (start_ms, next_ms)


def test_each_window_has_a_stable_name() -> None:
    """They are parts of names in the ledger: another name would be another view, which begins from the log."""
    names = {
        Calendar("hour", "UTC"): "hour@UTC",
        Calendar("day", PACIFIC): "day@America/Los_Angeles",
        Calendar("month", "UTC"): "month@UTC",
        Calendar("month", "UTC", 15): "month-15@UTC",
        Calendar("week", "UTC"): "week@UTC",
        Calendar("quarter-hour", "UTC"): "quarter-hour@UTC",
    }
    assert {window: window.name for window in names} == names


@pytest.mark.parametrize(
    ("view", "name"),
    [
        (View(Selector(buckets=("units",)), DAY), "units|*|*|24h"),
        (View(Selector(buckets=("units",)), Calendar("day", PACIFIC)), "units|*|*|day@America/Los_Angeles"),
        (View(Selector(("units",), (), ("backfill",), "calls"), DAY), "units|*|backfill|24h|calls"),
        # What the order in the configuration was does not matter.
        (View(Selector(("units",), ("videos.list", "search.list")), DAY), "units|search.list,videos.list|*|24h"),
        # Names may contain what separates names.
        (View(Selector((), (), ("a|b", "c,d", "*", "100%")), DAY), "*|*|%2A,100%25,a%7Cb,c%2Cd|24h"),
    ],
)
def test_a_view_is_named_by_what_it_counts_and_its_window(view: View, name: str) -> None:
    assert view.name == name


names = st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1), unique=True)


@given(names, names)
def test_views_of_different_jobs_have_different_names(each: list[str], other: list[str]) -> None:
    first, second = (View(Selector(("units",), (), tuple(jobs)), DAY) for jobs in (each, other))
    assert (first.name == second.name) == (sorted(each) == sorted(other))


@pytest.mark.parametrize(
    ("selector", "counts"),
    [
        (Selector(), True),
        (Selector(("units",), ("search.list",), ("backfill",)), True),
        (Selector(("search",)), False),
        (Selector(methods=("videos.list",)), False),
        (Selector(jobs=("trending",)), False),
    ],
)
def test_a_selector_counts_what_fits_all_its_fields(selector: Selector, counts: bool) -> None:
    assert selector.counts("units", "search.list", "backfill") is counts


@pytest.mark.parametrize(
    ("count", "units", "cost"), [("units", 100, 100), ("units", 0, 0), ("calls", 100, 1), ("calls", 0, 0)]
)
def test_a_call_counts_once_unless_it_was_refunded(count: Count, units: int, cost: int) -> None:
    assert Selector(count=count).cost(units) == cost


def test_a_limit_enforces_at_least_one() -> None:
    view = View(Selector(("units",)), DAY)
    with pytest.raises(UsageError, match="0 limit_units of limit 'day': that is a whole number from 1"):
        Limit("day", 0, view, 10, 10)


MIDNIGHT = ms("2026-07-01T07:00")


@pytest.mark.parametrize(
    ("hour", "units"),
    # An eighth of the day ahead of an even spending of 2,400 units, 100 an hour.
    [(0, 300), (1, 400), (12, 1_500), (20, 2_300), (21, 2_400), (23, 2_400)],
)
def test_the_pace_is_even_and_complete_three_hours_before_the_end(hour: int, units: int) -> None:
    assert paced_units(2_400, PACIFIC_DAY.edges(MIDNIGHT), MIDNIGHT + hour * HOUR_MS) == units


@pytest.mark.parametrize("midnight", [ms("2026-03-08T08:00"), MIDNIGHT, ms("2026-11-01T07:00")], ids=["23", "24", "25"])
@pytest.mark.parametrize("units", [1, 2, 7, 95, 9_500, 10**9])
def test_a_pace_releases_units_at_their_first_millisecond(midnight: int, units: int) -> None:
    """On days of 23, 24 and 25 hours. Whoever asks for the millisecond before gets less."""
    edges = PACIFIC_DAY.edges(midnight)
    for wanted in {0, 1, units // 8, units // 3, units - 1, units}:
        reached_ms = paced_until(units, edges, wanted)
        assert edges[0] <= reached_ms < edges[1]
        assert paced_units(units, edges, reached_ms) >= wanted
        assert reached_ms == edges[0] or paced_units(units, edges, reached_ms - 1) < wanted


def test_a_paced_sliding_limit_cannot_be_made() -> None:
    with pytest.raises(UsageError, match="no reset to pace towards"):
        Limit("day", 10, View(Selector(), Sliding(DAY_MS)), 10, 0, paced=True)
