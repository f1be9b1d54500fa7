"""Fields of the state change where nobody was quicker, in one step with a marker that no decision overlooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from contract.log.logs import NOW_MS, Clock, P, add, added, ask, charge, entries_of, fence, marker
from quota.ledger.log import EPOCH, KEPT_MS, MAX_SKIP, Log
from quota.rules.entry import START
from quota.terms.limits import DAY_MS
from support.processes import Children, in_threads

if TYPE_CHECKING:
    from collections.abc import Mapping

    from contract.log.logs import Place, RedisPlace


def state_of(log: Log, *names: str) -> Mapping[str, str]:
    return dict(log.begin(P, (), names).state)


def test_a_field_changes_if_it_has_the_expected_value(log: Log) -> None:
    changed = log.change(P, {"facts": None}, {"facts": "a"})
    assert (changed.done, changed.clock_ms, dict(changed.state)) == (True, NOW_MS, {"facts": "a"})
    assert log.change(P, {"facts": "a"}, {"facts": "b"}).done
    assert state_of(log, "facts") == {"facts": "b"}


@pytest.mark.parametrize("expected", [None, "a", "", "b "])
def test_a_field_with_another_value_does_not_change(log: Log, expected: str | None) -> None:
    log.change(P, {}, {"facts": "b", "other": "c"})
    changed = log.change(P, {"other": "c", "facts": expected}, {"facts": "x", "claim": "y"}, marker())
    assert (changed.done, dict(changed.state)) == (False, {"facts": "b", "other": "c"})
    assert state_of(log, "facts", "other", "claim") == {"facts": "b", "other": "c"}
    assert entries_of(log) == []


def test_a_missing_field_is_not_an_empty_field(log: Log) -> None:
    assert not log.change(P, {"facts": ""}, {"facts": "x"}).done
    log.change(P, {}, {"facts": ""})
    assert not log.change(P, {"facts": None}, {"facts": "x"}).done
    assert log.change(P, {"facts": ""}, {"facts": "x"}).done


def test_a_field_set_to_none_is_removed(log: Log) -> None:
    log.change(P, {}, {"facts": "a", "other": "b"})
    changed = log.change(P, {"facts": "a"}, {"facts": None})
    assert (changed.done, dict(changed.state)) == (True, {})
    assert state_of(log, "facts", "other") == {"other": "b"}


def test_several_fields_change_together(log: Log) -> None:
    expected = {f"place:{n}": None for n in range(300)}
    assert log.change(P, expected, {name: f"text of {name}" for name in expected}).done
    assert state_of(log, *expected) == {name: f"text of {name}" for name in expected}


def test_a_text_is_kept_as_it_is(log: Log) -> None:
    texts = {"tabs": "a\tb\nc", "long": "x" * 100_000, "other letters": "Größe 測試 🙂", "sign": "-", "same": "=-"}
    assert log.change(P, {}, texts).done
    assert dict(log.change(P, dict.fromkeys(texts), {}).state) == texts
    assert log.change(P, texts, {"tabs": None}).done


def test_a_change_of_no_field_only_reads(log: Log) -> None:
    log.change(P, {}, {"facts": "a"})
    changed = log.change(P, {"facts": None, "none": None}, {}, marker())
    assert (changed.done, dict(changed.state), changed.clock_ms) == (False, {"facts": "a"}, NOW_MS)
    assert entries_of(log) == []


def test_a_state_without_a_log_gives_it_no_epoch(log: Log) -> None:
    changed = log.change(P, {}, {"claim": "a"})
    assert (changed.done, changed.epoch) == (True, "")
    assert list(log.projects()) == []
    assert ask(log, charge()).word == "APPENDED"
    assert state_of(log, "claim") == {"claim": "a"}


def test_a_simulation_brings_its_own_clock(log: Log) -> None:
    changed = log.change(P, {}, {"facts": "a"}, marker(), clock_ms=50_000)
    assert (changed.clock_ms, entries_of(log)[0].id[0]) == (50_000, 50_000)


# -- markers ---------------------------------------------------------------------------------------------------------


def test_a_change_is_in_the_log_with_its_marker(log: Log, clock: Clock) -> None:
    first = added(log, charge())
    clock.now_ms += 5
    mark = marker()
    changed = log.change(P, {}, {"facts": "a"}, mark)
    assert (changed.done, changed.epoch) == (True, "first")
    *before, stored = entries_of(log)
    assert (before, stored._replace(id=mark.id)) == (first, mark)
    assert stored.id[0] == NOW_MS + 5


@pytest.mark.parametrize("before_ms", [NOW_MS, NOW_MS + 1], ids=["it is in the log", "it has left"])
def test_a_marker_follows_the_newest_entry_whatever_the_clock_says(log: Log, clock: Clock, before_ms: int) -> None:
    ms, seq = add(log, charge())
    log.trim(P, before_ms)
    clock.now_ms -= 5_000
    log.change(P, {}, {"facts": "a"}, marker())
    newest_ms, newest_seq = entries_of(log)[-1].id
    assert newest_ms == ms
    assert seq < newest_seq <= seq + MAX_SKIP


def test_a_decision_that_has_not_read_the_marker_is_made_again(log: Log) -> None:
    seen = add(log, charge())
    log.change(P, {}, {"facts": "a"}, marker())
    reply = ask(log, charge(), seen=seen, room=10**9)
    assert (reply.word, reply.unseen[0].kind) == ("AGAIN", "marker")


def test_a_change_without_a_marker_lets_decisions_stand(log: Log) -> None:
    seen = add(log, charge())
    log.change(P, {}, {"claim": "a"})
    assert ask(log, charge(), seen=seen, room=0).word == "APPENDED"


def test_an_empty_log_begins_with_a_marker(log: Log) -> None:
    mark = marker()
    changed = log.change(P, {}, {"facts": "a"}, mark)
    assert changed.epoch == log.begin(P).epoch == mark.key
    assert ask(log, charge(), epoch=mark.key, seen=entries_of(log)[0].id).word == "APPENDED"


# -- fences and seals ------------------------------------------------------------------------------------------------


def test_a_fence_or_a_seal_stops_changes(log: Log) -> None:
    log.change(P, {}, {"facts": "a"})
    epoch = fence(log)
    changed = log.change(P, {"facts": "a"}, {"facts": "b"}, marker())
    assert (changed.done, changed.epoch, dict(changed.state)) == (False, epoch, {"facts": "a"})
    assert log.seal(P, epoch, "redis://elsewhere/0")
    changed = log.change(P, {"facts": "a"}, {"facts": "b"}, marker())
    assert (changed.done, changed.epoch, dict(changed.state)) == (False, "!redis://elsewhere/0", {"facts": "a"})
    assert entries_of(log) == []


def test_a_fence_that_is_over_still_stops_changes(log: Log, clock: Clock) -> None:
    fence(log)
    clock.now_ms += 10**6
    assert not log.change(P, {}, {"facts": "b"}, marker()).done


# -- races -----------------------------------------------------------------------------------------------------------


def count_up(log: Log, times: int) -> int:
    """Add to a number so often, and begin again where somebody was quicker; how often that was."""
    lost = 0
    for _ in range(times):
        while True:
            text = log.change(P, {"count": None}, {}).state.get("count")
            if log.change(P, {"count": text}, {"count": str(int(text or 0) + 1)}, marker()).done:
                break
            lost += 1
    return lost


def test_each_change_counts_when_threads_change_a_field_at_once(place: Place) -> None:
    log = place.open()
    in_threads(count_up, *[(log, 60)] * 2)
    assert state_of(log, "count") == {"count": "120"}
    assert [entry.kind for entry in entries_of(log)] == ["marker"] * 120


def test_each_change_counts_when_processes_change_a_field_at_once(place: Place, stored: Place) -> None:
    log = place.open()
    count_up(log, 1)
    Children(lambda n: count_up(place.open(), n), (40,), (40,)).answers()
    assert state_of(log, "count") == {"count": "81"}
    assert len({entry.key for entry in entries_of(log)}) == len({entry.id for entry in entries_of(log)}) == 81


# -- behind a fence ----------------------------------------------------------------------------------------------------


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
def test_a_caller_with_another_epoch_changes_nothing(log: Log, epoch: str | None) -> None:
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


def test_an_empty_log_is_given_back_empty(log: Log) -> None:
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


def test_a_caller_that_names_the_seal_lifts_it(log: Log) -> None:
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
