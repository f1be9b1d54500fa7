"""The evidence of a cost book: `tests/books/NAME/`, and how a book differs from it.

requests.json   `quotas`, what upstream grants in each bucket, and `requests`: each with the method that it is, and the
                units that it costs in each bucket; `on` a day where its price has one; `scopes`, if the book has them
answers.json    answers of upstream: status, headers, body, when each came (`at`), where it is `from`, and what the
                book must make of it (`means`); {} where it must make nothing of it
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quota.clients.upstream import Google, Meaning, upstream_of
from quota.common.clock import NEVER
from quota.terms.api import Hosts
from quota.terms.costs import CostBook
from support.books import price_on

FOLDER = Path(__file__).parents[1] / "books"

TELLS = ("used up", "passing", "unknown", "success")
"""What an answer is an example of. Each book has one of each at least."""

ORIGINS = ("recorded", "vendor's example", "vendor's description", "public thread", "made")
"""Where an answer is from, with the `page` of each but the last. By a vendor's description: the page has its status and
its fields, and the rest is ours. Made: all of it is ours, as a server may answer."""


def evidence_of(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The requests and the answers of a book."""
    folder = FOLDER / name
    return json.loads((folder / "requests.json").read_text()), json.loads((folder / "answers.json").read_text())


def differences(book: CostBook, requests: dict[str, Any], answers: list[dict[str, Any]]) -> list[str]:
    """What in the evidence a book contradicts, a line each."""
    return [
        *_quotas(book, requests["quotas"]),
        *_scopes(book, requests),
        *_requests(book, requests["requests"]),
        *_answers(book, answers),
    ]


def _quotas(book: CostBook, expected: dict[str, dict[str, int]]) -> Iterator[str]:
    quotas = {name: {quota.window.name: quota.units for quota in b.quotas} for name, b in book.buckets.items()}
    if quotas != expected:
        yield f"quotas: {quotas}, not {expected}"


def _scopes(book: CostBook, requests: dict[str, Any]) -> Iterator[str]:
    if list(book.scopes) != (expected := requests.get("scopes", [])):
        yield f"scopes: {list(book.scopes)}, not {expected}"


def _requests(book: CostBook, requests: list[dict[str, Any]]) -> Iterator[str]:
    for row in requests:
        label = row.get("request") or row["method"]
        method = row["method"]
        if "request" in row:
            verb, _, url = row["request"].partition(" ")
            if book.hosts and not Hosts(book.hosts).serve(url):
                yield f"{label}: {urlsplit(url).netloc} is no host of the book"
            method = upstream_of(book).method(verb, url)
            if method != row["method"]:
                yield f"{label}: {method}, not {row['method']}"
            if method is not None and book.canonical(Google(book).method(verb, url) or method) != method:
                yield f"{label}: q.google() does not call it {method}"
        if method is None:
            price = book.default_price(row["request"].partition(" ")[0])
        elif method in book.methods:
            price = price_on(book, method, date.fromisoformat(row["on"])) if "on" in row else book.price(method)
        else:
            yield f"{label}: no method {method}"
            continue
        if (units := {part.bucket: part.units for part in price.parts}) != row["units"]:
            yield f"{label}: {units}, not {row['units']}"


def _answers(book: CostBook, answers: list[dict[str, Any]]) -> Iterator[str]:
    for row in answers:
        means = meaning(book, row)
        if means != row["means"]:
            yield f"{row['name']}: {means}, not {row['means']}"


def meaning(book: CostBook, row: dict[str, Any]) -> dict[str, Any]:
    """What a book makes of an answer, without what it does not say."""
    method = row.get("method")
    if "request" in row:
        verb, _, url = row["request"].partition(" ")
        method = upstream_of(book).method(verb, url) or f"{verb} **"
    body = row["body"] if isinstance(row["body"], str) else json.dumps(row["body"])
    at_ms = int(datetime.fromisoformat(row["at"]).timestamp() * 1000)
    meaning = upstream_of(book).read(row["status"], row["headers"], body.encode(), method=method or "", at_ms=at_ms)
    return {key: value for key, value in _facts(meaning).items() if value not in ({}, None, False)}


def _facts(meaning: Meaning) -> dict[str, Any]:
    return {
        "error": None if meaning.error is None else meaning.error.kind,
        "closes": {each.bucket: _iso(each.until_ms) for each in meaning.closes},
        "remaining": {
            each.bucket: [each.remaining_units, each.limit_units, _iso(each.reset_ms)] for each in meaning.levels
        },
        "used": meaning.used_units,
        "free": meaning.free,
    }


def _iso(at_ms: int | None) -> str | None:
    """None: until the bucket's own reset, or unsaid."""
    if at_ms is None:
        return None
    return "until it is reopened" if at_ms == NEVER else datetime.fromtimestamp(at_ms / 1000, UTC).isoformat()
