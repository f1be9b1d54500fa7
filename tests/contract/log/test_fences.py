"""The state changes where nobody was quicker. A fence stops everybody while its owner replaces or closes the log."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from contract.log.logs import (
    NOW_MS,
    Clock,
    P,
    Place,
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
from quota.ledger.log import EPOCH, LEASE_MS, MAX_SKIP, Log, fence_is_over
from quota.rules.entry import START, Entry
from support.processes import Children


def epoch_of(log: Log) -> str:
    return log.begin(P).epoch


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
    """Long work goes on under either text of the fence: nobody else has had the log."""
    first = fence(log, "ours")
    clock.now_ms += LEASE_MS - 1
    assert log.fence(P, "", "ours") == (True, renewed := f"~ours:{clock.now_ms + LEASE_MS}")
    assert not log.replace(P, "~our:0", START, [], "second")
    assert log.replace(P, first, START, [], "")
    assert epoch_of(log) == renewed
    assert log.replace(P, first, START, [], "second")
    assert epoch_of(log) == "second"


def test_a_fence_that_ends_later_than_any_lease_is_over(log: Log, clock: Clock) -> None:
    """The clock that set it was wrong, or has gone back since."""
    standing = fence(log, "theirs")
    clock.now_ms -= 1
    assert all(fence_is_over(epoch, clock.now_ms) for epoch in (standing, f"{standing}²"))
    assert log.fence(P, "", "ours")[0]


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
    log.change(P, {}, {"facts": "a", "claim:b": "c", "view": "e"})
    entries = union_of(log)
    assert log.replace(P, fence(log), log.begin(P).tip, entries, "second")
    assert entries_of(log) == entries
    beginning = log.begin(P, ("view:v", "view:w", "facts", "claim:b", "view"))
    assert (beginning.epoch, beginning.tip, beginning.trimmed) == ("second", entries[-1].id, START)
    assert dict(beginning.state) == {"facts": "a", "claim:b": "c", "view": "e"}
    corrections = log.corrections(P, [gone[0].key, entries[0].key, entries[1].key])
    assert dict(corrections) == {entries[0].key: (60, entries[-1].id)}


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
    """Nobody has seen an entry: an empty log is no loss."""
    (gone,) = added(log, charge())
    added(log, correction(gone, 5))
    log.change(P, {}, {"facts": "a"})
    assert log.replace(P, fence(log), log.begin(P).tip, [], "second")
    beginning = log.begin(P, ("facts",))
    assert (beginning.epoch, beginning.tip, dict(beginning.state)) == ("second", START, {"facts": "a"})
    assert (entries_of(log), dict(log.corrections(P, [gone.key]))) == ([], {})
    assert ask(log, epoch="second").word == "READ"
    assert ask(log, charge(), epoch="first").word == "BEHIND"
    assert ask(log, charge(), epoch="second").word == "APPENDED"


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


def test_a_seal_cannot_be_replaced(log: Log, clock: Clock) -> None:
    add(log, charge())
    tip = add(log, charge())
    standing, seal = fence(log), "!redis://elsewhere/0"
    assert [log.seal(P, by, "redis://elsewhere/0") for by in ("first", "~other:1", standing)] == [False, False, True]
    clock.now_ms += 10 * LEASE_MS
    for epoch in ("first", standing, seal):
        assert log.fence(P, epoch, "token") == (False, seal)
    for epoch in ("first", standing, f"{seal}1"):
        assert not log.replace(P, epoch, tip, [], "second")
    assert not log.seal(P, seal, "redis://third/0")
    assert not log.replace(P, seal, START, [], "")
    assert log.replace(P, seal, tip, entries_of(log)[1:], ""), "behind the seal, which stays"
    assert len(entries_of(log)) == 1
    assert log.trim(P, clock.now_ms) == 0
    assert epoch_of(log) == seal


def state_of(log: Log, *names: str) -> Mapping[str, str]:
    return dict(log.begin(P, names).state)


def test_a_field_changes_or_is_removed_if_it_has_the_expected_value(log: Log) -> None:
    log.change(P, {}, {"other": "c"})
    changed = log.change(P, {"facts": None}, {"facts": "a"})
    assert (changed.done, changed.clock_ms, dict(changed.state)) == (True, NOW_MS, {"facts": "a"})
    assert log.change(P, {"facts": "a"}, {"facts": "b"}).done
    assert state_of(log, "facts") == {"facts": "b"}
    changed = log.change(P, {"facts": "b"}, {"facts": None})
    assert (changed.done, dict(changed.state), state_of(log, "facts", "other")) == (True, {}, {"other": "c"})
    assert not log.change(P, {"facts": ""}, {"facts": "x"}).done, "a missing field is not an empty one"
    log.change(P, {}, {"facts": ""})
    assert not log.change(P, {"facts": None}, {"facts": "x"}).done


@pytest.mark.parametrize("expected", [None, "a", "", "b "])
def test_a_field_with_another_value_does_not_change(log: Log, expected: str | None) -> None:
    log.change(P, {}, {"facts": "b", "other": "c"})
    changed = log.change(P, {"other": "c", "facts": expected}, {"facts": "x", "claim": "y"}, marker())
    assert (changed.done, dict(changed.state)) == (False, {"facts": "b", "other": "c"})
    assert state_of(log, "facts", "other", "claim") == {"facts": "b", "other": "c"}
    assert entries_of(log) == []


def test_several_fields_change_together_and_keep_their_texts_as_they_are(log: Log) -> None:
    texts = {"tabs": "a\tb\nc", "long": "x" * 100_000, "other letters": "Größe 測試 🙂", "sign": "-", "same": "=-"}
    texts |= {f"place:{n}": f"text of {n}" for n in range(300)}
    assert log.change(P, dict.fromkeys(texts), texts).done
    assert dict(log.change(P, dict.fromkeys(texts), {}).state) == texts
    assert log.change(P, texts, {"tabs": None}).done


def test_a_state_without_a_log_gives_it_no_epoch(log: Log) -> None:
    changed = log.change(P, {}, {"claim": "a"})
    assert (changed.done, changed.epoch) == (True, "")
    assert list(log.projects()) == []
    assert ask(log, charge()).word == "APPENDED"
    assert state_of(log, "claim") == {"claim": "a"}


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


def test_an_empty_log_begins_with_a_marker(log: Log) -> None:
    mark = marker()
    changed = log.change(P, {}, {"facts": "a"}, mark)
    assert changed.epoch == log.begin(P).epoch == mark.key
    assert ask(log, charge(), epoch=mark.key, seen=entries_of(log)[0].id).word == "APPENDED"


def test_a_fence_or_a_seal_stops_changes(log: Log, clock: Clock) -> None:
    log.change(P, {}, {"facts": "a"})
    epoch = fence(log)
    changed = log.change(P, {"facts": "a"}, {"facts": "b"}, marker())
    assert (changed.done, changed.epoch, dict(changed.state)) == (False, epoch, {"facts": "a"})
    clock.now_ms += 2 * LEASE_MS
    assert not log.change(P, {"facts": "a"}, {"facts": "b"}, marker()).done, "it is over, and still stops them"
    assert log.seal(P, epoch, "redis://elsewhere/0")
    changed = log.change(P, {"facts": "a"}, {"facts": "b"}, marker())
    assert (changed.done, changed.epoch, dict(changed.state)) == (False, "!redis://elsewhere/0", {"facts": "a"})
    assert [*log.projects(), *entries_of(log)] == []


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


def test_each_change_counts_when_processes_change_a_field_at_once(place: Place) -> None:
    log = place.open()
    count_up(log, 1)
    Children(lambda n: count_up(place.open(), n), (40,), (40,)).answers()
    assert state_of(log, "count") == {"count": "81"}
    assert len({entry.key for entry in entries_of(log)}) == len({entry.id for entry in entries_of(log)}) == 81


def test_the_owner_of_a_fence_changes_the_state_behind_it(log: Log) -> None:
    add(log, charge())
    standing = fence(log)
    changed = log.change(P, {EPOCH: standing, "facts": None}, {"facts": "a", "claim:b": "c"})
    assert (changed.done, changed.epoch) == (True, standing)
    assert dict(log.begin(P, ("facts", "claim:b")).state) == {"facts": "a", "claim:b": "c"}
    assert not log.change(P, {EPOCH: standing, "facts": "b"}, {"facts": "d"}).done


@pytest.mark.parametrize("epoch", [None, "", "first", "~token:1", "~token"])
def test_a_caller_with_another_epoch_changes_nothing(log: Log, epoch: str | None) -> None:
    add(log, charge())
    standing = fence(log)
    changed = log.change(P, {EPOCH: epoch}, {"facts": "a", EPOCH: "mine"})
    assert (changed.done, changed.epoch) == (False, standing)
    assert (epoch_of(log), list(log.names(P))) == (standing, [])


def test_the_owner_of_a_fence_gives_the_log_back_as_it_was_also_an_empty_one(log: Log) -> None:
    for epoch, projects in (("", []), ("first", [P])):
        changed = log.change(P, {EPOCH: fence(log)}, {EPOCH: epoch or None})
        assert (changed.done, changed.epoch, epoch_of(log), list(log.projects())) == (True, epoch, epoch, projects)
        assert ask(log, charge(), epoch=epoch, seen=log.begin(P).tip, new_epoch="first").word == "APPENDED"


def test_a_caller_that_names_the_seal_lifts_it(log: Log) -> None:
    tip = add(log, charge())
    assert log.seal(P, fence(log), "redis://elsewhere/0")
    for epoch in ("!", "!redis://other/0", "first"):
        assert not log.change(P, {EPOCH: epoch}, {EPOCH: "~ours:1"}).done
    assert log.change(P, {EPOCH: "!redis://elsewhere/0"}, {EPOCH: "~ours:1"}).done
    assert epoch_of(log) == "~ours:1"
    assert log.replace(P, "~ours:1", tip, [], "second")


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
