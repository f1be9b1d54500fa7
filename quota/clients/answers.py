"""Limits on an answer of upstream: its size, its time, its shape.

A hostile or broken upstream may send an endless body, one byte every two seconds, a few bytes that unpack to gigabytes,
a page of 400,000 items, or HTML instead of JSON. Each of these raises `BadAnswer` with one line.

    Watch             the limits of one client, and the deadline of each thread's request
    LimitedResponse   an answer that is read within the limits
    PatientConnection a connection whose answers are LimitedResponses
    PatientHttp       an Http with such connections
    check_redirect    refuses a redirect to anything except HTTP
    digestible        an error's body, if the client can parse it
    checked           checks the shape of a body before the client parses it
"""

from __future__ import annotations

import io
import math
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPResponse, IncompleteRead
from socket import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httplib2
from googleapiclient.errors import HttpError
from googleapiclient.model import JsonModel

from quota.clients.answer_fields import AnswerLimits
from quota.common.hosts import is_http_address, is_loopback
from quota.common.redact import redact
from quota.common.text import show, spaced
from quota.errors import BadAnswer, SlowAnswer

if TYPE_CHECKING:
    from http.client import HTTPConnection
else:
    HTTPConnection = object  # a recorder may have replaced http.client's; `_made` adds httplib2's own

BYTES_PER_VALUE = 16
"""A body may hold one value per 16 bytes of its size limit: a value of three bytes takes a hundred once parsed."""

MAX_TOKEN_LENGTH = 8_192
"""The longest page token. It travels in a URL."""

POLL_S = 0.1
"""How often a waiting request checks its deadline."""

READ_BYTES = 1 << 16


class Watch(threading.local):
    """The limits of one client. A waiting request calls `waiting` several times a second; an exception from `waiting`
    ends the request.
    """

    def __init__(self, limits: AnswerLimits, waiting: Callable[[], None] | None) -> None:
        self.limits = limits
        self._waiting = waiting
        self._until_s: float | None = None

    @contextmanager
    def request(self) -> Iterator[None]:
        """One request of this thread, including its redirects."""
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
        """The time left for this thread's request. Raises SlowAnswer when no time is left."""
        if self._waiting is not None:
            self._waiting()
        left_s = math.inf if self._until_s is None else self._until_s - time.monotonic()
        if left_s <= 0:
            allowed = self.limits.max_answer_s
            raise SlowAnswer(
                f"upstream's answer was not complete after {allowed:g} s; if this is expected, raise max_answer_s"
            )
        return left_s


class _Arriving(io.RawIOBase):
    """The bytes of an answer as they arrive. Short waits keep the deadline for a slow answer, too."""

    def __init__(self, raw: io.RawIOBase, sock: socket, timeout_s: float, watch: Watch) -> None:
        self._raw = raw
        self._sock = sock
        self._timeout_s = timeout_s
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
        # The raw file keeps the socket open after the connection is closed, so close it too.
        self._raw.close()
        super().close()


class LimitedResponse(HTTPResponse):
    """An answer that is read within the limits of a watch. It unpacks a compressed body."""

    def __init__(self, sock: socket, *, timeout_s: float, watch: Watch, method: str | None) -> None:
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
        try:
            while piece := super().read(READ_BYTES):
                content += piece
                if len(content) > most:
                    raise self._limits.too_large()
        except ValueError as error:  # a chunk of less than nothing
            raise no_http() from error
        if self.length:  # http.client accepts a body that is shorter than announced
            raise IncompleteRead(bytes(content), self.length)
        return bytes(content)

    def _unpacked(self, content: bytes, most: int) -> bytes:
        packing = (self.headers.get("content-encoding") or "").strip().lower()
        if packing not in ("gzip", "deflate", "zlib") or not content:
            return content
        del self.headers["content-encoding"]  # else the client would unpack it again
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


class PatientConnection(HTTPConnection):
    """Waits for a bounded time, and reads each answer within the limits of a watch. PatientHttp combines this with each
    connection class of httplib2, and sets `watch` and `timeout_s`.
    """

    watch: Watch
    timeout_s: float
    spoiled = False
    _answer: LimitedResponse | None = None

    def connect(self) -> None:
        self.timeout = self.patience_s()
        super().connect()

    def patience_s(self) -> float:
        return min(self.timeout_s, self.watch.left_s())

    def set_debuglevel(self, level: int) -> None:
        """Do nothing: at higher levels, http.client would print whole requests, including the key."""

    def response_class(  # type: ignore[override]  # http.client calls it like a class
        self, sock: Any, debuglevel: int = 0, method: str | None = None
    ) -> HTTPResponse:
        """Create the object that reads the next answer."""
        self._answer = LimitedResponse(sock, timeout_s=self.timeout_s, watch=self.watch, method=method)
        return self._answer

    @property
    def unread(self) -> bool:
        """Whether part of an answer is still unread. The next request must not take it for its own answer."""
        answer = self._answer
        return answer is not None and (answer.headers is None or not answer.isclosed())

    def hang_up(self) -> None:
        """Close the connection, and any unfinished answer, which would keep the socket open."""
        if self._answer is not None:
            self._answer.close()
        self.close()


class PatientHttp(httplib2.Http):  # type: ignore[misc]  # httplib2 ships no types
    """An Http for the API at `root`. Its connections are of this `kind`, with the attributes `of_each`. It drops a
    connection that is spoiled or has an unread answer."""

    def __init__(
        self, root: str, kind: type[PatientConnection], *, watch: Watch, timeout_s: float, **of_each: Any
    ) -> None:
        self.watch = watch
        of_each |= {"watch": watch, "timeout_s": timeout_s}
        self._types = {scheme: _made(kind, parent, of_each) for scheme, parent in httplib2.SCHEME_TO_CONNECTION.items()}
        loopback = is_loopback(urlsplit(root).hostname or "")
        # A proxy cannot reach this machine's loopback.
        super().__init__(timeout=timeout_s, proxy_info=None if loopback else httplib2.proxy_info_from_environment)

    def request(
        self,
        uri: str,
        method: str = "GET",
        body: Any = None,
        headers: Mapping[str, Any] | None = None,
        redirections: int = httplib2.DEFAULT_MAX_REDIRECTS,
        connection_type: Any = None,
    ) -> tuple[Any, bytes]:
        """Like httplib2's own method, which calls itself for every redirect. Ignores `connection_type`.

        Raises BadAnswer for a redirect to something that is not HTTP.
        """
        if redirections < httplib2.DEFAULT_MAX_REDIRECTS:
            check_redirect(uri)
        headers = self._leaving(uri, headers)
        kind = self._types.get(uri.partition(":")[0].lower())
        try:
            with self.watch.request():
                response, content = super().request(uri, method, body, headers, redirections, kind)
        except (httplib2.RedirectLimit, httplib2.RedirectMissingLocation) as error:
            raise BadAnswer("upstream redirects in circles, or nowhere; check endpoint and proxies") from error
        finally:
            pool = self.connections
            for name in [name for name, connection in pool.items() if connection.spoiled or connection.unread]:
                pool.pop(name).hang_up()
        self._answered(response, content)
        return response, digestible(response, content)

    def _leaving(self, uri: str, headers: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """The header fields with which a request leaves."""
        return headers

    def _answered(self, response: Any, content: bytes) -> None:
        """Called with each answer."""


def _made(kind: type[PatientConnection], parent: type, of_each: dict[str, Any]) -> type:
    """A connection of this kind over httplib2's own. A recorder (vcrpy) in its place sends over this connection what it
    does not replay."""
    if hasattr(parent, "_baseclass"):
        return type(parent.__name__, (parent,), {"_baseclass": _made(kind, parent._baseclass, of_each)})
    return type(f"{kind.__name__}{parent.__name__}", (kind, parent), of_each)


def no_http() -> BadAnswer:
    return BadAnswer("upstream's answer is no HTTP; check endpoint and proxies")


def check_redirect(uri: str) -> None:
    """Raise BadAnswer for a redirect that is no HTTP address: a file, another protocol, a user's name."""
    if not is_http_address(uri) or not uri.isprintable() or " " in uri:
        raise BadAnswer(
            f"upstream redirects to {show(redact(uri))}, which is no http address; check endpoint and proxies"
        )


def digestible(response: Any, content: bytes) -> bytes:
    """The body of an answer, or b"" for an error answer whose body the client cannot parse.

    The client looks for a message in the body of an error. If the message is not text, or the JSON is nested too deep,
    the client fails with one of Python's own exceptions, and the caller never learns the status.
    """
    if int(response.status) >= 300:
        try:
            HttpError(response, content)
        except Exception:
            return b""
    return content


# -- its shape ---------------------------------------------------------------------------------------------------------


def checked(postproc: Callable[[Any, Any], Any], limits: AnswerLimits) -> Callable[[Any, Any], Any]:
    """`postproc`, which parses a body for the client, with a check of the limits and of the API's shapes."""
    promises_json = type(getattr(postproc, "__self__", None)) is JsonModel  # not for media or empty bodies

    def check(response: Any, content: Any) -> Any:
        if int(response.status) >= 300 or not promises_json:
            return postproc(response, content)
        if int(response.status) == 204:  # the client makes an object without items of it
            raise _no_object("an empty body")
        most = limits.max_bytes
        if most is not None and _values(content) > most // BYTES_PER_VALUE:
            raise BadAnswer(
                f"upstream's answer holds over {most // BYTES_PER_VALUE:,} values; "
                "if this is expected, raise max_body_mb"
            )
        try:
            answer = postproc(response, content)
        except (ValueError, RecursionError):
            answer = content
        # The client returns an unparseable body unchanged.
        if answer == (content.decode() if isinstance(answer, str) and isinstance(content, bytes) else content):
            raise _no_object(_unparsed(content, str(response.get("content-type", ""))))
        _check_page(answer, limits)
        return answer

    return check


def _values(content: bytes | str) -> int:
    """An upper bound on the values in a JSON text: it also counts characters inside strings."""
    text = content.encode() if isinstance(content, str) else content
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _check_page(answer: object, limits: AnswerLimits) -> None:
    if not isinstance(answer, dict):
        raise _no_object(_KINDS.get(type(answer), "a JSON number"))
    for name, value in answer.items():
        if limits.max_items is not None and isinstance(value, list) and len(value) > limits.max_items:
            raise BadAnswer(
                f"upstream's answer holds {len(value):,} {_word(name)}, over {limits.max_items:,}; "
                "if this is expected, raise max_items"
            )
    if isinstance(answer.get("error"), dict) and "items" not in answer:
        message = show(answer["error"].get("message"))
        raise BadAnswer(
            f"upstream's answer holds an error, but no status of one: {message}; check endpoint and proxies"
        )
    items, token = answer.get("items", []), answer.get("nextPageToken")
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise BadAnswer("upstream's answer has items that are not a list of objects; check endpoint and proxies")
    if token is not None and not (isinstance(token, str) and len(token) <= MAX_TOKEN_LENGTH and token.isprintable()):
        raise BadAnswer("upstream's answer has an invalid nextPageToken; check endpoint and proxies")


_KINDS = {list: "a JSON array", bool: "a JSON boolean", str: "a JSON string", type(None): "a JSON null"}


def _no_object(kind: str) -> BadAnswer:
    return BadAnswer(f"upstream answered with {kind} instead of a JSON object; check endpoint and proxies")


def _unparsed(content: bytes | str, content_type: str) -> str:
    """The name of a body that is not JSON: its content type, unless that claims JSON."""
    if not content:
        return "an empty body"
    return "unreadable JSON" if "json" in content_type.lower() else _word(content_type)


def _word(text: str) -> str:
    """A word from upstream, fit for a message."""
    return spaced(text[:40]).strip() or "text"
