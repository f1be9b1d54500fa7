"""Random operations, held against the brute-force oracle. `make soak` runs fifty times as many."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from support.delayed_decisions import DelayedDecisions
from support.log_operations import RandomOperations
from support.losses import KINDS, LEDGERS

OPERATIONS = int(os.environ.get("QUOTA_TEST_OPERATIONS", "1200"))
SEEDS = 10

OUTCOMES = (
    *("ok", "limit", "leave", "exhausted", "closed", "clock", "never fits", "free", "would refuse"),
    *("several ok", "several limit", "pair ok", "pair limit", "paced ok", "paced limit", "per job ok", "per job limit"),
    *("settled", "refunded", "pair refunded", "reopened", "others", "usage", "came back", "cold", "trimmed"),
    *("left the log", "oracle checked"),
)


@pytest.mark.parametrize("kind", ["memory", *KINDS])
def test_every_answer_is_the_oracles(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Reason, used, remaining and retry_at agree in every operation, for processes that differ, change and start anew
    on one log, with clocks that are off, jump, and go back; the log lets go of nothing that a window named until then
    can reach."""
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        (folder := tmp_path / str(seed)).mkdir()
        url = "memory:" if kind == "memory" else LEDGERS[kind](request, folder, 0).url
        with RandomOperations(url, seed) as run:
            counts += run.run(OPERATIONS // SEEDS)
    assert all(counts[outcome] > 0 for outcome in OUTCOMES), counts


DECISIONS = OPERATIONS // 20


def test_a_call_that_is_admitted_late_exceeds_no_limit() -> None:
    """Whatever others charge, correct and close between a decision and its arrival at the log, and wherever the clock
    moves, no admission exceeds a limit of its process, by the ledger's time and the whole log."""
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        run = DelayedDecisions(seed)
        counts += run.run(DECISIONS // SEEDS)
        run.check_the_oracle()
    for outcome in ("checked", "meanwhile", "limit", "exhausted", "closed bucket", "settled"):
        assert counts[outcome] > DECISIONS // 100, counts
