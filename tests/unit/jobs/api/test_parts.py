"""The parts of the API that need no server: cursors, parameters, resources of damaged rows."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import pytest

from quota.jobs.api.app import document
from quota.jobs.api.wire import (
    DEFAULT_LIMIT,
    MAX_BEGINNINGS,
    MAX_CHARACTERS,
    MAX_LIMIT,
    MIN_BEGINNING,
    ParameterError,
    check_version,
    decode,
    encode,
    limit_of,
    read_parameters,
    resource,
)
from quota.jobs.store.fulltext import MAX_WORDS
from quota.jobs.store.reader import MAX_HITS
from quota.jobs.store.rows import CHANNEL_FIELDS, VIDEO_FIELDS


@pytest.mark.parametrize("position", [0, 1, 50, 2**32 - 1])
def test_a_cursor_leads_back_to_its_place(position: int) -> None:
    version, place = decode("trending DE", {"cursor": encode("trending DE", "v1", position)})
    assert place == position
    check_version(version, "v1")
    with pytest.raises(ParameterError, match="the list has changed"):
        check_version(version, "v2")


@pytest.mark.parametrize(
    ("query", "parameters"),
    [
        (b"", {}),
        (b"a=1&b=", {"a": "1", "b": ""}),
        (b"a=1+2%2B%26", {"a": "1 2+&"}),
        (b"%61=x=y", {"a": "x=y"}),
        (b"a=%E6%9D%B1", {"a": "東"}),
        (b"a=%zz", {"a": "%zz"}),
    ],
)
def test_parameters_are_read(query: bytes, parameters: dict[str, str]) -> None:
    assert read_parameters(query, ("a", "b")) == parameters


@pytest.mark.parametrize("query", [b"c=1", b"a=1&%61=2", b"a=1&", b"A=1", b"a=%ED%A0%80", b"%ff=1", b"a=\xff", b"a;b"])
def test_parameters_that_no_answer_heeds_are_turned_away(query: bytes) -> None:
    with pytest.raises(ParameterError) as caught:
        read_parameters(query, ("a", "b"))
    assert caught.value.problem.detail.isprintable()


@pytest.mark.parametrize("written", ["", "0", "101", "-1", "1.5", "1e1", " 1", "٣", "0x1", "9" * 5000, "+1", "1_0"])
def test_the_api_rejects_any_other_limit(written: str) -> None:
    with pytest.raises(ParameterError):
        limit_of({"limit": written})


@pytest.mark.parametrize("value", [None, b"\xff", 1.5, -1, "", "[", "[[", "{}", "[1]", '["\\ud800"]', 2**62])
def test_a_damaged_row_is_a_resource_without_what_is_damaged(value: Any) -> None:
    for kind, fields in (("video", VIDEO_FIELDS), ("channel", CHANNEL_FIELDS)):
        shown = resource(kind, dict.fromkeys((f"{kind}_id", *fields), value))
        written = json.dumps(shown, ensure_ascii=False).encode(errors="replace")
        assert {"kind", "id"} <= json.loads(written).keys()
        assert None not in shown.get("snippet", {}).values()


def test_the_document_has_the_numbers_of_the_code() -> None:
    listed = document()
    limit = listed["components"]["parameters"]["limit"]["schema"]
    assert (limit["minimum"], limit["maximum"], limit["default"]) == (1, MAX_LIMIT, DEFAULT_LIMIT)
    search = listed["paths"]["/api/v1/search"]["get"]
    (words,) = [parameter for parameter in search["parameters"] if parameter.get("name") == "q"]
    assert words["schema"]["maxLength"] == MAX_CHARACTERS
    assert words["description"].startswith(f"1 to {MAX_WORDS} words; {MAX_BEGINNINGS} may end with *")
    assert f"after {MIN_BEGINNING} or more letters" in words["description"]
    assert f"If more than {MAX_HITS} videos match" in search["description"]
    assert listed["info"]["version"] == version("quota-ledger")
