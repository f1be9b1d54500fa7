"""Inbound limits from their definitions: every request is kept, and every time is searched for."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from quota.inbound.contract import Decision, Limit, LimitState, Policy
from quota.terms.limits import MINUTE_MS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ALGORITHMS = ("counter", "gcra", "log")


class Clock:
    """A clock that moves only when told."""

    def __init__(self, ms: int = 1_800_000_000_000) -> None:
        self.ms = ms

    def __call__(self) -> int:
        return self.ms


@dataclass
class Oracle:
    """The limits of one policy, for any number of identities."""

    policy: Policy
    counted: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    free_at: dict[tuple[str, Limit], Fraction] = field(default_factory=dict)

    def decide(self, identity: str, now_ms: int, cost: int = 1) -> Decision:
        limits = self.policy.limits
        admitted = all(self.fits(identity, limit, now_ms, cost) for limit in limits)
        if admitted or self.policy.count_rejected:
            self.counted.setdefault(identity, []).append((now_ms, cost))
            for limit in limits:
                burst, period = Fraction(limit.burst), Fraction(limit.window_ms, limit.number)
                free_at = max(self.free_at.get((identity, limit), Fraction(0)), Fraction(now_ms))
                self.free_at[identity, limit] = min(free_at + cost * period, now_ms + burst * period)
        return Decision(
            admitted,
            now_ms,
            tuple(
                LimitState(
                    self.remaining(identity, limit, now_ms),
                    first(
                        2 * limit.window_ms,
                        lambda ms, limit=limit: self.remaining(identity, limit, now_ms + ms) == most(limit),
                    ),
                    first(
                        2 * limit.window_ms,
                        lambda ms, limit=limit: self.fits(identity, limit, now_ms + ms, cost),
                    )
                    if not admitted
                    else 0,
                )
                for limit in limits
            ),
        )

    def fits(self, identity: str, limit: Limit, now_ms: int, cost: int) -> bool:
        if self.policy.algorithm == "gcra":
            period = Fraction(limit.window_ms, limit.number)
            free_at = max(self.free_at.get((identity, limit), Fraction(0)), Fraction(now_ms))
            return free_at + cost * period <= now_ms + limit.burst * period
        return self.used(identity, limit, now_ms) + cost <= limit.number

    def used(self, identity: str, limit: Limit, now_ms: int) -> Fraction:
        counted = self.counted.get(identity, [])
        window_ms = limit.window_ms
        if self.policy.algorithm == "log":
            return Fraction(sum(cost for ms, cost in counted if now_ms - window_ms < ms))
        window = now_ms // window_ms
        current = sum(cost for ms, cost in counted if ms // window_ms == window)
        previous = sum(cost for ms, cost in counted if ms // window_ms == window - 1)
        return current + Fraction(previous * (window_ms - now_ms % window_ms), window_ms)

    def remaining(self, identity: str, limit: Limit, now_ms: int) -> int:
        none = most(limit)
        return none - first(none, lambda used: used == none or self.fits(identity, limit, now_ms, none - used))


def run_sql(path: Path, statement: str, *values: object) -> list[Any]:
    """The rows that a statement gives on the file of a storage."""
    with closing(sqlite3.connect(path)) as db, db:
        return db.execute(statement, values).fetchall()


def policy(algorithm: str, number: int = 3, window_ms: int = MINUTE_MS, *, rule: str = "a") -> Policy:
    """One limit by any algorithm. A burst of `gcra` is its whole number."""
    return Policy(rule, (Limit(number, window_ms, number * (algorithm == "gcra")),), algorithm)  # type: ignore[arg-type]


def most(limit: Limit) -> int:
    return limit.burst or limit.number


def first(most: int, holds: Callable[[int], bool]) -> int:
    """The smallest number up to `most` for which something holds that holds for all larger ones."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
