"""The emulated upstream's counts: calls, and units per project, bucket and Pacific day.

This module repeats the prices on purpose. The emulator plays the provider, so it must be able to
disagree with the cost book of the client that it tests.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Any, Literal, NamedTuple
from zoneinfo import ZoneInfo

from quota.terms.limits import DAY_MS, MINUTE_MS

Allocation = Literal["pool", "buckets"]

READ_UNITS = 1
WRITE_UNITS = 50
UNKNOWN = "unknown"  # an invalid call that matches no method; it costs as much as the cheapest method

# Source: developers.google.com/youtube/v3/determine_quota_cost, as of 2026-06-01.
PRICES_UNITS = {
    "captions.list": 50,
    "captions.insert": 400,
    "captions.update": 450,
    "search.list": 100,
    "videos.insert": 100,
    UNKNOWN: 1,
}
_READS = {"list", "get", "getRating", "batchGetStats", "download", "stream"}

# Since 2026-06-01 these methods have a bucket of their own, counted in calls (same source).
OWN_BUCKETS = {
    "search.list": "search",
    "videos.insert": "uploads",
    "videos.batchGetStats": "batch-stats",
}
BUCKET_QUOTA_CALLS = {"search": 100, "uploads": 100, "batch-stats": 10_000}

_PACIFIC = ZoneInfo("America/Los_Angeles")


def price(method: str, allocation: Allocation) -> tuple[str, int]:
    """(bucket, units) that one call of `method` costs."""
    if allocation == "buckets" and method in OWN_BUCKETS:
        return OWN_BUCKETS[method], 1
    is_read = method.rpartition(".")[2] in _READS
    return "units", PRICES_UNITS.get(method, READ_UNITS if is_read else WRITE_UNITS)


class Charge(NamedTuple):
    """One call as upstream booked it. `refused`: the day's quota of `bucket` did not cover it."""

    project: str
    bucket: str
    units: int
    refused: bool


class Minute(NamedTuple):
    """One method's use of one project's bucket in the minute that begins at `start_ms`."""

    start_ms: int
    project: str
    bucket: str
    method: str


KEPT_MS = 3 * DAY_MS


@dataclass
class _Day:
    """One project's use of one bucket on one Pacific day."""

    day: date
    used_units: int = 0


@dataclass
class _Tally:
    requests: int = 0
    units: Counter[str] = field(default_factory=Counter)
    refused_units: Counter[str] = field(default_factory=Counter)


class Meter:
    """Counts the calls and decides which of them the day's quota covers. The caller holds the lock."""

    def __init__(self, allocation: Allocation, quota: int, clock: Callable[[], int]) -> None:
        self.allocation = allocation
        self.now_ms = clock
        self.quota_units = {"units": quota} | (BUCKET_QUOTA_CALLS if allocation == "buckets" else {})
        self.reset()

    def reset(self) -> None:
        self._total = _Tally()
        self._by_method: Counter[str] = Counter()
        self._by_project: defaultdict[str, _Tally] = defaultdict(_Tally)
        self._free: Counter[str] = Counter()
        self._days: dict[tuple[str, str], _Day] = {}
        self._minutes: Counter[Minute] = Counter()

    def count(self, method: str) -> None:
        """Count one API call of any caller, with any outcome."""
        self._total.requests += 1
        self._by_method[method] += 1

    def count_free(self, kind: str) -> None:
        """Count a request that is not a call of this API."""
        self._free[kind] += 1

    def charge(self, project: str, method: str) -> Charge:
        """Book one call. A refused call counts in `units`, because its sender spent them, but it uses none of
        the day's quota, which may still cover cheaper calls."""
        bucket, units = price(method, self.allocation)
        today = self._today(project, bucket)
        refused = today.used_units + units > self.quota_units[bucket]
        if not refused:
            today.used_units += units
            self._note(project, method, bucket, units)
        tally = self._by_project[project]
        tally.requests += 1
        for counts in (self._total, tally):
            counts.units[bucket] += units
            if refused:
                counts.refused_units[bucket] += units
        return Charge(project, bucket, units, refused)

    def _note(self, project: str, method: str, bucket: str, units: int) -> None:
        """Keep the units that the day's quota covered, by the minute, for KEPT_MS."""
        minute_ms = self.now_ms() // MINUTE_MS * MINUTE_MS
        oldest = next(iter(self._minutes), None)
        if oldest is not None and oldest.start_ms < minute_ms - KEPT_MS:
            kept = {key: units for key, units in self._minutes.items() if key.start_ms >= minute_ms - KEPT_MS}
            self._minutes = Counter(kept)
        self._minutes[Minute(minute_ms, project, bucket, method)] += units

    def minutes(self) -> list[tuple[Minute, int]]:
        """The units that the day's quota covered in each minute of the last days, oldest first."""
        return sorted(self._minutes.items())

    def usage(self) -> dict[str, Any]:
        return {
            "requests": self._total.requests,
            "by_method": dict(self._by_method),
            "units": self._per_bucket(self._total.units),
            "refused_units": self._per_bucket(self._total.refused_units),
            "free": dict(self._free),
            "by_project": {
                project: {
                    "requests": tally.requests,
                    "units": self._per_bucket(tally.units),
                    "refused_units": self._per_bucket(tally.refused_units),
                    "remaining_units": {
                        bucket: quota_units - self._today(project, bucket).used_units
                        for bucket, quota_units in self.quota_units.items()
                    },
                }
                for project, tally in self._by_project.items()
            },
        }

    def _per_bucket(self, units: Counter[str]) -> dict[str, int]:
        return {bucket: units[bucket] for bucket in self.quota_units}

    def _today(self, project: str, bucket: str) -> _Day:
        day = datetime.fromtimestamp(self.now_ms() // 1000, _PACIFIC).date()
        today = self._days.get((project, bucket))
        if today is None or today.day != day:
            today = self._days[project, bucket] = _Day(day)
        return today
