"""The shipped cost books, and what a file must look like to be one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import date
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from quota.errors import ConfigError, UnknownMethod
from quota.settings.books import book_names, load_book
from quota.terms.limits import Calendar
from support.books import parse_book, price_on

PACIFIC_DAY = Calendar("day", "America/Los_Angeles")
YOUTUBE_BOOKS = ("youtube-v3", "youtube-v3-buckets")
ERRORS = {
    "search": ("defaultSearchListPerDayPerProject", "youtube.googleapis.com/search_list", "Search Queries per day"),
    "uploads": ("defaultVideoInsertPerDayPerProject", "youtube.googleapis.com/video_insert", "Video Uploads per day"),
}


def discovered(name: str) -> Iterator[tuple[str, str]]:
    """(method id, HTTP verb) of every method in the Google client's own description of an API."""
    folder = files("googleapiclient") / "discovery_cache" / "documents"

    def walk(resource: dict[str, Any]) -> Iterator[tuple[str, str]]:
        for method in resource.get("methods", {}).values():
            yield method["id"], method["httpMethod"]
        for child in resource.get("resources", {}).values():
            yield from walk(child)

    return walk(json.loads((folder / f"{name}.json").read_text(encoding="utf-8")))


# -- the shipped books -------------------------------------------------------------------------------------------------


def test_the_shipped_books_include_these_four() -> None:
    assert {"gmail-v1", "github", "youtube-v3", "youtube-v3-buckets"} <= set(book_names())


@pytest.mark.parametrize("name", book_names())
def test_every_book_says_where_its_prices_come_from_and_when_they_were_read(name: str) -> None:
    book = load_book(name)
    assert book.name == name
    assert book.source.startswith("https://")
    assert book.read_on >= date(2026, 6, 1)


@pytest.mark.parametrize("name", YOUTUBE_BOOKS)
def test_every_method_has_a_name_in_cloud_monitoring(name: str) -> None:
    """The table maps upstream's services to the resources of the book, each of them once."""
    book = load_book(name)
    assert book.monitoring is not None
    resources = {method.partition(".")[0] for method in book.methods}
    assert sorted(book.monitoring.resources.values()) == sorted(resources)
    assert {metric.bucket for metric in book.monitoring.metrics} >= set(book.buckets)
    names = {
        "youtube.api.v3.V3DataVideoService.List": "videos.list",
        "youtube.api.v3.V3DataVideoService.BatchGetStats": "videos.batchGetStats",
        "youtube.api.v3.V3DataCommentService.SetModerationStatus": "comments.setModerationStatus",
        "youtube.api.v3.V3DataSearchService.List": "search.list",
        "youtube.api.v4.V4DataSearchService.List": "youtube.api.v4.V4DataSearchService.List",
        "": "",
    }
    assert {there: book.monitoring.method(there) for there in names} == names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'service = "a b"',
            "monitoring.service: 'a b': a name here has 1 to 128 characters out of A-Z a-z 0-9 . _ / -",
        ),
        ("", "monitoring.service: missing; the key is required"),
        ('servce = "a"', "monitoring.servce: unknown key; did you mean 'service'?"),
        ('service = "a"', "monitoring.buckets: at least one bucket is needed"),
        (
            'service = "a"\nbuckets = { unit = { metric = "m", limit = "l" } }',
            "monitoring.buckets.unit: no bucket or pool of this book; did you mean 'units'?",
        ),
        (
            'service = "a"\nbuckets = { units = { metric = "m" } }',
            "monitoring.buckets.units.limit: missing; the key is required",
        ),
        (
            'service = "a"\nbuckets = { minute = { metric = "m", limit = "l" } }',
            "monitoring.buckets.minute: `quota reconcile` compares figures since a reset, and this bucket has none",
        ),
        (
            'service = "a"\nbuckets = { units = { metric = "m", limit = "\\"x" } }',
            "monitoring.buckets.units.limit: '\"x': a name here has 1 to 128 characters out of A-Z a-z 0-9 . _ / -",
        ),
    ],
)
def test_parse_book_rejects_wrong_monitoring_names(text: str, message: str) -> None:
    book = """
    api = "x"
    source = "https://x.example"
    read_on = 2026-06-01
    default = { get = 1, other = 1 }
    methods = { "a.list" = 1 }
    [buckets.units]
    quota = 5
    resets = { calendar = "day", zone = "UTC" }
    [buckets.minute]
    quota = 5
    resets = "1m"
    [monitoring]
    """
    buckets = "" if "buckets" in text else "buckets = {}\n"
    with pytest.raises(ConfigError) as error:
        parse_book(f"{book}\n{buckets}{text}\n", "mine")
    assert str(error.value) == f"cost book mine: {message}"


@pytest.mark.parametrize("name", YOUTUBE_BOOKS)
def test_every_method_of_the_google_client_has_a_price(name: str) -> None:
    """Its own in the vendor's table, or the default: reads 1, writes 50."""
    book = load_book(name)
    unlisted = set()
    for method, verb in discovered("youtube.v3"):
        if book.canonical(method) in book.methods:
            assert book.price(method).units >= 1
        else:
            unlisted.add(book.canonical(method).partition(".")[0])
            assert book.default_price(verb).units == (1 if verb == "GET" else 50)
            assert book.default_price(verb).bucket == "units"
    # The vendor's table does not name these at all; a new one here wants a look at the table.
    assert unlisted == {
        *("abuseReports", "comments", "liveBroadcasts", "liveChatBans", "liveChatMessages"),
        *("liveChatModerators", "liveStreams", "playlistImages", "superChatEvents", "tests", "thirdPartyLinks"),
        *("videoTrainability", "youtube"),
    }


@pytest.mark.parametrize("name", YOUTUBE_BOOKS)
@pytest.mark.parametrize("pool", ["search", "uploads"])
def test_upstreams_words_identify_a_pool(name: str, pool: str) -> None:
    """Any one of limit name, metric and message is enough: upstream does not always send all three."""
    for message in ERRORS[pool]:
        assert [p.name for p in load_book(name).pools if any(mark in message for mark in p.marks)] == [pool]


def test_a_pool_that_runs_dry_stops_its_method_also_where_the_book_has_no_such_bucket() -> None:
    assert load_book("youtube-v3").closed_by("search.list", "units") == ("units", "search")
    assert load_book("youtube-v3").closed_by("videos.list", "units") == ("units",)
    assert load_book("youtube-v3-buckets").closed_by("search.list", "search") == ("search",)


def test_the_book_of_gmail_has_only_methods_of_the_api() -> None:
    book = load_book("gmail-v1")
    assert book.methods.keys() <= {book.canonical(method) for method, _ in discovered("gmail.v1")}


# -- asking a book -----------------------------------------------------------------------------------------------------


def test_the_api_name_in_front_of_a_method_does_not_matter() -> None:
    book = load_book("youtube-v3")
    assert book.price("youtube.search.list") == book.price("search.list")


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("search.lst", "'search.lst'; did you mean 'search.list'?"),
        ("zzz", "'zzz'; `quota costs` lists the 51 it has."),
    ],
)
def test_an_unknown_method_is_answered_with_the_nearest(method: str, message: str) -> None:
    with pytest.raises(UnknownMethod) as error:
        load_book("youtube-v3").price(method)
    assert str(error.value) == f"cost book 'youtube-v3' has no method {message}"


def test_a_method_name_of_any_length_makes_one_short_line() -> None:
    with pytest.raises(UnknownMethod) as error:
        load_book("youtube-v3").price("x\n" * 100_000)
    assert len(str(error.value)) < 250
    assert str(error.value).isprintable()


def test_the_default_is_by_verb() -> None:
    book = load_book("youtube-v3")
    assert [book.default_price(verb).units for verb in ("GET", "get", "HEAD", "POST", "DELETE")] == [1, 1, 1, 50, 50]


def test_each_bucket_knows_its_cheapest_call() -> None:
    assert load_book("youtube-v3").cheapest_units("units") == 1
    assert load_book("youtube-v3-buckets").cheapest_units("search") == 1


# -- files -------------------------------------------------------------------------------------------------------------

BOOK = """\
api = "shop"
source = "https://example.com/prices"
read_on = 2026-01-02
[buckets.calls]
quota = 1_000
resets = { calendar = "month", zone = "UTC" }
[default]
get = 2
other = 3
[methods]
"items.list" = 2
"items.add" = { prices = [{ units = 9 }, { units = 4, since = 2026-06-01 }] }
[pools.adding]
marks = ["AddsPerMonth"]
methods = ["items.add"]
"""


RESETS = 'resets = { calendar = "month", zone = "UTC" }'
QUOTA = f"quota = 1_000\n{RESETS}"
ELEVEN = ", ".join(f'{{ quota = 1, resets = "{n}h" }}' for n in range(1, 12))

DATED = (
    "write dated prices as { prices = [{ units = 1 }, { units = 2, since = 2026-06-01 }] }; a list is what one call "
    "costs in several buckets"
)


def test_a_book_of_ones_own_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "shop.toml").write_text(BOOK)
    book = load_book("shop.toml", tmp_path)
    assert (book.name, book.api, book.main_bucket.window) == ("shop", "shop", Calendar("month", "UTC"))
    assert price_on(book, "shop.items.add", date(2026, 5, 31)).units == 9
    assert load_book(str(tmp_path / "shop.toml")) == book


TWICE = 'windows = [{ quota = 1, resets = "60m" }, { quota = 2, resets = "1h" }]'
NAME_RULE = "a name here has 1 to 64 characters out of A-Z a-z 0-9 . _ : -"

MISTAKES = [
    ('api = "shop"', 'api = "shop"\nsauce = 1', "sauce: unknown key; did you mean 'source'?"),
    ("get = 2", "get = 0", f"default.get: 0 is not a whole number from 1 to {10**15}"),
    # Windows.
    (RESETS, 'window = "24h"', "buckets.calls.window: unknown key; a cost book calls it 'resets'"),
    ('"month"', '"day", day = 3', 'buckets.calls.resets.day: only calendar = "month" has it; remove this key'),
    (
        '"month"',
        '"month", starts = "sunday"',
        'buckets.calls.resets.starts: only calendar = "week" has it; remove this key',
    ),
    (
        RESETS,
        f"windows = [{{ quota = 1, {RESETS} }}]",
        "buckets.calls.quota: cannot be combined with windows; put it into each row of windows",
    ),
    (QUOTA, TWICE, "buckets.calls.windows[1].resets: this window is listed twice; keep the smaller quota"),
    (QUOTA, f"windows = [{ELEVEN}]", "buckets.calls.windows: a bucket has at most 10 windows"),
    # Names: a bucket's is part of a key in the ledger, and all of them are shown in messages.
    ("[buckets.calls]", '[buckets."a,b"]', f"buckets.'a,b': {NAME_RULE}"),
    ("[pools.adding]", '[pools."a\\nb"]', f"pools.'a\\nb': {NAME_RULE}"),
    ("items.list", "items\\u001b[31m", "methods: 'items\\x1b[31m': a name has 1 to 64 printable characters"),
    ('api = "shop"', 'api = "sh\\nop"', "api: 'sh\\nop': a name has 1 to 64 printable characters"),
    ('["items.add"]', '["add"]', "pools.adding.methods[0]: no method 'add' in this book; did you mean 'items.add'?"),
]
PRICES = [
    ("-1", f": -1 is not a whole number from 0 to {10**15}"),
    ("[]", ": an empty array where a non-empty array of tables is needed"),
    ("[{ units = 0 }]", f"[0].units: 0 is not a whole number from 1 to {10**15}"),
    ('{ units = 2, bucket = "call" }', ".bucket: 'call' is not allowed here; did you mean 'calls'?"),
    (
        '[{ units = 1 }, { units = 2, bucket = "calls" }]',
        "[1].bucket: bucket 'calls' is listed twice; add its units up",
    ),
    (f"[{', '.join(['{ units = 1 }'] * 11)}]", ": one call is charged to at most 10 buckets"),
    # Dated prices, also in the former spelling.
    ("{ units = 2, since = 2026-06-01 }", f": {DATED}"),
    ("[{ units = 9 }, { units = 4, since = 2026-06-01 }]", f": {DATED}"),
    ("{ prices = [], units = 2 }", ".units: cannot be combined with prices; put it into each row of prices"),
    (
        "{ prices = [{ parts = [{ units = 9 }], units = 9 }] }",
        ".prices[0].units: cannot be combined with parts; put it into each row of parts",
    ),
    (
        "{ prices = [{ units = 9 }, { units = 4, since = 2026-06-01T00:00:00 }] }",
        ".prices[1].since: a date or time where a date such as 2026-06-01 is needed",
    ),
    (
        "{ prices = [{ units = 9, since = 2027-01-01 }, { units = 4, since = 2026-06-01 }] }",
        ".prices[1].since: not later than in the row before; list the oldest price first",
    ),
]


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        *MISTAKES,
        *(('"items.list" = 2', f'"items.list" = {price}', f"methods.'items.list'{says}") for price, says in PRICES),
    ],
)
def test_a_mistake_in_a_book_is_named(line: str, instead: str, message: str) -> None:
    assert line in BOOK
    with pytest.raises(ConfigError) as error:
        parse_book(BOOK.replace(line, instead), "shop")
    assert str(error.value) == f"cost book shop: {message}"


def test_a_book_needs_a_bucket() -> None:
    head, _, tail = BOOK.partition("[buckets.calls]")
    with pytest.raises(ConfigError, match=r"^cost book shop: buckets: at least one bucket is needed$"):
        parse_book(f"{head}[buckets]\n[default]{tail.partition('[default]')[2]}", "shop")


def test_an_unknown_book_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"^there is no cost book 'youtube-v4'; did you mean 'youtube-v3'\?$"):
        load_book("youtube-v4")
    with pytest.raises(
        ConfigError, match=r"^there is no cost book 'acme'; known: .*; `quota book new` drafts another$"
    ):
        load_book("acme")


def test_a_book_without_its_ending_is_answered_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "acme.toml").write_text(BOOK)
    with pytest.raises(ConfigError, match=r"^there is no cost book 'acme'; did you mean 'acme.toml'\?$"):
        load_book("acme", tmp_path)


@pytest.mark.parametrize("name", ["missing.toml", "./"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read: "):
        load_book(name, tmp_path)
