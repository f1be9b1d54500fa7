"""Refusals in the state: of many that add at once nobody loses anything, and nothing is added twice."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from quota.errors import LedgerError, UsageError
from quota.rules.entry import END, START
from quota.rules.refusals import MAX_COUNTS, MAX_REFUSALS, RefusalCount, RefusedSum
from quota.terms.limits import HOUR_MS
from support.cut_log import CutLog
from support.states import NOW_MS, Clocked

if TYPE_CHECKING:
    from quota.ledger.log import Log

HOUR = NOW_MS // HOUR_MS * HOUR_MS


@pytest.fixture
def here(log: Log) -> Clocked:
    return Clocked(log)


def count(calls: int, hour_ms: int = HOUR, job: str = "j") -> RefusalCount:
    return RefusalCount(hour_ms, "day", job, "limit", calls)


def test_what_was_refused_is_read_again_and_no_marker_is_left(here: Clocked) -> None:
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
def test_what_is_added_again_after_a_lost_answer_is_there_once(log: Log, fault: Any) -> None:
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


def test_of_eight_threads_that_add_at_once_nobody_loses_anything(log: Log) -> None:
    threads, times = 8, 15
    barrier = threading.Barrier(threads)

    def add(me: int) -> None:
        mine = Clocked(log, name=f" of {me}")
        barrier.wait()
        for n in range(times):
            hour_ms = HOUR + n % 2 * HOUR_MS
            mine.state.add_refusals([count(1, hour_ms), count(2, job=f"j{me}")], [f"{me} {n}"])

    workers = [threading.Thread(target=add, args=(me,)) for me in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    refusals = Clocked(log).state.refusals()
    calls: Counter[tuple[int, str]] = Counter()
    for row in refusals.counts:
        calls[row.hour_ms - HOUR, row.job] += row.calls
    own = {(0, f"j{me}"): 2 * times for me in range(threads)}
    assert calls == {(0, "j"): threads * (times + 1) // 2, (HOUR_MS, "j"): threads * (times // 2), **own}
    assert sum(row.calls for row in refusals.sums) == threads * times * 3
    assert len({*refusals.newest}) == MAX_REFUSALS
    for me in range(threads):
        numbers = [int(text.split()[1]) for text in refusals.newest if text.startswith(f"{me} ")]
        assert numbers == sorted(numbers), "each in its order"
