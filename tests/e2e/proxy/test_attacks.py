"""Whatever callers and upstream send: what reached upstream is what was charged, and no caller is told the key."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from quota.proxy.app import Mask, Target
from support.certificates import private_key
from support.plain_http import Answer, PlainServer, Reached, answer
from support.proxying import BOOK, SECRET, House
from support.servers import until

REQUEST = (
    b"POST /main/things HTTP/1.1\r\nHost: localhost\r\nContent-Length: 40\r\nConnection: close\r\n\r\n" + b"x" * 40
)
CHUNKED = (
    b"POST /main/things HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    b"5\r\nhello\r\n6;a=b\r\n world\r\n0\r\n\r\n"
)


def settled(house: House) -> tuple[int, int]:
    """How many requests reached upstream and how many charges stand, once nothing is under way."""
    ends_s, last, same = time.monotonic() + 100, (-1, -1), 0
    while time.monotonic() < ends_s and same < 5:
        counts = len(house.upstream.reached), sum(entry.units > 0 for entry in house.spent())
        same = same + 1 if counts == last and counts[0] == counts[1] else 0
        last = counts
        time.sleep(0.02)
    return last


def connected(house: House, sent: bytes) -> socket.socket:
    """A connection to the proxy over which this was sent."""
    connection = socket.create_connection(("127.0.0.1", house.port), timeout=100)
    connection.sendall(sent)
    return connection


EACH = 1 if os.environ.get("QUOTA_TEST_EVERY_BYTE") else 7
"""Of the cuts that cost a request each, every seventh is tried; `make soak` tries all."""


@pytest.mark.parametrize("request_", [REQUEST, CHUNKED], ids=["length", "chunked"])
def test_a_request_that_is_cut_at_any_byte_is_charged_if_it_left(house: House, request_: bytes) -> None:
    """Cut in its head it does not leave. Cut in its body it leaves or not, and upstream sees no whole request."""
    body_at = request_.index(b"\r\n\r\n") + 4
    with house.open():
        for size in range(body_at):
            connected(house, request_[:size]).close()
        assert settled(house) == (0, 0)
        for size in range(body_at, len(request_)):
            connected(house, request_[:size]).close()
        reached, charged = settled(house)
        assert reached == charged
        for size in range(body_at + 4, len(request_), EACH):
            with connected(house, request_[:size]):
                reached += 1
                until(lambda: len(house.upstream.reached) >= reached)  # noqa: B023
        assert settled(house) == (reached, reached)
        assert not any(each.complete for each in house.upstream.reached)
        assert house.raw(request_).startswith(b"HTTP/1.1 200 ")
        assert settled(house) == (reached + 1, reached + 1)
        assert house.upstream.reached[-1].complete


def test_a_caller_that_stops_reading_anywhere_is_charged_what_left(house: House) -> None:
    with house.open():
        whole = house.raw(REQUEST)
        cuts = range(1, len(whole), EACH)
        for size in cuts:
            with connected(house, REQUEST) as connection:
                got = 0
                while got < size:
                    got += len(connection.recv(size - got))
        assert settled(house) == (len(cuts) + 1, len(cuts) + 1)


def test_an_answer_that_upstream_cuts_anywhere_never_looks_whole(house: House) -> None:
    whole = answer(b'{"a": 1}', "X: y")
    cut = [0]

    def cut_answer(_: Reached) -> list[bytes]:
        return [whole[: cut[0]], b""]

    house.upstream.answer = cut_answer
    with house.open():
        whole_head = whole.index(b"\r\n\r\n") + 4
        cuts = range(1, len(whole), EACH)
        for cut[0] in cuts:
            got = house.raw(b"GET /main/things HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            head, _, body = got.partition(b"\r\n\r\n")
            if cut[0] < whole_head:
                assert head.startswith(b"HTTP/1.1 502 ")
            else:
                assert b"content-length: 8" in head
                assert len(body) < 8
            assert b"quota-charge: " in head
        assert settled(house) == (len(cuts), len(cuts))


def test_a_caller_that_goes_away_ends_its_request_and_stays_charged(house: House) -> None:
    def endless(_: Reached) -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        while True:
            yield b"4\r\n: a\n\r\n"
            time.sleep(0.01)

    house.upstream.answer = endless
    with house.open():
        with connected(house, b"GET /main/things HTTP/1.1\r\nHost: localhost\r\n\r\n") as connection:
            connection.recv(100)
        assert house.upstream.ended.wait(100)
        assert house.units == 1


def test_an_unasked_answer_answers_no_later_request(house: House) -> None:
    """As of a server that answers twice, or says 408 to a connection that waits for its next request."""
    asked, is_sent = threading.Event(), threading.Semaphore(0)

    def twice(request: Reached) -> Iterator[bytes]:
        yield answer(request.target.encode())
        assert asked.wait(100)
        asked.clear()
        yield answer(b"unasked", status="408 Request Timeout")
        is_sent.release()

    house.upstream.answer = twice
    with house.open():
        for target in ("/a", "/b", "/c"):
            assert house.ask(target).body == target.encode()
            asked.set()
            assert is_sent.acquire(timeout=100)
        assert settled(house) == (3, 3)


HEAD = b"Host: localhost\r\n"
POST = b"POST /main/x HTTP/1.1\r\n" + HEAD
GET = b"GET /main/x HTTP/1.1\r\n" + HEAD
SMUGGLED = b"GET /main/smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"


def turned_away(house: House, sent: bytes, *statuses: int) -> bytes:
    """The answer to a request that does not leave and costs nothing; nor does what follows it."""
    got = house.raw(sent)
    assert int(got[9:12]) in statuses, sent[:100]
    assert (got.count(b"HTTP/1.1 "), house.upstream.reached, house.units) == (1, [], 0), sent[:100]
    return got


def asked(verb: str, path: str, *fields: str) -> bytes:
    return "\r\n".join([f"{verb} {path} HTTP/1.1", *fields, "Connection: close", "", ""]).encode()


AMBIGUOUS = [
    POST + b"Content-Length: 4\r\nContent-Length: 60\r\n\r\nabcd" + SMUGGLED,
    POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    POST + b"Content-Length: -1\r\n\r\n" + SMUGGLED,
    GET + b"X: a\rb\r\n\r\n" + SMUGGLED,
    GET + b"X: a\0b\r\n\r\n" + SMUGGLED,
    b"GET /main/x y HTTP/1.1\r\n" + HEAD + b"\r\n" + SMUGGLED,
    b"GET /main/x\r\n" + HEAD + b"\r\n" + SMUGGLED,
    "GET /main/x?q=münchen HTTP/1.1\r\n".encode() + HEAD + b"\r\n" + SMUGGLED,
    GET + b"X: " + b"a" * 1_000_000 + b"\r\n\r\n" + SMUGGLED,
    GET + b"".join(b"X%d: a\r\n" % n for n in range(200_000)) + b"\r\n" + SMUGGLED,
    GET + b"X_REWRITE-URL: /search/x\r\nConnection: close\r\n\r\n" + SMUGGLED,
    GET + b"Host: other\r\n\r\n" + SMUGGLED,
]  # fmt: skip


def test_an_ambiguous_request_is_not_passed_on(house: House) -> None:
    with house.open():
        for sent in AMBIGUOUS:
            got = turned_away(house, sent, 400, 501)
            assert b"\r\ncontent-type: application/problem+json\r\n" in got
        assert b" not valid HTTP: send one Host, " in got


@pytest.mark.parametrize(
    ("sent", "targets"),
    [
        (SMUGGLED * 3, ["/smuggled"] * 3),
        (POST + b"Content-Length: 4\r\n\r\nabcd" + SMUGGLED, ["/x", "/smuggled"]),
        (b"GET /main/x HTTP/1.1\nHost: localhost\nX: a\n\n" + SMUGGLED, ["/x", "/smuggled"]),
        (GET + b"X: a\r\n b\r\n\r\n", ["/x"]),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nZ\r\n", ["/x"]),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhelloworld\r\n0\r\n\r\n", ["/x"]),
    ],
    ids=["pipelined", "behind a body", "bare LF", "folded", "no chunk", "a longer chunk"],
)  # fmt: skip
def test_each_request_that_leaves_is_charged_once(house: House, sent: bytes, targets: list[str]) -> None:
    """What leaves is written anew: folds, line ends and frames of the caller do not reach upstream."""
    with house.open():
        house.raw(sent, len(targets))
        reached, charged = settled(house)
        assert reached == charged
        assert [each.target for each in house.upstream.reached] == targets[:reached]
        for each in house.upstream.reached:
            assert b"\n" not in each.head.replace(b"\r\n", b"")
            assert b"\r\n " not in each.head


PATHS = [
    "/main//evil.example/x", "/main/../x", "/main/a/../x", "/main/a/%2e%2e/x", "/main/a/.%2E/x", "/main/./x",
    "/main/a/%2e%2e%2fx", "/main\\x", "/main/a\\x", "/main/a/..\\x", "/main/a/..;/x", "/main/a/..%3Bv=1/x",
    "/main/x#y", "/main/x?y#z", "/main/%0d%0aX:y", "/main/%00", "//main/x",
    "/main@evil.example/x", "/main:80/x", "/", "", "http://evil.example/main/x", "http://127.0.0.1/main//x",
    "https://evil.example/", "evil.example:443", "*", "/main/..", "/%2e%2e/main/x", "/healthz/x",
]  # fmt: skip


def test_no_path_names_another_host_or_another_path_than_the_one_that_is_charged(house: House) -> None:
    """CONNECT would leave as the host alone."""
    with house.open():
        for path in PATHS:
            turned_away(house, asked("GET", path, "Host: localhost"), 400, 404, 421)
        turned_away(house, asked("connect", "/main/x", "Host: localhost"), 400)


def test_a_request_that_the_server_answered_leaves_no_traceback(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """The rest of such a request is no HTTP, so that the server has answered before we do."""
    with house.open():
        for line in ("PUT http://localhost/main/x", "CONNECT /main/x", "PUT /mian/x", "PUT /main//x"):
            for host in ("localhost", "evil.example"):
                head = f"{line} HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n"
                turned_away(house, head.encode() + b"Z\r\n", 400)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def test_through_the_proxy_a_request_with_two_readings_costs_the_dearer(house: House) -> None:
    routes = '"GET /x/{id}" = "status"\n"GET /x/{id}/export" = "search"\n'
    paths = ["/x/1%2Fexport", "/x/1%2fexport/", "/x/1%5Cexport", "/x/1%252Fexport", "/x/1;a/export"]
    with house.open(book=BOOK.replace("[routes]\n", f"[routes]\n{routes}")):
        assert [house.ask(path).status for path in paths] == [200] * len(paths)
        assert house.ask("/search/x", "POST", headers={"X_METHOD-OVERRIDE": "GET"}).status == 200
        assert house.ask("/search/x", "POST", "%5Fmethod=get").status == 200
        assert house.ask("/search/x", "POST", "_method=get&x=" + "x" * 17_000_000).status == 200
        assert [entry.units for entry in house.spent()] == [10] * (len(paths) + 3)
    assert [reached.target for reached in house.upstream.reached] == [*paths, *["/search/x"] * 3]


def test_a_web_page_spends_nothing(house: House) -> None:
    foreign = ("Origin: null", "Origin: http://127.0.0.1", "Sec-Fetch-Site: none")
    with house.open():
        for fields in (*[("Host: localhost", field) for field in foreign], ("Host: evil.example",)):
            for path in ("/main/x", "/metrics"):
                turned_away(house, asked("GET", path, *fields), 403, 421)


def test_a_body_is_asked_for_only_once_its_request_is_admitted(house: House) -> None:
    """Expect: 100-continue. A refused body is never sent."""
    head = b"POST /main/things HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 5\r\n"
    with house.open(limit=5):
        with connected(house, head + b"Connection: close\r\n\r\n") as connection:
            got = connection.recv(1_000)
            assert got.startswith(b"HTTP/1.1 100 ")
            connection.sendall(b"hello")
            while piece := connection.recv(1_000):
                got += piece
        assert b"HTTP/1.1 200 OK" in got
        assert house.raw(head + b"\r\n", 1).startswith(b"HTTP/1.1 429 ")
        assert settled(house) == (1, 1)
    assert (house.upstream.reached[0].body, house.upstream.reached[0].field("expect")) == (b"hello", None)


ANSWERS = [
    answer(f'{{"headers": "Bearer {SECRET}"}}'.encode()),
    answer(f"no such key: {SECRET}".encode(), "Content-Encoding: utf-8"),
    answer(b'{"key": "%s"}' % SECRET.replace("/", "\\/").encode()),
    answer(b"", f"Location: https://elsewhere.example/?key={SECRET}", status="302 Found"),
    answer(b"", "Location: https://elsewhere.example/?key=" + SECRET.replace("/", "%2F"), status="302 Found"),
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"".join(b"1\r\n%c\r\n" % byte for byte in SECRET.encode())
    + b"0\r\n\r\n",
    f"HTTP/1.1 200 {SECRET}\r\nContent-Length: 0\r\n\r\n".encode(),
    f"HTTP/1.1 200 OK\r\n{SECRET}\r\n\r\n".encode(),
    f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{SECRET}\r\n".encode(),
    f"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{SECRET}".encode(),
    f"HTTP/1.1 101 OK\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n{SECRET}".encode(),
    f"HTTP/1.1 200 OK\r\nX: a\x01{SECRET}\r\nContent-Length: 0\r\n\r\n".encode(),
    b"HTTP/1.1 200 OK\r\nX: " + b"a" * 300_000 + b"\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" * 100 + answer(SECRET.encode()),
]


def test_no_caller_sees_the_key_whatever_upstream_answers(house: House, caplog: pytest.LogCaptureFixture) -> None:
    with house.open():
        for number, head in enumerate(ANSWERS, 1):
            house.upstream.answer = lambda _, head=head: [head, b""]  # type: ignore[misc]
            got = house.raw(asked("GET", "/main/things?q=private", "Host: localhost"))
            assert (got[:9], got.count(b"HTTP/1.1 ")) == (b"HTTP/1.1 ", 1), head[:100]
            for spelled in (SECRET, SECRET.replace("/", "%2F"), SECRET.replace("/", "\\/")):
                assert spelled.encode() not in got.replace(b"\r\n1\r\n", b""), head[:100]
            # The proxy may send over a connection that upstream is just closing: that counts, and does not arrive.
            assert len(house.upstream.reached) <= house.units == number
    assert SECRET not in caplog.text
    assert "private" not in caplog.text


def test_no_caller_sees_a_token_that_is_renewed_meanwhile(house: House) -> None:
    """Upstream says each token back, the first one when the second is in use."""
    tokens = (Answer(200, b'{"access_token": "t-o-k-e-n-%d", "expires_in": 1}' % n) for n in range(9))
    renewed, echoes = threading.Event(), []

    def echo(request: Reached) -> list[bytes]:
        (token,) = [value for name, value in request.fields if name == "authorization"]
        echoes.append(token)
        assert len(echoes) == 2 or renewed.wait(100)
        return [answer(token.encode())]

    house.upstream.answer = echo
    with PlainServer(lambda _: next(tokens)) as granting:
        info = {"client_email": "a@b.example", "token_uri": f"{granting.address}/x", "private_key": private_key()}
        (house.folder / "account.json").write_text(json.dumps(info))
        with house.open(auth='auth = "service-account:account.json"'), ThreadPoolExecutor() as threads:
            first = threads.submit(house.ask, "/a")
            until(lambda: bool(house.upstream.reached))
            assert house.ask("/b").body == b"Bearer ***********"
            renewed.set()
            assert first.result().body == b"Bearer ***********"
    assert len(set(echoes)) == 2


def test_the_mask_hides_the_token_that_left() -> None:
    """Another thread may renew it between signing and masking."""
    target: Any = object.__new__(Target)
    target._secret_headers = set()
    own = {"authorization": "Bearer t-o-k-e-n"}
    target.caller = SimpleNamespace(signs=True, key=None, signed=lambda verb, url, headers: (url, own))
    *_, masked = target.signed(SimpleNamespace(verb="GET", fields=[]), "https://a.example/")
    assert masked == "t-o-k-e-n"


MASKED = "abcab/cabd"


def masked(pieces: list[bytes]) -> bytes:
    mask = Mask(MASKED)
    return b"".join([mask.feed(piece) for piece in pieces] + [mask.end()])


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        (b"xx" + MASKED.encode() + b"yy" + MASKED.encode(), b"xx**********yy**********"),
        (b"abcabcab/cabd", b"abc**********"),
        (b"abcab/cab abcab%2Fcabd abcab\\/cabd abcab%2fcabd", b"abcab/cab ************ *********** ************"),
        (b"abcab/cab", b"abcab/cab"),
    ],
)
def test_a_secret_passes_as_stars_wherever_it_is_cut(text: bytes, passes: bytes) -> None:
    for at in range(len(text) + 1):
        assert masked([text[:at], text[at:]]) == passes
    assert masked([text[n : n + 1] for n in range(len(text))]) == passes
