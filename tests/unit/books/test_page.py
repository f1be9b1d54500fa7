"""The table in `docs/books.md` is made from the books. UPDATE_BOOKS=1 in the environment rewrites it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from quota.settings.books import book_names, load_book
from quota.terms.costs import CostBook
from quota.terms.limits import Calendar, Window

PAGE = Path(__file__).parents[3] / "docs" / "books.md"
PLACE = re.compile(r"(<!-- books: .*? -->\n).*?(<!-- end of the books -->)", re.DOTALL)


def written(window: Window) -> str:
    return f"{window.kind} ({window.zone})" if isinstance(window, Calendar) else window.name


def granted(book: CostBook) -> str:
    buckets = []
    for bucket in book.buckets.values():
        quotas = ", ".join(f"{quota.units:,}/{written(quota.window)}" for quota in bucket.quotas)
        buckets.append(f"`{bucket.name}` {quotas}")
    return "; ".join(buckets)


def table() -> str:
    rows = ["| book | upstream grants | date read |", "| --- | --- | --- |"]
    for name in book_names():
        book = load_book(name)
        rows.append(f"| [`{name}`]({book.source}) | {granted(book)} | {book.read_on} |")
    return "\n".join(rows) + "\n"


def test_the_table_is_made_from_the_books() -> None:
    text = PAGE.read_text(encoding="utf-8")
    made = PLACE.sub(lambda match: f"{match[1]}\n{table()}\n{match[2]}", text)
    if os.environ.get("UPDATE_BOOKS"):
        PAGE.write_text(made, encoding="utf-8")
    else:
        assert text == made, "UPDATE_BOOKS=1 rewrites it"
