"""A metered middleware for aiohttp's client."""

from __future__ import annotations

import warnings
from asyncio import timeout
from typing import TYPE_CHECKING
from weakref import finalize

from quota.clients.gate import MAX_PEEK_BYTES, PEEK_WITHIN_S, AsyncHostGate, HostNames, MethodOf

if TYPE_CHECKING:
    import aiohttp

    from quota.async_budget import AsyncBudget
    from quota.budget import Budget


def aiohttp_middleware(
    budget: AsyncBudget | Budget, method: MethodOf | None = None, *, hosts: HostNames | None = None
) -> aiohttp.ClientMiddlewareType:
    """A middleware for `aiohttp.ClientSession(middlewares=[...])`, with a budget of `quota.open_async()`, or
    of `quota.open()`.

    It charges every attempt, before it leaves: redirects, and requests that are sent again on a dead connection. Name
    it last, so that what other middlewares send again passes it too. `hosts` are the metered hosts, one or several:
    `api.example.com` (any port) or `127.0.0.1:8765`; by default those of the cost book, whose `routes` name the
    `method`.
    """
    import aiohttp

    gate = AsyncHostGate(budget, method, hosts)

    async def metered(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        attempt = await gate.charge(request.method, str(request.url))
        if attempt is None:
            return await handler(request)
        try:
            response = await handler(request)
        except (
            aiohttp.ClientConnectorError,
            aiohttp.ClientHttpProxyError,  # a proxy refused to connect
            aiohttp.ConnectionTimeoutError,
        ):  # before the first byte
            await gate.never_left(attempt)
            raise
        try:
            status, headers = response.status, response.headers
            body = await _peek(aiohttp.ClientError, response) if attempt.reads_body(status, headers) else b""
            await gate.answered(attempt, status, body, headers)
        except BaseException:  # cancelled: nobody else knows of the response
            response.close()
            raise
        return response

    finalize(metered, gate.close)  # aiohttp closes no middleware
    return metered


async def _peek(broken: type[Exception], response: aiohttp.ClientResponse) -> bytes:
    """The beginning of an answer, which its reader still gets."""
    head = b""
    try:
        async with timeout(PEEK_WITHIN_S) as wall:
            while len(head) < MAX_PEEK_BYTES and (piece := await response.content.readany()):
                head += piece
    except broken:
        pass  # its reader is told, too
    except TimeoutError:
        if not wall.expired():
            raise
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # since 2018, and nothing does it instead
        response.content.unread_data(head)
    return head
