"""The state and its facts: each change is made once, with a marker in the log, and none undoes another."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest

from quota.common.clock import NEVER
from quota.errors import LedgerError, UnusableLedger
from quota.ledger import state as state_module
from quota.ledger.log import Fields, Log
from quota.ledger.state import MAX_CHANGES, change
from quota.rules.entry import END, START
from quota.rules.facts import Exhaustion, Grant
from quota.rules.refusals import RefusalCount, RefusedSum
from quota.terms.limits import DAY_MS, HOUR_MS
from support.cut_log import CutLog
from support.setup import NOW_MS, Clocked


def exhaustion(here: Clocked, bucket: str = "units", **more: Any) -> Exhaustion:
    return Exhaustion(bucket, here.now_ms, here.now_ms + HOUR_MS, "quotaExceeded", "a test")._replace(**more)


def markers(log: Log) -> list[str]:
    entries = log.read("p", START, END, 1_000)
    assert {entry.kind for entry in entries} <= {"marker"}
    return [entry.key for entry in entries]


def test_each_change_of_the_facts_leaves_a_marker_and_what_changes_nothing_none(here: Clocked) -> None:
    first = here.state.exhaust(exhaustion(here))
    assert here.state.exhaust(exhaustion(here, until_ms=NEVER)) == first
    assert here.state.reopen("search") is False
    assert markers(here.log) == ["k0"]
    assert here.state.reopen("units", "raised") is True
    assert here.state.reopen("units", "again") is False
    here.state.grant([Grant("units", 1, 1, 2)])
    assert markers(here.log) == ["k0", "k3", "k5"]
    assert here.state.facts().exhaustions == (first._replace(reopened_ms=NOW_MS, reopened_because="raised"),)


@pytest.mark.parametrize("fault", ["drop-request", "drop-reply"])
def test_a_bucket_is_reopened_once_whichever_answer_is_lost(log: Log, fault: Any) -> None:
    cut = CutLog(log)
    here = Clocked(cut)  # type: ignore[arg-type]
    stood = here.state.exhaust(exhaustion(here))
    cut.faults = [fault]
    assert here.state.reopen("units", "raised") is True
    assert here.state.facts().exhaustions == (stood._replace(reopened_ms=NOW_MS, reopened_because="raised"),)
    assert markers(log) == ["k0", "k1"]


def test_a_repeated_change_does_not_undo_a_later_one(log: Log) -> None:
    """The answer is lost. Before the repeat, upstream closes the bucket anew, or grants more."""
    cut = CutLog(log)
    here, other = Clocked(cut), Clocked(log, name=" other", now_ms=NOW_MS + 5)  # type: ignore[arg-type]
    here.state.exhaust(exhaustion(here))
    cut.faults = ["drop-reply"]
    cut.afterwards = lambda: other.state.exhaust(exhaustion(other))
    assert here.state.reopen("units", "raised") is True
    assert here.state.facts().exhaustions == (exhaustion(other),)
    assert markers(log) == ["k0", "k1", "k0 other"]
    earlier, later = (Grant("units", units, NOW_MS, NOW_MS + DAY_MS) for units in (100, 200))
    cut.faults = ["drop-reply"]
    cut.afterwards = lambda: other.state.grant([later])
    here.state.grant([earlier])
    assert here.state.facts().grants == (later,)


HOUR = NOW_MS // HOUR_MS * HOUR_MS


def count(calls: int, hour_ms: int = HOUR, job: str = "j") -> RefusalCount:
    return RefusalCount(hour_ms, "day", job, "limit", calls)


@pytest.mark.parametrize("fault", ["drop-request", "drop-reply"])
def test_refusals_added_again_after_a_lost_answer_count_once(log: Log, fault: Any) -> None:
    cut = CutLog(log)
    here, other = Clocked(cut), Clocked(log, name=" other")  # type: ignore[arg-type]
    cut.faults = [fault]
    cut.afterwards = lambda: other.state.add_refusals([count(10)], ["theirs"])
    here.state.add_refusals([count(3)], ["ours"])
    refusals = here.state.refusals()
    assert refusals.counts == [count(13)]
    assert sorted(refusals.newest) == ["ours", "theirs"]


def test_a_repeated_key_adds_its_refusals_once(log: Log) -> None:
    """Its answer was lost, and so was the answer to its repeat."""
    cut = CutLog(log)
    here = Clocked(cut)  # type: ignore[arg-type]
    cut.faults = ["drop-request", "drop-reply"]
    with pytest.raises(LedgerError):
        here.state.add_refusals([count(3)], ["a"], key="mine")
    here.state.add_refusals([count(3)], ["a"], key="mine")
    assert here.state.refusals() == ([count(3)], [RefusedSum("day", "j", "limit", 3)], ["a"])


def read(log: Log, *names: str) -> Mapping[str, str]:
    return log.change("p", dict.fromkeys(names), {}).state


def to(**becomes: str | None) -> Any:
    return lambda *_: ("done", becomes)


def test_a_rule_gets_the_present_fields_and_returns_the_new_fields(log: Log) -> None:
    asked = []

    def rule(now_ms: int, fields: Mapping[str, str]) -> tuple[str, Fields]:
        asked.append((now_ms, dict(fields)))
        return "done", {"a": None, "b": f"{fields.get('b', '')}x", "c": "new"}

    for _ in range(2):
        assert change(log, "p", ("a", "b"), rule) == "done"
    assert [fields for _, fields in asked] == [{}, {"b": "x"}]
    assert read(log, "a", "b", "c") == {"b": "xx", "c": "new"}
    assert change(log, "p", ("b",), to(b=None)) == "done"
    assert read(log, "a", "b", "c") == {"c": "new"}


def test_a_change_without_effect_is_not_written(log: Log) -> None:
    cut = CutLog(log)
    change(cut, "p", ("a",), to(a="x"), "k1")
    change(cut, "p", ("a",), to(a="x"), "k2")
    change(cut, "p", ("a", "b"), to(b=None), "k3")
    change(cut, "p", ("a",), to(), "k4")
    assert cut.writes == 1
    assert [(entry.kind, entry.key) for entry in log.read("p", START, END, 10)] == [("marker", "k1")]


@pytest.mark.parametrize("times", [0, 1, 5])
def test_a_change_that_comes_too_late_is_decided_anew(log: Log, times: int) -> None:
    asked = []

    def rule(_: int, fields: Mapping[str, str]) -> tuple[str, Fields]:
        asked.append(fields.get("a", ""))
        assert {*fields} <= {"a"}, "the field that it names"
        if len(asked) <= times:
            change(log, "p", (), to(a=f"{len(asked)}", b="theirs"))
        return "done", {"a": f"{fields.get('a', '')} and mine"}

    assert change(log, "p", ("a",), rule, "key") == "done"
    assert asked == ["", *(f"{n + 1}" for n in range(times))]
    assert read(log, "a") == {"a": f"{times or ''} and mine"}
    assert [entry.key for entry in log.read("p", START, END, 10)] == ["key"]


@pytest.mark.parametrize(("within_s", "times"), [(None, MAX_CHANGES), (0.0, 1)])
def test_a_change_that_always_comes_too_late_is_one_line(
    log: Log, monkeypatch: pytest.MonkeyPatch, within_s: float | None, times: int
) -> None:
    """After many tries, or after a while."""
    monkeypatch.setattr(state_module, "CHANGE_WITHIN_S", 60.0 if within_s is None else within_s)
    asked = 0

    def rule(*_: object) -> tuple[str, Fields]:
        nonlocal asked
        asked += 1
        change(log, "p", (), to(a=f"{asked}"))
        return "done", {"a": "mine"}

    with pytest.raises(
        LedgerError, match=r"^ledger .*: other processes were quicker each time; run again in a moment$"
    ):
        change(log, "p", ("a",), rule)
    assert asked == times
    assert read(log, "a") == {"a": f"{times}"}


def test_a_change_that_nobody_hinders_is_made_however_slow_it_is(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "CHANGE_WITHIN_S", -1.0)
    assert change(log, "p", ("a",), to(a="x")) == "done"


def fence(log: Log) -> str:
    change(log, "p", ("a",), to(a="before"), "key")
    done, epoch = log.fence("p", log.begin("p").epoch, "token")
    assert done
    return epoch


def test_a_change_waits_for_a_fence_and_then_raises(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "FENCED_WITHIN_S", 0.2)
    fence(log)
    began_s = time.monotonic()
    with pytest.raises(
        LedgerError, match=r"^ledger .*: another process puts back what it lost; run again in a moment$"
    ):
        change(log, "p", ("a",), to(a="after"))
    assert time.monotonic() - began_s >= state_module.FENCED_WITHIN_S
    assert read(log, "a") == {"a": "before"}
    assert change(log, "p", ("a",), lambda _, fields: (fields["a"], {})) == "before", "who reads, reads"


def test_a_change_is_made_once_the_fence_is_replaced(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "FENCED_WITHIN_S", 60.0)
    epoch = fence(log)
    cut = CutLog(log)

    def replace() -> None:
        if cut.writes == 3:
            entries = log.read("p", START, END, 10)
            assert log.replace("p", epoch, entries[-1].id, entries, "another")

    cut.before_writes = replace
    assert change(cut, "p", ("a",), to(a="after")) == "done"
    assert cut.writes == 3
    assert read(log, "a") == {"a": "after"}


def test_a_change_takes_an_ended_fence_from_its_owner(log: Log) -> None:
    """The owner was killed, or is late and has read the state before this change."""
    _, epoch = log.fence("p", log.begin("p").epoch, "token", 0)
    assert change(log, "p", ("a",), to(a="after")) == "done"
    assert read(log, "a") == {"a": "after"}
    assert not log.replace("p", epoch, log.begin("p").tip, (), "another")
    assert not log.seal("p", epoch, "redis://elsewhere")


def test_a_log_that_has_moved_says_where(log: Log) -> None:
    epoch = fence(log)
    assert log.seal("p", epoch, "redis://new:6379/1")
    with pytest.raises(
        UnusableLedger, match=r"^ledger .* has moved to redis://new:6379/1; put that url into \[ledger\]$"
    ):
        change(log, "p", ("a",), lambda _, fields: (fields["a"], {}))
