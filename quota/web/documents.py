"""Problem documents (RFC 9457) and the document of /healthz, without a framework.

Problem         an error with its header fields
in_place_of     a problem that a client gets in place of an API's answer
send_problem    sends a problem as the answer of an ASGI application
seconds         a wait as header fields name it
Check           one thing that an application needs
health          all checks as status and document
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]
"""An ASGI application and its arguments."""

MEDIA_TYPE = "application/problem+json"

NO_RETRY = (("x-should-retry", "false"),)
"""The header field of a refusal for the SDKs of OpenAI, Anthropic and others: they send the request no second time."""


class Problem(NamedTuple):
    """A problem document and the header fields of its answer.

    `detail` goes to the client, so it has no secrets. `title` is the name of the status, unless `type` is a URI with a
    title of its own. `members` are further members of the document, `more` are further header fields. `retry_after_s`
    is in whole seconds.
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
        # ASCII, because a detail may quote half a surrogate pair, which UTF-8 cannot encode.
        return json.dumps(self.as_json()).encode()

    def fields(self) -> list[tuple[str, str]]:
        """The header fields of the answer. Caches must not keep it."""
        fields = [("content-type", MEDIA_TYPE), ("cache-control", "no-store")]
        if self.retry_after_s is not None:
            fields.append(("retry-after", str(self.retry_after_s)))
        return [*fields, *self.more, ("content-length", str(len(self.body())))]


def in_place_of(status: int, detail: str, **more: Any) -> Problem:
    """A problem that a client gets in place of an API's answer. The SDKs of OpenAI, Google and others show its `error`,
    and gspread compares its `code` with the numbers of errors that it tries again."""
    problem = Problem(status, detail, **more)
    error = {"message": detail, "type": "quota-ledger", "code": 0}
    return problem._replace(members={**problem.members, "error": error})


def seconds(duration_ms: int) -> int:
    """Whole seconds, at least 1, rounded up so that no client comes back early."""
    return max(1, -(-duration_ms // 1000))


async def send_problem(send: Send, problem: Problem) -> None:
    """Answer an HTTP request with a problem. The server drops the body of HEAD."""
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in problem.fields()]
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": problem.body()})


# -- health ------------------------------------------------------------------------------------------------------------

Status = Literal["pass", "warn", "fail"]
"""The worst is the last."""


class Check(NamedTuple):
    """The state of one thing that the application needs. `says` is a line for people, `members` are for programs.

    Strangers may read it: it has no path, no secret and no host name.
    """

    name: str
    status: Status = "pass"
    says: str = ""
    members: Mapping[str, Any] = MappingProxyType({})


def health(checks: Iterable[Check]) -> tuple[int, dict[str, object]]:
    """The HTTP status and the document. If a check fails, the status is 503, so that a balancer uses another server."""
    listed = list(checks)
    worst = max((check.status for check in listed), key=get_args(Status).index, default="pass")
    document: dict[str, object] = {
        "status": worst,
        "checks": {
            check.name: {"status": check.status, **({"says": check.says} if check.says else {}), **check.members}
            for check in listed
        },
    }
    return (503 if worst == "fail" else 200), document
