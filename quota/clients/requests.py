"""Metered transports for HTTP clients other than Google's: they charge every attempt before it is sent.

    session = requests.Session()
    session.mount("https://", requests_adapter(budget))

    client = httpx.Client(transport=httpx_transport(budget, name_of, hosts=["api.example.com"]))

The cost book says which hosts are metered and which method a request is. Where it has no `hosts` or no `routes`, or for
others, give them: the second argument is the API method, one name for all requests, or a function of verb and URL.
Requests to other hosts are not charged, so a redirect is charged if it stays on a metered host. Both clients call their
transport once for each attempt and each redirect. urllib3's own retries are off, because they would not be seen.

A refusal raises quota.Refused from the client's call. Neither library is imported before its function is called.
"""

from __future__ import annotations

import io
import ssl
import traceback
from typing import TYPE_CHECKING, Any

from quota.clients.answer_limits import AnswerLimits
from quota.clients.caller import Caller
from quota.clients.gate import MAX_PEEK_BYTES, PEEK_WITHIN_S, HostGate, HostNames, MethodOf, unpacked
from quota.common.clock import elapsed_s
from quota.common.redact import redact
from quota.terms.reserve import RequestBody

if TYPE_CHECKING:
    from collections.abc import Iterator

    import requests
    from requests.adapters import HTTPAdapter

    from quota.budget import Budget
    from quota.clients.metering import Attempt


# -- requests ----------------------------------------------------------------------------------------------------------


def requests_adapter(
    budget: Budget,
    method: MethodOf | None = None,
    *,
    hosts: HostNames | None = None,
    max_units: int | None = None,
    timeout_s: float | None = None,
    max_body_mb: int | None = None,
    caller: Caller | None = None,
    **options: Any,
) -> HTTPAdapter:
    """An adapter for `requests.Session.mount`. `options` are HTTPAdapter's own, except `max_retries`, which is 0.

    `hosts` are the metered hosts, one or several: `api.example.com` (any port) or `127.0.0.1:8765`; by default those
    of the cost book, whose `routes` name the `method`. `max_units` is the most that is spent in all, and `timeout_s`
    the timeout of requests that name none. A body of more than `max_body_mb`, as received or unpacked, raises
    quota.BadAnswer while it is read. `caller` signs what leaves; the client's own request stays unsigned.
    """
    from requests.adapters import HTTPAdapter
    from requests.exceptions import RequestException
    from requests.structures import CaseInsensitiveDict

    gate = HostGate(budget, method, hosts, max_units)
    limits = AnswerLimits(max_body_mb).validated()
    options["max_retries"] = 0

    class MeteredAdapter(HTTPAdapter):
        def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
            if timeout_s is not None and kwargs.get("timeout") is None:
                kwargs["timeout"] = timeout_s
            response = self._sent(request, *args, **kwargs)
            _bound(response, limits)
            return response

        def _sent(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
            if caller is None:
                return self._attempt(request, *args, **kwargs)
            response = self._signed(caller, request, *args, **kwargs)
            again = request.body is None or isinstance(request.body, bytes | str)
            if again and caller.renewed(request.url or "", response.status_code):
                response.close()
                response = self._signed(caller, request, *args, **kwargs)
            return response

        def _signed(
            self, caller: Caller, request: requests.PreparedRequest, *args: Any, **kwargs: Any
        ) -> requests.Response:
            leaving = request.copy()
            leaving.url, headers = caller.signed(request.method or "GET", request.url or "", request.headers)
            leaving.headers = CaseInsensitiveDict(headers)
            try:
                response = self._attempt(leaving, *args, **kwargs)
            except RequestException as error:  # it quotes the URL, and so a key in its query
                raise type(error)(redact(str(error)), request=request) from None
            response.request, response.url = request, request.url or ""
            return response

        def _attempt(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
            body = RequestBody.of(request.body, request.headers.get("content-length"))
            attempt = gate.charge(request.method or "GET", request.url or "", body)
            if attempt is None:
                return super().send(request, *args, **kwargs)
            try:
                response = super().send(request, *args, **kwargs)
            except Exception as error:
                if _never_left(error):
                    attempt.never_left()
                raise
            try:
                _note_response(attempt, response)
                _watch(attempt, response)
            except BaseException:  # interrupted: nobody else knows of the response
                response.close()
                raise
            return response

    return MeteredAdapter(**options)


def _never_left(error: Exception) -> bool:
    """Whether the request failed before its first byte: no address, no connection, no way through a proxy, no trusted
    certificate."""
    import requests
    from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

    if not isinstance(error, requests.RequestException):
        # A network failure is always a RequestException; this error is about the arguments. But the user's own body
        # may fail when a part of it has left.
        return isinstance(error, (OSError, ValueError)) and not _was_sending(error)
    if isinstance(error, (requests.ConnectTimeout, requests.exceptions.InvalidURL)):
        return True
    reason = getattr(error.args[0] if error.args else None, "reason", None)
    untrusted = isinstance(error, requests.exceptions.SSLError) and any(
        isinstance(argument, ssl.SSLCertVerificationError) for argument in getattr(reason, "args", ())
    )
    # urllib3 also calls it the proxy's error where a request that has left gets no answer: what it wraps counts.
    reason = getattr(reason, "original_error", reason)
    no_tunnel = isinstance(reason, OSError) and str(reason).startswith("Tunnel connection failed")
    return untrusted or no_tunnel or isinstance(reason, (NewConnectionError, ConnectTimeoutError))


def _was_sending(error: Exception) -> bool:
    """Whether a connection had been asked to send."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__") == "urllib3.connectionpool" for frame in frames)


def _note_response(attempt: Attempt, response: requests.Response) -> None:
    """Report the answer to the attempt, and leave the response unread."""
    if not attempt.reads_body(response.status_code, response.headers):
        attempt.answered(response.status_code, b"", response.headers)
        return
    from urllib3 import HTTPResponse

    raw = response.raw
    body = _PeekedBody(raw)
    given = {"headers": raw.headers, "status": raw.status, "reason": raw.reason, "version": raw.version}
    given |= {"retries": raw.retries, "request_url": raw.geturl()}
    if hasattr(raw, "version_string"):  # since urllib3 2.3
        given["version_string"] = raw.version_string

    def unpack(pieces: Iterator[bytes]) -> Iterator[bytes]:
        return HTTPResponse(body=_Pieces(pieces), preload_content=False, enforce_content_length=False, **given).stream(
            MAX_PEEK_BYTES
        )

    said = unpacked(raw.headers.get("content-encoding", ""), body.head, unpack)
    attempt.answered(response.status_code, said, response.headers)
    response.raw = HTTPResponse(
        body=body,
        preload_content=False,
        decode_content=False,
        original_response=getattr(raw, "_original_response", None),  # requests looks for cookies there
        **given,
    )


def _watch(attempt: Attempt, response: requests.Response) -> None:
    """Settle the attempt by what its body says, if it does, while it is read through the response."""
    usage = attempt.usage(response.status_code, response.headers)
    if usage is None:
        return
    unwatched = response.raw.stream

    def stream(*args: Any, **options: Any) -> Iterator[bytes]:
        for piece in unwatched(*args, **options):
            usage.feed(piece)
            attempt.settle(usage.take())
            yield piece
        usage.end()
        attempt.settle(usage.take())

    response.raw.stream = stream


def _bound(response: requests.Response, limits: AnswerLimits) -> None:
    """End the body, while it is read through the response, where it is longer than it may be."""
    most = limits.max_bytes
    if most is None:
        return
    unbounded = response.raw.stream

    def stream(*args: Any, **options: Any) -> Iterator[bytes]:
        size = 0
        for piece in unbounded(*args, **options):
            size += len(piece)
            if size > most:
                response.close()
                raise limits.too_large()
            yield piece

    response.raw.stream = stream


class _Pieces(io.RawIOBase):
    """A body that is read in these pieces, however much is asked for."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = next(self._pieces, b"")
        buffer[: len(piece)] = piece
        return len(piece)


class _PeekedBody(io.RawIOBase):
    """A response's raw bytes: first those already read, then the rest, or the error that ended them."""

    def __init__(self, raw: Any) -> None:
        self.head = b""
        self._raw = raw
        self._at = 0
        self._error: Exception | None = None
        ends_s = elapsed_s() + PEEK_WITHIN_S
        read = getattr(raw, "read1", raw.read)  # urllib3 before 2.1 waits for all that is asked for
        try:
            while len(self.head) < MAX_PEEK_BYTES and elapsed_s() < ends_s:
                more = read(MAX_PEEK_BYTES - len(self.head), decode_content=False)
                if not more:
                    break
                self.head += more
        except Exception as error:
            self._error = error

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.head[self._at : self._at + len(buffer)]
        self._at += len(data)
        if not data and self._error is not None:
            raise self._error
        if not data:
            data = self._raw.read(len(buffer), decode_content=False)
        buffer[: len(data)] = data
        return len(data)

    def read1(self, amount: int = -1) -> bytes:
        return self.read(MAX_PEEK_BYTES if amount < 0 else amount)

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
            self._raw.release_conn()
        super().close()
