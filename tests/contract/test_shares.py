"""A limit that each job has for itself (`per = "job"`), and a limit that counts and never refuses (`shadow = true`)."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import quota
from quota.errors import CostExceedsLimit, UsageError
from quota.reports.metrics import exposition, of_sums
from quota.reports.spending import read_spending, read_sums
from quota.reports.status import read_status
from quota.session import Session
from quota.settings.lint import lint
from quota.settings.load import given_settings
from quota.terms.limits import DAY_MS, HOUR_MS, Calendar, Limit, Selector, Sliding, View, of_jobs
from support.setup import Setup, limit, state_at

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
limits = [
    { name = "day", units = 4, window = "24h" },
    { name = "share", units = 3, window = "1h", per = "job" },
]
[jobs]
trending = { fetch = "trending", credential = "a", regions = ["US"], leave = { day = 2 } }
search = { fetch = "trending", credential = "b", regions = ["FR"] }
"""
JOBS = {"trending": {}, "search": {}}  # type: ignore[var-annotated]


def test_each_job_has_the_number_for_itself_whether_it_is_configured_or_not(setup: Setup) -> None:
    budget = setup.budget(limit(500), SHARE, leave=JOBS)
    for job in ("trending", "search", "nightly"):
        decisions = [budget.charge("videos.list", job=job) for _ in range(4)]
        assert [each.admitted for each in decisions] == [True, True, True, False]
        assert decisions[-1].refused_by == f"share:{job}"
        assert decisions[-1].retry_at_ms == setup.now_ms + HOUR_MS
    assert {each.name: each.used_units for each in budget.usage()} == {"day": 9, "share:trending": 3, "share:search": 3}


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


def test_shares_and_leave_hold_for_all_credentials_of_a_project(tmp_path: Path) -> None:
    """The metrics of the project are those of whichever credential was asked."""
    (tmp_path / "quota.toml").write_text(TWO_KEYS, encoding="utf-8")
    with quota.open(tmp_path / "quota.toml") as session:
        assert session.budget("b").charge("videos.list", job="trending").admitted
        assert session.budget("a").charge("videos.list", units=2, job="trending").refused_by == "day"
        sets = [
            {each.limit.name: each.state.used_units for each in row.limits} for row in read_status(session).credentials
        ]
        assert sets == [{"day": 1, "share:trending": 1, "share:search": 0}] * 2
        assert session.budget("b").charge("videos.list", units=2, job="trending").refused_by == "day"


def test_the_share_of_a_job_is_paced_and_a_shadow_as_the_limit_says() -> None:
    view = View(Selector(("units",)), Calendar("day", "UTC"))
    [share] = of_jobs((Limit("share", 80, view, 80, 0, paced=True, per_job=True, shadow=True),), ("a",))
    assert (share.name, share.paced, share.shadow) == ("share:a", True, True)


def test_a_share_cannot_select_jobs() -> None:
    with pytest.raises(UsageError, match="is for each job, so it cannot select jobs"):
        quota.Limit("share", 3, View(Selector(jobs=("a",)), Sliding(HOUR_MS)), 3, 0, per_job=True)


@pytest.mark.parametrize("names", [("day", "day"), ("share:a", "share"), ("share", "share:a")])
def test_no_limit_has_the_name_of_another_one_or_of_a_jobs_share_of_it(setup: Setup, names: tuple[str, str]) -> None:
    limits = [SHARE if name == "share" else limit(500, name=name) for name in names]
    twice = next(name for name in reversed(names) if name != "share")
    with pytest.raises(UsageError, match=f"limits: '{twice}' is the name of two; give each a name of its own"):
        setup.budget(*limits)


def shadow(units: int, window_ms: int = DAY_MS, **fields: Any) -> Limit:
    return replace(limit(units, window_ms, **{"name": "trial", **fields}), shadow=True)


def test_a_shadow_limit_counts_beyond_its_number_and_refuses_nothing(setup: Setup) -> None:
    budget = setup.budget(limit(5), shadow(3, HOUR_MS))
    decisions = [budget.charge("videos.list") for _ in range(6)]
    assert [each.admitted for each in decisions] == [True] * 5 + [False]
    assert [each.would_refuse for each in decisions[:5]] == [(), (), (), ("trial",), ("trial",)]
    assert [state.limit_units for state in decisions[4].limits] == [5, 3]
    assert [state.used_units for state in decisions[4].limits] == [5, 5]
    assert decisions[4].remaining_units == 0, "of the limit that refuses"
    assert decisions[5].refused_by == "day"
    assert decisions[5].retry_at_ms == setup.now_ms + DAY_MS, "no shadow delays a call"


def test_a_peek_shows_what_a_shadow_limit_would_refuse(setup: Setup) -> None:
    budget = setup.budget(limit(500), shadow(2))
    assert budget.peek("videos.list").would_refuse == ()
    budget.charge("videos.list", units=2)
    peeked = budget.peek("videos.list")
    assert (peeked.admitted, peeked.would_refuse, peeked.remaining_units) == (True, ("trial",), 498)
    assert "limit 'trial' would refuse it" in peeked.sentence()
    assert peeked.as_json()["limits"][1]["would_refuse"] is True  # type: ignore[index]


def test_status_spend_metrics_and_log_show_a_shadow_refusal(
    ledger_url: str, state_dir: Path, setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "quota")
    limits = [
        {"name": "day", "units": 5, "window": "24h"},
        {"name": "trial", "units": 3, "window": "24h", "jobs": ["nightly"], "shadow": True},
    ]
    tables = {"ledger": {"url": ledger_url}, "credentials": {"main": {"api": "youtube-v3", "limits": limits}}}
    with Session(given_settings(tables), clock=lambda: setup.now_ms) as session:
        budget = session.budget()
        for _ in range(7):
            budget.charge("videos.list", job="nightly")
        row = read_status(session).as_json()["credentials"][0]["limits"][1]  # type: ignore[index]
        assert (row["shadow"], row["would_refuse"], row["used_units"]) == (True, True, 5)
        lines = [record.getMessage() for record in caplog.records if "would_refuse" in record.getMessage()]
        assert lines == ["would_refuse project=main limit=trial method=videos.list job=nightly"] * 2
        ledger = session.ledger
        budget.hand_over_refusals()
        spending = read_spending([session.project()], "job", 0)
        assert [(each.limit, each.job, each.calls) for each in spending.would_refuse] == [("trial", "nightly", 2)]
        assert [(each.limit, each.calls) for each in spending.refused] == [("day", 2)]
        assert json.loads(json.dumps(spending.as_json()))["would_refuse"][0]["calls"] == 2
        text = exposition(of_sums("main", *read_sums(session.project())))
        assert 'quota_would_refuse_total{limit="trial",project="main",quota_job="nightly"} 2' in text
        assert 'reason="shadow"' not in text
        assert len(state_at(ledger, "main").refusals().newest) == 2, "a call that left is not kept as refused"


def test_a_shadow_alone_protects_nothing(state_dir: Path) -> None:
    limits = [{"name": "trial", "units": 3, "window": "24h", "shadow": True}]
    findings = lint(given_settings({"credentials": {"main": {"api": "youtube-v3", "limits": limits}}}))
    assert any(finding.level != "ok" and "no limit counts" in finding.message for finding in findings)
