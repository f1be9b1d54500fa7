"""Times as the ledger stores them, in whole milliseconds since 1970, and their conversion to readable text."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial


def host_clock() -> int:
    """The host's clock in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


elapsed_s: Callable[[], float] = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
"""Seconds since an arbitrary moment, for measuring durations. Includes the time that the machine was suspended."""


def utc(at_ms: int) -> datetime:
    """An aware datetime in UTC, exact to the millisecond. What lies outside of 0 to LATEST_MS is shown as that."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=min(max(0, at_ms), LATEST_MS))


def local(at_ms: int) -> datetime:
    """The same in the local zone; in UTC where TZ names none, or one that no datetime can hold."""
    try:
        return utc(at_ms).astimezone()
    except ValueError:
        return utc(at_ms)


def rfc3339(at_ms: int) -> str:
    """`2026-11-21T09:30:00.125Z`."""
    return utc(at_ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")


NEVER = 2**53 - 1
"""The time of an event that will not happen."""

LATEST_MS = 10**14
"""The latest time that may be stored. A later one plus a window might be too large for a datetime."""


def moment(at_ms: int, now_ms: int) -> str:
    """A time in the local zone, as short as the day allows.

    `14:05` today, `14:05:07` less than a minute ahead, `Sun 08:00` in the next six days, else `31 Dec 08:00`. A future
    time is rounded up, so that a reader who comes back then is not early.
    """
    ahead_ms = at_ms - now_ms
    step_ms = 1_000 if 0 < ahead_ms < 60_000 else 60_000
    at = local((at_ms + (step_ms - 1 if ahead_ms > 0 else 0)) // step_ms * step_ms)
    now = local(now_ms)
    days = (at.date() - now.date()).days
    day = "" if not days else "%a " if 0 < days < 7 else "%d %b "
    return at.strftime(f"{day}%H:%M" if step_ms == 60_000 else f"{day}%H:%M:%S")


def weekday(at_ms: int) -> str:
    """`Sun 22 Nov 09:00`, in the local zone."""
    return local(at_ms).strftime("%a %d %b %H:%M")


def second(at_ms: int) -> str:
    """`21 Nov 10:00:03`, in the local zone."""
    return local(at_ms).strftime("%d %b %H:%M:%S")
