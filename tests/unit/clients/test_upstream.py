"""What an answer means by the cost book that describes its API, with the answers that ten vendors really send."""

from __future__ import annotations

import json
import os
import random
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import pytest

from quota.clients.upstream import Closing, Meaning, upstream_of
from quota.clients.upstream_errors import buckets_of
from quota.common.hosts import readings_of, url_on
from quota.errors import UsageError
from quota.rules.evidence import Level, evidence_of
from quota.settings.books import load_book
from quota.terms.api import NO_BODY, RequestBody
from quota.terms.costs import CostBook, Part
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS
from support.books import parse_book

NOW_MS = 1_795_000_000_000
"""A whole second. What the headers say of a time is in seconds."""

DATE = "Wed, 18 Nov 2026 11:06:40 GMT"
"""NOW_MS, as an answer has it."""


def at(after_s: int) -> str:
    """A time after NOW_MS in seconds since 1970."""
    return str(NOW_MS // 1_000 + after_s)


def a_book(answers: str = "", buckets: str = "", methods: str = "", routes: str = "") -> CostBook:
    buckets = buckets or '[buckets.core]\nquota = 5_000\nresets = "1h"\n[buckets.points]\nquota = 900\nresets = "1m"\n'
    return parse_book(
        f"""
        api = "vendor"
        hosts = ["api.vendor.example"]
        source = "https://vendor.example"
        read_on = 2026-11-25
        {buckets}
        [default]
        get = 1
        other = 1
        [methods]
        "repos.get" = 1
        {methods}
        {routes}
        [answers]
        {answers}
        """,
        "vendor",
    )


GITHUB = load_book("github")
SPENT = b'{"message": "API rate limit exceeded."}'


def read(
    book: CostBook, status: int, headers: Mapping[str, str] | None = None, body: bytes = b"", method: str = "repos.get"
) -> Meaning:
    return upstream_of(book).read(status, headers or {}, body, method=method, at_ms=NOW_MS)


def github(status: int, *, body: bytes = b"{}", **more: str) -> Meaning:
    """GitHub's answer: of pool core, empty until in an hour by default."""
    headers = {"Date": DATE, "X-RateLimit-Limit": "5000", "X-RateLimit-Remaining": "0", "X-RateLimit-Resource": "core"}
    headers["X-RateLimit-Reset"] = at(1_800)
    return read(GITHUB, status, headers | {name.replace("_", "-"): value for name, value in more.items()}, body)


# -- the seam ----------------------------------------------------------------------------------------------------------


def test_the_routes_name_the_method_of_a_request() -> None:
    upstream = upstream_of(a_book(routes='[routes]\n"GET /repos/**" = "repos.get"'))
    assert upstream.method("get", "https://api.vendor.example/repos/a/b?page=2#top") == "repos.get"
    assert upstream.method("GET", "https://api.vendor.example") is None
    assert upstream.method("GET", "https://api.vendor.example?next=/repos/a") is None
    assert upstream.method("POST", "https://api.vendor.example/repos") is None
    below = upstream_of(upstream.book._replace(hosts=("api.vendor.example/repos", "api.vendor.example/v3")))
    assert below.method("GET", "https://api.vendor.example/v3/repos/a") == "repos.get"
    assert below.method("GET", "https://api.vendor.example/repos/a") == "repos.get"


# -- the answers of ten vendors ----------------------------------------------------------------------------------------

OF_GITHUB = {"Date": DATE, "X-RateLimit-Limit": "5000", "X-RateLimit-Reset": at(900)}
EMPTY = OF_GITHUB | {"X-RateLimit-Remaining": "0"}
FULL = OF_GITHUB | {"X-RateLimit-Remaining": "4000"}

VENDORS: dict[str, tuple[CostBook, Mapping[str, str], str, int | None]] = {
    # The file: the vendor's book, the headers that came along; which bucket is closed until when.
    "github_primary_403.json": (GITHUB, EMPTY, "core", NOW_MS + 900_000),
    "github_primary_429.json": (GITHUB, EMPTY, "core", NOW_MS + 900_000),
    "github_secondary_403.json": (GITHUB, FULL, "points", NOW_MS + 60_000),
    "ga4_tokens_per_day.json": (load_book("analyticsdata-v1beta"), {}, "core", None),
    "ga4_tokens_per_hour.json": (load_book("analyticsdata-v1beta"), {}, "core", NOW_MS + HOUR_MS),
    "google_ads_basic_access.json": (load_book("google-ads"), {}, "operations", NOW_MS + 40_591_000),
    "sheets_per_minute.json": (load_book("sheets-v4"), {}, "read", NOW_MS + MINUTE_MS),
    "shopify_throttled_200.json": (load_book("shopify-admin"), {}, "points", NOW_MS + 7_400),
    "openai_tpd.json": (
        a_book(
            """
            [[answers.closed]]
            status = 429
            body = "tokens per day"
            lasts = { json = "/error/message", pattern = "try again in (?P<lasts>[0-9.hms]+)", as = "duration" }
            """,
            '[buckets.tokens]\nquota = 2_000_000\nresets = "24h"',
        ),
        {},
        "tokens",
        NOW_MS + 2 * HOUR_MS + 9 * MINUTE_MS,
    ),
    "anthropic_429.json": (a_book("closed = [{ status = 429 }]"), {"retry-after": "21"}, "core", NOW_MS + 21_000),
}


def test_every_recorded_answer_closes_what_its_file_says_until_then(shared_data: Path) -> None:
    files = sorted((shared_data / "errors_other").glob("*.json"))
    assert [file.name for file in files] == sorted(VENDORS)
    for file in files:
        row = json.loads(file.read_text())
        book, headers, bucket, until_ms = VENDORS[file.name]
        meaning = read(book, row["status"], headers, json.dumps(row["body"]).encode(), row["method"])
        error = meaning.error
        assert error is not None
        assert (error.kind, error.bucket, error.remedy) == ("closed", bucket, ""), "no advice about the credential"
        assert len(error.message) > len("HTTP 429"), file.name
        assert meaning.closes == (Closing(bucket, until_ms, error.message),), file.name


ELSEWHERE = (
    "2026/11/18 11:35:00", "2026-11-18 13:35:00.0 +0200 CEST", "2026-11-18T12:35:00+01:00[Europe/Berlin]", "28:20",
    "Wed Nov 18 2026 12:35:00 GMT+0100 (Central European Standard Time)", "Wed, 18 Nov 2026 03:35:00 -08:00",
    "28m and 20s", "28 minutes, 20 seconds", "1700s, 9s", "1700000 milliseconds", "0 days 00:28:20.0", "PT28M20,0S",
)  # fmt: skip
"""As Go, Java, JavaScript and others write it."""

# -- until when --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "until_ms"),
    [
        ({}, NOW_MS + 1_800_000),
        # The later of the reset and Retry-After counts, in seconds or as a date.
        ({"Retry_After": "Wednesday, 18-Nov-26 11:46:40 GMT"}, NOW_MS + 2_400_000),
        # The later one counts also where the other is over, or of two that were sent. No time changes nothing.
        *(({"Retry_After": text}, NOW_MS + 1_900_000) for text in ("1900", "1800, 1900")),
        ({"Retry_After": "5, Wed, 18 Nov 2026 11:46:40 GMT"}, NOW_MS + 2_400_000),
        ({"X_RateLimit_Reset": f"{at(1_700)}, {at(9)}"}, NOW_MS + 1_700_000),
        *(({"Retry_After": text}, NOW_MS + 1_800_000) for text in ("0", "1900, soon", "soon")),
        ({"X_RateLimit_Reset": "9" * 12}, None),
        # Another notation than the book's, wherever only one makes sense.
        ({"X_RateLimit_Reset": "1700"}, NOW_MS + 1_700_000),
        ({"X_RateLimit_Reset": f"{NOW_MS + 1_700_250}"}, NOW_MS + 1_700_250),
        ({"X_RateLimit_Reset": "1700s250000µs"}, NOW_MS + 1_700_250),
        *(({"X_RateLimit_Reset": text}, NOW_MS + 1_700_000) for text in ('"1700"', "1700.", "in 1700 seconds")),
        *(({"X_RateLimit_Reset": f"2026-11-18 11:35:00{zone}"}, NOW_MS + 1_700_000) for zone in ("z", " GMT")),
        *(({"X_RateLimit_Reset": text}, NOW_MS + 1_700_000) for text in ELSEWHERE),
        *(({"X_RateLimit_Reset": f"Wed, 18 Nov 2026 11:35:00 {text}"}, None) for text in ("PM", "CET", "UTC+2")),
        ({"X_RateLimit_Reset": "20261118113500"}, NOW_MS + 1_700_000),
        # The answer's own Date is what its reset is reckoned from: both may be a day off.
        ({"Date": "Thu, 19 Nov 2026 11:06:40 GMT", "X_RateLimit_Reset": at(87_000)}, NOW_MS + 600_000),
        ({"Date": "no date"}, NOW_MS + 1_800_000),
    ],
)
def test_a_bucket_is_closed_until_the_answer_says(headers: dict[str, str], until_ms: int | None) -> None:
    assert github(403, **headers).closes == (Closing("core", until_ms, "HTTP 403"),)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"title": "Forbidden", "detail": "Slow down"}, "Slow down"),
        ({"errors": ["Slow down"]}, "Slow down"),
        ({"fault": {"faultstring": "Slow down", "code": "x"}}, "Slow down"),
        ({"error": {"code": "slow_down", "status": 403}}, "slow_down"),
        ({"request": "/a"}, "HTTP 403"),
    ],
)
def test_a_closed_bucket_has_upstreams_own_words(body: object, why: str) -> None:
    (closing,) = github(403, body=json.dumps(body).encode()).closes
    assert closing.why == why


def test_a_list_of_one_error_and_an_error_in_another_encoding_are_that_error() -> None:
    book = a_book('closed = [{ status = 429, json = "/error/why" }]')
    assert read(book, 429, {}, b'[{"error": {"why": "full"}}]').closes[0].why == "full"
    assert not read(book, 429, {}, b'[{"error": {"why": "full"}}, {}]').closes
    assert read(book, 429, {}, '{"error": {"why": "complété"}}'.encode("latin-1")).closes


def test_an_answer_of_a_foreign_pool_or_a_window_that_is_over_closes_nothing_by_itself() -> None:
    for meaning in (github(403, X_RateLimit_Reset=at(-1)), github(403, X_RateLimit_Resource="integration_manifest")):
        assert (meaning.closes, meaning.levels) == ((), ())
    pause = Closing("core", NOW_MS + 1_000, "API rate limit exceeded.")
    assert github(429, body=SPENT, X_RateLimit_Reset=at(-1)).closes == (pause,)


@pytest.mark.parametrize(
    ("headers", "after_ms"),
    [
        ({}, None),
        *(({"Retry-After": text}, 1_000) for text in ("-30", "-30s", at(-60), "Thu, 01 Jan 1970 00:00:00 GMT")),
        ({"X-RateLimit-Reset": at(-60), "X-RateLimit-Remaining": "0"}, 1_000),
        ({"X-RateLimit-Reset": at(-60), "Retry-After": "90"}, 90_000),
        ({"Retry-After": "1", "Retry-After-Ms": "600"}, 600),
        ({"Retry-After": "3", "Retry-After-Ms": "soon"}, 3_000),
        # A wait, no time: it would be 25 years ago.
        *(({"Retry-After": text}, HOUR_MS) for text in ("1000000000", "1e+09", "+1000000000, +1000000000")),
        ({"Retry-After": "inf"}, None),
    ],
)
def test_a_time_that_is_over_is_a_short_pause(headers: dict[str, str], after_ms: int | None) -> None:
    (closing,) = read(GITHUB, 429, headers | {"Date": DATE}, SPENT).closes
    assert closing.until_ms == (None if after_ms is None else NOW_MS + after_ms)


@pytest.mark.parametrize(
    ("lasts", "body", "after_ms"),
    [
        ('"60s"', {}, 60_000),
        ('{ json = "/wait", as = "duration" }', {"wait": "0s"}, 1_000),
        ('{ asked = "/a", left = "/b", per_second = "/c" }', {"a": 5, "b": 9, "c": 1}, 1_000),
    ],
)
def test_a_rules_own_pause_is_kept_where_retry_after_is_over(lasts: str, body: object, after_ms: int) -> None:
    book = a_book(f"closed = [{{ status = 429, lasts = {lasts} }}]")
    (closing,) = read(book, 429, {"Retry-After": "0"}, json.dumps(body).encode()).closes
    assert closing.until_ms == NOW_MS + after_ms


def test_what_the_book_says_is_kept_beyond_the_buckets_window() -> None:
    """5 calls a second, and after too many 30 s of refusals. An answer may ask for more, but for an hour at most."""
    answers = 'reset = { header = "X-Reset", as = "duration" }\nclosed = [{ status = 429, lasts = "30s" }]'
    book = a_book(f'remaining = "X-Left"\n{answers}', '[buckets.core]\nquota = 5\nresets = "1s"')
    for after, after_s in ("", 30), ("20", 20), ("9s", 9), ("60", 60), ("3601", 3_600):
        assert read(book, 429, {"Retry-After": after}).closes[0].until_ms == NOW_MS + after_s * 1_000, after
    assert read(book, 429, {"X-Reset": "9s"}).closes[0].until_ms == NOW_MS + 9_000


@pytest.mark.parametrize("header", ["Retry-After", "X-RateLimit-Remaining", "X-RateLimit-Limit", "X-RateLimit-Reset"])
def test_a_header_that_cannot_be_read_is_named(header: str) -> None:
    several = [("RateLimit", text) for text in ('"core";r=many', "core: 5 of 9", "remaining=few")]
    for name, text in (*((header, text) for text in ("soon", "", "1e99", "1" * 20)), *several):
        assert read(GITHUB, 429, {name: text}, SPENT).unread == {name.lower(): text}
    assert not any(read(GITHUB, 429, {header: text}, SPENT).unread for text in ("3.0", "3e-01", ".3", '"3"'))
    odd = {"Sforce-Limit-Info": "api-usage=1,234/15,000"}
    assert read(load_book("salesforce"), 200, odd).unread == {"sforce-limit-info": "api-usage=1,234/15,000"}
    for odd in {"X-RateLimit-Reset": "9" * 10}, {"X-RateLimit-Remaining": "9", "X-RateLimit-Limit": "8"}:
        assert read(GITHUB, 200, odd).unread == dict([(name.lower(), text) for name, text in odd.items()][:1])


def test_units_that_remain_keep_a_closing_to_the_rules_own_time() -> None:
    body = b'{"message": "You have exceeded a secondary rate limit."}'
    points = {"X_RateLimit_Resource": "points", "X_RateLimit_Remaining": "800", "X_RateLimit_Reset": at(20)}
    assert github(403, body=body, **points).closes[0].until_ms == NOW_MS + 60_000
    points["X_RateLimit_Remaining"] = "0"
    assert github(403, body=body, **points).closes[0].until_ms == NOW_MS + 20_000


# -- what remains ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "level"),
    [
        ({}, Level("core", 0, 5_000, NOW_MS + 1_800_000)),
        ({"X_RateLimit_Remaining": "4000"}, Level("core", 4_000, 5_000, NOW_MS + 1_800_000)),
        ({"X_RateLimit_Resource": "points", "X_RateLimit_Reset": at(9)}, Level("points", 0, 5_000, NOW_MS + 9_000)),
        ({"X_RateLimit_Reset": "tomorrow", "Retry_After": "0"}, Level("core", 0, 5_000, None)),
        ({"X_RateLimit_Reset": at(0), "Retry_After": "0"}, None),
        ({"X_RateLimit_Reset": at(-2), "Retry_After": "20"}, Level("core", 0, 5_000, NOW_MS + 20_000)),
        ({"X_RateLimit_Reset": "none", "Retry_After": "9999"}, Level("core", 0, 5_000, NOW_MS + HOUR_MS)),
        ({"X_RateLimit_Remaining": "5001"}, None),
        *(({"X_RateLimit_Remaining": "0", "X_RateLimit_Limit": text}, None) for text in ("-1", "unlimited")),
        ({"X_RateLimit_Remaining": "1.29e+01"}, Level("core", 12, 5_000, NOW_MS + 1_800_000)),
        ({"X_RateLimit_Remaining": "98,98 , 98"}, Level("core", 98, 5_000, NOW_MS + 1_800_000)),
        ({"X_RateLimit_Remaining": "98, 97", "X_RateLimit_Limit": "5000, 100"}, None),
        *(({"X_RateLimit_Resource": text}, None) for text in ("other", "core, points")),
        ({"Age": "0"}, Level("core", 0, 5_000, NOW_MS + 1_800_000)),
        ({"Age": "7"}, None),
    ],
)
def test_a_good_answer_shows_what_remains(headers: dict[str, str], level: Level | None) -> None:
    meaning = github(200, **headers)
    assert meaning.levels == (() if level is None else (level,))
    assert ("x-ratelimit-resource" in meaning.unread) == (level is None and "X_RateLimit_Resource" in headers)
    assert (meaning.error, meaning.closes) == (None, ())


@pytest.mark.parametrize(("second", "remaining"), [("0", [0]), ("1", [0]), ("few", [])])
def test_the_smallest_counts_of_several_numbers_that_remain(second: str, remaining: list[int]) -> None:
    headers = [("X-RateLimit-Remaining", "0"), ("x-ratelimit-remaining", second)]
    meaning = upstream_of(GITHUB).read(200, headers, b"", method="repos.get", at_ms=NOW_MS)
    assert [level.remaining_units for level in meaning.levels] == remaining


X_LEFT = "remaining = 'x-left'\nreset = { header = 'x-reset', as = 'duration' }"
POLICY = {"RateLimit-Policy": '"core";q=100;w=60'}
OLDER = "remaining = 'RateLimit-Remaining'\nlimit = 'RateLimit-Limit'"  # the fields of the standard's older drafts
HALF = Level("core", 50, 100)


@pytest.mark.parametrize(
    ("answers", "headers", "level"),
    [
        (X_LEFT, {"x-left": "149", "x-reset": "6m0s"}, Level("core", 149, None, NOW_MS + 360_000)),
        ("", {"RateLimit": '"core";r=50;t=30', **POLICY}, Level("core", 50, 100, NOW_MS + 30_000, MINUTE_MS)),
        ("", {"RateLimit": '"core";r=50;t=30', "Age": "1"}, None),
        (OLDER, {"RateLimit-Remaining": "50", "RateLimit-Limit": "100, 100;w=60, 5000;w=86400"}, HALF),
        (OLDER, {"RateLimit-Remaining": "50", "RateLimit-Limit": "100;w=60"}, HALF),
        ("remaining = 'RateLimit-Remaining'", {"RateLimit-Remaining": "-1"}, None),
        ("", {"RateLimit": '"core";r=50.9;t=29.5'}, Level("core", 50, None, NOW_MS + 29_500)),
        ("", {"RateLimit": '"other";r=50;t=30'}, None),
        ("", {"RateLimit": "limit=100, remaining=50, reset=5"}, None),
    ],
)
def test_levels_are_read_where_the_book_says(answers: str, headers: dict[str, str], level: Level | None) -> None:
    assert read(a_book(answers), 200, headers).levels == (() if level is None else (level,))


def test_several_policies_speak_of_several_buckets() -> None:
    headers = {"RateLimit": '"points";r=3;t=9, "core";r=4', "RateLimit-Policy": '"core";q=5000;w=3600,"points";q=900'}
    levels = read(a_book(), 200, headers).levels
    assert levels == (Level("points", 3, 900, NOW_MS + 9_000), Level("core", 4, 5_000, None, HOUR_MS))
    book, by_fields = (a_book(answers, '[buckets.day]\nquota = 9\nresets = "24h"') for answers in ("", OLDER))
    assert read(book, 200, {"RateLimit": '"default";r=3;t=9'}).levels == (Level("day", 3, None, NOW_MS + 9_000),)
    assert read(by_fields, 200, {"RateLimit-Limit": "9", "RateLimit-Remaining": "3"}).levels == (Level("day", 3, 9),)
    older = {"RateLimit-Limit": "9, 9;w=86400", "RateLimit-Remaining": "5, 3", "RateLimit-Reset": "7, 9.0"}
    dated = older | {"RateLimit-Reset": "Wed, 18 Nov 2026 11:06:49 GMT"}
    for headers in ({"RateLimit": "limit=9, remaining=3.9, reset=9"}, older, older | {"RateLimit-Limit": "9"}, dated):
        (of_day,) = read(book, 200, headers).levels
        assert of_day._replace(window_ms=None) == Level("day", 3, 9, NOW_MS + 9_000)
    assert read(book, 200, older | {"RateLimit-Limit": "9;w=60"}).levels == (), "of another window"
    of_points = {"RateLimit-Limit": "900", "RateLimit-Remaining": "3", "RateLimit-Policy": "900;w=60"}
    assert [level.bucket for level in read(GITHUB, 200, of_points).levels] == ["points"], "of one bucket alone"


ONE_BUCKET = a_book(
    buckets='[buckets.day]\nwindows = [{ quota = 600, resets = "1m" }, { quota = 10_000, resets = "24h" }]',
    answers="closed = [{ status = 429, bucket = 'day' }]",
)
DAY, MINUTE = Level("day", 40, 9_000, NOW_MS + 900_000, DAY_MS), Level("day", 0, 600, None, MINUTE_MS)


@pytest.mark.parametrize(
    ("policies", "state", "level", "closed_ms"),
    [
        ("limit=9", '"default";r=4000;t=900', Level("day", 4_000, None, NOW_MS + 900_000), 900_000),  # no policy
        ('"d";q=9000;w=86400', '"d";r=40;t=900', DAY, 900_000),
        ("9000;w=86400, 10;w=1", "limit=9000, remaining=40, reset=900", DAY, 900_000),
        # of the shorter window, and of another
        ('"m";q=600;w=60', '"m";r=0', MINUTE, 60_000),
        ("", "limit=600, remaining=0", MINUTE._replace(window_ms=None), 60_000),
        ("600;w=60, 10;w=1", "limit=600, remaining=0, reset=30", MINUTE._replace(reset_ms=NOW_MS + 30_000), 30_000),
        ('"h";q=900;w=3600', '"h";r=899;t=9', None, None),
        ('"burst";q=10;w=1, "daily";q=10000;w=86400', '"burst";r=0', None, 1_000),
        (
            '"burst";q=10;w=1, "daily";q=10000;w=86400',
            '"burst";r=0;t=2, "daily";r=500;t=9999',
            Level("day", 500, 10_000, NOW_MS + 9_999_000, DAY_MS),
            2_000,
        ),
        ('"b";q=10;w=1, "d";q=10000;w=86400', '"d";r=7', Level("day", 7, 10_000, None, DAY_MS), None),
        ("", "limit=900, remaining=899, reset=30", None, None),
        # of something else than calls
        ('"b";q=9;qu="content-bytes"', '"b";r=0;t=7', None, 7_000),
        ('"b";q=10000;w=86400;qu="content-bytes"', '"b";r=5;t=7', None, None),
    ],
)
def test_a_policy_without_a_buckets_name_is_about_a_window_of_the_only_bucket_unless_it_says_otherwise(
    policies: str, state: str, level: Level | None, closed_ms: int | None
) -> None:
    headers = {"RateLimit": state} | ({"RateLimit-Policy": policies} if policies else {})
    meaning = read(ONE_BUCKET, 200, headers)
    assert meaning.levels == (() if level is None else (level,))
    assert meaning.levels or meaning.unread, "what is of no window is said"
    (closing,) = read(ONE_BUCKET, 429, headers).closes
    assert closing.until_ms == (None if closed_ms is None else NOW_MS + closed_ms)
    without_rule = ONE_BUCKET._replace(answers=ONE_BUCKET.answers._replace(closed=()))
    assert bool(read(without_rule, 429, headers).closes) == ("r=0" in state or "remaining=0" in state)


def test_a_bucket_stays_closed_until_the_last_of_its_empty_windows_ends() -> None:
    pair = {"RateLimit-Policy": '"m";q=600;w=60, "d";q=10000;w=86400', "RateLimit": '"d";r=0;t=900, "m";r=0;t=30'}
    meaning = read(ONE_BUCKET, 200, pair)
    evidence = [evidence_of(level, ONE_BUCKET, (), NOW_MS, NOW_MS) for level in meaning.levels]
    closes = meaning.with_evidence([each for each in evidence if each is not None]).closes
    assert closes == (Closing("day", NOW_MS + 900_000, "0 of 10,000 remain"),)
    neither = read(ONE_BUCKET, 429, pair | {"RateLimit": '"d";r=9;t=900, "m";r=9;t=30'})
    assert neither.closes == (Closing("day", NOW_MS + 30_000, "HTTP 429"),), "none is empty: until the first ends"
    assert [level.remaining_units for level in neither.levels] == [9, 9]


def test_an_empty_pool_closes_by_itself_only_where_the_call_was_refused() -> None:
    assert github(200).closes == github(404).closes == github(500).closes == ()
    assert [closing.bucket for status in (403, 429) for closing in github(status).closes] == ["core", "core"]
    assert github(403).levels == (), "the closing says it already"
    two = '"two" = [{ bucket = "core", units = 1 }, { bucket = "points", units = 1 }]'
    levels = "levels = [{ bucket = 'core', remaining = 'x-core' }, { bucket = 'points', remaining = 'x-points' }]"
    for headers in {"x-core": "9", "x-points": "0"}, {"RateLimit": '"core";r=9, "points";r=0;t=0'}:
        book = a_book("closed = [{ status = 429 }]\n" + levels * ("x-core" in headers), methods=two)
        closes = [read(book, 429, headers, method=name).closes for name in ("two", "repos.get")]
        assert [bucket for ((bucket, *_),) in closes] == ["points", "core"], "of the call, the one that is used up"


# -- what it cost ------------------------------------------------------------------------------------------------------


def test_a_header_may_have_the_cost_of_a_call() -> None:
    book = a_book("units = { header = 'X-Cost' }")
    for cost, units in ("12", 12), ("-1", None), ("1.5", 2), ("9" * 20, None), ("", None), ("5, 5", None):
        assert read(book, 200, {"x-cost": cost}).used_units == units, cost


# -- hostile -----------------------------------------------------------------------------------------------------------

HOSTILE = [
    "", " ", "0", "-0", "-1", "1", "00", "5000", "5001", "1e9", "inf", "nan", "0x10", "9" * 15, "9" * 400, "1.5",
    "१२", "0, 0", "core", "points", "other", "\x00", "\ud800", "é" * 2_000, ";" * 2_000, '"' * 2_000, '"core";r=0;t=0',
    '"core";r=1;t=' + "9" * 30, '"core";r=0' * 300, '"core"' + ";a=1" * 400, "api-usage=" + "1" * 3_000,
    "Wed, 18 Nov 2026 11:46:40 GMT", "Wed, 99 Nov 99999 99:99:99 GMT", "Wed, 18 Nov 2026 11:46:40 +9999", "0001-01-01",
    "2026-11-18T12:06:41Z", "9999-12-31T23:59:59-23:59", at(5), at(-5), at(10**9), "2h9m", "9" * 12 + "d", "ms",
    "5" * 70 + "s", "api-usage=1/0",
]  # fmt: skip
BODIES = [
    b"", b"{", b"[]", b"null", b"[" * 100_000, b'{"a":' * 5_000, b"\xff" * 100, b"9" * 5_000, b'{"usage": NaN}',
    b'{"usage": -5, "left": -1}', b'{"usage": 1e400, "left": 1e400, "rate": 0}',
    b'{"usage": "5", "left": "5", "rate": 0}',
    b'{"usage": 5, "left": 0, "rate": 1e-300}', b'{"usage": 12, "left": 900, "rate": 0}', b'{"usage": {"a": [1]}}',
    b'{"errors": [{"code": "SLOW"}], "usage": 1000000000000000, "left": 0, "rate": 0.0001}', b" " * 300_000,
    b'{"usage": ' + b"9" * 4_000 + b', "left": ' + b"9" * 4_000 + b"}", b'{"message": {"message": []}}',
]  # fmt: skip
ANY = """
remaining = { header = "X-Left", pattern = "(?P<remaining>[0-9]+)" }
limit = "X-Limit"
reset = { header = "X-Reset", as = "FORM" }
bucket = "X-Pool"
levels = [{ bucket = "points", remaining = { json = "/left" }, reset = { json = "/usage", as = "FORM" } }]
units = { json = "/usage" }
closed = [
  { json = "/errors/0/code", is = "SLOW", lasts = { asked = "/usage", left = "/left", per_second = "/rate" } },
  { status = 429, lasts = { json = "/usage", as = "seconds" } },
  { status = 403, body = "e", lasts = { header = "X-Reset", as = "duration" } },
]
"""
RETRY = ("Retry-After", "Retry-After-Ms")
NAMES = ("x-left", "X-Limit", "x-reset", "X-Pool", *RETRY, "Date", "RateLimit", "RateLimit-Policy")


def test_the_bucket_of_a_call_is_the_one_that_it_is_charged_to() -> None:
    book = a_book(methods='"free" = 0\n"two" = [{ bucket = "points", units = 1 }, { bucket = "core", units = 1 }]')
    price = book.default_other._replace(parts=(Part("points", 1),))
    book = book._replace(default_other=price)
    names = ("two", "free", "repos.get", "odd", "GET **", "POST **")
    assert [buckets_of(name, book)[0] for name in names] == ["points", "core", "core", "core", "core", "points"]


def test_hostile_answers_raise_nothing_and_free_nothing() -> None:
    """By the thousand: what they close is closed for its period at most, what they say is within the bounds."""
    draw = random.Random(32)
    books = [a_book(ANY.replace("FORM", form)) for form in ("epoch", "seconds", "duration", "http-date", "rfc3339")]
    for _ in range(int(os.environ.get("QUOTA_TEST_INPUTS", "1000"))):
        headers = [(draw.choice(NAMES), draw.choice(HOSTILE)) for _ in range(draw.randrange(8))]
        status = draw.choice((200, 206, 304, 400, 403, 404, 429, 500, 599))
        book, body = draw.choice(books), draw.choice(BODIES)
        meaning = upstream_of(book).read(status, headers, body, method="repos.get", at_ms=NOW_MS)
        case = (status, headers, body[:200])
        assert not meaning.free, case
        for closing in meaning.closes:
            period_ms = book.buckets[closing.bucket].window.longest_ms
            assert closing.until_ms is None or NOW_MS < closing.until_ms <= NOW_MS + period_ms, case
            assert closing.why.isprintable(), case
        for level in meaning.levels:
            assert 0 <= level.remaining_units <= (10**15 if level.limit_units is None else level.limit_units), case
            assert level.reset_ms is None or NOW_MS < level.reset_ms <= NOW_MS + DAY_MS, case
        assert meaning.used_units is None or 0 <= meaning.used_units <= 10**15, case


# -- a path that can be read in two ways -------------------------------------------------------------------------------

TWO_WAYS = a_book(
    methods='user = { units = 0 }\nexport = 300\n"read" = 2',
    routes='[routes]\n"GET /users/export" = "export"\n"GET /users/filmé" = "export"\n"GET /users/{id}" = "user"\n'
    '"GET /users/{id}/export" = "export"\n"GET /projects/{id}" = "read"\n"GET /**" = "repos.get"\n'
    '"PUT /users/me" = "user"\n"PUT /files/{id}" = "user"\n',
)

READINGS = {
    "GET export": [
        *("/users/1%2Fexport", "/users/export.json", "/users/1%5Cexport", "/users/1\\export", "/users/1%252Fexport"),
        *("/users/1%255Cexport", "/users/export;x", "/users/export;a=b/", "/users;x/1/export", "/users/1;/export%3Bx"),
        *("/users/export%00.json", "/users/export%3Fx", "/users/export%23x", "/users/x/../export", "/users/export."),
        *("/users/x%2F..%2Fexport", "/users/..;/users/export", "/%75sers/1%2F%65xport", "/projects/..%2Fusers/export"),
        *("/users/export%0A", "/users/1/export%20", "/users/export.;x", "/users./export", "/users/ex%00port"),
        *("/users/ex%C2%ADport", "/users/ex%FFport", "/users/1/%EF%BD%85xport", "/users/1\uff0fexport"),
        *("/users/1%uFF0Fexport", "/users/1%C0%AFexport", "/users/1%F0%80%80%AFexport", "/users/f%C4%B1lmé"),
        *("/users/1/export.pdf", "/users/export.any", "//x/users/export", "/%5C%5Cx/users/export"),
        *("/users/filme%CC%81", "/users/F%C4%B0LMÉ", "/users/1%E2%88%95export", "/users/1%u2216export"),
        *("/users/1%25C0%25AFexport", "/users/1%FC%80%80%80%80%AFexport", "/users/export+", "/users/1#/export"),
        *("/users/export.json.", "/users/export%20.json", "/users/1/export.json%00.png", "/users/export;/x"),
    ],
    "GET user": ["/users/1", "/users/1.2", "/users/1%20a", "/users/a.b", "/users/a;b"],
    "GET read": ["/projects/group%2Fproject", "/projects/group%2Fexport"],
    "GET repos.get": ["/users/%2e%2e%2f", "/other"],
    "PUT user": ["/files/a%2Fb"],
    "PUT ": [  # a reading without a route costs the default
        *("/users/me%3Fx/y", "/users/me%23x", "/users/me;x", "/users;x/me", "/users/me%2F", "/users/me%5Cx"),
        *("/u\u017fers/me", "/u%C5%BFers/me", "/files/..%2Fexport"),
    ],
}


@pytest.mark.parametrize(("call", "path"), [(call, path) for call, paths in READINGS.items() for path in paths])
def test_a_path_that_can_be_read_in_two_ways_costs_the_dearer(call: str, path: str) -> None:
    verb, _, method = call.partition(" ")
    assert upstream_of(TWO_WAYS).method(verb, url_on("https", "api.vendor.example", None, path)) == (method or None)


@pytest.mark.parametrize(
    ("path", "body", "method"),
    [
        *(("/falls;x", None, "falls"), ("/rises;x", None, None)),
        *(("/users/1%2Fgen", b'{"max": 10}', "gen"), ("/users/1%2Fgen", b'{"max": 8}', "dear")),
        ("/users/1%2Fgen", None, "gen"),  # the body must be read
    ],
)
def test_the_dearer_is_by_the_price_of_today_and_of_this_body(path: str, body: bytes | None, method: str) -> None:
    book = a_book(
        methods="falls = { prices = [{ units = 2 }, { units = 0, since = 2999-01-01 }] }\n"
        "rises = { prices = [{ units = 0 }, { units = 2, since = 2999-01-01 }] }\n"
        'dear = 9\ngen = { reserve = { json = "/max", default = 1 } }',
        routes='[routes]\n"POST /falls" = "falls"\n"POST /rises" = "rises"\n"POST /users/{id}" = "dear"\n'
        '"POST /users/{id}/gen" = "gen"\n',
    )
    content = None if body is None else RequestBody.of(body)
    assert upstream_of(book).method("POST", f"https://api.vendor.example{path}", content) == method


def test_a_field_of_a_request_may_name_any_verb_and_a_long_body_takes_little_memory() -> None:
    fields = "_HttpMethod=PUT", "a=b&X-HTTP%2dMethod-Override=PUT", "x-method=PUT"
    for query in ("_method=DELETE", *fields):
        assert len(upstream_of(GITHUB).verbs("GET", f"https://api.github.com/x?{query}", {})) > 1, query
    readings_of.cache_clear()
    url = "https://api.github.com/x%2Fy?_method=PUT"
    assert upstream_of(GITHUB).dearest_verb("GET", url, {}, NO_BODY, upstream_of(GITHUB).name) == "POST"
    assert readings_of.cache_info().misses == 1, "a long path takes a tenth of a second to read"
    may = b"_METHOD=PUT", b'{"\\u005fmethod": "PUT"}', b"a=b&.%6Dethod=PUT", *map(str.encode, fields)
    may_not = b"payment_method=card", b"self._method()", b"_methods=2", b"xmethod=2", b"%" * 1_000_000
    tracemalloc.start()
    for body in (*may, *may_not):
        verbs = upstream_of(GITHUB).verbs("POST", "https://api.github.com/x", {}, body)
        assert (verbs == ["POST"]) == (body in may_not), body[:40]
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("verb", "path", "method"),
    [
        ("GET", "/youtube/v3/x%2F..%2Fsearch", "youtube.search.list"),
        ("GET", "/youtube%5Cv3%2fsearch", "youtube.search.list"),
        ("HEAD", "/youtube/v3/Captions/x/", "youtube.captions.download"),
        ("POST", "/upload/youtube/v3/videos/", "youtube.videos.insert"),
        ("POST", "/youtube/v3/search", None),
        ("GET", "/youtube/v3/searches", None),
    ],
)
def test_a_path_close_to_a_method_of_google_is_the_methods(verb: str, path: str, method: str | None) -> None:
    assert upstream_of(load_book("youtube-v3")).method(verb, f"https://youtube.googleapis.com{path}") == method


@pytest.mark.parametrize("path", ["//batch/youtube/v3", "/Batch/youtube/v3/", "/batch", "/%62atch"])
@pytest.mark.parametrize("book", ["youtube-v3", "sheets-v4"])
def test_a_batch_is_recognised_in_every_spelling_of_its_path(book: str, path: str) -> None:
    with pytest.raises(UsageError, match=r"^a batch holds several calls; send it with q\.google\(\)"):
        upstream_of(load_book(book)).method("POST", f"https://youtube.googleapis.com{path}")
    assert upstream_of(load_book(book)).method("POST", "https://youtube.googleapis.com/batches") is None
    assert upstream_of(a_book()._replace(name="chat-v1", api="chat")).method("POST", f"https://x.example{path}") is None


def test_an_upload_that_may_be_new_is_charged() -> None:
    upstream = upstream_of(load_book("youtube-v3"))
    root = "https://youtube.googleapis.com/upload/youtube/v3"
    assert upstream.continues("PUT", f"{root}/videos?upload_id=a")
    assert upstream_of(load_book("drive-v3")).continues("PUT", "https://x.example/upload/drive/v3/files?upload_id=a")
    assert not upstream.continues("PUT", "https://youtube.googleapis.com/youtube/v3/videos?upload_id=a")
    assert upstream.continues("PUT", f"{root}/captions?uploadType=resumable&upload_id=a")
    assert not upstream.continues("POST", f"{root}/videos?upload_id=a")
    for rest in ("videos?uploadType=resumable", "videos;x?upload_id=a", "captions?uploadType=multipart&upload_id=a"):
        assert not upstream.continues("PUT", f"{root}/{rest}&uploadType=resumable")
