"""The upstream emulator: Google's client would hide much of it."""

import json
import re
import socket
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import httpx
import pytest

from support.emulator import Emulator

CHART = {"part": "snippet", "chart": "mostPopular", "regionCode": "US"}


def ask(
    upstream: Emulator, target: str, key: str | None = "test", verb: str = "GET", **options: Any
) -> tuple[int, Any]:
    headers = {"X-goog-api-key": key} if key else {}
    headers |= options.pop("headers", {})
    answer = httpx.request(verb, upstream.address + target, headers=headers, timeout=100, **options)
    return answer.status_code, answer.json() if answer.content else None


def get(upstream: Emulator, resource: str, key: str | None = "test", **params: str) -> tuple[int, Any]:
    return ask(upstream, f"/youtube/v3/{resource}", key, params=params)


def chart(upstream: Emulator, key: str = "test") -> tuple[int, Any]:
    return get(upstream, "videos", key, **CHART)


def search(upstream: Emulator, key: str = "test") -> tuple[int, Any]:
    return get(upstream, "search", key, part="snippet", q="cats", type="video")


def upload(upstream: Emulator, key: str = "test") -> tuple[int, Any]:
    return ask(upstream, "/upload/youtube/v3/videos?uploadType=media&part=id", key, "POST", content=b"film")


def reason(body: Any) -> str:
    return str(body["error"]["errors"][0]["reason"])


def test_the_emulator_prices_the_other_methods_and_answers_them_emptily(upstream: Emulator) -> None:
    _, captions = get(upstream, "captions", part="snippet", videoId="x")
    assert (captions["kind"], captions["items"]) == ("youtube#captionListResponse", [])
    body = {"snippet": {"title": "Später ansehen"}, "status": {"privacyStatus": "private"}}
    assert ask(upstream, "/youtube/v3/playlists?part=snippet", verb="POST", json=body)[0] == 401, "a key may not write"
    token = {"Authorization": "Bearer a-token"}
    _, made = ask(upstream, "/youtube/v3/playlists?part=snippet", None, "POST", headers=token, json=body)
    assert (made["kind"], made["snippet"], "status" in made) == ("youtube#playlist", body["snippet"], False)
    assert ask(upstream, f"/youtube/v3/playlists?id={made['id']}", None, "DELETE", headers=token) == (204, None)
    with socket.create_connection(("127.0.0.1", httpx.URL(upstream.address).port)) as line:
        line.sendall(b"HEAD /youtube/v3/videos?part=id&chart=mostPopular&key=k HTTP/1.0\r\n\r\n")
        head = line.makefile("rb").read()
    assert (head[:12], head[-4:]) == (b"HTTP/1.1 200", b"\r\n\r\n"), "HEAD is a GET whose answer has no body"
    assert len(get(upstream, "search", part="id", id="x", maxResults="1")[1]["items"]) == 1, "it selects no ids"
    assert upstream.usage()["units"] == {"units": 50 + 50 + 50 + 50 + 1 + 100}


def test_a_recorded_item_may_have_any_fields(tmp_path: Path) -> None:
    pages = {"items": [{"id": "v", "snippet": {"id": "x", "brief": "y"}}]}
    (tmp_path / "videos_list_mostPopular_US_p1.json").write_text(json.dumps(pages))
    with Emulator(recorded=tmp_path) as upstream:
        assert get(upstream, "search", part="id")[1]["items"][0]["id"]["videoId"] == "v"


# --- who is asking -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "query", "status", "expected"),
    [
        ({}, {}, 403, "forbidden"),
        ({"X-goog-api-key": "invalid-1"}, {}, 400, "badRequest"),
        ({"X-goog-api-key": "disabled-1"}, {}, 403, "accessNotConfigured"),
        ({"Authorization": "Bearer invalid-1"}, {}, 401, "authError"),
        ({}, {"key": "anything"}, 200, None),
        ({"Authorization": "Bearer anything"}, {}, 200, None),
        ({}, {"access_token": "anything"}, 200, None),
        ({"Authorization": "Bearer AIza-a-key"}, {}, 401, "authError"),
        ({"X-goog-api-key": "ya29.a-token"}, {}, 400, "badRequest"),
    ],
)
def test_a_caller_without_a_usable_key_is_refused_and_charges_nobody(
    upstream: Emulator, headers: dict[str, str], query: dict[str, str], status: int, expected: str | None
) -> None:
    answered, body = ask(upstream, "/youtube/v3/videos", None, headers=headers, params={**CHART, **query})
    assert answered == status
    assert expected is None or reason(body) == expected
    usage = upstream.usage()
    assert usage["requests"] == 1
    assert usage["by_method"] == {"videos.list": 1}
    assert usage["units"]["units"] == (0 if expected else 1)


def test_no_key_is_shown_anywhere(upstream: Emulator, capfd: pytest.CaptureFixture[str]) -> None:
    key = "AIza-secret"
    ask(upstream, "/youtube/v3/videos", key, params={**CHART, "key": "AIza-other-secret"})
    ask(upstream, "/nonsense?key=AIza-other-secret", key)
    ask(upstream, "/nonsense?key=AIza-other-secret", key, verb="BREW")
    printed = capfd.readouterr()
    assert "secret" not in json.dumps(upstream.usage()) + printed.out + printed.err


# --- quota -------------------------------------------------------------------------------------------


def test_a_pool_is_spent_to_its_last_unit() -> None:
    with Emulator(quota=102) as upstream:
        statuses = [call(upstream)[0] for call in (search, chart, search, chart, chart)]
        assert statuses == [200, 200, 403, 200, 403]
        usage = upstream.usage()
    assert usage["by_method"] == {"search.list": 2, "videos.list": 3}
    assert usage["units"] == {"units": 203}
    assert usage["refused_units"] == {"units": 101}
    (project,) = usage["by_project"].values()
    assert project["remaining_units"] == {"units": 0}


@pytest.mark.parametrize("day", [(2026, 3, 8), (2026, 7, 1), (2026, 11, 1)])
def test_quota_resets_at_pacific_midnight_exactly(day: tuple[int, int, int]) -> None:
    zone = ZoneInfo("America/Los_Angeles")
    midnight_ms = int(datetime(*day, tzinfo=zone).timestamp()) * 1000
    next_ms = int(datetime(day[0], day[1], day[2] + 1, tzinfo=zone).timestamp()) * 1000
    now_ms = [0]
    with Emulator(quota=1, clock=lambda: now_ms[0]) as upstream:
        statuses = []
        for at_ms in (midnight_ms, midnight_ms + 1, next_ms - 1, next_ms):
            now_ms[0] = at_ms
            statuses.append(chart(upstream)[0])
    assert statuses == [200, 403, 403, 200]


@pytest.mark.parametrize(
    ("name", "key", "fault", "call"),
    [
        ("400_API_KEY_INVALID", "invalid", None, chart),
        ("401_CREDENTIALS_MISSING", "k", None, lambda u, k: get(u, "captions/x", k)),
        ("403_SERVICE_DISABLED_accessNotConfigured", "disabled", None, chart),
        ("400_invalidRegionCode", "k", None, lambda u, k: get(u, "videos", k, **{**CHART, "regionCode": "VE "})),
        ("400_invalidPageToken", "k", None, lambda u, k: get(u, "videos", k, **CHART, pageToken="x")),
        ("404_videoChartNotFound", "k", None, lambda u, k: get(u, "videos", k, part="id", chart="x")),
        ("404_playlistNotFound", "k", None, lambda u, k: get(u, "playlistItems", k, part="id", playlistId="PLx")),
        ("403_quotaExceeded", "k", {"kind": "exhaust", "bucket": "units"}, chart),
        ("429_search_queries_per_day", "k", {"kind": "exhaust"}, search),
        ("429_search_limit_value_zero", "k", {"kind": "limit-zero"}, search),
        ("429_video_uploads_per_day", "k", {"kind": "exhaust"}, upload),
        ("429_rateLimitExceeded_bare", "k", {"status": 429}, chart),
        ("403_rateLimitExceeded", "k", {"status": 403}, chart),
        ("403_userRateLimitExceeded", "k", {"status": 403, "reason": "userRateLimitExceeded"}, chart),
        ("403_dailyLimitExceeded", "k", {"status": 403, "reason": "dailyLimitExceeded"}, chart),
        ("500_backendError", "k", {"status": 500}, chart),
        ("503_backendError", "k", {}, chart),
    ],
)
def test_an_error_has_the_recorded_body(
    shared_data: Path,
    name: str,
    key: str,
    fault: dict[str, Any] | None,
    call: Callable[[Emulator, str], tuple[int, Any]],
) -> None:
    with Emulator(allocation="buckets") as upstream:
        if fault is not None:
            upstream.fault(**{"kind": "status", **fault})
        status, body = call(upstream, key)
    assert status == int(name[:3])
    body_of_that_project = json.loads(re.sub(r"\b[0-9]{12}\b", "123456789012", json.dumps(body)))
    assert body_of_that_project == json.loads((shared_data / "errors" / f"{name}.json").read_bytes())
