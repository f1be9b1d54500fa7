"""The shipped cost books, and what a file must look like to be one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from quota.cli.output import fail_each
from quota.errors import ConfigError, UnknownMethod
from quota.settings.books import book_of, load_book
from quota.settings.load import given_settings
from quota.settings.toml import parse_toml
from quota.terms.limits import MAX_UNITS, Selector
from support.books import parse_book

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


@pytest.mark.parametrize("name", YOUTUBE_BOOKS)
def test_every_method_has_a_name_in_cloud_monitoring(name: str) -> None:
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


@pytest.mark.parametrize("name", YOUTUBE_BOOKS)
def test_every_method_of_the_google_client_has_a_price(name: str) -> None:
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
    for message in ERRORS[pool]:
        assert [p.name for p in load_book(name).pools if any(mark in message for mark in p.marks)] == [pool]


def test_a_pool_that_runs_dry_stops_its_method_also_where_the_book_has_no_such_bucket() -> None:
    assert load_book("youtube-v3").closed_by("search.list", "units") == ("units", "search")
    assert load_book("youtube-v3").closed_by("videos.list", "units") == ("units",)
    assert load_book("youtube-v3-buckets").closed_by("search.list", "search") == ("search",)


def test_the_book_of_gmail_has_only_methods_of_the_api() -> None:
    book = load_book("gmail-v1")
    assert book.methods.keys() <= {book.canonical(method) for method, _ in discovered("gmail.v1")}


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("search.lst", "'search.lst'; did you mean 'search.list'?"),
        ("SEARCH.LIST", "'SEARCH.LIST'; did you mean 'search.list'?"),
        ("watermarks", "'watermarks'; it has watermarks.set, watermarks.unset."),
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
    assert load_book("youtube-v3").least_units(Selector(("units",))) == 1
    assert load_book("youtube-v3-buckets").least_units(Selector(("search",))) == 1
    assert load_book("github-graphql").least_units(Selector(count="calls")) == 2, "each call spends two buckets"


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
    "write dated prices as { prices = [{ units = 1 }, { units = 2, since = 2026-06-01 }] }; a list means several "
    "buckets"
)

TWICE = 'windows = [{ quota = 1, resets = "60m" }, { quota = 2, resets = "1h" }]'
NAME_RULE = "a name here has 1 to 64 characters out of A-Z a-z 0-9 . _ : -"
LONG_RULE = "a name here has 1 to 128 characters out of A-Z a-z 0-9 . _ / -"

MISTAKES = [
    ('api = "shop"', 'api = "shop"\nsauce = 1', "sauce: unknown key; did you mean 'source'?"),
    ("get = 2", "get = 0", f"default.get: 0 is not a whole number from 1 to {MAX_UNITS}"),
    (RESETS, 'window = "24h"', "buckets.calls.window: unknown key; a cost book calls it 'resets' or 'windows'"),
    ('"month"', '"day", day = 3', 'buckets.calls.resets.day: only calendar = "month" has it; remove this key'),
    (
        RESETS,
        f"windows = [{{ quota = 1, {RESETS} }}]",
        "buckets.calls.quota: cannot be combined with windows; put it into each row of windows",
    ),
    (QUOTA, TWICE, "buckets.calls.windows[1].resets: this window is listed twice; keep the smaller quota"),
    (QUOTA, f"windows = [{ELEVEN}]", "buckets.calls.windows: a bucket has at most 10 windows"),
    (f"[buckets.calls]\n{QUOTA}", "[buckets]", "buckets: at least one bucket is needed"),
    # Names: a bucket's is part of a key in the ledger, and all of them are shown in messages.
    ("[buckets.calls]", '[buckets."a,b"]', f"buckets.'a,b': {NAME_RULE}"),
    ("items.list", "items\\u001b[31m", "methods: 'items\\x1b[31m': a name has 1 to 64 printable characters"),
    # Named once, although other checks would fail too.
    ("[pools.", '[answers]\nremainin = "Y"\n[pools.', "answers.remainin: unknown key; did you mean 'remaining'?"),
    ("[pools.", "[answers]\nlevels = {}\n[pools.", "answers.levels: a non-empty array of tables is needed"),
    ('["items.add"]', '["add"]', "pools.adding.methods[0]: no method 'add' in this book; known: items.list, items.add"),
]
MINUTE = '[buckets.minute]\nquota = 5\nresets = "1m"'
OF_MONITORING = [
    ('service = "a b"\nbuckets = {}', f"service: 'a b': {LONG_RULE}"),
    ("buckets = {}", "service: missing; the key is required"),
    (
        'service = "a"\nbuckets = { call = { metric = "m", limit = "l" } }',
        "buckets.call: no bucket or pool of this book; did you mean 'calls'?",
    ),
    (
        'service = "a"\nbuckets = { minute = { metric = "m", limit = "l" } }\n' + MINUTE,
        "buckets.minute: `quota reconcile` compares figures since a reset, and this bucket has none",
    ),
]
PRICES = [
    ("-1", f": -1 is not a whole number from 0 to {MAX_UNITS}"),
    ("{ unit = 1 }", ".unit: unknown key; did you mean 'units'?"),
    ("{ x = 1 }", ".x: unknown key; known: units, bucket, reserve, prices"),
    ('{ units = 2, bucket = "call" }', ".bucket: 'call' is not allowed here; did you mean 'calls'?"),
    (
        '[{ units = 1 }, { units = 2, bucket = "calls" }]',
        "[1].bucket: bucket 'calls' is listed twice; add its units up",
    ),
    (f"[{', '.join(['{ units = 1 }'] * 11)}]", ": one call is charged to at most 10 buckets"),
    # Dated prices, also in the former spelling.
    ("[{ units = 9 }, { units = 4, since = 2026-06-01 }]", f": {DATED}"),
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
        *(("[pools.", f"[monitoring]\n{text}\n[pools.", f"monitoring.{says}") for text, says in OF_MONITORING),
    ],
)
def test_a_mistake_in_a_book_is_named(line: str, instead: str, message: str) -> None:
    assert line in BOOK
    with pytest.raises(ConfigError) as error:
        parse_book(BOOK.replace(line, instead), "shop")
    assert str(error.value) == f"cost book shop: {message}"


ANSWERS_AND_ROUTES = """
[answers]
free = [{}, { status = 204 }]
closed = [{ status = 429 }, { status = 429 }]
[routes]
"GET /a" = "items.lst"
"GET b" = "items.list"
"""


@pytest.mark.parametrize(
    ("changes", "beginnings"),
    [
        (
            {'api = "shop"': "api = 3\nhost = 3", "get = 2": "get = 0", '["items.add"]': "[3]"},
            ["api: a non-empty", "host: unknown key", "default.get: 0 is not", "pools.adding.methods: "],
        ),
        (
            {"[pools.": f"{ANSWERS_AND_ROUTES}\n[pools."},
            [
                "answers.free[0]: the",
                "answers.closed[1]: never",
                "routes.'GET /a': no method",
                "routes.'GET b': 'b' is no path",
            ],
        ),
    ],
    ids=["values", "rows"],
)
def test_mistakes_of_one_kind_in_a_book_are_named_together(changes: dict[str, str], beginnings: list[str]) -> None:
    text = BOOK
    for line, instead in changes.items():
        assert line in text
        text = text.replace(line, instead)
    with pytest.raises(ConfigError) as error:
        parse_book(text, "shop")
    assert len(error.value.mistakes) == len(beginnings)
    for mistake, beginning in zip(sorted(error.value.mistakes), sorted(beginnings), strict=True):
        assert mistake.startswith(f"cost book shop: {beginning}")
    assert str(error.value).startswith(f"cost book shop: {len(beginnings)} mistakes: (1) ")


def test_a_message_has_at_most_twenty_mistakes_of_a_book(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many_wrong = "\n".join(f"wrong{n} = -1" for n in range(30))
    (tmp_path / "shop.toml").write_text(BOOK.replace('"items.list" = 2', f'"items.list" = 2\n{many_wrong}'))
    with pytest.raises(ConfigError, match=r"wrong19: [^(]* \(21\) and 10 more$") as error:
        given_settings({"credentials": {"main": {"api": f"{tmp_path}/shop.toml"}}})
    fail_each(error.value)
    assert capsys.readouterr().err.splitlines()[20:] == ["quota: and 10 more mistakes"]


@pytest.mark.parametrize("key", ["api", "source", "read_on", "buckets", "default", "methods"])
def test_a_book_needs_each_of_these_keys(key: str) -> None:
    data = parse_toml(BOOK, "shop")
    del data[key]
    example = ", for example default = { get = 1, other = 1 }" if key == "default" else ""
    with pytest.raises(ConfigError, match=f"^shop: {key}: missing; the key is required{example}$"):
        book_of(data, "shop", "shop")


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
