"""Libraries that are instrumented: what the ledger holds is what arrived, attempt for attempt, and a program is told of
a refusal in its library's own words."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import gc
import gzip
import http.client
import importlib.util
import io
import json
import os
import pickle
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from http.client import HTTPException
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import aiohttp
import httpcore
import httplib2
import httpx
import httpx2
import pytest
import requests
import tenacity
import urllib3
from dlt.sources.helpers import requests as dlt_requests
from googleapiclient.discovery import build
from googleapiclient.errors import HttpError
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import RequestReceived
from h2.settings import SettingCodes, Settings
from opentelemetry.instrumentation.httpx import HTTPXClientInstrumentor
from opentelemetry.instrumentation.requests import RequestsInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from requests.adapters import HTTPAdapter

import quota
import quota.auto
from quota.clients.aiohttp import aiohttp_middleware
from quota.clients.httpx import httpx_transport
from quota.clients.instrument import patches
from quota.errors import Refused, behind
from support.emulator import Emulator
from support.http_clients import Aiohttp, AsyncHttpx, AsyncHttpx2, Httpx, Httpx2, Reply, Requests, asked_once
from support.interrupts import at_every_place, interrupt
from support.plain_http import Answer, Arrived, Connections, PlainServer, Reached, ResetError, Upstream, answer
from support.proxying import BOOK, CONFIG
from support.servers import free_port
from support.setup import charges_at, ids_of


class H2Server(Connections):
    """Serves inside `with`, on loopback. `arrived` has the path of each request, over all connections. It takes /away
    only as the first request of a connection."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived: list[str] = []

    def serve(self, connection: socket.socket) -> None:
        spoken = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        spoken.local_settings = Settings(False, {SettingCodes.MAX_CONCURRENT_STREAMS: 100})
        spoken.initiate_connection()
        connection.sendall(spoken.data_to_send())
        while data := connection.recv(1 << 16):
            for event in spoken.receive_data(data):
                if isinstance(event, RequestReceived):
                    self.arrived.append(dict(event.headers)[":path"])
                    if event.stream_id > 1 and self.arrived[-1] == "/away":
                        spoken.close_connection(last_stream_id=event.stream_id - 2)
                        break
                    spoken.send_headers(event.stream_id, [(":status", "200"), ("content-length", "2")])
                    spoken.send_data(event.stream_id, b"{}", end_stream=True)
            connection.sendall(spoken.data_to_send())


WHOLE = answer(b'{"items": [1, 2, 3]}')
FATES = {"ok": 6, "moved": 2, "busy": 1, "silent": 2, "head": 1, "body": 1, "reset": 1}
PIECES = {
    "ok": [WHOLE],
    "moved": [answer(b"", "Location: /there", status="302 Found")],
    "busy": [answer(b"{}", status="503 Busy")],
    "silent": [],
    "head": [WHOLE[:20], b""],
    "body": [WHOLE[:-5], b""],
}


def cutting_server(seed: int) -> Upstream:
    chance = random.Random(seed)

    def fated(_: Reached) -> Iterator[bytes]:
        (fate,) = chance.choices([*FATES], [*FATES.values()])
        if fate == "reset":
            raise ResetError
        yield from PIECES[fate]

    return Upstream(fated)


def configure(address: str, units: int = 1_000, more: str = "", book: str = BOOK) -> None:
    """A configuration in this folder."""
    text = CONFIG.format(limit=units, auth=more, ledger="sqlite:///ledger.db", more="", address=address)
    Path("things.toml").write_text(book, encoding="utf-8")
    Path("quota.toml").write_text(text, encoding="utf-8")


def credential(name: str, address: str, book: str) -> str:
    return f'[credentials.{name}]\napi = "{book}"\nendpoint = "{address}"\n'


def configure_google(address: str, more: str = "") -> None:
    Path("key").write_text("a-key")
    Path("quota.toml").write_text(f'{more}{credential("main", address, "youtube-v3")}key = "file:key"\n')


def instrument(address: str, **options: Any) -> None:
    """Configure this process for the API, and instrument it."""
    configure(address, **options)
    quota.instrument()


@pytest.fixture(autouse=True)
def uninstrumented(state_dir: Path) -> Iterator[None]:
    yield
    quota.uninstrument()


AS_429 = 'on_refusal = "429"'


def charged(job: str | None = None) -> list[tuple[str, int]]:
    with quota.open() as session:
        entries = charges_at(session.ledger, "main")
        return [(entry.method, entry.units) for entry in entries if entry.units and job in (None, entry.job)]


# -- the clients under one name ----------------------------------------------------------------------------------------

Fields = dict[str, str] | None
Client = Callable[..., Reply]


def asked(kind: Any, url: str, verb: str = "GET", body: bytes | None = None, headers: Fields = None) -> Reply:
    return asked_once(kind, url, verb=verb, body=body, headers=headers)


by_requests, by_httpx = functools.partial(asked, Requests), functools.partial(asked, Httpx)
by_httpx_awaited, by_aiohttp = functools.partial(asked, AsyncHttpx), functools.partial(asked, Aiohttp)
by_httpx2, by_httpx2_awaited = functools.partial(asked, Httpx2), functools.partial(asked, AsyncHttpx2)


class OwnPool(urllib3.HTTPConnectionPool):
    """botocore has one, too."""


def by_urllib3(url: str, verb: str = "GET", body: bytes | None = None, headers: Fields = None) -> Reply:
    retries = urllib3.Retry(5, respect_retry_after_header=False)
    with urllib3.PoolManager() as pool:
        pool.pool_classes_by_scheme = {"http": OwnPool}
        answer = pool.request(verb, url, body=body, headers=headers, retries=retries)
        return answer.status, answer.data


def by_httplib2(url: str, verb: str = "GET", body: bytes | None = None, headers: Fields = None) -> Reply:
    http = httplib2.Http()
    try:
        answer, content = http.request(url, verb, body, headers)
        return answer.status, content
    finally:
        http.close()


def by_urllib(url: str, verb: str = "GET", body: bytes | None = None, headers: Fields = None) -> Reply:
    request = urllib.request.Request(url, body, headers or {}, method=verb)  # noqa: S310
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


CLIENTS: dict[str, tuple[Client, type[Exception]]] = {
    "requests": (by_requests, requests.RequestException),
    "urllib3": (by_urllib3, urllib3.exceptions.MaxRetryError),
    "httpx": (by_httpx, httpx.HTTPError),
    "httpx awaited": (by_httpx_awaited, httpx.HTTPError),
    "httpx2": (by_httpx2, httpx2.HTTPError),
    "httpx2 awaited": (by_httpx2_awaited, httpx2.HTTPError),
    "aiohttp": (by_aiohttp, aiohttp.ClientError),
    "httplib2": (by_httplib2, httplib2.HttpLib2Error),
    "urllib": (by_urllib, urllib.error.URLError),
}


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> Client:
    return CLIENTS[request.param][0]


BUSY = b'{"error": {"message": "Slow down."}}'
BUSY_ZIPPED, BUSY_DEFLATED = gzip.compress(BUSY), zlib.compress(BUSY, wbits=-15)  # as some servers deflate


def in_chunks(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


def answer(request: Arrived) -> Answer:
    match request.target.partition("?")[0]:
        case "/moved":
            return Answer(302, b"", {"Location": "/search"})
        case "/late":
            return Answer(429, BUSY, wait_s=0.3)
        case "/busy":
            return Answer(429, BUSY)
        case "/busy-zipped":
            return Answer(429, BUSY_ZIPPED, {"Content-Encoding": "gzip"})
        case "/busy-deflated":
            return Answer(429, BUSY_DEFLATED, {"Content-Encoding": "deflate"})
        case "/busy-as-it-is":
            return Answer(429, BUSY, {"Content-Encoding": "identity"})
        case "/busy-cut":
            return Answer(429, in_chunks(BUSY[:9]), {"Transfer-Encoding": "chunked"}, hang_up=True)
        case "/busy-in-chunks":
            return Answer(429, in_chunks(BUSY[:9], BUSY[9:], b""), {"Transfer-Encoding": "chunked"})
        case "/chat" if b"chunks" in request.body:
            return Answer(200, in_chunks(b'{"usage": 7}\n'), {"Transfer-Encoding": "chunked"}, hang_up=True)
        case "/chat" if b"part" in request.body:
            return Answer(206, b'{"usage": 0, "free": true}')
        case "/chat" if b"short" in request.body:
            length = "900, 900" if b"listed" in request.body else "900"
            name = "content-length" if b"twice" in request.body else "Content-Length"  # beside the server's own
            return Answer(200, b'{"usage": 0, "free": true}', {name: length}, hang_up=True)
        case "/chat" if b"lines" in request.body:
            fields = {"Transfer-Encoding": "identity", "Content-Type": "application/jsonl"}
            return Answer(200, b'{"usage": 7}\n', fields, hang_up=True)
        case "/chat" if b"zipped" in request.body:
            return Answer(200, gzip.compress(b'{"usage": 7}'), {"Content-Encoding": "gzip"})
        case "/chat":
            return Answer(200, json.dumps({"said": "x" * 500, "usage": 7}).encode())
        case "/stalls":
            return Answer(429, in_chunks(b'{"error"'), {"Transfer-Encoding": "chunked"}, hang_up=True, stall_s=4)
        case "/nowhere":
            return Answer(404, b'{"error": {"message": "Not here."}}')
    return Answer(200, b'{"items": []}')


@pytest.fixture
def server() -> Iterator[PlainServer]:
    with PlainServer(answer) as server:
        yield server


# -- an attempt --------------------------------------------------------------------------------------------------------


def test_each_attempt_is_named_by_its_route_and_charged_once(client: Client, server: PlainServer) -> None:
    configure(server.address)
    quota.instrument(job="nightly")
    assert client(f"{server.address}/a") == (200, b'{"items": []}')
    assert client(f"{server.address}/moved")[0] == 200
    assert charged("nightly") == [("read", 1), ("read", 1), ("search", 10)]


def test_a_second_call_names_the_arguments_that_it_ignores(server: PlainServer, caplog: Any) -> None:
    instrument(server.address)
    quota.instrument("quota.toml", job="")
    assert "instrument_ignored" not in caplog.text
    quota.instrument("other.toml", job="nightly")
    assert "instrument_ignored: config, job: " in caplog.text


@pytest.mark.parametrize("base", ["/gate", "/x/../Gate", "/ga%74e/"])
def test_the_routes_begin_below_the_path_of_the_endpoint(client: Client, base: str, server: PlainServer) -> None:
    instrument(f"{server.address}{base}")
    for path in ("/status", "/search/x", "//search", "/a"):
        assert client(f"{server.address}/gate{path}")[0] == 200
    assert charged() == [("search", 10), ("search", 10), ("read", 1)]


@pytest.mark.parametrize(("library", "target"), [(httpx, b"/search/b"), (httpx2, "/search/b")])
def test_the_target_of_a_request_names_its_method(library: Any, target: str | bytes, server: PlainServer) -> None:
    instrument(server.address)
    with library.Client(trust_env=False) as client:
        client.get(f"{server.address}/a", extensions={"target": target})
    assert (charged(), server.arrived[0].target) == ([("search", 10)], "/search/b")


@pytest.mark.parametrize(
    ("target", "method"), [("search/b", "search"), ("search?from=http://a", "search"), ("*", "read"), ("a@b", "read")]
)
def test_a_target_without_a_slash_is_a_path(target: str, method: str, server: PlainServer) -> None:
    instrument(server.address)
    with closing(http.client.HTTPConnection(server.host)) as conn:
        conn.request("GET", target)
        assert conn.getresponse().status == 200
    assert [name for name, _ in charged()] == [method]


def test_a_post_that_may_stand_for_a_get_costs_the_dearer_and_at_google_the_get(
    client: Client, server: PlainServer
) -> None:
    override = {"X-HTTP-Method-Override": "GET"}
    instrument(server.address)
    assert client(f"{server.address}/search", "POST", b"q=x", {"X-HTTP-Method-Override": "PUT, GET"})[0] == 200
    for target, body in ("/search?%5Fmethod=get", b"q=x"), ("/search", b'{"_method": "GET"}'):
        assert client(f"{server.address}{target}", "POST", body)[0] == 200
    assert client(f"{server.address}/status", "POST", b"q=x", {"x-http-method": "get"})[0] == 200
    assert charged() == [*[("search", 10)] * 3, ("write", 5)]
    quota.uninstrument()
    configure_google(f"{server.address}/gate", '[ledger]\nurl = "sqlite:///other.db"\n')
    quota.instrument()
    assert client(f"{server.address}/gate/youtube/v3/search", "POST", b"q=x", override)[0] == 200
    assert charged() == [("search.list", 100)]


def test_a_request_that_names_two_methods_or_another_path_does_not_leave(server: PlainServer) -> None:
    configure_google(server.address)
    quota.instrument()
    for name, why in (("X-HTTP-Method-Override", "does not name one method"), ("X-Original-URL", "leave it out")):
        with closing(http.client.HTTPConnection(server.address.partition("//")[2])) as conn:
            conn.putrequest("POST", "/youtube/v3/search")
            for value in ("GET", "POST"):
                conn.putheader(name, value)
            with pytest.raises(OSError, match=why):
                conn.endheaders()
    assert charged() == server.arrived == []


def test_a_request_through_a_proxy_is_charged_by_its_target_host(server: PlainServer) -> None:
    configure(server.address)
    text = Path("quota.toml").read_text(encoding="utf-8")
    Path("quota.toml").write_text(text.replace(f'endpoint = "{server.address}"\n', ""), encoding="utf-8")
    quota.instrument()
    url = "http://api.things.example/search"
    with urllib3.ProxyManager(server.address) as pool:
        assert pool.request("GET", url).status == 200
        assert pool.request("GET", "http://other.example/search").status == 200
    assert requests.get(url, proxies={"http": server.address}, timeout=100).status_code == 200
    assert httpx.get(url, proxy=server.address).status_code == 200
    assert len(server.arrived) == 4
    assert charged() == [("search", 10)] * 3


def test_other_hosts_are_untouched(client: Client, server: PlainServer) -> None:
    instrument("http://127.0.0.1:1")
    assert client(f"{server.address}/a")[0] == 200
    assert charged() == []


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize("why", ["refused search", "search costs 10 units and limit"])
def test_a_refusal_is_the_librarys_own_error_and_nothing_leaves(name: str, why: str, server: PlainServer) -> None:
    """Also, whatever `on_refusal` says, for a call that no limit can ever hold."""
    client, error = CLIENTS[name]
    units, more, cause = (10, "", Refused) if why == "refused search" else (5, AS_429, quota.CostExceedsLimit)
    instrument(server.address, units=units, more=more)
    with pytest.raises(error, match=f"^(<urlopen error )?{why}") as refused:
        client(f"{server.address}/moved?key=a-secret")
    assert type(refused.value) is error, "code retries narrower classes, as OpenAI's client does RequestError"
    assert isinstance(getattr(refused.value, "reason", refused.value).__cause__ or refused.value.__cause__, cause)
    assert "a-secret" not in repr(refused.value)
    assert [request.target for request in server.arrived] == ["/moved?key=a-secret"]


@pytest.mark.parametrize("before", [True, False])
def test_httpx2_in_the_place_of_httpx_is_charged_once(server: PlainServer, before: bool) -> None:
    configure(server.address)
    lines = [
        "import quota; quota.instrument()",
        "import httpx2; httpx2.alias_httpx()",
        "import httpx, httpx._transports.default",
    ]
    code = "\n".join(
        [*(lines if before else (*lines[1:], lines[0])), f"httpx.get('{server.address}', trust_env=False)"]
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, charged()) == (0, [("read", 1)]), done.stderr


def test_a_refusal_may_be_an_answer_of_429(client: Client, server: PlainServer) -> None:
    instrument(server.address, units=10, more=AS_429)
    status, body = client(f"{server.address}/moved")
    assert (status, [request.target for request in server.arrived]) == (429, ["/moved"])
    detail, error = (json.loads(body)[name] for name in ("detail", "error"))
    assert detail.startswith("refused search (10 units) on main: limit 'hour' has 1 of 10 units used")
    assert error == {"message": detail, "type": "quota-ledger", "code": 0}, "gspread tries a 429 again, for ever"


def test_a_made_answer_is_read_like_any_other_and_says_why_and_when_to_come_back(server: PlainServer) -> None:
    instrument(server.address, units=1, more=AS_429)
    with httpx.Client(trust_env=False) as client:
        assert client.get(server.address).status_code == 200
        refused = client.get(server.address)
        assert refused.elapsed.total_seconds() >= 0
        assert 3_590 < int(refused.headers["Retry-After"]) <= 3_600, "never early"
        assert refused.headers["x-should-retry"] == "false", "as SDKs ask for it"
        assert client.head(server.address).content == b""
        with client.stream("GET", server.address) as response:
            assert b"refused" in b"".join(response.iter_raw())
    for answer in (refused, requests.get(server.address, timeout=100)):
        with pytest.raises((httpx.HTTPStatusError, requests.HTTPError), match=r"429.* refused read"):
            answer.raise_for_status()
    with pytest.raises(urllib.error.HTTPError, match="429: refused read"):
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(server.address)


# -- clients that try again --------------------------------------------------------------------------------------------


def by_google(url: str) -> None:
    options = {"api_endpoint": url}
    with build("youtube", "v3", developerKey="k", http=httplib2.Http(), client_options=options) as client:
        client.videos().list(part="id", chart="mostPopular").execute(num_retries=3)


def by_urllib3_again(url: str) -> None:
    with urllib3.PoolManager(retries=urllib3.Retry(3, backoff_factor=1, status_forcelist=[429])) as pool:
        pool.request("GET", url)


def by_requests_again(url: str) -> None:
    with requests.Session() as session:
        session.mount("http://", HTTPAdapter(max_retries=urllib3.Retry(3, backoff_factor=1, status_forcelist=[429])))
        session.get(url)


def under_tenacity(get: Callable[[str], Reply], *transient: type[Exception]) -> Callable[[str], Reply]:
    return tenacity.retry(retry=tenacity.retry_if_exception_type(transient), wait=tenacity.wait_fixed(1))(get)


AGAIN: dict[str, Callable[[str], Any]] = {
    "googleapiclient": by_google,
    "dlt": dlt_requests.get,
    "urllib3": by_urllib3_again,
    "requests": by_requests_again,
    "requests under tenacity": under_tenacity(by_requests, requests.ConnectionError, requests.Timeout),
    "httpx under tenacity": under_tenacity(by_httpx, httpx.TransportError),
    "httpx awaited under tenacity": under_tenacity(by_httpx_awaited, httpx.TransportError),
    "aiohttp under tenacity": under_tenacity(by_aiohttp, aiohttp.ClientConnectionError, TimeoutError),
    "httplib2 under tenacity": under_tenacity(by_httplib2, ConnectionError, TimeoutError),
}


@pytest.mark.parametrize(("name", "more"), [*((name, "") for name in AGAIN), ("urllib3", AS_429), ("requests", AS_429)])
def test_a_refusal_is_not_tried_again(
    name: str, more: str, server: PlainServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"it would sleep {seconds} s and try again"))
    instrument(server.address, units=5, more=more)
    requests.post(server.address, timeout=100)
    with pytest.raises(Exception, match=r"^refused"):
        AGAIN[name](server.address)
    assert len(server.arrived) == 1


@pytest.mark.parametrize("name", CLIENTS)
def test_a_refusal_says_itself_in_another_process_and_as_a_copy(name: str, server: PlainServer) -> None:
    """As from a pool of processes or a worker of Celery."""
    client, error = CLIENTS[name]
    instrument(server.address, units=5)
    requests.post(server.address, timeout=100)
    with pytest.raises(error) as refused:
        client(f"{server.address}/moved?key=a-secret")
    again = pickle.loads(pickle.dumps(refused.value))  # noqa: S301
    for same in (again, copy.copy(refused.value), pickle.loads(pickle.dumps(again))):  # noqa: S301
        assert type(same) is type(refused.value)
        assert (str(same), repr(same.args)) == (str(refused.value), repr(refused.value.args))
        assert str(same).removeprefix("<urlopen error ").startswith("refused ")
        same.__cause__ = None  # a pool puts a traceback there
        assert any(isinstance(cause, Refused) for cause in behind(same))


def test_a_request_in_pieces_by_http_client_is_refused_whole(server: PlainServer) -> None:
    """Also if nobody reads the answer, which waits in the connection."""
    instrument(server.address, units=7, more=AS_429)
    steps = (("POST", 200), ("POST", 429), ("POST", None), ("GET", 200), ("GET", 200), ("GET", 429))
    with closing(http.client.HTTPConnection(server.host, timeout=100)) as conn:
        for verb, status in steps:
            conn.putrequest(verb, "/a")
            conn.putheader("Content-Length", "3" if verb == "POST" else "0")
            conn.endheaders()
            if verb == "POST":
                conn.send(b"abc")
            if status is None:
                conn.close()
                continue
            answer = conn.getresponse()
            assert (answer.status, bool(answer.read())) == (status, True)
    assert [arrived.verb for arrived in server.arrived] == ["POST", "GET", "GET"]


def test_an_error_that_stalls_has_its_status_in_urllib(server: PlainServer) -> None:
    """And it closes its bucket. Its reader meets the timeout, as without us."""
    instrument(server.address)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with pytest.raises(urllib.error.HTTPError, match="429") as error:
        opener.open(f"{server.address}/stalls", timeout=2)
    with error.value as answer, pytest.raises(TimeoutError):
        answer.readlines()
    with pytest.raises(urllib.error.URLError, match="upstream said its bucket 'calls' is exhausted"):
        opener.open(f"{server.address}/a")


@pytest.mark.parametrize("path", ["/busy", "/busy-zipped", "/busy-deflated", "/busy-as-it-is", "/busy-in-chunks"])
def test_an_answer_closes_its_bucket_however_it_travels_and_its_reader_gets_it_whole(
    client: Client, server: PlainServer, path: str
) -> None:
    instrument(server.address, more=AS_429)
    status, body = client(f"{server.address}{path}")
    assert status == 429
    assert body in (BUSY, BUSY_ZIPPED, BUSY_DEFLATED)
    status, body = client(f"{server.address}/a")
    assert (status, len(server.arrived)) == (429, 1)
    assert "upstream said its bucket 'calls' is exhausted (Slow down.)" in json.loads(body)["detail"]


def test_an_error_in_chunks_leaves_its_connection_to_the_next_request(server: PlainServer) -> None:
    """However it was read. What came of one that is cut is in the error of the library."""
    instrument(server.address)
    with closing(http.client.HTTPConnection(server.host)) as conn:
        conn.response_class = type("Own", (http.client.HTTPResponse,), {"__getstate__": None})  # it cannot be copied
        for read in (
            lambda response: response.read(10_000),
            lambda response: b"".join(response.readlines()),
            lambda response: b"".join(iter(response.read1, b"")),
        ):
            conn.request("POST", "/busy-in-chunks")
            assert read(conn.getresponse()) == BUSY
            with quota.open() as session:
                session.budget().reopen("calls", "a test")
        conn.request("GET", "/busy-cut")
        with pytest.raises(http.client.IncompleteRead) as cut:
            conn.getresponse().read()
    assert cut.value.partial == BUSY[:9]


def test_lines_of_an_answer_that_breaks_off_between_chunks_settle_nothing(server: PlainServer) -> None:
    instrument(server.address)
    asked = urllib.request.Request(f"{server.address}/chat", b'{"max_tokens": 50, "in": "chunks"}')  # noqa: S310
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked) as answer:
        assert list(answer) == [b'{"usage": 7}\n']
    assert charged() == [("chat", 50)]


def test_the_answer_settles_the_reservation_of_the_request(client: Client, server: PlainServer) -> None:
    instrument(server.address, units=60, more=AS_429)
    asked = b'{"max_tokens": 50}'
    assert client(f"{server.address}/chat", "POST", asked)[0] == 200
    assert charged() == [("chat", 7)]
    assert client(f"{server.address}/chat", "POST", b'{"max_tokens": 54}')[0] == 429
    assert client(f"{server.address}/chat", "POST", b'{"max_tokens": 50, "as": "zipped"}')[0] == 200
    assert charged() == [("chat", 7), ("chat", 7)]


@pytest.mark.parametrize(
    "read",
    [
        lambda answer: answer.read(),
        lambda answer: [*iter(lambda: answer.read(100), b"")],
        lambda answer: [answer.read(0), answer.data],
        lambda answer: [*answer.stream(64)],
        lambda answer: answer.read(int(answer.headers["content-length"])),
    ],
)
def test_an_answer_of_urllib3_settles_its_request_however_it_is_read(
    read: Callable[[Any], object], server: PlainServer
) -> None:
    instrument(server.address)
    with urllib3.PoolManager() as pool:
        asked = {"max_tokens": 50}
        read(pool.request("POST", f"{server.address}/chat", json=asked, preload_content=False))
    assert charged() == [("chat", 7)]


@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("reader", [iter, io.TextIOWrapper, io.BufferedReader, lambda answer: [json.load(answer)]])
def test_an_answer_of_urllib_settles_however_it_is_read(reader: Callable[[Any], Any], chunks: bool) -> None:
    body = b'{"said": "a\\n",\n"usage": 7}'
    packed = Answer(200, in_chunks(body[:9], body[9:], b""), {"Transfer-Encoding": "chunked"})
    with PlainServer(lambda _: packed if chunks else Answer(200, body)) as server:
        instrument(server.address)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{server.address}/chat", b'{"max_tokens": 50}') as answer:
            assert [*reader(answer)]
    assert charged() == [("chat", 7)]


@pytest.mark.parametrize("how", ["", "zipped"])
def test_an_answer_of_httpx_settles_its_request_if_it_is_read_as_it_travels(how: str, server: PlainServer) -> None:
    async def read() -> None:
        async with (
            httpx.AsyncClient() as client,
            client.stream("POST", f"{server.address}/chat", content=asked) as more,
        ):
            assert [piece async for piece in more.aiter_raw()]

    instrument(server.address)
    asked = b'{"max_tokens": 50, "as": "%s"}' % how.encode()
    with httpx.stream("POST", f"{server.address}/chat", content=asked) as answer:
        assert [*answer.iter_raw()]
    asyncio.run(read())
    assert charged() == [("chat", 7), ("chat", 7)]


def test_an_answer_that_settles_its_request_can_be_pickled(server: PlainServer) -> None:
    instrument(server.address)
    answer = httpx.post(f"{server.address}/chat", json={"max_tokens": 50})
    again = pickle.loads(pickle.dumps(answer))  # noqa: S301
    assert (type(again), again.json(), b"".join(again.iter_bytes())) == (httpx.Response, answer.json(), answer.content)
    assert charged() == [("chat", 7)]


def test_the_length_of_a_streamed_body_counts_however_its_field_is_spelled(server: PlainServer) -> None:
    instrument(server.address, book=BOOK.replace("default = 100 }", "default = 100, bytes_per_unit = 10 }"))
    with urllib3.PoolManager() as pool:
        body = io.BytesIO(b"short" + b"x" * 995)
        with contextlib.suppress(urllib3.exceptions.HTTPError):
            pool.urlopen("POST", f"{server.address}/chat", body=body, headers={"Content-Length": "1000"})
    assert charged() == [("chat", 200)]


def test_an_answer_that_is_not_whole_settles_and_frees_nothing(client: Client, server: PlainServer) -> None:
    """Nor one that ends with its connection, unless its text shows an end."""
    instrument(server.address, book=BOOK.replace("closed = [", 'free = [{ json = "/free" }]\nclosed = ['))
    for how in ("part", "short", "short, listed", "short, twice", "lines"):
        with contextlib.suppress(Exception):  # most clients say that it broke off
            client(f"{server.address}/chat", "POST", b'{"max_tokens": 50, "how": "%s"}' % how.encode())
    assert [units for _, units in charged()] == [50] * 5


def test_a_request_that_never_left_is_refunded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it ends by an error that is no Exception, as a greenlet does that gevent kills."""

    def killed(*_: object) -> None:
        raise BaseException("killed")

    with PlainServer(answer) as gone:
        pass
    instrument(gone.address)
    with pytest.raises(Exception, match=r"(?i)connect|refused"):
        client(f"{gone.address}/a")
    monkeypatch.setattr(socket, "getaddrinfo", killed)
    monkeypatch.setattr(socket.socket, "connect", killed)  # the libraries of event loops look up no number
    with pytest.raises(BaseException, match=r"killed|TaskGroup"):
        client(f"{gone.address}/a")
    assert charged() == []


@pytest.mark.parametrize("odd", [{"verb": "GE\nT"}, {"headers": {"X-Key": "a\nkey"}}])
def test_a_request_that_its_library_refuses_to_send_is_refunded(client: Client, odd: Any, server: PlainServer) -> None:
    instrument(server.address)
    with pytest.raises((OSError, ValueError, httpx.LocalProtocolError, httpx2.LocalProtocolError)):
        client(f"{server.address}/a", **odd)
    assert charged() == server.arrived == []


def test_a_request_that_http_2_refuses_to_send_is_refunded() -> None:
    with H2Server() as server:
        instrument(server.address)
        with httpx.Client(trust_env=False, http2=True, http1=False) as client, pytest.raises(httpx.LocalProtocolError):
            client.get(f"{server.address}/a", headers={"TE": "gzip"})
        assert charged() == server.arrived == []


async def ask_by_aiohttp(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        await session.get(url)


async def ask_by_httpx(url: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        await client.get(url)


@pytest.mark.parametrize("ask", [ask_by_aiohttp, ask_by_httpx])
@pytest.mark.parametrize(("scheme", "stands"), [("https", []), ("http", [("read", 1)])])
def test_a_cancelled_request_is_refunded_only_without_a_connection(
    ask: Callable[[str], Any], scheme: str, stands: list[Any]
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as silent:
            silent.setblocking(False)
            address = f"{scheme}://127.0.0.1:{silent.getsockname()[1]}"
            instrument(address)
            asked = asyncio.ensure_future(ask(f"{address}/a"))
            connection, _ = await loop.sock_accept(silent)
            with connection:
                assert await loop.sock_recv(connection, 1)  # of a handshake, or of a request
                asked.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asked

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # httpcore leaves the socket of a cancelled handshake open
        asyncio.run(main())
        gc.collect()
    assert charged() == stands


def test_a_request_that_is_cancelled_on_a_new_connection_of_httpx_is_refunded(server: PlainServer) -> None:
    async def main() -> None:
        async def trace(event: str, info: Any) -> None:
            if event == "connection.connect_tcp.complete":
                asked.cancel()

        async with httpx.AsyncClient(trust_env=False) as client:
            asked = asyncio.ensure_future(client.get(f"{server.address}/a", extensions={"trace": trace}))
            with pytest.raises(asyncio.CancelledError):
                await asked

    instrument(server.address)
    asyncio.run(main())
    assert charged() == server.arrived == []


@pytest.mark.parametrize("host", ["2130706433", "127.1"])
def test_an_address_that_aiohttp_does_not_take_is_given_back(host: str, server: PlainServer) -> None:
    instrument(server.address)
    with pytest.raises(aiohttp.InvalidURL):
        by_aiohttp(f"{server.address.replace('127.0.0.1', host)}/a")
    assert charged() == []


def test_the_answer_to_a_head_has_no_body_whatever_its_length_says(client: Client, server: PlainServer) -> None:
    instrument(server.address)
    assert client(f"{server.address}/nowhere", "HEAD") == (404, b"")
    assert charged() == [("read", 1)]


# -- a body that sends requests of its own while it is read ------------------------------------------------------------


def relayed_by_requests(url: str, part: str) -> None:
    def parts() -> Iterator[bytes]:
        yield b"first"
        yield requests.get(part, timeout=100).content

    requests.post(url, data=parts(), timeout=100)


def relayed_by_httpx_awaited(url: str, part: str) -> None:
    async def main() -> None:
        async with httpx.AsyncClient() as client:

            async def parts() -> AsyncIterator[bytes]:
                yield b"first"
                yield (await client.get(part)).content

            await client.post(url, content=parts())

    asyncio.run(main())


@pytest.mark.parametrize("relayed", [relayed_by_requests, relayed_by_httpx_awaited])
def test_a_request_that_is_made_while_another_is_sent_is_charged_apart(
    relayed: Callable[[str, str], None], server: PlainServer
) -> None:
    instrument(server.address)
    relayed(f"{server.address}/whole", f"{server.address}/part")
    assert sorted(charged()) == [("read", 1), ("write", 5)]
    with pytest.raises((OSError, httpx.HTTPError, urllib3.exceptions.HTTPError)):
        relayed(f"{server.address}/whole", f"http://127.0.0.1:{free_port()}/part")
    assert sorted(charged()) == [("read", 1), ("write", 5), ("write", 5)], "it left, so it is not refunded"


# -- who pays ----------------------------------------------------------------------------------------------------------


def pays(url: str, named: str | None = None) -> str:
    """The credential that is charged."""
    quota.instrument(credential=named)
    httpx.get(url, timeout=100)
    quota.uninstrument()
    with quota.open() as session:
        for name in session.settings.credentials:
            for entry in charges_at(session.ledger, name):
                if entry.units:
                    session.budget(name).refund(ids_of([entry])[0])
                    return name
    return ""


def test_the_named_or_most_specific_credential_pays(server: PlainServer) -> None:
    configure(server.address)
    Path("chat.toml").write_text(BOOK.replace('"POST /chat"', '"GET /graph/{x}"'), encoding="utf-8")
    others = credential("other", server.address, "things.toml") + credential("graph", server.address, "chat.toml")
    others += credential("tube", f"{server.address}/gate", "youtube-v3")
    with Path("quota.toml").open("a", encoding="utf-8") as file:
        file.write(others)
    assert pays(f"{server.address}/graph/1") == "graph"
    assert pays(f"{server.address}/graph/1", "other") == "other"
    assert pays(f"{server.address}/Gate/youtube/v3/search") == "tube"
    with pytest.raises(
        quota.UsageError, match=r"main, other, graph could all pay for GET .*/a; name one of these credentials"
    ) as error:
        pays(f"{server.address.replace('//', '//me:secret@')}/a?key=secret")
    assert "secret" not in str(error.value)
    assert len(server.arrived) == 3
    quota.uninstrument()
    with pytest.raises(quota.UsageError, match="no credential 'nobody'"):
        pays(f"{server.address}/a", "nobody")


def test_a_configuration_that_meters_nothing_is_an_error() -> None:
    before, _, routes = BOOK.partition("[routes]")
    Path("things.toml").write_text(before + routes[routes.index("[buckets") :], encoding="utf-8")
    Path("quota.toml").write_text('[credentials.main]\napi = "things.toml"\n', encoding="utf-8")
    with pytest.raises(quota.ConfigError, match="no cost book of main names hosts and routes, so nothing is charged"):
        quota.instrument()


# -- other people's code -----------------------------------------------------------------------------------------------


def test_our_own_transports_charge_once(server: PlainServer) -> None:
    instrument(server.address)
    with quota.open() as session:
        with session.requests() as client:
            assert client.get(f"{server.address}/moved").status_code == 200
        with session.httpx(follow_redirects=True) as client:
            assert client.get(f"{server.address}/moved").status_code == 200

        async def main() -> None:
            metered = [aiohttp_middleware(session.budget(), hosts=[server.host])]
            async with aiohttp.ClientSession(middlewares=metered) as client:
                assert (await client.get(f"{server.address}/moved")).status == 200

        asyncio.run(main())
    assert charged() == [("read", 1), ("search", 10)] * 3
    assert len(server.arrived) == 6


def test_a_charge_of_our_own_transport_pays_for_no_other_host(server: PlainServer) -> None:
    """A transport below may ask another API first, for a token for example."""

    class Inner(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            by_urllib(f"{server.address}/token")
            return super().handle_request(request)

    instrument(server.address)
    with PlainServer(answer) as other, quota.open() as session:
        transport = httpx_transport(session.budget(), "search", hosts=other.host, inner=Inner())
        with httpx.Client(transport=transport) as client:
            assert client.get(f"{other.address}/a").status_code == 200
    assert sorted(charged()) == [("read", 1), ("search", 10)]


PLACES = (
    (urllib3.connectionpool.HTTPConnectionPool, "_make_request"),
    (HTTPAdapter, "send"),
    (httpx.HTTPTransport, "handle_request"),
    (httpx.AsyncHTTPTransport, "handle_async_request"),
    (aiohttp.ClientSession, "_request"),
    (httplib2.Http, "_conn_request"),
)


def test_a_request_under_way_ends_as_ever_where_it_is_uninstrumented_meanwhile(server: PlainServer) -> None:
    instrument(server.address)

    async def main() -> list[int]:
        async with aiohttp.ClientSession() as first, httpx.AsyncClient() as other:
            asked = [asyncio.ensure_future(first.get(f"{server.address}/late"))]
            asked += [asyncio.ensure_future(other.get(f"{server.address}/late"))]
            while len(server.arrived) < 2:
                await asyncio.sleep(0.01)
            quota.uninstrument()
            answers = [await each for each in asked]
            return [answers[0].status, answers[1].status_code]

    assert asyncio.run(main()) == [429, 429]


def test_uninstrumented_libraries_are_as_they_were() -> None:
    configure("http://127.0.0.1:1")
    places = [*PLACES, (importlib.util, "_find_spec")]
    before = [vars(owner)[name] for owner, name in places]
    quota.instrument()
    quota.instrument()
    assert all(now is not was for now, was in zip([vars(owner)[name] for owner, name in places], before, strict=True))
    quota.uninstrument()
    quota.uninstrument()
    assert [vars(owner)[name] for owner, name in places] == before
    assert before[-1] is importlib._bootstrap._find_spec  # type: ignore[attr-defined]


def test_an_interrupted_call_patches_all_or_nothing() -> None:
    """And the next one does what it would have done."""
    configure("http://127.0.0.1:1")
    before = [vars(owner)[name] for owner, name in PLACES]

    def patched() -> set[bool]:
        return {vars(owner)[name] is not was for (owner, name), was in zip(PLACES, before, strict=True)}

    for _ in at_every_place(interrupt, quota.instrument, (quota.auto.__file__, patches.__file__), step=13):
        assert len(patched()) == 1
        quota.instrument()
        assert patched() == {True}
        quota.uninstrument()
        assert patched() == {False}


@pytest.mark.parametrize("quota_first", [True, False])
def test_opentelemetrys_own_instrumentation_goes_on_in_either_order(quota_first: bool, server: PlainServer) -> None:
    """It wraps the methods of httpx that we patch, and one of requests that is above it."""
    configure(server.address)
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    instrumentors: list[Any] = [RequestsInstrumentor(), HTTPXClientInstrumentor()]

    def seen() -> tuple[int, int, int]:
        """After one more request of each: what arrived, what was charged, and what was traced."""
        for client in (by_requests, by_httpx, by_httpx_awaited):
            assert client(f"{server.address}/a")[0] == 200
        return len(server.arrived), len(charged()), len(spans.get_finished_spans())

    try:
        if quota_first:
            quota.instrument()
        for instrumentor in instrumentors:
            instrumentor.instrument(tracer_provider=provider)
        if not quota_first:
            quota.instrument()
        assert seen() == (3, 3, 3)
        assert all("traceparent" in instrumentor.headers for instrumentor in server.arrived)
        quota.uninstrument()
        assert seen() == (6, 3, 6)
    finally:
        for instrumentor in instrumentors:
            instrumentor.uninstrument()
    quota.instrument()
    assert seen() == (9, 6, 6)


# -- wire = ledger -----------------------------------------------------------------------------------------------------

BROKEN = (
    OSError,
    urllib3.exceptions.HTTPError,
    httpx.TransportError,
    aiohttp.ClientError,
    httplib2.HttpLib2Error,
    HTTPException,
)


def many_by_requests(urls: list[str]) -> None:
    with requests.Session() as session:
        session.trust_env = False
        retries = urllib3.Retry(3, status_forcelist=[503], backoff_factor=0, raise_on_status=False)
        session.mount("http://", HTTPAdapter(max_retries=retries))
        for url in urls:
            with contextlib.suppress(*BROKEN):
                session.get(url, timeout=100)


def many_by_urllib3(urls: list[str]) -> None:
    with urllib3.PoolManager(retries=urllib3.Retry(3, status_forcelist=[503], backoff_factor=0)) as pool:
        for number, url in enumerate(urls):
            with contextlib.suppress(*BROKEN):
                pool.request("GET", url, preload_content=number % 2 == 0).read()


def many_by_httplib2(urls: list[str]) -> None:
    with closing(httplib2.Http()) as http:
        for url in urls:
            with contextlib.suppress(*BROKEN):
                http.request(url)


def many_by(kind: Any, urls: list[str]) -> None:
    with closing(kind()) as client:
        for url in urls:
            with contextlib.suppress(*BROKEN):
                client.ask(url)


SEEDS = int(os.environ.get("QUOTA_TEST_CUTS", "1"))


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize(
    "many",
    [
        many_by_requests,
        many_by_urllib3,
        many_by_httplib2,
        *(functools.partial(many_by, kind) for kind in (Httpx, AsyncHttpx, Aiohttp)),
    ],
)
def test_the_ledger_holds_what_arrived_with_connections_cut_at_random(
    many: Callable[[list[str]], None], seed: int
) -> None:
    with cutting_server(seed) as server:
        instrument(server.address)
        many([f"{server.address}/{number}" for number in range(40)])
    assert len(charged()) == len(server.reached) > 40


def test_the_streams_of_one_connection_of_http_2_are_charged_one_by_one() -> None:
    """A stream that httpcore opens again on another connection is charged again."""

    async def main(address: str) -> list[Any]:
        async with httpx.AsyncClient(trust_env=False, http1=False, http2=True) as client:
            assert [(await client.get(f"{address}/{path}")).status_code for path in ("a", "away")] == [200, 200]
            asked = [client.get(f"{address}/{number}") for number in range(40)]
            return await asyncio.gather(*asked, return_exceptions=True)

    with H2Server() as server:
        instrument(server.address, units=30)
        with httpx.Client(trust_env=False, http1=False, http2=True) as client:
            urls = [f"{server.address}/{path}" for path in ("0", "1", "away", "3", "4")]
            assert [client.get(url).http_version for url in urls] == ["HTTP/2"] * 5
        got = asyncio.run(main(server.address))
        answered = [outcome for outcome in got if isinstance(outcome, httpx.Response)]
        refused = [each for each in got if type(each) is httpx.HTTPError and isinstance(each.__cause__, Refused)]
        assert (len(answered), len(refused), len(server.connections)) == (21, 19, 4)
        assert len(charged()) == len(server.arrived) == 30


# -- a recorder --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [by_httpx, by_httpx_awaited])
def test_a_mocks_answer_is_refunded_and_closes_nothing(
    ask: Client, server: PlainServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """respx answers in the place of httpcore, below httpx."""

    def answer(*_: Any) -> httpcore.Response:
        return httpcore.Response(429, content=b"{}")

    async def awaited_answer(*_: Any) -> httpcore.Response:
        return answer()

    instrument(server.address, units=1)
    with monkeypatch.context() as patching:
        patching.setattr(httpcore.ConnectionPool, "handle_request", answer)
        patching.setattr(httpcore.AsyncConnectionPool, "handle_async_request", awaited_answer)
        assert [ask(f"{server.address}/a")[0] for _ in range(2)] == [429, 429]
    assert (charged(), server.arrived) == ([], [])
    assert ask(f"{server.address}/a")[0] == 200
    assert charged() == [("read", 1)]


class Recorded:
    """A connection that stands before a library's own, as vcrpy's does: it sends once, and replays from then on."""

    _baseclass: type
    tape: ClassVar[list[Any]] = []

    def __init__(self, *args: Any, **options: Any) -> None:
        self.real_connection = self._baseclass(*args, **options)
        self.sock = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real_connection, name)

    def connect(self) -> None: ...

    def close(self) -> None:
        self.real_connection.close()

    def request(self, method: str, url: str, body: Any = None, headers: Any = None) -> None:
        self.asked = {"method": method, "url": url, "body": body, "headers": headers}

    def getresponse(self) -> Any:
        if not self.tape:
            self.real_connection.request(**self.asked)
            response = self.real_connection.getresponse()
            self.tape.append((response, getattr(response, "data", None) or response.read()))
            self.close()
        response, body = self.tape[0]
        response.read = io.BytesIO(body).read
        return response


class RecordedByHttplib2(Recorded, httplib2.HTTPConnectionWithTimeout):  # type: ignore[misc]  # httplib2 has no types
    _baseclass = httplib2.HTTPConnectionWithTimeout


class RecordedByUrllib3(Recorded):
    """Its answers are of a class of its own."""

    _baseclass = urllib3.connection.HTTPConnection
    is_closed = is_connected = False

    def request(self, method: str, url: str, *, body: Any, headers: Any, **_: Any) -> None:
        super().request(method, url, body, headers)

    def getresponse(self) -> Any:
        response = super().getresponse()
        names = "status reason headers version version_string read get_redirect_location close length_remaining"
        return SimpleNamespace(data=response.read(), **{name: getattr(response, name) for name in names.split()})


def list_videos(by: str, address: str) -> None:
    url = f"{address}/youtube/v3/videos?part=snippet&chart=mostPopular"
    if by in ("httplib2", "urllib3"):
        quota.instrument()
        with closing(httplib2.Http()) as http, urllib3.PoolManager() as pool:
            http.request(f"{url}&key=k") if by == "httplib2" else pool.request("GET", f"{url}&key=k")
        quota.uninstrument()
        return
    with quota.open() as session:
        if by.startswith("google"):
            batch = session.google().new_batch_http_request()
            batch.add(videos := session.google().videos().list(part="snippet", chart="mostPopular"))
            with contextlib.suppress(HttpError):  # the emulator knows no batches
                (batch if by == "google, in a batch" else videos).execute()
        else:
            session.requests().get(url, stream=True)


@pytest.mark.parametrize("by", ["google", "google, in a batch", "httplib2", "requests", "urllib3"])
def test_recorded_requests_are_charged_and_replayed_requests_are_free(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorded, "tape", [])
    monkeypatch.setitem(httplib2.SCHEME_TO_CONNECTION, "http", RecordedByHttplib2)
    monkeypatch.setattr(urllib3.HTTPConnectionPool, "ConnectionCls", RecordedByUrllib3)
    with Emulator() as upstream:
        configure_google(upstream.address)
        for _ in range(2):
            list_videos(by, upstream.address)
        assert charged() == [("videos.list", 1)]
        assert upstream.usage()["requests"] == 1


@pytest.mark.parametrize("loaded", ["first", "while patched", "below a mock that stays for longer"])
def test_a_recorder_sends_nothing_uncharged_whenever_it_is_loaded(
    server: PlainServer, monkeypatch: pytest.MonkeyPatch, loaded: str
) -> None:
    """vcrpy keeps the methods of httpx and aiohttp as they are when it is imported, and records over these."""
    recorder: Any = ModuleType(patches.RECORDER)
    unpatched = recorder.handle_request = httpx.HTTPTransport.handle_request
    if loaded != "first":
        instrument(server.address)
        with monkeypatch.context() as mocking:
            if loaded == "while patched":
                recorder.handle_request = httpx.HTTPTransport.handle_request
                monkeypatch.setitem(sys.modules, patches.RECORDER, recorder)
            else:
                mocking.setattr(httpx.HTTPTransport, "handle_request", lambda *_: None)
            quota.uninstrument()
    monkeypatch.setitem(sys.modules, patches.RECORDER, recorder)
    instrument(server.address)
    with monkeypatch.context() as recording:
        recording.setattr(httpx.HTTPTransport, "handle_request", lambda *args: recorder.handle_request(*args))
        assert by_httpx(f"{server.address}/a")[0] == 200
    assert charged() == [("read", 1)]
    quota.uninstrument()
    assert recorder.handle_request is unpatched


def test_a_program_that_was_instrumented_with_a_recorder_is_charged_without_it(
    server: PlainServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(server.address)
    with monkeypatch.context() as recording:
        recording.setattr(Recorded, "_baseclass", http.client.HTTPConnection, raising=False)
        recording.setattr(http.client, "HTTPConnection", Recorded)
        quota.instrument()
    assert by_urllib(f"{server.address}/a")[0] == 200
    assert charged() == [("read", 1)]


@pytest.mark.parametrize("passes", [True, False])
def test_a_mock_of_http_client_is_free_unless_it_passes_the_request(
    passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pook puts the answer into the connection."""
    unmocked = http.client.HTTPConnection.request

    def request(conn: Any, *args: Any, **options: Any) -> None:
        if passes:
            unmocked(conn, *args, **options)
            return
        text = io.BytesIO(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        mocked = http.client.HTTPResponse(SimpleNamespace(makefile=lambda _: text))
        mocked.begin()
        conn.getresponse = lambda: mocked

    monkeypatch.setattr(http.client.HTTPConnection, "request", request)
    with Emulator() as upstream:
        configure_google(upstream.address)
        list_videos("httplib2", upstream.address)
        assert charged() == ([("videos.list", 1)] if passes else [])
        assert upstream.usage()["requests"] == passes
