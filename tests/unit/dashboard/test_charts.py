"""The curve of a limit is what a decision would have counted at each moment; its shapes fit the field."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from quota.dashboard.charts import COLOURS, HEIGHT, OTHERS, SAMPLES, WIDTH, Curve, Event, chart, colours_of, curve, span
from quota.dashboard.pages import _hours
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS, Calendar, Sliding, Window, cutoff

NOW_MS = 1_795_300_000_123
WINDOWS: list[Window] = [
    Sliding(DAY_MS),
    Sliding(7 * DAY_MS),
    Calendar("hour", "Asia/Kathmandu"),
    Calendar("day", "America/Los_Angeles"),
]


def events(rng: random.Random, since_ms: int, until_ms: int, count: int) -> list[Event]:
    made = [Event(rng.randrange(since_ms, until_ms), rng.randrange(1, 100), rng.choice("abc")) for _ in range(count)]
    return sorted(made, key=lambda one: one.ms)


@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: window.name)
def test_each_moment_has_what_the_window_held_then(window: Window) -> None:
    rng = random.Random(window.name)
    past = events(rng, NOW_MS - 9 * DAY_MS, NOW_MS + 1, 100)
    past += [Event(NOW_MS - n * 10 * MINUTE_MS, 3, "a") for n in range(150)]  # at the very moments that are shown
    past.sort(key=lambda one: one.ms)
    coming = events(rng, NOW_MS + 1, NOW_MS + DAY_MS, 50)
    others = [(70, NOW_MS + HOUR_MS), (5, NOW_MS - 1), (9, NOW_MS)]
    made = curve(window, NOW_MS, NOW_MS + 5 * HOUR_MS, past, coming, others)

    def held(at_ms: int, job: str | None = None) -> int:
        counted = [one for one in (*past, *coming) if cutoff(window, at_ms) < one.ms <= at_ms]
        return sum(one.units for one in counted if job in (None, one.job))

    assert (made.times_ms[0], made.times_ms[-1], len(made.times_ms)) == (made.start_ms, NOW_MS, SAMPLES)
    for n, at_ms in enumerate(made.times_ms):
        assert {job: units[n] for job, units in made.jobs.items()} == {job: held(at_ms, job) for job in made.jobs}
        assert sum(units[n] for units in made.jobs.values()) == held(at_ms)
    assert made.ahead[0][0] == NOW_MS
    assert made.ahead[-1][0] == made.end_ms - 1
    for at_ms, units in made.ahead:
        assert units == held(at_ms) + sum(one for one, until_ms in others if at_ms < until_ms)


def test_a_chart_ends_with_the_reset() -> None:
    day, hour = Sliding(DAY_MS), Calendar("hour", "UTC")
    assert span(day, NOW_MS, NOW_MS + 1)[1] == NOW_MS + 3 * HOUR_MS
    assert span(day, NOW_MS, NOW_MS + 9 * HOUR_MS) == (NOW_MS - DAY_MS, NOW_MS + 9 * HOUR_MS)
    assert span(day, NOW_MS, NOW_MS + 40 * DAY_MS)[1] == NOW_MS + DAY_MS
    assert span(hour, NOW_MS, None) == (NOW_MS - DAY_MS, NOW_MS + DAY_MS)
    assert span(Calendar("day", "UTC"), NOW_MS, NOW_MS + 1) == Calendar("day", "UTC").edges(NOW_MS)[:2]


def test_every_shape_lies_in_the_field_and_the_stack_ends_with_what_is_used() -> None:
    rng = random.Random(7)
    for count in (0, 1, 2, 300):
        made = curve(Sliding(HOUR_MS), NOW_MS, None, events(rng, NOW_MS - DAY_MS, NOW_MS, count))
        shapes = chart(made, 500, colours_of(made.jobs), NOW_MS + HOUR_MS)
        numbers = [float(n) for band in shapes.bands for n in re.findall(r"[\d.]+", band.path)]
        assert all(0 <= n <= WIDTH for n in numbers[::2])
        assert all(0 <= n <= HEIGHT for n in numbers[1::2])
        assert sum(band.units for band in shapes.bands) == sum(units[-1] for units in made.jobs.values())
        places = [shapes.now, shapes.limit_y, *(tick.at for tick in (*shapes.times, *shapes.units))]
        assert all(0 <= place <= 100 for place in places)
        assert shapes.next is not None


def test_the_forecast_ends_where_the_plan_ends() -> None:
    month, known_ms = Calendar("month", "UTC"), NOW_MS + 30 * HOUR_MS
    expected = [Event(NOW_MS + 10 * HOUR_MS, 70, "a")]
    made = curve(month, NOW_MS, None, [Event(NOW_MS - 5, 3, "a")], expected, known_ms=known_ms)
    assert (made.ahead[0], made.ahead[-1], made.end_ms) == ((NOW_MS, 3), (known_ms - 1, 73), month.edges(NOW_MS)[1])
    assert curve(month, NOW_MS, None, [], expected, known_ms=NOW_MS - DAY_MS).ahead == ((NOW_MS, 0),)


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
OTHER_CHANGES = ("America/New_York 2026-03-08", "Europe/Berlin 2026-10-25", "Australia/Lord_Howe 2026-04-05")


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


@pytest.mark.parametrize("night", OTHER_CHANGES, indirect=True)
def test_every_round_time_has_one_label_while_clocks_change(night: datetime) -> None:
    """The chart may begin or end between the two times that the clock shows two."""
    for begin in range(-4 * 60, 8 * 60, 10):
        start_ms, span_ms = int(night.timestamp() * 1000) + begin * MINUTE_MS, 8 * HOUR_MS
        made = Curve(start_ms, start_ms + span_ms, start_ms + span_ms, (start_ms, start_ms + span_ms), {}, ())
        inside = range(start_ms + span_ms * 3 // 100, start_ms + span_ms * 97 // 100, MINUTE_MS)
        clock = [datetime.fromtimestamp(-(-at_ms // MINUTE_MS) * 60, night.tzinfo) for at_ms in inside]
        round_times = dict.fromkeys(f"{at:%H:%M}" for at in clock if at.minute == 0)
        assert [tick.label for tick in chart(made, 5, {}, None).times] == [*round_times], begin


@pytest.mark.parametrize(
    ("age_ms", "rows"), [(0, 1), (5_000, 1), (35 * MINUTE_MS, 4), (12 * HOUR_MS, 25), (24 * HOUR_MS - 1, 25)]
)
def test_the_table_of_a_period_that_has_just_begun_does_not_repeat_a_time(age_ms: int, rows: int) -> None:
    window = Calendar("day", "UTC")
    made = curve(window, window.edges(NOW_MS)[0] + age_ms, None, [])
    times = [row[0] for row in _hours(made, chart(made, 5, {}, None).bands)["rows"]]
    assert (times[0], len(times)) == (made.now_ms, rows)


def test_a_capacity_beyond_what_is_shown_has_no_mark() -> None:
    made = curve(Sliding(DAY_MS), NOW_MS, NOW_MS + HOUR_MS, [])
    marks = [chart(made, 5, {}, at_ms).next for at_ms in (None, NOW_MS - 1, NOW_MS + 4 * HOUR_MS, made.end_ms)]
    assert marks == [None, None, None, 100]


def test_jobs_beyond_the_colours_are_one_band() -> None:
    jobs = [f"j{n}" for n in range(9)]
    made = Curve(0, 10, 20, (0, 10), dict.fromkeys(jobs, (1, 2)), ())
    shapes = chart(made, 20, colours_of(jobs), None)
    assert [(band.job, band.colour, band.units) for band in shapes.bands] == [
        *((job, n, 2) for n, job in enumerate(jobs[:COLOURS], 1)),
        (OTHERS, 0, 2 * (9 - COLOURS)),
    ]


def test_a_job_that_is_called_as_the_band_of_the_others_keeps_its_units() -> None:
    made = Curve(0, 10, 20, (0, 10), {OTHERS: (1, 2), "": (3, 4)}, ())
    assert [band.units for band in chart(made, 20, colours_of(made.jobs), None).bands] == [2, 4]


@pytest.mark.parametrize("units", [1, 3, 10, 95, 9_500])
def test_an_axis_has_few_round_numbers_below_the_limit(units: int) -> None:
    made = Curve(0, 10, 20, (0, 10), {}, ())
    labels = [int(tick.label.replace(",", "")) for tick in chart(made, units, {}, None).units if tick.label]
    assert len(labels) <= 4
    assert all(0 < label < units for label in labels)
