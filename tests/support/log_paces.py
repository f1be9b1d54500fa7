"""What random runs on a log consist of: how time passes, who asks, what calls cost.

Pace            windows, and steps of the clock that fill them
small_bounds    bounds that a short run meets
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from quota.deciding.project import Project
from quota.ledger import memory_log, sqlite_log
from quota.rules import total
from quota.terms.costs import Part, Price
from quota.terms.limits import DAY_MS, HOUR_MS, Calendar, Sliding
from support.books import BOOK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quota.terms.limits import Window

LOS_ANGELES, LORD_HOWE, SANTIAGO = "America/Los_Angeles", "Australia/Lord_Howe", "America/Santiago"


@dataclass(frozen=True)
class Pace:
    """How time passes in one run, so that the windows, shortest first, hold some dozens to some hundred charges."""

    windows: tuple[Window, ...]
    steps_ms: tuple[int, ...]
    jumps_ms: tuple[int, ...]


FAST = Pace(
    (
        Sliding(50),
        Sliding(300),
        Sliding(2_000),
        Calendar("quarter-hour", "Asia/Kathmandu"),
        Calendar("hour", LOS_ANGELES),
        Calendar("hour", LORD_HOWE),
    ),
    (0, 0, 0, 1, 1, 2, 5, 30),
    (400, 2_500, -1, -5, -60, -2_400, HOUR_MS, -HOUR_MS, 60 * HOUR_MS),
)
DAILY = Pace(
    (
        Calendar("quarter-hour", LOS_ANGELES),
        Sliding(HOUR_MS),
        Calendar("hour", LORD_HOWE),
        Sliding(DAY_MS),
        Calendar("day", LOS_ANGELES),
        Calendar("day", SANTIAGO),
        Calendar("day", LORD_HOWE),
    ),
    (0, 1, 1_000, 20_000, 60_000, 120_000),
    (DAY_MS, 3 * HOUR_MS, -1, -4_000, -60_000, -HOUR_MS, -5 * HOUR_MS, 26 * HOUR_MS, -20 * HOUR_MS),
)
MONTHLY = Pace(
    (
        Sliding(DAY_MS),
        Calendar("day", SANTIAGO),
        Sliding(7 * DAY_MS),
        Calendar("week", LOS_ANGELES),
        Calendar("week", LORD_HOWE, starts="sunday"),
        Sliding(30 * DAY_MS),
        Calendar("month", LOS_ANGELES),
        Calendar("month", SANTIAGO, 31),
        Calendar("month", "Europe/Berlin", 8),
    ),
    (0, 60_000, HOUR_MS, 3 * HOUR_MS),
    (20 * DAY_MS, -HOUR_MS, -20 * HOUR_MS, 3 * DAY_MS, 70 * DAY_MS),
)
PACES = (FAST, DAILY, DAILY, MONTHLY)

CLOCK_CHANGES = (
    datetime(2026, 3, 7, 20, tzinfo=UTC),  # Los Angeles, forth
    datetime(2026, 10, 31, 20, tzinfo=UTC),  # and back
    datetime(2026, 4, 3, 20, tzinfo=UTC),  # Lord Howe, by half an hour, and Santiago, at midnight, back
    datetime(2026, 9, 5, 12, tzinfo=UTC),  # Santiago, forth: a day without midnight
    datetime(2026, 10, 2, 20, tzinfo=UTC),  # Lord Howe, forth
)
"""A day before clocks change."""

SKEWS_MS = (0, 0, 0, 0, 700, -1_500, -5_001, -40_000, -HOUR_MS, -HOUR_MS - 1, 5_001, 2 * HOUR_MS, 3 * DAY_MS)
"""How far a caller's clock is ahead of the ledger's."""

NUMBERS_OF_LIMITS = (1, 1, 2, 2, 3, 4, 6, 12)
JOBS = ("", "trending", "backfill", "odd|job,%*")
ODD, PAIR, STATUS = "odd,na|me*%", "pair.list", "status.get"
METHODS = ("search.list", "videos.list", "captions.list", "suggest.list", ODD, PAIR, PAIR, STATUS)
PRICES = BOOK._replace(
    methods={**BOOK.methods, PAIR: (Price((Part("units", 7), Part("search", 2))),), STATUS: (Price(()),)}
)
"""The book of the tests, with a call of two buckets and one that is free."""


@contextmanager
def small_bounds(*, small: bool = True) -> Iterator[None]:
    """Bounds so small that a short run meets each of them: answers that are not whole, totals that hold only some of
    what leaves, views that are kept after some entries."""
    project = sys.modules[Project.__module__]
    bounds = {
        (total, "MAX_LEAVING"): 8,
        (total, "READ_LEAVING"): 3,
        (project, "MAX_READ"): 7,
        (project, "KEEP_AFTER"): 5,
        (memory_log, "MAX_UNSEEN"): 6,
        (memory_log, "MAX_NEWER"): 4,
        (sqlite_log, "MAX_UNSEEN"): 6,
    }
    before = {place: getattr(*place) for place in bounds}
    try:
        for (module, name), bound in bounds.items() if small else ():
            setattr(module, name, bound)
        yield
    finally:
        for (module, name), bound in before.items():
            setattr(module, name, bound)
