"""Facts in the state: each change is made once, with a marker in the log, and none undoes another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from quota.common.clock import NEVER
from quota.errors import LedgerError, UsageError
from quota.rules.entry import END, START
from quota.rules.facts import FACTS, Compared, Exhaustion, Facts, Grant
from quota.rules.refusals import RefusalCount, RefusedSum
from quota.terms.limits import DAY_MS, HOUR_MS
from support.cut_log import CutLog
from support.setup import NOW_MS, Clocked

if TYPE_CHECKING:
    from quota.ledger.log import Log


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
    facts = here.state.facts()
    assert facts.exhaustions == (first._replace(reopened_ms=NOW_MS, reopened_because="raised"),)
    assert [tuple(made) for made in facts.changed_by] == [(NOW_MS, "k0"), (NOW_MS, "k3"), (NOW_MS, "k5")]


def test_upstreams_counts_are_kept_beside_the_grants(here: Clocked) -> None:
    raised, compared = Grant("units", 260, NOW_MS, NOW_MS + DAY_MS), Compared("units", 210, 8, 202, 0, 1, 2, NOW_MS)
    here.state.grant([raised], [compared])
    here.state.grant([])
    facts = here.state.facts()
    assert (facts.grants, facts.compared) == ((), (compared,))
    here.state.grant([raised], [])
    facts = here.state.facts()
    assert (facts.grants, facts.compared) == ((raised,), ())


def test_an_impossible_fact_is_refused_and_changes_nothing(here: Clocked) -> None:
    with pytest.raises(UsageError):
        here.state.exhaust(Exhaustion("a b", 1, 2, "", ""))
    with pytest.raises(UsageError):
        here.state.grant([Grant("units", 1, 2, 2)])
    assert here.state.facts() == Facts()
    assert markers(here.log) == []


def test_facts_of_another_history_come_back_and_undo_nothing_newer(here: Clocked, log: Log) -> None:
    here.state.exhaust(exhaustion(here))
    here.state.exhaust(exhaustion(here, "search"))
    older = here.state.facts()
    here.now_ms += 5
    here.state.reopen("units", "raised")
    newer = here.state.facts()
    assert here.state.unite(older) == newer
    assert len(markers(log)) == 3, "nothing has changed"
    log.change("p", {}, {FACTS: None})
    assert here.state.unite(older) == older
    united = here.state.unite(newer)
    assert united.exhaustions == newer.exhaustions
    assert len(markers(log)) == 5


# -- lost answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["drop-request", "drop-reply"])
def test_a_bucket_is_reopened_once_whichever_answer_is_lost(log: Log, fault: Any) -> None:
    cut = CutLog(log)
    here = Clocked(cut)  # type: ignore[arg-type]
    stood = here.state.exhaust(exhaustion(here))
    cut.faults = [fault]
    assert here.state.reopen("units", "raised") is True
    assert here.state.facts().exhaustions == (stood._replace(reopened_ms=NOW_MS, reopened_because="raised"),)
    assert markers(log) == ["k0", "k1"]


def test_a_repeated_reopening_does_not_lift_a_later_exhaustion(log: Log) -> None:
    """The answer is lost, and before it is asked for again, upstream closes the bucket anew."""
    cut = CutLog(log)
    here, other = Clocked(cut), Clocked(log, name=" other", now_ms=NOW_MS + 5)  # type: ignore[arg-type]
    here.state.exhaust(exhaustion(here))
    cut.faults = ["drop-reply"]
    cut.afterwards = lambda: other.state.exhaust(exhaustion(other))
    assert here.state.reopen("units", "raised") is True
    assert here.state.facts().exhaustions == (exhaustion(other),)
    assert markers(log) == ["k0", "k1", "k0 other"]


def test_a_repeated_grant_does_not_replace_a_later_grant(log: Log) -> None:
    earlier, later = (Grant("units", units, NOW_MS, NOW_MS + DAY_MS) for units in (100, 200))
    cut = CutLog(log)
    here, other = Clocked(cut), Clocked(log, name=" other")  # type: ignore[arg-type]
    cut.faults = ["drop-reply"]
    cut.afterwards = lambda: other.state.grant([later])
    here.state.grant([earlier])
    assert here.state.facts().grants == (later,)


def test_a_change_that_did_not_arrive_is_made_whatever_others_change_meanwhile(log: Log) -> None:
    cut = CutLog(log)
    here, other = Clocked(cut), Clocked(log, name=" other")  # type: ignore[arg-type]
    here.state.exhaust(exhaustion(here))
    cut.faults = ["drop-request"]
    cut.afterwards = lambda: other.state.exhaust(exhaustion(other, "search"))
    assert here.state.reopen("units", "raised") is True
    assert [closed.reopened_ms > 0 for closed in here.state.facts().exhaustions] == [False, True]


# -- refusals ----------------------------------------------------------------------------------------------------------


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


def test_a_repeated_key_adds_its_refusals_once(log: Log) -> None:
    """The answer was lost, and then the one to its repeat."""
    cut = CutLog(log)
    here = Clocked(cut)  # type: ignore[arg-type]
    cut.faults = ["drop-request", "drop-reply"]
    with pytest.raises(LedgerError):
        here.state.add_refusals([count(3)], ["a"], key="mine")
    here.state.add_refusals([count(3)], ["a"], key="mine")
    assert here.state.refusals() == ([count(3)], [RefusedSum("day", "j", "limit", 3)], ["a"])
