"""Random operations, held against the brute-force oracle. `make soak` runs twenty times as many."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

from quota.ledger.factory import open_ledger
from support.random_operations import RandomOperations

if TYPE_CHECKING:
    from collections.abc import Callable

    from quota.ledger.contract import Ledger

OPERATIONS = int(os.environ.get("QUOTA_TEST_OPERATIONS", "3000"))
SEEDS = 10


def test_every_decision_is_the_oracles(ledger_url: str) -> None:
    """Admitted, used, remaining, retry_at and reason agree in every operation, for callers who differ and change; the
    ledger lets go of nothing that a window named until then can reach.
    """
    expected: Counter[str] = Counter()
    for seed in range(1, SEEDS + 1):
        opened: list[Ledger] = []

        def make(clock: Callable[[], int], opened: list[Ledger] = opened) -> Ledger:
            opened.append(open_ledger(ledger_url, clock=clock))
            return opened[0]

        run = RandomOperations(make, seed)
        expected.update(run.run(OPERATIONS // SEEDS))
        run.close()
        opened[0].close()
    for outcome in (
        "admitted",
        "refused",
        "exhausted",
        "clock",
        "several admitted",
        "several refused",
        "settled",
        "never fits",
        "paced admitted",
        "paced refused",
        "drawn",
        "not drawn",
        "repaid",
        "trimmed",
        "left the log",
        "joined later",
        "free",
        "pair admitted",
        "pair refused",
        "pair exhausted",
        "pair refunded",
        "pair settled",
    ):
        assert expected[outcome] > min(OPERATIONS // 1000, 50), expected
