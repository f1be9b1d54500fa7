"""The running total of a limit: what leaves it, corrections, what only upstream counted, and what is kept."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from quota.rules.entry import CALLS, END, START, Entry, Id, others_units, read_id
from quota.rules.total import READ_LEAVING, RunningTotal, Wanted, total_of
from quota.terms.limits import DAY_MS, HOUR_MS, Calendar, Selector, Sliding, View, Window

MIDNIGHT = int(datetime(2026, 7, 1, tzinfo=UTC).timestamp()) * 1000
NOON = MIDNIGHT + 12 * HOUR_MS
UNITS = Selector(buckets=("units",))
DAY = View(UNITS, Sliding(DAY_MS))


def charge(ms: int, units: int = 1, *, key: str = "", bucket: str = "units", method: str = "list") -> Entry:
    return Entry((ms, 0), units, bucket, method, "job", "", key or f"key{ms}")


def correction(of: Entry, units: int, ms: int) -> Entry:
    return of._replace(
        id=(ms, 0), units=units, key=f"key{ms}", kind="correction", of=of.key, at=of.id, before_units=of.units
    )


def others(ms: int, units: int, until_ms: int, *, name: str = "usage", since_ms: int = 0, window: str = "") -> Entry:
    return Entry((ms, 0), units, "units", window, "", "", f"key{ms}", "others", name, (since_ms, until_ms))


def test_a_total_holds_few_charges_ready_to_leave_and_then_reads_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quota.rules.total.MAX_LEAVING", 2)
    monkeypatch.setattr("quota.rules.total.READ_LEAVING", 2)
    entries = [charge(NOON + n) for n in range(5)]
    total = total_of(DAY, entries, NOON + 5)
    assert [leaving.id for leaving in total.leaving] == [entries[0].id, entries[1].id]
    assert total.drop(NOON + DAY_MS) is None, "the next that leaves is there"
    wanted = total.drop(NOON + 1 + DAY_MS)
    assert wanted == Wanted(entries[1].id, entries[4].id, 2)
    assert total.used_units == 3
    total.take_leaving(wanted, entries[2:4], {entries[3].key: 0})
    assert [(leaving.id, leaving.cost) for leaving in total.leaving] == [(entries[2].id, 1), (entries[3].id, 0)]
    monkeypatch.setattr("quota.rules.total.READ_LEAVING", 1)
    assert total.wants_leaving() == Wanted(entries[3].id, entries[4].id, 2), "as many as it has found"


def test_units_of_others_leave_before_or_after_unread_charges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quota.rules.total.MAX_LEAVING", 2)
    entries = [charge(NOON + n) for n in range(5)]
    for until_ms, frees_at_ms in ((NOON + HOUR_MS, NOON + HOUR_MS), (NOON + DAY_MS + 3, None)):
        total = total_of(DAY, [*entries, others(NOON + 5, 900, until_ms)], NOON + 5)
        assert total.frees_at_ms(900) == frees_at_ms


def test_entries_read_for_another_state_of_the_total_change_nothing() -> None:
    """Another thread was quicker."""
    entries = [charge(NOON), charge(NOON + 1)]
    total = total_of(DAY, entries, NOON + 1)
    total.take_leaving(Wanted(START, entries[1].id, 200), entries, {})
    assert len(total.leaving) == 2


def test_a_correction_of_a_charge_that_was_trimmed_changes_nothing() -> None:
    trimmed, kept = charge(NOON, 100), charge(NOON + 1, 10)
    total = total_of(DAY, [kept, correction(trimmed, 0, NOON + 2)], NOON + 2, trimmed.id)
    assert total.used_units == 10


def test_a_correction_goes_by_what_its_charge_counts_here_whatever_its_author_thought(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = charge(NOON, 100)
    total = total_of(DAY, [first, correction(first._replace(units=500), 40, NOON + 1)], NOON + 1)
    assert total.used_units == 40
    monkeypatch.setattr("quota.rules.total.MAX_LEAVING", 1)
    entries = [charge(NOON - 1, 100), first, correction(first, 40, NOON + 1)]
    assert total_of(DAY, entries, NOON + 1).used_units == 140, "it also counts once if nobody holds its charge"


@pytest.mark.parametrize(
    ("window", "since_ms", "until_ms", "leaves_ms"),
    [
        # They leave with upstream's period,
        (Sliding(DAY_MS), 0, NOON + 5, NOON + 5),
        (Calendar("day", "UTC"), MIDNIGHT, MIDNIGHT + DAY_MS, MIDNIGHT + DAY_MS),
        # or with the calendar's own that upstream's began in,
        (Calendar("day", "UTC"), MIDNIGHT - 1, MIDNIGHT + DAY_MS, MIDNIGHT),
        (Sliding(DAY_MS), MIDNIGHT - 1, MIDNIGHT + DAY_MS, MIDNIGHT + DAY_MS),
        # and no later than a charge of now.
        (Sliding(DAY_MS), 0, NOON + 2 * DAY_MS, NOON + DAY_MS),
        (Calendar("day", "UTC"), 0, NOON + 2 * DAY_MS, MIDNIGHT + DAY_MS),
    ],
)
def test_units_of_others_leave_with_upstreams_period_and_no_later_than_a_charge(
    window: Window, since_ms: int, until_ms: int, leaves_ms: int
) -> None:
    heard = others(NOON, 900, until_ms, since_ms=since_ms)
    total = total_of(View(UNITS, window), [heard], NOON)
    assert [others_units(total.others_after(at_ms)) for at_ms in (leaves_ms - 1, leaves_ms)] == [900, 0]


def test_the_largest_count_of_a_name_counts_and_names_add_up() -> None:
    total = total_of(
        DAY,
        [
            others(NOON, 900, NOON + 50),
            others(NOON + 1, 700, NOON + 60),
            others(NOON + 2, 800, NOON + 50),
            others(NOON + 3, 10, NOON + 55, name="proxy"),
            charge(NOON + 4, 5),
        ],
        NOON + 4,
    )
    assert total.used_units == 915
    assert [total.used_after(NOON + after_ms) for after_ms in (49, 50, 55, 60)] == [915, 715, 705, 5]


@pytest.mark.parametrize(
    ("view", "window", "region", "counts"),
    [
        (DAY, "", "", True),
        (DAY, "²", "", True),
        (View(Selector(buckets=("search",)), Sliding(DAY_MS)), "", "", False),
        # A limit that selects methods or jobs counts less than the bucket.
        (View(Selector(methods=("list",)), Sliding(DAY_MS)), "", "", False),
        # A limit counts what upstream counted in a window as long as its own. A day may have 25 hours, or 24.
        (DAY, str(DAY_MS), "", True),
        (DAY, str(25 * HOUR_MS), "", True),
        (DAY, str(25 * HOUR_MS + 1), "", False),
        (DAY, str(HOUR_MS), "", False),
        (View(UNITS, Calendar("day", "UTC")), str(DAY_MS), "", True),
        (View(UNITS, Calendar("day", "UTC")), str(23 * HOUR_MS), "", False),
        # Units are no calls.
        (View(Selector(count="calls"), Sliding(DAY_MS)), str(DAY_MS), "", False),
        (View(Selector(count="calls"), Sliding(DAY_MS)), str(DAY_MS), CALLS, True),
    ],
)
def test_a_limit_counts_units_of_others_that_are_all_of_its_bucket_in_a_window_of_its_length(
    view: View, window: str, region: str, counts: bool
) -> None:
    heard = others(NOON, 900, NOON + 50, window=window)._replace(region=region)
    assert total_of(view, [heard], NOON).used_units == (900 if counts else 0)


def test_units_of_others_that_are_over_count_again_when_the_clock_goes_back_by_less_than_a_day() -> None:
    week = View(UNITS, Sliding(7 * DAY_MS))
    total = total_of(week, [others(NOON, 900, NOON + HOUR_MS)], NOON)
    for at_ms, units in ((NOON + HOUR_MS, 0), (NOON + DAY_MS, 0), (NOON + HOUR_MS - 1, 900)):
        assert (total.drop(at_ms), total.used_units) == (None, units)
    total.drop(NOON + 26 * HOUR_MS)
    assert total.others == {}, "they are forgotten some day"


KEPT = f"epoch 7 {NOON - DAY_MS}-4 {NOON}-1 {NOON} -"
TIP: Id = (NOON, 5)


@pytest.mark.parametrize(
    ("kept", "trimmed", "now_ms", "resumes"),
    [
        (KEPT, START, NOON, True),
        (KEPT.replace(" -", " 5:9:name:with:colons,6:9:other"), START, NOON, True),
        (KEPT.replace("epoch", "another"), START, NOON, False),
        # Its head is in the log and in the window.
        (KEPT.replace(f"{NOON}-1", f"{NOON}-5"), START, NOON, True),
        (KEPT.replace(f"{NOON}-1", f"{NOON}-6"), START, NOON, False),
        (KEPT, START, NOON + DAY_MS, False),
        # All that has yet to leave is in the log.
        (KEPT, (NOON - DAY_MS, 4), NOON, True),
        (KEPT, (NOON - DAY_MS, 5), NOON, False),
        # The clock has not gone back behind what left.
        (KEPT, START, NOON - 1, False),
        (KEPT.replace(f"{NOON - DAY_MS}-4", f"{NOON}-2"), START, NOON, False),
        ("", START, NOON, False),
        (KEPT.replace(" 7 ", " x "), START, NOON, False),
        (KEPT.replace(" -", " 5:9"), START, NOON, False),
    ],
)
def test_a_kept_total_is_taken_only_where_it_holds(kept: str, trimmed: Id, now_ms: int, resumes: bool) -> None:
    total = RunningTotal(DAY)
    assert total.resume(kept, "epoch", TIP, trimmed, now_ms) is resumes
    assert (total.charged, total.head) == ((7, read_id(kept.split()[3])) if resumes else (0, START))


def test_a_kept_total_reads_back_as_it_was() -> None:
    entries = [charge(NOON, 5), others(NOON + 1, 900, NOON + 50, name="a:b c"), charge(NOON + 2, 7)]
    total = total_of(DAY, entries, NOON + 2)
    again = RunningTotal(DAY)
    assert again.resume(total.kept("epoch"), "epoch", entries[-1].id, START, NOON + 2)
    assert (again.charged, again.gone, again.head, again.others) == (12, total.gone, total.head, total.others)
    assert again.kept("epoch") == total.kept("epoch")
    again.take_all((), END)
    assert again.wants_leaving() == Wanted(total.gone, END, READ_LEAVING), "the charges that it only counted"
    total.take_all((), END)
    assert total.wants_leaving() is None
