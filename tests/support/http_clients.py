"""HTTP clients under one name: with a budget each is metered by its own transport, without one it is plain.

    client = Requests(budget, "videos.list", hosts=[host])     # or Httpx, AsyncHttpx, Aiohttp
    status, body = client.ask(url)

`stream` reads an answer piece by piece until `stop` is true of a piece. It asks about b"" before the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import closing
from typing import Any

import aiohttp
import httpx
import httpx2
import requests

from quota.async_budget import AsyncBudget, Awaiter
from quota.budget import Budget
from quota.clients.aiohttp import aiohttp_middleware
from quota.clients.httpx import httpx_async_transport, httpx_transport
from quota.clients.requests import requests_adapter

Reply = tuple[int, bytes]
Stop = Callable[[bytes], object]

BROKEN = (requests.RequestException, httpx.HTTPError, httpx2.HTTPError, aiohttp.ClientError)
"""What the clients raise where the network or an answer fails."""

WAIT_S = 100.0


def awaited(budget: Budget) -> AsyncBudget:
    return AsyncBudget(budget, Awaiter(budget.ledger))


def never(piece: bytes) -> bool:
    return False


def verb_for(json: Any) -> str:
    return "GET" if json is None else "POST"


def until(stop: Stop, pieces: Iterable[bytes]) -> bytes:
    got = b""
    for piece in pieces:
        got += piece
        if stop(piece):
            break
    return got


class Requests:
    WAYS = ("content", "read1")
    way = "content"

    def __init__(self, budget: Budget | None = None, *given: Any, **options: Any) -> None:
        self.session = requests.Session()
        self.session.trust_env = False
        if budget is not None:
            for scheme in ("http://", "https://"):
                self.session.mount(scheme, requests_adapter(budget, *given, **options))

    def ask(self, url: str, verb: str = "GET", body: Any = None, wait_s: float = WAIT_S, **sent: Any) -> Reply:
        response = self.session.request(verb, url, data=body, timeout=wait_s, **sent)
        return response.status_code, response.content

    def stream(self, url: str, stop: Stop = never, json: Any = None, wait_s: float = WAIT_S) -> bytes:
        with self.session.request(verb_for(json), url, json=json, timeout=wait_s, stream=True) as response:
            pieces = iter(response.raw.read1, b"") if self.way == "read1" else response.iter_content(None)
            return b"" if stop(b"") else until(stop, pieces)

    def raw(self, url: str) -> bytes:
        """The body of an answer as it travels."""
        with self.session.get(url, timeout=WAIT_S, stream=True) as response:
            return bytes(response.raw.read(decode_content=False))

    def close(self) -> None:
        self.session.close()


class Httpx:
    library: Any = httpx

    def __init__(self, budget: Budget | None = None, *given: Any, **options: Any) -> None:
        options["library"] = self.library.__name__
        transport = None if budget is None else httpx_transport(budget, *given, **options)
        self.client = self.library.Client(transport=transport, follow_redirects=True, trust_env=False)

    def ask(self, url: str, verb: str = "GET", body: Any = None, wait_s: float = WAIT_S, **sent: Any) -> Reply:
        response = self.client.request(verb, url, content=body, timeout=wait_s, **sent)
        return response.status_code, response.content

    def stream(self, url: str, stop: Stop = never, json: Any = None, wait_s: float = WAIT_S) -> bytes:
        with self.client.stream(verb_for(json), url, json=json, timeout=wait_s) as response:
            return b"" if stop(b"") else until(stop, response.iter_bytes())

    def raw(self, url: str) -> bytes:
        with self.client.stream("GET", url, timeout=WAIT_S) as response:
            return b"".join(response.iter_raw())

    def close(self) -> None:
        self.client.close()


class AsyncHttpx:
    """One event loop for all calls, on the calling thread."""

    library: Any = httpx

    def __init__(self, budget: Budget | None = None, *given: Any, **options: Any) -> None:
        self.runner = asyncio.Runner()
        options["library"] = self.library.__name__
        transport = None if budget is None else httpx_async_transport(awaited(budget), *given, **options)
        self.client = self.library.AsyncClient(transport=transport, follow_redirects=True, trust_env=False)

    def ask(self, url: str, verb: str = "GET", body: Any = None, wait_s: float = WAIT_S, **sent: Any) -> Reply:
        response = self.runner.run(self.client.request(verb, url, content=body, timeout=wait_s, **sent))
        return response.status_code, response.content

    def stream(self, url: str, stop: Stop = never, json: Any = None, wait_s: float = WAIT_S) -> bytes:
        async def read() -> bytes:
            async with self.client.stream(verb_for(json), url, json=json, timeout=wait_s) as response:
                return b"" if stop(b"") else await read_until(stop, response.aiter_bytes())

        return self.runner.run(read())

    def raw(self, url: str) -> bytes:
        async def read() -> bytes:
            async with self.client.stream("GET", url, timeout=WAIT_S) as response:
                return b"".join([piece async for piece in response.aiter_raw()])

        return self.runner.run(read())

    def close(self) -> None:
        self.runner.run(self.client.aclose())
        self.runner.close()


class Httpx2(Httpx):
    library = httpx2


class AsyncHttpx2(AsyncHttpx):
    library = httpx2


class Aiohttp:
    """The same with aiohttp. `way` is how it reads a stream."""

    WAYS = ("any", "lines", "chunked", "chunks", "readline")

    def __init__(self, budget: Budget | None = None, *given: Any, **options: Any) -> None:
        self.runner = asyncio.Runner()
        self.way = "any"
        metered = [] if budget is None else [aiohttp_middleware(awaited(budget), *given, **options)]
        self.session = self.runner.run(self._open(metered))

    async def _open(self, metered: list[Any]) -> aiohttp.ClientSession:
        jar = aiohttp.CookieJar(unsafe=True)  # from a host without a name, too
        return aiohttp.ClientSession(middlewares=metered, cookie_jar=jar)

    def ask(self, url: str, verb: str = "GET", body: Any = None, wait_s: float = WAIT_S, **sent: Any) -> Reply:
        async def read() -> Reply:
            waits = aiohttp.ClientTimeout(wait_s)
            async with self.session.request(verb, url, data=body, timeout=waits, **sent) as response:
                return response.status, await response.read()

        return self.runner.run(read())

    def stream(self, url: str, stop: Stop = never, json: Any = None, wait_s: float = WAIT_S) -> bytes:
        async def read() -> bytes:
            waits = aiohttp.ClientTimeout(wait_s)
            async with self.session.request(verb_for(json), url, json=json, timeout=waits) as response:
                return b"" if stop(b"") else await read_until(stop, self._pieces(response.content))

        return self.runner.run(read())

    async def _pieces(self, content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
        if self.way == "readline":
            while piece := await content.readline():
                yield piece
        elif self.way == "chunks":
            async for piece, _ in content.iter_chunks():
                yield piece
        else:
            ways = {"any": content.iter_any(), "lines": content, "chunked": content.iter_chunked(5)}
            async for piece in ways[self.way]:
                yield piece

    def raw(self, url: str) -> bytes:
        async def read() -> bytes:
            async with self.session.get(url, auto_decompress=False) as response:
                return await response.read()

        return self.runner.run(read())

    def close(self) -> None:
        self.runner.run(self.session.close())
        self.runner.close()


CLIENTS: list[Any] = [Requests, Httpx, AsyncHttpx, Httpx2, AsyncHttpx2, Aiohttp]


async def read_until(stop: Stop, pieces: AsyncIterator[bytes]) -> bytes:
    got = b""
    async for piece in pieces:
        got += piece
        if stop(piece):
            break
    return got


def asked_once(kind: Any, url: str, *given: Any, **asked: Any) -> Reply:
    """The answer to one request of a client of this kind, which is made and closed for it."""
    with closing(kind(*given)) as client:
        reply: Reply = client.ask(url, **asked)
        return reply
