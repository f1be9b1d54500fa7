"""When a call fits again that upstream refused, or that upstream grants too little for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quota.rules.facts import Exhaustion, Grant
from quota.terms.limits import DAY_MS, HOUR_MS, Calendar, Limit, Selector, View
from support.setup import limit

if TYPE_CHECKING:
    from support.setup import Setup

MINUTE_MS = 60_000
COSTS = {"videos.list": 1, "search.list": 100}


def limits() -> list[Limit]:
    by_hour = Limit("by-hour", 800, View(Selector(buckets=("units",)), Calendar("hour", "UTC")), 800, 0)
    return [limit(1_000, HOUR_MS), by_hour, limit(300, 10 * MINUTE_MS, name="narrow", methods=("search.list",))]


def test_a_call_that_upstream_closed_is_told_when_our_limits_have_room_too(setup: Setup) -> None:
    budget = setup.budget(limit(150))
    assert budget.charge("search.list").admitted
    setup.state.exhaust(Exhaustion("units", setup.now_ms, setup.now_ms + 9_000, "said so", "a test"))
    told = {method: budget.peek(method) for method in COSTS}
    assert {(one.reason, one.refused_by) for one in told.values()} == {("exhausted", "units")}
    assert told["videos.list"].retry_at_ms == setup.now_ms + 9_000
    assert told["search.list"].retry_at_ms == setup.now_ms + DAY_MS
    setup.now_ms += DAY_MS - 1
    assert not budget.peek("search.list").admitted
    setup.now_ms += 1
    assert budget.peek("search.list").admitted


def test_a_closed_call_that_upstream_grants_too_little_for_is_told_when_upstream_opens(setup: Setup) -> None:
    """Beside a limit with a pace: there is no moment at which that one's could be asked."""
    paced = Limit("hour", 400, View(Selector(), Calendar("hour", "UTC")), 400, 0, paced=True)
    budget = setup.budget(limit(150), paced)
    until_ms = setup.now_ms + 9_000
    setup.state.exhaust(Exhaustion("units", setup.now_ms, until_ms, "said so", "a test"))
    setup.state.grant([Grant("units", 60, setup.now_ms, setup.now_ms + DAY_MS)])
    told = budget.peek("search.list")
    assert (told.reason, told.refused_by, told.retry_at_ms) == ("exhausted", "units", until_ms)
