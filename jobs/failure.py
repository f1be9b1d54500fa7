"""What an exception raised by a fetch function means for the run."""

from __future__ import annotations

import errno
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from quota.common.text import describe, one_line
from quota.errors import BadAnswer

if TYPE_CHECKING:
    from quota.terms.costs import CostBook

Kind = Literal["exhausted", "transient", "answer", "config", "cursor", "region"]


@dataclass(frozen=True)
class Failure:
    """One failed step, classified. `message` is one line without secrets.

    exhausted   upstream's own quota has run out, in `bucket`: no further call of this run can succeed
    transient   worth another attempt
    answer      upstream's answer cannot be used; the same call may succeed later, and costs as much
    config      key, API or permissions are not set up: every call would fail alike
    cursor      upstream no longer knows this cursor
    region      an error of this region alone; the others may succeed
    """

    kind: Kind
    message: str
    bucket: str | None = None


def classify_failure(error: Exception, *, method: str, book: CostBook) -> Failure:
    """What `error` means. `method` is the API method that was probably called; it only helps to name a bucket.

    It looks only into modules that are already loaded, since an exception cannot come from any other.
    """
    if _is_any(error, (("googleapiclient.errors", "HttpError"),)):
        return _classify_answer(int(error.resp.status), error.content, method, book)  # type: ignore[attr-defined]
    message = _redacted(describe(error))
    if isinstance(error, BadAnswer):
        return Failure("answer", one_line(_redacted(str(error))))
    unreachable = isinstance(error, OSError) and error.errno in _UNREACHABLE
    if unreachable or isinstance(error, (ConnectionError, TimeoutError)) or _is_any(error, _TRANSIENT):
        certificate = _is_any(error, (("ssl", "SSLCertVerificationError"),))
        return Failure("config" if certificate else "transient", message)
    if _is_any(error, (("google.auth.exceptions", "GoogleAuthError"),)):
        from quota.clients.login import refused

        return Failure("config", refused(error))  # type: ignore[arg-type]  # by name, without importing it
    return Failure("region", message)


_UNREACHABLE = frozenset(
    (
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENETRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EADDRNOTAVAIL,
        errno.ENOBUFS,
    )
)
"""What the system says of a network that is away, or busy. Python has no classes of errors for these."""

_TRANSIENT = (
    ("http.client", "HTTPException"),
    ("socket", "gaierror"),
    ("ssl", "SSLError"),
    ("httplib2", "ServerNotFoundError"),
    ("google.auth.exceptions", "TransportError"),
    # A user's own fetch function may use these.
    ("requests.exceptions", "ConnectionError"),
    ("requests.exceptions", "ChunkedEncodingError"),  # the answer ended in the middle
    ("requests.exceptions", "Timeout"),
    ("httpx", "TransportError"),
    ("aiohttp", "ClientConnectionError"),
    ("aiohttp", "ClientPayloadError"),
)


def _is_any(error: Exception, classes: tuple[tuple[str, str], ...]) -> bool:
    found = (getattr(sys.modules.get(module), name, None) for module, name in classes)
    return isinstance(error, tuple(cls for cls in found if isinstance(cls, type)))


def _classify_answer(status: int, body: bytes, method: str, book: CostBook) -> Failure:
    from quota.clients.upstream_errors import classify

    said = classify(status, body, method=method, book=book)
    reason = f" ({said.reason})" if said.reason else ""
    message = f"upstream said {status}{reason}: {said.message}"
    match said.kind:
        case "daily_exhausted" | "project_blocked":
            return Failure("exhausted", message, said.bucket)
        case "transient_rate" | "transient_server":
            return Failure("transient", message)
        case "config":
            return Failure("config", f"{message}; {said.remedy}" if said.remedy else message)
        case "request" if said.reason == "invalidPageToken":
            return Failure("cursor", message)
        case _:
            return Failure("region", message)


def _redacted(text: str) -> str:
    from quota.common.redact import redact

    return redact(text)
