"""The parts that other packages add to the page, through the entry-point group `quota.dashboard`.

Each entry point is a function that takes the open session and returns a `Contribution`. The dashboard calls it in a
thread of its own, again and again. It may be slow: meanwhile the page shows the last answer. If it cannot read its
data, it raises QuotaError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from quota.reports.metrics import Sample
from quota.reports.runs import Run

GROUP = "quota.dashboard"

Stand = Literal["waits", "pending", "going", "failed"]
"""Where a job stands in a region: `waits` (this round is done), `pending`, `going` (interrupted), or `failed` last."""


class Region(NamedTuple):
    """Where a job stands in one region (empty: a job without regions), in words in `detail`. `stale`: its last complete
    pass, or else the job's first run, is older than the configuration wants."""

    project: str
    job: str
    region: str
    completed_ms: int | None
    stand: Stand
    detail: str
    next_ms: int | None
    stale: bool = False


class Expected(NamedTuple):
    """A charge that the schedule will make at about `at_ms`."""

    project: str
    bucket: str
    method: str
    job: str
    at_ms: int
    units: int
    calls: int


class LimitAhead(NamedTuple):
    """One limit in the forecast: units (or calls) charged and expected on the present day of `zone`; the ticks that the
    limit will refuse during the forecast, and the time of the first."""

    day_units: int
    zone: str
    refused_ticks: int
    dry_ms: int | None


class Forecast(NamedTuple):
    """The charges that the schedule will make from now to `until_ms`; `limits` by project and name."""

    until_ms: int
    expected: tuple[Expected, ...]
    limits: Mapping[tuple[str, str], LimitAhead]
    scheduled: bool


class Contribution(NamedTuple):
    """The parts of one entry point. `samples` are for `/metrics`, `notes` are lines for people."""

    regions: tuple[Region, ...] = ()
    runs: tuple[Run, ...] = ()
    forecast: Forecast | None = None
    samples: tuple[Sample, ...] = ()
    notes: tuple[str, ...] = ()
