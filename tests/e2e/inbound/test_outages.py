"""A storage that is away: each rule does what it says, in time, and the log has one line."""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from quota.inbound import Limit, Rule, Rules, asgi, wsgi
from quota.inbound.contract import WALL_S
from support.inbound_http import Client, answer, running
from support.servers import RedisServer, until

if TYPE_CHECKING:
    from collections.abc import Iterator

MINUTE_MS = 60_000
GENEROUS_S = 40 * WALL_S
"""For a machine that does much else meanwhile."""


@pytest.fixture
def server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.close()


def rules(server: RedisServer) -> Rules:
    return Rules(
        [
            Rule("open", Limit(100, MINUTE_MS), path="/open"),
            Rule("closed", Limit(100, MINUTE_MS), path="/closed", fail="closed"),
            Rule("shadow", Limit(100, MINUTE_MS), path="/shadow", fail="closed", shadow=True),
        ],
        url=server.url,
    )


@pytest.mark.usefixtures("real_walls")
@pytest.mark.parametrize("stopped", [False, True], ids=["killed", "silent"])
def test_fail_decides_while_redis_is_away(stopped: bool, server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="quota")
    with running(asgi(answer, rules(server))) as port:
        ask = Client(port)
        assert [ask(path).status for path in ("/open", "/closed", "/shadow")] == [200, 200, 200]
        if stopped:
            os.kill(server.pid, signal.SIGSTOP)
        else:
            server.kill()
        got = [ask(path) for path in ("/open", "/closed", "/shadow") * 3]
        assert [one.status for one in got] == [200, 503, 200] * 3
        assert max(one.answered_s - one.asked_s for one in got) < GENEROUS_S
        # After three failures nobody waits any more.
        quick = [ask("/closed") for _ in range(20)]
        assert sorted(one.answered_s - one.asked_s for one in quick)[5] < WALL_S
        closed = got[1]
        assert closed.headers["content-type"] == "application/problem+json"
        assert closed.headers["cache-control"] == "no-store"
        assert int(closed.headers["retry-after"]) >= 1
        assert closed.headers["ratelimit-policy"] == '"closed";q=100;w=60'
        assert "ratelimit" not in closed.headers
        assert "ratelimit" not in got[0].headers
        if stopped:
            os.kill(server.pid, signal.SIGCONT)
        else:
            server.start()
        until(lambda: ask("/closed").status == 200)  # the breaker tries once a second
        ask.close()
    events = [record.getMessage().split()[0] for record in caplog.records if record.name == "quota"]
    assert events == ["inbound_storage_away", "inbound_storage_back"]


def test_wsgi_decides_like_asgi_in_an_outage(server: RedisServer) -> None:
    app = wsgi(lambda environ, start: (start("200 OK", []), [b"hello"])[1], rules(server))

    def ask(path: str) -> str:
        said: list[str] = []
        app(
            {"REQUEST_METHOD": "GET", "PATH_INFO": path, "REMOTE_ADDR": "203.0.113.7"}, lambda *got: said.append(got[0])
        )
        return said[0]

    assert [ask(path) for path in ("/open", "/closed")] == ["200 OK", "200 OK"]
    server.kill()
    began_s = time.monotonic()
    got = [ask(path) for path in ("/open", "/closed") * 5]
    assert got == ["200 OK", "503 Service Unavailable"] * 5
    assert time.monotonic() - began_s < 3 * GENEROUS_S
