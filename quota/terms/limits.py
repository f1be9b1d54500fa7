"""Limits: a number, a window, and a selector of charges. Pure: no storage and no clock of its own.

A limit's *view* (its running total in the ledger) takes its name from the selector and the window, never from the
limit's own name or number. Callers with different or changed configurations therefore read and write the same total.
"""

from __future__ import annotations

import re
from calendar import monthrange
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from typing import Literal, assert_never, get_args
from zoneinfo import ZoneInfo, available_timezones

from quota.common.clock import LATEST_MS
from quota.common.text import show
from quota.errors import UsageError
from quota.terms.arguments import MAX_NUMBER, instance, text, texts, whole

MAX_UNITS = 10**15 - 1
"""The largest limit, and the largest charge: 15 digits are exact in every storage format and language. No provider
grants a larger quota."""

SECOND_MS = 1_000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS

SLACK_MS = 25 * HOUR_MS
"""A long day: how far a clock may go back. So much longer than the longest window the log keeps its entries."""

UNITS_MS = {"ms": 1, "s": SECOND_MS, "m": MINUTE_MS, "h": HOUR_MS, "d": DAY_MS}
_DURATION = re.compile(r"([0-9]{1,12})\s*(ms|s|m|h|d)")

Period = Literal["quarter-hour", "hour", "day", "week", "month"]
Count = Literal["units", "calls"]

PERIODS: tuple[Period, ...] = get_args(Period)
LAST_DAY = 31

PERIOD_MS = {
    "quarter-hour": 15 * MINUTE_MS,
    "hour": HOUR_MS,
    "day": DAY_MS,
    "week": 7 * DAY_MS,
    "month": 31 * DAY_MS,
}
"""The length of a period without a clock change; for a month, the longest."""

Edges = tuple[int, int]
"""Two consecutive calendar edges in ms: the latest, and the next."""


def parse_duration(text: str) -> int:
    """Milliseconds in a duration: `"24h"` -> 86_400_000. Units: ms, s, m, h, d.

    Raises ValueError for anything else and for zero; its message shows the text.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise ValueError(f'{show(text)} is not a duration; write for example "30m", "24h" or "7d"')
    return int(match[1]) * UNITS_MS[match[2]]


def format_duration(duration_ms: int) -> str:
    """The shortest exact spelling with hours as the largest unit: 86_400_000 -> `"24h"`."""
    for unit in ("h", "m", "s"):
        if duration_ms % UNITS_MS[unit] == 0:
            return f"{duration_ms // UNITS_MS[unit]}{unit}"
    return f"{duration_ms}ms"


@dataclass(frozen=True)
class Sliding:
    """The last `window_ms` milliseconds, exactly: a charge at t counts in (t, t + window) and is free at t + window."""

    window_ms: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "window_ms", whole(self.window_ms, "ms: a sliding window", 1, MAX_NUMBER))

    @property
    def name(self) -> str:
        return format_duration(self.window_ms)

    @property
    def longest_ms(self) -> int:
        return self.window_ms


@dataclass(frozen=True)
class Calendar:
    """The current quarter of an hour, hour, day, week or month in a named zone. Upstream itself counts by such periods.

    Days have 23, 24 or 25 hours; the edges come from the time zone database. A week begins on Monday, a month
    on its `day`, like a billing period, or on its last day if it has no such day. Raises ValueError.
    """

    period: Period
    zone: str
    day: int = 1

    def __post_init__(self) -> None:
        if self.period not in PERIODS:
            raise ValueError(f"{self.period!r} is not a calendar period; use {', '.join(PERIODS)}")
        load_zone(self.zone)
        object.__setattr__(self, "day", whole(self.day, "as the day of a month: that", 1, LAST_DAY))
        if self.day != 1 and self.period != "month":
            raise ValueError(f"a {self.period} has no `day` to begin on; only a month has")

    @property
    def name(self) -> str:
        """The window in view names: `day@UTC`, `month-15@UTC`."""
        return f"{self.kind}@{self.zone}"

    @property
    def kind(self) -> str:
        """The period, and its start if that is not the first day."""
        return self.period if self.day == 1 else f"{self.period}-{self.day}"

    @property
    def longest_ms(self) -> int:
        """With a clock change, which lengthens a day, week or month by an hour. UTC has none."""
        changes = PERIOD_MS[self.period] >= DAY_MS and load_zone(self.zone).utcoffset(None) is None
        return PERIOD_MS[self.period] + (HOUR_MS if changes else 0)

    def spelled_out(self) -> str:
        """For sentences, after "each" or "the": `month from day 15 on in UTC`."""
        begins = f" from day {self.day} on" if self.day != 1 else ""
        return f"{self.period}{begins} in {self.zone}"

    def edges(self, now_ms: int) -> Edges:
        """The edges around `now_ms`: edges[0] <= now_ms < edges[1]. Times after LATEST_MS have its edges."""
        now_ms = min(now_ms, LATEST_MS)
        seen = _edges_seen.get(self, _NONE_SEEN)
        for edges in seen:
            if edges[0] <= now_ms < edges[1]:
                return edges
        start_ms = _period_start(self, now_ms)
        edges = (start_ms, _period_start(self, start_ms, later=1))
        _edges_seen[self] = (edges, seen[0])
        return edges


Window = Sliding | Calendar


def no_longer(length_ms: int, other_ms: int) -> bool:
    """Whether a window is no longer than another. A day may have 25 hours and a month 31 days: both are as long as
    24 hours and 30 days."""
    return 24 * length_ms <= 25 * other_ms


def as_long(length_ms: int, other_ms: int) -> bool:
    """Whether two windows have the same length."""
    return no_longer(length_ms, other_ms) and no_longer(other_ms, length_ms)


def cutoff(window: Window, at_ms: int) -> int:
    """The newest millisecond that no longer counts (L5)."""
    return window.edges(at_ms)[0] - 1 if isinstance(window, Calendar) else at_ms - window.window_ms


def leaves_at(window: Window, at_ms: int) -> int:
    """The first millisecond at which a charge of `at_ms` no longer counts."""
    return window.edges(at_ms)[1] if isinstance(window, Calendar) else at_ms + window.window_ms


PACE_LEAD = 8
"""A paced limit runs an eighth of its window ahead of even spending. Work therefore has room at the start, and the
whole number is available three hours before a day ends, so a missing last tick leaves no units over."""


def paced_units(units: int, edges: Edges, now_ms: int) -> int:
    """The part of a window's `units` that may be spent by `now_ms`: an eighth at its start, all in its last eighth.

    9,500 a day: 1,187 at midnight, 5,937 at noon, 9,500 from 21:00 on.
    """
    span_ms = edges[1] - edges[0]
    return min(units, units * (now_ms - edges[0] + span_ms // PACE_LEAD) // span_ms)


def paced_until(units: int, edges: Edges, wanted_units: int) -> int:
    """The first millisecond of the window at which `paced_units` reaches `wanted_units` (0 to `units`)."""
    span_ms = edges[1] - edges[0]
    # The smallest whole x with units * x // span >= wanted, counted from an eighth before the window's start.
    return max(edges[0], edges[0] - span_ms // PACE_LEAD - (-wanted_units * span_ms // units))


_NONE_SEEN: tuple[Edges, Edges] = ((0, 0), (0, 0))
_edges_seen: dict[Calendar, tuple[Edges, Edges]] = {}
"""A cache of each calendar's edges, for two periods: a refusal asks for the present period and the next. A look-up in
the time zone database costs more than a whole decision."""


_NOT_EVERYWHERE = ("localtime", "posixrules", "right/")
"""Zones that differ from machine to machine, and those that count leap seconds."""


def load_zone(name: str) -> ZoneInfo:
    """The time zone of this name. Raises ValueError if there is none, or if this machine has no time zone data."""
    try:
        return ZoneInfo("" if name.startswith(_NOT_EVERYWHERE) else name)
    except (KeyError, ValueError, OSError) as error:
        zones = available_timezones()
        if not zones:
            data = "this machine has no time zone data"
            raise ValueError(f"{data}; install the package tzdata, of the system or with pip") from error
        from difflib import get_close_matches  # late: few processes meet an unknown zone

        near = [zone for zone in zones if zone.lower() == name.lower()]
        if "/" in name and not near:  # the zone nearest to PST is MST
            near = get_close_matches(name, zones, 1, 0.9)
        hint = f"did you mean {near[0]!r}?" if near else 'write for example "America/Los_Angeles"'
        raise ValueError(f"{show(name)} is not a time zone; {hint}") from error


def _period_start(calendar: Calendar, at_ms: int, *, later: int = 0) -> int:
    """The start in ms of the period that holds `at_ms`, or of the period `later` periods after it."""
    zone = load_zone(calendar.zone)
    local = datetime.fromtimestamp(at_ms // 1000, UTC).astimezone(zone)
    day = local.date()
    match calendar.period:
        case "quarter-hour" | "hour":
            # Count elapsed time: at a clock change the same wall hour comes twice, and each is an hour of its own. Use
            # the standard offset: Lord Howe's summer time is half an hour, and edges must not move during an hour.
            standard = (local.utcoffset() or timedelta()) - (local.dst() or timedelta())
            offset_ms, period_ms = round(standard.total_seconds() * 1000), PERIOD_MS[calendar.period]
            return (at_ms + offset_ms) // period_ms * period_ms - offset_ms + later * period_ms
        case "day":
            day += timedelta(days=later)
        case "week":
            day += timedelta(days=7 * later - day.weekday())
        case "month":
            before = day < _in_month(day.year * 12 + day.month - 1, calendar.day)
            day = _in_month(day.year * 12 + day.month - 1 - before + later, calendar.day)
        case _:
            assert_never(calendar.period)
    # Where a clock change skips midnight, fold=0 reads it with the old offset, which gives the moment of the change.
    return int(datetime(day.year, day.month, day.day, tzinfo=zone).timestamp()) * 1000


def _in_month(months: int, day: int) -> date:
    """A day of the month that is `months` after the year 0, or its last day if it has no such day."""
    year, month = months // 12, months % 12 + 1
    return date(year, month, min(day, monthrange(year, month)[1]))


@dataclass(frozen=True)
class Selector:
    """Selects the charges that a limit counts, by their units or as one per call. An empty field selects all names, a
    lone str that name.
    """

    buckets: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    count: Count = "units"

    def __post_init__(self) -> None:
        for names in ("buckets", "methods", "jobs"):
            object.__setattr__(self, names, texts(getattr(self, names), f"{names} of a limit:"))

    @property
    def noun(self) -> str:
        """The noun for what the limit counts: "unit" or "call"."""
        return self.count.removesuffix("s")

    def counts(self, bucket: str, method: str, job: str) -> bool:
        """Whether this limit counts a charge of this bucket, method and job."""
        return (
            self.counts_bucket(bucket)
            and (not self.methods or method in self.methods)
            and (not self.jobs or job in self.jobs)
        )

    def counts_bucket(self, bucket: str) -> bool:
        """Whether this limit counts calls of a bucket."""
        return not self.buckets or bucket in self.buckets

    def cost(self, units: int) -> int:
        """The amount that a charge of `units` adds: its units, or 1 per call. A refunded charge (0) adds nothing."""
        return min(units, 1) if self.count == "calls" else units


@dataclass(frozen=True)
class View:
    """One running total in the ledger: the charges that it counts, and its window."""

    selector: Selector
    window: Window
    name: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        selector = instance(self.selector, Selector, "selector", 'write Selector(buckets=("units",))')
        if not isinstance(self.window, Sliding | Calendar):
            raise UsageError(f"{show(self.window)} is not a window; write Sliding(DAY_MS) or Calendar(period, zone)")
        fields = [_names(selector.buckets), _names(selector.methods), _names(selector.jobs)]
        fields.append(self.window.name)
        if selector.count == "calls":
            fields.append("calls")
        object.__setattr__(self, "name", "|".join(fields))


def _names(names: Collection[str]) -> str:
    """One field of a view's name: sorted names with commas, `*` for all, and escaped separators inside a name."""
    if not names:
        return "*"
    return ",".join(sorted(re.sub(r"[%,|*]", lambda m: f"%{ord(m[0]):02X}", name) for name in names))


@dataclass(frozen=True)
class Limit:
    """A name, an enforced number, and the view that is compared with that number.

    `limit_units` is the enforced number, `quota_units` is upstream's grant, and `headroom_units` is the part of the
    grant left unspent. If the selector counts calls, all three are calls. If `paced`, a calendar window allows only the
    `paced_units` up to now. If `per_job`, each job has the whole number, in a view of its own: `of_jobs`. A `shadow`
    limit counts and never refuses: each decision says whether it would have refused. If `quota_unwritten`, the
    configuration has only the number to enforce (`units`), and upstream's grant is the cost book's.
    """

    name: str
    limit_units: int
    view: View
    quota_units: int
    headroom_units: int
    paced: bool = False
    per_job: bool = False
    shadow: bool = False
    quota_unwritten: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", text(self.name, "name of a limit:"))
        instance(self.view, View, f"view of limit {self.name!r}:", "write View(Selector(...), Sliding(DAY_MS))")
        for numbers, least in (("limit_units", 1), ("quota_units", 1), ("headroom_units", 0)):
            number = whole(getattr(self, numbers), f"{numbers} of limit {self.name!r}: that", least, MAX_NUMBER)
            object.__setattr__(self, numbers, number)
        if self.paced and not isinstance(self.view.window, Calendar):
            raise UsageError(f"limit {self.name!r} has no reset to pace towards: its window slides")
        if self.per_job and self.view.selector.jobs:
            raise UsageError(f"limit {self.name!r} is for each job, so it cannot select jobs")

    @property
    def narrow(self) -> bool:
        """Whether it selects methods or jobs. The other limits are a bucket's main limits."""
        return bool(self.view.selector.methods or self.view.selector.jobs or self.per_job)


def named_twice(limits: Sequence[Limit]) -> int | None:
    """The index of a limit whose name an earlier limit has, or whose name is reserved for a limit `per_job`."""
    kept = tuple([f"{limit.name}:" for limit in limits if limit.per_job])
    names = [limit.name for limit in limits]
    twice = (n for n, name in enumerate(names) if name in names[:n] or name.startswith(kept))
    return next(twice, None)


def of_jobs(limits: tuple[Limit, ...], jobs: Iterable[str]) -> tuple[Limit, ...]:
    """These limits, with a limit for each of `jobs` in place of each limit `per_job`: for the job `trending`, `share`
    becomes `share:trending`. A call without a job has none."""
    if not any(limit.per_job for limit in limits):
        return limits
    named, several = [job for job in jobs if job], list[Limit]()
    for limit in limits:
        if not limit.per_job:
            several.append(limit)
            continue
        for job in named:
            view = View(replace(limit.view.selector, jobs=(job,)), limit.view.window)
            several.append(replace(limit, name=f"{limit.name}:{job}", view=view, per_job=False))
    return tuple(several)
