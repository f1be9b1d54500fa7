"""An API that its cost book describes, through each client, over real HTTP: which method a request is, what it costs,
and what follows from the answers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import github
import gspread
import pytest
import requests
import trustme
from github.Requester import HTTPRequestsConnectionClass, HTTPSRequestsConnectionClass, Requester

import quota
from quota.budget import Budget
from quota.clients.gate import MAX_PEEK_BYTES
from quota.clients.httpx import httpx_transport
from quota.clients.requests import requests_adapter
from quota.errors import Refused, UsageError
from quota.ledger.factory import open_ledger
from quota.ledger.log import Log
from quota.rules.spent import Spent
from quota.settings.books import default_limits
from quota.terms.limits import HOUR_MS, Limit, Selector, Sliding, View
from support.books import parse_book
from support.certificates import Pair
from support.commands import Quota
from support.http_clients import CLIENTS, Reply, Requests, asked_once
from support.plain_http import Answer, Arrived, PlainServer
from support.proxy import Proxy
from support.servers import RedisServer
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


Get = Callable[[Budget, str], Reply]


@pytest.fixture(params=CLIENTS, ids=lambda kind: kind.__name__)
def get(request: pytest.FixtureRequest) -> Get:
    return lambda budget, url: asked_once(request.param, url, budget)


def test_a_first_403_stops_the_next_four_requests(get: Get, server: PlainServer, ledger: Log) -> None:
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


def test_the_routes_set_the_cost_of_a_request(get: Get, server: PlainServer, ledger: Log) -> None:
    budget = make_budget(ledger, server.host)
    for path in ("/repos/a/b?page=2", "/graphql/x", "/users/17", "/users/18"):
        assert get(budget, server.address + path)[0] == 200
    charged = [(entry.method, entry.units, entry.bucket) for entry in entries(ledger)]
    unknown = ("GET **", 3, "core")
    assert charged == [("read", 1, "core"), ("graphql", 2, "points"), unknown, unknown]


def test_a_request_that_upstream_does_not_count_is_refunded(get: Get, server: PlainServer, ledger: Log) -> None:
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


def test_the_caller_gives_what_the_book_lacks(server: PlainServer, ledger: Log) -> None:
    budget = make_budget(ledger, server.host)
    plain: Any = budget.book._replace(hosts=(), routes=())
    budget = budget_of(ledger, *budget.limits, book=plain)
    with pytest.raises(UsageError, match="cost book 'github' has no routes that name the method of a request; give it"):
        requests_adapter(budget)
    with pytest.raises(UsageError, match="no host is given, so nothing would be charged; give the API's host"):
        httpx_transport(budget, "read")


def test_hosts_and_a_method_that_are_given_count_before_the_books(server: PlainServer, ledger: Log) -> None:
    client = Requests(make_budget(ledger, "api.github.com"), "graphql", hosts=server.host)
    with closing(client):
        assert client.ask(f"{server.address}/repos/a")[0] == 200
    assert [entry.method for entry in entries(ledger)] == ["graphql"]


# -- a second program spends the same token, and our count follows what each answer says remains -----------------------

COUNTED = """
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


@dataclass
class Counting:
    """Grants `limit` units until `reset_s`, as GitHub does: an answer for `PlainServer`. `bodies` are by path."""

    limit: int = 5_000
    used: int = 0
    reset_s: int = field(default_factory=lambda: int(time.time()) + 1_800)
    bodies: dict[str, bytes] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, request: Arrived) -> Answer:
        if request.verb == "CONNECT":
            return Answer()
        with self._lock:
            left = max(0, self.limit - self.used)
            self.used = min(self.limit, self.used + 1)
            headers = {
                "X-RateLimit-Limit": str(self.limit),
                "X-RateLimit-Remaining": str(max(0, left - 1)),
                "X-RateLimit-Reset": str(self.reset_s),
                "X-RateLimit-Resource": "core",
            }
        if not left:
            return Answer(403, b'{"message": "API rate limit exceeded for user ID 1."}', headers)
        return Answer(200, self.bodies.get(request.target.partition("?")[0], b"{}"), headers)


@pytest.fixture
def upstream() -> Counting:
    return Counting()


@pytest.fixture
def counting(upstream: Counting) -> Iterator[PlainServer]:
    with PlainServer(upstream) as server:
        yield server


def opened(ledger: Log, host: str, project: str = "p", clock: Callable[[], int] | None = None) -> Budget:
    """A budget, as each run of a program has one."""
    book = parse_book(COUNTED.format(host=host), "example")
    limits = default_limits(book)
    return budget_of(ledger, *limits, project=project, book=book, clock=clock)


def used(budget: Budget) -> int:
    (state,) = budget.usage()
    return state.used_units


def follows(upstream: Counting, opened: Callable[[], Budget], call: Callable[[Budget], object]) -> None:
    """Runs of a program, between which a second program spends: after one call of each our count is upstream's, and it
    never falls."""
    before = 0
    for others in (0, 60, 400, 1, 51, 0, 2_000):
        upstream.used = min(upstream.limit, upstream.used + others)  # a second program spends, and knows nothing of us
        budget = opened()
        call(budget)
        count = used(budget)
        assert upstream.used - 47 <= count <= upstream.used  # 1 percent of the limit, 4,750
        assert count >= before
        before = count


# -- real packages, as they are ----------------------------------------------------------------------------------------


def test_pygithub_is_charged_and_closed_by_its_answers(upstream: Counting, counting: PlainServer, ledger: Log) -> None:
    upstream.bodies["/repos/octo/cat"] = json.dumps({"id": 1, "name": "cat", "full_name": "octo/cat"}).encode()

    def call(budget: Budget) -> None:
        class Metered(HTTPRequestsConnectionClass):
            def __init__(self, *args: object, **kwargs: object) -> None:
                super().__init__(*args, **kwargs)  # type: ignore[arg-type]
                self.session.trust_env = False
                self.session.mount("http://", requests_adapter(budget))

        Requester.injectConnectionClasses(Metered, HTTPSRequestsConnectionClass)
        try:
            hub = github.Github(auth=github.Auth.Token("t"), base_url=counting.address, seconds_between_requests=None)
            assert hub.get_repo("octo/cat").full_name == "octo/cat"
        finally:
            Requester.resetConnectionClasses()

    follows(upstream, lambda: opened(ledger, counting.host), call)


def test_gspread_is_charged_and_ignores_a_gateways_limits(
    upstream: Counting, counting: PlainServer, ledger: Log, tmp_path: Path
) -> None:
    """Google's own answers do not say what remains; those of a gateway before it may."""
    certificate, key, authority = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem"
    signer = trustme.CA()
    issued = signer.issue_cert("sheets.googleapis.com")
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    signer.cert_pem.write_to_path(authority)
    upstream.bodies["/v4/spreadsheets/an-id/values/A1%3AB1"] = b'{"range": "A1:B1", "values": [["1", "2"]]}'
    sheet = {"properties": {"sheetId": 0, "title": "One", "index": 0, "gridProperties": {}}}
    upstream.bodies["/v4/spreadsheets/an-id"] = json.dumps({"properties": {"title": "T"}, "sheets": [sheet]}).encode()

    def call(budget: Budget) -> None:
        with requests.Session() as session:
            session.trust_env, session.verify = False, str(authority)
            session.proxies = {"https": google.address.replace("https", "http")}
            session.mount("https://", requests_adapter(budget))
            assert gspread.Client(None, session=session).open_by_key("an-id").title == "T"  # type: ignore[arg-type]

    with PlainServer(upstream, Pair(certificate, key)) as behind, PlainServer(upstream, to=behind.host) as google:
        follows(upstream, lambda: opened(ledger, "sheets.googleapis.com"), call)


def test_every_client_follows_and_closes_what_is_used_up(
    upstream: Counting, counting: PlainServer, ledger: Log, get: Get
) -> None:
    budget = opened(ledger, counting.host)
    upstream.used = 1_000
    get(budget, counting.address)
    assert used(budget) == 1_001
    upstream.used = 4_999
    get(budget, counting.address)  # the last one that upstream has
    with pytest.raises(Refused) as refused:
        get(opened(ledger, counting.host), counting.address)
    assert len(counting.arrived) == 2
    decision = refused.value.decision
    assert (decision.reason, decision.detail) == ("exhausted", "0 of 5,000 remain")
    assert abs((decision.retry_at_ms or 0) - 1_000 * upstream.reset_s) <= 2_000  # headers have whole seconds


def test_status_names_the_units_of_others(
    upstream: Counting, counting: PlainServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = Quota(tmp_path)
    monkeypatch.setenv("QUOTA_STATE_DIR", command.env["QUOTA_STATE_DIR"])
    (tmp_path / "example.toml").write_text(COUNTED.format(host=counting.host), encoding="utf-8")
    config = command.configure(
        '[ledger]\nurl = "sqlite:///ledger.db"\n[credentials.main]\napi = "example.toml"\nproject = "p"\n'
    )
    upstream.used = 4_900
    with quota.open(config) as q:
        asked_once(Requests, counting.address, q.budget())
        assert used(q.budget()) == 4_901
        with pytest.raises(Refused):
            asked_once(Requests, counting.address, q.budget())
    shown = " ".join(command("status").stdout.split())
    assert "hour: 4,900 units used by others, as upstream said, until" in shown
    assert "hour 1h 4,901 4,750 0" in shown
    explained = " ".join(command("explain").stdout.split())
    assert "Filled by: others, as upstream said: 4,900 of 4,901" in explained


def test_evidence_adds_no_cost_to_a_decision(
    redis_server: RedisServer, upstream: Counting, counting: PlainServer
) -> None:
    """An answer that changes nothing asks nobody; one that does asks at most once a second."""
    now_ms = time.time_ns() // 1_000_000
    with Proxy(redis_server.port) as proxy:
        ledger = open_ledger(proxy.url, clock=lambda: now_ms)
        project = f"p{now_ms}"

        def trips(budget: Budget, calls: int) -> int:
            before = proxy.trips
            for _ in range(calls):
                asked_once(Requests, counting.address, budget)
            return proxy.trips - before

        budget = opened(ledger, counting.host, project=project, clock=lambda: now_ms)
        upstream.used += 500
        trips(budget, 1)  # connects, begins the log, and loads the scripts
        assert trips(budget, 5) == 5
        upstream.used += 500
        assert trips(budget, 5) == 5, "told within this second"
        now_ms += 1_000
        assert trips(budget, 5) == 5 + 2, "a look, and an entry"
        assert used(budget) == upstream.used
        ledger.close()
