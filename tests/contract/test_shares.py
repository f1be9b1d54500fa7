"""A limit that each job has for itself: `per = "job"`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import quota
from quota.errors import CostExceedsLimit, UsageError
from quota.reports.status import read_status
from quota.terms.limits import HOUR_MS, Calendar, Limit, Selector, Sliding, View
from support.setup import limit

if TYPE_CHECKING:
    from pathlib import Path

    from support.setup import Setup

SHARE = Limit("share", 3, View(Selector(buckets=("units",)), Sliding(HOUR_MS)), 3, 0, per_job=True)
TWO_KEYS = """
[ledger]
url = "sqlite:///ledger.db"
[credentials.b]
api = "youtube-v3"
project = "p"
[credentials.a]
api = "youtube-v3"
project = "p"
[[credentials.a.limits]]
name = "day"
units = 4
window = "24h"
[[credentials.a.limits]]
name = "share"
units = 3
window = "1h"
per = "job"
[jobs]
trending = { fetch = "trending", credential = "a", regions = ["US"], leave = { day = 2 } }
search = { fetch = "trending", credential = "b", regions = ["FR"] }
"""
JOBS = {"trending": {}, "search": {}}  # type: ignore[var-annotated]


def test_each_job_has_the_number_for_itself_whether_it_is_configured_or_not(setup: Setup) -> None:
    budget = setup.budget(limit(500), SHARE, leave=JOBS)
    for job in ("trending", "search", "nightly"):
        decisions = [budget.charge("videos.list", job=job) for _ in range(4)]
        assert [one.admitted for one in decisions] == [True, True, True, False]
        assert decisions[-1].refused_by == f"share:{job}"
        assert decisions[-1].retry_at_ms == setup.now_ms + HOUR_MS
    assert {one.name: one.used_units for one in budget.usage()} == {"day": 9, "share:trending": 3, "share:search": 3}


def test_a_call_without_a_job_is_counted_by_the_other_limits_alone(setup: Setup) -> None:
    budget = setup.budget(limit(5), SHARE, leave=JOBS)
    assert [budget.charge("videos.list").admitted for _ in range(6)] == [True] * 5 + [False]


def test_calls_of_one_job_that_leave_together_share_it(setup: Setup) -> None:
    budget = setup.budget(limit(500), SHARE)
    assert budget.charge_many(["videos.list", "videos.list"], job="a")[0].admitted
    assert budget.charge_many(["videos.list", "videos.list"], job="a")[0].refused_by == "share:a"
    assert budget.charge_many(["videos.list", "videos.list"], job="b")[0].admitted
    with pytest.raises(CostExceedsLimit, match="limit 'share:a' of credential 'main' holds 3"):
        budget.charge("search.list", job="a")


def test_another_budget_with_the_limit_by_name_counts_the_same_charges(setup: Setup) -> None:
    every, named = setup.budget(limit(500), SHARE), setup.budget(limit(3, HOUR_MS, name="mine", jobs=("a",)))
    assert all(every.charge("videos.list", job="a").admitted for _ in range(2))
    assert [named.charge("videos.list", job="a").admitted for _ in range(2)] == [True, False]
    assert every.charge("videos.list", job="a").refused_by == "share:a"


def test_credentials_of_one_project_have_the_shares_and_leave_what_jobs_of_either_leave(tmp_path: Path) -> None:
    """The metrics of the project are those of whichever credential was asked."""
    (tmp_path / "quota.toml").write_text(TWO_KEYS, encoding="utf-8")
    with quota.open(tmp_path / "quota.toml") as session:
        assert session.budget("b").charge("videos.list", job="trending").admitted
        assert session.budget("a").charge("videos.list", units=2, job="trending").refused_by == "day"
        sets = [
            {one.limit.name: one.state.used_units for one in row.limits} for row in read_status(session).credentials
        ]
        assert sets == [{"day": 1, "share:trending": 1, "share:search": 0}] * 2
        assert session.budget("b").charge("videos.list", units=2, job="trending").refused_by == "day"


def test_a_paced_share_is_paced(setup: Setup) -> None:
    day = Limit("share", 80, View(Selector(("units",)), Calendar("day", "UTC")), 80, 0, paced=True, per_job=True)
    start_ms = setup.now_ms = day.view.window.edges(setup.now_ms)[0]  # type: ignore[union-attr]
    budget = setup.budget(limit(500), day)
    assert sum(budget.charge("videos.list", job="a").admitted for _ in range(20)) == 10
    assert sum(budget.charge("videos.list", job="b").admitted for _ in range(20)) == 10
    setup.now_ms = start_ms + 12 * HOUR_MS
    assert sum(budget.charge("videos.list", job="a").admitted for _ in range(80)) == 40


def test_a_share_cannot_select_jobs() -> None:
    with pytest.raises(UsageError, match="is for each job, so it cannot select jobs"):
        quota.Limit("share", 3, View(Selector(jobs=("a",)), Sliding(HOUR_MS)), 3, 0, per_job=True)


@pytest.mark.parametrize("names", [("day", "day"), ("share:a", "share"), ("share", "share:a")])
def test_no_limit_has_the_name_of_another_one_or_of_a_jobs_share_of_it(setup: Setup, names: tuple[str, str]) -> None:
    limits = [SHARE if name == "share" else limit(500, name=name) for name in names]
    twice = next(name for name in reversed(names) if name != "share")
    with pytest.raises(UsageError, match=f"limits: '{twice}' is the name of two; give each a name of its own"):
        setup.budget(*limits)
