"""Which salt makes the names of a window, and whom a window met, until the storage knows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from quota.errors import StorageAway
from quota.inbound.contract import Limit, Policy
from quota.inbound.names import Counts, outdated, plan

DAY_MS = 86_400_000


def test_a_permanent_salt_is_used_by_the_windows_that_begin_after_it() -> None:
    policy = Policy("a", (Limit(1, 10_000),), "log")
    fixed = {"shard": "00", "0": "01", "1005000": "02", "1025000": "03"}
    seen = {at_ms: plan(policy, at_ms, fixed, {}).windows[0] for at_ms in range(1_000_000, 1_050_000, 10_000)}
    assert [(salt.hex(), before.hex()) for _, salt, before in seen.values()] == [
        ("01", "01"),
        ("02", "01"),
        ("02", "02"),
        ("03", "02"),
        ("03", "03"),
    ]


def test_a_permanent_salt_is_kept_for_two_of_the_longest_windows() -> None:
    fixed = {"shard": "00", "0": "01", "1000": "02", "2000": "03"}
    assert outdated(fixed, 1_000 + 62 * DAY_MS) == []
    assert outdated(fixed, 1_001 + 62 * DAY_MS) == ["0"]
    assert outdated(fixed, 10**13) == ["0", "1000"], "the newest stays"


def take_nothing(counts: Counts[str]) -> None:
    """As a storage that goes away, while further identities come."""
    with counts.handed_over():
        counts.add({"new": 1, "again": 1})
        raise StorageAway("away")


def test_refused_counts_are_added_to_newer_counts() -> None:
    counts = Counts[str](10)
    counts.add({"new": 1})
    with pytest.raises(StorageAway):
        take_nothing(counts)

    with counts.handed_over() as taken:
        assert taken == {"new": 2, "again": 1}


def test_a_signal_handler_may_count_while_its_thread_counts() -> None:
    class Interrupted(Counter[str]):
        def update(self, given: Any) -> None:  # type: ignore[override]
            if "admitted" in given:
                counts.add({"refused": 1})  # as a handler that runs here
            super().update(given)

    counts = Counts[str](10)
    counts._counts = Interrupted(())
    counts.add({"admitted": 1})
    assert counts._counts == {"admitted": 1, "refused": 1}
