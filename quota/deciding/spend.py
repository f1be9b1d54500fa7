"""A charge around a block or a function, for clients that have no hook for charging: `Budget.spend`.

Spend        charges on every entry
SpentCall    what entering yields: the decision, which can be settled
spendable    what a function is that somebody wants to decorate: `AsyncBudget.spend` asks it too
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any, TypeVar

from quota.common.functions import made_by
from quota.deciding.settlement import LetThrough, Settlement
from quota.decision import Decision
from quota.errors import Refused, UsageError
from quota.rules.entry import Entry

F = TypeVar("F", bound="Callable[..., Any]")

ASYNC_KINDS = ("coroutine", "async generator")


class Spend(ContextDecorator):
    """Charges on every entry, and raises Refused before the body runs. The charge stays whatever the body does, unless
    it settles the call that entering yields. With `reserves`, what a block charges is an upper bound.

    As a decorator it accepts a function that runs when it is called; raises UsageError for anything else. Nobody can
    settle its calls, so none of them reserves.
    """

    def __init__(
        self, charge: Callable[..., list[Decision]], settle: Callable[[str, int], Entry], *, reserves: bool
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


class SpentCall(LetThrough):
    """The decision about a call that was let through. `settle` says what it really cost."""

    def settle(self, used_units: int) -> None:
        """Let the charge count `used_units`, 0 or more, whether that is less than was charged or more. Once: the same
        number may be repeated, another one raises UsageError. Raises LedgerError; then it may be tried again."""
        self._settlement.settle(used_units)


def spendable(func: Any) -> tuple[str, str]:
    """What a call of a function makes, a "coroutine", a "generator", an "async generator" or "" for its result; and the
    function's name. Raises UsageError for what no spend can decorate."""
    name = str(getattr(func, "__qualname__", type(func).__name__))[:80]
    if isinstance(func, (staticmethod, classmethod)):
        raise UsageError(f"{name}: write the spend below @{type(func).__name__}, next to the function")
    if isinstance(func, type) or not callable(func):
        raise UsageError(f"spend decorates functions, and {name} is none")
    return made_by(func), name
