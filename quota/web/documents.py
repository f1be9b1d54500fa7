"""What an application answers beside its own: problems (RFC 9457) and the document of /healthz. Without a framework.

Problem         what went wrong, with the header fields that belong to it
send_problem    a problem as the answer of an ASGI application
seconds         a wait as header fields name it
Check           one thing that an application needs
health          all of them as status and document
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]
"""An ASGI application, and what it is called with."""

MEDIA_TYPE = "application/problem+json"


class Problem(NamedTuple):
    """One problem document and the fields of its answer.

    `detail` is for the client, so it holds nothing secret. `title` is the name of the status unless `type` is a
    URI of its own, which then has a title of its own. `members` are further members of the document, `more` further
    header fields. `retry_after_s` is whole seconds.
    """

    status: int
    detail: str
    type: str = "about:blank"
    title: str = ""
    members: Mapping[str, Any] = MappingProxyType({})
    retry_after_s: int | None = None
    more: tuple[tuple[str, str], ...] = ()

    def as_json(self) -> dict[str, object]:
        return {
            "type": self.type,
            "title": self.title or HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
            **self.members,
        }

    def body(self) -> bytes:
        # In ASCII: a detail may quote half a surrogate pair, which UTF-8 cannot hold.
        return json.dumps(self.as_json()).encode()

    def fields(self) -> list[tuple[str, str]]:
        """The header fields of the answer, apart from Content-Length. Nobody may keep it."""
        fields = [("content-type", MEDIA_TYPE), ("cache-control", "no-store")]
        if self.retry_after_s is not None:
            fields.append(("retry-after", str(self.retry_after_s)))
        return [*fields, *self.more]


def seconds(duration_ms: int) -> int:
    """Whole seconds, at least 1, rounded up: nobody comes back early."""
    return max(1, -(-duration_ms // 1000))


async def send_problem(send: Send, problem: Problem) -> None:
    """Answer an HTTP request with a problem. The server drops the body of HEAD."""
    body = problem.body()
    fields = [*problem.fields(), ("content-length", str(len(body)))]
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields]
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


# -- health ------------------------------------------------------------------------------------------------------------

Status = Literal["pass", "warn", "fail"]


class Check(NamedTuple):
    """One thing that the application needs. It passes, works with a fault, or fails. `says` is a line for people.

    `members` are figures for programs. Strangers may read all of it: no path, no secret, no name of a host.
    """

    name: str
    status: Status = "pass"
    says: str = ""
    members: Mapping[str, Any] = MappingProxyType({})


def health(checks: Iterable[Check]) -> tuple[int, dict[str, object]]:
    """The HTTP status and the document. 503 if a check fails: then a balancer sends requests elsewhere."""
    listed = list(checks)
    statuses = {check.status for check in listed}
    worst: Status = "fail" if "fail" in statuses else "warn" if "warn" in statuses else "pass"
    document: dict[str, object] = {
        "status": worst,
        "checks": {
            check.name: {"status": check.status, **({"says": check.says} if check.says else {}), **check.members}
            for check in listed
        },
    }
    return (503 if worst == "fail" else 200), document
