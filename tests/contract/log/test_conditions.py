"""Entries are appended unless something that their author has not read might change what it decided."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from contract.log.logs import NOW_MS, add_many, added, ask, charge, correction, entries_of, marker, others
from quota.ledger.log import ANY, MAX_UNSEEN, Log, Room
from quota.terms.limits import Selector

if TYPE_CHECKING:
    from contract.log.logs import Place
    from quota.rules.entry import Entry

SEARCH = {"bucket": "searches", "method": "search.list", "job": "other"}
"""A charge that the limits of these tests do not count, unless they say so."""


def fits(log: Log, room: int, **fields: object) -> bool:
    """Whether somebody who has read nothing can append with this room. What was not appended is told in full."""
    stood = entries_of(log)
    reply = ask(log, charge(), room=room, **fields)
    assert list(reply.unseen) == stood
    assert len(entries_of(log)) == len(stood) + (reply.word == "APPENDED")
    assert reply.word in ("APPENDED", "AGAIN")
    return reply.word == "APPENDED"


def takes(log: Log, units: int, *rooms_of: Selector) -> None:
    """What is unread takes exactly so many units of a room: a unit less, and nothing is appended."""

    def asked(room: int) -> bool:
        return fits(log, 0 if rooms_of else room, rooms=[Room(selector, room) for selector in rooms_of])

    assert not asked(units - 1)
    assert asked(units)


# -- one room for all ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("units", "weight"),
    [
        ((5,), 5),
        ((5, 7), 12),
        ((0,), 1),  # a call without a cost is a call
        ((0, 0, 3), 5),
        ((10**15 - 1,), 10**15 - 1),
    ],
)
def test_each_unread_charge_takes_its_units_and_at_least_one(log: Log, units: tuple[int, ...], weight: int) -> None:
    added(log, *[charge(each) for each in units])
    takes(log, weight)


def test_with_nothing_unread_no_room_is_needed(log: Log) -> None:
    (seen,) = added(log, charge(100))
    assert ask(log, charge(), seen=seen.id, room=0).word == "APPENDED"


@pytest.mark.parametrize(("before", "after", "weight"), [(100, 140, 40), (100, 100, 0), (100, 0, 0), (0, 1, 1)])
def test_an_unread_correction_takes_what_it_adds(log: Log, before: int, after: int, weight: int) -> None:
    (corrected,) = added(log, charge(before))
    added(log, correction(corrected, after))
    asked = {"seen": corrected.id}
    if weight:
        assert ask(log, charge(), room=weight - 1, **asked).word == "AGAIN"
    assert ask(log, charge(), room=weight, **asked).word == "APPENDED"


def test_unread_units_of_others_take_all(log: Log) -> None:
    added(log, others(900), others(100))
    takes(log, 1_000)


def test_what_is_unread_of_several_kinds_takes_the_sum(log: Log) -> None:
    (corrected,) = added(log, charge(10))
    added(log, correction(corrected, 30), others(5), charge(0))
    takes(log, 10 + 20 + 5 + 1)


def test_an_unread_marker_leaves_no_room(log: Log) -> None:
    """Some fact of the state has changed: the author reads it, and decides again."""
    added(log, marker())
    assert not fits(log, ANY - 1)
    assert fits(log, ANY)


def test_an_unread_entry_that_nobody_can_read_leaves_no_room_and_fails_nobody(log: Log, place: Place) -> None:
    first, spoilt, last = added(log, charge(), charge(), charge())
    place.spoil(log, spoilt.id)
    unseen = list(ask(log).unseen)
    assert [entry.id for entry in unseen] == [first.id, spoilt.id, last.id]
    assert [entry.kind for entry in unseen] == ["charge", "unreadable", "charge"]
    assert not fits(log, ANY - 1)
    assert fits(log, ANY)


def test_more_unread_entries_than_an_answer_carries_leave_no_room_at_all(log: Log) -> None:
    """What lies behind the page may be a correction of the same charge, or the first try of this one."""
    add_many(log, MAX_UNSEEN)
    assert ask(log, charge(), room=MAX_UNSEEN - 1).word == "AGAIN"
    assert ask(log, charge(), room=MAX_UNSEEN).word == "APPENDED"
    for room in (ANY - 1, ANY):
        assert ask(log, charge(), room=room).word == "AGAIN"
    assert len(entries_of(log)) == MAX_UNSEEN + 1


def test_several_entries_are_appended_together_or_not_at_all(log: Log) -> None:
    added(log, charge(5))
    assert ask(log, charge(1), charge(1), room=4).word == "AGAIN"
    assert len(entries_of(log)) == 1
    assert ask(log, charge(1), charge(1), room=5).word == "APPENDED"
    assert len(entries_of(log)) == 3


# -- a room for each limit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "selector",
    [
        Selector(),
        Selector(("units",)),
        Selector(("searches", "units")),
        Selector(methods=("videos.list",)),
        Selector(jobs=("job",)),
        Selector(("units",), ("videos.list",), ("job",)),
    ],
    ids=str,
)
def test_what_a_limit_counts_takes_its_room(log: Log, selector: Selector) -> None:
    added(log, charge(5))
    takes(log, 5, selector)


@pytest.mark.parametrize(
    "selector",
    [
        Selector(("searches",)),
        Selector(methods=("search.list",)),
        Selector(jobs=("other",)),
        Selector(("units",), ("videos.list",), ("other",)),
    ],
    ids=str,
)
def test_what_a_limit_does_not_count_takes_none(log: Log, selector: Selector) -> None:
    (counted,) = added(log, charge(5))
    added(log, correction(counted, 9))
    assert fits(log, 0, rooms=[Room(selector, 0)])


def test_a_limit_with_a_room_counts_only_what_it_selects(log: Log) -> None:
    (corrected,) = added(log, charge(3))
    added(log, charge(4), charge(100, **SEARCH), correction(corrected, 5), charge(0))
    takes(log, 3 + 4 + 2 + 1, Selector(("units",)))


def test_units_of_others_are_counted_by_their_bucket_alone(log: Log) -> None:
    added(log, others(7))
    takes(log, 7, Selector(("units",), ("videos.list",), ("job",)))
    assert fits(log, 0, rooms=[Room(Selector(("searches",)), 1)])


def test_a_limit_of_calls_counts_what_others_used_in_full(log: Log) -> None:
    """Nobody says how many calls these were."""
    added(log, others(7))
    takes(log, 7, Selector(count="calls"))


def test_a_limit_of_calls_counts_each_charge_as_one(log: Log) -> None:
    corrected, refunded, _ = added(log, charge(0), charge(9), charge(100))
    added(log, correction(corrected, 8))  # a call that was refunded counts again
    added(log, correction(refunded, 0))
    takes(log, 3 + 1, Selector(count="calls"))


def test_one_limit_without_room_is_enough(log: Log) -> None:
    added(log, charge(5))
    roomy = Room(Selector(), 100)
    assert not fits(log, 0, rooms=[roomy, Room(Selector(jobs=("job",)), 4)])
    assert not fits(log, 0, rooms=[Room(Selector(jobs=("job",)), 4), roomy])
    assert fits(log, 0, rooms=[roomy, Room(Selector(jobs=("job",)), 5), Room(Selector(("searches",)), 0)])


@pytest.mark.parametrize("readable", [True, False])
def test_a_marker_and_what_nobody_can_read_leave_no_room_to_any_limit(log: Log, place: Place, readable: bool) -> None:
    (entry,) = added(log, marker() if readable else charge())
    if not readable:
        place.spoil(log, entry.id)
    assert not fits(log, 0, rooms=[Room(Selector(("searches",)), ANY)])


# -- who has decided already -----------------------------------------------------------------------------------------


def unread(log: Log) -> list[Entry]:
    (corrected,) = added(log, charge(100))
    return [corrected, *added(log, marker(), others(10**9), correction(corrected, 10**9), charge(10**9))]


def test_who_needs_no_room_appends_whatever_is_unread(log: Log) -> None:
    unread(log)
    assert fits(log, ANY)


def test_an_unread_correction_of_another_charge_stops_no_correction(log: Log) -> None:
    corrected, other = added(log, charge(100), charge(100))
    added(log, correction(corrected, 50), marker())
    assert ask(log, correction(other, 50), seen=other.id, room=ANY).word == "APPENDED"


@pytest.mark.parametrize("room", [10**6, ANY])
@pytest.mark.parametrize("units", [0, 50, 100])
def test_an_unread_correction_of_the_same_charge_stops_a_correction(log: Log, room: int, units: int) -> None:
    """Its author says what the charge counted before, and has to read that first."""
    (corrected,) = added(log, charge(100))
    (first,) = added(log, correction(corrected, units))
    late = correction(corrected, 30)
    reply = ask(log, charge(), late, seen=corrected.id, room=room)
    assert (reply.word, list(reply.unseen)) == ("AGAIN", [first])
    assert log.corrections("p", [corrected.key])[corrected.key] == (units, first.id)
    assert ask(log, late._replace(before_units=units), seen=first.id, room=room).word == "APPENDED"


def test_a_correction_that_its_author_has_read_stops_none(log: Log) -> None:
    (corrected,) = added(log, charge(100))
    (first,) = added(log, correction(corrected, 50))
    added(log, charge())
    assert ask(log, correction(corrected, 30, before_units=50), seen=first.id, room=ANY).word == "APPENDED"


def test_who_needs_no_room_still_needs_a_clock(log: Log) -> None:
    assert ask(log, charge(), room=ANY, now_ms=NOW_MS + 1).word == "CLOCK"
