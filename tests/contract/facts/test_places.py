"""Places: where a job stands in its regions lies beside its claims, and only their holder changes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from quota.errors import UsageError
from quota.ledger.log import Log
from quota.rules.claims import MAX_PLACE_BYTES, MAX_REGIONS, PLACE_KEPT_MS, Claim, Claimed
from quota.rules.entry import END, START
from support.cut_log import CutLog
from support.setup import HOLD_MS, LEASE_MS, Clocked, claim_of

NAME = "work|trending"


def keep(here: Clocked, claim: Claim, **places: str) -> list[str]:
    """Returns the regions that are the run's no more."""
    return sorted(here.state.keep_places(claim, NAME, places).elsewhere)


def kept(here: Clocked, *regions: str, name: str = NAME) -> Mapping[str, str]:
    return here.state.places(name, regions or ("US", "DE"))


def test_a_run_keeps_the_places_of_its_regions_and_the_next_one_reads_them(here: Clocked) -> None:
    a = claim_of("a")
    here.state.claim(a)
    assert kept(here) == {}
    assert keep(here, a, US="page 1") == []
    assert keep(here, a, US='page 2 \n{"é": null}', DE="") == []
    here.state.end_claim(a, "done")
    assert kept(here) == {"US": 'page 2 \n{"é": null}', "DE": ""}
    assert kept(here, name="other work|trending") == {}
    assert kept(here, "US") == {"US": 'page 2 \n{"é": null}'}


def test_a_place_is_kept_in_the_step_that_renews_the_claim(here: Clocked) -> None:
    a = claim_of("a")
    here.state.claim(a)
    for _ in range(3):
        here.now_ms += HOLD_MS - 1
        assert keep(here, a, US="here") == []
    assert sorted(here.state.claim(claim_of("b")).elsewhere) == ["DE", "US"]


LATER: dict[str, Any] = {
    "taken over by hand": lambda here: here.state.claim(claim_of("b"), take_over=True),
    "its lease over, a run of the same store": lambda here: here.state.claim(claim_of("a", "second", machine="other")),
    "its hold over": lambda here: here.state.claim(claim_of("b")),
    "dead, by its lock": lambda here: here.state.claim(claim_of("a", "second")),
}


@pytest.mark.parametrize("how", LATER)
@pytest.mark.parametrize("and_then", ["runs on", "has ended", "has failed", "its hold is over"])
def test_a_run_that_lost_a_region_changes_its_place_no_more(here: Clocked, how: str, and_then: str) -> None:
    """Even if nobody has the region any longer, the late run must claim it anew."""
    late = claim_of("a")
    here.state.claim(late)
    keep(here, late, US="late 1", DE="late 1")
    here.now_ms += HOLD_MS if how == "its hold over" else LEASE_MS
    answer: Claimed = LATER[how](here)
    assert not answer.elsewhere
    following = claim_of("b") if "by hand" in how or "hold" in how else claim_of("a", "second")
    assert keep(here, following, US="following") == []
    if and_then in ("has ended", "has failed"):
        here.state.end_claim(following, "failed" if and_then == "has failed" else "done")
    elif and_then == "its hold is over":
        here.now_ms += HOLD_MS
    assert keep(here, late, US="late 2", DE="late 2") == ["DE", "US"]
    assert kept(here) == {"US": "following", "DE": "late 1"}
    assert keep(here, late, US="late 3") == ["DE", "US"], "to ask again gives nothing back"
    if and_then == "runs on":
        assert keep(here, following, US="following 2") == []


def test_a_run_keeps_the_places_of_regions_that_it_still_has_until_it_has_ended(here: Clocked) -> None:
    a = claim_of("a")
    here.state.claim(a)
    here.state.claim(claim_of("b", "", "DE"), take_over=True)
    assert keep(here, a, US="a", DE="a") == ["DE"]
    here.state.end_claim(a, "done")
    assert keep(here, a, US="after the end") == ["DE", "US"]
    assert kept(here) == {"US": "a"}


@pytest.mark.parametrize("size", [MAX_PLACE_BYTES, MAX_PLACE_BYTES + 1])
def test_a_place_is_bounded(here: Clocked, size: int) -> None:
    a = claim_of("a")
    here.state.claim(a)
    place = "é" * (size // 2) + "x" * (size % 2)
    if size > MAX_PLACE_BYTES:
        with pytest.raises(UsageError, match="a place of 70,001 bytes: a ledger keeps at most 70,000 of a region"):
            keep(here, a, US=place)
        return
    assert keep(here, a, US=place) == []
    assert kept(here) == {"US": place}


def test_a_place_is_only_of_a_region_that_the_claim_names(here: Clocked) -> None:
    here.state.claim(claim_of("a"))
    with pytest.raises(UsageError, match="region 'FR': claim a region before you keep its place"):
        keep(here, claim_of("a"), FR="x")
    with pytest.raises(UsageError, match="the places of at most 1,000 are read at once"):
        kept(here, *map(str, range(MAX_REGIONS + 1)))


def test_a_place_is_forgotten_after_35_days_and_not_before(here: Clocked) -> None:
    a = claim_of("a")
    here.state.claim(a)
    keep(here, a, US="old", DE="old")
    for _ in range(4):
        here.now_ms += PLACE_KEPT_MS // 4 - 1
        here.state.claim(a)
        keep(here, a, DE="new")
    assert kept(here) == {"US": "old", "DE": "new"}
    here.now_ms += 4
    assert kept(here) == {"DE": "new"}


def test_jobs_and_projects_are_apart_and_no_marker_is_left(here: Clocked) -> None:
    here.state.claim(claim_of("a"))
    assert here.state.claim(claim_of("b", name="search|trending")).elsewhere == {}
    assert Clocked(here.log, "another").state.claim(claim_of("b")).elsewhere == {}
    assert [*here.log.read("p", START, END, 10)] == []


def test_a_job_without_regions_or_ticks_is_forgotten(here: Clocked) -> None:
    field = "claim:trending|trending"
    here.state.claim(claim_of("a"))
    assert [*here.log.change("p", {field: None}, {}).state] == [field]
    here.state.end_claim(claim_of("a"), "failed")
    assert here.log.change("p", {field: None}, {}).state == {}


@pytest.mark.parametrize("fault", ["drop-request", "drop-reply"])
def test_a_lost_answer_asked_for_again_is_the_same_claim(log: Log, fault: Any) -> None:
    cut = CutLog(log)
    here = Clocked(cut)  # type: ignore[arg-type]
    cut.faults = [fault]
    assert here.state.claim(claim_of("a", tick="tick:1")) == (here.now_ms, {}, "")
    assert sorted(here.state.claim(claim_of("b")).elsewhere) == ["DE", "US"]
