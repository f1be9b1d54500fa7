"""Times for people: in the local zone, and in a zone that the environment names wrongly."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from quota.common.clock import moment, stamp

AT_MS = 1_793_000_000_000
PACIFIC = "America/Los_Angeles"


@pytest.fixture
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


LOCAL = "2026-10-26T08:33:20+01:00"


@pytest.mark.usefixtures("zone")
@pytest.mark.parametrize(
    ("zone", "at_ms", "upstream", "shown"),
    [
        # A name that is none is UTC.
        *((wrong, AT_MS, None, "2026-10-26T07:33:20+00:00") for wrong in ("UTC+25", "UTC-25:61", "Nowhere/City", "\n")),
        # Rounded up to the second.
        ("Europe/Berlin", AT_MS, None, LOCAL),
        ("Europe/Berlin", AT_MS - 999, None, LOCAL),
        ("Europe/Berlin", AT_MS + 1, None, "2026-10-26T08:33:21+01:00"),
        ("Europe/Berlin", AT_MS, PACIFIC, f"{LOCAL} (2026-10-26T00:33:20-07:00 in America/Los_Angeles)"),
        (PACIFIC, AT_MS, PACIFIC, "2026-10-26T00:33:20-07:00"),
    ],
    indirect=["zone"],
)
def test_a_time_is_local_and_upstreams_stands_beside_it(at_ms: int, upstream: str | None, shown: str) -> None:
    assert moment(at_ms, upstream) == shown


def test_a_past_time_is_rounded_down() -> None:
    assert stamp(AT_MS + 999) == stamp(AT_MS) == moment(AT_MS)
