"""Claims: each region of a job belongs to one store at a time, and each tick is run once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from quota.errors import UsageError
from quota.rules.claims import (
    MAX_HOLD_MS,
    MAX_REGIONS,
    MAX_TICK_MS,
    MAX_TICKS,
    Claim,
    Claimed,
    Ending,
    Record,
    checked_claim,
)
from quota.terms.limits import HOUR_MS, MINUTE_MS
from support.setup import HOLD_MS, LEASE_MS, claim_of

NOW_MS = 1_795_233_255_077


@dataclass
class Jobs:
    """The records of some jobs, as texts, and a clock."""

    now_ms: int = NOW_MS
    records: dict[str, str] = field(default_factory=dict)


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


def asked(jobs: Jobs, claim: Claim, *, take_over: bool = False) -> Claimed:
    record = Record(jobs.records.get(claim.name, ""), jobs.now_ms)
    claimed = record.claim(checked_claim(claim), take_over=take_over)
    store(jobs, claim, record)
    return claimed


def seen(answer: Claimed, region: str) -> tuple[str, str, int, int, bool]:
    holder = answer.elsewhere[region]
    return holder.owner, holder.host, holder.seen_ms, holder.until_ms, holder.running


def lost(jobs: Jobs, claim: Claim, *, take_over: bool = False) -> list[str]:
    return sorted(asked(jobs, claim, take_over=take_over).elsewhere)


def end(jobs: Jobs, claim: Claim, ending: Ending = "done") -> None:
    record = Record(jobs.records.get(claim.name, ""), jobs.now_ms)
    record.end(checked_claim(claim), ending)
    store(jobs, claim, record)


def store(jobs: Jobs, claim: Claim, record: Record) -> None:
    text = record.stored()
    if text is None:
        jobs.records.pop(claim.name, None)
    else:
        jobs.records[claim.name] = text


def test_free_regions_go_to_the_first_and_the_other_learns_whose_they_are(jobs: Jobs) -> None:
    a, b = claim_of("a"), claim_of("b")
    assert asked(jobs, a) == Claimed(jobs.now_ms, {})
    jobs.now_ms += MINUTE_MS
    answer = asked(jobs, b)
    assert sorted(answer.elsewhere) == ["DE", "US"]
    assert seen(answer, "DE") == ("a", "host of a", jobs.now_ms - MINUTE_MS, NOW_MS + HOLD_MS, True)
    end(jobs, a)
    answer = asked(jobs, b)
    assert seen(answer, "DE")[1:] == ("host of a", jobs.now_ms, jobs.now_ms + HOLD_MS, False)
    assert answer.elsewhere["DE"].regions == ("US", "DE")


def test_regions_stay_with_their_store_until_its_hold_lapses(jobs: Jobs) -> None:
    asked(jobs, claim_of("a"))
    jobs.now_ms += MINUTE_MS
    end(jobs, claim_of("a"))
    jobs.now_ms += HOLD_MS - 1
    assert lost(jobs, claim_of("b")) == ["DE", "US"]
    jobs.now_ms += 1
    assert lost(jobs, claim_of("b")) == []
    assert lost(jobs, claim_of("a", "next run of a")) == ["DE", "US"]


def test_a_store_that_gets_a_name_keeps_its_regions(jobs: Jobs) -> None:
    asked(jobs, claim_of("a"))
    jobs.now_ms += 1
    named = claim_of("named", "", "DE", machine=claim_of("a").machine)
    assert lost(jobs, named) == []
    holders = Record(jobs.records[named.name], jobs.now_ms).holders()
    assert [holder.running for holder in holders] == [False, True], "its run of before has lost the lock"


def test_a_silent_run_counts_as_running_until_its_lease_ends(jobs: Jobs) -> None:
    asked(jobs, claim_of("a"))
    for silent_ms, running in ((LEASE_MS - 1, True), (1, False)):
        jobs.now_ms += silent_ms
        assert asked(jobs, claim_of("b")).elsewhere["DE"].running is running


def test_two_hosts_with_one_store_never_run_at_once(jobs: Jobs) -> None:
    """The same name or a copied file."""
    asked(jobs, claim_of("a"))
    other = claim_of("a", "other run", machine="another machine")
    answer = asked(jobs, other)
    assert seen(answer, "US") == ("a", "host of a", jobs.now_ms, jobs.now_ms + LEASE_MS, True)
    jobs.now_ms += LEASE_MS - 1
    assert lost(jobs, claim_of("a")) == [], "it is alive, and says so"
    jobs.now_ms += 1
    assert lost(jobs, other) == ["DE", "US"]
    end(jobs, claim_of("a"))
    assert lost(jobs, other) == []
    assert lost(jobs, claim_of("a")) == ["DE", "US"]


def test_taking_over_takes_all_and_the_other_learns_it_at_its_next_page(jobs: Jobs) -> None:
    asked(jobs, claim_of("a", "", "US", "DE", "FR"))
    assert lost(jobs, claim_of("b", "", "US", "DE"), take_over=True) == []
    assert lost(jobs, claim_of("a", "", "US", "DE", "FR")) == ["DE", "US"]
    end(jobs, claim_of("a"))
    assert lost(jobs, claim_of("b", "", "US", "DE", "FR")) == ["FR"]


def test_the_end_of_a_run_that_was_replaced_changes_nothing(jobs: Jobs) -> None:
    asked(jobs, claim_of("a"))
    asked(jobs, claim_of("b"), take_over=True)
    for ending in ("done", "stopped", "failed"):
        end(jobs, claim_of("a"), ending)
    assert lost(jobs, claim_of("c")) == ["DE", "US"]
    assert asked(jobs, claim_of("c")).elsewhere["DE"].owner == "b"


def test_a_claim_dated_ahead_of_the_clock_is_dated_now(jobs: Jobs) -> None:
    """The ledger's clock was a year ahead: nothing stays closed for a year."""
    jobs.now_ms += 365 * 24 * HOUR_MS
    asked(jobs, claim_of("a", tick="tick:1"))
    end(jobs, claim_of("a"))
    jobs.now_ms = NOW_MS
    holder = asked(jobs, claim_of("b")).elsewhere["US"]
    assert (holder.seen_ms, holder.until_ms) == (NOW_MS, NOW_MS + HOLD_MS)
    jobs.now_ms += HOLD_MS
    assert lost(jobs, claim_of("b")) == []


def test_a_tick_is_run_once(jobs: Jobs) -> None:
    a, b = (claim_of("a", run, tick="tick:1", machine=f"machine {run}") for run in ("1", "2"))
    assert lost(jobs, a) == []
    assert lost(jobs, b) == ["DE", "US"]
    end(jobs, a)
    assert asked(jobs, b).tick == "done"
    jobs.now_ms += HOUR_MS
    assert asked(jobs, b).tick == "", "it is forgotten"


def test_a_tick_covers_each_region_once_where_its_store_is(jobs: Jobs) -> None:
    asked(jobs, claim_of("b", "", "DE"))
    a, b = (claim_of(store, tick="tick:1") for store in "ab")
    assert (lost(jobs, a), lost(jobs, b)) == (["DE"], ["US"])
    end(jobs, a)
    assert lost(jobs, claim_of("a", "next run of a", tick="tick:1")) == ["DE", "US"]
    assert lost(jobs, b) == ["US"], "its pages renew its claim"
    end(jobs, b)
    assert asked(jobs, a).tick == asked(jobs, b).tick == "done"


def test_a_tick_that_was_stopped_is_run_to_its_end(jobs: Jobs) -> None:
    for run in ("1", "2", "3"):
        assert asked(jobs, claim_of("a", run, tick="tick:1", machine=run)).tick == ""
        end(jobs, claim_of("a", run, tick="tick:1"), "stopped")
    assert asked(jobs, claim_of("a", "4", tick="tick:1")).tick == ""
    end(jobs, claim_of("a", "4", tick="tick:1"), "failed")
    assert asked(jobs, claim_of("a", "5", tick="tick:1")).tick == "done"


@pytest.mark.parametrize("regions", [("US",), None])
def test_a_tick_whose_run_was_killed_is_run_by_the_next(jobs: Jobs, regions: tuple[str, ...] | None) -> None:
    more = {"tick": "tick:1", "regions": regions or ()}
    asked(jobs, claim_of("a", "1", **more))
    elsewhere = claim_of("a", "2", **more, machine="another")
    assert (answer := asked(jobs, elsewhere)).tick == "running" or answer.elsewhere["US"].running
    assert asked(jobs, claim_of("a", "3", **more)).tick == "", "the lock on the machine says that run 1 is dead"
    jobs.now_ms += LEASE_MS
    assert asked(jobs, elsewhere) == Claimed(jobs.now_ms, {})


def test_a_thousand_ticks_are_remembered_and_of_more_those_that_end_last(jobs: Jobs) -> None:
    """However often a job runs, and for how long its ticks are remembered: the record is read with each page."""
    claims = [claim_of("a", tick=f"tick:{-n % 10_000}", tick_ms=HOUR_MS + n // 2) for n in range(MAX_TICKS + 3)]
    for claim in claims:
        end(jobs, claim)
    kept = [asked(jobs, claim_of("b", tick=claim.tick, regions=())).tick for claim in (*claims[:5], claims[-1])]
    assert kept == ["", "", "done", "", "done", "done"], "of 2 and 3, which end at once, the later name stays"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hold_ms": MAX_HOLD_MS + 1}, "how long a region stays"),
        ({"lease_ms": MAX_HOLD_MS + 1}, "how long a run may be silent"),
        ({"tick_ms": MAX_TICK_MS + 1}, "how long a tick is remembered"),
        ({"regions": tuple(map(str, range(MAX_REGIONS + 1)))}, "at most 1,000 are claimed at once"),
        ({"owner": ""}, "a claim needs a name, an owner and a run"),
        ({"regions": (None,)}, "is not a str"),
    ],
)
def test_a_claim_out_of_its_bounds_is_one_line(jobs: Jobs, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        asked(jobs, claim_of("a")._replace(**wrong))


def test_a_thousand_regions_are_claimed_at_once(jobs: Jobs) -> None:
    regions = tuple(f"region {n}" for n in range(MAX_REGIONS))
    assert lost(jobs, claim_of("a", "", *regions, hold_ms=MAX_HOLD_MS)) == []
    assert lost(jobs, claim_of("b", "", *regions)) == sorted(regions)


NAMES = ('a "quoted" \\ name', "東京", "a|b:{x}", "/\u2028", "x" * 64)


def test_claims_take_any_names(jobs: Jobs) -> None:
    for name in NAMES:
        claim = claim_of(name, name, *NAMES, name=name, tick=name, machine=name, host=name)
        assert asked(jobs, claim) == Claimed(jobs.now_ms, {})
        other = asked(jobs, claim._replace(owner="b", run="b", machine="b", tick=""))
        assert {region: holder[:2] for region, holder in other.elsewhere.items()} == dict.fromkeys(NAMES, (name, name))
        end(jobs, claim)
        assert asked(jobs, claim._replace(run="c")).tick == "done"


def test_a_record_begins_with_the_time_until_which_it_counts(jobs: Jobs) -> None:
    asked(jobs, claim_of("a", tick="tick:1"))
    assert jobs.records["trending|trending"].startswith(f"{NOW_MS + HOLD_MS} {{")
    end(jobs, claim_of("a", tick="tick:1", tick_ms=MAX_TICK_MS))
    assert jobs.records["trending|trending"].startswith(f"{NOW_MS + MAX_TICK_MS} {{")


@pytest.mark.parametrize(
    "nonsense", ["", "1 {", '5 {"runs":[{}],"ticks":{}}', '5 {"runs":[],"ticks":{"a":"b"}}', f"5 {'[' * 100_000}"]
)
def test_an_unreadable_record_is_replaced(jobs: Jobs, nonsense: str) -> None:
    jobs.records["trending|trending"] = nonsense
    assert lost(jobs, claim_of("a")) == []
    assert lost(jobs, claim_of("b")) == ["DE", "US"]
