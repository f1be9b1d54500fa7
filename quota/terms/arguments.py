"""Converts callers' arguments to whole numbers and names. Raises a one-line UsageError for anything else.

Without this check a bad number would be stored in the ledger, and would fail later for everybody who reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from operator import index
from typing import TypeVar

from quota.common.text import show
from quota.errors import UsageError

T = TypeVar("T")

MAX_NUMBER = 2**53 - 1
"""Larger numbers are not exact in Lua and JSON."""

MAX_SECONDS = 10**6
"""Eleven days. Nobody waits that long for an answer, and the system accepts no longer timeout."""


def whole(value: object, what: str, minimum: int, maximum: int) -> int:
    """`value` as an int: an int, or an integer type such as numpy's. Raises UsageError for the rest, bools included."""
    number = None
    if type(value) is int:
        number = value
    elif not isinstance(value, bool):
        with suppress(TypeError):
            number = index(value)  # type: ignore[arg-type]  # raises if it is not an integer
    if number is None or not minimum <= number <= maximum:
        raise UsageError(f"{show(value)} {what} is a whole number from {minimum:,} to {maximum:,}")
    return number


def seconds(value: object, what: str) -> float:
    """`value` as a number of seconds above 0, fractions included."""
    number = 0.0
    if not isinstance(value, (bool, str, bytes)):
        with suppress(TypeError, ValueError, OverflowError):
            number = float(value)  # type: ignore[arg-type]  # raises if it is not a number
    if not 0 < number <= MAX_SECONDS:
        raise UsageError(f"{what} {show(value)} is not a number of seconds above 0, up to {MAX_SECONDS:,}")
    return number


def whole_clock(clock: Callable[[], int]) -> Callable[[], int]:
    """`clock`, checked to return whole milliseconds: `time.time`, for one, returns fractions of seconds."""
    if not callable(clock):
        raise UsageError(f"clock {show(clock)} is not a function")
    return lambda: whole(clock(), "ms: what a clock says", 0, MAX_NUMBER)


def one(value: object, kind: type[T], what: str, remedy: str) -> T:
    """`value`, which is of the class `kind`. Raises UsageError with the `remedy` for anything else."""
    if not isinstance(value, kind):
        raise UsageError(f"{what} {show(value)} is no {kind.__name__}; {remedy}")
    return value


def text(value: object, what: str) -> str:
    """`value` as a plain str: a str, or an instance of a subclass, such as a StrEnum member."""
    if not isinstance(value, str):
        raise UsageError(f"{what} {show(value)} is not a str")
    return str.__str__(value)


def texts(value: str | Iterable[str], what: str) -> tuple[str, ...]:
    """`value` as a tuple of names. A lone str is one name, not its characters."""
    if isinstance(value, str):
        value = (value,)
    try:
        names = tuple(value)
    except TypeError:
        raise UsageError(f"{what} {show(value)} is not a str, and not several of them in a list") from None
    names = tuple(text(name, what) for name in names)
    if "" in names:
        raise UsageError(f"{what} '' is a name without characters")
    return names
