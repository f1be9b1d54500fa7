"""Times as the ledger stores them, in whole milliseconds since 1970, and their conversion to readable text."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple
from zoneinfo import ZoneInfo


def host_clock() -> int:
    """The host's clock in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


elapsed_s: Callable[[], float] = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
"""Seconds since an arbitrary moment, for measuring durations. Includes the time that the machine was suspended."""


class SinceBoot(NamedTuple):
    """The time since the machine's start, which no setting of its clock changes. `boot` names the start; "": unknown,
    so that no two times can be compared."""

    boot: str = ""
    ms: int = 0

    def passed_ms(self, since: SinceBoot) -> int | None:
        """The time since an earlier moment; None if the machine was started anew, or nobody knows."""
        return max(0, self.ms - since.ms) if self.boot and self.boot == since.boot else None


UNKNOWN_UPTIME = SinceBoot()


def since_boot() -> SinceBoot:
    """The present time since the machine's start."""
    return SinceBoot(boot_id(), int(elapsed_s() * 1_000))


@cache
def boot_id() -> str:
    """Names this start of the machine; "" if the system does not."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def utc(at_ms: int) -> datetime:
    """An aware datetime in UTC, exact to the millisecond. A time outside 0 to LATEST_MS becomes the nearer end."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=min(max(0, at_ms), LATEST_MS))


def local(at_ms: int) -> datetime:
    """The same in the local zone; in UTC if TZ names no zone, or one that no datetime can hold."""
    try:
        return utc(at_ms).astimezone()
    except ValueError:
        return utc(at_ms)


def rfc3339(at_ms: int) -> str:
    """`2026-11-21T09:30:00.125Z`: a time for programs, in JSON and in lines of the log."""
    return utc(at_ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")


NEVER = 2**53 - 1
"""The time of an event that will not happen."""

LATEST_MS = 10**14
"""The latest time that may be stored. A later one plus a window might be too large for a datetime."""


def moment(at_ms: int, zone: str | None = None) -> str:
    """`2026-11-22T09:00:04+01:00`: a time in the local zone, for people. If upstream's `zone` has another time, it
    follows in brackets.

    It is rounded up to the second, so that a reader who comes back then is not early. A past time has a `stamp`.
    """
    at = local(-(-at_ms // 1_000) * 1_000)
    here = at.isoformat(timespec="seconds")
    there = at.astimezone(ZoneInfo(zone)).isoformat(timespec="seconds") if zone else here
    return here if there == here else f"{here} ({there} in {zone})"


def stamp(at_ms: int) -> str:
    """The time of a record as a `moment`, but rounded down: nothing is said to happen later than it did."""
    return moment(at_ms // 1_000 * 1_000)


def until(at_ms: int | None) -> str:
    """` until` a moment, for the middle of a sentence; empty without a time."""
    return "" if at_ms is None else f" until {moment(at_ms)}"
