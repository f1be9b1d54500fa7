"""The upstream emulator, seen by the real client, and byte by byte where the client would hide it."""

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
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
from googleapiclient.errors import HttpError
from googleapiclient.http import MediaInMemoryUpload, build_http

from quota.jobs.emulator.api import decode_token, encode_token
from quota.jobs.emulator.replies import Rejected
from support.book_evidence import evidence_of
from support.emulator import Emulator

REPOSITORY = Path(__file__).resolve().parents[3]
SHARED_DATA = Path(os.environ.get("QUOTA_SHARED_DATA", REPOSITORY.parent / "shared" / "data"))
RECORDED = SHARED_DATA / "recorded" / "trending_2018"
ERRORS = SHARED_DATA / "errors"

needs_recording = pytest.mark.skipif(
    not RECORDED.is_dir(), reason=f"no recorded pages at {RECORDED}; set QUOTA_SHARED_DATA"
)
needs_errors = pytest.mark.skipif(
    not ERRORS.is_dir(), reason=f"no recorded error bodies at {ERRORS}; set QUOTA_SHARED_DATA"
)

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
        """(status, parsed body)."""
        given = {"X-goog-api-key": self.key} if self.key else {}
        self.connection.request(verb, target, body, {**given, **(headers or {})})
        with self.connection.getresponse() as response:
            content = response.read()
            return response.status, json.loads(content) if content else None

    def get(self, resource: str, **params: object) -> tuple[int, Any]:
        return self.send("GET", f"/youtube/v3/{resource}?{urlencode(params)}")


class Client:
    """The real client, its discovery document pointed at an emulator."""

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
def upstream() -> Iterator[Emulator]:
    with Emulator() as emulator:
        yield emulator


@pytest.fixture
def wire(upstream: Emulator) -> Iterator[Wire]:
    with Wire(upstream) as connection:
        yield connection


@pytest.fixture
def client(upstream: Emulator) -> Iterator[Client]:
    real = Client(upstream)
    yield real
    real.youtube.close()


def recorded_error(name: str) -> Any:
    return json.loads((ERRORS / name).read_bytes())


def without_project(body: Any) -> Any:
    """Project numbers replaced as in the recorded bodies."""
    return json.loads(re.sub(r"\b[0-9]{12}\b", "123456789012", json.dumps(body)))


def reason(body: Any) -> str:
    return str(body["error"]["errors"][0]["reason"])


# --- charts ------------------------------------------------------------------------------------------


def test_a_chart_is_four_pages_of_fifty_distinct_videos(upstream: Emulator, client: Client) -> None:
    pages = list(client.pages("DE"))
    ids = {item["id"] for page in pages for item in page["items"]}
    assert len(pages) == 4
    assert len(ids) == 200
    assert {page["pageInfo"]["totalResults"] for page in pages} == {200}
    assert upstream.usage()["units"] == {"units": 4}


def test_page_tokens_have_the_real_encoding(wire: Wire) -> None:
    """The tokens are those of the recorded pages."""
    seen = []
    token = ""
    for _ in range(4):
        _, page = wire.get("videos", **CHART, maxResults=50, pageToken=token)
        seen.append((page.get("prevPageToken"), page.get("nextPageToken")))
        token = page.get("nextPageToken", "")
    assert seen == [
        (None, "CDIQAA"),
        ("CDIQAQ", "CGQQAA"),
        ("CGQQAQ", "CJYBEAA"),
        ("CJYBEAE", None),
    ]


def test_going_back_returns_the_page_before(wire: Wire) -> None:
    _, first = wire.get("videos", **CHART, maxResults=7)
    _, second = wire.get("videos", **CHART, maxResults=7, pageToken=first["nextPageToken"])
    _, back = wire.get("videos", **CHART, maxResults=7, pageToken=second["prevPageToken"])
    assert back["items"] == first["items"]
    assert back["items"] != second["items"]


@pytest.mark.parametrize("offset", [0, 5, 50, 127, 128, 150, 16_384, 1_000_000])
def test_a_token_decodes_to_the_offset_it_was_made_of(offset: int) -> None:
    assert decode_token(encode_token(offset), 50) == offset
    assert decode_token(encode_token(offset, 1), 50) == max(0, offset - 50)


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


def test_two_emulators_answer_alike(wire: Wire) -> None:
    with Emulator() as other, Wire(other, key="another") as other_wire:
        for region in EIGHT_REGIONS:
            asked = {**CHART, "part": "snippet,statistics", "regionCode": region}
            assert wire.get("videos", **asked) == other_wire.get("videos", **asked)


def test_generated_texts_span_scripts_and_marks(wire: Wire) -> None:
    titles = {}
    for region in ("IN", "DE", "SA"):
        _, page = wire.get("videos", **{**CHART, "regionCode": region, "maxResults": 50})
        titles[region] = "".join(item["snippet"]["title"] for item in page["items"])
    assert re.search("[\u0900-\u097f]", titles["IN"])  # Devanagari
    assert re.search("[äöüß]", titles["DE"])
    assert re.search("[\u0600-\u06ff]", titles["SA"])  # Arabic
    everything = "".join(titles.values())
    assert re.search("[\u0300-\u036f]", everything)  # combining marks
    assert "\u200d" in everything  # joined emoji
    assert '"' in everything


def test_likes_and_comments_may_be_absent_and_views_may_pass_32_bits(client: Client) -> None:
    found = [item for page in client.pages("GB", part="statistics") for item in page["items"]]
    counts = [item["statistics"] for item in found]
    assert {"likeCount" in count for count in counts} == {True, False}
    assert {"commentCount" in count for count in counts} == {True, False}
    assert max(int(count["viewCount"]) for count in counts) > 2**31


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
        ("search", {"q": "x"}, 400, "required"),
        ("channels", {"part": "snippet"}, 400, "missingRequiredParameter"),
        ("playlistItems", {"part": "snippet"}, 400, "missingRequiredParameter"),
        ("videoCategories", {"part": "snippet"}, 400, "missingRequiredParameter"),
        ("commentThreads", {}, 400, "required"),
        # What is known.
        ("videos", {**CHART, "part": "snippet,nonsense"}, 400, "unknownPart"),
        ("videos", {**CHART, "chart": "leastPopular"}, 404, "videoChartNotFound"),
        ("videos", {**CHART, "regionCode": "XX"}, 400, "invalidRegionCode"),
        ("search", {**SEARCH, "regionCode": "us"}, 400, "invalidRegionCode"),
        ("videoCategories", {"part": "snippet", "regionCode": "?"}, 400, "invalidRegionCode"),
        ("playlistItems", {"part": "snippet", "playlistId": "UUx"}, 404, "playlistNotFound"),
        ("nonsense", {}, 404, "notFound"),
        # What is in range: charts 1 to 50, the others from 0.
        ("videos", {**CHART, "maxResults": 0}, 400, "invalidParameter"),
        ("videos", {**CHART, "maxResults": 51}, 400, "invalidParameter"),
        ("videos", {**CHART, "maxResults": "five"}, 400, "invalidParameter"),
        ("videos", {**CHART, "maxResults": "-1"}, 400, "invalidParameter"),
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


def test_a_page_holds_five_items_unless_told_otherwise(wire: Wire) -> None:
    assert len(wire.get("videos", **CHART)[1]["items"]) == 5
    assert len(wire.get("search", **SEARCH)[1]["items"]) == 5
    nothing = wire.get("search", **SEARCH, maxResults=0)[1]
    assert nothing["items"] == []
    assert "nextPageToken" not in nothing


def test_unknown_ids_are_absent_and_known_ones_keep_their_order(wire: Wire) -> None:
    _, page = wire.get("videos", **CHART, maxResults=3)
    first, second, third = (item["id"] for item in page["items"])
    asked = ",".join([third, "AAAAAAAAAAA", first, "", "not an id", second, third])
    _, found = wire.get("videos", part="snippet", id=asked)
    assert [item["id"] for item in found["items"]] == [third, first, second]
    assert found["items"][1] == page["items"][0]
    assert found["pageInfo"] == {"totalResults": 3, "resultsPerPage": 3}


def test_fifty_ids_can_be_asked_for_at_once(client: Client) -> None:
    page = client.chart("FR").execute()
    ids = [item["id"] for item in page["items"]]
    found = client.youtube.videos().list(part="snippet", id=",".join(ids)).execute()
    assert found["items"] == page["items"]


def test_an_address_too_long_for_a_get_arrives_all_the_same(upstream: Emulator, client: Client) -> None:
    """The client turns it into a POST with an overriding header."""
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


def test_what_a_search_found_can_be_asked_for_by_id(wire: Wire) -> None:
    _, page = wire.get("search", **SEARCH, maxResults=50)
    titles = {item["id"]["videoId"]: item["snippet"]["title"] for item in page["items"]}
    _, found = wire.get("videos", part="snippet", id=",".join(titles))
    assert {item["id"]: item["snippet"]["title"] for item in found["items"]} == titles


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


def test_the_rest_of_the_api_is_priced_and_answered_emptily(upstream: Emulator, client: Client) -> None:
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


def test_bodies_are_compressed_for_clients_that_accept_it(wire: Wire) -> None:
    headers = {"X-goog-api-key": "test", "Accept-Encoding": "gzip"}
    wire.connection.request("GET", f"/youtube/v3/videos?{urlencode(CHART)}", headers=headers)
    with wire.connection.getresponse() as response:
        assert response.headers["Content-Encoding"] == "gzip"
        assert response.read(2) == b"\x1f\x8b"
    assert len(wire.get("videos", **CHART)[1]["items"]) == 5  # and plain for the others


# --- who is asking -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "query", "status", "expected"),
    [
        ({}, "", 403, "forbidden"),
        ({"Authorization": "Basic abc"}, "", 403, "forbidden"),
        ({"X-goog-api-key": "invalid-1"}, "", 400, "badRequest"),
        ({}, "&key=invalid-1", 400, "badRequest"),
        ({"X-goog-api-key": "disabled-1"}, "", 403, "accessNotConfigured"),
        ({"Authorization": "Bearer invalid-1"}, "", 401, "authError"),
        ({"X-goog-api-key": "anything"}, "", 200, None),
        ({}, "&key=anything", 200, None),
        ({"Authorization": "Bearer anything"}, "", 200, None),
        ({}, "&access_token=anything", 200, None),
        ({"Authorization": "Bearer AIza-a-key"}, "", 401, "authError"),
        ({}, "&access_token=AIza-a-key", 401, "authError"),
        ({"Authorization": "Bearer AIza-a-key", "X-goog-api-key": "AIza-a-key"}, "", 401, "authError"),
        ({"X-goog-api-key": "ya29.a-token"}, "", 400, "badRequest"),
        ({}, "&key=ya29.a-token", 400, "badRequest"),
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
    """A refused call leaves the budget untouched: cheaper ones still fit. It did reach the wire."""
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
        ("GET", "captions", 50),
        ("GET", "search", 100),
        ("POST", "playlists", 50),
        ("DELETE", "videos", 50),
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
    """Also on the days of 23 and 25 hours."""
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
    statuses: list[int] = []
    with Emulator(quota=100) as upstream:

        def hammer() -> None:
            with Wire(upstream) as wire:
                statuses.extend(wire.get("videos", **CHART)[0] for _ in range(25))

        threads = [threading.Thread(target=hammer) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert upstream.usage()["requests"] == 200
    assert sorted(statuses) == [200] * 100 + [403] * 100


# --- bodies of errors --------------------------------------------------------------------------------

LimitCheck = Callable[[Wire], tuple[int, Any]]


def chart(wire: Wire) -> tuple[int, Any]:
    return wire.get("videos", **CHART)


def search(wire: Wire) -> tuple[int, Any]:
    return wire.get("search", **SEARCH)


def upload(wire: Wire) -> tuple[int, Any]:
    return wire.send("POST", "/upload/youtube/v3/videos?uploadType=media&part=id", b"film")


@needs_errors
@pytest.mark.parametrize(
    ("name", "key", "fault", "ask"),
    [
        ("400_API_KEY_INVALID.json", "invalid", None, chart),
        ("403_SERVICE_DISABLED_accessNotConfigured.json", "disabled", None, chart),
        ("400_invalidRegionCode.json", "k", None, lambda w: w.get("videos", **{**CHART, "regionCode": "VE "})),
        ("400_invalidPageToken.json", "k", None, lambda w: w.get("videos", **CHART, pageToken="x")),
        ("404_videoChartNotFound.json", "k", None, lambda w: w.get("videos", part="id", chart="x")),
        (
            "404_playlistNotFound.json",
            "k",
            None,
            lambda w: w.get("playlistItems", part="id", playlistId="PLx"),
        ),
        ("403_quotaExceeded.json", "k", {"kind": "exhaust", "bucket": "units"}, chart),
        ("429_search_queries_per_day.json", "k", {"kind": "exhaust"}, search),
        ("429_search_limit_value_zero.json", "k", {"kind": "limit-zero"}, search),
        ("429_video_uploads_per_day.json", "k", {"kind": "exhaust"}, upload),
        ("429_rateLimitExceeded_bare.json", "k", {"kind": "status", "status": 429}, chart),
        ("403_rateLimitExceeded.json", "k", {"kind": "status", "status": 403}, chart),
        (
            "403_userRateLimitExceeded.json",
            "k",
            {"kind": "status", "status": 403, "reason": "userRateLimitExceeded"},
            chart,
        ),
        (
            "403_dailyLimitExceeded.json",
            "k",
            {"kind": "status", "status": 403, "reason": "dailyLimitExceeded"},
            chart,
        ),
        ("500_backendError.json", "k", {"kind": "status", "status": 500}, chart),
        ("503_backendError.json", "k", {"kind": "status"}, chart),
    ],
)
def test_an_error_has_the_recorded_body(name: str, key: str, fault: dict[str, Any] | None, ask: LimitCheck) -> None:
    with Emulator(allocation="buckets") as upstream, Wire(upstream, key) as wire:
        if fault is not None:
            upstream.fault(**fault)
        status, body = ask(wire)
    assert status == int(name[:3])
    assert without_project(body) == recorded_error(name)


def test_the_real_client_raises_the_error_it_would_raise_upstream(upstream: Emulator, client: Client) -> None:
    upstream.fault("exhaust")
    with pytest.raises(HttpError) as caught:
        client.chart().execute()
    assert caught.value.status_code == 403
    assert reason(json.loads(caught.value.content)) == "quotaExceeded"


# --- batches and uploads -----------------------------------------------------------------------------


def test_a_batch_of_twenty_counts_as_twenty_calls(upstream: Emulator, client: Client) -> None:
    answers: dict[str, Any] = {}
    batch = client.youtube.new_batch_http_request(
        callback=lambda name, answer, error: answers.update({name: error or answer})
    )
    regions = [*EIGHT_REGIONS, "JP", "KR", "IL", "SA", "TR", "VN", "TH", "RU", "MX", "ES", "PL", "XX"]
    for region in regions:
        batch.add(client.chart(region, maxResults=2), request_id=f"chart {region}")
    batch.execute()
    assert len(answers) == 20
    refused = answers.pop("chart XX")
    assert refused.status_code == 400
    for region in regions[:-1]:
        assert answers[f"chart {region}"] == client.chart(region, maxResults=2).execute()
    usage = upstream.usage()
    assert usage["requests"] == usage["by_method"]["videos.list"] == 20 + 19
    assert usage["units"] == {"units": 39}
    assert usage["free"] == {"batches": 1}


def test_a_fault_strikes_one_call_of_a_batch(upstream: Emulator, client: Client) -> None:
    upstream.fault("status", status=500, region="DE")
    statuses: dict[str, int] = {}
    batch = client.youtube.new_batch_http_request(
        callback=lambda name, _, error: statuses.update({name: error.status_code if error else 200})
    )
    for region in ("US", "DE", "FR"):
        batch.add(client.chart(region), request_id=region)
    batch.execute()
    assert statuses == {"US": 200, "DE": 500, "FR": 200}
    assert upstream.usage()["units"] == {"units": 3}


def test_a_fault_can_strike_the_envelope_of_a_batch(upstream: Emulator, client: Client) -> None:
    """The calls in it arrived nevertheless."""
    upstream.fault("status", method="batch")
    batch = client.youtube.new_batch_http_request()
    batch.add(client.chart())
    with pytest.raises(HttpError) as caught:
        batch.execute()
    assert caught.value.status_code == 503
    assert upstream.usage()["units"] == {"units": 1}


@pytest.mark.parametrize("body", [b"", b"--b--", b"--b\r\n\r\nnonsense\r\n--b--", b"\xff" * 100])
def test_a_broken_batch_is_refused_as_a_whole(wire: Wire, body: bytes) -> None:
    headers = {"Content-Type": "multipart/mixed; boundary=b"}
    status, answer = wire.send("POST", "/batch/youtube/v3", body, headers)
    assert (status, reason(answer)) == (400, "badRequest")
    status, _ = wire.send("POST", "/batch/youtube/v3", body, {"Content-Type": "text/plain"})
    assert status == 400


def insert(client: Client, media: MediaInMemoryUpload) -> Any:
    body = {
        "snippet": {"title": "Übung — 演習 🎓", "categoryId": "27"},
        "status": {"privacyStatus": "unlisted"},
    }
    return client.youtube.videos().insert(part="snippet,status", body=body, media_body=media)


@pytest.mark.parametrize("size", [0, 1, 262_144, 600_000])
def test_a_resumable_upload_is_charged_once_whatever_its_chunks(upstream: Emulator, client: Client, size: int) -> None:
    media = MediaInMemoryUpload(b"x" * size, "video/mp4", chunksize=262_144, resumable=True)
    request = insert(client, media)
    progress = []
    made = None
    while made is None:
        state, made = request.next_chunk()
        if state:
            progress.append(state.resumable_progress)
    assert progress == list(range(262_144, size, 262_144))
    assert made["snippet"]["title"] == "Übung — 演習 🎓"
    assert made["status"] == {"uploadStatus": "uploaded", "privacyStatus": "unlisted"}
    assert request.resumable_uri.startswith(upstream.address)
    usage = upstream.usage()
    assert usage["by_method"] == {"videos.insert": 1}
    assert usage["units"] == {"units": 100}
    assert usage["free"] == {"upload_chunks": len(progress) + 1}
    found = client.youtube.videos().list(part="snippet", id=made["id"]).execute()
    assert found["items"][0]["snippet"] == made["snippet"]


def test_an_interrupted_upload_goes_on_where_it_stopped(upstream: Emulator, client: Client) -> None:
    """The client asks how much has arrived after a chunk failed."""
    upstream.fault("status", method="upload-chunk", after=1)
    media = MediaInMemoryUpload(b"x" * 600_000, "video/mp4", chunksize=262_144, resumable=True)
    request = insert(client, media)
    request.next_chunk()
    with pytest.raises(HttpError):
        request.next_chunk()
    assert request.execute()["kind"] == "youtube#video"
    assert upstream.usage()["units"] == {"units": 100}


def test_an_upload_in_one_request_brings_its_description(upstream: Emulator, client: Client) -> None:
    made = insert(client, MediaInMemoryUpload(b"--x\r\n\x00\xff", "video/mp4")).execute()
    assert made["snippet"]["title"] == "Übung — 演習 🎓"
    assert upstream.usage()["units"] == {"units": 100}


def test_an_upload_session_lives_on_the_address_that_the_client_used(wire: Wire) -> None:
    target = "/upload/youtube/v3/videos?uploadType=resumable&part=id&key=hush"
    headers = {"Host": "youtube.test:8080", "X-goog-api-key": "k"}
    wire.connection.request("POST", target, b"{}", headers)
    with wire.connection.getresponse() as response:
        response.read()
        location = response.headers["Location"]
    assert location.startswith("http://youtube.test:8080/upload/youtube/v3/videos?")
    assert "hush" not in location
    assert wire.send("PUT", "/upload/youtube/v3/videos?upload_id=unknown", b"x")[0] == 404
    session = location.removeprefix("http://youtube.test:8080")
    for bad in ("bytes 0-9/10", "bytes", "bytes 5-1/3"):
        assert wire.send("PUT", session, b"x", {"Content-Range": bad})[0] == 400
    assert wire.send("PUT", session, b"", {"Content-Range": "bytes */3"})[0] == 308


# --- faults ------------------------------------------------------------------------------------------


def test_a_fault_waits_for_its_turn_and_strikes_as_often_as_told(upstream: Emulator, wire: Wire) -> None:
    upstream.fault("status", status=500, times=2, after=1, method="videos.list", region="DE")
    asked = ["DE", "US", "DE", "DE", "DE"]
    statuses = [wire.get("videos", **{**CHART, "regionCode": region})[0] for region in asked]
    assert statuses == [200, 200, 500, 500, 200]
    assert upstream.usage()["units"] == {"units": 5}


def test_faults_strike_in_the_order_in_which_they_were_queued(upstream: Emulator, wire: Wire) -> None:
    for status in (500, 429, 403):
        upstream.fault("status", status=status)
    assert [chart(wire)[0] for _ in range(4)] == [500, 429, 403, 200]


def test_faults_can_be_queued_over_http(upstream: Emulator, wire: Wire) -> None:
    faults = [{"kind": "status", "status": 500}, {"kind": "status", "method": "search.list"}]
    assert wire.send("POST", "/emulator/faults", json.dumps(faults).encode()) == (200, {"queued": 2})
    assert [search(wire)[0], chart(wire)[0], search(wire)[0]] == [500, 200, 503]
    one = json.dumps({"kind": "status", "status": 418}).encode()
    assert wire.send("POST", "/emulator/faults", one) == (200, {"queued": 1})
    assert chart(wire)[0] == 418


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b"null",
        b"3",
        b"[1]",
        b"{}",
        b'{"kind": 3}',
        b'{"kind": "earthquake"}',
        b'{"kind": "\\ud800"}',
        b'{"kind": "status", "times": 0}',
        b'{"kind": "status", "times": true}',
        b'{"kind": "status", "status": 200}',
        b'{"kind": "latency", "ms": 1e9}',
        b'{"kind": "status", "method": 5}',
        b'{"kind": "status", "colour": "red"}',
        b'[{"kind": "status"}, {"kind": "earthquake"}]',
    ],
)
def test_a_fault_that_makes_no_sense_is_refused_and_not_queued(
    wire: Wire, document: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    status, body = wire.send("POST", "/emulator/faults", document)
    assert (status, reason(body)) == (400, "badRequest")
    assert chart(wire)[0] == 200
    assert capfd.readouterr() == ("", "")


def test_a_fault_that_makes_no_sense_is_a_value_error(upstream: Emulator) -> None:
    with pytest.raises(ValueError, match="use one of close-after"):
        upstream.fault("earthquake")
    with pytest.raises(ValueError, match="after must be a whole number"):
        upstream.fault("status", after=-1)


@pytest.mark.parametrize("kind", ["close-before", "close-after", "hang"])
def test_a_connection_closed_without_an_answer_is_charged(upstream: Emulator, wire: Wire, kind: str) -> None:
    upstream.fault(kind, ms=10)
    with pytest.raises(http.client.RemoteDisconnected):
        chart(wire)
    assert upstream.usage()["units"] == {"units": 1}
    assert chart(wire)[0] == 200


@pytest.mark.parametrize(("kind", "made"), [("close-before", 0), ("close-after", 1)])
def test_work_is_done_only_before_a_close_after(upstream: Emulator, wire: Wire, kind: str, made: int) -> None:
    """The session's chunk is the work: asked again, the upload is whole or it is not."""
    target = "/upload/youtube/v3/videos?uploadType=resumable&part=id"
    wire.connection.request("POST", target, b"{}", {"X-goog-api-key": "k"})
    with wire.connection.getresponse() as response:
        response.read()
        session = response.headers["Location"].removeprefix(upstream.address)
    upstream.fault(kind, method="upload-chunk")
    with pytest.raises(http.client.RemoteDisconnected):
        wire.send("PUT", session, b"film", {"Content-Range": "bytes 0-3/4"})
    status, _ = wire.send("PUT", session, b"", {"Content-Range": "bytes */4"})
    assert status == (200 if made else 308)


def test_a_close_before_work_makes_the_real_client_send_twice(upstream: Emulator, client: Client) -> None:
    """It takes the closed connection for a stale one: one execute(), two charges."""
    upstream.fault("close-before")
    assert len(client.chart().execute()["items"]) == 50
    assert upstream.usage()["requests"] == 2


def test_a_dropped_idle_connection_makes_the_real_client_resend(upstream: Emulator, client: Client) -> None:
    """Its first write on the dead connection reached nobody, and is not counted."""
    upstream.fault("drop-idle")
    for _ in range(3):
        assert len(client.chart().execute()["items"]) == 50
    assert upstream.usage()["requests"] == 3


def test_a_dropped_idle_connection_gives_no_notice(upstream: Emulator, wire: Wire) -> None:
    upstream.fault("drop-idle")
    wire.connection.request("GET", "/youtube/v3/videos", headers={"X-goog-api-key": "k"})
    with wire.connection.getresponse() as response:
        response.read()
        assert response.headers["Connection"] is None
    with pytest.raises(http.client.RemoteDisconnected):
        chart(wire)
    assert chart(wire)[0] == 200
    assert upstream.usage()["requests"] == 2


def test_a_truncated_body_ends_in_the_middle(upstream: Emulator, wire: Wire, client: Client) -> None:
    upstream.fault("truncate", times=2)
    with pytest.raises(http.client.IncompleteRead):
        chart(wire)
    with pytest.raises(http.client.IncompleteRead):
        client.chart().execute()
    assert upstream.usage()["units"] == {"units": 2}


@pytest.mark.parametrize("kind", ["latency", "hang", "trickle"])
def test_a_slow_answer_runs_into_the_clients_timeout(upstream: Emulator, kind: str) -> None:
    """It arrived, and is charged."""
    upstream.fault(kind, ms=5_000)
    with Wire(upstream, timeout=0.1) as wire, pytest.raises(TimeoutError):
        chart(wire)
    assert upstream.usage()["units"] == {"units": 1}


@pytest.mark.parametrize("kind", ["latency", "trickle"])
def test_a_slow_answer_is_whole_for_a_patient_client(upstream: Emulator, client: Client, kind: str) -> None:
    upstream.fault(kind, ms=40)
    assert len(client.chart().execute()["items"]) == 50


@pytest.mark.parametrize("status", [302, 307])
def test_a_redirected_request_arrives_and_is_charged_again(upstream: Emulator, client: Client, status: int) -> None:
    upstream.fault("redirect", status=status)
    assert len(client.chart().execute()["items"]) == 50
    assert upstream.usage()["requests"] == 2
    assert upstream.usage()["units"] == {"units": 2}


def test_an_exhausted_bucket_stays_closed_until_pacific_midnight() -> None:
    zone = ZoneInfo("America/Los_Angeles")
    now_ms = [int(datetime(2026, 7, 1, 12, tzinfo=zone).timestamp()) * 1000]
    clock = lambda: now_ms[0]  # noqa: E731 - one line says it
    with Emulator(allocation="buckets", clock=clock) as upstream, Wire(upstream) as wire:
        upstream.fault("exhaust", bucket="search", after=1)
        assert [chart(wire)[0], search(wire)[0]] == [200, 200]
        assert [search(wire)[0], search(wire)[0], chart(wire)[0]] == [429, 429, 200]
        assert upstream.usage()["refused_units"]["search"] == 2
        now_ms[0] += 12 * 3_600_000
        assert search(wire)[0] == 200


def test_a_limit_of_zero_names_itself(wire: Wire, upstream: Emulator) -> None:
    upstream.fault("limit-zero")
    status, body = search(wire)
    assert status == 429
    (detail,) = body["error"]["details"]
    assert detail["metadata"]["quota_limit_value"] == "0"


# --- recorded pages ----------------------------------------------------------------------------------


@pytest.fixture
def recorded() -> Iterator[Emulator]:
    with Emulator(recorded=RECORDED) as emulator:
        yield emulator


@needs_recording
def test_a_recording_is_served_page_for_page(recorded: Emulator) -> None:
    """Seven regions, 24 pages, 1,161 videos; GB and CA end early."""
    client = Client(recorded)
    served = pages = 0
    for region in ("US", "GB", "DE", "FR", "IN", "BR", "CA"):
        for number, page in enumerate(client.pages(region, part="snippet,statistics"), start=1):
            name = f"videos_list_mostPopular_{region}_p{number}.json"
            file = json.loads((RECORDED / name).read_bytes())
            assert {**page, "etag": file["etag"]} == file
            served += len(page["items"])
            pages += 1
    client.youtube.close()
    assert (served, pages) == (1_161, 24)
    assert recorded.usage()["units"] == {"units": 24}


@needs_recording
def test_a_recording_is_cut_anew_for_another_page_size(recorded: Emulator) -> None:
    client = Client(recorded)
    pages = list(client.pages("GB", maxResults=20))
    client.youtube.close()
    assert [len(page["items"]) for page in pages] == [20, 20, 20, 17]
    assert len({item["id"] for page in pages for item in page["items"]}) == 77
    assert pages[0]["nextPageToken"] == encode_token(20)


@needs_recording
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
        ({"videos_list.json": "{}"}, "no recording in"),
        ({PAGE: "{"}, "is no page of videos.list"),
        ({PAGE: '{"items": [{}]}'}, "is no page of videos.list"),
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
        (b"\x00\xff\xfe\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 505),
        (b"BREW / HTTP/1.1\r\n\r\n", 501),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431),
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


def test_connections_are_kept_alive(upstream: Emulator, wire: Wire) -> None:
    chart(wire)
    kept = wire.connection.sock
    for _ in range(5):
        chart(wire)
    assert wire.connection.sock is kept


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


def test_the_cli_can_serve_in_the_foreground_and_announce_one_line() -> None:
    lines: list[str] = []
    announced = threading.Event()

    def ready(line: str) -> None:
        lines.append(line)
        announced.set()

    upstream = Emulator(allocation="buckets", quota=12_345)
    thread = threading.Thread(target=upstream.serve_forever, args=(ready,))
    thread.start()
    assert announced.wait(100)
    with Wire(upstream) as wire:
        assert chart(wire)[0] == 200
    upstream.stop()
    thread.join(100)
    assert not thread.is_alive()
    (line,) = lines
    assert "\n" not in line
    assert upstream.address in line
    assert "12,345" in line


def test_an_emulator_that_never_served_lets_go_of_its_port() -> None:
    first = Emulator()
    port = int(first.address.rpartition(":")[2])
    with pytest.raises(OSError, match="in use"):
        Emulator(port=port)
    first.stop()
    with Emulator(port=port) as second:
        assert second.address == first.address


@pytest.mark.parametrize("bad", [{"allocation": "heap"}, {"quota": -1}])
def test_settings_are_checked_where_they_are_given(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Emulator(**bad)


def test_importing_the_emulator_imports_no_client_and_no_cli() -> None:
    unwanted = {"googleapiclient", "click", "quota.budget", "httplib2"}
    script = f"import sys, quota.jobs.emulator; print(sorted({unwanted} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
