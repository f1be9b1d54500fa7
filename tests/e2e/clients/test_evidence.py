"""A second program spends the same token, and our count follows: by what each answer says remains, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import github
import gspread
import httpx
import pytest
import requests
import trustme
from github.Requester import HTTPRequestsConnectionClass, HTTPSRequestsConnectionClass, Requester

import quota
from quota.budget import Budget
from quota.clients.aiohttp import aiohttp_middleware
from quota.clients.httpx import httpx_async_transport, httpx_transport
from quota.clients.requests import requests_adapter
from quota.errors import Refused
from quota.ledger.factory import open_ledger
from quota.ledger.log import Log
from quota.settings.books import parse_book
from quota.settings.limits import default_limits
from support.certificates import Pair
from support.commands import Quota
from support.counting_upstream import Counting, second_program
from support.plain_http import PlainServer
from support.proxy import Proxy
from support.servers import RedisServer
from support.setup import budget_of

BOOK = """
api = "example"
hosts = ["{host}"]
source = "the tests"
read_on = 2026-11-25
[buckets.core]
quota = 5_000
resets = "1h"
[default]
get = 1
other = 1
[methods]
call = 1
[routes]
"**" = "call"
[answers]
remaining = "X-RateLimit-Remaining"
limit = "X-RateLimit-Limit"
reset = {{ header = "X-RateLimit-Reset", as = "epoch" }}
bucket = "X-RateLimit-Resource"
"""


@pytest.fixture
def upstream() -> Counting:
    return Counting()


@pytest.fixture
def server(upstream: Counting) -> Iterator[PlainServer]:
    with PlainServer(upstream) as server:
        yield server


def opened(ledger: Log, host: str, project: str = "p", clock: Callable[[], int] | None = None) -> Budget:
    """A budget, as each run of a program has one."""
    book = parse_book(BOOK.format(host=host), "example")
    limits = default_limits(book)
    return budget_of(ledger, *limits, project=project, book=book, clock=clock)


def used(budget: Budget) -> int:
    (state,) = budget.usage()
    return state.used_units


def follows(
    upstream: Counting, address: str, budget_of: Callable[[], Budget], call: Callable[[Budget], object]
) -> None:
    """Runs of a program, between which a second one spends: after one call of each our count is upstream's, and it
    never falls."""
    before = 0
    for others in (0, 60, 400, 1, 51, 0, 2_000):
        second_program(address, others)
        budget = budget_of()
        call(budget)
        count = used(budget)
        assert upstream.used - 47 <= count <= upstream.used  # 1 percent of the limit, 4,750
        assert count >= before
        before = count


# -- real packages, as they are ----------------------------------------------------------------------------------------


def test_pygithub(upstream: Counting, server: PlainServer, ledger: Log) -> None:
    upstream.said["/repos/octo/cat"] = json.dumps({"id": 1, "name": "cat", "full_name": "octo/cat"}).encode()

    def call(budget: Budget) -> None:
        class Metered(HTTPRequestsConnectionClass):
            def __init__(self, *args: object, **kwargs: object) -> None:
                super().__init__(*args, **kwargs)  # type: ignore[arg-type]
                self.session.trust_env = False
                self.session.mount("http://", requests_adapter(budget))

        Requester.injectConnectionClasses(Metered, HTTPSRequestsConnectionClass)
        try:
            hub = github.Github(auth=github.Auth.Token("t"), base_url=server.address, seconds_between_requests=None)
            assert hub.get_repo("octo/cat").full_name == "octo/cat"
        finally:
            Requester.resetConnectionClasses()

    follows(upstream, server.address, lambda: opened(ledger, server.host), call)


def test_gspread(upstream: Counting, server: PlainServer, ledger: Log, tmp_path: Path) -> None:
    """Google's own answers do not say what remains; those of a gateway before it may."""
    certificate, key, authority = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem"
    signer = trustme.CA()
    issued = signer.issue_cert("sheets.googleapis.com")
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    signer.cert_pem.write_to_path(authority)
    upstream.said["/v4/spreadsheets/an-id/values/A1%3AB1"] = b'{"range": "A1:B1", "values": [["1", "2"]]}'
    sheet = {"properties": {"sheetId": 0, "title": "One", "index": 0, "gridProperties": {}}}
    upstream.said["/v4/spreadsheets/an-id"] = json.dumps({"properties": {"title": "T"}, "sheets": [sheet]}).encode()

    def call(budget: Budget) -> None:
        with requests.Session() as session:
            session.trust_env, session.verify = False, str(authority)
            session.proxies = {"https": google.address.replace("https", "http")}
            session.mount("https://", requests_adapter(budget))
            assert gspread.Client(None, session=session).open_by_key("an-id").title == "T"  # type: ignore[arg-type]

    with PlainServer(upstream, Pair(certificate, key)) as behind, PlainServer(upstream, to=behind.host) as google:
        follows(upstream, server.address, lambda: opened(ledger, "sheets.googleapis.com"), call)


# -- each client -------------------------------------------------------------------------------------------------------


def of_requests(budget: Budget, url: str) -> None:
    with requests.Session() as session:
        session.trust_env = False
        session.mount("http://", requests_adapter(budget))
        session.get(url, timeout=100)


def of_httpx(budget: Budget, url: str) -> None:
    with httpx.Client(transport=httpx_transport(budget)) as client:
        client.get(url, timeout=100)


def of_httpx_on_a_loop(budget: Budget, url: str) -> None:
    async def get() -> None:
        async with httpx.AsyncClient(transport=httpx_async_transport(budget)) as client:
            await client.get(url, timeout=100)

    asyncio.run(get())


def of_aiohttp(budget: Budget, url: str) -> None:
    async def get() -> None:
        async with aiohttp.ClientSession(middlewares=[aiohttp_middleware(budget)]) as session, session.get(url):
            pass

    asyncio.run(get())


@pytest.mark.parametrize("get", [of_requests, of_httpx, of_httpx_on_a_loop, of_aiohttp])
def test_every_client_follows_and_closes_what_is_used_up(
    upstream: Counting, server: PlainServer, ledger: Log, get: Callable[[Budget, str], None]
) -> None:
    budget = opened(ledger, server.host)
    upstream.used = 1_000
    get(budget, server.address)
    assert used(budget) == 1_001
    upstream.used = 4_999
    get(budget, server.address)  # the last one that upstream has
    with pytest.raises(Refused) as refused:
        get(opened(ledger, server.host), server.address)
    assert len(server.arrived) == 2
    decision = refused.value.decision
    assert (decision.reason, decision.detail) == ("exhausted", "0 of 5,000 remain")
    assert abs((decision.retry_at_ms or 0) - 1_000 * upstream.reset_s) <= 2_000  # headers have whole seconds


def test_status_says_whose_they_are(
    upstream: Counting, server: PlainServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = Quota(tmp_path)
    monkeypatch.setenv("QUOTA_STATE_DIR", command.env["QUOTA_STATE_DIR"])
    (tmp_path / "example.toml").write_text(BOOK.format(host=server.host), encoding="utf-8")
    config = command.configure(
        '[ledger]\nurl = "sqlite:///ledger.db"\n[credentials.main]\napi = "example.toml"\nproject = "p"\n'
    )
    upstream.used = 4_900
    with quota.open(config) as q:
        of_requests(q.budget(), server.address)
        assert used(q.budget()) == 4_901
        with pytest.raises(Refused):
            of_requests(q.budget(), server.address)
    shown = " ".join(command("status").stdout.split())
    assert "hour: 4,900 units used by others, as upstream said, until" in shown
    assert "hour 1h 4,901 4,750 0" in shown
    explained = " ".join(command("explain").stdout.split())
    assert "Filled by: others, as upstream said: 4,900 of 4,901" in explained


def test_a_decision_costs_what_it_cost(redis_server: RedisServer, upstream: Counting, server: PlainServer) -> None:
    """An answer that changes nothing asks nobody; one that does asks at most once a second."""
    now_ms = time.time_ns() // 1_000_000
    with Proxy(redis_server.port) as proxy:
        ledger = open_ledger(proxy.url, clock=lambda: now_ms)
        project = f"p{now_ms}"

        def trips(budget: Budget, calls: int) -> int:
            before = proxy.trips
            for _ in range(calls):
                of_requests(budget, server.address)
            return proxy.trips - before

        budget = opened(ledger, server.host, project=project, clock=lambda: now_ms)
        upstream.used += 500
        trips(budget, 1)  # connects, begins the log, and loads the scripts
        assert trips(budget, 5) == 5
        upstream.used += 500
        assert trips(budget, 5) == 5, "told within this second"
        now_ms += 1_000
        assert trips(budget, 5) == 5 + 2, "a look, and an entry"
        assert used(budget) == upstream.used
        ledger.close()
