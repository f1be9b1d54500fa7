"""What a decision costs when many charges are already in the window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.budgets import SteppingClock, budget, charging, fill, one, spread_over_a_day
from bench.kinds import CHEAP
from bench.race import Contestant, race
from quota.ledger.factory import open_ledger
from quota.terms.limits import DAY_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.report import Report

SLOWLY = 500
"""So many a day: each of them is the first charge of its minute, and keeps house."""


def measure(
    report: Report, kind: str, url_of: Callable[[str], str], sizes: Sequence[int], full: int, rounds: int, calls: int
) -> None:
    """The same charge with so many before it; and at two paces with which the window stays as it is. `url_of` gives the
    ledger for a name, `full` charges fill a day."""
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
    for size in (full, SLOWLY):
        clock = SteppingClock()
        ledgers.append(open_ledger(url_of(f"steady-{size}"), clock=clock))
        steady = spread_over_a_day(ledgers[-1], clock, f"steady-{size}", size, 1)
        every_s = DAY_MS // size // 1000
        contestants.append(Contestant(f"{size:,}, one comes and one expires every {every_s} s", steady))
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
