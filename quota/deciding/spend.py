"""Settles a call whose cost is known only afterwards; and charges around a block or a function, for clients without a
hook for charging: `Budget.spend`.

Settlement   settles a call once, by its true cost
LetThrough   the decision about an admitted call that can be settled
Spending     charges on every entry: Spend, and `AsyncSpend` for event loops
SpentCall    the decision that entering yields; it can be settled
spendable    tells the kind of a function to decorate, also for `AsyncBudget.spend`
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any, Self, TypeVar

from quota.common.log import warn
from quota.common.text import many
from quota.decision import Decision
from quota.errors import Refused, UsageError
from quota.rules.calls import settled_units
from quota.rules.entry import Entry
from quota.terms.arguments import made_by
from quota.terms.limits import DAY_MS

MAX_WARNED = 1_000
"""The most methods for which a process remembers its last warning."""

_warned: dict[tuple[str, str], int] = {}
"""The day of the last warning about a method of a project that cost more than was reserved."""


class Settlement:
    """Settles a call once; if it charged several buckets, in the first bucket. If the call cost more than was charged,
    it counts in full, and the log has a line for it, at most one a day for each method."""

    def __init__(self, settle: Callable[[str, int], Entry], decision: Decision) -> None:
        self._settle = settle
        self._decision = decision
        self._used_units: int | None = None

    def settle(self, used_units: int) -> None:
        """See `SpentCall.settle`."""
        before_units, decision, used_units = self._used_units, self._decision, settled_units(used_units)
        if used_units == (0 if decision.id is None else before_units):
            return
        if decision.id is None:
            raise UsageError(f"this call of {decision.method} is free: there is no charge to settle; give it units")
        if before_units is not None:
            raise UsageError(
                f"this call of {decision.method} was settled with {many(before_units, 'unit')} already; "
                "`budget.settle(call.id, units)` corrects that"
            )
        self._settle(decision.id, used_units)
        self._used_units = used_units
        project, method, day = decision.project, decision.method, decision.decided_at_ms // DAY_MS
        if used_units > decision.cost_units and _warned.get((project, method)) != day:
            if len(_warned) >= MAX_WARNED:
                _warned.clear()
            _warned[project, method] = day
            message = "it counts in full, and a limit may be exceeded; reserve more"
            units = {"reserved": decision.cost_units, "used": used_units}
            warn("reserved_too_little", message, project=project, method=method, **units)


class LetThrough(Decision):
    """The decision about an admitted call that can be settled."""

    _settlement: Settlement

    @classmethod
    def of(cls, decision: Decision, settle: Callable[[str, int], Entry]) -> Self:
        """The call of a decision. Raises Refused."""
        if not decision.admitted:
            raise Refused(decision)
        call = cls(*decision)
        call._settlement = Settlement(settle, decision)
        return call

    def __reduce__(self) -> tuple[type[Decision], tuple[object, ...]]:
        """A copy for another process is a plain decision."""
        return Decision, tuple(self)


# -- around a block or a function --------------------------------------------------------------------------------------

F = TypeVar("F", bound="Callable[..., Any]")

ASYNC_KINDS = ("coroutine", "async generator")


class Spending:
    """Charges a budget on every entry, and raises Refused before the body runs. The charge stays unless the body
    settles the call that entering yields, or refunds it. With `reserves`, a block charges an upper bound. The calls of
    a decorated function cannot be settled, so they do not reserve."""

    def __init__(self, budget: Any, charge: Callable[..., Any], *, reserves: bool) -> None:
        self._budget, self._charge, self._reserves = budget, charge, reserves

    def _recreate_cm(self) -> Self:
        return type(self)(self._budget, self._charge, reserves=False)


class Spend(Spending, ContextDecorator):
    """As a decorator it accepts a function that runs when it is called; raises UsageError for anything else."""

    def __call__(self, func: F) -> F:
        """`func` with a charge at each call. Raises UsageError for a coroutine or generator function."""
        kind, name = spendable(func)
        if kind in ASYNC_KINDS:
            raise UsageError(
                f"{name} is async, so charging for it here would block its event loop; use a budget of "
                "`async with quota.open_async() as q:`"
            )
        if kind == "generator":
            raise UsageError(
                f"{name} runs later than it is called, and would be charged even if it never runs; write "
                "`with budget.spend(...):` inside it"
            )
        return super().__call__(func)

    def __enter__(self) -> SpentCall:
        return SpentCall.of(self._charge(reserved=self._reserves)[0], self._budget.settle)

    def __exit__(self, *exc: object) -> None:
        return None


class SpentCall(LetThrough):
    """The decision about an admitted call. `settle` sets its true cost."""

    def settle(self, used_units: int) -> None:
        """Set the charge to `used_units`, 0 or more. Once only: repeating the same number does nothing, another number
        raises UsageError. After a LedgerError you may try again."""
        self._settlement.settle(used_units)


def spendable(func: Any) -> tuple[str, str]:
    """What a call of a function makes ("coroutine", "generator", "async generator", or "" for its result), and the
    function's name. Raises UsageError if spend cannot decorate it."""
    name = str(getattr(func, "__qualname__", type(func).__name__))[:80]
    if isinstance(func, (staticmethod, classmethod)):
        raise UsageError(f"{name}: write the spend below @{type(func).__name__}, next to the function")
    if isinstance(func, type) or not callable(func):
        raise UsageError(f"spend decorates functions, and {name} is not a function")
    return made_by(func), name
