"""Several calls charged together, beside the same calls charged one by one."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from bench.budgets import guarded, two
from bench.kinds import CHEAP, LABELS
from bench.race import Contestant, race
from quota.ledger.factory import open_ledger

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.report import Report
    from quota.budget import Budget

SIZES = (10, 100)
CALLS = 3
"""In each round. A hundred single charges are a long call."""


def measure(report: Report, redis_url: str, folder: Path, rounds: int) -> None:
    for ledger_name, url in (("Redis", redis_url), ("SQLite", f"sqlite:///{folder / 'together.db'}")):
        report.progress.begin(f"{ledger_name}, several calls together")
        with closing(open_ledger(url)) as ledger:
            spent = guarded(ledger, f"together-{ledger_name}", two(), folder)
            contestants = []
            for size in SIZES:
                contestants.append(Contestant(f"{size} calls, one by one", _one_by_one(spent, size)))
                contestants.append(Contestant(f"{size} calls together", _together(spent, size)))
            rows = race(contestants, rounds, CALLS, report.progress)
        report.race(
            f"{ledger_name.lower()}-together",
            f"{ledger_name}: several calls, all or none",
            rows,
            "2 limits, guarded; ratio to the first line",
        )


def _one_by_one(spent: Budget, size: int) -> Callable[[], object]:
    def call() -> None:
        for _ in range(size):
            assert spent.charge(CHEAP, **LABELS).admitted

    return call


def _together(spent: Budget, size: int) -> Callable[[], object]:
    calls = [CHEAP] * size

    def call() -> None:
        assert spent.charge_many(calls, **LABELS)[0].admitted

    return call
