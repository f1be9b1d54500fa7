"""Reads the exceptions of client libraries. No other module names them.

    answer_in       upstream's answer, if the exception has one
    is_transient    whether the network may be back soon
    refused_login   one line about a refused login

These functions look only at loaded modules: an exception comes from no other.
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
    ("requests.exceptions", "ChunkedEncodingError"),  # the answer was cut off
    ("requests.exceptions", "Timeout"),
    ("httpx", "TransportError"),
    ("aiohttp", "ClientConnectionError"),
    ("aiohttp", "ClientPayloadError"),
)

_WITH_RESPONSE: Names = (("requests.exceptions", "HTTPError"), ("httpx", "HTTPStatusError"))


class Answer(NamedTuple):
    """An answer of upstream. `body` is the part that the client has read."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def answer_in(error: Any) -> Answer | None:
    """The answer in an exception of Google's client, requests, httpx or aiohttp; None if there is none."""
    if is_any(error, (("googleapiclient.errors", "HttpError"),)):
        return Answer(int(error.resp.status), error.resp, error.content)
    if is_any(error, (("aiohttp", "ClientResponseError"),)) and error.status:
        return Answer(error.status, error.headers or {}, b"")
    if is_any(error, _WITH_RESPONSE) and error.response is not None:
        # Both libraries keep the body that they have read in `_content`; `content` would read it, or fail.
        body = getattr(error.response, "_content", b"")
        return Answer(error.response.status_code, error.response.headers, body if isinstance(body, bytes) else b"")
    return None


def is_transient(error: Exception) -> bool:
    """Whether the exception means that the network failed."""
    return is_any(error, _TRANSIENT)


def refused_login(error: Exception) -> str | None:
    """One line about a refused login; None for another error."""
    if not is_any(error, (("google.auth.exceptions", "GoogleAuthError"),)):
        return None
    from quota.clients.login import refused

    return refused(error)  # type: ignore[arg-type]  # by name, without importing it


def is_any(error: object, classes: Names) -> bool:
    """Whether an exception is of one of these classes."""
    loaded = (getattr(sys.modules.get(module), name, None) for module, name in classes)
    return isinstance(error, tuple(cls for cls in loaded if isinstance(cls, type)))
