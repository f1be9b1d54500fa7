"""Times as people say them, and shares that never round to nothing or to all."""

from __future__ import annotations

import pytest

from quota.dashboard.pages import NAME_CHARACTERS, away, duration, percent, short_name
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS

NOW_MS = 1_795_300_000_000


@pytest.mark.parametrize(
    ("span_ms", "down", "up"),
    [
        (0, "0 s", "0 s"),
        (59_999, "59 s", "1 min"),
        (59 * MINUTE_MS + 1, "59 min", "1 h"),
        (2 * HOUR_MS + 10 * MINUTE_MS, "2 h 10 min", "2 h 10 min"),
        (DAY_MS, "24 h", "24 h"),
        (3 * DAY_MS + 23 * HOUR_MS + MINUTE_MS, "3 d 23 h", "4 d"),
        (-5, "0 s", "0 s"),
    ],
)
def test_a_duration_has_its_two_largest_units(span_ms: int, down: str, up: str) -> None:
    assert (duration(span_ms), duration(span_ms, up=True)) == (down, up)


def test_a_time_ahead_is_rounded_up() -> None:
    texts = [away(NOW_MS + ahead, NOW_MS) for ahead in (1, 61_000, HOUR_MS + 1, -1, -SECOND_MS, -90 * MINUTE_MS)]
    assert texts == ["in 1 s", "in 2 min", "in 1 h 1 min", "just now", "1 s ago", "1 h 30 min ago"]


def test_a_name_from_outside_is_one_short_line_that_moves_nothing() -> None:
    assert short_name("a\u202eb\x1b[31m\nc") == "a b [31m c"
    assert len(short_name("x" * 300)) == NAME_CHARACTERS
    assert short_name("שלום") == "שלום"


@pytest.mark.parametrize(
    ("part", "whole", "share"), [(0, 9, 0), (1, 10**6, 1), (999_999, 10**6, 99), (9, 9, 100), (12, 9, 100), (0, 0, 100)]
)
def test_percentages_round_to_all_or_nothing_only_when_exact(part: int, whole: int, share: int) -> None:
    assert percent(part, whole) == share
