"""The upstream emulator, seen by the real client, and byte by byte where the client would hide it."""

import http.client
import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from zoneinfo import ZoneInfo

import googleapiclient
import pytest
from google.auth import api_key
from google_auth_httplib2 import AuthorizedHttp
from googleapiclient.discovery import build_from_document
from googleapiclient.http import build_http

from quota.jobs.emulator.api import decode_token
from quota.jobs.emulator.replies import Rejected
from support.book_evidence import evidence_of
from support.commands import ROOT
from support.emulator import Emulator
from support.processes import in_threads

EIGHT_REGIONS = ("US", "GB", "DE", "FR", "IN", "BR", "AU", "CA")
CHART = {"part": "snippet", "chart": "mostPopular", "regionCode": "US"}
SEARCH = {"part": "snippet", "q": "cats", "type": "video"}


class Wire:
    """One kept-alive connection to an emulator, without a client library's help."""

    def __init__(self, emulator: Emulator, key: str | None = "test", timeout: float = 10) -> None:
        self.key = key
        host, port = emulator.address.removeprefix("http://").split(":")
        self.connection = http.client.HTTPConnection(host, int(port), timeout=timeout)

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def send(self, verb: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None) -> tuple[int, Any]:
        given = {"X-goog-api-key": self.key} if self.key else {}
        self.connection.request(verb, target, body, {**given, **(headers or {})})
        with self.connection.getresponse() as response:
            content = response.read()
            return response.status, json.loads(content) if content else None

    def get(self, resource: str, **params: object) -> tuple[int, Any]:
        return self.send("GET", f"/youtube/v3/{resource}?{urlencode(params)}")


class Client:
    def __init__(self, emulator: Emulator, key: str = "test") -> None:
        name = "discovery_cache/documents/youtube.v3.json"
        document = json.loads((Path(googleapiclient.__file__).parent / name).read_bytes())
        document["rootUrl"] = document["baseUrl"] = f"{emulator.address}/"
        self.http = AuthorizedHttp(api_key.Credentials(key), http=build_http())
        self.youtube = build_from_document(document, http=self.http)

    def chart(self, region: str = "US", **params: Any) -> Any:
        given = {"part": "snippet", "chart": "mostPopular", "regionCode": region, "maxResults": 50}
        return self.youtube.videos().list(**{**given, **params})

    def pages(self, region: str = "US", **params: Any) -> Iterator[Any]:
        request = self.chart(region, **params)
        while request is not None:
            page = request.execute()
            yield page
            request = self.youtube.videos().list_next(request, page)


@pytest.fixture
def wire(upstream: Emulator) -> Iterator[Wire]:
    with Wire(upstream) as connection:
        yield connection


@pytest.fixture
def client(upstream: Emulator) -> Iterator[Client]:
    real = Client(upstream)
    yield real
    real.youtube.close()


def without_project(body: Any) -> Any:
    return json.loads(re.sub(r"\b[0-9]{12}\b", "123456789012", json.dumps(body)))


def reason(body: Any) -> str:
    return str(body["error"]["errors"][0]["reason"])


# --- charts ------------------------------------------------------------------------------------------


def test_page_tokens_have_the_real_encoding_and_lead_on_and_back(wire: Wire) -> None:
    seen, pages, token = [], [], ""
    for _ in range(4):
        _, page = wire.get("videos", **CHART, maxResults=50, pageToken=token)
        seen.append((page.get("prevPageToken"), page.get("nextPageToken")))
        pages.append(page["items"])
        token = page.get("nextPageToken", "")
    recorded = [(None, "CDIQAA"), ("CDIQAQ", "CGQQAA"), ("CGQQAQ", "CJYBEAA"), ("CJYBEAE", None)]
    assert seen == recorded
    assert len({item["id"] for items in pages for item in items}) == 200
    assert wire.get("videos", **CHART, maxResults=50, pageToken="CDIQAQ")[1]["items"] == pages[0]


@pytest.mark.parametrize("token", ["A", "====", "CDIQAg", "CDIQAA=", "CDIQ", "💥", "CDIQAAAA", "_" * 99])
def test_a_made_up_token_is_invalid(wire: Wire, token: str) -> None:
    status, body = wire.get("videos", **CHART, pageToken=token)
    assert (status, reason(body)) == (400, "invalidPageToken")
    with pytest.raises(Rejected):
        decode_token(token, 50)


def test_all_eight_regions_have_charts_of_their_own_with_some_hits_in_common(client: Client) -> None:
    charts = [{item["id"] for item in client.chart(region).execute()["items"]} for region in EIGHT_REGIONS]
    in_all = set.intersection(*charts)
    assert 0 < len(in_all) < 10
    assert len(set.union(*charts)) == 8 * (50 - len(in_all)) + len(in_all)


def test_a_chart_can_be_narrowed_to_a_category(wire: Wire) -> None:
    _, page = wire.get("videos", **CHART, videoCategoryId="10", maxResults=50)
    assert {item["snippet"]["categoryId"] for item in page["items"]} == {"10"}
    status, body = wire.get("videos", **CHART, videoCategoryId="99")
    assert (status, reason(body)) == (404, "videoChartNotFound")


# --- what is returned --------------------------------------------------------------------------------


def test_only_the_requested_parts_are_returned(client: Client) -> None:
    asked = {"statistics": {"statistics"}, "snippet,contentDetails": {"snippet", "contentDetails"}}
    for part, expected in asked.items():
        (item,) = client.chart(part=part, maxResults=1).execute()["items"]
        assert set(item) == {"kind", "etag", "id"} | expected
    # A list of parts travels as a repeated parameter.
    (item,) = client.chart(part=["snippet", "statistics"], maxResults=1).execute()["items"]
    assert {"snippet", "statistics"} < set(item)


@pytest.mark.parametrize(
    ("resource", "params", "status", "expected"),
    [
        # What is required.
        ("videos", {"chart": "mostPopular"}, 400, "required"),
        ("videos", {"part": "snippet"}, 400, "missingRequiredParameter"),
        ("videoCategories", {"part": "snippet"}, 400, "missingRequiredParameter"),
        # What is known.
        ("videos", {**CHART, "part": "snippet,nonsense"}, 400, "unknownPart"),
        ("videos", {**CHART, "chart": "leastPopular"}, 404, "videoChartNotFound"),
        ("videos", {**CHART, "regionCode": "XX"}, 400, "invalidRegionCode"),
        ("search", {**SEARCH, "regionCode": "us"}, 400, "invalidRegionCode"),
        ("playlistItems", {"part": "snippet", "playlistId": "UUx"}, 404, "playlistNotFound"),
        ("nonsense", {}, 404, "notFound"),
        # What is in range: charts 1 to 50, the others from 0.
        ("videos", {**CHART, "maxResults": 0}, 400, "invalidParameter"),
        ("videos", {**CHART, "maxResults": "five"}, 400, "invalidParameter"),
        ("search", {**SEARCH, "maxResults": 51}, 400, "invalidParameter"),
        ("videos", {"part": "id", "id": ",".join(map(str, range(51)))}, 400, "invalidFilters"),
    ],
)
def test_an_invalid_request_is_refused_and_charged(
    upstream: Emulator, wire: Wire, resource: str, params: dict[str, object], status: int, expected: str
) -> None:
    answered, body = wire.get(resource, **params)
    assert (answered, reason(body)) == (status, expected)
    assert body["error"]["code"] == status
    assert upstream.usage()["units"]["units"] == (100 if resource == "search" else 1)


def test_unknown_ids_are_absent_and_known_ones_keep_their_order(wire: Wire) -> None:
    _, page = wire.get("videos", **CHART, maxResults=3)
    first, second, third = (item["id"] for item in page["items"])
    asked = ",".join([third, "AAAAAAAAAAA", first, "", "not an id", second, third])
    _, found = wire.get("videos", part="snippet", id=asked)
    assert [item["id"] for item in found["items"]] == [third, first, second]
    assert found["items"][1] == page["items"][0]
    assert found["pageInfo"] == {"totalResults": 3, "resultsPerPage": 3}


def test_an_address_too_long_for_a_get_arrives_all_the_same(upstream: Emulator, client: Client) -> None:
    wanted = client.chart(maxResults=1).execute()["items"][0]["id"]
    ids = [wanted] + [f"{number:060}" for number in range(49)]
    found = client.youtube.videos().list(part="id", id=",".join(ids)).execute()
    assert [item["id"] for item in found["items"]] == [wanted]
    assert upstream.usage()["by_method"] == {"videos.list": 2}


def test_search_finds_titles_with_the_words_page_by_page(client: Client) -> None:
    search = client.youtube.search()
    request = search.list(part="snippet", q="blue 🐳 whale", type="video", maxResults=50)
    found: list[Any] = []
    totals = set()
    while request is not None:
        page = request.execute()
        found += page["items"]
        totals.add(page["pageInfo"]["totalResults"])
        request = search.list_next(request, page)
    assert totals == {len(found)}
    assert len({item["id"]["videoId"] for item in found}) == len(found) > 50
    assert all("blue 🐳 whale" in item["snippet"]["title"] for item in found)


def test_a_channel_leads_to_its_uploads_and_back(wire: Wire) -> None:
    _, chart = wire.get("videos", **CHART, maxResults=1)
    channel_id = chart["items"][0]["snippet"]["channelId"]
    _, channels = wire.get("channels", part="snippet,contentDetails,statistics", id=channel_id)
    (channel,) = channels["items"]
    playlist = channel["contentDetails"]["relatedPlaylists"]["uploads"]
    _, listed = wire.get("playlistItems", part="contentDetails,snippet", playlistId=playlist)
    assert str(listed["pageInfo"]["totalResults"]) == channel["statistics"]["videoCount"]
    _, video = wire.get("videos", part="snippet", id=listed["items"][0]["contentDetails"]["videoId"])
    assert video["items"][0]["snippet"]["channelId"] == channel_id
    assert video["items"][0]["snippet"]["channelTitle"] == channel["snippet"]["title"]
    _, by_handle = wire.get("channels", part="id", forHandle=channel["snippet"]["customUrl"])
    assert [item["id"] for item in by_handle["items"]] == [channel_id]
    _, mine = wire.get("search", part="snippet", channelId=channel_id, type="video")
    assert mine["pageInfo"]["totalResults"] == listed["pageInfo"]["totalResults"]


def test_regions_and_categories_are_listed(client: Client) -> None:
    regions = client.youtube.i18nRegions().list(part="snippet").execute()["items"]
    names = {item["snippet"]["gl"]: item["snippet"]["name"] for item in regions}
    assert len(names) > 100
    assert set(EIGHT_REGIONS) < set(names)
    assert names["DE"] == "Germany"
    categories = client.youtube.videoCategories().list(part="snippet", regionCode="US").execute()
    assert {"10": "Music"}.items() <= {item["id"]: item["snippet"]["title"] for item in categories["items"]}.items()


def test_the_emulator_prices_the_other_methods_and_answers_them_emptily(upstream: Emulator, client: Client) -> None:
    captions = client.youtube.captions().list(part="snippet", videoId="x").execute()
    assert captions["kind"] == "youtube#captionListResponse"
    assert captions["items"] == []
    body = {"snippet": {"title": "Später ansehen"}, "status": {"privacyStatus": "private"}}
    made = client.youtube.playlists().insert(part="snippet", body=body).execute()
    assert made["kind"] == "youtube#playlist"
    assert made["snippet"] == body["snippet"]
    assert "status" not in made
    assert client.youtube.playlists().delete(id=made["id"]).execute() == ""
    assert upstream.usage()["units"] == {"units": 50 + 50 + 50}


# --- who is asking -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "query", "status", "expected"),
    [
        ({}, "", 403, "forbidden"),
        ({"X-goog-api-key": "invalid-1"}, "", 400, "badRequest"),
        ({"X-goog-api-key": "disabled-1"}, "", 403, "accessNotConfigured"),
        ({"Authorization": "Bearer invalid-1"}, "", 401, "authError"),
        ({"X-goog-api-key": "anything"}, "", 200, None),
        ({}, "&key=anything", 200, None),
        ({"Authorization": "Bearer anything"}, "", 200, None),
        ({}, "&access_token=anything", 200, None),
        ({"Authorization": "Bearer AIza-a-key"}, "", 401, "authError"),
        ({"Authorization": "Bearer AIza-a-key", "X-goog-api-key": "AIza-a-key"}, "", 401, "authError"),
        ({"X-goog-api-key": "ya29.a-token"}, "", 400, "badRequest"),
    ],
)
def test_a_caller_without_a_usable_key_is_refused_and_charges_nobody(
    upstream: Emulator, headers: dict[str, str], query: str, status: int, expected: str | None
) -> None:
    with Wire(upstream, key=None) as wire:
        target = f"/youtube/v3/videos?{urlencode(CHART)}{query}"
        answered, body = wire.send("GET", target, headers=headers)
    assert answered == status
    assert expected is None or reason(body) == expected
    usage = upstream.usage()
    assert usage["requests"] == 1
    assert usage["by_method"] == {"videos.list": 1}
    assert usage["units"]["units"] == (0 if expected else 1)


def test_a_key_is_no_token_and_a_token_no_key(upstream: Emulator) -> None:
    target = f"/youtube/v3/videos?{urlencode(CHART)}"
    with Wire(upstream, key=None) as wire:
        ways: list[dict[str, str]] = [{"X-Goog-Api-Key": "one"}, {"Authorization": "Bearer other"}]
        ways += [{"Authorization": "Bearer one"}, {"X-Goog-Api-Key": "other"}]
        answers = [wire.send("GET", target, headers=way) for way in ways]
    assert [status for status, _ in answers] == [200, 200, 401, 400]
    recorded = next(row for row in evidence_of("youtube-v3")[1] if row["status"] == 401)
    assert answers[2][1] == recorded["body"]


def test_keys_of_one_project_share_its_quota() -> None:
    projects = {"key-a": "shop", "key-b": "shop"}
    with Emulator(quota=1, projects=projects) as upstream:
        with Wire(upstream, "key-a") as a, Wire(upstream, "key-b") as b, Wire(upstream, "c") as c:
            statuses = [wire.get("videos", **CHART)[0] for wire in (a, b, c)]
        assert statuses == [200, 403, 200]
        assert upstream.usage()["by_project"]["shop"]["units"] == {"units": 2}


def test_no_key_is_shown_anywhere(upstream: Emulator, capfd: pytest.CaptureFixture[str]) -> None:
    with Wire(upstream, key="AIza-secret") as wire:
        wire.get("videos", **CHART, key="AIza-other-secret")
        wire.send("GET", "/nonsense?key=AIza-other-secret")
        wire.send("BREW", "/nonsense?key=AIza-other-secret")
    printed = capfd.readouterr()
    assert "secret" not in json.dumps(upstream.usage()) + printed.out + printed.err


# --- quota -------------------------------------------------------------------------------------------


def test_a_pool_is_spent_to_its_last_unit() -> None:
    with Emulator(quota=102) as upstream, Wire(upstream) as wire:
        calls = [
            wire.get("search", **SEARCH)[0],
            wire.get("videos", **CHART)[0],
            wire.get("search", **SEARCH)[0],
            wire.get("videos", **CHART)[0],
            wire.get("videos", **CHART)[0],
        ]
        assert calls == [200, 200, 403, 200, 403]
        usage = upstream.usage()
    assert usage["requests"] == 5
    assert usage["by_method"] == {"search.list": 2, "videos.list": 3}
    assert usage["units"] == {"units": 203}
    assert usage["refused_units"] == {"units": 101}
    (project,) = usage["by_project"].values()
    assert project["remaining_units"] == {"units": 0}


def test_buckets_are_counted_apart() -> None:
    with Emulator(allocation="buckets", quota=3) as upstream, Wire(upstream) as wire:
        searches = [wire.get("search", **SEARCH, maxResults=1)[0] for _ in range(101)]
        assert (searches.count(200), searches[-1]) == (100, 429)
        reads = [wire.get("videos", **CHART)[0] for _ in range(4)]
        assert reads == [200, 200, 200, 403]
        stats, _ = wire.get("videos:batchGetStats", part="statistics", id="x")
        assert stats == 200
        target = "/upload/youtube/v3/videos?uploadType=media&part=id"
        uploads = [wire.send("POST", target, b"film")[0] for _ in range(101)]
        assert (uploads.count(200), uploads[-1]) == (100, 429)
        assert upstream.usage()["units"] == {
            "units": 4,
            "search": 101,
            "uploads": 101,
            "batch-stats": 1,
        }


@pytest.mark.parametrize(
    ("verb", "resource", "units"),
    [
        ("GET", "videos", 1),
        ("GET", "captions/a-caption", 200),
        ("GET", "search", 100),
        ("POST", "playlists", 50),
        ("POST", "videos/rate", 50),
        ("POST", "captions", 400),
        ("PUT", "captions", 450),
        ("POST", "videos", 100),
        ("GET", "nonsense", 1),
    ],
)
def test_a_pool_has_a_price_for_each_method(
    upstream: Emulator, wire: Wire, verb: str, resource: str, units: int
) -> None:
    wire.send(verb, f"/youtube/v3/{resource}")
    assert upstream.usage()["units"] == {"units": units}


@pytest.mark.parametrize("day", [(2026, 3, 8), (2026, 7, 1), (2026, 11, 1)])
def test_quota_resets_at_pacific_midnight_exactly(day: tuple[int, int, int]) -> None:
    zone = ZoneInfo("America/Los_Angeles")
    midnight_ms = int(datetime(*day, tzinfo=zone).timestamp()) * 1000
    next_ms = int(datetime(day[0], day[1], day[2] + 1, tzinfo=zone).timestamp()) * 1000
    now_ms = [0]
    with Emulator(quota=1, clock=lambda: now_ms[0]) as upstream, Wire(upstream) as wire:
        statuses = []
        for at_ms in (midnight_ms, midnight_ms + 1, next_ms - 1, next_ms):
            now_ms[0] = at_ms
            statuses.append(wire.get("videos", **CHART)[0])
    assert statuses == [200, 403, 403, 200]


def test_concurrent_calls_are_admitted_exactly_up_to_the_quota() -> None:
    with Emulator(quota=100) as upstream:

        def hammer() -> list[int]:
            with Wire(upstream) as wire:
                return [wire.get("videos", **CHART)[0] for _ in range(25)]

        statuses = [status for found in in_threads(hammer, *[()] * 8) for status in found]
    assert sorted(statuses) == [200] * 100 + [403] * 100


LimitCheck = Callable[[Wire], tuple[int, Any]]


def chart(wire: Wire) -> tuple[int, Any]:
    return wire.get("videos", **CHART)


def search(wire: Wire) -> tuple[int, Any]:
    return wire.get("search", **SEARCH)


def upload(wire: Wire) -> tuple[int, Any]:
    return wire.send("POST", "/upload/youtube/v3/videos?uploadType=media&part=id", b"film")


@pytest.mark.parametrize(
    ("name", "key", "fault", "ask"),
    [
        ("400_API_KEY_INVALID", "invalid", None, chart),
        ("403_SERVICE_DISABLED_accessNotConfigured", "disabled", None, chart),
        ("400_invalidRegionCode", "k", None, lambda w: w.get("videos", **{**CHART, "regionCode": "VE "})),
        ("400_invalidPageToken", "k", None, lambda w: w.get("videos", **CHART, pageToken="x")),
        ("404_videoChartNotFound", "k", None, lambda w: w.get("videos", part="id", chart="x")),
        ("404_playlistNotFound", "k", None, lambda w: w.get("playlistItems", part="id", playlistId="PLx")),
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
    shared_data: Path, name: str, key: str, fault: dict[str, Any] | None, ask: LimitCheck
) -> None:
    with Emulator(allocation="buckets") as upstream, Wire(upstream, key) as wire:
        if fault is not None:
            upstream.fault(**{"kind": "status", **fault})
        status, body = ask(wire)
    assert status == int(name[:3])
    assert without_project(body) == json.loads((shared_data / "errors" / f"{name}.json").read_bytes())


# --- recorded pages ----------------------------------------------------------------------------------


@pytest.fixture
def folder(shared_data: Path) -> Path:
    return shared_data / "recorded" / "trending_2018"


@pytest.fixture
def recorded(folder: Path) -> Iterator[Emulator]:
    with Emulator(recorded=folder) as emulator:
        yield emulator


def test_a_recording_is_served_page_for_page(folder: Path, recorded: Emulator) -> None:
    client = Client(recorded)
    served = pages = 0
    for region in ("US", "GB", "DE", "FR", "IN", "BR", "CA"):
        for number, page in enumerate(client.pages(region, part="snippet,statistics"), start=1):
            file = json.loads((folder / f"videos_list_mostPopular_{region}_p{number}.json").read_bytes())
            assert {**page, "etag": file["etag"]} == file
            served += len(page["items"])
            pages += 1
    client.youtube.close()
    assert (served, pages) == (1_161, 24)
    assert recorded.usage()["units"] == {"units": 24}


def test_a_recording_knows_its_own_regions_ids_and_words_only(recorded: Emulator) -> None:
    with Wire(recorded) as wire:
        status, body = wire.get("videos", **{**CHART, "regionCode": "AU"})
        assert (status, reason(body)) == (400, "invalidRegionCode")
        _, page = wire.get("videos", part="snippet", id="U68MJz9DrI4,AAAAAAAAAAA")
        (video,) = page["items"]
        assert video["snippet"]["channelTitle"] == "OfficialGucciMane"
        _, found = wire.get("search", part="snippet", q="wake up in the sky", type="video")
        assert "U68MJz9DrI4" in {item["id"]["videoId"] for item in found["items"]}
        channel = video["snippet"]["channelId"]
        _, channels = wire.get("channels", part="snippet", id=channel)
        assert channels["items"][0]["snippet"]["title"] == "OfficialGucciMane"
        _, uploads = wire.get("playlistItems", part="snippet", playlistId="UU" + channel[2:])
        assert uploads["pageInfo"]["totalResults"] >= 1


PAGE = "videos_list_mostPopular_US_p1.json"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "no recording in"),
        ({PAGE: "{"}, "is no page of videos.list"),
        ({PAGE: '{"items": [{"id": 3}]}'}, "an item has no id"),
        ({"videos_list_mostPopular_US_p2.json": '{"items": []}'}, "lacks page 1 of US"),
    ],
)
def test_an_unusable_recording_is_named_in_one_line(tmp_path: Path, files: dict[str, str], expected: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=expected) as caught:
        Emulator(recorded=tmp_path)
    assert "\n" not in str(caught.value)


def test_a_recording_that_is_no_folder_is_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder"):
        Emulator(recorded=tmp_path / "absent")


# --- the server itself -------------------------------------------------------------------------------


def test_usage_and_reset_are_served_over_http_and_are_free(upstream: Emulator, wire: Wire) -> None:
    chart(wire)
    upstream.fault("status")
    assert wire.send("GET", "/emulator/usage") == (200, upstream.usage())
    assert upstream.usage()["requests"] == 1
    status, usage = wire.send("POST", "/emulator/reset")
    assert (status, usage["requests"], usage["units"]) == (200, 0, {"units": 0})
    assert chart(wire)[0] == 200  # the queued fault is gone too
    assert wire.send("GET", "/emulator/nonsense")[0] == 404


def raw(emulator: Emulator, sent: bytes) -> bytes:
    host, port = emulator.address.removeprefix("http://").split(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=300) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        while piece := connection.recv(65_536):
            received += piece
    return received


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GARBAGE\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 505),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"POST /youtube/v3/videos HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /youtube/v3/videos HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", 413),
        (b"POST /youtube/v3/videos HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
    ],
)
def test_malformed_http_is_refused_without_a_trace_on_screen(
    upstream: Emulator, sent: bytes, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    head, _, body = raw(upstream, sent).partition(b"\r\n\r\n")
    assert head.split()[1] == str(status).encode()
    assert json.loads(body)["error"]["code"] == status
    assert capfd.readouterr() == ("", "")
    assert upstream.usage()["requests"] == 0


def test_a_request_that_breaks_off_never_arrived(upstream: Emulator, capfd: pytest.CaptureFixture[str]) -> None:
    begun = b"POST /youtube/v3/videos HTTP/1.1\r\nX-goog-api-key: k\r\nContent-Length: 10\r\n\r\nabc"
    assert raw(upstream, begun) == b""
    assert upstream.usage()["requests"] == 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("query", ["part=%zz", "part=%", "part=%ff%fe", "q=" + "&q=" * 2_000])
def test_a_query_that_does_not_decode_is_refused_and_charged(upstream: Emulator, wire: Wire, query: str) -> None:
    status, body = wire.send("GET", f"/youtube/v3/videos?{query}")
    assert (status, reason(body)) == (400, "badRequest")
    assert upstream.usage()["units"] == {"units": 1}


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(wire: Wire, body: bytes) -> None:
    status, answer = wire.send("POST", "/youtube/v3/playlists?part=snippet", body)
    assert (status, reason(answer)) == (400, "badRequest")


def test_a_client_that_waits_for_permission_to_send_its_body_gets_it(upstream: Emulator) -> None:
    request = (
        b"POST /youtube/v3/playlists?part=id HTTP/1.1\r\nX-goog-api-key: k\r\n"
        b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    )
    host, port = upstream.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=300) as connection:
        connection.sendall(request)
        assert connection.recv(1024).startswith(b"HTTP/1.1 100 ")
        connection.sendall(b"{}")
        assert connection.recv(1024).startswith(b"HTTP/1.1 200 ")


def test_stopping_hangs_up_on_idle_and_waiting_clients() -> None:
    upstream = Emulator()
    with Wire(upstream) as idle, Wire(upstream) as waiting:
        with upstream:
            chart(idle)
            upstream.fault("hang", ms=60_000)
            waiting.connection.request("GET", "/youtube/v3/videos", headers={"X-goog-api-key": "k"})
            while upstream.usage()["requests"] < 2:
                pass
        with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
            waiting.connection.getresponse()
        with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
            chart(idle)
    upstream.stop()  # a second time does no harm


def test_an_emulator_that_never_served_lets_go_of_its_port() -> None:
    first = Emulator()
    port = int(first.address.rpartition(":")[2])
    with pytest.raises(OSError, match="in use"):
        Emulator(port=port)
    first.stop()
    with Emulator(port=port) as second:
        assert second.address == first.address


def test_importing_the_emulator_imports_no_client_and_no_cli() -> None:
    unwanted = {"googleapiclient", "click", "quota.budget", "httplib2"}
    script = f"import sys, quota.jobs.emulator; print(sorted({unwanted} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
