"""How much of an answer is taken in: of what size, for how long, in what shape.

A hostile or broken upstream sends a body without an end, a byte every two seconds, a few bytes that unpack to
gigabytes, a page of 400,000 items, or a web page where JSON belongs. Each of these is a `BadAnswer`, one line.

    AnswerLimits      what is allowed; None: no limit
    Watch             the limits of one client, and until when each thread's request may take
    LimitedResponse   an answer that is read within them
    checked           what the client makes of a body, if it is what the API promises
"""

from __future__ import annotations

import io
import math
import threading
import time
import zlib
from contextlib import contextmanager
from http.client import HTTPResponse, IncompleteRead
from typing import TYPE_CHECKING, Any, NamedTuple

from googleapiclient.model import JsonModel

from quota.arguments import seconds, whole
from quota.common.text import spaced
from quota.errors import BadAnswer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from socket import socket

MB = 1_000_000
MAX_BODY_MB = 1_000
MAX_ITEMS = 1_000_000

BYTES_PER_VALUE = 16
"""A body may hold one value for each 16 bytes that are allowed. Parsed, a value of three bytes takes a hundred."""

MAX_TOKEN_LENGTH = 8_192
"""A page's token travels in a URL."""

POLL_S = 0.1
"""How often a request that waits looks whether it should."""

READ_BYTES = 1 << 16


class AnswerLimits(NamedTuple):
    """How large a body may be, unpacked too; how long an answer may take in all; how long its lists may be."""

    max_body_mb: int | None = None
    max_answer_s: float | None = None
    max_items: int | None = None

    def validated(self) -> AnswerLimits:
        """The limits as numbers above 0, each of them or None. Raises UsageError."""
        mb, answer_s, items = self
        return AnswerLimits(
            None if mb is None else whole(mb, "MB: max_body_mb", 1, MAX_BODY_MB),
            None if answer_s is None else seconds(answer_s, "max_answer_s"),
            None if items is None else whole(items, "items: max_items", 1, MAX_ITEMS),
        )

    @property
    def max_bytes(self) -> int | None:
        return None if self.max_body_mb is None else self.max_body_mb * MB

    def too_large(self) -> BadAnswer:
        return BadAnswer(f"upstream's answer is larger than {self.max_body_mb} MB; if it may be, raise max_body_mb")


class Watch(threading.local):
    """What one client's answers are held to. `waiting` is called several times a second while an answer is awaited;
    what it raises ends the request."""

    def __init__(self, limits: AnswerLimits, waiting: Callable[[], None] | None) -> None:
        self.limits = limits
        self._waiting = waiting
        self._until_s: float | None = None

    @contextmanager
    def request(self) -> Iterator[None]:
        """One request of this thread, with all its redirects."""
        if self._until_s is not None:
            yield
            return
        allowed_s = self.limits.max_answer_s
        self._until_s = math.inf if allowed_s is None else time.monotonic() + allowed_s
        try:
            yield
        finally:
            self._until_s = None

    def left_s(self) -> float:
        """How long this thread's request may still take. Raises BadAnswer when its time is over."""
        if self._waiting is not None:
            self._waiting()
        left_s = math.inf if self._until_s is None else self._until_s - time.monotonic()
        if left_s <= 0:
            allowed = self.limits.max_answer_s
            raise BadAnswer(f"upstream's answer was not complete after {allowed:g} s; if it may be, raise max_answer_s")
        return left_s


class _Arriving(io.RawIOBase):
    """The bytes of an answer as they arrive: in short waits, so that its deadline holds however slowly they come."""

    def __init__(self, raw: io.RawIOBase, sock: socket, timeout_s: float | None, watch: Watch) -> None:
        self._raw = raw
        self._sock = sock
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._watch = watch

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        silent_until_s = time.monotonic() + self._timeout_s
        while True:
            self._sock.settimeout(min(POLL_S, self._watch.left_s()))
            try:
                return self._sock.recv_into(buffer)
            except TimeoutError:
                if time.monotonic() >= silent_until_s:
                    raise

    def close(self) -> None:
        # The raw file keeps a socket open whose connection was closed; to close it lets go.
        self._raw.close()
        super().close()


class LimitedResponse(HTTPResponse):
    """An answer whose head and body are read within a watch's limits. A packed body comes out unpacked."""

    def __init__(self, sock: socket, *, timeout_s: float | None, watch: Watch, method: str | None) -> None:
        super().__init__(sock, method=method)
        raw: io.RawIOBase = self.fp.detach()
        self.fp = io.BufferedReader(_Arriving(raw, sock, timeout_s, watch))
        self._limits = watch.limits

    def read(self, amt: int | None = None) -> bytes:
        most = self._limits.max_bytes
        if amt is not None or most is None or self.fp is None:
            return super().read(amt)
        return self._unpacked(self._packed(most), most)

    def _packed(self, most: int) -> bytes:
        if self.length is not None and self.length > most:
            raise self._limits.too_large()
        content = bytearray()
        while piece := super().read(READ_BYTES):
            content += piece
            if len(content) > most:
                raise self._limits.too_large()
        if self.length:  # with a size given, http.client does not mind a body cut short
            raise IncompleteRead(bytes(content), self.length)
        return bytes(content)

    def _unpacked(self, content: bytes, most: int) -> bytes:
        packing = (self.headers.get("content-encoding") or "").strip().lower()
        if packing not in ("gzip", "deflate", "zlib") or not content:
            return content
        del self.headers["content-encoding"]  # or the client would unpack it again
        for window_bits in (zlib.MAX_WBITS | 32, -zlib.MAX_WBITS):  # either header, or none
            unpacking = zlib.decompressobj(window_bits)
            try:
                unpacked = unpacking.decompress(content, most + 1)
            except zlib.error:
                continue
            if len(unpacked) > most:
                raise self._limits.too_large()
            if unpacking.eof:
                return unpacked
        raise BadAnswer(f"upstream's answer does not unpack as {packing}; check endpoint and proxies")


# -- its shape ---------------------------------------------------------------------------------------------------------


def checked(postproc: Callable[[Any, Any], Any], limits: AnswerLimits) -> Callable[[Any, Any], Any]:
    """What the client calls to make values of a body: `postproc`, held to the limits and the API's own shapes."""
    promises_json = type(getattr(postproc, "__self__", None)) is JsonModel  # others are for media, and for no body

    def check(response: Any, content: Any) -> Any:
        if int(response.status) >= 300 or not promises_json:
            return postproc(response, content)
        most = limits.max_bytes
        if most is not None and _values(content) > most // BYTES_PER_VALUE:
            raise BadAnswer(
                f"upstream's answer holds over {most // BYTES_PER_VALUE:,} values; if it may, raise max_body_mb"
            )
        try:
            answer = postproc(response, content)
        except (ValueError, RecursionError):
            answer = content
        # The client hands on as it came what it cannot read.
        if answer == (content.decode() if isinstance(answer, str) and isinstance(content, bytes) else content):
            raise _no_object(_unparsed(content, str(response.get("content-type", ""))))
        _check_page(answer, limits)
        return answer

    return check


def _values(content: bytes | str) -> int:
    """At most so many values are in a JSON text: what stands in strings is counted too."""
    text = content.encode() if isinstance(content, str) else content
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _check_page(answer: object, limits: AnswerLimits) -> None:
    if not isinstance(answer, dict):
        raise _no_object(_KINDS.get(type(answer), "a JSON number"))
    for name, value in answer.items():
        if limits.max_items is not None and isinstance(value, list) and len(value) > limits.max_items:
            raise BadAnswer(
                f"upstream's answer holds {len(value):,} {_word(name)}, over {limits.max_items:,}; "
                "if it may, raise max_items"
            )
    items, token = answer.get("items", []), answer.get("nextPageToken")
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise BadAnswer("upstream's answer has items that are no list of objects; check endpoint and proxies")
    if token is not None and not (isinstance(token, str) and len(token) <= MAX_TOKEN_LENGTH and token.isprintable()):
        raise BadAnswer("upstream's answer has a nextPageToken that is none; check endpoint and proxies")


_KINDS = {list: "a JSON array", bool: "a JSON boolean", str: "a JSON string", type(None): "a JSON null"}


def _no_object(kind: str) -> BadAnswer:
    return BadAnswer(f"upstream answered with {kind} where a JSON object belongs; check endpoint and proxies")


def _unparsed(content: bytes | str, content_type: str) -> str:
    """What a body is that is no JSON: what upstream calls it, unless it calls it JSON."""
    if not content:
        return "an empty body"
    return "unreadable JSON" if "json" in content_type.lower() else _word(content_type)


def _word(text: str) -> str:
    """A word of upstream's, fit for a message."""
    return spaced(text[:40]).strip() or "text"
