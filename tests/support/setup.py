"""A ledger, the budgets of one project over it, its state and its claims, for tests of decisions."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from quota.budget import Budget
from quota.deciding.history import charges
from quota.deciding.keys import Keys
from quota.deciding.project import Project
from quota.journal.journal import Journal
from quota.ledger.factory import Identity, open_ledger
from quota.ledger.log import Log
from quota.ledger.state import State
from quota.rules.claims import Claim
from quota.rules.entry import Entry, id_of_call
from quota.rules.spent import Spent
from quota.terms.costs import CostBook
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS, Limit, Selector, Sliding, View
from support.books import BOOK

NOW_MS = 1_793_000_000_000
HOLD_MS, LEASE_MS = 2 * HOUR_MS, 10 * MINUTE_MS
"""Of claims."""


@dataclass
class Setup:
    """A ledger under a clock that the test moves, and budgets over it."""

    ledger: Log
    now_ms: int = NOW_MS
    project: str = field(default_factory=lambda: f"p-{uuid.uuid4().hex[:8]}")

    @classmethod
    def open(cls, url: str, *, now_ms: int = NOW_MS) -> Setup:
        setup: Setup
        ledger = open_ledger(url, clock=lambda: setup.now_ms)
        setup = cls(ledger, now_ms)
        return setup

    def opened(self, **options: Any) -> Project:
        """The project's log, as one more process reads it."""
        return Project(self.ledger, self.project, clock=lambda: self.now_ms, **options)

    @property
    def state(self) -> State:
        """What changes seldom: facts, refusals."""
        return self.opened().state

    def entries(self) -> list[Spent]:
        """All charges, with their corrections."""
        return charges(self.opened())

    def budget(self, *limits: Limit, book: CostBook = BOOK, jitter_ms: int = 0, **options: Any) -> Budget:
        """A budget of one more process."""
        project = self.opened(jitter_ms=jitter_ms)
        return Budget(credential="main", book=book, limits=limits or (limit(500),), project=project, **options)


def limit(units: int, window_ms: int = DAY_MS, *, name: str = "day", **selector: object) -> Limit:
    """A sliding limit on the units bucket."""
    view = View(Selector(**{"buckets": ("units",), **selector}), Sliding(window_ms))  # type: ignore[arg-type]
    return Limit(name, units, view, units, 0)


def budget_of(
    ledger: Log,
    *limits: Limit,
    project: str = "p",
    credential: str = "main",
    book: CostBook = BOOK,
    clock: Callable[[], int] | None = None,
    folder: Path | None = None,
    **options: Any,
) -> Budget:
    """A budget over a project's log, as one more process has it. With a `folder`, the machine's state lies there."""
    keys = Keys(folder=folder)
    journal = None if folder is None else Journal(folder, Identity("test", project), keep_ms=DAY_MS)
    opened = Project(ledger, project, journal=journal, keys=keys, clock=clock)
    return Budget(credential=credential, book=book, limits=limits, project=opened, **options)


def charges_at(ledger: Log, project: str = "p") -> list[Spent]:
    """All charges of a project, with their corrections."""
    return charges(Project(ledger, project))


def ids_of(entries: Iterable[Spent | Entry]) -> list[str]:
    """The ids of calls with one charge each."""
    return [id_of_call(charge.id[0], charge.key, 0) for charge in entries]


def state_at(ledger: Log, project: str = "p") -> State:
    """The facts, claims and refusals of a project."""
    return Project(ledger, project).state


@dataclass
class Clocked:
    """A state, and its clock. The keys of its changes are `k0`, `k1` and so on, each with the `name`."""

    log: Log
    project: str = "p"
    name: str = ""
    now_ms: int = NOW_MS

    def __post_init__(self) -> None:
        keys = count()
        getattr(self.log, "_log", self.log)._clock = lambda: self.now_ms
        self.state = State(self.log, self.project, lambda: f"k{next(keys)}{self.name}")


def claim_of(owner: str, run: str = "", *regions: str, **more: Any) -> Claim:
    """A claim of a store, whose machine and host have its name; by default of the regions US and DE."""
    given = {
        "name": "trending|trending",
        "owner": owner,
        "run": run or f"run of {owner}",
        "machine": f"machine of {owner}",
        "host": f"host of {owner}",
        "regions": regions or ("US", "DE"),
        "hold_ms": HOLD_MS,
        "lease_ms": LEASE_MS,
    }
    return Claim(**{**given, **more})
