"""I1, I2, I5, I6. Random histories: every storage answers as the definitions do, to the unit and the millisecond."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest

from quota.inbound.contract import Limit, Policy
from support.inbound import Clock, Oracle

if TYPE_CHECKING:
    from quota.inbound.contract import Storage

REQUESTS = int(os.environ.get("QUOTA_TEST_REQUESTS", "200"))
MIDNIGHT_MS = 20_833 * 86_400_000


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
