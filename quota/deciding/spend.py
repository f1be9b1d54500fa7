"""A charge around a block or a function, for clients that have no hook for charging: `Budget.spend`.

Spend        charges on every entry
SpentCall    what entering yields: the decision, which can be settled
Settlement   settles a call, once, by what it is said to have cost
spendable    what a function is that somebody wants to decorate: `AsyncBudget.spend` asks it too
"""

from __future__ import annotations

import inspect
from contextlib import ContextDecorator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from quota.common.log import warn
from quota.common.text import many
from quota.decision import Decision
from quota.errors import Refused, UsageError
from quota.terms.limits import DAY_MS

if TYPE_CHECKING:
    from collections.abc import Callable

    from quota.ledger.entry import Charge, Entry

F = TypeVar("F", bound="Callable[..., Any]")

ASYNC_KINDS = ("coroutine", "async generator")


class Spend(ContextDecorator):
    """Charges on every entry, and raises Refused before the body runs. The charge stays whatever the body does, unless
    it settles the call that entering yields. With `reserves`, what a block charges is an upper bound.

    As a decorator it accepts a function that runs when it is called; raises UsageError for anything else. Nobody can
    settle its calls, so none of them reserves.
    """

    def __init__(
        self, charge: Callable[..., list[Decision]], settle: Callable[[str, int], Charge | Entry], *, reserves: bool
    ) -> None:
        self._charge = charge
        self._settle = settle
        self._reserves = reserves

    def __call__(self, func: F) -> F:
        """`func` with a charge at each call. Raises UsageError for a coroutine or generator function."""
        kind, name = spendable(func)
        if kind in ASYNC_KINDS:
            raise UsageError(
                f"{name} is async, and to charge for it here would block its event loop; use a budget of "
                "`async with quota.open_async() as q:`"
            )
        if kind == "generator":
            raise UsageError(
                f"{name} runs later than it is called, and would be charged for without being run; write "
                "`with budget.spend(...):` inside it"
            )
        return super().__call__(func)

    def _recreate_cm(self) -> Spend:
        return Spend(self._charge, self._settle, reserves=False)

    def __enter__(self) -> SpentCall:
        decision = self._charge(reserved=self._reserves)[0]
        if not decision.admitted:
            raise Refused(decision)
        call = SpentCall(*decision)
        call._settlement = Settlement(self._settle, decision)
        return call

    def __exit__(self, *exc: object) -> None:
        return None


class SpentCall(Decision):
    """The decision about a call that was let through. `settle` says what it really cost."""

    _settlement: Settlement

    def settle(self, used_units: int) -> None:
        """Let the charge count `used_units`, 0 or more, whether that is less than was charged or more. Once: the same
        number may be repeated, another one raises UsageError. Raises LedgerError; then it may be tried again."""
        self._settlement.settle(used_units)


class Settlement:
    """Settles a call, once: of several buckets, in the first one. If it cost more than was charged, it counts in full,
    and a line in the log says so: one a day for each method."""

    def __init__(self, settle: Callable[[str, int], Charge | Entry], decision: Decision) -> None:
        self._settle = settle
        self._decision = decision
        self._used_units: int | None = None

    def settle(self, used_units: int) -> None:
        """See `SpentCall.settle`."""
        known, decision = self._used_units, self._decision
        if known is not None and type(used_units) is int and used_units == known:
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


MAX_TOLD = 1_000
"""The most methods for which a process remembers that it said so."""

_told: dict[tuple[str, str], int] = {}
"""The day on which a process last said that a method of a project cost more than was reserved."""


def _say_more(decision: Decision, reserved_units: int, used_units: int) -> None:
    key, day = (decision.project, decision.method), decision.decided_at_ms // DAY_MS
    if _told.get(key) == day:
        return
    if len(_told) >= MAX_TOLD:
        _told.clear()
    _told[key] = day
    warn(
        "reserved_too_little project=%s method=%s reserved=%d used=%d: it counts in full, and a limit may be "
        "exceeded; reserve more",
        *key,
        reserved_units,
        used_units,
    )


def spendable(func: Any) -> tuple[str, str]:
    """What a call of a function makes, a "coroutine", a "generator", an "async generator" or "" for its result; and the
    function's name. Raises UsageError for what no spend can decorate."""
    name = str(getattr(func, "__qualname__", type(func).__name__))[:80]
    if isinstance(func, (staticmethod, classmethod)):
        raise UsageError(f"{name}: write the spend below @{type(func).__name__}, next to the function")
    if isinstance(func, type) or not callable(func):
        raise UsageError(f"spend decorates functions, and {name} is none")
    while isinstance(func, partial):
        func = func.func
    if not inspect.isroutine(func):
        func = type(func).__call__
    kinds = {
        "coroutine": inspect.iscoroutinefunction,
        "generator": inspect.isgeneratorfunction,
        "async generator": inspect.isasyncgenfunction,
    }
    return next((kind for kind, is_one in kinds.items() if is_one(func)), ""), name
