"""The emulator's replies. `errors.toml` has the errors, each with the body that the real API sends; `resources.toml`
has the resources; `methods.toml` has the API's methods, prices and buckets."""

import base64
import hashlib
import tomllib
from dataclasses import dataclass
from string import Template
from typing import Any, TypeVar

from quota.common.files import read_text

Json = dict[str, Any]
T = TypeVar("T")

ERRORS = tomllib.loads(read_text("quota.jobs.emulator", "errors.toml"))
METHODS = tomllib.loads(read_text("quota.jobs.emulator", "methods.toml"))
_RESOURCES = tomllib.loads(read_text("quota.jobs.emulator", "resources.toml"))


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


def or_reject(value: T | None, name: str, /, **values: object) -> T:
    """The value. If it is None, raises Rejected with the error of this name."""
    if value is None:
        raise Rejected(error(name, **values))
    return value


def etag(*names: str) -> str:
    digest = hashlib.blake2b("\n".join(names).encode("utf-8", "replace"), digest_size=20).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def identity(kind: str, item_id: str) -> Json:
    """The first fields of each resource of the API."""
    return {"kind": f"youtube#{kind}", "etag": etag(kind, item_id), "id": item_id}


def resource(kind: str, item_id: str, /, **values: object) -> Json:
    """A resource of the API, with `values` in the fields of its kind."""
    return {**identity(kind, item_id), **shaped(kind, **(values | {"id": item_id}))}


def shaped(kind: str, /, **values: object) -> Json:
    """What `resources.toml` has under this name, with `values` in it."""
    shape: Json = _filled(_RESOURCES[kind], values)
    return shape


def _filled(part: Any, values: Json) -> Any:
    if isinstance(part, dict):
        fields = {name: _filled(value, values) for name, value in part.items()}
        return {name: value for name, value in fields.items() if value is not None}
    if isinstance(part, list):
        return [_filled(value, values) for value in part]
    if not isinstance(part, str) or "$" not in part:
        return part
    if part.startswith("$") and part[1:].isidentifier():
        return values.get(part[1:])
    return Template(part).substitute(values)


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
    return error("daily_limit", **names, number=project_number(project), limit_units=str(limit_units))
