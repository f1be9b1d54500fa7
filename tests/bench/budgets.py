"""The budgets that are measured: the default configuration's limits, with numbers that are never reached."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quota.budget import Budget
from quota.common.clock import host_clock
from quota.decision import Decision
from quota.ledger.entry import Charge
from quota.recovery.allowance import Allowance
from quota.terms.limits import DAY_MS, Calendar, Limit, Selector, Sliding, View
from support.books import BOOK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from quota.decision import Decision
    from quota.ledger.contract import Ledger

PLENTY = 10**9
CHEAP, DEAR = "videos.list", "search.list"
DEAR_UNITS = 100
LABELS = {"job": "trending", "region": "US"}
REPAID_AT_ONCE = 100
NOTHING = "return 1"
"""The script of the floors."""


def day(units: int = PLENTY) -> Limit:
    return Limit("day", units, View(Selector(buckets=("units",)), Sliding(DAY_MS)), units, 0)


def one() -> list[Limit]:
    """The last 24 hours."""
    return [day()]


def two() -> list[Limit]:
    """The default configuration: the last 24 hours, and upstream's own day."""
    return three()[:2]


def three(units: int = PLENTY) -> list[Limit]:
    """The last 24 hours, upstream's own day, and a narrow limit on searches."""
    pacific = View(Selector(buckets=("units",)), Calendar("day", "America/Los_Angeles"))
    search = View(Selector(buckets=("units",), methods=(DEAR,)), Sliding(DAY_MS))
    return [day(units), Limit("pacific-day", units, pacific, units, 0), Limit("search", units, search, units, 0)]


def budget(ledger: Ledger, project: str, limits: Sequence[Limit], *, clock: Callable[[], int] | None = None) -> Budget:
    return Budget(credential="main", project=project, book=BOOK, limits=limits, ledger=ledger, clock=clock)


def guarded(ledger: Ledger, project: str, limits: Sequence[Limit], folder: Path) -> Budget:
    """As a session makes it: with what remembers the ledger, and what answers while the ledger cannot."""
    from quota.recovery.high_water_mark import (
        HighWaterMark,
    )  # not above: an earlier revision, as in `bench.before`, has none

    return Budget(
        credential="main",
        project=project,
        book=BOOK,
        limits=limits,
        ledger=ledger,
        high_water_mark=HighWaterMark(str(folder / "high-water-marks" / project / "1"), project),
        allowance=Allowance(str(folder / "allowance.db"), 1, 50, host_clock),
    )


def charging(spent: Budget, method: str, units: int) -> Callable[[], Decision]:
    """One charge, which must be admitted: a refusal would be another measurement."""

    def call() -> Decision:
        decision = spent.charge(method, units=units, **LABELS)
        assert decision.admitted, decision
        return decision

    return call


def refusing(ledger: Ledger, project: str, *, walked: int) -> Callable[[], Decision]:
    """A charge of 100 that is refused, and whose time to come back is known after `walked` entries of the log."""
    units = DEAR_UNITS // walked
    full = budget(ledger, project, [day(5 * DEAR_UNITS)])
    for _ in range(5 * walked):
        full.charge(CHEAP, units=units, **LABELS)

    def call() -> Decision:
        decision = full.charge(DEAR, **LABELS)
        assert decision.reason == "limit", decision
        return decision

    return call


def refusing_when_full(full: Budget, ledger: Ledger, charges: int, units: int) -> Callable[[], Decision]:
    """A charge that is refused by the limits of a budget, each of them full of charges of 1."""
    full.charge(DEAR, units=1, **LABELS)  # a ledger has an epoch once somebody was admitted
    fill(ledger, full.project, charges - 1, DEAR)
    full.charge(DEAR, units=2, **LABELS)  # the totals are known then, and when another call fits

    def call() -> Decision:
        decision = full.charge(DEAR, units=units, **LABELS)
        assert not decision.admitted, decision
        return decision

    return call


def fill(ledger: Ledger, project: str, charges: int, method: str = CHEAP, after: int = 0) -> None:
    """Put charges into the log quickly, a hundred in each call, without deciding about them; `after` so many before."""
    for first in range(after + 1, after + charges + 1, REPAID_AT_ONCE):
        numbers = range(first, min(first + REPAID_AT_ONCE, after + charges + 1))
        batch = [(n, Charge(1, "units", method, "trending", "US", f"filling-{n}")) for n in numbers]
        ledger.repay(project, "bench", batch)


class SteppingClock:
    """A clock that moves only when told: a day passes in a second."""

    def __init__(self) -> None:
        self.ms = 1_793_000_000_000

    def __call__(self) -> int:
        return self.ms


def spread_over_a_day(
    ledger: Ledger, clock: SteppingClock, project: str, charges: int, units: int, limits: Sequence[Limit] = ()
) -> Callable[[], Decision]:
    """Fill a day evenly; what is returned goes on at that pace, so that each charge comes as one expires."""
    spent = budget(ledger, project, limits or [day()], clock=clock)
    step_ms = DAY_MS // charges

    def call() -> Decision:
        clock.ms += step_ms
        return spent.charge(CHEAP, units=units, **LABELS)

    for _ in range(charges):
        call()
    return call
