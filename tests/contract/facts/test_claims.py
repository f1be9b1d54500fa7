"""Claims in the state: what `quota.rules.claims` says, however many claim at once. They leave no marker in the log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from quota.errors import UsageError
from quota.rules.claims import MAX_HOLD_MS
from quota.rules.entry import END, START
from support.claims import HOLD_MS, claim_of
from support.cut_log import CutLog
from support.states import Clocked
from support.threads import in_threads

if TYPE_CHECKING:
    from quota.ledger.log import Log


def test_a_run_claims_ends_and_leaves_its_regions_to_its_store(here: Clocked) -> None:
    a, b = claim_of("a", tick="tick:1"), claim_of("b", tick="tick:1")
    assert here.state.claim(a) == (here.now_ms, {}, "")
    assert here.state.claim(b).tick == "running"
    here.state.end_claim(a, "done")
    assert here.state.claim(b).tick == "done"
    assert sorted(here.state.claim(b._replace(tick="")).elsewhere) == ["DE", "US"]
    assert here.state.claim(b._replace(tick=""), take_over=True).elsewhere == {}
    here.now_ms += HOLD_MS
    assert here.state.claim(a._replace(tick="")).elsewhere == {}


def test_jobs_and_projects_are_apart_and_no_marker_is_left(here: Clocked) -> None:
    here.state.claim(claim_of("a"))
    assert here.state.claim(claim_of("b", name="search|trending")).elsewhere == {}
    assert Clocked(here.log, "another").state.claim(claim_of("b")).elsewhere == {}
    assert [*here.log.read("p", START, END, 10)] == []


def test_a_job_of_which_nothing_is_left_is_forgotten(here: Clocked) -> None:
    field = "claim:trending|trending"
    here.state.claim(claim_of("a"))
    assert [*here.log.change("p", {field: None}, {}).state] == [field]
    here.state.end_claim(claim_of("a"), "failed")
    assert here.log.change("p", {field: None}, {}).state == {}


@pytest.mark.parametrize("wrong", [{"hold_ms": MAX_HOLD_MS + 1}, {"owner": ""}, {"regions": (None,)}])
def test_a_claim_out_of_its_bounds_is_refused(here: Clocked, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        here.state.claim(claim_of("a")._replace(**wrong))


@pytest.mark.parametrize("fault", ["drop-request", "drop-reply"])
def test_a_lost_answer_asked_for_again_is_the_same_claim(log: Log, fault: Any) -> None:
    cut = CutLog(log)
    here = Clocked(cut)  # type: ignore[arg-type]
    cut.faults = [fault]
    assert here.state.claim(claim_of("a", tick="tick:1")) == (here.now_ms, {}, "")
    assert sorted(here.state.claim(claim_of("b")).elsewhere) == ["DE", "US"]


def test_of_many_threads_exactly_one_gets_each_region(log: Log) -> None:
    winners: list[str] = []

    def claim_all(me: int) -> None:
        mine = Clocked(log)
        for n in range(20):
            claim = claim_of(f"store {me}", name=f"job {n}")
            elsewhere = mine.state.claim(claim).elsewhere
            winners.extend(f"{n} {region}" for region in claim.regions if region not in elsewhere)

    in_threads(claim_all, *[(me,) for me in range(6)])
    assert sorted(winners) == sorted(f"{n} {region}" for n in range(20) for region in ("US", "DE"))
