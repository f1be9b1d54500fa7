"""What an exception raised by a fetch function means for the run."""

from __future__ import annotations

import errno
from typing import Literal, NamedTuple

from quota.clients.failures import Answer, answer_in, is_any, is_transient, refused_login
from quota.common.clock import host_clock
from quota.common.redact import redact
from quota.common.text import describe, one_line
from quota.errors import BadAnswer
from quota.terms.costs import CostBook

Kind = Literal["exhausted", "transient", "answer", "config", "cursor", "region"]


class Failure(NamedTuple):
    """One failed step, classified. `message` is one line without secrets. `answered`: upstream was there to say it.

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
    answered: bool = False

    @property
    def of_one_call(self) -> bool:
        """Whether other calls of the same region may succeed."""
        return self.kind in ("answer", "cursor", "region") or (self.kind == "transient" and self.answered)


def classify_failure(error: Exception, *, method: str, book: CostBook) -> Failure:
    """What `error` means. `method` is the API method that was probably called; it only helps to name a bucket."""
    answer = answer_in(error)
    if answer is not None:
        return _classify_answer(answer, method, book)
    message = redact(describe(error))
    if isinstance(error, BadAnswer):
        return Failure("answer", one_line(redact(str(error))))
    unreachable = isinstance(error, OSError) and error.errno in _UNREACHABLE
    if unreachable or isinstance(error, (ConnectionError, TimeoutError)) or is_transient(error):
        certificate = is_any(error, (("ssl", "SSLCertVerificationError"),))
        return Failure("config" if certificate else "transient", message)
    refused = refused_login(error)
    return Failure("region", message) if refused is None else Failure("config", refused)


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


def _classify_answer(answer: Answer, method: str, book: CostBook) -> Failure:
    from quota.clients.upstream import upstream_of

    status, headers, body = answer
    said = upstream_of(book).read(status, headers, body, method=method, at_ms=host_clock()).error
    if said is None:
        return Failure("region", f"upstream said {status}", answered=True)
    reason = f" ({said.reason})" if said.reason else ""
    message = f"upstream said {status}{reason}: {said.message}"
    match said.kind:
        case "daily_exhausted" | "project_blocked" | "closed":
            return Failure("exhausted", message, said.bucket, answered=True)
        case "transient_rate" | "transient_server":
            return Failure("transient", message, answered=True)
        case "config":
            return Failure("config", f"{message}; {said.remedy}" if said.remedy else message, answered=True)
        case "request" if said.reason == "invalidPageToken":
            return Failure("cursor", message, answered=True)
        case _:
            return Failure("region", message, answered=True)
