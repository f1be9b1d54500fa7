"""What callers hand in, made what it must be: whole numbers, names. Whatever else it is, UsageError on one line.

A number that is none would not fail here and now: stored in a ledger, it fails for everybody who reads it later.
"""

from __future__ import annotations

from contextlib import suppress
from operator import index
from typing import TYPE_CHECKING

from quota.common.text import show
from quota.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MAX_NUMBER = 2**53 - 1
"""Beyond it numbers are not exact in Lua and JSON."""

MAX_SECONDS = 10**6
"""Eleven days: no answer is waited for as long, and the system takes no more."""


def whole(value: object, what: str, minimum: int, maximum: int) -> int:
    """`value` as an int: an int, or what stands for one, as numpy's do. A bool is no number."""
    number = None
    if type(value) is int:
        number = value
    elif not isinstance(value, bool):
        with suppress(TypeError):
            number = index(value)  # type: ignore[arg-type]  # what does not stand for one raises
    if number is None or not minimum <= number <= maximum:
        raise UsageError(f"{show(value)} {what} is a whole number from {minimum} to {maximum}")
    return number


def seconds(value: object, what: str) -> float:
    """`value` as a number of seconds above 0, also a part of one."""
    number = 0.0
    if not isinstance(value, (bool, str, bytes)):
        with suppress(TypeError, ValueError, OverflowError):
            number = float(value)  # type: ignore[arg-type]  # what is no number raises
    if not 0 < number <= MAX_SECONDS:
        raise UsageError(f"{what} {show(value)} is not a number of seconds above 0, up to {MAX_SECONDS}")
    return number


def whole_clock(clock: Callable[[], int]) -> Callable[[], int]:
    """`clock`, held to whole milliseconds: `time.time` gives fractions of seconds."""
    return lambda: whole(clock(), "ms: what a clock says", 0, MAX_NUMBER)


def text(value: object, what: str) -> str:
    """`value` as a plain str: one, or what is one by inheritance, as the members of a StrEnum are."""
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
