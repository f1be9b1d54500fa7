"""Metered transports for httpx, and for httpx2, which many SDKs of model providers use. Both have the same classes.

Nothing here imports either before the program has, except to make a transport.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

from quota.async_budget import AsyncBudget
from quota.budget import Budget
from quota.clients.answer_fields import Usage
from quota.clients.caller import Caller
from quota.clients.gate import PEEK_WITHIN_S, HostGate, HostNames, MethodOf, at_once, unpacked
from quota.clients.metering import Attempt, Meter
from quota.clients.upstream_errors import MAX_BODY_BYTES, passed
from quota.common.clock import elapsed_s
from quota.common.text import show
from quota.errors import UsageError, behind
from quota.terms.api import RequestBody

if TYPE_CHECKING:
    import httpx

Below = Callable[["httpx.Request"], Any]
"""Returns a response, or an awaitable of one."""

LIBRARIES = ("httpx", "httpx2")


class _Library:
    """One of the libraries, with our classes over its own."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.peeked = type("Peeked", (_Peeked, module.SyncByteStream, module.AsyncByteStream), {})
        self.watched = type("Watched", (_Watched, module.Response), {"plain": module.Response})
        timeouts = module.ConnectTimeout, module.PoolTimeout
        self.unsent = (module.ConnectError, *timeouts, module.ProxyError, module.UnsupportedProtocol)
        """What is raised before the first byte of a request. A ProxyError means that a proxy refused to connect."""


_library = cache(_Library)


def _library_of(instance: object) -> Any:
    """The library whose class an object has, or derives from."""
    modules = (cls.__module__.partition(".")[0] for cls in type(instance).__mro__)
    return _library(sys.modules[next(name for name in modules if name in LIBRARIES)])


def httpx_transport(
    budget: Budget,
    method: MethodOf | None = None,
    *,
    hosts: HostNames | None = None,
    inner: httpx.BaseTransport | None = None,
    caller: Caller | None = None,
    max_units: int | None = None,
    library: str = "httpx",
) -> httpx.BaseTransport:
    """A transport for `httpx.Client`, over `inner` (default: a plain `httpx.HTTPTransport`).

    A client uses its `http2`, `verify` and `cert` only for transports that it makes itself: give them, and a proxy, to
    `inner`. A client with a `proxy` or `mounts` bypasses this transport, and nothing is charged.
    `hosts` are the metered hosts, one or several: `api.example.com` (any port) or `127.0.0.1:8765`; by default those
    of the budget, whose cost book names the `method` by its `routes`. `caller` signs what leaves; the client's own
    request stays unsigned. The transport spends at most `max_units` in all. `library` is "httpx" or "httpx2".
    Put a cache above this transport: the answers of another `inner` are charged.
    """
    gate = HostGate(Meter(budget, max_units), method, hosts)
    module = imported(library)
    below = module.HTTPTransport() if inner is None else inner
    if not hasattr(below, "handle_request"):
        raise UsageError(f"inner {show(below)} is no {library}.BaseTransport")

    base: Any = module.BaseTransport

    class MeteredTransport(base):  # type: ignore[misc]  # a class of either library
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            def attempt() -> httpx.Response:
                leaving = request
                if caller is not None:
                    url, headers = caller.signed(request.method, str(request.url), request.headers)
                    given = {"stream": request.stream, "extensions": request.extensions}
                    leaving = module.Request(request.method, url, headers=headers, **given)
                plain = type(below) in (module.HTTPTransport, module.MockTransport)
                return at_once(send(gate, below.handle_request, leaving, plain))

            if caller is None:
                return attempt()
            again = isinstance(request.stream, module.ByteStream)
            return caller.send(attempt, str(request.url), again=again)

        def close(self) -> None:
            below.close()

    return MeteredTransport()


def httpx_async_transport(
    budget: AsyncBudget | Budget,
    method: MethodOf | None = None,
    *,
    hosts: HostNames | None = None,
    inner: httpx.AsyncBaseTransport | None = None,
    library: str = "httpx",
) -> httpx.AsyncBaseTransport:
    """A transport for `httpx.AsyncClient`, with a budget of `quota.open_async()` or `quota.open()`."""
    gate = HostGate.of(budget, method, hosts)
    module = imported(library)
    below = module.AsyncHTTPTransport() if inner is None else inner
    if not hasattr(below, "handle_async_request"):
        raise UsageError(f"inner {show(below)} is no {library}.AsyncBaseTransport")

    base: Any = module.AsyncBaseTransport

    class MeteredTransport(base):  # type: ignore[misc]  # a class of either library
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            plain = type(below) in (module.AsyncHTTPTransport, module.MockTransport)
            return await send(gate, below.handle_async_request, request, plain)

        async def aclose(self) -> None:
            await below.aclose()
            gate.close()

    return MeteredTransport()


def imported(library: str) -> Any:
    """The module of a library. Raises UsageError if it is another library, or is not installed."""
    if library not in LIBRARIES:
        raise UsageError(f"library {show(library)}: write {' or '.join(map(repr, LIBRARIES))}")
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise UsageError(f"the library {library} is not installed: pip install {library}") from error


# -- one attempt -------------------------------------------------------------------------------------------------------


async def send(gate: HostGate, below: Below, request: httpx.Request, plain: bool) -> httpx.Response:
    """Send a request as one attempt through `below`, which is awaited if the gate awaits, and charge it at the gate. If
    `below` is a `plain` transport of httpx, or httpx's own mock, an answer without a sent byte is a mock's, and its
    charge is refunded."""
    awaited = gate.awaits

    async def sent() -> httpx.Response:
        response = below(request)
        return cast("httpx.Response", await response if awaited else response)

    body = _body_of(request)
    charge = partial(gate.charge, request.method, url_of(request), body, request.headers)
    attempt = await charge()
    if attempt is None:
        return await sent()

    async def charge_again() -> None:
        nonlocal attempt
        attempt = await charge() or attempt

    departure = _Departure(request, plain, charge_again)

    async def traced() -> httpx.Response:
        with departure.traced(awaited=awaited):
            return await sent()

    response = await gate.leave(attempt, body, departure.never_began, traced)
    # A mock may pass a request on without its trace.
    if plain and not departure.began and "network_stream" not in response.extensions:
        await gate.corrected(attempt.never_left)
        return response
    status, headers = response.status_code, response.headers
    stream: Any = response.stream
    head, whole = b"", False
    try:
        if attempt.reads_body(status, headers):
            stream = _library_of(request).peeked(stream)
            head, whole = _decoded(response, await stream.peek(awaited=awaited)), stream.whole
        await gate.answered(attempt, status, head, headers, whole=whole)
    except BaseException:  # interrupted or cancelled: nobody else closes the response
        await stream.aclose() if awaited else stream.close()
        raise
    return _watched(attempt, response, stream, gate)


_HEADS = r"(httpcore2?\._a?sync\.http11\._send_request_headers|h2\.connection\.send_headers)\Z"
"""The code that finds an invalid method or field before any byte leaves. Over HTTP/2 also the code that finds that the
server ended the connection while a request waited for its turn."""

_SENDERS = r"httpcore2?\._a?sync\.(http11|http2)\."
_ACQUIRES = r"httpcore2?\._synchronization\.(acquire|__aenter__)\Z"
_POOLS = r"httpcore2?\._a?sync\.connection_pool\."


class _Departure:
    """Whether the departure of a request `began`: httpcore traces each head that it is about to send. `plain`: nothing
    but httpcore sends it. Over HTTP/2 httpcore sends a request again if the server ends its connection without an
    answer to it; before that, `charge_again` is called."""

    def __init__(self, request: httpx.Request, plain: bool, charge_again: Callable[[], Awaitable[None]]) -> None:
        self.began = self._tunnels = False
        self._plain, self._charge_again = plain, charge_again
        self._request = request

    @contextmanager
    def traced(self, *, awaited: bool) -> Iterator[None]:
        request, extensions = self._request, self._request.extensions
        callers = extensions.get("trace")

        async def trace(event: str, info: Any) -> Any:
            if event.endswith("send_request_headers.started"):
                is_own = info["request"].method == request.method.encode()
                if is_own and self.began:
                    await self._charge_again()
                self.began |= is_own
                self._tunnels |= not is_own  # a CONNECT to a proxy, which is not charged
            if callers is None:
                return None
            return await callers(event, info) if awaited else callers(event, info)

        def trace_at_once(event: str, info: Any) -> Any:
            return at_once(trace(event, info))

        request.extensions = {**extensions, "trace": trace if awaited else trace_at_once}
        try:
            yield
        finally:
            request.extensions = extensions

    def never_began(self, error: BaseException) -> bool:
        """Whether a request failed before its first byte, or was cancelled while it waited for a connection or for its
        turn on one: an HTTP/2 server limits the streams at once."""
        sends = any(passed(cause, _SENDERS) for cause in behind(error))
        if self._plain and not self.began and (self._tunnels or not sends):
            return True  # the error of a proxy, of a mock, or of a test tool that forbids connections
        library = _library_of(self._request)
        if isinstance(error, library.module.ProtocolError):
            cause = error.__cause__
            return passed(cause, _HEADS) or passed(cause and cause.__context__, _HEADS)
        waits = isinstance(error, library.unsent)
        if not isinstance(error, Exception):
            in_turn = not sends or passed(error, _ACQUIRES)
            waits = in_turn and passed(error, _POOLS)
        return waits and not self.began


class _Peeked:
    """A body whose beginning is read ahead. Its reader still gets all of it, or the error that ended it. `whole`: the
    beginning is the whole body."""

    def __init__(self, stream: Any) -> None:
        self.whole = False
        self._stream = stream
        self._rest: Any
        self._head: list[bytes] = []
        self._error: Exception | None = None

    async def peek(self, *, awaited: bool) -> bytes:
        self._rest = aiter(self._stream) if awaited else iter(self._stream)
        size, ends_s = 0, elapsed_s() + PEEK_WITHIN_S
        try:
            while size < MAX_BODY_BYTES and elapsed_s() < ends_s and not self.whole:
                chunk = await anext(self._rest, None) if awaited else next(self._rest, None)
                if chunk is None:
                    self.whole = True
                else:
                    self._head.append(chunk)
                    size += len(chunk)
        except _library_of(self).module.TransportError as error:
            self._error = error
        return b"".join(self._head)

    def __iter__(self) -> Iterator[bytes]:
        yield from self._head
        if self._error is not None:
            raise self._error
        yield from self._rest

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._head:
            yield chunk
        if self._error is not None:
            raise self._error
        async for chunk in self._rest:
            yield chunk

    def close(self) -> None:
        self._stream.close()

    async def aclose(self) -> None:
        await self._stream.aclose()


_Response: Any = object


class _Watched(_Response):  # type: ignore[misc]  # before the class of a library, see `_Library`
    """A response that settles its attempt while the caller reads the body. `plain` is the library's own class. If the
    caller `unpacks` the body, only the unpacked pieces count, although the library also reads the packed ones."""

    plain: Any
    attempt: Attempt
    usage: Usage
    gate: HostGate
    unpacks = False

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, also in another process, has the library's own class."""
        whole: Any = self.__getstate__()
        state = {name: value for name, value in whole.items() if name not in (*_Watched.__annotations__, "unpacks")}
        return self.plain, (self.status_code,), state

    @property
    def _unpacking(self) -> Any:
        unpacking = getattr(vars(self).get("_decoder"), "decompressor", None)
        return getattr(unpacking, "decompressor", unpacking)  # httpx2 wraps it

    def iter_bytes(self, chunk_size: int | None = None) -> Iterator[bytes]:
        self.unpacks = True
        return self._watching(super().iter_bytes(chunk_size))

    def iter_raw(self, chunk_size: int | None = None) -> Iterator[bytes]:
        pieces: Iterator[bytes] = super().iter_raw(chunk_size)
        return pieces if self.unpacks else self._watching(pieces)

    def _watching(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            self.attempt.settle(self.usage.feed(piece))
            yield piece
        self.attempt.settle(self.usage.end(self._unpacking))

    def aiter_bytes(self, chunk_size: int | None = None) -> AsyncIterator[bytes]:
        self.unpacks = True
        return self._awaiting(super().aiter_bytes(chunk_size))

    def aiter_raw(self, chunk_size: int | None = None) -> AsyncIterator[bytes]:
        pieces: AsyncIterator[bytes] = super().aiter_raw(chunk_size)
        return pieces if self.unpacks else self._awaiting(pieces)

    async def _awaiting(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for piece in pieces:
            await self.gate.settle(self.attempt, self.usage.feed(piece))
            yield piece
        await self.gate.settle(self.attempt, self.usage.end(self._unpacking))


def _decoded(response: httpx.Response, raw: bytes) -> bytes:
    def unpack(pieces: Iterator[bytes]) -> Iterator[bytes]:
        make: Callable[..., httpx.Response] = _library_of(response).module.Response
        return make(response.status_code, headers=response.headers, content=pieces).iter_bytes()

    return unpacked(response.headers.get("content-encoding", ""), raw, unpack)


def url_of(request: httpx.Request) -> str:
    """The URL of a request as it leaves: an extension may replace its path."""
    given = request.extensions.get("target", "")
    target = given if isinstance(given, str) else given.decode("latin-1")
    return f"{request.url.scheme}://{request.url.netloc.decode()}{target}" if target[:1] == "/" else str(request.url)


def _body_of(request: httpx.Request) -> RequestBody:
    if isinstance(request.stream, _library_of(request).module.ByteStream):
        return RequestBody.of(request.read())
    heads = [getattr(part, "render_headers", bytes)() for part in getattr(request.stream, "fields", ())]
    return RequestBody.of(request.stream, request.headers.get("content-length"), heads)


def _watched(attempt: Attempt, response: httpx.Response, stream: Any, gate: HostGate) -> httpx.Response:
    """The response over this stream, watched if its body may settle the attempt."""
    framed = not response.http_version.startswith("HTTP/1")
    usage = attempt.usage(response.headers, framed=framed)
    if usage is None and stream is response.stream:
        return response
    library = _library_of(response)
    kind = library.module.Response if usage is None else library.watched
    renewed = kind(response.status_code, headers=response.headers, stream=stream, extensions=response.extensions)
    if usage is not None:
        renewed.attempt, renewed.usage, renewed.gate = attempt, usage, gate
    return cast("httpx.Response", renewed)
