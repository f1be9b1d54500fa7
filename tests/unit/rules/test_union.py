"""What two histories of one log have together: each entry once, under its key, in one order."""

from __future__ import annotations

import pytest

from quota.rules.entry import START, Entry
from quota.rules.spent import spent
from quota.rules.union import MAX_AHEAD_MS, missing, union
from quota.terms.limits import DAY_MS

NOW_MS = 1_795_867_200_000


def charge(ms: int, units: int = 1, *, key: str = "", seq: int = 0) -> Entry:
    return Entry((NOW_MS + ms, seq), units, "units", "list", "job", "DE", key or f"key{ms}-{seq}")


def correction(of: Entry, units: int, ms: int, *, before_units: int | None = None, key: str = "") -> Entry:
    return of._replace(
        id=(NOW_MS + ms, 0),
        units=units,
        key=key or f"key{ms}-0",
        kind="correction",
        of=of.key,
        at=of.id,
        before_units=of.units if before_units is None else before_units,
    )


def test_missing_entries_are_known_by_key_and_named_once_and_are_neither_trimmed_nor_old() -> None:
    elsewhere = charge(5, key="moved")
    log = [charge(1), elsewhere]
    journal = [charge(1), charge(2), charge(9, key="moved"), charge(2), charge(3, key="key2-0")]
    assert missing(log, journal, START, 0) == [charge(2)]
    journal = [charge(1, seq=4), charge(1, seq=5), charge(1, seq=6), charge(2)]
    assert missing([], journal, (NOW_MS + 1, 5), 0) == journal[2:]
    assert missing([], journal, START, NOW_MS + 2) == journal[3:]


def test_the_logs_entry_keeps_its_id_and_the_journals_moves_up() -> None:
    log, lost = [charge(1, seq=7, key="log"), charge(1, seq=8, key="next")], [charge(1, seq=7, key="lost")]
    placed = union(log, lost, NOW_MS)
    assert [(entry.key, entry.id[1]) for entry in placed] == [("log", 7), ("lost", 8), ("next", 9)]


@pytest.mark.parametrize(("ahead_ms", "dated_ms"), [(MAX_AHEAD_MS, MAX_AHEAD_MS), (MAX_AHEAD_MS + 1, 0)])
def test_an_entry_more_than_an_hour_ahead_is_dated_by_the_clock(ahead_ms: int, dated_ms: int) -> None:
    (placed,) = union([], [charge(ahead_ms, seq=3)], NOW_MS)
    assert placed.id == (NOW_MS + dated_ms, 3)


def test_an_entry_that_is_dated_anew_keeps_its_order_and_its_corrections() -> None:
    ahead = charge(DAY_MS, 100)
    placed = union([charge(5), ahead, correction(ahead, 40, DAY_MS + 1)], [correction(ahead, 30, 6)], NOW_MS)
    assert [entry.id for entry in placed] == [(NOW_MS + ms, n) for ms in (5, 6) for n in (0, 1)]
    assert [(entry.at, entry.units) for entry in placed[2:]] == [(placed[1].id, 30), (placed[1].id, 40)]


def test_unreadable_entries_are_left_out() -> None:
    unreadable = Entry((NOW_MS, 0), 0, "", "", "", "", "", "unreadable")
    assert union([unreadable, charge(1)], [unreadable, charge(2)], NOW_MS) == [charge(1), charge(2)]


def test_the_latest_correction_of_two_branches_wins() -> None:
    of = charge(1, 100)
    log = [of, correction(of, 40, 3), correction(of, 45, 5, before_units=40)]
    lost = [correction(of, 90, 2), correction(of, 70, 4, before_units=90)]
    placed = union(log, lost, NOW_MS)
    assert [(entry.before_units, entry.units) for entry in placed[1:]] == [(100, 90), (90, 40), (40, 70), (70, 45)]
    assert [(row.charged_units, row.units) for row in spent(placed)] == [(100, 45)]


def test_a_charge_that_several_corrections_bring_back_counts_what_the_first_of_them_began_with() -> None:
    of = charge(1, 100)
    later = correction(of, 70, 4, before_units=40)
    assert union([later], [correction(of, 40, 3)], NOW_MS) == [of, correction(of, 40, 3), later]


def test_a_correction_whose_charge_was_trimmed_brings_nothing_back() -> None:
    corrects = correction(charge(1, 100), 40, 3)
    assert union([corrects], [], NOW_MS, (NOW_MS + 1, 0)) == [corrects]


def test_a_correction_points_at_the_place_where_its_charge_stands_now() -> None:
    of = charge(1, 100, key="lost")
    placed = union([charge(1, key="log")], [of, correction(of, 40, 3)], NOW_MS)
    assert [(entry.key, entry.at) for entry in placed] == [("log", START), ("lost", START), ("key3-0", (NOW_MS + 1, 1))]
