"""When a job runs: a cron line or an interval. Pure: times go in, times come out; it has no clock and no timer.

    Cron            "*/30 6-20 * * mon-fri": the wall clock of a zone
    Every           "every 45m": elapsed time, counted from 1970-01-01 00:00 UTC
    parse_schedule  reads either from its text

A schedule gives the same times on every machine and after every restart, because it depends on nothing else. So several
schedulers agree on each tick, and a simulation predicts it.

Cron lines mean what they mean to cron: weekdays count from Sunday = 0 (7 is Sunday too), and a line with both a day of
the month and a weekday runs on either. When the clock changes:

    the clock goes forward     a skipped time runs later by the same amount: 02:30 becomes 03:30
    the clock goes back        a repeated time runs once, the first time; a line for every hour of the day runs both
                               times, so that no hour is left out

APScheduler's cron trigger differs in all of these, and around clock changes its answer also depends on its last answer.
At all other times the tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo

from quota.common.text import number_in, show
from quota.terms.limits import DAY_MS, MINUTE_MS, SECOND_MS, load_zone, parse_duration

EVERY = "every"
MAX_EVERY_MS = 366 * DAY_MS
MAX_PAUSE_DAYS = 8 * 366 + 1
"""The longest pause of a cron line that ever fires: 29 February, across a century year without a leap day."""


class Every(NamedTuple):
    """Fires at each multiple of `interval_ms` since 1970, also across clock changes."""

    interval_ms: int

    @property
    def shortest_ms(self) -> int:
        """The shortest time between two fires."""
        return self.interval_ms

    def fires(self, since_ms: int, until_ms: int) -> Iterator[int]:
        """The fire times with since_ms <= t < until_ms, in order."""
        first_ms = -(-since_ms // self.interval_ms) * self.interval_ms
        return iter(range(first_ms, until_ms, self.interval_ms))


class Cron(NamedTuple):
    """A cron line in a zone. `weekdays` count from Sunday = 0. With `either` a day must match the day of the month or
    the weekday, otherwise both.
    """

    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    either: bool
    zone: str

    @property
    def shortest_ms(self) -> int:
        """The shortest time between two fires on the wall clock."""
        times = [hour * 60 + minute for hour in self.hours for minute in self.minutes]
        following = [*times[1:], times[0] + 24 * 60 * _fewest_days(self)]
        return MINUTE_MS * min(b - a for a, b in zip(times, following, strict=True))

    def fires(self, since_ms: int, until_ms: int) -> Iterator[int]:
        """The fire times with since_ms <= t < until_ms, in order."""
        zone = load_zone(self.zone)
        minutes_ms = tuple((hour * 60 + minute) * MINUTE_MS for hour in self.hours for minute in self.minutes)
        # Start a day early: a skipped time may run on the next day.
        day = datetime.fromtimestamp(since_ms // 1000, UTC).astimezone(zone).date() - timedelta(days=1)
        last_ms = since_ms - 1
        while True:
            midnight_ms, regular = _day(self.zone, day)
            if midnight_ms >= until_ms:
                return
            if self.fires_on(day):
                times = (midnight_ms + at for at in minutes_ms) if regular else self._at_change(day, zone)
                for at_ms in times:
                    if last_ms < at_ms < until_ms:
                        yield at_ms
                        last_ms = at_ms
            day += timedelta(days=1)

    def fires_on(self, day: date) -> bool:
        of_month, of_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        is_chosen = of_month or of_week if self.either else of_month and of_week
        return is_chosen and day.month in self.months

    def _at_change(self, day: date, zone: ZoneInfo) -> list[int]:
        """The fire times of a day on which the clock changes."""
        times_ms = set()
        for hour in self.hours:
            for minute in self.minutes:
                # fold=0 is the first of two equal times; for a skipped time it uses the offset before the change.
                first = datetime(day.year, day.month, day.day, hour, minute, tzinfo=zone)
                times_ms.add(int(first.timestamp()) * 1000)
                second_ms = int(first.replace(fold=1).timestamp()) * 1000
                # For a skipped time fold=1 is earlier, so this adds nothing.
                if len(self.hours) == 24 and second_ms > int(first.timestamp()) * 1000:
                    times_ms.add(second_ms)
        return sorted(times_ms)


@lru_cache(maxsize=256)
def _fewest_days(cron: Cron) -> int:
    """The fewest days from one day of a cron line to the next, as seen in MAX_PAUSE_DAYS."""
    fewest, last = MAX_PAUSE_DAYS, -MAX_PAUSE_DAYS
    for number in range(MAX_PAUSE_DAYS):
        if cron.fires_on(date(2024, 1, 1) + timedelta(days=number)):
            fewest, last = min(fewest, number - last), number
            if fewest == 1:
                break
    return fewest


Schedule = Cron | Every


@lru_cache(maxsize=256)
def parse_schedule(text: str, zone: str = "UTC") -> Schedule:
    """The schedule that `text` describes; a cron line uses the wall clock of `zone`.

    Raises ValueError for a text that is neither, and for a line that never fires. The message shows what is wrong.
    """
    fields = text.split()
    if fields[:1] == [EVERY]:
        return _every(text, fields[1:])
    if len(fields) != 5:
        raise ValueError(f'{show(text)} is neither a cron line of five fields such as "*/30 * * * *" nor "every 45m"')
    minutes, hours, days, months, weekdays = (
        _field(field, *shape) for field, shape in zip(fields, _FIELDS, strict=True)
    )
    # As in cron: if either field begins with a star, both must match; otherwise one is enough.
    either = not fields[2].startswith("*") and not fields[4].startswith("*")
    if not either and not any(day <= _MAX_MONTH[month - 1] for day in days for month in months):
        raise ValueError(f"{show(text)} never fires: none of its months has a day {min(days)}")
    return Cron(
        minutes=tuple(sorted(minutes)),
        hours=tuple(sorted(hours)),
        days=frozenset(days),
        months=frozenset(months),
        weekdays=frozenset(day % 7 for day in weekdays),
        either=either,
        zone=zone,
    )


def _every(text: str, rest: list[str]) -> Every:
    try:
        interval_ms = parse_duration("".join(rest))
    except ValueError:
        raise ValueError(f'{show(text)} is not an interval; write for example "every 45m"') from None
    if not SECOND_MS <= interval_ms <= MAX_EVERY_MS:
        raise ValueError(f'{show(text)}: an interval is from "every 1s" to "every 366d"')
    return Every(interval_ms)


_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_MAX_MONTH = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_FIELDS: tuple[tuple[str, int, int, tuple[str, ...]], ...] = (
    ("minute", 0, 59, ()),
    ("hour", 0, 23, ()),
    ("day of month", 1, 31, ()),
    ("month", 1, 12, _MONTHS),
    ("weekday", 0, 7, _WEEKDAYS),
)


def _field(text: str, what: str, minimum: int, maximum: int, names: tuple[str, ...]) -> set[int]:
    """The numbers that one field of a cron line selects."""
    selected: set[int] = set()
    for part in text.split(","):
        span, slash, step_text = part.partition("/")
        first, dash, last = span.partition("-")
        if span == "*":
            low, high = minimum, 6 if what == "weekday" else maximum
        else:
            low = _number(first, what, minimum, maximum, names)
            high = _number(last, what, minimum, maximum, names) if dash else low
        if high < low:
            raise ValueError(f"{what} {show(part)} runs backwards; write two ranges, separated by a comma")
        step = 1
        if slash:
            if not dash and span != "*":
                raise ValueError(f"{what} {show(part)}: a step needs a range; write {first}-{maximum}/{step_text[:9]}")
            step = _number(step_text, f"step of {what}", 1, maximum, ())
        selected.update(range(low, high + 1, step))
    return selected


def _number(text: str, what: str, minimum: int, maximum: int, names: tuple[str, ...]) -> int:
    number = number_in(text, minimum, maximum)
    if number is not None:
        return number
    if text.lower() in names:
        return names.index(text.lower()) + (what == "month")
    named = f", or {names[0]} to {names[-1]}" if names else ""
    raise ValueError(f"{what} {show(text)} is not a number from {minimum} to {maximum}{named}")


@lru_cache(maxsize=4096)
def _day(zone_name: str, day: date) -> tuple[int, bool]:
    """When a day begins in a zone, and whether it passes without a clock change.

    The first field is a lower bound of every time in it, also where midnight itself is skipped.
    """
    zone = load_zone(zone_name)
    begins = datetime(day.year, day.month, day.day, tzinfo=zone)
    following = day + timedelta(days=1)
    ends = datetime(following.year, following.month, following.day, tzinfo=zone)
    return int(begins.timestamp()) * 1000, begins.utcoffset() == ends.replace(fold=1).utcoffset()
