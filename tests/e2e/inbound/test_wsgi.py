"""A WSGI application behind its limits, called as a server calls it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from quota.inbound import Limit, Rule, Rules, wsgi
from support.processes import in_child


class Streaming:
    """An application whose answer says how far it was read, and that it was closed."""

    def __init__(self) -> None:
        self.called = self.closed = 0

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Streaming:
        self.called += 1
        start_response("200 OK", [("X-RateLimit-Limit", "77")])
        return self

    def __iter__(self) -> Iterator[bytes]:
        yield b"one"
        yield b"two"

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def rules(tmp_path: Path) -> Rules:
    return Rules(
        [Rule("two", Limit(2, 3_600_000), fail="closed"), Rule("never", Limit(1, 60_000))],
        url=f"sqlite:///{tmp_path / 'inbound.db'}",
        x_fields=True,
    )


class Body(BytesIO):
    def read(self, *_: Any) -> bytes:
        raise AssertionError("the body of a refused request was read")


def ask(app: Any, path: str = "/", **environ: Any) -> tuple[str, dict[str, str], Any]:
    heads: list[Any] = []
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": path, "REMOTE_ADDR": "203.0.113.7", **environ}
    body = app(environ, lambda status, headers, *_: heads.extend((status, headers)))
    return heads[0], {name.lower(): value for name, value in heads[1]}, body


def test_an_answer_passes_unchanged_with_the_fields_added(rules: Rules) -> None:
    application = Streaming()
    status, headers, body = ask(wsgi(application, rules))
    assert (status, body) == ("200 OK", application)
    assert headers["ratelimit-policy"] == '"two";q=2;w=3600'
    assert headers["ratelimit"].startswith('"two";r=1;t=')
    assert (headers["x-ratelimit-limit"], headers.get("x-ratelimit-remaining")) == ("77", None), "all of them or none"
    assert (list(body), application.closed) == ([b"one", b"two"], 0)
    body.close()
    assert application.closed == 1


def test_a_refusal_reads_no_body_and_never_reaches_the_application(rules: Rules) -> None:
    application = Streaming()
    app = wsgi(application, rules)
    for _ in range(2):
        ask(app)
    status, headers, body = ask(app, REQUEST_METHOD="POST", **{"wsgi.input": Body()})
    assert status == "429 Too Many Requests"
    assert json.loads(b"".join(body))["violated-policies"] == ["two"]
    assert int(headers["content-length"]) == sum(map(len, body))
    assert (headers["cache-control"], headers["content-type"]) == ("no-store", "application/problem+json")
    status, _, body = ask(app, REQUEST_METHOD="HEAD")
    assert (status[:3], list(body), application.called) == ("429", [], 2)
    preflight = {"REQUEST_METHOD": "OPTIONS", "HTTP_ACCESS_CONTROL_REQUEST_METHOD": "GET"}
    assert ask(app, **preflight, HTTP_X_HTTP_METHOD_OVERRIDE="GET")[0] == status


def test_fail_decides_while_the_storage_is_away() -> None:
    rules = [Rule("open", Limit(1, 60_000), path="/open"), Rule("closed", Limit(1, 60_000), fail="closed")]
    app = wsgi(Streaming(), Rules(rules, url="redis://127.0.0.1:1/0"))
    assert [ask(app, path)[0] for path in ("/open", "/closed")] == ["200 OK", "503 Service Unavailable"]


def test_the_path_is_whole_and_decoded(tmp_path: Path) -> None:
    """PEP 3333 hands over bytes as characters, and a mounted application only a part of the path."""
    rules = Rules(
        [Rule("cafe", Limit(1, 60_000), path="/app/café"), Rule("rest", Limit(100, 60_000))],
        url=f"sqlite:///{tmp_path / 'inbound.db'}",
    )
    app = wsgi(Streaming(), rules)
    got = ask(app, "/café".encode().decode("latin-1"), SCRIPT_NAME="/app")[1]
    assert got["ratelimit-policy"].startswith('"cafe"')
    assert ask(app, "/\xff", SCRIPT_NAME="/app")[1]["ratelimit-policy"].startswith('"rest"')


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/lo\xffgin", ""),  # Bottle leaves it out
        ("/\xed\xa0\x80login", "/app"),
        ("login", "/app"),  # waitress hands over a path without a slash as it came; Flask adds one
        ("login", ""),
    ],
)
def test_bytes_that_an_application_leaves_out_make_no_difference(path: str, mount: str, tmp_path: Path) -> None:
    rules = Rules(
        [Rule("login", Limit(1, 60_000), path="/login"), Rule("rest", Limit(100, 60_000))],
        url=f"sqlite:///{tmp_path / 'inbound.db'}",
    )
    app = wsgi(Streaming(), rules)
    assert [ask(app, path, SCRIPT_NAME=mount)[0][:3] for _ in range(2)] == ["200", "429"]


def test_a_forked_worker_counts_on_and_hands_over_only_its_own(tmp_path: Path) -> None:
    """As under a server that loads the application before it forks."""
    rules = Rules([Rule("three", Limit(3, 3_600_000), fail="closed")], url=f"sqlite:///{tmp_path / 'inbound.db'}")
    app = wsgi(Streaming(), rules)
    assert [ask(app)[0] for _ in range(2)] == ["200 OK"] * 2  # the first is handed over at once, the second is not

    def serve() -> list[str]:
        statuses = [ask(app)[0][:3] for _ in range(2)]
        app._decider.hand_over()
        return statuses

    assert in_child(serve) == ["200", "429"]
    assert ask(app)[0][:3] == "429"
    app._decider.hand_over()
    totals = app._decider.storage.totals()
    assert (totals["requests|three|admitted"], totals["requests|three|refused"]) == (3, 2)
