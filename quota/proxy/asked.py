"""What a request to the proxy asks for, and its caller's side.

    asked_of      a request as it came; raises UnfitError for one that is not passed on
    Asked         whose it is, what leaves, and who spends
    UnfitError    the answer to a request that is not passed on
    CallerSide    the body as it comes, and whether the caller is still there

The path of what leaves begins behind the root of the API, so it cannot name another host. Paths with `..`,
`//` or `\\` are not passed on; one that servers may read in several ways (`%2F`, `;x`) costs the dearest of them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import unquote

from quota.common.text import show
from quota.errors import QuotaError
from quota.terms.api import RequestBody
from quota.web.documents import Problem

Fields = list[tuple[str, str]]

MAX_HELD_BYTES = 64 * 1024
"""How much of a body is held at most. What is charged for a longer one follows from its length alone."""

WATCH_AFTER_S = 0.1
"""When a request is slow. The others end before anybody could end them for a caller that went away."""

_HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
     "transfer-encoding", "upgrade")
)  # fmt: skip
"""What is about one connection (RFC 9110, 7.6.1), with what `Connection` names."""

_ONLY_HERE = _HOP_BY_HOP | {"host", "expect", "forwarded", "via", "x-real-ip"}


class UnfitError(QuotaError):
    """A request that is not passed on, and what its sender is told."""

    def __init__(self, status: int, detail: str, **more: Any) -> None:
        super().__init__(detail)
        self.problem = Problem(status, detail, **more)

    @classmethod
    def of(cls, problem: Problem) -> UnfitError:
        return cls(**problem._asdict())


class Asked(NamedTuple):
    """One request. `target` is the path with the query as it leaves, and `fields` its header fields without those that
    are about this connection. `length` is that of the body in bytes; None: it says so only at its end."""

    credential: str
    verb: str
    target: str
    fields: Fields
    length: int | None
    job: str = ""
    region: str = ""
    only_peek: bool = False

    @property
    def has_body(self) -> bool:
        return self.length != 0


def asked_of(scope: Mapping[str, Any]) -> Asked:
    """What an ASGI request asks for. Raises UnfitError."""
    fields = [_field(*pair) for pair in scope["headers"]]
    names = [name for name, _ in fields]
    path = (scope.get("raw_path") or b"").decode("latin-1")
    query = scope["query_string"].decode("latin-1")
    name, _, rest = path[1:].partition("/")
    _check(rest, query)
    if any(name == "upgrade" and value.strip().lower() != "h2c" for name, value in fields):
        raise UnfitError(501, "The proxy passes on requests and answers only: ask without Upgrade.")
    chunked = "transfer-encoding" in names
    if chunked and "content-length" in names:
        raise UnfitError(400, "The request says twice how long its body is.", more=(("connection", "close"),))
    kept = _kept(fields, _ONLY_HERE)
    only = {name: value for name, value in fields if name.startswith("quota-")}
    if len(only) < sum(name.startswith("quota-") for name in names):
        raise UnfitError(400, "A field of the quota proxy is sent twice.")
    if only.get("quota-peek", "1") != "1":
        raise UnfitError(400, f"Quota-Peek is {show(only['quota-peek'])}: write Quota-Peek: 1, or leave it out.")
    return Asked(
        credential=unquote(name),
        verb=scope["method"],
        target=f"/{rest}" + (f"?{query}" if query else ""),
        fields=kept,
        length=None if chunked else _length(dict(fields).get("content-length", "0")),
        job=only.get("quota-job", ""),
        region=only.get("quota-region", ""),
        only_peek="quota-peek" in only,
    )


def without_hops(fields: Iterable[tuple[str, str]]) -> Fields:
    """The header fields of an answer that its caller gets: without those that are about the connection to upstream, and
    those that only this proxy sends."""
    return _kept([(name.lower(), value) for name, value in fields], _HOP_BY_HOP)


def narrowed(fields: Fields, *, reads_good_answers: bool) -> Fields:
    """The fields with an Accept-Encoding in which an answer can be read: errors may come as gzip."""
    takes_gzip = any(name == "accept-encoding" and re.search(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))", value, re.I)
                     for name, value in fields)  # fmt: skip
    coding = "gzip" if takes_gzip and not reads_good_answers else "identity"
    return [(name, coding if name == "accept-encoding" else value) for name, value in fields]


def _field(name: bytes, value: bytes) -> tuple[str, str]:
    try:
        return name.decode("ascii").lower(), value.decode()
    except UnicodeDecodeError:
        raise UnfitError(400, "A header field of the request is not UTF-8.") from None


def _kept(fields: Fields, dropped: frozenset[str]) -> Fields:
    named = {token.strip().lower() for name, value in fields if name == "connection" for token in value.split(",")}
    return [
        (name, value)
        for name, value in fields
        if name not in dropped and name not in named and not name.startswith(("quota-", "x-forwarded-"))
    ]


def _check(path: str, query: str) -> None:
    if "#" in path or "#" in query:
        raise UnfitError(400, "The address has a #, and what is behind it does not leave.")
    read = unquote(path, "latin-1")
    if "//" in path or "\\" in path or path.startswith("/") or re.search(r"(^|[/\\])\.\.?($|[/\\;])", read):
        raise UnfitError(400, "The path has //, \\, . or .. in it: upstream may read it as another one.")
    if not read.isascii():
        read = re.sub(r"[\x80-\xff]", "", read)
    if not read.isprintable():
        raise UnfitError(400, "The path has a control character in it.")


def _length(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text, re.ASCII):
        raise UnfitError(400, "The Content-Length is no number.", more=(("connection", "close"),))
    return int(text)


# -- its caller --------------------------------------------------------------------------------------------------------


class CallerGoneError(Exception):
    """The caller went away before it had sent its whole body. Nothing may look as if that were whole."""


class CallerSide:
    """One reader at a time: `beginning`, then `pieces`, then what watches."""

    def __init__(self, receive: Callable[[], Awaitable[Any]], length: int | None) -> None:
        self.gone = False
        self._receive = receive
        self._length = length
        self._head = b""
        self._more = True
        self._read = asyncio.Event()
        if length == 0:
            self._read.set()

    @property
    def is_read(self) -> bool:
        """Whether the whole body was read."""
        return self._read.is_set() and not self.gone

    async def beginning(self) -> RequestBody:
        """The body, where it is short enough to be held; else its length. Raises CallerGoneError."""
        while self._more and len(self._head) <= MAX_HELD_BYTES:
            self._head += await self._next()
        return RequestBody.of(None, self._length) if self._more else RequestBody.of(self._head)

    async def pieces(self, leaves: Callable[[], object]) -> AsyncIterator[bytes]:
        """The body, piece by piece. `leaves` is called before the first piece leaves, and with it the request. Raises
        CallerGoneError."""
        piece, self._head = self._head, b""
        while piece or self._more:
            if piece:
                leaves()
                yield piece
            piece = await self._next() if self._more else b""
        leaves()
        self._read.set()

    @contextmanager
    def watched(self, task: asyncio.Task[Any]) -> Iterator[None]:
        """Until the block ends, the task is cancelled if the caller goes away while it is slow."""
        watching: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        timer = loop.call_later(WATCH_AFTER_S, lambda: watching.append(loop.create_task(self._watch(task))))
        try:
            yield
        finally:
            timer.cancel()
            for watch in watching:
                watch.cancel()

    async def _watch(self, task: asyncio.Task[Any]) -> None:
        await self._read.wait()
        while not self.gone:
            self.gone = (await self._receive())["type"] == "http.disconnect"
        task.cancel()

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.gone = True
            self._read.set()
            raise CallerGoneError
        self._more = message.get("more_body", False)
        piece: bytes = message["body"]
        return piece
