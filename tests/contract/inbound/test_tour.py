"""What a storage does, told in short tests. `test_histories.py` holds every number to its definition."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from quota.errors import UsageError
from quota.inbound.contract import Decision, Limit, LimitState, Policy

if TYPE_CHECKING:
    from quota.inbound.contract import Storage
    from support.inbound import Clock

MINUTE_MS = 60_000
LOGIN = Policy("login", (Limit(3, MINUTE_MS),), "log")


@pytest.mark.topology
def test_a_limit_admits_its_number_and_shows_when_the_next_request_fits(storage: Storage, clock: Clock) -> None:
    first_ms = clock.ms
    for remaining in (2, 1, 0):
        decision = storage.decide(LOGIN, "ann")
        assert decision == Decision(True, clock.ms, (LimitState(remaining, MINUTE_MS, 0),))
        clock.ms += 10_000
    refused = storage.decide(LOGIN, "ann")
    assert (refused.admitted, refused.retry_after_ms) == (False, 30_000)
    clock.ms = first_ms + MINUTE_MS - 1
    assert not storage.decide(LOGIN, "ann").admitted
    clock.ms = first_ms + MINUTE_MS
    assert storage.decide(LOGIN, "ann").admitted, "at exactly the ms that was named"


def test_a_counter_is_freed_bit_by_bit(storage: Storage, clock: Clock) -> None:
    policy = Policy("search", (Limit(10, MINUTE_MS),))
    clock.ms -= clock.ms % MINUTE_MS
    for _ in range(10):
        assert storage.decide(policy, "ann").admitted
    refused = storage.decide(policy, "ann")
    assert refused.limits == (LimitState(0, 2 * MINUTE_MS, MINUTE_MS + 6_000),)
    clock.ms += MINUTE_MS + 6_000
    assert storage.decide(policy, "ann").admitted
    assert not storage.decide(policy, "ann").admitted


def test_gcra_lets_a_burst_through_and_then_spaces(storage: Storage, clock: Clock) -> None:
    policy = Policy("search", (Limit(60, MINUTE_MS, 2),), "gcra")
    assert [storage.decide(policy, "ann").admitted for _ in range(3)] == [True, True, False]
    assert storage.decide(policy, "ann").retry_after_ms == 1_000
    clock.ms += 999
    assert not storage.decide(policy, "ann").admitted
    clock.ms += 1
    assert storage.decide(policy, "ann").admitted


@pytest.mark.parametrize("algorithm", ["counter", "gcra", "log"])
@pytest.mark.topology
def test_identities_rules_and_costs_are_counted_apart(storage: Storage, algorithm: str) -> None:
    policy, other = (Policy(rule, (Limit(5, MINUTE_MS, 5 * (algorithm == "gcra")),), algorithm) for rule in "ab")  # type: ignore[arg-type]
    assert storage.decide(policy, "ann", 4).limits[0].remaining == 1
    assert storage.decide(policy, "bob", 5).admitted
    assert storage.decide(other, "ann", 5).admitted
    assert not storage.decide(policy, "ann", 2).admitted
    assert storage.decide(policy, "ann", 1).admitted


@pytest.mark.parametrize(("algorithm", "first"), [("counter", 3), ("gcra", 4), ("log", 3)])
def test_a_visitor_who_keeps_asking_stays_out_if_rejected_requests_count(
    storage: Storage, clock: Clock, algorithm: str, first: int
) -> None:
    policy = Policy("a", (Limit(3, 9_000, 3 * (algorithm == "gcra")),), algorithm, count_rejected=True)  # type: ignore[arg-type]
    answers = []
    for _ in range(60):
        answers.append(storage.decide(policy, "ann").admitted)
        clock.ms += 1_000
    assert answers == [True] * first + [False] * (60 - first)
    clock.ms += storage.decide(policy, "ann").retry_after_ms
    assert storage.decide(policy, "ann").admitted


def test_a_cost_that_can_never_fit_is_a_mistake_of_the_caller(storage: Storage) -> None:
    for cost in (0, -1, 4, 10**20, True, 1.5, "1", None):
        with pytest.raises(UsageError):
            storage.decide(LOGIN, "ann", cost)  # type: ignore[arg-type]
    assert storage.decide(LOGIN, "ann", 3).admitted


# -- what all workers count --------------------------------------------------------------------------------------------


@pytest.mark.topology
def test_totals_of_all_workers_add_up(storage: Storage) -> None:
    """I8."""
    assert storage.totals() == {}
    storage.add_totals({"requests|search|admitted": 3, "decision_us": 100})
    storage.add_totals({"requests|search|admitted": 4})
    storage.add_totals({})
    assert storage.totals() == {"requests|search|admitted": 7, "decision_us": 100}
    storage.add_totals({f"n{n}": 1 for n in range(1_000)})
    with pytest.raises(UsageError, match="1001 totals are too many"):
        storage.add_totals({f"n{n}": 1 for n in range(1_001)})
    with pytest.raises(UsageError):
        storage.add_totals({"n": -1})


@pytest.mark.parametrize("algorithm", ["counter", "gcra", "log"])
def test_identities_of_this_and_the_last_window_are_alive(storage: Storage, clock: Clock, algorithm: str) -> None:
    policy = Policy(
        "a", (Limit(50, 1_000, 9 * (algorithm == "gcra")), Limit(60, MINUTE_MS, 9 * (algorithm == "gcra"))), algorithm
    )  # type: ignore[arg-type]
    clock.ms += MINUTE_MS - clock.ms % MINUTE_MS
    for identity in ("a", "b", "c", "a"):
        storage.decide(policy, identity)
    clock.ms += MINUTE_MS
    for identity in ("c", "d", "c"):
        storage.decide(policy, identity)
    storage.add_totals({})
    clock.ms += 10_000  # a worker may be so late
    assert storage.alive(policy) == 4
    clock.ms += MINUTE_MS
    assert storage.alive(policy) == 2
    clock.ms += MINUTE_MS
    assert storage.alive(policy) == 0


def test_a_worker_that_reports_no_identities_does_not_grow(storage: Storage, clock: Clock) -> None:
    policy = Policy("a", (Limit(5, 1_000),))
    for _ in range(1_100):
        storage.decide(policy, "ann")
        clock.ms += 1_000
    assert len(storage._met) < 1_000  # type: ignore[attr-defined]
    storage.add_totals({})
    assert storage.alive(policy) == 1


@pytest.mark.parametrize("algorithm", ["counter", "gcra", "log"])
def test_the_top_names_identities_by_hash_alone(storage: Storage, clock: Clock, algorithm: str) -> None:
    policy = Policy("a", (Limit(60, MINUTE_MS, 60 * (algorithm == "gcra")),), algorithm)  # type: ignore[arg-type]
    for used, identity in enumerate(["203.0.113.7", "bob", "ann"], 1):
        for _ in range(used):
            storage.decide(policy, identity)
    top = storage.top(policy, 2)
    assert [(one.used, one.limit) for one in top] == [(3, policy.limits[0]), (2, policy.limits[0])]
    assert all(len(bytes.fromhex(one.name)) == 8 for one in top)
    clock.ms += 2 * MINUTE_MS
    assert list(storage.top(policy)) == []
