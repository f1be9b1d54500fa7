"""The emulated upstream's counts: calls, and units per project, bucket and Pacific day. Cloud Monitoring shows them.

This module repeats the prices on purpose. The emulator plays the provider, so it must be able to
disagree with the cost book of the client that it tests.

The emulator's Cloud Monitoring answers `projects.timeSeries.list` for the quota metrics:

    quota/rate/net_usage    one series for each bucket and method, one DELTA point for each minute, newest first
    quota/limit             one series for each bucket, one GAUGE point a day

Calls that the day's quota did not cover are in no point. A point appears when its minute ended `lag_ms` ago; without a
lag the running minute is there too, up to now. A project is asked for by its name or its number, as in
`/emulator/usage`; any other name stands for all projects together, because here each key without a project is one.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Any, Literal, NamedTuple
from zoneinfo import ZoneInfo

from quota.common.clock import rfc3339
from quota.jobs.emulator import replies
from quota.jobs.emulator.replies import Json, Rejected, Reply
from quota.terms.limits import DAY_MS, MINUTE_MS

Allocation = Literal["pool", "buckets"]

READ_UNITS = 1
WRITE_UNITS = 50
UNKNOWN = "unknown"  # an invalid call that matches no method; it costs as much as the cheapest method

# Source: developers.google.com/youtube/v3/determine_quota_cost, as of 2026-06-01.
PRICES_UNITS = {
    "captions.list": 50,
    "captions.download": 200,
    "captions.insert": 400,
    "captions.update": 450,
    "search.list": 100,
    "videos.insert": 100,
    UNKNOWN: 1,
}
_READS = {"list", "get", "getRating", "batchGetStats", "download", "stream"}

# Since 2026-06-01 these methods have a bucket of their own, counted in calls (same source).
OWN_BUCKETS = {
    "search.list": "search",
    "videos.insert": "uploads",
    "videos.batchGetStats": "batch-stats",
}
BUCKET_QUOTA_CALLS = {"search": 100, "uploads": 100, "batch-stats": 10_000}

_PACIFIC = ZoneInfo("America/Los_Angeles")


def price(method: str, allocation: Allocation) -> tuple[str, int]:
    """(bucket, units) that one call of `method` costs."""
    if allocation == "buckets" and method in OWN_BUCKETS:
        return OWN_BUCKETS[method], 1
    is_read = method.rpartition(".")[2] in _READS
    return "units", PRICES_UNITS.get(method, READ_UNITS if is_read else WRITE_UNITS)


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


@dataclass
class _Day:
    """One project's use of one bucket on one Pacific day."""

    day: date
    used_units: int = 0


@dataclass
class _Tally:
    requests: int = 0
    units: Counter[str] = field(default_factory=Counter)
    refused_units: Counter[str] = field(default_factory=Counter)


class Meter:
    """Counts the calls and decides which of them the day's quota covers. The caller holds the lock."""

    def __init__(self, allocation: Allocation, quota: int, clock: Callable[[], int]) -> None:
        self.allocation = allocation
        self.now_ms = clock
        self.quota_units = {"units": quota} | (BUCKET_QUOTA_CALLS if allocation == "buckets" else {})
        self.reset()

    def reset(self) -> None:
        self._total = _Tally()
        self._by_method: Counter[str] = Counter()
        self._by_project: defaultdict[str, _Tally] = defaultdict(_Tally)
        self._free: Counter[str] = Counter()
        self._days: dict[tuple[str, str], _Day] = {}
        self._minutes: Counter[Minute] = Counter()

    def count(self, method: str) -> None:
        """Count one API call of any caller, with any outcome."""
        self._total.requests += 1
        self._by_method[method] += 1

    def count_free(self, kind: str) -> None:
        """Count a request that is not a call of this API."""
        self._free[kind] += 1

    def charge(self, project: str, method: str) -> Charge:
        """Book one call. A refused call counts in `units`, because its sender spent them, but it uses none of
        the day's quota, which may still cover cheaper calls."""
        bucket, units = price(method, self.allocation)
        today = self._today(project, bucket)
        refused = today.used_units + units > self.quota_units[bucket]
        if not refused:
            today.used_units += units
            self._note(project, method, bucket, units)
        tally = self._by_project[project]
        tally.requests += 1
        for counts in (self._total, tally):
            counts.units[bucket] += units
            if refused:
                counts.refused_units[bucket] += units
        return Charge(project, bucket, units, refused)

    def _note(self, project: str, method: str, bucket: str, units: int) -> None:
        """Keep the units that the day's quota covered, by the minute, for KEPT_MS."""
        minute_ms = self.now_ms() // MINUTE_MS * MINUTE_MS
        oldest = next(iter(self._minutes), None)
        if oldest is not None and oldest.start_ms < minute_ms - KEPT_MS:
            kept = {key: units for key, units in self._minutes.items() if key.start_ms >= minute_ms - KEPT_MS}
            self._minutes = Counter(kept)
        self._minutes[Minute(minute_ms, project, bucket, method)] += units

    def minutes(self) -> list[tuple[Minute, int]]:
        """The units that the day's quota covered in each minute of the last days, oldest first."""
        return sorted(self._minutes.items())

    def usage(self) -> dict[str, Any]:
        return {
            "requests": self._total.requests,
            "by_method": dict(self._by_method),
            "units": self._per_bucket(self._total.units),
            "refused_units": self._per_bucket(self._total.refused_units),
            "free": dict(self._free),
            "by_project": {
                project: {
                    "requests": tally.requests,
                    "units": self._per_bucket(tally.units),
                    "refused_units": self._per_bucket(tally.refused_units),
                    "remaining_units": {
                        bucket: quota_units - self._today(project, bucket).used_units
                        for bucket, quota_units in self.quota_units.items()
                    },
                }
                for project, tally in self._by_project.items()
            },
        }

    def _per_bucket(self, units: Counter[str]) -> dict[str, int]:
        return {bucket: units[bucket] for bucket in self.quota_units}

    def _today(self, project: str, bucket: str) -> _Day:
        day = datetime.fromtimestamp(self.now_ms() // 1000, _PACIFIC).date()
        today = self._days.get((project, bucket))
        if today is None or today.day != day:
            today = self._days[project, bucket] = _Day(day)
        return today


# -- Cloud Monitoring --------------------------------------------------------------------------------------------------

MAX_POINTS = 100_000

_PATH = re.compile(r"/v3/projects/([^/]+)/timeSeries")
_TERM = re.compile(r'\s*([a-z_.]+)\s*=\s*"([^"]*)"\s*')
_PREFIX = "serviceruntime.googleapis.com/quota/"
_SERVICE = "youtube.googleapis.com"

# videos.list is `youtube.api.v3.V3DataVideoService.List` there. Plural resources lose their ending.
_SINGULAR = {"activities": "Activity", "guideCategories": "GuideCategory", "videoCategories": "VideoCategory"}


class _Point(NamedTuple):
    """One point of a series, in ms."""

    end_ms: int
    start_ms: int
    value: int


Labels = tuple[tuple[str, str], ...]
"""The metric labels of a series, by name."""

Series = dict[Labels, list[_Point]]
"""The points of each series."""


def project_of(path: str) -> str | None:
    """The project whose time series are at this path; None for any other path."""
    match = _PATH.fullmatch(path)
    return None if match is None else match[1]


def time_series(params: Mapping[str, str], project: str, meter: Meter, lag_ms: int) -> Reply:
    """The answer to `timeSeries.list`. Raises Rejected, as upstream does, for a request that it would not accept."""
    terms = _terms(params.get("filter", ""))
    since_ms = _time(params.get("interval.startTime"), "interval.startTime")
    until_ms = _time(params.get("interval.endTime"), "interval.endTime")
    if since_ms >= until_ms:
        raise Rejected(replies.bad_request("The start time must be before the end time."))
    if any(name.startswith("aggregation.") for name in params):
        raise Rejected(replies.bad_request("This emulator aggregates nothing."))
    metric = terms.pop("metric.type", "").removeprefix(_PREFIX)
    wanted = terms.pop("resource.type", "consumer_quota") == "consumer_quota"
    wanted = wanted and terms.pop("resource.labels.service", _SERVICE) == _SERVICE
    if metric == "rate/net_usage":
        series, kind = _usage(project, meter, lag_ms, min(until_ms, meter.now_ms())), "DELTA"
    elif metric == "limit":
        series, kind = _limits(meter), "GAUGE"
    else:
        raise Rejected(replies.bad_request('The supplied filter must specify a "metric.type" that is known.'))
    labels = {name.removeprefix("metric.labels."): value for name, value in terms.items()}
    rows = [
        (point, key)
        for key, points in series.items()
        for point in points
        if wanted and labels.items() <= dict(key).items() and since_ms < point.end_ms <= until_ms
    ]
    return _page(params, rows, kind, f"{_PREFIX}{metric}", project)


def _terms(text: str) -> dict[str, str]:
    """`NAME = "VALUE" AND ...` as a dict."""
    terms = {}
    for part in re.split(r"\bAND\b", text):
        term = _TERM.fullmatch(part)
        if term is None:
            raise Rejected(replies.bad_request("The supplied filter does not have any valid operands."))
        terms[term[1].replace(".label.", ".labels.")] = term[2]
    return terms


def _time(text: str | None, name: str) -> int:
    try:
        moment = datetime.fromisoformat(text or "")
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise Rejected(replies.bad_request(f"Field {name} had an invalid value: a timestamp is required."))
    return int(moment.timestamp() * 1000)


def _usage(project: str, meter: Meter, lag_ms: int, until_ms: int) -> Series:
    """The minutes of a project, or of all projects, that Cloud Monitoring already knows. The current minute ends at
    `until_ms`."""
    minutes = meter.minutes()
    projects = {minute.project for minute, _ in minutes}
    wanted = {name for name in projects if project in (name, str(replies.project_number(name)))} or projects
    now_ms = meter.now_ms()
    sums: dict[tuple[Labels, int], int] = {}
    for minute, units in minutes:
        end_ms = minute.start_ms + MINUTE_MS
        if minute.project in wanted and (end_ms + lag_ms <= now_ms or not lag_ms):
            key: Labels = (
                ("method", _long_name(minute.method)),
                ("quota_metric", replies.quota_names(minute.bucket)[0]),
            )
            sums[key, minute.start_ms] = sums.get((key, minute.start_ms), 0) + units
    series: Series = {}
    for (labels, start_ms), units in sorted(sums.items(), key=lambda item: -item[0][1]):
        if units:
            series.setdefault(labels, []).append(
                _Point(min(start_ms + MINUTE_MS, max(until_ms, start_ms + 1)), start_ms, units)
            )
    return series


def _limits(meter: Meter) -> Series:
    noon_ms = meter.now_ms() // DAY_MS * DAY_MS
    series: Series = {}
    for bucket, quota_units in meter.quota_units.items():
        quota_metric, limit_name = replies.quota_names(bucket)
        key: Labels = (("limit_name", limit_name), ("quota_metric", quota_metric))
        days_ms = (noon_ms - n * DAY_MS for n in range(3))
        series[key] = [_Point(at_ms, at_ms, quota_units) for at_ms in days_ms]
    return series


def _long_name(method: str) -> str:
    resource, _, verb = method.rpartition(".")
    if not resource:
        return method
    singular = _SINGULAR.get(resource, resource if resource == "search" else resource.removesuffix("s"))
    return f"youtube.api.v3.V3Data{singular[:1].upper()}{singular[1:]}Service.{verb[:1].upper()}{verb[1:]}"


def _page(params: Mapping[str, str], rows: list[tuple[_Point, Labels]], kind: str, metric: str, project: str) -> Reply:
    """One page of at most `pageSize` points. A page token is the number of points before it."""
    try:
        size = min(int(params.get("pageSize") or MAX_POINTS), MAX_POINTS)
        first = int(params.get("pageToken") or 0)
    except ValueError:
        raise Rejected(replies.bad_request("Field page_token had an invalid value.")) from None
    if size <= 0:
        size = MAX_POINTS
    by_key: Series = {}
    for point, key in rows[first : first + size]:
        by_key.setdefault(key, []).append(point)
    body: Json = {"unit": "1"}
    if by_key:
        body["timeSeries"] = [_series(key, points, kind, metric, project) for key, points in by_key.items()]
    if first + size < len(rows):
        body["nextPageToken"] = str(first + size)
    return Reply(200, body)


def _series(key: Labels, points: Iterable[_Point], kind: str, metric: str, project: str) -> dict[str, Any]:
    return {
        "metric": {"type": metric, "labels": dict(key)},
        "resource": {
            "type": "consumer_quota",
            "labels": {"project_id": project, "service": _SERVICE, "location": "global"},
        },
        "metricKind": kind,
        "valueType": "INT64",
        "points": [
            {
                "interval": {"startTime": rfc3339(point.start_ms), "endTime": rfc3339(point.end_ms)},
                "value": {"int64Value": str(point.value)},
            }
            for point in points
        ],
    }
