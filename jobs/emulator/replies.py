"""The emulator's replies. `errors.toml` has the errors, each with the body that the real API sends; `methods.toml` has
the API's methods, prices and buckets."""

import hashlib
import tomllib
from dataclasses import dataclass
from string import Template
from typing import Any

from quota.common.files import read_text

Json = dict[str, Any]

ERRORS = tomllib.loads(read_text("quota.jobs.emulator", "errors.toml"))
METHODS = tomllib.loads(read_text("quota.jobs.emulator", "methods.toml"))


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


def long_name(method: str) -> str:
    """`youtube.api.v3.V3DataVideoService.List` for videos.list."""
    collection, _, action = method.rpartition(".")
    if not collection:
        return method
    kind = singular(collection)
    return f"youtube.api.v3.V3Data{kind[0].upper()}{kind[1:]}Service.{action[0].upper()}{action[1:]}"


def singular(collection: str) -> str:
    """`videoCategory` for videoCategories."""
    if collection.endswith("ies"):
        return collection.removesuffix("ies") + "y"
    return collection.removesuffix("s")


def project_number(project: str) -> int:
    """A project's number: twelve digits, as upstream uses; the same name always gives the same number."""
    digest = int.from_bytes(hashlib.blake2b(project.encode(), digest_size=8).digest())
    return 10**11 + digest % (9 * 10**11)


def daily_limit(bucket: str, project: str, limit_units: int) -> Reply:
    """A bucket's daily limit is reached."""
    names = METHODS["buckets"][bucket]
    return error("daily_limit", **names, number=project_number(project), limit_units=limit_units)
