"""Sends an attempt of requests or urllib3, and reads whether it left, and its answer. All errors come from urllib3."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from http.client import CannotSendRequest
from typing import Any

import urllib3
from urllib3 import HTTPResponse
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

from quota.clients.gate import HostGate, Peeked, at_once, unpacked
from quota.clients.metering import Attempt
from quota.clients.upstream_errors import MAX_BODY_BYTES, passed
from quota.terms.api import RequestBody

_BEFORE = (
    r"(http\.client|urllib3\.connection)\.put(request|header)\Z"
    r"|urllib3(_future)?(\._async)?\.(connection\._new_conn|connectionpool\._validate_conn)\Z"
)
"""The functions that find an invalid method or field, and write only into a buffer; and the functions that connect,
also over TLS. A test tool that forbids connections may raise any error there."""

NO_TUNNEL = "Tunnel connection failed"
"""The beginning of the error if a proxy opens no connection to upstream."""


async def send(
    gate: HostGate, conn: Any, method: str, address: str, options: Mapping[str, Any], make: Callable[[], Any]
) -> Any:
    """Send a request as one attempt, and charge it at a gate. `make` is `_make_request` of the connection's pool, with
    these `options`, and awaited if the gate awaits. The answers that a recorder (vcrpy) replays are not charged."""
    headers = urllib3.HTTPHeaderDict(options.get("headers"))
    body = RequestBody.of(options.get("body"), headers.get("content-length"))
    charge = partial(gate.charge, method, address, body, headers)
    recorded = vars(conn).get("real_connection")
    attempt = await charge() if recorded is None else None

    async def made() -> Any:
        return await make() if gate.awaits else make()

    if attempt is None and (recorded is None or not gate.is_metered(method, address)):
        return await made()

    def request(*args: Any, **named: Any) -> Any:
        nonlocal attempt
        attempt = at_once(charge())
        return unhooked(*args, **named)

    if recorded is not None:
        unhooked, recorded.request = recorded.request, request
    try:
        raw = await gate.sent(made)
    except BaseException as error:
        if attempt is not None:
            await gate.failed(attempt, body, never_left, error)
        raise
    finally:
        if recorded is not None:
            del recorded.request
    if attempt is None or not hasattr(raw, "status"):  # a promise of urllib3-future: the charge stands
        return raw
    try:
        if gate.awaits:  # reading the body would have to be awaited, too
            await gate.answered(attempt, raw.status, b"", raw.headers, whole=False)
        elif isinstance(raw, HTTPResponse):
            return noted(attempt, raw, preloaded=options.get("preload_content", True))
        else:
            attempt.answered(raw.status, b"", raw.headers, whole=False)
        return raw
    except BaseException:  # interrupted: nobody else closes the response
        if not gate.awaits:
            raw.close()
        raise


def never_left(error: BaseException) -> bool:
    """Whether a request failed before its first byte: no address, no connection, a proxy that refused, no TLS, invalid
    HTTP, or a connection with an unread answer."""
    # Its `__context__` does not count: that may be the error of another attempt.
    wrapped = [getattr(error, "original_error", None), error.__cause__, *error.args]
    if any(passed(each, _BEFORE) for each in (error, *wrapped) if isinstance(each, BaseException)):
        return True
    # urllib3 also reports a proxy error if a request left and got no answer, so look at the wrapped error.
    reason = getattr(error, "original_error", error)
    no_tunnel = isinstance(reason, OSError) and str(reason).startswith(NO_TUNNEL)
    return no_tunnel or isinstance(reason, (NewConnectionError, ConnectTimeoutError, CannotSendRequest))


def noted(attempt: Attempt, raw: Any, *, preloaded: bool = False) -> Any:
    """Note the answer, and return one from which the reader still gets everything, also if it is `preloaded`."""
    status, headers = raw.status, raw.headers
    packing = headers.get("content-encoding", "")
    if preloaded:
        whole = not raw.length_remaining  # the caller may have limited what urllib3 reads
        head = raw.data[:MAX_BODY_BYTES] if raw.decode_content else unpacked(packing, raw.data, _unpacker(raw))
        attempt.answered(status, head, headers, whole=whole)
        if whole:
            attempt.settle_by(headers, raw.data, _unpacking(raw))
        return raw
    if raw.length_remaining == 0 or not attempt.reads_body(status, headers):  # the answer to a HEAD has no body
        attempt.answered(status, b"", headers, whole=raw.length_remaining == 0)
        return _watched(attempt, raw)
    body = _PeekedBody(raw)
    attempt.answered(status, unpacked(packing, body.head, _unpacker(raw)), headers, whole=body.whole)
    renewed = _Renewed(
        body=body,
        preload_content=False,
        decode_content=raw.decode_content,
        original_response=getattr(raw, "_original_response", None),  # requests looks for cookies there
        **_head_of(raw),
    )
    return _watched(attempt, renewed)


def _unpacking(raw: Any) -> Any:
    """What urllib3 has unpacked the body with, if anything."""
    return getattr(getattr(raw, "_decoder", None), "_obj", None)


def _head_of(raw: Any) -> dict[str, Any]:
    given = {"headers": raw.headers, "status": raw.status, "reason": raw.reason, "version": raw.version}
    given |= {"retries": raw.retries, "request_url": raw.geturl()}
    if hasattr(raw, "version_string"):  # since urllib3 2.3
        given["version_string"] = raw.version_string
    return given


def _unpacker(raw: Any) -> Callable[[Iterator[bytes]], Iterator[bytes]]:
    """urllib3's own way to unpack such an answer."""

    def unpack(pieces: Iterator[bytes]) -> Iterator[bytes]:
        body = Peeked(lambda _: next(pieces, b""), lambda: None, 0)
        return HTTPResponse(body=body, preload_content=False, enforce_content_length=False, **_head_of(raw)).stream(
            MAX_BODY_BYTES
        )

    return unpack


def _watched(attempt: Attempt, raw: Any) -> Any:
    """The answer. It settles the attempt while the caller reads it, if its body has the usage."""
    usage = attempt.usage(raw.headers)
    if usage is None:
        return raw
    is_inner = False

    def watched(read_on: Callable[..., bytes], *, reads_all: bool = False) -> Callable[..., bytes]:
        """One way of reading calls another (in urllib3-future a different one). Only the outermost call counts its
        piece."""

        def reading(amt: int | None = None, *args: Any, **options: Any) -> bytes:
            nonlocal is_inner
            if is_inner:
                return read_on(amt, *args, **options)
            is_inner = True
            try:
                piece = read_on(amt, *args, **options)
            finally:
                is_inner = False
            attempt.settle(usage.feed(piece))
            is_all = amt is None and reads_all
            if (is_all or (amt != 0 and not piece)) and not raw.length_remaining:
                attempt.settle(usage.end(_unpacking(raw)))
            return piece

        return reading

    def streamed(stream_of: Callable[..., Iterator[bytes]]) -> Callable[..., Iterator[bytes]]:
        def stream(*args: Any, **options: Any) -> Iterator[bytes]:
            pieces = stream_of(*args, **options)
            yield from iter(watched(lambda _: next(pieces, b"")), b"")

        return stream

    raw.read, raw.stream = watched(raw.read, reads_all=True), streamed(raw.stream)
    raw.read_chunked = streamed(raw.read_chunked)
    if hasattr(raw, "read1"):  # since urllib3 2.1
        raw.read1 = watched(raw.read1)
    return raw


class _Renewed(HTTPResponse):
    """A response whose body has no chunks any more, whatever its head says. As urllib3 does, it unpacks what comes in
    chunks only if it is asked to."""

    def supports_chunked_reads(self) -> bool:
        return True

    def read_chunked(self, amt: int | None = None, decode_content: bool | None = None) -> Iterator[bytes]:  # type: ignore[override]
        return iter(partial(self.read, amt, bool(decode_content)), b"")


class _PeekedBody(Peeked):
    """`whole`: the head is the whole body."""

    def __init__(self, raw: Any) -> None:
        def hang_up() -> None:
            raw.close()
            raw.release_conn()

        read = getattr(raw, "read1", raw.read)  # urllib3 before 2.1 waits for all that is asked for
        super().__init__(partial(read, decode_content=False), hang_up)
        self.whole = self.ended and not raw.length_remaining

    def readinto(self, buffer: Any) -> int:
        size = super().readinto(buffer)
        if buffer and not size:
            self.close()  # as http.client at the end of a body: urllib3 reads until then
        return size

    def read1(self, amount: int = -1) -> bytes:
        return self.read(MAX_BODY_BYTES if amount < 0 else amount)
