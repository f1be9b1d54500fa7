"""Reads upstream's figures from Cloud Monitoring: the use of a project, minute by minute, and its quota.

    serviceruntime.googleapis.com/quota/rate/net_usage   DELTA: units of each minute, by quota_metric and method
    serviceruntime.googleapis.com/quota/limit            GAUGE, once a day: the number of each limit_name

`read_figures` reads every page before it returns: half an answer would show too little use, as if we had charged too
much. Every failure is one line (BadAnswer), and its caller changes nothing.

Only `quota reconcile` imports this file, and with it Google's client. The account needs the permission
`monitoring.timeSeries.list`, and OAuth or a service account: Cloud Monitoring takes no API key.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from http.client import HTTPException
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import httplib2
from google.auth.exceptions import GoogleAuthError
from googleapiclient.model import JsonModel

from quota.clients.answer_fields import AnswerLimits
from quota.clients.caller import Caller
from quota.clients.deadline import Watch
from quota.clients.login import bearer
from quota.clients.session_http import SessionHttp, checked
from quota.clients.upstream_errors import error_in, refused_login
from quota.common.clock import elapsed_s, rfc3339
from quota.common.hosts import is_loopback
from quota.common.text import shorten, spaced
from quota.errors import BadAnswer, ConfigError
from quota.reconcile.reconcile import Counted, Figures
from quota.session import login_of
from quota.settings.model import CredentialSettings
from quota.terms.api import GOOGLES_KEY
from quota.terms.costs import Monitoring
from quota.terms.limits import MAX_UNITS

ADDRESS = "https://monitoring.googleapis.com"
SCOPE = "https://www.googleapis.com/auth/monitoring.read"
PERMISSION = "monitoring.timeSeries.list"

SILENCE_S = 10.0
"""The longest wait for a silent Cloud Monitoring."""

ANSWER_S = 30.0
"""The longest time for one page, however slowly it arrives."""

ALL_S = 120.0
"""The longest time for all pages together."""

PAGE_POINTS = 10_000
MAX_PAGES = 200
MAX_BODY_MB = 16

LIMIT_SAMPLED_MS = 49 * 3_600_000
"""How old the newest point of a limit may be. Upstream samples it once a day."""

AHEAD_MS = 10 * 60_000
"""A point further in the future than this comes from another clock."""

_METRIC = "serviceruntime.googleapis.com/quota/"
USAGE, LIMIT = f"{_METRIC}rate/net_usage", f"{_METRIC}limit"


def read_figures(credential: CredentialSettings, names: Monitoring, since_ms: int, now_ms: int) -> Figures:
    """Upstream's figures of a credential's project from `since_ms` (exclusive) to `now_ms`.

    Raises ConfigError if `auth` cannot be used, and BadAnswer unless the answer is whole.
    """
    assert credential.cloud_project is not None  # noqa: S101  # the caller has checked it
    project = credential.cloud_project
    until_s = elapsed_s() + ALL_S
    with contextlib.closing(_http(credential)) as http:
        of_api = f'resource.type="consumer_quota" AND resource.labels.service="{names.service}"'
        page = partial(_page, http, credential.endpoint or ADDRESS, project)
        ask = partial(_series, page, of_api, now_ms=now_ms, until_s=until_s)
        used: dict[str, list[Counted]] = {}
        for labels, points in ask(metric=USAGE, kind="DELTA", since_ms=since_ms):
            method = names.method(labels.get("method", ""))
            used.setdefault(labels["quota_metric"], []).extend(point._replace(method=method) for point in points)
        limits: dict[tuple[str, str], int] = {}
        for metric in names.metrics:
            key = (metric.quota_metric, metric.limit_name)
            of_limit = f'metric.labels.quota_metric="{key[0]}" AND metric.labels.limit_name="{key[1]}"'
            series = ask(of_limit, metric=LIMIT, kind="GAUGE", since_ms=now_ms - LIMIT_SAMPLED_MS)
            newest = [max(points).units for labels, points in series if points and labels.get("limit_name") == key[1]]
            if newest:  # the least of several locations; one location may have no limit
                limits[key] = min((units for units in newest if units >= 0), default=-1)
    return Figures({metric: sorted(points) for metric, points in used.items()}, limits)


_Series = list[tuple[dict[str, str], list[Counted]]]


def _series(
    page: Callable[[dict[str, Any]], dict[str, Any]],
    *wanted: str,
    metric: str,
    kind: str,
    since_ms: int,
    now_ms: int,
    until_s: float,
) -> _Series:
    """The labels and points of each series of a metric that these filters select, from all pages."""
    fields = {
        "filter": " AND ".join([f'metric.type="{metric}"', *wanted]),
        "interval.startTime": rfc3339(since_ms),
        "interval.endTime": rfc3339(now_ms),
        "pageSize": PAGE_POINTS,
    }
    series: _Series = []
    seen: set[tuple[str, int]] = set()
    for _ in range(MAX_PAGES):
        answer = page(fields)
        if answer.get("executionErrors") or answer.get("unreachable"):
            raise _failed("says that its answer is incomplete; run again later")
        for labels, points in _read(answer.get("timeSeries", []), metric, kind):
            name = json.dumps(labels, sort_keys=True)
            keys = {(name, point.at_ms) for point in points}
            if len(keys) < len(points) or keys & seen:
                raise _failed("answered the same point twice; run again later")
            if any(point.at_ms > now_ms + AHEAD_MS for point in points):
                raise _failed("has points in the future; set this machine's clock, or the ledger's")
            seen |= keys
            series.append((labels, [point for point in points if point.at_ms > since_ms]))
        token = answer.get("nextPageToken")
        if not token:
            return series
        if elapsed_s() > until_s:
            break
        fields["pageToken"] = token
    raise _failed(f"was not done after {ALL_S:g} s or {MAX_PAGES} pages; run again later, or check cloud_project")


def _read(series: object, metric: str, kind: str) -> Iterator[tuple[dict[str, str], list[Counted]]]:
    """The labels and points of each series. Raises BadAnswer for anything else: a guess would give wrong units."""
    try:
        if not isinstance(series, list):
            raise TypeError
        for row in series:
            labels = {**row["resource"]["labels"], **row["metric"].get("labels", {})}
            is_text = all(isinstance(text, str) and len(text) <= 300 for text in labels.values())
            named = row["metric"]["type"], row["metricKind"], row["valueType"]
            if not (is_text and labels["quota_metric"]) or named != (metric, kind, "INT64"):
                raise TypeError
            yield labels, [_counted(point) for point in row.get("points", [])]
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
        raise _failed(f"answered with no series of {metric}; check endpoint and proxies") from error


def _counted(point: dict[str, Any]) -> Counted:
    moment, number = datetime.fromisoformat(point["interval"]["endTime"]), point["value"]["int64Value"]
    if moment.tzinfo is None or not re.fullmatch(r"-?[0-9]{1,19}", number):
        raise ValueError
    units = min(int(number), MAX_UNITS)  # "no limit" is -1 or the largest number
    return Counted(int(moment.timestamp() * 1000), units, "")


# -- requests ----------------------------------------------------------------------------------------------------------


def _failed(what: str) -> BadAnswer:
    reason, _, remedy = what.partition("; ")
    return BadAnswer(f"Cloud Monitoring {reason}; nothing was changed" + (f"; {remedy}" if remedy else ""))


def _page(http: Any, address: str, project: str, fields: dict[str, Any]) -> dict[str, Any]:
    """One page of time series. Raises BadAnswer for anything else."""
    url = f"{address}/v3/projects/{quote(project, safe='')}/timeSeries?{urlencode(fields)}"
    try:
        response, content = http.request(url, headers={"accept": "application/json", "accept-encoding": "gzip"})
        if response.status == 200:
            page: dict[str, Any] = checked(JsonModel().response, _LIMITS)(response, content)
            return page
    except BadAnswer as error:
        raise _failed(f"failed: {str(error).partition('; ')[0]}") from None
    except TimeoutError:
        raise _failed(f"was silent for {SILENCE_S:g} s; run again later") from None
    except GoogleAuthError as error:
        raise _failed(f"was not asked: {refused_login(error)}") from None
    except (OSError, HTTPException, httplib2.HttpLib2Error, ValueError) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise _failed(f"cannot be reached, or hung up: {shorten(spaced(str(why)), 80)}; run again later") from None
    status: int = response.status
    remedy = _REMEDIES.get(status, "run again later" if status >= 400 else "check endpoint and proxies")
    if b"SERVICE_DISABLED" in content:
        remedy = "enable the Cloud Monitoring API there"
    words = shorten(error_in(content).words, 160).replace("; ", ", ")
    verb = f"refused project {project!r}" if 400 <= status < 500 else "answered"
    raise _failed(f"{verb} with {status}{f' ({words})' if words else ''}; {remedy}")


_REMEDIES = {
    401: f"auth must name an account with the permission {PERMISSION}; an API key does not do",
    403: f"grant {PERMISSION} (the role Monitoring Viewer) on it to the account that auth names",
    404: "check cloud_project",
    429: "run again in a minute",
}

_LIMITS = AnswerLimits(MAX_BODY_MB, ANSWER_S, PAGE_POINTS * 10)


def _http(credential: CredentialSettings) -> Any:
    """Sends as the account that `auth` names. Raises ConfigError, which shows no secret."""
    root = credential.endpoint or ADDRESS
    if credential.auth_ref is not None:
        credentials = login_of(credential, [SCOPE])
    elif is_loopback(urlsplit(root).hostname or ""):  # a server of tests accepts any account
        credentials = bearer("emulated")
    else:
        raise ConfigError(
            f'credential {credential.name!r} has no auth; add auth = "adc", "service-account:PATH", '
            f'"authorized-user:PATH" or "bearer:env:NAME" of an account with the permission {PERMISSION}: an API key '
            "does not do"
        )
    # No redirects, so the token reaches no other host.
    credentials.renewable = False  # a refused token will be refused again
    hosts, insecure = (urlsplit(root).netloc,), credential.insecure_endpoint
    caller = Caller(hosts, credentials=credentials, place=GOOGLES_KEY, insecure=insecure, googles=True)
    return SessionHttp(root, Watch(_LIMITS, None), caller, timeout_s=SILENCE_S, follows=False)
