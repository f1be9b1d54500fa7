"""The seam for HTTP clients other than Google's: a transport that charges every attempt before it is sent.

    session = requests.Session()
    session.mount("https://", requests_adapter(budget, "messages.list", hosts=["api.example.com"]))

    client = httpx.Client(transport=httpx_transport(budget, name_of, hosts=["api.example.com"]))

The second argument says which API method a request is: one name for all, or a function of verb and URL. Requests to
hosts that are not listed pass uncharged, so a redirect is charged when it stays on a listed host. Both clients call
their transport once for each attempt and each redirect; urllib3's own retries, of which they would not tell, are off.

A refusal is raised as quota.Refused out of the client's call. Neither library is imported before its function is
called.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from quota.arguments import text, texts
from quota.clients.metering import Attempt, Hosts, Meter
from quota.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator

    import httpx
    import requests
    from requests.adapters import HTTPAdapter

    from quota.budget import Budget

MethodOf = str | Callable[[str, str], str]
"""An API method's name, or a function that gives it for (verb, url), for example ("GET", "https://...")."""

MAX_PEEK_BYTES = 64 * 1024
"""How much of an error's body is read to understand it; the client still gets all of it."""


class _Gate:
    def __init__(self, budget: Budget, method: MethodOf, hosts: str | Iterable[str]) -> None:
        if not callable(method):
            method = text(method, "method")
        names = texts(hosts, "host")
        if not names:
            raise UsageError("no host is named, so nothing would be charged; name the API's")
        self._meter = Meter(budget)
        self._method = method
        self._hosts = Hosts(names)

    def charge(self, verb: str, url: str) -> Attempt | None:
        """The charged attempt; None for a host that is not metered. Raises Refused."""
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        if (parts.hostname or "", port) not in self._hosts:
            return None
        method = self._method if isinstance(self._method, str) else self._method(verb, url)
        return self._meter.attempt(method, verb)


# -- requests ----------------------------------------------------------------------------------------------------------


def requests_adapter(budget: Budget, method: MethodOf, *, hosts: str | Iterable[str], **options: Any) -> HTTPAdapter:
    """An adapter for `requests.Session.mount`. `options` are HTTPAdapter's own, except `max_retries`, which is 0.

    `hosts` are the metered ones, one or several: `api.example.com` (any port) or `127.0.0.1:8765`.
    """
    from requests.adapters import HTTPAdapter

    gate = _Gate(budget, method, hosts)
    options["max_retries"] = 0

    class MeteredAdapter(HTTPAdapter):
        def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
            attempt = gate.charge(request.method or "GET", request.url or "")
            if attempt is None:
                return super().send(request, *args, **kwargs)
            try:
                response = super().send(request, *args, **kwargs)
            except Exception as error:
                if _never_left(error):
                    attempt.never_left()
                raise
            _note_response(attempt, response)
            return response

    return MeteredAdapter(**options)


def _never_left(error: Exception) -> bool:
    """Whether requests failed before the first byte of the request: no address, no connection, no trust."""
    import ssl

    import requests
    from urllib3.exceptions import NewConnectionError

    if not isinstance(error, requests.RequestException):
        # Everything that happens on the network arrives as a RequestException; this is about the arguments.
        return isinstance(error, (OSError, ValueError))
    if isinstance(error, (requests.ConnectTimeout, requests.exceptions.InvalidURL)):
        return True
    reason = getattr(error.args[0] if error.args else None, "reason", None)
    untrusted = isinstance(error, requests.exceptions.SSLError) and any(
        isinstance(argument, ssl.SSLCertVerificationError) for argument in getattr(reason, "args", ())
    )
    return untrusted or isinstance(reason, NewConnectionError)


def _note_response(attempt: Attempt, response: requests.Response) -> None:
    """Tell the attempt what was answered, and leave the response as unread as it was."""
    if response.status_code < 400:
        attempt.answered(response.status_code, b"")
        return
    from urllib3 import HTTPResponse

    raw = response.raw
    body = _PeekedBody(raw)
    given = {"headers": raw.headers, "status": raw.status, "reason": raw.reason, "version": raw.version}
    try:
        text = HTTPResponse(body=io.BytesIO(body.head), preload_content=False, **given).read(decode_content=True)
    except Exception:
        text = b""  # not what its headers say; its status is all there is to go by
    attempt.answered(response.status_code, text)
    response.raw = HTTPResponse(
        body=body,
        preload_content=False,
        decode_content=False,
        original_response=getattr(raw, "_original_response", None),  # requests looks for cookies there
        **given,
    )


class _PeekedBody(io.RawIOBase):
    """A response's raw bytes: those already read for a look, then the rest, or the error that ended them."""

    def __init__(self, raw: Any) -> None:
        self.head = b""
        self._raw = raw
        self._at = 0
        self._error: Exception | None = None
        try:
            while len(self.head) < MAX_PEEK_BYTES:
                more = raw.read(MAX_PEEK_BYTES - len(self.head), decode_content=False)
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

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
            self._raw.release_conn()
        super().close()


# -- httpx -------------------------------------------------------------------------------------------------------------


def httpx_transport(
    budget: Budget, method: MethodOf, *, hosts: str | Iterable[str], inner: httpx.BaseTransport | None = None
) -> httpx.BaseTransport:
    """A transport for `httpx.Client`, over `inner` (default: a plain `httpx.HTTPTransport`).

    `hosts` are the metered ones, one or several: `api.example.com` (any port) or `127.0.0.1:8765`.
    """
    import httpx

    gate = _Gate(budget, method, hosts)
    below = inner or httpx.HTTPTransport()

    class Peeked(httpx.SyncByteStream):
        def __init__(self, stream: httpx.SyncByteStream) -> None:
            self._stream = stream
            self._rest = iter(stream)
            self._head: list[bytes] = []
            self._error: httpx.TransportError | None = None

        def peek(self) -> bytes:
            size = 0
            try:
                while size < MAX_PEEK_BYTES and (chunk := next(self._rest, None)) is not None:
                    self._head.append(chunk)
                    size += len(chunk)
            except httpx.TransportError as error:
                self._error = error
            return b"".join(self._head)

        def __iter__(self) -> Iterator[bytes]:
            yield from self._head
            if self._error is not None:
                raise self._error
            yield from self._rest

        def close(self) -> None:
            self._stream.close()

    class MeteredTransport(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            attempt = gate.charge(request.method, str(request.url))
            if attempt is None:
                return below.handle_request(request)
            try:
                response = below.handle_request(request)
            except _unsent(httpx):
                attempt.never_left()
                raise
            if response.status_code < 400:
                attempt.answered(response.status_code, b"")
                return response
            stream = Peeked(cast("httpx.SyncByteStream", response.stream))
            attempt.answered(response.status_code, _decoded(httpx, response, stream.peek()))
            return _with_stream(httpx, response, stream)

        def close(self) -> None:
            below.close()

    return MeteredTransport()


def httpx_async_transport(
    budget: Budget, method: MethodOf, *, hosts: str | Iterable[str], inner: httpx.AsyncBaseTransport | None = None
) -> httpx.AsyncBaseTransport:
    """The same for `httpx.AsyncClient`. The ledger is asked on a worker thread, so that the event loop goes on."""
    import httpx
    from anyio.to_thread import run_sync

    gate = _Gate(budget, method, hosts)
    below = inner or httpx.AsyncHTTPTransport()

    class Peeked(httpx.AsyncByteStream):
        def __init__(self, stream: httpx.AsyncByteStream) -> None:
            self._stream = stream
            self._rest = aiter(stream)
            self._head: list[bytes] = []
            self._error: httpx.TransportError | None = None

        async def peek(self) -> bytes:
            size = 0
            try:
                while size < MAX_PEEK_BYTES and (chunk := await anext(self._rest, None)) is not None:
                    self._head.append(chunk)
                    size += len(chunk)
            except httpx.TransportError as error:
                self._error = error
            return b"".join(self._head)

        async def __aiter__(self) -> AsyncIterator[bytes]:
            for chunk in self._head:
                yield chunk
            if self._error is not None:
                raise self._error
            async for chunk in self._rest:
                yield chunk

        async def aclose(self) -> None:
            await self._stream.aclose()

    class MeteredTransport(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            attempt = await run_sync(gate.charge, request.method, str(request.url))
            if attempt is None:
                return await below.handle_async_request(request)
            try:
                response = await below.handle_async_request(request)
            except _unsent(httpx):
                await run_sync(attempt.never_left)
                raise
            if response.status_code < 400:
                attempt.answered(response.status_code, b"")
                return response
            stream = Peeked(cast("httpx.AsyncByteStream", response.stream))
            text = _decoded(httpx, response, await stream.peek())
            await run_sync(attempt.answered, response.status_code, text)
            return _with_stream(httpx, response, stream)

        async def aclose(self) -> None:
            await below.aclose()

    return MeteredTransport()


# The library is imported by whoever calls these; it comes along as an argument.


def _unsent(library: Any) -> tuple[type[Exception], ...]:
    """What httpx raises before the first byte of a request."""
    return library.ConnectError, library.ConnectTimeout, library.PoolTimeout, library.UnsupportedProtocol


def _decoded(library: Any, response: httpx.Response, raw: bytes) -> bytes:
    try:
        content: bytes = library.Response(response.status_code, headers=response.headers, content=raw).content
    except Exception:
        return b""  # not what its headers say; its status is all there is to go by
    return content


def _with_stream(library: Any, response: httpx.Response, stream: Any) -> httpx.Response:
    renewed: httpx.Response = library.Response(
        response.status_code, headers=response.headers, stream=stream, extensions=response.extensions
    )
    return renewed
