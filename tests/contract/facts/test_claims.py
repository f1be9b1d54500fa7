"""Claims in the state: what `quota.rules.claims` says, however many claim at once. They leave no marker in the log."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from quota.errors import UsageError
from quota.rules.claims import MAX_HOLD_MS, MAX_REGIONS
from quota.rules.entry import END, START
from support.claims import HOLD_MS, claim_of
from support.cut_log import CutLog
from support.states import Clocked

if TYPE_CHECKING:
    from quota.ledger.log import Log


@pytest.fixture
def here(log: Log) -> Clocked:
    return Clocked(log)


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


def test_a_thousand_regions_are_claimed_at_once(here: Clocked) -> None:
    regions = tuple(f"region {n}" for n in range(MAX_REGIONS))
    assert here.state.claim(claim_of("a", "", *regions, hold_ms=MAX_HOLD_MS)).elsewhere == {}
    assert sorted(here.state.claim(claim_of("b", "", *regions)).elsewhere) == sorted(regions)


@pytest.mark.parametrize("fault", ["drop-request", "drop-reply"])
def test_a_lost_answer_asked_for_again_is_the_same_claim(log: Log, fault: Any) -> None:
    cut = CutLog(log)
    here = Clocked(cut)  # type: ignore[arg-type]
    cut.faults = [fault]
    assert here.state.claim(claim_of("a", tick="tick:1")) == (here.now_ms, {}, "")
    assert sorted(here.state.claim(claim_of("b")).elsewhere) == ["DE", "US"]


def test_of_many_threads_exactly_one_gets_each_region(log: Log) -> None:
    threads, jobs = 6, 20
    barrier = threading.Barrier(threads)
    winners: list[str] = []

    def claim_all(me: int) -> None:
        mine = Clocked(log)
        barrier.wait()
        for n in range(jobs):
            claim = claim_of(f"store {me}", name=f"job {n}")
            elsewhere = mine.state.claim(claim).elsewhere
            winners.extend(f"{n} {region}" for region in claim.regions if region not in elsewhere)

    run_all([threading.Thread(target=claim_all, args=(me,)) for me in range(threads)])
    assert sorted(winners) == sorted(f"{n} {region}" for n in range(jobs) for region in ("US", "DE"))


def test_many_threads_renew_what_one_record_has_and_none_loses_its_own(log: Log) -> None:
    stores = [f"store {n}" for n in range(8)]
    barrier = threading.Barrier(len(stores))
    gone: list[str] = []

    def renew(store: str) -> None:
        mine = Clocked(log)
        barrier.wait()
        for _ in range(20):
            gone.extend(mine.state.claim(claim_of(store, "", store)).elsewhere)

    run_all([threading.Thread(target=renew, args=(store,)) for store in stores])
    assert gone == []
    answer = Clocked(log).state.claim(claim_of("late", "", *stores))
    assert {region: holder.owner for region, holder in answer.elsewhere.items()} == {store: store for store in stores}


def run_all(workers: list[threading.Thread]) -> None:
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
