"""A metered middleware for aiohttp's client."""

from __future__ import annotations

import warnings
from asyncio import timeout
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from weakref import finalize

import aiohttp

from quota.async_budget import AsyncBudget
from quota.budget import Budget
from quota.clients.answer_fields import Usage
from quota.clients.gate import PEEK_WITHIN_S, HostGate, HostNames, MethodOf
from quota.clients.metering import Attempt
from quota.clients.upstream_errors import MAX_BODY_BYTES, passed
from quota.terms.api import RequestBody


def aiohttp_middleware(
    budget: AsyncBudget | Budget, method: MethodOf | None = None, *, hosts: HostNames | None = None
) -> aiohttp.ClientMiddlewareType:
    """A middleware for `aiohttp.ClientSession(middlewares=[...])`, with a budget of `quota.open_async()`, or
    of `quota.open()`.

    It charges every attempt before it leaves, also redirects and requests that aiohttp sends again on a dead
    connection. Name it last, so that it sees what other middlewares send again. `hosts` are the metered hosts, one or
    several: `api.example.com` (any port) or `127.0.0.1:8765`; by default those of the budget, whose cost book names
    the `method` by its `routes`.
    """
    gate = HostGate.of(budget, method, hosts)
    metered = partial(send, gate)
    finalize(metered, gate.close)  # aiohttp closes no middleware
    return metered


async def send(
    gate: HostGate, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Send a request as one attempt through its handler, and charge it at a gate."""
    payload = request.body
    if isinstance(payload, aiohttp.BytesPayload):
        body = RequestBody.of(payload._value)  # 3.12.0 has no `as_bytes`
    else:
        length = getattr(payload, "size", None) or request.headers.get("content-length")
        parts = payload._parts if isinstance(payload, aiohttp.MultipartWriter) else ()
        heads = [part._binary_headers for part, *_ in parts]
        body = RequestBody.of(payload or None, length, heads)
    attempt = await gate.charge(request.method, str(request.url), body, request.headers)
    if attempt is None:
        return await handler(request)
    response = await gate.leave(attempt, body, _never_left, partial(handler, request))
    try:
        status, headers = response.status, response.headers
        head, whole = await peek(response) if attempt.reads_body(status, headers) else (b"", False)
        await gate.answered(attempt, status, head, headers, whole=whole)
        watch(gate, attempt, response)
    except BaseException:  # cancelled: nobody else closes the response
        response.close()
        raise
    return response


def _never_left(error: BaseException) -> bool:
    """Whether a request failed or was cancelled before it had a connection, or while aiohttp checked its fields.
    aiohttp sends no byte before that."""
    before = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
    return isinstance(error, before) or passed(error, r"aiohttp\.(connector\.|http_writer\.write_headers\Z)")


def watch(gate: HostGate, attempt: Attempt, response: aiohttp.ClientResponse) -> None:
    """Settle the attempt while the caller reads the answer, if its body has the usage."""
    usage = attempt.usage(response.headers)
    if usage is not None:
        response.content = _Watched(response.content, gate, attempt, usage)  # type: ignore[assignment]


def _watched(name: str) -> Callable[..., Awaitable[Any]]:
    async def read(body: _Watched, *args: Any, **options: Any) -> Any:
        given = await getattr(body._reader, name)(*args, **options)
        units = body._usage.feed(given[0] if name == "readchunk" else given)
        if units is None and body._reader.at_eof():
            units = body._usage.end()
        await body._gate.settle(body._attempt, units)
        return given

    return read


class _Watched:
    """A body that settles its attempt while the caller reads it."""

    def __init__(self, reader: aiohttp.StreamReader, gate: HostGate, attempt: Attempt, usage: Usage) -> None:
        self._reader, self._gate, self._attempt, self._usage = reader, gate, attempt, usage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    read, readany, readline = _watched("read"), _watched("readany"), _watched("readline")
    readuntil, readexactly, readchunk = _watched("readuntil"), _watched("readexactly"), _watched("readchunk")

    # These read through the methods above.
    __aiter__ = aiohttp.StreamReader.__aiter__
    iter_any = aiohttp.StreamReader.iter_any
    iter_chunked = aiohttp.StreamReader.iter_chunked
    iter_chunks = aiohttp.StreamReader.iter_chunks


async def peek(response: aiohttp.ClientResponse) -> tuple[bytes, bool]:
    """The beginning of an answer, and whether that is all of it. The reader still gets all of it."""
    head, whole = b"", False
    try:
        async with timeout(PEEK_WITHIN_S) as wall:
            while len(head) < MAX_BODY_BYTES and not whole:
                piece = await response.content.readany()
                head, whole = head + piece, not piece
    except aiohttp.ClientError:
        pass  # the reader meets the error, too
    except TimeoutError:
        if not wall.expired():
            raise
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # deprecated since 2018, without a replacement
        response.content.unread_data(head)
    return head, whole
