"""A limit with `shadow = true` counts and reports, and never refuses."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from quota.reports.metrics import exposition, of_sums
from quota.reports.spending import read_spending, read_sums
from quota.session import Session
from quota.settings.load import given_settings
from quota.terms.limits import DAY_MS, HOUR_MS, Calendar, Limit, Selector, View
from support.setup import limit, state_at

if TYPE_CHECKING:
    from pathlib import Path

    from support.setup import Setup


def shadow(units: int, window_ms: int = DAY_MS, **fields: Any) -> Limit:
    return replace(limit(units, window_ms, **{"name": "trial", **fields}), shadow=True)


def test_a_shadow_limit_counts_beyond_its_number_and_refuses_nothing(setup: Setup) -> None:
    budget = setup.budget(limit(5), shadow(3, HOUR_MS))
    decisions = [budget.charge("videos.list") for _ in range(6)]
    assert [one.admitted for one in decisions] == [True] * 5 + [False]
    assert [one.would_refuse for one in decisions[:5]] == [(), (), (), ("trial",), ("trial",)]
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


def test_a_shadow_admits_a_call_larger_than_its_limit(setup: Setup) -> None:
    budget = setup.budget(limit(500), shadow(3))
    assert budget.charge("search.list").would_refuse == ("trial",)


def test_a_shadow_beside_a_limit_of_the_same_window_counts_the_same_once(setup: Setup) -> None:
    budget = setup.budget(limit(4), shadow(2))
    assert [budget.charge("videos.list").admitted for _ in range(5)] == [True] * 4 + [False]
    assert [state.used_units for state in budget.usage()] == [4, 4]


def test_a_paced_shadow_delays_no_refused_call(setup: Setup) -> None:
    day = View(Selector(("units",)), Calendar("day", "UTC"))
    setup.now_ms = day.window.edges(setup.now_ms)[0]  # type: ignore[union-attr]
    budget = setup.budget(limit(12, HOUR_MS), Limit("trial", 80, day, 80, 0, paced=True, shadow=True))
    decisions = [budget.charge("videos.list") for _ in range(13)]
    assert [bool(one.would_refuse) for one in decisions[:12]] == [False] * 10 + [True] * 2
    assert decisions[12].retry_at_ms == setup.now_ms + HOUR_MS


def test_each_job_may_have_a_shadow_and_leave_something_in_it(setup: Setup) -> None:
    share = replace(shadow(3), per_job=True)
    budget = setup.budget(limit(500), share, leave={"a": {}})
    assert [budget.charge("videos.list", job="a").would_refuse for _ in range(4)][3] == ("trial:a",)
    assert budget.charge("videos.list", job="b").would_refuse == ()


def test_shadow_limits_change_no_decision_and_show_what_they_would_refuse(setup: Setup) -> None:
    """Random calls beside a count by hand."""
    r, enforced, trial = Random(7), limit(60, HOUR_MS), shadow(25, HOUR_MS)
    budget, log = setup.budget(enforced, trial), list[tuple[int, int]]()
    for _ in range(300):
        setup.now_ms += r.choice((0, 1, 60_000, 600_000))
        units = r.randrange(1, 20)
        used = sum(n for at_ms, n in log if at_ms > setup.now_ms - HOUR_MS)
        decision = budget.charge("videos.list", units=units)
        assert decision.admitted == (used + units <= 60)
        assert decision.would_refuse == (("trial",) if used + units > 25 else ())
        if decision.admitted:
            log.append((setup.now_ms, units))


# -- where it is told --------------------------------------------------------------------------------------------------


@pytest.fixture
def session(ledger_url: str, state_dir: Path, setup: Setup) -> Session:
    limits = [
        {"name": "day", "units": 5, "window": "24h"},
        {"name": "trial", "units": 3, "window": "24h", "jobs": ["nightly"], "shadow": True},
    ]
    tables = {"ledger": {"url": ledger_url}, "credentials": {"main": {"api": "youtube-v3", "limits": limits}}}
    return Session(given_settings(tables), clock=lambda: setup.now_ms)


def test_status_spend_metrics_and_log_show_a_shadow_refusal(session: Session, caplog: pytest.LogCaptureFixture) -> None:
    from quota.reports.status import read_status

    caplog.set_level(logging.INFO, "quota")
    with session:
        budget = session.budget()
        for _ in range(7):
            budget.charge("videos.list", job="nightly")
        row = read_status(session).as_json()["credentials"][0]["limits"][1]  # type: ignore[index]
        assert (row["shadow"], row["would_refuse"], row["used_units"]) == (True, True, 5)
        lines = [record.getMessage() for record in caplog.records if "would_refuse" in record.getMessage()]
        assert lines == ["would_refuse project=main limit=trial method=videos.list job=nightly"] * 2
        ledger = session.ledger
        for recorder in session._recorders.values():
            recorder.close()
        spending = read_spending([session.project()], "job", 0)
        assert [(one.limit, one.job, one.calls) for one in spending.would_refuse] == [("trial", "nightly", 2)]
        assert [(one.limit, one.calls) for one in spending.refused] == [("day", 2)]
        assert json.loads(json.dumps(spending.as_json()))["would_refuse"][0]["calls"] == 2
        text = exposition(of_sums("main", *read_sums(session.project())))
        assert 'quota_would_refuse_total{limit="trial",project="main",quota_job="nightly"} 2' in text
        assert 'reason="shadow"' not in text
        assert len(state_at(ledger, "main").refusals().newest) == 2, "a call that left is not kept as refused"


def test_a_shadow_alone_protects_nothing(state_dir: Path) -> None:
    from quota.settings.lint import lint

    limits = [{"name": "trial", "units": 3, "window": "24h", "shadow": True}]
    found = lint(given_settings({"credentials": {"main": {"api": "youtube-v3", "limits": limits}}}))
    assert any(one.level != "ok" and "no limit counts" in one.message for one in found)
