"""The places where each library's bytes leave, and what its caller gets after a refusal.

    urllib3     `_make_request` sends one attempt, and reads its head
    requests    sends through urllib3, and niquests through its own copy; only the error for a refusal differs
    httpx       calls a transport, as httpx2 does, once for each attempt, over HTTP/1.1 and HTTP/2
    aiohttp     calls a middleware below all others once for each attempt
    http.client sends a request in `endheaders`, and reads the head of its answer in `getresponse`; urllib.request is
                above it
    httplib2    sends through http.client; only connections and the error for a refusal differ

`grpc.py` has gRPC.

Nothing here imports a library before the program has.
"""

from __future__ import annotations

import importlib
import inspect
import io
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import cache, partial
from http.client import HTTPResponse
from types import SimpleNamespace
from typing import Any

from quota.clients.gate import Peeked, at_once, unpacked
from quota.clients.instrument.grpc import grpc_seams
from quota.clients.instrument.patches import Seam
from quota.clients.instrument.payers import REFUSAL, Payer, Payers, with_refusal
from quota.clients.metering import Attempt
from quota.common.hosts import default_port, has_hung_up
from quota.errors import QuotaError
from quota.terms.api import RequestBody
from quota.web.documents import Problem


def seams_of(payers: Payers) -> Iterator[Seam]:
    for library in ("urllib3", "urllib3_future"):
        yield from _urllib3(payers, library)
    for library in ("requests", "niquests"):
        yield from _requests(library)
    for library in ("httpx", "httpx2"):
        yield from _httpx(payers, library)
    yield _aiohttp(payers)
    yield _httplib2()
    yield from _http_client(payers)
    yield from grpc_seams(payers)


def _replaced(steps: Callable[..., Any], awaited: bool, method: Callable[..., Any]) -> Callable[..., Any]:
    """What replaces a method. Its `steps` learn whether they are awaited, and get the method and its arguments."""

    async def in_task(*args: Any, **options: Any) -> Any:
        return await steps(True, method, *args, **options)

    def in_thread(*args: Any, **options: Any) -> Any:
        return at_once(steps(False, method, *args, **options))

    return in_task if awaited else in_thread


# -- urllib3 and requests ----------------------------------------------------------------------------------------------


def _urllib3(payers: Payers, library: str) -> Iterator[Seam]:
    async def charged(
        awaited: bool, make_request: Any, pool: Any, conn: Any, method: str, url: str, *args: Any, **options: Any
    ) -> Any:
        payer, address = payers.of_connection(method, pool.scheme, pool.host, pool.port, url)
        make = partial(make_request, pool, conn, method, url)
        if payer is None:
            answer = make(*args, **options)
            return await answer if awaited else answer
        options = {**dict(zip(("body", "headers"), args, strict=False)), **options}
        from quota.clients.urllib3 import send  # late: it imports urllib3, which is here only now

        try:
            return await send(payer.gate(awaited=awaited), conn, method, address, options, partial(make, **options))
        except QuotaError as refusal:
            if payer.answers(refusal) and options.get("response_conn") is not None:
                put = pool._put_conn(conn)  # else urllib3 itself takes the unused connection back
                if awaited:
                    await put
            module = sys.modules[library]
            answer = payer.answer_to(refusal, _no_retry(module, pool, url, refusal))
            kind = module.AsyncHTTPResponse if awaited else module.HTTPResponse
            return _refused_by_urllib3(kind, answer, refusal, method, url, options)

    def final(increment: Callable[..., Any]) -> Callable[..., Any]:
        def _increment(
            retries: Any, method: Any = None, url: Any = None, response: Any = None, *args: Any, **more: Any
        ) -> Any:
            refusal = getattr(response, REFUSAL, None)
            if refusal is None:
                return increment(retries, method, url, response, *args, **more)
            raise _no_retry(sys.modules[library], more.get("_pool"), url or "", refusal) from refusal

        return _increment

    yield Seam(f"{library}.util.retry", "Retry", "increment", ("method", "url", "response", "_pool"), final)
    parameters = ("conn", "method", "url", "preload_content")
    charging = partial(_replaced, charged, False)
    yield Seam(f"{library}.connectionpool", "HTTPConnectionPool", "_make_request", parameters, charging)
    awaited = f"{library}._async.connectionpool"  # of urllib3-future alone, which may go by the name of urllib3
    charging = partial(_replaced, charged, True)
    yield Seam(awaited, "AsyncHTTPConnectionPool", "_make_request", parameters, charging)


def _refused_by_urllib3(
    kind: Any, answer: Problem, refusal: QuotaError, method: str, url: str, options: dict[str, Any]
) -> Any:
    """A response of this kind with an answer of 429."""
    response = kind(
        body=io.BytesIO(b"" if method == "HEAD" else answer.body()),
        headers=dict(answer.fields()),
        status=answer.status,
        reason=answer.detail,
        version=11,
        preload_content=options.get("preload_content", True),
        decode_content=options.get("decode_content", True),
        request_method=method,
        request_url=url,
        retries=options.get("retries"),
    )
    setattr(response, REFUSAL, refusal)  # without it, a `Retry` would sleep for Retry-After and try again
    return response


def _no_retry(library: Any, pool: Any, url: str, refusal: QuotaError) -> Exception:
    error: Exception = library.exceptions.MaxRetryError(pool, url.partition("?")[0], refusal)
    error.args = (str(refusal),)
    vars(error)["__reduce__"] = lambda: (_no_retry_of, (library.__name__, url, refusal))  # theirs makes other `args`
    return error


def _no_retry_of(library: str, url: str, refusal: QuotaError) -> Exception:
    """The error in another process, or as a copy."""
    return _no_retry(importlib.import_module(library), None, url, refusal)


def _requests(library: str) -> Iterator[Seam]:
    async def naming_the_refusal(awaited: bool, send: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Raises a refusal as a plain RequestException: code would retry a ConnectionError."""
        try:
            return await send(*args, **options) if awaited else send(*args, **options)
        except OSError as error:
            refusal = getattr(error.args[0] if error.args else None, "reason", None)
            if not isinstance(refusal, QuotaError):
                raise
            kind = sys.modules[f"{library}.exceptions"].RequestException
            named = kind(str(refusal), request=getattr(error, "request", None))
            raise with_refusal(named, refusal) from refusal

    naming = partial(_replaced, naming_the_refusal, False)
    yield Seam(f"{library}.adapters", "HTTPAdapter", "send", ("request",), naming)
    if library == "niquests":
        naming = partial(_replaced, naming_the_refusal, True)
        yield Seam("niquests.adapters", "AsyncHTTPAdapter", "send", ("request",), naming)


# -- httpx -------------------------------------------------------------------------------------------------------------


def _httpx(payers: Payers, library: str) -> Iterator[Seam]:
    async def charged(awaited: bool, handle_request: Callable[..., Any], transport: Any, request: Any) -> Any:
        url, payer = request.url, None
        handle = partial(handle_request, transport)
        if payers.knows(url.host, url.port or default_port(url.scheme)):
            from quota.clients.httpx import send, url_of  # late: few programs come here

            payer = payers.of(request.method, url_of(request))
        if payer is None:
            return await handle(request) if awaited else handle(request)
        try:
            return await send(payer.gate(awaited=awaited), handle, request, plain=True)
        except QuotaError as refusal:
            httpx: Any = sys.modules[library]
            error = httpx.HTTPError(str(refusal))  # code would retry a RequestError, as OpenAI's does
            error.request = request
            answer = payer.answer_to(refusal, error)
            stream = httpx.ByteStream(b"" if request.method == "HEAD" else answer.body())
            given = {"request": request, "extensions": {"reason_phrase": answer.detail.encode("ascii", "replace")}}
            return httpx.Response(answer.status, headers=answer.fields(), stream=stream, **given)

    module, parameters = f"{library}._transports.default", ("request",)
    charging = partial(_replaced, charged, False)
    yield Seam(module, "HTTPTransport", "handle_request", parameters, charging)
    charging = partial(_replaced, charged, True)
    yield Seam(module, "AsyncHTTPTransport", "handle_async_request", parameters, charging)


# -- aiohttp -----------------------------------------------------------------------------------------------------------


def _aiohttp(payers: Payers) -> Seam:
    # A plain function, because it sees every request: one more coroutine takes half a microsecond.
    def metered(request: Any, handler: Callable[..., Any]) -> Awaitable[Any]:
        url = request.url
        payer = payers.of(request.method, str(url)) if payers.knows(url.raw_host, url.port) else None
        answer: Awaitable[Any] = handler(request) if payer is None else charged(payer, request, handler)
        return answer

    async def charged(payer: Payer, request: Any, handler: Callable[..., Any]) -> Any:
        from quota.clients.aiohttp import send  # late: it imports aiohttp, which is here only now

        try:
            return await send(payer.gate(awaited=True), request, handler)
        except QuotaError as refusal:
            return _refused_by_aiohttp(refusal, payer, request)

    def charging(request: Callable[..., Any]) -> Callable[..., Any]:
        def _request(session: Any, *args: Any, middlewares: Any = None, **options: Any) -> Any:
            above = session._middlewares if middlewares is None else middlewares
            return request(session, *args, middlewares=(*above, metered), **options)

        return _request

    return Seam("aiohttp.client", "ClientSession", "_request", ("middlewares",), charging)


def _refused_by_aiohttp(refusal: QuotaError, payer: Payer, request: Any) -> Any:
    """Raise the error, or return an answer of aiohttp's class without a connection."""
    import aiohttp
    from multidict import CIMultiDict, CIMultiDictProxy

    answer = payer.answer_to(refusal, aiohttp.ClientError(str(refusal)))
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
    content.feed_data(b"" if request.method == "HEAD" else answer.body())
    content.feed_eof()
    response.version, response.status, response.reason = aiohttp.HttpVersion11, answer.status, answer.detail
    response._headers = CIMultiDictProxy(CIMultiDict(answer.fields()))
    response._raw_headers = tuple((name.encode(), value.encode()) for name, value in answer.fields())
    response.content = content
    return response


# -- httplib2 ----------------------------------------------------------------------------------------------------------


def _httplib2() -> Seam:
    def over_live_connections(conn_request: Callable[..., Any]) -> Callable[..., Any]:
        def _conn_request(http: Any, conn: Any, *args: Any, **options: Any) -> Any:
            sender = vars(conn).get("real_connection", conn)  # a recorder (vcrpy) stands before it
            if sender.sock is not None and has_hung_up(sender.sock):
                sender.close()  # a request on this connection would be charged and never arrive
            try:
                return conn_request(http, conn, *args, **options)
            except OSError as error:
                if isinstance(error.__cause__, QuotaError):
                    refused = sys.modules["httplib2"].HttpLib2Error(str(error))
                    raise with_refusal(refused, error.__cause__) from error.__cause__
                raise

        return _conn_request

    parameters = ("conn", "request_uri", "method", "body", "headers")
    return Seam("httplib2", "Http", "_conn_request", parameters, over_live_connections)


# -- http.client -------------------------------------------------------------------------------------------------------


_OTHERS = ("urllib3", "urllib3_future")
"""Their connections derive from http.client, and are charged elsewhere."""

_ATTEMPT = "_quota_attempt"
"""The attribute in which a connection keeps its attempt, or its 429, until the answer is read."""


def _http_client(payers: Payers) -> Iterator[Seam]:
    def charging(endheaders: Callable[..., Any]) -> Callable[..., Any]:
        def _endheaders(conn: Any, message_body: Any = None, **options: Any) -> Any:
            if _is_of_others(conn.__class__) or not conn._buffer:
                return endheaders(conn, message_body, **options)
            _noted(conn)  # an answer that nobody has read
            verb, _, rest = conn._buffer[0].decode("latin-1").partition(" ")
            scheme = "https" if getattr(conn, "default_port", None) == default_port("https") else "http"
            tunnel = conn._tunnel_host
            host, port = (tunnel, conn._tunnel_port) if tunnel else (conn.host, conn.port)
            payer, address = payers.of_connection(verb, scheme, host, port, rest.rpartition(" ")[0])
            if payer is None:
                return endheaders(conn, message_body, **options)
            body, fields = _sent_with(conn, message_body)
            try:
                attempt = at_once(payer.gate().charge(verb, address, body, fields))
            except QuotaError as refusal:
                del conn._buffer[:]
                conn.close()
                setattr(conn, _ATTEMPT, payer.answer_to(refusal, OSError(str(refusal))))
                conn.send = lambda data: None
                return None
            if attempt is not None:
                setattr(conn, _ATTEMPT, attempt)
                try:
                    if conn.sock is None and conn.auto_open:
                        conn.connect()  # first: after that, a request that fails may have left
                except BaseException:
                    delattr(conn, _ATTEMPT)
                    attempt.never_left()
                    raise
            return endheaders(conn, message_body, **options)

        return _endheaders

    for module in ("http.client", "eventlet.green.http.client"):  # a copy
        yield Seam(module, "HTTPConnection", "endheaders", ("message_body",), charging)
        yield Seam(module, "HTTPConnection", "getresponse", (), _noting)


def _noting(getresponse: Callable[..., Any]) -> Callable[..., Any]:
    def _getresponse(conn: Any) -> Any:
        noted = vars(conn).get(_ATTEMPT)
        if isinstance(noted, Problem):
            _noted(conn)
            # A 429 for a refusal, as http.client reads an answer.
            lines = [f"HTTP/1.1 {noted.status}", *(f"{name}: {text}" for name, text in noted.fields()), "", ""]
            sent = "\r\n".join(lines).encode() + noted.body()
            sock = SimpleNamespace(makefile=lambda *_: io.BytesIO(sent))
            response: HTTPResponse = conn.response_class(sock, method=conn._method)
            response.begin()
            response.reason = noted.detail
            return response
        response = getresponse(conn)
        if noted is not None:
            _note(_noted(conn), response)
        return response

    return _getresponse


def _sent_with(conn: Any, message_body: Any) -> tuple[RequestBody, list[tuple[str, str]]]:
    """The body and the header fields of a request that a connection is about to send."""
    lines = [line.decode("latin-1").partition(":") for line in conn._buffer[1:]]
    sent = [(name.lower(), value.strip()) for name, _, value in lines]
    fields = dict(sent)
    body = RequestBody.of(message_body, fields.get("content-length"))
    if message_body is None and ("content-length" in fields or "transfer-encoding" in fields):
        body = RequestBody(None, body.length)  # the caller sends it afterwards
    return body, sent


@cache
def _is_of_others(kind: type) -> bool:
    return any(cls.__module__.partition(".")[0] in _OTHERS for cls in kind.__mro__)


def _noted(conn: Any) -> Any:
    """Take the attempt or the 429 of a connection's last request. The connection then sends again."""
    noted = vars(conn).pop(_ATTEMPT, None)
    if isinstance(noted, Problem):
        del conn.send
    return noted


def _note(attempt: Attempt, response: HTTPResponse) -> None:
    status: int = response.status
    headers: Any = response.headers
    head, whole = b"", response.length == 0
    if not whole and attempt.reads_body(status, headers):
        head, whole = _head(response)
    lengths = {value for name, value in headers.items() if name.lower() == "content-length"}
    is_clear = len(lengths) < 2  # http.client believes the first
    whole = whole and is_clear and headers.get("content-length", "0").isdecimal()
    head = unpacked(headers.get("content-encoding", ""), head)
    attempt.answered(status, head, headers, whole=whole)
    usage = attempt.usage(headers) if is_clear else None
    if usage is None:
        return

    def watched(read: Callable[..., Any]) -> Callable[..., Any]:
        def watching(*args: Any, **options: Any) -> Any:
            given = read(*args, **options)
            # `readinto` gives the size of the piece in its buffer.
            piece = given if isinstance(given, bytes) else bytes(memoryview(args[0])[:given])
            attempt.settle(usage.feed(piece))
            ended = response.chunk_left is None if response.chunked else not response.length
            if ended and (response.isclosed() or response.length == 0):
                attempt.settle(usage.end())
            return given

        return watching

    ways = ["read", "read1", "readinto"]  # if the body is read in another way, the bound stays charged
    if not response.chunked:  # else a line comes through `read`
        ways.append("readline")
    for name in ways:
        setattr(response, name, watched(getattr(response, name)))


def _head(response: HTTPResponse) -> tuple[bytes, bool]:
    """The beginning of a body, and whether it is the whole body. A response of the library's own class reads it. Its
    reader then gets the same bytes once more, so the whole body, or the error."""
    on_wire, seen = response.fp, bytearray()

    def recorded(size: int) -> bytes:
        piece: bytes = on_wire.read1(size)
        seen.extend(piece)
        return piece

    sock: Any = SimpleNamespace(makefile=lambda _: io.BufferedReader(Peeked(recorded, lambda: None, 0)))
    ahead: Any = HTTPResponse(sock)
    ahead.chunked, ahead.chunk_left, ahead.length = response.chunked, response.chunk_left, response.length
    peeked = Peeked(ahead.read1, lambda: None)
    again = Peeked(lambda size: b"" if peeked.error else on_wire.read1(size), on_wire.close, 0)
    again.head = bytes(seen)
    again.error = peeked.error if isinstance(peeked.error, OSError) else None  # the reader itself finds a wrong chunk
    response.fp = io.BufferedReader(again)
    return peeked.head, ahead.length == 0 or (ahead.length is None and peeked.ended)
