"""The seam for requests and httpx, against real servers: what the ledger holds is what arrived."""

from __future__ import annotations

import asyncio
import gc
import gzip
import io
import json
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pkgutil import resolve_name
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpcore
import httpx
import httpx2
import pytest
import redis
import requests
import urllib3

from quota.budget import Budget
from quota.clients import aiohttp as of_aiohttp
from quota.clients import gate
from quota.clients import httpx as of_httpx
from quota.clients.aiohttp import aiohttp_middleware
from quota.clients.httpx import httpx_async_transport, httpx_transport
from quota.clients.requests import requests_adapter
from quota.clients.upstream_errors import MAX_BODY_BYTES
from quota.errors import Refused, UsageError
from quota.ledger.factory import open_ledger
from quota.ledger.log import Log
from quota.settings.books import load_book
from support.http_clients import BROKEN, Aiohttp, AsyncHttpx, Httpx, Requests
from support.plain_http import Answer, Arrived, PlainServer, Reached, Upstream, head
from support.servers import RedisServer, until
from support.setup import budget_of, charges_at, limit, state_at

OUT = {"help": "x" * 70_000, "error": {"message": "Out of quota.", "errors": [{"reason": "quotaExceeded"}]}}
SPENT = json.dumps(OUT).encode()


def answer(request: Arrived) -> Answer:
    """A server of many moods, by path."""
    zipped = gzip.compress(SPENT)
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(zipped), zipped)
    match urlsplit(request.target).path:
        case "/spent":
            return Answer(403, SPENT)
        case "/spent-zipped":
            return Answer(403, zipped, {"Content-Encoding": "gzip"})
        case "/spent-chunked":
            return Answer(403, chunked, {"Content-Encoding": "gzip", "Transfer-Encoding": "chunked"})
        case "/long":
            return Answer(500, b"x" * (3 * MAX_BODY_BYTES))
        case "/cut":
            return Answer(403, SPENT[:-5], {"Content-Length": str(len(SPENT))}, hang_up=True)
        case "/stalls":
            return Answer(403, SPENT[:-5], {"Content-Length": str(len(SPENT))}, hang_up=True, stall_s=4)
        case "/not-zipped":
            return Answer(403, SPENT, {"Content-Encoding": "gzip"})
        case "/cookie":
            return Answer(429, b"{}", {"Set-Cookie": "a=b"})
        case "/moved":
            return Answer(302, b"", {"Location": "/ok"})
        case "/silent":
            return Answer(wait_s=4)
    return Answer(200, b'{"items": []}')


@pytest.fixture
def server() -> Iterator[PlainServer]:
    with PlainServer(answer) as server:
        yield server


def make_budget(ledger: Log, units: int = 1_000) -> Budget:
    return budget_of(ledger, limit(units), book=load_book("youtube-v3"))


def charged(ledger: Log) -> dict[str, int]:
    return dict(Counter(entry.method for entry in charges_at(ledger) if entry.units))


def name_of(verb: str, url: str) -> str:
    return "search.list" if "search" in url else "videos.list" if verb == "GET" else "playlists.insert"


Connect = Callable[..., Any]


@pytest.fixture
def connect(kind: Any, ledger: Log) -> Iterator[Connect]:
    """Makes clients of one kind over the test's ledger, and closes them."""
    made: list[Any] = []

    def connect(server: PlainServer | str, *, units: int = 1_000, method: Any = "videos.list") -> Any:
        host = server if isinstance(server, str) else server.host
        made.append(kind(make_budget(ledger, units), method, hosts=[host]))
        return made[-1]

    yield connect
    for client in made:
        client.close()


def test_every_attempt_is_charged_under_the_name_it_is_given(
    connect: Connect, server: PlainServer, ledger: Log
) -> None:
    client = connect(server, method=name_of)
    client.ask(f"{server.address}/videos")
    client.ask(f"{server.address}/search")
    client.ask(f"{server.address}/playlists", "POST")
    assert charged(ledger) == {"videos.list": 1, "search.list": 1, "playlists.insert": 1}
    assert len(server.arrived) == 3


def test_a_request_that_gets_no_name_does_not_leave(connect: Connect, server: PlainServer, ledger: Log) -> None:
    """It would be free."""
    with pytest.raises(UsageError, match="method None"):
        connect(server, method=lambda verb, url: None).ask(f"{server.address}/ok")
    assert not server.arrived
    assert not charges_at(ledger)


def test_other_hosts_are_free(connect: Connect, server: PlainServer, ledger: Log) -> None:
    client = connect("api.example.com")
    assert client.ask(f"{server.address}/spent")[0] == 403
    assert not charges_at(ledger)
    assert not state_at(ledger).facts().exhaustions


def test_a_cancelled_request_stays_charged_if_a_transport_below_sends_its_own(server: PlainServer, ledger: Log) -> None:
    """As transports around httpx's do. The request of its own has none of the extensions that show what leaves."""

    class Inner(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            return await super().handle_async_request(httpx.Request(request.method, request.url))

    async def main() -> None:
        transport = httpx_async_transport(make_budget(ledger), "videos.list", hosts=[server.host], inner=Inner())
        async with httpx.AsyncClient(transport=transport) as client:
            asked = asyncio.ensure_future(client.get(f"{server.address}/silent"))
            while not server.arrived:
                await asyncio.sleep(0.01)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked

    asyncio.run(main())
    assert charged(ledger) == {"videos.list": 1}


def test_a_request_stays_charged_if_a_transport_below_sends_it_again_in_vain(server: PlainServer, ledger: Log) -> None:
    class Inner(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            super().handle_request(request).close()
            raise httpx.ConnectError("no connection for the second attempt")

    client = Httpx(make_budget(ledger), "videos.list", hosts=[server.host], inner=Inner())
    with closing(client), pytest.raises(httpx.ConnectError):
        client.ask(f"{server.address}/ok")
    assert (charged(ledger), len(server.arrived)) == ({"videos.list": 1}, 1)


def test_a_request_without_a_tls_handshake_is_free(connect: Connect, server: PlainServer, ledger: Log) -> None:
    with pytest.raises((*BROKEN, OSError)):
        connect(server).ask(server.address.replace("http:", "https:"))
    assert charged(ledger) == {}
    assert charges_at(ledger)


@pytest.mark.parametrize("answers", [[head(status="407 No"), b"\r\n", b""], [b"no HTTP\r\n\r\n", b""], None])
def test_a_request_that_a_proxy_rejects_is_free(ledger: Log, kind: Any, answers: list[bytes] | None) -> None:
    with Upstream(lambda _: answers or []) as server:
        proxy = server.address if answers else "http://127.0.0.1:9"
        inner = {}
        if issubclass(kind, (Httpx, AsyncHttpx)):
            name = "HTTPTransport" if issubclass(kind, Httpx) else "AsyncHTTPTransport"
            inner = {"inner": getattr(kind.library, name)(proxy=proxy)}
        client = kind(make_budget(ledger), "videos.list", hosts="api.example.com", **inner)
        if kind is Requests:
            client.session.proxies = {"https": proxy}
        elif kind is Aiohttp:
            client.session._default_proxy = proxy
        with closing(client), pytest.raises(BROKEN):
            client.ask("https://api.example.com/")
        assert bool(server.reached) == bool(answers)
    assert charged(ledger) == {}


def test_a_request_that_a_proxy_leaves_unanswered_stays_charged(ledger: Log) -> None:
    """urllib3 calls this a proxy's error, like a proxy that cannot be reached."""
    with Upstream(lambda _: [b""]) as proxy:
        session = Requests(make_budget(ledger), "videos.list", hosts="api.example.com").session
        with pytest.raises(requests.ConnectionError):
            session.get("http://api.example.com/", proxies={"http": proxy.address})
        assert [reached.target for reached in proxy.reached] == ["http://api.example.com/"]
    assert charged(ledger) == {"videos.list": 1}


def test_an_error_can_be_read_in_each_way_that_urllib3_has(server: PlainServer, ledger: Log) -> None:
    session = Requests(make_budget(ledger), "videos.list", hosts=[server.host]).session
    for way in (
        lambda raw: b"".join([*iter(lambda: raw.read1(1_000), b"")]),
        lambda raw: b"".join(raw),
        lambda raw: raw.readline(),
    ):
        with session.get(f"{server.address}/spent", stream=True).raw as raw:
            assert way(raw) == SPENT
            assert (raw.geturl(), raw.version_string, raw.retries is None) == ("/spent", "HTTP/1.1", False)
        state_at(ledger).reopen("units", "a test")
    with session.get(f"{server.address}/spent-chunked", stream=True).raw as raw:
        raw.decode_content = True  # as if urllib3 itself were asked, which unpacks no chunks unless the reader says so
        assert gzip.decompress(b"".join(raw.read_chunked())) == SPENT


def test_a_timeout_stays_charged(connect: Connect, server: PlainServer, ledger: Log) -> None:
    with pytest.raises((requests.ReadTimeout, httpx.ReadTimeout, httpx2.ReadTimeout, TimeoutError)):
        connect(server).ask(f"{server.address}/silent", wait_s=1)
    assert charged(ledger) == {"videos.list": 1}


@pytest.mark.parametrize("path", ["/spent", "/spent-zipped", "/spent-chunked"])
def test_an_error_is_understood_and_still_there_to_read(
    connect: Connect, server: PlainServer, ledger: Log, path: str
) -> None:
    """However the client reads it: at once, decoded piece by piece, or as it came."""
    client, url = connect(server), server.address + path
    for read in (lambda: client.ask(url)[1], lambda: client.stream(url)):
        assert read() == SPENT
        assert [closed.bucket for closed in state_at(ledger).facts().exhaustions] == ["units"]
        state_at(ledger).reopen("units", "a test")
    raw = client.raw(url)
    assert (raw if path == "/spent" else gzip.decompress(raw)) == SPENT


def test_a_long_error_is_only_looked_into(connect: Connect, server: PlainServer) -> None:
    client, url = connect(server), f"{server.address}/long"
    assert client.stream(url) == client.ask(url)[1] == b"x" * (3 * MAX_BODY_BYTES)


def test_an_error_that_comes_drop_by_drop_is_given_to_its_reader_as_it_comes(
    connect: Connect, ledger: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was waited for to the end, or to 256 kB."""

    def drip(_: Reached) -> Iterator[bytes]:
        yield head("Content-Type: text/event-stream", status="503 Unavailable") + b"\r\n"
        while not begun.wait(0.02):
            yield b"x"
        yield b""

    begun = threading.Event()
    for client in (gate, of_aiohttp, of_httpx):
        monkeypatch.setattr(client, "PEEK_WITHIN_S", 0.1)
    with Upstream(drip) as server:
        assert set(connect(server.host).stream(server.address, lambda piece: begun.set())) == set(b"x")
    assert charged(ledger) == {"videos.list": 1}


@pytest.mark.parametrize(("path", "event"), [("/spent", "bucket_closed"), ("/ok", "attempt_answered")])
def test_an_answer_is_closed_where_a_signal_handler_raises_while_it_is_understood(
    server: PlainServer, ledger: Log, caplog: pytest.LogCaptureFixture, path: str, event: str
) -> None:
    """Also one whose body says nothing."""

    class Interrupts(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith(event):
                raise KeyboardInterrupt

    inner = httpx.HTTPTransport(limits=httpx.Limits(max_connections=1), trust_env=False)
    transport = httpx_transport(make_budget(ledger), name_of, hosts=[server.host], inner=inner)
    handler = Interrupts()
    caplog.set_level(logging.DEBUG, "quota")
    logging.getLogger("quota").addHandler(handler)
    with httpx.Client(transport=transport, timeout=httpx.Timeout(100, pool=1)) as client, PlainServer(answer) as other:
        try:
            with pytest.raises(KeyboardInterrupt):
                client.get(f"{server.address}{path}")
        finally:
            logging.getLogger("quota").removeHandler(handler)
        assert client.get(f"{other.address}/ok").status_code == 200, "its connection is free"


def test_a_middleware_that_is_gone_leaves_no_connection(redis_server: RedisServer) -> None:
    """Also where its loop goes on: with a blocking budget, it has a connection of its own."""

    async def ask(budget: Budget) -> None:
        for _ in range(5):
            middleware = aiohttp_middleware(budget, "videos.list", hosts=[server.host])
            async with aiohttp.ClientSession(middlewares=[middleware]) as session, session.get(server.address):
                pass
            del middleware, session

        def are_closed() -> bool:
            gc.collect()  # again and again: aiohttp itself holds on to a session for some turns of the loop
            return len(server_side.client_list()) < before + 3

        await asyncio.to_thread(until, are_closed, "they are closed")

    with PlainServer(answer) as server, redis.Redis(port=redis_server.port) as server_side:
        ledger = open_ledger(redis_server.url)
        before = len(server_side.client_list())
        asyncio.run(ask(make_budget(ledger)))
        ledger.close()


@pytest.mark.parametrize(
    ("path", "failure"),
    [
        ("/cut", ("ChunkedEncodingError", "RemoteProtocolError", "ClientPayloadError")),
        ("/stalls", ("ConnectionError", "ReadTimeout", "TimeoutError")),
        ("/not-zipped", ("ContentDecodingError", "DecodingError", "ClientPayloadError")),
    ],
)
def test_an_error_that_cannot_be_read_fails_for_the_client_as_it_would_without_us(
    connect: Connect, server: PlainServer, ledger: Log, path: str, failure: tuple[str, ...]
) -> None:
    """It stays charged, and is judged by its status alone."""
    with pytest.raises((*BROKEN, TimeoutError)) as raised:
        connect(server).ask(server.address + path, wait_s=1 if path == "/stalls" else 100)
    assert raised.type.__name__ in failure
    gc.collect()  # a connection that was left open would say so now
    assert charged(ledger) == {"videos.list": 1}
    assert not state_at(ledger).facts().exhaustions


def test_a_connection_is_used_again_after_an_error(connect: Connect, server: PlainServer, ledger: Log) -> None:
    client = connect(server)
    for _ in range(3):
        client.ask(f"{server.address}/cookie")
    assert charged(ledger) == {"videos.list": 3}
    assert [request.headers.get("cookie") for request in server.arrived] == [None, "a=b", "a=b"]


def of_requests() -> requests.Response:
    response = requests.Response()
    response.status_code = 403
    return response


def of_pook() -> urllib3.HTTPResponse:
    return urllib3.HTTPResponse(io.BytesIO(SPENT), status=403, preload_content=False)


def test_an_adapter_that_retries_or_is_too_old_is_refused(ledger: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="max_retries"):
        requests_adapter(make_budget(ledger), "videos.list", hosts="api.example.com", max_retries=3)
    monkeypatch.delattr(requests.adapters.HTTPAdapter, "get_connection_with_tls_context")
    with pytest.raises(UsageError, match=r"is too old to be metered; install 2\.32\.2 or newer"):
        requests_adapter(make_budget(ledger), "videos.list", hosts="api.example.com")


over_a_mock = partial(Httpx, inner=httpx.MockTransport(lambda asked: httpx.get(asked.url, trust_env=False)))


@pytest.mark.parametrize("passes", [True, False])
@pytest.mark.parametrize(
    ("kind", "place", "mocked"),
    [
        (Requests, "requests.adapters.HTTPAdapter.send", of_requests),  # as responses and requests-mock
        (Requests, "urllib3.HTTPConnectionPool.urlopen", of_pook),
        # as respx
        (Httpx, "httpcore.ConnectionPool.handle_request", lambda: httpcore.Response(403, content=SPENT)),
        # as pytest-httpx
        (AsyncHttpx, "httpx.AsyncHTTPTransport.handle_async_request", lambda: httpx.Response(403, content=SPENT)),
        (over_a_mock, "httpx.MockTransport.handle_request", lambda: httpx.Response(403, content=SPENT)),
    ],
)
def test_answers_of_a_mock_are_free_and_requests_that_it_passes_are_charged(
    server: PlainServer, ledger: Log, monkeypatch: pytest.MonkeyPatch, kind: Any, place: str, mocked: Any, passes: bool
) -> None:
    """A mock puts its own function in the place of a library's. What it passes has none of the client's extensions."""
    unmocked = resolve_name(place)

    def answer(*args: Any, **options: Any) -> Any:
        for request in args[1:]:
            request.extensions = {}
        return unmocked(*args, **options) if passes else mocked()

    async def awaited_answer(*args: Any) -> Any:
        args[1].extensions = {}
        return await unmocked(*args) if passes else mocked()

    client = kind(make_budget(ledger), "videos.list", hosts=[server.host])
    monkeypatch.setattr(place, awaited_answer if kind is AsyncHttpx else answer)
    with closing(client):
        assert client.ask(f"{server.address}/ok")[0] == (200 if passes else 403)
    assert charged(ledger) == ({"videos.list": 1} if passes else {})
    assert not state_at(ledger).facts().exhaustions


def test_a_request_is_free_if_a_test_tool_forbids_its_connection(
    server: PlainServer, ledger: Log, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """pytest-socket raises an error of its own, which no client knows."""

    def forbid(*_: Any, **__: Any) -> None:
        raise RuntimeError("a test must not connect")

    client = kind(make_budget(ledger), "videos.list", hosts=[server.host])
    monkeypatch.setattr(socket, "getaddrinfo", forbid)
    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_connect", forbid)
    with closing(client), pytest.raises((RuntimeError, ExceptionGroup)):
        client.ask(f"{server.address}/ok")
    assert charged(ledger) == {}


def test_a_budget_that_is_not_awaited_serves_a_client_of_an_event_loop_until_that_is_closed(
    server: PlainServer, ledger: Log
) -> None:
    transport = httpx_async_transport(make_budget(ledger, 3), "videos.list", hosts=[server.host])

    async def ask() -> list[Any]:
        async with httpx.AsyncClient(transport=transport, trust_env=False) as client:
            gets = [client.get(f"{server.address}/ok") for _ in range(5)]
            return await asyncio.gather(*gets, return_exceptions=True)

    answers = asyncio.run(ask())
    assert Counter(map(type, answers)) == {httpx.Response: 3, Refused: 2}
    assert charged(ledger) == {"videos.list": 3} == {"videos.list": len(server.arrived)}
    assert [str(answer)[:22] for answer in asyncio.run(ask())] == ["this session is closed"] * 5
