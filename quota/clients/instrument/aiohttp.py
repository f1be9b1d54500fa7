"""Where the bytes of aiohttp leave: below all middlewares, which it calls once for each attempt."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

from quota.clients.instrument.patches import Seam
from quota.clients.instrument.payers import Payer, Payers, answer_to
from quota.errors import Refused


def seams(payers: Payers) -> Iterator[Seam]:
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
            return _refused(refusal, payer, request)

    def charging(request: Callable[..., Any]) -> Callable[..., Any]:
        def _request(session: Any, *args: Any, middlewares: Any = None, **options: Any) -> Any:
            above = session._middlewares if middlewares is None else middlewares
            return request(session, *args, middlewares=(*above, metered), **options)

        return _request

    yield Seam("aiohttp.client", "ClientSession", "_request", ("middlewares",), charging)


def _refused(refusal: Refused, payer: Payer, request: Any) -> Any:
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
    known = inspect.signature(request.response_class.__init__).parameters
    response = request.response_class(
        request.method, request.original_url, **{name: value for name, value in given.items() if name in known}
    )
    content = aiohttp.StreamReader(aiohttp.base_protocol.BaseProtocol(request.loop), 1 << 16, loop=request.loop)
    content.feed_data(b"" if request.method == "HEAD" else answer.body)
    content.feed_eof()
    response.version, response.status, response.reason = aiohttp.HttpVersion11, answer.status, answer.reason
    response._headers = CIMultiDictProxy(CIMultiDict(answer.headers))
    response._raw_headers = tuple((name.encode(), value.encode()) for name, value in answer.headers.items())
    response.content = content
    return response
