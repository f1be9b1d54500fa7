"""A refusal that is said from the ledger's answer alone says what the general way says."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

from quota.answer import _further_calls, _room_at_once, states_of
from quota.ledger.contract import Exhaustion
from quota.ledger.entry import Charge
from quota.ledger.grants import Grant
from quota.limits import DAY_MS, HOUR_MS, Calendar, Limit, Selector, View
from support.setup import limit

if TYPE_CHECKING:
    from support.setup import Setup

MINUTE_MS = 60_000
COSTS = {"videos.list": 1, "search.list": 100}


def limits() -> list[Limit]:
    by_hour = Limit("by-hour", 800, View(Selector(buckets=("units",)), Calendar("hour", "UTC")), 800, 0)
    return [limit(1_000, HOUR_MS), by_hour, limit(300, 10 * MINUTE_MS, name="narrow", methods=("search.list",))]


def test_it_says_what_the_general_way_says(setup: Setup) -> None:
    found: Counter[str] = Counter()
    chance = random.Random(1)
    for seed in range(3):
        setup.project = f"{setup.project}{seed}"
        leave = {"nightly": {"by-hour": 50}} if seed == 1 else {}
        budget = setup.budget(*limits()[: 1 + seed % 3], leave=leave)
        for number in range(150):
            setup.now_ms += chance.choice((0, 1, 20_000, HOUR_MS if number % 50 == 0 else 1_000))
            method, job = chance.choice(tuple(COSTS)), chance.choice(("nightly", "trending"))
            checklist = budget._checklists.make((method, None, None, job))
            charge = Charge(checklist.units, checklist.bucket, checklist.method, job, "US", f"k{seed}.{number}")
            asked = budget._ask_ledger(checklist, charge, commit=True)
            decision = budget._answers.decision(*asked, budget._entries, commit=True)
            states = states_of(*asked)
            assert decision.limits == states
            assert decision.remaining_units == min(states, key=_further_calls).remaining_units
            if asked[2].outcome != "refused":
                assert (decision.admitted, decision.reason, decision.retry_at_ms) == (True, "ok", None)
                continue
            refusal = budget._answers._refusal(*asked, budget._entries)
            assert (decision.refused_by, decision.reason, decision.retry_at_ms, decision.detail) == refusal
            at_once = _room_at_once(*asked)
            assert at_once is None or (at_once[0], "limit", at_once[1], "") == refusal
            found[refusal[0] if at_once else "generally"] += 1
    assert all(found[name] > 10 for name in ("day", "by-hour", "narrow", "generally")), found


def test_a_call_that_upstream_closed_is_told_when_our_limits_have_room_too(setup: Setup) -> None:
    budget = setup.budget(limit(150))
    assert budget.charge("search.list").admitted
    setup.ledger.exhaust(setup.project, Exhaustion("units", setup.now_ms, setup.now_ms + 9_000, "said so", "a test"))
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
    setup.ledger.exhaust(setup.project, Exhaustion("units", setup.now_ms, until_ms, "said so", "a test"))
    setup.ledger.grant(setup.project, [Grant("units", 60, setup.now_ms, setup.now_ms + DAY_MS)])
    told = budget.peek("search.list")
    assert (told.reason, told.refused_by, told.retry_at_ms) == ("exhausted", "units", until_ms)
