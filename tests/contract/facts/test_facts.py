"""Facts in the state: each change is made once, with a marker in the log, and none undoes another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from quota.common.clock import NEVER
from quota.errors import UsageError
from quota.rules.entry import END, START
from quota.rules.facts import FACTS, Compared, Exhaustion, Facts, Grant
from quota.terms.limits import DAY_MS, HOUR_MS
from support.cut_log import CutLog
from support.states import NOW_MS, Clocked

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


def test_what_upstream_counted_is_kept_beside_the_grants(here: Clocked) -> None:
    raised, compared = Grant("units", 260, NOW_MS, NOW_MS + DAY_MS), Compared("units", 210, 8, 202, 0, 1, 2, NOW_MS)
    here.state.grant([raised], [compared])
    here.state.grant([])
    facts = here.state.facts()
    assert (facts.grants, facts.compared) == ((), (compared,))
    here.state.grant([raised], [])
    facts = here.state.facts()
    assert (facts.grants, facts.compared) == ((raised,), ())


@pytest.mark.parametrize(
    "ask",
    [
        lambda state: state.exhaust(Exhaustion("a b", 1, 2, "", "")),
        lambda state: state.grant([Grant("units", 1, 2, 2)]),
        lambda state: state.grant([], [Compared("units", 1, 1, 0, -1, 1, 2, 3)]),
    ],
)
def test_an_impossible_fact_is_refused_and_changes_nothing(here: Clocked, ask: Any) -> None:
    with pytest.raises(UsageError):
        ask(here.state)
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


def test_what_upstream_says_after_a_reopening_is_not_lifted_by_its_repeat(log: Log) -> None:
    """The answer is lost, and before it is asked for again, upstream closes the bucket anew."""
    cut = CutLog(log)
    here, other = Clocked(cut), Clocked(log, name=" other", now_ms=NOW_MS + 5)  # type: ignore[arg-type]
    here.state.exhaust(exhaustion(here))
    cut.faults = ["drop-reply"]
    cut.afterwards = lambda: other.state.exhaust(exhaustion(other))
    assert here.state.reopen("units", "raised") is True
    assert here.state.facts().exhaustions == (exhaustion(other),)
    assert markers(log) == ["k0", "k1", "k0 other"]


def test_what_is_granted_after_a_grant_is_not_replaced_by_its_repeat(log: Log) -> None:
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
