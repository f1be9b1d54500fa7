"""An API that its cost book describes, through each client, over real HTTP: which method a request is, what it costs,
what follows from the answers, and how they settle a call whose price is a bound."""

from __future__ import annotations

import gzip
import io
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any

import aiohttp
import github
import pytest
from github.Requester import HTTPRequestsConnectionClass, HTTPSRequestsConnectionClass, Requester

from quota.budget import Budget
from quota.clients import metering
from quota.clients.answer_fields import NO_USAGE
from quota.clients.httpx import httpx_transport
from quota.clients.requests import requests_adapter
from quota.errors import Refused, UsageError
from quota.ledger.log import Log
from quota.rules.spent import Spent
from quota.settings.books import load_book
from quota.terms.api import RequestBody
from quota.terms.limits import HOUR_MS, MAX_UNITS, Limit, Selector, Sliding, View
from support.books import parse_book
from support.http_clients import BROKEN, CLIENTS, Aiohttp, Httpx, Reply, Requests, asked_once
from support.model import Model
from support.plain_http import Answer, Arrived, PlainServer
from support.setup import budget_of, charges_at, limit

GRANTED_UNITS = 5_000
AHEAD_S = 86_400
"""How far GitHub's clock is ahead."""


@dataclass
class GitHub:
    """Grants 5,000 units until `reset_s` by its own clock: an answer for `PlainServer`."""

    used: int = 0
    reset_s: int = field(default_factory=lambda: int(time.time()) + AHEAD_S + 1_800)

    def __call__(self, _: Arrived) -> Answer:
        left = GRANTED_UNITS - self.used
        headers = {
            "Date": formatdate(time.time() + AHEAD_S, usegmt=True),
            "X-RateLimit-Limit": str(GRANTED_UNITS),
            "X-RateLimit-Remaining": str(max(0, left - 1)),
            "X-RateLimit-Reset": str(self.reset_s),
            "X-RateLimit-Resource": "core",
        }
        if not left:
            return Answer(403, b'{"message": "API rate limit exceeded for user ID 1."}', headers)
        self.used += 1
        return Answer(200, b'{"id": 1, "name": "cat", "full_name": "octo/cat"}', headers)

    def resets_at(self, at_ms: int | None) -> bool:
        """Whether its units come back at this time of our clock. Headers have whole seconds."""
        return abs((at_ms or 0) - 1_000 * (self.reset_s - AHEAD_S)) <= 2_000


@pytest.fixture
def upstream() -> GitHub:
    return GitHub()


@pytest.fixture
def server(upstream: GitHub) -> Iterator[PlainServer]:
    with PlainServer(upstream) as server:
        yield server


def make_budget(ledger: Log, host: str) -> Budget:
    hour = Limit("hour", 4_750, View(Selector(buckets=("core",)), Sliding(HOUR_MS)), GRANTED_UNITS, 250)
    return budget_of(ledger, hour, book=load_book("github")._replace(hosts=(host,)))


Get = Callable[[Budget, str], Reply]


@pytest.fixture
def get(kind: Any) -> Get:
    return lambda budget, url: asked_once(kind, url, budget)


def test_a_first_403_stops_the_next_four_requests(get: Get, upstream: GitHub, server: PlainServer, ledger: Log) -> None:
    """The first 403 says that nothing remains, until when; the other four are refused with that time."""
    budget, url = make_budget(ledger, server.host), f"{server.address}/repos/octo/cat"
    upstream.used = GRANTED_UNITS
    assert get(budget, url) == (403, b'{"message": "API rate limit exceeded for user ID 1."}')
    for _ in range(4):
        with pytest.raises(Refused) as refused:
            get(budget, url)
        decision = refused.value.decision
        assert (decision.reason, decision.refused_by) == ("exhausted", "core")
        assert upstream.resets_at(decision.retry_at_ms)
    assert len(server.arrived) == 1
    assert [entry.units for entry in charges_at(ledger)] == [1, 1], "in both buckets"


def test_the_caller_gives_what_the_book_lacks(server: PlainServer, ledger: Log) -> None:
    budget = make_budget(ledger, server.host)
    plain: Any = budget.book._replace(hosts=(), routes=())
    budget = budget_of(ledger, *budget.limits, book=plain)
    with pytest.raises(UsageError, match="cost book 'github' has no routes that name the method of a request; give it"):
        requests_adapter(budget)
    with pytest.raises(UsageError, match="no host is given, so nothing would be charged; give the API's host"):
        httpx_transport(budget, "read")


def test_hosts_and_a_method_that_are_given_count_before_the_books(server: PlainServer, ledger: Log) -> None:
    client = Requests(make_budget(ledger, "api.github.com"), "rate-limit", hosts=server.host)
    with closing(client):
        assert client.ask(f"{server.address}/repos/a")[0] == 200
    assert [entry.method for entry in charges_at(ledger)] == ["rate-limit"]


def test_no_call_goes_to_a_host_that_an_endpoint_replaces(get: Get, server: PlainServer, ledger: Log) -> None:
    budget = make_budget(ledger, server.host)
    budget.hosts = ("127.0.0.1:1",)
    with pytest.raises(UsageError, match=", its endpoint, and not to "):
        get(budget, f"{server.address}/repos/a")
    assert server.arrived == []


# -- a second program spends the same token, and our count follows what each answer says remains -----------------------


def used(budget: Budget) -> int:
    (state,) = budget.usage()
    return state.used_units


def test_pygithub_is_charged_and_closed_by_its_answers(upstream: GitHub, server: PlainServer, ledger: Log) -> None:
    """A second program spends between the runs of the first. After a call of each, our count is upstream's; it never
    falls."""

    class Metered(HTTPRequestsConnectionClass):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]
            self.session.trust_env = False
            self.session.mount("http://", requests_adapter(budget))

    before = 0
    Requester.injectConnectionClasses(Metered, HTTPSRequestsConnectionClass)
    try:
        for others in (0, 60, 400, 1, 51, 0, 2_000):
            upstream.used += others
            budget = make_budget(ledger, server.host)
            hub = github.Github(auth=github.Auth.Token("t"), base_url=server.address, seconds_between_requests=None)
            assert hub.get_repo("octo/cat").full_name == "octo/cat"
            count = used(budget)
            assert upstream.used - 47 <= count <= upstream.used  # 1 percent of the limit, 4,750
            assert count >= before
            before = count
    finally:
        Requester.resetConnectionClasses()


def test_every_client_follows_and_closes_what_is_used_up(
    upstream: GitHub, server: PlainServer, ledger: Log, get: Get
) -> None:
    budget, url = make_budget(ledger, server.host), f"{server.address}/repos/octo/cat"
    upstream.used = 1_000
    get(budget, url)
    assert used(budget) == 1_001
    upstream.used = 4_999
    get(budget, url)  # the last one that upstream has
    with pytest.raises(Refused) as refused:
        get(make_budget(ledger, server.host), url)
    assert len(server.arrived) == 2
    decision = refused.value.decision
    assert (decision.reason, decision.detail) == ("exhausted", "0 of 5,000 remain")
    assert upstream.resets_at(decision.retry_at_ms)


# -- a call to a language model is charged the most that it may cost, and settled by its answer ------------------------

BOOK = """
api = "model"
source = "https://model.example/limits"
read_on = 2026-11-21
hosts = ["{host}"]
[routes]
"POST /v1/chat" = "chat"
[answers]
units = {units}
[buckets.requests]
quota = 1_000
resets = "24h"
[buckets.tokens]
quota = 1_000_000
resets = "24h"
[default]
get = 1
other = 5
[methods]
chat = [
  {{ bucket = "tokens", reserve = {{ json = "/max_tokens", default = 4_096, bytes_per_unit = 3 }} }},
  {{ units = 1, bucket = "requests" }},
]
"""

BODY_JSON = '{ json = "/usage/total_tokens" }'
HEADER = '{ header = "X-Cost" }'


class World:
    def __init__(self, ledger: Log, model: Model) -> None:
        self.ledger, self.model = ledger, model
        self.where_answers_say_it_in(BODY_JSON)

    def where_answers_say_it_in(self, units: str) -> None:
        book = parse_book(BOOK.format(host=self.model.host, units=units), "model")
        self.budget = budget_of(self.ledger, limit(10_000, name="tokens", buckets=("tokens",)), book=book)

    def tokens(self) -> list[Spent]:
        log = charges_at(self.ledger)
        assert [entry.units for entry in log if entry.bucket == "requests"] == [1] * (len(log) // 2)
        return [entry for entry in log if entry.bucket == "tokens"]


@pytest.fixture(autouse=True)
def _warned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another test has told of once is told again."""
    monkeypatch.setattr(metering, "_warned", set())


@pytest.fixture
def world(ledger: Log) -> Iterator[World]:
    with Model() as model:
        yield World(ledger, model)


@pytest.fixture
def client(kind: Any, world: World) -> Iterator[Any]:
    with closing(kind(world.budget)) as client:
        yield client


BOUND = 1_000
"""The bound of a request, but for what its bytes add."""


def asking(how: str, use: int, max_tokens: int = BOUND) -> dict[str, Any]:
    return {"how": how, "use": use, "max_tokens": max_tokens}


def ask(world: World, kind: Any, how: str, use: int) -> None:
    asked_once(kind, world.model.url, world.budget, verb="POST", json=asking(how, use))


# -- what is charged ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "use"),
    [
        ("json", 1_500),
        ("json", 10**12),
        ("json", 10**15),
        *((how, 70) for how in ("json", "gzip", "br", "events", "no-done", "packed")),
    ],
)
def test_an_answer_with_its_usage_settles_the_call(
    world: World, client: Any, how: str, use: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A figure that no charge can have is no usage."""
    client.ask(world.model.url, "POST", json=asking(how, use))
    (entry,) = world.tokens()
    assert BOUND < entry.charged_units <= BOUND + 40, "with a unit for three bytes of the body"
    bound, is_usage = entry.charged_units, use <= MAX_UNITS
    assert (entry.units, entry.reserved_units) == ((use, 0) if is_usage else (bound, bound))
    assert ("usage_unread" in caplog.text) == (use > MAX_UNITS)


@pytest.mark.parametrize("how", ["silent", "quiet", "cut", "hang-up"])
def test_an_answer_without_a_figure_keeps_the_reservation(
    world: World, client: Any, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    breaks_off = how in ("cut", "hang-up")
    with pytest.raises(BROKEN) if breaks_off else nullcontext():
        client.ask(world.model.url, "POST", json=asking(how, 70))
    (entry,) = world.tokens()
    assert BOUND < entry.units == entry.charged_units == entry.reserved_units
    assert caplog.messages == ([] if breaks_off else [f"usage_unread book=model method=chat: {NO_USAGE}"])


@pytest.mark.parametrize("how", ["torn", "torn-br"])
@pytest.mark.parametrize("kind", [kind for kind in CLIENTS if kind is not Aiohttp])  # which does not tell
def test_a_packed_answer_that_ends_in_the_middle_keeps_the_reservation(world: World, kind: Any, how: str) -> None:
    ask(world, kind, how, 70)
    assert [entry.reserved_units for entry in world.tokens()] == [entry.units for entry in world.tokens()] != [70]


@pytest.mark.parametrize("unread", [RequestBody(gzip.compress(b"{}")), RequestBody(None, 30)])
def test_a_line_says_once_that_the_number_in_a_request_was_not_read(
    world: World, unread: RequestBody, caplog: pytest.LogCaptureFixture
) -> None:
    for body in (RequestBody(b"{}"), unread, unread):
        metering.Meter(world.budget).call("chat", "POST", body)
    assert [message.partition(":")[0] for message in caplog.messages] == ["reserve_unread book=model method=chat"]


def test_a_stream_whose_length_a_header_says_reserves_its_bytes(world: World) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"how": "json", "use": 70}'.ljust(3_000)

    with closing(Aiohttp(world.budget)) as client:
        client.ask(world.model.url, "POST", pieces(), headers={"Content-Length": "3000"})
    assert [entry.charged_units for entry in world.tokens()] == [4_096 + 1_000]


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_field_of_a_form_with_a_file_may_name_any_verb(kind: Any, server: PlainServer, ledger: Log) -> None:
    text = BOOK.format(host=server.host, units=HEADER).replace("POST", "DELETE").replace("other = 5", "other = 1")
    book = parse_book(text, "model")
    budget = budget_of(ledger, limit(10_000, name="tokens", buckets=("tokens",)), book=book)
    form: dict[str, Any] = {"data": {"_method": "DELETE"}, "files": {"file": b"x"}}
    if kind is Requests:
        form["body"] = form.pop("data")
    elif kind is Aiohttp:
        form = {"body": aiohttp.FormData([("_method", "DELETE"), ("file", io.BytesIO(b"x"))])}
    asked_once(kind, f"{server.address}/v1/chat", budget, verb="POST", **form)
    assert charges_at(ledger)[0].method == "chat"


def test_a_header_may_have_the_units_of_a_call(world: World) -> None:
    world.where_answers_say_it_in(HEADER)
    for number, kind in enumerate(CLIENTS):
        ask(world, kind, "header", 30 + number)
    assert [entry.units for entry in world.tokens()] == [*range(30, 30 + len(CLIENTS))]


PEEKED = """
free = [{ json = "/free" }]
closed = [{ status = 200, json = "/error", bucket = "requests", lasts = "60s" }]"""
"""With these rules every body is read ahead of its caller."""


@pytest.mark.parametrize("units", [BODY_JSON, HEADER, BODY_JSON + PEEKED, HEADER + PEEKED])
def test_an_answer_that_nobody_reads_settles_nothing(world: World, units: str) -> None:
    world.where_answers_say_it_in(units)
    url, data = world.model.url, asking("header" if HEADER in units else "json", 0)
    by_requests, by_httpx = Requests(world.budget), Httpx(world.budget)
    by_requests.session.post(url, json=data, timeout=100, stream=True).close()
    with by_httpx.client.stream("POST", url, json=data):
        pass
    by_requests.close()
    by_httpx.close()
    assert [entry.units - entry.charged_units for entry in world.tokens()] == [0, 0]


def test_a_whole_answer_that_frees_its_call_or_closes_a_bucket_by_its_body_settles(world: World, kind: Any) -> None:
    world.where_answers_say_it_in(BODY_JSON + PEEKED)
    ask(world, kind, "free", 12)
    ask(world, kind, "closed", 12)
    with pytest.raises(Refused):
        ask(world, kind, "json", 1)
    assert [entry.units for entry in charges_at(world.ledger)] == [0, 0, 12, 1]


def test_a_run_may_spend_the_unused_part_of_a_reservation(world: World) -> None:
    with Requests(world.budget, max_units=1_200).session as session:
        for use in (70, 80, 600):
            session.post(world.model.url, json=asking("json", use), timeout=100)
        with pytest.raises(Refused) as refused:
            session.post(world.model.url, json=asking("json", 70), timeout=100)
        assert (refused.value.decision.reason, refused.value.decision.remaining_units) == ("run", 450)
        session.post(world.model.url, json=asking("json", 1_500, max_tokens=400), timeout=100)
        with pytest.raises(Refused) as refused:
            session.post(world.model.url, json=asking("json", 1, max_tokens=1), timeout=100)
    assert (refused.value.decision.reason, refused.value.decision.remaining_units) == ("run", 0)
    assert [entry.units for entry in world.tokens()] == [70, 80, 600, 1_500]


def test_no_more_remains_than_upstream_says_once_a_call_has_settled(kind: Any, ledger: Log) -> None:
    """The first call uses more than it reserves, the others less; the last is free. Others spend the same quota."""
    answers = iter(((200, 600, 400), (200, 300, 40), (200, 240, 40), (304, 180, 0)))

    def upstream(_: Arrived) -> Answer:
        status, left, usage = next(answers)
        body = b'{"usage": {"total_tokens": %d}}' % usage if status == 200 else b""
        return Answer(status, body, {"X-Left": str(left)})

    with PlainServer(upstream) as server:
        more = '\nlevels = [{ bucket = "tokens", remaining = "X-Left" }]\nfree = [{ status = 304 }]'
        book = parse_book(BOOK.format(host=server.host, units=BODY_JSON + more), "model")
        budget = budget_of(ledger, limit(1_000, name="tokens", buckets=("tokens",)), book=book)
        for used_units in (400, 700, 760, 820):
            asked_once(kind, f"{server.address}/v1/chat", budget, verb="POST", json={"max_tokens": 100})
            assert used(budget) == used_units
    assert [entry.units for entry in charges_at(ledger)][-2:] == [0, 0], "in both buckets"


# -- streams -----------------------------------------------------------------------------------------------------------


def test_a_caller_settles_only_if_it_reads_to_the_end(world: World, client: Any) -> None:
    for way in getattr(client, "WAYS", ("",)):
        client.way = way
        client.stream(world.model.url, lambda piece: b"[DONE]" in piece, asking("events", 70, 500))
        world.model.go_on.release()
        client.stream(world.model.url, lambda piece: b"data" in piece, asking("steps", 70, 500))
        settled, kept = world.tokens()[-2:]
        assert (settled.units, kept.units) == (70, kept.charged_units), way
        world.model.forget()
