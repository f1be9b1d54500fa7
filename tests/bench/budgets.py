"""The budgets that are measured: the default configuration's limits, with numbers that are never reached."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.kinds import CHEAP, LABELS
from quota.budget import Budget
from quota.deciding.corrections import add
from quota.deciding.project import Project
from quota.decision import Decision
from quota.ledger.log import Log
from quota.rules.entry import START, Entry
from quota.terms.limits import DAY_MS, Limit, Selector, Sliding, View
from support.books import BOOK
from support.inbound import Clock

PLENTY = 10**9
ADDED_AT_ONCE = 500
NOTHING = "return 1"
"""The script of the floors."""


def day(units: int = PLENTY) -> Limit:
    return Limit("day", units, View(Selector(buckets=("units",)), Sliding(DAY_MS)), units, 0)


def budget(ledger: Log, project: str, limits: Sequence[Limit], *, clock: Callable[[], int] | None = None) -> Budget:
    """Without what a machine remembers of the log; see `bench.sessions`."""
    return Budget(credential="main", book=BOOK, limits=limits, project=Project(ledger, project, clock=clock))


def charging(spent: Budget, method: str, units: int) -> Callable[[], Decision]:
    """One charge, which must be admitted: a refusal would be another measurement."""

    def call() -> Decision:
        decision = spent.charge(method, units=units, **LABELS)
        assert decision.admitted, decision
        return decision

    return call


def fill(ledger: Log, project: str, charges: int) -> None:
    """Put charges into the log quickly, many at once, without deciding about them."""
    opened = Project(ledger, project)
    for first in range(0, charges, ADDED_AT_ONCE):
        numbers = range(first, min(first + ADDED_AT_ONCE, charges))
        entries = [Entry(START, 1, "units", CHEAP, "trending", "US", f"filling-{n}") for n in numbers]
        add(opened, entries.copy)


def spread_over_a_day(ledger: Log, clock: Clock, project: str, charges: int, units: int) -> Callable[[], Decision]:
    """Fill a day evenly; what is returned goes on at that pace, so that each charge comes as one expires."""
    spent = budget(ledger, project, [day()], clock=clock)
    step_ms = DAY_MS // charges

    def call() -> Decision:
        clock.ms += step_ms
        return spent.charge(CHEAP, units=units, **LABELS)

    for _ in range(charges):
        call()
    return call
