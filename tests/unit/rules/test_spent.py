"""What was charged, as people see it: the units of others, and the sums of all charges."""

from __future__ import annotations

import pytest

from quota.rules.entry import START, Entry
from quota.rules.refusals import MAX_ROWS, OTHER
from quota.rules.spent import ChargedSum, Sums, others


def test_the_largest_count_of_each_name_is_shown_until_its_period_ends() -> None:
    def heard(ms: int, units: int, until_ms: int, name: str) -> Entry:
        return Entry((ms, 0), units, "units", "", "", "", f"o{ms}", "others", name, (0, until_ms))

    entries = [
        call(1, 100),
        heard(2, 900, 50, "usage"),
        heard(3, 950, 50, "usage"),
        heard(4, 900, 60, "usage"),
        heard(5, 7, 51, "proxy"),
    ]
    assert [(entry.of, entry.units) for entry in others(entries, 49)] == [("usage", 950), ("proxy", 7)]
    assert [(entry.of, entry.units) for entry in others(entries, 50)] == [("usage", 900), ("proxy", 7)]
    assert [(entry.of, entry.units) for entry in others(entries, 51)] == [("usage", 900)]
    assert list(others(entries, 60)) == []


def call(ms: int, units: int, job: str = "", key: str = "") -> Entry:
    return Entry((ms, 0), units, "units", "videos.list", job, "", key or f"key{ms}")


def corrected(ms: int, units: int, before_units: int) -> Entry:
    return call(ms, units)._replace(kind="correction", of="key1", at=(1, 0), before_units=before_units)


def test_a_call_counts_once_its_units_as_charged_and_each_correction_by_how_far_it_went() -> None:
    sums = Sums()
    for entry in (
        call(1, 5),
        call(2, 7, key="key1+1"),
        corrected(3, 0, 5),
        corrected(4, 4, 0),
        call(5, 9)._replace(kind="others"),
        call(6, 0)._replace(kind="marker"),
    ):
        sums.take(entry)
    assert sums.rows() == [ChargedSum("videos.list", "", charges=1, units=12, corrected_units=9)]
    assert sums.head == (6, 0)
    again = Sums.read(sums.text())
    assert (again.head, again.rows()) == (sums.head, sums.rows())


def test_rows_beyond_the_most_are_summed_together() -> None:
    sums = Sums()
    for ms in range(MAX_ROWS + 3):
        sums.take(call(ms, 1, job=f"job{ms}"))
    sums.take(call(MAX_ROWS + 3, 1, job="job0"))
    *rows, others = sums.rows()
    assert (len(rows), others) == (MAX_ROWS, ChargedSum(OTHER, OTHER, charges=3, units=3, corrected_units=0))
    assert rows[0].charges == 2


@pytest.mark.parametrize(
    "stored", ["", "x", "[]", "null", '["1-0", [["m", "", 1, 1]]]', '["1-0", [["m", "", -1, 1, 0]]]']
)
def test_unreadable_sums_begin_anew(stored: str) -> None:
    sums = Sums.read(stored)
    assert (sums.head, sums.rows()) == (START, [])
