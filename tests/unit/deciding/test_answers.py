"""The decision that follows from an outcome, row by row: who refuses and why, until when, and what is left."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from quota.common.clock import NEVER
from quota.deciding.answers import COUNT_AGAIN_MS, Answers
from quota.deciding.decide import Outcome
from quota.deciding.project import Project
from quota.decision import Decision
from quota.errors import LedgerError
from quota.ledger.sqlite_log import SqliteLog
from quota.rules.calls import Checklists
from quota.rules.entry import Entry
from quota.rules.facts import Exhaustion, Facts, Grant
from quota.rules.total import total_of
from quota.terms.limits import DAY_MS, HOUR_MS, Calendar, Limit, Selector, View
from support.books import BOOK

MIDNIGHT = int(datetime(2026, 7, 1, tzinfo=UTC).timestamp()) * 1000
NOW = MIDNIGHT + 14 * HOUR_MS
EDGE = MIDNIGHT + DAY_MS
JITTER_MS = 7
HOUR = Calendar("hour", "UTC")


def limit(units: int, name: str = "day", **more: Any) -> Limit:
    view = View(Selector(**{"buckets": ("units",), **more}), Calendar("day", "UTC"))
    return Limit(name, units, view, units, 0)


class Asked:
    """A call of 100 units."""

    def __init__(self, *limits: Limit) -> None:
        self.project = Project(SqliteLog(clock=lambda: NOW), "project", clock=lambda: NOW, jitter_ms=JITTER_MS)
        self.project.read_on()
        checklists = Checklists("main", BOOK, limits, {}, lambda: NOW)
        self.answers = Answers(self.project, checklists)
        self.checklist = checklists["videos.list", 100, None, "job"]

    def decision(self, reason: str, *used: int, **more: Any) -> Decision:
        """What follows where each limit counts so much after the decision."""
        facts = more.pop("facts", Facts())
        for view, units in zip(self.checklist.views, used, strict=False):
            charge = Entry((NOW, 0), units, "units", "videos.list", "", "", "key")
            self.project.reading.totals[view.name] = total_of(view, [charge], NOW)
        caps = self.checklist.caps_at(NOW, facts.granted(NOW))
        outcome = Outcome(reason, NOW, used, caps, facts=facts, **more)
        return self.answers.decision(self.checklist, outcome, commit=True)


def test_a_limit_of_calls_is_shown_in_calls() -> None:
    asked = Asked(limit(500), limit(3, "calls", count="calls"))
    assert asked.decision("ok", 100, 1).sentence().endswith("on main; 2 calls left")
    assert asked.decision("ok", 399, 1).sentence().endswith("on main; 101 units left")
    assert asked.decision("limit", 100, 3).why() == "limit 'calls' has 3 of 3 calls used"
    assert asked.decision("limit", 500, 1).why() == "limit 'day' has 500 of 500 units used"


def test_a_reason_names_the_cost_of_a_call_that_is_more_than_is_left() -> None:
    refused = Asked(limit(500)).decision("limit", 450)
    assert refused.why() == "limit 'day' has 450 of 500 units used, videos.list needs 100"
    assert "(100 units) on main: limit 'day' has 450 of 500 units used; next at " in refused.sentence(), "named once"


@pytest.mark.parametrize(
    ("granted", "reason", "retry_at_ms", "detail"), [(100, "limit", EDGE, ""), (99, "closed", None, "99")]
)
def test_a_call_above_what_upstream_grants_is_closed_and_one_that_the_grant_could_hold_waits(
    granted: int, reason: str, retry_at_ms: int | None, detail: str
) -> None:
    facts = Facts(grants=(Grant("units", granted, NOW - DAY_MS, EDGE + 1),))
    decision = Asked(limit(500)).decision("limit", 450, facts=facts)
    assert (decision.reason, decision.refused_by) == (reason, "day")
    assert (decision.retry_at_ms, decision.detail) == (retry_at_ms, detail)
    (shown,) = Asked(replace(limit(500), paced=True)).decision("limit", 450, facts=facts).limits
    assert shown.limit_units == 70, "what the pace has released of the grant"


def test_an_unreadable_log_names_the_first_full_limit_without_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise LedgerError("away")

    asked = Asked(limit(500, "a"), limit(500, "b"), limit(500, "c"))
    monkeypatch.setattr(Project, "used_after", away)
    decision = asked.decision("limit", 400, 401, 401)
    assert (decision.refused_by, decision.reason, decision.retry_at_ms) == ("b", "limit", None)
    closed = asked.decision("exhausted", 400, 401, 401, closing=exhaustion(NOW + 100))
    assert (closed.reason, closed.retry_at_ms) == ("exhausted", NOW + 100 + JITTER_MS)


def exhaustion(until_ms: int) -> Exhaustion:
    return Exhaustion("units", NOW, until_ms, "quotaExceeded", "upstream")


@pytest.mark.parametrize(
    ("until_ms", "used", "reason", "retry_at_ms"),
    [
        # After the end of an exhaustion and the jitter, if the limits have room then.
        (NOW + 100, 400, "exhausted", NOW + 107),
        (NOW + 100, 401, "exhausted", EDGE),
        (EDGE - 7, 401, "exhausted", EDGE),
        (EDGE - 6, 401, "exhausted", EDGE + 1),
        # What has no end is closed.
        (NEVER, 400, "closed", None),
    ],
)
def test_an_exhausted_bucket_is_open_again_when_limits_have_room_too(
    until_ms: int, used: int, reason: str, retry_at_ms: int | None
) -> None:
    decision = Asked(limit(500)).decision("exhausted", used, closing=exhaustion(until_ms))
    assert (decision.reason, decision.refused_by, decision.detail) == (reason, "units", "quotaExceeded")
    assert decision.retry_at_ms == retry_at_ms


def test_a_call_above_its_grant_shows_when_upstream_opens() -> None:
    """Beside a limit with a pace: there is no moment at which that one's could be asked."""
    paced = Limit("hour", 400, View(Selector(), HOUR), 400, 0, paced=True)
    facts = Facts(grants=(Grant("units", 60, NOW, NOW + DAY_MS),))
    decision = Asked(limit(150), paced).decision("exhausted", 0, 0, facts=facts, closing=exhaustion(NOW + 9_000))
    assert (decision.reason, decision.refused_by, decision.retry_at_ms) == ("exhausted", "units", NOW + 9_007)


def test_a_ledger_that_still_counts_is_asked_again_after_a_second() -> None:
    decision = Asked(limit(500)).decision("counting")
    assert (decision.reason, decision.retry_at_ms, decision.remaining_units) == ("counting", NOW + COUNT_AGAIN_MS, 0)


def test_clocks_that_disagree_are_named_and_nobody_waits_for_them() -> None:
    decision = Asked(limit(500)).decision("clock")
    assert (decision.reason, decision.retry_at_ms, decision.when()) == ("clock", None, None)
    assert "2026-07-01T14:00:00" in decision.detail
