"""Behind a fence its owner alone changes the state, and only who names a seal lifts it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from contract.log.logs import NOW_MS, Clock, P, add, ask, charge, entries_of, fence
from quota.ledger.log import EPOCH, KEPT_MS, Log
from quota.rules.entry import START
from quota.terms.limits import DAY_MS

if TYPE_CHECKING:
    from contract.log.logs import RedisPlace


def epoch_of(log: Log) -> str:
    return log.begin(P).epoch


def test_the_owner_of_a_fence_changes_the_state_behind_it(log: Log) -> None:
    add(log, charge())
    standing = fence(log)
    changed = log.change(P, {EPOCH: standing, "facts": None}, {"facts": "a", "claim:b": "c"})
    assert (changed.done, changed.epoch) == (True, standing)
    assert dict(log.begin(P, (), ("facts", "claim:b")).state) == {"facts": "a", "claim:b": "c"}
    assert not log.change(P, {EPOCH: standing, "facts": "b"}, {"facts": "d"}).done


@pytest.mark.parametrize("epoch", [None, "", "first", "~token:1", "~token"])
def test_who_names_another_epoch_changes_nothing(log: Log, epoch: str | None) -> None:
    add(log, charge())
    standing = fence(log)
    changed = log.change(P, {EPOCH: epoch}, {"facts": "a", EPOCH: "mine"})
    assert (changed.done, changed.epoch) == (False, standing)
    assert (epoch_of(log), list(log.names(P))) == (standing, [])


def test_the_owner_of_a_fence_gives_the_log_back_as_it_was(log: Log) -> None:
    tip = add(log, charge())
    changed = log.change(P, {EPOCH: fence(log)}, {EPOCH: "first"})
    assert (changed.done, changed.epoch, epoch_of(log)) == (True, "first", "first")
    assert ask(log, charge(), seen=tip).word == "APPENDED"


def test_an_empty_log_is_given_back_as_an_empty_one(log: Log) -> None:
    changed = log.change(P, {EPOCH: fence(log)}, {EPOCH: None})
    assert (changed.done, changed.epoch, epoch_of(log)) == (True, "", "")
    assert list(log.projects()) == []
    assert ask(log, charge(), epoch="").word == "APPENDED"


def test_a_fence_that_somebody_else_has_taken_is_not_renewed(log: Log, clock: Clock) -> None:
    """By `fence` it would be: that one is over, too."""
    add(log, charge())
    ours = fence(log, "ours")
    clock.now_ms += 10_000
    theirs = fence(log, "theirs")
    clock.now_ms += 10_000
    assert not log.change(P, {EPOCH: ours}, {EPOCH: "~ours:1"}).done
    assert epoch_of(log) == theirs


def test_a_log_is_put_in_place_while_its_fence_stands(log: Log) -> None:
    add(log, charge(1))
    standing, entries = fence(log), [charge(2, id=(NOW_MS, 0))]
    assert log.replace(P, standing, log.begin(P).tip, entries, standing)
    assert (epoch_of(log), entries_of(log)) == (standing, entries)
    assert ask(log, charge(), epoch=standing, seen=(NOW_MS, 0)).word == "BEHIND"
    assert log.change(P, {EPOCH: standing}, {EPOCH: "second"}).done
    assert ask(log, charge(), epoch="second", seen=(NOW_MS, 0)).word == "APPENDED"


def test_an_empty_log_that_was_put_in_place_is_opened(log: Log) -> None:
    standing = fence(log)
    assert log.replace(P, standing, START, [], standing)
    assert log.change(P, {EPOCH: standing}, {EPOCH: "second"}).done
    assert ask(log, charge(), epoch="second").word == "APPENDED"


def test_who_names_a_seal_lifts_it(log: Log) -> None:
    tip = add(log, charge())
    assert log.seal(P, fence(log), "redis://elsewhere/0")
    for epoch in ("!", "!redis://other/0", "first"):
        assert not log.change(P, {EPOCH: epoch}, {EPOCH: "~ours:1"}).done
    assert log.change(P, {EPOCH: "!redis://elsewhere/0"}, {EPOCH: "~ours:1"}).done
    assert epoch_of(log) == "~ours:1"
    assert log.replace(P, "~ours:1", tip, [], "second")


def test_no_view_is_kept_behind_a_fence_or_a_seal(log: Log) -> None:
    add(log, charge())
    standing = fence(log)
    assert not log.keep_views(P, standing, {"v": "x"})
    log.seal(P, standing, "redis://elsewhere/0")
    assert not log.keep_views(P, "!redis://elsewhere/0", {"v": "x"})
    assert dict(log.begin(P, ("v",)).state) == {}


@pytest.mark.parametrize("place", ["redis"], indirect=True)
def test_a_seal_that_is_given_back_lives_as_long_as_before(log: Log, place: RedisPlace) -> None:
    add(log, charge())
    log.seal(P, fence(log), "redis://elsewhere/0")
    log.change(P, {EPOCH: "!redis://elsewhere/0"}, {EPOCH: "~ours:1"})
    log.seal(P, "~ours:1", "redis://elsewhere/0")
    (state,) = place.client.keys("*:state")
    assert place.client.pttl(state) > KEPT_MS - DAY_MS


def test_the_names_are_those_of_all_fields_that_callers_keep(log: Log, clock: Clock) -> None:
    assert list(log.names(P)) == []
    add(log, charge())
    log.change(P, {}, {"facts": "a", "place:d|DE\n": "e", "claim:b": "c", "viewed": "f", "gone": "g"})
    log.change(P, {}, {"gone": None})
    log.change(P, {}, {"facts": "b"}, charge()._replace(kind="marker"))
    log.keep_views(P, "first", {"v": "x"})
    clock.now_ms += 1
    log.trim(P, clock.now_ms)
    names = ["claim:b", "facts", "place:d|DE\n", "viewed"]
    assert list(log.names(P)) == names
    assert list(log.names("q")) == []
    log.seal(P, fence(log), "redis://elsewhere/0")
    assert list(log.names(P)) == names
