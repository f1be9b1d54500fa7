"""A ledger and the budgets of one project over it, for tests of decisions."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from quota.budget import Budget
from quota.ledger.contract import Ledger
from quota.ledger.factory import open_ledger
from quota.terms.costs import CostBook
from quota.terms.limits import DAY_MS, Limit, Selector, Sliding, View
from support.books import BOOK

NOW_MS = 1_793_000_000_000


@dataclass
class Setup:
    """A ledger under a clock that the test moves, and budgets over it."""

    ledger: Ledger
    now_ms: int = NOW_MS
    project: str = field(default_factory=lambda: f"p-{uuid.uuid4().hex[:8]}")

    @classmethod
    def open(cls, url: str, *, now_ms: int = NOW_MS) -> Setup:
        setup: Setup
        ledger = open_ledger(url, clock=lambda: setup.now_ms)
        setup = cls(ledger, now_ms)
        return setup

    def budget(self, *limits: Limit, book: CostBook = BOOK, **more: object) -> Budget:
        limits = limits or (limit(500),)
        return Budget(
            credential="main",
            project=self.project,
            book=book,
            limits=limits,
            ledger=self.ledger,
            clock=lambda: self.now_ms,
            **more,  # type: ignore[arg-type]
        )


def limit(units: int, window_ms: int = DAY_MS, *, name: str = "day", **selector: object) -> Limit:
    """A sliding limit on the units bucket."""
    view = View(Selector(**{"buckets": ("units",), **selector}), Sliding(window_ms))  # type: ignore[arg-type]
    return Limit(name, units, view, units, 0)
