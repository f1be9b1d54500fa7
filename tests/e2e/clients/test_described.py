"""An API that its cost book describes, through each client, over real HTTP: which method a request is, what it costs,
and what follows from the answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx
import pytest
import requests

from quota.budget import Budget
from quota.clients.aiohttp import aiohttp_middleware
from quota.clients.gate import MAX_PEEK_BYTES
from quota.clients.httpx import httpx_async_transport, httpx_transport
from quota.clients.requests import requests_adapter
from quota.errors import Refused, UsageError
from quota.ledger.log import Log
from quota.rules.spent import Spent
from quota.settings.books import parse_book
from quota.terms.limits import HOUR_MS, Limit, Selector, Sliding, View
from support.plain_http import Answer, Arrived, PlainServer
from support.setup import budget_of, charges_at

RESETS_IN_S = 1_800


def headers(remaining: int, **more: str) -> dict[str, str]:
    """GitHub's, of a server whose clock is a day ahead."""
    now_s = int(time.time()) + 86_400
    said = {"Date": formatdate(now_s, usegmt=True), "X-RateLimit-Resource": "core", "X-RateLimit-Limit": "5000"}
    said |= {"X-RateLimit-Remaining": str(remaining), "X-RateLimit-Reset": str(now_s + RESETS_IN_S)}
    return said | {name.replace("_", "-"): value for name, value in more.items()}


def answer(request: Arrived) -> Answer:
    match urlsplit(request.target).path:
        case "/repos/spent":
            return Answer(403, b'{"message": "API rate limit exceeded for user ID 1."}', headers(0))
        case "/repos/secondary":
            body = b'{"message": "You have exceeded a secondary rate limit."}'
            return Answer(403, body, headers(4_000, Retry_After="90"))
        case "/repos/same" | "/both/same":
            return Answer(304, b"", headers(4_000))
        case "/graphql":
            return Answer(200, b'{"errors": [{"extensions": {"code": "THROTTLED"}}]}')
        case "/graphql/long":
            return Answer(200, b" " * 3 * MAX_PEEK_BYTES + b'{"errors": [{"extensions": {"code": "THROTTLED"}}]}')
    return Answer(200, b'{"errors": []}', headers(4_000))


@pytest.fixture
def server() -> Iterator[PlainServer]:
    with PlainServer(answer) as server:
        yield server


def make_budget(ledger: Log, host: str) -> Budget:
    book = parse_book(
        f"""
        api = "github"
        hosts = ["{host}"]
        source = "https://docs.github.example"
        read_on = 2026-11-25
        [buckets.core]
        quota = 5_000
        resets = "1h"
        [buckets.points]
        quota = 900
        resets = "1m"
        [default]
        get = 3
        other = 7
        [methods]
        read = 1
        graphql = {{ units = 2, bucket = "points" }}
        both = [{{ bucket = "core", units = 1 }}, {{ bucket = "points", units = 5 }}]
        [routes]
        "GET /both/**" = "both"
        "GET /repos/**" = "read"
        "/graphql/**" = "graphql"
        [answers]
        remaining = "X-RateLimit-Remaining"
        limit = "X-RateLimit-Limit"
        reset = {{ header = "X-RateLimit-Reset", as = "epoch" }}
        bucket = "X-RateLimit-Resource"
        free = [{{ status = 304 }}]
        closed = [
          {{ status = 403, body = "secondary rate limit", bucket = "points", lasts = "60s" }},
          {{ status = 200, json = "/errors/0/extensions/code", is = "THROTTLED" }},
        ]
        """,
        "github",
    )
    limit = Limit("hour", 4_750, View(Selector(), Sliding(HOUR_MS)), 5_000, 250)
    return budget_of(ledger, *[limit], book=book)


def entries(ledger: Log) -> list[Spent]:
    return charges_at(ledger, "p")


Get = Callable[[Budget, str], tuple[int, bytes]]


def of_requests(budget: Budget, url: str) -> tuple[int, bytes]:
    with requests.Session() as session:
        session.trust_env = False
        session.mount("http://", requests_adapter(budget))
        response = session.get(url, timeout=100)
        return response.status_code, response.content


def of_httpx(budget: Budget, url: str) -> tuple[int, bytes]:
    with httpx.Client(transport=httpx_transport(budget)) as client:
        response = client.get(url, timeout=100)
        return response.status_code, response.content


def of_httpx_on_a_loop(budget: Budget, url: str) -> tuple[int, bytes]:
    async def get() -> tuple[int, bytes]:
        async with httpx.AsyncClient(transport=httpx_async_transport(budget)) as client:
            response = await client.get(url, timeout=100)
            return response.status_code, response.content

    return asyncio.run(get())


def of_aiohttp(budget: Budget, url: str) -> tuple[int, bytes]:
    async def get() -> tuple[int, bytes]:
        async with (
            aiohttp.ClientSession(middlewares=[aiohttp_middleware(budget)]) as session,
            session.get(url) as response,
        ):
            return response.status, await response.read()

    return asyncio.run(get())


@pytest.fixture(params=[of_requests, of_httpx, of_httpx_on_a_loop, of_aiohttp], ids=lambda one: one.__name__)
def get(request: pytest.FixtureRequest) -> Get:
    made: Get = request.param
    return made


def test_of_five_requests_that_are_refused_one_leaves(get: Get, server: PlainServer, ledger: Log) -> None:
    """The first 403 says that nothing remains, until when; the other four are refused with that time."""
    budget, url = make_budget(ledger, server.host), f"{server.address}/repos/spent"
    before_ms = ledger.now_ms()
    assert get(budget, url) == (403, b'{"message": "API rate limit exceeded for user ID 1."}')
    for _ in range(4):
        with pytest.raises(Refused) as refused:
            get(budget, url)
        decision = refused.value.decision
        assert (decision.reason, decision.refused_by) == ("exhausted", "core")
        assert decision.retry_at_ms is not None
        assert before_ms <= decision.retry_at_ms - RESETS_IN_S * 1_000 <= ledger.now_ms(), "by this machine's clock"
    assert len(server.arrived) == 1
    assert [entry.units for entry in entries(ledger)] == [1]


def test_the_routes_say_what_a_request_costs(get: Get, server: PlainServer, ledger: Log) -> None:
    budget = make_budget(ledger, server.host)
    for path in ("/repos/a/b?page=2", "/graphql/x", "/users/17", "/users/18"):
        assert get(budget, server.address + path)[0] == 200
    charged = [(entry.method, entry.units, entry.bucket) for entry in entries(ledger)]
    unknown = ("GET **", 3, "core")
    assert charged == [("read", 1, "core"), ("graphql", 2, "points"), unknown, unknown]


def test_another_rule_closes_another_bucket(get: Get, server: PlainServer, ledger: Log) -> None:
    """A secondary limit closes its own bucket, for no longer than its period, whatever Retry-After says."""
    budget = make_budget(ledger, server.host)
    assert get(budget, f"{server.address}/repos/secondary")[0] == 403
    assert get(budget, f"{server.address}/repos/a")[0] == 200
    before_ms = ledger.now_ms()
    with pytest.raises(Refused) as refused:
        get(budget, f"{server.address}/graphql")
    decision = refused.value.decision
    assert decision.refused_by == "points"
    assert decision.retry_at_ms is not None
    assert decision.retry_at_ms <= before_ms + 60_000


def test_what_upstream_does_not_count_is_given_back(get: Get, server: PlainServer, ledger: Log) -> None:
    budget = make_budget(ledger, server.host)
    assert get(budget, f"{server.address}/repos/same")[0] == 304
    assert get(budget, f"{server.address}/repos/a")[0] == 200
    assert get(budget, f"{server.address}/both/same")[0] == 304
    assert get(budget, f"{server.address}/both/a")[0] == 200
    assert [entry.units for entry in entries(ledger)] == [0, 1, 0, 0, 1, 5], "in both buckets"


def test_an_error_inside_a_good_answer_closes(get: Get, server: PlainServer, ledger: Log) -> None:
    budget, url = make_budget(ledger, server.host), f"{server.address}/graphql"
    assert get(budget, url) == (200, b'{"errors": [{"extensions": {"code": "THROTTLED"}}]}')
    with pytest.raises(Refused):
        get(budget, url)


def test_an_answer_that_is_too_long_to_look_into_arrives_whole(get: Get, server: PlainServer, ledger: Log) -> None:
    budget, url = make_budget(ledger, server.host), f"{server.address}/graphql/long"
    for _ in range(2):
        status, body = get(budget, url)
        assert (status, len(body)) == (200, 3 * MAX_PEEK_BYTES + 51)


def test_what_the_book_lacks_must_be_given(server: PlainServer, ledger: Log) -> None:
    budget = make_budget(ledger, server.host)
    plain: Any = budget.book._replace(hosts=(), routes=())
    budget = budget_of(ledger, *budget.limits, book=plain)
    with pytest.raises(UsageError, match="cost book 'github' has no routes that name the method of a request; give it"):
        requests_adapter(budget)
    with pytest.raises(UsageError, match="no host is given, so nothing would be charged; give the API's host"):
        httpx_transport(budget, "read")


def test_hosts_and_a_method_that_are_given_count_before_the_books(server: PlainServer, ledger: Log) -> None:
    with requests.Session() as session:
        session.trust_env = False
        session.mount("http://", requests_adapter(make_budget(ledger, "api.github.com"), "graphql", hosts=server.host))
        assert session.get(f"{server.address}/repos/a", timeout=100).json() == json.loads('{"errors": []}')
    assert [entry.method for entry in entries(ledger)] == ["graphql"]
