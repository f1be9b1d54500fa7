"""`quota reconcile` against an emulated provider: it tightens where upstream knows more, and frees nothing."""

from __future__ import annotations

import random

import pytest
from rich.console import Console

from quota.cli.output import render_parts
from quota.cli.reconcile import notices_of, reconciled_parts
from quota.reports.status import read_status
from quota.rules.facts import Compared, Exhaustion
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS, Calendar
from support.losses import KINDS
from support.reconciling import Site

each_ledger = pytest.mark.parametrize("site", KINDS, indirect=True)

PACIFIC = Calendar("day", "America/Los_Angeles")


@each_ledger
def test_units_of_others_count_until_upstreams_period_ends(site: Site) -> None:
    """Also in a limit over 24 hours: nobody knows when they spent it."""
    site.call("videos.list", 20)
    site.call("search.list", 12, charged=False, key="another-key")
    result = site.reconcile(after_ms=HOUR_MS)
    midnight_ms = PACIFIC.edges(site.now_ms)[1]
    assert [(row.limit, row.units, row.until_ms) for row in result.others] == [
        ("day", 1_200, midnight_ms),
        ("pacific-day", 1_200, midnight_ms),
    ]
    assert result.buckets[0].methods[0].method == "search.list"
    site.now_ms = midnight_ms - 1
    assert site.used() == {"day": 1_220, "pacific-day": 1_220}
    site.now_ms = midnight_ms
    assert site.used() == {"day": 20, "pacific-day": 0}


def test_units_of_others_from_the_last_period_are_shown_only(site: Site) -> None:
    site.call("search.list", 3, charged=False)
    site.now_ms = PACIFIC.edges(site.now_ms)[1] + 5 * MINUTE_MS
    site.call("videos.list", 1)
    site.call("videos.list", 7, charged=False)
    result = site.reconcile(after_ms=30 * MINUTE_MS)
    assert [count.unknown_units for count in result.buckets] == [7, 300]
    assert site.used() == {"day": 8, "pacific-day": 8}
    assert not site.reconcile().changed


def test_the_buckets_of_the_newer_allocation_are_compared_one_by_one(site: Site) -> None:
    site.emulate(allocation="buckets")
    site.configure(api="youtube-v3-buckets")
    site.call("search.list", 3)
    site.call("search.list", 2, charged=False)
    site.call("videos.list", 4, charged=False)
    result = site.reconcile(after_ms=HOUR_MS)
    counts = {count.bucket: (count.upstream_units, count.our_units, count.unknown_units) for count in result.buckets}
    assert counts["search"] == (5, 3, 2)
    assert counts["units"] == (4, 0, 4)
    used = site.used()
    assert (used["search-day"], used["search-pacific-day"], used["day"], used["uploads-day"]) == (5, 5, 4, 0)


def test_a_book_with_one_pool_names_buckets_that_upstream_counts_apart(site: Site) -> None:
    """Upstream has given searches a pool of their own. Our book charges them 100 units each, which is too much."""
    site.emulate(allocation="buckets")
    site.call("search.list", 3)
    result = site.reconcile(after_ms=HOUR_MS)
    assert [(count.bucket, count.upstream_units, count.our_units) for count in result.apart] == [("search", 3, 3)]
    assert [count.drift_units for count in result.buckets if count.bucket == "units"] == [300]
    assert not result.changed


def test_a_smaller_quota_lowers_the_limits_until_it_is_raised_again(site: Site) -> None:
    site.emulate(quota=800)
    site.call("search.list", 2)
    result = site.reconcile(after_ms=HOUR_MS)
    assert [(row.limit, row.limit_units, row.granted_units) for row in result.lowered] == [
        ("day", 300, 800),
        ("pacific-day", 300, 800),
    ]
    with site.session() as session:
        assert session.budget().charge("search.list").admitted
        refused = session.budget().charge("search.list")
        assert (refused.reason, refused.limits[0].limit_units) == ("limit", 300)
    believed_until_ms = result.lowered[0].until_ms
    again = site.reconcile(after_ms=HOUR_MS)
    assert (again.changed, again.lowered[0].until_ms) == (False, believed_until_ms)
    again = site.reconcile(after_ms=DAY_MS)
    assert (again.changed, again.lowered[0].until_ms) == (True, believed_until_ms + DAY_MS + HOUR_MS)
    assert (result.tightened, again.tightened, again.lifted) == (True, False, ())
    site.upstream = None
    site.emulate(quota=10_000)
    site.configure()
    result = site.reconcile()
    assert (result.lowered, result.changed) == ((), True)
    assert (result.tightened, result.lifted) == (False, ("day", "pacific-day"))
    console = Console(width=100)
    with console.capture() as capture:
        console.print(render_parts(reconciled_parts(result, dry_run=False)))
    *_, sentence, last = capture.get().splitlines()
    assert (sentence, last) == ("pacific-day: is lifted: upstream grants more than it did", "lifted")
    assert site.session().budget().charge("search.list").admitted


def test_a_grant_of_nothing_closes_every_call_until_it_is_raised(site: Site) -> None:
    site.emulate(quota=0)
    site.reconcile()
    with site.session() as session:
        refused = session.budget().charge("videos.list")
        assert (refused.reason, refused.retry_at_ms) == ("closed", None)
        (row,) = read_status(session).credentials
        assert (row.open, {limit.shut for limit in row.limits}) == (False, {True})


def test_an_unexplained_exhaustion_is_reported(site: Site) -> None:
    site.emulate(quota=10_000)
    site.call("videos.list", 11)
    with site.session() as session:
        exhaustion = Exhaustion("units", site.now_ms, PACIFIC.edges(site.now_ms)[1], "quotaExceeded", "here")
        session.project().state.exhaust(exhaustion)
        (row,) = read_status(session).credentials
        assert [(early.bucket, early.used_units, early.quota_units) for early in row.early] == [("units", 11, 10_000)]
        assert read_status(session).as_json()["credentials"][0]["exhausted"][0]["early"] is True  # type: ignore[index]
    site.call("search.list", 97, charged=False)
    site.reconcile(after_ms=HOUR_MS)
    with site.session() as session:
        (row,) = read_status(session).credentials
        assert row.early == ()


@each_ledger
@pytest.mark.parametrize("seed", range(2))
def test_random_days_never_count_less_than_upstream_has_counted(site: Site, seed: int) -> None:
    """Charges, calls of somebody else, losses and reconciliations in any order. An hour after the last reconciliation
    no view counts less than what upstream counted by then, and none more than twice what was lost besides."""
    pick = random.Random(seed)
    foreign = lost = 0
    for _ in range(12):
        step = pick.choice(["ours", "theirs", "reconcile", "empty"])
        if step == "ours":
            site.call(pick.choice(["videos.list", "search.list"]), pick.randint(1, 4))
        elif step == "theirs":
            times = pick.randint(1, 4)
            site.call("search.list", times, charged=False)
            foreign += 100 * times
        elif step == "reconcile":
            site.reconcile()
        elif pick.random() < 0.5:
            lost += site.used()["day"]
            site.empty_ledger()
        site.now_ms += pick.choice([MINUTE_MS, 20 * MINUTE_MS, 40 * MINUTE_MS])
    site.now_ms += HOUR_MS
    before = site.used()
    result = site.reconcile()
    after = site.used()
    (count,) = result.buckets
    assert after["pacific-day"] >= count.upstream_units
    assert after["day"] >= count.upstream_units
    assert all(after[name] >= before[name] for name in before)
    assert after["pacific-day"] <= count.upstream_units + lost


@each_ledger
def test_the_last_comparison_of_each_bucket_is_kept_with_its_time(site: Site) -> None:
    with site.session() as session:
        for _ in range(3):
            assert session.budget().charge("search.list").admitted, "and nothing is sent"
    site.call("videos.list", 100)
    first_ms = site.now_ms = site.now_ms + HOUR_MS
    assert site.reconcile(commit=False).buckets[0].drift_units == 300

    def compared() -> list[Compared]:
        with site.session() as session:
            return list(session.project().state.facts().compared)

    assert compared() == [], "a dry run leaves nothing"
    result = site.reconcile()
    assert [(each.bucket, each.upstream_units, each.drift_units, each.at_ms) for each in compared()] == [
        ("units", 100, 300, first_ms)
    ]
    (notice,) = notices_of(result)
    assert (notice.event, notice.facts["drift_units"], notice.once_ms) == ("drift", 300, DAY_MS)
    assert "300 units charged since" in notice.message
    site.now_ms = PACIFIC.edges(site.now_ms)[1] + HOUR_MS
    result = site.reconcile()
    assert [(each.upstream_units, each.drift_units, each.at_ms) for each in compared()] == [(0, 0, site.now_ms)]
    assert [each.subject for each in notices_of(result)] == [notice.subject], "of yesterday, and told already"


def test_a_difference_of_a_few_calls_sends_no_alert(site: Site) -> None:
    with site.session() as session:
        assert all(session.budget().charge("videos.list").admitted for _ in range(5))
    site.call("videos.list", 100)
    result = site.reconcile(after_ms=HOUR_MS)
    assert (result.buckets[0].drift_units, list(notices_of(result))) == (5, [])
