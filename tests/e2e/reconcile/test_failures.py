"""Whatever Cloud Monitoring answers that is not the whole truth: one line, nothing changed, no secret."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from quota.common.clock import rfc3339
from quota.errors import BadAnswer, ConfigError, QuotaError
from quota.reconcile import monitoring
from quota.reconcile.reconcile import Reconciled
from quota.terms.limits import HOUR_MS, MINUTE_MS
from support.plain_http import Answer, Arrived, PlainServer, RawServer, head
from support.reconciling import NOON, Site
from support.servers import black_hole

TOKEN = "ya29.a-token-that-nobody-may-see"  # noqa: S105
USAGE = "serviceruntime.googleapis.com/quota/rate/net_usage"


@pytest.fixture
def site(site: Site) -> Site:
    site.more = 'auth = "authorized-user:user.json"\n'
    secrets = {"client_secret": "a-client-secret", "refresh_token": "a-refresh-token", "token": TOKEN}
    user = {"type": "authorized_user", "client_id": "id", **secrets, "expiry": "2999-01-01T00:00:00Z"}
    (site.folder / "user.json").write_text(json.dumps(user))
    return site


@contextmanager
def provider(site: Site, answer: Callable[[Arrived], Answer]) -> Iterator[PlainServer]:
    """A server that gives these answers in the place of Cloud Monitoring."""
    with PlainServer(answer) as server:
        site.configure(server.address)
        yield server


def granted(result: Reconciled) -> dict[str, int]:
    """Upstream's grant of each bucket, where it has one."""
    return {count.bucket: count.granted_units for count in result.buckets if count.granted_units is not None}


def series(*points: tuple[int, str], metric: str = USAGE, kind: str = "DELTA", **labels: str) -> dict[str, Any]:
    """A series whose points ended so many minutes before noon."""
    return {
        "metric": {"type": metric, "labels": {"quota_metric": "youtube.googleapis.com/default", **labels}},
        "resource": {"type": "consumer_quota", "labels": {"service": "youtube.googleapis.com"}},
        "metricKind": kind,
        "valueType": "INT64",
        "points": [
            {"interval": {"endTime": rfc3339(NOON - ago * MINUTE_MS)}, "value": {"int64Value": units}}
            for ago, units in points
        ],
    }


def of_limit(location: str, *points: tuple[int, str]) -> dict[str, Any]:
    """A series of the number of a limit, from one location."""
    metric = "serviceruntime.googleapis.com/quota/limit"
    rows = series(*points, metric=metric, kind="GAUGE", limit_name="defaultPerDayPerProject")
    rows["resource"]["labels"]["location"] = location
    return rows


def page(*rows: dict[str, Any], **more: object) -> bytes:
    return json.dumps({"timeSeries": list(rows), **more}).encode()


GOOD = page(series((60, "500"), method="youtube.api.v3.V3DataVideoService.List"))
ERROR = json.dumps({"error": {"code": 500, "message": f"Backend; Error {TOKEN}"}}).encode()
DISABLED = json.dumps({"error": {"message": "x", "details": [{"reason": "SERVICE_DISABLED"}]}}).encode()

ANSWERS = [
    (Answer(401), "refused project 'cloud-project-1' with 401; nothing was changed; auth must name an account"),
    (Answer(403), "with 403; nothing was changed; grant monitoring.timeSeries.list (the role Monitoring Viewer)"),
    (Answer(403, DISABLED), "with 403 (x); nothing was changed; enable the Cloud Monitoring API there"),
    (Answer(429), "refused project 'cloud-project-1' with 429; nothing was changed; run again in a minute"),
    (Answer(500, ERROR), "answered with 500 (Backend, Error [redacted])"),
    (Answer(302, headers={"Location": "https://elsewhere.example/"}), "answered with 302; nothing was changed; check"),
    (Answer(200, b"<html>", {"Content-Type": "text/html"}), "is no JSON object (text/html, 6 bytes)"),
    (Answer(200, GOOD, hang_up=True, headers={"Transfer-Encoding": "chunked"}), "is no HTTP"),
    (Answer(200, b"", hang_up=True, headers={"Transfer-Encoding": "chunked"}), "cannot be reached, or hung up"),
    (Answer(200, b'{"timeSeries": [{}]}'), "answered with no series of"),
    (Answer(200, page(series((60, "a lot")))), "answered with no series of"),
    (Answer(200, page(series((60, "5"), metric="other"))), "answered with no series of"),
    (Answer(200, page(series((60, "5"), kind="CUMULATIVE"))), "answered with no series of"),
    (Answer(200, page(series((60, "5"), (60, "5")))), "answered the same point twice"),
    (Answer(200, page(series((60, "5")), nextPageToken="again")), "answered the same point twice"),
    (Answer(200, page(nextPageToken="x" * 9_000)), "invalid nextPageToken"),
    (Answer(200, page(series((60, "5")), executionErrors=[{"code": 14}])), "says that its answer is incomplete"),
    (Answer(200, page(series((60, "5")), unreachable=["europe"])), "says that its answer is incomplete"),
    (Answer(200, page(series((-30, "5")))), "has points in the future"),
]


@pytest.mark.parametrize(("answer", "message"), ANSWERS, ids=[str(n) for n in range(len(ANSWERS))])
def test_an_answer_that_is_not_the_whole_truth_changes_nothing(site: Site, answer: Answer, message: str) -> None:
    with provider(site, lambda _: answer) as server:
        assert message in failure(site)
        assert {request.headers["authorization"] for request in server.arrived} == {f"Bearer {TOKEN}"}


def test_a_later_page_that_fails_changes_nothing(site: Site) -> None:
    """Half of the use would look like a price that is too high here."""

    def answer(request: Arrived) -> Answer:
        paged = "pageToken" in request.target
        return Answer(503) if paged else Answer(200, page(series((60, "500")), nextPageToken="2"))

    with provider(site, answer) as server:
        assert "answered with 503" in failure(site)
        assert len(server.arrived) == 2


def test_all_points_of_all_series_and_pages_are_one_sum(site: Site) -> None:
    """Newest first, as upstream sends them. A filter names resource, service and metric."""
    videos, search = (f"youtube.api.v3.V3Data{service}Service.List" for service in ("Video", "Search"))
    pages = {
        None: page(series((10, "4"), (11, "28"), method=videos), series((10, "100"), method=search), nextPageToken="2"),
        "2": page(series((300, "7"), (20 * 60, "9"), method=videos), nextPageToken="3"),
        "3": page(series((400, "2"), method="a.method.Nobody.Knows")),
    }

    def answer(request: Arrived) -> Answer:
        asked = {name: values[0] for name, values in parse_qs(urlsplit(request.target).query).items()}
        for part in ('resource.type="consumer_quota"', 'resource.labels.service="youtube.googleapis.com"'):
            assert part in asked["filter"]
        if "net_usage" not in asked["filter"]:
            return Answer(200, b"{}")
        body = gzip.compress(pages[asked.get("pageToken")])
        return Answer(200, body, {"Content-Encoding": "gzip"})

    with provider(site, answer):
        result = site.reconcile()
    today, yesterday = result.buckets
    assert (today.upstream_units, yesterday.upstream_units) == (141, 9)
    by_method = {row.method: row.upstream_units for row in today.methods}
    assert by_method == {"search.list": 100, "videos.list": 39, "a.method.Nobody.Knows": 2}
    assert site.used() == {"day": 141, "pacific-day": 141}


def test_the_newest_number_of_a_limit_counts_and_of_several_the_smallest(site: Site) -> None:
    everywhere = of_limit("global", (60, "9000"), (1_500, "100"))
    body = page(everywhere, of_limit("here", (61, "8000")), of_limit("there", (60, "-1")))
    with provider(site, lambda r: Answer(200, b"{}" if re.search("search_list|net_usage", r.target) else body)):
        result = site.reconcile()
    assert granted(result) == {"units": 8_000}


SILENT: dict[str, Callable[[RawServer], Iterable[bytes]]] = {
    "before its head": lambda server: _pause(server),
    "in its body": lambda server: [head("Content-Length: 99"), b"\r\n{", *_pause(server)],
    "a byte now and then": lambda server: server.drip(head("Content-Length: 9999") + b"\r\n{"),
}


def _pause(server: RawServer) -> Iterator[bytes]:
    server.pause(30)
    yield b""


@pytest.mark.parametrize("how", SILENT)
def test_reconcile_does_not_wait_for_a_silent_server(site: Site, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(monitoring, "SILENCE_S", 0.3)
    allowed_s = monitoring._LIMITS.max_answer_s
    assert allowed_s is not None
    assert allowed_s <= 30, "then it is said"
    monkeypatch.setattr(monitoring, "_LIMITS", monitoring._LIMITS._replace(max_answer_s=0.8))
    server: RawServer
    with RawServer(lambda _: SILENT[how](server)) as server:
        site.configure(server.address)
        message = failure(site)
    assert "was silent for 0.3 s" in message or "was not complete after 0.8 s" in message


def test_a_connection_that_is_never_made_is_not_waited_for(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "SILENCE_S", 0.3)
    began_s = time.monotonic()
    with black_hole() as port:
        site.configure(f"http://127.0.0.1:{port}")
        assert "was silent for 0.3 s" in failure(site)
    assert time.monotonic() - began_s < 20


def failure(site: Site) -> str:
    """What a failed run says; it has changed nothing and shown no secret."""
    site.now_ms = NOON - 2 * HOUR_MS
    with site.session() as session:
        session.budget().charge("videos.list")
    site.now_ms = NOON
    stored = site.stored()
    with pytest.raises(BadAnswer) as error:
        site.reconcile()
    assert site.stored() == stored
    message = str(error.value)
    assert "nothing was changed" in message
    assert len(message.splitlines()) == 1
    assert not any(secret in message for secret in (TOKEN, "a-client-secret", "a-refresh-token"))
    assert error.value.exit_status == 1
    return message


# -- who asks ----------------------------------------------------------------------------------------------------------

BAD_AUTH = [
    ("", "has no auth; add auth", "https://monitoring.example"),
    ('auth = "adc"', 'auth = "adc" finds no credentials', None),
    ('auth = "service-account:none.json"', "none.json cannot be read: No such file or directory", None),
    ('auth = "service-account:user.json"', "user.json is no service-account file", None),
    ('auth = "authorized-user:list.json"', "list.json is no authorized-user file", None),
]


@pytest.mark.parametrize(("auth", "message", "endpoint"), BAD_AUTH)
def test_an_auth_that_cannot_be_used_is_one_line_about_the_configuration(
    site: Site, monkeypatch: pytest.MonkeyPatch, auth: str, message: str, endpoint: str | None
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(site.folder / "none.json"))
    (site.folder / "list.json").write_text("[]")
    site.more = f"{auth}\n"
    site.configure(endpoint)
    with pytest.raises(ConfigError, match="credential 'main'") as error:
        site.reconcile()
    assert message in str(error.value)
    assert TOKEN not in str(error.value)


def test_a_token_goes_to_no_other_machine_in_plain_text(site: Site) -> None:
    site.more = 'auth = "authorized-user:user.json"\n'
    config = site.configure("http://monitoring.invalid")
    lines = [line for line in config.read_text().splitlines(keepends=True) if not line.startswith("key =")]
    config.write_text("".join(lines))
    with pytest.raises(ConfigError, match="endpoint: the secret would go there in plain text"):
        site.reconcile()
    config.write_text("".join([*lines, "insecure_endpoint = true\n"]))
    with pytest.raises(QuotaError, match="cannot be reached"):
        site.reconcile()


def test_a_token_that_is_renewed_is_asked_for_where_the_file_says_and_never_shown(site: Site) -> None:
    """A service account signs its own request for a token; the answer refuses it, and quotes everything."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65_537, key_size=2_048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )

    def answer(request: Arrived) -> Answer:
        assert request.target == "/token"
        return Answer(400, json.dumps({"error": "invalid_grant", "error_description": key.decode()}).encode())

    with PlainServer(answer) as server:
        account = {"client_email": "a@b.example", "token_uri": f"{server.address}/token", "private_key": key.decode()}
        (site.folder / "account.json").write_text(json.dumps(account))
        site.more = 'auth = "service-account:account.json"\n'
        site.configure(server.address)
        with pytest.raises(QuotaError) as error:
            site.reconcile()
    message = str(error.value)
    assert "auth was not accepted (invalid_grant" in message
    assert key.decode().splitlines()[3] not in message


# -- recorded ----------------------------------------------------------------------------------------------------------


def test_recorded_answers_are_read(site: Site, shared_data: Path) -> None:
    folder = shared_data / "monitoring"
    if not folder.is_dir():
        pytest.skip(f"no recorded answers of Cloud Monitoring in {shared_data}")
    usage = (folder / "timeSeries_rate_net_usage.json").read_bytes()
    limit = (folder / "timeSeries_quota_limit.json").read_bytes()

    def answer(request: Arrived) -> Answer:
        asked = parse_qs(urlsplit(request.target).query)["filter"][0]
        return Answer(200, usage if "net_usage" in asked else limit if "defaultPerDay" in asked else b"{}")

    with PlainServer(answer) as server:
        site.now_ms = 1_795_176_000_000  # 2026-11-20 12:00 UTC, an hour after Pacific midnight and four
        site.configure(server.address, api="youtube-v3-buckets")
        result = site.reconcile()
    counts = {count.bucket: count.upstream_units for count in result.buckets}
    assert (counts["units"], counts["search"]) == (32, 3)
    assert result.buckets[0].methods[0].method == "videos.list"
    with PlainServer(answer) as server:
        site.now_ms = 1_790_100_000_000  # the limit was recorded two months earlier
        usage = b"{}"
        site.configure(server.address, api="youtube-v3-buckets")
        assert granted(site.reconcile(commit=False)) == {"units": 10_000}
