"""What one HTTP attempt does to a budget, with the clock in hand."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from quota.clients import metering
from quota.clients.metering import Meter
from quota.common.clock import NEVER
from quota.errors import Refused, UsageError
from quota.settings.books import load_book
from quota.terms.api import Hosts
from quota.terms.arguments import labels
from support.books import parse_book
from support.setup import Setup, limit


def pacific(text: str) -> int:
    """Milliseconds of a moment at upstream's own midnight's place: `pacific("2026-11-20 23:59:59")`."""
    return int(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo("America/Los_Angeles")).timestamp() * 1000)


SPENT = json.dumps({"error": {"message": "You are out of quota.", "errors": [{"reason": "quotaExceeded"}]}}).encode()


def search_limit(value: str) -> bytes:
    metadata = {"quota_limit": "defaultSearchListPerDayPerProject", "quota_limit_value": value}
    return json.dumps({"error": {"message": "No.", "details": [{"metadata": metadata}]}}).encode()


CHAT = """
api = "chat"
source = "the tests"
read_on = 2026-11-01
hosts = ["chat.example"]
answers = { units = { json = "/usage" }, levels = [{ bucket = "core", remaining = "X-Left" }] }
buckets.core = { quota = 1_000, resets = "24h" }
default = { get = 1, other = 1 }
methods.chat = { reserve = { json = "/max", default = 50 } }
"""


def opened(url: str = "sqlite://") -> Setup:
    return Setup.open(url, now_ms=pacific("2026-11-20 12:00:00"))


@pytest.fixture
def setup() -> Iterator[Setup]:
    with closing((setup := opened()).ledger):
        yield setup


def make_meter(setup: Setup, units: int = 1_000, book: str = "youtube-v3") -> Meter:
    return Meter(setup.budget(limit(units, buckets=()), book=load_book(book)))


def units(setup: Setup) -> list[int]:
    return [entry.units for entry in setup.entries()]


def test_an_unreadable_header_is_logged_once(
    setup: Setup, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metering, "_warned", set())
    meter = make_meter(setup, book="github")
    for _ in range(3):
        meter.attempt("read", "GET").answered(200, b"", {"X-RateLimit-Remaining": "plenty"})
    assert caplog.messages == [
        "header_unread book=github header=x-ratelimit-remaining value=plenty: it is of no bucket or window of the "
        "book, or no possible number or time; it changes nothing"
    ]


def test_more_attempts_than_one_step_charges_are_refunded_where_the_rest_is_refused(setup: Setup) -> None:
    meter = make_meter(setup, units=150)
    assert [each.decision.cost_units for each in meter.attempts([("videos.list", "GET")] * 120)] == [1] * 120
    with pytest.raises(Refused):
        meter.attempts([("videos.list", "GET")] * 10 + [("unknown.list", "GET")] * 21)
    assert units(setup) == [1] * 120
    with pytest.raises(Refused):
        make_meter(setup, units=225).attempts([("videos.list", "GET")] * 110)
    assert units(setup) == [1] * 120 + [0] * 100


def test_a_level_is_heard_even_if_nobody_reads_the_answers(setup: Setup) -> None:
    book = parse_book(CHAT, "chat")
    budget = setup.budget(limit(1_000, buckets=("core",)), book=book)
    for left, used in ((400, 50), (300, 600), (200, 700)):
        Meter(budget).attempt("chat", "POST").answered(200, b"", {"X-Left": str(left)}, whole=False)
        assert budget.usage()[0].used_units == used, "by the answer before"
        setup.now_ms += 1_000


def test_a_name_that_no_charge_can_carry_is_cut(setup: Setup) -> None:
    meter = make_meter(setup)
    assert meter.attempt("GET /" + "x" * 70 + "\n", "GET").decision.method == "x" * 63 + "?"


# -- exhaustion --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("charged", "answered", "until"),
    [
        # Until the midnight that follows the charge, in upstream's zone.
        ("2026-11-20 12:00:00", "2026-11-20 12:00:01", "2026-11-21 00:00:00"),
        # A day of 25 hours.
        ("2026-11-01 00:30:00", "2026-11-01 00:30:01", "2026-11-02 00:00:00"),
        # An answer after midnight speaks of the day that is over: nothing closes.
        ("2026-11-20 23:59:59", "2026-11-21 00:00:00", None),
    ],
)
def test_an_exhaustion_is_dated_by_its_charge(setup: Setup, charged: str, answered: str, until: str | None) -> None:
    meter = make_meter(setup)
    setup.now_ms = pacific(charged)
    attempt = meter.attempt("videos.list", "GET")
    setup.now_ms = pacific(answered)
    attempt.answered(403, SPENT)
    expected = [] if until is None else [("units", pacific(charged), pacific(until))]
    assert [(e.bucket, e.since_ms, e.until_ms) for e in setup.state.facts().exhaustions] == expected


def test_an_exhaustion_says_who_reported_it_and_what_upstream_said(setup: Setup) -> None:
    with labels(job="trending", region="DE"):
        attempt = make_meter(setup).attempt("videos.list", "GET")
    attempt.answered(403, SPENT)
    (closed,) = setup.state.facts().exhaustions
    assert closed.evidence == "You are out of quota."
    host_and_pid, job = closed.reported_by.split(" ")
    assert job == "trending"
    assert host_and_pid.endswith(f":{os.getpid()}")


def test_a_pool_of_upstreams_closes_its_methods_under_a_book_that_pays_from_another(setup: Setup) -> None:
    """It has no calendar of its own in such a book, and resets with the main bucket."""
    meter = make_meter(setup)
    meter.attempt("search.list", "GET").answered(429, search_limit("100"))
    with pytest.raises(Refused) as refusal:
        meter.attempt("search.list", "GET")
    decision = refusal.value.decision
    assert (decision.reason, decision.refused_by) == ("exhausted", "search")
    assert decision.retry_at_ms == pacific("2026-11-21 00:00:00")
    meter.attempt("videos.list", "GET")


def test_a_limit_of_zero_closes_for_good(setup: Setup) -> None:
    make_meter(setup).attempt("search.list", "GET").answered(429, search_limit("0"))
    (closed,) = setup.state.facts().exhaustions
    assert (closed.bucket, closed.until_ms) == ("search", NEVER)


def test_a_ledger_that_cannot_take_note_never_hides_upstreams_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program has locked the ledger's file meanwhile."""
    setup, path = opened(f"sqlite:///{tmp_path / 'ledger.db'}"), tmp_path / "ledger.db"
    with closing(setup.ledger), closing(sqlite3.connect(path)) as other:
        first, second = make_meter(setup).attempts([("videos.list", "GET"), ("videos.list", "GET")])
        monkeypatch.setattr(setup.ledger._file, "deadline_s", 0.05)
        other.execute("BEGIN EXCLUSIVE")
        first.answered(403, SPENT)
        second.never_left()
        other.rollback()
        assert [record.message.split()[0] for record in caplog.records] == ["exhaustion_not_recorded", "refund_failed"]
        assert (setup.state.facts().exhaustions, units(setup)) == ((), [1, 1])


# -- hosts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "host", "port", "metered"),
    [
        ("api.example.com", "api.example.com", 443, True),
        ("api.example.com", "API.example.com.", 8443, True),
        ("api.example.com:8443", "api.example.com", 443, False),
        ("127.0.0.1:8765", "localhost", 8765, True),
        ("[::1]:8765", "::1", 8765, True),
        ("localhost:8765", "127.0.0.1", 8766, False),
        ("bücher.example", "xn--bcher-kva.example", 443, True),
        ("Straße.example:8443", "xn--strae-oqa.example", 8443, True),
        ("[2001:DB8:0::1]:8443", "2001:db8::1", 8443, True),
        ("api.example.com", "b\u00fc..example", 443, False),
        ("127.1:80", "localhost", 80, True),
        ("10.0.0.1", "0xa.1", 80, True),
        ("127.0.0.1:80", "0.0.0.0", 80, True),  # noqa: S104  # where a program connects
        ("youtube.googleapis.com", "youtube.mtls.googleapis.com", 443, True),
        ("010.0.0.1", "8.0.0.1", 80, True),
        ("10.0.0.1", "::ffff:10.0.0.1", 80, True),
        ("10.0.0.1", "10.0.0.256", 80, False),
    ],
)
def test_a_host_is_known_by_its_name_and_port(name: str, host: str, port: int, metered: bool) -> None:
    assert ((host, port) in Hosts([name])) == metered


def test_a_host_with_a_port_is_known_by_the_port_that_its_scheme_means() -> None:
    hosts = Hosts(["bücher.example:443"])
    schemes = ("https", "wss", "HTTPS", "http")
    assert [hosts.serve(f"{scheme}://xn--bcher-kva.example/") for scheme in schemes] == [True, True, True, False]


NO_HOSTS = ["*.example.com", "*", "a b", "a\nb", "user@api.example.com", "a" * 254, "[::1", "é" * 64, "a\u0300..b"]
URLS = ["", "http://api.example.com", "api.example.com/{path}", "api.example.com/", "host:port"]


@pytest.mark.parametrize("name", [*NO_HOSTS, *URLS])
def test_a_host_that_no_request_can_reach_is_refused(name: str) -> None:
    """No call would be charged: it is none of the metered ones."""
    with pytest.raises(UsageError, match="host") as refused:
        Hosts(["api.example.com", name])
    assert (str(refused.value).isprintable(), len(str(refused.value)) < 200) == (True, True)


def test_a_host_may_go_on_with_the_beginning_of_a_path() -> None:
    """Where a host has several APIs. A path is read as a server may read it."""
    hosts = Hosts(["www.googleapis.com/Calendar/v3", "api.example.com"])
    plain = ("/calendar/v3", "/calendar/v3/x", "//CALENDAR/%763/x?q=1", "/calendar/v3/")
    for path in (*plain, "/calendar%2Fv3/x", "/calendar%5Cv3%5Cx", "/calendar;x/v3", "/x/..%2Fcalendar/v3"):
        assert hosts.serve(f"https://www.googleapis.com{path}")
    for path in ("", "/", "/calendar", "/calendar/v30", "/drive/calendar/v3", "/x?/calendar/v3"):
        assert not hosts.serve(f"https://www.googleapis.com{path}")
    assert ("www.googleapis.com", 443) in hosts
    assert hosts.serve("https://api.example.com/any")
