"""An application behind its limits, asked over real HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from quota.inbound import Limit, Rule, Rules, asgi
from quota.inbound.contract import WALL_S
from support.inbound import run_sql
from support.inbound_http import Client, answer, burst, limited, running, serving, status_of
from support.servers import RedisServer, until

MINUTE_MS = 60_000
THREE = Limit(3, MINUTE_MS)
ONE = Rule("one", Limit(1, MINUTE_MS))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'inbound.db'}"


@pytest.fixture
def ask(url: str) -> Iterator[Client]:
    """A client of `answer` behind one rule for everything."""
    with limited(answer, url, Rule("three", THREE)) as client:
        yield client


def raw_answer(client: Client, path: str) -> bytes:
    """The bytes of an answer in lower case, over a connection of its own."""
    with socket.create_connection(("127.0.0.1", client.port)) as raw:
        raw.sendall(b"GET %s HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n" % path.encode())
        return b"".join(iter(lambda: raw.recv(65_536), b"")).lower()


def test_every_answer_tells_the_limit_and_a_refusal_when_to_come_back(ask: Client) -> None:
    admitted = [ask() for _ in range(3)]
    assert [each.headers["ratelimit-policy"] for each in admitted] == ['"three";q=3;w=60'] * 3
    left = [re.fullmatch(r'"three";r=(\d);t=(\d+)', each.headers["ratelimit"]) for each in admitted]
    assert [each and each[1] for each in left] == ["2", "1", "0"]
    assert all(each is not None and 1 <= int(each[2]) <= (60 if each[1] > "0" else 120) for each in left)
    refused = ask()
    assert refused.status == 429
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.headers["cache-control"] == "no-store"
    wait_s = int(refused.headers["retry-after"])
    problem = json.loads(refused.body)
    assert problem.pop("detail") == f"Too many requests. Come back in {wait_s} s."
    assert problem == {
        "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
        "title": "Request cannot be satisfied as assigned quota has been exceeded",
        "status": 429,
        "violated-policies": ["three"],
    }
    effective = re.fullmatch(r'"three";r=0;t=(\d+)', refused.headers["ratelimit"])
    assert effective is not None
    assert 1 <= int(effective[1]) <= wait_s
    assert "x-ratelimit-limit" not in refused.headers


def test_the_x_fields_are_about_the_fuller_of_two_rules(url: str) -> None:
    rules = [Rule("a", Limit(9, MINUTE_MS), path="/a/*"), Rule("b", Limit(5, MINUTE_MS), path="/b")]
    with limited(answer, url, *rules, x_fields=True) as client:
        client("/b")
        got = client("/a/../b")
        assert got.headers["ratelimit-policy"] == '"b";q=5;w=60', "the last of two lines"
        assert (got.headers["x-ratelimit-limit"], got.headers["x-ratelimit-remaining"]) == ("5", "3")
        text = raw_answer(client, "/a/../b")
        assert text.count(b"\r\nratelimit: ") == 2
        assert text.count(b"\r\nx-ratelimit-remaining: ") == 1


def test_the_applications_own_limit_fields_stay(url: str) -> None:
    async def own(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"RateLimit", b'"own";r=1;t=2'), (b"X-RateLimit-Limit", b"77")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body"})

    with limited(own, url, Rule("three", THREE), x_fields=True) as client:
        got = client()
        assert [row for row in got.headers.items() if row[0].startswith("x-")] == [("x-ratelimit-limit", "77")]
        assert raw_answer(client, "/").count(b"\r\nratelimit: ") == 2


@pytest.mark.parametrize("rule", ["/login", "/api/login"])
@pytest.mark.parametrize("where", ["alone", "mounted", "root_path", "cut off"])
def test_every_request_that_reaches_a_handler_counts(where: str, rule: str, url: str) -> None:
    """The same handler is called `/api/login` outside and `/login` inside, and routers match a last line feed, too."""

    def login(_: Request) -> PlainTextResponse:
        return PlainTextResponse("here")

    app = Starlette(routes=[Route("/login", login)])
    rules = Rules([Rule("login", Limit(1_000, MINUTE_MS), path=rule)], url=url)
    served: Any = asgi(app, rules)
    if where == "mounted":
        served = Starlette(routes=[Mount("/api", served)])
    elif where == "cut off":
        fast = FastAPI()
        fast.root_path = "/api"
        fast.add_api_route("/login", lambda: "here")
        served = asgi(fast, rules)
    paths = ["/login", "/login%0a", "/api/login", "/api/login%0A", "/%6cogin?a", "//login", "/api//login"]
    with running(served, root_path="/api" if where == "root_path" else "") as port, closing(Client(port)) as client:
        answers = [client(path) for path in [*paths, "/x/%2e%2e/login"]]
    reached = [answer for answer in answers if b"here" in answer.body]
    assert reached
    if where != "alone" or rule == "/login":
        assert all("ratelimit" in answer.headers for answer in reached)


def test_the_folder_that_a_quart_lies_in_is_nothing_it_is_mounted_under(url: str, tmp_path: Path) -> None:
    class Quart:
        root_path = str(tmp_path)

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await answer(scope, receive, send)

    served = asgi(Quart(), Rules([Rule("login", Limit(1, MINUTE_MS), path="/login")], url=url))
    with running(served, root_path="/api") as port, closing(Client(port)) as client:
        assert [client("/login").status for _ in range(2)] == [200, 429]


@pytest.mark.parametrize("strict", ["files", "login"])
def test_a_path_that_may_mean_two_things_is_held_to_both_rules(strict: str, url: str) -> None:
    limits = {"files": Limit(100, MINUTE_MS), "login": Limit(100, MINUTE_MS), strict: Limit(1, MINUTE_MS)}
    rules = [Rule("files", limits["files"], path="/files/*"), Rule("login", limits["login"], path="/login")]
    with limited(answer, url, *rules) as client:
        assert client("/files/../login").headers["ratelimit-policy"].count(";w=60") == 1
        refused = client("/files/../login")
        assert (refused.status, json.loads(refused.body)["violated-policies"]) == (429, [strict])


def test_a_refused_head_has_no_body(ask: Client) -> None:
    for _ in range(3):
        ask()
    refused = ask(method="HEAD")
    assert (refused.status, refused.body) == (429, b"")
    assert int(refused.headers["content-length"]) > 100
    assert ask().status == 429, "the connection still works"


def test_a_preflight_is_answered_by_the_application_and_not_counted(ask: Client) -> None:
    asked = {"Origin": "https://a.example", "Access_Control_Request_Method": "POST"}
    got = [ask(method="OPTIONS", **asked) for _ in range(5)]
    assert {each.status for each in got} == {200}
    got = [ask(method="OPTIONS", **asked, **{"X_METHOD-OVERRIDE": "GET"}) for _ in range(4)]
    assert [each.status for each in got] == [200, 200, 200, 429], "the application may read a GET in it"


def test_behind_a_proxy_the_address_that_the_proxy_wrote_counts(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """And no log has it."""
    caplog.set_level(logging.DEBUG)
    with limited(answer, url, Rule("three", THREE), trusted_proxies=["127.0.0.1"]) as client:
        forged = [client(X_Forwarded_For=f"198.51.100.{n}, 203.0.113.7").status for n in range(4)]
        assert forged == [200, 200, 200, 429]
        assert client(X_Forwarded_For="203.0.113.8").status == 200
        got = [client(X_Forwarded_For=f"2001:db8::{n}").status for n in range(4)]
        assert got == [200, 200, 200, 429], "one customer's network"
    assert "203.0.113" not in caplog.text


def test_a_client_that_goes_away_is_counted(url: str) -> None:
    came = threading.Semaphore(0)

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            came.release()
        await answer(scope, receive, send)

    with limited(noting, url, Rule("three", THREE)) as client:
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", client.port), 10) as raw:
                raw.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            assert came.acquire(timeout=100), "nobody listens any more, and the request is decided"
        assert client().status == 429


async def websocket_app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "websocket":
        return await answer(scope, receive, send)
    await receive()
    await send({"type": "websocket.accept", "headers": []})
    await send({"type": "websocket.send", "text": "hello"})
    await send({"type": "websocket.close"})
    return None


def test_a_websocket_is_refused_at_its_handshake(url: str) -> None:
    with limited(websocket_app, url, ONE) as client:
        chat = f"ws://127.0.0.1:{client.port}/chat"
        with connect(chat) as socket_:
            assert socket_.recv() == "hello"
            assert socket_.response is not None
            assert socket_.response.headers["ratelimit-policy"] == '"one";q=1;w=60'
        with pytest.raises(InvalidStatus) as refused, connect(chat):
            pass
        response = refused.value.response
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert json.loads(bytes(response.body or b""))["violated-policies"] == ["one"]
        assert client().status == 429, "it shares its limit with requests"


def test_a_server_that_cannot_send_a_whole_answer_refuses_with_403(url: str) -> None:
    served = asgi(websocket_app, Rules([ONE], url=url))

    async def without_extensions(scope: Any, receive: Any, send: Any) -> None:
        await served({**scope, "extensions": {}}, receive, send)

    with running(without_extensions) as port:
        assert status_of(port) == 200
        with pytest.raises(InvalidStatus) as refused, connect(f"ws://127.0.0.1:{port}/chat"):
            pass
        assert refused.value.response.status_code == 403


def test_the_lifespan_passes_and_its_end_reports_counts(url: str, tmp_path: Path) -> None:
    events: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            return await answer(scope, receive, send)
        while (message := await receive())["type"] != "lifespan.shutdown":
            events.append(message["type"])
            await send({"type": "lifespan.startup.complete"})
        events.append(message["type"])
        await send({"type": "lifespan.shutdown.complete"})
        return None

    with limited(app, url, ONE) as client:
        assert [client().status for _ in range(3)] == [200, 429, 429]
    assert events == ["lifespan.startup", "lifespan.shutdown"]
    assert handed_over(tmp_path) == [("requests|one|admitted", 1), ("requests|one|refused", 2)]


def handed_over(folder: Path) -> list[tuple[str, int]]:
    sql = "SELECT name, total FROM totals WHERE name LIKE 'requests|%' ORDER BY name"
    return run_sql(folder / "inbound.db", sql)


@pytest.mark.parametrize("raises", [True, False])
def test_without_a_lifespan_of_its_own_an_application_hands_over_too(raises: bool, url: str, tmp_path: Path) -> None:
    """Django raises, others return. Their server may end the process by a signal, after which nothing runs."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" or raises:
            await answer(scope, receive, send)

    with running(asgi(app, Rules([ONE], url=url)), lifespan="on") as port, closing(Client(port)) as client:
        assert [client().status for _ in range(3)] == [200, 429, 429]
    assert handed_over(tmp_path) == [("requests|one|admitted", 1), ("requests|one|refused", 2)]


def test_a_start_that_fails_stays_a_failure(url: str) -> None:
    async def app(_: Any, receive: Any, __: Any) -> None:
        await receive()
        raise OSError("no database")

    async def received() -> Any:
        return {"type": "lifespan.startup"}

    async def sent(message: Any) -> None:
        raise AssertionError(message)

    with pytest.raises(OSError, match="no database"):
        asyncio.run(asgi(app, Rules([ONE], url=url))({"type": "lifespan"}, received, sent))


def test_counts_are_reported_while_the_server_runs(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quota.inbound.deciding.HAND_OVER_S", 0.05)
    with limited(answer, url, Rule("three", THREE)) as client:
        assert [client().status for _ in range(2)] == [200, 200]
        until(lambda: handed_over(tmp_path) == [("requests|three|admitted", 2)])


def test_a_shadow_rule_counts_and_refuses_nobody(url: str) -> None:
    with limited(answer, url, Rule("one", Limit(1, MINUTE_MS), shadow=True)) as client:
        answers = [(answer.status, answer.headers.get("ratelimit")) for answer in (client(), client(), client())]
        assert answers == [(200, None)] * 3, "a client that reads it would stop"


# -- outages and workers -----------------------------------------------------------------------------------------------

GENEROUS_S = 40 * WALL_S
"""For a machine that does much else meanwhile."""


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.close()


@pytest.mark.parametrize("stopped", [False, True], ids=["killed", "silent"])
def test_fail_decides_while_redis_is_away(
    stopped: bool, own_server: RedisServer, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    """In time, and the log has one line."""
    caplog.set_level(logging.INFO, logger="quota")
    hundred = Limit(100, MINUTE_MS)
    rules = [
        Rule("open", hundred, path="/open"),
        Rule("closed", hundred, path="/closed", fail="closed"),
        Rule("shadow", hundred, path="/shadow", fail="closed", shadow=True),
    ]
    with running(asgi(answer, Rules(rules, url=own_server.url))) as port:
        ask = Client(port)
        assert [ask(path).status for path in ("/open", "/closed", "/shadow")] == [200, 200, 200]
        request.getfixturevalue("real_walls")  # not before: a busy machine may be slower than they are
        if stopped:
            os.kill(own_server.pid, signal.SIGSTOP)
        else:
            own_server.kill()
        got = [ask(path) for path in ("/open", "/closed", "/shadow") * 3]
        assert [each.status for each in got] == [200, 503, 200] * 3
        assert max(each.answered_s - each.asked_s for each in got) < GENEROUS_S
        # After three failures nobody waits any more.
        quick = [ask("/closed") for _ in range(20)]
        assert sorted(each.answered_s - each.asked_s for each in quick)[5] < WALL_S
        closed = got[1]
        assert closed.headers["content-type"] == "application/problem+json"
        assert closed.headers["cache-control"] == "no-store"
        assert int(closed.headers["retry-after"]) >= 1
        assert closed.headers["ratelimit-policy"] == '"closed";q=100;w=60'
        assert "ratelimit" not in closed.headers
        assert "ratelimit" not in got[0].headers
        if stopped:
            os.kill(own_server.pid, signal.SIGCONT)
        else:
            own_server.start()
        until(lambda: ask("/closed").status == 200)  # the breaker tries once a second
        ask.close()
    events = [record.getMessage().split()[0] for record in caplog.records if record.name == "quota"]
    assert events == ["inbound_storage_away", "inbound_storage_back"]


RULES = """
[inbound]
url = "URL"

[inbound.exact]
algorithm = "log"
fail = "closed"
limit = 200
window = "1h"
"""


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_clients_at_once_are_admitted_exactly(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = "sqlite:///inbound.db" if kind == "sqlite" else request.getfixturevalue("server").url
    (tmp_path / "quota.toml").write_text(RULES.replace("URL", url), encoding="utf-8")
    with serving(tmp_path, "4") as served:
        admitted = [answer for answer in burst(served.port, "/", 240) if answer.admitted]
    assert len(admitted) == 200
    assert len({answer.body for answer in admitted}) > 1, "one worker answered everything"
