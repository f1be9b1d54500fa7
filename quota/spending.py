"""`budget.spend(...)`: a charge around a block or a function."""

from __future__ import annotations

import inspect
from contextlib import ContextDecorator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from quota.errors import Refused, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from quota.budget import Budget
    from quota.decision import Decision

F = TypeVar("F", bound="Callable[..., Any]")


class Spend(ContextDecorator):
    """Charges on every entry and raises Refused before the body runs; the charge stands whatever the body does.

    Entering yields the decision, whose `id` can be settled once the true cost is known. As a decorator it takes what
    runs when it is called; raises UsageError for anything else.
    """

    def __init__(self, budget: Budget, method: str, *, units: int | None, job: str | None, region: str | None) -> None:
        self._budget = budget
        self._method = method
        self._units = units
        self._job = job
        self._region = region

    def __call__(self, func: F) -> F:
        """`func`, charged for at each call. Raises UsageError for a coroutine or generator function."""
        if isinstance(func, type) or not (callable(func) or isinstance(func, classmethod)):
            raise UsageError(f"spend decorates functions, and {_name(func)} is none")
        if _runs_later(func):
            raise UsageError(
                f"{_name(func)} runs later than it is called, and would be charged for without being run; write "
                "`with budget.spend(...):` inside it"
            )
        if isinstance(func, (staticmethod, classmethod)):
            raise UsageError(f"{_name(func)}: write the spend below @{type(func).__name__}, next to the function")
        return super().__call__(func)

    def __enter__(self) -> Decision:
        decision = self._budget.charge(self._method, units=self._units, job=self._job, region=self._region)
        if not decision.admitted:
            raise Refused(decision)
        return decision

    def __exit__(self, *exc: object) -> None:
        return None


def _runs_later(func: Any) -> bool:
    """Whether calling it only makes something that runs later: a coroutine or a generator."""
    while isinstance(func, (partial, staticmethod, classmethod)):
        func = func.func if isinstance(func, partial) else func.__func__
    if not inspect.isroutine(func):
        func = type(func).__call__
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(is_one(func) for is_one in kinds)


def _name(func: Any) -> str:
    return str(getattr(func, "__qualname__", type(func).__name__))[:80]
