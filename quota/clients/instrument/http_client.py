"""Python's own `http.client`, and `urllib.request` above it. Libraries over them are charged elsewhere.

`endheaders` sends a request, and `getresponse` reads the head of its answer; each pair is an attempt.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from functools import cache
from http.client import HTTPResponse, HTTPSConnection, IncompleteRead
from typing import Any

from quota.clients.gate import MAX_PEEK_BYTES
from quota.clients.instrument.patches import Seam
from quota.clients.instrument.payers import Answer, Payers, answer_to
from quota.clients.metering import Attempt
from quota.errors import Refused
from quota.terms.api import RequestBody

_OTHERS = ("httplib2", "quota", "urllib3", "urllib3_future")
"""Their connections derive from http.client, and are charged elsewhere."""

_ATTEMPT = "_quota_attempt"
"""The attribute in which a connection keeps its attempt, or its 429, until the answer is read."""


def http_client(payers: Payers) -> Iterator[Seam]:
    def charging(endheaders: Callable[..., Any]) -> Callable[..., Any]:
        def _endheaders(conn: Any, message_body: Any = None, **options: Any) -> Any:
            if _is_of_others(conn.__class__) or not conn._buffer:
                return endheaders(conn, message_body, **options)
            verb, _, rest = conn._buffer[0].decode("latin-1").partition(" ")
            scheme = "https" if isinstance(conn, HTTPSConnection) else "http"
            tunnel = conn._tunnel_host
            host, port = (tunnel, conn._tunnel_port) if tunnel else (conn.host, conn.port)
            payer, address = payers.of_connection(verb, scheme, host, port, rest.rpartition(" ")[0])
            if payer is None:
                return endheaders(conn, message_body, **options)
            lines = [line.decode("latin-1").partition(":") for line in conn._buffer[1:]]
            fields = {name.lower(): value.strip() for name, _, value in lines}
            body = RequestBody.of(message_body, fields.get("content-length"))
            if message_body is None and ("content-length" in fields or "transfer-encoding" in fields):
                body = RequestBody(None, body.length)  # the caller sends it afterwards
            try:
                attempt = payer.gate.charge(verb, address, body, fields)
            except Refused as refusal:
                del conn._buffer[:]
                conn.close()
                if not payer.answers_429:
                    raise OSError(str(refusal)) from refusal
                conn.send = lambda data: None
                setattr(conn, _ATTEMPT, answer_to(refusal))
                return None
            if attempt is not None:
                setattr(conn, _ATTEMPT, attempt)
                _connect(conn, attempt)
            return endheaders(conn, message_body, **options)

        return _endheaders

    def noting(getresponse: Callable[..., Any]) -> Callable[..., Any]:
        def _getresponse(conn: Any) -> Any:
            noted = vars(conn).pop(_ATTEMPT, None)
            if isinstance(noted, Answer):
                del conn.send
                return _made(conn, noted)
            response = getresponse(conn)
            if noted is not None:
                _note(noted, response)
            return response

        return _getresponse

    yield Seam("http.client", "HTTPConnection", "endheaders", ("message_body",), charging)
    yield Seam("http.client", "HTTPConnection", "getresponse", (), noting)


@cache
def _is_of_others(kind: type) -> bool:
    return any(cls.__module__.partition(".")[0] in _OTHERS for cls in kind.__mro__)


def _connect(conn: Any, attempt: Attempt) -> None:
    """Connect first: after that, a request that fails may have left."""
    if conn.sock is not None or not conn.auto_open:
        return
    try:
        conn.connect()
    except BaseException:
        delattr(conn, _ATTEMPT)
        attempt.never_left()
        raise


def _note(attempt: Attempt, response: HTTPResponse) -> None:
    status: int = response.status
    headers: Any = response.headers
    head, whole = b"", response.length == 0
    if attempt.reads_body(status, headers) and not headers.get("content-encoding"):
        head, whole = _head(response)
    attempt.answered(status, head, headers, whole=whole, read=False)
    usage = attempt.usage(status, headers)
    if usage is None:
        return
    unwatched = response.read

    def read(amt: int | None = None) -> bytes:
        piece = unwatched(amt)
        attempt.settle(usage.feed(piece))
        if response.isclosed() and not response.length:
            attempt.settle(usage.end())
        return piece

    response.read = read  # type: ignore[method-assign]  # read in another way, the body leaves the bound


def _head(response: HTTPResponse) -> tuple[bytes, bool]:
    """The beginning of a body, and whether it is the whole body. The reader still gets all of it."""
    length = response.length
    if length == 0:
        return b"", True
    if length is None or length > MAX_PEEK_BYTES:  # in chunks, or until the connection ends
        return response.peek(MAX_PEEK_BYTES), False
    try:
        body = response.read()
    except IncompleteRead as error:  # the reader meets the error, too
        body = error.partial
    response.fp, response.length = io.BufferedReader(io.BytesIO(body)), length
    return body, len(body) == length


class _Socket(io.BytesIO):
    def makefile(self, *_: Any) -> _Socket:
        return self


def _made(conn: Any, answer: Answer) -> HTTPResponse:
    """A 429 for a refusal, as http.client reads an answer."""
    lines = [f"HTTP/1.1 {answer.status} {answer.reason}", *(f"{name}: {text}" for name, text in answer.headers.items())]
    head = "".join(f"{line}\r\n" for line in [*lines, ""]).encode()
    response: HTTPResponse = conn.response_class(_Socket(head + answer.body), method=conn._method)
    response.begin()
    return response
