"""A log does not grow with the history: what has left every window leaves the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quota.budget import project_of
from quota.rules.entry import END, START
from quota.terms.limits import DAY_MS, HOUR_MS
from support.setup import limit

if TYPE_CHECKING:
    from support.setup import Setup


def test_processes_of_one_charge_each_keep_the_log_short(setup: Setup) -> None:
    """As cron starts them: the longest window and 25 h stay."""
    for _ in range(100):
        budget = setup.budget(limit(500))
        assert budget.charge("videos.list").admitted
        project_of(budget).close()
        setup.now_ms += HOUR_MS
    kept = setup.ledger.read(setup.project, START, END, 1_000)
    assert len(kept) == 50
    assert kept[0].id[0] > setup.now_ms - 2 * DAY_MS - 3 * HOUR_MS
    assert len(setup.ledger.past(setup.project, START, END, 1_000)) == 50
