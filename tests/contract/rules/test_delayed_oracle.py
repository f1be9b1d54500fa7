"""The append condition under delay. `make soak` makes twenty times as many decisions."""

from __future__ import annotations

import os
from collections import Counter

from support.delayed_decisions import DelayedDecisions

DECISIONS = int(os.environ.get("QUOTA_TEST_OPERATIONS", "2000")) // 10
SEEDS = 10


def test_a_call_that_is_admitted_late_exceeds_no_limit() -> None:
    """Whatever others charge, correct and close between a decision and its arrival at the log, and wherever the clock
    moves, every admission leaves the limits of its process as they are, by the ledger's time and the whole log."""
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        run = DelayedDecisions(seed)
        counts += run.run(DECISIONS // SEEDS)
        run.check_the_oracle()
    for outcome in ("checked", "meanwhile", "limit", "exhausted", "closed bucket", "settled"):
        assert counts[outcome] > DECISIONS // 100, counts
