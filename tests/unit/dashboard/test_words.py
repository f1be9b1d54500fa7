"""Times as people say them, and shares that never round to nothing or to all."""

from __future__ import annotations

import pytest

from quota.dashboard.pages import NAME_CHARACTERS, away, percent, short_name
from quota.terms.limits import HOUR_MS, MINUTE_MS, SECOND_MS

NOW_MS = 1_795_300_000_000


def test_a_time_is_shown_by_its_distance() -> None:
    texts = [away(NOW_MS + ahead, NOW_MS) for ahead in (HOUR_MS + 1, -1, -SECOND_MS, -90 * MINUTE_MS)]
    assert texts == ["in 1h 00m", "just now", "1s ago", "1h 30m ago"]


def test_a_name_from_outside_is_one_short_line_that_moves_nothing() -> None:
    assert short_name("a\u202eb\x1b[31m\nc") == "a b [31m c"
    assert len(short_name("x" * 300)) == NAME_CHARACTERS
    assert short_name("שלום") == "שלום"


@pytest.mark.parametrize(
    ("part", "whole", "share"), [(0, 9, 0), (1, 10**6, 1), (999_999, 10**6, 99), (9, 9, 100), (12, 9, 100), (0, 0, 100)]
)
def test_percentages_round_to_all_or_nothing_only_when_exact(part: int, whole: int, share: int) -> None:
    assert percent(part, whole) == share
