"""What has left every window leaves the log for the past, which no decision reads."""

from __future__ import annotations

import pytest

from contract.log.logs import (
    NOW_MS,
    Clock,
    P,
    Place,
    add,
    add_many,
    added,
    ask,
    charge,
    correction,
    entries_of,
    fence,
    marker,
    others,
    past_of,
)
from quota.deciding.fence import Fence
from quota.deciding.moves import Step, carry_out
from quota.ledger import sqlite_log
from quota.ledger.factory import open_ledger
from quota.ledger.log import MAX_READ, PAST_MS, Log, all_entries
from quota.rules.entry import Entry
from quota.rules.spent import spent
from quota.terms.limits import DAY_MS


def test_entries_dated_before_a_time_move_to_the_past_in_order(log: Log, clock: Clock) -> None:
    old = added(log, charge(), others(5), marker())
    clock.now_ms += 10
    new = added(log, charge())
    assert log.trim(P, NOW_MS) == 0
    assert log.trim(P, NOW_MS + 10) == 3
    assert (past_of(log), entries_of(log)) == (old, new)
    assert log.begin(P).trimmed == old[-1].id
    assert log.trim(P, NOW_MS + 10) == 0
    assert log.begin(P).trimmed == old[-1].id


def test_reports_read_the_past_of_a_log_whose_state_was_lost(place: Place, clock: Clock) -> None:
    old = added(log := place.open(clock), charge(), charge())
    clock.now_ms += 10
    new = added(log, charge())
    log.trim(P, clock.now_ms)
    place.lose("state")
    assert [*all_entries(log, P)] == [*old, *new]


def test_reports_read_a_log_without_a_past_once(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    entries, read, counts = added(log, charge(), charge()), log.read, list[int]()
    monkeypatch.setattr(log, "read", lambda *wanted: counts.append(wanted[-1]) or read(*wanted))
    assert [*all_entries(log, P)] == entries
    assert counts.count(MAX_READ) == 1


def test_a_trim_moves_a_bounded_number_the_oldest_first(log: Log) -> None:
    entries = added(log, *[charge() for _ in range(5)])
    assert log.trim(P, NOW_MS + 1, 2) == 2
    assert (past_of(log), entries_of(log)) == (entries[:2], entries[2:])
    assert log.begin(P).trimmed == entries[1].id
    assert [log.trim(P, NOW_MS + 1, 2) for _ in range(2)] == [2, 1]
    assert past_of(log) == entries


def test_an_entry_of_the_past_is_as_it_was_and_its_correction_is_noted_until_it_leaves(log: Log, clock: Clock) -> None:
    corrected, kept = added(log, charge(100), charge(7))
    clock.now_ms += 10
    first, later = added(log, correction(corrected, 40), charge(1))
    assert log.trim(P, NOW_MS + 10) == 2
    assert past_of(log) == [corrected, kept]
    assert dict(log.corrections(P, [corrected.key, kept.key])) == {corrected.key: (40, first.id)}
    assert entries_of(log) == [first, later]


def test_corrections_leave_behind_their_charges(log: Log, clock: Clock) -> None:
    (corrected,) = added(log, charge(100))
    entries = added(log, correction(corrected, 40), correction(corrected, 60, before_units=40))
    assert log.trim(P, NOW_MS + 1) == 3
    assert [(entry.key, entry.units) for entry in past_of(log)] == [
        (corrected.key, 100),
        (entries[0].key, 40),
        (entries[1].key, 60),
    ]
    assert [each.units for each in spent(past_of(log))] == [60]
    assert dict(log.corrections(P, [corrected.key])) == {}


def test_an_entry_that_nobody_can_read_keeps_nothing_from_leaving(log: Log, place: Place) -> None:
    first, spoilt, last = added(log, charge(), charge(), charge())
    place.spoil(spoilt.id)
    assert log.trim(P, NOW_MS + 1) == 3
    assert [entry for entry in past_of(log) if entry.kind != "unreadable"] == [first, last]
    assert entries_of(log) == []


def test_a_fence_lets_no_call_leave(log: Log) -> None:
    """Its owner reads the log, and puts another in its place."""
    entries = added(log, charge())
    epoch = fence(log)
    assert log.trim(P, NOW_MS + 1) == 0
    assert (past_of(log), entries_of(log)) == ([], entries)
    assert log.replace(P, epoch, entries[-1].id, entries, "second")
    assert log.trim(P, NOW_MS + 1) == 1


def old(*days: int) -> list[Entry]:
    return [charge(id=(NOW_MS - day * DAY_MS, day)) for day in days]


def test_entries_that_a_machine_adds_are_in_the_past_in_order_and_once(log: Log) -> None:
    five, four, three, two = old(5, 4, 3, 2)
    log.add_past(P, [five, three])
    log.add_past(P, [four])
    assert past_of(log) == [five, four, three]
    log.add_past(P, [four, two, five])
    assert entries_of(log) == []
    first, second = added(log, charge(), charge())
    log.add_past(P, [first])
    assert log.trim(P, NOW_MS + 1) == 2
    for again in ([], [first, second]):
        log.add_past(P, again)
        assert past_of(log) == [five, four, three, two, first, second]


def test_the_past_ends_with_35_days(log: Log, clock: Clock) -> None:
    """Redis drops a hundred at a time."""
    entries = add_many(log, 300)
    clock.now_ms += PAST_MS
    later = add_many(log, 100)
    log.trim(P, clock.now_ms)
    assert past_of(log) == entries
    clock.now_ms += 1
    log.trim(P, clock.now_ms)
    left = past_of(log)
    assert left[-100:] == later
    assert len(left) - 100 < 100


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_the_past_has_a_bounded_number_of_entries(place: Place, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_log, "MAX_PAST", 3)
    log = place.open(clock)
    entries = added(log, *[charge() for _ in range(5)])
    log.trim(P, NOW_MS + 1)
    assert past_of(log) == entries[2:]
    held, db = [], log._file._db  # type: ignore[attr-defined]
    db.set_trace_callback(lambda text: "OFFSET" in text and held.append(db.in_transaction))
    log.add_past(P, old(2))
    assert past_of(log) == entries[2:]
    assert held == [False], "nobody waits for a walk through a long past"
    add(log, charge())


def test_a_past_that_another_move_brings_meanwhile_moves_too(
    log: Log, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    third, new = (open_ledger("memory:", clock=clock) for _ in range(2))
    take, (brought,) = Fence.take, added(third, charge())
    clock.now_ms += 9
    third.trim(P, clock.now_ms)
    assert ask(log, charge(), epoch="", new_epoch="theirs").word == "APPENDED"

    def late(fence: Fence) -> None:
        monkeypatch.undo()
        carry_out(third, log, Step(P, "move"), lambda *_: None)
        take(fence)

    monkeypatch.setattr(Fence, "take", late)
    carry_out(log, new, Step(P, "move"), lambda *_: None)
    assert brought in (*past_of(new), *entries_of(new))
