"""Clocks that are wrong by hours: no single one of them frees budget."""

from __future__ import annotations

import pytest

from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS
from support.losses import Site
from support.setup import charges_at, limit

TEN = limit(10)


@pytest.mark.parametrize("ahead_ms", [3 * HOUR_MS, 2 * DAY_MS])
def test_a_machine_whose_clock_is_ahead_counts_what_the_others_count(site: Site, ahead_ms: int) -> None:
    site.machine("theirs").budget(TEN).charge("videos.list", units=10)
    machine = site.machine()
    machine.skew_ms = ahead_ms
    decision = machine.budget(TEN).charge("videos.list")
    assert (decision.reason, decision.limits[0].used_units) == ("limit", 10)


@pytest.mark.parametrize("behind_ms", [2 * HOUR_MS, 2 * DAY_MS])
def test_a_machine_hours_behind_the_ledger_charges_nothing(site: Site, behind_ms: int) -> None:
    """Or the ledger's is ahead: that of this machine does not say which."""
    machine = site.machine()
    machine.skew_ms = -behind_ms
    assert machine.budget(TEN).charge("videos.list").reason == "clock"
    assert charges_at(machine.ledger) == []


def test_windows_end_later_for_a_machine_minutes_behind(site: Site) -> None:
    ours, theirs = site.machine("ours"), site.machine("theirs")
    theirs.budget(TEN).charge("videos.list", units=10)
    ours.skew_ms = -10 * MINUTE_MS
    site.now_ms += DAY_MS
    assert not ours.budget(TEN).peek("videos.list").admitted
    assert theirs.budget(TEN).peek("videos.list").admitted
    site.now_ms += 10 * MINUTE_MS
    assert ours.budget(TEN).peek("videos.list").admitted


@pytest.mark.parametrize("lost", [False, True], ids=["the log stays", "the log is lost"])
def test_a_charge_counts_again_after_clocks_were_a_day_ahead(site: Site, lost: bool) -> None:
    """What was charged meanwhile counts beside it."""
    machine = site.machine()
    budget = machine.budget(TEN)
    budget.charge("videos.list", units=4)
    site.now_ms += DAY_MS
    assert budget.charge("videos.list", units=3).limits[0].used_units == 3
    site.now_ms -= DAY_MS - MINUTE_MS
    if lost:
        site.empty()
        budget = machine.budget(TEN)
    decision = budget.charge("videos.list", units=4)
    assert (decision.reason, decision.limits[0].used_units) == ("limit", 7)
    site.now_ms += DAY_MS - MINUTE_MS
    assert budget.charge("videos.list", units=4).admitted


@pytest.mark.parametrize("off_ms", [3 * DAY_MS, -30 * HOUR_MS, -365 * DAY_MS])
def test_charges_that_a_ledger_lost_count_though_its_clock_was_wrong_meanwhile(site: Site, off_ms: int) -> None:
    machine = site.machine()
    machine.budget(TEN).charge("videos.list", units=10)
    site.empty()
    site.now_ms, machine.skew_ms = site.now_ms + off_ms, -off_ms
    budget = machine.budget(TEN)
    assert not budget.charge("videos.list").admitted
    site.now_ms, machine.skew_ms = site.now_ms - off_ms + MINUTE_MS, 0
    for asked in (budget, machine.budget(TEN)):
        decision = asked.charge("videos.list")
        assert (decision.reason, decision.limits[0].used_units) == ("limit", 10)
