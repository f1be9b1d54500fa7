"""The emulated upstream's error replies: one function for each error body.

Every body has the shape that the real API sends, oddities included. Some refusals carry `status` and
`details`, older ones carry neither, and a daily limit may look exactly like a short burst limit.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

_SERVICE = "youtube.googleapis.com"
_CONSOLE = "https://console.developers.google.com"


@dataclass(frozen=True)
class Reply:
    """One HTTP reply before it is written. With `body` None it has no content."""

    status: int
    body: Json | bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    content_type: str = "application/json; charset=UTF-8"


class Rejected(Exception):  # noqa: N818 - it names an event, not a fault of the emulator
    """Upstream answers the request with an error: `reply`."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status)
        self.reply = reply


def _error(
    code: int,
    reason: str,
    message: str,
    *,
    domain: str = "global",
    location: tuple[str, str] | None = None,
    extended_help: str | None = None,
    status: str | None = None,
    details: Sequence[Json] = (),
    summary: str | None = None,
) -> Reply:
    """An error. `location` is (name, type). `summary` is the outer message where it differs from the inner one."""
    entry: Json = {"message": message, "domain": domain, "reason": reason}
    if location is not None:
        entry["location"], entry["locationType"] = location
    if extended_help is not None:
        entry["extendedHelp"] = extended_help
    error: Json = {"code": code, "message": summary or message, "errors": [entry]}
    if status is not None:
        error["status"] = status
    if details:
        error["details"] = list(details)
    return Reply(code, {"error": error})


def _info(reason: str, metadata: Mapping[str, str]) -> Json:
    return {
        "@type": "type.googleapis.com/google.rpc.ErrorInfo",
        "reason": reason,
        "domain": "googleapis.com",
        "metadata": dict(metadata),
    }


def project_number(project: str) -> int:
    """A project's number: twelve digits, as upstream uses; the same name always gives the same number."""
    digest = int.from_bytes(hashlib.blake2b(project.encode(), digest_size=8).digest())
    return 10**11 + digest % (9 * 10**11)


# --- caller ----------------------------------------------------------------------------------------


def unregistered_caller() -> Reply:
    message = (
        "Method doesn't allow unregistered callers (callers without established identity). "
        "Please use API Key or other form of API consumer identity to call this API."
    )
    return _error(403, "forbidden", message, status="PERMISSION_DENIED")


def key_invalid() -> Reply:
    message = "API key not valid. Please pass a valid API key."
    localized = {
        "@type": "type.googleapis.com/google.rpc.LocalizedMessage",
        "locale": "en-US",
        "message": message,
    }
    details = [_info("API_KEY_INVALID", {"service": _SERVICE}), localized]
    return _error(400, "badRequest", message, status="INVALID_ARGUMENT", details=details)


def token_invalid() -> Reply:
    summary = (
        "Request had invalid authentication credentials. Expected OAuth 2 access token, login "
        "cookie or other valid authentication credential."
    )
    return _error(
        401,
        "authError",
        "Invalid Credentials",
        location=("Authorization", "header"),
        status="UNAUTHENTICATED",
        summary=summary,
    )


def service_disabled(project: str) -> Reply:
    number = project_number(project)
    url = f"{_CONSOLE}/apis/api/{_SERVICE}/overview?project={number}"
    message = (
        f"YouTube Data API v3 has not been used in project {number} before or it is disabled. "
        f"Enable it by visiting {url} then retry. If you enabled this API recently, wait a few "
        "minutes for the action to propagate to our systems and retry."
    )
    help_link = {
        "@type": "type.googleapis.com/google.rpc.Help",
        "links": [{"description": "Google developers console API activation", "url": url}],
    }
    info = _info("SERVICE_DISABLED", {"service": _SERVICE, "consumer": f"projects/{number}"})
    return _error(
        403,
        "accessNotConfigured",
        message,
        domain="usageLimits",
        extended_help=_CONSOLE,
        status="PERMISSION_DENIED",
        details=[help_link, info],
    )


# --- quota -----------------------------------------------------------------------------------------


def quota_exceeded() -> Reply:
    """The day's pool is spent."""
    message = (
        "The request cannot be completed because you have exceeded your "
        '<a href="/youtube/v3/getting-started#quota">quota</a>.'
    )
    return _error(403, "quotaExceeded", message, domain="youtube.quota")


# bucket -> (metric shown, limit's name, metric's name). `search` is as seen live. `uploads` is from a
# log that lacked the limit's name. The other two follow by analogy.
_DAILY_LIMITS = {
    "search": ("Search Queries", "defaultSearchListPerDayPerProject", "search_list"),
    "uploads": ("Video Uploads", "defaultVideoInsertPerDayPerProject", "video_insert"),
    "batch-stats": ("Batch Video Stats", "defaultVideoBatchGetStatsPerDayPerProject", "video_batch_get_stats"),
    "units": ("Queries", "defaultPerDayPerProject", "default"),
}


def quota_names(bucket: str) -> tuple[str, str]:
    """(quota_metric, limit_name) of a bucket, as Cloud Monitoring labels it."""
    _, limit, metric = _DAILY_LIMITS[bucket]
    return f"{_SERVICE}/{metric}", limit


def permission_denied(project: str) -> Reply:
    """Cloud Monitoring's answer to somebody who may not read a project's figures."""
    message = f"Permission monitoring.timeSeries.list denied (or the resource 'projects/{project}' may not exist)."
    return _error(403, "forbidden", message, status="PERMISSION_DENIED")


def daily_limit(bucket: str, project: str, limit_units: int) -> Reply:
    """A bucket's daily limit. Its status and reason are those of a short burst limit; only `details` differs."""
    shown, limit, metric = _DAILY_LIMITS[bucket]
    number = project_number(project)
    message = (
        f"Quota exceeded for quota metric '{shown}' and limit '{shown} per day' of service "
        f"'{_SERVICE}' for consumer 'project_number:{number}'."
    )
    metadata = {
        "quota_limit": limit,
        "quota_unit": "1/d/{project}",
        "service": _SERVICE,
        "quota_metric": f"{_SERVICE}/{metric}",
        "consumer": f"projects/{number}",
        "quota_location": "global",
        "quota_limit_value": str(limit_units),
    }
    info = _info("RATE_LIMIT_EXCEEDED", metadata)
    return _error(429, "rateLimitExceeded", message, status="RESOURCE_EXHAUSTED", details=[info])


def faulted(status: int, reason: str | None) -> Reply:
    """The reply for a status that a fault chose. Where a status has several bodies, `reason` picks one."""
    match status, reason:
        case 403, "quotaExceeded":
            return quota_exceeded()
        case 403, "dailyLimitExceeded":
            url = f"{_CONSOLE}/apis/api/{_SERVICE}/quotas?project={project_number('')}"
            message = (
                "Daily Limit Exceeded. The quota will be reset at midnight Pacific Time (PT). "
                f"You may monitor your quota usage and adjust limits in the API Console: {url}"
            )
            return _error(403, reason, message, domain="usageLimits", extended_help=url)
        case 403, None | "rateLimitExceeded":
            return _error(403, "rateLimitExceeded", "Rate Limit Exceeded", domain="usageLimits")
        case 403, "userRateLimitExceeded":
            message = "User Rate Limit Exceeded"
            return _error(403, "userRateLimitExceeded", message, domain="usageLimits")
        case 429, None | "rateLimitExceeded":
            message = "Too many requests"
            return _error(429, "rateLimitExceeded", message, status="RESOURCE_EXHAUSTED")
        case 401, None:
            return token_invalid()
        case _ if status >= 500:
            return _error(status, reason or "backendError", "Backend Error")
        case _:
            return _error(status, reason or "badRequest", "Bad Request")


def internal_error() -> Reply:
    return _error(500, "backendError", "Internal error encountered.", status="INTERNAL")


# --- request ---------------------------------------------------------------------------------------


def bad_request(message: str, code: int = 400) -> Reply:
    return _error(code, "badRequest", message)


def method_not_found() -> Reply:
    return _error(404, "notFound", "Method not found.", status="NOT_FOUND")


def part_missing() -> Reply:
    return _error(400, "required", "Required parameter: part", location=("part", "parameter"))


def part_unknown(part: str) -> Reply:
    location = ("part", "parameter")
    return _error(400, "unknownPart", f"'{part}'", domain="youtube.part", location=location)


def filter_missing(expected: Sequence[str]) -> Reply:
    return _error(
        400,
        "missingRequiredParameter",
        f"No filter selected. Expected one of: {', '.join(expected)}",
        domain="youtube.parameter",
        location=("parameters.", "other"),
    )


def filter_invalid(parameter: str) -> Reply:
    return _parameter("invalidFilters", "The request specifies an invalid filter parameter.", parameter)


def out_of_range(value: str, least: int, most: int) -> Reply:
    message = f"Invalid value '{value}'. Values must be within the range: [{least}, {most}]"
    return _error(400, "invalidParameter", message, location=("maxResults", "parameter"))


def page_token_invalid() -> Reply:
    message = "The request specifies an invalid page token."
    return _parameter("invalidPageToken", message, "pageToken")


def region_invalid() -> Reply:
    message = "The <code>regionCode</code> parameter specifies an invalid region code."
    return _parameter("invalidRegionCode", message, "regionCode")


def _parameter(reason: str, message: str, parameter: str) -> Reply:
    location = (parameter, "parameter")
    return _error(400, reason, message, domain="youtube.parameter", location=location)


def chart_not_found() -> Reply:
    """The reply for an unknown chart. Upstream's table of errors says 400, but its clients saw 404."""
    message = "The requested video chart is not supported or is not available."
    location = ("chart", "parameter")
    return _error(404, "videoChartNotFound", message, domain="youtube.video", location=location)


def playlist_not_found() -> Reply:
    message = "The playlist identified with the request's <code>playlistId</code> parameter cannot be found."
    location = ("playlistId", "parameter")
    return _error(404, "playlistNotFound", message, domain="youtube.playlistItem", location=location)
