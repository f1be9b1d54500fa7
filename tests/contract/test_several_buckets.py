"""One call that is charged to several buckets: two charges of one step, one decision, one id. And calls that are
free."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from quota.budget import MAX_CHARGES, Budget
from quota.clients.metering import Meter
from quota.common.clock import NEVER
from quota.decision import Allowance
from quota.errors import LedgerError, UnknownCharge, UsageError
from quota.ledger.factory import open_ledger
from quota.ledger.log import Log
from quota.rules.entry import END
from quota.rules.facts import Exhaustion
from quota.terms.limits import HOUR_MS, MINUTE_MS, Limit, Selector, Sliding, View
from support.books import parse_book
from support.setup import Setup, limit
from support.setup import budget_of as any_budget_of

FORGE = parse_book(
    """
    api = "forge"
    source = "the tests"
    read_on = 2026-11-01
    [buckets.core]
    quota = 60
    resets = "1h"
    [buckets.points]
    quota = 20
    resets = "1m"
    [default]
    get = [{ bucket = "core", units = 2 }, { bucket = "points", units = 3 }]
    other = [{ bucket = "core", units = 2 }, { bucket = "points", units = 7 }]
    [methods]
    read = [{ bucket = "core", units = 1 }, { bucket = "points", units = 1 }]
    write = [{ bucket = "core", units = 1 }, { bucket = "points", units = 5 }]
    search = { units = 4, bucket = "points" }
    status = 0
    """,
    "forge",
)
CORE = limit(60, HOUR_MS, name="core", buckets=("core",))
POINTS = limit(20, MINUTE_MS, name="points", buckets=("points",))
EVERYTHING = Limit("all", 99, View(Selector(count="calls"), Sliding(MINUTE_MS)), 99, 0)


def budget_of(setup: Setup, *limits: Limit, **more: Any) -> Budget:
    return setup.budget(*(limits or (CORE, POINTS)), book=FORGE, **more)


def used(budget: Budget) -> dict[str, int]:
    return {state.name: state.used_units for state in budget.usage()}


@pytest.mark.topology
def test_a_call_of_two_buckets_is_one_decision_and_two_charges(setup: Setup) -> None:
    budget = budget_of(setup)
    decision = budget.charge("write", job="nightly", region="DE")
    assert (decision.admitted, decision.method, decision.cost_units) == (True, "write", 1)
    assert [(each.name, each.cost_units, each.used_units) for each in decision.limits] == [
        ("core", 1, 1),
        ("points", 5, 5),
    ]
    assert decision.remaining_units == 15, "of the limit with the fewest further calls"
    first, second = setup.entries()
    assert decision.id == f"{first.id[0]}-{first.key}+1"
    assert [(each.bucket, each.units, each.method, each.job, each.region) for each in (first, second)] == [
        ("core", 1, "write", "nightly", "DE"),
        ("points", 5, "write", "nightly", "DE"),
    ]
    assert second.key == f"{first.key}+1"


def test_either_bucket_may_refuse_a_call_and_then_neither_is_charged(setup: Setup) -> None:
    budget = budget_of(setup)
    for _ in range(4):
        assert budget.charge("write").admitted
    refused = budget.charge("write")
    assert (refused.admitted, refused.id, refused.refused_by) == (False, None, "points")
    assert refused.retry_at_ms == setup.now_ms + MINUTE_MS
    assert used(budget) == {"core": 4, "points": 20}
    setup.now_ms += MINUTE_MS - 1
    assert not budget.peek("write").admitted
    setup.now_ms += 1
    assert budget.charge("write").admitted
    only_core = budget_of(setup, limit(5, HOUR_MS, name="core", buckets=("core",)), POINTS)
    assert only_core.charge("read").refused_by == "core"


def test_each_call_of_a_batch_has_an_id(setup: Setup) -> None:
    budget = budget_of(setup, CORE, POINTS, EVERYTHING)
    decisions = budget.charge_many(["read", "status", ("search", 3), "write"])
    entries = [f"{each.id[0]}-{each.key}" for each in setup.entries()]
    assert [each.id for each in decisions] == [f"{entries[0]}+1", None, entries[2], f"{entries[3]}+1"]
    assert [each.cost_units for each in decisions] == [1, 0, 3, 1]
    assert [each.method for each in decisions] == ["read", "status", "search", "write"]
    assert used(budget) == {"core": 2, "points": 9, "all": 5}
    refused = budget.charge_many(["write", "write", "write"])
    assert [(each.admitted, each.id) for each in refused] == [(False, None)] * 3
    assert refused[0].detail == "and these 3 calls need 15 together"


def test_too_many_charges_for_a_step_are_one_line(setup: Setup) -> None:
    budget = budget_of(setup, limit(1_000, HOUR_MS, name="core", buckets=("core",)))
    assert len(budget.charge_many(["read"] * 50)) == 50
    with pytest.raises(UsageError) as error:
        budget.charge_many(["read"] * 51)
    assert str(error.value) == (
        "these 51 calls are 102 charges, one for each bucket, and at most 100 are made together; "
        "make fewer calls at once"
    )
    assert len(setup.entries()) == MAX_CHARGES
    assert len(Meter(budget).attempts([("read", "GET")] * 51)) == 51
    assert len(setup.entries()) == MAX_CHARGES + 102


def test_a_refund_returns_all_parts_in_one_step_and_may_be_repeated(setup: Setup) -> None:
    budget = budget_of(setup)
    charge_id = budget.charge("write").id or ""
    budget.charge("read")
    tip = setup.ledger.begin(setup.project).tip
    before = budget.refund(charge_id)
    assert (before.bucket, before.units) == ("core", 1)
    assert used(budget) == {"core": 1, "points": 1}
    assert budget.refund(charge_id).units == 0
    assert used(budget) == {"core": 1, "points": 1}
    entries = setup.ledger.read(setup.project, tip, END, 10)
    assert [(entry.kind, entry.bucket, entry.units) for entry in entries] == [
        ("correction", "core", 0),
        ("correction", "points", 0),
    ]
    (first_ms, first), second = (entry.id for entry in entries)
    assert second == (first_ms, first + 1), "entries of one append follow each other"


def test_settle_sets_the_first_bucket_and_leaves_the_others(setup: Setup) -> None:
    budget = budget_of(setup)
    charge_id = budget.charge("write").id or ""
    assert budget.settle(charge_id, 7).units == 1
    assert used(budget) == {"core": 7, "points": 5}
    assert budget.settle(charge_id, 0).units == 7
    assert used(budget) == {"core": 0, "points": 5}


@pytest.mark.parametrize("wrong", ["{}+", "+{}", "{}+x", "{}++{}", "+".join(["{}"] * 102), "{}+1-999", "+", "{} {}"])
def test_an_invalid_id_changes_nothing(setup: Setup, wrong: str) -> None:
    budget = budget_of(setup)
    first, second = (budget.charge("write").id or "").split("+")
    with pytest.raises(UnknownCharge, match=r"has no charge .*; after a loss, the machine that charged it"):
        budget.refund(wrong.replace("{}", second))
    with pytest.raises(UnknownCharge):
        budget.settle(wrong.replace("{}", first), 0) if wrong != "{}+1-999" else budget.settle("1-999", 0)
    assert used(budget)["core"] == 1


def test_a_free_call_is_admitted_without_a_charge(setup: Setup) -> None:
    budget = budget_of(setup, limit(1, HOUR_MS, name="core", buckets=("core",)))
    budget.charge("read")
    setup.state.exhaust(Exhaustion("core", setup.now_ms, NEVER, "said so", "the test"))
    for decision in (budget.charge("status"), budget.peek("status"), *budget.charge_many(["status", "forge.status"])):
        assert (decision.admitted, decision.id, decision.source, decision.reason) == (True, None, None, "ok")
        assert (decision.method, decision.cost_units, decision.limits) == ("status", 0, ())
    assert budget.charge("status").sentence() == "admitted status on main: it is free, and nothing is charged"
    assert len(setup.entries()) == 2
    with budget.spend("status") as decision:
        assert decision.id is None
    with pytest.raises(UsageError, match="which a free or refused call lacks: None is not a str"):
        budget.settle(decision.id, 1)  # type: ignore[arg-type]
    attempt = Meter(budget).attempt("status", "GET")
    attempt.never_left()
    assert len(setup.entries()) == 2
    assert budget.charge("status", units=1).refused_by == "core", "the caller says that it costs one"


def test_a_free_call_needs_no_ledger(setup: Setup) -> None:
    with closing(open_ledger("redis://127.0.0.1:1/0")) as away:
        setup.ledger, reached = away, setup.ledger
        budget = budget_of(setup)
        setup.ledger = reached
        assert budget.charge("status").admitted
        assert budget.charge("read").reason == "ledger-unavailable"


def test_a_call_of_two_buckets_is_drawn_handed_over_and_refunded_whole(setup: Setup, tmp_path: Path) -> None:
    """Two processes of one machine: the first does not reach the ledger, and the second hands over what it drew."""

    def budget_over(ledger: Log) -> Budget:
        return any_budget_of(
            ledger,
            CORE,
            POINTS,
            project=setup.project,
            book=FORGE,
            clock=lambda: setup.now_ms,
            folder=tmp_path,
            allowance=Allowance(5, 20),
        )

    with closing(open_ledger("redis://127.0.0.1:1/0")) as away:
        budget = budget_over(away)
        first, second, third = (budget.charge("write") for _ in range(3))
        assert [decision.remaining_units for decision in (first, second, third)] == [14, 8, 2]
        assert (first.source, first.cost_units) == ("allowance", 1)
        assert budget.charge("write").reason == "ledger-unavailable", "all of its charges, or none"
        budget.refund(second.id or "")
        with pytest.raises(LedgerError):  # of an id that names one charge too many, nothing is refunded
            budget.refund(f"{(first.id or '').partition('+')[0]}+2")
    budget = budget_over(setup.ledger)
    with pytest.raises(UnknownCharge):
        budget.refund(f"{(first.id or '').partition('+')[0]}+2")
    assert budget.charge("read").admitted
    assert used(budget) == {"core": 3, "points": 11}
    assert [(charge.bucket, charge.units) for charge in setup.entries()] == [
        *[("core", 1), ("points", 5)],
        *[("core", 0), ("points", 0)],
        *[("core", 1), ("points", 5)],
        *[("core", 1), ("points", 1)],
    ]
    budget.refund(third.id or "")
    assert used(budget_over(setup.ledger)) == {"core": 2, "points": 6}, "as the next process sees it"


def test_the_outlook_is_closed_or_full_where_every_call_spends_that_bucket(setup: Setup) -> None:
    budget = budget_of(setup)
    budget.exhaust("points", setup.now_ms, setup.now_ms + MINUTE_MS, "used up")
    assert getattr(budget.outlook().closed, "bucket", None) == "points"
    budget.reopen("points", "the tests")
    assert all(budget.charge("write").admitted for _ in range(4))
    assert getattr(budget.outlook().full, "refused_by", None) == "points"


def test_the_outlook_uses_the_price_of_the_day(setup: Setup) -> None:
    """A limit that counts uploads alone is full as long as the cheapest of them does not fit."""
    budget = setup.budget(limit(2_000, methods=("videos.insert",)))
    change_ms = 1_764_835_200_000  # midnight in Los Angeles: 1,600 units before, 100 from then on
    setup.now_ms = change_ms - 10
    budget.charge("videos.insert")
    assert budget.outlook().room_ms[0] is not None
    setup.now_ms = change_ms
    assert budget.outlook().room_ms[0] is None
