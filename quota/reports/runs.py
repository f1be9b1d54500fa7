"""What jobs add to the reports. `quota run` reports a run, the store keeps it, and the dashboard shows it.

Run, RegionOfRun     how one run ended, and each region in it
Bought, stands_out   what the pages of a job brought for their units, and the pages that brought little
Contribution         the parts that another package adds to the page
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from quota.reports.metrics import Sample


@dataclass(frozen=True)
class RegionOfRun:
    """How one region ended in one run. `items`, `pages` and `units` are what this run added.

    done      the pass is complete
    partial   a part of this pass is stored; the next run continues from `cursor`
    skipped   nothing of this pass is stored; the next run starts it
    failed    `error` names the error that ended the pass; the other regions continued
    """

    region: str
    outcome: str
    items: int = 0
    pages: int = 0
    units: int = 0
    cursor: Mapping[str, Any] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Run:
    """How one run ended. `regions` are the regions of this run: after an earlier stop, only the pending ones.

    `attempts` counts the HTTP attempts that were charged, and `units` is their cost. `why` is one line for people.
    `refusal` is the decision that ended it, as `quota charge --json` prints it. The store adds the rest: `ended_ms` and
    `exit_status` are None until the run ends; `key` names the run in an address.
    """

    run: str
    job: str
    outcome: str
    regions: tuple[RegionOfRun, ...] = ()
    units: int = 0
    attempts: int = 0
    refused_by: str | None = None
    retry_at_ms: int | None = None
    why: str = ""
    exit_status: int | None = 0
    refusal: Mapping[str, Any] | None = field(default=None, compare=False)
    project: str = ""
    began_ms: int = 0
    ended_ms: int | None = None
    key: str = ""

    @property
    def causes(self) -> list[str]:
        """The errors of its regions, or else why it ended."""
        return [region.error for region in self.regions if region.error] or [self.why]


class Bought(NamedTuple):
    """What the pages of a job with one page number brought: `new` of their `items` were not in the store before.
    `units` count all attempts, also attempts that brought no page."""

    job: str
    page: int
    pages: int
    items: int
    new: int
    units: int


ENOUGH_NEW, ENOUGH_UNITS = 50, 10
"""With fewer new entries or units, no page stands out."""

CHEAPER_BY = 4


def stands_out(bought: Iterable[Bought]) -> Iterator[str]:
    """A line for each job whose last pages brought at most a quarter of the new entries that the same units bring
    elsewhere."""
    by_job: dict[str, list[Bought]] = {}
    for row in bought:
        by_job.setdefault(row.job, []).append(row)
    for job, rows in by_job.items():
        new, units = sum(row.new for row in rows), sum(row.units for row in rows)
        if new < ENOUGH_NEW or units < ENOUGH_UNITS:
            continue
        rows.sort(key=lambda row: row.page)
        for number in range(1, len(rows)):
            last = rows[number:]
            last_new, last_units = sum(row.new for row in last), sum(row.units for row in last)
            if last_new * units * CHEAPER_BY <= last_units * new and last_units * 10 >= units:
                is_half = abs(last_units * 2 - units) * 50 <= units
                share = "half" if is_half else f"{last_units / units:.0%}"
                pages = _pages([row.page for row in last])
                yield f"{pages} of {job} brought {last_new / new:.0%} of the new entries for {share} of its units"
                break


def _pages(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"page {numbers[0]}"
    return f"pages {numbers[0]}{' and ' if len(numbers) == 2 else ' to '}{numbers[-1]}"


# -- the page ----------------------------------------------------------------------------------------------------------

GROUP = "quota.dashboard"
"""The entry points that add parts to the page. Each is a function that takes the open session and returns a
`Contribution`. The dashboard calls it in a thread of its own, again and again. It may be slow: meanwhile the page shows
the last answer. If it cannot read its data, it raises QuotaError."""

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
