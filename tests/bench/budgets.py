"""The budgets that are measured: the default configuration's limits, with numbers that are never reached."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.kinds import CHEAP, DEAR, DECISIONS, LABELS
from quota.budget import Budget
from quota.deciding.allowance import Allowance
from quota.deciding.corrections import add
from quota.deciding.project import Project
from quota.deciding.recorder import Recorder
from quota.journal.journal import Journal
from quota.ledger.factory import Identity
from quota.rules.entry import START, Entry, Keys
from quota.terms.limits import DAY_MS, Calendar, Limit, Selector, Sliding, View
from support.books import BOOK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from quota.decision import Decision
    from quota.ledger.log import Log

PLENTY = 10**9
ADDED_AT_ONCE = 500
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


def budget(ledger: Log, project: str, limits: Sequence[Limit], *, clock: Callable[[], int] | None = None) -> Budget:
    """Without what a machine remembers of the log."""
    return Budget(credential="main", book=BOOK, limits=limits, project=Project(ledger, project, clock=clock))


def guarded(ledger: Log, project: str, limits: Sequence[Limit], folder: Path) -> Budget:
    """As a session makes it: with a journal of what this machine saw of the log, with what answers while the ledger
    cannot, and with what counts refusals."""
    opened = Project(
        ledger,
        project,
        journal=Journal(folder, Identity(ledger.label, project), keep_ms=DAY_MS),
        keys=Keys(folder=folder),
    )
    return Budget(
        credential="main",
        book=BOOK,
        limits=limits,
        project=opened,
        allowance=Allowance(1, 50),
        recorder=Recorder(opened.state),
    )


def charging(spent: Budget, method: str, units: int) -> Callable[[], Decision]:
    """One charge, which must be admitted: a refusal would be another measurement."""

    def call() -> Decision:
        decision = spent.charge(method, units=units, **LABELS)
        assert decision.admitted, decision
        return decision

    return call


def refusing(full: Budget, units: int) -> Callable[[], Decision]:
    """A charge that must be refused."""

    def call() -> Decision:
        decision = full.charge(DEAR, units=units, **LABELS)
        assert decision.reason == "limit", decision
        return decision

    return call


def fill_up(full: Budget, charges: int) -> Budget:
    """Fill the limits of a budget with charges of 1. It has read them when this returns."""
    fill(full.ledger, full.project, charges, DEAR)
    full.charge(DEAR, units=2, **LABELS)
    return full


def fill(
    ledger: Log,
    project: str,
    charges: int,
    method: str = CHEAP,
    *,
    after: int = 0,
    clock: Callable[[], int] | None = None,
) -> None:
    """Put charges into the log quickly, many at once, without deciding about them; `after` so many before."""
    opened = Project(ledger, project, clock=clock)
    for first in range(after, after + charges, ADDED_AT_ONCE):
        numbers = range(first, min(first + ADDED_AT_ONCE, after + charges))
        entries = [Entry(START, 1, "units", method, "trending", "US", f"filling-{n}") for n in numbers]
        add(opened, entries.copy)


def decisions(ledger: Log, folder: Path, full: int) -> dict[str, Callable[[], Decision]]:
    """The guarded decisions, each of a project of its own. Those that are refused meet `full` charges of 1."""
    calls = {}
    for number, (name, kind) in enumerate(DECISIONS.items()):
        limits = three(full if kind.refused else PLENTY)[: kind.limits]
        spent = guarded(ledger, f"decision-{number}", limits, folder)
        if kind.refused:
            calls[name] = refusing(fill_up(spent, full), kind.units)
        else:
            calls[name] = charging(spent, kind.method, kind.units)
    return calls


class SteppingClock:
    """A clock that moves only when told: a day passes in a second."""

    def __init__(self) -> None:
        self.ms = 1_793_000_000_000

    def __call__(self) -> int:
        return self.ms


def spread_over_a_day(
    ledger: Log, clock: SteppingClock, project: str, charges: int, units: int, limits: Sequence[Limit] = ()
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
