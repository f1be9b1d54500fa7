"""When jobs run: tables of times, both clock changes of 2026, and APScheduler's own trigger as a second opinion."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from itertools import pairwise

import pytest

from quota.jobs.ticks import Stream, streams, ticks
from quota.settings.model import JobSettings
from quota.settings.schedules import Every, parse_schedule
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS

LA, BERLIN = "America/Los_Angeles", "Europe/Berlin"


def ms(text: str) -> int:
    """`2026-03-08T10:30` in UTC."""
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


def utc(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%d %H:%M")


def fires(line: str, zone: str, since: str, until: str) -> list[str]:
    return [utc(at) for at in parse_schedule(line, zone).fires(ms(since), ms(until))]


def job(name: str = "t", **more: object) -> JobSettings:
    fields: dict[str, object] = {
        "name": name,
        "credential": "main",
        "fetch": "trending",
        "regions": ("US", "DE", "FR"),
        "pages": 1,
        "schedule": "*/30 * * * *",
        "stagger_ms": 0,
        "leave": {},
        "options": {},
        "misfire_grace_ms": 600_000,
        **dict.fromkeys(("max_body_mb", "max_answer_s", "max_items"), 1),
    }
    return JobSettings(**{**fields, **more})  # type: ignore[arg-type]


# 2026-11-01 is a Sunday. (line, fires in that week, or the first of them)
LINES = [
    ("0 0,12 1 * *", ["01 00:00", "01 12:00"]),
    ("5-20/5 3 2 nov *", ["02 03:05", "02 03:10", "02 03:15", "02 03:20"]),
    # Weekdays count from Sunday, which is 0 and 7, as in cron; names in any case.
    ("0 9 * * 0", ["01 09:00"]),
    ("0 9 * * SUN,wed", ["01 09:00", "04 09:00"]),
    ("0 9 * * 1-5", ["02 09:00", "03 09:00", "04 09:00", "05 09:00", "06 09:00"]),
    ("0 9 * * fri-7", ["01 09:00", "06 09:00", "07 09:00"]),
    ("0 9 * * */3", ["01 09:00", "04 09:00", "07 09:00"]),
    # A day of the month and a weekday: either suffices, unless one of them begins with a star.
    ("0 9 3 * 5", ["03 09:00", "06 09:00"]),
    ("0 9 */2 * 1-5", ["03 09:00", "05 09:00"]),
]


@pytest.mark.parametrize(("line", "expected"), LINES, ids=[line for line, _ in LINES])
def test_a_cron_line_means_what_it_means_to_cron(line: str, expected: list[str]) -> None:
    assert fires(line, "UTC", "2026-11-01T00:00", "2026-11-08T00:00")[: max(3, len(expected))] == expected


CHANGES = [
    # Forward, 02:00 -> 03:00 on 8 March in Los Angeles (10:00 UTC) and on 29 March in Berlin (01:00 UTC).
    # What is skipped runs as much later, once; the next day it is back on its wall clock.
    ("30 2 * * *", LA, "2026-03-08T00:00", "2026-03-10T00:00", ["08 10:30", "09 09:30"]),
    # An even beat stays even.
    ("30 * * * *", LA, "2026-03-08T08:00", "2026-03-08T12:00", ["08 08:30", "08 09:30", "08 10:30", "08 11:30"]),
    ("0 */2 * * *", BERLIN, "2026-03-28T23:00", "2026-03-29T05:00", ["28 23:00", "29 01:00", "29 02:00", "29 04:00"]),
    # Back, 02:00 -> 01:00 on 1 November in Los Angeles (09:00 UTC), 03:00 -> 02:00 on 25 October in Berlin (01:00 UTC).
    # What comes twice runs the first time round ...
    ("30 1 * * *", LA, "2026-11-01T00:00", "2026-11-03T00:00", ["01 08:30", "02 09:30"]),
    ("0 */2 * * *", BERLIN, "2026-10-24T22:00", "2026-10-25T04:00", ["24 22:00", "25 00:00", "25 03:00"]),
    # ... and what runs every hour runs in both.
    ("30 * * * *", LA, "2026-11-01T07:00", "2026-11-01T11:00", ["01 07:30", "01 08:30", "01 09:30", "01 10:30"]),
    ("*/30 * * * *", BERLIN, "2026-10-25T00:00", "2026-10-25T02:00", ["25 00:00", "25 00:30", "25 01:00", "25 01:30"]),
    # A day whose midnight is skipped or comes twice (Havana, 8 March and 1 November), and a change of half an hour.
    ("0 0 * * *", "America/Havana", "2026-03-07T12:00", "2026-03-10T00:00", ["08 05:00", "09 04:00"]),
    ("30 0 * * *", "America/Havana", "2026-10-31T12:00", "2026-11-03T00:00", ["01 04:30", "02 05:30"]),
    # 23:30 -> 00:30, in Toronto on 30 March 1919: the skipped time runs on the next day.
    ("45 23 * * *", "America/Toronto", "1919-03-31T04:40", "1919-04-01T12:00", ["31 04:45", "01 03:45"]),
    ("15 2 * * *", "Australia/Lord_Howe", "2026-10-02T20:00", "2026-10-05T00:00", ["03 15:45", "04 15:15"]),
]


@pytest.mark.parametrize(("line", "zone", "since", "until", "expected"), CHANGES)
def test_a_clock_change_neither_loses_nor_repeats_a_tick(
    line: str, zone: str, since: str, until: str, expected: list[str]
) -> None:
    assert fires(line, zone, since, until) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("61 * * * *", "minute '61' is not a number from 0 to 59"),
        ("* * * 13 *", "month '13' is not a number from 1 to 12, or jan to dec"),
        ("* * * * 8", "weekday '8' is not a number from 0 to 7, or sun to sat"),
        ("*/0 * * * *", "step of minute '0' is not a number from 1 to 59"),
        ("5/10 * * * *", "minute '5/10': a step needs a range; write 5-59/10"),
        ("30-10 * * * *", "minute '30-10' runs backwards"),
        ("٣ * * * *", "minute '٣' is not"),
        ("0 0 31 2 *", "'0 0 31 2 *' never fires: none of its months has a day 31"),
        ("* * * *", "neither a cron line of five fields"),
        ("every day", "not an interval"),
        ("every 0s", "not an interval"),
        ("every 500ms", 'from "every 1s" to "every 366d"'),
    ],
)
def test_an_invalid_schedule_is_one_line_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^.*{re.escape(message)}.*$"):
        parse_schedule(text)


def test_a_rare_schedule_still_fires() -> None:
    assert fires("0 0 29 2 *", "UTC", "2026-01-01T00:00", "2033-01-01T00:00") == ["29 00:00", "29 00:00"]
    leap = Stream("t", (), parse_schedule("0 0 29 2 *"), 0, 0)
    assert leap.after(ms("2096-03-01T00:00")).at_ms == ms("2104-02-29T00:00"), "2100 is no leap year"
    assert fires("0 0 31 2 1", "UTC", "2026-01-01T00:00", "2026-02-16T00:00") == ["02 00:00", "09 00:00"]


def test_an_interval_counts_from_the_epoch_so_that_every_machine_and_restart_agrees() -> None:
    every = parse_schedule("every 45m")
    assert every == parse_schedule("every  45 m") == Every(45 * MINUTE_MS)
    first = next(every.fires(ms("2026-11-21T00:00"), ms("2026-11-22T00:00")))
    assert first % (45 * MINUTE_MS) == 0
    assert list(every.fires(first, first + 90 * MINUTE_MS)) == [first, first + 45 * MINUTE_MS]
    assert list(every.fires(first + 1, first + 90 * MINUTE_MS)) == [first + 45 * MINUTE_MS]


@pytest.mark.parametrize(
    ("text", "shortest_ms"),
    [
        ("*/45 * * * *", 15 * MINUTE_MS),
        ("0,10 6 * * *", 10 * MINUTE_MS),
        ("0 23,1 * * *", 2 * HOUR_MS),
        ("every 90s", 90_000),
        ("0 9 * * mon,sat", 2 * DAY_MS),
        ("0 1,23 29 2 *", 22 * HOUR_MS),
    ],
)
def test_a_schedule_knows_the_shortest_time_between_two_ticks(text: str, shortest_ms: int) -> None:
    assert parse_schedule(text).shortest_ms == shortest_ms


def test_with_stagger_each_region_is_a_tick_of_its_own_at_its_own_offset() -> None:
    due = list(ticks([job(stagger_ms=2 * MINUTE_MS)], ms("2026-11-21T00:02"), ms("2026-11-21T00:33")))
    starts = [f"{utc(tick.at_ms)} {' '.join(tick.regions)}" for tick in due]
    assert starts == ["21 00:02 DE", "21 00:04 FR", "21 00:30 US", "21 00:32 DE"]
    assert len({tick.name for tick in due}) == 4


def test_no_tick_overtakes_another_where_the_clock_goes_forward() -> None:
    schedule, start = parse_schedule("0 1,3 * * *", BERLIN), ms("2026-03-28T00:00")
    for number in range(15):
        stream = Stream(f"j{number}", (), schedule, MINUTE_MS, schedule.shortest_ms - 1)
        due = [tick.at_ms for tick in stream.ticks(start, start + 2 * DAY_MS)]
        assert due == sorted({*due})
        assert [stream.after(before).at_ms for before in [start - 1, *due[:-1]]] == due


def test_jitter_is_the_same_for_everybody_within_its_bounds_and_spread() -> None:
    jobs = [job(jitter_ms=60_000, stagger_ms=MINUTE_MS)]
    start = ms("2026-11-21T00:00")
    due = list(ticks(jobs, start, start + 7 * DAY_MS))
    assert due == list(ticks(jobs, start, start + 7 * DAY_MS))
    for region, offset in (("US", 0), ("DE", MINUTE_MS), ("FR", 2 * MINUTE_MS)):
        late = [(tick.at_ms - offset) % (30 * MINUTE_MS) for tick in due if tick.regions == (region,)]
        assert len(late) == 336
        assert 0 <= min(late) < 3_000 < 57_000 < max(late) <= 60_000
        assert 25_000 < sum(late) / len(late) < 35_000


def test_any_span_shows_the_same_ticks() -> None:
    jobs = [job(jitter_ms=60_000, stagger_ms=MINUTE_MS), job("other", schedule="every 7m", jitter_ms=6 * MINUTE_MS)]
    start, hours = ms("2026-11-01T06:00"), 6
    whole = list(ticks(jobs, start, start + hours * HOUR_MS))
    pieces = [tick for at in range(start, start + hours * HOUR_MS, 30_000) for tick in ticks(jobs, at, at + 30_000)]
    assert pieces == whole
    assert all(a.at_ms <= b.at_ms for a, b in pairwise(whole))
    for stream in streams(jobs):
        walked, at = [], start - 1
        while (following := stream.after(at)).at_ms < start + hours * HOUR_MS:
            walked.append(following)
            at = following.at_ms
        assert walked == list(stream.ticks(start, start + hours * HOUR_MS))
