"""Entries get ids that follow each other, at the ledger's clock; whoever asks is shown what it has not read."""

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
    marker,
    others,
)
from quota.ledger.log import ANY, MAX_SKIP, MAX_UNSEEN, Log, Room
from quota.rules.entry import START
from quota.terms.limits import Selector


def test_an_empty_log_has_nothing_and_its_first_entry_gives_it_an_epoch(log: Log) -> None:
    reply = ask(log)
    assert (reply.word, reply.clock_ms, reply.epoch, list(reply.unseen), reply.whole) == ("READ", NOW_MS, "", [], True)
    beginning = log.begin(P)
    assert (beginning.epoch, beginning.tip, beginning.trimmed) == ("", START, START)
    assert list(log.projects()) == []
    reply = ask(log, charge(), new_epoch="first")
    assert (reply.word, reply.epoch) == ("APPENDED", "first")
    assert ask(log, charge(), seen=reply.id, new_epoch="other").epoch == log.begin(P).epoch == "first"
    assert list(log.projects()) == [P]


def test_entries_of_every_kind_are_read_as_they_were_appended(log: Log) -> None:
    (first,) = added(log, charge(100))
    entries = [
        correction(first, 40),
        others(900, region="calls", method="86400000"),
        marker(),
        charge(0),
        charge(5, bucket="", method="", job="", region=""),
        charge(10**15 - 1, method="x" * 200, job="Überjob 測試", region="-"),
    ]
    stored = added(log, *entries)
    assert entries_of(log) == [first, *stored]
    assert list(ask(log).unseen) == [first, *stored]


def test_an_entry_has_its_authors_number_or_follows_the_newest_of_its_millisecond(log: Log, clock: Clock) -> None:
    """It skips numbers, so two histories of a log seldom have one id."""
    assert ask(log, charge(), seq=10).id == (NOW_MS, 10)
    assert ask(log, charge(), charge(), seen=(NOW_MS, 10), seq=3).id == (NOW_MS, 14)
    assert ask(log, charge(), seen=(NOW_MS, 15), seq=900 + 5 * MAX_SKIP).id == (NOW_MS, 916)
    clock.now_ms += 1
    assert ask(log, charge(), seen=(NOW_MS, 916), seq=2**40 - 1).id == (NOW_MS + 1, 2**40 - 1)


@pytest.mark.parametrize(
    ("now_ms", "latest_ms", "word"),
    [
        (NOW_MS, NOW_MS, "APPENDED"),
        (NOW_MS + 1, NOW_MS + 9, "CLOCK"),  # the author's time is not there yet
        (0, NOW_MS - 1, "CLOCK"),  # the author does not believe that it is so late
    ],
)
def test_a_clock_that_its_author_rejects_appends_nothing(log: Log, now_ms: int, latest_ms: int, word: str) -> None:
    reply = ask(log, charge(), now_ms=now_ms, latest_ms=latest_ms)
    assert (reply.word, reply.clock_ms) == (word, NOW_MS)
    assert len(entries_of(log)) == (word == "APPENDED")
    assert log.begin(P).epoch == ("first" if word == "APPENDED" else "")


def test_the_log_uses_the_clock_of_the_host_or_the_server(place: Place) -> None:
    log = place.open()
    before_ms = log.now_ms()
    reply = ask(log, charge())
    assert before_ms <= reply.clock_ms <= log.now_ms()
    assert entries_of(log)[0].id[0] == reply.clock_ms


@pytest.mark.parametrize("more", [0, 1])
def test_an_answer_carries_500_entries_and_a_mark_if_more_follow(log: Log, more: int) -> None:
    (first,) = added(log, charge())
    entries = add_many(log, MAX_UNSEEN + more)
    for seen in (first.id, START):
        expected = entries if seen == first.id else [first, *entries]
        reply = ask(log, seen=seen)
        assert list(reply.unseen) == expected[:MAX_UNSEEN]
        assert reply.whole == (len(expected) <= MAX_UNSEEN)


def test_a_retry_gets_the_id_of_the_first_try_and_appends_nothing(log: Log) -> None:
    (before,) = added(log, charge())
    tried = [charge(7), charge(8)]
    first = ask(log, *tried, seen=before.id)
    (later,) = added(log, charge(9))
    again = ask(log, *tried, seen=before.id, room=0)
    assert (again.word, again.id) == ("APPENDED", first.id)
    assert [entry.key for entry in again.unseen] == [tried[0].key, tried[1].key, later.key]
    assert len(entries_of(log)) == 4


@pytest.mark.parametrize("fields", [{"now_ms": NOW_MS + 1}, {"latest_ms": 0}, {"room": 0}])
def test_a_retry_gets_the_first_id_even_if_something_else_would_stop_it(log: Log, fields: dict[str, int]) -> None:
    tried = charge(7)
    first = ask(log, tried).id
    added(log, marker())
    assert ask(log, tried, **fields)[::5] == ("APPENDED", first)


@pytest.mark.parametrize("room", [0, ANY])
def test_a_retry_appends_nothing_if_its_first_try_is_beyond_the_page(log: Log, room: int) -> None:
    add_many(log, MAX_UNSEEN)
    tried = charge()
    first = add(log, tried)
    reply = ask(log, tried, room=room)
    assert (reply.word, reply.whole) == ("AGAIN", False)
    reply = ask(log, tried, room=room, seen=reply.unseen[-1].id)
    assert (reply.word, reply.id) == ("APPENDED", first)
    assert sum(entry.key == tried.key for entry in entries_of(log)) == 1


def test_a_reader_of_an_empty_log_decides_again_after_the_first_entry(log: Log) -> None:
    """Even a reader that needs no room: a log that has just begun may be the rest after a loss."""
    (first,) = added(log, charge())
    reply = ask(log, charge(), epoch="", room=ANY)
    assert (reply.word, reply.epoch, list(reply.unseen)) == ("AGAIN", "first", [first])
    assert ask(log, charge(), epoch=reply.epoch, seen=first.id, room=0).word == "APPENDED"


UNCOUNTED = Room(Selector(("elsewhere",)), ANY)
"""A limit that counts no charge of these tests, with all room."""


def fits(log: Log, room: int, **fields: object) -> bool:
    """Whether an author who has read nothing can append with this room. The answer has all unread entries."""
    stood = entries_of(log)
    reply = ask(log, charge(), room=room, **fields)
    assert list(reply.unseen) == stood
    assert len(entries_of(log)) == len(stood) + (reply.word == "APPENDED")
    assert reply.word in ("APPENDED", "AGAIN")
    return reply.word == "APPENDED"


def takes(log: Log, units: int, *rooms_of: Selector) -> None:
    """The unread entries take exactly so many units of a room: with a unit less, nothing is appended."""

    def asked(room: int) -> bool:
        return fits(log, 0 if rooms_of else room, rooms=[Room(selector, room) for selector in rooms_of])

    assert not asked(units - 1)
    assert asked(units)


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


@pytest.mark.parametrize(("before", "after", "weight"), [(100, 140, 40), (100, 100, 0), (100, 0, 0), (0, 1, 1)])
def test_an_unread_correction_takes_what_it_adds(log: Log, before: int, after: int, weight: int) -> None:
    (corrected,) = added(log, charge(before))
    added(log, correction(corrected, after))
    asked = {"seen": corrected.id}
    if weight:
        assert ask(log, charge(), room=weight - 1, **asked).word == "AGAIN"
    assert ask(log, charge(), room=weight, **asked).word == "APPENDED"


@pytest.mark.parametrize("kind", ["unreadable", "marker"])
def test_a_marker_or_an_unreadable_entry_leaves_no_room_and_raises_nothing(log: Log, place: Place, kind: str) -> None:
    first, second, last = added(log, charge(), marker() if kind == "marker" else charge(), charge())
    if kind == "unreadable":
        place.spoil(second.id)
    unseen = [(entry.id, entry.kind) for entry in ask(log).unseen]
    assert unseen == [(first.id, "charge"), (second.id, kind), (last.id, "charge")]
    assert not fits(log, ANY - 1)
    assert not fits(log, 0, rooms=[UNCOUNTED])
    assert fits(log, ANY)


def test_more_unread_entries_than_an_answer_carries_leave_no_room_at_all(log: Log) -> None:
    """Behind the page may be a correction of the same charge, or the first try of this one."""
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


@pytest.mark.parametrize(
    ("selector", "counts"),
    [
        (Selector(), True),
        (Selector(("searches", "units")), True),
        (Selector(("units",), ("videos.list",), ("job",)), True),
        (Selector(("searches",)), False),
        (Selector(methods=("search.list",)), False),
        (Selector(("units",), ("videos.list",), ("other",)), False),
    ],
    ids=str,
)
def test_only_entries_that_a_limit_counts_take_its_room(log: Log, selector: Selector, counts: bool) -> None:
    (counted,) = added(log, charge(5))
    added(log, correction(counted, 9))
    if counts:
        takes(log, 9, selector)
    else:
        assert fits(log, 0, rooms=[Room(selector, 0)])


def test_only_the_bucket_decides_whether_units_of_others_count(log: Log) -> None:
    added(log, others(7))
    takes(log, 7, Selector(("units",), ("videos.list",), ("job",)))
    takes(log, 7 + 1, Selector(count="calls"))  # nobody says how many calls others made
    assert fits(log, 0, rooms=[Room(Selector(("searches",)), 1)])
    takes(log, 7 + 3)


def test_a_limit_of_calls_counts_one_call_per_charge(log: Log) -> None:
    corrected, refunded, _ = added(log, charge(0), charge(9), charge(100))
    added(log, correction(corrected, 8))  # a call that was refunded counts again
    added(log, correction(refunded, 0))
    takes(log, 3 + 1, Selector(count="calls"))


def test_a_single_limit_without_room_stops_the_append(log: Log) -> None:
    added(log, charge(5))
    roomy = Room(Selector(), 100)
    assert not fits(log, 0, rooms=[roomy, Room(Selector(jobs=("job",)), 4)])
    assert not fits(log, 0, rooms=[Room(Selector(jobs=("job",)), 4), roomy])
    assert fits(log, 0, rooms=[roomy, Room(Selector(jobs=("job",)), 5), Room(Selector(("searches",)), 0)])


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
