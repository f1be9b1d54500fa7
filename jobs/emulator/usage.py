"""The emulated upstream's counts: calls, and units per project, bucket and Pacific day.

This module repeats the prices on purpose. The emulator plays the provider, so it must be able to
disagree with the cost book of the client that it tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import date, datetime
from typing import Any, Literal, NamedTuple

from quota.errors import ConfigError
from quota.jobs.emulator import replies
from quota.jobs.emulator.replies import Json
from quota.terms.limits import load_zone

Allocation = Literal["pool", "buckets"]

UNKNOWN = "unknown"
"""An invalid call that matches no method."""

READ_UNITS, WRITE_UNITS = 1, 50
"""What other methods cost than those in `methods.toml`."""

_READS = {"list", "get", "getRating", "batchGetStats", "download", "stream"}

BUCKETS: dict[str, Json] = replies.METHODS["buckets"]
BUCKET_OF = {names["method"]: bucket for bucket, names in BUCKETS.items() if "method" in names}


def price(method: str, allocation: Allocation) -> tuple[str, int]:
    """(bucket, units) that one call of `method` costs."""
    if allocation == "buckets" and method in BUCKET_OF:
        return BUCKET_OF[method], 1
    is_read = method.rpartition(".")[2] in _READS
    return "units", replies.METHODS["units"].get(method, READ_UNITS if is_read else WRITE_UNITS)


class Charge(NamedTuple):
    """One call as upstream booked it. `refused`: the day's quota of `bucket` did not cover it."""

    project: str
    bucket: str
    units: int
    refused: bool


class Meter:
    """Counts the calls and decides which of them the day's quota covers. The caller holds the lock."""

    def __init__(self, allocation: Allocation, quota: int, clock: Callable[[], int]) -> None:
        self.allocation = allocation
        self.now_ms = clock
        self.quota_units = {"units": quota}
        if allocation == "buckets":
            self.quota_units |= {bucket: BUCKETS[bucket]["calls"] for bucket in BUCKET_OF.values()}
        try:
            self._zone = load_zone("America/Los_Angeles")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self.by_method: Counter[str] = Counter()  # the calls of all callers, with any outcome
        self._units: Counter[str] = Counter()  # by bucket
        self._day: date | None = None
        self._used: Counter[tuple[str, str]] = Counter()

    def charge(self, project: str, method: str) -> Charge:
        """Book one call. A refused call counts in `units`, because its sender spent them, but it uses none of
        the day's quota, which may still cover cheaper calls."""
        bucket, units = price(method, self.allocation)
        used = self.used_today()
        refused = used[project, bucket] + units > self.quota_units[bucket]
        if not refused:
            used[project, bucket] += units
        self._units[bucket] += units
        return Charge(project, bucket, units, refused)

    def usage(self) -> dict[str, Any]:
        return {
            "requests": self.by_method.total(),
            "by_method": dict(self.by_method),
            "units": {bucket: self._units[bucket] for bucket in self.quota_units},
        }

    def used_today(self) -> Counter[tuple[str, str]]:
        """The units of each project and bucket that the quota of this Pacific day has covered."""
        day = datetime.fromtimestamp(self.now_ms() // 1000, self._zone).date()
        if day != self._day:
            self._day, self._used = day, Counter()
        return self._used
