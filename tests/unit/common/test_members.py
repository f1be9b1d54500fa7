"""A record's fields in JSON: in the order asked for, with times as text."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from quota.common.clock import NEVER
from quota.common.members import members


class Row(NamedTuple):
    name: str
    units: int
    since_ms: int
    resets_ms: int | None


ROW = Row("day", 0, 1_000, None)


def test_fields_have_their_names_and_times_are_text() -> None:
    assert list(members(ROW, "units name").items()) == [("units", 0), ("name", "day")]
    assert members(ROW, "since since_at") == dict.fromkeys(("since", "since_at"), "1970-01-01T00:00:01.000Z")
    assert members(ROW._replace(since_ms=0), "since") == {"since": "1970-01-01T00:00:00.000Z"}


@pytest.mark.parametrize("never", [None, NEVER])
def test_a_time_that_does_not_come_is_null(never: int | None) -> None:
    assert members(ROW._replace(resets_ms=never), "resets_at") == {"resets_at": None}


def test_what_is_empty_can_be_left_out() -> None:
    assert members(ROW, "name", if_any="units resets_at since") == {
        "name": "day",
        "since": "1970-01-01T00:00:01.000Z",
    }


def test_a_field_that_is_not_there_is_an_error() -> None:
    with pytest.raises(AttributeError):
        members(ROW, "nam")
