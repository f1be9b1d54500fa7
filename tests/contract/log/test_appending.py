"""Entries get ids that follow each other, at the ledger's clock; whoever asks is shown what it has not read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from contract.log.logs import (
    NOW_MS,
    Clock,
    P,
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
from quota.ledger.log import ANY, MAX_ENTRIES, MAX_UNSEEN, Append, Log
from quota.rules.entry import END, START

if TYPE_CHECKING:
    from contract.log.logs import Place

LONGEST = "x" * 200


def test_an_empty_log_has_no_epoch_no_entries_and_no_project(log: Log) -> None:
    reply = ask(log)
    assert (reply.word, reply.clock_ms, reply.epoch, list(reply.unseen), reply.whole) == ("READ", NOW_MS, "", [], True)
    beginning = log.begin(P)
    assert (beginning.epoch, beginning.tip, beginning.trimmed) == ("", START, START)
    assert list(log.projects()) == []


def test_the_first_entry_gives_an_empty_log_its_epoch(log: Log) -> None:
    reply = ask(log, charge(), new_epoch="first")
    assert (reply.word, reply.epoch) == ("APPENDED", "first")
    assert log.begin(P).epoch == "first"
    assert list(log.projects()) == [P]


def test_a_later_entry_leaves_the_epoch_as_it_is(log: Log) -> None:
    seen = add(log, charge())
    assert ask(log, charge(), seen=seen, new_epoch="other").epoch == "first"


def test_entries_of_every_kind_are_read_as_they_were_appended(log: Log) -> None:
    (first,) = added(log, charge(100))
    entries = [
        correction(first, 40),
        others(900, region="calls", method="86400000"),
        marker(),
        charge(0),
        charge(5, bucket="", method="", job="", region=""),
        charge(10**15 - 1, method=LONGEST, job="Überjob 測試", region="-"),
    ]
    stored = added(log, *entries)
    assert entries_of(log) == [first, *stored]
    assert list(ask(log).unseen) == [first, *stored]


def test_each_project_has_a_log_of_its_own(log: Log) -> None:
    add(log, charge(), project="b")
    add(log, charge(), project="a")
    assert list(log.projects()) == ["a", "b"]
    assert entries_of(log) == []
    assert ask(log).word == "READ"


# -- ids -----------------------------------------------------------------------------------------------------------


def test_the_first_entry_of_a_millisecond_has_the_number_that_its_author_sent(log: Log, clock: Clock) -> None:
    reply = ask(log, charge(), seq=2**40 - 1)
    assert reply.id == (NOW_MS, 2**40 - 1)
    clock.now_ms += 1
    assert ask(log, charge(), seen=reply.id, seq=5).id == (NOW_MS + 1, 5)


def test_entries_of_one_append_follow_each_other_in_one_millisecond(log: Log) -> None:
    entries = [charge(n) for n in range(1, 4)]
    assert ask(log, *entries, seq=10).id == (NOW_MS, 10)
    assert [entry.id for entry in entries_of(log)] == [(NOW_MS, 10), (NOW_MS, 11), (NOW_MS, 12)]
    assert [entry.key for entry in entries_of(log)] == [entry.key for entry in entries]


def test_entries_of_the_same_millisecond_follow_the_newest_whatever_number_is_sent(log: Log) -> None:
    seen = ask(log, charge(), seq=10).id
    assert ask(log, charge(), seen=seen, seq=3).id == (NOW_MS, 11)
    assert ask(log, charge(), seen=(NOW_MS, 11), seq=900).id == (NOW_MS, 12)


def test_while_the_clock_is_behind_the_newest_entry_the_time_stands_still(log: Log, clock: Clock) -> None:
    seen = ask(log, charge(), seq=10).id
    clock.now_ms -= 5_000
    reply = ask(log, charge(), seen=seen, seq=3)
    assert (reply.id, reply.clock_ms) == ((NOW_MS, 11), NOW_MS - 5_000)


def test_as_many_entries_as_may_come_at_once_are_appended(log: Log) -> None:
    entries = [charge() for _ in range(MAX_ENTRIES)]
    ask(log, *entries)
    assert [entry.key for entry in entries_of(log)] == [entry.key for entry in entries]


# -- clocks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now_ms", "latest_ms", "word"),
    [
        (NOW_MS, NOW_MS, "APPENDED"),
        (NOW_MS + 1, NOW_MS + 9, "CLOCK"),  # the author's time is not there yet
        (0, NOW_MS - 1, "CLOCK"),  # the author does not believe that it is so late
    ],
)
def test_a_clock_that_the_author_does_not_accept_appends_nothing(
    log: Log, now_ms: int, latest_ms: int, word: str
) -> None:
    reply = ask(log, charge(), now_ms=now_ms, latest_ms=latest_ms)
    assert (reply.word, reply.clock_ms) == (word, NOW_MS)
    assert len(entries_of(log)) == (word == "APPENDED")
    assert log.begin(P).epoch == ("first" if word == "APPENDED" else "")


def test_a_wrong_clock_is_told_with_what_is_unread(log: Log) -> None:
    (first,) = added(log, charge())
    reply = ask(log, charge(), now_ms=NOW_MS + 1, room=9)
    assert (reply.word, list(reply.unseen), reply.whole) == ("CLOCK", [first], True)


def test_who_only_reads_is_asked_for_no_time(log: Log) -> None:
    assert ask(log, now_ms=NOW_MS + 1, latest_ms=0).word == "READ"


def test_a_simulation_brings_its_own_clock(log: Log) -> None:
    reply = ask(log, charge(), clock_ms=50_000, now_ms=50_000, seq=4)
    assert (reply.word, reply.clock_ms, reply.id) == ("APPENDED", 50_000, (50_000, 4))
    assert ask(log, clock_ms=60_000).clock_ms == 60_000


def test_without_a_clock_of_the_test_it_is_that_of_the_host_or_the_server(place: Place) -> None:
    log = place.open()
    before_ms = log.now_ms()
    reply = ask(log, charge())
    assert before_ms <= reply.clock_ms <= log.now_ms()
    assert entries_of(log)[0].id[0] == reply.clock_ms


# -- what is unread ------------------------------------------------------------------------------------------------


def test_a_reader_is_shown_what_lies_behind_the_entry_that_it_names(log: Log) -> None:
    entries = added(log, *[charge() for _ in range(5)])
    reply = ask(log, seen=entries[1].id)
    assert (reply.word, list(reply.unseen), reply.whole, reply.id) == ("READ", entries[2:], True, None)
    assert list(ask(log, seen=entries[-1].id).unseen) == []


def test_what_was_appended_now_is_not_among_the_unread(log: Log) -> None:
    (first,) = added(log, charge())
    reply = ask(log, charge(), room=1)
    assert (reply.word, list(reply.unseen)) == ("APPENDED", [first])


@pytest.mark.parametrize("more", [0, 1])
def test_an_answer_carries_500_entries_and_says_whether_that_is_all(log: Log, more: int) -> None:
    (first,) = added(log, charge())
    entries = add_many(log, MAX_UNSEEN + more)
    for seen in (first.id, START):
        expected = entries if seen == first.id else [first, *entries]
        reply = ask(log, seen=seen)
        assert list(reply.unseen) == expected[:MAX_UNSEEN]
        assert reply.whole == (len(expected) <= MAX_UNSEEN)


def test_reading_on_from_page_to_page_shows_everything_once(log: Log) -> None:
    entries, shown, seen = add_many(log, 2 * MAX_UNSEEN + 7), [], START
    while True:
        reply = ask(log, seen=seen)
        shown += reply.unseen
        if reply.whole:
            break
        seen = reply.unseen[-1].id
    assert shown == entries


# -- again ---------------------------------------------------------------------------------------------------------


def test_a_retry_is_told_the_id_of_the_first_try_and_appends_nothing(log: Log) -> None:
    (before,) = added(log, charge())
    tried = [charge(7), charge(8)]
    first = ask(log, *tried, seen=before.id)
    (later,) = added(log, charge(9))
    again = ask(log, *tried, seen=before.id, room=0)
    assert (again.word, again.id) == ("APPENDED", first.id)
    assert [entry.key for entry in again.unseen] == [tried[0].key, tried[1].key, later.key]
    assert len(entries_of(log)) == 4


@pytest.mark.parametrize("fields", [{"now_ms": NOW_MS + 1}, {"latest_ms": 0}, {"room": 0}])
def test_a_retry_is_told_so_whatever_else_would_stop_it(log: Log, fields: dict[str, int]) -> None:
    tried = charge(7)
    first = ask(log, tried).id
    added(log, marker())
    assert ask(log, tried, **fields)[::5] == ("APPENDED", first)


def test_a_retry_of_a_correction_is_told_so_too(log: Log) -> None:
    (corrected,) = added(log, charge(100))
    tried = correction(corrected, 40)
    first = ask(log, tried, seen=corrected.id, room=ANY).id
    assert ask(log, tried, seen=corrected.id, room=ANY)[::5] == ("APPENDED", first)
    assert len(entries_of(log)) == 2


@pytest.mark.parametrize("room", [0, ANY])
def test_a_retry_whose_first_try_lies_beyond_the_page_is_not_appended_twice(log: Log, room: int) -> None:
    add_many(log, MAX_UNSEEN)
    tried = charge()
    first = add(log, tried)
    reply = ask(log, tried, room=room)
    assert (reply.word, reply.whole) == ("AGAIN", False)
    reply = ask(log, tried, room=room, seen=reply.unseen[-1].id)
    assert (reply.word, reply.id) == ("APPENDED", first)
    assert sum(entry.key == tried.key for entry in entries_of(log)) == 1


def test_the_first_charge_of_two_authors_who_read_an_empty_log_is_one_of_them(log: Log) -> None:
    """Whoever is second learns the epoch that the first one gave the log, and decides again."""
    assert log.append(P, Append("", START, [charge()], new_epoch="one")).word == "APPENDED"
    reply = log.append(P, Append("", START, [charge()], room=0, new_epoch="two"))
    assert (reply.word, reply.epoch, len(reply.unseen)) == ("AGAIN", "one", 1)
    assert len(log.read(P, START, END, 10)) == 1


def test_who_has_read_an_empty_log_decides_again_once_somebody_has_begun_it(log: Log) -> None:
    """Even one who needs no room: an empty log that has begun may be what a loss has left."""
    (first,) = added(log, charge())
    reply = ask(log, charge(), epoch="", room=ANY)
    assert (reply.word, reply.epoch, list(reply.unseen)) == ("AGAIN", "first", [first])
    assert ask(log, charge(), epoch=reply.epoch, seen=first.id, room=0).word == "APPENDED"
