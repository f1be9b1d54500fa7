"""Where the bytes of httpx leave: its transports are called once for each attempt, over HTTP/1.1 and HTTP/2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from quota.clients.instrument.patches import Seam
from quota.clients.instrument.payers import Payer, Payers, answer_to
from quota.common.hosts import default_port
from quota.errors import Refused

_MODULE = "httpx._transports.default"


def seams(payers: Payers) -> Iterator[Seam]:
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
                return _refused(refusal, payer, request)

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
                return _refused(refusal, payer, request)

        return charged

    yield Seam(_MODULE, "HTTPTransport", "handle_request", ("request",), charging)
    yield Seam(_MODULE, "AsyncHTTPTransport", "handle_async_request", ("request",), charging_awaited)


def _refused(refusal: Refused, payer: Payer, request: Any) -> Any:
    import httpx

    if not payer.answers_429:
        raise httpx.ConnectError(str(refusal), request=request) from refusal
    answer = answer_to(refusal)
    return httpx.Response(answer.status, headers=answer.headers, content=answer.body, request=request)
