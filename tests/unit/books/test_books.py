"""Every cost book that is shipped, against its evidence: requests and answers of its API in `tests/books/NAME/`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date, datetime
from itertools import pairwise
from typing import Any

import pytest

from quota.common.files import read_text
from quota.settings.books import book_names, load_book
from quota.terms.api import AnswerRules, Used
from quota.terms.costs import CostBook, Price
from support.book_evidence import FOLDER, ORIGINS, TELLS, differences, evidence_of

NAMES = book_names()


@pytest.mark.parametrize("name", NAMES)
def test_a_book_agrees_with_its_evidence(name: str) -> None:
    assert differences(load_book(name), *evidence_of(name)) == []


@pytest.mark.parametrize("name", NAMES)
def test_the_evidence_of_a_book_is_whole(name: str) -> None:
    book, (requests, answers) = load_book(name), evidence_of(name)
    assert len(requests["requests"]) >= 6
    assert len(answers) >= 4
    assert {row["tells"] for row in answers} == set(TELLS)
    assert any(row["tells"] == "used up" and row["from"] != "made" for row in answers), "nobody says what used up is"
    for row in answers:
        assert row["from"] in ORIGINS, row["name"]
        assert (row["from"] == "made") is ("page" not in row), row["name"]
        assert row.get("page", "https://").startswith("https://"), row["name"]
        assert datetime.fromisoformat(row["at"]).tzinfo is not None, row["name"]
    assert {row["method"] for row in requests["requests"]} >= set(book.methods), "each method has a request"
    assert len({row["name"] for row in answers}) == len(answers)


@pytest.mark.parametrize("name", NAMES)
def test_a_book_says_where_its_numbers_come_from_and_when_they_were_read(name: str) -> None:
    comment = read_text("quota.config", f"costs/{name}.toml").partition("\napi = ")[0]
    assert re.search(r"at `source`|on the page at `source`|https://", comment)
    book = load_book(name)
    assert (book.name, book.source.startswith("https://")) == (name, True)
    assert book.read_on >= date(2026, 6, 1)


def test_every_folder_of_evidence_has_its_book() -> None:
    assert sorted(folder.name for folder in FOLDER.iterdir() if folder.is_dir()) == NAMES


def dearer(price: Price) -> Price:
    return price._replace(parts=tuple(part._replace(units=part.units + 1) for part in price.parts))


def renamed(price: Price, bucket: str) -> Price:
    parts = (part._replace(bucket="renamed" if part.bucket == bucket else part.bucket) for part in price.parts)
    return price._replace(parts=tuple(parts))


def mutants(book: CostBook) -> Iterator[tuple[str, CostBook]]:
    """Books that are wrong in one place: a price, a quota, the name of a bucket, a route, or a rule about answers."""
    for method, prices in book.methods.items():
        for number, price in enumerate(prices):
            wrong = (*prices[:number], dearer(price), *prices[number + 1 :])
            yield f"{method} costs more", book._replace(methods={**book.methods, method: wrong})
    for name, bucket in book.buckets.items():
        for number, quota in enumerate(bucket.quotas):
            quotas = (*bucket.quotas[:number], quota._replace(units=quota.units + 1), *bucket.quotas[number + 1 :])
            wrong_bucket = bucket._replace(quotas=quotas)
            yield f"{name} has more in {quota.window.name}", book._replace(buckets={**book.buckets, name: wrong_bucket})
        methods = {method: tuple(renamed(price, name) for price in prices) for method, prices in book.methods.items()}
        buckets = {"renamed" if key == name else key: value for key, value in book.buckets.items()}
        yield f"{name} is renamed", book._replace(buckets=buckets, methods=methods)
    for number, (first, other) in enumerate(pairwise(book.routes)):
        if first.method != other.method:
            swapped = (first._replace(method=other.method), other._replace(method=first.method))
            routes = (*book.routes[:number], *swapped, *book.routes[number + 2 :])
            yield f"{first.path} and {other.path} are swapped", book._replace(routes=routes)
    for number, route in enumerate(book.routes):
        yield f"{route.path} is gone", book._replace(routes=(*book.routes[:number], *book.routes[number + 1 :]))
    if book.scopes:
        yield "the scopes are gone", book._replace(scopes=())
    for mutation, answers in wrong_answers(book.answers):
        yield mutation, book._replace(answers=answers)


def wrong_answers(rules: AnswerRules) -> Iterator[tuple[str, Any]]:
    for field in ("levels", "free", "closed"):
        rows = getattr(rules, field)
        for number in range(len(rows)):
            yield f"{field}[{number}] is gone", rules._replace(**{field: (*rows[:number], *rows[number + 1 :])})
    if rules.units is not None:
        yield "units is gone", rules._replace(units=None)
        for number, figure in enumerate(rules.units.figures if len(rules.units.figures) > 1 else ()):
            fewer = (*rules.units.figures[:number], *rules.units.figures[number + 1 :])
            yield f"units without {figure.places[0].pointer}", rules._replace(units=Used(fewer))


MUTANTS = [(name, mutation, book) for name in NAMES for mutation, book in mutants(load_book(name))]


def test_the_evidence_notices_each_mutated_book() -> None:
    evidence = {name: evidence_of(name) for name in NAMES}
    unnoticed = [f"{name}: {mutation}" for name, mutation, book in MUTANTS if not differences(book, *evidence[name])]
    assert unnoticed == []
    assert len(MUTANTS) >= 40
