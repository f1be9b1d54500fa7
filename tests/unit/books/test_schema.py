"""`config/costs/schema.json` says of the format what other programs need: it takes what the reader takes."""

from __future__ import annotations

import copy
import json
import re
from typing import Any, get_args

import pytest
from jsonschema import Draft202012Validator

from quota.common.files import read_text
from quota.settings.books import book_and_tables, book_names
from quota.terms.api import VERBS, Form
from quota.terms.limits import PERIODS

TEXT = read_text("quota.config", "costs/schema.json")
SCHEMA = json.loads(TEXT)
VALIDATOR = Draft202012Validator(SCHEMA)


def test_the_cost_book_schema_is_valid() -> None:
    Draft202012Validator.check_schema(SCHEMA)


def test_each_choice_is_the_readers() -> None:
    enums = [json.loads(choices) for choices in re.findall(r'"enum": (\[[^]]*\])', TEXT)]
    assert enums == [[*PERIODS], [*get_args(Form)]], "write them into config/costs/schema.json"
    assert f"({'|'.join(VERBS)}) " in TEXT, "write VERBS into config/costs/schema.json"


@pytest.mark.parametrize("name", book_names())
def test_each_shipped_book_is_valid(name: str) -> None:
    assert [error.message for error in VALIDATOR.iter_errors(book_and_tables(name)[1])] == []


WRONG: list[tuple[tuple[str, ...], Any]] = [
    (("api",), 7),
    (("read_on",), "yesterday"),
    (("colour",), "green"),
    (("scopes",), ["two scopes"]),
    (("buckets",), {}),
    (("buckets", "core", "quota"), 0),
    (("buckets", "core", "resets"), "soon"),
    (("buckets", "core", "resets"), {"calendar": "year", "zone": "UTC"}),
    (("default", "get"), -1),
    (("methods", "read"), {"prices": [{"since": "2026-11-25"}]}),
    (("methods", "read"), [{"units": 1, "reserve": {"default": 1}}]),
    (("routes", "FETCH /x"), "read"),
    (("answers", "reset"), {"header": "X-Reset", "as": "iso"}),
    (("answers", "remaining"), {"header": "X-Left", "json": "/left"}),
    (("answers", "units"), [{"header": "X-Used"}]),
    (("answers", "free"), [{}]),
    (("answers", "closed"), [{"status": 429, "is": "x"}]),
    (("answers", "levels"), [{"remaining": "X-Left"}]),
]


@pytest.mark.parametrize(("place", "value"), WRONG)
def test_an_unknown_key_of_a_book_is_invalid(place: tuple[str, ...], value: object) -> None:
    book: dict[str, Any] = copy.deepcopy(book_and_tables("github")[1])
    table = book
    for key in place[:-1]:
        table = table[key]
    table[place[-1]] = value
    assert not VALIDATOR.is_valid(book)
