"""An application behind its limits, asked over real HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from quota.inbound import Limit, Rule, Rules, asgi
from support.inbound import run_sql
from support.inbound_http import Client, answer, limited, running, status_of
from support.servers import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from starlette.requests import Request

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
    assert [one.headers["ratelimit-policy"] for one in admitted] == ['"three";q=3;w=60'] * 3
    left = [re.fullmatch(r'"three";r=(\d);t=(\d+)', one.headers["ratelimit"]) for one in admitted]
    assert [one and one[1] for one in left] == ["2", "1", "0"]
    assert all(one is not None and 1 <= int(one[2]) <= 60 for one in left)
    refused = ask()
    assert refused.status == 429
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.headers["cache-control"] == "no-store"
    wait_s = int(refused.headers["retry-after"])
    said = json.loads(refused.body)
    assert said.pop("detail") == f"Too many requests. Come back in {wait_s} s."
    assert said == {
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
        assert got.headers["x-ratelimit-limit"] == "77"
        assert got.headers["x-ratelimit-remaining"] == "2"
        assert raw_answer(client, "/").count(b"\r\nratelimit: ") == 2


def test_methods_and_spellings_of_one_path_share_its_limit(ask: Client) -> None:
    paths = ["/a", "/caf%C3%A9", "/x/../y", "//a//", "/%2e%2e/a", "/%F0%9F%92%A9"]
    methods = ["GET", "HEAD", "OPTIONS", "PUT", "POST", "DELETE"]
    statuses = [ask(path, method).status for path, method in zip(paths, methods, strict=True)]
    assert statuses == [200, 200, 200, 429, 429, 429]


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
    assert {one.status for one in got} == {200}
    assert [ask().status for _ in range(4)] == [200, 200, 200, 429]


def test_behind_a_proxy_the_address_that_the_proxy_wrote_counts(url: str) -> None:
    with limited(answer, url, Rule("three", THREE), trusted_proxies=["127.0.0.1"]) as client:
        forged = [client(X_Forwarded_For=f"198.51.100.{n}, 203.0.113.7").status for n in range(4)]
        assert forged == [200, 200, 200, 429]
        assert client(X_Forwarded_For="203.0.113.8").status == 200
        got = [client(X_Forwarded_For=f"2001:db8::{n}").status for n in range(4)]
        assert got == [200, 200, 200, 429], "one customer's network"


def test_a_body_that_streams_is_passed_on_piece_by_piece(url: str) -> None:
    """The second piece of the answer is sent when the client has sent its own."""

    async def echo(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            message = await receive()
            await send({"type": "http.response.body", "body": message.get("body", b""), "more_body": True})
            if not message.get("more_body"):
                break
        await send({"type": "http.response.body", "body": b""})

    with (
        limited(echo, url, Rule("three", THREE)) as client,
        socket.create_connection(("127.0.0.1", client.port), 10) as raw,
    ):
        raw.sendall(b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
        for piece in (b"one", b"two"):
            raw.sendall(b"3\r\n%s\r\n" % piece)
            got = b""
            while piece not in got:
                more = raw.recv(65_536)
                assert more, "the server has hung up"
                got += more


def test_the_body_of_a_refused_request_is_not_read(url: str) -> None:
    """The answer comes before the body was sent."""
    with limited(answer, url, ONE) as client:
        assert client().status == 200
        with socket.create_connection(("127.0.0.1", client.port), 10) as raw:
            raw.sendall(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000000\r\n\r\n")
            assert raw.recv(65_536).startswith(b"HTTP/1.1 429 ")


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
    said: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            return await answer(scope, receive, send)
        while (message := await receive())["type"] != "lifespan.shutdown":
            said.append(message["type"])
            await send({"type": "lifespan.startup.complete"})
        said.append(message["type"])
        await send({"type": "lifespan.shutdown.complete"})
        return None

    with limited(app, url, ONE) as client:
        assert [client().status for _ in range(3)] == [200, 429, 429]
    assert said == ["lifespan.startup", "lifespan.shutdown"]
    assert handed_over(tmp_path) == [("requests|one|admitted", 1), ("requests|one|refused", 2)]


def handed_over(folder: Path) -> list[tuple[str, int]]:
    sql = "SELECT name, total FROM totals WHERE name LIKE 'requests|%' ORDER BY name"
    return run_sql(folder / "inbound.db", sql)


@pytest.mark.parametrize("raises", [True, False])
def test_without_a_lifespan_of_its_own_an_application_hands_over_too(raises: bool, url: str, tmp_path: Path) -> None:
    """Django raises, others return. Their server may end the process by a signal, behind which nothing runs."""

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
        answers = [client() for _ in range(3)]
        assert [answer.status for answer in answers] == [200] * 3
        assert answers[2].headers["ratelimit"].startswith('"one";r=0;')
