"""What the proxy sends for a request, what it passes back, and what it charges."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from collections.abc import Iterator

import pytest
from googleapiclient.discovery import build

from quota.jobs.emulator import Emulator
from support.plain_http import Reached, answer
from support.proxying import BOOK, SECRET, House
from support.servers import free_port
from support.setup import charges_at, ids_of

EXHAUSTED = b'{"error": {"errors": [{"reason": "quotaExceeded"}], "code": 403, "message": "used up"}}'
TOKEN = "t-o-k-e-n"  # noqa: S105  # of the test


def tube(address: str) -> str:
    return f'[credentials.tube]\napi = "youtube-v3"\nkey = "file:key"\nendpoint = "{address}"\n'


def test_a_request_leaves_as_it_came_with_the_key_in_place_of_the_callers(house: House) -> None:
    """Beside the key, only fields about the caller's own connection are taken off."""
    sent = {
        "Authorization": "Bearer theirs",
        "Accept": "text/x-thing",
        "X-Thing": "a, b",
        "Cookie": "one=1",
        "X_Drop": "1",
        "Connection": "keep-alive, X-Drop",
        "TE": "trailers",
        "Forwarded": "for=1.2.3.4",
        "X-Forwarded-For": "1.2.3.4",
        "Proxy_Authorization": "Basic eDp5",
        "Quota-Job": "etl",
    }
    with house.open():
        assert house.ask("/things/a%2Fb/@me?x=%20y&y=1+2&x=%C3%BC&z", "PUT", b"four", sent).status == 200
    (reached,) = house.upstream.reached
    assert reached.head.split(b"\r\n")[0] == b"PUT /things/a%2Fb/@me?x=%20y&y=1+2&x=%C3%BC&z HTTP/1.1"
    assert sorted(reached.fields) == [
        ("accept", "text/x-thing"),
        ("accept-encoding", "identity"),
        ("authorization", f"Bearer {SECRET}"),
        ("content-length", "4"),
        ("cookie", "one=1"),
        ("host", house.upstream.host),
        ("x-thing", "a, b"),
    ]
    assert reached.body == b"four"


def test_the_callers_google_credentials_do_not_leave(house: House) -> None:
    theirs = "key=a&access_token=b&oauth_token=c&%6Fauth_token=d"
    headers = ["x_goog-api_key", "x-serverless-authorization", "x-identity-trust-boundary"]
    headers += ["x-allowed-locations", "x-goog-iam-authorization-token", "x-goog-iam-authority-selector"]
    with house.open(rest=tube(house.upstream.address)):
        target = f"/youtube/v3/videos?id=a&{theirs}&part=id"
        assert house.ask("/things", headers=dict.fromkeys(headers, "theirs")).status == 200
        assert house.ask(target, headers=dict.fromkeys(headers, "theirs"), credential="tube").status == 200
    other, reached = house.upstream.reached
    assert [name for name in headers if other.field(name) or reached.field(name) not in (None, SECRET)] == []
    assert (reached.target, reached.field("x-goog-api-key")) == ("/youtube/v3/videos?id=a&part=id", SECRET)


def test_an_upload_is_charged_when_it_is_opened_and_its_parts_are_free(house: House) -> None:
    upload, put = "/upload/youtube/v3/videos?uploadType=resumable&part=id", {"X-HTTP-Method-Override": "PUT"}
    with house.open(rest=tube(house.upstream.address)):
        opened = house.ask(upload, "POST", b"{}", credential="tube")
        assert (opened.field("quota-charge") or "").endswith("units=100")
        part = f"{upload}&upload_id=a"
        house.upstream.answer = lambda _: [answer(EXHAUSTED, status="403 Forbidden")]
        assert house.ask(part, "PUT", b"part", credential="tube").field("quota-charge") is None
        house.upstream.answer = lambda _: [answer(b"{}")]
        assert house.ask(part, "POST", b"part", put, credential="tube").field("quota-charge") is not None
    assert [reached.body for reached in house.upstream.reached] == [b"{}", b"part", b"part"]


@pytest.mark.parametrize(("protocol", "status"), [("websocket", 501), ("foo/2, h2c", 501), ("h2c", 200)])
def test_an_upgrade_does_not_leave(house: House, protocol: str, status: int, caplog: pytest.LogCaptureFixture) -> None:
    """curl and Java offer h2c with plain requests, and are content with HTTP/1.1."""
    with house.open():
        got = house.ask("/things", headers={"Connection": "Upgrade", "Upgrade": protocol})
        left = int(status == 200)
        assert (got.status, len(house.upstream.reached), house.units) == (status, left, left)
    if not left:
        assert "ask without Upgrade" in got.problem["detail"]
    assert "pgrade" not in caplog.text, "uvicorn's advice would not help"


def test_an_answer_comes_back_as_it_was(house: House) -> None:
    """Its Date, fields that are sent twice, a packed body: all of it, and beside it what was charged."""
    body = gzip.compress(b"packed " * 100)
    headers = (
        "Date: Wed, 01 Jan 2020 00:00:00 GMT",
        "Server: theirs",
        "Set-Cookie: a=1",
        "Set-Cookie: b=2",
        "Content-Encoding: gzip",
        "Keep-Alive: timeout=5",
        "Quota-Charge: false",
    )
    house.upstream.answer = lambda _: [answer(body, *headers, status="207 Multi-Status")]
    with house.open():
        got = house.ask("/search/x")
        (charge,) = house.spent()
    assert (got.status, got.body) == (207, body)
    assert got.fields == [
        ("content-length", str(len(body))),
        ("date", "Wed, 01 Jan 2020 00:00:00 GMT"),
        ("server", "theirs"),
        ("set-cookie", "a=1"),
        ("set-cookie", "b=2"),
        ("content-encoding", "gzip"),
        ("quota-charge", f"{charge.id[0]}-{charge.key}; units=10"),
    ]


def test_a_redirect_is_passed_back_and_no_cookie_is_kept(house: House) -> None:
    fields = ("Location: https://elsewhere.example/", "Set-Cookie: a=1")
    house.upstream.answer = lambda _: [answer(b"", *fields, status="302 Found")]
    with house.open():
        got = house.ask("/things")
        assert (got.status, got.field("location")) == (302, "https://elsewhere.example/")
        house.ask("/things")
    assert [request.field("cookie") for request in house.upstream.reached] == [None, None]


def test_the_routes_set_the_charge_and_two_fields_name_the_spender(house: House) -> None:
    with house.open():
        for target, verb in (("/search/a", "GET"), ("/things", "GET"), ("/things", "POST"), ("/status", "GET")):
            house.ask(target, verb, headers={"Quota-Job": "etl", "Quota-Region": "DE"})
        assert house.ask("/status").field("quota-charge") is None
        spent = [(entry.method, entry.units, entry.job, entry.region) for entry in house.spent()]
        assert house.ask("/things", headers={"Quota-Job": "x" * 65}).problem["detail"].startswith("job ")
    assert spent == [("search", 10, "etl", "DE"), ("read", 1, "etl", "DE"), ("write", 5, "etl", "DE")]
    assert len(house.upstream.reached) == 5


def test_a_refused_request_gets_retry_after_and_nothing_leaves(house: House, caplog: pytest.LogCaptureFixture) -> None:
    with house.open(limit=10):
        assert house.ask("/search/a?secret=1").status == 200
        got = house.ask("/things?secret=1", headers={"Quota-Job": "etl"})
        decision = got.problem["decision"]
        assert (got.status, decision["reason"], decision["refused_by"]) == (429, "limit", "hour")
        assert got.field("x-should-retry") == "false", "as SDKs ask for it"
        after_s = int(got.field("retry-after") or "")
        assert decision["retry_after_ms"] <= after_s * 1_000 < decision["retry_after_ms"] + 1_000
        assert 3_500 < after_s <= 3_600
        assert house.ask("/things", headers={"Quota-Job": "x" * 3_000}).status == 400
        assert house.units == 10
    assert len(house.upstream.reached) == 1
    message, long = [record.getMessage() for record in caplog.records if "proxy_refused" in record.getMessage()]
    assert "credential=main job=etl reason=limit" in message
    assert len(long) < 500
    assert "secret" not in caplog.text


def test_a_request_that_can_never_be_charged_is_not_sent(house: House) -> None:
    with house.open():
        assert house.ask("/dear", "POST").status == 422
        assert house.ask("/chat", "POST", b'{"max_tokens": 1000000001}').status == 422
        detail = house.ask("/x", credential="mian").problem["detail"]
        assert detail == "Ask for /CREDENTIAL/PATH: there is no credential 'mian' here; did you mean 'main'?"
        assert (house.ask("/x", credential="mian").status, house.units) == (404, 0)
    assert house.upstream.reached == []


def test_a_peek_sends_nothing(house: House) -> None:
    with house.open(limit=15):
        asked = {"Quota-Peek": "1"}
        got = house.ask("/search/a", headers=asked)
        assert (got.status, json.loads(got.body)["cost_units"], house.units) == (200, 10, 0)
        house.ask("/search/a")
        got = house.ask("/search/a", headers=asked)
        assert (got.status, got.problem["decision"]["reason"], house.units) == (429, "limit", 10)
        assert house.ask("/dear", "POST", headers=asked).status == 422
    assert len(house.upstream.reached) == 1


def test_the_allowance_decides_without_the_ledger(house: House) -> None:
    away = f"redis://127.0.0.1:{free_port()}/0"
    with house.open(ledger=away):
        got = house.ask("/things")
        assert (got.status, got.problem["decision"]["reason"]) == (503, "ledger-unavailable")
        assert house.ask("", credential="healthz").status == 503
    with house.open(ledger=away, more="unavailable = { max_cost = 1, allowance = 2, machines = 1 }"):
        assert house.ask("", credential="healthz").status == 200
        assert [house.ask("/things").status for _ in range(3)] == [200, 200, 503]
        assert house.ask("", credential="healthz").status == 503, "the allowance is drawn"
        assert house.ask("/search/x").status == 503
    assert len(house.upstream.reached) == 2


def test_an_answer_that_closes_a_bucket_holds_for_everybody(house: House) -> None:
    """It may be packed, as the caller asked for; its reader gets it as it is."""
    book = """closed = [{ status = 403, body = "too many", lasts = "10m" }]"""
    text = BOOK[: BOOK.index("[answers]")] + f"[answers]\n{book}\n"
    body = gzip.compress(b"far too many requests")
    house.upstream.answer = lambda _: [answer(body, "Content-Encoding: gzip", status="403 No")]
    with house.open(book=text):
        got = house.ask("/things", headers={"Accept-Encoding": "br, gzip;q=0.5"})
        assert (got.status, got.body) == (403, body)
        got = house.ask("/things")
        assert (got.status, got.problem["decision"]["reason"]) == (429, "exhausted")
        assert 590 < int(got.field("retry-after") or "") <= 661  # with the machine's own minute
    assert [request.field("accept-encoding") for request in house.upstream.reached] == ["gzip"]


def test_a_bound_is_charged_and_settled_by_what_the_answer_says(house: House) -> None:
    body = b'{"usage": 7}'
    house.upstream.answer = lambda _: [answer(body)]
    text = BOOK.replace("default = 100 }", "default = 100, bytes_per_unit = 2_000 }")
    with house.open(limit=9_000, book=text.replace("closed = [", "free = [{ status = 304 }]\nclosed = [")):
        got = house.ask("/chat", "POST", b'{"max_tokens": 300}')
        assert (got.body, got.field("quota-charge"), house.units) == (body, f"{ids_of(house.spent())[0]}; units=301", 7)
        house.upstream.answer = lambda _: [answer(gzip.compress(body), "Content-Encoding: gzip")]
        got = house.ask("/chat", "POST", b'{"max_tokens": 300, "rest": "' + b"x" * 200_000 + b'"}')
        assert ((got.field("quota-charge") or "").partition("; ")[2], house.units) == ("units=401", 14)
        house.upstream.answer = lambda _: [answer(b"{}")]
        house.ask("/chat", "POST", b'{"max_tokens": 300}')
        assert house.units == 315
        house.upstream.answer = lambda _: [answer(b"", status="304 Not Modified")]
        assert (house.ask("/chat", "POST", iter([b"x" * 16_200_000])).field("quota-charge"), house.units) == (None, 315)
        assert house.spent()[-1].charged_units > 100 + 16_000_000 // 2_000


def test_events_come_one_by_one_and_the_last_one_settles(house: House) -> None:
    """Each is read before the next one is sent."""
    read = threading.Event()

    def events(_: Reached) -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        for n in range(5):
            event = b'data: {"usage": %d}\n\n' % n
            read.clear()
            yield b"%x\r\n%s\r\n" % (len(event), event)
            assert read.wait(100)
        yield b"0\r\n\r\n"

    house.upstream.answer = events
    with house.open():
        with socket.create_connection(("127.0.0.1", house.port), timeout=60) as connection:
            connection.sendall(b"POST /main/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
            got = b""
            for n in range(5):
                while b'"usage": %d}\n\n' % n not in got:
                    piece = connection.recv(4_096)
                    assert piece, got
                    got += piece
                read.set()
            while not got.endswith(b"0\r\n\r\n"):
                got += connection.recv(4_096)
        assert house.units == 4


def test_only_requests_that_never_left_are_refunded(house: House, caplog: pytest.LogCaptureFixture) -> None:
    with house.open(address=f"http://127.0.0.1:{free_port()}"):
        got = house.ask("/things", "POST", b"x")
        assert (got.status, house.units, got.field("quota-charge")) == (502, 0, None)
        assert "127.0.0.1" in got.problem["detail"]
    house.upstream.answer = lambda request: [answer(b"{}")] if len(house.upstream.reached) % 2 else [b""]
    with house.open():  # what is sent on a connection that dies is not sent again
        answers = [house.ask("/things") for _ in range(6)]
        assert [got.status for got in answers] == [200, 502] * 3
        assert sum(text.startswith("proxy_cut credential=main") for text in caplog.messages) == 4
        assert all((got.field("quota-charge") or "").endswith("; units=1") for got in answers)
        assert house.units == len(house.upstream.reached) == 6


def test_only_callers_with_the_token_get_metrics(house: House) -> None:
    with house.open(token=TOKEN):
        assert json.loads(house.ask("", credential="healthz").body)["status"] == "warn"
        got = house.ask("/things")
        assert (got.status, "Quota-Token" in got.problem["detail"]) == (401, True)
        assert got.field("www-authenticate") == "Quota-Token"
        assert house.ask("", credential="metrics").status == 401
        mine = {"Quota-Token": TOKEN}
        assert house.ask("/things", headers=mine).status == 200
        assert house.ask("/things", headers={"Quota-Token": "t-o-k-e-m"}).status == 401
        got = house.ask("", credential="metrics", headers=mine)
        assert b'quota_limit_used_units{limit="hour",project="main"} 1\n' in got.body
        assert json.loads(house.ask("", credential="healthz").body)["status"] == "pass"
    assert [request.field("quota-token") for request in house.upstream.reached] == [None]


# -- programs that know nothing of us ----------------------------------------------------------------------------------


def test_googles_client_needs_no_key_and_is_charged_by_the_methods_of_its_api(house: House) -> None:
    with Emulator() as upstream:
        with house.open(rest=tube(upstream.address)):
            options = {"api_endpoint": f"http://127.0.0.1:{house.port}/tube/"}
            with build("youtube", "v3", developerKey="mine", client_options=options) as youtube:
                youtube.videos().list(part="snippet", chart="mostPopular", regionCode="DE").execute()
                youtube.search().list(part="snippet", q="x").execute()
                youtube.search().list(part="snippet", q="x" * 3_000).execute()  # it leaves as a POST
            got = house.ask("/batch/youtube/v3", "POST", b"x", credential="tube")
            assert (got.status, "batch" in got.problem["detail"]) == (501, True)
            spent = [(entry.method, entry.units) for entry in charges_at(house.session.ledger, "tube")]
        assert spent == [("videos.list", 1), ("search.list", 100), ("search.list", 100)]
        assert upstream.usage()["requests"] == 3
