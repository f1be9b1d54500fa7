"""What a decision costs when many charges are already in the window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.budgets import CHEAP, SteppingClock, budget, charging, fill, one, spread_over_a_day
from bench.race import Contestant, race
from quota.ledger.factory import open_ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.report import Report

STEADY = 500


def measure(
    report: Report, kind: str, url_of: Callable[[str], str], sizes: Sequence[int], rounds: int, calls: int
) -> None:
    """The same charge with so many before it. `url_of` gives the ledger for a name."""
    report.progress.begin(f"{kind}, growth")
    ledgers, contestants = [], []
    for size in sizes:
        ledger = open_ledger(url_of(f"growth-{size}"))
        project = f"growth-{size}"
        fill(ledger, project, size)
        contestants.append(
            Contestant(f"{size:,} charges in the window", charging(budget(ledger, project, one()), CHEAP, 1))
        )
        ledgers.append(ledger)
    clock = SteppingClock()
    ledgers.append(open_ledger(url_of("steady"), clock=clock))
    steady = spread_over_a_day(ledgers[-1], clock, "steady", STEADY, 1)
    contestants.append(Contestant(f"{STEADY:,}, and one expires with each charge", steady))
    for contestant in contestants:
        contestant.call()  # reads what was filled in
    rows = race(contestants, rounds, calls, report.progress)
    report.race(
        f"{kind.lower()}-growth",
        f"{kind}: growth, 1 limit, 1 unit",
        rows,
        "ratio to the first row",
    )
    for ledger in ledgers:
        ledger.close()
