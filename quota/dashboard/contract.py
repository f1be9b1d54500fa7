"""What other packages add to the page, through the entry-point group `quota.dashboard`.

Each entry point is a function that takes the open session and returns a `Contribution`. It is called in a thread of its
own, again and again, and may take its time: the page shows the last answer meanwhile. It raises QuotaError for what it
cannot read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from quota.reports.metrics import Sample
from quota.reports.runs import Run

GROUP = "quota.dashboard"

Stand = Literal["waits", "pending", "going", "failed"]
"""Where a job stands in a region: this round has it, it is still to come, it was interrupted, or it failed last."""


class Region(NamedTuple):
    """Where a job stands in one region, empty for a job without. `detail` says it in words. `stale`: its last complete
    pass, or without one the job's first run, is longer ago than the owner wants."""

    project: str
    job: str
    region: str
    completed_ms: int | None
    stand: Stand
    detail: str
    next_ms: int | None
    stale: bool = False


class Expected(NamedTuple):
    """What the schedule will charge at about `at_ms`."""

    project: str
    bucket: str
    method: str
    job: str
    at_ms: int
    units: int
    calls: int


class LimitAhead(NamedTuple):
    """One limit in the forecast: units (or calls) charged and expected on the present day of `zone`; the ticks that the
    limit will refuse in all of the forecast, and when it first does."""

    day_units: int
    zone: str
    refused_ticks: int
    dry_ms: int | None


class Forecast(NamedTuple):
    """What the schedule will charge from now to `until_ms`; `limits` by project and name."""

    until_ms: int
    expected: tuple[Expected, ...]
    limits: Mapping[tuple[str, str], LimitAhead]
    scheduled: bool


class Contribution(NamedTuple):
    """What one entry point adds. `samples` are for `/metrics`, `notes` are lines for people."""

    regions: tuple[Region, ...] = ()
    runs: tuple[Run, ...] = ()
    forecast: Forecast | None = None
    samples: tuple[Sample, ...] = ()
    notes: tuple[str, ...] = ()
