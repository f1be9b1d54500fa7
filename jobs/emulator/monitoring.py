"""The emulator's Cloud Monitoring: `projects.timeSeries.list` for the quota metrics, from its own count.

    quota/rate/net_usage    one series for each bucket and method, one DELTA point for each minute, newest first
    quota/limit             one series for each bucket, one GAUGE point a day

Calls that the day's quota did not cover are in no point. A point appears when its minute ended `lag_ms` ago; without a
lag the running minute is there too, up to now. A project is asked for by its name or its number, as in
`/emulator/usage`; any other name stands for all projects together, because here each key without a project is one.
"""

import re
from collections.abc import Iterable
from datetime import datetime
from typing import Any, NamedTuple

from quota.common.clock import rfc3339
from quota.jobs.emulator import replies
from quota.jobs.emulator.replies import Json, Rejected, Reply
from quota.jobs.emulator.usage import Meter
from quota.jobs.emulator.wire import Request
from quota.terms.limits import DAY_MS, MINUTE_MS

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


def project_of(request: Request) -> str | None:
    """The project whose time series a request asks for; None for any other request."""
    match = _PATH.fullmatch(request.path)
    return None if match is None else match[1]


def time_series(request: Request, project: str, meter: Meter, lag_ms: int) -> Reply:
    """The answer to `timeSeries.list`. Raises Rejected, as upstream does, for a request that it would not accept."""
    terms = _terms(request.params.get("filter", ""))
    since_ms = _time(request.params.get("interval.startTime"), "interval.startTime")
    until_ms = _time(request.params.get("interval.endTime"), "interval.endTime")
    if since_ms >= until_ms:
        raise Rejected(replies.bad_request("The start time must be before the end time."))
    if any(name.startswith("aggregation.") for name in request.params):
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
    return _page(request, rows, kind, f"{_PREFIX}{metric}", project)


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


def _page(request: Request, rows: list[tuple[_Point, Labels]], kind: str, metric: str, project: str) -> Reply:
    """One page of at most `pageSize` points. A page token is the number of points before it."""
    try:
        size = min(int(request.params.get("pageSize") or MAX_POINTS), MAX_POINTS)
        first = int(request.params.get("pageToken") or 0)
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
