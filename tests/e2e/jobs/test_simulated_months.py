"""Weeks and months through the real runner in seconds: the clock is an argument, upstream is in the same process.

By default some days around each of the year's clock changes, each change, each pacing and each ledger once;
QUOTA_TEST_DAYS=61 (`make soak`) takes two whole months, and every combination.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from quota.deciding.history import charges as charges_of
from quota.jobs.plan.simulation import RefusedTick, simulate
from quota.jobs.runner import RunOptions, run_job
from quota.jobs.ticks import ticks
from quota.rules.spent import Spent
from quota.settings.load import load_settings
from quota.terms.limits import DAY_MS, Calendar
from support.configurations import both_windows
from support.local import LocalSession
from support.losses import KINDS

DAYS = int(os.environ.get("QUOTA_TEST_DAYS", "3"))
PACIFIC = Calendar("day", "America/Los_Angeles")
CHANGES = {"march": datetime(2026, 3, 8, 10, tzinfo=UTC), "november": datetime(2026, 11, 1, 9, tzinfo=UTC)}

ALL = "QUOTA_TEST_DAYS" in os.environ

# Demand is much more than the budget: the searches alone would take 12,000 units a day, in `make soak` 32,000.
OFTEN = {"trending": "*/30 * * * *", "searches": "every 45m", "pages": 20}
if not ALL:
    OFTEN = {"trending": "0 */2 * * *", "searches": "every 2h", "pages": 6}
CONFIG = """
[ledger]
url = "{ledger}"
[jobs.trending]
fetch = "trending"
regions = ["US", "GB", "DE", "FR", "IN", "BR"]
pages = 4
schedule = "{trending}"
[jobs.searches]
fetch = "search"
regions = ["US", "GB", "DE", "FR", "IN"]
pages = 2
schedule = "{searches}"
stagger = "1m"
leave = 60
options = {{ words = "live" }}
[jobs.backfill]
fetch = "channels"
regions = ["US", "GB", "DE"]
pages = {pages}
schedule = "10 * * * *"
leave = 100
options = {{ ids = ["c1", "c2"] }}
[store]
url = "sqlite:///videos.db"
"""

COMBINATIONS = [
    pytest.param(change, pacing, ledger, id=f"{change}-{'paced' if pacing else 'unpaced'}-{ledger}")
    for change in CHANGES
    for pacing in (False, True)
    for ledger in KINDS
    if ALL or (change == "march") == pacing == (ledger != "sqlite")
]


@dataclass
class Months:
    """What happened: every charge, every refused tick, and how often each region of each job was completed."""

    start_ms: int
    until_ms: int
    charges: list[Spent]
    refusals: list[RefusedTick]
    passes: dict[str, dict[str, int]]

    def days(self) -> list[int]:
        edge_ms, days = PACIFIC.edges(self.start_ms)[1], []
        while (end_ms := PACIFIC.edges(edge_ms)[1]) <= self.until_ms:
            days.append(sum(charge.units for charge in self.charges if edge_ms <= charge.id[0] < end_ms))
            edge_ms = end_ms
        return days

    def most_in_24_hours(self) -> int:
        times, sums, most = [charge.id[0] for charge in self.charges], [0], 0
        for charge in self.charges:
            sums.append(sums[-1] + charge.units)
        for index, at_ms in enumerate(times):
            # Charges with at - 24 h < t <= at.
            most = max(most, sums[bisect_right(times, at_ms, lo=index)] - sums[bisect_right(times, at_ms - DAY_MS)])
        return most


def live(config: Path, start_ms: int, until_ms: int) -> Months:
    """Run every tick through `run_job`, as the scheduler would, at its time. Ledger and store are left as they end."""
    now_ms = start_ms
    refusals: list[RefusedTick] = []
    charges: list[Spent] = []
    settings = load_settings(config)
    passes = {job.name: dict.fromkeys(job.regions, 0) for job in settings.jobs.values()}

    def clock() -> int:
        return now_ms

    with LocalSession(settings, clock=clock) as session:
        read_ms = start_ms
        for tick in ticks(settings.jobs.values(), start_ms, until_ms):
            now_ms = tick.at_ms
            report = run_job(session, tick.job, RunOptions(tick=tick))
            assert report.outcome in ("done", "stopped"), report.why
            left = [region for region in report.regions if region.outcome != "done"]
            for region in report.regions:
                passes[tick.job][region.region] += region.outcome == "done"
            assert bool(left) == report.refused
            if report.refused:
                refusals.append(RefusedTick(tick.at_ms, tick.job, report.refused_by, len(left)))
            if now_ms - read_ms >= DAY_MS:  # the log forgets after two days
                charges += [charge for charge in charges_of(session.project(), read_ms) if charge.id[0] < now_ms]
                read_ms = now_ms
        charges += charges_of(session.project(), read_ms)
    return Months(start_ms, until_ms, charges, refusals, passes)


def without_limit(refusal: RefusedTick) -> RefusedTick:
    """Which of several full limits a refusal names is left out: the simulation asks only when the answer may be new."""
    return refusal._replace(limit=None)


@pytest.mark.parametrize(("change", "pacing", "ledger_url"), COMBINATIONS, indirect=["ledger_url"])
@pytest.mark.timeout(120 + 30 * DAYS)
def test_months_keep_the_limits_waste_nothing_and_go_as_foreseen(
    change: str, pacing: bool, ledger_url: str, state_dir: Path, tmp_path: Path
) -> None:
    config = tmp_path / "quota.toml"
    config.write_text(both_windows(9_500, pacing=pacing) + CONFIG.format(ledger=ledger_url, **OFTEN))
    middle_ms = int(CHANGES[change].timestamp() * 1000)
    start_ms = PACIFIC.edges(middle_ms - DAYS * DAY_MS // 2)[0]
    until_ms = start_ms + DAYS * DAY_MS
    months = live(config, start_ms, until_ms)

    days = months.days()
    assert max(days) <= 9_500
    assert months.most_in_24_hours() <= 9_500
    assert sum(days) >= 0.98 * 9_500 * len(days), days
    for job, passes in months.passes.items():
        assert max(passes.values()) - min(passes.values()) <= 1, (job, passes)
        assert min(passes.values()) > 0

    settings = load_settings(config)
    foreseen = simulate(settings, start_ms, until_ms)
    assert [without_limit(refusal) for refusal in foreseen.refusals] == [without_limit(x) for x in months.refusals]
    assert {name: job.passes for name, job in foreseen.jobs.items()} == months.passes
    assert sum(sum(x.units.values()) for x in foreseen.spent) == sum(charge.units for charge in months.charges)
