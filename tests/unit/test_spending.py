"""`budget.spend` as a decorator: on what runs when it is called, and on nothing else."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from quota.budget import Budget
from quota.errors import Refused, UsageError
from quota.ledger.factory import open_ledger
from quota.terms.limits import DAY_MS, Limit, Selector, Sliding, View
from support.setup import budget_of, charges_at


@pytest.fixture
def budget() -> Iterator[Budget]:
    ledger = open_ledger("sqlite://")
    limit = Limit("day", 2, View(Selector(), Sliding(DAY_MS)), 2, 0)
    yield budget_of(ledger, limit)
    ledger.close()


def charges(budget: Budget) -> int:
    return len(charges_at(budget.ledger))


async def coroutine(*args: Any) -> int:
    return len(args)


async def async_generator(*args: Any) -> AsyncIterator[int]:
    yield len(args)


def generator(*args: Any) -> Iterator[int]:
    yield len(args)


def function(*args: Any) -> int:
    return len(args)


class Asked:
    def __call__(self, *args: Any) -> int:
        return len(args)

    def method(self, *args: Any) -> int:
        return len(args)

    async def later(self, *args: Any) -> int:
        return len(args)


class AskedLater:
    async def __call__(self, *args: Any) -> int:
        return len(args)


RUN_LATER: dict[str, Any] = {
    "coroutine function": coroutine,
    "async generator function": async_generator,
    "generator function": generator,
    "partial of a coroutine function": functools.partial(coroutine, 1),
    "coroutine method": Asked().later,
    "callable with a coroutine": AskedLater(),
}
NO_FUNCTIONS: dict[str, Any] = {
    "static method": staticmethod(function),
    "class method": classmethod(function),
    "class": Asked,
    "name": "function",
}
RUN_AT_ONCE: dict[str, Callable[..., Any]] = {
    "function": function,
    "lambda": lambda *args: len(args),
    "callable": Asked(),
    "method": Asked().method,
}


@pytest.mark.parametrize("kind", RUN_LATER)
def test_decorating_a_generator_or_coroutine_raises(budget: Budget, kind: str) -> None:
    """It would be charged without being run, and no longer be known for what it is."""
    wanted = r"runs later than it is called.*with budget\.spend" if kind.startswith("gen") else r"quota\.open_async\(\)"
    with pytest.raises(UsageError, match=wanted) as refused:
        budget.spend("videos.list")(RUN_LATER[kind])
    assert str(refused.value).isprintable()
    assert charges(budget) == 0


@pytest.mark.parametrize("kind", NO_FUNCTIONS)
def test_decorating_a_value_that_is_not_a_function_raises(budget: Budget, kind: str) -> None:
    with pytest.raises(UsageError, match=r"spend below @(static|class)method|spend decorates functions") as refused:
        budget.spend("videos.list")(NO_FUNCTIONS[kind])
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("kind", RUN_AT_ONCE)
def test_each_call_of_a_decorated_function_is_charged(budget: Budget, kind: str) -> None:
    spending = budget.spend("videos.list")(RUN_AT_ONCE[kind])
    assert charges(budget) == 0
    assert [spending(1, 2), spending(1, 2)] == [2, 2]
    with pytest.raises(Refused):
        spending(1, 2)
    assert charges(budget) == 2


def test_below_staticmethod_and_classmethod_it_is_charged(budget: Budget) -> None:
    class Client:
        @staticmethod
        @budget.spend("videos.list")
        def fetch(region: str) -> str:
            return region

        @classmethod
        @budget.spend("videos.list")
        def name(cls) -> str:
            return cls.__name__

    assert (Client.fetch("DE"), Client.name()) == ("DE", "Client")
    assert charges(budget) == 2
