"""Times for people, in a zone that the environment names wrongly."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from quota.common.clock import moment, second, weekday
from quota.dashboard import words
from quota.wording import clock

if TYPE_CHECKING:
    from collections.abc import Iterator

AT_MS = 1_793_000_000_000


@pytest.fixture(params=["UTC+25", "UTC-25:61", "Nowhere/City", "\n"])
def _zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("_zone")
def test_where_the_environment_names_no_zone_times_are_in_utc() -> None:
    assert (weekday(AT_MS), second(AT_MS)) == ("Mon 26 Oct 07:33", "26 Oct 07:33:20")
    assert (moment(AT_MS, AT_MS), clock(AT_MS), words.hour(AT_MS)) == ("07:33", "Mon 07:33", "07:33")
    assert (words.date(AT_MS), words.when(AT_MS, AT_MS).second) == ("26 Oct", "07:33:20")
