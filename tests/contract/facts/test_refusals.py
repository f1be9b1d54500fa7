"""Refusals in the state: of many that add at once nobody loses anything, and nothing is added twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from quota.errors import LedgerError, UsageError
from quota.rules.entry import END, START
from quota.rules.refusals import MAX_COUNTS, RefusalCount, RefusedSum
from quota.terms.limits import HOUR_MS
from support.cut_log import CutLog
from support.states import NOW_MS, Clocked

if TYPE_CHECKING:
    from quota.ledger.log import Log

HOUR = NOW_MS // HOUR_MS * HOUR_MS


def count(calls: int, hour_ms: int = HOUR, job: str = "j") -> RefusalCount:
    return RefusalCount(hour_ms, "day", job, "limit", calls)


def test_a_stored_refusal_is_read_again_and_leaves_no_marker(here: Clocked) -> None:
    assert here.state.refusals() == ([], [], [])
    here.state.add_refusals([count(3), count(1, HOUR - HOUR_MS)], ["a", "b"])
    here.state.add_refusals([count(2)], ["c"])
    assert here.state.refusals() == (
        [count(1, HOUR - HOUR_MS), count(5)],
        [RefusedSum("day", "j", "limit", 6)],
        ["a", "b", "c"],
    )
    assert here.state.refusals(HOUR).counts == [count(5)]
    assert [*here.log.read("p", START, END, 10)] == []


def test_too_many_counts_are_refused(here: Clocked) -> None:
    with pytest.raises(UsageError, match="201 counts"):
        here.state.add_refusals([count(1)] * (MAX_COUNTS + 1))


@pytest.mark.parametrize("fault", ["drop-request", "drop-reply"])
def test_refusals_added_again_after_a_lost_answer_count_once(log: Log, fault: Any) -> None:
    """Whatever others have added in between."""
    cut = CutLog(log)
    here, other = Clocked(cut), Clocked(log, name=" other")  # type: ignore[arg-type]
    cut.faults = [fault]
    cut.afterwards = lambda: other.state.add_refusals([count(10)], ["theirs"])
    here.state.add_refusals([count(3)], ["ours"])
    refusals = here.state.refusals()
    assert refusals.counts == [count(13)]
    assert sorted(refusals.newest) == ["ours", "theirs"]


def test_who_asks_again_with_the_same_key_adds_once(log: Log) -> None:
    """The answer was lost, and then the one to its repeat."""
    cut = CutLog(log)
    here = Clocked(cut)  # type: ignore[arg-type]
    cut.faults = ["drop-request", "drop-reply"]
    with pytest.raises(LedgerError):
        here.state.add_refusals([count(3)], ["a"], key="mine")
    here.state.add_refusals([count(3)], ["a"], key="mine")
    assert here.state.refusals() == ([count(3)], [RefusedSum("day", "j", "limit", 3)], ["a"])
