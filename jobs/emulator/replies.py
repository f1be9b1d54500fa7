"""The emulator's replies. `errors.toml` has the errors, each with the body that the real API sends."""

import hashlib
import tomllib
from dataclasses import dataclass
from string import Template
from typing import Any

from quota.common.files import read_text

Json = dict[str, Any]

ERRORS = tomllib.loads(read_text("quota.jobs.emulator", "errors.toml"))


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


def error(name: str, **values: object) -> Reply:
    """The error of this name in `errors.toml`, with `values` in its texts. A `code` replaces the error's own."""
    body: Json = _filled(ERRORS[name], values)
    body["code"] = values.get("code", body["code"])
    body["errors"] = [{"message": body["message"], "domain": "global", **entry} for entry in body["errors"]]
    return Reply(body["code"], {"error": body})


def _filled(part: Any, values: Json) -> Any:
    if isinstance(part, dict):
        return {name: _filled(value, values) for name, value in part.items()}
    if isinstance(part, list):
        return [_filled(value, values) for value in part]
    return Template(part).substitute(values) if isinstance(part, str) else part


def bad_request(message: str, code: int = 400, reason: str = "badRequest") -> Reply:
    return error("bad_request", message=message, code=code, reason=reason)


def login_required(method: str) -> Reply:
    """A key came where only a token may ask."""
    collection, _, action = method.partition(".")
    kind = singular(collection)
    return error("401 required", method=f"V3Data{kind[0].upper()}{kind[1:]}Service.{action.capitalize()}")


def singular(collection: str) -> str:
    """`videoCategory` for videoCategories."""
    if collection.endswith("ies"):
        return collection.removesuffix("ies") + "y"
    return collection.removesuffix("s")


def project_number(project: str) -> int:
    """A project's number: twelve digits, as upstream uses; the same name always gives the same number."""
    digest = int.from_bytes(hashlib.blake2b(project.encode(), digest_size=8).digest())
    return 10**11 + digest % (9 * 10**11)


# bucket -> (metric shown, limit's name, metric's name). `search` was seen live. `uploads` is from a log that
# lacked the limit's name. The other two are by analogy.
_DAILY_LIMITS = {
    "search": ("Search Queries", "defaultSearchListPerDayPerProject", "search_list"),
    "uploads": ("Video Uploads", "defaultVideoInsertPerDayPerProject", "video_insert"),
    "batch-stats": ("Batch Video Stats", "defaultVideoBatchGetStatsPerDayPerProject", "video_batch_get_stats"),
    "units": ("Queries", "defaultPerDayPerProject", "default"),
}


def quota_names(bucket: str) -> tuple[str, str]:
    """(quota_metric, limit_name) of a bucket, as Cloud Monitoring labels it."""
    _, limit, metric = _DAILY_LIMITS[bucket]
    return f"youtube.googleapis.com/{metric}", limit


def daily_limit(bucket: str, project: str, limit_units: int) -> Reply:
    """A bucket's daily limit is reached."""
    metric, limit = quota_names(bucket)
    names = {"shown": _DAILY_LIMITS[bucket][0], "limit": limit, "metric": metric}
    return error("daily_limit", **names, number=project_number(project), limit_units=limit_units)
