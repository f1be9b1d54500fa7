"""Libraries that are instrumented: what the ledger holds is what arrived, attempt for attempt, and a program is told of
a refusal in its library's own words."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path

import aiohttp
import httplib2
import httpx
import pytest
import requests
import urllib3
from requests.adapters import HTTPAdapter

import quota
from quota.common.clock import NEVER
from quota.errors import Refused
from support.cutting_upstream import CuttingServer
from support.plain_http import Answer, Arrived, PlainServer

BOOK = """\
api = "things"
hosts = ["api.things.example"]
source = "https://things.example/limits"
read_on = 2026-11-25

[buckets.calls]
quota = 1_000_000
resets = "1h"

[buckets.tokens]
quota = 1_000_000
resets = "1h"

[default]
get = 1
other = 5

[methods]
read = 1
search = 10
chat = [{ bucket = "tokens", reserve = { json = "/max_tokens", default = 100 } }]

[routes]
"GET /search" = "search"
"POST /chat" = "chat"
"GET /**" = "read"

[answers]
units = { json = "/usage" }
closed = [{ status = 429, bucket = "calls", lasts = "10m" }]
"""


def configure(address: str, units: int = 1_000_000, more: str = "") -> None:
    """A configuration in this folder."""
    Path("things.toml").write_text(BOOK, encoding="utf-8")
    limit = "".join(
        f'[[credentials.main.limits]]\nname = "{bucket}"\nbucket = "{bucket}"\nquota = {units}\nwindow = "1h"\n'
        for bucket in ("calls", "tokens")
    )
    text = f'[credentials.main]\napi = "things.toml"\nendpoint = "{address}"\n{more}\n{limit}'
    Path("quota.toml").write_text(text, encoding="utf-8")


@pytest.fixture
def config(state_dir: Path) -> Iterator[Callable[..., None]]:
    yield configure
    quota.uninstrument()


def charged(job: str | None = None) -> list[tuple[str, int]]:
    with quota.open() as session:
        entries = session.ledger.read("main", (0, 0), NEVER, 1_000)
        return [(one.method, one.units) for one in entries if one.units and job in (None, one.job)]


# -- the clients under one name ----------------------------------------------------------------------------------------

Got = tuple[int, bytes]


def by_requests(url: str, verb: str = "GET", body: bytes | None = None) -> Got:
    with requests.Session() as session:
        session.trust_env = False
        answer = session.request(verb, url, data=body)
        return answer.status_code, answer.content


def by_urllib3(url: str, verb: str = "GET", body: bytes | None = None) -> Got:
    with urllib3.PoolManager() as pool:
        answer = pool.request(verb, url, body=body, retries=urllib3.Retry(5, respect_retry_after_header=False))
        return answer.status, answer.data


def by_httpx(url: str, verb: str = "GET", body: bytes | None = None) -> Got:
    with httpx.Client(trust_env=False, follow_redirects=True) as client:
        answer = client.request(verb, url, content=body)
        return answer.status_code, answer.content


def by_httpx_awaited(url: str, verb: str = "GET", body: bytes | None = None) -> Got:
    async def main() -> Got:
        async with httpx.AsyncClient(trust_env=False, follow_redirects=True) as client:
            answer = await client.request(verb, url, content=body)
            return answer.status_code, answer.content

    return asyncio.run(main())


def by_aiohttp(url: str, verb: str = "GET", body: bytes | None = None) -> Got:
    async def main() -> Got:
        async with aiohttp.ClientSession() as session, session.request(verb, url, data=body) as answer:
            return answer.status, await answer.read()

    return asyncio.run(main())


def by_httplib2(url: str, verb: str = "GET", body: bytes | None = None) -> Got:
    http = httplib2.Http()
    try:
        answer, content = http.request(url, verb, body)
        return answer.status, content
    finally:
        http.close()


CLIENTS: dict[str, tuple[Callable[..., Got], type[Exception]]] = {
    "requests": (by_requests, requests.ConnectionError),
    "urllib3": (by_urllib3, urllib3.exceptions.MaxRetryError),
    "httpx": (by_httpx, httpx.ConnectError),
    "httpx awaited": (by_httpx_awaited, httpx.ConnectError),
    "aiohttp": (by_aiohttp, aiohttp.ClientConnectionError),
    "httplib2": (by_httplib2, ConnectionError),
}


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> Callable[..., Got]:
    return CLIENTS[request.param][0]


def answer(request: Arrived) -> Answer:
    match request.target.partition("?")[0]:
        case "/moved":
            return Answer(302, b"", {"Location": "/search"})
        case "/busy":
            return Answer(429, b'{"error": {"message": "Slow down."}}')
        case "/chat":
            return Answer(200, json.dumps({"said": "x" * 500, "usage": 7}).encode())
    return Answer(200, b'{"items": []}')


@pytest.fixture
def server() -> Iterator[PlainServer]:
    with PlainServer(answer) as server:
        yield server


# -- an attempt --------------------------------------------------------------------------------------------------------


def test_each_attempt_is_named_by_its_route_and_charged_once(
    client: Callable[..., Got], config: Callable[..., None], server: PlainServer
) -> None:
    config(server.address)
    quota.instrument(job="nightly")
    assert client(f"{server.address}/a") == (200, b'{"items": []}')
    assert client(f"{server.address}/moved")[0] == 200
    assert charged("nightly") == [("read", 1), ("read", 1), ("search", 10)]


def test_other_hosts_are_untouched(
    client: Callable[..., Got], config: Callable[..., None], server: PlainServer
) -> None:
    config("http://127.0.0.1:1")
    quota.instrument()
    assert client(f"{server.address}/a")[0] == 200
    assert charged() == []


@pytest.mark.parametrize("name", CLIENTS)
def test_a_refusal_is_the_librarys_own_error_and_nothing_leaves(
    name: str, config: Callable[..., None], server: PlainServer
) -> None:
    client, error = CLIENTS[name]
    config(server.address, units=10)
    quota.instrument()
    with pytest.raises(error, match=r"^refused search") as refused:
        client(f"{server.address}/moved?key=a-secret")
    assert isinstance(refused.value.__cause__, Refused)
    assert "a-secret" not in repr(refused.value)
    assert [one.target for one in server.arrived] == ["/moved?key=a-secret"]


def test_a_refusal_may_be_an_answer_of_429(
    client: Callable[..., Got], config: Callable[..., None], server: PlainServer
) -> None:
    config(server.address, units=10, more='on_refusal = "429"')
    quota.instrument()
    status, body = client(f"{server.address}/moved")
    assert (status, [one.target for one in server.arrived]) == (429, ["/moved"])
    assert json.loads(body)["detail"].startswith(
        "refused search (10 units) on main: limit 'calls' has 1 of 10 units used"
    )


def test_a_made_answer_says_when_to_come_back_and_never_early(config: Callable[..., None], server: PlainServer) -> None:
    config(server.address, units=9, more='on_refusal = "429"')
    quota.instrument()
    requests.get(f"{server.address}/a", timeout=100)
    refused = requests.post(f"{server.address}/a", timeout=100)
    assert refused.status_code == 200
    refused = requests.post(f"{server.address}/a", timeout=100)
    assert refused.status_code == 429
    assert 3_590 < int(refused.headers["Retry-After"]) <= 3_600


def test_an_answer_closes_its_bucket_and_its_reader_gets_it_whole(
    client: Callable[..., Got], config: Callable[..., None], server: PlainServer
) -> None:
    config(server.address, more='on_refusal = "429"')
    quota.instrument()
    assert client(f"{server.address}/busy") == (429, b'{"error": {"message": "Slow down."}}')
    status, body = client(f"{server.address}/a")
    assert (status, len(server.arrived)) == (429, 1)
    assert "upstream said its bucket 'calls' is exhausted (Slow down.)" in json.loads(body)["detail"]


def test_what_is_reserved_by_the_request_is_settled_by_the_answer(
    client: Callable[..., Got], config: Callable[..., None], server: PlainServer
) -> None:
    config(server.address, units=60, more='on_refusal = "429"')
    quota.instrument()
    asked = b'{"max_tokens": 50}'
    assert client(f"{server.address}/chat", "POST", asked)[0] == 200
    assert charged() == [("chat", 7)]
    assert client(f"{server.address}/chat", "POST", b'{"max_tokens": 54}')[0] == 429
    assert client(f"{server.address}/chat", "POST", asked)[0] == 200


def test_what_never_left_is_given_back(client: Callable[..., Got], config: Callable[..., None]) -> None:
    with PlainServer(answer) as gone:
        pass
    config(gone.address)
    quota.instrument()
    with pytest.raises(Exception, match=r"(?i)connect|refused"):
        client(f"{gone.address}/a")
    assert charged() == []


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


def many_by_httpx(urls: list[str]) -> None:
    with httpx.Client(trust_env=False, follow_redirects=True, transport=httpx.HTTPTransport(retries=2)) as client:
        for url in urls:
            with contextlib.suppress(*BROKEN):
                client.get(url)


def many_by_httpx_awaited(urls: list[str]) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(trust_env=False, follow_redirects=True) as client:
            for url in urls:
                with contextlib.suppress(*BROKEN):
                    await client.get(url)

    asyncio.run(main())


def many_by_aiohttp(urls: list[str]) -> None:
    async def main() -> None:
        async with aiohttp.ClientSession() as session:
            for url in urls:
                with contextlib.suppress(*BROKEN):
                    async with session.get(url) as answer:
                        await answer.read()

    asyncio.run(main())


def many_by_httplib2(urls: list[str]) -> None:
    http = httplib2.Http()
    for url in urls:
        with contextlib.suppress(*BROKEN):
            http.request(url)
    http.close()


SEEDS = int(os.environ.get("QUOTA_TEST_CUTS", "1"))


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize(
    "many",
    [many_by_requests, many_by_urllib3, many_by_httpx, many_by_httpx_awaited, many_by_aiohttp, many_by_httplib2],
)
def test_the_ledger_holds_what_arrived_with_connections_cut_at_random(
    many: Callable[[list[str]], None], seed: int, config: Callable[..., None]
) -> None:
    with CuttingServer(seed) as server:
        config(server.address)
        quota.instrument()
        many([f"{server.address}/{number}" for number in range(40)])
    assert len(charged()) == server.arrived > 40
