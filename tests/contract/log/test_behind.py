"""Nobody appends to another log than the one that they have read, or to one that has lost what they have seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from contract.log.logs import NOW_MS, Clock, P, add, added, ask, charge, entries_of, fence, marker
from quota.ledger.log import ANY, LEASE_MS, Append, Log, fence_is_over, is_fence
from quota.rules.entry import START, Id

if TYPE_CHECKING:
    from contract.log.logs import Place


def is_behind(log: Log, epoch: str, seen: Id = START, **fields: object) -> bool:
    """Whether an author who has read so far is behind, who appends as well as who only reads."""
    stood = entries_of(log)
    replies = [ask(log, *entries, epoch=epoch, seen=seen, room=ANY, **fields) for entries in ((), (charge(),))]
    words = [reply.word for reply in replies]
    if words != ["BEHIND", "BEHIND"]:
        assert words in (["READ", "APPENDED"], ["READ", "AGAIN"])
        return False
    for reply in replies:
        assert (list(reply.unseen), reply.id, reply.epoch) == ([], None, log.begin(P).epoch)
    assert entries_of(log) == stood
    return True


def test_a_reader_of_this_log_finds_it_whole(log: Log) -> None:
    assert not is_behind(log, "first", add(log, charge()))


def test_who_has_read_nothing_of_this_log_is_not_behind(log: Log) -> None:
    add(log, charge())
    assert not is_behind(log, "first")
    assert not is_behind(log, "")


def test_a_reader_of_another_log_finds_this_log_behind(log: Log) -> None:
    seen = add(log, charge())
    assert is_behind(log, "other")
    assert is_behind(log, "other", seen)


def test_who_has_read_a_log_that_was_emptied_is_behind(log: Log) -> None:
    assert is_behind(log, "first")
    assert is_behind(log, "first", (NOW_MS, 7))
    assert is_behind(log, "", (NOW_MS, 7))


@pytest.mark.parametrize("lacking", [(NOW_MS - 1, 7), (NOW_MS, 6), (NOW_MS, 8), (NOW_MS, 10), (NOW_MS + 1, 0)])
def test_a_log_that_lacks_what_its_author_has_seen_is_behind(log: Log, lacking: Id) -> None:
    ask(log, charge(), seq=7)
    ask(log, charge(), seen=(NOW_MS, 7), clock_ms=NOW_MS + 1, seq=10)
    assert not is_behind(log, "first", (NOW_MS, 7))
    assert is_behind(log, "first", lacking)


@pytest.mark.parametrize("lacking", [(NOW_MS, 6), (NOW_MS, 9), (NOW_MS, 11), (NOW_MS + 1, 0)])
def test_a_log_that_lacks_what_the_machine_of_its_author_has_seen_is_behind(log: Log, lacking: Id) -> None:
    ask(log, charge(), charge(), seq=7)
    assert is_behind(log, "first", (NOW_MS, 7), must=lacking)


def test_a_log_that_has_what_the_machine_has_seen_is_not_behind(log: Log) -> None:
    first, second, third = added(log, charge(), charge(), charge())
    for must in (first, second, third):
        assert not is_behind(log, "first", first.id, must=must.id)
    add_far = [charge() for _ in range(600)]
    *_, last = added(log, *add_far)
    assert ask(log, epoch="first", seen=first.id, must=last.id).word == "READ"


def test_what_was_trimmed_is_not_missing_but_what_stood_behind_it_may_be(log: Log, clock: Clock) -> None:
    """Who has read up to there goes on; who has not may have missed a marker."""
    first, second = added(log, charge(), charge())
    clock.now_ms += 1_000
    (last,) = added(log, charge())
    assert log.trim(P, NOW_MS + 1) == 2
    assert log.begin(P).trimmed == second.id
    assert list(ask(log, epoch="first", seen=second.id).unseen) == [last]
    for must in (first.id, second.id, (NOW_MS - 5, 0)):
        assert ask(log, epoch="first", seen=last.id, must=must).word == "READ"
    assert is_behind(log, "first", first.id)
    assert is_behind(log, "first", (NOW_MS - 5, 0))
    assert is_behind(log, "first", (second.id[0], second.id[1] + 1))
    assert is_behind(log, "first", last.id, must=(second.id[0], second.id[1] + 1))


def test_a_log_that_was_trimmed_to_its_end_goes_on(log: Log) -> None:
    (last,) = added(log, charge())
    assert log.trim(P, NOW_MS + 1) == 1
    assert (log.begin(P).epoch, log.begin(P).tip) == ("first", START)
    assert is_behind(log, "first", (last.id[0], last.id[1] + 1))
    reply = ask(log, charge(), epoch="first", seen=last.id, seq=0)
    assert (reply.word, reply.id) == ("APPENDED", (NOW_MS, last.id[1] + 1))


def test_after_all_entries_have_left_an_earlier_clock_gives_no_id_twice(log: Log, clock: Clock) -> None:
    (last,) = added(log, charge())
    log.trim(P, NOW_MS + 1)
    clock.now_ms -= 5_000
    assert ask(log, charge(), epoch="first").id == (NOW_MS, last.id[1] + 1)


# -- fences and seals ----------------------------------------------------------------------------------------------


def test_under_a_fence_everybody_is_behind_and_learns_the_fence(log: Log) -> None:
    seen = add(log, charge())
    epoch = fence(log)
    assert is_fence(epoch)
    for author in ("first", "", epoch, "other"):
        assert is_behind(log, author)
        assert is_behind(log, author, seen)


def test_a_fence_that_is_over_lets_nobody_append_either(log: Log, clock: Clock) -> None:
    """Its owner may have put half a log together. Whoever is next fences anew, and compares."""
    seen = add(log, charge())
    epoch = fence(log)
    clock.now_ms += LEASE_MS
    assert fence_is_over(epoch, clock.now_ms)
    for author in ("first", "", epoch):
        assert is_behind(log, author, seen if author else START)


def test_under_a_seal_everybody_is_behind_and_learns_where_the_log_is(log: Log) -> None:
    seen = add(log, charge())
    assert log.seal(P, fence(log), "redis://elsewhere/0")
    assert log.begin(P).epoch == "!redis://elsewhere/0"
    for author in ("first", "", "!redis://elsewhere/0"):
        assert is_behind(log, author, seen if author else START)


def test_an_empty_log_can_be_fenced(log: Log) -> None:
    fence(log)
    assert is_behind(log, "")


# -- a part is lost ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["log", "state"])
def test_a_log_of_which_a_part_is_lost_is_behind_for_everybody(log: Log, stored: Place, part: str) -> None:
    """Entries without an epoch, or an epoch without entries: what was read last may be gone, or not."""
    *_, last = added(log, charge(), charge())
    stored.lose(part)
    for author in ("first", ""):
        assert is_behind(log, author)
    assert is_behind(log, "first", last.id)
    assert not log.change(P, {}, {"facts": "x"}, marker()).done
    assert log.trim(P, NOW_MS + 1) == 0
    assert not log.keep_views(P, "first", {"v": "first 1 0-0 0-0 -"})


@pytest.mark.parametrize("part", ["log", "state"])
def test_a_log_of_which_a_part_is_lost_stands_behind_a_fence_that_is_over(log: Log, stored: Place, part: str) -> None:
    """So whoever asks next fences it, and puts it together."""
    entries = added(log, charge(), charge())
    stored.lose(part)
    beginning = log.begin(P)
    assert is_fence(beginning.epoch)
    assert fence_is_over(beginning.epoch, beginning.clock_ms)
    epoch = fence(log)
    assert log.replace(P, epoch, log.begin(P).tip, entries, "second")
    assert entries_of(log) == entries
    assert not is_behind(log, "second", entries[-1].id)


def test_a_log_that_was_emptied_begins_anew(log: Log, stored: Place) -> None:
    seen = add(log, charge())
    stored.lose("log", "state")
    assert is_behind(log, "first", seen)
    assert log.begin(P).epoch == ""
    assert log.append(P, Append("", START, [charge()], new_epoch="second")).epoch == "second"
    assert is_behind(log, "first", seen)
