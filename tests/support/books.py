"""A small cost book, so that a test shows the prices it reckons with."""

from __future__ import annotations

from quota.settings.books import parse_book
from quota.terms.costs import CostBook

BOOK: CostBook = parse_book(
    """
    api = "youtube"
    source = "the tests"
    read_on = 2026-11-01
    [buckets.units]
    quota = 10_000
    resets = { calendar = "day", zone = "America/Los_Angeles" }
    [buckets.search]
    quota = 100
    resets = { calendar = "day", zone = "America/Los_Angeles" }
    [default]
    get = 1
    other = 50
    [methods]
    "search.list" = 100
    "videos.list" = 1
    "videos.insert" = { prices = [{ units = 1600 }, { units = 100, since = 2025-12-04 }] }
    "captions.list" = 50
    "suggest.list" = { units = 1, bucket = "search" }
    [pools.search]
    marks = ["SearchList"]
    methods = ["search.list"]
    """,
    "test-book",
)
