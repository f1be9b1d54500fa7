"""What a call really cost, where that is known only after it.

Settlement    settles a call, once, by what it is said to have cost
LetThrough    the decision about a call that can be settled
"""

from __future__ import annotations

from collections.abc import Callable

from quota.common.log import warn
from quota.common.text import many
from quota.decision import Decision
from quota.errors import UsageError
from quota.rules.calls import MAX_CHARGE_UNITS
from quota.rules.entry import Entry
from quota.terms.arguments import whole
from quota.terms.limits import DAY_MS


class Settlement:
    """Settles a call, once: of several buckets, in the first one. If it cost more than was charged, it counts in full,
    and a line in the log says so: one a day for each method."""

    def __init__(self, settle: Callable[[str, int], Entry], decision: Decision) -> None:
        self._settle = settle
        self._decision = decision
        self._used_units: int | None = None

    def settle(self, used_units: int) -> None:
        """See `quota.deciding.spend.SpentCall.settle`."""
        known, decision, used_units = self._used_units, self._decision, settled_units(used_units)
        if used_units == known:
            return
        if known is not None:
            raise UsageError(
                f"this call of {decision.method} was settled with {many(known, 'unit')} already; "
                "`budget.settle(call.id, units)` corrects that"
            )
        before = self._settle(decision.id or "", used_units)
        self._used_units = used_units
        if used_units > before.units:
            _say_more(decision, before.units, used_units)


class LetThrough(Decision):
    """The decision about a call that was let through, and can be settled."""

    _settlement: Settlement

    def __reduce__(self) -> tuple[type[Decision], tuple[object, ...]]:
        """A copy for another process is the decision alone."""
        return Decision, tuple(self)


MAX_TOLD = 1_000
"""The most methods for which a process remembers that it said so."""

_told: dict[tuple[str, str], int] = {}
"""The day on which a process last said that a method of a project cost more than was reserved."""


def _say_more(decision: Decision, reserved_units: int, used_units: int) -> None:
    project, method, day = decision.project, decision.method, decision.decided_at_ms // DAY_MS
    if _told.get((project, method)) == day:
        return
    if len(_told) >= MAX_TOLD:
        _told.clear()
    _told[project, method] = day
    said = "it counts in full, and a limit may be exceeded; reserve more"
    warn("reserved_too_little", said, project=project, method=method, reserved=reserved_units, used=used_units)


def settled_units(units: object) -> int:
    """What a charge counts from now on, checked. Raises UsageError."""
    return whole(units, "units: what a charge counts, 0 after a refund,", 0, MAX_CHARGE_UNITS)
