"""What an exception of a client library says. No other module names the exceptions of these libraries.

    answer_in       upstream's answer, where the exception is about one
    is_transient    whether the network may be back soon
    refused_login   one line, where a login was not accepted

They look only into modules that are already loaded, since an exception cannot come from any other.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

Names = tuple[tuple[str, str], ...]
"""Classes, each by its module and its name."""

_TRANSIENT: Names = (
    ("http.client", "HTTPException"),
    ("socket", "gaierror"),
    ("ssl", "SSLError"),
    ("httplib2", "ServerNotFoundError"),
    ("google.auth.exceptions", "TransportError"),
    ("requests.exceptions", "ConnectionError"),
    ("requests.exceptions", "ChunkedEncodingError"),  # the answer ended in the middle
    ("requests.exceptions", "Timeout"),
    ("httpx", "TransportError"),
    ("aiohttp", "ClientConnectionError"),
    ("aiohttp", "ClientPayloadError"),
)

_WITH_RESPONSE: Names = (("requests.exceptions", "HTTPError"), ("httpx", "HTTPStatusError"))


class Answer(NamedTuple):
    """An answer of upstream. `body` is as much of it as the client has read."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def answer_in(error: Any) -> Answer | None:
    """The answer that an exception is about: of Google's client, requests, httpx or aiohttp."""
    if is_any(error, (("googleapiclient.errors", "HttpError"),)):
        return Answer(int(error.resp.status), error.resp, error.content)
    if is_any(error, (("aiohttp", "ClientResponseError"),)) and error.status:
        return Answer(error.status, error.headers or {}, b"")
    if is_any(error, _WITH_RESPONSE) and error.response is not None:
        # What both libraries call the body that they have read; `content` would read it, or fail.
        body = getattr(error.response, "_content", b"")
        return Answer(error.response.status_code, error.response.headers, body if isinstance(body, bytes) else b"")
    return None


def is_transient(error: Exception) -> bool:
    """Whether a client says with this exception that the network failed it."""
    return is_any(error, _TRANSIENT)


def refused_login(error: Exception) -> str | None:
    """One line about a login that was not accepted; None for another error."""
    if not is_any(error, (("google.auth.exceptions", "GoogleAuthError"),)):
        return None
    from quota.clients.login import refused

    return refused(error)  # type: ignore[arg-type]  # by name, without importing it


def is_any(error: object, classes: Names) -> bool:
    """Whether an exception is of one of these classes."""
    loaded = (getattr(sys.modules.get(module), name, None) for module, name in classes)
    return isinstance(error, tuple(cls for cls in loaded if isinstance(cls, type)))
