"""The emulated upstream's counts: calls, and units per project, bucket and Pacific day. Cloud Monitoring shows them.

This module repeats the prices on purpose. The emulator plays the provider, so it must be able to
disagree with the cost book of the client that it tests.

The emulator's Cloud Monitoring answers `projects.timeSeries.list` for the quota metrics:

    quota/rate/net_usage    one series for each bucket and method, one DELTA point for each minute, newest first
    quota/limit             one series for each bucket, one GAUGE point a day

All points are on one page. The running minute is there too, up to now. Calls that the day's quota did not cover are in
no point. A project is asked for by its name or its number, as the emulator's errors have it; any other name stands for
all projects together, because here each key without a project is one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime
from typing import Any, Literal, NamedTuple

from quota.common.clock import rfc3339
from quota.errors import ConfigError
from quota.jobs.emulator import replies
from quota.jobs.emulator.replies import Json, Rejected, Reply, shaped
from quota.terms.limits import DAY_MS, MINUTE_MS, load_zone

Allocation = Literal["pool", "buckets"]

UNKNOWN = "unknown"
"""An invalid call that matches no method."""

READ_UNITS, WRITE_UNITS = 1, 50
"""What other methods cost than those in `methods.toml`."""

_READS = {"list", "get", "getRating", "batchGetStats", "download", "stream"}

BUCKETS: dict[str, Json] = replies.METHODS["buckets"]
BUCKET_OF = {names["method"]: bucket for bucket, names in BUCKETS.items() if "method" in names}


def price(method: str, allocation: Allocation) -> tuple[str, int]:
    """(bucket, units) that one call of `method` costs."""
    if allocation == "buckets" and method in BUCKET_OF:
        return BUCKET_OF[method], 1
    is_read = method.rpartition(".")[2] in _READS
    return "units", replies.METHODS["units"].get(method, READ_UNITS if is_read else WRITE_UNITS)


class Charge(NamedTuple):
    """One call as upstream booked it. `refused`: the day's quota of `bucket` did not cover it."""

    project: str
    bucket: str
    units: int
    refused: bool


class Minute(NamedTuple):
    """One method's use of one project's bucket in the minute that begins at `start_ms`."""

    start_ms: int
    project: str
    bucket: str
    method: str


KEPT_MS = 3 * DAY_MS


class Meter:
    """Counts the calls and decides which of them the day's quota covers. The caller holds the lock."""

    def __init__(self, allocation: Allocation, quota: int, clock: Callable[[], int]) -> None:
        self.allocation = allocation
        self.now_ms = clock
        self.quota_units = {"units": quota}
        if allocation == "buckets":
            self.quota_units |= {bucket: BUCKETS[bucket]["calls"] for bucket in BUCKET_OF.values()}
        try:
            self._zone = load_zone("America/Los_Angeles")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self.by_method: Counter[str] = Counter()  # the calls of all callers, with any outcome
        self._units: Counter[str] = Counter()  # by bucket
        self._day: date | None = None
        self._used: Counter[tuple[str, str]] = Counter()
        self.minutes: Counter[Minute] = Counter()

    def charge(self, project: str, method: str) -> Charge:
        """Book one call. A refused call counts in `units`, because its sender spent them, but it uses none of
        the day's quota, which may still cover cheaper calls."""
        bucket, units = price(method, self.allocation)
        used = self.used_today()
        refused = used[project, bucket] + units > self.quota_units[bucket]
        if not refused:
            used[project, bucket] += units
            self._note(project, method, bucket, units)
        self._units[bucket] += units
        return Charge(project, bucket, units, refused)

    def _note(self, project: str, method: str, bucket: str, units: int) -> None:
        """Keep the units that the day's quota covered, by the minute, for KEPT_MS."""
        minute_ms = self.now_ms() // MINUTE_MS * MINUTE_MS
        oldest = next(iter(self.minutes), None)
        if oldest is not None and oldest.start_ms < minute_ms - KEPT_MS:
            kept = {key: units for key, units in self.minutes.items() if key.start_ms >= minute_ms - KEPT_MS}
            self.minutes = Counter(kept)
        self.minutes[Minute(minute_ms, project, bucket, method)] += units

    def usage(self) -> dict[str, Any]:
        return {
            "requests": self.by_method.total(),
            "by_method": dict(self.by_method),
            "units": {bucket: self._units[bucket] for bucket in self.quota_units},
        }

    def used_today(self) -> Counter[tuple[str, str]]:
        """The units of each project and bucket that the quota of this Pacific day has covered."""
        day = datetime.fromtimestamp(self.now_ms() // 1000, self._zone).date()
        if day != self._day:
            self._day, self._used = day, Counter()
        return self._used


# -- Cloud Monitoring --------------------------------------------------------------------------------------------------

TIME_SERIES_OF = re.compile(r"/v3/projects/([^/]+)/timeSeries")
"""Matches the path of a project's time series."""

_TERM = re.compile(r'\s*([a-z_.]+)\s*=\s*"([^"]*)"\s*')
_PREFIX = "serviceruntime.googleapis.com/quota/"
_SERVICE = "youtube.googleapis.com"

Labels = tuple[tuple[str, str], ...]
"""The metric labels of a series, by name."""

Point = tuple[Labels, int, int, int]
"""One point: the labels of its series, its start and its end in ms, and its value."""


def time_series(params: Mapping[str, str], project: str, meter: Meter) -> Reply:
    """The answer to `timeSeries.list`. Raises Rejected, as upstream does, for a request that it would not accept."""
    terms = _terms(params.get("filter", ""))
    try:
        since_ms, until_ms = (
            int(datetime.fromisoformat(params[f"interval.{end}Time"]).timestamp() * 1000) for end in ("start", "end")
        )
    except (KeyError, ValueError):
        raise Rejected(replies.bad_request("Field interval had an invalid value: timestamps are required.")) from None
    if since_ms >= until_ms:
        raise Rejected(replies.bad_request("The start time must be before the end time."))
    metric = terms.pop("metric.type", "").removeprefix(_PREFIX)
    if metric == "rate/net_usage":
        points, kind = _usage(project, meter, min(until_ms, meter.now_ms())), "DELTA"
    elif metric == "limit":
        points, kind = _limits(meter), "GAUGE"
    else:
        raise Rejected(replies.bad_request('The supplied filter must specify a "metric.type" that is known.'))
    series: dict[Labels, list[Json]] = {}
    for labels, start_ms, end_ms, value in points:
        names = {**_OF_EACH, **{f"metric.labels.{name}": text for name, text in labels}}
        if since_ms < end_ms <= until_ms and terms.items() <= names.items():
            point = shaped("point", start=rfc3339(start_ms), end=rfc3339(end_ms), value=str(value))
            series.setdefault(labels, []).append(point)
    values = {"metric": f"{_PREFIX}{metric}", "kind": kind, "project": project, "service": _SERVICE}
    written = [shaped("timeSeries", **values, labels=dict(labels), points=within) for labels, within in series.items()]
    return Reply(200, {"unit": "1", **({"timeSeries": written} if written else {})})


_OF_EACH = {"resource.type": "consumer_quota", "resource.labels.service": _SERVICE}
"""What a filter may ask of each series."""


def _terms(text: str) -> dict[str, str]:
    """`NAME = "VALUE" AND ...` as a dict."""
    terms = {}
    for part in re.split(r"\bAND\b", text):
        term = _TERM.fullmatch(part)
        if term is None:
            raise Rejected(replies.bad_request("The supplied filter does not have any valid operands."))
        terms[term[1].replace(".label.", ".labels.")] = term[2]
    return terms


def _usage(project: str, meter: Meter, until_ms: int) -> Iterator[Point]:
    """The minutes of a project, or of all projects. The current minute ends at `until_ms`."""
    projects = {minute.project for minute in meter.minutes}
    wanted = {name for name in projects if project in (name, str(replies.project_number(name)))} or projects
    sums: Counter[tuple[Labels, int]] = Counter()
    for minute, units in sorted(meter.minutes.items(), key=lambda item: (-item[0].start_ms, item[0])):
        if minute.project in wanted:
            labels: Labels = (
                ("method", replies.long_name(minute.method)),
                ("quota_metric", BUCKETS[minute.bucket]["metric"]),
            )
            sums[labels, minute.start_ms] += units
    for (labels, start_ms), units in sums.items():
        if units:
            yield labels, start_ms, min(start_ms + MINUTE_MS, max(until_ms, start_ms + 1)), units


def _limits(meter: Meter) -> Iterator[Point]:
    today_ms = meter.now_ms() // DAY_MS * DAY_MS
    for bucket, quota_units in meter.quota_units.items():
        labels: Labels = ("limit_name", BUCKETS[bucket]["limit"]), ("quota_metric", BUCKETS[bucket]["metric"])
        for day_ms in (today_ms, today_ms - DAY_MS, today_ms - 2 * DAY_MS):
            yield labels, day_ms, day_ms, quota_units
