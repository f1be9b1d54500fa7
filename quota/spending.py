"""`budget.spend(...)`: a charge around a block or a function."""

from __future__ import annotations

from contextlib import ContextDecorator
from typing import TYPE_CHECKING

from quota.errors import Refused

if TYPE_CHECKING:
    from quota.budget import Budget
    from quota.decision import Decision


class Spend(ContextDecorator):
    """Charges on every entry and raises Refused before the body runs; the charge stands whatever the body does.

    Entering yields the decision, whose `id` can be settled once the true cost is known.
    """

    def __init__(self, budget: Budget, method: str, *, units: int | None, job: str | None, region: str | None) -> None:
        self._budget = budget
        self._method = method
        self._units = units
        self._job = job
        self._region = region

    def __enter__(self) -> Decision:
        decision = self._budget.charge(self._method, units=self._units, job=self._job, region=self._region)
        if not decision.admitted:
            raise Refused(decision)
        return decision

    def __exit__(self, *exc: object) -> None:
        return None
