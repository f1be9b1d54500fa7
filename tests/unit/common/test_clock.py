"""Times for people: in the local zone, and in a zone that the environment names wrongly."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from quota.common.clock import moment

if TYPE_CHECKING:
    from collections.abc import Iterator

AT_MS = 1_793_000_000_000
PACIFIC = "America/Los_Angeles"


@pytest.fixture
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("zone")
@pytest.mark.parametrize("zone", ["UTC+25", "UTC-25:61", "Nowhere/City", "\n"], indirect=True)
def test_times_are_in_utc_without_a_time_zone() -> None:
    assert moment(AT_MS) == "2026-10-26T07:33:20+00:00"


@pytest.mark.usefixtures("zone")
@pytest.mark.parametrize("zone", ["Europe/Berlin"], indirect=True)
def test_a_time_is_local_with_its_offset_and_rounded_up_to_the_second() -> None:
    assert moment(AT_MS) == moment(AT_MS - 999) == "2026-10-26T08:33:20+01:00"
    assert moment(AT_MS + 1) == "2026-10-26T08:33:21+01:00"


@pytest.mark.usefixtures("zone")
@pytest.mark.parametrize("zone", ["Europe/Berlin"], indirect=True)
def test_a_time_of_upstreams_has_upstreams_clock_beside_the_local_one() -> None:
    beside = "2026-10-26T08:33:20+01:00 (2026-10-26T00:33:20-07:00 in America/Los_Angeles)"
    assert moment(AT_MS, PACIFIC) == beside


@pytest.mark.usefixtures("zone")
@pytest.mark.parametrize("zone", [PACIFIC], indirect=True)
def test_a_time_is_shown_once_if_upstreams_zone_is_the_local_zone() -> None:
    assert moment(AT_MS, PACIFIC) == "2026-10-26T00:33:20-07:00"
