"""A fence keeps everybody from appending while its owner puts another log in place, or closes the log for good."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from contract.log.logs import (
    NOW_MS,
    Clock,
    P,
    add,
    added,
    ask,
    charge,
    correction,
    entries_of,
    fence,
    marker,
    others,
)
from quota.ledger.log import LEASE_MS, Log, fence_is_over
from quota.rules.entry import START, Entry
from support.processes import Children

if TYPE_CHECKING:
    from contract.log.logs import Place


def epoch_of(log: Log) -> str:
    return log.begin(P).epoch


def test_a_fence_takes_the_place_of_the_epoch_that_its_author_has_read(log: Log) -> None:
    add(log, charge())
    assert log.fence(P, "first", "token") == (True, f"~token:{NOW_MS + LEASE_MS}")
    assert epoch_of(log) == f"~token:{NOW_MS + LEASE_MS}"


def test_a_fence_lasts_as_long_as_its_lease(log: Log) -> None:
    assert log.fence(P, "", "token", lease_ms=700) == (True, f"~token:{NOW_MS + 700}")


@pytest.mark.parametrize("epoch", ["", "other"])
def test_a_log_of_another_epoch_is_not_fenced(log: Log, epoch: str) -> None:
    add(log, charge())
    assert log.fence(P, epoch, "token") == (False, "first")
    assert ask(log, charge(), room=9).word == "APPENDED"


def test_the_fence_of_somebody_else_stands_until_its_lease_is_over(log: Log, clock: Clock) -> None:
    add(log, charge())
    standing = fence(log, "theirs")
    clock.now_ms += LEASE_MS - 1
    for epoch in ("first", "", standing):
        assert log.fence(P, epoch, "ours") == (False, standing)
    clock.now_ms += 1
    assert log.fence(P, "", "ours") == (True, f"~ours:{clock.now_ms + LEASE_MS}")
    assert not log.replace(P, standing, log.begin(P).tip, [], "second")


def test_the_owner_of_a_fence_renews_it(log: Log, clock: Clock) -> None:
    """Under either text of it a long work goes on: nobody else has had the log."""
    first = fence(log, "ours")
    clock.now_ms += LEASE_MS - 1
    assert log.fence(P, "", "ours") == (True, renewed := f"~ours:{clock.now_ms + LEASE_MS}")
    assert not log.replace(P, "~our:0", START, [], "second")
    assert log.replace(P, first, START, [], "")
    assert epoch_of(log) == renewed
    assert log.replace(P, first, START, [], "second")
    assert epoch_of(log) == "second"


def test_a_token_with_the_same_prefix_is_another_token(log: Log) -> None:
    standing = fence(log, "theirs")
    for token in ("their", "theirs:1"):
        assert log.fence(P, standing, token) == (False, standing)


def test_a_fence_that_ends_later_than_any_lease_is_over(log: Log, clock: Clock) -> None:
    """The clock that it was made by was wrong, or has gone back since."""
    standing = fence(log, "theirs")
    clock.now_ms -= 1
    assert fence_is_over(standing, clock.now_ms)
    assert log.fence(P, "", "ours")[0]


def test_only_one_of_several_processes_gets_the_fence(place: Place, stored: Place) -> None:
    log = place.open()
    add(log, charge())
    tokens = [(f"t{n}",) for n in range(6)]
    answers = Children(lambda token: place.open().fence(P, "first", token), *tokens).answers()
    assert sum(done for done, _ in answers) == 1
    assert {epoch for _, epoch in answers} == {epoch_of(log)}


# -- another log in its place ----------------------------------------------------------------------------------------


def union_of(log: Log) -> list[Entry]:
    """Other entries than the log has, of every kind, with two corrections of one charge."""
    first = charge(100, id=(NOW_MS - 9_000, 3))
    second = charge(50, id=(NOW_MS - 9_000, 4))
    once = correction(first, 40, id=(NOW_MS - 8_000, 0))
    twice = correction(first, 60, before_units=40, id=(NOW_MS + 5_000, 1))
    return [first, second, once, others(9, id=(NOW_MS, 0)), marker()._replace(id=(NOW_MS, 1)), twice]


def test_a_fenced_log_can_be_replaced(log: Log) -> None:
    gone = added(log, charge(1), charge(2))
    added(log, correction(gone[0], 5))
    log.keep_views(P, "first", {"v": "x", "w": "y"})
    log.change(P, {}, {"facts": "a", "claim:b": "c", "place:d": "e"})
    entries = union_of(log)
    assert log.replace(P, fence(log), log.begin(P).tip, entries, "second", {"w": "z"})
    assert entries_of(log) == entries
    beginning = log.begin(P, ("v", "w"), ("facts", "claim:b", "place:d"))
    assert (beginning.epoch, beginning.tip, beginning.trimmed) == ("second", entries[-1].id, START)
    assert dict(beginning.state) == {"view:w": "z", "facts": "a", "claim:b": "c", "place:d": "e"}
    corrections = log.corrections(P, [gone[0].key, entries[0].key, entries[1].key])
    assert dict(corrections) == {entries[0].key: (60, entries[-1].id)}


def test_a_log_that_took_the_place_of_another_goes_on_behind_its_newest_entry(log: Log) -> None:
    entries = union_of(log)
    assert log.replace(P, fence(log), START, entries, "second")
    reply = ask(log, charge(), epoch="second", seen=entries[-1].id, seq=3)
    assert (reply.word, reply.epoch, reply.id) == ("APPENDED", "second", (NOW_MS + 5_000, 5))
    assert log.keep_views(P, "second", {"v": "x"})


def test_many_entries_take_the_place_of_a_log_at_once(log: Log) -> None:
    add(log, charge())
    entries = [charge(id=(NOW_MS - 5_000 + n // 3, n)) for n in range(2_500)]
    assert log.replace(P, fence(log), log.begin(P).tip, entries, "second")
    assert entries_of(log) == entries


def test_a_log_with_a_newer_entry_is_not_replaced(log: Log) -> None:
    first, _ = added(log, charge(), charge())
    stood, epoch = entries_of(log), fence(log)
    for tip in (START, first.id, (NOW_MS, 2**41)):
        assert not log.replace(P, epoch, tip, union_of(log), "second")
    assert (entries_of(log), epoch_of(log)) == (stood, epoch)


def test_only_the_owner_of_the_fence_replaces_the_log(log: Log) -> None:
    tip = add(log, charge())
    stood = entries_of(log)
    assert not log.replace(P, "first", tip, union_of(log), "second")
    assert not log.replace(P, f"~token:{NOW_MS}", tip, union_of(log), "second")
    standing = fence(log)
    for other in ("first", "", "~other:1", standing.replace("~", "~o")):
        assert not log.replace(P, other, tip, union_of(log), "second")
    assert (entries_of(log), epoch_of(log)) == (stood, standing)
    assert log.replace(P, standing, tip, union_of(log), "second")
    assert not log.replace(P, standing, entries_of(log)[-1].id, [], "third")


def test_a_log_may_be_replaced_by_an_empty_one(log: Log) -> None:
    """Nothing was seen by anybody: that is a log, too, and not a loss."""
    (gone,) = added(log, charge())
    added(log, correction(gone, 5))
    log.change(P, {}, {"facts": "a"})
    assert log.replace(P, fence(log), log.begin(P).tip, [], "second")
    beginning = log.begin(P, (), ("facts",))
    assert (beginning.epoch, beginning.tip, dict(beginning.state)) == ("second", START, {"facts": "a"})
    assert (entries_of(log), dict(log.corrections(P, [gone.key]))) == ([], {})
    assert ask(log, epoch="second").word == "READ"
    assert ask(log, charge(), epoch="first").word == "BEHIND"
    assert ask(log, charge(), epoch="second").word == "APPENDED"


def test_an_empty_log_may_be_replaced(log: Log) -> None:
    """As when a server was emptied, and a machine puts back what it has seen."""
    assert log.replace(P, fence(log), START, union_of(log), "second")
    assert len(entries_of(log)) == 6


def test_a_replacement_brings_its_trim_mark_or_keeps_the_old_mark(log: Log, clock: Clock) -> None:
    (left,) = added(log, charge())
    clock.now_ms += 1_000
    tip = add(log, charge())
    log.trim(P, NOW_MS + 1)
    assert log.replace(P, fence(log), tip, [charge(id=tip)], "second")
    assert log.begin(P).trimmed == left.id
    assert log.replace(P, fence(log), tip, [charge(id=tip)], "third", trimmed=(NOW_MS + 5, 6))
    assert log.begin(P).trimmed == (NOW_MS + 5, 6)
    assert ask(log, epoch="third", seen=(NOW_MS + 5, 6)).word == "READ"


def test_replacing_a_log_leaves_the_past_and_other_projects_alone(log: Log) -> None:
    old = charge(id=(NOW_MS - 10**8, 0))
    log.add_past(P, [old])
    add(log, charge(), project="q")
    assert log.replace(P, fence(log), START, union_of(log), "second")
    assert list(log.past(P, START, (2**53, 0), 10)) == [old]
    assert (log.begin("q").epoch, len(entries_of(log, "q"))) == ("first", 1)


# -- seals -----------------------------------------------------------------------------------------------------------


def test_a_fence_becomes_a_seal(log: Log) -> None:
    stood = added(log, charge())
    assert log.seal(P, fence(log), "redis://elsewhere/0")
    assert epoch_of(log) == "!redis://elsewhere/0"
    assert entries_of(log) == stood


def test_only_a_standing_fence_becomes_a_seal(log: Log) -> None:
    add(log, charge())
    assert not log.seal(P, "first", "redis://elsewhere/0")
    standing = fence(log)
    assert not log.seal(P, "~other:1", "redis://elsewhere/0")
    assert epoch_of(log) == standing


def test_a_seal_cannot_be_replaced(log: Log, clock: Clock) -> None:
    tip = add(log, charge())
    standing, seal = fence(log), "!redis://elsewhere/0"
    log.seal(P, standing, "redis://elsewhere/0")
    clock.now_ms += 10 * LEASE_MS
    for epoch in ("first", standing, seal):
        assert log.fence(P, epoch, "token") == (False, seal)
        assert not log.replace(P, epoch, tip, [], "second")
    assert not log.seal(P, seal, "redis://third/0")
    assert log.trim(P, clock.now_ms) == 0
    assert epoch_of(log) == seal
