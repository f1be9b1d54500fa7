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
from functools import partial
from importlib import import_module
from typing import Any

from quota.clients.gate import HostGate, at_once
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
            above = sys.modules["grpc"].intercept_channel(below, _interceptor(payers, place, kind, awaited=False))
            return getattr(above, kind)(method, *args, **options)

        return made

    def opened(awaited: bool, init: Callable[..., Any]) -> Callable[..., Any]:
        def made(channel: Any, target: Any, options: Any, *more: Any, **named: Any) -> None:
            place = _place(payers, target)
            if payers.knows(*place):
                options = _without_retries(options)
                if awaited:
                    credentials, compression, above = more
                    ours = [_interceptor(payers, place, kind, awaited=True) for kind in KINDS]
                    more = credentials, compression, (*(above or ()), *ours)
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


# -- one call ----------------------------------------------------------------------------------------------------------


def _interceptor(payers: Payers, place: tuple[str, int], kind: str, *, awaited: bool) -> Any:
    """Charges the calls of one kind over a channel to this place. `awaited`: it is a channel of `grpc.aio`."""
    running: set[Any] = set()

    async def intercept(_: Any, below: Callable[..., Any], details: Any, request: Any) -> Any:
        path = details.method.decode() if isinstance(details.method, bytes) else details.method
        payer, url = payers.of_connection("POST", "https", *place, path)
        if payer is None:
            return await _result(below(details, request), awaited)
        try:
            gate = payer.gate(awaited=awaited)
            attempt = await gate.charge("POST", url, _body(request))
        except QuotaError as refusal:
            raise _error(payer, refusal, awaited) from refusal
        call = await _result(below(details, request), awaited)
        if attempt is None:
            return call
        noting = partial(_note, gate, attempt, call, streams=kind.endswith("_stream"))
        if awaited and kind == "unary_unary":
            try:
                await noting()
            except asyncio.CancelledError:
                call.cancel()
                raise
            return call

        def ended(_: Any = None) -> None:
            if awaited:
                task = asyncio.ensure_future(noting())
                running.add(task)
                task.add_done_callback(running.discard)
            else:
                at_once(noting())

        (getattr(call, "add_done_callback", None) or call.add_callback)(ended)
        return call

    def intercept_at_once(*args: Any) -> Any:
        return at_once(intercept(*args))

    base = getattr(sys.modules["grpc.aio" if awaited else "grpc"], KINDS[kind])
    return type("Charging", (base,), {f"intercept_{kind}": intercept if awaited else intercept_at_once})()


async def _result(value: Any, awaited: bool) -> Any:
    return await value if awaited else value


def _error(payer: Payer, refusal: QuotaError, awaited: bool) -> Exception:
    """The error for a refusal, with a code that no client retries, or the code of a 429."""
    codes = sys.modules["grpc"].StatusCode
    code = codes.RESOURCE_EXHAUSTED if payer.answers(refusal) else codes.FAILED_PRECONDITION
    if awaited:
        aio = sys.modules["grpc.aio"]
        error: Exception = aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), str(refusal), str(refusal))
    else:
        channel = sys.modules["grpc._channel"]
        state = channel._RPCState((), (), (), code, str(refusal))
        state.debug_error_string = str(refusal)  # google-ads reads it
        error = channel._InactiveRpcError(state)
    return error


async def _note(gate: HostGate, attempt: Attempt, call: Any, *, streams: bool) -> None:
    """Note the answer to a call that has ended."""
    code = await _result(call.code(), gate.awaits)
    if code is None:
        return
    response = None
    if code.name == "OK" and not streams:
        response = await call if gate.awaits else call.result()
    answer = _answer(code, await _result(call.details(), gate.awaits), response)
    if answer is not None:
        status, body = answer
        metadata = call.initial_metadata(), call.trailing_metadata()
        fields = _fields(*[await _result(each, gate.awaits) for each in metadata])
        await gate.answered(attempt, status, body, fields, whole=True)
        usage = attempt.usage(fields)
        if usage is not None:
            await gate.settle(attempt, usage.feed(body))
            await gate.settle(attempt, usage.end())
