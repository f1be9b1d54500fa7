"""Reads a request to the proxy, and its caller's side.

    asked_of      the request in an ASGI scope; raises UnfitError for a request that the proxy does not pass on
    Asked         its credential, what leaves, and who spends
    UnfitError    the answer to a request that the proxy does not pass on
    check_target  the check of its path; `quota book try` asks it too
    CallerSide    the body as it comes, and whether the caller is still connected

The path that leaves is appended to the root of the API, so it cannot name another host. The proxy does not pass on
paths with `..`, `//` or `\\`. A path with several readings (`%2F`, `;x`) costs the dearest of them.
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
from quota.terms.api import MAX_PARSED_BYTES, RequestBody, as_read
from quota.web.documents import in_place_of

Fields = list[tuple[str, str]]

WATCH_AFTER_S = 0.1
"""Only a request that takes longer watches for a caller that goes away."""

_HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
     "transfer-encoding", "upgrade")
)  # fmt: skip
"""Header fields about one connection (RFC 9110, 7.6.1). `Connection` may name more."""

_END = (("connection", "close"),)
"""Where the body of a request ends is unclear: the connection takes no other."""

_ONLY_HERE = _HOP_BY_HOP | {"host", "expect", "forwarded", "via", "x-real-ip"}


class UnfitError(QuotaError):
    """A request that the proxy does not pass on, with the answer to its sender."""

    def __init__(self, status: int, detail: str, **more: Any) -> None:
        super().__init__(detail)
        self.problem = in_place_of(status, detail, **more)


class Asked(NamedTuple):
    """One request. `target` is the path with the query as it leaves, and `fields` are the header fields that leave.
    `length` is the length of the body in bytes; None if only its end tells."""

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
    """The request in an ASGI scope. Raises UnfitError."""
    try:
        fields = [(name.decode("ascii").lower(), value.decode()) for name, value in scope["headers"]]
    except UnicodeDecodeError:
        raise UnfitError(400, "A header field of the request is not UTF-8.") from None
    names = [name for name, _ in fields]
    path = (scope.get("raw_path") or b"").decode("latin-1")
    query = scope["query_string"].decode("latin-1")
    name, _, rest = path[1:].partition("/")
    check_target(rest, query)
    if any(name == "upgrade" and value.strip().lower() != "h2c" for name, value in fields):
        raise UnfitError(501, "The proxy passes on plain requests only: ask without Upgrade.")
    chunked = "transfer-encoding" in names
    if chunked and "content-length" in names:
        raise UnfitError(400, "The request has both Content-Length and Transfer-Encoding: send one of them.", more=_END)
    kept = without_hops(fields, _ONLY_HERE)
    only = {name: value for name, value in fields if name.startswith("quota-")}
    if len(only) < sum(name.startswith("quota-") for name in names):
        raise UnfitError(400, "A Quota- header field is there twice: send it once.")
    if only.get("quota-peek", "1") != "1":
        raise UnfitError(400, f"Quota-Peek is {show(only['quota-peek'])}: write Quota-Peek: 1, or leave it out.")
    length = dict(fields).get("content-length", "0")
    if not chunked and not re.fullmatch(r"[0-9]{1,18}", length, re.ASCII):
        raise UnfitError(400, "The Content-Length is not a number.", more=_END)
    return Asked(
        credential=unquote(name),
        verb=scope["method"],
        target=f"/{rest}" + (f"?{query}" if query else ""),
        fields=kept,
        length=None if chunked else int(length),
        job=only.get("quota-job", ""),
        region=only.get("quota-region", ""),
        only_peek="quota-peek" in only,
    )


def without_hops(fields: Iterable[tuple[str, str]], dropped: frozenset[str] = _HOP_BY_HOP) -> Fields:
    """The header fields that pass on, in small letters, without fields about one connection and without Quota- fields,
    which are between this proxy and its caller."""
    lowered = [(name.lower(), value) for name, value in fields]
    tokens = [token for name, value in lowered if name == "connection" for token in value.split(",")]
    dropped |= {as_read(token.strip()) for token in tokens}
    return [
        (name, value)
        for name, value in lowered
        if as_read(name) not in dropped and not as_read(name).startswith(("quota-", "x-forwarded-"))
    ]


def check_target(path: str, query: str) -> None:
    """Raises UnfitError for an address that upstream may read in another way."""
    if "#" in path or "#" in query:
        raise UnfitError(400, "The address has a #, and no server gets what follows it: leave it out, or write %23.")
    read = unquote(path, "latin-1")
    if "//" in path or "\\" in path or path.startswith("/") or re.search(r"(^|[/\\])\.\.?($|[/\\;])", read):
        raise UnfitError(400, "The path has //, \\, . or .. in it: upstream may read it as another path.")
    if not re.sub(r"[\x80-\xff]", "", read).isprintable():
        raise UnfitError(400, "The path has a control character in it.")


# -- its caller --------------------------------------------------------------------------------------------------------


class CallerGoneError(Exception):
    """The caller went away before the end of its body. Upstream must not take the body for complete."""


class CallerSide:
    """The caller's messages. They have one reader at a time: `beginning`, then `pieces`, then `watched`. `head` is what
    `beginning` has read."""

    def __init__(self, receive: Callable[[], Awaitable[Any]], length: int | None) -> None:
        self.gone = False
        self._receive = receive
        self._length = length
        self.head = bytearray()
        self._more = True
        self._read = asyncio.Event()
        if length == 0:
            self._read.set()

    @property
    def is_read(self) -> bool:
        """Whether `pieces` has read the whole body."""
        return self._read.is_set() and not self.gone

    async def beginning(self) -> RequestBody:
        """The body if it has at most MAX_PARSED_BYTES, else its length, or what was read if only its end tells. Raises
        CallerGoneError."""
        while self._more and len(self.head) <= MAX_PARSED_BYTES:
            self.head += await self._next()
        return RequestBody(None, self._length or len(self.head)) if self._more else RequestBody.of(self.head)

    async def pieces(self, leaves: Callable[[], object]) -> AsyncIterator[bytes]:
        """The body, piece by piece. It calls `leaves` before each piece; the request leaves with the first. Raises
        CallerGoneError."""
        piece, self.head = bytes(self.head), bytearray()
        while piece or self._more:
            if piece:
                leaves()
                yield piece
            piece = await self._next() if self._more else b""
        leaves()
        self._read.set()

    @contextmanager
    def watched(self, task: asyncio.Task[Any]) -> Iterator[None]:
        """Inside the block, cancel the task if the caller goes away while the request is slow."""
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
