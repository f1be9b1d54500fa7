"""The curve of a limit is what a decision would have counted at each moment; its shapes fit the field."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from quota.dashboard.charts import COLOURS, OTHERS, SAMPLES, Curve, Event, chart, colours_of, curve, span
from quota.dashboard.pages import _hours
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS, Calendar, Sliding, Window, cutoff

NOW_MS = 1_795_300_000_123
WINDOWS: list[Window] = [
    Sliding(DAY_MS),
    Sliding(7 * DAY_MS),
    Sliding(MINUTE_MS),
    Calendar("hour", "Asia/Kathmandu"),
    Calendar("day", "America/Los_Angeles"),
]


def events(rng: random.Random, since_ms: int, until_ms: int, count: int) -> list[Event]:
    made = [Event(rng.randrange(since_ms, until_ms), rng.randrange(1, 100), rng.choice("abc")) for _ in range(count)]
    return sorted(made, key=lambda each: each.ms)


@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: window.name)
def test_each_moment_has_what_the_window_held_then(window: Window) -> None:
    rng = random.Random(window.name)
    past = events(rng, NOW_MS - 9 * DAY_MS, NOW_MS + 1, 100)
    past += [Event(NOW_MS - n * 10 * MINUTE_MS, 3, "a") for n in range(150)]  # at the very moments that are shown
    past.sort(key=lambda each: each.ms)
    coming = events(rng, NOW_MS + 1, NOW_MS + DAY_MS, 50)
    others = [(70, NOW_MS + HOUR_MS), (5, NOW_MS - 1), (9, NOW_MS)]
    made = curve(window, NOW_MS, NOW_MS + 5 * HOUR_MS, past, coming, others)

    def held(at_ms: int, job: str | None = None) -> int:
        counted = [each for each in (*past, *coming) if cutoff(window, at_ms) < each.ms <= at_ms]
        return sum(each.units for each in counted if job in (None, each.job))

    assert (made.times_ms[0], made.times_ms[-1], len(made.times_ms)) == (made.start_ms, NOW_MS, SAMPLES)
    for n, at_ms in enumerate(made.times_ms):
        assert {job: units[n] for job, units in made.jobs.items()} == {job: held(at_ms, job) for job in made.jobs}
        assert sum(units[n] for units in made.jobs.values()) == held(at_ms)
    if window.longest_ms == MINUTE_MS:  # many of its peaks are over before the next sample
        table = {at_ms: units for at_ms, _, units in _hours(made, chart(made, 1, {}, None).bands)["rows"]}
        for shown, of, since_ms in ((table, past, made.start_ms), (dict(made.ahead), coming, NOW_MS + HOUR_MS)):
            times_ms = [each.ms for each in of if since_ms < each.ms < made.end_ms]
            assert max(shown[at_ms] for at_ms in shown if at_ms in times_ms) == max(map(held, times_ms))
    assert made.ahead[0][0] == NOW_MS
    assert made.ahead[-1][0] == made.end_ms - 1
    for at_ms, units in made.ahead:
        assert units == held(at_ms) + sum(each for each, until_ms in others if at_ms < until_ms)


def test_a_chart_ends_with_the_reset() -> None:
    day, hour = Sliding(DAY_MS), Calendar("hour", "UTC")
    assert span(day, NOW_MS, NOW_MS + 1)[1] == NOW_MS + 3 * HOUR_MS
    assert span(day, NOW_MS, NOW_MS + 9 * HOUR_MS) == (NOW_MS - DAY_MS, NOW_MS + 9 * HOUR_MS)
    assert span(day, NOW_MS, NOW_MS + 40 * DAY_MS)[1] == NOW_MS + DAY_MS
    assert span(hour, NOW_MS, None) == (NOW_MS - DAY_MS, NOW_MS + DAY_MS)
    assert span(Calendar("day", "UTC"), NOW_MS, NOW_MS + 1) == Calendar("day", "UTC").edges(NOW_MS)


def test_the_forecast_ends_where_the_plan_ends() -> None:
    month, known_ms = Calendar("month", "UTC"), NOW_MS + 30 * HOUR_MS
    expected = [Event(NOW_MS + 10 * HOUR_MS, 70, "a")]
    made = curve(month, NOW_MS, None, [Event(NOW_MS - 5, 3, "a")], expected, known_ms=known_ms)
    assert (made.ahead[0], made.ahead[-1], made.end_ms) == ((NOW_MS, 3), (known_ms - 1, 73), month.edges(NOW_MS)[1])
    assert curve(month, NOW_MS, None, [], expected, known_ms=NOW_MS - DAY_MS).ahead == ((NOW_MS, 0),)
    for most_units, end_units in ((72, 72), (2, 3)):
        made = curve(month, NOW_MS, None, [Event(NOW_MS - 5, 3, "a")], expected, most_units=most_units)
        assert made.ahead[-1][1] == end_units, "at most the limit, or what counts already"


@pytest.fixture
def night(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[datetime]:
    """The midnight before clocks change, and this process in that zone: `ZONE DATE`."""
    zone, changed = request.param.split()
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    yield datetime.fromisoformat(changed).replace(tzinfo=ZoneInfo(zone))
    monkeypatch.undo()
    time.tzset()


CHANGES = ("America/Los_Angeles 2026-11-01", "Europe/Berlin 2026-03-29", "Australia/Lord_Howe 2026-10-04")


@pytest.mark.parametrize("night", CHANGES, indirect=True)
@pytest.mark.parametrize("period", ["day", "month"])
def test_the_labels_of_time_stand_at_what_they_say_when_clocks_change(night: datetime, period: str) -> None:
    now_ms = int(night.replace(hour=21).timestamp() * 1000)
    made = curve(Calendar(period, str(night.tzinfo)), now_ms, None, [])  # type: ignore[arg-type]
    times = chart(made, 5, {}, None).times
    assert len(times) >= 4
    for tick in times:
        at_s = (made.start_ms + tick.at * (made.end_ms - made.start_ms) / 100) / 1000
        at = datetime.fromtimestamp(at_s + 600, night.tzinfo)
        assert tick.label == (f"{at:%H}:00" if period == "day" else f"{at.day} {at:%b}"), tick
        assert at.hour % 3 == 0 if period == "day" else at.hour == 0, tick


def test_a_capacity_beyond_what_is_shown_has_no_mark() -> None:
    made = curve(Sliding(DAY_MS), NOW_MS, NOW_MS + HOUR_MS, [])
    marks = [chart(made, 5, {}, at_ms).next for at_ms in (None, NOW_MS - 1, NOW_MS + 4 * HOUR_MS, made.end_ms)]
    assert marks == [None, None, None, 100]


def test_jobs_beyond_the_colours_are_one_band() -> None:
    jobs = [f"j{n}" for n in range(9)]
    made = Curve(0, 10, 20, (0, 10), dict.fromkeys(jobs, (1, 2)), ((10, 18),))
    shapes = chart(made, 20, colours_of(jobs), None)
    assert [(band.job, band.colour, band.units) for band in shapes.bands] == [
        *((job, n, 2) for n, job in enumerate(jobs[:COLOURS], 1)),
        (OTHERS, 0, 2 * (9 - COLOURS)),
    ]
