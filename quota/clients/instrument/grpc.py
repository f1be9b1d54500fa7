"""gRPC, blocking and awaited: interceptors below all others charge each call of a channel.

On the wire a call is a POST to `/package.Service/Method`, and `routes` of a cost book may name it so. Messages are read
as the JSON of the same API over REST. A channel's own retries are off, because no interceptor would see them.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from importlib import import_module
from typing import Any

from quota.clients.gate import at_once
from quota.clients.instrument.patches import Seam
from quota.clients.instrument.payers import Payer, Payers
from quota.clients.metering import Attempt
from quota.errors import QuotaError
from quota.terms.api import RequestBody

KINDS = {
    "unary_unary": "UnaryUnaryClientInterceptor",
    "unary_stream": "UnaryStreamClientInterceptor",
    "stream_unary": "StreamUnaryClientInterceptor",
    "stream_stream": "StreamStreamClientInterceptor",
}
"""The kinds of calls, and gRPC's class of an interceptor for each."""

STATUS = {
    "OK": 200,
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "OUT_OF_RANGE": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "ABORTED": 409,
    "RESOURCE_EXHAUSTED": 429,
}
"""The HTTP status of a code over REST. gRPC also makes the other codes by itself, without an answer: there the charge
stands."""


def grpc_seams(payers: Payers) -> Iterator[Seam]:
    def charged(kind: str, multi_callable: Callable[..., Any]) -> Callable[..., Any]:
        def made(channel: Any, method: str, *args: Any, **options: Any) -> Any:
            unmetered = multi_callable(channel, method, *args, **options)
            place = _place(payers, getattr(channel, "_target", None) or channel._channel.target())
            if not payers.knows(*place):
                return unmetered
            below = type("Below", (), {kind: lambda *_, **__: unmetered})()
            above = sys.modules["grpc"].intercept_channel(below, _interceptor(payers, place))
            return getattr(above, kind)(method, *args, **options)

        return made

    def opened(awaited: bool, init: Callable[..., Any]) -> Callable[..., Any]:
        def made(channel: Any, target: Any, options: Any, *more: Any, **named: Any) -> None:
            place = _place(payers, target)
            if payers.knows(*place):
                options = _without_retries(options)
                if awaited:
                    credentials, compression, above = more
                    more = credentials, compression, (*(above or ()), *_async_interceptors(payers, place))
            init(channel, target, options, *more, **named)

        return made

    for kind in KINDS:
        yield Seam("grpc._channel", "Channel", kind, ("method",), partial(charged, kind))
    yield Seam("grpc._channel", "Channel", "__init__", ("target", "options"), partial(opened, False))
    parameters = ("target", "options", "credentials", "compression", "interceptors")
    yield Seam("grpc.aio._channel", "Channel", "__init__", parameters, partial(opened, True))


def _without_retries(options: Any) -> tuple[Any, ...]:
    kept = [option for option in options or () if option[0] != "grpc.enable_retries"]  # of two, the first would count
    return (*kept, ("grpc.enable_retries", 0))


def _place(payers: Payers, target: str | bytes) -> tuple[str, int]:
    """Host and port of a channel's target, such as `dns:///api.example.com:443`; of several, the first metered one."""
    text = target.decode() if isinstance(target, bytes) else target
    if "://" in text:
        text = text.partition("://")[2].partition("/")[2]
    places = []
    for address in re.sub("^(dns|ipv4|ipv6|passthrough):", "", text).split(","):
        host, _, port = address.rpartition(":")
        if not port.isdigit() or (":" in host and host[-1] != "]"):
            host, port = address, "443"
        places.append((host.strip("[]"), int(port)))
    return next((place for place in places if payers.knows(*place)), places[0])


def _body(request: Any) -> RequestBody:
    return RequestBody(None) if hasattr(request, "__next__") else RequestBody(_json(request))


def _json(message: Any) -> bytes:
    """A message of protobuf or proto-plus as JSON; b"" for any other object."""
    try:
        to_json = import_module("google.protobuf.json_format").MessageToJson
        return str(to_json(getattr(message, "_pb", message))).encode()
    except Exception:
        return b""


def _answer(code: Any, details: str | None, response: Any) -> tuple[int, bytes] | None:
    """Status and body as over REST; None if there may have been no answer."""
    status, text = STATUS.get(code.name), details or ""
    if status is None or "message larger than max" in text:  # gRPC's own bound on the size of messages
        return None
    if status == 200:
        return status, b"" if response is None else _json(response)
    return status, json.dumps({"error": {"code": status, "message": text, "status": code.name}}).encode()


def _fields(*metadata: Any) -> dict[str, str]:
    fields = {name: text for each in metadata for name, text in each or () if isinstance(text, str)}
    return {**fields, "content-type": "application/json"}


def _code(payer: Payer, refusal: QuotaError) -> Any:
    """The code of a refusal: one that no client retries, or the code of a 429."""
    codes = sys.modules["grpc"].StatusCode
    return codes.RESOURCE_EXHAUSTED if payer.answers(refusal) else codes.FAILED_PRECONDITION


# -- blocking ----------------------------------------------------------------------------------------------------------


def _interceptor(payers: Payers, place: tuple[str, int]) -> Any:
    def intercept(_: Any, below: Callable[..., Any], details: Any, request: Any) -> Any:
        payer, url = payers.of_connection("POST", "https", *place, details.method)
        if payer is None:
            return below(details, request)
        try:
            attempt = at_once(payer.gate().charge("POST", url, _body(request)))
        except QuotaError as refusal:
            channel = sys.modules["grpc._channel"]
            state = channel._RPCState((), (), (), _code(payer, refusal), str(refusal))
            raise channel._InactiveRpcError(state) from refusal
        call = below(details, request)
        if attempt is not None:
            (getattr(call, "add_done_callback", None) or call.add_callback)(lambda *_: _note(attempt, call))
        return call

    grpc = sys.modules["grpc"]
    bases = tuple(getattr(grpc, interceptor) for interceptor in KINDS.values())
    return type("Charging", bases, {f"intercept_{kind}": intercept for kind in KINDS})()


def _note(attempt: Attempt, call: Any) -> None:
    code = call.code()
    if code is None:
        return
    is_unary = code.name == "OK" and not hasattr(call, "__next__")
    answer = _answer(code, call.details(), call.result() if is_unary else None)
    if answer is not None:
        status, body = answer
        fields = _fields(call.initial_metadata(), call.trailing_metadata())
        attempt.answered(status, body, fields)
        attempt.settle_by(fields, body)


# -- awaited -----------------------------------------------------------------------------------------------------------


def _async_interceptors(payers: Payers, place: tuple[str, int]) -> Iterator[Any]:
    running: set[Any] = set()

    async def intercept(_: Any, below: Callable[..., Any], details: Any, request: Any, *, kind: str) -> Any:
        method = details.method
        path = method.decode() if isinstance(method, bytes) else method
        payer, url = payers.of_connection("POST", "https", *place, path, awaited=True)
        if payer is None:
            return await below(details, request)
        try:
            attempt = await payer.gate(awaited=True).charge("POST", url, _body(request))
        except QuotaError as refusal:
            aio = sys.modules["grpc.aio"]
            raise aio.AioRpcError(_code(payer, refusal), aio.Metadata(), aio.Metadata(), str(refusal)) from refusal
        call = await below(details, request)
        if attempt is None:
            return call
        noting = partial(_note_awaited, payer, attempt, call, streams=kind.endswith("_stream"))
        if kind == "unary_unary":
            try:
                await noting()
            except asyncio.CancelledError:
                call.cancel()
                raise
            return call

        def ended(_: Any) -> None:
            task = asyncio.ensure_future(noting())
            running.add(task)
            task.add_done_callback(running.discard)

        call.add_done_callback(ended)
        return call

    aio = sys.modules["grpc.aio"]
    for kind, interceptor in KINDS.items():
        of_kind = partialmethod(intercept, kind=kind)
        yield type("Charging", (getattr(aio, interceptor),), {f"intercept_{kind}": of_kind})()


async def _note_awaited(payer: Payer, attempt: Attempt, call: Any, *, streams: bool) -> None:
    code = await call.code()
    response = await call if code.name == "OK" and not streams else None
    answer = _answer(code, await call.details(), response)
    if answer is not None:
        status, body = answer
        fields = _fields(await call.initial_metadata(), await call.trailing_metadata())
        gate = payer.gate(awaited=True)
        await gate.answered(attempt, status, body, fields, whole=True)
        usage = attempt.usage(fields)
        if usage is not None:
            await gate.settle(attempt, usage.feed(body))
            await gate.settle(attempt, usage.end())
