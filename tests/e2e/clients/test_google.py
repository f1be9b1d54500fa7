"""The real Google client against a real server: what the ledger holds is what arrived, attempt for attempt."""

from __future__ import annotations

import contextlib
import gc
import http.client
import io
import json
import re
import select
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httplib2
import pytest
import requests
from google.auth.credentials import AnonymousCredentials
from google.oauth2.credentials import Credentials
from google_auth_httplib2 import AuthorizedHttp
from googleapiclient.errors import BatchError, HttpError
from googleapiclient.http import BatchHttpRequest, HttpRequest, MediaInMemoryUpload, MediaIoBaseDownload

import quota
from quota.budget import Budget
from quota.clients import deadline
from quota.clients.answer_fields import AnswerLimits
from quota.clients.deadline import Watch
from quota.clients.discovery import Routes, description, methods_of
from quota.clients.gate import at_once
from quota.clients.google import service
from quota.clients.requests import requests_adapter
from quota.errors import ConfigError, NoAnswer, Refused, UsageError
from quota.jobs.emulator.catalogue import _channel_id
from quota.ledger.log import Log
from quota.settings.books import load_book
from support.emulator import Emulator
from support.plain_http import Answer, Arrived, PlainServer, Reached, Upstream, head, whole
from support.processes import Children
from support.servers import black_hole
from support.setup import budget_of, charges_at, limit, state_at

KEY = "AIza-the-secret-of-these-tests"
REGIONS = ("US", "GB", "DE", "FR", "IN", "BR", "AU", "CA")
Connect = Callable[..., Any]


@pytest.fixture
def upstream() -> Iterator[Emulator]:
    with Emulator(quota=100_000) as emulator:
        yield emulator


def make_budget(
    ledger: Log, units: int = 50_000, book: str = "youtube-v3", credential: str = "main", project: str = "p"
) -> Budget:
    costs = load_book(book)
    limits = [limit(units, name=bucket, buckets=(bucket,)) for bucket in costs.buckets]
    return budget_of(ledger, *limits, credential=credential, project=project, book=costs)


@pytest.fixture
def connect(ledger: Log) -> Iterator[Connect]:
    """Makes services over the test's ledger, and closes them."""
    made: list[Any] = []

    def connect(address: str, *, units: int = 50_000, book: str = "youtube-v3", **options: Any) -> Any:
        options.setdefault("key", None if "credentials" in options else KEY)
        made.append(service(make_budget(ledger, units, book), endpoint=address, **options))
        return made[-1]

    yield connect
    for youtube in made:
        youtube.close()


def charged(ledger: Log) -> dict[str, int]:
    """How many attempts of each method the ledger holds, without those given back."""
    return dict(Counter(entry.method for entry in charges_at(ledger) if entry.units))


def spent(ledger: Log) -> int:
    return sum(entry.units for entry in charges_at(ledger))


def popular(youtube: Any, region: str = "DE") -> Any:
    request = youtube.videos().list(part="snippet", chart="mostPopular", regionCode=region, maxResults=10)
    request._sleep = lambda seconds: None
    return request


def batch_of(batch: Any, *requests: Any) -> Any:
    for request in requests:
        batch.add(request)
    return batch


def idle_socket(youtube: Any, address: str) -> socket.socket:
    """The socket of the only idle connection to an address."""
    pools = youtube._http._session.get_adapter(address).poolmanager.pools
    (pool,) = [pools[key] for key in pools.keys()]  # noqa: SIM118  # it is no mapping that can be iterated
    (sock,) = [connection.sock for connection in pool.pool.queue if connection is not None]
    return sock  # type: ignore[no-any-return]


def test_an_error_that_the_client_cannot_read_keeps_its_status(ledger: Log, connect: Connect) -> None:
    """The client's own error fails over a message that is no text, and over one nested too deep."""
    for body in (b'{"error": {"message": []}}', b"[" * 3_000):
        with PlainServer(lambda request, body=body: Answer(503, body)) as server, pytest.raises(HttpError) as error:  # type: ignore[misc]
            popular(connect(server.address)).execute()
        assert error.value.resp.status == 503


# -- the ledger equals the wire ----------------------------------------------------------------------------------------


def test_no_client_sends_a_secret_to_another_machine_in_plain_text(connect: Connect, tmp_path: Path) -> None:
    elsewhere = "http://upstream.invalid"
    for secret in ({"key": KEY}, {"credentials": Credentials("a-token")}):
        with pytest.raises(ConfigError, match="would get the secret in plain text") as caught:
            connect(elsewhere, **secret)
        assert KEY not in str(caught.value)
        connect(elsewhere, **secret, insecure_endpoint=True)
    connect(elsewhere, key=None)
    config = tmp_path / "quota.toml"
    config.write_text(
        '[credentials.main]\napi = "youtube-v3"\nkey = "file:key"\n'
        f'endpoint = "{elsewhere}"\ninsecure_endpoint = true\n'
    )
    (tmp_path / "key").write_text(KEY)
    with quota.open(config) as session:
        session.google()
        with pytest.raises(ConfigError, match="would get the secret in plain text"):
            session.google(endpoint="http://another.invalid")


def test_the_ledger_equals_the_wire(upstream: Emulator, ledger: Log, connect: Connect) -> None:
    """Whatever happens on the way, the charges equal the arrivals: by method, by number and by units."""
    token = Credentials("a-token")  # type: ignore[no-untyped-call]
    youtube = connect(upstream.address, credentials=token)
    hasty = connect(upstream.address, timeout_s=0.2)

    request = popular(youtube)
    while request is not None:  # pages
        page = request.execute()
        request = youtube.videos().list_next(request, page)
    upstream.fault("status", status=503, times=2)
    popular(youtube).execute(num_retries=3)
    upstream.fault("status", status=429, times=3, method="search.list")
    search = youtube.search().list(part="snippet", q="x")
    search._sleep = lambda seconds: None
    with pytest.raises(HttpError):
        search.execute(num_retries=2)
    upstream.fault("close-after", method="videos.list")
    popular(youtube).execute(num_retries=1)
    upstream.fault("drop-idle", method="videos.list")
    popular(youtube).execute()
    assert select.select([idle_socket(youtube, upstream.address)], [], [], 5)[0], "the server's goodbye has come"
    popular(youtube).execute()
    upstream.fault("redirect", method="videos.list")
    popular(youtube).execute()
    upstream.fault("truncate", method="videos.list")
    with pytest.raises(http.client.IncompleteRead):
        popular(youtube).execute()
    upstream.fault("hang", method="videos.list", ms=300_000, times=2)
    with pytest.raises(TimeoutError):
        popular(hasty).execute(num_retries=1)
    with pytest.raises(HttpError):
        youtube.videos().list(part="nonsense", id="x").execute()

    batch = batch_of(youtube.new_batch_http_request(), *(popular(youtube, region) for region in REGIONS))
    batch_of(batch, *(youtube.channels().list(part="snippet", id=f"id-{number}") for number in range(12))).execute()
    for resumable in (False, True):
        media = MediaInMemoryUpload(b"x" * 700_000, mimetype="video/mp4", chunksize=262_144, resumable=resumable)
        youtube.videos().insert(part="snippet", body={"snippet": {}}, media_body=media).execute()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda region: [popular(youtube, region).execute() for _ in range(10)], REGIONS))

    usage = upstream.usage()
    assert charged(ledger) == usage["by_method"]
    assert len(charges_at(ledger)) == usage["requests"]
    assert spent(ledger) == usage["units"]["units"]
    assert usage["free"] == {"batches": 1, "upload_chunks": 3}


def test_a_request_without_a_connection_is_free(ledger: Log, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall that drops packets is not waited for as long as a slow answer."""
    monkeypatch.setattr(deadline, "CONNECT_WITHIN_S", 0.2)
    began_s = time.monotonic()
    adapter = requests_adapter(make_budget(ledger), "videos.list", timeout_s=60, hosts=["127.0.0.1"])
    with black_hole() as port, requests.Session() as session:
        session.mount("http://", adapter)
        with pytest.raises(TimeoutError):
            popular(connect(f"http://127.0.0.1:{port}")).execute()
        with pytest.raises(requests.ConnectTimeout):
            session.get(f"http://127.0.0.1:{port}")
    assert time.monotonic() - began_s < 20
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and never listens
        youtube = connect(f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ConnectionRefusedError):
            popular(youtube).execute(num_retries=2)
    with pytest.raises(httplib2.ServerNotFoundError):
        popular(connect("https://no-such-host.invalid")).execute()
    assert [entry.units for entry in charges_at(ledger)] == [0, 0, 0, 0, 0, 0]


def test_a_long_body_has_more_time_than_a_connection(ledger: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "CONNECT_WITHIN_S", 0.1)
    began_s = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as deaf, requests.Session() as session:
        session.mount("http://", requests_adapter(make_budget(ledger), timeout_s=1))
        with pytest.raises(requests.ConnectionError):
            session.post(f"http://127.0.0.1:{deaf.getsockname()[1]}", data=bytes(1 << 25))
    assert time.monotonic() - began_s >= 1


def test_a_request_that_fails_before_a_byte_is_refunded(upstream: Emulator, ledger: Log, connect: Connect) -> None:
    """And the connection that held half of it is not used again."""
    youtube = connect(upstream.address)
    with pytest.raises(UnicodeEncodeError):
        youtube._http.request(f"{upstream.address}/youtube/v3/playlists", "POST", headers={"x": "€"})
    assert [(entry.method, entry.charged_units, entry.units) for entry in charges_at(ledger)] == [
        ("playlists.insert", 50, 0)
    ]
    popular(youtube).execute()
    assert charged(ledger) == {"videos.list": 1} == upstream.usage()["by_method"]


def test_a_request_cut_after_its_first_byte_stays_charged(upstream: Emulator, ledger: Log, connect: Connect) -> None:
    def body() -> Iterator[bytes]:
        yield b"{"
        raise RuntimeError("the file is gone")

    youtube = connect(upstream.address)
    with pytest.raises(RuntimeError):
        youtube._http.request(f"{upstream.address}/youtube/v3/playlists", "POST", body=body())
    assert charged(ledger) == {"playlists.insert": 1}
    popular(youtube).execute()


def test_an_upload_is_charged_when_it_is_opened(upstream: Emulator, ledger: Log, connect: Connect) -> None:
    """Opening it again is charged again. Its chunks are free, and so is asking how far it came after a failure."""
    token = Credentials("a-token")  # type: ignore[no-untyped-call]
    youtube = connect(upstream.address, credentials=token)
    media = MediaInMemoryUpload(b"x" * 600_000, mimetype="video/mp4", chunksize=262_144, resumable=True)
    request = youtube.videos().insert(part="snippet", body={"snippet": {}}, media_body=media)
    request._sleep = lambda seconds: None
    upstream.fault("status", status=503, method="videos.insert")
    upstream.fault("status", status=503, method="upload-chunk", after=1)
    request.next_chunk(num_retries=1)
    with pytest.raises(HttpError):
        request.next_chunk()
    assert request.execute()["kind"] == "youtube#video"
    assert charged(ledger) == {"videos.insert": 2} == upstream.usage()["by_method"]
    assert upstream.usage()["free"]["upload_chunks"] == 5


def opens_upload(request: Arrived) -> Answer:
    location = f"http://{request.headers['host']}{request.target}&upload_id=1"
    return Answer(headers={} if "upload_id" in request.target else {"Location": location})


def test_an_upload_with_put_is_charged_when_it_is_opened(ledger: Log, connect: Connect) -> None:
    """captions.update opens with the verb that chunks have. An empty upload has a length and no chunks."""
    with PlainServer(opens_upload) as server:
        for content in (b"x" * 10, b""):
            media = MediaInMemoryUpload(content, mimetype="text/xml", chunksize=-1, resumable=True)
            connect(server.address).captions().update(part="id", body={"id": "c"}, media_body=media).execute()
        assert [request.verb for request in server.arrived] == ["PUT"] * 4
        sent = server.arrived[-1].headers
    assert (sent["content-length"], "transfer-encoding" in sent) == ("0", False)
    assert charged(ledger) == {"captions.update": 2}


# -- what carries no method's name -------------------------------------------------------------------------------------


def test_the_http_object_alone_is_charged_by_what_is_sent(upstream: Emulator, ledger: Log, connect: Connect) -> None:
    youtube = connect(upstream.address)
    local = upstream.address.replace("127.0.0.1", "localhost")
    for verb, target in [
        ("GET", "/youtube/v3/videos?part=id&id=x"),
        ("GET", "/youtube/v3/videos%3AbatchGetStats?part=id&id=x"),
        ("POST", "/youtube/v3/playlists?part=id"),
        ("POST", "/upload/youtube/v3/videos?part=id&uploadType=media"),
        ("PUT", "/upload/youtube/v3/videos?uploadType=resumable&upload_id=none"),
    ]:
        youtube._http.request(upstream.address + target, verb, body="" if verb != "GET" else None)
    youtube._http.request(f"{local}/youtube/v3/search?part=id&q=x")
    form = {"x-http-method-override": "GET", "content-type": "application/x-www-form-urlencoded"}
    youtube._http.request(f"{local}/youtube/v3/videos", "POST", body="part=id&id=x", headers=form)
    youtube._http.request(f"{local}/youtube/v3/playlists?part=id", "PUT", body="{}", headers=form)  # it is a PUT still
    with pytest.raises(UsageError, match="X-HTTP-Method-Override does not name one method"):
        youtube._http.request(f"{local}/youtube/v3/videos", "POST", headers={"x-http-method-override": "GET, PUT"})
    assert charged(ledger) == {
        "videos.list": 2,
        "videos.batchGetStats": 1,
        "playlists.insert": 1,
        "playlists.update": 1,
        "videos.insert": 1,
        "search.list": 1,
    }
    assert charged(ledger) == upstream.usage()["by_method"]
    put = {"x-http-method-override": "PUT"}
    youtube._http.request(f"{local}/upload/youtube/v3/captions?part=id&upload_id=none", "POST", body="", headers=put)
    assert charged(ledger)["captions.update"] == 1, "a POST may begin a new upload"


@pytest.mark.parametrize("api", ["youtube v3", "gmail v1", "admin reports_v1", "adsense v2", "logging v2", "pubsub v1"])
def test_the_path_identifies_each_method(api: str) -> None:
    """Also of those that fit another's path: `/x/{id}:cancel` and `/x/{id}`. A batch and a download have only this."""
    document = description(*api.split())
    routes = Routes(document)
    described = list(methods_of(document))
    assert described
    for method in described:
        path = re.sub(r"\{.*?\}", "x", f"/{document['servicePath']}{method.get('flatPath', method['path'])}")
        assert getattr(routes.first(method["httpMethod"], path), "method", None) == method["id"]


def test_a_method_that_nobody_described_costs_the_books_default(
    upstream: Emulator, ledger: Log, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    youtube = connect(upstream.address)
    youtube._http.request(f"{upstream.address}/youtube/v3/brandNew?part=id")
    youtube._http.request(f"{upstream.address}/youtube/v3/{'x' * 100}", "POST", body="")
    assert [(entry.method, entry.units) for entry in charges_at(ledger)] == [
        ("GET /youtube/v3/brandNew", 1),
        ("x" * 64, 50),
    ]
    assert 'default_price book=youtube-v3 method="GET /youtube/v3/brandNew" units=1:' in caplog.text


def test_no_error_shows_the_callers_own_key(upstream: Emulator, connect: Connect) -> None:
    """A batch and a download make the error themselves."""
    theirs = "a-key-of-the-caller"
    youtube = connect(upstream.address)
    errors: list[Any] = []
    call = youtube.captions().download(id="a-caption", key=theirs)
    call.uri = call.uri if theirs in call.uri else f"{call.uri}&key={theirs}"
    for send in (call.execute, MediaIoBaseDownload(io.BytesIO(), call).next_chunk):
        with pytest.raises(HttpError) as raised:
            send()
        errors.append(raised.value)
    batch_of(youtube.new_batch_http_request(lambda name, answer, error: errors.append(error)), call).execute()
    assert len(errors) == 3
    for error in errors:
        assert theirs not in f"{error} {error!r} {error.uri} {vars(error)}"
        assert "key=[redacted]" in error.uri


def test_a_batch_leaves_whole_or_not_at_all(upstream: Emulator, ledger: Log, connect: Connect) -> None:
    youtube = connect(upstream.address, units=205)
    youtube.videos().list(part="snippet", id="x", maxResults=1).execute()
    searches = [youtube.search().list(part="snippet", q=words) for words in "xy"]
    batch = batch_of(youtube.new_batch_http_request(), *(popular(youtube) for _ in range(5)), *searches)
    with pytest.raises(Refused, match="these 7 calls need 205 together"):
        batch.execute()
    assert [entry.units for entry in charges_at(ledger)] == [1], "nothing to be given back"
    assert upstream.usage()["requests"] == 1
    youtube.search().list(part="snippet", q="x").execute()
    assert spent(ledger) == 101


@pytest.mark.parametrize("project", ["p", "other"])
@pytest.mark.parametrize("saved", [False, True])
def test_a_batch_is_of_one_credential(
    upstream: Emulator, ledger: Log, connect: Connect, project: str, saved: bool
) -> None:
    """Each call carries its own key: upstream would charge one credential for a call that the other's budget admits."""
    youtube, again = connect(upstream.address), connect(upstream.address)
    theirs = make_budget(ledger, credential="other", project=project)
    with service(theirs, endpoint=upstream.address, key=f"{KEY}-2") as others:
        call = popular(others)
        if saved:
            call = type(call).from_json(call.to_json(), others._http, HttpRequest.null_postproc)
        for calls in ((popular(youtube), call), (call, popular(youtube))):
            with pytest.raises(UsageError, match="to several credentials") as refused:
                batch_of(youtube.new_batch_http_request(), *calls).execute()
            assert KEY not in str(refused.value)
    assert (upstream.usage()["requests"], spent(ledger)) == (0, 0)
    batch_of(youtube.new_batch_http_request(), popular(youtube), popular(again)).execute()
    assert charged(ledger) == {"videos.list": 2} == upstream.usage()["by_method"]


def test_a_pool_exhausted_inside_a_batch_is_closed(ledger: Log, connect: Connect) -> None:
    with Emulator(allocation="buckets") as upstream:
        youtube = connect(upstream.address)
        upstream.fault("exhaust", method="search.list")
        search = youtube.search().list(part="snippet", q="x")
        batch_of(youtube.new_batch_http_request(), popular(youtube), search).execute()
        assert [closed.bucket for closed in state_at(ledger).facts().exhaustions] == ["search"]


# -- refusals ----------------------------------------------------------------------------------------------------------


def plain_http(youtube: Any) -> Any:
    """An Http with the same key that no budget knows of, as a careless program would make one for each thread."""
    return AuthorizedHttp(youtube._http.credentials, http=httplib2.Http())


def replaced(request: Any, http: Any) -> Any:
    request.http = http
    return request


def download(request: Any, http: Any) -> Any:
    loader = MediaIoBaseDownload(io.BytesIO(), request)
    loader._request.http = http
    return loader.next_chunk()


def upload(youtube: Any, http: Any) -> Any:
    media = MediaInMemoryUpload(b"x", mimetype="video/mp4", resumable=True)
    return youtube.videos().insert(part="snippet", body={}, media_body=media).next_chunk(http=http)


def mixed(youtube: Any, http: Any) -> Any:
    """A batch goes out on its first request's Http."""
    uri = f"{youtube._baseUrl}videos?part=id&id=x"
    return batch_of(
        youtube.new_batch_http_request(), HttpRequest(http, HttpRequest.null_postproc, uri), popular(youtube)
    )


WAYS_AROUND: dict[str, Callable[[Any, Any], Any]] = {
    "execute(http=) with retries": lambda y, http: popular(y).execute(http=http, num_retries=3),
    "next_chunk(http=)": upload,
    "request.http": lambda y, http: replaced(popular(y), http).execute(),
    "the next page's http": lambda y, http: replaced(
        y.videos().list_next(popular(y), {"nextPageToken": "t"}), http
    ).execute(),
    "batch.execute(http=)": lambda y, http: batch_of(y.new_batch_http_request(), popular(y)).execute(http=http),
    "a batch built by hand": lambda y, http: batch_of(
        BatchHttpRequest(batch_uri=y._rootDesc["rootUrl"] + "batch"), popular(y)
    ).execute(http=http),
    "a batch that begins with another's request": lambda y, http: mixed(y, http).execute(),
    "a download's Http": lambda y, http: download(y.captions().download(id="x"), http),
    "a batch of requests that the client's own class read": lambda y, http: batch_of(
        y.new_batch_http_request(), HttpRequest.from_json(popular(y).to_json(), y._http, HttpRequest.null_postproc)
    ).execute(http=http),
    "from_json": lambda y, http: type(popular(y)).from_json(popular(y).to_json(), http, HttpRequest.null_postproc),
}


@pytest.mark.parametrize("way", WAYS_AROUND)
def test_another_http_would_bypass_the_budget(upstream: Emulator, ledger: Log, connect: Connect, way: str) -> None:
    youtube = connect(upstream.address)
    for other in (httplib2.Http(), plain_http(youtube), AuthorizedHttp(youtube._http.credentials)):
        with pytest.raises(UsageError, match="would bypass the budget") as refused:
            WAYS_AROUND[way](youtube, other)
        assert str(refused.value).isprintable()
    assert (upstream.usage()["requests"], spent(ledger)) == (0, 0)


@pytest.mark.parametrize("way", WAYS_AROUND)
def test_a_metered_http_object_may_be_named(upstream: Emulator, ledger: Log, connect: Connect, way: str) -> None:
    """It is the service's own, so each request was charged."""
    youtube = connect(upstream.address)
    with contextlib.suppress(HttpError):  # nobody has such a caption
        WAYS_AROUND[way](youtube, youtube._http)
    assert spent(ledger) == sum(upstream.usage()["units"].values())


def test_a_metered_http_of_another_place_meters_nothing_here(upstream: Emulator, connect: Connect) -> None:
    """It would take the calls for somebody else's."""
    youtube, elsewhere = connect(upstream.address), connect("http://127.0.0.1:9")
    with pytest.raises(UsageError, match="would bypass the budget"):
        popular(youtube).execute(http=elsewhere._http)
    assert upstream.usage()["requests"] == 0


def test_requests_of_other_apis_keep_their_own_http(upstream: Emulator, connect: Connect) -> None:
    """Requests of other services are none of our business, not even in a batch."""
    connect(upstream.address)
    first, second = httplib2.Http(), httplib2.Http()
    plain = HttpRequest(first, HttpRequest.null_postproc, f"{upstream.address}/elsewhere")
    with pytest.raises(HttpError):
        batch_of(BatchHttpRequest(batch_uri=f"{upstream.address}/elsewhere"), plain).execute()
    plain.http = second
    with pytest.raises(HttpError):
        plain.execute()
    first.close()
    second.close()
    assert upstream.usage()["requests"] == 2


# -- hosts and secrets -------------------------------------------------------------------------------------------------


def test_the_key_travels_in_a_header_and_not_to_strangers(ledger: Log, connect: Connect) -> None:
    """A redirect to another host is not charged, is not shown the key, and cannot close a bucket."""
    spent_body = json.dumps({"error": {"code": 403, "errors": [{"reason": "quotaExceeded"}]}}).encode()
    with PlainServer(lambda request: Answer(403, spent_body)) as stranger:
        moved = Answer(302, headers={"Location": f"{stranger.address}/elsewhere"})
        with PlainServer(lambda request: moved) as api:
            youtube = connect(api.address)
            with pytest.raises(HttpError):
                popular(youtube).execute()
            assert [request.headers.get("x-goog-api-key") for request in api.arrived] == [KEY]
            assert KEY not in api.arrived[0].target
        assert [request.headers.get("x-goog-api-key") for request in stranger.arrived] == [None]
    assert charged(ledger) == {"videos.list": 1}
    assert not state_at(ledger).facts().exhaustions


@pytest.mark.parametrize("location", ["//", "http://", "http:///x", "ftp://127.0.0.1/x", "/\u00ff", "http://[::1"])
def test_a_redirect_to_nowhere_costs_one_attempt(ledger: Log, connect: Connect, location: str) -> None:
    with PlainServer(lambda request: Answer(302, headers={"Location": location})) as server:
        youtube = connect(server.address)
        with pytest.raises(quota.BadAnswer, match="redirects") as caught:
            popular(youtube).execute()
        caught.value.args += (caught,)  # the answer is freed after its socket
        del caught
        gc.collect()  # warns of a socket that is open
    assert charged(ledger) == {"videos.list": 1 if location != "/\u00ff" else 6}


def test_the_body_of_a_redirect_is_not_read(connect: Connect) -> None:
    """Not even one that does not unpack, which requests would read whole."""
    sent: list[int] = []

    def answer(request: Reached) -> Iterator[bytes]:
        if "/moved" in request.target:
            yield whole(b"{}")
            return
        moved = head("Location: /moved", "Content-Encoding: gzip", "Content-Length: 300000000", status="302 Found")
        yield moved + b"\r\n"
        for number in range(300):
            sent.append(number)
            yield b"x" * 1_000_000

    with Upstream(answer) as server:
        popular(connect(server.address, max_body_mb=1)).execute()
    assert len(sent) < 100


def test_a_redirect_takes_no_proxy_either(connect: Connect, ledger: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """And brings no cookie. It is still a call of its method, wherever it leads."""
    moved = Answer(302, headers={"Location": "/youtube/v3/channels", "Set-Cookie": "a=b"})
    with PlainServer(lambda _: Answer()) as proxy:
        with PlainServer(lambda request: moved if "videos" in request.target else Answer()) as server:
            monkeypatch.setenv("HTTP_PROXY", proxy.address)
            youtube = connect(server.address)
            for _ in range(2):
                popular(youtube).execute()
        assert (proxy.arrived, [request.headers.get("cookie") for request in server.arrived]) == ([], [None] * 4)
    assert charged(ledger) == {"videos.list": 4}


def test_a_download_that_was_redirected_goes_on_at_the_api(connect: Connect) -> None:
    """The other host would get the token with the second piece."""
    token = Credentials("ya29.a-token")  # type: ignore[no-untyped-call]
    piece = Answer(206, b"x", {"Content-Range": "bytes 0-0/2"})
    with PlainServer(lambda _: piece) as stranger:
        moved = Answer(302, headers={"Location": f"{stranger.address}/blob"})
        with PlainServer(lambda request: moved) as api:
            youtube = connect(api.address, credentials=token)
            loader = MediaIoBaseDownload(io.BytesIO(), youtube.captions().download(id="x"), chunksize=1)
            for _ in range(2):
                loader.next_chunk()
        assert len(api.arrived) == len(stranger.arrived) == 2
        assert {request.headers.get("authorization") for request in stranger.arrived} == {None}


@pytest.mark.parametrize("status", [301, 302, 303, 307])
def test_a_token_goes_nowhere_else_either(ledger: Log, connect: Connect, status: int) -> None:
    """Another port of this machine, which is another server."""
    token = Credentials("a-token-of-the-tests")  # type: ignore[no-untyped-call]
    with PlainServer(lambda request: Answer(200)) as stranger:
        moved = Answer(status, headers={"Location": f"{stranger.address}/youtube/v3/videos"})
        with PlainServer(lambda request: moved) as api:
            youtube = connect(api.address, credentials=token)
            popular(youtube).execute()
            assert "authorization" in api.arrived[0].headers
        (request,) = stranger.arrived
        assert "a-token-of-the-tests" not in f"{request.headers} {request.target}"


@pytest.mark.parametrize("host", ["upstream.invalid", "[2001:db8::1]"])
def test_the_proxy_of_the_environment_is_obeyed_and_the_login_of_netrc_is_not(
    ledger: Log, connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: str
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine upstream.invalid login somebody password else\nmachine 127.0.0.1 login a password b\n")
    monkeypatch.setenv("NETRC", str(netrc))
    with PlainServer(lambda request: Answer()) as proxy, PlainServer(lambda request: Answer()) as here:
        monkeypatch.setenv("HTTP_PROXY", proxy.address)
        popular(connect(f"http://{host}", insecure_endpoint=True)).execute()
        popular(connect(here.address)).execute()  # no proxy could reach it
        (arrived,), (direct,) = proxy.arrived, here.arrived
    assert arrived.target.startswith(f"http://{host}/youtube/v3/videos?")
    assert [request.headers.get("authorization") for request in (arrived, direct)] == [None, None]
    assert charged(ledger) == {"videos.list": 2}


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("pieces", "error"),
    [([OK, b"x: ", *[b"y"] * 30], NoAnswer), ([OK + b"\r\n", b"", b"no TLS\r\n", b""], ssl.SSLError)],
    ids=["slow", "no TLS"],
)
def test_a_proxy_and_a_token_have_the_time_of_an_answer(
    ledger: Log,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pieces: list[bytes],
    error: type[Exception],
) -> None:
    def answer(_: Reached) -> Iterator[bytes]:
        for piece in pieces:
            yield piece
            time.sleep(0.2)

    with Upstream(answer) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.address.replace("//", "//me:secret@"))
        monkeypatch.setattr(http.client.HTTPConnection, "debuglevel", 1)
        login = Credentials(None, "r", None, f"{proxy.address}/token", "c", "s")  # type: ignore[no-untyped-call]
        for options in ({}, {"credentials": login})[: 1 + (error is NoAnswer)]:
            with pytest.raises(error):
                popular(connect("https://upstream.invalid", max_answer_s=1, **options)).execute()
    assert (charged(ledger), capsys.readouterr().out) == ({}, "")


def test_a_request_that_the_body_of_another_makes_leaves_the_other_its_time() -> None:
    watch = Watch(AnswerLimits(max_answer_s=0), None)
    with watch.request():
        with watch.request():
            pass
        with pytest.raises(NoAnswer):
            watch.left_s()


@pytest.mark.parametrize(
    "elsewhere",
    [
        "http://169.254.169.254/computeMetadata/v1/",
        "https://169.254.169.254/",
        "https://youtube.googleapis.com.example/youtube/v3/videos",
        "https://youtube.googleapis.com@192.0.2.1/youtube/v3/videos",
        "https://storage.googleapis.com/",
        "https://youtube.googleapis.com:22/",
        "HTTP://youtube.googleapis.com/",
    ],
)
def test_no_address_but_the_apis_own_is_shown_the_key(ledger: Log, elsewhere: str) -> None:
    with service(make_budget(ledger), key=KEY) as youtube, contextlib.suppress(ConfigError):
        assert youtube._http.caller.signed("GET", elsewhere, {}) == (elsewhere, {})


@pytest.mark.parametrize("login", [AnonymousCredentials(), Credentials("ya29.a-long-token\n1")])  # type: ignore[no-untyped-call]
def test_a_login_may_be_nobodys_and_no_error_quotes_it(upstream: Emulator, connect: Connect, login: Any) -> None:
    with pytest.raises((HttpError, httplib2.HttpLib2Error), match=r"API Key|redacted") as error:
        popular(connect(upstream.address, credentials=login)).execute()
    assert "a-long" not in str(error.value)
    ended = Credentials("ya29.a-token\n")  # type: ignore[no-untyped-call]  # as a file ends
    popular(connect(upstream.address, credentials=ended)).execute()


@pytest.mark.parametrize(
    ("host", "target", "metered", "keeps_key"),
    [
        ("youtube.googleapis.com:443", "/youtube/v3/videos", True, True),
        ("YouTube.googleapis.com.:8443", "/youtube/v3/videos", True, False),
        ("youtube.googleapis.com:443", "/batch/youtube/v3", True, True),
        # Google's shared host serves this API and others.
        ("www.googleapis.com:443", "/youtube/v3/videos", True, True),
        ("oauth2.googleapis.com:443", "/token", False, False),
    ],
)
def test_without_an_endpoint_googles_own_hosts_are_metered(
    ledger: Log, host: str, target: str, metered: bool, keeps_key: bool
) -> None:
    with service(make_budget(ledger), key=KEY) as youtube:
        gate, caller = youtube._http.gate, youtube._http.caller
        verb = "POST" if "batch" in target or "token" in target else "GET"
        assert (at_once(gate.charge(verb, f"https://{host}{target}")) is not None) == metered
        assert caller.signed(verb, f"https://{host}{target}", {})[1] == ({"x-goog-api-key": KEY} if keeps_key else {})
        with contextlib.suppress(ConfigError):  # never in the clear
            assert caller.signed(verb, f"http://{host}{target}", {})[1] == {}


@pytest.mark.parametrize(
    "endpoint",
    ["127.0.0.1:80", "ftp://host", "http://", "http://host:port", "http://h/?key=1", "http://h?", "http://[::1"],
)
def test_an_endpoint_is_the_root_of_an_api(endpoint: str, ledger: Log) -> None:
    with pytest.raises(ConfigError, match="endpoint"):
        service(make_budget(ledger), endpoint=endpoint)


def test_an_endpoint_may_have_a_path(ledger: Log, connect: Connect) -> None:
    """Calls, batches and uploads all go below it, and are recognized there."""
    with PlainServer(lambda request: Answer(200)) as server:
        youtube = connect(f"{server.address}/proxy/")
        popular(youtube).execute()
        media = MediaInMemoryUpload(b"x", mimetype="video/mp4")
        youtube.videos().insert(part="snippet", body={}, media_body=media).execute()
        youtube._http.request(f"{server.address}/proxy/youtube/v3/channels?part=id")
        batch = batch_of(youtube.new_batch_http_request(), youtube.search().list(part="snippet"))
        with pytest.raises(BatchError):  # this server speaks no batch
            batch.execute()
        assert all(request.target.startswith("/proxy/") for request in server.arrived)
    assert charged(ledger) == {"videos.list": 1, "videos.insert": 1, "channels.list": 1, "search.list": 1}


# -- threads and processes ---------------------------------------------------------------------------------------------


def test_connections_are_shared_by_threads_and_closed_with_the_service(upstream: Emulator, connect: Connect) -> None:
    youtube = connect(upstream.address)
    sockets: list[socket.socket] = []

    def call() -> None:
        popular(youtube).execute()
        sockets.append(idle_socket(youtube, upstream.address))

    for _ in range(4):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert len({id(sock) for sock in sockets}) == 1
    youtube.close()
    assert sockets[0].fileno() == -1
    call()  # and it opens new ones
    assert sockets[-1].fileno() != -1


def test_a_forked_child_does_not_read_its_parents_answers(upstream: Emulator, ledger: Log, connect: Connect) -> None:
    youtube = connect(upstream.address)

    def ask(number: int) -> bool:
        answers = [youtube.channels().list(part="id", id=_channel_id(number)).execute() for _ in range(30)]
        return {item["id"] for answer in answers for item in answer["items"]} == {_channel_id(number)}

    assert ask(1)
    child = Children(ask, (20,))
    assert ask(10)
    assert child.answers() == [True]
    assert charged(ledger) == {"channels.list": 90} == upstream.usage()["by_method"]


def test_quota_imports_the_client_only_for_a_service() -> None:
    code = (
        "import sys, quota, quota.clients.metering, quota.clients.upstream_errors, quota.common.redact\n"
        "import quota.clients.instrument.seams, quota.session\n"
        "print(sys.modules.keys() & {'googleapiclient', 'httplib2', 'google.auth', 'requests', 'urllib3', 'httpx'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "set()", done.stderr
