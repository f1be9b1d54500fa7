"""Fields of the state change where nobody was quicker, in one step with a marker that no decision overlooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from contract.log.logs import NOW_MS, Clock, P, add, added, ask, charge, entries_of, fence, marker
from quota.ledger.log import Log
from support.processes import Children
from support.threads import in_threads

if TYPE_CHECKING:
    from collections.abc import Mapping

    from contract.log.logs import Place


def state_of(log: Log, *names: str) -> Mapping[str, str]:
    return dict(log.begin(P, (), names).state)


def test_a_field_changes_where_it_is_as_expected(log: Log) -> None:
    changed = log.change(P, {"facts": None}, {"facts": "a"})
    assert (changed.done, changed.clock_ms, dict(changed.state)) == (True, NOW_MS, {"facts": "a"})
    assert log.change(P, {"facts": "a"}, {"facts": "b"}).done
    assert state_of(log, "facts") == {"facts": "b"}


@pytest.mark.parametrize("expected", [None, "a", "", "b "])
def test_a_field_that_is_not_as_expected_does_not_change(log: Log, expected: str | None) -> None:
    log.change(P, {}, {"facts": "b", "other": "c"})
    changed = log.change(P, {"other": "c", "facts": expected}, {"facts": "x", "claim": "y"}, marker())
    assert (changed.done, dict(changed.state)) == (False, {"facts": "b", "other": "c"})
    assert state_of(log, "facts", "other", "claim") == {"facts": "b", "other": "c"}
    assert entries_of(log) == []


def test_a_field_that_is_missing_is_not_an_empty_one(log: Log) -> None:
    assert not log.change(P, {"facts": ""}, {"facts": "x"}).done
    log.change(P, {}, {"facts": ""})
    assert not log.change(P, {"facts": None}, {"facts": "x"}).done
    assert log.change(P, {"facts": ""}, {"facts": "x"}).done


def test_a_field_that_becomes_none_goes(log: Log) -> None:
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


def test_with_nothing_that_becomes_it_only_reads(log: Log) -> None:
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
    assert entries_of(log)[-1].id == (ms, seq + 1)


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


def test_nothing_changes_under_a_fence_or_a_seal(log: Log) -> None:
    log.change(P, {}, {"facts": "a"})
    epoch = fence(log)
    changed = log.change(P, {"facts": "a"}, {"facts": "b"}, marker())
    assert (changed.done, changed.epoch, dict(changed.state)) == (False, epoch, {"facts": "a"})
    assert log.seal(P, epoch, "redis://elsewhere/0")
    changed = log.change(P, {"facts": "a"}, {"facts": "b"}, marker())
    assert (changed.done, changed.epoch, dict(changed.state)) == (False, "!redis://elsewhere/0", {"facts": "a"})
    assert entries_of(log) == []


def test_nothing_changes_under_a_fence_that_is_over(log: Log, clock: Clock) -> None:
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


def test_of_threads_that_change_a_field_at_once_each_change_counts(place: Place) -> None:
    log = place.open()
    in_threads(count_up, *[(log, 60)] * 2)
    assert state_of(log, "count") == {"count": "120"}
    assert [entry.kind for entry in entries_of(log)] == ["marker"] * 120


def test_of_processes_that_change_a_field_at_once_each_change_counts(place: Place, stored: Place) -> None:
    log = place.open()
    count_up(log, 1)
    Children(lambda n: count_up(place.open(), n), (40,), (40,)).answers()
    assert state_of(log, "count") == {"count": "81"}
    assert len({entry.key for entry in entries_of(log)}) == len({entry.id for entry in entries_of(log)}) == 81
