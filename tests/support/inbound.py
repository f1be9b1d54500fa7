"""A clock, policies and stored rows, for tests of inbound limits."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from quota.inbound.contract import Limit, Policy
from quota.terms.limits import MINUTE_MS

ALGORITHMS = ("counter", "gcra", "log")


class Clock:
    """A clock that moves only when told."""

    def __init__(self, ms: int = 1_800_000_000_000) -> None:
        self.ms = ms

    def __call__(self) -> int:
        return self.ms


def run_sql(path: Path, statement: str, *values: object) -> list[Any]:
    """The rows that a statement gives on the file of a storage."""
    with closing(sqlite3.connect(path)) as db, db:
        return db.execute(statement, values).fetchall()


def policy(algorithm: str, number: int = 3, window_ms: int = MINUTE_MS, *, rule: str = "a") -> Policy:
    """One limit by any algorithm. A burst of `gcra` is its whole number."""
    return Policy(rule, (Limit(number, window_ms, number * (algorithm == "gcra")),), algorithm)  # type: ignore[arg-type]
