"""Cloud Monitoring for tests: `timeSeries.list` over what the emulator counted. A filter or an interval that upstream
would reject raises, so the request fails.

All points are on one page. A project is asked for by its name or its number; any other name stands for all projects.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from quota.common.clock import rfc3339
from quota.jobs.emulator import replies
from quota.jobs.emulator.replies import Json
from quota.jobs.emulator.usage import BUCKETS, Charge
from quota.terms.limits import DAY_MS, MINUTE_MS

PATH = re.compile(r"/v3/projects/([^/]+)/timeSeries")

_PREFIX = "serviceruntime.googleapis.com/quota/"
_ALL = {"resource.type": "consumer_quota", "resource.labels.service": "youtube.googleapis.com"}


class Covered(NamedTuple):
    """A call that the day's quota covered."""

    at_ms: int
    method: str
    charge: Charge


Labels = tuple[tuple[str, str], ...]
Point = tuple[Labels, int, int, int]  # the labels of its series, its start and its end in ms, and its value


def time_series(
    params: Mapping[str, str], project: str, calls: Sequence[Covered], quotas: Mapping[str, int], now_ms: int
) -> Json:
    terms = dict(re.fullmatch(r'([a-z_.]+)="([^"]*)"', term).groups() for term in params["filter"].split(" AND "))  # type: ignore[union-attr]
    since_ms, until_ms = (
        int(datetime.fromisoformat(params[f"interval.{end}Time"]).timestamp() * 1000) for end in ("start", "end")
    )
    assert since_ms < until_ms
    metric = terms.pop("metric.type").removeprefix(_PREFIX)
    points, kind = {
        "rate/net_usage": (_usage(project, calls, min(until_ms, now_ms)), "DELTA"),
        "limit": (_limits(quotas, now_ms), "GAUGE"),
    }[metric]
    series: dict[Labels, list[Json]] = {}
    for labels, start_ms, end_ms, value in points:
        names = {**_ALL, **{f"metric.labels.{name}": text for name, text in labels}}
        if since_ms < end_ms <= until_ms and terms.items() <= names.items():
            interval = {"startTime": rfc3339(start_ms), "endTime": rfc3339(end_ms)}
            series.setdefault(labels, []).append({"interval": interval, "value": {"int64Value": str(value)}})
    resource = {"type": "consumer_quota", "labels": {"project_id": project, "service": _ALL["resource.labels.service"]}}
    rows = [
        {
            "metric": {"type": _PREFIX + metric, "labels": dict(labels)},
            "resource": resource,
            "metricKind": kind,
            "valueType": "INT64",
            "points": within,
        }
        for labels, within in series.items()
    ]
    return {"unit": "1", **({"timeSeries": rows} if rows else {})}


def _usage(project: str, calls: Sequence[Covered], until_ms: int) -> Iterator[Point]:
    """The minutes, newest first. The current minute ends at `until_ms`."""
    projects = {call.charge.project for call in calls}
    wanted = {name for name in projects if project in (name, str(replies.project_number(name)))} or projects
    sums: Counter[tuple[Labels, int]] = Counter()
    for at_ms, method, charge in reversed(calls):
        if charge.project in wanted:
            labels = ("method", replies.long_name(method)), ("quota_metric", BUCKETS[charge.bucket]["metric"])
            sums[labels, at_ms // MINUTE_MS * MINUTE_MS] += charge.units
    for (labels, start_ms), units in sums.items():
        if units:
            yield labels, start_ms, min(start_ms + MINUTE_MS, max(until_ms, start_ms + 1)), units


def _limits(quotas: Mapping[str, int], now_ms: int) -> Iterator[Point]:
    for bucket, units in quotas.items():
        labels = ("limit_name", BUCKETS[bucket]["limit"]), ("quota_metric", BUCKETS[bucket]["metric"])
        for day_ms in (now_ms // DAY_MS * DAY_MS - n * DAY_MS for n in range(3)):
            yield labels, day_ms, day_ms, units
