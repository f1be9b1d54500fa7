"""One ledger, some machines with what each remembers of it, and the time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quota.budget import Budget
from quota.ledger.factory import open_ledger
from quota.recovery.high_water_mark import HighWaterMark
from quota.terms.limits import HOUR_MS, Limit
from support.books import BOOK
from support.losses import Machine
from support.setup import limit

if TYPE_CHECKING:
    from collections.abc import Callable

    from quota.ledger.contract import Ledger
    from support.losses import LedgerStorage

NOW = 1_793_000_000_000


class Site:
    """One ledger, some machines, and the time."""

    def __init__(self, storage: LedgerStorage, folder: Path) -> None:
        self.storage = storage
        self.folder = folder
        self.now_ms = NOW
        self.machines: list[Machine] = []

    def machine(self, name: str = "a") -> Machine:
        self.machines.append(Machine(name, self.folder, self.storage.url, lambda: self.now_ms))
        return self.machines[-1]

    def empty(self) -> None:
        self.storage.empty()
        self.now_ms += 1

    def restore(self, copy: object) -> None:
        self.storage.restore(copy)
        self.now_ms += 1


def charge(budget: Budget, times: int = 1, units: int = 1) -> int:
    """Charge so often; the units used afterwards in the first limit."""
    for _ in range(times):
        decision = budget.charge("videos.list", units=units)
        assert decision.admitted, decision
    return decision.limits[0].used_units


def guarded(url: str, mark: HighWaterMark | str, units: int = 100) -> tuple[Budget, HighWaterMark]:
    """The budget of a process of its own, which may rest while others charge. `mark`, or where it is kept."""
    if isinstance(mark, str):
        mark = HighWaterMark(mark, "p")
    made = Budget(
        credential="main",
        project="p",
        book=BOOK,
        limits=(limit(units),),
        ledger=open_ledger(url),
        high_water_mark=mark,
    )
    return made, mark


def unguarded(ledger: Ledger, clock: Callable[[], int], *limits: Limit) -> Budget:
    return Budget(credential="main", project="p", book=BOOK, limits=limits, ledger=ledger, clock=clock)


def watermark_at(folder: Path) -> str:
    return str(folder / "high-water-marks" / "p" / "1")


def close(budget: Budget, high_water_mark: HighWaterMark) -> None:
    budget.ledger.close()
    high_water_mark.close()


def full_hour(ms: int) -> int:
    """The first full hour that is not earlier."""
    return -(-ms // HOUR_MS) * HOUR_MS
