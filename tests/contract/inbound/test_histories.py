"""I1, I2, I5, I6. Every storage answers random histories as the definitions do, and short tests tell the rest."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import pytest

from quota.errors import UsageError
from quota.inbound.contract import Decision, Limit, LimitState, Policy, Storage
from support.inbound import Clock

REQUESTS = int(os.environ.get("QUOTA_TEST_REQUESTS", "200"))
MIDNIGHT_MS = 20_833 * 86_400_000


@dataclass
class Oracle:
    """The limits of one policy, for any number of identities."""

    policy: Policy
    counted: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    free_at: dict[tuple[str, Limit], Fraction] = field(default_factory=dict)

    def decide(self, identity: str, now_ms: int, cost: int = 1) -> Decision:
        limits = self.policy.limits
        admitted = all(self.fits(identity, limit, now_ms, cost) for limit in limits)
        if admitted or self.policy.count_rejected:
            self.counted.setdefault(identity, []).append((now_ms, cost))
            for limit in limits:
                burst, period = Fraction(limit.burst), Fraction(limit.window_ms, limit.number)
                free_at = max(self.free_at.get((identity, limit), Fraction(0)), Fraction(now_ms))
                self.free_at[identity, limit] = min(free_at + cost * period, now_ms + burst * period)
        return Decision(
            admitted,
            now_ms,
            tuple(
                LimitState(
                    self.remaining(identity, limit, now_ms),
                    first(
                        2 * limit.window_ms,
                        lambda ms, limit=limit: self.remaining(identity, limit, now_ms + ms) == most(limit),
                    ),
                    first(2 * limit.window_ms, lambda ms, limit=limit: self.fits(identity, limit, now_ms + ms, cost)),
                )
                for limit in limits
            ),
        )

    def fits(self, identity: str, limit: Limit, now_ms: int, cost: int) -> bool:
        if self.policy.algorithm == "gcra":
            period = Fraction(limit.window_ms, limit.number)
            free_at = max(self.free_at.get((identity, limit), Fraction(0)), Fraction(now_ms))
            return free_at + cost * period <= now_ms + limit.burst * period
        return self.used(identity, limit, now_ms) + cost <= limit.number

    def used(self, identity: str, limit: Limit, now_ms: int) -> Fraction:
        counted = self.counted.get(identity, [])
        window_ms = limit.window_ms
        if self.policy.algorithm == "log":
            return Fraction(sum(cost for ms, cost in counted if now_ms - window_ms < ms))
        window = now_ms // window_ms
        current = sum(cost for ms, cost in counted if ms // window_ms == window)
        previous = sum(cost for ms, cost in counted if ms // window_ms == window - 1)
        return current + Fraction(previous * (window_ms - now_ms % window_ms), window_ms)

    def remaining(self, identity: str, limit: Limit, now_ms: int) -> int:
        none = most(limit)
        return none - first(none, lambda used: used == none or self.fits(identity, limit, now_ms, none - used))


def most(limit: Limit) -> int:
    return limit.burst or limit.number


def first(most: int, holds: Callable[[int], bool]) -> int:
    """The smallest number up to `most` for which something holds that holds for all larger ones."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


# Redis lets a state expire by its own clock, whatever time is passed in: windows are longer than a history takes.


def random_policy(rng: random.Random, algorithm: str) -> Policy:
    windows_ms = rng.sample([7_919, 10_000, 17_000, 60_000], rng.choice([1, 1, 2, 3]))
    limits = []
    for window_ms in windows_ms:
        number = rng.choice([1, 2, 3, 7, 10, 60])
        limits.append(Limit(number, window_ms, rng.randint(1, number) if algorithm == "gcra" else 0))
    return Policy("rule", tuple(limits), algorithm, count_rejected=rng.random() < 0.4)  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", ["counter", "gcra", "log"])
def test_a_random_history_is_answered_as_the_definition_says(storage: Storage, clock: Clock, algorithm: str) -> None:
    """The history crosses midnight, when `counter` changes its salts."""
    seed = random.randrange(10**9)
    rng = random.Random(seed)
    rows = 0
    while rows < REQUESTS:
        policy = random_policy(rng, algorithm)
        policy = Policy(f"rule{rows}", policy.limits, policy.algorithm, policy.count_rejected)
        oracle = Oracle(policy)
        clock.ms = MIDNIGHT_MS - rng.randint(0, 20_000)
        pace_ms = rng.choice([3, 40, 600, 6_000])
        for _ in range(40):
            rows += 1
            # To the edges of windows and of entries too.
            window_ms = rng.choice(policy.limits).window_ms
            clock.ms += rng.choice([0, 1, rng.randint(0, pace_ms), rng.randint(0, pace_ms)])
            if rng.random() < 0.1:
                clock.ms += window_ms - clock.ms % window_ms - rng.choice([0, 1])
            elif rng.random() < 0.05:
                clock.ms += rng.choice([window_ms, 2 * window_ms, window_ms - 1])
            identity = rng.choice("ab")
            cost = rng.choice([1, 1, 1, rng.randint(1, policy.most)])
            decision = storage.decide(policy, identity, cost)
            assert decision == oracle.decide(identity, clock.ms, cost), (seed, policy, cost)


MINUTE_MS = 60_000
LOGIN = Policy("login", (Limit(3, MINUTE_MS),), "log")


@pytest.mark.topology
def test_a_limit_admits_its_number_and_shows_when_the_next_request_fits(storage: Storage, clock: Clock) -> None:
    first_ms = clock.ms
    for remaining in (2, 1, 0):
        decision = storage.decide(LOGIN, "ann")
        assert decision == Decision(True, clock.ms, (LimitState(remaining, MINUTE_MS, 0 if remaining else 40_000),))
        clock.ms += 10_000
    refused = storage.decide(LOGIN, "ann")
    assert (refused.admitted, refused.retry_after_ms) == (False, 30_000)
    clock.ms = first_ms + MINUTE_MS - 1
    assert not storage.decide(LOGIN, "ann").admitted
    clock.ms = first_ms + MINUTE_MS
    assert storage.decide(LOGIN, "ann").admitted, "at exactly the ms that was named"


def test_a_cost_that_can_never_fit_is_a_mistake_of_the_caller(storage: Storage) -> None:
    for cost in (0, -1, 4, 10**20, True, 1.5, "1", None):
        with pytest.raises(UsageError):
            storage.decide(LOGIN, "ann", cost)  # type: ignore[arg-type]
    assert storage.decide(LOGIN, "ann", 3).admitted


@pytest.mark.topology
def test_totals_of_all_workers_add_up(storage: Storage) -> None:
    """I8."""
    assert storage.totals() == {}
    storage.add_totals({"requests|search|admitted": 3, "decision_us": 100})
    storage.add_totals({"requests|search|admitted": 4})
    storage.add_totals({})
    assert storage.totals() == {"requests|search|admitted": 7, "decision_us": 100}
    storage.add_totals({f"n{n}": 1 for n in range(1_000)})


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
    assert [each.used for each in top] == [3, 2]
    assert all(len(bytes.fromhex(each.name)) == 8 for each in top)
    clock.ms += 2 * MINUTE_MS
    assert list(storage.top(policy)) == []
