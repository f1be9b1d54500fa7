"""A change of the state by a rule: also where others change the same, where answers are lost, and where a log is fenced
or has moved."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from quota.errors import LedgerError, UnusableLedger
from quota.ledger import state as state_module
from quota.ledger.state import MAX_CHANGES, Change, change
from quota.rules.entry import END, START
from support.cut_log import CutLog
from support.processes import in_threads

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quota.ledger.log import Log


def read(log: Log, *names: str) -> Mapping[str, str]:
    return log.change("p", dict.fromkeys(names), {}).state


def to(**becomes: str | None) -> Any:
    return lambda *_: Change("done", becomes)


def test_a_rule_gets_the_present_fields_and_returns_the_new_fields(log: Log) -> None:
    asked = []

    def rule(now_ms: int, fields: Mapping[str, str]) -> Change[str]:
        asked.append((now_ms, dict(fields)))
        return Change("done", {"a": None, "b": f"{fields.get('b', '')}x", "c": "new"})

    for _ in range(2):
        assert change(log, "p", ("a", "b"), rule, clock_ms=7) == "done"
    assert asked == [(7, {}), (7, {"b": "x"})]
    assert read(log, "a", "b", "c") == {"b": "xx", "c": "new"}
    assert change(log, "p", ("b",), to(b=None)) == "done"
    assert read(log, "a", "b", "c") == {"c": "new"}


def test_a_rule_gets_the_ledgers_clock(log: Log) -> None:
    before_ms = log.now_ms()
    at_ms: int = change(log, "p", ("a",), lambda now_ms, _: Change(now_ms))
    assert before_ms <= at_ms <= log.now_ms()


def test_a_change_without_effect_is_not_written(log: Log) -> None:
    cut = CutLog(log)
    change(cut, "p", ("a",), to(a="x"), "k1")
    change(cut, "p", ("a",), to(a="x"), "k2")
    change(cut, "p", ("a", "b"), to(b=None), "k3")
    change(cut, "p", ("a",), to(), "k4")
    assert cut.writes == 1
    assert [(entry.kind, entry.key) for entry in log.read("p", START, END, 10)] == [("marker", "k1")]


def test_without_a_key_there_is_no_marker(log: Log) -> None:
    change(log, "p", ("a",), to(a="x"))
    assert [*log.read("p", START, END, 10)] == []


def test_projects_are_apart(log: Log) -> None:
    change(log, "p", ("a",), to(a="x"))
    change(log, "q", ("a",), to(a="y"))
    assert read(log, "a") == {"a": "x"}


# -- others change the same --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [0, 1, 5])
def test_a_change_that_comes_too_late_is_decided_anew(log: Log, times: int) -> None:
    asked = []

    def rule(_: int, fields: Mapping[str, str]) -> Change[str]:
        asked.append(fields.get("a", ""))
        if len(asked) <= times:
            change(log, "p", ("a",), to(a=f"{len(asked)}"))
        return Change("done", {"a": f"{fields.get('a', '')} and mine"})

    assert change(log, "p", ("a",), rule, "key") == "done"
    assert asked == ["", *(f"{n + 1}" for n in range(times))]
    assert read(log, "a") == {"a": f"{times or ''} and mine"}
    assert [entry.key for entry in log.read("p", START, END, 10)] == ["key"]


def test_a_repeated_rule_gets_only_the_named_fields(log: Log) -> None:
    asked = []

    def rule(_: int, fields: Mapping[str, str]) -> Change[None]:
        asked.append(dict(fields))
        if len(asked) == 1:
            change(log, "p", (), to(a="theirs", b="theirs"))
        return Change(None, {"a": "mine", "b": "mine"})

    change(log, "p", ("a",), rule)
    assert asked == [{}, {"a": "theirs"}]
    assert read(log, "a", "b") == {"a": "mine", "b": "mine"}


@pytest.mark.parametrize(("within_s", "times"), [(None, MAX_CHANGES), (0.0, 1)])
def test_a_change_that_always_comes_too_late_is_one_line(
    log: Log, monkeypatch: pytest.MonkeyPatch, within_s: float | None, times: int
) -> None:
    """After so many tries, or so long."""
    monkeypatch.setattr(state_module, "CHANGE_WITHIN_S", 60.0 if within_s is None else within_s)
    asked = 0

    def rule(*_: object) -> Change[str]:
        nonlocal asked
        asked += 1
        change(log, "p", (), to(a=f"{asked}"))
        return Change("done", {"a": "mine"})

    with pytest.raises(
        LedgerError, match=r"^ledger .*: other processes were quicker each time; run again in a moment$"
    ):
        change(log, "p", ("a",), rule)
    assert asked == times
    assert read(log, "a") == {"a": f"{times}"}


def test_a_change_that_nobody_hinders_is_made_however_slow_it_is(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "CHANGE_WITHIN_S", -1.0)
    assert change(log, "p", ("a",), to(a="x")) == "done"


def test_eight_threads_that_add_to_one_field_lose_nothing(log: Log) -> None:
    def add() -> None:
        for _ in range(25):
            change(log, "p", ("sum",), lambda _, fields: Change(None, {"sum": f"{int(fields.get('sum', 0)) + 1}"}))

    in_threads(add, *[()] * 8)
    assert read(log, "sum") == {"sum": "200"}


# -- lost answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["drop-request", "drop-reply"])
def test_the_rule_runs_again_on_the_current_fields_if_an_answer_is_lost(log: Log, fault: Any) -> None:
    cut = CutLog(log)
    cut.faults = [fault]
    assert change(cut, "p", ("a",), to(a="x")) == "done"
    assert read(log, "a") == {"a": "x"}
    assert cut.writes == (2 if fault == "drop-request" else 1)


def test_a_second_lost_answer_raises(log: Log) -> None:
    cut = CutLog(log)
    cut.faults = ["drop-request", "drop-request"]
    with pytest.raises(LedgerError, match="the connection was cut"):
        change(cut, "p", ("a",), to(a="x"))
    assert cut.writes == 2


# -- fences and seals --------------------------------------------------------------------------------------------------


def fence(log: Log) -> str:
    """Returns the epoch of the fence."""
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
    assert change(log, "p", ("a",), lambda _, fields: Change(fields["a"])) == "before", "who reads, reads"


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


def test_a_log_that_has_moved_says_where(log: Log) -> None:
    epoch = fence(log)
    assert log.seal("p", epoch, "redis://new:6379/1")
    with pytest.raises(
        UnusableLedger, match=r"^ledger .* has moved to redis://new:6379/1: put that url into \[ledger\]$"
    ):
        change(log, "p", ("a",), lambda _, fields: Change(fields["a"]))
