"""Time as the ledger has it: whole milliseconds since 1970, and how people read them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime


def host_clock() -> int:
    """The host's clock in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


_ELAPSED = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC) if hasattr(time, "CLOCK_MONOTONIC") else None


def elapsed_s() -> float:
    """Seconds since some moment, also those that a suspended machine slept: to measure how long something took."""
    return time.monotonic() if _ELAPSED is None else time.clock_gettime(_ELAPSED)


def utc(at_ms: int) -> datetime:
    """An aware datetime in UTC, exact to the millisecond."""
    from datetime import UTC, datetime, timedelta

    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at_ms)


def rfc3339(at_ms: int) -> str:
    """`2026-11-21T09:30:00.125Z`."""
    return utc(at_ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")


NEVER = 2**53 - 1
"""A moment that does not come."""

LATEST_MS = 10**14
"""No time that is stored is later: beyond it a sum with a window has no date."""
