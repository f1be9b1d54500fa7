"""A small cost book, so that a test shows the prices it reckons with."""

from __future__ import annotations

from datetime import date

from quota.settings.books import book_of
from quota.settings.toml import parse_toml
from quota.terms.costs import CostBook, Price


def parse_book(text: str, name: str) -> CostBook:
    """A cost book from TOML text. `name` is the book's name, also in messages."""
    return book_of(parse_toml(text, f"cost book {name}"), name, f"cost book {name}")


def price_on(book: CostBook, method: str, day: date) -> Price:
    """The price of a method on a day."""
    prices = book.methods[book.canonical(method)]
    return next((price for price in reversed(prices) if price.since <= day), prices[0])


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
