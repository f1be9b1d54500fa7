"""Problems, health and the check of the Host, without a server."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quota.errors import QuotaError, UsageError
from quota.web.documents import Check, Problem, health, seconds, send_problem
from quota.web.serving import _turn_in, listen, listening_at, names_of, protected, require_web


async def nothing_here(scope: Any, receive: Any, send: Any) -> None:
    await send_problem(send, Problem(404, "nothing here"))


def asked(app: Any, *headers: tuple[bytes, bytes]) -> tuple[int, dict[str, str], Any]:
    """Status, header fields and document of an application's answer."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nobody reads the body")

    asyncio.run(app({"type": "http", "method": "GET", "path": "/", "headers": list(headers)}, receive, send))
    start, body = sent
    fields = {name.decode(): value.decode() for name, value in start["headers"]}
    assert len(fields) == len(start["headers"])
    return start["status"], fields, json.loads(body["body"])


@pytest.mark.parametrize(("ms", "s"), [(0, 1), (1, 1), (1_000, 1), (1_001, 2)])
def test_seconds_are_rounded_up(ms: int, s: int) -> None:
    assert seconds(ms) == s


def test_a_problem_is_a_document_of_rfc_9457() -> None:
    problem = Problem(
        503, "it is locked", members={"store": "videos"}, retry_after_s=2, more=(("vary", "accept"), ("allow", "GET"))
    )
    status, fields, document = asked(lambda scope, receive, send: send_problem(send, problem))
    assert status == 503
    words = {"type": "about:blank", "title": "Service Unavailable", "detail": "it is locked", "store": "videos"}
    assert document == {**words, "status": 503}
    assert fields == {
        "content-type": "application/problem+json",
        "cache-control": "no-store",
        "retry-after": "2",
        "vary": "accept",
        "content-length": str(len(problem.body())),
        "allow": "GET",
    }


def test_a_problem_may_have_a_title_of_its_own_and_quote_anything() -> None:
    assert Problem(429, "no", type="https://example.com/full", title="Full").as_json()["title"] == "Full"
    assert json.loads(Problem(400, "\ud800 \0 \u202e").body())["detail"] == "\ud800 \0 \u202e"


@pytest.mark.parametrize(
    ("checks", "status", "worst"),
    [
        ([Check("a")], 200, "pass"),
        ([Check("a"), Check("b", "warn", "old")], 200, "warn"),
        ([Check("a", "fail", "gone"), Check("b", "warn", "old")], 503, "fail"),
    ],
)
def test_health_is_that_of_the_worst_check(checks: list[Check], status: int, worst: str) -> None:
    answered, document = health(checks)
    assert (answered, document["status"]) == (status, worst)
    _, document = health([Check("store", "warn", "old", {"age_s": 7}), Check("ledger")])
    assert document["checks"] == {"store": {"status": "warn", "says": "old", "age_s": 7}, "ledger": {"status": "pass"}}


@pytest.mark.parametrize("host", ["127.0.0.1", "LocalHost:1", "localhost.", "[::1]", "[::1]:80", "localhost:"])
def test_a_name_of_loopback_passes(host: str) -> None:
    status, _, _ = asked(protected(nothing_here, hosts=names_of("127.0.0.1")), (b"host", host.encode()))
    assert status == 404


@pytest.mark.parametrize(
    "host",
    ["", "localhost.evil.example", "localhost@evil.example", "[::1]evil", "::1", " localhost", "127.1", "localhost:٣"],
)
def test_the_server_rejects_any_other_host(host: str) -> None:
    name = host.encode("latin-1", "ignore") if host.isascii() else host.encode()
    status, _, document = asked(protected(nothing_here, hosts=names_of("127.0.0.1")), (b"host", name))
    assert status == 421
    assert document["detail"].isprintable()


def test_a_missing_or_second_host_is_turned_away_unless_any_host_is_allowed() -> None:
    app = protected(nothing_here, hosts=names_of("127.0.0.1"))
    assert asked(app)[0] == 421
    assert asked(app, (b"host", b"localhost"), (b"host", b"localhost"))[0] == 421
    assert asked(protected(nothing_here, hosts=None), (b"host", b"api.example"))[0] == 404


def test_every_answer_has_the_fields_for_browsers() -> None:
    app = protected(nothing_here, hosts=("a",), policy="default-src 'none'")
    for host in (b"a", b"b"):
        _, fields, _ = asked(app, (b"host", host))
        assert fields["content-security-policy"] == "default-src 'none'"
        assert fields["x-content-type-options"] == "nosniff"
        assert fields["x-frame-options"] == "DENY"


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_a_missing_package_is_one_line_that_names_the_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        UsageError, match=rf"^{package} is not installed: pip install 'quota-ledger\[web\]', or pipx"
    ) as error:
        require_web()
    assert error.value.exit_status == 2, "no unit of config/deploy is started again then"


def test_the_second_piece_of_an_answer_waits_for_nobody() -> None:
    """Whatever loop takes the connection: with Nagle's algorithm it would wait 40 ms for the client's confirmation."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        listener.setblocking(True)
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_socket_that_is_being_made_is_not_taken_for_one_left_behind(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")

    def listen() -> None:
        with listening_at(path):
            pass

    with socket.socket(socket.AF_UNIX) as first, ThreadPoolExecutor(1) as pool:
        with _turn_in(str(tmp_path)):
            first.bind(path)
            second = pool.submit(listen)
            time.sleep(0.2)  # a chance to remove it
            first.listen()
        with pytest.raises(QuotaError, match="Address already in use"):
            second.result()
        assert os.path.exists(path)
