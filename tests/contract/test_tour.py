"""The story in five tests: charge, refusal, the way back, corrections, and several limits in one decision."""

from __future__ import annotations

import pytest

from quota.errors import CostExceedsLimit
from quota.terms.limits import DAY_MS, HOUR_MS
from support.setup import Setup, limit

pytestmark = pytest.mark.topology


def test_a_search_costs_a_hundred_units_and_a_video_list_one(setup: Setup) -> None:
    budget = setup.budget(limit(500))
    assert budget.charge("search.list").remaining_units == 400
    assert budget.charge("videos.list").remaining_units == 399


def test_a_refusal_says_when_and_that_millisecond_is_exact(setup: Setup) -> None:
    budget = setup.budget(limit(500))
    nine = setup.now_ms
    for hour in range(5):
        setup.now_ms = nine + hour * HOUR_MS
        assert budget.charge("search.list").admitted
    refused = budget.charge("search.list", units=200)
    assert (refused.admitted, refused.reason, refused.refused_by) == (False, "limit", "day")
    assert refused.retry_at_ms == nine + HOUR_MS + DAY_MS, "two charges must leave, not one"

    setup.now_ms = refused.retry_at_ms - 1
    assert not budget.peek("search.list", units=200).admitted
    setup.now_ms += 1
    assert budget.charge("search.list", units=200).admitted


def test_a_refused_call_leaves_the_budget_untouched(setup: Setup) -> None:
    budget = setup.budget(limit(150))
    budget.charge("search.list")
    for _ in range(3):
        assert not budget.charge("search.list").admitted
    assert budget.usage()[0].used_units == 100
    assert budget.charge("captions.list").admitted, "50 still fit"


def test_a_charge_can_be_given_back_or_set_to_what_it_really_cost(setup: Setup) -> None:
    budget = setup.budget(limit(500))
    charge_id = budget.charge("search.list").id
    assert charge_id is not None
    budget.settle(charge_id, 30)
    budget.settle(charge_id, 30)
    assert budget.usage()[0].used_units == 30
    budget.refund(charge_id)
    assert budget.usage()[0].used_units == 0


def test_all_limits_admit_or_none_is_charged(setup: Setup) -> None:
    budget = setup.budget(limit(500), limit(150, name="searches", methods=("search.list",)))
    assert budget.charge("search.list").admitted
    refused = budget.charge("search.list")
    assert refused.refused_by == "searches"
    assert [state.used_units for state in budget.usage()] == [100, 100]
    assert budget.charge("videos.list").admitted, "the narrow limit does not count it"
    with pytest.raises(CostExceedsLimit):
        budget.charge("search.list", units=151)
