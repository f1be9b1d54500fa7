"""Where the bytes of each library leave, and what its caller gets in place of an answer after a refusal.

    urllib3     `_make_request` sends one attempt, and reads its head
    requests    leaves through urllib3: a refusal only becomes the cause of the error that requests makes of it
    httpx       a transport is called once for each attempt, over HTTP/1.1 and HTTP/2
    aiohttp     below all middlewares, which it calls once for each attempt
    httplib2    each `request` of a connection is an attempt; Google's client is built on it

Nothing here imports a library before the program has.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from http.client import HTTPSConnection
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from quota.clients.instrument.patches import Seam
from quota.clients.instrument.payers import Payer, Payers, answer_to
from quota.clients.metering import Attempt
from quota.common.hosts import default_port, has_hung_up
from quota.errors import Refused
from quota.terms.api import RequestBody


def seams_of(payers: Payers) -> Iterator[Seam]:
    yield _urllib3(payers)
    yield _requests()
    yield from _httpx(payers)
    yield _aiohttp(payers)
    yield _httplib2(payers)


def _address(scheme: str, host: str, port: int | None, target: str) -> str:
    """The URL of a request by the connection that it leaves on."""
    shown = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{scheme}://{shown}{'' if port is None else f':{port}'}{target}"


# -- urllib3 and requests ----------------------------------------------------------------------------------------------


def _urllib3(payers: Payers) -> Seam:
    def charging(make_request: Callable[..., Any]) -> Callable[..., Any]:
        def _make_request(pool: Any, conn: Any, method: str, url: str, *args: Any, **options: Any) -> Any:
            address, scheme, host, port = "", pool.scheme, pool.host, pool.port
            if url[:1] != "/" and "//" in url:  # the pool is of a proxy
                parts = urlsplit(url)
                address, scheme, host, port = url, parts.scheme, parts.hostname or "", parts.port
            payer = None
            if payers.knows(host, port or default_port(scheme)):
                address = address or _address(scheme, host, port, url)
                payer = payers.of(method, address)
            if payer is None:
                return make_request(pool, conn, method, url, *args, **options)
            options = {**dict(zip(("body", "headers"), args, strict=False)), **options} if args else options
            try:
                return _attempt(payer, address, pool, conn, method, url, options)
            except Refused as refusal:
                return _refused_by_urllib3(refusal, payer, pool, conn, method, url, options)

        def _attempt(
            payer: Payer, address: str, pool: Any, conn: Any, method: str, url: str, options: dict[str, Any]
        ) -> Any:
            from quota.clients.urllib3 import never_left, noted  # late: it imports urllib3, which is here only now

            headers = options.get("headers") or {}
            body = RequestBody.of(options.get("body"), headers.get("content-length"))
            attempt = payer.gate.charge(method, address, body, headers)
            if attempt is None:
                return make_request(pool, conn, method, url, **options)
            try:
                raw = make_request(pool, conn, method, url, **options)
            except Exception as error:
                if body.makes_no_requests and never_left(error):
                    attempt.never_left()
                raise
            try:
                return noted(attempt, raw, preloaded=options.get("preload_content", True))
            except BaseException:  # interrupted: nobody else knows of the response
                raw.close()
                raise

        return _make_request

    parameters = ("conn", "method", "url", "preload_content")
    return Seam("urllib3.connectionpool", "HTTPConnectionPool", "_make_request", parameters, charging)


def _refused_by_urllib3(
    refusal: Refused, payer: Payer, pool: Any, conn: Any, method: str, url: str, options: dict[str, Any]
) -> Any:
    """An answer of 429, or the error that urllib3 itself does not try again."""
    from urllib3 import HTTPResponse
    from urllib3.exceptions import MaxRetryError

    if not payer.answers_429:
        error = MaxRetryError(pool, url.partition("?")[0], refusal)
        error.args = (str(refusal),)
        raise error from refusal
    if options.get("response_conn") is not None:  # else urllib3 itself takes the unused connection back
        pool._put_conn(conn)
    answer = answer_to(refusal)
    return HTTPResponse(
        body=io.BytesIO(b"" if method == "HEAD" else answer.body),
        headers=answer.headers,
        status=answer.status,
        reason=answer.reason,
        version=11,
        preload_content=options.get("preload_content", True),
        decode_content=options.get("decode_content", True),
        request_method=method,
        request_url=url,
        retries=options.get("retries"),
    )


def _requests() -> Seam:
    def naming_the_refusal(send: Callable[..., Any]) -> Callable[..., Any]:
        def _send(adapter: Any, *args: Any, **options: Any) -> Any:
            try:
                return send(adapter, *args, **options)
            except OSError as error:  # what requests raises is one
                refusal = getattr(error.args[0] if error.args else None, "reason", None)
                if isinstance(refusal, Refused):
                    raise error from refusal
                raise

        return _send

    return Seam("requests.adapters", "HTTPAdapter", "send", ("request",), naming_the_refusal)


# -- httpx -------------------------------------------------------------------------------------------------------------


def _httpx(payers: Payers) -> Iterator[Seam]:
    def payer_of(request: Any, *, awaited: bool = False) -> Payer | None:
        url = request.url
        if not payers.knows(url.host, url.port or default_port(url.scheme)):
            return None
        return payers.of(request.method, str(url), awaited=awaited)

    def charging(handle_request: Callable[..., Any]) -> Callable[..., Any]:
        def charged(transport: Any, request: Any) -> Any:
            payer = payer_of(request)
            if payer is None:
                return handle_request(transport, request)
            from quota.clients.httpx import send  # late: it imports httpx, which is here only now

            try:
                return send(payer.gate, partial(handle_request, transport), request)
            except Refused as refusal:
                return _refused_by_httpx(refusal, payer, request)

        return charged

    def charging_awaited(handle_request: Callable[..., Any]) -> Callable[..., Any]:
        async def charged(transport: Any, request: Any) -> Any:
            payer = payer_of(request, awaited=True)
            if payer is None:
                return await handle_request(transport, request)
            from quota.clients.httpx import async_send

            try:
                return await async_send(payer.async_gate, partial(handle_request, transport), request)
            except Refused as refusal:
                return _refused_by_httpx(refusal, payer, request)

        return charged

    module = "httpx._transports.default"
    yield Seam(module, "HTTPTransport", "handle_request", ("request",), charging)
    yield Seam(module, "AsyncHTTPTransport", "handle_async_request", ("request",), charging_awaited)


def _refused_by_httpx(refusal: Refused, payer: Payer, request: Any) -> Any:
    import httpx

    if not payer.answers_429:
        raise httpx.ConnectError(str(refusal), request=request) from refusal
    answer = answer_to(refusal)
    return httpx.Response(answer.status, headers=answer.headers, content=answer.body, request=request)


# -- aiohttp -----------------------------------------------------------------------------------------------------------


def _aiohttp(payers: Payers) -> Seam:
    # What passes every request awaits nothing itself: each coroutine more takes half a microsecond.
    def metered(request: Any, handler: Callable[..., Any]) -> Awaitable[Any]:
        url = request.url
        payer = payers.of(request.method, str(url), awaited=True) if payers.knows(url.raw_host, url.port) else None
        answer: Awaitable[Any] = handler(request) if payer is None else charged(payer, request, handler)
        return answer

    async def charged(payer: Payer, request: Any, handler: Callable[..., Any]) -> Any:
        from quota.clients.aiohttp import send  # late: it imports aiohttp, which is here only now

        try:
            return await send(payer.async_gate, handler, request)
        except Refused as refusal:
            return _refused_by_aiohttp(refusal, payer, request)

    def charging(request: Callable[..., Any]) -> Callable[..., Any]:
        def _request(session: Any, *args: Any, middlewares: Any = None, **options: Any) -> Any:
            above = session._middlewares if middlewares is None else middlewares
            return request(session, *args, middlewares=(*above, metered), **options)

        return _request

    return Seam("aiohttp.client", "ClientSession", "_request", ("middlewares",), charging)


def _refused_by_aiohttp(refusal: Refused, payer: Payer, request: Any) -> Any:
    """The error, or an answer as aiohttp makes one, without a connection."""
    import aiohttp
    from multidict import CIMultiDict, CIMultiDictProxy

    if not payer.answers_429:
        raise aiohttp.ClientConnectionError(str(refusal)) from refusal
    answer = answer_to(refusal)
    given = {
        "writer": None,
        "continue100": None,
        "timer": None,
        "request_info": request.request_info,
        "traces": [],
        "loop": request.loop,
        "session": request._session,
        "stream_writer": SimpleNamespace(output_size=0),
    }
    parameters = inspect.signature(request.response_class.__init__).parameters
    response = request.response_class(
        request.method, request.original_url, **{name: value for name, value in given.items() if name in parameters}
    )
    content = aiohttp.StreamReader(aiohttp.base_protocol.BaseProtocol(request.loop), 1 << 16, loop=request.loop)
    content.feed_data(b"" if request.method == "HEAD" else answer.body)
    content.feed_eof()
    response.version, response.status, response.reason = aiohttp.HttpVersion11, answer.status, answer.reason
    response._headers = CIMultiDictProxy(CIMultiDict(answer.headers))
    response._raw_headers = tuple((name.encode(), value.encode()) for name, value in answer.headers.items())
    response.content = content
    return response


# -- httplib2 ----------------------------------------------------------------------------------------------------------


def _httplib2(payers: Payers) -> Seam:
    def charging(conn_request: Callable[..., Any]) -> Callable[..., Any]:
        def _conn_request(http: Any, conn: Any, request_uri: str, method: str, body: Any, headers: Any) -> Any:
            if getattr(http, "charges", False) or not payers.knows(conn.host, conn.port):
                return conn_request(http, conn, request_uri, method, body, headers)
            scheme = "https" if isinstance(conn, HTTPSConnection) else "http"
            address = _address(scheme, conn.host, conn.port, request_uri)
            payer = payers.of(method, address)
            if payer is None:
                return conn_request(http, conn, request_uri, method, body, headers)
            charged = _Charged(conn, payer, address)
            try:
                response, content = conn_request(http, charged, request_uri, method, body, headers)
            except Refused as refusal:
                return _refused_by_httplib2(refusal, payer, method)
            if charged.attempt is not None:
                status = int(response.status)
                charged.attempt.answered(status, content, response)
                charged.attempt.settle_by(status, response, content)
            return response, content

        return _conn_request

    parameters = ("conn", "request_uri", "method", "body", "headers")
    return Seam("httplib2", "Http", "_conn_request", parameters, charging)


class _Charged:
    """A connection of httplib2 that charges each request when it is connected, before the first byte leaves."""

    def __init__(self, conn: Any, payer: Payer, address: str) -> None:
        self._conn = conn
        self._payer = payer
        self._address = address
        self.attempt: Attempt | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._conn, name)

    def request(self, method: str, request_uri: str, body: Any, headers: Any) -> None:
        conn, left = self._conn, False
        if conn.sock is not None and has_hung_up(conn.sock):
            conn.close()
            conn.connect()

        def send(data: Any) -> None:
            nonlocal left
            left = True
            type(conn).send(conn, data)

        fields = {name.lower(): value for name, value in (headers or {}).items()}
        request_body = RequestBody.of(body, fields.get("content-length"))
        attempt = self._payer.gate.charge(method, self._address, request_body, fields)
        if attempt is None:
            conn.request(method, request_uri, body, headers)
            return
        self.attempt = attempt
        conn.send = send
        try:
            conn.request(method, request_uri, body, headers)
        except BaseException:
            if not left:
                attempt.never_left()
            raise
        finally:
            del conn.send


def _refused_by_httplib2(refusal: Refused, payer: Payer, method: str) -> tuple[Any, bytes]:
    import httplib2

    if not payer.answers_429:
        raise ConnectionRefusedError(str(refusal)) from refusal
    answer = answer_to(refusal)
    response = httplib2.Response({**answer.headers, "status": str(answer.status)})
    response.reason = answer.reason
    return response, b"" if method == "HEAD" else answer.body
