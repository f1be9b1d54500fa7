"""Bounds what one run may spend: `max_units` of a job. The ledger does not know it, and each run begins at 0."""

from __future__ import annotations

from threading import Lock

from quota.common.text import many
from quota.decision import Decision, LimitState
from quota.errors import CostExceedsLimit
from quota.terms.arguments import MAX_NUMBER, whole

LIMIT_NAME = "max_units"
"""The name of this limit in a refusal."""


class RunLimit:
    """The units that one run may spend, and has spent. Safe to share between threads."""

    def __init__(self, max_units: int) -> None:
        self.max_units = whole(max_units, "units: max_units", 1, MAX_NUMBER)
        self.spent_units = 0
        self._lock = Lock()

    def take(self, units: int) -> bool:
        """Whether these units fit; if so, they count as spent. Raises CostExceedsLimit if they fit in no run."""
        if units > self.max_units:
            raise CostExceedsLimit(
                f"a call costs {many(units, 'unit')} and max_units of the job is {self.max_units:,}: it can never fit; "
                "raise max_units or make a cheaper call"
            )
        with self._lock:
            fits = self.spent_units + units <= self.max_units
            if fits:
                self.spent_units += units
        return fits

    def give_back(self, units: int) -> None:
        """Give back units that were taken but not charged or not used. Below 0: the call used more than was taken."""
        with self._lock:
            self.spent_units -= units

    def refusal(self, credential: str, project: str, method: str, units: int, at_ms: int) -> Decision:
        """The decision about a call that does not fit."""
        left = max(0, self.max_units - self.spent_units)
        return Decision(
            admitted=False,
            credential=credential,
            project=project,
            method=method,
            cost_units=units,
            reason="run",
            refused_by=LIMIT_NAME,
            remaining_units=left,
            decided_at_ms=at_ms,
            limits=(LimitState(LIMIT_NAME, units, self.spent_units, self.max_units, left),),
            detail=f"this run has spent {self.spent_units:,} of its {many(self.max_units, 'unit')}",
        )
